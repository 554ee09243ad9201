"""Claims about AutoSpec, learned iterative spectral algorithms.

A contender's ``make`` builds what the claim compares, and is called with the operator and a
generator: a `Preconditioner`, an approximation of f(A) b, or Ritz pairs. A peer of your own takes
one line, ``claim.with_contender(Contender("mine", make=mine))``.

AutoSpec runs with the weights that the library ships, which have seen synthetic spectra alone, and
is told nothing of the spectrum. "Exact bounds" are peers that are told both of its ends, which
nobody knows in practice; "from the probe" takes the same Lanczos steps as AutoSpec and Chebyshev's
polynomial on the interval that these show.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import cg, eigsh, lobpcg

from thalweg.common.optional import requires
from thalweg.curvature import (
    AutoSpec,
    RecurrenceCoefficients,
    alternations,
    autospec_eigsh,
    chebyshev_recurrence,
    pretrained,
)
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_least, at_most, claim
from thalweg.tasks import SPDOperator, decomposed_operator, digits_laplacian, spd_operator

with requires("peers"):
    import pyamg
    import torch

Values = NDArray[np.float64]

DEGREE = 12
OPERATORS = ("poisson", "anisotropic", "elasticity", "l-shape", "image graph")
# At full, the five matrices have 100,000 to 270,000 unknowns.
SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, unknowns=900),
    "quick": Scale(seeds=8, tuning_seeds=1, unknowns=8_000),
    "full": Scale(seeds=10, tuning_seeds=1, unknowns=180_000),
}


@dataclass(frozen=True)
class Preconditioner:
    """What conjugate gradients are preconditioned with, and what it costs in products with A."""

    M: Any
    per_application: float
    to_set_up: int = 0


def learned(operator: SPDOperator, rng: np.random.Generator) -> Preconditioner:
    """Return AutoSpec's preconditioner, as shipped."""
    model = pretrained("precond", DEGREE)
    probe = model.probe(operator.matrix, rng=rng)
    return Preconditioner(model.operator(operator.matrix, probe), DEGREE, probe.matvecs)


def chebyshev(
    operator: SPDOperator, rng: np.random.Generator, *, low: float = 1.0
) -> Preconditioner:
    """Return Chebyshev's preconditioner, for ``low`` times the smallest eigenvalue."""
    ends = {"low": low * operator.lam_min, "high": 1.01 * operator.lam_max}
    polynomial = chebyshev_recurrence("precond", DEGREE, **ends)
    return Preconditioner(polynomial.operator(operator.matrix), DEGREE)


def chebyshev_of_probe(operator: SPDOperator, rng: np.random.Generator) -> Preconditioner:
    """Return Chebyshev's preconditioner on the interval that AutoSpec's probe finds."""
    probe = pretrained("precond", DEGREE).probe(operator.matrix, rng=rng)
    ends = {"low": probe.interval.low * probe.lam_max, "high": probe.lam_max}
    polynomial = chebyshev_recurrence("precond", DEGREE, **ends)
    return Preconditioner(polynomial.operator(operator.matrix), DEGREE, probe.matvecs)


def identity(operator: SPDOperator, rng: np.random.Generator) -> Preconditioner:
    """Return no preconditioner."""
    return Preconditioner(None, 0)


def jacobi(operator: SPDOperator, rng: np.random.Generator) -> Preconditioner:
    """Return the inverse of the diagonal."""
    return Preconditioner(sparse.diags_array(1 / operator.matrix.diagonal()), 0)


def multigrid(operator: SPDOperator, rng: np.random.Generator) -> Preconditioner:
    """Return a V-cycle of pyamg's smoothed aggregation, whose cost is in products, too."""
    matrix = operator.matrix.copy()
    # pyamg's indices have 32 bits.
    matrix.indices, matrix.indptr = matrix.indices.astype("i4"), matrix.indptr.astype("i4")
    hierarchy = pyamg.smoothed_aggregation_solver(matrix)
    return Preconditioner(hierarchy.aspreconditioner(), hierarchy.cycle_complexity())


