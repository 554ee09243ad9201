"""The measurement of the Kalman filters of `KoalaPP` and `Koala`: the loss and its variance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
    from torch import distributed as dist

from thalweg.common.torch_gradients import SkipsNonFinite, whole
from thalweg.training.gradients import accept, check_lr
from thalweg.training.tensor_blocks import scalar_dtype

Variance = float | Callable[[Tensor, Tensor], Any] | None


class Measurement(NamedTuple):
    """A minibatch's loss and the mean square of its samples' losses, 0-dim tensors."""

    loss: Tensor
    loss_sq: Tensor


class KalmanOptimizer(SkipsNonFinite, Protocol):
    """An optimizer that warns once of a loss below its target."""

    _warned_of_negative: bool


def check_kalman_settings(settings: dict[str, Any]) -> None:
    """Check the settings that all filters have.

    Raises
    ------
    TypeError, ValueError
        If one is not as described in `KoalaPP`.
    """
    check_lr(settings["lr"])
    sigma = check_number("sigma", settings["sigma"], at_least=0)
    if check_number("q", settings["q"], at_least=0) == sigma == 0:
        raise ValueError("sigma and q must not both be 0: no motion would be possible")
    if settings["r"] is not None and not callable(settings["r"]):
        check_number("r", settings["r"], above=0)
    check_number("alpha_r", settings["alpha_r"], at_least=0, below=1)
    check_number("weight_decay", settings["weight_decay"], at_least=0)
    check_choice("scope", settings["scope"], ("tensor", "group"))
    check_number("target_loss", settings["target_loss"])
    check_number("eps", settings["eps"], above=0)
    check_choice("check_finite", settings["check_finite"], (False, True))


def measure(
    name: str, loss: Any, loss_sq: Any, device: torch.device, pool_replicas: bool
) -> Measurement:
    """Return the measurement on ``device``, averaged over replicas if wanted.

    Raises
    ------
    RuntimeError
        If there is no loss, or a value is no scalar.
    """
    if loss is None:
        raise RuntimeError(f"{name} needs the loss value: pass loss= or a closure")
    value = _scalar("loss", loss, device)
    square = None if loss_sq is None else _scalar("loss_sq", loss_sq, device)
    if pool_replicas and dist.is_available() and dist.is_initialized():
        value = _mean_of_replicas(value)
        square = None if square is None else _mean_of_replicas(square)
    return Measurement(value, value.square() if square is None else square)


def _scalar(name: str, value: Any, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_complex():
            raise RuntimeError(
                f"{name} must be a real scalar, got a tensor of shape {tuple(value.shape)}, "
                f"{value.dtype}"
            )
        scalar: Tensor = whole(value.detach()).reshape(())
        return scalar.to(device, scalar_dtype(device))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RuntimeError(f"{name} must be a real scalar, got {type(value).__name__}")
    return torch.tensor(float(value), dtype=scalar_dtype(device), device=device)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _mean_of_replicas(value: Tensor) -> Tensor:
    mean: Tensor = value / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def variance(group: dict[str, Any], average: Tensor, measured: Measurement) -> Tensor:
    """Return R: the running average of squared losses, or what ``r`` says."""
    r = group["r"]
    if r is None:
        return average.lerp(measured.loss_sq.to(average.device), 1 - group["alpha_r"])
    if callable(r):
        r = r(*measured)
    if isinstance(r, Tensor):
        return torch.zeros_like(average) + r.detach().to(average)
    return torch.full_like(average, check_number("r", r, above=0))


def innovation(group: dict[str, Any], loss: Tensor, squared_params: Tensor) -> Tensor:
    """Return L + λ/2 ‖θ‖² - L*, the loss that a filter has to explain."""
    penalty = squared_params * (group["weight_decay"] / 2)
    return torch.add(loss.to(squared_params.device), penalty).sub_(group["target_loss"])


def with_penalty(weight_decay: float, params: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return the gradients of the penalized loss, g + λθ."""
    if weight_decay == 0:
        return grads
    return list(torch._foreach_add(grads, params, alpha=weight_decay))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def accept_measurement(
    optimizer: KalmanOptimizer,
    measured: Measurement,
    rows: list[tuple[dict[str, Any], list[Tensor], Tensor, Tensor]],
) -> Literal["use", "skip", "overflow"]:
    """Return whether loss and gradients are finite; count those that are not. One wait.

    "overflow" means that they are, but that the inner products of gradients and state are not.

    Parameters
    ----------
    optimizer : KoalaPP or Koala
    measured : Measurement
    rows : list of (group, gradients, their inner products, R)

    Raises
    ------
    NonFiniteGradientError
        At the tenth measurement in a row that is not finite.
    ValueError
        If a callable r returned a value that is not positive.

    Warns
    -----
    UserWarning
        Once, if the loss is below ``target_loss``.
    """
    loss = measured.loss
    total = sum((dots.sum().to(loss.device) for _, _, dots, _ in rows), torch.zeros_like(loss))
    least = torch.stack([R.min().to(loss.device) for _, _, _, R in rows]).min()
    products, value, square, R = torch.stack([total, *measured, least]).tolist()
    if math.isfinite(value) and math.isfinite(square) and not R > 0:
        raise ValueError(f"r must return numbers > 0, loss_sq must be >= 0; R would be {R}")
    if math.isfinite(products) and math.isfinite(value) and math.isfinite(square):
        optimizer.nonfinite_in_a_row = 0
    elif not accept(optimizer, [*measured, *(grad for _, grads, _, _ in rows for grad in grads)]):
        return "skip"
    target = max(group["target_loss"] for group, _, _, _ in rows)
    if value < target and not optimizer._warned_of_negative:
        optimizer._warned_of_negative = True
        warnings.warn(
            f"the loss {value:.3g} is below target_loss={target:g}: such a step moves uphill; "
            "lower target_loss to what the loss can reach",
            UserWarning,
            stacklevel=2,
        )
    return "use" if math.isfinite(products) else "overflow"


def is_only_an_initialization(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether all gradients are zero, as when distributed checkpoints create the state."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    held = [grad for grad in grads if grad is not None]
    return bool(held) and not any(bool(whole(grad).any()) for grad in held)
