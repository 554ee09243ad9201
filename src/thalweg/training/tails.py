"""How heavy and how skewed the tails of samples are."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from thalweg.common.checks import check_array, check_number
from thalweg.common.random import as_generator
from thalweg.common.tails import mean_log_excess

MIN_SAMPLES = 64
TOP_SHARE = 0.05
OUTER_QUANTILE = 0.05
GROUPS = 8


class Interval(NamedTuple):
    """An estimate and its confidence interval.

    Attributes
    ----------
    value, low, high : float
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def tail_index(
    samples: ArrayLike,
    *,
    confidence: float = 0.95,
    rng: int | np.random.Generator | None = None,
) -> Interval:
    r"""Estimate the tail index α ∈ (0, 2] of centered samples from how their sums grow.

    The sum of K₁ independent copies of an α-stable vector is K₁^{1/α} times as long as one of
    them. With K₂ disjoint blocks of K₁ ≈ √K samples and their sums Y,

    .. math:: \frac1{\hat\alpha} = \frac1{\ln K_1} \Big( \frac1{K_2} \sum_i \ln \|Y_i\|
              - \frac1{K_1 K_2} \sum_j \ln \|\xi_j\| \Big).

    α = 2 means that sums grow like those of a Gaussian. A law with finite variance but heavy
    tails reaches 2 only for very many samples: read it beside `hill_index`.

    Parameters
    ----------
    samples : array_like of shape (K, d) or (K,), K ≥ 64
        Independent, with mean (or center of symmetry) zero. Zero vectors are left out.
    confidence : float in (0, 1), default 0.95
        Of the interval, Student's for the K₂ independent blocks.
    rng : int, Generator or None
        Deals the samples to blocks.

    Returns
    -------
    Interval
        Clipped to (0, 2].

    Raises
    ------
    ValueError
        If there are fewer than 64 nonzero samples, or one is not finite.

    Notes
    -----
    Cost O(Kd). The estimator is the one in use for gradient noise since Mohammadi et al.; the
    interval is ours.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026. M. Mohammadi,
    A. Mohammadpour, H. Ogata, "On estimating the tail index and the spectral measure of
    multivariate α-stable distributions", Metrika 78 (2015).

    Examples
    --------
    >>> import numpy as np
    >>> noise = np.random.default_rng(0).standard_cauchy((1024, 50))
    >>> alpha = tail_index(noise, rng=0)
    >>> 0.9 < alpha.value < 1.1 and alpha.low < 1 < alpha.high
    True
    """
    check_number("confidence", confidence, above=0, below=1)
    array = np.asarray(samples)
    array = check_array("samples", array[:, None] if array.ndim == 1 else array, shape=("K", "d"))
    array = array[array.any(axis=1)]
    check_enough("samples", len(array))
    blocks = _deal(array, as_generator(rng))
    growth = _log_norms(blocks.sum(axis=1)) - _log_norms(blocks).mean(axis=1)
    inverse = _mean_interval(growth / math.log(blocks.shape[1]), confidence)
    return Interval(
        *(_clip_index(1 / x if x > 0 else 2.0) for x in (inverse.value, inverse.high, inverse.low))
    )


