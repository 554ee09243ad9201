"""Guide initialization beside bare training steps of the same network."""

from __future__ import annotations

import copy
import math
import timeit

import pytest
import torch
from torch import nn

from thalweg.tasks import uniform_points
from thalweg.training import guide_init, linear_cka, random_guide
from thalweg.training.kernels_at_init import tangent_kernel

WIDTH = 256
BATCH = 256
STEPS = 20


def seconds_in_turn(functions, rounds=7):
    """Return the shortest time of each, measured in turn so that all meet the same machine."""
    best = dict.fromkeys(functions, math.inf)
    for _ in range(rounds):
        for name, function in functions.items():
            best[name] = min(best[name], timeit.timeit(function, number=1))
    return best


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def networks():
    torch.manual_seed(0)
    target = nn.Sequential(
        nn.Linear(2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )
    return target, random_guide(target, width=WIDTH, generator=torch.Generator().manual_seed(1))


POINTS = uniform_points(4096, torch.Generator().manual_seed(2))


def align(target, guide, data=POINTS, steps=STEPS):
    return guide_init(target, guide, data, steps=steps, batch_size=BATCH, tol=1.0)


def bare_alignment(target, guide):
    """Do the same arithmetic, guide included, with the checked public CKA and no report."""
    optimizer = torch.optim.Adam(target.parameters(), lr=1e-3)
    for _ in range(STEPS):
        x = POINTS[torch.randperm(len(POINTS))[:BATCH]]
        ours, theirs, a, b = [], [], x, x
        for layer in target[:-1]:
            a = layer(a)
            ours.append(a)
        with torch.no_grad():
            for layer in guide:
                b = layer(b)
                theirs.append(b)
        loss = 2 - linear_cka(ours[1], theirs[5]) - linear_cka(ours[3], theirs[11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_alignment(benchmark):
    target, guide = networks()
    benchmark.group = f"{STEPS} alignment steps, width {WIDTH}, batch {BATCH}"
    benchmark.pedantic(lambda: align(target, guide), rounds=5, warmup_rounds=1)


def test_bare_alignment(benchmark):
    target, guide = networks()
    benchmark.group = f"{STEPS} alignment steps, width {WIDTH}, batch {BATCH}"
    benchmark.pedantic(lambda: bare_alignment(target, guide), rounds=5, warmup_rounds=1)


def test_a_step_costs_less_than_one_written_by_hand(capsys):
    """A tensor's guide features are computed once, so that long alignments do without the guide."""
    target, guide = networks()
    runs = {
        "ours": lambda: align(copy.deepcopy(target), guide, steps=3 * STEPS),
        "start": lambda: align(copy.deepcopy(target), guide, steps=2 * STEPS),
        "bare": lambda: bare_alignment(copy.deepcopy(target), guide),
    }
    best = seconds_in_turn(runs)
    per_step = (best["ours"] - best["start"]) / STEPS
    ratio = per_step * STEPS / best["bare"]
    with capsys.disabled():
        print(f"\n{per_step * 1e3:.2f} ms a step, {ratio:.2f} of a step by hand")
    assert ratio <= 1.0


def test_cka_costs_little_more_than_its_products(capsys):
    generator = torch.Generator().manual_seed(0)
    for features in (64, 2048):
        X = torch.randn(BATCH, features, generator=generator)
        Y = torch.randn(BATCH, features, generator=generator)

        def products(X=X, Y=Y, features=features):
            pairs = ((X.T, Y), (X.T, X), (Y.T, Y)) if features < BATCH else ((X, X.T), (Y, Y.T))
            return [a @ b for a, b in pairs]

        best = seconds_in_turn(
            {
                "cka": lambda X=X, Y=Y: [linear_cka(X, Y) for _ in range(10)],
                "products": lambda products=products: [products() for _ in range(10)],
            }
        )
        ratio = best["cka"] / best["products"]
        with capsys.disabled():
            print(f"\n{features} features: CKA takes {ratio:.2f} of its matrix products")
        assert ratio <= (12 if features < BATCH else 2.5)


def test_the_tangent_kernel_beats_gradients_one_by_one(capsys):
    target, _ = networks()
    x = POINTS[:64]

    def one_by_one():
        rows = []
        for value in target(x).flatten():
            gradients = torch.autograd.grad(value, list(target.parameters()), retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in gradients]))
        J = torch.stack(rows)
        return J @ J.T

    best = seconds_in_turn(
        {"ours": lambda: tangent_kernel(target, x), "one by one": one_by_one}, rounds=5
    )
    ratio = best["ours"] / best["one by one"]
    with capsys.disabled():
        print(f"\nthe tangent kernel takes {ratio:.2f} of gradients one by one")
    assert ratio <= 1.0
