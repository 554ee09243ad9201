"""The distance between the geometries of two networks, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.training.representation_similarity import (
    cka,
    correlation_rsa,
    gaussian_cka,
    overlap,
    single,
)

Pair = tuple[str, str]
Similarity = Literal["cka", "rbf_cka", "rsa", "procrustes"]
# Each is 1 for representations that are alike.
SIMILARITIES: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "cka": lambda X, Y, debiased: cka(X, Y, debiased=debiased),
    "rbf_cka": lambda X, Y, debiased: gaussian_cka(X, Y, debiased=debiased),
    "rsa": lambda X, Y, debiased: correlation_rsa(X, Y),
    "procrustes": lambda X, Y, debiased: overlap(X, Y),
}


class GuideLoss(nn.Module):
    """The weighted mean of one minus the similarity, over pairs of layers.

    Parameters
    ----------
    pairs : sequence of (str, str)
        The target's and the guide's layer.
    similarity : {"cka", "rbf_cka", "rsa", "procrustes"}, default "cka"
        See `linear_cka`, `rbf_cka`, `rsa` and `procrustes_distance`, of which it is one minus half.
    weights : sequence of float, optional
        One per pair, all ≥ 0; by default 1 / J for J pairs.
    debiased : bool, default True
        As in `linear_cka`, for the first two.

    Raises
    ------
    ValueError
        For an argument that is not as described.

    Examples
    --------
    As a regularizer during training, of which `guide_init` is the special case that ends before:

    >>> import torch
    >>> from thalweg.training import GuideLoss
    >>> loss = GuideLoss([("hidden", "0")])
    >>> X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    >>> total, per_pair = loss({"hidden": X}, {"0": 2 * X})
    >>> abs(round(total.item(), 4)), tuple(per_pair.shape)
    (0.0, (1,))
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        similarity: Similarity = "cka",
        weights: Sequence[float] | None = None,
        debiased: bool = True,
    ) -> None:
        super().__init__()
        self.pairs = tuple(pairs)
        if not self.pairs:
            raise ValueError("pairs must hold at least one pair of layers")
        self.similarity = check_choice("similarity", similarity, SIMILARITIES)
        self.debiased = debiased
        self.weights = [1 / len(self.pairs)] * len(self.pairs)
        if weights is not None:
            self.weights = [check_number("weights", w, at_least=0) for w in weights]
        if len(self.weights) != len(self.pairs) or sum(self.weights) == 0:
            raise ValueError(
                f"weights must be one number >= 0 for each of {len(self.pairs)} pairs, not all 0, "
                f"got {weights}"
            )

    def forward(
        self, feats_t: Mapping[str, Tensor], feats_g: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, a scalar, and the similarity of each pair, of shape (J,).

        Parameters
        ----------
        feats_t, feats_g : mapping of str to Tensor of shape (b, ...)
            Outputs of the target's and the guide's layers; all but the batch is flattened.
        """
        measure = SIMILARITIES[self.similarity]
        per_pair = torch.stack(
            [
                measure(single(feats_t[t]).flatten(1), _like(feats_g[g], feats_t[t]), self.debiased)
                for t, g in self.pairs
            ]
        )
        weights = per_pair.new_tensor(self.weights)
        return weights @ (1 - per_pair), per_pair.detach()


def _like(guide: Tensor, target: Tensor) -> Tensor:
    return guide.flatten(1).to(single(target).dtype)
