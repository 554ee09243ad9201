"""From the outcomes of trials to a verdict: averages, paired effects, intervals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from thalweg.evidence.claim import BEST_PEER, Claim, Expectation, Metric
from thalweg.evidence.trial import Outcome

Verdict = Literal["holds", "fails", "inconclusive"]
Values = NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 9_999
MIN_SEEDS = 8  # below this a bootstrap interval covers far less than it says


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def within(self, expect: Expectation) -> bool:
        """Whether the whole interval lies in the expected range."""
        return self.low >= expect.low and self.high <= expect.high

    def outside(self, expect: Expectation) -> bool:
        """Whether the whole interval lies outside the expected range."""
        return self.high < expect.low or self.low > expect.high


def averager(metric: Metric) -> Callable[..., Any]:
    """Return the function that turns values along ``axis`` into the metric's average."""
    averages: dict[str, Callable[..., Any]] = {
        "mean": np.mean,
        "geometric mean": _geometric_mean,
        "median": np.median,
    }
    return averages[metric.average]


def _geometric_mean(values: Values, axis: int = -1) -> Any:
    if np.any(values < 0):
        raise ValueError("a geometric mean needs values >= 0: choose another average")
    with np.errstate(divide="ignore"):
        return np.exp(np.mean(np.log(values), axis=axis))


def interval(values: Values, metric: Metric) -> Interval:
    """Return the metric's average of ``values`` (n,) with its bootstrap interval."""
    average = averager(metric)
    return _bootstrap((values,), lambda x, axis=-1: average(x, axis=axis))


def paired_effect(method: Values, peer: Values, metric: Metric, expect: Expectation) -> Interval:
    """Return the ratio (or difference) of the averages, resampling the seeds in pairs.

    Parameters
    ----------
    method, peer : ndarray of shape (n,)
        Values on the same seeds, in the same order.
    """
    average = averager(metric)

    def ratio(x: Values, y: Values, axis: int = -1) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return average(x, axis=axis) / average(y, axis=axis)

    def difference(x: Values, y: Values, axis: int = -1) -> Any:
        return average(x, axis=axis) - average(y, axis=axis)

    return _bootstrap((method, peer), difference if expect.effect == "difference" else ratio)


def loglog_slope(values: Values, swept: Sequence[float]) -> Interval:
    """Return the least-squares slope of log(values) over log(swept).

    Parameters
    ----------
    values : ndarray of shape (n, len(swept))
        Positive; one row per seed.
    """
    x = np.log(np.asarray(swept, dtype=np.float64))
    x = x - x.mean()
    slopes = np.log(values) @ x / (x @ x)
    return _bootstrap((slopes,), lambda s, axis=-1: np.mean(s, axis=axis))


def _bootstrap(samples: tuple[Values, ...], statistic: Callable[..., Any]) -> Interval:
    value = float(statistic(*samples))
    n = samples[0].shape[-1]
    constant = all(np.ptp(sample) == 0 for sample in samples)
    if n < 2 or constant or not math.isfinite(value):
        return Interval(value, value, value)
    # BCa where its acceleration is defined; where the jackknife is degenerate (a ratio that is
    # the same on every seed, a median of few values) SciPy returns NaN and the percentile
    # interval stands in.
    for method in ("BCa", "percentile"):
        with np.errstate(all="ignore"), _ignore_degenerate():
            found = stats.bootstrap(
                samples,
                statistic,
                paired=True,
                vectorized=True,
                axis=-1,
                n_resamples=RESAMPLES,
                confidence_level=CONFIDENCE,
                method=method,
                rng=np.random.default_rng(0),
            ).confidence_interval
        low, high = float(found.low), float(found.high)
        if math.isfinite(low) and math.isfinite(high):
            return Interval(value, low, high)
    return Interval(value, value, value)


def _ignore_degenerate() -> Any:
    return warnings.catch_warnings(action="ignore", category=stats.DegenerateDataWarning)


