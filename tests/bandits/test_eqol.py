import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from thalweg.bandits import (
    EQOL,
    EQOLBatch,
    LinGreedy,
    LinUCB,
    eqol_diagnostics,
    simulate,
)
from thalweg.bandits.eqol import capped_quadratic_bonus, ellipsoid_radius
from thalweg.tasks import (
    changing_arms_bandit,
    fixed_arms_bandit,
    one_hot_bandit,
    planted_gap_bandit,
)


def trained(rounds=100, dim=4, **parameters):
    """Return an agent that has played ``rounds`` rounds, and the environment that it played."""
    env = changing_arms_bandit(0, dim=dim)
    agent = EQOL(dim, rng=0, **parameters)
    simulate(agent, env, rounds, rng=1)
    return agent, env


def arms_played(agent, env, rounds=500):
    return simulate(agent, env, rounds, rng=1, branches=False).arms


# The index


@pytest.mark.parametrize("c1", [math.inf, 1e12])
def test_infinite_c1_is_oful(c1):
    env = changing_arms_bandit(0)
    eqol = EQOL(env.dim, c1=c1, tie_break="first")
    oful = LinUCB(env.dim, tie_break="first")
    np.testing.assert_array_equal(arms_played(eqol, env), arms_played(oful, env))


def test_zero_c1_is_greedy():
    env = changing_arms_bandit(0)
    eqol = EQOL(env.dim, c1=0.0, tie_break="first")
    greedy = LinGreedy(env.dim, tie_break="first")
    np.testing.assert_array_equal(arms_played(eqol, env), arms_played(greedy, env))


def test_infinite_c1_gives_no_bonus_to_a_zero_context():
    assert EQOL(2, c1=math.inf).bonus([[0.0, 0.0], [1.0, 0.0]])[0] == 0


def test_default_schedule_against_the_formulas():
    dim, lam, sigma, S, delta, c = 4, 2.0, 0.7, 1.5, 0.05, 0.3
    agent, env = trained(60, dim, lam=lam, sigma=sigma, S=S, delta=delta, c=c)
    contexts = env.round(np.random.default_rng(2))[0]
    V_inv = np.linalg.inv(agent.V)
    _, log_det = np.linalg.slogdet(agent.V)
    beta = sigma * math.sqrt(2 * math.log(1 / delta) + log_det - dim * math.log(lam))
    beta += math.sqrt(lam) * S
    s = np.sqrt([x @ V_inv @ x for x in contexts])
    bonus = np.minimum(c * beta * math.sqrt(61 / dim) * s**2, beta * s)
    assert agent.t == 61
    assert agent.beta == pytest.approx(beta, rel=1e-12)
    np.testing.assert_allclose(agent.bonus(contexts), bonus, rtol=1e-10)
    np.testing.assert_allclose(agent.index(contexts), contexts @ agent.theta + bonus, rtol=1e-10)
    np.testing.assert_allclose(agent.predict(contexts), contexts @ agent.theta, rtol=1e-12)


def test_horizon_replaces_the_round_in_c1():
    agent = EQOL(4, horizon=900, c=0.2)
    c1, c2 = agent.coefficients()
    assert c1 == pytest.approx(0.2 * agent.beta * math.sqrt(900 / 4), rel=1e-14)
    assert c2 == agent.beta


def test_bound_optimal_c_minimizes_the_regret_bound():
    agent, _ = trained(300, c="bound")
    D = agent.ridge.log_det
    beta, t, d = agent.beta, agent.t, agent.dim
    c = agent.coefficients()[0] / (beta * math.sqrt(t / d))

    def bound(c):
        return 2 * c * beta * math.sqrt(t / d) * D + beta * math.sqrt(d * t) / (2 * c)

    assert c == pytest.approx(1 / (2 * math.sqrt(D / d)), rel=1e-12)
    assert bound(c) < min(bound(0.99 * c), bound(1.01 * c))


