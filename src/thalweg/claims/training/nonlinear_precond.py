"""Claims about nonlinearly preconditioned gradient descent.

A contender's ``make`` is called as ``make(fun, x0, rng, **tuned)``: it minimizes ``fun``, which
returns the value and the gradient, from ``x0`` until ``fun`` ends the run by an exception. For a
solver of your own: ``Contender("mine", make=lambda fun, x0, rng, lr: my_solver(fun, x0, lr),
tune={"lr": [0.1, 1.0]})``. In the claims about step sizes, `gap_closed` counts the calls until
the value is within ``tol`` of the minimum. A run that does not get there within the budget counts
as the budget; while tuning, as the budget times one plus ten times the number of missing decimal
digits: otherwise all hopeless settings would be equal, and steps that fail now and then the best.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.claims.training.precond_saddle_claims import (
    octopus_against_perturbed_descent,
    octopus_in_five_dimensions,
    octopus_in_ten_dimensions,
    saddle_avoidance,
    saddle_escape,
    sufficient_condition,
)
from thalweg.claims.training.precond_solvers import (
    EVALUATIONS,
    KERNELS,
    armijo_descent,
    as_shipped,
    clipped_sgd,
    fixed_step,
    gap_closed,
    gradient_descent,
    normalized_descent,
    scipy_solver,
)
from thalweg.evidence import Contender, Measurement, Scale, at_most, between, claim, trend
from thalweg.tasks import digits_covariance, phase_retrieval, symmetric_factorization

__all__ = [
    "distance_hardly_matters",
    "far_phases",
    "far_phases_untuned",
    "far_starts",
    "far_starts_against_clipping",
    "far_starts_untuned",
    "near_starts",
    "octopus_against_perturbed_descent",
    "octopus_in_five_dimensions",
    "octopus_in_ten_dimensions",
    "saddle_avoidance",
    "saddle_escape",
    "sufficient_condition",
]

Vector = NDArray[np.float64]
OTHERS = KERNELS[1:]


GAMMAS = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0]
FIXED = Contender("cosh, fixed step", make=fixed_step("cosh"), tune={"gamma": GAMMAS})
OTHER_KERNELS = [
    Contender(
        f"{kernel}, fixed step", make=fixed_step(kernel), tune={"gamma": GAMMAS}, control=True
    )
    for kernel in OTHERS
]
CLIPPED = Contender(
    "SGD, clipped",
    make=clipped_sgd,
    tune={"lr": [0.25, 0.5, 1.0, 2.0], "max_norm": [0.5, 1.0, 2.0, 4.0, 8.0, 16.0]},
)
NORMALIZED = Contender(
    "normalized GD, 1/√k",
    make=normalized_descent,
    tune={"lr": [0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0]},
)
SHIPPED = Contender("cosh, backtracking", make=as_shipped)
SHIPPED_OTHERS = [
    Contender(f"{kernel}, backtracking", make=partial(as_shipped, kernel=kernel), control=True)
    for kernel in OTHERS
]
SOLVERS = [
    Contender("GD, same backtracking", make=partial(as_shipped, kernel="quadratic")),
    Contender("GD, Armijo", make=armijo_descent),
    Contender("SciPy, L-BFGS-B", make=scipy_solver("L-BFGS-B")),
    Contender("SciPy, CG", make=scipy_solver("CG")),
]


def fixed_gd(smallest: int, largest: int) -> Contender:
    """Gradient descent, whose step size is a power of two within these exponents."""
    steps = [2.0**k for k in range(smallest, largest + 1)]
    return Contender("GD, fixed step", make=gradient_descent, tune={"lr": steps})


def factorization(rng: np.random.Generator, rank: int, distance: float) -> tuple[Any, Vector]:
    """Return the factorization of the digits' covariance, and U₀ = distance · N(0, 1/64)."""
    f = symmetric_factorization(digits_covariance(), rank)
    return f, distance * rng.standard_normal(f.n) / 8


