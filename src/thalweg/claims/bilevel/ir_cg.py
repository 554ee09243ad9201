"""Claims about iteratively regularized conditional gradient.

A contender's ``make`` is a solver that returns a point. For one of your own on the regression:
``Contender("mine", make=lambda run, lr: my_solver(run, lr), tune={"lr": [0.1, 1.0]})``, where
``run.sums`` are the two objectives, ``run.problem`` holds data and radius, and ``run.gradients`` is
the budget, in gradients of rows over both objectives; see
`thalweg.claims.bilevel.selection_solvers`.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel import L1Ball, ir_cg
from thalweg.claims.bilevel.dictionary_claims import dictionary_inner, dictionary_outer
from thalweg.claims.bilevel.selection_solvers import (
    SelectionRun,
    accelerated_penalty,
    ar_ip_seg,
    cut_by_bisection,
    cut_by_program,
    half_space,
    half_space_steps,
    ir_fscg,
    ir_scg,
    sdbgd,
)
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import SelectionProblem, diabetes_selection

__all__ = [
    "dictionary_inner",
    "dictionary_outer",
    "finite_sum_inner",
    "finite_sum_rate",
    "finite_sum_regression",
    "one_sample_rate",
    "one_sample_regression",
    "step_cost",
]

Array = NDArray[np.float64]
ERROR = Metric("larger of both gaps", better="lower", average="geometric mean")
INNER_GAP = Metric("inner gap", better="lower", average="geometric mean")


@lru_cache(maxsize=64)
def _problem(seed: int, unit_rows: bool) -> tuple[SelectionProblem, float, float]:
    problem = diabetes_selection(np.random.default_rng(seed), unit_rows=unit_rows)
    return problem, *problem.optimum()


def _gaps(
    contender: Contender,
    rng: np.random.Generator,
    settings: dict[str, Any],
    *,
    gradients: int,
    batch: int,
    unit_rows: bool,
) -> tuple[float, float]:
    """Return G(x) - G* and F(x) - F* of what the contender finds."""
    for_instance, for_contender = rng.spawn(2)
    problem, least, best = _problem(int(for_instance.integers(2**31)), unit_rows)
    assert contender.make is not None
    x = contender.make(SelectionRun(problem, gradients, batch, for_contender), **settings)
    return max(problem.inner(x) - least, 1e-12), problem.outer(x) - best


def _paired_sdbgd(run: SelectionRun, inner_lr_and_alpha: tuple[float, float]) -> Array:
    inner_lr, alpha = inner_lr_and_alpha
    return sdbgd(run, inner_lr / alpha, alpha)


def _pairs(inner_lrs: list[float]) -> list[tuple[float, float]]:
    """Return settings of SDBGD: with α → ∞ it is SGD on G, so that the best α may be no number."""
    return [(lr, alpha) for lr in inner_lrs for alpha in (0.1, 1.0, 10.0, 100.0, 1000.0)]


@claim(
    method="ir-cg",
    statement="With one sample of each objective per step, IR-SCG's larger gap is at most half of "
    "the best stochastic bilevel method's",
    metric=ERROR,
    contenders=[
        Contender("IR-SCG", make=ir_scg),
        Contender(
            "SDBGD", make=_paired_sdbgd, tune={"inner_lr_and_alpha": _pairs([1e-3, 1e-2, 0.1, 1])}
        ),
        Contender(
            "aR-IP-SeG",
            make=ar_ip_seg,
            tune={"gamma0": [0.01, 0.1, 1.0, 10.0, 100.0], "rho0": [0.1, 1.0, 10.0, 100.0]},
        ),
        Contender(
            "constant weight",
            make=lambda run, reg: ir_scg(run, reg=reg, p=1e-9),
            tune={"reg": [1e-4, 1e-3, 1e-2, 1e-1, 1.0]},
            control=True,
        ),
    ],
    expect=at_most(0.5, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, gradients=2_000),
        "quick": Scale(seeds=10, tuning_seeds=1, gradients=100_000),
        "full": Scale(seeds=10, tuning_seeds=1, gradients=1_000_000),
    },
    headline=True,
)
def one_sample_regression(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Over-parametrized regression on the diabetes data: 285 cubic features, 150 rows per level.

    Rows have norm 1. The measure is the ε of ε-optimality: the larger of G(x) - G* and F(x) - F*,
    where F* is the least value among minimizers of G, from cone programs. F can be below it, off
    the minimizers, which costs G. All get the same number of gradients of rows, of which IR-SCG
    takes two for each estimate; it runs with its defaults, and the others are tuned. There are no
    packages of the peers; they are written from their papers. The constant weight is the same
    method without what its name says, told the best weight for this budget, which is as good: what
    vanishing buys is that nothing has to be known.
    """
    inner, outer = _gaps(contender, rng, settings, gradients=gradients, batch=1, unit_rows=True)
    return Measurement(max(inner, outer), extras={"inner gap": inner, "outer gap": outer})


