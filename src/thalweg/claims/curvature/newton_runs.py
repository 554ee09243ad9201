"""What claims about second-order methods compare: runs that count and time, and the solvers.

A solver is called as ``solver(run, **tuned)``. ``run(x)`` returns value and gradient, and
``run.hessian(x)`` and ``run.product(x, p)`` the second derivatives; all of them count. The run
ends, by `Finished`, at the first gradient within the target or where its budget is spent.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.sparse.linalg import spsolve

from thalweg.common.optional import requires
from thalweg.curvature import TorchFunction, minimize_lazy_ssn
from thalweg.tasks import TorchProblem

with requires("curvature"):
    import torch
with requires("peers"):
    import torchmin
    from pyproximal import Box
    from pyproximal.optimization.primal import ProximalGradient
    from sklearn.svm import LinearSVC

Array = NDArray[np.float64]
Solver = Callable[..., Any]

NO_LIMIT = 100_000
SMALL = 1e-14
SMOOTH_OPTIONS: dict[str, dict[str, Any]] = {
    "L-BFGS-B": {"maxiter": NO_LIMIT, "maxfun": NO_LIMIT, "ftol": 0.0, "gtol": 0.0},
    "Newton-CG": {"maxiter": 1000, "xtol": SMALL},
    "trust-ncg": {"maxiter": 1000, "gtol": SMALL},
    "trust-krylov": {"maxiter": 1000, "gtol": SMALL},
    "trust-exact": {"maxiter": 1000, "gtol": SMALL},
}


class Finished(Exception):  # noqa: N818 - it is no error
    """The target is reached, or the budget spent."""


class TorchDerivatives:
    """A problem of tensors, in the form of the others."""

    def __init__(self, problem: TorchProblem) -> None:
        self.loss, self.x0, self.d = problem.loss, problem.x0, problem.d
        function = TorchFunction(problem.loss)
        self.hessian, self.product = function.hess, function.hessp
        self._value_and_gradient = function.value_and_gradient

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return the value and the gradient."""
        return self._value_and_gradient(x)


class NewtonRun:
    """A problem, and how far a solver has come with it.

    Parameters
    ----------
    problem : callable
        ``problem(x) -> (value, gradient)``, with ``x0``, ``hessian(x)``, ``product(x, p)``.
    target : float
        The run ends where the norm of the (projected) gradient is at most this.
    seconds : float
        Or after this CPU time.
    gradients : int, optional
        Or after this number of gradients.
    hessians : int, optional
        Or when one more Hessian than these is asked for.
    bounds : (Array, Array), optional
    x0 : Array, optional
        Another start.

    Attributes
    ----------
    gradients, hessians, products : int
    cpu : float
        CPU seconds until the end.
    reached : bool
    best : float
        The lowest value seen.
    curve : list of (float, int, float, float)
        CPU seconds, Hessians, value and norm of each gradient.
    """

    def __init__(
        self,
        problem: Any,
        *,
        target: float = 0.0,
        seconds: float = math.inf,
        gradients: int = NO_LIMIT,
        hessians: int | None = None,
        bounds: tuple[Array, Array] | None = None,
        x0: Array | None = None,
    ) -> None:
        self.problem, self.target, self.seconds, self.bounds = problem, target, seconds, bounds
        self.x0 = problem.x0 if x0 is None else x0
        self._most_gradients, self._most_hessians = gradients, hessians
        self.gradients = self.hessians = self.products = 0
        self.factorizations = math.nan
        self.reached, self.best, self.cpu = False, math.inf, 0.0
        self.curve: list[tuple[float, int, float, float]] = []
        self._begin = time.process_time()

    def __call__(self, x: Array) -> tuple[float, Array]:
        """Return the value and the gradient."""
        self.gradients += 1
        value, gradient = self.problem(x)
        self._note(x, float(value), gradient)
        return value, gradient

    def gradient(self, x: Array) -> Array:
        """Return the gradient."""
        return self(x)[1]

    def hessian(self, x: Array) -> Any:
        """Return a generalized Hessian."""
        self.count_hessian()
        return self.problem.hessian(x)

    def count_hessian(self) -> None:
        """Count a Hessian; raise `Finished` if there is none left."""
        if self.hessians == self._most_hessians:
            raise Finished
        self.hessians += 1

    def product(self, x: Array, p: Array) -> Array:
        """Return the product of the Hessian at x and p."""
        self.products += 1
        product: Array = self.problem.product(x, p)
        return product

    def show(self, x: Array) -> None:
        """Look at a point of a solver that computes its own derivatives; takes no time."""
        begin = time.process_time()
        value, gradient = self.problem(np.asarray(x, dtype=np.float64))
        self._begin += time.process_time() - begin
        self._note(np.asarray(x), float(value), gradient)

    def _note(self, x: Array, value: float, gradient: Array) -> None:
        self.cpu = time.process_time() - self._begin
        if self.cpu > self.seconds or self.gradients > self._most_gradients:
            raise Finished
        distance = float(np.linalg.norm(self._projected(x, gradient)))
        if math.isfinite(value):
            self.best = min(self.best, value)
        self.curve.append((self.cpu, self.hessians, value, distance))
        if distance <= self.target:
            self.reached = True
            raise Finished

    def _projected(self, x: Array, gradient: Array) -> Array:
        if self.bounds is None:
            return gradient
        moved: Array = x - np.clip(x - gradient, *self.bounds)
        return moved

    def finish(self, solver: Solver, **tuned: Any) -> NewtonRun:
        """Run the solver from the start of the clock; return the run."""
        self._begin = time.process_time()
        with suppress(Finished), np.errstate(all="ignore"):
            solver(self, **tuned)
        return self

    def seconds_of_a_gradient(self, repeats: int = 5) -> float:
        """Return the CPU time of a value and gradient at the start, on this machine, just now."""
        begin = time.process_time()
        for _ in range(repeats):
            self.problem(self.x0)
        return (time.process_time() - begin) / repeats


