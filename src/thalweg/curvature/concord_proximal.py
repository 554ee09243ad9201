"""Proximal gradient steps of the row problems, with or without momentum, as matrix iterations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.curvature.concord_covariance import Covariance
from thalweg.curvature.concord_rows import RowBlock, RowCounts, RowSettings, prox

Array = NDArray[np.float64]
Index = NDArray[np.intp]


@dataclass
class Momentum:
    """What rows remember: the iterates before, their products with S, and t ≥ 1.

    Attributes
    ----------
    W, P : ndarray of shape (b, p)
    t : ndarray of shape (b,)
        No momentum where it is 1.
    """

    W: Array
    P: Array
    t: Array

    @classmethod
    def none(cls, block: RowBlock) -> Momentum:
        """Return that of the first step."""
        return cls(block.W.copy(), block.P.copy(), np.ones(len(block.rows)))

    def take(self, at: Index) -> Momentum:
        """Return a copy of some rows."""
        return Momentum(self.W[at], self.P[at], self.t[at])


def proximal_step(
    S: Covariance, block: RowBlock, momentum: Momentum, at: Index, *, accelerated: bool = True
) -> tuple[Array, Array, Array]:
    """Return ω, the d of its prox and Sω after a step 1/L of some rows; update the momentum.

    From y = ω + (t - 1)/t⁺ (ω - ω before), with t⁺ = (1 + √(1 + 4t²))/2, to the prox of
    y - Sy/L. Sy comes by linearity. The momentum of a row starts again where it points uphill
    (O'Donoghue and Candès, "Adaptive restart for accelerated gradient schemes", 2015).
    """
    L, rows, lam = S.largest, block.rows[at], block.lam[at]
    W, P = block.W[at], block.P[at]
    before = momentum.take(at)
    t = (1 + np.sqrt(1 + 4 * before.t**2)) / 2
    ahead = ((before.t - 1) / t)[:, None]
    Y = W + ahead * (W - before.W)
    U = Y - (P + ahead * (P - before.P)) / L
    there = prox(U, lam, rows, 1 / L)
    uphill = np.einsum("ij,ij->i", Y - there, there - W) > 0
    momentum.W[at], momentum.P[at] = W, P
    momentum.t[at] = np.where(uphill | (not accelerated), 1.0, t)
    return there, L * (U - there), S.product(there)


def solve_first_order(
    S: Covariance, block: RowBlock, settings: RowSettings
) -> tuple[RowBlock, RowCounts]:
    """Make steps until each ‖F(ω, -Sω)‖ = ‖ω - prox(ω - Sω)‖ is at most the tolerance.

    One product with S per step, of the rows that are left.
    """
    counts = RowCounts.zero(len(block.rows))
    momentum = Momentum.none(block)
    accelerated = settings.method == "fista"
    for _ in range(settings.max_prox_iter):
        left = np.flatnonzero(block.residual > settings.tol)
        if len(left) == 0:
            break
        W, _, P = proximal_step(S, block, momentum, left, accelerated=accelerated)
        block.put(left, RowBlock.at(block.rows[left], block.lam[left], W, -P, P))
        counts.proximal[left] += 1
    return block, counts
