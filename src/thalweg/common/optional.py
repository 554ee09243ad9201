"""Imports of packages that come with an extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class MissingExtraError(ImportError):
    """A package that comes with an extra is not installed; the message says how to get it."""


@contextmanager
def requires(extra: str) -> Iterator[None]:
    """Turn a failed import inside the block into an error that names the extra to install.

    Raises
    ------
    MissingExtraError
        If an import inside the block fails. It is an `ImportError`, whose ``name`` is the
        package that is missing.

    Examples
    --------
    >>> with requires("training"):  # doctest: +ELLIPSIS
    ...     import a_package_that_nobody_has
    Traceback (most recent call last):
        ...
    thalweg.common.optional.MissingExtraError: a_package_that_nobody_has is not installed; run: ...
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError):
            problem = f"{error.name} is not installed"
        else:
            problem = f"{error.name or 'a package'} does not import ({error})"
        raise MissingExtraError(
            f'{problem}; run: pip install "thalweg[{extra}]"', name=error.name
        ) from error
