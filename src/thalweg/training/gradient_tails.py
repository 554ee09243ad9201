"""What gradient samples say of their noise, for the choice of blocks and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator
from thalweg.common.tails import mean_log_excess
from thalweg.training.block_plan import BlockPlan, choose_blocks
from thalweg.training.clipped_mom import AUTO_FACTOR
from thalweg.training.mom_minimize import block_median
from thalweg.training.tails import Interval, check_enough, quantile_skewness, tail_index

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TOP_SHARES = (0.1, 0.05, 0.02)
# Averages of samples with a smaller exponent hardly concentrate.
NO_MEAN = 1.2
SPLITS = 200


@dataclass(frozen=True)
class TailReport:
    """What `tail_report` found.

    Attributes
    ----------
    beta : dict of float to float
        Hill's exponent of the coordinates' tails, median over coordinates, from several shares of
        the largest entries: where they agree, the tail is a power law. At or below 1 the noise
        has no mean.
    alpha : Interval
        Tail index of the noise as a whole; see `tail_index`.
    skewness : Interval
        Of the coordinates; see `quantile_skewness`.
    plan : BlockPlan
        The recommended number of blocks.
    clip : float
        The recommended clipping level, twice the median norm of such estimates.
    sizes : ndarray
        ``|ξ|`` of all coordinates, each scaled to median 1, sorted.
    """

    beta: dict[float, float]
    alpha: Interval
    skewness: Interval
    plan: BlockPlan
    clip: float
    sizes: NDArray[np.float64] = field(repr=False)

    def __str__(self) -> str:
        shares = ", ".join(f"{beta:.2f} from {share:.0%}" for share, beta in self.beta.items())
        return "\n".join(
            [
                f"Hill exponents     {shares}",
                f"tail index         {self.alpha}",
                f"quantile skewness  {self.skewness}",
                f"blocks             k = {self.plan.k} of {self.plan.b} samples, "
                f"clip = {self.clip:.3g}",
                *([self.plan.note] if self.plan.note else []),
            ]
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the share of larger entries over the size, with the fitted power law."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        sizes = self.sizes[::-1][: max(2, len(self.sizes) // 2)]
        share = np.arange(1, len(sizes) + 1) / len(self.sizes)
        shown = np.unique(np.geomspace(1, len(sizes), 300).astype(int)) - 1
        ax.loglog(sizes[shown], share[shown], ".", label="coordinates")
        top, beta = TOP_SHARES[1], self.beta[TOP_SHARES[1]]
        corner = self.sizes[int((1 - top) * (len(self.sizes) - 1))]
        line = np.array([corner, self.sizes[-1]])
        ax.loglog(line, top * (line / corner) ** -beta, label=f"exponent {beta:.2f}")
        ax.set(xlabel="size of the noise (median 1)", ylabel="share of larger ones")
        ax.legend()
        return ax


def tail_report(g: ArrayLike, *, N: int | None = None, rng: RNGLike = None) -> TailReport:
    """Look at gradient samples, and recommend the number of blocks and the clipping level.

    Parameters
    ----------
    g : array_like of shape (K, n), K ≥ 64, or Tensor
        Independent gradients at one point. Noise is taken about the coordinates' medians.
    N : int, optional
        Gradients per step, by default 15 or K if that is less.
    rng : int, Generator or None

    Returns
    -------
    TailReport

    Raises
    ------
    ValueError
        If there are fewer than 64 samples that differ, or one is not finite.

    Notes
    -----
    O(K n log K). The plan takes Hill's exponent as β where it says that there is no mean, the
    tail index as α, and the skewness as the weight of the skewed part: a rule of ours.

    References
    ----------
    "Clipped optimization with median-of-means gradients", NeurIPS 2026.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.training import tail_report
    >>> noise = np.random.default_rng(0).standard_cauchy((1000, 20))
    >>> report = tail_report(noise, rng=0)
    >>> report.plan.k, 0.8 < report.beta[0.05] < 1.2
    (15, True)
    """
    stream = as_generator(rng)
    given: Any = g.detach().cpu().double() if hasattr(g, "detach") else g
    samples = check_array("g", given, shape=("K", "n"))
    K = check_enough("g", len(samples))
    N = min(15, K) if N is None else check_integer("N", N, at_least=1, at_most=K)
    noise = samples - np.median(samples, axis=0)
    live = np.median(np.abs(noise), axis=0) > 0
    if not live.any():
        raise ValueError("g must hold samples that differ, got no noise in any coordinate")
    noise = noise[:, live]
    sizes = np.abs(noise) / np.median(np.abs(noise), axis=0)
    beta = {share: _hill(sizes, share) for share in TOP_SHARES}
    alpha = tail_index(noise, rng=stream)
    skewness = quantile_skewness(noise)
    exponent = beta[TOP_SHARES[1]]
    plan = choose_blocks(
        N,
        beta=min(exponent, 1.0) if exponent < NO_MEAN else None,
        alpha=min(max(alpha.value, 1.01), 2.0) if skewness.low > 0 else None,
        skew_weight=min(skewness.value, 1.0) if skewness.low > 0 else 0.0,
    )
    norms = [
        float(np.linalg.norm(block_median(samples[stream.integers(0, K, N)], plan.k)))
        for _ in range(SPLITS)
    ]
    return TailReport(
        beta,
        alpha,
        skewness,
        plan,
        AUTO_FACTOR * float(np.median(norms)),
        np.sort(sizes, axis=None),
    )


def _hill(sizes: NDArray[np.float64], share: float) -> float:
    """Return the median over coordinates of Hill's exponent."""
    k = math.ceil(share * len(sizes))
    ordered = np.sort(sizes, axis=0)[::-1]
    with np.errstate(divide="ignore"):
        excess = mean_log_excess(ordered, k)
    return float(np.median(1 / np.maximum(excess, np.finfo(np.float64).tiny)))
