"""Derivatives of functions of tensors, by torch.func, as SciPy's minimizers call for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

Array = NDArray[np.float64]


class TorchFunction:
    """A scalar function of a tensor, with its gradient, Hessian and Hessian-vector product.

    For `minimize_lazy_ssn` as for any method of `scipy.optimize.minimize`:
    ``minimize(f, x0, jac=f.jac, hess=f.hess, method="trust-ncg")``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)``: a vector (d,) to a scalar tensor. Where it has kinks, the derivatives are
        those that automatic differentiation takes, elements of the generalized ones.
    like : Tensor, optional
        Gives dtype and device of x; by default float64 on the CPU.
    chunk_size : int ≥ 1, default 64
        Columns of the Hessian that are computed at a time.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; from a call, if the result is not a scalar tensor.

    Notes
    -----
    The Hessian takes d backward passes through the gradient, ``chunk_size`` at a time, and all
    intermediate results of as many gradients in memory.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.curvature import TorchFunction
    >>> f = TorchFunction(lambda x: (x.clamp(min=0) ** 2).sum() / 2)
    >>> x = np.array([2.0, -1.0])
    >>> f(x), f.jac(x).tolist(), f.hess(x).tolist()
    (2.0, [2.0, 0.0], [[1.0, 0.0], [0.0, 0.0]])
    """

    def __init__(self, fun: Callable[..., Any], like: Any = None, *, chunk_size: int = 64) -> None:
        with requires("curvature"):
            import torch

        if not callable(fun):
            raise TypeError(f"fun must be callable, got {type(fun).__name__}")
        self.fun = fun
        self.chunk_size = check_integer("chunk_size", chunk_size, at_least=1)
        self._like = torch.empty(0, dtype=torch.float64) if like is None else like.detach()
        if not self._like.is_floating_point():
            raise TypeError(f"like must be a tensor of floats, got {self._like.dtype}")

    @property
    def epsilon(self) -> float:
        """The machine epsilon of the dtype that the function is computed in."""
        import torch

        return float(torch.finfo(self._like.dtype).eps)

    def __call__(self, x: Array, *args: Any) -> float:
        """Return f(x)."""
        import torch

        with torch.no_grad():
            return float(self._scalar(self._tensor(x), *args))

    def value_and_gradient(self, x: Array, *args: Any) -> tuple[float, Array]:
        """Return f(x) and its gradient."""
        import torch

        gradient, value = torch.func.grad_and_value(self._scalar)(self._tensor(x), *args)
        return float(value), _array(gradient)

    def jac(self, x: Array, *args: Any) -> Array:
        """Return the gradient, of shape (d,)."""
        return self.value_and_gradient(x, *args)[1]

    def hess(self, x: Array, *args: Any) -> Array:
        """Return the Hessian, of shape (d, d)."""
        import torch

        point = self._tensor(x)
        identity = torch.eye(len(point), dtype=point.dtype, device=point.device)
        products = torch.func.vmap(self._products(point, args), chunk_size=self.chunk_size)
        H = _array(products(identity))
        symmetric: Array = (H + H.T) / 2
        return symmetric

    def hessp(self, x: Array, p: Array, *args: Any) -> Array:
        """Return the product of the Hessian and p, of shape (d,)."""
        return _array(self._products(self._tensor(x), args)(self._tensor(p)))

    def _products(self, point: Any, args: tuple[Any, ...]) -> Callable[[Any], Any]:
        """Return v ↦ Hv."""
        import torch

        gradient = lambda x: torch.func.grad(self._scalar)(x, *args)  # noqa: E731
        # Reverse over reverse: many losses with kinks have no forward-mode second derivative.
        pull = torch.func.vjp(gradient, point)[1]
        return lambda v: pull(v)[0]

    def _tensor(self, x: Array) -> Any:
        import torch

        return torch.as_tensor(x, dtype=self._like.dtype, device=self._like.device)

    def _scalar(self, x: Any, *args: Any) -> Any:
        import torch

        value = self.fun(x, *args)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise TypeError("fun must return a scalar tensor")
        return value.reshape(())


def _array(tensor: Any) -> Array:
    array: Array = tensor.detach().double().cpu().numpy()
    return array
