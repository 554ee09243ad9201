"""Rows of the pseudolikelihood estimate, and the matrices that follow from all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from thalweg.common.checks import check_choice

Array = NDArray[np.float64]
Index = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class SSNConcordResult:
    r"""Rows of the estimate Ω, of shape (r, p), and how they were found.

    Attributes
    ----------
    omega : csr_array of shape (r, p)
        The rows ω. All rows together are Ω, which is not symmetric.
    rows : ndarray of shape (r,)
        Their numbers.
    objective : ndarray of shape (r,)
        :math:`-\log ω_i + ½ ω'Sω + λ‖ω_{-i}‖_1` of each.
    residual : ndarray of shape (r,)
        ‖F‖ of each.
    newton_steps, prox_steps : ndarray of int, of shape (r,)
    converged : ndarray of bool, of shape (r,)
        Whether the residual is at most ``tol``.
    """

    omega: sparse.csr_array
    rows: Index
    objective: Array
    residual: Array
    newton_steps: Index
    prox_steps: Index
    converged: NDArray[np.bool_]

    def precision(self) -> sparse.csr_array:
        """Return ½(Θ + Θ') for Θ = Ω_D Ω, of shape (p, p).

        Raises
        ------
        ValueError
            If some rows were not asked for.
        """
        omega = self._all_rows()
        half_theta = scaled(omega, omega.diagonal() / 2, np.ones(len(self.rows)))
        return sparse.csr_array(half_theta + half_theta.T)

    def edges(self, rule: Literal["and", "or"] = "and") -> sparse.csr_array:
        """Return the symmetric boolean matrix of pairs with ω_ij and (or) ω_ji not zero.

        Raises
        ------
        ValueError
            If some rows were not asked for.
        """
        check_choice("rule", rule, ("and", "or"))
        omega = self._all_rows()
        found = sparse.csr_array(omega - sparse.diags_array(omega.diagonal())).astype(bool)
        found.eliminate_zeros()
        return sparse.csr_array(found.multiply(found.T) if rule == "and" else found + found.T)

    def _all_rows(self) -> sparse.csr_array:
        r, p = self.omega.shape
        if r != p:
            raise ValueError(f"all {p} rows are needed, got {r}")
        return self.omega[np.argsort(self.rows)]


def scaled(A: sparse.csr_array, left: Array, right: Array) -> sparse.csr_array:
    """Return diag(left) A diag(right), without the products of sparse matrices."""
    data = np.repeat(left, np.diff(A.indptr)) * A.data * right[A.indices]
    return sparse.csr_array((data, A.indices, A.indptr), shape=A.shape)
