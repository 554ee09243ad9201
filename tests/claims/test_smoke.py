"""Every claim runs at the smoke scale, and the same seed gives the same values."""

from __future__ import annotations

import dataclasses
import math

import pytest

from thalweg.catalog import all_methods
from thalweg.claims import claims_of
from thalweg.evidence.runner import verify

CLAIMS = [claim for method in all_methods().values() for claim in claims_of(method)]
SECONDS = "s"  # the unit of metrics that no seed can repeat


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_runs_at_smoke_scale(claim, store, inline):
    (record,) = verify([claim], scale="smoke", store=store, backend=inline)
    assert record["failures"] == []
    assert record["verdict"] == "inconclusive"
    assert any("smoke scale" in reason for reason in record["reasons"])
    for contender in record["contenders"]:
        assert all(value is not None for row in contender["values"] for value in row)
        assert contender["peak_memory"] > 2**20


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_scales_grow_and_have_enough_seeds(claim):
    smoke, quick, full = (claim.scales[name] for name in ("smoke", "quick", "full"))
    assert smoke.seeds <= quick.seeds <= full.seeds
    assert quick.seeds >= 8
    assert set(smoke.parameters) == set(quick.parameters) == set(full.parameters)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_bounds_of_the_expectation_are_finite_on_one_side(claim):
    assert math.isfinite(claim.expect.low) or math.isfinite(claim.expect.high)


def test_claims_have_different_names():
    names = [claim.id for claim in CLAIMS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if c.headline and c.metric.unit != SECONDS], ids=lambda c: c.id
)
def test_the_same_seed_gives_the_same_values(claim, tmp_path, inline):
    from thalweg.evidence.store import Store

    once = dataclasses.replace(claim, contenders=claim.contenders[:1], expect=_any())
    values = []
    for name in ("first", "second"):
        with Store(tmp_path / name) as store:
            (record,) = verify([once], scale="smoke", store=store, backend=inline)
        values.append(record["contenders"][0]["values"])
    assert values[0] == values[1]


def _any():
    from thalweg.evidence import at_most

    return at_most(1e300)
