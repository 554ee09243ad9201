"""The stability ratio of a random gradient: its estimate from samples and from replicas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
    from torch import distributed as dist

from thalweg.training.tensor_lists import lerp, squared_norm


@dataclass(frozen=True)
class StabEstimate:
    """What `stability_ratio` returns.

    Attributes
    ----------
    value : float
        The estimated ratio ``numerator / second_moment``, clipped to [0, 1] unless asked not to
        be; 1 when every gradient is zero, for then no noise was seen.
    numerator : float
        The unbiased estimate of ‖E G‖²; negative values occur when the ratio is near 0.
    second_moment : float
        The mean of ‖G‖².
    kurtosis : float
        The mean of ‖G‖⁴ over the squared mean of ‖G‖²: 1 when all norms are equal.
    n : int
        The number of gradients.
    std_error : float
        Standard error of ``value``: right when the noise has one dominant direction,
        conservative by about the square root of its effective dimension otherwise.
    """

    value: float
    numerator: float
    second_moment: float
    kurtosis: float
    n: int
    std_error: float


def stability_ratio(grads: Tensor | Iterable[Tensor], *, clip: bool = True) -> StabEstimate:
    r"""Estimate the stability ratio ‖E G‖² / E‖G‖² from independent gradients.

    With M the mean of the n gradients and Z the mean of their squared norms, the numerator is the
    average inner product of two *different* gradients,

    .. math:: J = \frac1{n(n-1)} \sum_{i \ne j} \langle X_i, X_j \rangle
                = \|M\|^2 - \frac{Z - \|M\|^2}{n - 1},

    which is unbiased; the naive ‖M‖² / Z is too high by about 1/n. It takes of the order of
    1/ratio gradients to tell a ratio from zero.

    Parameters
    ----------
    grads : Tensor of shape (n, ...) or iterable of n tensors of one shape
        Independent gradients at the same point, n ≥ 2. Draw the batches with replacement: the
        batches of one epoch are negatively correlated, which lowers J. An iterable is read once,
        in the memory of two gradients.
    clip : bool, default True
        Whether ``value`` is clipped to [0, 1], after the division.

    Returns
    -------
    StabEstimate

    Raises
    ------
    TypeError
        If a gradient is not a dense tensor of real floating-point numbers.
    ValueError
        If there are fewer than two gradients, their shapes differ, or one is not finite.

    Notes
    -----
    O(n d) time for n gradients of d entries. Everything is accumulated in float64.

    References
    ----------
    "Stab-SGD: Noise-adaptivity in smooth optimization with stability ratios", NeurIPS 2025.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import stability_ratio
    >>> noise = torch.randn(10_000, 50, generator=torch.Generator().manual_seed(0))
    >>> mean = torch.full((50,), 50**-0.5)
    >>> estimate = stability_ratio(mean + noise)
    >>> abs(estimate.value - 1 / 51) < 3 * estimate.std_error
    True
    """
    if isinstance(grads, Tensor):
        return _ratio_of_rows(grads, clip)
    count, second, fourth = 0, 0.0, 0.0
    mean = torch.empty(0)
    for grad in grads:
        sample = _checked(f"grads[{count}]", grad)
        if count == 0:
            mean = torch.zeros_like(sample)
        if sample.shape != mean.shape:
            raise ValueError(
                f"grads[{count}] must have shape {tuple(mean.shape)}, got {tuple(sample.shape)}"
            )
        count += 1
        mean.lerp_(sample, 1 / count)
        square = squared_norm([sample])
        second += (square - second) / count
        fourth += (square * square - fourth) / count
    if count < 2:
        raise ValueError(f"grads must hold at least 2 gradients, got {count}")
    return estimate_ratio(count, squared_norm([mean]), second, fourth, clip=clip)


def _ratio_of_rows(grads: Tensor, clip: bool) -> StabEstimate:
    if grads.ndim < 2 or len(grads) < 2:
        raise ValueError(
            f"grads must hold at least 2 gradients, shape (n, ...), got {tuple(grads.shape)}"
        )
    samples = _checked("grads", grads).flatten(1)
    # Through the deviations, equal gradients give a variance of exactly 0.
    mean = samples[0] + (samples - samples[0]).mean(0)
    square = float(mean.square().sum())
    second = square + float((samples - mean).square().sum(1).mean())
    fourth = float(samples.square().sum(1).square().mean())
    return estimate_ratio(len(samples), square, second, fourth, clip=clip)


def _checked(name: str, grad: Tensor) -> Tensor:
    if not isinstance(grad, Tensor) or not grad.is_floating_point():
        kind = grad.dtype if isinstance(grad, Tensor) else type(grad).__name__
        raise TypeError(f"{name} must be a tensor of real floating-point numbers, got {kind}")
    if grad.layout is not torch.strided:
        raise TypeError(f"{name} must be dense, got {grad.layout}")
    if not bool(torch.isfinite(grad).all()):
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return grad.detach().to(torch.float64)


def estimate_ratio(
    n: int, mean_square: float, second: float, fourth: float, *, clip: bool = True
) -> StabEstimate:
    """Return the jackknife estimate from ‖M‖², Z and the mean of ‖X‖⁴ of n ≥ 2 samples."""
    numerator = mean_square - (second - mean_square) / (n - 1)
    ratio = numerator / second if second > 0 else 1.0
    clipped = min(max(ratio, 0.0), 1.0)
    tail = kurtosis(second, fourth)
    # Variance of the U-statistic J, 2 tr(Σ²)/n² + 4 μᵀΣμ/n, bounded by ‖Σ‖ ≤ tr Σ; then that of Z.
    variance = (
        2 * (1 - clipped) ** 2 / n**2
        + 4 * clipped * (1 - clipped) / n
        + clipped**2 * max(tail - 1, 0.0) / n
    )
    value = clipped if clip else ratio
    return StabEstimate(value, numerator, second, tail, n, math.sqrt(variance))


def ratio_of_average(numerator: float, second: float, k: int) -> float:
    """Return the ratio, in [0, 1], of the average of k samples, whose noise is k times smaller."""
    averaged = numerator + (second - numerator) / k
    return min(max(numerator / averaged, 0.0), 1.0) if averaged > 0 else float(second == 0)


def kurtosis(second: float, fourth: float) -> float:
    """Return the mean of ‖X‖⁴ over Z², 1 for zero gradients."""
    # The square of a small second moment would underflow.
    return fourth / second / second if second > 0 else 1.0


def average(samples: list[list[Tensor]], means: list[Tensor]) -> tuple[int, float, float]:
    """Write the mean of samples, lists of tensors, to ``means``; return n, mean ‖X‖² and ‖X‖⁴."""
    squares = [squared_norm(sample) for sample in samples]
    for count, sample in enumerate(samples, start=1):
        if count == 1:
            torch._foreach_copy_(means, sample)
        else:
            lerp(means, sample, 1 / count)
    n = len(samples)
    return n, sum(squares) / n, sum(square * square for square in squares) / n


def average_over_replicas(
    means: list[Tensor], n: int, second: float, fourth: float
) -> tuple[int, float, float, float]:
    """Average over the processes of `torch.distributed`, ``means`` in place.

    Returns the total number of samples, their mean ‖X‖² and ‖X‖⁴, and the mean squared distance
    of the processes' means from the common one.
    """
    if not means:
        return n, second, fourth, 0.0
    own = squared_norm(means)
    sums = torch.tensor([n, n * own, n * second, n * fourth], dtype=torch.float64)
    sums = sums.to(means[0].device)
    dist.all_reduce(sums)
    total, own, second, fourth = sums.tolist()
    for mean in means:
        mean.mul_(n / total)
        dist.all_reduce(mean)
    spread = own / total - squared_norm(means)
    return int(total), second / total, fourth / total, spread
