"""Whether annealing can find the global minimum of a function, and at which temperatures."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.progress import progress
from thalweg.common.random import RNGLike, as_generator
from thalweg.training.annealed_chains import (
    CURVATURE_POINTS,
    Noise,
    Objective,
    check_starts,
    largest_curvature,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]

FREEZE = 1.2
PROFILE_LEVELS = (1e-1, 1e-2, 1e-3)
STEP_SHARE = 0.1
KEPT = 500


@dataclass(frozen=True)
class AnnealReport:
    """What `annealing_report` found, an entry per temperature, from hot to cold.

    Attributes
    ----------
    temperatures, energy : ndarray of shape (t,)
        τ, and the mean of f over chains and time.
    relaxation_time : ndarray of shape (t,)
        Integrated autocorrelation time of f, in units of dt = step size, so that it compares
        between temperatures; NaN where f did not move.
    r_hat : ndarray of shape (t,)
        Gelman and Rubin's ratio of f and of the worst coordinate: above 1.2 the chains have not
        mixed.
    profile : ndarray of shape (t, 3)
        Estimates of the weak Poincaré profile α(r) at r = 0.1, 0.01, 0.001. They are *lower*
        bounds: only coordinates and f are tried.
    freeze_temperature : float
        The largest τ at which the chains did not mix; 0 if they all did.
    share_in_best : ndarray of shape (t,)
        Share of the chains whose last tenth was, on average, in the lowest tenth of the range
        of f at that temperature. Frozen chains with a share well between 0 and 1 sit in wells of
        different depth: annealing cannot choose between them.
    lr : float
        The step size of all chains.
    recommended_lr0 : float
        For `minimize_annealed_sgd` with ``sigma=recommended_sigma``.
    recommended_sigma : float
        Makes the hottest temperature of the report the first one.
    recommended_steps : int
        Twenty relaxation times at every octave from the hottest to the coldest temperature.
    sigma : ndarray of shape (points,)
        Root mean square noise of ``jac`` at some points: the theory wants them equal.
    """

    temperatures: Array
    energy: Array
    relaxation_time: Array
    r_hat: Array
    profile: Array
    freeze_temperature: float
    share_in_best: Array
    lr: float
    recommended_lr0: float
    recommended_sigma: float
    recommended_steps: int
    sigma: Array = field(repr=False)

    def __str__(self) -> str:
        head = "temperature      energy  relaxation   R-hat  in best"
        rows = zip(
            self.temperatures,
            self.energy,
            self.relaxation_time,
            self.r_hat,
            self.share_in_best,
            strict=True,
        )
        lines = [f"{t:11.4g} {e:11.4g} {r:11.4g} {h:7.3f} {s:8.2f}" for t, e, r, h, s in rows]
        frozen = f"freezes at {self.freeze_temperature:.4g}; try lr0={self.recommended_lr0:.3g}, "
        frozen += f"sigma={self.recommended_sigma:.3g}, maxiter={self.recommended_steps}"
        return "\n".join([head, *lines, frozen])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the mean energy and R-hat over the temperature."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        ax.semilogx(self.temperatures, self.energy, "o-", label="mean energy")
        ax.set(xlabel="temperature τ", ylabel="f")
        twin = ax.twinx()
        twin.semilogx(self.temperatures, self.r_hat, "s--", color="0.5", label="R-hat")
        twin.axhline(FREEZE, color="0.8")
        twin.set_ylabel("R-hat")
        if self.freeze_temperature > 0:
            ax.axvline(self.freeze_temperature, color="C3", label="freezes")
        ax.legend()
        return ax


def annealing_report(
    fun: Callable[..., Any],
    jac: Callable[..., ArrayLike],
    *,
    x0: ArrayLike | Callable[[np.random.Generator, int], ArrayLike],
    temperatures: ArrayLike,
    args: tuple[Any, ...] = (),
    n_chains: int = 64,
    steps: int = 2000,
    L: float | None = None,
    vectorized: bool = False,
    rng: RNGLike = None,
    show_progress: bool | None = None,
) -> AnnealReport:
    """Run chains at fixed temperatures, and report where they stop mixing.

    All chains run at the step size 0.1/L with exact gradients and injected noise, from the same
    starts at every temperature; the first half of the steps is left out.

    Parameters
    ----------
    fun, jac : callable
        As in `minimize_annealed_sgd`.
    x0 : array_like of shape (n,) or (chains, n), or callable
        Starts, which should lie all over the domain: ``x0(rng, n_chains)`` may draw them.
    temperatures : array_like of shape (t,)
        All > 0.
    args : tuple, optional
    n_chains : int ≥ 4, default 64
    steps : int ≥ 100, default 2000
    L : float, optional
        Largest curvature, by default by power iteration at some of the starts.
    vectorized : bool, default False
    rng : int, Generator or None
    show_progress : bool, optional
        By default only on a terminal.

    Returns
    -------
    AnnealReport

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and if chains diverge.

    Notes
    -----
    t · n_chains · steps gradients; O(n_chains · n) memory, and 500 values of f and the
    coordinates of each chain.

    References
    ----------
    "SGD with learning-rate decay for global nonconvex optimization", NeurIPS 2026. A. Gelman,
    D. Rubin, "Inference from iterative simulation using multiple sequences", Statistical
    Science 7 (1992).

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.training import annealing_report
    >>> report = annealing_report(
    ...     lambda x: ((x**2 - 1) ** 2 / 4 + 0.1 * x).sum(axis=-1),
    ...     lambda x: (x**2 - 1) * x + 0.1,
    ...     x0=lambda rng, n: rng.uniform(-1.5, 1.5, (n, 1)),
    ...     temperatures=[0.3, 0.01],
    ...     vectorized=True,
    ...     rng=0,
    ... )
    >>> report.freeze_temperature
    0.01
    """
    taus = np.sort(check_array("temperatures", temperatures, shape=("t",)))[::-1].copy()
    if not len(taus) or taus[-1] <= 0:
        raise ValueError(f"temperatures must be > 0 and at least one, got {temperatures!r}")
    check_integer("n_chains", n_chains, at_least=4)
    check_integer("steps", steps, at_least=100)
    stream = as_generator(rng)
    objective = Objective(fun, jac, args, vectorized, stream)
    starts = check_starts(x0(stream, n_chains) if callable(x0) else x0, n_chains)
    if L is None:
        some = starts[stream.permutation(len(starts))[:CURVATURE_POINTS]]
        L = largest_curvature(objective, some, stream, np.zeros(1))
    lr = STEP_SHARE / check_number("L", L, above=0)
    with progress("annealing report", len(taus), show=show_progress) as advance:
        rows = []
        for tau in taus.tolist():
            rows.append(_at_temperature(objective, starts, tau, lr, steps, stream))
            advance()
    energy, relaxation, r_hat, share, profile = (
        np.array(column) for column in zip(*rows, strict=True)
    )
    frozen = taus[r_hat > FREEZE]
    times = relaxation[np.isfinite(relaxation) & (r_hat <= FREEZE)]
    octaves = max(1.0, math.log2(taus[0] / taus[-1]))
    lr0 = 0.5 / L
    longest = float(times.max()) if len(times) else steps * lr
    repeats = [objective.gradients(np.tile(x, (8, 1))) for x in starts[:4]]
    return AnnealReport(
        temperatures=taus,
        energy=energy,
        relaxation_time=relaxation,
        r_hat=r_hat,
        profile=profile,
        freeze_temperature=float(frozen[0]) if len(frozen) else 0.0,
        share_in_best=share,
        lr=lr,
        recommended_lr0=lr0,
        recommended_sigma=math.sqrt(2 * taus[0] / lr0),
        recommended_steps=math.ceil(20 * octaves * longest / lr0),
        sigma=np.array([math.sqrt(float(g.var(axis=0, ddof=1).mean())) for g in repeats]),
    )


def _at_temperature(
    objective: Objective,
    starts: Array,
    tau: float,
    lr: float,
    steps: int,
    rng: np.random.Generator,
) -> tuple[float, float, float, float, list[float]]:
    """Return mean energy, relaxation time, R-hat, the share in the best well and the profile."""
    sigma = math.sqrt(2 * tau / lr)
    noise = Noise(len(starts), starts.shape[1], rng)
    x = starts.copy()
    spacing = max(1, steps // 2 // KEPT)
    points, energies, slopes = [], [], []
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(steps):
            gradient = objective.gradients(x)
            if k >= steps // 2 and (k - steps // 2) % spacing == 0:
                points.append(x)
                energies.append(objective.values(x))
                slopes.append((gradient**2).sum(axis=1))
            x = x - lr * (gradient + sigma * noise())
    path, f = np.stack(points), np.stack(energies)
    if not (np.isfinite(f).all() and np.isfinite(path).all()):
        raise ValueError(f"chains diverged at temperature {tau:g}; give a larger L")
    observables = np.concatenate([f[..., None], path], axis=2)
    r_hat = max(gelman_rubin(observables[..., i]) for i in range(observables.shape[2]))
    last = f[-max(1, len(f) // 10) :].mean(axis=0)
    low = f.min() + 0.1 * (f.max() - f.min())
    profile = [
        max(
            _profile(f, float(np.mean(slopes)), tau, r),
            *(_profile(path[..., i], 1.0, tau, r) for i in range(path.shape[2])),
        )
        for r in PROFILE_LEVELS
    ]
    relaxation = autocorrelation_time(f) * spacing * lr
    return float(f.mean()), relaxation, r_hat, float((last <= low).mean()), profile


def gelman_rubin(chains: Array) -> float:
    """Return R-hat of one quantity, chains of shape (time, chains), each split in two."""
    half = len(chains) // 2
    split = np.concatenate([chains[:half], chains[half : 2 * half]], axis=1)
    within = float(split.var(axis=0, ddof=1).mean())
    between = float(split.mean(axis=0).var(ddof=1))
    if within == 0:
        return 1.0 if between == 0 else math.inf
    return math.sqrt((half - 1) / half + between / within)


def autocorrelation_time(chains: Array) -> float:
    """Return the integrated autocorrelation time of chains (time, chains), in steps.

    Summed up to Sokal's window of five times itself; NaN for constant chains.
    """
    centered = chains - chains.mean(axis=0)
    n = len(centered)
    transform = np.fft.rfft(centered, 2 * n, axis=0)
    correlation = np.fft.irfft((np.abs(transform) ** 2).mean(axis=1))[:n]
    if correlation[0] <= 0:
        return math.nan
    times = 2 * np.cumsum(correlation / correlation[0]) - 1
    window = np.flatnonzero(np.arange(n) >= 5 * times)
    return float(times[window[0] if len(window) else n - 1])


def _profile(u: Array, slope: float, tau: float, r: float) -> float:
    """Return (Var u - r osc²)₊ / (τ E‖∇u‖²), a lower bound on the weak Poincaré profile."""
    oscillation = float(np.ptp(u))
    excess = max(float(u.var()) - r * oscillation**2, 0.0)
    return excess / (tau * slope) if slope > 0 else 0.0
