"""Nonconvex functions whose gradient is not Lipschitz, with gradients and Hessian products.

Quartics of machine learning (phase retrieval, matrix factorization, an augmented Lagrangian of
Max-Cut), a quartic without growth, and the "octopus", a chain of saddle points.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires

with requires("peers"):
    from sklearn import datasets

Vector = NDArray[np.float64]
TAU = math.e  # of the octopus


@dataclass(frozen=True, eq=False)
class SmoothFunction:
    """A twice differentiable function of n variables.

    Parameters
    ----------
    n : int
    value_and_gradient : callable
        ``x -> (float, ndarray of shape (n,))``, for x of shape (n,).
    hvp : callable
        ``(x, v) -> ndarray of shape (n,)``, the Hessian at x times v.
    minimum : float
        The least value, exactly.

    Examples
    --------
    >>> f = symmetric_factorization(np.diag([2.0, 1.0]), rank=1)
    >>> f.minimum, round(f(np.array([2**0.5, 0.0])), 12)
    (0.25, 0.25)
    """

    n: int
    value_and_gradient: Callable[[Vector], tuple[float, Vector]]
    hvp: Callable[[Vector, Vector], Vector]
    minimum: float

    def __call__(self, x: Vector) -> float:
        """Return f(x)."""
        return self.value_and_gradient(x)[0]

    def gradient(self, x: Vector) -> Vector:
        """Return ∇f(x), (n,)."""
        return self.value_and_gradient(x)[1]


@lru_cache
def digits_covariance() -> Vector:
    """Return the covariance, 64 × 64, of scikit-learn's digits with pixels in [0, 1].

    The array is shared within the process and read-only.
    """
    covariance: Vector = np.cov(datasets.load_digits().data / 16, rowvar=False)
    covariance.flags.writeable = False
    return covariance


def symmetric_factorization(matrix: ArrayLike, rank: int) -> SmoothFunction:
    """Return f(U) = ‖UUᵀ - C‖²/4 for a symmetric C of shape (d, d) and U of shape (d, rank).

    The minimum is a quarter of the squared eigenvalues that the ``rank`` largest positive ones
    leave; all other stationary points are strict saddle points if those differ from the rest.
    """
    C = _check_symmetric("matrix", matrix)
    d = len(C)
    r = check_integer("rank", rank, at_least=1, at_most=d)
    eigenvalues = np.linalg.eigvalsh(C)
    rest = eigenvalues.copy()
    rest[-r:] = np.minimum(rest[-r:], 0)

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        U = x.reshape(d, r)
        residual = U @ U.T - C
        return 0.25 * float(np.vdot(residual, residual)), (residual @ U).reshape(-1)

    def hvp(x: Vector, v: Vector) -> Vector:
        U, V = x.reshape(d, r), v.reshape(d, r)
        change = V @ U.T
        product: Vector = (U @ U.T - C) @ V + (change + change.T) @ U
        return product.reshape(-1)

    return SmoothFunction(d * r, value_and_gradient, hvp, 0.25 * float(rest @ rest))


def asymmetric_factorization(matrix: ArrayLike, rank: int, kappa: float = 0.0) -> SmoothFunction:
    """Return f(W, H) = ‖WH - Y‖²/2 + κ/4 (‖W‖⁴ + ‖H‖⁴), x = (W, H), for Y of shape (p, q).

    With κ = 0 the orbits (tW, H/t) leave f unchanged, so that its gradient does not grow.
    The minimum is known for κ = 0; else it is NaN.
    """
    Y = check_array("matrix", matrix, shape=("p", "q"))
    p, q = Y.shape
    r = check_integer("rank", rank, at_least=1, at_most=min(p, q))
    k = check_number("kappa", kappa, at_least=0)
    rest = np.linalg.svd(Y, compute_uv=False)[r:]

    def split(x: Vector) -> tuple[Vector, Vector]:
        return x[: p * r].reshape(p, r), x[p * r :].reshape(r, q)

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        W, H = split(x)
        residual = W @ H - Y
        w, h = float(np.vdot(W, W)), float(np.vdot(H, H))
        value = 0.5 * float(np.vdot(residual, residual)) + 0.25 * k * (w**2 + h**2)
        of_W, of_H = residual @ H.T + k * w * W, W.T @ residual + k * h * H
        return value, np.concatenate([of_W.reshape(-1), of_H.reshape(-1)])

    def hvp(x: Vector, v: Vector) -> Vector:
        (W, H), (A, B) = split(x), split(v)
        residual, change = W @ H - Y, A @ H + W @ B
        of_W = change @ H.T + residual @ B.T
        of_H = W.T @ change + A.T @ residual
        of_W += k * (np.vdot(W, W) * A + 2 * np.vdot(W, A) * W)
        of_H += k * (np.vdot(H, H) * B + 2 * np.vdot(H, B) * H)
        return np.concatenate([of_W.reshape(-1), of_H.reshape(-1)])

    minimum = 0.5 * float(rest @ rest) if k == 0 else math.nan
    return SmoothFunction((p + q) * r, value_and_gradient, hvp, minimum)


def phase_retrieval(n: int, m: int, rng: np.random.Generator) -> SmoothFunction:
    """Return f(x) = Σ ((aᵢᵀx)² - (aᵢᵀx⋆)²)² / (4m) for m Gaussian aᵢ and a random unit vector x⋆.

    The minimum is 0; the origin is a strict saddle point (a maximum, even).
    """
    n = check_integer("n", n, at_least=1)
    m = check_integer("m", m, at_least=1)
    A = rng.standard_normal((m, n))
    solution = rng.standard_normal(n)
    y = (A @ (solution / np.linalg.norm(solution))) ** 2

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        z = A @ x
        residual = z**2 - y
        return float(residual @ residual) / (4 * m), (residual * z) @ A / m

    def hvp(x: Vector, v: Vector) -> Vector:
        z = A @ x
        return np.asarray(((3 * z**2 - y) * (A @ v)) @ A / m)

    return SmoothFunction(n, value_and_gradient, hvp, 0.0)


def maxcut_lagrangian(
    weights: ArrayLike, rank: int, penalty: float, multipliers: ArrayLike | None = None
) -> SmoothFunction:
    """Return the augmented Lagrangian of Max-Cut's relaxation over VVᵀ, V of shape (d, rank).

    ``f(V) = -⟨C, VVᵀ⟩/2 + λᵀe/2 + β ‖e‖²/4`` with ``eᵢ = ‖vᵢ‖² - 1``, C the Laplacian of the
    weights over 4, β the penalty and λ the multipliers, by default 0. The minimum is not known.
    """
    weight = _check_symmetric("weights", weights)
    d = len(weight)
    r = check_integer("rank", rank, at_least=1)
    beta = check_number("penalty", penalty, above=0)
    dual = check_array(
        "multipliers", np.zeros(d) if multipliers is None else multipliers, shape=(d,)
    )
    C = (np.diag(weight.sum(1)) - weight) / 4

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        V = x.reshape(d, r)
        excess = np.einsum("ij,ij->i", V, V) - 1
        CV = C @ V
        value = -0.5 * np.vdot(CV, V) + 0.5 * dual @ excess + 0.25 * beta * excess @ excess
        return float(value), ((dual + beta * excess)[:, None] * V - CV).reshape(-1)

    def hvp(x: Vector, v: Vector) -> Vector:
        V, D = x.reshape(d, r), v.reshape(d, r)
        excess = np.einsum("ij,ij->i", V, V) - 1
        change = 2 * np.einsum("ij,ij->i", V, D)
        product: Vector = (dual + beta * excess)[:, None] * D + beta * change[:, None] * V - C @ D
        return product.reshape(-1)

    return SmoothFunction(d * r, value_and_gradient, hvp, math.nan)


@lru_cache
def flat_quartic() -> SmoothFunction:
    """Return f(x, y) = x⁴/4 + y⁴/4 - x²y²/2, whose gradient vanishes on both diagonals."""

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        difference = x[0] ** 2 - x[1] ** 2
        return float(0.25 * difference**2), difference * np.array([x[0], -x[1]])

    def hvp(x: Vector, v: Vector) -> Vector:
        a, b = x
        H = np.array([[3 * a**2 - b**2, -2 * a * b], [-2 * a * b, 3 * b**2 - a**2]])
        return H @ v

    return SmoothFunction(2, value_and_gradient, hvp, 0.0)


def octopus(n: int, L: float) -> SmoothFunction:
    """Return the function of Du et al. on which gradient descent takes exponential time.

    With τ = e and γ = 1, and x in place of ``|x|``, let i be the number of leading coordinates that
    are at least 2τ, and z the next one. Then f = Σ_{j≤i} (L (xⱼ - 4τ)² - ν) + r, where

    - r = -γz² + L Σ_{j>i+1} xⱼ² for z ≤ τ,
    - r = g₁(z) + g₂(z) xᵢ₊₂² + L Σ_{j>i+2} xⱼ² for τ < z < 2τ, a tunnel to the next saddle point.

    A path from the origin visits a neighborhood of n saddle points, one after the other; at the
    k-th one descent has shrunk the k-th coordinate, along which it could escape, exponentially.
    The minima, at ``|xⱼ|`` = 4τ, have the value -nν. f is twice continuously differentiable for
    ``|xⱼ|`` ≤ 6τ but for jumps of its second derivative.

    References
    ----------
    "Gradient descent can take exponential time to escape saddle points", NIPS 2017.
    """
    n = check_integer("n", n, at_least=1)
    L = check_number("L", L, at_least=1)
    nu = 4 * L * TAU**2 - _tunnel(2 * TAU, L)[0][0]

    def leading(size: Vector) -> int:
        """Return i, which is also the index of z."""
        near = size < 2 * TAU
        return int(near.argmax()) if near.any() else n

    def value_and_gradient(x: Vector) -> tuple[float, Vector]:
        size = np.abs(x)
        i = leading(size)
        away = size.copy()
        away[:i] -= 4 * TAU
        slope = 2 * L * away
        terms = L * away**2
        if i < n:
            y = size[i + 1] if i + 1 < n else 0.0
            (g1, g1_slope, _), (g2, g2_slope, _) = _tunnel(size[i], L)
            terms[i], slope[i] = g1, g1_slope + g2_slope * y**2
            if i + 1 < n:
                terms[i + 1], slope[i + 1] = g2 * y**2, 2 * g2 * y
        return float(terms.sum()) - i * nu, slope * np.sign(x)

    def hvp(x: Vector, v: Vector) -> Vector:
        size = np.abs(x)
        i = leading(size)
        product = 2 * L * v
        if i < n:
            (_, _, g1_curvature), (g2, g2_slope, g2_curvature) = _tunnel(size[i], L)
            y = x[i + 1] if i + 1 < n else 0.0
            product[i] = (g1_curvature + g2_curvature * y**2) * v[i]
            if i + 1 < n:
                cross = 2 * g2_slope * y * np.sign(x[i])
                product[i] += cross * v[i + 1]
                product[i + 1] = 2 * g2 * v[i + 1] + cross * v[i]
        return product

    return SmoothFunction(n, value_and_gradient, hvp, -n * nu)


def _check_symmetric(name: str, matrix: ArrayLike) -> Vector:
    array = check_array(name, matrix, shape=("d", "d"))
    if array.shape[0] != array.shape[1] or not np.allclose(array, array.T):
        raise ValueError(f"{name} must be symmetric, got a matrix that is not")
    return array


def _tunnel(z: float, L: float) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return (g₁, g₁', g₁'') and (g₂, g₂', g₂'') at z in [0, 2τ], with γ = 1."""
    if z <= TAU:
        return (-(z**2), -2 * z, -2.0), (L, 0.0, 0.0)
    u, w = (z - TAU) / TAU, (z - 2 * TAU) / TAU
    a, b = 10 - 14 * L, 5 * L - 3
    g1 = -(z**2) + TAU**2 * (a * u**3 / 3 + b * u**4 / 2)
    g1_slope = -2 * z + TAU * (a * u**2 + 2 * b * u**3)
    g1_curvature = -2 + 2 * a * u + 6 * b * u**2
    g2 = -1 - (L + 1) * (10 * w**3 + 15 * w**4 + 6 * w**5)
    g2_slope = -(L + 1) * (30 * w**2 + 60 * w**3 + 30 * w**4) / TAU
    g2_curvature = -(L + 1) * (60 * w + 180 * w**2 + 120 * w**3) / TAU**2
    return (g1, g1_slope, g1_curvature), (g2, g2_slope, g2_curvature)
