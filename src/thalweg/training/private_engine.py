"""Opacus' privacy engine with DP-μP's learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
with requires("private"):
    from opacus import PrivacyEngine
    from opacus.accountants.utils import get_noise_multiplier
    from opacus.optimizers import DPOptimizer

from thalweg.training.dp_mup import dp_mup_param_groups
from thalweg.training.private_optimizers import private_optimizer
from thalweg.training.sample_clipping import (
    CLIP_SCOPES,
    ClipScope,
    check_separable,
    layer_threshold,
)
from thalweg.training.spectral_rates import OPTIMIZERS, OptimizerName, Regime, Rule
from thalweg.training.width_roles import BaseShapes, Role

Accountant = Literal["prv", "rdp", "gdp"]


class PrivateTraining(NamedTuple):
    """What a private training loop needs.

    Attributes
    ----------
    module : opacus.GradSampleModule
        The model, whose backward pass keeps per-sample gradients.
    optimizer : opacus.optimizers.DPOptimizer
        Clips, adds noise and steps; its ``param_groups`` are DP-μP's.
    loader : torch.utils.data.DataLoader
        Poisson-samples the lots.
    privacy_engine : opacus.PrivacyEngine
        ``get_epsilon(delta)`` is the privacy spent.
    """

    module: nn.Module
    optimizer: DPOptimizer
    loader: DataLoader[Any]
    privacy_engine: PrivacyEngine


def make_private(
    model: nn.Module,
    optimizer_name: OptimizerName,
    data_loader: DataLoader[Any],
    *,
    base_lr: float,
    target_epsilon: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float = 1.0,
    clip_scope: ClipScope = "per_layer",
    betas: tuple[float, float] = (0.9, 0.999),
    base_shapes: BaseShapes | None = None,
    regime: Regime = "auto",
    roles: Mapping[str, Role] | None = None,
    readout: str | None = None,
    fallback_lr: float | None = None,
    snr_compensation: bool = False,
    debias_v: bool = False,
    rule: Rule = "dp_mup",
    expected_batch_size: int | None = None,
    accountant: Accountant = "prv",
    poisson_sampling: bool = True,
    secure_mode: bool = False,
    noise_generator: torch.Generator | None = None,
    **optimizer_options: Any,
) -> PrivateTraining:
    """Wrap a model, an optimizer with DP-μP's groups and a data loader by Opacus.

    Parameters
    ----------
    model : torch.nn.Module
        Initialized, best by `dp_mup_init_`, and not yet wrapped.
    optimizer_name : {"sgd", "adam", "muon"}
        `torch.optim.SGD`, `torch.optim.Adam` (`DPAdam` with ``debias_v``) or `DPMuonOptimizer`.
    data_loader : torch.utils.data.DataLoader
        With a fixed ``batch_size``. Opacus samples each record with probability
        q = 1 / len(data_loader).
    base_lr : float > 0
        The lr that was good at the base width.
    target_epsilon : float > 0, optional
        ε to spend in ``epochs``; Opacus' accountant finds the noise multiplier.
    delta : float in (0, 1), optional
        Needed with ``target_epsilon``.
    epochs : int ≥ 1, optional
        Needed with ``target_epsilon``.
    noise_multiplier : float ≥ 0, optional
        σ, instead of ``target_epsilon``.
    max_grad_norm : float > 0, default 1
        C of all layers together. Per layer Opacus clips each parameter tensor to C/√L.
    clip_scope, betas, base_shapes, regime, roles, readout, fallback_lr, snr_compensation, debias_v
        As in `dp_mup_param_groups`.
    rule : {"dp_mup", "mup", "uniform"}, default "dp_mup"
        As in `dp_mup_param_groups`.
    expected_batch_size : int, optional
        If given, checked against the expected size of a lot, B = ⌊qN⌋, with which Opacus averages
        and from which the rates are computed.
    accountant : {"prv", "rdp", "gdp"}, default "prv"
    poisson_sampling : bool, default True
        Without it, what the accountant reports does not hold exactly.
    secure_mode : bool, default False
        Opacus': cryptographic random numbers, which need torchcsprng. Without it Opacus warns.
    noise_generator : torch.Generator, optional
        For the noise.
    **optimizer_options
        Further arguments of the optimizer.

    Returns
    -------
    PrivateTraining
        ``(module, optimizer, loader, privacy_engine)``.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, BatchNorm, and an ``expected_batch_size`` that is
        not the expected one.

    Notes
    -----
    The learning rates do not enter the privacy: ε is that of Opacus for σ, q and the number of
    steps. For another way of wrapping (ghost clipping, several processes), give an optimizer with
    the groups of `dp_mup_param_groups` to Opacus yourself.

    References
    ----------
    "DP-μP: Width transfer of hyperparameters under differential privacy", NeurIPS 2026.
    A. Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library in PyTorch", 2021.

    Examples
    --------
    >>> import torch, warnings
    >>> from thalweg.training import dp_mup_init_, make_private
    >>> warnings.simplefilter("ignore")  # Opacus warns of the insecure random numbers
    >>> def perceptron(width):
    ...     return torch.nn.Sequential(
    ...         torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)
    ...     )
    >>> x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    >>> data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    >>> loader = torch.utils.data.DataLoader(data, batch_size=64)
    >>> model = perceptron(128)
    >>> dp_mup_init_(model)
    >>> model, optimizer, loader, engine = make_private(
    ...     model, "adam", loader, base_lr=0.02, base_shapes=perceptron(16),
    ...     target_epsilon=3.0, delta=1e-4, epochs=5, accountant="rdp",
    ... )
    >>> for _ in range(5):
    ...     for inputs, labels in loader:
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    ...         optimizer.step()
    >>> 2.9 < engine.get_epsilon(1e-4) <= 3.0
    True
    """
    check_choice("optimizer_name", optimizer_name, OPTIMIZERS)
    check_choice("clip_scope", clip_scope, CLIP_SCOPES)
    check_choice("accountant", accountant, ("prv", "rdp", "gdp"))
    check_number("max_grad_norm", max_grad_norm, above=0)
    check_separable(model)
    sample_rate, batch_size = _lot(data_loader, expected_batch_size)
    sigma = _noise_multiplier(
        target_epsilon, delta, epochs, noise_multiplier, sample_rate, accountant
    )
    groups = dp_mup_param_groups(
        model,
        base_lr,
        optimizer=optimizer_name,
        noise_multiplier=sigma,
        batch_size=batch_size,
        max_grad_norm=max_grad_norm,
        clip_scope=clip_scope,
        betas=betas,
        base_shapes=base_shapes,
        regime=regime,
        roles=roles,
        readout=readout,
        fallback_lr=fallback_lr,
        snr_compensation=snr_compensation,
        debias_v=debias_v,
        rule=rule,
    )
    flat = clip_scope == "flat"
    thresholds = [layer_threshold(max_grad_norm, len(groups))] * len(groups)
    engine = PrivacyEngine(accountant=accountant, secure_mode=secure_mode)
    module, optimizer, loader = engine.make_private(
        module=model,
        optimizer=private_optimizer(optimizer_name, groups, optimizer_options, debias_v=debias_v),
        data_loader=data_loader,
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm if flat else thresholds,
        clipping=clip_scope,
        poisson_sampling=poisson_sampling,
        noise_generator=noise_generator,
    )
    return PrivateTraining(module, optimizer, loader, engine)


def _lot(data_loader: DataLoader[Any], expected: int | None) -> tuple[float, int]:
    """Return the sampling rate q and the expected size of a lot, as Opacus has them."""
    if not isinstance(data_loader, DataLoader):
        raise TypeError(f"data_loader must be a DataLoader, got {type(data_loader).__name__}")
    if data_loader.batch_size is None:
        raise ValueError(
            "data_loader must have a batch_size: rates and noise depend on the expected size of a "
            "lot, and the actual one is not it"
        )
    sample_rate = 1 / len(data_loader)
    batch_size = int(len(data_loader.dataset) * sample_rate)  # type: ignore[arg-type]
    if expected is None or expected == batch_size:
        return sample_rate, batch_size
    raise ValueError(
        f"expected_batch_size must be {batch_size}, the {len(data_loader.dataset)} "  # type: ignore[arg-type]
        f"records times the sampling rate 1/{len(data_loader)}, got {expected}"
    )


def _noise_multiplier(
    target_epsilon: float | None,
    delta: float | None,
    epochs: int | None,
    noise_multiplier: float | None,
    sample_rate: float,
    accountant: Accountant,
) -> float:
    if (target_epsilon is None) == (noise_multiplier is None):
        raise ValueError(
            "exactly one of target_epsilon and noise_multiplier must be given, got "
            f"target_epsilon={target_epsilon}, noise_multiplier={noise_multiplier}"
        )
    if noise_multiplier is not None:
        return check_number("noise_multiplier", noise_multiplier, at_least=0)
    if delta is None or epochs is None:
        raise ValueError(
            f"target_epsilon needs delta and epochs, got delta={delta}, epochs={epochs}"
        )
    return float(
        get_noise_multiplier(
            target_epsilon=check_number("target_epsilon", target_epsilon, above=0),
            target_delta=check_number("delta", delta, above=0, below=1),
            epochs=check_integer("epochs", epochs, at_least=1),
            sample_rate=sample_rate,
            accountant=accountant,
        )
    )
