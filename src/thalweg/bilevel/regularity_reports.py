"""How smooth the optimistic hyper-objective is at a point: dimension, curvature, uniqueness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.bilevel_objectives import BilevelObjectives
from thalweg.bilevel.optimistic_selection import GD, Select, Selector
from thalweg.bilevel.pseudoinverses import DenseInverse, PInv
from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST = 2000
CLEAR_GAP = 100.0


@dataclass(frozen=True, eq=False)
class RegularityReport:
    """What makes Φ smooth at x, or not.

    Parameters
    ----------
    intrinsic_dim : int
        The dimension k of the manifold of minimizers: the Hessian's zero eigenvalues.
    pl_constant : float
        The smallest nonzero eigenvalue, the constant of the Polyak-Łojasiewicz condition.
    spectral_gap : float
        The smallest nonzero eigenvalue over the largest "zero" one; without a clear gap, the
        pseudoinverse has no meaning.
    tangential_min_eig : float
        The smallest eigenvalue of the Hessian of f along the manifold; not positive where the
        selection is degenerate. Infinite if k is 0.
    range_residual : float
        The share of ∇ᵧf along the manifold: 0 at a selection.
    n_selections : int
        Distinct points found whose f is the least to a millionth.
    smooth : bool
        Whether the selection is unique and not degenerate, and the gap clear.
    advice : str
    eigenvalues : ndarray of shape (d,)
    """

    intrinsic_dim: int
    pl_constant: float
    spectral_gap: float
    tangential_min_eig: float
    range_residual: float
    n_selections: int
    smooth: bool
    advice: str
    eigenvalues: NDArray[np.float64]

    def __str__(self) -> str:
        """Return the figures and the advice."""
        return (
            f"dimension {self.intrinsic_dim}, PL constant {self.pl_constant:.3g}, gap "
            f"{self.spectral_gap:.3g}, tangential curvature {self.tangential_min_eig:.3g}, "
            f"selections {self.n_selections}\n{self.advice}"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the Hessian's eigenvalues, in order; return the axes."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        sizes = np.sort(np.abs(self.eigenvalues))[::-1]
        ax.semilogy(np.arange(1, len(sizes) + 1), np.maximum(sizes, 1e-20), "o")
        ax.axvline(len(sizes) - self.intrinsic_dim + 0.5, linestyle="--", color="gray")
        ax.set(xlabel="number", ylabel="eigenvalue of the lower Hessian")
        return ax


def regularity_report(
    f: Callable[..., torch.Tensor],
    g: Callable[..., torch.Tensor],
    x: Any,
    y: Any,
    *,
    k: int | None = None,
    n_starts: int = 16,
    spread: float = 3.0,
    solve: PInv | None = None,
    generator: torch.Generator | None = None,
) -> RegularityReport:
    r"""Tell whether the optimistic hyper-objective is smooth at x.

    A unique selection makes Φ differentiable. It is locally smooth if the Hessian of f along the
    manifold is positive definite there: :math:`w^\top (\nabla^2_{yy} f - D^3_{yyy} g[v]) w > 0`
    for w in the kernel of H, with :math:`v = H^\dagger \nabla_y f`. Several selections make a kink;
    a degenerate one can leave no Hölder exponent for the hypergradient.

    Parameters
    ----------
    f, g : callable
        ``f(x, y)`` and ``g(x, y)``: scalar tensors, g three times differentiable in y.
    x, y : Tensor, or dicts, lists and tuples of them
        A point, whose y need only be near a minimizer of g: the selection is sought from it.
    k : int ≥ 0, optional
        The dimension of the manifold, if it is known.
    n_starts : int ≥ 0
        Walks along the manifold that look for other selections.
    spread : float > 0
        The length of the longest one.
    solve : PInv, optional
        Its ``cutoff`` decides which eigenvalues are zero, unless k is given.
    generator : torch.Generator, optional

    Returns
    -------
    RegularityReport

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or y has more than 2,000 entries.
    NotMinimizerError
        If g has negative curvature where the search ends.

    Notes
    -----
    An eigendecomposition of order d, k third derivatives, and ``n_starts`` selections.

    References
    ----------
    "HG-MS: select-then-differentiate optimistic bilevel optimization", NeurIPS 2026.

    Examples
    --------
    The nearest point of a circle is unique but for its center:

    >>> import torch
    >>> from thalweg.bilevel import regularity_report
    >>> def f(x, y):
    ...     return ((y - x) ** 2).sum() / 2
    >>> def g(x, y):
    ...     return (y.dot(y) - 1) ** 2 / 4
    >>> y = torch.tensor([0.6, 0.8], dtype=torch.float64)
    >>> regularity_report(f, g, torch.tensor([2.0, 0.0], dtype=torch.float64), y).smooth
    True
    >>> regularity_report(f, g, torch.zeros(2, dtype=torch.float64), y).smooth
    False
    """
    objectives = BilevelObjectives(f, g, x, y)
    point, d = objectives.x.vector(x).detach(), objectives.y.size
    if d > MOST:
        raise ValueError(f"y must have at most {MOST:,} entries for a report, got {d:,}")
    if k is not None:
        check_integer("k", k, at_least=0, at_most=d)
    setting = PInv(method="dense", cutoff=(solve or PInv()).cutoff)
    selector = Selector(
        objectives,
        GD(steps=500),
        Select(steps=500, n_starts=n_starts, restart_every=1, spread=spread),
        setting,
        generator or torch.Generator().manual_seed(0),
    )
    found = selector(point, objectives.y.vector(y).detach(), 0)
    products = objectives.hessian(point, found.y)
    inverse = setting.factorize(products, found.y)
    assert isinstance(inverse, DenseInverse)
    order = inverse.eigenvalues.abs().argsort(descending=True)
    sizes, dim = inverse.eigenvalues.abs()[order], d - inverse.rank if k is None else k
    kernel = inverse.vectors[:, order[d - dim :]]
    least = float(sizes[d - dim - 1]) if dim < d else 0.0
    zero = float(sizes[d - dim]) if dim > 0 else 0.0
    gap = least / zero if zero > 0 else float("inf")
    curvature = _tangential_curvature(objectives, point, found.y, found.solution.v, kernel)
    selections = 1 + len(found.others)
    f_y = objectives.upper_gradients(point, found.y)[1]
    scale = float(f_y.norm())
    advice = _advice(dim, gap, curvature, selections)
    return RegularityReport(
        intrinsic_dim=dim,
        pl_constant=least,
        spectral_gap=gap,
        tangential_min_eig=curvature,
        range_residual=float((kernel.T @ f_y).norm()) / scale if scale > 0 else 0.0,
        n_selections=selections,
        smooth=not advice,
        advice=advice or "Φ is smooth here: the selection is unique and not degenerate.",
        eigenvalues=inverse.eigenvalues.double().cpu().numpy(),
    )


def _tangential_curvature(
    objectives: BilevelObjectives,
    x: torch.Tensor,
    y: torch.Tensor,
    v: torch.Tensor,
    kernel: torch.Tensor,
) -> float:
    """Return the smallest eigenvalue of the Hessian of f - ⟨∇g, v⟩ in y, over the kernel."""
    if kernel.shape[1] == 0:
        return float("inf")
    y = y.detach().clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(
            objectives.lower(x, y), y, create_graph=True, materialize_grads=True
        )
        lagrangian = objectives.upper(x, y) - slope.dot(v)
        (first,) = torch.autograd.grad(lagrangian, y, create_graph=True, materialize_grads=True)
    if not first.requires_grad:
        return 0.0
    (rows,) = torch.autograd.grad(first, y, kernel.T, is_grads_batched=True, materialize_grads=True)
    C = rows @ kernel
    return float(torch.linalg.eigvalsh((C + C.T) / 2)[0])


def _advice(dim: int, gap: float, curvature: float, selections: int) -> str:
    if gap < CLEAR_GAP:
        return (
            f"The eigenvalues show no clear gap ({gap:.3g}): which of them are zero is arbitrary. "
            "Solve the lower level better, or use damping openly."
        )
    if selections > 1 and dim > 0:
        return (
            f"The selection is not unique ({selections} points tie): Φ has a kink here, and "
            "hypergradients of one selection jump. Lower the step size, or move x."
        )
    if curvature <= 1e-6:
        return (
            f"The selection is degenerate (curvature {curvature:.3g} along the manifold): the "
            "hypergradient need not be Hölder continuous. Add a small strongly convex term to f."
        )
    return ""
