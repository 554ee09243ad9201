"""What claims about proximal gradient methods compare: runs that count gradients, and the solvers.

A solver is called as ``solver(run, **tuned)``. It asks ``run(x)`` for value and gradient of the
loss, which counts, knows ``run.penalty`` (value and prox), ``run.x0`` and ``run.smoothness``, and
shows its iterates by ``run.show(x)``, which does not count, until `Finished` is raised.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires
from thalweg.convex import minimize_adaprox

with requires("peers"):
    from pyproximal.optimization.primal import ProximalGradient

Array = NDArray[np.float64]
Solver = Callable[..., None]


class Finished(Exception):  # noqa: N818 - it is no error
    """The target is reached, or the budget spent."""


class Run:
    """A composite problem, and how far a solver has come with it.

    Parameters
    ----------
    loss : callable
        ``loss(x) -> (value, gradient)``.
    penalty : object
        With a value and a prox.
    x0 : ndarray
    distance : callable
        ``distance(x) -> float ≥ 0``, how far x is from a solution: a gap, or the norm of a mapping.
    target : float
        The run ends at this distance.
    budget : int
        Or after this number of gradients.
    smoothness : float, optional
        L.
    every : int, default 1
        Only every so many gradients does `show` look at the distance.
    extra : object, optional
        What some solvers need besides.
    """

    def __init__(
        self,
        loss: Any,
        penalty: Any,
        x0: Array,
        *,
        distance: Callable[[Array], float],
        target: float,
        budget: int,
        smoothness: float | None = None,
        every: int = 1,
        extra: Any = None,
    ) -> None:
        self.loss, self.penalty, self.x0 = loss, penalty, x0
        self._distance, self.target, self.budget = distance, target, budget
        self.smoothness, self._every = smoothness, every
        self.count, self._looked = 0, -1
        self.distance = distance(x0)
        self.extra = extra
        self._paused = 0.0
        self._began = time.process_time()
        self.curve: list[tuple[float, float, float]] = [(0, 0.0, self.distance)]

    @property
    def seconds(self) -> float:
        """The CPU time of the solver so far, without that of looking at its iterates."""
        return time.process_time() - self._began - self._paused

    def start_clock(self) -> None:
        """Let the time begin now, after what a solver would not count as its work."""
        self._began, self._paused = time.process_time(), 0.0

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return value and gradient of the loss, and count them."""
        if self.count >= self.budget:
            raise Finished
        self.count += 1
        value_and_gradient: tuple[float, Array] = self.loss(x)
        return value_and_gradient

    def show(self, *candidates: Array) -> None:
        """Look at iterates, of which the best counts."""
        if self.count - self._looked < self._every:
            return
        self._looked = self.count
        now = self.seconds
        distances = [self._distance(x) for x in candidates]
        # A diverging run stays infinitely far away.
        self.distance = min((d for d in distances if not math.isnan(d)), default=math.inf)
        self.curve.append((self.count, now, self.distance))
        self._paused += self.seconds - now
        if self.distance <= self.target:
            raise Finished

    def finish(self, solver: Solver, **tuned: Any) -> Run:
        """Have a solver work on it, and return it."""
        quiet = warnings.catch_warnings(action="ignore")
        with np.errstate(all="ignore"), quiet, suppress(Finished, OverflowError):
            solver(self, **tuned)
        return self

    def again(self) -> Run:
        """Return the same run from its start."""
        other = copy.copy(self)
        other.curve = list(self.curve)
        other.start_clock()
        return other

    def adopt(self, other: Run) -> None:
        """Take the outcome of another run for one's own."""
        self.count, self.distance, self.curve = other.count, other.distance, other.curve

    @property
    def cost(self) -> float:
        """The gradients used; where the target is missed, times 1 plus the digits missing."""
        if self.distance <= self.target:
            return float(self.count)
        missing = math.log10(min(self.distance, 1e6 * self.target) / self.target)
        return self.budget * (1 + missing)

    @property
    def cpu_cost(self) -> float:
        """The CPU seconds used; where the target is missed, times 1 plus the digits missing."""
        last = self.curve[-1][1]
        if self.distance <= self.target:
            return last
        missing = math.log10(min(self.distance, 1e6 * self.target) / self.target)
        return max(last, 1e-6) * (1 + missing)


