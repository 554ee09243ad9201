"""Where batches come from: rows of tensors, or a function that draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Data = Any  # Tensor, sequence of Tensors, or callable


class RowSource:
    """Batches of rows of tensors, or of a function.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    data : Tensor, sequence of Tensor, or callable
        Tensors with n rows each, of which a batch takes the same ones (a tuple of tensors, or a
        tensor if data is one); or ``data(size, generator)``, which returns a batch of any kind.

    Raises
    ------
    TypeError, ValueError
        If data is something else, or the tensors have different numbers of rows, or none.
    """

    def __init__(self, name: str, data: Data) -> None:
        self.name = name
        self._draw: Callable[[int, torch.Generator | None], Any] | None = None
        self.n: int | None = None
        self._single = isinstance(data, torch.Tensor)
        if self._single:
            data = (data,)
        if isinstance(data, Sequence):
            self._rows = tuple(data)
            self.n = number_of_rows(name, self._rows)
        elif callable(data):
            self._draw = data
        else:
            raise TypeError(
                f"{name} must be tensors with rows, or a function that draws a batch, got "
                f"{type(data).__name__}"
            )

    def draw(self, size: int, generator: torch.Generator | None) -> Any:
        """Return a batch of ``size`` rows, drawn with replacement."""
        if self._draw is not None:
            return self._draw(size, generator)
        assert self.n is not None
        return self.take(torch.randint(self.n, (size,), generator=generator))

    def take(self, rows: torch.Tensor) -> Any:
        """Return the batch of these rows."""
        device = self._rows[0].device
        batch = tuple(tensor[rows.to(device)] for tensor in self._rows)
        return batch[0] if self._single else batch

    def all(self) -> Any:
        """Return all rows as one batch.

        Raises
        ------
        ValueError
            If the data are a function, which has no end.
        """
        if self.n is None:
            raise ValueError(f"{self.name} must be tensors where all rows are needed")
        return self._rows[0] if self._single else self._rows


def number_of_rows(name: str, tensors: tuple[Any, ...]) -> int:
    """Return how many rows all tensors have, at least one.

    Raises
    ------
    TypeError, ValueError
        If there is no tensor, or something else, or they differ.
    """
    wrong = [type(t).__name__ for t in tensors if not isinstance(t, torch.Tensor)]
    if wrong or not tensors:
        raise TypeError(f"{name} must hold tensors, got {wrong[0] if wrong else 'none'}")
    lengths = {len(t) if t.ndim > 0 else 0 for t in tensors}
    if len(lengths) > 1 or 0 in lengths:
        raise ValueError(f"{name} must have one number of rows >= 1, got {sorted(lengths)}")
    return lengths.pop()
