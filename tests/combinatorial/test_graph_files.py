"""Graph files: every format against the matrix it describes, and every way to be malformed."""

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import io as scipy_io
from scipy import sparse

from thalweg.combinatorial import GraphFileError, read_graph, write_rudy
from thalweg.combinatorial.graph_files import _parse_by_line, _parse_fast

TRIANGLE = np.array([[0, 1, 2.5], [1, 0, -1], [2.5, -1, 0]])


def write(tmp_path, name, text):
    file = tmp_path / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


WELL_FORMED = {
    "a.rudy": "3 3\n1 2 1\n2 3 -1\n3 1 2.5\n",
    "b.rudy": "# comment\n\n 3   3 \n1 2\n2 3 -1\n1 3 2.5e0",  # mixed: a missing weight is 1
    "c.txt": "3 3\r\n1 2 1\r\n2 3 -1\r\n1 3 2.5\r\n",
    "d.col": "c a comment\np edge 3 3\ne 1 2 1\ne 2 3 -1\ne 1 3 2.5\n",
    "e.dat": "c sniffed\np col 3 4\ne 1 2\ne 2 3 -1\ne 1 3 2.5\ne 3 1 2.5\n",  # both directions
    "f.mtx": "%%MatrixMarket matrix coordinate real symmetric\n3 3 3\n2 1 1\n3 2 -1\n3 1 2.5\n",
    "g.dat": "%%MatrixMarket matrix array real general\n3 3\n0\n1\n2.5\n1\n0\n-1\n2.5\n-1\n0\n",
}


@pytest.mark.parametrize("name", WELL_FORMED)
def test_text_formats_give_the_matrix_they_describe(tmp_path, name):
    graph = read_graph(write(tmp_path, name, WELL_FORMED[name]))
    np.testing.assert_array_equal(graph.weights.toarray(), TRIANGLE)
    assert graph.weights.dtype == np.float64
    assert graph.weights.indices.dtype == np.int32
    assert graph.names is None
    assert graph.field is None


@pytest.mark.parametrize(
    ("suffix", "write_graph"), [("graphml", nx.write_graphml), ("gml", nx.write_gml)]
)
@pytest.mark.parametrize("sniffed", [False, True])
def test_networkx_formats_keep_weights_and_names(tmp_path, suffix, write_graph, sniffed):
    graph = nx.Graph()
    graph.add_edge("Rhine", "Aare", weight=1)
    graph.add_edge("Aare", "Reuss", weight=-1.0)
    graph.add_edge("Rhine", "Reuss", weight=2.5)
    graph.add_node("Lake")
    file = tmp_path / ("g.dat" if sniffed else f"g.{suffix}")
    write_graph(graph, file)
    read = read_graph(file)
    assert read.format == suffix
    assert read.names == ["Rhine", "Aare", "Reuss", "Lake"]
    np.testing.assert_array_equal(read.weights.toarray()[:3, :3], TRIANGLE)
    assert read.weights.shape == (4, 4)


def test_a_missing_weight_is_one_and_parallel_edges_add_up(tmp_path):
    graph = nx.MultiGraph([(0, 1), (0, 1), (1, 2)])
    nx.write_graphml(graph, tmp_path / "g.graphml")
    np.testing.assert_array_equal(
        read_graph(tmp_path / "g.graphml").weights.toarray(), [[0, 2, 0], [2, 0, 1], [0, 1, 0]]
    )


