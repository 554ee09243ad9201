"""Quantum spin systems: Hamiltonians, exact ground states, local energies and Metropolis chains."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.linalg import eigsh

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

LogPsi = Callable[[Tensor], Tensor]
CHUNK_STATES = 2**15


@dataclass(frozen=True, eq=False)
class SpinHamiltonian:
    """H = Σ c_b s_i s_j, plus terms that flip the spins of a mask; a spin is s = ±1.

    Parameters
    ----------
    n_sites : int
        L.
    pairs : ndarray of shape (B, 2)
        Sites of the diagonal terms.
    couplings : ndarray of shape (B,)
        c_b.
    masks : ndarray of shape (K, L), bool
        Which spins each term flips: one, or two.
    amplitudes : ndarray of shape (K,)
        Matrix elements. A term of two spins acts only where they are antiparallel.
    """

    n_sites: int
    pairs: NDArray[np.int64]
    couplings: NDArray[np.float64]
    masks: NDArray[np.bool_]
    amplitudes: NDArray[np.float64]

    @property
    def exchanges(self) -> bool:
        """Whether the terms exchange antiparallel spins, which keeps the magnetization."""
        return bool(self.masks[0].sum() == 2)

    def diagonal(self, spins: Tensor) -> Tensor:
        """Return the diagonal matrix elements of configurations of shape (..., L)."""
        i, j = torch.as_tensor(self.pairs.T)
        return (spins[..., i] * spins[..., j]) @ torch.as_tensor(self.couplings).to(spins.dtype)

    def connected(self, spins: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the terms lead to, shape (N, K, L), and the matrix elements, (N, K)."""
        signs = torch.as_tensor(1.0 - 2.0 * self.masks, dtype=spins.dtype)
        amplitudes = torch.as_tensor(self.amplitudes, dtype=spins.dtype).expand(len(spins), -1)
        if self.exchanges:
            i, j = torch.as_tensor(self.masks.nonzero()[1].reshape(-1, 2).T)
            amplitudes = amplitudes * (spins[:, i] != spins[:, j])
        return spins[:, None] * signs, amplitudes

    def states(self) -> NDArray[np.int8]:
        """Return all configurations, or those of magnetization 0, in the order of `matrix`."""
        return _states(self.n_sites, self.exchanges)

    def matrix(self) -> sparse.csr_array:
        """Return H as a sparse matrix over `states`."""
        states = self.states().astype(np.float64)
        powers = 2 ** np.arange(self.n_sites, dtype=np.int64)
        codes = (states > 0) @ powers
        rows = np.arange(len(states))
        i, j = self.pairs.T
        parts = [sparse.csr_array((states[:, i] * states[:, j] @ self.couplings, (rows, rows)))]
        for mask, amplitude in zip(self.masks, self.amplitudes, strict=True):
            acts = rows
            if self.exchanges:
                first, second = mask.nonzero()[0]
                acts = rows[states[:, first] != states[:, second]]
            columns = np.searchsorted(codes, codes[acts] ^ (mask @ powers))
            elements = np.full(len(acts), amplitude)
            parts.append(sparse.csr_array((elements, (acts, columns)), shape=parts[0].shape))
        return cast(sparse.csr_array, sum(parts[1:], parts[0]))

    def ground_state(self) -> tuple[float, NDArray[np.float64]]:
        """Return the lowest energy and its state by Lanczos iterations, for small systems."""
        start = np.ones(len(self.states()))
        values, vectors = eigsh(self.matrix(), k=1, which="SA", v0=start)
        return float(values[0]), vectors[:, 0]


