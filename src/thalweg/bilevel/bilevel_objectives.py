"""The two levels of a bilevel problem as torch functions of parameter trees, by derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thalweg.bilevel.parameter_trees import TreeLayout
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Block = Callable[[torch.Tensor], torch.Tensor]
ALL = object()  # stands for a call without a batch


class BilevelObjectives:
    """The upper objective f and the lower one g, over vectors that stand for their trees.

    Parameters
    ----------
    f, g : callable
        ``f(x, y, batch)`` and ``g(x, y, batch)``: scalar tensors, differentiable (g twice in y);
        ``f(x, y)`` and ``g(x, y)`` where there are no batches.
    x0, y0 : Tensor, or dicts, lists and tuples of them
        Trees that give the layouts.

    Raises
    ------
    TypeError, ValueError
        If f or g is not callable, or a tree is not one of finite floating-point tensors; from
        calls, if a value is not a finite scalar.
    """

    def __init__(
        self, f: Callable[..., torch.Tensor], g: Callable[..., torch.Tensor], x0: Any, y0: Any
    ) -> None:
        for name, function in (("f", f), ("g", g)):
            if not callable(function):
                raise TypeError(f"{name} must be callable, got {type(function).__name__}")
        self.f, self.g = f, g
        self.x, self.y = TreeLayout("x", x0), TreeLayout("y", y0)

    def upper(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> torch.Tensor:
        """Return f, with its graph."""
        return self._value("f", self.f, x, y, batch)

    def lower(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> torch.Tensor:
        """Return g, with its graph."""
        return self._value("g", self.g, x, y, batch)

    def upper_gradients(
        self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ∇ₓf and ∇ᵧf."""
        x, y = _leaf(x), _leaf(y)
        with torch.enable_grad():
            return _gradients(self.upper(x, y, batch), (x, y))  # type: ignore[return-value]

    def upper_both(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return f and ∇ᵧf, of all data, from one evaluation."""
        y = _leaf(y)
        with torch.enable_grad():
            value = self.upper(x.detach(), y)
            return float(value.detach()), _gradients(value, (y,))[0]

    def lower_gradient(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> torch.Tensor:
        """Return ∇ᵧg."""
        y = _leaf(y)
        with torch.enable_grad():
            return _gradients(self.lower(x.detach(), y, batch), (y,))[0]

    def lower_both(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Return g and ∇ᵧg, of all data, from one evaluation."""
        y = _leaf(y)
        with torch.enable_grad():
            value = self.lower(x.detach(), y)
            return float(value.detach()), _gradients(value, (y,))[0]

    def hessian(self, x: torch.Tensor, y: torch.Tensor, batch: Any = ALL) -> Block:
        """Return a function of products with ∇²ᵧᵧg, of blocks of shape (m, d).

        The gradient is evaluated once, here; every call costs m backward passes through it. The
        point is copied: products stay those of it when a run moves on.
        """
        x, y = x.detach().clone(), y.detach().clone().requires_grad_()
        with torch.enable_grad():
            value = self.lower(x, y, batch)
            (slope,) = _gradients(value, (y,), create_graph=True)

        def products(V: torch.Tensor) -> torch.Tensor:
            if not slope.requires_grad:  # g is linear in y
                return torch.zeros_like(V)
            if len(V) == 1:  # without the overhead of vmap
                return _gradients(slope, (y,), V[0], retain_graph=True)[0][None]
            return torch.autograd.grad(
                slope, y, V, retain_graph=True, is_grads_batched=True, materialize_grads=True
            )[0]

        return products

    def cross_product(
        self, x: torch.Tensor, y: torch.Tensor, v: torch.Tensor, batch: Any = ALL
    ) -> torch.Tensor:
        """Return ∇²ₓᵧg v, of the shape of x."""
        x, y = _leaf(x), _leaf(y)
        with torch.enable_grad():
            (slope,) = _gradients(self.lower(x, y, batch), (y,), create_graph=True)
            if not slope.requires_grad:
                return torch.zeros_like(x)
            return _gradients(slope, (x,), v)[0]

    def _value(
        self,
        name: str,
        function: Callable[..., torch.Tensor],
        x: torch.Tensor,
        y: torch.Tensor,
        batch: Any,
    ) -> torch.Tensor:
        trees = self.x.tree(x), self.y.tree(y)
        value = function(*trees) if batch is ALL else function(*trees, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise TypeError(f"{name} must return a scalar tensor, got {got}")
        return value.reshape(())


def _leaf(vector: torch.Tensor) -> torch.Tensor:
    return vector.detach().requires_grad_()


def _gradients(
    output: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    v: torch.Tensor | None = None,
    *,
    create_graph: bool = False,
    retain_graph: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Return derivatives; zeros where the output does not depend on an input."""
    if not output.requires_grad:
        return tuple(torch.zeros_like(one) for one in inputs)
    return torch.autograd.grad(
        output,
        inputs,
        v,
        create_graph=create_graph,
        retain_graph=retain_graph or create_graph,
        materialize_grads=True,
    )
