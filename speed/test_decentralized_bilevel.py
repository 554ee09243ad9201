"""Normalized decentralized bilevel steps beside the gradients that they are made of."""

from __future__ import annotations

import networkx
import numpy as np
import pytest
import torch

from thalweg.bilevel import decentralized_bilevel, mixing_matrix
from thalweg.tasks import agent_quadratics

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 1000


def run(**settings):
    """Return a function that makes 1,000 steps of eight agents."""
    problem = agent_quadratics(np.random.default_rng(0))
    _, p, q = problem.sizes
    given = {"W": mixing_matrix(networkx.cycle_graph(8)), "sampler": problem.draw, "rng": 0}
    given |= {"maxiter": STEPS, "schedule": "constant", "record_every": STEPS} | settings
    x, y = np.zeros(p), np.zeros(q)
    return lambda: decentralized_bilevel(problem.grad_f, problem.grad_g, x, y, **given)


def gradients():
    """Return a function that takes the gradients of 1,000 steps, at two points each."""
    problem = agent_quadratics(np.random.default_rng(0))
    n, p, q = problem.sizes
    X, Y, rng = np.zeros((n, p)), np.zeros((n, q)), np.random.default_rng(0)

    def take():
        for _ in range(STEPS):
            batch = problem.draw(rng)
            for _ in range(2):
                problem.grad_f(X, Y, batch)
                problem.grad_g(X, Y, batch)
                problem.grad_g(X, Y, batch)

    return take


@pytest.mark.parametrize(
    "settings",
    [{}, {"beta": 1.0}, {"normalize": None, "beta": 1.0, "clip": 3.0}],
    ids=["NVR-DSBO", "normalized-SGD", "clipped-SGD"],
)
def test_thousand_steps(benchmark, settings):
    benchmark(run(**settings))


def test_steps_cost_little_beside_their_gradients(seconds_in_turn):
    """Estimates, tracking, mixing and normalization, beside gradients of 16 numbers an agent."""
    best = seconds_in_turn({"run": run(), "gradients": gradients()}, rounds=5)
    assert best["run"] <= 2.5 * best["gradients"]


def test_networks_of_agents(seconds_in_turn):
    """Eight agents with 100,000 parameters each: vectorized, at most 2.5 times eight gradients."""
    torch.manual_seed(0)
    sizes, rows = (64, 1400, 10), torch.randn(8, 32, 64)
    labels = torch.randint(10, (8, 32))
    y0 = {"A": torch.randn(sizes[0], sizes[1]) / 8, "B": torch.randn(sizes[1], sizes[2]) / 40}

    def loss(x, y, batch):
        logits = torch.tanh(batch[0] @ y["A"]) @ y["B"]
        return torch.nn.functional.cross_entropy(logits, batch[1]) + 0 * x.sum()

    def steps():
        decentralized_bilevel(
            [loss] * 8,
            [loss] * 8,
            torch.zeros(1),
            y0,
            W=mixing_matrix(networkx.cycle_graph(8)),
            sampler=lambda rng: (rows, labels),
            maxiter=10,
            warm_batch=1,
            schedule="constant",
            record_every=10,
        )

    def one_by_one():
        for _ in range(10 * 8 * 6):
            parts = {name: part.clone().requires_grad_() for name, part in y0.items()}
            value = loss(torch.zeros(1), parts, (rows[0], labels[0]))
            torch.autograd.grad(value, list(parts.values()))

    best = seconds_in_turn({"steps": steps, "one by one": one_by_one}, rounds=2)
    assert best["steps"] <= 2.5 * best["one by one"]
