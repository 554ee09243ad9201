"""A small GPT over bytes, and the shapes of the parameters of a larger one."""

from __future__ import annotations

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

from thalweg.tasks.byte_text import N_BYTES

INITIAL_STD = 0.02


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after a layer norm and around a bypass."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        out: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return out


class ByteGPT(nn.Module):
    """GPT-2's architecture over the 256 bytes, without dropout."""

    def __init__(self, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(N_BYTES, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, N_BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, time ≤ context) to logits of the next byte (batch, time, 256)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def byte_gpt(
    width: int, depth: int, heads: int, context: int, generator: torch.Generator
) -> ByteGPT:
    """Return an untrained `ByteGPT`, drawn from ``generator``.

    Matrices are normal with standard deviation 0.02, those that write to the bypass
    0.02/√(2 depth), as in GPT-2; biases are zero.

    Examples
    --------
    >>> import torch
    >>> model = byte_gpt(width=16, depth=1, heads=2, context=8, generator=torch.Generator())
    >>> model(torch.zeros(1, 8, dtype=torch.long)).shape
    torch.Size([1, 8, 256])
    """
    check_integer("heads", heads, at_least=1)
    check_integer("depth", depth, at_least=1)
    check_integer("context", context, at_least=1)
    if check_integer("width", width, at_least=1) % heads:
        raise ValueError(f"width must be a multiple of heads={heads}, got {width}")
    model = ByteGPT(width, depth, heads, context)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            (nn.init.zeros_ if name.endswith("bias") else nn.init.ones_)(parameter)
            continue
        to_bypass = name.endswith(("proj.weight", "down.weight"))
        std = INITIAL_STD / (2 * depth) ** 0.5 if to_bypass else INITIAL_STD
        nn.init.normal_(parameter, std=std, generator=generator)
    return model


def transformer_shapes(
    width: int = 512, depth: int = 12, vocabulary: int = 24_000, context: int = 1024
) -> list[tuple[int, ...]]:
    """Return the parameter shapes of a GPT-2-shaped model with tied head; 50.6 M by default.

    Examples
    --------
    >>> import math
    >>> sum(math.prod(shape) for shape in transformer_shapes())
    50641920
    """
    block: list[tuple[int, ...]] = [(width,), (width,), (3 * width, width), (3 * width,)]
    block += [(width, width), (width,), (width,), (width,)]
    block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *block * depth, (width,), (width,)]
