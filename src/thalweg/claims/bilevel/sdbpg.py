"""Claims about dynamic barrier perturbed gradients.

A contender's ``make`` is a solver that returns points of the end of its run. For one of your own:
``Contender("mine", make=lambda trial, lr: my_points(trial, lr), tune={"lr": [0.01, 0.1]})``, where
``trial.problem`` holds the two objectives and the start, ``trial.batch_gradients(x)`` returns
gradients of f and of two batches of g, and ``trial.steps`` is how often it may be called; see
`thalweg.claims.bilevel.barrier_solvers`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.dynamic_barrier import barrier_multiplier
from thalweg.claims.bilevel.barrier_solvers import (
    BarrierTrial,
    Residuals,
    dynamic_barrier,
    min_norm,
    penalty_adam,
    penalty_sgd,
    perturbed,
    perturbed_run,
    projected_conflicts,
    regularized_gradient,
    residuals,
)
from thalweg.claims.bilevel.sparse_digits import sparse_first_layer
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import tanh_selection

__all__ = [
    "bounded_multiplier",
    "iteration_rate",
    "lower_residual",
    "noise_of_the_term",
    "sparse_first_layer",
    "stationarity",
    "survival",
    "variance_reduction",
]

Array = NDArray[np.float64]
EPSILON = Metric("larger residual of stationarity", better="lower", average="geometric mean")
UPPER = Metric("residual of the upper level", better="lower", average="geometric mean")
LOWER = Metric("norm of the lower gradient", better="lower", average="geometric mean")
LARGEST = Metric("largest multiplier", better="lower", average="geometric mean")
NOISE = Metric("standard deviation of the term", better="lower", average="geometric mean")

STEPS = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
LONG_STEPS = [0.01, 0.03, 0.1, 0.3, 1.0]
WEIGHTS = [1.0, 3.0, 10.0, 30.0]


def _trial(rng: np.random.Generator, gradients: int) -> BarrierTrial:
    for_instance, for_contender = rng.spawn(2)
    return BarrierTrial(tanh_selection(for_instance), gradients, 4, 4, for_contender)


def _residuals(
    contender: Contender, rng: np.random.Generator, gradients: int, settings: dict[str, Any]
) -> Residuals:
    trial = _trial(rng, gradients)
    assert contender.make is not None
    return residuals(trial.problem, contender.make(trial, **settings))


def _measurement(value: float, found: Residuals) -> Measurement:
    return Measurement(value, extras={"eps_f": found.eps_f, "eps_g": found.eps_g})


def _paired_barrier(trial: BarrierTrial, lr_and_alpha: tuple[float, float]) -> list[Array]:
    lr, alpha = lr_and_alpha
    return dynamic_barrier(trial, lr=lr, alpha=alpha)


def _pairs(lrs: list[float], alphas: list[float]) -> list[tuple[float, float]]:
    """Return settings of DBGD: it may survive only where it hardly moves, at no number's end."""
    return [(lr, alpha) for lr in lrs for alpha in alphas]


