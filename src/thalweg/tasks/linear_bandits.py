"""Environments for linear contextual bandits: synthetic ones, and classification data sets.

An environment has ``round(rng)``, which returns the round's contexts (K, d), mean rewards (K,)
and rewards (K,). The noise belongs to the round, not to the arm, so that agents which are
simulated with the same stream meet the same contexts and the same noise whatever they play.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_number,
)
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[Any]
Round = tuple[Array, Array, Array]


@dataclass(frozen=True)
class LinearBandit:
    """Arms with mean rewards xᵀθ*, all of them offered each round or some drawn at random.

    Parameters
    ----------
    arms : ndarray of shape (N, d) or (R, N, d)
        The arms' contexts; with a leading axis, R independent instances that are played at once.
    theta : ndarray of shape (d,) or (R, d)
        The parameter θ*, in units of the reward over units of a context.
    sigma : float, default 1.0
        Standard deviation of the Gaussian noise, in units of the reward.
    offered : int, optional
        How many of the N arms are offered in a round, drawn without replacement; all by default.

    Examples
    --------
    >>> bandit = LinearBandit(arms=np.eye(2), theta=np.array([0.3, 0.8]))
    >>> contexts, means, rewards = bandit.round(np.random.default_rng(0))
    >>> means
    array([0.3, 0.8])
    >>> bool(np.ptp(rewards - means) < 1e-12)
    True
    """

    arms: Array
    theta: Array
    sigma: float = 1.0
    offered: int | None = None

    def __post_init__(self) -> None:
        *runs, n_arms, dim = self.arms.shape
        check_finite("arms", self.arms)
        check_array("theta", self.theta, shape=(*runs, dim))
        check_number("sigma", self.sigma, at_least=0)
        if self.offered is not None:
            check_integer("offered", self.offered, at_least=1, at_most=n_arms)

    @property
    def dim(self) -> int:
        """The dimension d of a context."""
        return int(self.arms.shape[-1])

    @property
    def theta_bound(self) -> float:
        """The largest ‖θ*‖₂ among the instances."""
        return float(np.linalg.norm(self.theta, axis=-1).max())

    @cached_property
    def means(self) -> Array:
        """The mean rewards of all arms, (N,) or (R, N)."""
        means: Array = (self.arms @ self.theta[..., None])[..., 0]
        return means

    def round(self, rng: np.random.Generator) -> Round:
        """Draw a round: contexts (K, d), mean rewards (K,), rewards (K,); or with a leading R."""
        contexts, means = self.arms, self.means
        if self.offered is not None:
            drawn = rng.random(means.shape).argsort(axis=-1)[..., : self.offered]
            contexts = np.take_along_axis(contexts, drawn[..., None], axis=-2)
            means = np.take_along_axis(means, drawn, axis=-1)
        noise = self.sigma * rng.standard_normal((*means.shape[:-1], 1))
        return contexts, means, means + noise


@dataclass(frozen=True)
class IsotropicBandit:
    """K fresh contexts per round, uniform on the unit sphere: they explore all by themselves.

    Parameters
    ----------
    theta : ndarray of shape (d,) or (R, d)
        The parameter θ*.
    n_arms : int
        The number K of contexts per round.
    sigma : float, default 1.0
        Standard deviation of the Gaussian noise, in units of the reward.

    Examples
    --------
    >>> bandit = IsotropicBandit(theta=np.array([1.0, 0.0]), n_arms=3)
    >>> [part.shape for part in bandit.round(np.random.default_rng(0))]
    [(3, 2), (3,), (3,)]
    """

    theta: Array
    n_arms: int
    sigma: float = 1.0

    def __post_init__(self) -> None:
        check_finite("theta", self.theta)
        check_integer("n_arms", self.n_arms, at_least=1)
        check_number("sigma", self.sigma, at_least=0)

    @property
    def dim(self) -> int:
        """The dimension d of a context."""
        return int(self.theta.shape[-1])

    def round(self, rng: np.random.Generator) -> Round:
        """Draw a round: contexts (K, d), mean rewards (K,), rewards (K,); or with a leading R."""
        *runs, dim = self.theta.shape
        contexts = unit_vectors(rng, (*runs, self.n_arms, dim))
        means = (contexts @ self.theta[..., None])[..., 0]
        return contexts, means, means + self.sigma * rng.standard_normal((*runs, 1))


@dataclass(frozen=True)
class ClassificationBandit:
    """A classification data set as a bandit: one arm per class, reward 1 for the right one.

    Each round draws an example z with replacement. The context of arm k holds z in the k-th of K
    blocks and 0 elsewhere, so that every class has weights of its own. Regret counts mistakes.

    Parameters
    ----------
    features : ndarray of shape (n, p)
    labels : ndarray of int of shape (n,)
        Classes 0, ..., K-1.
    n_runs : int, optional
        Draw R independent rounds at once.

    Examples
    --------
    >>> bandit = ClassificationBandit(np.array([[1.0, 0.5]]), np.array([1]))
    >>> contexts, means, _ = bandit.round(np.random.default_rng(0))
    >>> contexts
    array([[1. , 0.5, 0. , 0. ],
           [0. , 0. , 1. , 0.5]])
    >>> means
    array([0., 1.])
    """

    features: Array
    labels: NDArray[np.intp]
    n_runs: int | None = None

    def __post_init__(self) -> None:
        check_array("features", self.features, shape=("n", "p"))
        check_array("labels", self.labels, shape=(len(self.features),), dtype=np.intp)

    @cached_property
    def n_arms(self) -> int:
        """The number K of classes."""
        return int(self.labels.max()) + 1

    @property
    def dim(self) -> int:
        """The dimension K p of a context."""
        return self.n_arms * int(self.features.shape[1])

    def round(self, rng: np.random.Generator) -> Round:
        """Draw a round: contexts (K, K p), mean rewards (K,), rewards (K,); or with a leading R."""
        runs = () if self.n_runs is None else (self.n_runs,)
        example = rng.integers(len(self.labels), size=runs)
        K = self.n_arms
        contexts = np.zeros((*runs, K, K, self.features.shape[1]))
        contexts[..., np.arange(K), np.arange(K), :] = self.features[example][..., None, :]
        right = (np.arange(K) == self.labels[example][..., None]).astype(np.float64)
        return contexts.reshape(*runs, K, self.dim), right, right


def unit_vectors(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Draw vectors uniformly on the unit sphere of the last axis."""
    normal = rng.standard_normal(shape)
    normal /= np.linalg.norm(normal, axis=-1, keepdims=True)
    return normal


