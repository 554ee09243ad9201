"""The card of a claim: grids, scales, expectations, and what it refuses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from toy import toy

from thalweg.evidence import (
    Contender,
    Measurement,
    Metric,
    Scale,
    at_least,
    at_most,
    between,
    trend,
)


def test_settings_are_the_product_of_the_grid():
    settings = Contender("c", tune={"a": [1, 2], "b": ["x", "y", "z"]}).settings()
    assert len(settings) == 6
    assert {"a": 2, "b": "z"} in settings


def test_without_a_grid_there_is_one_empty_setting():
    assert Contender("c").settings() == [{}]


def test_edges_are_the_ends_of_numeric_grids_only():
    contender = Contender(
        "c", tune={"lr": [0.3, 0.1, 1.0], "kind": ["a", "b"], "flag": [True, False], "one": [5]}
    )
    setting = {"kind": "a", "flag": True, "one": 5}
    assert contender.edges({"lr": 0.3, **setting}) == []
    assert contender.edges({"lr": 0.1, **setting}) == ["lr"]
    assert contender.edges({"lr": 1.0, **setting}) == ["lr"]


@pytest.mark.parametrize(
    ("expectation", "text"),
    [
        (at_most(0.8, of="best peer"), "ratio to best peer at most 0.8"),
        (at_most(1e-8), "value at most 1e-08"),
        (at_least(2, of="OFUL", effect="difference"), "difference to OFUL at least 2"),
        (between(-0.55, -0.45), "value between -0.55 and -0.45"),
        (trend(0.9, 1.15, over="n"), "log-log slope over n between 0.9 and 1.15"),
    ],
)
def test_expectations_read_as_sentences(expectation, text):
    assert str(expectation) == text


def test_curves_are_thinned_with_their_ends():
    x, y = Measurement(0.0, (np.arange(1001), np.arange(1001) ** 2)).thinned_curve(points=11)
    assert x == [0.0, *np.arange(100.0, 1001.0, 100.0)]
    assert y[-1] == 1000.0**2


def test_a_curve_with_unequal_axes_is_refused():
    with pytest.raises(ValueError, match=r"curve must be two 1-D arrays of one length"):
        Measurement(0.0, ([1, 2], [1])).thinned_curve()


def test_with_contender_leaves_the_claim_as_it_was():
    claim = toy()
    more = claim.with_contender(Contender("mine"))
    assert [c.name for c in more.contenders] == ["method", "peer", "shipped", "mine"]
    assert len(claim.contenders) == 3
    assert more.id == claim.id == "toy/losses"


def test_controls_are_no_peers():
    claim = toy().with_contender(Contender("control", control=True))
    assert [peer.name for peer in claim.peers] == ["peer", "shipped"]


def test_calling_a_claim_runs_a_trial():
    claim = toy()
    measurement = claim(claim.subject, np.random.default_rng(0), n=4, lr=1.0)
    assert measurement.value == pytest.approx(1.0, abs=0.1)


def _card(**changes):
    import dataclasses

    return lambda: dataclasses.replace(toy(), **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_card(contenders=()), "at least the method itself"),
        (_card(contenders=(Contender("a"), Contender("a"))), "different names"),
        (_card(contenders=(Contender("a"),)), "no peer to compare with"),
        (_card(expect=at_most(1, of="nobody")), r"of must be one of .*'peer'.*got 'nobody'"),
        (_card(expect=trend(0, 1, over="n")), "scale 'smoke' must sweep over 'n'"),
        (_card(scales={"quick": Scale(seeds=1)}), "scales must be"),
        (lambda: between(2, 1), "low must be <= high"),
        (lambda: at_most(math.nan), "low must be <= high"),
        (lambda: Scale(seeds=0), "seeds must be an integer >= 1, got 0"),
        (lambda: Scale(seeds=1, sweep={"a": [1], "b": [2]}), "sweep must name one parameter"),
        (lambda: Scale(seeds=1, n=5, tuning={"m": 2}), "tuning must name parameters of the scale"),
        (lambda: Metric("loss", "smaller"), "better must be one of 'lower', 'higher'"),
        (lambda: Metric("loss", "lower", average="mode"), "average must be one of"),
    ],
)
def test_bad_cards_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
