"""Learning-rate decay as annealing: the scheduler."""

from __future__ import annotations

import warnings
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch.optim.lr_scheduler import LRScheduler

from thalweg.training.annealing_laws import Law, check_law, factor


class AnnealLR(LRScheduler):
    """Cool SGD from its own step size to ``lr_min_ratio`` times that, and there it rests.

    SGD with step h and gradient noise of variance σ² per coordinate is a Langevin diffusion at
    temperature hσ²/2. A hot start crosses barriers; the geometric law then spends equal time on
    every octave of temperature, and the last iterate rests in the basin that it fell into.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        SGD, for which the temperature is defined; with momentum β it is hσ²/(2(1 - β)).
    total_steps : int ≥ 2
        Number of optimizer steps; step k = total_steps - 1 has the last step size. Later ones
        keep it, with a warning.
    lr_min_ratio : float in (0, 1], default 1e-3
        Last over first step size.
    law : {"geometric", "linear", "cosine", "polynomial", "inverse", "log", "constant"}
        How the step falls. "log", the law of classical annealing, is 1/ln(e + k) and hardly falls.
    burn_in : float in [0, 1), default 0.1
        Share of the steps before it falls.
    power : float, default 1
        Exponent of the polynomial law.
    last_epoch : int, default -1
        As in torch's schedulers.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Warns
    -----
    UserWarning
        If the optimizer is adaptive, as Adam is, and has no temperature; and once, if it is
        stepped past ``total_steps``.

    Notes
    -----
    O(param groups) per step. The paper prescribes decay and its rate only through the theory;
    the geometric law is our resolution, the one whose time per octave is constant.

    References
    ----------
    "SGD with learning-rate decay for global nonconvex optimization", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import AnnealLR
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    >>> scheduler = AnnealLR(optimizer, total_steps=4, lr_min_ratio=1e-3, burn_in=0.0)
    >>> for _ in range(4):
    ...     print(f"{optimizer.param_groups[0]['lr']:.4f}")
    ...     optimizer.step()
    ...     scheduler.step()
    0.5000
    0.0500
    0.0050
    0.0005
    """

    _warned_of_end = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        lr_min_ratio: float = 1e-3,
        law: Law = "geometric",
        burn_in: float = 0.1,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        check_law(law, burn_in, power, lr_min_ratio, total_steps)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
            )
        if {"eps", "betas"} & set(optimizer.defaults):
            warnings.warn(
                f"{type(optimizer).__name__} scales its steps itself: its temperature is not "
                "defined, and AnnealLR is only a schedule",
                UserWarning,
                stacklevel=2,
            )
        self.total_steps = total_steps
        self.lr_min_ratio = lr_min_ratio
        self.law = law
        self.burn_in = burn_in
        self.power = power
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the step size of every param group."""
        # The initial step is counted by step() too: total_steps calls are the ordinary loop.
        if self.last_epoch > self.total_steps and not self._warned_of_end:
            self._warned_of_end = True
            warnings.warn(
                f"AnnealLR has been stepped past total_steps={self.total_steps}; the step size "
                "stays at its last value",
                UserWarning,
                stacklevel=3,
            )
        k = min(self.last_epoch, self.total_steps - 1)
        falling = factor(k, self.total_steps, self.lr_min_ratio, self.law, self.burn_in, self.power)
        return [base * falling for base in self.base_lrs]

    def _get_closed_form_lr(self) -> list[Any]:
        return self.get_lr()
