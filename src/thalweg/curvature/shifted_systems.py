"""Systems (H + λB)δ = r with one H and many λ: by Cholesky, by eigenvalues, by conjugate gradients.

Each says None where H + λB is not positive definite, which a Newton method answers with a larger λ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from thalweg.curvature.factorizations import Solve, dense_cholesky, is_sparse, sparse_cholesky
from thalweg.curvature.norm_metric import NormMetric

Array = NDArray[np.float64]
LinearSolver = Literal["auto", "cholesky", "spectral", "cg"]
STALE_AFTER = 25  # iterations of conjugate gradients, from which on a new preconditioner pays
EXACT = 1e-12


class ShiftedSystem(Protocol):
    """A matrix H, and solutions of (H + λB)δ = r."""

    @property
    def n_factor(self) -> int:
        """Factorizations so far."""

    def refresh(self, H: Any) -> None:
        """Take a new H."""

    def solve(self, weight: float, r: Array) -> Array | None:
        """Return δ; None if H + λB is not positive definite."""


class PartialSystem(ShiftedSystem, Protocol):
    """One that also gives the products and the principal submatrices that penalties need."""

    def product(self, v: Array) -> Array:
        """Return Hv."""

    def scale(self) -> float:
        """Return the size of H's diagonal, or of H."""

    def solve_on(
        self, weight: float, free: NDArray[np.intp], ridge: Array, r: Array
    ) -> Array | None:
        """Return the solution on the indices ``free`` with ``ridge`` added to the diagonal."""


def choose_system(name: LinearSolver, H: Any, metric: NormMetric, theta: float) -> ShiftedSystem:
    """Return the system of the given name, or with "auto" the one for H.

    Raises
    ------
    ValueError
        If it cannot do with an operator H.
    """
    operator = not (isinstance(H, np.ndarray) or is_sparse(H))
    if name == "auto":
        name = "cg" if operator else "cholesky"
    if operator and name != "cg":
        raise ValueError(f"linear_solver={name!r} needs a matrix, hess returned an operator")
    if name == "cg":
        return ConjugateGradientSystem(metric, theta)
    return SpectralSystem(metric) if name == "spectral" else CholeskySystem(metric)


class CholeskySystem:
    """A Cholesky factorization for each λ, dense or sparse as H is."""

    def __init__(self, metric: NormMetric) -> None:
        self._metric = metric
        self.n_factor = 0
        self._H: Any = None

    def refresh(self, H: Any) -> None:
        """Take a new H."""
        self._H = H

    def product(self, v: Array) -> Array:
        """Return Hv."""
        product: Array = self._H @ v
        return product

    def scale(self) -> float:
        """Return the absolute mean of H's diagonal."""
        return abs(float(self._H.diagonal().mean()))

    def factorize(self, weight: float) -> Solve | None:
        """Return the inverse of H + λB."""
        self.n_factor += 1
        return _cholesky(self._metric.shifted(self._H, weight))

    def solve(self, weight: float, r: Array) -> Array | None:
        """Return δ; None if H + λB is not positive definite."""
        inverse = self.factorize(weight)
        return None if inverse is None else inverse(r)

    def solve_on(
        self, weight: float, free: NDArray[np.intp], ridge: Array, r: Array
    ) -> Array | None:
        """Return the solution on the indices ``free`` with ``ridge`` added to the diagonal."""
        self.n_factor += 1
        shifted = self._metric.shifted(self._H, weight)
        if is_sparse(shifted):
            inverse = sparse_cholesky(shifted[free][:, free] + sparse.diags_array(ridge))
        else:
            block = shifted[np.ix_(free, free)]
            block.reshape(-1)[:: len(free) + 1] += ridge
            inverse = dense_cholesky(block)
        return None if inverse is None else inverse(r)


def _cholesky(A: Any) -> Solve | None:
    return sparse_cholesky(A) if is_sparse(A) else dense_cholesky(A)


class SpectralSystem:
    """One eigendecomposition for each H: any λ costs O(d²) then."""

    def __init__(self, metric: NormMetric) -> None:
        self._metric = metric
        self.n_factor = 0

    def refresh(self, H: Any) -> None:
        """Take a new H."""
        self.n_factor += 1
        dense = H.toarray() if is_sparse(H) else H
        self._eigenvalues, self._vectors = self._metric.eigh(dense)

    def solve(self, weight: float, r: Array) -> Array | None:
        """Return δ; None if H + λB is not positive definite."""
        shifted = self._eigenvalues + weight
        if shifted[0] <= 0:
            return None
        solution: Array = self._vectors @ ((self._vectors.T @ r) / shifted)
        return solution


