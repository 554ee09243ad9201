"""Lion: steps along the sign of an interpolation between momentum and gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


class Lion(torch.optim.Optimizer):
    r"""Descend along the sign of momentum and gradient, mixed by one β and averaged by another.

    .. math::
        \theta_{t+1} &= (1 - \eta \lambda) \theta_t
                        - \eta \, \mathrm{sign}(\beta_1 m_t + (1 - \beta_1) g_t) \\
        m_{t+1} &= \beta_2 m_t + (1 - \beta_2) g_t

    with sign(0) = 0. Every entry moves by exactly the step size, so no outlier among the gradients
    needs clipping; but it stays in the average for 1/(1 - β₂) steps. With β₁ = β₂ it is `SignSGD`
    with momentum, with β₁ = β₂² also that with ``nesterov=True``.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have settings of its own.
    lr : float or 0-dimensional Tensor ≥ 0, default 1e-4
        η, the distance that every entry moves: 3 to 10 times smaller than AdamW's.
    betas : pair of floats in [0, 1), default (0.9, 0.99)
        β₁ and β₂. The paper's experiments use (0.9, 0.95).
    weight_decay : float ≥ 0, default 0
        λ of the decoupled weight decay, 3 to 10 times larger than AdamW's for the same strength.
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
    *Cost.* One buffer of the size and dtype of the parameters, half of AdamW's, and one pass over
    parameters, gradients and buffer. Compiled, ``torch.compile(optimizer.step)`` with
    ``lr=torch.tensor(...)`` and ``check_finite=False``, a tensor's update is one kernel.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026 (the rates).
    X. Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023 (Lion).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import Lion
    >>> x = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    >>> optimizer = Lion([x], lr=0.1, betas=(0.9, 0.95))
    >>> for _ in range(25):
    ...     optimizer.zero_grad()
    ...     (x - 1).square().sum().backward()
    ...     optimizer.step()
    >>> [round(value, 4) for value in x.tolist()]
    [0.5, 0.5]
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "check_finite": check_finite,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        settings = self.defaults | param_group
        check_lr(settings["lr"])
        check_betas("betas", settings["betas"])
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
        rows = rows_of(self, 3)
        if not accept_rows(self, rows):
            return loss
        for group, *lists in rows:
            for params, grads, averages in launches(*lists):
                lion_step(group, group["betas"], params, grads, averages)
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
        averages.extend(buffer(self, p, "average") for p in held)


def check_betas(name: str, betas: Any) -> None:
    """Refuse what is not a pair of numbers in [0, 1).

    Raises
    ------
    TypeError, ValueError
        If it is not.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"{name} must be a pair of numbers, got {betas!r}")
    for i, beta in enumerate(betas):
        check_number(f"{name}[{i}]", beta, at_least=0, below=1)


def lion_step(
    group: dict[str, Any],
    betas: tuple[float, float],
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
) -> None:
    """Update θ ← (1-ηλ)θ - η sign(β₁m + (1-β₁)g);  m ← β₂m + (1-β₂)g."""
    lr = group["lr"]
    directions = list(torch._foreach_lerp(averages, grads, 1 - betas[0]))
    torch._foreach_sign_(directions)
    shrink(params, lr, group["weight_decay"])
    move(params, directions, lr if group["maximize"] else -lr)
    torch._foreach_lerp_(averages, grads, 1 - betas[1])
