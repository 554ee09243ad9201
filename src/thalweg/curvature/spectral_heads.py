"""From the network's numbers to the recurrences of polynomials, in batches."""

from __future__ import annotations

from thalweg.common.optional import requires
from thalweg.curvature.spectral_recurrences import chebyshev_rows
from thalweg.curvature.spectral_tasks import FUNCTIONS

with requires("curvature"):
    import torch
    from torch import Tensor

# Points of each of the two grids at which the expansion of a function is fitted.
GRID = 48
# The network's output is the logarithm of a weight, divided by this.
LOG_WEIGHT = 4.0
SMALLEST_WEIGHT = 1e-6


def head_size(form: str, task: str, degree: int) -> int:
    """Return how many numbers the network has to emit."""
    if form == "recurrence":
        return 4 * (degree + 1)
    return 2 * GRID if task in FUNCTIONS else degree + 1


def recurrence_rows(output: Tensor, degree: int) -> Tensor:
    """Return (B, degree + 1, 4): the output, added to Chebyshev's recurrence, whose P is 1."""
    start = torch.as_tensor(chebyshev_rows(degree)).to(output)
    return start + output.reshape(*output.shape[:-1], degree + 1, 4)


def expansion_rows(
    output: Tensor, degree: int, task: str, low: Tensor, cut: Tensor, lam_max: Tensor
) -> Tensor:
    """Return (B, degree + 1, 4): expansions in Chebyshev polynomials.

    Those of a preconditioner and of a filter are Chebyshev's own, corrected by the output; those of
    a function are fitted with weights from the output.
    """
    if task == "filter":
        # On the part of the spectrum that is to be damped.
        last = torch.zeros_like(output)
        last[..., -1] = 1.0
        return torch.cat([_chebyshev_recurrences(cut, degree), (last + output)[..., None]], -1)
    if task == "precond":
        coefficients = _interpolant_of_inverse(low, degree) * (1 + output)
    else:
        coefficients = fitted_coefficients(output, degree, task, low, lam_max)
    return torch.cat([_chebyshev_recurrences(low, degree), coefficients[..., None]], -1)


def _interpolant_of_inverse(low: Tensor, degree: int) -> Tensor:
    """Return the coefficients (B, degree + 1) of 1 / x, interpolated on ``[low, 1]``."""
    index = torch.arange(degree + 1, dtype=low.dtype, device=low.device)
    angles = torch.pi * (index + 0.5) / (degree + 1)
    values = 1 / (low[:, None] + (1 - low[:, None]) * (1 + torch.cos(angles)) / 2)
    coefficients = values @ torch.cos(angles[:, None] * index) * 2 / (degree + 1)
    return coefficients * torch.where(index == 0, 0.5, 1.0)


def fitted_coefficients(
    output: Tensor, degree: int, task: str, low: Tensor, lam_max: Tensor
) -> Tensor:
    r"""Return the coefficients (B, degree + 1) of a weighted least-squares fit on ``[low, 1]``.

    The output is the logarithm of the weights, at points of which half lie as Chebyshev's do and
    half evenly in the logarithm. O(GRID degree^2) each, by QR.
    """
    points = fitting_points(low)
    weights = torch.exp(LOG_WEIGHT * (output - output.amax(-1, keepdim=True)))
    weights = weights.clamp_min(SMALLEST_WEIGHT)
    q, r = torch.linalg.qr(weights[..., None] * chebyshev_basis(points, low, degree))
    target = FUNCTIONS[task](points, lam_max[:, None])
    right = q.mT @ (weights * target)[..., None]
    solution: Tensor = torch.linalg.solve_triangular(r, right, upper=True)
    return solution[..., 0]


def fitting_points(low: Tensor) -> Tensor:
    """Return the points (B, 2 GRID) at which expansions are fitted, ascending."""
    index = torch.arange(GRID, dtype=low.dtype, device=low.device)
    cosine = (1 - torch.cos(torch.pi * (index + 0.5) / GRID)) / 2
    low = low[:, None]
    even_in_log = low ** (1 - index / (GRID - 1))
    return torch.cat([low + (1 - low) * cosine, even_in_log], -1).sort(-1).values


def chebyshev_basis(points: Tensor, low: Tensor, degree: int) -> Tensor:
    """Return the Chebyshev polynomials of ``[low, 1]`` at ``points``: (B, n, degree + 1)."""
    t = (2 * points - 1 - low[:, None]) / (1 - low[:, None])
    columns = [torch.ones_like(t), t]
    for _ in range(degree - 1):
        columns.append(2 * t * columns[-1] - columns[-2])
    return torch.stack(columns[: degree + 1], -1)


def _chebyshev_recurrences(low: Tensor, degree: int) -> Tensor:
    """Return a, b and c of the Chebyshev polynomials of ``[low, 1]``: (B, degree + 1, 3)."""
    a, b = 2 / (1 - low), -(1 + low) / (1 - low)
    later = torch.stack([2 * a, 2 * b, torch.ones_like(low)], -1)
    first = torch.stack([a, b, torch.zeros_like(low)], -1)
    return torch.stack([first] + [later] * degree, -2)
