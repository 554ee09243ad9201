"""How fast gradient and Hessian of a function grow, and which generalized smoothness follows."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator
from thalweg.training.precond_hessian import (
    DENSE,
    preconditioned_curvature,
    preconditioned_eigenvalues,
)
from thalweg.training.precond_kernels import KernelName, NonlinearPreconditioner, Structure, norm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Vector = NDArray[np.float64]
DESCENT_STEPS = 20
PROBES = 16  # Gaussian vectors that estimate the norm of a Hessian too large to assemble
SLACK = 0.25  # by which a fitted degree may miss its integer
L1_GRID = tuple(2.0**k for k in range(-6, 7))
VANISHED = 1e-6  # of Hessian times radius: what 20 steps leave of a gradient that can be 0


@dataclass(frozen=True, eq=False)
class SmoothnessReport:
    """What `smoothness_report` has seen at points on spheres around x0.

    Attributes
    ----------
    radii : ndarray of shape (k,)
    hessian_norm : ndarray of shape (k,)
        The largest ``‖∇²f‖_F`` on each sphere.
    gradient_norm : ndarray of shape (k,)
        The smallest ``‖∇f‖`` found on each sphere.
    growth_degree_hessian, growth_degree_gradient : float
        Slopes of their logarithms over log radius, between the two outermost spheres. The second
        one is -∞ if the gradient vanishes somewhere on the outermost.
    sufficient_condition : bool
        Whether the gradient's degree is at least R + 1 and the Hessian's at most R, for R as given
        or any R. Then f is (L₀, L₁)-smooth for every L₁ and anisotropically smooth for every L̄,
        with some L₀ and L.
    witness : ndarray of shape (n,) or None
        If the condition fails, the unit vector from x0 to the point on the outermost sphere where
        the gradient is smallest: it does not grow there as the Hessian does.
    L0L1_fit : dict of float to float
        For each L₁ the least L₀ with ``‖∇²f‖₂ ≤ L₀ + L₁ ‖∇f‖`` at all sampled points.
    aniso_L : dict of float to float
        For each L̄ the largest eigenvalue of ``∇²φ*(∇f/L̄) ∇²f``, over L̄: the least L for which the
        sampled points allow (L, L̄)-anisotropic smoothness. Any γ < 1/L is a step size.
    """

    radii: Vector
    hessian_norm: Vector
    gradient_norm: Vector
    growth_degree_hessian: float
    growth_degree_gradient: float
    sufficient_condition: bool
    witness: Vector | None
    L0L1_fit: dict[float, float]
    aniso_L: dict[float, float]  # noqa: N815

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot both norms over the radius, with their fitted degrees."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        for name, norms, degree in (
            ("largest Hessian", self.hessian_norm, self.growth_degree_hessian),
            ("smallest gradient", self.gradient_norm, self.growth_degree_gradient),
        ):
            ax.loglog(self.radii, norms, marker="o", label=f"{name}, degree {degree:.2f}")
        ax.set(xlabel="distance to x0", ylabel="norm")
        ax.set_title(f"sufficient condition: {'yes' if self.sufficient_condition else 'no'}")
        ax.legend()
        return ax


def smoothness_report(
    fun: Callable[[Vector], float],
    jac: Callable[[Vector], ArrayLike],
    hess_or_hvp: Callable[..., ArrayLike],
    *,
    x0: ArrayLike,
    radii: Sequence[float] = (1, 2, 4, 8, 16),
    n_dirs: int = 32,
    R: float | None = None,
    Lbars: Sequence[float] = (0.1, 1.0, 10.0),
    kernel: KernelName = "cosh",
    structure: Structure = "isotropic",
    rng: RNGLike = None,
) -> SmoothnessReport:
    """Measure how gradient and Hessian grow, and which step sizes that allows.

    A function satisfies the paper's sufficient condition for both notions of generalized
    smoothness if polynomials with ``‖∇²f(x)‖_F ≤ p_R(‖x‖)`` and ``‖∇f(x)‖ ≥ q_{R+1}(‖x‖)`` exist,
    of degrees R and R + 1. Both norms are sampled on spheres around x0: at random points, and at
    the points where 20 steps on the sphere have made the gradient small, so that orbits are found
    along which the gradient stays bounded. This is evidence, no proof.

    Parameters
    ----------
    fun : callable
        ``fun(x) -> float``; only asked whether it is finite on the spheres.
    jac : callable
        ``jac(x) -> array_like of shape (n,)``.
    hess_or_hvp : callable
        ``hess(x)`` of shape (n, n), or, if it takes two arguments, ``hvp(x, v)`` of shape (n,).
    x0 : array_like of shape (n,)
        The center, usually 0.
    radii : sequence of k >= 2 floats, default (1, 2, 4, 8, 16)
        Increasing. They should reach far beyond the stationary points of f.
    n_dirs : int, default 32
        Points per sphere; as many again from the descent.
    R : float, optional
        The degree that is in question; by default any.
    Lbars : sequence of float, default (0.1, 1, 10)
        The L̄ for which L is wanted.
    kernel, structure
        As in `minimize_nlprecond`, for L.
    rng : int, numpy.random.Generator or None

    Returns
    -------
    SmoothnessReport

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, or a function that is not finite on the spheres.
    scipy.sparse.linalg.ArpackNoConvergence
        If an eigenvalue of a Hessian with more than 300 variables does not converge.

    Notes
    -----
    About 40 gradients and Hessian-vector products per point. Up to n = 300 the Hessian is assembled
    and O(n³) per point and L̄ added; beyond, Lanczos iterations find the eigenvalues, and the
    Frobenius norm is estimated from 16 products with Gaussian vectors.

    *Ours.* The condition is the paper's; this test of it is ours.

    References
    ----------
    "Nonlinear preconditioning under generalized smoothness", NeurIPS 2025.

    Examples
    --------
    The gradient of this quartic vanishes on a line along which its Hessian grows:

    >>> import numpy as np
    >>> from thalweg.training import smoothness_report
    >>> def f(x):
    ...     return (x[0] ** 2 - x[1] ** 2) ** 2 / 4
    >>> def gradient(x):
    ...     return (x[0] ** 2 - x[1] ** 2) * x * [1, -1]
    >>> def hessian(x):
    ...     a, b = x
    ...     return np.array([[3 * a**2 - b**2, -2 * a * b], [-2 * a * b, 3 * b**2 - a**2]])
    >>> report = smoothness_report(f, gradient, hessian, x0=[0, 0], rng=0)
    >>> report.sufficient_condition, np.abs(report.witness).round(3)
    (False, array([0.707, 0.707]))
    """
    center = check_array("x0", x0, shape=("n",))
    spheres = _check_radii(radii)
    n_dirs = check_integer("n_dirs", n_dirs, at_least=1)
    degree = None if R is None else check_number("R", R, at_least=0)
    preconditioners = {
        float(Lbar): NonlinearPreconditioner(kernel, structure, Lbar) for Lbar in Lbars
    }
    stream = as_generator(rng)
    function = _Function(fun, jac, hess_or_hvp, center, stream)

    samples: list[list[_Sample]] = []
    # The same directions for all spheres, so that degrees of polynomials come out exactly.
    directions = list(_unit_vectors(n_dirs, center.size, stream))
    for radius in spheres:
        # An orbit continues where it was on the sphere before.
        starts = directions + [_witness(sphere) for sphere in samples[-1:]]
        lower = [function.with_smaller_gradient(u, radius) for u in starts]
        samples.append([function.sample(u, radius, preconditioners) for u in directions + lower])

    hessian_norm = np.array([max(s.frobenius for s in sphere) for sphere in samples])
    gradient_norm = np.array([min(s.gradient_norm for s in sphere) for sphere in samples])
    of_hessian = _degree(spheres, hessian_norm)
    of_gradient = _degree(spheres, gradient_norm)
    if gradient_norm[-1] <= VANISHED * hessian_norm[-1] * spheres[-1]:
        of_gradient = -np.inf
    lowest = of_hessian if degree is None else degree
    holds = of_hessian <= lowest + SLACK and of_gradient >= lowest + 1 - SLACK
    every = [s for sphere in samples for s in sphere]
    return SmoothnessReport(
        radii=spheres,
        hessian_norm=hessian_norm,
        gradient_norm=gradient_norm,
        growth_degree_hessian=of_hessian,
        growth_degree_gradient=of_gradient,
        sufficient_condition=holds,
        witness=None if holds else _witness(samples[-1]),
        L0L1_fit={
            L1: max(0.0, *(s.spectral - L1 * s.gradient_norm for s in every)) for L1 in L1_GRID
        },
        aniso_L={Lbar: max(s.curvatures[Lbar] for s in every) / Lbar for Lbar in preconditioners},
    )


class _Sample(NamedTuple):
    direction: Vector
    gradient_norm: float
    frobenius: float
    spectral: float
    curvatures: dict[float, float]


class _Function:
    """The user's functions around the center."""

    def __init__(
        self,
        fun: Callable[[Vector], float],
        jac: Callable[[Vector], ArrayLike],
        hess_or_hvp: Callable[..., ArrayLike],
        center: Vector,
        stream: np.random.Generator,
    ) -> None:
        self.fun = fun
        self.jac = jac
        self.second = hess_or_hvp
        self.takes_vector = _takes_two(hess_or_hvp)
        self.center = center
        self.stream = stream

    def gradient(self, x: Vector) -> Vector:
        return check_array("jac(x)", self.jac(x.copy()), shape=x.shape)

    def hvp(self, x: Vector, v: Vector) -> Vector:
        if self.takes_vector:
            return check_array("hvp(x, v)", self.second(x.copy(), v), shape=x.shape)
        return self.hessian(x) @ v

    def hessian(self, x: Vector) -> Vector:
        if self.takes_vector:
            return np.column_stack([self.hvp(x, column) for column in np.eye(x.size)])
        return check_array("hess(x)", self.second(x.copy()), shape=(x.size, x.size))

    def with_smaller_gradient(self, direction: Vector, radius: float) -> Vector:
        """Return a unit vector to where ‖∇f‖² is smaller on the sphere, 20 steps on."""
        scale = norm(self.gradient(self.center + radius * direction)) ** 2
        if scale == 0:
            return direction

        def relative(v: Vector) -> tuple[float, Vector]:
            length = norm(v)
            unit = v / length
            x = self.center + radius * unit
            g = self.gradient(x)
            slope = self.hvp(x, g) * (radius / length)
            return 0.5 * norm(g) ** 2 / scale, (slope - (unit @ slope) * unit) / scale

        end = minimize(
            relative,
            direction,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": DESCENT_STEPS, "ftol": 0.0, "gtol": 1e-12},
        ).x
        return np.asarray(end / norm(end))

    def sample(
        self,
        direction: Vector,
        radius: float,
        preconditioners: dict[float, NonlinearPreconditioner],
    ) -> _Sample:
        x = self.center + radius * direction
        value = float(self.fun(x.copy()))
        if not math.isfinite(value):
            raise ValueError(f"fun must be finite on the spheres, got {value} at x0 + {radius:g} u")
        g = self.gradient(x)
        if x.size <= DENSE or not self.takes_vector:
            H = self.hessian(x)
            eigenvalues = np.asarray(np.linalg.eigvalsh(H), dtype=np.float64)
            frobenius = norm(eigenvalues)
            spectral = float(np.abs(eigenvalues).max())
            curvatures = {
                Lbar: float(preconditioned_eigenvalues(g, H, p)[-1])
                for Lbar, p in preconditioners.items()
            }
            return _Sample(direction, norm(g), frobenius, spectral, curvatures)

        def product(v: Vector) -> Vector:
            return self.hvp(x, v)

        probes = self.stream.standard_normal((PROBES, x.size))
        frobenius = math.sqrt(np.mean([norm(product(v)) ** 2 for v in probes]))
        plain = NonlinearPreconditioner("quadratic")
        ends = [
            preconditioned_curvature(g, product, which=w, preconditioner=plain, tol=1e-3)
            for w in ("smallest", "largest")
        ]
        curvatures = {
            Lbar: preconditioned_curvature(g, product, which="largest", preconditioner=p, tol=1e-3)
            for Lbar, p in preconditioners.items()
        }
        return _Sample(direction, norm(g), frobenius, max(map(abs, ends)), curvatures)


def _unit_vectors(count: int, n: int, stream: np.random.Generator) -> Vector:
    vectors = stream.standard_normal((count, n))
    return cast(Vector, vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def _witness(sphere: list[_Sample]) -> Vector:
    return min(sphere, key=lambda sample: sample.gradient_norm).direction


def _degree(radii: Vector, norms: Vector) -> float:
    """Return the slope of log norm over log radius between the two outermost spheres."""
    inner, outer = np.log(np.maximum(norms[-2:], np.finfo(np.float64).tiny))
    return float((outer - inner) / np.log(radii[-1] / radii[-2]))


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def _check_radii(radii: Sequence[float]) -> Vector:
    spheres = check_array("radii", radii, shape=("k",))
    if len(spheres) < 2 or spheres[0] <= 0 or (np.diff(spheres) <= 0).any():
        raise ValueError(f"radii must be at least two increasing numbers > 0, got {list(radii)}")
    return spheres
