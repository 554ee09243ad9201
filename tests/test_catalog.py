"""The catalog is true: every entry imports and has tests, claims, a speed check and a page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thalweg import catalog
from thalweg.claims import claims_of

ROOT = Path(__file__).parents[1]
METHODS = list(catalog.all_methods().values())


@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.slug)
class TestEntry:
    def test_every_object_imports_and_is_documented(self, method):
        module = __import__(method.module, fromlist=["_"])
        for name in method.objects:
            found = getattr(module, name)
            assert name in module.__all__
            assert "Examples\n" in found.__doc__ or found is not method.load(), name
            assert found.__doc__.strip()

    def test_the_main_object_cites_its_paper(self, method):
        assert "References" in method.load().__doc__

    def test_has_a_test_module(self, method):
        name = f"test_{method.slug.replace('-', '_')}.py"
        assert (ROOT / "tests" / method.family / name).exists()

    def test_has_an_example(self, method):
        assert (ROOT / "examples" / f"plot_{method.slug.replace('-', '_')}.py").exists()

    def test_has_a_page_with_card_evidence_and_reference(self, method, monkeypatch):
        monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
        from catalog_pages import family_page, method_page

        page = method_page(method)
        for text in (method.summary, method.when, method.not_when, method.import_line):
            assert text in page
        for record in method.evidence():
            assert record["statement"] in page
        for name in method.objects:
            assert f"{method.module}.{name}" in page
        assert f"methods/{method.slug}.md" in family_page(catalog.all_families()[method.family])

    def test_has_claims_with_one_headline(self, method):
        claims = claims_of(method)
        assert [claim.headline for claim in claims].count(True) == 1
        assert claims[0].headline
        assert {claim.method for claim in claims} == {method.slug}
        assert all(claim.description for claim in claims)

    def test_published_evidence_covers_every_claim(self, method):
        quick = {r["claim"] for r in method.evidence() if r["scale"] == "quick"}
        full = {r["claim"] for r in method.evidence() if r["scale"] == "full"}
        claims = claims_of(method)
        assert {claim.id for claim in claims} <= quick
        assert claims[0].id in full

    def test_published_evidence_is_strict_json(self, method):
        def refuse(constant):
            raise AssertionError(constant)

        path = ROOT / "docs" / "evidence" / f"{method.slug}.json"
        json.loads(path.read_text(), parse_constant=refuse)

    def test_evidence_belongs_to_the_claims_as_they_are(self, method):
        statements = {claim.id: claim.statement for claim in claims_of(method)}
        for record in method.evidence():
            assert record["statement"] == statements[record["claim"]]


def test_every_family_has_an_extra_and_a_speed_check():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for family in catalog.all_families().values():
        assert family.extra in extras
        assert (ROOT / "speed" / f"test_{family.name}.py").exists()


def test_select_expands_families_and_all_without_repeats():
    everything = catalog.select(["all"])
    assert everything == METHODS
    assert catalog.select(["bandits", "eqol"]) == [catalog.method("eqol")]


def test_find_looks_at_all_texts_whatever_the_case():
    assert catalog.find(["MAX-CUT"]) == [catalog.method("specann")]
    assert catalog.find(["bandit"], family="training") == []
    assert catalog.method("eqol") in catalog.find(kind="bandit")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: catalog.method("stabsgd"), r"no method 'stabsgd'; did you mean stab-sgd\?"),
        (lambda: catalog.find(family="trainings"), "did you mean training"),
        (lambda: catalog.find(kind="zzzz"), "no kind 'zzzz'; there are"),
        (lambda: catalog.select(["specan"]), "did you mean specann"),
    ],
)
def test_unknown_names_offer_the_nearest(call, message):
    with pytest.raises(catalog.UnknownNameError, match=message):
        call()


def test_importing_thalweg_is_light():
    code = (
        "import sys, time; t = time.perf_counter(); import thalweg; "
        "print(time.perf_counter() - t, any(m in sys.modules for m in ('torch', 'numpy', 'scipy')))"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(3)
    ]
    seconds, heavy = zip(*(run.stdout.split() for run in runs), strict=True)
    assert set(heavy) == {"False"}
    assert min(map(float, seconds)) < 0.1
