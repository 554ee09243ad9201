"""Models of any width whose layers Opacus can hook: perceptron, vision and language transformer."""

from __future__ import annotations

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from thalweg.tasks.byte_text import N_BYTES

IMAGE_SIDE = 8
N_CLASSES = 10


class SelfAttention(nn.Module):
    """Multi-head self-attention of plain linear layers.

    ``scale`` multiplies the logits, 1/√head_dim unless somebody sets it.
    """

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.scale = self.head_dim**-0.5
        self.causal = causal
        self.query, self.key, self.value, self.proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        query, key, value = (
            layer(x).view(batch, time, -1, self.head_dim).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, scale=self.scale
        )
        out: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class TransformerBlock(nn.Module):
    """Attention and a perceptron, each after a layer norm and around a bypass."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (batch, time, width) to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return out


class WideTransformer(nn.Module):
    """GPT-2's and ViT's common shape: learned positions, blocks, a norm, and an untied head.

    Positions are looked up once per sample, since Opacus takes the first dimension of every
    layer's input for the batch.
    """

    def __init__(
        self,
        embed: nn.Module,
        length: int,
        width: int,
        depth: int,
        heads: int,
        outputs: int,
        causal: bool,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, causal) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs, bias=False)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (batch, time) to logits (batch, time, V), or patches to logits (batch, V)."""
        embedded = self.embed(x)
        places = torch.arange(embedded.shape[1], device=x.device).expand(embedded.shape[:2])
        features = self.norm(self.blocks(embedded + self.positions(places)))
        logits: Tensor = self.head(features if self.causal else features.mean(1))
        return logits


class PatchEmbedding(nn.Module):
    """Cuts 8 × 8 images, given as rows of 64 numbers, into patches and embeds them."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.linear = nn.Linear(patch**2, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, 64) to embedded patches (batch, (8/patch)², width)."""
        side = IMAGE_SIDE // self.patch
        patches = x.view(-1, side, self.patch, side, self.patch).transpose(2, 3)
        out: Tensor = self.linear(patches.reshape(len(x), side**2, self.patch**2))
        return out


def width_mlp(width: int, *, hidden_layers: int = 2, inputs: int = 64) -> nn.Sequential:
    """Return a ReLU perceptron for the digits, in torch's initialization.

    Examples
    --------
    >>> [tuple(p.shape) for p in width_mlp(128).parameters() if p.ndim == 2]
    [(128, 64), (128, 128), (10, 128)]
    """
    check_integer("width", width, at_least=1)
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(check_integer("hidden_layers", hidden_layers, at_least=1) - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, N_CLASSES))


def width_vit(width: int, *, depth: int = 2, head_dim: int = 16, patch: int = 2) -> WideTransformer:
    """Return a vision transformer for 8 × 8 images given as rows of 64 numbers.

    Heads get more with the width, not wider.

    Examples
    --------
    >>> import torch
    >>> width_vit(32)(torch.zeros(5, 64)).shape
    torch.Size([5, 10])
    """
    heads = _heads(width, head_dim)
    if IMAGE_SIDE % check_integer("patch", patch, at_least=1):
        raise ValueError(f"patch must divide {IMAGE_SIDE}, got {patch}")
    length = (IMAGE_SIDE // patch) ** 2
    return WideTransformer(
        PatchEmbedding(patch, width), length, width, depth, heads, N_CLASSES, causal=False
    )


def width_gpt(
    width: int, *, depth: int = 2, head_dim: int = 16, context: int = 32
) -> WideTransformer:
    """Return GPT-2's architecture over the 256 bytes, with an untied head and without dropout.

    Heads get more with the width, not wider.

    Examples
    --------
    >>> import torch
    >>> width_gpt(32)(torch.zeros(5, 32, dtype=torch.long)).shape
    torch.Size([5, 32, 256])
    """
    heads = _heads(width, head_dim)
    check_integer("context", context, at_least=1)
    embed = nn.Embedding(N_BYTES, width)
    return WideTransformer(embed, context, width, depth, heads, N_BYTES, causal=True)


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of logits (batch, time, 256) and bytes (batch, time)."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def _heads(width: int, head_dim: int) -> int:
    check_integer("head_dim", head_dim, at_least=1)
    if check_integer("width", width, at_least=1) % head_dim:
        raise ValueError(f"width must be a multiple of head_dim={head_dim}, got {width}")
    return width // head_dim
