"""The claims of all methods: one module per method, found through the catalog."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thalweg.catalog import Method
    from thalweg.evidence.claim import Claim


def claims_of(method: Method) -> list[Claim]:
    """Return the claims of ``method``, the headline first.

    Raises
    ------
    MissingExtraError
        If a package that they need is not installed.
    """
    from thalweg.evidence.claim import Claim

    module = importlib.import_module(method.claims_module)
    found = [value for value in vars(module).values() if isinstance(value, Claim)]
    return sorted(found, key=lambda claim: not claim.headline)
