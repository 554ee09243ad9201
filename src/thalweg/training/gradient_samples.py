"""Gradients of many minibatches at one point, kept as sketches whose size does not depend on d."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.common.torch_gradients import check_dense
from thalweg.training.stability import StabEstimate, estimate_ratio
from thalweg.training.tensor_lists import lerp, squared_norm, wide_dtype

LossFunction = Callable[[Any, Any], Tensor]

# A sketch of a tensor has as many buckets as fit into the budget, and at least the minimum: its
# norm is then right to √(2/buckets).
BUCKET_BUDGET = 2**14
MIN_BUCKETS = 64
COORDINATE_BUDGET = 4096
MIN_COORDINATES = 16


class Batches:
    """An endless iterator over what may be a list, a `DataLoader` or a generator of batches."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source = batches
        self._iterator: Iterator[Any] = iter(batches)
        self.taken = 0

    def take(self) -> Any:
        """Return the next batch; start again where the source allows it.

        Raises
        ------
        ValueError
            If there is none.
        """
        try:
            batch = next(self._iterator)
        except StopIteration:
            batch = self._first_again()
        self.taken += 1
        return batch

    def _first_again(self) -> Any:
        self._iterator = iter(self._source)
        try:
            return next(self._iterator)
        except StopIteration:
            raise ValueError(
                f"batches ended after {self.taken}; give more, or a list or DataLoader, which can "
                "be run through again"
            ) from None


class GradientOracle:
    """The gradients of a copy of a model, which leaves the model itself as it is."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, names: Iterable[str] | None
    ) -> None:
        self.model = copy.deepcopy(model)
        self._loss_fn = loss_fn
        self._names = None if names is None else list(names)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.params = _choose(trained, self._names)
        for parameter in self.model.parameters():
            parameter.grad = None

    def copy(self) -> GradientOracle:
        """Return an oracle at the same parameters."""
        return GradientOracle(self.model, self._loss_fn, self._names)

    def values(self) -> list[Tensor]:
        """Return the parameters, detached."""
        return [p.detach() for p in self.params.values()]

    def move_to(self, other: GradientOracle) -> None:
        """Take over the other's parameters and buffers."""
        self.model.load_state_dict(other.model.state_dict())

    def put_gradient(self, batch: Any) -> None:
        """Put the gradient of a batch where an optimizer looks for it."""
        for parameter, grad in zip(self.params.values(), self.gradient(batch), strict=True):
            parameter.grad = grad.to(parameter.dtype)

    def gradient(self, batch: Any) -> list[Tensor]:
        """Return the gradient of each parameter, zero where the loss does not depend on it.

        Raises
        ------
        TypeError
            If the loss is not a tensor.
        ValueError
            If it is not one number, or the gradient is not finite.
        """
        loss = self._loss_fn(self.model, batch)
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss_fn must return a tensor, got {type(loss).__name__}")
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn must return one number, got a tensor of shape {tuple(loss.shape)}"
            )
        params = list(self.params.values())
        grads = torch.autograd.grad(loss.reshape(()), params, allow_unused=True)
        return [
            torch.zeros_like(p, dtype=wide_dtype(p))
            if grad is None
            else check_dense(self, grad).detach().to(wide_dtype(p))
            for p, grad in zip(params, grads, strict=True)
        ]


