"""Semismooth Newton for the pseudolikelihood: its optimality, its directions and its solver."""

from __future__ import annotations

import itertools
import warnings

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.linalg import LinAlgWarning
from sklearn.exceptions import ConvergenceWarning

from thalweg.curvature import ssn_concord
from thalweg.curvature.concord_covariance import (
    FactoredCovariance,
    StoredCovariance,
    largest_eigenvalue,
    largest_penalty,
)
from thalweg.curvature.concord_kernel import LARGEST_SYSTEM, newton_rows
from thalweg.curvature.concord_kinks import solve_kinks, solve_smooth
from thalweg.curvature.concord_newton import newton_step, newton_targets, solve_newton
from thalweg.curvature.concord_proximal import Momentum, proximal_step, solve_first_order
from thalweg.curvature.concord_rows import RowBlock, RowSettings, diagonal_start, prox
from thalweg.tasks import sparse_gaussian

METHODS = pytest.mark.parametrize("method", ["bssn", "ssn", "fbs", "fista"])


def correlations(seed=0, n=60, p=20, density=0.15):
    X = sparse_gaussian(np.random.default_rng(seed), n, p, density=density).X
    X = (X - X.mean(axis=0)) / X.std(axis=0)
    return X.T @ X / n, X


def F(S, w, d, i, lam):  # noqa: N802
    """The system of one row, written as in the paper."""
    u = w + d
    shrunk = np.sign(u) * np.maximum(np.abs(u) - lam, 0)
    shrunk[i] = (u[i] + np.sqrt(u[i] ** 2 + 4)) / 2
    return np.concatenate([S @ w + d, w - shrunk])


def one_row(S, w, d, i, lam):
    lam = np.broadcast_to(lam, (1, len(w) if np.ndim(lam) else 1))
    return RowBlock.at(np.array([i]), lam, w[None], d[None], (S @ w)[None])


def direction(S, w, d, i, lam, **options):
    """The B-Newton direction, from the target."""
    S = StoredCovariance(S, len(S))
    targets, failed, _ = newton_targets(S, one_row(S.S, w, d, i, lam), **options)
    assert not failed.any()
    target = targets.toarray()[0]
    return target - w, -S.S @ target - d


def assert_optimal(S, result, lam, atol=1e-9):
    lam = np.broadcast_to(lam, S.shape)
    omega = result.omega.toarray()
    for w, i in zip(omega, result.rows, strict=True):
        d = -S @ w
        assert d[i] == pytest.approx(-1 / w[i], abs=atol)
        others = np.arange(len(S)) != i
        on = others & (w != 0)
        np.testing.assert_allclose(d[on], lam[i, on] * np.sign(w[on]), rtol=0, atol=atol)
        assert np.all(np.abs(d[others]) <= lam[i, others] + atol)


# Solutions


@METHODS
def test_one_variable(method):
    assert ssn_concord([[4.0]], 0.1, method=method).omega.toarray() == pytest.approx(0.5, abs=1e-10)


@METHODS
@pytest.mark.parametrize("case", ["diagonal S", "large penalty"])
def test_the_diagonal_solution(method, case):
    S, _ = correlations()
    scales = np.linspace(0.5, 2, len(S))
    S = np.diag(scales**2) if case == "diagonal S" else scales[:, None] * S * scales
    lam = 0.1 if case == "diagonal S" else largest_penalty(StoredCovariance(S, 20))
    result = ssn_concord(S, lam, method=method)
    np.testing.assert_allclose(result.omega.toarray(), np.diag(1 / scales), rtol=0, atol=1e-12)
    assert result.edges().nnz == 0


def test_just_below_the_largest_penalty_there_is_an_entry():
    S, _ = correlations()
    lam = largest_penalty(StoredCovariance(S, 20))
    assert ssn_concord(S, lam * (1 - 1e-6)).omega.nnz > len(S)


@pytest.mark.parametrize("method", ["bssn", "fbs", "fista"])
@pytest.mark.parametrize("lam", [0.05, 0.15, 0.4])
def test_optimality(method, lam):
    S, _ = correlations(1)
    # ‖F‖ ≤ 1e-10, and its prox part is the violation of the conditions up to a factor 1 + 1/ω².
    assert_optimal(S, ssn_concord(S, lam, method=method), lam)