def test_bound_optimal_c_starts_on_the_cap():
    agent = EQOL(3, c="bound")
    np.testing.assert_allclose(agent.bonus(np.eye(3)), agent.beta)


@pytest.mark.parametrize(
    ("parameters", "formula"),
    [
        (
            {"c1": 2.0, "c2": 0.5},
            lambda N, lam: np.minimum(2.0 / (N + lam), 0.5 / np.sqrt(N + lam)),
        ),
        ({"c1": 2.0, "c2": math.inf}, lambda N, lam: 2.0 / (N + lam)),
        ({"c1": math.inf, "c2": 0.5}, lambda N, lam: 0.5 / np.sqrt(N + lam)),
    ],
)
def test_one_hot_contexts_make_the_tabular_bonus(parameters, formula):
    lam, counts = 1.5, np.array([0, 1, 4, 30])
    agent = EQOL(4, lam=lam, **parameters)
    for arm, count in enumerate(counts):
        for _ in range(count):
            agent.update(np.eye(4), arm, 1.0)
    np.testing.assert_allclose(agent.bonus(np.eye(4)), formula(counts, lam), atol=1e-12)


def test_callable_schedule_reads_the_agent_of_the_coming_round():
    seen = []

    def c1(agent):
        seen.append(agent.t)
        return agent.beta / agent.t

    agent = EQOL(2, c1=c1, c2=lambda agent: 2 * agent.beta)
    for _ in range(3):
        agent.select(np.eye(2))
        agent.update(np.eye(2), 0, 1.0)
    assert seen == [1, 2, 3]
    c1_now, c2_now = agent.coefficients()
    assert (c1_now, c2_now) == (agent.beta / 4, 2 * agent.beta)


def test_selections_do_not_advance_the_schedule():
    agent = EQOL(2)
    before = agent.coefficients()
    for _ in range(5):
        agent.select(np.eye(2))
    assert agent.t == 1
    assert agent.coefficients() == before


def test_capped_names_the_active_branch():
    agent = EQOL(2, c1=2.0, c2=1.0)
    contexts = np.array([[0.4, 0.0], [0.6, 0.0]])
    np.testing.assert_array_equal(agent.capped(contexts), [False, True])
    np.testing.assert_allclose(agent.bonus(contexts), [2.0 * 0.16, 1.0 * 0.6])


# Quasi-optimism


def random_ellipsoids(count, dim, rng):
    """Return V⁻¹, β, x, θ̂ and a θ* in the confidence ellipsoid, ``count`` of each."""
    factor = rng.normal(size=(count, dim, dim)) * 10 ** rng.uniform(-1, 1, size=(count, 1, 1))
    V = factor @ factor.transpose(0, 2, 1) + 0.1 * np.eye(dim)
    V_inv = np.linalg.inv(V)
    beta = 10 ** rng.uniform(-1, 1, size=count)
    x, theta_hat, u = rng.normal(size=(3, count, dim))
    u *= (beta * rng.uniform(0, 1, size=count) / np.linalg.norm(u, axis=1))[:, None]
    # ‖L⁻ᵀ u‖_V = ‖u‖ ≤ β.
    deviation = np.linalg.solve(np.linalg.cholesky(V).transpose(0, 2, 1), u[..., None])[..., 0]
    return V_inv, beta, x, theta_hat, theta_hat + deviation


def test_index_is_optimistic_up_to_the_residual():
    rng = np.random.default_rng(0)
    V_inv, beta, x, theta_hat, theta_star = random_ellipsoids(10_000, 5, rng)
    c1 = 10 ** rng.uniform(-2, 2, size=10_000)
    c2 = beta * 10 ** rng.uniform(0, 1, size=10_000)
    s = np.sqrt(np.einsum("nd,nde,ne->n", x, V_inv, x))[:, None]
    bonus = capped_quadratic_bonus(s, c1, c2)[:, 0]
    deficit = np.einsum("nd,nd->n", x, theta_star - theta_hat) - bonus
    assert np.all(deficit <= beta**2 / (4 * c1) + 1e-12)
    # With c2 = β the deficit of the capped branch is 0.
    bonus = capped_quadratic_bonus(s, c1, beta)[:, 0]
    capped = ellipsoid_radius(s, c1, beta)[:, 0] >= beta
    assert capped.sum() > 1000
    deficit = np.einsum("nd,nd->n", x, theta_star - theta_hat) - bonus
    assert np.all(deficit[capped] <= 1e-12)