def fixed_arms_bandit(
    rng: RNGLike = None, *, n_arms: int = 50, dim: int = 10, n_runs: int | None = None
) -> LinearBandit:
    """Draw arms and θ* uniformly on the unit sphere; all arms are offered in every round.

    Examples
    --------
    >>> fixed_arms_bandit(0, n_arms=5, dim=3).arms.shape
    (5, 3)
    """
    rng, runs = as_generator(rng), _runs(n_runs)
    n_arms, dim = check_integer("n_arms", n_arms, at_least=1), check_integer("dim", dim, at_least=1)
    arms = unit_vectors(rng, (*runs, n_arms, dim))
    return LinearBandit(arms=arms, theta=unit_vectors(rng, (*runs, dim)))


def one_hot_bandit(
    rng: RNGLike = None, *, n_arms: int = 20, n_runs: int | None = None
) -> LinearBandit:
    """Draw a bandit without structure: one-hot contexts and mean rewards uniform on [0, 1].

    Examples
    --------
    >>> one_hot_bandit(0, n_arms=3).arms
    array([[1., 0., 0.],
           [0., 1., 0.],
           [0., 0., 1.]])
    """
    rng, runs = as_generator(rng), _runs(n_runs)
    n_arms = check_integer("n_arms", n_arms, at_least=1)
    arms = np.broadcast_to(np.eye(n_arms), (*runs, n_arms, n_arms))
    return LinearBandit(arms=arms, theta=rng.uniform(size=(*runs, n_arms)))


