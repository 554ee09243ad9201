"""Clipped SGD and SSTM on median-of-means gradients, as a minimizer of NumPy functions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    Report,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.common.random import RNGLike, as_generator
from thalweg.common.torch_gradients import MAX_NONFINITE_IN_A_ROW
from thalweg.training.clipped_mom import AUTO_FACTOR, WINDOW, Clip, check_clip
from thalweg.training.curvature import hessian_norm
from thalweg.training.robust_means import check_block_number

Vector = NDArray[np.float64]
JacSamples = Callable[[Vector, int, np.random.Generator], ArrayLike]

CHECKPOINTS = 100
IGNORED = ("jac", "hess", "hessp", "tol")


def minimize_clipped_mom(
    fun: Callable[..., float],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac_samples: JacSamples,
    N: int = 15,
    k: int = 5,
    lr: float | None = None,
    L: float | None = None,
    mu: float = 0.0,
    clip: Clip = "auto",
    method: Literal["sgd", "sstm"] = "sgd",
    a: float = 1.0,
    B: float | None = None,
    maxiter: int = 1000,
    average: bool = False,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    """Minimize a smooth function from gradients whose noise may have no variance, or no mean.

    Each step takes N gradients, the median of k block means of them (see `median_of_means`), and
    clips it.

    Usable as ``scipy.optimize.minimize(fun, x0, method=minimize_clipped_mom, options={...})``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``, the loss; evaluated about 100 times, for the trace.
    x0 : array_like of shape (n,)
    args : tuple, optional
        For ``fun``.
    jac_samples : callable
        ``jac_samples(x, N, rng) -> (N, n)``, independent gradients at x.
    N : int, default 15
        Gradients per step.
    k : int, odd, at most N, default 5
        Blocks; see `choose_blocks`.
    lr : float, optional
        Step size of "sgd", by default 0.5/L.
    L : float, optional
        Smoothness, by default by power iteration at ``x0``.
    mu : float, default 0
        Strong convexity: if > 0, "sstm" starts over every ⌈√(8aL/mu)⌉ steps.
    clip : float or "auto", default "auto"
        Clipping level; "auto" is twice the median norm of the last 100 estimates.
    method : {"sgd", "sstm"}
        Clipped SGD, or the clipped method of similar triangles (`ClippedSSTM`), accelerated and
        for convex functions.
    a, B : float
        Of "sstm": steps are divided by a; with B the clipping level is B/α.
    maxiter : int, default 1000
        Steps.
    average : bool, default False
        Return the mean of the iterates of the second half ("sgd").
    rng : int, Generator or None
    callback : callable, optional
        Called after each step with x, or with a parameter ``intermediate_result``;
        `StopIteration` stops.
    **unknown
        Other options of `scipy.optimize.minimize`; bounds and constraints are refused.

    Returns
    -------
    OptimizeResult
        ``x, fun, nit, nfev, njev`` (gradients), ``n_skipped`` (estimates that were not finite),
        ``success, status, message``, ``trace`` with arrays step, fun, norm, level. status 0:
        budget spent; 2: interrupted; 3: ten estimates in a row were not finite; 4: the loss is
        not finite; 99: callback.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    N gradients and O(Nn) per step.

    References
    ----------
    "Clipped optimization with median-of-means gradients", NeurIPS 2026.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.training import minimize_clipped_mom
    >>> result = minimize_clipped_mom(
    ...     lambda x: x @ x / 2,
    ...     np.full(5, 3.0),
    ...     jac_samples=lambda x, N, rng: x + rng.standard_cauchy((N, 5)),  # no mean
    ...     k=15,
    ...     lr=0.1,
    ...     rng=0,
    ... )
    >>> result.success, bool(result.fun < 0.1)
    (True, True)
    """
    refuse_constraints("minimize_clipped_mom", unknown)
    warn_of_unknown(unknown, ignored=IGNORED)
    report = intermediate_report(callback)
    start = check_array("x0", x0, shape=("n",))
    check_integer("N", N, at_least=1)
    check_block_number(k, N, "gradients per step, N")
    check_choice("method", method, ("sgd", "sstm"))
    check_choice("average", average, (False, True))
    check_number("mu", mu, at_least=0)
    check_integer("maxiter", maxiter, at_least=1)
    stream = as_generator(rng)
    estimate = _Estimator(jac_samples, N, k, len(start))
    if L is None and (lr is None or method == "sstm"):
        L = hessian_norm(estimate, start, stream)
    if lr is None:
        lr = 0.5 / check_number("L", L, above=0)
    check_number("lr", lr, above=0)
    path: _Descent | _Triangle
    if method == "sgd":
        path = _Descent(start, lr, average, maxiter)
    else:
        path = _Triangle(
            start,
            check_number("L", L, above=0),
            check_number("a", a, at_least=1),
            None if B is None else check_number("B", B, above=0, allow_infinite=True),
            mu,
        )
    run = _Run(fun, args, path, _Clipper(check_clip(clip)), report)
    status, message = run.go(estimate, maxiter, stream)
    x = path.output()
    value = run.evaluate(x)
    if status == 0 and not math.isfinite(value):
        status, message = 4, "The loss of the output is not finite; lower lr."
    return optimize_result(
        x=x,
        fun=value,
        nit=run.n_steps,
        nfev=run.nfev,
        njev=estimate.njev,
        n_skipped=run.n_skipped,
        success=status == 0,
        status=status,
        message=message,
        trace=run.trace(),
    )


def block_median(samples: Vector, k: int) -> Vector:
    """Return the median of k block means of (N, n) samples; row i is in block i mod k.

    Entries that are not finite pass through where they are in the majority.
    """
    n = len(samples)
    if k == 1:
        mean: Vector = samples.mean(axis=0)
        return mean
    if k == n:
        means = samples.copy()
    else:
        counts = [len(range(j, n, k)) for j in range(k)]
        means = np.stack([samples[j::k].sum(axis=0) / c for j, c in enumerate(counts)])
    means.partition(k // 2, axis=0)
    return np.asarray(means[k // 2])


class _Estimator:
    """The median of means of N gradients."""

    def __init__(self, jac_samples: JacSamples, N: int, k: int, n: int) -> None:
        if not callable(jac_samples):
            raise TypeError(
                f"jac_samples must be callable as jac_samples(x, N, rng), got {jac_samples!r}"
            )
        self._jac_samples = jac_samples
        self._N, self._k, self._n = N, k, n
        self.njev = 0

    def __call__(self, x: Vector, rng: np.random.Generator) -> Vector:
        self.njev += self._N
        given = self._jac_samples(x.copy(), self._N, rng)
        samples = check_array(
            "jac_samples(x, N, rng)", given, shape=(self._N, self._n), finite=False
        )
        with np.errstate(over="ignore", invalid="ignore"):
            return block_median(samples, self._k)


class _Clipper:
    """Scales an estimate to at most a level, fixed or running."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        self._norms: list[float] = []

    def level(self, norm: float) -> float:
        """Return the level for an estimate of this norm."""
        if self._clip != "auto":
            return float(self._clip)
        level = AUTO_FACTOR * statistics.median(self._norms) if self._norms else norm
        self._norms = [*self._norms, norm][-WINDOW:]
        return level