def test_residual_is_attained():
    agent, _ = trained(50, c1=30.0)
    direction = np.array([1.0, -2.0, 0.5, 0.3])
    s_wanted = agent.beta / (2 * 30.0)
    x = direction * s_wanted / math.sqrt(direction @ agent.ridge.V_inv @ direction)
    theta_star = agent.theta + agent.beta * agent.ridge.V_inv @ x / s_wanted
    report = eqol_diagnostics(agent, x[None], theta_star)
    assert report.shortfall is not None
    assert report.shortfall[0] == pytest.approx(agent.beta**2 / (4 * 30.0), abs=1e-10)
    assert report.deficit[0] == pytest.approx(report.residual, abs=1e-10)


def test_index_is_the_maximum_over_the_action_dependent_ellipsoid():
    agent, env = trained(40, dim=3, c1=3.0)
    contexts = env.round(np.random.default_rng(3))[0]
    report = eqol_diagnostics(agent, contexts)
    upper = np.linalg.cholesky(agent.V).T
    for x, radius, index in zip(contexts, report.radius, report.index, strict=True):
        solved = minimize(
            lambda theta, x=x: -x @ theta,
            agent.theta,
            jac=lambda theta, x=x: -x,
            constraints={
                "type": "ineq",
                "fun": lambda theta, r=radius: r**2 - np.sum((upper @ (theta - agent.theta)) ** 2),
            },
            method="SLSQP",
            options={"ftol": 1e-14, "maxiter": 200},
        )
        assert -solved.fun == pytest.approx(index, abs=1e-8)


@given(
    s=st.floats(0, 1e3),
    c1=st.floats(0, 1e6),
    c2=st.floats(0, 1e6),
)
@settings(max_examples=200, deadline=None)
def test_bonus_is_the_minimum_of_the_two_branches(s, c1, c2):
    bonus = capped_quadratic_bonus(np.array([s]), c1, c2)[0]
    assert bonus == pytest.approx(min(c1 * s**2, c2 * s), rel=1e-12, abs=1e-300)


# Guarantees in simulation


def test_confidence_ellipsoid_covers_theta_star_at_all_rounds():
    runs, dim = 500, 5
    env = fixed_arms_bandit(0, n_arms=20, dim=dim, n_runs=runs)
    batch = EQOLBatch(runs, dim, delta=0.01, rng=0)
    covered = np.ones(runs, dtype=bool)

    def check(t, regret):
        error = env.theta - batch.agent.theta
        distance = np.sqrt(np.einsum("rd,rde,re->r", error, batch.agent.V, error))
        covered[:] &= distance <= batch.agent.beta

    simulate(batch, env, 300, rng=1, callback=check, branches=False)
    assert covered.mean() >= 0.99


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"c": "bound"},
        {"c1": 5.0, "c2": lambda agent: 1.5 * agent.beta},
    ],
)
@pytest.mark.parametrize("make_env", [fixed_arms_bandit, changing_arms_bandit, planted_gap_bandit])
def test_regret_stays_below_the_general_bound(schedule, make_env):
    for seed in range(3):
        env = make_env(seed)
        agent = EQOL(env.dim, rng=seed, **schedule)
        rng = np.random.default_rng(seed)
        regret = bound = 0.0
        for _ in range(200):
            contexts, means, rewards = env.round(rng)
            arm = agent.select(contexts)
            bound += eqol_diagnostics(agent, contexts).regret_bound[arm]
            regret += means.max() - means[arm]
            assert regret <= bound
            agent.update(contexts, arm, rewards[arm])


