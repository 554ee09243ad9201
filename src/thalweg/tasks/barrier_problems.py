"""Simple bilevel problems that are not convex: saturating regressions, and networks' losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number

Array = NDArray[np.float64]


class TanhRegression:
    """The mean of ½(tanh(aᵢᵀx) - bᵢ)² over the rows aᵢ of A, as a finite sum.

    Parameters
    ----------
    A : ndarray of shape (n, d)
    b : ndarray of shape (n,)
        In (-1, 1).
    """

    def __init__(self, A: Array, b: Array) -> None:
        self.A, self.b = A, b
        self.n: int | None = len(b)

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.intp]:
        """Return ``size`` uniform row numbers, with replacement."""
        return rng.integers(len(self.b), size=size)

    def value(self, x: Array) -> float:
        """Return the mean loss."""
        return float(np.mean((np.tanh(self.A @ x) - self.b) ** 2)) / 2

    def grad(self, x: Array) -> Array:
        """Return the gradient of the mean loss."""
        return _gradient(self.A, self.b, x)

    def sample_grad(self, x: Array, idx: NDArray[np.intp]) -> Array:
        """Return the mean gradient of the rows ``idx``."""
        return _gradient(self.A[idx], self.b[idx], x)

    def sample_grads(self, x: Array, y: Array, idx: NDArray[np.intp]) -> tuple[Array, Array]:
        """Return that at two points."""
        rows, targets = self.A[idx], self.b[idx]
        return _gradient(rows, targets, x), _gradient(rows, targets, y)


def _gradient(rows: Array, targets: Array, x: Array) -> Array:
    outputs = np.tanh(rows @ x)
    gradient: Array = ((outputs - targets) * (1 - outputs**2)) @ rows / len(targets)
    return gradient


class NoisyFunction:
    """A function whose gradient is seen with normal noise of a given norm, for one sample.

    The noise of a batch is drawn at once, as the mean that it is: batches of any size cost the
    same.

    Parameters
    ----------
    value, grad : callable
        Of x, of shape (d,).
    noise : float
        The root of E‖noise‖².
    d : int
    """

    n: int | None = None

    def __init__(
        self, value: Callable[[Array], float], grad: Callable[[Array], Array], noise: float, d: int
    ) -> None:
        self.value, self.grad = value, grad
        self.noise, self.d = noise, d

    def draw(self, rng: np.random.Generator, size: int) -> Any:
        """Return the mean noise of ``size`` samples."""
        return rng.standard_normal(self.d) * (self.noise / np.sqrt(self.d * size))

    def sample_grad(self, x: Array, idx: Array) -> Array:
        """Return the gradient and the noise."""
        return self.grad(x) + idx


@dataclass(frozen=True, eq=False)
class BarrierProblem:
    """min f over stationary points of g, both smooth, neither convex.

    Parameters
    ----------
    upper, lower : stochastic objectives
        f and g, with ``n``, ``value``, ``grad``, ``sample_grad`` and ``draw``.
    x0 : ndarray of shape (d,)
        The start.
    """

    upper: Any
    lower: Any
    x0: Array


def tanh_selection(
    rng: np.random.Generator,
    *,
    d: int = 20,
    n: int = 400,
    noise_upper: float = 0.1,
    noise_lower: float | None = None,
) -> BarrierProblem:
    """Return the choice among the fits of a saturating regression that half of the entries enter.

    g is the loss of ``n`` rows without an error, f(x) = mean log(1 + (x - t)²), seen with noise.
    The entries of the rows, of targets' weights, of t and of the start are standard normal, so that
    many rows saturate: the gradients of some batches nearly vanish, also where ∇g does not.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws rows, targets, t and the start.
    d : int, default 20
        Variables; the second half does not enter g.
    n : int, default 400
        Rows.
    noise_upper : float, default 0.1
        The root of E‖noise‖² of the upper gradient of one sample.
    noise_lower : float, optional
        The same of the lower one; by default g is a finite sum, whose samples are its rows.

    Examples
    --------
    >>> import numpy as np
    >>> problem = tanh_selection(np.random.default_rng(0))
    >>> problem.lower.n, problem.x0.shape
    (400, (20,))
    """
    check_integer("d", d, at_least=2)
    check_integer("n", n, at_least=1)
    check_number("noise_upper", noise_upper, at_least=0)
    A = rng.standard_normal((n, d))
    A[:, d // 2 :] = 0
    b = np.tanh(A @ rng.standard_normal(d))
    target, x0 = rng.standard_normal(d), rng.standard_normal(d)

    def value(x: Array) -> float:
        return float(np.mean(np.log1p((x - target) ** 2)))

    def grad(x: Array) -> Array:
        gap = x - target
        gradient: Array = 2 * gap / (1 + gap**2) / d
        return gradient

    lower: Any = TanhRegression(A, b)
    if noise_lower is not None:
        lower = NoisyFunction(
            lower.value, lower.grad, check_number("noise_lower", noise_lower, at_least=0), d
        )
    return BarrierProblem(NoisyFunction(value, grad, noise_upper, d), lower, x0)
