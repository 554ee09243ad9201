"""Samples of Markov chains: effective sample size, and splits into folds."""

from __future__ import annotations

from collections.abc import Iterable

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor


def split_samples(
    n_samples: int,
    n_folds: int,
    generator: torch.Generator | None,
    chain: Tensor | None = None,
    system: Tensor | None = None,
) -> list[Tensor]:
    """Return the samples of each fold, split at random.

    Each system is spread evenly over the folds, and a chain is never split.

    Parameters
    ----------
    n_samples, n_folds : int
    generator : torch.Generator or None
    chain, system : Tensor of shape (n_samples,), int64, optional
        Which chain and which system a sample belongs to.
    """
    order = (
        torch.arange(n_samples) if chain is None else torch.unique(chain, return_inverse=True)[1]
    )
    of_unit = order.cpu()
    sizes = torch.bincount(of_unit)
    n_units = len(sizes)
    device = None if generator is None else generator.device
    key = torch.randperm(n_units, generator=generator, device=device).cpu()
    if chain is not None:
        # The longest chains first: the short ones then level the folds.
        key = key[torch.argsort(sizes[key], descending=True, stable=True)]
    if system is not None:
        system_of_unit = torch.empty(n_units, dtype=torch.int64)
        system_of_unit[of_unit] = system.cpu()
        key = key[torch.argsort(system_of_unit[key], stable=True)]
    fold_of_unit = torch.empty(n_units, dtype=torch.int64)
    if chain is None:
        fold_of_unit[key] = torch.arange(n_units) % n_folds
    else:
        filled = [0] * n_folds
        for unit in key.tolist():
            fold = filled.index(min(filled))
            fold_of_unit[unit] = fold
            filled[fold] += int(sizes[unit])
    return [torch.nonzero(fold_of_unit[of_unit] == k).flatten() for k in range(n_folds)]


def without(folds: Iterable[Tensor], left_out: int) -> Tensor:
    """Return the samples of all folds but one."""
    return torch.cat([fold for k, fold in enumerate(folds) if k != left_out])


def effective_sample_size(values: Tensor, chain: Tensor) -> float:
    """Return N/τ, with τ the integrated autocorrelation time over all chains.

    Parameters
    ----------
    values : Tensor of shape (N,), real or complex
        Within a chain in the order of time.
    chain : Tensor of shape (N,), int64

    Notes
    -----
    Autocovariances are about the mean of all chains, so that chains that do not mix count as
    correlated. The sum over lags ends where the sum of two neighboring ones is no longer positive
    (Geyer's initial positive sequence).
    """
    order = torch.argsort(chain, stable=True)
    _, lengths = torch.unique_consecutive(chain[order], return_counts=True)
    longest = int(lengths.max())
    centered = (values - values.mean())[order]
    # Rows are chains, padded by zeros to twice their length so that lags do not wrap around.
    filled = torch.arange(2 * longest, device=values.device) < lengths[:, None]
    padded = values.new_zeros(filled.shape)
    padded[filled] = centered
    spectrum = torch.fft.fft(padded).abs().square().sum(0)
    lags = torch.arange(longest, device=values.device)
    pairs = (lengths[:, None] - lags).clamp(min=0).sum(0)
    covariance = torch.fft.ifft(spectrum).real[:longest] / pairs
    if covariance[0] <= 0:
        return float(len(values))
    correlation = covariance / covariance[0]
    if longest % 2:
        correlation = torch.cat([correlation, correlation.new_zeros(1)])
    pair_sums = correlation.reshape(-1, 2).sum(1)
    positive = torch.cumprod((pair_sums > 0).to(torch.int64), dim=0)
    time = float(2 * (pair_sums * positive).sum() - 1)
    return len(values) / max(time, 1.0)
