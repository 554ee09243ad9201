"""Local search: monotone, locally optimal, the same on the CPU kernels and in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from thalweg.combinatorial import batched_local_search, greedy_coloring
from thalweg.combinatorial import local_search_kernels as kernels
from thalweg.combinatorial.ising_problem import prepare
from thalweg.combinatorial.local_search import (
    _MINUS_LOG_U,
    METHODS,
    LocalSearch,
    _torch_classes,
)
from thalweg.tasks import hub_heavy, planted_geometric, regular_glass, toroidal_glass


def random_spins(n, columns, seed=0):
    return np.random.default_rng(seed).choice(np.array([-1, 1], dtype=np.int8), size=(n, columns))


def energies(J, S, h=None):
    S = S.astype(np.float64)
    linear = 0 if h is None else h @ S
    return -(0.5 * np.einsum("ir,ir->r", S, J @ S) + linear)


def gains(J, S, h=None):
    """What flipping each spin adds to ½ sᵀJs + hᵀs."""
    S = S.astype(np.float64)
    return -2 * S * (J @ S + (0 if h is None else h[:, None]))


INSTANCES = {
    "regular": lambda: regular_glass(400, 3, rng=0),
    "hubs": lambda: hub_heavy(400, 2400, signed=True, rng=1),
    "torus": lambda: toroidal_glass(16, 20, rng=2),
    "dense": lambda: sparse.csr_array(
        np.where(np.eye(40), 0, np.sign(np.add.outer(np.arange(40), np.arange(40)) % 3 - 0.5))
    ),
    "weighted": lambda: _weighted(300),
}


def _weighted(n):
    J = regular_glass(n, 5, rng=3)
    upper = sparse.triu(J, 1).tocsr()
    upper.data = np.random.default_rng(4).standard_normal(upper.nnz)
    return sparse.csr_array(upper + upper.T)


@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.parametrize("method", METHODS)
def test_no_column_gets_worse_and_no_flip_improves_the_result(name, method):
    J, S = INSTANCES[name](), random_spins(INSTANCES[name]().shape[0], 6)
    result = batched_local_search(J, S, method=method, sweeps=60, rng=0)
    assert np.all(result.energies <= energies(J, S) + 1e-9)
    # float32 fields of at most 40 unit weights are off by less than 1e-5.
    tolerance = 1e-4 if name == "weighted" else 0.0
    assert gains(J, result.spins).max() <= tolerance
    np.testing.assert_allclose(result.energies, energies(J, result.spins), rtol=1e-6, atol=0)
    assert set(np.unique(result.spins)) <= {-1, 1}


@pytest.mark.parametrize("method", METHODS)
def test_a_field_is_part_of_the_energy(method):
    J, S = regular_glass(200, 3, rng=5), random_spins(200, 4)
    h = np.random.default_rng(6).integers(-3, 4, 200).astype(float)
    result = batched_local_search(J, S, h=h, method=method, sweeps=40, rng=0)
    assert np.all(result.energies <= energies(J, S, h))
    np.testing.assert_array_equal(result.energies, energies(J, result.spins, h))
    assert gains(J, result.spins, h).max() <= 0


def test_the_trivial_path_changes_nothing():
    J = regular_glass(100, 3, rng=0)
    S = batched_local_search(J, random_spins(100, 3)).spins
    again = batched_local_search(J, S)
    np.testing.assert_array_equal(again.spins, S)
    assert again.sweeps == 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(["greedy", "anneal"]))
def test_cpu_kernels_and_torch_sweeps_give_the_same_spins(seed, method):
    rng = np.random.default_rng(seed)
    problem = prepare(regular_glass(int(rng.integers(20, 200)), 4, rng=rng), None)
    cpu = LocalSearch(problem, torch.device("cpu"))
    other = LocalSearch(problem, torch.device("cpu"))
    other._classes = _torch_classes(other)  # what a GPU runs
    first = torch.from_numpy(random_spins(problem.size, 3, seed))
    second = first.clone()
    steps = cpu.run(first, method, 30, seed=seed)
    assert other.run(second, method, 30, seed=seed) == steps
    assert torch.equal(first, second)


def test_the_gpu_scores_agree_with_the_kernels(monkeypatch):
    J = sparse.block_diag([toroidal_glass(5, 6, rng=0), toroidal_glass(4, 4, rng=1)], format="csr")
    problem = prepare(sparse.csr_array(J), None)
    search = LocalSearch(problem, torch.device("cpu"))
    S = torch.from_numpy(random_spins(problem.size, 5))
    kernel = search.scores(S)
    np.testing.assert_array_equal(kernel, search._torch_scores(S))
    np.testing.assert_array_equal(-kernel.sum(axis=0), energies(problem.couplings, S.numpy()))
    assert kernel.shape == (2, 5)


def test_large_classes_are_swept_in_parallel_with_the_same_result():
    J = planted_geometric(4 * kernels._PARALLEL_FROM, 4.0, rng=0)
    problem = prepare(J, None)
    search = LocalSearch(problem, torch.device("cpu"))
    assert np.diff(search._starts).max() > kernels._PARALLEL_FROM
    other = LocalSearch(problem, torch.device("cpu"))
    other._classes = _torch_classes(other)
    for method in ("greedy", "anneal"):
        first = torch.from_numpy(random_spins(problem.size, 2))
        second = first.clone()
        search.run(first, method, 5, seed=1)
        other.run(second, method, 5, seed=1)
        assert torch.equal(first, second)


def test_gauge_transformed_states_have_the_same_energies():
    J, S = regular_glass(300, 3, rng=0), random_spins(300, 4)
    sigma = random_spins(300, 1, seed=9)[:, 0].astype(float)
    turned = sparse.csr_array(sparse.diags_array(sigma) @ J @ sparse.diags_array(sigma))
    one = batched_local_search(J, S)
    two = batched_local_search(turned, S * sigma[:, None])
    np.testing.assert_array_equal(one.energies, two.energies)
    np.testing.assert_array_equal(two.spins, one.spins * sigma[:, None])


def test_the_same_seed_gives_the_same_states_and_another_does_not():
    J, S = regular_glass(500, 3, rng=0), random_spins(500, 2)
    for method in ("anneal", "tabu", "half"):
        one, two, three = (
            batched_local_search(J, S, method=method, sweeps=20, rng=seed).spins
            for seed in (1, 1, 2)
        )
        np.testing.assert_array_equal(one, two)
        assert np.any(one != three)


def test_annealing_beats_greedy_and_tabu_reaches_the_ground_state_of_a_small_glass():
    J, S = toroidal_glass(6, 6, rng=0), random_spins(36, 16)
    states = 2 * ((np.arange(2**20)[:, None] >> np.arange(20)) & 1) - 1  # a torus of 20 cells
    small = toroidal_glass(4, 5, rng=1)
    ground = energies(small, states.T.astype(np.int8)).min()
    tabu = batched_local_search(small, random_spins(20, 4), method="tabu", sweeps=50, rng=0)
    assert tabu.energies.min() == ground
    greedy = batched_local_search(J, S).energies
    annealed = batched_local_search(J, S, method="anneal", rng=0).energies
    assert annealed.mean() < greedy.mean()


def test_a_run_that_loses_the_best_state_gives_it_back():
    """A torus of ferromagnetic couplings, already aligned, heated far above its melting point."""
    J = toroidal_glass(30, 30, negative=0.0, rng=0)
    aligned = np.ones((900, 3), dtype=np.int8)
    result = batched_local_search(J, aligned, method="anneal", sweeps=1, temperature=10.0, rng=0)
    np.testing.assert_array_equal(result.spins, aligned)


def test_tabu_search_follows_its_definition():
    """Against a plain implementation: the best flip that is not tabu, fields from scratch."""
    n, steps, tenure, seed = 40, 200, 4, 5
    J = _weighted(n)
    data = J.data.astype(np.float32)
    J = sparse.csr_array((data, J.indices, J.indptr), shape=J.shape)
    s = random_spins(n, 1)[:, 0].astype(float)
    released = np.zeros(n, dtype=int)
    value = best_value = 0.0
    best = s.copy()
    for step in range(steps):
        aligned = np.where(released <= step, s * (J @ s), np.inf)
        v = int(np.argmin(aligned))
        value -= 2 * aligned[v]
        s[v] = -s[v]
        released[v] = step + 1 + tenure + kernels._counter(seed, step, 0) % 10
        if value > best_value:
            best_value, best = value, s.copy()
    S = random_spins(n, 1)
    kernels.tabu_columns(
        J.indptr.astype(np.int32), J.indices.astype(np.int32), data, S, steps, tenure, seed
    )
    np.testing.assert_array_equal(S[:, 0], best)


def test_metropolis_samples_the_boltzmann_distribution():
    """Two coupled spins at constant temperature: P(aligned) = 1 / (1 + exp(-2/T))."""
    J = sparse.csr_array([[0.0, 1.0], [1.0, 0.0]])
    problem = prepare(J, None, reorder=False)
    search = LocalSearch(problem, torch.device("cpu"))
    columns, temperature = 20_000, 1.5
    S = torch.from_numpy(random_spins(2, columns))
    kernels.anneal_sweeps(
        *search._csr, search._members, search._starts, S.numpy(),
        np.full(60, temperature, dtype=np.float32), 7, _MINUS_LOG_U,
    )  # fmt: skip
    aligned = float((S[0] == S[1]).double().mean())
    expected = 1 / (1 + np.exp(-2 / temperature))
    # Independent columns: five standard deviations of a binomial share.
    assert abs(aligned - expected) < 5 * np.sqrt(expected * (1 - expected) / columns)


def test_the_counter_is_uniform():
    bits = np.array([kernels.mix(i) for i in range(2**14)])
    counts, _ = np.histogram(bits, bins=64, range=(0, 2**32))
    chi2 = ((counts - 256) ** 2 / 256).sum()
    assert 20 < chi2 < 120  # 63 degrees of freedom: mean 63, sd 11


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_colorings_are_proper_and_use_at_most_degree_plus_one_colors(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 60))
    J = hub_heavy(n, 3 * n, rng=rng)
    J.indices, J.indptr = J.indices.astype(np.int32), J.indptr.astype(np.int32)
    colors = greedy_coloring(J.indptr, J.indices)
    edges = J.tocoo()
    assert np.all(colors[edges.row] != colors[edges.col])
    assert colors.max() <= np.diff(J.indptr).max()


def test_problems_without_couplings_stay_as_they_are():
    S = random_spins(5, 3)
    for method in METHODS:
        result = batched_local_search(sparse.csr_array((5, 5)), S, method=method, rng=0)
        np.testing.assert_array_equal(result.energies, 0)


def test_bad_input():
    J = regular_glass(10, 3, rng=0)
    S = random_spins(10, 2)
    with pytest.raises(ValueError, match=r"S must be an array of -1 and \+1 of shape \(10, R\)"):
        batched_local_search(J, S[:9])
    with pytest.raises(ValueError, match="S must be an array of -1 and"):
        batched_local_search(J, S * 2)
    with pytest.raises(ValueError, match="S must be an array of -1 and"):
        batched_local_search(J, S[:, 0])
    with pytest.raises(ValueError, match="method must be one of"):
        batched_local_search(J, S, method="swap")
    with pytest.raises(ValueError, match="sweeps must be an integer >= 1"):
        batched_local_search(J, S, sweeps=0)
    with pytest.raises(ValueError, match="temperature must be a finite number > 0"):
        batched_local_search(J, S, method="anneal", temperature=0.0)
    with pytest.raises(ValueError, match=r"h must have shape \(10,\)"):
        batched_local_search(J, S, h=np.ones(9))
    search = LocalSearch(prepare(J, None), torch.device("cpu"))
    search.device = torch.device("meta")
    with pytest.raises(ValueError, match="'tabu' runs on the CPU"):
        search.tabu(torch.from_numpy(S), 1, 0)
