"""A run of many agents: steps, records and what it returns."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from thalweg.bilevel.agent_gradients import CountedGradients, Rows
from thalweg.bilevel.agent_networks import mixer, n_links
from thalweg.bilevel.tracked_steps import AgentSteps
from thalweg.common.minimizers import NotFiniteError, Report, optimize_result
from thalweg.common.progress import Advance, progress

Array = NDArray[np.float64]

MESSAGES = {
    0: "All steps are made.",
    2: "Interrupted; x is that of the last full step.",
    3: "More than 5 % of the samples were not finite; x is that of the step before.",
    99: "The callback raised StopIteration.",
}
DOMINANT = 2.0  # a ‖∇f‖/λ beyond this multiple of ‖∇g‖ rules the lower level …
PERSISTENT = 0.9  # … if it is so in this share of the records of the second half
FEWEST_RECORDS = 5


class Network:
    """Products with W, and the messages they cost.

    Parameters
    ----------
    W : ndarray or sparse array of shape (n, n)
    comm : callable or None
        What to take instead of the product.
    like : ndarray or Tensor
        What kind of matrices are mixed.
    """

    def __init__(self, W: Any, comm: Callable[[Any], Any] | None, like: Rows) -> None:
        self._mix = mixer(W, like) if comm is None else comm
        self._links = n_links(W)
        self._bits = 8 * like.itemsize
        self.n_messages = 0
        self.bits_sent = 0

    def mix(self, rows: Rows) -> Rows:
        """Return W M."""
        self.n_messages += self._links
        self.bits_sent += self._links * rows.shape[1] * self._bits
        return self._mix(rows)


class DecentralizedRun:
    """The loop around the steps.

    Parameters
    ----------
    steps : AgentSteps
    gradients : CountedGradients
    network : Network
    maxiter : int
    penalty : float or None
        For the check that it is not too small.
    """

    def __init__(
        self,
        steps: AgentSteps,
        gradients: CountedGradients,
        network: Network,
        maxiter: int,
        penalty: float | None,
    ) -> None:
        self.steps, self.gradients, self.network = steps, gradients, network
        self.maxiter, self.penalty = maxiter, penalty
        self._late = 0  # steps in the averages over the last quarter
        self._late_mean = steps.theta[0] * 0
        self._late_norm = 0.0
        self._dominated: list[bool] = []

    def run(
        self,
        warm_batch: int,
        record_every: int | None,
        report: Report | None,
        show_progress: bool | None,
    ) -> tuple[int, dict[str, Array]]:
        """Make the steps; return why they end, and the records."""
        rows: list[dict[str, float]] = []
        seconds, status = 0.0, 0
        try:
            with progress("NVR-DSBO", self.maxiter, show=show_progress) as advance:
                for stop in _records(self.maxiter, record_every):
                    begin = time.perf_counter()
                    try:
                        self._advance_to(stop, warm_batch, advance)
                    finally:
                        seconds += time.perf_counter() - begin
                    rows.append(self._record(seconds))
                    self._look_at_penalty()
                    if report is not None:
                        x = self.gradients.x_tree(self.steps.theta[:, self.steps.blocks[0]].mean(0))
                        report(x=x, **rows[-1])
        except StopIteration:
            status = 99
        except KeyboardInterrupt:
            status = 2
        except NotFiniteError:
            status = 3
        if not rows or rows[-1]["nit"] != self.steps.t:
            rows.append(self._record(seconds))
        return status, {name: np.array([row[name] for row in rows]) for name in rows[0]}

    def result(self, status: int, history: dict[str, Array]) -> OptimizeResult:
        """Return what the run has found."""
        self._warn_of_penalty()
        steps, gradients = self.steps, self.gradients
        X, Y, *rest = (steps.theta[:, block] for block in steps.blocks)
        Z = rest[0] if rest else None
        mean = steps.theta.mean(0)
        late = self._late_mean if self._late > 0 else mean
        x_block, y_block = steps.blocks[:2]
        return optimize_result(
            x=gradients.x_tree(mean[x_block]),
            y=gradients.y_tree(mean[y_block]),
            z=None if Z is None else gradients.y_tree(Z.mean(0)),
            x_avg=gradients.x_tree(late[x_block]),
            y_avg=gradients.y_tree(late[y_block]),
            X=X,
            Y=Y,
            Z=Z,
            grad_norm=self._late_norm if self._late > 0 else history["grad_norm"][-1],
            **{name: history[name][-1] for name in history if name.startswith("consensus")},
            lr=steps.settings.lr,
            beta=steps.settings.beta,
            nit=steps.t,
            n_grad_f=gradients.n_f,
            n_grad_g=gradients.n_g,
            n_hvp=gradients.n_hvp,
            n_skipped=steps.n_skipped,
            n_messages=self.network.n_messages,
            bits_sent=self.network.bits_sent,
            success=status == 0,
            status=status,
            message=MESSAGES[status],
            history=history,
        )

    def _advance_to(self, stop: int, warm_batch: int, advance: Advance) -> None:
        steps = self.steps
        while steps.t < stop:
            if steps.t == 0:
                steps.start(warm_batch)
            else:
                steps.advance()
            advance(1)
            if 4 * steps.t > 3 * self.maxiter:
                self._late += 1
                mean = steps.theta.mean(0)
                self._late_mean = self._late_mean + (mean - self._late_mean) / self._late
                self._late_norm += (self._grad_norm() - self._late_norm) / self._late

    def _grad_norm(self) -> float:
        tracker = self.steps.u[:, self.steps.blocks[0]].mean(0)
        return float((tracker * tracker).sum() ** 0.5)

    def _record(self, seconds: float) -> dict[str, float]:
        row = {"nit": self.steps.t, "time": seconds, "grad_norm": self._grad_norm()}
        for name, block in zip("xyz", self.steps.blocks, strict=False):
            variables = self.steps.theta[:, block]
            deviations = variables - variables.mean(0)
            row[f"consensus_{name}"] = float((deviations**2).sum(1).mean() ** 0.5)
        return row | {"bits_sent": self.network.bits_sent}

    def _look_at_penalty(self) -> None:
        """Note whether the mean ∇ᵧf/λ is far longer than the mean ∇ᵧg."""
        if self.penalty is None or 2 * self.steps.t < self.maxiter:
            return
        point = tuple(self.steps.theta[:, block] for block in self.steps.blocks[:2])
        ((_, f_y),) = self.gradients.uncounted.f([point], self.steps.batch)
        ((_, g_y),) = self.gradients.uncounted.g([point], self.steps.batch)
        upper, lower = (float((part.mean(0) ** 2).sum() ** 0.5) for part in (f_y, g_y))
        self._dominated.append(upper / self.penalty > DOMINANT * lower)

    def _warn_of_penalty(self) -> None:
        enough = len(self._dominated) >= FEWEST_RECORDS
        if enough and np.mean(self._dominated) >= PERSISTENT:
            warnings.warn(
                f"the gradient of f in y, divided by the penalty {self.penalty:g}, dominates that "
                "of g to the end: y is not near a minimizer of g; raise penalty",
                stacklevel=4,
            )


def _records(maxiter: int, every: int | None) -> list[int]:
    """Return the steps after which values are recorded: the first, multiples, and the last."""
    spacing = every or max(1, maxiter // 100)
    return sorted({1, *range(spacing, maxiter + 1, spacing), maxiter})
