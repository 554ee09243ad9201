"""The lowest eigenpairs by subspace iteration, filtered by AutoSpec."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import as_generator
from thalweg.curvature.autospec_network import AutoSpec
from thalweg.curvature.autospec_weights import pretrained
from thalweg.curvature.native_products import as_matmul

with requires("curvature"):
    from sklearn.exceptions import ConvergenceWarning

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EigenpairResult:
    """What `autospec_eigsh` has found.

    Attributes
    ----------
    values : ndarray of shape (k,)
        Ascending.
    vectors : ndarray of shape (n, k)
        Orthonormal.
    residuals : ndarray of shape (k,)
        Norms of ``A v - lambda v``.
    trace : ndarray of shape (iterations,)
        Largest of these after each filtering.
    matvecs : int
        Products of A with a vector, those of the probe included.
    converged : bool
    """

    values: Values
    vectors: NDArray[Any]
    residuals: Values
    trace: Values
    matvecs: int
    converged: bool


def autospec_eigsh(
    A: Any,
    k: int = 6,
    *,
    model: AutoSpec | None = None,
    guard: int | None = None,
    tol: float = 1e-8,
    maxiter: int = 100,
    nullspace: Any = None,
    rng: int | np.random.Generator | None = None,
    callback: Callable[[Values, Values], Any] | None = None,
) -> EigenpairResult:
    """Find the k smallest eigenvalues of A and their vectors by filtered subspace iteration.

    Every iteration applies the polynomial to a block of k + guard vectors, orthonormalizes it and
    takes Ritz pairs; the largest Ritz value is where the next filter cuts.

    Parameters
    ----------
    A : sparse matrix, ndarray or LinearOperator of shape (n, n)
        Symmetric (Hermitian) positive definite, or semidefinite with its ``nullspace``, whose
        vectors are then among what is found.
    k : int, default 6
    model : AutoSpec, optional
        Of the task "filter"; by default that which comes with the library, of degree 12.
    guard : int, optional
        Vectors beyond k, which make the last of the k converge: by default half of k and at least
        4.
    tol : float, default 1e-8
        Of the residual norms, relative to the largest eigenvalue.
    maxiter : int, default 100
    nullspace : array_like of shape (n,) or (n, r), optional
        Vectors that A maps to zero.
    rng : int, Generator or None
    callback : callable, optional
        Called after every iteration with the k Ritz values and their residuals.

    Returns
    -------
    EigenpairResult
        What was reached, also after Ctrl-C.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range or of another kind, or A is not as said.

    Warns
    -----
    ConvergenceWarning
        If ``maxiter`` iterations do not reach ``tol``.

    Notes
    -----
    An iteration costs degree + 1 products with the block and O(n (k + guard)^2) for the rest. Where
    the wanted eigenvalues are below a thousandth of the largest, a filter of degree 12 hardly tells
    them apart: take `scipy.sparse.linalg.lobpcg` with the operator of ``pretrained("precond", 12)``
    as its preconditioner.

    Examples
    --------
    >>> import numpy as np
    >>> import scipy.sparse as sp
    >>> from thalweg.curvature import autospec_eigsh
    >>> A = sp.diags_array(np.arange(1.0, 1001.0)).tocsr()
    >>> autospec_eigsh(A, 3, rng=0).values.round(6)
    array([1., 2., 3.])
    """
    size, matmul, to_native = as_matmul(A)
    k = check_integer("k", k, at_least=1)
    guard = max(4, k // 2) if guard is None else check_integer("guard", guard, at_least=1)
    if k + guard > size:
        raise ValueError(f"k + guard must be at most the size {size} of A, got {k + guard}")
    check_number("tol", tol, above=0)
    check_integer("maxiter", maxiter, at_least=1)
    model = pretrained("filter", 12) if model is None else model
    check_choice("model.task", model.task, ("filter",))
    generator = as_generator(rng)
    probe = model.probe(A, rng=generator, nullspace=nullspace)
    block = np.linalg.qr(to_native(generator.standard_normal((size, k + guard))))[0]
    values, block, product = _rayleigh_ritz(block, matmul)
    matvecs = probe.matvecs + k + guard
    trace: list[float] = []
    residuals = np.full(k, np.inf)
    try:
        for _ in range(maxiter):
            # The interval has to end above the cut.
            cut = min(values[-1], 0.99 * probe.lam_max)
            filtered = model.apply_to(A, block, dataclasses.replace(probe, cut=float(cut)))
            values, block, product = _rayleigh_ritz(np.linalg.qr(filtered)[0], matmul)
            matvecs += (model.degree + 1) * (k + guard)
            residuals = np.linalg.norm(product[:, :k] - block[:, :k] * values[:k], axis=0)
            trace.append(float(residuals.max()))
            if callback is not None:
                callback(values[:k], residuals)
            if trace[-1] <= tol * probe.lam_max:
                break
    except KeyboardInterrupt:
        # What was reached is returned, with the residuals that say how good it is.
        pass
    converged = bool(trace and trace[-1] <= tol * probe.lam_max)
    if not converged:
        warnings.warn(
            f"{len(trace)} iterations reached a residual of {residuals.max():.3g}; raise maxiter "
            "or guard",
            ConvergenceWarning,
            stacklevel=2,
        )
    return EigenpairResult(
        values=values[:k],
        vectors=block[:, :k],
        residuals=residuals,
        trace=np.array(trace),
        matvecs=matvecs,
        converged=converged,
    )


def _rayleigh_ritz(block: NDArray[Any], matmul: Any) -> tuple[Values, NDArray[Any], NDArray[Any]]:
    """Return the Ritz values, ascending, the Ritz vectors, and A times these."""
    product = matmul(block)
    projected = block.conj().T @ product
    values, rotation = np.linalg.eigh((projected + projected.conj().T) / 2)
    return values, block @ rotation, product @ rotation
