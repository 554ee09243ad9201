"""Linear classification with an elastic-net penalty, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from thalweg.common.optional import requires
from thalweg.common.random import as_generator
from thalweg.convex.adaprox_iteration import ProximalSteps
from thalweg.convex.adaprox_linear import check_settings, fit_linear, normalized, partial_step
from thalweg.convex.linear_losses import LinearData, LinearLoss, hinge, log_loss, squared_hinge

with requires("convex"):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.class_weight import compute_sample_weight
    from sklearn.utils.metaestimators import available_if
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

LOSSES = {"log_loss": log_loss, "hinge": hinge, "squared_hinge": squared_hinge}


def _has_probabilities(estimator: Any) -> bool:
    return bool(estimator.loss == "log_loss")


class AdaProxClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    r"""Linear classification with an L1 or elastic-net penalty, and no step size to set.

    .. math:: \min_{w,b} \frac{1}{\sum_i s_i} \sum_i s_i \, \ell(x_i^\top w + b, y_i)
              + \alpha \rho \|w\|_1 + \frac{\alpha (1 - \rho)}{2} \|w\|^2

    with y = ±1, one class against the rest if there are more than two. The hinge loss with an L1
    penalty, a sparse support vector machine, is what scikit-learn's solvers do not offer but by
    stochastic gradients with a schedule.

    Parameters
    ----------
    loss : {"log_loss", "hinge", "squared_hinge"}
        ln(1 + exp(-yp)), max(0, 1 - yp), or its square.
    alpha : float ≥ 0, default 0.01
        α, which is 1/(nC) in terms of `sklearn.linear_model.LogisticRegression`.
    l1_ratio : float in [0, 1], default 1
        ρ.
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
        of the constant model; with the hinge loss, where 50 steps lower the objective by less than
        this part.
    class_weight : dict, "balanced" or None
        As in scikit-learn.
    warm_start : bool, default False
        Start from the last fit.
    random_state : int, RandomState or None
        Which samples are in a batch.

    Attributes
    ----------
    classes_ : ndarray of shape (k,)
    coef_ : ndarray of shape (1, d), or (k, d) if k > 2
    intercept_ : ndarray of shape (1,) or (k,)
    n_iter_ : int
        The largest number of steps of a class.
    mapping_norm_ : float
        The largest last norm of a gradient mapping, the measure of optimality.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Warns
    -----
    ConvergenceWarning
        If ``max_iter`` is reached first, with exact gradients.

    Notes
    -----
    One product with X and one with its transpose per step and class; sparse data stay sparse.
    Features of one scale converge fastest. Probabilities of more than two classes are those of
    each against the rest, normalized.

    *Ours.* All but the method, see `minimize_adaprox`.

    References
    ----------
    "Adaptive proximal gradient methods for three problem classes", NeurIPS 2026.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from sklearn.pipeline import make_pipeline
    >>> from sklearn.preprocessing import StandardScaler
    >>> from thalweg.convex import AdaProxClassifier
    >>> X, y = load_breast_cancer(return_X_y=True)
    >>> model = make_pipeline(StandardScaler(), AdaProxClassifier("hinge", alpha=0.02)).fit(X, y)
    >>> bool(model.score(X, y) > 0.96), bool((model[-1].coef_ == 0).sum() > 10)
    (True, True)
    """

    def __init__(
        self,
        loss: Literal["log_loss", "hinge", "squared_hinge"] = "log_loss",
        *,
        alpha: float = 0.01,
        l1_ratio: float = 1.0,
        fit_intercept: bool = True,
        D: float | Literal["auto"] = "auto",
        accelerated: bool | Literal["auto"] = "auto",
        batch_size: int | None = None,
        max_iter: int = 5000,
        tol: float = 1e-3,
        class_weight: Any = None,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.loss = loss
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.D = D
        self.accelerated = accelerated
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.tol = tol
        self.class_weight = class_weight
        self.warm_start = warm_start
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _loss(self) -> LinearLoss:
        check_settings(self, tuple(LOSSES))
        return LOSSES[self.loss]()

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> AdaProxClassifier:
        """Fit the model.

        Parameters
        ----------
        X : array_like or sparse array of shape (n, d)
        y : array_like of shape (n,)
            Classes.
        sample_weight : array_like of shape (n,), optional

        Returns
        -------
        The estimator.
        """
        loss = self._loss()
        X, y, weights = self._validated(X, y, sample_weight, reset=True)
        before: Any = getattr(self, "classes_", None)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y must hold at least two classes, got {len(self.classes_)} class")
        known = (
            self.warm_start
            and np.array_equal(before, self.classes_)
            and self.coef_.shape[1] == X.shape[1]
        )
        self._steps: list[ProximalSteps] | None = None
        data = LinearData(X, weights, self.fit_intercept)
        rng = as_generator(int(check_random_state(self.random_state).randint(2**31 - 1)))
        results = [
            fit_linear(
                self,
                data,
                targets,
                loss,
                (self.coef_[k], self.intercept_[k]) if known else None,
                rng,
            )
            for k, targets in enumerate(self._targets(y))
        ]
        self._set([data.unpack(result.x) for result in results])
        self.n_iter_ = max(result.nit for result in results)
        self.mapping_norm_ = max(result.mapping_norm for result in results)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> AdaProxClassifier:
        """Make one plain step with a batch; the coefficients are the average of the iterates.

        Parameters
        ----------
        X : array_like or sparse array of shape (n, d)
        y : array_like of shape (n,)
        classes : array_like of shape (k,)
            All classes; needed in the first call.
        sample_weight : array_like of shape (n,), optional
            Relative to the samples of the batch.

        Returns
        -------
        The estimator.
        """
        loss = self._loss()
        known = hasattr(self, "coef_")
        X, y, weights = self._validated(X, y, sample_weight, reset=not known)
        if not known:
            if classes is None:
                raise ValueError("classes must be given in the first call of partial_fit")
            self.classes_ = np.unique(np.asarray(classes))
            if len(self.classes_) < 2:
                raise ValueError("classes must hold at least two classes")
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"classes must be those of the first call, {self.classes_}")
        if not np.isin(y, self.classes_).all():
            raise ValueError(f"y must hold the classes {self.classes_} only")
        data = LinearData(X, weights, self.fit_intercept, centered=False)
        steps = getattr(self, "_steps", None)
        self._steps = [
            partial_step(
                steps[k] if steps else None,
                self,
                data,
                targets,
                loss,
                (self.coef_[k], self.intercept_[k]) if known else None,
            )
            for k, targets in enumerate(self._targets(y))
        ]
        self._set([data.unpack(each.average) for each in self._steps])
        self.n_iter_ = self.n_iter_ + 1 if known else 1
        return self

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return p, of shape (n,), or (n, k) for more than two classes."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        scores: NDArray[np.float64] = np.asarray(X @ self.coef_.T) + self.intercept_
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the classes of shape (n,)."""
        scores = self.decision_function(X)
        best = (scores > 0).astype(np.intp) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[best])

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return probabilities of shape (n, k), with the logistic loss."""
        shares: NDArray[np.float64] = expit(self.decision_function(X))
        if shares.ndim == 1:
            return np.column_stack([1 - shares, shares])
        total = shares.sum(axis=1, keepdims=True)
        return np.where(total > 0, shares / np.where(total > 0, total, 1), 1 / shares.shape[1])

    def _set(self, models: list[tuple[NDArray[np.float64], float]]) -> None:
        self.coef_ = np.array([coef for coef, _ in models])
        self.intercept_ = np.array([intercept for _, intercept in models])

    def _targets(self, y: NDArray[Any]) -> list[NDArray[np.float64]]:
        """Return ±1 for the second of two classes, or for each of more."""
        positive = self.classes_[1:] if len(self.classes_) == 2 else self.classes_
        return [np.where(y == label, 1.0, -1.0) for label in positive]

    def _validated(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> Any:
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, reset=reset)
        check_classification_targets(y)
        weights = _check_sample_weight(sample_weight, X, dtype=np.float64)
        if self.class_weight is not None:
            weights = weights * compute_sample_weight(self.class_weight, y)
        return X, y, normalized(weights)