class Sketch:
    """A random linear map of gradients to some hundred numbers per tensor.

    Bucket b of a tensor holds the sum of the entries b, b + B, b + 2B, … with random signs, so
    that the squared norm of the sketch is that of the tensor on average; a tensor of at most B
    entries is kept as it is. Beside it stand some entries of each tensor, unchanged.
    """

    def __init__(self, params: dict[str, Tensor], rng: np.random.Generator) -> None:
        wanted = max(BUCKET_BUDGET // len(params), MIN_BUCKETS)
        n = sum(p.numel() for p in params.values())
        self.buckets = {name: min(p.numel(), wanted) for name, p in params.items()}
        self._signs: list[Tensor | None] = []
        self._entries: list[Tensor] = []
        for p in params.values():
            signs = rng.integers(0, 2, p.numel(), dtype=np.int8) * 2 - 1
            long = p.numel() > wanted
            self._signs.append(torch.from_numpy(signs).to(p.device) if long else None)
            share = max(round(COORDINATE_BUDGET * p.numel() / max(n, 1)), MIN_COORDINATES)
            chosen = rng.choice(p.numel(), min(share, p.numel()), replace=False)
            self._entries.append(torch.from_numpy(np.sort(chosen)).to(p.device))
        self.n_entries = {
            name: len(entries) for name, entries in zip(params, self._entries, strict=True)
        }

    def __call__(self, grads: list[Tensor]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sketch and the chosen entries, each in one vector."""
        columns = zip(grads, self._signs, self.buckets.values(), strict=True)
        sketch = [_sum_into(grad.reshape(-1), signs, n) for grad, signs, n in columns]
        entries = [g.reshape(-1)[i] for g, i in zip(grads, self._entries, strict=True)]
        return _to_numpy(sketch), _to_numpy(entries)


@dataclass(frozen=True)
class GradientSamples:
    """Gradients of n minibatches at one point.

    Attributes
    ----------
    sketches : ndarray of shape (n, buckets)
    entries : ndarray of shape (n, chosen entries)
    means : list of Tensor
        The mean gradient.
    stability : StabEstimate
        The stability ratio, exactly, from the whole gradients.
    """

    sketches: NDArray[np.float64]
    entries: NDArray[np.float64]
    means: list[Tensor]
    stability: StabEstimate


def sample_gradients(
    oracle: GradientOracle,
    batches: Iterable[Any],
    sketch: Sketch,
    each: Callable[[list[Tensor]], None] = lambda grads: None,
) -> GradientSamples:
    """Return the sketches of the gradients of all batches, and hand each gradient to ``each``.

    Raises
    ------
    ValueError
        If a gradient is not finite.
    """
    means: list[Tensor] = []
    rows = []
    squares = []
    for j, batch in enumerate(batches):
        grads = oracle.gradient(batch)
        squares.append(squared_norm(grads))
        if not np.isfinite(squares[-1]):
            raise ValueError(f"the gradient of batch {j} is not finite; lower lr, or mend the loss")
        each(grads)
        rows.append(sketch(grads))
        if j == 0:
            means = [grad.clone() for grad in grads]
        else:
            lerp(means, grads, 1 / (j + 1))
    sketches, entries = (np.stack(column) for column in zip(*rows, strict=True))
    second, fourth = float(np.mean(squares)), float(np.mean(np.square(squares)))
    stability = estimate_ratio(len(rows), squared_norm(means), second, fourth)
    return GradientSamples(sketches, entries, means, stability)


def _choose(trained: dict[str, nn.Parameter], names: Iterable[str] | None) -> dict[str, Tensor]:
    chosen: dict[str, Tensor] = {}
    for name in trained if names is None else names:
        if name not in trained:
            listed = ", ".join(list(trained)[:8])
            raise ValueError(
                f"params must name parameters that require gradients ({listed}, …), got {name!r}"
            )
        chosen[name] = trained[name]
    if not any(p.numel() for p in chosen.values()):
        raise ValueError("params must hold at least one entry that requires a gradient")
    return {name: p for name, p in chosen.items() if p.numel()}


def _sum_into(flat: Tensor, signs: Tensor | None, buckets: int) -> Tensor:
    if signs is None:
        return flat
    signed = flat * signs
    padding = -len(flat) % buckets
    return torch.nn.functional.pad(signed, (0, padding)).view(-1, buckets).sum(0)


def _to_numpy(tensors: list[Tensor]) -> NDArray[np.float64]:
    return torch.cat([t.double().cpu() for t in tensors]).numpy()
