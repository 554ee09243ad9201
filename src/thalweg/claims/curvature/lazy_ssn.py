"""Claims about the semismooth Newton method with lazy Hessians.

A contender's ``make`` is a solver of `thalweg.claims.curvature.newton_runs`, called as
``make(run, **tuned)``. For one of your own: ``Contender("mine", make=lambda run:
my_solver(run, run.x0, run.hessian))``, where ``run(x)`` returns value and gradient. Times are CPU
times on one thread, in units of a gradient that is timed in the same trial.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.claims.curvature.newton_runs import (
    NewtonRun,
    TorchDerivatives,
    adam,
    fista,
    lazy,
    lazy_every,
    lazy_in_l2,
    linear_svc,
    pytorch_minimize,
    scipy_solver,
    undamped_newton,
)
from thalweg.curvature import minimize_lazy_ssn
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
from thalweg.tasks import (
    ContactMembrane,
    contact_membrane,
    digits_svm,
    lipschitz_network,
    penalized_factorization,
)

Array = NDArray[np.float64]

EVERY_STEP = Contender("a Hessian every step (m = 1)", make=lazy_every(1))
LEAP_SSN = Contender("LeAP-SSN (m = 1, p = 0)", make=lazy_every(1, power=0.0))
LENGTHS = [1, 2, 3, 5, 8, 12, 20, 30]
HESSIANS = Metric(
    "Hessians to the target",
    better="lower",
    average="geometric mean",
    curve=("Hessians", "norm of the gradient"),
)
CPU = Metric(
    "CPU time to the target, in gradients",
    better="lower",
    average="geometric mean",
    curve=("CPU seconds", "norm of the gradient"),
)


def _extras(run: NewtonRun) -> dict[str, float]:
    extras = {
        "gradients": float(run.gradients),
        "Hessians": float(run.hessians),
        "products": float(run.products),
        "CPU seconds": run.cpu,
    }
    return extras if math.isnan(run.factorizations) else extras | {"Cholesky": run.factorizations}


def _by_hessians(run: NewtonRun) -> Measurement:
    _, hessians, _, norms = zip(*run.curve, strict=True)
    value = float(run.hessians) if run.reached else math.inf
    return Measurement(value, (hessians, norms), _extras(run))


def _by_cpu(run: NewtonRun, unit: float) -> Measurement:
    seconds, _, _, norms = zip(*run.curve, strict=True)
    value = run.cpu / unit if run.reached else math.inf
    return Measurement(value, (seconds, norms), _extras(run) | {"seconds of a gradient": unit})


@claim(
    method="lazy-ssn",
    statement="To the same accuracy of a support vector machine, the method needs at most half the "
    "Hessians of the one that computes one every step",
    metric=HESSIANS,
    contenders=[
        Contender("lazy SSN (m = 5)", make=lazy),
        EVERY_STEP,
        LEAP_SSN,
        Contender("SciPy trust-exact", make=scipy_solver("trust-exact", "hessian")),
        Contender("SciPy trust-krylov", make=scipy_solver("trust-krylov", "hessian")),
        Contender("SciPy Newton-CG", make=scipy_solver("Newton-CG", "hessian")),
        Contender("pytorch-minimize newton-exact", make=pytorch_minimize("newton-exact")),
        Contender("lazy SSN, m = 2", make=lazy_every(2), control=True),
        Contender("lazy SSN, m = 10", make=lazy_every(10), control=True),
        Contender("lazy SSN, m = 20", make=lazy_every(20), control=True),
        Contender("lazy SSN, automatic m", make=lazy_every("auto"), control=True),
    ],
    expect=at_most(0.5, of=EVERY_STEP.name),
    scales={
        "smoke": Scale(seeds=2, features=20, target=1e-6),
        "quick": Scale(seeds=10, features=150, target=1e-6),
        "full": Scale(seeds=12, features=300, target=1e-6),
    },
    headline=True,
)
def svm_hessians(
    contender: Contender, rng: np.random.Generator, *, features: int, target: float
) -> Measurement:
    """Count the Hessians until the gradient's norm is at the target.

    A squared hinge classifier of the digits on random cosine features, which are drawn anew for
    each seed; its generalized Hessian jumps at every margin. All start at 0 and end at the first
    gradient within the target. The SciPy methods get the Hessian as a matrix, one an iteration.
    Read the Cholesky factorizations among the extras beside the Hessians: stale ones cause
    more trials, so that the saving in time is smaller (`svm_seconds`).
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    run = NewtonRun(digits_svm(for_instance, features), target=target)
    return _by_hessians(run.finish(contender.make))


