"""How the claims about LoRA-alpha make adapters and optimizers, with PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from thalweg.common.optional import requires
from thalweg.training import lora_alpha_config

with requires("lora"):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.optimizers import create_loraplus_optimizer
    from torch import nn

Adapted = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[..., Adapted]


def heuristic(r: int, alpha: float, targets: Sequence[str], **settings: Any) -> LoraConfig:
    """Return a config with a given α."""
    return LoraConfig(r=r, lora_alpha=alpha, target_modules=[*targets], **settings)  # type: ignore[arg-type]


def adapt(model: nn.Module, config: LoraConfig) -> PeftModel:
    """Put adapters into the model, in place."""
    # PEFT warns of how some adapters must be saved, and trips over renamed parts of transformers.
    with warnings.catch_warnings(action="ignore"):
        adapted: PeftModel = get_peft_model(model, config)
    return adapted


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW without weight decay over all that requires gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)


def rule(small_lr: float) -> Make:
    """Return LoRA-alpha at a small step size, with its default coefficient or another."""

    def make(
        model: nn.Module, r: int, targets: Sequence[str], *, lr: float = small_lr, **coef: float
    ) -> Adapted:
        config = lora_alpha_config(r=r, target_modules=[*targets], **coef)  # type: ignore[arg-type]
        adapted = adapt(model, config)
        return adapted, adamw(adapted, lr)

    return make


def habit(multiple: float, **settings: Any) -> Make:
    """Return LoRA with α = ``multiple`` · r, by default at the tuned step size alone."""

    def make(model: nn.Module, r: int, targets: Sequence[str], *, lr: float) -> Adapted:
        adapted = adapt(model, heuristic(r, multiple * r, targets, **settings))
        return adapted, adamw(adapted, lr)

    return make


def fixed_alpha(model: nn.Module, r: int, targets: Sequence[str], *, lr: float) -> Adapted:
    """LoRA with α = 16 at every rank, another habit."""
    adapted = adapt(model, heuristic(r, 16, targets))
    return adapted, adamw(adapted, lr)


def lora_plus(
    model: nn.Module, r: int, targets: Sequence[str], *, lr: float, ratio: float
) -> Adapted:
    """LoRA+ of PEFT: α = r, and B with a step size ``ratio`` times as large."""
    adapted = adapt(model, heuristic(r, r, targets))
    optimizer = create_loraplus_optimizer(
        adapted, torch.optim.AdamW, lr=lr, loraplus_lr_ratio=ratio
    )
    return adapted, optimizer


def full(model: nn.Module, r: int, targets: Sequence[str], *, lr: float) -> Adapted:
    """Train the matrices themselves, without adapters."""
    model.requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.split(".")[-1] in targets:
            module.weight.requires_grad_(True)
    return model, adamw(model, lr)


def linear_decay(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the schedule of all contenders: to 0 over the run, without warm-up."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
