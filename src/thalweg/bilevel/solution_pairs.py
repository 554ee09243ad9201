"""Pairs of solutions at two points that stand for one between them, and how well they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.solution_sets import SetValuedFollower

Array = NDArray[np.float64]

MOST_SWEEPS = 50


def best_pair(
    follower: SetValuedFollower, x1: Array, x2: Array, theta: float, y: Array
) -> tuple[Array, Array]:
    """Return y₁ in S(x₁) and y₂ in S(x₂) with θy₁ + (1 - θ)y₂ as near to y as can be.

    Alternating minimization of a convex quadratic over a product of convex sets.
    """
    y1, y2 = follower.project(x1, y), follower.project(x2, y)
    error = math.inf
    for _ in range(MOST_SWEEPS):
        y2 = follower.project(x2, (y - theta * y1) / (1 - theta))
        y1 = follower.project(x1, (y - (1 - theta) * y2) / theta)
        previous, error = error, float(np.linalg.norm(theta * y1 + (1 - theta) * y2 - y))
        if error <= 1e-14 * (1 + np.linalg.norm(y)) or error > (1 - 1e-3) * previous:
            break
    return y1, y2


@dataclass(frozen=True)
class PairRatios:
    """What `SetSmoothnessReport` takes the largest of, at one pair."""

    ratio: float
    naive_ratio: float
    ratio_of_distance: float
    lipschitz: float


@dataclass(frozen=True)
class PairProbe:
    """What is measured at a pair."""

    follower: SetValuedFollower
    thetas: tuple[float, ...]
    spread: float
    noise: float

    def measure(self, x1: Array, x2: Array, seed: np.int64) -> PairRatios:
        """Return the largest ratios over θ and two y, one of them likely on the boundary."""
        follower = self.follower
        found: list[tuple[float, ...]] = []
        distance = float(np.linalg.norm(x1 - x2))
        for theta in self.thetas:
            x = theta * x1 + (1 - theta) * x2
            for y in sampled_solutions(follower, x, seed, (self.spread, 10 * self.spread)):
                y1, y2 = best_pair(follower, x1, x2, theta, y)
                n1, n2 = follower.project(x1, y), follower.project(x2, y)
                unit = theta * (1 - theta) * distance**2 / 2
                found.append(
                    (
                        self._error(theta * y1 + (1 - theta) * y2 - y) / unit,
                        self._error(theta * n1 + (1 - theta) * n2 - y) / unit,
                        float(np.sum((y1 - y2) ** 2)) / distance**2,
                        float(np.linalg.norm(n1 - y)) / ((1 - theta) * distance),
                    )
                )
        return PairRatios(*(float(value) for value in np.max(found, axis=0)))

    def _error(self, rest: Array) -> float:
        return max(float(np.linalg.norm(rest)) - self.noise, 0.0)


def sampled_solutions(
    follower: SetValuedFollower, x: Array, seed: np.int64, spreads: tuple[float, ...]
) -> Iterator[Array]:
    """Yield solutions near and far from the one nearest to zero, the same directions for any x."""
    nearest = nearest_to_zero(follower, x)
    direction = np.random.default_rng(seed).standard_normal(len(nearest))
    scale = 1 + float(np.linalg.norm(nearest))
    for spread in spreads:
        yield follower.project(x, nearest + spread * scale * direction)


def nearest_to_zero(follower: SetValuedFollower, x: Array) -> Array:
    """Return the solution of least norm."""
    return follower.project(x, np.zeros(follower.size(x)))


def projection_noise(
    follower: SetValuedFollower,
    pairs: list[tuple[Array, Array]],
    seeds: NDArray[np.int64],
    spread: float,
) -> float:
    """Return how far apart projections are that should agree: of points on one normal."""
    noise = 0.0
    for (x, _), seed in zip(pairs, seeds, strict=False):
        nearest = nearest_to_zero(follower, x)
        scale = spread * (1 + float(np.linalg.norm(nearest)))
        v = nearest + scale * np.random.default_rng(seed).standard_normal(len(nearest))
        p = follower.project(x, v)
        apart = np.linalg.norm(follower.project(x, p + 2 * (v - p)) - p)
        noise = max(noise, float(apart), 1e-14 * (1 + float(np.linalg.norm(v))))
    return 10 * noise
