"""The filters of KOALA++: their recursion from inner products, and what moves the tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.kalman_measurement import innovation, with_penalty
from thalweg.training.kalman_state import columns, leading, store
from thalweg.training.tensor_blocks import dot, inner_products, launches_with_factors, local


class Filter(NamedTuple):
    """What filters remember besides u and H: vectors over the filters, or over the tensors.

    With scope="group" the tensors of a filter keep the same step, R, S and resets, and the shares
    that they have in its inner products.
    """

    step: Tensor
    R: Tensor
    S: Tensor
    HH: Tensor  # ‖H‖²
    Hu: Tensor  # H · u
    resets: Tensor


class Row(NamedTuple):
    """A param group and parallel lists of what its tensors have."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    us: list[Tensor]
    Hs: list[Tensor]
    scalars: list[Tensor]  # the entries of `Filter`, tensor by tensor


def of_tensors(row: Row) -> Filter:
    """Return what the filters remember with each tensor."""
    return Filter(*columns(row.scalars, len(Filter._fields)))


def inner_products_of(row: Row) -> Tensor:
    """Return ‖H'‖², H'·H, H'·u and, with a weight decay, ‖θ‖²; H' is the new gradient.

    Returns
    -------
    Tensor of shape (tensors, 3 or 4)
    """
    decay = row.group["weight_decay"]

    def products(grad: Tensor, u: Tensor, H: Tensor, *param: Tensor) -> list[Tensor]:
        (grad,) = with_penalty(decay, list(param), [grad])
        found = [dot(grad, grad), dot(grad, H), dot(grad, u)]
        return found + [dot(p, p) for p in param]

    return inner_products(products, row.grads, row.us, row.Hs, *([row.params] if decay else []))


def pooled(group: dict[str, Any], each: Filter) -> Filter:
    """Return the filters: one per tensor, or one of the group."""
    if group["scope"] == "tensor":
        return each
    return Filter(*leading(each))._replace(HH=each.HH.sum(0, True), Hu=each.Hu.sum(0, True))


def turn(row: Row, each: Filter, products: Tensor, R: Tensor, loss: Tensor) -> Tensor:
    """Turn the filters to the new gradient H', and return what moves the tensors.

    Everything is a vector over the filters, or over the tensors. Quotients of inner products are
    formed before their products, for ‖H‖⁴ may be too small for a float.

    Parameters
    ----------
    row : Row
    each : Filter
        From `of_tensors`.
    products : Tensor of shape (tensors, 3 or 4)
        From `inner_products_of`.
    R : Tensor of shape (filters,)
    loss : 0-dim Tensor

    Returns
    -------
    Tensor of shape (5, filters)
        a, b, c, -gain and whether to keep H', for `update`.
    """
    group = row.group
    sigma, q = group["sigma"], group["q"]
    old = pooled(group, each)
    total = products if group["scope"] == "tensor" else products.sum(0, True)
    gg, gH, gu = total[:, 0], total[:, 1], total[:, 2]

    alpha = gH / old.HH
    lam = gu / old.S
    # The same with u = v + qH in place of v: the terms with q cancel.
    rho = gu / old.HH - alpha * (old.Hu / old.HH) if group["symmetric"] else 0.0
    # v' = (α - λ) v + q (H' - λ H) + ρ H, with v = u - qH and v' = u' - qH'.
    a, b, c = alpha - lam, torch.full_like(alpha, 2 * q), rho - q * alpha
    S = a * gu + b * gg + c * gH + R

    fresh = old.step == 0
    lost = ~fresh & ~((S > R / 2) & S.isfinite())
    anew = fresh | lost
    b_restart = sigma + q  # v' = σH'
    b_first = b_restart * (R / (b_restart * gg + R)) + q  # v' = (1 - λ) (σ + q) H'
    b_fresh = b_first if group["first"] == "reference" else torch.full_like(gg, b_restart)
    zero, one = torch.zeros_like(gg), torch.ones_like(gg)
    start = torch.stack([zero, torch.where(lost, b_restart, b_fresh), zero])
    a, b, c = torch.where(anew, start, torch.stack([a, b, c])).unbind()

    gg, gH, gu = products[:, 0], products[:, 1], products[:, 2]
    Hu = torch.where(anew, b * gg, a * gu + b * gg + c * gH)  # H'·u'; gu may be lost
    S = (Hu if group["scope"] == "tensor" else Hu.sum(0, True)) + R
    squared_params = total[:, 3] if group["weight_decay"] else zero
    gain = group["lr"] * innovation(group, loss, squared_params) / S

    moved = total[:, 0].sqrt() >= group["eps"]
    turned = Filter(old.step + 1, R, S, gg, Hu, old.resets + lost)
    store(row.scalars, moved, turned, each._replace(R=R))
    moves = torch.stack([a, b, c, -gain, one])
    return torch.where(moved, moves, torch.stack([one, zero, zero, zero, zero]))


def update(row: Row, moves: Tensor) -> None:
    """Update all tensors: u ← a u + b H' + c H;  θ ← θ - gain u;  H ← H', if it has moved.

    At rest b = 0, so that H', which then is not kept, need not be known.
    """
    decay = row.group["weight_decay"]
    lists = (row.params, row.grads, row.us, row.Hs)
    factors = torch.cat([moves, decay * moves[-1:]])
    for (params, grads, us, Hs), of_tensors in launches_with_factors(lists, factors):
        a, b, c, minus_gain, moved, decayed = of_tensors
        torch._foreach_mul_(us, a)
        torch._foreach_addcmul_(us, Hs, c)
        _replace(Hs, grads, moved)
        if decay != 0:
            torch._foreach_addcmul_(Hs, params, decayed)
        torch._foreach_addcmul_(us, Hs, b)
        torch._foreach_addcmul_(params, us, minus_gain)


def _replace(Hs: list[Tensor], grads: list[Tensor], moved: list[Tensor]) -> None:
    """H ← g where moved is 1, and not where it is 0."""
    if not torch.compiler.is_compiling():
        torch._foreach_lerp_(Hs, grads, moved)  # exact at both ends
        return
    # torch.compile does not vectorize lerp, which triples the time of the whole update.
    for H, grad, has_moved in zip(Hs, grads, moved, strict=True):
        H.copy_(torch.where(has_moved > 0, grad, H))


def clear_overflow(row: Row, each: Filter) -> Filter:
    """Clear entries of u that have overflowed, and have the filters restarted, by their S."""
    for u in row.us:
        local(u).nan_to_num_(0.0, 0.0, 0.0)
    return each._replace(S=torch.full_like(each.S, torch.nan))
