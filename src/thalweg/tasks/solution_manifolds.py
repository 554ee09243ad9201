"""Bilevel problems whose lower level has a manifold of minimizers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    from sklearn.datasets import load_diabetes

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class CurvedManifold:
    """f = ½‖y - a‖² + 0.05‖x‖² over the minimizers of g = ½‖c(y) - Bx‖², c quadratic.

    Parameters
    ----------
    W : Tensor of shape (m, d)
        The linear part of c.
    Q : Tensor of shape (m, d, d)
        The quadratic one.
    B : Tensor of shape (m, p)
    target : Tensor of shape (d,)
        a.
    """

    W: torch.Tensor
    Q: torch.Tensor
    B: torch.Tensor
    target: torch.Tensor

    def f(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the upper loss."""
        return (y - self.target).square().sum() / 2 + 0.05 * x.dot(x)

    def g(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the lower loss."""
        values = self.W @ y + (self.Q @ y) @ y
        return (values - self.B @ x).square().sum() / 2


def curved_manifold(rng: np.random.Generator, m: int = 2, d: int = 5, p: int = 3) -> CurvedManifold:
    """Return a random one: minimizers of dimension d - m, for x of dimension p."""
    W, B = rng.standard_normal((m, d)), rng.standard_normal((m, p))
    Q = 0.15 * rng.standard_normal((m, d, d))
    parts = (W, Q + Q.transpose(0, 2, 1), B, rng.standard_normal(d))
    return CurvedManifold(*(torch.tensor(part) for part in parts))


@dataclass(frozen=True, eq=False)
class AffineManifold:
    """f = ½‖y - a‖² + 0.05‖x‖² over the minimizers of g = ½‖Ay - Bx‖².

    Parameters
    ----------
    A : Tensor of shape (m, d)
    B : Tensor of shape (m, p)
    target : Tensor of shape (d,)
        a.
    """

    A: torch.Tensor
    B: torch.Tensor
    target: torch.Tensor

    def f(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the upper loss."""
        return (y - self.target).square().sum() / 2 + 0.05 * x.dot(x)

    def g(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the lower loss."""
        return (self.A @ y - self.B @ x).square().sum() / 2

    def phi(self, x: torch.Tensor) -> float:
        """Return the best upper loss over the minimizers."""
        y = self.target + torch.linalg.pinv(self.A) @ (self.B @ x - self.A @ self.target)
        return float(self.f(x, y))

    def optimum(self) -> float:
        """Return the least Φ."""
        M = torch.linalg.pinv(self.A)
        # Φ = ½‖M(Bx - Aa)‖² + 0.05‖x‖².
        H = (M @ self.B).T @ (M @ self.B) + 0.1 * torch.eye(self.B.shape[1], dtype=torch.float64)
        return self.phi(torch.linalg.solve(H, (M @ self.B).T @ (M @ self.A @ self.target)))


def affine_manifold(
    rng: np.random.Generator, condition: float, d: int = 8, rank: int = 4, p: int = 3
) -> AffineManifold:
    """Return a random one whose Hessian AᵀA has this condition number on its range."""
    U = np.linalg.qr(rng.standard_normal((rank, rank)))[0]
    V = np.linalg.qr(rng.standard_normal((d, rank)))[0]
    values = np.sqrt(np.geomspace(1, 1 / condition, rank))
    A = U @ np.diag(values) @ V.T
    # Right sides that vary as the rows of A do, so that the minimizers move at one scale.
    B = U @ np.diag(values) @ rng.standard_normal((rank, p))
    return AffineManifold(torch.tensor(A), torch.tensor(B), torch.tensor(rng.standard_normal(d)))


@dataclass(frozen=True, eq=False)
class RuggedSphere:
    """A sphere of dimension 2 in q dimensions, turned at random, and an f with many minima on it.

    Parameters
    ----------
    rotation : Tensor of shape (q, q)
    waves : Tensor of shape (8, 3)
        Frequencies of f.
    phases : Tensor of shape (8,)
    """

    rotation: torch.Tensor
    waves: torch.Tensor
    phases: torch.Tensor

    def height(self, u: torch.Tensor) -> torch.Tensor:
        """Return f of points of the sphere, of shape (..., 3)."""
        return torch.cos(u @ self.waves.T + self.phases).mean(dim=-1)

    def f(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the upper loss."""
        return self.height((self.rotation @ y)[:3]) + 0 * x.sum()

    def g(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the lower loss, whose minimizers are the sphere."""
        z = self.rotation @ y
        return (z[:3].dot(z[:3]) - 1).square() / 4 + z[3:].square().sum() / 2

    def least(self) -> float:
        """Return the least f, from a fine net."""
        angle = torch.linspace(0, torch.pi, 700, dtype=torch.float64)
        turn = torch.linspace(0, 2 * torch.pi, 1400, dtype=torch.float64)
        a, b = torch.meshgrid(angle, turn, indexing="ij")
        net = torch.stack([a.sin() * b.cos(), a.sin() * b.sin(), a.cos()], dim=-1)
        return float(self.height(net).min())

    def start(self, rng: np.random.Generator) -> torch.Tensor:
        """Return a random point of the sphere."""
        u = rng.standard_normal(3)
        z = np.zeros(len(self.rotation))
        z[:3] = u / np.linalg.norm(u)
        return self.rotation.T @ torch.tensor(z)


def rugged_sphere(rng: np.random.Generator, ambient: int) -> RuggedSphere:
    """Return a random one in so many dimensions."""
    waves, phases = 4 * rng.standard_normal((8, 3)), rng.uniform(0, 2 * np.pi, 8)
    rotation = np.linalg.qr(rng.standard_normal((ambient, ambient)))[0]
    return RuggedSphere(*(torch.tensor(part) for part in (rotation, waves, phases)))


@dataclass(frozen=True, eq=False)
class RandomFeatures:
    """Regression on more random features than rows, with widths of the inputs to be learned.

    Features are cos((u ∘ exp(x))Ω + φ): x scales the inputs. g is the error of the training rows,
    which many y fit; f that of validation rows, with a small ridge.

    Parameters
    ----------
    train, validation, test : tuple of Tensor
        Inputs of shape (n, 10) and targets.
    omega : Tensor of shape (10, d)
    phase : Tensor of shape (d,)
    """

    train: tuple[torch.Tensor, torch.Tensor]
    validation: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    omega: torch.Tensor
    phase: torch.Tensor

    def error(
        self, x: torch.Tensor, y: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Return half the mean squared error on rows."""
        features = torch.cos((rows[0] * x.exp()) @ self.omega + self.phase)
        features = features * (2 / len(self.phase)) ** 0.5
        residual: torch.Tensor = features @ y - rows[1]
        return residual.square().mean() / 2

    def f(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the upper loss."""
        return self.error(x, y, self.validation) + 1e-3 * y.dot(y)

    def g(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the lower loss."""
        return self.error(x, y, self.train)


def random_features(seed: int, features: int = 120, rows: int = 40) -> RandomFeatures:
    """Return one on the diabetes data; validation rows are three times the training rows."""
    rng = np.random.default_rng(seed)
    X, b = load_diabetes(return_X_y=True)
    order = rng.permutation(len(b))
    X, b = torch.tensor((X / X.std(axis=0))[order]), torch.tensor(((b - b.mean()) / b.std())[order])
    cuts = [0, rows, 4 * rows, len(b)]
    parts = [(X[i:j], b[i:j]) for i, j in pairwise(cuts)]
    omega = torch.tensor(0.2 * rng.standard_normal((X.shape[1], features)))
    phase = torch.tensor(rng.uniform(0, 2 * np.pi, features))
    return RandomFeatures(parts[0], parts[1], parts[2], omega, phase)
