"""NLPrecond beside torch.optim.SGD and AdamW, and the NumPy path, per step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.tasks import transformer_shapes
from thalweg.training import NLPrecond, minimize_nlprecond

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {"one tensor of 10⁷": [(10**7,)], "100 matrices": [(400, 250)] * 100}


def compiled(optimizer):
    return torch.compile(optimizer.step)


LR = torch.tensor(1e-9)
STEPS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-9, foreach=True).step,
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-9, foreach=True).step,
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-9, fused=True).step,
    "isotropic": lambda p: NLPrecond(p, lr=1e-9).step,
    "isotropic unchecked": lambda p: NLPrecond(p, lr=1e-9, check_finite=False).step,
    "isotropic, momentum": lambda p: NLPrecond(p, lr=1e-9, momentum=0.9).step,
    "norm per tensor": lambda p: NLPrecond(p, lr=1e-9, scope="tensor").step,
    "separable cosh": lambda p: NLPrecond(p, lr=1e-9, structure="separable").step,
    "separable log": lambda p: NLPrecond(p, lr=1e-9, structure="separable", kernel="log").step,
    "isotropic compiled": lambda p: compiled(NLPrecond(p, lr=LR, check_finite=False)),
}


def norms(parameters):
    """Return what the isotropic step does besides SGD: one pass over the gradient."""
    grads = [p.grad for p in parameters]
    return lambda: torch.stack(torch._foreach_norm(grads)).norm()


@pytest.mark.parametrize("name", STEPS)
def test_step(benchmark, parameters_with_gradients, name):
    step = STEPS[name](parameters_with_gradients(transformer_shapes()))
    benchmark.group = "step, transformer of 50 M parameters"
    benchmark.pedantic(step, rounds=5, warmup_rounds=2)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_ratio_to_sgd_and_a_norm(shapes, seconds_in_turn, parameters_with_gradients, capsys):
    """The isotropic step is SGD's and one pass over the gradient: four passes for three.

    Besides, Python spends about 10 µs per tensor.
    """
    parameters = parameters_with_gradients(shapes)
    names = ("SGD", "isotropic", "isotropic unchecked")
    steps = {name: STEPS[name](parameters) for name in names} | {"norm": norms(parameters)}
    best = seconds_in_turn(steps, 25)
    expected = best["SGD"] + best["norm"]
    ratios = {name: best[name] / expected for name in names}
    with capsys.disabled():
        print(f"\n{len(shapes)} tensors, over SGD + norm: ", show(ratios))
    for name in names:
        assert ratios[name] <= (1.25 if len(shapes) == 1 else 1.5)


def test_ratios_to_adamw(seconds_in_turn, parameters_with_gradients, capsys):
    """On 50 M parameters; per byte, AdamW touches seven tensors' worth and this step four.

    The norm must be complete before anything moves, and a pass that only sums squares is slower
    per byte than the update: hence a bound above 1.3.
    """
    parameters = parameters_with_gradients(transformer_shapes())
    steps = {name: make(parameters) for name, make in STEPS.items()}
    for step in steps.values():
        step()
    best = seconds_in_turn(steps, 12)
    ratios = {name: time / best["AdamW foreach"] for name, time in best.items()}
    per_byte = best["isotropic compiled"] / 4 / (best["AdamW fused"] / 7)
    with capsys.disabled():
        print("\nover AdamW foreach: ", show(ratios))
        print("over SGD: ", show({name: time / best["SGD"] for name, time in best.items()}))
        print(f"compiled over AdamW fused, per byte: {per_byte:.2f}")
    for name, ratio in ratios.items():
        assert ratio <= 1.2 or "fused" in name
    assert per_byte <= 1.6


def test_small_networks_are_bound_by_python(seconds_in_turn, parameters_with_gradients, capsys):
    parameters = parameters_with_gradients([(64, 64), (64,)] * 3)
    names = ("SGD", "AdamW foreach", "isotropic", "separable cosh")
    steps = {name: STEPS[name](parameters) for name in names}
    best = seconds_in_turn({k: lambda s=s: [s() for _ in range(50)] for k, s in steps.items()}, 10)
    with capsys.disabled():
        print(
            "\nsmall, over AdamW foreach: ", show({k: t / best[names[1]] for k, t in best.items()})
        )
    assert best["isotropic"] <= 1.5 * best["AdamW foreach"]


def test_numpy_steps_cost_a_few_passes(seconds_in_turn, capsys):
    """At n = 10⁷ a step of the minimizer takes one norm, one step and two copies."""
    n = 10**7
    gradient = np.ones(n)

    def f(x):
        return 0.0, gradient

    def run(maxiter):
        minimize_nlprecond(f, x0, gamma=1e-9, tol=0.0, maxiter=maxiter)

    x0 = np.zeros(n)
    best = seconds_in_turn(
        {"2": lambda: run(2), "12": lambda: run(12), "copy": gradient.copy}, rounds=5
    )
    per_step = (best["12"] - best["2"]) / 10
    with capsys.disabled():
        print(f"\nNumPy, n = 10⁷: {1e3 * per_step:.1f} ms, {per_step / best['copy']:.1f} copies")
    assert per_step <= 8 * best["copy"]


def show(ratios):
    return {name: f"{ratio:.2f}" for name, ratio in ratios.items()}
