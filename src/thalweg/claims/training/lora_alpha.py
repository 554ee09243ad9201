"""Claims about LoRA-alpha, LoRA's scaling factor as a multiple of the square root of the rank.

A contender's ``make`` is called as ``make(model, r, targets, **tuned)`` with a pretrained model,
the rank and the names of the linear layers to adapt. It returns the adapted model and its
optimizer. For a method of your own: ``Contender("mine", make=lambda model, r, targets, lr: ...,
tune={"lr": [...]})``. For a seed all contenders get the same task and batches; the step size
decreases linearly to 0 for all.

The claims on SmolLM2, a language model of 135 M parameters, stand in ``lora_smollm_claims``; those
below run on a perceptron that is pretrained on digits and must learn rotated ones with permuted
labels. On that task the small step size is 2e-3: a run has 150 steps instead of thousands.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from thalweg.claims.training.lora_contenders import (
    adamw,
    adapt,
    fixed_alpha,
    full,
    habit,
    heuristic,
    linear_decay,
    lora_plus,
    rule,
)
from thalweg.claims.training.lora_smollm_claims import (
    alpha_beats_lr_on_smollm as alpha_beats_lr_on_smollm,
)
from thalweg.claims.training.lora_smollm_claims import (
    smallest_lr_on_smollm as smallest_lr_on_smollm,
)
from thalweg.claims.training.lora_smollm_claims import (
    square_root_law_on_smollm as square_root_law_on_smollm,
)
from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import pretrained_digits_mlp, sample_batch, shifted_digits
from thalweg.training import (
    as_lora_plus_groups,
    find_coef,
    lora_init_state,
    signal_drift,
    spectral_suppression,
)

with requires("lora"):
    import torch
    from peft.optimizers import create_loraplus_optimizer
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy

SMALL_LR = 2e-3
BATCH = 64
TARGETS = ("0", "2")
LRS = [1e-3, 3e-3, 1e-2, 2e-2, 3e-2, 6e-2, 1e-1, 3e-1]
LOSS = Metric("test cross-entropy", better="lower", curve=("step", "cross-entropy of the batch"))

RULE = Contender("LoRA-alpha", make=rule(SMALL_LR))
ALPHA_R = Contender("α = r", make=habit(1), tune={"lr": LRS})
ALPHA_2R = Contender("α = 2r", make=habit(2), tune={"lr": LRS})
LORA_PLUS = Contender(
    "LoRA+",
    make=lora_plus,
    tune={"lr": [3e-4, 1e-3, 3e-3, 1e-2, 3e-2], "ratio": [1.0, 4.0, 16.0, 64.0]},
)


def digits_run(
    contender: Contender, rng: np.random.Generator, r: int, steps: int, **tuned: Any
) -> Measurement:
    """Fine-tune the two hidden layers, and return the test loss and the final drift."""
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_instance)
    data = shifted_digits(generator)
    assert contender.make is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(for_contender.integers(2**62)))
        model, optimizer = contender.make(pretrained_digits_mlp(), r, TARGETS, **tuned)
    start = lora_init_state(model) if hasattr(model, "peft_config") else None
    schedule = linear_decay(optimizer, steps)
    losses = np.empty(steps)
    model.train()
    for step in range(steps):
        images, labels = sample_batch(data.train_images, data.train_labels, BATCH, generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        losses[step] = loss.item()
    model.eval()
    with torch.no_grad():
        value = float(cross_entropy(model(data.test_images), data.test_labels))
    extras = {} if start is None else _drift(model, start)
    curve = (np.arange(1, steps + 1), np.nan_to_num(losses, nan=np.inf))
    return Measurement(value if math.isfinite(value) else math.inf, curve=curve, extras=extras)


def _drift(model: nn.Module, start: dict[str, Tensor]) -> dict[str, float]:
    total = signal_drift(model, start).total
    return {"drift ratio": total.drift_ratio, "relative change of A": total.relative_a_change}


@claim(
    method="lora-alpha",
    statement="At rank 8 untuned LoRA-alpha reaches a lower test loss than α = r, α = 2r, rsLoRA, "
    "DoRA and PiSSA with a tuned lr",
    metric=LOSS,
    contenders=[
        RULE,
        ALPHA_R,
        ALPHA_2R,
        Contender("rsLoRA, α = 2r", make=habit(2, use_rslora=True), tune={"lr": LRS}),
        Contender("DoRA, α = 2r", make=habit(2, use_dora=True), tune={"lr": LRS}),
        Contender("PiSSA, α = r", make=habit(1, init_lora_weights="pissa"), tune={"lr": LRS}),
        Contender(
            "full fine-tuning",
            make=full,
            tune={"lr": [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]},
            control=True,
        ),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, r=8, steps=4),
        "quick": Scale(seeds=10, tuning_seeds=1, r=8, steps=150),
        "full": Scale(seeds=20, tuning_seeds=3, r=8, steps=150),
    },
)
def alpha_beats_lr(
    contender: Contender, rng: np.random.Generator, *, r: int, steps: int, **tuned: Any
) -> Measurement:
    """Fine-tune with the shipped coefficient, 256, at a small lr, against tuned step sizes.

    With the habits α = r and α = 2r the tuned lr is more than ten times as large, and so is the
    drift ratio. DoRA and PiSSA change what is trained and how it starts; full fine-tuning, without
    the restriction to a low rank, is a control.
    """
    return digits_run(contender, rng, r, steps, **tuned)


@claim(
    method="lora-alpha",
    statement="Untuned LoRA-alpha is within 5 % of the test loss of LoRA+ with tuned lr and ratio",
    metric=LOSS,
    contenders=[RULE, LORA_PLUS],
    expect=at_most(1.05, of="LoRA+"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, r=8, steps=3),
        "quick": Scale(seeds=10, tuning_seeds=1, r=8, steps=150),
        "full": Scale(seeds=20, tuning_seeds=3, r=8, steps=150),
    },
)
def matches_lora_plus(
    contender: Contender, rng: np.random.Generator, *, r: int, steps: int, **tuned: Any
) -> Measurement:
    """Compare with the decisive peer in the setting of `alpha_beats_lr`.

    A larger α is LoRA+ with a larger ratio, exactly (`lora_plus_identity`). So LoRA+ can do
    whatever LoRA-alpha does, if it is tuned; what the rule offers is that it is not.
    """
    return digits_run(contender, rng, r, steps, **tuned)


@claim(
    method="lora-alpha",
    statement="At a small lr LoRA-alpha's test loss is at most half of that of the rank-tied "
    "heuristics and of rsLoRA",
    metric=LOSS,
    contenders=[
        RULE,
        Contender("α = r", make=lambda *args: habit(1)(*args, lr=SMALL_LR)),
        Contender("α = 2r", make=lambda *args: habit(2)(*args, lr=SMALL_LR)),
        Contender(
            "rsLoRA, α = 2r", make=lambda *args: habit(2, use_rslora=True)(*args, lr=SMALL_LR)
        ),
        Contender("full fine-tuning", make=lambda *args: full(*args, lr=SMALL_LR), control=True),
    ],
    expect=at_most(0.5, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, sweep={"r": (2, 8)}, steps=4),
        "quick": Scale(seeds=8, sweep={"r": (2, 8, 32)}, steps=150),
        "full": Scale(seeds=20, sweep={"r": (2, 4, 8, 16, 32, 64)}, steps=150),
    },
)
def small_learning_rate(
    contender: Contender, rng: np.random.Generator, *, r: int, steps: int
) -> Measurement:
    """Fine-tune at the same small lr with every scaling factor, at ranks from 2 to 64.

    This is the optimization gap: what the heuristics leave on the table when lr is not raised.
    """
    return digits_run(contender, rng, r, steps)


@claim(
    method="lora-alpha",
    statement="Over ranks 2 … 64 untuned LoRA-alpha has a lower mean test loss than α = r, "
    "α = 2r and α = 16 with the best lr for all ranks",
    metric=LOSS,
    contenders=[
        RULE,
        ALPHA_R,
        ALPHA_2R,
        Contender("α = 16", make=fixed_alpha, tune={"lr": LRS}),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, sweep={"r": (2, 8)}, steps=3),
        "quick": Scale(seeds=8, tuning_seeds=1, sweep={"r": (2, 8, 32)}, steps=150),
        "full": Scale(seeds=20, tuning_seeds=2, sweep={"r": (2, 4, 8, 16, 32, 64)}, steps=150),
    },
)
def ranks(
    contender: Contender, rng: np.random.Generator, *, r: int, steps: int, **tuned: Any
) -> Measurement:
    """Let one rule, and one tuned lr for each heuristic, serve all ranks.

    The claim fails. LoRA-alpha is better than α = r and α = 2r on average, and by far the best at
    rank 32; at rank 2, whose loss dominates the mean, α = 16 with a tuned lr is better.
    """
    return digits_run(contender, rng, r, steps, **tuned)


@claim(
    method="lora-alpha",
    statement="The best α grows like the square root of the rank",
    metric=Metric("best α", better="higher", average="geometric mean"),
    contenders=[Contender("LoRA-alpha, scanned", make=rule(SMALL_LR))],
    expect=trend(0.3, 0.7, over="r"),
    scales={
        "smoke": Scale(seeds=2, sweep={"r": (2, 8)}, steps=4, per_octave=0.25),
        "quick": Scale(seeds=8, sweep={"r": (2, 8, 32)}, steps=150, per_octave=1),
        "full": Scale(seeds=10, sweep={"r": (2, 4, 8, 16, 32, 64)}, steps=150, per_octave=2),
    },
)
def square_root_law(
    contender: Contender,
    rng: np.random.Generator,
    *,
    r: int,
    steps: int,
    per_octave: float,
) -> Measurement:
    """Scan α from 16 to 32768 by `find_coef`, and take the middle of the flat optimum.

    The flat optimum is the run of α whose loss is within 2 % of the best: the single best
    one jumps about. Signals that are coherent over the ranks would give a constant α, the habits
    a slope of 1. On this small task the slope is well below 1, and closer to that of coherent
    signals than the law has it; see `square_root_law_on_smollm` for a language model.
    """
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_instance)
    data = shifted_digits(generator)
    assert contender.make is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(for_contender.integers(2**62)))
        model, _ = contender.make(pretrained_digits_mlp(), r, TARGETS)
    alphas = 2.0 ** np.arange(4, 15.01, 1 / per_octave)
    batches = [
        sample_batch(data.train_images, data.train_labels, BATCH, generator) for _ in range(steps)
    ]
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        search = find_coef(
            model,
            lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
            batches,
            lr=SMALL_LR,
            coefs=alphas / math.sqrt(r),
            steps=steps,
            held_out=[(data.test_images, data.test_labels)],
            generator=generator,
        )
    kept = np.isfinite(search.losses)
    return Measurement(
        search.center * math.sqrt(r),
        curve=(alphas[kept], search.losses[kept]),
        extras={"loss": float(search.losses.min()), "on the edge": float(search.on_edge)},
    )


def by_alpha(model: nn.Module, r: int, factor: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Multiply α = r by ``factor``."""
    return habit(factor)(model, r, TARGETS, lr=SMALL_LR)


