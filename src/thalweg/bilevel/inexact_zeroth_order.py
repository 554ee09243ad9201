"""Inexact zeroth-order minimization of hyper-objectives that need not be smooth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from joblib import Parallel
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, OptimizeResult

from thalweg.bilevel.inexact_oracle import InexactOracle
from thalweg.bilevel.solution_sets import MODES, HyperObjective, Mode
from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    NotFiniteError,
    Report,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.common.progress import progress
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]
Output = Literal["random", "last", "best"]

MESSAGES = {
    0: "All steps are made.",
    2: "Interrupted; x is the output of the steps made so far.",
    3: "phi is not finite at x = {}; x is the output of the steps before.",
    99: "The callback raised StopIteration.",
}
N_PROBES = 10
C_EPS = 0.7
C_W = 0.1
LARGEST_NOISE = 0.1  # w over ε M̂ / m


def izom(
    phi: HyperObjective | Callable[..., float],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    mode: Mode = "optimistic",
    eta: float | None = None,
    eps: float | None = None,
    w: float | None = None,
    maxiter: int = 1000,
    n_dirs: int = 1,
    bounds: Any = None,
    common_random_numbers: bool = True,
    output: Output = "random",
    rng: RNGLike = None,
    n_jobs: int | None = 1,
    callback: Callable[..., Any] | None = None,
    show_progress: bool | None = False,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize the best or the worst upper value over all solutions of a lower level.

    .. math:: \min_x \varphi(x), \qquad \varphi_o(x) = \min_{y \in S(x)} F(x, y)
              \quad \text{or} \quad \varphi_p(x) = \max_{y \in S(x)} F(x, y), \qquad
              S(x) = \arg\min_y f(x, y)

    S(x) may hold many points, so that φ is not smooth and has no implicit gradient. A step takes
    two values of φ, each within w of the true one, along u, uniform on the sphere:

    .. math:: G_t = \frac{m}{2 \varepsilon} \big( \tilde\varphi(x_t + \varepsilon u_t) -
              \tilde\varphi(x_t - \varepsilon u_t) \big) u_t, \qquad
              x_{t+1} = \Pi_X (x_t - \eta G_t)

    Where the solutions of the lower level are set-smooth (see `set_smoothness_report`), φ_o is
    weakly concave, φ_p weakly convex, and the iterates approach stationarity in the sense of
    Clarke, which `clarke_report` measures.

    Parameters
    ----------
    phi : HyperObjective or callable
        A follower with an upper level; or ``phi(x, *args) -> float``. If it has a parameter
        ``tol``, it is passed w; if it has ``rng``, a generator for its own randomness.
    x0 : array_like of shape (m,)
    args : tuple
        Further arguments of a callable ``phi``.
    mode : {"optimistic", "pessimistic"}
        Whether the best or the worst y of S(x) counts. For a callable it is only a label.
    eta : float > 0, optional
        The step size η: by default (Δ/M̂)·(n_dirs/(mT))^½, where Δ = max(1, ‖x0‖), and M̂ is the
        size of the slope at x0, from 10 random directions.
    eps : float > 0, optional
        The radius ε of the differences: by default 0.7 Δ T^(-1/2).
    w : float > 0, optional
        The accuracy of values: by default 0.1 ΔM̂ (mT/n_dirs)^(-3/4), but at most 0.1 εM̂/m.
    maxiter : int, default 1000
        T, the number of steps, of 2 ``n_dirs`` values each. The defaults above depend on it.
    n_dirs : int from 1 to m, default 1
        Orthonormal directions whose estimates are averaged in a step.
    bounds : sequence of (low, high) or scipy.optimize.Bounds, optional
        The box X on which steps are projected. Values are taken up to ε outside of it.
    common_random_numbers : bool, default True
        Whether all values of a step start the lower level from the same y, and both values along a
        direction get generators in the same state. Else each starts where the one before it ended,
        which biases the differences.
    output : {"random", "last", "best"}
        Which iterate is returned: a uniformly random one, as the guarantee wants; the last; or the
        one around which the mean of the values is least.
    rng : int, Generator or None
        The source of the directions and of the output.
    n_jobs : int or None, default 1
        Values of a step that run at once, as threads, or as in `joblib.parallel_config`. It does
        not change the result, as long as ``common_random_numbers`` holds.
    callback : callable, optional
        Called after each step as ``callback(x)``, or as ``callback(intermediate_result=...)`` if
        that is its only parameter's name. It stops the run by raising `StopIteration`.
    show_progress : bool or None, default False
        Show a progress bar; None does if stderr is a terminal.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``; ``fun``, φ there; ``stationarity``, the norm of the estimate G at x from all m axes,
        a slope at the scale of ε (NaN after Ctrl-C); ``nit``; ``nfev``, values of φ, those for M̂
        and for the two fields before included; ``lower_solves``, the same; ``gap``, the largest
        that a follower reported; ``mode``; ``eta``, ``eps``, ``w`` as used; ``history``, a dict of
        arrays with an entry for each step: ``fun``, the mean of its values, and ``grad_norm``, ‖G‖.
        ``success`` is whether ``status`` is 0; it is 2 after Ctrl-C, 3 where φ is not finite, 99
        when the callback stopped the run.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; φ that is not finite around x0, as of an empty
        S(x); F that is unbounded on S(x); ``w`` above εM̂, which would drown the differences: the
        message suggests an ``eps``.

    Warns
    -----
    UserWarning
        If the follower is constrained: φ need not be weakly convex or concave then. If a follower
        does not reach the accuracy ``w``.

    Notes
    -----
    *Cost.* Two lower solves per step and direction, each from the solution at the step before.
    Sensible up to m of about 50. If a gradient of φ exists and is cheap, methods that use it are
    faster; so are model-based methods such as BOBYQA on smooth φ of few variables.

    *Guarantee.* Optimistic: the squared distance from 0 to the Clarke subgradients within T^(-1/4)
    of x is O(√(m/T)) in expectation. Pessimistic: so is the squared gradient of the Moreau envelope
    of a parameter γ < 1/(ρ + 1).

    *Ours.* The paper's are the step, the exponents and the random output; the constants above,
    which follow a change of the scale of φ, several directions, warm starts, "last" and "best" are
    our resolution, and so is comparing w, in units of φ, to εM̂ rather than to ε.

    References
    ----------
    H. Chen, J. Li and A. M.-C. So, "Set smoothness unlocks Clarke hyper-stationarity in bilevel
    optimization", NeurIPS 2025.

    Examples
    --------
    The worst of a follower's solutions, [-1, 1] - sin x, is least where both ends are equally bad:

    >>> import numpy as np
    >>> from thalweg.bilevel import HyperObjective, TranslatedBoxFollower, izom
    >>> follower = TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))
    >>> phi = HyperObjective(follower, lambda x, y: (y[0] - 0.5) ** 2 / 2)
    >>> result = izom(phi, [1.0], mode="pessimistic", maxiter=400, output="best", rng=0)
    >>> result.success, abs(float(np.sin(result.x[0])) + 0.5) < 0.02
    (True, True)
    """
    refuse_constraints("izom", unknown, ("constraints",))
    warn_of_unknown(unknown, ignored=("jac", "hess", "hessp"))
    check_choice("mode", mode, MODES)
    check_choice("output", output, ("random", "last", "best"))
    check_choice("common_random_numbers", common_random_numbers, (True, False))
    check_integer("maxiter", maxiter, at_least=1)
    for name, value in (("eta", eta), ("eps", eps), ("w", w)):
        if value is not None:
            check_number(name, value, above=0)
    report = intermediate_report(callback)
    x = check_array("x0", x0, shape=("m",)).copy()
    check_integer("n_dirs", n_dirs, at_least=1, at_most=len(x))
    box = _box(bounds, len(x))
    x = np.clip(x, *box)
    if isinstance(phi, HyperObjective) and phi.follower.constrained:
        warnings.warn(
            "the lower level is constrained: its solution sets need not be set-smooth, and the "
            "guarantees of izom do not hold",
            stacklevel=2,
        )
    directions, choices, noise = as_generator(rng).spawn(3)
    with Parallel(n_jobs=n_jobs, prefer="threads") as pool:
        oracle = InexactOracle(phi, args, mode, common_random_numbers, noise, pool)
        scales = _scales(oracle, x, eta, eps, w, maxiter, n_dirs, noise)
        run = _Run(oracle, x, scales, box, output, choices)
        status, where = _run(run, directions, maxiter, n_dirs, report, show_progress)
        return _result(run, status, where)


