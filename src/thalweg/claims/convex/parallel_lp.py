"""Claims about the parallel optimization of ℓp-Lipschitz functions.

A contender's ``make`` is a solver, called as ``make(race, **tuned)`` with a `Race`; it asks the
race batch after batch and is ended by it. A peer of your own takes one line,
``claim.with_contender(Contender("mine", make=mine))``.

Rounds are counted until a feasible point of the wanted accuracy has been evaluated, against the
exact minimum. A run that does not get there within its rounds counts as failed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from thalweg.claims.convex.round_solvers import (
    Race,
    analytic_center,
    averaged_subgradient,
    evolution_strategy,
    level_bundle,
    subgradient,
    thalweg_solver,
)
from thalweg.convex import HardInstance, minimize_parallel, shielded_instance
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_least, at_most, claim, trend
from thalweg.tasks import worst_case_regression

STEPS = [0.03, 0.1, 0.3, 1.0, 3.0]
ROUNDS = Metric(
    "rounds", better="lower", average="geometric mean", curve=("round", "error of the best point")
)
BALL = Contender("ball acceleration", make=partial(thalweg_solver, method="ball"))
AGD = Contender("smoothed AGD", make=partial(thalweg_solver, method="smoothed-agd"))
MIRROR = Contender("mirror descent", make=partial(thalweg_solver, method="mirror"))
SUBGRADIENT = Contender("subgradient", make=subgradient, tune={"c": STEPS})
AVERAGED = Contender("averaged subgradient", make=averaged_subgradient, tune={"c": STEPS})
LEVEL = Contender("level bundle", make=level_bundle)
WIDE_LEVEL = Contender("level bundle, 32 a round", make=partial(level_bundle, queries=32))
CENTER = Contender("analytic center", make=analytic_center)
CMA = Contender("CMA-ES", make=evolution_strategy)


@claim(
    method="parallel-lp",
    statement="With 256 gradients a round, ball acceleration's rounds grow at most like the "
    "0.8th power of 1/ε over the ℓ∞ ball",
    metric=ROUNDS,
    contenders=[BALL, AGD, SUBGRADIENT, LEVEL],
    expect=trend(0.0, 0.8, over="inverse_eps"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, sweep={"inverse_eps": [3.0, 6.0]}, dim=5),
        "quick": Scale(
            seeds=8, tuning_seeds=1, sweep={"inverse_eps": [10.0, 30.0, 100.0, 300.0]}, dim=30
        ),
        "full": Scale(
            seeds=12, tuning_seeds=2, sweep={"inverse_eps": [10.0, 30.0, 100.0, 300.0]}, dim=100
        ),
    },
    headline=True,
)
def growth_in_accuracy(
    contender: Contender, rng: np.random.Generator, *, inverse_eps: float, dim: int, **tuned: Any
) -> Measurement:
    """Fit a worst-case regression over the box; ε is a share of the first error.

    Theory says 2/3 for ball acceleration, 1 for smoothed AGD and 2 for subgradient methods, whose
    width is wasted. A level bundle, sequential as it is, grows like log(1/ε) once it has seen as
    many cuts as there are dimensions: low dimensions are its own, whatever the width.
    """
    return _race(
        contender, rng, dim=dim, p=np.inf, inverse_eps=inverse_eps, max_rounds=50_000, **tuned
    )


@claim(
    method="parallel-lp",
    statement="With 256 gradients a round, ball acceleration's rounds grow at most like the "
    "0.6th power of the dimension over the ℓ∞ ball",
    metric=ROUNDS,
    contenders=[BALL, AGD, SUBGRADIENT, LEVEL, CENTER],
    expect=trend(0.0, 0.6, over="dim"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, sweep={"dim": [4, 8]}, inverse_eps=5.0),
        "quick": Scale(seeds=8, tuning_seeds=1, sweep={"dim": [12, 25, 50, 100]}, inverse_eps=30.0),
        "full": Scale(
            seeds=8, tuning_seeds=1, sweep={"dim": [50, 100, 200, 400]}, inverse_eps=30.0
        ),
    },
)
def growth_in_dimension(
    contender: Contender, rng: np.random.Generator, *, dim: int, inverse_eps: float, **tuned: Any
) -> Measurement:
    """Fit worst-case regressions of more and more coefficients, to a thirtieth of the first error.

    Theory says 1/3 for ball acceleration, 1/2 for smoothed AGD and 1 for subgradient methods.
    """
    return _race(contender, rng, dim=dim, p=np.inf, inverse_eps=inverse_eps, **tuned)


@claim(
    method="parallel-lp",
    statement="To a hundredth of the first error over the ℓ∞ ball, minimize_parallel takes no more "
    "rounds than the best peer",
    metric=ROUNDS,
    contenders=[
        Contender("minimize_parallel", make=thalweg_solver),
        SUBGRADIENT,
        AVERAGED,
        LEVEL,
        WIDE_LEVEL,
        CENTER,
        CMA,
        Contender("ball acceleration", make=BALL.make, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, dim=5, inverse_eps=10.0),
        "quick": Scale(seeds=8, tuning_seeds=1, dim=50, inverse_eps=100.0),
        "full": Scale(seeds=8, tuning_seeds=1, dim=200, inverse_eps=100.0),
    },
)
def rounds_beside_peers(
    contender: Contender, rng: np.random.Generator, *, dim: int, inverse_eps: float, **tuned: Any
) -> Measurement:
    """Fit a worst-case regression over the box.

    The level bundle solves a linear and a quadratic program between rounds and uses every cut it
    has ever seen; with 32 cuts a round it is the strongest use of width known for such sizes. It
    is what the accelerated methods, which forget, must be held against. CMA-ES is what people run
    when they have many workers; the averaged subgradient is smoothing without acceleration.
    """
    return _race(contender, rng, dim=dim, p=np.inf, inverse_eps=inverse_eps, **tuned)


@claim(
    method="parallel-lp",
    statement="Over ℓp balls, p = 1.5, 2, 3, 4, minimize_parallel takes at most a third of the "
    "rounds of the best of mirror descent, subgradients and analytic centers",
    metric=ROUNDS,
    contenders=[
        Contender("minimize_parallel", make=thalweg_solver),
        MIRROR,
        SUBGRADIENT,
        CENTER,
        Contender("ball acceleration", make=BALL.make, control=True),
    ],
    expect=at_most(1 / 3, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, dim=5, inverse_eps=5.0),
        "quick": Scale(seeds=8, tuning_seeds=1, dim=40, inverse_eps=30.0),
        "full": Scale(seeds=8, tuning_seeds=2, dim=200, inverse_eps=100.0),
    },
)
def other_norms(
    contender: Contender, rng: np.random.Generator, *, dim: int, inverse_eps: float, **tuned: Any
) -> Measurement:
    """Fit a worst-case regression over the ball of each ℓp; the value is the geometric mean.

    Each p is an extra. Mirror descent has the geometry of its own p, the subgradient method the
    Euclidean one and a tuned step.
    """
    norms = (1.5, 2.0, 3.0, 4.0)
    runs = [
        _race(contender, stream, dim=dim, p=p, inverse_eps=inverse_eps, **tuned).value
        for p, stream in zip(norms, rng.spawn(len(norms)), strict=True)
    ]
    extras = {f"p = {p:g}": rounds for p, rounds in zip(norms, runs, strict=True)}
    return Measurement(float(np.exp(np.mean(np.log(runs)))), extras=extras)


@claim(
    method="parallel-lp",
    statement="After the same number of rounds over ℓp balls, p = 1.5, 2, 3, 4, ∞, "
    "minimize_parallel has at most half the error of mirror descent, subgradients and cutting "
    "planes",
    metric=Metric(
        "relative error",
        better="lower",
        average="geometric mean",
        curve=("round", "relative error"),
    ),
    contenders=[
        Contender("minimize_parallel", make=thalweg_solver),
        MIRROR,
        SUBGRADIENT,
        CENTER,
        Contender("ball acceleration", make=BALL.make, control=True),
    ],
    expect=at_most(0.5, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, dim=5, rounds=5),
        "quick": Scale(seeds=8, tuning_seeds=1, dim=100, rounds=50),
        "full": Scale(seeds=8, tuning_seeds=1, dim=1_000, rounds=100),
    },
)
def same_rounds(
    contender: Contender, rng: np.random.Generator, *, dim: int, rounds: int, **tuned: Any
) -> Measurement:
    """Fit regressions that can be fitted exactly, in up to a thousand dimensions.

    The value is the geometric mean over p of the error after all rounds, as a share of the first;
    each p is an extra, and the curve is that of p = ∞. Width pays where rounds are few beside the
    dimension: there cutting planes have not yet begun to close in.
    """
    norms = (1.5, 2.0, 3.0, 4.0, np.inf)
    errors: dict[str, float] = {}
    for p, stream in zip(norms, rng.spawn(len(norms)), strict=True):
        for_instance, for_contender = stream.spawn(2)
        problem = worst_case_regression(dim, p, inside=True, rng=for_instance)
        first = problem.start_value
        race = Race(problem, first / 20, 256, rounds, for_contender, all_rounds=True)
        assert contender.make is not None
        race.run(contender.make, **tuned)
        errors[f"p = {p:g}"] = race.errors[-1] / first
    curve = (np.arange(1, race.rounds + 1), np.array(race.errors) / first)
    return Measurement(float(np.exp(np.mean(np.log(list(errors.values()))))), curve, errors)


@claim(
    method="parallel-lp",
    statement="256 gradients a round take at most 0.7 of the rounds that 16 take",
    metric=ROUNDS,
    contenders=[
        Contender("256 a round", make=thalweg_solver),
        Contender("16 a round", make=partial(thalweg_solver, width=16)),
        Contender("64 a round", make=partial(thalweg_solver, width=64), control=True),
        Contender("1024 a round", make=partial(thalweg_solver, width=1024), control=True),
    ],
    expect=at_most(0.7, of="16 a round"),
    scales={
        "smoke": Scale(seeds=2, dim=5, inverse_eps=10.0),
        "quick": Scale(seeds=10, dim=50, inverse_eps=100.0),
        "full": Scale(seeds=16, dim=200, inverse_eps=100.0),
    },
)
def width_of_a_round(
    contender: Contender, rng: np.random.Generator, *, dim: int, inverse_eps: float, **tuned: Any
) -> Measurement:
    """Fit a worst-case regression over the box with batches of 16 to 1024.

    Width averages the noise of smoothing out; from where that is done, more of it is wasted.
    """
    return _race(contender, rng, dim=dim, p=np.inf, inverse_eps=inverse_eps, **tuned)


@claim(
    method="parallel-lp",
    statement="On a shielded instance, a round of 100 queries shows at most one new piece in at "
    "least 99 % of rounds",
    metric=Metric("share of rounds with at most one new piece", better="higher"),
    contenders=[
        Contender("minimize_parallel", make=partial(minimize_parallel, method="auto")),
        Contender("ball acceleration", make=partial(minimize_parallel, method="ball")),
        Contender("mirror descent", make=partial(minimize_parallel, method="mirror")),
    ],
    expect=at_least(0.99),
    scales={
        "smoke": Scale(seeds=2, dim=2_000, width=20, max_rounds=60),
        "quick": Scale(seeds=8, dim=8_000, width=100, max_rounds=200),
        "full": Scale(seeds=8, dim=20_000, width=100, max_rounds=200),
    },
)
def one_piece_a_round(
    contender: Contender,
    rng: np.random.Generator,
    *,
    dim: int,
    width: int,
    max_rounds: int,
    **tuned: Any,
) -> Measurement:
    """Minimize shielded maxima over the Euclidean ball, and watch which pieces answers show.

    A run ends when all pieces have been seen, and counts as failed if that takes too many rounds.
    This is the mechanism of the lower bound: whatever is asked in between, as many rounds are
    needed as there are pieces, and dual averaging with one query a round needs no more.
    """
    for_instance, for_contender = rng.spawn(2)
    # Samples leave the ball by 10 ε/2 in length.
    instance = shielded_instance(dim, 2.0, width=width, query_radius=1.55, rng=for_instance)
    watch = _Watch(instance)
    assert contender.make is not None
    contender.make(
        watch,
        np.zeros(dim),
        p=2.0,
        eps=0.1,
        smoothing=10.0,
        width=width,
        max_rounds=max_rounds,
        rng=for_contender,
        callback=watch.stop,
        **tuned,
    )
    if len(watch.seen) < instance.k:
        return Measurement(float("nan"))
    return Measurement(
        float(np.mean(np.array(watch.new) <= 1)),
        extras={"pieces": float(instance.k), "rounds": float(len(watch.new))},
    )


class _Watch:
    """A batch function that notes how many new pieces each round shows."""

    def __init__(self, instance: HardInstance) -> None:
        self.instance = instance
        self.seen: set[int] = set()
        self.new: list[int] = []

    def __call__(self, X: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shown = set(self.instance.piece(X).tolist()) - self.seen
        self.new.append(len(shown))
        self.seen |= shown
        return self.instance.fun_batch(X)

    def stop(self, x: np.ndarray) -> None:
        """End the run once all pieces have been seen."""
        if len(self.seen) == self.instance.k:
            raise StopIteration


def _race(
    contender: Contender,
    rng: np.random.Generator,
    *,
    dim: int,
    p: float,
    inverse_eps: float,
    max_rounds: int = 6_000,
    **tuned: Any,
) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    problem = worst_case_regression(dim, p, rng=for_instance)
    first_error = problem.start_value - problem.minimum
    race = Race(problem, first_error / inverse_eps, 256, max_rounds, for_contender)
    assert contender.make is not None
    race.run(contender.make, **tuned)
    curve = (np.arange(1, race.rounds + 1), np.array(race.errors) / first_error)
    return Measurement(race.rounds_needed, curve)
