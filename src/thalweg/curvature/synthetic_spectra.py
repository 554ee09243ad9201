"""Synthetic spectra of large operators, and the Lanczos process on them, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_choice

Values = NDArray[np.float64]

FAMILIES = ("power", "gap", "outliers")


@dataclass(frozen=True, eq=False)
class SpectralMeasures:
    """Spectra, each as points and the share of eigenvalues at each.

    Attributes
    ----------
    points : ndarray of shape (B, n)
        Ascending, in (0, 1]; the last is 1.
    masses : ndarray of shape (B, n)
        Rows sum to 1; zero where a spectrum has a gap.
    sizes : ndarray of shape (B,)
        Dimension of each operator: how much one eigenvalue weighs.
    """

    points: Values
    masses: Values
    sizes: Values


def sample_measures(
    count: int,
    *,
    kappa: tuple[float, float],
    families: Sequence[str],
    n: int,
    rng: np.random.Generator,
) -> SpectralMeasures:
    r"""Draw spectra of operators with 10^3 to 10^6 unknowns, scaled to a largest eigenvalue of 1.

    Ours: a spectrum is a density, not a list of n eigenvalues, so that a small problem has the
    extreme eigenvalues of a large one and a start vector sees them as seldom. The families are

    - ``"power"``: density proportional to :math:`x^{s-1}`, with s from -1 to 2. Elliptic operators
      in d dimensions have s = d / 2 (Weyl's law), s = 0 is uniform in the logarithm, 1 is uniform,
      and Gram matrices of fast decay have negative s.
    - ``"gap"``: a low cluster, a gap, and a bulk.
    - ``"outliers"``: a bulk, and a few large eigenvalues on their own.

    Condition numbers are uniform in the logarithm over ``kappa``.
    """
    for family in families:
        check_choice("families", family, FAMILIES)
    sizes = 10 ** rng.uniform(3, 6, count)
    lows = np.exp(-rng.uniform(np.log(kappa[0]), np.log(kappa[1]), count))
    kinds = rng.integers(len(families), size=count)
    points = np.empty((count, n))
    masses = np.empty((count, n))
    for i in range(count):
        points[i] = _points(lows[i], n, rng)
        masses[i] = _masses(families[kinds[i]], points[i], sizes[i], rng)
    return SpectralMeasures(points, masses, sizes)


def _points(low: float, n: int, rng: np.random.Generator) -> Values:
    """Return points from ``low`` to 1, half of them even in the logarithm."""
    jitter = rng.uniform(0, 1, n - 2)
    half = (n - 2) // 2
    even = (np.arange(n - 2 - half) + jitter[half:]) / (n - 2 - half)
    logarithmic = low ** ((np.arange(half) + jitter[:half]) / half)
    return np.sort(np.concatenate([[low, 1.0], logarithmic, low + (1 - low) * even]))


def _masses(family: str, points: Values, size: float, rng: np.random.Generator) -> Values:
    low, span = points[0], -np.log(points[0])
    edges = np.concatenate([[low], (points[1:] + points[:-1]) / 2, [1.0]])
    one = 1 / size
    if family == "power":
        masses = _power_law(edges, low, 1.0, rng.uniform(-1, 2))
    elif family == "gap":
        # The cluster and the gap cover up to three quarters of the logarithm of the interval.
        cluster, gap = rng.dirichlet([1.0, 1.0, 1.0])[:2] * span * 0.75
        share = 10 ** rng.uniform(np.log10(4 * one), -0.3)
        masses = share * _power_law(edges, low, low * np.exp(cluster), rng.uniform(-1, 2))
        bulk = low * np.exp(cluster + gap)
        masses += (1 - share) * _power_law(edges, bulk, 1.0, rng.uniform(-1, 2))
    else:
        top = low ** rng.uniform(0.1, 0.9)
        masses = _power_law(edges, low, top, rng.uniform(-1, 2))
        above = np.flatnonzero(points > top)
        alone = rng.permutation(above)[: rng.integers(1, 20)]
        masses[above] = 0.0
        masses[alone] = one
    # Less than one eigenvalue is none, but for the extremes, which are what is called kappa.
    masses[masses < one] *= rng.random(np.count_nonzero(masses < one)) < masses[masses < one] * size
    masses[[0, -1]] = np.maximum(masses[[0, -1]], one)
    return np.asarray(masses / masses.sum())


def _power_law(edges: Values, low: float, high: float, exponent: float) -> Values:
    """Return the masses between the edges under the density x^(exponent - 1) on an interval."""
    clipped = np.clip(edges, low, high)
    if abs(exponent) < 1e-3 or high <= low * (1 + 1e-9):
        distribution = np.log(clipped / low) / max(np.log(high / low), 1e-12)
    else:
        distribution = (clipped**exponent - low**exponent) / (high**exponent - low**exponent)
    return np.diff(distribution)


@dataclass(frozen=True, eq=False)
class RitzBatch:
    """What the Lanczos process sees of each operator after some steps.

    Attributes
    ----------
    values : ndarray of shape (B, m)
        Ritz values, ascending.
    residuals : ndarray of shape (B, m)
        Residual norm of each Ritz pair.
    weights : ndarray of shape (B, m)
        Squared components of the start vector along the Ritz vectors.
    """

    values: Values
    residuals: Values
    weights: Values


def lanczos_on_measures(
    measures: SpectralMeasures, steps: int, rng: np.random.Generator
) -> RitzBatch:
    """Run Lanczos with Gaussian start vectors.

    An eigenvalue of multiplicity r counts as one coordinate, which holds the norm of r Gaussians:
    that is all a Krylov space sees. O(B n m^2) for m steps.
    """
    multiplicity = measures.masses * measures.sizes[:, None]
    energy = rng.gamma(np.maximum(multiplicity, 1e-300) / 2) * (multiplicity > 0)
    count, n = measures.points.shape
    basis = np.zeros((count, steps + 1, n))
    basis[:, 0] = np.sqrt(energy / energy.sum(1, keepdims=True))
    diagonal = np.zeros((count, steps))
    off = np.zeros((count, steps))
    for j in range(steps):
        vector = measures.points * basis[:, j]
        diagonal[:, j] = np.einsum("bn,bn->b", vector, basis[:, j])
        for _ in range(2):  # once more, for what rounding left
            overlaps = np.einsum("bmn,bn->bm", basis[:, : j + 1], vector)
            vector -= np.einsum("bm,bmn->bn", overlaps, basis[:, : j + 1])
        off[:, j] = np.linalg.norm(vector, axis=1)
        basis[:, j + 1] = vector / np.maximum(off[:, j, None], 1e-300)
    # Past an invariant subspace the process goes on with nothing: its Ritz values then lie outside.
    low, high = measures.points[:, :1], measures.points[:, -1:]
    pairs = ritz_pairs(diagonal, off)
    return RitzBatch(np.clip(pairs.values, low, high), pairs.residuals, pairs.weights)


def ritz_pairs(diagonal: Values, off: Values) -> RitzBatch:
    """Return the Ritz pairs of tridiagonal matrices; the last of ``off`` (B, m) is beyond them."""
    m = diagonal.shape[-1]
    matrices = diagonal[..., None] * np.eye(m)
    index = np.arange(m - 1)
    matrices[..., index, index + 1] = matrices[..., index + 1, index] = off[..., :-1]
    values, vectors = np.linalg.eigh(matrices)
    residuals = off[..., -1:] * np.abs(vectors[..., -1, :])
    return RitzBatch(values, residuals, vectors[..., 0, :] ** 2)
