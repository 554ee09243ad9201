"""The tangent kernel of a batch, with equal samples merged."""

from __future__ import annotations

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.shift_filters import resolution
from thalweg.curvature.tangent_kernel import TangentKernel, gram_matrix

# One sample's log-derivatives come out differently in different places of a batch.
EQUAL = 100
MOST_ROUNDING = 0.02
ROWS_AT_ONCE = 64


def distinct_kernel(
    jac: Tensor,
    energy: Tensor,
    weight: Tensor,
    label: Tensor,
    holomorphic: bool | None,
    *,
    centered: bool,
) -> tuple[TangentKernel, Tensor]:
    """Return the kernel of the distinct samples, and which they are."""
    n = len(energy)
    parts = 2 if jac.is_complex() and not holomorphic else 1
    gram = gram_matrix(jac, weight, label, parts, center=not centered)
    if jac.is_complex():
        energy = energy.to(torch.complex128)
    per_sample = gram if parts == 1 else gram[:n, :n] + gram[n:, n:]
    first = first_equal(jac, per_sample, energy, label)
    merged = torch.zeros_like(weight).index_add(0, first, weight)
    kept = torch.nonzero(merged > 0).flatten()
    rows = torch.cat([kept + part * n for part in range(parts)])
    n_labels = int(label.max()) + 1
    kernel = TangentKernel(
        gram=gram[rows[:, None], rows] if len(kept) < n else gram,
        energy=energy[kept] if parts == 1 else torch.cat([energy[kept].real, energy[kept].imag]),
        weight=merged[kept].repeat(parts),
        label=torch.cat([label[kept] + part * n_labels for part in range(parts)]),
        parts=parts,
    )
    return kernel, kept


def first_equal(jac: Tensor, gram: Tensor, energy: Tensor, label: Tensor) -> Tensor:
    """Return for each sample the first one that equals it, up to rounding.

    Samples are equal if their log-derivatives, local energies and labels are: to the regression
    they are then the same, even if they are different configurations.

    Parameters
    ----------
    jac : Tensor of shape (N, P)
    gram : Tensor of shape (N, N)
        Inner products of the centered log-derivatives; they say which rows may be equal.
    energy : Tensor of shape (N,)
    label : Tensor of shape (N,)
    """
    norms = gram.diagonal().real
    sums = norms[:, None] + norms
    close = sums - 2 * gram.real <= 10 * resolution(jac.dtype) * sums
    rounding = min(EQUAL * torch.finfo(jac.dtype).eps, MOST_ROUNDING)
    close &= (energy[:, None] - energy).abs() <= rounding * energy.abs().max()
    close &= label[:, None] == label
    close.fill_diagonal_(True)
    # argmax returns the first of several ones.
    first: Tensor = close.to(torch.uint8).argmax(dim=1)
    candidates = torch.nonzero(first != torch.arange(len(first), device=first.device)).flatten()
    for some in torch.split(candidates, ROWS_AT_ONCE):
        rows = jac[some]
        apart = (rows - jac[first[some]]).abs().amax(dim=1)
        equal = apart <= rounding * rows.abs().amax(dim=1)
        first[some[~equal]] = some[~equal]
    return first
