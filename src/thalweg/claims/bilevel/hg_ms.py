"""Claims about selecting before differentiating.

A contender's ``make`` is, for the formula, ``make(problem, x, **settings)``, which returns an
estimate of ∇Φ(x); for the cost of optimization, ``make(problem, budget, **settings)``, which
returns the gradients taken until the target is reached; and for mixtures as described in
`thalweg.claims.bilevel.mixture_claims`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from thalweg.bilevel import (
    GD,
    PInv,
    Select,
    hg_ms,
    pseudoinverse_hypergradient,
    regularity_report,
)
from thalweg.bilevel.bilevel_objectives import BilevelObjectives
from thalweg.bilevel.optimistic_selection import Selector
from thalweg.claims.bilevel.mixture_claims import mixtures
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_least, at_most, claim, trend
from thalweg.tasks import (
    AffineManifold,
    CurvedManifold,
    RandomFeatures,
    affine_manifold,
    curved_manifold,
    random_features,
    rugged_sphere,
)

__all__ = [
    "ambient_dimension",
    "formula",
    "interpolating_features",
    "kinks",
    "mixtures",
    "penalty_methods",
    "stiffness",
]

PRECISE = GD(steps=300, tol=1e-13)
COST = Metric("gradients", better="lower", average="geometric mean")


def selection(problem: Any, x: torch.Tensor, y: torch.Tensor, select: Select) -> Any:
    """Return the result of one step that does not move x."""
    return hg_ms(
        problem.f, problem.g, x, y, maxiter=1, outer_lr=1e-15, inner=PRECISE, select=select
    )


def at_selection(problem: CurvedManifold, x: torch.Tensor, damping: float = 0.0) -> torch.Tensor:
    """Return the hypergradient at the selection."""
    start = torch.zeros_like(problem.target)
    y = selection(problem, x, start, Select(steps=500, tol=1e-12)).y
    found = pseudoinverse_hypergradient(problem.f, problem.g, x, y, solve=PInv(damping=damping))
    grad: torch.Tensor = found.grad
    return grad


def where_training_ends(
    problem: CurvedManifold, x: torch.Tensor, damping: float = 0.0
) -> torch.Tensor:
    """Return it at the minimizer that gradient descent from 0 finds."""
    start = torch.zeros_like(problem.target)
    y = selection(problem, x, start, Select(steps=0, n_starts=0)).y
    found = pseudoinverse_hypergradient(problem.f, problem.g, x, y, solve=PInv(damping=damping))
    grad: torch.Tensor = found.grad
    return grad


@claim(
    method="hg-ms",
    statement="The pseudoinverse formula at the optimistic selection has at most a thousandth of "
    "the error of implicit differentiation where training ends",
    metric=Metric("relative error", better="lower", average="geometric mean"),
    contenders=[
        Contender("selected", make=at_selection),
        Contender("not selected", make=where_training_ends),
        Contender(
            "not selected, damped",
            make=where_training_ends,
            tune={"damping": [1e-3, 1e-2, 0.1, 1.0, 10.0]},
        ),
        Contender("selected, damped", make=partial(at_selection, damping=0.01), control=True),
    ],
    expect=at_most(1e-3, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1),
        "quick": Scale(seeds=10, tuning_seeds=2),
        "full": Scale(seeds=40, tuning_seeds=4),
    },
    headline=True,
)
def formula(contender: Contender, rng: np.random.Generator, **settings: Any) -> Measurement:
    """Random quadratic maps of five variables to two: minimizers of dimension 3.

    The truth is the central difference of Φ, the upper loss of the selection, followed from x to
    both sides; so errors below some 1e-8 are those of the differences. Without selection the
    formula describes another point; with damping, another system. Both halves are needed.
    """
    problem = curved_manifold(rng.spawn(1)[0])
    x = torch.ones(problem.B.shape[1], dtype=torch.float64)
    start = torch.zeros_like(problem.target)
    y = selection(problem, x, start, Select(steps=500, tol=1e-12)).y
    follow, step = Select(steps=500, tol=1e-12, n_starts=0), 1e-5
    slopes = []
    for unit in torch.eye(len(x), dtype=torch.float64):
        above, below = (selection(problem, x + s * unit, y, follow).fun for s in (step, -step))
        slopes.append((above - below) / (2 * step))
    truth = torch.tensor(slopes, dtype=torch.float64)
    assert contender.make is not None
    error = (contender.make(problem, x, **settings) - truth).norm() / truth.norm()
    return Measurement(max(float(error), 1e-12))


def gradients_of_hg_ms(problem: AffineManifold, budget: int, outer_lr: float) -> float:
    """Return the gradients until Φ is within 1 % of its least value, at most the budget.

    A product counts as two.
    """
    target, cost = 1.01 * problem.optimum(), []

    def until(intermediate_result: Any) -> None:
        cost.append(intermediate_result.n_grad + 2 * intermediate_result.n_hvp)
        if problem.phi(intermediate_result.x) <= target:
            raise StopIteration
        if cost[-1] > budget:
            raise KeyboardInterrupt

    result = hg_ms(
        problem.f,
        problem.g,
        torch.ones(problem.B.shape[1], dtype=torch.float64),
        torch.zeros_like(problem.target),
        outer_lr=outer_lr,
        maxiter=budget,
        callback=until,
        generator=torch.Generator().manual_seed(0),
    )
    return float(cost[-1]) if result.status == 99 else float(budget)


def gradients_of_f2sa(
    problem: AffineManifold, budget: int, setting: tuple[float, float, float]
) -> float:
    """Return the same of the fully first-order penalty method, with multipliers λ₀(1 + rt).

    y follows f/λ + g and z follows g, both by ten gradient steps of size 1/(L + 1/λ); x follows
    ∇ₓf + λ(∇ₓg(x, y) - ∇ₓg(x, z)), as in J. Kwon, D. Kwon, S. Wright and R. Nowak, "A fully
    first-order method for stochastic bilevel optimization", ICML 2023, without noise.
    """
    lr, first, rate = setting
    x = torch.ones(problem.B.shape[1], dtype=torch.float64)
    y = z = torch.zeros_like(problem.target)
    A, B = problem.A, problem.B
    target, cost, t = 1.01 * problem.optimum(), 0, 0
    while cost <= budget:
        multiplier = first * (1 + rate * t)
        step = 1 / (1 + 1 / multiplier)
        for _ in range(10):
            pull = (y - problem.target) / multiplier
            y = y - step * (pull + A.T @ (A @ y - B @ x))
            z = z - A.T @ (A @ z - B @ x)
        x = x - lr * (0.1 * x + multiplier * -B.T @ (A @ (y - z)))
        cost, t = cost + 33, t + 1
        if not bool(torch.isfinite(x).all()):
            break
        if problem.phi(x) <= target:
            return float(cost)
    return float(budget)


HG_MS = Contender("HG-MS", make=gradients_of_hg_ms, tune={"outer_lr": [0.03, 0.1, 0.3, 1.0, 3.0]})
F2SA = Contender(
    "F2SA",
    make=gradients_of_f2sa,
    tune={
        "setting": [
            (lr, first, rate)
            for lr in (0.01, 0.03, 0.1, 0.3)
            for first in (10.0, 100.0)
            for rate in (0.0, 0.01, 0.1, 1.0)
        ]
    },
)


@claim(
    method="hg-ms",
    statement="At a condition number of 1,000, HG-MS takes at most as many gradients as the best "
    "tuned penalty method",
    metric=COST,
    contenders=[HG_MS, F2SA],
    expect=at_most(1.0, of="F2SA"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, budget=100, condition=10.0),
        "quick": Scale(seeds=8, tuning_seeds=3, budget=60_000, condition=1e3),
        "full": Scale(seeds=20, tuning_seeds=2, budget=200_000, condition=1e3),
    },
)
def penalty_methods(
    contender: Contender,
    rng: np.random.Generator,
    *,
    budget: int,
    condition: float,
    **settings: Any,
) -> Measurement:
    """Linear lower levels of eight variables and rank 4; a Hessian-vector product counts as two.

    The measure is how many gradients it takes until Φ(x) is within one percent of its least value;
    a run that never gets there counts as the budget, which flatters it. The penalty method is
    tuned over step sizes, first multipliers and their growth.
    """
    problem = affine_manifold(rng.spawn(1)[0], condition)
    assert contender.make is not None
    return Measurement(contender.make(problem, budget, **settings))


@claim(
    method="hg-ms",
    statement="The cost of HG-MS grows at most as the tenth power of the condition number",
    metric=COST,
    contenders=[HG_MS],
    expect=trend(-0.2, 0.1, over="condition"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, budget=2_000, sweep={"condition": [10.0, 100.0]}),
        "quick": Scale(
            seeds=8, tuning_seeds=1, budget=60_000, sweep={"condition": [10.0, 100.0, 1e3, 1e4]}
        ),
        "full": Scale(
            seeds=20, tuning_seeds=2, budget=200_000, sweep={"condition": [10.0, 100.0, 1e3, 1e4]}
        ),
    },
)
def stiffness(
    contender: Contender,
    rng: np.random.Generator,
    *,
    budget: int,
    condition: float,
    **settings: Any,
) -> Measurement:
    """Gradients to a percent of the least Φ, as for the penalty method, over condition numbers."""
    problem = affine_manifold(rng.spawn(1)[0], condition)
    assert contender.make is not None
    return Measurement(contender.make(problem, budget, **settings))


@claim(
    method="hg-ms",
    statement="The walks that find the best selection do not grow with the ambient dimension",
    metric=Metric("walks", better="lower", average="geometric mean"),
    contenders=[Contender("HG-MS")],
    expect=trend(-5.0, 0.3, over="ambient"),
    scales={
        "smoke": Scale(seeds=2, most=2, sweep={"ambient": [4, 8]}),
        "quick": Scale(seeds=16, most=60, sweep={"ambient": [4, 16, 64]}),
        "full": Scale(seeds=40, most=100, sweep={"ambient": [4, 16, 64, 256]}),
    },
)
def ambient_dimension(
    contender: Contender, rng: np.random.Generator, *, most: int, ambient: int
) -> Measurement:
    """Spheres of dimension 2 in 4 to 256 dimensions, with an f that has many local minima on it.

    The measure is the number of walks along the sphere until the best minimum is found.
    """
    for_instance, for_start = rng.spawn(2)
    problem = rugged_sphere(for_instance, ambient)
    x, y = torch.zeros(1, dtype=torch.float64), problem.start(for_start)
    least = problem.least()
    selector = Selector(
        BilevelObjectives(problem.f, problem.g, x, y),
        GD(),
        Select(steps=60, n_starts=1, restart_every=1),
        PInv(),
        torch_generator(for_start),
    )
    walks, value = 0, np.inf
    while walks < most and value > least + 1e-4:
        found = selector(x, y, 0)
        y, value, walks = found.y, found.value, walks + 1
    return Measurement(float(walks))


def features_by_hg_ms(problem: RandomFeatures, steps: int, lr: float) -> Any:
    """Return x and y after steps of HG-MS."""
    result = _features(problem, steps, lr, Select(steps=10))
    return result.x, result.y


def features_where_training_ends(problem: RandomFeatures, steps: int, lr: float) -> Any:
    """Return them of the same steps without selection, from y = 0: implicit differentiation."""
    result = _features(problem, steps, lr, Select(steps=0, n_starts=0))
    return result.x, result.y


def _features(problem: RandomFeatures, steps: int, lr: float, select: Select) -> Any:
    return hg_ms(
        problem.f,
        problem.g,
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(len(problem.phase), dtype=torch.float64),
        optimizer_x=lambda params: torch.optim.Adam(params, lr=lr),
        maxiter=steps,
        select=select,
        inner=GD(tol=1e-7),
        generator=torch.Generator().manual_seed(0),
    )


def features_by_penalty(
    problem: RandomFeatures, steps: int, lr: float, multiplier: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return them of descent on f + λg in both, x by Adam and y exactly: a constant penalty."""
    x = torch.zeros(10, dtype=torch.float64)
    adam = torch.optim.Adam([x], lr=lr)
    y = torch.zeros(len(problem.phase), dtype=torch.float64)

    def penalized(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return problem.f(x, y) + multiplier * problem.g(x, y)

    for _ in range(steps):
        slope = torch.func.grad(lambda y, x=x: penalized(x, y))(torch.zeros_like(y))
        hessian = torch.func.hessian(lambda y, x=x: penalized(x, y))(y)
        y = -torch.linalg.solve(hessian, slope)
        x.grad = torch.func.grad(penalized)(x, y)
        adam.step()
    return x, y


LRS = [0.03, 0.1, 0.3, 1.0, 3.0, 10.0]


@claim(
    method="hg-ms",
    statement="Over-parametrized regression: HG-MS' upper loss is at most 0.8 of implicit "
    "differentiation's where training ends, at models that fit the training rows",
    metric=Metric("upper loss", better="lower", average="geometric mean"),
    contenders=[
        Contender("HG-MS", make=features_by_hg_ms, tune={"lr": LRS}),
        Contender("implicit differentiation", make=features_where_training_ends, tune={"lr": LRS}),
        Contender(
            "penalty",
            make=lambda problem, steps, lr_and_multiplier: features_by_penalty(
                problem, steps, *lr_and_multiplier
            ),
            tune={"lr_and_multiplier": [(lr, m) for lr in (0.1, 0.3, 1.0) for m in (10.0, 1e3)]},
            control=True,
        ),
    ],
    expect=at_most(0.8, of="implicit differentiation"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=1),
        "quick": Scale(seeds=8, tuning_seeds=3, steps=15),
        "full": Scale(seeds=10, tuning_seeds=2, steps=60),
    },
)
def interpolating_features(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Diabetes data: 120 random features, 40 training rows, scales of the ten inputs learned.

    The measure is the validation loss with its ridge, of the model that the method ends with. The
    extras are the training error, which must vanish for a solution of the lower level, and the
    error on test rows. The penalty method trades the training rows against the others, and is
    shown as a control.
    """
    problem = random_features(int(rng.spawn(1)[0].integers(2**31)))
    assert contender.make is not None
    x, y = contender.make(problem, steps, **settings)
    if not bool(torch.isfinite(y).all()):
        return Measurement(float("inf"))
    return Measurement(
        float(problem.f(x, y)),
        extras={
            "training error": float(problem.g(x, y)),
            "test error": float(problem.error(x, y, problem.test)),
        },
    )


@claim(
    method="hg-ms",
    statement="The report tells smooth points of Φ from kinks",
    metric=Metric("share of right reports", better="higher"),
    contenders=[Contender("HG-MS")],
    expect=at_least(1.0),
    scales={
        "smoke": Scale(seeds=2, points=1),
        "quick": Scale(seeds=8, points=4),
        "full": Scale(seeds=20, points=10),
    },
)
def kinks(contender: Contender, rng: np.random.Generator, *, points: int) -> Measurement:
    """Distances to a circle in four dimensions: Φ has a kink at its center only."""
    for_instance, for_search = rng.spawn(2)
    generator = torch_generator(for_search)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y[:2] - x).square().sum() / 2 + y[2:].square().sum() / 2

    def g(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (y.dot(y) - 1).square() / 4 + y[2:].square().sum()

    y = torch.tensor(for_instance.standard_normal(4))
    report: Callable[..., Any] = regularity_report
    right = [not report(f, g, torch.zeros(2, dtype=torch.float64), y, generator=generator).smooth]
    for _ in range(points):
        x = torch.tensor(for_instance.standard_normal(2))
        right.append(report(f, g, x, y, generator=generator).smooth)
    return Measurement(float(np.mean(right)))
