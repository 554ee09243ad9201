"""Ellipsoids that hold a convex set: shallow cuts, and projection in another metric."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotrs, dtrtrs

Vector = NDArray[np.float64]

NEWTON_STEPS = 100
ROUNDING = 1e-12


class CoveringEllipsoid:
    """The ellipsoid {c + Lx: ‖x‖ ≤ 1} ⊇ K, H = LLᵀ, that shrinks by shallow cuts.

    Everything else lives in whitened coordinates x, in which the ellipsoid is the unit ball:
    they stay well scaled however thin K is. `cut` changes c and L, and returns how coordinates
    and quadratic forms change with them.

    Parameters
    ----------
    center : ndarray of shape (d,)
    radius : float
        Of the ball to start from.

    Notes
    -----
    The minimum-volume ellipsoid around the part of the unit ball with ⟨ŝ, x⟩ ≤ 1/(2d) is
    x = -ŝ/(2d + 2) + √a (I - (1 - √(1 - b)) ŝŝᵀ) x', ‖x'‖ ≤ 1, with
    a = (4d² - 1)/(4d² - 4) and b = 2d/(2d² + d - 1).
    """

    def __init__(self, center: Vector, radius: float) -> None:
        d = len(center)
        self.center = center.copy()
        self.L = np.diag(np.full(d, radius))
        self.n_cuts = 0
        self.shift = 1 / (2 * d + 2)
        self.scale = math.sqrt((4 * d * d - 1) / (4 * d * d - 4))
        self.shrink = math.sqrt(1 - 2 * d / (2 * d * d + d - 1))

    def cut(self, normal: Vector) -> WhitenedChange:
        """Keep what has ⟨ŝ, x⟩ ≤ 1/(2d), with ŝ along ``normal`` in whitened coordinates."""
        unit = normal / math.sqrt(normal @ normal)
        along = self.L @ unit
        self.center -= self.shift * along
        self.L -= (1 - self.shrink) * np.outer(along, unit)
        self.L *= self.scale
        self.n_cuts += 1
        return WhitenedChange(unit, self.shift, self.scale, self.shrink)

    def condition(self) -> float:
        """Return the ratio of the least to the largest half-axis."""
        values = np.linalg.svd(self.L, compute_uv=False)
        return float(values[-1] / values[0])


class WhitenedChange:
    """What a cut does to whitened coordinates: x = -shift ŝ + R x', R = scale (I - (1 - q) ŝŝᵀ)."""

    def __init__(self, unit: Vector, shift: float, scale: float, shrink: float) -> None:
        self.unit, self.shift, self.scale, self.shrink = unit, shift, scale, shrink

    def point(self, x: Vector) -> Vector:
        """Return the coordinates of a point after the cut, x' = R⁻¹(x + shift ŝ)."""
        moved = x + self.shift * self.unit
        stretched: Vector = moved + (1 / self.shrink - 1) * (self.unit @ moved) * self.unit
        return stretched / self.scale

    def metric(self, M: Vector) -> Vector:
        """Return RᵀMR, a quadratic form after the cut."""
        weight = 1 - self.shrink
        Ms = M @ self.unit
        cross = np.outer(self.unit, Ms)
        square = weight**2 * (self.unit @ Ms) * np.outer(self.unit, self.unit)
        changed: Vector = self.scale**2 * (M - weight * (cross + cross.T) + square)
        return changed


def project_on_ball(y: Vector, M: Vector) -> Vector:
    """Return the point x of the unit ball that is nearest to y in the norm of M.

    Parameters
    ----------
    y : ndarray of shape (d,)
    M : ndarray of shape (d, d)
        Symmetric positive definite.

    Notes
    -----
    x(ν) = (M + νI)⁻¹My with the root ν ≥ 0 of ‖x(ν)‖ = 1. Newton's method on 1/‖x(ν)‖ - 1, which
    is concave, rises to it from ν = 0 without a safeguard; 3 to 8 Cholesky factorizations.
    """
    if y @ y <= 1:
        return y
    right = M @ y
    trace = float(np.trace(M)) / len(y)
    nu = 0.0
    for _ in range(NEWTON_STEPS):
        shifted = M.copy()
        shifted.flat[:: len(y) + 1] += nu
        factor = cholesky(shifted)
        x = dpotrs(factor, right, lower=1)[0]
        length = math.sqrt(x @ x)
        if length <= 1 + ROUNDING:
            break
        q = dtrtrs(factor, x, lower=1)[0]
        step = (length / math.sqrt(q @ q)) ** 2 * (length - 1)
        if step <= ROUNDING * 1e-4 * (nu + trace):
            break
        nu += step
    projected: Vector = x / max(1.0, length)
    return projected


def cholesky(M: Vector) -> Vector:
    """Return the lower factor of M; the strict upper triangle is not to be read.

    Raises
    ------
    FloatingPointError
        If M is not positive definite.
    """
    factor: Vector
    factor, info = dpotrf(M, lower=1, clean=0)
    if info != 0:
        raise FloatingPointError("the metric is no longer positive definite")
    return factor


def solve(M: Vector, b: Vector) -> Vector:
    """Return M⁻¹b by Cholesky factorization."""
    x: Vector = dpotrs(cholesky(M), b, lower=1)[0]
    return x
