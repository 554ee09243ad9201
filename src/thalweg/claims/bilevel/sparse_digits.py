"""The claim about a network whose first layer is made sparse without losing the training data.

A contender's ``make`` is ``make(model, **settings)``, and returns a function of three closures:
the penalty f, the loss g of a fresh batch, and that of another one, which makes a step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from thalweg.bilevel import SDBPG
from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim
from thalweg.tasks import digits_mlp, load_digits, sample_batch

with requires("bilevel"):
    import torch
    from torch import Tensor

Loss = Callable[[], Tensor]
Step = Callable[[Loss, Loss], None]

BATCH = 64
LEVEL = 0.05  # of the training loss
SMOOTHING = 0.01  # of the l1 norm
CHECKS = 20


def perturbed_step(model: torch.nn.Module, **settings: Any) -> Step:
    """Return the step of `SDBPG`."""
    optimizer = SDBPG(model.parameters(), **settings)

    def step(upper: Loss, lower: Loss) -> None:
        optimizer.step(upper, lower)

    return step


def penalized_step(model: torch.nn.Module, *, rho: float, lr: float) -> Step:
    """Return the step of PR-SDBPG, whose barrier asks for what the penalty gives."""
    return perturbed_step(model, variant="pr", rho=rho, alpha=rho, lr=lr)


def barrier_step(model: torch.nn.Module, **settings: Any) -> Step:
    """Return the step of dynamic barrier descent with a bound of the multiplier."""
    return perturbed_step(model, delta=1e-30, **settings)


def penalty_step(model: torch.nn.Module, optimizer: Any, rho: float, lr: float) -> Step:
    """Return the step of a torch optimizer on f + ρg, with both batches of g."""
    inner = optimizer(model.parameters(), lr=lr)

    def step(upper: Loss, lower: Loss) -> None:
        inner.zero_grad()
        (upper() + rho * (lower() + lower()) / 2).backward()  # type: ignore[no-untyped-call]
        inner.step()

    return step


def sgd_step(model: torch.nn.Module, *, rho: float, lr: float) -> Step:
    """Return the step of SGD on f + ρg."""
    return penalty_step(model, torch.optim.SGD, rho, lr)


def adam_step(model: torch.nn.Module, *, rho: float, lr: float) -> Step:
    """Return the step of Adam on f + ρg."""
    return penalty_step(model, torch.optim.Adam, rho, lr)


def smoothed_l1(model: torch.nn.Module) -> Tensor:
    """Return the mean of √(w² + s²) - s over the weights of the first layer."""
    weights = next(iter(model.parameters()))
    return ((weights.square() + SMOOTHING**2).sqrt() - SMOOTHING).mean()


@lru_cache(maxsize=64)
def _trained(seed: int) -> torch.nn.Module:
    """Return a network 64-128-10 that fits the training data."""
    generator = torch.Generator().manual_seed(seed)
    data, model = load_digits(), digits_mlp(128, generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        images, labels = sample_batch(data.train_images, data.train_labels, BATCH, generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.zero_grad()
    return model


@claim(
    method="sdbpg",
    statement="At a training loss of at most 0.05, the first layer's smoothed l1 norm after "
    "SDBPG is no larger than after the best other method",
    metric=Metric(
        "smoothed l1 norm per weight",
        better="lower",
        average="geometric mean",
        curve=("steps", "smoothed l1 norm"),
    ),
    contenders=[
        Contender(
            "SDBPG",
            make=perturbed_step,
            tune={"lr": [0.3, 1.0, 3.0, 10.0], "alpha": [0.1, 0.3, 1.0, 3.0]},
        ),
        Contender(
            "penalty SGD",
            make=sgd_step,
            tune={"lr": [0.3, 1.0, 3.0, 10.0], "rho": [0.1, 0.3, 1.0, 3.0]},
        ),
        Contender(
            "penalty Adam",
            make=adam_step,
            tune={"lr": [1e-3, 3e-3, 1e-2, 3e-2], "rho": [0.1, 0.3, 1.0, 3.0]},
        ),
        Contender(
            "DBGD, bounded multiplier",
            make=barrier_step,
            tune={"lr": [0.3, 1.0, 3.0, 10.0], "lam_max": [0.1, 0.3, 1.0, 3.0]},
        ),
        Contender(
            "PR-SDBPG",
            make=penalized_step,
            tune={"lr": [0.3, 1.0, 3.0, 10.0], "rho": [0.1, 0.3, 1.0, 3.0]},
            control=True,
        ),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=20),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=300),
        "full": Scale(seeds=12, tuning_seeds=1, steps=2_000),
    },
)
def sparse_first_layer(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Make the first layer of a trained network of digits, 64-128-10, sparse.

    The network has far more weights than it needs. f is the smoothed l1 norm of its first layer, g
    the training loss. All take the same batches of g per step, two of 64, and start from the same
    network. The measure is the least f among twenty points of the run where the whole training loss
    is at most 0.05, or that of the start. α, penalty weights and bounds are tuned: nobody is asked
    to guess them, which is where a multiplier of its own would help. Adam has a step size for every
    weight, which for this f decides.
    """
    for_instance, for_contender = rng.spawn(2)
    model = copy.deepcopy(_trained(int(for_instance.integers(2**31))))
    data, generator = load_digits(), torch_generator(for_contender)
    entropy = torch.nn.functional.cross_entropy

    def lower() -> Tensor:
        images, labels = sample_batch(data.train_images, data.train_labels, BATCH, generator)
        return entropy(model(images), labels)

    def upper() -> Tensor:
        return smoothed_l1(model)

    assert contender.make is not None
    step = contender.make(model, **settings)
    norms = [float(upper().detach())]
    seen, period, loss = [0], max(1, steps // CHECKS), math.inf
    try:
        for k in range(1, steps + 1):
            step(upper, lower)
            if k % period:
                continue
            with torch.no_grad():
                loss = float(entropy(model(data.train_images), data.train_labels))
                norm = float(upper())
            norms.append(norm if loss <= LEVEL else math.inf)
            seen.append(k)
    except RuntimeError:  # ten gradients in a row were not finite
        loss = math.inf
    best = np.minimum.accumulate(norms)
    return Measurement(float(best[-1]), curve=(seen, best), extras={"last training loss": loss})
