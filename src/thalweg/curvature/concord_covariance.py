"""The sample covariance as the row solvers see it: stored, or as a product of the data."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, eigsh

Array = NDArray[np.float64]
Index = NDArray[np.intp]

SPARSE_SHARE = 0.05  # below it, CSR times dense takes less time than BLAS
SMALL = 64  # eigenvalues of matrices up to this size are computed in full
MARGIN = 1e-5  # Lanczos approaches the largest eigenvalue from below


class Covariance(Protocol):
    """S = X'X/n, of shape (p, p) and known rank.

    Attributes
    ----------
    diagonal : ndarray of shape (p,)
    rank : int
        An upper bound of the rank of S.
    """

    diagonal: Array
    rank: int

    @property
    def largest(self) -> float:
        """An upper bound of the largest eigenvalue, tight to a few units in the fifth digit."""

    def rows(self, at: Index) -> Array:
        """Return S[at], of shape (b, p)."""

    def submatrix(self, at: Index) -> Array:
        """Return S[at][:, at], which the caller may overwrite."""

    def product(self, W: Any) -> Array:
        """Return W S for W of shape (b, p), a CSR array or an ndarray with many zeros or few."""


class StoredCovariance:
    """S in memory: 8p² bytes, and O(p k) per product with a row of k nonzeros.

    Parameters
    ----------
    S : ndarray of shape (p, p)
        Symmetric, C-contiguous.
    rank : int
    largest : float, optional
        The largest eigenvalue, if known.
    """

    def __init__(self, S: Array, rank: int, largest: float | None = None) -> None:
        self.S = S
        self._flat = S.reshape(-1)
        self.diagonal = S.diagonal().copy()
        self.rank = rank
        self._largest = largest

    @cached_property
    def largest(self) -> float:
        """The largest eigenvalue; only proximal steps need it."""
        return largest_eigenvalue(self.S) if self._largest is None else self._largest

    def rows(self, at: Index) -> Array:
        """Return S[at], of shape (b, p)."""
        return self.S[at]

    def submatrix(self, at: Index) -> Array:
        """Return S[at][:, at], a copy."""
        return self._flat.take(at[:, None] * len(self.S) + at)

    def product(self, W: Any) -> Array:
        """Return W S."""
        return np.asarray(_sparse_if_worth_it(W) @ self.S)


class FactoredCovariance:
    """S = Z'Z, never formed: 8pn bytes, and O(n (p + k)) per product.

    Parameters
    ----------
    Z : ndarray of shape (n, p)
        The data over √n.
    rank : int
    """

    def __init__(self, Z: Array, rank: int) -> None:
        self._columns = np.ascontiguousarray(Z.T)
        self.diagonal = np.einsum("ij,ij->i", self._columns, self._columns)
        self.rank = rank

    @cached_property
    def largest(self) -> float:
        """The largest eigenvalue; only proximal steps need it."""
        p, n = self._columns.shape
        tall = self._columns if n < p else self._columns.T
        return largest_eigenvalue(tall.T @ tall)

    def rows(self, at: Index) -> Array:
        """Return S[at], of shape (b, p)."""
        return np.asarray(self._columns[at] @ self._columns.T)

    def submatrix(self, at: Index) -> Array:
        """Return S[at][:, at], a new array."""
        chosen = self._columns[at]
        return np.asarray(chosen @ chosen.T)

    def product(self, W: Any) -> Array:
        """Return W S."""
        return np.asarray(np.asarray(_sparse_if_worth_it(W) @ self._columns) @ self._columns.T)


def _sparse_if_worth_it(W: Any) -> Any:
    if isinstance(W, sparse.csr_array):
        return W if W.nnz < SPARSE_SHARE * W.shape[0] * W.shape[1] else W.toarray()
    return sparse.csr_array(W) if np.count_nonzero(W) < SPARSE_SHARE * W.size else W


def largest_eigenvalue(S: Array) -> float:
    """Return the largest eigenvalue of a positive semidefinite matrix, or slightly more."""
    p = len(S)
    if p <= SMALL:
        return float(np.linalg.eigvalsh(S)[-1])
    # A fixed start makes the result reproducible; a random one would hardly miss the eigenvector.
    start = np.random.default_rng(0).standard_normal(p)
    operator = LinearOperator((p, p), matvec=lambda v: S @ v, dtype=np.float64)
    values = eigsh(operator, k=1, v0=start, tol=MARGIN / 10, return_eigenvectors=False)
    return float(values[0]) * (1 + MARGIN)


def largest_penalty(S: Covariance, block: int = 64) -> float:
    """Return the least λ at which every row's solution is diagonal."""
    largest = 0.0
    for begin in range(0, len(S.diagonal), block):
        at = np.arange(begin, min(begin + block, len(S.diagonal)))
        off_diagonal = np.abs(S.rows(at))
        off_diagonal[np.arange(len(at)), at] = 0
        slopes = off_diagonal.max(axis=1) / np.sqrt(S.diagonal[at])
        largest = max(largest, float(slopes.max()))
    return largest
