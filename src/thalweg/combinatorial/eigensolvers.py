"""Block eigensolvers for the top of a symmetric operator that is known by its products only.

All three take ``product`` (a function X -> M X on (n, k) blocks), a start block and two stopping
rules, run on any device, and rest on one Rayleigh-Ritz step that survives dependent directions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from threadpoolctl import ThreadpoolController

from thalweg.common.optional import requires

with requires("combinatorial"):
    import torch
    from torch import Tensor

Product = Callable[[Tensor], Tensor]
Solver = TypeVar("Solver", bound=Callable[..., Any])

# Directions whose Gram eigenvalue is below this fraction of the largest are rounding noise.
_RANK_TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14}
_SHORTEST = {torch.float32: 1e-16, torch.float64: 1e-32}
# Rows per partial inner product: partial sums stay in the block's precision and in the cache, and
# their total is taken in float64, so that 10^7 rows lose nothing.
_CHUNK = 512
_FILTER_DEGREE = 8
_LANCZOS_BLOCKS = 4


class Eigenpairs(NamedTuple):
    """Approximate top eigenpairs of M.

    Attributes
    ----------
    values : Tensor of shape (k,)
        Ritz values, descending, float64.
    vectors : Tensor of shape (n, k)
        Orthonormal Ritz vectors, in the start block's dtype.
    residuals : Tensor of shape (k,)
        ||M v - theta v||, float64.
    products : int
        Products with a block of k columns.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    products: int


def _one_blas_thread(solve: Solver) -> Solver:
    """Let ``solve`` run with one thread in NumPy's BLAS.

    NumPy makes the narrow products, torch the rest, and their thread pools wait for each other:
    with two threads in both a solve takes eight times as long as with one in NumPy's.
    """

    @functools.wraps(solve)
    def limited(*args: Any, **kwargs: Any) -> Any:
        with _thread_pools().limit(limits=1, user_api="blas"):
            return solve(*args, **kwargs)

    return limited  # type: ignore[return-value]


@functools.cache
def _thread_pools() -> ThreadpoolController:
    return ThreadpoolController()


@_one_blas_thread
def lobpcg(product: Product, start: Tensor, *, tol: float, max_iter: int) -> Eigenpairs:
    """Approximate the top eigenpairs by the locally optimal block conjugate gradient method.

    Each iteration maximizes the Rayleigh quotient over span[X, R, P]: the iterate, its residual and
    the previous step. One product with k columns and O(n k²) per iteration; M X and M P are carried
    along rather than recomputed.

    Parameters
    ----------
    product : callable
        X (n, k) -> M X.
    start : Tensor of shape (n, k)
        Any block of full rank.
    tol : float
        Stops when every residual is at most tol times the largest |Ritz value|.
    max_iter : int
        The most iterations.

    References
    ----------
    A. V. Knyazev, "Toward the optimal preconditioned eigensolver: locally optimal block
    preconditioned conjugate gradient method", SIAM J. Sci. Comput. 23, 2001.

    Examples
    --------
    >>> M = torch.diag(torch.arange(1.0, 201.0, dtype=torch.float64))
    >>> start = torch.ones(200, 1, dtype=torch.float64)
    >>> pairs = lobpcg(lambda X: M @ X, start, tol=1e-9, max_iter=200)
    >>> round(float(pairs.values[0]), 6)
    200.0
    """
    k = start.shape[1]
    XP, MXP, theta = _start(product, start)  # [X, P] in one block, P still empty
    R, norms = _residual(XP, MXP, theta)
    done = 0
    while done < max_iter and not _converged(norms, theta, tol):
        S = torch.cat([XP, R], dim=1)
        MS = torch.cat([MXP, product(R)], dim=1)
        theta, C = rayleigh_ritz(S, MS, k)
        step = C.clone()
        step[:k] = 0  # the part of the new X that does not come from the old one
        both = torch.cat([C, step], dim=1)
        XP, MXP = combine(S, both), combine(MS, both)
        R, norms = _residual(XP[:, :k], MXP[:, :k], theta)
        done += 1
    return Eigenpairs(theta, XP[:, :k].contiguous(), norms, done + 1)


