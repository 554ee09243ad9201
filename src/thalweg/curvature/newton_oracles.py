"""What a Newton method asks of f: values, gradients and Hessians, counted and checked."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import LinearOperator

from thalweg.common.checks import check_array
from thalweg.curvature.factorizations import is_sparse

Array = NDArray[np.float64]
SYMMETRY = 1e-8


class NewtonOracle:
    """f, f' and an element of the generalized Hessian of f.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``, or a pair of f and f' if ``jac`` is True.
    jac : callable or True
        ``jac(x, *args) -> (d,)``.
    hess : callable
        ``hess(x, *args) -> (d, d)``, an array, a sparse array or a ``LinearOperator``.
    args : tuple
    d : int

    Attributes
    ----------
    nfev, njev, nhev : int
        Calls.
    gradient_seconds, hessian_seconds : float
        The shortest call of each kind.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        jac: Callable[..., Any] | bool,
        hess: Callable[..., Any],
        args: tuple[Any, ...],
        d: int,
    ) -> None:
        self._fun, self._jac, self._hess, self._args, self._d = fun, jac, hess, args, d
        self.nfev = self.njev = self.nhev = 0
        self.gradient_seconds = self.hessian_seconds = np.inf
        self._last: tuple[Array, Array] | None = None

    def value(self, x: Array) -> float:
        """Return f(x)."""
        self.nfev += 1
        if self._jac is not True:
            return _number(self._fun(x.copy(), *self._args))
        begin = time.perf_counter()
        given = self._fun(x.copy(), *self._args)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(f"fun must return (value, gradient) with jac=True, got {given!r}")
        self.njev += 1
        self._last = (x, self._checked(given[1]))
        self._note_gradient(begin)
        return _number(given[0])

    def gradient(self, x: Array) -> Array:
        """Return f'(x)."""
        if self._jac is True or not callable(self._jac):
            if self._last is None or self._last[0] is not x:
                self.value(x)
            assert self._last is not None
            return self._last[1]
        self.njev += 1
        begin = time.perf_counter()
        gradient = self._checked(self._jac(x.copy(), *self._args))
        self._note_gradient(begin)
        return gradient

    def hessian(self, x: Array, iteration: int) -> Any:
        """Return a matrix or an operator.

        Raises
        ------
        TypeError, ValueError
            If it has a wrong shape, is not symmetric or not finite.
        """
        self.nhev += 1
        begin = time.perf_counter()
        H = self._hess(x.copy(), *self._args)
        self.hessian_seconds = min(self.hessian_seconds, time.perf_counter() - begin)
        if isinstance(H, LinearOperator):
            return _of_shape(H, self._d)
        if is_sparse(H):
            H = sparse.csc_array(_of_shape(H, self._d), dtype=np.float64)
            entries = H.data
        else:
            H = entries = _of_shape(np.asarray(H, dtype=np.float64), self._d)
        if not np.isfinite(entries.sum()) and not np.all(np.isfinite(entries)):
            raise ValueError(f"the Hessian must be finite, got NaN or inf at iteration {iteration}")
        if abs(H - H.T).max() > SYMMETRY * abs(H).max():
            raise ValueError(f"the Hessian must be symmetric, it is not at iteration {iteration}")
        return H

    def _checked(self, gradient: Any) -> Array:
        return check_array("the gradient", gradient, shape=(self._d,), finite=False)

    def _note_gradient(self, begin: float) -> None:
        self.gradient_seconds = min(self.gradient_seconds, time.perf_counter() - begin)


def hessian_from_products(hessp: Callable[..., Any]) -> Callable[..., LinearOperator]:
    """Return ``hess(x, *args)`` as an operator made of ``hessp(x, p, *args)``."""

    def hess(x: Array, *args: Any) -> LinearOperator:
        d = len(x)

        def product(p: Array) -> Array:
            return check_array("the product of hessp", hessp(x, p.ravel(), *args), shape=(d,))

        return LinearOperator((d, d), matvec=product, dtype=np.float64)

    return hess


def check_gradient(
    oracle: NewtonOracle, x: Array, gradient: Array, epsilon: float, tolerance: float = 1e-4
) -> None:
    """Compare the gradient with central differences along one random direction.

    An error of a kink or of curvature shrinks with the step, and one of the gradient does not.

    Raises
    ------
    ValueError
        If they differ by more than ``tolerance``, relative to the norm of the gradient.
    """
    norm = float(np.linalg.norm(gradient))
    direction = np.random.default_rng(0).standard_normal(len(x))
    direction /= np.linalg.norm(direction)
    if norm > 0:
        # Along the gradient, too: a random direction alone is nearly orthogonal to it.
        direction = np.copysign(1.0, direction @ gradient) * direction + gradient / norm
        direction /= np.linalg.norm(direction)
    slope = float(gradient @ direction)
    errors = []
    for step in (np.cbrt(epsilon), np.cbrt(epsilon) / 30):
        h = step * max(1.0, float(np.abs(x).max()))
        above, below = oracle.value(x + h * direction), oracle.value(x - h * direction)
        if not (np.isfinite(above) and np.isfinite(below)):
            return  # x is at the border of the domain
        error = abs((above - below) / (2 * h) - slope)
        rounding = 10 * epsilon * max(abs(above), abs(below)) / h
        if error <= tolerance * norm + rounding:
            return
        errors.append(error)
    if errors[1] > errors[0] / 3:
        raise ValueError(
            "jac must be the gradient of fun: along a random direction at x0 its slope is "
            f"{slope:.6g}, which differs from that of finite differences by {errors[1]:.2g}"
        )


def _number(value: Any) -> float:
    return float(np.asarray(value, dtype=np.float64).reshape(()))


def _of_shape(H: Any, d: int) -> Any:
    if H.shape != (d, d):
        raise ValueError(f"the Hessian must have shape ({d}, {d}), got {H.shape}")
    return H
