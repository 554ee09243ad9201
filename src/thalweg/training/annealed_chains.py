"""Chains of SGD whose gradients are noisy: what annealed SGD and its report run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_finite, check_number
from thalweg.common.minimizers import check_gradient_function, takes_rng

Array = NDArray[np.float64]

# Noise is drawn for many steps at once: a call of the generator costs more than a step.
NOISE_STEPS = 256
NOISE_ENTRIES = 2**20
POWER_ITERATIONS = 20
CURVATURE_POINTS = 10
GRADIENT_REPEATS = 32


class Objective:
    """Values and gradients of many points at once, with counts.

    With ``vectorized`` the functions take points of shape (chains, n); otherwise they are called
    for each. A ``jac`` with a parameter ``rng`` gets ``stream``.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        jac: Any,
        args: tuple[Any, ...],
        vectorized: bool,
        stream: np.random.Generator,
    ) -> None:
        if not callable(fun):
            raise TypeError(f"fun must be callable, got {type(fun).__name__}")
        if jac is None:
            raise ValueError("jac must be given: SGD needs gradients, got None")
        self._fun, self._jac, self._args = fun, check_gradient_function(jac), args
        self._vectorized = vectorized
        self._random = {"rng": stream} if takes_rng(jac) else {}
        self.nfev = 0
        self.njev = 0

    def values(self, x: Array) -> Array:
        """Return fun at points (chains, n), of shape (chains,)."""
        self.nfev += len(x)
        if self._vectorized:
            return check_array(
                "fun(x)", self._fun(x.copy(), *self._args), shape=(len(x),), finite=False
            )
        return np.array([float(self._fun(row.copy(), *self._args)) for row in x])

    def gradients(self, x: Array) -> Array:
        """Return jac at points (chains, n), of the same shape."""
        self.njev += len(x)
        if self._vectorized:
            given = self._jac(x.copy(), *self._args, **self._random)
            return check_array("jac(x)", given, shape=x.shape, finite=False)
        rows = [self._jac(row.copy(), *self._args, **self._random) for row in x]
        return check_array("jac(x)", np.stack(rows), shape=x.shape, finite=False)

    def scalar(self, x: Array) -> tuple[float, Array]:
        """Return value and gradient at one point (n,), as L-BFGS-B asks for them."""
        return float(self.values(x[None])[0]), self.gradients(x[None])[0]