def by_lr(model: nn.Module, r: int, factor: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Multiply lr by ``factor``."""
    return habit(1)(model, r, TARGETS, lr=SMALL_LR * factor)


@claim(
    method="lora-alpha",
    statement="A 16 times larger α does not raise the drift ratio; a 16 times larger lr does",
    metric=Metric("growth of the drift ratio", better="lower", average="geometric mean"),
    contenders=[Contender("16 α", make=by_alpha), Contender("16 lr", make=by_lr)],
    expect=at_most(1.0),
    scales={
        "smoke": Scale(seeds=2, r=8, steps=10),
        "quick": Scale(seeds=10, r=8, steps=150),
        "full": Scale(seeds=20, r=8, steps=150),
    },
)
def drift_follows_lr(
    contender: Contender, rng: np.random.Generator, *, r: int, steps: int
) -> Measurement:
    """Measure drift over signal at the end, relative to the same run with α = r and lr = 2e-3.

    Either factor amplifies the signal. Adam moves A by at most about lr per step, whatever α
    is; a larger α even ends with less drift, as the loss, and with it A, comes to rest earlier.
    """
    assert contender.make is not None
    child = np.random.SeedSequence(int(rng.integers(2**62)))
    ratios = []
    for factor in (1.0, 16.0):

        def make(model: nn.Module, r: int, targets: Any, factor: float = factor) -> Any:
            assert contender.make is not None
            return contender.make(model, r, factor)

        run = digits_run(Contender("run", make=make), np.random.default_rng(child), r, steps)
        ratios.append(run.extras["drift ratio"])
    return Measurement(ratios[1] / ratios[0], extras={"drift ratio": ratios[1]})


def groups(model: nn.Module, lr: float, c: float) -> torch.optim.Optimizer:
    """AdamW with the groups of `as_lora_plus_groups`."""
    return torch.optim.AdamW(as_lora_plus_groups(model, lr, c))


def peft_groups(model: Any, lr: float, c: float) -> torch.optim.Optimizer:
    """LoRA+ of PEFT, which has one ε for A and B."""
    optimizer: torch.optim.Optimizer = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=lr, loraplus_lr_ratio=c
    )
    return optimizer


def scaled_lr(model: nn.Module, lr: float, c: float) -> torch.optim.Optimizer:
    """AdamW with a larger lr for A and B."""
    return adamw(model, c * lr)


@claim(
    method="lora-alpha",
    statement="LoRA with a c times larger α is LoRA+ with ratio c, step by step",
    metric=Metric("relative difference of the updates", better="lower", average="geometric mean"),
    contenders=[
        Contender("as_lora_plus_groups", make=groups),
        Contender("LoRA+ of PEFT", make=peft_groups),
        Contender("c times larger lr", make=scaled_lr, control=True),
    ],
    expect=at_most(1e-6),
    scales={
        "smoke": Scale(seeds=2, r=8, c=10.0, steps=5),
        "quick": Scale(seeds=8, r=8, c=10.0, steps=50),
        "full": Scale(seeds=10, r=8, c=10.0, steps=150),
    },
)
def lora_plus_identity(
    contender: Contender, rng: np.random.Generator, *, r: int, c: float, steps: int
) -> Measurement:
    """Train twice in float64, with α = c r and with α = r and other step sizes, and compare W.

    The first contender divides Adam's ε for B by c and agrees to rounding. LoRA+ as PEFT has
    it agrees as far as ε is small against the gradients. A larger lr for both matrices, the
    control, is a different method.
    """
    assert contender.make is not None
    for_instance = rng.spawn(2)[0]
    seed = int(for_instance.integers(2**62))
    larger = _updates(lambda model, lr: adamw(model, lr), c * r, r, steps, seed)
    make = contender.make
    other = _updates(lambda model, lr: make(model, lr, c), r, r, steps, seed)
    return Measurement(float((other - larger).norm() / larger.norm()))


def _updates(optimizer_of: Any, alpha: float, r: int, steps: int, seed: int) -> Tensor:
    """Return the low-rank updates of all layers after training, in one vector."""
    generator = torch.Generator().manual_seed(seed)
    data = shifted_digits(generator)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = adapt(pretrained_digits_mlp(), heuristic(r, alpha, TARGETS)).double()
    optimizer = optimizer_of(model, SMALL_LR / 2)
    for _ in range(steps):
        images, labels = sample_batch(data.train_images, data.train_labels, BATCH, generator)
        optimizer.zero_grad()
        cross_entropy(model(images.double()), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    layers: Any = [model.get_submodule(f"base_model.model.{name}") for name in TARGETS]
    return torch.cat([layer.get_delta_weight("default").flatten() for layer in layers]).detach()


@claim(
    method="lora-alpha",
    statement="With α = r the largest curvature in B is at most a third of that in W",
    metric=Metric("largest curvature in B over W", better="lower", average="geometric mean"),
    contenders=[
        Contender("α = r", make=habit(1)),
        Contender("LoRA-alpha", make=rule(SMALL_LR), control=True),
    ],
    expect=at_most(1 / 3),
    scales={
        "smoke": Scale(seeds=2, r=8, batch=64, iters=8),
        "quick": Scale(seeds=8, r=8, batch=512, iters=30),
        "full": Scale(seeds=20, r=8, batch=1438, iters=40),
    },
)
def spectral_suppression_at_start(
    contender: Contender, rng: np.random.Generator, *, r: int, batch: int, iters: int
) -> Measurement:
    """Estimate the largest eigenvalues of the Hessian's blocks when fine-tuning starts.

    The prediction ``s² ‖A‖²`` is an upper bound, and about s²/3; a random A meets the steepest
    direction only by chance, so that the curvature falls by more. LoRA-alpha, the control, scales
    it up by s², far beyond that of the full weights.
    """
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_instance)
    data = shifted_digits(generator)
    assert contender.make is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(for_contender.integers(2**62)))
        model, _ = contender.make(pretrained_digits_mlp(), r, TARGETS, lr=SMALL_LR)
    report = spectral_suppression(
        model,
        lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
        sample_batch(data.train_images, data.train_labels, batch, generator),
        iters=iters,
        generator=generator,
    )
    extras = {"s²‖A‖²": report.predicted_ratio, "mean s²‖A‖²/d": report.mean_ratio}
    return Measurement(report.ratio, extras=extras)
