"""The inner product of the space: ⟨x, y⟩ = xᵀBy, with the mass matrix of a discretization as B."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from thalweg.common.checks import check_array, check_finite
from thalweg.curvature.factorizations import dense_cholesky, is_sparse, sparse_cholesky

Array = NDArray[np.float64]


class NormMetric:
    """A symmetric positive definite matrix B, its norm and its dual norm.

    Parameters
    ----------
    B : None, array_like of shape (d,) or (d, d), or sparse array
        None is the identity, a vector the diagonal.
    d : int

    Raises
    ------
    ValueError
        If B has another shape, is not symmetric, not finite or not positive definite.

    Examples
    --------
    >>> metric = NormMetric(np.array([4.0, 1.0]), 2)
    >>> metric.squared_norm(np.array([1.0, 0.0])), metric.dual_norm(np.array([2.0, 0.0]))
    (4.0, 1.0)
    """

    def __init__(self, B: Any, d: int) -> None:
        self.d = d
        self.diagonal = np.ones(d)
        self._matrix: Any = None
        if B is None:
            self._solve = None
        elif np.ndim(B) == 1:
            self.diagonal = check_array("metric", B, shape=(d,))
            if not np.all(self.diagonal > 0):
                raise ValueError("metric must be positive definite, got a diagonal entry <= 0")
            self._solve = lambda g: g / self.diagonal
        else:
            self._matrix = _symmetric(B, d)
            self.diagonal = self._matrix.diagonal()
            factorize = sparse_cholesky if is_sparse(self._matrix) else dense_cholesky
            self._solve = factorize(self._matrix.copy())
            if self._solve is None:
                raise ValueError("metric must be positive definite")

    def apply(self, v: Array) -> Array:
        """Return Bv."""
        product: Array = self.diagonal * v if self._matrix is None else self._matrix @ v
        return product

    def squared_norm(self, v: Array) -> float:
        """Return vᵀBv."""
        return float(v @ self.apply(v))

    def dual_norm(self, g: Array) -> float:
        """Return √(gᵀB⁻¹g), the norm of a derivative."""
        if self._solve is None:
            return float(np.linalg.norm(g))
        return float(np.sqrt(max(g @ self._solve(g), 0.0)))

    def shifted(self, H: Any, weight: float) -> Any:
        """Return H + weight·B, dense or sparse as H is."""
        if is_sparse(H):
            return sparse.csc_array(H + weight * self._sparse())
        shifted = np.array(H, order="F")
        if self._matrix is None:
            shifted.reshape(-1, order="F")[:: self.d + 1] += weight * self.diagonal
        else:
            shifted += weight * self.dense()
        return shifted

    def dense(self) -> Array:
        """Return B as an array."""
        if self._matrix is None:
            return np.diag(self.diagonal)
        dense: Array = self._matrix.toarray() if is_sparse(self._matrix) else self._matrix
        return dense

    def eigh(self, H: Array) -> tuple[Array, Array]:
        """Return w, ascending, and V with HV = BV diag(w) and VᵀBV = I."""
        if self._matrix is not None:
            w, V = linalg.eigh(H, self.dense(), check_finite=False)
            return w, V
        root = np.sqrt(self.diagonal)
        w, V = linalg.eigh(H / root / root[:, None], check_finite=False)
        return w, V / root[:, None]

    def _sparse(self) -> Any:
        if self._matrix is None:
            return sparse.diags_array(self.diagonal, format="csc")
        return sparse.csc_array(self._matrix)


def _symmetric(B: Any, d: int) -> Any:
    given: Any = sparse.csc_array(B, dtype=np.float64) if is_sparse(B) else np.asarray(B, float)
    if given.shape != (d, d):
        raise ValueError(f"metric must have shape ({d}, {d}) or ({d},), got {given.shape}")
    check_finite("metric", np.asarray(given.data) if is_sparse(given) else given)
    if abs(given - given.T).max() > 1e-8 * abs(given).max():
        raise ValueError("metric must be symmetric")
    return given
