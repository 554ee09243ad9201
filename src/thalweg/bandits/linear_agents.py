"""Established agents for linear contextual bandits: OFUL, Thompson sampling and greedy ridge."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from thalweg.bandits import linear_methods
from thalweg.bandits.choice import ArmChoice
from thalweg.bandits.ridge import RidgeRegression
from thalweg.common.checks import check_choice, check_number
from thalweg.common.random import RNGLike

Array = NDArray[Any]
INFLATIONS = ("sqrt_dim", "confidence")


class LinUCB:
    r"""OFUL: plays the arm of largest upper confidence bound xᵀθ̂ + α β ‖x‖ in the metric V⁻¹.

    Parameters
    ----------
    dim : int
        The dimension d of a context.
    lam : float, default 1.0
        Ridge regularization λ > 0, in squared units of a context.
    sigma : float, default 1.0
        Sub-Gaussian scale of the reward noise, in units of the reward.
    S : float, default 1.0
        Bound on ‖θ*‖₂, in units of the reward over units of a context.
    delta : float, default 0.01
        The confidence ellipsoid of radius β holds θ* at all rounds with probability 1 - δ.
    scale : float, default 1.0
        The multiple α ≥ 0 of the radius. 1 is OFUL, with its guarantee; practice takes less.
    tie_break : {"random", "first"}, default "random"
        Which of several arms with exactly the largest index is played.
    refactor_every : int, default 2000
        Updates between two Cholesky factorizations.
    dtype : {float64, float32}, default float64
        Precision of contexts and of the maintained inverse.
    rng : int, numpy.random.Generator or None
        Breaks ties.

    Raises
    ------
    TypeError, ValueError
        If an argument is outside its range, or a context or reward is not finite.
    IndexError
        If ``update`` is given an arm that was not offered.

    Notes
    -----
    `select` costs O(K d²) and `update` O(d²). Rewards may come late and in any order.

    References
    ----------
    Abbasi-Yadkori, Pál and Szepesvári, "Improved algorithms for linear stochastic bandits",
    NeurIPS 2011. Li, Chu, Langford and Schapire, "A contextual-bandit approach to personalized
    news article recommendation", WWW 2010 (where the scale is tuned).

    Examples
    --------
    >>> agent = LinUCB(2, scale=0.5)
    >>> agent.update(np.eye(2), arm=0, reward=-1.0)
    >>> agent.select(np.eye(2))
    1
    """

    select = linear_methods.select
    update = linear_methods.update
    predict = linear_methods.predict
    get_state = linear_methods.get_state
    set_state = linear_methods.set_state

    def __init__(
        self,
        dim: int,
        *,
        lam: float = 1.0,
        sigma: float = 1.0,
        S: float = 1.0,
        delta: float = 0.01,
        scale: float = 1.0,
        tie_break: str = "random",
        refactor_every: int = 2000,
        dtype: DTypeLike = np.float64,
        rng: RNGLike = None,
    ) -> None:
        self.ridge = RidgeRegression(dim, lam=lam, refactor_every=refactor_every, dtype=dtype)
        self.choice = ArmChoice(tie_break, rng)
        self.sigma = check_number("sigma", sigma, at_least=0)
        self.S = check_number("S", S, at_least=0)
        self.delta = check_number("delta", delta, above=0, below=1)
        self.scale = check_number("scale", scale, at_least=0)

    @property
    def beta(self) -> Any:
        """The confidence radius β, in units of the reward."""
        return self.ridge.confidence_radius(self.sigma, self.S, self.delta)

    def index(self, contexts: ArrayLike) -> Array:
        """Return the upper confidence bound of each of the K contexts (K, d); shape (K,)."""
        contexts = self.ridge.check_contexts(contexts)
        width = np.asarray(self.scale * self.beta)[..., None]
        bound: Array = self.ridge.predict(contexts) + width * self.ridge.norms(contexts)
        return bound


class LinTS:
    r"""Thompson sampling: plays the best arm for θ̃ ~ N(θ̂, (α σ)² V⁻¹), drawn afresh each round.

    Parameters
    ----------
    dim : int
        The dimension d of a context.
    lam : float, default 1.0
        Ridge regularization λ > 0, in squared units of a context.
    sigma : float, default 1.0
        Sub-Gaussian scale of the reward noise, in units of the reward.
    S : float, default 1.0
        Bound on ‖θ*‖₂; used by ``scale="confidence"`` only, like ``delta``.
    delta : float, default 0.01
        One minus the confidence level.
    scale : float or {"sqrt_dim", "confidence"}, default 1.0
        The inflation α ≥ 0. 1 is the posterior under the prior N(0, σ²/λ I); "sqrt_dim" is √d,
        and "confidence" is β/σ, the inflation under which Abeille and Lazaric prove
        Õ(d^{3/2} √T).
    tie_break : {"random", "first"}, default "random"
        Which of several arms with exactly the largest index is played.
    refactor_every : int, default 2000
        Updates between two Cholesky factorizations of V.
    dtype : {float64, float32}, default float64
        Precision of contexts and of the maintained inverse.
    rng : int, numpy.random.Generator or None
        Draws θ̃ and breaks ties.

    Raises
    ------
    TypeError, ValueError
        If an argument is outside its range, or a context or reward is not finite.
    IndexError
        If ``update`` is given an arm that was not offered.

    Notes
    -----
    `select` costs O(K d + d³), the factor of V⁻¹ being the d³, and `update` O(d²).

    References
    ----------
    Agrawal and Goyal, "Thompson sampling for contextual bandits with linear payoffs", ICML 2013.
    Abeille and Lazaric, "Linear Thompson sampling revisited", AISTATS 2017.

    Examples
    --------
    >>> agent = LinTS(2, scale=0.1, rng=0)
    >>> agent.update(np.eye(2), arm=0, reward=-1.0)
    >>> agent.select(np.eye(2))
    1
    """

    select = linear_methods.select
    update = linear_methods.update
    predict = linear_methods.predict
    get_state = linear_methods.get_state
    set_state = linear_methods.set_state

    def __init__(
        self,
        dim: int,
        *,
        lam: float = 1.0,
        sigma: float = 1.0,
        S: float = 1.0,
        delta: float = 0.01,
        scale: float | str = 1.0,
        tie_break: str = "random",
        refactor_every: int = 2000,
        dtype: DTypeLike = np.float64,
        rng: RNGLike = None,
    ) -> None:
        self.ridge = RidgeRegression(dim, lam=lam, refactor_every=refactor_every, dtype=dtype)
        self.choice = ArmChoice(tie_break, rng)
        self.sigma = check_number("sigma", sigma, at_least=0)
        self.S = check_number("S", S, at_least=0)
        self.delta = check_number("delta", delta, above=0, below=1)
        self.scale: float | str = (
            check_choice("scale", scale, INFLATIONS)
            if isinstance(scale, str)
            else check_number("scale", scale, at_least=0)
        )

    @property
    def spread(self) -> Any:
        """The factor α σ of the sample's deviation from θ̂, in units of the reward."""
        if self.scale == "confidence":
            return self.ridge.confidence_radius(self.sigma, self.S, self.delta)
        if isinstance(self.scale, str):
            return math.sqrt(self.ridge.dim) * self.sigma
        return self.scale * self.sigma

    def index(self, contexts: ArrayLike) -> Array:
        """Return xᵀθ̃ of each of the K contexts (K, d) for a fresh sample θ̃; shape (K,)."""
        contexts = self.ridge.check_contexts(contexts)
        deviation = self.ridge.perturbation(self.choice.rng)
        spread = np.asarray(self.spread)[..., None]
        sample = (self.ridge.theta + spread * deviation).astype(contexts.dtype, copy=False)
        value: Array = (contexts @ sample[..., None])[..., 0]
        return value


