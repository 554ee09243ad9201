"""The record of a checked claim: plain data that the database, JSON files and the report hold."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.evidence.claim import Claim, Contender, Metric, Scale
from thalweg.evidence.machine import machine, versions
from thalweg.evidence.statistics import (
    CONFIDENCE,
    Interval,
    averager,
    best_setting,
    interval,
    judge,
    paired_effect,
)
from thalweg.evidence.trial import Outcome


@dataclass(frozen=True)
class Tuning:
    """What tuning a contender gave: the average of each setting and the index of the best."""

    settings: Sequence[Mapping[str, Any]]
    averages: Sequence[float]
    best: int
    trials: int

    @classmethod
    def of(
        cls, contender: Contender, outcomes: Sequence[Sequence[Outcome]], metric: Metric
    ) -> Tuning:
        """Return the tuning that ``outcomes``, one row per setting, amounts to."""
        settings = contender.settings()
        if len(settings) == 1:
            return cls(settings, [], 0, 0)
        best, averages = best_setting(outcomes, metric)
        return cls(settings, averages, best, sum(map(len, outcomes)))

    @property
    def setting(self) -> Mapping[str, Any]:
        """The best setting."""
        return self.settings[self.best]


def build_result(
    claim: Claim,
    scale_name: str,
    scale: Scale,
    seed_offset: int,
    tunings: Mapping[str, Tuning],
    outcomes: Mapping[str, Sequence[Sequence[Outcome]]],
) -> dict[str, Any]:
    """Return the record of a claim.

    Parameters
    ----------
    tunings : mapping of contender name to Tuning
    outcomes : mapping of contender name to outcomes, one row per seed, one column per swept value
    """
    swept = _swept(scale)
    values = {
        name: np.array([[outcome.value for outcome in row] for row in rows], dtype=np.float64)
        for name, rows in outcomes.items()
    }
    failures = _failures(outcomes)
    doubts = _doubts(claim, scale_name, tunings, failures)
    judgement = judge(claim, values, swept, doubts=doubts)
    contenders = [
        _contender(claim, contender, tunings[contender.name], outcomes[contender.name], values)
        for contender in claim.contenders
    ]
    record = {
        "claim": claim.id,
        "method": claim.method,
        "name": claim.name,
        "headline": claim.headline,
        "statement": claim.statement,
        "description": claim.description,
        "metric": {
            "name": claim.metric.name,
            "unit": claim.metric.unit,
            "better": claim.metric.better,
            "average": claim.metric.average,
            "curve": claim.metric.curve,
        },
        "expectation": {
            "text": str(claim.expect),
            "low": claim.expect.low,
            "high": claim.expect.high,
            "effect": claim.expect.effect,
        },
        "scale": scale_name,
        "parameters": dict(scale.parameters),
        "tuning_parameters": dict(scale.tuning),
        "sweep": {name: list(points) for name, points in scale.sweep.items()},
        "seeds": scale.seeds,
        "seed_offset": seed_offset,
        "verdict": judgement.verdict,
        "reasons": list(judgement.reasons),
        "of": judgement.of,
        "effect": _interval(judgement.effect),
        "confidence": CONFIDENCE,
        "contenders": contenders,
        "failures": failures,
        "seconds": sum(c["seconds_total"] for c in contenders),
        "versions": versions(),
        "machine": machine(),
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return _strict(record)  # type: ignore[no-any-return]


def summarize(record: Mapping[str, Any]) -> str:
    """Return the effect in words: ``0.41 of OFUL (0.38 to 0.45)``."""
    effect, of = record["effect"], record["of"]
    if effect is None:
        return "no effect: see the reasons"
    numbers = f"{effect['value']:.3g} ({effect['low']:.3g} to {effect['high']:.3g})"
    return f"{numbers} of {of}" if of else numbers


def merge_evidence(folder: Path, record: Mapping[str, Any]) -> Path:
    """Put ``record`` into ``<folder>/<method>.json``, in place of an older one of its scale.

    Returns
    -------
    pathlib.Path
        The file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['method']}.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    kept = [
        old for old in records if (old["claim"], old["scale"]) != (record["claim"], record["scale"])
    ]
    kept.append(dict(record))
    kept.sort(key=lambda r: (not r["headline"], r["claim"], r["scale"] != "full"))
    partial = path.with_suffix(".json.partial")
    partial.write_text(
        json.dumps(kept, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    partial.replace(path)
    return path


def _doubts(
    claim: Claim, scale_name: str, tunings: Mapping[str, Tuning], failures: Sequence[str]
) -> list[str]:
    doubts = []
    if scale_name == "smoke":
        doubts.append("the smoke scale only shows that the claim runs")
    for contender in claim.contenders:
        tuning = tunings[contender.name]
        doubts += [
            f"{contender.name} is best at {name}={tuning.setting[name]:g}, the end of its grid"
            for name in contender.edges(tuning.setting)
        ]
        if tuning.averages and not math.isfinite(tuning.averages[tuning.best]):
            doubts.append(f"{contender.name} failed or diverged at every setting of its grid")
    if failures:
        doubts.append(f"{len(failures)} trials failed: {failures[0]}")
    return doubts


def _failures(outcomes: Mapping[str, Sequence[Sequence[Outcome]]]) -> list[str]:
    return [
        f"{name}: {outcome.error}"
        for name, rows in outcomes.items()
        for row in rows
        for outcome in row
        if outcome.error is not None
    ]


def _contender(
    claim: Claim,
    contender: Contender,
    tuning: Tuning,
    rows: Sequence[Sequence[Outcome]],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    mine = values[contender.name].mean(axis=1)
    method = values[claim.subject.name].mean(axis=1)
    flat = [outcome for row in rows for outcome in row]
    finite = bool(np.all(np.isfinite(mine)))
    comparable = contender is not claim.subject and finite and bool(np.all(np.isfinite(method)))
    seconds = [outcome.wall_time for outcome in flat if math.isfinite(outcome.wall_time)]
    return {
        "name": contender.name,
        "role": _role(claim, contender),
        "setting": dict(tuning.setting),
        "average": float(averager(claim.metric)(mine)),
        "interval": _interval(interval(mine, claim.metric)) if finite else None,
        "effect": _interval(paired_effect(method, mine, claim.metric, claim.expect))
        if comparable
        else None,
        "values": [[outcome.value for outcome in row] for row in rows],
        "swept_averages": [
            float(averager(claim.metric)(column)) for column in values[contender.name].T
        ],
        "curve": _curve_band([row[-1] for row in rows]),
        "extras": _mean_extras(flat),
        "seconds_mean": float(np.mean(seconds)) if seconds else None,
        "seconds_total": float(np.sum(seconds)),
        "peak_memory": max((outcome.peak_memory for outcome in flat), default=0),
        "tuning": {
            "trials": tuning.trials,
            "settings": [dict(setting) for setting in tuning.settings],
            "averages": list(tuning.averages),
            "best": tuning.best,
        },
    }


def _role(claim: Claim, contender: Contender) -> str:
    if contender is claim.subject:
        return "method"
    return "control" if contender.control else "peer"


def _curve_band(outcomes: Sequence[Outcome]) -> dict[str, list[float]] | None:
    """Return the median curve over seeds and the band from the 10 % to the 90 % quantile."""
    curves = [outcome.curve for outcome in outcomes if outcome.curve is not None]
    if not curves or len({len(x) for x, _ in curves}) > 1:
        return None
    x = np.median([x for x, _ in curves], axis=0)
    y = np.array([y for _, y in curves], dtype=np.float64)
    low, median, high = np.quantile(y, [0.1, 0.5, 0.9], axis=0)
    return {"x": x.tolist(), "median": median.tolist(), "low": low.tolist(), "high": high.tolist()}


def _mean_extras(outcomes: Sequence[Outcome]) -> dict[str, float]:
    names = sorted({name for outcome in outcomes for name in outcome.extras})
    return {
        name: float(np.mean([o.extras[name] for o in outcomes if name in o.extras]))
        for name in names
    }


def _swept(scale: Scale) -> list[float]:
    return [point for points in scale.sweep.values() for point in points]


def _interval(found: Interval | None) -> dict[str, float] | None:
    return None if found is None else {"value": found.value, "low": found.low, "high": found.high}


def _strict(value: Any) -> Any:
    """Return ``value`` as strict JSON holds it: NaN and infinity become None, floats 6 digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return _strict(value.item())
    if isinstance(value, Mapping):
        return {str(key): _strict(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(entry) for entry in value]
    return value if isinstance(value, (str, int, bool)) or value is None else repr(value)
