"""Upper bounds: never below the optimum, tight where theory says so."""

import networkx as nx
import numpy as np
import pytest
from scipy import sparse

from thalweg.combinatorial import (
    best_bound,
    certified_bound,
    certify,
    probabilistic_bound,
    specann,
    trivial_bound,
)
from thalweg.combinatorial import spectral_bounds as module
from thalweg.tasks import hub_heavy, planted_geometric, regular_glass, toroidal_glass


def all_states(n):
    return (2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1) - 1).T.astype(float)


def optimum(J, h=None):
    S = all_states(J.shape[0])
    values = 0.5 * np.einsum("ir,ir->r", S, J @ S) + (0 if h is None else h @ S)
    return float(values.max())


def small_problem(rng):
    n = int(rng.integers(3, 13))
    upper = np.triu(rng.integers(-2, 3, (n, n)) * (rng.random((n, n)) < 0.6), 1)
    h = rng.integers(-2, 3, n).astype(float) if rng.random() < 0.5 else None
    return sparse.csr_array((upper + upper.T).astype(float)), h


def top_eigenvalue(J, tau):
    d = module.scaled_degrees(J)
    return np.linalg.eigvalsh(J.toarray() * np.outer(d, d) ** (-tau / 2))[-1]


def test_every_bound_is_above_the_optimum_of_200_random_problems():
    rng = np.random.default_rng(0)
    for _ in range(200):
        J, h = small_problem(rng)
        best = optimum(J, h)
        tau = float(rng.random())
        ghost = module.with_ghost(J, h)
        theta = top_eigenvalue(ghost, tau)
        bounds = [trivial_bound(J, h), probabilistic_bound(J, tau, h, rng=rng)]
        # Also from an estimate that missed the top by far.
        bounds += [certified_bound(J, tau, factor * theta, h) for factor in (1.0, 0.8)]
        bounds.append(best_bound(J, [(tau, theta), (0.5, theta)], h, rng=rng))
        for bound in bounds:
            assert bound is None or bound.value >= best - 1e-9


def test_the_spectral_inequality_holds_along_the_path():
    rng = np.random.default_rng(1)
    for tau in np.linspace(0, 1, 5):
        J, _ = small_problem(rng)
        weight = module.scaled_degrees(J) ** tau
        assert 0.5 * top_eigenvalue(J, tau) * weight.sum() >= optimum(J) - 1e-9


def test_probabilistic_bounds_are_above_the_largest_eigenvalue_of_200_graphs():
    for seed in range(200):
        J = regular_glass(60, 4, rng=seed)
        d = module.scaled_degrees(J)
        tau = (seed % 5) / 4
        bound = probabilistic_bound(J, tau, steps=30, failure=1e-6, rng=seed)
        assert bound.kind in ("probabilistic", "trivial")
        assert bound.value >= 0.5 * top_eigenvalue(J, tau) * (d**tau).sum() * (1 - 1e-12)


def test_probabilistic_bounds_tighten_with_steps_and_survive_breakdown():
    J = toroidal_glass(30, 30, rng=0)
    values = [probabilistic_bound(J, 0.0, steps=q, rng=0).value for q in (20, 50, 100, 200)]
    assert values == sorted(values, reverse=True)
    # A complete graph has two eigenvalues: Lanczos ends after two steps, with the exact one.
    K = sparse.csr_array(np.ones((20, 20)) - np.eye(20))
    # lambda = 19 and c = 19: 38 / (1 - eps) - 19, eps = (ln(1.648 sqrt(20) 1e6) / 199)^2.
    eps = (np.log(1.648 * np.sqrt(20) * 1e6) / 199) ** 2
    assert probabilistic_bound(K, 0.0, rng=0).value == pytest.approx(10 * (38 / (1 - eps) - 19))


def test_too_few_lanczos_steps_give_the_trivial_bound():
    J = toroidal_glass(6, 6, rng=0)
    assert probabilistic_bound(J, 0.0, steps=3, rng=0) == trivial_bound(J)


def test_the_bound_at_tau_0_of_a_complete_graph_is_half_its_cut_bound():
    """Max-Cut of K_n, n even: J = -(11ᵀ - I) has lambda_max 1, so cut <= n²/4 exactly."""
    n = 20
    W = sparse.csr_array(np.ones((n, n)) - np.eye(n))
    bound = certified_bound(-W, 0.0, 1.0)
    cut = (bound.value + 0.5 * W.sum() / 1) / 2
    assert cut == pytest.approx(n**2 / 4, rel=2e-2)
    assert certify(-W, np.full(n, 1 + 1e-6))
    assert not certify(-W, np.full(n, 1 - 1e-6))


