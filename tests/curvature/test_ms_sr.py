"""Multi-shift stochastic reconfiguration: the direction, its filters, folds and risks."""

# ruff: noqa: E741 - O is the letter of the field

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from thalweg.curvature import MSSRResult, log_derivatives, ms_sr_direction, shift_risk_report
from thalweg.curvature.sample_folds import effective_sample_size, split_samples
from thalweg.tasks import RBM, enumerate_exactly, ising_chain

N, P = 60, 150


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(n=N, p=P, *, dtype=torch.float64, seed=0, gap=0.5):
    """Log-derivatives with a decaying spectrum and a mean, and energies they explain in part."""
    generator = seeded(seed)
    decay = torch.arange(1, p + 1, dtype=torch.float64) ** -0.5
    O = torch.randn(n, p, generator=generator, dtype=dtype) * decay + 0.3
    truth = torch.randn(p, generator=generator, dtype=dtype)
    noise = torch.randn(n, generator=generator, dtype=dtype)
    return O, -3 + O @ truth / p**0.5 + gap * noise


def centered(O, e, weight=None):
    """A and y."""
    weight = torch.full((len(e),), 1 / len(e), dtype=torch.float64) if weight is None else weight
    root = weight.sqrt()
    return root[:, None] * (O - weight.to(O.dtype) @ O), root * (e - weight.to(e.dtype) @ e)


def primal(A, y, shift):
    """(AᴴA + λI)⁻¹Aᴴy."""
    return torch.linalg.solve(A.mH @ A + shift * torch.eye(A.shape[1], dtype=A.dtype), A.mH @ y)


def close(left, right, tolerance):
    return float((left - right).norm()) <= tolerance * float(right.norm())


# The ridge solve


@pytest.mark.parametrize(("n", "p"), [(60, 150), (150, 40)])
@pytest.mark.parametrize("shift", [1e-3, 0.1, 10.0])
def test_dual_and_primal_agree(n, p, shift):
    O, e = batch(n, p)
    found = ms_sr_direction(O, e, shifts=[shift])
    assert close(found.delta, primal(*centered(O, e), shift), 1e-8)


def test_a_large_shift_gives_the_gradient():
    O, e = batch()
    A, y = centered(O, e)
    assert close(1e9 * ms_sr_direction(O, e, shifts=[1e9]).delta, A.T @ y, 1e-7)


def test_a_small_shift_interpolates():
    O, e = batch()
    A, y = centered(O, e)
    assert (y - A @ ms_sr_direction(O, e, shifts=[1e-10]).delta).norm() <= 1e-6 * y.norm()


def test_several_shifts_average_their_solves():
    O, e = batch()
    A, y = centered(O, e)
    found = ms_sr_direction(O, e, shifts=[0.01, 1.0], weights=[3.0, 1.0])
    assert close(found.delta, 0.75 * primal(A, y, 0.01) + 0.25 * primal(A, y, 1.0), 1e-10)
    assert found.filter(2.0) == pytest.approx(0.75 / 2.01 + 0.25 / 3.0)
    s = torch.linalg.eigvalsh(A @ A.T).clamp(min=0)
    dimension = [(s / (s + shift)).sum() for shift in (0.01, 1.0)]
    assert found.effective_dimension == pytest.approx(float(sum(dimension)) / 2, rel=1e-9)
    assert found.tangent_norm == pytest.approx(float((A @ found.delta).norm()), rel=1e-10)


@pytest.mark.parametrize("settings", [{}, {"mode": "shards", "n_solves": 2}, {"shifts": "gcv"}])
def test_what_does_not_matter(settings):
    O, e = batch()
    found = ms_sr_direction(O, e, generator=seeded(), **settings).delta
    offset = torch.randn(P, generator=seeded(1), dtype=torch.float64)
    moved = ms_sr_direction(O + offset, e + 7, generator=seeded(), **settings).delta
    assert close(moved, found, 1e-9)
    Q, _ = torch.linalg.qr(torch.randn(P, P, generator=seeded(2), dtype=torch.float64))
    rotated = ms_sr_direction(O @ Q, e, generator=seeded(), **settings).delta
    assert close(rotated, Q.T @ found, 1e-9)
    scaled = ms_sr_direction(O, 4 * e, generator=seeded(), **settings).delta
    assert close(scaled, 4 * found, 1e-9)


