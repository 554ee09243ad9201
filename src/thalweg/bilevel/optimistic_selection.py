"""Selection of the lower level's minimizer that is best for the upper one, along their manifold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any

from thalweg.bilevel.array_objectives import ArrayObjectives
from thalweg.bilevel.bilevel_objectives import BilevelObjectives
from thalweg.bilevel.inverse_hessians import InverseProduct
from thalweg.bilevel.neumann_series import largest_eigenvalue
from thalweg.bilevel.pseudoinverses import DenseInverse, KrylovInverse, NotMinimizerError, PInv
from thalweg.common.checks import check_integer, check_number
from thalweg.common.minimizers import NotFiniteError
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Objectives = BilevelObjectives | ArrayObjectives
Inverse = DenseInverse | KrylovInverse
TIE = 1e-6
WALK = 8  # steps of a path along the manifold


@dataclass(frozen=True)
class GD:
    """Gradient steps on the lower level, which bring y back to its minimizers.

    Parameters
    ----------
    lr : float > 0, optional
        The first step size; by default the inverse of the Hessian's largest eigenvalue. It is
        halved where g does not fall, and grows by a tenth where it does.
    steps : int ≥ 1
        At most so many, per restoration.
    tol : float ≥ 0
        Stop when ``‖∇ᵧg‖`` is at most this. With a dense pseudoinverse, up to ten Newton steps
        follow until then.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    lr: float | None = None
    steps: int = 50
    tol: float = 1e-10

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        check_integer("steps", self.steps, at_least=1)
        check_number("tol", self.tol, at_least=0)


@dataclass(frozen=True)
class Select:
    """Descent of f along the manifold of minimizers, with restarts in its tangent space.

    Parameters
    ----------
    steps : int ≥ 0
        At most so many tangential steps per selection; 0 takes y as the inner steps leave it.
    lr : float > 0, optional
        The first step size; by default 1. Later ones are those of Barzilai and Borwein, halved
        until f falls enough (Armijo).
    n_starts : int ≥ 0
        Other starts of every restart: walks along the manifold in random directions of its tangent
        space, so that the search grows with its dimension and not with that of y.
    restart_every : int ≥ 1
        Outer steps between restarts.
    spread : float > 0
        The greatest length of a walk; those of one restart fall geometrically to a tenth of it,
        each times a uniform number.
    intrinsic_dim : int ≥ 1, optional
        The dimension of the manifold, if it is known. Up to 3, a net of the tangent ball with
        ``n_starts`` points per direction takes the place of random starts.
    tol : float ≥ 0
        Stop when ``‖P∇ᵧf‖`` is at most this share of 1 + ``‖∇ᵧf‖``.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    steps: int = 20
    lr: float | None = None
    n_starts: int = 4
    restart_every: int = 10
    spread: float = 3.0
    intrinsic_dim: int | None = None
    tol: float = 1e-9

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, at_least=0)
        if self.lr is not None:
            check_number("lr", self.lr, above=0)
        check_integer("n_starts", self.n_starts, at_least=0)
        check_integer("restart_every", self.restart_every, at_least=1)
        check_number("spread", self.spread, above=0)
        if self.intrinsic_dim is not None:
            check_integer("intrinsic_dim", self.intrinsic_dim, at_least=1)
        check_number("tol", self.tol, at_least=0)


@dataclass(frozen=True)
class Langevin:
    """Langevin steps of f along the manifold, of which the best point is kept.

    ``y ← Restore(y - s P∇ᵧf + (2s/β)^(1/2) Pξ)``, followed by the descent of `Select`.

    Parameters
    ----------
    beta : float > 0
        The inverse temperature.
    steps : int ≥ 1
        Steps of every restart.
    lr : float > 0
        s.
    restart_every : int ≥ 1
        Outer steps between restarts.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    beta: float = 10.0
    steps: int = 50
    lr: float = 0.1
    restart_every: int = 10

    def __post_init__(self) -> None:
        check_number("beta", self.beta, above=0)
        check_integer("steps", self.steps, at_least=1)
        check_number("lr", self.lr, above=0)
        check_integer("restart_every", self.restart_every, at_least=1)


