"""What the Ising solvers return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.combinatorial.spectral_bounds import BoundKind
from thalweg.common.optional import requires


@dataclass(frozen=True)
class PathRecord:
    """What happened at one point of the normalization path; callbacks receive it.

    Attributes
    ----------
    tau : float
    stage : {"path", "intensify", "crossover", "anneal", "tabu"}
        The sweep over the path, further candidates at the best tau, or a final search.
    eigenvalue : float
        The leading Ritz value of M(tau), over all components.
    residual : float
        ||M v - theta v|| of the leading pair.
    iterations : int
        Products with a block of ``n_eig`` columns.
    energy_before, energy_after : float
        The batch's best energy before and after local search.
    best_energy : float
        The best energy so far, components combined.
    seconds : float
        Since the start.
    """

    tau: float
    stage: str
    eigenvalue: float
    residual: float
    iterations: int
    energy_before: float
    energy_after: float
    best_energy: float
    seconds: float


@dataclass(frozen=True)
class IsingResult:
    """A low-energy state of an Ising problem, and what is known about the optimum.

    Attributes
    ----------
    spins : ndarray of int8, shape (n,)
        The best state found.
    energy : float
        Its energy -½ sᵀJs - hᵀs, recomputed from the spins in float64.
    cut_value : float or None
        The weight of the cut edges, when the problem was Max-Cut.
    upper_bound : float
        No state has a larger value -energy.
    bound_kind : {"trivial", "certified", "probabilistic"}
        How ``upper_bound`` is known; a probabilistic one fails with probability 1e-6.
    spectral_estimate : float
        The least spectral bound along the path with Ritz values in place of eigenvalues. An
        estimate, not a bound: a short eigensolve can miss the top eigenvalue.
    history : list of PathRecord
    candidates : ndarray of int8, shape (R, n)
        The best distinct states met, best first.
    time : dict of str to float
        Seconds: "setup", "eigen", "rounding", "local_search", "bound", "total".
    success : bool
        Whether the whole path was run.
    status : int
        0 done, 1 time limit, 2 stopped by the callback, 3 interrupted.
    message : str
    cut_offset : float or None
        Half the total edge weight: cut = (upper_bound or -energy) / 2 + cut_offset.
    """

    spins: NDArray[np.int8]
    energy: float
    cut_value: float | None
    upper_bound: float
    bound_kind: BoundKind
    spectral_estimate: float
    history: list[PathRecord]
    candidates: NDArray[np.int8]
    time: dict[str, float]
    success: bool
    status: int
    message: str
    cut_offset: float | None = field(default=None, repr=False)

    @property
    def cut_bound(self) -> float | None:
        """No cut is larger, in the sense of ``upper_bound``; None when it was not Max-Cut."""
        return None if self.cut_offset is None else self.upper_bound / 2 + self.cut_offset

    @property
    def gap(self) -> float:
        """Relative distance from the value found to its upper bound; 0 proves optimality."""
        found = self.cut_value if self.cut_value is not None else -self.energy
        bound = self.cut_bound if self.cut_bound is not None else self.upper_bound
        return (bound - found) / max(abs(bound), 1e-300)

    def __str__(self) -> str:
        if self.cut_value is not None:
            head = f"cut {self.cut_value:.10g}, at most {self.cut_bound:.10g}"
        else:
            head = f"energy {self.energy:.10g}, at least {-self.upper_bound:.10g}"
        points = [record for record in self.history if record.stage == "path"]
        best = min(points, key=lambda record: record.energy_after, default=None)
        lines = [
            f"{head} ({self.bound_kind} bound, gap {100 * self.gap:.2f} %)",
            f"{len(self.spins)} spins, {len(points)} points of the path"
            + (f", best at tau {best.tau:g}" if best else ""),
            f"{self.time['total']:.2f} s: "
            + ", ".join(f"{k} {v:.2f}" for k, v in self.time.items() if k != "total"),
            self.message,
        ]
        return "\n".join(lines)

    def plot(self, ax: Any = None) -> Any:
        """Draw the energies before and after local search along the path; return the Axes."""
        with requires("plot"):
            import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots()
        points = [record for record in self.history if record.stage == "path"]
        taus = [record.tau for record in points]
        ax.plot(taus, [p.energy_before for p in points], "o--", label="rounded eigenvectors")
        ax.plot(taus, [p.energy_after for p in points], "o-", label="after local search")
        ax.axhline(self.energy, color="black", linewidth=0.8, label="best")
        ax.set(xlabel="normalization $\\tau$", ylabel="energy of the best candidate")
        ax.legend()
        return ax


@dataclass(frozen=True)
class QUBOResult:
    """A low-value assignment of a quadratic unconstrained binary problem.

    Attributes
    ----------
    x : ndarray of int8, shape (n,)
        Zeros and ones.
    value : float
        xᵀQx, recomputed from x in float64.
    lower_bound : float
        No x has a smaller value, in the sense of ``ising.bound_kind``.
    ising : IsingResult
        The result of the equivalent Ising problem.
    """

    x: NDArray[np.int8]
    value: float
    lower_bound: float
    ising: IsingResult

    def __str__(self) -> str:
        return (
            f"value {self.value:.10g}, at least {self.lower_bound:.10g} "
            f"({self.ising.bound_kind} bound)\n{self.ising.message}"
        )


@dataclass(frozen=True)
class ClusteringResult:
    """A clustering of a signed graph.

    Attributes
    ----------
    labels : ndarray of int64, shape (n,)
        Clusters from 0.
    disagreements : float
        Weight of the positive edges between clusters plus |weight| of the negative ones inside.
    splits : list of IsingResult
        The bisections, in the order in which they were accepted.
    """

    labels: NDArray[np.int64]
    disagreements: float
    splits: list[IsingResult]

    def __str__(self) -> str:
        clusters = int(self.labels.max()) + 1
        return (
            f"{clusters} clusters of {len(self.labels)} vertices, "
            f"disagreements {self.disagreements:.10g}"
        )
