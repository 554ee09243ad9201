"""Check claims: tune every contender, run the evaluation, judge; resume what was interrupted."""

from __future__ import annotations

import functools
import hashlib
import importlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.common.progress import Advance, progress
from thalweg.evidence.backends import Backend
from thalweg.evidence.claim import Claim, Contender, Scale
from thalweg.evidence.result import Tuning, build_result
from thalweg.evidence.store import Store
from thalweg.evidence.trial import Outcome, Phase, Trial, pack

Record = dict[str, Any]
Outcomes = Mapping[str, Outcome]
Steps = Generator[list[Trial], Outcomes, Record]
POLL_SECONDS = 0.2  # how often a trial that another process has leased is looked at again
HEARTBEAT_SECONDS = 10.0


def verify(
    claims: Iterable[Claim],
    *,
    scale: str,
    store: Store,
    backend: Backend,
    seed_offset: int = 0,
    resume: bool = True,
    show_progress: bool | None = None,
    callback: Callable[[Record], None] | None = None,
) -> list[Record]:
    """Check ``claims`` and return their records, in order.

    Trials of different claims run side by side. Each outcome is written to ``store`` at once; a
    trial that is there already (same code, parameters and seed) is not run again.

    Parameters
    ----------
    claims : iterable of Claim
    scale : {"smoke", "quick", "full"}
    store : Store
    backend : Backend
        Left open: its owner closes it.
    seed_offset : int, default 0
        Added to every seed, for fresh ones.
    resume : bool, default True
        Whether outcomes in ``store`` are used; if not, they are replaced.
    show_progress : bool, optional
        By default on a terminal.
    callback : callable, optional
        Called with the record of each claim when it is done.

    Returns
    -------
    list of dict
        See `thalweg.evidence.result.build_result`.

    Examples
    --------
    Add a peer of your own to a claim of the library and run it:

    >>> from thalweg.claims.bandits.eqol import CLAIMS  # doctest: +SKIP
    >>> mine = CLAIMS[0].with_contender(Contender("mine", make=MyAgent))  # doctest: +SKIP
    >>> with Store("mine.sqlite") as store:  # doctest: +SKIP
    ...     verify([mine], scale="quick", store=store, backend=ProcessBackend(jobs=2))
    """
    tasks = [_Task(claim, _check(claim, scale, seed_offset)) for claim in claims]
    total = sum(_trial_count(task.claim, task.claim.scales[scale]) for task in tasks)
    with progress("verify", total, show=show_progress) as advance:
        _Scheduler(store, backend, resume, advance, callback).run(tasks)
    return [task.record for task in tasks]


def _check(claim: Claim, scale_name: str, seed_offset: int) -> Steps:
    """Yield the trials of a claim, phase by phase, receive their outcomes, return the record."""
    scale = claim.scales[scale_name]
    prints = {contender.name: fingerprint(claim, contender) for contender in claim.contenders}

    def trials(phase: Phase, contender: Contender, setting: Any, count: int) -> list[list[Trial]]:
        return [
            [
                Trial(claim.id, prints[contender.name], phase, contender.name, seed, setting, point)
                for point in _points(scale, phase)
            ]
            for seed in range(seed_offset, seed_offset + count)
        ]

    def collect(outcomes: Outcomes, rows: list[list[Trial]]) -> list[list[Outcome]]:
        return [[outcomes[trial.key] for trial in row] for row in rows]

    seeds = tuning_seeds(claim, scale)
    tuning = {
        contender.name: [
            trials("tuning", contender, setting, seeds[contender.name])
            for setting in contender.settings()
        ]
        for contender in claim.contenders
    }
    outcomes = yield [
        trial for settings in tuning.values() for rows in settings for row in rows for trial in row
    ]
    tunings = {}
    for contender in claim.contenders:
        of_settings = [
            [outcome for row in collect(outcomes, rows) for outcome in row]
            for rows in tuning[contender.name]
        ]
        tunings[contender.name] = Tuning.of(contender, of_settings, claim.metric)

    evaluation = {
        contender.name: trials(
            "evaluation", contender, tunings[contender.name].setting, scale.seeds
        )
        for contender in claim.contenders
    }
    outcomes = yield [trial for rows in evaluation.values() for row in rows for trial in row]
    collected = {name: collect(outcomes, rows) for name, rows in evaluation.items()}
    return build_result(claim, scale_name, scale, seed_offset, tunings, collected)


