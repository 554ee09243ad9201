"""α-stable noise, and quadratics that are seen through it."""

import numpy as np
import pytest
import torch
from scipy import stats

from thalweg.tasks import HeavyTailedRuns, stable_noise, tailed_diagonal, tailed_matrix


def runs(problem=None, **changes):
    settings = {"alpha": 1.5, "runs": 3, "steps": 5, "seed": 0, **changes}
    return HeavyTailedRuns(problem or tailed_diagonal(), **settings)


@pytest.mark.parametrize("alpha", [1.2, 1.5])
def test_noise_has_the_characteristic_function_of_a_stable_law(alpha):
    x = stable_noise(alpha, (200_000,), rng=0)
    t = np.array([0.3, 1.0, 2.0])
    # The mean of n cosines has a standard deviation of at most 1/√(2n) = 0.0016.
    np.testing.assert_allclose(
        np.cos(np.outer(t, x)).mean(axis=1), np.exp(-(t**alpha)), rtol=0, atol=0.007
    )


@pytest.mark.parametrize(("alpha", "law"), [(1.0, stats.cauchy), (2.0, stats.norm(scale=2**0.5))])
def test_noise_has_the_known_laws_as_special_cases(alpha, law):
    x = stable_noise(alpha, (50_000,), rng=1)
    assert stats.kstest(x, law.cdf).pvalue > 1e-3


def test_tails_fall_with_the_index():
    x = np.abs(stable_noise(1.2, (1_000_000,), rng=2))
    # P(|x| > 10 q) / P(|x| > q) → 10^-1.2, with 5000 and 315 of a million beyond.
    q = np.quantile(x, 0.995)
    assert np.mean(x > 10 * q) / np.mean(x > q) == pytest.approx(10**-1.2, rel=0.25)


@pytest.mark.parametrize("noise", ["entries", "rank one"])
def test_gradients_are_those_of_the_loss_plus_noise(noise):
    problem = tailed_matrix(noise)
    batch = runs(problem)
    batch.query()
    x = problem.x0.clone().requires_grad_()
    (0.5 * (problem.curvature * x.square()).sum()).backward()
    differences = batch.parameter.grad - x.grad
    assert differences.abs().amax(dim=(1, 2)).min() > 0.1
    ranks = torch.linalg.matrix_rank(differences, rtol=1e-4).tolist()
    assert ranks == ([1, 1, 1] if noise == "rank one" else [32, 32, 32])
    losses = 0.5 * (problem.curvature * problem.x0.square()).sum()
    torch.testing.assert_close(batch.losses().float(), losses.expand(3), rtol=1e-5, atol=0)


def test_all_runs_and_each_run_are_the_same_memory():
    batch = runs()
    batch.query()
    torch.optim.SGD(batch.parameters, lr=0.1).step()
    expected = tailed_diagonal().x0 - 0.1 * batch.parameter.grad
    torch.testing.assert_close(batch.parameter.detach(), expected, rtol=1e-6, atol=1e-6)


def test_equal_seeds_give_equal_noise_and_others_do_not():
    gradients = []
    for seed in (0, 0, 1):
        batch = runs(seed=seed)
        batch.query()
        gradients.append(batch.parameter.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert not torch.equal(gradients[0], gradients[2])


def test_noise_ends_after_the_promised_steps():
    batch = runs(steps=1)
    batch.query()
    with pytest.raises(IndexError, match="noise for 1 queries only"):
        batch.query()


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"alpha must be .* <= 2, got 2\.5"):
        stable_noise(2.5, (3,), rng=0)
    with pytest.raises(ValueError, match="noise must be one of 'entries', 'rank one', got 'rank'"):
        tailed_matrix("rank")
    for name in ("runs", "steps"):
        with pytest.raises(ValueError, match=f"{name} must be an integer >= 1, got 0"):
            runs(**{name: 0})
    with pytest.raises(ValueError, match="seed must be an integer >= 0, got -1"):
        runs(seed=-1)