def test_same_seed_same_direction():
    O, e = batch()
    first, second = (ms_sr_direction(O, e, generator=seeded(3)).delta for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, ms_sr_direction(O, e, generator=seeded(4)).delta)


@pytest.mark.parametrize("value", [-2.0, 0.0, 1e6])
def test_constant_energy_gives_no_step(value):
    O, _ = batch()
    found = ms_sr_direction(O, torch.full((N,), value))
    assert found.status == "eigenstate"
    assert torch.equal(found.delta, torch.zeros(P, dtype=torch.float64))
    assert len(found.shifts) == 0


def test_constant_log_derivatives_give_no_step():
    _, e = batch()
    for settings in ({}, {"shifts": "gcv"}, {"shifts": [0.1]}):
        found = ms_sr_direction(torch.ones(N, 5, dtype=torch.float64), e, **settings)
        assert torch.equal(found.delta, torch.zeros(5, dtype=torch.float64))
        assert found.tangent_norm == 0


# Cross-fitting


def naive(O, e, folds, grid, mode, holomorphic=None):
    """MS-SR by primal solves: shifts, direction, risks and held-out alignment."""
    deltas, shifts, risks, predicted, targets = [], [], [], [], []
    everything = torch.arange(len(e))
    for k, fold in enumerate(folds):
        others = [f for j, f in enumerate(folds) if j != k]
        fitted = everything[~torch.isin(everything, fold)] if mode == "kfold" else fold
        judges = [fold] if mode == "kfold" else others
        A, y = stack(*centered(O[fitted], e[fitted]), holomorphic)
        tests = [stack(*centered(O[j], e[j]), holomorphic) for j in judges]
        candidates = [primal(A, y, shift) for shift in grid]
        risk = torch.tensor(
            [
                np.mean([float((y_j - A_j @ d).abs().square().sum()) for A_j, y_j in tests])
                for d in candidates
            ]
        )
        best = int(risk.argmin())
        deltas.append(candidates[best])
        shifts.append(float(grid[best]))
        risks.append(risk)
        predicted += [A_j @ candidates[best] for A_j, _ in tests]
        targets += [y_j for _, y_j in tests]
    x, t = torch.cat(predicted), torch.cat(targets)
    alignment = float(torch.vdot(x, t).real / (x.norm() * t.norm()))
    return torch.stack(deltas), shifts, torch.stack(risks).mean(0), alignment


def stack(A, y, holomorphic):
    if not A.is_complex() or holomorphic:
        return A, y
    return torch.cat([A.real, A.imag]), torch.cat([y.real, y.imag])


KINDS = [(torch.float64, None), (torch.complex128, False), (torch.complex128, True)]


@pytest.mark.parametrize(("dtype", "holomorphic"), KINDS)
@pytest.mark.parametrize(("mode", "n_solves"), [("kfold", 5), ("shards", 2), ("shards", 3)])
def test_cross_fitting_equals_the_direct_computation(dtype, holomorphic, mode, n_solves):
    O, e = batch(dtype=dtype)
    grid = torch.logspace(-4, 1, 11, dtype=torch.float64)
    found = ms_sr_direction(
        O,
        e,
        mode=mode,
        n_solves=n_solves,
        grid=grid,
        holomorphic=holomorphic,
        generator=seeded(5),
    )
    folds = split_samples(N, n_solves, seeded(5))
    deltas, shifts, risk, alignment = naive(O, e, folds, grid, mode, holomorphic)
    assert found.shifts.tolist() == shifts
    assert close(found.delta, deltas.mean(0), 1e-10)
    assert close(found.risk_curve, risk, 1e-10)
    assert found.alignment == pytest.approx(alignment, rel=1e-9)
    assert found.delta.dtype == (dtype if holomorphic else torch.float64)


def test_shared_shifts_filter_the_full_batch():
    O, e = batch()
    found = ms_sr_direction(O, e, mode="shared", n_solves=2, generator=seeded(5))
    shards = ms_sr_direction(O, e, mode="shards", n_solves=2, generator=seeded(5))
    assert close(found.shifts, shards.shifts / 2, 1e-14)
    solves = [ms_sr_direction(O, e, shifts=[float(shift)]).delta for shift in found.shifts]
    assert close(found.delta, torch.stack(solves).mean(0), 1e-10)


