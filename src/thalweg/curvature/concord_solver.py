"""The pseudolikelihood estimate of a sparse partial-correlation network, row by row."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.curvature.concord_blocks import solve_concord
from thalweg.curvature.concord_covariance import Covariance, FactoredCovariance, StoredCovariance
from thalweg.curvature.concord_result import SSNConcordResult
from thalweg.curvature.concord_rows import RowSettings

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Method = Literal["bssn", "ssn", "fbs", "fista"]

METHODS: tuple[Method, ...] = ("bssn", "ssn", "fbs", "fista")
PSD_TOLERANCE = 1e-10  # of the largest eigenvalue
CENTERED = 1e-12  # of a column's largest entry: what rounding leaves of its mean


def ssn_concord(
    S: ArrayLike | None,
    lam: float | ArrayLike,
    *,
    X: ArrayLike | None = None,
    n_samples: int | None = None,
    rows: ArrayLike | None = None,
    omega0: Any = None,
    dual0: ArrayLike | None = None,
    method: Method = "bssn",
    tol: float = 1e-10,
    max_iter: int = 100,
    max_prox_iter: int = 10_000,
    sigma: float = 1e-3,
    rho: float = 0.5,
    on_rank_deficient: Literal["prox", "raise"] = "prox",
    n_jobs: int | None = None,
    verbose: bool | None = False,
) -> SSNConcordResult:
    r"""Estimate rows of a sparse Ω by semismooth Newton.

    .. math:: \min_Ω -\sum_i \log Ω_{ii} + ½ \operatorname{tr}(Ω'Ω S) + \sum_{i ≠ j} λ |Ω_{ij}|

    where :math:`Ω = Θ_D^{-1/2} Θ` for a precision matrix Θ, so that they have the same zeros. The
    problem falls into one for each row ω,

    .. math:: \min_ω h(ω) + ½ ω'Sω, \qquad h(ω) = -\log ω_i + λ ‖ω_{-i}‖_1,

    whose solutions are the zeros of

    .. math:: F(ω, d) = (Sω + d, \; ω - \operatorname{prox}_h(ω + d)).

    Parameters
    ----------
    S : array_like of shape (p, p), or None
        The covariance, or correlations.
    lam : float > 0, or array_like of shape (p,) or (p, p)
        λ; one for each row, or for each entry (the diagonal does not matter).
    X : array_like of shape (n, p), optional
        Instead of S: data whose columns are centered, and scaled if they are to be. S = X'X/n is
        not formed.
    n_samples : int, optional
        A bound on the rank of S, if it is less than p; with S only. By default it comes from the
        eigenvalues that are computed anyway.
    rows : array_like of int, of shape (r,), optional
        The rows to estimate; by default all p.
    omega0 : array or sparse array of shape (r, p), optional
        Where to start; by default the diagonal solution.
    dual0 : array_like of shape (r, p), optional
        The d that belongs to it; by default -Sω.
    method : {"bssn", "ssn", "fbs", "fista"}
        The damped B-semismooth Newton method, which converges from everywhere; the semismooth
        Newton method with full steps, which does so near the solution; proximal gradient steps
        only; those with momentum.
    tol : float ≥ 0, default 1e-10
        Largest ‖F‖ of a row. For proximal gradients d = -Sω.
    max_iter, max_prox_iter : int
        Largest number of Newton steps and of proximal gradient steps of a row.
    sigma, rho : float in (0, ½), (0, 1)
        A step of length t must lower ½‖F‖² to 1 - 2 t sigma of itself; t is a power of rho.
    on_rank_deficient : {"prox", "raise"}
        What a row does whose active columns are dependent, or more than the rank of S: proximal
        gradient steps until the residual is not above what it was, or an error.
    n_jobs : int, optional
        Number of threads, as in joblib: None is 1, -1 all. It does not change a bit of the result.
    verbose : bool or None, default False
        Whether to show a progress bar; None shows it on a terminal.

    Returns
    -------
    SSNConcordResult

    Raises
    ------
    TypeError, ValueError
        For bad arguments; S that is not symmetric, or not positive semidefinite; a variable without
        variance.
    numpy.linalg.LinAlgError
        With ``on_rank_deficient="raise"``.

    Warns
    -----
    ConvergenceWarning
        If some rows miss ``tol``; it says which.
    LinAlgWarning
        If some variables depend linearly on others, as duplicates do; it says which.

    Notes
    -----
    A step of a row with k active variables takes k³/3 + k p operations, with X k² n + n (p + k).
    With S, Newton steps are compiled by Numba, on the first call (the compiled code is kept on
    disk); a step at kinks, or with more than about a hundred active variables, is NumPy and LAPACK.
    With X all are, and blocks of rows share the products. Memory is that of S (8p² bytes) or X
    (8np) and of blocks of a few MB per thread. With S, the eigenvalues
    for the check of semidefiniteness cost O(p³) once; `SSNConcord` needs none.

    The step is the B-Newton direction of the paper. Written for where it leads, instead of how far,
    it is the primal-dual active-set step with -log linearized at prox(u)_i, see
    `thalweg.curvature.concord_newton.newton_targets`.

    *Ours.* Where u_j = ±λ exactly, the complementarity problem is solved as nonnegative least
    squares, of whose optimality conditions it consists: the active-set method of
    `scipy.optimize.nnls` is exact and finite, as Lemke's is, without another dependency. "ssn"
    sets those variables to zero, one element of the generalized Jacobian. The start
    :math:`ω = S_{ii}^{-1/2} e_i`, which is e_i for correlations. The momentum of the proximal
    gradient steps that replace Newton steps, without which dense rows take many more. A row stops
    where its residual is at the level of rounding, even above ``tol``.

    References
    ----------
    "Semismooth Newton for l1 pseudolikelihood partial correlation", NeurIPS 2025.

    Examples
    --------
    A chain, whose neighbors are partially correlated.

    >>> import numpy as np
    >>> from thalweg.curvature import ssn_concord
    >>> precision = np.diag(np.full(5, 2.0)) - np.eye(5, k=1) - np.eye(5, k=-1)
    >>> result = ssn_concord(np.linalg.inv(precision), 1e-3)
    >>> result.edges().toarray().astype(int)[0]
    array([0, 1, 0, 0, 0])
    >>> result.precision().toarray().round(1)[0]
    array([ 2., -1.,  0.,  0.,  0.])
    """
    settings = row_settings(method, tol, max_iter, max_prox_iter, sigma, rho, on_rank_deficient)
    covariance = _covariance(S, X, n_samples)
    p = len(covariance.diagonal)
    chosen = np.arange(p) if rows is None else _checked_rows(rows, p)
    start = None if omega0 is None else _checked_start(omega0, chosen, p)
    if dual0 is not None:
        if start is None:
            raise ValueError("dual0 needs omega0")
        dual0 = check_array("dual0", dual0, shape=start.shape)
    return solve_concord(
        covariance,
        check_penalty("lam", lam, p),
        settings,
        rows=chosen,
        omega0=start,
        dual0=dual0,
        n_jobs=n_jobs,
        verbose=verbose,
    )


def row_settings(
    method: Any,
    tol: Any,
    max_iter: Any,
    max_prox_iter: Any,
    sigma: Any,
    rho: Any,
    on_rank_deficient: Any,
) -> RowSettings:
    """Return the checked settings of the row solvers."""
    return RowSettings(
        method=check_choice("method", method, METHODS),
        tol=check_number("tol", tol, at_least=0),
        max_iter=check_integer("max_iter", max_iter, at_least=1),
        max_prox_iter=check_integer("max_prox_iter", max_prox_iter, at_least=1),
        sigma=check_number("sigma", sigma, above=0, below=0.5),
        rho=check_number("rho", rho, above=0, below=1),
        on_rank_deficient=check_choice("on_rank_deficient", on_rank_deficient, ("prox", "raise")),
    )


def check_penalty(name: str, value: Any, p: int) -> Array:
    """Return λ with shape (p, 1) or (p, p).

    Raises
    ------
    TypeError, ValueError
        If it is no positive number or array of one of the shapes.
    """
    if np.ndim(value) == 0:
        return np.full((p, 1), check_number(name, value, above=0))
    lam = check_array(name, value, shape=("p",) if np.ndim(value) == 1 else ("p", "p"))
    if lam.shape not in ((p,), (p, p)):
        raise ValueError(
            f"{name} must be a number or of shape ({p},) or ({p}, {p}), got {lam.shape}"
        )
    lam = lam[:, None].copy() if lam.ndim == 1 else lam.copy()
    if lam.shape == (p, p):
        np.fill_diagonal(lam, 1.0)
    if lam.min() <= 0:
        raise ValueError(f"{name} must be > 0, got {lam.min():g}")
    return lam


def _covariance(S: Any, X: Any, n_samples: Any) -> Covariance:
    if (S is None) == (X is None):
        raise ValueError("give either S or X, and None for the other")
    covariance = _stored(S, n_samples) if X is None else _factored(X, n_samples)
    flat = np.flatnonzero(~(covariance.diagonal > 0))
    if len(flat):
        raise ValueError(f"every variable must vary, got no variance of {flat[:10].tolist()}")
    return covariance


def _factored(X: Any, n_samples: Any) -> FactoredCovariance:
    if n_samples is not None:
        raise ValueError("n_samples goes with S, not with X")
    data = check_array("X", X, shape=("n", "p"))
    n, p = data.shape
    if n < 1 or p < 1:
        raise ValueError(f"X must have samples and variables, got shape {data.shape}")
    centered = np.all(np.abs(data.mean(axis=0)) <= CENTERED * np.abs(data).max(axis=0))
    return FactoredCovariance(data / np.sqrt(n), min(n - 1 if centered and n > 1 else n, p))


def _stored(S: Any, n_samples: Any) -> StoredCovariance:
    matrix = np.ascontiguousarray(check_array("S", S, shape=("p", "p")))
    p = len(matrix)
    if p < 1 or matrix.shape != (p, p):
        raise ValueError(f"S must be square, got shape {matrix.shape}")
    if not np.allclose(matrix, matrix.T, rtol=1e-10, atol=1e-12 * np.abs(matrix).max()):
        raise ValueError("S must be symmetric")
    eigenvalues = np.linalg.eigvalsh(matrix)
    if eigenvalues[0] < -PSD_TOLERANCE * max(eigenvalues[-1], 0.0):
        raise ValueError(
            f"S must be positive semidefinite, got the eigenvalue {eigenvalues[0]:.3g}"
        )
    # As numpy.linalg.matrix_rank would count them.
    rank = int(np.sum(eigenvalues > eigenvalues[-1] * p * np.finfo(np.float64).eps))
    if n_samples is not None:
        rank = min(rank, check_integer("n_samples", n_samples, at_least=1))
    return StoredCovariance(matrix, rank, float(eigenvalues[-1]))


def _checked_rows(rows: Any, p: int) -> Index:
    chosen = np.asarray(rows)
    if chosen.ndim != 1 or not np.issubdtype(chosen.dtype, np.integer):
        raise TypeError("rows must be a 1-D array of integers")
    if len(np.unique(chosen)) < len(chosen) or not np.all((chosen >= 0) & (chosen < p)):
        raise ValueError(f"rows must be different numbers from 0 to {p - 1}")
    return chosen.astype(np.intp)


def _checked_start(omega0: Any, rows: Index, p: int) -> sparse.csr_array:
    if not sparse.issparse(omega0):
        omega0 = check_array("omega0", omega0, shape=("r", "p"))
    start = sparse.csr_array(omega0, dtype=np.float64)
    if start.shape != (len(rows), p):
        raise ValueError(f"omega0 must have shape ({len(rows)}, {p}), got {start.shape}")
    if not np.all(np.isfinite(start.data)):
        raise ValueError("omega0 must be finite")
    if len(rows) and not np.all(start[np.arange(len(rows)), rows] > 0):
        raise ValueError("omega0 must have diagonal entries ω_ii > 0")
    return start
