"""Global minimization by SGD whose step size, and with it the temperature, falls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize
from scipy.optimize import OptimizeResult

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    Report,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.common.random import RNGLike, as_generator
from thalweg.training.annealed_chains import (
    CURVATURE_POINTS,
    Box,
    Noise,
    Objective,
    check_box,
    check_noise_kind,
    check_sigma,
    check_starts,
    draw_points,
    gradient_noise,
    largest_curvature,
)
from thalweg.training.annealing_laws import Law, check_law, step_sizes

Array = NDArray[np.float64]

ENERGY_POINTS = 64
DEFAULT_RATIO = 1e-3
TAIL_SHARE = 0.01
CHECKPOINTS = 100
POLISH_ITERATIONS = 100
IGNORED = ("hess", "hessp", "tol")


def minimize_annealed_sgd(
    fun: Callable[..., Any],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | None = None,
    sigma: float | Literal["auto"] = "auto",
    noise: Literal["inject", "given"] = "inject",
    lr0: float | None = None,
    lr_min: float | None = None,
    L: float | None = None,
    target_accuracy: float | None = None,
    law: Law = "geometric",
    power: float = 1.0,
    maxiter: int = 20_000,
    burn_in: float = 0.1,
    n_chains: int = 8,
    polish: bool = True,
    bounds: Any = None,
    domain: Any = None,
    vectorized: bool = False,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize a function with many local minima by SGD that starts hot and cools down.

    .. math:: x_{k+1} = x_k - h_k (\nabla f(x_k) + \sigma \xi_k), \qquad
              \text{temperature } \tau_k = h_k \sigma^2 / 2.

    A constant step that rests within ε of the minimum is too cold to leave a wrong well: it needs
    exponentially many steps in 1/ε. Decay crosses the barriers first and descends later. This
    works where the gap in value between basins is comparable with the barrier between them
    (Rastrigin, Ackley, …); a deep and narrow well in a plain is found by nobody who feels only
    gradients. `annealing_report` shows which case is at hand.

    Usable as ``scipy.optimize.minimize(fun, x0, jac=jac, method=minimize_annealed_sgd)``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``; exact, used to set the temperature, to choose among the chains
        and for the trace.
    x0 : array_like of shape (n,) or (chains, n)
        Where all chains start, or each.
    args : tuple, optional
    jac : callable
        ``jac(x, *args) -> (n,)``, the gradient, exact or noisy; a parameter ``rng`` gets the
        random stream.
    sigma : float or "auto"
        Standard deviation of the noise per coordinate, injected, or present in ``jac`` with
        noise="given" (by default measured). By default the first temperature is the energy scale:
        the median of f(y) - min f over 64 points of the domain, divided by n.
    noise : {"inject", "given"}
        Whether Gaussian noise is added to an exact gradient, or ``jac`` is noisy by itself.
    lr0, lr_min : float, optional
        First and last step size h, by default 0.5/L (for given noise at most what makes the first
        temperature the energy scale) and 10⁻³ of that.
    L : float, optional
        Largest curvature, by default from 20 power iterations at 10 points of the domain. With
        noise="given" that is crude: give it.
    target_accuracy : float, optional
        ε: sets lr_min to 2ε/(nσ²), at which the mean energy is ε above the minimum.
    law, burn_in, power
        How the step falls; see `AnnealLR`.
    maxiter : int ≥ 2, default 20000
        Steps of each chain.
    n_chains : int, default 8
        Independent runs; the number of rows of a two-dimensional ``x0``.
    polish : bool, default True
        Descend from the last iterates by at most 100 iterations of L-BFGS-B. Needs exact
        gradients: it is skipped with noise="given".
    bounds : sequence of (low, high), or scipy.optimize.Bounds, optional
        Iterates are reflected at them.
    domain : same form, optional
        Where minima may lie, for the scales; by default the bounds, else around ``x0``.
    vectorized : bool, default False
        Whether fun and jac take points of shape (chains, n), much faster, and return (chains,)
        and (chains, n).
    rng : int, Generator or None
    callback : callable, optional
        Called about 100 times with the best chain's iterate, or with a parameter
        ``intermediate_result`` (x, fun, nit, njev, temperature); `StopIteration` stops.
    **unknown
        Other options of `scipy.optimize.minimize`; constraints are refused.

    Returns
    -------
    OptimizeResult
        ``x, fun``: the chain with the lowest mean over its last 1 % of steps, polished;
        ``x_last, fun_last``: all last iterates (chains, n) and their values; ``njev, nfev``: over
        all chains; ``lr_path, temperature_path`` of shape (maxiter,); ``sigma, L``; ``trace``
        with arrays step, fun (the chains' median), best, temperature; ``nit, success, status,
        message``. status 0: budget spent; 2: interrupted; 3: diverged twice; 99: callback.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    One gradient per step and chain, O(chains · n) besides. If the iterates diverge, the step is
    halved once. Ours are the geometric law, the choice of the first temperature and the polish;
    the paper proves what decay achieves, with a rate that depends on unknown constants.

    References
    ----------
    "SGD with learning-rate decay for global nonconvex optimization", NeurIPS 2026.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.training import minimize_annealed_sgd
    >>> def rastrigin(x):
    ...     return (x**2 / 2 + 1.5 * (1 - np.cos(2 * np.pi * x)) / (2 * np.pi)).sum(axis=-1)
    >>> def gradient(x):
    ...     return x + 1.5 * np.sin(2 * np.pi * x)
    >>> result = minimize_annealed_sgd(
    ...     rastrigin, np.full(3, 4.0), jac=gradient, vectorized=True, maxiter=5000, rng=0
    ... )
    >>> result.success, bool(result.fun < 1e-8)
    (True, True)
    """
    refuse_constraints("minimize_annealed_sgd", unknown, ("constraints",))
    warn_of_unknown(unknown, ignored=IGNORED)
    report = intermediate_report(callback)
    check_choice("noise", noise, ("inject", "given"))
    check_choice("polish", polish, (False, True))
    starts = check_starts(x0, check_integer("n_chains", n_chains, at_least=1))
    stream = as_generator(rng)
    objective = Objective(fun, jac, args, vectorized, stream)
    box = check_box("bounds", bounds, starts.shape[1])
    area = box if domain is None else check_box("domain", domain, starts.shape[1])
    check_law(law, burn_in, power, 1.0, maxiter)
    scales = _choose_scales(
        objective, starts, area, noise, check_sigma(sigma), lr0, lr_min, L, target_accuracy, stream
    )
    h = step_sizes(maxiter, scales.lr0, scales.lr_min, law, burn_in, power)
    run = _Run(objective, starts, box, scales.sigma if noise == "inject" else 0.0, report)
    status, message = run.cool(h, scales.sigma, stream)
    if status == 3:
        h = h / 2
        run = _Run(objective, starts, box, run.sigma, report)
        status, message = run.cool(h, scales.sigma, stream)
    x, value = run.winner(polish and noise == "inject", status)
    return optimize_result(
        x=x,
        fun=value,
        x_last=run.x,
        fun_last=run.last_values(),
        nit=run.n_steps,
        nfev=objective.nfev,
        njev=objective.njev,
        lr_path=h,
        temperature_path=h * scales.sigma**2 / 2,
        sigma=scales.sigma,
        L=scales.L,
        success=status == 0,
        status=status,
        message=message,
        trace=run.trace(),
    )


