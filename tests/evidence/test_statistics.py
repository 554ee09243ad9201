"""Effects, intervals and verdicts, on data whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from toy import growth, toy

from thalweg.evidence import Contender, Metric, at_least, at_most, between
from thalweg.evidence.statistics import (
    Interval,
    averager,
    best_peer,
    best_setting,
    interval,
    judge,
    loglog_slope,
    paired_effect,
)
from thalweg.evidence.trial import Outcome

LOWER = Metric("loss", "lower")
HIGHER = Metric("cut", "higher")
RATIO = at_most(1.0, of="peer")
DIFFERENCE = at_most(0.0, of="peer", effect="difference")


def outcomes(*values):
    return [Outcome(value) for value in values]


class TestEffect:
    def test_a_common_factor_has_an_interval_of_width_zero(self):
        peer = np.random.default_rng(0).lognormal(size=12)
        effect = paired_effect(0.5 * peer, peer, LOWER, RATIO)
        assert effect.value == pytest.approx(0.5)
        assert effect.low == pytest.approx(0.5)
        assert effect.high == pytest.approx(0.5)

    def test_pairing_removes_what_seeds_have_in_common(self):
        rng = np.random.default_rng(1)
        hard = rng.lognormal(sigma=2, size=20)
        method = hard * (0.9 + 0.01 * rng.normal(size=20))
        effect = paired_effect(method, hard, LOWER, RATIO)
        assert 0.88 < effect.low < 0.9 < effect.high < 0.92
        shuffled = paired_effect(method, rng.permutation(hard), LOWER, RATIO)
        assert shuffled.high - shuffled.low > 10 * (effect.high - effect.low)

    def test_difference(self):
        effect = paired_effect(np.full(9, 3.0), np.full(9, 5.0), LOWER, DIFFERENCE)
        assert effect == Interval(-2.0, -2.0, -2.0)

    def test_geometric_mean_is_invariant_to_inverting_the_ratio(self):
        metric = Metric("loss", "lower", average="geometric mean")
        x, y = np.random.default_rng(2).lognormal(size=(2, 15))
        forth = paired_effect(x, y, metric, RATIO).value
        back = paired_effect(y, x, metric, RATIO).value
        assert forth * back == pytest.approx(1.0)

    def test_intervals_cover_as_often_as_they_say(self):
        # 300 repetitions: the standard error of a coverage of .95 is .013; BCa with 20 seeds
        # is known to fall short by some percent.
        rng = np.random.default_rng(3)
        covered = [
            found.low <= 1.0 <= found.high
            for found in (interval(rng.normal(1.0, 1.0, size=20), LOWER) for _ in range(300))
        ]
        assert 0.88 <= np.mean(covered) <= 0.99

    def test_a_median_of_few_values_still_has_an_interval(self):
        metric = Metric("loss", "lower", average="median")
        found = interval(np.array([1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0]), metric)
        assert math.isfinite(found.low)
        assert found.low <= 1.0 <= found.high

    def test_the_same_values_give_the_same_interval(self):
        values = np.random.default_rng(4).normal(size=10)
        assert interval(values, LOWER) == interval(values, LOWER)


class TestSlope:
    def test_a_power_law_is_found_exactly(self):
        swept = [10, 100, 1000]
        values = 3.0 * np.array([swept] * 8, dtype=float) ** -0.5
        assert loglog_slope(values, swept).value == pytest.approx(-0.5, abs=1e-12)

    def test_it_is_the_least_squares_slope(self):
        rng = np.random.default_rng(5)
        swept = [1, 2, 8, 64]
        values = rng.lognormal(size=(1, 4))
        expected = np.polyfit(np.log(swept), np.log(values[0]), 1)[0]
        assert loglog_slope(values, swept).value == pytest.approx(expected)


class TestSettings:
    def test_the_lowest_or_highest_average_wins(self):
        rows = [outcomes(3, 1), outcomes(1, 2), outcomes(5, 5)]
        assert best_setting(rows, LOWER) == (1, [2.0, 1.5, 5.0])
        assert best_setting(rows, HIGHER)[0] == 2

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("metric", [LOWER, HIGHER])
    def test_a_setting_that_diverged_once_never_wins(self, metric, bad):
        rows = [outcomes(1, bad), outcomes(2, 2)]
        assert best_setting(rows, metric)[0] == 1

    def test_a_geometric_mean_of_negative_values_is_refused(self):
        with pytest.raises(ValueError, match="geometric mean needs values >= 0"):
            averager(Metric("x", "lower", average="geometric mean"))(np.array([-1.0, 1.0]))


def column(*values):
    return np.array(values, dtype=float)[:, None]


def values(method, peer, shipped=100.0, seeds=10):
    rng = np.random.default_rng(6)
    return {
        name: level * (1 + 0.02 * rng.normal(size=(seeds, 1)))
        for name, level in (("method", method), ("peer", peer), ("shipped", shipped))
    }


class TestVerdict:
    def test_holds_when_the_whole_interval_is_inside(self):
        judgement = judge(toy(), values(1.0, 2.0), [])
        assert judgement.verdict == "holds"
        assert judgement.of == "peer"
        assert judgement.effect.value == pytest.approx(0.5, abs=0.02)

    def test_fails_when_the_whole_interval_is_outside(self):
        assert judge(toy(), values(1.0, 1.0), []).verdict == "fails"

    def test_inconclusive_when_the_interval_straddles(self):
        judgement = judge(toy(), values(0.8, 1.0), [])
        assert judgement.verdict == "inconclusive"
        assert judgement.reasons == ("the interval straddles 0.8",)

    def test_the_limit_that_is_straddled_is_named(self):
        claim = toy()
        object.__setattr__(claim, "expect", between(0.5, 2.0, of="peer"))
        assert judge(claim, values(0.5, 1.0), []).reasons == ("the interval straddles 0.5",)

    def test_too_few_seeds_are_never_enough(self):
        judgement = judge(toy(), values(1.0, 2.0, seeds=7), [])
        assert judgement.verdict == "inconclusive"
        assert judgement.reasons == ("7 seeds ran, a verdict needs 8",)

    def test_doubts_prevent_a_verdict(self):
        judgement = judge(toy(), values(1.0, 2.0), [], doubts=["a doubt"])
        assert judgement.verdict == "inconclusive"
        assert judgement.reasons == ("a doubt",)

    def test_the_best_peer_is_the_strongest_on_the_evaluation_seeds(self):
        assert judge(toy(), values(1.0, 2.0, shipped=1.1), []).of == "shipped"

    def test_controls_never_are_the_best_peer(self):
        claim = toy().with_contender(Contender("cheat", control=True))
        given = values(1.0, 2.0) | {"cheat": np.full((10, 1), 0.01)}
        assert judge(claim, given, []).of == "peer"

    def test_a_diverged_method_fails(self):
        given = values(1.0, 2.0)
        given["method"][3] = math.inf
        judgement = judge(toy(), given, [])
        assert judgement.verdict == "fails"
        assert judgement.reasons == ("method diverged or failed on 1 of 10 seeds",)

    def test_a_diverged_peer_is_not_the_best_peer(self):
        given = values(1.0, 2.0, shipped=1.5)
        given["shipped"][0] = math.nan
        assert judge(toy(), given, []).of == "peer"

    def test_a_diverged_named_peer_gives_no_verdict(self):
        claim = toy()
        object.__setattr__(claim, "expect", at_most(1.0, of="peer"))
        given = values(1.0, 2.0)
        given["peer"][:2] = math.nan
        judgement = judge(claim, given, [])
        assert judgement.verdict == "inconclusive"
        assert judgement.reasons == ("peer diverged or failed on 2 of 10 seeds",)

    def test_absolute_expectations_look_at_the_method_alone(self):
        claim = toy()
        object.__setattr__(claim, "expect", at_least(0.9))
        assert judge(claim, values(1.0, 0.0), []).verdict == "holds"

    def test_trends_look_at_the_slope(self):
        swept = [10, 100, 1000]
        rng = np.random.default_rng(7)
        noise = np.exp(0.01 * rng.normal(size=(10, 3)))
        assert judge(growth, {"method": np.array(swept) * noise}, swept).verdict == "holds"
        assert judge(growth, {"method": np.array(swept) ** 2 * noise}, swept).verdict == "fails"

    def test_ties_of_best_peers_go_to_the_first(self):
        assert best_peer(toy(), {"peer": 1.0, "shipped": 1.0}) == "peer"
