"""How many blocks a median of means should have."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from thalweg.common.checks import check_choice, check_integer, check_number

DEFAULT_BLOCKS = 5
# Steps average the variance away, but not the bias.
VARIANCE_WEIGHT = {"estimate": 1.0, "optimize": 0.25}


class BlockPlan(NamedTuple):
    """What `choose_blocks` recommends.

    Attributes
    ----------
    k : int
        Number of blocks.
    b : int
        Samples per block, ⌊N/k⌋.
    m : int
        (k - 1)/2, the number of blocks that may be anything.
    finite_variance : bool
        Whether the estimate has a variance: (m + 1)β > 2.
    note : str
        What N does not allow, and warnings; may be empty.
    """

    k: int
    b: int
    m: int
    finite_variance: bool
    note: str


def choose_blocks(
    N: int,
    *,
    beta: float | None = None,
    alpha: float | None = None,
    skew_weight: float = 0.0,
    delta: float = 0.01,
    purpose: Literal["optimize", "estimate"] = "optimize",
) -> BlockPlan:
    r"""Choose the number of blocks for N samples by the bounds on variance and bias.

    The noise is a mixture: with weight 1 - w symmetric with β-th moments, with weight w of mean
    zero with α-th moments. Up to constants, k blocks of b = ⌊N/k⌋ samples have the error

    .. math:: \omega (1 - w) \frac{b^{1/\beta - 1}}{\sqrt k}
              + w \, b^{-(\alpha - 1)/\alpha} \Big(1 + \frac{\omega}{\sqrt k}\Big).

    For β < 1 averages within blocks are *worse* than single samples: symmetric noise wants many
    small blocks. The bias of skewed noise wants few large ones.

    Parameters
    ----------
    N : int ≥ 1
        Samples, or micro-batches.
    beta : float in (0, 1], optional
        Moments of the symmetric part.
    alpha : float in (1, 2], optional
        Moments of the mean-zero part.
    skew_weight : float in [0, 1], default 0
        w.
    delta : float in (0, 1), default 0.01
        Failure probability for the note.
    purpose : {"optimize", "estimate"}
        ω = 1 for one estimate, 1/4 within an optimizer, whose steps average the variance away.

    Returns
    -------
    BlockPlan
        With neither moment given, k = 5 (or the largest odd number ≤ N).

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    O(N). The bounds are the paper's; their constants are dropped, and ω is our resolution.

    References
    ----------
    "Clipped optimization with median-of-means gradients", NeurIPS 2026.

    Examples
    --------
    >>> choose_blocks(105, beta=0.8, alpha=1.5, skew_weight=0.5, purpose="estimate").k
    35
    >>> choose_blocks(15, beta=0.8).k
    15
    """
    check_integer("N", N, at_least=1)
    if beta is not None:
        check_number("beta", beta, above=0, at_most=1)
    if alpha is not None:
        check_number("alpha", alpha, above=1, at_most=2)
    w = check_number("skew_weight", skew_weight, at_least=0, at_most=1)
    check_number("delta", delta, above=0, below=1)
    check_choice("purpose", purpose, tuple(VARIANCE_WEIGHT))
    omega = VARIANCE_WEIGHT[purpose]
    odd = range(1, N + 1, 2)
    least = 1 if beta is None else 2 * math.floor(2 / beta) + 1
    if beta is None and alpha is None:
        k = odd[min(len(odd) - 1, DEFAULT_BLOCKS // 2)]
    else:
        allowed = [k for k in odd if k >= least] or [odd[-1]]
        k = min(allowed, key=lambda k: _error(k, N // k, beta, alpha, w, omega))
    m = (k - 1) // 2
    return BlockPlan(k, N // k, m, beta is None or (m + 1) * beta > 2, _note(k, N, least, w, delta))


def _error(
    k: int, b: int, beta: float | None, alpha: float | None, w: float, omega: float
) -> float:
    """Return the bound; a part whose moments are unknown is left out."""
    error = 0.0
    if beta is not None:
        error += omega * (1 - w) * b ** (1 / beta - 1) / math.sqrt(k)
    if alpha is not None:
        error += w * b ** (-(alpha - 1) / alpha) * (1 + omega / math.sqrt(k))
    return error


def _note(k: int, N: int, least: int, w: float, delta: float) -> str:
    notes = []
    if k < least:
        notes.append(f"finite variance needs k >= {least}, N = {N} allows {k}")
    wanted = math.ceil(8 * math.log(1 / delta))
    if k < wanted:
        notes.append(
            f"the high-probability bound at delta = {delta:g} needs k >= {wanted}, got {k}"
        )
    if w > 0 and k > 1:
        notes.append("the median of skewed noise is biased: the loss ends in a neighborhood")
    return "; ".join(notes)
