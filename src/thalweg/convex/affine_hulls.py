"""Sets of lower dimension in coordinates of their own, and balls inside polytopes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import lstsq, null_space
from scipy.optimize import linprog

from thalweg.common.checks import check_array
from thalweg.convex.separation_oracles import SeparationOracle

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class AffineHull:
    """The solutions of linear equations, {x₀ + N z}, with orthonormal columns N.

    Attributes
    ----------
    origin : ndarray of shape (n,)
        The solution of least norm, x₀.
    basis : ndarray of shape (n, d)
        N.

    Examples
    --------
    The simplex in ℝ³ becomes a triangle in ℝ²:

    >>> hull = AffineHull.of_equations(np.ones((1, 3)), [1.0])
    >>> hull.basis.shape
    (3, 2)
    >>> triangle = hull.polytope(-np.eye(3), np.zeros(3))
    >>> triangle([0.0, 0.0])
    (True, None)
    >>> hull.lift(np.zeros(2)).round(3).tolist()
    [0.333, 0.333, 0.333]
    """

    origin: Vector
    basis: Vector

    @classmethod
    def of_equations(cls, A: ArrayLike, b: ArrayLike) -> AffineHull:
        """Return {x: A x = b}, A of shape (m, n), b of shape (m,).

        Raises
        ------
        ValueError
            If the equations contradict each other.
        """
        rows = check_array("A", A, shape=("m", "n"))
        right = check_array("b", b, shape=(len(rows),))
        origin = lstsq(rows, right)[0]
        if not np.allclose(rows @ origin, right, rtol=1e-9, atol=1e-9):
            raise ValueError("A x = b must have a solution")
        return cls(origin, null_space(rows))

    @property
    def dim(self) -> int:
        """The dimension d of the solutions."""
        return int(self.basis.shape[1])

    def lift(self, z: ArrayLike) -> Vector:
        """Return the points x₀ + N z of coordinates z, of shape (..., d)."""
        return self.origin + np.asarray(z, dtype=np.float64) @ self.basis.T

    def reduce(self, x: ArrayLike) -> Vector:
        """Return the coordinates Nᵀ(x - x₀) of points of shape (..., n), projected on the hull."""
        coordinates: Vector = (np.asarray(x, dtype=np.float64) - self.origin) @ self.basis
        return coordinates

    def reduce_gradient(self, gradient: ArrayLike) -> Vector:
        """Return the gradient in z, Nᵀg, of gradients in x of shape (..., n)."""
        reduced: Vector = np.asarray(gradient, dtype=np.float64) @ self.basis
        return reduced

    def polytope(self, A: ArrayLike, b: ArrayLike) -> SeparationOracle:
        """Return {z: A (x₀ + N z) ≤ b}; rows that do not depend on z are left out.

        Raises
        ------
        ValueError
            If such a row is violated: the set is empty.
        """
        rows, right = self.reduce_inequalities(A, b)
        return SeparationOracle.polytope(rows, right)

    def reduce_inequalities(self, A: ArrayLike, b: ArrayLike) -> tuple[Vector, Vector]:
        """Return the rows (m', d) and right sides (m',) of A x ≤ b in the coordinates z."""
        full = check_array("A", A, shape=("m", len(self.origin)))
        right = check_array("b", b, shape=(len(full),)) - full @ self.origin
        rows = full @ self.basis
        length = np.linalg.norm(full, axis=1)
        moves = np.linalg.norm(rows, axis=1) > 1e-12 * length
        if np.any(right[~moves] < -1e-9 * length[~moves]):
            raise ValueError("A x <= b must hold somewhere on the affine hull")
        return rows[moves], right[moves]


def chebyshev_ball(A: ArrayLike, b: ArrayLike) -> tuple[Vector, float]:
    """Return center and radius of a largest ball in the polytope {x: A x ≤ b}.

    Parameters
    ----------
    A : array_like of shape (m, d)
    b : array_like of shape (m,)

    Returns
    -------
    center : ndarray of shape (d,)
    radius : float
        Above 0: the set has an interior.

    Raises
    ------
    ValueError
        If the set is empty, has no interior or holds balls of any size.

    Notes
    -----
    One linear program in d + 1 variables, solved by HiGHS.

    Examples
    --------
    >>> A, b = np.vstack([np.eye(2), -np.eye(2)]), [2.0, 1.0, 0.0, 0.0]
    >>> center, radius = chebyshev_ball(A, b)
    >>> radius, float(center[1])
    (0.5, 0.5)
    """
    rows = check_array("A", A, shape=("m", "d"))
    right = check_array("b", b, shape=(len(rows),))
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    objective = np.append(np.zeros(rows.shape[1]), -1.0)
    bounds = [(None, None)] * rows.shape[1] + [(0.0, None)]
    result = linprog(objective, np.hstack([rows, lengths]), right, bounds=bounds)
    if result.status == 3:
        raise ValueError("A x <= b must be bounded: it holds balls of any radius")
    if result.x is None or result.x[-1] <= 0:
        raise ValueError("A x <= b must have an interior point")
    return result.x[:-1], float(result.x[-1])
