"""Spectral Annealing: the path's mathematics, exact cases, brute force, and every bad input."""

import time
import warnings

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from thalweg.combinatorial import (
    IsingResult,
    specann,
    specann_correlation_clustering,
    specann_maxcut,
    specann_qubo,
    spectral_path,
)
from thalweg.combinatorial import ising_problem as problem_module
from thalweg.combinatorial.annealing_run import round_to_spins
from thalweg.combinatorial.eigensolvers import inner
from thalweg.combinatorial.ising_problem import prepare
from thalweg.combinatorial.normalization_path import (
    _DENSE_SIZE,
    _Component,
    check_path_settings,
    walk,
)
from thalweg.tasks import hub_heavy, planted_geometric, regular_glass, toroidal_glass

QUIET = {"bound": "trivial", "progress": False}


def dense_path(J, tau):
    d = abs(J).sum(axis=1).astype(float)
    d[d == 0] = 1
    d /= d.mean()
    return J.toarray() * np.outer(d, d) ** (-tau / 2)


def brute_force(J, h=None):
    n = J.shape[0]
    S = (2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1) - 1).T.astype(float)
    values = 0.5 * np.einsum("ir,ir->r", S, J @ S) + (0 if h is None else h @ S)
    return float(values.max())


def value(J, s, h=None):
    s = s.astype(float)
    return 0.5 * float(s @ (J @ s)) + (0.0 if h is None else float(h @ s))


def random_problem(rng, n, field=False):
    upper = np.triu(rng.integers(-3, 4, (n, n)) * (rng.random((n, n)) < 0.5), 1)
    h = rng.integers(-3, 4, n).astype(float) if field else None
    return sparse.csr_array((upper + upper.T).astype(float)), h


