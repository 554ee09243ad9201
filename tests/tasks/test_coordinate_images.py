"""Photographs as functions of coordinates: pixels at their places, standardized."""

import numpy as np
import pytest
import torch
from sklearn import datasets

from thalweg.tasks import coordinate_image, uniform_points


def test_values_are_the_grey_pixels_at_their_coordinates():
    image = coordinate_image("china", 32)
    crop = datasets.load_sample_image("china.jpg")[120:376:8, 200:456:8].mean(axis=2)
    values = image.values.reshape(32, 32).double().numpy()
    assert np.corrcoef(values.ravel(), crop.ravel())[0, 1] == pytest.approx(1, abs=1e-10)
    assert values.mean() == pytest.approx(0, abs=1e-6)
    assert values.std() == pytest.approx(1, abs=1e-6)
    # Row 3, column 5.
    row, column = image.coordinates[3 * 32 + 5].tolist()
    assert row == pytest.approx(-1 + 2 * 3 / 31)
    assert column == pytest.approx(-1 + 2 * 5 / 31)


def test_a_coarser_image_is_part_of_a_finer_one():
    fine, coarse = (coordinate_image("flower", side).values.reshape(side, side) for side in (64, 8))
    a, b = fine[::8, ::8].flatten().double(), coarse.flatten().double()
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].item() == pytest.approx(1, abs=1e-6)


def test_images_differ_and_are_loaded_once():
    assert coordinate_image("china", 16) is coordinate_image("china", 16)
    assert not torch.equal(coordinate_image("china", 16).values, coordinate_image("flower", 16)[1])


def test_points_are_uniform_on_the_square():
    points = uniform_points(20_000, torch.Generator().manual_seed(0))
    assert points.abs().max() <= 1
    # Standard errors: 0.004 of the mean, 0.002 of the variance.
    assert torch.allclose(points.mean(0), torch.zeros(2), atol=0.02)
    assert torch.allclose(points.var(0), torch.full((2,), 1 / 3), atol=0.01)
    assert torch.equal(points, uniform_points(20_000, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cat",), "name must be one of"),
        (("china", 48), "side must be a power of two"),
        (("china", 512), "side must be an integer >= 2 and <= 256"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        coordinate_image(*arguments)
    with pytest.raises(ValueError, match="count must be an integer >= 1"):
        uniform_points(0, torch.Generator())
