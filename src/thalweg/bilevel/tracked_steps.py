"""The state of all agents and their steps: variance reduction, gradient tracking, normalization."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from thalweg.bilevel.agent_gradients import Directions, Rows
from thalweg.common.minimizers import NotFiniteError

Normalize = Literal["agent", "block", "joint"] | None

EPS = 1e-12  # the least length that a direction is divided by
MAX_SKIPPED = 0.05  # share of samples that may be not finite …
JUDGED_FROM = 20  # … from this step on
REPLAY_RTOL = 1e-5  # sums on an accelerator may differ by rounding


@dataclass(frozen=True)
class StepSettings:
    """What a step depends on; see `decentralized_bilevel` for the meaning.

    Parameters
    ----------
    lr : tuple of float
        Step sizes, one for each block.
    schedule : callable
        ``schedule(t)``: the factor of all step sizes in step t.
    beta : float
    correct : bool
        Whether the estimate is STORM's, or the momentum that lacks its correction.
    normalize : {"agent", "block", "joint"} or None
    clip : float or None
    """

    lr: tuple[float, ...]
    schedule: Callable[[int], float]
    beta: float
    correct: bool
    normalize: Normalize
    clip: float | None


class AgentSteps:
    """The agents' variables, estimates and trackers: matrices with a row for each agent.

    The columns are the blocks of variables one after the other, so that an operation on all blocks
    is one operation.

    Parameters
    ----------
    directions : callable
        ``directions([theta, ...], batch)``: the stochastic directions at each theta.
    draw : callable
        ``draw()``: a batch.
    mix : callable
        ``mix(M)``: W M.
    theta : ndarray or Tensor of shape (n, D)
        Where the agents start.
    blocks : sequence of slice
    settings : StepSettings
    """

    def __init__(
        self,
        directions: Directions,
        draw: Callable[[], Any],
        mix: Callable[[Rows], Rows],
        theta: Rows,
        blocks: Sequence[slice],
        settings: StepSettings,
    ) -> None:
        self._directions, self._draw, self._mix = directions, draw, mix
        self.settings = settings
        self.xp = array_module(theta)
        self.blocks = blocks
        self.theta = self.previous = theta
        self.m = self.u = theta * 0
        self.batch: Any = None
        self.t = 0
        self.n_skipped = 0
        self._step_sizes = self.xp.ones_like(theta[:1])
        for block, size in zip(blocks, settings.lr, strict=True):
            self._step_sizes[:, block] = size

    def start(self, samples: int) -> None:
        """Set estimates and trackers to the average direction of some samples.

        The first estimate is remembered for 1/β steps: a single heavy-tailed sample would mislead
        them all.
        """
        total, counts = self.theta * 0, self.theta[:, :1] * 0
        for i in range(samples):
            self.batch = self._draw()
            if i == 0:
                self._check_batch()
            (direction,) = self._clipped(self._directions([self.theta], self.batch))
            finite = finite_rows(direction, self.xp)[:, None]
            total = total + self.xp.where(finite, direction, self.theta * 0)
            counts = counts + finite
        if not bool((counts > 0).all()):
            raise ValueError("the gradients at x0, y0 are not finite in any sample of an agent")
        self.n_skipped = int(samples * len(counts) - counts.sum())
        self.m = self.u = total / counts
        self._move()

    def advance(self) -> None:
        """Make one step.

        Raises
        ------
        NotFiniteError
            If more than 5 % of the samples so far were not finite.
        """
        self.batch = self._draw()
        m = self._estimate()
        self.u = self._mix(self.u + m - self.m)
        self.m = m
        self._move()

    def unit_directions(self) -> Rows:
        """Return the trackers, normalized."""
        normalize = self.settings.normalize
        if normalize is None:
            return self.u
        if normalize == "joint":
            return self.u / row_norms(self.u, self.xp).clip(min=EPS)
        parts = []
        for block in self.blocks:
            norms = row_norms(self.u[:, block], self.xp)
            if normalize == "block":
                norms = (norms * norms).mean() ** 0.5
            parts.append(self.u[:, block] / norms.clip(min=EPS))
        return self.xp.concatenate(parts, axis=1)

    @property
    def _replays(self) -> bool:
        return self.settings.correct and self.settings.beta < 1

    def _move(self) -> None:
        step_sizes = self.settings.schedule(self.t) * self._step_sizes
        self.previous = self.theta
        self.theta = self._mix(self.theta) - step_sizes * self.unit_directions()
        self.t += 1

    def _estimate(self) -> Rows:
        beta = self.settings.beta
        if not self._replays:
            (now,) = self._clipped(self._directions([self.theta], self.batch))
            estimate = now if beta == 1 else beta * now + (1 - beta) * self.m
        else:
            points = [self.theta, self.previous]
            now, before = self._clipped(self._directions(points, self.batch))
            estimate = now + (1 - beta) * (self.m - before)
        finite = finite_rows(estimate, self.xp)
        if bool(finite.all()):
            return estimate
        self._count_skipped(int((~finite).sum()))
        return self.xp.where(finite[:, None], estimate, self.m)

    def _count_skipped(self, agents: int) -> None:
        self.n_skipped += agents
        share = self.n_skipped / (len(self.theta) * (self.t + 1))
        if self.t >= JUDGED_FROM and share > MAX_SKIPPED:
            raise NotFiniteError(f"{share:.0%} of the samples were not finite")

    def _clipped(self, directions: list[Rows]) -> list[Rows]:
        """Return the directions, with the blocks of every agent cut down to the clip's length."""
        clip = self.settings.clip
        if clip is None:
            return directions
        return [
            self.xp.concatenate(
                [
                    direction[:, block]
                    * (clip / row_norms(direction[:, block], self.xp).clip(min=clip))
                    for block in self.blocks
                ],
                axis=1,
            )
            for direction in directions
        ]

    def _check_batch(self) -> None:
        """Refuse batches that do not give the same gradients again, where that is needed."""
        if hasattr(self.batch, "__next__"):
            raise ValueError(
                "sampler must return a batch that can be used again, got an iterator: f and g need "
                "the same mini-batch, and variance reduction the same mini-batch at two points"
            )
        if not self._replays:
            return
        first, second = (self._directions([self.theta], self.batch)[0] for _ in range(2))
        finite = (finite_rows(first, self.xp) & finite_rows(second, self.xp))[:, None]
        difference = self.xp.where(finite, abs(first - second), self.theta * 0)
        scale = self.xp.where(finite, abs(first), self.theta * 0)
        if bool(difference.max() > REPLAY_RTOL * scale.max()):
            raise ValueError(
                "sampler must return a batch that gives the same gradients again: variance "
                "reduction needs the same mini-batch at two points"
            )


def array_module(rows: Rows) -> Any:
    """Return NumPy or torch, of whose functions those that both have are used."""
    if isinstance(rows, np.ndarray):
        return np
    import torch

    return torch


def finite_rows(rows: Rows, xp: Any) -> Any:
    """Return which rows hold neither NaN nor infinity, of shape (n,)."""
    return xp.isfinite(rows).all(axis=1)


def row_norms(rows: Rows, xp: Any) -> Rows:
    """Return the norms of the rows, of shape (n, 1), also where their squares overflow."""
    norms = (rows * rows).sum(axis=1, keepdims=True) ** 0.5
    if bool(xp.isfinite(norms).all()):
        return norms
    largest = xp.amax(abs(rows), axis=1, keepdims=True)
    scaled = rows / largest
    return largest * (scaled * scaled).sum(axis=1, keepdims=True) ** 0.5
