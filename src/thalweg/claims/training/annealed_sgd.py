"""Claims about annealed SGD: decay of the step size as annealing.

A contender's ``make`` is called as ``make(problem, steps, **tuned)``, where ``problem`` is a
`Problem`, and returns the last iterates of its chains, (chains, n), after ``steps`` noisy
gradients each. To add an optimizer of your own:
``Contender("mine", make=lambda problem, steps, lr: torch_run(problem, steps, lambda p, _:
(Mine(p, lr=lr / problem.L), None)), tune=...)``.

Step sizes are tuned in units of 1/L. All contenders see gradients with noise of the same
variance; a chain is one run, and its last iterate counts, for the best one visited cannot be
known from noisy gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, between, claim, trend
from thalweg.tasks import Multimodal, multimodal, soft_rastrigin
from thalweg.training import constant_lr_baseline, minimize_annealed_sgd

with requires("training"):
    import torch
with requires("peers"):
    import cma
    from schedulefree import SGDScheduleFree

Array = NDArray[np.float64]
Schedule = Any

SIGMA = 6.0
LR_MIN = 1e-3
BARRIER = 0.16693
WELL = 0.898
STEPS = (100, 200, 300, 500, 700, 1000, 2000, 3000, 5000, 7000, 10_000, 20_000, 30_000)


@dataclass(frozen=True)
class Problem:
    """Chains of noisy gradient descent on a function.

    ``starts`` has shape (chains, n), ``sigma`` is the noise per coordinate and ``L`` the largest
    curvature; ``rng`` is the contender's own.
    """

    function: Multimodal
    starts: Array
    sigma: float
    L: float
    rng: np.random.Generator


def annealed(problem: Problem, steps: int, *, lr: float, law: str = "geometric") -> Array:
    """Annealed SGD from lr/L to 10⁻³/L."""
    lowest = min(LR_MIN, lr) / problem.L
    return _ours(minimize_annealed_sgd, problem, steps, lr, law=law, lr_min=lowest)


def constant(problem: Problem, steps: int, *, lr: float) -> Array:
    """SGD with the constant step lr/L."""
    return _ours(constant_lr_baseline, problem, steps, lr)


def _ours(
    minimizer: Callable[..., optimize.OptimizeResult],
    problem: Problem,
    steps: int,
    lr: float,
    **options: Any,
) -> Array:
    result = minimizer(
        problem.function.fun,
        problem.starts,
        jac=problem.function.jac,
        vectorized=True,
        L=problem.L,
        lr0=lr / problem.L,
        sigma=problem.sigma,
        maxiter=steps,
        polish=False,
        rng=problem.rng,
        **options,
    )
    return np.asarray(result.x_last)


def torch_run(
    problem: Problem,
    steps: int,
    make: Callable[[torch.nn.Parameter, int], tuple[torch.optim.Optimizer, Schedule]],
) -> Array:
    """Run an optimizer that treats every entry alike on all chains at once."""
    x = torch.nn.Parameter(torch.from_numpy(problem.starts.copy()))
    optimizer, schedule = make(x, steps)
    generator = torch_generator(problem.rng)
    for _ in range(steps):
        gradient = torch.from_numpy(problem.function.jac(x.detach().numpy()))
        noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        x.grad = gradient + problem.sigma * noise
        optimizer.step()
        if schedule is not None:
            schedule.step()
    if isinstance(optimizer, SGDScheduleFree):
        optimizer.eval()
    return x.detach().numpy()


def cosine(problem: Problem, steps: int, *, lr: float) -> Array:
    """`torch.optim.SGD` with `CosineAnnealingLR` to zero."""

    def make(x: torch.nn.Parameter, steps: int) -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = torch.optim.SGD([x], lr=lr / problem.L)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    return torch_run(problem, steps, make)


def stepwise(problem: Problem, steps: int, *, lr: float) -> Array:
    """`torch.optim.SGD` with `StepLR`: a tenth after every quarter."""

    def make(x: torch.nn.Parameter, steps: int) -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = torch.optim.SGD([x], lr=lr / problem.L)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, max(1, steps // 4))

    return torch_run(problem, steps, make)


def schedule_free(problem: Problem, steps: int, *, lr: float) -> Array:
    """`schedulefree.SGDScheduleFree`."""

    def make(x: torch.nn.Parameter, steps: int) -> tuple[torch.optim.Optimizer, Schedule]:
        optimizer = SGDScheduleFree([x], lr=lr / problem.L)
        optimizer.train()
        return optimizer, None

    return torch_run(problem, steps, make)


STARTS = [0.1, 0.2, 0.4, 0.8, 1.2, 1.6]
CONSTANTS = [1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.016, 0.008, 0.004]
ANNEALED = Contender("annealed SGD", make=annealed, tune={"lr": STARTS})
CONSTANT = Contender("SGD, constant step", make=constant, tune={"lr": CONSTANTS})


def _soft_problem(rng: np.random.Generator, n: int, chains: int) -> Problem:
    for_instance, for_contender = rng.spawn(2)
    function = soft_rastrigin(1.5)
    starts = function.starts(chains, n, for_instance)
    return Problem(function, starts, SIGMA, 1 + 3 * np.pi, for_contender)


def steps_needed(
    contender: Contender,
    problem: Problem,
    epsilon: float,
    horizons: Sequence[int],
    **tuned: Any,
) -> Measurement:
    """Return the steps at which half of the last iterates are below ε; else the longest horizon.

    Between two horizons the share is interpolated over the logarithm of the steps.
    """
    assert contender.make is not None
    shares = []
    for horizon in horizons:
        last = contender.make(problem, horizon, **tuned)
        shares.append(float((problem.function.fun(last) < epsilon).mean()))
        if shares[-1] >= 0.5:
            break
    reached = shares[-1] >= 0.5
    tried = list(horizons[: len(shares)])
    return Measurement(float(tried[-1]), curve=(tried, shares), extras={"reached": float(reached)})


STEPS_METRIC = Metric(
    "steps to ε", better="lower", average="geometric mean", curve=("steps", "share below ε")
)


@claim(
    method="annealed-sgd",
    statement="To have half of its last iterates within ε = 0.05 of the global minimum of a "
    "rugged function, annealed SGD needs at most a tenth of the steps of the best constant step",
    metric=STEPS_METRIC,
    contenders=[
        ANNEALED,
        CONSTANT,
        Contender(
            "cosine law", make=partial(annealed, law="cosine"), tune={"lr": STARTS}, control=True
        ),
        Contender(
            "linear law", make=partial(annealed, law="linear"), tune={"lr": STARTS}, control=True
        ),
    ],
    expect=at_most(0.1, of="SGD, constant step"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, chains=20, horizons=(50, 100)),
        "quick": Scale(seeds=10, tuning_seeds=1, chains=100, horizons=STEPS),
        "full": Scale(seeds=10, tuning_seeds=2, chains=100, horizons=STEPS),
    },
    headline=True,
)
def fewer_steps(
    contender: Contender,
    rng: np.random.Generator,
    *,
    chains: int,
    horizons: Sequence[int],
    **tuned: Any,
) -> Measurement:
    """Count the steps that a rugged function in two dimensions takes, at one accuracy.

    The function is the paper's kind: Σ x²/2 with ripples whose barriers are comparable to the
    gaps between wells, and noise of standard deviation 6 on every coordinate of the gradient.
    The constant step is tuned for this accuracy over nine values, the annealed one only over its
    start; every horizon is a run of its own. A contender that does not get there counts with the
    longest horizon, which flatters the constant step. The controls anneal by other laws: what
    they share with the method is the decay, not the geometric law.
    """
    problem = _soft_problem(rng, 2, chains)
    return steps_needed(contender, problem, 0.05, horizons, **tuned)


@claim(
    method="annealed-sgd",
    statement="The steps that annealed SGD needs grow polynomially with the accuracy: slower than "
    "1/ε²",
    metric=STEPS_METRIC,
    contenders=[
        ANNEALED,
        Contender(CONSTANT.name, make=constant, tune=CONSTANT.tune, control=True),
    ],
    expect=trend(-2.0, 0.0, over="epsilon"),
    scales={
        "smoke": Scale(
            seeds=2, tuning_seeds=1, sweep={"epsilon": (0.4, 0.2)}, chains=20, horizons=(50, 100)
        ),
        "quick": Scale(
            seeds=8,
            tuning_seeds=1,
            sweep={"epsilon": (0.4, 0.1, 0.025)},
            chains=50,
            horizons=STEPS[:10],
        ),
        "full": Scale(
            seeds=10,
            tuning_seeds=1,
            sweep={"epsilon": (0.4, 0.2, 0.1, 0.05, 0.025, 0.0125)},
            chains=100,
            horizons=STEPS,
        ),
    },
)
def polynomial_in_accuracy(
    contender: Contender,
    rng: np.random.Generator,
    *,
    epsilon: float,
    chains: int,
    horizons: Sequence[int],
    **tuned: Any,
) -> Measurement:
    """Fit how the steps of the headline grow as the accuracy is sharpened.

    The constant step is shown beside it and has one setting for all accuracies here; where it
    stays at the longest horizon it was not there yet. Its growth is exponential by the exit law
    (the next claim), which a fit to a few accuracies could not tell from a power.
    """
    problem = _soft_problem(rng, 2, chains)
    return steps_needed(contender, problem, epsilon, horizons, **tuned)


@claim(
    method="annealed-sgd",
    statement="SGD with a constant step leaves a wrong well after exp(Δ/τ) steps, where Δ is the "
    "height of the barrier and τ = hσ²/2 its temperature",
    metric=Metric(
        "fitted over true barrier", better="higher", average="mean", curve=("1/τ", "ln(h · steps)")
    ),
    contenders=[Contender("SGD, constant step", make=constant_lr_baseline)],
    expect=between(0.9, 1.1),
    scales={
        "smoke": Scale(seeds=2, sizes=(0.06, 0.045), chains=50, steps=300),
        "quick": Scale(seeds=8, sizes=(0.06, 0.045, 0.036, 0.03, 0.026), chains=300, steps=5_000),
        "full": Scale(
            seeds=10,
            sizes=(0.06, 0.045, 0.036, 0.03, 0.026, 0.023, 0.02),
            chains=300,
            steps=40_000,
        ),
    },
)
def exit_law(
    contender: Contender,
    rng: np.random.Generator,
    *,
    sizes: Sequence[float],
    chains: int,
    steps: int,
) -> Measurement:
    """Measure how long chains stay in the well beside the global one, at several temperatures.

    This is the cause of the exponential gap: resting within ε needs a temperature in proportion
    to ε, and the slope of the log exit time over 1/τ is the barrier. Exit is the first step with
    ``|x| < 0.2``; the mean time is the exposure, censored at the horizon, over the exits.
    """
    assert contender.make is not None
    function = soft_rastrigin(1.5)
    L = 1 + 3 * np.pi
    inverse, logs = [], []
    for size in sizes:
        inside = np.ones(chains, dtype=bool)
        exposure = 0

        def jac(x: Array, inside: NDArray[np.bool_] = inside) -> Array:
            nonlocal exposure
            np.logical_and(inside, np.abs(x[:, 0]) >= 0.2, out=inside)
            exposure += int(inside.sum())
            if not inside.any():
                raise StopIteration
            return function.jac(x)

        contender.make(
            function.fun,
            np.full((chains, 1), WELL),
            jac=jac,
            vectorized=True,
            L=L,
            lr0=size / L,
            sigma=SIGMA,
            maxiter=steps,
            polish=False,
            rng=rng,
        )
        exits = max(chains - int(inside.sum()), 1)
        inverse.append(1 / (size / L * SIGMA**2 / 2))
        logs.append(float(np.log(size / L * exposure / exits)))
    fit = stats.linregress(inverse, logs)
    return Measurement(
        float(fit.slope) / BARRIER, curve=(inverse, logs), extras={"r²": float(fit.rvalue) ** 2}
    )


@claim(
    method="annealed-sgd",
    statement="At equal budgets in one, two and five dimensions, the median loss of annealed "
    "SGD's last iterates is at most half of that of the best constant step",
    metric=Metric("median f at the end", better="lower", average="geometric mean"),
    contenders=[ANNEALED, CONSTANT],
    expect=at_most(0.5, of="SGD, constant step"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, sweep={"n": (1, 2)}, chains=20, steps=50),
        "quick": Scale(seeds=8, tuning_seeds=1, sweep={"n": (1, 2, 5)}, chains=50, steps=2_000),
        "full": Scale(seeds=10, tuning_seeds=2, sweep={"n": (1, 2, 5)}, chains=100, steps=20_000),
    },
)
def dimensions(
    contender: Contender, rng: np.random.Generator, *, n: int, chains: int, steps: int, **tuned: Any
) -> Measurement:
    """Run the headline's function in several dimensions at a fixed number of steps.

    The barriers are there in every coordinate: a point is right only if all of them are.
    """
    problem = _soft_problem(rng, n, chains)
    assert contender.make is not None
    values = problem.function.fun(contender.make(problem, steps, **tuned))
    return Measurement(
        float(np.median(values)), extras={"share below 0.05": float((values < 0.05).mean())}
    )


@lru_cache
def _scales(name: str, n: int) -> tuple[float, float]:
    """Return L and the noise at which the hottest step 0.5/L has the function's energy scale."""
    function = multimodal(name)
    rng = np.random.default_rng(0)
    points = function.starts(256, n, rng)
    h = 1e-4 * function.half_width
    directions = rng.standard_normal(points.shape)
    curvature = 0.0
    for _ in range(20):
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        ahead = function.jac(points + h * directions)
        directions = (ahead - function.jac(points - h * directions)) / (2 * h)
        curvature = max(curvature, float(np.linalg.norm(directions, axis=1).max()))
    energies = function.fun(points)
    temperature = float(np.median(energies) - energies.min()) / n
    return curvature, float(np.sqrt(2 * temperature * curvature / 0.5))


