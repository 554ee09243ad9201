"""Numba kernels of the row problems: ‖F‖, and Newton steps with S stored.

A row is (w, d, P) = (ω, d, Sω), of shape (p,) each; i is its number, lam its p penalties. Rows do
not see each other, so that the result does not depend on how they are divided among threads.
"""
# mypy: disable-error-code=no-untyped-def
# Numba infers the types; annotations would only be read by people, and the module says them once.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from thalweg.common.optional import requires

with requires("curvature"):
    from numba import njit

SHORTEST_STEP = 1e-8
PIVOT = 64 * np.finfo(np.float64).eps  # of the diagonal, per row of the matrix
LARGEST_SYSTEM = 96  # from there on LAPACK, which works in blocks, is faster

_kernel: Callable[..., Any] = njit(cache=True, nogil=True)
# Sums of p squares may be taken in any order: that of the compiler fills the vector registers.
_kernel_of_sums: Callable[..., Any] = njit(cache=True, nogil=True, fastmath={"reassoc"})


@_kernel
def log_prox_entry(u, step):
    """Return (u + √(u² + 4 step)) / 2, without cancellation where u < 0."""
    total = abs(u) + np.hypot(u, 2 * np.sqrt(step))
    return total / 2 if u > 0 else 2 * step / total


@_kernel_of_sums
def _norm(w, d, P, i, lam):
    """Return ‖F‖ = ‖(Sω + d, ω - prox(ω + d))‖."""
    first, second = 0.0, 0.0
    for j in range(len(w)):
        u = w[j] + d[j]
        shrunk = u - max(min(u, lam[j]), -lam[j])
        first += (P[j] + d[j]) ** 2
        if j != i:
            second += (w[j] - shrunk) ** 2
    return np.sqrt(first + second + (w[i] - log_prox_entry(w[i] + d[i], 1.0)) ** 2)


@_kernel
def _penalties(lam, out):
    """Write one penalty or p of them to the p entries of ``out``."""
    if len(lam) == 1:
        out[:] = lam[0]
    else:
        out[:] = lam


@_kernel
def residuals(rows, lam, W, D, P):
    """Return ‖F‖ of each row of a block, see `thalweg.curvature.concord_rows.RowBlock`."""
    b, p = W.shape
    found, penalty = np.empty(b), np.empty(p)
    for k in range(b):
        _penalties(lam[k], penalty)
        found[k] = _norm(W[k], D[k], P[k], rows[k], penalty)
    return found


@_kernel
def newton_rows(S, rank, at, rows, lam, W, D, P, residual, tol, allowed, damped, sigma, rho):
    """Make Newton steps of the rows ``at`` of a block, in place, as `newton_step` does them.

    A row stops at the tolerance, after as many steps as it is allowed, and before a step that needs
    more than this: variables at kinks, a large or singular system, or no decrease along the line.

    Return the number of steps of each row of the block.
    """
    b, p = W.shape
    steps = np.zeros(b, dtype=np.intp)
    largest = min(rank + 1, LARGEST_SYSTEM, p)
    penalty, active = np.empty(p), np.empty(largest, dtype=np.intp)
    N, x = np.empty((largest, largest + 1)), np.empty(largest)
    there, between = np.empty((3, p)), np.empty((3, p))
    for k in at:
        i, w, d, Sw = rows[k], W[k], D[k], P[k]
        _penalties(lam[k], penalty)
        penalty[i] = -1.0  # which makes the row's own variable active, always
        while residual[k] > tol and steps[k] < allowed[k]:
            m = _find_active(w, d, penalty, damped, active)
            if m == 0 or not _solve(S, w, d, i, penalty, active[:m], N, x):
                break
            _target(S, active[:m], x, there)
            norm = _norm(there[0], there[1], there[2], i, penalty)
            if damped and not norm**2 <= (1 - 2 * sigma) * residual[k] ** 2:
                norm = _line_search(w, d, Sw, i, penalty, residual[k], there, between, sigma, rho)
                if norm < 0:
                    break
            w[:], d[:], Sw[:] = there[0], there[1], there[2]
            residual[k] = norm
            steps[k] += 1
    return steps


