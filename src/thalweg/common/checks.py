"""Checks of public arguments, with messages of one form.

Every function returns the value it checked, so a constructor reads
``self.lr = check_number("lr", lr, above=0)``.  Each message names the argument, says what
is accepted and shows what was given.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

T = TypeVar("T")


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    allow_infinite: bool = False,
) -> float:
    """Return ``value`` as a float within the given bounds.

    Raises
    ------
    TypeError
        If ``value`` is not a real number (booleans are not).
    ValueError
        If it is NaN, infinite (unless ``allow_infinite``) or outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {_show(value)}")
    number = float(value)
    inside = (
        not math.isnan(number)
        and (allow_infinite or math.isfinite(number))
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )
    if not inside:
        kind = "a number" if allow_infinite else "a finite number"
        raise ValueError(
            f"{name} must be {kind}{_bounds(above, at_least, below, at_most)}, got {_show(value)}"
        )
    return number


def check_integer(
    name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None
) -> int:
    """Return ``value`` as an int within the given bounds.

    Raises
    ------
    TypeError
        If ``value`` is not an integer (booleans and floats are not).
    ValueError
        If it is outside the bounds.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {_show(value)}")
    number = int(value)
    if (at_least is not None and number < at_least) or (at_most is not None and number > at_most):
        raise ValueError(
            f"{name} must be an integer{_bounds(None, at_least, None, at_most)}, got {number}"
        )
    return number


def check_choice(name: str, value: T, choices: Iterable[T]) -> T:
    """Return ``value`` if it is one of ``choices``; raise `ValueError` otherwise."""
    accepted = list(choices)
    if not any(type(value) is type(choice) and value == choice for choice in accepted):
        listed = ", ".join(repr(choice) for choice in accepted)
        raise ValueError(f"{name} must be one of {listed}, got {_show(value)}")
    return value


def check_array(
    name: str,
    value: ArrayLike,
    *,
    shape: tuple[int | str, ...],
    dtype: Any = np.float64,
    finite: bool = True,
) -> NDArray[Any]:
    """Return ``value`` as an array of the given shape and dtype.

    Parameters
    ----------
    name : str
        The argument's name, for messages.
    value : array_like
        What the user gave.
    shape : tuple of int or str
        One entry per axis; a string names an axis of any length, as in ``("K", 8)``.
    dtype : dtype, default float64
        The result's dtype. No copy is made when ``value`` has it already.
    finite : bool, default True
        Whether NaN and infinity are refused.

    Raises
    ------
    TypeError
        If ``value`` does not convert to ``dtype``.
    ValueError
        If the shape differs, or an entry is not finite (the message says which).
    """
    try:
        array = np.asarray(value, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be an array of {np.dtype(dtype).name}, got {_show(value)}"
        ) from error
    fits = array.ndim == len(shape) and all(
        isinstance(wanted, str) or wanted == got
        for wanted, got in zip(shape, array.shape, strict=True)
    )
    if not fits:
        raise ValueError(f"{name} must have shape {_show_shape(shape)}, got {array.shape}")
    if finite:
        check_finite(name, array)
    return array


def check_finite(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` if it is finite; raise `ValueError` naming the first bad entry."""
    # The sum of squares is not finite when an entry is not: one pass and no boolean array.
    # A finite array whose squares overflow falls through to the exact test.
    flat = array.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(np.dot(flat, flat)):
            return array
    bad = np.argwhere(~np.isfinite(array))
    if len(bad) == 0:
        return array
    index = tuple(int(i) for i in bad[0])
    where = f"[{', '.join(map(str, index))}]" if index else ""
    raise ValueError(
        f"{name} must be finite, got {array[index]} at {name}{where}"
        + (f" and {len(bad) - 1} more" if len(bad) > 1 else "")
    )


def _bounds(
    above: float | None, at_least: float | None, below: float | None, at_most: float | None
) -> str:
    lower = f" > {above:g}" if above is not None else ""
    lower = f" >= {at_least:g}" if at_least is not None else lower
    upper = f" < {below:g}" if below is not None else ""
    upper = f" <= {at_most:g}" if at_most is not None else upper
    return f"{lower} and{upper}" if lower and upper else lower or upper


def _show(value: Any) -> str:
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return text if isinstance(value, numbers.Number) else f"{text} ({type(value).__name__})"


def _show_shape(shape: tuple[int | str, ...]) -> str:
    inner = ", ".join(map(str, shape))
    return f"({inner},)" if len(shape) == 1 else f"({inner})"