@pytest.mark.parametrize("dense_size", [0, module._DENSE_SIZE])
def test_certify_agrees_with_the_dense_spectrum(monkeypatch, dense_size):
    monkeypatch.setattr(module, "_DENSE_SIZE", dense_size)
    for seed in range(10):
        J = planted_geometric(150, rng=seed)
        top = np.linalg.eigvalsh(J.toarray())[-1]
        n = J.shape[0]
        assert certify(J, np.full(n, top * (1 + 1e-7)))
        assert not certify(J, np.full(n, top * (1 - 1e-7)))
        # Not a multiple of the identity, one vertex just too low:
        d = module.scaled_degrees(J)
        mu = top_eigenvalue(J, 1.0)
        assert certify(J, 1.0001 * mu * d)
        assert not certify(J, 0.9999 * mu * d)


def test_an_exactly_singular_matrix_is_not_certified(monkeypatch):
    monkeypatch.setattr(module, "_DENSE_SIZE", 0)
    assert not certify(sparse.csr_array((3, 3)), np.zeros(3))


def test_a_missed_eigenvalue_costs_factorizations_not_correctness():
    J = planted_geometric(400, rng=0)
    top = top_eigenvalue(J, 1.0)
    weight = module.scaled_degrees(J).sum()
    bound = certified_bound(J, 1.0, 0.85 * top)
    assert bound.kind == "certified"
    assert 0.5 * top * weight <= bound.value <= 0.5 * 1.3 * top * weight


@pytest.mark.parametrize("tau", [0.8, 1.0])
def test_from_the_exact_eigenvalue_the_first_factorization_succeeds(tau):
    J = planted_geometric(400, rng=0)
    top = top_eigenvalue(J, tau)
    weight = (module.scaled_degrees(J) ** tau).sum()
    assert certified_bound(J, tau, top).value == pytest.approx(0.5 * 1.02 * top * weight)


def test_large_fill_is_not_tried(monkeypatch):
    monkeypatch.setattr(module, "_DENSE_SIZE", 10)
    monkeypatch.setattr(module, "_ENVELOPE_LIMIT", 1000.0)
    J = regular_glass(200, 3, rng=0)
    assert certified_bound(J, 0.0, 2.8) is None
    assert not certify(J, np.full(200, 10.0))
    assert best_bound(J, [(0.0, 2.8)], rng=0).kind == "probabilistic"
    monkeypatch.setattr(module, "_ENVELOPE_LIMIT", 100.0)
    assert not certify(J, np.full(200, 10.0))


def test_nothing_better_than_the_trivial_bound_is_none():
    J = nx.to_scipy_sparse_array(nx.path_graph(10), dtype=float)
    # A path is balanced, so the trivial bound is attained and nothing is below it.
    assert certified_bound(J, 1.0, 100.0) is None
    assert best_bound(J, [(1.0, 100.0)], rng=0) == trivial_bound(J)
    assert trivial_bound(J).value == 9
    # The search gives up after a few factorizations.
    assert certified_bound(hub_heavy(300, 900, rng=0), 0.0, 1e-6) is None


def test_specann_returns_a_bound_above_its_value():
    for seed in range(5):
        J = toroidal_glass(12, 12, rng=seed)
        result = specann(J, rng=seed)
        assert result.upper_bound >= -result.energy
        assert result.bound_kind == "certified"
        assert result.upper_bound < trivial_bound(J).value
        assert 0 <= result.gap < 1


def test_bad_input():
    J = regular_glass(10, 3, rng=0)
    with pytest.raises(ValueError, match="tau must be a finite number >= 0 and <= 1, got 2"):
        certified_bound(J, 2, 1.0)
    with pytest.raises(ValueError, match="theta must be a finite number"):
        certified_bound(J, 0.5, np.nan)
    with pytest.raises(ValueError, match="tau must be"):
        probabilistic_bound(J, -1)
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        probabilistic_bound(J, 0.5, steps=0)
    with pytest.raises(ValueError, match="failure must be"):
        probabilistic_bound(J, 0.5, failure=1.0)
    with pytest.raises(ValueError, match=r"u must have shape \(10,\)"):
        certify(J, np.ones(3))
    with pytest.raises(ValueError, match=r"h must have shape \(10,\)"):
        trivial_bound(J, np.ones(3))
