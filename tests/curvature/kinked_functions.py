"""Functions with kinks in their gradients, and a solver that notes its path."""

from __future__ import annotations

import numpy as np

from thalweg.curvature import minimize_lazy_ssn


class SquaredHinge:
    """c·(mean of max(0, 1 - y⟨a, w⟩)² + μ‖w‖²/2), with a kink at every margin."""

    def __init__(self, seed=0, n=200, d=12, mu=1e-3, c=1.0):
        rng = np.random.default_rng(seed)
        A = rng.standard_normal((n, d)) * np.linspace(0.3, 2, d)
        y = np.sign(A[:, 0] + rng.standard_normal(n))
        self.A, self.n, self.d, self.mu, self.c = y[:, None] * A, n, d, mu, c

    def __call__(self, w):
        missing = np.maximum(0, 1 - self.A @ w)
        return self.c * (missing @ missing / self.n + self.mu * w @ w / 2)

    def jac(self, w):
        missing = np.maximum(0, 1 - self.A @ w)
        return self.c * (-2 * self.A.T @ missing / self.n + self.mu * w)

    def hess(self, w):
        short = self.A[self.A @ w < 1]
        return self.c * (2 * short.T @ short / self.n + self.mu * np.eye(self.d))

    def hessp(self, w, p):
        return self.hess(w) @ p


class Wells:
    """A nonconvex sum of wells (x² - 1)²/4 with a squared hinge and a coupling."""

    d = 6

    def __call__(self, x):
        return (
            np.sum((x**2 - 1) ** 2) / 4
            + np.sum(np.maximum(0, x) ** 2) / 2
            + np.sum(np.diff(x) ** 2)
        )

    def jac(self, x):
        coupled = np.zeros_like(x)
        coupled[1:] += 2 * np.diff(x)
        coupled[:-1] -= 2 * np.diff(x)
        return (x**2 - 1) * x + np.maximum(0, x) + coupled

    def hess(self, x):
        D = np.diff(np.eye(self.d), axis=0)
        return np.diag(3 * x**2 - 1 + (x > 0)) + 2 * D.T @ D


def solve(f, x0=None, **options):
    """Minimize f and note each step."""
    steps = []

    def note(intermediate_result):
        steps.append(intermediate_result)

    x0 = np.zeros(f.d) if x0 is None else np.asarray(x0, float)
    options = {"hess": f.hess} | options
    if "hessp" in options:
        options.pop("hess")
    result = minimize_lazy_ssn(f, x0, jac=f.jac, callback=note, **options)
    result.path = np.array([x0] + [s.x for s in steps])
    result.steps = steps
    return result


def least_squares(A, b):
    class Squares:
        d = A.shape[1]

        def __call__(self, x):
            return float(np.sum((A @ x - b) ** 2)) / 2

        def jac(self, x):
            return A.T @ (A @ x - b)

        def hess(self, x):
            return A.T @ A

    return Squares()
