"""What the claims about stochastic reconfiguration share: wave functions, batches and solvers.

A solver is called as ``solver(batches, generator, **tuned)`` and returns a direction. ``batches``
are pairs of log-derivatives and local energies, one for each of the last wave functions of a run,
of which the last is where the direction is wanted: what came before serves those with momentum.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from thalweg.common.optional import requires
from thalweg.common.random import torch_generator

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature import MultiShiftSR, log_derivatives, ms_sr_direction
from thalweg.tasks import (
    RBM,
    ExactEnsemble,
    FoundationRBM,
    MetropolisChains,
    SpinHamiltonian,
    enumerate_exactly,
    ising_chain,
    j1_j2_square,
    local_energies,
)

Batch = tuple[Tensor, Tensor]
Solver = Callable[..., Tensor]
HISTORY = 5
SHIFTS = [1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0]


# Solvers


def ms_sr(batches: list[Batch], generator: torch.Generator, **settings: Any) -> Tensor:
    """MS-SR as shipped."""
    return ms_sr_direction(*batches[-1], generator=generator, **settings).delta


def sr(batches: list[Batch], generator: torch.Generator, shift: float = 1e-3) -> Tensor:
    """Stochastic reconfiguration with a fixed diagonal shift, as netket's ``SR``."""
    return ms_sr_direction(*batches[-1], shifts=[shift]).delta


def gcv(batches: list[Batch], generator: torch.Generator) -> Tensor:
    """SR whose shift minimizes generalized cross-validation."""
    return ms_sr_direction(*batches[-1], shifts="gcv").delta


def relative_sr(batches: list[Batch], generator: torch.Generator, shift: float = 1e-2) -> Tensor:
    """SR whose shift is relative to the diagonal of the metric, as netket's ``diag_scale``."""
    jac, energy = batches[-1]
    scale = jac.std(0, correction=0).clamp(min=1e-6)
    return ms_sr_direction(jac / scale, energy, shifts=[shift]).delta / scale


def soft_pinv(batches: list[Batch], generator: torch.Generator, cutoff: float = 1e-4) -> Tensor:
    """MinSR by a pseudo-inverse with soft cutoff, as netket's ``pinv_smooth``."""
    jac, energy = batches[-1]
    root = len(energy) ** 0.5
    A, y = (jac - jac.mean(0)) / root, (energy - energy.mean()) / root
    s, U = torch.linalg.eigh(A @ A.T)
    s = s.clamp(min=1e-14 * float(s[-1]))
    response = 1 / (s * (1 + (cutoff * s[-1] / s) ** 6))
    delta: Tensor = A.T @ (U @ (response * (U.T @ y)))
    return delta


def spring(
    batches: list[Batch], generator: torch.Generator, shift: float = 1e-3, momentum: float = 0.9
) -> Tensor:
    """SPRING along the batches: keep of the last direction what a batch does not see."""
    delta = torch.zeros_like(batches[0][0][0])
    for jac, energy in batches:
        carried = momentum * delta
        delta = carried + ms_sr_direction(jac, energy - jac @ carried, shifts=[shift]).delta
    return delta


# Exact experiments


@dataclass(frozen=True, eq=False)
class ExactTangent:
    """A wave function whose ensemble is enumerated, with its tangent space.

    Parameters
    ----------
    ensemble : ExactEnsemble
    rows : callable
        Returns the log-derivatives of configurations, given by their indices.
    metric : Tensor of shape (P, P)
        S, the covariance of the log-derivatives.
    force : Tensor of shape (P,)
        Their covariance with the local energy.
    energy_variance : float
    best : Tensor of shape (P,)
        The exact tangent-space update S⁺F.
    """

    ensemble: ExactEnsemble
    rows: Callable[[Tensor], Tensor]
    metric: Tensor
    force: Tensor
    energy_variance: float
    best: Tensor

    @property
    def gap(self) -> float:
        """The risk of the best direction."""
        return self.risk(self.best)

    def risk(self, delta: Tensor) -> float:
        """Return ``E|e - ē - (O - Ō)δ|²``."""
        explained = 2 * self.force @ delta - delta @ self.metric @ delta
        return self.energy_variance - float(explained)

    def distance(self, delta: Tensor) -> float:
        """Return ‖δ - S⁺F‖ in the metric S, relative to that of δ = 0."""
        apart = delta - self.best
        return float(((apart @ self.metric @ apart) / (self.best @ self.metric @ self.best)).sqrt())

    def batch(self, n: int, generator: torch.Generator) -> Batch:
        """Return log-derivatives and local energies of n independent samples."""
        drawn = self.ensemble.draw(n, generator)
        return self.rows(drawn), self.ensemble.local_energy[drawn]

    def jacobian(self) -> Tensor:
        """Return the log-derivatives of all configurations."""
        return self.rows(torch.arange(len(self.ensemble.spins)))