@_one_blas_thread
def block_lanczos(product: Product, start: Tensor, *, tol: float, max_iter: int) -> Eigenpairs:
    """Approximate the top eigenpairs by restarted block Lanczos; parameters as in `lobpcg`.

    A restart builds an orthonormal basis of span[X, MX, ..., M^b X], b = 4, with full
    reorthogonalization, and takes the top k Ritz vectors. ``max_iter`` counts products.
    """
    k = start.shape[1]
    X, MX, theta = _start(product, start)
    _, norms = _residual(X, MX, theta)
    done = 0
    while done < max_iter and not _converged(norms, theta, tol):
        basis, images = [X], [MX]
        for _ in range(min(_LANCZOS_BLOCKS, max_iter - done)):
            W = images[-1]
            for _twice in range(2):  # once is not enough in float32
                Q = torch.cat(basis, dim=1)
                W = _orthonormal(W - combine(Q, inner(Q, W)))
            basis.append(W)
            images.append(product(W))
            done += 1
        S, MS = torch.cat(basis, dim=1), torch.cat(images, dim=1)
        theta, C = rayleigh_ritz(S, MS, k)
        X, MX = combine(S, C), combine(MS, C)
        _, norms = _residual(X, MX, theta)
    return Eigenpairs(theta, X, norms, done + 1)


@_one_blas_thread
def chebyshev_iteration(
    product: Product, start: Tensor, *, tol: float, max_iter: int
) -> Eigenpairs:
    """Approximate the top eigenpairs by filtered subspace iteration; parameters as in `lobpcg`.

    The filter is the Chebyshev polynomial of degree 8 that is small on [bottom, theta_k] and grows
    fastest above. ``max_iter`` counts products.

    References
    ----------
    Y. Zhou, Y. Saad, M. L. Tiago, J. R. Chelikowsky, "Self-consistent-field calculations using
    Chebyshev-filtered subspace iteration", J. Comput. Phys. 219, 2006.
    """
    k = start.shape[1]
    X, MX, theta = _start(product, start)
    _, norms = _residual(X, MX, theta)
    bottom = -_largest_eigenvalue_bound(lambda V: -product(V), X[:, :1])
    done = 0
    while done < max_iter and not _converged(norms, theta, tol):
        degree = min(_FILTER_DEGREE, max_iter - done)
        # A little below theta_k, or the filter would leave the last pair where it is.
        last, width = float(theta[torch.isfinite(theta)][-1]), float(theta[0]) - bottom
        cut = max(last - 0.05 * width, (last + bottom) / 2)
        center, half = (cut + bottom) / 2, max((cut - bottom) / 2, 1e-12)
        # Scaled three-term recurrence: the top Ritz value maps to 1, so nothing overflows.
        sigma_1 = sigma = half / max(float(theta[0]) - center, 1e-12)
        Y_old, Y = X, (MX - center * X) * (sigma / half)
        for _ in range(degree - 1):
            sigma_new = 1 / (2 / sigma_1 - sigma)
            Y_old, Y = (
                Y,
                (product(Y) - center * Y) * (2 * sigma_new / half) - (sigma * sigma_new) * Y_old,
            )
            sigma = sigma_new
        Y = _orthonormal(Y)
        MY = product(Y)
        theta, C = rayleigh_ritz(Y, MY, k)
        X, MX = combine(Y, C), combine(MY, C)
        _, norms = _residual(X, MX, theta)
        done += degree
    return Eigenpairs(theta, X, norms, done + 1)


