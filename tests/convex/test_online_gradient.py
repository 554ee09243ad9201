import cvxpy as cp
import numpy as np
import pytest

from thalweg.claims.convex.ellipsoid_oco import polytope_projection, spectrahedron_projection
from thalweg.convex import GaugeOGD, OnlineFrankWolfe, ProjectedOGD, SeparationOracle
from thalweg.tasks import drifting_losses

BALL = SeparationOracle.ball(np.zeros(3), 2.0)


def project(x):
    return x / max(1.0, np.linalg.norm(x) / 2)


def play(player, losses):
    points = []
    for gradient in losses:
        points.append(player.select())
        player.update(gradient)
    return np.array(points)


def test_projected_ogd_is_the_formula():
    losses = drifting_losses(3, 60, rng=0)
    points = play(ProjectedOGD(project, np.zeros(3), radius=2.0, lipschitz=0.5, scale=3.0), losses)
    x = np.zeros(3)
    for t, gradient in enumerate(losses, start=1):
        np.testing.assert_allclose(points[t - 1], x)
        x = project(x - 3.0 * 2.0 / 0.5 / np.sqrt(t) * gradient)


def test_gauge_ogd_on_its_own_ball_is_projected_ogd():
    losses = drifting_losses(3, 60, rng=0)
    options = {"radius": 2.0, "horizon": 60, "scale": 5.0}
    # A point on the boundary must not count as outside by rounding.
    ball = SeparationOracle.ball(np.zeros(3), 2.0 + 1e-9)
    gauge = GaugeOGD(ball, np.zeros(3), **options)
    np.testing.assert_allclose(
        play(gauge, losses), play(ProjectedOGD(project, np.zeros(3), **options), losses), atol=1e-12
    )


def test_gauge_ogd_follows_the_reduction_on_a_thin_set():
    half = np.array([1.0, 0.1, 0.05])
    oracle = SeparationOracle.box(-half, half)
    player = GaugeOGD(oracle, np.zeros(3), radius=1.5, horizon=50, scale=2.0)
    u = np.zeros(3)
    for gradient in drifting_losses(3, 50, rng=1):
        gamma = max(1.0, np.max(np.abs(u) / half))
        w = player.select()
        np.testing.assert_allclose(w, u / gamma, atol=1e-7)
        fed = gradient.copy()
        if gamma > 1 and gradient @ u < 0:
            side = np.argmax(np.abs(u) / half)
            s = np.zeros(3)
            s[side] = np.sign(u[side]) / half[side]
            fed -= gradient @ w * s
        player.update(gradient)
        u = u - 2.0 * 1.5 / np.sqrt(50) * fed
        u /= max(1.0, np.linalg.norm(u) / 1.5)
    assert player.n_oracle_calls_ > 50


def test_frank_wolfe_stays_inside_and_learns():
    losses = drifting_losses(3, 2000, rng=0)

    def argmin(g):
        return -2 * g / np.linalg.norm(g)

    player = OnlineFrankWolfe(argmin, np.zeros(3), radius=2.0, horizon=2000)
    points = play(player, losses)
    assert np.linalg.norm(points, axis=1).max() <= 2 + 1e-12
    total = losses.sum(axis=0)
    regret = np.sum(points * losses) + 2 * np.linalg.norm(total)
    assert regret < 0.7 * 2 * np.linalg.norm(total)


@pytest.mark.parametrize("name", ["radius", "lipschitz", "scale"])
def test_bad_steps(name):
    for make in (
        lambda options: ProjectedOGD(project, np.zeros(3), **options),
        lambda options: GaugeOGD(BALL, np.zeros(3), **options),
        lambda options: OnlineFrankWolfe(np.sign, np.zeros(3), **options),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a finite number > 0, got -1"):
            make({"radius": 2.0, name: -1.0})


def test_bad_gradients_and_centers():
    with pytest.raises(ValueError, match="feasible_point must be inside"):
        GaugeOGD(BALL, [3.0, 0.0, 0.0], radius=2.0)
    for player in (
        ProjectedOGD(project, np.zeros(3), radius=2.0),
        GaugeOGD(BALL, np.zeros(3), radius=2.0),
        OnlineFrankWolfe(np.sign, np.zeros(3), radius=2.0),
    ):
        with pytest.raises(ValueError, match="grad must be finite"):
            player.update([np.nan, 0, 0])
        with pytest.raises(ValueError, match=r"grad must have shape \(3,\)"):
            player.update([0.0])


def test_projections_of_the_peers_are_projections():
    rng = np.random.default_rng(0)
    A, b = rng.normal(size=(30, 4)), rng.uniform(0.5, 1, size=30)
    F = np.array([M + M.T for M in rng.normal(size=(4, 3, 3))])
    x = cp.Variable(4)
    matrix = np.eye(3) + sum(x[i] * F[i] for i in range(4))
    for project, limits in (
        (polytope_projection(A, b), [A @ x <= b]),
        (spectrahedron_projection(np.eye(3), F), [matrix >> 0]),
    ):
        point = 3 * rng.normal(size=4)
        cp.Problem(cp.Minimize(cp.norm(x - point)), limits).solve(solver=cp.CLARABEL)
        np.testing.assert_allclose(project(point), x.value, atol=1e-3)
