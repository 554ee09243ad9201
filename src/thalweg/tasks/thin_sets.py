"""Elongated convex sets, and linear losses to play on them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]


@dataclass(frozen=True)
class ThinEllipsoid:
    """The ellipsoid {x: xᵀH⁻¹x ≤ 1}, half-axes 1 and 1/κ in random directions.

    Attributes
    ----------
    axes : ndarray of shape (d, d)
        Orthonormal columns.
    half_axes : ndarray of shape (d,)
    start : ndarray of shape (d,)
        A point off the center.
    """

    axes: Array
    half_axes: Array
    start: Array

    @property
    def shape(self) -> Array:
        """The matrix H, of shape (d, d)."""
        H: Array = (self.axes * self.half_axes**2) @ self.axes.T
        return H

    @property
    def inner_radius(self) -> float:
        """Radius of the largest ball inside."""
        return float(self.half_axes.min())

    def argmin(self, g: Array) -> Array:
        """Return the point of least ⟨g, x⟩, g not 0."""
        along = self.half_axes * (self.axes.T @ g)
        point: Array = -self.axes @ (self.half_axes * along) / np.linalg.norm(along)
        return point

    def project(self, x: Array) -> Array:
        """Return the nearest point, by Newton's method on the secular equation."""
        y = self.axes.T @ x
        squares = self.half_axes**2
        if np.sum(y**2 / squares) <= 1:
            return x
        # y h²/(h² + ν), ‖·/h‖ = 1, with ν ≥ 0; 1/‖·‖ - 1 is concave, so Newton does not overshoot.
        nu = 0.0
        for _ in range(100):
            scaled = self.half_axes * y / (squares + nu)
            length = np.linalg.norm(scaled)
            slope = np.sum(scaled**2 / (squares + nu)) / length
            step = length / slope * (length - 1)
            nu += step
            if step <= 1e-14 * nu:
                break
        point: Array = self.axes @ (squares * y / (squares + nu))
        return point


def thin_ellipsoid(dim: int, kappa: float, *, n_long: int = 2, rng: RNGLike) -> ThinEllipsoid:
    """Return an ellipsoid in ℝᵈ with ``n_long`` half-axes of length 1 and the others 1/κ.

    Examples
    --------
    >>> needle = thin_ellipsoid(5, 100.0, rng=0)
    >>> needle.half_axes.tolist()
    [1.0, 1.0, 0.01, 0.01, 0.01]
    """
    check_integer("dim", dim, at_least=2)
    check_number("kappa", kappa, at_least=1)
    stream = as_generator(rng)
    axes = random_rotation(dim, stream)
    half_axes = np.where(np.arange(dim) < n_long, 1.0, 1.0 / kappa)
    direction = stream.normal(size=dim)
    start = 0.5 * axes @ (half_axes * direction / np.linalg.norm(direction))
    return ThinEllipsoid(axes, half_axes, start)


@dataclass(frozen=True)
class Polytope:
    """The polytope {x: Ax ≤ b} with a ball inside and one around.

    Attributes
    ----------
    A : ndarray of shape (m, d)
        Rows of length 1.
    b : ndarray of shape (m,)
    start : ndarray of shape (d,)
        A point inside.
    inner_radius, radius : float
        Of a ball inside, and of one around ``start`` that holds the set.
    """

    A: Array
    b: Array
    start: Array
    inner_radius: float
    radius: float


def thin_polytope(dim: int, n_rows: int, kappa: float, *, rng: RNGLike) -> Polytope:
    """Return random halfspaces that touch an ellipsoid, half of its axes 1/κ, within a box.

    Parameters
    ----------
    dim : int
    n_rows : int
        Rows beside the 2d of the box, which is [-2, 2]ᵈ.
    kappa : float
        Ratio of the ellipsoid's axes.
    rng : int or Generator

    Examples
    --------
    >>> tall = thin_polytope(4, 50, 100.0, rng=0)
    >>> tall.A.shape, bool(np.all(tall.A @ tall.start <= tall.b))
    ((58, 4), True)
    """
    check_integer("n_rows", n_rows, at_least=1)
    stream = as_generator(rng)
    ellipsoid = thin_ellipsoid(dim, kappa, n_long=dim - dim // 2, rng=stream)
    # Normals at random points of the ellipsoid's surface.
    surface = stream.normal(size=(n_rows, dim))
    normals = (surface / ellipsoid.half_axes) @ ellipsoid.axes.T
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    offsets = np.linalg.norm(normals @ ellipsoid.axes * ellipsoid.half_axes, axis=1)
    A = np.vstack([normals, np.eye(dim), -np.eye(dim)])
    b = np.concatenate([offsets, np.full(2 * dim, 2.0)])
    radius = 2 * np.sqrt(dim) + float(np.linalg.norm(ellipsoid.start))
    return Polytope(A, b, ellipsoid.start, ellipsoid.inner_radius, radius)


def drifting_losses(dim: int, horizon: int, *, rng: RNGLike) -> Array:
    """Return gradients of linear losses, noise about a fixed direction, of length at most 1.

    Returns
    -------
    ndarray of shape (horizon, dim)
        Gaussian of variance 1/d per coordinate plus 0.3 times a random unit vector.

    Examples
    --------
    >>> bool(np.linalg.norm(drifting_losses(3, 100, rng=0), axis=1).max() <= 1 + 1e-12)
    True
    """
    stream = as_generator(rng)
    direction = stream.normal(size=dim)
    direction /= np.linalg.norm(direction)
    gradients = stream.normal(size=(horizon, dim)) / np.sqrt(dim) + 0.3 * direction
    lengths = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped: Array = gradients / np.maximum(1.0, lengths)
    return clipped


def random_rotation(dim: int, rng: np.random.Generator) -> Array:
    """Return an orthogonal matrix of shape (dim, dim), uniformly distributed."""
    Q, R = np.linalg.qr(rng.normal(size=(dim, dim)))
    rotation: Array = Q * np.sign(np.diag(R))
    return rotation
