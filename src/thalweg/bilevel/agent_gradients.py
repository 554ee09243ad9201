"""Gradients of all agents' losses at once: functions of arrays, or torch losses of one agent each.

A *point* is a pair (X, Y) with a row for each agent. Gradients are taken of several points with one
batch, which is what variance reduction and the penalty's two lower-level points need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_array

Array = NDArray[np.float64]
Rows = Any  # ndarray or Tensor with a row for each agent
Points = Sequence[tuple[Rows, ...]]
Pairs = list[tuple[Rows, Rows]]


class AgentGradients(Protocol):
    """Gradients and second derivatives of the agents' losses, and the layout of the variables."""

    x0: Any
    y0: Any
    has_hvp: bool

    def f(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓf, ∇ᵧf) of each agent at each point (X, Y)."""

    def g(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓg, ∇ᵧg) of each agent at each point (X, Y)."""

    def hvp(self, points: Points, batch: Any) -> Pairs:
        """Return (∇²ₓᵧg V, ∇²ᵧᵧg V) of each agent at each (X, Y, V)."""

    def x_tree(self, vector: Any) -> Any:
        """Return a vector of x in the layout of x0."""

    def y_tree(self, vector: Any) -> Any:
        """Return a vector of y in the layout of y0."""


class ArrayGradients:
    """Gradients by NumPy functions that take the rows of all agents.

    Parameters
    ----------
    f, g : callable
        ``f(X, Y, batch)`` returns (∇ₓf, ∇ᵧf) of shapes (n, p) and (n, q).
    hvp : callable or None
        ``hvp(X, Y, V, batch)`` returns (∇²ₓᵧg V, ∇²ᵧᵧg V) of the same shapes.
    x0, y0 : array_like of shapes (p,) and (q,)
    n : int
    """

    def __init__(self, f: Any, g: Any, hvp: Any, x0: Any, y0: Any, n: int) -> None:
        for name, function in (("f", f), ("g", g), ("hvp", hvp)):
            if not callable(function) and not (name == "hvp" and function is None):
                raise TypeError(
                    f"{name} must be a function of (X, Y, ...) or a list of torch losses, got "
                    f"{type(function).__name__}"
                )
        self._functions = {"f": f, "g": g, "hvp": hvp}
        self.has_hvp = hvp is not None
        self.x0 = _start("x0", x0)
        self.y0 = _start("y0", y0)
        self._shapes = ((n, len(self.x0)), (n, len(self.y0)))

    def f(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓf, ∇ᵧf) at each point."""
        return [self._call("f", *point, batch) for point in points]

    def g(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓg, ∇ᵧg) at each point."""
        return [self._call("g", *point, batch) for point in points]

    def hvp(self, points: Points, batch: Any) -> Pairs:
        """Return (∇²ₓᵧg V, ∇²ᵧᵧg V) at each point."""
        return [self._call("hvp", *point, batch) for point in points]

    def x_tree(self, vector: Any) -> Any:
        """Return the vector."""
        return vector

    def y_tree(self, vector: Any) -> Any:
        """Return the vector."""
        return vector

    def _call(self, name: str, *arguments: Any) -> tuple[Array, Array]:
        pair = self._functions[name](*arguments)
        shapes = tuple(np.shape(part) for part in pair)
        if shapes != self._shapes:
            raise ValueError(f"{name} must return arrays of shapes {self._shapes}, got {shapes}")
        return pair  # type: ignore[no-any-return]


def agent_gradients(f: Any, g: Any, hvp: Any, x0: Any, y0: Any, n: int) -> AgentGradients:
    """Return the gradients of what the user gave as f and g, for n agents.

    Raises
    ------
    TypeError, ValueError
        If f and g are neither functions nor lists of n torch losses.
    """
    lists = [isinstance(given, (list, tuple)) for given in (f, g)]
    if not any(lists):
        return ArrayGradients(f, g, hvp, x0, y0, n)
    if not all(lists):
        raise TypeError("f and g must both be functions, or both be lists of torch losses")
    from thalweg.bilevel.agent_losses import LossGradients

    if hvp is not None:
        raise ValueError("hvp must be None for lists of torch losses, which are differentiated")
    return LossGradients(f, g, x0, y0, n)


