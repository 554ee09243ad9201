"""Orders of the number of rounds that ℓp-Lipschitz convex optimization takes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires
from thalweg.convex.lp_geometry import check_p


@dataclass(frozen=True)
class DepthReport:
    """Orders of depth, the number of rounds, with constants and logarithms left out.

    Attributes
    ----------
    dim, p, eps
        What they are for: unit ball and Lipschitz constant 1 in ℓp, accuracy ε.
    upper : dict of str to float
        By algorithm: "mirror descent", "euclidean subgradient", "cutting planes", "ball
        acceleration", "smoothed AGD".
    best : str
        The least of them.
    sequential : float
        The least of those that ask one query a round.
    no_gain_below : dict of str to float
        Depths up to which no algorithm of polynomial width gains more than logarithms over a
        sequential one, by where they come from.
    optimal : str
        What is known to be optimal at this ε, or "".
    order_only : bool
        True: never compare these numbers with measured rounds, only their growth.

    Examples
    --------
    >>> report = depth_bounds(10_000, 3.0, 0.1)
    >>> report.best, round(report.upper["ball acceleration"])
    ('ball acceleration', 100)
    """

    dim: int
    p: float
    eps: float
    upper: dict[str, float]
    best: str
    sequential: float
    no_gain_below: dict[str, float]
    optimal: str
    order_only: bool = field(default=True, init=False)

    @property
    def speedup(self) -> float:
        """Order of rounds that width can save: sequential over best."""
        return self.sequential / self.upper[self.best]

    def plot(self, ax: Any = None, *, decades: float = 3.0) -> Any:
        """Plot the upper bounds over ε, around the report's; return the Axes.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
        decades : float, default 3
            Range of ε.
        """
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        accuracies = np.logspace(-decades, -0.01, 60)
        reports = [depth_bounds(self.dim, self.p, eps) for eps in accuracies]
        for name in self.upper:
            ax.loglog(accuracies, [report.upper[name] for report in reports], label=name)
        ax.axvline(self.eps, color="0.7", lw=1)
        ax.set(
            xlabel="accuracy ε", ylabel="order of rounds", title=f"p = {self.p:g}, d = {self.dim}"
        )
        ax.invert_xaxis()
        ax.legend()
        return ax


def depth_bounds(d: int, p: float, eps: float) -> DepthReport:
    r"""Return the orders of depth of the known algorithms, and what is known from below.

    Parameters
    ----------
    d : int
        Dimension.
    p : float in [1, inf]
        Lipschitz constant 1 in ℓp, over the unit ball of ℓp; rescale otherwise.
    eps : float in (0, 1)
        Accuracy.

    Returns
    -------
    DepthReport

    Notes
    -----
    With R₂ = d^(1/2 - 1/p) for p ≥ 2, else 1, and smoothing of width ϱ = ε d^(-1/p), which
    changes values by ε:

    ======================== ============================== ===========================
    mirror descent           ε^(-max(2, p)), log(d)/ε² at 1  none at p = ∞
    Euclidean subgradient    R₂² ε⁻²
    cutting planes           d log(1/ε)
    ball acceleration        (R₂/ϱ)^(2/3)                    d^(1/3) ε^(-2/3) for p ≥ 2
    smoothed AGD             R₂/√(ϱε)
    ======================== ============================== ===========================

    From below, width that is polynomial in d gains no more than logarithms while the sequential
    depth is below d^(1/3) for p = 2 and ∞ (shielded maxima), below √d for p = 2 (the wall
    construction). The paper raises this for all other p in (1, ∞), without exponents in its
    summary: the table gives d^(1/3) as "at least". For p = ∞ ball acceleration is optimal up to
    depth √d, and at ε = d^(-1/4) the optimal depth is √d for all p ≥ 2. The same holds for
    parallel quantum queries, with thresholds of their own.

    References
    ----------
    "Parallel ℓp-Lipschitz convex optimization", NeurIPS 2026. Nemirovski, "On parallel complexity
    of nonsmooth convex optimization", Journal of Complexity 1994. Carmon et al., "ReSQueing
    parallel and private stochastic convex optimization", FOCS 2023.

    Examples
    --------
    >>> depth_bounds(10_000, 2.0, 0.1).upper["ball acceleration"]  # √d at ε = d^(-1/4)
    100.0
    """
    dim = check_integer("d", d, at_least=2)
    p = check_p(p)
    eps = check_number("eps", eps, above=0, below=1)
    inverse = 0.0 if math.isinf(p) else 1 / p
    radius = dim ** max(0.0, 0.5 - inverse)
    # ϱ = ε d^(-1/p); E‖z‖_∞ is logarithmic.
    width = eps * dim**-inverse
    upper = {
        "mirror descent": math.log(dim) / eps**2 if p == 1 else _power(eps, -max(2.0, p)),
        "euclidean subgradient": radius**2 / eps**2,
        "cutting planes": dim * math.log(1 / eps),
        "ball acceleration": (radius / width) ** (2 / 3),
        "smoothed AGD": radius / math.sqrt(width * eps),
    }
    upper = {name: round(value, 12) for name, value in upper.items()}
    sequential = min(
        upper[name] for name in ("mirror descent", "euclidean subgradient", "cutting planes")
    )
    return DepthReport(
        dim=dim,
        p=p,
        eps=eps,
        upper=upper,
        best=min(upper, key=lambda name: upper[name]),
        sequential=sequential,
        no_gain_below=_thresholds(dim, p),
        optimal=_optimal(dim, p, eps, upper["ball acceleration"]),
    )


def _power(base: float, exponent: float) -> float:
    return math.inf if math.isinf(exponent) else base**exponent


def _thresholds(dim: int, p: float) -> dict[str, float]:
    thresholds = {"shielded maxima": dim ** (1 / 3)}
    if p == 2:
        thresholds["wall construction"] = math.sqrt(dim)
    if 1 < p < math.inf and p != 2:
        thresholds["NeurIPS 2026, at least"] = dim ** (1 / 3)
    return thresholds


def _optimal(dim: int, p: float, eps: float, ball: float) -> str:
    if p >= 2 and math.isclose(eps, dim**-0.25, rel_tol=1e-6):
        return "depth √d is optimal at ε = d^(-1/4) up to logarithms"
    if math.isinf(p) and ball <= math.sqrt(dim):
        return "ball acceleration is optimal up to logarithms"
    return ""
