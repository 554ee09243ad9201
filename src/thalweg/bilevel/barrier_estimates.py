"""Which gradient estimates a perturbed dynamic barrier method takes, and its perturbation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.barrier_descent import LowerEstimates
from thalweg.bilevel.dual_perturbations import (
    AdaptivePerturbation,
    GivenPerturbation,
    Perturbation,
)
from thalweg.bilevel.finite_sums import StochasticObjective
from thalweg.bilevel.gradient_estimators import (
    Estimator,
    ExactGradient,
    MiniBatch,
    Spider,
    Storm,
    sample_gradient,
)
from thalweg.common.checks import check_choice, check_integer

Array = NDArray[np.float64]
Variant = Literal["plain", "pr", "vr-pr"]
VarianceReduction = Literal["auto", "storm", "spider"]
Batch = int | Literal["full"]


@dataclass(frozen=True)
class EstimateSettings:
    """How gradients are estimated; see `sdbpg` for the meaning."""

    variant: Variant
    vr: VarianceReduction
    split: bool
    halves: bool  # whether the lower batch is halved
    batch_upper: Batch
    batch_lower: Batch
    first: int  # samples of the first STORM estimates

    @property
    def deterministic(self) -> bool:
        """Whether no sample is drawn."""
        return self.batch_upper == self.batch_lower == "full"


def check_batches(
    batch_upper: int | str, batch_lower: int | str, *, halves: bool
) -> tuple[Batch, Batch]:
    """Return the batch sizes, of which the lower one is b²/4 where it is "auto".

    Raises
    ------
    TypeError, ValueError
        If one is not as described.
    """
    upper = _check_batch("batch_upper", batch_upper, ("full",), 1)
    lower = _check_batch("batch_lower", batch_lower, ("auto", "full"), 2 if halves else 1)
    if lower == "auto":
        lower = "full" if upper == "full" else max(2, math.ceil(int(upper) ** 2 / 4))
    return upper, lower  # type: ignore[return-value]


def _check_batch(name: str, batch: int | str, words: Sequence[str], at_least: int) -> int | str:
    if isinstance(batch, str):
        return check_choice(name, batch, words)
    return check_integer(name, batch, at_least=at_least)


def upper_estimate(
    objective: StochasticObjective, settings: EstimateSettings, rng: np.random.Generator
) -> Estimator:
    """Return the estimate of the upper gradient."""
    return _estimator(objective, settings, settings.batch_upper, rng, parts=1)


def lower_estimates(
    objective: StochasticObjective, settings: EstimateSettings, rng: np.random.Generator
) -> LowerEstimates:
    """Return the estimates of the lower gradient: two of half batches, or one."""
    parts = 2 if settings.halves and settings.batch_lower != "full" else 1
    estimators = [
        _estimator(objective, settings, settings.batch_lower, stream, parts)
        for stream in rng.spawn(parts)
    ]
    return LowerEstimates(estimators, settings.split and settings.variant != "vr-pr")


def _estimator(
    objective: StochasticObjective,
    settings: EstimateSettings,
    batch: Batch,
    rng: np.random.Generator,
    parts: int,
) -> Estimator:
    if batch == "full":
        return ExactGradient(objective)
    size = math.ceil(int(batch) / parts)
    if settings.variant != "vr-pr":
        return MiniBatch(objective, rng, size)
    if settings.vr == "spider" or (settings.vr == "auto" and objective.n is not None):
        assert objective.n is not None
        root = math.isqrt(objective.n)
        return Spider(objective, rng, math.ceil(root / parts), root)
    return Storm(objective, rng, size, max(size, math.ceil(settings.first / parts)))


def make_perturbation(
    delta: float | Literal["auto"],
    power: float,
    *,
    alpha: float,
    eps_g: float,
    p: float,
    variance: float,
) -> Perturbation:
    """Return δ as a function of the step."""
    if delta == "auto":
        return AdaptivePerturbation(alpha, eps_g, p, variance)
    return GivenPerturbation(float(delta), power)


def batch_variance(
    objective: StochasticObjective, x: Array, size: int, rng: np.random.Generator
) -> float:
    """Return an unbiased estimate of E‖ĝ - ∇g‖² of batches of this size, from two of them."""
    first, second = (sample_gradient(objective, x, objective.draw(rng, size)) for _ in range(2))
    gap: Any = first - second
    return float(np.vdot(gap, gap)) / 2
