"""The search of Spectral Annealing: walk the path, round, refine, remember the best states."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.combinatorial.ising_problem import IsingProblem, prepare, quadratic_value
from thalweg.combinatorial.ising_result import IsingResult, PathRecord
from thalweg.combinatorial.local_search import LocalSearch
from thalweg.combinatorial.normalization_path import (
    BlockPoint,
    PathSettings,
    numpy_dtype,
    walk,
)
from thalweg.combinatorial.spectral_bounds import best_bound, trivial_bound
from thalweg.common.optional import requires
from thalweg.common.progress import Advance
from thalweg.common.random import torch_generator

with requires("combinatorial"):
    import torch
    from torch import Tensor

Allocation = Literal["two_stage", "uniform"]
Search = Literal["greedy", "tabu", "anneal"]
Callback = Callable[[PathRecord], Any]

# Rows per pass of the rounding, so that V G is never held for all vertices at once.
_ROUNDING_ROWS = 2**18
_MAJORITY = 5
_MESSAGES = (
    "The whole path was run.",
    "The time limit was reached.",
    "The callback stopped the run.",
    "The run was interrupted.",
)


class _StopSearch(Exception):  # noqa: N818  (a signal, not an error)
    """Ends the search from wherever it is; carries the status."""

    def __init__(self, status: int) -> None:
        super().__init__(_MESSAGES[status])
        self.status = status


class Run:
    """One run of specann: the problem, the best states so far, and the clock."""

    def __init__(
        self,
        couplings: Any,
        field: NDArray[np.float64] | None,
        settings: PathSettings,
        *,
        n_candidates: int,
        allocation: Allocation,
        method: Search | None,
        sweeps: int,
        temperature: float | None,
        crossover: bool,
        time_limit: float | None,
        device: torch.device,
        dtype: torch.dtype,
        rng: np.random.Generator,
        callback: Callback | None,
    ) -> None:
        self.started = time.perf_counter()
        self.seconds = dict.fromkeys(("setup", "eigen", "rounding", "local_search", "bound"), 0.0)
        self.couplings, self.field, self.settings = couplings, field, settings
        self.n_candidates, self.allocation = n_candidates, allocation
        self.method, self.sweeps, self.temperature = method, sweeps, temperature
        self.crossover, self.time_limit = crossover, time_limit
        self.device, self.rng, self.callback = device, rng, callback
        with self._timed("setup"):
            self.problem = prepare(couplings, field, numpy_dtype(dtype))
            self.local = LocalSearch(self.problem, device)
            self.generator = torch_generator(rng, device)
            self.best = BestStates(self.problem, self.local, n_candidates)
        self.history: list[PathRecord] = []
        self.estimates: list[tuple[float, float]] = []
        self.spectral_estimate = math.inf

    def search(self, advance: Advance) -> int:
        """Run the path and the final stages; return the status."""
        status = 0
        try:
            self._search(advance)
        except _StopSearch as stopped:
            status = stopped.status
        except KeyboardInterrupt:
            status = 3
        if not self.history:
            self._greedy_state()
        return status

    def _search(self, advance: Advance) -> None:
        total = len(self.settings.taus) * self.n_candidates
        per_tau = self.n_candidates
        if self.allocation == "two_stage":
            per_tau = max(1, self.n_candidates // 2)
        best_point, best_energy = None, math.inf
        for point in self._points():
            record = self._candidates(point, per_tau, "path")
            if record.energy_after < best_energy:
                best_energy = record.energy_after
                best_point = replace(point, vectors=point.vectors.clone())
            advance(text=f"specann tau {point.tau:.2f} energy {self.best.energy:.6g}")
        rest = total - per_tau * len(self.settings.taus)
        while best_point is not None and rest > 0:
            self._candidates(best_point, min(rest, self.n_candidates), "intensify")
            rest -= self.n_candidates
        advance()
        if self.crossover and self.method is not None:
            self._refine(self.best.majority(), "crossover")
        if self.method in ("anneal", "tabu"):
            self._refine(self.best.batch(), self.method)
        advance()

    def _greedy_state(self) -> None:
        """Have something to return from a run that was stopped before its first candidate."""
        with self._timed("local_search"):
            S = torch.randint(
                2, (self.problem.size, 1), generator=self.generator, device=self.device
            )
            S = (2 * S - 1).to(torch.int8)
            self.local.run(S, "greedy", self.sweeps, seed=0, temperature=None)
            self.best.add(S, self.local.scores(S))

    def _points(self) -> Iterator[BlockPoint]:
        """Walk the path; the time between two points is the eigensolver's."""
        points = walk(
            self.problem, self.settings, self.device, self.generator, check=self._check_time
        )
        while True:
            with self._timed("eigen"):
                point = next(points, None)
            if point is None:
                return
            self.spectral_estimate = min(self.spectral_estimate, point.estimate)
            if self.settings.path == "power":
                worst = float((point.leading + point.residuals).max())
                self.estimates.append((point.tau, worst))
            yield point

    def _candidates(self, point: BlockPoint, count: int, stage: str) -> PathRecord:
        with self._timed("rounding"):
            # Along the path the eigenvectors themselves come first, then Gaussian combinations.
            k = self.settings.k if stage == "path" else 0
            G = torch.randn(
                self.settings.k, count, generator=self.generator, device=self.device
            ).to(point.vectors)
            G[:, :k] = torch.eye(self.settings.k, count, device=self.device)[:, :k].to(G)
            S = round_to_spins(point.vectors, G)
        leader = int(np.argmax(point.leading))
        return self._refine(
            S,
            stage,
            tau=point.tau,
            eigenvalue=float(point.leading[leader]),
            residual=float(point.residuals[leader]),
            iterations=point.products if stage == "path" else 0,
        )

    def _refine(
        self,
        S: Tensor,
        stage: str,
        *,
        tau: float = math.nan,
        eigenvalue: float = math.nan,
        residual: float = math.nan,
        iterations: int = 0,
    ) -> PathRecord:
        """Improve a batch, keep what is good, report, and stop if asked to."""
        with self._timed("local_search"):
            before = self.local.scores(S)
            if self.method is not None:
                final = stage in ("anneal", "tabu")
                seed = int(self.rng.integers(2**31))
                self.local.run(
                    S,
                    self.method if final else "greedy",
                    self.sweeps,
                    seed=seed,
                    temperature=self.temperature,
                )
            after = self.local.scores(S) if self.method is not None else before
            self.best.add(S, after)
        record = PathRecord(
            tau,
            stage,
            eigenvalue,
            residual,
            iterations,
            -float(before.sum(axis=0).max()),
            -float(after.sum(axis=0).max()),
            self.best.energy,
            time.perf_counter() - self.started,
        )
        self.history.append(record)
        if self.callback is not None:
            try:
                self.callback(record)
            except StopIteration:
                raise _StopSearch(2) from None
        self._check_time()
        return record

    def result(self, status: int, bound: str) -> IsingResult:
        """Bound the value, go back to the caller's order, and put the result together."""
        with self._timed("bound"):
            if bound == "auto" and status == 0:
                upper = best_bound(self.couplings, self.estimates, self.field, rng=self.rng)
            else:
                upper = trivial_bound(self.couplings, self.field)
        states = self.problem.to_caller(self.best.states().T)
        spins = states[:, 0].copy()
        energy = -quadratic_value(self.couplings, self.field, spins)
        self.seconds["total"] = time.perf_counter() - self.started
        return IsingResult(
            spins=spins,
            energy=energy + 0.0,  # no -0.0
            cut_value=None,
            # A bound that rounding puts below what was found is met: the state is optimal.
            upper_bound=max(upper.value, -energy),
            bound_kind=upper.kind,
            spectral_estimate=self.spectral_estimate,
            history=self.history,
            candidates=np.ascontiguousarray(states.T),
            time=self.seconds,
            success=status == 0,
            status=status,
            message=_MESSAGES[status],
        )

    def _check_time(self) -> None:
        limit = self.time_limit
        if limit is not None and time.perf_counter() - self.started > limit:
            raise _StopSearch(1)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


