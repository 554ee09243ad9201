import math
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import erf

from thalweg.claims.convex.round_solvers import newton_center
from thalweg.convex import (
    PointwiseBatch,
    RoundOracle,
    depth_bounds,
    minimize_parallel,
    parallel_speedup_report,
    shielded_instance,
)
from thalweg.convex.gaussian_smoothing import SmoothedGradients, normal_samples
from thalweg.convex.lp_geometry import LpBall, dual_exponent, dual_map, gaussian_moment, lp_norm
from thalweg.convex.round_progress import AveragedCuts
from thalweg.convex.torch_functions import TorchBatch
from thalweg.tasks import worst_case_regression

NORMS = [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, math.inf]
METHODS = ["mirror", "smoothed-agd", "ball"]


def largest_entry(X):
    """Return ‖x‖_∞ and its subgradients."""
    rows, worst = np.arange(len(X)), np.abs(X).argmax(axis=1)
    gradients = np.zeros_like(X)
    gradients[rows, worst] = np.sign(X[rows, worst])
    return np.abs(X).max(axis=1), gradients


# Geometry


@pytest.mark.parametrize("p", NORMS)
def test_norms_and_dual_maps(p):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20, 7))
    np.testing.assert_allclose(lp_norm(X, p), np.linalg.norm(X, p, axis=1))
    for g in X:
        x = dual_map(g, p)
        assert lp_norm(x, p) == pytest.approx(1)
        assert g @ x == pytest.approx(np.linalg.norm(g, dual_exponent(p)))
    assert lp_norm(np.full(3, 1e300), 2.0) == pytest.approx(np.sqrt(3) * 1e300)
    assert lp_norm(np.zeros(3), p) == 0


@settings(max_examples=100, deadline=None)
@given(
    p=st.one_of(st.sampled_from(NORMS), st.floats(1.05, 8)),
    seed=st.integers(0, 10**6),
    scale=st.floats(0.1, 100),
)
def test_projection_is_optimal(p, seed, scale):
    rng = np.random.default_rng(seed)
    ball = LpBall(rng.normal(size=6), 1.5, p)
    y = ball.center + scale * rng.normal(size=6)
    x = ball.project(y)
    assert lp_norm(x - ball.center, p) <= 1.5 * (1 + 1e-12)
    if lp_norm(y - ball.center, p) <= 1.5:
        np.testing.assert_array_equal(x, y)
        return
    # ⟨y - x, w - x⟩ ≤ 0 for all w in the ball: the largest is at the dual map.
    rest = y - x
    assert ball.radius * lp_norm(rest, dual_exponent(p)) - rest @ (x - ball.center) <= 1e-8 * (
        1 + np.linalg.norm(rest)
    )


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0])
def test_gaussian_moments_are_those_of_samples(p):
    Z = np.random.default_rng(0).normal(size=(4000, 200))
    assert gaussian_moment(200, p) == pytest.approx(lp_norm(Z, p).mean(), rel=0.02)
    assert gaussian_moment(200, math.inf) >= lp_norm(Z, math.inf).mean()


def test_euclidean_radius_is_the_farthest_corner():
    assert LpBall(np.zeros(16), 2.0, 4.0).euclidean_radius == pytest.approx(2 * 16**0.25)
    assert LpBall(np.zeros(16), 2.0, math.inf).euclidean_radius == pytest.approx(8.0)
    assert LpBall(np.zeros(16), 2.0, 1.3).euclidean_radius == 2.0


# Smoothing


def test_reweighted_gradient_is_that_of_the_smoothing():
    rng = np.random.default_rng(0)
    y, width, count = rng.normal(size=5), 0.7, 100_000
    Z = normal_samples(count, 5, False, rng)
    smoothed = SmoothedGradients(Z, np.sign(y + width * Z), width)
    for length in (0.0, 0.5, 1.0):
        u = rng.normal(size=5)
        u *= length * width / np.linalg.norm(u)
        estimate, effective = smoothed.at(u)
        exact = erf((y + u) / (width * np.sqrt(2)))
        # The variance of a weighted mean of signs is at most 1/ESS.
        assert np.all(np.abs(estimate - exact) <= 4 / np.sqrt(effective))
        expected_size = count * np.exp(-((length) ** 2))
        assert effective == pytest.approx(expected_size, rel=0.1)


def test_unnormalized_weights_have_mean_one():
    rng = np.random.default_rng(1)
    Z, u = rng.normal(size=(200_000, 4)), np.array([0.3, -0.2, 0.1, 0.4])
    weights = np.exp(Z @ u - u @ u / 2)
    assert weights.mean() == pytest.approx(1, abs=4 * weights.std() / np.sqrt(len(Z)))


