"""IZOM at equal lower solves beside CMA-ES, and lower solves beside general solvers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import LinearConstraint, minimize

from thalweg.bilevel import HyperObjective, LeastSquaresFollower, TranslatedBoxFollower, izom
from thalweg.claims.bilevel.hyper_solvers import HyperRun, cma_es, cobyqa, py_bobyqa, zeroth_order
from thalweg.tasks import MovingInterval, low_rank_fit

pytestmark = pytest.mark.usefixtures("one_thread")

SOLVES = 400


def many_followers():
    problem = low_rank_fit(np.random.default_rng(0))
    follower = LeastSquaresFollower(problem.A, problem.B)
    phi = HyperObjective(follower, problem.upper, problem.grad_y, problem.hess_y)
    return problem, phi


def solver(name):
    """Return a function that spends 400 lower solves."""
    problem, phi = many_followers()
    run = HyperRun(phi, problem.x0, SOLVES, np.random.default_rng(0), problem=problem)
    call, options = {
        "IZOM": (zeroth_order, {}),
        "CMA-ES": (cma_es, {"sigma": 0.3}),
        "COBYQA": (cobyqa, {"radius": 0.3}),
        "Py-BOBYQA": (py_bobyqa, {"radius": 0.3}),
    }[name]
    return lambda: call(run, **options)


@pytest.mark.parametrize("name", ["IZOM", "CMA-ES", "COBYQA", "Py-BOBYQA"])
def test_four_hundred_lower_solves(benchmark, name):
    benchmark.group = "400 lower solves"
    benchmark.pedantic(solver(name), rounds=3, warmup_rounds=1)


def test_equal_lower_solves_take_less_time_than_with_cma(capsys, seconds_in_turn):
    names = ("IZOM", "CMA-ES", "COBYQA")
    best = seconds_in_turn({name: solver(name) for name in names}, 5)
    ratio, rate = best["IZOM"] / best["CMA-ES"], SOLVES / best["IZOM"]
    with capsys.disabled():
        print(
            f"\n400 lower solves by IZOM, of those by CMA-ES: {ratio:.2f}, by COBYQA: "
            f"{best['IZOM'] / best['COBYQA']:.2f}; {rate:.0f} a second"
        )
    assert ratio <= 1.0


def test_lower_solves_in_a_basis_beat_a_constrained_solver(capsys, seconds_in_turn):
    """Beside SLSQP on min F subject to Ay = its value, with the same derivatives."""
    problem, phi = many_followers()
    x = problem.x0
    follower = phi.follower
    y0 = follower.solutions.least_norm(follower.rhs(x))
    constraint = LinearConstraint(problem.A[:6], problem.A[:6] @ y0, problem.A[:6] @ y0)

    def slsqp():
        for _ in range(20):
            minimize(
                lambda y: problem.upper(x, y),
                y0,
                jac=lambda y: problem.grad_y(x, y),
                method="SLSQP",
                constraints=constraint,
                options={"ftol": 1e-8},
            )

    best = seconds_in_turn(
        {"basis": lambda: [phi.value(x, tol=1e-6) for _ in range(20)], "SLSQP": slsqp}, 5
    )
    ratio = best["basis"] / best["SLSQP"]
    with capsys.disabled():
        print(f"\na lower solve in a basis of the null space, of one by SLSQP: {ratio:.2f}")
    assert ratio <= 0.3


def test_steps_cost_little_beside_cheap_values(capsys, seconds_in_turn):
    """Beside the loop itself, written out, with values in closed form."""
    task, x0 = MovingInterval(), np.array([4.0])

    def phi(x):
        return task.value(x, "pessimistic")

    def bare():
        rng, x = np.random.default_rng(0), x0
        for _ in range(2000):
            u = rng.standard_normal(1)
            u /= np.linalg.norm(u)
            x = x - 0.005 * (phi(x + 0.01 * u) - phi(x - 0.01 * u)) / 0.02 * u

    best = seconds_in_turn(
        {"bare": bare, "izom": lambda: izom(phi, x0, eta=0.005, eps=0.01, maxiter=2000, rng=0)}, 5
    )
    ratio = best["izom"] / best["bare"]
    with capsys.disabled():
        print(f"\nIZOM with values in closed form, of the bare loop: {ratio:.2f}")
    assert ratio <= 4


def test_warm_starts_pay(capsys, seconds_in_turn):
    """Beside solves that start from the least-norm solution, at neighboring points."""
    problem, phi = many_followers()
    rng = np.random.default_rng(0)
    points = problem.x0 + 0.01 * rng.standard_normal((200, 5))
    y = phi.value(problem.x0, tol=1e-4).y
    best = seconds_in_turn(
        {
            "warm": lambda: [phi.value(x, tol=1e-4, start=y) for x in points],
            "cold": lambda: [phi.value(x, tol=1e-4) for x in points],
        },
        5,
    )
    ratio = best["warm"] / best["cold"]
    with capsys.disabled():
        print(f"\na lower solve from a neighbor, of one from the start: {ratio:.2f}")
    assert ratio <= 0.9


@pytest.mark.parametrize("mode", ["optimistic", "pessimistic"])
def test_moving_interval(benchmark, mode):
    follower = TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))
    phi = HyperObjective(follower, MovingInterval.upper)
    benchmark.group = "a solve over an interval"
    benchmark.pedantic(lambda: phi([0.7], mode, 1e-6), rounds=20, warmup_rounds=2)
