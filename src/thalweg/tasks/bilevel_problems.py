"""Simple bilevel problems: among the best fits of some data, the best one for other data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SelectionProblem:
    """Least squares ½ mean((Ax - b)²) on training rows, and then on validation rows, over ‖x‖₁ ≤ r.

    Parameters
    ----------
    A, A_outer : ndarray of shape (n, d)
    b, b_outer : ndarray of shape (n,)
    radius : float
        r.
    """

    A: Array
    b: Array
    A_outer: Array
    b_outer: Array
    radius: float

    def inner(self, x: Array) -> float:
        """Return the loss of the training rows."""
        return float(np.mean((self.A @ x - self.b) ** 2)) / 2

    def outer(self, x: Array) -> float:
        """Return the loss of the validation rows."""
        return float(np.mean((self.A_outer @ x - self.b_outer) ** 2)) / 2

    def optimum(self) -> tuple[float, float]:
        """Return G* and F*, by second-order cone programs.

        All minimizers of G have the same Ax, which makes the second one well-conditioned.
        """
        with requires("peers"):
            import cvxpy as cp
        x = cp.Variable(self.A.shape[1])
        inner = cp.sum_squares(self.A @ x - self.b) / (2 * len(self.b))
        outer = cp.sum_squares(self.A_outer @ x - self.b_outer) / (2 * len(self.b_outer))
        first = cp.Problem(cp.Minimize(inner), [cp.norm1(x) <= self.radius])
        least = float(first.solve(solver=cp.CLARABEL))
        # The first solution has its own rounding, for which the ball leaves room.
        ball = cp.norm1(x) <= self.radius * (1 + 1e-6)
        second = cp.Problem(cp.Minimize(outer), [ball, self.A @ x == self.A @ x.value])
        return least, float(second.solve(solver=cp.CLARABEL))


@lru_cache
def _diabetes() -> tuple[Array, Array]:
    with requires("peers"):
        from sklearn.datasets import load_diabetes
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler
    X, y = load_diabetes(return_X_y=True)
    cubic = PolynomialFeatures(3, include_bias=False).fit_transform(X)
    return StandardScaler().fit_transform(cubic), (y - y.mean()) / y.std()


def diabetes_selection(
    rng: np.random.Generator, *, unit_rows: bool, radius: float = 20.0
) -> SelectionProblem:
    """Return a regression with more features than samples, on a random division of real data.

    The data are those of `sklearn.datasets.load_diabetes`, with all monomials up to degree three of
    the ten features: 285 columns, standardized, and 150 rows for each of the two losses.

    Parameters
    ----------
    rng : numpy.random.Generator
        Divides the rows.
    unit_rows : bool
        Scale each row of features to norm 1, without which they differ widely.
    radius : float, default 20
    """
    X, y = _diabetes()
    if unit_rows:
        X = X / np.linalg.norm(X, axis=1, keepdims=True)
    order = rng.permutation(len(y))
    train, validate = order[:150], order[150:300]
    return SelectionProblem(X[train], y[train], X[validate], y[validate], radius)


@dataclass(frozen=True, eq=False)
class DictionaryUpdate:
    r"""Learn new data with a dictionary that stays best for old data, whose code is fixed.

    .. math:: \min_{D, C} \frac{1}{2 n'} \|A' - D C\|_F^2 \quad \text{subject to} \quad
              D \in \arg\min \frac{1}{2 n} \|A - D \hat C\|_F^2

    over the D whose columns have norm 1 at most and the C with columns of l1 norm δ at most. The
    outer objective is not convex in D and C together. Samples are columns.

    Parameters
    ----------
    old : ndarray of shape (m, n)
    old_code : ndarray of shape (q, n)
        Zero for the columns of D that are new.
    new : ndarray of shape (m, n')
    delta : float
    """

    old: Array
    old_code: Array
    new: Array
    delta: float

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of D and C."""
        q = len(self.old_code)
        return (self.old.shape[0], q), (q, self.new.shape[1])

    def inner(self, D: Array) -> float:
        """Return the loss of the old data."""
        return float(np.mean(np.sum((self.old - D @ self.old_code) ** 2, axis=0))) / 2

    def outer(self, D: Array, C: Array) -> float:
        """Return the loss of the new data."""
        return float(np.mean(np.sum((self.new - D @ C) ** 2, axis=0))) / 2

    def optimum(self) -> float:
        """Return the least loss of the old data, by accelerated projected gradients."""
        D = np.zeros(self.shapes[0])
        y, momentum = D, 1.0
        gram = self.old_code @ self.old_code.T
        cross = self.old @ self.old_code.T
        step = 1 / np.linalg.norm(gram, 2)
        for _ in range(5_000):
            moved = y - step * (y @ gram - cross)
            moved = moved / np.maximum(1, np.linalg.norm(moved, axis=0))
            if np.sum((y - moved) * (moved - D)) > 0:  # restart where the momentum points uphill
                momentum = 1.0
            grown = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
            y = moved + (momentum - 1) / grown * (moved - D)
            D, momentum = moved, grown
        return self.inner(D)


def synthetic_dictionaries(
    rng: np.random.Generator,
    *,
    m: int = 25,
    n: int = 250,
    p: int = 40,
    q: int = 50,
    sparsity: int = 5,
    delta: float = 3.0,
) -> DictionaryUpdate:
    """Return old data made with p atoms, and new data that also use q - p others.

    Atoms are uniform on the sphere; a sample combines ``sparsity`` of them, with normal
    coefficients scaled to l1 norm δ at most, and noise of standard deviation 0.05. The code of the
    old data is the true one.
    """
    atoms = rng.standard_normal((m, q))
    atoms /= np.linalg.norm(atoms, axis=0)

    def samples(among: NDArray[np.intp]) -> tuple[Array, Array]:
        code = np.zeros((q, n))
        for i in range(n):
            code[rng.choice(among, sparsity, replace=False), i] = rng.standard_normal(sparsity)
        code /= np.maximum(1, np.abs(code).sum(axis=0) / delta)
        return atoms @ code + 0.05 * rng.standard_normal((m, n)), code

    old, code = samples(np.arange(p))
    new, _ = samples(np.arange(q))
    return DictionaryUpdate(old, code, new, delta)
