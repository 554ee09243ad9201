"""``thalweg show``: one method, what it is for and what the evidence says."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from thalweg import catalog


def show(
    slug: Annotated[str, typer.Argument(help="The method, as `thalweg list` calls it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a method does, when to use it, how to import it, and its evidence so far."""
    m = catalog.method(slug)
    records = m.evidence()
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(m) | {"evidence": records}, indent=2))
        return

    from rich.console import Console
    from rich.table import Table

    from thalweg.cli.verify import result_table

    console = Console()
    console.print(f"[bold]{m.name}[/]: {m.title} ({m.venue})\n")
    card = Table.grid(padding=(0, 2))
    for label, text in (
        ("what", m.summary),
        ("when", m.when),
        ("not when", m.not_when),
        ("install", m.install_line),
        ("import", m.import_line),
        ("also", ", ".join(m.objects[1:]) or "nothing else"),
        ("check", f"thalweg verify {m.slug} --scale quick"),
    ):
        # Texts are data, not markup: thalweg[training] must not be read as a style.
        card.add_row(f"[dim]{label}[/]", console.render_str(text, markup=False))
    console.print(card)
    if not records:
        console.print("\nNo evidence is published yet.")
        return
    console.print("\n[bold]Evidence[/]")
    console.print(result_table(records))
