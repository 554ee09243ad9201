"""How heavy the tails of gradient noise are, from samples of a gradient at one point."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer
from thalweg.common.optional import requires
from thalweg.common.tails import mean_log_excess

Array = NDArray[np.float64]

MIN_SAMPLES = 64
LIGHT = 1e3  # an index above this is that of no power law
FEWEST_BLOCKS = 4


@dataclass(frozen=True, eq=False)
class TailReport:
    """The tail of the norm of gradient noise.

    Parameters
    ----------
    n_samples : int
    k : int
        Of the largest norms, how many `hill` is fitted to.
    hill : float
        Hill's estimate of the tail index α, where P(norm > r) falls as r^-α: moments of order below
        α exist.
    interval : tuple of (float, float)
        A 95 % interval of it for an exact power law.
    pickands : float
        Pickands' estimate of α, which also tells lighter tails than any power law, as infinity; it
        varies far more.
    block_sizes, block_variances : ndarray of shape (b,)
        Numbers of samples, and the median variance of blocks of so many.
    variance_growth : float
        The slope of the logarithm of the variances over that of the sizes: 0 if the variance is
        finite, 2/α - 1 else.
    norms : ndarray of shape (n_samples,)
        Distances from the entrywise median, in descending order.
    """

    n_samples: int
    k: int
    hill: float
    interval: tuple[float, float]
    pickands: float
    block_sizes: NDArray[np.int64]
    block_variances: Array
    variance_growth: float
    norms: Array

    @property
    def mean_exists(self) -> bool:
        """Whether the estimated index is above 1."""
        return self.hill > 1

    @property
    def variance_exists(self) -> bool:
        """Whether the estimated index is above 2."""
        return self.hill > 2

    @property
    def p_moment(self) -> float:
        """The order of a moment that exists, in (1, 2], as `decentralized_bilevel` takes it.

        A tenth below the estimated index.
        """
        return min(2.0, max(1.01, 0.9 * self.hill))

    def plot(self, ax: Any = None) -> Any:
        """Draw the share of norms above each, on logarithmic axes, with the fitted power law.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional

        Returns
        -------
        matplotlib.axes.Axes
        """
        with requires("plot"):
            import matplotlib.pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        share = np.arange(1, self.n_samples + 1) / self.n_samples
        ax.loglog(self.norms, share, ".", label="norms")
        tail = self.norms[: self.k]
        law = self.k / self.n_samples * (tail / self.norms[self.k]) ** -self.hill
        ax.loglog(tail, law, label=f"power law, index {self.hill:.2f}")
        ax.set(xlabel="norm of the noise", ylabel="share above")
        ax.legend()
        return ax


def heavy_tail_report(grad_samples: ArrayLike, *, k: int | None = None) -> TailReport:
    r"""Estimate the tail index of gradient noise, and whether its variance exists.

    With the norms in descending order, r₁ ≥ r₂ ≥ …, Hill's estimate is

    .. math:: \hat\alpha = \Big(\frac1k \sum_{i=1}^k \log \frac{r_i}{r_{k+1}}\Big)^{-1}.

    Parameters
    ----------
    grad_samples : array_like of shape (N, d) or (N,)
        Stochastic gradients at one point, N ≥ 64; some hundreds are needed to say much.
    k : int, optional
        How many of the largest norms count as tail: by default ⌊√N⌋, or a tenth of N if that is
        less. A larger k varies less and sees more of what is not tail yet.

    Returns
    -------
    TailReport

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or if more than N - k samples are equal.

    Warns
    -----
    UserWarning
        If the index is below 1: the mean does not exist then, and no method that averages gradients
        can work.

    Notes
    -----
    *Cost.* O(Nd + N log N).

    *Ours.* All of it: the paper supposes that the order of a finite moment is known. Median block
    variances are used since a single variance is meaningless where there is none.

    References
    ----------
    B. M. Hill, "A simple general approach to inference about the tail of a distribution", Annals of
    Statistics 1975.
    J. Pickands, "Statistical inference using extreme order statistics", Annals of Statistics 1975.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import heavy_tail_report
    >>> rng = np.random.default_rng(0)
    >>> report = heavy_tail_report(rng.standard_t(1.5, (4000, 10)))
    >>> 1.2 < report.hill < 1.8, report.variance_exists
    (True, False)
    >>> heavy_tail_report(rng.standard_normal((4000, 10))).variance_exists
    True
    """
    shape = ("N", "d") if np.ndim(grad_samples) == 2 else ("N",)
    samples = check_array("grad_samples", grad_samples, shape=shape)
    samples = samples.reshape(len(samples), -1)
    n = len(samples)
    if n < MIN_SAMPLES:
        raise ValueError(f"grad_samples must hold at least {MIN_SAMPLES} samples, got {n}")
    if k is None:
        k = min(math.isqrt(n), n // 10)
    check_integer("k", k, at_least=2, at_most=n // 4)
    deviations = samples - np.median(samples, axis=0)
    norms = np.linalg.norm(deviations, axis=1)[:, None]
    ordered = np.sort(norms[:, 0])[::-1]
    if ordered[k] <= 0:
        raise ValueError(f"grad_samples must vary, got {int(np.sum(ordered <= 0))} equal samples")
    excess = float(mean_log_excess(ordered, k))
    hill = 1 / excess if excess > 0 else math.inf
    sizes, variances = _block_variances(samples)
    report = TailReport(
        n_samples=n,
        k=k,
        hill=hill,
        interval=(hill * (1 - 1.96 / math.sqrt(k)), hill * (1 + 1.96 / math.sqrt(k))),
        pickands=_pickands(ordered, k),
        block_sizes=sizes,
        block_variances=variances,
        variance_growth=float(np.polyfit(np.log(sizes), np.log(variances), 1)[0]),
        norms=ordered,
    )
    if not report.mean_exists:
        warnings.warn(
            f"the tail index of the gradient noise is about {hill:.2f}, below 1: the mean does not "
            "exist, and methods that average gradients cannot work",
            stacklevel=2,
        )
    return report


def _pickands(ordered: Array, k: int) -> float:
    """Return 1/γ of the spacings of the k/4-th, k/2-th and k-th largest, or infinity for γ ≤ 0."""
    quarter = max(1, k // 4)
    upper, middle, lower = (ordered[m * quarter - 1] for m in (1, 2, 4))
    if upper == middle or middle == lower:
        return math.inf
    gamma = math.log2((upper - middle) / (middle - lower))
    return 1 / gamma if gamma > 1 / LIGHT else math.inf


def _block_variances(samples: Array) -> tuple[NDArray[np.int64], Array]:
    """Return sizes 8, 16, …, N/4 and the median over disjoint blocks of their variance."""
    n = len(samples)
    sizes = [2**j for j in range(3, n.bit_length()) if 2**j * FEWEST_BLOCKS <= n]
    medians = []
    for size in sizes:
        blocks = samples[: n // size * size].reshape(-1, size, samples.shape[1])
        medians.append(float(np.median(blocks.var(axis=1, ddof=1).sum(axis=1))))
    tiny = np.finfo(np.float64).tiny
    return np.array(sizes), np.maximum(np.array(medians), tiny)
