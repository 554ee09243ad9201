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
    Report,
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
LOOK_EVERY = 10
MESSAGES = {
    0: "The gap is at most tol, or a point with gradient 0 was found.",
    1: "The budget of rounds is spent.",
    2: "Interrupted; x is the average so far.",
    99: "The callback raised StopIteration.",
}


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
        status 0: gap reached, or a point with gradient 0; 1: budget spent; 2: Ctrl-C; 99: callback.

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
    run = _Run(
        player,
        value=lambda x: float(value_of(x, *args)),
        gradient=lambda x: gradient_of(x, *args, **keywords),
        normalize=lipschitz is None,
        tol=tol,
        report=report,
    )
    status = run.go(maxiter)
    x = run.average.x
    return optimize_result(
        x=x,
        fun=run.value(x),
        gap=run.average.gap(),
        nit=run.nit,
        nfev=run.nfev + 1,
        njev=run.nit,
        n_oracle=player.n_oracle_calls_,
        n_updates=player.n_updates_,
        success=status in (0, 1),
        status=status,
        message=MESSAGES[status],
    )


class _Run:
    """Rounds of the player, what they average to, and why they end."""

    def __init__(
        self,
        player: EllipsoidOCO,
        *,
        value: Callable[[Vector], float],
        gradient: Callable[[Vector], ArrayLike],
        normalize: bool,
        tol: float | None,
        report: Report | None,
    ) -> None:
        self.player, self.value, self.gradient = player, value, gradient
        self.normalize, self.tol, self.report = normalize, tol, report
        self.average = _Average(player)
        self.nit = self.nfev = 0

    def go(self, maxiter: int) -> int:
        """Play up to ``maxiter`` rounds; return the status."""
        try:
            while self.nit < maxiter:
                self.nit += 1
                if self._round() or (self.nit % LOOK_EVERY == 0 and self._look()):
                    return 0
        except KeyboardInterrupt:
            return 2
        except StopIteration:
            return 99
        return 1

    def _round(self) -> bool:
        """Play a round; return whether the point played has gradient 0."""
        w = self.player.select()
        gradient = check_array("jac(x)", self.gradient(w), shape=w.shape)
        length = math.sqrt(gradient @ gradient)
        if length == 0:
            self.average.restart(w)
            return True
        weight = 1 / length if self.normalize else 1.0
        if not self.player.is_shrinking_:
            self.average.add(w, gradient, weight)
        self.player.update(weight * gradient)
        return False

    def _look(self) -> bool:
        """Report; return whether the gap is at most ``tol``."""
        gap = self.average.gap()
        if self.tol is not None and gap <= self.tol:
            return True
        if self.report is not None:
            self.nfev += 1
            x = self.average.x
            self.report(x=x, fun=self.value(x), gap=gap, nit=self.nit)
        return False


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
        # Without a play that counts it is the feasible point.
        return self.points / (self.weight or 1.0)

    def gap(self) -> float:
        if self.weight == 0:
            return math.inf
        center, H = self.player.center_, self.player.shape_
        least = float(self.total @ center) - math.sqrt(max(0.0, float(self.total @ H @ self.total)))
        return (self.slope - least) / self.weight
