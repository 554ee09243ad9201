"""LoRA-alpha: the rule, the identity behind it, signal and drift, spectra, and the scan."""

from __future__ import annotations

import copy
import math
import warnings

import matplotlib
import numpy as np
import peft
import pytest
import torch
from torch import nn

from thalweg.training import (
    CoefSearch,
    LoRALinear,
    as_lora_plus_groups,
    find_coef,
    lora_alpha,
    lora_alpha_config,
    lora_init_state,
    signal_drift,
    spectral_suppression,
)
from thalweg.training.lora_layers import lora_matrices
from thalweg.training.lora_spectra import lanczos

matplotlib.use("Agg")


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def perceptron(seed=0, **lora):
    """Return a float64 network with adapters on both layers."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    for i in (0, 2):
        model[i] = LoRALinear(model[i], generator=seeded(seed + i), **{"r": 4, "alpha": 4.0} | lora)
    return model


def with_peft(config, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)
    return peft.get_peft_model(model, config)


X = torch.randn(64, 12, generator=seeded(100), dtype=torch.float64)
Y = torch.randint(5, (64,), generator=seeded(101))


def loss_of(model, batch=(X, Y)):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model, optimizer, steps=50):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def deltas(model):
    return torch.cat([model[i].delta().flatten() for i in (0, 2)])


def close(a, b, tolerance):
    return float((a - b).detach().norm() / b.detach().norm()) <= tolerance


# The rule


@pytest.mark.parametrize(
    ("r", "settings", "alpha"),
    [
        (16, {}, 1024),
        (4, {}, 512),
        (64, {}, 2048),
        (16, {"convention": "rslora"}, 256),
        (16, {"convention": "none"}, 64),
        (16, {"coef": 8}, 32),
    ],
)
def test_values_of_alpha(r, settings, alpha):
    assert lora_alpha(r, **settings) == alpha


@pytest.mark.parametrize("r", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("convention", ["alpha/r", "rslora"])
def test_the_scale_of_a_peft_layer_is_the_rules(r, convention):
    config = lora_alpha_config(r=r, coef=100.0, convention=convention, target_modules=["0", "2"])
    model = with_peft(config)
    for matrix in lora_matrices(model):
        assert matrix.scale == pytest.approx(100 / math.sqrt(r), rel=1e-6)
        assert matrix.module.scaling["default"] == matrix.scale


@pytest.mark.parametrize("convention", ["alpha/r", "rslora", "none"])
def test_the_scale_of_our_layer_is_the_rules(convention):
    layer = LoRALinear(nn.Linear(8, 4), 7, convention=convention)
    assert layer.scale == pytest.approx(256 / math.sqrt(7), rel=1e-12)


@pytest.mark.parametrize("rslora", [False, True])
def test_every_rank_of_a_pattern_has_its_own_alpha(rslora):
    config = lora_alpha_config(
        r=8, use_rslora=rslora, rank_pattern={"2": 3}, target_modules=["0", "2"]
    )
    first, second = lora_matrices(with_peft(config))
    assert (first.rank, second.rank) == (8, 3)
    assert first.scale == pytest.approx(256 / math.sqrt(8), rel=1e-6)
    assert second.scale == pytest.approx(256 / math.sqrt(3), rel=1e-6)


def test_a_config_is_copied_and_its_alphas_are_replaced():
    base = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["0"], alpha_pattern={"0": 3}
    )
    config = lora_alpha_config(base)
    assert (config.r, config.lora_alpha, config.alpha_pattern) == (4, 512, {})
    assert (config.lora_dropout, config.target_modules) == (0.1, {"0"})
    assert (base.lora_alpha, base.alpha_pattern) == (8, {"0": 3})
    assert lora_alpha_config(base, r=16).lora_alpha == 1024
    assert lora_alpha_config().r == 16
    kept = lora_alpha_config(peft.LoraConfig(r=16, use_rslora=True))
    assert (kept.use_rslora, kept.lora_alpha) == (True, 256)
    turned = lora_alpha_config(kept, convention="alpha/r")
    assert (turned.use_rslora, turned.lora_alpha) == (False, 1024)


def test_a_config_survives_saving(tmp_path):
    lora_alpha_config(r=2, rank_pattern={"q": 8}).save_pretrained(tmp_path)
    config = peft.LoraConfig.from_pretrained(tmp_path)
    assert config.lora_alpha == lora_alpha(2)
    assert config.alpha_pattern == {"q": lora_alpha(8)}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lora_alpha(0), ValueError, "r must be an integer >= 1"),
        (lambda: lora_alpha(2.0), TypeError, "r must be an integer"),
        (lambda: lora_alpha(8, coef=0), ValueError, "coef must be a finite number > 0"),
        (lambda: lora_alpha(8, coef=math.nan), ValueError, "coef must be a finite number"),
        (lambda: lora_alpha(8, convention="s"), ValueError, "convention must be one of"),
        (lambda: lora_alpha_config(r=0), ValueError, "r must be an integer >= 1"),
        (lambda: lora_alpha_config(coef=-1), ValueError, "coef must be"),
        (
            lambda: lora_alpha_config(use_rslora=True, convention="alpha/r"),
            ValueError,
            "scale would be applied twice",
        ),
        (
            lambda: lora_alpha_config(use_rslora=False, convention="rslora"),
            ValueError,
            "use_rslora must not be False",
        ),
        (lambda: lora_alpha_config(convention="none"), ValueError, "convention must be one of"),
        (lambda: lora_alpha_config(use_rslora=1), ValueError, "use_rslora must be one of"),
        (lambda: lora_alpha_config(lora_alpha=3), ValueError, "lora_alpha must not be given"),
        (
            lambda: lora_alpha_config(alpha_pattern={"q": 1}),
            ValueError,
            "alpha_pattern must not be given",
        ),
        (lambda: lora_alpha_config(rank_pattern={"q": 0}), ValueError, "r must be an integer"),
        (lambda: lora_alpha_config({"r": 8}), TypeError, "base must be a peft.LoraConfig"),
        (lambda: lora_alpha_config(peft.IA3Config()), TypeError, "got IA3Config"),
        (
            lambda: lora_alpha_config(peft.AdaLoraConfig(total_step=2000)),
            TypeError,
            "got AdaLoraConfig",
        ),
        (lambda: lora_alpha_config(no_such_setting=1), TypeError, "no_such_setting"),
    ],
)
def test_bad_rules_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"init_lora_weights": "olora"}, "'olora'"),
        ({"init_lora_weights": "gaussian"}, "'gaussian'"),
        ({"init_lora_weights": False}, "False"),
    ],
)
def test_other_kinds_of_lora_are_warned_of(settings, kind):
    with pytest.warns(
        UserWarning, match=f"derived for LoRA with uniform A and B = 0, not .*{kind}"
    ):
        lora_alpha_config(**settings)


# The identity of alpha and LoRA+


@pytest.mark.parametrize("eps", [1e-30, 1e-8, 1e-3])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_a_larger_alpha_is_lora_plus_for_every_epsilon(eps, make):
    """float64, 50 steps; rounding grows along the trajectory to about 1e-12."""
    c, lr = 10.0, 1e-2
    larger = perceptron(alpha=4.0 * c)
    train(larger, make(trained(larger), lr=lr, eps=eps, weight_decay=0.0))
    plus = perceptron(alpha=4.0)
    train(plus, make(as_lora_plus_groups(plus, lr, c, eps=eps)))
    assert close(deltas(plus), deltas(larger), 1e-8)
    assert close(plus[0].lora_A, larger[0].lora_A, 1e-8)


def test_no_learning_rate_replaces_alpha():
    larger = perceptron(alpha=64.0)
    train(larger, torch.optim.Adam(trained(larger), lr=1e-3))
    for factor in 2.0 ** np.arange(-1, 8):
        other = perceptron(alpha=4.0)
        train(other, torch.optim.Adam(trained(other), lr=1e-3 * factor))
        assert not close(deltas(other), deltas(larger), 0.05)


def test_the_groups_of_peft_agree_for_a_tiny_epsilon():
    from peft.optimizers import create_loraplus_optimizer

    results = []
    for alpha, ratio in ((64, 1.0), (4, 16.0)):
        config = peft.LoraConfig(r=4, lora_alpha=alpha, target_modules=["0", "2"])
        model = with_peft(config)
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=ratio, eps=1e-30
        )
        train(model, optimizer)
        results.append(
            torch.cat(
                [m.module.get_delta_weight("default").flatten() for m in lora_matrices(model)]
            )
        )
    assert close(results[1], results[0], 1e-8)
    model = with_peft(peft.LoraConfig(r=4, lora_alpha=4, target_modules=["0", "2"]))
    train(model, torch.optim.AdamW(as_lora_plus_groups(model, 1e-2, 16.0, eps=1e-30)))
    ours = torch.cat([m.module.get_delta_weight("default").flatten() for m in lora_matrices(model)])
    assert close(ours, results[0], 1e-8)


def test_with_sgd_and_a_fixed_a_the_factor_of_lr_is_squared():
    c, lr = 4.0, 1e-3
    larger, other = perceptron(alpha=4.0 * c), perceptron(alpha=4.0)
    for model, size in ((larger, lr), (other, lr * c**2)):
        for i in (0, 2):
            model[i].lora_A.requires_grad_(False)
        train(model, torch.optim.SGD(trained(model), lr=size))
    assert close(deltas(other), deltas(larger), 1e-10)


def test_groups_hold_every_trained_parameter_once():
    config = peft.LoraConfig(r=4, target_modules=["0"], modules_to_save=["2"])
    model = with_peft(config)
    of_b, others = as_lora_plus_groups(model, 1e-3, 8.0, eps=1e-6)
    assert (of_b["lr"], others["lr"]) == (8e-3, 1e-3)
    assert (of_b["eps"], others["eps"]) == (1e-6 / 8, 1e-6)
    assert len(of_b["params"]) == 1
    assert {*of_b["params"], *others["params"]} == set(trained(model))
    for layer in (perceptron()[0],):
        layer.lora_A.requires_grad_(False)
        assert len(as_lora_plus_groups(layer, 1e-3, 8.0)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((nn.Linear(2, 2), 1e-3, 2.0), "model must train LoRA's B"),
        ((perceptron(), 0.0, 2.0), "lr must be"),
        ((perceptron(), 1e-3, 0.0), "c must be"),
    ],
)
def test_bad_groups_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        as_lora_plus_groups(*arguments)


# The layer


def test_a_fresh_layer_is_the_linear_one_and_trains_only_the_adapter():
    linear = nn.Linear(12, 16)
    expected = linear(X.float())
    layer = LoRALinear(linear, 4)
    assert torch.equal(layer(X.float()), expected)
    assert {name for name, p in layer.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    assert "r=4, scale=128" in repr(layer)


def test_the_layer_is_that_of_peft():
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["0"])
    model = with_peft(config).base_model.model
    inner = model[0]
    layer = LoRALinear(copy.deepcopy(inner.base_layer), 4, 12)
    torch.nn.init.normal_(inner.lora_B["default"].weight, generator=seeded(3))
    with torch.no_grad():
        layer.lora_A.copy_(inner.lora_A["default"].weight)
        layer.lora_B.copy_(inner.lora_B["default"].weight)
    assert torch.allclose(layer(X), inner(X), rtol=1e-12, atol=1e-12)
    assert torch.allclose(layer.delta(), inner.get_delta_weight("default"), rtol=1e-12)


def test_merging_changes_the_weight_and_not_the_output():
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(12, 16), 4, 8.0)
    nn.init.normal_(layer.lora_B, std=0.1, generator=seeded(1))
    weight = layer.linear.weight.clone()
    expected = layer(X.float())
    layer.merge()
    layer.merge()
    assert layer.merged
    assert torch.allclose(layer.linear.weight, weight + layer.delta())
    assert torch.allclose(layer(X.float()), expected, atol=1e-5)
    layer.unmerge()
    layer.unmerge()
    assert torch.allclose(layer.linear.weight, weight, atol=1e-5)
    assert torch.allclose(layer(X.float()), expected, atol=1e-5)


def test_a_is_drawn_as_peft_draws_it():
    """The variance of 10⁵ uniform entries is known to a relative 3e-3; 5 sigma."""
    kaiming = LoRALinear(nn.Linear(1000, 1), 100, generator=seeded(0)).lora_A
    assert kaiming.var().item() == pytest.approx(1 / 3000, rel=0.015)
    assert kaiming.abs().max().item() <= 1000**-0.5
    gaussian = LoRALinear(nn.Linear(1000, 1), 100, init="gaussian", generator=seeded(0)).lora_A
    assert gaussian.std().item() == pytest.approx(1 / 100, rel=0.015)
    again = LoRALinear(nn.Linear(1000, 1), 100, generator=seeded(0)).lora_A
    assert torch.equal(kaiming, again)


@pytest.mark.parametrize(
    ("dtype", "of_adapter"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_adapters_of_half_precision_layers(dtype, of_adapter):
    layer = LoRALinear(nn.Linear(12, 16, dtype=dtype), 4)
    assert layer.lora_A.dtype == layer.lora_B.dtype == of_adapter
    nn.init.ones_(layer.lora_B)
    output = layer(X.to(dtype))
    assert output.dtype == dtype
    weight = layer.linear.weight.float() + layer.delta().float()
    exact = X.float() @ weight.T + layer.linear.bias.float()
    # A few roundings of outputs of size 100.
    assert (output.float() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"linear": nn.Conv1d(2, 2, 1)}, TypeError, "linear must be a torch.nn.Linear"),
        ({"r": 0}, ValueError, "r must be an integer >= 1"),
        ({"alpha": 0.0}, ValueError, "alpha must be a finite number > 0"),
        ({"convention": "r"}, ValueError, "convention must be one of"),
        ({"init": "pissa"}, ValueError, "init must be one of"),
    ],
)
def test_bad_layers_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        LoRALinear(**{"linear": nn.Linear(2, 2), "r": 1} | arguments)


# Signal and drift


def moved(**lora):
    """Return a trained network and the state of its start."""
    model = perceptron(**lora)
    start = lora_init_state(model)
    train(model, torch.optim.Adam(trained(model), lr=1e-2), steps=20)
    return model, start


def test_signal_and_drift_are_norms_of_the_two_parts():
    model, start = moved()
    report = signal_drift(model, start)
    squares = np.zeros(3)
    for name in ("0", "2"):
        layer, row = model[int(name)], report.layers[name]
        s, A0 = layer.scale, start[f"{name}.A"]
        B, A = layer.lora_B.detach(), layer.lora_A.detach()
        exact = [s * B @ A0, s * B @ (A - A0), s * B @ A]
        norms = [float(matrix.norm()) for matrix in exact]
        assert [row.signal, row.drift, row.delta_norm] == pytest.approx(norms, rel=1e-10)
        assert row.drift_ratio == pytest.approx(norms[1] / norms[0], rel=1e-10)
        assert row.effective_scale == 1.0
        weight = float(layer.linear.weight.norm())
        assert row.relative_update == pytest.approx(norms[2] / weight, rel=1e-10)
        change = float((A - A0).norm() / A0.norm())
        assert row.relative_a_change == pytest.approx(change, rel=1e-10)
        squares += np.square(norms)
    total = report.total
    assert [total.signal, total.drift, total.delta_norm] == pytest.approx(np.sqrt(squares))
    assert "drift" in str(report)
    assert report.as_dict()["lora/signal"] == total.signal
    assert len(report.plot().patches) == 4


def test_peft_and_our_layer_have_the_same_drift():
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["0", "2"])
    model = with_peft(config)
    ours = perceptron()
    with torch.no_grad():
        for matrix, own in zip(lora_matrices(model), lora_matrices(ours), strict=True):
            matrix.weight.copy_(own.weight)
            matrix.A.copy_(own.A)
    starts = lora_init_state(model), lora_init_state(ours)
    for network in (model, ours):
        for matrix in lora_matrices(network):
            nn.init.normal_(matrix.B, generator=seeded(5))
            matrix.A.data.mul_(1.5)
    a, b = (signal_drift(m, s).total for m, s in zip((model, ours), starts, strict=True))
    assert a.drift_ratio == pytest.approx(0.5, rel=1e-12)
    assert (a.signal, a.delta_norm) == pytest.approx((b.signal, b.delta_norm), rel=1e-12)


def test_all_is_zero_at_the_start():
    model = perceptron()
    total = signal_drift(model, lora_init_state(model)).total
    assert (total.signal, total.drift, total.drift_ratio, total.delta_norm) == (0, 0, 0, 0)
    assert (total.relative_update, total.relative_a_change) == (0, 0)


def test_alpha_scales_both_parts_and_not_their_ratio():
    model, start = moved()
    before = signal_drift(model, start)
    for matrix in lora_matrices(model):
        matrix.rescale(2 * matrix.scale)
    after = signal_drift(model, start)
    assert after.total.signal == pytest.approx(2 * before.total.signal, rel=1e-12)
    assert after.total.drift == pytest.approx(2 * before.total.drift, rel=1e-12)
    assert after.total.drift_ratio == pytest.approx(before.total.drift_ratio, rel=1e-12)
    assert after.total.effective_scale == 2 * before.total.effective_scale


def test_a_fixed_a_does_not_drift():
    model = perceptron()
    start = lora_init_state(model)
    for i in (0, 2):
        model[i].lora_A.requires_grad_(False)
    train(model, torch.optim.Adam(trained(model), lr=1e-2), steps=5)
    total = signal_drift(model, start).total
    assert total.drift == 0 < total.signal


def test_a_signal_that_is_lost_has_an_infinite_ratio():
    model = perceptron(r=1, alpha=1.0)
    start = {
        k: torch.zeros_like(v) if k.endswith("A") else v for k, v in lora_init_state(model).items()
    }
    nn.init.ones_(model[0].lora_B)
    assert signal_drift(model, start).layers["0"].drift_ratio == math.inf


def test_adam_makes_drift_grow_with_lr_and_not_with_alpha():
    def ratio(alpha, lr):
        model = perceptron(alpha=alpha)
        start = lora_init_state(model)
        train(model, torch.optim.Adam(trained(model), lr=lr), steps=30)
        return signal_drift(model, start).total.drift_ratio

    base = ratio(1.0, 1e-3)
    assert ratio(16.0, 1e-3) <= 1.1 * base
    assert ratio(1.0, 1.6e-2) >= 5 * base


@pytest.mark.parametrize("form", ["tensor", "tuple", "mapping"])
def test_norms_over_inputs_are_root_mean_squares_of_outputs(form):
    model, start = moved()
    inputs = {"tensor": X, "tuple": (X,), "mapping": {"input": X}}[form]
    model.train()
    report = signal_drift(model, start, inputs=inputs)
    assert all(module.training for module in model.modules())
    hidden = torch.tanh(model[0](X))
    for name, x in (("0", X), ("2", hidden)):
        layer, row = model[int(name)], report.layers[name]
        s, B, A0 = layer.scale, layer.lora_B, start[f"{name}.A"]
        signal = (x @ (s * B @ A0).T).square().sum(1).mean().sqrt()
        drift = (x @ (s * B @ (layer.lora_A - A0)).T).square().sum(1).mean().sqrt()
        delta = (x @ layer.delta().T).square().sum(1).mean().sqrt()
        exact = [value.item() for value in (signal, drift, delta)]
        assert [row.signal, row.drift, row.delta_norm] == pytest.approx(exact, rel=1e-10)
        assert math.isnan(row.relative_update)


def test_inputs_of_a_layer_that_is_used_twice_are_pooled():
    layer = LoRALinear(nn.Linear(4, 4, bias=False).double(), 2, 2.0, generator=seeded(0))
    start = lora_init_state(nn.ModuleDict({"layer": layer}))
    nn.init.normal_(layer.lora_B, generator=seeded(1))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x, y):
            return self.layer(x).sum() + self.layer(y).sum()

    x, y = X[:3, :4], X[:9, 4:8]
    both = signal_drift(Twice(), start, inputs=(x, y)).total.signal
    joint = signal_drift(
        layer,
        {"A": start["layer.A"], "weight_norm": start["layer.weight_norm"]},
        inputs=torch.cat([x, y]),
    )
    assert both == pytest.approx(joint.total.signal, rel=1e-10)


def test_convolutions_and_embeddings_of_peft_have_signal_and_drift():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(11, 6)
            self.conv = nn.Conv1d(6, 4, 3)

        def forward(self, x):
            return self.conv(self.emb(x).mT)

    torch.manual_seed(0)
    model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["emb", "conv"]))
    start = lora_init_state(model)
    for matrix in lora_matrices(model):
        nn.init.normal_(matrix.B, generator=seeded(1))
        nn.init.normal_(matrix.A, generator=seeded(2))
    report = signal_drift(model, start)
    for matrix in lora_matrices(model):
        exact = matrix.module.get_delta_weight("default").norm().item()
        assert report.layers[matrix.name].delta_norm == pytest.approx(exact, rel=1e-5)
    with pytest.raises(ValueError, match="is no linear layer"):
        signal_drift(model, start, inputs=torch.zeros(2, 5, dtype=torch.long))


def test_a_quantized_weight_has_no_relative_update():
    model = perceptron()
    model[0].linear.weight = nn.Parameter(torch.zeros(9, 1, dtype=torch.uint8), requires_grad=False)
    start = lora_init_state(model)
    nn.init.ones_(model[0].lora_B)
    report = signal_drift(model, start)
    assert math.isnan(report.layers["0"].relative_update)
    assert report.layers["0"].signal > 0


def test_a_start_can_be_saved(tmp_path):
    model, start = moved()
    torch.save(start, tmp_path / "start.pt")
    loaded = torch.load(tmp_path / "start.pt", weights_only=True)
    assert signal_drift(model, loaded) == signal_drift(model, start)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda m, s: signal_drift(m),
            ValueError,
            "init_state must be given.*SignalDriftCallback",
        ),
        (lambda m, s: signal_drift(m, {}), ValueError, "'0.A' is missing"),
        (
            lambda m, s: signal_drift(m, s | {"0.A": torch.zeros(1, 12)}),
            ValueError,
            "'0.A' has shape",
        ),
        (lambda m, s: signal_drift(nn.Linear(2, 2), s), ValueError, "model must hold LoRA"),
        (lambda m, s: signal_drift("model", s), TypeError, "model must be a torch.nn.Module"),
        (
            lambda m, s: signal_drift(nn.ModuleList([m[0], m[2]]), {"0.A": 0}),
            ValueError,
            "init_state must come from",
        ),
    ],
)
def test_bad_requests_for_drift_are_refused(call, error, message):
    model, start = moved()
    with pytest.raises(error, match=message):
        call(model, start)


def test_an_adapter_that_inputs_do_not_reach_is_named():
    model, start = moved()

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("0", model[0])
            self.add_module("2", model[2])

        def forward(self, x):
            return self.get_submodule("0")(x)

    with pytest.raises(ValueError, match=r"they do not reach \['2'\]"):
        signal_drift(Half(), start, inputs=X)


def test_another_adapter_of_peft_is_found_by_its_name():
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["0"])
    model = with_peft(config)
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=8, target_modules=["2"]))
    (first,), (second,) = lora_matrices(model), lora_matrices(model, "second")
    assert (first.rank, second.rank, second.scale) == (4, 2, 4.0)
    assert signal_drift(model, lora_init_state(model, "second"), "second").total.signal == 0


# Spectral suppression


def test_the_block_of_a_linear_model_is_known_in_closed_form():
    """For a mean over one output the block is s² A XᵀX/n Aᵀ · 2, to 1e-5."""
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(12, 1, bias=False).double(), 4, 6.0, generator=seeded(0))
    nn.init.normal_(layer.lora_B, generator=seeded(1))

    def loss_fn(model, batch):
        return (model(batch) - 1).square().mean()

    report = spectral_suppression(layer, loss_fn, X, k=4, iters=12)
    moment = 2 * X.T @ X / len(X)
    A, s = layer.lora_A.detach(), layer.scale
    full = torch.linalg.eigvalsh(moment).flip(0)[:4]
    block = torch.linalg.eigvalsh(s**2 * A @ moment @ A.T).flip(0)
    assert report.full_eigenvalues == pytest.approx(full.numpy(), rel=1e-5)
    assert report.adapter_eigenvalues == pytest.approx(block.numpy(), rel=1e-5)
    assert report.ratio == pytest.approx(float(block[0] / full[0]), rel=1e-5)
    norm = float(torch.linalg.matrix_norm(A, 2))
    assert report.predicted_ratio == pytest.approx((s * norm) ** 2, rel=1e-10)
    assert report.mean_ratio == pytest.approx(s**2 * float(A.square().sum()) / 12, rel=1e-10)
    assert (report.full_errors < 1e-6).all()


def test_the_blocks_of_a_network_are_those_of_the_exact_hessian():
    model = perceptron(r=2, alpha=3.0)
    for i in (0, 2):
        nn.init.normal_(model[i].lora_B, std=0.3, generator=seeded(i))
    report = spectral_suppression(model, loss_of, (X, Y), k=3, iters=40)
    for names, found in (
        (("0.linear.weight", "2.linear.weight"), report.full_eigenvalues),
        (("0.lora_B", "2.lora_B"), report.adapter_eigenvalues),
    ):
        values = {name: model.get_parameter(name).detach() for name in names}
        sizes = [v.numel() for v in values.values()]

        def loss(flat, values=values, sizes=sizes):
            parts = flat.split(sizes)
            state = {k: p.view_as(v) for (k, v), p in zip(values.items(), parts, strict=True)}
            return nn.functional.cross_entropy(torch.func.functional_call(model, state, X), Y)

        flat = torch.cat([v.flatten() for v in values.values()])
        exact = torch.linalg.eigvalsh(torch.func.hessian(loss)(flat).detach()).flip(0)[:3]
        assert found == pytest.approx(exact.numpy(), rel=1e-4)
    assert report.ratio <= report.predicted_ratio


def test_peft_and_our_layer_have_the_same_spectrum():
    config = peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=0.5, target_modules=["0", "2"])
    model, ours = with_peft(config), perceptron()
    with torch.no_grad():
        for matrix, own in zip(lora_matrices(model), lora_matrices(ours), strict=True):
            for name in ("weight", "A", "B"):
                getattr(matrix, name).copy_(getattr(own, name))
            matrix.module.base_layer.bias.copy_(own.module.linear.bias)
    a, b = (spectral_suppression(m, loss_of, (X, Y)) for m in (model, ours))
    assert a.full_eigenvalues == pytest.approx(b.full_eigenvalues, rel=1e-8)
    assert a.ratio == pytest.approx(b.ratio, rel=1e-8)


def test_the_curvature_falls_threefold_for_alpha_equal_to_the_rank():
    """‖A‖² is at most (1 + √(r/d))²/3 up to fluctuations of d^(-2/3)."""
    layer = LoRALinear(nn.Linear(1024, 8), 8, 8.0, generator=seeded(0))
    x = torch.randn(64, 1024, generator=seeded(1))
    report = spectral_suppression(layer, lambda m, x: m(x).square().mean(), x, k=1, iters=5)
    assert report.predicted_ratio == pytest.approx((1 + math.sqrt(8 / 1024)) ** 2 / 3, rel=0.1)
    assert report.mean_ratio == pytest.approx(8 / (3 * 1024), rel=0.05)
    assert report.ratio < 1 / 3


def test_the_model_is_left_as_it_was():
    model = perceptron()
    model[2].lora_B.requires_grad_(False)
    model[1].eval()
    flags = [p.requires_grad for p in model.parameters()]
    modes = [m.training for m in model.modules()]
    state = copy.deepcopy(model.state_dict())
    stream = torch.get_rng_state()
    report = spectral_suppression(model, loss_of, (X, Y))
    assert flags == [p.requires_grad for p in model.parameters()]
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(stream, torch.get_rng_state())
    assert "ratio" in str(report)
    assert report.plot().get_yscale() == "log"


def test_a_flat_loss_has_no_ratio():
    layer = LoRALinear(nn.Linear(3, 1), 1, generator=seeded(0))
    report = spectral_suppression(layer, lambda m, x: m(x).mean(), torch.ones(2, 3))
    assert report.full_eigenvalues == pytest.approx([0])
    assert math.isnan(report.ratio)


def test_lanczos_finds_the_ends_of_a_spectrum():
    values = torch.linspace(-1, 2, 60, dtype=torch.float64)
    diagonal, off = lanczos(lambda v: values * v, torch.ones(60, dtype=torch.float64), 60)
    matrix = np.diag(diagonal) + np.diag(off[:-1], 1) + np.diag(off[:-1], -1)
    assert np.linalg.eigvalsh(matrix)[[0, -1]] == pytest.approx([-1, 2], abs=1e-10)
    # A start in an invariant subspace of dimension 2 exhausts it.
    start = torch.zeros(60, dtype=torch.float64)
    start[:2] = 1
    diagonal, off = lanczos(lambda v: values * v, start, 10)
    assert len(diagonal) == 2
    assert off[-1] == 0


def test_attention_can_be_differentiated_twice():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = LoRALinear(nn.Linear(8, 8), 2, 2.0, generator=seeded(0))

        def forward(self, x):
            q = self.q(x)[:, None]
            return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    x = torch.randn(2, 5, 8, generator=seeded(1))
    report = spectral_suppression(Attention(), lambda m, x: m(x).square().mean(), x, k=2)
    assert report.full_eigenvalues[0] > 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"k": 0}, ValueError, "k must be an integer >= 1"),
        ({"k": 5, "iters": 4}, ValueError, "iters must be an integer >= 5"),
        ({"model": nn.Linear(2, 2)}, ValueError, "model must hold LoRA"),
        ({"loss_fn": lambda m, b: m(X)}, ValueError, "loss_fn must return a scalar"),
        ({"loss_fn": lambda m, b: m(X).mean() / 0}, ValueError, "must be a finite number"),
    ],
)
def test_bad_requests_for_spectra_are_refused(changes, error, message):
    arguments = {"model": perceptron(), "loss_fn": loss_of, "batch": (X, Y)} | changes
    with pytest.raises(error, match=message):
        spectral_suppression(**arguments)


def test_merged_and_quantized_adapters_have_no_spectrum():
    merged = perceptron()
    merged[0].merge()
    with pytest.raises(ValueError, match="'0' is merged"):
        spectral_suppression(merged, loss_of, (X, Y))
    quantized = perceptron()
    quantized[0].linear.weight = nn.Parameter(torch.zeros(2, dtype=torch.uint8), False)
    with pytest.raises(TypeError, match="floating point, not so '0'"):
        spectral_suppression(quantized, loss_of, (X, Y))


# The scan


BATCHES = [(x, Y[:16]) for x in torch.randn(10, 16, 12, generator=seeded(7), dtype=torch.float64)]
TEACHER = torch.randn(12, 5, generator=seeded(8), dtype=torch.float64)
LEARNABLE = [(x, (x @ TEACHER).argmax(1)) for x, _ in BATCHES]


def scan(model=None, **changes):
    arguments = {"lr": 3e-3, "steps": 15, "generator": seeded(3)} | changes
    return find_coef(model or perceptron(), loss_of, LEARNABLE, **arguments)


def test_a_scan_is_what_training_by_hand_gives():
    model = perceptron()
    search = scan(model, coefs=[16.0, 64.0, 256.0, 512.0])
    for coef, loss in zip(search.coefs, search.losses, strict=True):
        copied = copy.deepcopy(model)
        for matrix in lora_matrices(copied):
            matrix.rescale(coef / 2)
        optimizer = torch.optim.AdamW(trained(copied), lr=3e-3, weight_decay=0.0)
        for step in range(15):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * (1 - step / 15)
            optimizer.zero_grad()
            loss_of(copied, LEARNABLE[step % 8]).backward()
            optimizer.step()
        with torch.no_grad():
            exact = np.mean([float(loss_of(copied, b)) for b in LEARNABLE[8:]])
        assert loss == pytest.approx(exact, rel=1e-10)
    assert search.alpha == search.coef * 2
    assert (search.r, search.lr, search.steps) == (4, 3e-3, 15)


def test_a_scan_finds_an_optimum_inside():
    search = scan(r=4)
    assert not search.on_edge
    assert search.losses.min() < 0.8 * search.start_loss
    low, high = search.flat
    assert low <= search.coef <= high
    assert search.center == math.sqrt(low * high)
    assert f"c = {search.coef:g}" in str(search)
    assert search.plot().get_xscale() == "log"


def test_a_scan_restores_everything_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(
        LoRALinear(nn.Linear(12, 16).double(), 2),
        nn.BatchNorm1d(16).double(),
        nn.Dropout(0.3),
        LoRALinear(nn.Linear(16, 5).double(), 4, 3.0),
    )
    model[1].eval()
    loss_of(model).backward()
    state = copy.deepcopy(model.state_dict())
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    scales = [matrix.scale for matrix in lora_matrices(model)]
    modes = [module.training for module in model.modules()]
    stream = torch.get_rng_state()
    search = scan(model, generator=None, coefs=[4.0, 16.0, 64.0, 4096.0])
    assert torch.equal(stream, torch.get_rng_state())
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad is None) == (grad is None)
        assert grad is None or torch.equal(p.grad, grad)
    assert scales == [matrix.scale for matrix in lora_matrices(model)]
    assert modes == [module.training for module in model.modules()]
    assert search.r is None
    assert math.isnan(search.alpha)
    # The same stream gives the same dropout, and the same result.
    again = scan(model, generator=None, coefs=[4.0, 16.0, 64.0, 4096.0])
    assert np.array_equal(search.losses, again.losses)


def test_a_scan_restores_the_model_after_an_error():
    model = perceptron()
    state = copy.deepcopy(model.state_dict())
    calls = []

    def failing(model, batch):
        calls.append(0)
        if len(calls) > 10:
            raise KeyError("batch")
        return loss_of(model, batch)

    with pytest.raises(KeyError):
        find_coef(model, failing, LEARNABLE, lr=1e-2)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert model[0].scale == 1.0


def test_a_scan_works_for_peft():
    model = with_peft(peft.LoraConfig(r=4, lora_alpha=4, target_modules=["0", "2"]))
    search = scan(model, held_out=LEARNABLE[8:])
    assert search.losses.min() < search.start_loss
    assert [m.scale for m in lora_matrices(model)] == [1.0, 1.0]


def test_runs_that_diverge_are_stopped():
    evaluated = []

    def counted(model, batch):
        if model.training:
            evaluated.append(0)
        return loss_of(model, batch)

    with pytest.warns(UserWarning, match="at an end of the grid"):
        search = find_coef(perceptron(), counted, LEARNABLE, lr=1e-2, coefs=[1.0, 1e9], steps=40)
    assert search.losses[1] == math.inf
    assert 40 < len(evaluated) < 60
    assert search.coef == 1.0
    assert len(search.plot().lines) == 3


def test_a_flat_optimum_is_a_run_around_the_best():
    coefs = 2.0 ** np.arange(6)
    losses = np.array([1.01, 1.5, 1.01, 1.0, 1.015, 1.03])
    search = CoefSearch(coefs, losses, 2.0, 4, 1e-3, 10)
    assert search.flat == (4.0, 16.0)
    assert search.center == 8.0
    for best, flat in ((0, (1.0, 1.0)), (5, (32.0, 32.0))):
        steep = np.full(6, 3.0)
        steep[best] = 1.0
        search = CoefSearch(coefs, steep, 2.0, 4, 1e-3, 10)
        assert search.flat == flat
        assert search.on_edge


def test_a_scan_warns_of_what_it_cannot_tell():
    with pytest.warns(UserWarning, match="less than a tenth of the planned 500"):
        scan(total_steps=500, steps=5)
    with pytest.warns(UserWarning, match="no coefficient has lowered"):
        scan(coefs=[1e6], steps=1, lr=1e-1)
    with pytest.warns(UserWarning, match="with SGD a k times larger scale"):
        scan(optimizer=torch.optim.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scan(optimizer=torch.optim.Adam, total_steps=100)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": nn.Linear(2, 2)}, ValueError, "model must hold LoRA"),
        ({"r": 3}, ValueError, r"r must be the rank of all adapters, got 3 for ranks \[4\]"),
        ({"r": 0}, ValueError, "r must be an integer"),
        ({"lr": 0}, ValueError, "lr must be a finite number > 0"),
        ({"coefs": []}, ValueError, "coefs must hold positive numbers"),
        ({"coefs": [0.0, 1.0]}, ValueError, "coefs must hold positive numbers"),
        ({"coefs": [math.nan]}, ValueError, "coefs must be finite"),
        ({"steps": 0}, ValueError, "steps must be an integer >= 1"),
        ({"total_steps": 0}, ValueError, "total_steps must be an integer >= 1"),
        ({"batches": LEARNABLE[:1]}, ValueError, "batches must hold at least 2"),
        ({"held_out": []}, ValueError, "batches and held_out must hold"),
        (
            {"loss_fn": lambda m, b: loss_of(m, b) * math.nan},
            ValueError,
            "the loss before training must be a finite number",
        ),
        ({"coefs": [1e12], "lr": 1.0, "steps": 20}, RuntimeError, "diverged with every"),
        ({"model": perceptron().requires_grad_(False)}, ValueError, "model must have parameters"),
    ],
)
def test_bad_scans_are_refused(changes, error, message):
    arguments = {"model": perceptron(), "loss_fn": loss_of, "batches": LEARNABLE, "lr": 1e-2}
    with pytest.raises(error, match=message):
        find_coef(**arguments | changes)
