"""How the parameters of a model grow with its width: roles and fans of every layer."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

from thalweg.common.optional import requires

with requires("training"):
    from torch import nn
    from torch.nn import Parameter

Role = Literal["input", "hidden", "output", "vector", "embedding", "fixed"]
ROLES: tuple[Role, ...] = get_args(Role)
BaseShapes = Mapping[str, Sequence[int]] | nn.Module
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class LayerWidth(NamedTuple):
    """One parameter tensor, here and at the base width.

    An m × n matrix maps n = fan_in numbers to m = fan_out. A vector of m numbers, and a row of an
    embedding, count as m × 1.
    """

    name: str
    parameter: Parameter
    role: Role
    fan_out: int
    fan_in: int
    base_fan_out: int
    base_fan_in: int

    @property
    def is_matrix(self) -> bool:
        """Whether it maps vectors to vectors; rows of embeddings are looked up one at a time."""
        return self.role not in ("vector", "embedding")


def width_roles(
    model: nn.Module,
    base_shapes: BaseShapes | None = None,
    roles: Mapping[str, Role] | None = None,
    readout: str | None = None,
) -> list[LayerWidth]:
    """Compare the trainable parameters' shapes with those of a model of another width.

    A matrix whose fan_out grows is an input layer, one whose fan_in grows an output layer, and a
    hidden layer if both do. Kernels (out, in, k, k) count as (out, in · k · k); the ``Conv1D`` of
    transformers, which stores (in, out), is turned around.

    Parameters
    ----------
    model : torch.nn.Module
    base_shapes : torch.nn.Module or mapping of str to sequence of int, optional
        The model at the base width, or the shapes of all its parameters by name. By default the
        model's own: then nothing grows, and matrices without a given role are "fixed".
    roles : mapping of str to str, optional
        Roles that are not to be inferred, by parameter name.
    readout : str, optional
        Name of the module whose weight has the role "output".

    Returns
    -------
    list of LayerWidth
        In the order of ``model.named_parameters()``.

    Raises
    ------
    TypeError, ValueError
        For names that do not match, shapes that do not fit, an unknown role, and a weight that an
        embedding shares with another module and that no role is given for.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    base = _base_shapes(model, base_shapes)
    given = _given_roles(model, roles, readout)
    of_embeddings = _embedding_weights(model, given)
    transposed = {id(module.weight) for module in model.modules() if _is_conv1d(module)}
    layers = []
    for name, parameter in parameters.items():
        shape, base_shape = tuple(parameter.shape), base[name]
        if len(shape) != len(base_shape):
            raise ValueError(
                f"base_shapes[{name!r}] must have {len(shape)} dimensions, got {base_shape}"
            )
        flip = id(parameter) in transposed
        tabled = given.get(name) == "embedding" or id(parameter) in of_embeddings
        fans = _fans(shape, tabled, flip)
        base_fans = _fans(base_shape, tabled, flip)
        role = given.get(name) or _inferred(shape, tabled, fans, base_fans)
        _check_role(name, role, shape)
        layers.append(LayerWidth(name, parameter, role, *fans, *base_fans))
    _warn_of_fixed(layers, given)
    return layers


def _base_shapes(model: nn.Module, base_shapes: BaseShapes | None) -> Mapping[str, tuple[int, ...]]:
    shapes = _shapes(model)
    if base_shapes is None:
        return shapes
    if isinstance(base_shapes, nn.Module):
        base_shapes = _shapes(base_shapes)
    if not isinstance(base_shapes, Mapping):
        raise TypeError(
            f"base_shapes must be a module or a mapping, got {type(base_shapes).__name__}"
        )
    different = sorted(shapes.keys() ^ base_shapes.keys())
    if different:
        more = f" and {len(different) - 5} more" if len(different) > 5 else ""
        raise ValueError(
            "base_shapes must name the model's parameters; these are in one of the two only: "
            f"{', '.join(different[:5])}{more}"
        )
    return {name: tuple(int(size) for size in shape) for name, shape in base_shapes.items()}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _given_roles(
    model: nn.Module, roles: Mapping[str, Role] | None, readout: str | None
) -> dict[str, Role]:
    given = dict(roles or {})
    if readout is not None:
        given = {f"{readout}.weight": "output", **given}
    names = dict(model.named_parameters(remove_duplicate=False))
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise ValueError(f"roles and readout must name parameters of the model, got {unknown[:5]}")
    # A tied weight goes by its first name.
    first = {id(p): name for name, p in model.named_parameters()}
    return {first[id(names[name])]: role for name, role in given.items()}


def _embedding_weights(model: nn.Module, given: Mapping[str, Role]) -> set[int]:
    """Return the ids of embeddings' weights; those of tied ones only if they have a role."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, EMBEDDINGS)}
    first = {id(p): name for name, p in model.named_parameters()}
    shared = {id(p) for p in _held_by(model, EMBEDDINGS, inside=False)} & weights
    for tied in shared:
        if first[tied] not in given:
            raise ValueError(
                f"roles must name a role for {first[tied]!r}: an embedding shares it with another "
                "module, and its two uses scale differently"
            )
    return weights - {tied for tied in shared if given[first[tied]] != "embedding"}


def _held_by(model: nn.Module, kinds: tuple[type, ...], *, inside: bool) -> Iterator[Parameter]:
    for module in model.modules():
        if isinstance(module, kinds) == inside:
            yield from module.parameters(recurse=False)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether it is the linear layer of transformers' GPT-2, which stores (in, out)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _fans(shape: tuple[int, ...], tabled: bool, flip: bool) -> tuple[int, int]:
    if len(shape) < 2:
        return math.prod(shape), 1
    if tabled:
        return shape[1], 1
    fans = shape[0], math.prod(shape[1:])
    return fans[::-1] if flip else fans


def _inferred(
    shape: tuple[int, ...], tabled: bool, fans: tuple[int, int], base_fans: tuple[int, int]
) -> Role:
    if len(shape) < 2:
        return "vector"
    if tabled:
        return "embedding"
    grows = tuple(fan != base for fan, base in zip(fans, base_fans, strict=True))
    kinds: dict[tuple[bool, ...], Role] = {
        (True, True): "hidden",
        (True, False): "input",
        (False, True): "output",
    }
    return kinds.get(grows, "fixed")


def _check_role(name: str, role: Role, shape: tuple[int, ...]) -> None:
    if role not in ROLES:
        raise ValueError(f"roles[{name!r}] must be one of {ROLES}, got {role!r}")
    fits = len(shape) == 2 if role == "embedding" else (len(shape) < 2) == (role == "vector")
    if not fits:
        raise ValueError(f"roles[{name!r}] = {role!r} does not fit a parameter of shape {shape}")


def _warn_of_fixed(layers: list[LayerWidth], given: Mapping[str, Role]) -> None:
    """Warn of matrices that keep their shape, if anything else changes its shape."""
    changed = any(
        (layer.fan_out, layer.fan_in) != (layer.base_fan_out, layer.base_fan_in) for layer in layers
    )
    fixed = [layer.name for layer in layers if layer.role == "fixed" and layer.name not in given]
    if changed and fixed:
        warnings.warn(
            f"{', '.join(fixed[:5])}: matrices of the same shape at both widths keep the base lr; "
            "give them a role if they should not",
            stacklevel=4,
        )
