"""How the risk of stochastic reconfiguration depends on its shift, at a fixed wave function."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.batch_checks import check_batch, check_sample_weight, check_shifts
from thalweg.curvature.distinct_samples import distinct_kernel
from thalweg.curvature.filtered_solves import Mode
from thalweg.curvature.multi_shift import ms_sr_direction
from thalweg.curvature.shift_filters import rank_cut, resolution, ridge_spectrum, shift_grid
from thalweg.curvature.tangent_kernel import stacked

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

RANK_CUT = 1e-10


@dataclass(frozen=True, eq=False)
class ShiftRiskReport:
    """What `shift_risk_report` measured.

    The risk of a direction δ is ``R(δ) = E|e - ē - (O - Ō)δ|²`` over ``|ψ|²``. Over batches its
    mean is exactly gap + bias + variance: the gap is what no δ can explain, the bias is what the
    shift takes away from useful directions, and the variance is what the batch adds.

    Attributes
    ----------
    grid : Tensor of shape (n_grid,)
        The shifts λ.
    risk : Tensor of shape (n_batches, n_grid)
        Of SR at each shift on each batch.
    variance : Tensor of shape (n_grid,)
        E‖A(δ_λ - Eδ_λ)‖² over batches, unbiased.
    bias : Tensor of shape (n_grid,)
        ‖A(Eδ_λ - δ_pop)‖², unbiased, so that it may be slightly negative; NaN without ``p``.
    gap : float
        min R, the expressivity gap; NaN without ``p``.
    energy_variance : float
        R(0), the variance of the local energy.
    multi_shift_risk : Tensor of shape (n_batches,)
        Of MS-SR on the same batches.
    batch_size : int
    """

    grid: Tensor
    risk: Tensor
    variance: Tensor
    bias: Tensor
    gap: float
    energy_variance: float
    multi_shift_risk: Tensor
    batch_size: int

    @property
    def mean_risk(self) -> Tensor:
        """Mean risk at each shift, shape (n_grid,)."""
        return self.risk.mean(0)

    @property
    def best_shift(self) -> float:
        """The shift of least mean risk, which is known in hindsight only."""
        return float(self.grid[self.mean_risk.argmin()])

    def plot(self, ax: Any = None) -> Any:
        """Draw risk, bias and variance over the shift.

        Parameters
        ----------
        ax : matplotlib Axes, optional
            Where to draw; a new one without it.

        Returns
        -------
        The Axes.
        """
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots(layout="constrained")[1] if ax is None else ax
        grid = self.grid.cpu()
        ax.loglog(grid, self.mean_risk.cpu(), color="C0", label="risk of SR")
        ax.loglog(grid, self.variance.cpu(), color="C1", label="variance")
        if math.isfinite(self.gap):
            ax.loglog(grid, self.bias.clamp(min=1e-16).cpu(), color="C2", label="bias")
            ax.axhline(max(self.gap, 1e-16), color="0.6", linestyle=":", label="gap")
        ax.axhline(float(self.multi_shift_risk.mean()), color="C3", label="risk of MS-SR")
        ax.set(xlabel="shift λ", ylim=(float(self.mean_risk.min()) / 30, None))
        ax.legend()
        return ax


def shift_risk_report(
    O: Tensor | ArrayLike,  # noqa: E741 - the field's letter
    e_loc: Tensor | ArrayLike,
    p: Tensor | ArrayLike | None = None,
    grid: Tensor | ArrayLike | None = None,
    n_batches: int = 20,
    *,
    batch_size: int | None = None,
    n_solves: int = 5,
    mode: Mode = "kfold",
    holomorphic: bool | None = None,
    generator: torch.Generator | None = None,
) -> ShiftRiskReport:
    """Measure the risk of SR against its shift on many batches of a fixed wave function.

    Parameters
    ----------
    O : Tensor or array of shape (N, P), real or complex
        Log-derivatives: of all configurations if ``p`` is given, else of a large pool of samples.
    e_loc : Tensor or array of shape (N,)
        Local energies.
    p : Tensor or array of shape (N,), optional
        Probabilities ``|ψ|²`` of the configurations, with sum 1. Batches are then drawn from them,
        and risks are exact. Without it a batch is a part of the pool, and its risk is that on the
        rest.
    grid : Tensor or array of shape (n_grid,), optional
        Shifts to compare; by default 25 from 1e-8 (1e-6 for a float32 O) to 10 times the largest
        eigenvalue of the first batch's kernel.
    n_batches : int ≥ 2, default 20
    batch_size : int, optional
        Samples per batch; by default N/4, or a quarter of P if that is less, at least 8 M.
    n_solves, mode, holomorphic, generator
        As in `ms_sr_direction`; the generator draws the batches, too.

    Returns
    -------
    ShiftRiskReport

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Cost.* Per batch that of one `ms_sr_direction` and N P products per shift; once, with ``p``, a
    singular value decomposition of the N × P matrix.

    Examples
    --------
    An Ising ring of eight spins, all of whose 256 configurations are enumerated:

    >>> import torch
    >>> from thalweg.curvature import log_derivatives, shift_risk_report
    >>> from thalweg.tasks import RBM, enumerate_exactly, ising_chain
    >>> generator = torch.Generator().manual_seed(0)
    >>> psi, ring = RBM(8, 24, scale=0.1, generator=generator), ising_chain(8)
    >>> spins = torch.as_tensor(ring.states()).double()
    >>> exact = enumerate_exactly(ring.matrix(), psi(spins).detach(), spins)
    >>> report = shift_risk_report(
    ...     log_derivatives(psi, spins), exact.local_energy, exact.probability,
    ...     batch_size=64, n_batches=10, generator=generator,
    ... )
    >>> bool(report.variance[0] > report.variance[-1])  # a larger shift, less variance
    True
    >>> parts = report.gap + report.bias + report.variance
    >>> torch.allclose(report.mean_risk, parts, rtol=1e-6)
    True
    """
    jac, energy = check_batch(O, e_loc, holomorphic)
    n, device = len(energy), jac.device
    check_integer("n_batches", n_batches, at_least=2)
    exact = p is not None
    weight = check_sample_weight(p, n, device)
    if batch_size is None:
        batch_size = max(8 * n_solves, min(n // 4, jac.shape[1] // 4))
    check_integer("batch_size", batch_size, at_least=2, at_most=None if exact else n - 2)
    shifts = None if grid is None else check_shifts("grid", grid, device)
    parts = 2 if jac.is_complex() and not holomorphic else 1
    label = torch.zeros(n, dtype=torch.int64, device=device)
    wide = jac.to(torch.promote_types(jac.dtype, torch.float64))
    wide_energy = energy.to(torch.promote_types(energy.dtype, torch.float64))
    A, y = _centered(wide, wide_energy, weight, parts)
    cut = rank_cut(jac.dtype)

    risks, multi, squares = [], [], []
    total: Tensor | None = None
    for _ in range(n_batches):
        batch, rest = _draw(weight, batch_size, generator, exact=exact)
        uniform = torch.full((batch_size,), 1 / batch_size, dtype=torch.float64, device=device)
        kernel, kept = distinct_kernel(
            jac[batch], wide_energy[batch], uniform, label[batch], holomorphic, centered=False
        )
        spectrum = ridge_spectrum(kernel, kernel.centered(), cut)
        if shifts is None:
            largest = spectrum.values[-1] if len(spectrum.values) else torch.ones((), device=device)
            shifts = shift_grid(largest, resolution(jac.dtype))
        beta = spectrum.part.spread(spectrum.dual(shifts))
        deltas = stacked(wide[batch[kept]], parts).mH @ beta
        direction = ms_sr_direction(
            jac[batch],
            energy[batch],
            n_solves=n_solves,
            mode=mode,
            holomorphic=holomorphic,
            generator=generator,
        ).delta.to(deltas)
        if rest is None:
            A_judge, y_judge = A, y
        else:
            share = torch.full((len(rest),), 1 / len(rest), dtype=torch.float64, device=device)
            A_judge, y_judge = _centered(wide[rest], wide_energy[rest], share, parts)
        risks.append((y_judge[:, None] - A_judge @ deltas).abs().square().sum(0))
        multi.append((y_judge - A_judge @ direction).abs().square().sum())
        change = A @ deltas
        squares.append(change.abs().square().sum(0))
        total = change if total is None else total + change
    assert shifts is not None
    assert total is not None
    mean = total / n_batches
    scatter = torch.stack(squares).sum(0) - n_batches * mean.abs().square().sum(0)
    variance = scatter / (n_batches - 1)
    gap, bias = math.nan, torch.full_like(variance, math.nan)
    if exact:
        reachable = _projection(A, y)
        gap = float((y - reachable).abs().square().sum())
        bias = (mean - reachable[:, None]).abs().square().sum(0) - variance / n_batches
    return ShiftRiskReport(
        grid=shifts,
        risk=torch.stack(risks),
        variance=variance.clamp(min=0),
        bias=bias,
        gap=gap,
        energy_variance=float(y.abs().square().sum()),
        multi_shift_risk=torch.stack(multi),
        batch_size=batch_size,
    )


def _draw(
    weight: Tensor, batch_size: int, generator: torch.Generator | None, *, exact: bool
) -> tuple[Tensor, Tensor | None]:
    """Return a batch, and with a pool the samples that are not in it."""
    if exact:
        drawn = torch.multinomial(weight.cpu(), batch_size, replacement=True, generator=generator)
        return drawn.to(weight.device), None
    order = torch.randperm(len(weight), generator=generator).to(weight.device)
    return order[:batch_size], order[batch_size:]


def _centered(jac: Tensor, energy: Tensor, weight: Tensor, parts: int) -> tuple[Tensor, Tensor]:
    """Return A and y of a whole population, with weights that sum to 1."""
    root = weight.sqrt()
    A = root[:, None] * (jac - weight.to(jac.dtype) @ jac)
    y = root * (energy - (weight * energy).sum())
    if parts == 2:
        return stacked(A, 2), stacked(y.to(A.dtype), 2)
    return A, y.to(A.dtype)


def _projection(A: Tensor, y: Tensor) -> Tensor:
    """Return the part of y that some δ explains."""
    U, s, _ = torch.linalg.svd(A, full_matrices=False)
    U = U[:, s > RANK_CUT * s[0]]
    reachable: Tensor = U @ (U.mH @ y)
    return reachable