class CountedGradients:
    """Gradients that count the samples they are taken of.

    Attributes
    ----------
    n_f, n_g, n_hvp : int
        Evaluations of one sample by one agent.
    """

    def __init__(self, gradients: AgentGradients, n: int) -> None:
        self.uncounted = gradients
        self._n = n
        self.n_f = self.n_g = self.n_hvp = 0
        self.x0, self.y0, self.has_hvp = gradients.x0, gradients.y0, gradients.has_hvp
        self.x_tree, self.y_tree = gradients.x_tree, gradients.y_tree

    def f(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓf, ∇ᵧf) at each point."""
        self.n_f += self._n * len(points)
        return self.uncounted.f(points, batch)

    def g(self, points: Points, batch: Any) -> Pairs:
        """Return (∇ₓg, ∇ᵧg) at each point."""
        self.n_g += self._n * len(points)
        return self.uncounted.g(points, batch)

    def hvp(self, points: Points, batch: Any) -> Pairs:
        """Return (∇²ₓᵧg V, ∇²ᵧᵧg V) at each point."""
        self.n_hvp += self._n * len(points)
        return self.uncounted.hvp(points, batch)


Directions = Callable[[Sequence[Rows], Any], list[Rows]]


def penalty_directions(
    gradients: AgentGradients, blocks: Sequence[slice], penalty: float, concatenate: Any
) -> Directions:
    r"""Return the function that gives (dˣ, dʸ, dᶻ) at each of some rows (x, y, z).

    .. math:: d^x = \nabla_x f(x, y) + \lambda (\nabla_x g(x, y) - \nabla_x g(x, z)), \quad
              d^y = \nabla_y f(x, y) / \lambda + \nabla_y g(x, y), \quad d^z = \nabla_y g(x, z)
    """

    def at(rows: Sequence[Rows], batch: Any) -> list[Rows]:
        split = [[theta[:, block] for block in blocks] for theta in rows]
        upper = gradients.f([(x, y) for x, y, _ in split], batch)
        # y and z see the same samples: else the noise of both would be in their difference.
        points = [(x, y) for x, y, _ in split] + [(x, z) for x, _, z in split]
        lower = gradients.g(points, batch)
        return [
            concatenate([f_x + penalty * (g_x - h_x), f_y / penalty + g_y, h_y], axis=1)
            for (f_x, f_y), (g_x, g_y), (h_x, h_y) in zip(
                upper, lower[: len(rows)], lower[len(rows) :], strict=True
            )
        ]

    return at


def implicit_directions(
    gradients: AgentGradients,
    blocks: Sequence[slice],
    terms: int,
    eta: float,
    mix: Callable[[Rows], Rows],
    concatenate: Any,
) -> Directions:
    r"""Return the function that gives (dˣ, dʸ) at each of some rows (x, y).

    .. math:: d^x = \nabla_x f - \nabla^2_{xy} g \, v, \quad d^y = \nabla_y g, \quad
              v_{k+1} = W (v_k + \eta (\nabla_y f - \nabla^2_{yy} g \, v_k))
    """

    def at(rows: Sequence[Rows], batch: Any) -> list[Rows]:
        points = [tuple(theta[:, block] for block in blocks) for theta in rows]
        upper, lower = gradients.f(points, batch), gradients.g(points, batch)
        v = [mix(eta * f_y) for _, f_y in upper]
        for _ in range(terms - 1):
            products = gradients.hvp(_with(points, v), batch)
            v = [
                mix(v_i + eta * (f_y - Hv))
                for v_i, (_, f_y), (_, Hv) in zip(v, upper, products, strict=True)
            ]
        mixed = gradients.hvp(_with(points, v), batch)
        return [
            concatenate([f_x - Jv, g_y], axis=1)
            for (f_x, _), (Jv, _), (_, g_y) in zip(upper, mixed, lower, strict=True)
        ]

    return at


def largest_curvature(gradients: AgentGradients, X: Rows, Y: Rows, batch: Any) -> float:
    """Return the largest eigenvalue of the agents' lower-level Hessians, by power iterations."""
    V = Y * 0 + 1 / Y.shape[1] ** 0.5
    V[:, ::2] *= -0.5  # not orthogonal to a leading vector of equal or of alternating signs
    largest = 0.0
    for _ in range(30):
        ((_, V),) = gradients.hvp([(X, Y, V)], batch)
        lengths = (V * V).sum(axis=1, keepdims=True) ** 0.5
        largest = float(lengths.max())
        V = V / lengths.clip(min=1e-300 if isinstance(V, np.ndarray) else 1e-30)
    return largest


def _with(points: Points, v: Sequence[Rows]) -> Points:
    return [(*point, v_i) for point, v_i in zip(points, v, strict=True)]


def _start(name: str, value: Any) -> Array:
    start = check_array(name, value, shape=(name[0],))
    if len(start) == 0:
        raise ValueError(f"{name} must have at least one entry")
    return start
