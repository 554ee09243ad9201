"""DP-μP's rule: roles, spectral rates, initialization, and the optimizers it is for."""

from __future__ import annotations

import io
import math
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.tasks import load_digits, width_gpt, width_mlp, width_vit
from thalweg.training import (
    DPAdam,
    DPMuonOptimizer,
    dp_mup_init_,
    dp_mup_param_groups,
    matrix_sign,
    width_transfer_report,
)
from thalweg.training.dp_muon import momentum_noise
from thalweg.training.spectral_rates import PrivateUpdate, update_norm
from thalweg.training.width_roles import width_roles

MECHANISM = {"noise_multiplier": 1.0, "batch_size": 128}


def lrs(width, base=64, base_lr=1.0, model=width_mlp, **settings):
    groups = dp_mup_param_groups(
        model(width), base_lr, base_shapes=model(base), **(MECHANISM | settings)
    )
    return {group["name"]: group["lr"] for group in groups}


# The rule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
@pytest.mark.parametrize("rule", ["dp_mup", "mup", "uniform"])
@pytest.mark.parametrize("model", [width_mlp, width_vit, width_gpt])
def test_base_width_keeps_base_lr_exactly(optimizer, rule, model):
    assert set(lrs(64, base_lr=0.37, optimizer=optimizer, rule=rule, model=model).values()) == {
        0.37
    }


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_noise_regime_from_64_to_256(optimizer):
    rates = lrs(256, optimizer=optimizer, regime="noise")
    assert rates["2.weight"] == pytest.approx(0.5, rel=1e-12)
    assert rates["0.weight"] == pytest.approx((16 / 24) / (8 / 16), rel=1e-12)
    at_256 = math.sqrt(10 / 256) / (math.sqrt(10) + 16)
    at_64 = math.sqrt(10 / 64) / (math.sqrt(10) + 8)
    assert rates["4.weight"] == pytest.approx(at_256 / at_64, rel=1e-12)
    assert rates["4.weight"] == pytest.approx(0.2913, abs=5e-5)
    assert rates["2.bias"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "hidden", "inputs", "output", "bias"),
    [("sgd", 1.0, 4.0, 0.25, 4.0), ("adam", 0.25, 1.0, 0.25, 1.0), ("muon", 1.0, 2.0, 0.5, 1.0)],
)
def test_plain_mup(optimizer, hidden, inputs, output, bias):
    rates = lrs(256, optimizer=optimizer, rule="mup")
    assert [rates[k] for k in ("2.weight", "0.weight", "4.weight", "2.bias")] == pytest.approx(
        [hidden, inputs, output, bias], rel=1e-12
    )


def test_muon_rates_know_no_noise():
    for sigma in (0.0, 1.0, 100.0):
        rates = lrs(256, optimizer="muon", noise_multiplier=sigma)
        assert [rates[f"{k}.weight"] for k in (2, 0, 4)] == pytest.approx([1, 2, 0.5], rel=1e-12)


@pytest.mark.parametrize(("optimizer", "order"), [("sgd", (-0.5, 0, -1)), ("adam", (-0.5, 0, -1))])
def test_orders_of_the_noise_regime_at_large_width(optimizer, order):
    narrow, wide = 2**16, 2**20
    shapes = {n: {"input": (n, 64), "hidden": (n, n), "output": (10, n)} for n in (narrow, wide)}
    update = PrivateUpdate(optimizer, 0.0, 1.0)
    for role, slope in zip(("hidden", "input", "output"), order, strict=True):
        rate = {
            n: math.sqrt(np.divide(*shapes[n][role])) / update_norm(update, *shapes[n][role], True)
            for n in shapes
        }
        assert math.log2(rate[wide] / rate[narrow]) / 4 == pytest.approx(slope, abs=0.01)


def test_norm_of_adams_update_by_hand():
    """With β₁ = 0.8, momentum leaves a third of the noise: (0.4 + 0.3/3) / √(10⁻⁴ + 0.16/40000)."""
    update = PrivateUpdate("adam", clip=0.4, noise_std=0.01, beta1=0.8)
    assert update_norm(update, 100, 400, True) == pytest.approx(0.5 / math.sqrt(1.04e-4))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(("sigma", "regime"), [(1e-6, "signal"), (1e8, "noise")])