def tuning_seeds(claim: Claim, scale: Scale) -> dict[str, int]:
    """Return the number of tuning seeds per setting of each contender.

    All contenders with a grid get the same number of tuning trials (up to a remainder): the one
    with the largest grid runs ``scale.tuning_seeds`` per setting, the others more.
    """
    sizes = {contender.name: len(contender.settings()) for contender in claim.contenders}
    budget = max(sizes.values()) * scale.tuning_seeds
    return {name: budget // size if size > 1 else 0 for name, size in sizes.items()}


def _trial_count(claim: Claim, scale: Scale) -> int:
    seeds = tuning_seeds(claim, scale)
    per_seed = sum(len(c.settings()) * seeds[c.name] + scale.seeds for c in claim.contenders)
    return per_seed * len(_points(scale))


def _points(scale: Scale, phase: Phase = "evaluation") -> list[dict[str, Any]]:
    """Return the parameters of a trial at every swept value."""
    fixed = {**scale.parameters, **(scale.tuning if phase == "tuning" else {})}
    swept = [{name: value} for name, values in scale.sweep.items() for value in values]
    return [fixed | point for point in swept or [{}]]


def fingerprint(claim: Claim, contender: Contender) -> str:
    """Return a digest of the code that a trial runs.

    That is the file of the claim, the file of the contender's constructor and, for claims of the
    library, the method's family and what all families share. An edit there makes old outcomes
    unusable; an edit elsewhere does not.
    """
    functions = [claim.function, contender.make]
    modules = [getattr(function, "__module__", None) or "" for function in functions]
    digest = hashlib.sha256()
    for source in sorted({source for module in modules for source in _sources(module)}):
        digest.update(_digest(source))
    return digest.hexdigest()[:16]


def _sources(module: str) -> list[Path]:
    file = getattr(sys.modules.get(module), "__file__", None)
    sources = [Path(file)] if file else []
    parts = module.split(".")
    if parts[:2] != ["thalweg", "claims"] or len(parts) < 3:
        return sources
    for package in ("common", "tasks", parts[2]):
        folder = importlib.import_module(f"thalweg.{package}").__file__
        sources += Path(folder or "").parent.rglob("*.py")
    return sources


@functools.cache
def _digest(source: Path) -> bytes:
    return hashlib.sha256(source.read_bytes()).digest()


@dataclass
class _Task:
    """A claim on its way: which trials of the present phase are open."""

    claim: Claim
    steps: Steps
    packed: dict[str, bytes] = field(default_factory=dict)
    open: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    record: Record = field(default_factory=dict)

    def pack(self, trial: Trial) -> bytes:
        if trial.contender not in self.packed:
            contender = next(c for c in self.claim.contenders if c.name == trial.contender)
            self.packed[trial.contender] = pack(self.claim, contender)
        return self.packed[trial.contender]


class _Scheduler:
    """Keeps the backend's slots full with trials of all claims."""

    def __init__(
        self,
        store: Store,
        backend: Backend,
        resume: bool,
        advance: Advance,
        callback: Callable[[Record], None] | None,
    ) -> None:
        self._store = store
        self._backend = backend
        self._resume = resume
        self._advance = advance
        self._callback = callback
        self._ready: deque[tuple[_Task, Trial]] = deque()
        self._elsewhere: deque[tuple[_Task, Trial]] = deque()  # leased to another process
        self._running: dict[str, _Task] = {}
        self._last_heartbeat = time.monotonic()

    def run(self, tasks: Sequence[_Task]) -> None:
        for task in tasks:
            self._next_phase(task, first=True)
        while self._ready or self._running or self._elsewhere:
            if not self._ready:
                self._ready, self._elsewhere = self._elsewhere, deque()
            self._fill()
            if self._running:
                for trial, outcome in self._backend.finished(timeout=POLL_SECONDS):
                    self._store.record(trial, outcome)
                    self._settle(self._running.pop(trial.key), trial, outcome)
            elif self._elsewhere and not self._ready:
                time.sleep(POLL_SECONDS)
            if time.monotonic() - self._last_heartbeat > HEARTBEAT_SECONDS:
                self._store.heartbeat()
                self._last_heartbeat = time.monotonic()

    def _next_phase(self, task: _Task, *, first: bool = False) -> None:
        """Queue the trials of the next phase that has any; at the end, store the record."""
        while not task.open:
            try:
                batch = next(task.steps) if first else task.steps.send(task.outcomes)
            except StopIteration as end:
                task.record = end.value
                self._store.record_result(task.record)
                if self._callback is not None:
                    self._callback(task.record)
                return
            first = False
            task.outcomes = {}
            task.open = {trial.key for trial in batch}
            for trial in batch:
                self._store.forget(trial, only_failed=self._resume)
                self._ready.append((task, trial))

    def _fill(self) -> None:
        """Submit ready trials, twice as many as there are slots, so that no worker waits."""
        limit = 2 * self._backend.slots
        while self._ready and len(self._running) < limit:
            task, trial = self._ready.popleft()
            known = self._store.outcome(trial)
            if known is not None:
                self._settle(task, trial, known)
            elif self._store.lease(trial):
                self._running[trial.key] = task
                self._backend.submit(task.pack(trial), trial)
            else:
                self._elsewhere.append((task, trial))

    def _settle(self, task: _Task, trial: Trial, outcome: Outcome) -> None:
        task.outcomes[trial.key] = outcome
        task.open.discard(trial.key)
        self._advance(1, f"{trial.claim} {trial.phase}")
        if not task.open:
            self._next_phase(task)
