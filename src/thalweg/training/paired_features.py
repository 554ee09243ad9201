"""Hidden features of a target and of its guide at the same inputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.training.guide_loss import Pair
from thalweg.training.layer_features import FeatureHooks, Pool, grid_of, pooled
from thalweg.training.representation_similarity import cka, effective_rank, is_constant, single
from thalweg.training.unlabeled_batches import UnlabeledBatches

Values = NDArray[np.float64]
LEAST_RANK = 3.0
KEPT_NUMBERS = 2**26  # of the guide's features: 256 MiB in float32


class PairedFeatures:
    """Features of both networks at the same inputs, under the names of the target's layers."""

    def __init__(
        self,
        target: nn.Module,
        guide: nn.Module,
        pairs: Sequence[Pair],
        pool: Pool,
        guide_dtype: torch.dtype | None,
        probe: Tensor,
    ) -> None:
        self._pairs = pairs
        self._pool = pool
        self._guide_dtype = guide_dtype
        self._target = FeatureHooks(target, [t for t, _ in pairs])
        self._guide = FeatureHooks(guide, list(dict.fromkeys(g for _, g in pairs)))
        with torch.no_grad():
            features = self._target(probe) if pool == "grid" else {}
        self._grids = {t: grid_of(t, feature) for t, feature in features.items()}

    def __enter__(self) -> PairedFeatures:
        return self

    def __exit__(self, *_: object) -> None:
        self._target.close()
        self._guide.close()

    def target(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the target's features, each of shape (b, f)."""
        features = self._target(inputs)
        return {t: pooled(t, features[t], self._pool, self._grids.get(t)) for t, _ in self._pairs}

    @torch.no_grad()
    def guide(self, inputs: Tensor) -> dict[str, Tensor]:
        """Return the guide's features, each of shape (b, g), without a graph."""
        features = self._guide(cast_inputs(inputs, self._guide_dtype))
        return {
            t: single(pooled(g, features[g], self._pool, self._grids.get(t)))
            for t, g in self._pairs
        }

    def stream(
        self, batches: UnlabeledBatches, steps: int, *, keep: bool
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yield ``steps`` batches and the guide's features, which are kept if they fit.

        The features of a guide that looks at the whole batch depend on it and cannot be kept.
        """
        pool = batches.pool
        if pool is not None and keep and len(pool) < steps * batches.batch_size:
            numbers = sum(f[0].numel() for f in self.guide(pool[:4]).values()) * len(pool)
            if numbers <= KEPT_NUMBERS:
                starts = range(0, len(pool), batches.batch_size)
                parts = [self.guide(pool[i : i + batches.batch_size]) for i in starts]
                kept = {t: torch.cat([part[t] for part in parts]) for t, _ in self._pairs}
                for _ in range(steps):
                    index = batches.draw_index()
                    yield pool[index], {t: rows[index] for t, rows in kept.items()}
                return
        for _ in range(steps):
            inputs = batches.draw()
            yield inputs, self.guide(inputs)

    @torch.no_grad()
    def cka(self, inputs: Tensor) -> Values:
        """Return the debiased CKA of each pair, of shape (J,).

        Raises
        ------
        ValueError
            If a layer's features are constant or not finite.
        """
        ours, theirs = self.target(inputs), self.guide(inputs)
        values = []
        for t, g in self._pairs:
            _check_features("target", t, ours[t], "it has died")
            _check_features("guide", g, theirs[t], "use gain-preserving init or an earlier layer")
            values.append(
                float(cka(single(ours[t]), theirs[t].to(single(ours[t]).dtype), debiased=True))
            )
        if not np.isfinite(values).all():
            raise ValueError(f"the CKA of a pair is not defined: {values}")
        return np.array(values)

    def guide_rank(self, inputs: Tensor) -> Values:
        """Return the effective rank of the guide's features, of shape (J,); warn if all are low."""
        theirs = self.guide(inputs)
        ranks = np.array([effective_rank(theirs[t]) for t, _ in self._pairs])
        if ranks.max() < LEAST_RANK:
            warnings.warn(
                f"the guide's features have effective ranks {ranks.round(2).tolist()}, all below "
                f"{LEAST_RANK:g}: they say little about which inputs are close",
                stacklevel=3,
            )
        return ranks


def _check_features(owner: str, layer: str, features: Tensor, advice: str) -> None:
    if not bool(features.isfinite().all()):
        raise ValueError(f"{owner} layer {layer} is not finite at init")
    if is_constant(single(features)):
        raise ValueError(f"{owner} layer {layer} is constant at init: {advice}")


def cast_inputs(inputs: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the inputs in the guide's dtype, if it has one of its own."""
    return inputs.to(dtype) if dtype is not None and inputs.is_floating_point() else inputs
