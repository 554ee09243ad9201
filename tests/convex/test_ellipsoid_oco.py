import copy
import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from thalweg.convex import EllipsoidOCO, SeparationOracle, ellipsoid_minimize
from thalweg.convex.covering_ellipsoids import CoveringEllipsoid, project_on_ball
from thalweg.convex.gauge_distance import CheckedOracle, gauge_distance
from thalweg.tasks import drifting_losses, thin_ellipsoid
from thalweg.tasks.thin_sets import random_rotation


def rotated_box(dim=5, kappa=100.0, seed=0):
    """Return an oracle, half-widths, axes and center of a box, two of whose sides are long."""
    rng = np.random.default_rng(seed)
    axes = random_rotation(dim, rng)
    half = np.where(np.arange(dim) < 2, 1.0, 1 / kappa) / np.sqrt(dim)
    center = rng.normal(size=dim)
    center *= 0.15 / np.linalg.norm(center)
    A = np.vstack([axes.T, -axes.T])
    b = np.concatenate([half + axes.T @ center, half - axes.T @ center])
    return SeparationOracle.polytope(A, b), half, axes, center


def player_of(oracle, half, center, **options):
    options = {"horizon": 500, "center": np.zeros(len(half)), **options}
    return EllipsoidOCO(
        oracle,
        len(half),
        radius=1.2,
        inner_radius=float(half.min()),
        feasible_point=center,
        **options,
    )


def play(player, losses):
    points = []
    for gradient in losses:
        points.append(player.select())
        player.update(gradient)
    return np.array(points)


# The ellipsoid


def test_constants_of_the_cut_in_five_dimensions():
    ellipsoid = CoveringEllipsoid(np.zeros(5), 1.0)
    change = ellipsoid.cut(np.array([2.0, 0, 0, 0, 0]))
    assert -ellipsoid.center[0] == pytest.approx(1 / 12)
    assert ellipsoid.scale**2 == pytest.approx(1.03125)
    assert 1 - ellipsoid.shrink**2 == pytest.approx(0.185185, abs=1e-6)
    H = ellipsoid.L @ ellipsoid.L.T
    np.testing.assert_allclose(
        np.diag(H), 1.03125 * np.array([1 - 0.1851852, 1, 1, 1, 1]), rtol=1e-6
    )
    assert change.scale == ellipsoid.scale


@pytest.mark.parametrize("dim", [2, 5, 30])
def test_a_cut_holds_what_it_keeps_and_shrinks_the_volume(dim):
    rng = np.random.default_rng(dim)
    ellipsoid = CoveringEllipsoid(rng.normal(size=dim), 2.0)
    for _ in range(3):
        before, center = ellipsoid.L.copy(), ellipsoid.center.copy()
        normal = rng.normal(size=dim)
        ellipsoid.cut(normal)
        x = rng.normal(size=(2000, dim))
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        kept = x[x @ normal <= np.linalg.norm(normal) / (2 * dim)]
        points = center + kept @ before.T
        coordinates = np.linalg.solve(ellipsoid.L, (points - ellipsoid.center).T)
        assert np.sum(coordinates**2, axis=0).max() <= 1 + 1e-12
        _, larger = np.linalg.slogdet(before @ before.T)
        _, smaller = np.linalg.slogdet(ellipsoid.L @ ellipsoid.L.T)
        assert smaller - larger <= -1 / (4 * dim)


def test_whitened_coordinates_and_metrics_follow_the_ellipsoid():
    rng = np.random.default_rng(0)
    ellipsoid = CoveringEllipsoid(rng.normal(size=4), 1.5)
    point, Sigma = rng.normal(size=4), np.diag([1.0, 2.0, 3.0, 4.0])
    x = np.linalg.solve(ellipsoid.L, point - ellipsoid.center)
    M = ellipsoid.L.T @ Sigma @ ellipsoid.L
    for _ in range(20):
        change = ellipsoid.cut(rng.normal(size=4))
        x, M = change.point(x), change.metric(M)
    np.testing.assert_allclose(ellipsoid.center + ellipsoid.L @ x, point, atol=1e-10)
    np.testing.assert_allclose(M, ellipsoid.L.T @ Sigma @ ellipsoid.L, rtol=1e-9)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), dim=st.integers(2, 8), spread=st.floats(0, 6))
