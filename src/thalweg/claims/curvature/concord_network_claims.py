"""Claims about the networks of the pseudolikelihood, beside those of other estimators."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.claims.curvature.concord_peers import (
    SlowEstimator,
    concord_edges,
    neighborhood_edges,
    network,
    penalty_for,
    skglm_edges,
    skglm_precision,
    sklearn_edges,
)
from thalweg.common.optional import requires
from thalweg.curvature import SSNConcord, SSNConcordCV
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_least, at_most, claim
from thalweg.tasks import gene_expression

with requires("peers"):
    from sklearn.covariance import LedoitWolf

Array = NDArray[np.float64]


def _seed(rng: np.random.Generator) -> int:
    for_instance, _ = rng.spawn(2)
    return int(for_instance.integers(2**31))


NEWTON = Contender("semismooth Newton", make=concord_edges)
SKGLM = Contender("graphical lasso, skglm", make=skglm_edges)
SKLEARN = Contender("graphical lasso, scikit-learn", make=SlowEstimator(sklearn_edges, skglm_edges))
NEIGHBORS = Contender("neighborhood selection", make=neighborhood_edges)


@claim(
    method="ssn-concord",
    statement="With the same number of edges, semismooth Newton takes less time than the graphical "
    "lasso of scikit-learn or skglm and than neighborhood selection",
    metric=Metric("CPU time", better="lower", average="geometric mean", unit="s"),
    contenders=[NEWTON, SKGLM, SKLEARN, NEIGHBORS],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, n=30, p=20),
        "quick": Scale(seeds=8, n=120, p=120),
        "full": Scale(seeds=8, n=500, p=500),
    },
)
def graphical_lasso_time(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int
) -> Measurement:
    """Fit once with the penalty that gives as many edges as variables.

    The penalty is found beforehand, for scikit-learn with skglm, as they solve the same problem.
    Peers have scikit-learn's tolerances; the method its default, a residual of 10⁻¹⁰.
    """
    assert contender.make is not None
    seed = _seed(rng)
    X = network(seed, n, p).X
    alpha = penalty_for(contender.make, seed, n, p, p)
    began = time.process_time()
    edges = contender.make(X, alpha)
    seconds = time.process_time() - began
    return Measurement(seconds, extras={"edges": float(edges.sum()) / 2, "penalty": alpha})


@claim(
    method="ssn-concord",
    statement="With the right number of edges, the network is as good as the graphical lasso's: "
    "its F1 is at most 0.02 lower",
    metric=Metric("F1 of the edges", better="higher"),
    contenders=[NEWTON, SKGLM, NEIGHBORS],
    expect=at_least(-0.02, of="graphical lasso, skglm", effect="difference"),
    scales={
        "smoke": Scale(seeds=2, n=60, p=20),
        "quick": Scale(seeds=10, n=300, p=80),
        "full": Scale(seeds=20, n=800, p=250),
    },
)
def edge_recovery(contender: Contender, rng: np.random.Generator, *, n: int, p: int) -> Measurement:
    """Estimate a random network with as many edges as it has.

    With equal numbers of edges, precision, recall and F1 are the same.
    """
    assert contender.make is not None
    seed = _seed(rng)
    data = network(seed, n, p)
    n_edges = int(data.edges.sum()) // 2
    alpha = penalty_for(contender.make, seed, n, p, n_edges)
    found = contender.make(data.X, alpha)
    f1 = 2 * float((found & data.edges).sum()) / float(found.sum() + data.edges.sum())
    return Measurement(f1, extras={"edges": float(found.sum()) / 2, "true edges": float(n_edges)})


def concord_omega(X: Array) -> Array:
    """Return Ω with the penalty of cross-validation, for standardized X."""
    fit = SSNConcordCV(criterion="cv", n_alphas=12, tol=1e-8).fit(X)
    return np.asarray(fit.omega_.toarray())


def concord_at(X: Array, alpha: float) -> Array:
    """Return Ω with a given penalty."""
    return np.asarray(SSNConcord(alpha, tol=1e-8).fit(X).omega_.toarray())


def graphical_lasso_omega(X: Array, alpha: float) -> Array:
    """Return Ω of the graphical lasso."""
    return _omega(skglm_precision(X, alpha))


def ledoit_wolf_omega(X: Array) -> Array:
    """Return Ω of the covariance that Ledoit and Wolf shrink; it is not sparse."""
    return _omega(np.asarray(LedoitWolf().fit(X).precision_))


def diagonal_omega(X: Array) -> Array:
    """Return Ω without edges."""
    return np.eye(X.shape[1])


def _omega(precision: Array) -> Array:
    return precision / np.sqrt(precision.diagonal())[:, None]


@claim(
    method="ssn-concord",
    statement="On gene expression, the penalty of cross-validation predicts held-out cells as well "
    "as the best peer with a tuned penalty, up to 0.01 per gene",
    metric=Metric("negative pseudolikelihood of held-out cells, per gene", better="lower"),
    contenders=[
        Contender("semismooth Newton, cross-validated", make=concord_omega),
        Contender(
            "graphical lasso, tuned",
            make=graphical_lasso_omega,
            tune={"alpha": [0.01, 0.03, 0.06, 0.1, 0.15, 0.25]},
        ),
        Contender("Ledoit-Wolf", make=ledoit_wolf_omega),
        Contender("no edges", make=diagonal_omega, control=True),
    ],
    expect=at_most(0.01, of="best peer", effect="difference"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, n=100, p=20),
        "quick": Scale(seeds=8, tuning_seeds=2, n=350, p=100),
        "full": Scale(seeds=10, tuning_seeds=3, n=350, p=250),
    },
)
def gene_prediction(
    contender: Contender, rng: np.random.Generator, *, n: int, p: int, **tuned: Any
) -> Measurement:
    """Estimate Ω from half of the cells, for some random genes, and score the other half.

    The pseudolikelihood is that of all the conditional distributions of a gene given the others, so
    that any precision matrix can be scored. The peers' penalty is tuned on the score itself, the
    method's is not. Ledoit-Wolf is no network, but a strong predictor.
    """
    assert contender.make is not None
    data = gene_expression()
    for_instance, _ = rng.spawn(2)
    varies = np.flatnonzero((data.X > 0).sum(axis=0) >= 70)
    genes = for_instance.choice(varies, p, replace=False)
    cells = for_instance.permutation(len(data.X))
    train, test = data.X[np.ix_(cells[:n], genes)], data.X[np.ix_(cells[n:], genes)]
    location, scale = train.mean(axis=0), train.std(axis=0)
    omega = contender.make((train - location) / scale, **tuned)
    residuals = (test - location) / scale @ omega.T
    fit = np.log(omega.diagonal()).sum() - 0.5 * np.sum(residuals**2) / len(test)
    n_edges = (np.count_nonzero(omega) - p) / 2
    return Measurement(-float(fit) / p, extras={"edges": n_edges})
