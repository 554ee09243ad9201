"""The harness: fair tuning, pairing, resuming, fingerprints, several runs on one database."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from toy import growth, toy

from thalweg.evidence import Contender, Measurement, Scale
from thalweg.evidence.backends import ProcessBackend
from thalweg.evidence.runner import fingerprint, tuning_seeds, verify
from thalweg.evidence.store import Store

TOY = Path(__file__).with_name("toy.py")


def values(record):
    return [contender["values"] for contender in record["contenders"]]


def test_a_true_claim_holds_with_the_best_settings(store, inline):
    (record,) = verify([toy()], scale="quick", store=store, backend=inline)
    assert record["verdict"] == "holds"
    assert record["of"] == "peer"
    assert record["effect"]["value"] == pytest.approx(0.5, abs=0.01)
    assert [c["setting"] for c in record["contenders"]] == [{"lr": 1.0}, {"lr": 1.0}, {}]
    assert store.results() == [record]


def test_a_false_claim_fails(store, inline):
    (record,) = verify([toy(peer_loss=1.0)], scale="quick", store=store, backend=inline)
    assert record["verdict"] == "fails"


def test_an_optimum_on_the_edge_gives_no_verdict(store, inline):
    (record,) = verify([toy(best=10.0)], scale="quick", store=store, backend=inline)
    assert record["verdict"] == "inconclusive"
    assert "method is best at lr=10, the end of its grid" in record["reasons"]


def test_every_contender_gets_the_same_number_of_tuning_trials(store, inline):
    claim = toy()
    assert tuning_seeds(claim, claim.scales["quick"]) == {"method": 2, "peer": 2, "shipped": 0}
    claim = toy(grid=[0.1, 10])
    seeds = tuning_seeds(claim, claim.scales["quick"])
    assert seeds["method"] * 2 == seeds["peer"] * 4 == 8


def test_contenders_are_paired_and_tuning_seeds_are_never_evaluated(store, inline):
    verify([toy()], scale="quick", store=store, backend=inline)
    evaluated = {
        name: [t.seed for t in inline.ran if t.contender == name and t.phase == "evaluation"]
        for name in ("method", "peer", "shipped")
    }
    assert evaluated["method"] == evaluated["peer"] == evaluated["shipped"] == list(range(10))
    streams = {
        phase: {tuple(t.seed_sequence().generate_state(4)) for t in inline.ran if t.phase == phase}
        for phase in ("tuning", "evaluation")
    }
    assert not streams["tuning"] & streams["evaluation"]


def test_parameters_may_differ_while_tuning(store, inline):
    import dataclasses

    scales = {name: Scale(seeds=8, n=8, tuning={"n": 2}) for name in ("smoke", "quick", "full")}
    claim = dataclasses.replace(toy(), scales=scales)
    (record,) = verify([claim], scale="quick", store=store, backend=inline)
    assert {t.parameters["n"] for t in inline.ran if t.phase == "tuning"} == {2}
    assert {t.parameters["n"] for t in inline.ran if t.phase == "evaluation"} == {8}
    assert record["tuning_parameters"] == {"n": 2}


def test_a_seed_offset_gives_fresh_seeds_in_both_phases(store, inline):
    (first,) = verify([toy()], scale="quick", store=store, backend=inline)
    (second,) = verify([toy()], scale="quick", store=store, backend=inline, seed_offset=1000)
    assert {t.seed for t in inline.ran if t.phase == "tuning"} == {0, 1, 1000, 1001}
    assert values(first) != values(second)
    assert len(store.results()) == 2


def test_nothing_runs_twice_unless_asked(store, inline):
    (first,) = verify([toy()], scale="quick", store=store, backend=inline)
    count = len(inline.ran)
    (second,) = verify([toy()], scale="quick", store=store, backend=inline)
    assert len(inline.ran) == count
    assert values(first) == values(second)
    verify([toy()], scale="quick", store=store, backend=inline, resume=False)
    assert len(inline.ran) == 2 * count


def test_failed_trials_are_told_and_run_again(store, inline, tmp_path):
    marker = tmp_path / "broken"
    marker.touch()

    def make():
        if marker.exists():
            raise OSError("no disk")
        return 5.0

    claim = toy().with_contender(Contender("flaky", make=make))
    (record,) = verify([claim], scale="quick", store=store, backend=inline)
    assert record["verdict"] == "inconclusive"
    assert len(record["failures"]) == 10
    assert "10 trials failed: flaky: OSError: no disk" in record["reasons"][0]
    marker.unlink()
    count = len(inline.ran)
    (record,) = verify([claim], scale="quick", store=store, backend=inline)
    assert record["verdict"] == "holds"
    assert len(inline.ran) == count + 10


def test_a_sweep_repeats_every_seed_at_every_point(store, inline):
    (record,) = verify([growth], scale="quick", store=store, backend=inline)
    assert record["verdict"] == "holds"
    assert record["effect"]["value"] == pytest.approx(1.0, abs=0.01)
    assert len(record["contenders"][0]["values"]) == 10
    assert record["contenders"][0]["swept_averages"] == pytest.approx([10, 100, 1000], rel=0.02)


def test_claims_run_side_by_side_and_come_back_in_order(store, inline):
    seen = []
    records = verify(
        [toy(), growth], scale="smoke", store=store, backend=inline, callback=seen.append
    )
    assert [record["claim"] for record in records] == ["toy/losses", "toy/growth"]
    assert sorted(record["claim"] for record in seen) == ["toy/growth", "toy/losses"]


def test_the_fingerprint_follows_the_code_of_claim_and_contender(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "peer_of_mine.py"
    module.write_text("def make():\n    return 1.0\n")
    import peer_of_mine

    from thalweg.evidence import runner

    mine = Contender("mine", make=peer_of_mine.make)
    claim = toy().with_contender(mine)
    before = fingerprint(claim, mine)
    assert fingerprint(claim, claim.subject) != before
    module.write_text("def make():\n    return 2.0\n")
    runner._digest.cache_clear()
    assert fingerprint(claim, mine) != before


def test_library_claims_depend_on_their_family_and_not_on_others():
    from thalweg.claims import claims_of
    from thalweg.evidence.runner import _sources

    (headline, *_) = claims_of(__import__("thalweg.catalog", fromlist=["_"]).method("eqol"))
    names = {path.parent.name for path in _sources(headline.function.__module__)}
    assert {"bandits", "common", "tasks"} <= names
    assert not names & {"training", "combinatorial", "evidence"}


def test_processes_give_what_one_process_gives(store, tmp_path, inline):
    (alone,) = verify([toy()], scale="quick", store=store, backend=inline)
    backend = ProcessBackend(2)
    try:
        with Store(tmp_path / "other.sqlite") as other:
            (parallel,) = verify([toy()], scale="quick", store=other, backend=backend)
    finally:
        backend.close()
    assert values(alone) == values(parallel)
    assert alone["effect"] == parallel["effect"]


def test_overhead_is_under_ten_milliseconds_a_trial(store):
    backend = ProcessBackend(2)
    try:
        verify([toy()], scale="smoke", store=store, backend=backend)  # starts the workers
        count = store.trial_count()
        started = time.perf_counter()
        verify([toy(), growth], scale="full", store=store, backend=backend)
        seconds = time.perf_counter() - started
        assert seconds / (store.trial_count() - count) < 0.01
    finally:
        backend.close()


class TestWorkersThatDie:
    def test_only_the_trial_that_kills_its_worker_fails(self, store):
        def deadly(contender, rng, *, n, lr=1.0):
            if contender.name == "peer" and lr == 3.0:
                os.kill(os.getpid(), signal.SIGKILL)
            return Measurement(contender.make() + abs(lr - 1))

        import dataclasses

        claim = dataclasses.replace(toy(), function=deadly)
        backend = ProcessBackend(2)
        try:
            (record,) = verify([claim], scale="smoke", store=store, backend=backend)
        finally:
            backend.close()
        assert record["failures"] == []  # the evaluation never uses the setting that kills
        averages = record["contenders"][1]["tuning"]["averages"]
        assert [average is None for average in averages] == [False, False, True, False]


class TestKilledRuns:
    def start(self, database):
        return subprocess.Popen(
            [sys.executable, TOY, database],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_trials(self, database, count):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
                    if connection.execute("SELECT count(*) FROM trials").fetchone()[0] >= count:
                        return
            except sqlite3.OperationalError:
                pass
            time.sleep(0.02)
        pytest.fail(f"{count} trials did not finish")

    def test_kill_9_loses_at_most_the_trials_in_flight(self, tmp_path, inline):
        database = str(tmp_path / "evidence.sqlite")
        run = self.start(database)
        self.wait_for_trials(database, 20)
        os.killpg(run.pid, signal.SIGKILL)
        run.communicate()
        with Store(database) as store:
            kept = store.trial_count()
            claim = toy(seconds=0.0)
        assert 20 <= kept < 74

        again = self.start(database)
        out, err = again.communicate(timeout=60)
        assert again.returncode == 0, err
        with Store(database) as store:
            assert store.trial_count() == 74  # 7 settings on 2 seeds, 3 contenders on 20
            timestamps = store._database.execute(
                "SELECT count(*) FROM trials WHERE finished <= (SELECT finished FROM trials "
                "ORDER BY finished LIMIT 1 OFFSET ?)",
                (kept - 1,),
            ).fetchone()[0]
            assert timestamps == kept
        with Store(tmp_path / "alone.sqlite") as store:
            (record,) = verify([claim], scale="full", store=store, backend=inline)
        assert out.strip() == f"holds {values(record)}"

    def test_workers_end_when_their_run_was_killed(self, tmp_path):
        database = str(tmp_path / "evidence.sqlite")
        run = self.start(database)
        self.wait_for_trials(database, 2)
        workers = psutil.Process(run.pid).children(recursive=True)
        assert len(workers) >= 2
        run.kill()
        run.communicate()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert alive == []

    def test_two_runs_share_one_database(self, tmp_path):
        database = str(tmp_path / "evidence.sqlite")
        runs = [self.start(database) for _ in range(2)]
        outputs = [run.communicate(timeout=90) for run in runs]
        assert [run.returncode for run in runs] == [0, 0], outputs
        assert outputs[0][0] == outputs[1][0]
        with Store(database) as store:
            assert store.trial_count() == 74
            leases = store._database.execute("SELECT count(*) FROM leases").fetchone()[0]
            assert leases == 0


@pytest.mark.filterwarnings("ignore")
class TestRay:
    @pytest.fixture(autouse=True)
    def _needs_ray(self):
        pytest.importorskip("ray")

    def test_a_local_cluster_gives_what_one_process_gives(self, store, tmp_path, inline):
        from thalweg.evidence.backends import RayBackend

        backend = RayBackend(None, 2)
        try:
            (parallel,) = verify([toy()], scale="quick", store=store, backend=backend)
        finally:
            backend.close()
        with Store(tmp_path / "alone.sqlite") as other:
            (alone,) = verify([toy()], scale="quick", store=other, backend=inline)
        assert values(alone) == values(parallel)

    @pytest.mark.slow
    def test_a_cluster_that_loses_a_node_loses_no_trial(self, store):
        from ray.cluster_utils import Cluster

        from thalweg.evidence.backends import RayBackend

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        node = cluster.add_node(num_cpus=1)
        backend = RayBackend(cluster.address, 2)
        seen = []

        def lose_a_node(record):
            seen.append(record)
            if len(seen) == 1:
                cluster.remove_node(node)

        try:
            records = verify(
                [growth, toy(seconds=0.1)],
                scale="quick",
                store=store,
                backend=backend,
                callback=lose_a_node,
            )
        finally:
            backend.close()
            cluster.shutdown()
        assert [record["failures"] for record in records] == [[], []]
        assert records[1]["verdict"] == "holds"

    def test_an_unreachable_cluster_is_named(self):
        from thalweg.evidence.backends import BackendError, RayBackend

        with pytest.raises(BackendError, match=r"no Ray cluster at 127\.0\.0\.1:9"):
            RayBackend("127.0.0.1:9", 1)
