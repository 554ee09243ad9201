"""The two levels of a bilevel problem as NumPy functions with derivatives of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.bilevel_objectives import ALL, Block
from thalweg.bilevel.parameter_trees import TreeLayout
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ArrayUpper:
    """An upper objective of NumPy arrays.

    Parameters
    ----------
    fun : callable
        ``fun(x, y)``, a float.
    grad : callable
        ``grad(x, y)``: the pair ∇ₓf and ∇ᵧf.

    Raises
    ------
    TypeError
        If a field is not callable.
    """

    fun: Callable[[Array, Array], float]
    grad: Callable[[Array, Array], tuple[Array, Array]]

    def __post_init__(self) -> None:
        _check_callable(self)


@dataclass(frozen=True)
class ArrayLower:
    """A lower objective of NumPy arrays.

    Parameters
    ----------
    fun : callable
        ``fun(x, y)``, a float.
    grad : callable
        ``grad(x, y)``: ∇ᵧg.
    hvp : callable
        ``hvp(x, y, v)``: ∇²ᵧᵧg v.
    jvp_xy : callable
        ``jvp_xy(x, y, v)``: ∇²ₓᵧg v, of the shape of x.

    Raises
    ------
    TypeError
        If a field is not callable.
    """

    fun: Callable[[Array, Array], float]
    grad: Callable[[Array, Array], Array]
    hvp: Callable[[Array, Array, Array], Array]
    jvp_xy: Callable[[Array, Array, Array], Array]

    def __post_init__(self) -> None:
        _check_callable(self)


class ArrayObjectives:
    """Both levels with the interface of `BilevelObjectives`, by these functions."""

    def __init__(self, f: ArrayUpper, g: ArrayLower, x0: Any, y0: Any) -> None:
        self.f, self.g = f, g
        self._shapes = np.shape(x0), np.shape(y0)
        self.x = TreeLayout("x", torch.as_tensor(np.asarray(x0, dtype=np.float64)))
        self.y = TreeLayout("y", torch.as_tensor(np.asarray(y0, dtype=np.float64)))

    def upper(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> torch.Tensor:
        """Return f."""
        return torch.tensor(float(self.f.fun(*self._arrays(x, y))), dtype=torch.float64)

    def lower(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> torch.Tensor:
        """Return g."""
        return torch.tensor(float(self.g.fun(*self._arrays(x, y))), dtype=torch.float64)

    def upper_gradients(
        self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ∇ₓf and ∇ᵧf."""
        f_x, f_y = self.f.grad(*self._arrays(x, y))
        return _vector("f.grad", f_x, x), _vector("f.grad", f_y, y)

    def upper_both(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return f and ∇ᵧf."""
        return float(self.upper(x, y)), self.upper_gradients(x, y)[1]

    def lower_gradient(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> torch.Tensor:
        """Return ∇ᵧg."""
        return _vector("g.grad", self.g.grad(*self._arrays(x, y)), y)

    def lower_both(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return g and ∇ᵧg."""
        return float(self.lower(x, y)), self.lower_gradient(x, y)

    def hessian(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> Block:
        """Return a function of products with ∇²ᵧᵧg, of blocks of shape (m, d)."""
        point = tuple(np.copy(part) for part in self._arrays(x, y))
        shape = self._shapes[1]

        def products(V: torch.Tensor) -> torch.Tensor:
            rows = [self.g.hvp(*point, v.numpy().reshape(shape)) for v in V]  # type: ignore[call-arg]
            return torch.stack([_vector("g.hvp", row, y) for row in rows])

        return products

    def cross_product(
        self, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor, batch: Any = ALL
    ) -> torch.Tensor:
        """Return ∇²ₓᵧg v."""
        product = self.g.jvp_xy(*self._arrays(x, y), v.numpy().reshape(self._shapes[1]))
        return _vector("g.jvp_xy", product, x)

    def _arrays(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Array, Array]:
        first: Array = x.numpy().reshape(self._shapes[0])
        second: Array = y.numpy().reshape(self._shapes[1])
        return first, second


def _vector(name: str, value: Any, like: torch.Tensor) -> torch.Tensor:
    array = np.asarray(value, dtype=np.float64).reshape(-1)
    if array.shape != tuple(like.shape):
        raise ValueError(f"{name} must have {len(like)} entries, got {array.size}")
    return torch.tensor(array)


def _check_callable(objective: Any) -> None:
    for field in fields(objective):
        value = getattr(objective, field.name)
        if not callable(value):
            raise TypeError(f"{field.name} must be callable, got {type(value).__name__}")