# --- the path -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [100, 900])  # dense, and iterative
def test_regular_graphs_have_a_constant_path(n):
    J = toroidal_glass(n // 10, 10, rng=0)
    points = list(
        spectral_path(J, 4, 2, tol=1e-10, max_iter=200, start_iter=800, dtype=torch.float64, rng=0)
    )
    for point in points[1:]:
        np.testing.assert_allclose(point.eigenvalues, points[0].eigenvalues, atol=1e-8)
        overlap = abs(np.sum(point.vectors * points[0].vectors, axis=0))
        np.testing.assert_allclose(overlap, 1, atol=1e-6)


def test_tau_1_is_the_signed_normalized_laplacian():
    J = hub_heavy(120, 700, signed=True, rng=0)
    J = J[np.diff(J.indptr) > 0][:, np.diff(J.indptr) > 0]
    d = abs(J).sum(axis=1)
    laplacian = np.eye(len(d)) - J.toarray() / np.sqrt(np.outer(d, d))
    expected = np.sort(1 - np.linalg.eigvalsh(laplacian))[::-1]
    *_, last = spectral_path(J, [0.0, 1.0], len(d) - 1, dtype=torch.float64)
    scaled = last.eigenvalues / d.mean()
    np.testing.assert_allclose(scaled, expected[:-1], atol=1e-8)
    assert np.all(np.abs(scaled) <= 1 + 1e-12)


@pytest.mark.parametrize("eigensolver", ["lobpcg", "lanczos", "cheb"])
@pytest.mark.parametrize("predictor", ["auto", "diagonal", "warm", "none"])
def test_the_path_agrees_with_dense_eigenvalues(eigensolver, predictor):
    J = planted_geometric(_DENSE_SIZE + 150, rng=0)
    for point in spectral_path(
        J, 3, 3, predictor=predictor, eigensolver=eigensolver, tol=1e-6, max_iter=400,
        start_iter=400, dtype=torch.float64, rng=0,
    ):  # fmt: skip
        expected = np.linalg.eigvalsh(dense_path(J, point.tau))[::-1][:3]
        np.testing.assert_allclose(point.eigenvalues, expected, rtol=1e-6)
        residual = dense_path(J, point.tau) @ point.vectors - point.vectors * point.eigenvalues
        assert np.linalg.norm(residual, axis=0).max() < 1e-5 * expected[0]


def test_the_linear_path_has_the_same_ends_up_to_scale():
    J = hub_heavy(400, 2400, rng=0)
    d = abs(J).sum(axis=1)
    d[d == 0] = 1
    norm = np.abs(np.linalg.eigvalsh(J.toarray())).max()
    keywords = {"tol": 1e-8, "max_iter": 500, "start_iter": 500, "dtype": torch.float64, "rng": 0}
    first, middle, last = spectral_path(J, 3, 2, path="linear", **keywords)
    # The norm is a Lanczos estimate from below.
    np.testing.assert_allclose(
        first.eigenvalues, np.linalg.eigvalsh(J.toarray())[::-1][:2] / norm, rtol=1e-3
    )
    normalized = J.toarray() / np.sqrt(np.outer(d, d))
    np.testing.assert_allclose(
        last.eigenvalues, np.linalg.eigvalsh(normalized)[::-1][:2], rtol=1e-6
    )
    mixed = 0.5 * J.toarray() / norm + 0.5 * normalized
    np.testing.assert_allclose(middle.eigenvalues, np.linalg.eigvalsh(mixed)[::-1][:2], rtol=1e-3)


def test_the_linear_path_of_a_small_graph_is_dense_and_agrees():
    J = hub_heavy(60, 300, rng=0)
    d = np.maximum(abs(J).sum(axis=1), 1)
    mixed = 0.5 * J.toarray() / np.linalg.norm(J.toarray(), 2)
    mixed += 0.5 * J.toarray() / np.sqrt(np.outer(d, d))
    (point,) = spectral_path(J, [0.5], 3, path="linear", dtype=torch.float64)
    np.testing.assert_allclose(point.eigenvalues, np.linalg.eigvalsh(mixed)[::-1][:3], atol=1e-10)


def test_first_order_perturbation_has_a_second_order_error():
    """dv/dtau = -½ Σ_j (λ + λ_j)/(λ - λ_j) <v_j, Λv> v_j, the formula behind the predictor."""
    J, _ = random_problem(np.random.default_rng(0), 50)
    tau = 0.4
    values, V = np.linalg.eigh(dense_path(J, tau))
    d = abs(J).sum(axis=1)
    log_degree = np.log(d / d.mean())
    v, lam = V[:, -1], values[-1]
    weights = -0.5 * (lam + values[:-1]) / (lam - values[:-1])
    slope = V[:, :-1] @ (weights * (V[:, :-1].T @ (log_degree * v)))
    errors = []
    for step in (1e-2, 5e-3, 2.5e-3):
        (point,) = spectral_path(J, [tau + step], 1, dtype=torch.float64)
        moved = point.vectors[:, 0] * np.sign(point.vectors[:, 0] @ v)
        errors.append(np.linalg.norm(moved - v - step * slope))
    ratios = np.array(errors[:-1]) / errors[1:]
    np.testing.assert_allclose(ratios, 4, rtol=0.1)


def test_the_diagonal_predictor_is_the_formula_and_auto_is_never_worse():
    J = hub_heavy(500, 3000, rng=0)
    problem = prepare(J, None, np.float64, reorder=False)
    degree = np.maximum(problem.degree, 1)

    def component(predictor):
        options = check_path_settings(500, [0.2, 0.5], 3, "power", predictor, "lobpcg", 1e-9, 5, 40)
        part = _Component(
            problem, 0, degree / degree.mean(), float(degree.mean()), options,
            torch.device("cpu"), torch.Generator().manual_seed(0), None, lambda: None,
        )  # fmt: skip
        part.solve(0.2)
        return part

    rayleigh = {}
    for predictor in ("diagonal", "warm", "auto"):
        part = component(predictor)
        V = part._block
        product = part._operator(0.5)
        start = part._predict(0.5, product)
        if predictor == "diagonal":
            expected = (degree / degree.mean())[:, None] ** -0.15 * V.numpy()
            np.testing.assert_allclose(start.numpy(), expected, rtol=1e-12)
        if predictor == "warm":
            assert start is V
        gram, energy = inner(start, start), inner(start, product(start))
        values = torch.linalg.eigvals(torch.linalg.solve(gram, energy)).real
        rayleigh[predictor] = np.sort(values.numpy())[::-1]
    assert np.all(rayleigh["auto"] >= rayleigh["warm"] - 1e-10)
    assert np.all(rayleigh["auto"] >= rayleigh["diagonal"] - 1e-10)


def test_gauge_transformed_starts_give_gauge_transformed_vectors():
    J = planted_geometric(_DENSE_SIZE + 100, rng=0)
    n = J.shape[0]
    rng = np.random.default_rng(1)
    sigma = rng.choice([-1.0, 1.0], n)
    turned = sparse.csr_array(sparse.diags_array(sigma) @ J @ sparse.diags_array(sigma))
    start = rng.standard_normal((n, 2))
    options = {"dtype": torch.float64, "max_iter": 5, "start_iter": 5}
    one = list(spectral_path(J, 3, 2, start=start, **options))
    two = list(spectral_path(turned, 3, 2, start=sigma[:, None] * start, **options))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a.eigenvalues, b.eigenvalues, rtol=1e-10)
        np.testing.assert_allclose(sigma[:, None] * a.vectors, b.vectors, atol=1e-6)


