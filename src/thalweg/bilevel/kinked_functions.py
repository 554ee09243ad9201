"""First-order models of functions with kinks, from values, and least norms in hulls of slopes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from thalweg.bilevel.solution_sets import HyperObjective, Mode

Array = NDArray[np.float64]

RETRIES = 8
KINK = 1e-2  # one-sided slopes that differ by more than this, relative to 1 + slope


class Linearization(NamedTuple):
    """φ near a point."""

    point: Array
    value: float
    slope: Array


class CheckedValues:
    """φ at an accuracy, checked and counted."""

    def __init__(self, phi: HyperObjective | Callable[..., float], mode: Mode, tol: float) -> None:
        if not callable(phi):
            raise TypeError(f"phi must be a HyperObjective or callable, got {type(phi).__name__}")
        self.count = 0
        self._rng = np.random.default_rng(0)
        if isinstance(phi, HyperObjective):
            self._call: Callable[[Array], float] = lambda x: phi(x, mode, tol)
        elif "tol" in inspect.signature(phi).parameters:
            self._call = lambda x: phi(x, tol=tol)
        else:
            self._call = phi

    def __call__(self, x: Array) -> float:
        """Return φ(x), or raise `ValueError` if it is not finite."""
        self.count += 1
        value = float(self._call(x))
        if not math.isfinite(value):
            raise ValueError(f"phi must be finite, got {value} at x = {x}")
        return value

    def linearize(self, x: Array, step: float) -> Linearization:
        """Return a first-order model at x, or beside it if a kink is within the step.

        Differences across a kink need not be a subgradient: they mix the sides by a different
        share along each axis.
        """
        for retry in range(RETRIES):
            move = self._rng.standard_normal(len(x))
            move *= 2.0**retry * 2 * step / float(np.linalg.norm(move))
            point = x if retry == 0 else x + move
            value = self(point)
            ahead, behind = np.array(
                [[self(point + sign * step * e) for e in np.eye(len(x))] for sign in (1, -1)]
            )
            slope = (ahead - behind) / (2 * step)
            bend = float(np.max(np.abs(ahead + behind - 2 * value))) / step
            if bend <= KINK * (float(np.linalg.norm(slope)) + 1):
                break
        return Linearization(point, value, slope)


def least_norm_point(gradients: Array) -> Array:
    """Return the point of least norm in the convex hull of the rows.

    Over λ = sd, with d in the simplex, ‖Gᵀλ‖² + (1 - Σλ)² has the minimum a/(1 + a) in s, where
    a = ‖Gᵀd‖²: its minimizer, a nonnegative least-squares problem, has the d of least a.
    """
    scale = float(np.max(np.linalg.norm(gradients, axis=1)))
    if scale == 0:
        return np.zeros(gradients.shape[1])
    stacked = np.vstack((gradients.T / scale, np.ones(len(gradients))))
    weights, _ = nnls(stacked, np.append(np.zeros(gradients.shape[1]), 1.0))
    point: Array = weights / weights.sum() @ gradients
    return point


def norms_between(a: Array, b: Array) -> Array:
    """Return the least norms on the segments between the rows of a and of b."""
    apart = np.sum((b - a) ** 2, axis=1)
    share = np.clip(-np.sum(a * (b - a), axis=1) / np.where(apart > 0, apart, 1.0), 0, 1)
    norms: Array = np.linalg.norm(a + share[:, None] * (b - a), axis=1)
    return norms
