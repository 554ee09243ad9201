"""Numba kernels of the local search: sweeps over colour classes, and tabu search.

A problem is (indptr, indices, data), its CSR couplings; a batch is int8 spins (N, R). Colour class
``color`` is ``members[starts[color]:starts[color + 1]]``. Classes of many vertices are split among
threads: a thread writes the spins of its own vertices and reads those of other classes, so the
result does not depend on the number of threads.
"""
# mypy: disable-error-code=no-untyped-def
# Numba infers the types; annotations would only be read by people, and the module says them once.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from thalweg.common.optional import requires

with requires("combinatorial"):
    from numba import njit, prange

# A class of fewer vertices is swept by one thread: starting threads costs more than it saves.
_PARALLEL_FROM = 4096
_CHUNKS = 64

_kernel: Callable[..., Any] = njit(cache=True, nogil=True)
_parallel_kernel: Callable[..., Any] = njit(cache=True, nogil=True, parallel=True)


@_kernel
def first_fit(indptr, indices, order, max_degree):
    """Give each vertex, in this order, the least colour that no neighbour has."""
    colors = np.full(len(order), -1, dtype=np.int32)
    taken_by = np.full(max_degree + 2, -1, dtype=np.int64)
    for v in order:
        for p in range(indptr[v], indptr[v + 1]):
            color = colors[indices[p]]
            if color >= 0:
                taken_by[color] = v
        color = 0
        while taken_by[color] == v:
            color += 1
        colors[v] = color
    return colors


@_kernel
def _local_field(v, indptr, indices, data, spins, field):
    columns = spins.shape[1]
    for c in range(columns):
        field[c] = 0
    for p in range(indptr[v], indptr[v + 1]):
        j, weight = indices[p], data[p]
        for c in range(columns):
            field[c] += weight * spins[j, c]


@_kernel
def _greedy_range(indptr, indices, data, vertices, spins, slack, active):
    field = np.empty(spins.shape[1], dtype=data.dtype)
    flips = 0
    for v in vertices:
        if not active[v]:
            continue
        active[v] = 0
        _local_field(v, indptr, indices, data, spins, field)
        before = flips
        for c in range(spins.shape[1]):
            if spins[v, c] * field[c] < -slack[v]:
                spins[v, c] = -spins[v, c]
                flips += 1
        if flips > before:
            for p in range(indptr[v], indptr[v + 1]):
                active[indices[p]] = 1
    return flips


@_parallel_kernel
def greedy_sweeps(indptr, indices, data, members, starts, spins, slack, active, sweeps):
    """Flip every active vertex that gains more than its slack; return the sweeps done."""
    for sweep in range(1, sweeps + 1):
        flips = 0
        for color in range(len(starts) - 1):
            first, size = starts[color], starts[color + 1] - starts[color]
            if size < _PARALLEL_FROM:
                flips += _greedy_range(
                    indptr, indices, data, members[first : first + size], spins, slack, active
                )
            else:
                for chunk in prange(_CHUNKS):
                    low, high = (
                        first + size * chunk // _CHUNKS,
                        first + size * (chunk + 1) // _CHUNKS,
                    )
                    flips += _greedy_range(
                        indptr, indices, data, members[low:high], spins, slack, active
                    )
        if flips == 0:
            return sweep
    return sweeps


@_kernel
def mix(x):
    """Scramble 32 bits (the multiply-xorshift hash "lowbias32" of C. Wellons)."""
    x = np.uint32(x)
    x = np.uint32((x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B))
    return np.uint32(x ^ (x >> np.uint32(16)))


@_kernel
def _counter(key, v, c):
    """Return the 32 random bits of (key, vertex, column), whatever thread asks."""
    return mix(
        np.uint32(key) + np.uint32(v) * np.uint32(0x9E3779B9) + np.uint32(c) * np.uint32(0x85EBCA6B)
    )


@_kernel
def _anneal_range(indptr, indices, data, vertices, spins, temperature, key, minus_log_u):
    field = np.empty(spins.shape[1], dtype=data.dtype)
    never = temperature * minus_log_u[0]
    for v in vertices:
        _local_field(v, indptr, indices, data, spins, field)
        for c in range(spins.shape[1]):
            cost = 2 * spins[v, c] * field[c]
            if cost <= never and cost <= temperature * minus_log_u[_counter(key, v, c) >> 16]:
                spins[v, c] = -spins[v, c]


