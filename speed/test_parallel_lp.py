"""Overhead of the parallel solvers beside slow gradients, and projections on lp balls."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import threadpoolctl

from thalweg.convex import minimize_parallel
from thalweg.convex.lp_geometry import LpBall
from thalweg.tasks import worst_case_regression


@pytest.fixture(autouse=True)
def one_blas_thread():
    """Compare on one core: the products are small, and idle threads make them erratic."""
    with threadpoolctl.threadpool_limits(1):
        yield


class Slow:
    """A batch function that takes ``seconds`` for each of its pieces, as a simulation would."""

    def __init__(self, problem, seconds):
        self.problem, self.seconds = problem, seconds

    def __call__(self, X):
        time.sleep(self.seconds)
        return self.problem.fun_batch(X)


def run(function, problem, method, rounds, **options):
    return minimize_parallel(
        function,
        np.zeros(problem.dim),
        p=problem.p,
        eps=1e-4,
        method=method,
        max_rounds=rounds,
        rng=0,
        **options,
    )


@pytest.mark.parametrize("method", ["smoothed-agd", "ball"])
def test_overhead_beside_gradients_of_50_ms(method, seconds_in_turn):
    problem = worst_case_regression(100, np.inf, rng=0)
    slow = Slow(problem, 0.05)
    times = seconds_in_turn({"run": lambda: run(slow, problem, method, 20)}, 2)
    overhead = times["run"] / (20 * 0.05) - 1
    print(f"\n{method}: overhead {overhead:.1%} of the rounds' time")
    assert overhead < 0.5 if method == "ball" else overhead < 0.15


def test_two_workers_halve_the_time(seconds_in_turn):
    problem = worst_case_regression(50, np.inf, rng=0)

    def one_by_one(X):
        time.sleep(2e-4 * len(X))
        return problem.fun_batch(X)

    with ThreadPoolExecutor(2) as executor:
        times = seconds_in_turn(
            {
                "one": lambda: run(one_by_one, problem, "smoothed-agd", 20),
                "two": lambda: run(
                    one_by_one, problem, "smoothed-agd", 20, executor=executor, n_chunks=2
                ),
            },
            2,
        )
    ratio = times["two"] / times["one"]
    print(f"\ntwo workers take {ratio:.2f} of the time of one")
    assert ratio < 0.65


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
def test_projection(benchmark, p):
    x = np.random.default_rng(0).normal(size=1000)
    ball = LpBall(np.zeros(1000), 1.0, p)
    benchmark(ball.project, x)
    assert benchmark.stats.stats.min < 0.02