def test_default_bound_has_the_closed_form_rate():
    # The docstring's 2cβ√(T/d) D + β√(2TD) + β√(dT)/(2c), which the summed charges stay below.
    env = fixed_arms_bandit(0)
    agent = EQOL(env.dim, rng=0)
    rng = np.random.default_rng(1)
    charged, T = 0.0, 500
    for _ in range(T):
        contexts, _, rewards = env.round(rng)
        arm = agent.select(contexts)
        charged += eqol_diagnostics(agent, contexts).regret_bound[arm]
        agent.update(contexts, arm, rewards[arm])
    D, beta, d, c = agent.ridge.log_det, agent.beta, agent.dim, 0.1
    # The sum of 1/√t is at most 2√T, which doubles the residual of a constant c1.
    residual = 2 * beta * math.sqrt(d * T) / (4 * c)
    exploration = 2 * c * beta * math.sqrt(T / d) * D + beta * math.sqrt(2 * T * D)
    assert charged <= exploration + residual


def test_explores_less_than_oful_at_the_same_confidence_level():
    runs = 24
    env = fixed_arms_bandit(0, n_runs=runs)
    eqol = simulate(EQOLBatch(runs, env.dim, rng=0), env, 1000, rng=1, branches=False)
    oful = simulate(EQOLBatch(runs, env.dim, c1=math.inf, rng=0), env, 1000, rng=1, branches=False)
    # About 0.42 is expected, with a standard error of 0.03.
    assert eqol.total_regret.mean() < 0.6 * oful.total_regret.mean()


# Invariances


def short_contexts(rounds=300, arms=8, dim=5):
    """Contexts of different lengths, so that no two indices tie in exact arithmetic."""
    rng = np.random.default_rng(4)
    contexts = rng.uniform(-0.4, 0.4, size=(rounds, arms, dim))
    theta = rng.normal(size=dim)
    return contexts, contexts @ theta + 0.3 * rng.normal(size=(rounds, 1))


def sequence(agent, contexts, rewards):
    arms = []
    for offered, payoff in zip(contexts, rewards, strict=True):
        arm = agent.select(offered)
        agent.update(offered, arm, payoff[arm])
        arms.append(arm)
    return arms


def test_rotated_contexts_give_the_same_arms():
    contexts, rewards = short_contexts()
    rotation = np.linalg.qr(np.random.default_rng(5).normal(size=(5, 5)))[0]
    plain = sequence(EQOL(5, tie_break="first"), contexts, rewards)
    rotated = sequence(EQOL(5, tie_break="first"), contexts @ rotation, rewards)
    assert len(set(plain)) > 3
    assert plain == rotated


def test_scaled_rewards_give_the_same_arms():
    contexts, rewards = short_contexts()
    plain = sequence(EQOL(5, tie_break="first"), contexts, rewards)
    scaled = sequence(EQOL(5, tie_break="first", sigma=7, S=7), contexts, 7 * rewards)
    assert plain == scaled


# Estimated noise, precision, delayed rewards, changing K


def test_estimated_sigma_is_the_scale_of_the_residuals():
    env = changing_arms_bandit(0, dim=4)
    agent = EQOL(4, sigma="auto", rng=0)
    assert agent.beta == EQOL(4, sigma=1.0).beta
    simulate(agent, env, 3000, rng=1, branches=False)
    # The estimate's standard error is 1/√(2·3000) = 0.013.
    assert agent.ridge.noise_scale() == pytest.approx(1.0, abs=0.05)
    known = EQOL(4, sigma=agent.ridge.noise_scale())
    known.ridge = agent.ridge
    assert agent.beta == known.beta


