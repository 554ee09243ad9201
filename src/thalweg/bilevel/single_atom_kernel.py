"""A compiled loop of one-sample steps for linear models over sets whose vertices have one entry.

Both estimates shrink by the factor 1 - α with each step, and so does x, before a multiple of a row
or a vertex is added. The loop keeps that factor apart: ``x = c x̃`` and ``F̂ = e u``, ``Ĝ = e w``, so
that a step costs two products with a row, two additions of a row, and the search for the largest
entry. The sum of the average, Σ wᵢ xᵢ, is ``total x̃ - late`` with ``total`` = Σ wᵢ cᵢ: what x̃
gained at step k had no part in the terms before, which ``late`` takes off again.
"""
# mypy: disable-error-code=no-untyped-def
# Numba infers the types; annotations would only be read by people, and the docstrings say them.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from thalweg.bilevel.finite_sums import LeastSquares, LinearSum, Logistic
from thalweg.bilevel.linear_oracles import L1Ball, Simplex
from thalweg.common.optional import requires

with requires("bilevel"):
    from numba import njit

SMALLEST_SCALE = 1e-100
SEGMENT = 256  # entries whose largest is looked for at once
BOUND_ROUNDING = 1e-12
NO_INDICES = np.zeros(0, dtype=np.int32)

_kernel: Callable[..., Any] = njit(cache=True, nogil=True)
# Sums may be taken in any order: that of the compiler fills the vector registers.
_kernel_of_sums: Callable[..., Any] = njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})
# Here NaN may compare in any way: what is not finite is seen in the products with the rows.
_kernel_of_maxima: Callable[..., Any] = njit(
    cache=True, nogil=True, fastmath={"reassoc", "contract", "nnan", "nsz"}
)


def has_single_atoms(lmo: Any, inner: Any, outer: Any) -> bool:
    """Return whether the loop serves: an L1 ball or a simplex, and linear models of one output."""
    # Of the types themselves, as a subclass may compute something else.
    one_entry = type(lmo) is Simplex or (type(lmo) is L1Ball and lmo.axis is None)
    return one_entry and all(
        type(f) in (LeastSquares, Logistic) and f.targets.ndim == 1 for f in (inner, outer)
    )


def matrix_parts(objective: LinearSum) -> tuple[Any, ...]:
    """Return (values, indices, starts, targets, whether ℓ is logistic); a dense A is ``values``."""
    A = objective.A
    logistic = objective.loss.name == "logistic"
    if isinstance(A, np.ndarray):
        return np.ascontiguousarray(A), NO_INDICES, NO_INDICES, objective.targets, logistic
    return A.data, A.indices, A.indptr, objective.targets, logistic


@_kernel_of_sums
def _products(values, indices, starts, i, x, j):
    """Return ⟨aᵢ, x⟩ and the entry j of the row."""
    product, entry = 0.0, 0.0
    if values.ndim == 2:
        row = values[i]
        for k in range(len(x)):
            product += row[k] * x[k]
        if j >= 0:
            entry = row[j]
    else:
        for k in range(starts[i], starts[i + 1]):
            product += values[k] * x[indices[k]]
            if indices[k] == j:
                entry = values[k]
    return product, entry


@_kernel_of_sums
def _add_row(values, indices, starts, i, factor, out):
    """Add a multiple of a row."""
    if values.ndim == 2:
        row = values[i]
        for k in range(len(out)):
            out[k] += factor * row[k]
    else:
        for k in range(starts[i], starts[i + 1]):
            out[indices[k]] += factor * values[k]


@_kernel
def _slope(logistic, product, target):
    """Return ℓ'(p, b) of the squared or the logistic loss."""
    if not logistic:
        return product - target
    margin = target * product
    if margin > 0:
        shrunk = np.exp(-margin)
        return -target * shrunk / (1 + shrunk)
    return -target / (1 + np.exp(margin))


@_kernel_of_maxima
def _largest(signed, sigma, u, w, start, stop):
    """Return the largest ``|σu + w|``, or -(σu + w) where the set has no negative side."""
    best = -np.inf
    if signed:
        for k in range(start, stop):
            best = max(best, abs(sigma * u[k] + w[k]))
    else:
        for k in range(start, stop):
            best = max(best, -(sigma * u[k] + w[k]))
    return best


