"""Checks of a batch of log-derivatives and local energies."""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.sample_folds import effective_sample_size
from thalweg.curvature.tangent_kernel import group_means


def check_batch(jac: Any, e_loc: Any, holomorphic: bool | None) -> tuple[Tensor, Tensor]:
    """Return O and the local energies as tensors of fitting shapes, finite and on one device."""
    jac, e_loc = as_tensor("O", jac), as_tensor("e_loc", e_loc)
    if jac.ndim != 2 or jac.shape[1] == 0:
        raise ValueError(f"O must have shape (N, P) with P >= 1, got {tuple(jac.shape)}")
    if e_loc.shape != jac.shape[:1]:
        raise ValueError(
            f"e_loc must have shape ({jac.shape[0]},), one per row of O, got {tuple(e_loc.shape)}"
        )
    if len(e_loc) < 2:
        raise ValueError(f"N must be >= 2, got {len(e_loc)} samples")
    if holomorphic not in (None, False, True):
        raise ValueError(f"holomorphic must be None, False or True, got {holomorphic!r}")
    if jac.is_complex() and holomorphic is None:
        raise ValueError(
            "O is complex: pass holomorphic=False for real parameters, whose real and imaginary "
            "parts are stacked, or holomorphic=True for complex ones"
        )
    if holomorphic and not jac.is_complex():
        raise ValueError(f"holomorphic=True needs a complex O, got {jac.dtype}")
    e_loc = e_loc.to(jac.device)
    if e_loc.is_complex() and not jac.is_complex():
        e_loc = e_loc.real  # no real δ reaches the imaginary part
    # A row's sum is not finite when an entry is not; the exact test follows for those rows only.
    suspects = torch.nonzero(~torch.isfinite(jac.sum(1))).flatten().tolist()
    for i in suspects:
        if not torch.isfinite(jac[i]).all():
            raise ValueError(f"O must be finite, got NaN or infinity for sample {i}")
    bad = torch.nonzero(~torch.isfinite(e_loc)).flatten().tolist()
    if bad:
        raise ValueError(
            f"e_loc must be finite, got {e_loc[bad[0]].item()} for sample {bad[0]}"
            + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
        )
    return jac, e_loc


def as_tensor(name: str, value: Any) -> Tensor:
    """Return a real or complex tensor; lists and integers become float64."""
    try:
        if not isinstance(value, Tensor):
            # torch would make float32 of a list, and warn of an array that is read-only.
            value = np.require(value, requirements="W")
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor or an array of numbers, got {type(value).__name__}"
        ) from error
    if not (tensor.is_floating_point() or tensor.is_complex()):
        tensor = tensor.to(torch.float64)
    return tensor


def check_shifts(name: str, value: Any, device: torch.device) -> Tensor:
    """Return shifts > 0 as a vector of float64."""
    shifts = as_tensor(name, value).to(device, torch.float64)
    if shifts.ndim != 1 or len(shifts) == 0:
        raise ValueError(f"{name} must have shape (K,) with K >= 1, got {tuple(shifts.shape)}")
    if not bool((torch.isfinite(shifts) & (shifts > 0)).all()):
        raise ValueError(f"{name} must be finite and > 0, got {shifts.tolist()}")
    return shifts


def check_weights(value: Any, shifts: Tensor | None) -> Tensor | None:
    """Return the weights of given shifts, with sum 1."""
    if value is None:
        return None
    if shifts is None:
        raise ValueError("weights go with an array of shifts; found shifts count equally")
    weights = as_tensor("weights", value).to(shifts)
    if weights.shape != shifts.shape:
        raise ValueError(
            f"weights must have shape {tuple(shifts.shape)}, got {tuple(weights.shape)}"
        )
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()) or float(weights.sum()) == 0:
        raise ValueError(f"weights must be finite, >= 0 and not all 0, got {weights.tolist()}")
    return weights / weights.sum()


def check_sample_weight(value: Any, n: int, device: torch.device) -> Tensor:
    """Return the weights of the samples as float64, uniform ones by default."""
    if value is None:
        return torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    weight = as_tensor("sample_weight", value).to(device, torch.float64)
    if weight.shape != (n,):
        raise ValueError(f"sample_weight must have shape ({n},), got {tuple(weight.shape)}")
    if not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        raise ValueError("sample_weight must be finite and >= 0")
    if abs(float(weight.sum()) - 1) > 1e-6:
        raise ValueError(f"sample_weight must sum to 1, got {float(weight.sum()):g}")
    return weight


def check_ids(name: str, value: Any, n: int, device: torch.device) -> Tensor | None:
    """Return ids as numbers 0, 1, ..."""
    if value is None:
        return None
    ids = torch.as_tensor(value).to(device)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {ids.dtype}")
    if ids.shape != (n,):
        raise ValueError(f"{name} must have shape ({n},), got {tuple(ids.shape)}")
    _, numbers = torch.unique(ids, return_inverse=True)
    return cast(Tensor, numbers)


def check_centered(name: str, x: Tensor, weight: Tensor, label: Tensor) -> None:
    """Refuse a batch that is said to have mean 0 and has not."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = group_means(wide, weight, label).abs()
    size = group_means(wide.abs(), weight, label)
    tolerance = 1e3 * torch.finfo(x.dtype).eps
    if bool((mean > tolerance * size).any()):
        raise ValueError(
            f"centered=True, but the means of {name} are not 0: the largest is "
            f"{float(mean.max()):.3g}"
        )


def warn_of_autocorrelation(e_loc: Tensor, chain: Tensor) -> None:
    """Warn if the chains hold fewer than a quarter of the samples' number."""
    effective = effective_sample_size(
        e_loc.to(torch.promote_types(e_loc.dtype, torch.float64)), chain
    )
    if effective < len(e_loc) / 4:
        warnings.warn(
            f"the effective sample size, {effective:.0f} of {len(e_loc)}, is below a quarter: "
            "the chains are strongly autocorrelated, or do not mix",
            UserWarning,
            stacklevel=3,
        )
