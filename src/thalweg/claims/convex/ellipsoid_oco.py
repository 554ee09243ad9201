"""Claims about EllipsoidOCO, online convex optimization with a separation oracle.

A contender's ``make`` is called as ``make(game, horizon, **tuned)`` with a `Game` and returns an
object with ``select()`` and ``update(gradient)``; a peer of your own takes one line,
``claim.with_contender(Contender("mine", make=mine))``. All contenders of a seed meet the same set
and the same losses, and regret is against the best fixed point in hindsight, exactly.

Gauge gradient descent and the Newton step on a fixed ball know the set as the method does, by a
separation oracle. Where a projection or a linear minimization is granted besides, projected
gradient descent and the Frank-Wolfe player are controls: they say what these would be worth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from thalweg.common.optional import requires
from thalweg.convex import (
    AffineHull,
    EllipsoidOCO,
    GaugeOGD,
    OnlineFrankWolfe,
    ProjectedOGD,
    SeparationOracle,
    chebyshev_ball,
)
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import (
    ThinEllipsoid,
    drifting_losses,
    portfolio_days,
    thin_ellipsoid,
    thin_polytope,
)

with requires("peers"):
    import clarabel
    import cvxpy as cp
    import daqp

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Game:
    """A convex set, as the players may know it.

    Attributes
    ----------
    separation : SeparationOracle
    start : ndarray of shape (d,)
        A point inside.
    radius, inner_radius : float
        Of a ball around ``start`` that holds the set, and of one inside.
    lipschitz : float
        Bound on the length of gradients.
    project, minimize_linear : callable or None
        Oracles that the method does without.
    """

    separation: SeparationOracle
    start: Array
    radius: float
    inner_radius: float
    lipschitz: float = 1.0
    project: Callable[[Array], Array] | None = None
    minimize_linear: Callable[[Array], Array] | None = None

    def steps(self, horizon: int, scale: float) -> dict[str, Any]:
        """Return what sets the step of an established player."""
        return {
            "radius": self.radius,
            "lipschitz": self.lipschitz,
            "horizon": horizon,
            "scale": scale,
        }


def ellipsoid_oco(game: Game, horizon: int, **options: Any) -> EllipsoidOCO:
    """Return the method, as shipped."""
    return EllipsoidOCO(
        game.separation,
        len(game.start),
        radius=game.radius,
        inner_radius=game.inner_radius,
        feasible_point=game.start,
        lipschitz=game.lipschitz,
        horizon=horizon,
        on_large_grad="rescale",
        **options,
    )


def gauge_ogd(game: Game, horizon: int, scale: float = 1.0) -> GaugeOGD:
    """Return gradient descent on a ball, played through the gauge."""
    return GaugeOGD(game.separation, game.start, **game.steps(horizon, scale))


def projected_ogd(game: Game, horizon: int, scale: float = 1.0) -> ProjectedOGD:
    """Return gradient descent with the projection that the game grants."""
    assert game.project is not None
    return ProjectedOGD(game.project, game.start, **game.steps(horizon, scale))


def frank_wolfe(game: Game, horizon: int, scale: float = 1.0) -> OnlineFrankWolfe:
    """Return the online Frank-Wolfe player."""
    assert game.minimize_linear is not None
    return OnlineFrankWolfe(game.minimize_linear, game.start, **game.steps(horizon, scale))


STEPS = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
OURS = Contender("EllipsoidOCO", make=ellipsoid_oco)
PAPER = Contender("one cut a round", make=partial(ellipsoid_oco, cuts_per_round=1), control=True)
THEORY = Contender(
    "theory's η and β",
    make=partial(ellipsoid_oco, cuts_per_round=1, eta="theory", beta="theory"),
    control=True,
)
FIXED = Contender("Newton on a fixed ball", make=partial(ellipsoid_oco, update_ellipsoid=False))
GAUGE = Contender("gauge OGD", make=gauge_ogd, tune={"scale": STEPS})
WOLFE = Contender(
    "Frank-Wolfe", make=frank_wolfe, tune={"scale": [*STEPS, 100.0, 1e3, 1e4, 1e5]}, control=True
)
PROJECTED = Contender("projected OGD", make=projected_ogd, tune={"scale": STEPS}, control=True)
GAUGE_UNTUNED = Contender("gauge OGD", make=gauge_ogd)
SECONDS = Metric("time per round", better="lower", average="geometric mean", unit="s")
REGRET = Metric("regret", better="lower", curve=("round", "regret"))


@claim(
    method="ellipsoid-oco",
    statement="On a set a thousand times longer than wide, EllipsoidOCO's regret is at most 0.6 of "
    "that of the best peer with a separation oracle",
    metric=REGRET,
    contenders=[OURS, GAUGE, FIXED, WOLFE, PROJECTED, PAPER, THEORY],
    expect=at_most(0.6, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, rounds=100),
        "quick": Scale(seeds=10, tuning_seeds=2, rounds=1_000),
        "full": Scale(seeds=20, tuning_seeds=3, rounds=5_000),
    },
    headline=True,
)
def elongated_set(
    contender: Contender, rng: np.random.Generator, *, rounds: int, **tuned: Any
) -> Measurement:
    """Play linear losses on a rotated ellipsoid in ℝ⁵ with half-axes 1, 1 and three of 1/1000.

    The peers know what the method knows, a separation oracle, and have their step tuned. The
    Newton step on a fixed ball is the method without its ellipsoids. Controls: the projection and
    the linear minimization, granted and tuned; with its largest steps the Frank-Wolfe player
    follows the leader, which on losses with a fixed mean is hard to beat. Then the paper's one cut
    a round, in which the rounds that shrink the ellipsoid are played at the start point, and the
    paper's constants beside.
    """
    return _play_ellipsoid(contender, rng, dim=5, kappa=1_000.0, rounds=rounds, **tuned)


@claim(
    method="ellipsoid-oco",
    statement="EllipsoidOCO's regret depends at most logarithmically on the elongation of the set",
    metric=REGRET,
    contenders=[OURS, GAUGE, FIXED, PROJECTED, PAPER],
    expect=trend(-0.1, 0.1, over="kappa"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, sweep={"kappa": [1.0, 100.0]}, rounds=60),
        "quick": Scale(
            seeds=8, tuning_seeds=1, sweep={"kappa": [1.0, 10.0, 100.0, 1e3, 1e4]}, rounds=500
        ),
        "full": Scale(
            seeds=16, tuning_seeds=2, sweep={"kappa": [1.0, 10.0, 100.0, 1e3, 1e4]}, rounds=2_000
        ),
    },
)
def growth_in_elongation(
    contender: Contender, rng: np.random.Generator, *, kappa: float, rounds: int, **tuned: Any
) -> Measurement:
    """Play the ellipsoid of `elongated_set` with short half-axes of 1/κ.

    The slope of log regret over log κ: a regret that is proportional to κ has slope 1, one that
    is logarithmic has a small one. A start point costs at most its own distance, so every regret
    ends growing where playing the start point is as good. One setting serves a peer at all κ.
    """
    return _play_ellipsoid(contender, rng, dim=5, kappa=kappa, rounds=rounds, **tuned)


@claim(
    method="ellipsoid-oco",
    statement="With the paper's one cut a round, EllipsoidOCO has at most 0.6 of gauge OGD's "
    "regret on a set a thousand times longer than wide",
    metric=REGRET,
    contenders=[
        Contender("one cut a round", make=partial(ellipsoid_oco, cuts_per_round=1)),
        GAUGE,
        Contender("32 cuts a round", make=ellipsoid_oco, control=True),
        Contender("Newton on a fixed ball", make=FIXED.make, control=True),
    ],
    expect=at_most(0.6, of="gauge OGD"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, rounds=100),
        "quick": Scale(seeds=10, tuning_seeds=2, rounds=1_000),
        "full": Scale(seeds=16, tuning_seeds=3, rounds=5_000),
    },
)
def one_cut_a_round(
    contender: Contender, rng: np.random.Generator, *, rounds: int, **tuned: Any
) -> Measurement:
    """Play the problem of `elongated_set` with the published algorithm.

    What several cuts in a round are worth, and what is left of the method without any (the
    control on a fixed ball), is to be read beside it.
    """
    return _play_ellipsoid(contender, rng, dim=5, kappa=1_000.0, rounds=rounds, **tuned)


@claim(
    method="ellipsoid-oco",
    statement="EllipsoidOCO's regret grows at most like the square root of the horizon",
    metric=REGRET,
    contenders=[OURS, PAPER],
    expect=trend(-1.0, 0.6, over="rounds"),
    scales={
        "smoke": Scale(seeds=2, sweep={"rounds": [50, 100]}, dim=3),
        "quick": Scale(seeds=8, sweep={"rounds": [500, 1_000, 2_000, 4_000]}, dim=5),
        "full": Scale(seeds=16, sweep={"rounds": [1_000, 4_000, 16_000, 64_000]}, dim=5),
    },
)
def growth_in_horizon(
    contender: Contender, rng: np.random.Generator, *, rounds: int, dim: int, **tuned: Any
) -> Measurement:
    """Play the ellipsoid with short half-axes of 1/100 for ever longer horizons."""
    return _play_ellipsoid(contender, rng, dim=dim, kappa=100.0, rounds=rounds, **tuned)


@claim(
    method="ellipsoid-oco",
    statement="On a ball, EllipsoidOCO's regret is at most twice that of tuned projected OGD",
    metric=REGRET,
    contenders=[
        OURS,
        Contender("projected OGD", make=projected_ogd, tune={"scale": STEPS}),
        GAUGE,
    ],
    expect=at_most(2.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, rounds=100),
        "quick": Scale(seeds=8, tuning_seeds=2, rounds=1_000),
        "full": Scale(seeds=16, tuning_seeds=3, rounds=5_000),
    },
)
def round_set(
    contender: Contender, rng: np.random.Generator, *, rounds: int, **tuned: Any
) -> Measurement:
    """Play the unit ball of ℝ⁵, where a projection costs nothing and nothing is to be repaired."""
    return _play_ellipsoid(contender, rng, dim=5, kappa=1.0, rounds=rounds, **tuned)


@claim(
    method="ellipsoid-oco",
    statement="On a polytope of 5,000 rows, a round of EllipsoidOCO takes at most a third of the "
    "time of one with a projection",
    metric=SECONDS,
    contenders=[OURS, Contender("projected OGD (DAQP)", make=projected_ogd), GAUGE_UNTUNED],
    expect=at_most(1 / 3, of="projected OGD (DAQP)"),
    scales={
        "smoke": Scale(seeds=2, dim=5, rows=100, rounds=20),
        "quick": Scale(seeds=8, dim=20, rows=5_000, rounds=300),
        "full": Scale(seeds=8, dim=20, rows=5_000, rounds=3_000),
    },
)
def time_on_a_polytope(
    contender: Contender,
    rng: np.random.Generator,
    *,
    dim: int,
    rows: int,
    rounds: int,
    **tuned: Any,
) -> Measurement:
    """Play a polytope in ℝ²⁰, thin in half of the directions.

    The projection is a quadratic program in 20 variables. DAQP, a dual active-set method, is the
    fastest of the solvers tried: OSQP and Clarabel take a hundred times as long. Regret, as an
    extra, is that against the best point in hindsight.
    """
    for_instance, _ = rng.spawn(2)
    polytope = thin_polytope(dim, rows, 100.0, rng=for_instance)
    game = Game(
        SeparationOracle.polytope(polytope.A, polytope.b),
        polytope.start,
        polytope.radius,
        polytope.inner_radius,
        project=polytope_projection(polytope.A, polytope.b),
    )
    losses = drifting_losses(dim, rounds, rng=for_instance)
    best = _linear_minimum(losses.sum(axis=0), polytope.A, polytope.b)
    return _time_rounds(contender.make(game, rounds, **tuned), losses, best)  # type: ignore[misc]


@claim(
    method="ellipsoid-oco",
    statement="On a spectrahedron, a round of EllipsoidOCO takes at most a third of the time of "
    "one with a projection",
    metric=SECONDS,
    contenders=[OURS, Contender("projected OGD (Clarabel)", make=projected_ogd), GAUGE_UNTUNED],
    expect=at_most(1 / 3, of="projected OGD (Clarabel)"),
    scales={
        "smoke": Scale(seeds=2, dim=4, order=5, rounds=10),
        "quick": Scale(seeds=8, dim=10, order=20, rounds=200),
        "full": Scale(seeds=8, dim=10, order=40, rounds=1_000),
    },
)
def time_on_a_spectrahedron(
    contender: Contender,
    rng: np.random.Generator,
    *,
    dim: int,
    order: int,
    rounds: int,
    **tuned: Any,
) -> Measurement:
    """Play {x: I + Σ xᵢ Fᵢ ⪰ 0} with random symmetric Fᵢ, half of them a hundred times larger.

    A cut takes one eigenvector; the projection is a semidefinite program, by Clarabel.
    """
    for_instance, _ = rng.spawn(2)
    sizes = np.where(np.arange(dim) < dim - dim // 2, 1.0, 100.0) / np.sqrt(order)
    halves = for_instance.normal(size=(dim, order, order)) * sizes[:, None, None]
    F0, F = np.eye(order), (halves + halves.mT) / 2
    # ‖Σ xᵢ Fᵢ‖ ≤ 1 holds where ‖x‖ ≤ 1/√(Σ‖Fᵢ‖²); a ball of radius 5 keeps the set bounded.
    inner = 1 / float(np.sqrt(np.sum(np.linalg.norm(F, 2, axis=(1, 2)) ** 2)))
    game = Game(
        SeparationOracle.spectrahedron(F0, F) & SeparationOracle.ball(np.zeros(dim), 5.0),
        np.zeros(dim),
        radius=5.0,
        inner_radius=min(inner, 5.0),
        project=spectrahedron_projection(F0, F),
    )
    losses = drifting_losses(dim, rounds, rng=for_instance)
    return _time_rounds(contender.make(game, rounds, **tuned), losses)  # type: ignore[misc]


@claim(
    method="ellipsoid-oco",
    statement="Choosing a constrained portfolio on real prices, EllipsoidOCO's regret in log "
    "wealth is at most that of the best peer with its oracle",
    metric=Metric("regret in log wealth", better="lower", curve=("day", "log wealth")),
    contenders=[
        OURS,
        GAUGE,
        FIXED,
        Contender("projected OGD (DAQP)", make=projected_ogd, tune={"scale": STEPS}, control=True),
        PAPER,
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, days=40),
        "quick": Scale(seeds=8, tuning_seeds=1, days=500),
        "full": Scale(seeds=16, tuning_seeds=3, days=1_000),
    },
)
def portfolio(
    contender: Contender, rng: np.random.Generator, *, days: int, **tuned: Any
) -> Measurement:
    """Choose daily weights of 20 stocks under limits on weights, sectors and five style factors.

    A seed is a period that starts on a day of its own. Wealth multiplies by ⟨w, r⟩ a day; regret
    is against the best weights in hindsight that keep the limits, kept by daily rebalancing.
    Differences between good portfolios are small against the market's moves: the start point,
    near equal weights, is hard to improve on in this time, by any contender.
    """
    for_instance, _ = rng.spawn(2)
    data = portfolio_days()
    first = int(for_instance.integers(len(data.growth) - days))
    growth = data.growth[first : first + days]
    hull, game = _portfolio_game()
    player = contender.make(game, days, **tuned)  # type: ignore[misc]
    wealth = []
    for day in growth:
        gain = float(day @ hull.lift(player.select()))
        player.update(hull.reduce_gradient(-day / gain))
        wealth.append(np.log(gain))
    best = _best_log_wealth(growth, data.A, data.b)
    curve = (np.arange(1, days + 1), np.cumsum(wealth))
    return Measurement(best - float(np.sum(wealth)), curve, {"best in hindsight": best})


@claim(
    method="ellipsoid-oco",
    statement="A round takes a number of oracle calls that grows only logarithmically with the "
    "dimension, up to 500",
    metric=Metric("oracle calls per round", better="lower"),
    contenders=[OURS, PAPER],
    expect=trend(-1.0, 0.15, over="dim"),
    scales={
        "smoke": Scale(seeds=2, sweep={"dim": [3, 6]}, rounds=20),
        "quick": Scale(seeds=8, sweep={"dim": [5, 20, 80]}, rounds=200),
        "full": Scale(seeds=8, sweep={"dim": [5, 50, 500]}, rounds=400),
    },
)
def calls_per_round(
    contender: Contender, rng: np.random.Generator, *, dim: int, rounds: int, **tuned: Any
) -> Measurement:
    """Count the calls on an ellipsoid whose half-axes are 1 and, for half of them, 1/100.

    The rounds stand at the beginning, where the ellipsoid is cut most: a gauge ends early there,
    as soon as the set turns out to be thin. Time per round is an extra.
    """
    for_instance, _ = rng.spawn(2)
    ellipsoid = thin_ellipsoid(dim, 100.0, n_long=dim - dim // 2, rng=for_instance)
    player = contender.make(_ellipsoid_game(ellipsoid), rounds, **tuned)  # type: ignore[misc]
    started = time.process_time()
    for gradient in drifting_losses(dim, rounds, rng=for_instance):
        _round(player, gradient)
    seconds = time.process_time() - started
    calls = player.n_oracle_calls_ / rounds
    return Measurement(calls, extras={"seconds per round": seconds / rounds})


def _time_rounds(player: Any, losses: Array, best: float | None = None) -> Measurement:
    started = time.process_time()
    played = np.array([_round(player, gradient) for gradient in losses])
    seconds = (time.process_time() - started) / len(losses)
    paid = float(np.sum(played * losses))
    return Measurement(seconds, extras={"paid": paid} if best is None else {"regret": paid - best})


def _play_ellipsoid(
    contender: Contender,
    rng: np.random.Generator,
    *,
    dim: int,
    kappa: float,
    rounds: int,
    **tuned: Any,
) -> Measurement:
    for_instance, _ = rng.spawn(2)
    ellipsoid = thin_ellipsoid(dim, kappa, rng=for_instance)
    losses = drifting_losses(dim, rounds, rng=for_instance)
    player = contender.make(_ellipsoid_game(ellipsoid), rounds, **tuned)  # type: ignore[misc]
    paid = np.cumsum([gradient @ _round(player, gradient) for gradient in losses])
    totals = np.cumsum(losses, axis=0)
    # The minimum of a linear function over the ellipsoid is -‖H^(1/2) g‖.
    regret = paid + np.linalg.norm(totals @ ellipsoid.axes * ellipsoid.half_axes, axis=1)
    calls = getattr(player, "n_oracle_calls_", 0) / rounds
    return Measurement(
        float(regret[-1]),
        (np.arange(1, rounds + 1), regret),
        {"oracle calls per round": calls, "cuts": float(getattr(player, "n_updates_", 0))},
    )


def _ellipsoid_game(ellipsoid: ThinEllipsoid) -> Game:
    return Game(
        SeparationOracle.ellipsoid(ellipsoid.shape, np.zeros(len(ellipsoid.start))),
        ellipsoid.start,
        radius=2.0,
        inner_radius=ellipsoid.inner_radius,
        project=ellipsoid.project,
        minimize_linear=ellipsoid.argmin,
    )


def _round(player: Any, gradient: Array) -> Array:
    point: Array = player.select()
    player.update(gradient)
    return point


def polytope_projection(A: Array, b: Array) -> Callable[[Array], Array]:
    """Return the projection on {x: Ax ≤ b} by DAQP, a dual active-set method."""
    identity = np.eye(A.shape[1])
    below, sense = np.full(len(b), -1e30), np.zeros(len(b), dtype=np.int32)

    def project(x: Array) -> Array:
        solution, _, status, _ = daqp.solve(identity, -x, A, b, below, sense)
        assert status == 1, status
        return np.asarray(solution)

    return project


def spectrahedron_projection(F0: Array, F: Array) -> Callable[[Array], Array]:
    """Return the projection on {x: F0 + Σ xᵢ Fᵢ ⪰ 0} by Clarabel, an interior-point method."""
    dim, rows = len(F), F0.shape[0] * (F0.shape[0] + 1) // 2
    cone = [clarabel.PSDTriangleConeT(len(F0))]
    A = sparse.csc_matrix(-np.array([_scaled_triangle(part) for part in F]).T)
    right = _scaled_triangle(F0)
    assert A.shape == (rows, dim)
    settings = clarabel.DefaultSettings()
    settings.verbose = False

    def project(x: Array) -> Array:
        P = sparse.eye(dim, format="csc")
        solver = clarabel.DefaultSolver(P, -x, A, right, cone, settings)
        return np.asarray(solver.solve().x)

    return project


def _scaled_triangle(matrix: Array) -> Array:
    """Return the upper triangle by columns, off-diagonal entries times √2, as Clarabel wants it."""
    columns, rows = np.tril_indices(len(matrix))
    scaled: Array = matrix[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))
    return scaled


def _linear_minimum(g: Array, A: Array, b: Array) -> float:
    result = linprog(g, A, b, bounds=(None, None))
    assert result.fun is not None, result.message
    return float(result.fun)


@lru_cache(maxsize=1)
def _portfolio_game() -> tuple[AffineHull, Game]:
    data = portfolio_days()
    n = data.growth.shape[1]
    hull = AffineHull.of_equations(np.ones((1, n)), [1.0])
    rows, right = hull.reduce_inequalities(data.A, data.b)
    center, inner_radius = chebyshev_ball(rows, right)
    # Weights between 0 and 0.2 that sum to 1 are within 0.45 of equal weights.
    radius = 0.45 + float(np.linalg.norm(center))
    lengths = np.linalg.norm(hull.reduce_gradient(data.growth), axis=1)
    game = Game(
        SeparationOracle.polytope(rows, right),
        center,
        radius,
        inner_radius,
        lipschitz=float(np.quantile(lengths, 0.99)),
        project=polytope_projection(rows, right),
    )
    return hull, game


def _best_log_wealth(growth: Array, A: Array, b: Array) -> float:
    w = cp.Variable(growth.shape[1])
    wealth = cp.sum(cp.log(growth @ w))
    problem = cp.Problem(cp.Maximize(wealth), [cp.sum(w) == 1, A @ w <= b])
    return float(problem.solve(solver=cp.CLARABEL))