@claim(
    method="lazy-ssn",
    statement="The number of Hessians falls with the length m of their use, at least as its square "
    "root",
    metric=HESSIANS,
    contenders=[Contender("lazy SSN", make=lazy)],
    expect=trend(-1.0, -0.3, over="hess_every"),
    scales={
        "smoke": Scale(seeds=2, features=20, sweep={"hess_every": [1, 4]}),
        "quick": Scale(seeds=8, features=150, sweep={"hess_every": [1, 2, 5, 10, 20]}),
        "full": Scale(seeds=12, features=400, sweep={"hess_every": [1, 2, 5, 10, 20, 40]}),
    },
)
def svm_reuse_lengths(
    contender: Contender, rng: np.random.Generator, *, features: int, hess_every: int
) -> Measurement:
    """Count the Hessians of the problem of `svm_hessians` for every length.

    The extras tell the price: iterations and factorizations grow with m.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    run = NewtonRun(digits_svm(for_instance, features), target=1e-8)
    return _by_hessians(run.finish(contender.make, hess_every=hess_every))


@claim(
    method="lazy-ssn",
    statement="Where a Hessian costs many factorizations, the method with a tuned m takes at most "
    "0.8 of the CPU time of the one that computes a Hessian every step",
    metric=CPU,
    contenders=[
        Contender("lazy SSN, m tuned", make=lazy, tune={"hess_every": LENGTHS}),
        EVERY_STEP,
        Contender("SciPy L-BFGS-B", make=scipy_solver("L-BFGS-B")),
        Contender("SciPy Newton-CG", make=scipy_solver("Newton-CG")),
        Contender("SciPy trust-ncg", make=scipy_solver("trust-ncg")),
        Contender("scikit-learn LinearSVC", make=linear_svc),
        Contender("lazy SSN, automatic m", make=lazy_every("auto"), control=True),
    ],
    expect=at_most(0.8, of=EVERY_STEP.name),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, features=20, shifts=1, target=1e-5),
        "quick": Scale(seeds=8, tuning_seeds=1, features=200, shifts=4, target=1e-6),
        "full": Scale(seeds=10, tuning_seeds=2, features=300, shifts=9, target=1e-6),
    },
)
def svm_seconds(
    contender: Contender,
    rng: np.random.Generator,
    *,
    features: int,
    shifts: int,
    target: float,
    **tuned: Any,
) -> Measurement:
    """Time the problem of `svm_hessians` with more samples, shifted copies of the digits.

    More samples make the Hessian dearer, and leave the factorization as it is. The SciPy methods
    other than L-BFGS-B get products with the Hessian. LinearSVC is fit with tighter and tighter
    tolerances, and the time is that of the first fit that arrives.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    run = NewtonRun(digits_svm(for_instance, features, shifts=shifts), target=target)
    unit = run.seconds_of_a_gradient()
    return _by_cpu(run.finish(contender.make, **tuned), unit)


