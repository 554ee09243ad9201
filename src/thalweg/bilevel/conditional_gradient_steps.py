"""The steps of iteratively regularized conditional gradient, one by one or in a compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.gradient_estimators import Estimator, Storm, full_gradient
from thalweg.bilevel.linear_oracles import Atom, as_point
from thalweg.bilevel.single_atom_kernel import has_single_atoms, matrix_parts, one_sample_steps
from thalweg.bilevel.vanishing_regularization import Schedule
from thalweg.bilevel.weighted_average import WeightedAverage
from thalweg.common.minimizers import NotFiniteError

Array = NDArray[np.float64]
VERTEX_TOLERANCE = 1e-6  # that of linear programming


class ConditionalGradient:
    """The state of a run: x_t, x_{t-1}, both gradient estimates, and the average.

    ``reg`` is ς, or None to balance the gradients of the two objectives at the start.
    """

    def __init__(
        self,
        inner: Estimator,
        outer: Estimator,
        lmo: Callable[[Array], Array | Atom],
        x0: Array,
        schedule: Schedule,
        average: WeightedAverage | None,
        reg: float | None,
    ) -> None:
        self.inner = inner
        self.outer = outer
        self.lmo = lmo
        self.x = x0.copy()
        self.previous = x0.copy()
        self.schedule = schedule
        self.average = average
        self.reg = reg
        self.t = 0
        self.n_lmo = 0
        # Of the mixture, at x_t, if the last step took full gradients of both.
        self.gap = np.nan
        self._compiled = (
            all(isinstance(level, Storm) and level.samples.batch == 1 for level in (inner, outer))
            and x0.ndim == 1
            and has_single_atoms(lmo, inner.objective, outer.objective)
        )

    @property
    def point(self) -> Array:
        """The output: z_t of convex runs, or x_t."""
        z = None if self.average is None else self.average.at(self.t, self.x)
        return self.x.copy() if z is None else z

    @property
    def sigma(self) -> float:
        """σ_t."""
        return (self.reg or 0.0) * float(self.schedule.sigma(self.t))

    def advance(self, steps: int, gtol: float | None = None) -> bool:
        """Make steps; stop early, and return True, where the exact gap is at most ``gtol``."""
        end = self.t + steps
        while self.t < end:
            # The first steps are the general ones: α_0 = 1 has no factor to keep apart.
            if self._compiled and self.t > 0:
                self._advance_compiled(end - self.t)
            elif self._step(gtol):
                return True
        return False

    def _step(self, gtol: float | None) -> bool:
        t, alpha = self.t, float(self.schedule.alpha(self.t))
        F = self.outer.update(t, self.x, self.previous, alpha)
        G = self.inner.update(t, self.x, self.previous, alpha)
        if self.reg is None:
            self.reg = self._balance(F, G)
        vertex, gap = minimize_linear(self.lmo, self.sigma * F + G, self.x)
        self.n_lmo += 1
        exact = self.inner.is_exact(t) and self.outer.is_exact(t)
        self.gap = gap if exact else np.nan
        if gtol is not None and self.gap <= gtol:
            return True
        self.previous = self.x
        self.x = toward(self.x, vertex, alpha)
        self.t += 1
        if self.average is not None:
            self.average.add(self.t, self.x)
        return False

    def _balance(self, F: Array, G: Array) -> float:
        """Return ‖∇G‖/‖∇F‖ at the start, or 1 if one of them is zero."""
        norms = []
        for level, estimate in ((self.outer, F), (self.inner, G)):
            # One sample is too noisy to fix a setting of the whole run.
            if not level.is_exact(0) and level.objective.n is not None:
                estimate = full_gradient(level.objective, self.x)
                level.evaluations += level.objective.n
            norms.append(float(np.linalg.norm(estimate)))
        return norms[1] / max(norms[0], 1e-12) if min(norms) > 0 else 1.0

    def _advance_compiled(self, steps: int) -> None:
        inner, outer = self.inner, self.outer
        assert isinstance(inner, Storm)
        assert isinstance(outer, Storm)
        t = np.arange(self.t, self.t + steps)
        alphas, sigmas = self.schedule.alpha(t), (self.reg or 0.0) * self.schedule.sigma(t)
        weights = np.zeros(steps) if self.average is None else self.average.weights(t + 1)
        rows_in, rows_out = inner.samples.take(steps)[:, 0], outer.samples.take(steps)[:, 0]
        lmo: Any = self.lmo
        radius = getattr(lmo, "radius", None)
        done = 0
        while done < steps:
            rest = slice(done, None)
            late, weight, made = one_sample_steps(
                matrix_parts(inner.objective),  # type: ignore[arg-type]
                matrix_parts(outer.objective),  # type: ignore[arg-type]
                rows_in[rest],
                rows_out[rest],
                alphas[rest],
                sigmas[rest],
                weights[rest],
                float(lmo.total if radius is None else radius),
                radius is not None,
                self.x,
                self.previous,
                outer.estimate,
                inner.estimate,
            )
            if self.average is not None:
                self.average.sum += late
                self.average.total += weight
            done += made
            self.t += made
            self.n_lmo += made
            inner.evaluations += 2 * made
            outer.evaluations += 2 * made
            if made == 0:
                raise NotFiniteError


def toward(x: Array, vertex: Array | Atom, alpha: float) -> Array:
    """Return x + α(v - x)."""
    moved: Array = (1 - alpha) * x
    if isinstance(vertex, Atom):
        moved.reshape(-1)[vertex.index] += alpha * np.asarray(vertex.value)
    else:
        moved += alpha * vertex
    return moved


def minimize_linear(
    lmo: Callable[[Array], Array | Atom], c: Array, x: Array
) -> tuple[Array | Atom, float]:
    """Return the vertex, checked, and the gap ⟨c, x - v⟩.

    Raises
    ------
    NotFiniteError
        If c is not finite.
    ValueError
        If the vertex has another shape, is not finite, or is no minimizer, as x is better.
    """
    at_x = float(np.vdot(c, x))
    if not np.isfinite(at_x) and not np.isfinite(c).all():
        raise NotFiniteError
    vertex = lmo(c)
    if isinstance(vertex, Atom):
        at_vertex = float(np.sum(c.reshape(-1)[vertex.index] * vertex.value))
    else:
        vertex = np.asarray(vertex, dtype=np.float64)
        if vertex.shape != x.shape:
            raise ValueError(f"lmo must return the shape of x, {x.shape}, got {vertex.shape}")
        at_vertex = float(np.vdot(c, vertex))
    if not np.isfinite(at_vertex):
        raise ValueError("lmo must return a finite point: is the set bounded?")
    if at_vertex > at_x + VERTEX_TOLERANCE * (abs(at_x) + abs(at_vertex)):
        raise ValueError(
            f"lmo must minimize <c, v> over the set, got {at_vertex:g} at v, but {at_x:g} at x"
        )
    return vertex, at_x - at_vertex


def exact_gap(c: Array, lmo: Callable[[Array], Array | Atom], x: Array) -> float:
    """Return the largest ⟨c, x - v⟩ over the set, NaN where c is not known."""
    if not np.isfinite(c).all():
        return np.nan
    return float(np.vdot(c, x - as_point(lmo(c), x.shape)))
