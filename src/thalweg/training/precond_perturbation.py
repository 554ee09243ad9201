"""Perturbations with which preconditioned descent leaves saddle points."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.training.precond_descent import Descent, Point

Vector = NDArray[np.float64]
ESCAPED = 1e-10  # relative decrease of f beyond which a perturbation has left a saddle point
PRACTICAL_RADIUS = 1e-2
PRACTICAL_INTERVAL = 50


def perturbation_parameters(
    *,
    L: float,
    Lbar: float,
    rho: float,
    eps: float,
    n: int,
    delta_f: float,
    delta: float,
    c: float = 1.0,
) -> dict[str, float]:
    """Return the parameters with which perturbed descent provably leaves saddle points.

    Parameters
    ----------
    L, Lbar : float
        f is (L, L̄)-anisotropically smooth.
    rho : float
        Lipschitz constant of the preconditioned Hessian ``∇²φ*(∇f/L̄) ∇²f``.
    eps : float
        ε of the second-order stationarity that is wanted.
    n : int
        Number of variables.
    delta_f : float
        A bound on f(x0) - min f.
    delta : float in (0, 1)
        Probability of failure.
    c : float, default 1
        The absolute constant of the theorem.

    Returns
    -------
    dict
        ``chi`` is χ = max(1, log₂(L² √n Δ / (c √ρ L̄ ε^{5/2} δ))), ``gamma`` 1/L, ``radius``
        r = ε/(400 χ³), which γ multiplies before the noise is added to x, ``interval``
        𝒯 = L χ / √(ρε), and ``threshold`` 𝒢 = min(1, √L̄) r: perturb where ``L̄ φ(∇φ*(∇f/L̄))``
        is at most 𝒢²/2 and the last perturbation is more than 𝒯 steps ago.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    References
    ----------
    "Nonlinear preconditioning under generalized smoothness", NeurIPS 2025, Algorithm 2.

    Examples
    --------
    >>> table = perturbation_parameters(
    ...     L=4.0, Lbar=1.0, rho=1.0, eps=0.01, n=100, delta_f=1.0, delta=0.1
    ... )
    >>> round(table["chi"], 2), round(table["interval"])
    (27.25, 1090)
    """
    for name, value in {
        "L": L,
        "Lbar": Lbar,
        "rho": rho,
        "eps": eps,
        "delta_f": delta_f,
        "c": c,
    }.items():
        check_number(name, value, above=0)
    check_integer("n", n, at_least=1)
    check_number("delta", delta, above=0, below=1)
    # As a sum of logarithms, for ε^{5/2} underflows first.
    chi = (
        2 * math.log2(L)
        + 0.5 * math.log2(n)
        + math.log2(delta_f)
        - math.log2(c)
        - 0.5 * math.log2(rho)
        - math.log2(Lbar)
        - 2.5 * math.log2(eps)
        - math.log2(delta)
    )
    chi = max(1.0, chi)
    radius = eps / (400 * chi**3)
    return {
        "chi": chi,
        "gamma": 1 / L,
        "radius": radius,
        "interval": L * chi / math.sqrt(rho * eps),
        "threshold": min(1.0, math.sqrt(Lbar)) * radius,
    }


class NoiseScale(NamedTuple):
    """When to perturb, how far (None: relative to ‖x‖), and for how many steps to wait."""

    threshold: float
    radius: float | None
    interval: float


def noise_scale(
    n: int,
    gamma: float | None,
    Lbar: float,
    rho: float | None,
    eps: float,
    delta: float,
    delta_f: float | None,
    *,
    radius: float | None,
    interval: int | None,
) -> NoiseScale:
    """Return the theory's scale if ``rho`` is given and a practical one if not, with overrides."""
    check_number("eps", eps, above=0)
    if rho is None:
        scale = NoiseScale(min(1.0, math.sqrt(Lbar)) * eps, None, PRACTICAL_INTERVAL)
    elif gamma is None or delta_f is None:
        raise ValueError("gamma and delta_f must be given with rho, as the theory needs them")
    else:
        table = perturbation_parameters(
            L=1 / gamma, Lbar=Lbar, rho=rho, eps=eps, n=n, delta_f=delta_f, delta=delta
        )
        scale = NoiseScale(table["threshold"], gamma * table["radius"], table["interval"])
    if radius is not None:
        scale = scale._replace(radius=check_number("radius", radius, above=0))
    if interval is not None:
        scale = scale._replace(interval=check_integer("interval", interval, at_least=1))
    return scale


class SaddleSearch:
    """Perturbs a descent where it is nearly stationary, and judges what came of it."""

    def __init__(self, scale: NoiseScale, tol: float, rng: np.random.Generator) -> None:
        self.scale = scale
        self.tol = tol
        self.rng = rng
        self.n_perturb = 0
        self.escaped: list[tuple[int, float, float]] = []
        self._before: Point | None = None
        self._step = 0
        self._deadline = 0.0
        self._near_a_minimum = False

    def __call__(self, descent: Descent) -> bool:
        """Judge or make a perturbation if one is due; return whether x passes for a minimum."""
        if self._before is not None and descent.nit >= self._deadline:
            before, after = self._before, descent.point
            self._before = None
            if after.fun < before.fun - ESCAPED * max(1.0, abs(before.fun)):
                self.escaped.append((self._step, before.fun, after.fun))
                self._near_a_minimum = False
            else:
                descent.point = before
                self._near_a_minimum = True
                if before.norm <= self.tol:
                    return True
        if self._before is None and self._is_due(descent):
            self._perturb(descent)
        return False

    def end_interval(self) -> bool:
        """Have the perturbation judged at the next call; return whether there is one."""
        self._deadline = -math.inf
        return self._before is not None

    def keep_lower(self, descent: Descent) -> None:
        """Undo a perturbation that has not been judged yet if f is not lower now."""
        if self._before is not None and not descent.point.fun < self._before.fun:
            descent.point = self._before

    def _is_due(self, descent: Descent) -> bool:
        point = descent.point
        if self._near_a_minimum:
            return point.norm <= self.tol
        measure = descent.preconditioner.stationarity(point.gradient, point.norm)
        return measure <= self.scale.threshold**2 / 2

    def _perturb(self, descent: Descent) -> None:
        # The descent goes on to write into the arrays that it has.
        before = descent.point._replace(x=descent.point.x.copy())
        radius = self.scale.radius
        if radius is None:
            radius = PRACTICAL_RADIUS * max(1.0, float(np.linalg.norm(before.x)))
        self._before = before
        self._step = descent.nit
        self._deadline = descent.nit + self.scale.interval
        self.n_perturb += 1
        descent.point = descent.evaluate(
            before.x + uniform_in_ball(before.x.size, radius, self.rng)
        )


def uniform_in_ball(n: int, radius: float, rng: np.random.Generator) -> Vector:
    """Return a point of the ball ``B_0(radius)`` in n dimensions, uniformly."""
    direction = rng.standard_normal(n)
    length = radius * rng.random() ** (1 / n)
    return np.asarray(length / float(np.linalg.norm(direction)) * direction)
