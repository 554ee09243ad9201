"""Batches of inputs, without labels, from a tensor, a loader or a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

Draw = Callable[[int, torch.Generator | None], Tensor]
Data = Tensor | Iterable[Any] | Draw
HELD_OUT_SHARE = 0.25


class UnlabeledBatches:
    """A stream of batches, and one batch that is held out.

    Attributes
    ----------
    held_out : Tensor of shape (at most batch_size, ...)
        From a tensor, at most a quarter of its rows, which no other batch contains. From a loader,
        its first rows; it may return them in a later pass. From a function, its first batch.
    pool : Tensor or None
        Of a tensor, the rows that batches are drawn from.
    """

    def __init__(
        self,
        data: Data,
        batch_size: int,
        generator: torch.Generator | None,
        device: torch.device,
    ) -> None:
        self.batch_size = check_integer("batch_size", batch_size, at_least=4)
        self._generator = generator
        self._device = device
        self.pool: Tensor | None = None
        if isinstance(data, Tensor):
            if data.ndim < 2 or len(data) < 8:
                raise ValueError(
                    f"data must have shape (n, ...) with n >= 8, got {tuple(data.shape)}"
                )
            order = self._permutation(len(data)).to(data.device)
            held = max(4, min(self.batch_size, int(HELD_OUT_SHARE * len(data))))
            self.held_out = self._checked(data[order[:held]])
            self.pool = self._checked(data[order[held:]])
            return
        if isinstance(data, Iterable):
            self._rows = self._gathered(data)
            self._draw: Draw = lambda size, _: next(self._rows)
        elif callable(data):
            self._draw = data
        else:
            raise TypeError(
                "data must be a tensor, an iterable of batches or a function of batch size and "
                f"generator, got {type(data).__name__}"
            )
        self.held_out = self.draw()

    def draw(self) -> Tensor:
        """Return the next batch; from a pool, rows without replacement."""
        if self.pool is not None:
            return self.pool[self.draw_index()]
        batch = self._draw(self.batch_size, self._generator)
        if not isinstance(batch, Tensor):
            raise TypeError(f"data must give tensors of inputs, got {type(batch).__name__}")
        if batch.ndim < 2 or len(batch) < 4:
            raise ValueError(
                f"data must give batches of shape (b, ...) with b >= 4, got {tuple(batch.shape)}"
            )
        return self._checked(batch)

    def draw_index(self) -> Tensor:
        """Return which rows of the pool are next, of shape (at most batch_size,)."""
        assert self.pool is not None
        return self._permutation(len(self.pool))[: self.batch_size].to(self._device)

    def _permutation(self, n: int) -> Tensor:
        device = "cpu" if self._generator is None else self._generator.device
        return torch.randperm(n, generator=self._generator, device=device)

    def _checked(self, batch: Tensor) -> Tensor:
        batch = batch.detach().to(self._device)
        if batch.is_floating_point() and not bool(batch.isfinite().all()):
            raise ValueError("data must be finite")
        return batch

    def _gathered(self, loader: Iterable[Any]) -> Iterator[Tensor]:
        """Yield batches of ``batch_size`` rows from a loader's batches, pass after pass."""
        rows: list[Tensor] = []
        while True:
            seen = 0
            for item in loader:
                # Labels, the rest of the item, are never touched.
                batch = item[0] if isinstance(item, (tuple, list)) else item
                if not isinstance(batch, Tensor):
                    raise TypeError(
                        "data must give tensors, or tuples whose first entry is the inputs, got "
                        f"{type(batch).__name__}"
                    )
                seen += len(batch)
                rows.append(batch)
                while sum(map(len, rows)) >= self.batch_size:
                    joined = torch.cat(rows)
                    yield joined[: self.batch_size]
                    rows = [joined[self.batch_size :]]
            if seen < self.batch_size:
                raise ValueError(
                    f"data must have at least batch_size={self.batch_size} rows in one pass, "
                    f"got {seen}"
                )


def like_noise(data: UnlabeledBatches) -> Draw:
    """Return a function that draws Gaussian noise with the held-out batch's means and variances."""
    examples = data.held_out
    if not examples.is_floating_point():
        raise TypeError(f"data must hold real numbers with noise_inputs=True, got {examples.dtype}")
    mean, std = examples.mean(0), examples.std(0)

    def draw(size: int, generator: torch.Generator | None) -> Tensor:
        device = "cpu" if generator is None else generator.device
        noise = torch.randn(
            (size, *mean.shape), generator=generator, device=device, dtype=mean.dtype
        )
        return mean + std * noise.to(mean.device)

    return draw
