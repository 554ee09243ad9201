"""DP-μP: learning rates of private training that transfer over the width of a model."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import nn

from thalweg.training.dp_adam import DEFAULT_FLOOR
from thalweg.training.lion import check_betas
from thalweg.training.sample_clipping import (
    CLIP_SCOPES,
    ClipScope,
    check_separable,
    layer_threshold,
)
from thalweg.training.spectral_rates import (
    OPTIMIZERS,
    RATES,
    REGIMES,
    RULES,
    OptimizerName,
    PrivateUpdate,
    Rate,
    Regime,
    Rule,
    inverse_signal_share,
    noise_norm,
)
from thalweg.training.width_roles import BaseShapes, LayerWidth, Role, width_roles

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.InstanceNorm1d, nn.InstanceNorm2d)


def dp_mup_param_groups(
    model: nn.Module,
    base_lr: float,
    *,
    optimizer: OptimizerName = "sgd",
    noise_multiplier: float | None = None,
    batch_size: int | None = None,
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
) -> list[dict[str, Any]]:
    r"""Return a param group per layer, with the lr that a narrower model's lr becomes.

    .. math::
        \eta_l = \text{base\_lr} \cdot
        \frac{\sqrt{m/n} \, / \, \nu_l}{\sqrt{m_0/n_0} \, / \, \nu_{l,0}}

    for an m × n layer that is m₀ × n₀ at the base width, where ν is the spectral norm of the raw
    update of clipped signal and noise. With :math:`\tau = \sigma C / B` the noise per coordinate
    and :math:`C_l = C / \sqrt L` the clipping threshold of one of L parameter tensors,

    .. math::
        \nu_\text{SGD} = C_l + \tau (\sqrt m + \sqrt n), \quad
        \nu_\text{Adam} = \frac{C_l + c_\beta \tau (\sqrt m + \sqrt n)}
                               {\sqrt{\tau^2 + C_l^2/(mn)}}, \quad
        \nu_\text{Muon} = 1, \qquad c_\beta = \sqrt{\frac{1 - \beta_1}{1 + \beta_1}}.

    Tune ``base_lr`` on the narrow model, once, and train wide ones with these groups. Plain μP
    takes the gradient for one of low rank whose norm is that of backpropagation. Clipping makes
    its norm independent of the width, and the noise is a matrix of full rank, whose norm grows with
    √n: what is right for the one is wrong for the other, and which one dominates is the
    signal-to-noise ratio :math:`C_l / (\tau (\sqrt m + \sqrt n))`. Only shapes and the mechanism
    enter, so the rule costs no privacy.

    Parameters
    ----------
    model : torch.nn.Module
        The model to train, before Opacus wraps it.
    base_lr : float > 0
        The lr that was good at the base width.
    optimizer : {"sgd", "adam", "muon"}, default "sgd"
        What the groups are for: `torch.optim.SGD` without momentum, `torch.optim.Adam`, or
        `DPMuonOptimizer`, which leaves vectors and embeddings to Adam.
    noise_multiplier : float ≥ 0
        σ. Must be given: the rates depend on it.
    batch_size : int ≥ 1
        B, the *expected* size of a lot (Opacus' ``expected_batch_size``). Must be given.
    max_grad_norm : float > 0, default 1
        C, the clipping norm of all layers together.
    clip_scope : {"per_layer", "flat"}, default "per_layer"
        Whether every parameter tensor is clipped to C/√L, or the whole gradient to C, of which
        C/√L is then the equal share. Clip per layer if the rate is to transfer: with flat clipping
        the layers' shares themselves change with the width.
    betas : pair of floats in [0, 1), default (0.9, 0.999)
        Adam's; they go into its groups.
    base_shapes : torch.nn.Module or mapping of str to sequence of int, optional
        The model at the base width, or its parameters' shapes. By default this is the base.
    regime : {"auto", "noise", "signal"}, default "auto"
        ν as above, its limit C → 0, or its limit τ → 0.
    roles : mapping of str to str, optional
        Roles by parameter name: "input", "hidden", "output", "vector", "embedding" or "fixed".
        Roles that are not given are inferred from ``base_shapes``.
    readout : str, optional
        Name of the module whose weight has the role "output".
    fallback_lr : float > 0, optional
        For "muon": ``base_lr`` of what is left to Adam; by default the same.
    snr_compensation : bool, default False
        For "muon": multiply lr by (1 + 1/ρ) / (1 + 1/ρ₀) with the ratio ρ above, so that the signal
        moves as at the base width. It amplifies the noise again.
    debias_v : bool, default False
        For "adam": the groups are for `DPAdam`, which subtracts τ² from the second moment.
    rule : {"dp_mup", "mup", "uniform"}, default "dp_mup"
        "mup" and "uniform" are for comparison: the factors of plain μP, or none.

    Returns
    -------
    list of dict
        In the order of ``model.named_parameters()``, one group per trainable tensor, with
        ``params``, ``lr``, ``name``, ``role``, ``fan_in``, ``fan_out``, ``clip`` (C_l),
        ``snr_public`` (ρ), and what the optimizer needs.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, names that do not match, BatchNorm, σ = 0 in the
        noise regime, and tied embeddings without a role.

    Warns
    -----
    UserWarning
        If a matrix has the same shape at both widths: it keeps ``base_lr``.

    Notes
    -----
    *What transfers.* Over width, at a fixed number of steps, sampling rate and depth. It is the
    learning rate that transfers; a wider model need not be better, since ρ falls with the width.
    Where the noise is small against the signal, the rule is μP of normalized gradients, and there
    is nothing to gain.

    *Cost.* Per step none; the rule itself takes microseconds per parameter tensor. (ε, δ) does not
    depend on learning rates.

    *Ours.* The rates as ratios to the base, so that no constant enters there; both terms of Adam's
    ν divided by the root of its second moment; a vector of m numbers, and a row of an embedding,
    count as m × 1 with noise of norm τ√m; C/√L per layer.

    References
    ----------
    "DP-μP: Width transfer of hyperparameters under differential privacy", NeurIPS 2026.
    G. Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
    Transfer", NeurIPS 2021 (μP).
    G. Yang, J. B. Simon, J. Bernstein, "A Spectral Condition for Feature Learning", 2023.

    Examples
    --------
    The lr 0.1 was the best one at width 64:

    >>> import torch
    >>> from thalweg.training import dp_mup_init_, dp_mup_param_groups
    >>> def perceptron(width):
    ...     return torch.nn.Sequential(
    ...         torch.nn.Linear(64, width), torch.nn.ReLU(),
    ...         torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 10),
    ...     )
    >>> model = perceptron(1024)
    >>> dp_mup_init_(model)
    >>> groups = dp_mup_param_groups(
    ...     model, 0.1, optimizer="adam", noise_multiplier=1.0, batch_size=128,
    ...     base_shapes=perceptron(64),
    ... )
    >>> [(g["name"], g["role"], round(g["lr"], 3)) for g in groups if g["role"] != "vector"]
    [('0.weight', 'input', 0.288), ('2.weight', 'hidden', 0.065), ('4.weight', 'output', 0.011)]
    >>> optimizer = torch.optim.Adam(groups)
    """
    base_lr = check_number("base_lr", base_lr, above=0)
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_choice("regime", regime, REGIMES)
    check_choice("rule", rule, RULES)
    check_choice("clip_scope", clip_scope, CLIP_SCOPES)
    check_betas("betas", betas)
    _check_options(optimizer, snr_compensation, debias_v, fallback_lr)
    max_grad_norm = check_number("max_grad_norm", max_grad_norm, above=0)
    tau = _noise_std(noise_multiplier, batch_size, max_grad_norm, regime)
    layers = width_roles(model, base_shapes, roles, readout)
    check_separable(model)
    if not layers:
        raise ValueError("model must have trainable parameters, got none")
    clip = layer_threshold(max_grad_norm, len(layers))
    floor = DEFAULT_FLOOR if debias_v else None

    groups = []
    for layer in layers:
        by_muon = optimizer == "muon" and layer.is_matrix
        applied: OptimizerName = "adam" if optimizer == "muon" and not by_muon else optimizer
        update = PrivateUpdate(applied, clip, tau, betas[0], floor).limit(regime)
        lr = base_lr if by_muon or optimizer != "muon" or fallback_lr is None else fallback_lr
        lr *= _to_base(layer, RATES[rule], update)
        if by_muon and snr_compensation:
            lr *= _to_base(layer, inverse_signal_share, update)
        groups.append(_group(layer, lr, clip, tau) | _settings(optimizer, by_muon, betas))
        if debias_v or by_muon:
            groups[-1]["noise_std"] = tau
    return groups


def _to_base(layer: LayerWidth, rate: Rate, update: PrivateUpdate) -> float:
    """Return what a rate is here over what it is at the base width."""
    here = rate(update, layer.fan_out, layer.fan_in, layer.is_matrix)
    return here / rate(update, layer.base_fan_out, layer.base_fan_in, layer.is_matrix)


def _group(layer: LayerWidth, lr: float, clip: float, tau: float) -> dict[str, Any]:
    noise = tau * noise_norm(layer.fan_out, layer.fan_in, layer.is_matrix)
    return {
        "params": [layer.parameter],
        "lr": lr,
        "name": layer.name,
        "role": layer.role,
        "fan_in": layer.fan_in,
        "fan_out": layer.fan_out,
        "clip": clip,
        "snr_public": clip / noise if noise > 0 else math.inf,
    }


def _settings(
    optimizer: OptimizerName, by_muon: bool, betas: tuple[float, float]
) -> dict[str, Any]:
    if optimizer == "adam":
        return {"betas": betas}
    if optimizer == "muon":
        return {"use_muon": by_muon, "fallback_betas": betas}
    return {}


def _noise_std(
    noise_multiplier: float | None,
    batch_size: int | None,
    max_grad_norm: float,
    regime: Regime,
) -> float:
    """Return τ = σC/B."""
    if noise_multiplier is None or batch_size is None:
        raise ValueError(
            "noise_multiplier and batch_size must be given, as the rates depend on both, got "
            f"noise_multiplier={noise_multiplier}, batch_size={batch_size}"
        )
    sigma = check_number("noise_multiplier", noise_multiplier, at_least=0)
    if regime == "noise" and sigma == 0:
        raise ValueError('noise_multiplier must be > 0 for regime="noise", got 0')
    return sigma * max_grad_norm / check_number("batch_size", batch_size, at_least=1)


def _check_options(
    optimizer: OptimizerName, snr_compensation: bool, debias_v: bool, fallback_lr: float | None
) -> None:
    check_choice("snr_compensation", snr_compensation, (False, True))
    check_choice("debias_v", debias_v, (False, True))
    if debias_v and optimizer != "adam":
        raise ValueError(f'debias_v is for optimizer="adam", got {optimizer!r}')
    if snr_compensation and optimizer != "muon":
        raise ValueError(f'snr_compensation is for optimizer="muon", got {optimizer!r}')
    if fallback_lr is None:
        return
    check_number("fallback_lr", fallback_lr, above=0)
    if optimizer != "muon":
        raise ValueError(f'fallback_lr is for optimizer="muon", got {optimizer!r}')


@torch.no_grad()
def dp_mup_init_(
    model: nn.Module,
    *,
    readout: Literal["zero", "mup"] = "zero",
    attention_scale: bool = True,
    base_shapes: BaseShapes | None = None,
    roles: Mapping[str, Role] | None = None,
    generator: torch.Generator | None = None,
) -> None:
    r"""Initialize a model in place so that every layer starts with :math:`\|W\|_2 ~ \sqrt{m/n}`.

    Matrices are normal with variance 1/n, the readout is zero or has standard deviation 1/n,
    embeddings have variance 1, gains of norms are 1, and biases are 0.

    Parameters
    ----------
    model : torch.nn.Module
    readout : {"zero", "mup"}, default "zero"
        How the output layer starts.
    attention_scale : bool, default True
        Multiply the logits of attention by 1/head_dim instead of 1/√head_dim, by setting the
        attribute ``scale`` or ``scaling`` of all modules that have it next to ``head_dim``.
    base_shapes : torch.nn.Module or mapping of str to sequence of int, optional
        From which the output layers are known. Without it, and at the base width, the last module
        that is a `torch.nn.Linear` is the output layer.
    roles : mapping of str to str, optional
        As in `dp_mup_param_groups`.
    generator : torch.Generator, optional
        On the device of the parameters.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Warns
    -----
    UserWarning
        If there is attention whose scale is out of reach, as in `torch.nn.MultiheadAttention`.

    Notes
    -----
    *Ours.* The paper does not spell out embeddings: a row is a vector of d numbers, of which each
    should be of order 1.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import dp_mup_init_
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Linear(100, 10))
    >>> dp_mup_init_(model, readout="mup", generator=torch.Generator().manual_seed(0))
    >>> [round(layer.weight.std().item() * layer.in_features**0.5, 1) for layer in model]
    [1.0, 0.1]
    """
    check_choice("readout", readout, ("zero", "mup"))
    check_choice("attention_scale", attention_scale, (False, True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* of the same shape at both widths")
        layers = width_roles(model, base_shapes, roles)
    outputs = {layer.name for layer in layers if layer.role == "output"}
    if not any(layer.role in ("input", "hidden", "output") for layer in layers):
        outputs = _last_linear(model)  # this is the base width, where shapes do not tell
    gains = {id(module.weight) for module in model.modules() if isinstance(module, NORMS)}
    for layer in layers:
        if layer.role == "vector":
            _init_vector(layer, id(layer.parameter) in gains)
            continue
        std = 1 / math.sqrt(layer.fan_in)
        if layer.name in outputs:
            std = 0.0 if readout == "zero" else 1 / layer.fan_in
        layer.parameter.normal_(0, std, generator=generator)
    if attention_scale:
        _scale_attention(model)


def _init_vector(layer: LayerWidth, is_gain: bool) -> None:
    """Set gains to 1 and biases to 0; vectors of other kinds stay as they are."""
    if is_gain:
        layer.parameter.fill_(1.0)
    elif layer.name.rpartition(".")[2].endswith("bias"):
        layer.parameter.zero_()


def _last_linear(model: nn.Module) -> set[str]:
    names = [f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    return {names[-1].removeprefix(".")} if names else set()


def _scale_attention(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if not hasattr(module, "head_dim"):
            continue
        scales = [s for s in ("scale", "scaling") if isinstance(getattr(module, s, None), float)]
        for scale in scales:
            setattr(module, scale, 1 / module.head_dim)
        if not scales:
            warnings.warn(
                f"{name or type(module).__name__} has no attribute scale or scaling, and keeps "
                "logits times 1/√head_dim; pass attention_scale=False if that is meant",
                stacklevel=3,
            )
