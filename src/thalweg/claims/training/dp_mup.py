"""Claims about DP-μP: learning rates of private training that transfer over the width.

A contender's ``make`` is called as ``make(model, base, lr, **settings)`` with the fresh model, the
model at the base width, the lr that refers to it and keyword arguments for `dp_mup_param_groups`;
it may initialize the model, and returns param groups. For a rule of your own:
``Contender("mine", make=lambda model, base, lr, **settings: [...], tune={"log2_lr": LOG2_LRS})``.

Rates are tuned at the base width on other seeds, by the harness, and used at the wide one: what is
compared is the loss after this zero-shot transfer. A contender without a grid is tuned at the wide
width itself, on the very seed that it is evaluated on, which is the ceiling of any transfer.

All contenders of a seed get the same Poisson-sampled lots, the same noise and the same clipping,
per parameter tensor, and the train loss is that over the whole training set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.evidence import (
    Contender,
    Measurement,
    Metric,
    Scale,
    at_most,
    between,
    claim,
    trend,
)
from thalweg.tasks import (
    load_digits,
    load_text,
    next_byte_loss,
    sample_windows,
    width_gpt,
    width_mlp,
    width_vit,
)
from thalweg.training import (
    DPGradient,
    dp_mup_init_,
    dp_mup_param_groups,
    dp_snr_report,
    width_transfer_report,
)

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy

Groups = list[dict[str, Any]]

LOG2_LRS = tuple(k / 2 for k in range(-15, -4))
OFFSETS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
LOG2_LRS_SGD = tuple(k / 2 for k in range(-3, 8))
LOG2_LRS_MUON = tuple(k / 2 for k in range(-13, -2))
LOG2_LRS_TRANSFORMER = tuple(range(-8, -1))
STEPS_BEFORE_SPECTRA = 20
CONTEXT = 8
N_WINDOWS = 2048
LOSS = Metric(
    "train loss at the transferred lr",
    better="lower",
    average="geometric mean",
    curve=("log2 of the lr at the base width", "train loss"),
)


def dp_mup(model: nn.Module, base: nn.Module, lr: float, **settings: Any) -> Groups:
    """DP-μP, as shipped."""
    dp_mup_init_(model, base_shapes=base)
    return dp_mup_param_groups(model, lr, base_shapes=base, **settings)


def mup(model: nn.Module, base: nn.Module, lr: float, **settings: Any) -> Groups:
    """μP's initialization and rates on top of private training."""
    return dp_mup(model, base, lr, rule="mup", **settings)


def uniform(model: nn.Module, base: nn.Module, lr: float, **settings: Any) -> Groups:
    """One lr, with the initialization of the others."""
    return dp_mup(model, base, lr, rule="uniform", **settings)


def standard(model: nn.Module, base: nn.Module, lr: float, **settings: Any) -> Groups:
    """One lr, and torch's initialization: the standard parametrization."""
    return dp_mup_param_groups(model, lr, base_shapes=base, rule="uniform", **settings)


class Task(NamedTuple):
    """Data, and a model for it at any width."""

    make_model: Callable[[int], nn.Module]
    data: tuple[Tensor, Tensor]
    loss_fn: Callable[[Any, Tensor], Tensor]


@lru_cache
def digits_task(kind: str) -> Task:
    """Return scikit-learn's digits, for a perceptron or a vision transformer."""
    digits = load_digits()
    make = partial(width_vit, depth=1, patch=4) if kind == "vit" else width_mlp
    return Task(make, (digits.train_images, digits.train_labels), cross_entropy)


@lru_cache
def text_task() -> Task:
    """Return windows of English text, for a language model over bytes."""
    generator = torch.Generator().manual_seed(0)
    windows = sample_windows(load_text().train, N_WINDOWS, CONTEXT, generator)
    make = partial(width_gpt, depth=1, context=CONTEXT)
    return Task(make, windows, next_byte_loss)


