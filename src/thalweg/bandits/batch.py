"""Many independent replications of an agent, advanced together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.bandits.linear_methods import LinearAgent
from thalweg.bandits.ridge import RidgeRegression
from thalweg.common.checks import check_array, check_integer
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[Any]


AgentT = TypeVar("AgentT", bound=LinearAgent)


class AgentBatch(Generic[AgentT]):
    """R independent replications of a linear agent: the same rounds for R times as many data.

    Parameters
    ----------
    agent : EQOL, LinUCB, LinTS or LinGreedy
        The agent to replicate: its parameters and random stream are taken over, what it has
        learned is not. The agent itself stays as it is.
    n_runs : int
        The number R of replications.

    Attributes
    ----------
    agent
        The agent with batched statistics: its ``index``, ``predict``, ``bonus``, ... take
        contexts (R, K, d) and return (R, K), its ``theta`` is (R, d), its ``beta`` (R,).

    Notes
    -----
    A round costs R times the flops of one agent and the Python overhead of one. Replications
    draw from one stream, so with random ties they differ from R agents with streams of their
    own; with ``tie_break="first"``, agents that draw nothing else play the very same arms.

    Examples
    --------
    >>> from thalweg.bandits import LinTS
    >>> batch = AgentBatch(LinTS(2, scale=0.3, rng=0), n_runs=3)
    >>> contexts = np.broadcast_to(np.eye(2), (3, 2, 2))
    >>> arms = batch.select(contexts)
    >>> batch.update(contexts, arms, np.array([1.0, 0.0, -1.0]))
    >>> batch.agent.ridge.theta.shape
    (3, 2)
    """

    def __init__(self, agent: AgentT, n_runs: int) -> None:
        self.agent = copy.copy(agent)
        self.agent.ridge = agent.ridge.replicate(n_runs)
        self.n_runs = n_runs

    def select(self, contexts: ArrayLike) -> NDArray[np.intp]:
        """Return the arm of each run, (R,), given contexts (R, K, d)."""
        arms: NDArray[np.intp] = self.agent.choice.best(self.agent.index(contexts))
        return arms

    def update(self, contexts: ArrayLike, arms: ArrayLike | None, rewards: ArrayLike) -> None:
        """Learn the rewards (R,) of the arms (R,) of contexts (R, K, d), or of contexts (R, d).

        Raises
        ------
        IndexError
            If an arm was not offered.
        """
        ridge = self.agent.ridge
        rewards = check_array("rewards", rewards, shape=(self.n_runs,))
        if arms is None:
            shape = (self.n_runs, ridge.dim)
            played = check_array("contexts", contexts, shape=shape, dtype=ridge.dtype)
            ridge.update(played, rewards)
            return
        offered = ridge.check_contexts(contexts)
        if np.asarray(arms).dtype.kind not in "iu":
            raise TypeError(f"arms must be integers, got {np.asarray(arms).dtype}")
        arms = check_array("arms", arms, shape=(self.n_runs,), dtype=np.intp)
        if arms.min() < 0 or arms.max() >= offered.shape[1]:
            raise IndexError(f"arms must be among the {offered.shape[1]} offered, got {arms}")
        ridge.update(offered[np.arange(self.n_runs), arms], rewards)

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` needs to go on bit for bit: arrays, numbers and one string."""
        return self.agent.ridge.get_state() | self.agent.choice.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `get_state` of a batch with the same parameters returned."""
        self.agent.ridge.set_state(state)
        self.agent.choice.set_state(state)


class AgentGroup:
    """R agents of any kind, one per replication: an `AgentBatch` for what cannot be batched.

    Parameters
    ----------
    agents : sequence of objects with ``select(contexts)`` and ``update(contexts, arm, reward)``

    Notes
    -----
    A round costs what the R agents cost one after another.

    Examples
    --------
    >>> from thalweg.bandits import LinGreedy
    >>> group = AgentGroup([LinGreedy(2, rng=run) for run in range(3)])
    >>> group.select(np.broadcast_to(np.eye(2), (3, 2, 2))).shape
    (3,)
    """

    def __init__(self, agents: Sequence[Any]) -> None:
        self.agents = list(agents)
        self.n_runs = len(self.agents)

    def select(self, contexts: Array) -> NDArray[np.intp]:
        """Return the arm of each run, (R,), given contexts (R, K, d)."""
        pairs = zip(self.agents, contexts, strict=True)
        return np.array([agent.select(offered) for agent, offered in pairs], dtype=np.intp)

    def update(self, contexts: Array, arms: ArrayLike, rewards: ArrayLike) -> None:
        """Learn the rewards (R,) of the arms (R,) of contexts (R, K, d)."""
        arms, rewards = np.asarray(arms), np.asarray(rewards)
        for agent, offered, arm, reward in zip(self.agents, contexts, arms, rewards, strict=True):
            agent.update(offered, int(arm), float(reward))


def replicate(
    make: Callable[..., Any], n_runs: int, rng: RNGLike = None
) -> AgentBatch[Any] | AgentGroup:
    """Return R replications of an agent: batched if it is a linear agent, else side by side.

    Parameters
    ----------
    make : callable
        Called as ``make(rng=generator)``; returns an agent.
    n_runs : int
        The number R of replications.
    rng : int, numpy.random.Generator or None
        A batch draws from it; the agents of a group get streams that are spawned from it.

    Examples
    --------
    >>> from functools import partial
    >>> from thalweg.bandits import EQOL
    >>> type(replicate(partial(EQOL, dim=2), n_runs=10, rng=0)).__name__
    'AgentBatch'
    """
    rng = as_generator(rng)
    n_runs = check_integer("n_runs", n_runs, at_least=1)
    agent = make(rng=rng)
    if isinstance(getattr(agent, "ridge", None), RidgeRegression):
        return AgentBatch(agent, n_runs)
    return AgentGroup([make(rng=stream) for stream in rng.spawn(n_runs)])
