"""One trial: what it is, which seed it gets, and how a worker runs it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import random
import sys
import time
import traceback
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import cloudpickle
import numpy as np

from thalweg.evidence.claim import Claim, Contender

Phase = Literal["tuning", "evaluation"]
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


@dataclass(frozen=True)
class Trial:
    """One contender with one setting on one seed.

    ``parameters`` holds the scale's parameters and the swept value, ``setting`` the tuned ones.
    """

    claim: str
    fingerprint: str
    phase: Phase
    contender: str
    seed: int
    setting: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def key(self) -> str:
        """A digest of everything that determines the result."""
        content = [self.claim, self.fingerprint, self.phase, self.contender, self.seed]
        text = json.dumps([*content, self.setting, self.parameters], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()

    def seed_sequence(self) -> np.random.SeedSequence:
        """Return the stream of this trial: the same for every contender and setting."""
        phase = 0 if self.phase == "tuning" else 1
        return np.random.SeedSequence(self.seed, spawn_key=(zlib.crc32(self.claim.encode()), phase))


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    ``value`` is NaN when the trial failed; ``error`` then says why. ``wall_time`` is in seconds,
    ``peak_memory`` in bytes (resident set of the worker while the trial ran).
    """

    value: float
    curve: tuple[list[float], list[float]] | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    wall_time: float = math.nan
    peak_memory: int = 0


def pack(claim: Claim, contender: Contender) -> bytes:
    """Return the claim's function and the contender in a form that any worker can load."""
    packed: bytes = cloudpickle.dumps((claim.function, contender))
    return packed


def run_trial(packed: bytes, trial: Trial, threads: int = 1) -> Outcome:
    """Run ``trial`` in this process and return its outcome; exceptions become part of it."""
    try:
        _unpack(packed)  # imports what the claim imports
        had_torch = "torch" in sys.modules
        outcome = _measure(packed, trial, threads)
        if "torch" in sys.modules and not had_torch:
            # It ran with torch's own seed and threads, and its time includes the import.
            outcome = _measure(packed, trial, threads)
        return outcome
    except Exception as error:
        location = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(location.filename).name}:{location.lineno}"
        return Outcome(math.nan, error=f"{type(error).__name__}: {error} ({where})")


def _measure(packed: bytes, trial: Trial, threads: int) -> Outcome:
    function, contender = _unpack(packed)
    sequence = trial.seed_sequence()
    _limit_threads(threads)
    _seed_global_generators(sequence)
    rng = np.random.default_rng(sequence)
    _reset_peak_memory()
    started = time.perf_counter()
    measurement = function(contender, rng, **trial.parameters, **trial.setting)
    wall_time = time.perf_counter() - started
    return Outcome(
        value=float(measurement.value),
        curve=measurement.thinned_curve(),
        extras={name: float(figure) for name, figure in measurement.extras.items()},
        wall_time=wall_time,
        peak_memory=_peak_memory(),
    )


@functools.lru_cache(maxsize=64)
def _unpack(packed: bytes) -> tuple[Any, Contender]:
    # Only ever what `pack` made in this run: neither files nor the database hold such bytes.
    function, contender = cloudpickle.loads(packed)
    return function, contender


def thread_environment(threads: int) -> dict[str, str]:
    """Return the environment variables that limit a worker's numerical threads."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def _limit_threads(threads: int) -> None:
    # The environment variables cover libraries that load later; this one covers those that were
    # loaded before, and torch, whose own pool threadpoolctl does not see.
    _threadpool_limits(threads)
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@functools.lru_cache(maxsize=1)
def _threadpool_limits(threads: int) -> None:
    import threadpoolctl

    os.environ.update(thread_environment(threads))
    threadpoolctl.threadpool_limits(threads)


def _seed_global_generators(sequence: np.random.SeedSequence) -> None:
    """Seed the global generators too: some peers know no other."""
    seed = int(sequence.generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def _reset_peak_memory() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed: the peak is then that of the process so far
        return


def _peak_memory() -> int:
    """Return the largest resident set in bytes since `_reset_peak_memory`."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