def test_projection_on_the_ball_is_optimal(seed, dim, spread):
    rng = np.random.default_rng(seed)
    axes = random_rotation(dim, rng)
    M = (axes * 10.0 ** rng.uniform(-spread, 0, size=dim)) @ axes.T
    M = (M + M.T) / 2
    y = 3 * rng.normal(size=dim)
    x = project_on_ball(y, M)
    assert x @ x <= 1 + 1e-10
    if y @ y <= 1:
        np.testing.assert_array_equal(x, y)
        return
    # First-order optimality over the ball: M(y - x) = νx with ν ≥ 0.
    normal = M @ (y - x)
    nu = normal @ x
    assert nu >= 0
    np.testing.assert_allclose(normal, nu * x, atol=1e-8 * max(1.0, np.linalg.norm(M @ y)))


def test_projection_on_an_ellipsoid_is_that_of_cvxpy():
    rng = np.random.default_rng(1)
    L, factor = rng.normal(size=(4, 4)), rng.normal(size=(4, 4))
    Sigma, z = factor @ factor.T + np.eye(4), 5 * rng.normal(size=4)
    mine = L @ project_on_ball(np.linalg.solve(L, z), L.T @ Sigma @ L)
    u = cp.Variable(4)
    objective = cp.Minimize(cp.norm(np.linalg.cholesky(Sigma).T @ (u - z)))
    problem = cp.Problem(objective, [cp.norm(np.linalg.inv(L) @ u) <= 1])
    problem.solve(solver=cp.CLARABEL)
    # An error of 1e-8 in the objective is one of 1e-4 in its argument.
    np.testing.assert_allclose(mine, u.value, atol=1e-3)
    assert np.sqrt((mine - z) @ Sigma @ (mine - z)) <= problem.value + 1e-6


# The gauge


def test_gauge_of_a_disc_is_the_distance():
    oracle = CheckedOracle(SeparationOracle.ball([0.3, 0.0], 1.0), np.array([0.3, 0.0]), 1e-9)
    center = np.array([0.3, 0.0])
    for rho in (1.2, 2.5, 3.9):
        x = np.array([0.6, 0.8]) * rho / 4
        gauge = gauge_distance(oracle, center, 4.0 * np.eye(2), x, 1e-8)
        assert not gauge.thin
        assert gauge.excess == pytest.approx(rho - 1, abs=1e-7)
        np.testing.assert_allclose(gauge.subgradient / 4, [0.6, 0.8], atol=1e-6)


def test_gauge_is_zero_inside_and_thin_where_the_center_is_cut_off():
    oracle = CheckedOracle(SeparationOracle.ball([0.0, 0.0], 1.0), np.zeros(2), 1e-9)
    inside = gauge_distance(oracle, np.zeros(2), 4.0 * np.eye(2), np.array([0.1, 0.1]), 1e-8)
    assert (inside.excess, inside.inside_share, inside.subgradient) == (0.0, 1.0, None)
    center = np.array([3.0, 0.0])
    outside = gauge_distance(oracle, center, 4.0 * np.eye(2), np.array([0.1, 0.1]), 1e-8)
    assert outside.thin
    assert np.linalg.norm(outside.subgradient) == pytest.approx(3 * 2)


def test_gauge_stays_within_its_calls():
    oracle, half, axes, center = rotated_box(kappa=3.0)
    checked = CheckedOracle(oracle, center, 1e-9)
    rng = np.random.default_rng(0)
    for _ in range(50):
        x = rng.normal(size=5)
        before = checked.n_calls
        gauge = gauge_distance(checked, center, np.eye(5), x / np.linalg.norm(x), 1e-8)
        assert checked.n_calls - before <= 3 + math.log2(8 * 25 / 1e-8)
        if not gauge.thin:
            gamma = np.max(np.abs(axes.T @ (x / np.linalg.norm(x))) / half)
            assert gauge.excess == pytest.approx(max(0.0, gamma - 1), abs=1e-8)


