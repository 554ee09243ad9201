"""Step sizes and momenta that the theory of sign descent prescribes."""

from __future__ import annotations

import math
from typing import Literal, TypedDict

import numpy as np
from numpy.typing import ArrayLike

from thalweg.common.checks import check_choice, check_finite, check_integer, check_number

COORDINATE_METHODS = ("signsgd", "lion")
MATRIX_METHODS = ("muon", "muonlight")
MUONLIGHT_RMS = 0.2


class SignSchedule(TypedDict):
    """Constant settings for T steps; see `theory_schedule`."""

    lr: float
    beta1: float
    beta2: float
    batch: int


def theory_schedule(
    method: Literal["signsgd", "lion", "muon", "muonlight"],
    *,
    T: int,
    p: float,
    sigma0: ArrayLike,
    sigma1: ArrayLike = 0.0,
    L0: ArrayLike,
    L1: ArrayLike = 0.0,
    delta0: float,
    d: int | None = None,
    m: int | None = None,
    n: int | None = None,
) -> SignSchedule:
    r"""Return the settings of the rates under heavy-tailed noise, up to constants.

    .. math::
        1 - \beta = \min\Big\{1, \Big(\frac{\Delta_0 L_0}{\sigma_0^2 T}\Big)^{p / (3p - 2)}\Big\},
        \qquad \eta = \min\Big\{\sqrt{\frac{\Delta_0 (1 - \beta)}{L_0 T}},
        \frac{1 - \beta}{8 L_1}\Big\}

    with which the mean of ‖∇f‖ over T steps, in the dual norm of the sign (ℓ₁ for entries, nuclear
    for singular values), falls as T^(-(p-1)/(3p-2)): T^(-1/4) for a finite variance.

    Parameters
    ----------
    method : {"signsgd", "lion", "muon", "muonlight"}
    T : int ≥ 1
        The number of steps.
    p : float in (1, 2]
        The moment that the noise has: ``𝔼|gᵢ - ∇ᵢf|^p ≤ σ₀ᵢ^p + σ₁ᵢ^p |∇ᵢf|^p``.
    sigma0, L0 : float or array_like ≥ 0
        For "signsgd" and "lion" one value per coordinate, whose sum counts, or that sum; with
        ``d``, one value that all d coordinates have. For matrices σ₀ bounds the noise's nuclear
        norm, and L₀ relates nuclear norms of gradients to spectral norms of steps; with ``m`` and
        ``n`` both are given for Frobenius norms, and multiplied by √r and r for r = min(m, n).
    sigma1, L1 : float or array_like ≥ 0, default 0
        How much noise and curvature grow with the gradient; the largest value counts (L₁ is
        multiplied by r as well).
    delta0 : float > 0
        f at the start minus its infimum.
    d : int, optional
        The number of coordinates.
    m, n : int, optional
        Rows and columns; "muonlight" needs them, as its step depends on them.

    Returns
    -------
    dict
        ``lr``; ``beta1`` and ``beta2``, which are equal (the ``momentum`` of `SignSGD` and `Muon`,
        the ``betas`` of `Lion`); and ``batch``, how many gradients to average in a step so that
        the noise relative to the gradient is below a quarter: ⌈(4σ₁)^(p/(p-1))⌉, at least 1. σ₀ is
        that of one step's average.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.

    Notes
    -----
    *Ours.* The exponents are the paper's; the constants are those of published analyses of
    normalized momentum. Take the result as a scaling law: tune ``lr`` at one horizon and let this
    carry it to another.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026.
    F. Hübler et al., "From gradient clipping to normalization for heavy-tailed SGD", AISTATS 2025.

    Examples
    --------
    With a finite variance, 16 times as many steps want an eighth of the step size:

    >>> from thalweg.training import theory_schedule
    >>> problem = dict(p=2, sigma0=1.0, L0=1.0, delta0=1.0, d=100)
    >>> short = theory_schedule("signsgd", T=1_000, **problem)
    >>> long = theory_schedule("signsgd", T=16_000, **problem)
    >>> round(short["lr"] / long["lr"], 6), round((1 - short["beta1"]) / (1 - long["beta1"]), 6)
    (8.0, 4.0)
    """
    check_choice("method", method, (*COORDINATE_METHODS, *MATRIX_METHODS))
    check_integer("T", T, at_least=1)
    check_number("p", p, above=1, at_most=2)
    check_number("delta0", delta0, above=0)
    noise, growth = _nonnegative("sigma0", sigma0), float(_nonnegative("sigma1", sigma1).max())
    smoothness, bend = _nonnegative("L0", L0), float(_nonnegative("L1", L1).max())
    sigma, L = float(noise.sum()), float(smoothness.sum())
    if L == 0:
        raise ValueError("L0 must be > 0 somewhere, got 0")
    scale = 1.0
    if method in COORDINATE_METHODS:
        _refuse_sizes(method, {"m": m, "n": n})
        if d is not None:
            check_integer("d", d, at_least=1)
            sigma, L = d * _single("sigma0", noise), d * _single("L0", smoothness)
    else:
        _refuse_sizes(method, {"d": d})
        if (m is None) != (n is None) or (method == "muonlight" and m is None):
            raise ValueError(f"m and n must both be given for {method!r}, got m={m}, n={n}")
        sigma, L = _single("sigma0", noise), _single("L0", smoothness)
        if m is not None and n is not None:
            rank = min(check_integer("m", m, at_least=1), check_integer("n", n, at_least=1))
            sigma, L, bend = math.sqrt(rank) * sigma, rank * L, rank * bend
            scale = MUONLIGHT_RMS * math.sqrt(max(m, n)) if method == "muonlight" else 1.0

    momentum_rate = 1.0
    if sigma > 0:
        momentum_rate = min(1.0, (delta0 * L / (sigma**2 * T)) ** (p / (3 * p - 2)))
    lr = math.sqrt(delta0 * momentum_rate / (L * T))
    if bend > 0:
        lr = min(lr, momentum_rate / (8 * bend))
    beta = 1 - momentum_rate
    return SignSchedule(lr=lr / scale, beta1=beta, beta2=beta, batch=_batch(growth, p))


def _batch(growth: float, p: float) -> int:
    try:
        return max(1, math.ceil(math.pow(4 * growth, p / (p - 1))))
    except OverflowError:
        raise ValueError(f"sigma1={growth:g} needs an infinite batch at p={p:g}") from None


def _nonnegative(name: str, value: ArrayLike) -> np.ndarray:
    array = check_finite(name, np.atleast_1d(np.asarray(value, dtype=np.float64)))
    if array.size == 0 or (array < 0).any():
        raise ValueError(f"{name} must be >= 0 and not empty, got {value!r}")
    return array


def _single(name: str, values: np.ndarray) -> float:
    if values.size != 1:
        raise ValueError(f"{name} must be one number here, got {values.size}")
    return float(values[0])


def _refuse_sizes(method: str, sizes: dict[str, int | None]) -> None:
    given = [name for name, size in sizes.items() if size is not None]
    if given:
        raise ValueError(f"{', '.join(given)} must not be given for {method!r}")
