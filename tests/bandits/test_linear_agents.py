import math

import numpy as np
import pytest

from thalweg.bandits import (
    AgentBatch,
    ArmChoice,
    LinGreedy,
    LinTS,
    LinUCB,
    RidgeRegression,
    simulate,
)
from thalweg.tasks import changing_arms_bandit, fixed_arms_bandit, isotropic_bandit, one_hot_bandit

AGENTS = [LinUCB, LinTS, LinGreedy]


def observations(n, dim, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, dim))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    return X, rng.normal(size=n)


def learned(ridge, X, r):
    for x, reward in zip(X, r, strict=True):
        ridge.update(x, reward)
    return ridge


# Ridge regression


@pytest.mark.parametrize(("dim", "lam"), [(5, 1.0), (5, 0.3), (150, 2.0)])
def test_ridge_matches_the_closed_form(dim, lam):
    X, r = observations(80, dim)
    if lam < 1:
        X *= math.sqrt(lam)
    ridge = learned(RidgeRegression(dim, lam=lam), X, r)
    V = lam * np.eye(dim) + X.T @ X
    theta = np.linalg.solve(V, X.T @ r)
    contexts = np.random.default_rng(1).normal(size=(7, dim))
    norms = np.sqrt(np.einsum("kd,dk->k", contexts, np.linalg.solve(V, contexts.T)))
    objective = np.sum((r - X @ theta) ** 2) + lam * theta @ theta
    np.testing.assert_allclose(ridge.V, V, rtol=1e-12)
    np.testing.assert_allclose(ridge.theta, theta, atol=1e-12)
    np.testing.assert_allclose(ridge.norms(contexts), norms, rtol=1e-11)
    np.testing.assert_allclose(ridge.predict(contexts), contexts @ theta, atol=1e-11)
    assert ridge.log_det == pytest.approx(np.linalg.slogdet(V / lam)[1], rel=1e-11)
    assert ridge.residual == pytest.approx(objective, rel=1e-11)
    assert ridge.noise_scale() == pytest.approx(math.sqrt(objective / 80), rel=1e-11)


def test_rank_one_updates_stay_accurate_over_ten_thousand_rounds():
    X, r = observations(10_000, 20)
    ridge = learned(RidgeRegression(20, refactor_every=10**9), X, r)
    exact = np.linalg.inv(ridge.V)
    assert np.linalg.norm(ridge.V_inv - exact) < 1e-8 * np.linalg.norm(exact)
    assert ridge.log_det == pytest.approx(np.linalg.slogdet(ridge.V)[1], rel=1e-8)
    np.testing.assert_allclose(ridge.theta, exact @ ridge.b, rtol=1e-8)