AUTOSPEC = Contender("AutoSpec", make=learned)
CG = Contender("CG", make=identity)
JACOBI = Contender("Jacobi", make=jacobi)
EXACT = Contender("Chebyshev, exact bounds", make=chebyshev)
PROBED = Contender("Chebyshev, from the probe", make=chebyshev_of_probe)
TOO_LOW = Contender("Chebyshev, low end / 10", make=partial(chebyshev, low=0.1))
AMG = Contender("multigrid", make=multigrid)
TUNED = Contender(
    "Chebyshev, low end tuned", make=chebyshev, tune={"low": [0.1, 1.0, 3.0, 10.0, 30.0, 300.0]}
)


def control(contender: Contender) -> Contender:
    """Return a contender that is shown, and not compared with."""
    return replace(contender, control=True)


BESIDE_CG = [AUTOSPEC, CG, *map(control, (JACOBI, EXACT, PROBED, AMG))]


@dataclass(frozen=True)
class Solve:
    """A run of preconditioned conjugate gradients to a relative residual of 1e-8."""

    iterations: float
    matvecs: float
    seconds: float

    def measured(self, value: str) -> Measurement:
        """Return one of the figures as the metric, and all as extras."""
        figures = {name: float(getattr(self, name)) for name in self.__dataclass_fields__}
        return Measurement(figures[value], extras=figures)


def solve(contender: Contender, rng: np.random.Generator, unknowns: int, **tuned: Any) -> Solve:
    """Solve A x = b for a Gaussian b and one of the five matrices, which the seed chooses."""
    for_instance, for_contender = rng.spawn(2)
    operator = spd_operator(OPERATORS[for_instance.integers(len(OPERATORS))], unknowns)
    A = operator.matrix
    b = for_instance.normal(size=A.shape[0])
    iterations = 0

    def count(_: Values) -> None:
        nonlocal iterations
        iterations += 1

    assert contender.make is not None
    started = time.perf_counter()
    preconditioner = contender.make(operator, for_contender, **tuned)
    x, info = cg(A, b, rtol=1e-8, maxiter=50_000, M=preconditioner.M, callback=count)
    seconds = time.perf_counter() - started
    if info != 0 or np.linalg.norm(b - A @ x) > 1e-7 * np.linalg.norm(b):
        return Solve(np.inf, np.inf, np.inf)
    matvecs = preconditioner.to_set_up + iterations * (1 + preconditioner.per_application)
    return Solve(iterations, matvecs, seconds)


def solver_metric(name: str, unit: str = "") -> Metric:
    """Return the metric of a claim about `solve`."""
    return Metric(name, better="lower", average="geometric mean", unit=unit)


@claim(
    method="autospec",
    statement="On five real matrices, a learned polynomial of degree 12 cuts the iterations of "
    "conjugate gradients to a fifth",
    metric=solver_metric("iterations"),
    contenders=BESIDE_CG,
    expect=at_most(0.2, of="CG"),
    scales=SCALES,
    headline=True,
)
def iterations_of_cg(contender: Contender, rng: np.random.Generator, *, unknowns: int) -> Any:
    """Solve with discretized operators and a graph, of another size and origin than in training.

    Plain conjugate gradients are the basic baseline; the controls say how far others get. An
    iteration counts inner products, and so synchronizations, not work: the products with A and the
    time are among the extras and have claims of their own.
    """
    return solve(contender, rng, unknowns).measured("iterations")


@claim(
    method="autospec",
    statement="Without knowing the spectrum, AutoSpec needs no more iterations than Chebyshev's "
    "polynomials that know both ends of it",
    metric=solver_metric("iterations"),
    contenders=[AUTOSPEC, EXACT, PROBED, control(TOO_LOW), control(TUNED)],
    expect=at_most(1.0, of="best peer"),
    scales=SCALES,
)
def iterations_beside_chebyshev(
    contender: Contender, rng: np.random.Generator, *, unknowns: int, **tuned: Any
) -> Any:
    """Compare with the classical polynomial of the same degree.

    The exact bounds are Chebyshev's natural setting, but not its best one: the few smallest
    eigenvalues can be left to conjugate gradients, and the control that tunes the low end over all
    operators says what that is worth. The peer "from the probe" divides the smallest Ritz value by
    four, as AutoSpec does for its interval.
    """
    return solve(contender, rng, unknowns, **tuned).measured("iterations")


