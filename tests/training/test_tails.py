"""The estimators of tails against laws whose tails are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from thalweg.training import hill_index, quantile_skewness, tail_index
from thalweg.training.tails import tail_index_by_column


def stable(alpha, shape, seed=0):
    return stats.levy_stable.rvs(alpha, 0.0, size=shape, random_state=seed)


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0])
def test_the_tail_index_of_stable_laws(alpha):
    noise = stable(alpha, (10_000, 50))
    estimate = tail_index(noise, rng=0)
    assert estimate.value == pytest.approx(alpha, abs=0.1)
    assert estimate.low <= estimate.value <= estimate.high


def test_the_interval_covers_the_index_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        noise = np.random.default_rng(seed).standard_cauchy((256, 20))
        estimate = tail_index(noise, rng=seed)
        covered += estimate.low <= 1.0 <= estimate.high
    # 190 are expected; 177 is three standard deviations of the count below 95 %, less the bias
    # of means over 16 blocks.
    assert covered >= 177


def test_the_tail_index_ignores_the_scale():
    noise = stable(1.3, (400, 3))
    assert tail_index(1e150 * noise, rng=1) == pytest.approx(tail_index(noise, rng=1), rel=1e-9)


def test_one_coordinate_is_a_sample_too():
    noise = np.random.default_rng(0).standard_cauchy(10_000)
    assert tail_index(noise, rng=0) == tail_index(noise[:, None], rng=0)
    assert tail_index(noise, rng=0).value == pytest.approx(1.0, abs=0.15)


def test_columns_are_estimated_as_one_by_one():
    noise = stable(1.3, (400, 5))
    noise[:, 3] = 0
    noise[:100, 4] = 0
    found = tail_index_by_column(noise, np.random.default_rng(2))
    first = tail_index(noise[:, 0], rng=np.random.default_rng(2)).value
    assert found[0] == pytest.approx(first, rel=1e-9)
    assert math.isnan(found[3])
    assert found[:3] == pytest.approx(1.3, abs=0.5)
    assert 0.6 < found[4] <= 2


def test_the_tail_index_is_reproducible_and_depends_on_the_deal():
    noise = stable(1.5, (300, 4))
    assert tail_index(noise, rng=3) == tail_index(noise, rng=3)
    assert tail_index(noise, rng=3) != tail_index(noise, rng=4)


@pytest.mark.parametrize("exponent", [1.0, 2.5, 4.0])
def test_hills_interval_covers_the_exponent_of_a_power_law(exponent):
    covered = 0
    for seed in range(200):
        sizes = 1 + np.random.default_rng(seed).pareto(exponent, 2_000)
        estimate = hill_index(sizes)
        covered += estimate.low <= exponent <= estimate.high
    assert 180 <= covered <= 200  # 190 ± 3 standard deviations


def test_hills_index_of_a_light_tail_is_large():
    assert hill_index(np.random.default_rng(0).exponential(size=20_000)).value > 3
    assert hill_index(np.ones(100)).value == math.inf


def test_the_skewness_of_exponential_coordinates_is_that_of_their_quantiles():
    low, median, high = stats.expon.ppf([0.05, 0.5, 0.95])
    exact = (high + low - 2 * median) / (high - low)
    samples = np.random.default_rng(0).exponential(size=(8_000, 30))
    estimate = quantile_skewness(samples)
    assert estimate.value == pytest.approx(exact, abs=0.02)
    assert estimate.low < exact < estimate.high


def test_the_sign_of_the_skew_does_not_matter():
    samples = np.random.default_rng(0).exponential(size=(2_000, 30))
    signs = np.random.default_rng(1).choice([-1, 1], 30)
    mirrored = quantile_skewness(samples * signs)
    assert mirrored == pytest.approx(quantile_skewness(samples), rel=1e-12)


def test_symmetric_noise_is_seldom_called_skewed():
    """Kelley's coefficient itself is about 0.1 here, from the error of the quantiles."""
    wrong = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).standard_t(2, size=(512, 20))
        wrong += quantile_skewness(noise).low > 0
    assert wrong <= 8


def test_constant_coordinates_are_symmetric():
    assert quantile_skewness(np.ones((100, 3))) == (0.0, 0.0, 0.0)


def test_an_interval_prints_itself():
    assert str(tail_index(np.ones((64, 2)), rng=0)) == "1 (1 to 1)"


@pytest.mark.parametrize("function", [tail_index, quantile_skewness])
def test_bad_samples_are_refused(function):
    with pytest.raises(ValueError, match="samples must hold at least 64 nonzero samples, got 63"):
        function(np.ones((63, 2)))
    with pytest.raises(ValueError, match=r"samples must be finite, got nan at samples\[1, 0\]"):
        function(np.array([[1.0], [math.nan]]))
    with pytest.raises(ValueError, match="confidence must be a finite number > 0 and < 1, got 1"):
        function(np.ones((100, 2)), confidence=1.0)


def test_zero_samples_do_not_count():
    noise = stable(1.5, (300, 4))
    with_zeros = np.concatenate([noise, np.zeros((50, 4))])
    assert tail_index(with_zeros, rng=3) == tail_index(noise, rng=3)
    with pytest.raises(ValueError, match="at least 64 nonzero samples, got 0"):
        tail_index(np.zeros((100, 2)))


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="sizes must be >= 0, got -1"):
        hill_index(np.array([-1.0] * 100))
    with pytest.raises(ValueError, match="sizes must hold at least 64 nonzero samples, got 3"):
        hill_index([1.0, 2.0, 3.0])
