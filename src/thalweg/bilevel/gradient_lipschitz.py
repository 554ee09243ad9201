"""Estimates of the Lipschitz constant of a stochastic objective's gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.finite_sums import StochasticObjective
from thalweg.bilevel.gradient_estimators import full_gradient, sample_gradient

Array = NDArray[np.float64]

MOST_SAMPLES = 1024
ITERATIONS = 10


def gradient_lipschitz(
    objective: StochasticObjective, x: Array, rng: np.random.Generator
) -> tuple[float, int]:
    """Return ‖∇²f(x)‖ by ten power iterations, and how many sample gradients they took.

    An objective that has ``smoothness()`` is asked instead. Hessian-vector products are central
    differences of the full gradient, or of that of 1024 samples where there are more.
    """
    smoothness: Any = getattr(objective, "smoothness", None)
    if callable(smoothness):
        return float(smoothness()), 0
    samples, exact = _samples(objective, rng)
    v = rng.standard_normal(x.shape)
    v /= np.linalg.norm(v)
    h = np.cbrt(np.finfo(np.float64).eps) * (1 + float(np.linalg.norm(x)))
    size, taken = 0.0, 0
    for _ in range(ITERATIONS):
        ahead, behind = (
            full_gradient(objective, point) if exact else sample_gradient(objective, point, samples)
            for point in (x + h * v, x - h * v)
        )
        taken += 2 * (objective.n if exact and objective.n else MOST_SAMPLES)
        Hv = (ahead - behind) / (2 * h)
        size = float(np.linalg.norm(Hv))
        if size == 0 or not np.isfinite(size):
            break
        v = Hv / size
    return size, taken


def _samples(objective: StochasticObjective, rng: np.random.Generator) -> tuple[Any, bool]:
    if objective.n is not None and objective.n <= MOST_SAMPLES:
        return None, True
    return objective.draw(rng, MOST_SAMPLES), False
