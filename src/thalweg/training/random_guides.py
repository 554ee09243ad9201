"""Random networks that lend their geometry."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

Init = Literal["kaiming", "chaotic_tanh"]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)
KINDS = {"coordinates": 1, "vectors": 1, "images": 3}  # and the dimension of one input
INITS = ("kaiming", "chaotic_tanh")
DEPTH, WIDTH = 6, 256
COORDINATES = 3  # inputs of at most so many dimensions count as coordinates


class _Reshape(nn.Module):
    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), *self.shape)


def random_guide(
    like: nn.Module | str,
    *,
    depth_factor: float = 3,
    patch_factor: float = 0.5,
    init: Init | None = None,
    in_shape: Sequence[int] | None = None,
    depth: int | None = None,
    width: int | None = None,
    gain: float = 4.0,
    bias_std: float = 0.3,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Return an untrained network for `guide_init`: deeper than a target, or with finer patches.

    Parameters
    ----------
    like : nn.Module or {"coordinates", "vectors", "images"}
        A target, or the kind of its inputs.

        - Of a perceptron (linear layers and no convolutions) the guide is a perceptron
          ``depth_factor`` times deeper and twice as wide, without a readout. A chaotic one has at
          least 6 hidden layers: fewer do not move neighbors apart.
        - Of a network whose first convolution has a stride, it is a copy with ``patch_factor``
          times the stride (and the kernel, if the two are equal, as for patches). What follows
          must take maps of any size, and ``guide_init(..., pool="grid")`` compares them.
        - ``"coordinates"`` and ``"vectors"`` give a perceptron with 6 hidden layers of 256, and
          ``"images"`` a convolutional network with 3 layers of 32, 64 and 64 channels, which takes
          images flattened as well.
    depth_factor : float ≥ 1, default 3
    patch_factor : float in (0, 1), default 0.5
    init : {"kaiming", "chaotic_tanh"}, optional
        ReLU networks whose variance is kept with depth, or tanh networks in the chaotic phase, in
        which nearby inputs move apart with depth. By default the second one for inputs of at most
        3 dimensions, whose neighborhoods a ReLU network resolves poorly, and else the first.
        Networks with convolutions take only the first.
    in_shape : sequence of int, optional
        Shape of one input, for a kind; by default (2,), for ``"coordinates"`` only.
    depth, width : int ≥ 1, optional
        Hidden layers of a perceptron and their units, or channels of the widest convolution,
        instead of the above.
    gain : float > 0, default 4
        s, for ``"chaotic_tanh"``: weights are N(0, s²/n) for n inputs.
    bias_std : float ≥ 0, default 0.3
        Standard deviation of biases, for ``"chaotic_tanh"``.
    generator : torch.Generator, optional
        Of all weights; on the CPU.

    Returns
    -------
    nn.Module
        In eval mode, without gradients, with ``like``'s device and dtype if it is a network.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, or a network that is neither of both.

    Notes
    -----
    *Ours:* the paper names deeper and finer guides and leaves open how they are drawn. A ReLU
    network that does not keep its variance, and a tanh network in the ordered phase (s near 1),
    map all inputs to nearly one direction at large depth and have nothing to lend.

    References
    ----------
    "Representational similarity as initialization prior", NeurIPS 2026. B. Poole, S. Lahiri,
    M. Raghu, J. Sohl-Dickstein, S. Ganguli, "Exponential expressivity in deep neural networks
    through transient chaos", NeurIPS 2016.

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> from thalweg.training import random_guide
    >>> target = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
    ...                        nn.Linear(32, 1))
    >>> guide = random_guide(target, generator=torch.Generator().manual_seed(0))
    >>> sum(isinstance(layer, nn.Tanh) for layer in guide)
    6
    """
    check_number("depth_factor", depth_factor, at_least=1)
    check_number("patch_factor", patch_factor, above=0, below=1)
    check_number("gain", gain, above=0)
    check_number("bias_std", bias_std, at_least=0)
    for name, value in (("depth", depth), ("width", width)):
        if value is not None:
            check_integer(name, value, at_least=1)
    if init is not None:
        check_choice("init", init, INITS)
    if isinstance(like, str):
        guide = _of_kind(like, in_shape, depth, width, init, gain, bias_std, generator)
    elif not isinstance(like, nn.Module):
        raise TypeError(f"like must be a module or the name of a kind, got {type(like).__name__}")
    elif any(isinstance(module, CONVOLUTIONS) for module in like.modules()):
        _refuse_chaos(init)
        guide = _finer(like, patch_factor)
        _draw_kaiming(guide, generator)
    else:
        guide = _deeper(like, depth_factor, depth, width, init, gain, bias_std, generator)
    return guide.eval().requires_grad_(False)


