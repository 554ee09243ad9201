"""Minimization over a set known by a separation oracle, by averaging an online player."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import OptimizeResult

from thalweg.common.checks import check_array, check_choice, check_integer, check_number
from thalweg.common.minimizers import (
    check_gradient_function,
    intermediate_report,
    optimize_result,
    refuse_constraints,
    rng_keyword,
    warn_of_unknown,
)
from thalweg.common.random import RNGLike, as_generator
from thalweg.convex.ellipsoid_oco import EllipsoidOCO, Eta
from thalweg.convex.gauge_distance import Oracle
from thalweg.convex.torch_functions import torch_value_and_gradient

Vector = NDArray[np.float64]

IGNORED = ("hess", "hessp")


def ellipsoid_minimize(
    fun: Callable[..., float],
    x0: ArrayLike,
    args: tuple[Any, ...] = (),
    *,
    jac: Callable[..., ArrayLike] | Literal["torch"],
    separation: Oracle,
    radius: float,
    inner_radius: float,
    center: ArrayLike | None = None,
    lipschitz: float | None = None,
    eta: Eta = "auto",
    maxiter: int = 1000,
    tol: float | None = None,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    **unknown: Any,
) -> OptimizeResult:
    r"""Minimize a convex function over a convex set known by a separation oracle.

    `EllipsoidOCO` plays against the gradients; the average of what it plays has
    f(x̄) - min f = Õ(√(d/T) + d²/T), however thin the set is. Gradients may be noisy.

    Usable as ``scipy.optimize.minimize(f, x0, jac=g, method=ellipsoid_minimize, options={...})``.

    Parameters
    ----------
    fun : callable
        ``fun(x, *args) -> float``; evaluated at the average, at the end and for each report.
    x0 : array_like of shape (d,)
        A point of the set, d ≥ 2.
    args : tuple, optional
        For ``fun`` and ``jac``.
    jac : callable or "torch"
        ``jac(x, *args) -> ndarray of shape (d,)``, a subgradient; with a parameter ``rng`` it is
        given the random stream. "torch": ``fun`` takes a tensor and is differentiated.
    separation, radius, inner_radius, center, eta
        As for `EllipsoidOCO`.
    lipschitz : float, optional
        Bound on ‖g‖; longer gradients are refused. By default gradients are scaled to length 1
        (normalized subgradients), and the average is weighted by their lengths.
    maxiter : int, default 1000
        Rounds T, one gradient each.
    tol : float, optional
        Stop when the ``gap`` is at most this; checked every 10 rounds.
    rng : int, Generator or None
    callback : callable, optional
        Called every 10 rounds with the average, or with a parameter ``intermediate_result``;
        `StopIteration` stops.
    **unknown
        Other options of `scipy.optimize.minimize`; bounds and constraints are refused, the
        oracle holds them.

    Returns
    -------
    OptimizeResult
        ``x`` (the average), ``fun``, ``gap``, ``nit``, ``nfev``, ``njev``, ``n_oracle`` (calls),
        ``n_updates`` (cuts), ``success, status, message``. ``gap`` bounds f(x) - min f from
        above if gradients are exact: what the linear lower bounds leave over the ellipsoid. It
        is pessimistic where constraints are active, as the ellipsoid is larger than the set.
        status 0: gap reached; 1: budget spent; 99: callback.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, or a gradient that is not finite.

    References
    ----------
    "Online convex optimization with a separation oracle", NeurIPS 2025.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import SeparationOracle, ellipsoid_minimize
    >>> target = np.array([2.0, 0.5])
    >>> thin = SeparationOracle.box([-1.0, -0.01], [1.0, 0.01])
    >>> result = ellipsoid_minimize(
    ...     lambda x: float(np.linalg.norm(x - target)),
    ...     np.zeros(2),
    ...     jac=lambda x: (x - target) / np.linalg.norm(x - target),
    ...     separation=thin,
    ...     radius=1.1,
    ...     inner_radius=0.01,
    ... )
    >>> np.allclose(result.x, [1.0, 0.01], atol=0.05)
    True
    """
    refuse_constraints("ellipsoid_minimize", unknown)
    warn_of_unknown(unknown, ignored=IGNORED)
    report = intermediate_report(callback)
    value_of, gradient_of = _functions(fun, jac)
    start = check_array("x0", x0, shape=("d",))
    check_integer("maxiter", maxiter, at_least=1)
    if tol is not None:
        check_number("tol", tol, at_least=0)
    keywords = rng_keyword(gradient_of, as_generator(rng))
    player = EllipsoidOCO(
        separation,
        len(start),
        radius=radius,
        inner_radius=inner_radius,
        feasible_point=start,
        center=center,
        lipschitz=1.0 if lipschitz is None else lipschitz,
        horizon=maxiter,
        eta=eta,
    )
    average = _Average(player)
    status, message, nfev = 1, "The budget of rounds is spent.", 0
    for nit in range(1, maxiter + 1):
        w = player.select()
        gradient = check_array("jac(x)", gradient_of(w, *args, **keywords), shape=start.shape)
        length = math.sqrt(gradient @ gradient)
        if length == 0:
            average.restart(w)
            status, message = 0, "A point with gradient 0 was found."
            break
        weight = 1.0 if lipschitz is not None else 1 / length
        if not player.is_shrinking_:
            average.add(w, gradient, weight)
        player.update(weight * gradient)
        if nit % 10 != 0:
            continue
        gap = average.gap()
        if tol is not None and gap <= tol:
            status, message = 0, "The gap is at most tol."
            break
        if report is not None:
            nfev += 1
            try:
                report(x=average.x, fun=value_of(average.x, *args), gap=gap, nit=nit)
            except StopIteration:
                status, message = 99, "callback raised StopIteration."
                break
    return optimize_result(
        x=average.x,
        fun=float(value_of(average.x, *args)),
        gap=average.gap(),
        nit=nit,
        nfev=nfev + 1,
        njev=nit,
        n_oracle=player.n_oracle_calls_,
        n_updates=player.n_updates_,
        success=status in (0, 1),
        status=status,
        message=message,
    )


def _functions(
    fun: Callable[..., Any], jac: Callable[..., ArrayLike] | Literal["torch"]
) -> tuple[Callable[..., float], Callable[..., ArrayLike]]:
    if not isinstance(jac, str):
        return fun, check_gradient_function(jac)
    check_choice("jac", jac, ("torch",))
    both = torch_value_and_gradient(fun)
    return (lambda x, *args: both(x, *args)[0]), (lambda x, *args: both(x, *args)[1])


class _Average:
    """The weighted average x̄ of plays, and a bound on f(x̄) - min f.

    By convexity f(x̄) - f(x) ≤ Σ aₜ⟨gₜ, wₜ - x⟩ / Σ aₜ, and x is in the ellipsoid.
    """

    def __init__(self, player: EllipsoidOCO) -> None:
        self.player = player
        self.restart(player.feasible_point)
        self.weight = 0.0

    def restart(self, x: Vector) -> None:
        """Forget all plays but ``x``, of gradient 0."""
        self.weight, self.points = 1.0, x.copy()
        self.slope, self.total = 0.0, np.zeros_like(x)

    def add(self, w: Vector, gradient: Vector, weight: float) -> None:
        if self.weight == 0:
            self.points = np.zeros_like(w)
        self.weight += weight
        self.points += weight * w
        self.slope += weight * float(gradient @ w)
        self.total += weight * gradient

    @property
    def x(self) -> Vector:
        return self.points / max(self.weight, np.finfo(float).tiny)

    def gap(self) -> float:
        center, H = self.player.center_, self.player.shape_
        least = float(self.total @ center) - math.sqrt(max(0.0, float(self.total @ H @ self.total)))
        return (self.slope - least) / self.weight
