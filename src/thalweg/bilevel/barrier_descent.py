"""The state and the steps of perturbed dynamic barrier gradient methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.dual_perturbations import Perturbation
from thalweg.bilevel.dynamic_barrier import barrier_multiplier
from thalweg.bilevel.gradient_estimators import Estimator
from thalweg.common.minimizers import NotFiniteError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class BarrierSettings:
    """What a step depends on; see `sdbpg` for the meaning."""

    lr: float
    lr_power: float
    alpha: float
    p: float
    rho: float
    rho_power: float
    beta: float | None
    lam_max: float
    maxiter: int

    def step_size(self, k: int) -> float:
        """Return η_k."""
        return self.lr * math.pow(k + 1, -self.lr_power)

    def penalty(self, k: int) -> float:
        """Return ρ_k, which grows up to ρ."""
        return self.rho * math.pow(min(1.0, (k + 1) / self.maxiter), self.rho_power)

    def storm_weight(self, k: int) -> float:
        """Return a_k, the weight of the new gradient in a STORM estimate."""
        return storm_weight(k, self.beta, self.step_size(k))


def storm_weight(k: int, beta: float | None, lr: float) -> float:
    """Return (k + 1)^(-2/3), or min(1, βη²)."""
    return math.pow(k + 1, -2 / 3) if beta is None else min(1.0, beta * lr**2)


class LowerEstimates:
    """The lower gradient for the multiplier and the one for the step.

    They are estimates of two independent halves of a batch (``split``), or both the estimate, or
    the mean of two estimates, whose difference then tells their variance.
    """

    def __init__(self, estimators: Sequence[Estimator], split: bool) -> None:
        self.estimators = tuple(estimators)
        self.split = split
        self.variance = 0.0  # of the one for the multiplier, summed over its entries

    @property
    def evaluations(self) -> int:
        """Gradients of samples so far."""
        return sum(estimator.evaluations for estimator in self.estimators)

    def update(self, k: int, x: Array, previous: Array, weight: float) -> tuple[Array, Array]:
        """Return ĝ and ĝ' at x."""
        first = self.estimators[0].update(k, x, previous, weight)
        if len(self.estimators) == 1:
            return first, first
        second = self._second(k, x, previous, weight, first)
        gap = first - second
        self.variance = float(np.vdot(gap, gap)) / (2 if self.split else 4)
        if self.split:
            return first, second
        mean = (first + second) / 2
        return mean, mean

    def _second(self, k: int, x: Array, previous: Array, weight: float, first: Array) -> Array:
        estimator = self.estimators[1]
        if estimator.is_exact(k):  # a full gradient is the same for both
            estimator.estimate = first  # type: ignore[attr-defined]
            return first
        return estimator.update(k, x, previous, weight)


class BarrierDescent:
    """A run: x_k and x_{k-1}, the estimates of both levels, and what is told of the multipliers."""

    def __init__(
        self,
        upper: Estimator,
        lower: LowerEstimates,
        x0: Array,
        settings: BarrierSettings,
        perturbation: Perturbation,
    ) -> None:
        self.upper, self.lower = upper, lower
        self.x = self.previous = x0
        self.settings = settings
        self.perturbation = perturbation
        self.k = 0
        self.lam = self.lam_max_seen = 0.0
        self.delta = math.nan
        self.n_visits = self.n_active = 0

    def advance(self) -> None:
        """Make one step.

        Raises
        ------
        NotFiniteError
            If a gradient or the step is not finite; x stays what it was.
        """
        s, k, x = self.settings, self.k, self.x
        weight, rho = s.storm_weight(k), s.penalty(k)
        f = self.upper.update(k, x, self.previous, weight)
        g, g_step = self.lower.update(k, x, self.previous, weight)
        delta = self.perturbation.at(k, f)
        fg, gg = float(np.vdot(f, g)), float(np.vdot(g, g))
        lam = min(barrier_multiplier(fg, gg, alpha=s.alpha, delta=delta, p=s.p, rho=rho), s.lam_max)
        direction = f + lam * g_step
        if not math.isfinite(float(np.vdot(direction, direction)) + gg):
            raise NotFiniteError(_culprit(f, g, g_step))
        self.previous, self.x = x, x - s.step_size(k) * direction
        self.perturbation.observe(self.lower.variance)
        self._tell(lam, rho, delta, gg)

    def _tell(self, lam: float, rho: float, delta: float, gg: float) -> None:
        self.k += 1
        self.lam, self.delta = lam, delta
        self.lam_max_seen = max(self.lam_max_seen, lam)
        self.n_visits += gg < delta
        self.n_active += lam > rho


def _culprit(f: Array, g: Array, g_step: Array) -> str:
    for level, gradients in (("upper", (f,)), ("lower", (g, g_step))):
        if not all(np.isfinite(gradient).all() for gradient in gradients):
            return f"A gradient of the {level} level is not finite"
    return "The step is too large to be represented"