@pytest.mark.parametrize("lam", [0.05, 0.15, 0.4])
def test_full_steps_converge_near_the_solution(lam):
    S, _ = correlations(1)
    near = 1.001 * ssn_concord(S, lam).omega
    result = ssn_concord(S, lam, method="ssn", omega0=near)
    assert result.newton_steps.max() <= 4
    assert_optimal(S, result, lam)


def test_optimality_with_more_variables_than_samples():
    S, _ = correlations(2, n=30, p=60)
    result = ssn_concord(S, 0.3)
    assert result.prox_steps.sum() == 0
    assert_optimal(S, result, 0.3)


def test_against_cvxpy():
    S, _ = correlations(3, p=8)
    found = ssn_concord(S, 0.1).omega.toarray()
    root = np.linalg.cholesky(S).T
    for i in range(8):
        w = cp.Variable(8)
        others = [j for j in range(8) if j != i]
        loss = -cp.log(w[i]) + 0.5 * cp.sum_squares(root @ w) + 0.1 * cp.norm1(w[others])
        cp.Problem(cp.Minimize(loss)).solve(
            solver="CLARABEL", tol_gap_abs=1e-10, tol_gap_rel=1e-10, tol_feas=1e-10
        )
        # A gap of 1e-10 of a strongly convex function is a distance of 1e-5.
        np.testing.assert_allclose(found[i], w.value, rtol=0, atol=1e-5)


