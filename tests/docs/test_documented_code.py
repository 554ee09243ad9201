"""All code in README and docs runs: Python as it stands, commands at the smoke scale."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from thalweg.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("docs/guide/*.md"),
    ]
)
# Commands that this test cannot run inside itself: they install, or run this very suite, or start
# a cluster that outlives them.
OUTSIDE = ("pip install", "make ", "ray start")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    found = {
        line.removeprefix("$ ").split("  #")[0].strip()
        for page in PAGES
        for block in blocks(page, "console")
        for line in block.splitlines()
        if line.startswith("$ ")
    }
    return sorted(found)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: p.name)
def test_python_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "documented"}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith(OUTSIDE)])
@pytest.mark.filterwarnings("ignore")
def test_commands_run(command, tmp_path, monkeypatch):
    program, *words = shlex.split(command)
    assert program == "thalweg"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    if words[0] == "verify":
        # The harness is tested elsewhere; here it matters that the words are accepted.
        words = [w if w not in ("quick", "full") else "smoke" for w in words]
        words = [w if w != "all" else "eqol" for w in words if w not in ("--backend", "ray")]
        words = [w for w in words if w not in ("--address", "auto")] + ["--jobs", "1", "--headline"]
    if words[0] == "report":
        words.append("--published")
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code in (0, None)


def test_the_readme_names_the_two_make_targets():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"[`$] ?make (\w+)", (ROOT / "README.md").read_text()):
        assert target in targets


def test_every_make_command_in_the_docs_exists():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands():
        if command.startswith("make "):
            assert set(command.split()[1:]) <= set(targets)


def test_optional_packages_in_the_docs_are_extras():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for page in PAGES:
        for extra in re.findall(r"thalweg\[(\w+)\]", page.read_text()):
            assert extra in extras
