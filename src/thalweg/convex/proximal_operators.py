"""Penalties and constraints with a value and a prox, for NumPy arrays and torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_choice, check_integer, check_number

# An indicator counts a point as feasible up to this distance, relative to the size of its bounds.
FEASIBLE = 1e-9


@dataclass(frozen=True)
class L1:
    """λ‖x‖₁, whose prox is soft thresholding.

    Parameters
    ----------
    weight : float ≥ 0
        λ, in units of a gradient.
    positive : bool, default False
        Allow x ≥ 0 only.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import L1
    >>> penalty = L1(2.0)
    >>> float(penalty(np.array([3.0, -1.0]))), penalty.prox(np.array([3.0, -1.0]), 0.5).tolist()
    (8.0, [2.0, 0.0])
    """

    weight: float
    positive: bool = False
    elementwise: ClassVar[bool] = True  # all entries alike, each for itself

    def __post_init__(self) -> None:
        check_number("weight", self.weight, at_least=0)
        check_choice("positive", self.positive, (False, True))

    def __call__(self, x: Any) -> float:
        """Return λ‖x‖₁, or infinity where an entry must not be negative."""
        if self.positive and bool((x < 0).any()):
            return float("inf")
        return self.weight * float(abs(x).sum())

    def prox(self, v: Any, alpha: Any) -> Any:
        """Return sign(v) ``max(|v| - αλ, 0)``; α is a number or has the shape of v."""
        threshold = alpha * self.weight
        if self.positive:
            return (v - threshold).clip(min=0)
        return v - v.clip(-threshold, threshold)


@dataclass(frozen=True)
class ElasticNet:
    """λ(ρ‖x‖₁ + (1-ρ)/2 ‖x‖²).

    Parameters
    ----------
    weight : float ≥ 0
        λ.
    l1_ratio : float in [0, 1], default 0.5
        ρ.
    """

    weight: float
    l1_ratio: float = 0.5
    elementwise: ClassVar[bool] = True  # all entries alike, each for itself

    def __post_init__(self) -> None:
        check_number("weight", self.weight, at_least=0)
        check_number("l1_ratio", self.l1_ratio, at_least=0, at_most=1)

    def __call__(self, x: Any) -> float:
        """Return the penalty."""
        squares = float((x * x).sum()) / 2
        return self.weight * (self.l1_ratio * float(abs(x).sum()) + (1 - self.l1_ratio) * squares)

    def prox(self, v: Any, alpha: Any) -> Any:
        """Return soft thresholding, divided by 1 + αλ(1-ρ)."""
        threshold = alpha * (self.weight * self.l1_ratio)
        return (v - v.clip(-threshold, threshold)) / (
            1 + alpha * (self.weight * (1 - self.l1_ratio))
        )


@dataclass(frozen=True, eq=False)
class GroupLasso:
    """λ Σ_g √n_g ‖x_g‖₂ over groups of entries that do not overlap, or over slices of a tensor.

    Parameters
    ----------
    weight : float ≥ 0
        λ.
    groups : array_like of int, of the shape of x, optional
        The number of the group of each entry, from 0.
    axis : int, optional
        Instead of ``groups``: every slice along this axis is a group, as the rows of a matrix with
        ``axis=1``.
    scaled : bool, default True
        Whether groups weigh √n_g; otherwise 1.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import GroupLasso
    >>> penalty = GroupLasso(1.0, groups=[0, 0, 1], scaled=False)
    >>> penalty.prox(np.array([3.0, 4.0, 0.5]), 1.0).round(12).tolist()
    [2.4, 3.2, 0.0]
    """

    weight: float
    groups: ArrayLike | None = None
    axis: int | None = None
    scaled: bool = True

    def __post_init__(self) -> None:
        check_number("weight", self.weight, at_least=0)
        check_choice("scaled", self.scaled, (False, True))
        if (self.groups is None) == (self.axis is None):
            raise ValueError("give either groups or axis")
        if self.axis is not None:
            check_integer("axis", self.axis)
        elif self._labels.size == 0 or self._labels.min() < 0:
            raise ValueError("groups must be group numbers >= 0, at least one")

    @cached_property
    def _labels(self) -> NDArray[np.intp]:
        labels = np.asarray(self.groups)
        if labels.dtype.kind not in "iu":
            raise TypeError(f"groups must be integers, got {labels.dtype}")
        return labels.astype(np.intp)

    @cached_property
    def _sizes(self) -> NDArray[np.float64]:
        return np.bincount(self._labels.reshape(-1)).astype(np.float64)

    def _norms(self, x: Any) -> tuple[Any, Any]:
        """Return the groups' norms and weights, ready to be taken entry by entry."""
        if self.axis is not None:
            size = x.shape[self.axis]
            return ((x * x).sum(self.axis, keepdims=True)) ** 0.5, size**0.5 if self.scaled else 1.0
        if tuple(x.shape) != self._labels.shape:
            raise ValueError(f"x must have the shape of groups {self._labels.shape}, got {x.shape}")
        weights = np.sqrt(self._sizes) if self.scaled else np.ones(len(self._sizes))
        squares = (x * x).reshape(-1)
        if isinstance(x, np.ndarray):
            return np.sqrt(np.bincount(self._labels.reshape(-1), squares)), weights
        labels = _like(self._labels.reshape(-1), x, integers=True)
        sums = squares.new_zeros(len(weights)).index_add(0, labels, squares)
        return sums.sqrt(), _like(weights, x)

    def __call__(self, x: Any) -> float:
        """Return the penalty."""
        norms, weights = self._norms(x)
        return self.weight * float((norms * weights).sum())

    def prox(self, v: Any, alpha: float) -> Any:
        """Return v with every group shrunk by max(0, 1 - αλ√n_g/‖v_g‖)."""
        norms, weights = self._norms(v)
        # Where the norm is 0 the group is, and any factor does.
        factors = (1 - alpha * self.weight * weights / norms.clip(min=1e-300)).clip(min=0)
        return v * (factors if self.axis is not None else factors[self._labels])


