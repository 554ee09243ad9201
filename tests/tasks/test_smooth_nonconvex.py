"""The nonconvex functions: derivatives against differences, known minima, the octopus's joints."""

import math

import numpy as np
import pytest

from thalweg.tasks import (
    asymmetric_factorization,
    digits_covariance,
    flat_quartic,
    maxcut_lagrangian,
    octopus,
    phase_retrieval,
    symmetric_factorization,
)

RNG = np.random.default_rng(0)
SYMMETRIC = RNG.standard_normal((5, 5))
FUNCTIONS = {
    "symmetric": symmetric_factorization(SYMMETRIC + SYMMETRIC.T, 2),
    "asymmetric": asymmetric_factorization(RNG.standard_normal((3, 4)), 2, kappa=0.3),
    "phase": phase_retrieval(5, 20, RNG),
    "maxcut": maxcut_lagrangian(1 - np.eye(4), 2, 3.0, multipliers=RNG.standard_normal(4)),
    "flat": flat_quartic(),
    "octopus": octopus(4, 1.5),
}
TAU = math.e


@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_derivatives_match_central_differences(f):
    rng = np.random.default_rng(1)
    for scale in (0.5, 2.0, 6.0):
        x, v = rng.uniform(-scale, scale, f.n), rng.standard_normal(f.n)
        step = 1e-5
        slope = (f(x + step * v) - f(x - step * v)) / (2 * step)
        size = max(1.0, abs(f(x)))
        assert f.gradient(x) @ v == pytest.approx(slope, rel=1e-6, abs=1e-8 * size)
        change = (f.gradient(x + step * v) - f.gradient(x - step * v)) / (2 * step)
        np.testing.assert_allclose(f.hvp(x, v), change, rtol=1e-6, atol=1e-6 * size)


def test_the_best_factors_reach_the_minimum():
    C = digits_covariance()
    f = symmetric_factorization(C, 3)
    values, vectors = np.linalg.eigh(C)
    best = vectors[:, -3:] * np.sqrt(values[-3:])
    assert f(best.reshape(-1)) == pytest.approx(f.minimum, rel=1e-12)
    np.testing.assert_allclose(f.gradient(best.reshape(-1)), 0, atol=1e-12)


def test_negative_eigenvalues_cannot_be_fitted():
    f = symmetric_factorization(np.diag([-1.0, 2.0]), 2)
    assert f.minimum == 0.25
    assert f(np.array([0.0, 0.0, 2**0.5, 0.0])) == pytest.approx(0.25)


def test_the_asymmetric_minimum_is_the_truncated_svd():
    Y = np.random.default_rng(2).standard_normal((3, 4))
    f = asymmetric_factorization(Y, 2)
    U, s, Vt = np.linalg.svd(Y)
    x = np.concatenate([(U[:, :2] * s[:2]).reshape(-1), Vt[:2].reshape(-1)])
    assert f(x) == pytest.approx(f.minimum)
    orbit = np.concatenate([10 * x[:6], x[6:] / 10])
    assert f(orbit) == pytest.approx(f.minimum)
    assert math.isnan(asymmetric_factorization(Y, 2, kappa=1.0).minimum)


def test_phase_retrieval_is_solved_by_its_solution_and_has_a_maximum_at_0():
    rng = np.random.default_rng(3)
    f = phase_retrieval(5, 30, rng)
    same = np.random.default_rng(3)
    same.standard_normal((30, 5))
    solution = same.standard_normal(5)
    solution /= np.linalg.norm(solution)
    assert f(solution) == pytest.approx(0, abs=1e-28)
    assert f(-solution) == pytest.approx(0, abs=1e-28)
    assert (f.gradient(np.zeros(5)) == 0).all()
    assert all(e @ f.hvp(np.zeros(5), e) < 0 for e in np.eye(5))


def test_the_lagrangian_of_a_feasible_point_is_the_cut():
    weights = np.array([[0.0, 1, 1], [1, 0, 0], [1, 0, 0]])
    f = maxcut_lagrangian(weights, 1, penalty=1.0)
    # The cut {0} against {1, 2} has weight 2; -⟨C, vvᵀ⟩/2 is minus half of it.
    assert f(np.array([1.0, -1, -1])) == pytest.approx(-1)


@pytest.mark.parametrize("L", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("joint", [TAU, 2 * TAU])
def test_the_octopus_is_continuous_where_its_pieces_meet(L, joint):
    f = octopus(3, L)
    below, above = np.array([joint - 1e-9, 0.3, 0.2]), np.array([joint + 1e-9, 0.3, 0.2])
    assert f(above) == pytest.approx(f(below), abs=1e-6)
    np.testing.assert_allclose(f.gradient(above), f.gradient(below), atol=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_the_octopus_has_its_minima_at_four_tau_and_saddle_points_before(n):
    f = octopus(n, 2.0)
    x = np.full(n, 4 * TAU) * np.where(np.arange(n) % 2, -1, 1)
    assert f(x) == pytest.approx(f.minimum, rel=1e-14)
    np.testing.assert_allclose(f.gradient(x), 0, atol=1e-12)
    for i in range(n):
        saddle = np.where(np.arange(n) < i, 4 * TAU, 0.0)
        np.testing.assert_allclose(f.gradient(saddle), 0, atol=1e-12)
        downwards = np.eye(n)[i]
        assert downwards @ f.hvp(saddle, downwards) == -2
        assert f(saddle) > f.minimum


def test_the_octopus_is_even():
    f = octopus(4, 1.5)
    x = np.random.default_rng(4).uniform(0, 12, 4)
    signs = np.array([1, -1, -1, 1])
    assert f(signs * x) == f(x)
    np.testing.assert_array_equal(f.gradient(signs * x), signs * f.gradient(x))


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="matrix must have shape"):
        symmetric_factorization(np.zeros(3), 1)
    with pytest.raises(ValueError, match="matrix must be symmetric"):
        symmetric_factorization(np.arange(4.0).reshape(2, 2), 1)
    with pytest.raises(ValueError, match="rank must be an integer >= 1 and <= 2"):
        symmetric_factorization(np.eye(2), 3)
    with pytest.raises(ValueError, match="kappa must be a finite number >= 0"):
        asymmetric_factorization(np.eye(2), 1, kappa=-1.0)
    with pytest.raises(ValueError, match="L must be a finite number >= 1"):
        octopus(3, 0.5)
    with pytest.raises(ValueError, match="penalty must be a finite number > 0"):
        maxcut_lagrangian(np.eye(2), 1, penalty=0.0)
