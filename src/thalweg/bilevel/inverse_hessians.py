"""Estimators of v = H⁻¹b, the part of a hypergradient that can be swapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from thalweg.bilevel.neumann_series import (
    Block,
    Factors,
    Mode,
    antithetic_chains,
    average_pairs,
    check_terms,
    neumann_series,
    safe_step,
)
from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch


@dataclass(frozen=True, eq=False)
class LowerHessian:
    """The Hessian of the lower level at one point, as an estimator sees it: by products.

    Parameters
    ----------
    sampled : callable
        ``sampled(k, V)``: products of the Hessian of the k-th batch, from 0, with the rows of V, of
        shape (m, d).
    mean : callable
        ``mean(V)``: products with the mean Hessian of all batches.
    reference : callable, optional
        ``reference(V)``: products with the reference Hessian, where there is one.
    eta : float, optional
        The step of series, if it is known already.
    """

    sampled: Factors
    mean: Block
    reference: Block | None = None
    eta: float | None = None


@dataclass(frozen=True, eq=False)
class InverseProduct:
    """An estimate of H⁻¹b.

    Parameters
    ----------
    v : Tensor of shape (d,)
    odd_part : Tensor of shape (d,), optional
        What the antithetic average took out.
    diverged : int
        Pairs of chains that were cut off.
    residual : float, optional
        ``‖Hv - b‖ / ‖b‖`` of an exact or iterative solver, for its H.
    rank : int, optional
        The rank of H, where the solver sees it.
    """

    v: torch.Tensor
    odd_part: torch.Tensor | None = None
    diverged: int = 0
    residual: float | None = None
    rank: int | None = None


class InverseHessian(Protocol):
    """An estimator of H⁻¹b: `AntitheticNeumann`, `Neumann`, `CG`, `PInv` and so on, or one's own.

    Attributes
    ----------
    n_batches : int
        How many batches of the lower level one estimate takes.
    needs_reference : bool
        Whether it takes a reference Hessian.
    """

    @property
    def n_batches(self) -> int:
        """Return how many batches one estimate takes."""

    @property
    def needs_reference(self) -> bool:
        """Return whether it takes a reference Hessian."""

    def __call__(self, hessian: LowerHessian, b: torch.Tensor) -> InverseProduct:
        """Return the estimate for a b of shape (d,)."""


@dataclass(frozen=True)
class AntitheticNeumann:
    """The antithetic Neumann series: each sampled Hessian with its mirror around a reference.

    Parameters
    ----------
    K : int ≥ 1
        The number of terms.
    eta : float > 0, optional
        The step; by default half the inverse of the reference's largest eigenvalue.
    mode : {"independent", "shared"}
        A fresh batch for every factor, or one for a series.
    pairs : int ≥ 1
        Pairs of chains that are averaged.
    stabilize : bool
        Whether to cut off growing pairs; see `antithetic_neumann`.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    K: int = 20
    eta: float | None = None
    mode: Mode = "independent"
    pairs: int = 1
    stabilize: bool = True
    needs_reference = True

    def __post_init__(self) -> None:
        check_terms(self.K, self.eta, self.mode)
        check_integer("pairs", self.pairs, at_least=1)

    @property
    def n_batches(self) -> int:
        """Return the number of factors of all pairs, or of pairs if their batch is shared."""
        return self.pairs * _batches_per_series(self.K, self.mode)

    def __call__(self, hessian: LowerHessian, b: torch.Tensor) -> InverseProduct:
        """Return the estimate, with its odd part."""
        reference = _reference(hessian, self)
        eta = self.eta or hessian.eta or safe_step(reference, b)
        chains = [
            antithetic_chains(factors, reference, b, self.K, eta)
            for factors in _series(hessian, self.pairs, self.K, self.mode)
        ]
        v, odd, diverged = average_pairs(chains, eta, self.stabilize)
        return InverseProduct(v, odd, diverged)


