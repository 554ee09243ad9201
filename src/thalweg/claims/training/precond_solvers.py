"""What the claims about preconditioned descent run: a counted function, the method, its peers.

Every solver minimizes ``fun``, which returns the value and the gradient, from ``x0`` until ``fun``
ends the run by an exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from thalweg.common.optional import requires
from thalweg.evidence import Contender, Measurement, Metric
from thalweg.tasks import SmoothFunction
from thalweg.training import minimize_nlprecond
from thalweg.training.precond_kernels import KernelName

with requires("training"):
    import torch

Vector = NDArray[np.float64]
Fun = Callable[[Vector], tuple[float, Vector]]
FOREVER = 10**9
DIVERGED = 1e20
KERNELS: tuple[KernelName, ...] = ("cosh", "exp", "log", "clip")
EVALUATIONS = Metric(
    "gradient evaluations",
    better="lower",
    average="geometric mean",
    curve=("gradient evaluation", "best gap to the minimum"),
)


class RunEnded(Exception):  # noqa: N818 - it is no error
    """The minimum is reached, or the budget spent."""


class Counted:
    """Counts the evaluations of a function and ends the run when it is over."""

    def __init__(self, f: SmoothFunction, tol: float, budget: int) -> None:
        self.f = f
        self.tol = tol
        self.budget = budget
        self.gaps: list[float] = []

    def __call__(self, x: Vector) -> tuple[float, Vector]:
        """Return the value and the gradient.

        Raises
        ------
        RunEnded
            At the minimum, at the end of the budget, and where the run diverges.
        """
        with np.errstate(all="ignore"):  # of runs that diverge
            value, gradient = self.f.value_and_gradient(x)
        best = self.gaps[-1] if self.gaps else np.inf
        self.gaps.append(float(np.fmin(best, value - self.f.minimum)))
        diverged = not np.abs(x).max() < DIVERGED
        if self.gaps[-1] < self.tol or len(self.gaps) >= self.budget or diverged:
            raise RunEnded
        return value, gradient

    def measurement(self, digit: float) -> Measurement:
        """Return the evaluations that were needed; ``digit`` is the price of a missing one."""
        missing = max(0.0, np.log10(self.gaps[-1] / self.tol)) if self.gaps[-1] > 0 else 0.0
        solved = self.gaps[-1] < self.tol
        count = len(self.gaps) if solved else self.budget * (1 + digit * missing)
        curve = (np.arange(1, len(self.gaps) + 1), np.maximum(self.gaps, 1e-16))
        return Measurement(count, curve=curve, extras={"solved": float(solved)})


def gap_closed(
    contender: Contender,
    f: SmoothFunction,
    x0: Vector,
    rng: np.random.Generator,
    *,
    tol: float,
    budget: int,
    digit: float,
    **tuned: Any,
) -> Measurement:
    """Run a contender and count its evaluations."""
    return run(contender, f, x0, rng, tol=tol, budget=budget, **tuned).measurement(digit)


def run(
    contender: Contender,
    f: SmoothFunction,
    x0: Vector,
    rng: np.random.Generator,
    *,
    tol: float,
    budget: int,
    **tuned: Any,
) -> Counted:
    """Run a contender to its end."""
    counted = Counted(f, tol, budget)
    assert contender.make is not None
    with contextlib.suppress(RunEnded):
        contender.make(counted, x0, rng, **tuned)
    return counted


# The method


def fixed_step(kernel: KernelName) -> Callable[..., Any]:
    """Return the method with a fixed γ."""

    def descend(
        fun: Fun, x0: Vector, rng: np.random.Generator, *, gamma: float, Lbar: float = 1.0
    ) -> Any:
        options: dict[str, Any] = {"gamma": gamma, "Lbar": Lbar, "tol": 0.0, "maxiter": FOREVER}
        return minimize_nlprecond(fun, x0, kernel=kernel, **options)

    return descend


def as_shipped(
    fun: Fun, x0: Vector, rng: np.random.Generator, *, kernel: KernelName = "cosh"
) -> Any:
    """Return the method with all of its defaults; ``tol`` never ends it."""
    return minimize_nlprecond(fun, x0, kernel=kernel, tol=0.0, maxiter=FOREVER)


def perturbed(
    fun: Fun,
    x0: Vector,
    rng: np.random.Generator,
    *,
    step: float,
    noise: float,
    kernel: KernelName = "cosh",
    perturb: bool = True,
) -> Any:
    """Run the perturbed method with the setting of the octopus experiment."""
    return minimize_nlprecond(
        fun,
        x0,
        kernel=kernel,
        gamma=step,
        tol=0.0,
        maxiter=FOREVER,
        perturb=perturb,
        eps=noise,
        radius=noise,
        interval=10,
        rng=rng,
    )


# The peers


def gradient_descent(fun: Fun, x0: Vector, rng: np.random.Generator, *, lr: float) -> None:
    """Gradient descent with a fixed step size."""
    x = x0
    while True:
        x = x - lr * fun(x)[1]


def normalized_descent(fun: Fun, x0: Vector, rng: np.random.Generator, *, lr: float) -> None:
    """Make steps of length lr/√k along the gradient; a fixed length does not converge."""
    x = x0
    for k in range(1, FOREVER):
        gradient = fun(x)[1]
        x = x - lr / np.sqrt(k) * gradient / np.linalg.norm(gradient)


def clipped_sgd(
    fun: Fun, x0: Vector, rng: np.random.Generator, *, lr: float, max_norm: float
) -> None:
    """`torch.optim.SGD` after `torch.nn.utils.clip_grad_norm_`."""
    x = torch.nn.Parameter(torch.from_numpy(x0.copy()))
    optimizer = torch.optim.SGD([x], lr=lr)
    while True:
        x.grad = torch.from_numpy(fun(x.detach().numpy())[1])
        torch.nn.utils.clip_grad_norm_([x], max_norm)
        optimizer.step()


def armijo_descent(fun: Fun, x0: Vector, rng: np.random.Generator) -> None:
    """Gradient descent with Armijo's rule (10⁻⁴, halving), from twice the last step size."""
    x, lr = x0, 1.0
    value, gradient = fun(x)
    while True:
        squared = float(gradient @ gradient)
        lr *= 2
        while True:
            trial = x - lr * gradient
            trial_value, trial_gradient = fun(trial)
            if trial_value <= value - 1e-4 * lr * squared:
                break
            lr /= 2
        x, value, gradient = trial, trial_value, trial_gradient


def perturbed_descent(
    fun: Fun, x0: Vector, rng: np.random.Generator, *, step: float, noise: float, interval: int = 10
) -> None:
    """Perturbed gradient descent of Jin et al. (2021)."""
    x, last = x0, -FOREVER
    for k in range(FOREVER):
        gradient = fun(x)[1]
        if np.linalg.norm(gradient) <= noise and k - last >= interval:
            direction = rng.standard_normal(x.size)
            length = noise * rng.random() ** (1 / x.size)
            x, last = x + length * direction / np.linalg.norm(direction), k
            gradient = fun(x)[1]
        x = x - step * gradient


def scipy_solver(method: Literal["L-BFGS-B", "CG"]) -> Callable[..., Any]:
    """Return a solver of SciPy with its defaults, but for the tests that end it."""
    options: dict[str, Any] = {"gtol": 0.0, "maxiter": FOREVER}
    if method == "L-BFGS-B":
        options |= {"ftol": 0.0, "maxfun": FOREVER}

    def solve(fun: Fun, x0: Vector, rng: np.random.Generator) -> Any:
        run: Any = minimize  # its overloads know no x0 of unknown length
        return run(fun, x0, jac=True, method=method, options=options)

    return solve
