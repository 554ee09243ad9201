"""Quadratics with Gaussian gradient noise, on which the expected loss of a schedule is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch

Vector = NDArray[np.float64]
NOISE_BLOCK = 256


@dataclass(frozen=True, eq=False)
class NoisyQuadratic:
    """The loss L(x) = ½ Σ λᵢ xᵢ², seen through gradients λx + N(0, s² I).

    Parameters
    ----------
    eigenvalues : ndarray of shape (d,)
        The curvatures λ ≥ 0; the largest is the smoothness β.
    x0 : ndarray of shape (d,)
        Where optimization starts.

    Examples
    --------
    >>> problem = qsc()
    >>> float(problem.loss(problem.x0).round(2)), problem.smoothness
    (3.05, 1.0)
    """

    eigenvalues: Vector
    x0: Vector

    @property
    def dimension(self) -> int:
        """The number of variables d."""
        return len(self.eigenvalues)

    @property
    def smoothness(self) -> float:
        """β, the largest curvature."""
        return float(self.eigenvalues.max())

    def loss(self, x: Vector) -> Vector:
        """Return L for points of shape (..., d)."""
        return np.asarray(0.5 * (np.square(x) @ self.eigenvalues))

    def gradient(self, x: Vector, variance: float, rng: np.random.Generator) -> Vector:
        """Return one noisy gradient at every point of shape (..., d)."""
        noise = rng.standard_normal(np.shape(x))
        return np.asarray(self.eigenvalues * x + math.sqrt(variance) * noise)

    def stability(self, x: Vector, variance: float) -> Vector:
        """Return the exact stability ratio ‖λx‖² / (‖λx‖² + d s²) at points of shape (..., d)."""
        signal = np.square(self.eigenvalues * x).sum(-1)
        total = signal + self.dimension * variance
        return np.asarray(np.divide(signal, total, out=np.ones_like(total), where=total > 0))

    def expected_loss(self, step_sizes: ArrayLike, variance: float) -> Vector:
        """Return E L after SGD with given step sizes, by the exact recursion of E xᵢ².

        Parameters
        ----------
        step_sizes : array_like of shape (T,) or (T, k)
            η of every step, for k schedules at once.
        variance : float
            s², the variance of each entry of the noise.

        Returns
        -------
        ndarray of shape () or (k,)
            Infinite where the schedule diverges.
        """
        steps = np.asarray(step_sizes, dtype=np.float64)[..., None]
        second = np.broadcast_to(self.x0**2, (*steps.shape[1:-1], self.dimension))
        with np.errstate(over="ignore", invalid="ignore"):
            for step in steps:
                second = (1 - step * self.eigenvalues) ** 2 * second + step**2 * variance
            loss = 0.5 * (second @ self.eigenvalues)
        return np.where(np.isfinite(loss), loss, np.inf)


@lru_cache
def qsc() -> NoisyQuadratic:
    """Return the strongly convex problem: curvatures i/250, i ≤ 250, equal xᵢ, L(x0) = 3.05."""
    eigenvalues = np.arange(1, 251) / 250
    return NoisyQuadratic(eigenvalues, np.full(250, np.sqrt(2 * 3.05 / eigenvalues.sum())))


@lru_cache
def qwc() -> NoisyQuadratic:
    """Return the nearly flat problem: curvatures 2⁰ … 2⁻²⁴, equal xᵢ, ‖x0‖² = 1.33."""
    return NoisyQuadratic(np.exp2(-np.arange(25.0)), np.full(25, np.sqrt(1.33 / 25)))


@lru_cache
def best_expected_loss(problem: NoisyQuadratic, variance: float, steps: int) -> float:
    """Return the least expected loss of constant steps η and of η/√t, over η.

    The grid has twelve values per decade, from 1e-4 to 1e3; a schedule tuned in hindsight, at
    this noise level and this horizon.
    """
    sizes = np.logspace(-4, 3, 85)
    decay = 1 / np.sqrt(np.arange(1, check_integer("steps", steps, at_least=1) + 1))
    constant = problem.expected_loss(np.broadcast_to(sizes, (steps, len(sizes))), variance)
    decaying = problem.expected_loss(decay[:, None] * sizes, variance)
    return float(min(constant.min(), decaying.min()))


class NoisyChains:
    """Parameters that start at x0, one per noise level, and fresh noisy gradients for all of them.

    A new optimizer for ``parameters`` is stepped after every call of `query`, which writes into
    their ``.grad``; all levels advance together, in one matrix.

    Parameters
    ----------
    problem : NoisyQuadratic
    variances : sequence of k floats
        s² of each level.
    rng : numpy.random.Generator
        Where the noise comes from.

    Attributes
    ----------
    parameters : list of k torch.nn.Parameter of shape (d,), float64

    Examples
    --------
    >>> chains = NoisyChains(qwc(), [0.0, 1e-4], np.random.default_rng(0))
    >>> optimizer = torch.optim.SGD(chains.parameters, lr=1.0)
    >>> for _ in range(10):
    ...     chains.query()
    ...     optimizer.step()
    >>> bool(chains.losses()[0] < chains.losses()[1])
    True
    """

    def __init__(
        self, problem: NoisyQuadratic, variances: Sequence[float], rng: np.random.Generator
    ) -> None:
        levels = check_array("variances", variances, shape=("k",))
        if (levels < 0).any():
            raise ValueError(f"variances must be >= 0, got {levels.min()}")
        self._problem = problem
        self._rng = rng
        self._scales = np.sqrt(levels)[:, None]
        self._noise = np.empty((NOISE_BLOCK, len(levels), problem.dimension))
        self._used = NOISE_BLOCK
        self._points = np.tile(problem.x0, (len(levels), 1))
        self._gradients = np.empty_like(self._points)
        # Parameters and gradients are views of the rows: one product serves all levels.
        self.parameters = [torch.nn.Parameter(row) for row in torch.from_numpy(self._points)]
        for parameter, row in zip(self.parameters, torch.from_numpy(self._gradients), strict=True):
            parameter.grad = row

    def query(self) -> None:
        """Write a fresh noisy gradient into the ``.grad`` of every parameter."""
        if self._used == NOISE_BLOCK:
            self._rng.standard_normal(out=self._noise)
            self._noise *= self._scales
            self._used = 0
        np.multiply(self._points, self._problem.eigenvalues, out=self._gradients)
        self._gradients += self._noise[self._used]
        self._used += 1

    def losses(self) -> Vector:
        """Return the loss at every parameter, shape (k,)."""
        return self._problem.loss(self._points)