class _Descent:
    """x ← x - lr · g."""

    def __init__(self, x: Vector, lr: float, average: bool, maxiter: int) -> None:
        self.x = x.copy()
        self._lr = lr
        self._mean = np.zeros_like(x)
        self._weight = 0
        self._start = maxiter // 2 if average else maxiter
        self._t = 0

    def level(self) -> float | None:
        """Return the path's own clipping level: none."""
        return None

    def move(self, gradient: Vector) -> None:
        """Make one step."""
        self.x = self.x - self._lr * gradient
        self._t += 1
        if self._t > self._start:
            self._weight += 1
            self._mean += (self.x - self._mean) / self._weight

    def output(self) -> Vector:
        """Return the last iterate, or the mean."""
        return self._mean.copy() if self._weight else self.x.copy()


class _Triangle:
    """The iteration of `ClippedSSTM`."""

    def __init__(self, x: Vector, L: float, a: float, B: float | None, mu: float) -> None:
        self.x, self._y, self._z = x.copy(), x.copy(), x.copy()
        self._unit = 1 / (2 * a * L)
        self._B = B
        self._restart = math.ceil(math.sqrt(8 * a * L / mu)) if mu > 0 else math.inf
        self._t = 0

    @property
    def _alpha(self) -> float:
        return (self._t + 2) * self._unit

    @property
    def _share(self) -> float:
        """Return α_{t+1}/A_{t+1} = 2(t + 2)/((t + 1)(t + 4))."""
        return 2 * (self._t + 2) / ((self._t + 1) * (self._t + 4))

    def level(self) -> float | None:
        """Return B/α, if B is given."""
        return None if self._B is None else self._B / self._alpha

    def move(self, gradient: Vector) -> None:
        """Make one step."""
        self._z = self._z - self._alpha * gradient
        self._y = self._y + self._share * (self._z - self._y)
        self._t += 1
        if self._t >= self._restart:
            self._t, self._z = 0, self._y.copy()
        self.x = self._y + self._share * (self._z - self._y)

    def output(self) -> Vector:
        """Return y."""
        return self._y.copy()