def gap(value: float, optimum: float) -> float:
    """Return how far a value is above the optimum, to rounding; NaN if it is NaN."""
    above = value - optimum
    return 0.0 if above <= 0 else above


def adaprox(run: Run, D: float = 1.0) -> None:
    """As shipped; its output is the better of the last iterate and the average."""
    minimize_adaprox(
        run,
        run.x0,
        prox=run.penalty,
        D=D,
        gtol=0,
        maxiter=10**9,
        callback=lambda intermediate_result: run.show(
            intermediate_result.x, intermediate_result.x_avg
        ),
    )


def adaprox_accelerated(run: Run, D: float = 1.0) -> None:
    """As shipped, accelerated."""
    minimize_adaprox(
        run,
        run.x0,
        prox=run.penalty,
        accelerated=True,
        D=D,
        gtol=0,
        maxiter=10**9,
        callback=lambda x: run.show(x),
    )


class _Smooth:
    """A loss in the form of pyproximal's."""

    def __init__(self, run: Run, values: bool) -> None:
        self._run, self._values = run, values

    def __call__(self, x: Array) -> float:
        """Return the value, which only backtracking uses."""
        return self._run(x)[0] if self._values else 0.0

    def grad(self, x: Array) -> Array:
        """Return the gradient."""
        return self._run(x)[1]


def _pyproximal(run: Run, acceleration: str | None, step: float | None) -> None:
    # Backtracking begins with a step of 1 and evaluates values, which count.
    ProximalGradient(
        _Smooth(run, values=step is None),
        run.penalty,
        run.x0,
        tau=step,
        niter=run.budget + 1,
        acceleration=acceleration,
        callback=lambda x: run.show(x),
    )


def ista(run: Run, step: float | None = None) -> None:
    """Proximal gradient of pyproximal, with step 1/L or a given one."""
    _pyproximal(run, None, _known_step(run, step))


def fista(run: Run, step: float | None = None) -> None:
    """FISTA of pyproximal, with step 1/L or a given one."""
    _pyproximal(run, "fista", _known_step(run, step))


def fista_backtracking(run: Run) -> None:
    """FISTA of pyproximal, whose line search needs no L."""
    _pyproximal(run, "fista", None)


def _known_step(run: Run, step: float | None) -> float:
    if step is not None:
        return step
    assert run.smoothness is not None
    return 1 / run.smoothness


def prox_subgradient(run: Run, c: float) -> None:
    """Take steps c/√k, and show their average, too."""
    _with_steps(run, lambda k, gradient: c / math.sqrt(k))


def adagrad_norm(run: Run, D: float) -> None:
    """Take steps D/√(Σ‖g‖²), the gradient at hand included, and show their average, too."""
    total = 0.0

    def step(k: int, gradient: Array) -> float:
        nonlocal total
        total += float(gradient @ gradient)
        return D / math.sqrt(total) if total > 0 else D

    _with_steps(run, step)


def _with_steps(run: Run, step: Callable[[int, Array], float]) -> None:
    x, average, weight = run.x0, run.x0, 0.0
    k = 0
    while True:
        k += 1
        gradient = run(x)[1]
        alpha = step(k, gradient)
        x = run.penalty.prox(x - alpha * gradient, alpha)
        weight += alpha
        average = average + alpha / weight * (x - average)
        run.show(x, average)


def adapgm(run: Run, step: float = 1.0) -> None:
    """AdaPGM (Latafat et al. 2024): a step from the curvature between the last two iterates."""
    before = previous = step
    x = run.x0
    gradient = run(x)[1]
    while True:
        x_next = run.penalty.prox(x - previous * gradient, previous)
        run.show(x_next)
        gradient_next = run(x_next)[1]
        move, change = x_next - x, gradient_next - gradient
        length = float(move @ move)
        if length == 0:
            raise Finished
        ell = float(change @ move) / length
        squared = float(change @ change) / length
        excess = max(0.0, previous**2 * squared - previous * ell)
        growth = math.sqrt(1 + previous / before)
        shrink = 1 / (2 * math.sqrt(excess)) if excess > 0 else math.inf
        before, previous = previous, previous * min(growth, shrink)
        x, gradient = x_next, gradient_next
