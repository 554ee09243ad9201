"""Iteratively regularized conditional gradient: estimates, average, rates, interface, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.utils.estimator_checks import parametrize_with_checks

from thalweg.bilevel import (
    Atom,
    BilevelLinearRegression,
    Expectation,
    L1Ball,
    L2Ball,
    LeastSquares,
    LinfBall,
    Logistic,
    NuclearBall,
    Polytope,
    Simplex,
    StochasticObjective,
    TorchLoss,
    ir_cg,
)
from thalweg.bilevel import single_atom_kernel as kernel
from thalweg.bilevel.gradient_estimators import SampleStream, Spider, Storm
from thalweg.bilevel.vanishing_regularization import make_schedule
from thalweg.bilevel.weighted_average import WeightedAverage


def least_squares(seed=0, n=20, d=6):
    rng = np.random.default_rng(seed)
    return LeastSquares(rng.standard_normal((n, d)), rng.standard_normal(n))


def logistic(seed=0, n=20, d=6):
    rng = np.random.default_rng(seed)
    return Logistic(rng.standard_normal((n, d)), rng.choice([-1.0, 1.0], n))


def plain(oracle):
    """Return the same linear minimization as a function, which runs the general steps."""
    return lambda c: oracle(c)


class Quadratic:
    """½xᵀHx - bᵀx, as a sum of one component."""

    n = 1

    def __init__(self, H, b, constant=0.0):
        self.H, self.b, self.constant = np.asarray(H, float), np.asarray(b, float), constant

    def value(self, x):
        return float(x @ self.H @ x / 2 - self.b @ x) + self.constant

    def grad(self, x):
        return self.H @ x - self.b

    def sample_grad(self, x, idx):
        return self.grad(x)

    def draw(self, rng, size):
        return np.zeros(size, dtype=np.intp)


def test_users_classes_are_objectives():
    assert isinstance(Quadratic(np.eye(2), [0, 0]), StochasticObjective)
    assert isinstance(least_squares(), StochasticObjective)
    assert not isinstance(np.ones(2), StochasticObjective)


# --- schedules, estimates and the average


def test_schedules_are_those_of_the_paper():
    t = np.arange(30)
    convex = make_schedule("irscg", True, None, None, 0)
    np.testing.assert_allclose(convex.alpha(t), 2 / (t + 2))
    np.testing.assert_allclose(convex.sigma(t), (t + 1) ** -0.25)
    free = make_schedule("irscg", False, None, None, 0)
    np.testing.assert_allclose(free.alpha(t), (t + 1) ** (-6 / 7))
    np.testing.assert_allclose(free.sigma(t), (t + 1) ** (-2 / 7))
    sums = make_schedule("irfscg", True, None, None, 12)
    np.testing.assert_allclose(sums.alpha(t), np.where(t < 12, np.log(12) / 12, 2 / (t + 2)))
    np.testing.assert_allclose(sums.sigma(t), (np.maximum(t, 12) + 1) ** -0.5)
    free_sums = make_schedule("irfscg", False, None, None, 12)
    np.testing.assert_allclose(
        free_sums.alpha(t), np.where(t <= 12, np.log(13) / 13, (t + 1) ** -0.75)
    )
    np.testing.assert_allclose(free_sums.sigma(t), (np.maximum(t, 13) + 1) ** -0.5)
    exact = make_schedule("deterministic", True, None, None, 0)
    np.testing.assert_allclose(exact.alpha(t), 2 / (t + 2))
    np.testing.assert_allclose(exact.sigma(t), (t + 1) ** -0.5)
    assert make_schedule("irscg", False, 0.1, 0.5, 0).omega == 0.5


def test_sigma_vanishes_while_t_sigma_grows():
    for method in ("irscg", "irfscg", "deterministic"):
        for convex in (True, False):
            t = np.arange(20, 2000)
            sigma = make_schedule(method, convex, None, None, 9).sigma(t)
            assert np.all(np.diff(sigma) < 0)
            assert np.all(np.diff(t * sigma) > 0)


@pytest.mark.parametrize(("method", "epoch"), [("irscg", 0), ("irfscg", 7)])
def test_the_running_average_is_the_direct_sum(method, epoch):
    schedule = make_schedule(method, True, None, None, epoch)
    average, rng = WeightedAverage(schedule, (3,)), np.random.default_rng(0)
    iterates = rng.standard_normal((41, 3))
    sigma = schedule.sigma(np.arange(42))
    for t in range(1, 41):
        average.add(t, iterates[t])
        if t <= epoch:
            assert average.at(t, iterates[t]) is None
            continue
        i = np.arange(epoch + 1, t + 1)
        weights = (i + 1) * i * (sigma[i - 1] - sigma[i])
        last = (t + 1) * t * sigma[t]
        assert np.all(weights >= 0)
        expected = (last * iterates[t] + weights @ iterates[i]) / (last + weights.sum())
        np.testing.assert_allclose(average.at(t, iterates[t]), expected, rtol=1e-12, atol=1e-14)


def test_with_a_constant_sigma_the_average_is_the_last_iterate():
    from thalweg.bilevel.vanishing_regularization import Schedule

    average = WeightedAverage(Schedule(p=0.0, omega=None), (2,))
    for t in range(1, 10):
        average.add(t, np.full(2, float(t)))
        np.testing.assert_array_equal(average.at(t, np.full(2, float(t))), t)


def test_weights_of_long_runs_do_not_overflow():
    average = WeightedAverage(make_schedule("irscg", True, None, None, 0), (1,))
    t = np.array([10**10])
    # (i + 1) i (σ_{i-1} - σ_i) ≈ p i^{1-p}, which cancellation in σ blurs at this length.
    assert average.weights(t)[0] == pytest.approx(0.25 * 1e10**0.75, rel=1e-2)
    assert average.at(10**10, np.ones(1)) == pytest.approx(1.0)


def test_storm_with_alpha_one_is_the_plain_sample_gradient():
    f, rng = least_squares(), np.random.default_rng(0)
    storm = Storm(f, np.random.default_rng(5), 3)
    rows = SampleStream(f, np.random.default_rng(5), 3).take(2)
    x, y = rng.standard_normal((2, 6))
    np.testing.assert_array_equal(storm.update(0, x, x, 0.7), f.sample_grad(x, rows[0]))
    np.testing.assert_allclose(
        storm.update(1, y, x, 1.0), f.sample_grad(y, rows[1]), rtol=1e-14, atol=1e-15
    )
    assert storm.evaluations == 3 + 6


def test_the_mean_increment_of_storm_is_the_exact_difference():
    """Over all samples: (1 - α)(ĝ - ∇f(x)) + ∇f(y), by enumeration."""
    f, rng = least_squares(), np.random.default_rng(0)
    x, y = rng.standard_normal((2, 6))
    start, results = rng.standard_normal(6), []
    for i in range(20):
        storm = Storm(f, rng)
        storm.estimate = start
        storm.samples._waiting = np.array([[i]])
        results.append(storm.update(1, y, x, 0.3))
    expected = 0.7 * (start - f.grad(x)) + f.grad(y)
    np.testing.assert_allclose(np.mean(results, axis=0), expected, rtol=1e-12, atol=1e-13)


def test_spider_with_all_samples_is_the_full_gradient():
    f = least_squares()
    f.draw = lambda rng, size: np.tile(rng.permutation(20), size // 20)
    spider, rng = Spider(f, np.random.default_rng(0), 20, 50), np.random.default_rng(1)
    x = rng.standard_normal(6)
    np.testing.assert_array_equal(spider.update(0, x, x, 1.0), f.grad(x))
    for t in range(1, 20):
        y = rng.standard_normal(6)
        np.testing.assert_allclose(spider.update(t, y, x, 0.1), f.grad(y), rtol=1e-9, atol=1e-11)
        x = y
    assert spider.evaluations == 20 + 19 * 40


def test_samples_do_not_depend_on_how_they_are_taken():
    f = least_squares()
    at_once = SampleStream(f, np.random.default_rng(0), 2).take(5000)
    stream = SampleStream(f, np.random.default_rng(0), 2)
    parts = [stream.take(k) for k in (1, 3000, 1999)]
    np.testing.assert_array_equal(np.concatenate(parts), at_once)
    # Uniform: each of 20 counts is 500, with a standard deviation of 22.
    assert np.all(np.abs(np.bincount(at_once.ravel(), minlength=20) - 500) < 110)


# --- the method


def recursion(inner, outer, oracle, x, steps, seed, kind, reg):
    """Return x_T and z_T by the formulas, written out."""
    streams = np.random.default_rng(seed).spawn(2)
    taken = [
        SampleStream(f, s, 1 if kind == "irscg" else 4)
        for f, s in zip((inner, outer), streams, strict=True)
    ]
    q = 4 if kind == "irfscg" else 0
    sigma = reg * (np.maximum(np.arange(steps + 1), q) + 1.0) ** (-0.25 if q == 0 else -0.5)
    estimates, previous, points = [None, None], x, [x]
    for t in range(steps):
        alpha = np.log(q) / q if t < q else 2 / (t + 2)
        for k, (f, stream) in enumerate(zip((inner, outer), taken, strict=True)):
            if kind == "deterministic" or (q and t % q == 0):
                estimates[k] = f.grad(x)
                continue
            idx = stream.take(1)[0]
            if t == 0:
                estimates[k] = f.sample_grad(x, idx)
                continue
            kept = 1.0 if q else 1 - alpha
            old = estimates[k] - f.sample_grad(previous, idx)
            estimates[k] = kept * old + f.sample_grad(x, idx)
        v = oracle(sigma[t] * estimates[1] + estimates[0]).dense(x.shape)
        previous, x = x, x + alpha * (v - x)
        points.append(x)
    i = np.arange(q + 1, steps + 1)
    scale = reg if reg > 0 else 1.0
    weights = (i + 1) * i * (sigma[i - 1] - sigma[i]) / scale
    last = (steps + 1) * steps * sigma[steps] / scale
    z = (last * x + weights @ np.array(points)[i]) / (last + weights.sum()) if reg > 0 else None
    return x, z


@pytest.mark.parametrize("kind", ["irscg", "irfscg"])
@pytest.mark.parametrize("reg", [0.0, 0.7])
@pytest.mark.parametrize("compiled", [True, False])
def test_steps_are_those_of_the_formulas(kind, reg, compiled):
    """With ς = 0 they are STORM-FW and SPIDER-FW."""
    inner, outer = least_squares(0), logistic(1)
    oracle = L1Ball(1.5)
    result = ir_cg(
        inner,
        outer,
        oracle if compiled else plain(oracle),
        np.zeros(6),
        method=kind,
        reg=reg,
        maxiter=60,
        rng=3,
    )
    x, z = recursion(inner, outer, oracle, np.zeros(6), 60, 3, kind, reg)
    np.testing.assert_allclose(result.x_last, x, rtol=1e-10, atol=1e-13)
    if reg > 0:
        np.testing.assert_allclose(result.x, z, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("oracle", [L1Ball(1.5), Simplex(1.5)], ids=["l1", "simplex"])
@pytest.mark.parametrize("storage", [np.asarray, sparse.csr_array], ids=["dense", "sparse"])
@pytest.mark.parametrize("convex", [True, False])
def test_compiled_steps_are_the_general_ones(oracle, storage, convex):
    rng = np.random.default_rng(0)
    A, B = (rng.standard_normal((30, 300)) * (rng.random((30, 300)) < 0.2) for _ in range(2))
    y = rng.choice([-1.0, 1.0], 30)
    start = oracle(rng.standard_normal(300)).dense((300,))
    runs = [
        ir_cg(
            LeastSquares(storage(A), y),
            Logistic(storage(B), y),
            each,
            start,
            outer_convex=convex,
            reg=0.5,
            maxiter=1000,
            rng=0,
        )
        for each in (oracle, plain(oracle))
    ]
    np.testing.assert_allclose(runs[0].x, runs[1].x, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(runs[0].x_last, runs[1].x_last, rtol=1e-8, atol=1e-10)
    for name in ("n_lmo", "n_grad_inner", "n_grad_outer", "nit", "sigma"):
        assert runs[0][name] == runs[1][name]


@pytest.mark.parametrize("signed", [True, False])
def test_the_pruned_search_finds_the_largest_entry(signed):
    """Rows change few entries, and σ all of them: both must lift what is known of a segment."""
    rng = np.random.default_rng(0)
    rows = sparse.random_array((400, 1500), density=2e-3, rng=rng, format="csr")
    parts = (rows.data, rows.indices, rows.indptr)
    u, w = np.zeros(1500), rng.standard_normal(1500)
    bounds = np.zeros((-(-1500 // kernel.SEGMENT), 3))
    for s in range(len(bounds)):
        kernel._look_into(signed, 1.0, u, w, bounds, s)
    for i in range(400):
        sigma = rng.uniform(0.0, 3.0)
        kernel._add_row(*parts, i, rng.normal(0, 3), u if i % 2 else w)
        kernel._lift_bounds(*parts, i, signed, u, w, bounds)
        entries = sigma * u + w
        expected = int((np.abs(entries) if signed else -entries).argmax())
        assert kernel._vertex_bounded(signed, sigma, u, w, bounds) == expected


def test_without_an_outer_objective_it_is_frank_wolfe():
    """Step for step, and G(x_t) - G* ≤ 2LD²/(t + 2), where D = 2r is the diameter."""
    f, oracle = least_squares(2, n=40), L1Ball(0.8)
    zero = Quadratic(np.zeros((6, 6)), np.zeros(6))
    best = ir_cg(f, zero, oracle, np.zeros(6), method="deterministic", reg=0.0, maxiter=20_000)
    x, bound = np.zeros(6), 2 * f.smoothness() * 1.6**2
    for t in range(40):
        x = x + 2 / (t + 2) * (oracle(f.grad(x)).dense((6,)) - x)
        assert f.value(x) - f.value(best.x_last) <= bound / (t + 3)
    result = ir_cg(f, zero, oracle, np.zeros(6), method="deterministic", reg=1.0, maxiter=40)
    np.testing.assert_allclose(result.x_last, x, rtol=1e-12, atol=1e-15)


TOY = (
    Quadratic([[2, 2], [2, 2]], [2, 2], 1.0),  # (x₁ + x₂ - 1)²
    Quadratic([[2, 0], [0, 2]], [1.6, 0.8], 0.8),  # (x₁ - 0.8)² + (x₂ - 0.4)²
)
UNIT_BOX = Polytope(bounds=[(0, 1)] * 2)


@pytest.mark.parametrize("convex", [True, False])
def test_the_solution_of_a_toy_problem(convex):
    result = ir_cg(
        *TOY,
        lambda c: np.where(c > 0, 0.0, 1.0),
        np.zeros(2),
        method="deterministic",
        outer_convex=convex,
        maxiter=5000,
    )
    np.testing.assert_allclose(result.x, [0.7, 0.3], atol=0.02 if convex else 0.06)
    assert result.fun_outer == pytest.approx(0.02, abs=0.02)
    # The minimum of G alone, at any of its points, is not enough.
    assert TOY[1].value(np.array([0.5, 0.5])) > 0.09
    few = ir_cg(*TOY, UNIT_BOX, np.zeros(2), method="deterministic", maxiter=300)
    np.testing.assert_allclose(few.x, [0.7, 0.3], atol=0.1)


def test_sums_and_samples_reach_the_solution_of_both_levels():
    """Against a penalty method's limit, by accelerated descent on G + λF for small λ."""
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((3, 8)), rng.standard_normal((30, 8))
    inner, outer = LeastSquares(A, A @ np.full(8, 0.1)), LeastSquares(B, rng.standard_normal(30))
    lam = 1e-6
    H = A.T @ A / 3 + lam * B.T @ B / 30
    exact = np.linalg.solve(H, A.T @ inner.targets / 3 + lam * B.T @ outer.targets / 30)
    ball = L2Ball(2.0)
    assert ball.contains(exact)
    for method, maxiter, inner_tol, outer_tol in (
        ("deterministic", 5000, 2e-3, 0.03),
        ("irfscg", 5000, 2e-3, 0.03),
        ("irscg", 20_000, 5e-3, 0.08),
    ):
        result = ir_cg(inner, outer, ball, np.zeros(8), method=method, maxiter=maxiter, rng=0)
        assert result.fun_inner < inner_tol
        assert abs(result.fun_outer - outer.value(exact)) < outer_tol


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["irscg", "irfscg", "deterministic"]),
    st.booleans(),
    st.sampled_from([L1Ball(0.7), L2Ball(0.7), LinfBall(0.7), Simplex(0.7)]),
)
def test_all_points_are_in_the_set(seed, method, convex, oracle):
    inner, outer = least_squares(seed), logistic(seed + 1)
    start = oracle(np.random.default_rng(seed).standard_normal(6))
    start = start.dense((6,)) if isinstance(start, Atom) else start
    seen = []
    result = ir_cg(
        inner,
        outer,
        oracle,
        start,
        method=method,
        outer_convex=convex,
        maxiter=64,
        rng=seed,
        callback=seen.append,
    )
    for x in (*seen, result.x_last):
        assert oracle.contains(x, 1e-12)


