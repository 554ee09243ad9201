"""StabSGD beside torch.optim.SGD(foreach=True), per step at 10⁷ parameters, in both phases."""

from __future__ import annotations

import pytest
import torch

from thalweg.training import StabSGD

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {"one tensor of 10⁷": [(10**7,)], "100 matrices": [(400, 250)] * 100}
ALMOST_FOREVER = 1e15


def descending(parameters, **settings):
    """Return a StabSGD that stays in its descend phase."""
    optimizer = StabSGD(parameters, lr=1e-9, zeta=2, kappa=ALMOST_FOREVER, **settings)
    while optimizer.phase == "measure":
        optimizer.step()
    return optimizer


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-9, foreach=True),
    "SGD, weight decay": lambda p: torch.optim.SGD(p, lr=1e-9, weight_decay=1e-4, foreach=True),
    "measure": lambda p: StabSGD(p, lr=1e-9, zeta_start=ALMOST_FOREVER),
    "descend": descending,
    "descend unchecked": lambda p: descending(p, check_finite=False),
    "descend, weight decay": lambda p: descending(p, weight_decay=1e-4),
}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def parameters(request, parameters_with_gradients):
    return parameters_with_gradients(request.param)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step(benchmark, parameters, name):
    optimizer = OPTIMIZERS[name](parameters)
    benchmark.group = f"step, {len(parameters)} tensors, 10⁷ parameters"
    benchmark.pedantic(optimizer.step, rounds=20, warmup_rounds=2)


def accumulating(parameters):
    """Return what SGD does with two micro-batches: add their gradients, and step."""
    optimizer = torch.optim.SGD(parameters, lr=1e-9, foreach=True)
    sums = [p.grad for p in parameters]
    others = [g.clone() for g in sums]

    def step():
        torch._foreach_add_(sums, others, alpha=1e-9)
        optimizer.step()

    return step


def splitting(parameters):
    optimizer = StabSGD(parameters, lr=1e-9, estimator="split")
    batches = [[p.grad for p in parameters], [2 * p.grad for p in parameters]]
    return lambda: optimizer.step_split(batches)


@pytest.mark.parametrize("make", [accumulating, splitting])
def test_two_micro_batches(benchmark, parameters, make):
    benchmark.group = f"two micro-batches, {len(parameters)} tensors, 10⁷ parameters"
    benchmark.pedantic(make(parameters), rounds=20, warmup_rounds=7)


def test_ratios_to_sgd(parameters, capsys, seconds_in_turn):
    """What every phase may cost, in passes over 10⁷ numbers; SGD makes three.

    Unchecked descent is SGD. The check reads the gradient once more. A measurement writes to the
    mean instead of the parameters and reads the gradient once more for its norm. Two micro-batches
    take SGD six passes and "split" eleven.
    """
    steps = {name: make(parameters).step for name, make in OPTIMIZERS.items()}
    steps |= {"accumulate": accumulating(parameters), "split": splitting(parameters)}
    best = seconds_in_turn(steps, 25)
    ratios = {
        "descend unchecked": best["descend unchecked"] / best["SGD"],
        "descend": best["descend"] / best["SGD"],
        "measure": best["measure"] / best["SGD"],
        "descend, weight decay": best["descend, weight decay"] / best["SGD, weight decay"],
        "split": best["split"] / best["accumulate"],
    }
    with capsys.disabled():
        print(f"\n{len(parameters)} tensors: ", {k: f"{v:.2f}" for k, v in ratios.items()})
    assert ratios["descend unchecked"] <= 1.15
    assert ratios["descend, weight decay"] <= 1.2
    # Both make four passes where SGD makes three, and call a kernel for each tensor.
    assert ratios["descend"] <= 1.4 * 4 / 3
    assert ratios["measure"] <= 1.6 * 4 / 3
    assert ratios["split"] <= 3.5


def test_small_problems_are_bound_by_python(capsys, seconds_in_turn, parameters_with_gradients):
    parameters = parameters_with_gradients([(25,)])
    steps = {name: OPTIMIZERS[name](parameters).step for name in ("SGD", "descend", "measure")}
    best = seconds_in_turn({k: lambda s=s: [s() for _ in range(200)] for k, s in steps.items()}, 10)
    with capsys.disabled():
        print({name: f"{time / best['SGD']:.2f} of SGD" for name, time in best.items()})
    assert best["descend"] <= 3 * best["SGD"]
    assert best["measure"] <= 5 * best["SGD"]
