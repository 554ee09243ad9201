"""Estimates for a falling penalty, each from the one before, and how to choose among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.curvature.concord_blocks import solve_concord
from thalweg.curvature.concord_covariance import Covariance, largest_penalty
from thalweg.curvature.concord_result import SSNConcordResult
from thalweg.curvature.concord_rows import RowSettings
from thalweg.curvature.concord_solver import check_penalty

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class ConcordPath:
    """Estimates for several penalties.

    Attributes
    ----------
    alphas : ndarray of shape (k,)
        The penalties, falling.
    results : tuple of SSNConcordResult
    n_edges : ndarray of int, of shape (k,)
    loss : ndarray of shape (k,)
        The objectives without the penalty.
    n_samples : int
    """

    alphas: Array
    results: tuple[SSNConcordResult, ...]
    n_edges: NDArray[np.intp]
    loss: Array
    n_samples: int

    def epbic(self, gamma: float = 0.5) -> Array:
        """Return the extended pseudo-Bayesian criterion of each, of shape (k,); lower is better.

        It is 2n times the loss, plus ``e (log n + 4 gamma log p)`` for e edges.
        """
        check_number("gamma", gamma, at_least=0)
        n, p = self.n_samples, self.results[0].omega.shape[1]
        per_edge = np.log(n) + 4 * gamma * np.log(p)
        return np.asarray(2 * n * self.loss + per_edge * self.n_edges)

    def plot(self, ax: Any = None) -> Any:
        """Plot the number of edges, and of Newton steps per row, over the penalty.

        Parameters
        ----------
        ax : matplotlib Axes, optional

        Returns
        -------
        The Axes.
        """
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        ax.plot(self.alphas, self.n_edges, ".-", label="edges")
        ax.set(xscale="log", xlabel="penalty", ylabel="edges")
        beside = ax.twinx()
        steps = [each.newton_steps.mean() for each in self.results]
        beside.plot(self.alphas, steps, ".--", color="C1", label="Newton steps")
        beside.set(ylabel="Newton steps per row", ylim=(0, None))
        return ax


def falling_alphas(alphas: Any, S: Covariance, n_alphas: Any, alpha_min_ratio: Any) -> Array:
    """Return the grid: the numbers given, or log-spaced ones from the largest that matters.

    Raises
    ------
    TypeError, ValueError
        If it is neither "auto" nor an array of positive numbers.
    """
    if isinstance(alphas, str) and alphas == "auto":
        n = check_integer("n_alphas", n_alphas, at_least=1)
        ratio = check_number("alpha_min_ratio", alpha_min_ratio, above=0, at_most=1)
        largest = largest_penalty(S)
        return largest * ratio ** np.linspace(0, 1, n) if largest > 0 else np.ones(1)
    if isinstance(alphas, str):
        raise ValueError(f"alphas must be 'auto' or an array, got {alphas!r}")
    grid = np.sort(check_array("alphas", alphas, shape=("k",)))[::-1]
    if len(grid) == 0 or grid[-1] <= 0:
        raise ValueError(f"alphas must be one or more numbers > 0, got {alphas!r}")
    return grid


def solve_path(
    S: Covariance,
    alphas: Array,
    settings: RowSettings,
    n_samples: int,
    *,
    edge_rule: Literal["and", "or"],
    n_jobs: int | None = None,
    verbose: bool | None = False,
) -> ConcordPath:
    """Solve for each of the falling ``alphas``, from the solution for the one before."""
    p = len(S.diagonal)
    results: list[SSNConcordResult] = []
    for alpha in alphas:
        start = results[-1].omega if results else None
        lam = check_penalty("alphas", float(alpha), p)
        results.append(
            solve_concord(S, lam, settings, omega0=start, n_jobs=n_jobs, verbose=verbose)
        )
    penalties = [
        alpha * (abs(each.omega).sum() - each.omega.diagonal().sum())
        for alpha, each in zip(alphas, results, strict=True)
    ]
    return ConcordPath(
        alphas=alphas,
        results=tuple(results),
        n_edges=np.array([each.edges(edge_rule).nnz // 2 for each in results], dtype=np.intp),
        loss=np.array([each.objective.sum() for each in results]) - np.array(penalties),
        n_samples=n_samples,
    )
