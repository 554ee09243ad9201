"""Gradients of torch losses of many agents, vectorized over agents and points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thalweg.bilevel.agent_gradients import Pairs, Points, Rows
from thalweg.bilevel.parameter_trees import TreeLayout
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    from torch.utils import _pytree as pytree

Loss = Callable[..., torch.Tensor]
Derivative = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class LossGradients:
    """Gradients of one torch loss per agent.

    Parameters
    ----------
    f, g : sequence of n callables
        ``f[i](x, y, batch)``: a scalar tensor. If all are one function, agents are vectorized by
        `torch.func.vmap`.
    x0, y0 : Tensor, or dicts, lists and tuples of them
        Trees that give the layouts of x and y.
    n : int
    """

    has_hvp = True

    def __init__(self, f: Sequence[Loss], g: Sequence[Loss], x0: Any, y0: Any, n: int) -> None:
        for name, losses in (("f", f), ("g", g)):
            if len(losses) != n:
                raise ValueError(
                    f"{name} must hold a loss for each of {n} agents, got {len(losses)}"
                )
            if not all(callable(loss) for loss in losses):
                raise TypeError(f"{name} must hold callables")
        self._x, self._y = TreeLayout("x0", x0), TreeLayout("y0", y0)
        self.x0, self.y0 = self._x.vector(x0).detach(), self._y.vector(y0).detach()
        if (self.x0.dtype, self.x0.device) != (self.y0.dtype, self.y0.device):
            raise ValueError(
                f"x0 and y0 must have one dtype and device, got {self.x0.dtype} on "
                f"{self.x0.device} and {self.y0.dtype} on {self.y0.device}"
            )
        self._upper = _of_each(f, lambda loss: self._gradient("f", loss))
        self._lower = _of_each(g, lambda loss: self._gradient("g", loss))
        self._second_order = _of_each(g, self._products)

    def f(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓf, ∇ᵧf) at each point."""
        return _at_all_points(self._upper, points, batch)

    def g(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓg, ∇ᵧg) at each point."""
        return _at_all_points(self._lower, points, batch)

    def hvp(self, points: Points, batch: Any) -> Pairs:
        """Return (∇²ₓᵧg V, ∇²ᵧᵧg V) at each point."""
        return _at_all_points(self._second_order, points, batch)

    def x_tree(self, vector: torch.Tensor) -> Any:
        """Return a vector of x in the layout of x0."""
        return self._x.tree(vector)

    def y_tree(self, vector: torch.Tensor) -> Any:
        """Return a vector of y in the layout of y0."""
        return self._y.tree(vector)

    def _gradient(self, name: str, loss: Loss) -> Derivative:
        def value(x: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
            result = loss(self._x.tree(x), self._y.tree(y), batch)
            if not isinstance(result, torch.Tensor) or result.ndim > 0:
                got = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result)
                raise TypeError(f"{name} must return a scalar tensor, got {got}")
            return result

        return torch.func.grad(value, argnums=(0, 1))

    def _products(self, loss: Loss) -> Derivative:
        gradient = self._gradient("g", loss)

        def slope(x: torch.Tensor, y: torch.Tensor, v: torch.Tensor, batch: Any) -> torch.Tensor:
            return gradient(x, y, batch)[1].dot(v)

        return torch.func.grad(slope, argnums=(0, 1))


def _of_each(losses: Sequence[Loss], derive: Callable[[Loss], Derivative]) -> list[Derivative]:
    """Return the derivatives of the losses, the same one for the same loss."""
    derived = {id(loss): derive(loss) for loss in losses}
    return [derived[id(loss)] for loss in losses]


def _at_all_points(derivatives: Sequence[Derivative], points: Points, batch: Any) -> Pairs:
    """Return the derivatives of every agent at every point, in one vectorized call if possible."""
    n = len(derivatives)
    stacks = [torch.stack(rows) for rows in zip(*points, strict=True)]
    first = derivatives[0]
    with torch.no_grad():  # losses may hold parameters of their own, whose graphs nobody needs
        if isinstance(batch, list) or any(other is not first for other in derivatives):
            each = [
                _over_points(
                    derivatives[i], [rows[:, i] for rows in stacks], _of_agent(batch, i, n)
                )
                for i in range(n)
            ]
            pair = tuple(torch.stack(parts, dim=1) for parts in zip(*each, strict=True))
        else:
            over_agents = torch.func.vmap(first)
            axes = (0,) * len(stacks)
            pair = torch.func.vmap(over_agents, in_dims=(*axes, None))(*stacks, batch)
    return list(zip(*(part.unbind(0) for part in pair), strict=True))


def _over_points(derivative: Derivative, stacks: Sequence[Rows], batch: Any) -> Any:
    axes = (0,) * len(stacks)
    return torch.func.vmap(derivative, in_dims=(*axes, None))(*stacks, batch)


def _of_agent(batch: Any, i: int, n: int) -> Any:
    """Return the batch of agent i: of a list the i-th, of tensors the i-th rows."""
    if isinstance(batch, list):
        if len(batch) != n:
            raise ValueError(f"sampler must return {n} batches in a list, got {len(batch)}")
        return batch[i]
    return pytree.tree_map(lambda rows: rows[i], batch)
