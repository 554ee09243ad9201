"""The command line as its users meet it: output, JSON, exit codes, one-line errors."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from thalweg import __version__
from thalweg.cli import main

ROOT = Path(__file__).parents[2]
LES_MISERABLES = ROOT / "examples" / "data" / "les_miserables.gml"


@pytest.fixture
def run(capfd, tmp_path, monkeypatch):
    """Return a function that runs a command line in an empty folder: (code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("THALWEG_DATABASE", raising=False)

    def run(*words):
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        out, err = capfd.readouterr()
        return stopped.value.code or 0, out, err

    return run


@contextlib.contextmanager
def started(command):
    """Run a command in a process group of its own, and end it whatever happens."""
    running = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A suite that runs in the background hands down that Ctrl-C is ignored.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


class TestList:
    def test_shows_every_method_with_family_and_verdict(self, run):
        code, out, err = run("list")
        assert code == 0
        assert err == ""
        for slug, family in (("eqol", "bandits"), ("specann", "combinatorial")):
            assert re.search(rf"{slug} +{family} +(holds|fails|inconclusive|not run)", out)

    def test_filters(self, run):
        assert json.loads(run("list", "--json", "--family", "bandits")[1])[0]["slug"] == "eqol"
        found = json.loads(run("list", "--json", "stability-ratio")[1])
        assert [m["slug"] for m in found] == ["stab-sgd"]

    def test_nothing_found_says_so(self, run):
        code, out, err = run("list", "nosuchword")
        assert (code, out) == (1, "")
        assert err == "no method matches; `thalweg list` shows all\n"

    def test_takes_under_400_ms(self):
        # Processor time, which is wall time on a machine that does nothing else.
        command = [sys.executable, "-m", "thalweg", "list"]
        seconds = []
        for _ in range(5):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert min(seconds) < 0.4


class TestShow:
    def test_tells_what_when_and_how(self, run):
        code, out, _ = run("show", "eqol")
        assert code == 0
        for text in (
            "from thalweg.bandits import EQOL",
            'pip install "thalweg[bandits]"',
            "thalweg verify eqol",
            "over-explores",
        ):
            assert text in out

    def test_json_holds_the_evidence(self, run):
        found = json.loads(run("show", "eqol", "--json")[1])
        assert found["module"] == "thalweg.bandits"
        assert isinstance(found["evidence"], list)


class TestVerify:
    @pytest.fixture(scope="class")
    @staticmethod
    def database(tmp_path_factory):
        path = tmp_path_factory.mktemp("verify") / "evidence.sqlite"
        command = [sys.executable, "-m", "thalweg", "verify", "eqol", "--headline"]
        command += ["--scale", "smoke", "--jobs", "2", "--database", str(path), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (record,) = json.loads(done.stdout)
        assert record["verdict"] == "inconclusive"
        return path

    def test_a_second_run_uses_what_the_first_stored(self, run, database, tmp_path):
        started = time.perf_counter()
        code, out, _ = run(
            *("verify", "eqol", "--headline", "--scale", "smoke"),
            *("--database", database, "--export", tmp_path / "evidence"),
        )
        assert time.perf_counter() - started < 10
        assert code == 0
        assert "the smoke scale only shows that the claim runs" in out
        (record,) = json.loads((tmp_path / "evidence" / "eqol.json").read_text())
        assert record["scale"] == "smoke"

    def test_report_writes_pages_and_says_where(self, run, database, tmp_path):
        code, out, _ = run("report", "--database", database, "--out", tmp_path / "report")
        assert code == 0
        index = Path(out.strip())
        assert index == tmp_path / "report" / "index.html"
        assert "EQOL" in index.read_text()
        assert len(list(index.parent.glob("eqol-*.html"))) == 1

    def test_fresh_seeds_are_other_trials(self, run, database):
        common = ("verify", "eqol", "--headline", "--scale", "smoke", "--json")
        common += ("--jobs", 1, "--database", database)
        first = json.loads(run(*common)[1])
        second = json.loads(run(*common, "--seed-offset", 100)[1])
        assert first[0]["contenders"][0]["values"] != second[0]["contenders"][0]["values"]
        assert second[0]["seed_offset"] == 100

    def test_ctrl_c_keeps_what_is_finished(self, tmp_path):
        database = tmp_path / "evidence.sqlite"
        command = [sys.executable, "-m", "thalweg", "verify", "eqol", "--jobs", "2"]
        command += ["--database", str(database)]
        with started(command) as running:
            deadline = time.monotonic() + 60
            while not (database.exists() and _count(database) > 5):
                assert time.monotonic() < deadline, "no trial finished"
                time.sleep(0.05)
            os.killpg(running.pid, signal.SIGINT)
            _, err = running.communicate(timeout=30)
        assert running.returncode == 130
        assert "Traceback" not in err
        kept = int(re.search(r"interrupted; (\d+) trials are kept", err)[1])
        assert kept == _count(database) >= 5


def _count(database):
    import sqlite3

    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            return connection.execute("SELECT count(*) FROM trials").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


class TestSolve:
    def test_maxcut_prints_value_and_bound(self, run):
        code, out, _ = run("solve", "maxcut", LES_MISERABLES)
        assert code == 0
        assert "gml file: 77 vertices, 254 edges" in out
        assert re.search(r"^cut 53\d, at most \d+(\.\d+)? \(certified bound", out, re.MULTILINE)

    def test_the_partition_written_has_the_value_printed(self, run, tmp_path):
        import networkx as nx

        for name in ("cut.txt", "cut.json"):
            out = tmp_path / name
            found = json.loads(run("solve", "maxcut", LES_MISERABLES, "--json", "--out", out)[1])
            if name.endswith("json"):
                side = json.loads(out.read_text())["partition"]
            else:
                lines = out.read_text().splitlines()[1:]
                side = {line.rsplit(" ", 1)[0]: int(line.rsplit(" ", 1)[1]) for line in lines}
            graph = nx.read_gml(LES_MISERABLES)
            cut = sum(w for a, b, w in graph.edges(data="weight") if side[a] != side[b])
            assert cut == found["value"]
            assert side == found["partition"]
            assert found["value"] <= found["upper_bound"]

    def test_the_same_seed_gives_the_same_partition(self, run):
        runs = [run("solve", "maxcut", LES_MISERABLES, "--seed", 3, "--json") for _ in range(2)]
        first, second = (json.loads(out)["partition"] for _, out, _ in runs)
        assert first == second

    def test_ising_with_fields(self, run, tmp_path):
        file = tmp_path / "chain.rudy"
        file.write_text("3 4\n1 2 1\n2 3 -1\n1 1 0.5\n3 3 0.25\n")
        code, out, _ = run("solve", "ising", file, "--json")
        found = json.loads(out)
        assert code == 0
        # s1 = s2 = 1, s3 = -1: couplings 1 + 1, fields 0.5 - 0.25.
        assert found["value"] == pytest.approx(-2.25)
        assert found["partition"] == {"1": 1, "2": 1, "3": -1}

    def test_the_time_limit_stops_it(self, run, tmp_path):
        import numpy as np

        rng = np.random.default_rng(0)
        edges = np.unique(rng.integers(1, 20_001, size=(80_000, 2)), axis=0)
        edges = edges[edges[:, 0] < edges[:, 1]]
        file = tmp_path / "large.rudy"
        lines = [f"20000 {len(edges)}", *(f"{i} {j} 1" for i, j in edges)]
        file.write_text("\n".join(lines))
        started = time.perf_counter()
        code, out, _ = run("solve", "maxcut", file, "--time-limit", 2, "--taus", 99, "--json")
        assert code == 0
        assert time.perf_counter() - started < 15
        assert json.loads(out)["value"] > len(edges) / 2


def broken(text, name="g.rudy"):
    def write(folder):
        path = folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


class TestErrors:
    @pytest.mark.parametrize(
        ("words", "code", "message"),
        [
            (["show", "eqoll"], 2, r"no method 'eqoll'; did you mean eqol\?"),
            (["verify", "bandit"], 2, "did you mean bandits"),
            (["verify", "eqol", "--claim", "nope"], 2, "no claim nope; there are"),
            (["verify", "eqol", "--scale", "huge"], 2, "'huge' is not one of"),
            (["verify", "eqol", "--address", "auto"], 2, "it needs --backend ray"),
            (["verify", "eqol", "--database", "no/where.sqlite"], 2, "unable to open"),
            (["verify"], 2, r"Missing argument.*thalweg verify --help"),
            (["solve"], 2, "Missing command"),
            (["frobnicate"], 2, "No such command 'frobnicate'"),
            (["list", "--family", "bandit"], 2, "did you mean bandits"),
            (["report"], 2, "no such database; `thalweg verify` makes it"),
            (["solve", "maxcut", "nowhere.txt"], 2, "nowhere.txt: No such file or directory"),
            (["solve", "maxcut", str(LES_MISERABLES), "--format", "tsp"], 2, "format must be one"),
            (["solve", "maxcut", str(LES_MISERABLES), "--out", "no/cut"], 2, "no/cut: No such"),
            (["solve", "maxcut", str(LES_MISERABLES), "--time-limit", "-1"], 2, "time-limit"),
        ],
    )
    def test_are_one_line_with_a_code(self, run, words, code, message):
        found, out, err = run(*words)
        assert found == code
        assert out == ""
        assert err.startswith("thalweg: ")
        assert err.count("\n") == 1
        assert re.search(message, err)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (broken("3 2\n1 2\n1 9\n"), r"g\.rudy:3: .*9"),
            (broken("3 2\n1 2\nx y\n"), r"g\.rudy:3: "),
            (broken("3 5\n1 2\n"), r"g\.rudy:.*5"),
            (broken("1 2 nan\n"), r"g\.rudy:"),
            (broken(""), r"g\.rudy: .*empty"),
            (broken(bytes(range(256))), r"g\.rudy:"),
            (broken("<graphml", "g.graphml"), r"g\.graphml:"),
            (broken("graph [ node", "g.gml"), r"g\.gml:"),
        ],
    )
    def test_broken_files_are_told_with_file_and_line(self, run, tmp_path, make, message):
        code, out, err = run("solve", "maxcut", make(tmp_path))
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert re.search(message, err)

    def test_a_damaged_database_is_left_untouched(self, run, tmp_path):
        path = tmp_path / "thalweg.sqlite"
        path.write_bytes(b"SQLite format 3\0" + bytes(5000))
        before = path.read_bytes()
        for command in ("verify", "eqol", "--scale", "smoke"), ("report",):
            code, _, err = run(*command)
            assert code == 2
            assert "damaged" in err
        assert path.read_bytes() == before

    def test_a_missing_extra_gives_the_command_to_run(self, tmp_path):
        code = (
            "import sys; sys.modules['torch'] = None; sys.modules['numba'] = None\n"
            "from thalweg.cli import main\n"
            f"main(['solve', 'maxcut', {str(LES_MISERABLES)!r}])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert 'run: pip install "thalweg[combinatorial]"' in done.stderr

    def test_debug_adds_the_traceback(self, run):
        _, _, err = run("--debug", "show", "eqoll")
        assert "Traceback" in err
        assert err.splitlines()[-1].startswith("thalweg: no method")


def test_without_arguments_there_is_help(run):
    code, out, _ = run()
    assert code == 0
    for command in ("list", "show", "verify", "report", "solve"):
        assert command in out


def test_version(run):
    assert run("--version")[:2] == (0, f"thalweg {__version__}\n")


@pytest.mark.skipif(not Path("/proc").exists(), reason="finds a free port by asking for port 0")
def test_the_report_is_served(tmp_path):
    import urllib.request

    command = [sys.executable, "-m", "thalweg", "report", "--published", "--serve", "--port", "0"]
    with started([*command, "--out", str(tmp_path / "report")]) as running:
        line = running.stderr.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)[0]
        assert b"What holds" in urllib.request.urlopen(address, timeout=10).read()
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=10)
    assert "stopped" in err
    assert running.returncode == 0
