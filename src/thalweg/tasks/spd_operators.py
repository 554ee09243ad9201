"""Large symmetric positive definite matrices: discretized operators, graphs and Gram matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray
from scipy.sparse.linalg import eigsh

from thalweg.common.optional import requires

Values = NDArray[np.float64]

# What holds the pixels of an image graph in place, relative to its edges.
IMAGE_SHIFT = 1e-3


@dataclass(frozen=True, eq=False)
class SPDOperator:
    """A symmetric positive definite matrix with the ends of its spectrum.

    Attributes
    ----------
    name : str
    matrix : csr_array of shape (n, n)
    lam_min, lam_max : float
        Smallest and largest eigenvalue, to six digits.
    """

    name: str
    matrix: sp.csr_array
    lam_min: float
    lam_max: float


@lru_cache(maxsize=8)
def spd_operator(name: str, unknowns: int) -> SPDOperator:
    """Return a matrix with about so many unknowns, at most.

    Parameters
    ----------
    name : {"poisson", "anisotropic", "elasticity", "l-shape", "image graph"}
        Five-point Laplacian and rotated anisotropic diffusion on a square and plane-strain
        elasticity, of pyamg's gallery; linear elements on a triangulated L-shape, by scikit-fem;
        and the graph of a photograph that scikit-learn ships, whose edges are as strong as
        neighboring pixels are alike, with a small shift.
    unknowns : int

    Raises
    ------
    ValueError
        If there is no such matrix.
    """
    if name not in _BUILDERS:
        raise ValueError(f"name must be one of {', '.join(_BUILDERS)}, got {name!r}")
    matrix = sp.csr_array(_BUILDERS[name](unknowns)).astype(np.float64)
    matrix.sort_indices()
    lowest = eigsh(matrix.tocsc(), 1, sigma=0.0, which="LM", tol=1e-6, rng=0)[0][0]
    highest = eigsh(matrix, 1, which="LA", tol=1e-3, rng=0)[0][0]
    return SPDOperator(name, matrix, float(lowest), float(highest))


def _poisson(unknowns: int) -> Any:
    side = int(unknowns**0.5)
    return _gallery().poisson((side, side), format="csr")


def _anisotropic(unknowns: int) -> Any:
    gallery = _gallery()
    side = int(unknowns**0.5)
    stencil = gallery.diffusion_stencil_2d(epsilon=0.01, theta=np.pi / 6, type="FE")
    return gallery.stencil_grid(stencil, (side, side), format="csr")


def _elasticity(unknowns: int) -> Any:
    side = int((unknowns / 2) ** 0.5)
    return _gallery().linear_elasticity((side, side))[0].tocsr()


def _gallery() -> Any:
    with requires("peers"):
        from pyamg import gallery
    return gallery


def _l_shape(unknowns: int) -> Any:
    with requires("peers"):
        import skfem
        from skfem.models.poisson import laplace
    mesh = skfem.MeshTri.init_lshaped()
    while 4 * mesh.p.shape[1] < 1.4 * unknowns:
        mesh = mesh.refined()
    basis = skfem.Basis(mesh, skfem.ElementTriP1())
    inside = np.setdiff1d(np.arange(basis.N), basis.get_dofs().flatten())
    return laplace.assemble(basis)[inside][:, inside]


def _image_graph(unknowns: int) -> Any:
    with requires("peers"):
        from sklearn.datasets import load_sample_image
        from sklearn.feature_extraction.image import img_to_graph
    gray = load_sample_image("china.jpg").mean(axis=2) / 255
    step = max(1, round((gray.size / unknowns) ** 0.5))
    gray = gray[::step, ::step]
    # Gradients along the edges, and the pixels themselves on the diagonal.
    differences = sp.coo_array(img_to_graph(gray))
    edges = differences.row != differences.col
    weights = np.exp(-((differences.data[edges] / 0.1) ** 2)) + 1e-2
    ends = (differences.row[edges], differences.col[edges])
    graph = sp.csr_array((weights, ends), shape=differences.shape)
    laplacian: Any = sp.csgraph.laplacian(graph)
    return laplacian + IMAGE_SHIFT * sp.eye_array(gray.size)


_BUILDERS: dict[str, Callable[[int], Any]] = {
    "poisson": _poisson,
    "anisotropic": _anisotropic,
    "elasticity": _elasticity,
    "l-shape": _l_shape,
    "image graph": _image_graph,
}


@dataclass(frozen=True, eq=False)
class Eigendecomposition:
    """A matrix of moderate size with all its eigenpairs.

    Attributes
    ----------
    matrix : csr_array or ndarray of shape (n, n)
    values : ndarray of shape (n,)
        Ascending.
    vectors : ndarray of shape (n, n)
    """

    matrix: Any
    values: Values
    vectors: Values


@lru_cache(maxsize=4)
def decomposed_operator(name: str) -> Eigendecomposition:
    """Return a real matrix of about 600 unknowns, decomposed.

    Parameters
    ----------
    name : {"digits graph", "digits kernel", "poisson", "elasticity"}
        Normalized Laplacian of the 8-nearest-neighbor graph of every third of scikit-learn's
        digits, with a shift of 1e-3; their Gaussian kernel matrix, with a ridge of 1e-2; and two
        matrices of `spd_operator`.
    """
    matrix: Any = _DECOMPOSED[name]()
    dense = matrix if isinstance(matrix, np.ndarray) else matrix.toarray()
    values, vectors = np.linalg.eigh(dense)
    return Eigendecomposition(matrix, values, vectors)


def digits_laplacian(neighbors: int = 8, *, every: int = 1) -> sp.csr_array:
    """Return the normalized Laplacian of the digits' nearest-neighbor graph, which is singular.

    Its kernel is spanned by the square roots of the degrees, for each connected component.
    """
    with requires("peers"):
        from sklearn.datasets import load_digits
        from sklearn.neighbors import kneighbors_graph
    graph = sp.csr_array(kneighbors_graph(load_digits().data[::every], neighbors))
    laplacian: Any = sp.csgraph.laplacian(graph.maximum(graph.T), normed=True)
    return sp.csr_array(laplacian)


def _digits_graph() -> Any:
    laplacian = digits_laplacian(every=3)
    return sp.csr_array(laplacian + 1e-3 * sp.eye_array(laplacian.shape[0]))


def _digits_kernel() -> Any:
    with requires("peers"):
        from sklearn.datasets import load_digits
        from sklearn.metrics.pairwise import rbf_kernel
    data = load_digits().data[::3]
    return rbf_kernel(data, gamma=1 / (2 * data.var() * data.shape[1])) + 1e-2 * np.eye(len(data))


_DECOMPOSED: dict[str, Callable[[], Any]] = {
    "digits graph": _digits_graph,
    "digits kernel": _digits_kernel,
    "poisson": lambda: spd_operator("poisson", 600).matrix,
    "elasticity": lambda: spd_operator("elasticity", 600).matrix,
}