LRS = [0.03, 0.1, 0.3, 1.0, 1.7]
BENCHMARK_METRIC = Metric("loss, relative to the start", better="lower", average="geometric mean")
BENCHMARK_CONTENDERS = [
    Contender("annealed SGD", make=annealed, tune={"lr": LRS}),
    Contender("SGD, constant step", make=constant, tune={"lr": [0.003, 0.01, *LRS]}),
    Contender("schedule-free SGD", make=schedule_free, tune={"lr": [0.03, 0.1, 0.3, 1.0, 3.0]}),
    Contender("SGD, cosine", make=cosine, tune={"lr": LRS}, control=True),
    Contender("SGD, step decay", make=stepwise, tune={"lr": LRS}, control=True),
]
BENCHMARK_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, chains=5, steps=30),
    "quick": Scale(seeds=8, tuning_seeds=1, chains=20, steps=2_000),
    "full": Scale(seeds=10, tuning_seeds=2, chains=30, steps=20_000),
}


def _benchmark(
    name: str,
    contender: Contender,
    rng: np.random.Generator,
    chains: int,
    steps: int,
    **tuned: Any,
) -> Measurement:
    """Return the geometric mean, over n = 2 and 10, of median last loss over median first one.

    The noise makes the function's energy scale the temperature at the step 0.5/L.
    """
    assert contender.make is not None
    for_instance, for_contender = rng.spawn(2)
    function = multimodal(name)
    ratios = {}
    for n in (2, 10):
        L, sigma = _scales(name, n)
        starts = function.starts(chains, n, for_instance)
        problem = Problem(function, starts, sigma, L, for_contender)
        with np.errstate(over="ignore", invalid="ignore"):
            last = function.fun(contender.make(problem, steps, **tuned))
        ratios[f"n = {n}"] = float(np.median(last) / np.median(function.fun(starts)))
    return Measurement(float(np.sqrt(ratios["n = 2"] * ratios["n = 10"])), extras=ratios)