@_kernel
def _find_active(w, d, lam, kinks_matter, active):
    """Write E = {j: |u_j| > λ_j}, which holds i; return its size, or 0 if too large or at kinks."""
    m = 0
    for j in range(len(w)):
        size = abs(w[j] + d[j])
        if size < lam[j]:
            continue
        if size == lam[j] and kinks_matter:
            return 0
        if size > lam[j]:
            if m == len(active):
                return 0
            active[m] = j
            m += 1
    return m


@_kernel
def _solve(S, w, d, i, lam, active, N, x):
    """Solve for ω + v on E, see `thalweg.curvature.concord_newton.newton_targets`.

    Return whether the system is regular. N = U'U; U takes the place of N's upper half.
    """
    m = len(active)
    pi = log_prox_entry(w[i] + d[i], 1.0)
    for a in range(m):
        row, j = S[active[a]], active[a]
        for c in range(a, m):
            N[a, c] = row[active[c]]
        if j == i:
            N[a, a] += 1 / pi**2
            N[a, m] = 2 / pi
        else:
            N[a, m] = -lam[j] if w[j] + d[j] > 0 else lam[j]
    return _cholesky_solve(N, x, m)


@_kernel
def _cholesky_solve(N, x, m):
    """Solve by U'U = N, row by row of U; the right side is eliminated as one more column."""
    for e in range(m):
        row, limit = N[e, e : m + 1], PIVOT * m * N[e, e]
        fours = e - e % 4
        for a in range(0, fours, 4):
            q, r, s, t = N[a], N[a + 1], N[a + 2], N[a + 3]
            _add_four(
                row, q[e : m + 1], r[e : m + 1], s[e : m + 1], t[e : m + 1],
                -q[e], -r[e], -s[e], -t[e],
            )  # fmt: skip
        for a in range(fours, e):
            _add(row, N[a, e : m + 1], -N[a, e])
        if not row[0] > limit:
            return False
        scale = 1 / np.sqrt(row[0])
        for c in range(len(row)):
            row[c] *= scale
    for a in range(m - 1, -1, -1):
        x[a] = (N[a, m] - _dot(N[a, a + 1 : m], x[a + 1 : m])) / N[a, a]
    return True


@_kernel_of_sums
def _dot(a, b):
    total = 0.0
    for c in range(len(a)):
        total += a[c] * b[c]
    return total


@_kernel
def _target(S, active, x, there):
    """Write ω̂ and d̂ = -Sω̂ and Sω̂; four rows of S share a pass over the sum."""
    w, d, Sw = there[0], there[1], there[2]
    w[:], Sw[:] = 0.0, 0.0
    m, p = len(active), len(w)
    for a in range(m):
        w[active[a]] = x[a]
    fours = m - m % 4
    for a in range(0, fours, 4):
        e, f, g, h = active[a], active[a + 1], active[a + 2], active[a + 3]
        _add_four(Sw, S[e], S[f], S[g], S[h], x[a], x[a + 1], x[a + 2], x[a + 3])
    for a in range(fours, m):
        _add(Sw, S[active[a]], x[a])
    for j in range(p):
        d[j] = -Sw[j]


@_kernel
def _add(total, row, factor):
    for j in range(len(total)):
        total[j] += factor * row[j]


@_kernel
def _add_four(total, q, r, s, t, a, b, c, d):
    for j in range(len(total)):
        total[j] += (a * q[j] + b * r[j]) + (c * s[j] + d * t[j])


@_kernel
def _line_search(w, d, Sw, i, lam, residual, there, between, sigma, rho):
    """Move ``there`` to the first point ρ^m of the way, m ≥ 1, that lowers ½‖F‖² enough.

    Return ‖F‖ at it, or -1 if there is none.
    """
    theta, t = residual**2, rho
    while t >= SHORTEST_STEP:
        for j in range(len(w)):
            between[0, j] = w[j] + t * (there[0, j] - w[j])
            between[1, j] = d[j] + t * (there[1, j] - d[j])
            between[2, j] = Sw[j] + t * (there[2, j] - Sw[j])
        norm = _norm(between[0], between[1], between[2], i, lam)
        if norm**2 <= (1 - 2 * sigma * t) * theta:
            there[:] = between
            return norm
        t *= rho
    return -1.0
