"""Hypergradients from batches, with an estimator of the inverse Hessian of one's choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.bilevel.bilevel_objectives import ALL, BilevelObjectives
from thalweg.bilevel.hessian_references import HessianReference, ReferenceTracker
from thalweg.bilevel.inverse_hessians import (
    AntitheticNeumann,
    InverseHessian,
    InverseProduct,
    LowerHessian,
)
from thalweg.bilevel.neumann_series import safe_step
from thalweg.bilevel.row_sources import Data, RowSource
from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch


RENEW_STEP = 10  # hypergradients between two estimates of the largest eigenvalue


@dataclass(frozen=True, eq=False)
class Hypergradient:
    """A hypergradient and what it is made of.

    Parameters
    ----------
    grad : Tensor or tree
        The estimate of the gradient of ``f(x, y*(x))``, in the layout of x.
    v : Tensor or tree
        The estimate of H⁻¹∇ᵧf, in the layout of y.
    odd_part : Tensor or tree, optional
        What an antithetic average took out of v.
    diverged : int
        Pairs of chains that were cut off.
    residual : float, optional
        ``‖Hv - ∇ᵧf‖ / ‖∇ᵧf‖`` of a solver. With `PInv` it is the share of ∇ᵧf outside of the
        range of H, which is 0 at an optimistic selection.
    rank : int, optional
        The rank of H, where the solver sees it.
    """

    grad: Any
    v: Any
    odd_part: Any = None
    diverged: int = 0
    residual: float | None = None
    rank: int | None = None


def hypergradient(
    f: Callable[..., torch.Tensor],
    g: Callable[..., torch.Tensor],
    x: Any,
    y: Any,
    *,
    solve: InverseHessian,
    outer_batch: Any = ALL,
    inner_batches: Sequence[Any] = (ALL,),
) -> Hypergradient:
    r"""Return the hypergradient by implicit differentiation at a solution y of the lower level.

    .. math:: \nabla_x f - \nabla^2_{xy} g \, v, \qquad v \approx (\nabla^2_{yy} g)^{-1} \nabla_y f

    Parameters
    ----------
    f, g : callable
        ``f(x, y)`` and ``g(x, y)``, or ``f(x, y, batch)`` and ``g(x, y, batch)`` if batches are
        given: scalar tensors.
    x, y : Tensor, or dicts, lists and tuples of them
    solve : InverseHessian
        The estimator of v that needs no reference: `CG`, `Neumann`, or one's own.
    outer_batch : object, optional
        The batch of f.
    inner_batches : sequence, optional
        Batches of g: one for the mixed derivative, then those of the estimator.

    Returns
    -------
    Hypergradient

    Raises
    ------
    TypeError, ValueError
        If f or g does not return a scalar, or x or y is not as described.

    Examples
    --------
    The slope of a validation loss in the logarithm of a ridge penalty:

    >>> import torch
    >>> from thalweg.bilevel import CG, hypergradient
    >>> _ = torch.manual_seed(0)
    >>> A, b = torch.randn(30, 4, dtype=torch.float64), torch.randn(30, dtype=torch.float64)
    >>> def f(x, y):
    ...     return ((A[20:] @ y - b[20:]) ** 2).mean()
    >>> def g(x, y):
    ...     return ((A[:20] @ y - b[:20]) ** 2).mean() / 2 + x.exp() * y.dot(y) / 2
    >>> x = torch.zeros((), dtype=torch.float64)
    >>> ridge = A[:20].T @ A[:20] / 20 + torch.eye(4, dtype=torch.float64)
    >>> y = torch.linalg.solve(ridge, A[:20].T @ b[:20] / 20)
    >>> slope = hypergradient(f, g, x, y, solve=CG()).grad
    >>> def at(t):
    ...     H = A[:20].T @ A[:20] / 20 + torch.eye(4, dtype=torch.float64) * t.exp()
    ...     return f(t, torch.linalg.solve(H, A[:20].T @ b[:20] / 20))
    >>> bool(abs(slope - (at(x + 1e-5) - at(x - 1e-5)) / 2e-5) < 1e-8)
    True
    """
    return StochasticHypergradient(f, g, x, y, solve=solve)(x, y, outer_batch, inner_batches)


class StochasticHypergradient:
    """An engine of hypergradients along a run, which keeps the reference Hessian.

    Parameters
    ----------
    f, g : callable
        ``f(x, y, batch)`` and ``g(x, y, batch)``: scalar tensors, means over the rows of a batch.
    x0, y0 : Tensor, or dicts, lists and tuples of them
        Trees that give the layouts.
    solve : InverseHessian, optional
        `AntitheticNeumann` by default; `Neumann`, `ReferenceNeumann`, `CG`, or one's own.
    reference : str, callable or HessianReference
        Where the reference Hessian comes from, for estimators that take one.
    inner_data : Tensor, sequence of Tensor, or callable, optional
        The lower level's rows, or a function ``draw(size, generator)``; needed for a reference.
    batch_size : int ≥ 1
        Rows of one sampled Hessian, by which the reference's size is judged.
    generator : torch.Generator, optional
        For the reference's batches.

    Attributes
    ----------
    n_hvp : int
        Products with sampled Hessians so far; ``n_hvp * batch_size`` rows.
    n_reference_rows : int
        Products with the reference so far, times its rows.

    Examples
    --------
    See `ane_bilevel`, which draws the batches and takes the steps.
    """

    def __init__(
        self,
        f: Callable[..., torch.Tensor],
        g: Callable[..., torch.Tensor],
        x0: Any,
        y0: Any,
        *,
        solve: InverseHessian | None = None,
        reference: str | Callable[..., Any] | HessianReference = "full",
        inner_data: Data | None = None,
        batch_size: int = 32,
        generator: torch.Generator | None = None,
    ) -> None:
        self.objectives = BilevelObjectives(f, g, x0, y0)
        self.solve = AntitheticNeumann() if solve is None else solve
        self.batch_size = check_integer("batch_size", batch_size, at_least=1)
        self.generator = generator
        self.n_hvp = 0
        self._calls = 0
        self._eta: float | None = None
        self._reference: ReferenceTracker | None = None
        if self.solve.needs_reference:
            self._reference = ReferenceTracker(
                reference_setting(reference),
                self.objectives,
                None if inner_data is None else RowSource("inner_data", inner_data),
                getattr(self.solve, "K", 1),
                batch_size,
            )

    @property
    def n_reference_rows(self) -> int:
        """Return the products with the reference so far, times its rows."""
        return 0 if self._reference is None else self._reference.n_products

    def __call__(
        self, x: Any, y: Any, outer_batch: Any = ALL, inner_batches: Sequence[Any] = (ALL,)
    ) -> Hypergradient:
        """Return the hypergradient at (x, y).

        Parameters
        ----------
        x, y : trees
        outer_batch : object
            The batch of f.
        inner_batches : sequence
            ``1 + solve.n_batches`` batches of g: the first for the mixed derivative.
        """
        o = self.objectives
        point = o.x.vector(x).detach(), o.y.vector(y).detach()
        self.refresh(*point, inner_batches)
        grad, solution = self.at(*point, outer_batch, inner_batches)
        odd = solution.odd_part
        return Hypergradient(
            grad=o.x.tree(grad),
            v=o.y.tree(solution.v),
            odd_part=None if odd is None else o.y.tree(odd),
            diverged=solution.diverged,
            residual=solution.residual,
            rank=solution.rank,
        )

    def refresh(self, x: torch.Tensor, y: torch.Tensor, inner_batches: Sequence[Any]) -> None:
        """Count one more hypergradient, and renew the reference or the step if it is time."""
        if self._reference is not None:
            self._reference.update(x, y, self.generator)
            self._eta = self._reference.eta
        elif getattr(self.solve, "eta", 0.0) is None and self._calls % RENEW_STEP == 0:
            self._eta = safe_step(self._hessian(x, y, inner_batches).mean, y)
        self._calls += 1

    def at(
        self, x: torch.Tensor, y: torch.Tensor, outer_batch: Any, inner_batches: Sequence[Any]
    ) -> tuple[torch.Tensor, InverseProduct]:
        """Return the hypergradient as a vector, with the estimate of v, for the present reference.

        Called at two points with the same batches, it gives what variance reduction needs.
        """
        cross, *batches = inner_batches
        f_x, f_y = self.objectives.upper_gradients(x, y, outer_batch)
        solution = self.solve(self._hessian(x, y, batches or [cross]), f_y)
        mixed = self.objectives.cross_product(x, y, solution.v, cross)
        return f_x - mixed, solution

    def _hessian(self, x: torch.Tensor, y: torch.Tensor, batches: Sequence[Any]) -> LowerHessian:
        last: list[Any] = [None, None]  # a shared batch is evaluated once

        def of(k: int) -> Any:
            if last[0] != k:
                last[:] = [k, self.objectives.hessian(x, y, batches[k])]
            return last[1]

        def sampled(k: int, V: torch.Tensor) -> torch.Tensor:
            self.n_hvp += len(V)
            return of(k)(V)  # type: ignore[no-any-return]

        every: list[Any] = []

        def mean(V: torch.Tensor) -> torch.Tensor:
            if not every:
                every.extend(self.objectives.hessian(x, y, batch) for batch in batches)
            self.n_hvp += len(V) * len(every)
            return torch.stack([products(V) for products in every]).mean(dim=0)

        reference = None if self._reference is None else self._reference.products
        return LowerHessian(sampled, mean, reference, self._eta)


def reference_setting(
    reference: str | Callable[..., Any] | HessianReference, **settings: Any
) -> HessianReference:
    """Return what describes a reference as a `HessianReference`."""
    if isinstance(reference, HessianReference):
        return reference
    if not callable(reference) and not isinstance(reference, str):
        raise TypeError(
            "reference must be a kind, a callable or a HessianReference, got "
            f"{type(reference).__name__}"
        )
    return HessianReference(reference, **settings)  # type: ignore[arg-type]
