"""Multi-shift stochastic reconfiguration: an average of ridge solves with shifts from the batch."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from thalweg.common.checks import check_choice, check_integer
from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.batch_checks import (
    check_batch,
    check_centered,
    check_ids,
    check_sample_weight,
    check_shifts,
    check_weights,
    warn_of_autocorrelation,
)
from thalweg.curvature.distinct_samples import distinct_kernel
from thalweg.curvature.filtered_solves import (
    MODES,
    Mode,
    SolveSettings,
    cross_fitted,
    fixed_filter,
    gcv_filter,
)
from thalweg.curvature.sample_folds import split_samples
from thalweg.curvature.tangent_kernel import combine_rows, group_means

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SAMPLES_PER_SOLVE = 8
EIGENSTATE = 1e-12


@dataclass(frozen=True, eq=False)
class MSSRResult:
    """What `ms_sr_direction` found.

    Attributes
    ----------
    delta : Tensor of shape (P,)
        The direction δ; the update is θ ← θ - lr δ.
    shifts : Tensor of shape (n_solves,)
        λ of each solve, in units of OᴴO/N.
    weights : Tensor of shape (n_solves,)
        What each solve counts; they sum to 1.
    status : {"ok", "eigenstate"}
        "eigenstate" if the local energy does not vary: δ is 0.
    grid : Tensor of shape (n_grid,), or None
        The shifts that were compared.
    risk_curve : Tensor of shape (n_grid,), or None
        Their cross-fitted risk, the mean over the solves; with ``shifts="gcv"`` their scores.
    variance_curve : Tensor of shape (n_grid,), or None
        Estimated variance E‖δ_λ - Eδ_λ‖² of one solve: that between shards, or the jackknife's.
    effective_dimension : float
        Σ s/(s + λ), the mean over the solves.
    alignment : float
        Cosine of Oδ and e - ē on held-out samples; NaN where none are held out.
    tangent_norm : float
        ‖Aδ‖, the root mean square change of log ψ on the batch.
    n_distinct : int
        Samples that differ in log-derivatives or local energy.
    """

    delta: Tensor
    shifts: Tensor
    weights: Tensor
    status: Literal["ok", "eigenstate"] = "ok"
    grid: Tensor | None = None
    risk_curve: Tensor | None = None
    variance_curve: Tensor | None = None
    effective_dimension: float = 0.0
    alignment: float = math.nan
    tangent_norm: float = 0.0
    n_distinct: int = 0

    def filter(self, s: ArrayLike | Tensor) -> Tensor:
        """Return the mean filter Σ wₖ/(s + λₖ) at eigenvalues ``s`` ≥ 0 of the tangent kernel."""
        s = torch.as_tensor(s, dtype=torch.float64, device=self.shifts.device)
        return (self.weights / (s[..., None] + self.shifts)).sum(-1)

    def plot(self, ax: Any = None) -> Any:
        """Draw risk and variance over the shift, and the shifts that were chosen.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new one without it.

        Returns
        -------
        The Axes.

        Raises
        ------
        ValueError
            If no shifts were compared.
        """
        if self.grid is None or self.risk_curve is None:
            raise ValueError('there is no risk curve: shifts must be "auto" or "gcv"')
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots(layout="constrained")[1] if ax is None else ax
        ax.loglog(self.grid.cpu(), self.risk_curve.cpu(), label="risk")
        if self.variance_curve is not None:
            ax.loglog(self.grid.cpu(), self.variance_curve.cpu(), label="variance of δ")
        for shift in self.shifts.tolist():
            ax.axvline(shift, color="0.6", linewidth=0.8)
        ax.set(xlabel="shift λ")
        ax.legend()
        return ax


def ms_sr_direction(
    O: Tensor | ArrayLike,  # noqa: E741 - the field's letter
    e_loc: Tensor | ArrayLike,
    *,
    n_solves: int = 5,
    mode: Mode = "kfold",
    shifts: Literal["auto", "gcv"] | ArrayLike | Tensor = "auto",
    weights: ArrayLike | Tensor | None = None,
    sample_weight: ArrayLike | Tensor | None = None,
    grid: ArrayLike | Tensor | None = None,
    generator: torch.Generator | None = None,
    holomorphic: bool | None = None,
    centered: bool = False,
    chain_id: ArrayLike | Tensor | None = None,
    system_id: ArrayLike | Tensor | None = None,
) -> MSSRResult:
    r"""Return the direction of multi-shift stochastic reconfiguration (MS-SR) for one batch.

    At a fixed wave function, stochastic reconfiguration is ridge regression of the centered local
    energy on tangent features. With :math:`A = (O - \bar O)/\sqrt N`,
    :math:`y = (e - \bar e)/\sqrt N` and the kernel :math:`K = AA^H`,

    .. math:: \delta_\lambda = \arg\min_\delta \|y - A\delta\|^2 + \lambda \|\delta\|^2
              = A^H (K + \lambda I)^{-1} y.

    The part of y that no δ explains, the expressivity gap, is noise in a batch, and the shift λ
    filters it. MS-SR averages several solves, each with the shift that predicts best the local
    energies of samples which it has not seen.

    Parameters
    ----------
    O : Tensor or array of shape (N, P), real or complex
        Log-derivatives ∂ log ψ(σᵢ)/∂θ, not centered. float32 is recommended for large P.
    e_loc : Tensor or array of shape (N,), real or complex
        Local energies. The imaginary part counts only where O is complex.
    n_solves : int ≥ 1, default 5
        M. With 1 the shift minimizes generalized cross-validation.
    mode : {"kfold", "shards", "shared"}, default "kfold"
        "kfold": solve k fits all samples outside fold k, and its shift minimizes the squared
        residual on fold k; δ is the mean of the solves. "shards": solve k fits only shard k of
        the batch, judged on all the others; cheaper, and the solves are independent, but each sees
        N/M samples: take M = 2. "shared": the shifts of "shards", divided by M as the full batch
        needs less, in the filter ``φ(s) = (1/M) Σ 1/(s + λₖ/M)`` on the full batch.
    shifts : "auto", "gcv" or array of shape (K,), default "auto"
        "gcv": one shift for the full batch, by generalized cross-validation. An array: the filter
        ``φ(s) = Σ wₖ/(s + λₖ)`` on the full batch; [λ] is plain SR. Units: those of OᴴO/N.
    weights : array of shape (K,), optional
        wₖ ≥ 0 for an array of shifts, normalized to sum 1; uniform without it.
    sample_weight : array of shape (N,), optional
        Weights ≥ 0 of the samples, with sum 1; uniform without it.
    grid : array of shape (n_grid,), optional
        The shifts to compare; by default 25 from 1e-8 (1e-6 for a float32 O) to 10 times the
        largest eigenvalue of K.
    generator : torch.Generator, optional
        Splits the batch.
    holomorphic : bool, optional
        Needed for a complex O. False: the parameters are real; real and imaginary parts are
        stacked, and δ is real. True: ψ is holomorphic in complex parameters, and δ is complex.
    centered : bool, default False
        Say that O and e_loc have mean 0 already; saves one pass, and is checked.
    chain_id : array of int of shape (N,), optional
        The Markov chain of each sample; a chain's samples stand in the order of time. Chains are
        not split between folds, and strong autocorrelation is warned of.
    system_id : array of int of shape (N,), optional
        For a family of wave functions (one network conditioned on a field): which member each
        sample was drawn from. Members are centered separately.

    Returns
    -------
    MSSRResult

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; for fewer than 8 samples per solve; and for NaN or
        infinity in O or e_loc (the message names the sample).

    Warns
    -----
    UserWarning
        If the effective sample size of the chains is below N/4, or if so few samples are distinct
        that the batch is split into fewer folds.

    Notes
    -----
    *Cost.* The Gram matrix, N²P, dominates; its lower triangle is computed in the precision of O,
    chunk by chunk of columns, and summed in float64, without a copy of O. Eigendecompositions take
    M N³ ("kfold") or N³/M² ("shards"); each further shift N². Memory: NP for O and 4 N² numbers.

    *Ours.* The paper averages "independent ridge solves at data-adaptive shifts". Shifts by
    cross-fitting, on folds by default, are our reading: halving the batch, as two shards do, is
    expensive when N ≈ P and the gap is small. The mean of the solves is uniform. Equal samples are
    merged, with their weights, before the batch is split, or a fold would know what it is judged
    on. Generalized cross-validation leaves out the directions of the means.

    References
    ----------
    "Multi-shift stochastic reconfiguration", NeurIPS 2026.
    S. Sorella, "Green function Monte Carlo with stochastic reconfiguration", Phys. Rev. Lett. 1998.
    A. Chen, M. Heyl, "Empowering deep neural quantum states through efficient optimization", Nature
    Physics 2024 (the kernel form, minSR).
    G. Golub, M. Heath, G. Wahba, "Generalized cross-validation as a method for choosing a good
    ridge parameter", Technometrics 1979.

    Examples
    --------
    Local energies that 200 tangent features explain up to noise, of 64 samples:

    >>> import torch
    >>> from thalweg.curvature import ms_sr_direction
    >>> generator = torch.Generator().manual_seed(1)
    >>> O = torch.randn(64, 200, generator=generator, dtype=torch.float64)
    >>> O *= torch.arange(1, 201) ** -0.5
    >>> truth = torch.zeros(200, dtype=torch.float64)
    >>> truth[:5] = 1.0
    >>> e_loc = O @ truth + torch.randn(64, generator=generator)
    >>> def error(delta):  # of a new sample's prediction
    ...     return float(((delta - truth) * torch.arange(1, 201) ** -0.5).norm())
    >>> found = ms_sr_direction(O, e_loc, generator=generator)
    >>> customary = ms_sr_direction(O, e_loc, shifts=[1e-3])
    >>> error(found.delta) < 0.7 * error(customary.delta)
    True
    """
    jac, e_loc = check_batch(O, e_loc, holomorphic)
    n, device = len(e_loc), jac.device
    check_integer("n_solves", n_solves, at_least=1)
    check_choice("mode", mode, MODES)
    check_choice("centered", centered, (False, True))
    fixed = None
    if isinstance(shifts, str):
        check_choice("shifts", shifts, ("auto", "gcv"))
    else:
        fixed = check_shifts("shifts", shifts, device)
    cross_fits = fixed is None and shifts == "auto" and n_solves > 1
    if cross_fits and n < SAMPLES_PER_SOLVE * n_solves:
        raise ValueError(
            f"N must be >= {SAMPLES_PER_SOLVE} n_solves = {SAMPLES_PER_SOLVE * n_solves}, "
            f"got {n} samples"
        )
    share = check_weights(weights, fixed)
    weight = check_sample_weight(sample_weight, n, device)
    chain = check_ids("chain_id", chain_id, n, device)
    system = check_ids("system_id", system_id, n, device)
    label = torch.zeros(n, dtype=torch.int64, device=device) if system is None else system
    if centered:
        check_centered("O", jac, weight, label)
        check_centered("e_loc", e_loc, weight, label)
    if chain is not None:
        warn_of_autocorrelation(e_loc, chain)
    settings = SolveSettings(
        mode, jac.dtype, None if grid is None else check_shifts("grid", grid, device)
    )

    energy = e_loc.to(torch.promote_types(e_loc.dtype, torch.float64))
    energy = energy - group_means(energy, weight, label)[label]
    if float(energy.abs().max()) <= EIGENSTATE * float(e_loc.abs().max()):
        none = torch.zeros(0, dtype=torch.float64, device=device)
        parts = 2 if jac.is_complex() and not holomorphic else 1
        zero = combine_rows(jac, torch.zeros(parts * n, device=device), parts)
        return MSSRResult(zero, none, none, "eigenstate")

    kernel, kept = distinct_kernel(jac, energy, weight, label, holomorphic, centered=centered)
    folds = []
    if cross_fits:
        of_kept = [None if ids is None else ids[kept] for ids in (chain, system)]
        folds = _folds(len(kept), n_solves, generator, *of_kept)
    if fixed is not None:
        coefficients, found = fixed_filter(kernel, fixed, share, settings)
    elif folds:
        coefficients, found = cross_fitted(kernel, [f.to(device) for f in folds], settings)
    else:
        coefficients, found = gcv_filter(kernel, settings)
    beta = kernel.gram.new_zeros(kernel.parts * n)
    beta[torch.cat([kept + part * n for part in range(kernel.parts)])] = coefficients
    return MSSRResult(
        delta=combine_rows(jac, beta, kernel.parts),
        tangent_norm=float(kernel.centered().center(kernel.gram @ coefficients).norm()),
        n_distinct=kernel.n_samples,
        **found,
    )


def _folds(
    n_distinct: int,
    n_solves: int,
    generator: torch.Generator | None,
    chain: Tensor | None,
    system: Tensor | None,
) -> list[Tensor]:
    """Return the split of the distinct samples; nothing if they are too few for any."""
    n_chains = n_distinct if chain is None else len(torch.bincount(chain).nonzero())
    n_folds = min(n_solves, n_distinct // 2, n_chains)
    if n_folds < n_solves:
        warnings.warn(
            f"{n_distinct} distinct samples"
            + ("" if chain is None else f" of {n_chains} chains")
            + f" do not fill {n_solves} folds; the batch is split into {max(n_folds, 1)}",
            UserWarning,
            stacklevel=3,
        )
    if n_folds < 2:
        return []
    return split_samples(n_distinct, n_folds, generator, chain, system)
