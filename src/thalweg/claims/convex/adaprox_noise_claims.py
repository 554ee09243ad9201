"""Claims about adaptive proximal gradient with noisy gradients."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.convex import L1, minimize_adaprox
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import LinearProblem, breast_cancer

Array = NDArray[np.float64]

EXCESS = Metric("gap to the optimum", better="lower", average="geometric mean")


def _adaprox(output: str, accelerated: bool = False, D: float = 1.0) -> Any:
    """Return a solver of noisy problems: ``solver(gradient, prox, x0, steps, rng)``."""

    def solve(gradient: Any, prox: Any, x0: Array, steps: int, rng: Any, D: float = D) -> Array:
        found: Array = minimize_adaprox(
            lambda x: 0.0,
            x0,
            jac=gradient,
            prox=prox,
            accelerated=accelerated,
            D=D,
            maxiter=steps,
            stochastic=True,
            output=output,  # type: ignore[arg-type]
            rng=rng,
        ).x
        return found

    return solve


def _prox_sgd(gradient: Any, prox: Any, x0: Array, steps: int, rng: Any, c: float) -> Array:
    """Take steps c/√k; return the average of the second half."""
    x, average = x0, np.zeros(len(x0))
    for k in range(1, steps + 1):
        alpha = c / math.sqrt(k)
        x = prox.prox(x - alpha * gradient(x, rng=rng), alpha)
        if k > steps // 2:
            average = average + (x - average) / (k - steps // 2)
    return average


def _adagrad_norm(gradient: Any, prox: Any, x0: Array, steps: int, rng: Any, D: float) -> Array:
    """Take steps D/√(Σ‖g‖²); return the average of all iterates, weighted by the steps."""
    x, average = x0, x0
    weight = total = 0.0
    for _ in range(steps):
        noisy = gradient(x, rng=rng)
        total += float(noisy @ noisy)
        alpha = D / math.sqrt(total) if total > 0 else D
        x = prox.prox(x - alpha * noisy, alpha)
        weight += alpha
        average = average + alpha / weight * (x - average)
    return average


def _noisy_quadratic(
    contender: Contender, rng: np.random.Generator, steps: int, d: int = 50
) -> Measurement:
    assert contender.make is not None
    for_instance, for_contender = rng.spawn(2)
    solution: Array = for_instance.standard_normal(d) / np.sqrt(d)

    def gradient(x: Array, rng: np.random.Generator) -> Array:
        noise: Array = rng.standard_normal(d) / np.sqrt(d)
        return x - solution + noise

    found = contender.make(gradient, L1(0.0), np.zeros(d), steps, for_contender)
    return Measurement(float(np.sum((found - solution) ** 2)) / 2)


@lru_cache(maxsize=128)
def _logistic(seed: int) -> tuple[LinearProblem, float]:
    problem = breast_cancer("logistic", np.random.default_rng(seed))
    return problem, problem.l1_optimum()


NOISE_SWEEP = {
    "smoke": Scale(seeds=2, sweep={"steps": [50, 200]}),
    "quick": Scale(seeds=8, sweep={"steps": [250, 1_000, 4_000, 16_000]}),
    "full": Scale(seeds=30, sweep={"steps": [250, 1_000, 4_000, 16_000, 64_000]}),
}
NOISY = [
    Contender("AdaProx, average", make=_adaprox("auto")),
    Contender("AdaProx, last iterate", make=_adaprox("last"), control=True),
    Contender("AdaProx accelerated", make=_adaprox("auto", accelerated=True), control=True),
]


@claim(
    method="adaptive-prox",
    statement="With noise on a strongly convex function the gap of the averaged iterate falls as "
    "fast as that of the best estimator, as 1/k",
    metric=EXCESS,
    contenders=NOISY,
    expect=trend(-1.2, -0.8, over="steps"),
    scales=NOISE_SWEEP,
)
def noise_average(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Minimize ½‖x - x*‖² in 50 dimensions from gradients with normal noise of mean square 1.

    The controls are the last iterate and the accelerated variant, whose gaps fall as 1/√k only:
    acceleration brings nothing where noise dominates.
    """
    return _noisy_quadratic(contender, rng, steps)


@claim(
    method="adaptive-prox",
    statement="With noise the gap of the average is at most a fifth of that of the last iterate",
    metric=EXCESS,
    contenders=[
        NOISY[0],
        Contender("AdaProx, last iterate", make=_adaprox("last")),
        NOISY[2],
    ],
    expect=at_most(0.2, of="AdaProx, last iterate"),
    scales={
        "smoke": Scale(seeds=2, steps=200),
        "quick": Scale(seeds=10, steps=4_000),
        "full": Scale(seeds=30, steps=16_000),
    },
)
def noise_average_against_last(
    contender: Contender, rng: np.random.Generator, *, steps: int
) -> Measurement:
    """Compare outputs in the setting of `noise_average`: "auto" is the average there."""
    return _noisy_quadratic(contender, rng, steps)


@claim(
    method="adaptive-prox",
    statement="From minibatches, without tuning, AdaProx comes within twice the gap of the best "
    "tuned peer",
    metric=EXCESS,
    contenders=[
        Contender("AdaProx, D = 1", make=_adaprox("auto")),
        Contender(
            "proximal SGD, c/√k", make=_prox_sgd, tune={"c": [0.3, 1.0, 3.0, 10.0, 30.0, 100.0]}
        ),
        Contender("AdaGrad-norm", make=_adagrad_norm, tune={"D": [0.3, 1.0, 3.0, 10.0, 30.0]}),
        Contender("AdaProx, last iterate", make=_adaprox("last"), control=True),
        Contender("AdaProx accelerated", make=_adaprox("auto", accelerated=True), control=True),
    ],
    expect=at_most(2.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=100),
        "quick": Scale(seeds=10, tuning_seeds=3, steps=3_000),
        "full": Scale(seeds=20, tuning_seeds=5, steps=10_000),
    },
)
def stochastic_logistic(
    contender: Contender, rng: np.random.Generator, *, steps: int, **tuned: Any
) -> Measurement:
    """Minimize the L1 logistic loss of the breast cancer data from batches of 8 samples.

    Proximal SGD returns the average of the second half of its iterates, AdaGrad-norm and AdaProx
    the average weighted by the steps, which forgets the start more slowly: with D = 1 that start
    is what is left of the gap, and the last iterate, shown as a control, is better.
    """
    assert contender.make is not None
    for_instance, for_contender = rng.spawn(2)
    problem, optimum = _logistic(int(for_instance.integers(2**31)))
    penalty = L1(problem.weight)

    def gradient(x: Array, rng: np.random.Generator) -> Array:
        return problem.batch_gradient(x, rng.integers(len(problem.y), size=8))

    x = contender.make(gradient, penalty, np.zeros(problem.d), steps, for_contender, **tuned)
    return Measurement(problem.value(x) + penalty(x) - optimum)
