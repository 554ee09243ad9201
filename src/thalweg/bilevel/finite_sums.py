"""Stochastic objectives: means over samples, and expectations, as bilevel methods call for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse
from scipy.sparse.linalg import svds
from scipy.special import expit

from thalweg.common.checks import check_array, check_finite

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


@runtime_checkable
class StochasticObjective(Protocol):
    """What a method asks of an objective: of one's own class, or a ready-made one.

    `LeastSquares`, `Logistic` and `TorchLoss` are finite sums, `Expectation` is made of functions.
    ``sample_grad`` takes the samples as an argument, so that a method can evaluate the same ones at
    two points. That is what its variance reduction rests on: it must not draw anything itself.

    Attributes
    ----------
    n : int or None
        The number of components; None for an expectation.
    """

    n: int | None

    def value(self, x: Array) -> float:
        """Return the mean of all components at x."""

    def grad(self, x: Array) -> Array:
        """Return the gradient of the mean of all components, in the shape of x."""

    def sample_grad(self, x: Array, idx: Any) -> Array:
        """Return the mean gradient of the samples ``idx``, in the shape of x."""

    def draw(self, rng: np.random.Generator, size: int) -> Any:
        """Return samples for `sample_grad`: ``size`` indices, if there are ``n`` components."""


def check_objective(name: str, objective: Any) -> StochasticObjective:
    """Return ``objective`` if it has all that is asked for.

    Raises
    ------
    TypeError
        If it lacks a method or attribute, which the message names.
    ValueError
        If ``n`` is neither None nor an integer of at least 1.
    """
    needed = ("n", "value", "grad", "sample_grad", "draw")
    missing = [attribute for attribute in needed if not hasattr(objective, attribute)]
    if missing:
        raise TypeError(
            f"{name} must have {', '.join(needed)}; {type(objective).__name__} lacks "
            f"{', '.join(missing)}"
        )
    n = objective.n
    if n is not None and (isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1):
        raise ValueError(f"{name}.n must be None or an integer >= 1, got {n!r}")
    return objective  # type: ignore[no-any-return]


class Loss(NamedTuple):
    """A loss ℓ(p, b) of predictions p and targets b, elementwise."""

    name: str
    values: Callable[[Array, Array], Array]
    slopes: Callable[[Array, Array], Array]
    curvature: float  # the largest second derivative in p


SQUARED = Loss("squared", lambda p, b: (p - b) ** 2 / 2, lambda p, b: p - b, 1.0)
LOGISTIC = Loss(
    "logistic", lambda p, b: np.logaddexp(0, -b * p), lambda p, b: -b * expit(-b * p), 0.25
)


class LinearSum:
    """The mean of ℓ(aᵢᵀx, bᵢ) over the rows aᵢ of A: what `LeastSquares` and `Logistic` share."""

    def __init__(self, A: Any, targets: Array, loss: Loss) -> None:
        self.A = _check_rows(A)
        self.targets = targets
        self.loss = loss
        self.n: int | None = len(targets)
        if self.A.shape[0] != len(targets):
            raise ValueError(
                f"A must have one row per target, got {self.A.shape[0]} rows and {len(targets)}"
            )

    def draw(self, rng: np.random.Generator, size: int) -> Indices:
        """Return ``size`` uniform row numbers, with replacement."""
        return rng.integers(len(self.targets), size=size)

    def value(self, x: Array) -> float:
        """Return the mean loss."""
        losses = self.loss.values(np.asarray(self.A @ x), self.targets)
        return float(losses.sum()) / len(self.targets)

    def grad(self, x: Array) -> Array:
        """Return the gradient of the mean loss, in the shape of x."""
        slopes = self.loss.slopes(np.asarray(self.A @ x), self.targets)
        return np.asarray(self.A.T @ slopes) / len(self.targets)

    def sample_grad(self, x: Array, idx: Indices) -> Array:
        """Return the gradient of the mean loss of the rows ``idx``, in the shape of x."""
        return self._grad_of(self.A[idx], self.targets[idx], x)

    def sample_grads(self, x: Array, y: Array, idx: Indices) -> tuple[Array, Array]:
        """Return `sample_grad` at two points, taking the rows out of A only once."""
        rows, targets = self.A[idx], self.targets[idx]
        return self._grad_of(rows, targets, x), self._grad_of(rows, targets, y)

    def smoothness(self) -> float:
        """Return the Lipschitz constant of the gradient, or a bound: ℓ'' ‖A‖²/n."""
        A: Any = self.A
        if _is_sparse(A) and min(A.shape) > 1:
            start: Any = np.random.default_rng(0).standard_normal(min(A.shape))
            norm = float(svds(A, k=1, v0=start, return_singular_vectors=False)[0])
        else:
            norm = float(np.linalg.norm(A.toarray() if _is_sparse(A) else A, 2))
        return self.loss.curvature * norm**2 / len(self.targets)

    def _grad_of(self, rows: Any, targets: Array, x: Array) -> Array:
        slopes = self.loss.slopes(np.asarray(rows @ x), targets)
        return np.asarray(rows.T @ slopes) / len(targets)


class LeastSquares(LinearSum):
    r"""Least squares as a finite sum.

    .. math:: \frac{1}{2n} \|A x - b\|_F^2

    Parameters
    ----------
    A : array_like or sparse array of shape (n, d)
        Sparse arrays stay sparse.
    b : array_like of shape (n,), or (n, k) for an x of shape (d, k)

    Raises
    ------
    TypeError, ValueError
        For complex numbers, NaN, infinity, no rows, or shapes that do not fit.

    Notes
    -----
    `value` and `grad` cost O(nd), `sample_grad` O(d) per row, or the entries of a sparse one.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import LeastSquares
    >>> f = LeastSquares([[1.0, 0.0], [0.0, 2.0]], [1.0, 0.0])
    >>> x = np.array([0.0, 1.0])
    >>> f.n, f.value(x), f.grad(x).tolist(), f.sample_grad(x, np.array([1])).tolist()
    (2, 1.25, [-0.5, 2.0], [0.0, 4.0])
    """

    def __init__(self, A: Any, b: ArrayLike) -> None:
        shape = ("n", "k") if np.ndim(b) == 2 else ("n",)
        super().__init__(A, check_array("b", _real("b", b), shape=shape), SQUARED)


class Logistic(LinearSum):
    r"""The logistic loss of a linear classifier as a finite sum.

    .. math:: \frac1n \sum_i \ln(1 + e^{-y_i a_i^\top x})

    Parameters
    ----------
    A : array_like or sparse array of shape (n, d)
        Sparse arrays stay sparse.
    y : array_like of shape (n,)
        Classes -1 and 1.

    Raises
    ------
    TypeError, ValueError
        As for `LeastSquares`, and for other classes.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import Logistic
    >>> f = Logistic([[1.0], [2.0]], [1, -1])
    >>> round(f.value(np.zeros(1)), 6), f.grad(np.zeros(1)).tolist()
    (0.693147, [0.25])
    """

    def __init__(self, A: Any, y: ArrayLike) -> None:
        classes = check_array("y", _real("y", y), shape=("n",))
        wrong = classes[np.abs(classes) != 1]
        if len(wrong) > 0:
            raise ValueError(f"y must hold the classes -1 and 1, got {wrong[0]:g}")
        super().__init__(A, classes, LOGISTIC)


class Expectation:
    """An expectation over a distribution that can only be sampled.

    Parameters
    ----------
    sample_grad : callable
        ``sample_grad(x, samples)``: the mean gradient over the samples, in the shape of x. It must
        draw nothing itself: the same samples are used at two points.
    draw : callable
        ``draw(rng, size)``: ``size`` samples, in any form.
    value, grad : callable, optional
        ``value(x)`` and ``grad(x)`` of the expectation, where they are known, or estimates of them
        from many samples. Without them, values and gaps are reported as NaN.

    Examples
    --------
    The mean of ½‖x - ξ‖² over standard normal ξ:

    >>> import numpy as np
    >>> from thalweg.bilevel import Expectation
    >>> f = Expectation(
    ...     sample_grad=lambda x, samples: x - samples.mean(axis=0),
    ...     draw=lambda rng, size: rng.standard_normal((size, 2)),
    ... )
    >>> samples = f.draw(np.random.default_rng(0), 1000)
    >>> bool(np.abs(f.sample_grad(np.ones(2), samples) - 1).max() < 0.1)
    True
    """

    n: int | None = None

    def __init__(
        self,
        sample_grad: Callable[[Array, Any], Array],
        draw: Callable[[np.random.Generator, int], Any],
        value: Callable[[Array], float] | None = None,
        grad: Callable[[Array], Array] | None = None,
    ) -> None:
        for name, function in (("sample_grad", sample_grad), ("draw", draw)):
            if not callable(function):
                raise TypeError(f"{name} must be callable, got {type(function).__name__}")
        for name, known in (("value", value), ("grad", grad)):
            if known is not None and not callable(known):
                raise TypeError(f"{name} must be callable or None, got {type(known).__name__}")
        self.sample_grad = sample_grad
        self.draw = draw
        self._value = value
        self._grad = grad

    def value(self, x: Array) -> float:
        """Return the value at x, or NaN if it is not known."""
        return np.nan if self._value is None else float(self._value(x))

    def grad(self, x: Array) -> Array:
        """Return the gradient at x, or NaNs if it is not known."""
        return np.full_like(x, np.nan) if self._grad is None else np.asarray(self._grad(x))


def _real(name: str, value: Any) -> Any:
    if np.iscomplexobj(value):
        raise TypeError(f"{name} must be real, got complex numbers")
    return value


def _is_sparse(A: Any) -> bool:
    return bool(sparse.issparse(A))


def _check_rows(A: Any) -> Any:
    """Return A as a float64 array, or a CSR array if it is sparse."""
    _real("A", A)
    rows: Any
    if _is_sparse(A):
        rows = sparse.csr_array(A).astype(np.float64)
        rows.sum_duplicates()
        check_finite("the entries of A", rows.data)
    else:
        rows = check_array("A", A, shape=("n", "d"))
    if 0 in rows.shape:
        raise ValueError(f"A must have at least one row and column, got shape {rows.shape}")
    return rows