@claim(
    method="sdbpg",
    statement="With independent batches, SDBPG survives, and its larger residual of stationarity "
    "is at most 0.8 of that of dynamic barrier descent, with and without a bound of the multiplier",
    metric=EPSILON,
    contenders=[
        Contender(
            "SDBPG",
            make=perturbed,
            tune={"lr": STEPS, "delta": [1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3]},
        ),
        Contender(
            "DBGD",
            make=_paired_barrier,
            tune={"lr_and_alpha": _pairs([3e-4, 1e-3, *STEPS], [0.1, 0.3, 1.0, 3.0, 10.0])},
        ),
        Contender(
            "DBGD, bounded multiplier",
            make=dynamic_barrier,
            tune={"lr": STEPS, "lam_max": [1.0, 3.0, 10.0, 30.0, 100.0]},
        ),
        Contender("SDBPG, shipped", make=partial(perturbed, lr="auto"), control=True),
        Contender(
            "PR-SDBPG",
            make=partial(perturbed, variant="pr"),
            tune={"lr": STEPS, "rho": [1.0, 3.0, 10.0, 30.0]},
            control=True,
        ),
    ],
    expect=at_most(0.8, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, gradients=1_200),
        "quick": Scale(seeds=12, tuning_seeds=2, gradients=12_000),
        "full": Scale(seeds=20, tuning_seeds=3, gradients=48_000),
    },
    headline=True,
)
def survival(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Choose among the fits of a saturating regression by a second loss, from batches of four.

    Many rows saturate, so that a batch may have a tiny gradient, and the multiplier of plain
    dynamic barrier descent, DBGD, explodes; along another batch the step then leaves the basin.
    Such runs count as infinite; tuned, DBGD survives with steps too small to get far. The measure
    is the ε of (ε, ε)-stationarity, which neither level can improve at the cost of the other,
    averaged over the last fifth. The cheap rival is a bound of the multiplier, tuned as δ is. The
    perturbation buys survival; a tuned bound buys it too, with residuals as small. The controls are
    the method with its defaults, and with a penalty, which reaches smaller lower gradients than all
    of them.
    """
    found = _residuals(contender, rng, gradients, settings)
    return _measurement(found.larger, found)


@claim(
    method="sdbpg",
    statement="The largest multiplier of an SDBPG run is at most a hundredth of that of dynamic "
    "barrier descent",
    metric=LARGEST,
    contenders=[
        Contender("SDBPG", make=partial(perturbed_run, delta=1e-3)),
        Contender("DBGD", make=partial(perturbed_run, delta=1e-300)),
        Contender(
            "SDBPG, adaptive perturbation", make=partial(perturbed_run, delta="auto"), control=True
        ),
    ],
    expect=at_most(0.01, of="DBGD"),
    scales={
        "smoke": Scale(seeds=2, gradients=1_200, lr=0.1),
        "quick": Scale(seeds=20, gradients=12_000, lr=0.1),
        "full": Scale(seeds=20, gradients=48_000, lr=0.1),
    },
)
def bounded_multiplier(
    contender: Contender, rng: np.random.Generator, *, gradients: int, lr: float, **settings: Any
) -> Measurement:
    """Compare the largest multipliers of runs of the same regression, with one step size.

    DBGD is the same code with a perturbation that is too small to be seen. The method runs with its
    default δ.
    """
    trial = _trial(rng, gradients)
    assert contender.make is not None
    _, result = contender.make(trial, lr=lr, **settings)
    return Measurement(result.lam_max_seen, extras={"visits": result.visits})


@claim(
    method="sdbpg",
    statement="The noise of the term λĝ does not grow towards stationarity of the lower level",
    metric=NOISE,
    contenders=[
        Contender("SDBPG", make=partial(barrier_multiplier, alpha=1.0, delta=1e-3)),
        Contender("DBGD", make=partial(barrier_multiplier, alpha=1.0, delta=0.0), control=True),
        Contender(
            "larger δ", make=partial(barrier_multiplier, alpha=1.0, delta=1e-2), control=True
        ),
    ],
    expect=trend(-0.1, 1.0, over="size"),
    scales={
        "smoke": Scale(seeds=2, draws=100, sweep={"size": [0.04, 0.005]}),
        "quick": Scale(seeds=10, draws=20_000, sweep={"size": [0.04, 0.013, 0.005, 0.0015, 5e-4]}),
        "full": Scale(seeds=20, draws=100_000, sweep={"size": [0.04, 0.013, 0.005, 0.0015, 5e-4]}),
    },
)
def noise_of_the_term(
    contender: Contender, rng: np.random.Generator, *, draws: int, size: float
) -> Measurement:
    """Draw gradients of 20 entries: ∇f of norm 0.1, ∇g of the swept norm, at an obtuse angle.

    The noise of both lower batches has norm 0.02. The measure is the root of E‖λĝ' - E λĝ'‖² over
    independent batches. DBGD, a control, has more noise; at this noise level it does not
    explode either, for in 20 dimensions the noise itself keeps ‖ĝ‖ away from 0.
    """
    for_instance, for_contender = rng.spawn(2)
    f, tangent = for_instance.standard_normal((2, 20))
    f *= 0.1 / np.linalg.norm(f)
    tangent -= (tangent @ f) / (f @ f) * f
    g = -f / np.linalg.norm(f) + tangent / np.linalg.norm(tangent)
    g *= size / np.linalg.norm(g)
    batch, other = g + for_contender.standard_normal((2, draws, 20)) * (0.02 / math.sqrt(20))
    assert contender.make is not None
    term = contender.make(batch @ f, (batch * batch).sum(axis=1))[:, None] * other
    return Measurement(float(np.sqrt(term.var(axis=0).sum())))


VARIANCE_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, gradients=2_400),
    "quick": Scale(seeds=10, tuning_seeds=2, gradients=12_000),
    "full": Scale(seeds=15, tuning_seeds=3, gradients=96_000),
}
KINDS = ["storm", "auto"]


@claim(
    method="sdbpg",
    statement="At equal gradients of samples and an equal penalty, VR-PR-SDBPG's residual of the "
    "upper level is at most 0.7 of PR-SDBPG's",
    metric=UPPER,
    contenders=[
        Contender(
            "VR-PR-SDBPG",
            make=partial(perturbed, variant="vr-pr", rho=3.0),
            tune={"lr": STEPS, "vr": KINDS},
        ),
        Contender("PR-SDBPG", make=partial(perturbed, variant="pr", rho=3.0), tune={"lr": STEPS}),
        Contender(
            "penalty, variance reduced",
            make=partial(perturbed, variant="vr-pr", rho=3.0, alpha=1e-12),
            tune={"lr": STEPS, "vr": KINDS},
            control=True,
        ),
    ],
    expect=at_most(0.7, of="PR-SDBPG"),
    scales=VARIANCE_SCALES,
)
def variance_reduction(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Solve the same regression with ρ = 3, which fixes what the lower level gets.

    Steps with variance reduction cost at least twice as much. STORM or SPIDER, whichever the tuning
    prefers. The control has no barrier: what it reaches is due to the variance reduction alone.
    """
    found = _residuals(contender, rng, gradients, settings)
    return _measurement(found.eps_f, found)


@claim(
    method="sdbpg",
    statement="The penalty lowers the norm of the lower gradient to at most half of SDBPG's",
    metric=LOWER,
    contenders=[
        Contender("PR-SDBPG", make=partial(perturbed, variant="pr"), tune={"lr": STEPS}),
        Contender("SDBPG", make=perturbed, tune={"lr": STEPS}),
        Contender("penalty SGD", make=partial(penalty_sgd, rho=10.0), tune={"lr": STEPS}),
    ],
    expect=at_most(0.5, of="SDBPG"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, gradients=4_800),
        "quick": Scale(seeds=10, tuning_seeds=2, gradients=12_000),
        "full": Scale(seeds=15, tuning_seeds=3, gradients=48_000),
    },
)
def lower_residual(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Solve the same regression with the defaults of both variants: δ = 1e-3, and ρ = 10.

    Plain SGD on f + 10g is the same but for the barrier, which is rarely active with ρ ≫ α: what
    the lower level gains is the penalty's.
    """
    found = _residuals(contender, rng, gradients, settings)
    return _measurement(found.eps_g, found)


@claim(
    method="sdbpg",
    statement="At equal gradients of samples, VR-PR-SDBPG's larger residual of stationarity is at "
    "most 0.8 of that of the best other method",
    metric=EPSILON,
    contenders=[
        Contender(
            "VR-PR-SDBPG",
            make=partial(perturbed, variant="vr-pr"),
            tune={"lr": LONG_STEPS, "rho": WEIGHTS, "vr": KINDS},
        ),
        Contender(
            "penalty SGD",
            make=penalty_sgd,
            tune={"lr": LONG_STEPS, "rho": WEIGHTS},
        ),
        Contender(
            "penalty Adam",
            make=penalty_adam,
            tune={"lr": [1e-3, 3e-3, 1e-2, 3e-2, 0.1], "rho": WEIGHTS},
        ),
        Contender(
            "regularized gradient",
            make=regularized_gradient,
            tune={"lr": [0.1, 0.3, 1.0, 3.0, 10.0], "weight": [0.01, 0.1, 1.0, 10.0]},
        ),
        Contender(
            "DBGD, bounded multiplier",
            make=partial(dynamic_barrier, lam_max=10.0),
            tune={"lr": STEPS},
        ),
        Contender(
            "PCGrad", make=projected_conflicts, tune={"lr": [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]}
        ),
        Contender("MGDA", make=min_norm, tune={"lr": [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0]}),
        Contender(
            "penalty, variance reduced",
            make=partial(perturbed, variant="vr-pr", alpha=1e-12),
            tune={"lr": LONG_STEPS, "rho": WEIGHTS, "vr": KINDS},
            control=True,
        ),
    ],
    expect=at_most(0.8, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, gradients=3_600),
        "quick": Scale(seeds=10, tuning_seeds=2, gradients=12_000),
        "full": Scale(seeds=15, tuning_seeds=2, gradients=96_000),
    },
)
def stationarity(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Solve the same regression; penalty weights and step sizes are tuned.

    MGDA and PCGrad treat both objectives alike; MGDA stops at Pareto points, PCGrad near those of
    f + g. The control is the method without its barrier, that is variance reduction on a plain
    penalty, and does the same: what VR-PR-SDBPG gains on SGD is due to the variance reduction, and
    at short budgets Adam on a tuned penalty is as good.
    """
    found = _residuals(contender, rng, gradients, settings)
    return _measurement(found.larger, found)


@claim(
    method="sdbpg",
    statement="The least residual of T steps falls at least as fast as T to -0.45",
    metric=EPSILON,
    contenders=[Contender("SDBPG", make=perturbed_run)],
    expect=trend(-math.inf, -0.45, over="steps"),
    scales={
        "smoke": Scale(seeds=2, sweep={"steps": [100, 400]}),
        "quick": Scale(seeds=8, sweep={"steps": [100, 400, 1600, 6400]}),
        "full": Scale(seeds=15, sweep={"steps": [100, 400, 1600, 6400, 25600]}),
    },
)
def iteration_rate(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Solve the same regression with noise in both gradients, and the orders of the theory.

    ε = T^(-1/2), with 1/ε² samples of f and 1/ε⁴ of g per step, and the δ = ε³ that stops the fall
    of g at ε. The measure is the least of the larger residuals at a hundred points of the run.
    Batch noise is drawn as its mean, so that large batches cost nothing here.
    """
    for_instance, for_contender = rng.spawn(2)
    problem = tanh_selection(for_instance, noise_lower=0.1)
    eps = steps**-0.5
    upper, half = steps, math.ceil(steps**2 / 2)
    trial = BarrierTrial(problem, steps * (upper + 2 * half), upper, half, for_contender)
    assert contender.make is not None
    _, result = contender.make(trial, lr=0.3, delta=eps**3)
    larger = np.maximum(result.history["eps_f"], result.history["eps_g"])
    return Measurement(float(larger.min()), curve=(result.history["nit"], larger))
