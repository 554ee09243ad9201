import math
from functools import partial

import numpy as np
import pytest

from thalweg.bandits import (
    EQOL,
    AgentBatch,
    AgentGroup,
    EQOLBatch,
    LinTS,
    LinUCB,
    replicate,
    simulate,
)
from thalweg.tasks import changing_arms_bandit, fixed_arms_bandit, planted_gap_bandit


class Scripted:
    """Plays arms in a fixed order and remembers what it was told."""

    def __init__(self, arms):
        self.arms = iter(arms)
        self.told = []

    def select(self, contexts):
        return next(self.arms)

    def update(self, contexts, arm, reward):
        self.told.append((arm, reward))


class Fixed:
    """An environment of two arms with means 0.2 and 1, whose rewards are the means plus 5."""

    def __init__(self, fail_at=None, error=KeyboardInterrupt):
        self.left = math.inf if fail_at is None else fail_at
        self.error = error

    def round(self, rng):
        self.left -= 1
        if self.left < 0:
            raise self.error
        means = np.array([0.2, 1.0])
        return np.eye(2), means, means + 5


def test_regret_rewards_and_arms_of_a_scripted_agent():
    agent = Scripted([0, 1, 0])
    trace = simulate(agent, Fixed(), 3)
    np.testing.assert_allclose(trace.regret, [0.8, 0, 0.8])
    np.testing.assert_allclose(trace.cumulative_regret, [0.8, 0.8, 1.6])
    np.testing.assert_allclose(trace.rewards, [5.2, 6.0, 5.2])
    np.testing.assert_array_equal(trace.arms, [0, 1, 0])
    assert trace.total_regret == pytest.approx(1.6)
    assert trace.capped is None
    assert trace.capped_share is None
    assert trace.rounds == 3
    assert trace.message == "all rounds played"
    # The agent hears of its own reward only.
    assert agent.told == [(0, 5.2), (1, 6.0), (0, 5.2)]


def test_agents_meet_the_same_rounds_for_one_seed():
    env = changing_arms_bandit(0)

    class Recorder(Scripted):
        def __init__(self, arms):
            super().__init__(arms)
            self.seen = []

        def select(self, contexts):
            self.seen.append(contexts)
            return super().select(contexts)

    first, second = Recorder([0] * 20), Recorder(list(range(10)) * 2)
    one = simulate(first, env, 20, rng=3)
    two = simulate(second, env, 20, rng=3)
    np.testing.assert_array_equal(first.seen, second.seen)
    noise_one, noise_two = (
        [r - x[a] @ env.theta for r, x, a in zip(t.rewards, first.seen, t.arms, strict=True)]
        for t in (one, two)
    )
    np.testing.assert_allclose(noise_one, noise_two, atol=1e-12)


def test_same_seeds_same_trace():
    env = fixed_arms_bandit(0)
    traces = [simulate(LinTS(env.dim, rng=1), env, 50, rng=2) for _ in range(2)]
    np.testing.assert_array_equal(traces[0].arms, traces[1].arms)


def test_interruption_returns_the_rounds_so_far():
    trace = simulate(Scripted([0] * 10), Fixed(fail_at=4), 10)
    assert trace.message == "interrupted"
    np.testing.assert_allclose(trace.regret, [0.8] * 4)


def test_interruption_before_the_first_round_returns_an_empty_trace():
    trace = simulate(Scripted([]), Fixed(fail_at=0), 10)
    assert trace.rounds == 0
    assert trace.total_regret == 0
    assert math.isnan(trace.seconds_per_decision)


def test_other_errors_pass():
    with pytest.raises(RuntimeError):
        simulate(Scripted([0] * 10), Fixed(fail_at=4, error=RuntimeError), 10)


def test_callback_sees_each_round_and_can_stop():
    seen = []

    def callback(t, regret):
        seen.append((t, regret))
        return t == 3

    trace = simulate(Scripted([0] * 10), Fixed(), 10, callback=callback)
    np.testing.assert_allclose(seen, [(1, 0.8), (2, 1.6), (3, 2.4)])
    assert trace.rounds == 3
    assert trace.message == "stopped by the callback"


def test_progress_bar_shows_the_rounds(capsys):
    simulate(Scripted([0] * 30), Fixed(), 30, progress=True)
    assert "30/30" in capsys.readouterr().err