@dataclass(frozen=True)
class _Scales:
    eta: float
    eps: float
    w: float


def _scales(
    oracle: InexactOracle,
    x: Array,
    eta: float | None,
    eps: float | None,
    w: float | None,
    maxiter: int,
    n_dirs: int,
    rng: np.random.Generator,
) -> _Scales:
    """Return η, ε and w: those given, else the paper's powers of T times scales of the problem."""
    m = len(x)
    queries = m * maxiter / n_dirs
    size = max(1.0, float(np.linalg.norm(x)))
    radius = C_EPS * size / math.sqrt(maxiter) if eps is None else eps
    probes = _sphere(rng, N_PROBES, m)
    tol, slope = C_W * size * queries**-0.75, 0.0
    try:
        for _ in range(3):  # the accuracy that the slope needs is known once the slope is
            used = tol if w is None else w
            norms = [np.linalg.norm(oracle.estimate(x, u[None], radius, used)[0]) for u in probes]
            slope = float(np.median(norms)) / math.sqrt(m)
            small_enough = LARGEST_NOISE * radius * slope / m
            if w is not None or not oracle.takes_tol or tol <= small_enough or slope == 0:
                break
            tol = small_enough
    except NotFiniteError as error:
        raise ValueError(f"phi must be finite around x0, but is not at x = {error}") from None
    if slope == 0:
        slope = 1.0  # flat around x0: there is no scale to take
    elif w is not None and w > radius * slope:
        raise ValueError(
            f"w must be at most eps times the slope of phi, {radius * slope:.3g}, or noise drowns "
            f"the differences, got {w:g}; use a larger eps, about {10 * m * w / slope:.3g}"
        )
    oracle.gap = 0.0  # values of the probes were less accurate
    accuracy = min(C_W * slope * size * queries**-0.75, LARGEST_NOISE * radius * slope / m)
    return _Scales(
        eta=size / slope / math.sqrt(queries) if eta is None else eta,
        eps=radius,
        w=accuracy if w is None else w,
    )


