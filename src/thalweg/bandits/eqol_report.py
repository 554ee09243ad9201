"""What EQOL sees in a set of contexts: branch, action-dependent radius and optimism deficit."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.bandits.eqol import EQOL, capped_quadratic_bonus, ellipsoid_radius
from thalweg.common.checks import check_array
from thalweg.common.optional import requires

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]


@dataclass(frozen=True)
class EQOLReport:
    """How EQOL sees K contexts in the coming round. Made by `eqol_diagnostics`.

    Parameters
    ----------
    t : int
        The round.
    beta, c1, c2 : float
        The confidence radius and the coefficients of the bonus.
    norm : ndarray of shape (K,)
        s = ‖x‖ in the metric V⁻¹.
    estimate, bonus : ndarray of shape (K,)
        The two parts of the index, in units of the reward.
    radius : ndarray of shape (K,)
        r(x) = min(c₁ s, c₂): the index is the largest xᵀθ over the ellipsoid of this radius.
    capped : ndarray of bool of shape (K,)
        Whether the bonus is c₂ s rather than c₁ s².
    deficit : ndarray of shape (K,)
        max(β s - bonus, 0): how far the index may lie below the mean reward while θ* is in the
        confidence ellipsoid.
    residual : float
        The least upper bound of the deficit over all contexts: β²/(4 c₁) if c₂ ≥ β. Infinite for
        c₂ < β, with which the index of a long context is not quasi-optimistic.
    shortfall : ndarray of shape (K,) or None
        xᵀθ* - index, if θ* is known: negative where the index was optimistic.
    covered : bool or None
        Whether θ* lies in the confidence ellipsoid, if it is known.
    """

    t: int
    beta: float
    c1: float
    c2: float
    norm: Array
    estimate: Array
    bonus: Array
    radius: Array
    capped: NDArray[np.bool_]
    deficit: Array
    residual: float
    shortfall: Array | None = None
    covered: bool | None = None

    @property
    def index(self) -> Array:
        """The estimate plus the bonus, (K,)."""
        index: Array = self.estimate + self.bonus
        return index

    @property
    def regret_bound(self) -> Array:
        """What the general bound charges for playing each arm: bonus + β s + residual, (K,)."""
        charge: Array = self.bonus + self.beta * self.norm + self.residual
        return charge

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the bonus over the norm: EQOL's curve, the arms on it, and OFUL's line."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        s = np.linspace(0, 1.1 * self.norm.max() + 1e-12, 200)
        ax.plot(s, self.beta * s, color="0.6", label="OFUL: β s")
        ax.plot(s, capped_quadratic_bonus(s, self.c1, self.c2), label="EQOL: min(c₁ s², c₂ s)")
        ax.scatter(self.norm, self.bonus, c=self.index, zorder=3, label="arms, by index")
        ax.set(xlabel="norm s in the metric V⁻¹", ylabel="bonus", title=f"round {self.t}")
        ax.legend()
        return ax


def eqol_diagnostics(
    agent: EQOL, contexts: ArrayLike, theta_star: ArrayLike | None = None
) -> EQOLReport:
    """Explain the coming choice of ``agent``: branch, radius and optimism deficit of each context.

    Parameters
    ----------
    agent : EQOL
        It is not changed.
    contexts : array_like of shape (K, d)
    theta_star : array_like of shape (d,), optional
        The true parameter of a simulation, for the realized shortfall and coverage.

    Returns
    -------
    EQOLReport

    Raises
    ------
    TypeError, ValueError
        If an array has the wrong shape or is not finite.

    Notes
    -----
    Costs O(K d²), like ``agent.select``.

    Examples
    --------
    >>> report = eqol_diagnostics(EQOL(2), [[1.0, 0.0], [0.0, 0.1]])
    >>> report.capped
    array([False, False])
    >>> bool(np.all(report.deficit <= report.residual))
    True
    """
    ridge = agent.ridge
    contexts = ridge.check_contexts(contexts)
    s, estimate, beta = ridge.norms(contexts), ridge.predict(contexts), agent.beta
    c1, c2 = agent.coefficients()
    radius = ellipsoid_radius(s, c1, c2)
    bonus = radius * s
    report = EQOLReport(
        t=agent.t,
        beta=float(beta),
        c1=float(c1),
        c2=float(c2),
        norm=s,
        estimate=estimate,
        bonus=bonus,
        radius=radius,
        capped=radius >= c2,
        deficit=np.maximum(beta * s - bonus, 0),
        residual=_residual(float(beta), float(c1), float(c2)),
    )
    if theta_star is None:
        return report
    theta_star = check_array("theta_star", theta_star, shape=(agent.dim,))
    error = theta_star - ridge.theta
    return replace(
        report,
        shortfall=contexts @ theta_star - report.index,
        covered=bool(error @ ridge.V @ error <= beta**2),
    )


def _residual(beta: float, c1: float, c2: float) -> float:
    if c2 < beta or (c1 == 0 and beta > 0):
        return math.inf
    return beta**2 / (4 * c1) if c1 > 0 else 0.0
