"""Guide initialization: what it changes in the target, and what it must not touch."""

from __future__ import annotations

import copy
import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.tasks import load_digits, uniform_points
from thalweg.training import GuideLoss, guide_init, linear_cka, random_guide
from thalweg.training.layer_features import FeatureHooks, hidden_layers, pooled, trace
from thalweg.training.scale_matching import scales
from thalweg.training.unlabeled_batches import UnlabeledBatches, like_noise


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def perceptron(*widths, seed=0, activation=nn.ReLU):
    torch.manual_seed(seed)
    layers = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), activation()]
    return nn.Sequential(*layers[:-1])


def same_state(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def features(model, layer, inputs):
    hooks = FeatureHooks(model, [layer])
    with torch.no_grad():
        found = hooks(inputs)[layer]
    hooks.close()
    return found


POINTS = uniform_points(600, seeded(0))


@pytest.fixture(scope="module")
def coordinate_run():
    """A target aligned to a chaotic guide, with everything that must not change beside it."""
    target = perceptron(2, 64, 64, 1)
    guide = random_guide(target, generator=seeded(1))
    before = copy.deepcopy(guide.state_dict())
    torch.manual_seed(17)
    stream = torch.get_rng_state()
    report = guide_init(target, guide, POINTS, steps=150, lr=3e-3, tol=1.0, generator=seeded(2))
    assert torch.equal(stream, torch.get_rng_state())
    return report, guide, before


# What alignment does


def test_the_targets_geometry_becomes_the_guides(coordinate_run):
    report, guide, _ = coordinate_run
    assert report.pairs == (("1", "5"), ("3", "11"))
    assert (report.cka_after > report.cka_before).all()
    assert report.cka_after[1] > 0.92 > 0.85 > report.cka_before[1]
    assert report.loss_path[-1] < 0.5 * report.loss_path[0]
    fresh_points = uniform_points(400, seeded(9))
    found = linear_cka(
        features(report.target, "3", fresh_points), features(guide, "11", fresh_points)
    )
    # A batch that neither the fit nor the report has seen.
    assert found.item() == pytest.approx(report.cka_after[1], abs=0.02)


def test_a_linear_target_reaches_a_linear_guide():
    target = nn.Sequential(nn.Linear(8, 64), nn.Identity(), nn.Linear(64, 1))
    guide = nn.Linear(8, 32)
    nn.init.normal_(guide.weight, generator=seeded(0))
    data = torch.randn(800, 8, generator=seeded(1)) * torch.linspace(0.2, 2, 8)
    report = guide_init(
        target,
        nn.Sequential(guide),
        data,
        target_layers=["1"],
        guide_layers=["0"],
        steps=300,
        lr=1e-2,
        tol=0.999,
        generator=seeded(2),
    )
    assert report.cka_after[0] > 0.99


def test_a_copy_of_the_target_is_reached_before_the_first_step():
    target = perceptron(5, 32, 32, 1)
    fresh = copy.deepcopy(target.state_dict())
    data = torch.randn(200, 5, generator=seeded(0))
    report = guide_init(target, copy.deepcopy(target), data, generator=seeded(1))
    assert report.steps_run == 0
    assert report.loss_path == pytest.approx([0.0], abs=1e-5)
    assert same_state(target.state_dict(), fresh)
    assert same_state(report.fresh_init_state, fresh)


def test_no_steps_leave_the_target_and_report_the_similarity():
    target = perceptron(2, 32, 1)
    fresh = copy.deepcopy(target.state_dict())
    guide = random_guide(target, generator=seeded(0))
    report = guide_init(target, guide, POINTS, steps=0, generator=seeded(1))
    assert same_state(target.state_dict(), fresh)
    assert np.array_equal(report.cka_before, report.cka_after)
    assert len(report.loss_path) == report.steps_run == 0


def test_the_same_seed_gives_the_same_network():
    states = []
    for _ in range(2):
        target = perceptron(2, 32, 1)
        guide = random_guide(target, generator=seeded(3))
        guide_init(target, guide, POINTS, steps=10, generator=seeded(4))
        states.append(target.state_dict())
    assert same_state(*states)
    assert not torch.equal(states[0]["0.weight"], perceptron(2, 32, 1)[0].weight)


def test_it_stops_when_all_pairs_have_reached_tol():
    target = perceptron(2, 64, 1)
    guide = random_guide(target, depth=3, width=256, generator=seeded(0))
    report = guide_init(target, guide, POINTS, steps=300, lr=1e-2, tol=0.9, generator=seeded(1))
    assert 0 < report.steps_run < 300
    assert len(report.loss_path) == report.steps_run + 1
    assert 1 - report.loss_path[-1] >= 0.9 > 1 - report.loss_path[-2]


@pytest.mark.parametrize("similarity", ["cka", "rbf_cka", "rsa", "procrustes"])
def test_every_similarity_brings_cka_closer(similarity):
    target = perceptron(2, 32, 32, 1)
    guide = random_guide(target, generator=seeded(0))
    report = guide_init(
        target,
        guide,
        POINTS,
        similarity=similarity,
        steps=60,
        lr=3e-3,
        batch_size=128,
        generator=seeded(1),
    )
    assert report.loss_path[-1] < report.loss_path[0]
    if similarity != "rsa":  # correlations of entries do not see distances
        assert report.cka_after[-1] > report.cka_before[-1] + 0.02


# What it must not touch


def test_guide_and_random_stream_stay_as_they_are(coordinate_run):
    _, guide, before = coordinate_run
    assert same_state(guide.state_dict(), before)
    assert all(p.grad is None for p in guide.parameters())


def test_the_readout_stays_fresh(coordinate_run):
    report, _, _ = coordinate_run
    for name in ("4.weight", "4.bias"):
        assert torch.equal(report.target.state_dict()[name], report.fresh_init_state[name])
    assert all(p.grad is None and p.requires_grad for p in report.target.parameters())


def test_labels_are_never_touched():
    class Label:
        def __getattr__(self, name):
            raise AssertionError(f"the label's {name} was asked for")

        def __len__(self):
            raise AssertionError("the label's length was asked for")

    class Loader:
        def __iter__(self):
            return iter([(part, Label()) for part in POINTS.split(100)])

    target = perceptron(2, 32, 1)
    guide = random_guide(target, generator=seeded(0))
    report = guide_init(target, guide, Loader(), steps=20, batch_size=150, lr=3e-3)
    assert report.cka_after[0] > report.cka_before[0]


def test_frozen_modules_stay_and_head_is_frozen_by_default():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = perceptron(2, 16, 16), nn.Sequential(nn.Linear(16, 4), nn.ReLU())

        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

    target = Named()
    guide = random_guide("coordinates", depth=4, width=64, generator=seeded(0))
    fresh = copy.deepcopy(target.state_dict())
    guide_init(target, guide, POINTS, steps=5, generator=seeded(1))
    assert torch.equal(target.head[0].weight, fresh["head.0.weight"])
    assert not torch.equal(target.body[0].weight, fresh["body.0.weight"])
    guide_init(target, guide, POINTS, steps=5, freeze=["body.0"], generator=seeded(1))
    after = target.state_dict()
    guide_init(target, guide, POINTS, steps=5, freeze=["body.0"], generator=seeded(1))
    assert torch.equal(target.body[0].weight, after["body.0.weight"])
    assert not torch.equal(target.head[0].weight, fresh["head.0.weight"])


def test_batch_norm_uses_the_batch_and_its_running_statistics_stay():
    torch.manual_seed(0)
    data = torch.randn(600, 6, generator=seeded(0))
    target = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
    guide = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh())
    with torch.no_grad():
        guide[1].running_mean.fill_(1e3)
    before = copy.deepcopy(guide.state_dict()), copy.deepcopy(target.state_dict())
    target.train()
    report = guide_init(target, guide, data, steps=20, lr=3e-3, generator=seeded(1))
    assert report.cka_before[0] > 0.3  # with the running mean all units are saturated alike
    assert same_state(guide.state_dict(), before[0])
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(target.state_dict()[name], before[1][name])
    assert target.training
    assert target[1].training
    with pytest.raises(ValueError, match="guide layer 2 is constant at init"):
        guide_init(target, guide, data, steps=1, guide_reset=False)


