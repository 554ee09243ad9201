"""Which gradients torch optimizers take: dense and finite ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

MAX_NONFINITE_IN_A_ROW = 10


class NonFiniteGradientError(RuntimeError):
    """Many gradients in a row held NaN or infinity."""


class SkipsNonFinite(Protocol):
    """An optimizer that counts the gradients it has skipped."""

    n_skipped: int
    nonfinite_in_a_row: int


def value_of(closure: Callable[[], Any] | None) -> Any:
    """Return the value of a step's closure, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_dense(optimizer: object, grad: Tensor) -> Tensor:
    """Return ``grad``; a sparse one raises `RuntimeError`."""
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"{type(optimizer).__name__} does not support sparse gradients, got {grad.layout}; "
            "use sparse=False in the layer"
        )
    return grad


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of one that is sharded over processes (a ``DTensor``)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def count_nonfinite(optimizer: SkipsNonFinite, *, finite: bool, lower: str = "lr") -> bool:
    """Return ``finite``, whether a step is to be made; count those that are skipped.

    Raises
    ------
    NonFiniteGradientError
        At the tenth in a row that is not finite; it advises to lower what ``lower`` names.
    """
    if finite:
        optimizer.nonfinite_in_a_row = 0
        return True
    optimizer.n_skipped += 1
    optimizer.nonfinite_in_a_row += 1
    refuse_a_long_series(optimizer.nonfinite_in_a_row, lower)
    return False


def refuse_a_long_series(nonfinite_in_a_row: int, lower: str = "lr") -> None:
    """Raise `NonFiniteGradientError` at the tenth gradient in a row that was not finite."""
    if nonfinite_in_a_row >= MAX_NONFINITE_IN_A_ROW:
        raise NonFiniteGradientError(
            f"{nonfinite_in_a_row} gradients in a row were not finite and have been skipped; "
            f"lower {lower}, or check the loss"
        )