@dataclass(frozen=True)
class Neumann:
    """The plain stochastic Neumann series, as in stocBiO.

    Parameters
    ----------
    K : int ≥ 1
        The number of terms.
    eta : float > 0, optional
        The step; by default half the inverse of the largest eigenvalue of the batches' mean
        Hessian.
    mode : {"independent", "shared"}
        A fresh batch for every factor, or one for a series.
    chains : int ≥ 1
        Independent series that are averaged.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    K: int = 20
    eta: float | None = None
    mode: Mode = "independent"
    chains: int = 1
    needs_reference = False

    def __post_init__(self) -> None:
        check_terms(self.K, self.eta, self.mode)
        check_integer("chains", self.chains, at_least=1)

    @property
    def n_batches(self) -> int:
        """Return the number of factors of all chains, or of chains if their batch is shared."""
        return self.chains * _batches_per_series(self.K, self.mode)

    def __call__(self, hessian: LowerHessian, b: torch.Tensor) -> InverseProduct:
        """Return the estimate."""
        eta = self.eta or hessian.eta or safe_step(hessian.mean, b)
        series = [
            neumann_series(factors, b, self.K, eta)
            for factors in _series(hessian, self.chains, self.K, self.mode)
        ]
        return InverseProduct(torch.stack(series).mean(dim=0))


@dataclass(frozen=True)
class ReferenceNeumann:
    """The deterministic Neumann series with the reference Hessian alone.

    It has the bias of the antithetic series to first order in the error of the reference, half of
    it to second order, and no variance.

    Parameters
    ----------
    K : int ≥ 1
        The number of terms.
    eta : float > 0, optional
        The step; by default half the inverse of the reference's largest eigenvalue.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    K: int = 20
    eta: float | None = None
    n_batches = 0
    needs_reference = True

    def __post_init__(self) -> None:
        check_terms(self.K, self.eta, "independent")

    def __call__(self, hessian: LowerHessian, b: torch.Tensor) -> InverseProduct:
        """Return the estimate."""
        reference = _reference(hessian, self)
        eta = self.eta or hessian.eta or safe_step(reference, b)
        return InverseProduct(neumann_series(lambda k, V: reference(V), b, self.K, eta))


@dataclass(frozen=True)
class CG:
    """Conjugate gradients on the mean Hessian of the batches, as in AID.

    Parameters
    ----------
    maxiter : int ≥ 1
        Iterations, each of one product.
    rtol : float ≥ 0
        Stop when the residual is at most this share of b.
    damping : float ≥ 0
        λ of H + λI. Without it H must be positive definite.
    n_batches : int ≥ 1
        The batches whose mean Hessian is taken.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    RuntimeError
        From a call, if a direction of no or negative curvature is met.
    """

    maxiter: int = 20
    rtol: float = 1e-6
    damping: float = 0.0
    n_batches: int = 1
    needs_reference = False

    def __post_init__(self) -> None:
        check_integer("maxiter", self.maxiter, at_least=1)
        check_number("rtol", self.rtol, at_least=0)
        check_number("damping", self.damping, at_least=0)
        check_integer("n_batches", self.n_batches, at_least=1)

    def __call__(self, hessian: LowerHessian, b: torch.Tensor) -> InverseProduct:
        """Return the solution for the mean Hessian, or where the iterations ended."""
        v, residual = torch.zeros_like(b), b.clone()
        direction, squared = residual.clone(), float(b.dot(b))
        target = (self.rtol**2) * squared
        for _ in range(self.maxiter):
            if squared <= target:
                break
            H = hessian.mean(direction[None])[0] + self.damping * direction
            curvature = float(direction.dot(H))
            if not curvature > 0:
                raise RuntimeError(
                    f"the Hessian of the lower level has curvature {curvature:g} along a "
                    "direction: CG needs a positive definite one; raise damping, or use the "
                    "pseudoinverse"
                )
            length = squared / curvature
            v += length * direction
            residual -= length * H
            previous, squared = squared, float(residual.dot(residual))
            direction = residual + squared / previous * direction
        scale = float(b.norm())
        return InverseProduct(v, residual=squared**0.5 / scale if scale > 0 else 0.0)


def _batches_per_series(K: int, mode: Mode) -> int:
    return min(K - 1, 1) if mode == "shared" else K - 1


def _series(hessian: LowerHessian, chains: int, K: int, mode: Mode) -> list[Factors]:
    """Return the factors of each chain: ``factors(k, V)`` for k from 1 to K - 1."""
    per_series = _batches_per_series(K, mode)

    def factors_from(first: int) -> Factors:
        if mode == "shared":
            return lambda k, V: hessian.sampled(first, V)
        return lambda k, V: hessian.sampled(first + k - 1, V)

    return [factors_from(chain * per_series) for chain in range(chains)]


def _reference(hessian: LowerHessian, estimator: object) -> Block:
    if hessian.reference is None:
        raise ValueError(f"{type(estimator).__name__} needs a reference Hessian")
    return hessian.reference