def test_an_expectation_is_sampled_afresh():
    target = np.array([0.3, -0.2, 0.0])

    def expectation(at):
        return Expectation(
            lambda x, samples: x - at - samples.mean(axis=0),
            lambda rng, size: rng.standard_normal((size, 3)),
            value=lambda x: float(np.sum((x - at) ** 2) / 2),
            grad=lambda x: x - at,
        )

    inner = expectation(target)
    result = ir_cg(inner, expectation(-target), L2Ball(1.0), np.zeros(3), maxiter=20_000, rng=0)
    assert result.fun_inner < 5e-3
    assert result.n_grad_inner == 2 * 20_000 - 1
    blind = Expectation(inner.sample_grad, inner.draw)
    batches = ir_cg(blind, blind, L2Ball(1.0), np.zeros(3), maxiter=500, batch=(10, 2), rng=0)
    np.testing.assert_allclose(batches.x, target, atol=0.15)
    assert np.isnan(batches.fun_inner)
    assert np.isnan(batches.fw_gap_mix)
    assert (batches.n_grad_inner, batches.n_grad_outer) == (10 * 999, 2 * 999)


def test_counts_are_those_of_the_steps():
    inner, outer = least_squares(0, n=25), least_squares(1, n=100)
    result = ir_cg(inner, outer, L1Ball(1.0), np.zeros(6), method="irfscg", maxiter=40, rng=0)
    # Epochs of 5 and 10: full gradients at 8 and 4 of 40 steps, batches of 5 and 10 at the others.
    assert result.n_grad_inner == 8 * 25 + 32 * 10
    assert result.n_grad_outer == 4 * 100 + 36 * 20
    assert result.n_lmo == result.nit == 40
    # α and σ use the longer epoch.
    assert result.sigma == pytest.approx(result.reg * 41**-0.5)
    own = ir_cg(
        inner,
        outer,
        L1Ball(1.0),
        np.zeros(6),
        method="irfscg",
        batch=(1, 2),
        epoch=(4, 8),
        maxiter=16,
        rng=0,
    )
    assert own.n_grad_inner == 4 * 25 + 12 * 2
    assert own.n_grad_outer == 2 * 100 + 14 * 4
    one = ir_cg(inner, outer, L1Ball(1.0), np.zeros(6), reg=1.0, maxiter=10, rng=0)
    assert one.n_grad_inner == one.n_grad_outer == 1 + 9 * 2


