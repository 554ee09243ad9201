"""Graph files of the Max-Cut and Ising literature, read into a symmetric sparse matrix."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import io as scipy_io
from scipy import sparse

from thalweg.common.checks import check_choice
from thalweg.common.optional import requires

Format = Literal["rudy", "dimacs", "mtx", "graphml", "gml"]
FORMATS: tuple[Format, ...] = ("rudy", "dimacs", "mtx", "graphml", "gml")

_SUFFIXES: dict[str, Format] = {
    ".rudy": "rudy",
    ".rud": "rudy",
    ".mc": "rudy",
    ".ising": "rudy",
    ".col": "dimacs",
    ".edge": "dimacs",
    ".dimacs": "dimacs",
    ".mtx": "mtx",
    ".graphml": "graphml",
    ".gml": "gml",
}
# Indices of sparse matrices are int32: half the memory traffic of every product.
_MOST_VERTICES = 2**31 - 2
_COMMENT = {"rudy": "#", "dimacs": "c"}


class GraphFileError(ValueError):
    """A graph file is malformed. The message is ``path:line: reason``.

    Attributes
    ----------
    path : pathlib.Path
    line : int or None
        The 1-based line at fault; None where the format has no lines to blame.
    """

    def __init__(self, path: Path, line: int | None, reason: str) -> None:
        super().__init__(f"{path}:{line}: {reason}" if line else f"{path}: {reason}")
        self.path = path
        self.line = line


@dataclass(frozen=True)
class GraphFile:
    """What a graph file holds.

    Attributes
    ----------
    weights : scipy.sparse.csr_array, shape (n, n)
        Symmetric float64 edge weights with an empty diagonal.
    names : list of str or None
        The vertices' labels, where the format has them.
    format : {"rudy", "dimacs", "mtx", "graphml", "gml"}
    field : ndarray of shape (n,) or None
        The linear terms, when they were asked for with ``diagonal="field"``.
    """

    weights: sparse.csr_array
    names: list[str] | None
    format: Format
    field: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class _Edges:
    """Edges in the file's order, 0-based, with what is needed to point at one of them."""

    n: int
    i: NDArray[np.int64]
    j: NDArray[np.int64]
    weight: NDArray[np.float64]


def read_graph(
    path: str | PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002  (the word of networkx and scipy)
    diagonal: Literal["refuse", "field"] = "refuse",
) -> GraphFile:
    r"""Read a weighted undirected graph.

    Parameters
    ----------
    path : path_like
    format : {"rudy", "dimacs", "mtx", "graphml", "gml"}, optional
        By default from the suffix (``.rudy .rud .mc .ising``, ``.col .edge .dimacs``, ``.mtx``,
        ``.graphml``, ``.gml``), and for any other suffix from the content.

        - ``"rudy"``: a line ``n m``, then m lines ``i j [w]``, vertices from 1 (the Gset).
          Lines starting with ``#`` are comments.
        - ``"dimacs"``: lines ``c …``, ``p edge n m`` and ``e i j [w]``.
        - ``"mtx"``: Matrix Market, any real or pattern field; a ``general`` matrix must be
          symmetric.
        - ``"graphml"``, ``"gml"``: as NetworkX reads them, with edge attribute ``weight``.

        A missing weight is 1.
    diagonal : {"refuse", "field"}, default "refuse"
        What a self-loop ``i i w`` is: an error, or the linear term h_i of an Ising problem.

    Returns
    -------
    GraphFile

    Raises
    ------
    GraphFileError
        If the file is malformed: empty, truncated or of unknown format, wrong counts, vertices
        out of range, weights that are not finite numbers, self-loops, directed edges. An edge
        that is given twice (in either direction) counts once if its weights agree, and is an
        error if they do not; Matrix Market files and multigraphs sum such entries, as their
        definitions say.
    OSError
        If the file cannot be read.

    Notes
    -----
    O(n + m log m). Text goes through NumPy's C parser; only a file that it refuses is read again
    line by line, to say where it is wrong.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "triangle.rudy"
    >>> _ = file.write_text("3 3\n1 2 1\n2 3 -1\n1 3 2\n")
    >>> read_graph(file).weights.toarray()
    array([[ 0.,  1.,  2.],
           [ 1.,  0., -1.],
           [ 2., -1.,  0.]])
    """
    path = Path(path)
    if format is not None:
        check_choice("format", format, FORMATS)
    check_choice("diagonal", diagonal, ("refuse", "field"))
    if path.stat().st_size == 0:
        raise GraphFileError(path, None, "the file is empty")
    found = format or _SUFFIXES.get(path.suffix.lower()) or _sniff(path)
    if found in ("graphml", "gml"):
        matrix, names = _read_networkx(path, found)
    elif found == "mtx":
        matrix, names = _read_matrix_market(path), None
    else:
        matrix, names = _symmetric(_read_edge_list(path, found, diagonal)), None
    field = matrix.diagonal()
    looped = np.flatnonzero(field)
    if diagonal == "refuse" and len(looped):
        vertex = names[looped[0]] if names else looped[0] + 1
        raise GraphFileError(path, None, f"vertex {vertex} has a self-loop")
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    return GraphFile(matrix, names, found, field if diagonal == "field" else None)


