"""The gauge of a set that is known by a separation oracle, relative to an ellipsoid around it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Oracle = Callable[[Vector], tuple[bool, Any]]


@dataclass(frozen=True)
class GaugeDistance:
    """How far a point is outside K, seen from the center c of an ellipsoid {c + Lx, ‖x‖ ≤ 1}.

    Attributes
    ----------
    excess : float
        S = γ(u - c) - 1 ≥ 0, with the gauge γ of K - c; 0 inside.
    inside_share : float
        α = 1/(1 + S): c + α(u - c) is in K, as the oracle said.
    subgradient : ndarray of shape (d,) or None
        s, of S at u, in whitened coordinates: Lᵀs; None inside.
    thin : bool
        Whether ‖Lᵀs‖ > 2d: K is thin along s, and the ellipsoid can be cut.
    """

    excess: float
    inside_share: float
    subgradient: Vector | None
    thin: bool


class CheckedOracle:
    """Counts the calls of a separation oracle and refuses answers that cannot be right.

    An answer cannot be right if it is no pair, if its cut is 0 or not finite or if it cuts off
    the feasible point.
    """

    def __init__(self, oracle: Oracle, feasible_point: Vector, tolerance: float) -> None:
        self.oracle = oracle
        self.feasible_point = feasible_point
        self.tolerance = tolerance
        self.n_calls = 0
        if self.cut(feasible_point) is not None:
            raise ValueError(
                f"feasible_point must be inside the set, the oracle says no to {feasible_point}"
            )

    def cut(self, u: Vector) -> Vector | None:
        """Return None inside, else the unit normal of a cut."""
        self.n_calls += 1
        answer = self.oracle(u)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError(f"separation must return a pair (inside, v), got {answer!r}")
        inside, v = answer
        if inside:
            return None
        normal = np.asarray(v, dtype=np.float64)
        length = math.sqrt(normal @ normal) if normal.shape == u.shape else 0.0
        if not 0 < length < math.inf:
            raise ValueError(
                f"separation must return a finite vector v of shape {u.shape}, not 0, got {v!r}"
            )
        normal = normal / length
        if not normal @ (u - self.feasible_point) > -self.tolerance:
            raise ValueError(
                "separation must return cuts that keep the set: it cuts off the feasible point"
            )
        return normal


def gauge_distance(
    oracle: CheckedOracle,
    center: Vector,
    L: Vector,
    x: Vector,
    tolerance: float,
    *,
    find_thin: bool = True,
) -> GaugeDistance:
    """Return the gauge distance of u = c + Lx to K by bisection on the segment from c to u.

    Parameters
    ----------
    oracle : CheckedOracle
        Of K.
    center : ndarray of shape (d,)
        c, inside K or not.
    L : ndarray of shape (d, d)
        The ellipsoid {c + Lx, ‖x‖ ≤ 1} holds K.
    x : ndarray of shape (d,)
        The point, in whitened coordinates; ‖x‖ ≤ 1.
    tolerance : float
        δ > 0: the result's error.
    find_thin : bool, default True
        Stop as soon as K turns out to be thin in a direction. Without it c must be in K.

    Notes
    -----
    At most 2 + log₂(8d²/δ) calls of the oracle, O(d²) operations beside each.
    """
    d = len(x)
    ray = L @ x
    if (cut := oracle.cut(center + ray)) is None:
        return GaugeDistance(0.0, 1.0, None, thin=False)
    if (cut_of_center := oracle.cut(center)) is not None:
        normal = L.T @ cut_of_center
        return GaugeDistance(math.inf, 0.0, 3 * d * normal / np.linalg.norm(normal), thin=True)
    alpha, beta = 0.0, 1.0
    normal = L.T @ cut
    while True:
        slope = float(normal @ x)  # ⟨v, u - c⟩
        if find_thin and 2 * d * beta * slope < math.sqrt(normal @ normal):
            # Only a certificate that K is thin along v, no subgradient.
            return GaugeDistance(math.inf, alpha, normal / (beta * slope), thin=True)
        # Where K is not thin, α is above 1/(2d), and this is δ/(8d²) at most.
        if beta - alpha <= tolerance / 2 * alpha**2:
            return GaugeDistance(1 / alpha - 1, alpha, normal / (beta * slope), thin=False)
        middle = (alpha + beta) / 2
        if (cut := oracle.cut(center + middle * ray)) is None:
            alpha = middle
        else:
            beta = middle
            normal = L.T @ cut
