"""Passes over long tensors in parts: inner products, over all shards, and launches of updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.tensor_lists import by_device_and_dtype, wide_dtype

# On a CPU, longer tensors are handled in parts: several passes over a part of four tensors find it
# in the cache, which is faster by a third at 10^7 entries, and float32 sums stay short.
BLOCK = 2**18
# Small tensors of a CPU share launches of up to this many entries.
CACHED = 2**15


def scalar_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of what is computed from inner products: float64 where there is one."""
    return torch.float32 if device.type == "mps" else torch.float64


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that is sharded over processes (a ``DTensor``)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def blocks(*lists: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Split a launch on parallel lists into launches on parts, where that saves memory traffic."""
    rows = tuple([local(tensor) for tensor in tensors] for tensors in lists)
    firsts = [row[0] for row in rows]
    if (
        len(rows[0]) > 1
        or firsts[0].numel() <= BLOCK
        or firsts[0].device.type != "cpu"
        or torch.compiler.is_compiling()
        or not all(tensor.is_contiguous() for tensor in firsts)
    ):
        return [rows]
    parts = zip(*(torch.split(tensor.view(-1), BLOCK) for tensor in firsts), strict=True)
    return [tuple([part] for part in row) for row in parts]


def launches_with_factors(
    lists: Sequence[list[Tensor]], factors: Tensor
) -> Iterator[tuple[tuple[list[Tensor], ...], tuple[list[Tensor], ...]]]:
    """Yield launches on parallel lists, or on parts of them, with the factors of their tensors.

    Parameters
    ----------
    lists : m lists of n tensors
    factors : Tensor of shape (k, n) or (k, 1)

    Yields
    ------
    tuple of m lists, tuple of k lists
        Tensors (or parts) that are alike, and their factors as 0-dim tensors of the same dtype.
    """
    by_tensor = factors.expand(-1, len(lists[0])).unbind(1)
    for *alike, columns in by_device_and_dtype(*lists, list(by_tensor)):
        first = alike[0][0]
        rows = torch.stack(columns, dim=1).to(first.device, first.dtype).unbind()
        for start, end in _spans(alike[0]):
            of_tensors = tuple(list(row[start:end].unbind()) for row in rows)
            for tensors in blocks(*(tensors[start:end] for tensors in alike)):
                yield tensors, of_tensors


def _spans(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Yield ranges of tensors for one launch each: on a CPU, what fits the cache together."""
    if tensors[0].device.type != "cpu":
        yield 0, len(tensors)
        return
    start = size = 0
    for i, tensor in enumerate(tensors):
        if start < i and size + tensor.numel() > CACHED:
            yield start, i
            start, size = i, 0
        size += tensor.numel()
    yield start, len(tensors)


def dot(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner product of two vectors. Compiled, several of them are one pass."""
    return (left * right).sum() if torch.compiler.is_compiling() else torch.dot(left, right)


def inner_products(products: Callable[..., list[Tensor]], *lists: Sequence[Tensor]) -> Tensor:
    """Return the inner products of every row of parallel lists, over all processes.

    Parameters
    ----------
    products : callable
        Takes one vector for each list, in float32 at least, and returns m products made by `dot`.
    *lists : n tensors each

    Returns
    -------
    Tensor of shape (n, m)
        In float64 where the device has it, on the device of the first tensor.
    """
    home = lists[0][0].device
    found: list[list[Tensor]] = []
    counts = []
    for row in zip(*lists, strict=True):
        wide = wide_dtype(row[0])
        parts = blocks(*([tensor] for tensor in row))
        counts.append(len(parts))
        found += [products(*(part.reshape(-1).to(wide) for (part,) in row)) for row in parts]
    by_part = _stacked([product for row in found for product in row], home).view(len(found), -1)
    if len(found) > len(counts):
        by_part = torch.stack([rows.sum(0) for rows in torch.split(by_part, counts)])
    return _over_shards(by_part, lists[0])


def _stacked(scalars: list[Tensor], home: torch.device) -> Tensor:
    first = scalars[0]
    if any(scalar.dtype != first.dtype or scalar.device != home for scalar in scalars):
        scalars = [scalar.to(home, scalar_dtype(home)) for scalar in scalars]
    return torch.stack(scalars).to(scalar_dtype(home))


def _over_shards(sums: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Add up what the processes found for their parts of ``DTensor`` s: one call per layout."""
    layouts: dict[Any, list[int]] = {}
    for i, tensor in enumerate(cast(Sequence[Any], tensors)):
        if hasattr(tensor, "to_local"):
            sharded = tuple(placement.is_shard() for placement in tensor.placements)
            layouts.setdefault((tensor.device_mesh, sharded), []).append(i)
    for (mesh, sharded), rows in layouts.items():
        from torch.distributed.tensor import DTensor, Partial, Replicate

        placements = [Partial() if split else Replicate() for split in sharded]
        part = DTensor.from_local(sums[rows], mesh, placements, run_check=False)
        sums[rows] = part.full_tensor()
    return sums
