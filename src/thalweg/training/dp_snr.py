"""How large the clipped signal and the noise are in every layer, as matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.training.private_gradient import DPGradient, Loss
from thalweg.training.sample_clipping import ClipScope, layer_threshold
from thalweg.training.spectral_rates import noise_norm
from thalweg.training.width_roles import Role, width_roles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SNRReport:
    """Spectra of signal and noise in L parameter tensors, from `dp_snr_report`.

    Attributes
    ----------
    names : tuple of str
    signal_norm : ndarray of shape (L,)
        ‖S‖₂, the spectral norm of the mean clipped gradient. **Not private.**
    noise_norm : ndarray of shape (L,)
        ‖τZ‖₂ of one draw of the noise.
    snr : ndarray of shape (L,)
        Their ratio. **Not private.**
    snr_public : ndarray of shape (L,)
        C_l / (τ(√m + √n)), from shapes and mechanism only. Per layer it is an upper bound of what
        is to be expected of ``snr``.
    signal_rank, noise_rank : ndarray of shape (L,)
        Stable ranks, ``‖·‖²_F / ‖·‖²₂``. That of the signal is **not private**.
    is_private : bool
        False: the report reads the data without noise. Use it for analysis only.
    """

    names: tuple[str, ...]
    signal_norm: Values
    noise_norm: Values
    snr: Values
    snr_public: Values
    signal_rank: Values
    noise_rank: Values
    is_private: bool = False

    def __str__(self) -> str:
        lines = ["signal norm  noise norm   snr  public  rank of signal  of noise  layer"]
        for i, name in enumerate(self.names):
            lines.append(
                f"{self.signal_norm[i]:11.4g} {self.noise_norm[i]:11.4g} {self.snr[i]:5.2f} "
                f"{self.snr_public[i]:7.2f} {self.signal_rank[i]:15.1f} {self.noise_rank[i]:9.1f}  "
                f"{name}"
            )
        return "\n".join([*lines, "Not private: for analysis only."])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot both norms of every layer."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        rows = np.arange(len(self.names))
        ax.plot(self.signal_norm, rows, "o", label="signal (not private)")
        ax.plot(self.noise_norm, rows, "x", label="noise")
        ax.set_yticks(rows, self.names)
        ax.set(xlabel="spectral norm", xscale="log")
        ax.legend()
        return ax


@torch.no_grad()
def dp_snr_report(
    model: nn.Module,
    loss_fn: Loss,
    x: Tensor,
    y: Tensor,
    *,
    noise_multiplier: float,
    batch_size: int,
    max_grad_norm: float = 1.0,
    clip_scope: ClipScope = "per_layer",
    microbatch: int | None = 256,
    generator: torch.Generator | None = None,
) -> SNRReport:
    r"""Measure signal and noise of private gradients, layer by layer.

    The signal S is the mean clipped gradient over ``x``; the noise is :math:`\tau Z` with
    :math:`\tau = \sigma C / B`. DP-μP rests on how they scale: ‖S‖₂ does not depend on the width,
    since gradients are clipped and their mean has low stable rank; ‖τZ‖₂ ≈ τ(√m + √n) grows.

    Parameters
    ----------
    model : torch.nn.Module
    loss_fn : callable
        ``loss_fn(outputs, targets)``, as for `DPGradient`.
    x, y : Tensor of shape (N, ...)
        The whole data set, or a large part of it.
    noise_multiplier : float ≥ 0
        σ.
    batch_size : int ≥ 1
        B, the expected size of a lot.
    max_grad_norm : float > 0, default 1
        C.
    clip_scope : {"per_layer", "flat"}, default "per_layer"
    microbatch : int ≥ 1, optional
        How many samples are worked on at a time.
    generator : torch.Generator, optional
        For the noise.

    Returns
    -------
    SNRReport
        It is computed from the data without noise, so it is **not private**.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Cost.* A pass over the data and two SVDs per matrix, 𝒪(mn min(m, n)).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import dp_snr_report
    >>> model = torch.nn.Linear(64, 64, bias=False)
    >>> x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    >>> report = dp_snr_report(
    ...     model, torch.nn.functional.mse_loss, x, x, noise_multiplier=1.0, batch_size=128,
    ...     generator=torch.Generator().manual_seed(1),
    ... )
    >>> bool(report.noise_rank[0] > 10), round(float(report.snr_public[0]), 1)
    (True, 8.0)
    """
    check_number("batch_size", batch_size, at_least=1)
    private = DPGradient(
        model,
        loss_fn,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        clip_scope=clip_scope,
        microbatch=microbatch,
        generator=generator,
    )
    if len(x) == 0:
        raise ValueError("x must hold samples, got none")
    layers = width_roles(model, roles=_untied(model))
    sums, _, _ = private.clipped_sums(x, y)
    signal = np.array([_spectrum(total / len(x)) for total in sums])
    noise = np.array([_spectrum(draw / batch_size) for draw in private.noise()])
    tau = noise_multiplier * max_grad_norm / batch_size
    expected = np.array([tau * noise_norm(q.fan_out, q.fan_in, q.is_matrix) for q in layers])
    with np.errstate(divide="ignore", invalid="ignore"):
        return SNRReport(
            names=tuple(private.params),
            signal_norm=signal[:, 0],
            noise_norm=noise[:, 0],
            snr=signal[:, 0] / noise[:, 0],
            snr_public=layer_threshold(max_grad_norm, len(layers)) / expected,
            signal_rank=signal[:, 1],
            noise_rank=noise[:, 1],
        )


def _untied(model: nn.Module) -> dict[str, Role]:
    """Return a role for tied weights: here, they are measured as the matrices that they are."""
    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    return {tied[0]: "fixed" for tied in names.values() if len(tied) > 1}


def _spectrum(gradient: Tensor) -> tuple[float, float]:
    """Return the spectral norm and the stable rank; (0, 0) of zero."""
    matrix = gradient.flatten(1) if gradient.ndim > 1 else gradient.reshape(-1, 1)
    values = torch.linalg.svdvals(matrix.double()).cpu()
    largest = float(values[0])
    return largest, float(values.square().sum()) / largest**2 if largest > 0 else 0.0
