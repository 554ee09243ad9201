"""What optimizers of the family ask of the gradients of torch parameters."""

from __future__ import annotations

import math
from typing import Any

from thalweg.common.optional import requires
from thalweg.common.torch_gradients import check_dense, count_nonfinite, whole

with requires("convex"):
    import torch
    from torch import Tensor

# The CPU kernel adds the squares of a float32 tensor one after the other, with a relative error of
# 1e-3 at 10⁷ entries, and 1e-6 at LONG; in rows the error is 1e-8, at no cost.
LONG = 2**17
ROW = 2**13


def dense_gradient(optimizer: object, p: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one; a sparse one raises `RuntimeError`."""
    assert p.grad is not None
    return check_dense(optimizer, p.grad)


def squared_norm(tensors: list[Tensor]) -> Tensor:
    """Return the sum of all squares, 0-dimensional, float64, on the device of the tensors."""
    return sum_of_squares([part for tensor in tensors for part in norms_of(tensor)])


def sum_of_squares(norms: list[Tensor]) -> Tensor:
    """Return the sum of the squares of 0- or 1-dimensional tensors, in float64."""
    return torch.cat([norm.reshape(-1) for norm in norms]).double().square().sum()


def norms_of(tensor: Tensor) -> list[Tensor]:
    """Return norms of a tensor, or of its parts."""
    if tensor.device.type != "cpu" or tensor.numel() <= LONG or hasattr(tensor, "full_tensor"):
        return [whole(torch.linalg.vector_norm(tensor))]
    flat = tensor.reshape(-1)
    rows = flat.numel() // ROW * ROW
    return [
        torch.linalg.vector_norm(flat[:rows].view(-1, ROW), dim=1),
        torch.linalg.vector_norm(flat[rows:]),
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def accept(optimizer: Any, grads: list[Tensor]) -> bool:
    """Return whether the gradients are finite; count those that are not.

    Raises
    ------
    NonFiniteGradientError
        At the tenth in a row that is not finite.
    """
    finite = all(math.isfinite(float(whole(grad.sum()))) for grad in grads)
    # A sum of finite entries can overflow.
    finite = finite or all(bool(whole(grad.isfinite().all())) for grad in grads)
    return count_nonfinite(optimizer, finite=finite, lower="D")
