"""Minimization of nonsmooth convex functions in few rounds of many queries."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import OptimizeResult

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.common.random import RNGLike, as_generator
from thalweg.convex.lp_geometry import LpBall, check_p
from thalweg.convex.parallel_solvers import (
    AGD_STEP,
    SMOOTHING,
    SmoothingWidth,
    ball_acceleration,
    dual_averaging,
    smoothed_agd,
)
from thalweg.convex.round_oracle import Batch, Executor, PointwiseBatch, RoundOracle
from thalweg.convex.round_progress import Finished, RoundProgress
from thalweg.convex.torch_functions import TorchBatch

Method = Literal["auto", "mirror", "ball", "smoothed-agd"]
METHODS = ("auto", "mirror", "ball", "smoothed-agd")
IGNORED = ("hess", "hessp", "tol")
LEAST_WIDTH = 8


def minimize_parallel(
    fun_batch: Batch | RoundOracle | Callable[..., float],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | Literal["torch"] | None = None,
    p: float = 2.0,
    radius: float = 1.0,
    lipschitz: float = 1.0,
    eps: float,
    method: Method = "auto",
    width: int = 256,
    max_rounds: int = 1000,
    smoothing: float = SMOOTHING,
    step: float = AGD_STEP,
    antithetic: bool = True,
    noisy: bool = False,
    executor: Executor | None = None,
    n_chunks: int | None = None,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize a convex function over an ℓp ball, in few rounds of many (sub)gradients each.

    What is slow is a round: all its queries run at the same time. Nothing but Lipschitz
    continuity is asked of the function; it is smoothed by sampling around the iterate.

    Parameters
    ----------
    fun_batch : callable
        ``fun_batch(X) -> (values, gradients)``: points (Q, d) to values (Q,) and subgradients
        (Q, d). It must be defined a little outside the ball. With ``jac``, it is
        ``fun(x, *args) -> float``.
    x0 : array_like of shape (d,)
        Center of the ball.
    args : tuple, optional
        For ``fun`` and ``jac``.
    jac : callable or "torch", optional
        ``jac(x, *args) -> (d,)``, for functions of one point. "torch": ``fun(X, *args)`` takes a
        tensor (Q, d), returns one of shape (Q,) and is differentiated.
    p : float in [1, inf], default 2
        The ball is {‖x - x0‖_p ≤ radius}.
    radius : float, default 1
        R.
    lipschitz : float, default 1
        G ≥ ‖g‖_{p*}, in units of the function over those of x.
    eps : float
        Accuracy, in units of the function.
    method : {"auto", "mirror", "ball", "smoothed-agd"}
        "mirror" is sequential dual averaging, which wastes width. "smoothed-agd" and "ball" are
        the accelerated ones. "auto" is "smoothed-agd" from width 8 on, else "mirror".
    width : int, default 256
        Queries a round.
    max_rounds : int, default 1000
    smoothing : float, default 30
        Multiple, at first, of the smoothing width that keeps its worst-case bias below ε/2.
        Larger ones take fewer rounds until the bias shows; then the multiple is halved, down to
        1, the bound's.
    step : float, default 3
        Of "smoothed-agd": multiple of the step 1/L. 1 is safe, 10 can stall.
    antithetic : bool, default True
        Sample in pairs of opposite sign.
    noisy : bool, default False
        Values and gradients have noise: the last point is returned, not the best of many, and
        the gap does not end the run.
    executor : object with ``map``, optional
        An executor or pool that evaluates pieces of a batch in parallel; see `RoundOracle`.
    n_chunks : int, optional
        Pieces of a batch, by default one for each core.
    rng : int, Generator or None
    callback : callable, optional
        Called after each round with x, or with a parameter ``intermediate_result``;
        `StopIteration` stops.
    **unknown
        Other options of `scipy.optimize.minimize`; bounds and constraints are refused.

    Returns
    -------
    OptimizeResult
        ``x`` (the best feasible point evaluated), ``fun``, ``gap``, ``rounds``, ``nfev``
        (queries), ``method``, ``success, status, message``, ``history`` with arrays rounds,
        queries, fun, gap. ``gap`` bounds f(x) - min f: the best averaged linearization's minimum
        over the ball is subtracted. status 0: gap at most eps; 1: rounds are spent; 2: x0 was
        accurate enough from the start; 3: Ctrl-C; 99: callback.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, an answer has a wrong shape or is not finite, or a
        subgradient is larger than ``lipschitz``.

    Notes
    -----
    A round costs the queries and O(Qd); "ball" takes up to 60 passes over the batch more.
    Orders of rounds stand in `depth_bounds`. The paper's are the bounds; the solvers are the
    algorithms that it takes the upper bounds from, with doubling and halving of the proximal
    weight in place of bisection and with a smoothing that is halved where it stalls (Ours).

    References
    ----------
    "Parallel ℓp-Lipschitz convex optimization", NeurIPS 2026. Carmon et al., "Optimal and
    adaptive Monteiro-Svaiter acceleration", NeurIPS 2022; "ReSQueing parallel and private
    stochastic convex optimization", FOCS 2023. Duchi, Bartlett and Wainwright, "Randomized
    smoothing for stochastic optimization", SIAM Journal on Optimization 2012.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import minimize_parallel
    >>> target = np.linspace(-0.5, 0.5, 20)
    >>> def largest_deviation(X):
    ...     deviations = X - target
    ...     worst = np.abs(deviations).argmax(axis=1)
    ...     rows = np.arange(len(X))
    ...     gradients = np.zeros_like(X)
    ...     gradients[rows, worst] = np.sign(deviations[rows, worst])
    ...     return np.abs(deviations).max(axis=1), gradients
    >>> result = minimize_parallel(
    ...     largest_deviation, np.zeros(20), p=np.inf, eps=0.05, max_rounds=200, rng=0
    ... )
    >>> bool(result.fun <= 0.05), result.nfev == 256 * result.rounds
    (True, True)
    """
    refuse_constraints("minimize_parallel", unknown)
    warn_of_unknown(unknown, ignored=IGNORED)
    center = check_array("x0", x0, shape=("d",))
    check_p(p)
    check_number("radius", radius, above=0)
    check_number("lipschitz", lipschitz, above=0)
    check_number("eps", eps, above=0)
    check_choice("method", method, METHODS)
    check_integer("width", width, at_least=1)
    check_integer("max_rounds", max_rounds, at_least=1)
    check_number("smoothing", smoothing, above=0)
    check_number("step", step, above=0)
    check_choice("antithetic", antithetic, (True, False))
    check_choice("noisy", noisy, (True, False))
    chosen = _choose(method, width)
    run = RoundProgress(
        oracle=_oracle(fun_batch, jac, args, p, lipschitz, executor, n_chunks),
        ball=LpBall(center, float(radius), float(p)),
        eps=float(eps),
        width=width,
        max_rounds=max_rounds,
        noisy=noisy,
        report=intermediate_report(callback),
    )
    if eps >= lipschitz * radius:
        return _at_the_center(run, chosen)
    status, message = 0, "A point with gradient 0 was found."
    smooth = SmoothingWidth(run.ball, eps, smoothing, lipschitz)
    stream = as_generator(rng)
    try:
        if chosen == "mirror":
            dual_averaging(run, lipschitz)
            status, message = 1, "The rounds are spent."
        elif chosen == "ball":
            ball_acceleration(run, smooth, antithetic, lipschitz, stream)
        else:
            smoothed_agd(run, smooth, antithetic, step, stream)
    except Finished as end:
        status, message = end.status, end.message
    except KeyboardInterrupt:
        status, message = 3, "Interrupted; x is the best point so far."
    return _result(run, chosen, status, message)


