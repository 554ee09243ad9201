"""The two iterations of adaptive proximal gradient, asked for a point and told its gradient.

The step size is D/S, and S² accumulates the squared norms of the gradient mappings. Since the
mapping is the move divided by the step, S⁺² = S² + ‖Δ‖² S²/D² = S² (1 + ‖Δ‖²/D²).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Prox = Callable[[Any, Any], Any]


def norm(x: Array) -> float:
    """Return the Euclidean norm of all entries together."""
    return float(np.linalg.norm(x.reshape(-1)))


def initial_scale(x: Array, gradient: Array, prox: Prox, D: float, each: bool = False) -> float:
    """Return S₀: the norm of the gradient mapping at x, with the step that moves x by about D.

    With ``each`` the norm is the largest entry's, as each coordinate moves by about D.
    """
    size = _largest if each else norm
    alpha = D / (size(gradient) or 1.0)
    return size(x - prox(x - alpha * gradient, alpha)) / alpha or size(gradient) or 1.0


def _largest(x: Array) -> float:
    return float(np.max(np.abs(x), initial=0.0))


def grown(S: Any, move: Array, D: float) -> Any:
    """Return S √(1 + ‖Δ‖²/D²), coordinate by coordinate if S is an array."""
    length = np.abs(move) if isinstance(S, np.ndarray) else norm(move)
    return S * np.hypot(1.0, length / D)


class ProximalSteps:
    """x ← prox(x - αg, α) with α = D/S.

    Parameters
    ----------
    x : ndarray
    prox : callable
    D : float
    S : float or ndarray
        S₀, one number for the whole vector or one for each coordinate.

    Attributes
    ----------
    query, output : ndarray
        Where the gradient is wanted, and the iterate; here both are x.
    average : ndarray
        That of the iterates, weighted by the steps that lead to them.
    alpha : float or ndarray
        The step size of the last proposal.
    """

    def __init__(self, x: Array, prox: Prox, D: float, S: Any) -> None:
        self.query = self.output = self.average = x
        self.prox, self.D, self.S = prox, D, S
        self.alpha = D / S
        self._weight: Any = 0.0

    def propose(self, gradient: Array) -> float:
        """Compute the next iterate, and return the norm of the gradient mapping at x."""
        self.alpha = self.D / self.S
        self._next = self.prox(self.query - self.alpha * gradient, self.alpha)
        self._move = self.query - self._next
        return norm(self._move / self.alpha)

    def accept(self) -> None:
        """Move there."""
        self.S = grown(self.S, self._move, self.D)
        self.query = self.output = self._next
        self._weight = self._weight + self.alpha
        self.average = self.average + (self.alpha / self._weight) * (self._next - self.average)


class AcceleratedProximalSteps:
    """z ← prox(z - sg, s) with s = aD/S, the gradient at x = z/a + (1 - 1/a) y, y ← its average.

    The weights are a = 1, 3/2, 2, …; y averages the z by them.

    Attributes
    ----------
    query, output : ndarray
        x and y.
    """

    def __init__(self, x: Array, prox: Prox, D: float, S: Any) -> None:
        self.query = self.output = self._z = x
        self.prox, self.D, self.S = prox, D, S
        self.alpha = D / S
        self._t = 0

    @property
    def average(self) -> Array:
        """Return y, which is an average itself."""
        return self.output

    @property
    def _a(self) -> float:
        return (self._t + 2) / 2

    def propose(self, gradient: Array) -> float:
        """Compute the next z, and return ‖z - z⁺‖/s."""
        self.alpha = self._a * self.D / self.S
        self._next = self.prox(self._z - self.alpha * gradient, self.alpha)
        self._move = self._z - self._next
        return norm(self._move / self.alpha)

    def accept(self) -> None:
        """Move there."""
        self.S = grown(self.S, self._move, self.D)
        self._z = self._next
        self.output = self.output + (self._z - self.output) / self._a
        self._t += 1
        self.query = self.output + (self._z - self.output) / self._a

    def mapping(self, gradient: Array) -> float:
        """Return the norm of the gradient mapping at y, given the gradient there.

        Its step is D/S, which is that of the plain iteration: s/a.
        """
        alpha = self.D / self.S
        moved = self.prox(self.output - alpha * gradient, alpha)
        return norm((self.output - moved) / alpha)