def test_the_balanced_weight():
    inner, outer = least_squares(0), least_squares(1)
    x0 = np.full(6, 0.1)
    expected = np.linalg.norm(inner.grad(x0)) / np.linalg.norm(outer.grad(x0))
    for method in ("irscg", "irfscg", "deterministic"):
        result = ir_cg(inner, outer, L1Ball(1.0), x0, method=method, maxiter=10, rng=0)
        assert result.reg == pytest.approx(expected, rel=1e-12)
    flat = Quadratic(np.zeros((6, 6)), np.zeros(6))
    assert ir_cg(inner, flat, L1Ball(1.0), x0, maxiter=2).reg == 1.0


def test_the_gap_bounds_the_distance_to_the_minimum():
    inner, outer = least_squares(0), least_squares(1)
    result = ir_cg(
        inner, outer, L1Ball(1.0), np.zeros(6), method="deterministic", gtol=1e-2, maxiter=100_000
    )
    assert result.success
    assert result.nit < 100_000
    assert "gap" in result.message
    c = result.sigma * outer.grad(result.x_last) + inner.grad(result.x_last)
    assert c @ result.x_last + np.abs(c).max() <= 1e-2
    best = ir_cg(inner, outer, L1Ball(1.0), np.zeros(6), method="deterministic", reg=0)
    assert result.fun_inner - best.fun_inner <= result.fw_gap_inner
    assert result.fw_gap_inner == pytest.approx(
        inner.grad(result.x) @ result.x + np.abs(inner.grad(result.x)).max(), rel=1e-12
    )
    spent = ir_cg(inner, outer, L1Ball(1.0), np.zeros(6), method="irfscg", gtol=0.0, maxiter=50)
    assert (spent.success, spent.status) == (False, 1)
    at_epoch = ir_cg(
        inner, outer, L1Ball(1.0), np.zeros(6), method="irfscg", gtol=0.1, maxiter=9999, rng=0
    )
    assert at_epoch.success
    assert at_epoch.nit % 4 == 0