def test_the_diagonal_is_the_linear_field_when_asked_for(tmp_path):
    graph = read_graph(
        write(tmp_path, "a.ising", "3 3\n1 1 -2\n1 2 1\n3 3 0.5\n"), diagonal="field"
    )
    np.testing.assert_array_equal(graph.field, [-2, 0, 0.5])
    np.testing.assert_array_equal(graph.weights.toarray(), [[0, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_edgeless_graphs_and_zero_weights(tmp_path):
    assert read_graph(write(tmp_path, "a.rudy", "4 0\n")).weights.nnz == 0
    assert read_graph(write(tmp_path, "b.rudy", "4 1\n1 2 0\n")).weights.nnz == 0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 12), integral=st.booleans())
def test_write_then_read_is_the_identity(tmp_path_factory, seed, n, integral):
    rng = np.random.default_rng(seed)
    upper = np.triu(rng.standard_normal((n, n)) * 10.0 ** rng.integers(-12, 12, (n, n)), 1)
    upper *= rng.random((n, n)) < 0.5
    dense = np.round(upper + upper.T) if integral else upper + upper.T
    file = tmp_path_factory.mktemp("graphs") / "g.rudy"
    write_rudy(file, sparse.csr_array(dense))
    np.testing.assert_array_equal(read_graph(file).weights.toarray(), dense)


@pytest.mark.parametrize("name", ["a.rudy", "d.col"])
def test_the_fast_parser_agrees_with_the_line_parser(tmp_path, name):
    file = write(tmp_path, name, WELL_FORMED[name])
    kind = "rudy" if name.endswith("rudy") else "dimacs"
    fast, slow = _parse_fast(file, kind), _parse_by_line(file, kind, "refuse")
    for column in ("i", "j", "weight"):
        np.testing.assert_array_equal(getattr(fast, column), getattr(slow, column))


def test_matrix_market_agrees_with_scipy(tmp_path):
    matrix = sparse.random_array((30, 30), density=0.2, rng=np.random.default_rng(0))
    matrix = sparse.csr_array(matrix + matrix.T)
    matrix.setdiag(0)
    scipy_io.mmwrite(tmp_path / "g.mtx", matrix, precision=17)
    assert abs(read_graph(tmp_path / "g.mtx").weights - matrix).max() < 1e-15


MALFORMED = [
    ("a.rudy", "", None, "empty"),
    ("a.dat", "", None, "empty"),
    ("a.rudy", "\n# only a comment\n", None, "no data"),
    ("a.rudy", "3\n1 2 1\n", 1, "expected the header 'n m', got '3'"),
    ("a.rudy", "x y\n1 2 1\n", 1, "expected the header"),
    ("a.rudy", "0 0\n", 1, "expected the header"),
    ("a.rudy", "9999999999 1\n1 2 1\n", 1, "too many"),
    ("a.rudy", "3 2\n1 2 1\n", None, "announces 2 edges, the file holds 1"),
    ("a.rudy", "3 2\n", None, "announces 2 edges, the file holds 0"),
    ("a.rudy", "3 1\n1 2 1\n2 3 1\n", None, "announces 1 edges, the file holds 2"),
    ("a.rudy", "3 1\n1 4 1\n", 2, r"vertex 4 is not in 1\.\.3"),
    ("a.rudy", "3 1\n0 2 1\n", 2, r"vertex 0 is not in 1\.\.3"),
    ("a.rudy", "3 1\n1 2.5 1\n", 2, "vertices must be integers"),
    ("a.rudy", "3 2\n1 2 1\n2 3 nan\n", 3, "the weight must be finite, got nan"),
    ("a.rudy", "3 1\n1 2 1e999\n", 2, "the weight must be finite"),
    ("a.rudy", "3 1\n1 2 heavy\n", 2, "the weight must be a number, got 'heavy'"),
    ("a.rudy", "3 1\n1 2 3 4\n", 2, "expected 'i j' or 'i j w', got '1 2 3 4'"),
    ("a.rudy", "3 2\n1 2 1\n7\n", 3, "expected 'i j'"),
    ("a.rudy", "3 1\n2 2 1\n", 2, "self-loop at vertex 2"),
    ("a.rudy", "3 2\n1 2 1\n2 1 3\n", 3, "edge 2 1 has weight 3, but 1 in line 2"),
    ("a.rudy", b"3 1\n1 2 \x00\xff\x80\n", 2, "the weight must be a number"),
    ("a.rudy", b"\x80\x81\x82" * 40, 1, "expected the header"),
    ("a.dat", b"\x00\x01junk\xff", 1, "unknown format"),
    ("a.col", "e 1 2\n", 1, "expected the header 'p edge n m'"),
    ("a.col", "p edge 3 1\nf 1 2\n", 2, "expected 'e i j"),
    ("a.col", "p edge 3 1\ne 1\n", 2, "expected 'i j'"),
    ("a.mtx", "junk\n1 1 1\n", 1, "Not a Matrix Market file"),
    ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 x\n", 3, "Invalid"),
    ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 2 2\n1 2 1\n", None, "Truncated"),
    (
        "a.mtx",
        "%%MatrixMarket matrix coordinate real general\n2 2 1\n1 2 3\n",
        None,
        r"symmetric, got 3 at \(1, 2\) and 0 at \(2, 1\)",
    ),
    ("a.mtx", "%%MatrixMarket matrix coordinate real general\n2 3 1\n1 2 3\n", None, "square"),
    ("a.mtx", "%%MatrixMarket matrix coordinate real symmetric\n2 2 1\n2 1 nan\n", None, "finite"),
    ("a.mtx", "%%MatrixMarket matrix coordinate real symmetric\n2 2 1\n2 2 1\n", None, "self-loop"),
    (
        "a.mtx",
        "%%MatrixMarket matrix coordinate complex general\n2 2 1\n1 2 1 1\n",
        1,
        "must be real",
    ),
    ("a.graphml", "<graphml><oops></graphml>", 1, "not XML"),
    ("a.graphml", "<?xml version='1.0'?><graphml/>", None, "not graphml"),
    ("a.gml", "graph [\n node [ id 0 ]\n edge [ source 0\n", None, "not gml"),
    ("a.gml", "graph [\n directed 1\n node [ id 0 ]\n]\n", None, "undirected"),
    ("a.gml", "graph [\n]\n", None, "no vertices"),
    (
        "a.gml",
        'graph [ node [ id 0 ] node [ id 1 ] edge [ source 0 target 1 weight "x" ] ]',
        None,
        "must be a number, got 'x'",
    ),
    (
        "a.gml",
        "graph [ node [ id 0 ] node [ id 1 ] edge [ source 0 target 1 weight +INF ] ]",
        None,
        "must be finite",
    ),
    (
        "a.gml",
        'graph [ node [ id 0 label "hub" ] edge [ source 0 target 0 ] ]',
        None,
        "vertex hub has a self-loop",
    ),
]


@pytest.mark.parametrize(("name", "text", "line", "reason"), MALFORMED)
def test_a_malformed_file_is_refused_with_its_place(tmp_path, name, text, line, reason):
    file = write(tmp_path, name, text)
    with pytest.raises(GraphFileError, match=reason) as caught:
        read_graph(file)
    assert caught.value.path == file
    assert caught.value.line == line
    message = str(caught.value)
    assert message.startswith(f"{file}:{line}: " if line else f"{file}: ")
    assert "\n" not in message


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_graph(tmp_path / "nowhere.rudy")


def test_bad_arguments(tmp_path):
    file = write(tmp_path, "a.rudy", WELL_FORMED["a.rudy"])
    with pytest.raises(ValueError, match="format must be one of"):
        read_graph(file, format="csv")
    with pytest.raises(ValueError, match="diagonal must be one of"):
        read_graph(file, diagonal="drop")
    with pytest.raises(ValueError, match="square and symmetric"):
        write_rudy(file, sparse.csr_array([[0.0, 1.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match="empty diagonal"):
        write_rudy(file, sparse.eye_array(2, format="csr"))
