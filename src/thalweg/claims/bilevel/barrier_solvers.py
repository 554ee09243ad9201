"""Solvers of simple bilevel problems: the method, and gradient methods of two objectives beside it.

There are no packages of the latter but of Adam; each is written out from its paper. All take the
same number of gradients of samples, counted over both objectives, and return points of the last
fifth of their run. BOME is not among them: where the lower level is the whole variable's, it is
dynamic barrier descent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel import bilevel_stationarity, sdbpg
from thalweg.common.optional import requires
from thalweg.tasks import BarrierProblem

with requires("bilevel"):
    import torch

Array = NDArray[np.float64]
Solver = Callable[..., list[Array]]

POINTS = 100  # of a run, of which the last fifth counts
NEVER = 1e-300  # a tolerance at which no run stops


@dataclass(frozen=True, eq=False)
class BarrierTrial:
    """One run: the problem, the gradients of samples it may take, batches of f and of halves of g.

    Parameters
    ----------
    problem : BarrierProblem
    gradients : int
        Gradients of samples, of both objectives together.
    upper : int
        Samples of f per step.
    half : int
        Samples of g in each of two independent batches per step.
    rng : numpy.random.Generator
    """

    problem: BarrierProblem
    gradients: int
    upper: int
    half: int
    rng: np.random.Generator

    @property
    def steps(self) -> int:
        """Steps that take one batch of f and two of g."""
        return self.gradients // (self.upper + 2 * self.half)

    def batch_gradients(self, x: Array) -> tuple[Array, Array, Array]:
        """Return gradients of f and, of two independent batches, of g."""
        p = self.problem
        f = p.upper.sample_grad(x, p.upper.draw(self.rng, self.upper))
        g, other = (p.lower.sample_grad(x, p.lower.draw(self.rng, self.half)) for _ in range(2))
        return f, g, other


def perturbed(trial: BarrierTrial, *, vr: str = "storm", **settings: Any) -> list[Array]:
    """Return points of `sdbpg`, with its defaults where no settings are given."""
    return perturbed_run(trial, vr=vr, **settings)[0]


def perturbed_run(
    trial: BarrierTrial, *, vr: str = "storm", **settings: Any
) -> tuple[list[Array], Any]:
    """Return points and the result of `sdbpg`."""
    problem, points = trial.problem, []
    steps = max(POINTS, int(trial.gradients / _cost(trial, vr, settings.get("variant"))))
    result = sdbpg(
        problem.upper,
        problem.lower,
        problem.x0,
        vr=vr,  # type: ignore[arg-type]
        batch_upper=trial.upper,
        batch_lower=2 * trial.half,
        maxiter=steps,
        eps_f=NEVER,
        eps_g=NEVER,
        eval_every=math.ceil(steps / POINTS),
        rng=trial.rng,
        callback=lambda x: points.append(x),
        **settings,
    )
    return (points[-POINTS // 5 :] if result.status == 1 else []), result


def _cost(trial: BarrierTrial, vr: str, variant: str | None) -> float:
    """Return the gradients of samples per step of the method."""
    if variant != "vr-pr":
        return trial.upper + 2 * trial.half
    n = trial.problem.lower.n
    if vr == "storm" or n is None:
        return 2 * trial.upper + 4 * trial.half
    root = math.isqrt(n)
    return float(2 * trial.upper + (n + 2 * root * (root - 1)) / root)


def _descend(
    trial: BarrierTrial, direction: Callable[[int, Array, Array, Array], Array], lr: float
) -> list[Array]:
    """Return points of x ← x - lr direction(k, f, g, g'), or none if x becomes infinite."""
    x, points = trial.problem.x0, []
    steps = trial.steps
    period = math.ceil(steps / POINTS)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(steps):
            x = x - lr * direction(k, *trial.batch_gradients(x))
            if (k + 1) % period == 0 or k + 1 == steps:
                if not np.isfinite(x).all():
                    return []
                points.append(x)
    return points[-POINTS // 5 :]


def dynamic_barrier(
    trial: BarrierTrial, *, lr: float, alpha: float = 1.0, lam_max: float = math.inf
) -> list[Array]:
    """Return points of stochastic dynamic barrier gradient descent, whose multiplier may be cut.

    λ = max(0, α - ⟨∇f, ∇g⟩/‖∇g‖²) of one batch, and the step along another's ∇f + λ∇g'; as in C.
    Gong, X. Liu and Q. Liu, "Automatic and harmless regularization with constrained and
    lexicographic optimization: a dynamic barrier approach", NeurIPS 2021, with sample gradients.
    """

    def direction(k: int, f: Array, g: Array, other: Array) -> Array:
        return f + min(barrier(f, g, alpha), lam_max) * other

    return _descend(trial, direction, lr)


def barrier(f: Array, g: Array, alpha: float) -> float:
    """Return the multiplier of the dynamic barrier."""
    square = max(float(g @ g), 1e-300)
    return max(alpha - float(f @ g) / square, 0.0)


def penalty_sgd(trial: BarrierTrial, *, lr: float, rho: float) -> list[Array]:
    """Return points of SGD on f + ρg."""
    return _descend(trial, lambda k, f, g, other: f + rho * (g + other) / 2, lr)


def regularized_gradient(trial: BarrierTrial, *, lr: float, weight: float) -> list[Array]:
    """Return points of the iteratively regularized gradient, x ← x - lr(∇g + w(k + 1)^(-1/4)∇f)."""

    def direction(k: int, f: Array, g: Array, other: Array) -> Array:
        return weight * math.pow(k + 1, -0.25) * f + (g + other) / 2

    return _descend(trial, direction, lr)


def min_norm(trial: BarrierTrial, *, lr: float) -> list[Array]:
    """Return points of MGDA: steps along the shortest convex combination of both gradients."""

    def direction(k: int, f: Array, g: Array, other: Array) -> Array:
        g = (g + other) / 2
        gap = f - g
        share = np.clip(-(gap @ g) / max(float(gap @ gap), 1e-300), 0, 1)
        mixture: Array = share * f + (1 - share) * g
        return mixture

    return _descend(trial, direction, lr)


def projected_conflicts(trial: BarrierTrial, *, lr: float) -> list[Array]:
    """Return points of PCGrad: each gradient without its part against the other one."""

    def direction(k: int, f: Array, g: Array, other: Array) -> Array:
        g = (g + other) / 2
        product = min(float(f @ g), 0.0)
        return (
            f
            - product / max(float(g @ g), 1e-300) * g
            + g
            - product / max(float(f @ f), 1e-300) * f
        )

    return _descend(trial, direction, lr)


def penalty_adam(trial: BarrierTrial, *, lr: float, rho: float) -> list[Array]:
    """Return points of torch's Adam on f + ρg."""
    x = torch.nn.Parameter(torch.from_numpy(trial.problem.x0.copy()))
    optimizer = torch.optim.Adam([x], lr=lr)
    values, points = x.detach().numpy(), []
    period = math.ceil(trial.steps / POINTS)
    for k in range(trial.steps):
        f, g, other = trial.batch_gradients(values)
        x.grad = torch.from_numpy(f + rho * (g + other) / 2)
        optimizer.step()
        if (k + 1) % period == 0 or k + 1 == trial.steps:
            points.append(values.copy())
    return points[-POINTS // 5 :]


@dataclass(frozen=True)
class Residuals:
    """Means of the residuals of stationarity over points of a run, infinite if it has diverged.

    A run has diverged if it has overflown, or if f + g ends above its start: far away, both
    gradients vanish.
    """

    eps_f: float
    eps_g: float

    @property
    def larger(self) -> float:
        """The ε of (ε, ε)-stationarity."""
        return max(self.eps_f, self.eps_g)


def residuals(problem: BarrierProblem, points: list[Array]) -> Residuals:
    """Return the residuals of a run."""
    diverged = Residuals(math.inf, math.inf)
    if not points:
        return diverged

    def both(x: Array) -> float:
        return float(problem.upper.value(x) + problem.lower.value(x))

    if not both(points[-1]) <= both(problem.x0):
        return diverged
    pairs = [bilevel_stationarity(problem.upper.grad(x), problem.lower.grad(x))[:2] for x in points]
    eps_f, eps_g = np.mean(pairs, axis=0)
    return Residuals(float(eps_f), float(eps_g))
