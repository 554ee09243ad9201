"""Signal and drift: how much of a LoRA update is due to B, and how much to a turning A."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.common.torch_gradients import whole
from thalweg.training.lora_layers import LoRAMatrix, lora_matrices
from thalweg.training.tensor_lists import wide_dtype

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Σ (A₀x)(A₀x)ᵀ, Σ (ΔAx)(ΔAx)ᵀ and Σ (Ax)(Ax)ᵀ, each (r, r); without inputs of A₀A₀ᵀ and so on.
Grams = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LayerDrift:
    """Signal and drift of one matrix, or of all.

    Attributes
    ----------
    signal : float
        ``‖s B A₀‖``, what B has learned, seen through the initial A.
    drift : float
        ``‖s B (A - A₀)‖``, what the turning of A has added.
    drift_ratio : float
        drift / signal; 0 while both are 0.
    effective_scale : float
        s; of all matrices the mean.
    delta_norm : float
        ``‖s B A‖``, the size of the update.
    relative_update : float
        ``‖s B A‖ / ‖W₀‖``; NaN where W₀ is quantized, or with ``inputs``.
    relative_a_change : float
        ``‖A - A₀‖ / ‖A₀‖``.
    """

    signal: float
    drift: float
    drift_ratio: float
    effective_scale: float
    delta_norm: float
    relative_update: float
    relative_a_change: float


@dataclass(frozen=True)
class SignalDriftReport:
    """Signal and drift of a LoRA model.

    Attributes
    ----------
    layers : dict of str to LayerDrift
        By the name of the adapted module.
    total : LayerDrift
        Of all matrices together: norms are roots of sums of squares.
    """

    layers: dict[str, LayerDrift]
    total: LayerDrift

    def as_dict(self, prefix: str = "lora/") -> dict[str, float]:
        """Return the total's figures, for a logger."""
        return {f"{prefix}{name}": value for name, value in asdict(self.total).items()}

    def __str__(self) -> str:
        lines = ["    signal      drift  ratio  ‖ΔA‖/‖A₀‖  ‖ΔW‖/‖W₀‖      s  matrix"]
        for name, row in [*self.layers.items(), ("all", self.total)]:
            lines.append(
                f"{row.signal:10.3g} {row.drift:10.3g} {row.drift_ratio:6.3f} "
                f"{row.relative_a_change:10.3f} {row.relative_update:10.3g} "
                f"{row.effective_scale:6.1f}  {name}"
            )
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot signal and drift of each matrix."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        rows = np.arange(len(self.layers))
        ax.barh(rows - 0.2, [r.signal for r in self.layers.values()], 0.4, label="signal")
        ax.barh(rows + 0.2, [r.drift for r in self.layers.values()], 0.4, label="drift")
        ax.set_yticks(rows, list(self.layers))
        ax.invert_yaxis()
        ax.set(xlabel="norm of the part of the update")
        ax.legend()
        return ax


@torch.no_grad()
def lora_init_state(model: nn.Module, adapter: str = "default") -> dict[str, Tensor]:
    """Return what `signal_drift` must know of the start of training.

    Parameters
    ----------
    model : nn.Module
        With adapters of PEFT or `LoRALinear`, not trained yet.
    adapter : str, default "default"
        The name of PEFT's adapter.

    Returns
    -------
    dict of str to Tensor
        Copies of A on the CPU, and the norms of W₀; r · d_in numbers for each matrix. It can be
        saved with `torch.save`.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import LoRALinear, lora_init_state
    >>> state = lora_init_state(LoRALinear(torch.nn.Linear(8, 4), r=2))
    >>> {name: tuple(tensor.shape) for name, tensor in state.items()}
    {'A': (2, 8), 'weight_norm': ()}
    """
    state = {}
    for matrix in lora_matrices(model, adapter):
        state[_key(matrix, "A")] = whole(matrix.A.detach()).cpu().clone()
        state[_key(matrix, "weight_norm")] = _norm(matrix.weight).cpu()
    return state


