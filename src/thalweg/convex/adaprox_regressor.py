"""Linear regression with an elastic-net penalty, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_number
from thalweg.common.optional import requires
from thalweg.common.random import as_generator
from thalweg.convex.adaprox_iteration import ProximalSteps
from thalweg.convex.adaprox_linear import check_settings, fit_linear, normalized, partial_step
from thalweg.convex.linear_losses import (
    LinearData,
    LinearLoss,
    absolute_error,
    huber,
    squared_error,
)

with requires("convex"):
    from sklearn.base import BaseEstimator, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

LOSSES = ("squared_error", "huber", "absolute_error")


class AdaProxRegressor(RegressorMixin, BaseEstimator):  # type: ignore[misc]
    r"""Linear regression with an L1 or elastic-net penalty, and no step size to set.

    .. math:: \min_{w,b} \frac{1}{\sum_i s_i} \sum_i s_i \, \ell(x_i^\top w + b, y_i)
              + \alpha \rho \|w\|_1 + \frac{\alpha (1 - \rho)}{2} \|w\|^2

    Where the loss is squared and the data fit into memory, coordinate descent
    (`sklearn.linear_model.ElasticNet`, skglm, celer) is faster. This one takes the robust losses,
    among them the absolute one, which has no gradient, and batches.

    Parameters
    ----------
    loss : {"squared_error", "huber", "absolute_error"}
        (p - y)²/2; the same up to a residual ``epsilon`` and linear beyond; ``|p - y|``.
    alpha : float ≥ 0, default 0.01
        α. With the squared error it is that of `sklearn.linear_model.ElasticNet`.
    l1_ratio : float in [0, 1], default 1
        ρ.
    epsilon : float > 0, default 1.35
        Of "huber", in units of y.
    fit_intercept : bool, default True
        It is not penalized.
    D : float > 0 or "auto", default "auto"
        About the norm of the coefficients; "auto" is the standard deviation of y over that of the
        features.
    accelerated : bool or "auto", default "auto"
        The accelerated variant; "auto" where the loss is not smooth, with exact gradients.
    batch_size : int, optional
        Take noisy gradients of this many random samples; the result is an average of iterates. By
        default gradients are exact.
    max_iter : int, default 5000
        Number of steps.
    tol : float ≥ 0, default 1e-3
        Stop where the norm of the gradient mapping is at most this part of the norm of the gradient
        of the constant model; with the absolute error, where 50 steps lower the objective by
        less than this part.
    warm_start : bool, default False
        Start from the last fit.
    random_state : int, RandomState or None
        Which samples are in a batch.

    Attributes
    ----------
    coef_ : ndarray of shape (d,)
    intercept_ : float
    n_iter_ : int
    mapping_norm_ : float
        The last norm of the gradient mapping, the measure of optimality.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` is reached first, with exact gradients.

    Notes
    -----
    One product with X and one with its transpose per step; sparse data stay sparse. Features of
    one scale converge fastest (`sklearn.preprocessing.StandardScaler`, MaxAbsScaler for sparse
    ones).

    *Ours.* All but the method, see `minimize_adaprox`.

    References
    ----------
    "Adaptive proximal gradient methods for three problem classes", NeurIPS 2026.

    Examples
    --------
    One wild outlier, which the absolute error does not mind:

    >>> import numpy as np
    >>> from thalweg.convex import AdaProxRegressor
    >>> X = np.random.default_rng(0).standard_normal((100, 5))
    >>> y = X[:, 0] * 2 + 1
    >>> y[0] = 1000
    >>> model = AdaProxRegressor(loss="absolute_error", alpha=0.01).fit(X, y)
    >>> bool(abs(model.coef_[0] - 2) < 0.02), bool(abs(model.intercept_ - 1) < 0.02)
    (True, True)
    """

    def __init__(
        self,
        loss: Literal["squared_error", "huber", "absolute_error"] = "squared_error",
        *,
        alpha: float = 0.01,
        l1_ratio: float = 1.0,
        epsilon: float = 1.35,
        fit_intercept: bool = True,
        D: float | Literal["auto"] = "auto",
        accelerated: bool | Literal["auto"] = "auto",
        batch_size: int | None = None,
        max_iter: int = 5000,
        tol: float = 1e-3,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.epsilon = epsilon
        self.fit_intercept = fit_intercept
        self.D = D
        self.accelerated = accelerated
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.warm_start = warm_start
        self.random_state = random_state

    coef_: NDArray[np.float64]
    intercept_: float

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _loss(self) -> LinearLoss:
        check_settings(self, LOSSES)
        if self.loss == "huber":
            return huber(check_number("epsilon", self.epsilon, above=0))
        return squared_error() if self.loss == "squared_error" else absolute_error()

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> AdaProxRegressor:
        """Fit the model.

        Parameters
        ----------
        X : array_like or sparse array of shape (n, d)
        y : array_like of shape (n,)
        sample_weight : array_like of shape (n,), optional

        Returns
        -------
        The estimator.
        """
        loss = self._loss()
        X, y, weights = self._validated(X, y, sample_weight, reset=True)
        self._steps: ProximalSteps | None = None
        known = self.warm_start and hasattr(self, "coef_") and len(self.coef_) == X.shape[1]
        data = LinearData(X, weights, self.fit_intercept)
        result = fit_linear(
            self,
            data,
            y,
            loss,
            (self.coef_, self.intercept_) if known else None,
            as_generator(int(check_random_state(self.random_state).randint(2**31 - 1))),
        )
        self.coef_, self.intercept_ = data.unpack(result.x)
        self.n_iter_, self.mapping_norm_ = result.nit, result.mapping_norm
        return self

    def partial_fit(
        self, X: Any, y: Any, sample_weight: ArrayLike | None = None
    ) -> AdaProxRegressor:
        """Make one plain step with a batch; the coefficients are the average of the iterates.

        Parameters
        ----------
        X : array_like or sparse array of shape (n, d)
        y : array_like of shape (n,)
        sample_weight : array_like of shape (n,), optional
            Relative to the samples of the batch.

        Returns
        -------
        The estimator.
        """
        loss = self._loss()
        known = hasattr(self, "coef_")
        X, y, weights = self._validated(X, y, sample_weight, reset=not known)
        data = LinearData(X, weights, self.fit_intercept, centered=False)
        warm = (self.coef_, self.intercept_) if known else None
        self._steps = partial_step(getattr(self, "_steps", None), self, data, y, loss, warm)
        self.coef_, self.intercept_ = data.unpack(self._steps.average)
        self.n_iter_ = self.n_iter_ + 1 if known else 1
        return self

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return predictions of shape (n,)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        return np.asarray(X @ self.coef_) + self.intercept_

    def _validated(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> Any:
        X, y = validate_data(
            self, X, y, accept_sparse="csr", dtype=np.float64, y_numeric=True, reset=reset
        )
        weights = normalized(_check_sample_weight(sample_weight, X, dtype=np.float64))
        return X, np.asarray(y, dtype=np.float64), weights
