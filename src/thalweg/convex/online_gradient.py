"""Established players of online convex optimization: projected, gauge and Frank-Wolfe."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.convex.gauge_distance import CheckedOracle, Oracle, gauge_distance

Vector = NDArray[np.float64]


class ProjectedOGD:
    """Online gradient descent with Euclidean projections.

    Parameters
    ----------
    project : callable
        ``project(x) -> ndarray of shape (d,)``, the nearest point of K.
    start : array_like of shape (d,)
        A point of K.
    radius : float
        R, the size of K: steps are scale·R/(G√T).
    lipschitz : float, default 1
        G ≥ ‖gₜ‖.
    horizon : int, optional
        T; if None, round t takes t in its place.
    scale : float, default 1
        Multiple of the step.

    Notes
    -----
    Regret O(GR√T). A round costs one projection.

    References
    ----------
    Zinkevich, "Online convex programming and generalized infinitesimal gradient ascent",
    ICML 2003.

    Examples
    --------
    >>> player = ProjectedOGD(lambda x: np.clip(x, -1, 1), [0.0, 0.0], radius=1.5, horizon=100)
    >>> for _ in range(100):
    ...     w = player.select()
    ...     player.update([1.0, 0.0])
    >>> player.select().round(2).tolist()
    [-1.0, 0.0]
    """

    def __init__(
        self,
        project: Callable[[Vector], ArrayLike],
        start: ArrayLike,
        *,
        radius: float,
        lipschitz: float = 1.0,
        horizon: int | None = None,
        scale: float = 1.0,
    ) -> None:
        self.project = project
        self.x = check_array("start", start, shape=("d",)).copy()
        self.step = GradientStep(radius, lipschitz, horizon, scale)

    def select(self) -> Vector:
        """Return the point to play, of shape (d,)."""
        return self.x.copy()

    def update(self, grad: ArrayLike) -> None:
        """Learn a (sub)gradient at the point played, of shape (d,)."""
        gradient = check_array("grad", grad, shape=self.x.shape)
        self.x = np.asarray(self.project(self.x - self.step() * gradient), dtype=np.float64)


class GaugeOGD:
    """Online gradient descent on a ball around K, played through the gauge of K.

    It needs only a separation oracle, as `EllipsoidOCO` does, but its regret grows like R/r.

    Parameters
    ----------
    separation : callable
        ``separation(u) -> (inside, v)``, as for `EllipsoidOCO`.
    center : array_like of shape (d,)
        A point inside K, best one with a ball around it.
    radius : float
        R of a ball around ``center`` that holds K.
    lipschitz, horizon, scale
        As for `ProjectedOGD`.
    gauge_tol : float, default 1e-8
        Error of a gauge.

    Notes
    -----
    A round costs up to about 2 log₂(R/r) + log₂(1/``gauge_tol``) oracle calls.

    References
    ----------
    Mhammedi, "Efficient projection-free online convex optimization with membership oracle",
    COLT 2022.

    Examples
    --------
    >>> from thalweg.convex import SeparationOracle
    >>> square = SeparationOracle.box([-1.0, -1.0], [1.0, 1.0])
    >>> player = GaugeOGD(square, [0.0, 0.0], radius=1.5, horizon=100)
    >>> for _ in range(100):
    ...     w = player.select()
    ...     player.update([1.0, 0.0])
    >>> player.select().round(2).tolist()
    [-1.0, 0.0]
    """

    def __init__(
        self,
        separation: Oracle,
        center: ArrayLike,
        *,
        radius: float,
        lipschitz: float = 1.0,
        horizon: int | None = None,
        scale: float = 1.0,
        gauge_tol: float = 1e-8,
    ) -> None:
        self.center = check_array("center", center, shape=("d",))
        self.radius = check_number("radius", radius, above=0)
        self.gauge_tol = check_number("gauge_tol", gauge_tol, above=0, below=1)
        self.oracle = CheckedOracle(separation, self.center, 1e-9 * self.radius)
        self.step = GradientStep(radius, lipschitz, horizon, scale)
        self.L = np.diag(np.full(len(self.center), self.radius))
        self.x: Vector = np.zeros(len(self.center))  # in units of the radius
        self._measure()

    @property
    def n_oracle_calls_(self) -> int:
        """Calls of the separation oracle."""
        return self.oracle.n_calls

    def select(self) -> Vector:
        """Return the point to play, of shape (d,)."""
        point: Vector = self.center + self.radius * self.gauge.inside_share * self.x
        return point

    def update(self, grad: ArrayLike) -> None:
        """Learn a (sub)gradient at the point played, of shape (d,)."""
        feedback = check_array("grad", grad, shape=self.x.shape)
        slope = feedback @ self.x
        if self.gauge.subgradient is not None and slope < 0:
            # The subgradient is whitened: one radius in it stands for the slope's.
            feedback = feedback - self.gauge.inside_share * slope * self.gauge.subgradient
        moved = self.x - self.step() / self.radius * feedback
        self.x = moved / max(1.0, math.sqrt(moved @ moved))
        self._measure()

    def _measure(self) -> None:
        self.gauge = gauge_distance(
            self.oracle, self.center, self.L, self.x, self.gauge_tol, find_thin=False
        )


class OnlineFrankWolfe:
    """Online conditional gradient: one linear minimization over K in place of a projection.

    Parameters
    ----------
    minimize_linear : callable
        ``minimize_linear(g) -> ndarray of shape (d,)``, a point of K of least ⟨g, x⟩.
    start : array_like of shape (d,)
        A point of K.
    radius : float
        R: steps of the regularized leader are scale·R/(G T^(3/4)).
    lipschitz, horizon, scale
        As for `ProjectedOGD`.

    Notes
    -----
    Regret O(GR T^(3/4)).

    References
    ----------
    Hazan and Kale, "Projection-free online learning", ICML 2012.

    Examples
    --------
    >>> player = OnlineFrankWolfe(lambda g: -np.sign(g), [0.0, 0.0], radius=1.5, horizon=100)
    >>> for _ in range(100):
    ...     w = player.select()
    ...     player.update([1.0, 0.5])
    >>> bool(player.select() @ [1.0, 0.5] < -1.3)
    True
    """

    def __init__(
        self,
        minimize_linear: Callable[[Vector], ArrayLike],
        start: ArrayLike,
        *,
        radius: float,
        lipschitz: float = 1.0,
        horizon: int | None = None,
        scale: float = 1.0,
    ) -> None:
        self.minimize_linear = minimize_linear
        self.start = check_array("start", start, shape=("d",))
        self.step = GradientStep(radius, lipschitz, horizon, scale, power=0.75)
        self.x = self.start.copy()
        self.total = np.zeros_like(self.x)

    def select(self) -> Vector:
        """Return the point to play, of shape (d,)."""
        return self.x.copy()

    def update(self, grad: ArrayLike) -> None:
        """Learn a (sub)gradient at the point played, of shape (d,)."""
        self.total += check_array("grad", grad, shape=self.x.shape)
        slope = self.step() * self.total + 2 * (self.x - self.start)
        vertex = np.asarray(self.minimize_linear(slope), dtype=np.float64)
        self.x += (vertex - self.x) / math.sqrt(self.step.round)


class GradientStep:
    """The step scale·R/(G Tᵖ), with the round in place of T if it is unknown."""

    def __init__(
        self,
        radius: float,
        lipschitz: float,
        horizon: int | None,
        scale: float,
        power: float = 0.5,
    ) -> None:
        check_number("radius", radius, above=0)
        check_number("lipschitz", lipschitz, above=0)
        self.unit = check_number("scale", scale, above=0) * radius / lipschitz
        self.horizon = None if horizon is None else check_integer("horizon", horizon, at_least=1)
        self.power = power
        self.round = 0

    def __call__(self) -> float:
        """Count a round and return its step."""
        self.round += 1
        return float(self.unit / (self.horizon or self.round) ** self.power)