def _of_kind(
    kind: str,
    in_shape: Sequence[int] | None,
    depth: int | None,
    width: int | None,
    init: Init | None,
    gain: float,
    bias_std: float,
    generator: torch.Generator | None,
) -> nn.Module:
    check_choice("like", kind, KINDS)
    shape = (2,) if in_shape is None and kind == "coordinates" else in_shape
    if shape is None or len(shape) != KINDS[kind] or not all(n >= 1 for n in shape):
        raise ValueError(
            f"in_shape must be {KINDS[kind]} positive numbers for like={kind!r}, got {shape}"
        )
    if kind == "images":
        _refuse_chaos(init)
        images = _convolutions(shape, depth or 3, width or 64)
        _draw_kaiming(images, generator)
        return images
    init = init or ("chaotic_tanh" if kind == "coordinates" else "kaiming")
    return _perceptron(shape[0], depth or DEPTH, width or WIDTH, init, gain, bias_std, generator)


def _deeper(
    like: nn.Module,
    depth_factor: float,
    depth: int | None,
    width: int | None,
    init: Init | None,
    gain: float,
    bias_std: float,
    generator: torch.Generator | None,
) -> nn.Module:
    layers = [module for module in like.modules() if isinstance(module, nn.Linear)]
    if len(layers) < 2:
        raise ValueError(
            "like must have at least two linear layers, or a convolution with a stride, got "
            f"{type(like).__name__}; name a kind of inputs instead: {', '.join(map(repr, KINDS))}"
        )
    inputs = layers[0].in_features
    hidden = layers[:-1]
    init = init or ("chaotic_tanh" if inputs <= COORDINATES else "kaiming")
    guide = _perceptron(
        inputs,
        depth or max(math.ceil(depth_factor * len(hidden)), DEPTH if init == "chaotic_tanh" else 1),
        width or 2 * max(layer.out_features for layer in hidden),
        init,
        gain,
        bias_std,
        generator,
    )
    return guide.to(layers[0].weight.device, layers[0].weight.dtype)


def _perceptron(
    inputs: int,
    depth: int,
    width: int,
    init: Init,
    gain: float,
    bias_std: float,
    generator: torch.Generator | None,
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n in [inputs, *[width] * (depth - 1)]:
        layer = _undrawn(nn.Linear(n, width, device="meta"))
        if init == "chaotic_tanh":
            nn.init.normal_(layer.weight, std=gain / math.sqrt(n), generator=generator)
            nn.init.normal_(layer.bias, std=bias_std, generator=generator)
        layers += [layer, nn.Tanh() if init == "chaotic_tanh" else nn.ReLU()]
    guide = nn.Sequential(*layers)
    if init == "kaiming":
        _draw_kaiming(guide, generator)
    return guide


def _convolutions(shape: Sequence[int], depth: int, width: int) -> nn.Sequential:
    """Return 3x3 convolutions with ReLU, half as wide at first; the second halves the map."""
    layers: list[nn.Module] = [_Reshape(shape)]
    channels = shape[0]
    for i in range(depth):
        wider = max(1, width // 2) if i == 0 else width
        stride = 2 if i == 1 else 1
        layers += [
            _undrawn(nn.Conv2d(channels, wider, 3, stride=stride, padding=1, device="meta")),
            nn.ReLU(),
        ]
        channels = wider
    return nn.Sequential(*layers)


def _finer(like: nn.Module, patch_factor: float) -> nn.Module:
    """Return a copy of the network whose first convolution has a smaller stride."""
    guide = copy.deepcopy(like)
    name, first = next((n, m) for n, m in guide.named_modules() if isinstance(m, CONVOLUTIONS))
    stride = tuple(max(1, round(s * patch_factor)) for s in first.stride)
    if stride == tuple(first.stride):
        raise ValueError(
            f"like must have a stride in its first convolution, {name!r}, got {stride}"
        )
    are_patches = tuple(first.kernel_size) == tuple(first.stride)
    make: Any = type(first)
    finer: nn.Module = make(
        first.in_channels,
        first.out_channels,
        stride if are_patches else first.kernel_size,
        stride,
        padding=first.padding,
        dilation=first.dilation,
        groups=first.groups,
        bias=first.bias is not None,
        padding_mode=first.padding_mode,
        device="meta",
        dtype=first.weight.dtype,
    ).to_empty(device=first.weight.device)
    if not name:
        return finer
    parent, _, child = name.rpartition(".")
    setattr(guide.get_submodule(parent), child, finer)
    return guide


def _undrawn(layer: Layer) -> Layer:
    """Return a layer of the meta device with memory, and draw nothing from torch's own stream."""
    return layer.to_empty(device="cpu")


def _refuse_chaos(init: Init | None) -> None:
    if init == "chaotic_tanh":
        raise ValueError("init must be 'kaiming' for a network with convolutions")


@torch.no_grad()
def _draw_kaiming(guide: nn.Module, generator: torch.Generator | None) -> None:
    """Draw weights N(0, 2/n) for n inputs, which keeps the variance of ReLU networks; zero biases.

    Norms and embeddings stay as they are.
    """
    for module in guide.modules():
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            weight = torch.empty(module.weight.shape, dtype=module.weight.dtype, device="cpu")
            nn.init.kaiming_normal_(weight, nonlinearity="relu", generator=generator)
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.zero_()