@claim(
    method="autospec",
    statement="AutoSpec's preconditioner takes at most 1.5 times the products with A of plain "
    "conjugate gradients",
    metric=solver_metric("products with A"),
    contenders=BESIDE_CG,
    expect=at_most(1.5, of="CG"),
    scales=SCALES,
)
def products_with_the_operator(
    contender: Contender, rng: np.random.Generator, *, unknowns: int
) -> Any:
    """Count the products, those of the probe included; a multigrid cycle in products of equal work.

    Conjugate gradients are optimal among all that take the same number of products, so no
    polynomial can win here: the claim bounds what fewer inner products cost.
    """
    return solve(contender, rng, unknowns).measured("matvecs")


@claim(
    method="autospec",
    statement="On one core, AutoSpec's preconditioner takes no more time than plain conjugate "
    "gradients",
    metric=solver_metric("time", "s"),
    contenders=BESIDE_CG,
    expect=at_most(1.0, of="CG"),
    scales=SCALES,
)
def time_to_solve(contender: Contender, rng: np.random.Generator, *, unknowns: int) -> Any:
    """Measure the whole solve, set-up included.

    On one core inner products are cheap, and what counts is the number of passes over memory.
    Multigrid is the right tool for those of the operators that are elliptic.
    """
    return solve(contender, rng, unknowns).measured("seconds")


FUNCTION_DEGREE = 16
# e^-A has a scale of its own: the matrices are scaled to this largest eigenvalue.
LARGEST = 20.0
EXACT_FUNCTIONS: dict[str, Callable[[Values], Values]] = {
    "inv": lambda x: 1 / x,
    "invsqrt": lambda x: x**-0.5,
    "sqrt": np.sqrt,
    "log": np.log,
    "exp": lambda x: np.exp(-x),
}
MATRICES = ("digits graph", "digits kernel", "poisson", "elasticity")


@dataclass(frozen=True, eq=False)
class Function:
    """A function of a matrix, applied to a vector; ``ends`` are those of the spectrum."""

    name: str
    A: Any
    b: Values
    ends: tuple[float, float]


def learned_function(problem: Function, rng: np.random.Generator) -> Values:
    """Return what AutoSpec makes of it, as shipped."""
    model = pretrained(problem.name, FUNCTION_DEGREE)  # type: ignore[arg-type]
    return np.asarray(model.apply_to(problem.A, problem.b, rng=rng))


def chebyshev_function(problem: Function, rng: np.random.Generator, *, low: float = 1.0) -> Values:
    """Return Chebyshev's interpolant, for ``low`` times the smallest eigenvalue."""
    bottom = min(low * problem.ends[0], 0.9 * problem.ends[1])
    polynomial = chebyshev_recurrence(
        problem.name, FUNCTION_DEGREE, low=bottom, high=problem.ends[1]
    )
    return np.asarray(polynomial.apply_to(problem.A, problem.b))


def chebyshev_function_of_probe(problem: Function, rng: np.random.Generator) -> Values:
    """Return Chebyshev's interpolant on the interval of AutoSpec's probe."""
    probe = pretrained("inv", FUNCTION_DEGREE).probe(problem.A, rng=rng)
    ends = {"low": probe.interval.low * probe.lam_max, "high": probe.lam_max}
    polynomial = chebyshev_recurrence(problem.name, FUNCTION_DEGREE, **ends)
    return np.asarray(polynomial.apply_to(problem.A, problem.b))


def lanczos_function(problem: Function, rng: np.random.Generator) -> Values:
    """Return the Lanczos approximation of as many products, with full reorthogonalization."""
    size = float(np.linalg.norm(problem.b))
    basis = [problem.b / size]
    diagonal, off = [], []
    for _ in range(FUNCTION_DEGREE):
        vector = problem.A @ basis[-1]
        diagonal.append(basis[-1] @ vector)
        for u in (*basis, *basis):
            vector = vector - (u @ vector) * u
        off.append(float(np.linalg.norm(vector)))
        basis.append(vector / off[-1])
    values, vectors = eigh_tridiagonal(np.array(diagonal), np.array(off[:-1]))
    weights = vectors @ (EXACT_FUNCTIONS[problem.name](np.asarray(values)) * vectors[0])
    return np.asarray(size * np.array(basis[:-1]).T @ weights)