def test_equal_shared_shifts_are_one_shift():
    O, e = batch()
    found = ms_sr_direction(O, e, mode="shared", n_solves=3, grid=[0.6], generator=seeded())
    assert close(found.delta, ms_sr_direction(O, e, shifts=[0.2]).delta, 1e-10)


@pytest.mark.parametrize(("mode", "n_solves"), [("kfold", 5), ("shards", 3)])
def test_variance_between_solves(mode, n_solves):
    O, e = batch()
    shift = 0.05
    found = ms_sr_direction(O, e, mode=mode, n_solves=n_solves, grid=[shift], generator=seeded(5))
    folds = split_samples(N, n_solves, seeded(5))
    deltas, *_ = naive(O, e, folds, [shift], mode)
    squares = float((deltas - deltas.mean(0)).square().sum())
    wanted = squares * ((n_solves - 1) / n_solves if mode == "kfold" else 1 / (n_solves - 1))
    assert float(found.variance_curve[0]) == pytest.approx(wanted, rel=1e-9)


def test_variance_falls_with_the_shift():
    O, e = batch(gap=2.0)
    curve = ms_sr_direction(O, e, mode="shards", n_solves=2, generator=seeded()).variance_curve
    assert bool((curve[1:] < curve[:-1]).all())


@pytest.mark.parametrize(("n", "p"), [(60, 150), (150, 40)])
def test_gcv_equals_its_definition(n, p):
    """N' RSS/tr(I - H)² with the N' = N - 1 dimensions that the mean leaves."""
    O, e = batch(n, p)
    found = ms_sr_direction(O, e, n_solves=1)
    A, y = centered(O, e)
    differences = torch.linalg.qr(torch.ones(n, 1, dtype=torch.float64), mode="complete").Q[:, 1:]
    A, y = differences.T @ A, differences.T @ y
    eye = torch.eye(n - 1, dtype=torch.float64)
    scores = []
    for shift in found.grid:
        residual = shift * torch.linalg.inv(A @ A.T + shift * eye)
        free = torch.trace(residual) / (n - 1)
        scores.append(float((residual @ y).square().sum() / (n - 1) / free**2))
    assert np.allclose(found.risk_curve, scores, rtol=1e-6)
    assert found.shifts[0] == found.grid[int(np.argmin(scores))]
    assert torch.equal(found.delta, ms_sr_direction(O, e, shifts="gcv").delta)
    assert math.isnan(found.alignment)


def test_gcv_is_not_minimized_by_interpolation():
    O, e = batch(gap=3.0)
    found = ms_sr_direction(O, e, shifts="gcv")
    assert float(found.shifts[0]) > 1e-3 * float(found.grid[-1] / 10)


# Samples: weights, duplicates, chains, systems


def test_weights_count_like_repetitions():
    O, e = batch(40)
    counts = torch.arange(40) % 3 + 1
    rows = torch.repeat_interleave(torch.arange(40), counts)
    weight = counts.double() / counts.sum()
    repeated = ms_sr_direction(O[rows], e[rows], generator=seeded())
    weighted = ms_sr_direction(O, e, sample_weight=weight, generator=seeded())
    assert repeated.n_distinct == weighted.n_distinct == 40
    assert close(repeated.shifts, weighted.shifts, 1e-12)
    assert close(repeated.delta, weighted.delta, 1e-10)
    A, y = centered(O, e, weight)
    found = ms_sr_direction(O, e, shifts=[0.1], sample_weight=weight)
    assert close(found.delta, primal(A, y, 0.1), 1e-9)


def test_samples_without_weight_do_not_count():
    O, e = batch()
    weight = torch.zeros(N, dtype=torch.float64)
    weight[:45] = 1 / 45
    half = ms_sr_direction(O[:45], e[:45], generator=seeded())
    found = ms_sr_direction(O, e, sample_weight=weight, generator=seeded())
    assert close(found.delta, half.delta, 1e-10)


