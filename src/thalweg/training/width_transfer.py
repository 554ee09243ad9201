"""Does a learning rate transfer over width? Sweeps at several widths, under several rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.progress import progress

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy

from thalweg.common.torch_gradients import NonFiniteGradientError
from thalweg.training.dp_mup import dp_mup_init_, dp_mup_param_groups
from thalweg.training.private_gradient import DPGradient, Loss
from thalweg.training.private_optimizers import private_optimizer
from thalweg.training.sample_clipping import ClipScope
from thalweg.training.spectral_rates import OPTIMIZERS, OptimizerName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]
# Called with the model, the model at the base width and the base lr, and keyword arguments for
# `dp_mup_param_groups`; may initialize the model.
WidthRule = Callable[..., list[dict[str, Any]]]
EVALUATED_AT_ONCE = 1024


def standard_rule(
    model: nn.Module, base: nn.Module, lr: float, **settings: Any
) -> list[dict[str, Any]]:
    """Keep the model's own initialization, and use one lr: the standard parametrization."""
    return dp_mup_param_groups(model, lr, base_shapes=base, rule="uniform", **settings)


def uniform_rule(
    model: nn.Module, base: nn.Module, lr: float, **settings: Any
) -> list[dict[str, Any]]:
    """Initialize by `dp_mup_init_`, and use one lr."""
    dp_mup_init_(model, base_shapes=base)
    return dp_mup_param_groups(model, lr, base_shapes=base, rule="uniform", **settings)


def mup_rule(model: nn.Module, base: nn.Module, lr: float, **settings: Any) -> list[dict[str, Any]]:
    """Initialize by `dp_mup_init_`, and use μP's rates, which know of no clipping and no noise."""
    dp_mup_init_(model, base_shapes=base)
    return dp_mup_param_groups(model, lr, base_shapes=base, rule="mup", **settings)


def dp_mup_rule(
    model: nn.Module, base: nn.Module, lr: float, **settings: Any
) -> list[dict[str, Any]]:
    """Initialize by `dp_mup_init_`, and use DP-μP's rates."""
    dp_mup_init_(model, base_shapes=base)
    return dp_mup_param_groups(model, lr, base_shapes=base, **settings)


WIDTH_RULES: dict[str, WidthRule] = {
    "sp": standard_rule,
    "uniform": uniform_rule,
    "mup": mup_rule,
    "dp_mup": dp_mup_rule,
}