def test_auto_tends_to_its_limits(optimizer, sigma, regime):
    auto = lrs(512, optimizer=optimizer, noise_multiplier=sigma)
    limit = lrs(512, optimizer=optimizer, noise_multiplier=sigma, regime=regime)
    assert list(auto.values()) == pytest.approx(list(limit.values()), rel=1e-3)


def test_signal_regime_of_adam_is_mup_for_matrices():
    signal, mup = (lrs(256, optimizer="adam", **s) for s in ({"regime": "signal"}, {"rule": "mup"}))
    matrices = ["0.weight", "2.weight", "4.weight"]
    assert [signal[k] for k in matrices] == pytest.approx([mup[k] for k in matrices], rel=1e-12)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
def test_only_noise_per_lot_counts(optimizer):
    options = {"optimizer": optimizer}
    assert lrs(256, **options) == lrs(256, noise_multiplier=0.5, batch_size=64, **options)
    # The unit of the gradient does not matter either.
    scaled = lrs(256, max_grad_norm=7.0, **options)
    assert list(lrs(256, **options).values()) == pytest.approx(list(scaled.values()), rel=1e-12)


def test_groups_say_what_they_are():
    groups = dp_mup_param_groups(
        width_mlp(256), 0.1, optimizer="adam", betas=(0.8, 0.99), base_shapes=width_mlp(64),
        max_grad_norm=2.0, **MECHANISM,
    )  # fmt: skip
    hidden = groups[2]
    tau, clip = 2 / 128, 2 / math.sqrt(6)
    assert (hidden["name"], hidden["role"]) == ("2.weight", "hidden")
    assert (hidden["fan_in"], hidden["fan_out"]) == (256, 256)
    assert hidden["clip"] == pytest.approx(clip, rel=1e-12)
    assert hidden["snr_public"] == pytest.approx(clip / (tau * 32), rel=1e-12)
    assert groups[3]["snr_public"] == pytest.approx(clip / (tau * 16), rel=1e-12)
    assert hidden["betas"] == (0.8, 0.99)
    assert [g["role"] for g in groups[::2]] == ["input", "hidden", "output"]
    noiseless = dp_mup_param_groups(width_mlp(8), 0.1, noise_multiplier=0, batch_size=1)
    assert noiseless[0]["snr_public"] == math.inf


def test_muon_leaves_vectors_and_embeddings_to_adam():
    model, base = width_gpt(64), width_gpt(32)
    groups = dp_mup_param_groups(
        model, 0.1, optimizer="muon", fallback_lr=0.01, base_shapes=base, **MECHANISM
    )
    by_name = {g["name"]: g for g in groups}
    adam = {"embed.weight", "positions.weight"} | {n for n in by_name if n.endswith("bias")}
    adam |= {n for n in by_name if "norm" in n}
    assert {g["name"] for g in groups if not g["use_muon"]} == adam
    alone = dp_mup_param_groups(model, 0.01, optimizer="adam", base_shapes=base, **MECHANISM)
    assert {g["name"]: g["lr"] for g in alone if g["name"] in adam} == {
        g["name"]: g["lr"] for g in groups if g["name"] in adam
    }
    assert by_name["head.weight"]["lr"] == pytest.approx(0.1 / math.sqrt(2))


def test_snr_compensation():
    plain, more = (
        lrs(256, optimizer="muon", snr_compensation=compensate) for compensate in (False, True)
    )
    clip = 1 / math.sqrt(6)
    inverse = {n: (2 * math.sqrt(n) / 128) / clip for n in (64, 256)}
    expected = (1 + inverse[256]) / (1 + inverse[64])
    assert more["2.weight"] / plain["2.weight"] == pytest.approx(expected, rel=1e-12)
    assert more["2.bias"] == plain["2.bias"]


def test_debiased_second_moment_has_a_floor():
    clip, tau, n = 0.4, 0.01, 256
    plain = PrivateUpdate("adam", clip, tau)
    debiased = PrivateUpdate("adam", clip, tau, floor=0.1)
    ratio = update_norm(debiased, n, n, True) / update_norm(plain, n, n, True)
    signal, noise = clip**2 / n**2, tau**2
    root = math.sqrt(max(signal, 0.1 * noise))
    assert ratio == pytest.approx(math.sqrt(noise + signal) / root, rel=1e-12)
    assert lrs(256, optimizer="adam", debias_v=True) != lrs(256, optimizer="adam")


