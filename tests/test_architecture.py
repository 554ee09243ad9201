"""The floors of the house: nothing imports upwards, families do not know each other."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from thalweg.catalog import all_families

SOURCE = Path(__file__).parents[1] / "src" / "thalweg"
FAMILIES = set(all_families())
# What a package may import, besides itself. `catalog` reads a file and knows nobody.
ALLOWED = {
    "common": set(),
    "catalog": set(),
    "tasks": {"common"},
    "evidence": {"common"},
    **{family: {"common"} for family in FAMILIES},
    "claims": {"common", "tasks", "evidence", "catalog", *FAMILIES},
    "cli": {"common", "tasks", "evidence", "catalog", "claims", *FAMILIES},
}


def modules() -> list[Path]:
    return sorted(p for p in SOURCE.rglob("*.py*") if p.suffix in (".py", ".pyi"))


def imported(path: Path) -> set[str]:
    """Return the names of thalweg's packages that the module imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "thalweg":
                found |= {f"thalweg.{alias.name}" for alias in node.names}
            found.add(node.module)
    return {name.split(".")[1] for name in found if name.startswith("thalweg.")}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_imports_upwards(path):
    package = path.relative_to(SOURCE).parts[0].removesuffix(".py").removesuffix(".pyi")
    if package in ("__init__", "__main__"):
        return
    forbidden = imported(path) - ALLOWED[package] - {package, "__version__"}
    assert not forbidden, f"{package} must not import {sorted(forbidden)}"


def test_the_check_sees_imports_inside_functions(tmp_path):
    module = tmp_path / "module.py"
    module.write_text("def f():\n    from thalweg.cli import main\n    import thalweg.claims.x\n")
    assert imported(module) == {"cli", "claims"}


def test_no_module_has_the_name_of_what_its_package_exports():
    """Else ``from package import name`` would give the module or the object by import order."""
    for stub in SOURCE.rglob("__init__.pyi"):
        exported = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(stub.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert not exported & {path.stem for path in stub.parent.glob("*.py")}