@dataclass(frozen=True, eq=False)
class TransferReport:
    """Losses at W widths, K learning rates and S seeds, from `width_transfer_report`.

    Attributes
    ----------
    widths : tuple of int
    base_width : int
        What ``lrs`` refer to.
    lrs : ndarray of shape (K,)
        Base learning rates, ascending.
    losses : dict of str to ndarray of shape (W, K, S)
        The final loss over the data, by rule; infinite if training diverged. **Not private.**
    """

    widths: tuple[int, ...]
    base_width: int
    lrs: Values
    losses: dict[str, Values] = field(repr=False)

    def mean_losses(self, rule: str) -> Values:
        """Return the geometric mean over seeds, of shape (W, K)."""
        with np.errstate(divide="ignore"):
            means: Values = np.exp(np.log(self.losses[rule]).mean(axis=2))
        return means

    def best_lrs(self, rule: str) -> Values:
        """Return the best base lr at each width, of shape (W,)."""
        best: Values = self.lrs[self.mean_losses(rule).argmin(axis=1)]
        return best

    def best_losses(self, rule: str) -> Values:
        """Return the loss at the best lr of each width, of shape (W,)."""
        best: Values = self.mean_losses(rule).min(axis=1)
        return best

    def transferred_losses(self, rule: str) -> Values:
        """Return the loss of each width at the lr that is the best one at the base width, (W,)."""
        if self.base_width not in self.widths:
            raise ValueError(
                f"widths must hold base_width={self.base_width} to transfer from it, "
                f"got {self.widths}"
            )
        means = self.mean_losses(rule)
        transferred: Values = means[:, means[self.widths.index(self.base_width)].argmin()]
        return transferred

    def regrets(self, rule: str) -> Values:
        """Return the transferred loss over the best loss of each width, minus 1, of shape (W,)."""
        regrets: Values = self.transferred_losses(rule) / self.best_losses(rule) - 1
        return regrets

    def shifts(self, rule: str) -> Values:
        """Return by how many octaves the best lr of each width is above that of the base, (W,)."""
        best = self.best_lrs(rule)
        base = best[self.widths.index(self.base_width)]
        shifts: Values = np.log2(best / base)
        return shifts

    def __str__(self) -> str:
        lines = ["rule      width   best lr  best loss  transferred   shift"]
        for rule in self.losses:
            rows = zip(
                self.widths,
                self.best_lrs(rule),
                self.best_losses(rule),
                self.transferred_losses(rule),
                self.shifts(rule),
                strict=True,
            )
            lines += [
                f"{rule:8} {w:6} {lr:9.4g} {b:10.4g} {t:12.4g} {s:+7.1f}" for w, lr, b, t, s in rows
            ]
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None, *, rule: str | None = None) -> Axes:
        """Plot loss over base lr, a line per width, for one rule (by default the last)."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        rule = list(self.losses)[-1] if rule is None else rule
        means = self.mean_losses(rule)
        for i, width in enumerate(self.widths):
            color = plt.get_cmap("viridis")(0.9 * i / max(1, len(self.widths) - 1))
            ax.plot(self.lrs, means[i], ".-", color=color, label=f"width {width}")
            best = means[i].argmin()
            ax.plot(
                self.lrs[best], means[i, best], "o", color=color, markersize=9, fillstyle="none"
            )
        ax.set(xscale="log", yscale="log", xlabel="lr at the base width", ylabel="loss", title=rule)
        ax.legend()
        return ax


class _Run(NamedTuple):
    """One model in training; all runs of a sweep share lots and noise."""

    model: nn.Module
    private: DPGradient
    optimizer: torch.optim.Optimizer


def width_transfer_report(
    make_model: Callable[[int], nn.Module],
    widths: Sequence[int],
    data: tuple[Tensor, Tensor],
    *,
    lrs: Sequence[float],
    noise_multiplier: float,
    batch_size: int,
    steps: int,
    optimizer: OptimizerName = "adam",
    rules: Sequence[str] | Mapping[str, WidthRule] = ("sp", "mup", "dp_mup"),
    base_width: int | None = None,
    max_grad_norm: float = 1.0,
    clip_scope: ClipScope = "per_layer",
    automatic: bool = False,
    loss_fn: Loss = cross_entropy,
    seeds: Sequence[int] = (0,),
    show_progress: bool | None = None,
    **settings: Any,
) -> TransferReport:
    """Sweep the learning rate of private training at several widths.

    Every model is trained by `DPGradient` on Poisson-sampled lots. For a seed and width, the
    learning rates share initialization, lots and noise, so their curves are smooth.

    Parameters
    ----------
    make_model : callable
        ``make_model(width)`` returns a fresh model; torch's global generator is seeded before.
    widths : sequence of int
    data : pair of Tensor
        Inputs and targets, of shapes (N, ...).
    lrs : sequence of float > 0
        Base learning rates; octaves are a good grid.
    noise_multiplier : float ≥ 0
        σ.
    batch_size : int in [1, N]
        B, the expected size of a lot.
    steps : int ≥ 1
    optimizer : {"sgd", "adam", "muon"}, default "adam"
    rules : sequence of str, or mapping of str to callable
        "sp" is one lr for all layers and the model's own initialization; "uniform" is one lr,
        "mup" μP's rates and "dp_mup" DP-μP's, all three after `dp_mup_init_`. A callable is called
        as ``rule(model, base, lr, **settings)`` with the model at the base width, may initialize
        the model, and returns param groups; ``settings`` are for `dp_mup_param_groups`.
    base_width : int, optional
        What ``lrs`` refer to, by default the first of ``widths``.
    max_grad_norm : float > 0, default 1
        C.
    clip_scope : {"per_layer", "flat"}, default "per_layer"
    automatic : bool, default False
        Automatic clipping.
    loss_fn : callable, default `torch.nn.functional.cross_entropy`
        ``loss_fn(outputs, targets)``, the mean over samples.
    seeds : sequence of int, default (0,)
    show_progress : bool, optional
        By default on a terminal.
    **settings
        Further arguments of `dp_mup_param_groups`: ``regime``, ``betas``, ``roles``, …

    Returns
    -------
    TransferReport
        With its ``plot``. The losses are computed from the data: they are not private.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Cost.* Training, times rules × widths × lrs × seeds. Noise is drawn once per lot and width.

    References
    ----------
    "DP-μP: Width transfer of hyperparameters under differential privacy", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import width_transfer_report
    >>> def perceptron(width):
    ...     return torch.nn.Sequential(
    ...         torch.nn.Linear(8, width), torch.nn.ReLU(),
    ...         torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2),
    ...     )
    >>> x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    >>> report = width_transfer_report(
    ...     perceptron, [8, 128], (x, (x[:, 0] > 0).long()), lrs=[2.0**k for k in range(-8, -1)],
    ...     noise_multiplier=2.0, batch_size=64, steps=20, rules=["mup", "dp_mup"],
    ... )
    >>> bool(abs(report.shifts("dp_mup")[1]) < abs(report.shifts("mup")[1]))
    True
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    for width in widths:
        check_integer("widths", width, at_least=1)
    if not widths:
        raise ValueError("widths must hold at least one width, got none")
    base_width = widths[0] if base_width is None else base_width
    base_width = check_integer("base_width", base_width, at_least=1)
    x, y = data
    if len(x) != len(y) or len(x) == 0:
        raise ValueError(f"data must be equally many inputs and targets, got {len(x)}, {len(y)}")
    check_integer("batch_size", batch_size, at_least=1, at_most=len(x))
    check_integer("steps", steps, at_least=1)
    grid = np.sort([check_number("lrs", lr, above=0) for lr in lrs])
    if len(grid) == 0:
        raise ValueError("lrs must hold at least one learning rate, got none")
    if not seeds:
        raise ValueError("seeds must hold at least one seed, got none")
    chosen = _chosen(rules)
    settings |= {
        "optimizer": optimizer,
        "noise_multiplier": noise_multiplier,
        "batch_size": batch_size,
        "max_grad_norm": max_grad_norm,
        "clip_scope": clip_scope,
    }
    shape = (len(widths), len(grid), len(seeds))
    losses = {name: np.full(shape, np.inf) for name in chosen}
    total = len(chosen) * len(widths) * len(seeds) * steps
    with progress("sweeping learning rates", total, show=show_progress) as advance:
        for i, width in enumerate(widths):
            for j, seed in enumerate(seeds):
                for name, rule in chosen.items():
                    runs = []
                    for lr in grid:
                        model, groups = _fresh(
                            make_model, width, base_width, rule, float(lr), seed, settings
                        )
                        private = DPGradient(
                            model,
                            loss_fn,
                            noise_multiplier=noise_multiplier,
                            max_grad_norm=max_grad_norm,
                            clip_scope=clip_scope,
                            automatic=automatic,
                        )
                        runs.append(_Run(model, private, private_optimizer(optimizer, groups)))
                    final = _train(runs, x, y, loss_fn, batch_size, steps, seed, advance)
                    losses[name][i, :, j] = final
    return TransferReport(tuple(widths), base_width, grid, losses)


