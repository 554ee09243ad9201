"""Claims about preconditioned descent at saddle points, and about the paper's assumption.

They belong to `thalweg.claims.training.nonlinear_precond`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.claims.training.precond_solvers import (
    EVALUATIONS,
    KERNELS,
    Fun,
    gap_closed,
    gradient_descent,
    perturbed,
    perturbed_descent,
    run,
    scipy_solver,
)
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim
from thalweg.tasks import (
    SmoothFunction,
    asymmetric_factorization,
    flat_quartic,
    maxcut_lagrangian,
    octopus,
    phase_retrieval,
    symmetric_factorization,
)
from thalweg.training import minimize_nlprecond, preconditioned_curvature, smoothness_report
from thalweg.training.precond_kernels import KernelName

Vector = NDArray[np.float64]
SADDLE = -1e-3  # an eigenvalue below tells a strict saddle point


def _octopus(
    contender: Contender, rng: np.random.Generator, n: int, L: float, budget: int
) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    f = octopus(n, L)
    x0 = for_instance.uniform(-1, 1, n)
    setting = {"step": 1 / (4 * L), "noise": np.e / 100}
    return gap_closed(
        contender, f, x0, for_contender, tol=1e-6, budget=budget, digit=0.0, **setting
    )


PERTURBED = Contender("cosh, perturbed", make=perturbed)
PERTURBED_GD = Contender("perturbed GD", make=perturbed_descent)
UNPERTURBED = Contender("cosh, unperturbed", make=partial(perturbed, perturb=False))
UNPERTURBED_GD = Contender(
    "GD", make=lambda fun, x0, rng, step, noise: gradient_descent(fun, x0, rng, lr=step)
)
PERTURBED_LOG = Contender("log, perturbed", make=partial(perturbed, kernel="log"), control=True)


@claim(
    method="nonlinear-precond",
    statement="On the octopus in 5 dimensions perturbations take at most 0.4 of the gradients "
    "without",
    metric=EVALUATIONS,
    contenders=[PERTURBED, UNPERTURBED, UNPERTURBED_GD, PERTURBED_GD, PERTURBED_LOG],
    expect=at_most(0.4, of="cosh, unperturbed"),
    scales={
        "smoke": Scale(seeds=2, sweep={"L": [1.0]}, n=3, budget=300),
        "quick": Scale(seeds=10, sweep={"L": [1.0, 1.5, 2.0, 3.0]}, n=5, budget=20_000),
        "full": Scale(seeds=20, sweep={"L": [1.0, 1.5, 2.0, 3.0]}, n=5, budget=40_000),
    },
)
def octopus_in_five_dimensions(
    contender: Contender, rng: np.random.Generator, *, n: int, L: float, budget: int
) -> Measurement:
    """Descend the octopus of Du et al. (2017) from U[-1, 1]ⁿ past n saddle points.

    The effective step is 1/(4L), noise of radius e/100 is added where the gradient is as small as
    that, at most every ten steps. The steeper the walls (L), the longer the unperturbed descent
    stays at each saddle point.
    """
    return _octopus(contender, rng, n, L, budget)


OCTOPUS_TEN = {
    "smoke": Scale(seeds=2, sweep={"L": [1.0]}, n=3, budget=300),
    "quick": Scale(seeds=8, sweep={"L": [1.0, 2.0]}, n=10, budget=10_000),
    "full": Scale(seeds=12, sweep={"L": [1.0, 1.5, 2.0, 3.0]}, n=10, budget=40_000),
}


@claim(
    method="nonlinear-precond",
    statement="On the octopus in 10 dimensions perturbations take at most a tenth of the gradients "
    "without, which do not arrive",
    metric=EVALUATIONS,
    contenders=[PERTURBED, UNPERTURBED, UNPERTURBED_GD],
    expect=at_most(0.1, of="cosh, unperturbed"),
    scales=OCTOPUS_TEN,
)
def octopus_in_ten_dimensions(
    contender: Contender, rng: np.random.Generator, *, n: int, L: float, budget: int
) -> Measurement:
    """Repeat `octopus_in_five_dimensions` with twice as many saddle points.

    The time of an unperturbed descent is exponential in their number; where it does not arrive it
    counts as the budget.
    """
    return _octopus(contender, rng, n, L, budget)


@claim(
    method="nonlinear-precond",
    statement="On the octopus in 10 dimensions the perturbed method takes at most twice the "
    "gradients of perturbed gradient descent",
    metric=EVALUATIONS,
    contenders=[PERTURBED, PERTURBED_GD, PERTURBED_LOG],
    expect=at_most(2.0, of="perturbed GD"),
    scales=OCTOPUS_TEN,
)
def octopus_against_perturbed_descent(
    contender: Contender, rng: np.random.Generator, *, n: int, L: float, budget: int
) -> Measurement:
    """Compare with perturbed gradient descent (Jin et al. 2021), with equal steps and noise.

    The paper finds both equally fast. On the octopus gradients are large between saddle points,
    and damping them costs steps: gradient descent with this step is stable here, so that there is
    nothing to gain from damping.
    """
    return _octopus(contender, rng, n, L, budget)


def from_saddle(perturb: bool, kernel: KernelName = "cosh") -> Callable[..., Any]:
    """Return the method as shipped, with or without perturbations."""

    def descend(fun: Fun, x0: Vector, rng: np.random.Generator) -> Any:
        return minimize_nlprecond(fun, x0, kernel=kernel, perturb=perturb, rng=rng)

    return descend


def perturbed_gd_from_saddle(fun: Fun, x0: Vector, rng: np.random.Generator, *, lr: float) -> None:
    """Perturbed gradient descent, with the default noise of the method."""
    perturbed_descent(fun, x0, rng, step=lr, noise=1e-2, interval=50)


@claim(
    method="nonlinear-precond",
    statement="Started exactly at a strict saddle point, the perturbed method as shipped retrieves "
    "phases to a gap of 1e-8",
    metric=Metric("gap to the minimum", better="lower", average="mean"),
    contenders=[
        Contender("cosh, perturbed", make=from_saddle(True)),
        Contender("cosh, unperturbed", make=from_saddle(False)),
        Contender(
            "perturbed GD",
            make=perturbed_gd_from_saddle,
            tune={"lr": [0.01, 0.03, 0.1, 0.3, 1.0]},
        ),
        Contender("SciPy, L-BFGS-B", make=scipy_solver("L-BFGS-B")),
        Contender("exp, perturbed", make=from_saddle(True, "exp"), control=True),
        Contender("log, perturbed", make=from_saddle(True, "log"), control=True),
    ],
    expect=at_most(1e-8),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, n=10, m=80, budget=400),
        "quick": Scale(seeds=20, tuning_seeds=3, n=40, m=400, budget=2_000),
        "full": Scale(seeds=50, n=80, m=800, budget=5_000),
    },
)
def saddle_escape(
    contender: Contender, rng: np.random.Generator, *, n: int, m: int, budget: int, **tuned: Any
) -> Measurement:
    """Start phase retrieval at x = 0, where the gradient vanishes and the Hessian is negative.

    Without noise every method stays there forever. The best gap within the budget counts.
    """
    for_instance, for_contender = rng.spawn(2)
    f = phase_retrieval(n, m, for_instance)
    gaps = run(contender, f, np.zeros(n), for_contender, tol=0.0, budget=budget, **tuned).gaps
    return Measurement(gaps[-1], curve=(np.arange(1, len(gaps) + 1), np.maximum(gaps, 1e-20)))


def all_kernels(**options: Any) -> Callable[..., list[Any]]:
    """Return a run of every kernel."""

    def descend(f: SmoothFunction, x0: Vector) -> list[Any]:
        return [
            minimize_nlprecond(f.value_and_gradient, x0, kernel=kernel, **options)
            for kernel in KERNELS
        ]

    return descend


@claim(
    method="nonlinear-precond",
    statement="From random starts no kernel converges to a strict saddle point",
    metric=Metric("share of runs that end at a strict saddle point", better="lower"),
    contenders=[
        Contender("all kernels, backtracking", make=all_kernels()),
        Contender("all kernels, γ = 1/8", make=all_kernels(gamma=0.125), control=True),
        Contender(
            "GD, backtracking",
            make=lambda f, x0: [minimize_nlprecond(f.value_and_gradient, x0, kernel="quadratic")],
        ),
        Contender(
            "started at the saddle point",
            make=lambda f, x0: [minimize_nlprecond(f.value_and_gradient, 0 * x0)],
            control=True,
        ),
    ],
    expect=at_most(0.0),
    scales={
        "smoke": Scale(seeds=2, starts=1, n=8, m=64),
        "quick": Scale(seeds=8, starts=13, n=40, m=400),
        "full": Scale(seeds=20, starts=50, n=40, m=400),
    },
)
def saddle_avoidance(
    contender: Contender, rng: np.random.Generator, *, starts: int, n: int, m: int
) -> Measurement:
    """Descend phase retrieval from many random starts, and look at the Hessian where runs end.

    A run ends at a strict saddle point if ``∇²φ* ∇²f`` has an eigenvalue below -10⁻³ there. The
    last control shows that the test can tell. `extras` list how many runs converged.
    """
    for_instance, _ = rng.spawn(2)
    f = phase_retrieval(n, m, for_instance)
    assert contender.make is not None
    results = []
    with np.errstate(all="ignore"):  # a fixed step can diverge
        for _ in range(starts):
            x0 = for_instance.standard_normal(n) * 10 / np.sqrt(n)
            results += contender.make(f, x0)
    at_saddle = [
        preconditioned_curvature(r.jac, partial(f.hvp, r.x)) < SADDLE for r in results if r.success
    ]
    extras = {"runs": float(len(results)), "converged": float(len(at_saddle))}
    return Measurement(sum(at_saddle) / len(results), extras=extras)


# The sufficient condition


def applications(rng: np.random.Generator, size: int) -> list[tuple[SmoothFunction, bool]]:
    """Return functions, and whether the sufficient condition holds for them."""
    matrix = rng.standard_normal((size, size + 1))
    square = matrix @ matrix.T / size
    weights = np.triu((rng.random((size, size)) < 0.5).astype(float), 1)
    return [
        (symmetric_factorization(square, 2), True),
        (asymmetric_factorization(matrix, 2, kappa=0.5), True),
        (phase_retrieval(size, 10 * size, rng), True),
        (maxcut_lagrangian(weights + weights.T, 2, penalty=5.0), True),
        (asymmetric_factorization(matrix, 2, kappa=0.0), False),
        (phase_retrieval(2 * size, size, rng), False),
        (flat_quartic(), False),
    ]


def sphere_report(f: SmoothFunction, rng: np.random.Generator) -> bool:
    """Return the verdict of `smoothness_report` as shipped."""
    report = smoothness_report(f, f.gradient, f.hvp, x0=np.zeros(f.n), rng=rng)
    return report.sufficient_condition


@claim(
    method="nonlinear-precond",
    statement="The sufficient condition for both generalized smoothness notions is seen to hold in "
    "the applications, and to fail where it must",
    metric=Metric("wrong verdicts", better="lower"),
    contenders=[Contender("smoothness_report", make=sphere_report)],
    expect=at_most(0.0),
    scales={
        "smoke": Scale(seeds=1, size=3),
        "quick": Scale(seeds=8, size=4),
        "full": Scale(seeds=20, size=8),
    },
)
def sufficient_condition(
    contender: Contender, rng: np.random.Generator, *, size: int
) -> Measurement:
    """Ask `smoothness_report` about four applications and three counterexamples.

    It holds for symmetric factorization, for asymmetric factorization with a quartic penalty, for
    phase retrieval whose measurement vectors span the space, and for the augmented Lagrangian of
    Max-Cut's low-rank relaxation. It fails without the penalty (along the orbits that rescale both
    factors), with too few measurements, and for a quartic that vanishes on a line.
    """
    for_instance, for_contender = rng.spawn(2)
    assert contender.make is not None
    functions = applications(for_instance, size)
    wrong = [contender.make(f, for_contender) != holds for f, holds in functions]
    return Measurement(float(sum(wrong)), extras={"functions": float(len(functions))})
