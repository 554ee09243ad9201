"""Outcomes of trials and results of claims in one SQLite file.

Several processes may use one file at once: a trial is leased to one of them before it runs, and a
lease whose owner has died is free again.
"""

from __future__ import annotations

import json
import math
import os
import socket
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from thalweg.evidence.trial import Outcome, Trial

APPLICATION_ID = 0x7468616C  # "thal"
SCHEMA_VERSION = 1
LEASE_SECONDS = 120.0  # how long a lease of another machine lives without a heartbeat
SCHEMA = """
CREATE TABLE trials (
    key TEXT PRIMARY KEY, claim TEXT, fingerprint TEXT, phase TEXT, contender TEXT, seed INTEGER,
    setting TEXT, parameters TEXT, value REAL, curve TEXT, extras TEXT, error TEXT,
    wall_time REAL, peak_memory INTEGER, finished REAL
) WITHOUT ROWID;
CREATE TABLE results (
    claim TEXT, scale TEXT, seed_offset INTEGER, finished REAL, result TEXT,
    PRIMARY KEY (claim, scale, seed_offset)
) WITHOUT ROWID;
CREATE TABLE owners (id TEXT PRIMARY KEY, host TEXT, pid INTEGER, started REAL, heartbeat REAL)
    WITHOUT ROWID;
CREATE TABLE leases (key TEXT PRIMARY KEY, owner TEXT) WITHOUT ROWID;
"""


class StoreError(ValueError):
    """The database cannot be used; the message says why. The file is as it was."""


class Store:
    """Outcomes and results in the SQLite file ``path``.

    Parameters
    ----------
    path : path-like
        Made if it does not exist.

    Raises
    ------
    StoreError
        If the file is damaged, is no database of thalweg, was written by a newer version, or
        cannot be opened or made.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._owner = uuid.uuid4().hex
        try:
            if self.path.exists():
                _check(self.path)
            self._database = sqlite3.connect(self.path, timeout=60, isolation_level=None)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._create()
            self._register()
        except sqlite3.DatabaseError as error:
            raise StoreError(f"{self.path}: {error}") from error

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give back all leases and close the file."""
        self._database.execute("DELETE FROM leases WHERE owner = ?", (self._owner,))
        self._database.execute("DELETE FROM owners WHERE id = ?", (self._owner,))
        self._database.close()

    def outcome(self, trial: Trial) -> Outcome | None:
        """Return what became of ``trial``, or None if it has not been run."""
        row = self._database.execute(
            "SELECT value, curve, extras, error, wall_time, peak_memory FROM trials WHERE key = ?",
            (trial.key,),
        ).fetchone()
        if row is None:
            return None
        value, curve, extras, error, wall_time, peak_memory = row
        return Outcome(
            value=math.nan if value is None else value,
            curve=None if curve is None else tuple(json.loads(curve)),
            extras=json.loads(extras),
            error=error,
            wall_time=math.nan if wall_time is None else wall_time,
            peak_memory=peak_memory,
        )

    def lease(self, trial: Trial) -> bool:
        """Reserve ``trial`` for this process; False if another has it, or has just finished it."""
        with self._transaction():
            if self._database.execute(
                "SELECT 1 FROM trials WHERE key = ?", (trial.key,)
            ).fetchone():
                return False
            row = self._database.execute(
                "SELECT o.id, o.host, o.pid, o.started, o.heartbeat FROM leases AS l "
                "LEFT JOIN owners AS o ON o.id = l.owner WHERE l.key = ?",
                (trial.key,),
            ).fetchone()
            if row is not None and row[0] != self._owner and _is_alive(row):
                return False
            self._database.execute(
                "INSERT OR REPLACE INTO leases VALUES (?, ?)", (trial.key, self._owner)
            )
            return True

    def heartbeat(self) -> None:
        """Tell other machines that this process is alive."""
        self._database.execute(
            "UPDATE owners SET heartbeat = ? WHERE id = ?", (time.time(), self._owner)
        )

    def record(self, trial: Trial, outcome: Outcome) -> None:
        """Write what became of ``trial`` to disk and give back its lease."""
        row = (
            trial.key,
            trial.claim,
            trial.fingerprint,
            trial.phase,
            trial.contender,
            trial.seed,
            json.dumps(trial.setting, default=repr),
            json.dumps(trial.parameters, default=repr),
            outcome.value,
            None if outcome.curve is None else json.dumps(outcome.curve),
            json.dumps(outcome.extras),
            outcome.error,
            outcome.wall_time,
            outcome.peak_memory,
            time.time(),
        )
        with self._transaction():
            marks = ", ".join("?" * len(row))
            self._database.execute(f"INSERT OR REPLACE INTO trials VALUES ({marks})", row)
            self._database.execute("DELETE FROM leases WHERE key = ?", (trial.key,))
            self.heartbeat()

    def forget(self, trial: Trial, *, only_failed: bool = False) -> None:
        """Delete what is known of ``trial``, if anything; ``only_failed``: if it failed."""
        condition = " AND error IS NOT NULL" if only_failed else ""
        self._database.execute(f"DELETE FROM trials WHERE key = ?{condition}", (trial.key,))

    def record_result(self, result: dict[str, Any]) -> None:
        """Write the result of a claim, in place of an earlier one of the same scale and seeds."""
        self._database.execute(
            "INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, ?)",
            (
                result["claim"],
                result["scale"],
                result["seed_offset"],
                time.time(),
                json.dumps(result),
            ),
        )

    def results(self) -> list[dict[str, Any]]:
        """Return all results of claims, the newest last."""
        rows = self._database.execute("SELECT result FROM results ORDER BY finished")
        return [json.loads(text) for (text,) in rows]

    def trial_count(self) -> int:
        """Return the number of recorded trials."""
        (count,) = self._database.execute("SELECT count(*) FROM trials").fetchone()
        return int(count)

    def _create(self) -> None:
        with self._transaction():
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == SCHEMA_VERSION:
                return
            for statement in filter(str.strip, SCHEMA.split(";")):
                self._database.execute(statement)
            self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _register(self) -> None:
        process = psutil.Process()
        row = (self._owner, socket.gethostname(), process.pid, process.create_time(), time.time())
        with self._transaction():
            self._database.execute("INSERT INTO owners VALUES (?, ?, ?, ?, ?)", row)

    def _transaction(self) -> _Transaction:
        return _Transaction(self._database)


