"""The Gset: Max-Cut instances that the field has reported cuts of since 2000.

The instances were made with rudy, G. Rinaldi's graph generator, from a command line each. rudy
draws from the portable random numbers of the Stanford GraphBase, so the graphs can be made again,
edge by edge, instead of being shipped. `rudy_graph` does that from the published definitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import sparse

from thalweg.common.checks import check_choice, check_integer, check_number

Kind = Literal["random", "planar", "torus"]
KINDS: tuple[Kind, ...] = ("random", "planar", "torus")


class GsetInstance(NamedTuple):
    """One graph of the Gset.

    Attributes
    ----------
    weights : scipy.sparse.csr_array, shape (n, n)
        Symmetric float64 edge weights.
    best_known : int
        The largest cut reported in the literature.
    """

    weights: Any
    best_known: int


class _Card(NamedTuple):
    kind: Kind
    rows: int
    second: float
    seed: int
    weight_seed: int | None
    best_known: int
    exact: bool  # whether rudy's command line is on record, so that this is the very graph


_CARDS: dict[str, _Card] = {}


def _register(
    first: int,
    kind: Kind,
    shapes: list[tuple[int, float]],
    seed: int,
    signed: bool,
    best: list[int],
    exact: bool = True,
) -> None:
    """Register consecutive graphs: seeds count up, a planar graph taking one for each layer."""
    step = 2 if kind == "planar" else 1
    for i, ((rows, second), cut) in enumerate(zip(shapes, best, strict=True)):
        weight_seed = seed + i if signed else None
        _CARDS[f"G{first + i}"] = _Card(
            kind, rows, second, seed + step * i, weight_seed, cut, exact
        )


_register(1, "random", [(800, 6)] * 5, 8001, False, [11624, 11620, 11622, 11646, 11631])
_register(6, "random", [(800, 6)] * 5, 8001, True, [2178, 2006, 2005, 2054, 2000])
_register(11, "torus", [(100, 8), (50, 16), (25, 32)], 8001, True, [564, 556, 582])
_register(14, "planar", [(800, 99)] * 4, 8001, False, [3064, 3050, 3052, 3047])
_register(18, "planar", [(800, 99)] * 4, 8001, True, [992, 906, 941, 931])
_register(22, "random", [(2000, 1)] * 5, 20001, False, [13359, 13344, 13337, 13340, 13328])
_register(27, "random", [(2000, 1)] * 5, 20001, True, [3341, 3298, 3405, 3413, 3310])
_register(35, "planar", [(2000, 99)] * 4, 20001, False, [7687, 7680, 7691, 7688])
_register(39, "planar", [(2000, 99)] * 4, 20001, True, [2408, 2400, 2405, 2481])
_register(43, "random", [(1000, 2)] * 5, 10001, False, [6660, 6650, 6654, 6649, 6657])
_register(48, "torus", [(50, 60), (30, 100), (25, 120)], 30001, False, [6000, 6000, 5880])
_register(51, "planar", [(1000, 100)] * 4, 10001, False, [3848, 3851, 3850, 3854])
_register(55, "random", [(5000, 0.1)], 50001, False, [10299])
_register(56, "random", [(5000, 0.1)], 50001, True, [4012])
_register(58, "planar", [(5000, 99)], 50001, False, [19263])
_register(59, "planar", [(5000, 99)], 50001, True, [6078])
_register(60, "random", [(7000, 0.07)], 70001, False, [14176])
_register(61, "random", [(7000, 0.07)], 70001, True, [5789])
_register(63, "planar", [(7000, 99)], 70001, False, [26997])
_register(64, "planar", [(7000, 99)], 70001, True, [8735])
GSET_NAMES: tuple[str, ...] = tuple(_CARDS)

# Tori whose shapes and seeds are not on record: only their type and size can be made again.
_register(32, "torus", [(100, 20), (80, 25), (50, 40)], 1, True, [1410, 1382, 1384], exact=False)
_register(57, "torus", [(100, 50)], 4, True, [3492], exact=False)
_register(62, "torus", [(100, 70)], 5, True, [4868], exact=False)
_register(65, "torus", [(100, 80), (100, 90), (100, 100)], 6, True, [5558, 6360, 6940], exact=False)
GSET_TYPES: tuple[str, ...] = tuple(sorted(_CARDS, key=lambda name: int(name[1:])))


@lru_cache(maxsize=8)
def gset_instance(name: str) -> GsetInstance:
    """Return a graph of the Gset and the largest cut reported for it.

    G1 to G64, except the tori G32 to G34, G57 and G62, whose command lines are not on record;
    `gset_like` makes graphs of their types. The seeds of G55 to G64 follow from the pattern of the
    others, and give the published numbers of edges.

    Parameters
    ----------
    name : str

    Returns
    -------
    GsetInstance

    References
    ----------
    C. Helmberg, F. Rendl, "A spectral bundle method for semidefinite programming", SIAM J. Optim.
    10, 2000 (the instances).
    U. Benlic, J.-K. Hao, "Breakout local search for the max-cut problem", Eng. Appl. Artif.
    Intell. 26, 2013, and F. Ma, J.-K. Hao, "A multiple search operator heuristic for the
    max-k-cut problem", Ann. Oper. Res. 248, 2017 (best known cuts).

    Examples
    --------
    >>> graph = gset_instance("G14")
    >>> graph.weights.shape[0], graph.weights.nnz // 2, graph.best_known
    (800, 4694, 3064)
    """
    check_choice("name", name, GSET_NAMES)
    card = _CARDS[name]
    return GsetInstance(rudy_graph(*card[:5]), card.best_known)


def gset_like(name: str, seed: int) -> Any:
    """Return a new graph of the same type and size as ``name``, from another seed of rudy's.

    Any of G1 to G67 will do.

    Examples
    --------
    >>> gset_like("G11", seed=3).shape
    (800, 800)
    """
    check_choice("name", name, GSET_TYPES)
    check_integer("seed", seed, at_least=0, at_most=2**30)
    card = _CARDS[name]
    # Two layers of a planar graph take two seeds; even ones keep graphs of successive seeds apart.
    weight_seed = None if card.weight_seed is None else 2 * seed
    return rudy_graph(card.kind, card.rows, card.second, 2 * seed, weight_seed)


def rudy_graph(
    kind: Kind, rows: int, second: float, seed: int, weight_seed: int | None = None
) -> Any:
    """Generate a graph as rudy does.

    Parameters
    ----------
    kind : {"random", "planar", "torus"}
        ``-rnd_graph rows second seed``, the union of ``-planar rows second`` with seeds ``seed``
        and ``seed + 1``, or ``-toroidal_grid_2D rows second``.
    rows : int
        Vertices; rows of a torus.
    second : float
        Density in percent of the most edges possible; columns of a torus.
    seed : int
    weight_seed : int, optional
        Weights are -1 or +1 (``-random 0 1 weight_seed -times 2 -plus -1``); all 1 by default.

    Returns
    -------
    scipy.sparse.csr_array

    References
    ----------
    D. E. Knuth, "The Stanford GraphBase", ACM Press, 1993 (random numbers, random graphs, boards,
    unions). G. Rinaldi, "Rudy: a rudimental graph generator", 1995 (planar graphs, densities).
    """
    check_choice("kind", kind, KINDS)
    check_integer("rows", rows, at_least=3)
    check_number("second", second, above=0)
    check_integer("seed", seed, at_least=0)
    if kind == "random":
        graph = _random_graph(rows, second, seed)
    elif kind == "planar":
        graph = _union(_planar_graph(rows, second, seed), _planar_graph(rows, second, seed + 1))
    else:
        graph = _torus(rows, int(second))
    edges = np.array(list(graph.edges()))
    weights = np.ones(len(edges))
    if weight_seed is not None:
        draw = _FlipNumbers(weight_seed)
        weights = np.array([2.0 * draw.below(2) - 1 for _ in edges])
    n = len(graph.neighbors)
    upper = sparse.coo_array((weights, (edges[:, 0], edges[:, 1])), shape=(n, n)).tocsr()
    return sparse.csr_array(upper + upper.T)


class _FlipNumbers:
    """The Stanford GraphBase's numbers: a_k = a_{k-55} - a_{k-24} mod 2^31, in reversed blocks."""

    def __init__(self, seed: int) -> None:
        self._state = [0] * 55
        previous, following, shifted = seed % 2**31, 1, seed % 2**31
        self._state[54] = previous
        place = 21
        while place:
            self._state[place - 1] = following
            shifted = (shifted >> 1) + (2**30 if shifted & 1 else 0)
            following, previous = (previous - following - shifted) % 2**31, following
            place = (place + 21) % 55
        for _ in range(5):
            self._refill()
        self._left.pop()  # the warm-up returns the first number of its last block

    def _refill(self) -> None:
        a = self._state
        for i in range(55):
            a[i] = (a[i] - a[(i + 31) % 55]) % 2**31
        self._left = a.copy()

    def next(self) -> int:
        """Return the next number below 2^31."""
        if not self._left:
            self._refill()
        return self._left.pop()

    def below(self, m: int) -> int:
        """Return a number below m, without bias."""
        limit = 2**31 - 2**31 % m
        while (number := self.next()) >= limit:
            pass
        return number % m


