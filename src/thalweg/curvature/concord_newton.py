"""Semismooth Newton for the row problems of the pseudolikelihood, a block of rows at a time.

With S stored, most steps are compiled, one row after another. Here is what a step is, for all that
the kernel leaves: S as a product, variables at kinks, large systems, and those that are singular.
Rows are independent. A block shares the passes over memory; the small system of each row is
solved by itself.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from thalweg.curvature.concord_covariance import Covariance, StoredCovariance
from thalweg.curvature.concord_kernel import SHORTEST_STEP, newton_rows
from thalweg.curvature.concord_kinks import solve_kinks, solve_smooth
from thalweg.curvature.concord_proximal import Momentum, proximal_step
from thalweg.curvature.concord_rows import (
    RowBlock,
    RowCounts,
    RowSettings,
    log_prox,
    squares,
)

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Mask = NDArray[np.bool_]

ROUNDING = 1e3 * np.finfo(np.float64).eps  # of ‖(ω, d)‖: what rounding may leave of ‖F‖


def newton_targets(
    S: Covariance, block: RowBlock, *, kinks: bool = True
) -> tuple[sparse.csr_array, Mask, set[int]]:
    r"""Return ω + v for the B-Newton direction v of each row.

    With u = ω + d and π = prox(u)_i, the direction that solves F'((ω, d); v) = -F leads to

    .. math:: S_{jE} \hat ω_E + [j = i] \hat ω_i / π² = \begin{cases} 2 / π & j = i \\
              -λ \operatorname{sign} u_j & |u_j| > λ \end{cases}, \qquad
              \hat ω_j = 0 \quad (|u_j| < λ), \qquad \hat d = -S \hat ω,

    where E holds i and the j with \|u_j\| > λ; see `solve_kinks` for \|u_j\| = λ.

    Parameters
    ----------
    S : Covariance
    block : RowBlock
    kinks : bool
        Whether variables at kinks make a complementarity problem; else they are set to zero.

    Returns
    -------
    targets : csr_array of shape (b, p)
        Zero in rows that failed.
    failed : ndarray of bool, of shape (b,)
        Rows whose system is singular.
    dependent : set of int
        Columns of S found to depend on others.
    """
    U = block.W + block.D
    size = np.abs(U)
    active = size > block.lam
    at_kink = (size == block.lam) if kinks else np.zeros_like(active)
    active[block.own], at_kink[block.own] = True, False
    n_kinks = at_kink.sum(axis=1) if at_kink.any() else np.zeros(len(block.rows), dtype=np.intp)
    row, column = np.nonzero(active | at_kink)
    starts = np.searchsorted(row, np.arange(len(block.rows) + 1))
    own = np.flatnonzero(column == block.rows[row])
    pi = log_prox(U[block.own])
    lam = block.lam[row, 0] if block.lam.shape[1] == 1 else block.lam[row, column]
    signs = np.sign(U[row, column])
    g = -lam * signs
    g[own] = 2 / pi
    curvature = 1 / pi**2

    values = np.zeros(len(column))
    failed = np.zeros(len(block.rows), dtype=bool)
    dependent: set[int] = set()
    for k, (begin, end) in enumerate(itertools.pairwise(starts.tolist())):
        if end - begin - 1 > S.rank:
            failed[k] = True
            continue
        part = slice(begin, end)
        N = S.submatrix(column[part])
        i = own[k] - begin
        N[i, i] += curvature[k]
        if n_kinks[k] == 0:
            solution = solve_smooth(N, g[part])
        else:
            kink = at_kink[k, column[part]]
            solution = solve_kinks(N, g[part], kink, signs[part], lam[part])
        if solution.values is None:
            failed[k] = True
            dependent.add(int(column[begin + solution.dependent]))
        else:
            values[part] = solution.values
    return sparse.csr_array((values, column, starts), shape=block.W.shape), failed, dependent


def newton_step(
    S: Covariance, block: RowBlock, settings: RowSettings
) -> tuple[RowBlock, Mask, set[int]]:
    """Return the block after one step, the rows that could not make one, and dependent columns."""
    damped = settings.method == "bssn"
    targets, failed, dependent = newton_targets(S, block, kinks=damped)
    P = S.product(targets)
    there = RowBlock.at(block.rows, block.lam, targets.toarray(), -P, P)
    if damped:
        failed = _line_search(block, there, failed, settings)
    there.put(failed, block.take(failed))
    return there, failed, dependent


def _line_search(block: RowBlock, there: RowBlock, failed: Mask, settings: RowSettings) -> Mask:
    """Put ``there`` at the first of the points ρ^m of the way that lowers ½‖F‖² enough.

    Return the rows of which none does, or that had failed before.
    """
    theta = block.residual**2
    too_far = ~failed & ~(there.residual**2 <= (1 - 2 * settings.sigma) * theta)
    short, t = np.flatnonzero(too_far), settings.rho
    while len(short) and t >= SHORTEST_STEP:
        part = _part_way(block.take(short), there.take(short), t)
        good = part.residual**2 <= (1 - 2 * settings.sigma * t) * theta[short]
        there.put(short[good], part.take(good))
        short, t = short[~good], t * settings.rho
    failed = failed.copy()
    failed[short] = True
    return failed


def _part_way(here: RowBlock, there: RowBlock, t: float) -> RowBlock:
    W, D, P = (
        old + t * (new - old)
        for old, new in ((here.W, there.W), (here.D, there.D), (here.P, there.P))
    )
    return RowBlock.at(here.rows, here.lam, W, D, P)


def solve_newton(
    S: Covariance, block: RowBlock, settings: RowSettings
) -> tuple[RowBlock, RowCounts]:
    """Make Newton steps until each ‖F‖ is at most the tolerance.

    A row whose system is singular, or whose line search fails, makes proximal gradient steps until
    ½‖F‖² is not above what it was then. They have momentum as long as no Newton step succeeds.
    """
    b = len(block.rows)
    counts = RowCounts.zero(b)
    momentum: Momentum | None = None
    ceiling = np.full(b, np.inf)
    stalled = np.zeros(b, dtype=bool)
    while True:
        going = (block.residual > settings.tol) & ~stalled
        going &= (counts.newton < settings.max_iter) & (counts.proximal < settings.max_prox_iter)
        if not going.any():
            return block, counts
        tries = np.flatnonzero(going & (block.residual <= ceiling))
        ceiling[tries] = np.inf
        before = counts.newton.copy()
        if isinstance(S, StoredCovariance):
            counts.newton += _compiled_steps(S, block, tries, settings, settings.max_iter - before)
            tries = tries[counts.newton[tries] == before[tries]]
        if len(tries):
            moved, failed, dependent = newton_step(S, block.take(tries), settings)
            block.put(tries, moved)
            counts.newton[tries[~failed]] += 1
            counts.dependent |= dependent
            lost = tries[failed]
            _refuse_if_asked(block.rows[lost], settings)
            ceiling[lost] = block.residual[lost]
            size = np.sqrt(squares(block.W[lost]) + squares(block.D[lost]))
            stalled[lost] = block.residual[lost] <= ROUNDING * size
        if momentum is not None:
            momentum.t[counts.newton > before] = 1
        falls_back = np.flatnonzero(going & ~stalled & np.isfinite(ceiling))
        if len(falls_back):
            momentum = Momentum.none(block) if momentum is None else momentum
            W, D, P = proximal_step(S, block, momentum, falls_back)
            block.put(
                falls_back, RowBlock.at(block.rows[falls_back], block.lam[falls_back], W, D, P)
            )
            counts.proximal[falls_back] += 1


def _compiled_steps(
    S: StoredCovariance, block: RowBlock, at: Index, settings: RowSettings, allowed: Index
) -> Index:
    """Make Newton steps of some rows, up to the first that the kernel cannot; count them."""
    iterates = (block.W, block.D, block.P, block.residual)
    damped, rule = settings.method == "bssn", (settings.sigma, settings.rho)
    made: Index = newton_rows(
        S.S, S.rank, at, block.rows, block.lam, *iterates, settings.tol, allowed, damped, *rule
    )
    return made


def _refuse_if_asked(rows: Index, settings: RowSettings) -> None:
    if len(rows) and settings.on_rank_deficient == "raise":
        raise np.linalg.LinAlgError(
            f"rows {rows[:10].tolist()} have no Newton step: their active columns are dependent or "
            "more than the rank of S; raise the penalty, or use on_rank_deficient='prox'"
        )
