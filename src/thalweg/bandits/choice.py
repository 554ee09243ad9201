"""Which arm to play, given the index of each: the argmax, with ties broken as asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice
from thalweg.common.random import RNGLike, as_generator

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


class ArmChoice:
    """The arm of largest index; an agent's randomness lives here.

    Parameters
    ----------
    tie_break : {"random", "first"}, default "random"
        Which of several arms with exactly the largest index is played.
    rng : int, numpy.random.Generator or None
        The stream that ties (and an agent's own sampling) draw from.

    Examples
    --------
    >>> int(ArmChoice("first").best(np.array([0.2, 0.7, 0.7])))
    1
    """

    def __init__(self, tie_break: str = "random", rng: RNGLike = None) -> None:
        self.tie_break = check_choice("tie_break", tie_break, ("random", "first"))
        self.rng = as_generator(rng)

    def best(self, index: NDArray[Any]) -> Any:
        """Return the position of the largest index: a number for (K,), or (R,) for (R, K)."""
        if self.tie_break == "first":
            return index.argmax(axis=-1)
        largest = index.max(axis=-1, keepdims=True)
        tied = index == largest
        if np.count_nonzero(tied) == largest.size:
            return tied.argmax(axis=-1)
        return np.where(tied, self.rng.random(index.shape), -1.0).argmax(axis=-1)

    def get_state(self) -> dict[str, Any]:
        """Return the stream's state as one JSON string, which ``json`` and ``np.savez`` hold."""
        state = self.rng.bit_generator.state
        return {"rng": json.dumps(state, default=lambda array: array.tolist())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `get_state` returned, in a stream of its own."""
        restored = json.loads(str(state["rng"]))
        # A new bit generator: the old one may be shared with others, who must not be rewound.
        name = check_choice("bit_generator", restored["bit_generator"], BIT_GENERATORS)
        bit_generator = getattr(np.random, name)()
        bit_generator.state = restored
        self.rng = np.random.Generator(bit_generator)