# Roles ------------------------------------------------------------------------------------------


def test_roles_of_a_transformer():
    layers = width_roles(width_vit(64), width_vit(32))
    roles = {layer.name: layer.role for layer in layers}
    assert roles["embed.linear.weight"] == "input"
    assert roles["positions.weight"] == "embedding"
    assert roles["blocks.0.attention.query.weight"] == "hidden"
    assert roles["blocks.0.norm1.weight"] == "vector"
    assert roles["head.weight"] == "output"
    tokens = {q.name: q for q in width_roles(width_gpt(64), width_gpt(32))}
    assert tokens["embed.weight"].role == "embedding"
    assert tokens["embed.weight"][3:] == (64, 1, 32, 1)


def test_roles_from_shapes_convolutions_and_conv1d():
    class Conv1D(nn.Module):
        """The linear layer of transformers' GPT-2."""

        def __init__(self, nf, nx):
            super().__init__()
            self.nf = nf
            self.weight = nn.Parameter(torch.zeros(nx, nf))

    def model(n):
        return nn.Sequential(nn.Conv2d(3, n, 5), nn.Conv2d(n, 2 * n, 3), Conv1D(10, 2 * n))

    shapes = {name: list(p.shape) for name, p in model(8).named_parameters()}
    layers = {q.name: q for q in width_roles(model(32), shapes)}
    assert layers["0.weight"][2:] == ("input", 32, 75, 8, 75)
    assert layers["1.weight"][2:] == ("hidden", 64, 288, 16, 72)
    assert layers["2.weight"][2:] == ("output", 10, 64, 10, 16)


def test_frozen_parameters_have_no_group():
    model = width_mlp(32)
    model[0].requires_grad_(False)
    groups = dp_mup_param_groups(model, 0.1, base_shapes=width_mlp(8), **MECHANISM)
    assert [g["name"] for g in groups] == ["2.weight", "2.bias", "4.weight", "4.bias"]
    assert groups[0]["clip"] == 0.5


def test_tied_embeddings_need_a_role():
    def tied(width):
        model = width_gpt(width)
        model.head.weight = model.embed.weight
        return model

    with pytest.raises(ValueError, match=r"roles must name a role for 'embed.weight'"):
        width_roles(tied(32), tied(16))
    as_output = {q.name: q for q in width_roles(tied(32), tied(16), readout="head")}
    assert as_output["embed.weight"][2:] == ("output", 256, 32, 256, 16)
    roles = {"embed.weight": "embedding"}
    as_table = {q.name: q for q in width_roles(tied(32), tied(16), roles)}
    assert as_table["embed.weight"][2:] == ("embedding", 32, 1, 16, 1)


def test_matrices_of_fixed_shape_keep_the_lr_with_a_warning():
    def model(n):
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, n), nn.Linear(n, 2))

    with pytest.warns(UserWarning, match=r"0\.weight: matrices of the same shape at both widths"):
        rates = lrs(32, base=8, model=model)
    assert rates["0.weight"] == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lrs(32, base=8, model=model, roles={"0.weight": "fixed"})
        dp_mup_param_groups(model(8), 0.1, **MECHANISM)


# Initialization ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [width_mlp, width_vit, width_gpt])
def test_initial_spectra_follow_the_target(model):
    """√(m/n)-scaled spectral norms of hidden layers are width-free: 2 for a square Gaussian."""
    for width in (64, 128, 512):
        wide = model(width)
        dp_mup_init_(wide, base_shapes=model(64), generator=torch.Generator().manual_seed(0))
        layers = width_roles(wide, model(64))
        for layer in layers:
            p = layer.parameter.detach()
            if layer.role == "hidden":
                m, n = layer.fan_out, layer.fan_in
                expected = 1 + math.sqrt(n / m)  # (√m + √n)/√n over √(m/n)
                got = float(torch.linalg.matrix_norm(p, 2)) / math.sqrt(m / n)
                assert got == pytest.approx(expected, rel=0.05)
            elif layer is layers[-1 if model is not width_mlp else -2]:  # also at the base width
                assert not p.any()
            elif layer.role == "embedding":
                assert float(p.std()) == pytest.approx(1, abs=0.05)
            elif layer.name.endswith("bias"):
                assert not p.any()
            elif layer.role == "vector":
                assert (p == 1).all()


