"""Claims about the antithetic Neumann estimator.

A contender's ``make`` is ``make(series, rng)``: ``series`` is a `StochasticSeries`, and estimates
of shape (n_rep, d) are returned. Claims about descent with the estimator stand in
`thalweg.claims.bilevel.reweighting_claims` and `thalweg.claims.bilevel.tuning_claims`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel import neumann_error_report
from thalweg.bilevel.neumann_errors import truncated_series
from thalweg.claims.bilevel.reweighting_claims import (
    many_rows,
    offline_policies,
    outliers,
    rare_classes,
    wrong_labels,
    wrong_labels_few_steps,
)
from thalweg.claims.bilevel.tuning_claims import many_penalties
from thalweg.common.optional import requires
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend

with requires("bilevel"):
    from sklearn.datasets import load_breast_cancer

__all__ = [
    "approximate_reference",
    "approximate_reference_bias",
    "exact_reference",
    "many_penalties",
    "many_rows",
    "offline_policies",
    "outliers",
    "rare_classes",
    "third_moment",
    "wrong_labels",
    "wrong_labels_few_steps",
]

Array = NDArray[np.float64]
RMSE = Metric("error relative to the series", better="lower")
THIRD = Metric("cube root of the third central moment", better="lower")


@dataclass(frozen=True, eq=False)
class StochasticSeries:
    """What an estimator of v_K is given: rows of a logistic loss, a depth, a step and a batch.

    Parameters
    ----------
    factors : ndarray of shape (n, d)
        Rows whose outer products are the Hessians of samples.
    ridge : float
        λ of their mean plus λI.
    b : ndarray of shape (d,)
    K, batch, n_rep : int
    eta : float
    reference_rows : int or None
        Rows of the reference; None takes all.
    """

    factors: Array
    ridge: float
    b: Array
    K: int
    eta: float
    batch: int
    n_rep: int
    reference_rows: int | None = None

    def mean_of(self, rows: NDArray[np.intp] | slice = slice(None)) -> Array:
        """Return the mean Hessian of some rows."""
        A = self.factors[rows]
        H: Array = A.T @ A / len(A) + self.ridge * np.eye(A.shape[1])
        return H

    def batches_of(self, size: int) -> Callable[[np.random.Generator, int], Array]:
        """Return a function of n Hessians, each the mean of so many rows."""
        d = self.factors.shape[1]

        def hessians(rng: np.random.Generator, n: int) -> Array:
            rows = self.factors[rng.integers(len(self.factors), size=(n, size))]
            H: Array = np.matmul(rows.transpose(0, 2, 1), rows) / size + self.ridge * np.eye(d)
            return H

        return hessians

    def reference(self, rng: np.random.Generator) -> Array:
        """Return the Hessian of all rows, or of as many as the reference may have."""
        if self.reference_rows is None:
            return self.mean_of()
        return self.mean_of(rng.choice(len(self.factors), self.reference_rows, replace=False))

    def exact(self) -> Array:
        """Return v_K of all rows."""
        return truncated_series(self.mean_of(), self.b, self.K, self.eta)

    def estimates(self, kind: str, rng: np.random.Generator, times: int = 1) -> Array:
        """Return estimates of one kind of `neumann_error_report`, from batches so many times b."""
        report = neumann_error_report(
            self.batches_of(times * self.batch),
            self.mean_of(),
            self.b,
            self.K,
            self.eta,
            self.n_rep,
            reference=self.reference(rng),
            rng=rng,
        )
        return report.estimates[kind]


def reference_alone(series: StochasticSeries, rng: np.random.Generator) -> Array:
    """Return the series with the reference alone, as estimates that are all the same."""
    v = truncated_series(series.reference(rng), series.b, series.K, series.eta)
    return np.tile(v, (series.n_rep, 1))


@lru_cache(maxsize=64)
def _logistic_rows(seed: int) -> tuple[Array, Array, float]:
    """Return rows of the logistic Hessian of breast-cancer data, a right side, and a ridge.

    The rows are scaled by lognormal(0.5) factors, which makes their Hessians uneven. The point is
    the minimizer of a ridge regression on the labels, so that curvatures differ as well.
    """
    rng = np.random.default_rng(seed)
    X, labels = load_breast_cancer(return_X_y=True)
    A = (X - X.mean(0)) / X.std(0) * rng.lognormal(0, 0.5, (len(X), 1))
    y = np.linalg.solve(A.T @ A / len(A) + np.eye(30), A.T @ (2 * labels - 1.0) / len(A))
    chance = 1 / (1 + np.exp(-A @ y))
    return A * np.sqrt(chance * (1 - chance))[:, None], rng.standard_normal(30), 0.03


def _series(rng: np.random.Generator, **settings: Any) -> StochasticSeries:
    rows, b, ridge = _logistic_rows(int(rng.integers(2**31)))
    largest = float(np.linalg.norm(rows, 2) ** 2 / len(rows) + ridge)
    return StochasticSeries(rows, ridge, b, eta=0.3 / largest, **settings)


def _estimates(
    contender: Contender, rng: np.random.Generator, settings: dict[str, Any]
) -> tuple[StochasticSeries, Array]:
    for_instance, for_contender = rng.spawn(2)
    series = _series(for_instance, **settings)
    assert contender.make is not None
    return series, contender.make(series, for_contender)


ANTITHETIC = Contender("antithetic", make=lambda series, rng: series.estimates("antithetic", rng))
PLAIN = Contender("plain", make=lambda series, rng: series.estimates("plain", rng))
TWO_CHAINS = Contender("two chains", make=lambda series, rng: series.estimates("two chains", rng))
TRIPLE = Contender(
    "plain, three times the batch", make=lambda series, rng: series.estimates("plain", rng, 3)
)


@claim(
    method="ane",
    statement="With an exact reference, the antithetic series' error is at most 0.8 of the best "
    "plain series' at as many products",
    metric=RMSE,
    contenders=[
        ANTITHETIC,
        PLAIN,
        TWO_CHAINS,
        TRIPLE,
        Contender("reference alone", make=reference_alone, control=True),
    ],
    expect=at_most(0.8, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, n_rep=30, batch=8, K=10),
        "quick": Scale(seeds=10, n_rep=200, batch=8, K=30),
        "full": Scale(seeds=20, n_rep=600, batch=32, K=30),
    },
    headline=True,
)
def exact_reference(contender: Contender, rng: np.random.Generator, **settings: Any) -> Measurement:
    """Logistic Hessians of the breast-cancer data, with rows of uneven norm.

    The measure is the root mean squared error of v̂ relative to the truncated series. Per factor,
    the antithetic series takes two products with a batch's Hessian and one with the reference's; so
    it is compared with one chain, two chains, and one chain whose batches are three times as large.
    The series with the exact reference alone has no error at all, and is shown as a control: where
    the reference can be had, it is what one should use. Extras: the bias, the spread, the third
    moment and the standardized skewness, which is larger for the antithetic series, since what
    remains is of even order in the noise.
    """
    series, estimates = _estimates(contender, rng, settings)
    exact = series.exact()
    scale = np.linalg.norm(exact)
    centered = estimates - estimates.mean(axis=0)
    spread = centered.std(axis=0)
    third = np.mean(centered**3, axis=0)
    skewness = np.abs(third) / np.where(spread > 0, spread, 1) ** 3
    return Measurement(
        float(np.sqrt(np.mean(np.sum((estimates - exact) ** 2, axis=1))) / scale),
        extras={
            "bias": float(np.linalg.norm(estimates.mean(axis=0) - exact) / scale),
            "std": float(np.linalg.norm(spread) / scale),
            "third": float(np.linalg.norm(np.cbrt(third)) / scale),
            "skewness": float(skewness.mean()),
        },
    )


@claim(
    method="ane",
    statement="With an exact reference, the antithetic series' third moment is at most 0.8 of one "
    "or two plain chains'",
    metric=THIRD,
    contenders=[
        ANTITHETIC,
        PLAIN,
        TWO_CHAINS,
        Contender(TRIPLE.name, make=TRIPLE.make, control=True),
    ],
    expect=at_most(0.8, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, n_rep=30, batch=8, K=10),
        "quick": Scale(seeds=10, n_rep=4_000, batch=8, K=10),
        "full": Scale(seeds=20, n_rep=10_000, batch=8, K=10),
    },
)
def third_moment(contender: Contender, rng: np.random.Generator, **settings: Any) -> Measurement:
    """Logistic Hessians as before; the measure is the norm of the componentwise cube roots.

    One chain of three times the batch, as dear as the antithetic pair, is shown as a control: with
    more factors it comes near. The raw third moment falls; the standardized one does not, since
    the variance falls faster.
    """
    series, estimates = _estimates(contender, rng, settings)
    centered = estimates - estimates.mean(axis=0)
    third = np.cbrt(np.mean(centered**3, axis=0))
    return Measurement(float(np.linalg.norm(third) / np.linalg.norm(series.exact())))


@claim(
    method="ane",
    statement="With an approximate reference, the bias grows linearly with its error: the exponent "
    "is 0.9 to 1.1",
    metric=Metric("bias", better="lower", average="geometric mean"),
    contenders=[ANTITHETIC],
    expect=trend(0.9, 1.1, over="share"),
    scales={
        "smoke": Scale(seeds=2, n_rep=20, batch=8, K=10, sweep={"share": [0.001, 0.01, 0.1]}),
        "quick": Scale(seeds=10, n_rep=200, batch=8, K=30, sweep={"share": [0.001, 0.01, 0.1]}),
        "full": Scale(
            seeds=20, n_rep=600, batch=8, K=30, sweep={"share": [0.001, 0.003, 0.01, 0.03, 0.1]}
        ),
    },
)
def approximate_reference_bias(
    contender: Contender, rng: np.random.Generator, *, share: float, **settings: Any
) -> Measurement:
    """Off by a share of what a reference of 64 rows is off by, on the same Hessians.

    The measure is the norm of the mean difference to the estimates with the exact reference along
    the same samples, which are unbiased: the bias without the noise of its estimation.
    """
    for_instance, for_error, for_contender = rng.spawn(3)
    series = _series(for_instance, **settings)
    off = series.mean_of(for_error.choice(len(series.factors), 64, replace=False))
    delta = share * (off - series.mean_of())
    seed = int(for_contender.integers(2**31))

    def estimates(reference: Array) -> Array:
        report = neumann_error_report(
            series.batches_of(series.batch),
            series.mean_of(),
            series.b,
            series.K,
            series.eta,
            series.n_rep,
            reference=reference,
            rng=seed,
        )
        return report.estimates["antithetic"]

    mean = series.mean_of()
    bias = (estimates(mean + delta) - estimates(mean)).mean(axis=0)
    return Measurement(float(np.linalg.norm(bias) / np.linalg.norm(series.exact())))


@claim(
    method="ane",
    statement="With a reference of 256 rows, the antithetic series' error is at most that of plain "
    "series and of the reference alone",
    metric=RMSE,
    contenders=[
        ANTITHETIC,
        PLAIN,
        TRIPLE,
        Contender("reference alone", make=reference_alone),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, n_rep=30, batch=8, K=10, reference_rows=256),
        "quick": Scale(seeds=10, n_rep=200, batch=8, K=30, reference_rows=256),
        "full": Scale(seeds=20, n_rep=600, batch=8, K=30, reference_rows=256),
    },
)
def approximate_reference(
    contender: Contender, rng: np.random.Generator, **settings: Any
) -> Measurement:
    """Logistic Hessians as before; the reference has as many rows as one plain chain.

    The error of such a reference enters in first order, as bias, and is not averaged out: the
    antithetic series is as biased as the reference alone, and noisier. A reference pays where it
    carries about ten times the rows of one plain estimate.
    """
    series, estimates = _estimates(contender, rng, settings)
    exact = series.exact()
    error = np.sqrt(np.mean(np.sum((estimates - exact) ** 2, axis=1)))
    return Measurement(float(error / np.linalg.norm(exact)))
