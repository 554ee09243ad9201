"""Makes a page per family and per method from the catalog, docstrings and stored evidence.

Nothing on these pages is written by hand: an edit belongs into the catalog or the docstring.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from thalweg import catalog
from thalweg.evidence.report import Chapter, write_report
from thalweg.evidence.report.write import page_name
from thalweg.evidence.result import summarize

if TYPE_CHECKING:
    from sphinx.application import Sphinx

BADGES = {"holds": "success", "fails": "danger", "inconclusive": "warning"}
REPORT = "report"  # the folder of the HTML report in the site


def write_pages(app: Sphinx) -> None:
    """Write the sources of the generated pages."""
    source = Path(app.srcdir)
    pages = {source / "methods" / f"{m.slug}.md": method_page(m) for m in _methods()}
    pages |= {
        source / "families" / f"{family.name}.md": family_page(family)
        for family in catalog.all_families().values()
    }
    pages[source / "methods" / "index.md"] = index_page()
    for path, text in pages.items():
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text() != text:  # else Sphinx reads it again
            path.write_text(text)


def write_evidence(app: Sphinx, error: Exception | None) -> None:
    """Put the report on the published evidence beside the pages."""
    if error is not None or app.builder.format != "html":
        return
    records = [record for m in _methods() for record in m.evidence()]
    chapters = [
        Chapter(family.title, family.summary, {m.slug: (m.name, m.title) for m in family.methods})
        for family in catalog.all_families().values()
    ]
    write_report(records, chapters, Path(app.outdir) / REPORT)


def index_page() -> str:
    """Return the page that lists all families."""
    families = list(catalog.all_families().values())
    parts = ["# Methods", ""]
    for family in families:
        parts += [f"## [{family.title}](../families/{family.name}.md)", "", family.summary, ""]
        parts += [_table(family), ""]
    names = [f"../families/{family.name}" for family in families]
    return "\n".join([*parts, _toctree(names, hidden=True)])


def family_page(family: catalog.Family) -> str:
    """Return the page of a family: what it holds, how to install it, its methods."""
    install = f'```console\n$ pip install "thalweg[{family.extra}]"\n```'
    parts = [f"# {family.title}", "", family.summary, "", install, "", _table(family), ""]
    names = [f"../methods/{m.slug}" for m in family.methods]
    return "\n".join([*parts, _toctree(names, hidden=True)])


def method_page(m: catalog.Method) -> str:
    """Return the page of a method: its card, its evidence, its example and its reference."""
    parts = [
        f"# {m.name}: {m.title}",
        "",
        f"*{m.venue} · {m.kind} · [{catalog.all_families()[m.family].title}]"
        f"(../families/{m.family}.md)*",
        "",
        m.summary,
        "",
        ":::{admonition} When to use it",
        f":class: tip\n\n{m.when}",
        ":::",
        "",
        ":::{admonition} When not to",
        f":class: caution\n\n{m.not_when}",
        ":::",
        "",
        f"```console\n$ {m.install_line}\n```",
        "",
        f"```python\n{m.import_line}\n```",
        "",
        "## Evidence",
        "",
        *_evidence(m),
        "",
        "## Example",
        "",
        "```{eval-rst}",
        f".. minigallery:: ../examples/plot_{m.slug.replace('-', '_')}.py",
        "```",
        "",
        "## Reference",
        "",
    ]
    module = importlib.import_module(m.module)
    for name in m.objects:
        is_class = inspect.isclass(getattr(module, name))
        parts += [
            f"### `{name}`",
            "",
            "```{eval-rst}",
            f".. {'autoclass' if is_class else 'autofunction'}:: {m.module}.{name}",
            *(["   :members:"] if is_class else []),
            "```",
            "",
        ]
    return "\n".join(parts)


def _evidence(m: catalog.Method) -> list[str]:
    records = m.evidence()
    if not records:
        return [f"None is stored yet. `thalweg verify {m.slug}` runs the claims."]
    lines = [
        "| verdict | claim | effect | expected | scale |",
        "|---|---|---|---|---|",
    ]
    for record in records:
        link = f"<a href='../{REPORT}/{page_name(record)}'>{_cell(record['statement'])}</a>"
        lines.append(
            f"| {{bdg-{BADGES[record['verdict']]}}}`{record['verdict']}` | {link} "
            f"| {_cell(summarize(record))} | {_cell(record['expectation']['text'])} "
            f"| {record['scale']}, {record['seeds']} seeds |"
        )
    lines.append("")
    for record in records:
        if record["reasons"]:
            why = "; ".join(record["reasons"])
            lines.append(f"- `{record['name']}` ({record['scale']}), {record['verdict']}: {why}.")
    versions = records[0]["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("thalweg", "python", "numpy"))
    lines += [
        "",
        f"Each claim links to its contenders, curves and tuning. Measured with {named} on "
        f"{records[0]['machine']['processor']}, {records[0]['machine']['cores']} cores. "
        f"`thalweg verify {m.slug} --scale quick` runs them again.",
    ]
    return lines


def _table(family: catalog.Family) -> str:
    rows = ["| method | what it does | main claim |", "|---|---|---|"]
    for m in family.methods:
        headline = next((r for r in m.evidence() if r["headline"]), None)
        badge = (
            f"{{bdg-{BADGES[headline['verdict']]}}}`{headline['verdict']}`"
            if headline
            else "not run"
        )
        rows.append(f"| [{m.name}](../methods/{m.slug}.md) | {_cell(m.summary)} | {badge} |")
    return "\n".join(rows)


def _toctree(names: list[str], *, hidden: bool) -> str:
    flag = ":hidden:\n" if hidden else ""
    return "```{toctree}\n" + flag + "\n" + "\n".join(names) + "\n```\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _methods() -> list[catalog.Method]:
    return list(catalog.all_methods().values())


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("build-finished", write_evidence)
    return {"parallel_read_safe": True}
