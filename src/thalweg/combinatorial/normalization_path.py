"""The normalization path of an Ising problem, and its warm-started eigenproblems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.combinatorial.eigensolvers import (
    Eigenpairs,
    Product,
    block_lanczos,
    chebyshev_iteration,
    combine,
    lobpcg,
    rayleigh_ritz,
    spectral_norm,
)
from thalweg.combinatorial.ising_problem import IsingProblem, as_couplings, csr_tensor, prepare
from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator, torch_generator

with requires("combinatorial"):
    import torch
    from torch import Tensor

Path = Literal["power", "linear"]
Predictor = Literal["auto", "diagonal", "warm", "none"]
Eigensolver = Literal["lobpcg", "lanczos", "cheb"]

EIGENSOLVERS: dict[str, Callable[..., Eigenpairs]] = {
    "lobpcg": lobpcg,
    "lanczos": block_lanczos,
    "cheb": chebyshev_iteration,
}
PREDICTORS: tuple[Predictor, ...] = ("auto", "diagonal", "warm", "none")
# Components up to this size are diagonalized densely, many at a time.
_DENSE_SIZE = 256
_DENSE_BATCH = 2**23


class PathPoint(NamedTuple):
    """Approximate top eigenpairs of M(tau).

    Attributes
    ----------
    tau : float
    eigenvalues : ndarray of float64, shape (k,)
        Descending.
    vectors : ndarray of shape (n, k)
        Orthonormal columns.
    """

    tau: float
    eigenvalues: NDArray[np.float64]
    vectors: NDArray[Any]


@dataclass(frozen=True)
class PathSettings:
    """How the path is walked; checked by `check_path_settings`."""

    taus: NDArray[np.float64]
    k: int
    path: Path
    predictor: Predictor
    eigensolver: Eigensolver
    tol: float
    max_iter: int
    start_iter: int


@dataclass(frozen=True)
class BlockPoint:
    """Eigenpairs at one tau, all components: vectors (N, k) have unit columns on each of them.

    ``leading`` and ``residuals`` (C,) belong to each component's first pair.
    """

    tau: float
    values: Tensor
    vectors: Tensor
    leading: NDArray[np.float64]
    residuals: NDArray[np.float64]
    products: int
    estimate: float


def spectral_path(
    J: Any,
    taus: int | ArrayLike = 9,
    k: int = 4,
    *,
    path: Path = "power",
    predictor: Predictor = "auto",
    eigensolver: Eigensolver = "lobpcg",
    tol: float = 1e-4,
    max_iter: int = 12,
    start_iter: int = 40,
    start: ArrayLike | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    rng: RNGLike = None,
) -> Iterator[PathPoint]:
    r"""Yield the top eigenpairs along the path from the adjacency to the normalized Laplacian.

    With d_i = ``Σ_j |J_ij|`` scaled to mean 1 (zeros set to 1 before),

        M(tau) = D^{-tau/2} J D^{-tau/2},    tau in [0, 1].

    M(0) is the raw matrix; the top eigenvectors of M(1) are the bottom ones of the signed
    normalized Laplacian. In between, localization on hubs is traded for noise on vertices of low
    degree. ``path="linear"`` is (1 - tau) J/||J|| + tau D^{-1/2} J D^{-1/2} with unscaled D.

    Parameters
    ----------
    J : scipy.sparse matrix, networkx.Graph or array_like, shape (n, n)
    taus : int or array_like, default 9
        A number of equidistant points on [0, 1], or ascending points.
    k : int, default 4
        Eigenpairs, fewer than n.
    path : {"power", "linear"}
    predictor : {"auto", "diagonal", "warm", "none"}, default "auto"
        What the eigensolver starts from at the next tau: the last vectors V (``"warm"``), the
        O(nk) first-order prediction D^{-Δtau/2} V (``"diagonal"``), the best k directions of both
        (``"auto"``), or random vectors.
    eigensolver : {"lobpcg", "lanczos", "cheb"}
    tol : float, default 1e-4
        Residual, relative to the largest eigenvalue, at which an eigensolve stops.
    max_iter, start_iter : int
        The most iterations at each tau, and at the first one (and for predictor ``"none"``).
    start : array_like of shape (n, k), optional
        Start of the first eigensolve, instead of random vectors.
    device, dtype : optional
        Where and in which precision; float32 on the CPU by default.
    rng : int, numpy.random.Generator or None

    Yields
    ------
    PathPoint
        (tau, eigenvalues (k,), vectors (n, k)) as NumPy arrays.

    Raises
    ------
    ValueError, TypeError
        If an argument is malformed.

    Notes
    -----
    O(k nnz + k² n) per iteration. A graph of at most 256 vertices is diagonalized densely.

    The predictor's derivation: with Λ = log D, dM/dtau = -(ΛM + MΛ)/2, so first-order perturbation
    gives <v_j, dv/dtau> = -½ (λ + λ_j)/(λ - λ_j) <v_j, Λv>; the ratio's bulk value 1 gives
    dv/dtau = -½ Λv, hence the diagonal update. The abstract names an O(n) diagonal predictor; this
    form is our resolution. It is close to neutral, which is why ``"auto"`` safeguards it.

    References
    ----------
    "Spectral Annealing for Ising", NeurIPS 2026.

    Examples
    --------
    A bipartite graph with J = -W is balanced: every edge can be cut, and λ(1) is the mean degree.

    >>> import networkx as nx
    >>> J = -nx.to_scipy_sparse_array(nx.cycle_graph(8), dtype=float)
    >>> *_, last = spectral_path(J, taus=3, k=2, rng=0)
    >>> round(float(last.eigenvalues[0]), 6)
    2.0
    """
    couplings = as_couplings("J", J)
    settings = check_path_settings(
        couplings.shape[0], taus, k, path, predictor, eigensolver, tol, max_iter, start_iter
    )
    place, precision = torch.device(device or "cpu"), check_dtype(dtype)
    problem = prepare(couplings, None, numpy_dtype(precision), reorder=False)
    block = None
    if start is not None:
        array = check_array("start", start, shape=(couplings.shape[0], settings.k))
        block = torch.tensor(array, dtype=precision, device=place)
    generator = torch_generator(as_generator(rng), place)
    return (
        PathPoint(
            point.tau,
            np.asarray(point.values[: settings.k].cpu().numpy()),
            np.array(point.vectors.cpu().numpy()),
        )
        for point in walk(problem, settings, place, generator, start=block)
    )


def walk(
    problem: IsingProblem,
    settings: PathSettings,
    device: torch.device,
    generator: torch.Generator,
    *,
    start: Tensor | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[BlockPoint]:
    """Yield the eigenpairs of every component along the path; ``check`` runs before each product.

    ``vectors`` is one buffer that the next point overwrites.
    """
    degree = np.where(problem.degree > 0, problem.degree, 1.0)
    mean = float(degree.mean())
    sizes = np.diff(problem.bounds)
    large = [
        _Component(problem, int(c), degree / mean, mean, settings, device, generator, start, check)
        for c in np.flatnonzero(sizes > _DENSE_SIZE)
    ]
    small = list(_dense_batches(problem, degree / mean, mean, settings, device))
    dtype = problem.tensor(torch.device("cpu")).dtype
    vectors = torch.zeros(problem.size, settings.k, dtype=dtype, device=device)
    single = sizes == 1
    vectors[torch.from_numpy(problem.bounds[:-1][single]).to(device), 0] = 1.0
    for tau in settings.taus:
        leading, residuals = np.zeros(len(sizes)), np.zeros(len(sizes))
        values = vectors.new_zeros(settings.k, dtype=torch.float64)
        products = 0
        for part in large:
            pairs = part.solve(float(tau))
            vectors[part.rows] = pairs.vectors
            leading[part.index] = float(pairs.values[0])
            residuals[part.index] = float(pairs.residuals[0])
            values = torch.maximum(values, pairs.values) if part.index else pairs.values
            products += pairs.products
        for batch in small:
            theta = batch.solve(float(tau), vectors)
            leading[batch.components] = theta[:, 0].cpu().numpy()
            if not large:
                values = theta[0]
        yield BlockPoint(
            float(tau), values, vectors, leading, residuals, products,
            _estimate(problem, leading + residuals, degree, mean, float(tau), settings.path, large),
        )  # fmt: skip


def check_path_settings(
    n: int,
    taus: int | ArrayLike,
    k: int,
    path: Path,
    predictor: Predictor,
    eigensolver: Eigensolver,
    tol: float,
    max_iter: int,
    start_iter: int,
    k_name: str = "k",
) -> PathSettings:
    """Check the arguments of a path over n vertices."""
    if isinstance(taus, (int, np.integer)) and not isinstance(taus, bool):
        points = np.linspace(0.0, 1.0, check_integer("taus", taus, at_least=1))
    else:
        points = check_array("taus", taus, shape=("points",))
        if len(points) == 0 or points[0] < 0 or points[-1] > 1 or np.any(np.diff(points) <= 0):
            raise ValueError(f"taus must ascend within [0, 1], got {points}")
    if k >= n and n > 1:
        raise ValueError(f"{k_name} must be less than the number of spins, got {k} with {n} spins")
    return PathSettings(
        points,
        check_integer(k_name, k, at_least=1),
        check_choice("path", path, ("power", "linear")),
        check_choice("predictor", predictor, PREDICTORS),
        check_choice("eigensolver", eigensolver, tuple(EIGENSOLVERS)),  # type: ignore[arg-type]
        check_number("tol", tol, above=0),
        check_integer("max_iter", max_iter, at_least=1),
        check_integer("start_iter", start_iter, at_least=1),
    )


def check_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """Return ``dtype``, float32 by default; only float32 and float64 are accepted."""
    return check_choice("dtype", dtype or torch.float32, (torch.float32, torch.float64))


def numpy_dtype(dtype: torch.dtype) -> Any:
    """Return the NumPy dtype of the same precision."""
    return np.float64 if dtype is torch.float64 else np.float32


class _Component:
    """One large component: its operator along the path and its current block."""

    def __init__(
        self,
        problem: IsingProblem,
        index: int,
        degree: NDArray[np.float64],
        mean_degree: float,
        settings: PathSettings,
        device: torch.device,
        generator: torch.Generator,
        start: Tensor | None,
        check: Callable[[], None],
    ) -> None:
        first, last = problem.bounds[index], problem.bounds[index + 1]
        self.index = index
        self.rows = slice(int(first), int(last))
        whole = len(problem.bounds) == 2
        self._J = (
            problem.tensor(device)
            if whole
            else csr_tensor(problem.couplings[first:last, first:last], device)
        )
        dtype = self._J.dtype
        self._log_degree = torch.from_numpy(np.log(degree[first:last])).to(device)[:, None]
        self._mean_degree = mean_degree
        self._settings = settings
        self._generator = generator
        self._check = check
        self._block = start
        self._tau: float | None = None
        self.norm = 1.0
        if settings.path == "linear":
            self.norm = spectral_norm(self._multiply, self._random_block(dtype, 1))

    def solve(self, tau: float) -> Eigenpairs:
        settings = self._settings
        product = self._operator(tau)
        known = self._block is not None and settings.predictor != "none"
        iterations = settings.max_iter if known and self._tau is not None else settings.start_iter
        pairs = EIGENSOLVERS[settings.eigensolver](
            product, self._predict(tau, product), tol=settings.tol, max_iter=iterations
        )
        self._block, self._tau = pairs.vectors, tau
        return pairs

    def _predict(self, tau: float, product: Product) -> Tensor:
        V = self._block
        if V is None or (self._settings.predictor == "none" and self._tau is not None):
            return self._random_block(self._J.dtype, self._settings.k)
        if self._tau is None or self._settings.predictor == "warm":
            return V
        predicted = self._power(-(tau - self._tau) / 2) * V
        if self._settings.predictor == "diagonal":
            return predicted
        both = torch.cat([V, predicted], dim=1)
        _, C = rayleigh_ritz(both, product(both), V.shape[1])
        return combine(both, C)

    def _operator(self, tau: float) -> Product:
        """Return X -> M(tau) X: two diagonal scalings around one sparse product."""
        if self._settings.path == "power":
            scale = self._power(-tau / 2)
            return lambda X: scale * self._multiply(scale * X)
        scale = self._power(-0.5) / math.sqrt(self._mean_degree)
        left, right = (1 - tau) / self.norm, tau

        def product(X: Tensor) -> Tensor:
            return left * self._multiply(X) + right * (scale * self._multiply(scale * X))

        return product

    def _multiply(self, X: Tensor) -> Tensor:
        self._check()
        return self._J @ X

    def _power(self, exponent: float) -> Tensor:
        return torch.exp(exponent * self._log_degree).to(self._J.dtype)

    def _random_block(self, dtype: torch.dtype, k: int) -> Tensor:
        n = self._J.shape[0]
        return torch.randn(n, k, generator=self._generator, dtype=dtype, device=self._J.device)


@dataclass(frozen=True)
class _DenseBatch:
    """Small components of similar size as one batch of dense matrices, padded to one size."""

    components: NDArray[np.intp]
    positions: Tensor
    inside: Tensor
    J: Tensor
    degree: Tensor
    mean_degree: float
    settings: PathSettings

    def solve(self, tau: float, vectors: Tensor) -> Tensor:
        """Write the top eigenvectors into ``vectors``; return their eigenvalues (C, k)."""
        if self.settings.path == "power":
            scale = self.degree ** (-tau / 2)
            M = scale[:, :, None] * self.J * scale[:, None, :]
        else:
            scale = (self.degree * self.mean_degree) ** -0.5
            norms = torch.linalg.matrix_norm(self.J, ord=2)[:, None, None]
            M = (1 - tau) * self.J / norms + tau * scale[:, :, None] * self.J * scale[:, None, :]
        below = -1.0 - 2.0 * M.abs().sum(dim=2).amax()
        M = M + torch.diag_embed(torch.where(self.inside, 0.0, below))
        k = min(self.settings.k, M.shape[1])
        values, U = torch.linalg.eigh(M)
        vectors[self.positions[self.inside], :k] = U.flip(2)[self.inside, :k].to(vectors.dtype)
        top: Tensor = values.flip(1)[:, :k]
        return top


def _dense_batches(
    problem: IsingProblem,
    degree: NDArray[np.float64],
    mean_degree: float,
    settings: PathSettings,
    device: torch.device,
) -> Iterator[_DenseBatch]:
    sizes = np.diff(problem.bounds)
    buckets = np.ceil(np.log2(sizes)).astype(int)
    buckets[(sizes == 1) | (sizes > _DENSE_SIZE)] = 0
    for bucket in np.unique(buckets[buckets > 0]):
        width = 2**bucket
        chosen = np.flatnonzero(buckets == bucket)
        for part in np.array_split(chosen, math.ceil(len(chosen) * width**2 / _DENSE_BATCH)):
            width = int(sizes[part].max())
            inside = np.arange(width) < sizes[part][:, None]
            positions = np.where(inside, problem.bounds[part][:, None] + np.arange(width), 0)
            J = np.zeros((len(part), width, width))
            member, local = np.nonzero(inside)
            rows = problem.couplings[positions[inside]].tocoo()
            J[
                member[rows.row], local[rows.row], rows.col - problem.bounds[part][member[rows.row]]
            ] = rows.data
            yield _DenseBatch(
                part,
                torch.from_numpy(positions).to(device),
                torch.from_numpy(inside).to(device),
                torch.from_numpy(J).to(device),
                torch.from_numpy(np.where(inside, degree[positions], 1.0)).to(device),
                mean_degree,
                settings,
            )


def _estimate(
    problem: IsingProblem,
    top: NDArray[np.float64],
    degree: NDArray[np.float64],
    mean_degree: float,
    tau: float,
    path: Path,
    large: Sequence[_Component],
) -> float:
    """Return ½ Σ_c θ_c Σ_{i in c} d_i^tau, the spectral bound if θ_c were λ_max of component c."""
    if path == "power":
        weight = (degree / mean_degree) ** tau
    elif tau == 1.0:
        weight = degree
    elif tau == 0.0 and len(large) == len(top) == 1:
        weight = np.full(problem.size, large[0].norm)
    else:
        return math.inf
    return 0.5 * float(top @ np.add.reduceat(weight, problem.bounds[:-1]))
