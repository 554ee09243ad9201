"""Claims about adaptive proximal gradient: acceleration, active constraints, kinds of penalties."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from thalweg.claims.convex.composite_solvers import (
    Run,
    adagrad_norm,
    adapgm,
    adaprox,
    adaprox_accelerated,
    fista,
    gap,
    ista,
)
from thalweg.convex import L1, Box, ElasticNet, GroupLasso, NuclearNorm, Simplex
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import active_box_least_squares, spectrum_least_squares

NO_PENALTY = L1(0.0)
DISTANCES = [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


@claim(
    method="adaptive-prox",
    statement="On an ill-conditioned smooth convex function the gap of the accelerated variant "
    "falls at least as fast as k^(-1.9), once the step has settled",
    metric=Metric("gap to the optimum", better="lower", average="geometric mean"),
    contenders=[
        Contender("AdaProx accelerated, D = 3", make=partial(adaprox_accelerated, D=3.0)),
        Contender("FISTA, 1/L", make=fista),
        Contender("proximal gradient, 1/L", make=ista),
        Contender("AdaProx, D = 3", make=partial(adaprox, D=3.0), control=True),
        Contender(
            "AdaProx accelerated, D = 30", make=partial(adaprox_accelerated, D=30.0), control=True
        ),
    ],
    expect=trend(-6.0, -1.9, over="steps"),
    scales={
        "smoke": Scale(seeds=2, sweep={"steps": [30, 100]}),
        "quick": Scale(seeds=10, sweep={"steps": [300, 548, 1_000, 1_732, 3_000]}),
        "full": Scale(seeds=20, sweep={"steps": [300, 548, 1_000, 1_732, 3_000, 10_000]}),
    },
)
def acceleration_slope(
    contender: Contender, rng: np.random.Generator, *, steps: int
) -> Measurement:
    """Minimize least squares with eigenvalues i⁻² in 200 dimensions, from a distance of about 14.

    The slope is that of the gap over the number of steps, in logarithms: -1 is what plain steps
    are worth at worst, -2 what acceleration is. With D = 30 the first steps are ten times too
    long, and the accelerated iteration is still recovering from them.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    problem = spectrum_least_squares(for_instance)
    run = Run(
        problem,
        NO_PENALTY,
        np.zeros(len(problem.solution)),
        distance=lambda x: problem(x)[0],
        target=0.0,
        budget=steps,
        smoothness=1.0,
        every=max(1, steps // 20),
    )
    run.finish(contender.make)
    return Measurement(max(run.distance, 1e-300))


BOX = {
    "smoke": Scale(seeds=2, tuning_seeds=1, budget=50),
    "quick": Scale(seeds=10, tuning_seeds=3, budget=2_000),
    "full": Scale(seeds=20, tuning_seeds=4, budget=10_000),
}
TO_THE_TARGET = Metric(
    "gradients to the target",
    better="lower",
    average="geometric mean",
    curve=("gradients", "relative gap"),
)


def _active_box(
    contender: Contender, rng: np.random.Generator, budget: int, **tuned: Any
) -> Measurement:
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    problem = active_box_least_squares(for_instance)
    x0 = np.zeros(problem.A.shape[1])
    scale = problem(x0)[0] - problem.optimum
    run = Run(
        problem,
        Box(-1.0, 1.0),
        x0,
        distance=lambda x: gap(problem(np.clip(x, -1, 1))[0], problem.optimum) / scale,
        target=1e-6,
        budget=budget,
        smoothness=float(np.linalg.norm(problem.A, 2)) ** 2,
    )
    run.finish(contender.make, **tuned)
    counts, _, gaps = zip(*run.curve, strict=True)
    return Measurement(run.cost, curve=(counts, gaps))


@claim(
    method="adaptive-prox",
    statement="Where the gradient does not vanish at the solution, AdaProx, which accumulates "
    "gradient mappings, needs at most half of the gradients of AdaGrad-norm with the same D",
    metric=TO_THE_TARGET,
    contenders=[
        Contender("AdaProx, D = 3", make=partial(adaprox, D=3.0)),
        Contender("AdaGrad-norm, D = 3", make=partial(adagrad_norm, D=3.0)),
        Contender(
            "AdaProx accelerated, D = 3", make=partial(adaprox_accelerated, D=3.0), control=True
        ),
        Contender("AdaPGM", make=adapgm, control=True),
        Contender("FISTA, 1/L", make=fista, control=True),
    ],
    expect=at_most(0.5, of="AdaGrad-norm, D = 3"),
    scales=BOX,
)
def active_box(contender: Contender, rng: np.random.Generator, *, budget: int) -> Measurement:
    """Minimize least squares over a box at whose corner the solution nearly is, to a gap of 10⁻⁶.

    Gradients never vanish there, and the step of AdaGrad-norm falls for ever as 1/√k. D is about a
    third of the distance to the solution. The controls show methods for smooth losses.
    """
    return _active_box(contender, rng, budget)


@claim(
    method="adaptive-prox",
    statement="Where the gradient does not vanish at the solution, AdaProx needs at most half of "
    "the gradients of AdaGrad-norm even if D is tuned for both",
    metric=TO_THE_TARGET,
    contenders=[
        Contender("AdaProx", make=adaprox, tune={"D": DISTANCES}),
        Contender("AdaGrad-norm", make=adagrad_norm, tune={"D": DISTANCES}),
    ],
    expect=at_most(0.5, of="AdaGrad-norm"),
    scales=BOX,
)
def active_box_tuned(
    contender: Contender, rng: np.random.Generator, *, budget: int, **tuned: Any
) -> Measurement:
    """Repeat `active_box` with D tuned for each.

    It does not hold: with a D far beyond the distance to the solution AdaGrad-norm jumps to the
    right corner of the box in a few steps, before its step has become short.
    """
    return _active_box(contender, rng, budget, **tuned)


def _six(rng: np.random.Generator, n: int) -> dict[str, tuple[Any, Any]]:
    """Return for each penalty the shape of the truth and the penalty, by the name of the kind."""
    groups = np.repeat(np.arange(n // 5), 5)
    sparse_truth = np.where(rng.random(n) < 0.1, rng.standard_normal(n), 0.0)
    by_groups = np.where(np.repeat(rng.random(n // 5) < 0.2, 5), rng.standard_normal(n), 0.0)
    side = int(np.sqrt(n))
    low_rank = rng.standard_normal((side, 2)) @ rng.standard_normal((2, side)) / np.sqrt(side)
    shares = rng.dirichlet(np.full(n, 0.1))
    return {
        "l1": (sparse_truth, L1(0.02)),
        "elastic net": (sparse_truth, ElasticNet(0.04, 0.5)),
        "groups": (by_groups, GroupLasso(0.02, groups)),
        "box": (3 * rng.standard_normal(n), Box(-1.0, 1.0)),
        "simplex": (shares, Simplex()),
        "nuclear": (low_rank.reshape(-1), NuclearNorm(0.05, shape=(side, side))),
    }


@claim(
    method="adaptive-prox",
    statement="With one setting for six kinds of penalties and constraints, AdaProx needs at most "
    "three times the gradients of the best peer",
    metric=Metric("gradients to the target", better="lower", average="geometric mean"),
    contenders=[
        Contender("AdaProx, D = 1", make=adaprox),
        Contender("FISTA, 1/L", make=fista),
        Contender("proximal gradient, 1/L", make=ista),
        Contender("AdaGrad-norm", make=adagrad_norm, tune={"D": [0.3, *DISTANCES]}),
        Contender("AdaPGM", make=adapgm),
        Contender("AdaProx accelerated, D = 1", make=adaprox_accelerated, control=True),
    ],
    expect=at_most(3.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, n=25, budget=50),
        "quick": Scale(seeds=10, tuning_seeds=2, n=100, budget=1_000),
        "full": Scale(seeds=20, tuning_seeds=3, n=400, budget=3_000),
    },
)
def six_penalties(
    contender: Contender, rng: np.random.Generator, *, n: int, budget: int, **tuned: Any
) -> Measurement:
    """Minimize noisy least squares with L1, elastic-net, group, box, simplex, nuclear-norm terms.

    The value is the geometric mean over the six of the gradients until the norm of the gradient
    mapping with step 1/L is 10⁻⁴ of the start's. Distances to the solutions differ by an order of
    magnitude, and D is the same: it is far too small for the box, whose solution is far away.
    AdaPGM, which measures the curvature, needs fewer gradients for each of these smooth losses.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    design = for_instance.standard_normal((2 * n, n)) / np.sqrt(2 * n)
    costs: dict[str, float] = {}
    for name, (truth, penalty) in _six(for_instance, n).items():
        target = design @ truth + 0.1 * for_instance.standard_normal(2 * n)
        run = _least_squares_run(design, target, penalty, budget)
        costs[name] = run.finish(contender.make, **tuned).cost
    return Measurement(float(np.exp(np.mean(np.log(list(costs.values()))))), extras=costs)


def _least_squares_run(A: Any, b: Any, penalty: Any, budget: int) -> Run:
    smoothness = float(np.linalg.norm(A, 2)) ** 2
    x0 = penalty.prox(np.zeros(A.shape[1]), 1e-9)

    def squares(x: Any) -> tuple[float, Any]:
        residual = A @ x - b
        return float(residual @ residual) / 2, A.T @ residual

    def mapping(x: Any) -> float:
        moved = penalty.prox(x - squares(x)[1] / smoothness, 1 / smoothness)
        return float(np.linalg.norm(x - moved)) * smoothness

    distance: Callable[[Any], float] = mapping
    start = distance(x0)
    return Run(
        squares,
        penalty,
        x0,
        distance=lambda x: distance(x) / start,
        target=1e-4,
        budget=budget,
        smoothness=smoothness,
        every=2,
    )
