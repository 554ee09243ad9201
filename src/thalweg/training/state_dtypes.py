"""State in another dtype than its parameter, which torch's ``load_state_dict`` would cast."""

from __future__ import annotations

import itertools
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor


def restore_dtypes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Put back what ``load_state_dict`` cast to the dtype of the parameter, such as float32 sums.

    Tensors that it took over as they were are copied, so that both optimizers own theirs.
    """
    groups = state_dict["param_groups"]
    ids = itertools.chain.from_iterable(group["params"] for group in groups)
    params = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for index, p in zip(ids, params, strict=True):
        for name, saved in state_dict["state"].get(index, {}).items():
            loaded = optimizer.state[p][name]
            if isinstance(saved, Tensor) and (loaded.dtype != saved.dtype or loaded is saved):
                optimizer.state[p][name] = saved.to(p.device, copy=True)
