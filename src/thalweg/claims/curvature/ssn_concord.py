"""Claims about semismooth Newton for the L1 pseudolikelihood.

A contender's ``make`` is a solver or an estimator of `thalweg.claims.curvature.concord_peers`. To
add your own solver of the pseudolikelihood:
``Contender("mine", make=lambda X, alpha, tol: my_omega(X, alpha, tol))``; your own estimator of a
network: ``Contender("mine", make=lambda X, alpha: my_edges(X, alpha))``. Times
are of the CPU; a solver that misses the tolerance by more than a factor of two counts as infinite.
"""

from __future__ import annotations

import resource
import time
import warnings

import numpy as np
from numpy.typing import NDArray

from thalweg.claims.curvature.concord_network_claims import (
    edge_recovery,
    gene_prediction,
    graphical_lasso_time,
)
from thalweg.claims.curvature.concord_peers import (
    concord,
    coordinate_descent,
    largest_residual,
    network,
)
from thalweg.common.optional import requires
from thalweg.curvature import SSNConcord, ssn_concord
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

with requires("curvature"):
    from sklearn.exceptions import ConvergenceWarning

__all__ = [
    "density_limit",
    "edge_recovery",
    "first_order_time",
    "gene_prediction",
    "graphical_lasso_time",
    "large_network",
    "near_the_density_limit",
    "newton_steps",
    "quadratic_tail",
    "steps_over_size",
    "time_of_coordinate_descent",
]

Array = NDArray[np.float64]

SECONDS = Metric("CPU time", better="lower", average="geometric mean", unit="s")
TOLERANCE = 1e-8
NEWTON = Contender("semismooth Newton", make=concord("bssn"))
PROXIMAL = Contender("proximal gradient", make=concord("fbs"))
FISTA = Contender("FISTA with restarts", make=concord("fista"))


def _seed(rng: np.random.Generator) -> int:
    for_instance, _ = rng.spawn(2)
    return int(for_instance.integers(2**31))


def _time(
    contender: Contender, rng: np.random.Generator, n: int, p: int, alpha: float
) -> Measurement:
    assert contender.make is not None
    X = network(_seed(rng), n, p).X
    contender.make(X[:, :20], alpha, TOLERANCE)  # what is compiled or loaded on first use
    began = time.process_time()
    omega = contender.make(X, alpha, TOLERANCE)
    seconds = time.process_time() - began
    residual = largest_residual(X, omega, alpha)
    nonzeros = float(np.count_nonzero(omega)) / p
    # Stopping rules differ by a factor between d = -Sω and the d of a prox.
    value = seconds if residual <= 2 * TOLERANCE else float("inf")
    return Measurement(value, extras={"residual": residual, "nonzeros per row": nonzeros})


@claim(
    method="ssn-concord",
    statement="To a residual of 10⁻⁸, semismooth Newton takes at most a fifth of the time of the "
    "best proximal gradient method, plain or accelerated",
    metric=SECONDS,
    contenders=[NEWTON, PROXIMAL, FISTA],
    expect=at_most(0.2, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, n=50, p=60, alpha=0.25),
        "quick": Scale(seeds=8, n=300, p=600, alpha=0.13),
        "full": Scale(seeds=8, n=500, p=1000, alpha=0.1),
    },
    headline=True,
)
def first_order_time(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int, alpha: float
) -> Measurement:
    """Estimate a random network of which 3 % of the pairs are edges.

    The peers are what the published implementations use, as strong as we can make them: matrix
    iterations over all rows that are left, with sparse products where those are faster, the largest
    step, and momentum that restarts for each row. All run through the same estimator, and the time
    is that of its whole fit.
    """
    return _time(contender, rng, n, p, alpha)