class _Run:
    """Steps, counts, and the trace."""

    def __init__(
        self,
        fun: Callable[..., float],
        args: tuple[Any, ...],
        path: _Descent | _Triangle,
        clipper: _Clipper,
        report: Report | None,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"fun must be callable, got {type(fun).__name__}")
        self._fun, self._args = fun, args
        self._path, self._clipper, self._report = path, clipper, report
        self.n_steps = self.n_skipped = self.nfev = 0
        self._rows: list[tuple[int, float, float, float]] = []

    def evaluate(self, x: Vector) -> float:
        """Return the loss."""
        self.nfev += 1
        with np.errstate(over="ignore", invalid="ignore"):
            return float(self._fun(x.copy(), *self._args))

    def go(self, estimate: _Estimator, maxiter: int, rng: np.random.Generator) -> tuple[int, str]:
        """Make the steps; return SciPy's status and message."""
        in_a_row = 0
        try:
            for step in range(maxiter):
                gradient = estimate(self._path.x, rng)
                with np.errstate(over="ignore"):
                    norm = float(np.linalg.norm(gradient))
                if math.isfinite(norm):
                    in_a_row = 0
                    self._step(gradient, norm, step >= len(self._rows) * maxiter / CHECKPOINTS)
                    continue
                in_a_row += 1
                self.n_skipped += 1
                if in_a_row >= MAX_NONFINITE_IN_A_ROW:
                    return 3, f"{in_a_row} estimates in a row were not finite; lower lr."
        except StopIteration:
            return 99, "The callback raised StopIteration."
        except KeyboardInterrupt:
            return 2, "Interrupted; x is the last output."
        return 0, f"The budget of {maxiter} steps is spent."

    def _step(self, gradient: Vector, norm: float, due: bool) -> None:
        own = self._path.level()
        level = self._clipper.level(norm) if own is None else own
        if due:
            self._rows.append((self.n_steps, self.evaluate(self._path.output()), norm, level))
        self._path.move(gradient * min(1.0, level / norm) if norm > 0 else gradient)
        self.n_steps += 1
        if self._report is not None:
            self._report(x=self._path.output(), nit=self.n_steps, norm=norm, level=level)

    def trace(self) -> dict[str, NDArray[Any]]:
        """Return what was noted, about a hundred times."""
        columns = zip(*self._rows, strict=True) if self._rows else [()] * 4
        names = ("step", "fun", "norm", "level")
        return {name: np.array(column) for name, column in zip(names, columns, strict=True)}
