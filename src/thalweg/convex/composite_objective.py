"""The smooth or nonsmooth part of a composite objective: its values and gradients, counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_array
from thalweg.common.minimizers import check_gradient_function, rng_keyword
from thalweg.convex.torch_functions import torch_value_and_gradient

Array = NDArray[np.float64]


class CompositeObjective:
    """f(x) and a (sub)gradient of it.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``, or ``(float, gradient)`` with ``jac=True``, or a scalar tensor
        of a tensor with ``jac="torch"``.
    jac : callable, True or "torch"
    args : tuple
    shape : tuple of int
        Of x.
    like : Tensor or None
        With ``jac="torch"``: gives the dtype and the device of what ``fun`` gets.
    rng : numpy.random.Generator or None
        Given to noisy functions that have a parameter ``rng``. None: they are not noisy, and the
        last value and gradient are kept.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        jac: Any,
        args: tuple[Any, ...],
        shape: tuple[int, ...],
        like: Any = None,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"fun must be callable, got {type(fun).__name__}")
        self._args, self._shape, self._noisy = args, shape, rng is not None
        self.nfev = self.njev = 0
        self._last: tuple[Array, float, Array] | None = None
        self._fun: Callable[..., Any]
        self._jac: Callable[..., Any] | None = None
        if isinstance(jac, str) and jac == "torch":
            self._fun = torch_value_and_gradient(fun, like)
        elif jac is True or callable(jac):
            self._fun = fun
            if jac is not True:
                # SciPy's cache would return one noisy gradient for every query at a point.
                self._jac = jac if rng is None else check_gradient_function(jac)
        else:
            raise ValueError(f'jac must be a callable, True or "torch", got {jac!r}')
        self._fun_noise = rng_keyword(self._fun, rng)
        self._jac_noise = {} if self._jac is None else rng_keyword(self._jac, rng)

    def gradient(self, x: Array) -> Array:
        """Return ∇f(x), or a subgradient."""
        if self._jac is None:
            return self._both(x)[1]
        self.njev += 1
        return self._checked(self._jac(x.copy(), *self._args, **self._jac_noise))

    def value(self, x: Array) -> float:
        """Return f(x)."""
        if self._jac is None:
            return self._both(x)[0]
        self.nfev += 1
        return float(self._fun(x.copy(), *self._args, **self._fun_noise))

    def _both(self, x: Array) -> tuple[float, Array]:
        if self._last is not None and self._last[0] is x:
            return self._last[1:]
        self.nfev += 1
        self.njev += 1
        given = self._fun(x.copy(), *self._args, **self._fun_noise)
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(
                "fun must return (value, gradient) with jac=True, got "
                f"{type(given).__name__}; else give jac"
            )
        value, gradient = float(given[0]), self._checked(given[1])
        if not self._noisy:
            self._last = (x, value, gradient)
        return value, gradient

    def _checked(self, gradient: Any) -> Array:
        return check_array("the gradient", gradient, shape=self._shape, finite=False)