@claim(
    method="ssn-concord",
    statement="To a residual of 10⁻⁸, semismooth Newton takes at most the time of compiled "
    "coordinate descent on active sets",
    metric=SECONDS,
    contenders=[NEWTON, Contender("coordinate descent", make=coordinate_descent)],
    expect=at_most(1.0, of="coordinate descent"),
    scales={
        "smoke": Scale(seeds=2, n=50, p=60, alpha=0.25),
        "quick": Scale(seeds=8, n=200, p=400, alpha=0.15),
        "full": Scale(seeds=8, n=500, p=1000, alpha=0.1),
    },
)
def time_of_coordinate_descent(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int, alpha: float
) -> Measurement:
    """Repeat `first_order_time` against the first-order method that lassos are solved with.

    It sweeps over the active variables of a row until they are solved, looks at all, and repeats.
    The peer is ours, compiled by Numba, as no package has it for this problem, and returns Ω only;
    the method is the fit of an estimator, with its checks and outputs. The claim fails: on sparse,
    well-conditioned networks the row solvers take about the same time, and the outputs decide, less
    the larger the network. Newton wins where rows have many nonzeros: see `near_the_density_limit`,
    whose networks are such.
    """
    return _time(contender, rng, n, p, alpha)


@claim(
    method="ssn-concord",
    statement="Where rows have almost as many nonzeros as samples, semismooth Newton with its "
    "proximal steps takes at most the time of the best proximal gradient method",
    metric=SECONDS,
    contenders=[NEWTON, PROXIMAL, FISTA],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, n=25, p=60, alpha=0.2),
        "quick": Scale(seeds=8, n=50, p=150, alpha=0.15),
        "full": Scale(seeds=8, n=100, p=500, alpha=0.1),
    },
)
def near_the_density_limit(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int, alpha: float
) -> Measurement:
    """Repeat `first_order_time` with a penalty that leaves most rows without Newton steps at first.

    What is left of the advantage where the method is not meant for; see `density_limit`.
    """
    return _time(contender, rng, n, p, alpha)


@claim(
    method="ssn-concord",
    statement="No row needs more than 30 Newton steps, whatever the penalty",
    metric=Metric(
        "largest number of Newton steps of a row",
        better="lower",
        curve=("penalty", "largest number of steps"),
    ),
    contenders=[Contender("semismooth Newton", make=SSNConcord)],
    expect=at_most(30.0),
    scales={
        "smoke": Scale(seeds=2, n=40, p=40),
        "quick": Scale(seeds=10, n=150, p=200),
        "full": Scale(seeds=20, n=500, p=500),
    },
)
def newton_steps(contender: Contender, rng: np.random.Generator, *, n: int, p: int) -> Measurement:
    """Solve for penalties from the largest that matters to a tenth of it, each from the start.

    A row counts with all its steps, also those that were shortened by the line search.
    """
    assert contender.make is not None
    X = network(_seed(rng), n, p).X
    largest = contender.make(1.0).fit(X).alpha_max_
    penalties = largest * np.geomspace(1.0, 0.1, 8)
    fits = [contender.make(float(alpha)).fit(X) for alpha in penalties]
    steps = [float(fit.newton_steps_.max()) for fit in fits]
    proximal = max(float(np.mean(fit.prox_steps_ > 0)) for fit in fits)
    mean = float(np.mean([fit.newton_steps_.mean() for fit in fits]))
    extras = {"mean": mean, "largest share of rows with proximal steps": proximal}
    return Measurement(max(steps), curve=(penalties, steps), extras=extras)


@claim(
    method="ssn-concord",
    statement="The number of Newton steps of a row does not grow with the number of variables",
    metric=Metric("mean number of Newton steps of a row", better="lower"),
    contenders=[Contender("semismooth Newton", make=SSNConcord)],
    expect=trend(-0.25, 0.25, over="p"),
    scales={
        "smoke": Scale(seeds=2, sweep={"p": [20, 40]}),
        "quick": Scale(seeds=8, sweep={"p": [50, 100, 200, 400]}),
        "full": Scale(seeds=10, sweep={"p": [100, 200, 400, 800, 1600]}),
    },
)
def steps_over_size(contender: Contender, rng: np.random.Generator, *, p: int) -> Measurement:
    """Solve for a penalty of √(log p / n), as theory has it, with half as many samples as p."""
    assert contender.make is not None
    n = p // 2
    X = network(_seed(rng), n, p).X
    fit = contender.make(float(np.sqrt(np.log(p) / n))).fit(X)
    return Measurement(
        float(fit.newton_steps_.mean()), extras={"largest": float(fit.newton_steps_.max())}
    )


