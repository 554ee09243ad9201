"""How nearly a point is stationary in the sense of Clarke, from values of a nonsmooth function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize
from scipy.special import ndtri
from scipy.stats import qmc

from thalweg.bilevel.central_differences import CUBE_ROOT
from thalweg.bilevel.kinked_functions import CheckedValues, least_norm_point, norms_between
from thalweg.bilevel.solution_sets import MODES, HyperObjective, Mode
from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]

MOST_CUTS = 200
PATIENCE = 10  # cuts without a smaller gap: what is left are the errors of differences
KINK_SEARCHES = 8
BISECTIONS = 24


@dataclass(frozen=True, eq=False)
class ClarkeReport:
    """Measures of stationarity at a point.

    Parameters
    ----------
    mode : {"optimistic", "pessimistic"}
    x : ndarray of shape (m,)
    stationarity : float
        The measure of the mode: ``moreau`` if pessimistic, ``clarke`` if optimistic.
    moreau : float
        ‖∇φ_γ(x)‖ = ‖x - x̂‖/γ, the gradient of the Moreau envelope; NaN if optimistic. Some Clarke
        subgradient at x̂ is no larger.
    prox : ndarray of shape (m,) or None
        x̂, the minimizer of φ(z) + ‖z - x‖²/(2γ).
    prox_error : float
        A bound of the error of x̂, from a lower model of φ; NaN if optimistic.
    clarke : float
        The least norm of a Clarke subgradient that was found within δ of x: of gradients, and of
        the segments between gradients on both sides of a kink. NaN without a radius.
    smallest_gradient : float
        That of the sampled gradients alone.
    goldstein : float
        The least norm in the convex hull of all sampled gradients: a far weaker measure, which can
        be zero where every point nearby has a slope.
    gamma, delta : float
        The parameter of the envelope and the radius, NaN if not used.
    points, gradients : ndarray of shape (n, m)
        Sampled points and gradients there.
    n_values : int
        Values of φ.
    """

    mode: Mode
    x: Array
    stationarity: float
    moreau: float
    prox: Array | None
    prox_error: float
    clarke: float
    smallest_gradient: float
    goldstein: float
    gamma: float
    delta: float
    points: Array
    gradients: Array
    n_values: int

    def __str__(self) -> str:
        lines = [f"{self.mode} Clarke stationarity {self.stationarity:.3g}"]
        if self.prox is not None:
            away = float(np.linalg.norm(self.x - self.prox))
            lines.append(
                f"  gradient of the Moreau envelope, gamma = {self.gamma:.3g}: {self.moreau:.3g}; "
                f"the prox is {away:.3g} away (error at most {self.prox_error:.1g})"
            )
        if not math.isnan(self.delta):
            lines.append(
                f"  within {self.delta:.3g}: least Clarke subgradient {self.clarke:.3g}, gradient "
                f"{self.smallest_gradient:.3g}, Goldstein {self.goldstein:.3g}"
            )
        return "\n".join([*lines, f"  from {self.n_values} values"])

    def plot(self, ax: Any = None) -> Any:
        """Draw the norms of the sampled gradients over the distance from x, and the measures.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional

        Returns
        -------
        matplotlib.axes.Axes
        """
        with requires("plot"):
            import matplotlib.pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        distances = np.linalg.norm(self.points - self.x, axis=1)
        ax.plot(distances, np.linalg.norm(self.gradients, axis=1), ".", label="gradients")
        for name, value, style in (
            ("Moreau", self.moreau, "-"),
            ("Clarke", self.clarke, "--"),
            ("Goldstein", self.goldstein, ":"),
        ):
            if not math.isnan(value):
                ax.axhline(value, linestyle=style, color="black", label=f"{name} {value:.2g}")
        ax.set(xlabel="distance from x", ylabel="norm")
        ax.legend()
        return ax


def clarke_report(
    phi: HyperObjective | Callable[..., float],
    x: ArrayLike,
    *,
    mode: Mode,
    rho: float | None = None,
    delta: float | None = None,
    gamma: float | None = None,
    n_samples: int = 64,
    tol: float = 1e-10,
    rng: RNGLike = 0,
) -> ClarkeReport:
    r"""Measure how nearly x is stationary in the sense of Clarke.

    Pessimistic hyper-objectives are ρ-weakly convex, and their measure is the gradient of the
    Moreau envelope. Optimistic ones are weakly concave, and theirs is the distance of 0 to the
    Clarke subgradients at the points near x, not to their convex hull:

    .. math:: \|\nabla \varphi_\gamma(x)\| = \frac{\|x - \hat x\|}{\gamma}, \quad
              \hat x = \arg\min_z \varphi(z) + \frac{\|z - x\|^2}{2 \gamma}, \qquad
              \operatorname{dist}\Big(0, \bigcup_{\|z - x\| \le \delta} \partial \varphi(z)\Big)

    Parameters
    ----------
    phi : HyperObjective or callable
        As `izom` takes it: ``phi(x) -> float``; a parameter ``tol`` is passed ``tol``.
    x : array_like of shape (m,)
    mode : {"optimistic", "pessimistic"}
    rho : float ≥ 0
        The modulus ρ of weak convexity, which the pessimistic mode needs: `set_smoothness_report`
        estimates it.
    delta : float > 0
        The radius, which the optimistic mode needs; if given, the pessimistic one samples too.
    gamma : float in (0, 1/ρ), optional
        By default 0.9/(ρ + 1).
    n_samples : int ≥ 2, default 64
        Points of the ball, x among them.
    tol : float > 0, default 1e-10
        The accuracy of values. Differences are taken over its square root.
    rng : int, Generator or None, default 0
        The source of the scrambled Sobol' points.

    Returns
    -------
    ClarkeReport

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or φ is not finite.

    Notes
    -----
    *Cost.* Optimistic 2m + 1 values for each sample, and as many for each of up to 200 bisections.
    Pessimistic 2m + 2 for each cut of φ, of which some tens are needed; sensible up to m = 10.

    *Ours.* The prox by cutting planes: φ + ρ/2‖· - x‖² is convex, so that cuts bound it from below,
    and the gap to the best value bounds the error. Kinks by bisection between samples whose
    gradients differ, so that the Clarke subgradients at kinks count too. The gradients are central
    differences, and the least norm in a hull is one nonnegative least-squares problem.

    References
    ----------
    H. Chen, J. Li and A. M.-C. So, "Set smoothness unlocks Clarke hyper-stationarity in bilevel
    optimization", NeurIPS 2025.
    J. Zhang, H. Lin, S. Jegelka, S. Sra and A. Jadbabaie, "Complexity of finding stationary points
    of nonconvex nonsmooth functions", ICML 2020, for Goldstein's measure.

    Examples
    --------
    No slope of this function vanishes within 0.95 of (0, 1), and yet the hull of the slopes
    contains 0:

    >>> import numpy as np
    >>> from thalweg.bilevel import clarke_report
    >>> report = clarke_report(
    ...     lambda x: -max(abs(x[0]), 2 * x[1]), [0.0, 1.0], mode="optimistic", delta=0.95,
    ...     n_samples=1024,
    ... )
    >>> f"{report.smallest_gradient:.3f} {report.clarke:.3f} {report.goldstein:.3f}"
    '1.000 0.894 0.000'
    """
    check_choice("mode", mode, MODES)
    x = check_array("x", x, shape=("m",))
    check_integer("n_samples", n_samples, at_least=2)
    check_number("tol", tol, above=0)
    if mode == "optimistic" and delta is None:
        raise ValueError("delta must be a radius > 0 for mode='optimistic', got None")
    if mode == "pessimistic" and rho is None:
        raise ValueError("rho must be a modulus >= 0 for mode='pessimistic', got None")
    values = CheckedValues(phi, mode, tol)
    step = max(math.sqrt(tol), CUBE_ROOT) * max(1.0, float(np.max(np.abs(x), initial=0.0)))
    moreau, prox, prox_error = math.nan, None, math.nan
    points, gradients = np.empty((2, 0, len(x)))
    clarke, smallest, goldstein = math.nan, math.nan, math.nan
    if mode == "pessimistic":
        rho = check_number("rho", rho, at_least=0)
        limit = 1 / rho if rho > 0 else None
        gamma = 0.9 / (rho + 1) if gamma is None else gamma
        gamma = check_number("gamma", gamma, above=0, below=limit)
        prox, prox_error = _prox(values, x, rho, gamma, step)
        moreau = float(np.linalg.norm(x - prox)) / gamma
    if delta is not None:
        delta = check_number("delta", delta, above=0)
        ball = _ball(x, delta, n_samples, as_generator(rng))
        found = [values.linearize(point, step) for point in ball]
        points, gradients = np.array([[each.point, each.slope] for each in found]).swapaxes(0, 1)
        smallest = float(np.min(np.linalg.norm(gradients, axis=1)))
        clarke = min(smallest, _least_at_kinks(values, points, gradients, step))
        goldstein = float(np.linalg.norm(least_norm_point(gradients)))
    return ClarkeReport(
        mode=mode,
        x=x,
        stationarity=moreau if mode == "pessimistic" else clarke,
        moreau=moreau,
        prox=prox,
        prox_error=prox_error,
        clarke=clarke,
        smallest_gradient=smallest,
        goldstein=goldstein,
        gamma=math.nan if mode == "optimistic" or gamma is None else gamma,
        delta=math.nan if delta is None else delta,
        points=points,
        gradients=gradients,
        n_values=values.count,
    )


def _prox(
    phi: CheckedValues, x: Array, rho: float, gamma: float, step: float
) -> tuple[Array, float]:
    """Return the prox of φ at x, by cuts of the convex ψ(d) = φ(x + d) + ρ/2‖d‖², and its error.

    The objective is ψ(d) + σ/2‖d‖², σ = 1/γ - ρ: strongly convex, so that a gap Δ between the best
    value and the model's minimum leaves an error of at most √(2Δ/σ).
    """
    sigma = 1 / gamma - rho
    d, best, best_value = np.zeros_like(x), np.zeros_like(x), math.inf
    cuts, offsets = np.empty((0, len(x))), np.empty(0)
    gap, least_gap, stalled = math.inf, math.inf, 0
    for _ in range(MOST_CUTS):
        value = phi(x + d) + (rho + sigma) / 2 * float(d @ d)
        if value < best_value:
            best, best_value = d, value
        point, value, slope = phi.linearize(x + d, step)
        d = point - x
        psi = value + rho / 2 * float(d @ d)
        slope = slope + rho * d
        cuts = np.vstack((cuts, slope))
        offsets = np.append(offsets, psi - slope @ d)
        d, model = _model_minimum(cuts, offsets, sigma, best)
        gap = max(best_value - model, 0.0)
        stalled = 0 if gap < 0.9 * least_gap else stalled + 1
        least_gap = min(gap, least_gap)
        if gap <= 1e-12 * (1 + abs(best_value)) or stalled >= PATIENCE:
            break
    return x + best, math.sqrt(2 * gap / sigma)


def _model_minimum(cuts: Array, offsets: Array, sigma: float, start: Array) -> tuple[Array, float]:
    """Minimize max_i (offset_i + ⟨cut_i, d⟩) + σ/2‖d‖² over d."""
    top = float(np.max(offsets + cuts @ start))
    options: Any = {"ftol": 1e-14, "maxiter": 200}
    constraint: Any = {
        "type": "ineq",
        "fun": lambda v: v[-1] - offsets - cuts @ v[:-1],
        "jac": lambda _: np.column_stack((-cuts, np.ones(len(cuts)))),
    }
    result = minimize(  # type: ignore[call-overload]
        lambda v: v[-1] + sigma / 2 * float(v[:-1] @ v[:-1]),
        np.append(start, top),
        jac=lambda v: np.append(sigma * v[:-1], 1.0),
        method="SLSQP",
        constraints=constraint,
        options=options,
    )
    d: Array = result.x[:-1]
    return d, float(np.max(offsets + cuts @ d)) + sigma / 2 * float(d @ d)


def _ball(x: Array, radius: float, n: int, rng: np.random.Generator) -> Array:
    """Return x and n - 1 evenly spread points of the ball around it."""
    m = len(x)
    sobol = qmc.Sobol(m + 1, seed=rng).random_base2(max(1, math.ceil(math.log2(n))))[: n - 1]
    normal = ndtri(np.clip(sobol[:, :m], 1e-12, 1 - 1e-12))
    directions = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    inside = x + radius * sobol[:, m:] ** (1 / m) * directions
    return np.vstack((x, inside))


def _least_at_kinks(phi: CheckedValues, points: Array, gradients: Array, step: float) -> float:
    """Return the least norm of a subgradient where segments between samples cross kinks."""
    i, j = np.triu_indices(len(points), 1)
    norms = norms_between(gradients[i], gradients[j])
    least = math.inf
    for k in np.argsort(norms, kind="stable")[:KINK_SEARCHES]:
        if norms[k] >= least:
            break
        pair = [i[k], j[k]]
        least = min(least, _bisect(phi, points[pair], gradients[pair], step))
    return least


def _bisect(phi: CheckedValues, ends: Array, slopes: Array, step: float) -> float:
    """Return the least norm between the gradients at the ends of an ever shorter segment."""
    for _ in range(BISECTIONS):
        if np.linalg.norm(ends[1] - ends[0]) <= 100 * step:
            break
        middle, _, slope = phi.linearize(ends.mean(axis=0), step)
        k = int(np.argmin(norms_between(slopes, slope[None])))
        ends, slopes = np.array([ends[k], middle]), np.array([slopes[k], slope])
    return float(norms_between(slopes[:1], slopes[1:])[0])
