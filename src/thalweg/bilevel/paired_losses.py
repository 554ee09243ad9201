"""Gradients of the two losses of a bilevel optimizer, from closures that return a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from thalweg.common.optional import requires
from thalweg.common.torch_gradients import check_dense, whole

with requires("bilevel"):
    import torch
    from torch import Tensor
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.module import register_module_forward_pre_hook

REPLAY_RTOL = 1e-5  # sums on an accelerator may differ by rounding


def loss_and_gradients(
    optimizer: object, name: str, closure: Callable[..., Any], params: list[Tensor], *seed: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a closure, detached, and its gradients; zeros where it does not depend.

    Raises
    ------
    TypeError
        If it does not return a scalar tensor that depends on a parameter.
    RuntimeError
        If a gradient is sparse.
    """
    with torch.enable_grad():
        loss = closure(*seed)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            f"{name} must return a loss that depends on the parameters, a tensor with one entry "
            f"whose backward() has not been called, got {got}"
        )
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    return loss.detach(), [
        torch.zeros_like(p) if grad is None else check_dense(optimizer, grad)
        for p, grad in zip(params, grads, strict=True)
    ]


def given_gradients(
    optimizer: object, name: str, grads: Sequence[Any], params: list[Tensor]
) -> list[Tensor]:
    """Return the gradients that a user gives, in the order of the parameters.

    Raises
    ------
    TypeError, ValueError
        If they are no tensors of the parameters' shapes.
    """
    shapes = [tuple(getattr(grad, "shape", (-1,))) for grad in grads]
    wanted = [tuple(p.shape) for p in params]
    if shapes != wanted:
        raise ValueError(
            f"{name} must hold a gradient for each trainable parameter, of shapes {wanted}, got "
            f"{shapes}"
        )
    return [check_dense(optimizer, grad) for grad in grads]


def trainable(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters that require gradients, of all groups in their order."""
    return [p for group in groups for p in group["params"] if p.requires_grad]


def check_replay(name: str, closure: Callable[..., Any], loss: Tensor, seed: int) -> None:
    """Refuse a closure whose loss is another one with the same seed."""
    with torch.no_grad(), refuse_batch_norm():
        again = closure(seed)
    difference = float(abs(again.detach() - loss))
    if difference > REPLAY_RTOL * max(1.0, abs(float(loss))):
        raise ValueError(
            f"{name} must return the same loss for the same seed: variance reduction needs one "
            "mini-batch at two points"
        )


@contextmanager
def refuse_batch_norm() -> Iterator[None]:
    """Raise `ValueError` where batch normalization runs in training mode.

    It would take in statistics of the point before.
    """

    def check(module: Any, _: Any) -> None:
        if isinstance(module, _BatchNorm) and module.training:
            raise ValueError(
                "variant='vr-pr' evaluates batches at the point before, whose statistics must not "
                "enter batch normalization: set it to eval()"
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def swapped(params: list[Tensor], others: list[Tensor]) -> Iterator[None]:
    """Exchange the values of two lists of tensors, one after the other, for a while."""
    _swap(params, others)
    try:
        yield
    finally:
        _swap(params, others)


@torch.no_grad()
def _swap(params: list[Tensor], others: list[Tensor]) -> None:
    for p, other in zip(params, others, strict=True):
        held = p.detach().clone()
        p.copy_(other)
        other.copy_(held)


def inner_products(*pairs: tuple[list[Tensor], list[Tensor]]) -> list[float]:
    """Return ⟨a, b⟩ of each pair of lists, summed in float64 over tensors: one wait in all."""
    if not pairs[0][0]:
        return [0.0] * len(pairs)
    device = pairs[0][0][0].device
    # All products of a tensor follow each other, so that it stays in the cache.
    rows = [
        torch.stack([_dot(a[i], b[i]).to(device, torch.float64) for a, b in pairs])
        for i in range(len(pairs[0][0]))
    ]
    return torch.stack(rows).sum(dim=0).tolist()


def launches(*lists: list[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists into what one ``torch._foreach_*`` call should take.

    On a CPU that is one tensor, which stays in the cache from one call to the next.
    """
    if not lists[0]:
        return []
    if lists[0][0].device.type != "cpu":
        return [lists]
    return [tuple([tensor] for tensor in row) for row in zip(*lists, strict=True)]


def squared_distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Return ‖a - b‖²."""
    gap = torch._foreach_sub(a, b)
    return inner_products((list(gap), list(gap)))[0]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    if hasattr(a, "full_tensor"):  # sharded over processes
        return whole((a * b).sum(dtype=torch.promote_types(a.dtype, torch.float32)))
    wide = torch.promote_types(a.dtype, torch.float32)
    return torch.dot(a.reshape(-1).to(wide), b.reshape(-1).to(wide))
