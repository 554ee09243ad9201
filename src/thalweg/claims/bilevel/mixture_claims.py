"""The claim about weights of a language model's sources, at a matched number of tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thalweg.bilevel import SourceReweighter, next_token_logits
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim
from thalweg.tasks import byte_gpt, source_rows
from thalweg.tasks.token_sources import LENGTH, SOURCES

LR, ROWS = 3e-3, 8
STEPS = 16  # of training between two steps of the weights


@dataclass(eq=False)
class MixtureRun:
    """A model and its sources, with the tokens that are left.

    Parameters
    ----------
    model : Module
    rng : Generator
    tokens : int
        Entries of batches that may pass through the model.
    """

    model: torch.nn.Module
    rng: np.random.Generator
    tokens: int

    def batches(self, rows: int = ROWS) -> list[torch.Tensor]:
        """Return fresh rows of every source."""
        return [source_rows(source, rows, self.rng) for source in SOURCES]

    def validation(self, rows: int = ROWS) -> torch.Tensor:
        """Return fresh rows of what is to be learned."""
        return source_rows("sums", rows, self.rng)

    def losses(self, model: torch.nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the model's loss on each batch."""
        parameters: Any = dict(model.named_parameters())
        return [
            torch.nn.functional.cross_entropy(*next_token_logits(model, parameters, batch))
            for batch in batches
        ]


def _train(run: MixtureRun, model: torch.nn.Module, tokens: int, weights: Any) -> None:
    """Train on so many tokens; ``weights(losses)`` are the sources' weights of a step."""
    adam = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    while tokens > 0:
        losses = torch.stack(run.losses(model, run.batches()))
        adam.zero_grad()
        (weights(losses.detach()) * losses).sum().backward()
        adam.step()
        tokens -= len(SOURCES) * ROWS * LENGTH


def uniform(run: MixtureRun) -> None:
    """Train on all sources alike."""
    _train(run, run.model, run.tokens, lambda losses: torch.full_like(losses, 0.25))


def only_the_right_source(run: MixtureRun) -> None:
    """Train on sums alone: the best mixture there is, which nobody knows."""
    adam = torch.optim.AdamW(run.model.parameters(), lr=LR, weight_decay=0.0)
    tokens = run.tokens
    while tokens > 0:
        (loss,) = run.losses(run.model, [source_rows("sums", len(SOURCES) * ROWS, run.rng)])
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        tokens -= len(SOURCES) * ROWS * LENGTH


def excess_loss(run: MixtureRun, lr_w: float) -> None:
    """Train with weights that grow with each source's loss over that of a reference model.

    As in S. M. Xie et al., "DoReMi: optimizing data mixtures speeds up language model pretraining",
    NeurIPS 2023, with a reference that gets a quarter of the tokens.
    """
    reference = copy.deepcopy(run.model)
    _train(run, reference, run.tokens // 4, lambda losses: torch.full_like(losses, 0.25))
    logits = torch.zeros(len(SOURCES))
    settled = run.batches(32)
    with torch.no_grad():
        known = torch.stack(run.losses(reference, settled))

    def weights(losses: torch.Tensor) -> torch.Tensor:
        logits.add_(lr_w * (losses - known).clamp(min=0))
        return torch.softmax(logits, dim=0)

    _train(run, run.model, run.tokens - run.tokens // 4, weights)


def reweighted(run: MixtureRun, lr_w: float, select_steps: int = 2) -> None:
    """Train by `SourceReweighter`; without selection steps it is implicit differentiation."""
    reweighter = SourceReweighter(
        run.model,
        len(SOURCES),
        lr_w=lr_w,
        lr=LR,
        cg_steps=3,
        train_steps=STEPS,
        select_steps=select_steps,
        generator=torch_generator(run.rng),
    )
    while reweighter.n_tokens < run.tokens:
        reweighter.step(run.batches(STEPS * ROWS), run.validation(ROWS))


RATES = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0]


def _contender(name: str, make: Callable[..., None], control: bool = False, **tune: Any) -> Any:
    return Contender(name, make=make, tune=tune, control=control)


@claim(
    method="hg-ms",
    statement="Mixtures: at as many tokens, the validation loss of select-then-differentiate is at "
    "most that of uniform, excess-loss and implicitly differentiated weights",
    metric=Metric("validation loss", better="lower"),
    contenders=[
        _contender("HG-MS", reweighted, lr_w=RATES),
        _contender("uniform", uniform),
        _contender("excess loss", excess_loss, lr_w=[0.003, 0.01, 0.03, 0.1, 0.3, 1.0]),
        _contender(
            "implicit differentiation",
            lambda run, lr_w: reweighted(run, lr_w, select_steps=0),
            lr_w=RATES,
        ),
        _contender("the right source alone", only_the_right_source, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, tokens=2_000, width=16),
        "quick": Scale(seeds=8, tuning_seeds=1, tokens=100_000, width=32),
        "full": Scale(seeds=8, tuning_seeds=1, tokens=500_000, width=64),
    },
)
def mixtures(
    contender: Contender, rng: np.random.Generator, *, tokens: int, width: int, **settings: Any
) -> Measurement:
    """Small GPTs of two layers on sums, wrong sums, copied letters and random characters.

    Sums are what counts. All see equally many tokens, those of selection and of conjugate
    gradients included. The model trained on sums alone is a control: no mixture can do better.
    """
    for_model, for_run, for_test = rng.spawn(3)
    model = byte_gpt(width, 2, 2, LENGTH, torch_generator(for_model))
    assert contender.make is not None
    run = MixtureRun(model, for_run, tokens)
    contender.make(run, **settings)
    with torch.no_grad():
        (loss,) = run.losses(model, [source_rows("sums", 512, for_test)])
    return Measurement(float(loss))
