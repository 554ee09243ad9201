"""Semismooth Newton with lazy Hessians, in the form of a SciPy minimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult

from thalweg.common.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_number,
)
from thalweg.common.minimizers import (
    Report,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.curvature.lazy_iteration import Iterate, LazyNewton
from thalweg.curvature.newton_oracles import (
    NewtonOracle,
    check_gradient,
    hessian_from_products,
)
from thalweg.curvature.norm_metric import NormMetric
from thalweg.curvature.regularization import StepRule
from thalweg.curvature.separable_penalties import SeparablePenalty, as_penalty
from thalweg.curvature.shifted_systems import LinearSolver, choose_system
from thalweg.curvature.torch_derivatives import TorchFunction

Array = NDArray[np.float64]

MESSAGES = {
    0: "The norm of the subgradient is at most gtol.",
    1: "The budget of steps is spent.",
    2: "The objective is flat to rounding: no step can be judged.",
    3: "Lambda has grown beyond 1e18: f' is not Lipschitz, or jac does not match fun.",
    4: "Interrupted; x is the best point so far.",
    99: "The callback raised StopIteration.",
}
TRACED = ("time", "fun", "grad_norm", "nhev", "n_factor", "njev", "Lambda", "lam")


def minimize_lazy_ssn(
    fun: Callable[..., Any],
    x0: Any,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | Literal[True, "torch"] | None = None,
    hess: Callable[..., Any] | None = None,
    hessp: Callable[..., ArrayLike] | Literal["torch"] | None = None,
    prox: str | SeparablePenalty | None = None,
    bounds: Any = None,
    hess_every: int | Literal["auto"] = 5,
    Lambda0: float = 1.0,
    power: float = 1.0,
    alpha: float = 0.5,
    beta: float = 0.25,
    reset_lambda: bool = False,
    metric: Any = None,
    gtol: float = 1e-8,
    maxiter: int = 500,
    linear_solver: LinearSolver = "auto",
    cg_tol: float = 0.1,
    check_jac: bool = True,
    tol: float | None = None,
    callback: Callable[..., Any] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize F = f + ψ, where f' may have kinks, with a Hessian every few steps only.

    .. math:: x_{k+1} = \arg\min_y \; \langle f'(x_k), y \rangle
              + \tfrac12 \langle H_{\pi(k)}(y - x_k), y - x_k \rangle
              + \tfrac{\lambda_k}{2} \|y - x_k\|_B^2 + \psi(y), \qquad
              \pi(k) = m \lfloor k/m \rfloor, \quad \lambda_k = \Lambda_k \|F'(x_k)\|_*^p

    H is any element of the generalized Hessian: of squared hinges, ReLU penalties, Huber losses,
    distances to convex sets, contact. Λ doubles until the trial point passes two tests and halves
    after the step, so that there is nothing to tune, and the method converges from any start,
    superlinearly in the end. Use it where a Hessian costs much more than a factorization and a few
    gradients. With a cheap gradient and a moderate accuracy L-BFGS is faster.

    Usable as ``scipy.optimize.minimize(fun, x0, jac=jac, hess=hess, method=minimize_lazy_ssn,
    bounds=..., options=...)``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args)``: f, and with ``jac=True`` the pair of f and f'.
    x0 : array_like of shape (d,) (or Tensor, with ``jac="torch"``)
    args : tuple, optional
        Further arguments of ``fun``, ``jac``, ``hess`` and ``hessp``.
    jac : callable, True or "torch"
        ``jac(x, *args)``, of shape (d,). "torch": ``fun`` takes a tensor, of the dtype and on the
        device of x0 if that is one (float64 otherwise), and is differentiated twice; for
        `scipy.optimize.minimize`, and to share the derivatives with other methods, see
        `TorchFunction`.
    hess : callable, optional
        ``hess(x, *args)``: an array, a sparse array or a ``LinearOperator``, of shape (d, d).
    hessp : callable or "torch", optional
        ``hessp(x, p, *args)``, the product with a vector p, instead of ``hess``; "torch" with
        ``jac="torch"``.
    prox : str or object, optional
        ψ: ``"l1:WEIGHT"``, ``"nonneg"``, ``"box"`` with ``bounds``, or an object like `L1Penalty`
        with the methods ``value(x)``, ``prox(v, a)`` and ``jac_mask(v, a)``, the diagonal of a
        generalized Jacobian of the prox. None is ψ = 0, or the box of ``bounds``.
    bounds : scipy.optimize.Bounds or sequence of (low, high), optional
    hess_every : int ≥ 1 or "auto", default 5
        m. 1 is the method without laziness. "auto" takes as many steps as cost one Hessian, at most
        20, as measured on the first two, and a new Hessian early where a step is rejected
        three times; the path then depends on the clock.
    Lambda0 : float > 0, default 1
        The first Λ, in units of curvature over gradientᵖ.
    power : float in [0, 1], default 1
        p. 0 is the Levenberg-Marquardt rule.
    alpha, beta : float, default 1/2, 1/4
        Of the tests ``⟨F'(x⁺), x - x⁺⟩ ≥ (α/λ)‖F'(x⁺)‖*²`` and ``F(x) - F(x⁺) ≥ βλ‖x⁺ - x‖²``.
    reset_lambda : bool, default False
        For m > 1: forget at a new Hessian what Λ has grown by since the last, as its being stale
        may have been the reason.
    metric : array_like of shape (d,) or (d, d), or sparse array, optional
        B of the norm ‖x‖² = xᵀBx, symmetric positive definite: for functions on a mesh the mass
        matrix, which makes the number of steps depend on the problem, not the mesh. Default 1.
    gtol : float ≥ 0, default 1e-8
        Stop where ``‖F'(x)‖*`` is at most this.
    maxiter : int, default 500
    linear_solver : {"auto", "cholesky", "spectral", "cg"}
        A Cholesky factorization (sparse if H is) for each trial; one eigendecomposition for each
        Hessian, which pays from about m = 20 on and is for ψ = 0; or conjugate gradients. "auto" is
        "cg" for operators and "cholesky" for matrices.
    cg_tol : float > 0, default 0.1
        Of "cg": the residual is at most this multiple of λ times the step, or rounding.
    check_jac : bool, default True
        Compare ``jac`` at x0 with differences of ``fun`` along one direction, which takes two
        evaluations.
    tol : float, optional
        Another name of gtol.
    callback : callable, optional
        Called after every step as ``callback(x)``, or as ``callback(intermediate_result=...)`` if
        that is its only parameter's name. It stops the run by raising `StopIteration`.
    **unknown
        Other options of `scipy.optimize.minimize`; an `OptimizeWarning` names those that are set.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``; ``fun`` = F(x); ``jac`` a subgradient of F at x and ``grad_norm`` its dual norm;
        ``nit`` steps; ``nfev``, ``njev``, ``nhev`` calls (with ``hessp`` or an operator, the points
        it was taken at); ``n_factor`` factorizations; ``hess_every`` in use at the end; ``Lambda``
        and ``lam`` the last; ``trace`` a dict of arrays with the start and each step: ``time`` in
        seconds, ``fun``, ``grad_norm``, ``nhev``, ``n_factor``, ``njev``, ``Lambda``, ``lam``.
        ``success`` is whether ``status`` is 0; it is 1 when the budget is spent, 2 where F is flat
        to rounding and ``gtol`` out of reach, 3 when Λ exceeds 10¹⁸, 4 after Ctrl-C, 99 when the
        callback stopped the run. F never rises, so that x is the best point in each case.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; a gradient that is not that of ``fun``; a Hessian
        of a wrong shape, not symmetric (to 10⁻⁸) or not finite; f or f' not finite at x0; and for
        constraints.

    Notes
    -----
    *Cost.* Each trial one factorization, d³/3 multiplications for a dense H, one value and,
    unless F has not fallen, one gradient; every m steps a Hessian. Two matrices of memory. A stale
    Hessian causes more trials: look at ``nhev`` and ``n_factor`` together. A composite step
    takes a factorization on the free coordinates for each of its active sets, mostly two or three.

    *Ours.* The paper's is the lazy, regularized semismooth Newton step with its rates. The two
    tests, the constants, halving and doubling are those of its predecessor LeAP-SSN, with whose
    steps those of ``hess_every=1, power=0`` agree. The power of the gradient norm, "auto", the
    active sets, the safeguards (10⁻¹⁰ ≤ Λ, quadrupling above 10³) and the acceptance where
    differences of F are below rounding (10⁻¹³ of max(1, \|F\|): the gradient must get shorter) are
    our resolution. The subgradient comes from the prox, so that it is one at any accuracy of
    the composite step; with an exact one it is f'(x⁺) - f'(x) - (H + λB)(x⁺ - x).

    References
    ----------
    "Semismooth Newton methods with lazy Hessians", NeurIPS 2026. A. Alphonse, P. Dvurechensky,
    I. Papadopoulos and C. Sirotenko, "LeAP-SSN: a semismooth Newton method with global convergence
    rates", 2025. N. Doikov, E. Chayti and M. Jaggi, "Second-order optimization with lazy Hessians",
    ICML 2023.

    Examples
    --------
    A support vector machine with the squared hinge loss, whose gradient has a kink at every margin:

    >>> import numpy as np
    >>> from thalweg.curvature import minimize_lazy_ssn
    >>> rng = np.random.default_rng(0)
    >>> X = rng.standard_normal((500, 20))
    >>> y = np.sign(X[:, 0] + 0.5 * rng.standard_normal(500))
    >>> def loss(w):
    ...     missing = np.maximum(0, 1 - y * (X @ w))
    ...     return missing @ missing / 500 + w @ w / 200, -2 * X.T @ (y * missing) / 500 + w / 100
    >>> def hess(w):
    ...     short = X[y * (X @ w) < 1]
    ...     return 2 * short.T @ short / 500 + np.eye(20) / 100
    >>> result = minimize_lazy_ssn(loss, np.zeros(20), jac=True, hess=hess)
    >>> result.success, round(result.fun, 4), result.nit, result.nhev
    (True, 0.3796, 18, 4)
    """
    refuse_constraints("minimize_lazy_ssn", unknown, names=("constraints",))
    warn_of_unknown(unknown)
    report = intermediate_report(callback)
    rule = StepRule(power, alpha, beta)
    if hess_every != "auto":
        check_integer("hess_every", hess_every, at_least=1)
    check_number("Lambda0", Lambda0, above=0)
    check_number("cg_tol", cg_tol, above=0)
    for name, switch in (("reset_lambda", reset_lambda), ("check_jac", check_jac)):
        check_choice(name, switch, (False, True))
    gtol = check_number("gtol" if tol is None else "tol", gtol if tol is None else tol, at_least=0)
    check_integer("maxiter", maxiter, at_least=1)
    check_choice("linear_solver", linear_solver, ("auto", "cholesky", "spectral", "cg"))
    start = _start(x0)
    d = len(start)
    derivatives = _derivatives(fun, jac, hess, hessp, x0)
    penalty = as_penalty(prox, bounds, d)
    inner = NormMetric(metric, d)
    oracle = NewtonOracle(derivatives.fun, derivatives.jac, derivatives.hess, args, d)
    if penalty is not None and linear_solver == "spectral":
        raise ValueError("linear_solver='spectral' is for prox=None: use 'cholesky' or 'cg'")
    newton = LazyNewton(
        oracle,
        penalty,
        lambda H: choose_system(linear_solver, H, inner, cg_tol),
        inner,
        rule,
        hess_every=hess_every,
        Lambda=float(Lambda0),
        reset=reset_lambda,
        epsilon=derivatives.epsilon,
    )
    newton.start(start)
    _check_start(newton.iterate, penalty is not None)
    if check_jac:
        check_gradient(oracle, newton.iterate.x, newton.iterate.gradient, derivatives.epsilon)
    status, trace = _run(newton, gtol, maxiter, report)
    last = newton.iterate
    return optimize_result(
        x=last.x,
        fun=last.value,
        jac=last.subgradient,
        grad_norm=last.norm,
        **newton.counts(),
        hess_every=newton.period,
        Lambda=newton.Lambda,
        lam=newton.weight,
        success=status == 0,
        status=status,
        message=MESSAGES[status],
        trace=trace,
    )


