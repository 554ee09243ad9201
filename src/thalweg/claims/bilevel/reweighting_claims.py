"""Claims about bilevel descent with antithetic hypergradients: weights of rows.

A contender's ``make`` is ``make(problem, rng, steps, **settings)``, which returns the upper
variables of a `thalweg.tasks.ReweightingProblem`; for many rows ``make(problem, rng, steps)``,
which returns seconds and weights of a `thalweg.tasks.NoisyImages`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel import (
    CG,
    AntitheticNeumann,
    HessianReference,
    InverseHessian,
    Neumann,
    ReferenceNeumann,
    ane_bilevel,
)
from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim
from thalweg.tasks import (
    NoisyImages,
    ReweightingProblem,
    corrupted_labels,
    mixed_policies,
    noisy_images,
    rare_class,
    robust_regression,
)

with requires("bilevel"):
    import torch

Array = NDArray[np.float64]


def descend(
    problem: ReweightingProblem,
    rng: np.random.Generator,
    steps: int,
    lr_x: float,
    solve: InverseHessian,
    hessian_rows: int = 4,
    **settings: Any,
) -> torch.Tensor:
    """Return the weights after so many steps of bilevel descent."""
    result = ane_bilevel(
        problem.f,
        problem.g,
        *problem.start(),
        inner_data=problem.inner_data,
        outer_data=problem.outer_data,
        maxiter=steps,
        lr_x=lr_x,
        lr_y=0.2 / problem.smoothness(),
        batch_size=32,
        outer_batch_size=16,
        hessian_batch_size=hessian_rows,
        solve=solve,
        generator=torch_generator(rng),
        **settings,
    )
    if result.status != 0:
        return torch.full_like(problem.start()[0], torch.nan)
    weights: torch.Tensor = result.x
    return weights


def f2sa(
    problem: ReweightingProblem,
    rng: np.random.Generator,
    steps: int,
    lr_x_and_penalty: tuple[float, float],
) -> torch.Tensor:
    """Return the weights of the fully first-order method, at as many rows as the antithetic one.

    y follows f/λ + g and z follows g; the direction of x is ∇ₓf + λ(∇ₓg(x, y) - ∇ₓg(x, z)), as in
    J. Kwon, D. Kwon, S. Wright and R. Nowak, "A fully first-order method for stochastic bilevel
    optimization", ICML 2023. Its batches are those of the other methods.
    """
    lr_x, penalty = lr_x_and_penalty
    stream = torch_generator(rng)
    inner, outer = problem.inner_data, problem.outer_data
    x, y = problem.start()
    z, lr_y = y.clone(), 0.2 / problem.smoothness()
    derivative_y = torch.func.grad(problem.g, argnums=1)
    derivative_x = torch.func.grad(problem.g, argnums=0)
    upper = torch.func.grad(problem.f, argnums=1)

    def rows(data: tuple[torch.Tensor, ...], size: int) -> tuple[torch.Tensor, ...]:
        chosen = torch.randint(len(data[0]), (size,), generator=stream)
        return tuple(part[chosen] for part in data)

    for _ in range(steps):
        for _ in range(5):
            batch, good = rows(inner, 32), rows(outer, 16)
            y = y - lr_y * (upper(x, y, good) / penalty + derivative_y(x, y, batch))
            z = z - lr_y * derivative_y(x, z, batch)
        batch = rows(inner, 32)
        x = x - lr_x * penalty * (derivative_x(x, y, batch) - derivative_x(x, z, batch))
    return x


RATES = [0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5]
PAIRS = [(lr, penalty) for lr in RATES for penalty in (3.0, 30.0)]


def _descent(
    name: str, solve: InverseHessian, hessian_rows: int = 4, *, control: bool = False, **tune: Any
) -> Contender:
    return Contender(
        name,
        make=lambda problem, rng, steps, lr_x, **settings: descend(
            problem, rng, steps, lr_x, solve, hessian_rows, **settings
        ),
        tune={"lr_x": RATES, **tune},
        control=control,
    )


DESCENTS = [
    _descent("ANE-SGD", AntitheticNeumann(K=10)),
    _descent("stocBiO, three times the batch", Neumann(K=10), 12),
    _descent("AmIGO (CG), three times the batch", CG(10, damping=0.01), 12),
    Contender("F2SA", make=f2sa, tune={"lr_x_and_penalty": PAIRS}),
    _descent("reference alone", ReferenceNeumann(K=10)),
]
RECURSIVE = [
    _descent("ANE-VR", AntitheticNeumann(K=10), variant=["vr"]),
    _descent("MRBO, three times the batch", Neumann(K=10), 12, variant=["vr"]),
    _descent("stocBiO, three times the batch", Neumann(K=10), 12),
    _descent("reference alone", ReferenceNeumann(K=10), variant=["vr"]),
]
DESCENT_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, steps=2),
    "quick": Scale(seeds=8, tuning_seeds=1, steps=100),
    "full": Scale(seeds=10, tuning_seeds=2, steps=300),
}


def _score(
    make: Callable[[int], ReweightingProblem],
    contender: Contender,
    rng: np.random.Generator,
    steps: int,
    settings: dict[str, Any],
) -> float:
    """Return the score of the model for the weights that a contender finds."""
    for_instance, for_contender = rng.spawn(2)
    problem = make(int(for_instance.integers(2**31)))
    assert contender.make is not None
    x = contender.make(problem, for_contender, steps, **settings)
    if not bool(torch.isfinite(x).all()):
        return float("inf")
    return problem.score(problem.refit(x))


@claim(
    method="ane",
    statement="Wrong labels: the test loss of ANE-SGD is at most that of the best stochastic "
    "method",
    metric=Metric("test loss", better="lower"),
    contenders=DESCENTS,
    expect=at_most(1.0, of="best peer"),
    scales=DESCENT_SCALES,
)
def wrong_labels(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Weights of 300 rows of the breast-cancer data, 60 % of one class mislabeled, 80 good rows.

    All make as many steps, with the same batches for the inner steps. Hessians of the plain series
    and of conjugate gradients have batches three times as large, so that products of rows are
    equal. The model is refitted to the weights found, so that
    only these are compared. The series with the full-data reference alone is among the peers.
    """
    return Measurement(_score(corrupted_labels, contender, rng, steps, settings))


