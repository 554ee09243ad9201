"""The optimizer that param groups of `dp_mup_param_groups` are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.common.optional import requires

with requires("training"):
    import torch

from thalweg.training.dp_adam import DPAdam
from thalweg.training.dp_muon import DPMuonOptimizer
from thalweg.training.spectral_rates import OptimizerName


def private_optimizer(
    name: OptimizerName,
    groups: list[dict[str, Any]],
    options: Mapping[str, Any] | None = None,
    *,
    debias_v: bool = False,
) -> torch.optim.Optimizer:
    """Return SGD, Adam (`DPAdam` with ``debias_v``) or DP-Muon over groups with own lrs."""
    options = dict(options or {})
    if name == "sgd":
        return torch.optim.SGD(groups, lr=groups[0]["lr"], **options)
    if name == "muon":
        return DPMuonOptimizer(groups, **options)
    return DPAdam(groups, **options) if debias_v else torch.optim.Adam(groups, **options)
