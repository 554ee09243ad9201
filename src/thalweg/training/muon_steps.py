"""The updates of Muon's param groups: batches of matrices, and AdamW for the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
    from torch.optim.adamw import adamw

from thalweg.common.torch_gradients import whole
from thalweg.training.orthogonalizers import orthogonalize, step_dtype
from thalweg.training.tensor_lists import move, shrink

FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
ADAMW_EPS = 1e-8
# How many entries one batch of equal matrices has at most. On a CPU batches only save calls; on
# an accelerator they fill it, and the bound is for the memory.
BATCH_ON_CPU = 2**17
BATCH_ON_ACCELERATOR = 2**26


def matrix_batches(*lists: list[Tensor]) -> Iterator[tuple[list[Tensor], ...]]:
    """Split parallel lists into batches of matrices of one shape, transposed or not."""
    groups: dict[Any, tuple[list[Tensor], ...]] = {}
    for row in zip(*lists, strict=True):
        p = row[0]
        if p.numel() == 0:
            continue
        shape = frozenset((p.shape[0], p.shape[1:].numel()))
        columns = groups.setdefault((p.device, p.dtype, shape), tuple([] for _ in lists))
        for column, tensor in zip(columns, row, strict=True):
            column.append(tensor)
    for columns in groups.values():
        p = columns[0][0]
        most = BATCH_ON_CPU if p.device.type == "cpu" else BATCH_ON_ACCELERATOR
        size = max(1, most // p.numel())
        for start in range(0, len(columns[0]), size):
            yield tuple(column[start : start + size] for column in columns)


def muon_step(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], averages: list[Tensor]
) -> None:
    """Update M ← μM + (1-μ)G;  W ← (1-ηλ)W - ηs msign(M), or msign(μM + (1-μ)G) with Nesterov."""
    mu, lr = group["momentum"], group["lr"]
    torch._foreach_lerp_(averages, grads, 1 - mu)
    ahead = torch._foreach_lerp(averages, grads, 1 - mu) if group["nesterov"] else averages
    directions = _signs(group, list(ahead))
    shrink(params, lr, group["weight_decay"])
    for p, direction in zip(params, directions, strict=True):
        size = lr * _scale(group, p)
        move([p], [direction], size if group["maximize"] else -size)


def _scale(group: dict[str, Any], parameter: Tensor) -> float:
    """Return s for an m × n matrix."""
    m, n = parameter.shape[0], parameter.shape[1:].numel()
    if group["scale"] == "fan":
        return math.sqrt(max(1, m / n))
    return float(group["rms"]) * math.sqrt(max(m, n)) if group["scale"] == "rms" else 1.0


def _signs(group: dict[str, Any], matrices: list[Tensor]) -> list[Tensor]:
    """Return msign of matrices whose shapes are equal up to transposition, in one batch."""
    full = [whole(matrix).flatten(1) for matrix in matrices]
    tall = [matrix.shape[0] > matrix.shape[1] for matrix in full]
    wide = [matrix.mT if flip else matrix for matrix, flip in zip(full, tall, strict=True)]
    batch = wide[0][None] if len(wide) == 1 else torch.stack(wide)
    signs = orthogonalize(batch, group["orthogonalizer"], group["ns_steps"], step_dtype(batch))
    return [
        _like(matrix, sign.mT if flip else sign)
        for matrix, sign, flip in zip(matrices, signs, tall, strict=True)
    ]


def _like(tensor: Tensor, matrix: Tensor) -> Tensor:
    """Return ``matrix`` in the shape of ``tensor``, sharded as that is."""
    matrix = matrix.reshape(tensor.shape)
    if not hasattr(tensor, "full_tensor"):
        return matrix
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    # Every process has computed the same matrix and takes its part: nothing is sent.
    return distribute_tensor(matrix, tensor.device_mesh, tensor.placements, src_data_rank=None)


def adamw_step(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Make a step of `torch.optim.AdamW`, fused where that exists."""
    beta1, beta2 = group["fallback_betas"]
    adamw(
        params,
        grads,
        averages,
        squares,
        [],
        steps,
        fused=True if params[0].device.type in FUSED_DEVICES else None,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=ADAMW_EPS,
        maximize=group["maximize"],
    )