def test_duplicates_do_not_reveal_what_a_fold_is_judged_on():
    """Merged, every sample twice is the batch itself; a plain split would interpolate the noise."""
    O, e = batch(gap=3.0)
    once = ms_sr_direction(O, e, generator=seeded())
    twice = ms_sr_direction(torch.cat([O, O]), torch.cat([e, e]), generator=seeded())
    assert close(twice.delta, once.delta, 1e-9)
    noisy = O + 1e-3 * torch.randn(O.shape, generator=seeded(1), dtype=torch.float64)
    near = ms_sr_direction(torch.cat([O, noisy]), torch.cat([e, e]), generator=seeded())
    assert near.n_distinct == 2 * N
    assert float(near.shifts.max()) < 0.1 * float(once.shifts.median())


def test_few_distinct_samples_make_fewer_folds():
    O, e = batch(8)
    rows = torch.arange(80) % 8
    with pytest.warns(UserWarning, match="8 distinct samples do not fill 5 folds; .* into 4"):
        found = ms_sr_direction(O[rows], e[rows], generator=seeded())
    assert len(found.shifts) == 4
    with pytest.warns(UserWarning, match="into 1"):
        found = ms_sr_direction(O[rows % 3], e[rows % 3])
    assert close(found.delta, ms_sr_direction(O[rows % 3], e[rows % 3], shifts="gcv").delta, 1e-12)


def test_folds_are_even_and_keep_chains_together():
    folds = split_samples(103, 5, seeded())
    assert sorted(torch.cat(folds).tolist()) == list(range(103))
    assert sorted(len(fold) for fold in folds) == [20, 20, 21, 21, 21]
    chain = torch.repeat_interleave(torch.arange(13), torch.arange(13) + 2)
    folds = split_samples(len(chain), 4, seeded(), chain)
    assert sorted(torch.cat(folds).tolist()) == list(range(len(chain)))
    owners = [set(chain[fold].tolist()) for fold in folds]
    assert sum(len(each) for each in owners) == 13
    assert max(map(len, folds)) - min(map(len, folds)) <= 4
    system = torch.arange(60) % 3
    folds = split_samples(60, 5, seeded(), None, system)
    assert all(torch.bincount(system[fold]).tolist() == [4, 4, 4] for fold in folds)


def test_chains_are_not_split():
    """Copies of one sample with tiny noise, as one chain: a split chain would interpolate."""
    O, e = batch(gap=3.0)
    noise = 1e-3 * torch.randn(2 * N, P, generator=seeded(1), dtype=torch.float64)
    O2, e2 = torch.cat([O, O]) + noise, torch.cat([e, e])
    chain = torch.arange(N).repeat(2)
    split = ms_sr_direction(O2, e2, generator=seeded())
    whole = ms_sr_direction(O2, e2, generator=seeded(), chain_id=chain.numpy())
    assert float(split.shifts.max()) < 0.1 * float(whole.shifts.median())


def test_systems_are_centered_separately():
    O, e = batch(80)
    system = torch.arange(80) % 2 * 7 - 1
    offset = torch.randn(P, generator=seeded(1), dtype=torch.float64)
    second = (system == 6).double()
    for settings in ({}, {"shifts": [0.1]}, {"shifts": "gcv"}, {"mode": "shared"}):
        settings |= {"system_id": system}
        found = ms_sr_direction(O, e, generator=seeded(), **settings).delta
        moved = ms_sr_direction(
            O + second[:, None] * offset, e + 30 * second, generator=seeded(), **settings
        ).delta
        assert close(moved, found, 1e-8)
    pieces = [centered(O[system == k], e[system == k]) for k in (-1, 6)]
    A = torch.cat([piece[0] for piece in pieces]) / 2**0.5
    y = torch.cat([piece[1] for piece in pieces]) / 2**0.5
    found = ms_sr_direction(O, e, shifts=[0.1], system_id=system)
    assert close(found.delta, primal(A, y, 0.1), 1e-9)


