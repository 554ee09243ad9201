"""A first-order oracle that answers batches of queries and counts rounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.convex.lp_geometry import check_p, dual_exponent, lp_norm

Array = NDArray[np.float64]
Batch = Callable[[Array], tuple[ArrayLike, ArrayLike]]


class Executor(Protocol):
    """What maps a function over inputs in parallel: an executor or a pool, also Ray's."""

    def map(self, function: Callable[..., Any], inputs: Any, /) -> Iterable[Any]:
        """Return the function's values in the order of the inputs."""
        ...


class RoundOracle:
    """Answers batches of queries, one round each, and counts what was asked.

    Parameters
    ----------
    fun_batch : callable
        ``fun_batch(X) -> (values, gradients)``: Q points (Q, d) to Q values (Q,) and Q
        subgradients (Q, d).
    p : float in [1, inf], default 2
        The function is Lipschitz in ℓp.
    lipschitz : float, optional
        Bound on the dual norm of subgradients; larger ones are refused.
    executor : object with ``map``, optional
        A `concurrent.futures.Executor`, `multiprocessing` pool or `ray.util.multiprocessing.Pool`;
        it is given the batch in ``n_chunks`` pieces that run at the same time.
    n_chunks : int, default 1
        Usually the number of workers.

    Attributes
    ----------
    rounds, queries, width_max : int
        Batches, points in all, and the largest batch.

    Raises
    ------
    ValueError
        If the answer has a wrong shape, is not finite, or a subgradient is too large.

    Examples
    --------
    >>> oracle = RoundOracle(lambda X: (np.abs(X).sum(axis=1), np.sign(X)), p=float("inf"))
    >>> values, gradients = oracle(np.ones((3, 2)))
    >>> values.tolist(), oracle.rounds, oracle.queries
    ([2.0, 2.0, 2.0], 1, 3)
    """

    def __init__(
        self,
        fun_batch: Batch,
        p: float = 2.0,
        lipschitz: float | None = None,
        *,
        executor: Executor | None = None,
        n_chunks: int = 1,
    ) -> None:
        if not callable(fun_batch):
            raise TypeError(f"fun_batch must be callable, got {type(fun_batch).__name__}")
        self.fun_batch = fun_batch
        self.p = check_p(p)
        self.lipschitz = (
            None if lipschitz is None else check_number("lipschitz", lipschitz, above=0)
        )
        if executor is not None and not callable(getattr(executor, "map", None)):
            raise TypeError(f"executor must have a method map, got {type(executor).__name__}")
        self.executor = executor
        self.n_chunks = check_integer("n_chunks", n_chunks, at_least=1)
        self.rounds = self.queries = self.width_max = 0
        self.largest_gradient = 0.0

    def __call__(self, X: ArrayLike) -> tuple[Array, Array]:
        """Return values (Q,) and subgradients (Q, d) at the points X (Q, d): one round."""
        points = np.asarray(X, dtype=np.float64)
        self.rounds += 1
        self.queries += len(points)
        self.width_max = max(self.width_max, len(points))
        answers = [
            _checked(answer, chunk) for answer, chunk in zip(*self._answer(points), strict=True)
        ]
        values = np.concatenate([values for values, _ in answers])
        gradients = np.concatenate([gradients for _, gradients in answers])
        self._check_lipschitz(gradients)
        return values, gradients

    def _answer(self, points: Array) -> tuple[list[Any], list[Array]]:
        if self.executor is None:
            return [self.fun_batch(points)], [points]
        chunks = np.array_split(points, min(self.n_chunks, len(points)))
        return list(self.executor.map(self.fun_batch, chunks)), chunks

    def _check_lipschitz(self, gradients: Array) -> None:
        largest = float(lp_norm(gradients, dual_exponent(self.p)).max())
        self.largest_gradient = max(self.largest_gradient, largest)
        if self.lipschitz is not None and largest > 1.01 * self.lipschitz:
            raise ValueError(
                f"lipschitz must bound the dual norm of subgradients, got {self.lipschitz:g}, "
                f"but one has {largest:g} (p = {self.p:g}, dual exponent "
                f"{dual_exponent(self.p):g})"
            )


class PointwiseBatch:
    """A batch function of ``fun(x, *args) -> float`` and ``jac(x, *args) -> (d,)``.

    It can be sent to other processes if ``fun`` and ``jac`` can.

    Examples
    --------
    >>> batch = PointwiseBatch(lambda x: abs(x[0]), lambda x: np.sign(x))
    >>> values, gradients = batch(np.array([[2.0], [-3.0]]))
    >>> values.tolist(), gradients.tolist()
    ([2.0, 3.0], [[1.0], [-1.0]])
    """

    def __init__(
        self,
        fun: Callable[..., float],
        jac: Callable[..., ArrayLike],
        args: tuple[Any, ...] = (),
    ) -> None:
        self.fun, self.jac, self.args = fun, jac, args

    def __call__(self, X: Array) -> tuple[Array, Array]:
        """Return values (Q,) and subgradients (Q, d)."""
        values = np.array([self.fun(x, *self.args) for x in X], dtype=np.float64)
        return values, np.array([self.jac(x, *self.args) for x in X], dtype=np.float64)


def _checked(answer: Any, points: Array) -> tuple[Array, Array]:
    hint = "; wrap functions of one point with PointwiseBatch(fun, jac)"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ValueError(
            f"fun_batch must return (values, gradients), got {type(answer).__name__}{hint}"
        )
    values = np.asarray(answer[0], dtype=np.float64)
    gradients = np.asarray(answer[1], dtype=np.float64)
    if values.shape != points.shape[:1] or gradients.shape != points.shape:
        raise ValueError(
            f"fun_batch must return shapes {points.shape[:1]} and {points.shape}, got "
            f"{values.shape} and {gradients.shape}{hint}"
        )
    if not (math.isfinite(values.sum()) and math.isfinite(gradients.sum())):
        row = int(np.flatnonzero(~(np.isfinite(values) & np.isfinite(gradients).all(axis=1)))[0])
        raise ValueError(
            f"fun_batch must return finite numbers, got {values[row]} and {gradients[row]} at "
            f"{points[row]}"
        )
    return values, gradients
