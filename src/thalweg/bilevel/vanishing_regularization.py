"""Step sizes and regularization weights of iteratively regularized conditional gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_number

Array = NDArray[np.float64]
Method = Literal["irscg", "irfscg", "deterministic"]

# By method and convexity of the outer objective: default p, default ω (the step is 2/(t + 2) where
# there is none), and the bound on p as a multiple of ω, or 1: the error of the gradient estimates,
# which is of the order of t to minus that bound, must vanish faster than σ.
DEFAULTS: dict[tuple[str, bool], tuple[float, float | None, float]] = {
    ("irscg", True): (1 / 4, None, 1 / 2),
    ("irscg", False): (2 / 7, 6 / 7, 1 / 2),
    ("irfscg", True): (1 / 2, None, 1.0),
    ("irfscg", False): (1 / 2, 3 / 4, 1.0),
    ("deterministic", True): (1 / 2, None, 1.0),
    ("deterministic", False): (1 / 2, 3 / 4, 1.0),
}


@dataclass(frozen=True)
class Schedule:
    """α_t and σ_t/ς as functions of t.

    Parameters
    ----------
    p : float
        σ falls as t⁻ᵖ.
    omega : float or None
        α falls as t^(-ω); None is 2/(t + 2).
    warmup : int ≥ 0
        m: up to this step both are constant, α = log(m)/m.
    """

    p: float
    omega: float | None
    warmup: int = 0

    def alpha(self, t: ArrayLike) -> Array:
        """Return the step sizes at steps t ≥ 0."""
        t, m = np.asarray(t, dtype=np.float64), self.warmup
        later = 2 / (t + 2) if self.omega is None else (t + 1) ** -self.omega
        return np.where(t < m, np.log(max(m, 1)) / max(m, 1), later)

    def sigma(self, t: ArrayLike) -> Array:
        """Return the weights of the outer objective, for ς = 1."""
        longest: Array = np.maximum(np.asarray(t, dtype=np.float64), self.warmup)
        return (longest + 1) ** -self.p


def make_schedule(
    method: Method, outer_convex: bool, p: float | None, omega: float | None, epoch: int
) -> Schedule:
    """Return the schedule of a method, whose epochs are of this length.

    Raises
    ------
    ValueError
        If p or ω is outside of the range in which both objectives converge.
    """
    default_p, default_omega, bound = DEFAULTS[method, outer_convex]
    if outer_convex and omega is not None:
        raise ValueError(
            "omega must be None for a convex outer objective: the step is 2/(t + 2), to which the "
            f"weights of the average are tied; got {omega}"
        )
    if omega is not None:
        check_number("omega", omega, above=0, below=1)
    omega = default_omega if omega is None else float(omega)
    p = default_p if p is None else p
    check_number("p", p, above=0, below=bound * (1.0 if omega is None else omega))
    return Schedule(float(p), omega, epoch if outer_convex or epoch == 0 else epoch + 1)
