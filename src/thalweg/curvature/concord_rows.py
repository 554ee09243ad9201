"""Blocks of row problems of the pseudolikelihood: their iterates, prox and residual."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from thalweg.curvature.concord_covariance import Covariance
from thalweg.curvature.concord_kernel import residuals

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class RowSettings:
    """What a row solver obeys; see `thalweg.curvature.ssn_concord`."""

    method: Literal["bssn", "ssn", "fbs", "fista"] = "bssn"
    tol: float = 1e-10
    max_iter: int = 100
    max_prox_iter: int = 10_000
    sigma: float = 1e-3
    rho: float = 0.5
    on_rank_deficient: Literal["prox", "raise"] = "prox"


@dataclass
class RowBlock:
    """Iterates (ω, d) of b rows.

    Attributes
    ----------
    rows : ndarray of shape (b,)
        Their numbers.
    lam : ndarray of shape (b, 1) or (b, p)
    W, D, P : ndarray of shape (b, p)
        ω, d and Sω.
    residual : ndarray of shape (b,)
        ‖F(ω, d)‖.
    """

    rows: Index
    lam: Array
    W: Array
    D: Array
    P: Array
    residual: Array

    @classmethod
    def at(cls, rows: Index, lam: Array, W: Array, D: Array, P: Array) -> RowBlock:
        """Return the block at a point, with its residual."""
        return cls(rows, lam, W, D, P, residuals(rows, lam, W, D, P))

    @property
    def own(self) -> tuple[Index, Index]:
        """The index of the diagonal entries ω_i."""
        return np.arange(len(self.rows)), self.rows

    def take(self, at: Index | Mask) -> RowBlock:
        """Return a copy of some rows."""
        floats = (self.lam, self.W, self.D, self.P, self.residual)
        return RowBlock(self.rows[at], *(each[at] for each in floats))

    def put(self, at: Index | Mask, part: RowBlock) -> None:
        """Overwrite the iterates of some rows."""
        self.W[at], self.D[at], self.P[at] = part.W, part.D, part.P
        self.residual[at] = part.residual


def prox(U: Array, lam: Array, rows: Index, step: float = 1.0) -> Array:
    """Return the prox of ``step`` times h(ω) = -log ω_i + λ‖ω_{-i}‖₁ for each row of U."""
    own = (np.arange(len(rows)), rows)
    threshold = step * lam
    shrunk = U - np.maximum(np.minimum(U, threshold), -threshold)  # numpy.clip is far slower
    shrunk[own] = log_prox(U[own], step)
    return shrunk


def log_prox(u: Array, step: float = 1.0) -> Array:
    """Return (u + √(u² + 4 step)) / 2, without cancellation where u < 0."""
    total = np.abs(u) + np.hypot(u, 2 * np.sqrt(step))
    return np.asarray(np.where(u > 0, total / 2, 2 * step / total))


def squares(A: Array) -> Array:
    """Return the squared norm of each row."""
    return np.asarray(np.einsum("ij,ij->i", A, A))


def diagonal_start(S: Covariance, rows: Index, lam: Array) -> RowBlock:
    """Return the best diagonal ω, with d = -Sω, so that the first residual is that of the prox."""
    scale = 1 / np.sqrt(S.diagonal[rows])
    W = np.zeros((len(rows), len(S.diagonal)))
    W[np.arange(len(rows)), rows] = scale
    P = scale[:, None] * S.rows(rows)
    return RowBlock.at(rows, lam, W, -P, P)


def sparse_rows(block: RowBlock) -> sparse.csr_array:
    """Return ω of each row."""
    b, p = block.W.shape
    at = np.flatnonzero(block.W != 0)  # far faster than of W itself, which csr_array takes
    starts = np.searchsorted(at, p * np.arange(b + 1))
    return sparse.csr_array((block.W.ravel()[at], at % p, starts), shape=(b, p))


def objective(block: RowBlock, omega: sparse.csr_array) -> Array:
    """Return -log ω_i + ½ ω'Sω + λ‖ω_{-i}‖₁ of each row; ``omega`` is the block's."""
    b = len(block.rows)
    at = (np.repeat(np.arange(b), np.diff(omega.indptr)), omega.indices)
    lam = np.broadcast_to(block.lam, block.W.shape)[at]
    penalty = np.where(at[1] == block.rows[at[0]], 0.0, lam * np.abs(omega.data))
    terms = 0.5 * omega.data * block.P[at] + penalty
    return np.asarray(np.bincount(at[0], terms, b) - np.log(block.W[block.own]))


@dataclass
class RowCounts:
    """Steps of each row of a block, and columns that were found to depend on others."""

    newton: Index
    proximal: Index
    dependent: set[int] = field(default_factory=set)

    @classmethod
    def zero(cls, b: int) -> RowCounts:
        """Return the counts of b rows that have made no step."""
        return cls(np.zeros(b, dtype=np.intp), np.zeros(b, dtype=np.intp))