def test_an_outer_objective_that_is_not_convex():
    """Two wells at ±0.8 on the segment of minimizers of G; the start decides between them."""
    ring = TorchLoss(lambda x, a: (x[0] ** 2 - a).square(), torch.full((16,), 0.64))
    flat = LeastSquares(np.tile([[0.0, 1.0]], (16, 1)), np.zeros(16))
    for method in ("irscg", "irfscg", "deterministic"):
        result = ir_cg(
            flat,
            ring,
            LinfBall(1.0),
            np.array([0.5, 0.5]),
            method=method,
            outer_convex=False,
            maxiter=3000,
            rng=0,
        )
        assert result.x_avg is None
        assert abs(abs(result.x[0]) - 0.8) < 0.05
        assert abs(result.x[1]) < 0.05


def test_matrices_keep_their_shape():
    rng = np.random.default_rng(0)
    truth = np.outer(rng.standard_normal(8), rng.standard_normal(5))
    A, B = rng.standard_normal((4, 8)), rng.standard_normal((60, 8))
    radius = float(np.linalg.svd(truth, compute_uv=False).sum())
    result = ir_cg(
        LeastSquares(A, A @ truth),
        LeastSquares(B, B @ truth),
        NuclearBall(radius),
        np.zeros((8, 5)),
        method="irfscg",
        maxiter=2000,
        rng=0,
    )
    assert np.linalg.norm(result.x - truth) < 0.1 * np.linalg.norm(truth)


