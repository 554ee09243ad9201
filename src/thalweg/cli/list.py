"""``thalweg list``: what methods there are."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from thalweg import catalog


def list_methods(
    words: Annotated[
        list[str] | None, typer.Argument(help="Show methods whose texts contain all these words.")
    ] = None,
    family: Annotated[str | None, typer.Option(help="Show one family.")] = None,
    kind: Annotated[str | None, typer.Option(help="Show one kind.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the methods, with what they do and what the evidence says of their main claim."""
    found = catalog.find(words or [], family, kind)
    if as_json:
        keys = ("slug", "name", "title", "family", "kind", "summary", "venue")
        rows = [
            {key: getattr(m, key) for key in keys} | {"verdict": headline_verdict(m)} for m in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not found:
        typer.echo("no method matches; `thalweg list` shows all", err=True)
        raise typer.Exit(1)

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("method", "family", "main claim", "what it does"):
        table.add_column(column, no_wrap=column != "what it does")
    for m in found:
        verdict = headline_verdict(m)
        style = {"holds": "green", "fails": "red"}.get(verdict, "yellow")
        table.add_row(f"[bold]{m.slug}[/]", m.family, f"[{style}]{verdict}[/]", m.summary)
    Console().print(table)


def headline_verdict(m: catalog.Method) -> str:
    """Return the published verdict on the main claim of ``m``, at the largest scale."""
    records = [record for record in m.evidence() if record["headline"]]
    return str(records[0]["verdict"]) if records else "not run"
