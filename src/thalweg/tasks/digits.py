"""scikit-learn's handwritten digits as tensors, and minibatches drawn with replacement."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
with requires("peers"):
    from sklearn import datasets

TEST_SHARE = 0.2
SPLIT_SEED = 0


class Digits(NamedTuple):
    """The images in [0, 1], float32 of shape (n, 64), and the labels 0 … 9, int64 of shape (n,)."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@lru_cache
def load_digits() -> Digits:
    """Return the 1797 images in a fixed random split: 1438 to train on, 359 to test on.

    The tensors are shared within the process; do not write into them.

    Examples
    --------
    >>> data = load_digits()
    >>> data.train_images.shape, data.test_labels.shape
    (torch.Size([1438, 64]), torch.Size([359]))
    """
    data = datasets.load_digits()
    images = torch.from_numpy(data.data).float() / 16
    labels = torch.from_numpy(data.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test, train = order.tensor_split([round(TEST_SHARE * len(order))])
    return Digits(images[train], labels[train], images[test], labels[test])


def sample_batch(
    images: Tensor, labels: Tensor, batch_size: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return ``batch_size`` images and labels, drawn independently, with replacement.

    Successive batches are then independent, as estimates of the gradient's noise need them.
    """
    size = check_integer("batch_size", batch_size, at_least=1)
    index = torch.randint(len(labels), (size,), generator=generator, device=labels.device)
    return images[index], labels[index]


def digits_mlp(hidden: int, generator: torch.Generator) -> torch.nn.Sequential:
    """Return an untrained perceptron 64 → ``hidden`` → 10 with ReLU, drawn from ``generator``.

    Weights are uniform with He's variance 2/fan_in; biases are zero.
    """
    width = check_integer("hidden", hidden, at_least=1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.zeros_(parameter)
        else:
            torch.nn.init.kaiming_uniform_(parameter, nonlinearity="relu", generator=generator)
    return model
