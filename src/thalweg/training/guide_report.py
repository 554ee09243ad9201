"""What an alignment to a guide has done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("training"):
    from torch import Tensor, nn

from thalweg.training.guide_loss import Pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class GuideInitReport:
    """What `guide_init` has done. J is the number of pairs.

    Attributes
    ----------
    target : nn.Module
        The network that was given, initialized.
    pairs : tuple of (str, str)
        The target's and the guide's layers.
    cka_before, cka_after : ndarray of shape (J,)
        Debiased linear CKA of each pair on a held-out batch, whatever the similarity was.
    steps_run : int
        Updates of the target.
    seconds : float
    loss_path : ndarray of shape (steps_run or steps_run + 1,)
        The loss before each update; one more if ``tol`` was reached.
    guide_rank : ndarray of shape (J,)
        Effective number of directions, ``(Σλ)²/Σλ²``, of the guide's centered features. A guide
        with less than 3 tells little more than one direction.
    scale_before, scale_after : dict of str to float
        The scale of the target's layers on the held-out batch, as ``match_scale`` says: fresh, and
        in the end. Layers whose input is not made by a single module are not in it.
    weight_norm_before, weight_norm_after : dict of str to float
        Frobenius norm of each parameter.
    fresh_init_state : dict of str to Tensor
        The target's state before, for controls: ``copy.load_state_dict(fresh_init_state)``.
    """

    target: nn.Module = field(repr=False)
    pairs: tuple[Pair, ...]
    cka_before: Values
    cka_after: Values
    steps_run: int
    seconds: float
    loss_path: Values = field(repr=False)
    guide_rank: Values
    scale_before: dict[str, float] = field(repr=False)
    scale_after: dict[str, float] = field(repr=False)
    weight_norm_before: dict[str, float] = field(repr=False)
    weight_norm_after: dict[str, float] = field(repr=False)
    fresh_init_state: dict[str, Tensor] = field(repr=False)

    def __str__(self) -> str:
        lines = ["CKA before   after  guide's rank  layers"]
        rows = zip(self.cka_before, self.cka_after, self.guide_rank, self.pairs, strict=True)
        lines += [f"{b:10.3f} {a:7.3f} {r:13.1f}  {t} ← {g}" for b, a, r, (t, g) in rows]
        return "\n".join([*lines, f"{self.steps_run} steps in {self.seconds:.1f} s"])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the similarity of each pair before and after."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        rows = np.arange(len(self.pairs))
        ax.hlines(rows, self.cka_before, self.cka_after, color="0.7")
        ax.plot(self.cka_before, rows, "o", color="0.5", label="fresh")
        ax.plot(self.cka_after, rows, "o", color="C0", label=f"after {self.steps_run} steps")
        ax.set_yticks(rows, [f"{t} ← {g}" for t, g in self.pairs])
        ax.set(xlabel="CKA with the guide, held-out batch", xlim=(min(0.0, *self.cka_before), 1.0))
        ax.margins(y=0.2)
        ax.legend()
        return ax