def _chosen(rules: Sequence[str] | Mapping[str, WidthRule]) -> dict[str, WidthRule]:
    if isinstance(rules, Mapping):
        return dict(rules)
    return {name: WIDTH_RULES[check_choice("rules", name, WIDTH_RULES)] for name in rules}


def _fresh(
    make_model: Callable[[int], nn.Module],
    width: int,
    base_width: int,
    rule: WidthRule,
    lr: float,
    seed: int,
    settings: Mapping[str, Any],
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a model and its groups, the same ones for the same seed."""
    with torch.random.fork_rng():
        base = make_model(base_width)
        torch.manual_seed(seed)
        model = make_model(width)
        return model, rule(model, base, lr, **settings)


def _train(
    runs: list[_Run],
    x: Tensor,
    y: Tensor,
    loss_fn: Loss,
    batch_size: int,
    steps: int,
    seed: int,
    advance: Callable[[], None],
) -> list[float]:
    """Train all runs on the same lots with the same noise; return their final losses."""
    lots = torch.Generator().manual_seed(seed)
    for run in runs:
        run.private.generator = torch.Generator(x.device).manual_seed(seed)
    alive = dict(enumerate(runs))
    for _ in range(steps):
        lot = (torch.rand(len(x), generator=lots) < batch_size / len(x)).to(x.device)
        noise = runs[0].private.noise()
        for k, run in list(alive.items()):
            try:
                run.private(x[lot], y[lot], batch_size, noise=noise)
                run.optimizer.step()
            except NonFiniteGradientError:
                del alive[k]
        advance()
    return [
        _loss(run.model, x, y, loss_fn) if k in alive else math.inf for k, run in enumerate(runs)
    ]


@torch.no_grad()
def _loss(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Loss) -> float:
    """Return the mean loss over the data; infinity if it is not a number."""
    parts = zip(*(torch.split(part, EVALUATED_AT_ONCE) for part in (x, y)), strict=True)
    total = sum(len(inputs) * float(loss_fn(model(inputs), targets)) for inputs, targets in parts)
    return total / len(x) if math.isfinite(total) else math.inf