def test_readout_and_attention_scale():
    model = width_vit(128, head_dim=32)
    generator = torch.Generator().manual_seed(0)
    dp_mup_init_(model, readout="mup", generator=generator)
    assert float(model.head.weight.detach().std()) == pytest.approx(1 / 128, rel=0.1)
    assert {block.attention.scale for block in model.blocks} == {1 / 32}
    model = width_vit(128, head_dim=32)
    dp_mup_init_(model, attention_scale=False)
    assert {block.attention.scale for block in model.blocks} == {32**-0.5}


def test_attention_out_of_reach_and_other_vectors():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.PReLU(), nn.Linear(8, 2))
    with pytest.warns(UserWarning, match=r"0 has no attribute scale or scaling"):
        dp_mup_init_(model)
    assert model[1].weight.item() == 0.25
    model = nn.Sequential(nn.Linear(4, 8))
    dp_mup_init_(model)
    assert not model[0].weight.any()


def test_same_generator_same_model():
    states = []
    for _ in range(2):
        model = width_vit(32)
        dp_mup_init_(model, generator=torch.Generator().manual_seed(3))
        states.append(model.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


# What it is for ---------------------------------------------------------------------------------


def rms_change_by_noise(width, rule, optimizer):
    """Return how much a step of pure noise in hidden weights changes pre-activations.

    Both in root mean square, the change over the features that the weights are applied to.
    """
    model = width_mlp(width)
    dp_mup_init_(model, generator=torch.Generator().manual_seed(0))
    groups = dp_mup_param_groups(
        model, 0.1, optimizer=optimizer, base_shapes=width_mlp(64), regime="noise", rule=rule,
        **MECHANISM,
    )  # fmt: skip
    stepper = (torch.optim.Adam if optimizer == "adam" else torch.optim.SGD)(groups)
    hidden = model[2].weight
    hidden.grad = torch.randn(width, width, generator=torch.Generator().manual_seed(1)) / 128
    features = model[:2](load_digits().train_images[:100]).detach()
    before = hidden.detach().clone()
    stepper.step()
    change = (hidden.detach() - before) @ features.T
    return float(change.square().mean().sqrt() / features.square().mean().sqrt())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_coordinate_check(optimizer):
    widths = [64, 128, 256, 512, 1024]
    ours = np.array([rms_change_by_noise(n, "dp_mup", optimizer) for n in widths])
    uniform = np.array([rms_change_by_noise(n, "uniform", optimizer) for n in widths])
    assert ours.max() / ours.min() < 1.2
    slope = np.polyfit(np.log(widths), np.log(uniform), 1)[0]
    assert slope == pytest.approx(0.5, abs=0.05)


def test_rule_is_fast():
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(1000)))
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        dp_mup_param_groups(model, 0.1, optimizer="adam", **MECHANISM)
        best = min(best, time.perf_counter() - start)
    # The target is 1 μs per parameter; tensors have 4 here, and 10 μs each are Python's.
    assert best < 0.1