# Scale


@pytest.mark.parametrize("what", ["features", "preactivations"])
def test_the_scale_is_that_of_the_fresh_network(what):
    target = perceptron(2, 64, 64, 1)
    fresh = copy.deepcopy(target)
    guide = random_guide(target, generator=seeded(1))
    report = guide_init(
        target, guide, POINTS, steps=60, lr=3e-3, match_scale=what, generator=seeded(2)
    )
    assert report.scale_before.keys() == {"1", "3"}
    for layer, before in report.scale_before.items():
        assert report.scale_after[layer] == pytest.approx(before, rel=1e-4)
    points = uniform_points(4000, seeded(5))
    for hidden in ("1", "3"):
        name = hidden if what == "features" else str(int(hidden) - 1)
        aligned, first = (features(m, name, points) for m in (target, fresh))
        if what == "features":
            aligned, first = aligned - aligned.mean(0), first - first.mean(0)
        ratio = aligned.square().mean().sqrt() / first.square().mean().sqrt()
        # Another batch than the one of 150 points that was matched: a sampling error remains.
        assert ratio.item() == pytest.approx(1, abs=0.08)


@pytest.mark.parametrize("between", [(), (nn.Dropout(0.3),), (nn.Identity(), nn.ReLU())])
@pytest.mark.parametrize("what", ["features", "preactivations"])
def test_matching_the_scale_changes_relu_features_by_a_factor(between, what):
    results = []
    for match_scale in (False, what):
        torch.manual_seed(0)
        target = nn.Sequential(
            nn.Linear(2, 32), nn.ReLU(), *between, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
        ).double()
        guide = random_guide(target, depth=6, generator=seeded(0))
        last = str(len(target) - 2)
        report = guide_init(
            target,
            guide,
            POINTS.double(),
            steps=40,
            lr=1e-2,
            match_scale=match_scale,
            target_layers=["1", last],
            generator=seeded(1),
        )
        results.append(report)
    plain, matched = (r.target.eval() for r in results)
    a, b = features(plain, last, POINTS.double()), features(matched, last, POINTS.double())
    factor = (a * b).sum() / (a * a).sum()
    assert factor > 0
    assert torch.allclose(b, factor * a, rtol=1e-9, atol=1e-12)
    for layer, before in results[1].scale_before.items():
        assert results[1].scale_after[layer] == pytest.approx(before, rel=1e-9)
    # Without the match the scale has moved, so the test says something.
    assert abs(results[0].scale_after[last] / results[0].scale_before[last] - 1) > 0.01
    assert np.allclose(results[0].cka_after, results[1].cka_after, atol=1e-12)