def rayleigh_ritz(S: Tensor, MS: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the top k Ritz values (k,) of M on span(S) and coefficients C (m, k), float64.

    S C is orthonormal. S may be rank deficient: dependent directions are dropped, and when fewer
    than k remain, the last columns of S C are zero and their Ritz values -inf.
    """
    gram, energy = inner(S, S), inner(S, MS)
    energy = (energy + energy.T) / 2
    # A column shorter than rounding (a converged residual, the step after it) carries no direction.
    squares, shortest = gram.diagonal(), _SHORTEST[S.dtype] * gram.diagonal().max()
    scale = torch.where(squares > shortest, torch.rsqrt(squares), 0.0)
    values, U = torch.linalg.eigh(gram * scale[:, None] * scale)
    keep = values > _RANK_TOLERANCE[S.dtype] * values[-1]
    whiten = scale[:, None] * U[:, keep] * torch.rsqrt(values[keep])
    theta, Y = torch.linalg.eigh(whiten.T @ energy @ whiten)
    theta, C = theta.flip(0)[:k], whiten @ Y.flip(1)[:, :k]
    missing = k - len(theta)
    return (
        torch.cat([theta, theta.new_full((missing,), -math.inf)]),
        torch.cat([C, C.new_zeros(len(C), missing)], dim=1),
    )


def inner(S: Tensor, T: Tensor) -> Tensor:
    """Return SᵀT in float64."""
    whole = len(S) // _CHUNK * _CHUNK
    parts = torch.bmm(
        S[:whole].reshape(-1, _CHUNK, S.shape[1]).transpose(1, 2),
        T[:whole].reshape(-1, _CHUNK, T.shape[1]),
    )
    return parts.double().sum(dim=0) + (S[whole:].T @ T[whole:]).double()


def combine(S: Tensor, C: Tensor) -> Tensor:
    """Return S C, small C in float64, in the precision of S."""
    C = C.to(S)
    if S.device.type != "cpu":
        return S @ C
    # NumPy's BLAS takes a third of the time of torch's for this tall, narrow shape.
    return torch.from_numpy(S.numpy() @ C.numpy())


def _start(product: Product, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    X = _orthonormal(start)
    MX = product(X)
    theta, C = rayleigh_ritz(X, MX, start.shape[1])
    return combine(X, C), combine(MX, C), theta


def _orthonormal(X: Tensor) -> Tensor:
    _, C = rayleigh_ritz(X, X, X.shape[1])
    return combine(X, C)


def _residual(X: Tensor, MX: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    finite = torch.nan_to_num(theta, neginf=0.0).to(X)
    R = torch.addcmul(MX, X, finite, value=-1.0)
    return R, R.square().sum(dim=0).double().sqrt()


def _converged(norms: Tensor, theta: Tensor, tol: float) -> bool:
    largest = torch.nan_to_num(theta, neginf=0.0).abs().max()
    return bool((norms <= tol * largest).all())


def spectral_norm(product: Product, start: Tensor, steps: int = 20) -> float:
    """Estimate ||M|| from below by Lanczos steps; ``start`` is (n, 1)."""
    alphas, betas, _ = lanczos_tridiagonal(product, start, steps)
    T = torch.diag(alphas) + torch.diag(betas[:-1], 1) + torch.diag(betas[:-1], -1)
    return float(torch.linalg.eigvalsh(T).abs().max())


def _largest_eigenvalue_bound(product: Product, start: Tensor, steps: int = 8) -> float:
    """Return the top Ritz value of a few Lanczos steps plus the residual: safe in practice."""
    alphas, betas, _ = lanczos_tridiagonal(product, start, steps)
    T = torch.diag(alphas) + torch.diag(betas[:-1], 1) + torch.diag(betas[:-1], -1)
    return float(torch.linalg.eigvalsh(T)[-1] + betas[-1])


def lanczos_tridiagonal(product: Product, start: Tensor, steps: int) -> tuple[Tensor, Tensor, int]:
    """Run Lanczos without reorthogonalization from ``start`` (n, 1).

    Returns
    -------
    alphas : Tensor of shape (q,)
    betas : Tensor of shape (q,)
        The last one is the norm of the next residual.
    q : int
        Steps done: fewer than ``steps`` when the Krylov space is exhausted.
    """
    v = start / torch.linalg.vector_norm(start)
    old, beta = torch.zeros_like(v), 0.0
    alphas, betas = [], []
    for _ in range(steps):
        w = product(v) - beta * old
        alpha = float(inner(v, w))
        w = w - alpha * v
        beta = float(torch.linalg.vector_norm(w, dtype=torch.float64))
        alphas.append(alpha)
        betas.append(beta)
        if beta <= 1e-6 * max(abs(alpha), beta, 1e-300):
            break
        old, v = v, w / beta
    return (
        torch.tensor(alphas, dtype=torch.float64),
        torch.tensor(betas, dtype=torch.float64),
        len(alphas),
    )
