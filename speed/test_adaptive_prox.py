"""AdaProx beside torch.optim.SGD per step, and beside FISTA per iteration of a sparse lasso."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pyproximal.optimization.primal import ProximalGradient

from thalweg.convex import L1, AdaProx, AdaProxAccel, minimize_adaprox
from thalweg.tasks import sparse_regression, transformer_shapes

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-9, foreach=True),
    "AdaProx": lambda p: AdaProx(p, D=1e-6, check_finite=False),
    "AdaProx, checked": lambda p: AdaProx(p, D=1e-6),
    "AdaProx, L1": lambda p: AdaProx(p, L1(1e-9), D=1e-6, check_finite=False),
    "AdaProxAccel, L1": lambda p: AdaProxAccel(p, L1(1e-9), D=1e-6, check_finite=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-9, foreach=True),
}


@pytest.fixture
def parameters(parameters_with_gradients):
    return parameters_with_gradients(transformer_shapes())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step(benchmark, parameters, name):
    optimizer = OPTIMIZERS[name](parameters)
    benchmark.group = "step, transformer"
    benchmark.pedantic(optimizer.step, rounds=5, warmup_rounds=2)


def test_ratios(parameters, capsys, seconds_in_turn):
    """SGD makes three passes; without prox one more, for the norm."""
    best = seconds_in_turn({name: make(parameters).step for name, make in OPTIMIZERS.items()}, 8)
    ratios = {name: seconds / best["SGD"] for name, seconds in best.items()}
    with capsys.disabled():
        print("\nof SGD: ", {name: f"{ratio:.2f}" for name, ratio in ratios.items()})
    assert ratios["AdaProx"] <= 2.5
    assert ratios["AdaProx, checked"] <= 3.0
    assert ratios["AdaProx, L1"] <= 4.5
    assert best["AdaProx, L1"] <= 1.2 * best["AdamW"]


class Squares:
    """A loss in the form of pyproximal's."""

    def __init__(self, problem):
        self.problem = problem

    def __call__(self, x):
        return 0.0

    def grad(self, x):
        return self.problem(x)[1]


def test_an_iteration_costs_its_products(capsys, seconds_in_turn):
    """100,000 × 10,000 sparse data, beside the gradients alone and FISTA of pyproximal."""
    problem = sparse_regression(np.random.default_rng(0), 100_000, 10_000)
    penalty, x0, steps = L1(problem.weight), np.zeros(10_000), 20
    run = {
        "gradients": lambda: [problem(x0) for _ in range(steps)],
        "AdaProx": lambda: minimize_adaprox(problem, x0, prox=penalty, maxiter=steps, gtol=0),
        "accelerated": lambda: minimize_adaprox(
            problem, x0, prox=penalty, maxiter=steps, gtol=0, accelerated=True
        ),
        "FISTA": lambda: ProximalGradient(
            Squares(problem), penalty, x0, tau=0.1, niter=steps, acceleration="fista"
        ),
    }
    best = seconds_in_turn(run, 4)
    ratios = {name: seconds / best["gradients"] for name, seconds in best.items()}
    with capsys.disabled():
        print("\nof the gradients alone: ", {k: f"{v:.2f}" for k, v in ratios.items()})
    # Two to four evaluations of the outputs come at the end of 20 steps.
    assert ratios["AdaProx"] <= 1.5
    assert ratios["accelerated"] <= 1.5
