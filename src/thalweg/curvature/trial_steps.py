"""The trial point of a regularized Newton step, with and without a separable penalty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.curvature.norm_metric import NormMetric
from thalweg.curvature.separable_penalties import SeparablePenalty
from thalweg.curvature.shifted_systems import PartialSystem, ShiftedSystem

Array = NDArray[np.float64]
NEWTON_STEPS = 20
FISTA_STEPS = 500
POWER_STEPS = 20


class TrialPoint(NamedTuple):
    """A minimizer of the model, and an element of ∂ψ there."""

    x: Array
    penalty_subgradient: Array | float


class SmoothTrial:
    r"""x⁺ = x - (H + λB)⁻¹ f'(x)."""

    def __init__(self, system: ShiftedSystem) -> None:
        self._system = system

    def minimize(self, x: Array, gradient: Array, norm: float, weight: float) -> TrialPoint | None:
        """Return x⁺; None if H + λB is not positive definite."""
        step = self._system.solve(weight, -gradient)
        return None if step is None else TrialPoint(x + step, 0.0)


class CompositeTrial:
    r"""The minimizer of q(y) + ψ(y), q(y) = ⟨f'(x), y-x⟩ + ½⟨y-x, (H + λB)(y-x)⟩.

    A semismooth Newton method for y = prox(y - q'(y)/c): with A = H + λB and the diagonal D of a
    generalized Jacobian of the prox, the coordinates with D = 0 go where the prox puts them, and
    the others solve (A + c(1-D)/D) Δ = -cR/D. It ends after few steps, as the right active set
    gives the solution at once; where it cycles instead, FISTA takes over.
    """

    def __init__(
        self, system: PartialSystem, penalty: SeparablePenalty, metric: NormMetric
    ) -> None:
        self._system, self._penalty, self._metric = system, penalty, metric
        self._last: Array | None = None

    def minimize(self, x: Array, gradient: Array, norm: float, weight: float) -> TrialPoint | None:
        """Return x⁺; None if the model has no minimizer on an active set."""
        scale = self._system.scale() + weight * float(self._metric.diagonal.mean())
        tolerance = 0.1 * min(norm, norm**1.5)
        # The active set of a rejected trial is nearly that of the next, with a larger λ.
        y: Array = x if self._last is None else self._last
        for _ in range(NEWTON_STEPS):
            v = y - (gradient + self._times(y - x, weight)) / scale
            residual = y - self._penalty.prox(v, 1 / scale)
            if self._metric.dual_norm(scale * residual) <= tolerance:
                return self._finish(v, scale)
            change = self._newton_change(v, residual, scale, weight)
            if change is None:
                return None
            y = y + change
        return self._by_fista(x, gradient, weight, tolerance)

    def _times(self, v: Array, weight: float) -> Array:
        return self._system.product(v) + weight * self._metric.apply(v)

    def _finish(self, v: Array, scale: float) -> TrialPoint:
        """Return the prox of v, at which c(v - prox v) is in ∂ψ whatever the accuracy of v."""
        y = self._last = self._penalty.prox(v, 1 / scale)
        return TrialPoint(y, scale * (v - y))

    def _newton_change(
        self, v: Array, residual: Array, scale: float, weight: float
    ) -> Array | None:
        mask = np.asarray(self._penalty.jac_mask(v, 1 / scale), dtype=np.float64)
        change = -residual
        free = np.flatnonzero(mask > 0)
        if len(free) == 0:
            return change
        moved = np.where(mask > 0, 0.0, change)
        D = mask[free]
        right = -scale * residual[free] / D - self._times(moved, weight)[free]
        solution = self._system.solve_on(weight, free, scale * (1 - D) / D, right)
        if solution is None:
            return None
        change[free] = solution
        return change

    def _by_fista(
        self, x: Array, gradient: Array, weight: float, tolerance: float
    ) -> TrialPoint | None:
        lipschitz = self._largest_eigenvalue(weight)
        y = z = x
        t = 1.0
        for _ in range(FISTA_STEPS):
            v = z - (gradient + self._times(z - x, weight)) / lipschitz
            before, y = y, self._penalty.prox(v, 1 / lipschitz)
            if not np.all(np.isfinite(y)):
                return None
            if self._metric.dual_norm(lipschitz * (y - z)) <= tolerance:
                break
            t, last = (1 + np.sqrt(1 + 4 * t * t)) / 2, t
            z = y + (last - 1) / t * (y - before)
        v = y - (gradient + self._times(y - x, weight)) / lipschitz
        return self._finish(v, lipschitz)

    def _largest_eigenvalue(self, weight: float) -> float:
        """Return a bound, of twenty power iterations and a tenth more."""
        v = np.random.default_rng(0).standard_normal(self._metric.d)
        for _ in range(POWER_STEPS):
            v = self._times(v / np.linalg.norm(v), weight)
        return 1.1 * float(np.linalg.norm(v))