def test_effective_sample_size_of_an_autoregressive_chain():
    """N (1 - ρ)/(1 + ρ); relative error of the estimate about √(2 · 2M/N) with M ≈ 20 lags."""
    rho, n_chains, length = 0.7, 64, 1000
    x = torch.randn(n_chains, length, generator=seeded(), dtype=torch.float64)
    for t in range(1, length):
        x[:, t] = rho * x[:, t - 1] + (1 - rho**2) ** 0.5 * x[:, t]
    chain = torch.repeat_interleave(torch.arange(n_chains), length)
    wanted = n_chains * length * (1 - rho) / (1 + rho)
    assert effective_sample_size(x.flatten(), chain) == pytest.approx(wanted, rel=0.1)
    # The order of the chains in the batch does not matter, that within a chain does.
    assert effective_sample_size(x.T.flatten(), chain.reshape(64, -1).T.flatten()) == (
        pytest.approx(wanted, rel=0.1)
    )
    independent = torch.randn(4000, generator=seeded(1), dtype=torch.float64)
    assert effective_sample_size(independent, torch.arange(4000)) == 4000
    assert effective_sample_size(torch.ones(10), torch.zeros(10, dtype=torch.int64)) == 10


def test_autocorrelated_chains_are_warned_of():
    O, e = batch(80)
    chain = torch.repeat_interleave(torch.arange(10), 8)
    stuck = e[::8].repeat_interleave(8) + 0.01 * e
    with pytest.warns(
        UserWarning, match="effective sample size, 1?[0-9] of 80, is below a quarter"
    ):
        ms_sr_direction(O, stuck, chain_id=chain, generator=seeded())
    ms_sr_direction(O, e, chain_id=chain, generator=seeded())


# Precision


@pytest.mark.parametrize(
    ("dtype", "tolerance", "floor"),
    [(torch.float32, 1e-5, 1e-6), (torch.bfloat16, 0.1, 1e-3), (torch.float64, 1e-12, 1e-8)],
)
def test_lower_precision(dtype, tolerance, floor):
    O, e = batch()
    # With shifts of one grid; by default it begins where the precision ends.
    grid = torch.logspace(-2, 1, 7, dtype=torch.float64)
    exact = ms_sr_direction(O, e, grid=grid, generator=seeded()).delta
    rounded = ms_sr_direction(O.to(dtype), e, grid=grid, generator=seeded()).delta
    assert close(rounded.double(), exact, tolerance)
    found = ms_sr_direction(O.to(dtype), e, generator=seeded())
    assert found.delta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(found.grid[0]) == pytest.approx(1e-1 * floor * float(found.grid[-1]), rel=1e-9)
    assert len(found.grid) == 25


def test_float32_with_a_large_mean():
    """Columns are centered before they are multiplied: the mean does not eat the digits."""
    O, e = batch()
    # A multiple of 2⁻⁸ moves O without rounding the float32 numbers any further.
    rounded = (O * 2**8).round() / 2**8
    found = ms_sr_direction((rounded + 1000).float(), e, shifts=[0.1]).delta.double()
    assert close(found, ms_sr_direction(rounded, e, shifts=[0.1]).delta, 1e-4)


def test_columns_and_rows_in_several_chunks(monkeypatch):
    from thalweg.curvature import tangent_kernel

    O, e = batch(dtype=torch.complex128)
    whole = ms_sr_direction(O, e, shifts=[0.1], holomorphic=False).delta
    monkeypatch.setattr(tangent_kernel, "CHUNK_NUMBERS", 7 * N)
    monkeypatch.setattr(tangent_kernel, "BLOCK_ROWS", 11)
    assert close(ms_sr_direction(O, e, shifts=[0.1], holomorphic=False).delta, whole, 1e-11)


def test_arrays_are_taken_too():
    O, e = batch()
    found = ms_sr_direction(O.numpy(), e.numpy(), generator=seeded())
    assert torch.equal(found.delta, ms_sr_direction(O, e, generator=seeded()).delta)


def test_only_the_real_energy_counts_for_a_real_psi():
    O, e = batch()
    noise = torch.randn(N, generator=seeded(1), dtype=torch.float64)
    found = ms_sr_direction(O, torch.complex(e, noise), generator=seeded())
    assert torch.equal(found.delta, ms_sr_direction(O, e, generator=seeded()).delta)


# The population


@pytest.fixture(scope="module")
def ring():
    """An Ising ring of eight spins, its exact ensemble and log-derivatives."""
    psi, system = RBM(8, 30, scale=0.1, generator=seeded()), ising_chain(8)
    spins = torch.as_tensor(system.states()).double()
    exact = enumerate_exactly(system.matrix(), psi(spins).detach(), spins)
    return exact, log_derivatives(psi, spins)


