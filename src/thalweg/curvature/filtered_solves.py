"""The three ways to a direction: given shifts, generalized cross-validation, and cross-fitting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.sample_folds import without
from thalweg.curvature.shift_filters import (
    CrossFit,
    RidgeSpectrum,
    cross_fit,
    gcv_scores,
    rank_cut,
    resolution,
    ridge_spectrum,
    shift_grid,
)
from thalweg.curvature.tangent_kernel import TangentKernel

Mode = Literal["kfold", "shards", "shared"]
MODES: tuple[Mode, ...] = ("kfold", "shards", "shared")


@dataclass(frozen=True, eq=False)
class SolveSettings:
    """What the solves of a batch share.

    Parameters
    ----------
    mode : {"kfold", "shards", "shared"}
    dtype : dtype
        Of the log-derivatives.
    grid : Tensor of shape (n_grid,), or None
        The shifts to compare.
    """

    mode: Mode
    dtype: torch.dtype
    grid: Tensor | None

    @property
    def cut(self) -> float:
        """The fraction of the largest eigenvalue up to which one counts as zero."""
        return rank_cut(self.dtype)


# Coefficients β of the rows, with δ = Xᴴβ, and what else the result says.
Solved = tuple[Tensor, dict[str, Any]]


def fixed_filter(
    kernel: TangentKernel, shifts: Tensor, weights: Tensor | None, settings: SolveSettings
) -> Solved:
    """Filter the full batch by φ(s) = Σ wₖ/(s + λₖ)."""
    spectrum = ridge_spectrum(kernel, kernel.centered(), settings.cut)
    if weights is None:
        weights = torch.full_like(shifts, 1 / len(shifts))
    return _filtered(spectrum, shifts, weights)


def gcv_filter(kernel: TangentKernel, settings: SolveSettings) -> Solved:
    """Solve the full batch at the shift of least generalized cross-validation."""
    spectrum = ridge_spectrum(kernel, kernel.centered(), settings.cut)
    grid = _grid([spectrum], settings)
    scores = gcv_scores(spectrum, grid)
    best = grid[scores.argmin()][None]
    coefficients, found = _filtered(spectrum, best, torch.ones_like(best))
    return coefficients, found | {"grid": grid, "risk_curve": scores}


def _filtered(spectrum: RidgeSpectrum, shifts: Tensor, weights: Tensor) -> Solved:
    response = (weights / (spectrum.values[:, None] + shifts)).sum(1)
    return spectrum.part.spread(spectrum.filtered(response)), {
        "shifts": shifts,
        "weights": weights,
        "effective_dimension": _mean_dimension([spectrum] * len(shifts), shifts),
    }


def cross_fitted(kernel: TangentKernel, folds: list[Tensor], settings: SolveSettings) -> Solved:
    """Average one solve per fold, each at the shift that is best for what it has not seen."""
    n_solves = len(folds)
    parts = [kernel.centered(fold) for fold in folds]
    rests = [parts[:k] + parts[k + 1 :] for k in range(n_solves)]
    fitted, left_out = parts, rests
    if settings.mode == "kfold":
        fitted = [kernel.centered(without(folds, k)) for k in range(n_solves)]
        left_out = [[part] for part in parts]
    spectra = [ridge_spectrum(kernel, part, settings.cut) for part in fitted]
    grid = _grid(spectra, settings)
    fits = [
        cross_fit(kernel, spectrum, others, grid)
        for spectrum, others in zip(spectra, left_out, strict=True)
    ]
    best = torch.stack([fit.risk.argmin() for fit in fits])
    if settings.mode == "shared":
        # What N/M samples need is too much for all of them.
        coefficients, found = fixed_filter(kernel, grid[best] / n_solves, None, settings)
    else:
        coefficients = kernel.gram.new_zeros(len(kernel.energy))
        for spectrum, shift in zip(spectra, grid[best], strict=True):
            dual = spectrum.dual(shift[None])[:, 0]
            coefficients[spectrum.part.rows] += spectrum.part.spread(dual) / n_solves
        found = {
            "shifts": grid[best],
            "weights": torch.full_like(grid[best], 1 / n_solves),
            "effective_dimension": _mean_dimension(spectra, grid[best]),
        }
    found |= {
        "grid": grid,
        "risk_curve": torch.stack([fit.risk for fit in fits]).mean(0),
        "variance_curve": _variance(kernel, spectra, grid, overlap=settings.mode == "kfold"),
        "alignment": _alignment(fits, best),
    }
    return coefficients, found


def _grid(spectra: Sequence[RidgeSpectrum], settings: SolveSettings) -> Tensor:
    if settings.grid is not None:
        return settings.grid
    largest = torch.stack([s.values[-1] if len(s.values) else s.unexplained for s in spectra]).max()
    return shift_grid(largest, resolution(settings.dtype))


def _mean_dimension(spectra: Sequence[RidgeSpectrum], shifts: Tensor) -> float:
    each = [s.effective_dimension(shift) for s, shift in zip(spectra, shifts, strict=True)]
    return sum(each) / len(each)


def _variance(
    kernel: TangentKernel, spectra: Sequence[RidgeSpectrum], grid: Tensor, *, overlap: bool
) -> Tensor:
    """Return the variance of δ_λ between solves, or the jackknife's where their samples overlap.

    In coefficients β of the rows, ‖δ‖² = βᴴGβ.
    """
    n_solves = len(spectra)
    beta = kernel.gram.new_zeros(n_solves, len(kernel.energy), len(grid))
    for k, spectrum in enumerate(spectra):
        beta[k, spectrum.part.rows] = spectrum.part.spread(spectrum.dual(grid))
    apart = beta - beta.mean(0)
    squares = (apart.conj() * (kernel.gram @ apart)).real.sum(dim=(0, 1)).clamp(min=0)
    return squares * ((n_solves - 1) / n_solves if overlap else 1 / (n_solves - 1))


def _alignment(fits: Sequence[CrossFit], best: Tensor) -> float:
    prediction = torch.cat([fit.prediction[:, k] for fit, k in zip(fits, best, strict=True)])
    target = torch.cat([fit.target for fit in fits])
    size = float(prediction.norm() * target.norm())
    return float(torch.vdot(prediction, target).real) / size if size > 0 else math.nan
