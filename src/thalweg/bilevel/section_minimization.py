"""Minimization of a convex function over an affine set, until an estimate of the gap is small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.optimize import minimize

from thalweg.bilevel.central_differences import central_gradient

Array = NDArray[np.float64]

FAR = 1e8  # a convex function that is lower out there has no minimum
MAX_NEWTON = 100
MOST_DENSE = 500  # unknowns of BFGS, whose matrix is dense
SMALLEST_GTOL = 1e-13


class RecessionError(Exception):
    """A function has no minimum over a set: it falls for ever along ``direction``."""

    def __init__(self, direction: Array) -> None:
        super().__init__(f"unbounded along {direction}")
        self.direction = direction


@dataclass(frozen=True, eq=False)
class Section:
    """A function to minimize: the upper level at a fixed x, or its negative.

    Parameters
    ----------
    fun : callable
        ``fun(y) -> float``.
    grad : callable, optional
        ``grad(y) -> (n,)``; None for central differences.
    hess : callable, optional
        ``hess(y) -> (n, n)``.
    lift : callable, optional
        Maps a direction of the unknowns to one of y; None if they are the same.
    """

    fun: Callable[[Array], float]
    grad: Callable[[Array], Array] | None = None
    hess: Callable[[Array], Array] | None = None
    lift: Callable[[Array], Array] | None = None

    def gradient(self, y: Array) -> Array:
        """Return the gradient at y."""
        return central_gradient(self.fun, y) if self.grad is None else self.grad(y)

    def along(self, origin: Array, basis: Array) -> Section:
        """Return the function of z ↦ origin + basis z."""
        hess = self.hess
        return Section(
            lambda z: self.fun(origin + basis @ z),
            # Without derivatives it is cheaper to difference in the fewer unknowns z.
            None if self.grad is None else lambda z: basis.T @ self.gradient(origin + basis @ z),
            None if hess is None else lambda z: basis.T @ hess(origin + basis @ z) @ basis,
            lambda d: basis @ d,
        )

    def projected(self, origin: Array, free: Callable[[Array], Array]) -> Section:
        """Return the function of v ↦ origin + Pv, with the orthogonal projection P = ``free``."""
        return Section(
            lambda v: self.fun(origin + free(v)),
            lambda v: free(self.gradient(origin + free(v))),
            None,
            free,
        )


def minimize_section(section: Section, start: Array, tol: float) -> tuple[Array, float, float]:
    """Minimize a convex function without constraints.

    Newton steps with a Hessian of a few unknowns, BFGS without, L-BFGS for many. They stop when the
    Newton decrement gᵀH⁻¹g, twice what a quadratic would still fall by, is at most ``tol``.

    Returns
    -------
    minimizer, minimum, decrement

    Raises
    ------
    RecessionError
        If there is no minimum.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if section.hess is not None and len(start) <= MOST_DENSE:
            found = _newton(section, section.hess, start, tol)
            if found is not None:
                return found
        return _quasi_newton(section, start, tol)


def _newton(
    section: Section, hess: Callable[[Array], Array], z: Array, tol: float
) -> tuple[Array, float, float] | None:
    """Take damped Newton steps; return None where the Hessian is not positive definite."""
    value, decrement = section.fun(z), np.inf
    for _ in range(MAX_NEWTON):
        g = section.gradient(z)
        _, step, info = lapack.dposv(hess(z), -g)
        if info != 0 or not np.all(np.isfinite(step)):
            return None
        decrement = float(-g @ step)
        if decrement <= tol:
            return z, value, decrement
        length = 1.0
        while not (moved := section.fun(z + length * step)) <= value - 1e-4 * length * decrement:
            length /= 2
            if length < 1e-10:  # rounding: no lower value can be told from this one
                return z, value, decrement
        z, value = z + length * step, moved
        if np.linalg.norm(z) > FAR:
            return None
    return z, value, decrement


def _quasi_newton(section: Section, z: Array, tol: float) -> tuple[Array, float, float]:
    limit = FAR * (1 + float(np.linalg.norm(z)))
    dense = len(z) <= MOST_DENSE

    def fun(point: Array) -> float:
        value = section.fun(point)
        if np.linalg.norm(point) > limit or not np.isfinite(value):
            _refuse_recession(section, z, point - z)
        return value

    gtol = min(1e-2, tol**0.5)  # the gap is of the order of the squared gradient
    while True:
        options: Any = {"gtol": gtol} if dense else {"gtol": gtol, "ftol": 0.0, "maxiter": 15_000}
        result: Any = minimize(
            fun,
            z,
            jac=section.gradient,
            method="BFGS" if dense else "L-BFGS-B",
            options=options,
        )
        z, g = result.x, result.jac
        decrement = float(g @ (result.hess_inv @ g if dense else result.hess_inv.matvec(g)))
        if decrement <= tol or gtol <= SMALLEST_GTOL:
            break
        gtol = max(gtol / 10, SMALLEST_GTOL)
    value = float(result.fun)
    for direction in (-g, np.random.default_rng(0).standard_normal(len(z))):
        # A maximum of a convex function is stationary too; nothing but a look around tells.
        for signed in (direction, -direction):
            if _is_lower_far_out(section, z, signed, value):
                _refuse_recession(section, z, signed)
    return z, value, max(decrement, 0.0)


def _is_lower_far_out(section: Section, z: Array, direction: Array, value: float) -> bool:
    norm = float(np.linalg.norm(direction))
    if norm == 0:
        return False
    reached = section.fun(z + FAR / norm * direction)
    return reached < value - 1e-6 * (1 + abs(value))


def _refuse_recession(section: Section, z: Array, direction: Array) -> None:
    unit = direction / np.linalg.norm(direction)
    raise RecessionError(unit if section.lift is None else section.lift(unit))
