"""Progress bars: shown on a terminal or on request, silent otherwise."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Moves a bar on by ``steps`` and replaces its text."""

    def __call__(self, steps: float = 1, text: str | None = None) -> None:
        """Move the bar."""


@contextmanager
def progress(
    description: str, total: float | None, *, show: bool | None = None
) -> Iterator[Advance]:
    """Show a bar with the time left while the block runs, on stderr.

    Parameters
    ----------
    description : str
        What is going on.
    total : float or None
        The number of steps; None when it is not known.
    show : bool, optional
        Whether to show the bar; by default only when stderr is a terminal.

    Yields
    ------
    Advance
        Call it with the number of steps done since the last call.

    Examples
    --------
    >>> with progress("counting", total=3, show=False) as advance:
    ...     for _ in range(3):
    ...         advance()
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield _silent
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=total)

        def advance(steps: float = 1, text: str | None = None) -> None:
            bar.update(task, advance=steps, description=text or description)

        yield advance


def _silent(steps: float = 1, text: str | None = None) -> None:
    pass
