"""Gaussian smoothing from one batch: samples, and gradients nearby by importance weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

Vector = NDArray[np.float64]
Array = NDArray[np.float64]


def normal_samples(count: int, dim: int, antithetic: bool, rng: np.random.Generator) -> Array:
    """Return ``count`` standard normal vectors (count, dim), with their negatives if antithetic.

    Examples
    --------
    >>> Z = normal_samples(4, 2, True, np.random.default_rng(0))
    >>> bool(np.allclose(Z.sum(axis=0), 0))
    True
    """
    if not antithetic or count < 2:
        return rng.standard_normal((count, dim))
    half = rng.standard_normal((count // 2, dim))
    rest = rng.standard_normal((count % 2, dim))
    return np.vstack([half, -half, rest])


@dataclass(frozen=True)
class SmoothedGradients:
    """Subgradients gᵢ at y + ϱzᵢ, from which the smoothed gradient near y is estimated.

    ∇f_ϱ(y + u) = E g(y + u + ϱz): the points y + ϱzᵢ are as likely under the center y + u up to
    the weight exp(⟨zᵢ, u⟩/ϱ - ‖u‖²/2ϱ²), whose second part cancels in the normalized estimate.

    Attributes
    ----------
    samples : ndarray of shape (Q, d)
        zᵢ.
    gradients : ndarray of shape (Q, d)
    width : float
        ϱ.
    """

    samples: Array
    gradients: Array
    width: float

    def weights(self, u: Vector) -> Vector:
        """Return the normalized weights (Q,) of the center y + u."""
        logs = self.samples @ (u / self.width)
        weights: Vector = np.exp(logs - logsumexp(logs))
        return weights

    def at(self, u: Vector) -> tuple[Vector, float]:
        """Return the estimate (d,) at y + u, and the effective sample size 1/Σw²."""
        weights = self.weights(u)
        return weights @ self.gradients, float(1 / np.sum(weights**2))
