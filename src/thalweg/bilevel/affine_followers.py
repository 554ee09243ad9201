"""Followers whose solutions are an affine set: least squares and linear systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, lsmr

from thalweg.bilevel.section_minimization import Section, minimize_section
from thalweg.bilevel.solution_sets import Selection
from thalweg.common.checks import check_array

Array = NDArray[np.float64]
Affine = Callable[[Array], ArrayLike]

MOST_EXPLICIT = 1000  # columns of a matrix whose null space is held as a basis
CONSISTENT = 1e-8  # relative residual up to which a system has a solution


class LeastSquaresFollower:
    r"""The lower level ``½‖Ay - (Bx + c)‖²``, with a matrix A that leaves y free.

    .. math:: S(x) = \{ y : A y = \Pi_{\operatorname{range} A} (B x + c) \}
                   = A^+ (B x + c) + \ker A

    Parameters
    ----------
    A : array_like, sparse matrix or LinearOperator of shape (p, n)
        Factored once if it is an array, by an SVD; else every projection is an LSMR solve.
    B : array_like of shape (p, m), or callable
        Or the right-hand side as any function of x, ``B(x) -> (p,)``.
    c : array_like of shape (p,) or float, default 0

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Cost.* O(np min(n, p)) once. A solve takes O(np), and the selection some evaluations of F and
    of its gradient; up to 1,000 columns it runs in a basis of the null space of A, beyond that in
    y, with projections.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import LeastSquaresFollower
    >>> follower = LeastSquaresFollower([[1.0, 1.0]], [[2.0]])
    >>> follower.project(np.array([3.0]), np.array([0.0, 2.0]))
    array([2., 4.])
    """

    constrained = False

    def __init__(self, A: Any, B: ArrayLike | Affine, c: ArrayLike = 0.0) -> None:
        self.solutions = AffineSolutions(A)
        p = self.solutions.A.shape[0]
        self.c = check_array("c", np.broadcast_to(c, p) if np.ndim(c) == 0 else c, shape=(p,))
        self._B: Affine | Array = B if callable(B) else check_array("B", B, shape=(p, "m"))

    def rhs(self, x: Array) -> Array:
        """Return Bx + c."""
        if callable(self._B):
            return np.asarray(check_array("B(x)", self._B(x), shape=self.c.shape) + self.c)
        if len(x) != self._B.shape[1]:
            raise ValueError(f"x must have shape ({self._B.shape[1]},), got {x.shape}")
        return np.asarray(self._B @ x + self.c)

    def minimize(self, section: Section, x: Array, tol: float, start: Array | None) -> Selection:
        """Return a minimizer of a convex function over S(x)."""
        return self.solutions.minimize(section, self.rhs(x), tol, start)

    def project(self, x: Array, v: Array) -> Array:
        """Return the point of S(x) that is nearest to v."""
        return self.solutions.project(self.rhs(x), v)

    def gradient(self, x: Array, y: Array) -> Array:
        """Return Aᵀ(Ay - Bx - c)."""
        A = self.solutions.A
        return np.asarray(A.T @ (A @ y - self.rhs(x)))

    def size(self, x: Array) -> int:
        """Return n."""
        return int(self.solutions.A.shape[1])


class LinearSystemFollower:
    """A lower level that solves a consistent system ``A(x)y = b(x)``, whose matrix moves with x.

    Parameters
    ----------
    matrix : callable
        ``matrix(x) -> (p, n)``, an array, sparse matrix or LinearOperator. Its rank must not
        change, or S(x) jumps.
    rhs : callable
        ``rhs(x) -> (p,)``.

    Notes
    -----
    S(x) is empty where the system has no solution: the hyper-objective is infinite there.

    *Cost.* One SVD, O(np min(n, p)), per solve; else as `LeastSquaresFollower`.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import LinearSystemFollower
    >>> follower = LinearSystemFollower(lambda x: [[x[0], 1.0]], lambda x: [1.0])
    >>> follower.project(np.array([0.0]), np.array([5.0, 7.0])).round(12)
    array([5., 1.])
    """

    constrained = False

    def __init__(self, matrix: Callable[[Array], Any], rhs: Affine) -> None:
        for name, given in (("matrix", matrix), ("rhs", rhs)):
            if not callable(given):
                raise TypeError(f"{name} must be callable, got {type(given).__name__}")
        self._matrix, self._rhs = matrix, rhs

    def _at(self, x: Array) -> tuple[AffineSolutions, Array]:
        solutions = AffineSolutions(self._matrix(x))
        p = solutions.A.shape[0]
        return solutions, check_array("rhs(x)", self._rhs(x), shape=(p,))

    def minimize(self, section: Section, x: Array, tol: float, start: Array | None) -> Selection:
        """Return a minimizer of a convex function over S(x)."""
        solutions, b = self._at(x)
        y = solutions.least_norm(b)
        if np.linalg.norm(solutions.A @ y - b) > CONSISTENT * np.linalg.norm(b):
            return Selection(np.inf, y, np.inf)
        return solutions.minimize(section, b, tol, start)

    def project(self, x: Array, v: Array) -> Array:
        """Return the point of S(x) that is nearest to v."""
        solutions, b = self._at(x)
        return solutions.project(b, v)

    def gradient(self, x: Array, y: Array) -> Array:
        """Return the gradient of half the squared residual."""
        solutions, b = self._at(x)
        return np.asarray(solutions.A.T @ (solutions.A @ y - b))

    def size(self, x: Array) -> int:
        """Return n."""
        return int(np.shape(self._matrix(x))[1])


class AffineSolutions:
    """All least-squares solutions of Ay = b, for one A and any b.

    Parameters
    ----------
    A : array_like, sparse matrix or LinearOperator of shape (p, n)
    """

    def __init__(self, A: Any) -> None:
        self.basis: Array | None = None
        self._factors: tuple[Array, Array, Array] | None = None
        if sparse.issparse(A) or isinstance(A, LinearOperator):
            self.A: Any = A
            return
        self.A = check_array("A", A, shape=("p", "n"))
        n = self.A.shape[1]
        U, s, Vt = np.linalg.svd(self.A, full_matrices=n <= MOST_EXPLICIT)
        top = s.max(initial=0.0)
        rank = int(np.sum(s > max(self.A.shape) * np.finfo(np.float64).eps * top))
        self._factors = U[:, :rank], s[:rank], Vt[:rank]
        if n <= MOST_EXPLICIT:
            self.basis = np.ascontiguousarray(Vt[rank:].T)

    def least_norm(self, b: Array) -> Array:
        """Return A⁺b."""
        if self._factors is None:
            return np.asarray(lsmr(self.A, b, atol=1e-14, btol=1e-14, maxiter=10_000)[0])
        U, s, Vt = self._factors
        y: Array = ((b @ U) / s) @ Vt
        return y

    def free(self, v: Array) -> Array:
        """Return the part of v in the null space of A."""
        if self._factors is None:
            return v - self.least_norm(self.A @ v)
        Vt = self._factors[2]
        rest: Array = v - (Vt @ v) @ Vt
        return rest

    def project(self, b: Array, v: Array) -> Array:
        """Return the solution nearest to v."""
        return self.least_norm(b) + self.free(v)

    def minimize(self, section: Section, b: Array, tol: float, start: Array | None) -> Selection:
        """Return the solution of least value of a convex function."""
        origin = self.least_norm(b)
        offset = np.zeros_like(origin) if start is None else start - origin
        if self.basis is None:
            v, value, gap = minimize_section(
                section.projected(origin, self.free), self.free(offset), tol
            )
            return Selection(value, origin + self.free(v), gap)
        if self.basis.shape[1] == 0:
            return Selection(section.fun(origin), origin, 0.0)
        z, value, gap = minimize_section(
            section.along(origin, self.basis), self.basis.T @ offset, tol
        )
        return Selection(value, origin + self.basis @ z, gap)
