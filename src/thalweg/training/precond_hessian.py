"""The extreme curvature of a function, as a nonlinear preconditioner sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import LinearOperator, eigsh

from thalweg.common.checks import check_array, check_choice
from thalweg.training.precond_kernels import NonlinearPreconditioner

Vector = NDArray[np.float64]
DENSE = 300  # variables up to which the Hessian is assembled
LANCZOS_VECTORS = 40
DEFAULT = NonlinearPreconditioner()


def preconditioned_curvature(
    gradient: ArrayLike,
    hvp: Callable[[Vector], ArrayLike],
    *,
    which: Literal["smallest", "largest"] = "smallest",
    preconditioner: NonlinearPreconditioner = DEFAULT,
    tol: float = 1e-8,
) -> float:
    """Return an extreme eigenvalue of ``∇²φ*(∇f/L̄) ∇²f``.

    The smallest one, at least -√(ρε), certifies second-order stationarity; the largest one over
    L̄, over all points, is the L of anisotropic smoothness. The product is not symmetric: with
    M = ∇²φ* it has the spectrum of ``M^½ ∇²f M^½``, which is.

    Parameters
    ----------
    gradient : array_like of shape (n,)
        ∇f at the point.
    hvp : callable
        ``hvp(v) -> array_like of shape (n,)``, the Hessian at the point times v.
    which : {"smallest", "largest"}, default "smallest"
    preconditioner : NonlinearPreconditioner
        By default that of `minimize_nlprecond`: the kernel "cosh", isotropic, L̄ = 1.
    tol : float, default 1e-8
        Relative accuracy of the Lanczos iteration.

    Returns
    -------
    float

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    scipy.sparse.linalg.ArpackNoConvergence
        If the Lanczos iteration does not reach ``tol``.

    Notes
    -----
    n Hessian-vector products up to n = 300, a few dozen to a few hundred beyond.

    References
    ----------
    "Nonlinear preconditioning under generalized smoothness", NeurIPS 2025.

    Examples
    --------
    At x = 2, f = x⁴/4 - x²/2 has f' = 6 and f'' = 11; the kernel "cosh" makes that 11/√37:

    >>> round(preconditioned_curvature([6.0], lambda v: 11 * v), 6)
    1.808389
    """
    g = check_array("gradient", gradient, shape=("n",))
    check_choice("which", which, ("smallest", "largest"))

    def image(v: Vector) -> Vector:
        return check_array("hvp(v)", hvp(v), shape=g.shape)

    n = len(g)
    if n <= DENSE:
        hessian = np.column_stack([image(column) for column in np.eye(n)])
        eigenvalues = preconditioned_eigenvalues(g, hessian, preconditioner)
        return float(eigenvalues[0 if which == "smallest" else -1])

    def product(v: Vector) -> Vector:
        root_v = preconditioner.apply_hessian(g, v.reshape(-1), 0.5)
        return preconditioner.apply_hessian(g, image(root_v), 0.5)

    (eigenvalue,) = eigsh(
        LinearOperator((n, n), matvec=product, dtype=np.float64),
        k=1,
        which="SA" if which == "smallest" else "LA",
        ncv=LANCZOS_VECTORS,
        tol=tol,
        return_eigenvectors=False,
        v0=np.random.default_rng(0).standard_normal(n),
    )
    return float(eigenvalue)


def preconditioned_eigenvalues(
    gradient: Vector, hessian: Vector, preconditioner: NonlinearPreconditioner
) -> Vector:
    """Return the n eigenvalues of ``∇²φ*(∇f/L̄) ∇²f``, increasing, for a Hessian (n, n)."""
    half = preconditioner.apply_hessian(gradient, hessian, 0.5)
    product = preconditioner.apply_hessian(gradient, half.T, 0.5)
    return np.asarray(np.linalg.eigvalsh((product + product.T) / 2), dtype=np.float64)
