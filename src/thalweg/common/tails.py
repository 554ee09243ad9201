"""Tails of samples, as far as several families look at them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def mean_log_excess(descending: NDArray[np.float64], k: int) -> Any:
    """Return the mean of ``log(r_i / r_{k+1})`` over the k largest: the inverse of Hill's index.

    Parameters
    ----------
    descending : ndarray of shape (K,) or (K, d)
        Positive sizes, the largest first along the first axis; K > k.
    k : int ≥ 1

    Returns
    -------
    float, or ndarray of shape (d,)
        0 where the k + 1 largest are all equal.

    References
    ----------
    B. M. Hill, "A simple general approach to inference about the tail of a distribution",
    Annals of Statistics 3 (1975).

    Examples
    --------
    >>> import numpy as np
    >>> mean_log_excess(np.exp([3.0, 2.0, 1.0, 0.0]), 2).round(9).item()
    1.5
    """
    return np.log(descending[:k] / descending[k]).mean(axis=0)
