"""The perturbation δ of the dynamic barrier's dual: given, or tied to the gradients' noise."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DECAY = 0.9  # of running means
LEAST_NORM = 1e-12


class Perturbation(Protocol):
    """δ of each step."""

    def at(self, k: int, f: Array) -> float:
        """Return δ of step k, whose estimate of the upper gradient is f."""

    def observe(self, variance: float) -> None:
        """Take in the squared error of a lower gradient, after its step."""


class GivenPerturbation:
    """δ(k + 1)^-r."""

    def __init__(self, delta: float, power: float) -> None:
        self.delta, self.power = delta, power

    def at(self, k: int, f: Array) -> float:
        """Return δ of step k."""
        return self.delta * math.pow(k + 1, -self.power)

    def observe(self, variance: float) -> None:
        """Ignore it."""


class AdaptivePerturbation:
    r"""The larger of what the target accuracy allows and the noise of the lower gradient.

    .. math:: \delta_k = \max\Big\{ \frac{\alpha \epsilon_g^{3+p}}{\|m^f_k\|}, \hat\sigma_k^2 \Big\}

    m is a running mean of the upper gradients and σ² one of the variances of the lower gradients.
    With the first term alone the barrier settles where ‖∇g‖ = ε_g. The variance is that of earlier
    steps: this step's would make δ depend on the very half batch that λ must be independent of.
    """

    def __init__(self, alpha: float, eps_g: float, p: float, variance: float) -> None:
        self.target = alpha * math.pow(eps_g, 3 + p)
        self.variance = variance
        self._mean_f: Array | None = None

    def at(self, k: int, f: Array) -> float:
        """Return δ of step k."""
        before = f if self._mean_f is None else self._mean_f
        self._mean_f = DECAY * before + (1 - DECAY) * f
        size = max(float(np.linalg.norm(self._mean_f)), LEAST_NORM)
        return max(self.target / size, self.variance)

    def observe(self, variance: float) -> None:
        """Take in the variance of a step."""
        self.variance = DECAY * self.variance + (1 - DECAY) * variance