@claim(
    method="ane",
    statement="Robust regression: the test error of ANE-SGD is at most that of the best stochastic "
    "method",
    metric=Metric("test error", better="lower"),
    contenders=DESCENTS,
    expect=at_most(1.0, of="best peer"),
    scales=DESCENT_SCALES,
)
def outliers(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Diabetes data with Student-t features and gross errors in a third of the targets.

    Contenders as for wrong labels. The Hessians have the heaviest tails of the four problems.
    """
    return Measurement(_score(robust_regression, contender, rng, steps, settings))


@claim(
    method="ane",
    statement="A rare class: one minus the area under the curve of ANE-VR is at most that of the "
    "best stochastic method",
    metric=Metric("1 - AUC", better="lower"),
    contenders=RECURSIVE,
    expect=at_most(1.0, of="best peer"),
    scales=DESCENT_SCALES,
)
def rare_classes(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """KEEL's yeast data, 51 of 1,484 rows of the rare class, with 30 good rows that are balanced.

    With recursive variance reduction on both levels, for the method and for its peers.
    """
    return Measurement(_score(rare_class, contender, rng, steps, settings))


@claim(
    method="ane",
    statement="Offline imitation: the loss of return of ANE-VR is at most that of the best "
    "stochastic method",
    metric=Metric("loss of return", better="lower"),
    contenders=RECURSIVE,
    expect=at_most(1.0, of="best peer"),
    scales=DESCENT_SCALES,
)
def offline_policies(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Gymnasium's CartPole: transitions by good and by bad policies, 60 rows of a good one.

    The measure is one minus the mean length of ten episodes of the policy, relative to 200 steps.
    """
    return Measurement(_score(mixed_policies, contender, rng, steps, settings))


NOISY = [
    _descent("ANE-SGD", AntitheticNeumann(K=30), 2),
    _descent("stocBiO", Neumann(K=30), 2),
    _descent("stocBiO, three times the batch", Neumann(K=30), 6),
    _descent("AmIGO (CG), three times the batch", CG(30, damping=0.01), 6),
    Contender("F2SA", make=f2sa, tune={"lr_x_and_penalty": PAIRS}),
    _descent("reference alone", ReferenceNeumann(K=30), 2, control=True),
]


@claim(
    method="ane",
    statement="Wrong labels, few steps and batches of two rows: the test loss of ANE-SGD is at "
    "most 0.95 of the best stochastic method's",
    metric=Metric("test loss", better="lower"),
    contenders=NOISY,
    expect=at_most(0.95, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=2),
        "quick": Scale(seeds=10, tuning_seeds=1, steps=20),
        "full": Scale(seeds=20, tuning_seeds=2, steps=20),
    },
)
def wrong_labels_few_steps(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Twenty steps with thirty factors of two rows each: noise that many steps do not average out.

    The regime comes from a search on other seeds, where the antithetic pairs were ahead of all
    Neumann series. On the seeds of the claim they are ahead of series with batches as small, and
    level with those of three times the batch; the fully first-order method, which takes no Hessians
    at all, is far ahead of every series. The one with the full-data reference alone is a control.
    """
    return Measurement(_score(corrupted_labels, contender, rng, steps, settings))


def _many(name: str, solve: InverseHessian) -> Contender:
    def make(problem: NoisyImages, rng: np.random.Generator, steps: int) -> tuple[float, Array]:
        begin = time.process_time()
        result = ane_bilevel(
            problem.f,
            problem.g,
            *problem.start(torch_generator(rng)),
            inner_data=problem.inner_data,
            outer_data=problem.outer_data,
            maxiter=steps,
            lr_y=0.5,
            optimizer_x=lambda params: torch.optim.Adam(params, lr=0.1),
            batch_size=256,
            solve=solve,
            reference=HessianReference("batch", 12_800, refresh=20, dense=False),
            record_every=steps,
            generator=torch_generator(rng),
        )
        return time.process_time() - begin, result.x.numpy()

    return Contender(name, make=make)


@claim(
    method="ane",
    statement="Many rows: ANE-SGD reweights rows of a small network in at most 3 times the time of "
    "stocBiO",
    metric=Metric("CPU time", better="lower", unit="s"),
    contenders=[
        _many("ANE-SGD", AntitheticNeumann(K=5, eta=0.1)),
        _many("stocBiO", Neumann(K=5, eta=0.1)),
    ],
    expect=at_most(3.0, of="stocBiO"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=2, rows=500),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=20, rows=50_000),
        "full": Scale(seeds=8, tuning_seeds=1, steps=1_000, rows=50_000),
    },
)
def many_rows(
    contender: Contender, rng: np.random.Generator, *, rows: int, steps: int
) -> Measurement:
    """MNIST-1D with a network of 40, 64 and 10 units, three labels in ten wrong, a weight a row.

    The extra is the area under the curve of the weights as a test for right labels, one half for
    weights that tell nothing.
    """
    for_instance, for_contender = rng.spawn(2)
    problem = noisy_images(int(for_instance.integers(100)), rows)
    assert contender.make is not None
    seconds, weights = contender.make(problem, for_contender, steps)
    return Measurement(seconds, extras={"area": problem.area(weights)})
