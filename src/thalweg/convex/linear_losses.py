"""Losses of linear models, and their data: predictions, and what of the loss comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

Array = NDArray[np.float64]


@dataclass(frozen=True)
class LinearLoss:
    """A convex loss of predictions p for targets y, which are ±1 for classes.

    Parameters
    ----------
    value, slope : callable
        ``(p, y) -> ndarray``, the losses and their (sub)derivatives by p.
    smooth : bool
        Whether the slope is continuous.
    constant : callable
        ``(y, weights) -> float``, a constant prediction to start from; weights sum to 1.
    spread : callable
        ``(y, weights) -> float > 0``, the scale of the targets that the loss sees.
    """

    value: Callable[[Array, Array], Array]
    slope: Callable[[Array, Array], Array]
    smooth: bool
    constant: Callable[[Array, Array], float]
    spread: Callable[[Array, Array], float]


def squared_error() -> LinearLoss:
    """Return (p - y)²/2."""
    return LinearLoss(lambda p, y: (p - y) ** 2 / 2, lambda p, y: p - y, True, _mean, _std)


def huber(epsilon: float) -> LinearLoss:
    """Return r²/2 where r = |p - y| is at most ε, and ε(r - ε/2) beyond."""

    def value(p: Array, y: Array) -> Array:
        inner = np.minimum(np.abs(p - y), epsilon)
        return inner * (np.abs(p - y) - inner / 2)

    return LinearLoss(value, lambda p, y: np.clip(p - y, -epsilon, epsilon), True, _median, _mad)


def absolute_error() -> LinearLoss:
    """Return |p - y|."""
    return LinearLoss(lambda p, y: np.abs(p - y), lambda p, y: np.sign(p - y), False, _median, _mad)


def log_loss() -> LinearLoss:
    """Return ln(1 + exp(-yp))."""
    return LinearLoss(
        lambda p, y: np.logaddexp(0, -y * p), lambda p, y: -y * expit(-y * p), True, _log_odds, _std
    )


def hinge() -> LinearLoss:
    """Return max(0, 1 - yp)."""
    return LinearLoss(
        lambda p, y: np.maximum(0, 1 - y * p), lambda p, y: -y * (y * p < 1), False, _zero, _std
    )


def squared_hinge() -> LinearLoss:
    """Return max(0, 1 - yp)²."""
    return LinearLoss(
        lambda p, y: np.maximum(0, 1 - y * p) ** 2,
        lambda p, y: -2 * y * np.maximum(0, 1 - y * p),
        True,
        _mean,
        _std,
    )


def _mean(y: Array, weights: Array) -> float:
    return float(weights @ y)


def _median(y: Array, weights: Array) -> float:
    order = np.argsort(y)
    below = np.cumsum(weights[order])
    return float(y[order][np.searchsorted(below, 0.5 * below[-1])])


def _log_odds(y: Array, weights: Array) -> float:
    share = float(weights @ (y > 0))
    return float(np.log(share) - np.log1p(-share)) if 0 < share < 1 else 0.0


def _zero(y: Array, weights: Array) -> float:
    return 0.0


def _std(y: Array, weights: Array) -> float:
    return float(np.sqrt(weights @ (y - weights @ y) ** 2)) or 1.0


def _mad(y: Array, weights: Array) -> float:
    distances = np.abs(y - _median(y, weights))
    return 1.4826 * _median(distances, weights) or _std(y, weights)


class LinearData:
    """Weighted samples, whose features are centered without being touched if there is an intercept.

    A model is a vector v of the coefficients and, with an intercept, of one more entry in their
    units: p = (X - 1μᵀ) v[:-1] + s v[-1], where μ is the mean of the features and s their scale.

    Parameters
    ----------
    X : ndarray or sparse array of shape (n, d)
    weights : ndarray of shape (n,)
        Nonnegative, with sum 1.
    fit_intercept : bool
    centered : bool, default True
        False takes the features as they are, and the intercept too: μ = 0, s = 1.

    Attributes
    ----------
    spread : float
        The root mean square of the (centered) features.
    """

    def __init__(
        self, X: Any, weights: Array, fit_intercept: bool, *, centered: bool = True
    ) -> None:
        self.X, self.weights, self.fit_intercept = X, weights, fit_intercept
        centered = centered and fit_intercept
        self.mean = np.asarray(weights @ X) if centered else np.zeros(X.shape[1])
        squares: Any = X * X if isinstance(X, np.ndarray) else X.power(2)
        variance = float(np.sum(weights @ squares)) - float(self.mean @ self.mean)
        # Cancellation leaves rounding errors of constant features.
        floor = 1e-12 * float(self.mean @ self.mean)
        self.spread = float(np.sqrt(variance / X.shape[1])) if variance > floor else 1.0
        self.scale = self.spread if centered else 1.0

    def predict(self, v: Array, rows: Any = slice(None)) -> Array:
        """Return predictions for some rows."""
        X: Any = self.X if isinstance(rows, slice) else self.X[rows]
        if not self.fit_intercept:
            return np.asarray(X @ v)
        products: Array = np.asarray(X @ v[:-1])
        return products + (self.scale * float(v[-1]) - float(self.mean @ v[:-1]))

    def pull(self, slopes: Array, rows: Any = slice(None)) -> Array:
        """Return the gradient by v of a function of the predictions, given its slopes."""
        X = self.X if isinstance(rows, slice) else self.X[rows]
        gradient: Array = np.asarray(X.T @ slopes)
        if not self.fit_intercept:
            return gradient
        total = float(slopes.sum())
        packed: Array = np.append(gradient - total * self.mean, self.scale * total)
        return packed

    def pack(self, coef: Array, intercept: float) -> Array:
        """Return v."""
        if not self.fit_intercept:
            return coef.copy()
        return np.append(coef, (intercept + float(self.mean @ coef)) / self.scale)

    def unpack(self, v: Array) -> tuple[Array, float]:
        """Return coefficients and intercept."""
        if not self.fit_intercept:
            return v, 0.0
        return v[:-1], self.scale * float(v[-1]) - float(self.mean @ v[:-1])