def test_without_penalty_it_is_the_inverse():
    S, _ = correlations(4, n=200, p=10)
    result = ssn_concord(S, 1e-9)
    inverse = np.linalg.inv(S)
    expected = inverse / np.sqrt(np.diag(inverse))[:, None]
    np.testing.assert_allclose(result.omega.toarray(), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(result.precision().toarray(), inverse, rtol=0, atol=1e-6)


def test_the_objective():
    S, _ = correlations(5)
    result = ssn_concord(S, 0.1)
    W = result.omega.toarray()
    off = np.abs(W).sum() - np.trace(W)
    expected = -np.log(np.diag(W)).sum() + 0.5 * np.trace(W.T @ W @ S) + 0.1 * off
    assert result.objective.sum() == pytest.approx(expected, rel=1e-12)


def test_a_penalty_for_each_row_and_each_entry():
    S, _ = correlations(6, p=10)
    by_row = np.linspace(0.05, 0.3, 10)
    result = ssn_concord(S, by_row)
    assert_optimal(S, result, by_row[:, None])
    alone = ssn_concord(S, by_row[3], rows=[3])
    np.testing.assert_array_equal(result.omega[[3]].toarray(), alone.omega.toarray())
    by_entry = np.random.default_rng(0).uniform(0.02, 0.3, (10, 10))
    np.fill_diagonal(by_entry, -1.0)
    result = ssn_concord(S, by_entry)
    assert_optimal(S, result, by_entry)
    assert_optimal(S, ssn_concord(S, by_entry, method="fista"), by_entry)


# Directions


def point_with_kinks(rng, p=8, n_kinks=3):
    """Return S, ω, d, i and λ with |u_j| = λ exactly for some j, of both signs."""
    A = rng.standard_normal((2 * p, p))
    S, lam = A.T @ A / (2 * p), 0.5  # a power of two: ω + d is exact
    i, *kinks = rng.permutation(p)[: n_kinks + 1]
    w, d = rng.standard_normal(p), rng.standard_normal(p)
    for k, j in enumerate(kinks):
        w[j] = np.round(w[j] * 1024) / 1024
        d[j] = lam * (-1) ** k - w[j]
        assert abs(w[j] + d[j]) == lam
    w[i] = abs(w[i]) + 0.1
    return S, w, d, int(i), lam, kinks


@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_the_direction_solves_the_b_newton_equation(seed, n_kinks):
    """F'(x; v) = -F(x): exactly, as F is piecewise smooth, up to the curvature of log."""
    S, w, d, i, lam, _ = point_with_kinks(np.random.default_rng(seed), n_kinks=n_kinks)
    v, e = direction(S, w, d, i, lam)
    h = 1e-7
    slope = (F(S, w + h * v, d + h * e, i, lam) - F(S, w, d, i, lam)) / h
    size = 1 + np.abs(np.concatenate([v, e])).max() ** 2
    np.testing.assert_allclose(slope, -F(S, w, d, i, lam), rtol=0, atol=2e-7 * size)


def test_at_kinks_the_equation_holds_to_rounding():
    """The directional derivative, written out: it is linear in v on each side of a kink."""
    S, w, d, i, lam, kinks = point_with_kinks(np.random.default_rng(5))
    v, e = direction(S, w, d, i, lam)
    u, rate = w + d, v + e
    derivative = np.where(np.abs(u) > lam, rate, 0.0)
    for j in kinks:
        outwards = rate[j] * np.sign(u[j]) > 0
        derivative[j] = rate[j] if outwards else 0.0
    derivative[i] = 0.5 * (1 + u[i] / np.sqrt(u[i] ** 2 + 4)) * rate[i]
    r = F(S, w, d, i, lam)
    np.testing.assert_allclose(S @ v + e, -r[:8], rtol=0, atol=1e-12)
    np.testing.assert_allclose(v - derivative, -r[8:], rtol=0, atol=1e-10)


def test_the_element_without_kinks_sets_their_variables_to_zero():
    S, w, d, i, lam, kinks = point_with_kinks(np.random.default_rng(6))
    v, _ = direction(S, w, d, i, lam, kinks=False)
    np.testing.assert_array_equal((w + v)[kinks], 0)


def test_the_direction_is_that_of_the_paper():
    """The system for the step, in residuals, without the change of variables to the target."""
    S, w, d, i, lam, _ = point_with_kinks(np.random.default_rng(7), n_kinks=0)
    u = w + d
    r1, r2 = np.split(F(S, w, d, i, lam), 2)
    j = 0.5 * (1 + u[i] / np.sqrt(u[i] ** 2 + 4))
    on = (np.abs(u) > lam) | (np.arange(8) == i)
    step = np.where(on, 0.0, -w)
    q = r2.copy()
    q[i] /= j
    N = S + np.diag(np.where(np.arange(8) == i, (1 - j) / j, 0.0))
    step[on] = np.linalg.solve(N[np.ix_(on, on)], -r1[on] - (S @ step)[on] - q[on])
    v, e = direction(S, w, d, i, lam)
    np.testing.assert_allclose(v, step, rtol=0, atol=1e-12)
    np.testing.assert_allclose(e, -r1 - S @ step, rtol=0, atol=1e-12)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_complementarity_problem_is_solved_exactly(seed, k):
    """Against all 2^k sets of positive variables."""
    rng = np.random.default_rng(seed)
    m = 3 + k
    A = rng.standard_normal((3 * m, m))
    N = A.T @ A / m
    kink = np.zeros(m, dtype=bool)
    kink[rng.permutation(m)[:k]] = True
    g, lam = rng.standard_normal(m), rng.uniform(0.1, 1, m)
    signs = rng.choice([-1.0, 1.0], m)
    x = solve_kinks(N.copy(), g, kink, signs, lam).values
    a, b = signs * x, signs * (N @ x + signs * lam)
    scale = 1 + np.abs(b).max()
    np.testing.assert_allclose((N @ x)[~kink], g[~kink], rtol=0, atol=1e-10)
    assert np.all(a[kink] >= 0)
    assert np.all(b[kink] >= -1e-12 * scale)
    assert np.abs(a * b)[kink].max() <= 1e-10 * scale
    solutions = []
    for positive in itertools.product([False, True], repeat=k):
        free = ~kink
        free[np.flatnonzero(kink)[list(positive)]] = True
        right = np.where(kink, -signs * lam, g)
        y = np.zeros(m)
        y[free] = np.linalg.solve(N[np.ix_(free, free)], right[free])
        if np.all(signs[kink] * y[kink] >= 0) and np.all(
            (signs * (N @ y + signs * lam))[kink] >= -1e-12 * scale
        ):
            solutions.append(y)
    np.testing.assert_allclose(x, solutions[0], rtol=0, atol=1e-9)


def test_a_singular_system_names_the_dependent_column():
    A = np.random.default_rng(0).standard_normal((10, 4))
    A[:, 2] = A[:, 0] + A[:, 1]
    N = A.T @ A
    assert solve_smooth(N.copy(), np.ones(4)).dependent == 2
    # Also where the pivot is positive, but only by rounding.
    nearly = np.array([[1.0, 1.0], [1.0, 1.0 + 4e-16]])
    assert np.all(np.isfinite(np.linalg.cholesky(nearly)))
    assert solve_smooth(nearly, np.ones(2)).dependent == 1
    kink = np.array([False, True, False, False])
    solution = solve_kinks(N.copy(), np.ones(4), kink, np.ones(4), np.ones(4))
    assert solution.values is None
    assert solution.dependent == 1  # the kink comes last


def test_prox():
    rng = np.random.default_rng(0)
    U = 3 * rng.standard_normal((4, 6))
    U[2, 3] = -1e9
    rows, lam = np.array([0, 5, 3, 2]), np.array([[0.5], [1.0], [0.2], [2.0]])
    found = prox(U, lam, rows, 0.3)
    for k, i in enumerate(rows):
        others = np.arange(6) != i
        away = (U[k] - found[k]) / 0.3  # a subgradient of h
        assert found[k, i] > 0
        assert found[k, i] == pytest.approx(0.3 / (found[k, i] - U[k, i]), rel=1e-12)
        on = others & (found[k] != 0)
        np.testing.assert_allclose(away[on], (lam[k] * np.sign(found[k]))[on], rtol=1e-9)
        assert np.all(np.abs(away[others]) <= lam[k] * (1 + 1e-12))


# Convergence


def test_the_tail_is_quadratic():
    S, _ = correlations(8, n=150, p=100, density=0.03)
    ratios = []
    for i in range(100):
        block = diagonal_start(StoredCovariance(S, 100), np.array([i]), np.full((1, 1), 0.1))
        norms = [block.residual[0]]
        while norms[-1] > 1e-13 and len(norms) < 20:
            block = newton_step(StoredCovariance(S, 100), block, RowSettings())[0]
            norms.append(block.residual[0])
        # The last step from above 1e-7: below, the square is lost in rounding.
        last = max(k for k, norm in enumerate(norms) if norm > 1e-7)
        ratios.append(norms[last + 1] / norms[last] ** 1.8)
    assert np.mean(np.array(ratios) <= 10) >= 0.95


def test_few_steps_and_none_of_them_proximal():
    S, _ = correlations(9, n=150, p=200, density=0.03)
    for lam in (0.1, 0.2, 0.3):
        result = ssn_concord(S, lam)
        assert result.newton_steps.max() <= 10
        assert result.prox_steps.sum() == 0


@pytest.mark.parametrize("seed", range(5))
def test_from_far_away_each_step_lowers_the_residual(seed):
    S, _ = correlations(10, p=12)
    rng = np.random.default_rng(seed)
    w, d = 30 * rng.standard_normal((12, 12)), 30 * rng.standard_normal((12, 12))
    np.fill_diagonal(w, np.exp(3 * rng.standard_normal(12)))
    before = np.full(12, np.inf)
    covariance = StoredCovariance(S, 12)
    block = RowBlock.at(np.arange(12), np.full((12, 1), 0.1), w, d, w @ S)
    for _ in range(30):
        block, failed, _ = newton_step(covariance, block, RowSettings())
        assert not failed[block.residual > 1e-10].any()
        assert np.all(block.residual <= before)
        before = block.residual
    found = ssn_concord(S, 0.1, omega0=w, dual0=d)
    expected = ssn_concord(S, 0.1)
    np.testing.assert_allclose(found.omega.toarray(), expected.omega.toarray(), atol=1e-9)


def test_full_steps_can_fail_where_damped_ones_do_not():
    """A start far below: the full step overshoots, and the line search must shorten it."""
    S, _ = correlations(11, p=12)
    w, d = np.eye(12) * 0.01, np.zeros((12, 12))
    covariance = StoredCovariance(S, 12)
    block = RowBlock.at(np.arange(12), np.full((12, 1), 0.02), w, d, w @ S)
    damped = newton_step(covariance, block, RowSettings())[0]
    full = newton_step(covariance, block, RowSettings(method="ssn"))[0]
    limit = (1 - 2e-3 * 1e-8) * block.residual**2
    assert np.all(damped.residual**2 <= limit)
    moved = np.linalg.norm(damped.W - w, axis=1) < 0.9 * np.linalg.norm(full.W - w, axis=1)
    assert np.all(moved == (full.residual**2 > (1 - 2e-3) * block.residual**2))


def test_the_warm_start_at_the_solution_takes_no_step():
    S, _ = correlations(12)
    first = ssn_concord(S, 0.1)
    again = ssn_concord(S, 0.1, omega0=first.omega)
    assert again.newton_steps.max() == 0
    np.testing.assert_array_equal(again.omega.toarray(), first.omega.toarray())


def test_permuted_variables_give_the_permuted_solution():
    S, _ = correlations(13)
    order = np.random.default_rng(0).permutation(len(S))
    expected = ssn_concord(S, 0.1).omega.toarray()[np.ix_(order, order)]
    found = ssn_concord(S[np.ix_(order, order)], 0.1).omega.toarray()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@METHODS
def test_threads_do_not_change_a_bit(method):
    S, _ = correlations(14, n=100, p=300, density=0.02)
    first = ssn_concord(S, 0.3, method=method, tol=1e-6)
    second = ssn_concord(S, 0.3, method=method, tol=1e-6, n_jobs=3)
    assert (first.omega != second.omega).nnz == 0
    np.testing.assert_array_equal(first.residual, second.residual)


def test_data_instead_of_the_covariance():
    S, X = correlations(15, n=40, p=90)
    for lam in (0.15, 0.3):
        stored = ssn_concord(S, lam, n_samples=40)
        factored = ssn_concord(None, lam, X=X)
        np.testing.assert_allclose(
            factored.omega.toarray(), stored.omega.toarray(), rtol=0, atol=1e-8
        )


def test_rows_alone():
    S, _ = correlations(16)
    chosen = ssn_concord(S, 0.1, rows=[7, 2])
    together = ssn_concord(S, 0.1)
    np.testing.assert_allclose(
        chosen.omega.toarray(), together.omega.toarray()[[7, 2]], rtol=0, atol=1e-12
    )
    assert ssn_concord(S, 0.1, rows=np.array([], dtype=int)).omega.shape == (0, 20)
    np.testing.assert_allclose(
        ssn_concord(S, 0.1, rows=np.arange(20)[::-1]).precision().toarray(),
        together.precision().toarray(),
        rtol=0,
        atol=1e-12,
    )


# Compiled steps


def penalties(kind, p, rng):
    if kind == "number":
        return np.full((p, 1), 0.1)
    return rng.uniform(0.05, 0.2, (p, 1 if kind == "of rows" else p))


def starting_block(start, S, lam, rng):
    p = len(S)
    if start == "diagonal":
        return diagonal_start(StoredCovariance(S, p), np.arange(p), lam)
    size = {"near": 0.01, "far": 30.0}[start]
    near = ssn_concord(S, lam[:, 0] if lam.shape[1] == 1 else lam).omega.toarray()
    w = near + size * rng.standard_normal((p, p)) * (near != 0)
    np.fill_diagonal(w, near.diagonal() * np.exp(size / 10 * rng.standard_normal(p)))
    d = -w @ S + size * rng.standard_normal((p, p))
    return RowBlock.at(np.arange(p), lam, w, d, w @ S)


def steps_one_by_one(S, block, settings):
    steps = np.zeros(len(block.rows), dtype=int)
    while len(left := np.flatnonzero((block.residual > settings.tol) & (steps < 100))):
        moved, failed, _ = newton_step(S, block.take(left), settings)
        assert not failed.any()
        block.put(left, moved)
        steps[left] += 1
    return steps


@pytest.mark.parametrize("kind", ["number", "of rows", "of entries"])
@pytest.mark.parametrize(
    ("method", "start"), [("bssn", "diagonal"), ("bssn", "near"), ("bssn", "far"), ("ssn", "near")]
)
def test_compiled_steps_are_the_steps(kind, method, start):
    S, _ = correlations(30, n=100, p=50)
    rng = np.random.default_rng(0)
    # Just above rounding, a row may need one step more or less; quadratically, 1e-8 to 1e-12 is one
    # step, so that hardly any residual is near the tolerance.
    covariance, options = StoredCovariance(S, 50), RowSettings(method=method, tol=1e-8)
    compiled = starting_block(start, S, penalties(kind, 50, rng), rng)
    by_hand = compiled.take(np.arange(50))
    for _ in range(3):  # step by step, so that roundings do not add up
        made = newton_rows(
            S, 50, np.arange(50), compiled.rows, compiled.lam, compiled.W, compiled.D, compiled.P,
            compiled.residual, 1e-8, np.ones(50, dtype=int), method == "bssn", 1e-3, 0.5,
        )  # fmt: skip
        going = np.flatnonzero(by_hand.residual > 1e-8)
        moved, failed, _ = newton_step(covariance, by_hand.take(going), options)
        assert not failed.any()
        by_hand.put(going, moved)
        np.testing.assert_array_equal(np.flatnonzero(made), going)
        for name in ("W", "D", "P", "residual"):
            scale = max(1.0, np.abs(getattr(by_hand, name)).max())
            np.testing.assert_allclose(
                getattr(compiled, name), getattr(by_hand, name), rtol=0, atol=1e-11 * scale
            )
    solved, counts = solve_newton(covariance, compiled, options)
    np.testing.assert_array_equal(counts.newton, steps_one_by_one(covariance, by_hand, options))
    np.testing.assert_allclose(solved.W, by_hand.W, rtol=0, atol=1e-9)
    assert counts.proximal.max() == 0


def test_the_residual_is_the_norm_of_the_system():
    S, _ = correlations(31)
    rng = np.random.default_rng(0)
    w, d = 0.3 * rng.standard_normal((2, 20, 20))
    for kind in ("number", "of rows", "of entries"):
        lam = penalties(kind, 20, rng)
        block = RowBlock.at(np.arange(20), lam, w, d, w @ S)
        full = np.broadcast_to(lam, (20, 20))
        expected = [np.linalg.norm(F(S, w[i], d[i], i, full[i])) for i in range(20)]
        np.testing.assert_allclose(block.residual, expected, rtol=1e-13)


def compiled_steps(S, rank, block):
    return newton_rows(
        S, rank, np.arange(len(block.rows)), block.rows, block.lam, block.W, block.D, block.P,
        block.residual, 1e-10, np.full(len(block.rows), 100), True, 1e-3, 0.5,
    )  # fmt: skip


@pytest.mark.parametrize("case", ["kink", "dependent", "rank", "large"])
def test_what_is_not_compiled_is_left_as_it_was(case):
    p = LARGEST_SYSTEM + 10 if case == "large" else 20
    S, _ = correlations(32, n=400, p=p)
    if case == "dependent":
        S[:, 4] = S[:, 3]
        S[4] = S[3]
    rng = np.random.default_rng(0)
    w, lam = rng.standard_normal((1, p)), np.full((1, 1), 0.25)
    w[0, 2], d = 1.0, np.zeros((1, p))
    w[0, np.abs(w[0]) < 0.5] = 0.5
    if case == "kink":
        w[0, 7] = -0.25
    block = RowBlock.at(np.array([2]), lam, w, d, w @ S)
    before = block.take(np.array([0]))
    rank = 10 if case == "rank" else p
    assert compiled_steps(S, rank, block)[0] == 0
    for name in ("W", "D", "P", "residual"):
        np.testing.assert_array_equal(getattr(block, name), getattr(before, name))
    if case in ("kink", "large"):
        after, counts = solve_newton(StoredCovariance(S, rank), block, RowSettings())
        assert after.residual[0] <= 1e-10
        assert counts.newton[0] > 0
        assert counts.proximal[0] == 0


# First-order steps


def test_proximal_steps_are_the_formula():
    S, _ = correlations(17)
    covariance = StoredCovariance(S, 20)
    L, lam, i = covariance.largest, 0.1, 4
    w = np.random.default_rng(0).standard_normal(20)
    w[i] = 1.5
    block = one_row(S, w, -S @ w, i, lam)
    momentum = Momentum.none(block)
    before, t = w, 1.0
    for _ in range(5):
        t_next = (1 + np.sqrt(1 + 4 * t**2)) / 2
        y = w + (t - 1) / t_next * (w - before)
        u = y - S @ y / L
        before, w = w, np.sign(u) * np.maximum(np.abs(u) - lam / L, 0)
        w[i] = 0.5 * (u[i] + np.sqrt(u[i] ** 2 + 4 / L))
        t = 1.0 if (y - w) @ (w - before) > 0 else t_next
        W, D, P = proximal_step(covariance, block, momentum, np.array([0]))
        np.testing.assert_allclose(W[0], w, rtol=0, atol=1e-13)
        np.testing.assert_allclose(D[0], L * (u - w), rtol=0, atol=1e-12)
        np.testing.assert_allclose(P[0], S @ w, rtol=0, atol=1e-12)
        # d is a subgradient of h there: only the first part of F is left.
        residual = np.linalg.norm(S @ w + D[0])
        block = RowBlock.at(block.rows, block.lam, W, D, P)
        assert block.residual[0] == pytest.approx(residual, rel=1e-9)


def test_momentum_needs_fewer_steps_and_newton_far_fewer():
    S, _ = correlations(18, n=150, p=200, density=0.03)
    plain, fast, newton = (ssn_concord(S, 0.1, method=m) for m in ("fbs", "fista", "bssn"))
    assert fast.prox_steps.mean() < 0.6 * plain.prox_steps.mean()
    assert newton.newton_steps.mean() < 0.2 * fast.prox_steps.mean()


def test_first_order_steps_stop_at_their_budget():
    S, _ = correlations(19)
    block = diagonal_start(StoredCovariance(S, 20), np.arange(20), np.full((20, 1), 0.1))
    start = block.residual.copy()
    block, counts = solve_first_order(
        StoredCovariance(S, 20), block, RowSettings(method="fbs", max_prox_iter=3)
    )
    assert counts.proximal.max() == 3
    assert np.all(block.residual < start)


@pytest.mark.parametrize("size", [5, 200])
def test_the_largest_eigenvalue_is_bounded_from_above_and_tight(size):
    A = np.random.default_rng(0).standard_normal((size, size))
    true = np.linalg.norm(A, 2) ** 2
    assert true * (1 - 1e-12) <= largest_eigenvalue(A.T @ A) <= true * (1 + 1e-4)
    factored = FactoredCovariance(A[: size // 2], size)
    assert factored.largest == pytest.approx(np.linalg.norm(A[: size // 2], 2) ** 2, rel=1e-4)


# Dense rows and dependent columns


def test_rows_with_more_active_variables_than_samples_take_proximal_steps():
    S, X = correlations(20, n=20, p=60)
    result = ssn_concord(S, 0.1, tol=1e-8)
    assert result.prox_steps.max() > 0
    assert result.converged.all()
    assert_optimal(S, result, 0.1, atol=1e-6)
    factored = ssn_concord(None, 0.1, X=X, tol=1e-8)
    np.testing.assert_allclose(factored.objective, result.objective, rtol=0, atol=1e-8)
    with pytest.raises(np.linalg.LinAlgError, match=r"rows .* have no Newton step"):
        ssn_concord(S, 0.1, on_rank_deficient="raise")


def test_duplicate_columns_are_named_and_solved():
    S, X = correlations(21, n=60, p=10)
    X = np.column_stack([X, X[:, 3]])
    S = X.T @ X / 60
    with pytest.warns(LinAlgWarning, match=r"variables \[(3, )?10\] depend linearly"):
        result = ssn_concord(S, 0.05, tol=1e-8, n_samples=60)
    assert result.converged.all()
    assert_optimal(S, result, 0.05, atol=1e-6)


def test_a_tolerance_below_rounding_stops_and_warns():
    S, _ = correlations(22)
    scales = 10.0 ** np.linspace(-3, 3, 20)
    with pytest.warns(ConvergenceWarning, match=r"rows did not reach tol=1e-300: rows \["):
        result = ssn_concord(scales[:, None] * S * scales, 1e-3, tol=1e-300)
    assert result.residual.max() <= 1e-6
    assert not result.converged.all()
    assert result.prox_steps.max() < 10_000


def test_too_few_steps_warn():
    S, _ = correlations(23)
    with pytest.warns(ConvergenceWarning, match="20 rows did not reach .* and more, largest"):
        result = ssn_concord(S, 0.1, max_iter=1)
    assert result.newton_steps.max() == 1


def test_a_semidefinite_covariance_tells_its_own_rank():
    _, X = correlations(24, n=12, p=60)
    S = X.T @ X / 12
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = ssn_concord(S, 0.3)
    told = ssn_concord(S, 0.3, n_samples=11)
    np.testing.assert_allclose(found.omega.toarray(), told.omega.toarray(), atol=1e-9)


# Results and bad input


def test_edges_and_precision():
    S, _ = correlations(25)
    result = ssn_concord(S, 0.15)
    W = result.omega.toarray()
    off = (W != 0) & ~np.eye(20, dtype=bool)
    np.testing.assert_array_equal(result.edges("and").toarray(), off & off.T)
    np.testing.assert_array_equal(result.edges("or").toarray(), off | off.T)
    assert not np.array_equal(off & off.T, off | off.T)
    theta = np.diag(np.diag(W)) @ W
    np.testing.assert_allclose(
        result.precision().toarray(), (theta + theta.T) / 2, rtol=0, atol=1e-14
    )
    with pytest.raises(ValueError, match="rule must be one of 'and', 'or'"):
        result.edges("xor")
    with pytest.raises(ValueError, match="all 20 rows are needed, got 2"):
        ssn_concord(S, 0.1, rows=[0, 1]).edges()


def test_a_progress_bar_on_request(capsys):
    S, _ = correlations(26)
    ssn_concord(S, 0.1, verbose=True)
    assert "rows" in capsys.readouterr().err


GOOD = np.eye(3)
BAD = [
    ({"S": np.ones((2, 3))}, ValueError, r"S must be square, got shape \(2, 3\)"),
    ({"S": np.ones(3)}, ValueError, r"S must have shape \(p, p\)"),
    ({"S": np.triu(np.ones((3, 3)))}, ValueError, "S must be symmetric"),
    ({"S": np.diag([1.0, 1.0, -1.0])}, ValueError, "S must be positive semidefinite, got the eig"),
    ({"S": np.diag([1.0, np.nan, 1.0])}, ValueError, "S must be finite"),
    ({"S": np.diag([1.0, 0.0, 1.0])}, ValueError, r"every variable must vary.* \[1\]"),
    ({"S": None}, ValueError, "give either S or X"),
    ({"X": np.ones((4, 3))}, ValueError, "give either S or X"),
    ({"S": None, "X": np.ones((4, 3)), "n_samples": 4}, ValueError, "n_samples goes with S"),
    ({"S": None, "X": np.ones((0, 3))}, ValueError, "X must have samples"),
    ({"n_samples": 0}, ValueError, "n_samples must be an integer >= 1"),
    ({"lam": 0.0}, ValueError, "lam must be a finite number > 0"),
    ({"lam": np.zeros(3)}, ValueError, "lam must be > 0, got 0"),
    ({"lam": np.ones(4)}, ValueError, r"lam must be a number or of shape \(3,\) or \(3, 3\)"),
    ({"lam": np.ones((1, 3))}, ValueError, r"lam must be a number or of shape"),
    ({"lam": "a"}, TypeError, "lam must be a number"),
    ({"rows": [0.5]}, TypeError, "rows must be a 1-D array of integers"),
    ({"rows": [0, 0]}, ValueError, "rows must be different numbers from 0 to 2"),
    ({"rows": [3]}, ValueError, "rows must be different numbers from 0 to 2"),
    ({"omega0": np.eye(2)}, ValueError, r"omega0 must have shape \(3, 3\)"),
    ({"omega0": -np.eye(3)}, ValueError, "omega0 must have diagonal entries"),
    ({"omega0": np.diag([1.0, 1.0, np.inf])}, ValueError, "omega0 must be finite"),
    ({"omega0": sparse.csr_array(np.diag([1.0, np.inf, 1]))}, ValueError, "omega0 must be finite"),
    ({"dual0": np.eye(3)}, ValueError, "dual0 needs omega0"),
    ({"omega0": np.eye(3), "dual0": np.eye(2)}, ValueError, "dual0 must have shape"),
    ({"method": "newton"}, ValueError, "method must be one of 'bssn', 'ssn', 'fbs', 'fista'"),
    ({"tol": -1.0}, ValueError, "tol must be a finite number >= 0"),
    ({"max_iter": 0}, ValueError, "max_iter must be an integer >= 1"),
    ({"max_prox_iter": 0.5}, TypeError, "max_prox_iter must be an integer"),
    ({"sigma": 0.5}, ValueError, "sigma must be a finite number > 0 and < 0.5"),
    ({"rho": 1.0}, ValueError, "rho must be a finite number > 0 and < 1"),
    ({"on_rank_deficient": "warn"}, ValueError, "on_rank_deficient must be one of"),
]


@pytest.mark.parametrize(("given_", "error", "message"), BAD)
def test_bad_input(given_, error, message):
    arguments = {"S": GOOD, "lam": 0.1, **given_}
    with pytest.raises(error, match=message):
        ssn_concord(**arguments)