@claim(
    method="ssn-concord",
    statement="The last step of at least 95 % of the rows squares the residual, up to a constant",
    metric=Metric(
        "share of rows", better="higher", curve=("Newton steps", "median residual of the rows")
    ),
    contenders=[Contender("semismooth Newton", make=ssn_concord)],
    expect=at_least(0.95),
    scales={
        "smoke": Scale(seeds=2, n=40, p=40, alpha=0.2),
        "quick": Scale(seeds=10, n=150, p=200, alpha=0.12),
        "full": Scale(seeds=20, n=500, p=1000, alpha=0.1),
    },
)
def quadratic_tail(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int, alpha: float
) -> Measurement:
    """Count the rows with ‖F_{k+1}‖ ≤ 10 ‖F_k‖^1.8 for their last ‖F_k‖ above 10⁻⁷.

    Below, the square is lost in rounding. Residuals come from runs with 1, 2, … steps; rows that
    start at their solution are left out.
    """
    assert contender.make is not None
    X = network(_seed(rng), n, p).X
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        runs = [contender.make(None, alpha, X=X, omega0=np.eye(p), tol=1e9)]
        runs += [contender.make(None, alpha, X=X, max_iter=k, tol=1e-13) for k in range(1, 12)]
    residuals = np.array([run.residual for run in runs]).T
    good = []
    for norms in residuals:
        above = np.flatnonzero(norms[:-1] > 1e-7)
        if len(above):
            k = above[-1]
            good.append(norms[k + 1] <= 10 * norms[k] ** 1.8)
    median = np.median(residuals, axis=0)
    return Measurement(float(np.mean(good)), curve=(np.arange(len(median)), median))


@claim(
    method="ssn-concord",
    statement="As long as rows have at most 0.3 n nonzeros on average, at most 5 % of them need "
    "proximal steps",
    metric=Metric(
        "largest share of rows with proximal steps",
        better="lower",
        curve=("nonzeros per row over n", "share of rows with proximal steps"),
    ),
    contenders=[Contender("semismooth Newton", make=SSNConcord)],
    expect=at_most(0.05),
    scales={
        "smoke": Scale(seeds=2, n=25, p=50),
        "quick": Scale(seeds=10, n=60, p=200),
        "full": Scale(seeds=10, n=100, p=1000),
    },
)
def density_limit(contender: Contender, rng: np.random.Generator, *, n: int, p: int) -> Measurement:
    """Lower the penalty until the rows have more nonzeros than Newton's systems can.

    A row has no Newton step where more variables are active than S has rank. The curve shows how
    sharply that sets in; the extras, that the rows are solved none the less.
    """
    assert contender.make is not None
    X = network(_seed(rng), n, p).X
    dense, shares, residuals = [], [], []
    for alpha in np.geomspace(0.6, 0.1, 10):
        fit = contender.make(float(alpha), tol=TOLERANCE).fit(X)
        dense.append(fit.omega_.nnz / p / n)
        shares.append(float(np.mean(fit.prox_steps_ > 0)))
        residuals.append(float(fit.residual_.max()))
    value = max(share for at, share in zip(dense, shares, strict=True) if at <= 0.3)
    extras = {"share at the end": shares[-1], "largest residual": max(residuals)}
    return Measurement(value, curve=(dense, shares), extras=extras)


@claim(
    method="ssn-concord",
    statement="Networks of thousands of variables are solved to a residual of 10⁻⁸",
    metric=Metric("largest residual of a row", better="lower", average="geometric mean"),
    contenders=[Contender("semismooth Newton", make=SSNConcord)],
    expect=at_most(1e-8),
    scales={
        "smoke": Scale(seeds=2, n=50, p=100, alpha=0.3),
        "quick": Scale(seeds=8, n=200, p=1000, alpha=0.25),
        "full": Scale(seeds=8, n=500, p=5000, alpha=0.15),
    },
)
def large_network(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int, alpha: float
) -> Measurement:
    """Fit as shipped on two threads; the extras have the time and the peak memory of the process.

    The residual is computed anew from the result, with d = -Sω.
    """
    assert contender.make is not None
    X = network(_seed(rng), n, p).X
    began = time.perf_counter()
    fit = contender.make(alpha, n_jobs=2).fit(X)
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    residual = largest_residual(X, fit.omega_.toarray(), alpha)
    extras = {
        "seconds": seconds,
        "peak memory of the process, GiB": memory,
        "nonzeros per row": fit.omega_.nnz / p,
        "mean Newton steps": float(fit.newton_steps_.mean()),
    }
    return Measurement(residual, extras=extras)