@dataclass(eq=False)
class Selection:
    """A minimizer of the lower level, and what is known there.

    Parameters
    ----------
    y : Tensor of shape (d,)
    value : float
        f.
    residual : float
        ``‖∇ᵧg‖``.
    tangential : float
        ``‖P∇ᵧf‖``.
    solution : InverseProduct
        H†∇ᵧf.
    others : list of Tensor
        Other minimizers with the same f, to a millionth.
    """

    y: torch.Tensor
    value: float
    residual: float
    tangential: float
    solution: InverseProduct
    others: list[torch.Tensor]


class Selector:
    """Restores and selects along a run, and counts what that takes.

    Parameters
    ----------
    objectives : BilevelObjectives or ArrayObjectives
    inner : GD
    select : Select or Langevin
    solve : PInv
    generator : torch.Generator, optional
    """

    def __init__(
        self,
        objectives: Objectives,
        inner: GD,
        select: Select | Langevin,
        solve: PInv,
        generator: torch.Generator | None,
    ) -> None:
        self.objectives, self.inner, self.solve = objectives, inner, solve
        self.search = select
        self.descent = select if isinstance(select, Select) else Select()
        self.generator = generator
        self.n_grad = self.n_hvp = 0
        self._lr = inner.lr
        self._length = self.descent.lr or 1.0

    def __call__(self, x: torch.Tensor, y: torch.Tensor, step: int) -> Selection:
        """Return the selection at x from the last y; every now and then, from other starts."""
        best = self.descend(x, self._follow(x, y))
        if step % self.search.restart_every != 0:
            return best
        for start in self._starts(x, best):
            try:
                other = self.descend(x, self.restore(x, start))
            except NotMinimizerError:  # the start led to a saddle point of g
                continue
            if not self._is_solution(other, best):
                continue
            if other.value < best.value - TIE * (1 + abs(best.value)):
                best = other
            elif _tied(other, best):
                best.others.append(other.y)
        return best

    def _follow(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y on the manifold after a small move of x: by Newton steps, if they suffice."""
        value, slope = self._lower(x, y)
        moved = self._polish(x, y, steps=8)
        below, left = self._lower(x, moved)
        if float(left.norm()) <= max(self.inner.tol, 1e-6 * float(slope.norm())) and below <= value:
            return moved
        return self.restore(x, y)

    def restore(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y after steps on g."""
        if self._lr is None:
            largest = largest_eigenvalue(self._products(x, y), y)
            self._lr = 1 / largest if largest > 0 else 1.0
        value, slope = self._lower(x, y)
        for _ in range(self.inner.steps):
            squared = float(slope.dot(slope))
            if squared**0.5 <= self.inner.tol:
                return y
            trial = y - self._lr * slope
            below, next_slope = self._lower(x, trial)
            # At a minimizer, rounding hides the decrease.
            if below <= value - 0.25 * self._lr * squared + 1e-15 * abs(value):
                y, value, slope = trial, below, next_slope
                self._lr *= 1.1
            else:
                self._lr /= 2
                if self._lr < 1e-14:
                    self._lr = None
                    return y
        return self._polish(x, y, steps=10)

    def descend(self, x: torch.Tensor, y: torch.Tensor) -> Selection:
        """Descend f along the manifold from a point of it."""
        inverse, f_y, value = self._at(x, y)
        t = inverse.tangential(f_y)
        residual = float(self._lower(x, y)[1].norm())
        length = self._length
        for _ in range(self.descent.steps):
            norm = float(t.norm())
            if norm <= self.descent.tol * (1 + float(f_y.norm())):
                break
            moved = self._armijo(x, y, value, residual, t, length)
            if moved is None:
                break
            y_new, residual = moved
            inverse, f_y, value = self._at(x, y_new)
            t_new = inverse.tangential(f_y)
            change = y_new - y
            curvature = float(change.dot(t_new - t))
            length = float(change.dot(change)) / curvature if curvature > 0 else 2 * length
            y, t = y_new, t_new
            self._length = length
        return Selection(y, value, residual, float(t.norm()), inverse.solve(f_y), [])

    def _armijo(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        value: float,
        residual: float,
        t: torch.Tensor,
        length: float,
    ) -> tuple[torch.Tensor, float] | None:
        """Return the restored point along -t that lowers f enough, with its residual, if any."""
        squared = float(t.dot(t))
        # Off the manifold, f may well be lower: a step counts only if it could be restored.
        allowed = 10 * max(residual, self.inner.tol)
        for _ in range(30):
            trial = self._retract(x, y - length * t)
            below = float(self.objectives.upper(x, trial).detach())
            if below <= value - 1e-4 * length * squared:
                left = float(self._lower(x, trial)[1].norm())
                if left <= allowed:
                    return trial, left
            length /= 2
        return None

    def _retract(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return y after a few Newton steps to the manifold, or gradient steps in their place."""
        return self._polish(x, y, steps=8) if self.solve.is_dense(len(y)) else self.restore(x, y)

    def _polish(self, x: torch.Tensor, y: torch.Tensor, steps: int) -> torch.Tensor:
        """Return y after steps ``y - H†∇ᵧg`` while they lower the slope."""
        if not self.solve.is_dense(len(y)):
            return y
        slope = self._lower(x, y)[1]
        for _ in range(steps):
            if float(slope.norm()) <= self.inner.tol:
                break
            H = self.solve.factorize(self._products(x, y), y, strict=False)
            trial = y - H.solve(slope).v
            next_slope = self._lower(x, trial)[1]
            if not float(next_slope.norm()) < float(slope.norm()):
                break
            y, slope = trial, next_slope
        return y

    def _starts(self, x: torch.Tensor, best: Selection) -> list[torch.Tensor]:
        inverse, _, _ = self._at(x, best.y)
        if isinstance(self.search, Langevin):
            return [self._langevin(x, best.y, self.search)]
        count, dim, spread = self.search.n_starts, self.search.intrinsic_dim, self.search.spread
        if count == 0:
            return []
        if dim is not None and dim <= 3 and isinstance(inverse, DenseInverse):
            kernel = inverse.vectors[:, ~inverse.kept].T
            side = torch.linspace(-1, 1, count, dtype=best.y.dtype)
            points = [torch.stack(point) for point in product(side, repeat=len(kernel))]
            moves = [spread * point @ kernel for point in points]
        else:
            ratio = 0.1 ** (1 / max(count - 1, 1))
            moves = [
                spread * ratio**i * self._uniform() * unit(inverse.tangential(self._normal(best.y)))
                for i in range(count)
            ]
        return [self._walk(x, best.y, move) for move in moves]

    def _walk(self, x: torch.Tensor, y: torch.Tensor, move: torch.Tensor) -> torch.Tensor:
        """Return the end of a path along the manifold that starts with a tangential move."""
        length = float(move.norm()) / WALK
        for _ in range(WALK):
            y = self._retract(x, y + length * unit(move))
            inverse = self.solve.factorize(self._products(x, y), y, strict=False)
            move = inverse.tangential(move)
        return y

    def _langevin(self, x: torch.Tensor, y: torch.Tensor, setting: Langevin) -> torch.Tensor:
        best, least = y, float("inf")
        for _ in range(setting.steps):
            inverse, f_y, value = self._at(x, y)
            if value < least:
                best, least = y, value
            noise = (2 * setting.lr / setting.beta) ** 0.5 * self._normal(y)
            y = self._retract(x, y + inverse.tangential(noise - setting.lr * f_y))
        return best

    def _is_solution(self, other: Selection, best: Selection) -> bool:
        """Return whether a restored start solves the lower level as well as the best point does."""
        return other.residual <= max(10 * best.residual, 1e3 * self.inner.tol, 1e-12)

    def _at(self, x: torch.Tensor, y: torch.Tensor) -> tuple[Inverse, torch.Tensor, float]:
        inverse = self.solve.factorize(self._products(x, y), y)
        self.n_grad += 1
        value, f_y = self.objectives.upper_both(x, y)
        if not math.isfinite(value):
            raise NotFiniteError("f")
        return inverse, f_y, value

    def _lower(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, torch.Tensor]:
        self.n_grad += 1
        return self.objectives.lower_both(x, y)

    def _products(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        products = self.objectives.hessian(x, y)

        def counted(V: torch.Tensor) -> torch.Tensor:
            self.n_hvp += len(V)
            return products(V)

        return counted

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self.generator))

    def _normal(self, y: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(y.shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(y)


def unit(v: torch.Tensor) -> torch.Tensor:
    """Return v at length 1, or as it is if it is 0."""
    norm = v.norm()
    return v / torch.where(norm > 0, norm, 1.0)


def _tied(other: Selection, best: Selection) -> bool:
    """Return whether f is the same at a point that is not the same."""
    if other.value > best.value + TIE * (1 + abs(best.value)):
        return False
    apart = 1e-3 * (1 + float(best.y.norm()))
    return all(float((other.y - y).norm()) > apart for y in [best.y, *best.others])