def test_feedback_bounds_the_loss_of_the_play():
    oracle, half, axes, center = rotated_box(kappa=5.0)
    player = EllipsoidOCO(
        oracle, 5, radius=1.2, inner_radius=0.01, feasible_point=center, update_ellipsoid=False
    )
    L = player._ellipsoid.L
    rng = np.random.default_rng(0)
    points = center + rng.uniform(-1, 1, size=(20, 5)) * half @ axes.T
    for _ in range(200):
        x = rng.normal(size=5)
        player._x = x / np.linalg.norm(x) * rng.uniform() ** 0.2
        w, gauge = player.select(), player._gauge
        g = rng.normal(size=5)
        g /= np.linalg.norm(g)
        feedback = np.linalg.solve(L.T, player._feedback(g, gauge))
        assert np.all(g @ w - points @ g <= feedback @ player.u - points @ feedback + 1e-6)
        player.update(g)


# The player


def test_plays_stay_inside_and_the_ellipsoid_holds_the_set():
    oracle, half, axes, center = rotated_box(kappa=300.0)
    player = player_of(oracle, half, center)
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(5, 200))
    vertices = (center[:, None] + axes @ (half[:, None] * signs)).T
    volume = np.linalg.slogdet(player.shape_)[1]
    for gradient in drifting_losses(5, 500, rng=1):
        updates = player.n_updates_
        w = player.select()
        assert np.max(np.abs(axes.T @ (w - center)) - half) <= 1e-12
        if player.n_updates_ > updates:
            offsets = (vertices - player.center_).T
            assert (
                np.sum(offsets * np.linalg.solve(player.shape_, offsets), axis=0).max() <= 1 + 1e-9
            )
            shrunk = np.linalg.slogdet(player.shape_)[1]
            assert shrunk - volume <= -(player.n_updates_ - updates) / 20 + 1e-9
            volume = shrunk
        player.update(gradient)
    assert 0 < player.n_updates_ <= 8 * 25 * math.log(1.2 / half.min())


def naive_rounds(oracle, half, center, losses, eta, beta):
    """Play the specification's formulas in original coordinates, one cut a round."""
    d = len(half)
    c, H = np.zeros(d), 1.2**2 * np.eye(d)
    u, Sigma = c.copy(), beta * np.eye(d)
    checked = CheckedOracle(oracle, center, 1e-9)

    def nearest(z, c, H, Sigma):
        L = np.linalg.cholesky(H)
        m, V = np.linalg.eigh(L.T @ Sigma @ L)
        y = np.linalg.solve(L, z - c)
        if y @ y <= 1:
            return z
        low, high = 0.0, 1.0
        along = m * (V.T @ y)
        while np.linalg.norm(along / (m + high)) > 1:
            high *= 2
        for _ in range(200):
            nu = (low + high) / 2
            low, high = (nu, high) if np.linalg.norm(along / (m + nu)) > 1 else (low, nu)
        return c + L @ (V @ (along / (m + high)))

    points = []
    for g in losses:
        L = np.linalg.cholesky(H)
        gauge = gauge_distance(checked, c, L, np.linalg.solve(L, u - c), 1e-8)
        if gauge.thin:
            points.append(center)
            s = np.linalg.solve(L.T, gauge.subgradient)
            Hs, length = H @ s, np.sqrt(s @ H @ s)
            c = c - Hs / length / (2 * d + 2)
            factor = (4 * d**2 - 1) / (4 * d**2 - 4)
            H = factor * (H - 2 * d / (2 * d**2 + d - 1) * np.outer(Hs, Hs) / length**2)
            u = nearest(u, c, H, Sigma)
            continue
        w = c + (u - c) / (1 + gauge.excess)
        points.append(w)
        fed = g.copy()
        if gauge.subgradient is not None and g @ (u - c) < 0:
            fed -= (g @ (w - c)) * np.linalg.solve(L.T, gauge.subgradient)
        Sigma = Sigma + eta * np.outer(fed, fed)
        u = nearest(u - np.linalg.solve(Sigma, fed), c, H, Sigma)
    return np.array(points), c, H, Sigma


