"""Convex functions on which the width of a batch does not help."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.common.random import RNGLike, as_generator
from thalweg.convex.lp_geometry import LpBall, check_p, dual_exponent, dual_map, lp_norm

Array = NDArray[np.float64]

SAFETY = 1.7  # 1.2 lets a round skip a piece with a probability of some percent


@dataclass(frozen=True)
class HardInstance:
    """f(x) = maxᵢ (⟨vᵢ, x⟩ - iγ), i = 1, …, k: each piece is hidden by those before it.

    Attributes
    ----------
    V : ndarray of shape (k, d)
        Random signs, scaled to dual norm 1.
    offsets : ndarray of shape (k,)
        iγ.
    p, radius : float
        f is 1-Lipschitz in ℓp, on the ball of this radius around 0.
    fstar_upper : float
        The value at a feasible point: an upper bound of the minimum.
    unseen : float
        What f is at least until the last piece has been seen.
    """

    V: Array
    offsets: Array
    p: float
    radius: float
    fstar_upper: float
    unseen: float

    @property
    def k(self) -> int:
        """Number of pieces."""
        return len(self.V)

    @property
    def gap(self) -> float:
        """What any algorithm of fewer than k rounds leaves, at least: unseen - fstar_upper."""
        return self.unseen - self.fstar_upper

    def piece(self, X: Array) -> NDArray[np.int64]:
        """Return the index, from 0, of the piece that is active at each of Q points (Q, d)."""
        return np.asarray(np.argmax(X @ self.V.T - self.offsets, axis=1))

    def fun_batch(self, X: Array) -> tuple[Array, Array]:
        """Return values (Q,) and subgradients (Q, d)."""
        scores = X @ self.V.T - self.offsets
        active = scores.argmax(axis=1)
        return scores[np.arange(len(X)), active], self.V[active]


def shielded_instance(
    d: int,
    p: float,
    k: int | Literal["auto"] = "auto",
    *,
    width: int,
    radius: float = 1.0,
    query_radius: float | None = None,
    rng: RNGLike,
) -> HardInstance:
    r"""Return a function that reveals one piece a round, whatever is asked in between.

    Queries that know only the first i pieces are independent of the next, whose scores
    ⟨v, x⟩ are about normal with deviation ‖v‖₂‖x‖₂/√d; the offset γ is larger than all of a
    batch's. So a round shows pieces up to the (i+1)-th, and k rounds are needed to see all.

    Parameters
    ----------
    d : int
        Dimension, at least 2.
    p : float in [1, inf]
    k : int or "auto"
        Pieces; by default ⌊0.8 (γ/radius)^(-2/3)⌋, of order d^(1/3).
    width : int
        Queries in a round, at most.
    radius : float, default 1
        Of the ball of ℓp.
    query_radius : float, optional
        Euclidean radius within which queries lie, by default that of the ball.
    rng : int or Generator

    Returns
    -------
    HardInstance

    Raises
    ------
    ValueError
        If no piece fits, because the dimension is too small for the width.

    References
    ----------
    Nemirovski, "On parallel complexity of nonsmooth convex optimization", Journal of Complexity
    1994. Bubeck et al., "Complexity of highly parallel non-smooth convex optimization", NeurIPS
    2019. "Parallel ℓp-Lipschitz convex optimization", NeurIPS 2026.

    Examples
    --------
    >>> instance = shielded_instance(8000, 2.0, width=100, rng=0)
    >>> instance.k, int(instance.piece(np.zeros((1, 8000)))[0])
    (4, 0)
    """
    dim = check_integer("d", d, at_least=2)
    p = check_p(p)
    check_integer("width", width, at_least=1)
    check_number("radius", radius, above=0)
    ball = LpBall(np.zeros(dim), radius, p)
    reach = ball.euclidean_radius if query_radius is None else query_radius
    check_number("query_radius", reach, above=0)
    # Random signs of dual norm 1: all entries ± d^(-1/p*).
    q = dual_exponent(p)
    entry = 1.0 if math.isinf(q) else dim ** (-1 / q)
    length = entry * math.sqrt(dim)
    gamma = SAFETY * math.sqrt(2 * math.log(20 * width)) * length * reach / math.sqrt(dim)
    most = int(0.8 * (gamma / radius) ** (-2 / 3))
    pieces = most if k == "auto" else check_integer("k", k, at_least=1)
    if pieces < 1:
        raise ValueError(f"d must be larger to hide a piece from width {width}, got {dim}")
    V = as_generator(rng).choice([-entry, entry], size=(pieces, dim))
    offsets: Array = float(gamma) * np.arange(1.0, pieces + 1)
    point = -radius * dual_map(V.sum(axis=0), p)
    assert lp_norm(point, p) <= radius * (1 + 1e-9)
    return HardInstance(
        V=V,
        offsets=offsets,
        p=p,
        radius=radius,
        fstar_upper=float(np.max(V @ point - offsets)),
        # The k-th piece is within 0.6 γ of its offset at points that do not know it.
        unseen=-(pieces + 0.6) * gamma,
    )
