"""Pseudoinverse hypergradients beside gradients of the lower level, with and without a matrix."""

from __future__ import annotations

import pytest
import torch

from thalweg.bilevel import PInv, pseudoinverse_hypergradient

pytestmark = pytest.mark.usefixtures("one_thread")


def problem(d, rows):
    """Return f, g and a minimizer of g: least squares with fewer rows than variables."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(rows, d, generator=generator) / d**0.5
    target = torch.randn(d, generator=generator)
    x, y = torch.randn(rows, generator=generator), torch.zeros(d)
    y = A.T @ torch.linalg.solve(A @ A.T, x)

    def f(x, y):
        return (y - target).square().sum() / 2

    def g(x, y):
        return (A @ y - x).square().sum() / 2

    return f, g, x, y


def hypergradient(d, rows, solve):
    f, g, x, y = problem(d, rows)
    return lambda: pseudoinverse_hypergradient(f, g, x, y, solve=solve)


def gradient(d, rows):
    _, g, x, y = problem(d, rows)

    def run():
        leaf = y.detach().requires_grad_()
        torch.autograd.grad(g(x, leaf), leaf)

    return run


@pytest.mark.parametrize(("d", "method"), [(300, "dense"), (300, "lsmr"), (20_000, "lsmr")])
def test_hypergradient(benchmark, d, method):
    benchmark(hypergradient(d, 50, PInv(method=method, maxiter=10)))


def test_ten_steps_of_lsmr_cost_some_gradients(seconds_in_turn):
    """A million variables: ten steps of LSMR, of two products each, at most 60 gradients."""
    best = seconds_in_turn(
        {
            "ours": hypergradient(1_000_000, 20, PInv(method="lsmr", maxiter=10)),
            "gradient": gradient(1_000_000, 20),
        },
        rounds=4,
    )
    assert best["ours"] <= 60 * best["gradient"]