def test_float32_plays_like_float64():
    contexts, rewards = short_contexts(rounds=200)
    double = EQOL(5, tie_break="first")
    single = EQOL(5, tie_break="first", dtype=np.float32)
    agreed = np.equal(sequence(double, contexts, rewards), sequence(single, contexts, rewards))
    assert single.ridge.V_inv.dtype == np.float32
    assert single.theta.dtype == np.float64
    assert agreed.mean() > 0.98


def test_delayed_rewards_end_in_the_same_state_as_prompt_ones():
    contexts, rewards = short_contexts(rounds=40)
    agent = EQOL(5, rng=0)
    waiting = []
    for t, (offered, payoff) in enumerate(zip(contexts, rewards, strict=True)):
        arm = agent.select(offered)
        waiting.append((offered[arm], payoff[arm]))
        if t % 10 == 9:
            for x, reward in waiting[::-1]:
                agent.update(x, None, reward)
            waiting.clear()
        assert agent.t == 10 * ((t + 1) // 10) + 1
    prompt = EQOL(5)
    prompt.ridge.V = agent.V.copy()
    prompt.ridge.b = agent.ridge.b.copy()
    prompt.ridge.refactor()
    np.testing.assert_allclose(agent.theta, prompt.theta, rtol=1e-10)
    np.testing.assert_allclose(agent.ridge.log_det, prompt.ridge.log_det, rtol=1e-10)


def test_a_single_context_is_the_same_update_as_its_arm():
    contexts = np.array([[0.1, 0.5], [0.9, 0.2]])
    by_arm, by_context = EQOL(2), EQOL(2)
    by_arm.update(contexts, 1, 0.7)
    by_context.update(contexts[1], None, 0.7)
    np.testing.assert_array_equal(by_arm.theta, by_context.theta)


def test_number_of_arms_may_change():
    agent = EQOL(3, rng=0)
    rng = np.random.default_rng(0)
    for K in (1, 7, 2, 30):
        arm = agent.select(rng.uniform(-0.5, 0.5, size=(K, 3)))
        assert 0 <= arm < K
        agent.update(rng.uniform(-0.5, 0.5, size=(K, 3)), arm, 1.0)


# State


def through_json(state, path):
    path.write_text(json.dumps(state, default=lambda array: array.tolist()))
    return json.loads(path.read_text())


def through_npz(state, path):
    np.savez(path, **state)
    return dict(np.load(path.with_suffix(".npz"), allow_pickle=False))


@pytest.mark.parametrize("store", [through_json, through_npz])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("bits", ["PCG64", "MT19937", "Philox", "SFC64"])
def test_resumes_bit_for_bit(store, dtype, bits, tmp_path):
    # One-hot arms tie again and again, so the random stream matters.
    env = one_hot_bandit(0, n_arms=6)
    stream = np.random.Generator(getattr(np.random, bits)(3))
    agent = EQOL(6, refactor_every=50, dtype=dtype, rng=stream)
    simulate(agent, env, 120, rng=1)
    resumed = EQOL(6, refactor_every=50, dtype=dtype, rng=99)
    resumed.set_state(store(agent.get_state(), tmp_path / "state"))
    first = simulate(agent, env, 120, rng=2).arms
    second = simulate(resumed, env, 120, rng=2).arms
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(agent.ridge.V_inv, resumed.ridge.V_inv)
    np.testing.assert_array_equal(agent.theta, resumed.theta)
    assert agent.beta == resumed.beta
    assert agent.choice.rng.random() == resumed.choice.rng.random()


def test_a_state_is_a_copy_and_does_not_rewind_a_shared_stream():
    stream = np.random.default_rng(0)
    agent = EQOL(2, rng=stream)
    state = agent.get_state()
    agent.update(np.eye(2), 0, 1.0)
    np.testing.assert_array_equal(state["V"], np.eye(2))
    drawn = stream.random()
    agent.set_state(state)
    assert stream.random() != drawn
    assert agent.t == 1


def test_state_of_another_dimension_is_refused():
    with pytest.raises(ValueError, match=r"V must have shape \(3, 3\), got \(2, 2\)"):
        EQOL(3).set_state(EQOL(2).get_state())


def test_state_with_an_unknown_stream_is_refused():
    state = EQOL(2).get_state() | {"rng": json.dumps({"bit_generator": "seed"})}
    with pytest.raises(ValueError, match="bit_generator must be one of"):
        EQOL(2).set_state(state)


# Batches


def test_each_run_of_a_batch_plays_what_one_agent_plays():
    runs, T = 4, 150
    env = fixed_arms_bandit(0, n_arms=12, dim=4, n_runs=runs)
    batch = EQOLBatch(runs, 4, tie_break="first", refactor_every=40)
    trace = simulate(batch, env, T, rng=1)
    for run in range(runs):
        noise = np.random.default_rng(1)
        agent = EQOL(4, tie_break="first", refactor_every=40)
        for t in range(T):
            reward = env.means[run] + noise.standard_normal((runs, 1))[run]
            arm = agent.select(env.arms[run])
            assert arm == trace.arms[run, t]
            agent.update(env.arms[run], arm, reward[arm])
        np.testing.assert_allclose(batch.agent.theta[run], agent.theta, rtol=1e-9)
        np.testing.assert_allclose(batch.agent.beta[run], agent.beta, rtol=1e-9)


def test_batch_bonus_and_index_are_those_of_the_runs():
    batch = EQOLBatch(2, 2, c1=lambda agent: 3 * agent.beta)
    batch.update(np.tile(np.eye(2), (2, 1, 1)), [0, 1], [1.0, 2.0])
    contexts = np.array([[[1.0, 0.0], [0.3, 0.3]], [[0.0, 1.0], [0.2, 0.4]]])
    for run, (arm, reward) in enumerate([(0, 1.0), (1, 2.0)]):
        agent = EQOL(2, c1=lambda agent: 3 * agent.beta)
        agent.update(np.eye(2), arm, reward)
        np.testing.assert_allclose(batch.bonus(contexts)[run], agent.bonus(contexts[run]))
        np.testing.assert_allclose(batch.index(contexts)[run], agent.index(contexts[run]))


def test_batch_resumes_bit_for_bit():
    env = one_hot_bandit(0, n_arms=5, n_runs=3)
    batch, resumed = EQOLBatch(3, 5, rng=0), EQOLBatch(3, 5, rng=1)
    simulate(batch, env, 50, rng=1)
    resumed.set_state(batch.get_state())
    np.testing.assert_array_equal(
        simulate(batch, env, 50, rng=2).arms, simulate(resumed, env, 50, rng=2).arms
    )


# Diagnostics


def test_report_agrees_with_the_agent_and_leaves_it_alone():
    agent, env = trained(80)
    contexts = env.round(np.random.default_rng(3))[0]
    before = agent.get_state()
    report = eqol_diagnostics(agent, contexts, env.theta)
    np.testing.assert_array_equal(report.index, agent.index(contexts))
    np.testing.assert_array_equal(report.bonus, agent.bonus(contexts))
    np.testing.assert_allclose(report.bonus, report.radius * report.norm)
    np.testing.assert_allclose(report.shortfall, contexts @ env.theta - report.index)
    np.testing.assert_allclose(
        report.regret_bound, report.bonus + agent.beta * report.norm + report.residual
    )
    assert report.covered is True
    assert np.all(report.shortfall <= report.residual)
    direction = np.array([1.0, -1.0, 2.0, 0.0])
    step = agent.beta * direction / math.sqrt(direction @ agent.V @ direction)
    assert eqol_diagnostics(agent, contexts, agent.theta + 0.99 * step).covered is True
    assert eqol_diagnostics(agent, contexts, agent.theta + 1.01 * step).covered is False
    for key, value in agent.get_state().items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize(
    ("parameters", "residual"),
    [
        ({"c1": 0.0}, math.inf),
        ({"c1": 5.0, "c2": 0.1}, math.inf),
        ({"c1": math.inf}, 0.0),
        ({"c1": 0.0, "sigma": 0.0, "S": 0.0}, 0.0),
    ],
)
def test_residual_of_the_limits(parameters, residual):
    assert eqol_diagnostics(EQOL(2, **parameters), np.eye(2)).residual == residual


def test_report_plots_the_two_bonuses():
    import matplotlib as mpl

    mpl.use("Agg")
    agent, env = trained(80)
    ax = eqol_diagnostics(agent, env.round(np.random.default_rng(3))[0]).plot()
    s = ax.lines[0].get_xdata()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), agent.beta * s)
    np.testing.assert_allclose(
        ax.lines[1].get_ydata(), np.minimum(agent.coefficients()[0] * s**2, agent.beta * s)
    )
    mpl.pyplot.close("all")


