"""A linear layer with a low-rank adapter, for those who have no use for PEFT."""

from __future__ import annotations

import math
from typing import Literal

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import linear as affine

from thalweg.training.lora_scaling import CONVENTIONS, Convention, lora_alpha


class LoRALinear(nn.Module):
    r"""A frozen linear layer plus a trained low-rank term.

    .. math:: y = W_0 x + b + s B A x

    A starts random and B at zero, so that nothing changes at first.

    Parameters
    ----------
    linear : nn.Linear
        The layer to adapt, of shape (d_out, d_in); its parameters are frozen, not copied.
    r : int ≥ 1
        The rank.
    alpha : float > 0, optional
        The scaling factor in the given convention, by default ``lora_alpha(r, convention=...)``,
        which makes s = 256/√r.
    convention : {"alpha/r", "rslora", "none"}, default "alpha/r"
        s = α/r, α/√r, or α.
    init : {"kaiming", "gaussian"}, default "kaiming"
        A uniform with variance 1/(3 d_in), or normal with standard deviation 1/r, as in PEFT. The
        rule of `lora_alpha` is for the former.
    generator : torch.Generator, optional
        Draws A.

    Attributes
    ----------
    lora_A, lora_B : nn.Parameter
        Of shapes (r, d_in) and (d_out, r), in the dtype of the layer; in float32 for a layer in
        float16, where the products of a large scale overflow.
    scale : float
        s.
    merged : bool
        Whether ``linear.weight`` contains the low-rank term; see `merge`.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Cost.* r (d_in + d_out) further parameters, and 2r (d_in + d_out) operations for each input.

    References
    ----------
    E. J. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import LoRALinear
    >>> linear = torch.nn.Linear(8, 4)
    >>> adapted = LoRALinear(linear, r=4)
    >>> x = torch.ones(2, 8)
    >>> bool((adapted(x) == linear(x)).all()), adapted.scale
    (True, 128.0)
    """

    def __init__(
        self,
        linear: nn.Linear,
        r: int,
        alpha: float | None = None,
        *,
        convention: Convention = "alpha/r",
        init: Literal["kaiming", "gaussian"] = "kaiming",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
        rank = check_integer("r", r, at_least=1)
        check_choice("convention", convention, CONVENTIONS)
        check_choice("init", init, ("kaiming", "gaussian"))
        if alpha is None:
            alpha = lora_alpha(rank, convention=convention)
        factor = check_number("alpha", alpha, above=0)
        self.linear = linear.requires_grad_(False)
        self.scale = factor / {"alpha/r": rank, "rslora": math.sqrt(rank), "none": 1}[convention]
        self.merged = False
        weight = linear.weight
        dtype = torch.float32 if weight.dtype == torch.float16 else weight.dtype
        self.lora_A = nn.Parameter(weight.new_empty(rank, linear.in_features, dtype=dtype))
        self.lora_B = nn.Parameter(weight.new_zeros(linear.out_features, rank, dtype=dtype))
        if init == "kaiming":
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5), generator=generator)
        else:
            nn.init.normal_(self.lora_A, std=1 / rank, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (..., d_in) to outputs (..., d_out)."""
        output: Tensor = self.linear(x)
        if self.merged:
            return output
        low_rank = affine(affine(x.to(self.lora_A.dtype), self.lora_A), self.lora_B)
        return output + (self.scale * low_rank).to(output.dtype)

    @torch.no_grad()
    def delta(self) -> Tensor:
        """Return s B A, of shape (d_out, d_in)."""
        return self.scale * (self.lora_B @ self.lora_A)

    @torch.no_grad()
    def merge(self) -> None:
        """Add s B A to the layer's weight, for inference; nothing happens a second time."""
        if not self.merged:
            self.linear.weight.add_(self.delta())
            self.merged = True

    @torch.no_grad()
    def unmerge(self) -> None:
        """Subtract s B A again, up to rounding."""
        if self.merged:
            self.linear.weight.sub_(self.delta())
            self.merged = False

    def extra_repr(self) -> str:
        """Show rank and scale."""
        return f"r={self.lora_A.shape[0]}, scale={self.scale:g}"
