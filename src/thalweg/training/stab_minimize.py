"""Stab-SGD in the form of a SciPy minimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.minimizers import (
    check_gradient_function,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    takes_rng,
    warn_of_unknown,
)
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

with requires("training"):
    import torch

from thalweg.common.torch_gradients import NonFiniteGradientError
from thalweg.training.curvature import hessian_norm
from thalweg.training.stab_sgd import StabSGD

Vector = NDArray[np.float64]
CHECKPOINTS = 100


def minimize_stab_sgd(
    fun: Callable[..., float],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | None = None,
    oracle: Callable[[Vector], float] | None = None,
    lr: float | None = None,
    maxiter: int = 10_000,
    estimator: Literal["inline", "split"] = "inline",
    micro_batches: int = 2,
    zeta: float = 50,
    zeta_start: float | None = None,
    kappa: float = 1.0,
    gamma: float = 1.0,
    max_overhead: float = 0.5,
    stab_min: float = 1e-8,
    callback: Callable[..., Any] | None = None,
    rng: RNGLike = None,
    **unknown: Any,
) -> OptimizeResult:
    """Minimize a smooth function from noisy gradients with `StabSGD`.

    Usable as ``scipy.optimize.minimize(fun, x0, jac=jac, method=minimize_stab_sgd)``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``, the loss; evaluated about 100 times, for the trace.
    x0 : array_like of shape (d,)
    args : tuple, optional
        Further arguments of ``fun`` and ``jac``.
    jac : callable
        ``jac(x, *args) -> array_like of shape (d,)``, an unbiased gradient with fresh noise at
        every call. If it has a parameter ``rng``, it gets a `numpy.random.Generator` there that
        the argument ``rng`` seeds.
    oracle : callable, optional
        ``oracle(x) -> float``, the exact stability ratio of the gradient at x. By default the
        ratio is estimated.
    lr : float, optional
        1/β for a β-smooth loss. By default it is estimated at x0, by power iteration on
        differences of gradients with common random numbers; ``jac`` must then be deterministic
        or have a parameter ``rng``. A loss that is not quadratic can be steeper elsewhere.
    maxiter : int, default 10_000
        The number of gradient queries, measurements included.
    estimator, zeta, zeta_start, kappa, gamma, max_overhead, stab_min
        As in `StabSGD`.
    micro_batches : int, default 2
        Gradients per step, for ``estimator="split"``.
    callback : callable, optional
        Called after every step as ``callback(x)``, or as ``callback(intermediate_result=...)``
        if that is its only parameter's name. It stops the run by raising `StopIteration`.
    rng : int, numpy.random.Generator or None
        Where the randomness of ``jac`` and of the power iteration comes from.
    **unknown
        Other options of `scipy.optimize.minimize`; an `OptimizeWarning` names those that are set.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x`` is the last iterate, of which the theory speaks, and ``fun`` its loss. ``nit`` counts
        steps, ``nfev`` and ``njev`` evaluations, those for ``lr`` included; ``stab`` is the last
        ratio, ``stab_history`` as in `StabSGD`, and ``trace`` a dict of the arrays ``query``,
        ``fun`` and ``stab``. ``success`` is whether ``status`` is 0: 0 when the budget is spent,
        2 after Ctrl-C, 3 after ten gradients in a row that were not finite, 4 when the final loss
        is not finite, 99 when the callback stopped the run.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and for bounds or constraints.

    Notes
    -----
    O(d) time per query besides ``jac``; about 30 µs for small d.

    References
    ----------
    "Stab-SGD: Noise-adaptivity in smooth optimization with stability ratios", NeurIPS 2025.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.training import minimize_stab_sgd
    >>> eigenvalues = np.array([1.0, 0.5, 0.25])
    >>> def loss(x):
    ...     return 0.5 * eigenvalues @ x**2
    >>> def noisy_gradient(x, rng):
    ...     return eigenvalues * x + 0.1 * rng.standard_normal(3)
    >>> result = minimize_stab_sgd(loss, np.ones(3), jac=noisy_gradient, maxiter=3000, rng=0)
    >>> result.success, bool(result.fun < 1e-3)
    (True, True)
    """
    refuse_constraints("minimize_stab_sgd", unknown)
    warn_of_unknown(unknown)
    report = intermediate_report(callback)
    start = check_array("x0", x0, shape=("d",))
    stream = as_generator(rng)
    gradient = _Gradient(jac, args, stream)
    if lr is None:
        lr = 1 / gradient.curvature(start, stream)
    # The optimizer moves the parameter, which shares its memory with x.
    x = start.copy()
    parameter = torch.nn.Parameter(torch.from_numpy(x))
    optimizer = StabSGD(
        [parameter],
        lr,
        estimator=estimator,
        zeta=zeta,
        zeta_start=zeta_start,
        kappa=kappa,
        gamma=gamma,
        max_overhead=max_overhead,
        stab_min=stab_min,
        pool_replicas=False,
    )
    if oracle is not None:
        if estimator == "split":
            raise ValueError('oracle must be None with estimator="split", which is an estimate')
        # Nothing needs measuring: one descend phase that never ends.
        optimizer._clock.update(phase="descend", remaining=math.inf)
    batch = (
        1 if estimator == "inline" else check_integer("micro_batches", micro_batches, at_least=2)
    )
    trace = _Trace(fun, args, check_integer("maxiter", maxiter, at_least=1))

    def query() -> None:
        if oracle is not None:
            stab = check_number("oracle(x)", oracle(x.copy()), at_least=0, at_most=1)
            optimizer.param_groups[0]["stab"] = stab
        grads = [torch.from_numpy(gradient(x)) for _ in range(batch)]
        if estimator == "split":
            optimizer.step_split([[grad] for grad in grads])
            return
        parameter.grad = grads[0]
        optimizer.step()

    status, message = 0, f"The budget of {maxiter} gradient queries is spent."
    try:
        trace.note(x, optimizer)
        while optimizer.n_queries + batch <= maxiter:
            updates = optimizer.n_updates
            query()
            trace.note(x, optimizer)
            if report is not None and optimizer.n_updates > updates:
                report(
                    x=x.copy(),
                    nit=optimizer.n_updates,
                    njev=optimizer.n_queries,
                    stab=optimizer.stab,
                )
    except StopIteration:
        status, message = 99, "The callback raised StopIteration."
    except KeyboardInterrupt:
        status, message = 2, "Interrupted; x is the last iterate."
    except NonFiniteGradientError as error:
        status, message = 3, str(error)
    value = trace.evaluate(x)
    if status == 0 and not math.isfinite(value):
        status, message = 4, "The loss of the last iterate is not finite; lower lr."
    return optimize_result(
        x=x,
        fun=value,
        nit=optimizer.n_updates,
        nfev=trace.evaluations,
        njev=gradient.evaluations,
        success=status == 0,
        status=status,
        message=message,
        stab=optimizer.stab,
        stab_history=optimizer.stab_history,
        trace=trace.arrays(),
    )


class _Gradient:
    """Calls ``jac``, gives it a random stream if it takes one, and counts."""

    def __init__(
        self,
        jac: Callable[..., ArrayLike] | None,
        args: tuple[Any, ...],
        stream: np.random.Generator,
    ) -> None:
        self.jac = check_gradient_function(jac)
        self.args = args
        self.stream = stream
        self.takes_rng = takes_rng(self.jac)
        self.evaluations = 0

    def __call__(self, x: Vector, stream: np.random.Generator | None = None) -> Vector:
        self.evaluations += 1
        random = {"rng": stream or self.stream} if self.takes_rng else {}
        value = self.jac(x.copy(), *self.args, **random)
        return check_array("jac(x)", value, shape=x.shape, finite=False)

    def curvature(self, x: Vector, stream: np.random.Generator) -> float:
        """Return the norm of the Hessian at ``x``, by power iteration."""
        if not self.takes_rng and not np.array_equal(self(x), self(x)):
            raise ValueError(
                "lr must be given, because jac is random and has no parameter rng "
                "with which two calls could share their noise"
            )
        return hessian_norm(self, x, stream)


class _Trace:
    """Evaluates the loss at about 100 queries."""

    def __init__(self, fun: Callable[..., float], args: tuple[Any, ...], maxiter: int) -> None:
        self.fun = fun
        self.args = args
        self.spacing = maxiter / CHECKPOINTS
        self.evaluations = 0
        self.rows: list[tuple[int, float, float]] = []

    def evaluate(self, x: Vector) -> float:
        self.evaluations += 1
        return float(self.fun(x.copy(), *self.args))

    def note(self, x: Vector, optimizer: StabSGD) -> None:
        if optimizer.n_queries >= len(self.rows) * self.spacing:
            self.rows.append((optimizer.n_queries, self.evaluate(x), optimizer.stab))

    def arrays(self) -> dict[str, NDArray[Any]]:
        query, value, stab = zip(*self.rows, strict=True) if self.rows else ((), (), ())
        return {"query": np.array(query), "fun": np.array(value), "stab": np.array(stab)}