@claim(
    method="lazy-ssn",
    statement="Where a Hessian costs many factorizations, the CPU time does not grow with the "
    "length m of its use",
    metric=CPU,
    contenders=[Contender("lazy SSN", make=lazy)],
    expect=trend(-1.0, 0.0, over="hess_every"),
    scales={
        "smoke": Scale(seeds=2, features=20, shifts=1, sweep={"hess_every": [1, 4]}),
        "quick": Scale(seeds=8, features=200, shifts=4, sweep={"hess_every": [1, 2, 5, 10, 20]}),
        "full": Scale(seeds=10, features=300, shifts=9, sweep={"hess_every": [1, 2, 5, 10, 20]}),
    },
)
def svm_seconds_over_lengths(
    contender: Contender, rng: np.random.Generator, *, features: int, shifts: int, hess_every: int
) -> Measurement:
    """Time the problem of `svm_seconds` for every length; `svm_reuse_lengths` counts its Hessians.

    The two together are the trade: fewer Hessians, and more factorizations.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    run = NewtonRun(digits_svm(for_instance, features, shifts=shifts), target=1e-6)
    unit = run.seconds_of_a_gradient()
    return _by_cpu(run.finish(contender.make, hess_every=hess_every), unit)


def _within_time(
    contender: Contender, problem: TorchDerivatives, hessians: int, **tuned: Any
) -> Measurement:
    """Return the lowest objective within the CPU time of some Hessians, timed in this trial."""
    assert contender.make is not None
    clock = NewtonRun(problem)
    clock.finish(lambda run: run.hessian(run.x0))
    clock.finish(lambda run: [run.hessian(run.x0), run.show(run.x0)])
    run = NewtonRun(problem, seconds=hessians * clock.cpu)
    run.finish(contender.make, **tuned)
    seconds, _, values, _ = zip(*run.curve, strict=True)
    return Measurement(run.best, (seconds, values), _extras(run))


def _objective(name: str, x: str = "CPU seconds") -> Metric:
    return Metric(name, better="lower", average="geometric mean", curve=(x, name))


@claim(
    method="lazy-ssn",
    statement="In the CPU time of a few Hessians, the method takes the objective of a matrix "
    "factorization to at most 0.9 of what Hessians at every step achieve",
    metric=_objective("objective of the factorization"),
    contenders=[
        Contender("lazy SSN (m = 5)", make=lazy),
        EVERY_STEP,
        LEAP_SSN,
        Contender("SciPy L-BFGS-B", make=scipy_solver("L-BFGS-B")),
        Contender("SciPy trust-ncg", make=scipy_solver("trust-ncg")),
        Contender("pytorch-minimize l-bfgs", make=pytorch_minimize("l-bfgs")),
        Contender("pytorch-minimize newton-cg", make=pytorch_minimize("newton-cg")),
        Contender("lazy SSN, m = 2", make=lazy_every(2), control=True),
        Contender("lazy SSN, m = 10", make=lazy_every(10), control=True),
        Contender("lazy SSN, automatic m", make=lazy_every("auto"), control=True),
    ],
    expect=at_most(0.9, of=EVERY_STEP.name),
    scales={
        "smoke": Scale(seeds=2, images=20, hessians=3),
        "quick": Scale(seeds=8, images=60, hessians=8),
        "full": Scale(seeds=16, images=100, hessians=16),
    },
)
def factorization(
    contender: Contender, rng: np.random.Generator, *, images: int, hessians: int
) -> Measurement:
    """Factorize random digits by four components, negative entries of which are penalized.

    Not convex, and with a Hessian by automatic differentiation, which costs many
    factorizations. Each contender has the CPU time of ``hessians`` Hessians, timed in the trial.
    Gradients and products with the Hessian are cheap here, and L-BFGS and the Newton-Krylov methods
    are ahead of all that make a Hessian: what the claim shows is what laziness gains among these.
    """
    for_instance, _ = rng.spawn(2)
    problem = TorchDerivatives(penalized_factorization(for_instance, images=images))
    return _within_time(contender, problem, hessians)


@claim(
    method="lazy-ssn",
    statement="After the same number of Hessians, the training loss of a network with Lipschitz "
    "constraints is at most half of that with a Hessian every step",
    metric=_objective("training loss with penalty", "Hessians"),
    contenders=[
        Contender("lazy SSN (m = 5)", make=lazy),
        EVERY_STEP,
        LEAP_SSN,
        Contender("pytorch-minimize newton-exact", make=pytorch_minimize("newton-exact")),
        Contender("lazy SSN, m = 2", make=lazy_every(2), control=True),
        Contender("lazy SSN, m = 10", make=lazy_every(10), control=True),
    ],
    expect=at_most(0.5, of=EVERY_STEP.name),
    scales={
        "smoke": Scale(seeds=2, images=40, hidden=3, hessians=2),
        "quick": Scale(seeds=8, images=100, hidden=4, hessians=10),
        "full": Scale(seeds=10, images=300, hidden=8, hessians=15),
    },
)
def network_hessians(
    contender: Contender, rng: np.random.Generator, *, images: int, hidden: int, hessians: int
) -> Measurement:
    """Train a small network of digits whose layers are to have singular values of at most 2.

    The activation max(0, z)²/2 and the squared distance to the constraint have derivatives with
    kinks. The run ends when the Hessians are spent. The peers take one at each iteration.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    problem = TorchDerivatives(lipschitz_network(for_instance, images=images, hidden=hidden))
    run = NewtonRun(problem, hessians=hessians, seconds=60.0)
    run.finish(contender.make)
    _, counts, values, _ = zip(*run.curve, strict=True)
    return Measurement(run.best, (counts, values), _extras(run))