# DP-Muon ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_heavy_ball_and_sign(nesterov):
    generator = torch.Generator().manual_seed(0)
    W = nn.Parameter(torch.randn(6, 9, generator=generator, dtype=torch.float64))
    expected, heavy_ball = W.detach().clone(), torch.zeros(6, 9, dtype=torch.float64)
    optimizer = DPMuonOptimizer([W], lr=0.1, momentum=0.9, nesterov=nesterov)
    for _ in range(4):
        W.grad = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        heavy_ball = 0.9 * heavy_ball + W.grad
        ahead = 0.9 * heavy_ball + W.grad if nesterov else heavy_ball
        expected -= 0.1 * matrix_sign(ahead)
        optimizer.step()
    torch.testing.assert_close(W.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_noise_in_the_momentum(nesterov):
    """v² is the sum of τ² times the squared weights of all gradients so far."""
    mu, tau = 0.8, 0.3
    for count in (1, 2, 7):
        weights = [(1 - mu) * mu**k for k in range(count)]
        if nesterov:
            weights = [mu * w for w in weights]
            weights[0] += 1 - mu
        expected = tau * math.sqrt(sum(w**2 for w in weights))
        got = momentum_noise(tau, mu, torch.tensor(float(count - 1)), nesterov)
        assert float(got) == pytest.approx(expected, rel=1e-6)


def test_bias_correction_removes_the_leading_order():
    """E msign(S + vZ) - msign(S) is of order v², and with the correction of order v⁴.

    One Newton-Schulz step is a smooth map at this scale; noise comes in pairs ±Z, so that odd
    orders cancel and 2000 draws are enough.
    """
    S = torch.diag(torch.tensor([1.0, 0.8, 0.6, 0.5], dtype=torch.float64))

    def bias(tau, corrected):
        generator, probes = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        noise = tau * torch.randn(2000, 4, 4, generator=generator, dtype=torch.float64)
        copies = [nn.Parameter(torch.zeros_like(S)) for _ in range(4000)]
        for W, Z in zip(copies, torch.cat([noise, -noise]), strict=True):
            W.grad = S + Z
        DPMuonOptimizer(
            copies, lr=1.0, momentum=0.0, ns_steps=1, bias_correction=corrected, noise_std=tau,
            generator=probes,
        ).step()  # fmt: skip
        steps = torch.stack([W.detach() for W in copies])
        return float((steps.mean(0) + matrix_sign(S, steps=1)).norm())

    assert bias(0.1, False) / bias(0.05, False) == pytest.approx(4, rel=0.1)
    assert bias(0.05, True) < 0.1 * bias(0.05, False)
    assert bias(0.1, True) < 0.2 * bias(0.1, False)


def test_bias_correction_needs_the_noise_and_keeps_its_state():
    W = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match="noise_std must be given for bias_correction, got None"):
        DPMuonOptimizer([W], bias_correction=True)
    groups = dp_mup_param_groups(nn.Sequential(nn.Linear(4, 3)), 0.1, optimizer="muon", **MECHANISM)
    optimizer = DPMuonOptimizer(groups, bias_correction=True, generator=torch.Generator())
    for group in groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer.step()
    assert optimizer.state[groups[0]["params"][0]]["step"] == 1
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copied = DPMuonOptimizer(groups, bias_correction=True)
    copied.load_state_dict(torch.load(file, weights_only=True))
    assert copied.state_dict()["state"][0]["step"] == 1
    assert copied.param_groups[0]["name"] == "0.weight"


def test_muon_skips_what_is_not_finite():
    W = nn.Parameter(torch.ones(3, 3))
    optimizer = DPMuonOptimizer([W])
    W.grad = torch.full((3, 3), math.nan)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert optimizer.n_skipped == 1
    assert (W == 1).all()


# DP-Adam ----------------------------------------------------------------------------------------


