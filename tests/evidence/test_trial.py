"""A trial: its key, its seeds, what a worker makes of it."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from toy import toy

from thalweg.evidence import Contender, Measurement, Metric, at_most, claim
from thalweg.evidence.trial import Trial, pack, run_trial

TRIAL = Trial("toy/losses", "abc", "tuning", "method", 3, {"lr": 0.1}, {"n": 8})


@pytest.mark.parametrize(
    "change",
    [
        {"claim": "toy/other"},
        {"fingerprint": "abd"},
        {"phase": "evaluation"},
        {"contender": "peer"},
        {"seed": 4},
        {"setting": {"lr": 0.2}},
        {"parameters": {"n": 9}},
    ],
)
def test_the_key_depends_on_everything_that_determines_the_result(change):
    assert dataclasses.replace(TRIAL, **change).key != TRIAL.key


def test_the_key_is_the_same_in_every_process():
    code = f"from thalweg.evidence.trial import Trial; print({TRIAL!r}.key)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == TRIAL.key


def test_contenders_and_settings_share_a_stream_phases_and_seeds_do_not():
    def draw(**changes):
        sequence = dataclasses.replace(TRIAL, **changes).seed_sequence()
        return np.random.default_rng(sequence).random()

    assert draw() == draw(contender="peer", setting={"lr": 9}, fingerprint="x")
    assert len({draw(), draw(phase="evaluation"), draw(seed=4), draw(claim="toy/other")}) == 4


def make(function, **card):
    return claim(
        method="toy",
        statement="",
        metric=Metric("loss", "lower"),
        contenders=[Contender("method", **card)],
        expect=at_most(1),
        scales=toy().scales,
    )(function)


def run(function, **card):
    made = make(function, **card)
    return run_trial(pack(made, made.subject), TRIAL)


def test_an_outcome_holds_value_curve_extras_time_and_memory():
    made = toy(seconds=0.02)
    outcome = run_trial(pack(made, made.subject), TRIAL)
    assert outcome.error is None
    assert outcome.value == pytest.approx(1 + math.log(10), abs=0.1)
    assert len(outcome.curve[0]) == 8
    assert set(outcome.extras) == {"noise"}
    assert 0.02 <= outcome.wall_time < 0.5
    assert outcome.peak_memory > 10 * 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is that of the process")
def test_the_peak_is_that_of_the_trial():
    def large(contender, rng, **parameters):
        return Measurement(float(np.ones(2**24).sum()))  # 128 MiB

    def small(contender, rng, **parameters):
        return Measurement(0.0)

    before, during, after = run(small), run(large), run(small)
    assert during.peak_memory - before.peak_memory > 100 * 2**20
    assert after.peak_memory - before.peak_memory < 30 * 2**20


def test_an_exception_becomes_the_outcome_with_its_place():
    def broken(contender, rng, **parameters):
        raise ZeroDivisionError("a reason")

    outcome = run(broken)
    assert math.isnan(outcome.value)
    assert re.fullmatch(r"ZeroDivisionError: a reason \(.+:\d+\)", outcome.error)


def test_a_wrong_return_value_becomes_the_outcome():
    def broken(contender, rng, **parameters):
        return 3.0

    assert "AttributeError" in run(broken).error


def test_global_generators_are_seeded_too():
    def globally(contender, rng, **parameters):
        import torch

        return Measurement(random.random() + np.random.random() + float(torch.rand(())))  # noqa: NPY002

    assert run(globally).value == run(globally).value


def test_workers_use_the_given_number_of_threads():
    def threads(contender, rng, **parameters):
        import threadpoolctl

        pools = [pool["num_threads"] for pool in threadpoolctl.threadpool_info()]
        return Measurement(max([torch.get_num_threads(), *pools]))

    import torch

    assert run(threads).value == 1


def test_functions_that_no_module_holds_travel_by_value():
    offset = 2.5

    def local(contender, rng, **parameters):
        return Measurement(offset + contender.make())

    assert run(local, make=lambda: 1.0).value == 3.5
