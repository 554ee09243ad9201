"""Nonlinearly preconditioned gradient descent, which damps large gradients smoothly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.common.torch_gradients import value_of
from thalweg.training.gradient_norms import combined_norm, norm_of_large, tensor_norms
from thalweg.training.gradients import (
    accept,
    all_finite,
    buffer,
    check_lr,
    check_real,
    with_gradients,
)
from thalweg.training.precond_kernels import (
    STRUCTURES,
    KernelName,
    Structure,
    damping_factor,
    kernel_named,
)
from thalweg.training.tensor_lists import launches, shrink, wide_dtype

Group = dict[str, Any]
PIECE = 2**16  # entries whose temporaries stay in a CPU's cache


class _Part(NamedTuple):
    """Tensors that one kernel launch takes: ``directions`` are the gradients or their averages."""

    params: list[Tensor]
    grads: list[Tensor]
    directions: list[Tensor]
    norms: list[Tensor]


class NLPrecond(torch.optim.Optimizer):
    r"""Gradient descent that passes the gradient through a fixed scalar nonlinearity.

    .. math:: \theta^+ = \theta - \mathrm{lr} \, \nabla\phi^*(m / \bar L), \qquad
              \nabla\phi^*(y) = h^{*\prime}(\|y\|) \, y / \|y\|

    where m is the gradient, or its moving average. Small gradients make the step of SGD with step
    size ``lr / Lbar``; large ones are damped, so that a start far away, where the loss is steep,
    needs no smaller ``lr``. The damping h*' is smooth and has a step-size rule: any ``lr`` < 1/L
    descends and avoids strict saddle points if ``λ_max(∇²φ*(∇f/L̄) ∇²f) ≤ L L̄`` everywhere. If the
    loss is (L₀, L₁)-smooth, that is kernel="log", lr = 1/L₁, Lbar = L₀/L₁. See
    `smoothness_report` for both.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; every setting below may differ between groups.
    lr : float or 0-dim Tensor, default 1e-2
        γ, at the same time the order of the longest step (exactly for "log" and "clip").
    Lbar : float, default 1
        L̄ > 0, the gradient norm around which damping sets in. Near a solution only ``lr / Lbar``
        matters, far away mostly ``lr``: tune both.
    kernel : {"cosh", "exp", "log", "clip", "quadratic"}, default "cosh"
        h*'(y) is arcsinh y, ln(1 + y), y/(1 + y), min(y, 1), or y, which is SGD.
    structure : {"isotropic", "separable"}, default "isotropic"
        Whether h*' acts on the norm of the gradient, or on every entry.
    scope : {"global", "tensor"}, default "global"
        For an isotropic structure: one norm over all parameters with this scope, whatever their
        group or device, or one for each tensor, which is another method.
    momentum : float in [0, 1), default 0
        β of the moving average m ← βm + (1-β)g, which takes the gradient's place.
    weight_decay : float, default 0
        Decoupled: the parameters shrink by the factor 1 - lr · weight_decay, undamped.
    maximize : bool, default False
        Ascend instead.
    check_finite : bool, default True
        Skip steps whose gradient is not finite. This waits for the device. With an isotropic
        structure and without momentum the norm says it, else it reads the gradient once more.
        Without the check a gradient whose squares overflow makes the parameters NaN.

    Attributes
    ----------
    n_skipped : int
        Steps skipped because a gradient was not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    RuntimeError
        From `step`: for sparse gradients.
    NonFiniteGradientError
        From `step`: after 10 gradients in a row that were not finite.

    Notes
    -----
    *Cost.* Isotropic: SGD and one pass over the gradient for its norm, without memory of its own;
    on an accelerator an uncompiled step without ``check_finite`` launches a kernel per tensor.
    Separable: a few elementwise operations on one tensor after the other (on a CPU in pieces that
    fit its cache), which compiled code fuses; "cosh" and "exp" are then bound by their logarithm,
    several times the time of reading and writing. ``momentum`` keeps one average.

    *Compiled* use is ``step = torch.compile(optimizer.step)`` with ``lr=torch.tensor(...)`` and
    ``check_finite=False`` for a single graph. The norm must be complete before anything moves: a
    pass of its own, which keeps an isotropic step from being as fast per byte as an update alone.

    *Ours.* The kernels, both structures and the step are the paper's. Ours are ``scope="tensor"``,
    weight decay, and the moving average inside of the nonlinearity; it starts at zero, which
    warms the step up over the first 1/(1-β) steps.

    References
    ----------
    "Nonlinear preconditioning under generalized smoothness", NeurIPS 2025.

    Examples
    --------
    A quartic, from far away: the gradient is 8·10⁶ at first.

    >>> import torch
    >>> from thalweg.training import NLPrecond
    >>> x = torch.nn.Parameter(torch.tensor([200.0, 10.0]))
    >>> optimizer = NLPrecond([x], lr=0.4)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     loss = (x @ x - 1) ** 2 / 4
    ...     loss.backward()
    ...     _ = optimizer.step()
    >>> bool(loss < 1e-6)
    True
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        Lbar: float = 1.0,
        kernel: KernelName = "cosh",
        structure: Structure = "isotropic",
        scope: Literal["global", "tensor"] = "global",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "Lbar": Lbar,
            "kernel": kernel,
            "structure": structure,
            "scope": scope,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "check_finite": check_finite,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        settings = self.defaults | param_group
        check_lr(settings["lr"])
        check_number("Lbar", settings["Lbar"], above=0)
        kernel_named(settings["kernel"])
        check_choice("structure", settings["structure"], STRUCTURES)
        check_choice("scope", settings["scope"], ("global", "tensor"))
        check_number("momentum", settings["momentum"], at_least=0, below=1)
        check_number("weight_decay", settings["weight_decay"], at_least=0)
        for name in ("maximize", "check_finite"):
            check_choice(name, settings[name], (False, True))
        super().add_param_group(param_group)
        check_real(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step along the gradients in ``.grad``.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss; called once, with gradients enabled.

        Returns
        -------
        The closure's value, or None.
        """
        loss = value_of(closure)
        rows: list[tuple[Group, list[_Part]]] = []
        for group in self.param_groups:
            lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
            self._init_group(group, *lists)
            rows.append((group, [_Part(p, g, d, []) for p, g, d in launches(*lists)]))
        _measure([row for row in rows if row[0]["momentum"] == 0])
        checked = [part for group, parts in rows if group["check_finite"] for part in parts]
        if checked and not accept(self, _witnesses(checked)):
            return loss
        averaged = [row for row in rows if row[0]["momentum"] != 0]
        for group, parts in averaged:
            for part in parts:
                torch._foreach_lerp_(part.directions, part.grads, 1 - group["momentum"])
        _measure(averaged)
        shared = [row for row in rows if row[0]["scope"] == "global"]
        norms = [norm for _, parts in shared for part in parts for norm in part.norms]
        total = combined_norm(norms) if norms else None
        for group, parts in rows:
            step_size = 0.0 if total is None else _step_size(group, total)
            for part in parts:
                _update(group, part, step_size)
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: Group,
        params: list[Tensor],
        grads: list[Tensor],
        directions: list[Tensor],
    ) -> None:
        held = with_gradients(self, group, params, grads)
        averaged = group["momentum"] != 0
        directions.extend([buffer(self, p, "average") for p in held] if averaged else grads)


def _measure(rows: list[tuple[Group, list[_Part]]]) -> None:
    """Compute ‖d‖ of every direction, where the structure needs it."""
    measured = [row for row in rows if row[0]["structure"] == "isotropic"]
    for _, parts in measured:
        for part in parts:
            part.norms.extend(tensor_norms(part.directions))
    checked = [part for group, parts in measured if group["check_finite"] for part in parts]
    if checked:
        _measure_large(checked)


def _witnesses(parts: list[_Part]) -> list[Tensor]:
    """Return tensors that are finite if, and only if, the gradients are."""
    norms = [norm for part in parts for norm in part.norms]
    unmeasured = [grad for part in parts if not part.norms for grad in part.grads]
    return [combined_norm(norms), *unmeasured] if norms else unmeasured


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _measure_large(parts: list[_Part]) -> None:
    """Compute the norms again, more slowly, if squares of finite entries have overflowed."""
    if all_finite([combined_norm([norm for part in parts for norm in part.norms])]):
        return
    for part in parts:
        part.norms[:] = [norm_of_large(direction) for direction in part.directions]


def _update(group: Group, part: _Part, step_size: float | Tensor) -> None:
    """θ ← (1-ηλ)θ - η ∇φ*(d/L̄), with +η to maximize.

    ``step_size`` is η h*'(s)/(s L̄), which a structure with a norm for all tensors needs.
    """
    lr = -group["lr"] if group["maximize"] else group["lr"]
    shrink(part.params, group["lr"], group["weight_decay"])
    if group["structure"] == "separable":
        _move_separably(group, part, lr)
    elif group["scope"] == "tensor":
        factors = _stored(_factor(group, torch.stack(part.norms)) * lr)
        torch._foreach_addcmul_(part.params, part.directions, factors.unbind(), value=-1)
    elif isinstance(step_size, Tensor):
        here = step_size.to(part.params[0].device)
        torch._foreach_addcmul_(part.params, part.directions, [here] * len(part.params), value=-1)
    else:
        torch._foreach_add_(part.params, part.directions, alpha=-step_size)


def _step_size(group: Group, total: Tensor) -> float | Tensor:
    """Return η h*'(s)/(s L̄) for s = total/L̄, negative to maximize."""
    lr = -group["lr"] if group["maximize"] else group["lr"]
    step_size = _stored(lr * _factor(group, total))
    # The check has waited for the device: a number is free now, and saves a pass.
    waited = group["check_finite"] and not torch.compiler.is_compiling()
    return float(step_size) if waited else step_size


def _factor(group: Group, norms: Tensor) -> Tensor:
    """Return h*'(s)/(s L̄) for s = norms/L̄."""
    damping = damping_factor(kernel_named(group["kernel"]), norms / group["Lbar"], torch)
    factor: Tensor = damping / group["Lbar"]
    return factor


def _stored(factor: Tensor) -> Tensor:
    """Keep compiled code from evaluating h*' again for every few entries of the parameters."""
    return torch.stack([factor, factor])[0] if torch.compiler.is_compiling() else factor


def _move_separably(group: Group, part: _Part, lr: float | Tensor) -> None:
    """θᵢ ← θᵢ - η h*'(dᵢ/L̄)."""
    kernel = kernel_named(group["kernel"])
    for param, direction in zip(part.params, part.directions, strict=True):
        for piece, slope in _pieces(param, direction):
            step = kernel.dual_slope(slope.to(wide_dtype(slope)) / group["Lbar"], torch)
            if isinstance(lr, Tensor):
                piece.sub_(step * lr)
            else:
                piece.sub_(step, alpha=lr)


def _pieces(param: Tensor, direction: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Cut a pair of tensors on a CPU into pieces whose temporaries stay in the cache."""
    whole_is_better = (
        param.device.type != "cpu"
        or torch.compiler.is_compiling()
        or hasattr(param, "full_tensor")
        or not (param.is_contiguous() and direction.is_contiguous())
    )
    if whole_is_better:
        return [(param, direction)]
    pieces = (torch.split(tensor.view(-1), PIECE) for tensor in (param, direction))
    return list(zip(*pieces, strict=True))
