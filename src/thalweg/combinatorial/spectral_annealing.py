"""Spectral Annealing for Ising, Max-Cut, QUBO and correlation clustering."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from thalweg.combinatorial.annealing_run import Allocation, Callback, Run, Search
from thalweg.combinatorial.ising_problem import as_couplings, as_field
from thalweg.combinatorial.ising_result import ClusteringResult, IsingResult, QUBOResult
from thalweg.combinatorial.normalization_path import (
    Eigensolver,
    Path,
    Predictor,
    check_dtype,
    check_path_settings,
)
from thalweg.common.checks import check_choice, check_finite, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.progress import progress as progress_bar
from thalweg.common.random import RNGLike, as_generator

with requires("combinatorial"):
    import torch

_DEFAULT_EIGENVECTORS = 4


def specann(
    J: Any,
    h: ArrayLike | None = None,
    *,
    sense: Literal["maximize", "minimize"] = "maximize",
    taus: int | ArrayLike = 9,
    n_eig: int | None = None,
    n_candidates: int = 16,
    allocation: Allocation = "two_stage",
    path: Path = "power",
    predictor: Predictor = "auto",
    eigensolver: Eigensolver = "lobpcg",
    local_search: Search | None = "greedy",
    ls_sweeps: int = 200,
    ls_temperature: float | None = None,
    crossover: bool = True,
    tol: float = 1e-4,
    max_iter: int = 12,
    start_iter: int = 40,
    bound: Literal["auto", "trivial"] = "auto",
    time_limit: float | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    rng: RNGLike = None,
    callback: Callback | None = None,
    progress: bool | None = None,
) -> IsingResult:
    """Maximize ½ sᵀJs + hᵀs over s in {-1, +1}^n by Spectral Annealing.

    At each tau of the path M(tau) = D^{-tau/2} J D^{-tau/2} (see `spectral_path`) the top
    eigenvectors V are found from a warm start, rounded to ``sign(V g)`` for several g, and the
    rounded states are improved by local search, all columns at once.

    Parameters
    ----------
    J : scipy.sparse matrix, networkx.Graph or array_like, shape (n, n)
        Symmetric couplings; a graph's edges carry ``weight`` (default 1). Energy is
        -½ sᵀJs - hᵀs. For Max-Cut use `specann_maxcut`, which takes edge weights.
    h : array_like of shape (n,), optional
        Linear field; solved with one more "ghost" spin coupled to i by h_i.
    sense : {"maximize", "minimize"}
        "minimize" solves the problem with -J and -h; the result's energy is then ½ sᵀJs + hᵀs.
    taus : int or array_like, default 9
        A number of equidistant points on [0, 1], or ascending points. One point is the ordinary
        one-shot spectral method.
    n_eig : int, optional
        Eigenvectors per tau; by default 4, or n - 1 on smaller problems.
    n_candidates : int, default 16
        Candidates per tau, and columns of a batch. ``len(taus) * n_candidates`` in all.
    allocation : {"two_stage", "uniform"}
        "two_stage" spreads half of the candidates evenly over the path and spends the other half
        at the tau with the best refined energy.
    path : {"power", "linear"}
    predictor : {"auto", "diagonal", "warm", "none"}
    eigensolver : {"lobpcg", "lanczos", "cheb"}
    local_search : {"greedy", "tabu", "anneal"} or None, default "greedy"
        "anneal" and "tabu" are greedy along the path, and end with that search on the best
        ``n_candidates`` states.
    ls_sweeps : int, default 200
        The most sweeps of a local search; exactly as many for a final anneal.
    ls_temperature : float, optional
        Where a final anneal starts; by default 0.3 of the mean of ``Σ_j |J_ij|``.
    crossover : bool, default True
        Whether to improve the majority vote of the five best states too.
    tol, max_iter, start_iter : float, int, int
        Residual and iterations at which an eigensolve stops; ``start_iter`` is for the first.
    bound : {"auto", "trivial"}
        "auto" looks for the best certified or probabilistic upper bound after the search;
        "trivial" keeps to ``½ Σ |J_ij| + Σ |h_i|``, at no cost.
    time_limit : float, optional
        Seconds after which the search stops (before the bound) with the best state so far.
    device : str or torch.device, optional
        Where eigensolves and sweeps run; the CPU by default.
    dtype : torch.float32 or torch.float64, default float32
    rng : int, numpy.random.Generator or None
        The same seed gives the same result on the same device.
    callback : callable, optional
        Called with a `PathRecord` after each step; it may raise `StopIteration` to stop.
    progress : bool, optional
        Whether to show a progress bar; by default only on a terminal.

    Returns
    -------
    IsingResult
        Ctrl-C, a time limit and a callback's `StopIteration` return the best state so far, with
        ``success`` False and a ``status`` that says why.

    Raises
    ------
    ValueError, TypeError
        If an argument is malformed: J not symmetric (the message gives the largest deviation) or
        not finite, taus not ascending in [0, 1], n_eig not below n, ...
    MemoryError
        If J is dense with more than 20 000 rows.

    Warns
    -----
    UserWarning
        If J has a diagonal (a constant, removed), or no negative entry and no field: then all
        spins equal is optimal, and edge weights were probably meant for `specann_maxcut`.

    Notes
    -----
    Cost per tau: ``max_iter`` products of J with ``n_eig`` columns, O(n_eig nnz + n_eig² n) each,
    and some 5 to 20 sweeps of O(n_candidates nnz). Memory about 24 n_eig + n_candidates bytes a
    spin beside J.

    Connected components have separate eigenvectors, and the best state is put together from the
    best of each. States are given with the first spin of each component +1 (in the internal
    order), isolated vertices included.

    The sweep over the path, the diagonal predictor with warm starts and the batched local search
    are the paper's. The family between the two ends, the form of the predictor and its safeguard,
    the candidates, the two-stage allocation, the crossover and the bounds are our resolution.

    References
    ----------
    "Spectral Annealing for Ising", NeurIPS 2026.
    L. Trevisan, "Max cut and the smallest eigenvalue", SIAM J. Comput. 41, 2012 (one shot).

    Examples
    --------
    A spin glass on a 10 x 10 torus:

    >>> import networkx as nx
    >>> graph = nx.grid_2d_graph(10, 10, periodic=True)
    >>> signs = np.random.default_rng(0).choice([-1, 1], size=graph.number_of_edges())
    >>> for edge, sign in zip(graph.edges, signs):
    ...     graph.edges[edge]["weight"] = sign
    >>> result = specann(graph, rng=0)
    >>> result.energy
    -142.0
    """
    couplings = as_couplings("J", J)
    field = as_field("h", h, couplings.shape[0])
    check_choice("sense", sense, ("maximize", "minimize"))
    if sense == "minimize":
        couplings, field = -couplings, None if field is None else -field
    unfrustrated = couplings.nnz > 0 and couplings.data.min() > 0
    if unfrustrated and (field is None or not field.any()):
        warnings.warn(
            "every coupling favours equal spins, so all spins equal is optimal; "
            "for the maximum cut of a graph use specann_maxcut",
            stacklevel=2,
        )
    n = couplings.shape[0]
    settings = check_path_settings(
        n,
        taus,
        n_eig if n_eig is not None else max(1, min(_DEFAULT_EIGENVECTORS, n - 1)),
        path,
        predictor,
        eigensolver,
        tol,
        max_iter,
        start_iter,
        k_name="n_eig",
    )
    run = Run(
        couplings,
        field,
        settings,
        n_candidates=check_integer("n_candidates", n_candidates, at_least=1),
        allocation=check_choice("allocation", allocation, get_args(Allocation)),
        method=check_choice("local_search", local_search, (*get_args(Search), None)),
        sweeps=check_integer("ls_sweeps", ls_sweeps, at_least=1),
        temperature=None
        if ls_temperature is None
        else check_number("ls_temperature", ls_temperature, above=0),
        crossover=crossover,
        time_limit=None
        if time_limit is None
        else check_number("time_limit", time_limit, at_least=0, allow_infinite=True),
        device=torch.device(device or "cpu"),
        dtype=check_dtype(dtype),
        rng=as_generator(rng),
        callback=callback,
    )
    check_choice("bound", bound, ("auto", "trivial"))
    with progress_bar("specann", total=len(settings.taus) + 2, show=progress) as advance:
        status = run.search(advance)
    return run.result(status, bound)


def specann_maxcut(W: Any, **options: Any) -> IsingResult:
    """Find a large cut of a weighted graph by Spectral Annealing with J = -W.

    Parameters
    ----------
    W : scipy.sparse matrix, networkx.Graph or array_like, shape (n, n)
        Symmetric edge weights of any sign, with an empty diagonal.
    **options
        As in `specann`, except ``h`` and ``sense``.

    Returns
    -------
    IsingResult
        With ``cut_value``, and ``cut_bound`` above it. The cut separates the spins +1 and -1.

    Warns
    -----
    UserWarning
        If no weight is positive: then cutting nothing is optimal.

    Notes
    -----
    Everything said of `specann` applies; that is where References and costs stand.

    Examples
    --------
    The Petersen graph's maximum cut has 12 of its 15 edges.

    >>> import networkx as nx
    >>> print(specann_maxcut(nx.petersen_graph(), rng=0).cut_value)
    12.0
    """
    weights = as_couplings("W", W)
    if weights.nnz > 0 and weights.data.max() < 0:
        warnings.warn(
            "no weight is positive, so cutting nothing is optimal; "
            "for couplings of an Ising problem use specann",
            stacklevel=2,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="every coupling favours equal spins")
        result = specann(-weights, **options)
    return replace(
        result,
        cut_value=cut_value(weights, result.spins),
        cut_offset=0.25 * float(weights.data.sum()),
    )


def specann_qubo(Q: Any, **options: Any) -> QUBOResult:
    """Minimize xᵀQx over x in {0, 1}^n by Spectral Annealing with s = 2x - 1.

    Parameters
    ----------
    Q : scipy.sparse matrix or array_like, shape (n, n)
        Symmetric or triangular: only Q + Qᵀ and the diagonal (the linear terms) matter.
    **options
        As in `specann`, except ``h`` and ``sense``.

    Returns
    -------
    QUBOResult

    Examples
    --------
    The largest independent set of a path of three vertices is its two ends.

    >>> Q = np.array([[-1.0, 2.0, 0.0], [0.0, -1.0, 2.0], [0.0, 0.0, -1.0]])
    >>> result = specann_qubo(Q, rng=0)
    >>> result.x, result.value
    (array([1, 0, 1], dtype=int8), -2.0)
    """
    matrix: Any = sparse.csr_array(Q, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"Q must be a square matrix, got shape {matrix.shape}")
    check_finite("Q.data", matrix.data)
    linear = matrix.diagonal()
    off: Any = sparse.csr_array((matrix + matrix.T) / 2 - sparse.diags_array(linear))
    off.eliminate_zeros()
    # With x = (1 + s)/2:  xᵀQx = ¼ sᵀQs + ½ sᵀ(off 1 + diag) + constant.
    field = -(np.asarray(off.sum(axis=1)).ravel() + linear) / 2
    constant = float(off.sum()) / 4 + float(linear.sum()) / 2
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="every coupling favours equal spins")
        ising = specann(off * -0.5, field, **options)
    x = ((ising.spins + 1) // 2).astype(np.int8)
    value = float(x.astype(np.float64) @ (matrix @ x.astype(np.float64)))
    return QUBOResult(x, value, constant - ising.upper_bound, ising)


def specann_correlation_clustering(
    signed: Any, *, max_clusters: int = 2, rng: RNGLike = None, **options: Any
) -> ClusteringResult:
    """Cluster a signed graph with few disagreements by Spectral Annealing.

    Two clusters are one Ising problem with J the signed weights. More come from splitting
    clusters again, the most profitable split first, while a split lowers the disagreements.

    Parameters
    ----------
    signed : scipy.sparse matrix, networkx.Graph or array_like, shape (n, n)
        Positive weights ask for the same cluster, negative ones for different clusters.
    max_clusters : int, default 2
    rng : int, numpy.random.Generator or None
    **options
        As in `specann`, except ``h`` and ``sense``.

    Returns
    -------
    ClusteringResult

    Examples
    --------
    Two friendly triangles, hostile to each other:

    >>> block = np.ones((3, 3)) - np.eye(3)
    >>> signed = np.block([[block, -np.ones((3, 3))], [-np.ones((3, 3)), block]])
    >>> result = specann_correlation_clustering(signed, rng=0)
    >>> result.labels, result.disagreements
    (array([0, 0, 0, 1, 1, 1]), 0.0)
    """
    weights = as_couplings("signed", signed)
    check_integer("max_clusters", max_clusters, at_least=1)
    stream = as_generator(rng)
    labels = np.zeros(weights.shape[0], dtype=np.int64)
    splits: list[IsingResult] = []
    offers = {0: _best_split(weights, labels, 0, stream, options)}
    while len(offers) < max_clusters:
        gain, members, result = offers[best := max(offers, key=lambda c: offers[c][0])]
        if gain <= 0 or result is None:
            break
        fresh = len(offers)
        labels[members[result.spins != result.spins[0]]] = fresh
        splits.append(result)
        if fresh + 1 < max_clusters:
            for cluster in (best, fresh):
                offers[cluster] = _best_split(weights, labels, cluster, stream, options)
        else:
            offers[fresh] = (0.0, members, None)
    return ClusteringResult(labels, _disagreements(weights, labels), splits)


def cut_value(weights: Any, spins: NDArray[Any]) -> float:
    """Return the total weight of the edges between spins of different sign, in float64.

    Examples
    --------
    >>> cut_value(sparse.csr_array([[0.0, 3.0], [3.0, 0.0]]), np.array([1, -1]))
    3.0
    """
    s = spins.astype(np.float64)
    return 0.25 * (float(weights.data.sum()) - float(s @ (weights @ s)))


def _best_split(
    weights: Any,
    labels: NDArray[np.int64],
    cluster: int,
    rng: np.random.Generator,
    options: dict[str, Any],
) -> tuple[float, NDArray[np.intp], IsingResult | None]:
    """Return what splitting a cluster in two gains, its members, and the bisection."""
    members = np.flatnonzero(labels == cluster)
    inside = weights[members][:, members]
    if len(members) < 2 or inside.nnz == 0 or inside.data.min() > 0:
        return 0.0, members, None
    result = specann(inside, rng=rng, **options)
    return -cut_value(inside, result.spins), members, result


def _disagreements(weights: Any, labels: NDArray[np.int64]) -> float:
    edges = sparse.triu(weights, k=1).tocoo()
    together = labels[edges.row] == labels[edges.col]
    wrong = np.where(together, edges.data < 0, edges.data > 0)
    return float(np.abs(edges.data[wrong]).sum())
