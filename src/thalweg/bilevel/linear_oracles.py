"""Compact convex sets, given by linear minimization: argmin of ⟨c, v⟩ over v in the set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog
from scipy.sparse.linalg import ArpackNoConvergence, svds

from thalweg.common.checks import check_array, check_integer, check_number

Array = NDArray[np.float64]
DENSE_SVD = 64  # up to this size a full decomposition is faster than Lanczos iterations


class Atom(NamedTuple):
    """A point with few nonzero entries: ``value`` at the positions ``index`` of the raveled array.

    Linear minimization may return it in place of an array.
    """

    index: Any
    value: Any

    def dense(self, shape: tuple[int, ...]) -> Array:
        """Return the point as an array."""
        point = np.zeros(shape)
        point.reshape(-1)[self.index] = self.value
        return point


class LinearOracle(Protocol):
    """Linear minimization over a compact convex set: any function of that kind will do.

    The sets of this module also have ``contains(x, tol)``, with which starts are checked.
    """

    def __call__(self, c: Array) -> Array | Atom:
        """Return a minimizer of ⟨c, v⟩ over the set, of the shape of c."""


@dataclass(frozen=True)
class L1Ball:
    """The set of x with ‖x‖₁ ≤ radius; linear minimization is an argmax, and its atoms are sparse.

    Parameters
    ----------
    radius : float > 0
    axis : int, optional
        Bound the norm of each slice along this axis, as of each column with 0, in place of that of
        the whole array.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import L1Ball
    >>> L1Ball(2.0)(np.array([1.0, -3.0])).dense((2,)).tolist()
    [0.0, 2.0]
    """

    radius: float
    axis: int | None = None

    def __post_init__(self) -> None:
        _check_ball(self)

    def __call__(self, c: Array) -> Atom:
        """Return the vertex where ⟨c, v⟩ is least."""
        if self.axis is None:
            j = int(np.abs(c).argmax())
            return Atom(j, -self.radius if c.reshape(-1)[j] > 0 else self.radius)
        largest = np.expand_dims(np.abs(c).argmax(axis=self.axis), self.axis)
        entries = np.take_along_axis(c, largest, self.axis)
        flat = np.take_along_axis(np.arange(c.size).reshape(c.shape), largest, self.axis)
        return Atom(flat.reshape(-1), np.where(entries > 0, -self.radius, self.radius).reshape(-1))

    def contains(self, x: Array, tol: float = 1e-9) -> bool:
        """Return whether x is in the set, up to a relative tolerance."""
        return bool(np.all(np.abs(x).sum(axis=self.axis) <= self.radius * (1 + tol)))


@dataclass(frozen=True)
class LinfBall:
    """The box of x with ``|xᵢ|`` ≤ radius.

    Parameters
    ----------
    radius : float > 0
    """

    radius: float

    def __post_init__(self) -> None:
        check_number("radius", self.radius, above=0)

    def __call__(self, c: Array) -> Array:
        """Return the vertex where ⟨c, v⟩ is least."""
        return np.where(c > 0, -self.radius, self.radius)

    def contains(self, x: Array, tol: float = 1e-9) -> bool:
        """Return whether x is in the set, up to a relative tolerance."""
        return bool(np.abs(x).max() <= self.radius * (1 + tol))


@dataclass(frozen=True)
class L2Ball:
    """The set of x with ‖x‖₂ ≤ radius.

    Parameters
    ----------
    radius : float > 0
    axis : int, optional
        Bound the norm of each slice along this axis, as of each column with 0, in place of that of
        the whole array.
    """

    radius: float
    axis: int | None = None

    def __post_init__(self) -> None:
        _check_ball(self)

    def __call__(self, c: Array) -> Array:
        """Return -radius c/‖c‖, and 0 for c = 0."""
        # Scaled first, so that the squares neither overflow nor vanish.
        largest = np.abs(c).max(axis=self.axis, keepdims=self.axis is not None)
        scaled = c / np.where(largest > 0, largest, 1)
        norms = np.sqrt((scaled * scaled).sum(axis=self.axis, keepdims=self.axis is not None))
        point: Array = -self.radius * scaled / np.where(norms > 0, norms, 1)
        return point

    def contains(self, x: Array, tol: float = 1e-9) -> bool:
        """Return whether x is in the set, up to a relative tolerance."""
        norms = np.sqrt((x * x).sum(axis=self.axis))
        return bool(np.all(norms <= self.radius * (1 + tol)))


@dataclass(frozen=True)
class Simplex:
    """The set of x ≥ 0 that sum up to ``total``; its atoms are sparse.

    Parameters
    ----------
    total : float > 0, default 1
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        check_number("total", self.total, above=0)

    def __call__(self, c: Array) -> Atom:
        """Return the vertex where ⟨c, v⟩ is least."""
        return Atom(int(c.argmin()), self.total)

    def contains(self, x: Array, tol: float = 1e-9) -> bool:
        """Return whether x is in the set, up to a relative tolerance."""
        slack = tol * self.total
        return bool(x.min() >= -slack and abs(x.sum() - self.total) <= slack)


