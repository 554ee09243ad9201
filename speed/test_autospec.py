"""AutoSpec's polynomials beside conjugate gradients and multigrid, and the cost of applying one."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import threadpoolctl
from scipy.sparse.linalg import cg

from thalweg.curvature import autospec_eigsh, chebyshev_recurrence, pretrained
from thalweg.tasks import digits_laplacian, spd_operator

UNKNOWNS = 250_000


@pytest.fixture(autouse=True)
def one_blas_thread():
    """Compare on one core: products with sparse matrices use one anyway."""
    with threadpoolctl.threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def poisson():
    operator = spd_operator("poisson", UNKNOWNS)
    return operator, np.random.default_rng(0).normal(size=operator.matrix.shape[0])


def test_apply(benchmark, poisson):
    operator, b = poisson
    M = pretrained("precond", 12).operator(operator.matrix, rng=0)
    benchmark.pedantic(lambda: M @ b, rounds=5, warmup_rounds=1)


def test_solve(benchmark, poisson):
    operator, b = poisson

    def solve():
        M = pretrained("precond", 12).operator(operator.matrix, rng=0)
        return cg(operator.matrix, b, rtol=1e-8, M=M)

    benchmark.pedantic(solve, rounds=1)


def test_solve_without(benchmark, poisson):
    operator, b = poisson
    benchmark.pedantic(lambda: cg(operator.matrix, b, rtol=1e-8), rounds=1)


def test_applying_costs_little_more_than_its_products(seconds_in_turn, poisson):
    """A degree costs one product and four passes over vectors of the same length."""
    operator, b = poisson
    M = pretrained("precond", 12).operator(operator.matrix, rng=0)

    def products():
        for _ in range(12):
            operator.matrix @ b

    seconds = seconds_in_turn({"polynomial": lambda: M @ b, "products": products}, 7)
    ratio = seconds["polynomial"] / seconds["products"]
    print(f"polynomial / products alone: {ratio:.2f}")
    assert ratio < 2.5


def test_the_network_takes_about_a_millisecond(seconds_in_turn, poisson):
    """As much as a few products with a matrix of this size, once per operator."""
    operator, b = poisson
    model = pretrained("precond", 12)
    probe = model.probe(operator.matrix, rng=0)
    seconds = seconds_in_turn(
        {
            "network": lambda: model.coefficients(probe),
            "chebyshev": lambda: chebyshev_recurrence("precond", 12, low=0.001, high=1.0),
            "product": lambda: operator.matrix @ b,
        },
        20,
    )
    print(", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items()))
    assert seconds["network"] < 5 * seconds["product"]


def test_eigenpairs(benchmark):
    laplacian = digits_laplacian()
    A = laplacian + 1e-3 * sp.eye_array(laplacian.shape[0])
    result = benchmark.pedantic(lambda: autospec_eigsh(A, 10, tol=1e-6, rng=0), rounds=3)
    assert result.converged
