"""The loop of nonlinearly preconditioned gradient descent on NumPy vectors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import approx_fprime

from thalweg.common.checks import check_array
from thalweg.training.precond_kernels import NonlinearPreconditioner, norm

Vector = NDArray[np.float64]
MAX_HALVINGS = 100
STEPS_BEFORE_DOUBLING = 10
ROUNDING = 100 * float(np.finfo(np.float64).eps)  # relative error of f that is tolerated


class Point(NamedTuple):
    """An iterate: x and the gradient of shape (n,), f(x), and the gradient's norm."""

    x: Vector
    fun: float
    gradient: Vector
    norm: float

    @property
    def finite(self) -> bool:
        """Whether f and its gradient are."""
        return math.isfinite(self.fun) and math.isfinite(self.norm)


class Objective:
    """Calls the user's functions, on copies of x, and counts."""

    def __init__(
        self,
        fun: Callable[..., Any],
        jac: Callable[..., ArrayLike] | Literal[True, "2-point"] | None,
        args: tuple[Any, ...],
    ) -> None:
        if type(fun).__name__ == "MemoizeJac":  # SciPy's wrapping of jac=True
            fun, jac = fun.fun, True  # type: ignore[attr-defined]
        if not jac:
            raise ValueError(
                'minimize_nlprecond needs a gradient: jac must be a callable, True or "2-point"'
            )
        if not (callable(jac) or jac is True or jac == "2-point"):
            raise ValueError(f'jac must be a callable, True or "2-point", got {jac!r}')
        self.fun = fun
        self.jac = jac
        self.args = args
        self.nfev = 0
        self.njev = 0
        self._gradient: ArrayLike = ()

    def value(self, x: Vector) -> float:
        """Return f(x), and with ``jac=True`` keep the gradient, which came along."""
        self.nfev += 1
        value = self.fun(x.copy(), *self.args)
        if self.jac is True:
            self.njev += 1
            value, self._gradient = value
        return float(np.asarray(value).item())

    def point(self, x: Vector, value: float) -> Point:
        """Return the point x, the last one for which `value` was called."""
        gradient = self._gradient
        if self.jac is not True:
            self.njev += 1
            gradient = self._derivative(x)
        # A copy, for the user's function may return the same array every time.
        vector = check_array("the gradient", np.array(gradient), shape=x.shape, finite=False)
        return Point(x, value, vector, norm(vector))

    def _derivative(self, x: Vector) -> ArrayLike:
        if callable(self.jac):
            return self.jac(x.copy(), *self.args)
        return approx_fprime(x, self.value)


class Descent:
    """Steps ``x⁺ = x - γ ∇φ*(∇f(x)/L̄)`` from a start, with γ fixed or found by backtracking.

    Raises
    ------
    ValueError
        If f or its gradient is not finite at the start.
    """

    def __init__(
        self,
        objective: Objective,
        preconditioner: NonlinearPreconditioner,
        gamma: float | None,
        start: Vector,
    ) -> None:
        self.objective = objective
        self.preconditioner = preconditioner
        self.fixed = gamma is not None
        self.gamma = 1.0 if gamma is None else gamma
        self.nit = 0
        self.point = self.evaluate(start)
        if not self.point.finite:
            raise ValueError(
                "fun and its gradient must be finite at x0, "
                f"got f = {self.point.fun}, norm of the gradient {self.point.norm}"
            )
        self._accepted_in_a_row = 0
        self._spare = np.empty_like(start)
        self._rows = [self._row()]

    def evaluate(self, x: Vector) -> Point:
        """Return the point at x, of which it keeps no copy."""
        return self.objective.point(x, self.objective.value(x))

    def step(self) -> int:
        """Make one step and return 1, or return the status with which the run ends."""
        x, value, gradient, size = self.point
        scale, direction = self.preconditioner.scaled_direction(gradient, size)
        slope = scale * float(direction @ gradient)
        # Where a step should change f by hardly more than rounding errors, they must neither reject
        # it nor praise it. This is not so because γ is small, which a wrong gradient makes it.
        noise = ROUNDING * abs(value)
        flat = self.gamma * slope <= 10 * noise
        stuck = 4
        for _ in range(1 if self.fixed else MAX_HALVINGS):
            with np.errstate(over="ignore", invalid="ignore"):  # of runs that diverge
                trial = np.multiply(direction, -self.gamma * scale, out=self._spare)
                trial += x
            trial_value = self.objective.value(trial)
            bound = value - 0.5 * self.gamma * slope
            descends = trial_value <= bound + noise if flat else trial_value <= bound < value
            if self.fixed or descends:
                trial_point = self.objective.point(trial, trial_value)
                if trial_point.finite:
                    self._accept(trial_point, flat)
                    return 1
                trial_value = math.nan
            if not math.isfinite(trial_value):
                stuck = 3
            if not self.fixed:
                self.gamma /= 2
                self._accepted_in_a_row = 0
        return stuck

    def trace(self) -> dict[str, NDArray[Any]]:
        """Return f, the gradient's norm, the γ that led there and gradients so far, per iterate."""
        value, size, gamma, njev = (np.array(column) for column in zip(*self._rows, strict=True))
        return {"fun": value, "gradient_norm": size, "gamma": gamma, "njev": njev}

    def _accept(self, point: Point, flat: bool) -> None:
        self._spare = self.point.x
        self.point = point
        self.nit += 1
        self._rows.append(self._row())
        if self.fixed or flat:
            return
        self._accepted_in_a_row += 1
        if self._accepted_in_a_row == STEPS_BEFORE_DOUBLING:
            self._accepted_in_a_row = 0
            self.gamma *= 2

    def _row(self) -> tuple[float, float, float, int]:
        return self.point.fun, self.point.norm, self.gamma, self.objective.njev
