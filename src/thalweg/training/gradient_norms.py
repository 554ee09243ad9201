"""Euclidean norms of gradients as 0-dim tensors, for which nobody waits."""

from __future__ import annotations

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
    from torch.linalg import vector_norm

from thalweg.common.torch_gradients import whole
from thalweg.training.tensor_lists import LONG, norms_of_parts, wide_dtype


def tensor_norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norm of each of some tensors that are alike, 0-dim, in at least float32."""
    dtype = wide_dtype(tensors[0])
    if torch.compiler.is_compiling():
        # It sums in several accumulators, without the error of PyTorch's CPU kernel.
        return [whole(vector_norm(tensor, dtype=dtype)) for tensor in tensors]
    if tensors[0].device.type != "cpu":
        return [whole(norm) for norm in torch._foreach_norm(tensors, 2, dtype)]
    return [_norm_on_cpu(tensor, dtype) for tensor in tensors]


def _norm_on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.numel() <= LONG or hasattr(tensor, "full_tensor"):
        return whole(vector_norm(tensor, dtype=dtype))
    # A half-precision tensor is widened piece by piece.
    parts = [tensor] if tensor.dtype == dtype else torch.split(tensor.reshape(-1), LONG)
    norms = torch.cat([norms_of_parts([part.to(dtype)]) for part in parts])
    norm: Tensor = vector_norm(norms)
    return norm


def norm_of_large(tensor: Tensor) -> Tensor:
    """Return the norm of a tensor whose squares may overflow; NaN or infinity stay so."""
    largest = whole(vector_norm(tensor, ord=torch.inf, dtype=wide_dtype(tensor)))
    if not (0 < float(largest) < torch.inf):
        return largest
    return largest.double() * tensor_norms([tensor / largest])[0].double()


def combined_norm(norms: list[Tensor]) -> Tensor:
    """Return the norm over all tensors from those of each, without waiting for the device."""
    device = norms[0].device
    # In float64 the squares of float32 norms do not overflow; MPS has none.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total: Tensor = vector_norm(torch.stack([norm.to(device, dtype) for norm in norms]))
    return total
