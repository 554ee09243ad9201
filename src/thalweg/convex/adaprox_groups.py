"""Param groups of the torch optimizers with adaptive proximal steps: settings, S, and the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires
from thalweg.common.torch_gradients import value_of

with requires("convex"):
    import torch
    from torch import Tensor

from thalweg.convex.dense_gradients import (
    accept,
    dense_gradient,
    norms_of,
    squared_norm,
    sum_of_squares,
)
from thalweg.convex.proximal_adapters import as_proximal

# Entries of a piece, whose temporaries stay in a CPU's cache.
PIECE = 2**16


def add_group(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], add: Callable[[dict[str, Any]], None]
) -> None:
    """Add a param group by ``add``, if its settings are as they should be."""
    settings = optimizer.defaults | group
    as_proximal(settings["prox"])
    lr = settings["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must hold one number, got a tensor of shape {tuple(lr.shape)}")
    check_number("lr", float(lr) if isinstance(lr, Tensor) else lr, at_least=0)
    check_number("D", settings["D"], above=0)
    if settings["S0"] != "auto":
        check_number("S0", settings["S0"], above=0)
    for name in ("maximize", "check_finite"):
        check_choice(name, settings[name], (False, True))
    add(group)
    added = optimizer.param_groups[-1]
    if any(p.is_complex() for p in added["params"]):
        optimizer.param_groups.pop()
        raise TypeError("params must be real, got a complex parameter")


def gather(
    optimizer: Any, closure: Callable[[], Any] | None, n_lists: int
) -> tuple[Any, list[tuple[Any, ...]]]:
    """Return the loss, and the rows of the groups that are to move: none if a gradient is bad."""
    if any(group["averaged"] for group in optimizer.param_groups):
        raise RuntimeError("the parameters hold the average: call swap_to_query() before step()")
    loss = value_of(closure)
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    checked = [
        dense_gradient(optimizer, p)
        for group in optimizer.param_groups
        if group["check_finite"]
        for p in group["params"]
        if p.grad is not None
    ]
    if not held or (checked and not accept(optimizer, checked)):
        return loss, []
    rows = []
    for group in optimizer.param_groups:
        row: tuple[Any, ...] = (group, *([] for _ in range(n_lists)))
        optimizer._init_group(*row)
        if row[1]:
            rows.append(row)
    return loss, rows


def hold(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    params: list[Tensor],
    grads: list[Tensor],
    scalars: list[Tensor],
    counter: str,
) -> list[Tensor]:
    """Append the parameters that have a gradient, S² and a counter of the group; begin with S₀².

    Nothing is appended while the group rests, with ``lr=0`` from the beginning, as checkpointers
    have it to initialize the state.
    """
    held = [p for p in group["params"] if p.grad is not None]
    if not held:
        return []
    gradients = [dense_gradient(optimizer, p) for p in held]
    if "S2" not in group:
        if float(group["lr"]) == 0:
            return []
        S0 = _initial_scale(group, held, gradients)
        wide = torch.float32 if held[0].device.type == "mps" else torch.float64
        # One dimension: a compiled graph loses what it adds to a float64 input without any.
        group["S2"] = torch.full((1,), S0**2, dtype=wide, device=held[0].device)
        group[counter] = torch.zeros_like(group["S2"])
    for name in ("S2", counter):
        group[name] = group[name].to(held[0].device)
    params.extend(held)
    grads.extend(gradients)
    scalars.extend([group["S2"], group[counter]])
    return held


def _initial_scale(group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> float:
    """Return S₀: the norm of the mapping with the step that moves the group by about D."""
    sign = -1.0 if group["maximize"] else 1.0
    size = float(squared_norm(grads)) ** 0.5
    alpha = group["D"] / (size or 1.0)
    prox = as_proximal(group["prox"]).prox
    moves = []
    for p, grad in zip(params, grads, strict=True):
        moved = prox(p - sign * alpha * grad, torch.tensor(alpha, dtype=p.dtype, device=p.device))
        if not isinstance(moved, Tensor) or moved.shape != p.shape or moved.dtype != p.dtype:
            given = (
                f"{moved.dtype} of shape {tuple(moved.shape)}"
                if isinstance(moved, Tensor)
                else type(moved).__name__
            )
            raise ValueError(
                f"prox(v, alpha) must be a tensor like v, {p.dtype} of shape {tuple(p.shape)}, "
                f"got {given}"
            )
        moves.append(p - moved)
    if group["S0"] != "auto":
        return float(group["S0"])
    return float(squared_norm(moves)) ** 0.5 / alpha or size or 1.0


def descend(
    group: dict[str, Any],
    S2: Tensor,
    alpha: Tensor,
    points: list[Tensor],
    grads: list[Tensor],
    a: Any = 1.0,
) -> None:
    """Update v ← prox(v - αg, α) and S² ← S² (1 + ‖Δ‖²/(ηD)²), where α = ηaD/S."""
    signed = alpha if group["maximize"] else -alpha
    if group["prox"] is None:
        # Then Δ = αg, and S² + a²‖g‖² is the same.
        squared = squared_norm(grads)
        for point, grad in zip(points, grads, strict=True):
            point.addcmul_(grad, signed)
        S2.add_(squared * a**2)
        return
    prox = as_proximal(group["prox"]).prox
    norms: list[Tensor] = []
    for point, grad in zip(points, grads, strict=True):
        # A number is cheaper than a tensor where it costs no wait for a device.
        on_cpu = point.device.type == "cpu" and not torch.compiler.is_compiling()
        step: Any = float(alpha) if on_cpu else alpha.to(point.dtype)
        along: Any = float(signed) if on_cpu else signed
        for v, g in _pieces(group["prox"], point, grad):
            ahead = torch.add(v, g, alpha=along) if on_cpu else torch.addcmul(v, g, along)
            moved = prox(ahead, step)
            v.sub_(moved)
            norms.extend(norms_of(v))
            v.copy_(moved)
    squared = sum_of_squares(norms)
    reach = (group["lr"] * group["D"]) ** 2
    if isinstance(reach, Tensor) or reach > 0:
        S2.addcmul_(S2, squared / _not_zero(reach))


def _not_zero(reach: Any) -> Any:
    """Return ``reach``, which is 0 while a tensor lr is: nothing moves then."""
    return reach.double().clamp(min=1e-300) if isinstance(reach, Tensor) else reach


def _pieces(prox: Any, point: Tensor, grad: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Split tensors on a CPU whose entries the prox treats alike, each for itself."""
    whole_only = (
        not getattr(prox, "elementwise", False)
        or torch.compiler.is_compiling()
        or point.device.type != "cpu"
        or point.numel() <= PIECE
        or not (point.is_contiguous() and grad.is_contiguous())
        or hasattr(point, "full_tensor")
    )
    if whole_only:
        return [(point, grad)]
    return list(zip(point.view(-1).split(PIECE), grad.view(-1).split(PIECE), strict=True))  # type: ignore[no-untyped-call]


def corner(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> Tensor:
    """Return a point of the optimizer's state; a new one is where the parameter is."""
    state = optimizer.state[p]
    if name not in state:
        state[name] = p.detach().clone(memory_format=torch.preserve_format)
    point: Tensor = state[name]
    return point


def without_prox(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without the groups' prox, which is code and no state."""
    groups = [
        {name: value for name, value in group.items() if name != "prox"}
        for group in state_dict["param_groups"]
    ]
    return state_dict | {"param_groups": groups}


def restore_prox(optimizer: torch.optim.Optimizer, proxes: list[Any]) -> None:
    """Give the groups their prox back."""
    for group, prox in zip(optimizer.param_groups, proxes, strict=True):
        group["prox"] = prox
