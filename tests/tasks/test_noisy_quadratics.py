"""The noisy quadratics: exact figures against simulation and closed forms."""

import numpy as np
import pytest
import torch

from thalweg.tasks import NoisyChains, NoisyQuadratic, best_expected_loss, qsc, qwc


def test_the_two_problems_are_those_of_the_paper():
    assert (qsc().dimension, qsc().smoothness) == (250, 1.0)
    assert qsc().loss(qsc().x0) == pytest.approx(3.05)
    assert qsc().eigenvalues.min() == pytest.approx(1 / 250)
    assert (qwc().dimension, qwc().smoothness) == (25, 1.0)
    assert qwc().x0 @ qwc().x0 == pytest.approx(1.33)
    assert qwc().eigenvalues.min() == 2.0**-24
    assert len(np.unique(qsc().x0)) == len(np.unique(qwc().x0)) == 1


def test_gradient_has_the_mean_and_variance_it_says():
    problem = qwc()
    x = np.tile(problem.x0, (20_000, 1))
    gradients = problem.gradient(x, 0.25, np.random.default_rng(0))
    error = 0.5 / np.sqrt(len(x))
    exact = problem.eigenvalues * problem.x0
    np.testing.assert_allclose(gradients.mean(0), exact, atol=5 * error)
    np.testing.assert_allclose(gradients.var(0), 0.25, rtol=0.05)


def test_gradient_is_the_derivative_of_the_loss():
    problem, step = qsc(), 1e-6
    x = np.random.default_rng(0).standard_normal(250)
    direction = np.random.default_rng(1).standard_normal(250)
    slope = (problem.loss(x + step * direction) - problem.loss(x - step * direction)) / (2 * step)
    exact = problem.gradient(x, 0.0, np.random.default_rng(2)) @ direction
    assert slope == pytest.approx(exact, rel=1e-6)


def test_stability_is_squared_mean_over_mean_square():
    problem = qwc()
    signal = np.sum((problem.eigenvalues * problem.x0) ** 2)
    assert problem.stability(problem.x0, 0.0) == 1.0
    assert problem.stability(problem.x0, 0.04) == pytest.approx(signal / (signal + 1.0))
    both = problem.stability(np.stack([problem.x0, np.zeros(25)]), 0.04)
    assert both[1] == 0.0
    assert problem.stability(np.zeros(25), 0.0) == 1.0


def test_expected_loss_of_a_constant_step_is_the_closed_form():
    problem, step, variance, steps = qsc(), 0.3, 1e-2, 400
    shrink = (1 - step * problem.eigenvalues) ** 2
    second = shrink**steps * problem.x0**2
    second += step**2 * variance * (1 - shrink**steps) / (1 - shrink)
    exact = 0.5 * problem.eigenvalues @ second
    assert problem.expected_loss([step] * steps, variance) == pytest.approx(exact, rel=1e-10)


def test_expected_loss_is_the_mean_of_simulated_runs():
    problem = NoisyQuadratic(np.array([1.0, 0.25]), np.array([1.0, 2.0]))
    steps = 0.8 / np.sqrt(np.arange(1, 31))
    rng = np.random.default_rng(0)
    x = np.tile(problem.x0, (20_000, 1))
    for step in steps:
        x = x - step * problem.gradient(x, 0.1, rng)
    losses = problem.loss(x)
    error = losses.std() / np.sqrt(len(losses))
    assert problem.expected_loss(steps, 0.1) == pytest.approx(losses.mean(), abs=4 * error)


def test_expected_loss_of_several_schedules_at_once():
    schedules = np.array([[0.1, 0.5, 5.0]] * 500)
    both = qsc().expected_loss(schedules, 1e-2)
    assert both[0] == pytest.approx(qsc().expected_loss(schedules[:, 0], 1e-2))
    assert both[2] == np.inf


@pytest.mark.parametrize("variance", [1.0, 1e-8])
def test_best_expected_loss_is_below_other_schedules(variance):
    best = best_expected_loss(qwc(), variance, 300)
    for size in (0.01, 0.1, 1.0):
        constant = np.full(300, size)
        assert best <= qwc().expected_loss(constant, variance)
        assert best <= qwc().expected_loss(constant / np.sqrt(np.arange(1, 301)), variance)


def test_best_expected_loss_needs_a_step():
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        best_expected_loss(qwc(), 1.0, 0)


def test_chains_follow_sgd_on_their_own_noise():
    problem, variances = qsc(), [1e-2, 0.0, 1.0]
    chains = NoisyChains(problem, variances, np.random.default_rng(3))
    optimizer = torch.optim.SGD(chains.parameters, lr=0.5)
    rng = np.random.default_rng(3)
    noise = np.concatenate([rng.standard_normal((256, 3, 250)) for _ in range(2)])
    x = np.tile(problem.x0, (3, 1))
    for t in range(300):
        chains.query()
        optimizer.step()
        x -= 0.5 * (problem.eigenvalues * x + np.sqrt(variances)[:, None] * noise[t])
    np.testing.assert_allclose(chains.losses(), problem.loss(x), rtol=1e-9)
    np.testing.assert_allclose(chains.parameters[2].detach().numpy(), x[2], rtol=1e-9)


def test_chains_leave_the_problem_alone():
    chains = NoisyChains(qwc(), [1.0], np.random.default_rng(0))
    chains.query()
    torch.optim.SGD(chains.parameters, lr=0.5).step()
    assert qwc().loss(qwc().x0) == NoisyChains(qwc(), [1.0], np.random.default_rng(0)).losses()[0]


@pytest.mark.parametrize(
    ("variances", "message"),
    [([-1.0], "variances must be >= 0, got -1.0"), ([np.nan], "variances must be finite")],
)
def test_bad_variances_are_refused(variances, message):
    with pytest.raises(ValueError, match=message):
        NoisyChains(qwc(), variances, np.random.default_rng(0))