def test_components_have_their_own_eigenvectors():
    """Large, small and single components at once, against each one's dense spectrum."""
    parts = [
        planted_geometric(_DENSE_SIZE + 60, 12.0, rng=0),
        toroidal_glass(5, 5, rng=1),
        toroidal_glass(4, 5, rng=3),
        sparse.csr_array((2, 2)),
    ]
    J = sparse.csr_array(sparse.block_diag(parts, format="csr"))
    shuffle = np.random.default_rng(2).permutation(J.shape[0])
    problem = prepare(J[shuffle][:, shuffle], None, np.float64)
    options = check_path_settings(
        J.shape[0], 2, 2, "power", "auto", "lobpcg", 1e-8, 500, 500, k_name="n_eig"
    )
    generator = torch.Generator().manual_seed(0)
    d = np.where(problem.degree > 0, problem.degree, 1)
    d /= d.mean()
    for point in walk(problem, options, torch.device("cpu"), generator):
        for c, (first, last) in enumerate(
            zip(problem.bounds[:-1], problem.bounds[1:], strict=True)
        ):
            scale = d[first:last] ** (-point.tau / 2)
            M = problem.couplings[first:last, first:last].toarray() * np.outer(scale, scale)
            block = point.vectors[first:last].numpy()
            values, _ = np.linalg.eigh(M)
            assert point.leading[c] == pytest.approx(values[-1], rel=1e-6, abs=1e-12)
            k = min(2, last - first)
            np.testing.assert_allclose(block.T @ block, np.diag([1] * k + [0] * (2 - k)), atol=1e-8)
            np.testing.assert_allclose(
                np.diag(block.T @ M @ block)[:k], values[::-1][:k], rtol=1e-6, atol=1e-12
            )


def test_rounding_gives_plus_one_to_exact_zeros():
    V = torch.tensor([[0.0, 1.0], [-1.0, 0.0], [0.0, 0.0]])
    S = round_to_spins(V, torch.eye(2))
    np.testing.assert_array_equal(S.numpy(), [[1, 1], [-1, 1], [1, 1]])
    assert S.dtype == torch.int8


# --- exact cases --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [40, 600])
def test_balanced_graphs_are_solved_at_tau_1_without_local_search(n):
    rng = np.random.default_rng(0)
    graph = nx.random_regular_graph(3, n, seed=1)
    sigma = rng.choice([-1.0, 1.0], n)
    W = nx.to_scipy_sparse_array(graph, dtype=float, nodelist=range(n))
    J = sparse.csr_array(sparse.diags_array(sigma) @ W @ sparse.diags_array(sigma))
    result = specann(J, taus=[1.0], local_search=None, start_iter=300, tol=1e-5, rng=0, **QUIET)
    assert -result.energy == J.sum() / 2 * 0 + abs(J).sum() / 2
    *_, last = spectral_path(J, [1.0], 1, start_iter=300, tol=1e-6, rng=0)
    assert last.eigenvalues[0] == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("graph", [nx.cycle_graph(30), nx.grid_2d_graph(8, 9), nx.star_graph(20)])
def test_bipartite_graphs_are_cut_completely(graph):
    result = specann_maxcut(graph, rng=0)
    assert result.cut_value == graph.number_of_edges()
    assert result.gap == pytest.approx(0, abs=1e-9)
    assert result.bound_kind == "trivial"


