"""Three-term recurrences that compute matrix polynomials, and the classical ones among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray
from scipy.linalg.blas import get_blas_funcs
from scipy.sparse.linalg import LinearOperator

from thalweg.curvature.native_products import as_matmul, check_block

Values = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RecurrenceCoefficients:
    r"""A polynomial as a three-term recurrence.

    .. math::

        p_0 = 1, \quad p_{j+1} = (a_j x + b_j) p_j - c_j p_{j-1}, \quad P = \sum_j w_j p_j.

    Attributes
    ----------
    rows : ndarray of shape (degree + 1, 4)
        :math:`(a_j, b_j, c_j, w_j)` of each j; the last row's a, b and c are not used.

    Examples
    --------
    >>> square = RecurrenceCoefficients([[1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0, 0, 0, 1]])
    >>> square(np.array([2.0, 3.0]))
    array([4., 9.])
    """

    rows: Values

    def __post_init__(self) -> None:
        rows = np.asarray(self.rows, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[1] != 4 or rows.shape[0] == 0:
            raise ValueError(f"rows must have shape (degree + 1, 4), got {rows.shape}")
        if not np.isfinite(rows).all():
            raise ValueError("rows must be finite")
        object.__setattr__(self, "rows", rows)

    @property
    def degree(self) -> int:
        """Degree of the polynomial, which is the number of products with the operator."""
        return len(self.rows) - 1

    def __call__(self, x: Values) -> Values:
        """Return the polynomial at ``x``, of shape (n,)."""
        return evaluate(self.rows, np.asarray(x, dtype=np.float64))

    def scaled(self, factor: float) -> RecurrenceCoefficients:
        """Return the recurrence of ``factor`` times the polynomial."""
        return RecurrenceCoefficients(self.rows * [1.0, 1.0, 1.0, factor])

    def stretched(self, length: float) -> RecurrenceCoefficients:
        """Return the recurrence of ``x -> P(x / length)``."""
        return RecurrenceCoefficients(self.rows * [1 / length, 1.0, 1.0, 1.0])

    def apply_to(self, A: Any, B: Any) -> Any:
        """Return P(A) B, by ``degree`` products.

        Parameters
        ----------
        A : sparse matrix, ndarray, LinearOperator or Tensor of shape (n, n)
        B : ndarray or Tensor of shape (n,) or (n, r)
            Of the kind of A; columns are treated at once.

        Returns
        -------
        ndarray or Tensor
            Of B's shape and of the precision of A.

        Raises
        ------
        TypeError, ValueError
            If A is of no such kind or not square, or B of another kind or shape, or not finite.
        """
        _, matmul, to_native = as_matmul(A)
        check_block(A, B)
        return apply_recurrence(self.rows, matmul, to_native(B))

    def operator(self, A: Any) -> LinearOperator:
        """Return P(A) as a SciPy operator, for a symmetric (Hermitian) A of SciPy's or NumPy's.

        Raises
        ------
        TypeError, ValueError
            If A is of another kind (for tensors there is `apply_to`), or not square.
        """
        size, matmul, to_native = as_matmul(A)
        dtype = to_native(np.zeros(1)).dtype
        if not isinstance(dtype, np.dtype):
            raise TypeError("A must be an array or operator of SciPy, got a tensor: use apply_to")

        def product(block: NDArray[Any]) -> NDArray[Any]:
            return np.asarray(apply_recurrence(self.rows, matmul, to_native(block)))

        return LinearOperator(
            (size, size),
            matvec=product,
            rmatvec=product,
            matmat=product,
            rmatmat=product,
            dtype=dtype,
        )

    def growth(self, x: Values) -> float:
        """Return the largest ``|w_j p_j(x)|``, relative to the largest ``|P(x)|``.

        Rounding errors of the sum are of this size times the unit roundoff.
        """
        terms = np.abs(self.rows[:, 3, None] * basis(self.rows, np.asarray(x, dtype=np.float64)))
        return float(terms.max() / np.abs(self(x)).max())


def evaluate(rows: T, x: T) -> T:
    """Return the polynomials of ``rows`` (..., degree + 1, 4) at ``x`` (..., n): arrays or tensors.

    The last axis of ``x`` runs over points; the others are batches.
    """
    a, b, c, w = (rows[..., i, None] for i in range(4))  # type: ignore[index]
    previous, current = 0 * x, 0 * x + 1  # type: ignore[operator]
    total = w[..., 0, :] * current
    for j in range(a.shape[-2] - 1):
        following = (a[..., j, :] * x + b[..., j, :]) * current - c[..., j, :] * previous
        previous, current = current, following
        total = total + w[..., j + 1, :] * current
    return total  # type: ignore[no-any-return]


def basis(rows: Values, x: Values) -> Values:
    """Return :math:`p_0, ..., p_k` of one recurrence at ``x``, of shape (k + 1, n)."""
    values = [np.ones_like(x)]
    previous = np.zeros_like(x)
    for a, b, c, _ in rows[:-1]:
        values.append((a * x + b) * values[-1] - c * previous)
        previous = values[-2]
    return np.array(values)


def apply_recurrence(rows: Values, matmul: Any, block: Any) -> Any:
    """Return P(A) B for the operator behind ``matmul``, with ``degree`` products.

    Three blocks beside the result are held at a time. Arrays are combined in place by BLAS, since
    passes over the vectors cost as much as a product with a sparse matrix.
    """
    scale, add = _kernels(block)
    # Python's floats leave the precision of float32 blocks alone.
    steps = rows.tolist()
    total = scale(block, steps[0][3])
    previous, current = None, block
    for (a, b, c, _), (_, _, _, weight) in pairwise(steps):
        following = add(scale(matmul(current), a), current, b)
        if previous is not None and c != 0:
            following = add(following, previous, -c)
        previous, current = current, following
        total = add(total, current, weight)
    return total


def _kernels(block: Any) -> tuple[Callable[[Any, float], Any], Callable[[Any, Any, float], Any]]:
    """Return ``factor y`` as a copy and ``y + factor x`` in place of y, for arrays or tensors."""
    if not isinstance(block, np.ndarray):
        return (lambda y, factor: y * factor), (lambda y, x, factor: y.add_(x, alpha=factor))
    axpy = get_blas_funcs("axpy", (block,))

    def add(y: Any, x: Any, factor: float) -> Any:
        # `y` is contiguous, a product of `scale`: reshaping makes a view, which axpy overwrites.
        axpy(x.reshape(-1), y.reshape(-1), a=factor)
        return y

    return (lambda y, factor: np.multiply(y, factor, order="C", dtype=block.dtype)), add


def chebyshev_rows(degree: int) -> Values:
    r"""Return the recurrence of :math:`T_j(1 - 2x)`, with the weight of :math:`p_0` alone."""
    return shifted_chebyshev(0.0, 1.0, np.eye(1, degree + 1)[0], descending=True)


def shifted_chebyshev(
    low: float, high: float, coefficients: Values, *, descending: bool = False
) -> Values:
    r"""Return the recurrence of :math:`\sum_j w_j T_j(t)`, with ``[low, high]`` mapped to [-1, 1].

    With ``descending``, t runs from 1 to -1 instead.
    """
    sign = -1.0 if descending else 1.0
    a, b = sign * 2 / (high - low), -sign * (high + low) / (high - low)
    rows = np.empty((len(coefficients), 4))
    rows[:] = [2 * a, 2 * b, 1.0, 0.0]
    rows[0, :3] = a, b, 0.0
    rows[:, 3] = coefficients
    return rows


def chebyshev_interpolant(function: Any, degree: int, low: float, high: float = 1.0) -> Values:
    """Return the recurrence that interpolates a function in the Chebyshev points of an interval."""
    half, middle = (high - low) / 2, (high + low) / 2
    coefficients = chebyshev.chebinterpolate(lambda t: function(middle + half * t), degree)
    return shifted_chebyshev(low, high, coefficients)


def chebyshev_inverse(degree: int, low: float, high: float = 1.0) -> Values:
    r"""Return the P of this degree whose :math:`x P(x)` is closest to 1 on the interval.

    The residual polynomial of the Chebyshev iteration, :math:`1 - x P(x) = T_{k+1}(t(x)) /
    T_{k+1}(t(0))`, vanishes in Chebyshev's points, where P therefore interpolates 1 / x.
    """
    return chebyshev_interpolant(np.reciprocal, degree, low, high)


def chebyshev_filter(degree: int, low: float, high: float = 1.0) -> Values:
    """Return the T of this degree that damps ``[low, high]`` and grows fastest below ``low``."""
    return shifted_chebyshev(low, high, np.eye(1, degree + 1, degree)[0])
