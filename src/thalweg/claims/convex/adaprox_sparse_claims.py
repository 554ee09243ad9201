"""Claims about adaptive proximal gradient on large sparse data, by gradients and by time."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_matrix

from thalweg.claims.convex.composite_solvers import (
    Run,
    adagrad_norm,
    adapgm,
    adaprox,
    adaprox_accelerated,
    fista,
    gap,
)
from thalweg.common.optional import requires
from thalweg.convex import L1, Box, ElasticNet, GroupLasso, NuclearNorm, Simplex
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim
from thalweg.tasks import LinearProblem, sparse_regression

with requires("peers"):
    from skglm import GeneralizedLinearEstimator, penalties
    from skglm.datafits import Logistic, Quadratic
    from skglm.solvers import AndersonCD, ProxNewton
    from sklearn.linear_model import Lasso, LogisticRegression

Array = NDArray[np.float64]

TARGET = 1e-4
EPOCHS = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987]
D_GRID = [0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0]


@lru_cache(maxsize=12)
def _instance(loss: Any, n: int, d: int, seed: int) -> tuple[LinearProblem, float, Any]:
    """Return the problem, its optimum to a thousandth of the target, and its data by columns."""
    problem = sparse_regression(np.random.default_rng(seed), n, d, loss=loss)
    columns = csc_matrix(problem.X)
    coef = _skglm(problem, columns, 50, 1e-9)
    optimum = problem.value(coef) + problem.weight * float(np.abs(coef).sum())
    return problem, optimum, columns


def _skglm(problem: LinearProblem, columns: Any, max_iter: int, tol: float) -> Array:
    """Return skglm's coefficients: coordinate descent, or proximal Newton steps."""
    squared = problem.loss == "squared"
    solver = (AndersonCD if squared else ProxNewton)(
        max_iter=max_iter, tol=tol, fit_intercept=False
    )
    datafit = Quadratic() if squared else Logistic()
    model = GeneralizedLinearEstimator(datafit, penalties.L1(problem.weight), solver)
    with warnings.catch_warnings(action="ignore"):  # of fits that are to stop early
        coef: Array = model.fit(columns, problem.y).coef_.reshape(-1)
    return coef


@lru_cache
def _compile_skglm(loss: Any) -> None:
    """Have Numba compile what is not to be measured."""
    problem = sparse_regression(np.random.default_rng(0), 200, 50, loss=loss)
    _skglm(problem, csc_matrix(problem.X), 10, 1e-4)


def skglm(run: Run) -> None:
    """One fit after the other, each with more iterations; the time is that of the last."""
    problem, columns = run.loss, run.extra
    _compile_skglm(problem.loss)
    for epochs in EPOCHS:
        run.start_clock()
        coef = _skglm(problem, columns, epochs, 0.0)
        run.count = epochs
        run.show(coef)


def scikit_learn(run: Run) -> None:
    """Lasso, or LogisticRegression by liblinear; the time is that of the last fit."""
    problem, columns = run.loss, run.extra
    for epochs in EPOCHS:
        if problem.loss == "squared":
            model = Lasso(alpha=problem.weight, fit_intercept=False, max_iter=epochs, tol=1e-12)
        else:
            model = LogisticRegression(
                solver="liblinear",
                l1_ratio=1,
                C=1 / (len(problem.y) * problem.weight),
                fit_intercept=False,
                max_iter=epochs,
                tol=1e-12,
            )
        run.start_clock()
        coef = model.fit(columns, problem.y).coef_.reshape(-1)
        run.count = epochs
        run.show(coef)


def fista_with_power_iteration(run: Run) -> None:
    """FISTA with 1/L, where finding L by 20 power iterations counts, as 20 gradients."""
    run.smoothness = run.loss.smoothness(20)
    run.count += 20
    fista(run)


def prox_sgd(run: Run, c: float, batches: int = 20) -> None:
    """Take steps c/√k from batches of 5 % of the samples, and show each pass's average."""
    problem = run.loss
    rng = np.random.default_rng(0)
    n, x = len(problem.y), run.x0
    k = 0
    while run.count < run.budget:
        average = np.zeros_like(x)
        for rows in np.array_split(rng.permutation(n), batches):
            k += 1
            alpha = c / math.sqrt(k)
            x = run.penalty.prox(x - alpha * problem.batch_gradient(x, rows), alpha)
            average += x / batches
        run.count += 1
        run.show(x, average)