def taylor_function(problem: Function, rng: np.random.Generator) -> Values:
    """Return the Taylor series around the largest eigenvalue: of Neumann, for the inverse."""
    largest = problem.ends[1]
    order = np.arange(FUNCTION_DEGREE + 1)
    if problem.name == "exp":
        coefficients = np.exp(-largest) * (-largest) ** order / special.factorial(order)
    elif problem.name == "log":
        coefficients = np.append(np.log(largest), -((-1.0) ** order[1:]) / order[1:])
    else:
        power = {"inv": -1.0, "invsqrt": -0.5, "sqrt": 0.5}[problem.name]
        ratios = (power - order[:-1]) / order[1:]
        coefficients = largest**power * np.append(1.0, np.cumprod(ratios))
    rows = np.tile([1 / largest, -1.0, 0.0, 0.0], (len(order), 1))
    rows[:, 3] = coefficients
    return np.asarray(RecurrenceCoefficients(rows).apply_to(problem.A, problem.b))


def function_errors(contender: Contender, rng: np.random.Generator, **tuned: Any) -> Measurement:
    """Measure the relative errors of five functions of one matrix, which the seed chooses."""
    for_instance, for_contender = rng.spawn(2)
    decomposed = decomposed_operator(MATRICES[for_instance.integers(len(MATRICES))])
    scale = LARGEST / decomposed.values[-1]
    values, vectors = scale * decomposed.values, decomposed.vectors
    b = for_instance.normal(size=len(values))
    ends = (float(values[0]), float(values[-1]))
    assert contender.make is not None
    errors = {}
    for name, function in EXACT_FUNCTIONS.items():
        exact = vectors @ (function(values) * (vectors.T @ b))
        problem = Function(name, scale * decomposed.matrix, b, ends)
        found = contender.make(problem, for_contender, **tuned)
        errors[name] = float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
    return Measurement(float(np.exp(np.mean(np.log(list(errors.values()))))), extras=errors)


FUNCTION_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1),
    "quick": Scale(seeds=20, tuning_seeds=2),
    "full": Scale(seeds=80, tuning_seeds=4),
}
FUNCTION_ERROR = Metric("relative error", better="lower", average="geometric mean")
LEARNED_FUNCTION = Contender("AutoSpec", make=learned_function)
EXACT_FUNCTION = Contender("Chebyshev, exact bounds", make=chebyshev_function)
PROBED_FUNCTION = Contender("Chebyshev, from the probe", make=chebyshev_function_of_probe)
LANCZOS = Contender("Lanczos", make=lanczos_function)
TAYLOR = Contender("Taylor series", make=taylor_function)
WRONG_BOUNDS = [
    Contender("Chebyshev, low end / 10", make=partial(chebyshev_function, low=0.1), control=True),
    Contender("Chebyshev, low end x 10", make=partial(chebyshev_function, low=10.0), control=True),
]


@claim(
    method="autospec",
    statement="For functions of real matrices, the error of a learned polynomial is at most that "
    "of Chebyshev interpolation, even if that knows the spectrum's ends",
    metric=FUNCTION_ERROR,
    contenders=[
        LEARNED_FUNCTION,
        EXACT_FUNCTION,
        PROBED_FUNCTION,
        *WRONG_BOUNDS,
        control(LANCZOS),
    ],
    expect=at_most(1.0, of="best peer"),
    scales=FUNCTION_SCALES,
)
def functions_beside_chebyshev(contender: Contender, rng: np.random.Generator) -> Measurement:
    """Apply the inverse, its root, the root, the logarithm and the exponential, by degree 16.

    The matrices are a graph, a kernel matrix and two discretized operators, decomposed for the
    exact result; a value is the geometric mean of the five errors, which are among the extras.
    """
    return function_errors(contender, rng)


@claim(
    method="autospec",
    statement="For functions of real matrices, the error of a learned polynomial is at most a "
    "tenth of a Taylor series of the same degree",
    metric=FUNCTION_ERROR,
    contenders=[LEARNED_FUNCTION, TAYLOR],
    expect=at_most(0.1, of="Taylor series"),
    scales=FUNCTION_SCALES,
)
def functions_beside_taylor(contender: Contender, rng: np.random.Generator) -> Measurement:
    """Compare with the basic baseline, which knows the largest eigenvalue alone."""
    return function_errors(contender, rng)


