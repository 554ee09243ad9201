"""Fits a linear model with an elastic-net penalty by adaptive proximal gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.convex.adaprox_iteration import ProximalSteps, initial_scale, norm
from thalweg.convex.adaprox_minimize import minimize_adaprox
from thalweg.convex.linear_losses import LinearData, LinearLoss
from thalweg.convex.proximal_operators import ElasticNet

with requires("convex"):
    from sklearn.exceptions import ConvergenceWarning

Array = NDArray[np.float64]

# Steps between two looks at the objective of a nonsmooth loss, whose mappings need not vanish.
LOOK_EVERY = 50


@dataclass(frozen=True)
class PenalizedCoefficients:
    """A penalty on all entries but the last, the intercept, if there is one."""

    penalty: ElasticNet
    fit_intercept: bool

    def __call__(self, v: Array) -> float:
        """Return the penalty."""
        return self.penalty(v[:-1] if self.fit_intercept else v)

    def prox(self, v: Array, alpha: Any) -> Array:
        """Return the prox, which leaves the intercept as it is."""
        moved: Array = self.penalty.prox(v, alpha)
        if self.fit_intercept:
            moved[-1] = v[-1]
        return moved


def check_settings(estimator: Any, losses: tuple[str, ...]) -> None:
    """Check the parameters of an estimator."""
    check_choice("loss", estimator.loss, losses)
    check_number("alpha", estimator.alpha, at_least=0)
    check_number("l1_ratio", estimator.l1_ratio, at_least=0, at_most=1)
    check_choice("accelerated", estimator.accelerated, ("auto", False, True))
    if estimator.D != "auto":
        check_number("D", estimator.D, above=0)
    check_integer("max_iter", estimator.max_iter, at_least=1)
    check_number("tol", estimator.tol, at_least=0)
    if estimator.batch_size is not None:
        check_integer("batch_size", estimator.batch_size, at_least=1)


def normalized(sample_weight: Array) -> Array:
    """Return nonnegative weights with sum 1."""
    if np.any(sample_weight < 0) or not np.any(sample_weight > 0):
        raise ValueError("sample_weight must be nonnegative, and positive somewhere")
    return np.asarray(sample_weight / sample_weight.sum())


def penalty_of(estimator: Any) -> PenalizedCoefficients:
    """Return the penalty of an estimator."""
    return PenalizedCoefficients(
        ElasticNet(estimator.alpha, estimator.l1_ratio), estimator.fit_intercept
    )


def reach(estimator: Any, data: LinearData, y: Array, loss: LinearLoss) -> float:
    """Return D: as "auto" the spread of the targets over that of the features."""
    if estimator.D != "auto":
        return float(estimator.D)
    return loss.spread(y, data.weights) / data.spread


def fit_linear(
    estimator: Any,
    data: LinearData,
    y: Array,
    loss: LinearLoss,
    warm: tuple[Array, float] | None,
    rng: np.random.Generator,
) -> OptimizeResult:
    """Minimize the weighted mean loss plus the penalty.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` is reached first, with exact gradients.
    """
    zero = np.zeros(data.X.shape[1])
    origin = data.pack(zero, loss.constant(y, data.weights) if data.fit_intercept else 0.0)
    D = reach(estimator, data, y, loss)
    penalty = penalty_of(estimator)

    def objective(v: Array) -> tuple[float, Array]:
        p = data.predict(v)
        return float(data.weights @ loss.value(p, y)), data.pull(data.weights * loss.slope(p, y))

    def of_batch(v: Array, rng: np.random.Generator) -> Array:
        rows = rng.integers(len(y), size=estimator.batch_size)
        shares = data.weights[rows] * (len(y) / len(rows))
        return data.pull(shares * loss.slope(data.predict(v, rows), y[rows]), rows)

    noisy = estimator.batch_size is not None
    accelerated = estimator.accelerated
    if accelerated == "auto":
        accelerated = not noisy and not loss.smooth
    result = minimize_adaprox(
        (lambda v: objective(v)[0]) if noisy else objective,
        origin if warm is None else data.pack(*warm),
        jac=of_batch if noisy else True,
        prox=penalty,
        accelerated=accelerated,
        D=D,
        maxiter=estimator.max_iter,
        gtol=estimator.tol * (norm(objective(origin)[1]) or 1.0),
        stochastic=noisy,
        rng=rng,
        callback=None
        if noisy or loss.smooth
        else _stagnation(lambda v: objective(v)[0] + penalty(v), estimator.tol),
    )
    if result.status not in (0, 99):
        warnings.warn(
            f"{type(estimator).__name__} has not converged within max_iter={estimator.max_iter} "
            f"steps: the gradient mapping has norm {result.mapping_norm:.2g}. "
            "Scale the features, or increase max_iter, tol or alpha",
            ConvergenceWarning,
            stacklevel=4,
        )
    result["x"] = _sparsest(result.x, D / result.S, objective, penalty, estimator.tol)
    return result


def partial_step(
    steps: ProximalSteps | None,
    estimator: Any,
    data: LinearData,
    y: Array,
    loss: LinearLoss,
    warm: tuple[Array, float] | None,
) -> ProximalSteps:
    """Make a plain step with all samples as one noisy batch; begin if there are no steps yet.

    Features are taken as they are: ``data`` has no means, for those of batches differ.
    """

    def gradient(v: Array) -> Array:
        return data.pull(data.weights * loss.slope(data.predict(v), y))

    if steps is None:
        start = data.pack(*(warm or (np.zeros(data.X.shape[1]), 0.0)))
        prox = penalty_of(estimator).prox
        D = reach(estimator, data, y, loss)
        steps = ProximalSteps(start, prox, D, initial_scale(start, gradient(start), prox, D))
    steps.propose(gradient(steps.query))
    steps.accept()
    return steps


def _sparsest(
    x: Array,
    alpha: float,
    objective: Callable[[Array], tuple[float, Array]],
    penalty: PenalizedCoefficients,
    tol: float,
) -> Array:
    """Return the solution with the zeros that a last prox gives it, if they cost nothing.

    Averages, the accelerated iterate among them, keep a remainder of every entry that was once
    different from zero. The longer the step, the more zeros.
    """
    loss, gradient = objective(x)
    accepted = loss + penalty(x) + tol / 10 * abs(loss)
    for longer in (1000, 100, 10, 1):
        after_step = penalty.prox(x - longer * alpha * gradient, longer * alpha)
        for candidate in (after_step, np.where(after_step == 0, 0.0, x)):
            if objective(candidate)[0] + penalty(candidate) <= accepted:
                return candidate
    return x


def _stagnation(objective: Callable[[Array], float], tol: float) -> Callable[[Array], None]:
    """Return a callback that stops where the objective falls by less than ``tol`` of itself."""
    steps, last = 0, np.inf

    def look(x: Array) -> None:
        nonlocal steps, last
        steps += 1
        if steps % LOOK_EVERY:
            return
        value = objective(x)
        if last - value < tol * abs(value):
            raise StopIteration
        last = value

    return look
