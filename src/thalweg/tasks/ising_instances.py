"""Random Ising and Max-Cut instances of known structure: hubs, geometry, lattices, expanders."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.spatial import cKDTree

from thalweg.common.checks import check_integer, check_number
from thalweg.common.random import RNGLike, as_generator


def hub_heavy(n: int, edges: int, *, signed: bool = False, rng: RNGLike = None) -> Any:
    """Return a graph with a few hubs: endpoints drawn with Pareto(1.5) weights.

    Parameters
    ----------
    n : int
        Vertices.
    edges : int
        Draws; repeated edges and loops are dropped, so there are somewhat fewer edges.
    signed : bool, default False
        Whether edge weights are -1 or +1 at random, instead of 1.
    rng : int, numpy.random.Generator or None

    Returns
    -------
    scipy.sparse.csr_array, shape (n, n)

    Examples
    --------
    >>> degrees = np.diff(hub_heavy(1000, 6000, rng=0).indptr)
    >>> bool(degrees.max() > 20 * np.median(degrees))
    True
    """
    check_integer("n", n, at_least=2)
    check_integer("edges", edges, at_least=1)
    stream = as_generator(rng)
    popularity = stream.pareto(1.5, n) + 1
    ends = stream.choice(n, size=(2, edges), p=popularity / popularity.sum())
    return _from_edges(n, ends, _signs(ends.shape[1], 0.5 if signed else 0.0, stream))


def planted_geometric(
    n: int, degree: float = 10.0, *, flip: float = 0.15, rng: RNGLike = None
) -> Any:
    """Return couplings between near points of the unit square that mostly agree with hidden spins.

    Every coupling is s_i s_j for planted spins s, reversed with probability ``flip``: frustration
    is weak for small ``flip``.

    Parameters
    ----------
    n : int
        Points.
    degree : float, default 10.0
        Their mean number of neighbours, away from the border.
    flip : float in [0, 0.5], default 0.15
    rng : int, numpy.random.Generator or None

    Examples
    --------
    >>> planted_geometric(500, rng=0).shape
    (500, 500)
    """
    check_integer("n", n, at_least=2)
    check_number("degree", degree, above=0)
    check_number("flip", flip, at_least=0, at_most=0.5)
    stream = as_generator(rng)
    points = stream.random((n, 2))
    radius = np.sqrt(degree / (np.pi * n))
    ends = cKDTree(points).query_pairs(radius, output_type="ndarray").T
    planted = stream.choice([-1.0, 1.0], size=n)
    signs = planted[ends[0]] * planted[ends[1]] * _signs(ends.shape[1], flip, stream)
    return _from_edges(n, ends, signs)


def toroidal_glass(rows: int, columns: int, *, negative: float = 0.5, rng: RNGLike = None) -> Any:
    """Return the +-1 spin glass on a torus, the share ``negative`` of its couplings being -1.

    Examples
    --------
    >>> toroidal_glass(4, 5, rng=0).nnz
    80
    """
    check_integer("rows", rows, at_least=3)
    check_integer("columns", columns, at_least=3)
    check_number("negative", negative, at_least=0, at_most=1)
    stream = as_generator(rng)
    cells = np.arange(rows * columns).reshape(rows, columns)
    right, down = np.roll(cells, -1, axis=1), np.roll(cells, -1, axis=0)
    ends = np.stack((np.tile(cells.ravel(), 2), np.concatenate((right.ravel(), down.ravel()))))
    return _from_edges(rows * columns, ends, _signs(ends.shape[1], negative, stream))


def regular_glass(n: int, degree: int = 3, *, rng: RNGLike = None) -> Any:
    """Return the +-1 spin glass on a random regular graph (the configuration model, made simple).

    Loops and repeated edges, a constant number in expectation, are dropped, so a few vertices have
    a lower degree.

    Examples
    --------
    >>> degrees = np.diff(regular_glass(1000, 3, rng=0).indptr)
    >>> bool((degrees == 3).mean() > 0.98)
    True
    """
    check_integer("n", n, at_least=degree + 1)
    check_integer("degree", degree, at_least=1)
    stream = as_generator(rng)
    stubs = np.repeat(np.arange(n, dtype=np.int32), degree)
    stream.shuffle(stubs)
    ends = stubs[: len(stubs) // 2 * 2].reshape(2, -1)
    return _from_edges(n, ends, _signs(ends.shape[1], 0.5, stream))


def _signs(count: int, negative: float, rng: np.random.Generator) -> NDArray[np.float64]:
    return np.where(rng.random(count) < negative, -1.0, 1.0)


def _from_edges(n: int, ends: NDArray[Any], weights: NDArray[np.float64]) -> Any:
    """Return the symmetric matrix of these edges, without loops, repeated edges kept once."""
    i, j = np.minimum(*ends).astype(np.int64), np.maximum(*ends).astype(np.int64)
    kept = np.unique(i * n + j, return_index=True)[1]
    kept = kept[i[kept] != j[kept]]
    i, j = i[kept].astype(np.int32), j[kept].astype(np.int32)
    upper = sparse.coo_array((weights[kept], (i, j)), shape=(n, n)).tocsr()
    return sparse.csr_array(upper + upper.T)