def test_adam_without_noise_is_adamw():
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(50, dtype=torch.float64)) for _ in range(2))
    settings = {"lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.1}
    optimizers = DPAdam([ours], **settings), torch.optim.AdamW([theirs], **settings)
    for _ in range(20):
        ours.grad = torch.randn(50, generator=generator, dtype=torch.float64)
        theirs.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    # The step count is float32 by PyTorch's convention, and so are the weights 1 - βᵗ.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-7)


def test_adam_subtracts_the_noise():
    """With constant |g|, v̂ = g² exactly, and the step is lr g / √max(g² - τ², γτ²)."""
    x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = DPAdam([x], lr=1.0, betas=(0.0, 0.9), noise_std=3.0, floor=0.25, maximize=True)
    x.grad = torch.tensor([5.0, 3.0], dtype=torch.float64)
    for _ in range(3):
        optimizer.step()
    expected = torch.tensor([5 / 4, 3 / 1.5], dtype=torch.float64)
    torch.testing.assert_close(x.detach(), 3 * expected, rtol=1e-6, atol=0)


# The report -------------------------------------------------------------------------------------


def digits():
    data = load_digits()
    return data.train_images[:256], data.train_labels[:256]


def small_report(**changes):
    settings = {
        "lrs": [2.0**k for k in range(-8, 1, 2)],
        "noise_multiplier": 1.0,
        "batch_size": 64,
        "steps": 12,
        "rules": ["uniform", "dp_mup"],
    }
    return width_transfer_report(width_mlp, [8, 64], digits(), **(settings | changes))


def test_report_is_reproducible_and_consistent():
    state = torch.random.get_rng_state()
    first, second = small_report(seeds=[0, 1]), small_report(seeds=[0, 1])
    assert torch.equal(torch.random.get_rng_state(), state)
    for rule in ("uniform", "dp_mup"):
        np.testing.assert_array_equal(first.losses[rule], second.losses[rule])
    # At the base width the rule changes nothing.
    np.testing.assert_array_equal(first.losses["uniform"][0], first.losses["dp_mup"][0])
    means = first.mean_losses("dp_mup")
    np.testing.assert_allclose(means, np.sqrt(first.losses["dp_mup"].prod(axis=2)))
    best = means.argmin(axis=1)
    np.testing.assert_array_equal(first.best_lrs("dp_mup"), first.lrs[best])
    np.testing.assert_allclose(first.transferred_losses("dp_mup"), means[:, best[0]])
    np.testing.assert_allclose(first.regrets("dp_mup"), means[:, best[0]] / means[[0, 1], best] - 1)
    assert first.shifts("dp_mup")[1] == math.log2(first.lrs[best[1]] / first.lrs[best[0]])
    assert str(first).count("\n") == 4


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
def test_report_with_other_optimizers_and_own_rules(optimizer):
    def mine(model, base, lr, **settings):
        return dp_mup_param_groups(model, lr / 2, base_shapes=base, **settings)

    def twice(model, base, lr, **settings):
        return dp_mup_param_groups(model, lr, base_shapes=base, **settings)

    report = small_report(optimizer=optimizer, rules={"mine": mine, "twice": twice}, automatic=True)
    halved = small_report(
        optimizer=optimizer, rules={"mine": mine, "twice": twice}, automatic=True,
        lrs=list(report.lrs / 2),
    )  # fmt: skip
    np.testing.assert_array_equal(report.losses["mine"], halved.losses["twice"])
    assert np.isfinite(report.losses["mine"]).all()


def test_report_of_divergence_and_plot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    report = small_report(lrs=[1e-2, 1e30], rules=["sp", "mup"], optimizer="sgd")
    assert np.isinf(report.losses["mup"][:, 1]).all()
    ax = report.plot()
    assert ax.get_title() == "mup"
    assert [line.get_label() for line in ax.lines][::2] == ["width 8", "width 64"]
    assert report.plot(ax, rule="sp") is ax
    matplotlib.pyplot.close("all")


def test_report_without_base_cannot_transfer():
    report = small_report(base_width=32)
    assert report.base_width == 32
    with pytest.raises(ValueError, match="widths must hold base_width=32"):
        report.transferred_losses("dp_mup")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lrs": []}, "lrs must hold at least one"),
        ({"lrs": [0.0]}, "lrs must be a finite number > 0"),
        ({"rules": ["best"]}, "rules must be one of 'sp', 'uniform', 'mup', 'dp_mup'"),
        ({"steps": 0}, "steps must be an integer >= 1"),
        ({"batch_size": 1000}, "batch_size must be an integer >= 1 and <= 256"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"base_width": 0}, "base_width must be an integer >= 1"),
        ({"seeds": []}, "seeds must hold at least one"),
    ],
)
def test_bad_report(changes, message):
    with pytest.raises(ValueError, match=message):
        small_report(**changes)


