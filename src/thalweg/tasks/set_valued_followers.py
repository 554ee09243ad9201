"""Bilevel problems with many lower solutions: an interval, a low-rank fit, interpolation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

Array = NDArray[np.float64]
Mode = Literal["optimistic", "pessimistic"]

LABEL_NOISE = (0.0, 0.0, 0.2, 0.4, 0.9)  # the share of wrong labels by group of rows
ROWS_OF_A_GROUP = 8
N_FEATURES = 15
N_HELD_OUT = 150


@dataclass(frozen=True)
class MovingInterval:
    """S(x) = [-1, 1] - sin x and F = ½(y - ½)² + 0.05x², with the hyper-objectives in closed form.

    φ_p has downward kinks where both ends are equally bad, sin x = -½.

    Parameters
    ----------
    x0 : float
        Where runs start.
    rho : float
        A modulus of weak convexity of φ_p and of -φ_o, from sampled second differences.
    """

    x0: float = 4.0
    rho: float = 2.4

    @staticmethod
    def upper(x: Array, y: Array) -> float:
        """Return F(x, y)."""
        return float((y[0] - 0.5) ** 2) / 2 + 0.05 * float(x[0] ** 2)

    @staticmethod
    def value(x: Array, mode: Mode) -> float:
        """Return the hyper-objective."""
        s = float(np.sin(x[0]))
        away = max(s - 0.5, 0.0) if mode == "optimistic" else max(abs(0.5 - s), abs(1.5 + s))
        return away**2 / 2 + 0.05 * float(x[0] ** 2)


@dataclass(frozen=True, eq=False)
class LowRankFit:
    """f = ½‖Ay - Bx‖² with A of low rank, F = the mean pseudo-Huber loss of Cy + E sin x - e.

    Parameters
    ----------
    A : ndarray of shape (p, n)
    B : ndarray of shape (p, m)
    C : ndarray of shape (q, n)
    E : ndarray of shape (q, m)
    e : ndarray of shape (q,)
    x0 : ndarray of shape (m,)
    """

    A: Array
    B: Array
    C: Array
    E: Array
    e: Array
    x0: Array

    def _residual(self, x: Array, y: Array) -> Array:
        rest: Array = self.C @ y + self.E @ np.sin(x) - self.e
        return rest

    def upper(self, x: Array, y: Array) -> float:
        """Return F(x, y)."""
        return float(np.mean(np.sqrt(1 + self._residual(x, y) ** 2))) - 1

    def grad_x(self, x: Array, y: Array) -> Array:
        """Return ∇_x F."""
        r = self._residual(x, y)
        slope: Array = np.cos(x) * ((r / np.sqrt(1 + r * r)) @ self.E) / len(r)
        return slope

    def grad_y(self, x: Array, y: Array) -> Array:
        """Return ∇_y F."""
        r = self._residual(x, y)
        slope: Array = (r / np.sqrt(1 + r * r)) @ self.C / len(r)
        return slope

    def hess_y(self, x: Array, y: Array) -> Array:
        """Return ∇²_yy F."""
        r = self._residual(x, y)
        hess: Array = (self.C.T * (1 + r * r) ** -1.5) @ self.C / len(r)
        return hess


def low_rank_fit(
    rng: np.random.Generator, *, m: int = 5, n: int = 12, rank: int = 6, rows: int = 20
) -> LowRankFit:
    """Return a random instance, whose lower level leaves n - rank directions free."""
    A = rng.standard_normal((8, rank)) @ rng.standard_normal((rank, n)) / np.sqrt(n)
    return LowRankFit(
        A=A,
        B=rng.standard_normal((8, m)),
        C=rng.standard_normal((rows, n)),
        E=rng.standard_normal((rows, m)),
        e=rng.standard_normal(rows),
        x0=rng.standard_normal(m),
    )


@dataclass(frozen=True, eq=False)
class GroupInterpolation:
    """Interpolate labels that are partly wrong, each group scaled by a weight that is chosen.

    The lower level fits ``features @ y = x[group] * labels`` with more features than rows. The
    upper one is the mean pseudo-Huber loss on clean rows, less or plus a price of ½ price times the
    squared distance of y from the least-norm interpolator: the worst and the best interpolator that
    are not too far out.

    Parameters
    ----------
    features : ndarray of shape (40, n)
    labels : ndarray of shape (40,)
        ±1, wrong by `LABEL_NOISE`.
    group : ndarray of shape (40,)
        0 to 4.
    held_out, held_out_labels : ndarrays of shape (150, n), (150,)
        The clean rows of the upper level.
    test, test_labels : ndarrays
    free : ndarray of shape (n, k)
        A basis of the directions that interpolation leaves free.
    price : float
        Twice the largest curvature of the loss along them, so that there is a worst case.
    """

    features: Array
    labels: Array
    group: NDArray[np.intp]
    held_out: Array
    held_out_labels: Array
    test: Array
    test_labels: Array
    free: Array
    price: float

    def targets(self, x: Array) -> Array:
        """Return the scaled labels."""
        scaled: Array = x[self.group] * self.labels
        return scaled

    def upper(self, mode: Mode) -> tuple[_Upper, _UpperGradient, _UpperHessian]:
        """Return F of a mode and its derivatives in y."""
        sign = 1.0 if mode == "optimistic" else -1.0
        return _Upper(self, sign), _UpperGradient(self, sign), _UpperHessian(self, sign)

    def test_error(self, y: Array) -> float:
        """Return the share of test rows with a wrong sign."""
        return float(np.mean(np.sign(self.test @ y) != self.test_labels))


@dataclass(frozen=True, eq=False)
class _Upper:
    problem: GroupInterpolation
    sign: float

    def __call__(self, x: Array, y: Array) -> float:
        p = self.problem
        r = p.held_out @ y - p.held_out_labels
        z = p.free.T @ y
        return float(np.mean(np.sqrt(1 + r * r))) - 1 + self.sign * p.price / 2 * float(z @ z)


@dataclass(frozen=True, eq=False)
class _UpperGradient:
    problem: GroupInterpolation
    sign: float

    def __call__(self, x: Array, y: Array) -> Array:
        p = self.problem
        r = p.held_out @ y - p.held_out_labels
        loss = (r / np.sqrt(1 + r * r)) @ p.held_out / len(r)
        slope: Array = loss + self.sign * p.price * (p.free @ (p.free.T @ y))
        return slope


@dataclass(frozen=True, eq=False)
class _UpperHessian:
    problem: GroupInterpolation
    sign: float

    def __call__(self, x: Array, y: Array) -> Array:
        p = self.problem
        r = p.held_out @ y - p.held_out_labels
        loss = (p.held_out.T * (1 + r * r) ** -1.5) @ p.held_out / len(r)
        hess: Array = loss + self.sign * p.price * (p.free @ p.free.T)
        return hess


@lru_cache(maxsize=1)
def _cancer_features() -> tuple[Array, Array]:
    with requires("peers"):
        from sklearn.datasets import load_breast_cancer
        from sklearn.preprocessing import PolynomialFeatures
    X, y = load_breast_cancer(return_X_y=True)
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    features = PolynomialFeatures(2).fit_transform(X[:, :N_FEATURES])
    return features / np.linalg.norm(features, axis=1, keepdims=True), 2.0 * y - 1


def group_interpolation(rng: np.random.Generator) -> GroupInterpolation:
    """Return the task on breast cancer data: 136 quadratic features of rows of norm 1."""
    X, y = _cancer_features()
    order = rng.permutation(len(y))
    n = ROWS_OF_A_GROUP * len(LABEL_NOISE)
    train, held_out, test = order[:n], order[n : n + N_HELD_OUT], order[n + N_HELD_OUT :]
    group = np.repeat(np.arange(len(LABEL_NOISE)), ROWS_OF_A_GROUP)
    wrong = rng.random(n) < np.array(LABEL_NOISE)[group]
    _, s, Vt = np.linalg.svd(X[train])
    free = Vt[int(np.sum(s > 1e-10 * s[0])) :].T
    curvature = np.linalg.norm(X[held_out] @ free, 2) ** 2 / N_HELD_OUT
    return GroupInterpolation(
        features=X[train],
        labels=np.where(wrong, -1.0, 1.0) * y[train],
        group=group,
        held_out=X[held_out],
        held_out_labels=y[held_out],
        test=X[test],
        test_labels=y[test],
        free=free,
        price=2 * float(curvature),
    )