@dataclass(frozen=True, eq=False)
class Box:
    """The constraint lower ≤ x ≤ upper, whose prox is clipping.

    Parameters
    ----------
    lower, upper : float or array_like of the shape of x
        May be infinite.
    """

    lower: Any = -np.inf
    upper: Any = np.inf

    def __post_init__(self) -> None:
        for name in ("lower", "upper"):
            bound = getattr(self, name)
            if not hasattr(bound, "clip"):
                bound = np.asarray(bound, dtype=np.float64)
                # A frozen dataclass has no other way to set a field. Numbers stay numbers, which
                # tensors of any device understand.
                object.__setattr__(self, name, float(bound) if bound.ndim == 0 else bound)
        if not bool(np.all(np.asarray(self.lower) <= np.asarray(self.upper))):
            raise ValueError("lower must be <= upper, and neither may be NaN")

    @property
    def elementwise(self) -> bool:
        """Whether all entries have the same bounds."""
        return isinstance(self.lower, float) and isinstance(self.upper, float)

    def __call__(self, x: Any) -> float:
        """Return 0 inside the box and infinity outside."""
        lower, upper = _like(self.lower, x), _like(self.upper, x)
        slack = FEASIBLE * (1 + abs(x))
        inside = bool(((x >= lower - slack) & (x <= upper + slack)).all())
        return 0.0 if inside else float("inf")

    def prox(self, v: Any, alpha: Any) -> Any:
        """Return v, clipped."""
        return v.clip(_like(self.lower, v), _like(self.upper, v))


@dataclass(frozen=True)
class Simplex:
    """The constraint x ≥ 0, Σx = total, for all entries of x together.

    Parameters
    ----------
    total : float > 0, default 1

    Notes
    -----
    The projection sorts: O(n log n).

    References
    ----------
    J. Duchi et al., "Efficient projections onto the l1-ball for learning in high dimensions",
    ICML 2008.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import Simplex
    >>> Simplex().prox(np.array([0.9, 0.5, -1.0]), 1.0).round(12).tolist()
    [0.7, 0.3, 0.0]
    """

    total: float = 1.0

    def __post_init__(self) -> None:
        check_number("total", self.total, above=0)

    def __call__(self, x: Any) -> float:
        """Return 0 on the simplex and infinity elsewhere."""
        tolerance = FEASIBLE if str(x.dtype).endswith("64") else 1e-4
        slack = tolerance * self.total
        inside = float(x.min()) >= -slack and abs(float(x.sum()) - self.total) <= slack
        return 0.0 if inside else float("inf")

    def prox(self, v: Any, alpha: float) -> Any:
        """Return max(v - θ, 0), with θ such that the sum is right."""
        flat = v.reshape(-1)
        if isinstance(v, np.ndarray):
            falling = np.sort(flat)[::-1]
        else:
            falling = flat.sort(descending=True).values
        counts = _like(np.arange(1.0, len(falling) + 1), v)
        thresholds = (falling.cumsum(0) - self.total) / counts
        # The largest threshold is the one at which all larger entries stay positive.
        return (v - thresholds.max()).clip(min=0)


@dataclass(frozen=True)
class NuclearNorm:
    """λ times the sum of the singular values of a matrix, or of a vector that holds one.

    Parameters
    ----------
    weight : float ≥ 0
        λ.
    shape : (int, int), optional
        Of the matrix, in row-major order, if x is a vector.

    Notes
    -----
    One singular value decomposition per prox: O(m n min(m, n)).

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import NuclearNorm
    >>> NuclearNorm(1.0).prox(np.diag([3.0, 0.5]), 1.0).round(12).tolist()
    [[2.0, 0.0], [0.0, 0.0]]
    """

    weight: float
    shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_number("weight", self.weight, at_least=0)
        if self.shape is not None:
            if len(self.shape) != 2:
                raise ValueError(f"shape must be that of a matrix, got {self.shape}")
            for length in self.shape:
                check_integer("shape", length, at_least=1)

    def _matrix(self, x: Any) -> Any:
        matrix = x if self.shape is None else x.reshape(*self.shape)
        if matrix.ndim != 2:
            raise ValueError(f"x must be a matrix, got shape {tuple(x.shape)}; give shape=")
        return matrix

    def __call__(self, x: Any) -> float:
        """Return the penalty."""
        values = _linalg(x).svd(self._matrix(x), full_matrices=False)[1]
        return self.weight * float(values.sum())

    def prox(self, v: Any, alpha: Any) -> Any:
        """Return v with singular values lowered by αλ, to 0 at least."""
        left, values, right = _linalg(v).svd(self._matrix(v), full_matrices=False)
        return ((left * (values - alpha * self.weight).clip(min=0)) @ right).reshape(v.shape)


def _linalg(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return np.linalg
    import torch

    return torch.linalg


def _like(value: Any, x: Any, *, integers: bool = False) -> Any:
    """Return a number as it is, an array as what ``x`` is."""
    if isinstance(x, np.ndarray) or not isinstance(value, np.ndarray):
        return value
    import torch

    return torch.as_tensor(value, dtype=torch.long if integers else x.dtype, device=x.device)
