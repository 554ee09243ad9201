"""Bandits beside MABWiser's LinUCB and beside the matrix product that bounds them from below."""

from __future__ import annotations

import timeit

import numpy as np
import pytest
import threadpoolctl
from mabwiser.mab import MAB, LearningPolicy

from thalweg.bandits import EQOL, AgentBatch, EQOLBatch, LinGreedy, LinTS, LinUCB, simulate
from thalweg.tasks import fixed_arms_bandit

DIM, ARMS, RUNS = 10, 20, 200
AGENTS = {"EQOL": EQOL, "LinUCB": LinUCB, "LinTS": LinTS, "LinGreedy": LinGreedy}


def trained(make, dim, n_arms, **parameters):
    """Return an agent that has seen 300 rewards, and contexts for it."""
    contexts = fixed_arms_bandit(0, n_arms=n_arms, dim=dim).arms
    contexts = contexts.astype(parameters.get("dtype", np.float64))
    agent = make(dim, rng=0, **parameters)
    for i in range(300):
        agent.update(0.999 * contexts, i % n_arms, float(i % 2))
    return agent, contexts


def seconds(function, *, number, repeat=5):
    """Return the shortest time of one call."""
    return min(timeit.repeat(function, number=number, repeat=repeat)) / number


@pytest.fixture(autouse=True)
def one_thread():
    """Compare on one core, as the target says: idle BLAS threads make short calls erratic."""
    with threadpoolctl.threadpool_limits(1):
        yield


@pytest.fixture
def report(capsys):
    """Print a ratio where people see it, beside the table of times."""

    def show(name, ratio):
        with capsys.disabled():
            print(f"\n{name}: {ratio:.3g}")

    return show


class MABWiserRounds:
    """Rounds of MABWiser's LinUCB on features (d,) that its arms share."""

    def __init__(self):
        self.features = np.random.default_rng(0).normal(size=(1, DIM)) / np.sqrt(DIM)
        self.bandit = MAB(list(range(ARMS)), LearningPolicy.LinUCB(alpha=1.0), seed=0)
        self.bandit.fit(decisions=[0], rewards=[0.0], contexts=self.features)

    def __call__(self):
        arm = self.bandit.predict(self.features)
        self.bandit.partial_fit(decisions=[arm], rewards=[0.5], contexts=self.features)


def one_round(agent, contexts):
    def play():
        arm = agent.select(contexts)
        agent.update(contexts, arm, 0.5)

    return play


def batch_round(batch, contexts):
    rewards = np.full(batch.n_runs, 0.5)

    def play():
        batch.update(contexts, batch.select(contexts), rewards)

    return play


def batched(agent_batch):
    return batch_round(
        agent_batch, 0.999 * fixed_arms_bandit(0, n_arms=ARMS, dim=DIM, n_runs=RUNS).arms
    )


@pytest.mark.parametrize("name", AGENTS)
def test_select(benchmark, name):
    agent, contexts = trained(AGENTS[name], 50, 100)
    benchmark(agent.select, contexts)


@pytest.mark.parametrize("name", AGENTS)
def test_round(benchmark, name):
    benchmark(one_round(*trained(AGENTS[name], DIM, ARMS)))


@pytest.mark.parametrize("name", AGENTS)
def test_batched_round(benchmark, name):
    benchmark.extra_info["decisions per call"] = RUNS
    benchmark(batched(AgentBatch(AGENTS[name](DIM, rng=0), RUNS)))


def test_mabwiser_round(benchmark):
    benchmark(MABWiserRounds())


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("dim", "n_arms"), [(200, 1000), (1000, 100)])
def test_large_round(benchmark, dim, n_arms, dtype):
    benchmark(one_round(*trained(EQOL, dim, n_arms, dtype=dtype)))


def test_decisions_are_cheaper_than_mabwisers(report):
    mabwiser = seconds(MABWiserRounds(), number=20)
    single = seconds(one_round(*trained(EQOL, DIM, ARMS)), number=500)
    batch = seconds(batched(EQOLBatch(RUNS, DIM, rng=0)), number=50) / RUNS
    report("MABWiser over EQOL, one run", mabwiser / single)
    report("MABWiser over EQOLBatch, per decision", mabwiser / batch)
    assert mabwiser / single > 10
    assert mabwiser / batch > 20
    assert mabwiser / batch > 5 * mabwiser / single


def test_simulation_adds_little_to_the_batch(report):
    env = fixed_arms_bandit(0, n_arms=ARMS, dim=DIM, n_runs=RUNS)
    batch = EQOLBatch(RUNS, DIM, rng=0)
    rounds = 100
    whole = seconds(lambda: simulate(batch, env, rounds, rng=0, branches=False), number=1) / rounds
    agent = seconds(batch_round(batch, env.arms), number=rounds)
    report("simulate over the agent alone", whole / agent)
    assert whole < 2 * agent


def test_eqol_selects_as_fast_as_linucb(report):
    eqol, contexts = trained(EQOL, 50, 100)
    linucb, _ = trained(LinUCB, 50, 100)
    ratio = seconds(lambda: eqol.select(contexts), number=500) / seconds(
        lambda: linucb.select(contexts), number=500
    )
    report("EQOL over LinUCB, select", ratio)
    assert ratio < 1.4


def test_a_large_round_costs_little_more_than_its_product(report):
    agent, contexts = trained(EQOL, 200, 1000)
    product = seconds(lambda: contexts @ agent.ridge.V_inv, number=20)
    playing = seconds(one_round(agent, 0.999 * contexts), number=20)
    report("round over the product X V⁻¹", playing / product)
    report("minutes for 100,000 rounds", 1e5 * playing / 60)
    assert playing < 1.6 * product
