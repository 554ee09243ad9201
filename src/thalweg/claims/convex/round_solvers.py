"""Solvers that the claims about parallel optimization count the rounds of.

A `Race` answers batches of queries, counts rounds and ends a solver as soon as a feasible point
of the wanted accuracy has been evaluated. A solver is a function of a race, and asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.optimize import linprog

from thalweg.common.optional import requires
from thalweg.convex import minimize_parallel
from thalweg.convex.lp_geometry import LpBall, lp_norm
from thalweg.tasks import WorstCaseRegression

with requires("peers"):
    import cma
    import daqp

Array = NDArray[np.float64]


class Over(Exception):  # noqa: N818 - it ends a solver, it is no error
    """The accuracy is reached or the rounds are spent."""


@dataclass
class Race:
    """A problem over the unit ball of ℓp, an accuracy, and what a round may hold.

    Attributes
    ----------
    problem : WorstCaseRegression
    eps : float
        Accuracy to reach, in units of the function.
    width : int
        Queries a round.
    max_rounds : int
    rng : Generator
    all_rounds : bool
        Go on when the accuracy is reached.
    rounds : int
    errors : list of float
        Error of the best feasible point after each round.
    """

    problem: WorstCaseRegression
    eps: float
    width: int
    max_rounds: int
    rng: np.random.Generator
    all_rounds: bool = False
    rounds: int = 0
    errors: list[float] = field(default_factory=list)

    @property
    def ball(self) -> LpBall:
        """The feasible set."""
        return LpBall(np.zeros(self.problem.dim), 1.0, self.problem.p)

    def ask(self, X: Array) -> tuple[Array, Array]:
        """Spend a round: values (Q,) and subgradients (Q, d) at the points (Q, d)."""
        values, gradients = self.problem.fun_batch(X)
        self.rounds += 1
        inside = lp_norm(X, self.problem.p) <= 1 + 1e-9
        error = values[inside].min(initial=np.inf) - self.problem.minimum
        self.errors.append(float(min(error, self.errors[-1] if self.errors else np.inf)))
        arrived = self.errors[-1] <= self.eps and not self.all_rounds
        if arrived or self.rounds >= self.max_rounds:
            raise Over
        return values, gradients

    def run(self, solver: Callable[..., None], **tuned: Any) -> Race:
        """Have a solver race until it is over, or has what it wants, and return the race."""
        with suppress(Over):
            solver(self, **tuned)
        return self

    @property
    def rounds_needed(self) -> float:
        """Rounds to the accuracy, infinite if they were too few."""
        return float(self.rounds) if self.errors[-1] <= self.eps else math.inf


def thalweg_solver(race: Race, method: str = "auto", width: int | None = None) -> None:
    """Run `minimize_parallel` as shipped."""
    minimize_parallel(
        race.ask,
        np.zeros(race.problem.dim),
        p=race.problem.p,
        eps=race.eps,
        method=method,  # type: ignore[arg-type]
        width=race.width if width is None else width,
        max_rounds=race.max_rounds + 1,
        rng=race.rng,
    )


def subgradient(race: Race, c: float = 1.0) -> None:
    """Step c R₂/√t along normalized subgradients, with Euclidean projections."""
    ball, x = race.ball, np.zeros(race.problem.dim)
    for t in _count():
        _, gradients = race.ask(x[None])
        size = np.linalg.norm(gradients[0])
        x = ball.project(x - c * ball.euclidean_radius / math.sqrt(t) * gradients[0] / size)


def averaged_subgradient(race: Race, c: float = 1.0, spread: float = 2.0) -> None:
    """Step along the mean subgradient of a batch, taken around x at a distance of some ε."""
    ball, x = race.ball, np.zeros(race.problem.dim)
    for t in _count():
        around = x + spread * race.eps * race.rng.standard_normal((race.width - 1, len(x)))
        _, gradients = race.ask(np.vstack([x, around]))
        mean = gradients.mean(axis=0)
        step = c * ball.euclidean_radius / math.sqrt(t) / max(float(np.linalg.norm(mean)), 1e-12)
        x = ball.project(x - step * mean)


def level_bundle(race: Race, queries: int = 1) -> None:
    """Project on the level set halfway between the linear program's bound and the best value.

    Of the proximal level family (Lemaréchal, Nemirovski and Nesterov, 1995), over the box, p = ∞.
    With several queries a round, the others are around the point, 2ε away.
    """
    dim = race.problem.dim
    x, best = np.zeros(dim), math.inf
    rows, offsets = np.empty((0, dim)), np.empty(0)  # f ≥ rows·x - offsets
    for _ in _count():
        around = x + 2 * race.eps * race.rng.standard_normal((queries - 1, dim))
        points = np.vstack([x, np.clip(around, -1, 1)])
        values, gradients = race.ask(points)
        best = min(best, float(values.min()))
        rows = np.vstack([rows, gradients])
        offsets = np.append(offsets, np.einsum("qd,qd->q", gradients, points) - values)
        level = 0.5 * (_model_minimum(rows, offsets) + best)
        x = _project_on_level(x, rows, offsets + level)


def analytic_center(race: Race) -> None:
    """Ask at the analytic center of what all cuts leave of the box, the cutting-plane method.

    Centers that violate ‖x‖_p ≤ 1 are cut without a round. Newton's method starts infeasible, at
    the last center (Boyd and Vandenberghe, section 10.3).
    """
    ball, x, best = race.ball, np.zeros(race.problem.dim), math.inf
    norm_cuts, limits = np.empty((0, len(x))), np.empty(0)
    cuts, offsets = np.empty((0, len(x))), np.empty(0)  # f ≥ cuts·x - offsets
    for _ in _count():
        while not ball.holds(x):
            surface = x / float(lp_norm(x, ball.p))
            normal = np.sign(surface) * np.abs(surface) ** (ball.p - 1)
            norm_cuts = np.vstack([norm_cuts, normal])
            limits = np.append(limits, normal @ surface)
            x = _center(norm_cuts, limits, cuts, offsets + best, x)
        values, gradients = race.ask(x[None])
        best = min(best, float(values[0]))
        cuts = np.vstack([cuts, gradients])
        offsets = np.append(offsets, gradients[0] @ x - values[0])
        x = _center(norm_cuts, limits, cuts, offsets + best, x)


def evolution_strategy(race: Race) -> None:
    """Run CMA-ES with one generation a round, over the box, p = ∞."""
    options = {
        "bounds": [-1, 1],
        "popsize": race.width,
        "seed": int(race.rng.integers(1, 2**31)),
        "verbose": -9,
        "maxiter": race.max_rounds + 1,
        "tolfun": 0,
        "tolx": 0,
        "tolfunhist": 0,
        "tolflatfitness": 10**6,
    }
    strategy = cma.CMAEvolutionStrategy(np.zeros(race.problem.dim), 0.3, options)
    for _ in _count():
        points = strategy.ask()
        values, _ = race.ask(np.array(points))
        strategy.tell(points, values.tolist())


def _count() -> Iterator[int]:
    t = 1
    while True:
        yield t
        t += 1


def _model_minimum(rows: Array, offsets: Array) -> float:
    """Return the least of max(rows·x - offsets) over the box, by HiGHS."""
    dim = rows.shape[1]
    constraints = np.hstack([rows, -np.ones((len(rows), 1))])
    bounds = [(-1.0, 1.0)] * dim + [(None, None)]
    objective = np.append(np.zeros(dim), 1.0)
    result = linprog(objective, constraints, offsets, bounds=bounds)
    assert result.fun is not None, result.message
    return float(result.fun)


def _project_on_level(x: Array, rows: Array, right: Array) -> Array:
    """Return the point of {rows·x ≤ right} ∩ box that is nearest to x, by DAQP."""
    dim = len(x)
    upper = np.append(np.ones(dim), right)
    lower = np.append(-np.ones(dim), np.full(len(right), -1e30))
    sense = np.zeros(len(upper), dtype=np.int32)
    solution, _, status, _ = daqp.solve(np.eye(dim), -x, rows, upper, lower, sense)
    assert status == 1, status
    projected: Array = np.clip(np.asarray(solution), -1, 1)
    return projected


def _center(A: Array, a: Array, B: Array, b: Array, x: Array) -> Array:
    """Return the analytic center of {Ax ≤ a, Bx ≤ b} in the box, from the last one."""
    rows, right = np.vstack([A, B]), np.append(a, b)
    sizes = np.linalg.norm(rows, axis=1)
    return newton_center(rows / sizes[:, None], right / sizes, x)


def newton_center(C: Array, c: Array, x: Array) -> Array:
    """Return the minimizer of -Σ log(c - Cx) - Σ log(1 - x²), by Newton's method.

    Slacks y = c - Cx need not fit at first. The Hessian D + CᵀHC is a diagonal of the box and
    k cuts, inverted by k equations.
    """
    y = c - C @ x
    y = np.where(y > 1e-9, y, 1.0)
    nu = np.zeros(len(c))

    def residual(x: Array, y: Array, nu: Array) -> float:
        parts = (2 * x / (1 - x**2) + C.T @ nu, nu - 1 / y, y + C @ x - c)
        return math.sqrt(sum(float(part @ part) for part in parts))

    before = residual(x, y, nu)
    for _ in range(100):
        slope, curvature = 2 * x / (1 - x**2), 2 * (1 + x**2) / (1 - x**2) ** 2
        gap = y + C @ x - c
        target = -(slope + C.T @ (1 / y + gap / y**2))
        scaled = C / curvature
        small = cho_factor(np.diag(y**2) + scaled @ C.T)
        dx = target / curvature - scaled.T @ cho_solve(small, scaled @ target)
        dy = -C @ dx - gap
        dnu = 1 / y - dy / y**2 - nu
        to_box = np.abs(dx) / (1 - np.sign(dx) * x)
        step = min(1.0, 0.99 / max(float(np.max(-dy / y)), float(to_box.max()), 1e-300))
        after = residual(x + step * dx, y + step * dy, nu + step * dnu)
        while step > 1e-10 and after > (1 - 0.01 * step) * before:
            step /= 2
            after = residual(x + step * dx, y + step * dy, nu + step * dnu)
        x, y, nu, before = x + step * dx, y + step * dy, nu + step * dnu, after
        if before <= 1e-7 * (1 + math.sqrt(float(np.sum(1 / y**2)))):
            break
    return x