def exact_tangent(ensemble: ExactEnsemble, rows: Callable[[Tensor], Tensor]) -> ExactTangent:
    """Return the tangent space of an enumerated wave function."""
    jac = rows(torch.arange(len(ensemble.spins)))
    root = ensemble.probability.sqrt()
    A = root[:, None] * (jac - ensemble.probability @ jac)
    y = root * (ensemble.local_energy - ensemble.energy)
    metric, force = A.T @ A, A.T @ y
    s, U = torch.linalg.eigh(metric)
    inverse = torch.where(s > 1e-10 * s[-1], 1 / s, 0.0)
    best = U @ (inverse * (U.T @ force))
    return ExactTangent(ensemble, rows, metric, force, float(y @ y), best)


def widened(tangent: ExactTangent, n_features: int, generator: torch.Generator) -> ExactTangent:
    """Return a larger tangent space with the same gap.

    The added features are random functions of the configuration, of the size of the others, less
    their part along the residual of the best direction: in population they explain none of it.
    """
    p = tangent.ensemble.probability
    jac = tangent.jacobian()
    jac -= p @ jac
    energy = tangent.ensemble.local_energy - tangent.ensemble.energy
    residual = energy - jac @ tangent.best
    added = torch.randn(len(p), n_features, generator=generator, dtype=torch.float64)
    added -= p @ added
    added -= torch.outer(residual, (p * residual) @ added / (p @ residual**2))
    size = (p @ jac**2).mean().sqrt()
    wide = torch.cat([jac, size * added], dim=1)
    return exact_tangent(tangent.ensemble, lambda drawn: wide[drawn])


@lru_cache(maxsize=4)
def _enumerated(name: str) -> tuple[SpinHamiltonian, Any, Tensor]:
    """Return "ring8", "ring10" or "square", its matrix and its configurations."""
    system = j1_j2_square() if name == "square" else ising_chain(int(name[4:]))
    return system, system.matrix(), torch.as_tensor(system.states()).double()


@lru_cache(maxsize=4)
def ground_energy(name: str) -> float:
    """Return the exact ground-state energy of an enumerated system."""
    return _enumerated(name)[0].ground_state()[0]


def ensemble_of(name: str, psi: RBM) -> ExactEnsemble:
    """Return the exact ensemble of a wave function of an enumerated system."""
    _, matrix, states = _enumerated(name)
    with torch.no_grad():
        return enumerate_exactly(matrix, psi(states), states)


def new_rbm(name: str, n_hidden: int, seed: int = 0) -> RBM:
    """Return an untrained RBM."""
    n_sites = _enumerated(name)[0].n_sites
    return RBM(n_sites, n_hidden, generator=torch.Generator().manual_seed(seed))


def exact_path(name: str, n_hidden: int, steps: int, history: int = 1) -> list[ExactTangent]:
    """Return the tangent spaces of the last wave functions of a run of exact SR.

    Deterministic: step 0.05, shift 1e-3, the population in place of samples.
    """
    run = _exact_run(name, n_hidden)
    while len(run) <= steps:
        run.append(_after(name, *run[-1]))
    return [tangent for _, tangent in run[max(0, steps + 1 - history) : steps + 1]]


@lru_cache(maxsize=8)
def _exact_run(name: str, n_hidden: int) -> list[tuple[RBM, ExactTangent]]:
    """Return the run so far, which `exact_path` continues."""
    psi = new_rbm(name, n_hidden)
    return [(psi, _tangent_of(name, psi))]


def _tangent_of(name: str, psi: RBM) -> ExactTangent:
    ensemble = ensemble_of(name, psi)
    return exact_tangent(ensemble, lambda drawn: log_derivatives(psi, ensemble.spins[drawn]))


def _after(name: str, psi: RBM, tangent: ExactTangent) -> tuple[RBM, ExactTangent]:
    shifted = tangent.metric + 1e-3 * torch.eye(len(tangent.force), dtype=torch.float64)
    change = -0.05 * torch.linalg.solve(shifted, tangent.force)
    psi = copy.deepcopy(psi)
    with torch.no_grad():
        pieces = torch.split(change, [p.numel() for p in psi.parameters()])
        for p, piece in zip(psi.parameters(), pieces, strict=True):
            p.add_(piece.reshape(p.shape))
    return psi, _tangent_of(name, psi)


def draw_batches(path: list[ExactTangent], n: int, rng: np.random.Generator) -> list[Batch]:
    """Return one batch of each wave function of a path."""
    generator = torch_generator(rng)
    return [tangent.batch(n, generator) for tangent in path]


