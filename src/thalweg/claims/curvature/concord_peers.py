"""What the claims about semismooth Newton for the pseudolikelihood compare it with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires
from thalweg.curvature import SSNConcord
from thalweg.tasks import SparseGaussian, sparse_gaussian

with requires("peers"):
    import numba
    from skglm.covariance import GraphicalLasso
    from sklearn.covariance import graphical_lasso
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import Lasso

Array = NDArray[np.float64]
Edges = NDArray[np.bool_]


@lru_cache(maxsize=8)
def network(seed: int, n: int, p: int) -> SparseGaussian:
    """Return a simulated network, with standardized samples."""
    data = sparse_gaussian(np.random.default_rng(seed), n, p)
    return SparseGaussian(standardized(data.X), data.precision)


def standardized(X: Array) -> Array:
    """Return columns of mean 0 and variance 1."""
    scaled: Array = (X - X.mean(axis=0)) / X.std(axis=0)
    return scaled


# Solvers of the pseudolikelihood: make(X, alpha, tol) -> Ω.


class RowSolver(Protocol):
    """Solves to a residual ‖F‖ of each row, and returns Ω of shape (p, p)."""

    def __call__(self, X: Array, alpha: float, tol: float) -> Array:
        """Return Ω."""


def concord(method: str) -> RowSolver:
    """Return one of the methods of `SSNConcord`, on one thread."""

    def solve(X: Array, alpha: float, tol: float) -> Array:
        fitted = SSNConcord(alpha, method=method, tol=tol).fit(X)  # type: ignore[arg-type]
        return np.asarray(fitted.omega_.toarray())

    return solve


def coordinate_descent(X: Array, alpha: float, tol: float) -> Array:
    """Return Ω by coordinate descent on the active variables of each row, compiled by Numba."""
    X = standardized(X)
    return np.asarray(_all_rows(X.T @ X / len(X), alpha, tol, 10_000))


@numba.njit
def _all_rows(S, lam, tol, max_rounds):  # type: ignore[no-untyped-def]
    omega = np.zeros_like(S)
    for i in range(len(S)):
        _one_row(S, i, lam, tol, max_rounds, omega[i])
    return omega


@numba.njit
def _one_row(S, i, lam, tol, max_rounds, w):  # type: ignore[no-untyped-def]
    """Sweep over the active variables until they are solved; then look at all, and repeat."""
    p = len(S)
    w[i] = 1 / np.sqrt(S[i, i])
    r = S[i] * w[i]
    active = np.zeros(p, dtype=np.int64)
    for _ in range(max_rounds):
        m, gap = 0, 0.0
        for j in range(p):
            gap += (w[j] - _best(w[j] - r[j], 1.0, j == i, lam)) ** 2
            if w[j] != 0 or abs(r[j]) > lam:
                active[m] = j
                m += 1
        if gap <= tol**2:
            return
        chosen = active[:m]
        for _ in range(max_rounds):
            inner = 0.0
            for j in chosen:
                new = _best(S[j, j] * w[j] - r[j], S[j, j], j == i, lam)
                change = new - w[j]
                if change != 0:
                    w[j] = new
                    inner += change**2
                    for k in chosen:
                        r[k] += change * S[j, k]
            if inner <= (0.1 * tol) ** 2:
                break
        r[:] = 0
        for j in chosen:
            r += w[j] * S[j]


@numba.njit
def _best(b, a, own, lam):  # type: ignore[no-untyped-def]
    """Return the minimizer of ½ a x² - b x + h(x)."""
    if own:
        return (b + np.sqrt(b * b + 4 * a)) / (2 * a)
    return np.sign(b) * max(abs(b) - lam, 0.0) / a


def largest_residual(X: Array, omega: Array, alpha: float) -> float:
    """Return the largest ‖ω - prox_h(ω - Sω)‖ of a row, which is ‖F(ω, -Sω)‖."""
    X = standardized(X)
    U = omega - omega @ (X.T @ X / len(X))
    shrunk = np.sign(U) * np.maximum(np.abs(U) - alpha, 0)
    u = U.diagonal()
    np.fill_diagonal(shrunk, (u + np.sqrt(u**2 + 4)) / 2)
    return float(np.linalg.norm(omega - shrunk, axis=1).max())


# Estimators of networks: make(X, alpha) -> edges.


def concord_edges(X: Array, alpha: float) -> Edges:
    """Return the network of `SSNConcord`, as shipped."""
    return np.asarray(SSNConcord(alpha).fit(X).graph_)


def sklearn_edges(X: Array, alpha: float) -> Edges:
    """Return the network of scikit-learn's graphical lasso."""
    with warnings.catch_warnings():
        # Its dual gap stops short of zero where the data have fewer samples than variables.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return _edges(graphical_lasso(_covariance(X), alpha)[1])


def skglm_edges(X: Array, alpha: float) -> Edges:
    """Return the network of skglm's graphical lasso, to scikit-learn's tolerance."""
    return _edges(skglm_precision(X, alpha))


def skglm_precision(X: Array, alpha: float) -> Array:
    """Return the precision matrix of skglm's graphical lasso."""
    model = GraphicalLasso(alpha=alpha, tol=1e-4).fit(_covariance(X), mode="precomputed")
    return np.asarray(model.precision_)


def neighborhood_edges(X: Array, alpha: float) -> Edges:
    """Return the network of lassos of each variable on all others, by the rule "and"."""
    Z = np.asfortranarray(standardized(X))
    p = Z.shape[1]
    found = np.zeros((p, p), dtype=bool)
    gram = np.asfortranarray(Z.T @ Z)
    for i in range(p):
        others = np.arange(p) != i
        lasso = Lasso(alpha, fit_intercept=False, precompute=gram[np.ix_(others, others)])
        found[i, others] = lasso.fit(Z[:, others], Z[:, i]).coef_ != 0
    return found & found.T


def _covariance(X: Array) -> Array:
    X = standardized(X)
    return np.asarray(X.T @ X / len(X))


def _edges(precision: Any) -> Edges:
    edges = np.asarray(precision) != 0
    np.fill_diagonal(edges, False)
    return np.asarray(edges)


@dataclass(frozen=True)
class SlowEstimator:
    """An estimator, with a faster one of the same problem that finds its penalty.

    Called as the first.
    """

    edges: Callable[[Array, float], Edges]
    same_but_fast: Callable[[Array, float], Edges]

    def __call__(self, X: Array, alpha: float) -> Edges:
        """Return the network, of shape (p, p)."""
        return self.edges(X, alpha)


@lru_cache(maxsize=128)
def penalty_for(
    make: Callable[[Array, float], Edges], seed: int, n: int, p: int, n_edges: int
) -> float:
    """Return the penalty with which `network` gets ``n_edges`` edges up to 1 %, by bisection."""
    X = network(seed, n, p).X
    edges = make.same_but_fast if isinstance(make, SlowEstimator) else make
    low, high = 0.01, 1.0
    for _ in range(14):
        middle = float(np.sqrt(low * high))
        found = int(edges(X, middle).sum()) // 2
        if abs(found - n_edges) <= 0.01 * n_edges:
            return middle
        low, high = (middle, high) if found > n_edges else (low, middle)
    return float(np.sqrt(low * high))