@pytest.mark.parametrize("kappa", [1.0, 20.0])
def test_rounds_are_those_of_the_formulas(kappa):
    oracle, half, _, center = rotated_box(kappa=kappa)
    losses = drifting_losses(5, 150, rng=0)
    player = player_of(oracle, half, center, eta=0.05, beta=0.3, cuts_per_round=1)
    points = play(player, losses)
    expected, c, H, Sigma = naive_rounds(oracle, half, center, losses, 0.05, 0.3)
    np.testing.assert_allclose(points, expected, atol=1e-6)
    np.testing.assert_allclose(player.center_, c, atol=1e-8)
    np.testing.assert_allclose(player.shape_, H, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(player.metric_, Sigma, rtol=1e-5, atol=1e-6)


def test_a_ball_is_never_cut():
    center = np.zeros(3)
    oracle = SeparationOracle.ball(center, 1.0)
    losses = drifting_losses(3, 300, rng=2)
    options = {"radius": 1.0, "inner_radius": 1.0, "feasible_point": center, "horizon": 300}
    player = EllipsoidOCO(oracle, 3, **options)
    points = play(player, losses)
    assert player.n_updates_ == 0
    fixed = EllipsoidOCO(oracle, 3, update_ellipsoid=False, **options)
    np.testing.assert_array_equal(play(fixed, losses), points)


def test_steps_are_those_of_the_theory():
    options = {"radius": 2.0, "inner_radius": 0.5, "feasible_point": np.zeros(2), "lipschitz": 3.0}
    oracle = SeparationOracle.ball(np.zeros(2), 1.5)
    rate = math.sqrt(2 * math.log(4 * 10**6) / 10**6) / 6
    long = EllipsoidOCO(oracle, 2, horizon=10**6, eta="theory", beta="theory", **options)
    assert long._eta == pytest.approx(rate)
    np.testing.assert_allclose(long.metric_, rate * 9 * np.eye(2))
    short = EllipsoidOCO(oracle, 2, horizon=10, eta="theory", **options)
    assert short._eta == pytest.approx(1 / (10 * 2 * 6))
    auto = EllipsoidOCO(oracle, 2, horizon=10, **options)
    assert auto._eta == pytest.approx(1 / (2 * 2 * 6))
    np.testing.assert_allclose(auto.metric_, np.eye(2) / (auto._eta * 4))


def test_regret_stays_where_the_set_gets_thin():
    regrets = []
    for kappa in (1.0, 1e4):
        total = 0.0
        for seed in range(3):
            ellipsoid = thin_ellipsoid(5, kappa, rng=seed)
            losses = drifting_losses(5, 1000, rng=seed + 100)
            player = EllipsoidOCO(
                SeparationOracle.ellipsoid(ellipsoid.shape, np.zeros(5)),
                5,
                radius=2.0,
                inner_radius=1 / kappa,
                feasible_point=ellipsoid.start,
                horizon=1000,
            )
            paid = np.sum(play(player, losses) * losses)
            total += paid - losses.sum(axis=0) @ ellipsoid.argmin(losses.sum(axis=0))
        regrets.append(total)
    assert regrets[1] <= 2 * regrets[0]


def test_more_cuts_a_round_spend_fewer_rounds_on_shrinking():
    oracle, half, _, center = rotated_box(kappa=300.0)
    spent = []
    for cuts in (1, 8, None):
        player = player_of(oracle, half, center, cuts_per_round=cuts)
        shrinking = 0
        for gradient in drifting_losses(5, 300, rng=0):
            player.select()
            shrinking += player.is_shrinking_
            player.update(gradient)
        spent.append(shrinking)
    assert spent[0] > 4 * spent[1] > 0
    assert spent[2] == 0


def test_without_a_horizon_the_metric_starts_over_and_the_ellipsoid_stays():
    oracle, half, _, center = rotated_box()
    player = player_of(oracle, half, center, horizon=None)
    losses = drifting_losses(5, 128, rng=0)
    etas = [player._eta]
    for round_, gradient in enumerate(losses, start=1):
        cuts = player.n_updates_
        player.select()
        player.update(gradient)
        if round_ in (64, 128):
            etas.append(player._eta)
            L = player._ellipsoid.L
            np.testing.assert_allclose(player._metric, L.T @ L / (player._eta * 1.2**2))
            assert player.n_updates_ >= cuts > 0
    assert etas[0] == etas[1] >= etas[2]


def test_same_rounds_same_plays_and_state_goes_on_bit_for_bit():
    oracle, half, _, center = rotated_box()
    losses = drifting_losses(5, 200, rng=0)
    whole = play(player_of(oracle, half, center, horizon=None), losses)
    player = player_of(oracle, half, center, horizon=None)
    play(player, losses[:90])
    state = player.get_state()
    other = player_of(oracle, half, center, horizon=None)
    other.set_state(copy.deepcopy(state))
    np.testing.assert_array_equal(play(other, losses[90:]), whole[90:])
    play(player, losses[90:])
    assert other.n_oracle_calls_ == player.n_oracle_calls_


def test_long_gradients_are_refused_or_rescaled():
    oracle, half, _, center = rotated_box()
    player = player_of(oracle, half, center)
    player.select()
    with pytest.raises(ValueError, match=r"grad must have length at most lipschitz = 1, got 2"):
        player.update([2.0, 0, 0, 0, 0])
    player.update([1.0, 0, 0, 0, 0])  # the round is still open
    rescaled = player_of(oracle, half, center, on_large_grad="rescale")
    rescaled.select()
    rescaled.update([2.0, 0, 0, 0, 0])
    np.testing.assert_array_equal(rescaled._metric, player._metric)


# Bad input


OPTIONS = {"radius": 2.0, "inner_radius": 0.1, "feasible_point": [0.0, 0.0], "horizon": 10}
DISC = SeparationOracle.ball([0.0, 0.0], 1.0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"radius": -1.0}, ValueError, "radius must be"),
        ({"inner_radius": 3.0}, ValueError, "inner_radius must be"),
        ({"inner_radius": 0.0}, ValueError, "inner_radius must be"),
        ({"lipschitz": math.nan}, ValueError, "lipschitz must be"),
        ({"horizon": 0}, ValueError, "horizon must be"),
        ({"eta": "fast"}, ValueError, "eta must be one of 'auto', 'theory'"),
        ({"beta": 0.0}, ValueError, "beta must be"),
        ({"gauge_tol": 1.0}, ValueError, "gauge_tol must be"),
        ({"cuts_per_round": 0}, ValueError, "cuts_per_round must be"),
        ({"feasible_point": [2.0, 0.0]}, ValueError, "feasible_point must be inside"),
        ({"feasible_point": [math.inf, 0.0]}, ValueError, "feasible_point must be finite"),
        ({"center": [0.0]}, ValueError, "center must have shape"),
        ({"center": [5.0, 0.0]}, ValueError, "radius must be that of a ball"),
        (
            {"center": [1.5, 0.0], "update_ellipsoid": False},
            ValueError,
            "center must be in the set",
        ),
        ({"on_large_grad": "clip"}, ValueError, "on_large_grad must be one of"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        EllipsoidOCO(DISC, 2, **{**OPTIONS, **options})


def test_bad_dimension_and_oracle():
    with pytest.raises(ValueError, match="dim must be at least 2, got 1"):
        EllipsoidOCO(DISC, 1, **OPTIONS)
    with pytest.raises(TypeError, match="separation must be callable"):
        EllipsoidOCO([1.0], 2, **OPTIONS)
    with pytest.raises(TypeError, match=r"separation must return a pair \(inside, v\), got True"):
        EllipsoidOCO(lambda u: True, 2, **OPTIONS)


@pytest.mark.parametrize("v", [[0.0, 0.0], [math.nan, 1.0], [1.0], None])
def test_a_cut_must_be_a_vector(v):
    def broken(u):
        return (np.linalg.norm(u) <= 1, v)

    player = EllipsoidOCO(broken, 2, **OPTIONS)
    player._x = np.array([0.9, 0.0])
    with pytest.raises(ValueError, match="separation must return a finite vector v of shape"):
        player.select()


def test_a_cut_must_keep_the_feasible_point():
    player = EllipsoidOCO(lambda u: (np.linalg.norm(u) <= 1, -u), 2, **OPTIONS)
    player._x = np.array([0.9, 0.0])
    with pytest.raises(ValueError, match="it cuts off the feasible point"):
        player.select()


def test_rounds_must_alternate():
    player = EllipsoidOCO(DISC, 2, **OPTIONS)
    with pytest.raises(RuntimeError, match="update was called before select"):
        player.update([0.0, 0.0])
    player.select()
    with pytest.raises(RuntimeError, match="select was called twice"):
        player.select()
    with pytest.raises(RuntimeError, match="get_state was called within a round"):
        player.get_state()
    with pytest.raises(ValueError, match="grad must be finite"):
        player.update([math.nan, 0.0])
    with pytest.raises(ValueError, match=r"grad must have shape \(2,\)"):
        player.update([0.0])


def test_a_state_must_be_whole():
    player = EllipsoidOCO(DISC, 2, **OPTIONS)
    state = player.get_state()
    with pytest.raises(ValueError, match=r"it lacks \['metric'\]"):
        player.set_state({name: value for name, value in state.items() if name != "metric"})
    with pytest.raises(ValueError, match=r"state\['x'\] must be finite"):
        player.set_state({**state, "x": [math.nan, 0.0]})


def test_too_large_an_inner_radius_is_noticed():
    needle = SeparationOracle.box([-1.0, -1e-4], [1.0, 1e-4])
    player = EllipsoidOCO(
        needle, 2, radius=1.5, inner_radius=1.0, feasible_point=[0.0, 0.0], horizon=500
    )
    with pytest.warns(RuntimeWarning, match="inner_radius=1 is too large"):
        play(player, drifting_losses(2, 500, rng=0))


def test_a_set_without_interior_is_noticed():
    line = SeparationOracle.box([-1.0, -1e-12], [1.0, 1e-12])
    player = EllipsoidOCO(
        line, 2, radius=1.5, inner_radius=1e-12, feasible_point=[0.0, 0.0], horizon=500
    )
    with pytest.raises(ValueError, match="must describe a set with an interior"):
        play(player, drifting_losses(2, 500, rng=0))


# Minimization


@pytest.mark.parametrize(("dim", "bound"), [(2, 1.5e-2), (5, 6e-2)])
def test_average_play_minimizes_a_distance(dim, bound):
    rng = np.random.default_rng(dim)
    axes = random_rotation(dim, rng)
    half = np.where(np.arange(dim) == 0, 1.0, 0.1)
    target = 2 * axes @ np.ones(dim) / np.sqrt(dim)
    oracle = SeparationOracle.polytope(np.vstack([axes.T, -axes.T]), np.tile(half, 2))
    result = ellipsoid_minimize(
        lambda x: float(np.linalg.norm(x - target)),
        np.zeros(dim),
        jac=lambda x: (x - target) / np.linalg.norm(x - target),
        separation=oracle,
        radius=1.5,
        inner_radius=0.1,
        maxiter=2000,
    )
    best = np.linalg.norm(np.clip(axes.T @ target, -half, half) - axes.T @ target)
    assert result.success
    assert result.status == 1
    assert 0 <= result.fun - best < bound
    assert oracle(result.x)[0]
    assert result.gap >= result.fun - best


def test_scipy_runs_it_and_the_gap_ends_it():
    oracle = SeparationOracle.ball(np.zeros(3), 1.0)
    target = np.array([0.3, -0.2, 0.1])
    reports = []

    def callback(intermediate_result):
        reports.append(intermediate_result)

    result = minimize(
        lambda x: float(np.sum(np.abs(x - target))),
        np.zeros(3),
        jac=lambda x: np.sign(x - target),
        method=ellipsoid_minimize,
        callback=callback,
        tol=0.05,
        options={"separation": oracle, "radius": 1.0, "inner_radius": 1.0, "maxiter": 5000},
    )
    assert (result.status, result.success) == (0, True)
    assert result.fun <= result.gap <= 0.05
    assert reports[-1].gap > 0.05
    assert result.nit == result.njev < 5000


def test_functions_of_tensors_are_differentiated():
    options = {"separation": DISC, "radius": 1.0, "inner_radius": 1.0, "maxiter": 50}
    target = np.array([2.0, 1.0])
    of_tensors = ellipsoid_minimize(
        lambda x: (x - torch.tensor(target)).norm(), np.zeros(2), jac="torch", **options
    )
    of_arrays = ellipsoid_minimize(
        lambda x: np.linalg.norm(x - target),
        np.zeros(2),
        jac=lambda x: (x - target) / np.linalg.norm(x - target),
        **options,
    )
    np.testing.assert_allclose(of_tensors.x, of_arrays.x, atol=1e-12)
    assert of_tensors.fun == pytest.approx(of_arrays.fun)
    with pytest.raises(ValueError, match="jac must be one of 'torch'"):
        ellipsoid_minimize(np.sum, np.zeros(2), jac="2-point", **options)


def test_noisy_gradients_are_given_the_stream_and_repeat():
    oracle = SeparationOracle.box([-1.0, -0.01], [1.0, 0.01])
    options = {"separation": oracle, "radius": 1.1, "inner_radius": 0.01, "lipschitz": 10.0}

    def noisy(x, rng):
        return np.array([1.0, 1.0]) + rng.uniform(-3, 3, size=2)

    first, second = (
        ellipsoid_minimize(np.sum, np.zeros(2), jac=noisy, rng=3, maxiter=3000, **options)
        for _ in range(2)
    )
    np.testing.assert_array_equal(first.x, second.x)
    assert first.fun + 1.01 < 0.25


def test_minimization_stops_at_gradient_zero_and_on_request():
    options = {"separation": DISC, "radius": 1.0, "inner_radius": 1.0}
    done = ellipsoid_minimize(lambda x: x @ x, np.zeros(2), jac=lambda x: 2 * x, **options)
    assert (done.nit, done.gap, done.status) == (1, 0.0, 0)

    def stop(x):
        raise StopIteration

    stopped = ellipsoid_minimize(
        np.sum, np.zeros(2), jac=lambda x: np.ones(2), callback=stop, **options
    )
    assert (stopped.status, stopped.success, stopped.nit) == (99, False, 10)


def test_minimization_keeps_what_it_has_when_it_is_interrupted():
    options = {"separation": DISC, "radius": 1.0, "inner_radius": 1.0}
    calls = []

    def gradient(x):
        calls.append(x)
        if len(calls) == 25:
            raise KeyboardInterrupt
        return np.array([1.0, 0.0])

    result = ellipsoid_minimize(np.sum, np.zeros(2), jac=gradient, **options)
    assert (result.status, result.success, result.nit) == (2, False, 25)
    assert result.x[0] < -0.5


def test_rounds_that_only_shrink_return_the_feasible_point():
    needle = SeparationOracle.box([-1.0, -1e-6], [1.0, 1e-6])
    result = ellipsoid_minimize(
        np.sum,
        np.array([0.5, 0.0]),
        jac=lambda x: np.ones(2),
        separation=needle,
        center=np.array([0.0, 0.5]),
        radius=2.0,
        inner_radius=1e-6,
        maxiter=1,
    )
    np.testing.assert_array_equal(result.x, [0.5, 0.0])
    assert result.gap == math.inf


def test_minimization_refuses_bounds_and_bad_gradients():
    options = {"separation": DISC, "radius": 1.0, "inner_radius": 1.0}
    with pytest.raises(ValueError, match="bounds must be None"):
        ellipsoid_minimize(
            np.sum, np.zeros(2), jac=lambda x: np.ones(2), bounds=[(0, 1)] * 2, **options
        )
    with pytest.raises(ValueError, match=r"jac\(x\) must be finite"):
        ellipsoid_minimize(np.sum, np.zeros(2), jac=lambda x: x + math.nan, **options)
    with pytest.raises(TypeError, match="jac must be a callable"):
        ellipsoid_minimize(np.sum, np.zeros(2), jac=None, **options)