def write_rudy(path: str | PathLike[str], weights: Any) -> None:
    """Write the edges of a symmetric matrix in rudy (Gset) format: ``n m``, then ``i j w``.

    Parameters
    ----------
    path : path_like
    weights : sparse matrix, shape (n, n)
        Symmetric, finite, with an empty diagonal. Weights read back bit for bit.

    Raises
    ------
    ValueError
        If ``weights`` is not square and symmetric, or has a diagonal.

    Examples
    --------
    >>> import tempfile, pathlib
    >>> file = pathlib.Path(tempfile.mkdtemp()) / "edge.rudy"
    >>> write_rudy(file, sparse.csr_array([[0.0, 2.5], [2.5, 0.0]]))
    >>> print(file.read_text())
    2 1
    1 2 2.5
    <BLANKLINE>
    """
    matrix: Any = sparse.csr_array(weights)
    if matrix.shape[0] != matrix.shape[1] or (matrix != matrix.T).nnz:
        raise ValueError(f"weights must be square and symmetric, got shape {matrix.shape}")
    if matrix.diagonal().any():
        raise ValueError("weights must have an empty diagonal")
    upper = sparse.triu(matrix, k=1, format="csr").tocoo()
    integral = bool(np.all(upper.data == np.round(upper.data)))
    text = io.BytesIO()
    # SciPy's Matrix Market writer is the fastest one at hand; its body is rudy's.
    scipy_io.mmwrite(
        text,
        sparse.coo_array(
            (upper.data.astype(np.int64) if integral else upper.data, (upper.row, upper.col)),
            shape=upper.shape,
        ),
        symmetry="general",
        field="integer" if integral else "real",
    )
    text.seek(0)
    for line in text:
        if not line.startswith(b"%"):
            break
    with open(path, "wb") as out:
        out.write(f"{matrix.shape[0]} {upper.nnz}\n".encode())
        out.write(text.read())


def _sniff(path: Path) -> Format:
    with open(path, "rb") as file:
        start = file.read(4096)
    if start.startswith(b"%%MatrixMarket"):
        return "mtx"
    if start.lstrip().startswith(b"<"):
        return "graphml"
    if re.search(rb"^\s*graph\s*\[", start, re.MULTILINE):
        return "gml"
    if re.match(rb"\s*[cp]\s", start):
        return "dimacs"
    if re.match(rb"\s*(#[^\n]*\s+)*\d+\s+\d+", start):
        return "rudy"
    accepted = ", ".join(FORMATS)
    raise GraphFileError(path, 1, f"unknown format: the content is none of {accepted}")


# --- rudy and DIMACS ------------------------------------------------------------------------


def _read_edge_list(path: Path, kind: Format, diagonal: str) -> _Edges:
    edges = _parse_fast(path, kind)
    if edges is None or (diagonal == "refuse" and np.any(edges.i == edges.j)):
        edges = _parse_by_line(path, kind, diagonal)
    return _without_repeats(edges) or _parse_by_line(path, kind, diagonal)


