"""Which gradients the optimizers of the family take: dense, real and finite ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

from thalweg.common.checks import check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.common.torch_gradients import NonFiniteGradientError as NonFiniteGradientError
from thalweg.common.torch_gradients import SkipsNonFinite, check_dense, count_nonfinite, whole
from thalweg.training.tensor_lists import by_device_and_dtype, squared_norm


def check_lr(lr: Any) -> float | Tensor:
    """Return a step size: a number ≥ 0, or a tensor with one, as a compiled step wants it.

    Raises
    ------
    TypeError, ValueError
        If it is neither.
    """
    if not isinstance(lr, Tensor):
        return check_number("lr", lr, at_least=0)
    if lr.numel() != 1:
        raise ValueError(f"lr must hold one number, got a tensor of shape {tuple(lr.shape)}")
    check_number("lr", float(lr), at_least=0)
    return lr


def check_real(optimizer: torch.optim.Optimizer) -> None:
    """Refuse the param group that was added last, and take it away, if it is complex.

    Raises
    ------
    TypeError
        If one of its parameters is complex.
    """
    if any(p.is_complex() for p in optimizer.param_groups[-1]["params"]):
        optimizer.param_groups.pop()
        raise TypeError("params must be real, got a complex parameter")


def rows_of(optimizer: Any, n_lists: int) -> list[tuple[Any, ...]]:
    """Return every param group with the lists that its ``_init_group`` has filled."""
    rows = []
    for group in optimizer.param_groups:
        row = (group, *[[] for _ in range(n_lists)])
        optimizer._init_group(*row)
        rows.append(row)
    return rows


def with_gradients(
    optimizer: object, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]
) -> list[Tensor]:
    """Append the group's parameters that have a gradient, and the gradients; return the former.

    Raises
    ------
    RuntimeError
        If a gradient is sparse.
    """
    held = [p for p in group["params"] if p.grad is not None]
    params.extend(held)
    grads.extend(check_dense(optimizer, p.grad) for p in held)
    return held


def buffer(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> Tensor:
    """Return a tensor of the optimizer's state, like its parameter; a new one is zero."""
    state = optimizer.state[p]
    if name not in state:
        state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return cast(Tensor, state[name])


def all_finite(grads: list[Tensor]) -> bool:
    """Return whether no entry is NaN or infinite: one pass, and one wait per device."""
    return math.isfinite(magnitude(grads))


def magnitude(grads: list[Tensor]) -> float:
    """Return 0 if all entries are 0, NaN or infinity if one is not finite, else anything else."""
    total = 0.0
    for (alike,) in by_device_and_dtype(grads):
        # On a CPU the plain sum is the cheapest pass over a tensor.
        on_cpu = alike[0].device.type == "cpu"
        sums = [grad.sum() for grad in alike] if on_cpu else torch._foreach_norm(alike)
        total += float(torch.stack([whole(part) for part in sums]).sum())
    if not math.isfinite(total):
        return squared_norm(grads)  # a sum of finite entries can overflow
    return total if total != 0 else float(any(bool(grad.any()) for grad in grads))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def accept(optimizer: SkipsNonFinite, grads: list[Tensor]) -> bool:
    """Return whether the gradients are finite; count those that are not.

    Raises
    ------
    NonFiniteGradientError
        At the tenth in a row that is not finite.
    """
    return count_nonfinite(optimizer, finite=all_finite(grads))


def accept_rows(optimizer: SkipsNonFinite, rows: Sequence[Sequence[Any]]) -> bool:
    """Return whether the gradients of all groups that want to be checked are finite.

    ``rows`` begin with a param group, its parameters and their gradients.
    """
    checked = [grad for group, _, grads, *_ in rows if group["check_finite"] for grad in grads]
    return not checked or accept(optimizer, checked)
