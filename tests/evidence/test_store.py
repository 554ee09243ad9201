"""The database: nothing is lost, nothing foreign is touched."""

from __future__ import annotations

import math
import os
import sqlite3
import stat

import pytest

from thalweg.evidence import store as store_module
from thalweg.evidence.store import Store, StoreError, read_results
from thalweg.evidence.trial import Outcome, Trial

TRIAL = Trial("toy/losses", "abc", "tuning", "method", 3, {"lr": 0.1}, {"n": 8})
OUTCOME = Outcome(1.5, ([0.0, 1.0], [2.0, 3.0]), {"noise": 0.1}, None, 0.25, 1_000_000)


def test_what_is_recorded_comes_back(store):
    assert store.outcome(TRIAL) is None
    store.record(TRIAL, OUTCOME)
    assert store.outcome(TRIAL) == OUTCOME


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1 / 3, 5e-324, -1e308])
def test_values_come_back_bit_for_bit(store, value):
    store.record(TRIAL, Outcome(value, error="why" if math.isnan(value) else None))
    found = store.outcome(TRIAL).value
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_another_connection_sees_a_trial_at_once(store):
    store.record(TRIAL, OUTCOME)
    with Store(store.path) as other:
        assert other.outcome(TRIAL) == OUTCOME


def test_results_replace_older_ones_of_the_same_claim_scale_and_seeds(store):
    for verdict, scale in (("fails", "quick"), ("holds", "quick"), ("holds", "full")):
        store.record_result(
            {"claim": "toy/losses", "scale": scale, "seed_offset": 0, "verdict": verdict}
        )
    found = read_results(store.path)
    assert [(r["scale"], r["verdict"]) for r in found] == [("quick", "holds"), ("full", "holds")]


def test_a_lease_excludes_other_live_processes(store):
    with Store(store.path) as other:
        assert store.lease(TRIAL)
        assert store.lease(TRIAL)
        assert not other.lease(TRIAL)
    with Store(store.path) as third:
        store.close()
        assert third.lease(TRIAL)
        store.__init__(store.path)


def test_a_finished_trial_is_not_leased_again(store):
    store.record(TRIAL, OUTCOME)
    with Store(store.path) as other:
        assert not other.lease(TRIAL)


def test_the_lease_of_a_dead_process_is_free(store, monkeypatch):
    assert store.lease(TRIAL)
    store._database.execute("UPDATE owners SET pid = ?", (2**22 + 1,))
    with Store(store.path) as other:
        assert other.lease(TRIAL)


def test_the_lease_of_another_process_with_a_recycled_id_is_free(store):
    assert store.lease(TRIAL)
    store._database.execute("UPDATE owners SET started = started - 1000")
    with Store(store.path) as other:
        assert other.lease(TRIAL)


def test_the_lease_of_another_machine_lives_as_long_as_its_heartbeat(store):
    assert store.lease(TRIAL)
    store._database.execute("UPDATE owners SET host = 'elsewhere'")
    with Store(store.path) as other:
        assert not other.lease(TRIAL)
        store._database.execute(
            "UPDATE owners SET heartbeat = heartbeat - ? WHERE host = 'elsewhere'",
            (2 * store_module.LEASE_SECONDS,),
        )
        assert other.lease(TRIAL)


def test_failed_trials_can_be_forgotten_alone(store):
    store.record(TRIAL, OUTCOME)
    store.forget(TRIAL, only_failed=True)
    assert store.outcome(TRIAL) == OUTCOME
    store.record(TRIAL, Outcome(math.nan, error="it broke"))
    store.forget(TRIAL, only_failed=True)
    assert store.outcome(TRIAL) is None


def damaged(path):
    with Store(path) as store:
        for seed in range(200):
            store.record(Trial("toy/losses", "abc", "tuning", "m", seed), OUTCOME)
    content = bytearray(path.read_bytes())
    content[4096:12288] = os.urandom(8192)
    path.write_bytes(content)


def text(path):
    path.write_text("not a database, but long enough to be read as one\n" * 40)


def foreign(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE things (id)")


def newer(path):
    Store(path).close()
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (damaged, "damaged"),
        (text, "damaged or not a database"),
        (foreign, "is a database of another program"),
        (newer, "was written by a newer thalweg"),
    ],
)
@pytest.mark.parametrize("use", [Store, read_results])
def test_an_unusable_file_is_refused_and_left_untouched(tmp_path, make, message, use):
    path = tmp_path / "evidence.sqlite"
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=message):
        use(path)
    assert path.read_bytes() == before


def test_an_empty_file_becomes_a_database(tmp_path):
    path = tmp_path / "evidence.sqlite"
    path.touch()
    with Store(path) as store:
        assert store.trial_count() == 0


def test_a_missing_database_is_not_made_by_reading(tmp_path):
    path = tmp_path / "evidence.sqlite"
    with pytest.raises(StoreError, match="no such database"):
        read_results(path)
    assert not path.exists()


def test_a_missing_folder_is_named(tmp_path):
    path = tmp_path / "nowhere" / "evidence.sqlite"
    with pytest.raises(StoreError, match=r"nowhere/evidence\.sqlite: unable to open"):
        Store(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StoreError, match="unable to open"):
        Store(tmp_path / "evidence.sqlite")
