"""Adaptive proximal gradient and its accelerated variant, in the form of a SciPy minimizer."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, OptimizeResult

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    Report,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.common.random import RNGLike, as_generator
from thalweg.convex.adaprox_iteration import (
    AcceleratedProximalSteps,
    ProximalSteps,
    initial_scale,
    norm,
)
from thalweg.convex.composite_objective import CompositeObjective
from thalweg.convex.proximal_adapters import Proximal, as_proximal
from thalweg.convex.proximal_operators import Box
from thalweg.convex.proximal_probes import (
    CheckedProx,
    check_separable,
    feasible_start,
    warn_of_expansion,
)

Array = NDArray[np.float64]
Output = Literal["auto", "last", "average", "best", "random"]

CHECK_EVERY = 10  # steps between two gradients at y, where the accelerated iteration is judged
TINY_S0 = 1e-3
NEVER = -1.0  # a tolerance that no norm meets
MESSAGES = {
    0: "The norm of the gradient mapping is at most gtol.",
    1: "The budget of steps is spent.",
    2: "Interrupted; x is the best point so far.",
    3: "The gradient or the prox is not finite at the next iterate; is D too large?",
    99: "The callback raised StopIteration.",
}
NOISY = "The budget of steps is spent, which is how a run with noisy gradients ends."


def minimize_adaprox(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | Literal[True, "torch"] = True,
    prox: Any = None,
    h: Callable[[Array], float] | None = None,
    accelerated: bool = False,
    D: float = 1.0,
    S0: float | Literal["auto"] = "auto",
    maxiter: int = 1000,
    gtol: float = 1e-6,
    output: Output = "auto",
    stochastic: bool = False,
    per_coordinate: bool = False,
    rng: RNGLike = None,
    tol: float | None = None,
    bounds: Any = None,
    callback: Callable[..., Any] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize f(x) + h(x), where h has a prox, without knowing which kind of function f is.

    .. math:: x_{k+1} = \mathrm{prox}_{\alpha_k h}(x_k - \alpha_k g_k), \quad
              \alpha_k = D/S_k, \quad S_{k+1}^2 = S_k^2 + \|x_k - x_{k+1}\|^2 / \alpha_k^2

    f may be smooth, nonsmooth and convex, or smooth and nonconvex, its gradient exact or noisy;
    no Lipschitz constant, no line search. Since S accumulates gradient *mappings*, which vanish at
    a solution, and not gradients, which do not where a constraint is active, the step settles.
    ``accelerated`` is for convex f, above all for nonsmooth ones.

    Usable as ``scipy.optimize.minimize(fun, x0, jac=jac, method=minimize_adaprox, options=...)``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)``: f, and with ``jac=True`` the pair of f and its gradient.
    x0 : array_like (or Tensor, with ``jac="torch"``), of any shape
        What is passed to ``fun``, ``jac`` and the prox has its shape.
    args : tuple, optional
        Further arguments of ``fun`` and ``jac``.
    jac : callable, True or "torch", default True
        ``jac(x, *args)``, a gradient or a subgradient. "torch": ``fun`` takes a tensor, of the
        dtype and on the device of x0 if that is one (float64 otherwise), and is differentiated.
    prox : object or callable, optional
        ``prox(v, alpha)``, which returns the minimizer u of h(u) + ‖u - v‖²/(2α), in the shape of
        v; or an object with a value and a prox: those of `thalweg.convex` (`L1`, `ElasticNet`,
        `GroupLasso`, `Box`, `Simplex`, `NuclearNorm`), operators of pyproximal, penalties of
        skglm. h must be convex, which cannot be checked. None: h = 0.
    h : callable, optional
        ``h(x) -> float``, if ``prox`` is a function. Without it ``fun`` in the result is f.
    accelerated : bool, default False
        The accelerated variant.
    D : float > 0, default 1
        In units of x, ideally about ‖x0 - x*‖. The rates hold for any D, with constants that
        depend on it.
    S0 : float > 0 or "auto", default "auto"
        In units of a gradient. "auto" makes the first move about D long.
    maxiter : int, default 1000
        Number of steps.
    gtol : float ≥ 0, default 1e-6
        Stop where the norm of the gradient mapping is at most this. At 0, the accelerated variant
        saves the gradients for that.
    output : {"auto", "last", "average", "best", "random"}
        What x is: the last iterate; their average, weighted by the step sizes, to which the rates
        for nonsmooth and for noisy f belong; the iterate with the smallest mapping; or one drawn
        uniformly, to which the rate for noisy nonconvex f belongs. "auto" takes the first with
        exact gradients if the run has converged, otherwise that of the first three with the lowest
        objective (at most three evaluations of ``fun``; the last one if h has no value), and the
        average with noisy ones. With ``accelerated`` it is y, an average itself.
    stochastic : bool, default False
        Whether gradients are noisy. The run then ends with its budget, as no gradient tells.
    per_coordinate : bool, default False
        A step size for each coordinate, for separable h; D is then in each coordinate.
    rng : int, numpy.random.Generator or None
        Passed to noisy ``fun`` and ``jac`` that have a parameter ``rng``; draws "random".
    tol : float, optional
        Another name of gtol.
    bounds : scipy.optimize.Bounds or sequence of (low, high), optional
        Instead of ``prox``: low ≤ x ≤ high; None is no bound.
    callback : callable, optional
        Called after every step as ``callback(x)``, or as ``callback(intermediate_result=...)`` if
        that is its only parameter's name, which costs an evaluation of ``fun`` unless it
        comes with the next gradient. It stops the run by raising `StopIteration`.
    **unknown
        Other options of `scipy.optimize.minimize`; an `OptimizeWarning` names those that are set.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``; ``fun`` = f(x) + h(x); ``nit`` steps; ``nfev``, ``njev``, ``nprox`` calls;
        ``mapping_norm`` the norm of the last gradient mapping (accelerated: at y, where it was
        measured last, NaN with
        ``gtol=0`` or noise); ``step`` and ``S`` the last; ``x_avg``, ``x_best`` (both y
        with ``accelerated``); ``trace`` a dict of arrays, ``mapping_norm`` (accelerated:
        ‖z - z⁺‖/s), ``step`` and ``S`` of each step, of norms of coordinates with
        ``per_coordinate``. ``success`` is whether ``status`` is 0; it is 1 when the budget is
        spent, 2 after Ctrl-C, 3 when the gradient or the prox is not finite, 99 when the callback
        stopped the run. x is finite in each case.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, a prox without ``alpha`` or with a result of
        another shape, a gradient at x0 that is not finite, and for constraints.

    Warns
    -----
    UserWarning
        If the prox is not nonexpansive at two points, so that it is none; if S0 is so small that
        the first step cannot be made up for; if ``accelerated`` meets a nonconvex f.

    Notes
    -----
    *Cost.* One gradient, one prox and O(d) per step, four to six vectors. The accelerated
    variant takes one more gradient in ten steps, at y, to judge y, unless ``gtol=0``.

    *Dependence on D.* While the step is too long, S has to grow first, and while it is too short,
    the iterates crawl. If in doubt take it too large for plain steps and about right for
    accelerated ones, which recover more slowly.

    *Ours.* The paper's are the plain iteration and the idea of the accelerated one, whose
    weights and coupling are those of AC-SA here. The measures of stopping, S0 = "auto" (with a tiny
    S0 the first step has length D ‖g‖/S0 but the mapping of a penalty or constraint hides it, and
    S never catches up), output = "auto", ``per_coordinate``, and the projection of a start outside
    of the domain of h are ours.

    References
    ----------
    "Adaptive proximal gradient methods for three problem classes", NeurIPS 2026.
    G. Lan, "An optimal method for stochastic composite optimization", Mathematical Programming
    2012.

    Examples
    --------
    A lasso, with the data as sparse as they are:

    >>> import numpy as np, scipy.sparse
    >>> from thalweg.convex import L1, minimize_adaprox
    >>> X = scipy.sparse.random_array((200, 50), density=0.1, rng=0).tocsr()
    >>> y = X @ np.r_[np.ones(5), np.zeros(45)]
    >>> def squares(w):
    ...     residual = X @ w - y
    ...     return residual @ residual / 2, X.T @ residual
    >>> result = minimize_adaprox(squares, np.zeros(50), prox=L1(0.1), D=3.0)
    >>> result.success, int(np.sum(result.x > 0.5)), round(result.fun, 3)
    (True, 5, 0.496)
    """
    refuse_constraints("minimize_adaprox", unknown, names=("constraints",))
    warn_of_unknown(unknown, ignored=("hess", "hessp"))
    report = intermediate_report(callback)
    for name, switch in (
        ("accelerated", accelerated),
        ("stochastic", stochastic),
        ("per_coordinate", per_coordinate),
    ):
        check_choice(name, switch, (False, True))
    check_choice("output", output, ("auto", "last", "average", "best", "random"))
    check_number("D", D, above=0)
    if S0 != "auto":
        check_number("S0", S0, above=0)
    check_integer("maxiter", maxiter, at_least=1)
    gtol = check_number("gtol" if tol is None else "tol", gtol if tol is None else tol, at_least=0)
    start, like = _start(x0)
    operator = _operator(prox, h, bounds, start)
    noise = as_generator(rng)
    (draws,) = noise.spawn(1)

    counted = CheckedProx(operator.prox, start.shape)
    objective = CompositeObjective(fun, jac, args, start.shape, like, noise if stochastic else None)
    start = feasible_start(start, counted, D)
    gradient = objective.gradient(start)
    if not np.all(np.isfinite(gradient)):
        raise ValueError("the gradient must be finite at x0")
    probe = D / (norm(gradient) or 1.0)
    warn_of_expansion(counted, start, D, probe)
    if per_coordinate:
        check_separable(counted, start, D, probe)
    scale = initial_scale(start, gradient, counted, D, each=per_coordinate)
    if S0 != "auto":
        _warn_of_tiny(S0, scale)
        scale = float(S0)
    S = np.full(start.shape, scale) if per_coordinate else scale
    iteration = AcceleratedProximalSteps if accelerated else ProximalSteps
    steps = iteration(start, counted, D, S)
    run = _Run(
        objective,
        operator.value,
        steps,
        NEVER if stochastic else gtol,
        report,
        draws,
        wants_value=callback is not None and _takes_results(callback),
    )
    status = run.go(gradient, maxiter)
    if stochastic and status == 1:
        status = 0
    x = run.choose(output, stochastic, converged=status == 0)
    return optimize_result(
        x=x,
        fun=run.objective_at(x),
        nit=run.nit,
        nfev=objective.nfev,
        njev=objective.njev,
        nprox=counted.count,
        success=status == 0,
        status=status,
        message=NOISY if stochastic and status == 0 else MESSAGES[status],
        mapping_norm=run.mapping_norm,
        step=steps.alpha,
        S=steps.S,
        x_avg=steps.average.copy(),
        x_best=run.best.copy(),
        trace=run.trace(),
    )


