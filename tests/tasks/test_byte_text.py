"""The text is real and split in order; the GPT is causal and starts at the uniform law."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from thalweg.tasks import byte_gpt, load_text, sample_windows, transformer_shapes


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_the_text_is_utf8_and_its_end_is_for_validation():
    text = load_text()
    together = bytes(torch.cat(text).tolist()).decode()
    assert "The standard type hierarchy" in together
    assert together.startswith('The "assert" statement')
    assert 0.09 < len(text.validation) / len(together.encode()) < 0.11


def test_targets_are_the_inputs_one_byte_later():
    tokens = torch.arange(100)
    inputs, targets = sample_windows(tokens, batch=50, context=7, generator=seeded())
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(7))
    assert inputs.min() < 10
    assert targets.max() == 99 or targets.max() > 85


def test_every_start_is_drawn():
    inputs, _ = sample_windows(torch.arange(9), batch=400, context=4, generator=seeded())
    assert set(inputs[:, 0].tolist()) == {0, 1, 2, 3, 4}


def test_the_model_sees_the_past_only():
    model = byte_gpt(width=32, depth=2, heads=4, context=12, generator=seeded())
    tokens = torch.randint(256, (3, 12), generator=seeded(1))
    changed = tokens.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert (before[:, 8] - after[:, 8]).abs().max() > 1e-4


def test_it_starts_near_the_uniform_law_and_learns():
    text = load_text()
    model = byte_gpt(width=32, depth=1, heads=2, context=16, generator=seeded())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        inputs, targets = sample_windows(text.train, 16, 16, seeded(2))
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.05)
    assert losses[-1] < 0.6 * losses[0]


def test_models_of_one_seed_are_equal():
    first, second = (byte_gpt(16, 1, 2, 8, seeded(3)).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_shapes_are_those_of_a_model_with_a_tied_head():
    model = byte_gpt(width=24, depth=3, heads=2, context=10, generator=seeded())
    shapes = [p.shape for name, p in model.named_parameters() if name != "lm_head.weight"]
    assert sorted(transformer_shapes(24, 3, 256, 10)) == sorted(map(tuple, shapes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"width": 10, "heads": 4}, "width must be a multiple of heads=4, got 10"),
        ({"depth": 0}, "depth must be an integer >= 1, got 0"),
    ],
)
def test_bad_architectures_are_refused(arguments, message):
    settings = {"width": 16, "depth": 1, "heads": 2, "context": 8, "generator": seeded()}
    with pytest.raises(ValueError, match=message):
        byte_gpt(**settings | arguments)


def test_a_window_longer_than_the_text_is_refused():
    with pytest.raises(ValueError, match="context must be an integer >= 1 and <= 9, got 10"):
        sample_windows(torch.arange(10), 1, 10, seeded())
