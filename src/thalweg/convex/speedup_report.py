"""What width buys: rounds and time to an accuracy, over widths of a batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer
from thalweg.common.optional import requires
from thalweg.common.progress import progress
from thalweg.common.random import RNGLike, as_generator
from thalweg.convex.parallel_minimize import minimize_parallel
from thalweg.convex.round_oracle import Batch

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SpeedupReport:
    """Rounds, queries and seconds to the accuracy by width.

    Attributes
    ----------
    widths : tuple of int
    rounds, queries : ndarray of shape (n,)
        Until the best value came within eps of the best value of all runs; rounds are NaN where
        it did not.
    seconds : ndarray of shape (n,)
        Of the whole runs, over their rounds, times ``rounds``.
    fun, gap : ndarray of shape (n,)
        At the end of each run.
    eps : float
    """

    widths: tuple[int, ...]
    rounds: Array
    queries: Array
    seconds: Array
    fun: Array
    gap: Array
    eps: float

    @property
    def speedup(self) -> Array:
        """Rounds of the smallest width over those of each, shape (n,)."""
        ratio: Array = self.rounds[int(np.argmin(self.widths))] / self.rounds
        return ratio

    def plot(self, ax: Any = None) -> Any:
        """Plot rounds over width; return the Axes.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
        """
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        ax.loglog(self.widths, self.rounds, "o-")
        ax.set(xlabel="queries a round", ylabel=f"rounds to accuracy {self.eps:.3g}")
        return ax


def parallel_speedup_report(
    fun_batch: Batch,
    d: int,
    p: float,
    eps: float,
    *,
    widths: Sequence[int] = (1, 16, 256),
    x0: ArrayLike | None = None,
    max_rounds: int = 1000,
    rng: RNGLike = None,
    show_progress: bool | None = None,
    **options: Any,
) -> SpeedupReport:
    """Run `minimize_parallel` at several widths and report what width buys.

    Parameters
    ----------
    fun_batch : callable
        As for `minimize_parallel`.
    d : int
        Dimension.
    p : float
    eps : float
    widths : sequence of int, default (1, 16, 256)
    x0 : array_like of shape (d,), optional
        By default 0.
    max_rounds : int, default 1000
        For each run.
    rng : int, Generator or None
    show_progress : bool, optional
        By default only on a terminal.
    **options
        Further options of `minimize_parallel`, as ``lipschitz``, ``radius`` and ``executor``.

    Returns
    -------
    SpeedupReport

    Raises
    ------
    ValueError
        If ``widths`` is empty or an argument is not as described.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import parallel_speedup_report
    >>> report = parallel_speedup_report(
    ...     lambda X: (X.max(axis=1), np.eye(30)[X.argmax(axis=1)]), 30, np.inf, 0.05, rng=0
    ... )
    >>> bool(report.speedup[-1] > 1)
    True
    """
    check_integer("d", d, at_least=1)
    if len(widths) == 0:
        raise ValueError("widths must hold at least one width")
    start = check_array("x0", np.zeros(d) if x0 is None else x0, shape=(d,))
    streams = as_generator(rng).spawn(len(widths))
    results, times = [], []
    with progress("speedup report", len(widths), show=show_progress) as advance:
        for width, stream in zip(widths, streams, strict=True):
            started = time.perf_counter()
            results.append(
                minimize_parallel(
                    fun_batch,
                    start,
                    p=p,
                    eps=eps,
                    width=width,
                    max_rounds=max_rounds,
                    rng=stream,
                    **options,
                )
            )
            times.append(time.perf_counter() - started)
            advance()
    target = min(result.fun for result in results) + eps
    rounds = np.array([_first(result.history, "rounds", target) for result in results])
    queries = np.array([_first(result.history, "queries", target) for result in results])
    per_round = np.array(times) / [max(1, result.rounds) for result in results]
    return SpeedupReport(
        widths=tuple(widths),
        rounds=rounds,
        queries=queries,
        seconds=per_round * rounds,
        fun=np.array([result.fun for result in results]),
        gap=np.array([result.gap for result in results]),
        eps=float(eps),
    )


def _first(history: dict[str, Array], name: str, target: float) -> float:
    reached = np.flatnonzero(history["fun"] <= target)
    return float(history[name][reached[0]]) if len(reached) else float("nan")
