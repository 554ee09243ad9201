"""A few Lanczos steps on an operator: what AutoSpec sees of its spectrum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_finite, check_integer, check_number
from thalweg.common.random import as_generator
from thalweg.curvature.native_products import as_matmul
from thalweg.curvature.spectral_tasks import ScaledInterval
from thalweg.curvature.synthetic_spectra import RitzBatch, ritz_pairs

Values = NDArray[np.float64]

# How far below the smallest Ritz value the spectrum is taken to reach, where nobody knows.
UNSEEN = 4.0
# Below this many times the largest, a Ritz value says that A is singular.
SINGULAR = 1e-13


@dataclass(frozen=True, eq=False)
class SpectralProbe:
    """What some Lanczos steps have shown of a symmetric positive definite operator.

    Attributes
    ----------
    ritz_values : ndarray of shape (m,)
        Estimates of eigenvalues, ascending.
    residuals : ndarray of shape (m,)
        Norm of ``A u - theta u`` of each Ritz pair: an eigenvalue lies within it.
    weights : ndarray of shape (m,)
        Squared components of the start vector along the Ritz vectors: the Gauss quadrature of the
        spectral density.
    lam_max : float
        A bound on the spectrum, just above the largest Ritz value.
    lam_min : float or None
        Smallest eigenvalue, if it was given.
    cut : float or None
        Where the unwanted part of the spectrum begins, if it was given.
    matvecs : int
        Products with the operator that were spent.
    """

    ritz_values: Values
    residuals: Values
    weights: Values
    lam_max: float
    lam_min: float | None
    cut: float | None
    matvecs: int

    @property
    def interval(self) -> ScaledInterval:
        """Where the spectrum of A / lam_max is taken to lie."""
        lowest = self.ritz_values[0] / UNSEEN if self.lam_min is None else self.lam_min
        cut = None if self.cut is None else self.cut / self.lam_max
        return ScaledInterval(float(lowest / self.lam_max), cut, self.lam_max)

    def features(self, *, scale_free: bool) -> Values:
        """Return what the network looks at, of shape (3 m + 4,).

        With ``scale_free``, they are those of every multiple of A.
        """
        ritz = RitzBatch(self.ritz_values[None], self.residuals[None], self.weights[None])
        low = self.ritz_values[0] if self.lam_min is None else self.lam_min
        cut = self.lam_max if self.cut is None else self.cut
        batch = probe_features(
            ritz,
            np.array([self.lam_max]),
            low=np.array([low]),
            given=np.array([self.lam_min is not None]),
            cut=np.array([cut]),
            scale_free=scale_free,
        )
        return np.asarray(batch[0])


def probe_features(
    ritz: RitzBatch,
    lam_max: Values,
    *,
    low: Values,
    given: NDArray[np.bool_],
    cut: Values,
    scale_free: bool,
) -> Values:
    """Return the features (B, 3 m + 4) of probes, near 0 and of order 1.

    The size of the operator is not among them: what is learned transfers to larger ones.
    """
    scale = lam_max[:, None]
    columns = [
        _log10(ritz.values / scale),
        _log10(ritz.weights) / 3,
        _log10(ritz.residuals / scale) / 2,
        _log10(low / lam_max)[:, None],
        given[:, None] - 1.5,
        _log10(cut / lam_max)[:, None],
        _log10(np.ones_like(scale) if scale_free else scale),
    ]
    return np.asarray((np.concatenate(columns, axis=1) + 1.0) / 1.2)


def _log10(values: Values) -> Values:
    return np.asarray(np.log10(np.maximum(values, 1e-7)))


def upper_bound(ritz: RitzBatch) -> Values:
    """Return what the largest eigenvalue is taken to be at most."""
    return np.asarray(1.01 * ritz.values[..., -1] + ritz.residuals[..., -1])


def probe_operator(
    A: Any,
    steps: int,
    *,
    rng: int | np.random.Generator | None = None,
    lam_min: float | None = None,
    cut: float | None = None,
    nullspace: Any = None,
) -> SpectralProbe:
    """Run Lanczos with full reorthogonalization from a Gaussian vector.

    Parameters
    ----------
    A : sparse matrix, ndarray, LinearOperator or Tensor of shape (n, n)
        Symmetric (Hermitian) positive definite. Tensors may be dense or sparse, on any device.
    steps : int
        Products with A.
    rng : int, Generator or None
        Draws the start vector.
    lam_min : float, optional
        A lower bound on the spectrum, if one is known.
    cut : float, optional
        Where the unwanted part of the spectrum begins.
    nullspace : array_like of shape (n,) or (n, r), optional
        Vectors that A maps to zero, to be left out: the constant one, for a graph Laplacian.

    Returns
    -------
    SpectralProbe

    Raises
    ------
    TypeError, ValueError
        If A is not square, not of floats, not finite, not symmetric, indefinite, or singular apart
        from ``nullspace``; if a number is out of range.
    """
    size, matmul, to_native = as_matmul(A)
    steps = check_integer("steps", steps, at_least=1)
    generator = as_generator(rng)
    start = generator.standard_normal(size)
    project = _projection(nullspace, size, to_native)
    diagonal, off = _lanczos(matmul, project, project(to_native(start)), min(steps, size))
    ritz = ritz_pairs(diagonal[None], off[None])
    lam_max = float(upper_bound(ritz)[0])
    _check_definite(ritz.values[0], lam_max)
    if lam_min is not None:
        lam_min = check_number("lam_min", lam_min, above=0, at_most=lam_max)
    if cut is not None:
        cut = check_number("cut", cut, above=0, below=lam_max)
    return SpectralProbe(
        ritz_values=_padded(ritz.values[0], steps),
        residuals=_padded(ritz.residuals[0], steps),
        weights=_padded(ritz.weights[0], steps),
        lam_max=lam_max,
        lam_min=lam_min,
        cut=cut,
        matvecs=len(diagonal),
    )


def _projection(nullspace: Any, size: int, to_native: Any) -> Any:
    """Return the projection onto the complement of the nullspace."""
    if nullspace is None:
        return lambda x: x
    vectors = check_finite("nullspace", np.asarray(nullspace))
    vectors = vectors.reshape(size, -1) if vectors.ndim == 1 else vectors
    if vectors.ndim != 2 or vectors.shape[0] != size:
        raise ValueError(f"nullspace must have shape ({size},) or ({size}, r), got {vectors.shape}")
    basis = to_native(np.linalg.qr(vectors)[0])
    return lambda x: x - basis @ (basis.T.conj() @ x)


def _lanczos(matmul: Any, project: Any, start: Any, steps: int) -> tuple[Values, Values]:
    """Return diagonal and off-diagonal of the tridiagonal matrix, shorter in an invariant space."""
    basis = [start / _norm(start)]
    diagonal, off = [], []
    for j in range(steps):
        vector = project(matmul(basis[j]))
        # Twice, for what rounding leaves.
        vector, overlaps = _orthogonalized(vector, basis)
        vector, _ = _orthogonalized(vector, basis)
        # Of a symmetric operator, only the last two overlaps are not zero.
        _check_symmetric(overlaps)
        diagonal.append(overlaps[j])
        off.append(_norm(vector))
        if off[j] <= 1e-12 * max(map(abs, overlaps)):
            break
        basis.append(vector / off[j])
    return np.array(diagonal), np.array(off)


def _dot(x: Any, y: Any) -> Any:
    return x.conj() @ y


def _norm(x: Any) -> float:
    return math.sqrt(abs(_dot(x, x)))


def _orthogonalized(vector: Any, basis: list[Any]) -> tuple[Any, list[float]]:
    """Return what is orthogonal to the basis, and the real parts of the overlaps with it."""
    overlaps = []
    for u in basis:
        overlap = _dot(u, vector)
        vector = vector - overlap * u
        overlaps.append(float(overlap.real))
    return vector, overlaps


def _check_symmetric(overlaps: list[float]) -> None:
    if not np.isfinite(overlaps).all():
        raise ValueError("A must be finite: a product with it holds NaN or infinity")
    largest = max(map(abs, overlaps))
    if any(abs(overlap) > 1e-4 * largest for overlap in overlaps[:-2]):
        raise ValueError("A must be symmetric (Hermitian): its Lanczos matrix is not tridiagonal")


def _check_definite(ritz: Values, lam_max: float) -> None:
    if ritz[-1] <= 0 or ritz[0] < -1e-10 * lam_max:
        raise ValueError(f"A must be positive definite, got the Ritz value {ritz[0]:.3g}")
    if ritz[0] < SINGULAR * lam_max:
        raise ValueError(
            "A must not be singular: give its nullspace (nullspace=np.ones(n) for a graph "
            "Laplacian), or add a shift to its diagonal"
        )


def _padded(values: Values, length: int) -> Values:
    """Repeat the last value, when Lanczos has ended early in an invariant subspace."""
    return np.concatenate([values, np.repeat(values[-1:], length - len(values))])