@claim(
    method="autospec",
    statement="For functions of real matrices, the error of a learned polynomial is at most twice "
    "that of Lanczos with as many products",
    metric=FUNCTION_ERROR,
    contenders=[LEARNED_FUNCTION, LANCZOS],
    expect=at_most(2.0, of="Lanczos"),
    scales=FUNCTION_SCALES,
)
def functions_beside_lanczos(contender: Contender, rng: np.random.Generator) -> Measurement:
    """Compare with the strongest method, which adapts to the spectrum and to the vector.

    It takes an inner product a step and keeps all vectors, and has to start again for the next b;
    a polynomial does neither.
    """
    return function_errors(contender, rng)


PAIRS = 10
GUARD = 4
FILTERINGS = 5


@lru_cache(maxsize=1)
def graph_and_cut() -> tuple[Any, float]:
    """Return the digits' graph Laplacian, shifted, and its smallest unwanted eigenvalue."""
    laplacian = digits_laplacian()
    matrix = sparse.csr_array(laplacian + 1e-3 * sparse.eye_array(laplacian.shape[0]))
    wanted = PAIRS + GUARD + 1
    values = eigsh(matrix.tocsc(), wanted, sigma=0.0, which="LM", rng=0)[0]
    return matrix, float(np.sort(values)[-1])


