"""Noise between symmetric without a mean and skewed without a variance, and problems under it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_number
from thalweg.common.optional import requires
from thalweg.tasks.heavy_tails import stable_noise

with requires("peers"):
    from sklearn import datasets

Array = NDArray[np.float64]


@dataclass(frozen=True)
class MixedNoise:
    """A mixture, coordinate by coordinate, of a symmetric and a skewed heavy-tailed law.

    Attributes
    ----------
    beta : float in (0, 2]
        Tail index of the symmetric part, which is β-stable; at 1 and below it has no mean.
    alpha : float > 1
        Tail index of the skewed part, a Pareto law less its mean.
    weight : float in [0, 1]
        Probability of the skewed part.

    Examples
    --------
    >>> noise = MixedNoise(beta=0.8, alpha=1.9, weight=0.3)
    >>> noise.sample((2, 3), np.random.default_rng(0)).shape
    (2, 3)
    """

    beta: float = 0.8
    alpha: float = 1.5
    weight: float = 0.0

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0, at_most=2)
        check_number("alpha", self.alpha, above=1)
        check_number("weight", self.weight, at_least=0, at_most=1)

    def sample(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        """Draw independent noise."""
        if self.weight == 0:
            return stable_noise(self.beta, shape, rng)
        skewed = 1 + rng.pareto(self.alpha, shape) - self.alpha / (self.alpha - 1)
        if self.weight == 1:
            return np.asarray(skewed)
        chosen = rng.random(shape) < self.weight
        return np.where(chosen, skewed, stable_noise(self.beta, shape, rng))


@dataclass(frozen=True)
class NoisyLeastSquares:
    """f(x) = ½ (x - x*)ᵀ H (x - x*), seen through noisy gradients.

    Attributes
    ----------
    H : ndarray of shape (d, d)
    x0, minimizer : ndarray of shape (d,)
    noise : MixedNoise
        Of the coordinates of the gradient; of the labels, if there are ``features``.
    features : ndarray of shape (rows, d), optional
    """

    H: Array
    x0: Array
    minimizer: Array
    noise: MixedNoise
    features: Array | None = None

    def excess(self, x: Array) -> Array:
        """Return f at points (…, d)."""
        away = x - self.minimizer
        return np.asarray((away * (away @ self.H)).sum(axis=-1) / 2)

    def gradients(self, x: Array, n: int, rng: np.random.Generator) -> Array:
        """Return n noisy gradients at each of the points (runs, d), of shape (runs, n, d)."""
        runs, d = x.shape
        away = x - self.minimizer
        if self.features is None:
            return np.asarray((away @ self.H)[:, None] + self.noise.sample((runs, n, d), rng))
        rows = self.features[rng.integers(0, len(self.features), (runs, n))]
        residual = np.einsum("rnd,rd->rn", rows, away) - self.noise.sample((runs, n), rng)
        return np.asarray(residual[..., None] * rows)


def noisy_quadratic(
    noise: MixedNoise, d: int = 10, condition: float = 10.0, scale: float = 1.0
) -> NoisyLeastSquares:
    """Return a diagonal quadratic with curvatures 1/condition … 1, from 3·1 to 0.

    ``scale`` divides the problem by the noise: the start is 3 · scale.
    """
    curvature = np.geomspace(1 / condition, 1.0, d)
    return NoisyLeastSquares(np.diag(curvature), np.full(d, 3.0 * scale), np.zeros(d), noise)


@lru_cache
def noisy_diabetes(noise: MixedNoise) -> NoisyLeastSquares:
    """Return scikit-learn's diabetes regression, standardized, with fresh label noise at each draw.

    Rows are drawn with replacement, and labels are those of the clean least-squares solution plus
    noise: the excess is over that solution.

    Examples
    --------
    >>> problem = noisy_diabetes(MixedNoise(beta=0.8))
    >>> float(problem.excess(problem.minimizer))
    0.0
    """
    data = datasets.load_diabetes()
    features = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    target = (data.target - data.target.mean()) / data.target.std()
    solution = np.linalg.lstsq(features, target, rcond=None)[0]
    H = features.T @ features / len(features)
    return NoisyLeastSquares(H, np.zeros(features.shape[1]), solution, noise, features)
