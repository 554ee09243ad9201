"""The methods that all linear agents have alike, as functions to put into a class.

A linear agent holds a `RidgeRegression` and an `ArmChoice` and defines an ``index``; with

    select, update = linear_methods.select, linear_methods.update

in its body it plays the arm of largest index and learns by ridge regression. Nothing is inherited.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from numpy.typing import ArrayLike, NDArray

from thalweg.bandits.choice import ArmChoice
from thalweg.bandits.ridge import RidgeRegression

Array = NDArray[Any]


class LinearAgent(Protocol):
    """An agent that keeps a ridge regression and plays the arm of largest index."""

    ridge: RidgeRegression
    choice: ArmChoice

    def index(self, contexts: ArrayLike) -> Array:
        """Return the index of each context, (K,) or (R, K)."""
        ...


def select(self: LinearAgent, contexts: ArrayLike) -> int:
    """Return the arm to play among the K contexts (K, d). K may differ between rounds."""
    return int(self.choice.best(self.index(contexts)))


def update(self: LinearAgent, contexts: ArrayLike, arm: int | None, reward: float) -> None:
    """Learn the reward of ``contexts[arm]``, or of the one context (d,) if ``arm`` is None."""
    self.ridge.observe(contexts, arm, reward)


def predict(self: LinearAgent, contexts: ArrayLike) -> Array:
    """Return the estimated mean reward of each of the K contexts (K, d); shape (K,)."""
    return self.ridge.predict(self.ridge.check_contexts(contexts))


def get_state(self: LinearAgent) -> dict[str, Any]:
    """Return what `set_state` needs to go on bit for bit: arrays, numbers and one string."""
    return self.ridge.get_state() | self.choice.get_state()


def set_state(self: LinearAgent, state: Mapping[str, Any]) -> None:
    """Go on from a state that `get_state` of an agent with the same parameters returned."""
    self.ridge.set_state(state)
    self.choice.set_state(state)
