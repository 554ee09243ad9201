"""The matrices that LoRA adapts, in models of PEFT and of this library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class LoRAMatrix:
    """One matrix W = W₀ + s B A.

    Attributes
    ----------
    name : str
        Of the module in its model.
    module : nn.Module
        The adapter's module: PEFT's or `LoRALinear`.
    adapter : str
    A, B : nn.Parameter
        Of shapes (r, d_in) and (d_out, r); those of convolutions have further axes.
    weight : Tensor or None
        W₀; None if the adapted module has no single weight.
    """

    name: str
    module: nn.Module
    adapter: str
    A: nn.Parameter
    B: nn.Parameter
    weight: Tensor | None

    @property
    def rank(self) -> int:
        """The inner dimension r."""
        return int(self.A.shape[0])

    @property
    def scale(self) -> float:
        """The effective scale s, whatever the convention of α."""
        scaling: Any = getattr(self.module, "scaling", None)
        return float(self.module.scale if scaling is None else scaling[self.adapter])  # type: ignore[arg-type]

    def rescale(self, scale: float) -> None:
        """Set s."""
        scaling: Any = getattr(self.module, "scaling", None)
        if scaling is None:
            self.module.scale = scale  # type: ignore[assignment]
        else:
            scaling[self.adapter] = scale

    @property
    def merged(self) -> bool:
        """Whether W₀ holds the adapter, too."""
        return bool(getattr(self.module, "merged", False))


def lora_matrices(model: nn.Module, adapter: str = "default") -> list[LoRAMatrix]:
    """Return the matrices that ``adapter`` changes, in the order of the model's modules.

    PEFT's modules are known by their attributes, so that PEFT need not be installed.

    Raises
    ------
    TypeError
        If ``model`` is not a module.
    ValueError
        If there are none.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    found = [
        LoRAMatrix(name, module, adapter, *parts)
        for name, module in model.named_modules()
        if (parts := _parts(module, adapter)) is not None
    ]
    if not found:
        raise ValueError(
            f"model must hold LoRA adapters of PEFT named {adapter!r}, or LoRALinear; found none"
        )
    return found


def _parts(
    module: nn.Module, adapter: str
) -> tuple[nn.Parameter, nn.Parameter, Tensor | None] | None:
    a: Any = getattr(module, "lora_A", None)
    b: Any = getattr(module, "lora_B", None)
    if isinstance(a, nn.Parameter):
        linear: Any = module.linear
        return a, b, linear.weight
    base: Any = getattr(module, "base_layer", None)
    if isinstance(a, nn.ModuleDict) and adapter in a:
        inner: Any = a[adapter]
        return inner.weight, b[adapter].weight, getattr(base, "weight", None)
    of_embedding: Any = getattr(module, "lora_embedding_A", None)
    if isinstance(of_embedding, nn.ParameterDict) and adapter in of_embedding:
        # PEFT's adapter of an embedding is (B A)ᵀ, with W₀ of shape (tokens, width).
        other: Any = module.lora_embedding_B
        return of_embedding[adapter], other[adapter], base.weight
    return None
