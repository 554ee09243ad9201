"""Samples whose variables form a network: simulated ones, gene expression and stock returns."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.linalg import solve_triangular

from thalweg.common.optional import MissingExtraError, requires

Array = NDArray[np.float64]

SMALLEST_EIGENVALUE = 0.2
GENES = Path("datasets/10x_pbmc68k_reduced.h5ad")


@dataclass(frozen=True, eq=False)
class SparseGaussian:
    """Gaussian samples with a sparse precision matrix.

    Attributes
    ----------
    X : ndarray of shape (n, p)
    precision : ndarray of shape (p, p)
    """

    X: Array
    precision: Array

    @property
    def edges(self) -> NDArray[np.bool_]:
        """The network, of shape (p, p)."""
        edges: NDArray[np.bool_] = self.precision != 0
        np.fill_diagonal(edges, False)
        return edges


def sparse_gaussian(
    rng: np.random.Generator, n: int, p: int, *, density: float = 0.03, sparsest: float = 4.0
) -> SparseGaussian:
    """Return samples of a random network.

    Parameters
    ----------
    rng : Generator
    n, p : int
        Samples and variables.
    density : float, default 0.03
        The share of the pairs that have an edge, of weight ± uniform on [0.3, 1].
    sparsest : float, default 4
        At least this many edges of a variable on average.

    Notes
    -----
    The diagonal is 0.2 above the sum of the sizes of the row's other entries, so that no eigenvalue
    is below 0.2.

    Examples
    --------
    >>> data = sparse_gaussian(np.random.default_rng(0), 50, 20)
    >>> bool(np.linalg.eigvalsh(data.precision)[0] >= 0.2)
    True
    """
    share = min(1.0, max(density, sparsest / p))
    i, j = np.nonzero(np.triu(rng.random((p, p), dtype=np.float32) < share, 1))
    precision = np.zeros((p, p))
    precision[i, j] = rng.uniform(0.3, 1.0, len(i)) * rng.choice([-1.0, 1.0], len(i))
    precision += precision.T
    np.fill_diagonal(precision, np.abs(precision).sum(axis=1) + SMALLEST_EIGENVALUE)
    factor = np.linalg.cholesky(precision)
    noise = rng.standard_normal((p, n))
    X = solve_triangular(factor, noise, lower=True, trans="T").T
    return SparseGaussian(np.ascontiguousarray(X), precision)


@dataclass(frozen=True, eq=False)
class GeneExpression:
    """Expression of genes in single cells.

    Attributes
    ----------
    X : ndarray of shape (n, p)
        Logarithms of counts per cell plus one.
    genes : tuple of str, of length p
    cell_types : tuple of str, of length n
    """

    X: Array
    genes: tuple[str, ...]
    cell_types: tuple[str, ...]


@lru_cache(maxsize=1)
def gene_expression() -> GeneExpression:
    """Return 765 variable genes of 700 human blood cells, which come with the package scanpy.

    The file is read without importing scanpy. It is a part of the data of Zheng and others,
    "Massively parallel digital transcriptional profiling of single cells", Nature Communications
    2017.

    Raises
    ------
    MissingExtraError
        If scanpy, or h5py, is not installed.

    Examples
    --------
    >>> gene_expression().X.shape
    (700, 765)
    """
    with requires("peers"):
        import h5py
    spec = importlib.util.find_spec("scanpy")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    paths = [path for place in places if (path := Path(place) / GENES).is_file()]
    if not paths:
        raise MissingExtraError(
            f"the gene data come with the package scanpy ({GENES}), which is not installed; "
            "run: pip install scanpy, or to save its dependencies: pip install --no-deps scanpy",
            name="scanpy",
        )
    with h5py.File(paths[0]) as file:
        counts = file["raw.X"]
        shape = (len(file["obs"]), len(file["raw.var"]))
        parts = (counts["data"][:], counts["indices"][:], counts["indptr"][:])
        X = sparse.csr_array(parts, shape=shape).toarray().astype(np.float64)
        genes = tuple(name.decode() for name in file["raw.var"]["index"])
        types = [name.decode() for name in file["uns/bulk_labels_categories"][:]]
        cell_types = tuple(types[k] for k in file["obs"]["bulk_labels"])
    return GeneExpression(X, genes, cell_types)