def constant_lr_baseline(
    fun: Callable[..., Any], x0: ArrayLike, args: tuple[Any, ...] = (), **options: Any
) -> OptimizeResult:
    """Minimize as `minimize_annealed_sgd` does, at the constant step size ``lr0``.

    It is what the paper compares with. Takes and returns the same.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.training import constant_lr_baseline
    >>> result = constant_lr_baseline(
    ...     lambda x: x @ x / 2, [3.0], jac=lambda x: x, lr0=0.1, sigma=0.0, L=1.0, maxiter=500
    ... )
    >>> bool(result.fun < 1e-12), len(set(result.lr_path))
    (True, 1)
    """
    for name in ("law", "lr_min"):
        if name in options:
            raise TypeError(f"{name} must not be given: the step size is constant")
    return minimize_annealed_sgd(fun, x0, args, law="constant", **options)


@dataclass(frozen=True)
class _Scales:
    """Step sizes, noise and curvature of a run."""

    lr0: float
    lr_min: float
    sigma: float
    L: float


def _choose_scales(
    objective: Objective,
    starts: Array,
    domain: Box | None,
    noise: Literal["inject", "given"],
    sigma: float | None,
    lr0: float | None,
    lr_min: float | None,
    L: float | None,
    target_accuracy: float | None,
    rng: np.random.Generator,
) -> _Scales:
    measured = np.zeros(1)
    if noise == "given":
        measured = gradient_noise(objective, starts[0])
        check_noise_kind(noise, measured)
        sigma = float(np.sqrt((measured**2).mean())) if sigma is None else sigma
    if L is None:
        points = draw_points(starts, domain, CURVATURE_POINTS, rng)
        L = largest_curvature(objective, points, rng, measured)
        if L == 0:
            raise ValueError("L must be given, because jac is constant around x0")
    check_number("L", L, above=0)
    temperature = None
    if sigma is None or (noise == "given" and lr0 is None):
        energies = objective.values(draw_points(starts, domain, ENERGY_POINTS, rng))
        temperature = float(np.median(energies) - energies.min()) / starts.shape[1]
    if lr0 is None:
        lr0 = 0.5 / L
        if noise == "given" and temperature and sigma:
            lr0 = min(1 / L, 2 * temperature / sigma**2)
    check_number("lr0", lr0, above=0)
    if sigma is None:
        assert temperature is not None
        sigma = math.sqrt(2 * temperature / lr0)
    return _Scales(
        lr0, _lowest_step(lr0, lr_min, sigma, target_accuracy, starts.shape[1]), sigma, L
    )


