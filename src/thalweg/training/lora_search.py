"""A scan over the coefficient of LoRA-alpha, for step sizes and horizons off the beaten track."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.training.lora_drift import evaluating
from thalweg.training.lora_layers import LoRAMatrix, lora_matrices
from thalweg.training.lora_scaling import lora_alpha, warn_unless_normalized

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]
LossFunction = Callable[[nn.Module, Any], Tensor]
OptimizerFactory = Callable[..., torch.optim.Optimizer]

COEFS = tuple(2.0**i for i in range(2, 14))
DIVERGED = 1.5  # times the loss at the start
RECENT = 5
FLAT = 1.02  # times the best loss
HELD_OUT_SHARE = 5


@dataclass(frozen=True, eq=False)
class CoefSearch:
    """The loss over LoRA-alpha's coefficient c.

    Attributes
    ----------
    coefs : ndarray of shape (n,)
        The coefficients tried, increasing.
    losses : ndarray of shape (n,)
        The held-out loss after training with each; infinite where training diverged.
    start_loss : float
        The held-out loss before.
    r : int or None
        The rank; None if the adapters differ in it.
    lr : float
    steps : int
        The length of each training.
    """

    coefs: Values
    losses: Values
    start_loss: float
    r: int | None
    lr: float
    steps: int

    @property
    def coef(self) -> float:
        """The coefficient with the least loss."""
        return float(self.coefs[np.argmin(self.losses)])

    @property
    def alpha(self) -> float:
        """``lora_alpha`` in PEFT's default convention for `coef`; NaN if ranks differ."""
        return math.nan if self.r is None else lora_alpha(self.r, coef=self.coef)

    @property
    def flat(self) -> tuple[float, float]:
        """The ends of the run of coefficients around `coef` with losses within 2 % of the best."""
        best = int(np.argmin(self.losses))
        good = self.losses <= self.losses[best] + (FLAT - 1) * abs(self.losses[best])
        low = best - int(np.argmin(np.append(good[best::-1], False))) + 1
        high = best + int(np.argmin(np.append(good[best:], False))) - 1
        return float(self.coefs[low]), float(self.coefs[high])

    @property
    def center(self) -> float:
        """The geometric middle of `flat`, which varies less than `coef`."""
        low, high = self.flat
        return math.sqrt(low * high)

    @property
    def on_edge(self) -> bool:
        """Whether `coef` is the first or last that was tried."""
        return self.coef in (self.coefs[0], self.coefs[-1])

    def __str__(self) -> str:
        alpha = "" if self.r is None else f", alpha = {self.alpha:g} at rank {self.r}"
        low, high = self.flat
        return (
            f"c = {self.coef:g}{alpha}: held-out loss {self.losses.min():.4g} after {self.steps} "
            f"steps, {self.start_loss:.4g} before; within 2 % for c = {low:g} … {high:g}"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss over the coefficient."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        finite = np.isfinite(self.losses)
        ax.semilogx(self.coefs[finite], self.losses[finite], marker="o", base=2)
        ax.axhline(self.start_loss, color="0.5", linestyle="dashed", label="before training")
        ax.axvspan(*self.flat, color="C0", alpha=0.15, label="within 2 % of the best")
        for coef in self.coefs[~finite]:
            ax.axvline(coef, color="C3", linestyle="dotted")
        ax.set(xlabel="coefficient c", ylabel=f"held-out loss after {self.steps} steps")
        ax.legend()
        return ax


def find_coef(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    *,
    r: int | None = None,
    lr: float,
    coefs: ArrayLike = COEFS,
    steps: int = 50,
    held_out: Sequence[Any] | None = None,
    total_steps: int | None = None,
    optimizer: OptimizerFactory | None = None,
    adapter: str = "default",
    generator: torch.Generator | None = None,
) -> CoefSearch:
    """Train a LoRA model shortly with each of several coefficients, and return their losses.

    Every run starts from the model's present state with the same random numbers. Its scale is
    c/√r for each matrix, the step size decreases linearly to 0, and a run whose recent losses
    exceed 1.5 times the loss at the start is stopped. The model, its gradients and the random
    streams are left as they were, bit for bit.

    Parameters
    ----------
    model : nn.Module
        With fresh adapters of PEFT or `LoRALinear`, whatever their alpha. All parameters that
        require gradients are trained.
    loss_fn : callable
        ``loss_fn(model, batch)``, a differentiable scalar.
    batches : sequence
        Passed to ``loss_fn`` one after the other, again and again.
    r : int ≥ 1, optional
        The adapters' rank, if all have the same; only checked.
    lr : float > 0
        The step size that training will use.
    coefs : array_like of shape (n,), default 4, 8, …, 8192
        Positive coefficients.
    steps : int ≥ 1, default 50
        The length of each run. The best coefficient falls as runs get longer: with fewer steps
        than the planned training has, the result is an upper limit.
    held_out : sequence, optional
        Batches whose mean loss is compared, without dropout. By default the last fifth of
        ``batches``, on which is then not trained.
    total_steps : int ≥ 1, optional
        The length of the planned training, to be warned if ``steps`` is far from it.
    optimizer : callable, optional
        Called as ``optimizer(parameters, lr=lr)``; by default AdamW without weight decay.
    adapter : str, default "default"
        The name of PEFT's adapter.
    generator : torch.Generator, optional
        Seeds the runs, for dropout and the like; by default torch's own stream.

    Returns
    -------
    CoefSearch

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    RuntimeError
        If every run diverged.

    Warns
    -----
    UserWarning
        If the best coefficient is at an end of the grid, or improves nothing; if ``steps`` is
        below a tenth of ``total_steps``; if the optimizer's steps grow with the gradient.

    Notes
    -----
    *Cost.* ``n · steps`` training steps, and a copy of all that is trained.

    *Ours.* The abstract has no such scan; it is for step sizes and lengths of training to which
    the default coefficient does not apply.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import LoRALinear, find_coef
    >>> generator = torch.Generator().manual_seed(0)
    >>> layer = LoRALinear(torch.nn.Linear(16, 2), r=4, generator=generator)
    >>> x = torch.randn(10, 32, 16, generator=generator)
    >>> batches = [(inputs, inputs[:, :2].tanh()) for inputs in x]
    >>> search = find_coef(
    ...     layer,
    ...     lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     batches,
    ...     lr=1e-3,
    ...     steps=20,
    ...     generator=generator,
    ... )
    >>> bool(search.losses.min() < 0.9 * search.start_loss), search.on_edge
    (True, False)
    """
    matrices = lora_matrices(model, adapter)
    rank = _common_rank(matrices, r)
    size = check_number("lr", lr, above=0)
    grid = np.unique(check_array("coefs", coefs, shape=("n",)))
    if len(grid) == 0 or grid[0] <= 0:
        raise ValueError("coefs must hold positive numbers")
    _check_steps(steps, total_steps)
    train, test = _split(batches, held_out)
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("model must have parameters that require gradients")
    make = _adamw if optimizer is None else optimizer
    warn_unless_normalized(make(trained, lr=size))
    losses = np.full(len(grid), np.inf)
    with _restored(model, matrices, trained) as reset, torch.enable_grad():
        start_loss = check_number("the loss before training", _mean_loss(model, loss_fn, test))
        seed = int(torch.randint(2**62, (), generator=generator))
        for i, coef in enumerate(grid):
            reset()
            for matrix in matrices:
                matrix.rescale(float(coef) / math.sqrt(matrix.rank))
            torch.manual_seed(seed)
            if _train(model, loss_fn, train, make(trained, lr=size), steps, start_loss):
                losses[i] = np.nan_to_num(_mean_loss(model, loss_fn, test), nan=np.inf)
    search = CoefSearch(grid, losses, start_loss, rank, size, steps)
    _judge(search)
    return search


def _adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


def _common_rank(matrices: list[LoRAMatrix], r: int | None) -> int | None:
    ranks = {matrix.rank for matrix in matrices}
    if r is not None and ranks != {check_integer("r", r, at_least=1)}:
        raise ValueError(f"r must be the rank of all adapters, got {r} for ranks {sorted(ranks)}")
    return ranks.pop() if len(ranks) == 1 else None


def _check_steps(steps: int, total_steps: int | None) -> None:
    check_integer("steps", steps, at_least=1)
    if total_steps is None:
        return
    if steps < check_integer("total_steps", total_steps, at_least=1) / 10:
        warnings.warn(
            f"{steps} steps are less than a tenth of the planned {total_steps}: the best "
            "coefficient falls with the number of steps, take the result as an upper limit",
            stacklevel=3,
        )


def _judge(search: CoefSearch) -> None:
    """Refuse or warn of a search that has found nothing.

    Raises
    ------
    RuntimeError
        If every run diverged.
    """
    if not np.isfinite(search.losses).any():
        raise RuntimeError("training diverged with every coefficient: lower lr or the coefs")
    if search.losses.min() >= search.start_loss:
        warnings.warn("no coefficient has lowered the held-out loss", stacklevel=3)
    elif search.on_edge and len(search.coefs) > 1:
        warnings.warn(
            f"the best coefficient, {search.coef:g}, is at an end of the grid: widen coefs",
            stacklevel=3,
        )


def _split(
    batches: Sequence[Any], held_out: Sequence[Any] | None
) -> tuple[Sequence[Any], Sequence[Any]]:
    if held_out is not None:
        if len(batches) < 1 or len(held_out) < 1:
            raise ValueError("batches and held_out must hold at least one batch each")
        return batches, held_out
    if len(batches) < 2:
        raise ValueError(f"batches must hold at least 2, one to hold out, got {len(batches)}")
    kept = max(1, len(batches) // HELD_OUT_SHARE)
    return batches[:-kept], batches[-kept:]


def _train(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Sequence[Any],
    optimizer: torch.optim.Optimizer,
    steps: int,
    start_loss: float,
) -> bool:
    """Train, and return whether the loss stayed finite and below 1.5 times the start's."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    recent: list[float] = []
    model.train()
    for batch in itertools.islice(itertools.cycle(batches), steps):
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        recent = [*recent[-RECENT + 1 :], loss.item()]
        # `not <=` is true of NaN, too.
        if not sum(recent) / len(recent) <= start_loss + (DIVERGED - 1) * abs(start_loss):
            return False
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return True


@torch.no_grad()
def _mean_loss(model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any]) -> float:
    with evaluating(model):
        return float(np.mean([float(loss_fn(model, batch)) for batch in batches]))


@contextmanager
def _restored(
    model: nn.Module, matrices: list[LoRAMatrix], trained: list[nn.Parameter]
) -> Iterator[Callable[[], None]]:
    """Yield a function that resets parameters and buffers; put everything back afterwards."""
    tensors = [*trained, *model.buffers()]
    copies = [tensor.detach().clone() for tensor in tensors]
    grads = [p.grad for p in trained]
    scales = [matrix.scale for matrix in matrices]
    devices = {p.device for p in trained if p.device.type == "cuda"}

    @torch.no_grad()
    def reset() -> None:
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    for p in trained:
        p.grad = None
    with torch.random.fork_rng(devices), evaluating(model):
        try:
            yield reset
        finally:
            reset()
            for p, grad in zip(trained, grads, strict=True):
                p.grad = grad
            for matrix, scale in zip(matrices, scales, strict=True):
                matrix.rescale(scale)
