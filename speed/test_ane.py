"""Antithetic hypergradients beside plain ones, and products with the Hessian of many rows."""

from __future__ import annotations

import pytest
import torch

from thalweg.bilevel import CG, AntitheticNeumann, Neumann, StochasticHypergradient
from thalweg.tasks import corrupted_labels

pytestmark = pytest.mark.usefixtures("one_thread")

K, BATCH = 20, 32


def engine(solve):
    """Return a function of one hypergradient of the breast-cancer problem."""
    problem = corrupted_labels(0)
    x, y = problem.start()
    generator = torch.Generator().manual_seed(0)
    rows = problem.inner_data

    def batch():
        chosen = torch.randint(300, (BATCH,), generator=generator)
        return tuple(part[chosen] for part in rows)

    found = StochasticHypergradient(
        problem.f, problem.g, x, y, solve=solve, inner_data=rows, batch_size=BATCH
    )
    batches = [batch() for _ in range(1 + solve.n_batches)]
    return lambda: found(x, y, problem.outer_data, batches)


CONTENDERS = {
    "antithetic": AntitheticNeumann(K=K, eta=0.1),
    "plain": Neumann(K=K, eta=0.1),
    "CG": CG(K),
}


@pytest.mark.parametrize("name", CONTENDERS)
def test_hypergradient(benchmark, name):
    benchmark(engine(CONTENDERS[name]))


def test_two_chains_cost_little_more_than_one(seconds_in_turn):
    """Three products a factor, two of them of a block, at no more than 2.2 of one's time."""
    calls = {name: engine(CONTENDERS[name]) for name in ("antithetic", "plain")}
    best = seconds_in_turn(calls, rounds=20)
    assert best["antithetic"] <= 2.2 * best["plain"]


def test_products_of_many_rows_cost_two_matrix_products(seconds_in_turn):
    """100,000 rows of 100 features: by derivatives at most 2.5 times AᵀDAv written out."""
    A = torch.randn(100_000, 100)
    labels = (torch.rand(100_000) > 0.5).float()

    def g(x, y):
        return torch.nn.functional.binary_cross_entropy_with_logits(A @ y, labels)

    y = torch.zeros(100)
    products = StochasticHypergradient(
        lambda x, y: y.sum(), g, torch.zeros(1), y, solve=CG()
    ).objectives.hessian(torch.zeros(1), y)
    v = torch.randn(1, 100)
    D = torch.full((100_000,), 0.25 / 100_000)
    torch.testing.assert_close(products(v)[0], A.T @ (D * (A @ v[0])), rtol=1e-3, atol=1e-4)
    best = seconds_in_turn(
        {"ours": lambda: products(v), "direct": lambda: A.T @ (D * (A @ v[0]))}, rounds=15
    )
    assert best["ours"] <= 2.5 * best["direct"]