def _start(x0: Any) -> tuple[Array, Any]:
    """Return x0 as an array, and as a tensor if it is one."""
    if hasattr(x0, "detach"):
        return _finite_array(x0.detach().double().cpu().numpy()), x0
    return _finite_array(x0), None


def _finite_array(x0: ArrayLike) -> Array:
    if np.iscomplexobj(x0):
        raise TypeError("x0 must be real, got complex numbers")
    array = check_array("x0", x0, shape=("n",) * np.ndim(x0)).copy()
    if array.size == 0:
        raise ValueError("x0 must have at least one entry")
    return array


def _operator(prox: Any, h: Callable[[Array], float] | None, bounds: Any, start: Array) -> Proximal:
    if h is not None and not callable(h):
        raise TypeError(f"h must be callable, got {type(h).__name__}")
    if bounds is not None:
        if prox is not None:
            raise ValueError("give either prox or bounds")
        prox = _box(bounds, start.shape)
    operator = as_proximal(prox)
    return operator if h is None else Proximal(operator.prox, h)


def _box(bounds: Any, shape: tuple[int, ...]) -> Box:
    if isinstance(bounds, Bounds):
        lower, upper = np.asarray(bounds.lb), np.asarray(bounds.ub)
    else:
        pairs = [
            (-np.inf if low is None else low, np.inf if high is None else high)
            for low, high in bounds
        ]
        lower, upper = np.array(pairs, dtype=np.float64).T
    try:
        return Box(np.broadcast_to(lower, shape), np.broadcast_to(upper, shape))
    except ValueError as error:
        raise ValueError(
            f"bounds must be pairs low <= high, one for each entry of x: {error}"
        ) from (error)


