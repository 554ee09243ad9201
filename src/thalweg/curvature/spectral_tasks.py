"""What a learned polynomial is for: its target, its classical rival and its loss on a spectrum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.curvature.spectral_recurrences import (
    RecurrenceCoefficients,
    chebyshev_filter,
    chebyshev_interpolant,
    chebyshev_inverse,
    evaluate,
)

with requires("curvature"):
    import torch
    from torch import Tensor
    from torch.nn import functional

Values = NDArray[np.float64]

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "inv": lambda x, _: 1 / x,
    "invsqrt": lambda x, _: x**-0.5,
    "sqrt": lambda x, _: x**0.5,
    "log": lambda x, _: _numerics(x).log(x),
    "exp": lambda x, scale: _numerics(x).exp(-x * scale),
}
"""Target at x, the eigenvalues of A / scale, for an A whose largest eigenvalue is ``scale``."""

TASKS = ("precond", *FUNCTIONS, "filter")
# A polynomial is checked up to this multiple of lam_max, which is an estimate.
BEYOND = 1.02
# The smallest x P(x), where its mean is 1, that counts as positive.
POSITIVE = 1e-3
# Exponent of the power means that stand for the largest and the smallest value.
SHARPNESS = 30.0
# A mean squared error below which nothing is gained.
ACCURATE = 1e-20
# How many times Chebyshev's largest error a learned polynomial may have for free, in training.
FREE_ERROR = 3.0


def _numerics(x: Any) -> Any:
    return torch if isinstance(x, Tensor) else np


def original_recurrence(
    task: str, scaled: RecurrenceCoefficients, lam_max: float
) -> RecurrenceCoefficients:
    """Return the recurrence of f(A) in A itself, from that of f(A / lam_max) in A / lam_max."""
    powers = {"precond": -1.0, "inv": -1.0, "invsqrt": -0.5, "sqrt": 0.5}
    rows = scaled.stretched(lam_max).scaled(lam_max ** powers.get(task, 0.0)).rows
    if task == "log":
        rows[0, 3] += np.log(lam_max)
    return RecurrenceCoefficients(rows)


@dataclass(frozen=True)
class ScaledInterval:
    """Where the spectrum of A / lam_max lies.

    Attributes
    ----------
    low : float
        Lower end; the upper one is 1.
    cut : float or None
        Where the unwanted part of the spectrum begins, for ``task="filter"``.
    lam_max : float
        What A was divided by.
    """

    low: float
    cut: float | None
    lam_max: float


def classical_rows(task: str, degree: int, interval: ScaledInterval) -> Values:
    """Return the recurrence of Chebyshev's polynomial for the task, which knows the interval alone.

    For A / lam_max, as everything here.
    """
    if task == "filter":
        if interval.cut is None:
            raise ValueError("cut must be given for task='filter': where the unwanted part begins")
        return chebyshev_filter(degree, interval.cut)
    if task == "precond":
        return chebyshev_inverse(degree, interval.low)
    function = FUNCTIONS[check_choice("task", task, TASKS)]
    return chebyshev_interpolant(lambda x: function(x, interval.lam_max), degree, interval.low)


def chebyshev_recurrence(
    task: str, degree: int, *, low: float, high: float, cut: float | None = None
) -> RecurrenceCoefficients:
    """Return Chebyshev's polynomial for a task of `AutoSpec`, which knows an interval alone.

    Parameters
    ----------
    task : {"precond", "inv", "invsqrt", "sqrt", "log", "exp", "filter"}
        The residual polynomial of the Chebyshev iteration for a preconditioner, interpolation in
        Chebyshev's points for a function, the polynomial bounded on ``[cut, high]`` for a filter.
    degree : int
    low, high : float
        Interval of the spectrum.
    cut : float, optional
        For a filter.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range, or a filter has no cut.

    Examples
    --------
    >>> import numpy as np
    >>> P = chebyshev_recurrence("sqrt", 8, low=0.5, high=2.0)
    >>> P(np.array([1.0, 2.0])).round(4)
    array([1.    , 1.4142])
    """
    check_choice("task", task, TASKS)
    check_integer("degree", degree, at_least=1)
    check_number("low", low, above=0)
    check_number("high", high, above=low)
    scaled_cut = None if cut is None else check_number("cut", cut, above=0, below=high) / high
    interval = ScaledInterval(low / high, scaled_cut, high)
    rows = classical_rows(task, degree, interval)
    return original_recurrence(task, RecurrenceCoefficients(rows), high)


def condition_loss(rows: Tensor, points: Tensor, masses: Tensor, below: Tensor) -> Tensor:
    """Return the smooth logarithm of the condition number of A P(A), and a price of negative P.

    ``points`` (B, n) of positive ``masses`` are eigenvalues; the rest lies in gaps, where P need
    only be positive, as it must be at ``below`` (B, g), between 0 and the spectrum, for the
    smallest eigenvalue may be smaller than the probe says.
    """
    y = points * evaluate(rows, points)
    weights = _even_weights(masses > 0)
    # The scale of P is free: it is that at which y is 1 on average.
    scale = (y * weights).sum(-1, keepdim=True)
    scale = scale.abs().clamp_min(1e-6) * torch.where(scale < 0, -1.0, 1.0)
    y = y / scale
    floored = functional.softplus(50 * y) / 50 + 1e-6
    log_high = _log_power_mean(floored, weights)
    log_low = -_log_power_mean(1 / floored, weights)
    lowest = evaluate(rows, below) / scale * points[..., :1]
    # Bounded, since the scale may vanish on the way.
    negative = sum(functional.relu(POSITIVE - part).tanh().mean(-1) for part in (y, lowest))
    return (log_high - log_low + 10 * negative).mean()


def function_loss(
    rows: Tensor, points: Tensor, masses: Tensor, target: Tensor, rival: Tensor
) -> Tensor:
    """Return the logarithm of the mean squared error of P(A) b for a Gaussian b, relative.

    An error in the worst point of the interval, gaps included, that is well above ``rival`` (B,),
    Chebyshev's, costs as much.
    """
    error = evaluate(rows, points) - target
    mean_square = (masses * error.square()).sum(-1) / (masses * target.square()).sum(-1)
    largest = largest_error(error, target)
    return (
        (mean_square + ACCURATE).log() + 2 * functional.relu((largest / rival / FREE_ERROR).log())
    ).mean()


def largest_error(error: Any, target: Any) -> Any:
    """Return the largest error relative to the target, or to a hundredth of the largest target."""
    library = _numerics(error)
    size = library.abs(target)
    floor = library.amax(size, -1)[..., None] / 100
    return library.amax(library.abs(error) / library.maximum(size, floor), -1)


def filter_loss(rows: Tensor, points: Tensor, masses: Tensor, cut: Tensor) -> Tensor:
    """Return the logarithm of the largest unwanted value over the wanted ones' geometric mean.

    The smallest wanted one would be that of the pair next to the cut, and all that counts.
    """
    size = evaluate(rows, points).square() + 1e-30
    below = points < cut[:, None]
    high = _log_power_mean(size, _even_weights((masses > 0) & ~below))
    kept = (_even_weights((masses > 0) & below) * size.log()).sum(-1)
    return ((high - kept) / 2).mean()


def _even_weights(present: Tensor) -> Tensor:
    """Return equal weights of the points that are present, which sum to 1."""
    return present / present.sum(-1, keepdim=True)


def _log_power_mean(values: Tensor, weights: Tensor) -> Tensor:
    terms = SHARPNESS * values.log() + weights.log()
    return torch.logsumexp(terms, -1) / SHARPNESS
