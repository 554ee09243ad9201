"""What the solvers of a round-limited problem share: asking, the best point, the gap, the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.convex.lp_geometry import LpBall
from thalweg.convex.round_oracle import RoundOracle

Vector = NDArray[np.float64]
Array = NDArray[np.float64]


class Finished(Exception):  # noqa: N818 - it ends a solver, it is no error
    """Rounds are spent, the gap is closed, or the callback wants to stop."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class AveragedCuts:
    """A lower bound of a convex function over a ball: the minimum of averaged linearizations.

    f(x) ≥ Σ wᵢ (f(xᵢ) + ⟨gᵢ, x - xᵢ⟩) / Σ wᵢ for weights ≥ 0, and the right side has its least
    value over the ball in closed form.
    """

    def __init__(self, ball: LpBall) -> None:
        self.ball = ball
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.weight, self.value, self.slope = 0.0, 0.0, np.zeros_like(self.ball.center)

    def add(self, points: Array, values: Vector, gradients: Array, weight: float) -> float:
        """Take in a batch, each point with the same share of ``weight``; return the bound."""
        at_center = values - np.einsum("qd,qd->q", gradients, points - self.ball.center)
        self.weight += weight
        self.value += weight * float(at_center.mean())
        self.slope += weight * gradients.mean(axis=0)
        return self.ball.minimum(self.slope / self.weight, self.value / self.weight)


@dataclass
class RoundProgress:
    """The state of a run that every solver keeps.

    Attributes
    ----------
    oracle : RoundOracle
    ball : LpBall
    eps : float
        The gap to reach.
    width : int
        Queries a round.
    max_rounds : int
    noisy : bool
        Values have noise: the best of many would be biased, the last candidate is kept.
    report : callable or None
        Called after each round with named results.
    best_x, best_fun, lower : ndarray, float, float
        The best feasible point that was evaluated, and a lower bound of the minimum.
    """

    oracle: RoundOracle
    ball: LpBall
    eps: float
    width: int
    max_rounds: int
    noisy: bool
    report: Callable[..., Any] | None
    best_x: Vector = field(init=False)
    best_fun: float = field(default=np.inf, init=False)
    lower: float = field(default=-np.inf, init=False)
    history: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.best_x = self.ball.center.copy()
        self.history = {"rounds": [], "queries": [], "fun": [], "gap": []}
        self.first_round, self.first_query = self.oracle.rounds, self.oracle.queries
        # The second is restarted at powers of two and forgets early rounds, which cut badly.
        self.cuts = AveragedCuts(self.ball), AveragedCuts(self.ball)
        self.next_restart = 2

    @property
    def rounds(self) -> int:
        """Rounds of this run."""
        return self.oracle.rounds - self.first_round

    @property
    def queries(self) -> int:
        """Queries of this run."""
        return self.oracle.queries - self.first_query

    @property
    def gap(self) -> float:
        """Upper bound of the error of ``best_x``, for a convex function without noise."""
        return self.best_fun - self.lower

    def ask(
        self, points: Array, *, candidate: Vector | None = None, weight: float = 1.0
    ) -> tuple[Vector, Array]:
        """Spend a round on the points (Q, d), and one query of it on a feasible candidate.

        Returns
        -------
        values : ndarray of shape (Q,)
        gradients : ndarray of shape (Q, d)

        Raises
        ------
        Finished
            Before the round if none is left, and after it if the gap is closed.
        """
        if self.rounds >= self.max_rounds:
            raise Finished(1, "The rounds are spent.")
        asked = points if candidate is None else np.vstack([candidate, points])
        values, gradients = self.oracle(asked)
        self._bound(asked, values, gradients, weight)
        self._keep_best(asked[0], float(values[0]))
        self._record()
        if self.gap <= self.eps and not self.noisy:
            raise Finished(0, "The gap is at most eps.")
        skip = 0 if candidate is None else 1
        return values[skip:], gradients[skip:]

    def _bound(self, points: Array, values: Vector, gradients: Array, weight: float) -> None:
        if self.rounds == self.next_restart:
            self.next_restart *= 2
            self.cuts[1].restart()
        for cuts in self.cuts:
            self.lower = max(self.lower, cuts.add(points, values, gradients, weight))

    def _keep_best(self, x: Vector, value: float) -> None:
        """Keep the first point of a round, which is the candidate or the only one."""
        if self.noisy or (value < self.best_fun and self.ball.holds(x)):
            self.best_x, self.best_fun = x.copy(), value

    def _record(self) -> None:
        gap = self.gap
        for name, value in (
            ("rounds", self.rounds),
            ("queries", self.queries),
            ("fun", self.best_fun),
            ("gap", gap),
        ):
            self.history[name].append(float(value))
        if self.report is None:
            return
        try:
            self.report(
                x=self.best_x, fun=self.best_fun, gap=gap, rounds=self.rounds, nit=self.rounds
            )
        except StopIteration:
            raise Finished(99, "callback raised StopIteration.") from None
