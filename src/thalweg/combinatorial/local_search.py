"""Local search on a batch of Ising states: greedy, annealed and tabu, exact within colour classes.

A proper colouring makes simultaneous flips exact: vertices of one class are not neighbours, so
their gains do not change each other. The CPU sweeps (Numba) and the torch sweeps (any device)
visit the same classes in the same order and read random numbers from the same counter, so they
return the same spins.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.combinatorial import local_search_kernels as kernels
from thalweg.combinatorial.ising_problem import (
    IsingProblem,
    as_couplings,
    as_field,
    csr_tensor,
    prepare,
)
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

with requires("combinatorial"):
    import torch
    from torch import Tensor

Method = Literal["greedy", "anneal", "tabu", "half"]
METHODS: tuple[Method, ...] = ("greedy", "anneal", "tabu", "half")

# Metropolis accepts when cost <= T (-log u); u has 16 bits, read from this table.
_MINUS_LOG_U = -np.log((np.arange(2**16) + 0.5) / 2**16).astype(np.float32)
# 0.3 mean degree is hot enough to cross the barriers of single spins, cold enough to keep domains.
START_TEMPERATURE = 0.3
_FINAL_TEMPERATURE = 0.02


class LocalSearchResult(NamedTuple):
    """What `batched_local_search` returns.

    Attributes
    ----------
    spins : ndarray of int8, shape (n, R)
    energies : ndarray of float64, shape (R,)
        -½ sᵀJs - hᵀs of each column.
    sweeps : int
        Sweeps done.
    """

    spins: NDArray[np.int8]
    energies: NDArray[np.float64]
    sweeps: int


def batched_local_search(
    J: Any,
    S: ArrayLike,
    *,
    h: ArrayLike | None = None,
    method: Method = "greedy",
    sweeps: int = 200,
    temperature: float | None = None,
    device: str | torch.device | None = None,
    rng: RNGLike = None,
) -> LocalSearchResult:
    """Improve every column of a batch of Ising states; no column gets worse.

    Parameters
    ----------
    J : scipy.sparse matrix, networkx.Graph or array_like, shape (n, n)
        Symmetric couplings; ½ sᵀJs + hᵀs is maximized.
    S : array_like of -1 and +1, shape (n, R)
        The states, one per column.
    h : array_like of shape (n,), optional
        The linear field.
    method : {"greedy", "anneal", "tabu", "half"}, default "greedy"
        - ``"greedy"``: flip every vertex of a colour class that gains, class after class, until no
          flip gains.
        - ``"anneal"``: Metropolis sweeps over the classes while the temperature falls
          geometrically, then greedy.
        - ``"tabu"``: ``sweeps * n`` flips, each the best that is not tabu; a flipped vertex is tabu
          for n/10 + U{0..9} flips. Keeps the best state met, then greedy.
        - ``"half"``: flip a random half of the vertices that gain and keep the columns that
          improved. Needs no colouring, for dense graphs on a GPU, where classes are small.
    sweeps : int, default 200
        The most sweeps; exactly as many Metropolis sweeps for ``"anneal"``.
    temperature : float, optional
        Where ``"anneal"`` starts; by default 0.3 of the mean of ``Σ_j |J_ij|``. It ends at 0.02 of
        that mean.
    device : str or torch.device, optional
        Where the sweeps run; by default the CPU. ``"tabu"`` flips one spin at a time and runs on
        the CPU only.
    rng : int, numpy.random.Generator or None
        The same seed gives the same states on any number of threads.

    Returns
    -------
    LocalSearchResult

    Raises
    ------
    ValueError, TypeError
        If an argument is malformed.

    Notes
    -----
    A sweep costs O(R nnz) and visits only vertices with a neighbour that flipped since; O(log n)
    per changed gain for ``"tabu"``. Fields are gathered when they are needed rather than stored:
    that reads n R bytes of spins instead of 4 n R bytes of fields, and threads never write to the
    same place.

    Examples
    --------
    An even cycle with antiferromagnetic couplings: alternating spins cut every edge.

    >>> import networkx as nx
    >>> J = -nx.to_scipy_sparse_array(nx.cycle_graph(6), dtype=float)
    >>> result = batched_local_search(J, np.ones((6, 1)))
    >>> result.spins.ravel(), result.energies
    (array([-1,  1, -1,  1, -1,  1], dtype=int8), array([-6.]))
    """
    couplings = as_couplings("J", J)
    n = couplings.shape[0]
    field = as_field("h", h, n)
    spins = np.asarray(S)
    if spins.ndim != 2 or len(spins) != n or not np.all(np.abs(spins) == 1):
        raise ValueError(f"S must be an array of -1 and +1 of shape ({n}, R), got {spins.shape}")
    check_choice("method", method, METHODS)
    check_integer("sweeps", sweeps, at_least=1)
    if temperature is not None:
        check_number("temperature", temperature, above=0)
    problem = prepare(couplings, field, reorder=False)
    search = LocalSearch(problem, torch.device(device or "cpu"))
    batch = torch.from_numpy(problem.from_caller(spins.astype(np.int8))).to(search.device)
    seed = int(as_generator(rng).integers(2**31))
    done = search.run(batch, method, sweeps, seed=seed, temperature=temperature)
    scores = search.scores(batch).sum(axis=0)
    return LocalSearchResult(problem.to_caller(batch.cpu().numpy()), -scores, done)


def greedy_coloring(indptr: NDArray[np.int32], indices: NDArray[np.int32]) -> NDArray[np.int32]:
    """Colour the vertices of a graph so that neighbours differ: largest degree first, first fit.

    Returns
    -------
    ndarray of int32, shape (n,)
        Colours from 0; at most max degree + 1 of them. O(n + nnz).

    Examples
    --------
    >>> path = np.array([0, 1, 3, 4], dtype=np.int32), np.array([1, 0, 2, 1], dtype=np.int32)
    >>> greedy_coloring(*path)
    array([1, 0, 1], dtype=int32)
    """
    degree = np.diff(indptr)
    order = np.argsort(-degree, kind="stable")
    colors: NDArray[np.int32] = kernels.first_fit(
        indptr, indices, order, int(degree.max(initial=0))
    )
    return colors


class LocalSearch:
    """Local search on one problem: the colouring and the layout are made once.

    Batches are int8 tensors (N, R) in the problem's order, changed in place.
    """

    def __init__(self, problem: IsingProblem, device: torch.device) -> None:
        self.problem = problem
        self.device = device
        # A flip must gain more than rounding can pretend, or columns could cycle.
        slack = 0.0 if problem.exact else 4 * float(np.finfo(problem.couplings.dtype).eps)
        self._slack = (slack * problem.degree).astype(problem.couplings.dtype)
        self._mean_degree = float(problem.degree.mean())
        csr = problem.couplings
        self._csr = (csr.indptr, csr.indices, csr.data)
        colors = greedy_coloring(csr.indptr, csr.indices)
        self._members = np.argsort(colors, kind="stable").astype(np.int32)
        self._starts = np.concatenate(([0], np.cumsum(np.bincount(colors))))
        self._classes = _torch_classes(self) if device.type != "cpu" else []

    @cached_property
    def _couplings(self) -> Tensor:
        return self.problem.tensor(self.device)

    def run(
        self,
        S: Tensor,
        method: Method,
        sweeps: int,
        *,
        seed: int = 0,
        temperature: float | None = None,
    ) -> int:
        """Improve every column of S in place; return the sweeps done."""
        if method == "greedy":
            return self.greedy(S, sweeps)
        before, kept = self.scores(S).sum(axis=0), S.clone()
        if method == "anneal":
            self.anneal(S, sweeps, seed, temperature)
        elif method == "tabu":
            self.tabu(S, sweeps, seed)
        else:
            self.flip_half(S, sweeps, seed)
        self.greedy(S, sweeps)
        worse = torch.from_numpy(self.scores(S).sum(axis=0) < before).to(self.device)
        S[:, worse] = kept[:, worse]
        return sweeps

    def greedy(self, S: Tensor, sweeps: int) -> int:
        """Flip improving vertices class by class until none is left."""
        if self._classes:
            return _torch_greedy(S, self._classes, sweeps)
        active = np.ones(len(S), dtype=np.uint8)
        return int(
            kernels.greedy_sweeps(
                *self._csr, self._members, self._starts, S.numpy(), self._slack, active, sweeps
            )
        )

    def anneal(self, S: Tensor, sweeps: int, seed: int, temperature: float | None) -> None:
        """Metropolis sweeps at geometrically falling temperature."""
        if self._mean_degree == 0:  # no couplings, nothing to do
            return
        start = temperature or START_TEMPERATURE * self._mean_degree
        end = min(start, _FINAL_TEMPERATURE * self._mean_degree)
        temperatures = np.geomspace(start, end, sweeps).astype(np.float32)
        if self._classes:
            _torch_anneal(S, self._classes, temperatures, seed)
        else:
            kernels.anneal_sweeps(
                *self._csr, self._members, self._starts, S.numpy(), temperatures, seed, _MINUS_LOG_U
            )

    def tabu(self, S: Tensor, sweeps: int, seed: int) -> None:
        """Best flips that are not tabu, each column on its own; S keeps the best states met."""
        if self.device.type != "cpu":
            raise ValueError(
                f"local_search 'tabu' runs on the CPU, one flip at a time; got device {self.device}"
            )
        kernels.tabu_columns(*self._csr, S.numpy(), sweeps * len(S), len(S) // 10, seed)

    def flip_half(self, S: Tensor, sweeps: int, seed: int) -> None:
        """Flip a random half of the improving vertices, keep the columns that improved."""
        J = self._couplings
        slack = torch.from_numpy(self._slack).to(self.device)[:, None]
        generator = torch.Generator(device=self.device).manual_seed(seed)
        spins = S.to(J.dtype)
        value = (spins * (J @ spins)).sum(dim=0, dtype=torch.float64)
        for _ in range(sweeps):
            improving = spins * (J @ spins) < -slack
            if not improving.any():
                break
            half = torch.rand(S.shape, generator=generator, device=self.device) < 0.5
            trial = torch.where(improving & half, -spins, spins)
            trial_value = (trial * (J @ trial)).sum(dim=0, dtype=torch.float64)
            better = trial_value > value
            spins = torch.where(better, trial, spins)
            value = torch.where(better, trial_value, value)
        S.copy_(spins)

    def scores(self, S: Tensor) -> NDArray[np.float64]:
        """Return ½ sᵀJs of every component and column, (C, R), accumulated in float64."""
        bounds = self.problem.bounds
        if self.device.type == "cpu":
            cuts = np.union1d(bounds, np.arange(0, len(S), 16_384))
            parts = kernels.segment_scores(*self._csr, S.numpy(), cuts)
            first = np.searchsorted(cuts, bounds[:-1])
            return np.add.reduceat(parts, first, axis=0)
        return self._torch_scores(S)

    def _torch_scores(self, S: Tensor) -> NDArray[np.float64]:
        J = self._couplings
        spins = S.to(J.dtype)
        local = (spins * (J @ spins)).double() / 2
        lengths = torch.from_numpy(np.diff(self.problem.bounds)).to(self.device)
        sums = torch.segment_reduce(local, "sum", lengths=lengths, axis=0)
        return np.asarray(sums.cpu().numpy())


# --- torch sweeps (any device) -----------------------------------------------------------------


@dataclass(frozen=True)
class _TorchClass:
    """One colour class: its vertices, their rows of J, their slack."""

    vertices: Tensor
    rows: Tensor
    slack: Tensor


def _torch_classes(search: LocalSearch) -> list[_TorchClass]:
    members = np.split(search._members, search._starts[1:-1])
    return [
        _TorchClass(
            torch.from_numpy(vertices).to(search.device, torch.int64),
            csr_tensor(search.problem.couplings[vertices], search.device),
            torch.from_numpy(search._slack[vertices]).to(search.device)[:, None],
        )
        for vertices in members
    ]


def _torch_greedy(S: Tensor, classes: list[_TorchClass], sweeps: int) -> int:
    for sweep in range(1, sweeps + 1):
        flipped = 0
        for group in classes:
            mine = S[group.vertices]
            field = group.rows @ S.to(group.rows.dtype)
            flips = mine * field < -group.slack
            S[group.vertices] = torch.where(flips, -mine, mine)
            flipped += int(flips.sum())
        if flipped == 0:
            return sweep
    return sweeps


def _torch_anneal(
    S: Tensor, classes: list[_TorchClass], temperatures: NDArray[np.float32], seed: int
) -> None:
    table = torch.from_numpy(_MINUS_LOG_U).to(S.device)
    columns = torch.arange(S.shape[1], device=S.device)
    for sweep, temperature in enumerate(temperatures):
        for group in classes:
            mine = S[group.vertices]
            cost = 2 * mine * (group.rows @ S.to(group.rows.dtype))
            key = int(kernels.mix(np.uint32(kernels.mix(np.uint32(seed)) ^ np.uint32(sweep))))
            u = _torch_counter(key, group.vertices[:, None], columns) >> 16
            flips = cost <= float(temperature) * table[u]
            S[group.vertices] = torch.where(flips, -mine, mine)


def _torch_counter(key: int, vertices: Tensor, columns: Tensor) -> Tensor:
    """Return the 32 random bits of (key, vertex, column): `_counter` on int64 tensors."""
    mask = 0xFFFFFFFF
    x = (key + vertices * 0x9E3779B9 + columns * 0x85EBCA6B) & mask
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask
    x = ((x ^ (x >> 15)) * 0x846CA68B) & mask
    return x ^ (x >> 16)
