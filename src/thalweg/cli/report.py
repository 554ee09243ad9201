"""``thalweg report``: an HTML report of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from thalweg import catalog
from thalweg.cli.verify import DATABASE, DatabaseOption


def report(
    out: Annotated[Path, typer.Option(help="The folder to write.")] = Path("thalweg-report"),
    database: DatabaseOption = DATABASE,
    published: Annotated[
        bool, typer.Option("--published", help="Report the evidence that came with thalweg.")
    ] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Serve it on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="For --serve.")] = 8000,
) -> None:
    """Write the results as HTML that opens offline: an overview and a page per claim."""
    records = _records(database, published)
    if not records:
        source = "the published evidence" if published else database
        raise ValueError(f"{source} holds no results yet; run `thalweg verify` first")

    from thalweg.evidence.report import Chapter, write_report

    chapters = [
        Chapter(family.title, family.summary, {m.slug: (m.name, m.title) for m in family.methods})
        for family in catalog.all_families().values()
    ]
    index = write_report(records, chapters, out)
    typer.echo(index.resolve())
    if serve:
        _serve(out, port)


def _records(database: Path, published: bool) -> list[dict[str, Any]]:
    if published:
        return [record for m in catalog.all_methods().values() for record in m.evidence()]

    from thalweg.evidence.store import read_results

    return read_results(database)


def _serve(folder: Path, port: int) -> None:
    import functools
    import http.server

    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        typer.echo(f"http://127.0.0.1:{server.server_port}/ (Ctrl-C stops)", err=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            typer.echo("stopped", err=True)
