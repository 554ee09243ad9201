"""Least squares with an exact solution and inputs that share a direction."""

from __future__ import annotations

from typing import NamedTuple

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor


class InterpolatedRegression(NamedTuple):
    """Targets that linear weights meet exactly.

    Attributes
    ----------
    inputs : Tensor of shape (rows, dim), float64
    targets : Tensor of shape (rows,), float64
    """

    inputs: Tensor
    targets: Tensor

    def loss(self, weights: Tensor) -> float:
        """Return ½ mean (x·w - y)² over all rows."""
        return float((self.inputs @ weights - self.targets).square().mean()) / 2

    def measure(
        self, weights: Tensor, batch: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return loss (0-dim) and gradient (dim,) of ``batch`` rows, drawn with replacement."""
        rows = torch.randint(len(self.targets), (batch,), generator=generator)
        inputs = self.inputs[rows]
        errors = inputs @ weights - self.targets[rows]
        return errors.square().mean() / 2, errors @ inputs / batch


def interpolated_regression(
    generator: torch.Generator, *, dim: int = 30, rows: int = 200, alignment: float = 3.0
) -> InterpolatedRegression:
    """Return x = alignment · u + z/√dim with a common unit vector u and Gaussian z, y = x·w*.

    With ``alignment=0`` the inputs are isotropic; otherwise the Hessian has one eigenvalue that
    is about ``dim · alignment²`` times the others, and all gradients lean on its direction.

    Examples
    --------
    >>> import torch
    >>> problem = interpolated_regression(torch.Generator().manual_seed(0))
    >>> problem.loss(torch.zeros(30, dtype=torch.float64)) > 0.1
    True
    """
    check_integer("dim", dim, at_least=1)
    check_integer("rows", rows, at_least=1)
    check_number("alignment", alignment, at_least=0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    direction = torch.nn.functional.normalize(normal(dim), dim=0)
    inputs = alignment * direction + normal(rows, dim) / dim**0.5
    return InterpolatedRegression(inputs, inputs @ normal(dim))
