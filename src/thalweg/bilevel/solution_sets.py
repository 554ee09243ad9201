"""Hyper-objectives over lower levels with many solutions, and what they ask of a follower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.bilevel.section_minimization import RecessionError, Section
from thalweg.common.checks import check_array, check_choice, check_number

Array = NDArray[np.float64]
Mode = Literal["optimistic", "pessimistic"]
MODES = ("optimistic", "pessimistic")


class UnboundedError(ValueError):
    """F is unbounded on the solutions of the lower level: there is no hyper-objective."""


class Selection(NamedTuple):
    """A solution of the lower level and the upper value there.

    Parameters
    ----------
    phi : float
        F(x, y); infinite if S(x) is empty.
    y : ndarray of shape (n,)
        The best or the worst point of S(x).
    gap : float
        An estimate of how far phi is from the hyper-objective.
    """

    phi: float
    y: Array
    gap: float


@runtime_checkable
class SetValuedFollower(Protocol):
    """A lower level f(x, ·) with a closed convex set S(x) of minimizers."""

    constrained: bool
    """Whether f is minimized subject to constraints, which the theory does not cover."""

    def minimize(self, section: Section, x: Array, tol: float, start: Array | None) -> Selection:
        """Return a minimizer of a convex function over S(x), with a gap of about ``tol``."""

    def project(self, x: Array, v: Array) -> Array:
        """Return the point of S(x) that is nearest to v."""

    def gradient(self, x: Array, y: Array) -> Array:
        """Return ∇_y f(x, y)."""

    def size(self, x: Array) -> int:
        """Return n, the number of entries of y."""


@dataclass(frozen=True, eq=False)
class HyperObjective:
    r"""The best or the worst upper value over all solutions of the lower level.

    .. math:: \varphi_o(x) = \min_{y \in S(x)} F(x, y), \qquad
              \varphi_p(x) = \max_{y \in S(x)} F(x, y), \qquad
              S(x) = \arg\min_y f(x, y)

    Parameters
    ----------
    follower : SetValuedFollower
        For example `LeastSquaresFollower`, `LinearSystemFollower`, `TranslatedBoxFollower`,
        `ConvexFollower`.
    F : callable
        ``F(x, y) -> float``, convex in y to be used optimistically, concave pessimistically. If it
        is neither, values are those of local optima.
    grad_y : callable, optional
        ``grad_y(x, y) -> (n,)``; by default by central differences, 2n values each.
    hess_y : callable, optional
        ``hess_y(x, y) -> (n, n)``: affine followers then take Newton steps.

    Raises
    ------
    TypeError
        If an argument is not as described.

    Examples
    --------
    All y with y₁ + y₂ = x solve the lower level. The nearest of them to (1, 0) is picked:

    >>> import numpy as np
    >>> from thalweg.bilevel import HyperObjective, LeastSquaresFollower
    >>> phi = HyperObjective(
    ...     LeastSquaresFollower([[1.0, 1.0]], [[1.0]]),
    ...     lambda x, y: np.sum((y - [1.0, 0.0]) ** 2),
    ... )
    >>> value, y, gap = phi.value([2.0])
    >>> round(value, 6), y.round(6)
    (0.5, array([1.5, 0.5]))
    """

    follower: SetValuedFollower
    F: Callable[[Array, Array], float]
    grad_y: Callable[[Array, Array], ArrayLike] | None = None
    hess_y: Callable[[Array, Array], ArrayLike] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.follower, SetValuedFollower):
            raise TypeError(
                "follower must have the methods minimize, project, gradient and size and the "
                f"attribute constrained, got {type(self.follower).__name__}"
            )
        for name in ("F", "grad_y", "hess_y"):
            given = getattr(self, name)
            if not callable(given) and (name == "F" or given is not None):
                raise TypeError(f"{name} must be callable, got {type(given).__name__}")

    def value(
        self,
        x: ArrayLike,
        mode: Mode = "optimistic",
        tol: float = 1e-8,
        start: Array | None = None,
    ) -> Selection:
        """Solve the lower level at x and select among its solutions.

        Parameters
        ----------
        x : array_like of shape (m,)
        mode : {"optimistic", "pessimistic"}
            Whether to take the best or the worst solution.
        tol : float > 0
            The accuracy of the value.
        start : ndarray of shape (n,), optional
            A guess of y, such as that of a neighboring x.

        Raises
        ------
        TypeError, ValueError
            If an argument is not as described, or F(x, ·) is unbounded on S(x) in the sense of
            ``mode``; the message names a direction of recession.
        """
        x = check_array("x", x, shape=("m",))
        check_choice("mode", mode, MODES)
        check_number("tol", tol, above=0)
        try:
            found = self.follower.minimize(self._section(x, mode), x, tol, start)
        except RecessionError as error:
            side = "below" if mode == "optimistic" else "above"
            raise UnboundedError(
                f"F(x, ·) must be bounded {side} on S(x) in {mode} mode, but has no bound at x = "
                f"{_show(x)} in the direction y = {_show(error.direction)}"
            ) from None
        if mode == "optimistic" or np.isinf(found.phi):
            return found
        return found._replace(phi=-found.phi)

    def __call__(self, x: ArrayLike, mode: Mode = "optimistic", tol: float = 1e-8) -> float:
        """Return the value at x alone."""
        return self.value(x, mode, tol).phi

    def _section(self, x: Array, mode: Mode) -> Section:
        """Return F(x, ·), or -F(x, ·) for the worst case, as what is minimized over S(x)."""
        sign = 1.0 if mode == "optimistic" else -1.0
        F, grad, hess = self.F, self.grad_y, self.hess_y
        return Section(
            lambda y: sign * float(F(x, y)),
            None if grad is None else lambda y: sign * np.asarray(grad(x, y), dtype=np.float64),
            None if hess is None else lambda y: sign * np.asarray(hess(x, y), dtype=np.float64),
        )


def _show(vector: Array) -> str:
    return np.array2string(vector, precision=4, threshold=8, separator=", ")
