"""The conventions of `scipy.optimize.minimize` that custom minimizers follow."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult, OptimizeWarning

Report = Callable[..., Any]


class NotFiniteError(ArithmeticError):
    """A value or gradient of a run is not finite; the message says which, or where.

    It ends a run from within, which returns what it has, and does not reach the user.
    """


def optimize_result(**fields: Any) -> OptimizeResult:
    """Return an `OptimizeResult` with these fields."""
    result = OptimizeResult()
    result.update(fields)
    return result


def refuse_constraints(
    minimizer: str, options: dict[str, Any], names: tuple[str, ...] = ("bounds", "constraints")
) -> None:
    """Take ``names`` out of the options and refuse them unless they are empty.

    `scipy.optimize.minimize` passes ``constraints=()`` and the like to every custom method.

    Raises
    ------
    ValueError
        If a constraint is given.
    """
    for name in names:
        given = options.pop(name, None)
        if given is not None and (not isinstance(given, (list, tuple)) or len(given) > 0):
            raise ValueError(f"{name} must be None: {minimizer} does not support it")


def warn_of_unknown(options: dict[str, Any], *, ignored: tuple[str, ...] = ()) -> None:
    """Warn of options that are not None, as SciPy does; those in ``ignored`` pass silently."""
    unknown = sorted(
        name for name, value in options.items() if value is not None and name not in ignored
    )
    if unknown:
        warnings.warn(f"unknown options: {', '.join(unknown)}", OptimizeWarning, stacklevel=4)


def intermediate_report(callback: Callable[..., Any] | None) -> Report | None:
    """Return a function of named results that calls ``callback`` the way it wants to be called.

    As in SciPy, a callback with the one parameter ``intermediate_result`` gets an
    `OptimizeResult`, any other the current ``x``.

    Raises
    ------
    TypeError
        If ``callback`` is neither None nor callable.

    Examples
    --------
    >>> report = intermediate_report(lambda intermediate_result: print(intermediate_result.fun))
    >>> report(x=np.zeros(2), fun=0.5)
    0.5
    """
    if callback is None:
        return None
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {type(callback).__name__}")
    if list(inspect.signature(callback).parameters) == ["intermediate_result"]:
        return lambda **fields: callback(intermediate_result=optimize_result(**fields))
    return lambda **fields: callback(copy.deepcopy(fields["x"]))


def check_gradient_function(jac: Any) -> Callable[..., Any]:
    """Return ``jac`` if it is a gradient of its own, as noisy ones must be.

    Raises
    ------
    TypeError
        If it is not callable.
    ValueError
        If it is what SciPy makes of ``jac=True``: its cache would return one noisy gradient for
        every query at a point.
    """
    if not callable(jac):
        raise TypeError(f"jac must be a callable that returns a gradient, got {jac!r}")
    if type(getattr(jac, "__self__", None)).__name__ == "MemoizeJac":
        raise ValueError("jac must be a function of its own, not True")
    return jac  # type: ignore[no-any-return]


def rng_keyword(function: Callable[..., Any], rng: np.random.Generator | None) -> dict[str, Any]:
    """Return the random stream as a keyword argument, if there is one and the function takes it."""
    return {"rng": rng} if rng is not None and takes_rng(function) else {}


def takes_rng(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter ``rng``, for a random stream."""
    try:
        return "rng" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some compiled functions
        return False
