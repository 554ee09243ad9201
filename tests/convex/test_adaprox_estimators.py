"""The scikit-learn estimators: optimal, sparse, and at home among their kind."""

from __future__ import annotations

import cvxpy as cp
import numpy as np
import pytest
import scipy.sparse
from sklearn.datasets import load_iris
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import ElasticNet, Lasso, LogisticRegression
from sklearn.utils.estimator_checks import parametrize_with_checks

from thalweg.convex import AdaProxClassifier, AdaProxRegressor
from thalweg.convex.linear_losses import (
    absolute_error,
    hinge,
    huber,
    log_loss,
    squared_error,
    squared_hinge,
)
from thalweg.tasks import breast_cancer

ESTIMATORS = [
    AdaProxRegressor(),
    AdaProxRegressor("huber"),
    AdaProxRegressor("absolute_error"),
    AdaProxClassifier(),
    AdaProxClassifier("hinge"),
    AdaProxClassifier("squared_hinge"),
]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks(ESTIMATORS)
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def regression(n=200, d=20, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, d)) * np.linspace(0.5, 2, d) + 3
    y = X[:, :3] @ [2.0, -1.0, 0.5] + 10 + 0.5 * rng.standard_normal(n)
    return X, y


def test_squared_error_is_the_lasso_and_the_elastic_net():
    X, y = regression()
    for rho in (1.0, 0.5):
        ours = AdaProxRegressor(alpha=0.1, l1_ratio=rho, tol=1e-8).fit(X, y)
        theirs = ElasticNet(alpha=0.1, l1_ratio=rho, tol=1e-12).fit(X, y)
        np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-5)
        assert ours.intercept_ == pytest.approx(theirs.intercept_, abs=1e-4)
        np.testing.assert_array_equal(ours.coef_ == 0, theirs.coef_ == 0)


def test_log_loss_is_logistic_regression():
    problem = breast_cancer("logistic")
    ours = AdaProxClassifier(alpha=0.02, D=10.0, tol=1e-5, max_iter=50_000).fit(
        problem.X, problem.y
    )
    theirs = LogisticRegression(
        C=1 / (len(problem.y) * 0.02), l1_ratio=1, solver="saga", tol=1e-8, max_iter=100_000
    ).fit(problem.X, problem.y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=5e-3)
    np.testing.assert_allclose(
        ours.predict_proba(problem.X), theirs.predict_proba(problem.X), atol=2e-3
    )


@pytest.mark.parametrize("loss", ["hinge", "absolute_error"])
def test_nonsmooth_losses_come_near_their_optimum(loss):
    """Within 2 % of a linear program's optimum, at the default tolerance."""
    if loss == "hinge":
        problem = breast_cancer("hinge")
        X, y, model = problem.X, problem.y, AdaProxClassifier("hinge", alpha=0.02)
    else:
        X, y = regression()
        model = AdaProxRegressor("absolute_error", alpha=0.05)
    model.fit(X, y)
    w, b = cp.Variable(X.shape[1]), cp.Variable()
    p = X @ w + b
    losses = cp.pos(1 - cp.multiply(y, p)) if loss == "hinge" else cp.abs(p - y)
    optimum = cp.Problem(cp.Minimize(cp.sum(losses) / len(y) + model.alpha * cp.norm1(w))).solve(
        solver=cp.CLARABEL
    )
    coef = np.ravel(model.coef_)
    predictions = X @ coef + float(np.ravel(model.intercept_)[0])
    reached = (hinge() if loss == "hinge" else absolute_error()).value(predictions, y).mean()
    reached += model.alpha * np.abs(coef).sum()
    assert optimum * (1 - 1e-6) <= reached <= 1.02 * optimum
    assert np.sum(coef == 0) >= (10 if loss == "hinge" else 1)


