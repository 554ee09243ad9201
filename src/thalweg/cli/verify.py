"""``thalweg verify``: run the claims of methods."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thalweg import catalog

if TYPE_CHECKING:
    from rich.table import Table

    from thalweg.evidence.backends import Backend
    from thalweg.evidence.claim import Claim

EXIT_ERROR = 1
EXIT_CLAIM_FAILS = 3
DATABASE = Path("thalweg.sqlite")


class ScaleName(StrEnum):
    """The size of a run."""

    smoke = "smoke"
    quick = "quick"
    full = "full"


class BackendName(StrEnum):
    """Where trials run."""

    processes = "processes"
    ray = "ray"


DatabaseOption = Annotated[
    Path, typer.Option(envvar="THALWEG_DATABASE", help="The SQLite file that holds the trials.")
]


def verify(
    targets: Annotated[list[str], typer.Argument(help="Methods, families, or all.")],
    scale: Annotated[
        ScaleName, typer.Option(help="smoke: seconds; quick: under a minute a claim; full: more.")
    ] = ScaleName.quick,
    only: Annotated[
        list[str] | None, typer.Option("--claim", help="Run only claims of this name.")
    ] = None,
    headline: Annotated[
        bool, typer.Option("--headline", help="Run only the main claim of each method.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Worker processes; 0: one per core.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Numerical threads of each worker.")] = 1,
    backend: Annotated[BackendName, typer.Option(help="Where trials run.")] = BackendName.processes,
    address: Annotated[
        str | None, typer.Option(help="Of a running Ray cluster: auto, or host:port.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Use finished trials, or run them again.")
    ] = True,
    seed_offset: Annotated[int, typer.Option(min=0, help="Added to seeds, for fresh ones.")] = 0,
    database: DatabaseOption = DATABASE,
    export: Annotated[
        Path | None, typer.Option(help="Also write the results to <method>.json in this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> int:
    """Run the claims of methods and say which hold.

    Every finished trial is stored at once: after Ctrl-C or a crash the same command goes on where
    it stopped. Exit code 3: a claim fails; 1: a trial failed.
    """
    if address is not None and backend is not BackendName.ray:
        raise typer.BadParameter("it needs --backend ray", param_hint="--address")
    methods = catalog.select(targets)
    from thalweg.claims import claims_of

    claims = [claim for m in methods for claim in claims_of(m) if claim.headline or not headline]
    if only:
        claims = _named(claims, only)

    from thalweg.evidence.result import merge_evidence
    from thalweg.evidence.runner import verify as run
    from thalweg.evidence.store import Store

    # Ray reports lost nodes on stdout, which belongs to the results.
    with Store(database) as store, contextlib.redirect_stdout(sys.stderr):
        workers = _start(backend, address, jobs or os.cpu_count() or 1, threads)
        try:
            records = run(
                claims,
                scale=scale.value,
                store=store,
                backend=workers,
                seed_offset=seed_offset,
                resume=resume,
            )
        except KeyboardInterrupt:
            typer.echo(
                f"thalweg: interrupted; {store.trial_count()} trials are kept in {database}, "
                "the same command goes on from there",
                err=True,
            )
            raise typer.Exit(130) from None
        finally:
            workers.close()
    if export is not None:
        for record in records:
            merge_evidence(export, record)
    _print(records, as_json)
    return _exit_code(records)


def _named(claims: Sequence[Claim], only: Sequence[str]) -> list[Claim]:
    names = sorted({claim.name for claim in claims})
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise typer.BadParameter(
            f"no claim {', '.join(unknown)}; there are {', '.join(names)}", param_hint="--claim"
        )
    return [claim for claim in claims if claim.name in only]


def _start(backend: BackendName, address: str | None, jobs: int, threads: int) -> Backend:
    from thalweg.evidence.backends import ProcessBackend, RayBackend

    if backend is BackendName.ray:
        return RayBackend(address, jobs, threads)
    return ProcessBackend(jobs, threads)


def _exit_code(records: Sequence[dict[str, Any]]) -> int:
    if any(record["failures"] for record in records):
        return EXIT_ERROR
    return EXIT_CLAIM_FAILS if any(r["verdict"] == "fails" for r in records) else 0


def _print(records: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(records, indent=2))
        return
    from rich.console import Console

    console = Console()
    console.print(result_table(records))
    for record in records:
        for reason in record["reasons"]:
            console.print(f"{record['claim']}: {reason}", style="yellow", markup=False)


def result_table(records: Sequence[dict[str, Any]]) -> Table:
    """Return a table of claims with verdict, effect and time."""
    from rich.table import Table
    from rich.text import Text

    from thalweg.evidence.result import summarize

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("claim", overflow="fold", ratio=3)
    table.add_column("scale")
    table.add_column("verdict", no_wrap=True)
    table.add_column("effect", ratio=3)
    table.add_column("expected", ratio=3)
    table.add_column("trials", justify="right", no_wrap=True)
    for record in records:
        style = {"holds": "green", "fails": "red"}.get(record["verdict"], "yellow")
        table.add_row(
            Text(record["claim"], style="bold"),
            record["scale"],
            Text(record["verdict"], style=style),
            Text(summarize(record)),
            record["expectation"]["text"],
            f"{record['seconds']:.0f} s",
        )
    return table