def test_convolutions_and_pools_keep_their_geometry_too():
    torch.manual_seed(0)
    target = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    other = copy.deepcopy(target)
    images = load_digits().train_images[:400]
    guide = random_guide("images", in_shape=(1, 8, 8), generator=seeded(0))
    settings = {"steps": 30, "lr": 1e-2, "batch_size": 64}
    guide_init(target, guide, images, generator=seeded(1), **settings)
    guide_init(other, guide, images, generator=seeded(1), match_scale=False, **settings)
    a, b = (features(m, "5", images) for m in (other, target))
    factor = (a * b).sum() / (a * a).sum()
    assert torch.allclose(b, factor * a, rtol=1e-3, atol=1e-5)


def test_tanh_layers_are_scaled_one_after_the_other():
    target = perceptron(2, 32, 32, 1, activation=nn.Tanh)
    guide = random_guide("coordinates", depth=4, width=64, generator=seeded(0))
    report = guide_init(target, guide, POINTS, steps=30, lr=1e-2, generator=seeded(1))
    for layer, before in report.scale_before.items():
        assert report.scale_after[layer] == pytest.approx(before, rel=1e-4)


def test_a_residual_stream_has_no_single_producer_but_its_last_norm_is_one():
    def block(norm_first):
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
        )

    class Model(nn.Module):
        def __init__(self, norm_first):
            super().__init__()
            self.blocks, self.head = nn.Sequential(block(norm_first)), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.blocks(x).mean(1))

    tokens = torch.randn(64, 4, 8, generator=seeded(0))
    for norm_first, names in ((False, ["blocks.0"]), (True, [])):
        model = Model(norm_first).eval()
        assert list(scales(trace(model, tokens), ["blocks.0"], "features")) == names
        norm = model.blocks[0].norm2.weight.clone()
        report = guide_init(
            model, Model(norm_first), tokens, pool="mean", steps=3, tol=1.0, batch_size=32
        )
        assert report.pairs == (("blocks.0", "blocks.0"),)
        assert list(report.scale_after) == names
        # Adam moves an entry by about lr in each of 3 steps; the match multiplies all.
        assert torch.allclose(model.blocks[0].norm2.weight, norm, atol=0.05)


