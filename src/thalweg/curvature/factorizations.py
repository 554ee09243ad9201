"""Factorizations of symmetric matrices that say whether these are positive definite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse
from scipy.sparse.linalg import splu

Array = NDArray[np.float64]
Solve = Callable[[Array], Array]


def is_sparse(A: Any) -> bool:
    """Return whether A is a sparse array or matrix of SciPy."""
    return bool(sparse.issparse(A))


def dense_cholesky(A: Array) -> Solve | None:
    """Return b ↦ A⁻¹b, or None if A is not positive definite. A is overwritten."""
    # The transpose of a C-contiguous symmetric matrix is itself in the order of LAPACK.
    work = A if A.flags.f_contiguous else A.T
    try:
        factor = linalg.cho_factor(work, lower=True, overwrite_a=True, check_finite=False)
    except linalg.LinAlgError:
        return None
    return lambda b: linalg.cho_solve(factor, b, check_finite=False)


def sparse_cholesky(A: Any) -> Solve | None:
    """Return b ↦ A⁻¹b of a sparse A, or None if A is not positive definite.

    SciPy has no sparse Cholesky factorization. SuperLU with its pivots on the diagonal is LDLᵀ,
    whose D is positive exactly if A is positive definite.
    """
    try:
        factor = splu(
            sparse.csc_array(A),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError:  # exactly singular
        return None
    on_diagonal = np.array_equal(factor.perm_r, factor.perm_c)
    if not on_diagonal or not np.all(factor.U.diagonal() > 0):
        return None
    solve: Solve = factor.solve
    return solve
