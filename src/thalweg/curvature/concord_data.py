"""From data to the covariance that the row solvers see."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from thalweg.curvature.concord_covariance import (
    Covariance,
    FactoredCovariance,
    StoredCovariance,
)

Array = NDArray[np.float64]

STORED_UP_TO = 10_000  # features; S then takes 800 MB
CONSTANT = 1e-14  # of the largest entry of a column: what rounding leaves of its spread


class Standardized(NamedTuple):
    """Data with columns that are centered, and scaled if asked for."""

    Z: Array
    location: Array
    scale: Array


def standardize_columns(X: Array, *, scale: bool, assume_centered: bool) -> Standardized:
    """Return Z = (X - location) / scale.

    Raises
    ------
    ValueError
        If a column is constant, or if X looks like a matrix of correlations.
    """
    n, p = X.shape
    if n == p > 1 and np.all(X.diagonal() == 1) and np.array_equal(X, X.T):
        raise ValueError(
            "X must hold samples, got what looks like a correlation matrix; "
            "use thalweg.curvature.ssn_concord(S, lam) for that"
        )
    location = np.zeros(p) if assume_centered else X.mean(axis=0)
    Z = X - location
    spread = np.sqrt(np.einsum("ij,ij->j", Z, Z) / n)
    constant = np.flatnonzero(spread <= CONSTANT * np.abs(X).max(axis=0))
    if len(constant):
        raise ValueError(
            f"every column of X must vary, got constant columns {constant[:10].tolist()}"
            f"{' and more' if len(constant) > 10 else ''}; drop them"
        )
    factor = spread if scale else np.ones(p)
    return Standardized(Z / factor, location, factor)


def covariance_of(Z: Array, *, centered: bool, form: bool | Literal["auto"] = "auto") -> Covariance:
    """Return Z'Z/n; ``centered`` data have one rank less than samples."""
    n, p = Z.shape
    rank = min(n - 1 if centered else n, p)
    if p <= STORED_UP_TO if form == "auto" else form:
        return StoredCovariance(Z.T @ Z / n, rank)
    return FactoredCovariance(Z / np.sqrt(n), rank)


def pseudolikelihood(omega: sparse.csr_array, Z: Array) -> float:
    """Return Σ_i log ω_ii - ½ tr(Ω S Ω') for S = Z'Z/n, which is not formed."""
    residuals = omega @ Z.T
    return float(np.log(omega.diagonal()).sum() - 0.5 * np.sum(residuals**2) / len(Z))