def test_antithetic_samples_come_in_pairs():
    Z = normal_samples(5, 3, True, np.random.default_rng(0))
    np.testing.assert_array_equal(Z[:2], -Z[2:4])
    assert Z.shape == (5, 3)


def test_smoothing_bias_is_within_its_bound():
    rng = np.random.default_rng(0)
    for p in (1.5, 2.0, math.inf):
        for _ in range(30):
            A = rng.normal(size=(8, 6))
            A /= np.linalg.norm(A, dual_exponent(p), axis=1, keepdims=True)
            x, width = rng.normal(size=6), 0.3
            Z = normal_samples(4000, 6, True, rng)
            bias = np.max((x + width * Z) @ A.T, axis=1).mean() - np.max(A @ x)
            error = 4 * width / np.sqrt(2000)
            assert -error <= bias <= width * lp_norm(Z, p).mean() + error


# Depth


@pytest.mark.parametrize("p", [2.0, 3.0, 4.0, math.inf])
def test_ball_acceleration_takes_the_root_of_d_at_its_accuracy(p):
    report = depth_bounds(10**4, p, 0.1)
    assert report.upper["ball acceleration"] == pytest.approx(100)
    assert report.optimal.startswith("depth √d is optimal")
    assert report.order_only


def test_depths_are_the_formulas():
    d, eps = 4096, 0.01
    two = depth_bounds(d, 2.0, eps).upper
    assert two["mirror descent"] == two["euclidean subgradient"] == pytest.approx(1e4)
    assert two["smoothed AGD"] == pytest.approx(d**0.25 / eps)
    assert two["cutting planes"] == pytest.approx(d * math.log(100))
    four = depth_bounds(d, 4.0, eps).upper
    assert four["mirror descent"] == pytest.approx(eps**-4)
    assert four["euclidean subgradient"] == pytest.approx(d**0.5 * eps**-2)
    assert four["ball acceleration"] == pytest.approx(d ** (1 / 3) * eps ** (-2 / 3))
    assert four["smoothed AGD"] == pytest.approx(d ** (3 / 8) / eps)
    low = depth_bounds(d, 1.5, eps).upper
    assert low["ball acceleration"] == pytest.approx(d ** (4 / 9) * eps ** (-2 / 3))
    assert low["smoothed AGD"] == pytest.approx(d ** (1 / 3) / eps)
    one = depth_bounds(d, 1.0, eps).upper
    assert one["mirror descent"] == pytest.approx(math.log(d) / eps**2)
    most = depth_bounds(d, math.inf, eps).upper
    assert most["mirror descent"] == math.inf
    assert most["euclidean subgradient"] == pytest.approx(d / eps**2)


def test_ball_and_mirror_cross_where_they_should():
    d = 10**4
    crossing = d**-0.25
    below, above = (
        depth_bounds(d, 2.0, crossing / 2).upper,
        depth_bounds(d, 2.0, crossing * 2).upper,
    )
    assert below["ball acceleration"] < below["mirror descent"]
    assert above["ball acceleration"] > above["mirror descent"]


@pytest.mark.parametrize("p", NORMS)
def test_depths_are_monotone(p):
    by_eps = [depth_bounds(1000, p, eps).upper for eps in (0.3, 0.1, 0.03)]
    by_dim = [depth_bounds(d, p, 0.1).upper for d in (10, 100, 1000)]
    for name in by_eps[0]:
        values = [upper[name] for upper in by_eps]
        assert values == sorted(values)
        values = [upper[name] for upper in by_dim]
        assert values == sorted(values)


def test_what_is_known_from_below():
    assert depth_bounds(1000, 2.0, 0.1).no_gain_below == {
        "shielded maxima": pytest.approx(10),
        "wall construction": pytest.approx(math.sqrt(1000)),
    }
    assert "NeurIPS 2026, at least" in depth_bounds(1000, 3.0, 0.1).no_gain_below
    assert depth_bounds(10**4, math.inf, 0.3).optimal.startswith("ball acceleration is optimal")
    assert depth_bounds(100, 2.0, 0.1).optimal == ""
    report = depth_bounds(10**4, 2.0, 0.01)
    assert report.speedup == pytest.approx(report.sequential / report.upper[report.best])
    ax = report.plot()
    assert len(ax.lines) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 2.0, 0.1), "d must be"),
        ((10, 0.5, 0.1), "p must be"),
        ((10, math.nan, 0.1), "p must be"),
        ((10, 2.0, 1.0), "eps must be"),
        ((10, 2.0, 0.0), "eps must be"),
    ],
)
def test_bad_depths(arguments, message):
    with pytest.raises(ValueError, match=message):
        depth_bounds(*arguments)


