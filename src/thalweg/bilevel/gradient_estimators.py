"""Estimates of a gradient along slowly moving points: exact, of a batch, STORM and SPIDER."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.finite_sums import StochasticObjective
from thalweg.common.checks import check_finite

Array = NDArray[np.float64]
BLOCK = 4096  # samples drawn at a time, so that a run draws the same ones however it is divided


class Estimator(Protocol):
    """An estimate of a gradient that is updated with every step."""

    objective: StochasticObjective
    evaluations: int

    def is_exact(self, t: int) -> bool:
        """Return whether step t takes the full gradient."""

    def update(self, t: int, x: Array, previous: Array, alpha: float) -> Array:
        """Return the estimate at x = x_t, where ``previous`` is x_{t-1}, and ``alpha`` is α_t."""


class SampleStream:
    """The samples of each step, independent of how many are asked for at once."""

    def __init__(
        self, objective: StochasticObjective, rng: np.random.Generator, batch: int
    ) -> None:
        self.objective = objective
        self.rng = rng
        self.batch = batch
        self._waiting: NDArray[np.intp] = np.empty((0, batch), dtype=np.intp)

    def one(self) -> Any:
        """Return the samples of the next step."""
        if self.objective.n is None:
            return self.objective.draw(self.rng, self.batch)
        return self.take(1)[0]

    def take(self, steps: int) -> NDArray[np.intp]:
        """Return the indices of the next steps, of shape (steps, batch)."""
        while len(self._waiting) < steps:
            rows = max(1, BLOCK // self.batch)
            drawn = np.asarray(self.objective.draw(self.rng, rows * self.batch))
            self._waiting = np.concatenate([self._waiting, drawn.reshape(rows, self.batch)])
        taken, self._waiting = self._waiting[:steps], self._waiting[steps:]
        return taken


class ExactGradient:
    """The full gradient at every step."""

    def __init__(self, objective: StochasticObjective) -> None:
        self.objective = objective
        self.evaluations = 0

    def is_exact(self, t: int) -> bool:
        """Return True."""
        return True

    def update(self, t: int, x: Array, previous: Array, alpha: float) -> Array:
        """Return ∇f(x)."""
        self.evaluations += self.objective.n or 1
        return full_gradient(self.objective, x)


class MiniBatch:
    """The mean gradient of a fresh batch at every step."""

    def __init__(
        self, objective: StochasticObjective, rng: np.random.Generator, batch: int
    ) -> None:
        self.objective = objective
        self.samples = SampleStream(objective, rng, batch)
        self.evaluations = 0

    def is_exact(self, t: int) -> bool:
        """Return False."""
        return False

    def update(self, t: int, x: Array, previous: Array, alpha: float) -> Array:
        """Return ∇f(x, ξ_t)."""
        self.evaluations += self.samples.batch
        return sample_gradient(self.objective, x, self.samples.one())


class Storm:
    r"""The recursive momentum estimate from one batch per step.

    .. math:: g_t = (1 - \alpha_t) (g_{t-1} - \nabla f(x_{t-1}, \xi_t)) + \nabla f(x_t, \xi_t)

    g_0 is the gradient of a batch of its own size, ``first``, by default that of the others.
    """

    def __init__(
        self,
        objective: StochasticObjective,
        rng: np.random.Generator,
        batch: int = 1,
        first: int | None = None,
    ) -> None:
        self.objective = objective
        self.samples = SampleStream(objective, rng, batch)
        self.first = first
        self.evaluations = 0
        self.estimate: Array = np.empty(0)

    def is_exact(self, t: int) -> bool:
        """Return False."""
        return False

    def update(self, t: int, x: Array, previous: Array, alpha: float) -> Array:
        """Return g_t."""
        if t == 0 and self.first is not None:
            idx = self.objective.draw(self.samples.rng, self.first)
        else:
            idx = self.samples.one()
        if t == 0:
            self.estimate = sample_gradient(self.objective, x, idx)
            self.evaluations += self.first or self.samples.batch
            return self.estimate
        now, before = sample_gradients(self.objective, x, previous, idx)
        self.estimate = (1 - alpha) * (self.estimate - before) + now
        self.evaluations += 2 * self.samples.batch
        return self.estimate


class Spider:
    r"""Full gradients every ``epoch`` steps, and differences along batches in between.

    .. math:: g_t = g_{t-1} + \nabla f_{S_t}(x_t) - \nabla f_{S_t}(x_{t-1})
    """

    def __init__(
        self, objective: StochasticObjective, rng: np.random.Generator, batch: int, epoch: int
    ) -> None:
        self.objective = objective
        self.samples = SampleStream(objective, rng, batch)
        self.epoch = epoch
        self.evaluations = 0
        self.estimate: Array = np.empty(0)

    def is_exact(self, t: int) -> bool:
        """Return whether an epoch begins."""
        return t % self.epoch == 0

    def update(self, t: int, x: Array, previous: Array, alpha: float) -> Array:
        """Return g_t."""
        if self.is_exact(t):
            self.estimate = full_gradient(self.objective, x)
            self.evaluations += self.objective.n or 1
            return self.estimate
        now, before = sample_gradients(self.objective, x, previous, self.samples.one())
        self.estimate = self.estimate + now - before
        self.evaluations += 2 * self.samples.batch
        return self.estimate


def full_gradient(objective: StochasticObjective, x: Array) -> Array:
    """Return ``objective.grad(x)``, if it has the shape of x."""
    return _checked("grad", objective, objective.grad(x), x)


def sample_gradient(objective: StochasticObjective, x: Array, idx: Any) -> Array:
    """Return ``objective.sample_grad(x, idx)``, if it has the shape of x."""
    return _checked("sample_grad", objective, objective.sample_grad(x, idx), x)


def sample_gradients(
    objective: StochasticObjective, x: Array, y: Array, idx: Any
) -> tuple[Array, Array]:
    """Return the gradients of the same samples at two points, at once if the objective can."""
    both = getattr(objective, "sample_grads", None)
    if both is not None:
        at_x, at_y = both(x, y, idx)
        return at_x, at_y
    return sample_gradient(objective, x, idx), sample_gradient(objective, y, idx)


def check_gradient(objective: StochasticObjective, x: Array, name: str) -> Array:
    """Return the full gradient at the start, if it is finite."""
    return check_finite(f"the gradient of {name} at x0", full_gradient(objective, x))


def _checked(kind: str, objective: StochasticObjective, gradient: Any, x: Array) -> Array:
    array: Array = np.asarray(gradient, dtype=np.float64)
    if array.shape != x.shape:
        raise ValueError(
            f"{type(objective).__name__}.{kind} must return the shape of x, {x.shape}, "
            f"got {array.shape}"
        )
    return array
