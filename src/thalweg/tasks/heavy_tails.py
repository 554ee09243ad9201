"""Quadratics under α-stable gradient noise: many independent runs of an optimizer at once."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

with requires("training"):
    import torch
    from torch import Tensor, nn

Noise = Literal["entries", "rank one"]


def stable_noise(alpha: float, shape: tuple[int, ...], rng: RNGLike) -> NDArray[np.float64]:
    """Draw symmetric α-stable numbers, whose characteristic function is exp(-|t|^α).

    For ``alpha=2`` they are normal with variance 2; below, their moments of order α and more are
    infinite. The method is Chambers', Mallows' and Stuck's (JASA 1976).

    Parameters
    ----------
    alpha : float in (0, 2]
        The tail index.
    shape : tuple of int
    rng : int, numpy.random.Generator or None

    Examples
    --------
    >>> x = stable_noise(1.0, (100_000,), rng=0)  # Cauchy: its quartiles are -1 and 1
    >>> bool(abs(np.quantile(x, 0.75) - 1) < 0.02)
    True
    """
    check_number("alpha", alpha, above=0, at_most=2)
    rng = as_generator(rng)
    if alpha == 2:
        return np.asarray(np.sqrt(2) * rng.standard_normal(shape))
    angle = rng.uniform(-np.pi / 2, np.pi / 2, shape)
    waiting = rng.standard_exponential(shape)
    return np.asarray(
        np.sin(alpha * angle)
        / np.cos(angle) ** (1 / alpha)
        * (np.cos((1 - alpha) * angle) / waiting) ** ((1 - alpha) / alpha)
    )


class HeavyTailedQuadratic(NamedTuple):
    """The loss f(x) = ½ Σ cᵢ xᵢ², seen through gradients c x + noise.

    Attributes
    ----------
    curvature, scale, x0 : Tensor of one shape, float32
        c, the scale of each entry's noise, and where every run starts.
    noise : {"entries", "rank one"}
        Independent α-stable entries; or s u vᵀ, with one α-stable s and standard normal vectors u
        and v, as the gradient of a single sample is.
    """

    curvature: Tensor
    scale: Tensor
    x0: Tensor
    noise: Noise


@lru_cache
def tailed_diagonal() -> HeavyTailedQuadratic:
    """Return 100 variables, curvatures 0.01 … 1 and scales 0.02 … 1, both geometric, from ones."""
    curvature = torch.logspace(-2, 0, 100)
    scale = torch.logspace(float(np.log10(0.02)), 0, 100)
    return HeavyTailedQuadratic(curvature, scale, torch.ones(100), "entries")


@lru_cache
def tailed_matrix(noise: Noise) -> HeavyTailedQuadratic:
    """Return f = ½‖D^½ X‖² for X of shape (32, 32) and D = 0.1 … 1, geometric, with unit noise.

    X starts standard normal, the same for all.
    """
    check_choice("noise", noise, ("entries", "rank one"))
    curvature = torch.logspace(-1, 0, 32)[:, None].expand(32, 32).contiguous()
    x0 = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    return HeavyTailedQuadratic(curvature, torch.ones(32, 32), x0, noise)


class HeavyTailedRuns:
    """Independent runs on one problem, with a fresh noisy gradient for each at every query.

    An optimizer that treats entries alike takes ``parameter``, which holds all runs; one that
    looks at whole vectors or matrices takes ``parameters``, one per run, in the same memory.

    Parameters
    ----------
    problem : HeavyTailedQuadratic
    alpha : float in (0, 2]
        The tail index of the noise.
    runs, steps : int ≥ 1
        How many runs there are, and how often `query` can be called.
    seed : int ≥ 0

    Attributes
    ----------
    parameter : torch.nn.Parameter of shape (runs, *shape)
    parameters : list of torch.nn.Parameter of that shape without ``runs``

    Examples
    --------
    >>> runs = HeavyTailedRuns(tailed_diagonal(), alpha=1.2, runs=8, steps=100, seed=0)
    >>> optimizer = torch.optim.SGD([runs.parameter], lr=0.01)
    >>> for _ in range(100):
    ...     runs.query()
    ...     optimizer.step()
    >>> runs.losses().shape
    torch.Size([8])
    """

    def __init__(
        self, problem: HeavyTailedQuadratic, *, alpha: float, runs: int, steps: int, seed: int
    ) -> None:
        check_integer("runs", runs, at_least=1)
        check_integer("steps", steps, at_least=1)
        check_integer("seed", seed, at_least=0)
        self._problem = problem
        self._queries = 0
        self._steps = steps
        points = problem.x0.expand(runs, *problem.x0.shape).clone()
        gradients = torch.zeros_like(points)
        if problem.noise == "rank one":
            self._factors = _rank_one(alpha, (steps, runs, *problem.x0.shape), seed)
        else:
            self._entries = _entries(alpha, (steps, runs, *problem.x0.shape), seed)
        self.parameter = nn.Parameter(points)
        self.parameter.grad = gradients
        self.parameters = [nn.Parameter(point) for point in points]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def query(self) -> None:
        """Write a fresh noisy gradient into ``.grad``.

        Raises
        ------
        IndexError
            After ``steps`` calls.
        """
        if self._queries == self._steps:
            raise IndexError(f"there is noise for {self._steps} queries only")
        gradient = self.parameter.grad
        assert gradient is not None
        torch.mul(self.parameter.detach(), self._problem.curvature, out=gradient)
        gradient.addcmul_(self._noise(self._queries), self._problem.scale)
        self._queries += 1

    def losses(self) -> Tensor:
        """Return the loss of every run, shape (runs,)."""
        x = self.parameter.detach().double()
        return 0.5 * (x.square() * self._problem.curvature).flatten(1).sum(1)

    def _noise(self, query: int) -> Tensor:
        if self._problem.noise == "entries":
            return self._entries[query]
        left, right = self._factors
        return left[query][..., :, None] * right[query][..., None, :]


# Contenders of a claim meet the same noise one after another.
@lru_cache(maxsize=12)
def _entries(alpha: float, shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.from_numpy(stable_noise(alpha, shape, seed)).float()


@lru_cache(maxsize=12)
def _rank_one(alpha: float, shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Return s u of shape (..., m) and v of shape (..., n)."""
    *outer, m, n = shape
    rng = as_generator(seed)
    left = stable_noise(alpha, (*outer, 1), rng) * rng.standard_normal((*outer, m))
    right = rng.standard_normal((*outer, n))
    return torch.from_numpy(left).float(), torch.from_numpy(right).float()