class _Derivatives(NamedTuple):
    """f and its derivatives, and the epsilon of the arithmetic they are computed in."""

    fun: Callable[..., Any]
    jac: Callable[..., Any] | Literal[True]
    hess: Callable[..., Any]
    epsilon: float = float(np.finfo(np.float64).eps)


def _derivatives(fun: Any, jac: Any, hess: Any, hessp: Any, x0: Any) -> _Derivatives:
    if not callable(fun):
        raise TypeError(f"fun must be callable, got {type(fun).__name__}")
    if isinstance(jac, str):
        check_choice("jac", jac, ("torch",))
        smooth = TorchFunction(fun, x0 if hasattr(x0, "detach") else None)
        if hess is None and hessp is None:
            hess = smooth.hess
        elif isinstance(hessp, str):
            check_choice("hessp", hessp, ("torch",))
            hessp = smooth.hessp
        hess = _hessian(hess, hessp)
        return _Derivatives(smooth.value_and_gradient, True, hess, smooth.epsilon)
    if jac is not True and not callable(jac):
        raise ValueError(f'jac must be a callable, True or "torch", got {jac!r}')
    return _Derivatives(fun, jac, _hessian(hess, hessp))


def _hessian(hess: Any, hessp: Any) -> Callable[..., Any]:
    if callable(hess):
        return hess  # type: ignore[no-any-return]
    if hess is None and callable(hessp):
        return hessian_from_products(hessp)
    raise ValueError(
        f"hess(x) or hessp(x, p) must be given as a callable, got hess={hess!r}, hessp={hessp!r}"
    )