def test_branches_are_those_of_the_arms_played():
    env = changing_arms_bandit(0, dim=4)
    agent = EQOL(4, c1=4.0, c2=1.0, rng=0)
    replay = EQOL(4, c1=4.0, c2=1.0, rng=0)
    trace = simulate(agent, env, 60, rng=1)
    rng = np.random.default_rng(1)
    for t in range(60):
        contexts, _, rewards = env.round(rng)
        arm = trace.arms[t]
        assert replay.capped(contexts)[arm] == trace.capped[t]
        replay.update(contexts, int(arm), rewards[arm])
    assert 0 < trace.capped_share < 1
    assert simulate(EQOL(4), env, 5, rng=1, branches=False).capped is None


def test_batch_trace_has_a_row_per_run():
    env = fixed_arms_bandit(0, n_arms=6, dim=3, n_runs=5)
    totals = []
    trace = simulate(
        EQOLBatch(5, 3, c1=4.0, c2=1.0, rng=0),
        env,
        40,
        rng=1,
        callback=lambda t, regret: totals.append(regret),
    )
    rows = np.arange(5)[:, None]
    np.testing.assert_allclose(
        trace.regret, env.means.max(axis=1, keepdims=True) - env.means[rows, trace.arms]
    )
    np.testing.assert_allclose(totals[-1], trace.total_regret)
    assert trace.rounds == 40
    assert trace.capped.shape == (5, 40)
    assert trace.capped_share.shape == (5,)
    without_branches = simulate(AgentBatch(LinUCB(3, rng=0), 5), env, 10, rng=1)
    assert without_branches.capped is None


def test_group_plays_the_agents_side_by_side():
    env = fixed_arms_bandit(0, n_arms=6, dim=3, n_runs=3)
    make = partial(LinUCB, 3, tie_break="first")
    group = simulate(AgentGroup([make() for _ in range(3)]), env, 50, rng=1)
    batch = simulate(AgentBatch(make(), 3), env, 50, rng=1)
    np.testing.assert_array_equal(group.arms, batch.arms)
    np.testing.assert_array_equal(group.rewards, batch.rewards)


def test_replicate_batches_linear_agents_and_groups_others():
    assert isinstance(replicate(partial(LinUCB, 3), 4, rng=0), AgentBatch)

    class Random:
        def __init__(self, rng):
            self.rng = rng

        def select(self, contexts):
            return int(self.rng.integers(len(contexts)))

        def update(self, contexts, arm, reward):
            pass

    env = fixed_arms_bandit(0, n_arms=6, dim=3, n_runs=4)
    arms = simulate(replicate(Random, 4, rng=0), env, 30, rng=1).arms
    assert len({tuple(run) for run in arms}) == 4
    np.testing.assert_array_equal(arms, simulate(replicate(Random, 4, rng=0), env, 30, rng=1).arms)
    with pytest.raises(ValueError, match="n_runs must be an integer >= 1, got 0"):
        replicate(Random, 0)


def test_trace_prints_its_summary():
    env = planted_gap_bandit(0)
    text = str(simulate(EQOL(env.dim, rng=0), env, 30, rng=1))
    assert text.startswith("regret ")
    assert "in 30 rounds, 0% capped" in text
    assert text.endswith("per decision (all rounds played)")


def test_plots_show_the_mean_regret():
    import matplotlib as mpl

    mpl.use("Agg")
    env = fixed_arms_bandit(0, n_arms=6, dim=3, n_runs=4)
    many = simulate(EQOLBatch(4, 3, rng=0), env, 20, rng=1)
    ax = many.plot(label="EQOL")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), many.cumulative_regret.mean(axis=0))
    assert len(ax.collections) == 1
    one = simulate(Scripted([0] * 5), Fixed(), 5)
    assert one.plot(ax) is ax
    np.testing.assert_allclose(ax.lines[1].get_ydata(), one.cumulative_regret)
    assert len(ax.collections) == 1
    mpl.pyplot.close("all")


@pytest.mark.parametrize(
    ("T", "error", "message"),
    [
        (0, ValueError, "T must be an integer >= 1, got 0"),
        (10.0, TypeError, "T must be an integer"),
    ],
)
def test_bad_horizons_are_refused(T, error, message):
    with pytest.raises(error, match=message):
        simulate(Scripted([0]), Fixed(), T)


def test_means_that_are_not_finite_are_refused():
    class Broken:
        def round(self, rng):
            return np.eye(2), np.array([0.0, np.nan]), np.zeros(2)

    with pytest.raises(ValueError, match="means must be finite"):
        simulate(Scripted([0]), Broken(), 1)