def test_bad_report_data():
    x, y = digits()
    settings = {"lrs": [0.1], "noise_multiplier": 1.0, "batch_size": 1, "steps": 1}
    with pytest.raises(ValueError, match="data must be equally many"):
        width_transfer_report(width_mlp, [8], (x, y[:-1]), **settings)
    with pytest.raises(ValueError, match="widths must hold at least one"):
        width_transfer_report(width_mlp, [], (x, y), **settings)


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"noise_multiplier": None}, ValueError, "noise_multiplier and batch_size must be given"),
        ({"batch_size": None}, ValueError, "noise_multiplier and batch_size must be given"),
        ({"noise_multiplier": -1}, ValueError, "noise_multiplier must be a finite number >= 0"),
        ({"batch_size": 0}, ValueError, "batch_size must be a finite number >= 1"),
        ({"noise_multiplier": 0, "regime": "noise"}, ValueError, 'must be > 0 for regime="noise"'),
        ({"regime": "both"}, ValueError, "regime must be one of"),
        ({"optimizer": "lion"}, ValueError, "optimizer must be one of"),
        ({"rule": "sp"}, ValueError, "rule must be one of"),
        ({"clip_scope": "layer"}, ValueError, "clip_scope must be one of"),
        ({"max_grad_norm": 0}, ValueError, "max_grad_norm must be a finite number > 0"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas\[1\] must be"),
        ({"betas": 0.9}, TypeError, "betas must be a pair"),
        ({"debias_v": True}, ValueError, 'debias_v is for optimizer="adam"'),
        ({"snr_compensation": True}, ValueError, 'snr_compensation is for optimizer="muon"'),
        ({"fallback_lr": 0.1}, ValueError, 'fallback_lr is for optimizer="muon"'),
        ({"base_shapes": [(3, 3)]}, TypeError, "base_shapes must be a module or a mapping"),
        ({"base_shapes": {"0.weight": (3, 3)}}, ValueError, r"0\.bias, 2\.bias, .*4\.weight$"),
        ({"roles": {"9.weight": "input"}}, ValueError, r"roles and readout must name .*9\.weight"),
        ({"readout": "head"}, ValueError, r"roles and readout must name .*head\.weight"),
        ({"roles": {"0.weight": "first"}}, ValueError, r"roles\['0.weight'\] must be one of"),
        ({"roles": {"0.weight": "vector"}}, ValueError, "does not fit a parameter of shape"),
        ({"roles": {"0.bias": "hidden"}}, ValueError, "does not fit a parameter of shape"),
    ],
)
def test_bad_groups(changes, error, message):
    with pytest.raises(error, match=message):
        dp_mup_param_groups(width_mlp(8), 0.1, **(MECHANISM | changes))


def test_bad_models():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        dp_mup_param_groups([], 0.1, **MECHANISM)
    with pytest.raises(ValueError, match="base_lr must be a finite number > 0"):
        dp_mup_param_groups(width_mlp(8), math.nan, **MECHANISM)
    mixing = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"BatchNorm in 1; use torch.nn.GroupNorm"):
        dp_mup_param_groups(mixing, 0.1, **MECHANISM)
    with pytest.raises(ValueError, match="model must have trainable parameters"):
        dp_mup_param_groups(nn.ReLU(), 0.1, **MECHANISM)
    with pytest.raises(ValueError, match=r"one of the two only: (\S+ ){5}and 3 more"):
        dp_mup_param_groups(
            width_mlp(8), 0.1, base_shapes={str(k): (1,) for k in range(2)}, **MECHANISM
        )
    base = {name: (*p.shape, 1) for name, p in width_mlp(8).named_parameters()}
    with pytest.raises(ValueError, match=r"base_shapes\['0.weight'\] must have 2 dimensions"):
        dp_mup_param_groups(width_mlp(8), 0.1, base_shapes=base, **MECHANISM)
    with pytest.raises(ValueError, match="readout must be one of"):
        dp_mup_init_(width_mlp(8), readout="one")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_std": -1.0}, "noise_std must be"),
        ({"floor": 0.0}, "floor must be"),
        ({"lr": -1.0}, "lr must be"),
        ({"eps": 0.0}, "eps must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"maximize": 1}, "maximize must be one of"),
    ],
)
def test_bad_adam(changes, message):
    with pytest.raises(ValueError, match=message):
        DPAdam([nn.Parameter(torch.zeros(2))], **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias_correction": 1}, "bias_correction must be one of"),
        ({"noise_std": -1.0}, "noise_std"),
    ],
)
def test_bad_muon(changes, message):
    with pytest.raises(ValueError, match=message):
        DPMuonOptimizer([nn.Parameter(torch.zeros(2, 2))], **changes)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (width_vit, {"width": 20}, "width must be a multiple of head_dim=16"),
        (width_vit, {"width": 16, "patch": 3}, "patch must divide 8"),
        (width_gpt, {"width": 16, "context": 0}, "context must be"),
        (width_mlp, {"width": 0}, "width must be"),
    ],
)
def test_bad_task_models(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(**arguments)
