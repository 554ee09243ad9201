"""Sorting networks that leave the median, for tensors: a fixed number of minima and maxima."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

# k parts of this many entries stay in the cache of a CPU core.
CHUNK = 2**15

# A. Paeth, "Median finding on a 3x3 grid", Graphics Gems (1990), and N. Devillard, "Fast median
# search" (1998): (i, j) puts the smaller entry into i.
SHORTEST: dict[int, list[tuple[int, int]]] = {
    5: [(0, 1), (3, 4), (0, 3), (1, 4), (1, 2), (2, 3), (1, 2)],
    7: [
        *[(0, 5), (0, 3), (1, 6), (2, 4), (0, 1), (3, 5), (2, 6)],
        *[(2, 3), (3, 6), (4, 5), (1, 4), (1, 3), (3, 4)],
    ],
    9: [
        *[(1, 2), (4, 5), (7, 8), (0, 1), (3, 4), (6, 7), (1, 2), (4, 5), (7, 8), (0, 3)],
        *[(5, 8), (4, 7), (3, 6), (1, 4), (2, 5), (4, 7), (4, 2), (6, 4), (4, 2)],
    ],
}


class Comparator(NamedTuple):
    """Puts the smaller entry of lanes i and j into i and the larger into j, where it is needed."""

    i: int
    j: int
    low: bool
    high: bool


@lru_cache
def median_network(k: int) -> tuple[Comparator, ...]:
    """Return comparators after which lane k // 2 holds the median of k (odd) lanes.

    For 5, 7 and 9 lanes they are the shortest ones known, otherwise those comparators of
    Batcher's sort on which the middle lane depends.

    Examples
    --------
    >>> sum(comparator.low + comparator.high for comparator in median_network(3))
    4
    """
    needed = {k // 2}
    kept = []
    for i, j in reversed(SHORTEST.get(k) or _batcher(k)):
        low, high = i in needed, j in needed
        if low or high:
            needed |= {i, j}
            kept.append(Comparator(i, j, low, high))
    return tuple(reversed(kept))


def median_in_place(lanes: list[Tensor]) -> Tensor:
    """Return the entrywise median of k (odd) contiguous tensors, which it overwrites.

    The result is one of them. Compare `torch.median`, which has to copy: along a leading
    dimension of 5 it takes several times as long.
    """
    flat = [lane.view(-1) for lane in lanes]
    if flat[0].device.type != "cpu" or flat[0].numel() <= CHUNK:
        _run(flat)
        return lanes[len(lanes) // 2]
    for parts in zip(*(torch.split(lane, CHUNK) for lane in flat), strict=True):
        _run(list(parts))
    return lanes[len(lanes) // 2]


def _run(lanes: list[Tensor]) -> None:
    spare = torch.empty_like(lanes[0])
    for i, j, low, high in median_network(len(lanes)):
        a, b = lanes[i], lanes[j]
        if low and high:
            torch.minimum(a, b, out=spare)
            torch.maximum(a, b, out=b)
            a.copy_(spare)
        elif low:
            torch.minimum(a, b, out=a)
        else:
            torch.maximum(a, b, out=b)


def _batcher(n: int) -> list[tuple[int, int]]:
    """Return the comparators of Batcher's merge exchange sort, for any n (Knuth, 5.2.2 M)."""
    pairs = []
    top = 1 << max(0, (n - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return pairs
