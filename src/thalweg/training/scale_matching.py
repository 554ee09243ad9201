"""Give the layers of a network the scale that another state of it has, and keep its geometry."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.conv import _ConvNd

from thalweg.training.layer_features import Call, trace

Scale = Literal["features", "preactivations"]
AFFINE = (nn.Linear, _ConvNd)
NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
# f(c x) = c f(x) for c > 0.
HOMOGENEOUS = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.PReLU,
    nn.Identity,
    nn.Flatten,
    nn.Unflatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
)


def scales(calls: Sequence[Call], layers: Sequence[str], what: Scale) -> dict[str, float]:
    """Return the scale of each layer that one affine or norm layer can rescale.

    With ``"features"`` that is the root mean square of the features' deviation from their mean over
    the batch, which is what CKA divides out. Behind activations that do not let a factor through
    it is the root mean square of the pre-activation, and so it is for all with
    ``"preactivations"``.
    """
    found = {}
    for layer in layers:
        if not any(call.name == layer for call in calls):
            continue
        position = _last(calls, layer)
        producer = _producer(calls, position)
        if producer is None:
            continue
        leaf = calls[_leaf(calls, position)].module
        linear = what == "features" and isinstance(leaf, (*HOMOGENEOUS, *AFFINE, *NORMS))
        found[layer] = calls[position].spread if linear else producer.rms
    return found


def _producer(calls: Sequence[Call], position: int) -> Call | None:
    """Return the affine or norm layer that makes the layer's input: the pre-activation.

    A layer that is affine itself is its own. The sum of two branches is made by no single layer.
    """
    if _has_children(calls[position]):
        leaf = _leaf(calls, position)
        return None if leaf == position else _producer(calls, leaf)
    call = calls[position]
    if isinstance(call.module, (*AFFINE, *NORMS)):
        return call if getattr(call.module, "weight", None) is not None else None
    before = [i for i in range(position) if calls[i].feeds(call)]
    return _producer(calls, before[-1]) if before else None


def _leaf(calls: Sequence[Call], position: int) -> int:
    """Return where the module without children is called whose output the call returns."""
    while _has_children(calls[position]):
        inner = [i for i in range(position) if calls[i].shares_output(calls[position])]
        if not inner:
            break
        position = inner[-1]
    return position


@torch.no_grad()
def match_scale(
    model: nn.Module,
    inputs: Tensor,
    wanted: Mapping[str, float],
    what: Scale,
    frozen: Collection[int] = (),
) -> None:
    """Rescale the layers that make pre-activations, so that the scales are those that are wanted.

    Weight and bias are multiplied by one factor. Where the activation is positively homogeneous,
    the weights of the layers that read it are divided by the factor, so that they compute what
    they did before; the readers of the last layer are not, as they belong to the readout.

    Parameters
    ----------
    model : nn.Module
        Changed in place.
    inputs : Tensor of shape (b, ...)
    wanted : mapping of str to float
        As `scales` has returned it, at the same inputs.
    what : {"features", "preactivations"}
    frozen : collection of int, optional
        The ids of the parameters that must not be changed.
    """
    if not wanted:
        return
    calls = trace(model, inputs)
    order = sorted(wanted, key=lambda layer: _last(calls, layer))
    end = _last(calls, order[-1])
    for layer in order:
        producer = _producer(calls, _last(calls, layer))
        present = scales(trace(model, inputs), [layer], what)[layer]
        assert producer is not None
        own = list(producer.module.parameters(recurse=False))
        if present == 0 or any(id(p) in frozen for p in own):
            continue
        factor = wanted[layer] / present
        for parameter in own:
            parameter.mul_(factor)
        for reader in _readers(calls, _leaf(calls, _last(calls, layer)), end):
            weight = reader.weight
            assert isinstance(weight, Tensor)
            if id(weight) not in frozen:
                weight.div_(factor)


def _last(calls: Sequence[Call], name: str) -> int:
    return max(i for i, call in enumerate(calls) if call.name == name)


def _readers(calls: Sequence[Call], position: int, end: int) -> list[nn.Module]:
    """Return the affine layers before ``end`` that read a call's output, unless it is bent before.

    What they read may have passed modules that are positively homogeneous, as the call itself must
    be.
    """
    if not isinstance(calls[position].module, HOMOGENEOUS):
        return []
    carriers = [calls[position]]
    found: dict[nn.Module, None] = {}
    for call in calls[position + 1 : end]:
        if _has_children(call) or not any(carrier.feeds(call) for carrier in carriers):
            continue
        if isinstance(call.module, AFFINE):
            found[call.module] = None
        elif isinstance(call.module, HOMOGENEOUS):
            carriers.append(call)
    return list(found)


def _has_children(call: Call) -> bool:
    return next(call.module.children(), None) is not None
