"""The average of iterates whose outer objective converges, kept as a running sum."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.vanishing_regularization import Schedule

Array = NDArray[np.float64]


class WeightedAverage:
    r"""The point z of convex runs.

    .. math:: z_t = \frac{1}{S_t} \Big( (t+1)\, t\, \sigma_t\, x_t
              + \sum_{i=m+1}^{t} (i+1)\, i\, (\sigma_{i-1} - \sigma_i)\, x_i \Big)

    S_t is the sum of the weights, none of which is negative, and m the length of the warm-up. z
    does not depend on ς. All weights are floats: the products overflow integers in long runs.
    """

    def __init__(self, schedule: Schedule, shape: tuple[int, ...]) -> None:
        self.schedule = schedule
        self.sum: Array = np.zeros(shape)
        self.total = 0.0

    def weights(self, t: NDArray[np.intp]) -> Array:
        """Return the weights that x_t keeps in the sums, for each of t ≥ 1."""
        i = np.asarray(t, dtype=np.float64)
        falls = self.schedule.sigma(i - 1) - self.schedule.sigma(i)
        return np.where(i > self.schedule.warmup, (i + 1) * i * falls, 0.0)

    def add(self, t: int, x: Array) -> None:
        """Take x_t, t ≥ 1, into the sum."""
        weight = float(self.weights(np.array(t)))
        if weight > 0:
            self.sum += weight * x
            self.total += weight

    def at(self, t: int, x: Array) -> Array | None:
        """Return z_t, given x_t; None before the warm-up is over."""
        if t <= self.schedule.warmup:
            return None
        last = (t + 1.0) * t * float(self.schedule.sigma(t))
        z: Array = (last * x + self.sum) / (last + self.total)
        return z