def tail_index_by_column(
    samples: NDArray[np.float64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return the tail index of every column of centered samples (K, d), in one pass.

    NaN where fewer than 64 entries are nonzero; a column with some zeros is estimated from the
    others.
    """
    nonzero = np.count_nonzero(samples, axis=0)
    full = nonzero == len(samples)
    found = np.full(samples.shape[1], np.nan)
    if full.any():
        blocks = _deal(samples[:, full], rng)
        growth = np.log(np.abs(blocks.sum(axis=1))) - np.log(np.abs(blocks)).mean(axis=1)
        inverse = growth.mean(axis=0) / math.log(blocks.shape[1])
        found[full] = np.minimum(1 / np.maximum(inverse, 0.5), 2.0)
    for column in np.flatnonzero(~full & (nonzero >= MIN_SAMPLES)):
        found[column] = tail_index(samples[:, column], rng=rng).value
    return found


def hill_index(sizes: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Estimate the exponent a of a tail P(size > x) ~ x^-a from the largest 5 % of the sizes.

    Parameters
    ----------
    sizes : array_like of shape (K,), K ≥ 64
        Norms of samples; zeros are left out.
    confidence : float in (0, 1), default 0.95
        Of the interval, from the gamma law that k log-spacings of an exact power law follow.

    Returns
    -------
    Interval
        Moments of order a and above are infinite: below 2 there is no variance. Light tails
        give large values, which grow with K. Infinite if the largest sizes are all equal.

    Raises
    ------
    ValueError
        If fewer than 64 sizes are positive, or one is negative or not finite.

    References
    ----------
    B. M. Hill, "A simple general approach to inference about the tail of a distribution",
    Annals of Statistics 3 (1975).

    Examples
    --------
    >>> import numpy as np
    >>> sizes = 1 + np.random.default_rng(0).pareto(3.0, 10_000)
    >>> index = hill_index(sizes)
    >>> index.low < 3 < index.high
    True
    """
    check_number("confidence", confidence, above=0, below=1)
    array = check_array("sizes", sizes, shape=("K",))
    if (array < 0).any():
        raise ValueError(f"sizes must be >= 0, got {array.min():g}")
    array = np.sort(array[array > 0])[::-1]
    k = math.ceil(TOP_SHARE * check_enough("sizes", len(array)))
    total = k * float(mean_log_excess(array, k))
    if total == 0:
        return Interval(math.inf, math.inf, math.inf)
    # The sum of k log-excesses is gamma with shape k and rate a.
    low, high = stats.gamma.interval(confidence, k)
    return Interval(k / total, float(low) / total, float(high) / total)


def quantile_skewness(samples: ArrayLike, *, confidence: float = 0.95) -> Interval:
    """Estimate how skewed coordinates are: the root mean square of Kelley's coefficient.

    Kelley's coefficient of a coordinate, (q₉₅ + q₅ - 2 q₅₀) / (q₉₅ - q₅) ∈ [-1, 1], needs no
    moments. Its square is averaged over coordinates as the product of independent groups of
    samples, so that symmetric noise gives zero on average, and not the error of the quantiles.

    Parameters
    ----------
    samples : array_like of shape (K, d), K ≥ 64
        Independent samples of d coordinates, in the order in which they were drawn.
    confidence : float in (0, 1), default 0.95
        Of the interval, by the jackknife over 8 groups.

    Returns
    -------
    Interval
        In [0, 1]; 0 for symmetric coordinates, 0.56 for exponential ones.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> quantile_skewness(rng.standard_cauchy((2000, 40))).low
    0.0
    >>> 0.5 < quantile_skewness(rng.exponential(size=(2000, 40))).value < 0.6
    True
    """
    check_number("confidence", confidence, above=0, below=1)
    array = check_array("samples", samples, shape=("K", "d"))
    size = check_enough("samples", len(array)) // GROUPS
    groups = array[: GROUPS * size].reshape(GROUPS, size, -1)
    low, median, high = np.quantile(groups, [OUTER_QUANTILE, 0.5, 1 - OUTER_QUANTILE], axis=1)
    spread = np.where(high > low, high - low, 1.0)
    skewness = (high + low - 2 * median) / spread
    products = skewness @ skewness.T / skewness.shape[1]
    square = _mean_of_pairs(products)
    left_out = np.array(
        [_mean_of_pairs(np.delete(np.delete(products, g, 0), g, 1)) for g in range(GROUPS)]
    )
    error = math.sqrt((GROUPS - 1) / GROUPS * float(((left_out - left_out.mean()) ** 2).sum()))
    width = float(stats.t.ppf(0.5 + confidence / 2, GROUPS - 1)) * error
    return Interval(
        *(math.sqrt(min(max(s, 0.0), 1.0)) for s in (square, square - width, square + width))
    )


def check_enough(name: str, n: int) -> int:
    """Return ``n``; fewer than 64 nonzero samples raise `ValueError`."""
    if n < MIN_SAMPLES:
        raise ValueError(f"{name} must hold at least {MIN_SAMPLES} nonzero samples, got {n}")
    return n


def _deal(samples: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Return samples (K, d), shuffled, as ⌊√K⌋ blocks (blocks, size, d) of equal size."""
    n_blocks = math.isqrt(len(samples))
    size = len(samples) // n_blocks
    order = rng.permutation(len(samples))[: n_blocks * size]
    return samples[order].reshape(n_blocks, size, -1)


def _log_norms(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    # Scaled first: squares of heavy-tailed entries overflow.
    scale = np.abs(vectors).max(axis=-1, keepdims=True)
    scale = np.where(scale > 0, scale, np.finfo(np.float64).tiny)
    scaled = np.linalg.norm(vectors / scale, axis=-1)
    logs: NDArray[np.float64] = np.log(np.maximum(scaled, np.finfo(np.float64).tiny))
    return logs + np.log(scale[..., 0])


def _mean_interval(values: NDArray[np.float64], confidence: float) -> Interval:
    mean, error = float(values.mean()), float(stats.sem(values))
    width = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1)) * error
    return Interval(mean, mean - width, mean + width)


def _mean_of_pairs(products: NDArray[np.float64]) -> float:
    """Return the mean of the entries off the diagonal."""
    n = len(products)
    return float(products.sum() - products.trace()) / (n * (n - 1))


def _clip_index(alpha: float) -> float:
    return min(alpha, 2.0)
