"""Linear regression that is best on other data among all best fits, for scikit-learn."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thalweg.bilevel.finite_sums import LeastSquares
from thalweg.bilevel.linear_oracles import L1Ball, L2Ball, NuclearBall
from thalweg.bilevel.regularized_conditional_gradient import ir_cg
from thalweg.bilevel.vanishing_regularization import Method
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("bilevel"):
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data

Array = NDArray[np.float64]
BALLS = {"l1": L1Ball, "l2": L2Ball, "nuclear": NuclearBall}


class BilevelLinearRegression(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""Linear regression with more features than samples, selected by a second data set.

    .. math:: \min_W \frac{1}{2 n'} \|X' W + b - Y'\|^2 \quad \text{subject to} \quad
              W \in \arg\min_{\|V\| \le r} \frac{1}{2 n} \|X V + b - Y\|^2

    Where features outnumber samples many coefficients fit the training data X, Y equally well.
    This takes those among them that predict the outer data X', Y' best: a validation set, data of
    another source or an older task. The intercept b follows from the means of the training data.

    Parameters
    ----------
    radius : float > 0, default 10
        r, in units of the coefficients.
    norm : {"l1", "l2", "nuclear"}
        Of the set: "l1" makes sparse, "nuclear" low-rank coefficients of several targets.
    method : {"irfscg", "irscg", "deterministic"}
        See `ir_cg`.
    reg : float ≥ 0 or "auto", default "auto"
        ς of `ir_cg`.
    fit_intercept : bool, default True
    outer_share : float in (0, 1), default 0.5
        The share of the samples that are set aside as outer data, if `fit` gets none.
    max_iter : int, default 2000
        Steps.
    random_state : int, RandomState or None
        The source of batches and of the division of the samples.

    Attributes
    ----------
    coef_ : ndarray of shape (d,), or (k, d) for k targets
    intercept_ : float, or ndarray of shape (k,)
    inner_loss_, outer_loss_ : float
        The values of the two objectives.
    gap_ : float
        The Frank-Wolfe gap of the inner objective, within which ``inner_loss_`` is of the least
        possible one.
    n_iter_ : int
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Notes
    -----
    Steps cost as in `ir_cg`. Standardize the features: the ball treats them alike.

    *Ours.* The division of the samples and the intercept; the method is that of `ir_cg`.

    References
    ----------
    "Iteratively regularized conditional gradient for simple bilevel optimization", NeurIPS 2025.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import BilevelLinearRegression
    >>> rng = np.random.default_rng(0)
    >>> X, X_outer = rng.standard_normal((20, 40)), rng.standard_normal((60, 40))
    >>> model = BilevelLinearRegression(radius=2.0, random_state=0)
    >>> model = model.fit(X, X[:, 0] - X[:, 1], X_outer, X_outer[:, 0] - X_outer[:, 1])
    >>> bool(np.abs(model.coef_[:2] - [1, -1]).max() < 0.1)
    True
    """

    def __init__(
        self,
        radius: float = 10.0,
        *,
        norm: Literal["l1", "l2", "nuclear"] = "l1",
        method: Method = "irfscg",
        reg: float | Literal["auto"] = "auto",
        fit_intercept: bool = True,
        outer_share: float = 0.5,
        max_iter: int = 2000,
        random_state: Any = None,
    ) -> None:
        self.radius = radius
        self.norm = norm
        self.method = method
        self.reg = reg
        self.fit_intercept = fit_intercept
        self.outer_share = outer_share
        self.max_iter = max_iter
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self, X: Any, y: Any, X_outer: Any = None, y_outer: Any = None
    ) -> BilevelLinearRegression:
        """Fit the model.

        Parameters
        ----------
        X : array_like of shape (n, d)
        y : array_like of shape (n,) or (n, k)
        X_outer : array_like of shape (n', d), optional
        y_outer : array_like of shape (n',) or (n', k), optional
            By default a share of the samples.

        Returns
        -------
        The estimator.
        """
        make_ball = BALLS[check_choice("norm", self.norm, tuple(BALLS))]
        ball: Any = make_ball(check_number("radius", self.radius, above=0))
        check_choice("fit_intercept", self.fit_intercept, (True, False))
        check_integer("max_iter", self.max_iter, at_least=1)
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        random = check_random_state(self.random_state)
        inner, outer = self._levels(X, y, X_outer, y_outer, random)
        means = [a.mean(axis=0) if self.fit_intercept else np.zeros(a.shape[1]) for a in inner]
        inner_sum, outer_sum = (LeastSquares(A - means[0], B - means[1]) for A, B in (inner, outer))
        result = ir_cg(
            inner_sum,
            outer_sum,
            ball,
            np.zeros((X.shape[1], inner[1].shape[1])),
            method=self.method,
            reg=self.reg,
            maxiter=self.max_iter,
            rng=int(random.randint(2**31 - 1)),
        )
        self.coef_ = result.x.T if y.ndim == 2 else result.x[:, 0]
        intercept = means[1] - means[0] @ result.x
        self.intercept_ = intercept if y.ndim == 2 else float(intercept[0])
        self.inner_loss_ = float(result.fun_inner)
        self.outer_loss_ = float(result.fun_outer)
        self.gap_ = result.fw_gap_inner
        self.n_iter_ = int(result.nit)
        return self

    def predict(self, X: Any) -> Array:
        """Return predictions of shape (n,) or (n, k)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        predicted: Array = X @ self.coef_.T + self.intercept_
        return predicted

    def _levels(
        self, X: Array, y: Array, X_outer: Any, y_outer: Any, random: Any
    ) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Return (X, Y) of both levels, with Y of shape (n, k)."""
        if (X_outer is None) != (y_outer is None):
            raise ValueError("X_outer and y_outer must be given together")
        targets = y.reshape(len(y), -1)
        if X_outer is None:
            share = check_number("outer_share", self.outer_share, above=0, below=1)
            n_outer = min(max(1, round(share * len(y))), len(y) - 1)
            order = random.permutation(len(y))
            first, second = order[n_outer:], order[:n_outer]
            return (X[first], targets[first]), (X[second], targets[second])
        X_outer, y_outer = validate_data(
            self,
            X_outer,
            y_outer,
            dtype=np.float64,
            multi_output=True,
            y_numeric=True,
            reset=False,
        )
        if y_outer.shape[1:] != y.shape[1:]:
            raise ValueError(
                f"y_outer must have the columns of y, got shapes {y_outer.shape} and {y.shape}"
            )
        return (X, targets), (X_outer, y_outer.reshape(len(y_outer), -1))
