"""Block eigensolvers against dense eigendecompositions."""

import itertools

import numpy as np
import pytest
import torch

from thalweg.combinatorial.eigensolvers import (
    block_lanczos,
    chebyshev_iteration,
    inner,
    lobpcg,
    rayleigh_ritz,
    spectral_norm,
)

SOLVERS = {"lobpcg": lobpcg, "lanczos": block_lanczos, "cheb": chebyshev_iteration}


def symmetric(n, dtype=torch.float64, seed=0):
    """A matrix with a known spectrum: 1, .9, .8, .7 above a bulk in [-0.6, 0.6]."""
    generator = torch.Generator().manual_seed(seed)
    Q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    values = torch.linspace(-0.6, 0.6, n, dtype=torch.float64)
    values[-4:] = torch.tensor([0.7, 0.8, 0.9, 1.0], dtype=torch.float64)
    return ((Q * values) @ Q.T).to(dtype), Q.flip(1)[:, :4], values.flip(0)[:4]


def start(n, k, dtype=torch.float64):
    return torch.randn(n, k, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_find_the_top_eigenpairs(name):
    M, Q, values = symmetric(300)
    pairs = SOLVERS[name](lambda X: M @ X, start(300, 4), tol=1e-9, max_iter=400)
    torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-12)
    # sin(angle) <= residual / gap = 1e-9 / 0.1, column by column.
    overlaps = (pairs.vectors * Q).sum(dim=0).abs()
    torch.testing.assert_close(overlaps, torch.ones_like(overlaps), rtol=0, atol=1e-8)
    assert bool((pairs.residuals <= 1e-9).all())


@pytest.mark.parametrize("name", SOLVERS)
def test_residuals_are_those_of_the_returned_vectors(name):
    M, _, _ = symmetric(300)
    pairs = SOLVERS[name](lambda X: M @ X, start(300, 3), tol=1e-12, max_iter=8)
    exact = torch.linalg.vector_norm(M @ pairs.vectors - pairs.vectors * pairs.values, dim=0)
    torch.testing.assert_close(pairs.residuals, exact, rtol=1e-8, atol=1e-12)
    gram = pairs.vectors.T @ pairs.vectors
    torch.testing.assert_close(gram, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SOLVERS)
def test_float32_reaches_its_own_precision(name):
    M, _, values = symmetric(300, torch.float32)
    pairs = SOLVERS[name](lambda X: M @ X, start(300, 4, torch.float32), tol=2e-6, max_iter=400)
    torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-5)
    assert pairs.vectors.dtype == torch.float32


@pytest.mark.parametrize("name", SOLVERS)
def test_a_converged_start_needs_one_product(name):
    M, Q, _ = symmetric(300)
    calls = []

    def product(X):
        calls.append(X.shape[1])
        return M @ X

    pairs = SOLVERS[name](product, Q, tol=1e-8, max_iter=50)
    assert pairs.products == 1
    # The Chebyshev filter also estimates the bottom of the spectrum, with single vectors.
    assert calls.count(4) == 1


@pytest.mark.parametrize("name", SOLVERS)
def test_dependent_start_columns_do_no_harm(name):
    M, _, values = symmetric(300)
    column = start(300, 1)
    block = torch.cat([column, column, 2 * column, torch.zeros_like(column)], dim=1)
    pairs = SOLVERS[name](lambda X: M @ X, block, tol=1e-8, max_iter=300)
    assert abs(float(pairs.values[0] - values[0])) < 1e-10
    assert bool(torch.isfinite(pairs.vectors).all())


def test_lobpcg_never_lowers_a_ritz_value():
    M, _, _ = symmetric(300)
    values = [
        lobpcg(lambda X: M @ X, start(300, 3), tol=1e-12, max_iter=steps).values
        for steps in range(1, 15)
    ]
    for earlier, later in itertools.pairwise(values):
        assert bool((later >= earlier - 1e-13).all())


@pytest.mark.parametrize("name", SOLVERS)
def test_max_iter_bounds_the_work(name):
    M, _, _ = symmetric(300)
    calls = []

    def product(X):
        calls.append(X.shape[1])
        return M @ X

    SOLVERS[name](product, start(300, 2), tol=1e-15, max_iter=11)
    assert calls.count(2) == 12


def test_rayleigh_ritz_is_exact_on_an_invariant_subspace():
    M, Q, values = symmetric(50)
    mixed = Q @ torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    theta, C = rayleigh_ritz(mixed, M @ mixed, 4)
    torch.testing.assert_close(theta, values, rtol=0, atol=1e-10)
    X = mixed @ C
    torch.testing.assert_close(X.T @ X, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-9)


def test_rayleigh_ritz_marks_missing_directions():
    v = torch.ones(10, 1, dtype=torch.float64)
    theta, C = rayleigh_ritz(torch.cat([v, v], dim=1), torch.cat([v, v], dim=1), 2)
    assert float(theta[0]) == pytest.approx(1)
    assert float(theta[1]) == -np.inf
    assert bool((C[:, 1] == 0).all())


@pytest.mark.parametrize("length", [1e-10, 1e-22, 1e-30, 0.0])
def test_vanishing_columns_are_dropped(length):
    """What a converged residual leaves behind: its square underflows in float32."""
    M, Q, values = symmetric(300, torch.float32)
    noise = length * start(300, 4, torch.float32)
    S, MS = torch.cat([Q.float(), noise], dim=1), torch.cat([M @ Q.float(), noise], dim=1)
    theta, C = rayleigh_ritz(S, MS, 4)
    torch.testing.assert_close(theta, values, rtol=0, atol=1e-5)
    assert bool((C[4:] == 0).all())


@pytest.mark.parametrize("name", SOLVERS)
def test_iterating_past_convergence_stays_finite(name):
    M, _, values = symmetric(300, torch.float32)
    pairs = SOLVERS[name](lambda X: M @ X, start(300, 4, torch.float32), tol=1e-30, max_iter=400)
    torch.testing.assert_close(pairs.values, values, rtol=0, atol=1e-5)


def test_inner_products_of_long_float32_columns_keep_their_digits():
    n = 1_000_003
    ones = torch.full((n, 2), 0.1, dtype=torch.float32)
    exact = n * float(torch.tensor(0.1, dtype=torch.float32)) ** 2
    # 512 roundings of 6e-8 in one direction; a running float32 sum of 10^6 terms is off by 1e-2.
    torch.testing.assert_close(
        inner(ones, ones), torch.full((2, 2), exact, dtype=torch.float64), rtol=3e-5, atol=0
    )


def test_spectral_norm_of_a_cycle():
    n = 64
    M = torch.roll(torch.eye(n, dtype=torch.float64), 1, 0)
    M = -(M + M.T)
    norm = spectral_norm(lambda X: M @ X, start(n, 1), steps=40)
    assert norm == pytest.approx(2, rel=1e-2)
    assert norm <= 2 + 1e-12
