"""Ising problems: what users pass, checked, and laid out for fast sparse products."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components, reverse_cuthill_mckee

from thalweg.common.checks import check_array, check_finite
from thalweg.common.optional import requires

with requires("combinatorial"):
    import torch

# A dense matrix of more rows is refused: 3 GB that nobody passes on purpose.
DENSE_LIMIT = 20_000
# Two entries J_ij, J_ji that differ by less than this, relative to the largest entry, are rounding.
_SYMMETRY_TOLERANCE = 1e-8


@dataclass(frozen=True)
class IsingProblem:
    """Maximize ½ sᵀJs + hᵀs over s in {-1, +1}^n, reordered for locality.

    A field h becomes one more vertex, the ghost spin, coupled to i by h_i. Vertices are ordered by
    connected component, largest first, and inside a component by reverse Cuthill-McKee, so that a
    product J X reads X nearly in order.

    Attributes
    ----------
    n : int
        Spins of the caller's problem.
    order : ndarray of int, shape (N,)
        The vertex at each position; the ghost spin is vertex n. N is n, or n + 1 with a field.
    couplings : csr_array, shape (N, N)
        J in this order, float32 or float64, int32 indices.
    degree : ndarray of shape (N,)
        Sum of |J_ij| over j, float64.
    bounds : ndarray of int, shape (C + 1,)
        Component c is the positions bounds[c] to bounds[c + 1].
    """

    n: int
    order: NDArray[np.intp]
    couplings: Any
    degree: NDArray[np.float64]
    bounds: NDArray[np.intp]

    @property
    def size(self) -> int:
        """Number of positions N."""
        return len(self.order)

    @property
    def has_ghost(self) -> bool:
        """Whether the problem has a field."""
        return self.size > self.n

    @cached_property
    def exact(self) -> bool:
        """Whether local fields are exact: integer couplings whose sums a float holds."""
        data = self.couplings.data
        limit = 2.0 ** (np.finfo(data.dtype).nmant + 1)
        return bool(np.all(data == np.rint(data)) and self.degree.max(initial=0.0) < limit)

    def tensor(self, device: torch.device) -> torch.Tensor:
        """Return the couplings as a torch CSR tensor; on the CPU it shares their memory."""
        return csr_tensor(self.couplings, device)

    def to_caller(self, spins: NDArray[np.int8]) -> NDArray[np.int8]:
        """Return spins (N, R) in the caller's order (n, R), the ghost spin turned to +1."""
        out = np.empty_like(spins)
        out[self.order] = spins
        return out[: self.n] * out[self.n] if self.has_ghost else out

    def from_caller(self, spins: NDArray[np.int8]) -> NDArray[np.int8]:
        """Return the caller's spins (n, R) in this order (N, R)."""
        ghost = np.ones((self.size - self.n, spins.shape[1]), dtype=np.int8)
        return np.concatenate((spins, ghost))[self.order]


def csr_tensor(matrix: Any, device: torch.device) -> torch.Tensor:
    """Return a SciPy CSR matrix as a torch CSR tensor on ``device``."""
    with warnings.catch_warnings():
        # torch tells everybody who makes a CSR tensor that the format is in beta.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr),
            torch.from_numpy(matrix.indices),
            torch.from_numpy(matrix.data),
            size=matrix.shape,
            device=device,
            check_invariants=False,
        )


def prepare(
    couplings: Any,
    field: NDArray[np.float64] | None,
    dtype: Any = np.float32,
    *,
    reorder: bool = True,
) -> IsingProblem:
    """Lay out checked couplings (see `as_couplings`) and field; O(nnz log(max degree))."""
    n = couplings.shape[0]
    if field is not None and field.any():
        column = sparse.coo_array(field[:, None])
        couplings = sparse.block_array([[couplings, column], [column.T, None]], format="csr")
    matrix = _with_int32_indices(couplings.astype(dtype))
    count, labels = connected_components(matrix, directed=False)
    if reorder:
        order = reverse_cuthill_mckee(matrix, symmetric_mode=True).astype(np.intp)
        sizes = np.bincount(labels, minlength=count)
        labels = labels[order]
        order = order[np.lexsort((labels, -sizes[labels]))]
        matrix = matrix[order][:, order]
        bounds = np.concatenate(([0], np.cumsum(np.sort(sizes)[::-1])))
    else:
        order, bounds = np.arange(matrix.shape[0]), np.array([0, matrix.shape[0]])
    matrix = sparse.csr_array(matrix)
    matrix.sort_indices()
    degree = np.asarray(abs(matrix).sum(axis=1, dtype=np.float64)).ravel()
    return IsingProblem(n, order, matrix, degree, bounds.astype(np.intp))


