"""Hidden representations of any network: which layers there are, and their outputs, by hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.modules.batchnorm import _BatchNorm

from thalweg.training.representation_similarity import single

Pool = Literal["flatten", "mean", "grid"]
POOLS = ("flatten", "mean", "grid")

# Outputs of a softmax are probabilities, no hidden representation.
ACTIVATIONS = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.PReLU,
    nn.RReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Sigmoid,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
)
RESIDUAL_BLOCKS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module during a forward pass.

    ``source`` and ``result`` are its first input and its output; ``rms`` is the root mean square
    of the output when it was made, before a later module may have written into it, and ``spread``
    that of its deviation from the mean over the batch.
    """

    name: str
    module: nn.Module
    source: Tensor | None
    result: Tensor
    rms: float
    spread: float

    def feeds(self, other: Call) -> bool:
        """Whether ``other`` reads this output, or a view of it."""
        return other.source is not None and _same_memory(self.result, other.source)

    def shares_output(self, other: Call) -> bool:
        """Whether both have one output, as a block and its last module have."""
        return _same_memory(self.result, other.result)


class FeatureHooks:
    """Records the outputs of named layers at every forward pass, until it is closed.

    A layer that is called several times in one pass gives its last output.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._model = model
        self._names = tuple(names)
        self._seen: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        self._handles = [
            modules[name].register_forward_hook(self._recorder(name)) for name in self._names
        ]

    def __call__(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the layers' outputs at ``inputs``."""
        self._seen = {}
        self._model(inputs)
        missing = [name for name in self._names if name not in self._seen]
        if missing:
            raise ValueError(f"layers must be used in the forward pass, these are not: {missing}")
        seen, self._seen = self._seen, {}
        return seen

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _recorder(self, name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._seen[name] = first_tensor(name, output)

        return record


def first_tensor(name: str, output: Any) -> Tensor:
    """Return ``output``, or the first entry of a tuple, list or mapping."""
    while isinstance(output, (tuple, list, dict)) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    if not isinstance(output, Tensor):
        raise TypeError(f"layer {name!r} must return a tensor, got {type(output).__name__}")
    return output


@torch.no_grad()
def trace(model: nn.Module, inputs: Tensor) -> list[Call]:
    """Return the calls of all modules in the order in which they end."""
    calls: list[Call] = []

    def recorder(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            while isinstance(output, (tuple, list)) and output:
                output = output[0]
            if isinstance(output, Tensor) and output.is_floating_point():
                source = args[0] if args and isinstance(args[0], Tensor) else None
                values = single(output)
                rms, spread = (
                    float(v.square().mean().sqrt()) for v in (values, values - values.mean(0))
                )
                calls.append(Call(name, module, source, output, rms, spread))

        return record

    handles = [m.register_forward_hook(recorder(name)) for name, m in model.named_modules() if name]
    try:
        model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def hidden_layers(argument: str, model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the names of the layers whose outputs are the network's hidden representations.

    These are its transformer blocks, whose outputs are the residual stream, or else its activation
    modules, in the order of their last calls.
    """
    calls = trace(model, inputs)
    for kinds in (RESIDUAL_BLOCKS, ACTIVATIONS):
        # A dict keeps the place of the first entry: from the back, that is the last call.
        names = dict.fromkeys(c.name for c in reversed(calls) if isinstance(c.module, kinds))
        if names:
            return list(names)[::-1]
    raise ValueError(
        f"{argument} must name layers, as no activation module was found in "
        f"{type(model).__name__}; it has {_listed(model)}"
    )


def check_layers(argument: str, model: nn.Module, names: Sequence[str]) -> list[str]:
    """Return the names as a list if the model has modules of these names."""
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a sequence of names, got the string {names!r}")
    known = dict(model.named_modules())
    unknown = [name for name in names if name not in known or name == ""]
    if unknown or not names:
        raise ValueError(
            f"{argument} must be names of modules, got {unknown or list(names)}; "
            f"the candidates are {_listed(model)}"
        )
    return list(names)


def _listed(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return ", ".join(names[:40]) + (", ..." if len(names) > 40 else "") if names else "no modules"


@contextmanager
def initial_mode(model: nn.Module, *, batch_statistics: bool = True) -> Iterator[None]:
    """Make the network a fixed function of the batch, and leave its modes and buffers as they were.

    It is in eval mode inside, so that nothing is dropped at random. Running statistics mean nothing
    before training: batch normalization uses those of the batch and records none.
    """
    modes = {module: module.training for module in model.modules()}
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)] if batch_statistics else []
    statistics = [(norm.running_mean, norm.running_var) for norm in norms]
    model.eval()
    for norm in norms:
        norm.running_mean = norm.running_var = None
    try:
        yield
    finally:
        for norm, (mean, var) in zip(norms, statistics, strict=True):
            norm.running_mean, norm.running_var = mean, var
        for module, training in modes.items():
            module.training = training


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether features of one input depend on the others in the batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def pooled(name: str, feature: Tensor, pool: Pool, grid: tuple[int, int] | None = None) -> Tensor:
    """Return features as rows, of shape (b, f).

    Parameters
    ----------
    name : str
        Of the layer, for messages.
    feature : Tensor of shape (b, f), (b, tokens, f), (b, channels, height, width) or other
    pool : {"flatten", "mean", "grid"}
        Keep all positions, average over them, or average over the cells of ``grid``. Tensors of
        shape (b, f) have no positions.
    grid : tuple of two ints, optional
        If there is none, all positions are averaged with ``"grid"``, too.
    """
    if pool == "flatten" or feature.ndim < 3:
        return feature.flatten(1)
    if pool == "mean" or grid is None:
        return feature.mean(1) if feature.ndim == 3 else feature.flatten(2).mean(2)
    positions = grid_of(name, feature)
    if feature.ndim == 3 and positions is not None:
        feature = feature.transpose(1, 2).reshape(len(feature), -1, *positions)
    return nn.functional.adaptive_avg_pool2d(feature, grid).flatten(1)


def grid_of(name: str, feature: Tensor) -> tuple[int, int] | None:
    """Return height and width of a map, or of tokens that form a square, else None."""
    if feature.ndim < 3:
        return None
    side = round(feature.shape[1] ** 0.5)
    if feature.ndim == 4:
        return int(feature.shape[2]), int(feature.shape[3])
    if feature.ndim == 3 and side**2 == feature.shape[1]:
        return side, side
    raise ValueError(
        "pool='grid' needs maps of shape (b, channels, height, width) or (b, tokens, features) "
        f"with a square number of tokens, got {tuple(feature.shape)} from layer {name!r}"
    )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (
        a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    )