class LinGreedy:
    """Greedy ridge regression: plays the arm of largest estimated mean, without exploration.

    Parameters
    ----------
    dim : int
        The dimension d of a context.
    lam : float, default 1.0
        Ridge regularization λ > 0, in squared units of a context.
    tie_break : {"random", "first"}, default "random"
        Which of several arms with exactly the largest index is played.
    refactor_every : int, default 2000
        Updates between two Cholesky factorizations.
    dtype : {float64, float32}, default float64
        Precision of contexts and of the maintained inverse.
    rng : int, numpy.random.Generator or None
        Breaks ties.

    Raises
    ------
    TypeError, ValueError
        If an argument is outside its range, or a context or reward is not finite.
    IndexError
        If ``update`` is given an arm that was not offered.

    Notes
    -----
    `select` costs O(K d) and `update` O(d²). Its regret is linear in general, and small where
    contexts are so diverse that they explore by themselves.

    References
    ----------
    Bastani, Bayati and Khosravi, "Mostly exploration-free algorithms for contextual bandits",
    Management Science 2021.

    Examples
    --------
    >>> agent = LinGreedy(2)
    >>> agent.update(np.eye(2), arm=0, reward=-1.0)
    >>> agent.select(np.eye(2))
    1
    """

    select = linear_methods.select
    update = linear_methods.update
    predict = linear_methods.predict
    get_state = linear_methods.get_state
    set_state = linear_methods.set_state

    def __init__(
        self,
        dim: int,
        *,
        lam: float = 1.0,
        tie_break: str = "random",
        refactor_every: int = 2000,
        dtype: DTypeLike = np.float64,
        rng: RNGLike = None,
    ) -> None:
        self.ridge = RidgeRegression(dim, lam=lam, refactor_every=refactor_every, dtype=dtype)
        self.choice = ArmChoice(tie_break, rng)

    def index(self, contexts: ArrayLike) -> Array:
        """Return the estimated mean reward of each of the K contexts (K, d); shape (K,)."""
        return self.ridge.predict(self.ridge.check_contexts(contexts))