def far_phase_retrieval(
    rng: np.random.Generator, n: int, m: int, distance: float
) -> tuple[Any, Vector]:
    """Return a Gaussian phase retrieval and a start of norm ``distance``."""
    f = phase_retrieval(n, m, rng)
    x0 = rng.standard_normal(n)
    return f, distance * x0 / np.linalg.norm(x0)


def _factorize(
    contender: Contender, rng: np.random.Generator, rank: int, distance: float, **rest: Any
) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    f, x0 = factorization(for_instance, rank, distance)
    return gap_closed(contender, f, x0, for_contender, tol=1e-6, **rest)


def _retrieve(
    contender: Contender, rng: np.random.Generator, n: int, m: int, distance: float, **rest: Any
) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    f, x0 = far_phase_retrieval(for_instance, n, m, distance)
    return gap_closed(contender, f, x0, for_contender, tol=1e-8, **rest)


TUNING = {"digit": 10.0}  # a step that fails on a tuning seed is out
FAR = {
    "smoke": Scale(
        seeds=2, tuning_seeds=1, tuning=TUNING, digit=0.0, rank=2, distance=10.0, budget=60
    ),
    "quick": Scale(
        seeds=20, tuning_seeds=4, tuning=TUNING, digit=0.0, rank=5, distance=10.0, budget=1_500
    ),
    "full": Scale(
        seeds=20, tuning_seeds=3, tuning=TUNING, digit=0.0, rank=10, distance=10.0, budget=6_000
    ),
}


@claim(
    method="nonlinear-precond",
    statement="From a start far away the preconditioned method with a fixed step factorizes a "
    "covariance with at most a quarter of the gradients of gradient descent with a fixed step",
    metric=EVALUATIONS,
    contenders=[FIXED, fixed_gd(-14, -3), NORMALIZED, CLIPPED, *OTHER_KERNELS],
    expect=at_most(0.25, of="GD, fixed step"),
    scales=FAR,
    headline=True,
)
def far_starts(
    contender: Contender,
    rng: np.random.Generator,
    *,
    rank: int,
    distance: float,
    budget: int,
    digit: float,
    **tuned: Any,
) -> Measurement:
    """Factorize the 64 × 64 covariance of the digits, from U₀ = 10 N(0, 1/64), to a gap of 10⁻⁶.

    All steps are fixed and tuned, powers of two, with L̄ = 1 for the kernels. Where the start is
    far away gradient descent needs a step so small that it crawls near the solution; it counts as
    the budget where it does not arrive. Clipping by `torch.nn.utils.clip_grad_norm_`, whose
    threshold is tuned too, is the method with another kernel, and no slower by an order of
    magnitude: see `far_starts_against_clipping`. Near the solution there is nothing to gain
    (`near_starts`), and a line search takes most of the advantage (`far_starts_untuned`).
    """
    return _factorize(contender, rng, rank, distance, budget=budget, digit=digit, **tuned)


@claim(
    method="nonlinear-precond",
    statement="From a start far away the kernel cosh needs no more gradients than SGD with its "
    "gradients clipped, both tuned",
    metric=EVALUATIONS,
    contenders=[
        Contender(
            "cosh, fixed step",
            make=fixed_step("cosh"),
            tune={
                "gamma": [0.25, 0.5, 1.0, 2.0, 4.0],
                "Lbar": [0.25, 0.5, 1.0, 2.0, 4.0],
            },
        ),
        CLIPPED,
    ],
    expect=at_most(1.0, of="SGD, clipped"),
    scales={
        name: Scale(
            seeds=scale.seeds,
            tuning_seeds=2 * scale.tuning_seeds,
            tuning=TUNING,
            **scale.parameters,
        )
        for name, scale in FAR.items()
    },
)
def far_starts_against_clipping(
    contender: Contender,
    rng: np.random.Generator,
    *,
    rank: int,
    distance: float,
    budget: int,
    digit: float,
    **tuned: Any,
) -> Measurement:
    """Compare with gradient clipping in the setting of `far_starts`.

    Both have two tuned numbers, a step size and the gradient norm at which damping sets in. They
    are hardly apart: far away cosh makes longer steps, near the solution both are gradient descent.
    """
    return _factorize(contender, rng, rank, distance, budget=budget, digit=digit, **tuned)