def test_small_random_problems_are_solved_to_optimality():
    rng = np.random.default_rng(0)
    optimal = 0
    for _ in range(200):
        n = int(rng.integers(5, 17))
        J, h = random_problem(rng, n, field=bool(rng.random() < 0.5))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = specann(J, h, taus=4, n_candidates=16, n_eig=min(4, n - 1), rng=rng, **QUIET)
        assert -result.energy == value(J, result.spins, h)  # integers: exact
        optimal += -result.energy == brute_force(J, h)
    assert optimal >= 190


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_the_couplings_scales_the_energy(seed, scale):
    J, h = random_problem(np.random.default_rng(seed), 20, field=True)
    one = specann(J, h, rng=seed, **QUIET)
    two = specann(J * scale, h * scale, rng=seed, **QUIET)
    assert two.energy == scale * one.energy
    np.testing.assert_array_equal(one.spins, two.spins)


def test_minimize_is_maximize_of_the_negative():
    J, h = random_problem(np.random.default_rng(3), 30, field=True)
    low = specann(J, h, sense="minimize", rng=0, **QUIET)
    high = specann(-J, -h, rng=0, **QUIET)
    np.testing.assert_array_equal(low.spins, high.spins)
    assert low.energy == value(J, low.spins, h)


def test_a_strong_field_decides_every_spin():
    J, _ = random_problem(np.random.default_rng(4), 30)
    h = np.random.default_rng(5).choice([-100.0, 100.0], 30)
    np.testing.assert_array_equal(specann(J, h, rng=0, **QUIET).spins, np.sign(h))


def test_isolated_vertices_are_free_or_follow_the_field():
    J = sparse.csr_array(sparse.block_diag([toroidal_glass(4, 4, rng=0), np.zeros((3, 3))]))
    assert np.all(specann(J, rng=0, **QUIET).spins[16:] == 1)
    h = np.zeros(19)
    h[16:] = [-1, 0, 2]
    np.testing.assert_array_equal(specann(J, h, rng=0, **QUIET).spins[16:], [-1, 1, 1])


def test_no_couplings_at_all():
    result = specann(sparse.csr_array((4, 4)), rng=0)
    np.testing.assert_array_equal(result.spins, 1)
    assert result.energy == 0
    assert result.upper_bound == 0
    assert specann(sparse.csr_array((1, 1)), [-2.0], rng=0).spins[0] == -1


def test_components_are_put_together_from_their_best_states():
    """40 glasses at once: as good as each alone, though no single candidate is best everywhere."""
    parts = [toroidal_glass(4, 4, rng=seed) for seed in range(40)]
    J = sparse.csr_array(sparse.block_diag(parts, format="csr"))
    joint = specann(J, taus=3, n_candidates=8, rng=0, **QUIET)
    ground = sum(brute_force(part) for part in parts)
    assert -joint.energy == value(J, joint.spins)
    assert -joint.energy >= 0.99 * ground
    assert max(-record.energy_after for record in joint.history if record.stage == "path") < ground


def test_the_path_beats_both_ends_where_degrees_vary():
    """The direction of the paper's claim, on one instance; the claims measure it."""
    J = planted_geometric(3000, rng=0)
    path = specann(J, rng=0, **QUIET)
    ends = [specann(J, taus=[tau], n_candidates=144, rng=0, **QUIET) for tau in (0.0, 1.0)]
    assert all(path.energy < end.energy for end in ends)


# --- related problems ---------------------------------------------------------------------------