def _lowest_step(
    lr0: float, lr_min: float | None, sigma: float, target_accuracy: float | None, n: int
) -> float:
    if lr_min is not None:
        if check_number("lr_min", lr_min, above=0) > lr0:
            raise ValueError(f"lr_min must be at most lr0={lr0:g}, got {lr_min:g}")
        return lr_min
    if target_accuracy is None or sigma == 0:
        return DEFAULT_RATIO * lr0
    accuracy = check_number("target_accuracy", target_accuracy, above=0)
    return min(2 * accuracy / (n * sigma**2), lr0)


class _Run:
    """The chains, from their starts to their last iterates."""

    def __init__(
        self,
        objective: Objective,
        starts: Array,
        box: Box | None,
        sigma: float,
        report: Report | None,
    ) -> None:
        self.objective = objective
        self.x = starts.copy() if box is None else box.reflect(starts)
        self.box = box
        self.sigma = sigma
        self.report = report
        self.n_steps = 0
        self._rows: list[tuple[int, float, float, float]] = []
        self._tail = np.zeros(len(starts))
        self._tail_steps = 0

    def cool(self, h: Array, sigma: float, rng: np.random.Generator) -> tuple[int, str]:
        """Step along the step sizes; return SciPy's status and message."""
        noise = Noise(len(self.x), self.x.shape[1], rng)
        spacing = len(h) / CHECKPOINTS
        tail_start = len(h) - max(1, round(TAIL_SHARE * len(h)))
        try:
            for k, step in enumerate(h.tolist()):
                if k >= len(self._rows) * spacing and not self._note(k, step * sigma**2 / 2):
                    return 3, "The iterates diverged; lower lr0."
                self._step(step, noise)
                if k >= tail_start:
                    self._tail += self.objective.values(self.x)
                    self._tail_steps += 1
        except StopIteration:
            return 99, "The callback raised StopIteration."
        except KeyboardInterrupt:
            return 2, "Interrupted; x is the best of the last iterates."
        if not np.isfinite(self._tail).any():
            return 3, "The iterates diverged; lower lr0."
        return 0, f"The budget of {len(h)} steps is spent."

    def _step(self, h: float, noise: Noise) -> None:
        """Step: x ← x - h (∇f(x) + σξ), reflected at the bounds."""
        gradient = self.objective.gradients(self.x)
        if self.sigma > 0:
            gradient = gradient + self.sigma * noise()
        x = self.x - h * gradient
        self.x = x if self.box is None else self.box.reflect(x)
        self.n_steps += 1

    def _note(self, k: int, temperature: float) -> bool:
        """Note the chains' values; return whether one is finite still."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.objective.values(self.x)
        finite = np.where(np.isfinite(values), values, np.inf)
        best = int(finite.argmin())
        self._rows.append((k, float(np.median(finite)), float(finite[best]), temperature))
        if self.report is not None:
            self.report(
                x=self.x[best].copy(),
                fun=float(values[best]),
                nit=k,
                njev=self.objective.njev,
                temperature=temperature,
            )
        return bool(np.isfinite(finite[best]))

    def last_values(self) -> Array:
        """Return the values of the last iterates."""
        with np.errstate(over="ignore", invalid="ignore"):
            return self.objective.values(self.x)

    def winner(self, polish: bool, status: int) -> tuple[Array, float]:
        """Return point and value of the best chain."""
        values = self.last_values()
        if polish and status == 0:
            return self._polished(values)
        means = self._tail / self._tail_steps if self._tail_steps else values
        best = int(np.where(np.isfinite(means), means, np.inf).argmin())
        return self.x[best].copy(), float(values[best])

    def _polished(self, values: Array) -> tuple[Array, float]:
        means = np.where(np.isfinite(self._tail), self._tail / self._tail_steps, np.inf)
        best = int(means.argmin())
        x, value = self.x[best].copy(), float(values[best])
        bounds = None if self.box is None else optimize.Bounds(self.box.low, self.box.high)
        for start in self.x[np.isfinite(values)]:
            result = optimize.minimize(
                self.objective.scalar,
                start,
                jac=True,
                method="L-BFGS-B",
                bounds=bounds,
                options={"maxiter": POLISH_ITERATIONS},
            )
            if result.fun < value:
                x, value = np.asarray(result.x), float(result.fun)
        return x, value

    def trace(self) -> dict[str, NDArray[Any]]:
        """Return what was noted, about a hundred times."""
        step, median, best, temperature = zip(*self._rows, strict=True) if self._rows else [()] * 4
        return {
            "step": np.array(step),
            "fun": np.array(median),
            "best": np.array(best),
            "temperature": np.array(temperature),
        }