# Layers, pairs and data


@pytest.mark.parametrize(
    ("depth", "pairing", "expected"),
    [
        (2, "proportional", [(1, 1), (3, 3)]),
        (3, "proportional", [(1, 3), (3, 5)]),
        (5, "proportional", [(1, 5), (3, 9)]),
        (5, "last", [(3, 9)]),
        (1, "proportional", [(1, 1), (3, 1)]),
    ],
)
def test_layers_are_paired_by_relative_depth(depth, pairing, expected):
    target = perceptron(2, 16, 16, 1)
    guide = random_guide("coordinates", depth=depth, width=32, gain=8, generator=seeded(0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the guide's features have effective ranks")
        report = guide_init(target, guide, POINTS, steps=0, pairing=pairing)
    assert report.pairs == tuple((str(t), str(g)) for t, g in expected)


def test_a_module_that_is_called_twice_counts_at_its_last_call():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.a, self.b = nn.ReLU(), nn.Linear(2, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.relu(self.b(self.relu(self.a(x))))

    model = Shared()
    assert hidden_layers("target_layers", model, POINTS) == ["relu"]
    assert torch.equal(features(model, "relu", POINTS), model(POINTS))
    calls = trace(model, POINTS)
    scale = scales(calls, ["relu"], "preactivations")["relu"]
    assert scale == next(call.rms for call in calls if call.name == "b")


def test_fine_maps_are_averaged_over_the_targets_cells():
    maps = torch.arange(2 * 3 * 4 * 4.0).reshape(2, 3, 4, 4)
    cells = maps.reshape(2, 3, 2, 2, 2, 2).mean((3, 5)).flatten(1)
    assert torch.equal(pooled("a", maps, "grid", (2, 2)), cells)
    tokens = maps.flatten(2).transpose(1, 2)
    assert torch.equal(pooled("a", tokens, "grid", (2, 2)), cells)
    assert torch.equal(pooled("a", maps, "mean"), maps.mean((2, 3)))
    assert torch.equal(pooled("a", tokens, "mean"), maps.mean((2, 3)))
    assert torch.equal(pooled("a", maps, "grid", None), maps.mean((2, 3)))
    assert torch.equal(pooled("a", maps, "flatten"), maps.flatten(1))
    with pytest.raises(ValueError, match=r"square number of tokens, got .* from layer 'a'"):
        pooled("a", tokens[:, :5], "grid", (2, 2))


def test_a_finer_guide_lends_its_geometry_to_patches():
    torch.manual_seed(0)
    target = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    guide = random_guide(target, generator=seeded(0))
    images = load_digits().train_images[:500].reshape(-1, 1, 8, 8)
    report = guide_init(
        target, guide, images, pool="grid", steps=60, lr=1e-2, batch_size=128, generator=seeded(1)
    )
    assert report.cka_after[0] > report.cka_before[0]


def test_kept_features_are_those_that_a_function_would_give():
    """A tensor's guide features are computed once; the batches and the result are the same."""
    states = []
    for kept in (2**26, 0):
        target = perceptron(2, 32, 1)
        guide = random_guide(target, depth=3, generator=seeded(0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("thalweg.training.paired_features.KEPT_NUMBERS", kept)
            guide_init(target, guide, POINTS, steps=8, batch_size=150, generator=seeded(1))
        states.append(target.state_dict()["0.weight"])
    # Only the grouping of the guide's rows differs, and with it float32 rounding, which Adam
    # spreads where gradients are small.
    assert torch.allclose(*states, atol=1e-4)


def test_held_out_rows_are_in_no_batch():
    rows = torch.arange(100.0)[:, None].repeat(1, 2)
    batches = UnlabeledBatches(rows, 32, seeded(0), torch.device("cpu"))
    held = set(batches.held_out[:, 0].tolist())
    assert len(held) == 25
    for _ in range(30):
        drawn = batches.draw()[:, 0].tolist()
        assert len(set(drawn)) == len(drawn) == 32
        assert not held & set(drawn)


def test_a_loader_gives_batches_of_the_size_that_is_asked_for():
    loader = [torch.arange(i, i + 10.0)[:, None] for i in range(0, 30, 10)]
    batches = UnlabeledBatches(loader, 12, None, torch.device("cpu"))
    rows = torch.cat([batches.held_out, batches.draw(), batches.draw(), batches.draw()])[:, 0]
    assert rows.tolist() == [float(i % 30) for i in range(48)]


def test_noise_has_the_datas_moments_and_no_more():
    data = torch.randn(4000, 2, generator=seeded(0)) @ torch.tensor([[1.0, 2.0], [0.0, 0.5]]) + 3
    batches = UnlabeledBatches(data, 1000, None, torch.device("cpu"))
    noise = like_noise(batches)(20_000, seeded(1))
    assert torch.allclose(noise.mean(0), batches.held_out.mean(0), atol=0.05)
    assert torch.allclose(noise.std(0), batches.held_out.std(0), rtol=0.03)
    assert abs(torch.corrcoef(noise.T)[0, 1]) < 0.03 < torch.corrcoef(data.T)[0, 1]
    target = perceptron(2, 32, 1)
    guide = random_guide(target, generator=seeded(0))
    report = guide_init(
        target, guide, POINTS, noise_inputs=True, steps=40, lr=3e-3, generator=seeded(2)
    )
    assert report.cka_after[0] > report.cka_before[0]


def test_data_may_be_a_function_and_the_guide_in_half_precision():
    sizes = []

    def draw(size, generator):
        sizes.append(size)
        return uniform_points(size, generator)

    target = perceptron(2, 32, 1)
    guide = random_guide(target, generator=seeded(0))
    report = guide_init(
        target,
        guide,
        draw,
        steps=30,
        batch_size=64,
        lr=3e-3,
        optimizer=torch.optim.AdamW,
        guide_dtype=torch.bfloat16,
        generator=seeded(1),
    )
    assert sizes == [64] * 31
    assert guide[0].weight.dtype == target[0].weight.dtype == torch.float32
    assert report.cka_after[0] > report.cka_before[0]


def test_ctrl_c_keeps_what_was_reached():
    calls = []

    def draw(size, generator):
        calls.append(size)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return uniform_points(size, generator)

    target = perceptron(2, 16, 1)
    report = guide_init(target, random_guide(target, generator=seeded(0)), draw, batch_size=32)
    assert report.steps_run == 3


def test_the_report_prints_and_plots(coordinate_run):
    report, _, _ = coordinate_run
    assert "150 steps" in str(report)
    assert "3 ← 11" in str(report)
    ax = report.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["1 ← 5", "3 ← 11"]
    assert report.weight_norm_before.keys() == report.weight_norm_after.keys()
    assert report.guide_rank[0] > 3


# Bad input


def test_the_target_is_fresh_again_when_the_loss_is_not_finite():
    target = perceptron(2, 16, 1)
    fresh = copy.deepcopy(target.state_dict())
    guide = random_guide(target, generator=seeded(0))
    with pytest.raises(RuntimeError, match=r"the loss is nan after 1 updates; .* lower lr"):
        guide_init(target, guide, POINTS, steps=5, lr=1e30, optimizer="sgd")
    assert same_state(target.state_dict(), fresh)
    calls = []

    def draw(size, generator):
        calls.append(size)
        return uniform_points(size, generator) * (math.nan if len(calls) == 4 else 1)

    with pytest.raises(ValueError, match="data must be finite"):
        guide_init(target, guide, draw, steps=5)
    assert same_state(target.state_dict(), fresh)


def test_constant_features_are_refused_by_name():
    target = perceptron(2, 16, 1)
    dead = random_guide("coordinates", depth=2, width=16)
    with torch.no_grad():
        dead[2].weight.zero_()
    message = "guide layer 3 is constant at init: use gain-preserving init or an earlier layer"
    with pytest.raises(ValueError, match=message):
        guide_init(target, dead, POINTS)
    guide = random_guide(target)
    with torch.no_grad():
        target[0].weight.zero_()
    with pytest.raises(ValueError, match="target layer 1 is constant at init"):
        guide_init(target, guide, POINTS)
    with torch.no_grad():
        target[0].weight.fill_(math.inf)
    with pytest.raises(ValueError, match="target layer 1 is not finite"):
        guide_init(target, guide, POINTS)


def test_a_guide_of_few_directions_is_warned_of():
    target = perceptron(2, 16, 1)
    guide = random_guide(target, depth=1, gain=0.1, generator=seeded(0))
    with pytest.warns(UserWarning, match="effective ranks .*, all below 3"):
        guide_init(target, guide, POINTS, steps=1)


def test_a_guide_that_has_been_trained_is_refused():
    target = perceptron(2, 16, 1)
    guide = random_guide("coordinates", generator=seeded(0))
    guide.trained = True
    with pytest.raises(ValueError, match="guide must be untrained"):
        guide_init(target, guide, POINTS, steps=1)
    guide_init(target, guide, POINTS, steps=1, allow_trained_guide=True)
    guide = perceptron(2, 16, 16, 1)
    guide(POINTS).sum().backward()
    with pytest.raises(ValueError, match="guide must be untrained"):
        guide_init(target, guide, POINTS, steps=1)


def test_dropout_in_the_guide_is_warned_of_and_switched_off():
    target = perceptron(2, 16, 1)
    guide = nn.Sequential(*random_guide("coordinates", width=32, generator=seeded(0)))
    guide.append(nn.Dropout(0.5)).append(nn.Tanh()).train()
    with pytest.warns(UserWarning, match="guide is in training mode and has dropout"):
        first = guide_init(target, guide, POINTS, steps=0, generator=seeded(0))
    assert guide.training
    with pytest.warns(UserWarning, match="dropout"):
        second = guide_init(target, guide, POINTS, steps=0, generator=seeded(0))
    assert np.array_equal(first.cka_before, second.cka_before)


BAD = [
    ({"steps": -1}, ValueError, "steps must be an integer >= 0"),
    ({"batch_size": 3}, ValueError, "batch_size must be an integer >= 4"),
    ({"lr": 0.0}, ValueError, "lr must be a finite number > 0"),
    ({"tol": 1.5}, ValueError, "tol must be a finite number > 0 and <= 1"),
    ({"pairing": "all"}, ValueError, "pairing must be one of"),
    ({"match_scale": "norms"}, ValueError, "match_scale must be one of"),
    ({"pool": "max"}, ValueError, "pool must be one of"),
    ({"similarity": "cca"}, ValueError, "similarity must be one of"),
    ({"optimizer": "lion"}, ValueError, "optimizer must be one of"),
    ({"optimizer": 3}, TypeError, "optimizer must be a name or callable"),
    ({"target_layers": ["9"]}, ValueError, r"target_layers must be .* the candidates are 0, 1, 2"),
    ({"guide_layers": []}, ValueError, "guide_layers must be names of modules"),
    ({"guide_layers": "1"}, TypeError, "guide_layers must be a sequence of names"),
    ({"freeze": ["body"]}, ValueError, "freeze must be names of modules"),
    ({"freeze": ["0", "2"]}, ValueError, "target must have parameters that require gradients"),
    ({"data": POINTS[:7]}, ValueError, r"data must have shape \(n, ...\) with n >= 8"),
    ({"data": POINTS[:, 0]}, ValueError, "data must have shape"),
    ({"data": POINTS * math.inf}, ValueError, "data must be finite"),
    ({"data": 3}, TypeError, "data must be a tensor, an iterable"),
    ({"data": [POINTS[:5]]}, ValueError, "data must have at least batch_size=256 rows"),
    ({"data": [{"x": POINTS}]}, TypeError, "data must give tensors, or tuples"),
    ({"data": lambda b, g: 1}, TypeError, "data must give tensors of inputs"),
    ({"data": lambda b, g: POINTS[:2]}, ValueError, r"data must give batches of shape"),
    ({"data": POINTS.long(), "noise_inputs": True}, TypeError, "data must hold real numbers"),
    ({"target": "mlp"}, TypeError, "target must be a torch.nn.Module"),
    ({"target": nn.ReLU()}, ValueError, "target must have parameters"),
    ({"target": nn.Linear(2, 3)}, ValueError, "target_layers must name layers, as no activation"),
    ({"guide": "mlp"}, TypeError, "guide must be a torch.nn.Module"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD)
def test_bad_arguments_are_refused(changes, error, message):
    target = perceptron(2, 16, 1)
    guide = random_guide("coordinates", generator=seeded(0))
    arguments = {"target": target, "guide": guide, "data": POINTS} | changes
    with pytest.raises(error, match=message):
        guide_init(**arguments)


def test_layers_that_are_not_used_are_refused():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Sequential(nn.Linear(2, 8), nn.ReLU()), nn.ReLU()

        def forward(self, x):
            return self.used(x)

    guide = random_guide("coordinates", width=16)
    with pytest.raises(ValueError, match=r"layers must be used .* these are not: \['idle'\]"):
        guide_init(Idle(), guide, POINTS, target_layers=["idle"])


# The loss


def test_the_loss_is_one_minus_the_weighted_similarity():
    X, Y = (torch.randn(40, 6, generator=seeded(i)).double() for i in range(2))
    loss = GuideLoss([("a", "c"), ("b", "c")], weights=[0.3, 0.7])
    total, per_pair = loss({"a": X, "b": Y}, {"c": Y})
    assert per_pair[1].item() == pytest.approx(1, abs=1e-12)
    assert per_pair[0].item() == pytest.approx(linear_cka(X, Y).item(), abs=1e-12)
    assert total.item() == pytest.approx(0.3 * (1 - per_pair[0].item()), abs=1e-12)


@pytest.mark.parametrize("similarity", ["cka", "rsa", "procrustes"])
@pytest.mark.parametrize("features", [5, 30])
@pytest.mark.parametrize("debiased", [True, False])
def test_the_gradient_is_that_of_finite_differences(similarity, features, debiased):
    X = torch.randn(12, features, generator=seeded(0)).double().requires_grad_()
    Y = torch.randn(12, 4, generator=seeded(1)).double()
    loss = GuideLoss([("a", "b")], similarity, debiased=debiased)
    assert torch.autograd.gradcheck(lambda x: loss({"a": x}, {"b": Y})[0], (X,), rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": []}, "pairs must hold at least one"),
        ({"pairs": [("a", "b")], "similarity": "svcca"}, "similarity must be one of"),
        ({"pairs": [("a", "b")], "weights": [0.0]}, "weights must be one number"),
        ({"pairs": [("a", "b")], "weights": [1.0, 1.0]}, "weights must be one number"),
        ({"pairs": [("a", "b")], "weights": [-1.0]}, "weights must be a finite number >= 0"),
    ],
)
def test_bad_losses_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        GuideLoss(**arguments)
