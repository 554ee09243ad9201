"""Running a perturbed dynamic barrier method: evaluations, stopping, and the result."""

from __future__ import annotations

import math
import time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from thalweg.bilevel.barrier_descent import BarrierDescent
from thalweg.bilevel.dynamic_barrier import BilevelStationarity, bilevel_stationarity
from thalweg.bilevel.finite_sums import StochasticObjective
from thalweg.common.checks import check_integer
from thalweg.common.minimizers import NotFiniteError, Report, optimize_result
from thalweg.common.progress import progress

Array = NDArray[np.float64]
Output = Literal["best", "last", "random"]

EVALUATIONS = 100
MESSAGES = {
    0: "Both residuals of stationarity are small enough.",
    1: "The budget of steps is spent before both residuals are small enough.",
    2: "Interrupted; x is the output of the steps made so far.",
    99: "The callback raised StopIteration.",
}


class BarrierRun:
    """A run of `BarrierDescent`, and what is kept of it.

    Parameters
    ----------
    descent : BarrierDescent
    objectives : tuple of StochasticObjective
        f and g as they were given, at which points are evaluated.
    tolerances : tuple of float
        ε_f and ε_g.
    output : {"best", "last", "random"}
    taken : tuple of int
        Gradients of samples that were taken before the run, of f and g.
    rng : numpy.random.Generator
        Draws the step whose point is the random output.
    """

    def __init__(
        self,
        descent: BarrierDescent,
        objectives: tuple[StochasticObjective, StochasticObjective],
        tolerances: tuple[float, float],
        output: Output,
        taken: tuple[int, int],
        rng: np.random.Generator,
    ) -> None:
        self.descent = descent
        self.objectives, self.tolerances = objectives, tolerances
        self.output, self.taken = output, taken
        maxiter = descent.settings.maxiter
        self._random_step = int(rng.integers(maxiter // 2, maxiter)) + 1
        self._random_point: Array | None = None
        self._best: tuple[float, Array] = (math.inf, descent.x)
        self._rows: list[dict[str, float]] = []
        self._seconds = 0.0

    def finish(
        self, eval_every: int | None, report: Report | None, show_progress: bool | None
    ) -> OptimizeResult:
        """Make the steps and return the result."""
        period = self._period(eval_every)
        status, message = 1, ""
        with np.errstate(over="ignore", invalid="ignore"):
            try:
                status = self._run(period, report, show_progress)
            except StopIteration:
                status = 99
            except KeyboardInterrupt:
                status = 2
            except NotFiniteError as error:
                status, message = 3, f"{error}; x is the output of the steps before."
            if not self._rows or self._rows[-1]["nit"] != self.descent.k:
                self._evaluate()
            return self._result(status, message or MESSAGES[status])

    def _run(self, period: int, report: Report | None, show_progress: bool | None) -> int:
        maxiter = self.descent.settings.maxiter
        with progress("SDBPG", maxiter, show=show_progress) as advance:
            while self.descent.k < maxiter:
                before = self.descent.k
                self._advance_to(min(before + period, maxiter))
                advance(self.descent.k - before)
                row = self._evaluate()
                if report is not None:
                    report(x=self.descent.x, fun=row["fun_upper"], **row)
                if row["eps_f"] <= self.tolerances[0] and row["eps_g"] <= self.tolerances[1]:
                    return 0
        return 1

    def _advance_to(self, stop: int) -> None:
        begin = time.perf_counter()
        try:
            while self.descent.k < stop:
                self.descent.advance()
                if self.descent.k == self._random_step:
                    self._random_point = self.descent.x
        finally:
            self._seconds += time.perf_counter() - begin

    def _period(self, eval_every: int | None) -> int:
        """Return the steps between evaluations, which by default cost no more than the steps."""
        if eval_every is not None:
            return check_integer("eval_every", eval_every, at_least=1)
        descent = self.descent
        rows = sum(objective.n or 1 for objective in self.objectives)
        per_step = sum(
            estimator.samples.batch if hasattr(estimator, "samples") else estimator.objective.n or 1
            for estimator in (descent.upper, *descent.lower.estimators)
        )
        return max(math.ceil(descent.settings.maxiter / EVALUATIONS), math.ceil(rows / per_step))

    def _residuals(self, x: Array) -> BilevelStationarity:
        gf, gg = (np.asarray(objective.grad(x)) for objective in self.objectives)
        if not (np.isfinite(gf).all() and np.isfinite(gg).all()):  # not known, or overflowing
            return BilevelStationarity(math.nan, math.nan, math.nan)
        return bilevel_stationarity(gf.ravel(), gg.ravel())

    def _evaluate(self) -> dict[str, float]:
        descent, (upper, lower) = self.descent, self.objectives
        eps_f, eps_g, _ = self._residuals(descent.x)
        merit = max(eps_f / self.tolerances[0], eps_g / self.tolerances[1])
        if merit < self._best[0]:
            self._best = merit, descent.x
        row = {
            "nit": descent.k,
            "time": self._seconds,
            "fun_upper": float(upper.value(descent.x)),
            "fun_lower": float(lower.value(descent.x)),
            "eps_f": eps_f,
            "eps_g": eps_g,
            "lam": descent.lam,
            "delta": descent.delta,
            "n_grad_upper": descent.upper.evaluations + self.taken[0],
            "n_grad_lower": descent.lower.evaluations + self.taken[1],
        }
        self._rows.append(row)
        return row

    def _point(self) -> Array:
        if self.output == "best" and self._best[0] < math.inf:
            return self._best[1]
        if self.output != "last" and self._random_point is not None:
            return self._random_point
        return self.descent.x

    def _result(self, status: int, message: str) -> OptimizeResult:
        descent, (upper, lower) = self.descent, self.objectives
        x, last = self._point(), self._rows[-1]
        eps_f, eps_g, lam_star = self._residuals(x)
        fun: Any = float(upper.value(x))
        steps = max(descent.k, 1)
        return optimize_result(
            x=x,
            x_last=descent.x,
            fun=fun,
            fun_upper=fun,
            fun_lower=float(lower.value(x)),
            eps_f=eps_f,
            eps_g=eps_g,
            lam_star=lam_star,
            lam=descent.lam,
            lam_max_seen=descent.lam_max_seen,
            delta=descent.delta,
            visits=descent.n_visits / steps,
            active=descent.n_active / steps,
            lr=descent.settings.lr,
            rho=descent.settings.rho,
            nit=descent.k,
            n_grad_upper=int(last["n_grad_upper"]),
            n_grad_lower=int(last["n_grad_lower"]),
            success=status == 0,
            status=status,
            message=message,
            history={name: np.array([row[name] for row in self._rows]) for name in last},
        )