SUM_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, gradients=2_000),
    "quick": Scale(seeds=10, tuning_seeds=1, gradients=50_000),
    "full": Scale(seeds=12, tuning_seeds=1, gradients=500_000),
}
WEIGHTS = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]


def _sum_contenders(inner_lrs: list[float], gamma0: list[float]) -> list[Contender]:
    return [
        Contender("IR-FSCG", make=ir_fscg),
        Contender("SDBGD", make=_paired_sdbgd, tune={"inner_lr_and_alpha": _pairs(inner_lrs)}),
        Contender(
            "aR-IP-SeG", make=ar_ip_seg, tune={"gamma0": gamma0, "rho0": [0.1, 1.0, 10.0, 100.0]}
        ),
        Contender("SBCGF", make=half_space, tune={"share": [0.1, 0.3, 0.5, 0.7, 0.9]}),
        Contender(
            "FISTA on G + σF", make=accelerated_penalty, tune={"sigma": WEIGHTS}, control=True
        ),
    ]


@claim(
    method="ir-cg",
    statement="On finite sums IR-FSCG's larger gap is at most that of the best stochastic bilevel "
    "method",
    metric=ERROR,
    contenders=_sum_contenders([1e-2, 1e-1, 1.0, 10.0], [1e-2, 1e-1, 1.0, 10.0, 100.0]),
    expect=at_most(1.0, of="best peer"),
    scales=SUM_SCALES,
)
def finite_sum_regression(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Solve the regression with rows of norm 1, as for one sample, with batches of √n rows.

    The control is what to use where projections and full gradients are cheap, as they are at this
    size: accelerated projected gradients, with the best constant weight.
    """
    inner, outer = _gaps(contender, rng, settings, gradients=gradients, batch=12, unit_rows=True)
    return Measurement(max(inner, outer), extras={"inner gap": inner, "outer gap": outer})


@claim(
    method="ir-cg",
    statement="On finite sums with rows of very different norms, IR-FSCG's inner gap is at most "
    "that of the best stochastic bilevel method",
    metric=INNER_GAP,
    contenders=_sum_contenders([1e-5, 1e-4, 1e-3, 1e-2], [1e-3, 1e-2, 1e-1, 1.0]),
    expect=at_most(1.0, of="best peer"),
    scales=SUM_SCALES,
)
def finite_sum_inner(
    contender: Contender, rng: np.random.Generator, *, gradients: int, **settings: Any
) -> Measurement:
    """Take the same data with standardized columns, whose rows differ widely in norm.

    The settings of the others are those of the least inner gap, which ignore F if that helps: SDBGD
    is then little but a stochastic gradient method for G, and ahead. Extras give the outer gap, far
    below zero for all: none is near the minimizers of G yet, where F is large.
    """
    inner, outer = _gaps(contender, rng, settings, gradients=gradients, batch=12, unit_rows=False)
    return Measurement(inner, extras={"outer gap": outer})


def _rate_scales(grid: list[int], longer: list[int]) -> dict[str, Scale]:
    return {
        "smoke": Scale(seeds=2, sweep={"steps": [100, 1_000]}),
        "quick": Scale(seeds=10, sweep={"steps": grid}),
        "full": Scale(seeds=12, sweep={"steps": longer}),
    }


def _method_gaps(rng: np.random.Generator, method: Any, steps: int) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    problem, least, best = _problem(int(for_instance.integers(2**31)), True)
    run = SelectionRun(problem, 0, 1, for_contender)
    result = ir_cg(
        *run.sums,
        L1Ball(problem.radius),
        run.x0,
        method=method,
        maxiter=steps,
        rng=for_contender,
    )
    inner, outer = result.fun_inner - least, result.fun_outer - best
    larger = max(inner, outer, 1e-12)
    return Measurement(larger, extras={"inner gap": inner, "outer gap": outer})


@claim(
    method="ir-cg",
    statement="With one sample per step both gaps fall at least as t^(-1/4)",
    metric=ERROR,
    contenders=[Contender("IR-SCG")],
    expect=trend(-2.0, -0.25, over="steps"),
    scales=_rate_scales(
        [1_000, 4_000, 16_000, 64_000], [1_000, 4_000, 16_000, 64_000, 256_000, 1_024_000]
    ),
)
def one_sample_rate(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Fit the slope of the larger gap of the regression over the number of steps, with defaults.

    The rates of the paper are upper bounds of G - G* and of F - F*; how far F is below F* depends
    on the geometry of G, and is not part of them. The slope is that of this problem.
    """
    return _method_gaps(rng, "irscg", steps)


@claim(
    method="ir-cg",
    statement="With SPIDER batches of a finite sum both gaps fall at least as t^(-1/2)",
    metric=ERROR,
    contenders=[Contender("IR-FSCG")],
    expect=trend(-2.0, -0.5, over="steps"),
    scales=_rate_scales([250, 1_000, 4_000], [250, 1_000, 4_000, 16_000, 64_000]),
)
def finite_sum_rate(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """As for one sample, with batches of √n rows."""
    return _method_gaps(rng, "irfscg", steps)


def _time_of_steps(run: SelectionRun, steps: int) -> float:
    steps *= 100  # they are shorter than what surrounds them
    inner, outer = run.sums
    result = ir_cg(inner, outer, L1Ball(run.problem.radius), run.x0, maxiter=steps, rng=run.rng)
    return float(result.history["time"][-1]) / steps


def _time_of_cuts(cut: Any) -> Any:
    def seconds(run: SelectionRun, steps: int) -> float:
        sums, begin = run.sums, time.perf_counter()
        half_space_steps(sums, run.problem.radius, run.x0, sums[0].value(run.x0), steps, run, cut)
        return (time.perf_counter() - begin) / steps

    return seconds


@claim(
    method="ir-cg",
    statement="A step of IR-SCG takes at most a fiftieth of the time of a step that minimizes over "
    "the set cut by a half-space, as a linear program",
    metric=Metric("seconds per step", better="lower", average="geometric mean", unit="s"),
    contenders=[
        Contender("IR-SCG", make=_time_of_steps),
        Contender("cut, HiGHS", make=_time_of_cuts(cut_by_program)),
        Contender("cut, bisection", make=_time_of_cuts(cut_by_bisection)),
    ],
    expect=at_most(0.02, of="cut, HiGHS"),
    scales={
        "smoke": Scale(seeds=2, steps=20),
        "quick": Scale(seeds=8, steps=100),
        "full": Scale(seeds=12, steps=400),
    },
)
def step_cost(contender: Contender, rng: np.random.Generator, *, steps: int) -> Measurement:
    """Show what the base set alone is good for, in the regression with 285 features.

    The cuts are those of SBCGF, with batches of √n rows, whose gradients are a small part of its
    time. The second peer shows that a linear program is not needed for one cut of an l1 ball: a
    bisection takes some tens of vertices. Sets with many constraints of their own have no such
    shortcut.
    """
    for_instance, for_contender = rng.spawn(2)
    problem = diabetes_selection(for_instance, unit_rows=True)
    assert contender.make is not None
    run = SelectionRun(problem, 0, 12, for_contender)
    contender.make(run, 10)  # compiles
    return Measurement(contender.make(run, steps))
