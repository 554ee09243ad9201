"""Initialize a network with the representational geometry of an untrained guide."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.progress import Advance, progress

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.modules.dropout import _DropoutNd

from thalweg.training.guide_loss import GuideLoss, Pair, Similarity
from thalweg.training.guide_report import GuideInitReport
from thalweg.training.layer_features import (
    POOLS,
    Pool,
    check_layers,
    has_batch_norm,
    hidden_layers,
    initial_mode,
    trace,
)
from thalweg.training.paired_features import PairedFeatures, cast_inputs
from thalweg.training.scale_matching import Scale, scales
from thalweg.training.scale_matching import match_scale as rescale
from thalweg.training.unlabeled_batches import Data, UnlabeledBatches, like_noise

Values = NDArray[np.float64]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def guide_init(
    target: nn.Module,
    guide: nn.Module,
    data: Data,
    *,
    target_layers: Sequence[str] | None = None,
    guide_layers: Sequence[str] | None = None,
    pairing: Literal["proportional", "last"] = "proportional",
    steps: int = 300,
    batch_size: int = 256,
    lr: float = 1e-3,
    optimizer: Literal["adam", "sgd"] | Callable[..., torch.optim.Optimizer] = "adam",
    similarity: Similarity = "cka",
    debiased: bool = True,
    pool: Pool = "flatten",
    noise_inputs: bool = False,
    match_scale: bool | Scale = True,
    freeze: Sequence[str] | None = None,
    tol: float = 0.98,
    guide_reset: bool = True,
    guide_dtype: torch.dtype | None = None,
    allow_trained_guide: bool = False,
    show_progress: bool | None = None,
    generator: torch.Generator | None = None,
) -> GuideInitReport:
    r"""Initialize a network with the representational geometry of an untrained guide.

    Before any training, the target is fitted so that its hidden layers see the same inputs as
    close or far as the layers of a guide of another architecture do, by

    ``minimize Σ_j w_j (1 - CKA(X_j, Y_j))``

    over unlabeled batches, where X_j and Y_j are outputs of paired layers. The guide is random and
    frozen and is thrown away afterwards; nothing learned is transferred. Then train as usual, with
    a fresh optimizer. Tune its learning rate again: aligned weights may favor another one.

    Parameters
    ----------
    target : nn.Module
        Freshly initialized; changed in place. Its running statistics are not.
    guide : nn.Module
        Untrained; see `random_guide`. It takes the same inputs. It is copied, and left as it is.
    data : Tensor of shape (n, ...), iterable, or callable
        Inputs: all of them, a ``DataLoader`` (the first entry of each item is taken, labels are
        never touched), or ``data(batch_size, generator) -> Tensor``. A tensor is the fastest: the
        guide sees each input once.
    target_layers, guide_layers : sequence of str, optional
        Names as in ``named_modules()``, in the order of depth. By default all transformer blocks,
        or else all activation modules.
    pairing : {"proportional", "last"}, default "proportional"
        Target layer j of J is paired with guide layer ⌈j G / J⌉ of G, or only the last with the
        last.
    steps : int ≥ 0, default 300
        At most so many updates. 0 only reports the CKA.
    batch_size : int ≥ 4, default 256
        With much fewer than 128 inputs CKA is a noisy estimate.
    lr : float > 0, default 1e-3
    optimizer : {"adam", "sgd"} or callable, default "adam"
        A callable is called with the parameters and ``lr=lr``.
    similarity : {"cka", "rbf_cka", "rsa", "procrustes"}, default "cka"
    debiased : bool, default True
        As in `linear_cka`.
    pool : {"flatten", "mean", "grid"}, default "flatten"
        Positions of maps and tokens: keep them all, average over them, or average the guide's over
        the cells of the target's coarser grid, for guides with finer patches.
    noise_inputs : bool, default False
        Align on Gaussian noise with the mean and variance of each entry of the data, instead of on
        the data.
    match_scale : bool or {"features", "preactivations"}, default True
        Rescale the layers in the end to the scale of the fresh network, which CKA does not see and
        the fit may change. True and ``"features"`` match the root mean square of the features'
        deviations from their mean over the batch, so that the centered Gram matrices have the trace
        that they had; ``"preactivations"`` the root mean square of what the activations read, as
        it is done in any case behind activations that let no factor through.
    freeze : sequence of str, optional
        Modules of the target that are not changed; by default that called ``head``, if there is
        one. Layers behind the last matched one are never changed, so the readout stays fresh.
    tol : float in (0, 1], default 0.98
        Stop when the similarity of every pair has reached it on a batch.
    guide_reset : bool, default True
        Whether the guide's batch normalization uses statistics of the batch, as its running ones
        mean nothing before training.
    guide_dtype : dtype, optional
        Of the guide's copy, for example ``torch.bfloat16``.
    allow_trained_guide : bool, default False
        Otherwise a guide that has an attribute ``trained`` which is true, or gradients, is refused.
    show_progress : bool, optional
        By default on a terminal.
    generator : torch.Generator, optional
        Draws the batches; the same seed gives the same result.

    Returns
    -------
    GuideInitReport

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and for layers whose features are constant.
    RuntimeError
        If the loss is not finite; the target is then fresh again.

    Warns
    -----
    UserWarning
        If the guide drops units at random in its present mode (the copy does not), or its features
        have less than three directions.

    Notes
    -----
    A step costs forward and backward of the target, the forward of the guide (unless ``data`` is a
    tensor whose guide features fit into 256 MiB) and O(b² f) for b inputs and f features. Ctrl-C
    ends the alignment with what was reached.

    *The paper's* are the procedure and its two uses: deeper guides, and guides with finer patches.
    *Ours* are the pairing by relative depth (as in guidance during training), the unbiased
    estimate of CKA, the scale match, and what `random_guide` makes. The scale is that of features
    and not of pre-activations, because it is their centered Gram matrices that CKA compares: with
    equal traces, what is left is their shape.

    References
    ----------
    "Representational similarity as initialization prior", NeurIPS 2026. V. Subramaniam, D. Mayo,
    C. Conwell, T. Poggio, B. Katz, B. Cheung, A. Barbu, "Training the untrainable: introducing
    inductive bias via representational alignment", NeurIPS 2025, for guidance during training.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from thalweg.training import guide_init, random_guide
    >>> _ = torch.manual_seed(0)
    >>> target = nn.Sequential(
    ...     nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    ... )
    >>> guide = random_guide(target, generator=torch.Generator().manual_seed(1))
    >>> points = 2 * torch.rand(1000, 2, generator=torch.Generator().manual_seed(2)) - 1
    >>> generator = torch.Generator().manual_seed(3)
    >>> report = guide_init(target, guide, points, steps=100, lr=3e-3, generator=generator)
    >>> report.pairs
    (('1', '5'), ('3', '11'))
    >>> bool(report.cka_after[1] > 0.9 > report.cka_before[1])
    True
    """
    start = time.perf_counter()
    check_integer("steps", steps, at_least=0)
    check_number("lr", lr, above=0)
    check_number("tol", tol, above=0, at_most=1)
    check_choice("pool", pool, POOLS)
    check_choice("pairing", pairing, ("proportional", "last"))
    what: Scale = "features"
    if not isinstance(match_scale, bool):
        what = check_choice("match_scale", match_scale, ("features", "preactivations"))
    make_optimizer = _optimizer(optimizer)
    device = _device(target)
    frozen = _frozen(target, freeze)
    guide = _frozen_copy(guide, device, guide_dtype, allow_trained_guide)
    batches = UnlabeledBatches(data, batch_size, generator, device)
    if noise_inputs:
        batches = UnlabeledBatches(like_noise(batches), batch_size, generator, device)
    probe = batches.held_out
    fresh = {name: value.detach().clone() for name, value in target.state_dict().items()}
    norms = _norms(target)

    with initial_mode(target), initial_mode(guide, batch_statistics=guide_reset):
        pairs = _pairs(
            _layers("target_layers", target, target_layers, probe),
            _layers("guide_layers", guide, guide_layers, cast_inputs(probe, guide_dtype)),
            pairing,
        )
        layers = [t for t, _ in pairs]
        loss_fn = GuideLoss([(t, t) for t in layers], similarity, debiased=debiased)
        scale = scales(trace(target, probe), layers, what)
        with PairedFeatures(target, guide, pairs, pool, guide_dtype, probe) as match:
            before = match.cka(probe)
            rank = match.guide_rank(probe)
            try:
                path, steps_run = _align(
                    match,
                    loss_fn,
                    make_optimizer(_free(target, frozen), lr=lr),
                    match.stream(batches, steps, keep=not (guide_reset and has_batch_norm(guide))),
                    tol,
                    progress("guide init", steps, show=show_progress),
                )
                if match_scale and steps_run:
                    rescale(target, probe, scale, what, frozen)
                after = match.cka(probe)
            except BaseException:
                _restore(target, fresh)
                raise
            finally:
                target.zero_grad(set_to_none=True)
        return GuideInitReport(
            target=target,
            pairs=pairs,
            cka_before=before,
            cka_after=after,
            steps_run=steps_run,
            seconds=time.perf_counter() - start,
            loss_path=np.array(path),
            guide_rank=rank,
            scale_before=scale,
            scale_after=scales(trace(target, probe), layers, what),
            weight_norm_before=norms,
            weight_norm_after=_norms(target),
            fresh_init_state=fresh,
        )


def _align(
    match: PairedFeatures,
    loss_fn: GuideLoss,
    optimizer: torch.optim.Optimizer,
    stream: Iterator[tuple[Tensor, dict[str, Tensor]]],
    tol: float,
    bar: AbstractContextManager[Advance],
) -> tuple[list[float], int]:
    """Fit until the stream ends or all pairs reach ``tol``; return the losses and updates."""
    path: list[float] = []
    updates = 0
    try:
        with bar as advance:
            for inputs, theirs in stream:
                loss, per_pair = loss_fn(match.target(inputs), theirs)
                path.append(loss.item())
                if not math.isfinite(path[-1]):
                    raise RuntimeError(
                        f"the loss is {path[-1]} after {updates} updates; the target is fresh "
                        "again: lower lr"
                    )
                if per_pair.min().item() >= tol:
                    break
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                updates += 1
                advance(1)
    except KeyboardInterrupt:
        pass  # what was reached stays, and the report says how many updates that were
    return path, updates


def _free(target: nn.Module, frozen: set[int]) -> list[nn.Parameter]:
    moved = [p for p in target.parameters() if p.requires_grad and id(p) not in frozen]
    if not moved:
        raise ValueError("target must have parameters that require gradients and are not frozen")
    return moved


@torch.no_grad()
def _restore(target: nn.Module, fresh: dict[str, Tensor]) -> None:
    # Not by load_state_dict, which wants the running statistics that are set aside.
    for name, parameter in target.named_parameters():
        parameter.copy_(fresh[name])


def _optimizer(
    optimizer: str | Callable[..., torch.optim.Optimizer],
) -> Callable[..., torch.optim.Optimizer]:
    if isinstance(optimizer, str):
        return OPTIMIZERS[check_choice("optimizer", optimizer, OPTIMIZERS)]
    if not callable(optimizer):
        raise TypeError(f"optimizer must be a name or callable, got {type(optimizer).__name__}")
    return optimizer


def _device(target: nn.Module) -> torch.device:
    if not isinstance(target, nn.Module):
        raise TypeError(f"target must be a torch.nn.Module, got {type(target).__name__}")
    first = next(target.parameters(), None)
    if first is None:
        raise ValueError("target must have parameters")
    return first.device


def _frozen(target: nn.Module, names: Sequence[str] | None) -> set[int]:
    """Return the ids of the parameters that must not change."""
    modules = dict(target.named_modules())
    if names is None:
        names = [name for name in ("head",) if name in modules]
    elif names:
        names = check_layers("freeze", target, names)
    return {id(p) for name in names for p in modules[name].parameters()}


def _frozen_copy(
    guide: nn.Module, device: torch.device, dtype: torch.dtype | None, allow_trained: bool
) -> nn.Module:
    if not isinstance(guide, nn.Module):
        raise TypeError(f"guide must be a torch.nn.Module, got {type(guide).__name__}")
    was_trained = getattr(guide, "trained", False) is True or any(
        p.grad is not None for p in guide.parameters()
    )
    if was_trained and not allow_trained:
        raise ValueError(
            "guide must be untrained, but it has gradients or trained=True; pass "
            "allow_trained_guide=True to transfer what it has learned"
        )
    if any(isinstance(m, _DropoutNd) and m.training and m.p > 0 for m in guide.modules()):
        warnings.warn(
            "guide is in training mode and has dropout; a copy in eval mode is used", stacklevel=3
        )
    return copy.deepcopy(guide).to(device=device, dtype=dtype).requires_grad_(False)


def _layers(
    argument: str, model: nn.Module, names: Sequence[str] | None, probe: Tensor
) -> list[str]:
    if names is None:
        return hidden_layers(argument, model, probe)
    return check_layers(argument, model, names)


def _pairs(ours: Sequence[str], theirs: Sequence[str], pairing: str) -> tuple[Pair, ...]:
    if pairing == "last":
        return ((ours[-1], theirs[-1]),)
    J, G = len(ours), len(theirs)
    return tuple((layer, theirs[math.ceil(j * G / J) - 1]) for j, layer in enumerate(ours, start=1))


def _norms(target: nn.Module) -> dict[str, float]:
    return {name: float(p.detach().norm()) for name, p in target.named_parameters()}
