"""Muon and Muonlight: steps along the sign of the momentum's singular values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.common.torch_gradients import value_of
from thalweg.training.gradients import (
    accept_rows,
    buffer,
    check_lr,
    check_real,
    rows_of,
    with_gradients,
)
from thalweg.training.lion import check_betas, lion_step
from thalweg.training.muon_steps import adamw_step, matrix_batches, muon_step
from thalweg.training.orthogonalizers import METHODS, Method
from thalweg.training.tensor_lists import launches

Fallback = Literal["adamw", "lion", "error"]
Scaling = Literal["none", "fan", "rms"]


class Muon(torch.optim.Optimizer):
    r"""Descend along the matrix sign of the momentum; AdamW or Lion for what is no matrix.

    .. math::
        M_{t+1} = \mu M_t + (1 - \mu) G_t, \qquad
        W_{t+1} = (1 - \eta \lambda) W_t - \eta s \, \mathrm{msign}(\hat M), \qquad
        \hat M = \begin{cases} \mu M_{t+1} + (1 - \mu) G_t & \text{Nesterov} \\
        M_{t+1} & \text{else} \end{cases}

    where msign(UΣVᵀ) = UVᵀ (see `matrix_sign`) and s depends on the matrix's shape. Every singular
    value of a step is about ηs, so an outlier in the gradients cannot make it large. It still
    turns it: the momentum averages outliers before the sign bounds them, and where gradients have
    them, clipping (`torch.nn.utils.clip_grad_norm_`) helps this method like any other.

    Give it the groups of `muon_param_groups`, or a plain list, of which every tensor with two or
    more dimensions counts as a matrix and the others go to the fallback. Convolution kernels of
    shape (out, in, k, k) count as matrices (out, in · k · k). A group with both kinds becomes two
    groups, one with ``use_muon=True`` and one without.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups. A group may have settings of its own; ``use_muon=False`` gives
        all of it to the fallback.
    lr : float or 0-dimensional Tensor ≥ 0, default 0.02
        η.
    momentum : float in [0, 1), default 0.95
        μ.
    nesterov : bool, default True
        Whether the gradient counts once more.
    ns_steps : int ≥ 1, optional
        Steps of the orthogonalizer: by default 5 for "ns5" and 8 for "polar".
    scale : {"none", "fan", "rms"}, default "none"
        s for an m × n matrix: 1 (the theory's), √max(1, m/n), or ``rms`` · √max(m, n), with which
        the root mean square of a step's entries is ``rms`` · η whatever the shape.
    rms : float > 0, default 0.2
        For scale="rms"; 0.2 is about that of AdamW's steps, so that its lr can be kept.
    weight_decay : float ≥ 0, default 0
        λ of the decoupled weight decay, also for the fallback.
    fallback : {"adamw", "lion", "error"}, default "adamw"
        What updates the parameters that are no matrices; "error" refuses them.
    fallback_lr : float or 0-dimensional Tensor ≥ 0, optional
        lr of the fallback's groups, by default ``lr``. A group with ``use_muon=False`` and an lr of
        its own keeps that.
    fallback_betas : pair of floats in [0, 1), default (0.9, 0.95)
        The β of the fallback.
    orthogonalizer : {"ns5", "svd", "polar"}, default "ns5"
        How msign is computed, see `matrix_sign`.
    maximize : bool, default False
        Ascend instead.
    check_finite : bool, default True
        Skip steps whose gradient is not finite. This reads the gradient once more and waits for
        the device.

    Attributes
    ----------
    n_skipped : int
        Steps skipped because a gradient was not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and for complex parameters.
    RuntimeError
        From `step`: for sparse gradients.
    NonFiniteGradientError
        From `step`: after ten gradients in a row that were not finite.

    Notes
    -----
    *Cost.* Per m × n matrix, m ≤ n: 5 (4m²n + 2m³) multiplications and additions, which are most
    of the step, and one buffer of its size. Matrices of equal shape, also transposed, go into one
    batched product. "ns5" and "polar" run in bfloat16 on accelerators and on CPUs that multiply it
    natively, else in float32 (small matrices on a CPU always); float64 matrices in float64. AdamW
    keeps two buffers, Lion one.

    *Sharded.* Parameters of FSDP2 (``DTensor``) work. Their momentum is gathered for the sign,
    a communication of the size of the parameters per step, and every process computes all signs.

    *Compiled.* ``torch.compile(optimizer.step)`` fuses what is entry-wise; products of matrices
    and the fused AdamW stay library calls.

    *Ours.* The paper has no weight decay here; it is that of Muonlight. M is normalized without the
    customary 10⁻⁷, see `matrix_sign`.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026 (the rates).
    K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import Muon, muon_param_groups
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)
    ... )
    >>> optimizer = Muon(muon_param_groups(model), lr=0.05, fallback_lr=0.003)
    >>> x = torch.randn(64, 8)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     loss = (model(x) - x.flip(1)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> bool(loss < 0.05)
    True
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int | None = None,
        scale: Scaling = "none",
        rms: float = 0.2,
        weight_decay: float = 0.0,
        fallback: Fallback = "adamw",
        fallback_lr: float | Tensor | None = None,
        fallback_betas: tuple[float, float] = (0.9, 0.95),
        orthogonalizer: Method = "ns5",
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "scale": scale,
            "rms": rms,
            "weight_decay": weight_decay,
            "fallback": fallback,
            "fallback_lr": fallback_lr,
            "fallback_betas": fallback_betas,
            "orthogonalizer": orthogonalizer,
            "maximize": maximize,
            "check_finite": check_finite,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, or two if it has matrices and others."""
        settings = self.defaults | param_group
        _check_settings(settings)
        given = settings["params"]
        if isinstance(given, set):
            raise TypeError("params must be in order, got a set")
        entries = [given] if isinstance(given, Tensor) else list(given)
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        is_matrix = [settings["use_muon"] and getattr(t, "ndim", 0) >= 2 for t in tensors]
        matrices = [entry for entry, matrix in zip(entries, is_matrix, strict=True) if matrix]
        others = [entry for entry, matrix in zip(entries, is_matrix, strict=True) if not matrix]
        if others and settings["fallback"] == "error":
            raise ValueError(f'fallback="error" takes matrices only, got {_names(others)}')
        if matrices or (settings["use_muon"] and not others):
            super().add_param_group(param_group | {"params": matrices})
            check_real(self)
        if others or not settings["use_muon"]:
            own_lr = "lr" in param_group and not settings["use_muon"]
            fallback_lr = None if own_lr else settings["fallback_lr"]
            lr = settings["lr"] if fallback_lr is None else fallback_lr
            fallback = {"params": others, "lr": lr, "use_muon": False}
            super().add_param_group(param_group | fallback)
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
        rows = rows_of(self, 5)
        if not accept_rows(self, rows):
            return loss
        for group, params, grads, averages, squares, steps in rows:
            if group["use_muon"]:
                for lists in matrix_batches(params, grads, averages):
                    muon_step(group, *lists)
            elif group["fallback"] == "lion":
                for lists in launches(params, grads, averages):
                    lion_step(group, group["fallback_betas"], *lists)
            elif params:
                adamw_step(group, params, grads, averages, squares, steps)
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        by_adamw = not group["use_muon"] and group["fallback"] == "adamw"
        for p in with_gradients(self, group, params, grads):
            averages.append(buffer(self, p, "average"))
            if not by_adamw:
                continue
            squares.append(buffer(self, p, "square"))
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            # A loaded state has its tensors where the file had them.
            state["step"] = state["step"].to(p.device)
            steps.append(state["step"])


class Muonlight(Muon):
    r"""Muon whose steps have AdamW's size, with weight decay: the variant for large models.

    .. math:: W_{t+1} = (1 - \eta \lambda) W_t
              - \eta \cdot 0.2 \sqrt{\max(m, n)} \, \mathrm{msign}(\hat M)

    The root mean square of a step's entries is 0.2 η for every shape, as is usual for AdamW, whose
    learning rate and weight decay therefore fit. It is `Muon` with ``scale="rms"``.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        As for `Muon`, best from `muon_param_groups`.
    lr : float or 0-dimensional Tensor ≥ 0, default 1e-3
        η, also of the fallback.
    momentum : float in [0, 1), default 0.95
        μ.
    nesterov : bool, default True
        Whether the gradient counts once more.
    ns_steps : int ≥ 1, optional
        As for `Muon`.
    rms : float > 0, default 0.2
        Root mean square of the entries of a step, in units of ``lr``.
    weight_decay : float ≥ 0, default 0.1
        λ of the decoupled weight decay, also for the fallback.
    fallback, fallback_lr, fallback_betas, orthogonalizer, maximize, check_finite
        As for `Muon`.

    Notes
    -----
    Errors, cost and sharding are those of `Muon`.

    *Ours.* The paper names the variant; decoupled decay and the matched root mean square are what
    the public code and the literature mean by it.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026.
    J. Liu et al., "Muon is scalable for LLM training", 2025 (the scaling).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import Muonlight
    >>> W = torch.nn.Parameter(torch.zeros(3, 5))
    >>> optimizer = Muonlight([W], lr=0.01, orthogonalizer="svd")
    >>> W.grad = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    >>> optimizer.step()
    >>> round(float(W.detach().square().mean().sqrt()), 6)
    0.002
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int | None = None,
        rms: float = 0.2,
        weight_decay: float = 0.1,
        fallback: Fallback = "adamw",
        fallback_lr: float | Tensor | None = None,
        fallback_betas: tuple[float, float] = (0.9, 0.95),
        orthogonalizer: Method = "ns5",
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            scale="rms",
            rms=rms,
            weight_decay=weight_decay,
            fallback=fallback,
            fallback_lr=fallback_lr,
            fallback_betas=fallback_betas,
            orthogonalizer=orthogonalizer,
            maximize=maximize,
            check_finite=check_finite,
        )


def _check_settings(settings: dict[str, Any]) -> None:
    check_lr(settings["lr"])
    check_number("momentum", settings["momentum"], at_least=0, below=1)
    if settings["ns_steps"] is not None:
        check_integer("ns_steps", settings["ns_steps"], at_least=1)
    check_choice("scale", settings["scale"], ("none", "fan", "rms"))
    check_number("rms", settings["rms"], above=0)
    check_number("weight_decay", settings["weight_decay"], at_least=0)
    check_choice("fallback", settings["fallback"], ("adamw", "lion", "error"))
    if settings["fallback_lr"] is not None:
        check_lr(settings["fallback_lr"])
    check_betas("fallback_betas", settings["fallback_betas"])
    check_choice("orthogonalizer", settings["orthogonalizer"], METHODS)
    for name in ("nesterov", "maximize", "check_finite", "use_muon"):
        check_choice(name, settings[name], (False, True))


def _names(entries: Sequence[Any]) -> str:
    """Return the names of parameters, or their shapes if they have none."""
    return ", ".join(
        entry[0] if isinstance(entry, tuple) else f"a parameter of shape {tuple(entry.shape)}"
        for entry in entries
    )
