"""MultiShiftSR, the log-derivatives it takes, and the preconditioner for NetKet."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn

from thalweg.curvature import (
    MSSRPreconditioner,
    MultiShiftSR,
    log_derivatives,
    ms_sr_direction,
)
from thalweg.tasks import RBM, FoundationRBM, enumerate_exactly, ising_chain, local_energies

SITES = 6
N = 64


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rbm(dtype=torch.float64, seed=0):
    return RBM(SITES, 4, dtype=dtype, scale=0.2, generator=seeded(seed))


def drawn(psi, n=N, seed=1):
    """Random configurations and their local energies."""
    spins = (2 * torch.randint(2, (n, SITES), generator=seeded(seed)) - 1).double()
    return spins, local_energies(ising_chain(SITES), psi, spins)


def steps(psi, optimizer, count, start=0):
    """Make steps on batches of their own and return the parameters."""
    for seed in range(start, start + count):
        spins, e_loc = drawn(psi, seed=seed)
        optimizer.step(log_psi_jac=log_derivatives(psi, spins), local_energy=e_loc)
    return torch.cat([p.detach().flatten().clone() for p in psi.parameters()])


def vector(psi):
    return torch.cat([p.detach().flatten() for p in psi.parameters()])


class Phase(nn.Module):
    """A complex log ψ with real parameters."""

    def __init__(self):
        super().__init__()
        self.size, self.phase = rbm(seed=2), rbm(seed=3)

    def forward(self, spins):
        return torch.complex(self.size(spins), self.phase(spins))


MODELS = [rbm, Phase, lambda: rbm(torch.complex128)]


# Log-derivatives


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_log_derivatives_are_finite_differences(make, chunk_size):
    psi = make()
    spins, _ = drawn(psi, 7)
    found = log_derivatives(psi, spins, chunk_size=chunk_size)
    column, step = 0, 1e-6
    for p in psi.parameters():
        flat = p.data.view(-1)
        for k in range(len(flat)):
            flat[k] += step
            ahead = psi(spins).detach()
            flat[k] -= 2 * step
            difference = (ahead - psi(spins).detach()) / (2 * step)
            flat[k] += step
            assert torch.allclose(found[:, column], difference.to(found.dtype), atol=1e-8)
            column += 1
    assert found.shape == (7, column)


def test_a_family_has_log_derivatives_of_each_field():
    psi = FoundationRBM(SITES, 2, (0.5, 1.5), generator=seeded())
    spins, _ = drawn(rbm(), 5)
    field = torch.linspace(0.5, 1.5, 5)
    found = log_derivatives(psi, spins, field)
    for k in range(5):
        psi.zero_grad()
        psi(spins[k : k + 1], field[k : k + 1]).sum().backward()
        assert torch.allclose(found[k], psi.weight.grad.flatten(), atol=1e-12)


def test_frozen_parameters_have_no_columns():
    psi = rbm()
    spins, _ = drawn(psi, 5)
    whole = log_derivatives(psi, spins)
    psi.visible_bias.requires_grad_(False)
    assert torch.equal(log_derivatives(psi, spins), whole[:, SITES:])


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = rbm(), rbm(torch.complex128)

    def forward(self, spins):
        return self.a(spins) + self.b(spins)


def test_bad_models():
    spins, _ = drawn(rbm(), 5)
    with pytest.raises(ValueError, match="all real or all complex, got both"):
        log_derivatives(Mixed(), spins)
    with pytest.raises(ValueError, match="a parameter that requires a gradient"):
        log_derivatives(nn.Identity(), spins)
    with pytest.raises(ValueError, match=r"log ψ of shape \(N,\), got \(1, 2\)"):
        log_derivatives(nn.Linear(SITES, 2, dtype=torch.float64), spins)
    with pytest.raises(ValueError, match="chunk_size must be an integer >= 1"):
        log_derivatives(rbm(), spins, chunk_size=0)


# The step


@pytest.mark.parametrize("make", MODELS)
def test_a_step_goes_along_the_direction(make):
    psi = make()
    spins, e_loc = drawn(psi)
    jac, before = log_derivatives(psi, spins), vector(psi)
    holomorphic = before.is_complex() if jac.is_complex() else None
    delta = ms_sr_direction(jac, e_loc, generator=seeded(), holomorphic=holomorphic).delta
    optimizer = MultiShiftSR(psi.parameters(), lr=0.05)
    energy = optimizer.step(log_psi_jac=jac, local_energy=e_loc)
    assert torch.allclose(vector(psi), before - 0.05 * delta, atol=1e-14)
    assert energy == e_loc.mean().real
    assert optimizer.last_shifts == optimizer.last.shifts.tolist()


@pytest.mark.parametrize("make", MODELS)
def test_a_closure_gives_the_same_step(make):
    psi, twin = make(), make()
    spins, e_loc = drawn(psi)
    MultiShiftSR(psi.parameters(), shifts=[0.01]).step(
        log_psi_jac=log_derivatives(psi, spins), local_energy=e_loc
    )
    MultiShiftSR(twin.parameters(), shifts=[0.01]).step(lambda: (twin(spins), e_loc))
    assert torch.allclose(vector(psi), vector(twin), atol=1e-11)


def test_energy_falls_to_the_ground_state():
    ring, psi, generator = ising_chain(SITES), rbm(), seeded()
    matrix, states = ring.matrix(), torch.as_tensor(ring.states()).double()
    optimizer = MultiShiftSR(psi.parameters(), lr=0.1)
    for _ in range(40):
        exact = enumerate_exactly(matrix, psi(states).detach(), states)
        rows = exact.draw(256, generator)
        optimizer.step(
            log_psi_jac=log_derivatives(psi, states[rows]), local_energy=exact.local_energy[rows]
        )
    lowest, _ = ring.ground_state()
    assert lowest < exact.energy < lowest + 5e-3 * abs(lowest)


def test_groups_have_their_own_lr():
    psi = rbm()
    spins, e_loc = drawn(psi)
    jac, before = log_derivatives(psi, spins), vector(psi)
    groups = [
        {"params": [psi.visible_bias, psi.hidden_bias]},
        {"params": [psi.weight], "lr": torch.tensor(0.5)},
    ]
    MultiShiftSR(groups, lr=0.1).step(log_psi_jac=jac, local_energy=e_loc)
    delta = ms_sr_direction(jac, e_loc, generator=seeded()).delta
    lr = torch.full_like(delta, 0.5)
    lr[: SITES + 4] = 0.1
    assert torch.allclose(vector(psi), before - lr * delta, atol=1e-14)


@pytest.mark.parametrize("make", MODELS)
def test_momentum_is_springs(make):
    """With one shift δ_t = μδ_{t-1} + Aᴴ(K + λI)⁻¹(y - Aμδ_{t-1})."""
    psi, mu, shift = make(), 0.8, 0.02
    optimizer = MultiShiftSR(psi.parameters(), lr=0.1, momentum=mu, shifts=[shift])
    delta = torch.zeros_like(vector(psi))
    for seed in range(3):
        spins, e_loc = drawn(psi, seed=seed)
        jac, before = log_derivatives(psi, spins), vector(psi)
        A = (jac - jac.mean(0)) / N**0.5
        y = ((e_loc - e_loc.mean()) / N**0.5).to(A.dtype)
        if jac.is_complex() and not before.is_complex():
            A, y = torch.cat([A.real, A.imag]), torch.cat([y.real, y.imag])
        residual = y - mu * A @ delta
        dual = torch.linalg.solve(A @ A.mH + shift * torch.eye(len(A), dtype=A.dtype), residual)
        delta = mu * delta + A.mH @ dual
        optimizer.step(log_psi_jac=jac, local_energy=e_loc)
        assert torch.allclose(vector(psi), before - 0.1 * delta, atol=1e-10)


def test_momentum_of_a_stationary_batch_converges_to_the_solution():
    """Kaczmarz: repeated on one batch, SPRING with μ → 1 interpolates it."""
    psi = rbm()
    spins, e_loc = drawn(psi, 20)
    jac = log_derivatives(psi, spins)
    optimizer = MultiShiftSR(psi.parameters(), lr=0.0, momentum=0.99, shifts=[0.05])
    for _ in range(200):
        optimizer.step(log_psi_jac=jac, local_energy=e_loc)
    delta = torch.cat([optimizer.state[p]["direction"].flatten() for p in psi.parameters()])
    best = ms_sr_direction(jac, e_loc, shifts=[1e-4]).delta
    assert float((delta - best).norm()) < 0.1 * float(best.norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("make", MODELS)
def test_long_directions_are_capped(make, momentum):
    psi = make()
    optimizer = MultiShiftSR(psi.parameters(), lr=1.0, max_norm=1e-3, momentum=momentum)
    for seed in range(2):
        spins, e_loc = drawn(psi, seed=seed)
        jac, before = log_derivatives(psi, spins), vector(psi)
        system = torch.arange(N) % 2
        optimizer.step(log_psi_jac=jac, local_energy=e_loc, system_id=system)
        change = (jac @ (vector(psi) - before).to(jac.dtype)).reshape(-1, 2)
        spread = (change - change.mean(0)).abs().square().mean().sqrt()
        assert float(spread) == pytest.approx(1e-3, rel=1e-6)


def test_weights_chains_and_systems_reach_the_direction():
    psi = rbm()
    spins, e_loc = drawn(psi)
    jac, before = log_derivatives(psi, spins), vector(psi)
    ids = {
        "sample_weight": torch.arange(1, N + 1).double() / (N * (N + 1) / 2),
        "chain_id": torch.arange(N) // 4,
        "system_id": torch.arange(N) // 32,
    }
    optimizer = MultiShiftSR(psi.parameters(), lr=1.0, momentum=0.5)
    energy = optimizer.step(log_psi_jac=jac, local_energy=e_loc, **ids)
    delta = ms_sr_direction(jac, e_loc, generator=seeded(), **ids).delta
    assert torch.allclose(vector(psi), before - delta, atol=1e-14)
    assert float(energy) == pytest.approx(float(ids["sample_weight"] @ e_loc))


# Ecosystem


@pytest.mark.parametrize("make", [rbm, lambda: rbm(torch.complex128), lambda: rbm().bfloat16()])
def test_state_dict_resumes_bit_for_bit(make):
    settings = {"lr": 0.05, "momentum": 0.9}
    psi = make()
    optimizer = MultiShiftSR(psi.parameters(), **settings)
    steps(psi, optimizer, 2)
    file = io.BytesIO()
    torch.save({"psi": psi.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    wanted = steps(psi, optimizer, 2, start=2)

    twin = make()
    twin.load_state_dict(saved["psi"])
    resumed = MultiShiftSR(twin.parameters(), lr=1.0)
    resumed.load_state_dict(saved["optimizer"])
    assert resumed.last_shifts == saved["optimizer"]["param_groups"][0]["last_shifts"]
    assert torch.equal(steps(twin, resumed, 2, start=2), wanted)
    state = optimizer.state[next(psi.parameters())]
    assert int(state["step"]) == 4
    assert state["direction"].dtype in (torch.float64, torch.float32, torch.complex128)


def test_copies_and_schedulers():
    psi = rbm()
    optimizer = MultiShiftSR(psi.parameters(), lr=0.4, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    steps(psi, optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.2
    pair = copy.deepcopy((psi, optimizer))
    assert torch.equal(steps(*pair, 2, start=1), steps(psi, optimizer, 2, start=1))


def test_frozen_parameters_stay():
    psi = rbm()
    psi.weight.requires_grad_(False)
    before = psi.weight.clone()
    optimizer = MultiShiftSR(psi.parameters(), lr=0.1)
    steps(psi, optimizer, 1)
    assert torch.equal(psi.weight, before)
    assert psi.weight not in optimizer.state


def test_a_group_can_come_later():
    psi = rbm()
    psi.weight.requires_grad_(False)
    optimizer = MultiShiftSR([psi.visible_bias, psi.hidden_bias], lr=0.1, momentum=0.9)
    steps(psi, optimizer, 1)
    psi.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [psi.weight], "lr": 0.01})
    before = psi.weight.clone()
    steps(psi, optimizer, 1, start=1)
    assert not torch.equal(psi.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_parameters(dtype):
    psi, exact = rbm().to(dtype), rbm()
    exact.load_state_dict(psi.state_dict())
    spins, e_loc = drawn(exact)
    rounded = {"log_psi_jac": log_derivatives(psi, spins.to(dtype)), "local_energy": e_loc}
    shared = {"lr": 0.5, "shifts": [0.1]}
    MultiShiftSR(psi.parameters(), **shared).step(**rounded)
    MultiShiftSR(exact.parameters(), **shared).step(
        log_psi_jac=log_derivatives(exact, spins), local_energy=e_loc
    )
    assert next(psi.parameters()).dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert torch.allclose(vector(psi).double(), vector(exact), atol=tolerance)


# Bad input


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"lr": -1.0}, ValueError, "lr must be a finite number >= 0"),
        ({"lr": torch.ones(2)}, ValueError, "lr must hold one number"),
        ({"n_solves": 0}, ValueError, "n_solves must be an integer >= 1"),
        ({"mode": "both"}, ValueError, "mode must be one of"),
        ({"shifts": "none"}, ValueError, "shifts must be one of"),
        ({"shifts": [-1.0]}, ValueError, "shifts must be finite and > 0"),
        ({"max_norm": 0.0}, ValueError, "max_norm must be a finite number > 0"),
        ({"momentum": 1.0}, ValueError, "momentum must be a finite number >= 0 and < 1"),
        ({"seed": -1}, ValueError, "seed must be an integer >= 0"),
    ],
)
def test_bad_settings(settings, error, match):
    with pytest.raises(error, match=match):
        MultiShiftSR(rbm().parameters(), **settings)


def test_groups_share_the_solve():
    optimizer = MultiShiftSR(rbm().parameters())
    with pytest.raises(
        ValueError, match="n_solves must be the same for all param groups, 5, got 3"
    ):
        optimizer.add_param_group({"params": rbm().parameters(), "n_solves": 3})
    with pytest.raises(ValueError, match="all real or all complex"):
        optimizer.add_param_group({"params": rbm(torch.complex128).parameters()})
    assert len(optimizer.param_groups) == 1


def test_bad_steps():
    psi = rbm()
    spins, e_loc = drawn(psi)
    jac = log_derivatives(psi, spins)
    optimizer = MultiShiftSR(psi.parameters())
    before = vector(psi).clone()
    for arguments in (
        {},
        {"log_psi_jac": jac},
        {"closure": lambda: (psi(spins), e_loc), "log_psi_jac": jac, "local_energy": e_loc},
    ):
        with pytest.raises(TypeError, match="either a closure, or both"):
            optimizer.step(**arguments)
    with pytest.raises(TypeError, match="closure must return log ψ of the samples and their"):
        optimizer.step(lambda: psi(spins))
    with pytest.raises(ValueError, match=r"with its graph, got \(64,\), requires_grad=False"):
        optimizer.step(lambda: (psi(spins).detach(), e_loc))
    with pytest.raises(ValueError, match=r"log_psi_jac must have shape \(N, 34\)"):
        optimizer.step(log_psi_jac=jac[:, 1:], local_energy=e_loc)
    spoiled = e_loc.clone()
    spoiled[5] = math.inf
    with pytest.raises(ValueError, match="got inf for sample 5"):
        optimizer.step(log_psi_jac=jac, local_energy=spoiled)
    with pytest.raises(ValueError, match="must come from MultiShiftSR"):
        optimizer.load_state_dict(torch.optim.SGD(psi.parameters(), lr=1.0).state_dict())
    assert torch.equal(vector(psi), before)


# NetKet


@pytest.fixture(scope="module")
def nk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        return pytest.importorskip("netket")


def netket_state(nk, dtype, sampler="ExactSampler", **settings):
    from jax.nn.initializers import normal

    hilbert = nk.hilbert.Spin(0.5, 8)
    H = nk.operator.Ising(hilbert, nk.graph.Chain(8), h=1.0)
    model = nk.models.RBM(alpha=2, param_dtype=dtype, kernel_init=normal(0.1))
    sampler = getattr(nk.sampler, sampler)(hilbert, **settings)
    return H, nk.vqs.MCState(sampler, model, n_samples=256, seed=1)


def flat(nk, tree):
    from jax.flatten_util import ravel_pytree

    return torch.tensor(ravel_pytree(tree)[0].tolist())


@pytest.mark.parametrize(
    ("dtype", "holomorphic"), [(float, False), (complex, False), (complex, True)]
)
@pytest.mark.parametrize("sampler", ["ExactSampler", "MetropolisLocal"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_shift_is_what_netket_does(nk, dtype, holomorphic, sampler):
    H, state = netket_state(nk, dtype, sampler)
    _, gradient = state.expect_and_grad(H)
    solver = nk.optimizer.solver.cholesky
    sr = nk.optimizer.SR(diag_shift=1e-2, solver=solver, holomorphic=holomorphic)
    wanted = flat(nk, sr(state, gradient, 0))
    precondition = MSSRPreconditioner(H, shifts=[1e-2], holomorphic=holomorphic)
    found = precondition(state, gradient, 0)
    assert float((flat(nk, found) - wanted).norm()) <= 1e-6 * float(wanted.norm())


def test_the_driver_takes_it(nk):
    H, state = netket_state(nk, float)
    precondition = MSSRPreconditioner(H, chunk_size=64)
    driver = nk.driver.VMC(
        H, nk.optimizer.Sgd(0.1), variational_state=state, preconditioner=precondition
    )
    driver.run(25, show_progress=False)
    lowest = nk.exact.lanczos_ed(H)[0]
    assert abs(float(state.expect(H).mean.real) - lowest) < 0.03 * abs(lowest)
    assert len(precondition.last.shifts) == 5


@pytest.mark.parametrize(("n_chains", "pieces"), [(16, 1), (2, 3)])
def test_chains_stay_whole_or_are_cut_in_pieces(nk, n_chains, pieces):
    H, state = netket_state(nk, float, "MetropolisLocal", n_chains=n_chains)
    precondition = MSSRPreconditioner(H)
    chain = precondition._chains(state.samples.shape).reshape(n_chains, -1)
    assert len(chain.unique()) == n_chains * pieces
    assert bool((chain.diff(dim=1) >= 0).all())
    assert all(len(row.unique()) == pieces for row in chain)


def test_the_norm_cap_and_the_seed(nk):
    H, state = netket_state(nk, float)
    _, gradient = state.expect_and_grad(H)
    free, capped, again = (
        MSSRPreconditioner(H, **settings) for settings in ({}, {"max_norm": 1e-3}, {"seed": 0})
    )
    whole = flat(nk, free(state, gradient))
    scale = 1e-3 / free.last.tangent_norm
    assert torch.allclose(flat(nk, capped(state, gradient)), scale * whole, rtol=1e-6)
    assert torch.equal(flat(nk, again(state, gradient)), whole)


def test_bad_use_with_netket(nk):
    H, state = netket_state(nk, float)
    with pytest.raises(TypeError, match="hamiltonian must be a NetKet operator, got int"):
        MSSRPreconditioner(1)
    with pytest.raises(ValueError, match="mode must be one of"):
        MSSRPreconditioner(H, mode="none")
    exact = nk.vqs.FullSumState(H.hilbert, state.model)
    with pytest.raises(TypeError, match=r"must be a netket.vqs.MCState, got FullSumState"):
        MSSRPreconditioner(H)(exact, None)


def test_without_netket(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "netket", None)
    with pytest.raises(ImportError, match=r"thalweg\[netket\]"):
        MSSRPreconditioner(None)