class BestStates:
    """The best distinct states met, and the one put together from the best of each component.

    Turning all spins of a component changes nothing, so a state is kept with the first spin of
    every component +1; isolated vertices are +1 thereby.
    """

    def __init__(self, problem: IsingProblem, local: LocalSearch, most: int) -> None:
        self._local = local
        self._most = most
        self._firsts = problem.bounds[:-1]
        self._component = np.repeat(
            np.arange(len(self._firsts), dtype=np.int32), np.diff(problem.bounds)
        )
        # All spins equal is a state too: a run that is stopped at once has something to return.
        ones = np.ones((problem.size, 1), dtype=np.int8)
        self._joint = ones[:, 0].copy()
        self._joint_scores = local.scores(torch.from_numpy(ones).to(local.device))[:, 0]
        self._states: list[NDArray[np.int8]] = []
        self._scores: list[float] = []
        self._keys: set[int] = set()
        self._insert(self._joint, float(self._joint_scores.sum()))

    @property
    def energy(self) -> float:
        """The energy of the best state, put together from the best of each component."""
        return -float(self._joint_scores.sum())

    def add(self, S: Tensor, scores: NDArray[np.float64]) -> None:
        """Take in a batch (N, R) with its scores by component (C, R)."""
        batch = S.cpu().numpy()
        totals = scores.sum(axis=0)
        for column in np.argsort(-totals, kind="stable"):
            if len(self._scores) == self._most and totals[column] <= self._scores[-1]:
                break
            self._insert(batch[:, column], float(totals[column]))
        winner = np.argmax(scores, axis=1)
        top = scores[np.arange(len(scores)), winner]
        better = top > self._joint_scores
        if not better.any():
            return
        rows = np.flatnonzero(better[self._component])
        self._joint[rows] = batch[rows, winner[self._component[rows]]]
        self._joint_scores = np.where(better, top, self._joint_scores)
        self._insert(self._joint, float(self._joint_scores.sum()))

    def states(self) -> NDArray[np.int8]:
        """Return the states, best first, shape (R, N)."""
        return np.stack(self._states)

    def batch(self) -> Tensor:
        """Return the states as a batch (N, R)."""
        return torch.from_numpy(np.ascontiguousarray(self.states().T)).to(self._local.device)

    def majority(self) -> Tensor:
        """Return the majority vote (N, 1) of the best states, turned towards the best one."""
        votes = np.zeros(len(self._joint), dtype=np.int8)
        leader = self._states[0]
        for state in self._states[:_MAJORITY]:
            overlap = np.add.reduceat(state * leader, self._firsts, dtype=np.int64)
            votes += self._turn(state, np.where(overlap < 0, -1, 1))
        vote = np.where(votes == 0, leader, np.sign(votes)).astype(np.int8)
        return torch.from_numpy(vote[:, None]).to(self._local.device)

    def _turn(self, state: NDArray[np.int8], signs: NDArray[Any]) -> NDArray[np.int8]:
        """Return a copy of the state with every component multiplied by its sign."""
        if len(signs) == 1:
            return state * np.int8(signs[0])
        return state * signs.astype(np.int8)[self._component]

    def _insert(self, state: NDArray[np.int8], score: float) -> None:
        state = self._turn(state, state[self._firsts])
        key = hash(state.tobytes())
        if key in self._keys:
            return
        place = int(np.searchsorted(-np.array(self._scores), -score, side="right"))
        self._states.insert(place, state)
        self._scores.insert(place, score)
        self._keys.add(key)
        if len(self._states) > self._most:
            self._keys.discard(hash(self._states.pop().tobytes()))
            self._scores.pop()


def round_to_spins(V: Tensor, G: Tensor) -> Tensor:
    """Return sign(V G) as int8 (n, R), where V is (n, k), G is (k, R) and sign(0) is +1."""
    S = torch.empty(len(V), G.shape[1], dtype=torch.int8, device=V.device)
    for first in range(0, len(V), _ROUNDING_ROWS):
        rows = slice(first, first + _ROUNDING_ROWS)
        S[rows] = (V[rows] @ G >= 0).to(torch.int8).mul_(2).sub_(1)
    return S