@lru_cache(maxsize=32)
def hindsight_shift(name: str, n_hidden: int, steps: int, n: int) -> float:
    """Return the shift of least mean risk in one setting, on batches of its own."""
    (tangent,) = exact_path(name, n_hidden, steps)
    generator = torch.Generator().manual_seed(1)
    batches = [tangent.batch(n, generator) for _ in range(10)]
    risks = [
        np.mean([tangent.risk(sr([batch], generator, shift)) for batch in batches])
        for shift in SHIFTS
    ]
    return SHIFTS[int(np.argmin(risks))]


# A family on 100 sites

SITES = 100
FIELDS = (0.8, 1.2)
MEMBERS = (0.8, 0.9, 1.0, 1.1, 1.2)


@dataclass(frozen=True, eq=False)
class FamilyPool:
    """Samples of a family of wave functions: log-derivatives, local energies and fields.

    Parameters
    ----------
    jac : Tensor of shape (n, P)
    local_energy : Tensor of shape (n,)
    member : Tensor of shape (n,), int64
        Which field a sample was drawn at.
    """

    jac: Tensor
    local_energy: Tensor
    member: Tensor

    def split(self, n: int, generator: torch.Generator) -> tuple[FamilyPool, FamilyPool]:
        """Return a random batch with the same number of samples of each member, and the rest."""
        order = torch.randperm(len(self.member), generator=generator)
        order = order[torch.argsort(self.member[order], stable=True)]
        per_member = order.reshape(len(MEMBERS), -1)
        cut = n // len(MEMBERS)
        return self._of(per_member[:, :cut].flatten()), self._of(per_member[:, cut:].flatten())

    def _of(self, rows: Tensor) -> FamilyPool:
        return FamilyPool(self.jac[rows], self.local_energy[rows], self.member[rows])

    def risk(self, delta: Tensor) -> float:
        """Return the mean squared residual, each member centered on its own mean."""
        residual = self.local_energy - self.jac @ delta
        share = torch.nn.functional.one_hot(self.member).double()
        means = (share.T @ residual) / share.sum(0)
        return float((residual - means[self.member]).square().mean())


class FamilySampler:
    """A foundation network on the fields `MEMBERS`, and Markov chains that sample all of them."""

    def __init__(self, chains_per_member: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.psi = FoundationRBM(SITES, 4, FIELDS, dtype=torch.float32, generator=generator)
        with torch.no_grad():
            # A coupling of neighbors, the same at all fields: training need not find it first.
            self.psi.weight[0, 0, :2] += 0.5
        n_chains = chains_per_member * len(MEMBERS)
        self.chains = MetropolisChains(n_chains, SITES, "flip", generator, dtype=torch.float32)
        self.member = torch.arange(len(MEMBERS)).repeat_interleave(chains_per_member)
        self.field = torch.tensor(MEMBERS)[self.member]

    def draw(self, sweeps: int = 1) -> FamilyPool:
        """Advance the chains and return one sample of each."""
        with torch.no_grad():
            spins = self.chains.sample(lambda s: self.psi(s, self.field), sweeps=sweeps)[:, 0]
        energies = torch.empty(len(spins))
        for k, field in enumerate(MEMBERS):
            rows = self.member == k
            of_field = partial(self.psi, field=self.field[rows])
            energies[rows] = local_energies(ising_chain(SITES, field), of_field, spins[rows])
        jac = log_derivatives(self.psi, spins, self.field, chunk_size=256)
        return FamilyPool(jac.double(), energies.double(), self.member)

    def train(self, optimizer: MultiShiftSR, steps: int) -> None:
        """Make steps of one sweep each."""
        for _ in range(steps):
            pool = self.draw()
            optimizer.step(
                log_psi_jac=pool.jac, local_energy=pool.local_energy, system_id=pool.member
            )


@lru_cache(maxsize=2)
def family_pool(chains_per_member: int, steps: int, draws: int) -> FamilyPool:
    """Return samples of a family that was trained briefly, by SR with a fixed shift."""
    sampler = FamilySampler(chains_per_member, seed=0)
    sampler.chains.sample(lambda s: sampler.psi(s, sampler.field), sweeps=5)
    sampler.train(
        MultiShiftSR(sampler.psi.parameters(), lr=0.04, shifts=[1.0], max_norm=6.0), steps
    )
    pools = [sampler.draw(sweeps=2) for _ in range(draws)]
    return FamilyPool(
        torch.cat([pool.jac for pool in pools]),
        torch.cat([pool.local_energy for pool in pools]),
        torch.cat([pool.member for pool in pools]),
    )
