"""Random streams, optional imports and progress."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.common.optional import MissingExtraError, requires
from thalweg.common.progress import progress
from thalweg.common.random import as_generator, torch_generator


def test_a_generator_comes_back_as_it_is():
    rng = np.random.default_rng(1)
    assert as_generator(rng) is rng


@pytest.mark.parametrize("seed", [3, np.int64(3), np.random.SeedSequence(3)])
def test_seeds_of_every_kind_give_one_stream(seed):
    expected = np.random.default_rng(3).random(5)
    np.testing.assert_array_equal(as_generator(seed).random(5), expected)


def test_none_gives_fresh_streams():
    assert as_generator(None).random() != as_generator(None).random()


@pytest.mark.parametrize("bad", [1.5, "1", True, np.random.RandomState(0)])
def test_other_kinds_are_refused(bad):
    with pytest.raises(TypeError, match="rng must be an int"):
        as_generator(bad)


def test_negative_seeds_are_refused():
    with pytest.raises(ValueError, match="rng must be a seed >= 0, got -1"):
        as_generator(-1)


def test_torch_stream_is_a_function_of_the_numpy_stream():
    draws = [torch.rand(3, generator=torch_generator(as_generator(5))) for _ in range(2)]
    assert torch.equal(*draws)


def test_a_missing_package_names_the_extra():
    refused = pytest.raises(MissingExtraError, match=r"nothing_here .* pip install .thalweg\[x\]")
    with refused, requires("x"):
        import nothing_here  # noqa: F401


def test_the_innermost_extra_is_the_one_named():
    refused = pytest.raises(MissingExtraError, match=r"thalweg\[inner\]")
    with refused, requires("outer"), requires("inner"):
        import nothing_here  # noqa: F401


def test_a_broken_package_is_told_from_a_missing_one():
    with pytest.raises(MissingExtraError, match="math does not import"), requires("x"):
        raise ImportError("cannot import name 'y'", name="math")


def test_progress_is_silent_unless_shown(capfd):
    with progress("work", 2, show=False) as advance:
        advance(1)
    assert capfd.readouterr() == ("", "")
    with progress("work", 2, show=True) as advance:
        advance(2, "nearly done")
    out, err = capfd.readouterr()
    assert out == ""
    assert "nearly done" in err
    assert "2/2" in err
