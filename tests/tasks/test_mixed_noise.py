"""The noise has the tails and the mean that it says, and gradients average to the true ones."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from thalweg.tasks import MixedNoise, noisy_diabetes, noisy_quadratic


def test_the_symmetric_part_is_stable():
    x = MixedNoise(beta=0.8).sample((20_000,), np.random.default_rng(0))
    assert np.mean(x > 0) == pytest.approx(0.5, abs=0.015)
    # The sum of two is 2^{1/0.8} times as wide.
    assert np.quantile(np.abs(x[::2] + x[1::2]), 0.5) / np.quantile(np.abs(x), 0.5) == (
        pytest.approx(2**1.25, rel=0.05)
    )


def test_the_skewed_part_is_a_centered_pareto_law():
    x = MixedNoise(alpha=2.5, weight=1.0).sample((400_000,), np.random.default_rng(0))
    assert x.mean() == pytest.approx(0.0, abs=0.02)
    assert x.min() >= 1 - 2.5 / 1.5
    tail = np.mean(x + 2.5 / 1.5 > 10)
    assert tail == pytest.approx(10**-2.5, rel=0.1)


def test_the_weight_is_the_share_of_the_skewed_part():
    noise = MixedNoise(beta=2.0, alpha=1.5, weight=0.3)
    x = noise.sample((200_000,), np.random.default_rng(0))
    below = stats.norm.cdf(-2.0 / np.sqrt(2))  # only the symmetric part is below 1 - 3 = -2
    assert np.mean(x < -2.0) == pytest.approx(0.7 * below, rel=0.05)


@pytest.mark.parametrize("problem", [noisy_quadratic, noisy_diabetes])
def test_gradients_are_unbiased(problem):
    made = problem(MixedNoise(beta=2.0))
    rng = np.random.default_rng(0)
    x = made.x0 + rng.standard_normal(made.x0.shape)
    samples = made.gradients(x[None], 200_000, rng)[0]
    error = samples.std(axis=0) / 200_000**0.5
    exact = made.H @ (x - made.minimizer)
    assert (np.abs(samples.mean(axis=0) - exact) < 5 * error).all()
    h = 1e-6 * np.eye(len(x))
    differences = [(made.excess(x + e) - made.excess(x - e)) / 2e-6 for e in h]
    np.testing.assert_allclose(differences, exact, rtol=1e-6, atol=1e-8)


def test_bad_laws_are_refused():
    for settings, message in [
        ({"beta": 0.0}, "beta must be"),
        ({"alpha": 1.0}, "alpha must be a finite number > 1, got 1"),
        ({"weight": 1.5}, "weight must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            MixedNoise(**settings)
