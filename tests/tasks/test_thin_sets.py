import cvxpy as cp
import numpy as np
import pytest

from thalweg.tasks import drifting_losses, portfolio_days, thin_ellipsoid, thin_polytope


@pytest.mark.parametrize("kappa", [1.0, 30.0])
def test_ellipsoid_projects_and_minimizes(kappa):
    ellipsoid = thin_ellipsoid(4, kappa, rng=0)
    inverse = np.linalg.inv(ellipsoid.shape)
    rng = np.random.default_rng(1)
    for _ in range(20):
        x = 2 * rng.normal(size=4)
        nearest = ellipsoid.project(x)
        assert nearest @ inverse @ nearest <= 1 + 1e-9
        # x - Π(x) is along the normal at Π(x), unless x is inside.
        normal, rest = inverse @ nearest, x - nearest
        np.testing.assert_allclose(rest @ normal, np.linalg.norm(rest) * np.linalg.norm(normal))
        lowest = ellipsoid.argmin(x)
        assert lowest @ inverse @ lowest == pytest.approx(1)
        assert x @ lowest == pytest.approx(-np.sqrt(x @ ellipsoid.shape @ x))
    inside = 0.1 * ellipsoid.start
    np.testing.assert_array_equal(ellipsoid.project(inside), inside)
    assert ellipsoid.start @ inverse @ ellipsoid.start == pytest.approx(0.25)


def test_polytope_holds_its_ball_and_is_thin():
    polytope = thin_polytope(4, 200, 50.0, rng=0)
    x = cp.Variable(4)
    limits = [polytope.A @ x <= polytope.b]
    widths = [cp.Problem(cp.Maximize(side @ x), limits).solve() for side in np.eye(4)]
    assert max(widths) <= 2 + 1e-6
    # The ball about the ellipsoid's center, the origin.
    np.testing.assert_allclose(np.linalg.norm(polytope.A, axis=1), 1)
    assert polytope.b.min() >= polytope.inner_radius - 1e-12
    assert polytope.b.min() <= 3 / 50
    assert np.all(polytope.A @ polytope.start <= polytope.b)


def test_losses_repeat_and_drift():
    losses = drifting_losses(5, 4000, rng=3)
    np.testing.assert_array_equal(losses, drifting_losses(5, 4000, rng=3))
    assert np.linalg.norm(losses, axis=1).max() <= 1 + 1e-12
    assert 0.1 < np.linalg.norm(losses.mean(axis=0)) < 0.3


def test_portfolio_is_real_and_feasible():
    days = portfolio_days()
    assert days.growth.shape == (2013, 20)
    assert np.all((days.growth > 0.5) & (days.growth < 2))
    weights = np.full(20, 0.05)
    assert np.all(days.A @ weights <= days.b + 1e-12)
    wild = np.zeros(20)
    wild[0] = 1
    assert not np.all(days.A @ wild <= days.b)
