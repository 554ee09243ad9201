"""Stochastic dynamic barrier perturbed gradient methods for simple bilevel problems."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult

from thalweg.bilevel.barrier_descent import BarrierDescent, BarrierSettings
from thalweg.bilevel.barrier_estimates import (
    EstimateSettings,
    VarianceReduction,
    Variant,
    batch_variance,
    check_batches,
    lower_estimates,
    make_perturbation,
    upper_estimate,
)
from thalweg.bilevel.barrier_records import BarrierRun, Output
from thalweg.bilevel.finite_sums import StochasticObjective, check_objective
from thalweg.bilevel.gradient_estimators import full_gradient, sample_gradient
from thalweg.bilevel.gradient_lipschitz import gradient_lipschitz
from thalweg.bilevel.scaled_objectives import ScaledObjective
from thalweg.common.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_number,
)
from thalweg.common.minimizers import intermediate_report
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]

LARGEST_RHO = 10.0  # of the default
LARGEST_RATIO = 1e4  # of the two gradients' norms, beyond which δ and α are hardly in fit units
RECORDS = 100


def sdbpg(
    upper: StochasticObjective,
    lower: StochasticObjective,
    x0: ArrayLike,
    *,
    variant: Variant = "plain",
    lr: float | Literal["auto"] = "auto",
    lr_power: float = 0.0,
    alpha: float = 1.0,
    delta: float | Literal["auto"] = 1e-3,
    delta_power: float = 0.0,
    p: float = 0.0,
    rho: float | None = None,
    rho_power: float = 0.0,
    lam_max: float | None = None,
    vr: VarianceReduction = "auto",
    beta: float | None = None,
    split: bool = True,
    batch_upper: int | Literal["full"] = 8,
    batch_lower: int | Literal["auto", "full"] = "auto",
    normalize: bool = False,
    maxiter: int = 10_000,
    eps_f: float = 1e-2,
    eps_g: float = 1e-2,
    eval_every: int | None = None,
    output: Output = "best",
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    show_progress: bool | None = False,
) -> OptimizeResult:
    r"""Minimize f over the stationary points of g, both smooth, from gradients of samples.

    Find x with ‖∇g(x)‖ ≤ ε_g and ‖∇f(x) + λ∇g(x)‖ ≤ ε_f for some λ ≥ 0. Neither f nor g need be
    convex. Every step descends f, corrected by a barrier that keeps g falling:

    .. math:: \lambda_k = \rho + \frac{[\alpha \|\hat g_k\|^{2+p}
              - \langle \hat f_k + \rho \hat g_k, \hat g_k \rangle]_+}{\|\hat g_k\|^2 + \delta_k},
              \qquad x_{k+1} = x_k - \eta_k (\hat f_k + \lambda_k \hat g'_k)

    with estimates of the gradients and ρ = 0 in "plain". With δ = 0 this is dynamic barrier
    gradient descent, whose multiplier grows like ‖∇f‖/‖∇g‖ where ∇g vanishes and passes the noise
    on. A perturbation δ > 0 of the dual bounds it by α‖ĝ‖ᵖ + ‖f̂‖/(2√δ).

    Parameters
    ----------
    upper, lower : StochasticObjective
        f and g: for example `LeastSquares`, `Logistic`, `TorchLoss`, `Expectation`.
    x0 : array_like
        The start, of any shape.
    variant : {"plain", "pr", "vr-pr"}
        SDBPG; PR-SDBPG, which runs on f + ρg, so that staying near stationary points of g does no
        harm; VR-PR-SDBPG, which also reduces the variance.
    lr : float > 0 or "auto"
        η. "auto" is 0.5/(L_f + (α + ρ)L_g) with the Lipschitz constants of the gradients, or
        estimates of them at x0.
    lr_power : float in [0, 1), default 0
        η_k = η(k + 1)^(-lr_power); 1/3 is the paper's for STORM.
    alpha : float > 0, default 1
        α, how fast g has to fall.
    delta : float > 0 or "auto", default 1e-3
        δ, in units of ‖∇g‖². "auto" is max(α ε_g^(3+p)/‖m‖, σ²), with running means m of f̂ and σ²
        of the variance of ĝ. 0 is accepted where no samples are drawn.
    delta_power : float ≥ 0, default 0
        δ_k = δ(k + 1)^(-delta_power).
    p : float ≥ 0, default 0
        Exponent of the barrier α‖∇g‖²⁺ᵖ.
    rho : float > 0, optional
        ρ; default 1/ε_g, but at most 10. Not with "plain".
    rho_power : float ≥ 0, default 0
        Continuation: ρ_k = ρ((k + 1)/maxiter)^rho_power.
    lam_max : float > 0, optional
        An upper bound of λ, beside the perturbation.
    vr : {"auto", "storm", "spider"}
        Estimates of "vr-pr". "auto" is SPIDER for finite sums and STORM for expectations. STORM
        starts with ⌈1/ε⌉ samples, ε the larger of ``eps_f`` and ``eps_g``, but at most ``maxiter``.
    beta : float > 0, optional
        Weights of STORM, a_k = min(1, βη_k²); the paper's form with 30. Default (k + 1)^(-2/3),
        which forgets faster at first.
    split : bool, default True
        Take λ from one half of the lower batch and the step along the other, so that
        E[λĝ'] = E[λ]∇g. Not in "vr-pr", whose estimates depend on the path in any case: there one
        estimate serves for both.
    batch_upper : int ≥ 1 or "full", default 8
        Samples of f per step. SPIDER takes √n.
    batch_lower : int ≥ 2, "auto" or "full"
        Samples of g per step, both halves together; "auto" is ⌈batch_upper²/4⌉, after the orders of
        the sample complexities.
    normalize : bool, default False
        Divide f and g by the norms of their gradients at x0. α, δ, ρ, λ and lr are then those of
        the scaled objectives; ε_f and ε_g stay those of f and g.
    maxiter : int, default 10 000
        Steps.
    eps_f, eps_g : float > 0, default 1e-2
        The run stops where exact residuals are at most these.
    eval_every : int, optional
        Steps between exact residuals, which take full gradients. Default a hundred in all, or fewer
        where they would cost more than the steps.
    output : {"best", "last", "random"}
        The point with the least max(ε_f/eps_f, ε_g/eps_g) of those evaluated; the last one; or one
        drawn uniformly from the last half of the steps, as in the paper. "best" becomes "random"
        for an `Expectation` without known gradients.
    rng : int, Generator or None
        The source of the samples.
    callback : callable, optional
        Called after every evaluation, as ``callback(x)``, or as
        ``callback(intermediate_result=...)`` if that is its only parameter's name. It stops the run
        by raising `StopIteration`.
    show_progress : bool or None, default False
        Show a progress bar; None does if stderr is a terminal.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x`` and ``x_last``; ``fun`` = ``fun_upper`` = f(x) and ``fun_lower`` = g(x); ``eps_f``,
        ``eps_g`` and ``lam_star``, the exact residuals at x (see `bilevel_stationarity`); of the
        steps, ``lam``, the last multiplier, and ``lam_max_seen``, the largest, ``delta``, the last
        one, ``visits``, the share with ‖ĝ‖² < δ, and ``active``, that with an active barrier;
        ``lr`` and ``rho``; ``nit``, and the evaluations of gradients of samples, ``n_grad_upper``
        and ``n_grad_lower`` (with those for ``lr="auto"``, without those of exact residuals);
        ``history``, a dict of arrays with a row for each evaluation: ``nit``, ``time`` in seconds
        (without that of evaluating), ``fun_upper``, ``fun_lower``, ``eps_f``, ``eps_g``, ``lam``,
        ``delta``, ``n_grad_upper``, ``n_grad_lower``. ``success`` is whether ``status`` is 0; it is
        1 when the budget is spent before the residuals are reached, 2 after Ctrl-C, 3 where a
        gradient is not finite (the message names the level), 99 when the callback stopped the run.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; one object for both levels; a gradient at x0 that
        is not finite; SPIDER without n; ``lr="auto"`` without curvature.

    Warns
    -----
    UserWarning
        If ``split`` is False, which biases λĝ; if the gradients of f and g differ by more than 10⁴
        at x0, since α and δ depend on their scales.

    Notes
    -----
    *Accuracy.* δ costs some: where both gradients are opposed, α‖∇g‖³⁺ᵖ = δ‖∇f‖ stops the fall of
    g. Take δ = αε_g³/‖∇f‖, which "auto" does, or "pr", which lowers ‖∇g‖ to about ‖∇f‖/ρ. With ρ
    much larger than α "pr" is nearly the plain penalty f + ρg.

    *Cost.* O(d) and one batch of each objective per step; two batches of each in "vr-pr". Two
    vectors of memory, six in "vr-pr".

    *Rates.* O(max(ε_f⁻², ε_g⁻²)) steps, with ε⁻⁴ upper and ε⁻⁶ lower samples.

    *Limits.* Stationary points of g include saddles. STORM with slowly decaying weights and a large
    step follows stale gradients: lower ``lr`` in "vr-pr" if g grows.

    *Ours.* The paper's are the three variants and the rates. That the perturbation is a quadratic
    term of the dual, the rule "auto", independent halves, the order of ``batch_lower``, STORM's
    default weights, continuation, and when to stop are our resolution of the abstract.

    References
    ----------
    "Stochastic dynamic barrier perturbed gradient", NeurIPS 2026.
    C. Gong, X. Liu and Q. Liu, "Automatic and harmless regularization with constrained and
    lexicographic optimization: a dynamic barrier approach", NeurIPS 2021.
    A. Cutkosky and F. Orabona, "Momentum-based variance reduction in non-convex SGD", NeurIPS 2019.
    C. Fang, C. J. Li, Z. Lin and T. Zhang, "SPIDER: near-optimal non-convex optimization via
    stochastic path-integrated differential estimator", NeurIPS 2018.

    Examples
    --------
    Of all solutions of three equations, the one that best agrees with others:

    >>> import numpy as np
    >>> from thalweg.bilevel import LeastSquares, sdbpg
    >>> rng = np.random.default_rng(0)
    >>> A, B, x = rng.standard_normal((3, 5)), rng.standard_normal((50, 5)), rng.standard_normal(5)
    >>> lower, upper = LeastSquares(A, A @ x), LeastSquares(B, B @ x)
    >>> result = sdbpg(upper, lower, np.zeros(5), rng=0)
    >>> result.success, bool(np.abs(result.x - x).max() < 0.05)
    (True, True)
    """
    check_objective("upper", upper)
    check_objective("lower", lower)
    if upper is lower:
        raise ValueError("upper and lower must be two objectives, got one for both")
    check_choice("variant", variant, ("plain", "pr", "vr-pr"))
    check_choice("vr", vr, ("auto", "storm", "spider"))
    for name, flag in (("split", split), ("normalize", normalize)):
        check_choice(name, flag, (True, False))
    check_choice("output", output, ("best", "last", "random"))
    check_integer("maxiter", maxiter, at_least=1)
    for name, number in (("alpha", alpha), ("eps_f", eps_f), ("eps_g", eps_g)):
        check_number(name, number, above=0)
    for name, number in (("delta_power", delta_power), ("p", p), ("rho_power", rho_power)):
        check_number(name, number, at_least=0)
    check_number("lr_power", lr_power, at_least=0, below=1)
    if lr != "auto":
        check_number("lr", lr, above=0)
    for name, optional in (("lam_max", lam_max), ("beta", beta)):
        if optional is not None:
            check_number(name, optional, above=0)
    estimates = _estimates(
        (upper, lower),
        variant,
        vr,
        split,
        batch_upper,
        batch_lower,
        delta,
        min(math.ceil(1 / max(eps_f, eps_g)), maxiter),
    )
    _check_delta(delta, delta_power, estimates.deterministic)
    rho = _check_rho(variant, rho, eps_g)
    report = intermediate_report(callback)
    start = _start(x0)
    streams = as_generator(rng).spawn(4)
    scales = _scales((upper, lower), start, normalize, streams[0])
    f, g = upper, lower
    if normalize:
        f, g = (ScaledObjective(h, s) for h, s in zip((upper, lower), scales, strict=True))
    taken = (0, 0)
    if lr == "auto":
        lr, taken = _safe_step(f, g, start, alpha + rho, streams[0])
    settings = BarrierSettings(
        float(lr),
        lr_power,
        alpha,
        p,
        rho,
        rho_power,
        beta,
        math.inf if lam_max is None else lam_max,
        maxiter,
    )
    levels = lower_estimates(g, estimates, streams[2])
    variance = 0.0
    if delta == "auto" and variant != "vr-pr" and estimates.batch_lower != "full":
        half = math.ceil(estimates.batch_lower / 2)
        # That of the estimate in λ: one half, or the mean of both.
        variance = batch_variance(g, start, half, streams[0]) / (1 if split else 2)
        taken = (taken[0], taken[1] + 2 * half)
    perturbation = make_perturbation(
        delta, delta_power, alpha=alpha, eps_g=eps_g * scales[1], p=p, variance=variance
    )
    descent = BarrierDescent(
        upper_estimate(f, estimates, streams[1]), levels, start, settings, perturbation
    )
    run = BarrierRun(descent, (upper, lower), (eps_f, eps_g), output, taken, streams[3])
    return run.finish(eval_every, report, show_progress)


def _estimates(
    objectives: tuple[StochasticObjective, StochasticObjective],
    variant: Variant,
    vr: VarianceReduction,
    split: bool,
    batch_upper: int | str,
    batch_lower: int | str,
    delta: float | str,
    first: int,
) -> EstimateSettings:
    halves = delta == "auto" or (split and variant != "vr-pr")
    upper, lower = check_batches(batch_upper, batch_lower, halves=halves)
    if variant == "vr-pr" and vr == "spider":
        for name, objective in zip(("upper", "lower"), objectives, strict=True):
            if objective.n is None:
                raise ValueError(f"{name}.n must be an integer for vr='spider', got None")
    if not split and variant != "vr-pr" and lower != "full":
        warnings.warn(
            "split=False takes the multiplier and the step from the same batch: their product is "
            "biased",
            stacklevel=3,
        )
    return EstimateSettings(variant, vr, split, halves, upper, lower, first)


def _check_delta(delta: float | str, power: float, deterministic: bool) -> None:
    if delta == "auto":
        if power != 0:
            raise ValueError("delta_power must be 0 for delta='auto', which sets every step's")
        return
    if not deterministic:
        check_number("delta", delta, above=0)
        return
    check_number("delta", delta, at_least=0)


def _check_rho(variant: Variant, rho: float | None, eps_g: float) -> float:
    if variant == "plain":
        if rho is not None:
            raise ValueError("rho must be None for variant='plain'; 'pr' has a penalty")
        return 0.0
    return min(1 / eps_g, LARGEST_RHO) if rho is None else check_number("rho", rho, above=0)


def _start(x0: ArrayLike) -> Array:
    if np.iscomplexobj(x0):
        raise TypeError("x0 must be real, got complex numbers")
    start = check_array("x0", x0, shape=("d",) * np.ndim(x0)).copy()
    if start.size == 0:
        raise ValueError("x0 must have at least one entry")
    return start


def _scales(
    objectives: tuple[StochasticObjective, StochasticObjective],
    x: Array,
    normalize: bool,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Return the factors of both objectives, 1 unless they are normalized."""
    norms = []
    for name, objective in zip(("upper", "lower"), objectives, strict=True):
        gradient = full_gradient(objective, x)
        if objective.n is None and np.isnan(gradient).any():  # one that is not known
            gradient = sample_gradient(objective, x, objective.draw(rng, RECORDS))
        norms.append(float(np.linalg.norm(check_finite(f"the gradient of {name} at x0", gradient))))
    if normalize:
        if 0 in norms:
            raise ValueError("normalize must be False where a gradient at x0 is 0")
        return 1 / norms[0], 1 / norms[1]
    if min(norms) > 0 and max(norms) / min(norms) > LARGEST_RATIO:
        warnings.warn(
            f"the gradients at x0 differ in size, {norms[0]:.1e} and {norms[1]:.1e}: alpha and "
            "delta depend on their scales; set normalize=True",
            stacklevel=3,
        )
    return 1.0, 1.0


def _safe_step(
    f: StochasticObjective,
    g: StochasticObjective,
    x: Array,
    weight: float,
    rng: np.random.Generator,
) -> tuple[float, tuple[int, int]]:
    """Return 0.5/(L_f + weight L_g), and the gradients of samples that it took."""
    (L_f, n_f), (L_g, n_g) = (gradient_lipschitz(h, x, rng) for h in (f, g))
    curvature = L_f + weight * L_g
    if not (0 < curvature < math.inf):
        raise ValueError(
            f"lr must be a number: the curvature at x0 is {curvature:g}, which says nothing of it"
        )
    return 0.5 / curvature, (n_f, n_g)
