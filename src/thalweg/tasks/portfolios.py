"""Daily returns of stocks, and the limits that a fund has to keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("peers"):
    import pandas as pd
    from skfolio.datasets import load_factors_dataset, load_sp500_dataset

Array = NDArray[np.float64]

SECTORS = {
    "technology": ["AAPL", "AMD", "MSFT"],
    "finance": ["BAC", "JPM"],
    "retail": ["BBY", "HD"],
    "energy": ["CVX", "RRC", "XOM"],
    "health": ["JNJ", "LLY", "MRK", "PFE", "UNH"],
    "staples": ["KO", "PEP", "PG", "WMT"],
}
FACTORS = ["MTUM", "QUAL", "SIZE", "USMV", "VLUE"]


@dataclass(frozen=True)
class PortfolioDays:
    """Growth of stocks by day, with linear limits on the weights of a portfolio.

    Attributes
    ----------
    names : tuple of str
        n stocks.
    growth : ndarray of shape (T, n)
        Price of a day over that of the day before.
    A, b : ndarray of shape (m, n), (m,)
        The weights w, which are at least 0 and sum to 1, must keep A w ≤ b.
    """

    names: tuple[str, ...]
    growth: Array
    A: Array
    b: Array


@lru_cache(maxsize=4)
def portfolio_days(factor_limit: float = 0.02) -> PortfolioDays:
    """Return 20 large American stocks, 2014 to 2022, with limits on sectors and factors.

    Parameters
    ----------
    factor_limit : float, default 0.02
        How far the portfolio's beta to each of five style factors (of the first year's returns)
        may be from that of equal weights. Small ones make the set thin.

    Notes
    -----
    No weight above 0.2, no sector above 0.4. Prices come with the package skfolio.

    Examples
    --------
    >>> days = portfolio_days()
    >>> days.growth.shape[1], bool(np.all(days.A @ np.full(20, 0.05) <= days.b))
    (20, True)
    """
    prices, factors = load_sp500_dataset(), load_factors_dataset()
    common = prices.index.intersection(factors.index)
    growth = _growth(prices.loc[common])
    betas = _betas(growth.iloc[:250] - 1, _growth(factors.loc[common, FACTORS]).iloc[:250] - 1)
    names = tuple(growth.columns)
    n = len(names)
    sectors = np.array([[name in members for name in names] for members in SECTORS.values()])
    tilt = betas - betas.mean(axis=1, keepdims=True)
    A = np.vstack([-np.eye(n), np.eye(n), sectors.astype(float), tilt, -tilt])
    limits = [(0.0, n), (0.2, n), (0.4, len(sectors)), (factor_limit, 2 * len(betas))]
    b = np.concatenate([np.full(count, limit) for limit, count in limits])
    return PortfolioDays(names, growth.to_numpy()[250:], A, b)


def _growth(prices: pd.DataFrame) -> pd.DataFrame:
    return (prices / prices.shift(1)).iloc[1:]


def _betas(returns: pd.DataFrame, factors: pd.DataFrame) -> Array:
    centered = factors.to_numpy() - factors.to_numpy().mean(axis=0)
    betas: Array = np.linalg.lstsq(centered, returns.to_numpy(), rcond=None)[0]
    return betas