def _start(x0: Any) -> Array:
    if hasattr(x0, "detach"):
        x0 = x0.detach().double().cpu().numpy()
    if np.iscomplexobj(x0):
        raise TypeError("x0 must be real, got complex numbers")
    start = check_array("x0", x0, shape=("d",)).copy()
    if len(start) == 0:
        raise ValueError("x0 must have at least one entry")
    return start


def _check_start(start: Iterate, composite: bool) -> None:
    if not np.isfinite(start.value):
        raise ValueError(
            "the objective must be finite at x0" + composite * " and where the prox puts it"
        )
    check_finite("the gradient at x0", start.gradient)


def _run(
    newton: LazyNewton, gtol: float, maxiter: int, report: Report | None
) -> tuple[int, dict[str, Array]]:
    """Make steps; return why they end, and what was noted."""
    begin = time.perf_counter()
    rows = [_row(newton, begin)]
    status = 1
    try:
        while newton.iterate.norm > gtol:
            if newton.nit == maxiter:
                break
            stuck = newton.advance()
            if stuck is not None:
                status = stuck
                break
            rows.append(_row(newton, begin))
            if report is not None:
                last = newton.iterate
                report(
                    x=last.x.copy(),
                    fun=last.value,
                    jac=last.subgradient.copy(),
                    grad_norm=last.norm,
                    Lambda=newton.Lambda,
                    lam=newton.weight,
                    **newton.counts(),
                )
        else:
            status = 0
    except StopIteration:
        status = 99
    except KeyboardInterrupt:
        status = 4
    columns = np.array(rows, dtype=np.float64).T
    return status, dict(zip(TRACED, columns, strict=True))


def _row(newton: LazyNewton, begin: float) -> tuple[float, ...]:
    last, counts = newton.iterate, newton.counts()
    return (
        time.perf_counter() - begin,
        last.value,
        last.norm,
        counts["nhev"],
        counts["n_factor"],
        counts["njev"],
        newton.Lambda,
        newton.weight,
    )