def _parse_fast(path: Path, kind: Format) -> _Edges | None:
    """Parse a well-formed file in C; None for one that needs `_parse_by_line`."""
    tag: list[tuple[str, Any]] = [("tag", "S2")] if kind == "dimacs" else []
    try:
        lines = _lines(path, kind)
        header_line, words = next(lines)
        n, m = _header(words, kind)
        columns = len(next(lines)[1]) if m else 0
        if m == 0 or columns - len(tag) not in (2, 3) or n > _MOST_VERTICES:
            return None
        weight = [("w", np.float64)] if columns - len(tag) == 3 else []
        table = np.loadtxt(
            path,
            dtype=[*tag, ("i", np.int64), ("j", np.int64), *weight],
            comments=_COMMENT[kind],
            skiprows=header_line,
            encoding="ascii",
            ndmin=1,
        )
    except (ValueError, StopIteration):
        return None
    w = table["w"] if weight else np.ones(len(table))
    ends = np.stack((table["i"], table["j"]))
    sound = (
        len(table) == m
        and ends.min() >= 1
        and ends.max() <= n
        and np.isfinite(w).all()
        and not (tag and np.any(table["tag"] != b"e"))
    )
    return _Edges(n, ends[0] - 1, ends[1] - 1, np.ascontiguousarray(w)) if sound else None


def _parse_by_line(path: Path, kind: Format, diagonal: str) -> _Edges:
    """Parse line by line and raise at the first fault; the reference for `_parse_fast`."""

    def refuse(line: int | None, reason: str) -> GraphFileError:
        return GraphFileError(path, line, reason)

    lines = _lines(path, kind)
    shape = "n m" if kind == "rudy" else "p edge n m"
    number, words = next(lines, (None, []))
    if number is None:
        raise refuse(None, "the file holds no data")
    try:
        n, m = _header(words, kind)
    except ValueError:
        raise refuse(number, f"expected the header '{shape}', got {_show(words)}") from None
    if n > _MOST_VERTICES:
        raise refuse(number, f"{n} vertices are too many: the limit is {_MOST_VERTICES}")
    seen: dict[tuple[int, int], tuple[float, int]] = {}
    edges: list[tuple[int, int, float]] = []
    for number, words in lines:
        try:
            i, j, weight = _edge(words, kind, n)
        except ValueError as error:
            raise refuse(number, str(error)) from None
        if i == j and diagonal == "refuse":
            raise refuse(number, f"self-loop at vertex {i}")
        before, line = seen.setdefault((min(i, j), max(i, j)), (weight, number))
        if before != weight:
            raise refuse(
                number, f"edge {i} {j} has weight {weight:g}, but {before:g} in line {line}"
            )
        edges.append((i - 1, j - 1, weight))
    if len(edges) != m:
        raise refuse(None, f"the header announces {m} edges, the file holds {len(edges)}")
    table = np.array(edges, dtype=np.float64).reshape(-1, 3)  # float64 holds every int32 exactly
    return _Edges(n, table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2])


def _lines(path: Path, kind: Format) -> Iterator[tuple[int, list[str]]]:
    """Yield (1-based number, words) of the lines that are neither empty nor comments."""
    comment = _COMMENT[kind]
    with open(path, encoding="ascii", errors="backslashreplace") as file:
        for number, line in enumerate(file, start=1):
            words = line.split()
            if words and not words[0].startswith(comment):
                yield number, words


def _header(words: list[str], kind: Format) -> tuple[int, int]:
    if kind == "dimacs":
        letter, _problem, *words = words
        if letter != "p":
            raise ValueError
    n, m = (int(word) for word in words)
    if n < 1 or m < 0:
        raise ValueError
    return n, m


def _edge(words: list[str], kind: Format, n: int) -> tuple[int, int, float]:
    given = _show(words)
    if kind == "dimacs":
        if words[0] != "e":
            raise ValueError(f"expected 'e i j [w]', got {given}")
        words = words[1:]
    if len(words) not in (2, 3):
        raise ValueError(f"expected 'i j' or 'i j w', got {given}")
    try:
        i, j = int(words[0]), int(words[1])
    except ValueError:
        raise ValueError(f"vertices must be integers, got {given}") from None
    for vertex in (i, j):
        if not 1 <= vertex <= n:
            raise ValueError(f"vertex {vertex} is not in 1..{n}")
    try:
        weight = float(words[2]) if len(words) == 3 else 1.0
    except ValueError:
        raise ValueError(f"the weight must be a number, got {words[2][:40]!r}") from None
    if not math.isfinite(weight):
        raise ValueError(f"the weight must be finite, got {words[2]}")
    return i, j, weight