@torch.no_grad()
def signal_drift(
    model: nn.Module,
    init_state: Mapping[str, Tensor] | None = None,
    adapter: str = "default",
    inputs: Any = None,
) -> SignalDriftReport:
    r"""Split the update of a LoRA model into signal and drift.

    .. math:: \Delta W = s B A = \underbrace{s B A_0}_{\text{signal}}
              + \underbrace{s B (A - A_0)}_{\text{drift}}

    The signal is what B learns, seen through the fixed random projection A₀; the drift comes from
    turning the projection while B learns. With Adam, ``|A - A₀|`` is at most about lr · t in
    each entry: drift over signal grows with lr and does not depend on α.

    Parameters
    ----------
    model : nn.Module
        With adapters of PEFT or `LoRALinear`.
    init_state : mapping of str to Tensor
        From `lora_init_state` before training, or `SignalDriftCallback.init_state`.
    adapter : str, default "default"
        The name of PEFT's adapter.
    inputs : optional
        A batch for the model: a mapping is passed as ``model(**inputs)``, a tuple or list as
        ``model(*inputs)``, anything else as ``model(inputs)``. The norms are then root mean
        squares of s B A₀ x and so on over the inputs x (tokens) of each matrix, instead of
        Frobenius norms.

    Returns
    -------
    SignalDriftReport

    Raises
    ------
    TypeError, ValueError
        If ``model`` has no adapters, or ``init_state`` is missing or of another model.

    Notes
    -----
    *Cost.* ``‖B A‖² = tr((BᵀB)(AAᵀ))``: r² (3 d_in + d_out) multiplications and O(r d_in)
    memory for each matrix, whose product is never formed. With ``inputs`` also one forward pass.

    *Ours.* The measure over ``inputs``.

    References
    ----------
    "LoRA-alpha", the paper on LoRA's scaling factor and its Signal-Drift framework, NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import LoRALinear, lora_init_state, signal_drift
    >>> layer = LoRALinear(torch.nn.Linear(2, 1), r=1, alpha=2.0)
    >>> _ = torch.nn.init.constant_(layer.lora_A, 3.0), torch.nn.init.constant_(layer.lora_B, 1.0)
    >>> start = lora_init_state(layer)
    >>> _ = layer.lora_A.data.add_(torch.tensor([[0.0, 1.0]]))
    >>> total = signal_drift(layer, start).total
    >>> f"{total.signal:.3f} {total.drift:.3f} {total.drift_ratio:.3f}"
    '8.485 2.000 0.236'
    """
    matrices = lora_matrices(model, adapter)
    if init_state is None:
        raise ValueError(
            "init_state must be given, because A's start cannot be known afterwards: take "
            "lora_init_state(model) before training, or train with SignalDriftCallback and pass "
            "its init_state"
        )
    starts = {matrix.name: _start(matrix, init_state) for matrix in matrices}
    if inputs is None:
        grams = {m.name: _grams(_now(m, starts), starts[m.name]) for m in matrices}
    else:
        grams = _grams_of_inputs(model, matrices, starts, inputs)
    sums: list[list[float]] = []
    layers = {}
    for matrix in matrices:
        size = math.nan if inputs is not None else float(init_state[_key(matrix, "weight_norm")])
        change = _now(matrix, starts) - starts[matrix.name]
        squares = torch.stack(
            [
                *_squares(matrix, grams[matrix.name]),
                change.square().sum(),
                starts[matrix.name].square().sum(),
            ]
        ).tolist()
        sums.append([*squares, size**2])
        layers[matrix.name] = _layer_drift(sums[-1], matrix.scale)
    mean_scale = float(np.mean([matrix.scale for matrix in matrices]))
    return SignalDriftReport(layers, _layer_drift(np.sum(sums, axis=0).tolist(), mean_scale))


