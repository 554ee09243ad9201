"""The scalar kernels h of nonlinear preconditioning, and the vector maps that they induce.

A reference function φ is ``h(‖x‖)`` ("isotropic") or ``Σ h(xᵢ)`` ("separable"). Its dual map
``∇φ*`` passes the gradient through ``h*'``, the inverse of ``h'``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_choice, check_number

Vector = NDArray[np.float64]
KernelName = Literal["cosh", "exp", "log", "clip", "quadratic"]
Structure = Literal["isotropic", "separable"]
STRUCTURES = get_args(Structure)


@dataclass(frozen=True)
class Kernel:
    """A kernel h with h ≥ t²/2 and h = t²/2 + o(t²), by what the methods need of it.

    Parameters
    ----------
    h : callable
        h(t) for an array t ≥ 0; infinite outside of its domain.
    dual_slope : callable
        ``dual_slope(y, xp)`` is h*'(y) for an array or tensor y of any sign; ``xp`` is `numpy` or
        `torch`, whose functions have the same names here.
    damping : callable
        ``damping(s, xp)`` is h*'(s)/s for s > 0, at most 1.
    dual_curvature : callable
        h*''(s) for an array s ≥ 0.
    h_of_dual_slope : callable
        h(h*'(s)) for an array s ≥ 0, without the cancellation of the composition.
    """

    h: Callable[[Vector], Vector]
    dual_slope: Callable[[Any, Any], Any]
    damping: Callable[[Any, Any], Any]
    dual_curvature: Callable[[Vector], Vector]
    h_of_dual_slope: Callable[[Vector], Vector]


def _arcsinh(y: Any, xp: Any) -> Any:
    if xp is np:
        return np.arcsinh(y)
    # PyTorch's arcsinh is not vectorized on a CPU, where this takes a tenth of its time. Where the
    # square overflows this is log1p(size): finite, and less by ln 2 at most.
    size = abs(y)
    return xp.copysign(xp.log1p(size * (1 + size / (1 + xp.sqrt(1 + size * size)))), y)


def _log_barrier(t: Vector) -> Vector:
    inside = t < 1
    return np.where(inside, -t - np.log1p(-np.where(inside, t, 0.0)), np.inf)


# h*' never forms eᵗ, so that it is finite for every finite argument.
_KERNELS = {
    "cosh": Kernel(
        h=lambda t: 2 * np.sinh(t / 2) ** 2,
        dual_slope=_arcsinh,
        damping=lambda s, xp: xp.arcsinh(s) / s,
        dual_curvature=lambda s: 1 / np.hypot(1, s),
        h_of_dual_slope=lambda s: s * (s / (1 + np.hypot(1, s))),
    ),
    "exp": Kernel(
        h=lambda t: np.expm1(t) - t,
        dual_slope=lambda y, xp: xp.sign(y) * xp.log1p(abs(y)),
        damping=lambda s, xp: xp.log1p(s) / s,
        dual_curvature=lambda s: 1 / (1 + s),
        h_of_dual_slope=lambda s: s - np.log1p(s),
    ),
    "log": Kernel(
        h=_log_barrier,
        dual_slope=lambda y, xp: y / (1 + abs(y)),
        damping=lambda s, xp: 1 / (1 + s),
        dual_curvature=lambda s: (1 / (1 + s)) ** 2,
        h_of_dual_slope=lambda s: np.log1p(s) - s / (1 + s),
    ),
    "clip": Kernel(
        h=lambda t: np.where(t <= 1, 0.5 * t**2, np.inf),
        dual_slope=lambda y, xp: xp.clip(y, -1, 1),
        damping=lambda s, xp: 1 / xp.clip(s, 1, None),
        dual_curvature=lambda s: np.where(s <= 1, 1.0, 0.0),
        h_of_dual_slope=lambda s: 0.5 * np.minimum(s, 1) ** 2,
    ),
    "quadratic": Kernel(
        h=lambda t: 0.5 * t**2,
        dual_slope=lambda y, xp: y,
        damping=lambda s, xp: xp.ones_like(s),
        dual_curvature=np.ones_like,
        h_of_dual_slope=lambda s: 0.5 * s**2,
    ),
}
NLPRECOND_KERNELS = tuple(_KERNELS)


def kernel_named(name: str) -> Kernel:
    """Return the kernel of that name; `ValueError` lists the names there are."""
    return _KERNELS[check_choice("kernel", name, NLPRECOND_KERNELS)]


def damping_factor(kernel: Kernel, s: Any, xp: Any) -> Any:
    """Return h*'(s)/s for an array or tensor s ≥ 0, with its limit 1 at 0."""
    return xp.where(s > 0, kernel.damping(xp.where(s > 0, s, xp.ones_like(s)), xp), 1.0)


@dataclass(frozen=True)
class NonlinearPreconditioner:
    """The map y ↦ ∇φ*(y/L̄) of one kernel, on NumPy vectors.

    Parameters
    ----------
    kernel : {"cosh", "exp", "log", "clip", "quadratic"}, default "cosh"
    structure : {"isotropic", "separable"}, default "isotropic"
    Lbar : float, default 1
        L̄ > 0, the gradient norm (or entry) around which damping sets in.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Examples
    --------
    The kernel "log" is a soft clip:

    >>> NonlinearPreconditioner("log", Lbar=2.0)(np.array([3.0, 4.0])) * (2 + 5)
    array([3., 4.])
    """

    kernel: str = "cosh"
    structure: str = "isotropic"
    Lbar: float = 1.0

    def __post_init__(self) -> None:
        kernel_named(self.kernel)
        check_choice("structure", self.structure, STRUCTURES)
        check_number("Lbar", self.Lbar, above=0)

    def __call__(self, gradient: Vector) -> Vector:
        """Return ∇φ*(g/L̄), for g of shape (n,)."""
        scale, direction = self.scaled_direction(gradient, norm(gradient))
        return scale * direction

    def scaled_direction(self, gradient: Vector, size: float) -> tuple[float, Vector]:
        """Return ∇φ*(g/L̄) as a number times a vector, which is g itself if isotropic.

        ``size`` is ‖g‖.
        """
        kernel = kernel_named(self.kernel)
        if self.structure == "separable":
            return 1.0, kernel.dual_slope(gradient / self.Lbar, np)
        return self._damping(size) / self.Lbar, gradient

    def stationarity(self, gradient: Vector, size: float) -> float:
        """Return L̄ φ(∇φ*(g/L̄)), about ‖g‖²/(2L̄) for a small gradient g of shape (n,).

        ``size`` is ‖g‖.
        """
        sizes = np.abs(gradient) if self.structure == "separable" else np.array(size)
        gaps = kernel_named(self.kernel).h_of_dual_slope(sizes / self.Lbar)
        return self.Lbar * float(np.sum(gaps))

    def apply_hessian(self, gradient: Vector, vectors: ArrayLike, power: float = 1.0) -> Vector:
        """Return ∇²φ*(g/L̄)^power V, for g of shape (n,) and V of shape (n,) or (n, k).

        With s = ‖g‖/L̄ and ŷ = g/‖g‖, the matrix ``∇²φ*`` is ``h*'(s)/s (I - ŷŷᵀ) + h*''(s) ŷŷᵀ``,
        and the diagonal of ``h*''(|gᵢ|/L̄)`` if separable: its powers have closed forms.
        """
        kernel = kernel_named(self.kernel)
        V = np.asarray(vectors, dtype=np.float64)
        if self.structure == "separable":
            diagonal = kernel.dual_curvature(np.abs(gradient) / self.Lbar) ** power
            return np.asarray((diagonal * V.T).T)
        size = norm(gradient)
        if size == 0:
            return V
        across = self._damping(size) ** power
        along = float(kernel.dual_curvature(np.array(size / self.Lbar))) ** power
        unit = gradient / size
        return np.asarray(across * V + (along - across) * np.multiply.outer(unit, unit @ V))

    def _damping(self, size: float) -> float:
        return float(damping_factor(kernel_named(self.kernel), np.array(size / self.Lbar), np))


def norm(gradient: Vector) -> float:
    """Return ‖g‖, finite if the entries are and it is representable."""
    with np.errstate(over="ignore"):
        size = float(np.linalg.norm(gradient))
    if np.isfinite(size) or not np.isfinite(gradient).all():
        return size
    largest = float(np.abs(gradient).max())  # the squares have overflowed
    return largest * float(np.linalg.norm(gradient / largest))
