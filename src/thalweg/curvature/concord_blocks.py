"""Rows of the pseudolikelihood estimate, solved in blocks on threads."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from joblib import Parallel, delayed
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import LinAlgWarning
from threadpoolctl import ThreadpoolController

from thalweg.common.optional import requires
from thalweg.common.progress import progress
from thalweg.curvature.concord_covariance import Covariance
from thalweg.curvature.concord_newton import solve_newton
from thalweg.curvature.concord_proximal import solve_first_order
from thalweg.curvature.concord_result import SSNConcordResult
from thalweg.curvature.concord_rows import (
    RowBlock,
    RowSettings,
    diagonal_start,
    objective,
    sparse_rows,
)

with requires("curvature"):
    from sklearn.exceptions import ConvergenceWarning

Array = NDArray[np.float64]
Index = NDArray[np.intp]

BLOCK_ENTRIES = 2**16  # of one array of a block: half a MB, so that a few of them stay in cache
BLOCK_ROWS = (32, 256)


def solve_concord(
    S: Covariance,
    lam: Array,
    settings: RowSettings,
    *,
    rows: Index | None = None,
    omega0: sparse.csr_array | None = None,
    dual0: Array | None = None,
    n_jobs: int | None = None,
    verbose: bool | None = False,
) -> SSNConcordResult:
    """Solve rows in blocks, on threads. As `ssn_concord`, of checked arguments."""
    p = len(S.diagonal)
    rows = np.arange(p) if rows is None else rows
    # The blocks do not depend on the number of threads, and BLAS has one: nor does the result.
    size = int(np.clip(BLOCK_ENTRIES // p, *BLOCK_ROWS))
    parts = [slice(begin, begin + size) for begin in range(0, len(rows), size)]
    jobs = (
        delayed(_solve_block)(
            S,
            lam[rows[part]],
            settings,
            rows[part],
            None if omega0 is None else omega0[part].toarray(),
            None if dual0 is None else dual0[part],
        )
        for part in parts
    )
    solved = []
    with (
        _blas().limit(limits=1, user_api="blas"),
        progress("rows", total=len(rows), show=verbose) as advance,
    ):
        for each in Parallel(n_jobs=n_jobs, prefer="threads", return_as="generator")(jobs):
            solved.append(each)
            advance(len(each.residual))
    return _joined(solved, rows, p, settings)


@lru_cache(maxsize=1)
def _blas() -> ThreadpoolController:
    return ThreadpoolController()  # finding the libraries takes longer than a small problem


@dataclass(frozen=True)
class _SolvedBlock:
    omega: sparse.csr_array
    objective: Array
    residual: Array
    newton_steps: Index
    prox_steps: Index
    dependent: set[int]


def _solve_block(
    S: Covariance,
    lam: Array,
    settings: RowSettings,
    rows: Index,
    omega0: Array | None,
    dual0: Array | None,
) -> _SolvedBlock:
    if omega0 is None:
        block = diagonal_start(S, rows, lam)
    else:
        P = S.product(omega0)
        block = RowBlock.at(rows, lam, omega0, -P if dual0 is None else dual0.copy(), P)
    solve = solve_first_order if settings.method in ("fbs", "fista") else solve_newton
    block, counts = solve(S, block, settings)
    omega = sparse_rows(block)
    return _SolvedBlock(
        omega,
        objective(block, omega),
        block.residual,
        counts.newton,
        counts.proximal,
        counts.dependent,
    )


def _joined(
    solved: list[_SolvedBlock], rows: Index, p: int, settings: RowSettings
) -> SSNConcordResult:
    dependent = sorted(set().union(*(each.dependent for each in solved)))
    if dependent:
        warnings.warn(
            f"variables {dependent[:10]} depend linearly on others that are active with them: "
            "their rows took proximal gradient steps; remove duplicates",
            LinAlgWarning,
            stacklevel=3,
        )
    residual = np.concatenate([np.empty(0), *(each.residual for each in solved)])
    converged = residual <= settings.tol
    if not converged.all():
        missed = rows[~converged]
        warnings.warn(
            f"{len(missed)} rows did not reach tol={settings.tol:g}: rows {missed[:10].tolist()}"
            f"{' and more' if len(missed) > 10 else ''}, largest residual {residual.max():.2g}; "
            "raise lam or the numbers of steps, or scale the variables",
            ConvergenceWarning,
            stacklevel=3,
        )
    steps = np.empty(0, dtype=np.intp)
    return SSNConcordResult(
        omega=(
            sparse.vstack([each.omega for each in solved], format="csr")
            if solved
            else sparse.csr_array((0, p))
        ),
        rows=rows,
        objective=np.concatenate([np.empty(0), *(each.objective for each in solved)]),
        residual=residual,
        newton_steps=np.concatenate([steps, *(each.newton_steps for each in solved)]),
        prox_steps=np.concatenate([steps, *(each.prox_steps for each in solved)]),
        converged=converged,
    )
