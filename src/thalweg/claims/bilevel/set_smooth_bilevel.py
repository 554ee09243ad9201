"""Claims about zeroth-order Clarke hyper-stationarity.

A contender's ``make`` is a solver that returns a point. For one of your own on many followers:
``Contender("mine", make=lambda run, lr: my_solver(run, lr), tune={"lr": [0.1, 1.0]})``, where
``run.fun`` is the hyper-objective, ``run.x0`` the start and ``run.solves`` the budget; see
`thalweg.claims.bilevel.hyper_solvers`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel import (
    HyperObjective,
    LeastSquaresFollower,
    Section,
    Selection,
    TranslatedBoxFollower,
    clarke_report,
    izom,
    set_smoothness_report,
)
from thalweg.claims.bilevel.hyper_solvers import (
    HyperRun,
    cma_es,
    cobyqa,
    penalty_hypergradient,
    py_bobyqa,
    regularized_implicit_gradient,
    zeroth_order,
)
from thalweg.evidence import (
    Contender,
    Measurement,
    Metric,
    Scale,
    at_least,
    at_most,
    claim,
    trend,
)
from thalweg.tasks import MovingInterval, group_interpolation, low_rank_fit

__all__ = [
    "best_case_cost",
    "many_followers",
    "optimistic_rate",
    "pessimistic_rate",
    "regularized_followers",
    "violation_found",
    "violation_growth",
    "worst_case_cleaning",
]

Array = NDArray[np.float64]

BLOCKS = 32  # of iterates, from each of which one is measured
INTERVAL = MovingInterval()

SQUARED = Metric(
    "mean squared Clarke measure",
    better="lower",
    average="geometric mean",
    curve=("step", "squared measure"),
)
RATE_SCALES = {
    "smoke": Scale(seeds=2, sweep={"steps": [100, 400]}),
    "quick": Scale(seeds=10, sweep={"steps": [100, 400, 1_600, 6_400]}),
    "full": Scale(seeds=20, sweep={"steps": [100, 400, 1_600, 6_400, 25_600, 102_400]}),
}


def _mean_squared_measure(rng: np.random.Generator, mode: Any, steps: int) -> Measurement:
    """Run izom with noisy values, and return the mean over iterates of the squared measure."""
    for_iterates, for_contender = rng.spawn(2)

    def noisy(x: Array, tol: float, rng: np.random.Generator) -> float:
        return INTERVAL.value(x, mode) + tol * rng.uniform(-1, 1)

    iterates: list[Array] = [np.array([INTERVAL.x0])]
    izom(
        noisy,
        iterates[0],
        mode=mode,
        maxiter=steps,
        common_random_numbers=False,
        rng=for_contender,
        callback=iterates.append,
    )
    edges = np.linspace(0, steps, min(BLOCKS, steps) + 1).astype(int)
    chosen = for_iterates.integers(edges[:-1], edges[1:])
    settings: dict[str, Any] = {"mode": mode, "delta": steps**-0.25}
    if mode == "pessimistic":
        settings = {"mode": mode, "rho": INTERVAL.rho, "gamma": 0.2}
    exact = partial(INTERVAL.value, mode=mode)
    squares = [clarke_report(exact, iterates[i], **settings).stationarity ** 2 for i in chosen]
    return Measurement(
        max(float(np.mean(squares)), 1e-12),
        curve=(chosen, squares),
        extras={"at the last tenth": float(np.mean(squares[-3:]))},
    )


@claim(
    method="set-smooth-bilevel",
    statement="The expected squared gradient of the Moreau envelope of a nonsmooth pessimistic "
    "hyper-objective falls at least as T^(-1/2)",
    metric=SQUARED,
    contenders=[Contender("IZOM")],
    expect=trend(-2.0, -0.5, over="steps"),
    scales=RATE_SCALES,
    headline=True,
)
def pessimistic_rate(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Measure Clarke stationarity where φ_p has kinks, from values with errors of up to w.

    The lower level is solved by [-1, 1] - sin x; the upper one takes the worst of these. Runs have
    the shipped step size, radius and accuracy for their T, and the errors of values are uniform and
    independent. The paper's output is a random iterate; the value is the mean of its squared
    measure over one iterate of each of 32 equal parts of the run, with less variance than a single
    one. The rate of the paper is an upper bound. Here the iterates on the way fall with it, and
    those that jump to and fro over the kink faster, with the square of the step size.
    """
    return _mean_squared_measure(rng, "pessimistic", steps)