class _Graph:
    """Adjacency lists in the GraphBase's order: the newest neighbour comes first."""

    def __init__(self, n: int) -> None:
        self.neighbors: list[list[int]] = [[] for _ in range(n)]

    def add(self, u: int, v: int) -> None:
        self.neighbors[u].append(v)
        self.neighbors[v].append(u)

    def edges(self) -> Iterator[tuple[int, int]]:
        """Yield (u, v), u < v, in the order in which rudy writes edges and draws weights."""
        for u, around in enumerate(self.neighbors):
            for v in reversed(around):
                if u < v:
                    yield u, v


def _random_graph(n: int, density: float, seed: int) -> _Graph:
    graph, draw = _Graph(n), _FlipNumbers(seed)
    seen: set[tuple[int, int]] = set()
    wanted = int(n * (n - 1.0) * density / 200 + 0.5)
    while len(seen) < wanted:
        u, v = draw.below(n), draw.below(n)
        edge = (min(u, v), max(u, v))
        if u != v and edge not in seen:
            seen.add(edge)
            graph.add(u, v)
    return graph


def _planar_graph(n: int, density: float, seed: int) -> _Graph:
    """Split random faces of a triangle into three, then drop random edges."""
    draw = _FlipNumbers(seed)
    faces = [(0, 1, 2)]
    edges = [(0, 1), (0, 2), (1, 2)]
    for d in range(3, n):
        chosen = draw.below(len(faces))
        a, b, c = faces[chosen]
        edges += [(a, d), (b, d), (c, d)]
        faces[chosen] = (a, b, d)
        faces += [(a, c, d), (b, c, d)]
    while len(edges) > int(density * (3 * n - 6) / 100):
        dropped = draw.below(len(edges))
        edges[dropped] = edges[-1]
        edges.pop()
    graph = _Graph(n)
    for u, v in edges:
        graph.add(u, v)
    return graph


def _union(first: _Graph, second: _Graph) -> _Graph:
    graph = _Graph(len(first.neighbors))
    for u in range(len(first.neighbors)):
        around = [*reversed(first.neighbors[u]), *reversed(second.neighbors[u])]
        for v in dict.fromkeys(around):  # each once, in this order
            if v > u:
                graph.add(u, v)
    return graph


def _torus(rows: int, columns: int) -> _Graph:
    graph = _Graph(rows * columns)
    for down, right in ((0, 1), (1, 0)):
        for i in range(rows):
            for j in range(columns):
                graph.add(i * columns + j, (i + down) % rows * columns + (j + right) % columns)
    return graph