@dataclass(frozen=True)
class NuclearBall:
    """The matrices whose singular values sum up to ``radius`` at most.

    Parameters
    ----------
    radius : float > 0

    Notes
    -----
    The minimizer is -radius uvᵀ of the leading singular pair, by Lanczos iterations (ARPACK, always
    from the same start), or by a full decomposition up to a size of 64.
    """

    radius: float

    def __post_init__(self) -> None:
        check_number("radius", self.radius, above=0)

    def __call__(self, c: Array) -> Array:
        """Return the matrix of rank one where ⟨c, v⟩ is least."""
        if c.ndim != 2:
            raise ValueError(f"the nuclear norm is of matrices, got shape {c.shape}")
        if not c.any():
            return np.zeros_like(c)
        u, v = _leading_pair(c / np.abs(c).max())
        return np.outer(-self.radius * u, v)

    def contains(self, x: Array, tol: float = 1e-9) -> bool:
        """Return whether x is in the set, up to a relative tolerance."""
        return bool(np.linalg.svd(x, compute_uv=False).sum() <= self.radius * (1 + tol))


class Polytope:
    """A bounded polyhedron, by linear programming (HiGHS).

    Parameters
    ----------
    A_ub : array_like or sparse array of shape (m, d), optional
    b_ub : array_like of shape (m,), optional
        ``A_ub x ≤ b_ub``.
    A_eq, b_eq : optional
        ``A_eq x = b_eq``, likewise.
    bounds : sequence of (low, high), or one such pair, default (0, None)
        As in `scipy.optimize.linprog`: x ≥ 0 unless said otherwise.

    Raises
    ------
    ValueError
        From a call, if the polyhedron is empty or not bounded.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import Polytope
    >>> Polytope([[1.0, 1.0]], [1.0])(np.array([1.0, -1.0])).tolist()
    [0.0, 1.0]
    """

    def __init__(
        self,
        A_ub: Any = None,
        b_ub: ArrayLike | None = None,
        A_eq: Any = None,
        b_eq: ArrayLike | None = None,
        bounds: Any = (0, None),
    ) -> None:
        for kind, A, b in (("ub", A_ub, b_ub), ("eq", A_eq, b_eq)):
            if (A is None) != (b is None):
                raise ValueError(f"A_{kind} and b_{kind} must be given together")
        self.b_ub = None if b_ub is None else check_array("b_ub", b_ub, shape=("m",))
        self.b_eq = None if b_eq is None else check_array("b_eq", b_eq, shape=("m",))
        self.A_ub = A_ub if A_ub is None or hasattr(A_ub, "tocsr") else np.asarray(A_ub, float)
        self.A_eq = A_eq if A_eq is None or hasattr(A_eq, "tocsr") else np.asarray(A_eq, float)
        self.bounds = bounds

    def __call__(self, c: Array) -> Array:
        """Return a vertex where ⟨c, v⟩ is least."""
        # HiGHS has absolute tolerances.
        scale = max(float(np.abs(c).max()), np.finfo(np.float64).tiny)
        found = linprog(
            c.reshape(-1) / scale,
            A_ub=self.A_ub,
            b_ub=self.b_ub,
            A_eq=self.A_eq,
            b_eq=self.b_eq,
            bounds=self.bounds,
            method="highs",
        )
        if not found.success:
            raise ValueError(f"the polytope must be bounded and not empty: {found.message}")
        return np.asarray(found.x).reshape(c.shape)

    def contains(self, x: Array, tol: float = 1e-7) -> bool:
        """Return whether x is in the set, up to a tolerance relative to the right-hand sides."""
        x = np.reshape(x, -1)
        limits = np.array(self.bounds, dtype=object).reshape(-1, 2)
        low = np.array([-np.inf if v is None else v for v in limits[:, 0]], dtype=np.float64)
        high = np.array([np.inf if v is None else v for v in limits[:, 1]], dtype=np.float64)
        inside = bool(np.all(x >= low - tol) and np.all(x <= high + tol))
        if self.A_ub is not None and self.b_ub is not None:
            inside &= bool(np.all(self.A_ub @ x <= self.b_ub + tol * (1 + np.abs(self.b_ub))))
        if self.A_eq is not None and self.b_eq is not None:
            away = np.abs(self.A_eq @ x - self.b_eq)
            inside &= bool(np.all(away <= tol * (1 + np.abs(self.b_eq))))
        return inside