class ConjugateGradientSystem:
    r"""Preconditioned conjugate gradients, for matrices and for operators.

    The preconditioner is the last factorization of a matrix H + λB, however old; operators have
    none. The residual is at most θλ‖Bδ‖, which shifts the constants of the two tests of a step by
    the factor 1 ± θ and nothing else, or a rounding error's.
    """

    def __init__(self, metric: NormMetric, theta: float) -> None:
        self._metric, self._theta = metric, theta
        self._cholesky = CholeskySystem(metric)
        self._H: Any = None
        self._inverse: Solve | None = None

    @property
    def n_factor(self) -> int:
        """Factorizations for the preconditioner."""
        return self._cholesky.n_factor

    def refresh(self, H: Any) -> None:
        """Take a new H."""
        self._H = H
        if self._is_matrix:
            self._cholesky.refresh(H)

    @property
    def _is_matrix(self) -> bool:
        return isinstance(self._H, np.ndarray) or is_sparse(self._H)

    def product(self, v: Array) -> Array:
        """Return Hv."""
        return np.asarray(self._H @ v, dtype=np.float64)

    def scale(self) -> float:
        """Return the absolute mean of H's diagonal; for an operator, its gain on one vector."""
        if self._is_matrix:
            return self._cholesky.scale()
        probe = np.resize([1.0, -1.0, 1.0], self._metric.d)
        return float(np.linalg.norm(self.product(probe)) / np.linalg.norm(probe))

    def solve(self, weight: float, r: Array) -> Array | None:
        """Return δ; None where the iteration meets a direction of negative curvature."""
        if self._inverse is None and self._is_matrix:
            self._inverse = self._cholesky.factorize(weight)
        apply = lambda v: self.product(v) + weight * self._metric.apply(v)  # noqa: E731
        reach = lambda v: weight * float(np.linalg.norm(self._metric.apply(v)))  # noqa: E731
        solution, iterations = conjugate_gradients(apply, r, reach, self._theta, self._inverse)
        if iterations > STALE_AFTER:
            self._inverse = None
        return solution

    def solve_on(
        self, weight: float, free: NDArray[np.intp], ridge: Array, r: Array
    ) -> Array | None:
        """Return the solution on the indices ``free`` with ``ridge`` added to the diagonal."""
        whole = np.zeros(self._metric.d)

        def apply(v: Array) -> Array:
            whole[free] = v
            applied = self.product(whole) + weight * self._metric.apply(whole)
            on_free: Array = applied[free] + ridge * v
            return on_free

        reach = lambda v: weight * float(np.linalg.norm(v))  # noqa: E731
        return conjugate_gradients(apply, r, reach, self._theta, None)[0]


def conjugate_gradients(
    apply: Callable[[Array], Array],
    r: Array,
    reach: Callable[[Array], float],
    theta: float,
    inverse: Solve | None = None,
) -> tuple[Array | None, int]:
    """Solve A x = r, to a residual of at most θ·reach(x) or 10⁻¹²‖r‖.

    Returns
    -------
    x : ndarray or None
        None if a direction of negative curvature came up; what there is after 2d + 50 iterations.
    iterations : int

    Examples
    --------
    >>> x, _ = conjugate_gradients(lambda v: 2 * v, np.ones(3), lambda x: 0.0, 0.1)
    >>> x.tolist()
    [0.5, 0.5, 0.5]
    """
    x = np.zeros_like(r)
    floor = EXACT * float(np.linalg.norm(r))
    residual = r.copy()
    z = inverse(residual) if inverse else residual
    direction, slope = z.copy(), float(residual @ z)
    for iteration in range(2 * len(r) + 50):
        if np.linalg.norm(residual) <= max(floor, theta * reach(x)):
            return x, iteration
        applied = apply(direction)
        curvature = float(direction @ applied)
        if not curvature > 0:
            return None, iteration
        x += slope / curvature * direction
        residual -= slope / curvature * applied
        z = inverse(residual) if inverse else residual
        before, slope = slope, float(residual @ z)
        direction = z + slope / before * direction
    return x, 2 * len(r) + 50
