"""What counts as a penalty: an operator of pyproximal, a penalty of skglm, a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

Vector = NDArray[np.float64]


class Proximal(NamedTuple):
    """A function of which the prox is known, and the value perhaps.

    Parameters
    ----------
    prox : callable
        ``prox(v, alpha) -> argmin_u h(u) + ‖u - v‖²/(2 alpha)``.
    value : callable or None
        ``value(x) -> float``.
    """

    prox: Callable[[Any, Any], Any]
    value: Callable[[Any], float] | None


def as_proximal(penalty: Any) -> Proximal:
    """Return the prox and the value of a penalty or constraint, however it spells them.

    Parameters
    ----------
    penalty : object or callable or None
        None for h = 0; an operator of `thalweg.convex` or of pyproximal (``op(x)``,
        ``op.prox(x, tau)``); an object with ``value(x)`` and ``prox(x, alpha)``; a penalty of skglm
        (``value(w)``, ``prox_vec(w, stepsize)``, ``prox_1d(value, stepsize, j)``,
        ``prox_1group`` or ``prox_1feat``), which is compiled if it is not yet; a function
        ``prox(v, alpha)``, whose value is not known.

    Raises
    ------
    TypeError
        If it is none of these. For a prox without ``alpha`` the message shows the signature.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.convex import L1, as_proximal
    >>> as_proximal(L1(1.0)).prox(np.array([3.0]), 2.0).tolist()
    [1.0]
    >>> as_proximal(lambda v, alpha: v.clip(0, 1)).value is None
    True
    """
    if penalty is None:
        return Proximal(_identity, _zero)
    if callable(getattr(penalty, "prox", None)):
        value = getattr(penalty, "value", penalty)
        return Proximal(_with_alpha(penalty.prox), _as_number(value) if callable(value) else None)
    if any(hasattr(penalty, name) for name in ("prox_vec", "prox_1d", "prox_1group", "prox_1feat")):
        return _of_skglm(penalty)
    if callable(penalty) and not isinstance(penalty, type):
        return Proximal(_with_alpha(penalty), None)
    raise TypeError(
        "prox must be a callable prox(v, alpha), or an object with a value and a prox, "
        f"got {type(penalty).__name__}"
    )


def _identity(v: Any, alpha: Any) -> Any:
    return v


def _zero(x: Any) -> float:
    return 0.0


def _with_alpha(prox: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """Return ``prox`` if it takes the step size, too."""
    try:
        signature = inspect.signature(prox)
    except (TypeError, ValueError):  # some compiled functions
        return prox
    try:
        signature.bind(None, None)
    except TypeError:
        name = getattr(prox, "__name__", "prox")
        raise TypeError(
            "prox must be callable as prox(v, alpha), where alpha is the step size that scales the "
            f"penalty, got {name}{signature}"
        ) from None
    return prox


def _as_number(value: Callable[[Any], Any]) -> Callable[[Any], float]:
    """Return ``value`` with the truth values of pyproximal's indicators as 0 and infinity."""

    def number(x: Any) -> float:
        given = value(x)
        if isinstance(given, (bool, np.bool_)):
            return 0.0 if given else float("inf")
        return float(given)

    return number


def _of_skglm(penalty: Any) -> Proximal:
    value = _as_number(penalty.value)
    if hasattr(penalty, "prox_vec"):
        return Proximal(penalty.prox_vec, value)
    with requires("peers"):
        from numba import njit
        from skglm.utils.jit_compilation import compiled_clone
    if not hasattr(type(penalty), "_numba_type_"):
        penalty = compiled_clone(penalty)
    # Numba compiles attributes, not names of attributes: hence three loops.
    if hasattr(penalty, "prox_1d"):

        @njit
        def sweep(operator: Any, v: Vector, moved: Vector, alpha: float) -> None:
            for j in range(len(v)):
                moved[j] = operator.prox_1d(v[j], alpha, j)
    elif hasattr(penalty, "prox_1group"):

        @njit
        def sweep(operator: Any, v: Vector, moved: Vector, alpha: float) -> None:
            for g in range(len(operator.grp_ptr) - 1):
                members = operator.grp_indices[operator.grp_ptr[g] : operator.grp_ptr[g + 1]]
                moved[members] = operator.prox_1group(v[members], alpha, g)
    else:

        @njit
        def sweep(operator: Any, v: Vector, moved: Vector, alpha: float) -> None:
            for j in range(len(v)):
                moved[j] = operator.prox_1feat(v[j], alpha, j)

    def prox(v: Vector, alpha: float) -> Vector:
        moved = v.copy()
        sweep(penalty, v, moved, float(alpha))
        return moved

    return Proximal(prox, value)