class ProductSet:
    """The product of sets: x is one vector that holds a point of each, raveled, in turn.

    Parameters
    ----------
    *factors : tuple of (LinearOracle, tuple of int)
        Each set with the shape of its points.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import L2Ball, ProductSet, Simplex
    >>> X = ProductSet((L2Ball(1.0), (2,)), (Simplex(), (3,)))
    >>> X(np.array([3.0, 4.0, 0.0, -1.0, 0.0])).round(1).tolist()
    [-0.6, -0.8, 0.0, 1.0, 0.0]
    """

    def __init__(self, *factors: tuple[LinearOracle, tuple[int, ...]]) -> None:
        if not factors:
            raise ValueError("factors must hold at least one pair of a set and a shape")
        for factor in factors:
            if not isinstance(factor, tuple) or len(factor) != 2 or not callable(factor[0]):
                raise TypeError(f"factors must be pairs of a set and a shape, got {factor!r}")
        self.sets = [oracle for oracle, _ in factors]
        self.shapes: list[tuple[int, ...]] = [
            tuple(check_integer("shape", size, at_least=1) for size in shape)
            for _, shape in factors
        ]
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        self.size = int(ends[-1])
        self._cuts = ends[:-1]

    def split(self, x: Array) -> list[Array]:
        """Return the points that the vector holds, as views of their shapes."""
        if x.shape != (self.size,):
            raise ValueError(f"x must have shape ({self.size},), got {x.shape}")
        parts = np.split(x, self._cuts)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def join(self, points: Sequence[ArrayLike]) -> Array:
        """Return the vector that holds the given points."""
        checked = [
            check_array("point", point, shape=shape, finite=False).reshape(-1)
            for point, shape in zip(points, self.shapes, strict=True)
        ]
        return np.concatenate(checked)

    def __call__(self, c: Array) -> Array:
        """Return the minimizers over the factors."""
        parts = zip(self.sets, self.split(c), self.shapes, strict=True)
        return np.concatenate(
            [as_point(oracle(part), shape).reshape(-1) for oracle, part, shape in parts]
        )

    def contains(self, x: Array, tol: float = 1e-9) -> bool:
        """Return whether each point is in its set, as far as the sets can tell."""
        return all(
            oracle.contains(part, tol)
            for oracle, part in zip(self.sets, self.split(x), strict=True)
            if hasattr(oracle, "contains")
        )


def as_point(vertex: Array | Atom, shape: tuple[int, ...]) -> Array:
    """Return what linear minimization gave as an array."""
    return vertex.dense(shape) if isinstance(vertex, Atom) else vertex


def _check_ball(ball: L1Ball | L2Ball) -> None:
    check_number("radius", ball.radius, above=0)
    if ball.axis is not None:
        check_integer("axis", ball.axis)


def _leading_pair(c: Array) -> tuple[Array, Array]:
    if min(c.shape) > DENSE_SVD:
        start = np.random.default_rng(0).standard_normal(min(c.shape))
        try:
            u, _, vt = svds(c, k=1, v0=start)
            return u[:, 0], vt[0]
        except ArpackNoConvergence:  # singular values that nearly agree
            pass
    u, _, vt = np.linalg.svd(c, full_matrices=False)
    return u[:, 0], vt[0]