class _Transaction:
    """BEGIN IMMEDIATE … COMMIT: takes the write lock first, so that two readers cannot deadlock."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database.execute("BEGIN IMMEDIATE")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._database.execute("COMMIT" if kind is None else "ROLLBACK")


def read_results(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the results in the database ``path``, as `Store.results`, without changing it."""
    path = Path(path)
    if not path.exists():
        raise StoreError(f"{path}: no such database; `thalweg verify` makes it")
    _check(path)
    with closing(_read_only(path)) as database:
        rows = database.execute("SELECT result FROM results ORDER BY finished")
        return [json.loads(text) for (text,) in rows]


def _check(path: Path) -> None:
    """Raise `StoreError` unless ``path`` is a sound database of thalweg (or an empty file)."""
    advice = "move it away or choose another --database"
    try:
        if path.stat().st_size == 0:
            return
        with closing(_read_only(path)) as database:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            (found,) = next(_quick_check(database))
    except (sqlite3.DatabaseError, OSError) as error:
        raise StoreError(f"{path} is damaged or not a database ({error}); {advice}") from error
    if found != "ok":
        raise StoreError(f"{path} is damaged ({found.splitlines()[0]}); {advice}")
    if application != APPLICATION_ID and tables:
        raise StoreError(f"{path} is a database of another program; {advice}")
    if version > SCHEMA_VERSION:
        raise StoreError(f"{path} was written by a newer thalweg; {advice}")


def _quick_check(database: sqlite3.Connection) -> Iterator[tuple[str]]:
    yield from database.execute("PRAGMA quick_check(1)")


def _read_only(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=60)


def _is_alive(owner: tuple[str | None, str, int, float, float]) -> bool:
    identity, host, pid, started, heartbeat = owner
    if identity is None:
        return False
    if host != socket.gethostname():
        return time.time() - heartbeat < LEASE_SECONDS
    try:
        return bool(abs(psutil.Process(pid).create_time() - started) < 1.0)
    except psutil.NoSuchProcess:
        return False
