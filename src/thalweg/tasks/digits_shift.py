"""A fine-tuning task: a perceptron that knows digits must learn rotated ones with new labels."""

from __future__ import annotations

import copy
from functools import lru_cache

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.tasks.digits import Digits, load_digits, sample_batch

SIDE = 8
CLASSES = 10
HIDDEN = 256
PRETRAINING_STEPS = 600
BATCH = 64


def shifted_digits(generator: torch.Generator) -> Digits:
    """Return scikit-learn's digits, rotated by 90°, with labels permuted at random.

    No class keeps its label. The split into train and test images is that of `load_digits`, so
    that a network which was pretrained on those has not seen the test images in any form.

    Examples
    --------
    >>> data = shifted_digits(torch.Generator().manual_seed(0))
    >>> bool((data.test_labels == load_digits().test_labels).any())
    False
    """
    data = load_digits()
    labels = torch.arange(CLASSES)
    relabel = labels
    while (relabel == labels).any():
        relabel = torch.randperm(CLASSES, generator=generator)
    return Digits(
        _rotated(data.train_images),
        relabel[data.train_labels],
        _rotated(data.test_images),
        relabel[data.test_labels],
    )


def _rotated(images: Tensor) -> Tensor:
    return images.view(-1, SIDE, SIDE).rot90(dims=(1, 2)).reshape(-1, SIDE * SIDE)


def pretrained_digits_mlp() -> nn.Sequential:
    """Return a copy of a perceptron 64 → 256 → 256 → 10 with ReLU that classifies the digits.

    It is trained once per process, from a fixed seed, with Adam for 600 steps. Its linear layers
    are named "0", "2" and "4".

    Examples
    --------
    >>> data = load_digits()
    >>> model = pretrained_digits_mlp()
    >>> accuracy = (model(data.test_images).argmax(1) == data.test_labels).float().mean()
    >>> bool(accuracy > 0.95)
    True
    """
    return copy.deepcopy(_pretrained())


@lru_cache
def _pretrained() -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    data = load_digits()
    model = nn.Sequential(
        nn.Linear(SIDE * SIDE, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.zeros_(parameter)
        else:
            nn.init.kaiming_uniform_(parameter, nonlinearity="relu", generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(PRETRAINING_STEPS):
        images, labels = sample_batch(data.train_images, data.train_labels, BATCH, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model
