"""Classic functions with many local minima, their gradients, and where to start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice

Array = NDArray[np.float64]
SMOOTHING = 1e-6


@dataclass(frozen=True)
class Multimodal:
    """A function on points of shape (…, n), with minimum 0.

    Attributes
    ----------
    name : str
    fun : callable
        Points (…, n) to values (…).
    jac : callable
        Points (…, n) to gradients (…, n).
    half_width : float
        Starts are drawn from [-half_width, half_width]ⁿ.
    minimizer : float
        Every coordinate of the global minimizer.
    """

    name: str
    fun: Callable[[Array], Array]
    jac: Callable[[Array], Array]
    half_width: float
    minimizer: float = 0.0

    def starts(self, n_starts: int, n: int, rng: np.random.Generator) -> Array:
        """Return uniform starts of shape (n_starts, n)."""
        return rng.uniform(-self.half_width, self.half_width, (n_starts, n))


def soft_rastrigin(amplitude: float = 1.5) -> Multimodal:
    """Return Σ x²/2 + A(1 - cos 2πx)/2π, whose wells are one apart.

    With A = 1.5 the barrier between the well at x = 0.898 and the global one is 0.16693 high.
    """

    def fun(x: Array) -> Array:
        ripple = amplitude / (2 * np.pi) * (1 - np.cos(2 * np.pi * x))
        return np.asarray((x**2 / 2 + ripple).sum(axis=-1))

    def jac(x: Array) -> Array:
        return np.asarray(x + amplitude * np.sin(2 * np.pi * x))

    return Multimodal("soft Rastrigin", fun, jac, 5.0)


def multimodal(name: str) -> Multimodal:
    """Return one of the functions "rastrigin", "ackley", "griewank" and "levy".

    Ackley's cusp at the minimum is smoothed: ‖x‖ becomes √(‖x‖² + 10⁻⁶ n) - √(10⁻⁶ n).

    Examples
    --------
    >>> import numpy as np
    >>> function = multimodal("levy")
    >>> bool(function.fun(np.ones(5)) < 1e-12)
    True
    """
    functions = {
        "rastrigin": Multimodal("rastrigin", _rastrigin, _rastrigin_jac, 5.12),
        "ackley": Multimodal("ackley", _ackley, _ackley_jac, 10.0),
        "griewank": Multimodal("griewank", _griewank, _griewank_jac, 50.0),
        "levy": Multimodal("levy", _levy, _levy_jac, 10.0, 1.0),
    }
    return functions[check_choice("name", name, tuple(functions))]


def _rastrigin(x: Array) -> Array:
    return np.asarray((x**2 + 10 * (1 - np.cos(2 * np.pi * x))).sum(axis=-1))


def _rastrigin_jac(x: Array) -> Array:
    return np.asarray(2 * x + 20 * np.pi * np.sin(2 * np.pi * x))


def _ackley(x: Array) -> Array:
    root = np.sqrt((x**2).mean(axis=-1) + SMOOTHING) - np.sqrt(SMOOTHING)
    cosines = np.cos(2 * np.pi * x).mean(axis=-1)
    return np.asarray(20 * -np.expm1(-0.2 * root) + np.e - np.exp(cosines))


def _ackley_jac(x: Array) -> Array:
    n = x.shape[-1]
    root = np.sqrt((x**2).mean(axis=-1, keepdims=True) + SMOOTHING)
    cosines = np.cos(2 * np.pi * x).mean(axis=-1, keepdims=True)
    bowl = 4 * np.exp(-0.2 * (root - np.sqrt(SMOOTHING))) * x / (n * root)
    return np.asarray(bowl + 2 * np.pi / n * np.sin(2 * np.pi * x) * np.exp(cosines))


def _griewank(x: Array) -> Array:
    index = np.sqrt(np.arange(1, x.shape[-1] + 1))
    return np.asarray((x**2).sum(axis=-1) / 4000 + 1 - np.cos(x / index).prod(axis=-1))


def _griewank_jac(x: Array) -> Array:
    n = x.shape[-1]
    index = np.sqrt(np.arange(1, n + 1))
    cosines = np.cos(x / index)
    # The product of all others: a division would fail where a cosine is 0.
    others = np.stack([np.delete(cosines, i, axis=-1).prod(axis=-1) for i in range(n)], axis=-1)
    return np.asarray(x / 2000 + np.sin(x / index) / index * others)


def _levy(x: Array) -> Array:
    w = 1 + (x - 1) / 4
    first = np.sin(np.pi * w[..., 0]) ** 2
    inner = (w[..., :-1] - 1) ** 2 * (1 + 10 * np.sin(np.pi * w[..., :-1] + 1) ** 2)
    last = (w[..., -1] - 1) ** 2 * (1 + np.sin(2 * np.pi * w[..., -1]) ** 2)
    return np.asarray(first + inner.sum(axis=-1) + last)


def _levy_jac(x: Array) -> Array:
    w = 1 + (x - 1) / 4
    shifted, phase = w - 1, np.pi * w + 1
    slope = 2 * shifted * (1 + 10 * np.sin(phase) ** 2)
    slope += shifted**2 * 10 * np.pi * np.sin(2 * phase)
    end = w[..., -1]
    slope[..., -1] = 2 * (end - 1) * (1 + np.sin(2 * np.pi * end) ** 2)
    slope[..., -1] += (end - 1) ** 2 * 2 * np.pi * np.sin(4 * np.pi * end)
    slope[..., 0] += np.pi * np.sin(2 * np.pi * w[..., 0])
    return np.asarray(slope / 4)