def best_setting(outcomes: Sequence[Sequence[Outcome]], metric: Metric) -> tuple[int, list[float]]:
    """Return the index of the best setting and the average of each.

    Parameters
    ----------
    outcomes : sequence over settings of sequences over tuning seeds
        A setting with a failed or diverged trial counts as the worst possible.
    """
    worst = math.inf if metric.better == "lower" else -math.inf
    averages = []
    for of_setting in outcomes:
        values = np.array([outcome.value for outcome in of_setting])
        sound = len(values) > 0 and bool(np.all(np.isfinite(values)))
        averages.append(float(averager(metric)(values)) if sound else worst)
    pick = min if metric.better == "lower" else max
    return averages.index(pick(averages)), averages


def best_peer(claim: Claim, averages: Mapping[str, float]) -> str:
    """Return the peer with the best average on the evaluation seeds.

    Choosing it there, and not on the tuning seeds, can only favor the peers.
    """
    pick = min if claim.metric.better == "lower" else max
    return pick((peer.name for peer in claim.peers), key=lambda name: averages[name])


@dataclass(frozen=True)
class Judgement:
    """The verdict on a claim, the effect that it rests on, and why it is not more definite."""

    verdict: Verdict
    effect: Interval | None
    of: str | None
    reasons: tuple[str, ...]


def judge(
    claim: Claim,
    values: Mapping[str, Values],
    swept: Sequence[float],
    *,
    doubts: Sequence[str] = (),
) -> Judgement:
    """Return the verdict.

    Parameters
    ----------
    values : mapping of contender name to ndarray of shape (seeds, max(1, len(swept)))
    swept : sequence of float
        The values of the swept parameter; empty without a sweep.
    doubts : sequence of str
        Reasons, found elsewhere, for which no verdict can be given.

    Notes
    -----
    ``holds`` when the whole interval of the effect lies in the expected range, ``fails`` when it
    lies outside (or the method itself diverged), ``inconclusive`` when it straddles a limit, when
    fewer than 8 seeds ran, when a peer diverged, or for one of the ``doubts``.
    """
    expect = claim.expect
    method = values[claim.subject.name]
    if not np.all(np.isfinite(method)):
        count = int(np.sum(~np.all(np.isfinite(method), axis=1)))
        reason = f"{claim.subject.name} diverged or failed on {count} of {len(method)} seeds"
        return Judgement("inconclusive" if doubts else "fails", None, None, (reason, *doubts))
    reasons = list(doubts)
    if len(method) < MIN_SEEDS:
        reasons.append(f"{len(method)} seeds ran, a verdict needs {MIN_SEEDS}")

    of = expect.of
    if expect.effect == "slope":
        effect = loglog_slope(method, swept)
    elif of is None:
        effect = interval(method.mean(axis=1), claim.metric)
    else:
        means = {name: array.mean(axis=1) for name, array in values.items()}
        if of == BEST_PEER:
            average = averager(claim.metric)
            of = best_peer(
                claim, {name: _rank(average(m), claim.metric) for name, m in means.items()}
            )
        if not np.all(np.isfinite(means[of])):
            count = int(np.sum(~np.isfinite(means[of])))
            reasons.append(f"{of} diverged or failed on {count} of {len(method)} seeds")
            return Judgement("inconclusive", None, of, tuple(reasons))
        effect = paired_effect(means[claim.subject.name], means[of], claim.metric, expect)

    if reasons:
        return Judgement("inconclusive", effect, of, tuple(reasons))
    if effect.within(expect):
        return Judgement("holds", effect, of, ())
    if effect.outside(expect):
        return Judgement("fails", effect, of, ())
    limit = expect.high if effect.low <= expect.high < effect.high else expect.low
    return Judgement("inconclusive", effect, of, (f"the interval straddles {limit:g}",))


def _rank(value: float, metric: Metric) -> float:
    """Return ``value``, with NaN as the worst possible."""
    if math.isnan(value):
        return math.inf if metric.better == "lower" else -math.inf
    return float(value)
