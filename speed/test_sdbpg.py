"""Dynamic barrier steps beside the gradients that they are made of, and beside steps of SGD."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from thalweg.bilevel import SDBPG, sdbpg
from thalweg.tasks import tanh_selection

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 2_000
BATCHES = {"batch_upper": 4, "batch_lower": 8}


def run(problem, **settings):
    return sdbpg(
        problem.upper,
        problem.lower,
        problem.x0,
        lr=0.01,
        maxiter=STEPS,
        eval_every=STEPS,
        rng=0,
        **BATCHES,
        **settings,
    )


def bare(problem, points=1):
    """Draw the same batches, evaluate their gradients, and make a step of gradient descent."""
    rng, x = np.random.default_rng(0), problem.x0
    halves = 2 if points == 1 else 1
    for _ in range(STEPS):
        f = problem.upper.draw(rng, 4)
        g = [problem.lower.draw(rng, 8 // halves) for _ in range(halves)]
        for _ in range(points):
            step = problem.upper.sample_grad(x, f)
            for idx in g:
                step = step + problem.lower.sample_grad(x, idx)
        x = x - 1e-6 * step


@pytest.mark.parametrize("name", ["gradients", "SDBPG", "SDBPG, auto", "VR-PR-SDBPG"])
def test_two_thousand_steps(benchmark, name):
    problem = tanh_selection(np.random.default_rng(0))
    call = {
        "gradients": lambda: bare(problem),
        "SDBPG": lambda: run(problem),
        "SDBPG, auto": lambda: run(problem, delta="auto"),
        "VR-PR-SDBPG": lambda: run(problem, variant="vr-pr", vr="storm"),
    }[name]
    benchmark.group = "2 000 steps"
    benchmark.pedantic(call, rounds=3, warmup_rounds=1)


def test_steps_cost_little_beside_their_gradients(capsys, seconds_in_turn):
    """Of 20 variables, where nothing hides the price of the steps themselves."""
    problem = tanh_selection(np.random.default_rng(0))
    best = seconds_in_turn(
        {
            "gradients": lambda: bare(problem),
            "steps": lambda: run(problem),
            "pairs": lambda: bare(problem, 2),
            "vr": lambda: run(problem, variant="vr-pr", vr="storm"),
        },
        5,
    )
    plain, reduced = best["steps"] / best["gradients"], best["vr"] / best["pairs"]
    with capsys.disabled():
        print(f"\nSDBPG, of its gradients: {plain:.2f}; VR-PR-SDBPG: {reduced:.2f}")
    assert plain <= 1.3
    assert reduced <= 1.4


def test_optimizer_costs_little_beside_steps_of_sgd(
    capsys, seconds_in_turn, parameters_with_gradients
):
    """Ten million parameters: one step beside two of SGD, and one of AdamW, without gradients."""
    shapes = [(2_000, 2_000), (2_000, 2_000), (2_000, 1_000), (1_000,)]
    parameters = parameters_with_gradients(shapes, size=1e-3)
    f = [p.grad for p in parameters]
    g = [grad.flip(0) for grad in f]
    sgd = torch.optim.SGD(parameters, lr=1e-6, foreach=True)
    adamw = torch.optim.AdamW(parameters, lr=1e-6, foreach=True)
    fused = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method = SDBPG(parameters, lr=1e-6, split=False)

    def two_steps():
        sgd.step()
        sgd.step()

    best = seconds_in_turn(
        {
            "sgd": two_steps,
            "adamw": adamw.step,
            "fused": fused.step,
            "step": lambda: method.step(grads=(f, g)),
        },
        8,
    )
    each = {name: best["step"] / best[name] for name in ("sgd", "adamw", "fused")}
    with capsys.disabled():
        print("\nSDBPG, of: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in each.items()))
    assert each["sgd"] <= 2.5
    assert each["adamw"] <= 1.0


def test_whole_steps_of_a_network(capsys, seconds_in_turn):
    """With their backward passes: beside two steps of SGD, one for each loss."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)
    )
    x = torch.randn(64, 256)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        method = SDBPG(model.parameters(), lr=1e-6, split=False)

    def upper():
        return model(x).square().mean()

    def lower():
        return (model(x) - x).square().mean()

    def two_steps():
        for loss in (upper, lower):
            sgd.zero_grad()
            loss().backward()
            sgd.step()

    best = seconds_in_turn({"sgd": two_steps, "step": lambda: method.step(upper, lower)}, 60)
    ratio = best["step"] / best["sgd"]
    with capsys.disabled():
        print(f"\nSDBPG with its gradients, of two steps of SGD with theirs: {ratio:.2f}")
    assert ratio <= 1.15