def changing_arms_bandit(
    rng: RNGLike = None,
    *,
    pool: int = 50,
    offered: int = 10,
    dim: int = 10,
    n_runs: int | None = None,
) -> LinearBandit:
    """Draw a pool of arms and θ* uniformly on the unit sphere; a random few are offered per round.

    Examples
    --------
    >>> changing_arms_bandit(0).round(np.random.default_rng(0))[0].shape
    (10, 10)
    """
    bandit = fixed_arms_bandit(rng, n_arms=pool, dim=dim, n_runs=n_runs)
    return LinearBandit(arms=bandit.arms, theta=bandit.theta, offered=offered)


def planted_gap_bandit(
    rng: RNGLike = None,
    *,
    n_arms: int = 10,
    dim: int = 3,
    gap: float = 0.5,
    n_runs: int | None = None,
) -> LinearBandit:
    """Draw fixed arms on the unit sphere, the first equal to θ*, the others behind it by ``gap``.

    The others are uniform on the part of the sphere where the mean reward is at most 1 - gap.

    Examples
    --------
    >>> means = planted_gap_bandit(0, gap=0.5).means
    >>> float(means[0].round(6)), bool(means[1:].max() <= 0.5)
    (1.0, True)
    """
    rng, runs = as_generator(rng), _runs(n_runs)
    n_arms, dim = check_integer("n_arms", n_arms, at_least=1), check_integer("dim", dim, at_least=2)
    gap = check_number("gap", gap, above=0, below=2)
    theta = unit_vectors(rng, (*runs, dim))
    arms = unit_vectors(rng, (*runs, n_arms, dim))
    while True:
        too_close = (arms @ theta[..., None])[..., 0] > 1 - gap
        if not too_close.any():
            break
        arms[too_close] = unit_vectors(rng, (int(too_close.sum()), dim))
    arms[..., 0, :] = theta
    return LinearBandit(arms=arms, theta=theta)


def isotropic_bandit(
    rng: RNGLike = None,
    *,
    n_arms: int = 20,
    dim: int = 10,
    sigma: float = 0.5,
    n_runs: int | None = None,
) -> IsotropicBandit:
    """Draw θ* uniformly on the unit sphere; contexts are fresh in every round.

    Examples
    --------
    >>> isotropic_bandit(0).dim
    10
    """
    rng = as_generator(rng)
    theta = unit_vectors(rng, (*_runs(n_runs), check_integer("dim", dim, at_least=1)))
    return IsotropicBandit(theta=theta, n_arms=n_arms, sigma=sigma)


def classification_bandit(
    name: str, *, components: int = 8, n_runs: int | None = None
) -> ClassificationBandit:
    """Return scikit-learn's digits, breast cancer or wine data as a bandit.

    The features are the leading principal components of the standardized data (of digits, whose
    pixels share a unit, of the centered data) and a bias, scaled to unit norm.

    Parameters
    ----------
    name : {"digits", "breast_cancer", "wine"}
    components : int, default 8
        The number of principal components.
    n_runs : int, optional
        Draw R independent rounds at once.

    Examples
    --------
    >>> classification_bandit("wine").dim
    27
    """
    name = check_choice("name", name, ("digits", "breast_cancer", "wine"))
    features, labels = _classification_data(name, components)
    return ClassificationBandit(features, labels, n_runs)


@lru_cache
def _classification_data(name: str, components: int) -> tuple[Array, NDArray[np.intp]]:
    with requires("peers"):
        from sklearn import datasets
    loaded = getattr(datasets, f"load_{name}")()
    X = loaded.data - loaded.data.mean(axis=0)
    if name != "digits":
        X /= X.std(axis=0)
    components = check_integer("components", components, at_least=1, at_most=X.shape[1])
    directions = np.linalg.svd(X, full_matrices=False)[2][:components]
    scores = X @ directions.T
    # The bias has the size of a typical component, so that unit norm leaves neither negligible.
    bias = np.full((len(X), 1), scores.std())
    features = np.hstack([scores, bias])
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    return features, loaded.target.astype(np.intp)


def _runs(n_runs: int | None) -> tuple[int, ...]:
    return () if n_runs is None else (check_integer("n_runs", n_runs, at_least=1),)
