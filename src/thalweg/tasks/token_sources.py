"""Four sources of tokens, of which some are of no use for arithmetic."""

from __future__ import annotations

import numpy as np

from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

SOURCES = ("sums", "wrong sums", "copied letters", "random characters")
VOCABULARY = "0123456789+=;abcdefgh"
LENGTH = 24


def source_rows(source: str, n: int, rng: np.random.Generator) -> torch.Tensor:
    """Return n rows of 24 tokens of a source.

    "sums" are strings like ``7+5=12;`` one after the other; "wrong sums" have random results;
    "copied letters" repeat a few letters; "random characters" are uniform.

    Raises
    ------
    ValueError
        For another source.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    if source == "random characters":
        return torch.tensor(rng.integers(len(VOCABULARY), size=(n, LENGTH)))
    if source == "copied letters":
        motif = rng.integers(13, len(VOCABULARY), size=(n, 4))
        return torch.tensor(np.tile(motif, (1, LENGTH // 4)))
    rows = []
    for _ in range(n):
        text = ""
        while len(text) < LENGTH:
            a, b = rng.integers(10, size=2)
            result = a + b if source == "sums" else rng.integers(19)
            text += f"{a}+{b}={result};"
        rows.append([VOCABULARY.index(character) for character in text[:LENGTH]])
    return torch.tensor(rows)
