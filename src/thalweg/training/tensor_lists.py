"""Operations on lists of tensors, which may differ in device and dtype."""

from __future__ import annotations

import math

from thalweg.common.optional import requires
from thalweg.common.torch_gradients import whole

with requires("training"):
    import torch
    from torch import Tensor

# PyTorch's CPU kernel adds the squares of a float32 tensor one after the other: the relative error
# is 7e-4 at 10^7 entries, more than a small ratio. Tensors longer than LONG (error 9e-7) are
# therefore summed in rows (error 1e-8), which takes no more time for them.
LONG = 2**17
ROW = 2**13


def by_device_and_dtype(*lists: list[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists by device and dtype, which ``torch._foreach_*`` wants to be alike.

    A row of tensors goes where the first belongs; its dtypes are equal within a result if they
    are functions of the first one's.
    """
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], ...]] = {}
    for row in zip(*lists, strict=True):
        columns = groups.setdefault((row[0].device, row[0].dtype), tuple([] for _ in lists))
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)
    return list(groups.values())


def launches(*lists: list[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split parallel lists into what one ``torch._foreach_*`` call should take.

    On an accelerator these are all tensors of a dtype, for every call has a price. On a CPU it
    is one tensor, whose temporaries stay in the cache: memory traffic is what costs there.
    """
    parts: list[tuple[list[Tensor], ...]] = []
    for alike in by_device_and_dtype(*lists):
        if alike[0][0].device.type == "cpu":
            parts.extend(tuple([tensor] for tensor in row) for row in zip(*alike, strict=True))
        else:
            parts.append(alike)
    return parts


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which moments of ``tensor`` accumulate: at least float32."""
    return torch.promote_types(tensor.dtype, torch.float32)


def lerp(means: list[Tensor], samples: list[Tensor], weight: float) -> None:
    """Move ``means`` towards ``samples``; the mean of equal samples stays exact."""
    for alike, alike_samples in by_device_and_dtype(means, samples):
        torch._foreach_lerp_(alike, alike_samples, weight)


def shrink(params: list[Tensor], lr: float | Tensor, weight_decay: float) -> None:
    """θ ← (1 - lr · weight_decay) θ, the decoupled weight decay, for tensors that are alike."""
    if weight_decay != 0:
        torch._foreach_mul_(params, 1 - lr * weight_decay)


def move(params: list[Tensor], directions: list[Tensor], step_size: float | Tensor) -> None:
    """θ ← θ + step_size · direction, for tensors that are alike.

    A tensor as step size, which `torch.compile` needs where a scheduler changes it, overwrites
    the directions.
    """
    if not isinstance(step_size, Tensor):
        torch._foreach_add_(params, directions, alpha=step_size)
        return
    torch._foreach_mul_(directions, step_size)
    torch._foreach_add_(params, directions)


def squared_norm(tensors: list[Tensor]) -> float:
    """Return the sum of all squares, to a relative error of 1e-6 for float32 entries.

    One wait per device. NaN or infinity if, and only if, an entry or the result is.
    """
    total = 0.0
    for (alike,) in by_device_and_dtype([whole(tensor) for tensor in tensors]):
        total += float(norms_of_parts(alike).cpu().double().square().sum())
    if math.isfinite(total):
        return total
    # Squares of finite float32 entries can overflow.
    return sum(float(torch.linalg.vector_norm(whole(t).cpu().double())) ** 2 for t in tensors)


def norms_of_parts(tensors: list[Tensor]) -> Tensor:
    """Return norms of the tensors, or of their parts, in one dimension."""
    on_cpu = tensors[0].device.type == "cpu"
    norms: list[Tensor] = []
    short: list[Tensor] = []
    for tensor in tensors:
        if not on_cpu or tensor.numel() <= LONG:
            short.append(tensor)
            continue
        flat = tensor.reshape(-1)
        whole_rows = flat.numel() // ROW * ROW
        norms.append(torch.linalg.vector_norm(flat[:whole_rows].view(-1, ROW), dim=1))
        short.append(flat[whole_rows:])
    return torch.cat([*norms, torch.stack(list(torch._foreach_norm(short)))])
