"""Trees of parameters as vectors: what solvers see of a tensor, a dict of tensors, a state dict."""

from __future__ import annotations

from typing import Any

from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    from torch.utils import _pytree as pytree


class TreeLayout:
    """How a tree of tensors lies in one vector.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    tree : Tensor, or dicts, lists and tuples of them
        All of one floating-point dtype and on one device, and finite.

    Raises
    ------
    TypeError, ValueError
        If the tree is not as described.
    """

    def __init__(self, name: str, tree: Any) -> None:
        leaves, self._spec = pytree.tree_flatten(tree)
        self.name = name
        _check_leaves(name, leaves)
        self._shapes = [leaf.shape for leaf in leaves]
        self._sizes = [leaf.numel() for leaf in leaves]
        self.size = sum(self._sizes)
        if self.size == 0:
            raise ValueError(f"{name} must have at least one entry")

    def vector(self, tree: Any) -> torch.Tensor:
        """Return a tree of this layout as a vector of shape (d,).

        Raises
        ------
        ValueError
            If the tree has another structure or other shapes.
        """
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self._spec or [torch.as_tensor(leaf).shape for leaf in leaves] != self._shapes:
            got = [tuple(torch.as_tensor(leaf).shape) for leaf in leaves]
            wanted = [tuple(shape) for shape in self._shapes]
            raise ValueError(f"a tree of shapes {wanted} as {self.name} is needed, got {got}")
        return torch.cat([leaf.reshape(-1) for leaf in leaves])

    def tree(self, vector: torch.Tensor) -> Any:
        """Return a vector as a tree of views into it."""
        parts = torch.split(vector, self._sizes)
        shaped = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        return pytree.tree_unflatten(shaped, self._spec)


def _check_leaves(name: str, leaves: list[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"{name} must hold tensors only, got {type(leaf).__name__}")
        if not leaf.is_floating_point():
            raise TypeError(f"{name} must hold floating-point tensors, got {leaf.dtype}")
        if not bool(torch.isfinite(leaf).all()):
            raise ValueError(f"{name} must be finite, got NaN or infinity")
    kinds = {(leaf.dtype, leaf.device) for leaf in leaves}
    if len(kinds) > 1:
        raise ValueError(f"{name} must have one dtype and device, got {sorted(map(str, kinds))}")