def _layer_drift(squares: list[float], scale: float) -> LayerDrift:
    signal, drift, delta, change, start, weight = (math.sqrt(max(x, 0.0)) for x in squares)
    return LayerDrift(
        signal=signal,
        drift=drift,
        drift_ratio=_ratio(drift, signal),
        effective_scale=scale,
        delta_norm=delta,
        relative_update=_ratio(delta, weight),
        relative_a_change=_ratio(change, start),
    )


def _ratio(part: float, of: float) -> float:
    if part == 0:
        return 0.0
    return part / of if of != 0 else math.inf


def _squares(matrix: LoRAMatrix, grams: Grams) -> list[Tensor]:
    """Return ``‖s B P‖² = s² tr((BᵀB)(PPᵀ))`` for P = A₀, ΔA and A."""
    b = whole(matrix.B.detach()).flatten(1).to(grams[0])
    b_gram = b.T @ b
    return [matrix.scale**2 * (b_gram * gram).sum() for gram in grams]


def _grams(a: Tensor, start: Tensor) -> Grams:
    change = a - start
    return start @ start.T, change @ change.T, a @ a.T


def _grams_of_inputs(
    model: nn.Module, matrices: list[LoRAMatrix], starts: dict[str, Tensor], inputs: Any
) -> dict[str, Grams]:
    """Return means over the inputs of each matrix; sums are kept, not the inputs."""
    grams: dict[str, Grams] = {}
    counts: dict[str, int] = {}

    def watch(matrix: LoRAMatrix) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            start = starts[matrix.name]
            x = args[0].reshape(-1, args[0].shape[-1]).to(start)
            if x.shape[1] != start.shape[1]:
                raise ValueError(
                    f"inputs must not be given for {matrix.name}, which is no linear layer"
                )
            found = _grams(_now(matrix, starts) @ x.T, start @ x.T)
            before = grams.get(matrix.name)
            grams[matrix.name] = found if before is None else _sum(before, found)
            counts[matrix.name] = counts.get(matrix.name, 0) + len(x)

        return hook

    handles = [matrix.module.register_forward_pre_hook(watch(matrix)) for matrix in matrices]
    try:
        with evaluating(model):
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    unused = [matrix.name for matrix in matrices if matrix.name not in grams]
    if unused:
        raise ValueError(f"inputs must reach all adapted matrices, they do not reach {unused}")
    return {
        name: (a / counts[name], b / counts[name], c / counts[name])
        for name, (a, b, c) in grams.items()
    }


def _sum(x: Grams, y: Grams) -> Grams:
    return x[0] + y[0], x[1] + y[1], x[2] + y[2]


def call(model: nn.Module, inputs: Any) -> Any:
    """Call the model with a batch: a mapping, a tuple or list, or a single argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and every module back into its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _start(matrix: LoRAMatrix, init_state: Mapping[str, Tensor]) -> Tensor:
    """Return A₀ on the device of A, at least in float32, with one axis for inputs."""
    key = _key(matrix, "A")
    start = init_state.get(key)
    if start is None or _key(matrix, "weight_norm") not in init_state:
        raise ValueError(
            f"init_state must come from lora_init_state of this model: {key!r} is missing"
        )
    if start.shape != matrix.A.shape:
        raise ValueError(
            f"init_state must come from lora_init_state of this model: {key!r} has shape "
            f"{tuple(start.shape)}, the model's {tuple(matrix.A.shape)}"
        )
    return start.to(matrix.A.device, wide_dtype(matrix.A)).flatten(1)


def _now(matrix: LoRAMatrix, starts: dict[str, Tensor]) -> Tensor:
    return whole(matrix.A.detach()).flatten(1).to(starts[matrix.name])


def _key(matrix: LoRAMatrix, what: str) -> str:
    return f"{matrix.name}.{what}" if matrix.name else what


def _norm(weight: Tensor | None) -> Tensor:
    """Return ‖W₀‖, or NaN for weights that are no numbers as they stand: packed 4-bit ones."""
    if weight is None or not weight.is_floating_point():
        return torch.tensor(math.nan, dtype=torch.float64)
    norm: Tensor = torch.linalg.vector_norm(whole(weight.detach()).double())
    return norm