@claim(
    method="nonlinear-precond",
    statement="From a start nearby the preconditioned method needs as many gradients as gradient "
    "descent, within a quarter: there is nothing to gain",
    metric=EVALUATIONS,
    contenders=[FIXED, fixed_gd(-4, 3), *OTHER_KERNELS],
    expect=between(0.8, 1.25, of="GD, fixed step"),
    scales={
        name: Scale(
            seeds=scale.seeds,
            tuning_seeds=scale.tuning_seeds,
            tuning=TUNING,
            **{**scale.parameters, "distance": 1.0},
        )
        for name, scale in FAR.items()
    },
)
def near_starts(
    contender: Contender,
    rng: np.random.Generator,
    *,
    rank: int,
    distance: float,
    budget: int,
    digit: float,
    **tuned: Any,
) -> Measurement:
    """Repeat `far_starts` with U₀ = N(0, 1/64): gradient descent is fine here.

    Near a stationary point the method *is* gradient descent with the step size γ/L̄.
    """
    return _factorize(contender, rng, rank, distance, budget=budget, digit=digit, **tuned)


@claim(
    method="nonlinear-precond",
    statement="With one step size for all distances, the number of gradients hardly grows with the "
    "distance of the start: its log-log slope is at most 0.25",
    metric=EVALUATIONS,
    contenders=[
        Contender("cosh, γ = 1", make=partial(fixed_step("cosh"), gamma=1.0)),
        Contender("GD, fixed step", make=gradient_descent, tune=fixed_gd(-20, 2).tune),
        Contender("exp, γ = 1", make=partial(fixed_step("exp"), gamma=1.0), control=True),
        Contender("log, γ = 1", make=partial(fixed_step("log"), gamma=1.0), control=True),
        Contender("clip, γ = 1", make=partial(fixed_step("clip"), gamma=1.0), control=True),
    ],
    expect=trend(-0.25, 0.25, over="distance"),
    scales={
        "smoke": Scale(
            seeds=2,
            tuning_seeds=1,
            sweep={"distance": [1.0, 10.0]},
            tuning=TUNING,
            digit=0.0,
            rank=2,
            budget=60,
        ),
        "quick": Scale(
            seeds=8,
            tuning_seeds=1,
            sweep={"distance": [1.0, 3.0, 10.0, 30.0, 100.0]},
            tuning=TUNING,
            digit=0.0,
            rank=5,
            budget=1_500,
        ),
        "full": Scale(
            seeds=20,
            tuning_seeds=2,
            sweep={"distance": [1.0, 3.0, 10.0, 30.0, 100.0, 300.0]},
            tuning=TUNING,
            digit=0.0,
            rank=10,
            budget=6_000,
        ),
    },
)
def distance_hardly_matters(
    contender: Contender,
    rng: np.random.Generator,
    *,
    rank: int,
    distance: float,
    budget: int,
    digit: float,
    **tuned: Any,
) -> Measurement:
    """Move the start of `far_starts` from nearby to far away.

    The kernels keep γ = L̄ = 1, which is the reciprocal of the largest curvature at the solution,
    about. Gradient descent gets the step that is best over all distances, and does not arrive from
    any: what is stable far away is too small nearby. Steps of the kernels log and clip are at most
    γ long, those of cosh and exp grow with the logarithm of the gradient.
    """
    return _factorize(contender, rng, rank, distance, budget=budget, digit=digit, **tuned)


@claim(
    method="nonlinear-precond",
    statement="Without any tuning, from a start far away, the method needs at most three quarters "
    "of the gradients of gradient descent with the same backtracking",
    metric=EVALUATIONS,
    contenders=[SHIPPED, *SOLVERS, *SHIPPED_OTHERS],
    expect=at_most(0.75, of="GD, same backtracking"),
    scales={
        "smoke": Scale(seeds=2, digit=0.0, rank=2, distance=10.0, budget=60),
        "quick": Scale(seeds=10, digit=0.0, rank=5, distance=10.0, budget=3_000),
        "full": Scale(seeds=20, digit=0.0, rank=10, distance=10.0, budget=10_000),
    },
)
def far_starts_untuned(
    contender: Contender,
    rng: np.random.Generator,
    *,
    rank: int,
    distance: float,
    budget: int,
    digit: float,
) -> Measurement:
    """Repeat `far_starts` with a line search instead of a tuned step.

    Every trial of a line search is a gradient evaluation, here as in the peers. In so few
    dimensions L-BFGS-B is the solver to use; the claim is about first-order steps.
    """
    return _factorize(contender, rng, rank, distance, budget=budget, digit=digit)


