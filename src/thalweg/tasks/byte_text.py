"""English text that every Python installation ships, as bytes to model."""

from __future__ import annotations

from functools import lru_cache
from pydoc_data import topics
from typing import NamedTuple

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

VALIDATION_SHARE = 0.1
N_BYTES = 256


class ByteText(NamedTuple):
    """Texts as int64 tensors of bytes 0 … 255 (UTF-8), of shape (n,)."""

    train: Tensor
    validation: Tensor


@lru_cache
def load_text() -> ByteText:
    """Return the topics of Python's language reference, what ``help("LAMBDA")`` prints.

    About 450 kB; the words differ a little between versions of Python. The last tenth of the
    topics' text, in alphabetical order, is for validation. The tensors are shared within the
    process; do not write into them.

    Examples
    --------
    >>> text = load_text()
    >>> bytes(text.train[:13].tolist()).decode()
    'The "assert" '
    >>> len(text.train) > 8 * len(text.validation) > 300_000
    True
    """
    reference = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokens = torch.frombuffer(bytearray(reference.encode()), dtype=torch.uint8).long()
    n_validation = round(VALIDATION_SHARE * len(tokens))
    return ByteText(tokens[:-n_validation], tokens[-n_validation:])


def sample_windows(
    tokens: Tensor, batch: int, context: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random windows and the same windows one byte later, both (batch, context).

    Windows are drawn independently, with replacement.
    """
    check_integer("batch", batch, at_least=1)
    check_integer("context", context, at_least=1, at_most=len(tokens) - 1)
    starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
    windows = tokens[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]