def _warn_of_tiny(S0: float, scale: float) -> None:
    if TINY_S0 * scale > S0:
        warnings.warn(
            f"S0 = {S0:g} is tiny beside {scale:g}, which S0='auto' gives: the first step is as "
            "much too long, and where the prox hides it from the gradient mapping, S never "
            "catches up",
            UserWarning,
            stacklevel=3,
        )


def _takes_results(callback: Callable[..., Any]) -> bool:
    return list(inspect.signature(callback).parameters) == ["intermediate_result"]


class _Run:
    """Steps, what they leave behind, and why they end."""

    def __init__(
        self,
        objective: CompositeObjective,
        penalty: Callable[[Array], float] | None,
        steps: ProximalSteps | AcceleratedProximalSteps,
        gtol: float,
        report: Report | None,
        rng: np.random.Generator,
        wants_value: bool,
    ) -> None:
        self._wants_value = wants_value
        self._objective, self._penalty, self._steps = objective, penalty, steps
        self._gtol, self._report, self._rng = gtol, report, rng
        self.nit = 0
        self._mapping_norm = math.nan
        self.best = self._drawn = steps.output
        self._smallest = math.inf
        self._warned = False
        self._rows: list[tuple[float, float, float]] = []

    @property
    def mapping_norm(self) -> float:
        """The norm of the last mapping; NaN if y was never judged."""
        unjudged = self._accelerated and self._gtol <= 0 and self.nit > 0
        return math.nan if unjudged else self._mapping_norm

    @property
    def _accelerated(self) -> bool:
        return isinstance(self._steps, AcceleratedProximalSteps)

    def objective_at(self, x: Array) -> float:
        """Return f(x) + h(x), or f(x) if the value of h is not known."""
        return self._objective.value(x) + (self._penalty(x) if self._penalty else 0.0)

    def go(self, gradient: Array, maxiter: int) -> int:
        """Make the steps, the first along ``gradient``; return the status."""
        try:
            for k in range(maxiter):
                if k > 0:
                    gradient = self._objective.gradient(self._steps.query)
                mapping = self._steps.propose(gradient)
                if not math.isfinite(mapping):
                    return 3
                if self._stationary(gradient, mapping):
                    return 0
                self._steps.accept()
                self.nit += 1
                self._note(mapping)
        except StopIteration:
            return 99
        except KeyboardInterrupt:
            return 2
        return 1

    def _stationary(self, gradient: Array, mapping: float) -> bool:
        """Return whether the output is stationary; remember the best iterate."""
        if isinstance(self._steps, AcceleratedProximalSteps):
            if self.nit == 0:
                self._mapping_norm = mapping  # x, y and z are one
            elif self._gtol > 0 and self.nit % CHECK_EVERY == 0:
                self._mapping_norm = self._judge(self._steps, gradient)
            else:
                return False
        else:
            self._mapping_norm = mapping
            if mapping < self._smallest:
                # Iterates are never written to: no copy.
                self._smallest, self.best = mapping, self._steps.output
        return self._mapping_norm <= self._gtol

    def _judge(self, steps: AcceleratedProximalSteps, gradient: Array) -> float:
        """Return the norm of the mapping at y; see by the way whether gradients are monotone."""
        at_output = self._objective.gradient(steps.output)
        change, apart = at_output - gradient, steps.output - steps.query
        product = float(np.vdot(change, apart))
        if not self._warned and product < -1e-6 * norm(change) * norm(apart):
            self._warned = True
            warnings.warn(
                "fun is not convex, which accelerated=True assumes; use accelerated=False",
                UserWarning,
                stacklevel=5,
            )
        return steps.mapping(at_output)

    def _note(self, mapping: float) -> None:
        steps, S = self._steps, self._steps.S
        x = steps.output
        rms = norm if isinstance(S, np.ndarray) else float
        self._rows.append((mapping, rms(steps.alpha), rms(S)))
        if self._accelerated:
            self.best = x
        if self._rng.random() * self.nit < 1:  # reservoir sampling: each with probability 1/nit
            self._drawn = x
        if self._report is not None:
            self._report(
                x=x.copy(),
                x_avg=steps.average,
                nit=self.nit,
                nfev=self._objective.nfev,
                njev=self._objective.njev,
                mapping_norm=mapping,
                step=steps.alpha,
                S=S,
                **({"fun": self.objective_at(x)} if self._wants_value else {}),
            )

    def _comparable(self, x: Array) -> float:
        value = self.objective_at(x)
        return math.inf if math.isnan(value) else value

    def choose(self, output: Output, stochastic: bool, converged: bool) -> Array:
        """Return the point that is asked for."""
        last = self._steps.output
        if self._accelerated and output != "random":
            return last.copy()
        if output == "auto":
            output = "average" if stochastic else "last"
            if not stochastic and not converged and self._penalty is not None:
                candidates = [last, self._steps.average, self.best]
                return min(candidates, key=self._comparable).copy()
        choices = {
            "last": last,
            "average": self._steps.average,
            "best": self.best,
            "random": self._drawn,
        }
        return choices[output].copy()

    def trace(self) -> dict[str, Array]:
        """Return what was noted at each step."""
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 3).T
        return dict(zip(("mapping_norm", "step", "S"), columns, strict=True))
