"""Solvers of bilevel problems with many lower solutions, at equal numbers of lower solves."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from thalweg.bilevel import izom
from thalweg.common.optional import requires
from thalweg.tasks import LowRankFit

Array = NDArray[np.float64]

STARTING_SOLVES = 20  # of izom, for the scale of the slope


@dataclass(frozen=True)
class HyperRun:
    """What a solver is given.

    Parameters
    ----------
    phi : callable
        The hyper-objective: `thalweg.bilevel.HyperObjective` or a function of x.
    x0 : ndarray of shape (m,)
    solves : int
        The budget of lower solves.
    rng : numpy.random.Generator
    mode : {"optimistic", "pessimistic"}
    problem : LowRankFit or None
        For methods that use gradients.
    """

    phi: Any
    x0: Array
    solves: int
    rng: np.random.Generator
    mode: Any = "optimistic"
    problem: LowRankFit | None = None

    def fun(self, x: Array) -> float:
        """Return φ(x), as accurately as model-based methods want it."""
        return float(self.phi(x, self.mode, 1e-8))

    @property
    def steps(self) -> int:
        """The steps of izom that fit the budget."""
        return (self.solves - STARTING_SOLVES - 2 * len(self.x0) - 1) // 2


def zeroth_order(run: HyperRun, **options: Any) -> Array:
    """Run `izom`, returning the best iterate by its own noisy values."""
    result = izom(
        run.phi, run.x0, mode=run.mode, maxiter=run.steps, output="best", rng=run.rng, **options
    )
    return np.asarray(result.x)


def cma_es(run: HyperRun, sigma: float) -> Array:
    """Run CMA-ES of the package cma."""
    with requires("peers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import cma
    options = {
        "maxfevals": run.solves,
        "seed": int(run.rng.integers(1, 2**31)),
        "verbose": -9,
        "verb_log": 0,
    }
    return np.asarray(cma.fmin2(run.fun, run.x0, sigma, options)[0])


def py_bobyqa(run: HyperRun, radius: float) -> Array:
    """Run the package Py-BOBYQA."""
    with requires("peers"):
        import pybobyqa
    logging.getLogger("pybobyqa").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pybobyqa.solve(run.fun, run.x0, rhobeg=radius, maxfun=run.solves, do_logging=False)
    return np.asarray(found.x)


def cobyqa(run: HyperRun, radius: float) -> Array:
    """Run SciPy's COBYQA."""
    options: Any = {"initial_tr_radius": radius, "maxfev": run.solves, "final_tr_radius": 1e-8}
    found = minimize(run.fun, run.x0, method="COBYQA", options=options)
    return np.asarray(found.x)


def penalty_hypergradient(run: HyperRun, sigma: float, lr: float) -> Array:
    """Descend along first-order hypergradients of f + σF, two lower solves each.

    With y_σ = argmin f + σF and y* the nearest minimizer of f, the gradient of the penalty's value
    is ∇_x F + (∇_x f(x, y_σ) - ∇_x f(x, y*))/σ, as in BOME and F²SA.
    """
    p = _problem(run)
    pinv, gram = np.linalg.pinv(p.A), p.A.T @ p.A

    def gradient(x: Array, y: Array) -> tuple[Array, Array]:
        y = _newton(
            lambda z: gram @ z - p.A.T @ (p.B @ x) + sigma * p.grad_y(x, z),
            lambda z: gram + sigma * p.hess_y(x, z),
            y,
        )
        excess = (p.A @ y - p.B @ x) - (p.A @ (y - pinv @ (p.A @ y - p.B @ x)) - p.B @ x)
        return p.grad_x(x, y) - p.B.T @ excess / sigma, y

    return _descend(run, gradient, lr, run.solves // 2)


def regularized_implicit_gradient(run: HyperRun, mu: float, lr: float) -> Array:
    """Descend along implicit gradients with the lower level f + μ/2‖y‖², one solve each."""
    p = _problem(run)
    solution = np.linalg.solve(p.A.T @ p.A + mu * np.eye(p.A.shape[1]), p.A.T @ p.B)

    def gradient(x: Array, _: Array) -> tuple[Array, Array]:
        y = solution @ x
        return p.grad_x(x, y) + solution.T @ p.grad_y(x, y), y

    return _descend(run, gradient, lr, run.solves)


def _problem(run: HyperRun) -> LowRankFit:
    assert run.problem is not None
    return run.problem


def _descend(
    run: HyperRun,
    gradient: Callable[[Array, Array], tuple[Array, Array]],
    lr: float,
    steps: int,
) -> Array:
    x, y = run.x0, np.zeros(_problem(run).A.shape[1])
    for _ in range(steps):
        g, y = gradient(x, y)
        x = x - lr * g
        if not np.all(np.isfinite(x)) or np.linalg.norm(x) > 1e6:
            return run.x0
    return x


def _newton(
    gradient: Callable[[Array], Array], hessian: Callable[[Array], Array], y: Array
) -> Array:
    """Return a zero of a monotone gradient, by Newton steps that halve until it falls."""
    g = gradient(y)
    for _ in range(50):
        if np.linalg.norm(g) <= 1e-10:
            break
        step, length = -np.linalg.solve(hessian(y), g), 1.0
        while np.linalg.norm(moved := gradient(y + length * step)) >= np.linalg.norm(g):
            length /= 2
            if length < 1e-8:
                return y
        y, g = y + length * step, moved
    return y
