"""``thalweg solve``: solve a problem in a file of its field's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from thalweg.combinatorial import GraphFile, IsingResult

EXIT_INTERRUPTED = 130
INTERRUPTED = 3  # the status of an IsingResult

solve = typer.Typer(help="Solve a problem in a file.")

File = Annotated[
    Path, typer.Argument(help="rudy/Gset, DIMACS .col/.edge, Matrix Market, GraphML or GML.")
]
FormatOption = Annotated[
    str | None, typer.Option(help="rudy, dimacs, mtx, graphml or gml; by default from the file.")
]
OutOption = Annotated[
    Path | None, typer.Option(help="Write the partition here: JSON if it ends in .json, else text.")
]
TimeOption = Annotated[
    float | None, typer.Option("--time-limit", min=0.0, help="Stop after this many seconds.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of the random stream.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
PathOption = Annotated[int, typer.Option("--taus", min=1, help="Points on the spectral path.")]
CandidatesOption = Annotated[
    int, typer.Option("--candidates", min=1, help="Candidates at each point of the path.")
]


@solve.command()
def maxcut(
    file: File,
    format: FormatOption = None,  # noqa: A002
    out: OutOption = None,
    time_limit: TimeOption = None,
    seed: SeedOption = 0,
    taus: PathOption = 9,
    candidates: CandidatesOption = 16,
    as_json: JsonOption = False,
) -> int:
    """Cut a graph in two so that the edges between the parts weigh as much as possible."""
    from thalweg.combinatorial import read_graph, specann_maxcut

    graph = read_graph(file, format=format)  # type: ignore[arg-type]  # it checks the name itself
    _check_writable(out)
    result = specann_maxcut(
        graph.weights, taus=taus, n_candidates=candidates, time_limit=time_limit, rng=seed
    )
    value = {"problem": "maxcut", "value": result.cut_value, "upper_bound": result.cut_bound}
    return _finish(value, graph, result, out, as_json)


@solve.command()
def ising(
    file: File,
    format: FormatOption = None,  # noqa: A002
    out: OutOption = None,
    time_limit: TimeOption = None,
    seed: SeedOption = 0,
    taus: PathOption = 9,
    candidates: CandidatesOption = 16,
    as_json: JsonOption = False,
) -> int:
    """Minimize the energy -sum J_ij s_i s_j - sum h_i s_i over spins +-1.

    The file's weights are J (each pair once); a line ``i i w`` is the field h_i.
    """
    from thalweg.combinatorial import read_graph, specann

    graph = read_graph(file, format=format, diagonal="field")  # type: ignore[arg-type]
    _check_writable(out)
    result = specann(
        graph.weights,
        graph.field,
        taus=taus,
        n_candidates=candidates,
        time_limit=time_limit,
        rng=seed,
    )
    value = {"problem": "ising", "value": result.energy, "lower_bound": -result.upper_bound}
    return _finish(value, graph, result, out, as_json)


def _check_writable(out: Path | None) -> None:
    """Find out before the work, not after it, that the result cannot be written."""
    if out is None:
        return
    existed = out.exists()
    with out.open("a"):
        pass
    if not existed:
        out.unlink()


def _finish(
    value: dict[str, Any], graph: GraphFile, result: IsingResult, out: Path | None, as_json: bool
) -> int:
    n = graph.weights.shape[0]
    names = graph.names or [str(vertex) for vertex in range(1, n + 1)]
    summary = value | {
        "bound_kind": result.bound_kind,
        "vertices": n,
        "edges": graph.weights.nnz // 2,
        "seconds": round(result.time["total"], 3),
        "success": result.success,
        "message": result.message,
    }
    if out is not None:
        _write_partition(out, names, result, summary)
    if as_json:
        partition = dict(zip(names, result.spins.tolist(), strict=True))
        typer.echo(json.dumps(summary | {"partition": partition}))
    else:
        typer.echo(f"{graph.format} file: {n} vertices, {summary['edges']} edges")
        typer.echo(str(result))
        if out is not None:
            typer.echo(f"partition: {out}")
    return EXIT_INTERRUPTED if result.status == INTERRUPTED else 0


def _write_partition(
    out: Path, names: list[str], result: IsingResult, summary: dict[str, Any]
) -> None:
    spins = result.spins.tolist()
    if out.suffix == ".json":
        partition = dict(zip(names, spins, strict=True))
        out.write_text(json.dumps(summary | {"partition": partition}) + "\n")
        return
    lines = [f"# {summary['problem']} {summary['value']:g}"]
    lines += [f"{name} {spin:+d}" for name, spin in zip(names, spins, strict=True)]
    out.write_text("\n".join(lines) + "\n")
