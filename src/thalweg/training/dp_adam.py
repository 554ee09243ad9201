"""DP-Adam: Adam for private gradients, with the noise subtracted from the second moment."""

from __future__ import annotations

import math
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
from thalweg.training.lion import check_betas
from thalweg.training.tensor_lists import launches, move, shrink

# The second moment of noise of variance τ² is τ² itself up to an error that falls from 30 % at 20
# steps to 3 % in the long run.
DEFAULT_FLOOR = 0.1


class DPAdam(torch.optim.Optimizer):
    r"""Adam whose second moment is debiased by the variance of the noise.

    .. math::
        m_t = \beta_1 m_{t-1} + (1 - \beta_1) g_t, \qquad
        v_t = \beta_2 v_{t-1} + (1 - \beta_2) g_t^2, \qquad
        \theta_t = (1 - \eta \lambda) \theta_{t-1} - \eta \,
        \frac{\hat m_t}{\sqrt{\max(\hat v_t - \tau^2, \gamma \tau^2)} + \epsilon}

    with :math:`\hat m_t = m_t / (1 - \beta_1^t)` and :math:`\hat v_t = v_t / (1 - \beta_2^t)`. The
    noise of a private gradient adds τ² to the mean square of every coordinate, so that Adam
    divides all of them by about τ; with τ² subtracted the signal decides again. Where the signal is
    far below the noise, it is the floor γτ² that decides, and the steps are 1/√γ times Adam's.

    Give it the groups of ``dp_mup_param_groups(optimizer="adam", debias_v=True)``, which hold τ.
    With ``noise_std=0`` it is `torch.optim.AdamW`.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have settings of its own.
    lr : float or 0-dimensional Tensor ≥ 0, default 1e-3
        η.
    betas : pair of floats in [0, 1), default (0.9, 0.999)
    noise_std : float ≥ 0, default 0
        τ = σC/B, the standard deviation of the noise on each coordinate of the gradient.
    floor : float in (0, 1], default 0.1
        γ.
    eps : float > 0, default 1e-8
    weight_decay : float ≥ 0, default 0
        λ of the decoupled weight decay.
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
    *Cost.* Adam's: two buffers of the size and dtype of the parameters, and one pass over all.

    *Ours.* Not in the paper, which keeps the noise in the second moment. The floor is relative to
    τ², so that the rule does not depend on the unit of the gradient.

    References
    ----------
    Q. Tang, F. Shpilevskiy, M. Lécuyer, "DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You
    Apply Bias Correction)", AAAI 2024.

    Examples
    --------
    Two coordinates with equal signs and very different sizes, under noise that hides the smaller:

    >>> import torch
    >>> from thalweg.training import DPAdam
    >>> def moved(noise_std):
    ...     x = torch.nn.Parameter(torch.zeros(2))
    ...     optimizer = DPAdam([x], lr=0.01, noise_std=noise_std)
    ...     generator = torch.Generator().manual_seed(0)
    ...     for _ in range(300):
    ...         x.grad = torch.tensor([-1.0, -0.5]) + torch.randn(2, generator=generator)
    ...         optimizer.step()
    ...     return [round(float(entry), 1) for entry in x.detach()]
    >>> moved(noise_std=0.0), moved(noise_std=1.0)
    ([2.0, 1.3], [2.7, 4.0])
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        noise_std: float = 0.0,
        floor: float = DEFAULT_FLOOR,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "noise_std": noise_std,
            "floor": floor,
            "eps": eps,
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
        check_number("noise_std", settings["noise_std"], at_least=0)
        check_number("floor", settings["floor"], above=0, at_most=1)
        check_number("eps", settings["eps"], above=0)
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
        rows = rows_of(self, 5)
        if not accept_rows(self, rows):
            return loss
        for group, *lists in rows:
            for alike in launches(*lists):
                _step(group, *alike)
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
        for p in with_gradients(self, group, params, grads):
            averages.append(buffer(self, p, "average"))
            squares.append(buffer(self, p, "square"))
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            # A loaded state has its tensors where the file had them.
            state["step"] = state["step"].to(p.device)
            steps.append(state["step"])


def _step(
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Make the step of the class's formula."""
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, 1)
    torch._foreach_lerp_(averages, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    shrink(params, group["lr"], group["weight_decay"])
    noise = group["noise_std"] ** 2
    directions = []
    for average, square, step in zip(averages, squares, steps, strict=True):
        second_moment = square / _weight_of(beta2, step).to(square.dtype)
        root = second_moment.sub_(noise).clamp_(min=group["floor"] * noise).sqrt_()
        mean = average / _weight_of(beta1, step).to(average.dtype)
        directions.append(mean.div_(root.add_(group["eps"])))
    move(params, directions, group["lr"] if group["maximize"] else -group["lr"])


def _weight_of(beta: float, step: Tensor) -> Tensor:
    """Return 1 - βᵗ, to the precision of float32 also where β is nearly 1."""
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)
