"""Signal and drift beside what they avoid, our layer beside PEFT's, and the price of a report."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn

from thalweg.training import LoRALinear, lora_init_state, signal_drift

pytestmark = pytest.mark.usefixtures("one_thread")

D, R = 4096, 64


@pytest.fixture(scope="module")
def wide():
    """Return one adapted layer of a 7-billion-parameter model, its start, and its parts."""
    generator = torch.Generator().manual_seed(0)
    layer = LoRALinear(nn.Linear(D, D, bias=False), R, generator=generator)
    start = lora_init_state(layer)
    with torch.no_grad():
        layer.lora_B.normal_(generator=generator)
        layer.lora_A.add_(0.01 * torch.randn(R, D, generator=generator))
    return layer, start


def by_products(layer, start):
    """Form the d × d matrices, as the definition has them."""
    s, B, A, A0 = layer.scale, layer.lora_B, layer.lora_A, start["A"]
    with torch.no_grad():
        return [float((s * B @ part).norm()) for part in (A0, A - A0, A)]


@pytest.mark.parametrize("way", ["signal_drift", "products"])
def test_drift(benchmark, wide, way):
    benchmark.group = f"signal and drift of one matrix, d = {D}, r = {R}"
    call = {"signal_drift": lambda: signal_drift(*wide), "products": lambda: by_products(*wide)}
    benchmark.pedantic(call[way], rounds=5, warmup_rounds=1)


def test_drift_never_forms_the_matrix(wide, capsys, seconds_in_turn):
    best = seconds_in_turn(
        {"report": lambda: signal_drift(*wide), "products": lambda: by_products(*wide)}, 5
    )
    ratio = best["report"] / best["products"]
    with capsys.disabled():
        print(f"\nsignal_drift takes {1e3 * best['report']:.2f} ms, {ratio:.3f} of the products")
    assert ratio <= 0.1


def adapted_layers():
    torch.manual_seed(0)
    ours = nn.Sequential(LoRALinear(nn.Linear(576, 576), 8, 8.0))
    config = peft.LoraConfig(r=8, lora_alpha=8, target_modules=["0"])
    return {"ours": ours, "PEFT": peft.get_peft_model(nn.Sequential(nn.Linear(576, 576)), config)}


def passes(model, x):
    def both():
        model(x).square().mean().backward()

    return both


@pytest.mark.parametrize("name", ["ours", "PEFT"])
def test_layer(benchmark, name):
    benchmark.group = "forward and backward of one adapted layer, 256 tokens"
    benchmark.pedantic(
        passes(adapted_layers()[name], torch.randn(256, 576)), rounds=30, warmup_rounds=3
    )


def test_our_layer_is_not_slower_than_that_of_peft(capsys, seconds_in_turn):
    x = torch.randn(256, 576)
    best = seconds_in_turn({k: passes(m, x) for k, m in adapted_layers().items()}, 60)
    with capsys.disabled():
        print(f"\nLoRALinear takes {best['ours'] / best['PEFT']:.2f} of PEFT's layer")
    assert best["ours"] <= 1.15 * best["PEFT"]


def test_a_report_costs_less_than_a_step(capsys, seconds_in_turn):
    """Of 12 matrices as SmolLM2 has them, against forward and backward through them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[LoRALinear(nn.Linear(576, 576), 8, 8.0) for _ in range(12)])
    start = lora_init_state(model)
    steps = {
        "step": passes(model, torch.randn(256, 576)),
        "report": lambda: signal_drift(model, start),
    }
    best = seconds_in_turn(steps, 20)
    with capsys.disabled():
        print(f"\na report takes {best['report'] / best['step']:.2f} of a step's passes")
    assert best["report"] <= best["step"]
