"""SignSGD, Lion and Muon beside torch's AdamW and Muon, over a transformer of 50 M parameters."""

from __future__ import annotations

import pytest
import torch

from thalweg.tasks import transformer_shapes
from thalweg.training import Lion, Muon, Muonlight, SignSGD

# Tensors of the parameters' size that a step reads or writes.
PASSES = {"AdamW": 7, "SignSGD": 5, "Lion": 5}


def adamw(parameters, **settings):
    return torch.optim.AdamW(parameters, lr=1e-9, **settings)


def tensor_lr():
    return torch.tensor(1e-9)


ENTRYWISE = {
    "AdamW, foreach": lambda p: adamw(p, foreach=True),
    "AdamW, fused": lambda p: adamw(p, fused=True),
    "SignSGD": lambda p: SignSGD(p, lr=1e-9, weight_decay=0.1),
    "SignSGD, no momentum": lambda p: SignSGD(p, lr=1e-9, momentum=0.0, weight_decay=0.1),
    "Lion": lambda p: Lion(p, lr=1e-9, weight_decay=0.1),
}
COMPILED = {
    "SignSGD": lambda p: SignSGD(p, tensor_lr(), weight_decay=0.1, check_finite=False),
    "Lion": lambda p: Lion(p, tensor_lr(), weight_decay=0.1, check_finite=False),
}


def show(capsys, title, ratios):
    with capsys.disabled():
        print(f"\n{title}: ", {name: f"{ratio:.2f}" for name, ratio in ratios.items()})


@pytest.fixture(autouse=True)
def restored_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request, restored_threads):
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture(scope="module")
def parameters(parameters_with_gradients):
    return parameters_with_gradients(transformer_shapes())


@pytest.fixture(scope="module")
def matrices(parameters_with_gradients):
    """Return the hidden matrices, without the embeddings."""
    return parameters_with_gradients(
        [s for s in transformer_shapes() if len(s) == 2 and max(s) <= 4 * min(s)]
    )


@pytest.mark.parametrize("name", ENTRYWISE)
def test_entrywise_step(benchmark, parameters, name):
    optimizer = ENTRYWISE[name](parameters)
    benchmark.group = "step over a transformer of 50 M parameters"
    benchmark.pedantic(optimizer.step, rounds=5, warmup_rounds=1)


def test_ratios_to_adamw(parameters, threads, capsys, seconds_in_turn):
    """Eagerly a few passes over each tensor while it is in the cache, and one for the check."""
    steps = {name: make(parameters).step for name, make in ENTRYWISE.items()}
    best = seconds_in_turn(steps, rounds=5)
    ratios = {name: time / best["AdamW, foreach"] for name, time in best.items()}
    show(capsys, f"{threads} threads, of AdamW(foreach=True)", ratios)
    assert ratios["SignSGD"] <= 1.2
    assert ratios["SignSGD, no momentum"] <= 1.2
    assert ratios["Lion"] <= 1.2


def test_compiled_ratios_to_fused_adamw(parameters, threads, capsys, seconds_in_turn):
    """Compiled, SignSGD and Lion are one pass: as fast as the memory, like the fused AdamW."""
    torch._dynamo.reset()
    steps = {name: torch.compile(make(parameters).step) for name, make in COMPILED.items()}
    steps["AdamW"] = adamw(parameters, fused=True).step
    for step in steps.values():
        step()
        step()
    best = seconds_in_turn(steps, rounds=7)
    per_byte = {name: time / PASSES[name] for name, time in best.items()}
    ratios = {name: time / per_byte["AdamW"] for name, time in per_byte.items()}
    show(capsys, f"{threads} threads, per byte of AdamW(fused=True)", ratios)
    assert ratios["SignSGD"] <= 1.3
    assert ratios["Lion"] <= 1.3


MUONS = {
    "torch": lambda p: torch.optim.Muon(p, lr=1e-9, weight_decay=0.1),
    "Muon": lambda p: Muon(p, lr=1e-9, weight_decay=0.1),
    "Muonlight": lambda p: Muonlight(p, lr=1e-9),
}


@pytest.mark.parametrize("name", MUONS)
def test_muon_step(benchmark, matrices, name):
    benchmark.group = "step over the matrices of a transformer"
    benchmark.pedantic(MUONS[name](matrices).step, rounds=2, warmup_rounds=1)


def test_ratio_to_torch_muon(matrices, threads, capsys, seconds_in_turn):
    """Both multiply in bfloat16 where the CPU can; ours leaves half of each Gram matrix out."""
    best = seconds_in_turn({name: make(matrices).step for name, make in MUONS.items()}, rounds=3)
    ratios = {name: time / best["torch"] for name, time in best.items()}
    show(capsys, f"{threads} threads, of torch.optim.Muon", ratios)
    assert ratios["Muon"] <= 1.0
    assert ratios["Muonlight"] <= 1.0


def test_many_small_matrices(threads, capsys, seconds_in_turn, parameters_with_gradients):
    """Batches of small matrices save most of the calls."""
    matrices = parameters_with_gradients([(32, 64), (64, 32)] * 100)
    best = seconds_in_turn({name: make(matrices).step for name, make in MUONS.items()}, rounds=5)
    ratios = {name: time / best["torch"] for name, time in best.items()}
    show(capsys, f"{threads} threads, 200 small matrices, of torch.optim.Muon", ratios)
    assert ratios["Muon"] <= 0.7