def _sphere(rng: np.random.Generator, n: int, m: int) -> Array:
    """Return n independent directions."""
    u = rng.standard_normal((n, m))
    unit: Array = u / np.linalg.norm(u, axis=1, keepdims=True)
    return unit


def _orthonormal(rng: np.random.Generator, n: int, m: int) -> Array:
    """Return n orthonormal directions, each uniform on the sphere."""
    if n == 1:
        return _sphere(rng, 1, m)
    Q, R = np.linalg.qr(rng.standard_normal((m, n)))
    directions: Array = (Q * np.sign(np.diag(R))).T  # the signs make Q uniform
    return directions


def _box(bounds: Any, m: int) -> tuple[Array, Array]:
    if bounds is None:
        return np.full(m, -np.inf), np.full(m, np.inf)
    if isinstance(bounds, Bounds):
        low, high = np.broadcast_to(bounds.lb, m), np.broadcast_to(bounds.ub, m)
    else:
        pairs = [[-np.inf if a is None else a, np.inf if b is None else b] for a, b in bounds]
        low, high = check_array("bounds", pairs, shape=(m, 2), finite=False).T
    if not np.all(low <= high):
        raise ValueError(f"bounds must be pairs with low <= high, got {bounds}")
    return low, high


@dataclass
class _Run:
    """The iterate, the output so far and the records."""

    oracle: InexactOracle
    x: Array
    scales: _Scales
    box: tuple[Array, Array]
    output: Output
    choices: np.random.Generator
    chosen: Array = field(init=False)
    chosen_value: float = math.nan
    values: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chosen = self.x

    def step(self, U: Array) -> None:
        """Make the step of the directions in the rows of U."""
        G, value = self.oracle.estimate(self.x, U, self.scales.eps, self.scales.w)
        self._consider(self.x, value)
        self.values.append(value)
        self.norms.append(float(np.linalg.norm(G)))
        self.x = np.clip(self.x - self.scales.eta * G, *self.box)
        if self.output == "last":
            self.chosen = self.x

    def _consider(self, x: Array, value: float) -> None:
        """Take x for the output, if it is the best, or with chance 1/(t + 1)."""
        t = len(self.values)
        # A sample of size one from a stream is uniform over what has come, whenever it ends.
        if self.output == "random" and self.choices.random() * (t + 1) > 1:
            return
        if self.output == "best" and t > 0 and value >= self.chosen_value:
            return
        self.chosen, self.chosen_value = x, value


def _run(
    run: _Run,
    rng: np.random.Generator,
    maxiter: int,
    n_dirs: int,
    report: Report | None,
    show_progress: bool | None,
) -> tuple[int, str]:
    """Make steps; return why they end, and where φ is not finite."""
    try:
        with progress("IZOM", maxiter, show=show_progress) as advance:
            for t in range(maxiter):
                run.step(_orthonormal(rng, n_dirs, len(run.x)))
                advance()
                if report is not None:
                    report(x=run.x, fun=run.values[-1], nit=t + 1, nfev=run.oracle.count)
    except StopIteration:
        return 99, ""
    except KeyboardInterrupt:
        return 2, ""
    except NotFiniteError as error:
        return 3, str(error)
    return 0, ""


def _result(run: _Run, status: int, where: str) -> OptimizeResult:
    oracle, scales, m = run.oracle, run.scales, len(run.x)
    fun, stationarity = run.chosen_value, math.nan
    if status != 2:
        try:
            fun = float(oracle.values([run.chosen], scales.w)[0])
            G, _ = oracle.estimate(run.chosen, np.eye(m), scales.eps, scales.w)
            stationarity = float(np.linalg.norm(G))
        except NotFiniteError as error:
            status, where = 3, where or str(error)
    if oracle.gap > 10 * scales.w:
        warnings.warn(
            f"the follower reported a gap of {oracle.gap:.2g}, above w = {scales.w:.2g}: the "
            "differences may be those of its errors",
            stacklevel=3,
        )
    return optimize_result(
        x=run.chosen.copy(),
        fun=fun,
        stationarity=stationarity,
        nit=len(run.values),
        nfev=oracle.count,
        lower_solves=oracle.count,
        gap=oracle.gap,
        mode=oracle.mode,
        eta=scales.eta,
        eps=scales.eps,
        w=scales.w,
        success=status == 0,
        status=status,
        message=MESSAGES[status].format(where),
        history={"fun": np.array(run.values), "grad_norm": np.array(run.norms)},
    )