@_kernel
def _lift_bounds(values, indices, starts, i, signed, u, w, bounds):
    """Lift the bounds of the segments that a sparse row has changed."""
    if values.ndim == 1:
        for k in range(starts[i], starts[i + 1]):
            j = indices[k]
            segment = bounds[j // SEGMENT]
            entry = segment[1] * u[j] + w[j]
            segment[0] = max(segment[0], abs(entry) if signed else -entry)
            segment[2] = max(segment[2], abs(u[j]))


@_kernel
def _first_in_segment(signed, sigma, u, w, start):
    """Return the largest entry of a segment and its first position."""
    j, best = start, -np.inf
    for k in range(start, min(start + SEGMENT, len(u))):
        entry = sigma * u[k] + w[k]
        size = abs(entry) if signed else -entry
        if size > best:
            best, j = size, k
    return best, j


@_kernel
def _vertex(signed, sigma, u, w):
    """Return the first position of the largest entry: one pass, and a search in one segment."""
    best, where = -np.inf, 0
    for start in range(0, len(u), SEGMENT):
        found = _largest(signed, sigma, u, w, start, min(start + SEGMENT, len(u)))
        if found > best:
            best, where = found, start
    return _first_in_segment(signed, sigma, u, w, where)[1]


@_kernel
def _vertex_bounded(signed, sigma, u, w, bounds):
    """Return the same, looking only into segments whose bound exceeds the largest entry so far.

    A segment holds a bound on its entries for the σ at which it was looked into last, that σ, and
    a bound on u: another σ changes an entry by the difference times u at most.
    """
    most, where = -np.inf, 0
    for s in range(len(bounds)):
        bound = bounds[s, 0] + abs(bounds[s, 1] - sigma) * bounds[s, 2]
        if bound > most:
            most, where = bound, s
    best, j = _look_into(signed, sigma, u, w, bounds, where)
    for s in range(len(bounds)):
        bound = bounds[s, 0] + abs(bounds[s, 1] - sigma) * bounds[s, 2]
        if s != where and bound + BOUND_ROUNDING * abs(bound) >= best:
            found, k = _look_into(signed, sigma, u, w, bounds, s)
            if found > best or (found == best and k < j):
                best, j = found, k
    return j


@_kernel
def _look_into(signed, sigma, u, w, bounds, s):
    """Return the largest entry of a segment and its position, and renew its bounds."""
    start, stop = s * SEGMENT, min((s + 1) * SEGMENT, len(u))
    best, j = _first_in_segment(signed, sigma, u, w, start)
    largest = 0.0
    for k in range(start, stop):
        largest = max(largest, abs(u[k]))
    bounds[s, 0], bounds[s, 1], bounds[s, 2] = best, sigma, largest
    return best, j


@_kernel
def one_sample_steps(
    inner, outer, rows_in, rows_out, alphas, sigmas, weights, radius, signed, x, before, F, G
):
    """Make one step for each entry of ``alphas``; x, ``before``, F and G are overwritten.

    Returns the sum of the weighted iterates, the sum of the weights, and the number of steps made:
    fewer than asked for if something is not finite.
    """
    values_in, indices_in, starts_in, targets_in, logistic_in = inner
    values_out, indices_out, starts_out, targets_out, logistic_out = outer
    c, c_before, e = 1.0, 1.0, 1.0
    gain, j = 0.0, -1
    total, total_weight = 0.0, 0.0
    late = np.zeros_like(x)
    made = 0
    thin = values_in.ndim == 1 and values_out.ndim == 1
    bounds = np.zeros(((len(x) + SEGMENT - 1) // SEGMENT if thin else 0, 3))
    for s in range(len(bounds)):
        _look_into(signed, sigmas[0], F, G, bounds, s)
    for s in range(len(alphas)):
        alpha, sigma = alphas[s], sigmas[s]
        g, f = rows_in[s], rows_out[s]
        now_in, entry_in = _products(values_in, indices_in, starts_in, g, x, j)
        now_out, entry_out = _products(values_out, indices_out, starts_out, f, x, j)
        if s == 0:
            old_in = _products(values_in, indices_in, starts_in, g, before, -1)[0]
            old_out = _products(values_out, indices_out, starts_out, f, before, -1)[0]
        else:
            old_in = c_before * (now_in - gain * entry_in)
            old_out = c_before * (now_out - gain * entry_out)
        new_in, new_out = c * now_in, c * now_out
        if not (np.isfinite(new_in) and np.isfinite(new_out)):
            break

        # STORM: ĝ ← (1 - α)(ĝ - ∇f(x_{t-1}, ξ)) + ∇f(x_t, ξ), where e takes the factor.
        e *= 1 - alpha
        slope = _slope(logistic_in, new_in, targets_in[g])
        slope -= (1 - alpha) * _slope(logistic_in, old_in, targets_in[g])
        _add_row(values_in, indices_in, starts_in, g, slope / e, G)
        slope = _slope(logistic_out, new_out, targets_out[f])
        slope -= (1 - alpha) * _slope(logistic_out, old_out, targets_out[f])
        _add_row(values_out, indices_out, starts_out, f, slope / e, F)

        # x ← (1 - α) x + α v, where c takes the factor.
        if thin:
            _lift_bounds(values_in, indices_in, starts_in, g, signed, F, G, bounds)
            _lift_bounds(values_out, indices_out, starts_out, f, signed, F, G, bounds)
            j = _vertex_bounded(signed, sigma, F, G, bounds)
        else:
            j = _vertex(signed, sigma, F, G)
        sign = -1.0 if signed and sigma * F[j] + G[j] > 0 else 1.0
        c_before = c
        c *= 1 - alpha
        gain = alpha * sign * radius / c
        x[j] += gain
        late[j] += gain * total
        total += weights[s] * c
        total_weight += weights[s]
        made += 1
        if min(c, e) < SMALLEST_SCALE:
            break
    for k in range(len(x)):
        late[k] = total * x[k] - late[k]
        before[k] = c_before * x[k]
        x[k] *= c
        F[k] *= e
        G[k] *= e
    if j >= 0:
        before[j] -= c_before * gain
    return late, total_weight, made
