"""Composite problems of convex optimization: a loss of a linear model, and a penalty besides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog, lsq_linear, minimize
from scipy.special import expit

from thalweg.common.optional import requires

Array = NDArray[np.float64]
LossName = Literal["squared", "logistic", "hinge", "sigmoid"]


def _squared(p: Array, y: Array) -> tuple[Array, Array]:
    return (p - y) ** 2 / 2, p - y


def _logistic(p: Array, y: Array) -> tuple[Array, Array]:
    margins = y * p
    return np.logaddexp(0, -margins), -y * expit(-margins)


def _hinge(p: Array, y: Array) -> tuple[Array, Array]:
    return np.maximum(0, 1 - y * p), -y * (y * p < 1)


def _sigmoid(p: Array, y: Array) -> tuple[Array, Array]:
    wrong = expit(-y * p)
    return wrong, -y * wrong * (1 - wrong)


# Values and slopes of the losses, and bounds on their curvature: none for the hinge.
LOSSES: dict[str, tuple[Callable[[Array, Array], tuple[Array, Array]], float]] = {
    "squared": (_squared, 1.0),
    "logistic": (_logistic, 0.25),
    "hinge": (_hinge, np.inf),
    "sigmoid": (_sigmoid, 0.1),
}


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """The mean loss of a linear model x ↦ Xx, with the weight of a penalty to go with it.

    Calling it returns value and gradient.

    Parameters
    ----------
    X : ndarray or sparse array of shape (n, d)
    y : ndarray of shape (n,)
        Targets, ±1 for classes.
    loss : {"squared", "logistic", "hinge", "sigmoid"}
        (p - y)²/2, ln(1 + exp(-yp)), max(0, 1 - yp), or 1/(1 + exp(yp)), which is not convex.
    weight : float
        λ.
    """

    X: Any
    y: Array
    loss: LossName
    weight: float

    @property
    def d(self) -> int:
        """The number of coefficients."""
        return int(self.X.shape[1])

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        losses, slopes = LOSSES[self.loss][0](np.asarray(self.X @ x), self.y)
        return float(losses.mean()), np.asarray(self.X.T @ slopes) / len(self.y)

    def value(self, x: Array) -> float:
        """Return the mean loss."""
        return float(LOSSES[self.loss][0](np.asarray(self.X @ x), self.y)[0].mean())

    def batch_gradient(self, x: Array, rows: NDArray[np.intp]) -> Array:
        """Return the gradient of the mean loss of some samples."""
        X = self.X[rows]
        return np.asarray(X.T @ LOSSES[self.loss][0](X @ x, self.y[rows])[1]) / len(rows)

    def smoothness(self, iterations: int = 100) -> float:
        """Return a bound on the curvature: that of the loss times ‖X‖²/n, by power iteration."""
        v = np.random.default_rng(0).standard_normal(self.d)
        size = 1.0
        for _ in range(iterations):
            v = np.asarray(self.X.T @ (self.X @ (v / np.linalg.norm(v))))
            size = float(np.linalg.norm(v))
        return 1.01 * LOSSES[self.loss][1] * size / len(self.y)

    def l1_optimum(self) -> float:
        """Return the minimum of the mean loss plus λ‖x‖₁, for a convex loss and small, dense data.

        A linear program for the hinge; L-BFGS-B in positive and negative parts for smooth losses.
        """
        if self.loss == "hinge":
            return self._hinge_optimum()

        def split(parts: Array) -> tuple[float, Array]:
            value, gradient = self(parts[: self.d] - parts[self.d :])
            penalized = np.concatenate([gradient, -gradient]) + self.weight
            return value + self.weight * float(parts.sum()), penalized

        found = minimize(
            split,
            np.zeros(2 * self.d),
            jac=True,
            method="L-BFGS-B",
            bounds=[(0, None)] * (2 * self.d),
            options={"ftol": 0.0, "gtol": 1e-9, "maxiter": 100_000, "maxfun": 100_000},
        )
        return float(found.fun)

    def _hinge_optimum(self) -> float:
        """Minimize mean(ξ) + λ Σ(x⁺ + x⁻), where yX(x⁺ - x⁻) + ξ ≥ 1 and all are nonnegative."""
        n, rows = len(self.y), self.y[:, None] * self.X
        costs = np.concatenate([np.full(2 * self.d, self.weight), np.full(n, 1 / n)])
        found = linprog(costs, -np.hstack([rows, -rows, np.eye(n)]), -np.ones(n), method="highs")
        return float(costs @ found.x)


@lru_cache
def _breast_cancer() -> tuple[Array, Array]:
    with requires("peers"):
        from sklearn.datasets import load_breast_cancer
    X, y = load_breast_cancer(return_X_y=True)
    return (X - X.mean(axis=0)) / X.std(axis=0), 2.0 * y - 1


def breast_cancer(
    loss: LossName, rng: np.random.Generator | None = None, weight: float = 0.01
) -> LinearProblem:
    """Return the breast cancer data, 569 × 30 and standardized, or a random 80 % of the samples.

    The data are those of `sklearn.datasets.load_breast_cancer`, with classes ±1.
    """
    X, y = _breast_cancer()
    if rng is not None:
        rows = rng.choice(len(y), size=int(0.8 * len(y)), replace=False)
        X, y = X[rows], y[rows]
    return LinearProblem(X, y, loss, weight)


@dataclass(frozen=True, eq=False)
class SpectrumLeastSquares:
    """½ Σ_i i⁻² (x_i - x*_i)², with x* standard normal: smooth with L = 1, and ill-conditioned."""

    eigenvalues: Array
    solution: Array

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return value and gradient; the minimum is 0."""
        away = self.eigenvalues * (x - self.solution)
        return float(away @ (x - self.solution)) / 2, away