def test_maxcut_of_complete_graphs():
    for n in (4, 7, 10):
        result = specann_maxcut(nx.complete_graph(n), rng=0)
        assert result.cut_value == (n // 2) * ((n + 1) // 2)
        assert result.cut_bound >= result.cut_value


def test_qubo_is_solved_exactly_on_small_problems():
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = 10
        Q = rng.integers(-4, 5, (n, n)).astype(float)
        X = ((np.arange(2**n)[:, None] >> np.arange(n)) & 1).astype(float)
        lowest = np.einsum("ri,ij,rj->r", X, Q, X).min()
        result = specann_qubo(Q, rng=0)
        assert result.value == lowest
        assert result.value == result.x @ Q @ result.x
        assert result.lower_bound <= lowest + 1e-9
    assert "at least" in str(result)


def test_qubo_with_only_linear_terms():
    result = specann_qubo(np.diag([1.0, -2.0, 3.0, -4.0]), rng=0)
    np.testing.assert_array_equal(result.x, [0, 1, 0, 1])
    assert result.lower_bound == pytest.approx(-6)


def test_clusters_of_a_planted_partition_are_found():
    rng = np.random.default_rng(0)
    truth = np.repeat(np.arange(4), 15)
    sign = np.where(truth[:, None] == truth[None, :], 1.0, -1.0)
    np.fill_diagonal(sign, 0)
    shuffle = rng.permutation(60)
    result = specann_correlation_clustering(sign[shuffle][:, shuffle], max_clusters=10, rng=0)
    assert result.disagreements == 0
    assert len(np.unique(result.labels)) == 4
    assert len(np.unique(np.stack((result.labels, truth[shuffle])), axis=1).T) == 4
    assert len(result.splits) == 3
    two = specann_correlation_clustering(sign, rng=0)
    assert len(np.unique(two.labels)) == 2
    assert two.disagreements > 0
    assert "2 clusters of 60 vertices" in str(two)


def test_friends_are_not_split():
    result = specann_correlation_clustering(np.ones((5, 5)) - np.eye(5), max_clusters=3, rng=0)
    np.testing.assert_array_equal(result.labels, 0)
    assert specann_correlation_clustering(np.zeros((3, 3)), max_clusters=1).splits == []


# --- the interface ------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_result_and_candidates_are_distinct():
    J = hub_heavy(400, 2400, signed=True, rng=0)
    one, two, three = (specann(J, rng=seed, **QUIET) for seed in (7, 7, 8))
    np.testing.assert_array_equal(one.candidates, two.candidates)
    assert np.any(one.candidates != three.candidates)
    turned = one.candidates * one.candidates[:, :1]
    assert len(np.unique(turned, axis=0)) == len(one.candidates) == 16
    energies = [-value(J, s) for s in one.candidates]
    assert energies == sorted(energies)
    assert energies[0] == one.energy
    np.testing.assert_array_equal(one.candidates[0], one.spins)
    assert one.spins.dtype == np.int8


def test_networkx_dense_and_sparse_inputs_are_one_problem():
    J = toroidal_glass(6, 7, rng=0)
    graph = nx.from_scipy_sparse_array(J)
    results = [
        specann(problem, rng=0, **QUIET)
        for problem in (J, J.toarray(), graph, sparse.coo_matrix(J), J.astype(np.int64))
    ]
    for result in results[1:]:
        np.testing.assert_array_equal(result.spins, results[0].spins)


@pytest.mark.parametrize("local_search", ["tabu", "anneal"])
def test_a_final_search_improves_on_greedy(local_search):
    J = toroidal_glass(30, 30, rng=0)
    greedy = specann(J, rng=0, **QUIET)
    final = specann(J, rng=0, local_search=local_search, ls_sweeps=100, **QUIET)
    assert final.energy < greedy.energy
    assert final.history[-1].stage == local_search


def test_history_tells_the_run():
    J = hub_heavy(500, 3000, rng=0)
    records = []
    result = specann(
        -J, taus=5, n_candidates=8, rng=0, callback=records.append, crossover=True, **QUIET
    )
    assert records == result.history
    path = [record for record in records if record.stage == "path"]
    assert [record.tau for record in path] == [0, 0.25, 0.5, 0.75, 1]
    assert [record.stage for record in records[5:]] == ["intensify"] * 3 + ["crossover"]
    best = min(path, key=lambda record: record.energy_after)
    assert all(record.tau == best.tau for record in records[5:8])
    for record in records:
        assert record.energy_after <= record.energy_before
        assert record.best_energy <= record.energy_after
    assert records[-1].best_energy == result.energy
    assert result.success
    assert result.time["total"] >= sum(v for k, v in result.time.items() if k != "total") * 0.99
    uniform = specann(
        -J, taus=5, n_candidates=8, allocation="uniform", crossover=False, rng=0, **QUIET
    )
    assert [record.stage for record in uniform.history] == ["path"] * 5


def test_without_local_search_energies_are_those_of_rounding():
    J = hub_heavy(300, 1800, rng=0)
    result = specann(-J, local_search=None, rng=0, **QUIET)
    assert all(r.energy_before == r.energy_after for r in result.history)


def test_a_time_limit_and_a_callback_stop_with_the_best_so_far():
    J = planted_geometric(5000, rng=0)
    limited = specann(J, rng=0, time_limit=0.0, **QUIET)
    assert (limited.success, limited.status) == (False, 1)
    assert "time limit" in limited.message
    assert -limited.energy == value(J, limited.spins)

    def stop(record):
        if record.tau >= 0.25:
            raise StopIteration

    stopped = specann(J, rng=0, callback=stop)
    assert stopped.status == 2
    assert stopped.history[-1].tau == 0.25
    assert -stopped.energy == value(J, stopped.spins) > 0
    assert stopped.bound_kind == "trivial"


def test_an_interrupt_returns_the_best_so_far():
    J = planted_geometric(2000, rng=0)

    def interrupt(record):
        if record.tau >= 0.5:
            raise KeyboardInterrupt

    result = specann(J, rng=0, callback=interrupt, **QUIET)
    assert (result.success, result.status) == (False, 3)
    assert "interrupted" in result.message
    assert -result.energy == value(J, result.spins) > 0


def test_a_time_limit_is_kept():
    J = regular_glass(200_000, 3, rng=0)
    start = time.perf_counter()
    result = specann(J, rng=0, time_limit=1.0, taus=50, **QUIET)
    assert result.status == 1
    assert time.perf_counter() - start < 6  # preparation, and one batch of local search


def test_results_print_and_plot():
    pytest.importorskip("matplotlib").use("Agg")
    from matplotlib import pyplot as plt

    J = toroidal_glass(6, 6, rng=0)
    result = specann(J, rng=0)
    assert "energy" in str(result)
    assert "certified bound" in str(result)
    assert "at tau" in str(result)
    ax = result.plot()
    assert len(ax.lines) == 3
    np.testing.assert_allclose(ax.lines[0].get_xdata(), np.linspace(0, 1, 9))
    assert result.plot(ax) is ax
    plt.close("all")
    cut = specann_maxcut(abs(J), rng=0)
    assert str(cut).startswith("cut 72, at most 72")
    assert isinstance(cut, IsingResult)
    assert result.cut_bound is None


def test_float64_and_the_other_solvers_run():
    J = planted_geometric(600, rng=0)
    for options in (
        {"dtype": torch.float64},
        {"eigensolver": "lanczos"},
        {"eigensolver": "cheb"},
        {"path": "linear"},
        {"predictor": "none"},
        {"device": "cpu"},
    ):
        result = specann(J, rng=0, **options, **QUIET)
        assert -result.energy == value(J, result.spins)
        assert result.spectral_estimate > 0


def test_progress_is_shown_when_asked(capsys):
    specann(toroidal_glass(5, 5, rng=0), rng=0, bound="trivial", progress=True)
    assert "specann" in capsys.readouterr().err


# --- bad input ----------------------------------------------------------------------------------


def test_couplings_are_checked():
    good = toroidal_glass(4, 4, rng=0)
    bad = good.tolil()
    bad[0, 5] = 3.0
    with pytest.raises(ValueError, match=r"J must be symmetric, but \|J - J.T\| reaches 3"):
        specann(bad.tocsr())
    nan = good.copy()
    nan.data[3] = np.nan
    with pytest.raises(ValueError, match=r"J.data must be finite, got nan at J.data\[3\]"):
        specann(nan)
    with pytest.raises(ValueError, match="J must be a square matrix"):
        specann(sparse.csr_array((3, 4)))
    with pytest.raises(ValueError, match="J must be a square matrix of at least one row"):
        specann(np.zeros((0, 0)))
    with pytest.raises(ValueError, match="J must be an undirected graph"):
        specann(nx.DiGraph([(0, 1)]))
    with pytest.raises(ValueError, match="J must have at least one vertex"):
        specann(nx.Graph())
    with pytest.raises(TypeError, match="J must be a SciPy sparse matrix"):
        specann([1, 2, 3])
    with pytest.raises(TypeError, match="J must be a SciPy sparse matrix"):
        specann(np.array([["a"]], dtype=object))
    with pytest.raises(TypeError, match="J must be real"):
        specann(sparse.csr_array([[0, 1j], [-1j, 0]]))
    with pytest.raises(ValueError, match=r"h must have shape \(16,\)"):
        specann(good, np.ones(3))
    with pytest.raises(ValueError, match="h must be finite"):
        specann(good, np.full(16, np.inf))


def test_a_large_dense_matrix_is_refused(monkeypatch):
    monkeypatch.setattr(problem_module, "DENSE_LIMIT", 10)
    with pytest.raises(MemoryError, match="J is dense with 11 rows, more than 10"):
        specann(np.zeros((11, 11)))


def test_rounding_asymmetry_is_symmetrized_and_duplicates_are_summed():
    J = sparse.csr_array([[0.0, 1.0], [1.0 + 1e-12, 0.0]])
    assert specann(-J, rng=0).energy == pytest.approx(-1)
    double = sparse.csr_array(
        (np.array([1.0, 1.0, 2.0]), np.array([1, 1, 0]), np.array([0, 2, 3])), shape=(2, 2)
    )
    assert specann(-double, rng=0).energy == -2
    zeros = sparse.csr_array((np.array([0.0, 0.0]), ([0, 1], [1, 0])), shape=(2, 2))
    assert specann(zeros, rng=0).energy == 0


def test_a_diagonal_is_removed_with_a_warning():
    J = toroidal_glass(4, 4, rng=0)
    shifted = sparse.csr_array(J + sparse.eye_array(16) * 2)
    with pytest.warns(UserWarning, match="J has a diagonal: it adds the constant 16"):
        result = specann(shifted, rng=0)
    assert result.energy == specann(J, rng=0).energy


def test_problems_with_the_wrong_sign_get_a_hint():
    W = nx.to_scipy_sparse_array(nx.complete_graph(6), dtype=float)
    with pytest.warns(UserWarning, match="use specann_maxcut"):
        result = specann(W, rng=0)
    assert abs(result.spins.sum()) == 6
    with pytest.warns(UserWarning, match="cutting nothing is optimal"):
        assert specann_maxcut(-W, rng=0).cut_value == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        specann(W, np.array([1.0, 0, 0, 0, 0, -1]), rng=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"taus": [0.5, 0.2]}, "taus must ascend"),
        ({"taus": [0.5, 0.5]}, "taus must ascend"),
        ({"taus": [-0.1, 1.0]}, "taus must ascend"),
        ({"taus": [0.0, 1.1]}, "taus must ascend"),
        ({"taus": []}, "taus must ascend"),
        ({"taus": [np.nan]}, "taus must be finite"),
        ({"taus": 0}, "taus must be an integer >= 1"),
        ({"n_eig": 16}, "n_eig must be less than the number of spins, got 16 with 16"),
        ({"n_eig": 0}, "n_eig must be an integer >= 1"),
        ({"n_candidates": 0}, "n_candidates must be an integer >= 1"),
        ({"allocation": "all"}, "allocation must be one of 'two_stage', 'uniform'"),
        ({"path": "cubic"}, "path must be one of"),
        ({"predictor": "cold"}, "predictor must be one of"),
        ({"eigensolver": "power"}, "eigensolver must be one of"),
        ({"local_search": "swap"}, "local_search must be one of"),
        ({"ls_sweeps": 0}, "ls_sweeps must be an integer >= 1"),
        ({"ls_temperature": 0}, "ls_temperature must be a finite number > 0"),
        ({"tol": 0.0}, "tol must be a finite number > 0"),
        ({"max_iter": 0}, "max_iter must be an integer >= 1"),
        ({"start_iter": 0}, "start_iter must be an integer >= 1"),
        ({"bound": "tight"}, "bound must be one of"),
        ({"time_limit": -1}, "time_limit must be a number >= 0"),
        ({"dtype": torch.float16}, "dtype must be one of"),
        ({"sense": "max"}, "sense must be one of"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        specann(toroidal_glass(4, 4, rng=0), rng=0, **options)


def test_bad_types():
    J = toroidal_glass(4, 4, rng=0)
    with pytest.raises(TypeError, match="n_candidates must be an integer"):
        specann(J, n_candidates=2.5)
    with pytest.raises(TypeError, match="rng must be"):
        specann(J, rng="seed")
    with pytest.raises(ValueError, match="Q must be a square matrix"):
        specann_qubo(np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"Q.data must be finite"):
        specann_qubo(np.array([[np.nan, 0.0], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="max_clusters must be an integer >= 1"):
        specann_correlation_clustering(J, max_clusters=0)
    with pytest.raises(ValueError, match=r"start must have shape \(16, 2\)"):
        spectral_path(J, 2, 2, start=np.ones((16, 3)))
    with pytest.raises(ValueError, match="k must be less than the number of spins"):
        spectral_path(J, 2, 16)