def test_huber_with_a_large_epsilon_is_the_lasso_and_with_a_small_one_ignores_outliers():
    X, y = regression()
    large = AdaProxRegressor("huber", epsilon=1e6, alpha=0.1, D=2.0, tol=1e-7).fit(X, y)
    np.testing.assert_allclose(large.coef_, Lasso(0.1, tol=1e-10).fit(X, y).coef_, atol=1e-4)
    y = y.copy()
    y[:10] += 1e4
    robust = AdaProxRegressor("huber", epsilon=1.0, alpha=0.01, tol=1e-6).fit(X, y)
    w, b = cp.Variable(X.shape[1]), cp.Variable()
    losses = cp.sum(cp.huber(X @ w + b - y, 1.0)) / (2 * len(y))
    cp.Problem(cp.Minimize(losses + 0.01 * cp.norm1(w))).solve(solver=cp.CLARABEL)
    np.testing.assert_allclose(robust.coef_, w.value, atol=1e-3)


@pytest.mark.parametrize(
    "loss", [squared_error(), huber(0.7), absolute_error(), log_loss(), hinge(), squared_hinge()]
)
def test_slopes_are_derivatives(loss):
    y = np.array([1.0, -1.0] * 20)
    p = np.linspace(-2.03, 2.11, 40)
    difference = (loss.value(p + 1e-6, y) - loss.value(p - 1e-6, y)) / 2e-6
    np.testing.assert_allclose(loss.slope(p, y), difference, atol=1e-6)


@pytest.mark.parametrize("fit_intercept", [False, True])
def test_sparse_data_give_what_dense_data_give(fit_intercept):
    X, y = regression()
    X = np.where(np.abs(X - 3) < 0.5, 0.0, X)
    dense = AdaProxRegressor(alpha=0.1, fit_intercept=fit_intercept, tol=1e-8).fit(X, y)
    for kind in (scipy.sparse.csr_array, scipy.sparse.csc_matrix):
        sparse = AdaProxRegressor(alpha=0.1, fit_intercept=fit_intercept, tol=1e-8).fit(kind(X), y)
        np.testing.assert_allclose(sparse.coef_, dense.coef_, atol=1e-6)
        np.testing.assert_allclose(sparse.predict(kind(X)), dense.predict(X), atol=1e-5)
    assert fit_intercept or dense.intercept_ == 0


def test_units_do_not_matter():
    X, y = regression()
    first = AdaProxRegressor(alpha=0.1).fit(X, y)
    # Loss and penalty scale alike where alpha is in the units of X and y.
    second = AdaProxRegressor(alpha=0.1 * 1e3 * 1e-2).fit(1e-2 * X, 1e3 * y)
    assert second.n_iter_ == first.n_iter_
    np.testing.assert_allclose(second.coef_, 1e5 * first.coef_, rtol=1e-6, atol=1e-3)


def test_weights_count_samples():
    X, y = regression(60)
    weights = np.arange(60) % 4
    weighted = AdaProxRegressor(alpha=0.05, tol=1e-8).fit(X, y, sample_weight=weights)
    repeated = AdaProxRegressor(alpha=0.05, tol=1e-8).fit(
        np.repeat(X, weights, axis=0), np.repeat(y, weights)
    )
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-6)


def test_balanced_classes():
    rng = np.random.default_rng(0)
    X = np.r_[rng.standard_normal((200, 2)), rng.standard_normal((20, 2)) + 1.5]
    y = np.repeat([0, 1], [200, 20])
    plain = AdaProxClassifier().fit(X, y)
    balanced = AdaProxClassifier(class_weight="balanced").fit(X, y)
    assert (balanced.predict(X) == 1).sum() > 1.5 * (plain.predict(X) == 1).sum()


def test_more_than_two_classes_are_fitted_one_against_the_rest():
    X, y = load_iris(return_X_y=True)
    model = AdaProxClassifier(alpha=1e-3, tol=1e-2).fit(X, y)
    second = AdaProxClassifier(alpha=1e-3, tol=1e-2).fit(X, y == 1)
    np.testing.assert_array_equal(model.coef_[1], second.coef_[0])
    probabilities = model.predict_proba(X)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1)
    np.testing.assert_array_equal(probabilities.argmax(axis=1), model.predict(X))
    assert model.score(X, y) > 0.9


def test_only_the_log_loss_has_probabilities():
    X, y = load_iris(return_X_y=True)
    assert not hasattr(AdaProxClassifier("hinge").fit(X, y), "predict_proba")


