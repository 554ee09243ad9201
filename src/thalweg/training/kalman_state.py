"""State of the Kalman filters of `KoalaPP` and `Koala`: scalars of all tensors at once; files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.kalman_measurement import Variance
from thalweg.training.state_dtypes import restore_dtypes
from thalweg.training.tensor_blocks import scalar_dtype

R_START = 1.0
CALLABLE = "callable"  # stands for a callable r in a state_dict


def start_filter(state: dict[str, Any], p: Tensor, names: Sequence[str], **values: float) -> None:
    """Put the scalars of a filter of ``p`` that starts into its state: R, ``values``, and zeros."""
    for name in names:
        value = values.get(name, R_START if name == "R" else 0.0)
        state[name] = torch.tensor(value, dtype=scalar_dtype(p.device)).to(p.device)


def columns(scalars: Sequence[Tensor], n_names: int) -> tuple[Tensor, ...]:
    """Return the scalars, listed tensor by tensor, as vectors over the tensors."""
    home = scalars[0].device
    listed = [scalar.to(home) for scalar in scalars]
    return torch.stack(listed).view(-1, n_names).unbind(1)


def leading(columns: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the scalars of a filter over several tensors, (1,) each: of one with most steps.

    All agree, except for tensors whose first gradient came later.
    """
    lead = columns[0].argmax().reshape(1)
    return tuple(column.index_select(0, lead) for column in columns)


def store(
    scalars: Sequence[Tensor], moved: Tensor, new: Sequence[Tensor], old: Sequence[Tensor]
) -> None:
    """Write vectors over the tensors, or over their one filter, to the scalars of each tensor.

    They are the new ones where a filter has moved, and the old ones elsewhere.
    """
    n = len(scalars) // len(new)
    table = torch.where(moved, _table(new, n), _table(old, n))
    torch._foreach_copy_(list(scalars), list(table.T.reshape(-1).unbind()))


def _table(columns: Sequence[Tensor], n: int) -> Tensor:
    return torch.stack([column.expand(n) for column in columns])


def without_callables(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Replace callable ``r``, which files cannot hold, by a mark."""
    for group in state_dict["param_groups"]:
        if callable(group["r"]):
            group["r"] = CALLABLE
    return state_dict


def restore(optimizer: torch.optim.Optimizer, saved: dict[str, Any], own_r: list[Variance]) -> None:
    """Mend what ``load_state_dict`` made of callables and of float64 scalars.

    Raises
    ------
    ValueError
        If the saved optimizer had a callable ``r`` and this one has none.
    """
    for group, r in zip(optimizer.param_groups, own_r, strict=True):
        if group["r"] == CALLABLE:
            if not callable(r):
                raise ValueError("the state was saved with a callable r: construct with one")
            group["r"] = r
    restore_dtypes(optimizer, saved)
