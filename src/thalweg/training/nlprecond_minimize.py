"""Nonlinearly preconditioned gradient descent in the form of a SciPy minimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult
from scipy.sparse.linalg import ArpackNoConvergence

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)
from thalweg.common.random import RNGLike, as_generator
from thalweg.training.precond_descent import Descent, Objective
from thalweg.training.precond_hessian import preconditioned_curvature
from thalweg.training.precond_kernels import KernelName, NonlinearPreconditioner, Structure
from thalweg.training.precond_perturbation import SaddleSearch, noise_scale

Vector = NDArray[np.float64]
MESSAGES = {
    0: "The gradient is smaller than tol.",
    1: "The budget of steps is spent.",
    2: "Interrupted; x is the best point so far.",
    3: "The function or its gradient is not finite at the next iterate; is gamma too large?",
    4: "No step decreases the function: its precision is exhausted, or its gradient wrong.",
    99: "The callback raised StopIteration.",
}
CERTIFIED = "The gradient is smaller than tol, and a perturbation has found no descent."


def minimize_nlprecond(
    fun: Callable[..., Any],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | Literal[True, "2-point"] | None = True,
    kernel: KernelName = "cosh",
    structure: Structure = "isotropic",
    gamma: float | None = None,
    Lbar: float = 1.0,
    perturb: bool = False,
    eps: float = 1e-3,
    rho: float | None = None,
    delta: float = 0.1,
    delta_f: float | None = None,
    radius: float | None = None,
    interval: int | None = None,
    tol: float = 1e-6,
    maxiter: int = 10_000,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    hess: Callable[..., ArrayLike] | None = None,
    hessp: Callable[..., ArrayLike] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize a smooth function whose gradient need not be Lipschitz, from any start.

    .. math:: x^+ = x - \gamma \, \nabla\phi^*(\nabla f(x) / \bar L)

    Near a stationary point this is gradient descent with step size γ/L̄; where the gradient is
    large it is damped, so that a start far away, where a quartic is steep, needs no smaller γ. Use
    it in high dimension, or where a saddle point must be left (``perturb``); in low dimension
    SciPy's L-BFGS-B needs fewer gradients.

    Usable as ``scipy.optimize.minimize(fun, x0, jac=jac, method=minimize_nlprecond)``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``, or ``(float, gradient)`` with ``jac=True``.
    x0 : array_like of shape (n,)
    args : tuple, optional
        Further arguments of ``fun``, ``jac``, ``hess`` and ``hessp``.
    jac : callable, True or "2-point", default True
        ``jac(x, *args) -> array_like of shape (n,)``. "2-point" takes finite differences.
    kernel : {"cosh", "exp", "log", "clip", "quadratic"}, default "cosh"
        h*'(y) is arcsinh y, ln(1 + y), y/(1 + y), min(y, 1), or y, which is gradient descent.
    structure : {"isotropic", "separable"}, default "isotropic"
        Whether h*' acts on the norm of the gradient, or on every entry.
    gamma : float, optional
        γ > 0, kept fixed; smaller than 1/L if f is (L, L̄)-anisotropically smooth (see
        `smoothness_report`). By default backtracking finds it: from γ = 1, halve it until
        ``f(x⁺) ≤ f(x) - ⟨∇f(x), x - x⁺⟩/2``, and double it after ten steps without.
    Lbar : float, default 1
        L̄ > 0, the gradient norm (or entry) around which damping sets in.
    perturb : bool, default False
        Leave saddle points: at a nearly stationary point add noise, and take the point for a
        minimum only if descent from there finds nothing lower within ``interval`` steps.
    eps : float, default 1e-3
        ε: a point is nearly stationary if ``L̄ φ(∇φ*(∇f/L̄)) ≤ G²/2``, where G = min(1, √L̄) ε, or
        with ``rho`` that of `perturbation_parameters`.
    rho : float, optional
        The Lipschitz constant of the preconditioned Hessian. With it, ``radius``, ``interval`` and
        G are by default those of the theory (`perturbation_parameters`), which are very small;
        this needs ``gamma`` and ``delta_f``.
    delta : float, default 0.1
        With ``rho``: the probability of failure.
    delta_f : float, optional
        With ``rho``: a bound on f(x0) - min f.
    radius : float, optional
        Radius of the ball from which the noise is drawn, in units of x; by default
        10⁻² max(1, ‖x‖), with ``rho`` γr.
    interval : int, optional
        Steps after a perturbation until it is judged, by default 50.
    tol : float, default 1e-6
        Stop where ‖∇f‖ ≤ tol.
    maxiter : int, default 10_000
        Number of steps.
    rng : int, numpy.random.Generator or None
        Where perturbations come from.
    callback : callable, optional
        Called after every step as ``callback(x)``, or as ``callback(intermediate_result=...)`` if
        that is its only parameter's name. It stops the run by raising `StopIteration`.
    hess, hessp : callable, optional
        ``hess(x, *args)`` of shape (n, n) or ``hessp(x, v, *args)`` of shape (n,). Not used by
        the method: with ``perturb`` the result's ``min_eigenvalue`` is computed from it.
    **unknown
        Other options of `scipy.optimize.minimize`; an `OptimizeWarning` names those that are set.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``, ``fun``, ``jac``; ``nit`` steps; ``nfev`` and ``njev`` evaluations, rejected ones
        included; ``stationarity`` is L̄ φ(∇φ*(∇f/L̄)); ``gamma_used`` the last γ; ``n_perturb`` the
        number of perturbations, ``escaped`` a list of (step, f before, f after) of those that led
        to a lower f (also where the point was merely on its slow way down); ``min_eigenvalue``
        that of ``∇²φ* ∇²f`` at x (with ``hess`` or ``hessp``; NaN if the Lanczos iteration did not
        converge); ``trace`` a dict of the arrays ``fun``, ``gradient_norm``, ``gamma`` and
        ``njev``, one entry per iterate. ``success`` is whether ``status`` is 0; it is 1 when the
        budget is spent, 2 after Ctrl-C, 3 when f or its gradient is not finite at the next
        iterate, 4 when no step decreases f (its precision is exhausted, or its gradient wrong), 99
        when the callback stopped the run. In each case x is the last finite iterate, or the
        unperturbed point if that is lower.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, a function that is not finite at x0, and for
        bounds or constraints.

    Warns
    -----
    UserWarning
        If kernel="clip" is perturbed: the theory needs a kernel that is twice differentiable.

    Notes
    -----
    O(n) per step besides ``fun``: one norm, one step, one copy. With backtracking about a tenth
    more evaluations than steps.

    *Ours.* The step, the kernels and the perturbation with its parameters are the paper's, which
    has neither backtracking nor termination. Ours are both, and what ``perturb`` does without
    ``rho``. A perturbation from which ``interval`` steps lower f by less than 10⁻¹⁰ max(1, ``|f|``)
    is undone, so that noise never costs progress; if ‖∇f‖ ≤ tol there, the run is over, and else
    the next one waits until ‖∇f‖ ≤ tol.

    References
    ----------
    "Nonlinear preconditioning under generalized smoothness", NeurIPS 2025; the form of the
    perturbation is that of "On nonconvex optimization for machine learning: gradients,
    stochasticity, and saddle points", Journal of the ACM, 2021.

    Examples
    --------
    A quartic whose origin is a saddle point, from far away and from the saddle point itself:

    >>> import numpy as np
    >>> from thalweg.training import minimize_nlprecond
    >>> def f(x):
    ...     return (x @ x - 1) ** 2 / 4, (x @ x - 1) * x
    >>> far = minimize_nlprecond(f, [300.0, -400.0])
    >>> far.success, bool(far.fun < 1e-12)
    (True, True)
    >>> saddle = minimize_nlprecond(f, [0.0, 0.0], perturb=True, rng=0)
    >>> saddle.success, bool(saddle.fun < 1e-12), saddle.n_perturb, len(saddle.escaped)
    (True, True, 2, 1)
    """
    refuse_constraints("minimize_nlprecond", unknown)
    warn_of_unknown(unknown)
    _check_perturb(perturb, kernel)
    preconditioner = NonlinearPreconditioner(kernel, structure, Lbar)
    budget = check_integer("maxiter", maxiter, at_least=1)
    tolerance = check_number("tol", tol, at_least=0)
    fixed = None if gamma is None else check_number("gamma", gamma, above=0)
    report = intermediate_report(callback)
    start = _check_start(x0)
    search = None
    if perturb:
        scale = noise_scale(
            start.size, fixed, Lbar, rho, eps, delta, delta_f, radius=radius, interval=interval
        )
        search = SaddleSearch(scale, tolerance, as_generator(rng))
    descent = Descent(Objective(fun, jac, args), preconditioner, fixed, start)

    status = 1
    try:
        while status == 1:
            if search(descent) if search else descent.point.norm <= tolerance:
                status = 0
            elif descent.nit == budget:
                break
            else:
                status = descent.step()
                if status == 4 and search and search.end_interval():
                    status = 1  # at the bottom of where the perturbation has led
                elif status == 1 and report is not None:
                    report(**_fields(descent))
    except StopIteration:
        status = 99
    except KeyboardInterrupt:
        status = 2
    if search:
        search.keep_lower(descent)

    point = descent.point
    result = optimize_result(
        **_fields(descent),
        success=status == 0,
        status=status,
        message=CERTIFIED if search and status == 0 else MESSAGES[status],
        stationarity=preconditioner.stationarity(point.gradient, point.norm),
        n_perturb=search.n_perturb if search else 0,
        escaped=search.escaped if search else [],
        gamma_used=descent.gamma,
        trace=descent.trace(),
    )
    if search and (hess is not None or hessp is not None):
        result["min_eigenvalue"] = _min_eigenvalue(descent, hess, hessp, args)
    return result


