"""Online convex optimization with a separation oracle, on a sequence of ellipsoids."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.convex.covering_ellipsoids import CoveringEllipsoid, project_on_ball, solve
from thalweg.convex.gauge_distance import CheckedOracle, GaugeDistance, Oracle, gauge_distance

Vector = NDArray[np.float64]
Eta = float | Literal["auto", "theory"]

FIRST_HORIZON = 64
LEAST_AXIS_RATIO = 1e-10  # leaves six digits of the shortest half-axis in L
STATE = (
    "center",
    "L",
    "x",
    "metric",
    "feasible",
    "eta",
    "n_rounds",
    "n_updates",
    "n_oracle_calls",
    "next_restart",
)
# A cut through the feasible point itself, on the boundary, is right up to rounding.
CUT_TOLERANCE = 1e-9
# Lengths are compared with the bound up to rounding.
LARGE_GRADIENT = 1.0001


class EllipsoidOCO:
    r"""Player of online convex optimization on a set known by a separation oracle.

    In each round `select` returns a point w of K, and `update` takes a (sub)gradient there. The
    regret Σ⟨gₜ, wₜ - x⟩ against any x in K is Õ(√(dT) + d²), with a factor log(R/r) instead of
    R/r: K may be as thin as it likes.

    Internally an online Newton step moves u over an ellipsoid around K; what is played is the
    gauge projection of u on K. Where K turns out to be thin, the ellipsoid shrinks instead.

    Parameters
    ----------
    separation : callable
        ``separation(u) -> (inside, v)``; outside, v of shape (d,) has ⟨v, u⟩ > ⟨v, w⟩ for all w in
        K. See `SeparationOracle` for the usual sets.
    dim : int
        d ≥ 2.
    radius : float
        R: K is inside the ball of this radius around ``center``.
    inner_radius : float
        r: K holds some ball of this radius. It enters logarithms only, a crude lower bound will
        do.
    feasible_point : array_like of shape (d,)
        A point of K, played in rounds in which the ellipsoid shrinks.
    center : array_like of shape (d,), optional
        By default the feasible point.
    lipschitz : float, default 1
        G ≥ ‖gₜ‖.
    horizon : int, optional
        Rounds T to come. If None, the metric and the step start over at rounds 64, 128, 256, …
        (the ellipsoid is kept).
    eta : float, "auto" or "theory"
        Step η of the Newton step, in units of 1/(GR): min(√(d log(RT/r)/T), c/d) / (GR) with c =
        1/2 for "auto" and 1/10 for "theory".
    beta : float, "auto" or "theory"
        The metric to start from is βI: 1/(ηR²) for "auto" (Ours: it is the least that costs no
        more than the rest of the bound, and moves like gradient descent at first), ηG² for
        "theory".
    gauge_tol : float, default 1e-8
        Error of a gauge.
    cuts_per_round : int or None, default 32
        How often the ellipsoid may shrink in a round before the feasible point is played. The
        paper's is 1; more spend oracle calls in early rounds, and about as many in all, and save
        most of the regret of shrinking (Ours). None sets no limit.
    update_ellipsoid : bool, default True
        False keeps the ball; the regret is then Õ(√(dT) + dR/r), and the center must be in K.
    on_large_grad : {"raise", "rescale"}
        What to do with a gradient longer than ``lipschitz``.

    Attributes
    ----------
    u : ndarray of shape (d,)
        Where the Newton step stands.
    center_, shape_ : ndarray of shape (d,), (d, d)
        The ellipsoid {x: (x - c)ᵀH⁻¹(x - c) ≤ 1} that holds K.
    metric_ : ndarray of shape (d, d)
        The metric Σ.
    n_rounds_, n_updates_, n_oracle_calls_ : int
        Rounds played, cuts of the ellipsoid, calls of the oracle.
    feedback_norm_ : float
        √(g̃ᵀHg̃) of the last gradient that the Newton step was fed; 0 if it was fed none.
    is_shrinking_ : bool
        Whether the round is spent on shrinking: the feasible point is played, and what its
        gradient says is not used.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, the feasible point is not inside, the oracle
        contradicts itself, or a gradient is too long or not finite.
    RuntimeError
        If `select` and `update` do not alternate.

    Notes
    -----
    A gauge costs at most 2 + log₂(8d²/``gauge_tol``) oracle calls and O(d²) beside each; a round
    takes one gauge, one more for each cut, and 1 to 8 Cholesky factorizations, O(d³). Memory is
    O(d²). There are at most 8d² log(R/r) cuts ever.

    The paper's are the gauge, the cuts, the feedback and the Newton step. Ours are "auto" for the
    step and for the metric to start from, several cuts in a round, and the coordinates, in which
    the ellipsoid is the unit ball.

    References
    ----------
    "Online convex optimization with a separation oracle", NeurIPS 2025.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import EllipsoidOCO, SeparationOracle
    >>> needle = SeparationOracle.box([-1.0, -0.001], [1.0, 0.001])
    >>> player = EllipsoidOCO(
    ...     needle, 2, radius=1.5, inner_radius=0.001, feasible_point=[0.0, 0.0], horizon=500
    ... )
    >>> total = 0.0
    >>> for _ in range(500):
    ...     w = player.select()
    ...     gradient = np.array([-0.6, 0.8])  # the loss -0.6 x + 0.8 y
    ...     total += gradient @ w
    ...     player.update(gradient)
    >>> regret = total - 500 * (-0.6 - 0.0008)
    >>> bool(regret < 50), bool(needle(w)[0])
    (True, True)
    """

    def __init__(
        self,
        separation: Oracle,
        dim: int,
        *,
        radius: float,
        inner_radius: float,
        feasible_point: ArrayLike,
        center: ArrayLike | None = None,
        lipschitz: float = 1.0,
        horizon: int | None = None,
        eta: Eta = "auto",
        beta: Eta = "auto",
        gauge_tol: float = 1e-8,
        cuts_per_round: int | None = 32,
        update_ellipsoid: bool = True,
        on_large_grad: Literal["raise", "rescale"] = "raise",
    ) -> None:
        if not callable(separation):
            raise TypeError(f"separation must be callable, got {type(separation).__name__}")
        self.dim = check_integer("dim", dim)
        if self.dim < 2:
            raise ValueError(f"dim must be at least 2, got {dim}: project on the interval instead")
        self.radius = check_number("radius", radius, above=0)
        self.inner_radius = check_number("inner_radius", inner_radius, above=0, at_most=self.radius)
        self.lipschitz = check_number("lipschitz", lipschitz, above=0)
        self.feasible_point = check_array("feasible_point", feasible_point, shape=(self.dim,))
        start = check_array(
            "center", self.feasible_point if center is None else center, shape=(self.dim,)
        )
        self.horizon = None if horizon is None else check_integer("horizon", horizon, at_least=1)
        self.eta, self.beta = _check_step("eta", eta), _check_step("beta", beta)
        self.gauge_tol = check_number("gauge_tol", gauge_tol, above=0, below=1)
        self.cuts_per_round = (
            None
            if cuts_per_round is None
            else check_integer("cuts_per_round", cuts_per_round, at_least=1)
        )
        self.update_ellipsoid = check_choice("update_ellipsoid", update_ellipsoid, (True, False))
        self.on_large_grad = check_choice("on_large_grad", on_large_grad, ("raise", "rescale"))
        self._oracle = CheckedOracle(separation, self.feasible_point, CUT_TOLERANCE * self.radius)
        self._ellipsoid = CoveringEllipsoid(start, self.radius)
        if not self.update_ellipsoid and self._oracle.cut(start) is not None:
            raise ValueError("center must be in the set if update_ellipsoid=False")
        self.max_updates = math.ceil(
            8 * self.dim**2 * max(1.0, math.log(self.radius / self.inner_radius))
        )
        # In whitened coordinates, in which the ellipsoid is the unit ball.
        self._x: Vector = np.zeros(self.dim)
        self._feasible: Vector = (self.feasible_point - start) / self.radius
        self._check_that_the_ellipsoid_holds_the_set()
        self._metric: Vector = np.empty((self.dim, self.dim))
        self._gauge: GaugeDistance | None = None
        self._w: Vector | None = None
        self.n_rounds_ = 0
        self.feedback_norm_ = 0.0
        self.is_shrinking_ = False
        self._next_restart = FIRST_HORIZON if self.horizon is None else None
        self._start_metric(self.horizon or FIRST_HORIZON)

    @property
    def u(self) -> Vector:
        """Where the Newton step stands, in the ellipsoid."""
        point: Vector = self._ellipsoid.center + self._ellipsoid.L @ self._x
        return point

    @property
    def center_(self) -> Vector:
        """Center c of the ellipsoid."""
        return self._ellipsoid.center.copy()

    @property
    def shape_(self) -> Vector:
        """Shape H of the ellipsoid."""
        shape: Vector = self._ellipsoid.L @ self._ellipsoid.L.T
        return shape

    @property
    def metric_(self) -> Vector:
        """The metric Σ of the Newton step, in the units of a squared gradient times η."""
        half = np.linalg.solve(self._ellipsoid.L.T, self._metric)
        metric: Vector = np.linalg.solve(self._ellipsoid.L.T, half.T)
        return metric

    @property
    def n_updates_(self) -> int:
        """Cuts of the ellipsoid."""
        return self._ellipsoid.n_cuts

    @property
    def n_oracle_calls_(self) -> int:
        """Calls of the separation oracle."""
        return self._oracle.n_calls

    def select(self) -> Vector:
        """Return the point w of K to play, of shape (d,)."""
        if self._w is not None:
            raise RuntimeError("select was called twice: update with the gradient first")
        self._gauge = self._measure()
        cuts = 0
        while self._gauge.thin:
            self._cut(self._gauge)
            cuts += 1
            if cuts == self.cuts_per_round:
                break
            self._gauge = self._measure()
        self.is_shrinking_ = self._gauge.thin
        if self.is_shrinking_:
            self._w = self.feasible_point.copy()
        else:
            ray = self._ellipsoid.L @ self._x
            self._w = self._ellipsoid.center + self._gauge.inside_share * ray
        return self._w.copy()

    def update(self, grad: ArrayLike) -> None:
        """Learn a (sub)gradient of the round's loss at what `select` returned, shape (d,)."""
        if self._w is None or self._gauge is None:
            raise RuntimeError("update was called before select")
        gradient = self._check_gradient(grad)
        if self.is_shrinking_:
            self.feedback_norm_ = 0.0
        else:
            self._newton_step(self._feedback(gradient, self._gauge))
        self._w = self._gauge = None
        self.n_rounds_ += 1
        if self.n_rounds_ == self._next_restart:
            self._next_restart *= 2
            self._start_metric(self.n_rounds_)

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` needs to go on bit for bit, between rounds: arrays and numbers.

        Raises
        ------
        RuntimeError
            Within a round, after `select`.
        """
        if self._w is not None:
            raise RuntimeError("get_state was called within a round: update with its gradient")
        return {
            "center": self._ellipsoid.center.copy(),
            "L": self._ellipsoid.L.copy(),
            "x": self._x.copy(),
            "metric": self._metric.copy(),
            "feasible": self._feasible.copy(),
            "eta": self._eta,
            "n_rounds": self.n_rounds_,
            "n_updates": self.n_updates_,
            "n_oracle_calls": self.n_oracle_calls_,
            "next_restart": self._next_restart,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `get_state` of a player with the same arguments returned.

        Raises
        ------
        ValueError
            If an entry is missing, of another shape or not finite.
        """
        missing = sorted(set(STATE) - set(state))
        if missing:
            raise ValueError(f"state must be what get_state returned, it lacks {missing}")
        d = self.dim
        shapes = {"center": (d,), "L": (d, d), "x": (d,), "metric": (d, d), "feasible": (d,)}
        arrays = {
            name: check_array(f"state[{name!r}]", state[name], shape=shape).copy()
            for name, shape in shapes.items()
        }
        self._ellipsoid.center, self._ellipsoid.L = arrays["center"], arrays["L"]
        self._x, self._metric = arrays["x"], arrays["metric"]
        self._feasible = arrays["feasible"]
        self._eta = check_number("state['eta']", state["eta"], above=0)
        self.n_rounds_ = check_integer("state['n_rounds']", state["n_rounds"], at_least=0)
        self._ellipsoid.n_cuts = check_integer("state['n_updates']", state["n_updates"])
        self._oracle.n_calls = check_integer("state['n_oracle_calls']", state["n_oracle_calls"])
        restart = state["next_restart"]
        self._next_restart = (
            None if restart is None else check_integer("state['next_restart']", restart)
        )
        self._w = self._gauge = None

    def _measure(self) -> GaugeDistance:
        ellipsoid = self._ellipsoid
        return gauge_distance(
            self._oracle,
            ellipsoid.center,
            ellipsoid.L,
            self._x,
            self.gauge_tol,
            find_thin=self.update_ellipsoid,
        )

    def _feedback(self, gradient: Vector, gauge: GaugeDistance) -> Vector:
        """Return Lᵀg̃, g̃ = g - 1[⟨g, u - c⟩ < 0] ⟨g, w - c⟩ s."""
        whitened: Vector = self._ellipsoid.L.T @ gradient
        slope = float(whitened @ self._x)
        if gauge.subgradient is not None and slope < 0:
            whitened = whitened - gauge.inside_share * slope * gauge.subgradient
        return whitened

    def _newton_step(self, feedback: Vector) -> None:
        """Σ ← Σ + η g̃g̃ᵀ, u ← u - Σ⁻¹g̃, projected on the ellipsoid in the norm of Σ."""
        self.feedback_norm_ = math.sqrt(feedback @ feedback)
        self._metric += self._eta * np.outer(feedback, feedback)
        self._x = project_on_ball(self._x - solve(self._metric, feedback), self._metric)

    def _cut(self, gauge: GaugeDistance) -> None:
        assert gauge.subgradient is not None
        change = self._ellipsoid.cut(gauge.subgradient)
        self._feasible = change.point(self._feasible)
        self._metric = change.metric(self._metric)
        self._x = project_on_ball(change.point(self._x), self._metric)
        self._check_that_the_ellipsoid_holds_the_set()
        if self.n_updates_ == self.max_updates + 1:
            warnings.warn(
                f"more cuts than 8 d² log(radius/inner_radius) = {self.max_updates}: "
                f"inner_radius={self.inner_radius:g} is too large for this set",
                RuntimeWarning,
                stacklevel=4,
            )
        if self.n_updates_ % (8 * self.dim) == 0 and self._ellipsoid.condition() < LEAST_AXIS_RATIO:
            raise ValueError(
                "separation must describe a set with an interior: the ellipsoid around it "
                "degenerates; use coordinates of its affine hull (see AffineHull)"
            )

    def _check_that_the_ellipsoid_holds_the_set(self) -> None:
        if self._feasible @ self._feasible > 1 + 1e-6:
            raise ValueError(
                "radius must be that of a ball around center that holds the set, got "
                f"{self.radius:g}: the feasible point is outside"
            )

    def _check_gradient(self, grad: ArrayLike) -> Vector:
        gradient = check_array("grad", grad, shape=(self.dim,))
        length = float(np.linalg.norm(gradient))
        if length <= LARGE_GRADIENT * self.lipschitz:
            return gradient
        if self.on_large_grad == "raise":
            raise ValueError(
                f"grad must have length at most lipschitz = {self.lipschitz:g}, got {length:g}"
            )
        return gradient * (self.lipschitz / length)

    def _start_metric(self, horizon: int) -> None:
        d, unit = self.dim, self.lipschitz * self.radius
        kappa = self.radius / self.inner_radius
        rate = math.sqrt(d * math.log(max(math.e, kappa * horizon)) / horizon)
        limits = {"auto": 0.5, "theory": 0.1}
        self._eta = (
            self.eta if not isinstance(self.eta, str) else min(rate, limits[self.eta] / d) / unit
        )
        betas = {"auto": 1 / (self._eta * self.radius**2), "theory": self._eta * self.lipschitz**2}
        beta = self.beta if not isinstance(self.beta, str) else betas[self.beta]
        self._metric = beta * self._ellipsoid.L.T @ self._ellipsoid.L


def _check_step(name: str, value: Any) -> Eta:
    if isinstance(value, str):
        steps: tuple[Eta, ...] = ("auto", "theory")
        return check_choice(name, cast(Eta, value), steps)
    return check_number(name, value, above=0)