# Hard instances


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0, math.inf])
def test_instances_are_lipschitz_and_convex(p):
    instance = shielded_instance(2000, p, 3, width=10, radius=2.0, rng=0)
    np.testing.assert_allclose(np.linalg.norm(instance.V, dual_exponent(p), axis=1), 1)
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(2, 50, 2000))
    fx, gx = instance.fun_batch(X)
    fy, _ = instance.fun_batch(Y)
    assert np.all(np.abs(fx - fy) <= lp_norm(X - Y, p) + 1e-9)
    assert np.all(fy >= fx + np.einsum("qd,qd->q", gx, Y - X) - 1e-9)
    assert instance.piece(np.zeros((1, 2000)))[0] == 0
    point = -2.0 * dual_map(instance.V.sum(axis=0), p)
    assert instance.fun_batch(point[None])[0][0] == pytest.approx(instance.fstar_upper)


def test_number_of_pieces_grows_with_the_cube_root():
    pieces = [shielded_instance(d, 2.0, width=100, rng=0).k for d in (10**3, 8 * 10**3, 64 * 10**3)]
    assert pieces == [2, 4, 9]


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_batches_show_one_piece_after_the_other(p):
    d, width = 8000, 100
    more = 0
    rounds = 0
    for seed in range(10):
        instance = shielded_instance(d, p, width=width, rng=seed)
        rng = np.random.default_rng(seed + 100)
        known = np.zeros(d)
        seen = set()
        for _ in range(instance.k):
            X = rng.normal(size=(width, d))
            X *= 0.5 * instance.radius / lp_norm(X, p)[:, None]
            X += known
            shown = set(instance.piece(X).tolist()) - seen
            more += len(shown) > 1
            rounds += 1
            seen |= shown
            total = instance.V[sorted(seen)].sum(axis=0)
            known = -0.5 * instance.radius * dual_map(total, p)
    assert more <= 0.05 * rounds


def test_unseen_pieces_leave_a_gap():
    instance = shielded_instance(64_000, 2.0, width=100, rng=0)
    assert instance.gap == pytest.approx(instance.unseen - instance.fstar_upper)
    # Seeing all but the last piece and using them as well as possible.
    point = -dual_map(instance.V[:-1].sum(axis=0), 2.0)
    assert instance.fun_batch(point[None])[0][0] >= instance.unseen - 1e-3


def test_bad_instances():
    with pytest.raises(ValueError, match="d must be larger to hide a piece from width 1000, got 2"):
        shielded_instance(2, 2.0, width=1000, rng=0)
    with pytest.raises(ValueError, match="width must be"):
        shielded_instance(100, 2.0, width=0, rng=0)
    with pytest.raises(ValueError, match="k must be"):
        shielded_instance(100, 2.0, 0, width=1, rng=0)


# The oracle


def test_oracle_counts_and_checks():
    oracle = RoundOracle(largest_entry, p=math.inf, lipschitz=1.0)
    oracle(np.ones((3, 4)))
    oracle(np.ones((5, 4)))
    assert (oracle.rounds, oracle.queries, oracle.width_max) == (2, 8, 5)
    assert oracle.largest_gradient == 1.0
    steep = RoundOracle(lambda X: (2 * X.sum(axis=1), np.full(X.shape, 2.0)), 2.0, 1.0)
    with pytest.raises(ValueError, match=r"lipschitz must bound .* got 1, but one has 4"):
        steep(np.ones((1, 4)))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda X: X.sum(), r"must return \(values, gradients\), got float64; wrap"),
        (lambda X: (X.sum(), X), r"must return shapes \(2,\) and \(2, 3\), got \(\)"),
        (lambda X: (X.sum(axis=1), X[0]), r"got \(2,\) and \(3,\)"),
        (lambda X: (X.sum(axis=1), X * math.nan), "must return finite numbers, got 3.0 and"),
        (lambda X: (X.sum(axis=1) * math.inf, X), "must return finite numbers, got inf"),
    ],
)
def test_bad_answers(answer, message):
    with pytest.raises(ValueError, match=message):
        RoundOracle(answer)(np.ones((2, 3)))


