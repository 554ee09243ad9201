"""Penalties that are sums over coordinates: values, proxes and the derivatives of proxes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds

from thalweg.common.checks import check_number

Array = NDArray[np.float64]


class SeparablePenalty(Protocol):
    """A convex ψ(x) = Σ ψ_i(x_i): what `minimize_lazy_ssn` takes as ``prox``."""

    def value(self, x: Array) -> float:
        """Return ψ(x), infinity outside of its domain."""

    def prox(self, v: Array, a: float) -> Array:
        """Return the minimizer u of ψ(u) + ‖u - v‖²/(2a)."""

    def jac_mask(self, v: Array, a: float) -> Array:
        """Return the diagonal, in [0, 1], of a generalized Jacobian of the prox at v."""


class L1Penalty:
    """ψ(x) = weight · ‖x‖₁.

    Parameters
    ----------
    weight : float ≥ 0

    Examples
    --------
    >>> penalty = L1Penalty(1.0)
    >>> penalty.prox(np.array([3.0, -0.5]), 2.0).tolist()
    [1.0, 0.0]
    >>> penalty.jac_mask(np.array([3.0, -0.5]), 2.0).tolist()
    [1.0, 0.0]
    """

    def __init__(self, weight: float) -> None:
        self.weight = check_number("weight", weight, at_least=0)

    def value(self, x: Array) -> float:
        """Return ψ(x)."""
        return self.weight * float(np.abs(x).sum())

    def prox(self, v: Array, a: float) -> Array:
        """Return v, shrunk by a·weight."""
        return v - np.clip(v, -a * self.weight, a * self.weight)

    def jac_mask(self, v: Array, a: float) -> Array:
        """Return 1 where the prox is not 0."""
        return (np.abs(v) > a * self.weight).astype(np.float64)


class BoxPenalty:
    """0 where low ≤ x ≤ high, infinity elsewhere.

    Parameters
    ----------
    low, high : array_like, default -inf and inf

    Examples
    --------
    >>> BoxPenalty(0.0).prox(np.array([-1.0, 2.0]), 1.0).tolist()
    [0.0, 2.0]
    """

    def __init__(self, low: ArrayLike = -np.inf, high: ArrayLike = np.inf) -> None:
        self.low, self.high = np.asarray(low, np.float64), np.asarray(high, np.float64)
        if not np.all(self.low <= self.high):
            raise ValueError("bounds must be pairs low <= high")

    def value(self, x: Array) -> float:
        """Return 0 or infinity."""
        return 0.0 if np.all((self.low <= x) & (x <= self.high)) else np.inf

    def prox(self, v: Array, a: float) -> Array:
        """Return the nearest point of the box."""
        return np.clip(v, self.low, self.high)

    def jac_mask(self, v: Array, a: float) -> Array:
        """Return 1 where v is inside."""
        return ((self.low < v) & (v < self.high)).astype(np.float64)


def as_penalty(prox: Any, bounds: Any, d: int) -> SeparablePenalty | None:
    """Return the penalty that ``prox`` and ``bounds`` stand for; None if there is none.

    Raises
    ------
    TypeError, ValueError
        If they stand for nothing, or for two things.
    """
    if bounds is not None:
        if prox not in (None, "box"):
            raise ValueError(f"bounds go with prox=None or 'box', got prox={prox!r}")
        return _box(bounds, d)
    if prox is None:
        return None
    if isinstance(prox, str):
        return _named(prox)
    missing = [m for m in ("value", "prox", "jac_mask") if not callable(getattr(prox, m, None))]
    if missing:
        raise TypeError(
            "prox must be a string or an object with the methods value(x), prox(v, a) and "
            f"jac_mask(v, a); {type(prox).__name__} lacks {', '.join(missing)}"
        )
    penalty: SeparablePenalty = prox
    return penalty


def _named(name: str) -> SeparablePenalty:
    if name == "nonneg":
        return BoxPenalty(0.0)
    if name == "box":
        raise ValueError("prox='box' needs bounds")
    kind, _, weight = name.partition(":")
    if kind != "l1" or not weight:
        raise ValueError(f"prox must be 'l1:WEIGHT', 'nonneg', 'box' or an object, got {name!r}")
    try:
        return L1Penalty(float(weight))
    except ValueError as error:
        raise ValueError(f"the weight in prox={name!r} must be a number >= 0") from error


def _box(bounds: Any, d: int) -> BoxPenalty:
    if isinstance(bounds, Bounds):
        low, high = bounds.lb, bounds.ub
    else:
        pairs = [
            (-np.inf if low is None else low, np.inf if high is None else high)
            for low, high in bounds
        ]
        if len(pairs) != d:
            raise ValueError(f"bounds must be {d} pairs (low, high), got {len(pairs)}")
        low, high = np.array(pairs, dtype=np.float64).T
    try:
        return BoxPenalty(np.broadcast_to(low, d), np.broadcast_to(high, d))
    except ValueError as error:
        raise ValueError(
            f"bounds must be pairs low <= high, one for each entry of x: {error}"
        ) from (error)
