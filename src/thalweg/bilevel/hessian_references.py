"""Reference Hessians: what antithetic pairs are mirrored around."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.bilevel.bilevel_objectives import BilevelObjectives, Block
from thalweg.bilevel.neumann_series import safe_step
from thalweg.bilevel.row_sources import RowSource
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Kind = Literal["full", "batch", "ema", "recursive"]

MOST_DENSE = 2000
CHUNK = 256
ENOUGH = 10  # how much more information than one plain estimate a reference must carry


@dataclass(frozen=True)
class HessianReference:
    r"""How the reference Hessian of the lower level is obtained.

    Parameters
    ----------
    kind : {"full", "batch", "ema", "recursive"} or callable
        All rows, or one batch, at the point of the last refresh. A moving average of the Hessians
        of fresh batches, :math:`\bar H \leftarrow (1 - \rho) \bar H + \rho H_B`. Or its
        variance-reduced recursion, with the Hessian of the same batch at two points,
        :math:`\bar H_t = H_B(z_t) + (1 - \rho) (\bar H_{t-1} - H_B(z_{t-1}))`. A callable
        ``kind(x, y)`` returns a function ``v -> Hv`` of the layout of y.
    size : int ≥ 1, optional
        Rows of the batches; by default ten times what one plain estimate takes. Not for "full".
    refresh : int ≥ 1
        Hypergradients between two refreshes of "full", "batch" and callables.
    rho : float in (0, 1]
        The weight of a fresh batch in "ema" and "recursive".
    dense : bool, optional
        Whether the reference is held as a matrix, formed by products with unit vectors in blocks;
        by default where that takes fewer products than the series would until the next refresh.
        "ema" and "recursive" are always matrices, and limited to 2,000 parameters.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    """

    kind: Kind | Callable[[Any, Any], Callable[[Any], Any]] = "full"
    size: int | None = None
    refresh: int = 10
    rho: float = 0.05
    dense: bool | None = None

    def __post_init__(self) -> None:
        if not callable(self.kind):
            check_choice("kind", self.kind, ("full", "batch", "ema", "recursive"))
        if self.size is not None:
            check_integer("size", self.size, at_least=1)
            if self.kind == "full":
                raise ValueError(f"size must be None for kind='full', got {self.size}")
        check_integer("refresh", self.refresh, at_least=1)
        check_number("rho", self.rho, above=0, at_most=1)
        if self.dense is not None:
            check_choice("dense", self.dense, (True, False))


class ReferenceTracker:
    """A reference Hessian along a run.

    Parameters
    ----------
    setting : HessianReference
    objectives : BilevelObjectives
    rows : RowSource or None
        The lower level's.
    depth : int
        The products of one estimate.
    batch_size : int
        The rows of one sampled Hessian.
    """

    def __init__(
        self,
        setting: HessianReference,
        objectives: BilevelObjectives,
        rows: RowSource | None,
        depth: int,
        batch_size: int,
    ) -> None:
        self.setting = setting
        self.objectives = objectives
        self.depth = depth
        self.n_products = 0  # times rows
        self.eta: float | None = None
        self._rows = rows
        self._age = 0
        self._products: Block | None = None
        self._matrix: torch.Tensor | None = None
        self._previous: tuple[torch.Tensor, torch.Tensor] | None = None
        self._row_cost = 1
        dense = setting.kind in ("ema", "recursive")
        if dense and objectives.y.size > MOST_DENSE:
            raise ValueError(
                f"kind={setting.kind!r} holds a matrix, for at most {MOST_DENSE:,} parameters, got "
                f"{objectives.y.size:,}; use 'full' or 'batch'"
            )
        self._size = self._rows_per_batch(batch_size)

    def products(self, V: torch.Tensor) -> torch.Tensor:
        """Return products with the reference."""
        assert self._products is not None
        if self._matrix is None:
            self.n_products += len(V) * self._row_cost
        return self._products(V)

    def update(self, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator | None) -> None:
        """Bring the reference up to a point, if its time has come."""
        kind = self.setting.kind
        if kind in ("ema", "recursive"):
            self._average(x, y, generator)
        elif self._age % self.setting.refresh == 0:
            self._refresh(x, y, generator)
        self._age += 1

    def _refresh(self, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator | None) -> None:
        if callable(self.setting.kind):
            layout = self.objectives.y
            product = self.setting.kind(self.objectives.x.tree(x), layout.tree(y))
            self._row_cost = 1
            sampled: Block = lambda V: torch.stack(  # noqa: E731
                [layout.vector(product(layout.tree(v))) for v in V]
            )
        else:
            sampled = self.objectives.hessian(x, y, self._batch(generator))
        self._products, self._matrix = sampled, None
        dense = self.setting.dense
        cheaper = self.depth * self.setting.refresh >= len(y)
        if (cheaper and len(y) <= MOST_DENSE) if dense is None else dense:
            self._hold(self._form(sampled, y))
        self.eta = safe_step(self.products, y)

    def _average(self, x: torch.Tensor, y: torch.Tensor, generator: torch.Generator | None) -> None:
        batch, rho = self._batch(generator), self.setting.rho
        fresh = self._form(self.objectives.hessian(x, y, batch), y)
        if self._matrix is None:
            self._hold(fresh)
        elif self.setting.kind == "ema":
            self._hold((1 - rho) * self._matrix + rho * fresh)
        else:
            assert self._previous is not None
            before = self._form(self.objectives.hessian(*self._previous, batch), y)
            self._hold(fresh + (1 - rho) * (self._matrix - before))
        self._previous = (x.clone(), y.clone())
        self.eta = safe_step(self.products, y)

    def _hold(self, matrix: torch.Tensor) -> None:
        self._matrix = matrix
        self._products = lambda V: V @ matrix

    def _form(self, products: Block, y: torch.Tensor) -> torch.Tensor:
        self.n_products += len(y) * self._row_cost
        units = torch.eye(len(y), dtype=y.dtype, device=y.device)
        H = torch.cat([products(block) for block in torch.split(units, CHUNK)])
        return (H + H.T) / 2

    def _batch(self, generator: torch.Generator | None) -> Any:
        if self._rows is None:
            raise ValueError("inner_data must be given for a reference that takes rows")
        if self.setting.kind == "full":
            self._row_cost = self._rows.n or 1
            return self._rows.all()
        self._row_cost = self._size
        return self._rows.draw(self._size, generator)

    def _rows_per_batch(self, batch_size: int) -> int:
        enough = ENOUGH * self.depth * batch_size
        if callable(self.setting.kind) or self.setting.kind == "full":
            return 0
        n = None if self._rows is None else self._rows.n
        wanted = enough if n is None else min(enough, n)
        size = wanted if self.setting.size is None else self.setting.size
        memory = 1.0 if self.setting.kind == "batch" else 1 / self.setting.rho
        if size * memory < wanted:
            warnings.warn(
                f"size={size} rows carry too little for a reference: a plain estimate takes "
                f"{self.depth * batch_size}, and ten times that many, {enough}, are needed for the "
                "antithetic one to be better",
                stacklevel=5,
            )
        return size
