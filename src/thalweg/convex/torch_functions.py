"""Functions of tensors as functions of NumPy arrays, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.minimizers import rng_keyword
from thalweg.common.optional import requires

Array = NDArray[np.float64]


def torch_value_and_gradient(
    fun: Callable[..., Any], like: Any = None
) -> Callable[..., tuple[float, Array]]:
    """Return the value and the gradient, as NumPy has them, of a function of a tensor.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)``, a scalar tensor.
    like : Tensor, optional
        Gives the dtype and the device of x; by default float64 on the CPU.
    """
    with requires("convex"):
        import torch

    like = torch.empty(0, dtype=torch.float64) if like is None else like

    def value_and_gradient(x: Array, *args: Any, rng: Any = None) -> tuple[float, Array]:
        point = torch.tensor(x, dtype=like.dtype, device=like.device, requires_grad=True)
        with torch.enable_grad():
            value = fun(point, *args, **rng_keyword(fun, rng))
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise TypeError('fun must return a scalar tensor with jac="torch"')
        return float(value.detach()), _gradient(value, point)

    return value_and_gradient


class TorchBatch:
    """A batch function of ``fun(X, *args)``, tensors (Q, d) to (Q,), by automatic differentiation.

    Examples
    --------
    >>> batch = TorchBatch(lambda X: X.abs().sum(dim=1))
    >>> values, gradients = batch(np.array([[1.0, -2.0], [3.0, 0.5]]))
    >>> values.tolist(), gradients.tolist()
    ([3.0, 3.5], [[1.0, -1.0], [1.0, 1.0]])
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...] = ()) -> None:
        self.fun, self.args = fun, args

    def __call__(self, X: Array) -> tuple[Array, Array]:
        """Return values (Q,) and subgradients (Q, d)."""
        with requires("convex"):
            import torch
        points = torch.tensor(X, dtype=torch.float64, requires_grad=True)
        with torch.enable_grad():
            values = self.fun(points, *self.args)
        if not isinstance(values, torch.Tensor) or values.shape != points.shape[:1]:
            given = tuple(values.shape) if isinstance(values, torch.Tensor) else values
            raise TypeError(
                'fun must return a tensor of shape (Q,) for points (Q, d) with jac="torch", '
                f"got {given!r}"
            )
        return values.detach().cpu().numpy(), _gradient(values, points)


def _gradient(values: Any, points: Any) -> Array:
    """Return the gradient of the sum of the values; 0 if they do not depend on the points."""
    import torch

    if values.requires_grad:
        (gradient,) = torch.autograd.grad(values.sum(), points, allow_unused=True)
        if gradient is not None:
            array: Array = gradient.double().cpu().numpy()
            return array
    return np.zeros(tuple(points.shape))
