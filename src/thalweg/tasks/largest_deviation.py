"""Worst-case regression: the largest deviation of a linear model, over an ℓp ball."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]


@dataclass(frozen=True)
class WorstCaseRegression:
    """f(x) = ‖Ax - b‖_∞ over the unit ball of ℓp; it is 1-Lipschitz in ℓp.

    Attributes
    ----------
    A : ndarray of shape (m, d)
        Rows of dual norm 1.
    b : ndarray of shape (m,)
    p : float
    known_minimum : float or None
        The least value, if it is known by construction.
    """

    A: Array
    b: Array
    p: float
    known_minimum: float | None = None

    @property
    def dim(self) -> int:
        """Dimension d."""
        return int(self.A.shape[1])

    def fun_batch(self, X: Array) -> tuple[Array, Array]:
        """Return values (Q,) and subgradients (Q, d) at points (Q, d)."""
        residuals = X @ self.A.T - self.b
        worst = np.abs(residuals).argmax(axis=1)
        signed = residuals[np.arange(len(X)), worst]
        return np.abs(signed), np.sign(signed)[:, None] * self.A[worst]

    @property
    def start_value(self) -> float:
        """The value at the center of the ball, 0."""
        return float(np.abs(self.b).max())

    @cached_property
    def minimum(self) -> float:
        """The least value: a linear program by HiGHS for p = ∞, else a cone program."""
        if self.known_minimum is not None:
            return self.known_minimum
        return self._by_linear_program() if math.isinf(self.p) else self._by_cone_program()

    def _by_linear_program(self) -> float:
        ones = np.ones((len(self.A), 1))
        constraints = np.vstack([np.hstack([self.A, -ones]), np.hstack([-self.A, -ones])])
        bounds = [(-1.0, 1.0)] * self.dim + [(0.0, None)]
        objective = np.append(np.zeros(self.dim), 1.0)
        result = linprog(objective, constraints, np.append(self.b, -self.b), bounds=bounds)
        assert result.fun is not None, result.message
        return float(result.fun)

    def _by_cone_program(self) -> float:
        with requires("peers"):
            import cvxpy as cp
        x = cp.Variable(self.dim)
        problem = cp.Problem(
            cp.Minimize(cp.norm(self.A @ x - self.b, "inf")),
            [cp.pnorm(x, self.p, approx=False) <= 1],
        )
        return float(problem.solve(solver=cp.CLARABEL))


def worst_case_regression(
    dim: int, p: float, *, n_rows: int | None = None, inside: bool = False, rng: RNGLike
) -> WorstCaseRegression:
    """Return Gaussian rows and a target from a point outside the ball, so that f* > 0.

    Parameters
    ----------
    dim : int
    p : float in [1, inf]
    n_rows : int, optional
        By default 2d.
    inside : bool, default False
        Take the target from a point of the ball instead, so that f* = 0.
    rng : int or Generator

    Examples
    --------
    >>> problem = worst_case_regression(5, float("inf"), rng=0)
    >>> values, gradients = problem.fun_batch(np.zeros((1, 5)))
    >>> bool(0 < problem.minimum < values[0] == problem.start_value)
    True
    """
    check_integer("dim", dim, at_least=1)
    check_number("p", p, at_least=1, allow_infinite=True)
    stream = as_generator(rng)
    dual = 1.0 if math.isinf(p) else (math.inf if p == 1 else p / (p - 1))
    A = stream.normal(size=(n_rows or 2 * dim, dim))
    A /= np.linalg.norm(A, dual, axis=1, keepdims=True)
    point = stream.normal(size=dim)
    point *= (0.9 if inside else 1.5) / np.linalg.norm(point, p)
    return WorstCaseRegression(A, A @ point, float(p), 0.0 if inside else None)
