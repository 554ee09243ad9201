"""Simulation of bandit agents: one run or many replications, with common random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_finite, check_integer
from thalweg.common.optional import requires
from thalweg.common.progress import progress as progress_bar
from thalweg.common.random import RNGLike, as_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]

PROGRESS_STEPS = 200


class Environment(Protocol):
    """Offers contexts round by round."""

    def round(self, rng: np.random.Generator, /) -> tuple[Array, Array, Array]:
        """Return contexts (K, d), the arms' mean rewards (K,) and their rewards (K,).

        For R replications at once, each has a leading axis of length R. The draws must not
        depend on the agent, so that all agents meet the same rounds for one seed.
        """
        ...


class Agent(Protocol):
    """Chooses arms and learns from their rewards."""

    def select(self, contexts: Any, /) -> Any:
        """Return the arm to play, or those of R runs."""
        ...

    def update(self, contexts: Any, arm: Any, reward: Any, /) -> None:
        """Learn the reward of the arm that was played."""
        ...


@dataclass(frozen=True)
class BanditTrace:
    """What happened in T rounds, of one run or of R. Made by `simulate`.

    Parameters
    ----------
    regret : ndarray of shape (T,) or (R, T)
        The best arm's mean reward minus that of the arm played, per round.
    arms : ndarray of int of shape (T,) or (R, T)
    rewards : ndarray of shape (T,) or (R, T)
    capped : ndarray of bool of shape (T,) or (R, T), or None
        Whether the arm played was on the capped branch, of agents that say so (`EQOL`).
    seconds : float
        Wall time that the agent took, the environment's excluded.
    message : str
        Why the simulation ended.
    """

    regret: Array
    arms: NDArray[np.intp]
    rewards: Array
    capped: NDArray[np.bool_] | None
    seconds: float
    message: str

    @property
    def rounds(self) -> int:
        """The number of rounds that were finished."""
        return int(self.regret.shape[-1])

    @property
    def cumulative_regret(self) -> Array:
        """Regret summed up to each round; shape (T,) or (R, T)."""
        total: Array = self.regret.cumsum(axis=-1)
        return total

    @property
    def total_regret(self) -> Any:
        """Regret of all rounds; a float, or shape (R,)."""
        return self.regret.sum(axis=-1)

    @property
    def capped_share(self) -> Any:
        """The share of rounds played on the capped branch, or None; a float, or shape (R,)."""
        return None if self.capped is None else self.capped.mean(axis=-1)

    @property
    def seconds_per_decision(self) -> float:
        """The agent's wall time per round and run, in seconds; NaN without a round."""
        return self.seconds / self.regret.size if self.regret.size else float("nan")

    def __str__(self) -> str:
        branch = "" if self.capped is None else f", {np.mean(self.capped_share):.0%} capped"
        return (
            f"regret {np.mean(self.total_regret):.4g} in {self.rounds} rounds{branch}, "
            f"{1e6 * self.seconds_per_decision:.3g} µs per decision ({self.message})"
        )

    def plot(self, ax: Axes | None = None, *, label: str | None = None) -> Axes:
        """Plot cumulative regret, of several runs the mean and a band of two standard errors."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        t = np.arange(1, self.rounds + 1)
        runs = np.atleast_2d(self.cumulative_regret)
        mean = runs.mean(axis=0)
        (line,) = ax.plot(t, mean, label=label)
        if len(runs) > 1:
            band = 2 * runs.std(axis=0, ddof=1) / np.sqrt(len(runs))
            ax.fill_between(t, mean - band, mean + band, color=line.get_color(), alpha=0.2, lw=0)
        ax.set(xlabel="round", ylabel="cumulative regret")
        return ax


def simulate(
    agent: Agent,
    env: Environment,
    T: int,
    rng: RNGLike = None,
    *,
    callback: Callable[[int, Any], object] | None = None,
    branches: bool = True,
    progress: bool | None = False,
) -> BanditTrace:
    """Let an agent, or a batch of replications, play T rounds and record its regret.

    Parameters
    ----------
    agent : object with ``select(contexts)`` and ``update(contexts, arm, reward)``
        Such as `EQOL`; if it has an attribute ``n_runs`` (`EQOLBatch`, `AgentBatch`) it plays R
        runs at once. It is told nothing but the reward of the arm that it played.
    env : object with ``round(rng)``
        See `Environment`; `thalweg.tasks` has some. For a batch it must draw R rounds at once.
    T : int
        The number of rounds.
    rng : int, numpy.random.Generator or None
        The environment's stream. The agent has its own, so that agents which are simulated with
        the same seed meet the same contexts and the same noise.
    callback : callable, optional
        Called as ``callback(t, cumulative_regret)`` after round t; returning True ends the run.
    branches : bool, default True
        Whether to record which branch of its bonus the arm played was on, for agents that say so.
        It costs a second look at that arm.
    progress : bool or None, default False
        Whether to show a bar; None shows it on a terminal.

    Returns
    -------
    BanditTrace
        Of the rounds that were finished, if Ctrl-C or the callback ended the simulation.

    Raises
    ------
    TypeError, ValueError
        If ``T`` or ``rng`` is not what it must be, or the environment's means are not finite.

    Examples
    --------
    >>> from thalweg.bandits import EQOL, LinUCB
    >>> from thalweg.tasks import fixed_arms_bandit
    >>> env = fixed_arms_bandit(np.random.default_rng(0), n_arms=20, dim=5)
    >>> eqol = simulate(EQOL(5, rng=0), env, 500, rng=1)
    >>> oful = simulate(LinUCB(5, rng=0), env, 500, rng=1)
    >>> bool(eqol.total_regret < oful.total_regret)
    True
    """
    T = check_integer("T", T, at_least=1)
    rng = as_generator(rng)
    play = _Play(agent, T, branches)
    message = "all rounds played"
    steps = max(T // PROGRESS_STEPS, 1)
    try:
        with progress_bar("simulating", total=T, show=progress) as advance:
            for t in range(1, T + 1):
                play.round(*env.round(rng))
                if t % steps == 0:
                    advance(steps)
                if callback is not None and callback(t, play.total):
                    message = "stopped by the callback"
                    break
    except KeyboardInterrupt:
        message = "interrupted"
    return play.trace(message)


class _Play:
    """An agent at play, and the record of its rounds."""

    def __init__(self, agent: Any, T: int, branches: bool) -> None:
        n_runs: int | None = getattr(agent, "n_runs", None)
        runs = () if n_runs is None else (n_runs,)
        self.agent = agent
        self.rows = () if n_runs is None else (np.arange(n_runs),)
        # A batch keeps its statistics, and so the method, in the agent that it replicates.
        scored = getattr(agent, "agent", agent)
        self.is_capped = getattr(scored, "capped", None) if branches else None
        self.regret, self.rewards = np.zeros((T, *runs)), np.zeros((T, *runs))
        self.arms = np.zeros((T, *runs), dtype=np.intp)
        self.capped = np.zeros((T, *runs), dtype=np.bool_)
        self.finished, self.seconds = 0, 0.0
        self.total: Any = np.zeros(runs)[()]

    def round(self, contexts: Array, means: Array, rewards: Array) -> None:
        start = time.perf_counter()
        arm = self.agent.select(contexts)
        self.seconds += time.perf_counter() - start
        played, t = (*self.rows, arm), self.finished
        if self.is_capped is not None:
            self.capped[t] = self.is_capped(contexts[played][..., None, :])[..., 0]
        self.arms[t], self.rewards[t] = arm, rewards[played]
        self.regret[t] = means.max(axis=-1) - means[played]
        start = time.perf_counter()
        self.agent.update(contexts, arm, rewards[played])
        self.seconds += time.perf_counter() - start
        self.total = self.total + self.regret[t]
        self.finished += 1

    def trace(self, message: str) -> BanditTrace:
        done = slice(self.finished)
        return BanditTrace(
            regret=check_finite("means", self.regret[done]).T,
            arms=self.arms[done].T,
            rewards=self.rewards[done].T,
            capped=None if self.is_capped is None else self.capped[done].T,
            seconds=self.seconds,
            message=message,
        )
