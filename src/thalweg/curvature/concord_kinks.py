"""The semismooth Newton system of one row, and its complementarity problem at kinks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dposv, dpotrf
from scipy.optimize import nnls

from thalweg.curvature.concord_kernel import PIVOT

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


class Solution(NamedTuple):
    """The solution of a row's system, or the position of a dependent column."""

    values: Array | None
    dependent: int | None = None


def solve_smooth(N: Array, g: Array) -> Solution:
    """Solve N x = g by Cholesky; N, of shape (m, m), is overwritten."""
    limits = N.diagonal() * (PIVOT * len(N))
    # LAPACK wants Fortran order: the transpose is one, of the same symmetric matrix.
    factor, values, info = dposv(N.T, g, lower=True, overwrite_a=True)
    dependent = _dependent(factor, info, limits)
    return Solution(values, None) if dependent is None else Solution(None, dependent)


def solve_kinks(N: Array, g: Array, kink: Mask, signs: Array, lam: Array) -> Solution:
    r"""Solve the system of a row with variables K at kinks, and x_K = s a.

    .. math:: N_{EE} x_E + N_{EK} (s a) = g, \qquad
              s b = N_{KE} x_E + N_{KK} (s a) + s \lambda, \qquad 0 ≤ a \perp b ≥ 0

    Without :math:`x_E`, this is b = M a + q with

    .. math:: M = \mathrm{diag}(s) (N_{KK} - N_{KE} N_{EE}^{-1} N_{EK}) \mathrm{diag}(s), \qquad
              q = \lambda + s N_{KE} N_{EE}^{-1} g,

    the optimality conditions of ½ a'Ma + q'a, a ≥ 0. As M = L L' is positive definite, that is the
    nonnegative least squares problem min ‖L'a + L⁻¹q‖, which an active-set method solves exactly.

    Parameters
    ----------
    N : ndarray of shape (m, m)
        S of E and K, with 1/π² added to the entry of the row's own variable.
    g : ndarray of shape (m,)
        Its entries on K are not read.
    kink : ndarray of bool, of shape (m,)
        Which variables are K.
    signs, lam : ndarray of shape (m,)
        The signs s of u, and λ; those on E are not read.

    Returns
    -------
    Solution
        The m values, or the position of a dependent column.
    """
    order = np.argsort(kink, kind="stable")
    e = len(kink) - int(kink.sum())
    # The factor of N holds that of N_EE and, last, that of the Schur complement.
    N = N[np.ix_(order, order)]
    limits = N.diagonal() * (PIVOT * len(N))
    factor, info = dpotrf(N.T, lower=True, overwrite_a=True)
    dependent = _dependent(factor, info, limits)
    if dependent is not None:
        return Solution(None, int(order[dependent]))
    A, B, C = factor[:e, :e], factor[e:, :e], factor[e:, e:]
    s = signs[order[e:]]
    half = solve_triangular(A, g[order[:e]], lower=True)
    q = lam[order[e:]] + s * (B @ half)
    # M = L L' with L = diag(s) C.
    a = nnls(C.T * s, -solve_triangular(C, s * q, lower=True))[0]
    values = np.empty(len(kink))
    values[order[e:]] = s * a
    values[order[:e]] = solve_triangular(A, half - B.T @ (s * a), lower=True, trans="T")
    return Solution(values)


def _dependent(factor: Array, info: int, limits: Array) -> int | None:
    """Return the first column that depends on those before it, up to rounding."""
    if info > 0:
        return int(info) - 1
    small = factor.diagonal() ** 2 <= limits
    return int(small.argmax()) if small.any() else None