@claim(
    method="set-smooth-bilevel",
    statement="The expected squared least Clarke subgradient of an optimistic hyper-objective "
    "within T^(-1/4) falls at least as T^(-1/2)",
    metric=SQUARED,
    contenders=[Contender("IZOM")],
    expect=trend(-2.0, -0.5, over="steps"),
    scales=RATE_SCALES,
)
def optimistic_rate(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Take the best of the same solutions instead.

    The radius of the measure shrinks with T as in the guarantee. Near a stationary point the
    measure is almost zero: what is left are the iterates on the way there, and their share falls
    as the distance that a run can go in its steps grows.
    """
    return _mean_squared_measure(rng, "optimistic", steps)


VALUE = Metric("optimistic hyper-objective", better="lower", average="geometric mean")
RADII = [0.003, 0.03, 0.1, 0.3, 1.0, 10.0]
STEP_SIZES = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
IMPLICIT = Contender(
    "regularized implicit gradient",
    make=lambda run, mu_and_lr: regularized_implicit_gradient(run, *mu_and_lr),
    # With μ → 0 it selects the solution of least norm, so that the best μ may be no number.
    tune={"mu_and_lr": [(mu, lr) for mu in (1e-6, 1e-3, 1e-1) for lr in (0.01, 0.03, 0.1, 0.3)]},
)


def _follower_scales(tuning_seeds: int) -> dict[str, Scale]:
    return {
        "smoke": Scale(seeds=2, tuning_seeds=1, solves=40),
        "quick": Scale(seeds=10, tuning_seeds=tuning_seeds, solves=400),
        "full": Scale(seeds=20, tuning_seeds=tuning_seeds, solves=800),
    }


def _answer(
    contender: Contender, rng: np.random.Generator, solves: int, settings: dict[str, Any]
) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    problem = low_rank_fit(for_instance)
    phi = HyperObjective(
        LeastSquaresFollower(problem.A, problem.B), problem.upper, problem.grad_y, problem.hess_y
    )
    assert contender.make is not None
    run = HyperRun(phi, problem.x0, solves, for_contender, problem=problem)
    x = contender.make(run, **settings)
    report = clarke_report(phi, x, mode="optimistic", delta=1e-3, n_samples=2)
    return Measurement(phi(x, tol=1e-10), extras={"slope": report.clarke})


@claim(
    method="set-smooth-bilevel",
    statement="With many followers IZOM's optimistic value is at most that of the best established "
    "method at equal lower solves",
    metric=VALUE,
    contenders=[
        Contender("IZOM", make=zeroth_order, tune={"eta": STEP_SIZES}),
        Contender(
            "penalty hypergradient",
            make=penalty_hypergradient,
            tune={"sigma": [0.1, 1.0, 10.0], "lr": [0.01, 0.03, 0.1, 0.3]},
        ),
        IMPLICIT,
        Contender("CMA-ES", make=cma_es, tune={"sigma": RADII}),
        Contender("Py-BOBYQA", make=py_bobyqa, tune={"radius": RADII}),
        Contender("COBYQA", make=cobyqa, tune={"radius": RADII}),
        Contender(
            "Goldstein, fixed radius",
            make=zeroth_order,
            tune={"eps": [1e-4, 1e-3, 1e-2], "eta": STEP_SIZES[:4]},
        ),
    ],
    expect=at_most(1.0, of="best peer"),
    scales=_follower_scales(2),
)
def many_followers(
    contender: Contender, rng: np.random.Generator, *, solves: int, **settings: Any
) -> Measurement:
    """Minimize over 5 variables, with 12 of the follower of which 6 are free.

    All get the same number of lower solves, and are compared by the exact hyper-objective at their
    answers. CMA-ES, Py-BOBYQA and COBYQA get the same values of the hyper-objective as IZOM, more
    accurate ones than IZOM asks for. There are no packages of the gradient methods for singular
    lower levels; they are written from their papers. The fixed radius is Goldstein's method, with
    the same step. The paper claims a guarantee, not speed: this optimistic
    hyper-objective is smooth, so that methods that model it from a few values are ahead where there
    are few variables, and so is the gradient of a penalty.
    """
    return _answer(contender, rng, solves, settings)


@claim(
    method="set-smooth-bilevel",
    statement="With many followers IZOM's optimistic value is at most that of the regularized "
    "implicit gradient, which makes the follower unique",
    metric=VALUE,
    contenders=[Contender("IZOM", make=zeroth_order, tune={"eta": STEP_SIZES}), IMPLICIT],
    expect=at_most(1.0, of="regularized implicit gradient"),
    scales=_follower_scales(4),
)
def regularized_followers(
    contender: Contender, rng: np.random.Generator, *, solves: int, **settings: Any
) -> Measurement:
    """Show what a small ridge in the lower level costs, in the same problem.

    It makes the follower return its solution of least norm, and the leader optimizes that one
    instead of the best. A solve counts one for either, though one of the peer gives a whole
    gradient and one of IZOM half a slope in one direction. Tuned on enough seeds, the peer has
    converged where IZOM is still on its way, and its bias costs less than that. There is no worst
    case to report beside it: the loss has no maximum over an affine set.
    """
    return _answer(contender, rng, solves, settings)


class _ProjectingFollower:
    """The follower that projects (x, 2) on the unit square, and no other follower."""

    constrained = True

    def project(self, x: Array, v: Array) -> Array:
        nearest: Array = np.clip(np.array([x[0], 2.0]), 0, 1)
        return nearest

    def minimize(self, section: Section, x: Array, tol: float, start: Array | None) -> Selection:
        y = self.project(x, np.zeros(2))
        return Selection(section.fun(y), y, 0.0)

    def gradient(self, x: Array, y: Array) -> Array:
        rest: Array = y - np.array([x[0], 2.0])
        return rest

    def size(self, x: Array) -> int:
        return 2


def _minus_sum(x: Array, y: Array) -> float:
    return -float(np.sum(y))


def _violation(
    contender: Contender, rng: np.random.Generator, width: float, pairs: int
) -> tuple[float, Any]:
    """Return the width times the smallest second difference, and the report."""
    assert contender.make is not None
    follower, upper = contender.make()
    domain = [(-width, 0.9 * width)]
    report = set_smoothness_report(follower, upper, domain, n_pairs=pairs, rng=rng)
    return width * report.curvature_pessimistic, report


def _projecting() -> Any:
    return _ProjectingFollower(), _minus_sum


def _moving() -> Any:
    return TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x)), MovingInterval.upper


@claim(
    method="set-smooth-bilevel",
    statement="Under lower-level constraints the ratio of set smoothness grows as the inverse of "
    "the distance, so that no constant fits",
    metric=Metric("largest ratio", better="lower", average="geometric mean"),
    contenders=[
        Contender("projection on a square", make=_projecting),
        Contender("moving interval, no constraints", make=_moving, control=True),
    ],
    expect=trend(-1.2, -0.8, over="width"),
    scales={
        "smoke": Scale(seeds=2, sweep={"width": [1.0, 0.1]}, pairs=10),
        "quick": Scale(seeds=10, sweep={"width": [1.0, 0.3, 0.1, 0.03]}, pairs=40),
        "full": Scale(seeds=20, sweep={"width": [1.0, 0.3, 0.1, 0.03, 0.01]}, pairs=200),
    },
)
def violation_growth(
    contender: Contender, rng: np.random.Generator, *, width: float, pairs: int
) -> Measurement:
    """Sample pairs around a kink of a constrained follower, in ever smaller boxes.

    A follower that projects (x, 2) on the unit square stops following at x = 0. Within a box of
    width d around it the largest ratio is of the order of 1/d, and the second differences of the
    worst case fall without bound: the extras give them times the width. Without constraints, as for
    the moving interval, the ratio stays below 1 in any box.
    """
    curvature, report = _violation(contender, rng, width, pairs)
    return Measurement(
        max(report.L_S, 1e-12),
        extras={
            "second difference times width": curvature,
            "growth": report.growth,
            "found at x": float(report.worst_x[0]),
        },
    )


@claim(
    method="set-smooth-bilevel",
    statement="The report finds the violation by lower-level constraints in at least 95 % of runs",
    metric=Metric("share of reports with a violation", better="higher"),
    contenders=[
        Contender("projection on a square", make=_projecting),
        Contender("moving interval, no constraints", make=_moving, control=True),
    ],
    expect=at_least(0.95),
    scales={
        "smoke": Scale(seeds=2, pairs=20),
        "quick": Scale(seeds=20, pairs=100),
        "full": Scale(seeds=50, pairs=200),
    },
)
def violation_found(contender: Contender, rng: np.random.Generator, *, pairs: int) -> Measurement:
    """Count reports that find that sets are not smooth; the control counts false alarms.

    The box of the variable is 1.9 wide, and the kink a single point of it.
    """
    _, report = _violation(contender, rng, 1.0, pairs)
    return Measurement(
        float(report.violations > 0),
        extras={"violations": float(report.violations), "L_S": report.L_S},
    )


CLEANING_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, solves=40),
    "quick": Scale(seeds=10, tuning_seeds=2, solves=200),
    "full": Scale(seeds=20, tuning_seeds=2, solves=800),
}


def _pessimistic(run: HyperRun, phis: Any) -> Array:
    return zeroth_order(run)


def _optimistic(run: HyperRun, phis: Any) -> Array:
    return zeroth_order(
        HyperRun(phis["optimistic"], run.x0, run.solves, run.rng, mode="optimistic")
    )


def _least_norm(run: HyperRun, phis: Any) -> Array:
    """Minimize the loss of the least-norm interpolator: the follower that does not choose."""
    phi = phis["optimistic"]

    def alone(x: Array, mode: str, tol: float) -> float:
        return float(phi.F(x, phi.follower.solutions.least_norm(phi.follower.rhs(x))))

    return cobyqa(HyperRun(alone, run.x0, run.solves, run.rng), 1.0)


def _cleaned(
    contender: Contender, rng: np.random.Generator, solves: int, settings: dict[str, Any]
) -> tuple[float, float, float, float]:
    """Return the worst and the best loss at the answer, and the test errors there."""
    for_instance, for_contender = rng.spawn(2)
    problem = group_interpolation(for_instance)
    follower = LeastSquaresFollower(problem.features, problem.targets)
    phis = {
        mode: HyperObjective(follower, *problem.upper(mode))
        for mode in ("optimistic", "pessimistic")
    }
    assert contender.make is not None
    run = HyperRun(phis["pessimistic"], np.ones(5), solves, for_contender, mode="pessimistic")
    x = contender.make(run, phis, **settings)
    worst = phis["pessimistic"].value(x, "pessimistic", 1e-10)
    best = phis["optimistic"].value(x, "optimistic", 1e-10)
    return worst.phi, best.phi, problem.test_error(worst.y), problem.test_error(best.y)


@claim(
    method="set-smooth-bilevel",
    statement="On partly wrong labels the pessimistic weights of groups have a worst-case loss of "
    "at most that of the optimistic ones",
    metric=Metric("worst-case validation loss", better="lower", average="geometric mean"),
    contenders=[
        Contender("IZOM, pessimistic", make=_pessimistic),
        Contender("IZOM, optimistic", make=_optimistic),
        Contender("least-norm follower", make=_least_norm),
        Contender(
            "CMA-ES, pessimistic",
            make=lambda run, phis, sigma: cma_es(run, sigma),
            tune={"sigma": RADII},
        ),
        Contender("COBYQA, pessimistic", make=lambda run, phis: cobyqa(run, 1.0)),
        Contender("no weights", make=lambda run, phis: run.x0, control=True),
    ],
    expect=at_most(1.0, of="IZOM, optimistic"),
    scales=CLEANING_SCALES,
)
def worst_case_cleaning(
    contender: Contender, rng: np.random.Generator, *, solves: int, **settings: Any
) -> Measurement:
    """Weigh five groups of labels, some of them wrong, for a follower that interpolates them.

    The follower has 136 quadratic features of the breast cancer data and 40 rows: many
    interpolators. The worst loss is over all of them, less a price of their distance from the one
    of least norm, without which there would be no worst case; the best loss has the price added.
    All start from weights of 1 and have the same number of lower solves. CMA-ES and COBYQA get the
    same pessimistic values; the initial radius of COBYQA is SciPy's, as all lead to one answer.
    What all take away are the wrong labels; beside that, which follower one prepares for makes
    little difference here, and so does the solver. The extras give the best-case loss and the test
    errors of both interpolators.
    """
    worst, best, worst_error, best_error = _cleaned(contender, rng, solves, settings)
    return Measurement(
        worst,
        extras={
            "best-case loss": best,
            "test error of the worst": worst_error,
            "test error of the best": best_error,
        },
    )


@claim(
    method="set-smooth-bilevel",
    statement="The pessimistic weights cost at most a tenth of the best-case loss",
    metric=Metric("best-case validation loss", better="lower", average="geometric mean"),
    contenders=[
        Contender("IZOM, pessimistic", make=_pessimistic),
        Contender("IZOM, optimistic", make=_optimistic),
    ],
    expect=at_most(1.1, of="IZOM, optimistic"),
    scales=CLEANING_SCALES,
)
def best_case_cost(
    contender: Contender, rng: np.random.Generator, *, solves: int, **settings: Any
) -> Measurement:
    """Take the other loss of the same answers: what caution costs if the follower is kind."""
    worst, best, _, _ = _cleaned(contender, rng, solves, settings)
    return Measurement(best, extras={"worst-case loss": worst})