def as_couplings(name: str, value: Any) -> Any:
    """Return what a user passed as a symmetric float64 CSR array with an empty diagonal.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    value : scipy.sparse matrix, networkx.Graph or array_like
        A graph's edges carry ``weight`` (default 1).

    Raises
    ------
    TypeError
        If ``value`` is none of these, or complex.
    ValueError
        If it is empty, not square, not finite, not symmetric, or a directed graph.
    MemoryError
        If it is dense with more than 20 000 rows.
    """
    matrix = _as_csr(name, value)
    rows, columns = matrix.shape
    if rows != columns or rows == 0:
        raise ValueError(
            f"{name} must be a square matrix of at least one row, got {rows} by {columns}"
        )
    check_finite(f"{name}.data", matrix.data)
    if not matrix.has_canonical_format:
        matrix = matrix.copy()
        matrix.sum_duplicates()
    matrix = _symmetric(name, matrix)
    diagonal = matrix.diagonal()
    if diagonal.any():
        warnings.warn(
            f"{name} has a diagonal: it adds the constant {diagonal.sum() / 2:g} to every state's "
            "value and is removed",
            stacklevel=3,
        )
        matrix = sparse.csr_array(matrix - sparse.diags_array(diagonal))
    if not matrix.data.all():
        matrix = matrix.copy()
        matrix.eliminate_zeros()
    return matrix


def as_field(name: str, value: ArrayLike | None, n: int) -> NDArray[np.float64] | None:
    """Return a linear field of shape (n,), or None."""
    return None if value is None else check_array(name, value, shape=(n,))


def quadratic_value(
    couplings: Any, field: NDArray[np.float64] | None, spins: NDArray[Any]
) -> float:
    """Return ½ sᵀJs + hᵀs in float64."""
    s = spins.astype(np.float64)
    value = 0.5 * float(s @ (couplings @ s))
    return value if field is None else value + float(field @ s)


def _as_csr(name: str, value: Any) -> Any:
    matrix: Any
    if sparse.issparse(value):
        matrix = sparse.csr_array(value)  # type: ignore[call-overload]
    elif hasattr(value, "adj") and hasattr(value, "is_directed"):
        with requires("combinatorial"):
            import networkx as nx
        if value.is_directed():
            raise ValueError(f"{name} must be an undirected graph, got {value}")
        if value.number_of_nodes() == 0:
            raise ValueError(f"{name} must have at least one vertex")
        matrix = nx.to_scipy_sparse_array(value, dtype=np.float64, format="csr")
    else:
        dense = np.asarray(value)
        if dense.ndim != 2 or dense.dtype == object:
            raise TypeError(
                f"{name} must be a SciPy sparse matrix, a networkx.Graph or a square array, "
                f"got {type(value).__name__}"
            )
        if len(dense) > DENSE_LIMIT:
            raise MemoryError(
                f"{name} is dense with {len(dense)} rows, more than {DENSE_LIMIT}: "
                "pass a SciPy sparse matrix"
            )
        matrix = sparse.csr_array(dense)
    if np.iscomplexobj(matrix.data):
        raise TypeError(f"{name} must be real, got {matrix.dtype}")
    return matrix.astype(np.float64, copy=False)


def _symmetric(name: str, matrix: Any) -> Any:
    transposed = matrix.T.tocsr()
    difference = abs(matrix - transposed)
    if difference.nnz == 0:
        return matrix
    deviation, largest = difference.max(), abs(matrix).max()
    if deviation > _SYMMETRY_TOLERANCE * largest:
        worst = int(np.argmax(difference.data))
        i = int(np.searchsorted(difference.indptr, worst, side="right")) - 1
        raise ValueError(
            f"{name} must be symmetric, but |{name} - {name}.T| reaches {deviation:g} "
            f"at ({i}, {int(difference.indices[worst])})"
        )
    return sparse.csr_array((matrix + transposed) / 2)


def _with_int32_indices(matrix: Any) -> Any:
    if matrix.nnz >= 2**31:
        raise ValueError(f"J must have fewer than 2**31 entries, got {matrix.nnz}")
    return sparse.csr_array(
        (
            matrix.data,
            matrix.indices.astype(np.int32, copy=False),
            matrix.indptr.astype(np.int32, copy=False),
        ),
        shape=matrix.shape,
    )
