"""Private gradients beside plain ones and Opacus', DP-Adam and DP-Muon beside what they vary."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from thalweg.tasks import load_digits, transformer_shapes, width_mlp
from thalweg.training import (
    DPAdam,
    DPGradient,
    DPMuonOptimizer,
    Muon,
    dp_mup_param_groups,
    make_private,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
LOT = 128


def lot():
    digits = load_digits()
    return digits.train_images[:LOT], digits.train_labels[:LOT]


def plain(width):
    model, (x, y) = width_mlp(width), lot()

    def backward():
        model.zero_grad()
        cross_entropy(model(x), y).backward()

    return backward


def private(width, noise_multiplier=0.0, **settings):
    model, (x, y) = width_mlp(width), lot()
    gradient = DPGradient(
        model, cross_entropy, noise_multiplier=noise_multiplier, max_grad_norm=1.0, **settings
    )
    return lambda: gradient(x, y, LOT)


def opacus(width):
    """Return Opacus' gradient, by hooks, with an optimizer whose step is a multiple of it."""
    model, (x, y) = width_mlp(width), lot()
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=LOT)
    module, optimizer, _, _ = make_private(
        model, "sgd", loader, base_lr=1e-9, noise_multiplier=1.0, poisson_sampling=False
    )

    def step():
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    return step


GRADIENTS = {
    "plain": plain,
    "ghost": private,
    "ghost, noise": lambda width: private(width, 1.0),
    "per sample, noise": lambda width: private(width, 1.0, strategy="per_sample"),
    "Opacus, noise": opacus,
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("width", [256, 1024])
def test_gradient(benchmark, name, width):
    benchmark.group = f"gradient of a perceptron of width {width}, 128 samples"
    benchmark.pedantic(GRADIENTS[name](width), rounds=5, warmup_rounds=1)


def test_ratios_to_the_plain_gradient(capsys, seconds_in_turn):
    """Ghost norms take plain backpropagation's products, and drawing noise one pass more."""
    width = 1024
    best = seconds_in_turn({name: make(width) for name, make in GRADIENTS.items()}, rounds=7)
    ratios = {name: time / best["plain"] for name, time in best.items()}
    with capsys.disabled():
        print(f"\nwidth {width}: ", {name: f"{ratio:.2f}" for name, ratio in ratios.items()})
    assert ratios["ghost"] <= 2.2
    assert ratios["ghost, noise"] <= ratios["Opacus, noise"]


@pytest.fixture(scope="module")
def parameters(parameters_with_gradients):
    return parameters_with_gradients(transformer_shapes())


def test_dp_adam(parameters, capsys, seconds_in_turn):
    steps = {
        "AdamW": torch.optim.AdamW(parameters, lr=1e-9, foreach=True).step,
        "DP-Adam": DPAdam(parameters, lr=1e-9, noise_std=0.1, weight_decay=0.1).step,
    }
    best = seconds_in_turn(steps, rounds=5)
    ratio = best["DP-Adam"] / best["AdamW"]
    with capsys.disabled():
        print(f"\nDP-Adam: {ratio:.2f} of AdamW(foreach=True)")
    assert ratio <= 1.2


def test_dp_muon(capsys, seconds_in_turn, parameters_with_gradients):
    """Without the correction it is Muon, with it three orthogonalizations instead of one."""
    parameters = parameters_with_gradients([(256, 256)] * 4 + [(256, 1024)] * 2)
    probes = {"noise_std": 0.1, "bias_correction": True}
    steps = {
        "Muon": Muon(parameters, lr=1e-9, nesterov=False).step,
        "DP-Muon": DPMuonOptimizer(parameters, lr=1e-9).step,
        "DP-Muon, corrected": DPMuonOptimizer(parameters, lr=1e-9, **probes).step,
    }
    best = seconds_in_turn(steps, rounds=7)
    ratios = {name: time / best["Muon"] for name, time in best.items()}
    with capsys.disabled():
        print("\nof Muon: ", {name: f"{ratio:.2f}" for name, ratio in ratios.items()})
    assert ratios["DP-Muon"] <= 1.1
    assert ratios["DP-Muon, corrected"] <= 4


def test_rule(benchmark):
    """The rule for a perceptron of 200 layers."""
    model, base = width_mlp(16, hidden_layers=200), width_mlp(8, hidden_layers=200)
    settings = {"optimizer": "adam", "noise_multiplier": 1.0, "batch_size": LOT}
    benchmark(lambda: dp_mup_param_groups(model, 0.1, base_shapes=base, **settings))
