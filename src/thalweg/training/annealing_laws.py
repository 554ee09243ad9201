"""How a step size falls from its start to its end: the cooling laws of annealed SGD."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice, check_integer, check_number

Law = Literal["geometric", "linear", "cosine", "polynomial", "inverse", "log", "constant"]
LAWS: tuple[Law, ...] = get_args(Law)


def step_sizes(
    n: int, lr0: float, lr_min: float, law: Law, burn_in: float, power: float = 1.0
) -> NDArray[np.float64]:
    """Return the step sizes h_0 … h_{n-1} of a law, all at once."""
    ratio = lr_min / lr0
    return lr0 * np.array([factor(k, n, ratio, law, burn_in, power) for k in range(n)])


def factor(k: int, n: int, ratio: float, law: Law, burn_in: float, power: float) -> float:
    """Return h_k / h_0 for step k of n, with h_{n-1} = ratio · h_0.

    The step rests at h_0 for the first ⌊burn_in · n⌋ steps; then s runs from 0 to 1, which the
    last step reaches exactly.
    """
    start = math.floor(burn_in * n)
    if k <= start or law == "constant":
        return 1.0
    s = min((k - start) / (n - 1 - start), 1.0)
    if law == "geometric":
        return float(ratio**s)
    if law == "inverse":
        return 1 / (1 + (1 / ratio - 1) * s)
    if law == "log":
        # Classical annealing; no constant makes it reach a small ratio, so that it is bounded.
        return max(1 / math.log(math.e + k - start), ratio)
    if law == "cosine":
        return ratio + (1 - ratio) * (1 + math.cos(math.pi * s)) / 2
    return float(ratio + (1 - ratio) * (1 - s) ** (1.0 if law == "linear" else power))


def check_law(law: Law, burn_in: float, power: float, lr_min_ratio: float, n: int) -> None:
    """Refuse settings that are no cooling law.

    Raises
    ------
    TypeError, ValueError
        For a setting that is not as described in `AnnealLR`.
    """
    check_choice("law", law, LAWS)
    check_number("burn_in", burn_in, at_least=0, below=1)
    check_number("power", power, above=0)
    check_number("lr_min_ratio", lr_min_ratio, above=0, at_most=1)
    check_integer("total_steps", n, at_least=2)
