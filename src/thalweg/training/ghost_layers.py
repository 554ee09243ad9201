"""Norms and weighted sums of per-sample gradients, without the gradients themselves.

For a linear layer the gradient of sample i is δᵢᵀaᵢ, where aᵢ of shape (T, n) goes in and δᵢ of
shape (T, m) is the gradient of what comes out. Its norm needs products of rows only, and a sum
weighted by cᵢ is one product of matrices. T is 1 unless inputs are sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn import Parameter

# Of one layer (module, input, δ): the squared norms of each parameter's per-sample gradients, and
# their sums weighted by a factor for every sample and parameter.
Norms = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]
Sums = Callable[[Any, Tensor, Tensor, dict[str, Tensor]], dict[str, Tensor]]


def has_ghost_norms(model: nn.Module) -> bool:
    """Return whether every trainable parameter is in one layer, and of a kind with a rule here."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or not parameter.requires_grad:
                continue
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
            if not _is_supported(module):
                return False
    return all(count == 1 for count in owners.values())


def trainable(module: nn.Module) -> dict[str, Parameter]:
    """Return the layer's own trainable parameters by name."""
    return {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}


def _is_supported(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
    return type(module) in GHOST_LAYERS


def _rows(tensor: Tensor, trailing: int = 1) -> Tensor:
    """Return (batch, T, ...) of (batch, ..., ...), whose last ``trailing`` dimensions stay."""
    kept = tensor.shape[tensor.ndim - trailing :]
    return tensor.reshape(len(tensor), -1, *kept)


def _square(gradients: Tensor) -> Tensor:
    """Return the squared norm of every sample's gradient, (batch,)."""
    return gradients.flatten(1).square().sum(1)


def _linear_norms(module: nn.Linear, inputs: Tensor, deltas: Tensor) -> dict[str, Tensor]:
    a, delta = _rows(inputs), _rows(deltas)
    positions, n, m = a.shape[1], a.shape[2], delta.shape[2]
    if positions == 1:
        weight = _square(a) * _square(delta)
    elif 2 * positions**2 <= m * n:
        # ‖Σ_t δ_t a_tᵀ‖² = Σ_{t,s} ⟨a_t, a_s⟩⟨δ_t, δ_s⟩, which rounding can make negative.
        weight = ((a @ a.mT) * (delta @ delta.mT)).sum((1, 2)).clamp_(min=0)
    else:
        weight = _square(delta.mT @ a)
    return {"weight": weight, "bias": _square(delta.sum(1))}


def _linear_sums(
    module: nn.Linear, inputs: Tensor, deltas: Tensor, factors: dict[str, Tensor]
) -> dict[str, Tensor]:
    a, delta = _rows(inputs), _rows(deltas)
    sums = {}
    if "weight" in factors:
        scaled = delta * factors["weight"][:, None, None]
        sums["weight"] = scaled.flatten(0, 1).mT @ a.flatten(0, 1)
    if "bias" in factors:
        sums["bias"] = factors["bias"] @ delta.sum(1)
    return sums


def _embedding_deltas(module: nn.Embedding, indices: Tensor, deltas: Tensor) -> Tensor:
    delta = _rows(deltas)
    if module.padding_idx is None:
        return delta
    return delta * (indices.reshape(delta.shape[:2]) != module.padding_idx)[..., None]


def _embedding_norms(module: nn.Embedding, indices: Tensor, deltas: Tensor) -> dict[str, Tensor]:
    delta = _embedding_deltas(module, indices, deltas)
    index = indices.reshape(delta.shape[:2])
    same = index[:, :, None] == index[:, None, :]
    return {"weight": ((delta @ delta.mT) * same).sum((1, 2)).clamp_(min=0)}


def _embedding_sums(
    module: nn.Embedding, indices: Tensor, deltas: Tensor, factors: dict[str, Tensor]
) -> dict[str, Tensor]:
    delta = _embedding_deltas(module, indices, deltas) * factors["weight"][:, None, None]
    table = torch.zeros_like(module.weight)
    return {"weight": table.index_add_(0, indices.reshape(-1), delta.flatten(0, 1))}


def _norm_gradients(module: nn.LayerNorm, inputs: Tensor, deltas: Tensor) -> dict[str, Tensor]:
    """Return the per-sample gradients of a layer norm; there is nothing smaller to be had."""
    shape = module.normalized_shape
    normalized = nn.functional.layer_norm(inputs, shape, eps=module.eps)
    delta = _rows(deltas, len(shape))
    return {"weight": (delta * _rows(normalized, len(shape))).sum(1), "bias": delta.sum(1)}


def _layer_norm_norms(module: nn.LayerNorm, inputs: Tensor, deltas: Tensor) -> dict[str, Tensor]:
    gradients = _norm_gradients(module, inputs, deltas)
    return {name: _square(gradient) for name, gradient in gradients.items()}


def _layer_norm_sums(
    module: nn.LayerNorm, inputs: Tensor, deltas: Tensor, factors: dict[str, Tensor]
) -> dict[str, Tensor]:
    gradients = _norm_gradients(module, inputs, deltas)
    return {
        name: torch.einsum("i,i...", factor, gradients[name]) for name, factor in factors.items()
    }


GHOST_LAYERS: dict[type[nn.Module], tuple[Norms, Sums]] = {
    nn.Linear: (_linear_norms, _linear_sums),
    nn.Embedding: (_embedding_norms, _embedding_sums),
    nn.LayerNorm: (_layer_norm_norms, _layer_norm_sums),
}