@lru_cache(maxsize=8)
def _states(n_sites: int, balanced: bool) -> NDArray[np.int8]:
    codes = np.arange(2**n_sites, dtype=np.int64)
    up = (codes[:, None] >> np.arange(n_sites)) & 1
    if balanced:
        up = up[up.sum(1) == n_sites // 2]
    return (2 * up - 1).astype(np.int8)


def ising_chain(
    n_sites: int, field: float = 1.0, coupling: float = 1.0, *, periodic: bool = True
) -> SpinHamiltonian:
    """Return the transverse-field Ising chain H = -J Σ σᶻσᶻ - h Σ σˣ."""
    sites = np.arange(n_sites)
    pairs = np.stack([sites, (sites + 1) % n_sites], axis=1)
    if not periodic:
        pairs = pairs[:-1]
    return SpinHamiltonian(
        n_sites,
        pairs,
        np.full(len(pairs), -coupling),
        np.eye(n_sites, dtype=bool),
        np.full(n_sites, -field),
    )


def ising_chain_energy(
    n_sites: int, field: float = 1.0, coupling: float = 1.0, *, periodic: bool = True
) -> float:
    """Return the exact ground-state energy of `ising_chain`, of free fermions.

    A ring's fermions are antiperiodic in its ground state, of even parity. Those of an open chain
    have the singular values of a bidiagonal matrix as energies (Lieb, Schultz, Mattis 1961).
    """
    if periodic:
        k = (2 * np.arange(n_sites) + 1) * math.pi / n_sites
        gaps = field**2 + coupling**2 - 2 * field * coupling * np.cos(k)
        return -float(np.sqrt(gaps).sum())
    bidiagonal = field * np.eye(n_sites) + coupling * np.eye(n_sites, k=1)
    return -float(np.linalg.svd(bidiagonal, compute_uv=False).sum())


def j1_j2_square(side: int = 4, j2: float = 0.5, j1: float = 1.0) -> SpinHamiltonian:
    """Return the J₁-J₂ model Σ J₁ S·S + Σ J₂ S·S on a periodic square, with S = σ/2.

    Neighbors have coupling J₁, those across a diagonal J₂. Marshall's rotation of one sublattice
    turns the sign of the exchange between sublattices, so that the ground state is positive for
    J₂ = 0, and nearly so below J₂ ≈ 0.5.
    """
    sites = np.arange(side * side).reshape(side, side)
    near = [(0, 1), (1, 0)]
    across = [(1, 1), (1, -1)]
    pairs, couplings, signs = [], [], []
    for steps, coupling, sign in ((near, j1, -1.0), (across, j2, 1.0)):
        for down, right in steps:
            there = np.roll(sites, (-down, -right), axis=(0, 1))
            pairs.append(np.stack([sites.ravel(), there.ravel()], axis=1))
            couplings.append(np.full(side * side, coupling / 4))
            signs.append(np.full(side * side, sign * coupling / 2))
    both = np.concatenate(pairs)
    masks = np.zeros((len(both), side * side), dtype=bool)
    masks[np.arange(len(both))[:, None], both] = True
    return SpinHamiltonian(
        side * side, both, np.concatenate(couplings), masks, np.concatenate(signs)
    )


@torch.no_grad()
def local_energies(hamiltonian: SpinHamiltonian, log_psi: LogPsi, spins: Tensor) -> Tensor:
    """Return ``Σ_σ' H_σσ' ψ(σ')/ψ(σ)`` for configurations of shape (N, L), all terms at once.

    Parameters
    ----------
    hamiltonian : SpinHamiltonian
    log_psi : callable
        Takes configurations of shape (N, K, L) and of shape (N, L), where the first axis counts
        the samples, and returns log ψ without the last axis, real or complex.
    spins : Tensor of shape (N, L)
    """
    neighbors, amplitudes = hamiltonian.connected(spins)
    ratios = torch.exp(log_psi(neighbors) - log_psi(spins)[:, None])
    return hamiltonian.diagonal(spins) + (amplitudes * ratios).sum(1)


class MetropolisChains:
    """Markov chains that sample |ψ|², all advanced at once.

    Parameters
    ----------
    n_chains, n_sites : int
    rule : {"flip", "exchange"}
        Flip one spin, or exchange two antiparallel ones at magnetization 0.
    generator : torch.Generator, optional
    dtype : dtype, default float64
        Of the spins ±1.

    Attributes
    ----------
    spins : Tensor of shape (n_chains, n_sites)
        Where the chains stand; they start at random.
    acceptance : float
        The share of accepted moves at the last call of `sample`.
    """

    def __init__(
        self,
        n_chains: int,
        n_sites: int,
        rule: Literal["flip", "exchange"] = "flip",
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.rule = rule
        self.generator = generator
        self.acceptance = 0.0
        noise = torch.rand(n_chains, n_sites, generator=generator)
        if rule == "exchange":
            noise = noise.argsort(dim=1).argsort(dim=1) / n_sites
        self.spins = torch.where(noise < 0.5, -1.0, 1.0).to(dtype)

    @torch.no_grad()
    def sample(self, log_psi: LogPsi, n_samples: int = 1, *, sweeps: int = 1) -> Tensor:
        """Return configurations of shape (n_chains, n_samples, n_sites).

        Parameters
        ----------
        log_psi : callable
            Takes configurations of shape (n_chains, n_sites), one of each chain, and returns log ψ.
        n_samples : int
            Configurations of each chain.
        sweeps : int
            Sweeps of n_sites moves before each.
        """
        n_chains, n_sites = self.spins.shape
        chain = torch.arange(n_chains)
        spins, log_prob = self.spins.clone(), 2 * log_psi(self.spins).real
        kept, accepted, moves = [], 0.0, sweeps * n_sites
        for _ in range(n_samples):
            for _ in range(moves):
                proposal = spins.clone()
                self._move(proposal, chain)
                proposed = 2 * log_psi(proposal).real
                uniform = torch.rand(n_chains, generator=self.generator, dtype=torch.float64)
                accept = uniform.log() < proposed - log_prob
                spins = torch.where(accept[:, None], proposal, spins)
                log_prob = torch.where(accept, proposed, log_prob)
                accepted += float(accept.sum())
            kept.append(spins)
        self.spins = spins
        self.acceptance = accepted / max(n_samples * moves * n_chains, 1)
        return torch.stack(kept, dim=1)

    def _move(self, spins: Tensor, chain: Tensor) -> None:
        n_chains, n_sites = spins.shape
        site = torch.randint(n_sites, (n_chains,), generator=self.generator)
        if self.rule == "exchange":
            # A random site among those with the opposite spin.
            noise = torch.rand(n_chains, n_sites, generator=self.generator)
            other = torch.where(spins != spins[chain, site][:, None], noise, -1.0).argmax(1)
            spins[chain, other] *= -1
        spins[chain, site] *= -1


@dataclass(frozen=True, eq=False)
class ExactEnsemble:
    """All configurations with their probabilities, and what a batch of them would hold.

    Parameters
    ----------
    spins : Tensor of shape (n_states, L)
    probability : Tensor of shape (n_states,)
        |ψ|², with sum 1.
    local_energy : Tensor of shape (n_states,)
        (Hψ)/ψ.
    """

    spins: Tensor
    probability: Tensor
    local_energy: Tensor

    @property
    def energy(self) -> float:
        """The energy of the state."""
        return float((self.probability * self.local_energy).sum().real)

    def draw(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Return n independent samples of |ψ|², as indices of configurations."""
        return torch.multinomial(self.probability, n, replacement=True, generator=generator)


@torch.no_grad()
def enumerate_exactly(matrix: sparse.csr_array, log_psi: Tensor, spins: Tensor) -> ExactEnsemble:
    """Return the ensemble of a wave function of which all amplitudes are known.

    Parameters
    ----------
    matrix : sparse array
        `SpinHamiltonian.matrix`.
    log_psi : Tensor of shape (n_states,), real or complex
    spins : Tensor of shape (n_states, L)
    """
    psi = torch.exp(log_psi - log_psi.real.max())
    h_psi = torch.as_tensor(cast(Any, matrix) @ psi.numpy())
    probability = psi.abs().square()
    return ExactEnsemble(spins, probability / probability.sum(), h_psi / psi)