def _choose(method: Method, width: int) -> str:
    if method == "auto":
        return "smoothed-agd" if width >= LEAST_WIDTH else "mirror"
    if method != "mirror" and width < LEAST_WIDTH:
        raise ValueError(
            f"width must be at least {LEAST_WIDTH} for method={method!r}, got {width}: smaller "
            "batches say too little of the smoothing; use 'mirror'"
        )
    return method


def _oracle(
    function: Any,
    jac: Callable[..., ArrayLike] | Literal["torch"] | None,
    args: tuple[Any, ...],
    p: float,
    lipschitz: float,
    executor: Executor | None,
    n_chunks: int | None,
) -> RoundOracle:
    if isinstance(function, RoundOracle):
        return function
    batch = function
    if isinstance(jac, str):
        check_choice("jac", jac, ("torch",))
        batch = TorchBatch(function, args)
    elif jac is not None:
        if not callable(jac):
            raise TypeError(f"jac must be callable, got {type(jac).__name__}")
        batch = PointwiseBatch(function, jac, args)
    elif args:
        raise ValueError("args must be empty without jac: fun_batch takes the points alone")
    chunks = n_chunks or (os.cpu_count() or 1)
    return RoundOracle(batch, p, lipschitz, executor=executor, n_chunks=chunks)


def _at_the_center(run: RoundProgress, method: str) -> OptimizeResult:
    with suppress(Finished):  # the gap may be closed
        run.ask(run.ball.center[None])
    return _result(run, method, 2, "eps is at least lipschitz * radius: x0 is accurate enough.")


def _result(run: RoundProgress, method: str, status: int, message: str) -> OptimizeResult:
    return optimize_result(
        x=run.best_x,
        fun=run.best_fun,
        gap=run.gap,
        rounds=run.rounds,
        nit=run.rounds,
        nfev=run.queries,
        method=method,
        success=status in (0, 1, 2),
        status=status,
        message=message,
        history={name: np.array(values) for name, values in run.history.items()},
    )
