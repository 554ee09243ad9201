"""Digits at eight sites with flipped labels: learn which samples to trust."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.tasks.digits import digits_mlp, load_digits

with requires("training"):
    import torch
    from torch import Tensor

SITES = 8
ROWS = 120  # training samples per site
CLEAN = 40  # validation samples per site
RIDGE = 1e-3


class CleaningSites(NamedTuple):
    """Data of two classes per site, of whose training labels some are flipped.

    Attributes
    ----------
    images, labels : Tensor of shapes (8, 120, 64) and (8, 120)
    clean_images, clean_labels : Tensor of shapes (8, 40, 64) and (8, 40)
    flipped : Tensor of shape (8, 120), bool
    """

    images: Tensor
    labels: Tensor
    clean_images: Tensor
    clean_labels: Tensor
    flipped: Tensor

    def draw(self, rng: np.random.Generator, d: int, noise: float, index: float) -> Any:
        """Return a batch of 16 training and 16 clean rows per site, and centered Pareto noise."""
        train = torch.from_numpy(rng.integers(ROWS, size=(SITES, 16)))
        clean = torch.from_numpy(rng.integers(CLEAN, size=(SITES, 16)))
        tails = rng.pareto(index, (SITES, d)) - 1 / (index - 1)
        site = torch.arange(SITES)[:, None]
        return {
            "rows": site * ROWS + train,
            "images": self.images[site, train],
            "labels": self.labels[site, train],
            "clean_images": self.clean_images[site, clean],
            "clean_labels": self.clean_labels[site, clean],
            "noise": torch.from_numpy(noise * tails).float(),
        }


def cleaning_sites(rng: np.random.Generator, *, flip: float = 0.3) -> CleaningSites:
    """Return a division of the training images of `load_digits` among eight sites."""
    data = load_digits()
    labels = data.train_labels.numpy()
    parts: list[NDArray[np.intp]] = []
    for site in range(SITES):
        classes = [site, (site + 5) % 10]
        among = np.flatnonzero(np.isin(labels, classes))
        parts.append(rng.choice(among, ROWS + CLEAN, replace=False))
    rows = torch.from_numpy(np.stack(parts))
    images, truth = data.train_images[rows], data.train_labels[rows]
    flipped = torch.from_numpy(rng.random((SITES, ROWS)) < flip)
    shift = torch.from_numpy(rng.integers(1, 10, size=(SITES, ROWS)))
    given = torch.where(flipped, (truth[:, :ROWS] + shift) % 10, truth[:, :ROWS])
    return CleaningSites(images[:, :ROWS], given, images[:, ROWS:], truth[:, ROWS:], flipped)


def cleaning_start(rng: np.random.Generator, hidden: int = 16) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of all samples' weights, zero, and the parameters of a perceptron."""
    model = digits_mlp(hidden, torch_generator(rng))
    return torch.zeros(SITES * ROWS), {k: v.detach() for k, v in model.named_parameters()}


def perceptron(y: dict[str, Tensor], images: Tensor) -> Tensor:
    """Return the logits of the classes."""
    hidden = torch.relu(images @ y["0.weight"].T + y["0.bias"])
    return hidden @ y["2.weight"].T + y["2.bias"]


def clean_loss(x: Tensor, y: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the upper loss of a site: that of clean rows, with noise in its gradient."""
    loss = torch.nn.functional.cross_entropy(
        perceptron(y, batch["clean_images"]), batch["clean_labels"]
    )
    return loss + _noise(y, batch)


def weighted_loss(x: Tensor, y: dict[str, Tensor], batch: Any) -> Tensor:
    """Return the lower loss of a site: that of training rows, weighted by the sigmoid of x."""
    losses = torch.nn.functional.cross_entropy(
        perceptron(y, batch["images"]), batch["labels"], reduction="none"
    )
    ridge = sum((part.square().sum() for part in y.values()), torch.zeros(()))
    return (
        (torch.sigmoid(x.gather(0, batch["rows"])) * losses).mean()
        + RIDGE * ridge
        + _noise(y, batch)
    )


def held_out_loss(y: dict[str, Tensor]) -> tuple[float, float]:
    """Return cross entropy and accuracy on the held-out images."""
    data = load_digits()
    with torch.no_grad():
        logits = perceptron(y, data.test_images)
        loss = float(torch.nn.functional.cross_entropy(logits, data.test_labels))
        accuracy = float((logits.argmax(dim=1) == data.test_labels).float().mean())
    return loss, accuracy


def _noise(y: dict[str, Tensor], batch: Any) -> Tensor:
    product: Tensor = batch["noise"].dot(torch.cat([part.reshape(-1) for part in y.values()]))
    return product
