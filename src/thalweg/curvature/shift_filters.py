"""Ridge regression of local energies on tangent features: spectra, filters and shifts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.tangent_kernel import CenteredRows, TangentKernel

GRID_POINTS = 25
GRID_TOP = 10.0


def resolution(dtype: torch.dtype) -> float:
    """Return below which fraction of the largest the Gram matrix's eigenvalues are rounding."""
    eps = torch.finfo(dtype).eps
    return 1e-8 if eps < 1e-12 else 1e-6 if eps < 1e-5 else 1e-3


def rank_cut(dtype: torch.dtype) -> float:
    """Return up to which fraction of the largest an eigenvalue counts as zero."""
    return 1e-13 if torch.finfo(dtype).eps < 1e-12 else resolution(dtype) / 100


def shift_grid(largest: Tensor, lowest: float) -> Tensor:
    """Return 25 shifts, logarithmic from ``lowest`` to 10 times the largest eigenvalue."""
    start, stop = math.log10(lowest), math.log10(GRID_TOP)
    powers = torch.linspace(start, stop, GRID_POINTS, dtype=torch.float64, device=largest.device)
    return largest * 10**powers


@dataclass(frozen=True, eq=False)
class RidgeSpectrum:
    """Eigenpairs of the kernel K = AAᴴ of some samples, and the local energies among them.

    Parameters
    ----------
    part : CenteredRows
        The r rows that are fitted.
    values : Tensor of shape (J,)
        Eigenvalues s > 0.
    vectors : Tensor of shape (r, J)
        Eigenvectors u.
    energy : Tensor of shape (J,)
        c = Uᴴy.
    unexplained : Tensor
        ‖y - Uc‖², out of reach of the tangent features.
    """

    part: CenteredRows
    values: Tensor
    vectors: Tensor
    energy: Tensor
    unexplained: Tensor

    def dual(self, shifts: Tensor) -> Tensor:
        """Return (K + λI)⁻¹y, in the range of K, for each shift, shape (r, n_shifts)."""
        return self.vectors @ (self.energy[:, None] / (self.values[:, None] + shifts))

    def filtered(self, response: Tensor) -> Tensor:
        """Return U φ(s) c for a filter's values at the eigenvalues, shape (r,)."""
        return self.vectors @ (response * self.energy)

    def effective_dimension(self, shift: Tensor) -> float:
        """Return Σ s/(s + λ)."""
        return float((self.values / (self.values + shift)).sum())


def ridge_spectrum(kernel: TangentKernel, part: CenteredRows, cut: float) -> RidgeSpectrum:
    """Decompose the kernel of a part; eigenvalues ≤ ``cut`` times the largest count as zero.

    The null vectors that centering makes are among those.
    """
    y = kernel.energies(part)
    values, vectors = torch.linalg.eigh(kernel.between(part, part))
    kept = values > max(cut * float(values[-1]), 0.0)
    values, vectors = values[kept], vectors[:, kept]
    c = vectors.mH @ y
    return RidgeSpectrum(part, values, vectors, c, (y - vectors @ c).abs().square().sum())


def gcv_scores(spectrum: RidgeSpectrum, shifts: Tensor) -> Tensor:
    """Return the generalized cross-validation score of each shift, shape (n_shifts,).

    The mean squared residual over the squared mean of r = λ/(s + λ), both over the modes that
    centering has left: the directions of the means have no residual whatever the shift, and
    would let interpolation win.
    """
    r = shifts / (spectrum.values[:, None] + shifts)
    n_modes = len(spectrum.part.rows) - spectrum.part.means.shape[1]
    residual = spectrum.unexplained + (r * spectrum.energy[:, None]).abs().square().sum(0)
    free = r.sum(0) + (n_modes - len(spectrum.values))
    return (residual / n_modes) / (free / n_modes) ** 2


@dataclass(frozen=True, eq=False)
class CrossFit:
    """A ridge solve on some samples, judged on others.

    Parameters
    ----------
    spectrum : RidgeSpectrum
        Of the samples that are fitted.
    risk : Tensor of shape (n_shifts,)
        Mean squared residual on the samples left out, which are centered on their own mean.
    prediction, target : Tensor of shape (rows, n_shifts) and (rows,)
        Aδ and y of the samples left out.
    """

    spectrum: RidgeSpectrum
    risk: Tensor
    prediction: Tensor
    target: Tensor


def cross_fit(
    kernel: TangentKernel,
    spectrum: RidgeSpectrum,
    left_out: Sequence[CenteredRows],
    shifts: Tensor,
) -> CrossFit:
    """Judge a solve at each shift on the parts left out: y_j - A_j A_kᴴ(K_k + λI)⁻¹y_k."""
    dual = spectrum.dual(shifts)
    prediction = torch.cat([kernel.between(part, spectrum.part) @ dual for part in left_out])
    target = torch.cat([kernel.energies(part) for part in left_out])
    risk = (target[:, None] - prediction).abs().square().sum(0) / len(left_out)
    return CrossFit(spectrum, risk, prediction, target)
