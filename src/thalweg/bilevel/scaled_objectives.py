"""A stochastic objective times a constant."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.finite_sums import StochasticObjective
from thalweg.bilevel.gradient_estimators import full_gradient, sample_gradient, sample_gradients

Array = NDArray[np.float64]


class ScaledObjective:
    """``factor`` times an objective.

    Parameters
    ----------
    objective : StochasticObjective
    factor : float
    """

    def __init__(self, objective: StochasticObjective, factor: float) -> None:
        self.objective, self.factor = objective, factor
        self.n = objective.n

    def draw(self, rng: np.random.Generator, size: int) -> Any:
        """Return samples of the objective."""
        return self.objective.draw(rng, size)

    def value(self, x: Array) -> float:
        """Return the scaled value."""
        return self.factor * self.objective.value(x)

    def grad(self, x: Array) -> Array:
        """Return the scaled gradient."""
        return self.factor * full_gradient(self.objective, x)

    def sample_grad(self, x: Array, idx: Any) -> Array:
        """Return the scaled mean gradient of samples."""
        return self.factor * sample_gradient(self.objective, x, idx)

    def sample_grads(self, x: Array, y: Array, idx: Any) -> tuple[Array, Array]:
        """Return that at two points."""
        at_x, at_y = sample_gradients(self.objective, x, y, idx)
        return self.factor * at_x, self.factor * at_y
