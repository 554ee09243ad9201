"""Median-of-means and other robust estimates of the mean of random tensors."""

from __future__ import annotations

from typing import Literal

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.median_network import median_in_place
from thalweg.training.tensor_lists import wide_dtype

Aggregator = Literal["median", "geometric", "medoid", "trimmed", "mean"]
AGGREGATORS: tuple[Aggregator, ...] = ("median", "geometric", "medoid", "trimmed", "mean")

WEISZFELD_ITERATIONS = 8
WEISZFELD_SMOOTHING = 1e-8


def median_of_means(
    g: Tensor,
    k: int,
    *,
    dim: int = 0,
    smooth: float = 0.0,
    generator: torch.Generator | None = None,
    aggregator: Aggregator = "median",
    strict: bool = False,
) -> Tensor:
    r"""Estimate a mean from independent samples: average within k blocks, then take the median.

    .. math:: \bar g_j = \frac1b \sum_{i \equiv j \,(k)} g_i, \qquad
              \hat g = \mathrm{med}_j \, (\bar g_j + \theta \zeta_j)

    coordinatewise, with standard normal ζ. Up to (k - 1)/2 blocks may be anything at all. The
    variance of the estimate is finite if the noise has moments of order β > 4/(k + 1), even where
    the noise itself has no mean (and is symmetric). Skewed noise biases it, by less the larger
    the blocks are: `choose_blocks` trades the two.

    Parameters
    ----------
    g : Tensor of shape (N, …), floating
        Samples along ``dim``. Sample i belongs to block i mod k, so that sizes differ by at most
        one. A block with a NaN or an infinity is left out as an outlier.
    k : int, odd, 1 … N
        Number of blocks: 1 gives the mean, N the median.
    dim : int, default 0
    smooth : float, default 0
        θ, in the units of g; needed only for laws with atoms.
    generator : torch.Generator, optional
        Of ζ.
    aggregator : {"median", "geometric", "medoid", "trimmed", "mean"}
        How blocks are combined: the coordinatewise median; the geometric median (8 smoothed
        Weiszfeld iterations); the block nearest to the others; the mean without the
        ⌈(k - 1)/4⌉ smallest and largest of each coordinate; the mean. "geometric" and "medoid"
        take the whole of a block as one vector, and commute with rotations.
    strict : bool, default False
        Whether N must be a multiple of k.

    Returns
    -------
    Tensor
        Of g's shape without ``dim``, and of its dtype.

    Raises
    ------
    TypeError
        If g is not a real floating tensor.
    ValueError
        For k that is even or out of range, and other arguments that are not as described.
    RuntimeError
        If more than (k - 1)/2 blocks are not finite.

    Notes
    -----
    O(N d) and k·d memory. The median takes 4 minima and maxima for k = 3, 10 for k = 5, in place.

    References
    ----------
    "Clipped optimization with median-of-means gradients", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import median_of_means
    >>> samples = torch.tensor([[1.0], [2.0], [1e30], [3.0], [4.0], [5.0]])  # blocks 2, 3, 5e29
    >>> median_of_means(samples, 3)
    tensor([3.])
    """
    if not isinstance(g, Tensor) or not g.is_floating_point():
        kind = g.dtype if isinstance(g, Tensor) else type(g).__name__
        raise TypeError(f"g must be a real floating tensor, got {kind}")
    if g.ndim == 0 or not -g.ndim <= dim < g.ndim:
        raise ValueError(f"dim must be an axis of g, of shape {tuple(g.shape)}, got {dim}")
    check_choice("aggregator", aggregator, AGGREGATORS)
    check_number("smooth", smooth, at_least=0)
    samples = g.movedim(dim, 0)
    n = len(samples)
    check_block_number(k, n, "samples")
    if strict and n % k:
        raise ValueError(f"k must divide the number of samples, {n}, with strict=True, got {k}")
    # One after the other, as gradients are accumulated, so that both round alike.
    sums = samples[:k].to(wide_dtype(samples), copy=True)
    for start in range(k, n, k):
        rows = samples[start : start + k]
        sums[: len(rows)] += rows
    counts = [len(range(j, n, k)) for j in range(k)]
    means = [total / count for total, count in zip(sums, counts, strict=True)]
    finite = [mean for mean in means if bool(mean.isfinite().all())]
    check_majority(k, k - len(finite))
    return aggregate([finite], aggregator, smooth, generator)[0].to(g.dtype)