def test_bad_oracles():
    with pytest.raises(TypeError, match="fun_batch must be callable"):
        RoundOracle(3)
    with pytest.raises(TypeError, match="executor must have a method map"):
        RoundOracle(largest_entry, executor=4)
    with pytest.raises(ValueError, match="n_chunks must be"):
        RoundOracle(largest_entry, n_chunks=0)


def test_pieces_of_a_batch_run_at_the_same_time():
    barrier = threading.Barrier(2, timeout=20)

    def meet(X):
        barrier.wait()  # passes only if both pieces are being evaluated
        return largest_entry(X)

    with ThreadPoolExecutor(2) as executor:
        oracle = RoundOracle(meet, math.inf, executor=executor, n_chunks=2)
        X = np.random.default_rng(0).normal(size=(7, 3))
        values, gradients = oracle(X)
    np.testing.assert_array_equal(values, largest_entry(X)[0])
    np.testing.assert_array_equal(gradients, largest_entry(X)[1])
    assert oracle.rounds == 1


def test_executor_changes_nothing_but_time():
    options = {"p": math.inf, "eps": 0.05, "max_rounds": 20, "width": 32, "rng": 0}
    start = np.linspace(-0.4, 0.9, 6)
    alone = minimize_parallel(lambda X: largest_entry(X - 0.3), start, **options)
    with ThreadPoolExecutor(2) as executor:
        together = minimize_parallel(
            lambda X: largest_entry(X - 0.3), start, executor=executor, n_chunks=2, **options
        )
    np.testing.assert_array_equal(alone.x, together.x)


# The solvers