def test_refactoring_changes_nothing_but_round_off():
    X, r = observations(300, 6)
    often = learned(RidgeRegression(6, lam=3.0, refactor_every=7), X, r)
    never = learned(RidgeRegression(6, lam=3.0, refactor_every=10**9), X, r)
    np.testing.assert_allclose(often.V_inv, never.V_inv, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(often.theta, never.theta, rtol=1e-9)
    np.testing.assert_allclose(often.log_det, never.log_det, rtol=1e-12)


def test_a_negative_norm_triggers_a_factorization():
    X, r = observations(50, 4)
    ridge = learned(RidgeRegression(4), X, r)
    exact = ridge.norms(np.eye(4))
    ridge.V_inv -= 10 * np.eye(4)
    np.testing.assert_allclose(ridge.norms(np.eye(4)), exact, rtol=1e-12)


def test_float32_keeps_its_sums_in_float64():
    dim = 200
    X, r = observations(500, dim)
    double = learned(RidgeRegression(dim), X, r)
    single = learned(RidgeRegression(dim, dtype=np.float32), X.astype(np.float32), r)
    contexts = X[:20].astype(np.float32)
    assert single.V_inv.dtype == np.float32
    assert single.norms(contexts).dtype == np.float32
    assert single.V.dtype == single.theta.dtype == np.float64
    # 500 rank-one updates, each with a relative round-off of 6e-8 in the worst case.
    np.testing.assert_allclose(single.norms(contexts), double.norms(X[:20]), rtol=1e-4)
    np.testing.assert_allclose(single.theta, double.theta, atol=1e-4)


def test_batched_ridge_is_a_stack_of_single_ones():
    X, r = observations(60, 3)
    X, r = X.reshape(20, 3, 3), r.reshape(20, 3)
    stacked = RidgeRegression(3, lam=2.0, n_runs=3, refactor_every=9)
    for x, reward in zip(X, r, strict=True):
        stacked.update(x, reward)
    contexts = np.random.default_rng(1).normal(size=(3, 4, 3))
    for run in range(3):
        single = learned(RidgeRegression(3, lam=2.0, refactor_every=9), X[:, run], r[:, run])
        np.testing.assert_allclose(stacked.V[run], single.V, rtol=1e-12)
        np.testing.assert_allclose(stacked.theta[run], single.theta, rtol=1e-10)
        np.testing.assert_allclose(stacked.log_det[run], single.log_det, rtol=1e-12)
        np.testing.assert_allclose(stacked.residual[run], single.residual, rtol=1e-10)
        np.testing.assert_allclose(stacked.norms(contexts)[run], single.norms(contexts[run]))


def test_perturbation_has_the_inverse_gram_matrix_as_covariance():
    X, r = observations(10, 3)
    ridge = learned(RidgeRegression(3), X, r)
    rng = np.random.default_rng(0)
    n = 20_000
    drawn = np.array([ridge.perturbation(rng) for _ in range(n)])
    # The entries of a sample covariance have a standard deviation of at most √2 V⁻¹ᵢᵢ/√n.
    tolerance = 5 * math.sqrt(2 / n) * ridge.V_inv.max()
    np.testing.assert_allclose(drawn.T @ drawn / n, ridge.V_inv, atol=tolerance)


# Choice


def test_random_ties_are_uniform_over_the_best_arms():
    choice = ArmChoice("random", rng=0)
    index = np.array([1.0, 3.0, 2.0, 3.0, 3.0])
    counts = np.bincount([choice.best(index) for _ in range(3000)], minlength=5)
    assert counts[[0, 2]].sum() == 0
    # Three standard deviations of a binomial count, √(3000·1/3·2/3) = 26 each.
    np.testing.assert_allclose(counts[[1, 3, 4]], 1000, atol=80)


def test_ties_of_a_batch_are_broken_per_run():
    index = np.array([[1.0, 1.0, 0.0], [0.0, 2.0, 1.0]])
    choice = ArmChoice("random", rng=0)
    drawn = np.array([choice.best(index) for _ in range(200)])
    assert set(drawn[:, 0]) == {0, 1}
    assert set(drawn[:, 1]) == {1}
    np.testing.assert_array_equal(ArmChoice("first").best(index), [0, 1])


# Agents


def test_ucb_index_against_the_formula():
    agent = LinUCB(3, lam=2.0, sigma=0.5, S=1.5, delta=0.1, scale=0.3)
    X, r = observations(30, 3)
    for x, reward in zip(X, r, strict=True):
        agent.update(x, None, reward)
    V_inv = np.linalg.inv(agent.ridge.V)
    beta = 0.5 * math.sqrt(2 * math.log(10) + np.linalg.slogdet(agent.ridge.V / 2)[1])
    beta += math.sqrt(2) * 1.5
    expected = [x @ agent.ridge.theta + 0.3 * beta * math.sqrt(x @ V_inv @ x) for x in X]
    np.testing.assert_allclose(agent.index(X), expected, rtol=1e-10)


def test_zero_scales_are_greedy():
    env = changing_arms_bandit(0)
    greedy = simulate(LinGreedy(env.dim, tie_break="first"), env, 200, rng=1).arms
    for agent in (LinUCB, LinTS):
        zero = agent(env.dim, scale=0.0, tie_break="first", rng=0)
        np.testing.assert_array_equal(simulate(zero, env, 200, rng=1).arms, greedy)


@pytest.mark.parametrize(
    ("scale", "spread"),
    [
        (1.0, lambda agent: 0.5),
        (0.3, lambda agent: 0.15),
        ("sqrt_dim", lambda agent: 0.5 * math.sqrt(2)),
        ("confidence", lambda agent: agent.ridge.confidence_radius(0.5, 1.0, 0.01)),
    ],
)
def test_thompson_index_is_gaussian_around_the_estimate(scale, spread):
    agent = LinTS(2, sigma=0.5, scale=scale, rng=0)
    X, r = observations(10, 2)
    for x, reward in zip(X, r, strict=True):
        agent.update(x, None, reward)
    context = np.array([[0.6, -0.8]])
    n = 10_000
    drawn = np.array([agent.index(context)[0] for _ in range(n)])
    deviation = spread(agent) * agent.ridge.norms(context)[0]
    # Five standard errors: deviation/√n of the mean, deviation/√(2n) of the deviation.
    assert drawn.mean() == pytest.approx(agent.predict(context)[0], abs=5 * deviation / 100)
    assert drawn.std() == pytest.approx(deviation, rel=5 / math.sqrt(2 * n))


def test_thompson_samples_one_parameter_for_all_arms():
    agent = LinTS(2, rng=0)
    x = np.array([0.3, 0.4])
    index = agent.index([x, 2 * x, x])
    assert index[1] == pytest.approx(2 * index[0], rel=1e-14)
    assert index[2] == index[0]


def test_greedy_suffices_where_contexts_explore():
    env = isotropic_bandit(0, n_runs=20)
    greedy = simulate(AgentBatch(LinGreedy(env.dim, rng=0), 20), env, 1000, rng=1)
    ucb = simulate(AgentBatch(LinUCB(env.dim, sigma=0.5, rng=0), 20), env, 1000, rng=1)
    assert greedy.total_regret.mean() < 1.2 * ucb.total_regret.mean()


@pytest.mark.parametrize("make", AGENTS)
def test_agents_find_the_best_arm_of_an_easy_bandit(make):
    env = fixed_arms_bandit(0, n_arms=5, dim=3)
    agent = make(3, rng=0)
    rng = np.random.default_rng(1)
    for _ in range(3000):
        arm = int(rng.integers(5))
        agent.update(env.arms, arm, env.round(rng)[2][arm])
    assert np.argmax(agent.predict(env.arms)) == np.argmax(env.means)
    np.testing.assert_allclose(agent.predict(env.arms), env.arms @ agent.ridge.theta)


@pytest.mark.parametrize("make", AGENTS)
def test_agents_resume_bit_for_bit(make):
    env = one_hot_bandit(0, n_arms=6)
    agent, resumed = make(6, rng=0), make(6, rng=1)
    simulate(agent, env, 60, rng=1)
    resumed.set_state(agent.get_state())
    np.testing.assert_array_equal(
        simulate(agent, env, 100, rng=2).arms, simulate(resumed, env, 100, rng=2).arms
    )


@pytest.mark.parametrize("make", AGENTS)
def test_batches_of_deterministic_agents_repeat_the_single_ones(make):
    runs = 3
    env = fixed_arms_bandit(0, n_arms=8, dim=3, n_runs=runs)
    extra = {} if make is LinGreedy else {"scale": 0.0 if make is LinTS else 1.0}
    agent = make(3, tie_break="first", rng=0, **extra)
    agent.update(np.eye(3), 0, 100.0)
    batch = AgentBatch(agent, runs)
    assert batch.agent.ridge.updates == 0
    assert agent.ridge.updates == 1
    trace = simulate(batch, env, 80, rng=1)
    noise = np.random.default_rng(1).standard_normal((80, runs, 1))
    for run in range(runs):
        single = make(3, tie_break="first", rng=0, **extra)
        for t in range(80):
            arm = single.select(env.arms[run])
            assert arm == trace.arms[run, t]
            single.update(env.arms[run], arm, (env.means[run] + noise[t, run])[arm])


def test_batch_runs_of_thompson_sampling_draw_independently():
    batch = AgentBatch(LinTS(3, rng=0), 50)
    index = batch.agent.index(np.tile(np.eye(3), (50, 1, 1)))
    assert len(np.unique(index[:, 0])) == 50


def test_batch_takes_played_contexts_without_arms():
    batch, other = AgentBatch(LinUCB(2), 2), AgentBatch(LinUCB(2), 2)
    contexts = np.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.1, 0.2]]])
    batch.update(contexts, [0, 1], [1.0, 2.0])
    other.update(contexts[[0, 1], [0, 1]], None, [1.0, 2.0])
    np.testing.assert_array_equal(batch.agent.ridge.theta, other.agent.ridge.theta)
    resumed = AgentBatch(LinUCB(2), 2)
    resumed.set_state(batch.get_state())
    np.testing.assert_array_equal(resumed.agent.ridge.V_inv, batch.agent.ridge.V_inv)


