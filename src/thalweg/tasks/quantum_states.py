"""Neural quantum states: networks whose output is the logarithm of a wave function."""

from __future__ import annotations

import math

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor, nn


def log_cosh(x: Tensor) -> Tensor:
    """Return log cosh x without overflow, for real or complex x."""
    # cosh is even: with Re x >= 0 the exponential is at most 1.
    x = torch.where(x.real < 0, -x, x) if x.is_complex() else x.abs()
    return x + torch.log1p(torch.exp(-2 * x)) - math.log(2)


class RBM(nn.Module):
    """A restricted Boltzmann machine: log ψ(σ) = a·σ + Σ_j log cosh(Σ_i W_ji σ_i + b_j).

    Parameters
    ----------
    n_sites, n_hidden : int
    dtype : dtype, default float64
        Of the parameters; complex ones make ψ complex, and holomorphic in them.
    scale : float, default 0.05
        Standard deviation of the parameters at the start.
    generator : torch.Generator, optional

    References
    ----------
    G. Carleo, M. Troyer, "Solving the quantum many-body problem with artificial neural networks",
    Science 2017.
    """

    def __init__(
        self,
        n_sites: int,
        n_hidden: int,
        *,
        dtype: torch.dtype = torch.float64,
        scale: float = 0.05,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(shape, dtype=dtype, generator=generator))

        self.visible_bias = normal(n_sites)
        self.hidden_bias = normal(n_hidden)
        self.weight = normal(n_hidden, n_sites)

    def forward(self, spins: Tensor) -> Tensor:
        """Return log ψ of configurations of shape (..., n_sites)."""
        spins = spins.to(self.weight.dtype)
        hidden = spins @ self.weight.mT + self.hidden_bias
        return spins @ self.visible_bias + log_cosh(hidden).sum(-1)


class FoundationRBM(nn.Module):
    r"""One network for a family of states: a translation-invariant RBM conditioned on a field h.

    .. math:: \log\psi(\sigma; h) = \sum_{f,x} \log\cosh \sum_y w_{fy}(h)\, \sigma_{x+y},
              \qquad w(h) = \sum_r T_r(t) W_r

    with Chebyshev polynomials T_r of the field, mapped linearly to t in [-1, 1]. There are no
    biases, so that ψ is even under a flip of all spins, as the ground states are.

    Parameters
    ----------
    n_sites, n_filters : int
    fields : (float, float)
        Lowest and highest h.
    degree : int, default 2
        Of the polynomials.
    dtype : dtype, default float64
    scale : float, default 0.02
        Standard deviation of the parameters at the start.
    generator : torch.Generator, optional

    References
    ----------
    R. Rende et al., "Foundation neural-networks quantum states as a unified ansatz for multiple
    Hamiltonians", Nature Communications 2025, from which the idea is, with a transformer.
    """

    def __init__(
        self,
        n_sites: int,
        n_filters: int,
        fields: tuple[float, float],
        *,
        degree: int = 2,
        dtype: torch.dtype = torch.float64,
        scale: float = 0.02,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        start = scale * torch.randn(
            degree + 1, n_filters, n_sites, dtype=dtype, generator=generator
        )
        self.weight = nn.Parameter(start)
        self.fields = fields

    def forward(self, spins: Tensor, field: Tensor) -> Tensor:
        """Return log ψ.

        Parameters
        ----------
        spins : Tensor of shape (N, ..., n_sites)
        field : Tensor of shape (N,)
            h of each sample.
        """
        low, high = self.fields
        t = (2 * (field - low) / (high - low) - 1).to(self.weight.dtype)
        polynomials = [torch.ones_like(t), t]
        while len(polynomials) < len(self.weight):
            polynomials.append(2 * t * polynomials[-1] - polynomials[-2])
        basis = torch.stack(polynomials[: len(self.weight)], dim=-1)
        filters = torch.einsum("nr,rfy->nfy", basis, self.weight)
        # A correlation with every translation is a product of Fourier transforms.
        spectrum = torch.fft.rfft(filters).conj()
        between = spins.ndim - 2
        spectrum = spectrum.reshape(len(spectrum), *(1,) * between, *spectrum.shape[1:])
        transformed = torch.fft.rfft(spins.to(self.weight.dtype))[..., None, :]
        hidden = torch.fft.irfft(transformed * spectrum, n=spins.shape[-1])
        return log_cosh(hidden).sum(dim=(-2, -1))