def learned_filter(A: Any, cut: float, rng: np.random.Generator) -> float:
    """Return the largest residual after filtering with AutoSpec, which is not told the cut."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that five filterings are not enough to converge
        result = autospec_eigsh(A, PAIRS, guard=GUARD, maxiter=FILTERINGS, rng=rng)
    return float(result.residuals.max())


def chebyshev_filter(
    A: Any, cut: float, rng: np.random.Generator, *, wrong: float = 1.0, adapt: bool = False
) -> float:
    """Return the largest residual after filtering with Chebyshev's polynomial for a cut.

    With ``adapt`` the cut is the largest Ritz value of the block, as for AutoSpec.
    """
    probe = pretrained("filter", 12).probe(A, rng=rng)
    block = np.linalg.qr(rng.normal(size=(A.shape[0], PAIRS + GUARD)))[0]
    values, block = _ritz(A, block)
    for _ in range(FILTERINGS):
        used = min(values[-1], 0.99 * probe.lam_max) if adapt else wrong * cut
        low = used / 10
        polynomial = chebyshev_recurrence("filter", 12, low=low, high=probe.lam_max, cut=used)
        values, block = _ritz(A, np.linalg.qr(polynomial.apply_to(A, block))[0])
    return float(np.linalg.norm(A @ block - block * values, axis=0)[:PAIRS].max())


def _ritz(A: Any, block: Values) -> tuple[Values, Values]:
    values, rotation = np.linalg.eigh(block.T @ (A @ block))
    return values, block @ rotation


@claim(
    method="autospec",
    statement="Filtered subspace iteration for the lowest eigenpairs of a graph ends with a "
    "residual of at most that with Chebyshev's filter",
    metric=Metric("largest residual", better="lower", average="geometric mean"),
    contenders=[
        Contender("AutoSpec", make=learned_filter),
        Contender("Chebyshev, exact cut", make=chebyshev_filter),
        Contender("Chebyshev, adapted cut", make=partial(chebyshev_filter, adapt=True)),
        Contender("Chebyshev, cut x 2", make=partial(chebyshev_filter, wrong=2.0), control=True),
        Contender("Chebyshev, cut / 2", make=partial(chebyshev_filter, wrong=0.5), control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1),
        "quick": Scale(seeds=20, tuning_seeds=2),
        "full": Scale(seeds=100, tuning_seeds=2),
    },
)
def filtering(contender: Contender, rng: np.random.Generator) -> Measurement:
    """Filter a block of 14 random vectors five times, with degree 12, for ten pairs.

    The graph joins scikit-learn's digits to their eight nearest neighbors. The exact cut is the
    smallest eigenvalue that the block has no room for; adapted cuts are the block's largest Ritz
    value. The unwanted spectrum of this graph has no gaps, for which Chebyshev's filter is optimal.
    """
    _, for_contender = rng.spawn(2)
    assert contender.make is not None
    return Measurement(contender.make(*graph_and_cut(), for_contender))


@claim(
    method="autospec",
    statement="As a preconditioner of LOBPCG, AutoSpec cuts its iterations to a third",
    metric=Metric("iterations", better="lower", average="geometric mean"),
    contenders=[
        AUTOSPEC,
        Contender("LOBPCG", make=identity),
        control(JACOBI),
        control(EXACT),
        control(AMG),
    ],
    expect=at_most(1 / 3, of="LOBPCG"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, unknowns=900),
        "quick": Scale(seeds=8, tuning_seeds=1, unknowns=2_500),
        "full": Scale(seeds=8, tuning_seeds=1, unknowns=180_000),
    },
)
def eigenpairs_by_lobpcg(
    contender: Contender, rng: np.random.Generator, *, unknowns: int
) -> Measurement:
    """Find the four lowest eigenpairs of one of the five matrices with SciPy's LOBPCG.

    To a residual of 1e-6 of the largest eigenvalue, with a block of six.
    """
    for_instance, for_contender = rng.spawn(2)
    operator = spd_operator(OPERATORS[for_instance.integers(len(OPERATORS))], unknowns)
    block = for_instance.normal(size=(operator.matrix.shape[0], 6))
    tolerance = 1e-6 * operator.lam_max
    assert contender.make is not None
    started = time.perf_counter()
    preconditioner = contender.make(operator, for_contender)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last two of the block need not converge
        _, _, history = lobpcg(
            operator.matrix,
            block,
            M=preconditioner.M,
            tol=tolerance / 10,
            maxiter=1000,
            largest=False,
            retResidualNormsHistory=True,
        )
    seconds = time.perf_counter() - started
    residuals = np.sort(np.array([np.asarray(norms) for norms in history]), axis=1)[:, 3]
    below = np.flatnonzero(residuals <= tolerance)
    iterations = float(below[0] + 1) if len(below) else np.inf
    products = iterations * 6 * (1 + preconditioner.per_application)
    return Measurement(iterations, extras={"matvecs": products, "seconds": seconds})


@lru_cache(maxsize=2)
def trained_on_uniform_spectra(seed: int, steps: int) -> AutoSpec:
    """Return a preconditioner of degree 8 that was trained on one family of spectra."""
    model = AutoSpec("precond", 8, form="recurrence", hidden=32, probe_steps=8)
    generator = torch.Generator().manual_seed(seed)
    return model.fit_synthetic(
        families=["power"],
        kappa=(50.0, 200.0),
        steps=steps,
        pool=1024,
        generator=generator,
        show_progress=False,
    )


def trained_network(seed: int, steps: int) -> AutoSpec:
    """Return AutoSpec after training."""
    return trained_on_uniform_spectra(seed, steps)


def untrained_network(seed: int, steps: int) -> AutoSpec:
    """Return AutoSpec before training, whose polynomial is a constant."""
    return AutoSpec("precond", 8, form="recurrence", hidden=32, probe_steps=8)


@claim(
    method="autospec",
    statement="Training makes the residual polynomial of degree 9 equioscillate: at least five "
    "alternating extrema are within a tenth of the largest",
    metric=Metric("alternating extrema", better="higher", average="mean"),
    contenders=[
        Contender("AutoSpec", make=trained_network),
        Contender("before training", make=untrained_network, control=True),
    ],
    expect=at_least(5.0),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=20),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=400),
        "full": Scale(seeds=8, tuning_seeds=1, steps=3000),
    },
)
def equioscillation(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Train the form whose recurrence is free, on smooth spectra, and count extrema of 1 - x P(x).

    A minimax residual of degree 9 has ten. The operator's condition number is 100, and its ends
    are not told. What is seen is an oscillation of nearly as many swings (among the extras), whose
    heights are not level: a network serves all operators at once, and a smooth loss does not press
    on all extrema alike.
    """
    for_instance, for_contender = rng.spawn(2)
    values = np.sort(for_instance.uniform(0.01, 1.0, 4000))
    values[[0, -1]] = 0.01, 1.0
    A = sparse.diags_array(values).tocsr()
    assert contender.make is not None
    model = contender.make(int(for_contender.integers(2**31)), steps)
    probe = model.probe(A, rng=for_contender)
    x = np.linspace(0.01, 1.0, 2000)
    polynomial = RecurrenceCoefficients(model.learned_rows(probe))
    y = x * polynomial(x / probe.lam_max)
    residual = 1 - 2 * y / (y.max() + y.min())
    swings = 1 + np.count_nonzero(np.diff(np.sign(residual)))
    return Measurement(
        float(alternations(residual)), curve=(x, residual), extras={"swings": float(swings)}
    )
