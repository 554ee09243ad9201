"""Networks of agents that average with their neighbors: mixing matrices, checks and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from thalweg.common.checks import check_array, check_choice
from thalweg.common.optional import requires

if TYPE_CHECKING:
    import networkx

Array = NDArray[np.float64]
Kind = Literal["metropolis", "lazy", "max_degree"]
Mix = Callable[[Any], Any]

TOLERANCE = 1e-8  # of symmetry and of row sums
SPARSE_FROM = 65  # agents: below, a dense product takes less time than a sparse one's overhead


def mixing_matrix(graph: networkx.Graph, kind: Kind = "metropolis") -> Array:
    r"""Return a symmetric, doubly stochastic matrix that is zero where the graph has no edge.

    .. math:: W_{ij} = \frac{1}{1 + \max(d_i, d_j)}, \qquad W_{ii} = 1 - \sum_{j \ne i} W_{ij}

    Products with it move the agents' vectors towards their mean, by the factor
    :math:`\max(|\lambda_2|, |\lambda_n|) < 1` of its eigenvalues.

    Parameters
    ----------
    graph : networkx.Graph
        Connected and undirected, with n nodes, which are numbered in the order of
        ``graph.nodes``. Loops and weights of edges are ignored.
    kind : {"metropolis", "lazy", "max_degree"}, default "metropolis"
        Weights 1/(1 + max(dᵢ, dⱼ)), for which an agent needs to know its neighbors' degrees; these
        averaged with the identity, which makes all eigenvalues positive; or 1/(1 + max d) on every
        edge.

    Returns
    -------
    ndarray of shape (n, n)

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    References
    ----------
    L. Xiao and S. Boyd, "Fast linear iterations for distributed averaging", Systems & Control
    Letters 2004.

    Examples
    --------
    >>> import networkx
    >>> from thalweg.bilevel import mixing_matrix
    >>> mixing_matrix(networkx.path_graph(3)).round(2)
    array([[0.67, 0.33, 0.  ],
           [0.33, 0.33, 0.33],
           [0.  , 0.33, 0.67]])
    """
    with requires("bilevel"):
        import networkx

    check_choice("kind", kind, ("metropolis", "lazy", "max_degree"))
    if not isinstance(graph, networkx.Graph) or graph.is_directed():
        raise TypeError(f"graph must be an undirected networkx.Graph, got {type(graph).__name__}")
    if len(graph) == 0 or not networkx.is_connected(graph):
        raise ValueError(f"graph must be connected, got one of {len(graph)} nodes that is not")
    adjacent = np.asarray(networkx.to_numpy_array(graph, weight=None) > 0, dtype=np.float64)
    np.fill_diagonal(adjacent, 0.0)
    degrees = adjacent.sum(axis=1)
    larger = np.maximum.outer(degrees, degrees)
    W: Array = adjacent / (1 + (degrees.max() if kind == "max_degree" else larger))
    np.fill_diagonal(W, 1 - W.sum(axis=1))
    return (W + np.eye(len(W))) / 2 if kind == "lazy" else W


def check_mixing(W: Any) -> Any:
    """Return a mixing matrix: an array, or a sparse one where it was given as such.

    Raises
    ------
    TypeError, ValueError
        If it is not square, finite, symmetric and doubly stochastic (to 1e-8), or if its powers do
        not tend to the average, for a disconnected network or a periodic walk.
    """
    dense = W.toarray() if hasattr(W, "toarray") else W
    matrix = check_array("W", dense, shape=("n", "n"))
    if matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"W must be square, got shape {matrix.shape}")
    if np.abs(matrix - matrix.T).max() > TOLERANCE:
        raise ValueError("W must be symmetric, got one that is not")
    if matrix.min() < -TOLERANCE or np.abs(matrix.sum(axis=1) - 1).max() > TOLERANCE:
        raise ValueError(
            "W must be doubly stochastic: nonnegative, with rows that sum to 1; got entries from "
            f"{matrix.min():g} and rows that sum from {matrix.sum(axis=1).min():g} to "
            f"{matrix.sum(axis=1).max():g}"
        )
    if sparse.csgraph.connected_components(matrix > TOLERANCE, directed=False)[0] > 1:
        raise ValueError("W must have a spectral gap, got 0: the network is disconnected")
    # A connected network with one agent that keeps a share of its own vector is aperiodic, which
    # spares the eigenvalues.
    periodic = matrix.trace() <= TOLERANCE and np.linalg.eigvalsh(matrix)[0] < TOLERANCE - 1
    if periodic:
        raise ValueError(
            "W must have a spectral gap, got 0: it has the eigenvalue -1; give agents a share of "
            "their own vector, as mixing_matrix(kind='lazy') does"
        )
    return W if hasattr(W, "toarray") else matrix


def n_links(W: Any) -> int:
    """Return the number of ordered pairs of neighbors, each of which costs a message."""
    pattern = sparse.csr_array(W)
    return int(pattern.nnz - np.count_nonzero(pattern.diagonal()))


def mixer(W: Any, like: Any) -> Mix:
    """Return the product with W, for matrices with a row for each agent.

    ``like`` is an array or a tensor: the products have its kind, dtype and device. W becomes sparse
    for more than 64 agents of which most are no neighbors.
    """
    n = W.shape[0]
    pattern = sparse.csr_array(W)
    thin = n >= SPARSE_FROM and pattern.nnz < n * n / 4
    if isinstance(like, np.ndarray):
        matrix = pattern if thin else pattern.toarray()
        return lambda rows: matrix @ rows
    import torch

    tensor = torch.as_tensor(pattern.toarray()).to(like)
    if not thin:
        return lambda rows: tensor @ rows
    places = torch.as_tensor(np.array(pattern.nonzero()), device=tensor.device)
    compressed = torch.sparse_coo_tensor(
        places, tensor[tuple(places)], (n, n), check_invariants=False
    ).coalesce()
    return lambda rows: torch.sparse.mm(compressed, rows)