def _sparse_run(
    loss: Any, contender: Contender, rng: np.random.Generator, n: int, d: int, **settings: Any
) -> Run:
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    tuned = {name: settings.pop(name) for name in ("c", "D") if name in settings}
    problem, optimum, columns = _instance(loss, n, d, int(for_instance.integers(2**31)))
    penalty = L1(problem.weight)

    def objective(x: Array) -> float:
        return problem.value(x) + penalty(x)

    x0 = np.zeros(d)
    scale = objective(x0) - optimum
    run = Run(
        problem,
        penalty,
        x0,
        distance=lambda x: gap(objective(x), optimum) / scale,
        target=TARGET,
        every=2,
        extra=columns,
        **settings,
    )
    run.start_clock()
    return run.finish(contender.make, **tuned)


def _by_gradients(
    loss: Any, contender: Contender, rng: np.random.Generator, **parameters: Any
) -> Measurement:
    run = _sparse_run(loss, contender, rng, **parameters)
    counts, _, gaps = zip(*run.curve, strict=True)
    return Measurement(run.cost, curve=(counts, gaps))


def _by_time(
    loss: Any, contender: Contender, rng: np.random.Generator, **parameters: Any
) -> Measurement:
    run = _sparse_run(loss, contender, rng, **parameters)
    _, seconds, gaps = zip(*run.curve, strict=True)
    return Measurement(run.cpu_cost, curve=(seconds, gaps))


GRADIENTS = Metric(
    "gradients to the target",
    better="lower",
    average="geometric mean",
    curve=("passes over the data", "relative gap"),
)
SECONDS = Metric(
    "CPU time to the target",
    better="lower",
    average="geometric mean",
    unit="s",
    curve=("CPU seconds", "relative gap"),
)
ADAPROX = Contender("AdaProx, D = 1", make=adaprox)
ACCELERATED = Contender("AdaProx accelerated, D = 1", make=adaprox_accelerated, control=True)
FIRST_ORDER = [
    Contender("FISTA, 1/L by power iteration", make=fista_with_power_iteration),
    Contender("AdaPGM", make=adapgm),
    Contender("AdaGrad-norm", make=adagrad_norm, tune={"D": D_GRID}),
    Contender(
        "proximal SGD, c/√k",
        make=prox_sgd,
        tune={"c": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]},
    ),
]
COORDINATES = [
    Contender("skglm", make=skglm),
    Contender("scikit-learn", make=scikit_learn),
]
SIZES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, n=300, d=100, budget=20),
    "quick": Scale(seeds=8, tuning_seeds=1, n=3_000, d=1_500, budget=500),
    "full": Scale(seeds=8, tuning_seeds=1, n=100_000, d=50_000, budget=400),
}


@claim(
    method="adaptive-prox",
    statement="On a large sparse lasso AdaProx, without tuning, needs at most ten times the "
    "gradients of the best first-order peer",
    metric=GRADIENTS,
    contenders=[ADAPROX, *FIRST_ORDER, ACCELERATED],
    expect=at_most(10.0, of="best peer"),
    scales=SIZES,
)
def sparse_lasso_gradients(
    contender: Contender, rng: np.random.Generator, **parameters: Any
) -> Measurement:
    """Fit a sparse lasso, of 100,000 × 50,000 data at scale full, to 10⁻⁴ of the gap at zero.

    A pass of proximal SGD over the data counts as one gradient, and so does a power iteration.
    Coordinate descent computes no gradients: see `sparse_lasso_time`. With D = 1, a fraction of the
    distance to the solution, the first steps are short; AdaPGM, which measures the curvature, is an
    order of magnitude faster.
    """
    return _by_gradients("squared", contender, rng, **parameters)


@claim(
    method="adaptive-prox",
    statement="On a large sparse lasso AdaProx, without tuning, needs at most four times the CPU "
    "time of FISTA, which has to find the Lipschitz constant",
    metric=SECONDS,
    contenders=[ADAPROX, *FIRST_ORDER, *COORDINATES, ACCELERATED],
    expect=at_most(4.0, of="FISTA, 1/L by power iteration"),
    scales=SIZES,
)
def sparse_lasso_time(
    contender: Contender, rng: np.random.Generator, **parameters: Any
) -> Measurement:
    """Repeat `sparse_lasso_gradients` with the CPU time until the target, on one thread.

    Coordinate descent is what to use here: skglm works on the few features that matter, and no
    method that takes full gradients comes near. The fits of skglm and scikit-learn are repeated
    with more iterations until they arrive, and the time is that of the last fit.
    """
    return _by_time("squared", contender, rng, **parameters)


