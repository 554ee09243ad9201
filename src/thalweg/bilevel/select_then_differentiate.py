"""HG-MS: select among the lower level's minimizers, then differentiate."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult

from thalweg.bilevel.array_objectives import ArrayLower, ArrayObjectives, ArrayUpper
from thalweg.bilevel.bilevel_objectives import BilevelObjectives
from thalweg.bilevel.inverse_hessians import LowerHessian
from thalweg.bilevel.neumann_series import NotFiniteProductError
from thalweg.bilevel.optimistic_selection import (
    GD,
    Langevin,
    Objectives,
    Select,
    Selection,
    Selector,
)
from thalweg.bilevel.pseudoinverses import NotMinimizerError, PInv
from thalweg.bilevel.stochastic_hypergradients import Hypergradient
from thalweg.common.checks import check_integer, check_number
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
    1: "The hypergradient is at most gtol.",
    2: "Interrupted; x and y are those of the last selection.",
    3: "f, g or a derivative is not finite; x and y are those of the last selection.",
    4: "The lower level is not solved: its gradient is {:.3g}; raise the steps of inner.",
    5: "{}",
    99: "The callback raised StopIteration.",
}
Factory = Callable[[list["torch.Tensor"]], "torch.optim.Optimizer"]
RECORDED = ("nit", "time", "fun", "grad_norm", "residual", "tangential", "n_grad", "n_hvp")
UNSOLVED = 1e-3  # a residual, relative to its first value, above which there is no selection


def hg_ms(
    f: Callable[..., torch.Tensor] | ArrayUpper,
    g: Callable[..., torch.Tensor] | ArrayLower,
    x0: Any,
    y0: Any,
    *,
    outer_lr: float = 0.1,
    maxiter: int = 200,
    gtol: float = 0.0,
    inner: GD | None = None,
    select: Select | Langevin | None = None,
    solve: PInv | None = None,
    optimizer_x: Factory | None = None,
    project_x: Callable[[Any], Any] | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[..., Any] | None = None,
    show_progress: bool | None = False,
) -> OptimizeResult:
    r"""Minimize the best upper value over all minimizers of the lower level.

    .. math:: \min_x \Phi(x), \qquad \Phi(x) = \min_{y \in S(x)} f(x, y), \qquad
              S(x) = \arg\min_y g(x, y)

    S(x) may be a manifold, as it is for models with more parameters than data. Each step restores y
    to it by steps on g, selects the point of it that is best for f, and differentiates there:

    .. math:: \nabla \Phi(x) = \nabla_x f - \nabla^2_{xy} g \, (\nabla^2_{yy} g)^\dagger \nabla_y f

    where the selection is unique and g satisfies a local Polyak-Łojasiewicz condition. At another
    point of S(x), the formula gives the gradient of nothing.

    Parameters
    ----------
    f, g : callable
        ``f(x, y)`` and ``g(x, y)``: scalar tensors, g twice differentiable in y. Or `ArrayUpper`
        and `ArrayLower`, for NumPy functions with derivatives of their own.
    x0, y0 : Tensor, or dicts, lists and tuples of them
        The starts; arrays for NumPy functions. Double precision is needed for small residuals.
    outer_lr : float > 0
        The step size of gradient descent on Φ, where no optimizer is given.
    maxiter : int ≥ 1
        Steps of x.
    gtol : float ≥ 0
        Stop when the norm of the hypergradient is at most this.
    inner : GD, optional
        How y is restored.
    select : Select or Langevin, optional
        How the selection is found. ``Select(steps=0)`` differentiates where the inner steps end.
    solve : PInv, optional
        The pseudoinverse.
    optimizer_x : callable, optional
        ``optimizer(params)``: a torch optimizer in place of gradient descent.
    project_x : callable, optional
        ``project_x(x)``: the nearest point of a feasible set, in the layout of x.
    generator : torch.Generator, optional
        For restarts.
    callback : callable, optional
        Called after each step with the ``intermediate_result``, or with x. It may raise
        `StopIteration`.
    show_progress : bool or None
        Whether to show a progress bar; None shows it on a terminal.

    Returns
    -------
    OptimizeResult
        ``x`` and its selection ``y``; ``fun``, Φ(x); ``grad_norm``; ``n_selections``, the number of
        points found at the last restart whose f is the least to a millionth (Φ has a kink if there
        are several); ``n_grad`` and ``n_hvp``, gradients and Hessian-vector products; ``history``,
        arrays of ``nit``, ``time``, ``fun``, ``grad_norm``, ``residual`` (``‖∇ᵧg‖``),
        ``tangential`` (``‖P∇ᵧf‖``), ``n_grad``, ``n_hvp``; ``nit``, ``success``, ``status``,
        ``message``. Ctrl-C, a value that is not finite, a lower level that is not solved or has
        negative curvature end the run with what there is.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Warns
    -----
    UserWarning
        If f does not depend on y, so that nothing is selected.

    Notes
    -----
    *Cost.* Per step ``inner.steps`` gradients; per tangential step a gradient and a pseudoinverse:
    d products and an eigendecomposition up to 500 parameters, two products per iteration of LSMR
    beyond. The last one of them also gives the hypergradient.

    *Kinks.* Where two selections tie, Φ has a kink and steps of a fixed size oscillate around it:
    lower ``outer_lr``, and look at `regularity_report`.

    *When not.* With a strongly convex lower level there is one minimizer: use
    ``hypergradient(..., solve=CG())``. With well-conditioned lower levels a tuned penalty method is
    cheaper; see the evidence.

    *Ours.* The paper's are the formula, and selecting before differentiating. Descent with
    Barzilai-Borwein steps and Newton restorations, tangential restarts, nets and Langevin steps are
    our resolution of the explicit selection.

    References
    ----------
    "HG-MS: select-then-differentiate optimistic bilevel optimization", NeurIPS 2026.

    Examples
    --------
    The lower level's minimizers are the unit circle; the upper level wants y near x, and x near
    (3, 0):

    >>> import torch
    >>> from thalweg.bilevel import hg_ms
    >>> target = torch.tensor([3.0, 0.0], dtype=torch.float64)
    >>> def f(x, y):
    ...     return ((y - x) ** 2).sum() / 2 + ((x - target) ** 2).sum()
    >>> def g(x, y):
    ...     return (y.dot(y) - 1) ** 2 / 4
    >>> start = torch.tensor([0.6, 0.8], dtype=torch.float64)
    >>> result = hg_ms(f, g, start, start, outer_lr=0.2, maxiter=60)
    >>> [round(float(v), 4) for v in (*result.x, *result.y)]
    [2.3333, 0.0, 1.0, 0.0]
    """
    check_number("outer_lr", outer_lr, above=0)
    check_integer("maxiter", maxiter, at_least=1)
    check_number("gtol", gtol, at_least=0)
    for name, value, kinds in (
        ("inner", inner, GD),
        ("select", select, (Select, Langevin)),
        ("solve", solve, PInv),
    ):
        if value is not None and not isinstance(value, kinds):
            raise TypeError(f"{name} must be {_names(kinds)}, got {type(value).__name__}")
    for name, function in (("project_x", project_x), ("optimizer_x", optimizer_x)):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable or None, got {type(function).__name__}")
    objectives = make_objectives(f, g, x0, y0)
    run = SelectionRun(
        objectives,
        Selector(objectives, inner or GD(), select or Select(), solve or PInv(), generator),
        _start(objectives, "x", x0),
        _start(objectives, "y", y0),
        optimizer_x or (lambda params: torch.optim.SGD(params, lr=outer_lr)),
        project_x,
    )
    status, detail, history = _run(run, maxiter, gtol, intermediate_report(callback), show_progress)
    return _result(run, status, detail, history)


def pseudoinverse_hypergradient(
    f: Callable[..., torch.Tensor] | ArrayUpper,
    g: Callable[..., torch.Tensor] | ArrayLower,
    x: Any,
    y: Any,
    *,
    solve: PInv | None = None,
) -> Hypergradient:
    """Return the hypergradient at a minimizer y of g, with the pseudoinverse of its Hessian.

    It is the gradient of Φ if y is the optimistic selection, which ``residual`` tells: the share of
    ∇ᵧf along the manifold, 0 at a selection.

    Parameters
    ----------
    f, g : callable, or ArrayUpper and ArrayLower
    x, y : Tensor or trees, or arrays
    solve : PInv, optional

    Returns
    -------
    Hypergradient

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.
    NotMinimizerError
        If g has negative curvature at y.

    Examples
    --------
    >>> import torch
    >>> from thalweg.bilevel import pseudoinverse_hypergradient
    >>> found = pseudoinverse_hypergradient(
    ...     lambda x, y: ((y - x) ** 2).sum() / 2, lambda x, y: (y.dot(y) - 1) ** 2 / 4,
    ...     torch.tensor([2.0, 0.0]), torch.tensor([1.0, 0.0]),
    ... )
    >>> round(float(found.grad[0]), 6), found.residual, found.rank
    (1.0, 0.0, 1)
    """
    objectives = make_objectives(f, g, x, y)
    point = _start(objectives, "x", x), _start(objectives, "y", y)
    solver = PInv() if solve is None else solve
    f_x, f_y = objectives.upper_gradients(*point)
    products = objectives.hessian(*point)
    solution = solver(LowerHessian(lambda k, V: products(V), products), f_y)
    grad = f_x - objectives.cross_product(*point, solution.v)
    return Hypergradient(
        grad=objectives.x.tree(grad),
        v=objectives.y.tree(solution.v),
        residual=solution.residual,
        rank=solution.rank,
    )


def make_objectives(f: Any, g: Any, x0: Any, y0: Any) -> Objectives:
    """Return both levels over vectors, from torch functions or from NumPy ones."""
    arrays = isinstance(f, ArrayUpper), isinstance(g, ArrayLower)
    if all(arrays):
        return ArrayObjectives(f, g, x0, y0)
    if any(arrays):
        raise TypeError("f and g must both be torch functions, or ArrayUpper and ArrayLower")
    return BilevelObjectives(f, g, x0, y0)


def _start(objectives: Objectives, level: str, value: Any) -> torch.Tensor:
    if isinstance(objectives, ArrayObjectives):
        value = torch.as_tensor(np.asarray(value, dtype=np.float64))
    layout = objectives.x if level == "x" else objectives.y
    return layout.vector(value).detach().clone()


def _names(kinds: Any) -> str:
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join(kind.__name__ for kind in listed)


class UnsolvedError(Exception):
    """The lower level is not solved; the argument is the residual."""


class SelectionRun:
    """The state of a run: x, its selection, and the hypergradient there."""

    def __init__(
        self,
        objectives: Objectives,
        selector: Selector,
        x: torch.Tensor,
        y: torch.Tensor,
        optimizer_x: Factory,
        project_x: Callable[[Any], Any] | None,
    ) -> None:
        self.objectives, self.selector = objectives, selector
        self.x = x
        self.project_x = project_x
        self.optimizer = optimizer_x([self.x])
        self.t = 0
        self.n_selections = 1
        self.grad = torch.full_like(x, torch.nan)
        self.at = x.clone()  # where the selection was made
        self.selection: Selection | None = None
        self._y = y
        self._first = float(objectives.lower_gradient(x, y).norm())

    def select(self) -> None:
        """Find the selection at x, and the hypergradient."""
        found = self.selector(self.x, self._y, self.t)
        if not np.isfinite([found.value, found.residual]).all():
            raise NotFiniteError("f, g or a derivative")
        if found.residual > max(UNSOLVED * self._first, 1e-6):
            raise UnsolvedError(found.residual)
        f_x, f_y = self.objectives.upper_gradients(self.x, found.y)
        if self.t == 0 and not self._depends_on_y(found, f_y):
            warnings.warn(
                "f does not depend on y at the start: nothing is selected, and the hypergradient "
                "is that of f in x",
                stacklevel=5,
            )
        grad = f_x - self.objectives.cross_product(self.x, found.y, found.solution.v)
        if not bool(torch.isfinite(grad).all()):
            raise NotFiniteError("f, g or a derivative")
        self.grad, self.selection, self._y, self.at = grad, found, found.y, self.x.clone()
        if self.t % self.selector.search.restart_every == 0:
            self.n_selections = 1 + len(found.others)

    def _depends_on_y(self, found: Selection, f_y: torch.Tensor) -> bool:
        if float(f_y.norm()) > 0:
            return True
        elsewhere = self.objectives.upper(self.x, found.y + 1.0)
        return float(elsewhere.detach()) != found.value

    def step(self) -> None:
        """Move x against the hypergradient."""
        self.x.grad = self.grad.clone()
        self.optimizer.step()
        if self.project_x is not None:
            given = self.objectives.x.tree(self.x.clone())
            if isinstance(self.objectives, ArrayObjectives):
                tree = torch.as_tensor(np.asarray(self.project_x(given.numpy()), dtype=np.float64))
            else:
                tree = self.project_x(given)
            self.x.copy_(self.objectives.x.vector(tree).detach())
        self.t += 1

    def points(self) -> tuple[Any, Any]:
        """Return copies of x and of its selection, as they were given."""
        y = self._y if self.selection is None else self.selection.y
        x_tree = self.objectives.x.tree(self.at.clone())
        y_tree = self.objectives.y.tree(y.clone())
        if isinstance(self.objectives, ArrayObjectives):
            return x_tree.numpy(), y_tree.numpy()
        return x_tree, y_tree


def _run(
    run: SelectionRun,
    maxiter: int,
    gtol: float,
    report: Report | None,
    show_progress: bool | None,
) -> tuple[int, Any, dict[str, Any]]:
    """Make steps; return why they end, what else there is to say, and the records."""
    begin, records = time.perf_counter(), []
    status: int = 0
    detail: Any = None
    try:
        with progress("HG-MS", maxiter + 1, show=show_progress) as advance:
            for t in range(maxiter + 1):
                run.select()
                records.append(_record(run, time.perf_counter() - begin))
                advance()
                if report is not None:
                    x, y = run.points()
                    report(x=x, y=y, **records[-1])
                if records[-1]["grad_norm"] <= gtol:
                    status = 1
                    break
                if t < maxiter:
                    run.step()
    except StopIteration:
        status = 99
    except KeyboardInterrupt:
        status = 2
    except (NotFiniteError, NotFiniteProductError):
        status = 3
    except UnsolvedError as error:
        status, detail = 4, error.args[0]
    except NotMinimizerError as error:
        status, detail = 5, str(error)
    return status, detail, {name: np.array([r[name] for r in records]) for name in RECORDED}


def _record(run: SelectionRun, seconds: float) -> dict[str, float]:
    assert run.selection is not None
    return {
        "nit": run.t,
        "time": seconds,
        "fun": run.selection.value,
        "grad_norm": float(run.grad.norm()),
        "residual": run.selection.residual,
        "tangential": run.selection.tangential,
        "n_grad": run.selector.n_grad,
        "n_hvp": run.selector.n_hvp,
    }


def _result(run: SelectionRun, status: int, detail: Any, history: dict[str, Any]) -> OptimizeResult:
    x, y = run.points()
    return optimize_result(
        x=x,
        y=y,
        fun=float("nan") if run.selection is None else run.selection.value,
        grad=run.objectives.x.tree(run.grad.clone()),
        grad_norm=float(run.grad.norm()),
        n_selections=run.n_selections,
        n_grad=run.selector.n_grad,
        n_hvp=run.selector.n_hvp,
        nit=run.t,
        success=status in (0, 1),
        status=status,
        message=MESSAGES[status].format(detail),
        history=history,
    )
