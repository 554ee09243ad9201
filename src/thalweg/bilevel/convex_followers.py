"""Followers whose solutions are a moving box, or the minimizers of any convex function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, minimize

from thalweg.bilevel.central_differences import central_gradient
from thalweg.bilevel.section_minimization import FAR, RecessionError, Section
from thalweg.bilevel.solution_sets import Selection
from thalweg.common.checks import check_array, check_finite, check_number

Array = NDArray[np.float64]

MOST_VERTICES = 12  # entries of y up to which all vertices of a box are tried
WEIGHT_FALL = 0.1  # from one weight of F to the next
SMALLEST_WEIGHT = 1e-9
FLAT = 1e-8  # eigenvalues of a Hessian below this, relative to the largest, are zero


class TranslatedBoxFollower:
    r"""The lower level ``½ dist²(y, [lower, upper] + shift(x))``: a box that moves.

    The simplest solution set with a boundary: it is set-smooth by translation, with the constants
    of ``shift``.

    Parameters
    ----------
    lower, upper : array_like of shape (n,)
    shift : callable
        ``shift(x) -> (n,)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or lower > upper.

    Notes
    -----
    The gap is that of Frank and Wolfe, max ⟨g, y - z⟩ over the box, a bound where F is convex in
    the sense of the mode. Up to n = 12 the run starts from the best of all 2ⁿ vertices, where the
    maximum of a convex F is.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import HyperObjective, TranslatedBoxFollower
    >>> follower = TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))
    >>> phi = HyperObjective(follower, lambda x, y: y[0] ** 2)
    >>> round(phi([0.0], "optimistic"), 6), round(phi([0.0], "pessimistic"), 6)
    (0.0, 1.0)
    """

    constrained = False

    def __init__(
        self, lower: ArrayLike, upper: ArrayLike, shift: Callable[[Array], ArrayLike]
    ) -> None:
        self.lower = check_array("lower", lower, shape=("n",))
        self.upper = check_array("upper", upper, shape=self.lower.shape)
        if np.any(self.lower > self.upper):
            raise ValueError(f"lower must be <= upper, got {self.lower} and {self.upper}")
        if not callable(shift):
            raise TypeError(f"shift must be callable, got {type(shift).__name__}")
        self._shift = shift

    def _box(self, x: Array) -> tuple[Array, Array]:
        shift = check_array("shift(x)", self._shift(x), shape=self.lower.shape)
        return self.lower + shift, self.upper + shift

    def minimize(self, section: Section, x: Array, tol: float, start: Array | None) -> Selection:
        """Return a minimizer of a function over S(x)."""
        low, high = self._box(x)
        n = len(low)
        starts = [(low + high) / 2 if start is None else np.clip(start, low, high)]
        if n <= MOST_VERTICES:
            starts += [np.array(v) for v in itertools.product(*np.column_stack((low, high)))]
        best = min(starts, key=section.fun)
        options: Any = {"gtol": 1e-2 * tol / (1 + float(np.max(high - low))), "ftol": 0.0}
        found = minimize(
            section.fun,
            best,
            jac=section.gradient,
            method="L-BFGS-B",
            bounds=Bounds(low, high),
            options=options,
        )
        y, g = np.clip(found.x, low, high), section.gradient(found.x)
        gap = float(np.sum(np.maximum(g * (y - low), g * (y - high))))
        return Selection(section.fun(y), y, gap)

    def project(self, x: Array, v: Array) -> Array:
        """Return the point of S(x) that is nearest to v."""
        return np.clip(v, *self._box(x))

    def gradient(self, x: Array, y: Array) -> Array:
        """Return y minus its projection."""
        return y - self.project(x, y)

    def size(self, x: Array) -> int:
        """Return n."""
        return len(self.lower)


class ConvexFollower:
    r"""The lower level of any convex, smooth f(x, ·) whose minimizers form a bounded or affine set.

    The upper level is minimized along with f, under a weight λ that falls:

    .. math:: y_\lambda = \arg\min_y F(x, y) + f(x, y) / \lambda, \qquad
              F(x, y_\lambda) \le \min_{y \in S(x)} F(x, y) \le F(x, \hat y_\lambda)

    where ŷ_λ is the minimizer of f that a descent from y_λ ends in. The two values enclose the
    hyper-objective, up to the accuracy of the minimizations; λ falls tenfold until they differ by
    ``tol`` at most.

    Parameters
    ----------
    f : callable
        ``f(x, y) -> float``, convex and continuously differentiable in y.
    grad : callable
        ``grad(x, y) -> (n,)``, the gradient in y.
    y0 : array_like of shape (n,)
        Where the first minimization starts.
    hess : callable, optional
        ``hess(x, y) -> (n, n)``, in y: the metric that quasi-Newton steps start with, by default
        from central differences of ``grad``.
    tau : float > 0, optional
        The constant of the error bound dist(y, S(x)) ≤ τ‖∇_y f(x, y)‖, by which f is minimized as
        accurately as ``tol`` needs. By default the inverse of the smallest nonzero eigenvalue of
        the Hessian, exact for a quadratic f.
    bounds : sequence of (low, high), optional
        Bounds of y. The theory does not cover a constrained lower level, and its hyper-objective
        can be worse than weakly convex: `izom` warns.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Cost.* A few quasi-Newton runs of n unknowns per solve, O(n²) each step; n up to some hundreds.

    *Ours.* The bracket by descent, which needs no constants of F; the paper assumes an oracle.

    Examples
    --------
    All y with y₁ + y₂ = x, where f is flat:

    >>> import numpy as np
    >>> from thalweg.bilevel import ConvexFollower, HyperObjective
    >>> follower = ConvexFollower(
    ...     lambda x, y: (y.sum() - x[0]) ** 2 / 2,
    ...     lambda x, y: np.full(2, y.sum() - x[0]),
    ...     np.zeros(2),
    ... )
    >>> phi = HyperObjective(follower, lambda x, y: np.sum((y - [1.0, 0.0]) ** 2))
    >>> round(phi([2.0], tol=1e-4), 4)
    0.5
    """

    def __init__(
        self,
        f: Callable[[Array, Array], float],
        grad: Callable[[Array, Array], ArrayLike],
        y0: ArrayLike,
        *,
        hess: Callable[[Array, Array], ArrayLike] | None = None,
        tau: float | None = None,
        bounds: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        for name, given in (("f", f), ("grad", grad), ("hess", hess)):
            if not callable(given) and (name != "hess" or given is not None):
                raise TypeError(f"{name} must be callable, got {type(given).__name__}")
        self.y0 = check_array("y0", y0, shape=("n",))
        self.tau = None if tau is None else check_number("tau", tau, above=0)
        self.box: Bounds | None = None
        if bounds is not None:
            box = check_array("bounds", bounds, shape=(len(self.y0), 2), finite=False)
            if np.any(np.isnan(box)) or np.any(box[:, 0] > box[:, 1]):
                raise ValueError(f"bounds must be pairs (low, high) with low <= high, got {bounds}")
            self.box = Bounds(*box.T)
        self._f, self._grad, self._hess = f, grad, hess

    @property
    def constrained(self) -> bool:
        """Whether y is bounded."""
        return self.box is not None

    def gradient(self, x: Array, y: Array) -> Array:
        """Return ∇_y f(x, y)."""
        return check_finite("grad(x, y)", np.asarray(self._grad(x, y), dtype=np.float64))

    def minimize(self, section: Section, x: Array, tol: float, start: Array | None) -> Selection:
        """Return a minimizer of a convex function over S(x)."""
        y = self.y0 if start is None else start
        hess = self._hessian(x, y)
        positive = _positive_eigenvalues(hess)
        tau = self.tau or (1 / positive[0] if len(positive) else 1.0)
        metric = positive[-1] if len(positive) else 1.0
        best = self._descend(x, y, hess, 1e-3 * min(tol, 1.0) / tau)
        weight, lower, found = metric, -np.inf, Selection(np.inf, best, np.inf)
        while found.gap > tol and weight >= SMALLEST_WEIGHT * metric:
            y, below = self._trade(section, x, y, hess, weight)
            size = 1 + float(np.linalg.norm(section.gradient(y)))
            best = self._descend(x, y, hess, 1e-2 * min(tol, 1.0) / (tau * size))
            value = section.fun(best)
            lower = max(lower, below)
            if np.linalg.norm(best) > FAR * (1 + np.linalg.norm(self.y0)):
                raise RecessionError(best / np.linalg.norm(best))
            if value - lower < found.gap:
                found = Selection(value, best, max(value - lower, 0.0))
            weight *= WEIGHT_FALL
        return found

    def size(self, x: Array) -> int:
        """Return n."""
        return len(self.y0)

    def project(self, x: Array, v: Array) -> Array:
        """Return the point of S(x) that is nearest to v."""
        nearest = Section(lambda y: float(np.sum((y - v) ** 2)) / 2, lambda y: y - v)
        return self.minimize(nearest, x, 1e-8 * (1 + float(v @ v)), v).y

    def _hessian(self, x: Array, y: Array) -> Array:
        if self._hess is not None:
            return np.asarray(self._hess(x, y), dtype=np.float64)
        hess = central_gradient(lambda z: self.gradient(x, z), y)
        return (hess + hess.T) / 2

    def _trade(
        self, section: Section, x: Array, y: Array, hess: Array, weight: float
    ) -> tuple[Array, float]:
        """Return y_λ and a lower bound of the function over S(x)."""

        def fun(z: Array) -> float:
            return section.fun(z) + float(self._f(x, z)) / weight

        def jac(z: Array) -> Array:
            return section.gradient(z) + self.gradient(x, z) / weight

        result = self._solve(fun, jac, y, hess / weight, 1e-10)
        z = result.x
        if np.linalg.norm(z) > FAR * (1 + np.linalg.norm(y)) or not np.isfinite(result.fun):
            raise RecessionError(z / np.linalg.norm(z))
        # Convexity: what an inexact minimizer still could fall by, over a distance of its size.
        slack = float(np.linalg.norm(self._free_gradient(z, jac(z)))) * (1 + np.linalg.norm(z - y))
        return z, section.fun(z) - float(slack)

    def _descend(self, x: Array, y: Array, hess: Array, gtol: float) -> Array:
        """Return a minimizer of f, from y on."""
        result = self._solve(
            lambda z: float(self._f(x, z)), lambda z: self.gradient(x, z), y, hess, gtol
        )
        return np.asarray(result.x)

    def _solve(
        self,
        fun: Callable[[Array], float],
        jac: Callable[[Array], Array],
        y: Array,
        hess: Array,
        gtol: float,
    ) -> Any:
        gtol = max(gtol, 1e-12)
        if self.box is not None:
            options: Any = {"gtol": gtol, "ftol": 0.0, "maxiter": 5_000}
            return minimize(fun, y, jac=jac, method="L-BFGS-B", bounds=self.box, options=options)
        # Steps that see the curvature of f from the start are not slowed by a small weight of F.
        inverse = np.linalg.inv(hess + np.eye(len(y)))
        options = {"gtol": gtol, "hess_inv0": (inverse + inverse.T) / 2}
        with np.errstate(over="ignore", invalid="ignore"):
            return minimize(fun, y, jac=jac, method="BFGS", options=options)

    def _free_gradient(self, y: Array, g: Array) -> Array:
        """Return the gradient, without the entries that push against a bound."""
        if self.box is None:
            return g
        return y - np.clip(y - g, self.box.lb, self.box.ub)


def _positive_eigenvalues(hess: Array) -> Array:
    values = np.linalg.eigvalsh(hess)
    positive: Array = values[values > FLAT * max(values[-1], 1e-300)]
    return positive
