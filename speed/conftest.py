"""What the speed checks share: measuring side by side, on one thread."""

from __future__ import annotations

import math
import timeit

import pytest


@pytest.fixture(scope="session")
def seconds_in_turn():
    """Return a function that measures functions in turn, so that all meet the same machine."""

    def shortest(functions, rounds):
        best = dict.fromkeys(functions, math.inf)
        for _ in range(rounds):
            for name, function in functions.items():
                best[name] = min(best[name], timeit.timeit(function, number=1))
        return best

    return shortest


@pytest.fixture(scope="session")
def parameters_with_gradients():
    """Return a function that makes parameters of given shapes, with gradients of a given size."""
    import torch

    def make(shapes, size=1.0):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        for parameter in parameters:
            parameter.grad = size * torch.randn(parameter.shape, generator=generator)
        return parameters

    return make


@pytest.fixture
def one_thread():
    """Have torch use one thread, and restore their number afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