@claim(
    method="annealed-sgd",
    statement="On Rastrigin's function with noisy gradients, the last iterates of annealed SGD "
    "have no higher loss than those of the best constant step",
    metric=BENCHMARK_METRIC,
    contenders=BENCHMARK_CONTENDERS,
    expect=at_most(1.0, of="SGD, constant step"),
    scales=BENCHMARK_SCALES,
)
def rastrigin(
    contender: Contender, rng: np.random.Generator, *, chains: int, steps: int, **tuned: Any
) -> Measurement:
    """Run Rastrigin's function in 2 and 10 dimensions with noisy gradients.

    Barriers are far higher than the gaps between neighbouring wells near the minimum: it is not
    in the paper's class, whose form with lower ripples is the headline's. The claim is against
    the constant step, the paper's foil. Schedule-free SGD averages instead of decaying; schedules
    by other laws decay too and are controls. Every contender has one setting for both dimensions.
    """
    return _benchmark("rastrigin", contender, rng, chains, steps, **tuned)


@claim(
    method="annealed-sgd",
    statement="On Ackley's function with noisy gradients, the last iterates of annealed SGD "
    "have no higher loss than those of the best constant step",
    metric=BENCHMARK_METRIC,
    contenders=BENCHMARK_CONTENDERS,
    expect=at_most(1.0, of="SGD, constant step"),
    scales=BENCHMARK_SCALES,
)
def ackley(
    contender: Contender, rng: np.random.Generator, *, chains: int, steps: int, **tuned: Any
) -> Measurement:
    """Run Ackley's function in 2 and 10 dimensions with noisy gradients.

    Its trend flattens far out, where the ripples are as strong as everywhere: a start far away
    gets hardly any pull. Contenders and settings are as for Rastrigin's function.
    """
    return _benchmark("ackley", contender, rng, chains, steps, **tuned)


