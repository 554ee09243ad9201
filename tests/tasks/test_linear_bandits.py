import numpy as np
import pytest

from thalweg.tasks import (
    ClassificationBandit,
    LinearBandit,
    changing_arms_bandit,
    classification_bandit,
    fixed_arms_bandit,
    isotropic_bandit,
    one_hot_bandit,
    planted_gap_bandit,
)


@pytest.mark.parametrize("n_runs", [None, 3])
@pytest.mark.parametrize(
    "make", [fixed_arms_bandit, changing_arms_bandit, planted_gap_bandit, isotropic_bandit]
)
def test_rounds_are_linear_with_one_noise_for_all_arms(make, n_runs):
    env = make(0, n_runs=n_runs)
    rng = np.random.default_rng(1)
    noises = []
    for _ in range(400):
        contexts, means, rewards = env.round(rng)
        np.testing.assert_allclose(means, (contexts @ env.theta[..., None])[..., 0], atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(contexts, axis=-1), 1, atol=1e-12)
        noise = rewards - means
        np.testing.assert_allclose(noise - noise[..., :1], 0, atol=1e-12)
        noises.append(noise[..., 0])
    noises = np.array(noises)
    # Four standard errors of a standard deviation from n draws, σ/√(2n).
    assert noises.std() == pytest.approx(env.sigma, rel=4 / np.sqrt(2 * noises.size))
    assert abs(noises.mean()) < 4 * env.sigma / np.sqrt(noises.size)


@pytest.mark.parametrize("make", [fixed_arms_bandit, one_hot_bandit, planted_gap_bandit])
def test_same_seed_same_instance_and_rounds(make):
    first, second = make(5), make(5)
    np.testing.assert_array_equal(first.arms, second.arms)
    np.testing.assert_array_equal(first.theta, second.theta)
    rounds = [env.round(np.random.default_rng(1))[2] for env in (first, second)]
    np.testing.assert_array_equal(*rounds)
    assert not np.array_equal(first.theta, make(6).theta)


def test_theta_is_isotropic_on_the_sphere():
    env = fixed_arms_bandit(0, n_arms=1, dim=3, n_runs=4000)
    np.testing.assert_allclose(np.linalg.norm(env.theta, axis=1), 1)
    np.testing.assert_allclose(env.theta.mean(axis=0), 0, atol=4 / np.sqrt(3 * 4000))
    np.testing.assert_allclose(env.theta.T @ env.theta / 4000, np.eye(3) / 3, atol=0.03)
    assert env.theta_bound == pytest.approx(1)


def test_one_hot_means_are_uniform_and_bounded():
    env = one_hot_bandit(0, n_arms=20, n_runs=500)
    np.testing.assert_array_equal(env.means, env.theta)
    assert 0 <= env.means.min() < env.means.max() <= 1
    assert env.means.mean() == pytest.approx(0.5, abs=4 / np.sqrt(12 * 10_000))
    assert env.theta_bound <= np.sqrt(20)


def test_changing_arms_are_drawn_without_replacement_and_equally_often():
    env = changing_arms_bandit(0, pool=8, offered=3, dim=4)
    rng = np.random.default_rng(0)
    counts = np.zeros(8)
    for _ in range(4000):
        contexts = env.round(rng)[0]
        drawn = [int(np.flatnonzero((env.arms == x).all(axis=1))[0]) for x in contexts]
        assert len(set(drawn)) == 3
        counts[drawn] += 1
    # A binomial count with probability 3/8 has a standard deviation of 31.
    np.testing.assert_allclose(counts, 1500, atol=125)


@pytest.mark.parametrize("gap", [0.2, 0.5, 0.9])
def test_planted_gap_is_kept(gap):
    env = planted_gap_bandit(0, gap=gap, n_runs=50)
    np.testing.assert_allclose(env.means[:, 0], 1)
    assert np.all(env.means[:, 1:] <= 1 - gap)
    np.testing.assert_allclose(np.linalg.norm(env.arms, axis=-1), 1)