@claim(
    method="lazy-ssn",
    statement="In the same CPU time, the training loss of a network with Lipschitz constraints is "
    "at most half of that with a Hessian every step",
    metric=_objective("training loss with penalty"),
    contenders=[
        Contender("lazy SSN (m = 5)", make=lazy),
        EVERY_STEP,
        LEAP_SSN,
        Contender("SciPy L-BFGS-B", make=scipy_solver("L-BFGS-B")),
        Contender("SciPy trust-ncg", make=scipy_solver("trust-ncg")),
        Contender("pytorch-minimize newton-cg", make=pytorch_minimize("newton-cg")),
        Contender("Adam", make=adam, tune={"lr": [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]}),
        Contender("lazy SSN, m = 10", make=lazy_every(10), control=True),
    ],
    expect=at_most(0.5, of=EVERY_STEP.name),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, images=40, hidden=3, hessians=3),
        "quick": Scale(seeds=8, tuning_seeds=1, images=100, hidden=4, hessians=15),
        "full": Scale(seeds=10, tuning_seeds=2, images=300, hidden=8, hessians=30),
    },
)
def network_seconds(
    contender: Contender,
    rng: np.random.Generator,
    *,
    images: int,
    hidden: int,
    hessians: int,
    **tuned: Any,
) -> Measurement:
    """Repeat `network_hessians` within the CPU time of some Hessians.

    First-order methods spend it on gradients, of which a Hessian costs many: they are ahead.
    """
    for_instance, _ = rng.spawn(2)
    problem = TorchDerivatives(lipschitz_network(for_instance, images=images, hidden=hidden))
    return _within_time(contender, problem, hessians, **tuned)