@claim(
    method="annealed-sgd",
    statement="On Lévy's function with noisy gradients, the last iterates of annealed SGD "
    "have no higher loss than those of the best constant step",
    metric=BENCHMARK_METRIC,
    contenders=BENCHMARK_CONTENDERS,
    expect=at_most(1.0, of="SGD, constant step"),
    scales=BENCHMARK_SCALES,
)
def levy(
    contender: Contender, rng: np.random.Generator, *, chains: int, steps: int, **tuned: Any
) -> Measurement:
    """Run Lévy's function in 2 and 10 dimensions with noisy gradients.

    Its barriers differ between directions. Contenders and settings are as for Rastrigin's
    function.
    """
    return _benchmark("levy", contender, rng, chains, steps, **tuned)


@claim(
    method="annealed-sgd",
    statement="On Griewank's function with noisy gradients, the last iterates of annealed SGD "
    "have no higher loss than those of the best constant step",
    metric=BENCHMARK_METRIC,
    contenders=BENCHMARK_CONTENDERS,
    expect=at_most(1.0, of="SGD, constant step"),
    scales=BENCHMARK_SCALES,
)
def griewank(
    contender: Contender, rng: np.random.Generator, *, chains: int, steps: int, **tuned: Any
) -> Measurement:
    """Run Griewank's function in 2 and 10 dimensions with noisy gradients.

    In ten dimensions the product of cosines all but vanishes: it is nearly convex at the scale of
    its trend, and there is little for annealing to cross. Contenders and settings are as for
    Rastrigin's function.
    """
    return _benchmark("griewank", contender, rng, chains, steps, **tuned)


