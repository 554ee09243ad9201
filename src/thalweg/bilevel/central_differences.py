"""Gradients from values alone, by central differences along the axes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CUBE_ROOT = float(np.finfo(np.float64).eps) ** (1 / 3)  # balances truncation and rounding


def central_gradient(
    fun: Callable[[Array], float | Array], x: Array, step: float | None = None
) -> Array:
    """Return the derivatives of ``fun`` at x along each axis, from 2m values.

    Parameters
    ----------
    fun : callable
        Returns a number, or an array of shape (k,), for a result of shape (m, k).
    x : ndarray of shape (m,)
    step : float, optional
        By default the cube root of the machine precision, relative to each entry above 1.

    Examples
    --------
    >>> central_gradient(lambda x: float(x @ x), np.array([1.0, -2.0])).round(6)
    array([ 2., -4.])
    """
    steps = CUBE_ROOT * np.maximum(1, np.abs(x)) if step is None else np.full(len(x), step)
    return np.array(
        [
            (fun(x + h * e) - fun(x - h * e)) / (2 * h)
            for h, e in zip(steps, np.eye(len(x)), strict=True)
        ]
    )
