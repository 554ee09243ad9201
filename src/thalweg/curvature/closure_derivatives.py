"""Value, gradient and second derivatives of the loss that an optimizer's closure computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor
    from torch.overrides import TorchFunctionMode


class LossRecorder(TorchFunctionMode):
    """Notes which losses ``backward`` is called on, and keeps their graphs.

    A closure in the form that `torch.optim.LBFGS` wants, too, can so be differentiated twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def __torch_function__(  # type: ignore[no-untyped-def]
        self,
        func,
        types,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function; a backward pass with its graph retained."""
        given = dict(kwargs or {})
        if func is torch.Tensor.backward:
            self.losses.append(args[0])
            given["retain_graph"] = True
        return func(*args, **given)


class Evaluation(NamedTuple):
    """The loss, a 0-dim tensor with its graph, and the flat gradient (d,)."""

    loss: Tensor
    gradient: Tensor

    @property
    def value(self) -> float:
        """The loss as a number."""
        return float(self.loss.detach())


def evaluate(closure: Callable[[], Any], params: list[Tensor], dtype: torch.dtype) -> Evaluation:
    """Call the closure; the loss is what it calls ``backward`` on, else what it returns.

    Raises
    ------
    TypeError
        If it neither calls ``backward`` nor returns a scalar that can be differentiated.
    """
    for p in params:
        p.grad = None
    with torch.enable_grad():
        with LossRecorder() as recorder:
            returned = closure()
        if recorder.losses:
            loss = torch.stack([each.reshape(()) for each in recorder.losses]).sum()
            # A parameter that the loss does not depend on has no gradient.
            grads: Sequence[Tensor] = [
                torch.zeros_like(p) if p.grad is None else p.grad for p in params
            ]
        else:
            loss = _differentiable(returned)
            grads = _grad(loss, params, retain_graph=True)
    return Evaluation(loss, flat([g.detach() for g in grads], dtype))


def _differentiable(returned: Any) -> Tensor:
    if isinstance(returned, Tensor) and returned.numel() == 1 and returned.requires_grad:
        return returned.reshape(())
    raise TypeError(
        "closure must return the loss, a scalar tensor that requires grad, or call its "
        f"backward(), got {type(returned).__name__}"
    )


def flat(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the entries of all tensors as one vector."""
    return torch.cat([t.reshape(-1).to(dtype) for t in tensors])


def hessian(loss: Tensor, params: list[Tensor], dtype: torch.dtype, chunk_size: int) -> Tensor:
    """Return the Hessian of a loss with a graph, ``chunk_size`` rows at a time; (d, d)."""
    products = hessian_products(loss, params, dtype)
    d = sum(p.numel() for p in params)
    H = torch.empty(d, d, dtype=dtype, device=params[0].device)
    for first in range(0, d, chunk_size):
        rows = H[first : first + chunk_size]
        rows.copy_(torch.eye(len(rows), d, dtype=dtype, device=H.device).roll(first, dims=1))
        rows.copy_(products(rows))
    return (H + H.T) / 2


def hessian_products(
    loss: Tensor, params: list[Tensor], dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return V ↦ VH for rows V of shape (k, d), at the point where the loss was computed."""
    with torch.enable_grad():
        gradient = flat(_grad(loss, params, create_graph=True), dtype)

    def products(V: Tensor) -> Tensor:
        if not gradient.requires_grad:  # the loss is linear
            return torch.zeros_like(V)
        parts = torch.autograd.grad(
            gradient, params, V, is_grads_batched=True, retain_graph=True, allow_unused=True
        )
        columns = [
            V.new_zeros(len(V), p.numel()) if part is None else part.reshape(len(V), -1).to(dtype)
            for p, part in zip(params, parts, strict=True)
        ]
        return torch.cat(columns, dim=1)

    return products


def _grad(of: Tensor, params: list[Tensor], **how: Any) -> Sequence[Tensor]:
    return torch.autograd.grad(of, params, allow_unused=True, materialize_grads=True, **how)