class SpentError(Exception):
    """The budget of evaluations is spent."""


class Counted:
    """A function and its gradient, which counts evaluations and ends the search at a budget."""

    def __init__(self, function: Multimodal, budget: int) -> None:
        self.function = function
        self.left = budget
        self.best = np.inf

    def fun(self, x: Array) -> float:
        """Return the value, and note the best."""
        if self.left <= 0:
            raise SpentError
        self.left -= 1
        value = float(self.function.fun(x))
        self.best = min(self.best, value)
        return value

    def jac(self, x: Array) -> Array:
        """Return the gradient, which counts as well."""
        if self.left <= 0:
            raise SpentError
        self.left -= 1
        return self.function.jac(x)


def solve_annealed(counted: Counted, start: Array, budget: int, seed: int) -> None:
    """Annealed SGD as shipped, four chains."""
    minimize_annealed_sgd(
        counted.fun,
        start,
        jac=counted.jac,
        # Values are for the trace, the scales and the last hundredth of the steps.
        maxiter=max(2, (budget - 1000) // 4 - 110),
        n_chains=4,
        rng=seed,
    )


def solve_dual_annealing(counted: Counted, start: Array, budget: int, seed: int) -> None:
    """`scipy.optimize.dual_annealing`, which is given the bounds."""
    bounds = _bounds(counted, start)
    optimize.dual_annealing(counted.fun, bounds, x0=start, rng=seed, maxiter=budget)


def solve_basinhopping(counted: Counted, start: Array, budget: int, seed: int) -> None:
    """`scipy.optimize.basinhopping` with L-BFGS-B."""
    local: Any = {"method": "L-BFGS-B", "jac": counted.jac}
    optimize.basinhopping(counted.fun, start, niter=budget, minimizer_kwargs=local, rng=seed)


def solve_differential_evolution(counted: Counted, start: Array, budget: int, seed: int) -> None:
    """`scipy.optimize.differential_evolution`, which is given the bounds."""
    bounds = _bounds(counted, start)
    optimize.differential_evolution(counted.fun, bounds, x0=start, rng=seed, maxiter=budget)


def solve_cma(counted: Counted, start: Array, budget: int, seed: int) -> None:
    """`cma.fmin2` with increasing populations."""
    options = {"seed": seed + 1, "verbose": -9, "maxfevals": budget}
    cma.fmin2(counted.fun, start, counted.function.half_width / 3, options, restarts=8, bipop=True)


def _bounds(counted: Counted, start: Array) -> optimize.Bounds:
    width = np.full(len(start), counted.function.half_width)
    return optimize.Bounds(-width, width)


@claim(
    method="annealed-sgd",
    statement="With exact gradients and equal numbers of evaluations, annealed SGD is as good as "
    "the best of SciPy's global solvers and CMA-ES",
    metric=Metric("best value found", better="lower", average="mean"),
    contenders=[
        Contender("annealed SGD", make=solve_annealed),
        Contender("dual annealing", make=solve_dual_annealing),
        Contender("basin hopping", make=solve_basinhopping),
        Contender("differential evolution", make=solve_differential_evolution),
        Contender("BIPOP-CMA-ES", make=solve_cma),
    ],
    expect=at_most(0.0, of="best peer", effect="difference"),
    scales={
        "smoke": Scale(seeds=2, n=2, budget=2_000),
        "quick": Scale(seeds=10, n=5, budget=10_000),
        "full": Scale(seeds=20, n=10, budget=100_000),
    },
)
def global_solvers(
    contender: Contender, rng: np.random.Generator, *, n: int, budget: int
) -> Measurement:
    """Minimize Rastrigin's function with exact values and gradients, as solvers can.

    A value and a gradient cost one evaluation each, and the best value seen counts. This is not
    what the paper is about: it is here so that nobody takes annealed SGD for the best global
    solver where values are exact and dimensions are few.
    """
    assert contender.make is not None
    for_instance, for_contender = rng.spawn(2)
    function = multimodal("rastrigin")
    counted = Counted(function, budget)
    start = function.starts(1, n, for_instance)[0]
    with contextlib.suppress(SpentError):
        contender.make(counted, start, budget, int(for_contender.integers(2**31 - 2)))
    return Measurement(counted.best, extras={"evaluations left": float(max(counted.left, 0))})
