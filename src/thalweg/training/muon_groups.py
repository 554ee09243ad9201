"""Which parameters of a model are hidden matrices, and which are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    from torch import nn


def muon_param_groups(
    model: nn.Module, *, exclude: Sequence[str] = ("embed", "lm_head", "wte", "wpe")
) -> list[dict[str, Any]]:
    """Split a model's parameters into hidden matrices, for Muon, and the rest.

    Parameters
    ----------
    model : torch.nn.Module
    exclude : sequence of str
        Parts of names, as ``model.named_parameters()`` has them: parameters whose name contains
        one are left to the fallback. Name the model's output layer here. Weights of
        `torch.nn.Embedding`, and whatever is tied to one, are left to it anyway.

    Returns
    -------
    list of two dicts
        ``{"params": [...], "use_muon": True}`` with the tensors of two or more dimensions, and
        ``{"params": [...], "use_muon": False}``.

    Raises
    ------
    TypeError
        If ``model`` is no module, or ``exclude`` is a string.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import muon_param_groups
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 10)
    ... )
    >>> hidden, rest = muon_param_groups(model, exclude=["2."])
    >>> [tuple(p.shape) for p in hidden["params"]], [tuple(p.shape) for p in rest["params"]]
    ([(4, 4)], [(10, 4), (4,), (10, 4), (10,)])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(exclude, str):
        raise TypeError(f"exclude must be a sequence of strings, got {exclude!r}")
    excluded = {
        parameter
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        for parameter in module.parameters(recurse=False)
    }
    # A tied weight has several names.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim < 2 or any(part in name for part in exclude):
            excluded.add(parameter)
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p not in excluded], "use_muon": True},
        {"params": [p for p in parameters if p in excluded], "use_muon": False},
    ]