# --- the interface


def test_the_same_seed_gives_the_same_run():
    problem = (least_squares(0), least_squares(1), L1Ball(1.0), np.zeros(6))
    for method in ("irscg", "irfscg"):
        first, second, other = (
            ir_cg(*problem, method=method, maxiter=200, rng=seed).x_last for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(first, second)
        assert not np.array_equal(first, other)


def test_records_are_at_powers_of_two():
    inner, outer = least_squares(0), least_squares(1)
    seen = []
    result = ir_cg(
        inner,
        outer,
        L1Ball(1.0),
        np.zeros(6),
        maxiter=100,
        rng=0,
        callback=lambda intermediate_result: seen.append(intermediate_result),
    )
    history = result.history
    assert history["nit"].tolist() == [1, 2, 4, 8, 16, 32, 64, 100]
    assert [r.nit for r in seen] == history["nit"].tolist()
    for record, G, F in zip(seen, history["fun_inner"], history["fun_outer"], strict=True):
        assert (record.fun_inner, record.fun) == (G, F)
        assert inner.value(record.x) == G
    assert np.all(np.diff(history["time"]) >= 0)
    np.testing.assert_array_equal(seen[-1].x, result.x)
    np.testing.assert_array_equal(result.x, result.x_avg)
    shorter = ir_cg(inner, outer, L1Ball(1.0), np.zeros(6), maxiter=16, rng=0)
    np.testing.assert_allclose(shorter.x, seen[4].x, rtol=1e-12)


def test_the_callback_can_stop_and_ctrl_c_keeps_the_point():
    problem = (least_squares(0), least_squares(1), L1Ball(1.0), np.zeros(6))

    def stop(x):
        raise StopIteration

    result = ir_cg(*problem, callback=stop)
    assert (result.status, result.nit, result.success) == (99, 1, False)

    class Interrupted(LeastSquares):
        calls = 0

        def sample_grads(self, x, y, idx):
            self.calls += 1
            if self.calls == 50:
                raise KeyboardInterrupt
            return super().sample_grads(x, y, idx)

    inner = Interrupted(problem[0].A, problem[0].targets)
    result = ir_cg(inner, *problem[1:], maxiter=1000, rng=0)
    assert (result.status, result.nit) == (2, 50)
    assert result.history["nit"][-1] == 50
    assert inner.value(result.x) == result.fun_inner


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_not_finite_ends_the_run(compiled):
    huge, lmo = LeastSquares(np.full((3, 2), 1e160), np.zeros(3)), L1Ball(1e160)
    with np.errstate(all="ignore"):
        result = ir_cg(huge, huge, lmo if compiled else plain(lmo), np.zeros(2), reg=1.0, rng=0)
    assert result.status == 3
    assert not result.success
    assert np.isfinite(result.x).all()


def test_too_short_a_run_warns():
    inner, outer = least_squares(0, n=100), least_squares(1, n=100)
    with pytest.warns(UserWarning, match="not defined before step 11"):
        result = ir_cg(inner, outer, L1Ball(1.0), np.zeros(6), method="irfscg", maxiter=10, rng=0)
    assert result.x_avg is None
    np.testing.assert_array_equal(result.x, result.x_last)


def test_progress_is_shown_on_request(capsys):
    ir_cg(least_squares(0), least_squares(1), L1Ball(1.0), np.zeros(6), show_progress=True)
    assert "IR-CG" in capsys.readouterr().err


@parametrize_with_checks([BilevelLinearRegression(max_iter=200, random_state=0)])
def test_scikit_learn_estimator(estimator, check):
    check(estimator)


def test_the_estimator_selects_by_the_outer_data():
    """40 features and 20 samples: the outer data tell which of all best fits is the true one."""
    rng = np.random.default_rng(0)
    X, X_outer, X_test = rng.standard_normal((3, 80, 40))
    X = X[:20]
    w = np.zeros(40)
    w[:4] = [1.0, -1.0, 0.5, 0.5]
    for norm, radius in (("l1", 3.0), ("l2", 1.6), ("nuclear", 1.6)):
        model = BilevelLinearRegression(radius, norm=norm, random_state=0)
        model.fit(X, X @ w + 2, X_outer, X_outer @ w + 2)
        assert model.score(X_test, X_test @ w + 2) > 0.9
        assert model.inner_loss_ <= model.gap_
        assert model.intercept_ == pytest.approx(2, abs=0.3)
    blind = BilevelLinearRegression(3.0, reg=0.0, random_state=0)
    blind.fit(X, X @ w + 2, X_outer, X_outer @ w + 2)
    assert blind.score(X_test, X_test @ w + 2) < model.score(X_test, X_test @ w + 2)


def test_the_estimator_of_several_targets():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 6))
    W = np.outer(rng.standard_normal(6), [1.0, -2.0])
    model = BilevelLinearRegression(8.0, norm="nuclear", fit_intercept=False, random_state=0)
    model.fit(X, X @ W)
    assert model.coef_.shape == (2, 6)
    assert model.predict(X).shape == (60, 2)
    np.testing.assert_allclose(model.coef_, W.T, atol=0.1)
    for bad, message in (
        ({"X_outer": X}, "given together"),
        ({"X_outer": X, "y_outer": X[:, :1]}, "columns of y"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X, X @ W, **bad)


# --- bad input


QUADRATIC = TOY[0]


class NoDraw:
    n = 3
    value = grad = sample_grad = None


BAD = [
    ({"inner": 3}, TypeError, "inner must have n, value"),
    ({"outer": NoDraw()}, TypeError, "NoDraw lacks draw"),
    ({"lmo": 3}, TypeError, "lmo must be callable"),
    ({"method": "sgd"}, ValueError, "method must be one of"),
    ({"outer_convex": 1}, ValueError, "outer_convex must be"),
    ({"maxiter": 0}, ValueError, "maxiter must be"),
    ({"reg": -1.0}, ValueError, "reg must be"),
    ({"reg": "large"}, TypeError, "reg must be"),
    ({"gtol": -1.0, "method": "irfscg"}, ValueError, "gtol must be"),
    ({"gtol": 1.0}, ValueError, "gtol must be None for method='irscg'"),
    ({"p": 0.5}, ValueError, "p must be a finite number > 0 and < 0.5"),
    ({"p": 0.0}, ValueError, "p must be"),
    ({"p": 1.0, "method": "irfscg"}, ValueError, "p must be"),
    ({"p": 0.45, "outer_convex": False}, ValueError, "p must be"),
    ({"omega": 0.5}, ValueError, "omega must be None"),
    ({"omega": 1.0, "outer_convex": False}, ValueError, "omega must be"),
    ({"batch": 0}, ValueError, "batch must be"),
    ({"batch": (1, 2, 3)}, ValueError, "batch must be an integer or a pair"),
    ({"batch": 2, "method": "deterministic"}, ValueError, "batch must be None"),
    ({"epoch": 2}, ValueError, "epoch must be None"),
    ({"x0": [np.nan, 0]}, ValueError, "x0 must be finite"),
    ({"x0": [1j, 0]}, TypeError, "x0 must be real"),
    ({"x0": []}, ValueError, "x0 must have"),
    ({"x0": [2.0, 0.0]}, ValueError, "x0 must be a point of the set"),
    ({"callback": 3}, TypeError, "callback must be"),
    ({"rng": -1}, ValueError, "rng must be"),
    ({"lmo": lambda c: np.zeros(3)}, ValueError, "lmo must return the shape of x"),
    ({"lmo": lambda c: np.full(2, np.inf)}, ValueError, "is the set bounded"),
    ({"lmo": lambda c: c}, ValueError, "lmo must minimize"),
    ({"lmo": Polytope()}, ValueError, "must be bounded"),
    ({"inner": Quadratic(np.eye(2) * np.nan, [0, 0])}, ValueError, "gradient of inner at x0"),
    ({"inner": Quadratic(np.eye(3), np.zeros((3, 3)))}, ValueError, "matmul"),
    ({"outer": Quadratic(np.eye(2), [[0.0], [1.0]])}, ValueError, "must return the shape of x"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    arguments = {"inner": TOY[0], "outer": TOY[1], "lmo": UNIT_BOX, "x0": [0.5, 0.5]} | change
    positional = [arguments.pop(name) for name in ("inner", "outer", "lmo", "x0")]
    with pytest.raises(error, match=message):
        ir_cg(*positional, **arguments)


def test_sums_need_their_number_of_components():
    endless = Expectation(lambda x, samples: x, lambda rng, size: None)
    with pytest.raises(ValueError, match=r"outer\.n must be an integer for method='irfscg'"):
        ir_cg(TOY[0], endless, UNIT_BOX, np.zeros(2), method="irfscg")
    with pytest.raises(ValueError, match="gradient of outer at x0 must be finite"):
        ir_cg(TOY[0], endless, UNIT_BOX, np.zeros(2), method="deterministic")
    wrong = Quadratic(np.eye(2), [0, 0])
    wrong.n = 0
    with pytest.raises(ValueError, match=r"inner\.n must be"):
        ir_cg(wrong, TOY[1], UNIT_BOX, np.zeros(2))
