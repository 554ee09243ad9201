"""SignSGD, also with momentum (Signum): steps along the sign of the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thalweg.common.checks import check_choice, check_number
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
from thalweg.training.tensor_lists import launches, move, shrink


class SignSGD(torch.optim.Optimizer):
    r"""Descend along the sign of the gradient's moving average.

    .. math:: m_{t+1} = \beta m_t + (1 - \beta) g_t, \qquad
              \theta_{t+1} = (1 - \eta \lambda) \theta_t - \eta \, \mathrm{sign}(m_{t+1})

    with sign(0) = 0. Every entry moves by exactly the step size, whatever the tail of its noise:
    there is nothing to clip and no threshold to tune. With ``momentum=0`` it is SignSGD, which is
    indifferent to tails since it takes the sign *before* any averaging, and needs median-zero noise
    or large batches. With momentum it is Signum, which averages first: less noise where the tails
    are light, and less of an advantage the heavier they are.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have settings of its own.
    lr : float or 0-dimensional Tensor ≥ 0, default 1e-4
        η, the distance that every entry moves: 3 to 10 times smaller than AdamW's. Decrease it
        towards zero; a constant one leaves the entries hopping about the optimum.
    momentum : float in [0, 1), default 0.9
        β; 0 keeps no state at all.
    weight_decay : float ≥ 0, default 0
        λ of the decoupled weight decay, 3 to 10 times larger than AdamW's for the same strength.
    nesterov : bool, default False
        Step along sign(β m + (1 - β) g) with the new m, that is `Lion` with betas (β², β).
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
    *Cost.* One buffer of the size and dtype of the parameters (none with ``momentum=0``), and one
    pass over parameters, gradients and buffer. Compiled, ``torch.compile(optimizer.step)`` with
    ``lr=torch.tensor(...)`` and ``check_finite=False``, a tensor's update is one kernel.

    *Ours.* The paper has no Nesterov variant. As the average weighs gradients by 1 - β, the
    look-ahead does too, and is that of classical momentum up to a positive factor, which the sign
    ignores.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026.
    J. Bernstein et al., "signSGD: Compressed optimisation for non-convex problems", ICML 2018.

    Examples
    --------
    The noise is Cauchy's, which has no mean:

    >>> import torch
    >>> from thalweg.training import SignSGD
    >>> x = torch.nn.Parameter(torch.full((4,), 3.0))
    >>> optimizer = SignSGD([x], lr=0.05, momentum=0.0)
    >>> schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=1000)
    >>> generator = torch.Generator().manual_seed(0)
    >>> for _ in range(1000):
    ...     noise = torch.empty(4).cauchy_(generator=generator)
    ...     optimizer.zero_grad()
    ...     (x.square().sum() / 2 + noise @ x).backward()
    ...     optimizer.step()
    ...     schedule.step()
    >>> bool(x.abs().max() < 0.2)
    True
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "check_finite": check_finite,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        settings = self.defaults | param_group
        check_lr(settings["lr"])
        check_number("momentum", settings["momentum"], at_least=0, below=1)
        check_number("weight_decay", settings["weight_decay"], at_least=0)
        for name in ("nesterov", "maximize", "check_finite"):
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
        rows = rows_of(self, 3)
        if not accept_rows(self, rows):
            return loss
        for group, params, grads, averages in rows:
            if group["momentum"] == 0:
                for alike in launches(params, grads):
                    _step(group, alike[0], torch._foreach_sign(alike[1]))
                continue
            for lists in launches(params, grads, averages):
                _step_with_momentum(group, *lists)
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
    ) -> None:
        held = with_gradients(self, group, params, grads)
        if group["momentum"] != 0:
            averages.extend(buffer(self, p, "average") for p in held)


def _step_with_momentum(
    group: dict[str, Any], params: list[Tensor], grads: list[Tensor], averages: list[Tensor]
) -> None:
    """Update m ← βm + (1-β)g and step along sign(m), or sign(βm + (1-β)g) with Nesterov."""
    beta = group["momentum"]
    torch._foreach_lerp_(averages, grads, 1 - beta)
    ahead = torch._foreach_lerp(averages, grads, 1 - beta) if group["nesterov"] else averages
    _step(group, params, torch._foreach_sign(ahead))


def _step(group: dict[str, Any], params: list[Tensor], signs: Sequence[Tensor]) -> None:
    """Update θ ← (1-ηλ)θ - η sign, or with +η to maximize."""
    lr = group["lr"]
    shrink(params, lr, group["weight_decay"])
    move(params, list(signs), lr if group["maximize"] else -lr)