@pytest.mark.parametrize("p", [1.0, 1.02, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_solvers_reach_the_accuracy_and_stay_inside(p, method):
    problem = worst_case_regression(8, p, rng=1)
    eps = 0.1 * (problem.start_value - problem.minimum)
    asked = []

    def watched(X):
        asked.append(len(X))
        return problem.fun_batch(X)

    result = minimize_parallel(
        watched, np.zeros(8), p=p, eps=eps, method=method, width=64, max_rounds=1500, rng=0
    )
    assert result.fun - problem.minimum <= eps
    assert lp_norm(result.x, p) <= 1 + 1e-9
    assert problem.fun_batch(result.x[None])[0][0] == pytest.approx(result.fun, abs=1e-12)
    assert result.rounds == len(asked)
    assert result.nfev == sum(asked)
    assert max(asked) <= 64
    # The certificate is one.
    assert result.gap >= result.fun - problem.minimum - 1e-9
    assert np.all(np.diff(result.history["gap"]) <= 1e-12)
    assert result.success


@pytest.mark.parametrize("method", METHODS)
def test_linear_functions_end_on_the_boundary(method):
    c = np.array([0.6, -0.8, 0.0])
    result = minimize_parallel(
        lambda X: (X @ c, np.tile(c, (len(X), 1))),
        np.ones(3),
        radius=2.0,
        eps=0.02,
        method=method,
        rng=0,
    )
    assert result.status == 0
    assert result.fun <= c.sum() - 2.0 + 0.02
    assert result.gap <= 0.02


@pytest.mark.parametrize("method", METHODS)
def test_the_gap_ends_a_run_where_the_minimum_is_inside(method):
    result = minimize_parallel(
        lambda X: (
            np.linalg.norm(X - 0.2, axis=1),
            (X - 0.2) / np.linalg.norm(X - 0.2, axis=1)[:, None],
        ),
        np.zeros(2),
        eps=0.05,
        method=method,
        max_rounds=3000,
        rng=0,
    )
    assert (result.status, result.success) == (0, True)
    assert result.fun <= result.gap + 1e-12 <= 0.05 + 1e-12
    assert result.rounds < 3000


def test_largest_entry_in_the_plane_goes_to_zero():
    result = minimize_parallel(
        lambda X: largest_entry(X), np.array([0.5, -0.3]), p=math.inf, eps=0.01, rng=0
    )
    assert result.fun <= 0.01


def test_width_saves_rounds():
    problem = worst_case_regression(40, math.inf, rng=0)
    first = problem.start_value - problem.minimum
    needed = {}
    for method in ("mirror", "smoothed-agd", "ball"):
        result = minimize_parallel(
            problem.fun_batch,
            np.zeros(40),
            p=math.inf,
            eps=0.05 * first,
            method=method,
            max_rounds=800,
            rng=0,
        )
        reached = np.flatnonzero(result.history["fun"] <= problem.minimum + 0.05 * first)
        needed[method] = reached[0] if len(reached) else math.inf
    assert needed["smoothed-agd"] < needed["mirror"] / 5
    assert needed["ball"] < needed["mirror"] / 5


def test_same_seed_same_run_and_scipy_runs_it():
    problem = worst_case_regression(6, 2.0, rng=0)
    options = {"eps": 0.05, "max_rounds": 30}
    first, second = (
        minimize_parallel(problem.fun_batch, np.zeros(6), rng=5, **options) for _ in range(2)
    )
    np.testing.assert_array_equal(first.x, second.x)

    def fun(x):
        return float(problem.fun_batch(x[None])[0][0])

    def jac(x):
        return problem.fun_batch(x[None])[1][0]

    third = minimize(
        fun, np.zeros(6), jac=jac, method=minimize_parallel, options={**options, "rng": 5}
    )
    np.testing.assert_allclose(third.x, first.x)


def test_functions_of_tensors_are_differentiated():
    problem = worst_case_regression(6, math.inf, rng=0)
    A, b = torch.tensor(problem.A), torch.tensor(problem.b)
    options = {"p": math.inf, "eps": 0.02, "max_rounds": 40, "width": 32, "rng": 1}
    of_tensors = minimize_parallel(
        lambda X: (X @ A.T - b).abs().max(dim=1).values, np.zeros(6), jac="torch", **options
    )
    of_arrays = minimize_parallel(problem.fun_batch, np.zeros(6), **options)
    np.testing.assert_allclose(of_tensors.x, of_arrays.x, atol=1e-10)
    with pytest.raises(TypeError, match=r"fun must return a tensor of shape \(Q,\)"):
        minimize_parallel(lambda X: X.sum(), np.zeros(6), jac="torch", **options)
    with pytest.raises(ValueError, match="jac must be one of 'torch'"):
        minimize_parallel(lambda X: X, np.zeros(6), jac="2-point", **options)


def test_constant_functions_of_tensors_have_gradient_zero():
    values, gradients = TorchBatch(lambda X: torch.ones(len(X)))(np.ones((3, 2)))
    assert values.tolist() == [1.0, 1.0, 1.0]
    np.testing.assert_array_equal(gradients, np.zeros((3, 2)))


def test_a_ray_pool_evaluates_the_pieces():
    with warnings.catch_warnings(action="ignore"):
        from ray.util.multiprocessing import Pool

        with Pool(2) as pool:
            oracle = RoundOracle(largest_entry, math.inf, executor=pool, n_chunks=2)
            X = np.random.default_rng(0).normal(size=(6, 3))
            values, _ = oracle(X)
        ray.shutdown()
    np.testing.assert_array_equal(values, largest_entry(X)[0])


def test_callbacks_see_every_round_and_may_stop():
    seen = []

    def callback(intermediate_result):
        seen.append((intermediate_result.rounds, intermediate_result.fun))
        if len(seen) == 4:
            raise StopIteration

    result = minimize_parallel(
        lambda X: largest_entry(X - 0.5),
        np.zeros(4),
        p=math.inf,
        eps=1e-3,
        callback=callback,
        rng=0,
    )
    assert (result.status, result.success, result.rounds) == (99, False, 4)
    assert [rounds for rounds, _ in seen] == [1, 2, 3, 4]


def test_an_interrupt_keeps_the_best_point():
    rounds = []

    def interrupted(X):
        rounds.append(len(X))
        if len(rounds) == 6:
            raise KeyboardInterrupt
        return largest_entry(X - 0.5)

    result = minimize_parallel(interrupted, np.zeros(3), p=math.inf, eps=1e-3, rng=0)
    assert (result.status, result.success) == (3, False)
    assert result.fun < 0.5
    assert len(result.history["fun"]) == 5


def test_noise_does_not_pick_the_luckiest_point():
    rng = np.random.default_rng(0)

    def noisy(X):
        values, gradients = largest_entry(X - 0.4)
        return values + rng.normal(size=len(X)), gradients

    result = minimize_parallel(
        noisy, np.zeros(5), p=math.inf, eps=0.05, noisy=True, max_rounds=60, rng=0
    )
    assert result.status == 1
    assert np.abs(result.x - 0.4).max() <= 0.1


def test_auto_takes_what_the_width_allows():
    options = {"p": math.inf, "eps": 0.05, "max_rounds": 3, "rng": 0}
    wide = minimize_parallel(lambda X: largest_entry(X - 0.5), np.zeros(3), **options)
    assert wide.method == "smoothed-agd"
    narrow = minimize_parallel(lambda X: largest_entry(X - 0.5), np.zeros(3), width=4, **options)
    assert narrow.method == "mirror"
    single = minimize_parallel(lambda X: largest_entry(X - 0.5), np.zeros(3), width=1, **options)
    assert single.nfev == 3


def test_an_oracle_may_be_shared():
    oracle = RoundOracle(lambda X: largest_entry(X - 0.5), math.inf)
    for _ in range(2):
        result = minimize_parallel(
            oracle, np.zeros(3), p=math.inf, eps=0.01, max_rounds=5, width=16, rng=0
        )
        assert (result.rounds, result.nfev) == (5, 80)
    assert oracle.rounds == 10


def test_large_eps_returns_the_center():
    result = minimize_parallel(largest_entry, np.array([0.3, 0.4]), p=math.inf, eps=1.0)
    assert (result.status, result.rounds, result.success) == (2, 1, True)
    np.testing.assert_array_equal(result.x, [0.3, 0.4])
    assert "eps is at least lipschitz * radius" in result.message


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"p": 0.9}, ValueError, "p must be"),
        ({"radius": 0.0}, ValueError, "radius must be"),
        ({"lipschitz": math.inf}, ValueError, "lipschitz must be"),
        ({"eps": 0.0}, ValueError, "eps must be"),
        ({"method": "newton"}, ValueError, "method must be one of"),
        ({"width": 0}, ValueError, "width must be"),
        ({"width": 4, "method": "ball"}, ValueError, "width must be at least 8 for method='ball'"),
        ({"max_rounds": 0}, ValueError, "max_rounds must be"),
        ({"smoothing": -1}, ValueError, "smoothing must be"),
        ({"step": 0}, ValueError, "step must be"),
        ({"antithetic": 2}, ValueError, "antithetic must be"),
        ({"jac": 3}, TypeError, "jac must be callable"),
        ({"args": (1,)}, ValueError, "args must be empty without jac"),
        ({"bounds": [(0, 1)]}, ValueError, "bounds must be None"),
        ({"lipschitz": 0.5}, ValueError, "lipschitz must bound"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        minimize_parallel(largest_entry, np.ones(3), **{"p": math.inf, "eps": 0.1, **options})


def test_averaged_cuts_bound_from_below():
    rng = np.random.default_rng(0)
    problem = worst_case_regression(5, 2.0, rng=0)
    cuts = AveragedCuts(LpBall(np.zeros(5), 1.0, 2.0))
    for _ in range(20):
        X = rng.normal(size=(3, 5))
        values, gradients = problem.fun_batch(X)
        assert cuts.add(X, values, gradients, rng.uniform(0.1, 2)) <= problem.minimum + 1e-6


def test_pointwise_functions_take_their_arguments():
    batch = PointwiseBatch(lambda x, a: a * x[0], lambda x, a: np.array([a]), (3.0,))
    values, gradients = batch(np.array([[2.0], [1.0]]))
    assert values.tolist() == [6.0, 3.0]
    assert gradients.tolist() == [[3.0], [3.0]]


def test_speedup_report_compares_widths():
    problem = worst_case_regression(20, math.inf, rng=0)
    eps = 0.1 * (problem.start_value - problem.minimum)
    report = parallel_speedup_report(
        problem.fun_batch, 20, math.inf, eps, widths=(1, 64), rng=0, max_rounds=400
    )
    assert report.rounds.shape == (2,)
    assert report.speedup[0] == 1
    assert report.speedup[1] > 2
    assert np.all(report.queries >= report.rounds)
    assert np.all(report.seconds > 0)
    assert len(report.plot().lines) == 1
    with pytest.raises(ValueError, match="widths must hold"):
        parallel_speedup_report(problem.fun_batch, 20, math.inf, eps, widths=())


def test_analytic_centers_of_the_peer_are_centers():
    rng = np.random.default_rng(0)
    C, c = rng.normal(size=(7, 4)), rng.uniform(-0.2, 0.5, size=7)
    c[:3] += 1
    c = np.maximum(c, C @ np.full(4, 0.1) + 0.05)
    x = newton_center(C, c, np.zeros(4))
    assert np.all(C @ x < c)
    assert np.all(np.abs(x) < 1)
    # The gradient of -Σ log(c - Cx) - Σ log(1 - x²) is 0.
    gradient = C.T @ (1 / (c - C @ x)) + 2 * x / (1 - x**2)
    np.testing.assert_allclose(gradient, 0, atol=1e-4)
