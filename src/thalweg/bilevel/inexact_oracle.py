"""Values of a hyper-objective around a point, and the estimate of a gradient from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray

from thalweg.bilevel.solution_sets import HyperObjective, Mode
from thalweg.common.minimizers import NotFiniteError

Array = NDArray[np.float64]


@dataclass
class InexactOracle:
    """φ̃ at several points, with warm starts, and how often it was asked."""

    phi: HyperObjective | Callable[..., float]
    args: tuple[Any, ...]
    mode: Mode
    common: bool
    noise: np.random.Generator
    pool: Parallel
    start: Array | None = None
    count: int = 0
    gap: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.phi, HyperObjective):
            return
        if not callable(self.phi):
            raise TypeError(
                f"phi must be a HyperObjective or callable, got {type(self.phi).__name__}"
            )
        try:
            accepted = set(inspect.signature(self.phi).parameters)
        except (TypeError, ValueError):  # some compiled functions
            accepted = set()
        self._keywords = accepted & {"tol", "rng"}

    @property
    def takes_tol(self) -> bool:
        """Whether φ̃ can be made more accurate."""
        return isinstance(self.phi, HyperObjective) or "tol" in self._keywords

    def values(self, points: Sequence[Array], tol: float) -> Array:
        """Return φ̃ at each point, of which neighbors 2i and 2i + 1 are a ± pair."""
        self.count += len(points)
        if isinstance(self.phi, HyperObjective):
            values = self._solved(self.phi, points, tol)
        else:
            values = self._called(self.phi, points, tol)
        if not np.all(np.isfinite(values)):
            where = points[int(np.argmin(np.isfinite(values)))]
            raise NotFiniteError(np.array2string(where, precision=6, separator=", "))
        return values

    def _solved(self, phi: HyperObjective, points: Sequence[Array], tol: float) -> Array:
        if not self.common:
            values = []
            for point in points:
                found = phi.value(point, self.mode, tol, self.start)
                values.append(found.phi)
                self.start, self.gap = found.y, max(self.gap, found.gap)
            return np.array(values)
        found_all = self._map(phi.value, points, (self.mode, tol, self.start), [{}] * len(points))
        # The points lie around x in pairs, and the mean of solutions is nearly one at their mean.
        self.start = np.mean([found.y for found in found_all], axis=0)
        self.gap = max(self.gap, *(found.gap for found in found_all))
        return np.array([found.phi for found in found_all])

    def _called(self, phi: Callable[..., float], points: Sequence[Array], tol: float) -> Array:
        always = {"tol": tol} if "tol" in self._keywords else {}
        keywords: list[dict[str, Any]] = [always] * len(points)
        if "rng" in self._keywords:
            seeds = self.noise.integers(2**63, size=len(points))
            if self.common:
                seeds = np.repeat(seeds[::2], 2)[: len(points)]
            keywords = [{**always, "rng": np.random.default_rng(seed)} for seed in seeds]
        return np.array([float(v) for v in self._map(phi, points, self.args, keywords)])

    def _map(
        self,
        function: Callable[..., Any],
        points: Sequence[Array],
        args: tuple[Any, ...],
        keywords: list[dict[str, Any]],
    ) -> list[Any]:
        each = zip(points, keywords, strict=True)
        if self.pool.n_jobs == 1:  # joblib's own loop costs more than a small follower
            return [function(point, *args, **named) for point, named in each]
        return list(self.pool(delayed(function)(point, *args, **named) for point, named in each))

    def estimate(self, x: Array, U: Array, eps: float, tol: float) -> tuple[Array, float]:
        """Return G of the directions in the rows of U, and the mean of the values."""
        points = [x + sign * eps * u for u in U for sign in (1.0, -1.0)]
        pairs = self.values(points, tol).reshape(-1, 2)
        slopes = (pairs[:, 0] - pairs[:, 1]) / (2 * eps)
        return len(x) / len(U) * (slopes @ U), float(pairs.sum()) / pairs.size
