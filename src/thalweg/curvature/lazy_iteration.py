"""The iteration of the lazy semismooth Newton method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.curvature.newton_oracles import NewtonOracle
from thalweg.curvature.norm_metric import NormMetric
from thalweg.curvature.regularization import MOST_LAMBDA, StepRule, rounding_floor
from thalweg.curvature.separable_penalties import SeparablePenalty
from thalweg.curvature.shifted_systems import ShiftedSystem
from thalweg.curvature.trial_steps import CompositeTrial, SmoothTrial

Array = NDArray[np.float64]

FEWEST_STEPS, MOST_STEPS = 1, 20  # between two Hessians, with hess_every="auto"
MEASURED_HESSIANS = 2
EARLY_REFRESH = 3  # rejections of one iteration, with hess_every="auto"
FLAT_REJECTIONS = 40
CONTRADICTIONS = (
    8  # doublings of a λ that outweighs H already, after which it is not H that is wrong
)


@dataclass(frozen=True)
class Iterate:
    """A point, its objective F = f + ψ, f', a subgradient F' and the dual norm of that."""

    x: Array
    value: float
    gradient: Array
    subgradient: Array
    norm: float


class LazyNewton:
    r"""Steps x⁺ = argmin_y ⟨f'(x), y⟩ + ½⟨y-x, H(y-x)⟩ + (λ/2)‖y-x‖² + ψ(y) with a stale H.

    Parameters
    ----------
    oracle : NewtonOracle
    penalty : SeparablePenalty or None
    choose : callable
        Returns the linear solver for the first Hessian.
    metric : NormMetric
    rule : StepRule
    hess_every : int or "auto"
    Lambda : float
    reset : bool
    epsilon : float
        Of the arithmetic in which the objective is computed.
    """

    def __init__(
        self,
        oracle: NewtonOracle,
        penalty: SeparablePenalty | None,
        choose: Callable[[Any], ShiftedSystem],
        metric: NormMetric,
        rule: StepRule,
        *,
        hess_every: int | Literal["auto"],
        Lambda: float,
        reset: bool,
        epsilon: float,
    ) -> None:
        self._oracle, self._penalty, self._choose = oracle, penalty, choose
        self._metric, self._rule, self._epsilon = metric, rule, epsilon
        self._auto = hess_every == "auto"
        self.period = 1 if hess_every == "auto" else hess_every
        self._reset = reset and hess_every != 1
        self.Lambda, self._Lambda_at_refresh = Lambda, math.inf
        self.weight = math.nan
        self.nit = self._age = 0
        self._system: ShiftedSystem | None = None
        self._solve_seconds = math.inf
        self._contradictions = 0
        self.iterate: Iterate

    def start(self, x: Array) -> None:
        """Begin at x, or in the domain of the penalty near x."""
        subgradient: Array | float = 0.0
        if self._penalty is not None:
            # The prox of a short step: v - prox(v) over the step is a subgradient at prox(v).
            a = self._epsilon**0.5
            v = self._penalty.prox(x, a)
            x = self._penalty.prox(v, a)
            subgradient = (v - x) / a
        value = self._oracle.value(x) + self._psi(x)
        gradient = self._oracle.gradient(x)
        self.iterate = self._at(x, value, gradient, subgradient)

    def _at(self, x: Array, value: float, gradient: Array, penalty: Array | float) -> Iterate:
        subgradient = gradient + penalty
        return Iterate(x, value, gradient, subgradient, self._metric.dual_norm(subgradient))

    def _psi(self, x: Array) -> float:
        return 0.0 if self._penalty is None else float(self._penalty.value(x))

    def advance(self) -> int | None:
        """Make a step; return None, 2 where F is flat to rounding, 3 where Λ has no limit."""
        if self._system is None or self._age >= self.period:
            self._refresh()
        rejections = self._contradictions = 0
        while True:
            self.weight = self._rule.weight(self.Lambda, self.iterate.norm)
            trial, flat = self._trial(self.weight)
            if trial is not None:
                self._accept(trial)
                return None
            rejections += 1
            self.Lambda = self._rule.heavier(self.Lambda)
            if self.Lambda > MOST_LAMBDA or (flat and rejections >= FLAT_REJECTIONS):
                return 2 if flat and self._contradictions < CONTRADICTIONS else 3
            if self._auto and rejections == EARLY_REFRESH and self._age > 0:
                self._refresh()

    def _refresh(self) -> None:
        H = self._oracle.hessian(self.iterate.x, self.nit)
        if self._system is None:
            self._system = self._choose(H)
            self._model = self._model_of(self._system)
        self._system.refresh(H)
        self._age = 0
        if self._reset:
            self.Lambda = min(self.Lambda, self._Lambda_at_refresh)
            self._Lambda_at_refresh = self.Lambda

    def _model_of(self, system: Any) -> SmoothTrial | CompositeTrial:
        if self._penalty is None:
            return SmoothTrial(system)
        return CompositeTrial(system, self._penalty, self._metric)

    def _trial(self, weight: float) -> tuple[Iterate | None, bool]:
        """Return the next iterate if it passes, and whether F is flat as far as one can see."""
        old = self.iterate
        begin = time.perf_counter()
        point = self._model.minimize(old.x, old.gradient, old.norm, weight)
        self._solve_seconds = min(self._solve_seconds, time.perf_counter() - begin)
        if point is None or not np.all(np.isfinite(point.x)):
            return None, False
        step = point.x - old.x
        value = self._oracle.value(point.x) + self._psi(point.x)
        decrease = old.value - value
        floor = rounding_floor(old.value, self._epsilon)
        flat = abs(decrease) <= floor
        squared = self._metric.squared_norm(step)
        decreases = self._rule.decreases(decrease, squared, weight)
        if not (decreases or flat):
            # Where λ outweighs H a step is refused only if f has more curvature than H knows of.
            promised = -float(old.subgradient @ step)
            self._contradictions += 10 * floor < promised <= 2 * weight * squared
            return None, False
        gradient = self._oracle.gradient(point.x)
        new = self._at(point.x, value, gradient, point.penalty_subgradient)
        product = -float(new.subgradient @ step)
        passes = decreases and self._rule.turns(product, new.norm**2, weight)
        # Differences of F below rounding say nothing; the gradient still does.
        accepted = math.isfinite(new.norm) and (passes or (flat and new.norm < old.norm))
        return (new if accepted else None), flat

    def _accept(self, new: Iterate) -> None:
        self.iterate = new
        self.Lambda = self._rule.lighter(self.Lambda)
        self.nit += 1
        self._age += 1
        if self._auto and self._oracle.nhev >= MEASURED_HESSIANS and self.period == 1:
            self.period = self._balanced_period()

    def _balanced_period(self) -> int:
        """Return the steps that cost as much as one Hessian."""
        step = self._solve_seconds + 2 * self._oracle.gradient_seconds
        return int(np.clip(round(self._oracle.hessian_seconds / step), FEWEST_STEPS, MOST_STEPS))

    def counts(self) -> dict[str, Any]:
        """Return what has been asked of the function and of linear algebra."""
        return {
            "nit": self.nit,
            "nfev": self._oracle.nfev,
            "njev": self._oracle.njev,
            "nhev": self._oracle.nhev,
            "n_factor": 0 if self._system is None else self._system.n_factor,
        }