@_parallel_kernel
def anneal_sweeps(indptr, indices, data, members, starts, spins, temperatures, seed, minus_log_u):
    """One Metropolis sweep per temperature."""
    for sweep in range(len(temperatures)):
        temperature = temperatures[sweep]
        key = mix(np.uint32(mix(np.uint32(seed)) ^ np.uint32(sweep)))
        for color in range(len(starts) - 1):
            first, size = starts[color], starts[color + 1] - starts[color]
            if size < _PARALLEL_FROM:
                _anneal_range(
                    indptr, indices, data, members[first : first + size],
                    spins, temperature, key, minus_log_u,
                )  # fmt: skip
            else:
                for chunk in prange(_CHUNKS):
                    low, high = (
                        first + size * chunk // _CHUNKS,
                        first + size * (chunk + 1) // _CHUNKS,
                    )
                    _anneal_range(
                        indptr, indices, data, members[low:high],
                        spins, temperature, key, minus_log_u,
                    )  # fmt: skip


@_parallel_kernel
def segment_scores(indptr, indices, data, spins, cuts):
    """Return ½ sᵀJs of the rows between successive cuts, (len(cuts), R)."""
    columns = spins.shape[1]
    scores = np.zeros((len(cuts), columns))
    for segment in prange(len(cuts)):
        last = cuts[segment + 1] if segment + 1 < len(cuts) else cuts[segment]
        field = np.empty(columns, dtype=np.float64)
        for v in range(cuts[segment], last):
            _local_field(v, indptr, indices, data, spins, field)
            for c in range(columns):
                scores[segment, c] += 0.5 * spins[v, c] * field[c]
    return scores


@_parallel_kernel
def tabu_columns(indptr, indices, data, spins, steps, tenure, seed):
    """Replace each column by the best state that its own tabu search meets."""
    for c in prange(spins.shape[1]):
        spins[:, c] = _tabu(indptr, indices, data, spins[:, c].copy(), steps, tenure, seed, c)


@_kernel
def _tabu(indptr, indices, data, s, steps, tenure, seed, column):
    n = len(s)
    aligned = np.zeros(n)  # s_v F_v: a flip of v gains -2 of it
    for v in range(n):
        for p in range(indptr[v], indptr[v + 1]):
            aligned[v] += data[p] * s[v] * s[indices[p]]
    # A tournament tree over the vertices that are not tabu: the root is the best flip.
    leaves = 1
    while leaves < n:
        leaves *= 2
    # Equal gains are common and are decided at random: taking the first would search one corner.
    noise = 1e-6 * (1 + np.abs(aligned).mean()) / 2**32
    key = np.full(leaves, np.inf)
    for v in range(n):
        key[v] = aligned[v] + noise * _counter(seed, v, column)
    winner = np.empty(2 * leaves, dtype=np.int32)
    winner[leaves:] = np.arange(leaves)
    for node in range(leaves - 1, 0, -1):
        winner[node] = _better(key, winner, node)
    # Vertices leave the tabu list in the order of their release: one linked list per future step.
    ring = np.full(tenure + 12, -1, dtype=np.int64)
    following = np.full(n, -1, dtype=np.int64)
    best, current, best_value = s.copy(), 0.0, 0.0
    for step in range(steps):
        slot = step % len(ring)
        v = ring[slot]
        while v >= 0:
            key[v] = aligned[v] + noise * _counter(seed + step, v, column)
            _replay(key, winner, leaves, v)
            v = following[v]
        ring[slot] = -1
        v = winner[1]
        if key[v] == np.inf:
            continue
        current -= 2 * aligned[v]
        s[v] = -s[v]
        aligned[v] = -aligned[v]
        for p in range(indptr[v], indptr[v + 1]):
            u = indices[p]
            aligned[u] += 2 * data[p] * s[v] * s[u]
            if key[u] != np.inf:
                key[u] = aligned[u] + noise * _counter(seed + step, u, column)
                _replay(key, winner, leaves, u)
        key[v] = np.inf
        _replay(key, winner, leaves, v)
        release = (step + 1 + tenure + _counter(seed, step, column) % 10) % len(ring)
        following[v] = ring[release]
        ring[release] = v
        if current > best_value:
            best_value = current
            best[:] = s
    return best


@_kernel
def _better(key, winner, node):
    left, right = winner[2 * node], winner[2 * node + 1]
    return left if key[left] <= key[right] else right


@_kernel
def _replay(key, winner, leaves, v):
    node = (leaves + v) // 2
    while node >= 1:
        winner[node] = _better(key, winner, node)
        node //= 2