def test_risk_of_the_best_direction_is_the_gap(ring):
    exact, O = ring
    O = O[:, :40]
    A, y = centered(O, exact.local_energy, exact.probability)
    best = torch.linalg.lstsq(A, y, driver="gelsd").solution
    report = shift_risk_report(
        O, exact.local_energy, exact.probability, batch_size=64, n_batches=4, generator=seeded()
    )
    assert report.gap == pytest.approx(float((y - A @ best).square().sum()), rel=1e-9)
    assert report.gap > 1e-3 * report.energy_variance
    delta = torch.randn(40, generator=seeded(1), dtype=torch.float64)
    assert abs(float((A @ delta) @ (y - A @ best))) < 1e-10
    assert report.energy_variance == pytest.approx(float(y @ y), rel=1e-12)


def test_risk_is_gap_plus_bias_plus_variance(ring):
    exact, O = ring
    O = O[:, :40]
    report = shift_risk_report(
        O, exact.local_energy, exact.probability, batch_size=64, n_batches=6, generator=seeded()
    )
    parts = report.gap + report.bias + report.variance
    assert torch.allclose(report.mean_risk, parts, rtol=1e-8)
    assert bool((report.variance[:-12:4] > report.variance[4:-8:4]).all())
    assert report.variance[-1] < 0.1 * report.variance[0]
    assert report.grid[0] < report.best_shift < report.grid[-1]
    assert float(report.multi_shift_risk.mean()) < 0.5 * float(report.mean_risk[0])


def test_risks_are_those_of_the_directions(ring):
    exact, O = ring
    grid = [0.01, 1.0]
    report = shift_risk_report(
        O, exact.local_energy, exact.probability, grid, 3, batch_size=80, generator=seeded(7)
    )
    A, y = centered(O, exact.local_energy, exact.probability)
    generator = seeded(7)
    for k in range(3):
        rows = exact.draw(80, generator)
        multi = ms_sr_direction(O[rows], exact.local_energy[rows], generator=generator)
        deltas = [
            *(ms_sr_direction(O[rows], exact.local_energy[rows], shifts=[g]).delta for g in grid),
            multi.delta,
        ]
        wanted = [float((y - A @ delta).square().sum()) for delta in deltas]
        found = [*report.risk[k].tolist(), float(report.multi_shift_risk[k])]
        assert found == pytest.approx(wanted, rel=1e-8)


@pytest.mark.parametrize(("dtype", "holomorphic"), KINDS)
def test_risk_on_the_rest_of_a_pool(dtype, holomorphic):
    O, e = batch(200, 50, dtype=dtype)
    report = shift_risk_report(
        O, e, grid=[0.1], n_batches=2, batch_size=60, holomorphic=holomorphic, generator=seeded(2)
    )
    order = torch.randperm(200, generator=seeded(2))
    mine, rest = order[:60], order[60:]
    delta = primal(*stack(*centered(O[mine], e[mine]), holomorphic), 0.1)
    A, y = stack(*centered(O[rest], e[rest]), holomorphic)
    wanted = float((y - A @ delta).abs().square().sum())
    assert float(report.risk[0, 0]) == pytest.approx(wanted, rel=1e-9)
    assert math.isnan(report.gap)
    assert report.batch_size == 60


def test_plots(ring):
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    exact, O = ring
    report = shift_risk_report(
        O, exact.local_energy, exact.probability, batch_size=64, n_batches=2, generator=seeded()
    )
    labels = [text.get_text() for text in report.plot().get_legend().get_texts()]
    assert labels == ["risk of SR", "variance", "bias", "gap", "risk of MS-SR"]
    found = ms_sr_direction(*batch(), generator=seeded())
    _, ax = plt.subplots()
    assert found.plot(ax) is ax
    assert len(ax.lines) == 2 + len(found.shifts)
    plt.close("all")
    with pytest.raises(ValueError, match="there is no risk curve"):
        ms_sr_direction(*batch(), shifts=[0.1]).plot()


# Bad input


def bad(change, match, error=ValueError, **settings):
    return pytest.param(change, settings, error, match)


def with_nan(tensor, index):
    tensor = tensor.clone()
    tensor[index] = math.nan
    return tensor


