"""Semismooth Newton with lazy Hessians, in the form of a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.common.torch_gradients import count_nonfinite
from thalweg.curvature.closure_derivatives import (
    Evaluation,
    evaluate,
    flat,
    hessian,
    hessian_products,
)
from thalweg.curvature.regularization import MOST_LAMBDA, StepRule, rounding_floor

FLOATS = (torch.float32, torch.float64)
CG_STEPS = 200


class LazySSN(torch.optim.Optimizer):
    r"""Newton steps for losses with kinks in their gradient, with a Hessian every few steps only.

    .. math:: \theta_{t+1} = \theta_t - (H_{\pi(t)} + \lambda_t I)^{-1} \nabla f(\theta_t), \qquad
              \pi(t) = m \lfloor t/m \rfloor, \quad \lambda_t = \Lambda_t \|\nabla f(\theta_t)\|^p

    For models of up to some thousand parameters whose loss is deterministic (the full batch, no
    dropout). Each step doubles Λ until the trial point passes two tests, which make the method
    converge from any start; there is no learning rate and nothing to tune.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of one dict
        One param group, of float32 or float64 parameters on one device. float64 is better: the
        tests compare losses, whose differences float32 loses near the optimum.
    hess_every : int ≥ 1, default 5
        m. Larger ones where the Hessian is expensive, 1 for the method without laziness.
    Lambda0 : float > 0, default 1
        The first Λ.
    power : float in [0, 1], default 1
        p.
    alpha, beta : float, default 1/2, 1/4
        Of the tests ⟨∇f(θ⁺), θ - θ⁺⟩ ≥ (α/λ)‖∇f(θ⁺)‖² and f(θ) - f(θ⁺) ≥ βλ‖θ⁺ - θ‖².
    reset_lambda : bool, default False
        Forget at a new Hessian what Λ has grown by since the last.
    linear_solver : {"cholesky", "cg"}, default "cholesky"
        "cg" makes no matrix: products with the Hessian at the last snapshot, by automatic
        differentiation, in at most 200 iterations of conjugate gradients for each trial.
    cg_tol : float > 0, default 0.1
        The residual of "cg" is at most this multiple of λ times the step.
    chunk_size : int ≥ 1, default 64
        Rows of the Hessian that are computed at a time.

    Attributes
    ----------
    n_hessians, n_trials : int
        Hessians (with "cg" snapshots), and trial points.
    n_skipped : int
        Steps skipped because the loss or its gradient was not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and for a second param group.
    RuntimeError
        From `step`: without a closure; if Λ exceeds 10¹⁸, as it does if the gradient is not
        Lipschitz or the closure is random.
    NonFiniteGradientError
        From `step`: after ten steps in a row that met a loss or gradient that was not finite.

    Notes
    -----
    *Closure.* The same as for `torch.optim.LBFGS`; it may also return the loss without calling
    ``backward``. It is called once at the start of a step and once for each trial. The loss must
    be differentiable twice, which fused kernels and compiled models are not.

    *Cost.* With d parameters, d²  numbers of state, d³/3 multiplications for each trial, and d
    backward passes every m steps, ``chunk_size`` at a time. "cg": d numbers of state, two passes
    per iteration, and one more call of the closure for each trial, at the snapshot.

    *Resumption.* Λ and the age of the Hessian stand in the param group and the Hessian in the
    state: ``state_dict`` resumes bit for bit.

    *Ours.* As in `minimize_lazy_ssn`; the form of an optimizer is ours, too. A step at which
    differences of the loss are below rounding and the gradient gets no shorter stays where it is.

    References
    ----------
    "Semismooth Newton methods with lazy Hessians", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.curvature import LazySSN
    >>> _ = torch.manual_seed(0)
    >>> X, y = torch.randn(200, 5).double(), torch.randn(200).double()
    >>> model = torch.nn.Linear(5, 1).double()
    >>> optimizer = LazySSN(model.parameters())
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     loss = torch.nn.functional.huber_loss(model(X)[:, 0], y)
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(12):
    ...     loss = optimizer.step(closure)
    >>> loss = closure()
    >>> bool(model.weight.grad.norm() < 1e-8), optimizer.n_hessians
    (True, 3)
    """

    n_hessians = 0
    n_trials = 0
    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        *,
        hess_every: int = 5,
        Lambda0: float = 1.0,
        power: float = 1.0,
        alpha: float = 0.5,
        beta: float = 0.25,
        reset_lambda: bool = False,
        linear_solver: Literal["cholesky", "cg"] = "cholesky",
        cg_tol: float = 0.1,
        chunk_size: int = 64,
    ) -> None:
        defaults = {
            "hess_every": hess_every,
            "Lambda0": Lambda0,
            "power": power,
            "alpha": alpha,
            "beta": beta,
            "reset_lambda": reset_lambda,
            "linear_solver": linear_solver,
            "cg_tol": cg_tol,
            "chunk_size": chunk_size,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the one param group there can be."""
        if self.param_groups:
            raise ValueError("LazySSN has one param group: its Hessian is that of all parameters")
        settings = self.defaults | param_group
        StepRule(settings["power"], settings["alpha"], settings["beta"])
        for name in ("hess_every", "chunk_size"):
            check_integer(name, settings[name], at_least=1)
        for name in ("Lambda0", "cg_tol"):
            check_number(name, settings[name], above=0)
        check_choice("reset_lambda", settings["reset_lambda"], (False, True))
        check_choice("linear_solver", settings["linear_solver"], ("cholesky", "cg"))
        progress = {"Lambda": float(settings["Lambda0"]), "age": 0, "Lambda_at_refresh": math.inf}
        super().add_param_group(progress | param_group)
        params = self.param_groups[0]["params"]
        strange = [p for p in params if p.dtype not in FLOATS or p.device != params[0].device]
        if strange:
            self.param_groups.clear()
            raise TypeError(
                "params must be float32 or float64 and on one device, got "
                f"{strange[0].dtype} on {strange[0].device}"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, of as many trials as it takes.

        Parameters
        ----------
        closure : callable
            Computes the loss; see the notes of the class.

        Returns
        -------
        float
            The loss before the step.
        """
        if closure is None:
            raise RuntimeError("LazySSN needs a closure: step(closure)")
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.requires_grad]
        if not params:
            return float(closure())
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
        x = flat(params, dtype)
        start = evaluate(closure, params, dtype)
        if not count_nonfinite(self, finite=_is_finite(start), lower="the scale of the loss"):
            return start.value
        solve = self._solver(group, params, x, start, closure)
        if float(start.gradient.norm()) > 0:
            try:
                self._search(group, params, x, start, closure, solve)
            except BaseException:
                _move_to(params, x)
                raise
        return start.value

    def _search(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        x: Tensor,
        start: Evaluation,
        closure: Callable[[], Any],
        solve: Callable[[float], Tensor | None],
    ) -> None:
        """Raise Λ until a trial point passes."""
        rule = StepRule(group["power"], group["alpha"], group["beta"])
        norm = float(start.gradient.norm())
        floor = rounding_floor(start.value, torch.finfo(start.loss.dtype).eps)
        while True:
            self.n_trials += 1
            weight = rule.weight(group["Lambda"], norm)
            step = solve(weight)
            is_flat = False
            if step is not None:
                _move_to(params, x + step)
                new = evaluate(closure, params, x.dtype)
                new_norm = float(new.gradient.norm())
                decrease, squared = start.value - new.value, float(step @ step)
                is_flat = abs(decrease) <= floor
                passes = rule.decreases(decrease, squared, weight) and rule.turns(
                    -float(new.gradient @ step), new_norm**2, weight
                )
                if math.isfinite(new_norm) and (passes or (is_flat and new_norm < norm)):
                    group["Lambda"] = rule.lighter(group["Lambda"])
                    group["age"] += 1
                    return
            group["Lambda"] = rule.heavier(group["Lambda"])
            unmoved = step is not None and torch.equal(x + step, x)
            if not (unmoved or group["Lambda"] > MOST_LAMBDA):
                continue
            if not is_flat:
                raise RuntimeError(
                    "Lambda has grown beyond 1e18: the gradient of the loss is not Lipschitz, or "
                    "the closure computes another loss at each call"
                )
            _move_to(params, x)
            return

    def _solver(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        x: Tensor,
        start: Evaluation,
        closure: Callable[[], Any],
    ) -> Callable[[float], Tensor | None]:
        """Return λ ↦ -(H + λI)⁻¹∇f, None if that matrix is not positive definite."""
        state = self.state[next(p for p in params if p.dtype == x.dtype)]
        by_cg = group["linear_solver"] == "cg"
        name = "snapshot" if by_cg else "hessian"
        fresh = name not in state or len(state[name]) != len(x)
        if fresh or group["age"] >= group["hess_every"]:
            self._refresh(group)
            size = group["chunk_size"]
            state[name] = x if by_cg else hessian(start.loss, params, x.dtype, size)
        right = -start.gradient
        if not by_cg:
            return lambda weight: _by_cholesky(state[name], weight, right)

        def solve(weight: float) -> Tensor | None:
            # Trial points overwrite the parameters that the graph of the snapshot has saved: it is
            # made anew for each.
            _move_to(params, state[name])
            at_snapshot = evaluate(closure, params, x.dtype)
            products = hessian_products(at_snapshot.loss, params, x.dtype)
            return _by_cg(products, weight, right, group["cg_tol"])

        return solve

    def _refresh(self, group: dict[str, Any]) -> None:
        self.n_hessians += 1
        group["age"] = 0
        if group["reset_lambda"] and group["hess_every"] > 1:
            group["Lambda"] = min(group["Lambda"], group["Lambda_at_refresh"])
            group["Lambda_at_refresh"] = group["Lambda"]


def _is_finite(evaluation: Evaluation) -> bool:
    return math.isfinite(evaluation.value) and bool(evaluation.gradient.isfinite().all())


def _move_to(params: list[Tensor], x: Tensor) -> None:
    for p, part in zip(params, torch.split(x, [p.numel() for p in params]), strict=True):
        p.copy_(part.view_as(p))


def _by_cholesky(H: Tensor, weight: float, right: Tensor) -> Tensor | None:
    shifted = H.clone()
    shifted.diagonal().add_(weight)
    factor, info = torch.linalg.cholesky_ex(shifted)
    if int(info) != 0:
        return None
    return torch.cholesky_solve(right[:, None], factor)[:, 0]


def _by_cg(
    products: Callable[[Tensor], Tensor], weight: float, right: Tensor, tolerance: float
) -> Tensor | None:
    x = torch.zeros_like(right)
    residual = direction = right
    squared = float(residual @ residual)
    floor = squared * torch.finfo(right.dtype).eps ** 2
    for _ in range(min(CG_STEPS, 2 * len(right))):
        if squared <= max(floor, (tolerance * weight) ** 2 * float(x @ x)):
            break
        applied = products(direction[None])[0] + weight * direction
        curvature = float(direction @ applied)
        if not curvature > 0:
            return None
        x = x + squared / curvature * direction
        residual = residual - squared / curvature * applied
        before, squared = squared, float(residual @ residual)
        direction = residual + squared / before * direction
    return x
