"""Stochastic bilevel descent with antithetic hypergradients: ANE-SGD and ANE-VR."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from scipy.optimize import OptimizeResult

from thalweg.bilevel.hessian_references import HessianReference
from thalweg.bilevel.inverse_hessians import AntitheticNeumann, InverseHessian
from thalweg.bilevel.neumann_series import NotFiniteProductError
from thalweg.bilevel.row_sources import Data, RowSource
from thalweg.bilevel.stochastic_hypergradients import StochasticHypergradient, reference_setting
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    NotFiniteError,
    Report,
    intermediate_report,
    optimize_result,
)
from thalweg.common.optional import requires
from thalweg.common.progress import progress

with requires("bilevel"):
    import torch

MESSAGES = {
    0: "All steps are made.",
    2: "Interrupted; x and y are those of the last full step.",
    3: "{} is not finite; x and y are those of the step before.",
    99: "The callback raised StopIteration.",
}
Factory = Callable[[list["torch.Tensor"]], "torch.optim.Optimizer"]


def ane_bilevel(
    f: Callable[..., torch.Tensor],
    g: Callable[..., torch.Tensor],
    x0: Any,
    y0: Any,
    *,
    inner_data: Data,
    outer_data: Data,
    variant: Literal["sgd", "vr"] = "sgd",
    maxiter: int = 1000,
    lr_x: float = 0.1,
    lr_y: float = 0.1,
    inner_steps: int = 5,
    batch_size: int = 32,
    outer_batch_size: int | None = None,
    hessian_batch_size: int | None = None,
    K: int = 20,
    eta: float | None = None,
    reference: str | Callable[..., Any] | HessianReference = "full",
    refresh: int = 10,
    solve: InverseHessian | None = None,
    vr: float = 0.1,
    optimizer_x: Factory | None = None,
    optimizer_y: Factory | None = None,
    project_x: Callable[[Any], Any] | None = None,
    record_every: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[..., Any] | None = None,
    show_progress: bool | None = False,
) -> OptimizeResult:
    r"""Minimize an upper loss over x, where y minimizes a lower one, from batches of both.

    .. math:: \min_x f(x, y^*(x)), \qquad y^*(x) = \arg\min_y g(x, y)

    Each step makes some steps of SGD on g, and then one against the hypergradient
    :math:`\nabla_x f - \nabla^2_{xy} g\, v`, where v estimates :math:`(\nabla^2_{yy} g)^{-1}
    \nabla_y f` by the antithetic Neumann series of `antithetic_neumann`. No Hessian is formed
    unless the reference asks for one.

    Parameters
    ----------
    f, g : callable
        ``f(x, y, batch)`` and ``g(x, y, batch)``: scalar tensors, means over the rows of a batch.
        g should be strongly convex in y; twice differentiable it must be.
    x0, y0 : Tensor, or dicts, lists and tuples of them
        Where both levels start, as of a module's ``named_parameters`` for
        `torch.func.functional_call`.
    inner_data, outer_data : Tensor, sequence of Tensor, or callable
        Rows of g and f: a batch holds the same rows of every tensor. Put ``torch.arange(n)`` among
        them if x has an entry per row. A function ``draw(size, generator)`` returns a batch itself.
    variant : {"sgd", "vr"}
        ANE-SGD, or ANE-VR with recursive momentum (STORM) on both levels: every batch, those of the
        Hessians included, is evaluated at the present and at the previous point.
    maxiter : int ≥ 1
        Steps of x.
    lr_x, lr_y : float > 0
        Step sizes of SGD on both levels, where no optimizer is given.
    inner_steps : int ≥ 1
        Steps of y for each of x.
    batch_size : int ≥ 1
        Rows of each batch of g.
    outer_batch_size : int ≥ 1, optional
        Rows of each batch of f; by default ``batch_size``.
    hessian_batch_size : int ≥ 1, optional
        Rows of each batch of g for the Hessians of the series; by default ``batch_size``.
    K : int ≥ 1
        Terms of the series.
    eta : float > 0, optional
        Its step; by default half the inverse of the reference's largest eigenvalue.
    reference : {"full", "batch", "ema", "recursive"}, callable or HessianReference
        Where the reference Hessian comes from.
    refresh : int ≥ 1
        Steps between its refreshes, unless ``reference`` is a `HessianReference`.
    solve : InverseHessian, optional
        Another estimator of v in place of the antithetic one with ``K`` and ``eta``: `Neumann`
        makes the method stocBiO (or, with "vr", MRBO), `CG` AmIGO's, `ReferenceNeumann` the series
        with the reference alone.
    vr : float in (0, 1]
        The weight of fresh estimates in "vr"; with 1 it is "sgd".
    optimizer_x, optimizer_y : callable, optional
        ``optimizer(params)``: a torch optimizer in place of SGD with ``lr_x`` or ``lr_y``, as
        ``lambda params: torch.optim.Adam(params, lr=0.01)``.
    project_x : callable, optional
        ``project_x(x)``: the nearest point of a feasible set, in the layout of x.
    record_every : int ≥ 1, optional
        Steps between records; by default a hundred records.
    generator : torch.Generator, optional
        Draws all batches.
    callback : callable, optional
        Called at each record with the ``intermediate_result``, or with x. It may raise
        `StopIteration`.
    show_progress : bool or None
        Whether to show a progress bar; None shows it on a terminal.

    Returns
    -------
    OptimizeResult
        ``x``, ``y``; ``fun``, f of all rows of ``outer_data`` (of one batch, if they are drawn by a
        function); ``history``, arrays of ``nit``, ``time``, ``fun``, ``grad_norm`` (of the last
        hypergradient), ``odd_share`` (the odd part's norm relative to v's; NaN for other
        estimators); ``n_diverged``, pairs of chains that were cut off; ``n_grad_inner``,
        ``n_grad_outer``, ``n_hvp`` and ``n_reference_rows``, the last four in rows; ``nit``,
        ``success``, ``status``, ``message``. Ctrl-C returns what there is.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, or a series that diverges.

    Warns
    -----
    UserWarning
        If the reference holds less than ten times the rows of one plain estimate; see also
        `antithetic_neumann`.

    Notes
    -----
    *Cost.* Per step ``inner_steps`` gradients of g, one of f, one mixed derivative, K - 1 gradients
    of g each with two products, and K - 1 products with the reference. "vr" doubles all of it, and
    its memory is three more copies of x and y.

    *When not.* Where noise of hypergradients is averaged out by many steps, plain series do as
    well; where the reference is exact, the series with it alone (`ReferenceNeumann`) does, at a
    third of the products. See the evidence.

    *Ours.* The paper's are the antithetic pairs and their use in SGD and with recursive variance
    reduction. References, their refreshes, and the step of the series are our resolution.

    References
    ----------
    "Antithetic Neumann estimator", NeurIPS 2026.
    K. Ji, J. Yang and Y. Liang, "Bilevel optimization: convergence analysis and enhanced design",
    ICML 2021.
    J. Yang, K. Ji and Y. Liang, "Provably faster algorithms for bilevel optimization", NeurIPS
    2021.

    Examples
    --------
    Weights of training rows, by the loss on clean rows:

    >>> import torch
    >>> from thalweg.bilevel import ane_bilevel
    >>> _ = torch.manual_seed(0)
    >>> A = torch.randn(200, 3)
    >>> b = (A @ torch.tensor([1.0, -1.0, 0.5]) > 0).float()
    >>> b[:30] = 1 - b[:30]  # wrong labels
    >>> loss = torch.nn.functional.binary_cross_entropy_with_logits
    >>> def g(x, y, batch):
    ...     a, label, row = batch
    ...     losses = loss(a @ y, label, reduction="none")
    ...     return (x[row].sigmoid() * losses).mean() + 0.01 * y.dot(y)
    >>> def f(x, y, batch):
    ...     return loss(batch[0] @ y, batch[1])
    >>> result = ane_bilevel(
    ...     f, g, torch.zeros(200), torch.zeros(3),
    ...     inner_data=(A[:150], b[:150], torch.arange(150)), outer_data=(A[150:], b[150:]),
    ...     maxiter=100, lr_x=20.0, lr_y=0.5, generator=torch.Generator().manual_seed(0),
    ... )
    >>> bool(result.x[:30].mean() < result.x[30:150].mean())
    True
    """
    check_choice("variant", variant, ("sgd", "vr"))
    check_integer("maxiter", maxiter, at_least=1)
    check_integer("inner_steps", inner_steps, at_least=1)
    check_number("lr_x", lr_x, above=0)
    check_number("lr_y", lr_y, above=0)
    check_number("vr", vr, above=0, at_most=1)
    for name, number in (
        ("outer_batch_size", outer_batch_size),
        ("hessian_batch_size", hessian_batch_size),
        ("record_every", record_every),
    ):
        if number is not None:
            check_integer(name, number, at_least=1)
    for name, function in (
        ("project_x", project_x),
        ("optimizer_x", optimizer_x),
        ("optimizer_y", optimizer_y),
    ):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable or None, got {type(function).__name__}")
    engine = StochasticHypergradient(
        f,
        g,
        x0,
        y0,
        solve=AntitheticNeumann(K=K, eta=eta) if solve is None else solve,
        reference=reference_setting(reference, **_refresh(reference, refresh)),
        inner_data=inner_data,
        batch_size=hessian_batch_size or check_integer("batch_size", batch_size, at_least=1),
        generator=generator,
    )
    run = BilevelDescent(
        engine,
        x0,
        y0,
        (RowSource("outer_data", outer_data), outer_batch_size or batch_size),
        (RowSource("inner_data", inner_data), batch_size),
        inner_steps,
        vr if variant == "vr" else 1.0,
        optimizer_x or (lambda params: torch.optim.SGD(params, lr=lr_x)),
        optimizer_y or (lambda params: torch.optim.SGD(params, lr=lr_y)),
        project_x,
        generator,
    )
    every = record_every or max(1, maxiter // 100)
    status, history = _run(run, maxiter, every, intermediate_report(callback), show_progress)
    return _result(run, status, history)


def _refresh(reference: Any, refresh: int) -> dict[str, int]:
    return {} if isinstance(reference, HessianReference) else {"refresh": refresh}


class BilevelDescent:
    """The state of a run: both levels' points and momenta."""

    def __init__(
        self,
        engine: StochasticHypergradient,
        x0: Any,
        y0: Any,
        outer: tuple[RowSource, int],
        inner: tuple[RowSource, int],
        inner_steps: int,
        vr: float,
        optimizer_x: Factory,
        optimizer_y: Factory,
        project_x: Callable[[Any], Any] | None,
        generator: torch.Generator | None,
    ) -> None:
        self.engine, self.objectives = engine, engine.objectives
        self.outer, self.inner = outer, inner
        self.inner_steps, self.vr = inner_steps, vr
        self.project_x, self.generator = project_x, generator
        self.x = self.objectives.x.vector(x0).detach().clone()
        self.y = self.objectives.y.vector(y0).detach().clone()
        self.optimizer_x, self.optimizer_y = optimizer_x([self.x]), optimizer_y([self.y])
        self.t = self.n_diverged = self.n_grad_inner = self.n_grad_outer = 0
        self.grad_norm = self.odd_share = float("nan")
        self._x_momentum: torch.Tensor | None = None
        self._y_momentum: torch.Tensor | None = None
        self._x_before = (self.x.clone(), self.y.clone())
        self._y_before = (self.x.clone(), self.y.clone())

    def step(self) -> None:
        """Make the steps of y and one of x; leave both as they are if a gradient is not finite."""
        y = self.y.clone()
        try:
            for _ in range(self.inner_steps):
                self._step_of_y()
            self._step_of_x()
        except NotFiniteError:
            self.y.copy_(y)
            raise
        self.t += 1

    def value(self) -> float:
        """Return f of all rows, or of a batch where they are drawn by a function."""
        rows, size = self.outer
        batch = rows.draw(size, self.generator) if rows.n is None else rows.all()
        with torch.no_grad():
            return float(self.objectives.upper(self.x, self.y, batch))

    def trees(self) -> tuple[Any, Any]:
        """Return copies of x and y in their layouts."""
        return self.objectives.x.tree(self.x.clone()), self.objectives.y.tree(self.y.clone())

    def _step_of_y(self) -> None:
        rows, size = self.inner
        batch, here = rows.draw(size, self.generator), (self.x, self.y)

        def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.n_grad_inner += size
            return self.objectives.lower_gradient(x, y, batch)

        self._y_momentum = self._recursive(gradient, here, self._y_before, self._y_momentum)
        _finite("The gradient of g", self._y_momentum)
        self._y_before = (self.x.clone(), self.y.clone())
        self.y.grad = self._y_momentum.clone()
        self.optimizer_y.step()

    def _step_of_x(self) -> None:
        source, size = self.outer
        outer_batch = source.draw(size, self.generator)
        sizes = [self.inner[1]] + [self.engine.batch_size] * self.engine.solve.n_batches
        inner_batches = [self.inner[0].draw(rows, self.generator) for rows in sizes]
        self.engine.refresh(self.x, self.y, inner_batches)

        def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.n_grad_outer += size
            self.n_grad_inner += sum(sizes)
            try:
                grad, solution = self.engine.at(x, y, outer_batch, inner_batches)
            except NotFiniteProductError as error:
                raise NotFiniteError("A Hessian-vector product") from error
            self.n_diverged += solution.diverged
            if solution.odd_part is not None:
                norm = float(solution.v.norm())
                self.odd_share = float(solution.odd_part.norm()) / norm if norm > 0 else 0.0
            return grad

        here = (self.x, self.y)
        self._x_momentum = self._recursive(gradient, here, self._x_before, self._x_momentum)
        _finite("The hypergradient", self._x_momentum)
        self.grad_norm = float(self._x_momentum.norm())
        self._x_before = (self.x.clone(), self.y.clone())
        self.x.grad = self._x_momentum.clone()
        self.optimizer_x.step()
        if self.project_x is not None:
            tree = self.project_x(self.objectives.x.tree(self.x.clone()))
            self.x.copy_(self.objectives.x.vector(tree).detach())

    def _recursive(
        self,
        gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        here: tuple[torch.Tensor, torch.Tensor],
        before: tuple[torch.Tensor, torch.Tensor],
        momentum: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``m_t = h(z_t; ξ) + (1 - a)(m_{t-1} - h(z_{t-1}; ξ))``."""
        fresh = gradient(*here)
        if momentum is None or self.vr == 1:
            return fresh
        return fresh + (1 - self.vr) * (momentum - gradient(*before))


def _finite(name: str, gradient: torch.Tensor) -> None:
    if not bool(torch.isfinite(gradient).all()):
        raise NotFiniteError(name)


def _run(
    run: BilevelDescent,
    maxiter: int,
    every: int,
    report: Report | None,
    show_progress: bool | None,
) -> tuple[tuple[int, str], dict[str, np.ndarray[Any, Any]]]:
    """Make steps; return why they end, and the records."""
    begin = time.perf_counter()
    records = [_record(run, 0.0)]
    status, culprit = 0, ""
    try:
        with progress("ANE", maxiter, show=show_progress) as advance:
            for t in range(maxiter):
                run.step()
                advance()
                if (t + 1) % every == 0 or t + 1 == maxiter:
                    records.append(_record(run, time.perf_counter() - begin))
                    if report is not None:
                        x, y = run.trees()
                        report(x=x, y=y, **records[-1])
    except StopIteration:
        status = 99
    except KeyboardInterrupt:
        status = 2
    except NotFiniteError as error:
        status, culprit = 3, str(error)
    if records[-1]["nit"] != run.t:
        records.append(_record(run, time.perf_counter() - begin))
    history = {name: np.array([record[name] for record in records]) for name in records[0]}
    return (status, culprit), history


def _record(run: BilevelDescent, seconds: float) -> dict[str, float]:
    return {
        "nit": run.t,
        "time": seconds,
        "fun": run.value(),
        "grad_norm": run.grad_norm,
        "odd_share": run.odd_share,
    }


def _result(
    run: BilevelDescent, status: tuple[int, str], history: dict[str, np.ndarray[Any, Any]]
) -> OptimizeResult:
    code, culprit = status
    x, y = run.trees()
    return optimize_result(
        x=x,
        y=y,
        fun=float(history["fun"][-1]),
        nit=run.t,
        n_diverged=run.n_diverged,
        n_grad_inner=run.n_grad_inner,
        n_grad_outer=run.n_grad_outer,
        n_hvp=run.engine.n_hvp * run.engine.batch_size,
        n_reference_rows=run.engine.n_reference_rows,
        success=code == 0,
        status=code,
        message=MESSAGES[code].format(culprit),
        history=history,
    )