def test_classification_rewards_the_right_class_in_its_own_block():
    features = np.array([[0.6, 0.8], [1.0, 0.0], [0.0, 1.0]])
    labels = np.array([2, 0, 1])
    env = ClassificationBandit(features, labels)
    rng = np.random.default_rng(0)
    for _ in range(50):
        contexts, means, rewards = env.round(rng)
        blocks = contexts.reshape(3, 3, 2)
        z = blocks[0, 0]
        np.testing.assert_array_equal(blocks, np.eye(3)[:, :, None] * z)
        label = labels[np.flatnonzero((features == z).all(axis=1))[0]]
        np.testing.assert_array_equal(means, np.eye(3)[label])
        np.testing.assert_array_equal(rewards, means)


@pytest.mark.parametrize(
    ("name", "n", "n_arms"), [("digits", 1797, 10), ("breast_cancer", 569, 2), ("wine", 178, 3)]
)
def test_data_sets_have_unit_features_that_a_linear_rule_can_use(name, n, n_arms):
    env = classification_bandit(name)
    assert env.features.shape == (n, 9)
    assert env.n_arms == n_arms
    assert env.dim == 9 * n_arms
    np.testing.assert_allclose(np.linalg.norm(env.features, axis=1), 1)
    assert env.features is classification_bandit(name, n_runs=2).features
    targets = np.eye(n_arms)[env.labels]
    weights = np.linalg.lstsq(env.features, targets, rcond=None)[0]
    accuracy = np.mean((env.features @ weights).argmax(axis=1) == env.labels)
    assert accuracy > 0.8


def test_classification_batch_draws_rounds_of_its_own():
    env = classification_bandit("wine", n_runs=64)
    contexts, means, _ = env.round(np.random.default_rng(0))
    assert contexts.shape == (64, 3, 27)
    np.testing.assert_array_equal(means.sum(axis=1), 1)
    assert len(np.unique(contexts[:, 0], axis=0)) > 30


def test_linear_bandit_offers_everything_by_default():
    env = LinearBandit(arms=np.eye(3), theta=np.array([1.0, 2.0, 3.0]), sigma=0.0)
    contexts, means, rewards = env.round(np.random.default_rng(0))
    np.testing.assert_array_equal(contexts, np.eye(3))
    np.testing.assert_array_equal(means, [1, 2, 3])
    np.testing.assert_array_equal(rewards, means)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fixed_arms_bandit(0, n_arms=0), "n_arms must be an integer >= 1"),
        (lambda: fixed_arms_bandit(0, dim=0), "dim must be an integer >= 1"),
        (lambda: fixed_arms_bandit(0, n_runs=0), "n_runs must be an integer >= 1"),
        (lambda: one_hot_bandit(0, n_arms=0), "n_arms must be an integer >= 1"),
        (lambda: changing_arms_bandit(0, pool=5, offered=6), "offered must be an integer"),
        (lambda: planted_gap_bandit(0, gap=2.5), "gap must be a finite number"),
        (lambda: planted_gap_bandit(0, dim=1), "dim must be an integer >= 2"),
        (lambda: isotropic_bandit(0, n_arms=0), "n_arms must be an integer >= 1"),
        (lambda: isotropic_bandit(0, sigma=-1.0), "sigma must be a finite number >= 0"),
        (lambda: classification_bandit("iris"), "name must be one of 'digits'"),
        (lambda: classification_bandit("wine", components=14), "components must be an integer"),
        (
            lambda: LinearBandit(arms=np.eye(2), theta=np.zeros(3)),
            r"theta must have shape \(2,\), got \(3,\)",
        ),
        (
            lambda: LinearBandit(arms=np.eye(2), theta=np.array([np.nan, 0.0])),
            "theta must be finite",
        ),
        (
            lambda: LinearBandit(arms=np.eye(2), theta=np.zeros(2), offered=3),
            "offered must be an integer >= 1 and <= 2",
        ),
        (
            lambda: ClassificationBandit(np.eye(2), np.array([0, 1, 1])),
            r"labels must have shape \(2,\)",
        ),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
