"""Bilevel problems of several agents, with noise of heavy tails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Tail = Literal["student", "pareto", "none"]


@dataclass(frozen=True, eq=False)
class AgentQuadratics:
    r"""Agents whose lower level has many minimizers, and whose gradients are noisy.

    .. math:: g_i(x, y) = \tfrac12 \|C y - B_i x - e_i\|^2, \qquad
              f_i(x, y) = \tfrac12 \|y - a_i\|^2 + \rho \sum_k \frac{x_k^2}{1 + x_k^2}

    C has less than full rank: g has the Polyak-Lojasiewicz property and is not strongly convex.
    Among the minimizers y of the mean of g, f picks the best one.

    Parameters
    ----------
    C : ndarray of shape (r, q)
    B : ndarray of shape (n, r, p)
    e : ndarray of shape (n, r)
    a : ndarray of shape (n, q)
    tail : {"student", "pareto", "none"}
        Symmetric or asymmetric noise, centered, of independent entries.
    index : float
        Its tail index.
    scale : float, default 1
        A factor of both losses.
    multiplicative : float, default 0
        How much samples of B vary, by a factor with noise of the same tail: noise that depends on
        x and y.
    rho : float, default 0.1
        The weight of a nonconvex regularizer.
    noise : float, default 0.3
        The factor of the noise of gradients.
    """

    C: Array
    B: Array
    e: Array
    a: Array
    tail: Tail
    index: float
    scale: float = 1.0
    multiplicative: float = 0.0
    rho: float = 0.1
    noise: float = 0.3

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of agents n, and the dimensions p and q."""
        return len(self.a), self.B.shape[2], self.C.shape[1]

    def scaled(self, scale: float) -> AgentQuadratics:
        """Return the problem with both losses, and their noise, times ``scale``."""
        return replace(self, scale=scale)

    def draw(self, rng: np.random.Generator) -> Any:
        """Return one sample of every agent: noise of f and of g, and factors of B."""
        n, p, q = self.sizes
        noise = self.noise * self._noise(rng, (2, n, p + q))
        if self.multiplicative == 0:
            return noise, None
        return noise, 1 + self.multiplicative * self._noise(rng, (n, 1, 1))

    def grad_f(self, X: Array, Y: Array, batch: Any) -> tuple[Array, Array]:
        """Return the agents' stochastic gradients of f."""
        noise, p = batch[0][0], X.shape[1]
        slope = self.rho * 2 * X / (1 + X * X) ** 2
        return self.scale * (slope + noise[:, :p]), self.scale * (Y - self.a + noise[:, p:])

    def grad_g(self, X: Array, Y: Array, batch: Any) -> tuple[Array, Array]:
        """Return the agents' stochastic gradients of g."""
        noise, p = batch[0][1], X.shape[1]
        B = self.B if batch[1] is None else self.B * batch[1]
        residual = Y @ self.C.T - np.matmul(B, X[:, :, None])[:, :, 0] - self.e
        to_x = -np.matmul(residual[:, None, :], B)[:, 0]
        return (
            self.scale * (to_x + noise[:, :p]),
            self.scale * (residual @ self.C + noise[:, p:]),
        )

    def solution(self, x: Array) -> Array:
        """Return y*(x): the minimizer of the mean of g that is best for f, with ``scale`` 1."""
        a = self.a.mean(axis=0)
        target = self.B.mean(axis=0) @ x + self.e.mean(axis=0)
        y: Array = a + self._pinv @ (target - self.C @ a)
        return y

    def hypergradient(self, x: Array) -> Array:
        """Return the gradient of the upper level at x, without noise and with ``scale`` 1."""
        jacobian = self._pinv @ self.B.mean(axis=0)
        slope = self.rho * 2 * x / (1 + x * x) ** 2
        gradient: Array = jacobian.T @ (self.solution(x) - self.a.mean(axis=0)) + slope
        return gradient

    @cached_property
    def _pinv(self) -> Array:
        inverse: Array = np.asarray(np.linalg.pinv(self.C), dtype=np.float64)
        return inverse

    def _noise(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        draws: dict[Tail, Callable[[], Array]] = {
            "student": lambda: rng.standard_t(self.index, shape),
            "pareto": lambda: rng.pareto(self.index, shape) - 1 / (self.index - 1),
            "none": lambda: np.zeros(shape),
        }
        return draws[self.tail]()


def agent_quadratics(
    rng: np.random.Generator,
    *,
    tail: Tail = "pareto",
    index: float = 1.5,
    multiplicative: float = 0.0,
    n: int = 8,
    p: int = 6,
    q: int = 10,
    rank: int = 6,
) -> AgentQuadratics:
    """Return a random problem of n agents, p upper and q lower variables.

    Singular values of C lie between 0.7 and 1.3, and agents differ in B, e and a. A step of x moves
    the best y by about as much, so that steps of one length can follow.
    """
    U, _, Vt = np.linalg.svd(rng.standard_normal((rank, q)), full_matrices=False)
    C = U @ np.diag(np.linspace(0.7, 1.3, rank)) @ Vt
    common = 0.5 * rng.standard_normal((rank, p)) / np.sqrt(p)
    B = common + 0.15 * rng.standard_normal((n, rank, p)) / np.sqrt(p)
    e, a = rng.standard_normal((n, rank)) / 2, 0.5 + rng.standard_normal((n, q)) / 2
    return AgentQuadratics(C, B, e, a, tail, index, multiplicative=multiplicative)
