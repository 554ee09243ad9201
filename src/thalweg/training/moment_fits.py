"""Fits of y ≈ σ₀ᵖ + σ₁ᵖ x with σ₀, σ₁ ≥ 0 to moments of noise and gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.tails import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESAMPLES = 200


@dataclass(frozen=True)
class MomentFit:
    """A nonnegative line y ≈ sigma0ᵖ + sigma1ᵖ · x.

    Attributes
    ----------
    sigma0, sigma1 : Interval
        Their intervals are bootstrapped over the points.
    r2 : float
        The share of the variance of y that the line explains; NaN where y is constant.
    x, y : ndarray
        The points.
    p : float
    """

    sigma0: Interval
    sigma1: Interval
    r2: float
    x: NDArray[np.float64] = field(repr=False)
    y: NDArray[np.float64] = field(repr=False)
    p: float

    def plot(self, ax: Axes | None = None, *, xlabel: str = "x", ylabel: str = "y") -> Axes:
        """Plot the points and the line."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        line = np.array([0.0, 1.05 * self.x.max(initial=0.0)])
        ax.plot(self.x, self.y, "o", label="along the path")
        ax.plot(
            line,
            self.sigma0.value**self.p + self.sigma1.value**self.p * line,
            label=f"fit, R² = {self.r2:.2f}",
        )
        ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, None), ylim=(0, None))
        ax.legend()
        return ax


def fit_line(
    x: ArrayLike, y: ArrayLike, p: float, confidence: float, rng: np.random.Generator
) -> MomentFit:
    """Fit a line with nonnegative coefficients, and bootstrap it over the points."""
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    coefficients = _nonnegative_line(xs, ys)
    resampled = rng.integers(0, len(xs), (RESAMPLES, len(xs)))
    replicates = np.array([_nonnegative_line(xs[rows], ys[rows]) for rows in resampled])
    ends = np.quantile(replicates, [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    # A bootstrap interval of a few points can miss the estimate itself.
    low, high = np.minimum(ends[0], coefficients), np.maximum(ends[1], coefficients)
    roots = [
        Interval(*(float(v) ** (1 / p) for v in row))
        for row in zip(coefficients, low, high, strict=True)
    ]
    residual = ys - coefficients[0] - coefficients[1] * xs
    total = float(((ys - ys.mean()) ** 2).sum())
    r2 = 1 - float((residual**2).sum()) / total if total > 0 else float("nan")
    return MomentFit(roots[0], roots[1], r2, xs, ys, p)


def tensor_moments(
    entries: NDArray[np.float64], sizes: dict[str, int], p: float
) -> dict[str, tuple[float, float]]:
    """Return, per tensor, the means over entries of |∇f|ᵖ and E|ξ|ᵖ.

    ``entries`` has shape (n, sum of sizes). The first mean is that of sgn(ab)|ab|^{p/2} for the
    mean gradients a and b of the two halves: it does not count noise as gradient.
    """
    n = len(entries)
    a, b = entries[: n // 2].mean(axis=0), entries[n // 2 :].mean(axis=0)
    product = a * b
    gradient = np.sign(product) * np.abs(product) ** (p / 2)
    # The mean of n samples takes a share of their spread.
    deviations = (entries - entries.mean(axis=0)) * (n / (n - 1)) ** 0.5
    noise = (np.abs(deviations) ** p).mean(axis=0)
    ends = list(itertools.accumulate(sizes.values()))[:-1]
    parts = zip(sizes, np.split(gradient, ends), np.split(noise, ends), strict=True)
    return {name: (max(float(g.mean()), 0.0), float(x.mean())) for name, g, x in parts}


def matrix_moments(samples: Tensor, p: float) -> tuple[float, float]:
    r"""Return ‖∇f‖_*ᵖ and ‖V‖_*^{p/2} E[tr(Nᵀ V⁻¹ N)^{p/2}] of matrix gradients (n, rows, columns).

    V is diagonal, ``V_ii = (E‖N_i‖ᵖ)^{1/p}`` for the rows of the noise N. The nuclear norm is
    ⟨A, msign(B)⟩ for the mean gradients A and B of the two halves, which leaves out the noise.
    """
    n = len(samples)
    first, second = samples[: n // 2].mean(0), samples[n // 2 :].mean(0)
    left, _, right = torch.linalg.svd(second, full_matrices=False)
    nuclear = max(float((first * (left @ right)).sum()), 0.0)
    noise = (samples - samples.mean(0)) * (n / (n - 1)) ** 0.5
    rows = noise.norm(dim=2)
    diagonal = (rows**p).mean(0) ** (1 / p)
    live = diagonal > 0
    weighted = (rows[:, live] ** 2 / diagonal[live]).sum(1)
    moment = diagonal.sum() ** (p / 2) * (weighted ** (p / 2)).mean()
    return nuclear**p, float(moment)


def _nonnegative_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    # Moments of gradients may be as small as 1e-12: fit in units of the largest.
    x_unit, y_unit = float(np.abs(x).max()) or 1.0, float(np.abs(y).max()) or 1.0
    design = np.column_stack([np.ones_like(x), x / x_unit])
    intercept, slope = nnls(design, y / y_unit)[0]
    return np.array([intercept * y_unit, slope * y_unit / x_unit])
