"""Iteratively regularized conditional gradient for simple bilevel problems."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult

from thalweg.bilevel.conditional_gradient_steps import (
    ConditionalGradient,
    exact_gap,
)
from thalweg.bilevel.finite_sums import StochasticObjective, check_objective
from thalweg.bilevel.gradient_estimators import (
    Estimator,
    ExactGradient,
    Spider,
    Storm,
    check_gradient,
)
from thalweg.bilevel.linear_oracles import Atom
from thalweg.bilevel.vanishing_regularization import Method, make_schedule
from thalweg.bilevel.weighted_average import WeightedAverage
from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    NotFiniteError,
    Report,
    intermediate_report,
    optimize_result,
)
from thalweg.common.progress import Advance, progress
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]
PerLevel = int | tuple[int, int]

MESSAGES = {
    0: "All steps are made.",
    1: "The budget of steps is spent before the gap is at most gtol.",
    2: "Interrupted; x is the output of the steps made so far.",
    3: "A gradient is not finite; x is the output of the steps before.",
    99: "The callback raised StopIteration.",
}
LONGEST_RUN = 4096  # steps between looks at the keyboard


def ir_cg(
    inner: StochasticObjective,
    outer: StochasticObjective,
    lmo: Callable[[Array], Array | Atom],
    x0: ArrayLike,
    *,
    method: Method = "irscg",
    outer_convex: bool = True,
    reg: float | Literal["auto"] = "auto",
    p: float | None = None,
    omega: float | None = None,
    batch: PerLevel | None = None,
    epoch: PerLevel | None = None,
    maxiter: int = 10_000,
    gtol: float | None = None,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    show_progress: bool | None = False,
) -> OptimizeResult:
    r"""Minimize an outer objective F over all minimizers of a convex inner one, G, over a set X.

    .. math:: \min_x F(x) \quad \text{subject to} \quad x \in \arg\min_{v \in X} G(v)

    Every step minimizes a linear function over X itself, in the direction of estimates of the
    gradients, with a weight of F that vanishes slowly:

    .. math:: v_t = \arg\min_{v \in X} \langle \sigma_t \hat\nabla F_t + \hat\nabla G_t, v \rangle,
              \qquad x_{t+1} = x_t + \alpha_t (v_t - x_t), \qquad
              \sigma_t = \varsigma (t + 1)^{-p}

    There is no projection, and no cut of X by the value of G, which would make each step a linear
    program. Where F and G are deterministic and X is easy to project on, projected methods get more
    accurate in fewer steps.

    Parameters
    ----------
    inner, outer : StochasticObjective
        G, which must be convex, which cannot be checked, and F: for example `LeastSquares`,
        `Logistic`, `TorchLoss`, `Expectation`.
    lmo : callable
        ``lmo(c)``: a minimizer of ⟨c, v⟩ over X, as an array of the shape of x or an `Atom`: for
        example `L1Ball`, `NuclearBall`, `Polytope`. X must be convex and bounded.
    x0 : array_like
        A point of X, of any shape. With α₀ = 1 (all but "irfscg") it only gives the first
        gradients.
    method : {"irscg", "irfscg", "deterministic"}
        One sample of each objective per step, by STORM; finite sums, by SPIDER; or full gradients.
    outer_convex : bool, default True
        Whether F is convex. It decides about steps and output.
    reg : float ≥ 0 or "auto"
        ς, in units of G over F. "auto" balances the gradients at x0, ‖∇G‖/‖∇F‖. 0 ignores F.
    p : float, optional
        Default 1/4 ("irscg") or 1/2; 2/7 or 1/2 if F is not convex. Of "irscg" below 1/2, or below
        ω/2; of the others below 1, or below ω. Larger favors G.
    omega : float in (0, 1), optional
        ω of α_t = (t + 1)^(-ω) for an F that is not convex: default 6/7 ("irscg") or 3/4.
    batch : int or (int, int), optional
        Samples per step, or those of inner and outer: default 1 ("irscg") or ⌊√n⌋.
    epoch : int or (int, int), optional
        Steps between full gradients of "irfscg": default ⌊√n⌋.
    maxiter : int, default 10 000
        Steps.
    gtol : float ≥ 0, optional
        Stop where the Frank-Wolfe gap ⟨σ∇F + ∇G, x - v⟩ is at most this, at a step that takes full
        gradients: not with "irscg", where noise would fake it.
    rng : int, Generator or None
        The source of the samples.
    callback : callable, optional
        Called at each record, after step 1, 2, 4, 8, … and the last, as ``callback(x)``, or as
        ``callback(intermediate_result=...)`` if that is its only parameter's name. It stops the run
        by raising `StopIteration`.
    show_progress : bool or None, default False
        Show a progress bar; None does if stderr is a terminal.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x`` is z_T, a weighted average of the iterates, or x_T if F is not convex; ``x_last`` =
        x_T, ``x_avg`` = z_T (None if F is not convex or the run too short); ``fun_inner`` = G(x),
        ``fun_outer`` = ``fun`` = F(x); ``fw_gap_inner`` and ``fw_gap_mix``, the gaps of G and of
        σF + G at x; ``sigma`` = σ_T; ``reg`` = ς; ``nit`` steps, ``n_lmo``, and the evaluations of
        gradients of components, ``n_grad_inner`` and ``n_grad_outer``; ``history``, a dict of
        arrays with a row for each record: ``nit``, ``time`` in seconds (without that of recording),
        ``fun_inner``, ``fun_outer``, ``sigma``, ``n_grad_inner``, ``n_grad_outer``. ``success`` is
        whether ``status`` is 0; it is 1 when the budget is spent before ``gtol`` is reached, 2
        after Ctrl-C, 3 where a gradient is not finite, 99 when the callback stopped the run.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; x0 outside of X, if ``lmo.contains`` can tell; a
        gradient at x0 that is not finite; an ``lmo`` that returns another shape, infinity or a
        point that is worse than x; "irfscg" without n.

    Warns
    -----
    UserWarning
        If "irfscg" ends before its first epoch does: z is not defined, and x_T is returned.

    Notes
    -----
    *Cost.* One linear minimization per step. "irscg" two sample gradients of each objective;
    "irfscg" 2⌊√n⌋, and n every ⌊√n⌋ steps. Six vectors of memory. One-sample steps of
    `LeastSquares` and `Logistic` over an `L1Ball` or `Simplex` are compiled; they cost two rows
    each, and a search for the largest entry of the estimate.

    *Rates.* Both gaps fall as t^(-1/4) ("irscg") or t^(-1/2) ("irfscg"), and with an F that is not
    convex as t^(-1/7) or t^(-1/4), up to logarithms. F(x) is below the optimum for long, since x is
    not yet a minimizer of G: compare F only at equal G.

    *Scaling.* A one-sample run starts from one vertex and one gradient. With a large set or rows of
    very different norms that takes long to forget: normalize the rows, or take batches.

    *Ours.* The paper's are the steps, estimates, schedules, rates and the average. "auto", the
    test of the gap, batches of "irscg", separate epochs of two finite sums (α and σ use the longer
    one), "deterministic" with an F that is not convex (the steps of "irfscg", without the constant
    start), and the ranges of p and ω beyond the defaults, derived from the same error terms, are
    our resolution.

    References
    ----------
    "Iteratively regularized conditional gradient for simple bilevel optimization", NeurIPS 2025.
    A. Cutkosky and F. Orabona, "Momentum-based variance reduction in non-convex SGD", NeurIPS 2019.
    C. Fang, C. J. Li, Z. Lin and T. Zhang, "SPIDER: near-optimal non-convex optimization via
    stochastic path-integrated differential estimator", NeurIPS 2018.

    Examples
    --------
    Of all fits to three equations, the one that best agrees with others:

    >>> import numpy as np
    >>> from thalweg.bilevel import L1Ball, LeastSquares, ir_cg
    >>> rng = np.random.default_rng(0)
    >>> x = np.array([1.0, -0.5, 0.0, 0.0, 0.2])
    >>> A, B = rng.standard_normal((3, 5)), rng.standard_normal((50, 5))
    >>> inner, outer = LeastSquares(A, A @ x), LeastSquares(B, B @ x)
    >>> result = ir_cg(
    ...     inner, outer, L1Ball(3.0), np.zeros(5), method="irfscg", maxiter=1000, rng=0
    ... )
    >>> result.success, result.fun_inner < 1e-4, result.fun_outer < 1e-2
    (True, True, True)
    """
    check_objective("inner", inner)
    check_objective("outer", outer)
    if not callable(lmo):
        raise TypeError(f"lmo must be callable, got {type(lmo).__name__}")
    check_choice("method", method, ("irscg", "irfscg", "deterministic"))
    check_choice("outer_convex", outer_convex, (True, False))
    check_integer("maxiter", maxiter, at_least=1)
    report = intermediate_report(callback)
    if reg != "auto":
        check_number("reg", reg, at_least=0)
    if gtol is not None:
        check_number("gtol", gtol, at_least=0)
        if method == "irscg":
            raise ValueError("gtol must be None for method='irscg', which takes no full gradients")
    start = _start(x0, lmo)
    inner_level, outer_level, longest = _estimators(
        method, (inner, outer), batch, epoch, as_generator(rng)
    )
    schedule = make_schedule(method, outer_convex, p, omega, longest)
    run = ConditionalGradient(
        inner_level,
        outer_level,
        lmo,
        start,
        schedule,
        WeightedAverage(schedule, start.shape) if outer_convex else None,
        None if reg == "auto" else float(reg),
    )
    for name, objective in (("inner", inner), ("outer", outer)):
        if objective.n is not None or method == "deterministic":
            check_gradient(objective, start, name)
    status, history = _run(run, maxiter, gtol, report, show_progress)
    return _result(run, status, history, gtol)


def _start(x0: ArrayLike, lmo: Any) -> Array:
    if np.iscomplexobj(x0):
        raise TypeError("x0 must be real, got complex numbers")
    start = check_array("x0", x0, shape=("d",) * np.ndim(x0)).copy()
    if start.size == 0:
        raise ValueError("x0 must have at least one entry")
    if hasattr(lmo, "contains") and not lmo.contains(start):
        raise ValueError("x0 must be a point of the set of lmo")
    return start


def _estimators(
    method: Method,
    objectives: tuple[StochasticObjective, StochasticObjective],
    batch: PerLevel | None,
    epoch: PerLevel | None,
    rng: np.random.Generator,
) -> tuple[Estimator, Estimator, int]:
    """Return the estimators of both levels, and the longest epoch, or 0 if there are none."""
    batches, epochs = _per_level("batch", batch), _per_level("epoch", epoch)
    if method != "irfscg" and epoch is not None:
        raise ValueError(f"epoch must be None for method={method!r}, which has none")
    if method == "deterministic":
        if batch is not None:
            raise ValueError("batch must be None for method='deterministic', which draws none")
        return ExactGradient(objectives[0]), ExactGradient(objectives[1]), 0
    streams = rng.spawn(2)
    if method == "irscg":
        first, second = (
            Storm(f, stream, size or 1)
            for f, stream, size in zip(objectives, streams, batches, strict=True)
        )
        return first, second, 0
    levels = []
    for name, f, stream, size, length in zip(
        ("inner", "outer"), objectives, streams, batches, epochs, strict=True
    ):
        if f.n is None:
            raise ValueError(f"{name}.n must be an integer for method='irfscg', got None")
        root = math.isqrt(f.n)
        levels.append(Spider(f, stream, size or root, length or root))
    return levels[0], levels[1], max(level.epoch for level in levels)


def _per_level(name: str, value: PerLevel | None) -> tuple[int | None, int | None]:
    if value is None:
        return None, None
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} must be an integer or a pair of them, got {value!r}")
    return check_integer(name, pair[0], at_least=1), check_integer(name, pair[1], at_least=1)


def _run(
    run: ConditionalGradient,
    maxiter: int,
    gtol: float | None,
    report: Report | None,
    show_progress: bool | None,
) -> tuple[int, dict[str, Array]]:
    """Make steps; return why they end, and the records."""
    rows: list[dict[str, float]] = []
    seconds = 0.0
    status = 0 if gtol is None else 1
    try:
        with progress("IR-CG", maxiter, show=show_progress) as advance:
            for stop in _records(maxiter):
                begin = time.perf_counter()
                try:
                    converged = _advance_to(run, stop, gtol, advance)
                finally:
                    seconds += time.perf_counter() - begin
                rows.append(_record(run, seconds))
                if report is not None:
                    report(x=run.point, fun=rows[-1]["fun_outer"], **rows[-1])
                if converged:
                    status = 0
                    break
    except StopIteration:
        status = 99
    except KeyboardInterrupt:
        status = 2
    except NotFiniteError:
        status = 3
    if not rows or rows[-1]["nit"] != run.t:
        rows.append(_record(run, seconds))
    return status, {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _records(maxiter: int) -> list[int]:
    """Return the steps 1, 2, 4, … and the last, after which values are recorded."""
    return [2**k for k in range(maxiter.bit_length()) if 2**k < maxiter] + [maxiter]


def _advance_to(run: ConditionalGradient, stop: int, gtol: float | None, advance: Advance) -> bool:
    while run.t < stop:
        before = run.t
        if run.advance(min(LONGEST_RUN, stop - run.t), gtol):
            return True
        advance(run.t - before)
    return False


def _record(run: ConditionalGradient, seconds: float) -> dict[str, float]:
    point = run.point
    return {
        "nit": run.t,
        "time": seconds,
        "fun_inner": float(run.inner.objective.value(point)),
        "fun_outer": float(run.outer.objective.value(point)),
        "sigma": run.sigma,
        "n_grad_inner": run.inner.evaluations,
        "n_grad_outer": run.outer.evaluations,
    }


def _result(
    run: ConditionalGradient, status: int, history: dict[str, Array], gtol: float | None
) -> OptimizeResult:
    x = run.point
    x_avg = None if run.average is None else run.average.at(run.t, run.x)
    if run.average is not None and x_avg is None:
        warnings.warn(
            f"the average is not defined before step {run.schedule.warmup + 1}, the end of the "
            "first epoch: x is the last iterate; raise maxiter",
            stacklevel=3,
        )
    G, F = (np.asarray(level.objective.grad(x)) for level in (run.inner, run.outer))
    message = MESSAGES[status]
    if status == 0 and gtol is not None:
        message = "The Frank-Wolfe gap is at most gtol."
    return optimize_result(
        x=x,
        x_last=run.x,
        x_avg=x_avg,
        fun=float(history["fun_outer"][-1]),
        fun_inner=float(history["fun_inner"][-1]),
        fun_outer=float(history["fun_outer"][-1]),
        fw_gap_inner=exact_gap(G, run.lmo, x),
        fw_gap_mix=exact_gap(run.sigma * F + G, run.lmo, x),
        sigma=run.sigma,
        reg=run.reg,
        nit=run.t,
        n_lmo=run.n_lmo,
        n_grad_inner=run.inner.evaluations,
        n_grad_outer=run.outer.evaluations,
        success=status == 0,
        status=status,
        message=message,
        history=history,
    )