def _show(words: list[str]) -> str:
    text = " ".join(words)
    return repr(text if len(text) <= 40 else text[:37] + "...")


def _without_repeats(edges: _Edges) -> _Edges | None:
    """Keep one of each set of equal edges; None when their weights differ."""
    low, high = np.minimum(edges.i, edges.j), np.maximum(edges.i, edges.j)
    key = low * edges.n + high
    order = np.argsort(key, kind="stable")
    repeated = key[order[1:]] == key[order[:-1]]
    if not repeated.any():
        return edges
    weight = edges.weight[order]
    if np.any(weight[1:][repeated] != weight[:-1][repeated]):
        return None
    first = order[np.concatenate(([True], ~repeated))]
    return _Edges(edges.n, low[first], high[first], edges.weight[first])


def _symmetric(edges: _Edges) -> sparse.csr_array:
    i, j = edges.i.astype(np.int32), edges.j.astype(np.int32)
    upper = sparse.coo_array((edges.weight, (i, j)), shape=(edges.n, edges.n)).tocsr()
    return sparse.csr_array(upper + upper.T - sparse.diags_array(upper.diagonal()))


# --- Matrix Market, GraphML, GML --------------------------------------------------------------


def _read_matrix_market(path: Path) -> sparse.csr_array:
    try:
        stored: Any = scipy_io.mmread(path)
    except (ValueError, OverflowError) as error:
        reason = str(error).rstrip(".")
        line = re.match(r"Line (\d+): ", reason)
        raise GraphFileError(
            path, int(line[1]) if line else None, reason[line.end() :] if line else reason
        ) from error
    if np.iscomplexobj(stored):
        raise GraphFileError(path, 1, "the entries must be real, got a complex matrix")
    matrix: Any = sparse.csr_array(stored).astype(np.float64)
    rows, columns = matrix.shape
    if rows != columns:
        raise GraphFileError(path, None, f"the matrix must be square, got {rows} by {columns}")
    entries = matrix.tocoo()
    bad = np.flatnonzero(~np.isfinite(entries.data))
    if len(bad):
        i, j, value = entries.row[bad[0]] + 1, entries.col[bad[0]] + 1, entries.data[bad[0]]
        raise GraphFileError(path, None, f"entry ({i}, {j}) must be finite, got {value}")
    unequal = (matrix != matrix.T).tocoo()
    if unequal.nnz:
        i, j = int(unequal.row[0]), int(unequal.col[0])
        raise GraphFileError(
            path,
            None,
            f"the matrix must be symmetric, got {matrix[i, j]:g} at ({i + 1}, {j + 1}) "
            f"and {matrix[j, i]:g} at ({j + 1}, {i + 1})",
        )
    return sparse.csr_array(matrix)


def _read_networkx(path: Path, kind: Format) -> tuple[sparse.csr_array, list[str]]:
    with requires("combinatorial"):
        import networkx as nx
    from xml.etree.ElementTree import ParseError

    try:
        graph = nx.read_graphml(path) if kind == "graphml" else nx.read_gml(path, label=None)
    except ParseError as error:
        raise GraphFileError(path, error.position[0], f"not XML: {error}") from error
    except (nx.NetworkXError, ValueError, KeyError, TypeError) as error:
        line = re.search(r"line (\d+)", str(error))
        raise GraphFileError(
            path, int(line[1]) if line else None, f"not {kind}: {error}".splitlines()[0]
        ) from error
    if graph.is_directed():
        raise GraphFileError(path, None, "the graph must be undirected")
    if graph.number_of_nodes() == 0:
        raise GraphFileError(path, None, "the graph has no vertices")
    for i, j, weight in graph.edges(data="weight", default=1.0):
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise GraphFileError(
                path, None, f"the weight of edge {i} {j} must be a number, got {weight!r}"
            )
        if not math.isfinite(weight):
            raise GraphFileError(
                path, None, f"the weight of edge {i} {j} must be finite, got {weight}"
            )
    names = [str(data.get("label", node)) for node, data in graph.nodes(data=True)]
    matrix = nx.to_scipy_sparse_array(graph, dtype=np.float64, format="csr")
    matrix.indices, matrix.indptr = matrix.indices.astype(np.int32), matrix.indptr.astype(np.int32)
    return matrix, names