def test_batches_come_near_and_repeat():
    problem = breast_cancer("logistic")
    exact = AdaProxClassifier(alpha=0.02).fit(problem.X, problem.y)
    batch = AdaProxClassifier(alpha=0.02, batch_size=16, max_iter=4000, random_state=0)
    noisy = batch.fit(problem.X, problem.y).coef_.copy()
    again = batch.fit(problem.X, problem.y).coef_
    np.testing.assert_array_equal(noisy, again)
    assert np.mean(batch.predict(problem.X) == exact.predict(problem.X)) > 0.98
    assert np.sum(noisy == 0) >= 15


def test_partial_fits_learn():
    problem = breast_cancer("logistic")
    rng = np.random.default_rng(0)
    model = AdaProxClassifier(alpha=0.02)
    regressor = AdaProxRegressor(alpha=0.02)
    for _ in range(800):
        rows = rng.integers(len(problem.y), size=32)
        model.partial_fit(problem.X[rows], problem.y[rows], classes=[-1.0, 1.0])
        regressor.partial_fit(problem.X[rows], problem.y[rows])
    assert model.n_iter_ == regressor.n_iter_ == 800
    assert model.score(problem.X, problem.y) > 0.95
    assert np.mean(np.sign(regressor.predict(problem.X)) == problem.y) > 0.93
    # A partial fit goes on from a fit.
    fitted = AdaProxRegressor(alpha=0.02).fit(problem.X, problem.y)
    before = fitted.coef_.copy()
    fitted.partial_fit(problem.X, problem.y)
    assert np.linalg.norm(fitted.coef_ - before) < 2 * np.sqrt(30)
    assert fitted.n_iter_ > 1


def test_warm_starts_arrive_at_once():
    X, y = regression()
    model = AdaProxRegressor(alpha=0.1, tol=1e-4, warm_start=True).fit(X, y)
    assert model.n_iter_ > 5
    assert model.fit(X, y).n_iter_ <= 2
    problem = breast_cancer("logistic")
    classifier = AdaProxClassifier(warm_start=True).fit(problem.X, problem.y)
    first = classifier.n_iter_
    assert classifier.fit(problem.X, problem.y).n_iter_ < 0.5 * first


def test_running_out_of_steps_is_said():
    X, y = regression()
    with pytest.warns(ConvergenceWarning, match="max_iter=3 .*norm"):
        AdaProxRegressor(max_iter=3, tol=1e-9).fit(X, y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "cubic"}, "loss must be"),
        ({"alpha": -1.0}, "alpha must be"),
        ({"l1_ratio": 2.0}, "l1_ratio must be"),
        ({"accelerated": "yes"}, "accelerated must be"),
        ({"D": 0.0}, "D must be"),
        ({"max_iter": 0}, "max_iter must be"),
        ({"tol": -1.0}, "tol must be"),
        ({"batch_size": 0}, "batch_size must be"),
    ],
)
@pytest.mark.parametrize("kind", [AdaProxRegressor, AdaProxClassifier])
def test_bad_settings(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings).fit(np.eye(4), [0, 1, 0, 1])


def test_bad_data():
    X, y = np.eye(4), np.array([0, 1, 0, 1])
    with pytest.raises(ValueError, match="epsilon must be"):
        AdaProxRegressor("huber", epsilon=0.0).fit(X, y)
    with pytest.raises(ValueError, match="nonnegative"):
        AdaProxRegressor().fit(X, y, sample_weight=[-1.0, 1, 1, 1])
    with pytest.raises(ValueError, match="two classes"):
        AdaProxClassifier().fit(X, np.zeros(4))
    with pytest.raises(ValueError, match="first call"):
        AdaProxClassifier().partial_fit(X, y)
    with pytest.raises(ValueError, match="at least two"):
        AdaProxClassifier().partial_fit(X, y, classes=[1])
    model = AdaProxClassifier().partial_fit(X, y, classes=[0, 1])
    with pytest.raises(ValueError, match="those of the first call"):
        model.partial_fit(X, y, classes=[0, 2])
    with pytest.raises(ValueError, match="classes \\[0 1\\] only"):
        model.partial_fit(X, y + 1)