@pytest.mark.parametrize(
    ("change", "settings", "error", "match"),
    [
        bad(lambda O, e: (O[0], e), r"O must have shape \(N, P\)"),
        bad(lambda O, e: (O[:, :0], e), r"P >= 1, got \(60, 0\)"),
        bad(lambda O, e: (O, e[:-1]), r"e_loc must have shape \(60,\)"),
        bad(lambda O, e: (O[:1], e[:1]), "N must be >= 2"),
        bad(lambda O, e: (O[:39], e[:39]), "N must be >= 8 n_solves = 40, got 39"),
        bad(lambda O, e: (with_nan(O, (7, 3)), e), "NaN or infinity for sample 7"),
        bad(lambda O, e: (O, with_nan(e, [4, 9])), "got nan for sample 4 and 1 more"),
        bad(lambda O, e: ("O", e), "O must be a tensor or an array", TypeError),
        bad(lambda O, e: (torch.complex(O, O), e), "pass holomorphic=False for real parameters"),
        bad(lambda O, e: (O, e), "holomorphic=True needs a complex O", holomorphic=True),
        bad(lambda O, e: (O, e), "holomorphic must be None", holomorphic="no"),
        bad(lambda O, e: (O, e), "n_solves must be an integer >= 1", n_solves=0),
        bad(lambda O, e: (O, e), "n_solves must be an integer", TypeError, n_solves=2.0),
        bad(lambda O, e: (O, e), "mode must be one of 'kfold'", mode="folds"),
        bad(lambda O, e: (O, e), "shifts must be one of 'auto'", shifts="best"),
        bad(lambda O, e: (O, e), "shifts must be finite and > 0", shifts=[0.1, 0.0]),
        bad(lambda O, e: (O, e), "shifts must be finite and > 0", shifts=[math.inf]),
        bad(lambda O, e: (O, e), r"shifts must have shape \(K,\)", shifts=0.1),
        bad(lambda O, e: (O, e), "grid must be finite and > 0", grid=[-1.0]),
        bad(lambda O, e: (O, e), "weights go with an array of shifts", weights=[1.0]),
        bad(lambda O, e: (O, e), r"weights must have shape \(1,\)", shifts=[1], weights=[1, 2]),
        bad(lambda O, e: (O, e), "not all 0", shifts=[1.0], weights=[0.0]),
        bad(lambda O, e: (O, e), "sum to 1, got 60", sample_weight=torch.ones(N)),
        bad(lambda O, e: (O, e), r"sample_weight must have shape \(60,\)", sample_weight=[1.0]),
        bad(lambda O, e: (O, e), "finite and >= 0", sample_weight=[-1.0] + [2 / 59] * 59),
        bad(lambda O, e: (O, e), r"chain_id must have shape \(60,\)", chain_id=[1, 2]),
        bad(lambda O, e: (O, e), "must hold integers", TypeError, system_id=torch.ones(N)),
        bad(lambda O, e: (O, e), "centered must be one of", centered=1),
        bad(lambda O, e: (O, e), "means of O are not 0", centered=True),
        bad(lambda O, e: (O - O.mean(0), e), "means of e_loc are not 0", centered=True),
    ],
)
def test_bad_input(change, settings, error, match):
    with pytest.raises(error, match=match):
        ms_sr_direction(*change(*batch()), **settings)


def test_centered_input_is_taken_as_such():
    O, e = batch()
    found = ms_sr_direction(O - O.mean(0), e - e.mean(), centered=True, generator=seeded())
    assert close(found.delta, ms_sr_direction(O, e, generator=seeded()).delta, 1e-10)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"n_batches": 1}, "n_batches must be an integer >= 2"),
        ({"batch_size": 1}, "batch_size must be an integer >= 2"),
        ({"batch_size": 59}, "batch_size must be an integer .*<= 58"),
        ({"grid": [0.0]}, "grid must be finite and > 0"),
        ({"p": torch.ones(N)}, "sample_weight must sum to 1"),
    ],
)
def test_bad_input_of_the_report(settings, match):
    with pytest.raises(ValueError, match=match):
        shift_risk_report(*batch(), **settings)


def test_the_filter_of_no_step_is_zero():
    none = torch.zeros(0, dtype=torch.float64)
    assert float(MSSRResult(none, none, none, "eigenstate").filter(1.0)) == 0
