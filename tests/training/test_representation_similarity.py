"""Similarities of representations: definitions, invariances and the bias of the plain CKA."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import pdist
from scipy.stats import ortho_group, pearsonr, spearmanr

from thalweg.training import linear_cka, procrustes_distance, rbf_cka, rsa
from thalweg.training.representation_similarity import effective_rank

MEASURES = {
    "linear": linear_cka,
    "linear, plain": lambda X, Y: linear_cka(X, Y, debiased=False),
    "rbf": rbf_cka,
    "rbf, plain": lambda X, Y: rbf_cka(X, Y, debiased=False),
    "rsa": lambda X, Y: rsa(X, Y, dissimilarity="euclidean"),
    "rsa, rank": lambda X, Y: rsa(X, Y, dissimilarity="euclidean", rank=True),
    "procrustes": lambda X, Y: 1 - procrustes_distance(X, Y) / 2,
}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gram(X):
    return X @ X.T


def u_statistic(K, L):
    """Return the unbiased HSIC as the mean over all quadruples of different indices."""
    b = len(K)
    total = 0.0
    for i, j, q, r in itertools.permutations(range(b), 4):
        total += K[i, j] * (L[i, j] + L[q, r] - 2 * L[i, q])
    return total / math.perm(b, 4)


@pytest.mark.parametrize("features", [3, 50])
def test_debiased_cka_is_made_of_u_statistics(features):
    X, Y = normal(8, features), normal(8, 5, seed=1)
    K, L = gram(X), gram(Y)
    expected = u_statistic(K, L) / math.sqrt(u_statistic(K, K) * u_statistic(L, L))
    assert linear_cka(X, Y).item() == pytest.approx(float(expected), abs=1e-10)


@pytest.mark.parametrize("features", [3, 50])
def test_plain_cka_is_that_of_kornblith_et_al(features):
    X, Y = normal(20, features).numpy(), normal(20, 5, seed=1).numpy()
    X, Y = X - X.mean(0), Y - Y.mean(0)
    norms = np.linalg.norm(X.T @ X) * np.linalg.norm(Y.T @ Y)
    expected = np.linalg.norm(X.T @ Y) ** 2 / norms
    found = linear_cka(torch.from_numpy(X + 1), torch.from_numpy(Y), debiased=False)
    assert found.item() == pytest.approx(expected, rel=1e-12)
    H = np.eye(20) - 1 / 20
    K, L = H @ X @ X.T @ H, H @ Y @ Y.T @ H
    hsic = np.trace(K @ L) / math.sqrt(np.trace(K @ K) * np.trace(L @ L))
    assert found.item() == pytest.approx(hsic, rel=1e-12)


@pytest.mark.parametrize("debiased", [True, False])
def test_features_and_gram_matrices_give_the_same(debiased):
    X, Y = normal(40, 39), normal(40, 7, seed=1)
    wide = torch.cat([X, torch.zeros(40, 5, dtype=X.dtype)], 1)  # 44 features: Gram matrices
    assert linear_cka(wide, Y, debiased=debiased).item() == pytest.approx(
        linear_cka(X, Y, debiased=debiased).item(), abs=1e-12
    )


def test_rbf_cka_is_made_of_gaussian_kernels():
    X, Y = normal(8, 3), normal(8, 5, seed=1)
    kernels = []
    for rows in (X, Y):
        squared = torch.cdist(rows, rows) ** 2
        i, j = torch.triu_indices(8, 8, 1)
        kernels.append(torch.exp(-squared / (2 * 0.7**2 * squared[i, j].median())))
    K, L = kernels
    expected = u_statistic(K, L) / math.sqrt(u_statistic(K, K) * u_statistic(L, L))
    assert rbf_cka(X, Y, sigma=0.7).item() == pytest.approx(float(expected), abs=1e-10)


def test_a_wide_gaussian_kernel_is_linear():
    X, Y = normal(40, 6), normal(40, 4, seed=1)
    assert rbf_cka(X, Y, sigma=100.0).item() == pytest.approx(linear_cka(X, Y).item(), abs=1e-3)


@pytest.mark.parametrize("name", MEASURES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), factor=st.floats(0.01, 100), shift=st.floats(-10, 10))
def test_rotations_shifts_and_factors_change_nothing(name, seed, factor, shift):
    X, Y = normal(30, 6, seed=seed), normal(30, 40, seed=seed + 1)
    rotation = torch.from_numpy(ortho_group.rvs(6, random_state=seed))
    measure = MEASURES[name]
    assert measure(X, X).item() == pytest.approx(1, abs=1e-10)
    assert measure(X, factor * X @ rotation + shift).item() == pytest.approx(1, abs=1e-9)
    assert measure(factor * X @ rotation + shift, Y).item() == pytest.approx(
        measure(X, Y).item(), abs=1e-9
    )


@pytest.mark.parametrize("name", MEASURES)
def test_other_linear_maps_change_something(name):
    X = normal(60, 6)
    stretched = X * torch.tensor([10.0, 1, 1, 1, 1, 0.1])
    assert MEASURES[name](X, stretched).item() < 0.95


def test_plain_cka_of_independent_wide_features_is_near_one_and_the_debiased_near_zero():
    X, Y = normal(256, 5000, dtype=torch.float32), normal(256, 5000, seed=1, dtype=torch.float32)
    assert linear_cka(X, Y, debiased=False).item() > 0.9
    assert abs(linear_cka(X, Y).item()) < 0.02


def test_the_debiased_hsic_is_unbiased():
    values = [
        linear_cka(normal(32, 4, seed=2 * s), normal(32, 4, seed=2 * s + 1)) for s in range(400)
    ]
    values = torch.stack(values)
    # Numerators have mean 0 exactly; 4 standard errors.
    assert abs(values.mean()) < 4 * values.std() / 20
    plain = torch.stack(
        [
            linear_cka(normal(32, 4, seed=2 * s), normal(32, 4, seed=2 * s + 1), debiased=False)
            for s in range(50)
        ]
    )
    assert plain.mean() > 0.08


@pytest.mark.parametrize("dissimilarity", ["correlation", "euclidean"])
@pytest.mark.parametrize("rank", [False, True])
def test_rsa_is_the_correlation_of_scipys_distances(dissimilarity, rank):
    X, Y = normal(25, 6), normal(25, 9, seed=1)
    metric = {"correlation": "correlation", "euclidean": "sqeuclidean"}[dissimilarity]
    x, y = pdist(X.numpy(), metric), pdist(Y.numpy(), metric)
    expected = (spearmanr if rank else pearsonr)(x, y).statistic
    found = rsa(X, Y, dissimilarity=dissimilarity, rank=rank)
    assert found.item() == pytest.approx(expected, abs=1e-9)


def test_ties_share_their_rank():
    X = torch.tensor([[0.0], [1.0], [2.0], [4.0], [8.0]], dtype=torch.float64)
    Y = normal(5, 2)
    expected = spearmanr(pdist(X.numpy(), "sqeuclidean"), pdist(Y.numpy(), "sqeuclidean")).statistic
    found = rsa(X, Y, dissimilarity="euclidean", rank=True)
    assert found.item() == pytest.approx(expected, abs=1e-12)


def test_procrustes_distance_is_that_of_the_best_rotation():
    X, Y = normal(20, 2).numpy(), normal(20, 2, seed=1).numpy()
    X, Y = (Z - Z.mean(0) for Z in (X, Y))
    X, Y = (Z / np.linalg.norm(Z) for Z in (X, Y))
    best = math.inf
    for angle in np.linspace(0, 2 * np.pi, 20_001):
        c, s = math.cos(angle), math.sin(angle)
        for turn in (np.array([[c, -s], [s, c]]), np.array([[c, s], [s, -c]])):
            best = min(best, float(((X - Y @ turn) ** 2).sum()))
    found = procrustes_distance(torch.from_numpy(X), torch.from_numpy(Y))
    assert found.item() == pytest.approx(best, abs=1e-6)


def test_effective_rank_counts_equal_directions():
    X = torch.linalg.qr(normal(50, 8) - normal(50, 8).mean(0))[0]
    assert effective_rank(X[:, :5]) == pytest.approx(5, abs=0.1)
    assert effective_rank(normal(10, 1) @ normal(1, 30)) == pytest.approx(1)


def test_half_precision_and_mixed_dtypes_are_computed_in_the_wider_one():
    X = normal(40, 6)
    assert linear_cka(X.bfloat16(), X.float()).dtype == torch.float32
    assert linear_cka(X.bfloat16(), X.float()).item() == pytest.approx(1, abs=1e-3)
    assert linear_cka(X.float(), X).dtype == torch.float64


def test_rows_that_coincide_leave_the_gaussian_kernel_defined():
    X = torch.zeros(20, 2, dtype=torch.float64)
    X[:3] = normal(3, 2)
    assert rbf_cka(X, X, debiased=False).item() == pytest.approx(1)


@pytest.mark.parametrize(
    ("X", "Y", "error", "message"),
    [
        ([[1.0]], normal(8, 2), TypeError, "X must be a tensor, got list"),
        (normal(8, 2), torch.ones(8, 2, dtype=torch.int64), TypeError, "Y must be a tensor of re"),
        (normal(8, 2, 2), normal(8, 2), ValueError, r"X must have shape \(b, features\)"),
        (normal(3, 2), normal(3, 2), ValueError, "with b >= 4, got"),
        (normal(8, 2), normal(9, 2), ValueError, "must have as many rows"),
        (normal(8, 2) * math.nan, normal(8, 2), ValueError, "X must be finite"),
        (normal(8, 2), torch.full((8, 3), 5.0), ValueError, "Y must have rows that differ"),
    ],
)
@pytest.mark.parametrize("measure", [linear_cka, rbf_cka, rsa, procrustes_distance])
def test_bad_representations_are_refused(measure, X, Y, error, message):
    with pytest.raises(error, match=message):
        measure(X, Y)


def test_bad_options_are_refused():
    X = normal(8, 2)
    with pytest.raises(ValueError, match="sigma must be a finite number > 0"):
        rbf_cka(X, X, sigma=0)
    with pytest.raises(ValueError, match="dissimilarity must be one of"):
        rsa(X, X, dissimilarity="cosine")
    with pytest.raises(ValueError, match="dissimilarity must be 'euclidean'"):
        rsa(X, X[:, :1])