# Bad input


@pytest.mark.parametrize(
    ("parameters", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be an integer >= 1, got 0"),
        ({"dim": 2.0}, TypeError, "dim must be an integer"),
        ({"lam": 0.0}, ValueError, "lam must be a finite number > 0"),
        ({"lam": np.nan}, ValueError, "lam must be a finite number > 0"),
        ({"sigma": -1.0}, ValueError, "sigma must be a finite number >= 0"),
        ({"sigma": "guess"}, ValueError, "sigma must be one of 'auto', got 'guess'"),
        ({"S": -1.0}, ValueError, "S must be a finite number >= 0"),
        ({"S": np.inf}, ValueError, "S must be a finite number >= 0"),
        ({"delta": 0.0}, ValueError, "delta must be a finite number > 0 and < 1"),
        ({"delta": 1.0}, ValueError, "delta must be a finite number > 0 and < 1"),
        ({"c": 0.0}, ValueError, "c must be a finite number > 0"),
        ({"c": "best"}, ValueError, "c must be one of 'bound', got 'best'"),
        ({"c": None}, TypeError, "c must be a number"),
        ({"c1": -1.0}, ValueError, "c1 must be a number >= 0"),
        ({"c2": np.nan}, ValueError, "c2 must be a number >= 0"),
        ({"c1": np.inf, "c2": np.inf}, ValueError, "c1 and c2 must not both be infinite"),
        ({"horizon": 0}, ValueError, "horizon must be an integer >= 1"),
        ({"tie_break": "last"}, ValueError, "tie_break must be one of 'random', 'first'"),
        ({"refactor_every": 0}, ValueError, "refactor_every must be an integer >= 1"),
        ({"dtype": np.float16}, ValueError, "dtype must be one of"),
        ({"rng": "seed"}, TypeError, "rng must be an int"),
    ],
)
def test_bad_parameters_are_refused(parameters, error, message):
    with pytest.raises(error, match=message):
        EQOL(**({"dim": 3} | parameters))