def _transfer(
    task: Task,
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    log2_lrs: Sequence[float],
    **settings: Any,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the final loss at each lr, all with the same initialization, lots and noise."""
    assert contender.make is not None
    seed = int(rng.spawn(2)[0].integers(2**31))
    report = width_transfer_report(
        task.make_model,
        [width],
        task.data,
        loss_fn=task.loss_fn,
        base_width=base_width,
        lrs=[2.0**k for k in log2_lrs],
        rules={"": contender.make},
        seeds=[seed],
        show_progress=False,
        **settings,
    )
    losses: np.ndarray[Any, np.dtype[np.float64]] = report.losses[""][0, :, 0]
    return losses


def _at_lr(
    task: Task,
    contender: Contender,
    rng: np.random.Generator,
    log2_lr: float | None,
    grid: Sequence[float] = LOG2_LRS,
    **settings: Any,
) -> Measurement:
    """Return the loss at the lr, or at the best of the grid if there is none."""
    log2_lrs = grid if log2_lr is None else [log2_lr]
    losses = _transfer(task, contender, rng, log2_lrs=log2_lrs, **settings)
    curve = (log2_lrs, losses) if log2_lr is None else None
    return Measurement(float(losses.min()), curve=curve)


def _tuned(grid: Sequence[float] = LOG2_LRS) -> dict[str, Sequence[Any]]:
    return {"log2_lr": list(grid)}


def rules(grid: Sequence[float] = LOG2_LRS) -> list[Contender]:
    """Return DP-μP and the rules that it is compared with, each tuned at the base width."""
    return [
        Contender("DP-muP", make=dp_mup, tune=_tuned(grid)),
        Contender("muP", make=mup, tune=_tuned(grid)),
        Contender("standard parametrization", make=standard, tune=_tuned(grid)),
        Contender("uniform lr", make=uniform, tune=_tuned(grid)),
        Contender(
            "automatic clipping",
            make=standard,
            tune=_tuned(grid) | {"automatic": [True]},
        ),
    ]


def scales(
    *,
    base: int,
    factor: int,
    full_base: int = 64,
    full_factor: int = 16,
    steps: int = 40,
    tuning_seeds: int = 4,
    seeds: int = 8,
) -> dict[str, Scale]:
    """Return scales that tune at a base width and evaluate at ``factor`` times that width."""

    def scale(seeds: int, tuning_seeds: int, narrow: int, times: int, steps: int) -> Scale:
        return Scale(
            seeds=seeds,
            tuning_seeds=tuning_seeds,
            tuning={"width": narrow},
            width=times * narrow,
            base_width=narrow,
            steps=steps,
        )

    return {
        "smoke": scale(2, 1, min(base, 16), 2, 5),
        "quick": scale(seeds, tuning_seeds, base, factor, steps),
        "full": scale(max(10, seeds), 5, full_base, full_factor, 60),
    }


@claim(
    method="dp-mup",
    statement="The lr of DP-Adam, tuned at one width, gives a model of 16 times that width at most "
    "0.9 times the train loss that every other rule's lr gives it",
    metric=LOSS,
    contenders=rules(),
    expect=at_most(0.9, of="best peer"),
    scales=scales(base=32, factor=16),
    headline=True,
)
def transfer_adam(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
    automatic: bool = False,
) -> Measurement:
    """Train a perceptron 64-n-n-10 privately on scikit-learn's digits, lots of 128, σ = 2.

    The lr is tuned over half octaves at width n₀ and used at 16 n₀. The peers are μP with its
    table for Adam, the standard parametrization (one lr, torch's initialization), one lr with
    DP-μP's initialization, and automatic clipping (normalized gradients) with the standard
    parametrization.

    μP's lr is too small on the wide model, since its 1/n is meant for updates of low rank, and the
    update is mostly noise of full rank. One lr for all is too large, since it does not shrink at
    all.
    """
    return _at_lr(
        digits_task("mlp"),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=2.0,
        batch_size=128,
        optimizer="adam",
        automatic=automatic,
    )


@claim(
    method="dp-mup",
    statement="The lr of DP-SGD, tuned at one width, gives a model of 16 times that width at most "
    "0.9 times the train loss that every other rule's lr gives it",
    metric=LOSS,
    contenders=rules(LOG2_LRS_SGD),
    expect=at_most(0.9, of="best peer"),
    scales=scales(base=32, factor=16, tuning_seeds=2),
)
def transfer_sgd(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
    automatic: bool = False,
) -> Measurement:
    """Compare the rules for DP-SGD, in the setting of `transfer_adam`.

    μP's table for SGD is that of the unclipped gradient, whose norm grows with the width where
    the clipped one's does not.
    """
    return _at_lr(
        digits_task("mlp"),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=2.0,
        batch_size=128,
        optimizer="sgd",
        automatic=automatic,
    )


def compensated(model: nn.Module, base: nn.Module, lr: float, **settings: Any) -> Groups:
    """DP-μP with the share of the signal in the orthogonalized matrix made up for."""
    return dp_mup(model, base, lr, snr_compensation=True, **settings)


@claim(
    method="dp-mup",
    statement="The lr of DP-Muon, tuned at one width, gives a wider model at most the train loss "
    "that one lr for all layers gives it",
    metric=LOSS,
    contenders=[
        Contender("DP-muP", make=dp_mup, tune=_tuned(LOG2_LRS_MUON)),
        Contender("standard parametrization", make=standard, tune=_tuned(LOG2_LRS_MUON)),
        Contender("uniform lr", make=uniform, tune=_tuned(LOG2_LRS_MUON)),
        Contender(
            "DP-muP, SNR compensation", make=compensated, tune=_tuned(LOG2_LRS_MUON), control=True
        ),
    ],
    expect=at_most(1.0, of="best peer"),
    scales=scales(base=32, factor=4, full_factor=8, tuning_seeds=2, seeds=16),
)
def transfer_muon(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
) -> Measurement:
    """Compare the rules for DP-Muon, in the setting of `transfer_adam`; biases go to Adam.

    The update is orthogonal, so that clipping and noise do not change its norm: DP-μP's rates are
    μP's, and hidden layers keep theirs. What changes with the width is how much of the orthogonal
    update is signal, and the control makes up for that. The first and last layer's rates are what
    differs from one lr for all.
    """
    return _at_lr(
        digits_task("mlp"),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=2.0,
        batch_size=128,
        optimizer="muon",
    )


@claim(
    method="dp-mup",
    statement="DP-Adam with the lr tuned at one width comes within 1.1 times the train loss of the "
    "standard parametrization tuned at the larger width itself",
    metric=LOSS,
    contenders=[
        Contender("DP-muP", make=dp_mup, tune=_tuned()),
        Contender("standard, tuned at this width", make=standard),
    ],
    expect=at_most(1.1, of="standard, tuned at this width"),
    scales=scales(base=32, factor=4, full_factor=8),
)
def ceiling(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
) -> Measurement:
    """Compare zero-shot transfer with tuning at the wide width, in the setting of `transfer_adam`.

    The peer sees every lr of the grid on the seed that it is judged on and keeps the best, which
    no honest tuning can beat, and which would cost privacy and the wide model's time for each.
    """
    return _at_lr(
        digits_task("mlp"),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=2.0,
        batch_size=128,
        optimizer="adam",
    )


@claim(
    method="dp-mup",
    statement="DP-Adam's train loss at the lr transferred to a larger width is within 5 % of the "
    "best over the lr under the same rule",
    metric=Metric(
        "loss at the transferred lr over the loss at the best lr",
        better="lower",
        average="geometric mean",
        curve=("log2 of the lr at the base width", "train loss"),
    ),
    contenders=[
        Contender("DP-muP", make=dp_mup, tune=_tuned()),
        Contender("muP", make=mup, tune=_tuned()),
        Contender("uniform lr", make=uniform, tune=_tuned()),
    ],
    expect=at_most(1.05),
    scales=scales(base=32, factor=4, full_factor=8, tuning_seeds=2),
)
def regret(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float,
) -> Measurement:
    """Divide the loss at the transferred lr by that at the best lr of each seed: transfer regret.

    The setting is that of `transfer_adam`; while tuning at the base width the value is the loss
    itself. The best is that of seven rates from a quarter to four times the transferred one, and
    partly luck, so the figure cannot be less than 1. ``shift`` says
    by how many octaves the best lr is above the transferred one.
    """
    offsets = (0.0,) if width == base_width else OFFSETS
    log2_lrs = [log2_lr + offset for offset in offsets]
    losses = _transfer(
        digits_task("mlp"),
        contender,
        rng,
        width=width,
        base_width=base_width,
        steps=steps,
        log2_lrs=log2_lrs,
        noise_multiplier=2.0,
        batch_size=128,
        optimizer="adam",
    )
    if width == base_width:
        return Measurement(float(losses.min()))
    shift = offsets[int(losses.argmin())]
    value = losses[offsets.index(0.0)] / losses.min()
    return Measurement(float(value), curve=(log2_lrs, losses), extras={"shift": shift})


@claim(
    method="dp-mup",
    statement="With little noise DP-μP is μP: the transferred train losses differ by less than 5 %",
    metric=LOSS,
    contenders=[
        Contender("DP-muP", make=dp_mup, tune=_tuned()),
        Contender("muP", make=mup, tune=_tuned()),
        Contender("uniform lr", make=uniform, tune=_tuned()),
    ],
    expect=between(0.95, 1.05, of="muP"),
    scales=scales(base=32, factor=4, full_factor=8, seeds=20),
)
def little_noise(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
) -> Measurement:
    """Compare DP-Adam under both rules at σ = 0.01, else in the setting of `transfer_adam`.

    The rule is a matter of noise: without it there is no gain to be expected.
    """
    return _at_lr(
        digits_task("mlp"),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=0.01,
        batch_size=128,
        optimizer="adam",
    )


TRANSFORMER_RULES = rules(LOG2_LRS_TRANSFORMER)[:3]


@claim(
    method="dp-mup",
    statement="For a vision transformer, the lr of DP-Adam that DP-μP transfers gives at most 0.95 "
    "times the train loss of the lr that μP transfers",
    metric=LOSS,
    contenders=TRANSFORMER_RULES,
    expect=at_most(0.95, of="muP"),
    scales=scales(base=16, factor=4, full_base=32, full_factor=8, steps=30, tuning_seeds=2),
)
def transfer_vit(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
) -> Measurement:
    """Train a vision transformer on the digits' four 4 × 4 patches: one block, lots of 128, σ = ½.

    Heads of 16 get more with the width, 4 times at quick and 8 times at full. So few octaves of
    width hardly move the best lr of the standard parametrization, which is shown beside the two
    rules, and whose loss is lower than theirs: what DP-μP mends is μP, and it has less to mend
    here than there is between the initializations.
    """
    return _at_lr(
        digits_task("vit"),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=0.5,
        batch_size=128,
        optimizer="adam",
    )


@claim(
    method="dp-mup",
    statement="For GPT-2's architecture, the lr of DP-Adam that DP-μP transfers gives at most the "
    "train loss of the lr that μP transfers",
    metric=LOSS,
    contenders=TRANSFORMER_RULES,
    expect=at_most(1.0, of="muP"),
    scales=scales(base=16, factor=4, full_base=32, full_factor=8, steps=30, tuning_seeds=2),
)
def transfer_gpt(
    contender: Contender,
    rng: np.random.Generator,
    *,
    width: int,
    base_width: int,
    steps: int,
    log2_lr: float | None = None,
) -> Measurement:
    """Train GPT-2's architecture on windows of 8 bytes of English: one block, lots of 64, σ = ¼.

    A window is the record that privacy protects. In so few steps a model learns which bytes are
    frequent and little more, so all losses are close to each other.
    """
    return _at_lr(
        text_task(),
        contender,
        rng,
        log2_lr,
        width=width,
        base_width=base_width,
        steps=steps,
        noise_multiplier=0.25,
        batch_size=64,
        optimizer="adam",
    )


def _spectra(rng: np.random.Generator, width: int) -> tuple[float, float, dict[str, float]]:
    """Return ‖S‖₂ and ‖τZ‖₂ of a hidden layer in training, and their stable ranks."""
    for_model, for_lots, for_noise = (torch_generator(stream) for stream in rng.spawn(3))
    digits = load_digits()
    images, labels = digits.train_images, digits.train_labels
    model, base = width_mlp(width), width_mlp(64)
    dp_mup_init_(model, base_shapes=base, generator=for_model)
    mechanism: dict[str, Any] = {"noise_multiplier": 2.0, "max_grad_norm": 1.0}
    groups = dp_mup_param_groups(
        model, 2.0**-5, optimizer="adam", batch_size=128, base_shapes=base, **mechanism
    )
    optimizer = torch.optim.Adam(groups)
    private = DPGradient(model, cross_entropy, generator=for_noise, **mechanism)
    for _ in range(STEPS_BEFORE_SPECTRA):
        lot = torch.rand(len(images), generator=for_lots) < 128 / len(images)
        private(images[lot], labels[lot], 128)
        optimizer.step()
    report = dp_snr_report(
        model, cross_entropy, images, labels, batch_size=128, generator=for_noise, **mechanism
    )
    hidden = report.names.index("2.weight")
    extras = {
        "stable rank of the signal": float(report.signal_rank[hidden]),
        "stable rank of the noise over n": float(report.noise_rank[hidden] / width),
    }
    return float(report.signal_norm[hidden]), float(report.noise_norm[hidden]), extras


SPECTRA_SCALES = {
    "smoke": Scale(seeds=2, sweep={"width": [32, 64]}),
    "quick": Scale(seeds=8, sweep={"width": [64, 128, 256, 512]}),
    "full": Scale(seeds=8, sweep={"width": [64, 128, 256, 512, 1024, 2048]}),
}


@claim(
    method="dp-mup",
    statement="The spectral norm of the mean clipped gradient does not depend on the width",
    metric=Metric("spectral norm of the signal", better="lower", average="geometric mean"),
    contenders=[Contender("hidden layer")],
    expect=trend(-0.1, 0.1, over="width"),
    scales=SPECTRA_SCALES,
)
def signal_spectrum(contender: Contender, rng: np.random.Generator, *, width: int) -> Measurement:
    """Measure ‖S‖₂ of the hidden layer of a perceptron on the digits, after 20 steps of DP-Adam.

    Every sample's gradient is clipped, to a norm that does not depend on the width, and their mean
    has a stable rank of a few. At initialization the readout is zero, and there is no gradient.
    """
    signal, _, extras = _spectra(rng, width)
    return Measurement(signal, extras=extras)


@claim(
    method="dp-mup",
    statement="The spectral norm of the noise grows with the root of the width",
    metric=Metric("spectral norm of the noise", better="lower", average="geometric mean"),
    contenders=[Contender("hidden layer")],
    expect=trend(0.45, 0.55, over="width"),
    scales=SPECTRA_SCALES,
)
def noise_spectrum(contender: Contender, rng: np.random.Generator, *, width: int) -> Measurement:
    """Measure ‖τZ‖₂ of the hidden layer's noise: τ · 2√n, with a stable rank of n/4."""
    _, noise, extras = _spectra(rng, width)
    return Measurement(noise, extras=extras)
