"""Write the report: a folder of HTML pages that need nothing from outside."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from thalweg.evidence.result import summarize

Record = Mapping[str, Any]
VERDICTS = ("holds", "fails", "inconclusive")
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Chapter:
    """A family in the overview: its title, and for each slug the method's name and title."""

    title: str
    summary: str
    methods: Mapping[str, tuple[str, str]]


def write_report(records: Sequence[Record], chapters: Iterable[Chapter], out: Path) -> Path:
    """Write the report on ``records`` into the folder ``out`` and return its first page.

    Parameters
    ----------
    records : sequence of dict
        See `thalweg.evidence.result.build_result`. Of several records of one claim and scale, the
        last counts unless their seeds differ.
    chapters : iterable of Chapter
        The order of the overview. Methods that no chapter names come last.
    out : pathlib.Path
        Made if it does not exist; pages of an earlier report are replaced.

    Raises
    ------
    OSError
        If the folder cannot be written.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(
        number=_number,
        size=_size,
        summarize=summarize,
        page=page_name,
        setting=_setting,
        inline=_inline,
    )
    latest = list({(r["claim"], r["scale"], r["seed_offset"]): r for r in records}.values())
    _write_assets(out / "assets")
    for record in latest:
        page = environment.get_template("claim.html").render(
            record=record, figures=_figure_snippets(record), root="."
        )
        (out / page_name(record)).write_text(page, encoding="utf-8")
    index = out / "index.html"
    overview = environment.get_template("overview.html").render(
        chapters=_overview(latest, chapters),
        counts={v: sum(r["verdict"] == v for r in latest) for v in VERDICTS},
        latest=max((r["finished"] for r in latest), default=""),
        root=".",
    )
    index.write_text(overview, encoding="utf-8")
    return index


def page_name(record: Record) -> str:
    """Return the file name of a claim's page."""
    offset = f"-seeds{record['seed_offset']}" if record["seed_offset"] else ""
    return f"{record['method']}-{record['name']}-{record['scale']}{offset}.html"


def _overview(
    records: Sequence[Record], chapters: Iterable[Chapter]
) -> list[tuple[Chapter, list[tuple[str, tuple[str, str], list[Record]]]]]:
    """Return the chapters with their methods and each method's records, headlines first."""
    by_method: dict[str, list[Record]] = {}
    for record in sorted(records, key=lambda r: (not r["headline"], r["claim"], r["scale"])):
        by_method.setdefault(record["method"], []).append(record)
    rows = []
    for chapter in chapters:
        of_chapter = [
            (slug, names, by_method.pop(slug))
            for slug, names in chapter.methods.items()
            if slug in by_method
        ]
        if of_chapter:
            rows.append((chapter, of_chapter))
    if by_method:
        others = Chapter("Other methods", "Claims from outside the catalog.", {})
        rows.append((others, [(slug, (slug, ""), found) for slug, found in by_method.items()]))
    return rows


def _figure_snippets(record: Record) -> dict[str, str]:
    from thalweg.evidence.report.figures import figures

    config = {"responsive": True, "displaylogo": False, "displayModeBar": False}
    return {
        title: figure.to_html(
            full_html=False, include_plotlyjs=False, config=config, div_id=f"figure-{title.lower()}"
        )
        for title, figure in figures(record).items()
    }


def _write_assets(folder: Path) -> None:
    import plotly

    folder.mkdir(parents=True, exist_ok=True)
    for asset in (_HERE / "assets").iterdir():
        shutil.copyfile(asset, folder / asset.name)
    plotly_js = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    shutil.copyfile(plotly_js, folder / plotly_js.name)


def _number(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4g}"


def _size(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _inline(text: str) -> Markup:
    """Return ``text`` escaped, with the inline code and emphasis that docstrings use as HTML."""
    escaped = str(escape(text))
    escaped = re.sub(r"(`{1,2})(.+?)\1", r"<code>\2</code>", escaped)
    return Markup(re.sub(r"(?<![\w*])\*(\w[^*]*?)\*(?![\w*])", r"<em>\1</em>", escaped))


def _setting(setting: Mapping[str, Any]) -> str:
    if not setting:
        return "as shipped"
    return ", ".join(
        f"{name} = {value:g}" if isinstance(value, (int, float)) else f"{name} = {value}"
        for name, value in setting.items()
    )