@pytest.mark.parametrize("method", ["select", "bonus", "index", "predict", "capped"])
@pytest.mark.parametrize(
    ("contexts", "error", "message"),
    [
        (np.zeros(3), ValueError, r"contexts must have shape \(K, 3\), got \(3,\)"),
        (np.zeros((2, 4)), ValueError, r"contexts must have shape \(K, 3\), got \(2, 4\)"),
        (np.zeros((0, 3)), ValueError, "contexts must hold at least one arm"),
        ([[0, 0, 0], [0, np.nan, 0]], ValueError, r"finite, got nan at contexts\[1, 1\]"),
        ([[np.inf, 0, 0]], ValueError, r"finite, got inf at contexts\[0, 0\]"),
        ([["a", "b", "c"]], TypeError, "contexts must be an array of float64"),
    ],
)
def test_bad_contexts_are_refused(method, contexts, error, message):
    with pytest.raises(error, match=message):
        getattr(EQOL(3), method)(contexts)


@pytest.mark.parametrize(
    ("contexts", "arm", "reward", "error", "message"),
    [
        (np.eye(3), 3, 1.0, IndexError, "arm must be one of the 3 offered, got 3"),
        (np.eye(3), -1, 1.0, IndexError, "arm must be one of the 3 offered, got -1"),
        (np.eye(3), 1.0, 1.0, TypeError, "arm must be an integer"),
        (np.eye(3), 0, [1.0], TypeError, "reward must be a number"),
        (np.eye(3), 0, "1", TypeError, "reward must be a number"),
        (np.eye(3), 0, np.nan, ValueError, "reward must be a finite number, got nan"),
        (np.eye(3), 0, np.inf, ValueError, "reward must be a finite number, got inf"),
        (np.eye(3), None, 1.0, ValueError, r"context must have shape \(3,\), got \(3, 3\)"),
        (np.zeros(3), 0, 1.0, ValueError, r"contexts must have shape \(K, 3\)"),
        ([[0, np.nan, 0]], 0, 1.0, ValueError, r"contexts\[0\] must be finite, got nan"),
        ([0, np.nan, 0], None, 1.0, ValueError, r"context must be finite, got nan"),
    ],
)
def test_bad_updates_are_refused_and_change_nothing(contexts, arm, reward, error, message):
    agent = EQOL(3)
    with pytest.raises(error, match=message):
        agent.update(contexts, arm, reward)
    assert agent.t == 1
    np.testing.assert_array_equal(agent.V, np.eye(3))


