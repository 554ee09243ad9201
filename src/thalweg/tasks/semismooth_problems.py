"""Smooth problems whose gradients have kinks, with a generalized Hessian: for Newton methods."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires

with requires("peers"):
    from sklearn import datasets
with requires("training"):
    import torch
    from torch import Tensor

Array = NDArray[np.float64]


@lru_cache
def _digits() -> tuple[Array, NDArray[np.int64]]:
    data = datasets.load_digits()
    return data.data / 16, data.target.astype(np.int64)


@dataclass(frozen=True, eq=False)
class SquaredHingeSVM:
    """The mean squared hinge loss of a linear model, with a ridge penalty.

    Parameters
    ----------
    A : ndarray of shape (n, d)
        Features times labels ±1.
    mu : float > 0
        Weight of ‖w‖²/2.
    """

    A: Array
    mu: float

    @property
    def d(self) -> int:
        """The number of weights."""
        return int(self.A.shape[1])

    @property
    def x0(self) -> Array:
        """The start, 0."""
        return np.zeros(self.d)

    def __call__(self, w: Array) -> tuple[float, Array]:
        """Return the value and the gradient."""
        missing = np.maximum(0, 1 - self.A @ w)
        value = float(missing @ missing) / len(self.A) + self.mu * float(w @ w) / 2
        return value, -2 / len(self.A) * (missing @ self.A) + self.mu * w

    def hessian(self, w: Array) -> Array:
        """Return a generalized Hessian: the rows inside the margin, squared."""
        short = self.A[self.A @ w < 1]
        H: Array = 2 / len(self.A) * (short.T @ short)
        H.flat[:: self.d + 1] += self.mu
        return H

    def product(self, w: Array, p: Array) -> Array:
        """Return the product of the Hessian at w and p."""
        applied: Array = (self.A @ w < 1) * (self.A @ p)
        return 2 / len(self.A) * (applied @ self.A) + self.mu * p

    def loss(self, w: Tensor) -> Tensor:
        """Return the value of a tensor, for automatic differentiation."""
        missing = (1 - torch.from_numpy(self.A) @ w).clamp(min=0)
        return missing.square().mean() + self.mu / 2 * w.square().sum()


def digits_svm(
    rng: np.random.Generator, features: int, *, shifts: int = 1, mu: float = 1e-4
) -> SquaredHingeSVM:
    """Return a classifier of digits below and above 5, on random cosine features.

    Parameters
    ----------
    rng : numpy.random.Generator
        Draws the features.
    features : int ≥ 1
    shifts : int from 1 to 9, default 1
        How many copies of the 1797 images, moved by up to a pixel, there are.
    mu : float > 0, default 1e-4

    Examples
    --------
    >>> svm = digits_svm(np.random.default_rng(0), 50, shifts=2)
    >>> svm.A.shape
    (3594, 50)
    """
    check_integer("features", features, at_least=1)
    check_integer("shifts", shifts, at_least=1, at_most=9)
    check_number("mu", mu, above=0)
    images, digits = _digits()
    moves = [(i, j) for i in (0, 1, -1) for j in (0, 1, -1)][:shifts]
    pixels = np.concatenate(
        [np.roll(images.reshape(-1, 8, 8), move, axis=(1, 2)).reshape(-1, 64) for move in moves]
    )
    frequencies = rng.standard_normal((64, features)) / 2
    phases = rng.uniform(0, 2 * np.pi, features)
    labels = np.where(np.tile(digits, shifts) < 5, 1.0, -1.0)
    A = np.sqrt(2 / features) * np.cos(pixels @ frequencies + phases) * labels[:, None]
    return SquaredHingeSVM(A, mu)


@dataclass(frozen=True, eq=False)
class TorchProblem:
    """A function of a vector tensor, and a start.

    Parameters
    ----------
    loss : callable
        Tensor (d,) to scalar tensor, float64.
    x0 : ndarray of shape (d,)
    """

    loss: Callable[[Tensor], Tensor] = field(repr=False)
    x0: Array = field(repr=False)

    @property
    def d(self) -> int:
        """The number of variables."""
        return len(self.x0)


def penalized_factorization(
    rng: np.random.Generator,
    *,
    images: int = 100,
    rank: int = 4,
    rho: float = 10.0,
    ridge: float = 1e-2,
) -> TorchProblem:
    """Return a factorization V ≈ WH of digits whose negative entries are penalized.

    It minimizes ½‖V - WH‖² + (ρ/2)‖min(x, 0)‖² + (ridge/2)‖x‖² over x = (W, H), where V holds
    64 pixels of ``images`` random digits. It is not convex, and the penalty has kinks.

    Examples
    --------
    >>> penalized_factorization(np.random.default_rng(0)).d
    656
    """
    data, _ = _digits()
    V = torch.from_numpy(data[rng.choice(len(data), images, replace=False)].T.copy())
    split = 64 * rank

    def loss(x: Tensor) -> Tensor:
        W, H = x[:split].reshape(64, rank), x[split:].reshape(rank, images)
        misfit = (V - W @ H).square().sum() / 2
        negative = x.clamp(max=0).square().sum()
        return misfit + rho / 2 * negative + ridge / 2 * x.square().sum()

    scale = float(np.sqrt(V.mean() / rank))
    x0 = 2 * scale * rng.random(split + rank * images)
    return TorchProblem(loss, x0)


def lipschitz_network(
    rng: np.random.Generator,
    *,
    images: int = 500,
    hidden: int = 16,
    bound: float = 2.0,
    rho: float = 10.0,
) -> TorchProblem:
    """Return the training loss of a network whose layers are to have a spectral norm ≤ ``bound``.

    64 → ``hidden`` → 10 with the activation max(0, z)²/2, cross-entropy on random digits, and a
    penalty (ρ/2) Σ max(0, σ - bound)² over the singular values of the layers: the squared distance
    to the matrices within the bound, whose gradient has a kink where σ reaches it.

    Examples
    --------
    >>> lipschitz_network(np.random.default_rng(0), hidden=8).d
    610
    """
    data, digits = _digits()
    chosen = rng.choice(len(data), images, replace=False)
    inputs, labels = torch.from_numpy(data[chosen]), torch.from_numpy(digits[chosen])
    shapes = [(hidden, 64), (hidden,), (10, hidden), (10,)]
    sizes = [int(np.prod(shape)) for shape in shapes]

    def loss(x: Tensor) -> Tensor:
        W1, b1, W2, b2 = layers(x)
        active = (inputs @ W1.T + b1).clamp(min=0).square() / 2
        fit = torch.nn.functional.cross_entropy(active @ W2.T + b2, labels)
        excess = sum((singular_values(W) - bound).clamp(min=0).square().sum() for W in (W1, W2))
        return fit + rho / 2 * excess

    def layers(x: Tensor) -> list[Tensor]:
        parts = torch.split(x, sizes)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    x0 = np.concatenate(
        [
            rng.standard_normal(size) * (2 / shape[-1]) ** 0.5
            if len(shape) == 2
            else np.zeros(size)
            for shape, size in zip(shapes, sizes, strict=True)
        ]
    )
    return TorchProblem(loss, x0)


def singular_values(W: Tensor) -> Tensor:
    """Return the singular values, ascending; they can be differentiated twice in a batch."""
    gram = W @ W.T if W.shape[0] <= W.shape[1] else W.T @ W
    values: Tensor = torch.linalg.eigvalsh(gram).clamp(min=1e-12).sqrt()
    return values
