"""Photographs as functions of coordinates, which networks fit pixel by pixel."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from thalweg.common.checks import check_choice, check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
with requires("peers"):
    from sklearn import datasets

PHOTOGRAPHS = ("china", "flower")
CROP_ROWS = slice(120, 376)
CROP_COLUMNS = slice(200, 456)


class CoordinateImage(NamedTuple):
    """A grey image of ``side`` x ``side`` pixels as a regression problem.

    ``coordinates`` in [-1, 1]², float32 of shape (side², 2), rows of the image first; ``values``
    with mean 0 and variance 1, float32 of shape (side², 1).
    """

    coordinates: Tensor
    values: Tensor
    side: int


@lru_cache
def coordinate_image(name: str = "china", side: int = 32) -> CoordinateImage:
    """Return a square crop of one of scikit-learn's photographs, subsampled.

    The crop has 256 x 256 pixels; the mean of the colors of every (256 / side)-th is taken. The
    tensors are shared within the process; do not write into them.

    Parameters
    ----------
    name : {"china", "flower"}, default "china"
    side : int, default 32
        A power of two up to 256.

    Raises
    ------
    TypeError, ValueError
        For other values.

    Examples
    --------
    >>> image = coordinate_image("china", side=32)
    >>> image.coordinates.shape, image.values.shape
    (torch.Size([1024, 2]), torch.Size([1024, 1]))
    """
    check_choice("name", name, PHOTOGRAPHS)
    check_integer("side", side, at_least=2, at_most=256)
    if 256 % side:
        raise ValueError(f"side must be a power of two up to 256, got {side}")
    pixels = datasets.load_sample_image(f"{name}.jpg")[CROP_ROWS, CROP_COLUMNS]
    step = 256 // side
    grey = pixels[::step, ::step].astype(np.float64).mean(axis=2)
    values = (grey - grey.mean()) / grey.std()
    axis = torch.linspace(-1, 1, side)
    coordinates = torch.cartesian_prod(axis, axis)
    return CoordinateImage(coordinates, torch.from_numpy(values).float().reshape(-1, 1), side)


def uniform_points(count: int, generator: torch.Generator) -> Tensor:
    """Return points drawn uniformly from [-1, 1]², float32 of shape (count, 2)."""
    size = check_integer("count", count, at_least=1)
    return 2 * torch.rand(size, 2, generator=generator) - 1
