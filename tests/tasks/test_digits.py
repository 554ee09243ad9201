"""The digits: the data are scikit-learn's, batches are independent, the network can learn them."""

import numpy as np
import pytest
import torch
from sklearn import datasets

from thalweg.tasks import digits_mlp, load_digits, sample_batch


def test_the_split_holds_every_image_once():
    data = load_digits()
    images = torch.cat([data.train_images, data.test_images]).numpy() * 16
    labels = torch.cat([data.train_labels, data.test_labels]).numpy()
    source = datasets.load_digits()
    ours, theirs = (
        sorted(map(tuple, np.column_stack([x, y]).astype(int)))
        for x, y in ((images, labels), (source.data, source.target))
    )
    assert ours == theirs
    assert (len(data.train_labels), len(data.test_labels)) == (1438, 359)


def test_it_is_loaded_once():
    assert load_digits() is load_digits()


def test_batches_are_drawn_with_replacement():
    images, labels = torch.arange(4.0)[:, None], torch.arange(4)
    generator = torch.Generator().manual_seed(0)
    drawn, names = sample_batch(images, labels, 40_000, generator)
    assert torch.equal(drawn[:, 0].long(), names)
    counts = torch.bincount(names, minlength=4)
    # Binomial standard deviation: 87.
    assert ((counts - 10_000).abs() < 350).all()


def test_the_network_starts_at_the_seed_and_learns():
    data = load_digits()
    first, second = (digits_mlp(64, torch.Generator().manual_seed(5)) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first[0].weight.var().item() == pytest.approx(2 / 64, rel=0.05)
    assert first[2].bias.abs().max().item() == 0.0
    optimizer = torch.optim.SGD(first.parameters(), lr=0.3)
    for _ in range(150):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(first(data.train_images), data.train_labels)
        loss.backward()
        optimizer.step()
    accuracy = (first(data.test_images).argmax(1) == data.test_labels).float().mean()
    assert accuracy > 0.9


@pytest.mark.parametrize("size", [0, -3])
def test_bad_sizes_are_refused(size):
    generator = torch.Generator()
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1"):
        sample_batch(torch.ones(2, 1), torch.ones(2), size, generator)
    with pytest.raises(ValueError, match="hidden must be an integer >= 1"):
        digits_mlp(size, generator)