@claim(
    method="adaptive-prox",
    statement="On a large sparse logistic regression AdaProx, without tuning, needs at most ten "
    "times the gradients of the best first-order peer",
    metric=GRADIENTS,
    contenders=[ADAPROX, *FIRST_ORDER, ACCELERATED],
    expect=at_most(10.0, of="best peer"),
    scales=SIZES,
)
def sparse_logistic_gradients(
    contender: Contender, rng: np.random.Generator, **parameters: Any
) -> Measurement:
    """Fit a sparse logistic regression in the setting of `sparse_lasso_gradients`."""
    return _by_gradients("logistic", contender, rng, **parameters)


@claim(
    method="adaptive-prox",
    statement="On a large sparse logistic regression AdaProx, without tuning, needs at most four "
    "times the CPU time of FISTA, which has to find the Lipschitz constant",
    metric=SECONDS,
    contenders=[ADAPROX, *FIRST_ORDER, *COORDINATES, ACCELERATED],
    expect=at_most(4.0, of="FISTA, 1/L by power iteration"),
    scales=SIZES,
)
def sparse_logistic_time(
    contender: Contender, rng: np.random.Generator, **parameters: Any
) -> Measurement:
    """Fit a sparse logistic regression in the setting of `sparse_lasso_time`.

    skglm takes proximal Newton steps, scikit-learn liblinear's. The lead of coordinate descent is
    smaller here, where many features have small coefficients.
    """
    return _by_time("logistic", contender, rng, **parameters)


def _six_penalties(problem: LinearProblem) -> dict[str, Any]:
    """Return penalties and constraints on the coefficients, by the name of the kind."""
    d, weight = problem.d, problem.weight
    height = max(k for k in range(1, int(math.sqrt(d)) + 1) if d % k == 0)
    shape = (height, d // height)
    slopes = problem(np.zeros(d))[1].reshape(shape)
    return {
        "l1": L1(weight),
        "elastic net": ElasticNet(2 * weight, 0.5),
        "groups": GroupLasso(weight, np.arange(d) // 5),
        "box": Box(-0.05, 0.05),
        "simplex": Simplex(),
        "nuclear": NuclearNorm(0.1 * float(np.linalg.norm(slopes, 2)), shape),
    }


@claim(
    method="adaptive-prox",
    statement="With one setting for six kinds of penalties and constraints on large sparse data, "
    "AdaProx needs at most five times the gradients of FISTA, which has to find L",
    metric=Metric(
        "gradients to the target",
        better="lower",
        average="geometric mean",
        curve=("CPU seconds", "relative norm of the gradient mapping"),
    ),
    contenders=[
        ADAPROX,
        Contender("FISTA, 1/L by power iteration", make=fista_with_power_iteration),
        Contender("AdaPGM", make=adapgm, control=True),
        ACCELERATED,
    ],
    expect=at_most(5.0, of="FISTA, 1/L by power iteration"),
    scales={
        "smoke": Scale(seeds=2, n=300, d=100, budget=20),
        "quick": Scale(seeds=8, n=3_000, d=1_500, budget=500),
        "full": Scale(seeds=8, n=100_000, d=50_000, budget=300),
    },
)
def sparse_penalties(
    contender: Contender, rng: np.random.Generator, *, n: int, d: int, budget: int
) -> Measurement:
    """Minimize sparse least squares, 100,000 × 50,000 at scale full, with each of six terms.

    L1, elastic net, groups of five, a box, a simplex and a nuclear norm of the coefficients as a
    matrix. The value is the geometric mean of the gradients until the gradient mapping with step
    1/L is a hundredth of the start's, and each kind is an extra; a power iteration counts as a
    gradient. The curve is that of the nuclear norm, over CPU time.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    problem = sparse_regression(for_instance, n, d)
    smoothness = problem.smoothness()
    costs: dict[str, float] = {}
    for name, penalty in _six_penalties(problem).items():
        x0 = penalty.prox(np.zeros(d), 1e-9)
        run = Run(
            problem,
            penalty,
            x0,
            distance=_relative_mapping(problem, penalty, smoothness, x0),
            target=1e-2,
            budget=budget,
            every=4,
        )
        run.start_clock()
        costs[name] = run.finish(contender.make).cost
    _, seconds, distances = zip(*run.curve, strict=True)
    mean = float(np.exp(np.mean(np.log(list(costs.values())))))
    return Measurement(mean, (seconds, distances), costs)


def _relative_mapping(
    problem: LinearProblem, penalty: Any, L: float, x0: Array
) -> Callable[[Array], float]:
    """Return the norm of the gradient mapping with step 1/L, as a share of that at x0."""

    def norm(x: Array) -> float:
        moved = penalty.prox(x - problem(x)[1] / L, 1 / L)
        return float(np.linalg.norm(x - moved)) * L

    start = norm(x0)
    return lambda x: norm(x) / start
