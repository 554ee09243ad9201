"""Reweighting of many rows with a network: patches of photographs, some of them mislabeled."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    from sklearn.datasets import load_sample_images
    from sklearn.metrics import roc_auc_score

Array = NDArray[np.float64]
SIDE, UNITS = 6, 32
RIDGE = 1e-3


@dataclass(frozen=True, eq=False)
class NoisyImages:
    """Patches of two photographs of scikit-learn, to be told apart, three labels in ten wrong.

    Parameters
    ----------
    inner_data : tuple of Tensor
        Pixels of shape (n, 108), given labels and row numbers.
    outer_data : tuple of Tensor
        Pixels and right labels of 1,000 patches.
    wrong : ndarray of shape (n,)
        Whether the given label is wrong.
    """

    inner_data: tuple[torch.Tensor, ...]
    outer_data: tuple[torch.Tensor, ...]
    wrong: NDArray[np.bool_]

    def start(self, generator: torch.Generator) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return equal weights of one half, and a random network of 32 hidden units."""
        width = self.inner_data[0].shape[1]
        first = torch.randn(UNITS, width, generator=generator) / width**0.5
        last = torch.randn(UNITS, generator=generator) / UNITS**0.5
        network = {
            "first": first,
            "bias": torch.zeros(UNITS),
            "last": last,
            "offset": torch.zeros(()),
        }
        return torch.zeros(len(self.wrong)), network

    def losses(self, y: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """Return the logistic losses of a batch."""
        hidden = torch.tanh(batch[0] @ y["first"].T + y["bias"])
        score = hidden @ y["last"] + y["offset"]
        return torch.nn.functional.binary_cross_entropy_with_logits(
            score, batch[1], reduction="none"
        )

    def f(self, x: torch.Tensor, y: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """Return the upper loss: the mean over rows with right labels."""
        return self.losses(y, batch).mean()

    def g(self, x: torch.Tensor, y: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
        """Return the lower loss: the weighted mean, and a ridge."""
        weighted = (x[batch[2]].sigmoid() * self.losses(y, batch)).mean()
        return weighted + RIDGE * sum(part.square().sum() for part in y.values())

    def area(self, weights: Array) -> float:
        """Return the area under the curve of weights as a test for right labels."""
        return float(roc_auc_score(~self.wrong, weights))


@lru_cache(maxsize=2)
def noisy_images(seed: int, rows: int = 50_000) -> NoisyImages:
    """Return patches of 6 by 6 pixels of the pictures of a temple and of a flower."""
    rng = np.random.default_rng(seed)
    pictures = [picture / 255.0 - 0.5 for picture in load_sample_images().images]
    right = rng.integers(2, size=rows + 1000)
    top = rng.integers(pictures[0].shape[0] - SIDE, size=len(right))
    left = rng.integers(pictures[0].shape[1] - SIDE, size=len(right))
    pixels = np.stack(
        [
            pictures[label][i : i + SIDE, j : j + SIDE].reshape(-1)
            for label, i, j in zip(right, top, left, strict=True)
        ]
    )
    A = torch.tensor(2 * pixels, dtype=torch.float32)
    wrong = rng.random(rows) < 0.3
    given = np.where(wrong, 1 - right[:rows], right[:rows])
    labels = torch.tensor(given, dtype=torch.float32)
    good = torch.tensor(right[rows:], dtype=torch.float32)
    return NoisyImages((A[:rows], labels, torch.arange(rows)), (A[rows:], good), wrong)
