"""Upper bounds on the value of an Ising problem: trivial, certified and probabilistic.

For any diagonal u with diag(u) - J positive semidefinite and any spins,

    ½ sᵀJs <= ½ Σ_i u_i,

and the normalization path offers u_i = lambda_max(M(tau)) d_i^tau. A Ritz value is not
lambda_max: it only says that some eigenvalue is near. So the bound is certified by a factorization
that shows positive definiteness, or holds with a stated probability over a random start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse.csgraph import reverse_cuthill_mckee
from scipy.sparse.linalg import splu

from thalweg.combinatorial.ising_problem import as_couplings, as_field
from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.random import RNGLike, as_generator

BoundKind = Literal["trivial", "certified", "probabilistic"]

# A factorization is tried when the envelope of the reordered matrix promises at most this many
# operations and entries: seconds and half a gigabyte; minimum degree does better than that.
_OPERATIONS_LIMIT = 2e10
_ENVELOPE_LIMIT = 7e7
_DENSE_SIZE = 1_500
# The factorization must succeed with this relative margin to spare, far above its own rounding.
_MARGIN = 1e-9
_GROWTH = 1.02
_ATTEMPTS = 8


class UpperBound(NamedTuple):
    """An upper bound on ½ sᵀJs + hᵀs.

    Attributes
    ----------
    value : float
    kind : {"trivial", "certified", "probabilistic"}
        A probabilistic bound holds except with the failure probability that was asked for.
    """

    value: float
    kind: BoundKind


def trivial_bound(J: Any, h: ArrayLike | None = None) -> UpperBound:
    """Return ``½ Σ_ij |J_ij| + Σ_i |h_i|``: every coupling and every field satisfied.

    Examples
    --------
    >>> trivial_bound(np.array([[0.0, 2.0], [2.0, 0.0]]), [1.0, 0.0])
    UpperBound(value=3.0, kind='trivial')
    """
    couplings = as_couplings("J", J)
    field = as_field("h", h, couplings.shape[0])
    linear = 0.0 if field is None else float(np.abs(field).sum())
    return UpperBound(0.5 * float(np.abs(couplings.data).sum()) + linear, "trivial")


def certify(J: Any, u: ArrayLike) -> bool:
    """Return whether diag(u) - J is positive definite, shown by a factorization without pivoting.

    Then ½ Σ u_i bounds ½ sᵀJs. False also when the factors would be too large to try.

    Parameters
    ----------
    J : scipy.sparse matrix, networkx.Graph or array_like, shape (n, n)
    u : array_like of shape (n,)

    Notes
    -----
    Dense Cholesky up to 1500 rows, SuperLU with symmetric minimum-degree ordering above, in
    float64. The test is run on u (1 - 1e-9), so that rounding cannot certify what is not so.

    Examples
    --------
    The largest eigenvalue of a triangle is 2.

    >>> triangle = np.ones((3, 3)) - np.eye(3)
    >>> certify(triangle, [2.001] * 3), certify(triangle, [1.999] * 3)
    (True, False)
    """
    couplings = as_couplings("J", J)
    diagonal = check_array("u", u, shape=(couplings.shape[0],))
    return _is_positive_definite(
        sparse.csr_array(sparse.diags_array(diagonal * (1 - _MARGIN)) - couplings)
    )


def certified_bound(
    J: Any, tau: float, theta: float, h: ArrayLike | None = None
) -> UpperBound | None:
    """Return ½ μ Σ d_i^tau with the least certified μ >= ``theta`` that a short search finds.

    Parameters
    ----------
    J, h
        As in `thalweg.combinatorial.specann`.
    tau : float in [0, 1]
        The point of the normalization path.
    theta : float
        An estimate of lambda_max(M(tau)), for instance a Ritz value; too low an estimate costs
        further factorizations, not correctness.

    Returns
    -------
    UpperBound or None
        None when the factors would be too large, or nothing below the trivial bound is certified.
    """
    check_number("tau", tau, at_least=0, at_most=1)
    check_number("theta", theta)
    couplings = with_ghost(as_couplings("J", J), h)
    if not _fits(couplings):
        return None
    weight = scaled_degrees(couplings) ** tau
    trivial = trivial_bound(couplings).value
    # mu theta, mu² theta, ...: a missed eigenvalue is met after a few doublings of the excess.
    excess = _GROWTH - 1
    for _ in range(_ATTEMPTS):
        mu = theta + excess * abs(theta)
        if 0.5 * mu * weight.sum() >= trivial:
            return None
        if certify(couplings, mu * weight):
            return UpperBound(0.5 * mu * float(weight.sum()), "certified")
        excess *= 2
    return None


def probabilistic_bound(
    J: Any,
    tau: float,
    h: ArrayLike | None = None,
    *,
    steps: int = 100,
    failure: float = 1e-6,
    rng: RNGLike = None,
) -> UpperBound:
    """Return a bound from Lanczos steps that holds with probability 1 - ``failure``.

    With c = max_i Σ_j |M_ij|, the matrix M + c I is positive semidefinite, and from a start that is
    uniform on the sphere

        lambda_max + c <= (theta_q + c) / (1 - eps)

    except with probability 1.648 √n exp(-√eps (2q - 1)).

    Parameters
    ----------
    J, h
        As in `thalweg.combinatorial.specann`.
    tau : float in [0, 1]
    steps : int, default 100
        Lanczos steps q; one product of J with a vector each.
    failure : float in (0, 1), default 1e-6
    rng : int, numpy.random.Generator or None

    References
    ----------
    J. Kuczyński, H. Woźniakowski, "Estimating the largest eigenvalue by the power and Lanczos
    algorithms with a random start", SIAM J. Matrix Anal. Appl. 13, 1992.

    Examples
    --------
    >>> import networkx as nx
    >>> J = nx.to_scipy_sparse_array(nx.cycle_graph(100), dtype=float)
    >>> bound = probabilistic_bound(J, 0.0, rng=0)
    >>> 100 <= bound.value < 104
    True
    """
    check_number("tau", tau, at_least=0, at_most=1)
    check_integer("steps", steps, at_least=1)
    check_number("failure", failure, above=0, below=1)
    couplings = with_ghost(as_couplings("J", J), h)
    n = couplings.shape[0]
    degrees = scaled_degrees(couplings)
    scale = degrees ** (-tau / 2)
    start = as_generator(rng).standard_normal(n)
    shift = float((scale * (abs(couplings) @ scale)).max())
    theta = _lanczos(couplings, scale, start, steps, breakdown=1e-14 * shift)
    root = math.log(1.648 * math.sqrt(n) / failure) / (2 * steps - 1)
    if root >= 1:  # too few steps to say anything
        return trivial_bound(couplings)
    top = (theta + shift) / (1 - root**2) - shift
    return UpperBound(0.5 * top * float((degrees**tau).sum()), "probabilistic")


def best_bound(
    J: Any,
    estimates: Sequence[tuple[float, float]],
    h: ArrayLike | None = None,
    *,
    rng: RNGLike = None,
) -> UpperBound:
    """Return the least of the trivial, the certified and the probabilistic bound.

    Parameters
    ----------
    J, h
        As in `thalweg.combinatorial.specann`.
    estimates : sequence of (tau, theta)
        Points of the power path with estimates of lambda_max(M(tau)). The two that promise most
        are certified; the probabilistic bound is computed at the first when none is.
    rng : int, numpy.random.Generator or None
    """
    couplings = with_ghost(as_couplings("J", J), h)
    bounds = [trivial_bound(couplings)]
    degrees = scaled_degrees(couplings)
    promising = sorted(estimates, key=lambda point: point[1] * float((degrees ** point[0]).sum()))
    certified = [certified_bound(couplings, tau, theta) for tau, theta in promising[:2]]
    bounds.extend(bound for bound in certified if bound is not None)
    if len(bounds) == 1 and promising:
        bounds.append(probabilistic_bound(couplings, promising[0][0], rng=rng))
    return min(bounds)


def with_ghost(couplings: Any, h: ArrayLike | None) -> Any:
    """Return J with the field as one more row and column, or J itself without a field."""
    field = as_field("h", h, couplings.shape[0])
    if field is None or not field.any():
        return couplings
    column = sparse.coo_array(field[:, None])
    return sparse.block_array([[couplings, column], [column.T, None]], format="csr")


def scaled_degrees(couplings: Any) -> NDArray[np.float64]:
    """Return d_i = ``Σ_j |J_ij|``, zeros replaced by 1, scaled to mean 1."""
    degrees: NDArray[np.float64] = np.asarray(abs(couplings).sum(axis=1), dtype=np.float64).ravel()
    degrees[degrees == 0] = 1.0
    degrees /= degrees.mean()
    return degrees


def _fits(matrix: Any) -> bool:
    n = matrix.shape[0]
    if n <= _DENSE_SIZE:
        return True
    if matrix.nnz > _ENVELOPE_LIMIT:
        return False
    order = reverse_cuthill_mckee(matrix, symmetric_mode=True)
    rows = np.empty(n, dtype=np.int64)
    rows[order] = np.arange(n)
    entries = matrix.tocoo()
    i, j = rows[entries.row], rows[entries.col]
    first = np.arange(n)
    np.minimum.at(first, i, j)
    width = (np.arange(n) - first).astype(np.float64)
    return bool(width.sum() <= _ENVELOPE_LIMIT and width @ width <= _OPERATIONS_LIMIT)


def _is_positive_definite(matrix: Any) -> bool:
    if not _fits(matrix):
        return False
    if matrix.shape[0] <= _DENSE_SIZE:
        try:
            np.linalg.cholesky(matrix.toarray())
        except np.linalg.LinAlgError:
            return False
        return True
    try:
        factors = splu(
            sparse.csc_array(matrix),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=0.0,
            options={"SymmetricMode": True},
        )
    except RuntimeError:  # an exactly singular pivot
        return False
    # Without row interchanges U's diagonal is D of LDLᵀ, whose signs are those of the eigenvalues.
    symmetric = np.array_equal(factors.perm_r, factors.perm_c)
    return bool(symmetric and (factors.U.diagonal() > 0).all())


def _lanczos(
    couplings: Any,
    scale: NDArray[np.float64],
    start: NDArray[np.float64],
    steps: int,
    breakdown: float,
) -> float:
    """Return the top Ritz value of scale J scale after ``steps`` Lanczos steps, in float64."""
    v = start / np.linalg.norm(start)
    old, beta = np.zeros_like(v), 0.0
    alphas: list[float] = []
    betas: list[float] = []
    for _ in range(steps):
        w = scale * (couplings @ (scale * v)) - beta * old
        alphas.append(float(v @ w))
        w -= alphas[-1] * v
        beta = float(np.linalg.norm(w))
        betas.append(beta)
        if beta <= breakdown:  # the Krylov space is invariant: further steps change nothing
            break
        old, v = v, w / beta
    T = np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1)
    return float(np.linalg.eigvalsh(T)[-1])
