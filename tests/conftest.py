"""What several test modules share."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator

import pytest

from thalweg.evidence.store import Store
from thalweg.evidence.trial import Outcome, Trial, run_trial


class InlineBackend:
    """Runs trials in the test's own process, one after another."""

    slots = 1

    def __init__(self) -> None:
        self.ran: list[Trial] = []
        self._waiting: deque[tuple[bytes, Trial]] = deque()

    def submit(self, packed: bytes, trial: Trial) -> None:
        self._waiting.append((packed, trial))

    def finished(self, timeout: float) -> Iterator[tuple[Trial, Outcome]]:
        packed, trial = self._waiting.popleft()
        self.ran.append(trial)
        yield trial, run_trial(packed, trial)

    def close(self) -> None:
        self._waiting.clear()


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    """Leave no figure open: beyond twenty, matplotlib warns."""
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture
def inline() -> InlineBackend:
    return InlineBackend()


@pytest.fixture
def store(tmp_path) -> Iterator[Store]:
    with Store(tmp_path / "evidence.sqlite") as opened:
        yield opened