# Bad input


@pytest.mark.parametrize(
    ("make", "parameters", "error", "message"),
    [
        (LinUCB, {"scale": -1.0}, ValueError, "scale must be a finite number >= 0"),
        (LinUCB, {"sigma": np.nan}, ValueError, "sigma must be a finite number >= 0"),
        (LinUCB, {"S": -1.0}, ValueError, "S must be a finite number >= 0"),
        (LinUCB, {"delta": 2.0}, ValueError, "delta must be a finite number > 0 and < 1"),
        (LinTS, {"scale": "large"}, ValueError, "scale must be one of 'sqrt_dim', 'confidence'"),
        (LinTS, {"scale": np.inf}, ValueError, "scale must be a finite number >= 0"),
        (LinTS, {"sigma": -1.0}, ValueError, "sigma must be a finite number >= 0"),
        (LinTS, {"delta": 0.0}, ValueError, "delta must be a finite number > 0 and < 1"),
        (LinGreedy, {"lam": 0.0}, ValueError, "lam must be a finite number > 0"),
        (LinGreedy, {"tie_break": "last"}, ValueError, "tie_break must be one of"),
    ],
)
def test_bad_parameters_are_refused(make, parameters, error, message):
    with pytest.raises(error, match=message):
        make(3, **parameters)


@pytest.mark.parametrize("make", AGENTS)
def test_bad_contexts_are_refused(make):
    agent = make(3)
    for method in (agent.select, agent.predict, agent.index):
        with pytest.raises(ValueError, match=r"contexts must have shape \(K, 3\), got \(2, 2\)"):
            method(np.eye(2))
    with pytest.raises(IndexError, match="arm must be one of the 3 offered"):
        agent.update(np.eye(3), 3, 1.0)
    with pytest.raises(ValueError, match="reward must be a finite number"):
        agent.update(np.eye(3), 0, np.nan)
