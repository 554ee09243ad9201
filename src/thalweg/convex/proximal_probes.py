"""Whether what is given as a prox behaves like one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_array

Array = NDArray[np.float64]

PROJECTING = 1e-12  # step size at which a prox only moves points from outside of the domain
SPLITS = 3


class CheckedProx:
    """A prox that counts its calls and refuses results of another shape or kind."""

    def __init__(self, prox: Callable[[Any, Any], Any], shape: tuple[int, ...]) -> None:
        self._prox, self._shape = prox, shape
        self.count = 0

    def __call__(self, v: Array, alpha: Any) -> Array:
        """Return prox(v, alpha)."""
        self.count += 1
        moved = self._prox(v, alpha)
        if isinstance(moved, np.ndarray) and moved.dtype == np.float64:
            if moved.shape == self._shape:
                return moved
        elif np.iscomplexobj(moved):
            raise TypeError("prox(v, alpha) must be real, got complex numbers")
        return check_array("prox(v, alpha)", moved, shape=self._shape, finite=False)


def feasible_start(x: Array, prox: Callable[[Array, Any], Array], D: float) -> Array:
    """Return ``x``, or its projection if it is outside of the domain of h.

    Within the domain so small a step moves it by less than rounding does, for the slope of h is
    finite there.
    """
    projected = prox(x.copy(), PROJECTING * D)
    return projected if np.linalg.norm((projected - x).reshape(-1)) > 1e-6 * D else x


def warn_of_expansion(
    prox: Callable[[Array, Any], Array], x: Array, D: float, alpha: float
) -> None:
    """Warn if the prox moves two points apart, which that of a convex function does not."""
    apart = D * _direction(x.shape)
    moved = prox(x + apart, alpha) - prox(x.copy(), alpha)
    # A NaN, from a prox that fails, is not for this check to find.
    if np.linalg.norm(moved.reshape(-1)) > (1 + 1e-6) * np.linalg.norm(apart.reshape(-1)):
        warnings.warn(
            "prox is not nonexpansive: it moved two points apart, so that it is not the prox of a "
            "convex function",
            UserWarning,
            stacklevel=3,
        )


def check_separable(prox: Callable[[Array, Any], Array], x: Array, D: float, alpha: float) -> None:
    """Check that the prox takes one step size for each coordinate, and treats each for itself.

    Raises
    ------
    ValueError
        If it does not.
    """
    message = "per_coordinate needs a separable prox that takes an array alpha of the shape of v"
    alphas = np.full(x.shape, alpha)
    rng = np.random.default_rng(0)
    point = x + D * _direction(x.shape)
    for _ in range(SPLITS):
        half = rng.random(x.shape) < 0.5
        try:
            before = prox(point.copy(), alphas)
            after = prox(np.where(half, point + D, point), alphas)
        except (TypeError, ValueError) as error:
            raise ValueError(message) from error
        if not np.allclose(before[~half], after[~half], rtol=1e-12, atol=1e-12 * D):
            raise ValueError(message)


def _direction(shape: tuple[int, ...]) -> Array:
    direction = np.random.default_rng(0).standard_normal(shape)
    return np.asarray(direction / np.linalg.norm(direction.reshape(-1)))
