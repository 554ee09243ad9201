"""Losses written in torch, as finite sums for bilevel methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.row_sources import number_of_rows
from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Array = NDArray[np.float64]


class TorchLoss:
    """The mean of per-sample losses that a function of tensors computes.

    Parameters
    ----------
    fn : callable
        ``fn(x, *batch)``: the losses of a batch, a tensor of shape (B,), where x is a tensor of the
        shape of the variables and ``batch`` holds rows of ``data``. It is differentiated in x.
    data : Tensor or sequence of Tensor
        One or several tensors with n rows each. Their first floating-point dtype, and their device,
        are those of x in ``fn``.
    chunk_size : int ≥ 1, default 4096
        Samples per call for `value` and `grad`, which bounds the memory.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described; from a call, if ``fn`` returns something else.

    Examples
    --------
    >>> import numpy as np, torch
    >>> from thalweg.bilevel import TorchLoss
    >>> f = TorchLoss(lambda x, a, b: (a @ x - b).abs(), (torch.eye(2), torch.tensor([1.0, -1.0])))
    >>> f.value(np.zeros(2)), f.grad(np.zeros(2)).tolist()
    (1.0, [-0.5, 0.5])
    """

    def __init__(
        self,
        fn: Callable[..., torch.Tensor],
        data: torch.Tensor | Sequence[torch.Tensor],
        *,
        chunk_size: int = 4096,
    ) -> None:
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        tensors = (data,) if isinstance(data, torch.Tensor) else tuple(data)
        self.fn = fn
        self.data = tensors
        self.n: int | None = number_of_rows("data", tensors)
        self.chunk_size = check_integer("chunk_size", chunk_size, at_least=1)
        floats = [t.dtype for t in tensors if t.is_floating_point()]
        self._like = torch.empty(
            0, dtype=floats[0] if floats else torch.float64, device=tensors[0].device
        )

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.intp]:
        """Return ``size`` uniform sample numbers, with replacement."""
        return rng.integers(len(self.data[0]), size=size)

    def value(self, x: Array) -> float:
        """Return the mean loss."""
        point = self._tensor(x)
        with torch.no_grad():
            total = sum(float(self._total(point, batch)) for batch in self._chunks())
        return total / len(self.data[0])

    def grad(self, x: Array) -> Array:
        """Return the gradient of the mean loss, in the shape of x."""
        gradient = np.zeros(np.shape(x))
        for batch in self._chunks():
            gradient += self._gradient(x, batch)
        return gradient / len(self.data[0])

    def sample_grad(self, x: Array, idx: NDArray[np.intp]) -> Array:
        """Return the mean gradient of the samples ``idx``, in the shape of x."""
        rows = torch.as_tensor(idx, device=self._like.device)
        return self._gradient(x, tuple(t[rows] for t in self.data)) / len(idx)

    def _chunks(self) -> Any:
        return zip(*(torch.split(t, self.chunk_size) for t in self.data), strict=True)

    def _gradient(self, x: Array, batch: tuple[torch.Tensor, ...]) -> Array:
        """Return the gradient of the sum over a batch."""
        point = self._tensor(x).requires_grad_()
        with torch.enable_grad():
            gradient = torch.autograd.grad(self._total(point, batch), point)[0]
        array: Array = gradient.double().cpu().numpy()
        return array

    def _tensor(self, x: Array) -> torch.Tensor:
        return torch.tensor(x, dtype=self._like.dtype, device=self._like.device)

    def _total(self, point: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        losses = self.fn(point, *batch)
        if not isinstance(losses, torch.Tensor) or losses.shape != (len(batch[0]),):
            got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise TypeError(
                f"fn must return one loss per sample, a tensor of shape ({len(batch[0])},), "
                f"got {got}"
            )
        return losses.sum()
