"""Random guides: their depth, the spread of their weights, and what their features keep."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from thalweg.tasks import load_digits, uniform_points
from thalweg.training import random_guide
from thalweg.training.representation_similarity import effective_rank


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def linear(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


def target(inputs=2):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def test_the_guide_of_a_perceptron_is_deeper_wider_and_without_a_readout():
    guide = random_guide(target(10), generator=seeded())
    widths = [(layer.in_features, layer.out_features) for layer in linear(guide)]
    assert widths == [(10, 128)] + [(128, 128)] * 5
    assert isinstance(guide[-1], nn.ReLU)
    deeper = random_guide(target(10), depth_factor=1.6, width=7, generator=seeded())
    assert [layer.out_features for layer in linear(deeper)] == [7] * 4


def test_coordinates_get_a_chaotic_tanh_network_and_vectors_kaimings():
    chaotic = random_guide(target(3), gain=4, bias_std=0.3, width=400, generator=seeded())
    assert isinstance(chaotic[-1], nn.Tanh)
    for layer in linear(chaotic)[1:]:
        # Relative standard deviations of estimates from 400² weights and 400 biases: 0.2 %, 4 %.
        assert layer.weight.std().item() == pytest.approx(4 / 20, rel=0.01)
        assert layer.bias.std().item() == pytest.approx(0.3, rel=0.15)
    plain = random_guide(target(4), width=400, generator=seeded())
    for layer in linear(plain)[1:]:
        assert layer.weight.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.01)
        assert layer.bias.abs().max() == 0
    assert isinstance(random_guide(target(3), init="kaiming")[-1], nn.ReLU)
    assert isinstance(random_guide(target(9), init="chaotic_tanh")[-1], nn.Tanh)


def test_the_variance_of_relu_guides_is_kept_with_depth():
    x = torch.randn(500, 50, generator=seeded())
    guide = random_guide("vectors", in_shape=[50], depth=12, width=500, generator=seeded(1))
    after = guide(x).square().mean().item()
    # Weights of variance 2/n double the second moment, and ReLU halves it. At width n and depth L
    # its relative fluctuation is about √(5L/n) = 0.35.
    assert after == pytest.approx(x.square().mean().item(), rel=0.7)


def test_chaos_makes_directions_and_order_loses_them():
    points = uniform_points(400, seeded())

    def rank(gain):
        guide = random_guide("coordinates", gain=gain, depth=8, generator=seeded(1))
        return effective_rank(guide(points))

    assert rank(4.0) > 3 * rank(1.0)
    assert rank(1.0) < 3


def test_finer_patches_have_half_the_kernel_and_the_stride():
    coarse = nn.Sequential(
        nn.Conv2d(1, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    )
    before = copy.deepcopy(coarse.state_dict())
    guide = random_guide(coarse, generator=seeded())
    assert (guide[0].kernel_size, guide[0].stride) == ((2, 2), (2, 2))
    assert guide[2].weight.shape == coarse[2].weight.shape
    assert not torch.equal(guide[2].weight, coarse[2].weight)
    assert guide(torch.ones(1, 1, 16, 16)).shape[2:] == (8, 8)
    assert all(torch.equal(before[name], value) for name, value in coarse.state_dict().items())
    overlapping = nn.Sequential(nn.Sequential(nn.Conv1d(1, 8, 5, stride=4, padding=2)))
    finer = random_guide(overlapping, patch_factor=0.25, generator=seeded())
    assert (finer[0][0].kernel_size, finer[0][0].stride) == ((5,), (1,))
    assert random_guide(nn.Conv2d(1, 2, 2, stride=2), generator=seeded()).stride == (1, 1)


def test_image_guides_take_flat_images():
    guide = random_guide("images", in_shape=(1, 8, 8), generator=seeded())
    images = load_digits().train_images[:5]
    maps = guide(images)
    assert maps.shape == (5, 64, 4, 4)
    assert torch.equal(maps, guide(images.reshape(5, 1, 8, 8)))


def test_guides_are_frozen_and_drawn_from_the_generator_only():
    likes = (target(), "coordinates", nn.Sequential(nn.Conv2d(1, 4, 4, stride=4)))
    stream = torch.get_rng_state()
    for like in likes:
        first, second = (random_guide(like, generator=seeded(5)) for _ in range(2))
        for a, b in zip(first.parameters(), second.parameters(), strict=True):
            assert torch.equal(a, b)
            assert not a.requires_grad
        assert not first.training
    random_guide("images", in_shape=(1, 4, 4), generator=seeded())
    assert torch.equal(stream, torch.get_rng_state())


def test_the_dtype_is_the_targets():
    assert random_guide(target().double(), generator=seeded())[0].weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("like", "arguments", "error", "message"),
    [
        (3, {}, TypeError, "like must be a module or the name of a kind"),
        ("graphs", {}, ValueError, "like must be one of 'coordinates', 'vectors', 'images'"),
        (nn.Linear(2, 3), {}, ValueError, "like must have at least two linear layers"),
        (nn.Conv2d(1, 2, 3), {}, ValueError, "like must have a stride in its first convolution"),
        ("vectors", {}, ValueError, "in_shape must be 1 positive numbers"),
        ("images", {"in_shape": (1, 0, 8)}, ValueError, "in_shape must be 3 positive numbers"),
        ("images", {"in_shape": (1, 8, 8), "init": "chaotic_tanh"}, ValueError, "'kaiming' for a"),
        ("coordinates", {"init": "lsuv"}, ValueError, "init must be one of"),
        ("coordinates", {"gain": 0}, ValueError, "gain must be a finite number > 0"),
        ("coordinates", {"bias_std": -1}, ValueError, "bias_std must be a finite number >= 0"),
        ("coordinates", {"depth": 0}, ValueError, "depth must be an integer >= 1"),
        ("coordinates", {"width": 0}, ValueError, "width must be an integer >= 1"),
        ("coordinates", {"depth_factor": 0.5}, ValueError, "depth_factor must be .* >= 1"),
        ("coordinates", {"patch_factor": 1.0}, ValueError, "patch_factor must be .* > 0 and < 1"),
    ],
)
def test_bad_arguments_are_refused(like, arguments, error, message):
    with pytest.raises(error, match=message):
        random_guide(like, **arguments)