def spectrum_least_squares(rng: np.random.Generator, d: int = 200) -> SpectrumLeastSquares:
    """Return least squares with eigenvalues i⁻², i = 1, …, d."""
    return SpectrumLeastSquares(np.arange(1.0, d + 1) ** -2, rng.standard_normal(d))


@dataclass(frozen=True, eq=False)
class BoxLeastSquares:
    """½‖Ax - b‖² over -1 ≤ x ≤ 1.

    Parameters
    ----------
    A : ndarray of shape (n, d)
    b : ndarray of shape (n,)
    optimum : float
        The minimum.
    """

    A: Array
    b: Array
    optimum: float

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return value and gradient."""
        residual = self.A @ x - self.b
        return float(residual @ residual) / 2, self.A.T @ residual


def active_box_least_squares(
    rng: np.random.Generator, n: int = 150, d: int = 100, n_large: int = 20, size: float = 30.0
) -> BoxLeastSquares:
    """Return least squares whose solution has most bounds active, and a large gradient there.

    A is Gaussian with entries of variance 1/n, and ``n_large`` of the true coefficients are
    ±``size``, far outside of the box; the others are standard normal.
    """
    A = rng.standard_normal((n, d)) / np.sqrt(n)
    truth = rng.standard_normal(d)
    truth[:n_large] = size * rng.choice([-1.0, 1.0], n_large)
    b = A @ truth + 0.1 * rng.standard_normal(n)
    found = lsq_linear(A, b, (-1, 1), method="bvls", tol=1e-14, max_iter=10 * d)
    return BoxLeastSquares(A, b, float(found.cost))


def sparse_regression(
    rng: np.random.Generator,
    n: int,
    d: int,
    *,
    per_row: int = 20,
    n_topics: int = 10,
    n_informative: int = 50,
    loss: LossName = "squared",
    ratio: float = 0.02,
) -> LinearProblem:
    """Return sparse data as of counted words, correlated by topics, with few informative features.

    Every row has about ``per_row`` entries with exponential values and belongs to a topic. Columns
    are drawn with probabilities that fall as (10 + j)^(-1/2), times a log-normal factor of the
    topic's. They are scaled to mean square 1, at most ten times, so that rare words do not weigh
    more than common ones. λ is ``ratio`` of the one from which on the solution is zero. Classes are
    the signs of the noisy targets.
    """
    popularity = (10.0 + np.arange(d)) ** -0.5
    topics = np.array_split(rng.permutation(n), n_topics)
    rows = np.repeat(np.concatenate(topics), per_row)
    columns = np.concatenate(
        [_words(popularity * rng.lognormal(0, 1.5, d), len(t) * per_row, rng) for t in topics]
    )
    X = sparse.csr_array(
        (rng.exponential(size=len(rows)), (rows.astype(np.int32), columns.astype(np.int32))),
        shape=(n, d),
    )
    X.sum_duplicates()
    squares = np.asarray(X.power(2).sum(axis=0)) / n
    scales = np.minimum(10.0, 1 / np.sqrt(np.maximum(squares, 1e-12)))
    X = sparse.csr_array(X @ sparse.diags_array(scales))
    truth = np.zeros(d)
    informative = rng.choice(min(d, 2000), n_informative, replace=False)
    truth[informative] = rng.standard_normal(n_informative)
    y = np.asarray(X @ truth)
    y = y + 0.3 * y.std() * rng.standard_normal(n)
    y = y - y.mean() if loss == "squared" else np.where(y > np.median(y), 1.0, -1.0)
    slopes = LOSSES[loss][0](np.zeros(n), y)[1]
    largest = float(np.max(np.abs(np.asarray(X.T @ slopes)))) / n
    return LinearProblem(X, y, loss, ratio * largest)


def _words(weights: Array, size: int, rng: np.random.Generator) -> NDArray[np.intp]:
    return rng.choice(len(weights), size=size, p=weights / weights.sum())