class Noise:
    """Standard normal noise of shape (chains, n) for one step after the other.

    Every chain has a stream of its own: its path does not depend on how many others there are.
    """

    def __init__(self, n_chains: int, n: int, rng: np.random.Generator) -> None:
        self._streams = rng.spawn(n_chains)
        self._shape = (max(1, min(NOISE_STEPS, NOISE_ENTRIES // (n_chains * n))), n)
        self._blocks = self._draw()

    def __call__(self) -> Array:
        """Return the noise of the next step."""
        return next(self._blocks)

    def _draw(self) -> Iterator[Array]:
        block = np.empty((self._shape[0], len(self._streams), self._shape[1]))
        while True:
            for chain, stream in enumerate(self._streams):
                block[:, chain] = stream.standard_normal(self._shape)
            yield from block


class Box:
    """Reflection at bounds; None for no bounds."""

    def __init__(self, low: Array, high: Array) -> None:
        self.low, self.high = low, high

    def reflect(self, x: Array) -> Array:
        """Return x mirrored into the box; what is still outside then is projected."""
        x = np.where(x < self.low, 2 * self.low - x, x)
        x = np.where(x > self.high, 2 * self.high - x, x)
        clipped: Array = np.clip(x, self.low, self.high)
        return clipped


def check_starts(x0: ArrayLike, n_chains: int) -> Array:
    """Return starts of shape (chains, n): a single ``x0`` is repeated.

    Raises
    ------
    TypeError, ValueError
        If it is neither (n,) nor (chains, n), or not finite.
    """
    array = np.asarray(x0)
    if np.iscomplexobj(array):
        raise TypeError("x0 must be real, got complex numbers")
    if array.ndim <= 1:
        start = check_array("x0", np.atleast_1d(array), shape=("n",))
        return np.tile(start, (n_chains, 1))
    return check_array("x0", array, shape=("chains", "n")).copy()


def check_box(name: str, bounds: Any, n: int) -> Box | None:
    """Return bounds, given as SciPy takes them (pairs, or `scipy.optimize.Bounds`).

    Raises
    ------
    ValueError
        If they do not fit, or a lower bound is not below its upper one.
    """
    if bounds is None:
        return None
    if hasattr(bounds, "lb"):
        low = np.broadcast_to(np.asarray(bounds.lb, dtype=np.float64), n)
        high = np.broadcast_to(np.asarray(bounds.ub, dtype=np.float64), n)
    else:
        pairs = [(-np.inf if a is None else a, np.inf if b is None else b) for a, b in bounds]
        table = check_array(name, pairs, shape=(n, 2), finite=False)
        low, high = table.T
    if not (low < high).all():
        raise ValueError(f"{name} must have every lower bound below its upper bound, got {bounds}")
    return Box(low.astype(np.float64), high.astype(np.float64))


def draw_points(starts: Array, domain: Box | None, n: int, rng: np.random.Generator) -> Array:
    """Return n points of the domain, uniform; without one, around the starts."""
    if domain is not None and np.isfinite([domain.low, domain.high]).all():
        return rng.uniform(domain.low, domain.high, (n, starts.shape[1]))
    scale = max(1.0, float(np.linalg.norm(starts, axis=1).max()))
    centers = starts[rng.integers(len(starts), size=n)]
    return centers + scale * rng.uniform(-1, 1, centers.shape)


def largest_curvature(
    objective: Objective, points: Array, rng: np.random.Generator, noise: Array
) -> float:
    """Return the largest |eigenvalue| of the Hessian at the points, by power iteration.

    ``noise`` is the standard deviation of the gradients' entries: the differences are taken over
    a distance at which it does not drown them, 1e-4 without noise.
    """
    scale = max(1.0, float(np.abs(points).max()))
    length = (1e-4 if not noise.any() else 1e-1) * scale
    direction = rng.standard_normal(points.shape)
    curvature = np.zeros(len(points))
    for _ in range(POWER_ITERATIONS):
        norm = np.linalg.norm(direction, axis=1, keepdims=True)
        direction = np.divide(direction, norm, out=np.zeros_like(direction), where=norm > 0)
        ahead = objective.gradients(points + length * direction)
        behind = objective.gradients(points - length * direction)
        direction = check_finite("jac(x)", (ahead - behind) / (2 * length))
        curvature = np.maximum(curvature, np.linalg.norm(direction, axis=1))
    return float(curvature.max())


def gradient_noise(objective: Objective, x: Array) -> Array:
    """Return the standard deviation of each entry of the gradient at x (n,), from 32 calls."""
    repeats = objective.gradients(np.tile(x, (GRADIENT_REPEATS, 1)))
    deviation: Array = check_finite("jac(x)", repeats).std(axis=0, ddof=1)
    return deviation


def check_noise_kind(noise: Literal["inject", "given"], measured: Array) -> None:
    """Refuse ``noise="given"`` for a deterministic gradient.

    Raises
    ------
    ValueError
        If all 32 gradients were the same.
    """
    if noise == "given" and not measured.any():
        raise ValueError(
            'noise must be "inject" for a deterministic jac: "given" needs a random one, and 32 '
            "gradients at x0 were identical"
        )


def check_sigma(sigma: Any) -> float | None:
    """Return a standard deviation ≥ 0, or None for "auto"."""
    if isinstance(sigma, str):
        if sigma != "auto":
            raise ValueError(f'sigma must be a number >= 0 or "auto", got {sigma!r}')
        return None
    return check_number("sigma", sigma, at_least=0)