def _fields(descent: Descent) -> dict[str, Any]:
    return {
        "x": descent.point.x.copy(),
        "fun": descent.point.fun,
        "jac": descent.point.gradient,
        "nit": descent.nit,
        "nfev": descent.objective.nfev,
        "njev": descent.objective.njev,
    }


def _min_eigenvalue(
    descent: Descent,
    hess: Callable[..., ArrayLike] | None,
    hessp: Callable[..., ArrayLike] | None,
    args: tuple[Any, ...],
) -> float:
    x = descent.point.x
    if hessp is not None:
        product = hessp

        def hvp(v: Vector) -> ArrayLike:
            return product(x.copy(), v, *args)
    else:
        assert hess is not None
        matrix = check_array("hess(x)", hess(x.copy(), *args), shape=(x.size, x.size))

        def hvp(v: Vector) -> ArrayLike:
            return matrix @ v

    try:
        return preconditioned_curvature(
            descent.point.gradient, hvp, preconditioner=descent.preconditioner
        )
    except ArpackNoConvergence:
        return float("nan")


def _check_start(x0: ArrayLike) -> Vector:
    if np.iscomplexobj(x0):
        raise TypeError("x0 must be real, got complex numbers")
    return check_array("x0", x0, shape=("n",)).copy()


def _check_perturb(perturb: bool, kernel: KernelName) -> None:
    check_choice("perturb", perturb, (False, True))
    if perturb and kernel == "clip":
        warnings.warn(
            'kernel="clip" is not twice differentiable, as the theory of perturbations assumes',
            UserWarning,
            stacklevel=3,
        )
