"""Separation oracles: whether a point is in a convex set, and which halfspace cuts it off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires

Vector = NDArray[np.float64]
Cut = Callable[[Vector], "Vector | None"]


class SeparationOracle:
    r"""A convex set K ⊂ ℝᵈ known by its cuts.

    ``oracle(u)`` returns ``(True, None)`` if u is in K, else ``(False, v)`` with ⟨v, u⟩ > ⟨v, w⟩
    for all w in K. ``first & second`` is the intersection. Any function that answers so can
    stand for it in `EllipsoidOCO`; the constructors below cover the usual sets.

    Parameters
    ----------
    cut : callable
        ``cut(u) -> None`` if u, of shape (d,), is inside, else v of shape (d,), of any length
        but 0.
    dim : int
        The dimension d ≥ 1.

    Examples
    --------
    >>> disc = SeparationOracle.ball([0.0, 0.0], 1.0)
    >>> half = SeparationOracle.polytope([[1.0, 1.0]], [0.5])
    >>> lens = disc & half
    >>> lens([0.2, 0.2])
    (True, None)
    >>> inside, v = lens([0.9, 0.1])
    >>> inside, v.round(3).tolist()
    (False, [0.707, 0.707])
    """

    def __init__(self, cut: Cut, dim: int) -> None:
        self.cut = cut
        self.dim = check_integer("dim", dim, at_least=1)

    def __call__(self, u: ArrayLike) -> tuple[bool, Vector | None]:
        """Return whether u is inside, and the normal of a cut if it is not."""
        v = self.cut(np.asarray(u, dtype=np.float64))
        return v is None, v

    def __and__(self, other: SeparationOracle) -> SeparationOracle:
        """Return the intersection of two sets."""
        return SeparationOracle.intersection(self, other)

    @classmethod
    def intersection(cls, *oracles: SeparationOracle) -> SeparationOracle:
        """Return the intersection of sets; the first that does not hold the point cuts it.

        Raises
        ------
        ValueError
            If there is none, or their dimensions differ.
        """
        dims = {oracle.dim for oracle in oracles}
        if len(dims) != 1:
            raise ValueError(
                f"oracles must be sets of one dimension, got dimensions {sorted(dims)}"
            )

        def cut(u: Vector) -> Vector | None:
            for oracle in oracles:
                v = oracle.cut(u)
                if v is not None:
                    return v
            return None

        return cls(cut, dims.pop())

    @classmethod
    def polytope(cls, A: ArrayLike, b: ArrayLike) -> SeparationOracle:
        """Return {x: A x ≤ b}, cut by the row that is violated most; O(md) per call.

        Parameters
        ----------
        A : array_like of shape (m, d)
            No row may be 0.
        b : array_like of shape (m,)

        Raises
        ------
        ValueError
            If a shape is wrong, an entry is not finite or a row is 0.
        """
        rows = check_array("A", A, shape=("m", "d"))
        offsets = check_array("b", b, shape=(len(rows),))
        lengths = np.linalg.norm(rows, axis=1)
        if len(rows) == 0 or not np.all(lengths > 0):
            raise ValueError("A must have rows, none of them 0")
        rows = rows / lengths[:, None]
        offsets = offsets / lengths

        def cut(u: Vector) -> Vector | None:
            slack = rows @ u - offsets
            worst = slack.argmax()
            # Not "> 0 is outside": NaN must not count as inside.
            return None if slack[worst] <= 0 else rows[worst]

        return cls(cut, rows.shape[1])

    @classmethod
    def box(cls, lower: ArrayLike, upper: ArrayLike) -> SeparationOracle:
        """Return {x: lower ≤ x ≤ upper}, with bounds of shape (d,), possibly infinite; O(d).

        Raises
        ------
        ValueError
            If a lower bound is not below the upper one.
        """
        low = check_array("lower", lower, shape=("d",), finite=False)
        high = check_array("upper", upper, shape=(len(low),), finite=False)
        if not np.all(low < high):
            raise ValueError("lower must be below upper in every coordinate")

        def cut(u: Vector) -> Vector | None:
            excess = np.maximum(u - high, low - u)
            worst = excess.argmax()
            if excess[worst] <= 0:
                return None
            v = np.zeros(len(u))
            v[worst] = 1.0 if u[worst] > high[worst] else -1.0
            return v

        return cls(cut, len(low))

    @classmethod
    def ball(cls, center: ArrayLike, radius: float) -> SeparationOracle:
        """Return {x: ‖x - center‖₂ ≤ radius}, with a center of shape (d,); O(d)."""
        middle = check_array("center", center, shape=("d",))
        squared = check_number("radius", radius, above=0) ** 2

        def cut(u: Vector) -> Vector | None:
            offset = u - middle
            return None if offset @ offset <= squared else offset

        return cls(cut, len(middle))

    @classmethod
    def ellipsoid(cls, H: ArrayLike, center: ArrayLike) -> SeparationOracle:
        """Return {x: (x - center)ᵀ H⁻¹ (x - center) ≤ 1}; O(d²) per call.

        Parameters
        ----------
        H : array_like of shape (d, d)
            Symmetric positive definite; its eigenvalues are the squared half-axes.
        center : array_like of shape (d,)

        Raises
        ------
        ValueError
            If H is not positive definite.
        """
        middle = check_array("center", center, shape=("d",))
        shape = check_array("H", H, shape=(len(middle), len(middle)))
        values, vectors = eigh((shape + shape.T) / 2)
        if values[0] <= 0:
            raise ValueError(f"H must be positive definite, got the eigenvalue {values[0]:g}")
        inverse = (vectors / values) @ vectors.T

        def cut(u: Vector) -> Vector | None:
            offset = u - middle
            gradient = inverse @ offset
            return None if offset @ gradient <= 1 else gradient

        return cls(cut, len(middle))

    @classmethod
    def spectrahedron(cls, F0: ArrayLike, F: ArrayLike) -> SeparationOracle:
        """Return {x: F0 + Σ xᵢ Fᵢ ⪰ 0}, cut by the eigenvector of the least eigenvalue.

        Parameters
        ----------
        F0 : array_like of shape (n, n)
        F : array_like of shape (d, n, n)
            Symmetric, as is F0.

        Raises
        ------
        ValueError
            If a shape is wrong or a matrix is not symmetric.

        Notes
        -----
        O(dn² + n³) per call.
        """
        constant = check_array("F0", F0, shape=("n", "n"))
        n = len(constant)
        parts = check_array("F", F, shape=("d", n, n))
        if not (np.allclose(constant, constant.T) and np.allclose(parts, parts.mT)):
            raise ValueError("F0 and F must be symmetric")

        def cut(u: Vector) -> Vector | None:
            value, vector = _least_eigenpair(constant + np.tensordot(u, parts, 1))
            return None if value >= 0 else -np.einsum("dij,i,j->d", parts, vector, vector)

        return cls(cut, len(parts))

    @classmethod
    def psd(cls, n: int) -> SeparationOracle:
        """Return the positive semidefinite matrices of order n, as vectors; see `svec`.

        d = n(n + 1)/2, and Euclidean norms are those of Frobenius. O(n³) per call.
        """
        order = check_integer("n", n, at_least=1)

        def cut(u: Vector) -> Vector | None:
            value, vector = _least_eigenpair(smat(u))
            return None if value >= 0 else -svec(np.outer(vector, vector))

        return cls(cut, order * (order + 1) // 2)

    @classmethod
    def from_function(
        cls, g: Callable[[Vector], float], subgradient: Callable[[Vector], ArrayLike], dim: int
    ) -> SeparationOracle:
        """Return {x: g(x) ≤ 0} of a convex function, cut by its subgradient, never 0 outside."""

        def cut(u: Vector) -> Vector | None:
            return None if g(u) <= 0 else np.asarray(subgradient(u), dtype=np.float64)

        return cls(cut, dim)

    @classmethod
    def from_cvxpy(cls, constraints: Sequence[Any], variable: Any) -> SeparationOracle:
        """Return the set that CVXPY constraints describe, cut by subgradients of their atoms.

        No problem is solved: the most violated entry of the first violated constraint is
        differentiated. Inequalities, second-order cones and semidefinite constraints are
        understood.

        Parameters
        ----------
        constraints : sequence of cvxpy.Constraint
            Convex by CVXPY's rules, of one variable.
        variable : cvxpy.Variable
            Of shape (d,). Its value is overwritten by each call.

        Raises
        ------
        ValueError
            If a constraint is not convex by CVXPY's rules, has other variables, or is of
            another kind; equalities in particular, which leave no interior: see `AffineHull`.
        """
        with requires("convex"):
            import cvxpy as cp
        parts = [part for constraint in constraints for part in _convex_parts(cp, constraint)]
        foreign = {v.name() for part in parts for v in part.variables()} - {variable.name()}
        if foreign:
            raise ValueError(f"constraints must be of {variable.name()} only, got {foreign}")
        if variable.ndim != 1:
            raise ValueError(f"variable must have shape (d,), got {variable.shape}")

        def cut(u: Vector) -> Vector | None:
            variable.value = u
            for part in parts:
                v = _cut_of_expression(part, variable)
                if v is not None:
                    return v
            return None

        return cls(cut, variable.size)


def svec(matrix: ArrayLike) -> Vector:
    """Return a symmetric matrix (n, n) as a vector of length n(n + 1)/2, norms kept.

    Examples
    --------
    >>> svec([[1.0, 2.0], [2.0, 3.0]]).round(3).tolist()
    [1.0, 2.828, 3.0]
    """
    entries = check_array("matrix", matrix, shape=("n", "n"), finite=False)
    rows, columns = np.triu_indices(len(entries))
    vector: Vector = entries[rows, columns] * np.where(rows == columns, 1.0, np.sqrt(2.0))
    return vector


def smat(vector: ArrayLike) -> Vector:
    """Return the symmetric matrix of a vector, the inverse of `svec`.

    Raises
    ------
    ValueError
        If the length is not n(n + 1)/2 for an n.
    """
    entries = check_array("vector", vector, shape=("d",), finite=False)
    n = int((np.sqrt(8 * len(entries) + 1) - 1) / 2)
    if n * (n + 1) // 2 != len(entries):
        raise ValueError(f"vector must have length n(n + 1)/2, got {len(entries)}")
    rows, columns = np.triu_indices(n)
    matrix = np.empty((n, n))
    matrix[rows, columns] = entries * np.where(rows == columns, 1.0, np.sqrt(0.5))
    matrix[columns, rows] = matrix[rows, columns]
    return matrix


def _least_eigenpair(matrix: Vector) -> tuple[float, Vector]:
    values, vectors = eigh(matrix, subset_by_index=[0, 0])
    return float(values[0]), vectors[:, 0]


def _convex_parts(cp: Any, constraint: Any) -> list[Any]:
    """Return expressions, each convex or a symmetric matrix, that must be ≤ 0 (⪯ 0)."""
    if not constraint.is_dcp():
        raise ValueError(f"constraints must be convex by CVXPY's rules, got {constraint}")
    if isinstance(constraint, cp.constraints.Inequality):
        return [constraint.expr]
    if isinstance(constraint, cp.constraints.NonPos):
        return [constraint.args[0]]
    if isinstance(constraint, cp.constraints.NonNeg):
        return [-constraint.args[0]]
    if isinstance(constraint, cp.constraints.SOC):
        t, x = constraint.args
        return [cp.norm(x, axis=constraint.axis) - t]
    if isinstance(constraint, cp.constraints.PSD):
        return [cp.lambda_max(-constraint.args[0])]
    raise ValueError(
        "constraints must be inequalities, second-order cones or semidefinite, got "
        f"{type(constraint).__name__}; equalities are taken out by AffineHull"
    )


def _cut_of_expression(expression: Any, variable: Any) -> Vector | None:
    value = np.ravel(expression.value, order="F")
    worst = int(value.argmax())
    if value[worst] <= 0:
        return None
    jacobian = expression.grad[variable]  # (d, entries), entries in Fortran order
    if jacobian is None:
        raise ValueError(f"{expression} has no subgradient at {variable.value}")
    column = jacobian[:, [worst]] if hasattr(jacobian, "toarray") else np.atleast_2d(jacobian)
    dense = column.toarray() if hasattr(column, "toarray") else column
    return np.asarray(dense, dtype=np.float64).reshape(-1)
