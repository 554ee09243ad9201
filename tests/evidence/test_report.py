"""The report: complete, self-contained, and readable in a browser."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from toy import growth, toy

from thalweg.evidence.report import Chapter, write_report
from thalweg.evidence.report.figures import figures
from thalweg.evidence.result import merge_evidence, summarize
from thalweg.evidence.runner import verify

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
CHAPTERS = [Chapter("Toys", "Claims of the tests.", {"toy": ("Toy", "A toy")})]


@pytest.fixture
def records(store, inline):
    return verify([toy(), growth], scale="quick", store=store, backend=inline)


@pytest.fixture
def pages(records, tmp_path):
    index = write_report(records, CHAPTERS, tmp_path / "report")
    return {path.name: path.read_text() for path in index.parent.glob("*.html")}


def test_there_is_an_overview_and_a_page_per_claim(pages):
    assert set(pages) == {"index.html", "toy-losses-quick.html", "toy-growth-quick.html"}
    for name in set(pages) - {"index.html"}:
        assert f'href="{name}"' in pages["index.html"]


def test_nothing_is_loaded_from_outside(pages, tmp_path):
    for page in pages.values():
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', page)
        assert loaded
        for link in loaded:
            assert (tmp_path / "report" / link).exists()


def test_the_page_says_what_the_record_says(pages, records):
    page = pages["toy-losses-quick.html"]
    record = records[0]
    assert summarize(record) in page
    assert record["verdict"] in page
    assert record["machine"]["processor"] in page
    assert f"thalweg {record['versions']['thalweg']}" in page
    assert "lr = 1" in page


def test_seeds_of_their_own_get_a_page_of_their_own(records, tmp_path):
    other = records[0] | {"seed_offset": 50}
    index = write_report([*records, other], CHAPTERS, tmp_path / "report")
    assert (index.parent / "toy-losses-quick-seeds50.html").exists()


def test_methods_outside_the_catalog_come_last(records, tmp_path):
    index = write_report(records, [], tmp_path / "report")
    assert "Other methods" in index.read_text()


def test_texts_are_escaped(records, tmp_path):
    records[0]["statement"] = "<script>alert(1)</script>"
    index = write_report(records, CHAPTERS, tmp_path / "report")
    assert "<script>alert" not in index.read_text()


def test_docstring_markup_becomes_html(records, tmp_path):
    records[0]["description"] = "One *single* `value` < 2 * 3 * 4, ``rng`` and <b>."
    index = write_report(records[:1], CHAPTERS, tmp_path / "report")
    page = (index.parent / "toy-losses-quick.html").read_text()
    wanted = (
        "One <em>single</em> <code>value</code> &lt; 2 * 3 * 4, <code>rng</code> and &lt;b&gt;."
    )
    assert wanted in page


def test_figures_show_the_record(records):
    drawn = figures(records[0])
    assert set(drawn) == {"Effect", "Curves", "Seeds", "Tuning"}
    assert list(drawn["Effect"].data[0].x) == [
        contender["effect"]["value"] for contender in records[0]["contenders"][1:]
    ]
    assert drawn["Curves"].layout.xaxis.title.text == "step"
    assert len(drawn["Seeds"].data) == 10 + 3
    assert [trace.name for trace in drawn["Tuning"].data] == ["method: lr", "peer: lr"]
    sweep = figures(records[1])["Sweep"]
    assert list(sweep.data[0].x) == [10, 100, 1000]
    assert sweep.layout.xaxis.type == "log"


def test_a_record_without_an_effect_still_has_a_page(records, tmp_path):
    record = records[0] | {"effect": None, "verdict": "inconclusive", "failures": ["it broke"]}
    for contender in record["contenders"]:
        contender.update(curve=None, effect=None, interval=None, average=None)
    index = write_report([record], CHAPTERS, tmp_path / "report")
    page = (index.parent / "toy-losses-quick.html").read_text()
    assert "diverged" in page
    assert "it broke" in page


def test_evidence_files_keep_one_record_per_claim_and_scale(records, tmp_path):
    import json

    for record in [*records, records[0] | {"verdict": "fails"}, records[0] | {"scale": "full"}]:
        path = merge_evidence(tmp_path / "evidence", record)
    kept = json.loads(path.read_text())
    assert [(r["claim"], r["scale"], r["verdict"]) for r in kept] == [
        ("toy/growth", "quick", "holds"),
        ("toy/losses", "full", "holds"),
        ("toy/losses", "quick", "fails"),
    ]


@pytest.mark.skipif(BROWSER is None, reason="no browser is installed")
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1440, "light")])
def test_the_plots_appear_in_a_browser_and_nothing_overflows(records, tmp_path, width, scheme):
    index = write_report(records, CHAPTERS, tmp_path / "report")
    page = index.parent / "toy-losses-quick.html"
    # A frame of the wanted width: headless windows have a least width of 500.
    probe = tmp_path / "report" / "probe.html"
    probe.write_text(
        f'<iframe id="f" src="{page.name}" style="width:{width}px;height:900px;border:0"></iframe>'
        "<pre id=out></pre><script>"
        "f.onload = () => setTimeout(() => { const d = f.contentDocument; out.textContent ="
        "JSON.stringify([d.querySelectorAll('.js-plotly-plot .main-svg').length,"
        "d.documentElement.scrollWidth, d.documentElement.dataset.theme,"
        "getComputedStyle(d.body).backgroundColor]) }, 1500)</script>"
    )
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += ["--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"]
    if scheme == "dark":
        flags.append("--blink-settings=preferredColorScheme=0")
    shown = subprocess.run(
        [
            BROWSER,
            *flags,
            "--virtual-time-budget=9000",
            "--window-size=1500,1000",
            "--dump-dom",
            probe.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    plots, scroll_width, theme, ground = re.search(
        r'\[(\d+),(\d+),"(\w+)","([^"]+)"\]', shown.replace("&quot;", '"')
    ).groups()
    assert int(plots) >= 4
    assert int(scroll_width) <= width
    assert theme == scheme
    assert ground == {"light": "rgb(251, 251, 249)", "dark": "rgb(20, 24, 28)"}[scheme]