def lazy(run: NewtonRun, hess_every: Any = 5, **options: Any) -> None:
    """Run the method as shipped, until the run ends it."""
    counted: dict[str, float] = {"n_factor": 0}

    def note(intermediate_result: Any) -> None:
        counted.update(intermediate_result)
        run.factorizations = counted["n_factor"]

    low_high: dict[str, Any] = (
        {} if run.bounds is None else {"bounds": list(zip(*run.bounds, strict=True))}
    )
    minimize_lazy_ssn(
        run,
        run.x0,
        jac=True,
        hess=run.hessian,
        hess_every=hess_every,
        gtol=0.0,
        maxiter=NO_LIMIT,
        callback=note,
        **low_high,
        **options,
    )


def lazy_every(hess_every: Any, **options: Any) -> Solver:
    """Return the method with a given m, and other options."""
    return lambda run: lazy(run, hess_every, **options)


def lazy_in_l2(run: NewtonRun, hess_every: Any = 5) -> None:
    """Run the method with the mass matrix as metric."""
    lazy(run, hess_every, metric=run.problem.mass)


def scipy_solver(method: str, second: str = "product") -> Solver:
    """Return a method of `scipy.optimize.minimize`, with ``second`` derivatives if it takes any."""

    def solve(run: NewtonRun) -> None:
        derivatives: dict[str, Any] = {}
        if method != "L-BFGS-B":
            key = "hess" if second == "hessian" else "hessp"
            derivatives[key] = getattr(run, second)
        if run.bounds is not None:
            derivatives["bounds"] = list(zip(*run.bounds, strict=True))
        minimize(  # type: ignore[call-overload]
            run, run.x0, jac=True, method=method, options=SMOOTH_OPTIONS[method], **derivatives
        )

    return solve


def pytorch_minimize(method: str) -> Solver:
    """Return a method of pytorch-minimize; one Hessian an iteration, if it takes them."""

    def solve(run: NewtonRun) -> None:
        def look(x: Any) -> None:
            run.show(x.detach().numpy())
            if method == "newton-exact":
                run.count_hessian()

        look(torch.from_numpy(run.x0))
        start = torch.from_numpy(run.x0)
        torchmin.minimize(
            run.problem.loss, start, method=method, tol=SMALL, max_iter=2000, callback=look
        )

    return solve


def linear_svc(run: NewtonRun) -> None:
    """scikit-learn's LinearSVC (liblinear), fit more and more tightly; the last fit counts."""
    svm = run.problem
    labels = np.where(np.arange(len(svm.A)) % 2 == 0, 1, -1)
    features = svm.A * labels[:, None]
    for tolerance in 10.0 ** np.arange(-2, -12, -1):
        model = LinearSVC(
            C=1 / (len(labels) * svm.mu),
            dual=False,
            fit_intercept=False,
            tol=tolerance,
            max_iter=NO_LIMIT,
        )
        run._begin = time.process_time()
        model.fit(features, labels)
        run.show(model.coef_[0])


def fista(run: NewtonRun, step: float) -> None:
    """Accelerated proximal gradient steps onto the box, by pyproximal."""
    assert run.bounds is not None
    ProximalGradient(
        _Smooth(run), Box(*run.bounds), run.x0, tau=step, niter=NO_LIMIT, acceleration="fista"
    )


class _Smooth:
    """A smooth part in the form of pyproximal's."""

    def __init__(self, run: NewtonRun) -> None:
        self._run = run

    def __call__(self, x: Array) -> float:
        return 0.0

    def grad(self, x: Array) -> Array:
        """Return the gradient."""
        return self._run.gradient(x)


def adam(run: NewtonRun, lr: float) -> None:
    """Adam with the full gradient."""
    x = torch.nn.Parameter(torch.from_numpy(run.x0.copy()))
    optimizer = torch.optim.Adam([x], lr=lr)
    for _ in range(NO_LIMIT):
        x.grad = torch.from_numpy(run.gradient(x.detach().numpy().copy()))
        optimizer.step()


def undamped_newton(run: NewtonRun, most: int = 200) -> None:
    """Make semismooth Newton steps without globalization."""
    x = run.x0
    for _ in range(most):
        x = x - spsolve(run.hessian(x).tocsc(), run.gradient(x))
