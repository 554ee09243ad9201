"""Clipping of per-sample gradients: thresholds, factors, and which models have such gradients."""

from __future__ import annotations

import math
from typing import Literal

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.modules.batchnorm import _BatchNorm

ClipScope = Literal["per_layer", "flat"]
CLIP_SCOPES: tuple[ClipScope, ...] = ("per_layer", "flat")
# Opacus adds it to norms, so that the factor of a zero gradient is finite.
TINY = 1e-6
# The stability constant of automatic clipping, by which small gradients are scaled up less.
AUTOMATIC_GAMMA = 0.01


def check_separable(model: nn.Module) -> None:
    """Refuse models whose samples see each other.

    Raises
    ------
    ValueError
        If there is a BatchNorm: the statistics of a batch leak between its samples.
    """
    mixing = [name or "model" for name, m in model.named_modules() if isinstance(m, _BatchNorm)]
    if mixing:
        raise ValueError(
            "model must not mix samples, got BatchNorm in "
            f"{', '.join(mixing[:5])}; use torch.nn.GroupNorm or LayerNorm"
        )


def layer_threshold(max_grad_norm: float, n_layers: int) -> float:
    """Return C/√L, with which L clipped layers have norm C together, however they are scaled."""
    return max_grad_norm / math.sqrt(n_layers)


def clip_factors(
    squares: Tensor, max_grad_norm: float, scope: ClipScope, automatic: bool
) -> tuple[Tensor, Tensor, float]:
    """Return by how much every sample's gradient is scaled, in every layer.

    Parameters
    ----------
    squares : Tensor of shape (batch, layers)
        Squared norms.
    max_grad_norm, scope
        C, and whether it bounds the whole gradient or C/√layers each layer.
    automatic : bool
        Scale every gradient to about the threshold, instead of only those that are longer.

    Returns
    -------
    factors : Tensor of shape (batch, layers)
    norms : Tensor of shape (batch, layers), or (batch, 1) for scope="flat"
    threshold : float
        Which ``norms`` are compared with.
    """
    flat = scope == "flat"
    threshold = max_grad_norm if flat else layer_threshold(max_grad_norm, squares.shape[1])
    norms = squares.sum(1, keepdim=True).sqrt() if flat else squares.sqrt()
    if automatic:
        factors = threshold / (norms + AUTOMATIC_GAMMA)
    else:
        factors = (threshold / (norms + TINY)).clamp(max=1.0)
    return factors.expand_as(squares), norms, threshold


def sensitivity(max_grad_norm: float, scope: ClipScope, n_layers: int) -> float:
    """Return Δ, by how much one sample can change the sum of clipped gradients.

    It is C in both scopes. Per layer it is rounded as Opacus rounds √(Σ C_l²), so that the same
    seed gives the same noise to the last bit.
    """
    if scope == "flat":
        return max_grad_norm
    thresholds = torch.full((n_layers,), layer_threshold(max_grad_norm, n_layers))
    return float(torch.linalg.vector_norm(thresholds))