@claim(
    method="lazy-ssn",
    statement="Convergence is superlinear at last: each of the last two blocks of steps with one "
    "Hessian makes the gradient at least twenty times shorter",
    metric=Metric(
        "larger factor of the last two blocks",
        better="lower",
        average="geometric mean",
        curve=("step", "norm of the gradient"),
    ),
    contenders=[
        Contender("lazy SSN (m = 5)", make=lazy_every(5)),
        Contender("a Hessian every step (m = 1)", make=lazy_every(1), control=True),
        Contender("lazy SSN, m = 10", make=lazy_every(10), control=True),
    ],
    expect=at_most(0.05),
    scales={
        "smoke": Scale(seeds=2, features=20),
        "quick": Scale(seeds=10, features=150),
        "full": Scale(seeds=16, features=400),
    },
)
def superlinear_tail(
    contender: Contender, rng: np.random.Generator, *, features: int
) -> Measurement:
    """Follow the gradient's norm of the problem of `svm_hessians` from Hessian to Hessian.

    The value is the larger of the last two ratios between norms at new Hessians, down to 1e-12.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    run = NewtonRun(digits_svm(for_instance, features), target=1e-12)
    run.finish(contender.make)
    norms = _norms_at_hessians(run)
    factors = norms[1:] / norms[:-1]
    value = float(factors[-2:].max()) if run.reached and len(factors) > 1 else math.inf
    return Measurement(value, (np.arange(len(norms)), norms), _extras(run))


def _norms_at_hessians(run: NewtonRun) -> Array:
    """Return the norm where each Hessian was taken, and the last: the first seen after it is."""
    _, hessians, _, norms = (np.array(column) for column in zip(*run.curve, strict=True))
    last_before = [np.flatnonzero(hessians < count)[-1] for count in range(1, run.hessians + 1)]
    at_hessians: Array = np.append(norms[last_before], norms[-1])
    return at_hessians


@claim(
    method="lazy-ssn",
    statement="The number of steps for a contact problem does not depend on the mesh, with the "
    "mass matrix as the metric",
    metric=Metric("steps", better="lower", average="geometric mean"),
    contenders=[
        Contender("lazy SSN (m = 5)", make=lambda **options: options),
        Contender(
            "a Hessian every step (m = 1)", make=lambda **o: o | {"hess_every": 1}, control=True
        ),
    ],
    expect=trend(-0.15, 0.15, over="cells"),
    scales={
        "smoke": Scale(seeds=2, sweep={"cells": [6, 12]}),
        "quick": Scale(seeds=8, sweep={"cells": [8, 16, 32, 64]}),
        "full": Scale(seeds=10, sweep={"cells": [16, 32, 64, 128]}),
    },
)
def mesh_independence(contender: Contender, rng: np.random.Generator, *, cells: int) -> Measurement:
    """Press a membrane on stiffening springs onto an obstacle, on finer and finer meshes.

    The obstacle is a bound at each node. The dual norm of L² measures the subgradient, to 1e-7.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    membrane = contact_membrane(for_instance, cells, gamma=0.0)
    result = minimize_lazy_ssn(
        membrane,
        membrane.x0,
        jac=True,
        hess=membrane.hessian,
        bounds=[(low, None) for low in membrane.lower],
        gtol=1e-7,
        **contender.make(metric=membrane.mass),
    )
    value = float(result.nit) if result.success else math.inf
    return Measurement(value, extras={"Hessians": result.nhev, "factorizations": result.n_factor})


def _time_membrane(
    contender: Contender,
    membrane: ContactMembrane,
    target: float,
    tuned: dict[str, Any],
    **limits: Any,
) -> Measurement:
    """Return the CPU time to a gradient of ``target`` times that of the start."""
    assert contender.make is not None
    start = float(np.linalg.norm(membrane(membrane.x0)[1]))
    run = NewtonRun(membrane, target=target * start, **limits)
    unit = run.seconds_of_a_gradient()
    return _by_cpu(run.finish(contender.make, **tuned), unit)


@claim(
    method="lazy-ssn",
    statement="For a contact problem with bounds on a fine mesh, the method takes at most half the "
    "CPU time of the best first-order peer",
    metric=CPU,
    contenders=[
        Contender("lazy SSN (m = 5), L² metric", make=lazy_in_l2),
        Contender("SciPy L-BFGS-B", make=scipy_solver("L-BFGS-B")),
        Contender("FISTA", make=fista, tune={"step": [0.03, 0.06, 0.12, 0.24]}),
        Contender("lazy SSN, automatic m", make=lambda run: lazy_in_l2(run, "auto"), control=True),
        Contender("lazy SSN, Euclidean metric", make=lazy, control=True),
    ],
    expect=at_most(0.5, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, cells=8, target=1e-4),
        "quick": Scale(seeds=8, tuning_seeds=1, cells=32, target=1e-6),
        "full": Scale(seeds=8, tuning_seeds=1, cells=64, target=1e-6),
    },
)
def contact_seconds(
    contender: Contender,
    rng: np.random.Generator,
    *,
    cells: int,
    target: float,
    **tuned: Any,
) -> Measurement:
    """Time the problem of `mesh_independence`, to a projected gradient ``target`` of the start's.

    The tangent matrices are sparse and assembled by scikit-fem. The steps of the peers grow with
    the mesh, as the condition number does.
    """
    for_instance, _ = rng.spawn(2)
    membrane = contact_membrane(for_instance, cells, gamma=0.0)
    bounds = (membrane.lower, np.full(membrane.d, np.inf))
    return _time_membrane(contender, membrane, target, tuned, bounds=bounds, gradients=8000)