@pytest.mark.parametrize("value", [-1.0, np.nan])
def test_bad_schedule_values_are_refused(value):
    with pytest.raises(ValueError, match=r"c1 must return a number >= 0, got .* in round 1"):
        EQOL(2, c1=lambda agent: value).select(np.eye(2))


def test_a_schedule_that_becomes_infinite_twice_is_refused():
    with pytest.raises(ValueError, match="c1 and c2 must not both be infinite, as in round 1"):
        EQOL(2, c1=lambda agent: math.inf, c2=math.inf).select(np.eye(2))


def test_a_long_context_warns_once():
    agent = EQOL(2, lam=0.5)
    with pytest.warns(UserWarning, match=r"squared norm above lam=0\.5") as caught:
        agent.update(np.eye(2), 0, 1.0)
    # Warnings are errors in this suite, so a second one would raise.
    agent.update(np.eye(2), 0, 1.0)
    assert len(caught) == 1


def test_report_refuses_a_theta_star_of_another_dimension():
    with pytest.raises(ValueError, match=r"theta_star must have shape \(2,\)"):
        eqol_diagnostics(EQOL(2), np.eye(2), np.zeros(3))


@pytest.mark.parametrize(
    ("arms", "rewards", "error", "message"),
    [
        ([0, 2], [1.0, 1.0], IndexError, "arms must be among the 2 offered"),
        ([-1, 0], [1.0, 1.0], IndexError, "arms must be among the 2 offered"),
        ([0.0, 1.0], [1.0, 1.0], TypeError, "arms must be integers, got float64"),
        ([0], [1.0, 1.0], ValueError, r"arms must have shape \(2,\), got \(1,\)"),
        ([0, 1], [1.0, np.nan], ValueError, r"rewards must be finite, got nan at rewards\[1\]"),
        ([0, 1], 1.0, ValueError, r"rewards must have shape \(2,\), got \(\)"),
    ],
)
def test_bad_batch_updates_are_refused(arms, rewards, error, message):
    batch = EQOLBatch(2, 2)
    with pytest.raises(error, match=message):
        batch.update(np.tile(np.eye(2), (2, 1, 1)), arms, rewards)
    assert batch.agent.t == 1


def test_batch_contexts_need_the_axis_of_runs():
    with pytest.raises(ValueError, match=r"contexts must have shape \(2, K, 3\), got \(4, 3\)"):
        EQOLBatch(2, 3).select(np.zeros((4, 3)))
    with pytest.raises(ValueError, match="n_runs must be an integer >= 1"):
        EQOLBatch(0, 3)