RETRIEVAL = {
    "smoke": Scale(
        seeds=2, tuning_seeds=1, tuning=TUNING, digit=0.0, n=10, m=80, distance=10.0, budget=60
    ),
    "quick": Scale(
        seeds=20, tuning_seeds=5, tuning=TUNING, digit=0.0, n=40, m=400, distance=10.0, budget=1_500
    ),
    "full": Scale(
        seeds=20, tuning_seeds=8, tuning=TUNING, digit=0.0, n=80, m=800, distance=10.0, budget=6_000
    ),
}
SMALL_GAMMAS = [2.0 ** (k / 2) for k in range(-9, 1)]


@claim(
    method="nonlinear-precond",
    statement="From a start far away the preconditioned method with a fixed step retrieves phases "
    "with at most a quarter of the gradients of gradient descent with a fixed step",
    metric=EVALUATIONS,
    contenders=[
        Contender("cosh, fixed step", make=fixed_step("cosh"), tune={"gamma": SMALL_GAMMAS}),
        Contender(
            "GD, fixed step",
            make=gradient_descent,
            tune={"lr": [2.0 ** (k / 2) for k in range(-24, -7)]},
        ),
        Contender(
            "SGD, clipped",
            make=clipped_sgd,
            tune={"lr": SMALL_GAMMAS[3:8], "max_norm": [1.0, 4.0, 16.0, 64.0]},
        ),
        *(
            Contender(
                f"{kernel}, fixed step",
                make=fixed_step(kernel),
                tune={"gamma": SMALL_GAMMAS},
                control=True,
            )
            for kernel in OTHERS
        ),
    ],
    expect=at_most(0.25, of="GD, fixed step"),
    scales=RETRIEVAL,
)
def far_phases(
    contender: Contender,
    rng: np.random.Generator,
    *,
    n: int,
    m: int,
    distance: float,
    budget: int,
    digit: float,
    **tuned: Any,
) -> Measurement:
    """Retrieve Gaussian phases, ten measurements per unknown, from ‖x₀‖ = 10, to a gap of 10⁻⁸.

    Steps are fixed and tuned, L̄ = 1 for the kernels, the threshold of the clipped peer tuned too.
    A step that is twice as large as the best fails on some instances, so that the grids have two
    values per octave, and several tuning seeds are needed. On rare instances all runs end in a
    local minimum, which ten measurements per unknown do not exclude.
    """
    return _retrieve(contender, rng, n, m, distance, budget=budget, digit=digit, **tuned)


@claim(
    method="nonlinear-precond",
    statement="Without any tuning the method retrieves phases from far away with at most 0.6 of "
    "the gradients of gradient descent with the same backtracking",
    metric=EVALUATIONS,
    contenders=[SHIPPED, *SOLVERS, *SHIPPED_OTHERS],
    expect=at_most(0.6, of="GD, same backtracking"),
    scales={
        name: Scale(seeds=scale.seeds, **scale.parameters) for name, scale in RETRIEVAL.items()
    },
)
def far_phases_untuned(
    contender: Contender,
    rng: np.random.Generator,
    *,
    n: int,
    m: int,
    distance: float,
    budget: int,
    digit: float,
) -> Measurement:
    """Repeat `far_phases` with a line search instead of a tuned step.

    With it gradient descent solves the problem too: what is left of the advantage is a factor.
    Every trial of a line search is a gradient evaluation, here as in the peers.
    """
    return _retrieve(contender, rng, n, m, distance, budget=budget, digit=digit)
