"""Spin systems and neural quantum states: exact energies, local energies, chains and symmetries."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.tasks import (
    RBM,
    FoundationRBM,
    MetropolisChains,
    enumerate_exactly,
    ising_chain,
    ising_chain_energy,
    j1_j2_square,
    local_energies,
)
from thalweg.tasks.quantum_states import log_cosh

SYSTEMS = {
    "ring": ising_chain(6, 0.7),
    "open chain": ising_chain(6, 1.3, 0.8, periodic=False),
    "square": j1_j2_square(2, 0.4),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def kronecker(system):
    """H over all 2ᴸ configurations, in the order of `_states`, from Pauli matrices."""
    x, z = np.array([[0.0, 1.0], [1.0, 0.0]]), np.diag([-1.0, 1.0])

    def on(sites, matrix):
        total = np.eye(1)
        for site in reversed(range(system.n_sites)):
            total = np.kron(total, matrix if site in sites else np.eye(2))
        return total

    diagonal = zip(system.pairs, system.couplings, strict=True)
    H = sum(c * on([i], z) @ on([j], z) for (i, j), c in diagonal)
    for mask, amplitude in zip(system.masks, system.amplitudes, strict=True):
        sites = mask.nonzero()[0]
        flip = on(sites, x)
        if len(sites) == 2:
            i, j = sites
            flip = flip @ (np.eye(len(H)) - on([i], z) @ on([j], z)) / 2
        H = H + amplitude * flip
    return H


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_matrix_is_the_sum_of_pauli_products(system):
    full = kronecker(system)
    codes = (system.states() > 0) @ 2 ** np.arange(system.n_sites)
    assert np.allclose(system.matrix().toarray(), full[np.ix_(codes, codes)], atol=1e-14)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_local_energies_are_h_psi_over_psi(system, dtype):
    psi = RBM(system.n_sites, 5, dtype=dtype, scale=0.3, generator=seeded())
    spins = torch.as_tensor(system.states()).double()
    exact = enumerate_exactly(system.matrix(), psi(spins).detach(), spins)
    assert torch.allclose(local_energies(system, psi, spins), exact.local_energy, atol=1e-12)
    amplitudes = psi(spins).exp().detach().numpy()
    norm = np.vdot(amplitudes, amplitudes).real
    energy = np.vdot(amplitudes, system.matrix() @ amplitudes).real / norm
    assert exact.energy == pytest.approx(energy, rel=1e-12)
    assert float(exact.probability.sum()) == pytest.approx(1, abs=1e-12)


def test_known_ground_energies():
    assert j1_j2_square(4, 0.5).ground_state()[0] == pytest.approx(-8.45792335, abs=5e-9)
    assert ising_chain(10).ground_state()[0] == pytest.approx(-12.784906443, abs=5e-10)


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("field", [0.3, 1.0, 2.0])
def test_free_fermions(periodic, field):
    energy = ising_chain(8, field, 0.9, periodic=periodic).ground_state()[0]
    assert ising_chain_energy(8, field, 0.9, periodic=periodic) == pytest.approx(energy, abs=1e-9)


def test_marshall_rotation_makes_the_ground_state_positive():
    _, state = j1_j2_square(4, 0.0).ground_state()
    assert (state * np.sign(state.sum()) > 0).all()


def test_the_ground_state_has_no_local_fluctuations():
    system = SYSTEMS["ring"]
    energy, state = system.ground_state()
    log_psi = torch.as_tensor(np.abs(state)).log()
    exact = enumerate_exactly(system.matrix(), log_psi, torch.as_tensor(system.states()))
    assert torch.allclose(exact.local_energy, torch.full_like(log_psi, energy), atol=1e-9)


@pytest.mark.parametrize("rule", ["flip", "exchange"])
def test_chains_sample_the_squared_amplitudes(rule):
    """χ² of 4000 chains, each of one sample: its mean is its degrees of freedom, plus 5σ."""
    system = j1_j2_square(2) if rule == "exchange" else ising_chain(4)
    psi = RBM(4, 3, scale=0.4, generator=seeded())
    spins = torch.as_tensor(system.states()).double()
    exact = enumerate_exactly(system.matrix(), psi(spins).detach(), spins)
    chains = MetropolisChains(4000, 4, rule, seeded(1))
    drawn = chains.sample(psi, 2, sweeps=12)
    assert drawn.shape == (4000, 2, 4)
    assert torch.equal(drawn[:, 1], chains.spins)
    assert 0 < chains.acceptance <= 1
    code = 2.0 ** torch.arange(4)
    order = torch.searchsorted(
        (spins > 0).double() @ code.double(), (chains.spins > 0).double() @ code.double()
    )
    counts = torch.bincount(order, minlength=len(spins))
    expected = 4000 * exact.probability
    freedom = len(spins) - 1
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert chi_squared < freedom + 5 * (2 * freedom) ** 0.5


def test_chains_repeat_with_their_seed():
    psi = RBM(6, 3, generator=seeded())
    first, second = (MetropolisChains(8, 6, generator=seeded(2)).sample(psi, 3) for _ in range(2))
    assert torch.equal(first, second)
    assert MetropolisChains(8, 6, "exchange", seeded()).spins.sum(1).abs().max() == 0


def test_batches_are_drawn_in_proportion():
    """Frequencies of 10⁵ draws, within five standard deviations."""
    system = ising_chain(3)
    spins = torch.as_tensor(system.states()).double()
    exact = enumerate_exactly(system.matrix(), spins.sum(1) / 3, spins)
    counts = torch.bincount(exact.draw(100_000, seeded()), minlength=8) / 1e5
    spread = (exact.probability * (1 - exact.probability) / 1e5).sqrt()
    assert bool(((counts - exact.probability).abs() < 5 * spread).all())


# Wave functions


def test_log_cosh():
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    assert torch.allclose(log_cosh(x), x.cosh().log(), atol=1e-14)
    z = torch.complex(x, 0.4 * x + 0.1)
    assert torch.allclose(log_cosh(z).exp(), z.cosh(), atol=1e-12)
    assert float(log_cosh(torch.tensor(-1e4))) == pytest.approx(1e4 - np.log(2))


def test_rbm_is_its_formula():
    psi = RBM(4, 3, dtype=torch.complex128, scale=0.5, generator=seeded())
    spins = torch.tensor([[1.0, -1, -1, 1], [1, 1, 1, 1]], dtype=torch.float64)
    a, b, W = (p.detach() for p in psi.parameters())
    s = spins.to(torch.complex128)
    wanted = (s @ a).exp() * (s @ W.T + b).cosh().prod(1)
    assert torch.allclose(psi(spins).exp(), wanted)
    assert torch.allclose(psi(spins[None, :, None])[0, :, 0], psi(spins))


def test_foundation_rbm_is_its_formula():
    psi = FoundationRBM(5, 2, (0.5, 1.5), degree=2, scale=0.5, generator=seeded())
    spins = torch.tensor([[1.0, -1, -1, 1, 1]], dtype=torch.float64)
    field = torch.tensor([0.75], dtype=torch.float64)
    t = -0.5
    w = psi.weight[0] + t * psi.weight[1] + (2 * t * t - 1) * psi.weight[2]
    total = sum(
        torch.log(torch.cosh(sum(w[f, y] * spins[0, (x + y) % 5] for y in range(5))))
        for f in range(2)
        for x in range(5)
    )
    assert torch.allclose(psi(spins, field), total[None])


def test_foundation_rbm_has_the_symmetries_of_the_ring():
    psi = FoundationRBM(6, 3, (0.5, 1.5), degree=1, scale=0.5, generator=seeded())
    spins = (2 * torch.randint(2, (4, 6), generator=seeded(1)) - 1).double()
    field = torch.linspace(0.5, 1.5, 4)
    value = psi(spins, field)
    assert torch.allclose(psi(spins.roll(2, dims=1), field), value)
    assert torch.allclose(psi(-spins, field), value)
    several = psi(torch.stack([spins, -spins.roll(1, dims=1)], dim=1), field)
    assert torch.allclose(several, value[:, None].expand(-1, 2))