@claim(
    method="lazy-ssn",
    statement="For a contact problem with a penalty on a fine mesh, the method with a tuned m "
    "takes no more CPU time than the best of L-BFGS and Newton-Krylov methods",
    metric=CPU,
    contenders=[
        Contender("lazy SSN, m tuned", make=lazy, tune={"hess_every": [1, 2, 5, 10, "auto"]}),
        Contender("SciPy L-BFGS-B", make=scipy_solver("L-BFGS-B")),
        Contender("SciPy Newton-CG", make=scipy_solver("Newton-CG")),
        Contender("SciPy trust-ncg", make=scipy_solver("trust-ncg")),
        Contender("SciPy trust-krylov", make=scipy_solver("trust-krylov")),
        Contender("lazy SSN (m = 5)", make=lazy, control=True),
        Contender("lazy SSN (m = 5), L² metric", make=lazy_in_l2, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, cells=8, target=1e-4),
        "quick": Scale(seeds=8, tuning_seeds=1, cells=32, target=1e-7),
        "full": Scale(seeds=8, tuning_seeds=1, cells=96, target=1e-7),
    },
)
def penalized_contact_seconds(
    contender: Contender,
    rng: np.random.Generator,
    *,
    cells: int,
    target: float,
    **tuned: Any,
) -> Measurement:
    """Time the membrane with a penalty, whose derivative has kinks, in place of the bounds.

    A sparse tangent matrix is assembled about as fast as a gradient and faster than it is
    factorized: there is little for laziness to save, and a small m, which "auto" finds, is best.
    The Krylov methods get products without a matrix.
    """
    for_instance, _ = rng.spawn(2)
    membrane = contact_membrane(for_instance, cells)
    return _time_membrane(contender, membrane, target, tuned, gradients=1000)


@claim(
    method="lazy-ssn",
    statement="From bad starts, up to a thousand times the solution's size, every run converges",
    metric=Metric("share of the starts that converge", better="higher"),
    contenders=[
        Contender("lazy SSN (m = 5)", make=lazy),
        Contender("semismooth Newton, undamped", make=undamped_newton),
        Contender("SciPy Newton-CG", make=scipy_solver("Newton-CG")),
        Contender("SciPy trust-ncg", make=scipy_solver("trust-ncg")),
        Contender("a Hessian every step (m = 1)", make=lazy_every(1), control=True),
    ],
    expect=at_least(1.0),
    scales={
        "smoke": Scale(seeds=2, starts=1, cells=6),
        "quick": Scale(seeds=8, starts=4, cells=12),
        "full": Scale(seeds=16, starts=8, cells=24),
    },
)
def bad_starts(
    contender: Contender, rng: np.random.Generator, *, starts: int, cells: int
) -> Measurement:
    """Start the problem of `penalized_contact_seconds` from rough random shapes of any size.

    A start counts as solved if the gradient's norm comes to 1e-8 of that at the flat membrane.
    """
    assert contender.make is not None
    for_instance, _ = rng.spawn(2)
    membrane = contact_membrane(for_instance, cells)
    target = 1e-8 * float(np.linalg.norm(membrane(membrane.x0)[1]))
    solved = 0
    for _ in range(starts):
        size = 10 ** for_instance.uniform(-1, 3)
        x0 = size * for_instance.standard_normal(membrane.d)
        run = NewtonRun(membrane, target=target, x0=x0, seconds=10.0)
        solved += run.finish(contender.make).reached
    return Measurement(solved / starts)
