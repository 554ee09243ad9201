"""How an initialization decides what becomes of a network: kernels, neighbors and loss curves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.training.kernels_at_init import (
    kernel_target_alignment,
    leading_eigenvalues,
    neighbor_overlap,
    tangent_kernel,
)
from thalweg.training.layer_features import FeatureHooks, check_layers, hidden_layers, initial_mode
from thalweg.training.representation_similarity import linear_cka

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]
LossFunction = Callable[[Tensor, Tensor], Tensor]
Train = Callable[[nn.Module, Any, LossFunction], Iterable[float]]


@dataclass(frozen=True, eq=False)
class FateReport:
    """What `fate_report` has measured, by the names of the models.

    Attributes
    ----------
    ntk_spectrum, ck_spectrum : dict of str to ndarray of shape (k,)
        Leading eigenvalues at initialization, as shares of the trace, of the tangent kernel and of
        the conjugate kernel (the Gram matrix of the last hidden features, centered).
    ntk_alignment, ck_alignment : dict of str to float
        Centered alignment of these kernels with the targets: the larger, the faster the targets
        are learned at first.
    overlap_before, overlap_after : dict of str to float
        Share of nearest neighbors that the last hidden features have in common with the guide's;
        NaN without a guide.
    guide_cka : dict of str to ndarray of shape (checkpoints + 1,)
        Debiased CKA of the last hidden features with the guide's, at initialization and after each
        loss that training yields; NaN without a guide.
    own_cka : dict of str to ndarray of shape (checkpoints + 1,)
        The same with the model's own features at initialization: how far it has moved away.
    losses : dict of str to ndarray of shape (checkpoints,)
        What training yields.
    initial_loss : dict of str to float
        Of the probe inputs.
    """

    ntk_spectrum: dict[str, Values]
    ck_spectrum: dict[str, Values]
    ntk_alignment: dict[str, float]
    ck_alignment: dict[str, float]
    overlap_before: dict[str, float]
    overlap_after: dict[str, float]
    guide_cka: dict[str, Values]
    own_cka: dict[str, Values]
    losses: dict[str, Values]
    initial_loss: dict[str, float]

    def __str__(self) -> str:
        head = "NTK alignment   features' alignment   last loss   own CKA at the end   model"
        rows = [
            f"{self.ntk_alignment[n]:13.3f} {self.ck_alignment[n]:20.3f} "
            f"{self.losses[n][-1]:11.4g} {self.own_cka[n][-1]:20.3f}   {n}"
            for n in self.losses
        ]
        return "\n".join([head, *rows])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the loss curves; the legend shows the tangent kernel's alignment at the start."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        for name, losses in self.losses.items():
            label = f"{name} (alignment {self.ntk_alignment[name]:.2f})"
            ax.semilogy(np.arange(1, len(losses) + 1), losses, label=label)
        ax.set(xlabel="checkpoint", ylabel="loss")
        ax.legend()
        return ax


def fate_report(
    models: Mapping[str, nn.Module],
    loader: Iterable[Any],
    loss_fn: LossFunction,
    train_fn: Train,
    *,
    guide: nn.Module | None = None,
    layers: Mapping[str, str] | None = None,
    guide_layer: str | None = None,
    k_eigs: int = 20,
    neighbors: int = 10,
    probe_size: int = 128,
) -> FateReport:
    """Measure the initial geometry of some networks, train them, and see what becomes of it.

    Parameters
    ----------
    models : mapping of str to nn.Module
        Initialized networks, as by `guide_init` and by default. They are copied.
    loader : iterable of (inputs, targets)
        Read once for the probe inputs, and handed to ``train_fn``.
    loss_fn : callable
        ``loss_fn(outputs, targets) -> Tensor``, a scalar.
    train_fn : callable
        ``train_fn(model, loader, loss_fn)`` trains the model and yields a loss at each checkpoint,
        as a generator function does; features are measured then.
    guide : nn.Module, optional
        The untrained guide to compare with.
    layers : mapping of str to str, optional
        The layer of each model whose output counts as the last hidden features; by default the
        last that `guide_init` would take.
    guide_layer : str, optional
        The guide's.
    k_eigs : int ≥ 1, default 20
        Eigenvalues per kernel.
    neighbors : int ≥ 1, default 10
        Nearest inputs, for the overlap.
    probe_size : int ≥ 4, default 128
        Inputs that are measured; larger than ``neighbors``.

    Returns
    -------
    FateReport

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    The tangent kernel takes n c gradients for n inputs and c outputs, and O(n P) memory for P
    parameters. Everything is measured in eval mode. Batch normalization uses the statistics of the
    batch for features at initialization, and its running ones for the tangent kernel, which needs
    gradients of single inputs, and after training.

    References
    ----------
    "Representational similarity as initialization prior", NeurIPS 2026. A. Jacot, F. Gabriel,
    C. Hongler, "Neural tangent kernel: convergence and generalization in neural networks", NeurIPS
    2018. C. Cortes, M. Mohri, A. Rostamizadeh, "Algorithms for learning kernels based on centered
    alignment", JMLR 13 (2012).

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from thalweg.training import fate_report
    >>> _ = torch.manual_seed(0)
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> loader = [(x, torch.sin(3 * x))]
    >>> def train(model, loader, loss_fn):
    ...     optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ...     for _ in range(20):
    ...         for inputs, targets in loader:
    ...             optimizer.zero_grad()
    ...             loss = loss_fn(model(inputs), targets)
    ...             loss.backward()
    ...             optimizer.step()
    ...         yield loss.item()
    >>> model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    >>> report = fate_report({"tanh": model}, loader, nn.functional.mse_loss, train)
    >>> len(report.losses["tanh"]), bool(report.losses["tanh"][-1] < report.initial_loss["tanh"])
    (20, True)
    """
    check_integer("k_eigs", k_eigs, at_least=1)
    check_integer("neighbors", neighbors, at_least=1)
    check_integer("probe_size", probe_size, at_least=4)
    if not models:
        raise ValueError("models must hold at least one model")
    inputs, targets = _probe(loader, probe_size)
    if len(inputs) <= neighbors:
        raise ValueError(
            f"loader must give more than neighbors={neighbors} rows, got {len(inputs)}"
        )
    theirs = None
    if guide is not None:
        theirs = _last_hidden("guide_layer", copy.deepcopy(guide), guide_layer, inputs)
    fates = {
        name: _fate(
            copy.deepcopy(model),
            (layers or {}).get(name),
            loader,
            loss_fn,
            train_fn,
            inputs,
            targets,
            theirs,
            k_eigs,
            neighbors,
        )
        for name, model in models.items()
    }
    return FateReport(
        **{
            key: {name: fate[key] for name, fate in fates.items()}
            for key in next(iter(fates.values()))
        }
    )


def _fate(
    model: nn.Module,
    layer: str | None,
    loader: Iterable[Any],
    loss_fn: LossFunction,
    train_fn: Train,
    inputs: Tensor,
    targets: Tensor,
    theirs: Tensor | None,
    k_eigs: int,
    neighbors: int,
) -> dict[str, Any]:
    """Return the fields of the report for one model, which is trained."""
    start = _last_hidden("layers", model, layer, inputs)
    with initial_mode(model, batch_statistics=False):
        ntk = tangent_kernel(model, inputs)
        with torch.no_grad():
            initial_loss = float(loss_fn(model(inputs), targets))
    centered = start - start.mean(0)
    ck = centered @ centered.T
    wanted = _as_columns(targets)

    features = start
    guide_cka, own_cka, losses = [_cka(start, theirs)], [1.0], []
    for loss in train_fn(model, loader, loss_fn):
        losses.append(float(loss))
        features = _last_hidden("layers", model, layer, inputs, trained=True)
        guide_cka.append(_cka(features, theirs))
        own_cka.append(_cka(features, start))
    if not losses:
        raise ValueError("train_fn must yield at least one loss")
    return {
        "ntk_spectrum": leading_eigenvalues(ntk, k_eigs).cpu().numpy(),
        "ck_spectrum": leading_eigenvalues(ck, k_eigs).cpu().numpy(),
        "ntk_alignment": kernel_target_alignment(ntk, wanted),
        "ck_alignment": kernel_target_alignment(ck, wanted),
        "overlap_before": _overlap(start, theirs, neighbors),
        "overlap_after": _overlap(features, theirs, neighbors),
        "guide_cka": np.array(guide_cka),
        "own_cka": np.array(own_cka),
        "losses": np.array(losses),
        "initial_loss": initial_loss,
    }


def _probe(loader: Iterable[Any], size: int) -> tuple[Tensor, Tensor]:
    """Return the first rows of the loader."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for x, y in loader:
        inputs.append(x)
        targets.append(y)
        if sum(map(len, inputs)) >= size:
            break
    if not inputs:
        raise ValueError("loader must give at least one batch")
    return torch.cat(inputs)[:size], torch.cat(targets)[:size]


def _as_columns(targets: Tensor) -> Tensor:
    """Return targets as columns; class labels as indicators."""
    if targets.is_floating_point():
        return targets.reshape(len(targets), -1)
    return nn.functional.one_hot(targets.flatten().long()).double()


@torch.no_grad()
def _last_hidden(
    argument: str, model: nn.Module, layer: str | None, inputs: Tensor, *, trained: bool = False
) -> Tensor:
    """Return the last hidden features, of shape (n, f)."""
    with initial_mode(model, batch_statistics=not trained):
        name = (
            hidden_layers(argument, model, inputs)[-1]
            if layer is None
            else check_layers(argument, model, [layer])[0]
        )
        hooks = FeatureHooks(model, [name])
        try:
            return hooks(inputs)[name].flatten(1)
        finally:
            hooks.close()


def _cka(features: Tensor, theirs: Tensor | None) -> float:
    return float("nan") if theirs is None else float(linear_cka(features, theirs))


def _overlap(features: Tensor, theirs: Tensor | None, neighbors: int) -> float:
    return float("nan") if theirs is None else neighbor_overlap(features, theirs, neighbors)
