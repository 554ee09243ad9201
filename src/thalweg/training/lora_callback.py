"""Signal and drift of a LoRA model, logged by the trainers of transformers and TRL."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("lora"):
    import torch
    from torch import Tensor
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from thalweg.training.lora_drift import SignalDriftReport, lora_init_state, signal_drift
from thalweg.training.lora_layers import lora_matrices
from thalweg.training.lora_scaling import warn_unless_normalized

FILE_NAME = "lora_init_state.pt"
LARGEST_PRODUCT = 1.0
STANDARD_PRODUCT = 256 * 2e-5


class SignalDriftCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Measures signal and drift in training, for transformers' ``Trainer`` and TRL's.

    It copies A when training begins, keeps a `SignalDriftReport` at every n-th step, and adds its
    totals to the trainer's ``state.log_history``. The copy goes into every checkpoint, so that
    resumed training is measured from its true start.

    Parameters
    ----------
    every_n_steps : int ≥ 1, default 50
    adapter : str, default "default"
        The name of PEFT's adapter.
    init_state : mapping of str to Tensor, optional
        From `lora_init_state`, if the adapter has been trained before.

    Attributes
    ----------
    init_state : dict of str to Tensor or None
        What `signal_drift` wants to know of the start; None before training.
    reports : list of (int, SignalDriftReport)
        With the numbers of their steps.

    Warns
    -----
    UserWarning
        When training begins: if c · lr > 1, for c = s √r; if the optimizer's steps grow with
        the gradient; if adapters are in float16; and if training is resumed from a checkpoint
        without a copy of A.

    Notes
    -----
    *Cost.* That of `signal_drift` at every n-th step, and r · d_in numbers for each matrix.

    *Ours.* The paper's standard recipe has c · lr = 0.005. The limit 1 is where an
    entry of W can move by about (3 d_in)^-½ in one step, which is as large as its initial size.

    References
    ----------
    "LoRA-alpha", the paper on LoRA's scaling factor and its Signal-Drift framework, NeurIPS 2026.

    Examples
    --------
    ``trainer = SFTTrainer(..., peft_config=lora_alpha_config(), callbacks=[callback])`` with

    >>> from thalweg.training import SignalDriftCallback
    >>> callback = SignalDriftCallback(every_n_steps=10)
    >>> callback.init_state, callback.reports
    (None, [])
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        adapter: str = "default",
        init_state: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.every_n_steps = check_integer("every_n_steps", every_n_steps, at_least=1)
        self.adapter = adapter
        self.init_state = None if init_state is None else dict(init_state)
        self.reports: list[tuple[int, SignalDriftReport]] = []

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Copy A, or read it from the checkpoint, and check the recipe."""
        model, optimizer = kwargs["model"], kwargs.get("optimizer")
        if self.init_state is None and state.global_step > 0:
            self.init_state = _read(_checkpoint(args, state) / FILE_NAME)
        if self.init_state is None:
            self.init_state = lora_init_state(model, self.adapter)
        matrices = lora_matrices(model, self.adapter)
        coef = max(matrix.scale * math.sqrt(matrix.rank) for matrix in matrices)
        lr = args.learning_rate
        if optimizer is not None:
            warn_unless_normalized(optimizer)
            # A scheduler with warm-up has set lr to 0 already.
            lr = max(float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups)
        if coef * lr > LARGEST_PRODUCT:
            warnings.warn(
                f"c · lr = {coef:g} · {lr:g} = {coef * lr:g} is larger than 1, training may "
                f"diverge; the standard recipe has 256 · 2e-05 = {STANDARD_PRODUCT:g}",
                stacklevel=2,
            )
        if any(torch.float16 in (matrix.A.dtype, matrix.B.dtype) for matrix in matrices):
            warnings.warn(
                "adapters in float16 overflow with a large scale; keep them in float32 or bfloat16",
                stacklevel=2,
            )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure, at every n-th step."""
        if state.global_step % self.every_n_steps:
            return
        report = signal_drift(kwargs["model"], self.init_state, self.adapter)
        self.reports.append((state.global_step, report))
        state.log_history.append(
            {"epoch": state.epoch, "step": state.global_step, **report.as_dict()}
        )

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Put the copy of A into the checkpoint."""
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and folder.is_dir():
            torch.save(self.init_state, folder / FILE_NAME)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _read(file: Path) -> dict[str, Tensor] | None:
    if file.is_file():
        return dict(torch.load(file, weights_only=True))
    warnings.warn(
        f"training is resumed without {file}: signal and drift are measured from A as it is now; "
        "give SignalDriftCallback the init_state of the start if there is one",
        stacklevel=3,
    )
    return None