def check_block_number(k: int, n: int, what: str) -> int:
    """Return k if it is odd and between 1 and n.

    Raises
    ------
    ValueError
        Otherwise.
    """
    check_integer("k", k, at_least=1)
    if k % 2 == 0:
        raise ValueError(f"k must be odd, got {k}")
    if k > n:
        raise ValueError(f"k must be at most the number of {what}, {n}, got {k}")
    return k


def check_majority(k: int, n_bad: int) -> None:
    """Raise `RuntimeError` if so many blocks are not finite that the median could be anything."""
    if n_bad > (k - 1) // 2:
        raise RuntimeError(
            f"{n_bad} of {k} blocks are not finite; at most {(k - 1) // 2} can be left out"
        )


def aggregate(
    blocks: list[list[Tensor]],
    aggregator: Aggregator,
    smooth: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Combine the block means of several tensors, which may be overwritten.

    Parameters
    ----------
    blocks : list of lists of Tensor
        ``blocks[t][j]`` is the mean of block j for tensor t.
    """
    if smooth > 0:
        for lanes in blocks:
            for lane in lanes:
                noise = torch.randn(
                    lane.shape, generator=generator, dtype=lane.dtype, device=lane.device
                )
                lane.add_(noise, alpha=smooth)
    if aggregator == "geometric":
        return _geometric_median(blocks)
    if aggregator == "medoid":
        return _medoid(blocks)
    single = {"median": _median, "trimmed": _trimmed_mean, "mean": _mean}[aggregator]
    return [single(lanes) for lanes in blocks]


def _mean(lanes: list[Tensor]) -> Tensor:
    return torch.stack(lanes).mean(0)


def _median(lanes: list[Tensor]) -> Tensor:
    """Return the median, between the two middle lanes where their number is even."""
    if len(lanes) % 2 == 1:
        return median_in_place([lane.contiguous() for lane in lanes])
    middle = torch.stack(lanes).sort(dim=0).values[len(lanes) // 2 - 1 : len(lanes) // 2 + 1]
    return middle.mean(0)


def _trimmed_mean(lanes: list[Tensor]) -> Tensor:
    cut = (len(lanes) - 1 + 3) // 4
    ordered = torch.stack(lanes).sort(dim=0).values
    return ordered[cut : len(lanes) - cut].mean(0)


def _geometric_median(blocks: list[list[Tensor]]) -> list[Tensor]:
    """Weiszfeld: x ← Σ wⱼ gⱼ / Σ wⱼ with wⱼ = 1/√(‖gⱼ - x‖² + ε²), from the median."""
    center = [_median([lane.clone() for lane in lanes]) for lanes in blocks]
    for _ in range(WEISZFELD_ITERATIONS):
        weights = (_squared_distances(blocks, center) + WEISZFELD_SMOOTHING**2).rsqrt()
        weights /= weights.sum()
        center = [
            torch.stack(
                [w.to(lane.dtype) * lane for w, lane in zip(weights, lanes, strict=True)]
            ).sum(0)
            for lanes in blocks
        ]
    return center


def _medoid(blocks: list[list[Tensor]]) -> list[Tensor]:
    """Return the block with the least sum of distances to the others."""
    k = len(blocks[0])
    sums = [
        _squared_distances(blocks, [lanes[j] for lanes in blocks]).sqrt().sum() for j in range(k)
    ]
    best = int(torch.stack(sums).argmin())
    return [lanes[best].clone() for lanes in blocks]


def _squared_distances(blocks: list[list[Tensor]], center: list[Tensor]) -> Tensor:
    """Return ‖gⱼ - x‖² over all tensors, of shape (k,), in float64."""
    rows = [
        torch.stack([(lane - x).double().square().sum().cpu() for lane in lanes])
        for lanes, x in zip(blocks, center, strict=True)
    ]
    return torch.stack(rows).sum(0).to(center[0].device)
