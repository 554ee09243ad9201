"""Where trials run: worker processes of this machine, or a Ray cluster.

Both take the same trials and give the same outcomes; a worker that dies costs one more try.
"""

from __future__ import annotations

import concurrent.futures
import logging
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from thalweg.common.optional import requires
from thalweg.evidence.trial import Outcome, Trial, run_trial, thread_environment

TRIES = 3  # a trial whose worker has died this often has failed


class BackendError(Exception):
    """The workers cannot be reached any more; finished trials are in the database."""


class Backend(Protocol):
    """Runs trials in parallel."""

    @property
    def slots(self) -> int:
        """How many trials run at once."""

    def submit(self, packed: bytes, trial: Trial) -> None:
        """Queue ``trial``."""

    def finished(self, timeout: float) -> Iterator[tuple[Trial, Outcome]]:
        """Yield what has finished, waiting up to ``timeout`` seconds for the first."""

    def close(self) -> None:
        """Stop the workers at once."""


class ProcessBackend:
    """Worker processes of this machine, through joblib's loky.

    Parameters
    ----------
    jobs : int
        Number of processes.
    threads : int
        Numerical threads in each.
    """

    def __init__(self, jobs: int, threads: int = 1) -> None:
        self._jobs = jobs
        self._threads = threads
        self._waiting: deque[_Task] = deque()
        self._pending: dict[concurrent.futures.Future[Outcome], _Task] = {}
        # loky replaces a worker that has grown by some 100 MB, between two trials: as it should.
        warnings.filterwarnings("ignore", message="A worker stopped while some jobs were given")
        self._executor = self._start()

    @property
    def slots(self) -> int:
        """The number of processes."""
        return self._jobs

    def submit(self, packed: bytes, trial: Trial) -> None:
        """Queue ``trial``."""
        self._waiting.append(_Task(packed, trial))
        self._feed()

    def finished(self, timeout: float) -> Iterator[tuple[Trial, Outcome]]:
        """Yield what has finished, waiting up to ``timeout`` seconds for the first."""
        done, _ = concurrent.futures.wait(
            self._pending, timeout=timeout, return_when=concurrent.futures.FIRST_COMPLETED
        )
        broken = [future for future in done if future.exception() is not None]
        for future in done:
            if future not in broken:
                yield self._pending.pop(future).trial, future.result()
        if broken:
            yield from self._restart(broken[0].exception())
        self._feed()

    def close(self) -> None:
        """Stop the workers at once."""
        self._executor.shutdown(wait=True, kill_workers=True)

    def _start(self) -> Any:
        from joblib.externals.loky import get_reusable_executor

        return get_reusable_executor(
            max_workers=self._jobs,
            timeout=None,
            reuse=False,
            initializer=_prepare_worker,
            initargs=(os.getpid(),),
            env=thread_environment(self._threads),
        )

    def _feed(self) -> None:
        """Hand waiting trials to the workers; those that were lost once run alone."""
        while self._waiting:
            alone = self._waiting[0].tries > 1 or any(t.tries > 1 for t in self._pending.values())
            if alone and self._pending:
                return
            task = self._waiting.popleft()
            future = self._executor.submit(run_trial, task.packed, task.trial, self._threads)
            self._pending[future] = task

    def _restart(self, reason: BaseException | None) -> Iterator[tuple[Trial, Outcome]]:
        # When one worker dies, loky gives up on all trials that were queued and cannot tell which
        # of them killed it: each runs again, alone, so that only the guilty one fails.
        lost, self._pending = self._pending, {}
        self._executor.shutdown(wait=True, kill_workers=True)
        self._executor = self._start()
        for task in lost.values():
            if len(lost) == 1 and task.tries >= TRIES:
                yield task.trial, _died(reason)
            else:
                self._waiting.appendleft(replace(task, tries=task.tries + 1))


class RayBackend:
    """Tasks on a Ray cluster.

    Parameters
    ----------
    address : str, optional
        Of a running cluster (``"auto"``, ``"host:6379"``, ``"ray://host:10001"``); by default
        one is started on this machine with ``jobs`` CPUs.
    jobs : int
        CPUs of a cluster started here.
    threads : int
        Numerical threads of each trial.

    Raises
    ------
    MissingExtraError
        If Ray is not installed.
    BackendError
        If the cluster cannot be reached.
    """

    def __init__(self, address: str | None, jobs: int, threads: int = 1) -> None:
        if address:
            _check_reachable(address)
            _present_token()
        with requires("ray"):
            import ray
        self._ray: Any = ray
        options: dict[str, Any] = {"address": address} if address else {"num_cpus": jobs}
        try:
            ray.init(
                include_dashboard=None if address else False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": thread_environment(threads)},
                **options,
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise BackendError(f"no Ray cluster at {address or 'this machine'}: {error}") from error
        self._threads = threads
        once = self._ray.remote(num_cpus=1, max_retries=TRIES - 1, retry_exceptions=False)
        self._run = once(run_trial)
        self._packed: dict[bytes, Any] = {}
        self._pending: dict[Any, Trial] = {}

    @property
    def slots(self) -> int:
        """The CPUs that the cluster has now: nodes may join and leave."""
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def submit(self, packed: bytes, trial: Trial) -> None:
        """Queue ``trial``."""
        if packed not in self._packed:
            self._packed[packed] = self._ray.put(packed)
        reference = self._run.remote(self._packed[packed], trial, self._threads)
        self._pending[reference] = trial

    def finished(self, timeout: float) -> Iterator[tuple[Trial, Outcome]]:
        """Yield what has finished, waiting up to ``timeout`` seconds for the first."""
        try:
            done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout)
        except (ConnectionError, RuntimeError) as error:
            raise BackendError(f"lost the Ray cluster: {error}") from error
        for reference in done:
            trial = self._pending.pop(reference)
            try:
                yield trial, self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                yield trial, _died(error)

    def close(self) -> None:
        """Cancel what runs and leave the cluster."""
        for reference in self._pending:
            self._ray.cancel(reference, force=True)
        self._ray.shutdown()


@dataclass(frozen=True)
class _Task:
    packed: bytes
    trial: Trial
    tries: int = 1


def _check_reachable(address: str) -> None:
    """Raise `BackendError` if nobody listens at ``address``: Ray itself would wait for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and named clusters
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise BackendError(f"no Ray cluster at {address}: {error}") from error


def _present_token() -> None:
    """Make Ray's client show its token where it has one.

    ``ray start`` asks for a token by default, but clients do not show theirs by default. A cluster
    that asks for none does not mind.
    """
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    if "RAY_AUTH_TOKEN" in os.environ or file.exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _died(reason: BaseException | None) -> Outcome:
    first_line = str(reason).strip().partition("\n")[0]
    return Outcome(math.nan, error=f"its worker died {TRIES} times: {first_line}")


def _prepare_worker(parent: int) -> None:
    """Leave Ctrl-C to the main process, which stops its workers itself; end when it has died.

    The worker is told who that is: it may have died while the worker was starting.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
