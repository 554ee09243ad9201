"""The largest curvature of a function whose gradients may be noisy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_finite

Vector = NDArray[np.float64]
POWER_ITERATIONS = 100


def hessian_norm(
    gradient: Callable[[Vector, np.random.Generator], Vector],
    x: Vector,
    rng: np.random.Generator,
) -> float:
    """Return the norm of the Hessian at ``x``, by power iteration on differences of gradients.

    All gradients are computed with the same random numbers, so that their noise cancels as far as
    it does not depend on the point.

    Raises
    ------
    ValueError
        If the gradient is constant or not finite.
    """
    seed = rng.integers(2**63)
    length = 1e-4 * max(1.0, float(np.linalg.norm(x)))
    direction = rng.standard_normal(x.shape)
    direction /= np.linalg.norm(direction)
    curvature = 0.0
    for _ in range(POWER_ITERATIONS):
        ahead = gradient(x + length * direction, np.random.default_rng(seed))
        behind = gradient(x - length * direction, np.random.default_rng(seed))
        image = check_finite("jac(x)", (ahead - behind) / (2 * length))
        previous, curvature = curvature, float(np.linalg.norm(image))
        if curvature == 0:
            raise ValueError("lr must be given, because jac is constant around x0")
        direction = image / curvature
        if abs(curvature - previous) <= 1e-4 * curvature:
            break
    return curvature
