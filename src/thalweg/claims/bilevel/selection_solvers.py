"""Solvers of the regression problems: the method, and the stochastic bilevel methods beside it.

There are no packages of the latter; each is written out from its paper. All get the same number of
gradients of rows, counted over both objectives, and return a point. Loops over rows are compiled
for each of them.
"""
# mypy: disable-error-code=no-untyped-def
# Numba infers the types of the compiled functions.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from thalweg.bilevel import L1Ball, LeastSquares, ir_cg
from thalweg.bilevel.gradient_estimators import Spider
from thalweg.common.optional import requires
from thalweg.tasks import SelectionProblem

with requires("peers"):
    from numba import njit

Array = NDArray[np.float64]
_kernel: Callable[..., Any] = njit(cache=True)
_kernel_of_sums: Callable[..., Any] = njit(cache=True, fastmath={"reassoc", "contract"})


@dataclass(frozen=True, eq=False)
class SelectionRun:
    """One run: the problem, how many gradients of rows it may take, of how many rows at once."""

    problem: SelectionProblem
    gradients: int
    batch: int
    rng: np.random.Generator

    @property
    def sums(self) -> tuple[LeastSquares, LeastSquares]:
        """The inner and the outer objective."""
        p = self.problem
        return LeastSquares(p.A, p.b), LeastSquares(p.A_outer, p.b_outer)

    @property
    def x0(self) -> Array:
        """The start, 0."""
        return np.zeros(self.problem.A.shape[1])

    def rows(self, steps: int, draws: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return row numbers of both objectives, of shape (steps, draws, batch)."""
        shape, n = (steps, draws, self.batch), len(self.problem.b)
        return self.rng.integers(n, size=shape), self.rng.integers(n, size=shape)


Solver = Callable[..., Array]


def ir_scg(run: SelectionRun, **settings: Any) -> Array:
    """Return z of the one-sample method: four gradients of rows a step, after n + n for ς."""
    inner, outer = run.sums
    return _method_point(run, inner, outer, run.gradients // 4, method="irscg", **settings)


def ir_fscg(run: SelectionRun, **settings: Any) -> Array:
    """Return z of the finite-sum method: each √n steps cost n + n gradients, and 4 √n a step."""
    inner, outer = run.sums
    root = int(np.sqrt(len(run.problem.b)))
    steps = int(run.gradients / (2 * len(run.problem.b) + 4 * root * (root - 1)) * root)
    return _method_point(run, inner, outer, steps, method="irfscg", **settings)


def _method_point(run: SelectionRun, inner: Any, outer: Any, steps: int, **settings: Any) -> Array:
    result = ir_cg(
        inner,
        outer,
        L1Ball(run.problem.radius),
        run.x0,
        maxiter=steps,
        rng=run.rng,
        **settings,
    )
    point: Array = result.x
    return point


@_kernel
def project_l1(v, radius):
    """Overwrite v with its projection onto the l1 ball."""
    sizes = np.abs(v)
    if sizes.sum() <= radius:
        return
    ordered = np.sort(sizes)[::-1]
    above, threshold = 0.0, 0.0
    for k in range(len(v)):
        above += ordered[k]
        candidate = (above - radius) / (k + 1)
        if ordered[k] <= candidate:
            break
        threshold = candidate
    for k in range(len(v)):
        v[k] = np.sign(v[k]) * max(sizes[k] - threshold, 0.0)


@_kernel_of_sums
def _batch_gradient(A, b, rows, x, out):
    """Write the mean gradient of the rows to ``out``."""
    out[:] = 0
    for i in rows:
        row = A[i]
        product = 0.0
        for k in range(len(x)):
            product += row[k] * x[k]
        slope = (product - b[i]) / len(rows)
        for k in range(len(x)):
            out[k] += slope * row[k]


@_kernel
def _barrier_steps(A, b, A_outer, b_outer, radius, rows_in, rows_out, lr, alpha, x):
    """Return the last iterate of dynamic barrier gradient descent."""
    f, g = np.empty_like(x), np.empty_like(x)
    for t in range(len(rows_in)):
        _batch_gradient(A_outer, b_outer, rows_out[t, 0], x, f)
        _batch_gradient(A, b, rows_in[t, 0], x, g)
        square = max(np.dot(g, g), 1e-300)
        barrier = max(alpha - np.dot(f, g) / square, 0.0)
        x -= lr * (f + barrier * g)
        project_l1(x, radius)
    return x


def sdbgd(run: SelectionRun, lr: float, alpha: float) -> Array:
    """Return the last iterate of stochastic dynamic barrier gradient descent.

    The direction is ∇f + λ∇g with λ = max(0, α - ⟨∇f, ∇g⟩/‖∇g‖²), projected; as in C. Gong, X. Liu
    and Q. Liu, "Automatic and harmless regularization with constrained and lexicographic
    optimization: a dynamic barrier approach", NeurIPS 2021, with gradients of samples.
    """
    p = run.problem
    rows = run.rows(run.gradients // (2 * run.batch), 1)
    point: Array = _barrier_steps(
        p.A, p.b, p.A_outer, p.b_outer, p.radius, *rows, lr, alpha, run.x0
    )
    return point


@_kernel
def _extragradient_steps(A, b, A_outer, b_outer, radius, rows_in, rows_out, gamma0, rho0, x):
    """Return the weighted average of the extrapolated points."""
    f, g, y, average = np.empty_like(x), np.empty_like(x), x.copy(), np.zeros_like(x)
    total = 0.0
    for t in range(len(rows_in)):
        gamma, rho = gamma0 * (t + 1) ** -0.75, rho0 * (t + 1) ** 0.25
        _batch_gradient(A_outer, b_outer, rows_out[t, 0], x, f)
        _batch_gradient(A, b, rows_in[t, 0], x, g)
        y = x - gamma * (f + rho * g)
        project_l1(y, radius)
        _batch_gradient(A_outer, b_outer, rows_out[t, 1], y, f)
        _batch_gradient(A, b, rows_in[t, 1], y, g)
        x = x - gamma * (f + rho * g)
        project_l1(x, radius)
        weight = gamma * rho
        total += weight
        average += weight / total * (y - average)
    return average


def ar_ip_seg(run: SelectionRun, gamma0: float, rho0: float) -> Array:
    """Return the average of the regularized stochastic extragradient method, aR-IP-SeG.

    γ_t = γ₀(t + 1)^(-3/4) and ρ_t = ρ₀(t + 1)^(1/4), as in S. Samadi, D. Burbano and F. Yousefian,
    "Achieving optimal complexity guarantees for a class of bilevel convex optimization problems",
    ACC 2024, and the line of work before it; the weights of the average are γ_t ρ_t.
    """
    p = run.problem
    rows = run.rows(run.gradients // (4 * run.batch), 2)
    point: Array = _extragradient_steps(
        p.A, p.b, p.A_outer, p.b_outer, p.radius, *rows, gamma0, rho0, run.x0
    )
    return point


def accelerated_penalty(run: SelectionRun, sigma: float) -> Array:
    """Return the last iterate of FISTA with restarts on G + σF: full gradients and projections."""
    inner, outer = run.sums
    step = 1 / (inner.smoothness() + sigma * outer.smoothness())
    x, y, momentum = run.x0, run.x0, 1.0
    for _ in range(run.gradients // (2 * len(run.problem.b))):
        moved = y - step * (inner.grad(y) + sigma * outer.grad(y))
        project_l1(moved, run.problem.radius)
        if (y - moved) @ (moved - x) > 0:
            momentum = 1.0
        grown = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        y = moved + (momentum - 1) / grown * (moved - x)
        x, momentum = moved, grown
    return x


def cut_by_program(c: Array, normal: Array, bound: float, radius: float) -> Array:
    """Return argmin ⟨c, v⟩ over the l1 ball and ⟨normal, v⟩ ≤ bound, by HiGHS."""
    d = len(c)
    rows = np.stack([np.ones(2 * d), np.concatenate([normal, -normal])])
    found = linprog(np.concatenate([c, -c]), rows, [radius, bound], method="highs")
    if found.x is None:  # the cut misses the ball, by the noise of the estimate
        return cut_by_bisection(c, normal, bound, radius)
    parts: Array = found.x
    return parts[:d] - parts[d:]


def cut_by_bisection(c: Array, normal: Array, bound: float, radius: float) -> Array:
    """Return the same by bisection on the multiplier of the cut: a mixture of two vertices."""
    oracle, shape = L1Ball(radius), c.shape
    outside = oracle(c).dense(shape)
    if normal @ outside <= bound:
        return outside
    inside = oracle(normal).dense(shape)
    low, high = 0.0, 1.0
    while normal @ (point := oracle(c + high * normal).dense(shape)) > bound and high < 1e12:
        low, outside, high = high, point, 2 * high
    inside = point if normal @ point <= bound else inside
    for _ in range(60):
        middle = (low + high) / 2
        point = oracle(c + middle * normal).dense(shape)
        if normal @ point > bound:
            low, outside = middle, point
        else:
            high, inside = middle, point
    gap = normal @ (outside - inside)
    share = np.clip((bound - normal @ inside) / gap, 0, 1) if gap > 0 else 0.0
    mixture: Array = inside + share * (outside - inside)
    return mixture


def half_space(
    run: SelectionRun,
    cut: Callable[[Array, Array, float, float], Array] = cut_by_bisection,
    share: float = 0.3,
    slack: float = 0.0,
) -> Array:
    """Return the last iterate of SBCGF, conditional gradient over cuts of the set.

    Each step minimizes ⟨∇F, v⟩ over the points of X with G(x_t) + ⟨∇G, v - x_t⟩ ≤ G(x₀) + slack,
    with SPIDER estimates and the step log(q)/q, then 2/(t + 2). x₀ comes from ``share`` of the
    budget spent on G alone, as in J. Cao, R. Jiang, N. Abolfazli, E. Yazdandoost Hamedani and
    A. Mokhtari, "Projection-free methods for stochastic simple bilevel optimization with convex
    lower-level problem", NeurIPS 2023.
    """
    inner, outer = run.sums
    n, radius = len(run.problem.b), run.problem.radius
    root = int(np.sqrt(n))
    per_step = 2 * n / root + 4 * root * (root - 1) / root
    first = int(share * run.gradients / (per_step / 2))
    start = spider_frank_wolfe(inner, radius, run.x0, first, run.rng)
    level = inner.value(start) + slack
    return half_space_steps(
        (inner, outer), radius, start, level, int((1 - share) * run.gradients / per_step), run, cut
    )


def spider_frank_wolfe(
    f: LeastSquares, radius: float, x: Array, steps: int, rng: np.random.Generator
) -> Array:
    """Return the last iterate of Frank-Wolfe with SPIDER estimates and steps 2/(t + 2)."""
    root = int(np.sqrt(f.n or 1))
    spider, previous = Spider(f, rng, root, root), x
    for t in range(steps):
        vertex = L1Ball(radius)(spider.update(t, x, previous, 0.0)).dense(x.shape)
        alpha = np.log(root) / root if t < root else 2 / (t + 2)
        previous, x = x, x + alpha * (vertex - x)
    return x


def half_space_steps(
    sums: tuple[LeastSquares, LeastSquares],
    radius: float,
    x: Array,
    level: float,
    steps: int,
    run: SelectionRun,
    cut: Callable[[Array, Array, float, float], Array],
) -> Array:
    """Return the last iterate of the steps with cuts, from a start of this level of G."""
    root = int(np.sqrt(len(run.problem.b)))
    streams = run.rng.spawn(2)
    spiders = [Spider(f, stream, root, root) for f, stream in zip(sums, streams, strict=True)]
    previous, value = x, sums[0].value(x)
    for t in range(steps):
        g, f = (spider.update(t, x, previous, 0.0) for spider in spiders)
        if t % root == 0:  # the value is estimated as the gradient is
            value = sums[0].value(x)
        else:
            value += float(g @ (x - previous))
        vertex = cut(f, g, float(level - value + g @ x), radius)
        alpha = np.log(root) / root if t < root else 2 / (t + 2)
        previous, x = x, x + alpha * (vertex - x)
    return x
