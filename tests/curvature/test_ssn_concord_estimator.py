"""SSNConcord and SSNConcordCV: units, scores, paths, choices and scikit-learn's own checks."""

from __future__ import annotations

import pickle

import matplotlib as mpl
import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.model_selection import KFold
from sklearn.utils.estimator_checks import estimator_checks_generator

from thalweg.curvature import SSNConcord, SSNConcordCV, ssn_concord
from thalweg.curvature.concord_data import covariance_of, standardize_columns
from thalweg.tasks import gene_expression, sparse_gaussian

mpl.use("Agg")


def samples(seed=0, n=100, p=15):
    X = sparse_gaussian(np.random.default_rng(seed), n, p, density=0.2).X
    return X * np.linspace(0.1, 10, p) + np.arange(p)


def standardized(X):
    return (X - X.mean(axis=0)) / X.std(axis=0)


CHECKED = [
    SSNConcord(),
    SSNConcordCV(n_alphas=3),
    SSNConcordCV(n_alphas=3, criterion="cv", cv=2),
]
CHECKS = [
    pytest.param(estimator, check, id=f"{type(estimator).__name__}-{k}-{check.func.__name__}")
    for k, each in enumerate(CHECKED)
    for estimator, check in estimator_checks_generator(each, legacy=True)
]


@pytest.mark.parametrize(("estimator", "check"), CHECKS)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


# The estimate


def test_the_fit_is_the_solution_for_the_correlations():
    X = samples()
    model = SSNConcord(alpha=0.15).fit(X)
    Z = standardized(X)
    result = ssn_concord(Z.T @ Z / len(Z), 0.15)
    W = result.omega.toarray()
    np.testing.assert_allclose(model.omega_.toarray(), W, rtol=0, atol=1e-9)
    theta = np.diag(W)[:, None] * W
    precision = (theta + theta.T) / 2
    scale = X.std(axis=0)
    np.testing.assert_allclose(
        model.precision_, precision / np.outer(scale, scale), rtol=0, atol=1e-6
    )
    root = np.sqrt(np.diag(precision))
    expected = -precision / np.outer(root, root)
    np.fill_diagonal(expected, 1.0)
    np.testing.assert_allclose(model.partial_correlation_, expected, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(model.graph_, result.edges("and").toarray())
    assert model.objective_ == pytest.approx(result.objective.sum(), abs=1e-9)


def test_without_penalty_it_is_the_inverse_covariance():
    X = samples(1, n=500, p=6)
    model = SSNConcord(alpha=1e-9).fit(X)
    covariance = np.cov(X.T, bias=True)
    np.testing.assert_allclose(model.precision_ @ covariance, np.eye(6), rtol=0, atol=1e-6)


def test_units_of_measurement():
    X = samples(2)
    units = np.logspace(-3, 3, X.shape[1])
    first, second = SSNConcord(0.1).fit(X), SSNConcord(0.1).fit(X * units)
    np.testing.assert_allclose(
        second.partial_correlation_, first.partial_correlation_, rtol=0, atol=1e-9
    )
    ratio = second.precision_ * np.outer(units, units)
    np.testing.assert_allclose(ratio, first.precision_, rtol=1e-6, atol=1e-9)
    raw = SSNConcord(0.1, standardize=False).fit(X)
    np.testing.assert_array_equal(raw.scale_, 1)
    result = ssn_concord(np.cov(X.T, bias=True), 0.1)
    np.testing.assert_allclose(raw.omega_.toarray(), result.omega.toarray(), rtol=0, atol=1e-8)


def test_centered_data_may_be_taken_as_they_are():
    X = samples(3) - 0.3
    model = SSNConcord(0.1, assume_centered=True).fit(X)
    np.testing.assert_array_equal(model.location_, 0)
    np.testing.assert_allclose(model.scale_, np.sqrt((X**2).mean(axis=0)), rtol=1e-12)


def test_the_largest_penalty_is_that_of_the_first_edge():
    X = samples(4)
    largest = SSNConcord().fit(X).alpha_max_
    assert largest == pytest.approx(np.abs(np.corrcoef(X.T) - np.eye(X.shape[1])).max(), abs=1e-12)
    assert not SSNConcord(largest).fit(X).graph_.any()
    assert SSNConcord(largest * 0.999, edge_rule="or").fit(X).graph_.any()


@pytest.mark.parametrize("form", [True, False, "auto"])
def test_forming_the_covariance_or_not_gives_the_same(form):
    X = samples(5, n=30, p=50)
    expected = SSNConcord(0.3).fit(X).omega_.toarray()
    found = SSNConcord(0.3, form_covariance=form).fit(X).omega_.toarray()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("rule", ["and", "or"])
def test_sparse_output(rule):
    X = samples(6)
    dense = SSNConcord(0.2, edge_rule=rule).fit(X)
    thin = SSNConcord(0.2, edge_rule=rule, sparse_output=True).fit(X)
    for name in ("precision_", "partial_correlation_", "graph_"):
        assert sparse.issparse(getattr(thin, name))
        np.testing.assert_array_equal(getattr(thin, name).toarray(), getattr(dense, name))
    if rule == "or":
        off_diagonal = dense.precision_ - np.diag(np.diag(dense.precision_))
        np.testing.assert_array_equal(dense.graph_, off_diagonal != 0)


def test_warm_start():
    X = samples(7)
    model = SSNConcord(0.1, warm_start=True).fit(X)
    assert model.n_iter_ > 0
    model.fit(X)
    assert model.n_iter_ == 0
    model.fit(X[:, :5])  # of another size: from the diagonal
    assert model.omega_.shape == (5, 5)


def test_the_network_of_a_simulation_is_found():
    data = sparse_gaussian(np.random.default_rng(8), 2000, 40, density=0.05)
    model = SSNConcordCV().fit(data.X)
    found, true = model.graph_, data.edges
    precision = (found & true).sum() / found.sum()
    recall = (found & true).sum() / true.sum()
    assert recall > 0.95
    assert precision > 0.7  # an L1 penalty keeps some that are not there


@pytest.mark.parametrize("loader", [load_breast_cancer, load_digits])
def test_real_data(loader):
    X = loader().data
    X = X[:, X.std(axis=0) > 0]
    path = SSNConcord().fit_path(X, n_alphas=6)
    for each in path.results:
        assert each.converged.all()
        assert each.newton_steps.max() <= 50  # a few tens, though columns are nearly collinear
    assert np.all(np.diff(path.n_edges) >= 0)


def test_gene_data():
    data = gene_expression()
    assert data.X.shape == (len(data.cell_types), len(data.genes)) == (700, 765)
    model = SSNConcord(0.3).fit(data.X)
    i, j = data.genes.index("CD79A"), data.genes.index("CD79B")  # the B-cell receptor
    assert model.graph_[i, j]
    assert model.partial_correlation_[i, j] > 0.1


def test_it_can_be_pickled_and_cloned():
    X = samples(9)
    model = SSNConcord(0.2).fit(X)
    again = pickle.loads(pickle.dumps(model))
    assert again.score(X) == model.score(X)
    assert clone(SSNConcordCV(gamma=0.1)).gamma == 0.1


# Scores, paths and choices


def test_the_score_is_the_pseudolikelihood():
    X, new = samples(10), samples(11)
    model = SSNConcord(0.1).fit(X)
    Z = (new - X.mean(axis=0)) / X.std(axis=0)
    W = model.omega_.toarray()
    S = Z.T @ Z / len(Z)
    expected = np.log(np.diag(W)).sum() - 0.5 * np.trace(W @ S @ W.T)
    assert model.score(new) == pytest.approx(expected, rel=1e-12)


def test_the_path_is_the_fits():
    X = samples(12)
    path = SSNConcord(edge_rule="or").fit_path(X, [0.05, 0.4, 0.1])
    np.testing.assert_array_equal(path.alphas, [0.4, 0.1, 0.05])
    for alpha, result, n_edges, loss in zip(
        path.alphas, path.results, path.n_edges, path.loss, strict=True
    ):
        alone = SSNConcord(alpha, edge_rule="or").fit(X)
        W = alone.omega_.toarray()
        np.testing.assert_allclose(result.omega.toarray(), W, rtol=0, atol=1e-8)
        assert n_edges == alone.graph_.sum() / 2
        # At the solution the score of the training data is minus the loss.
        assert -loss == pytest.approx(alone.score(X), abs=1e-8)
    n, p = X.shape
    expected = 2 * n * path.loss + path.n_edges * (np.log(n) + 4 * 0.3 * np.log(p))
    np.testing.assert_allclose(path.epbic(0.3), expected, rtol=1e-12)


def test_the_grid():
    X = samples(13)
    path = SSNConcord().fit_path(X, n_alphas=5, alpha_min_ratio=0.01)
    largest = SSNConcord().fit(X).alpha_max_
    np.testing.assert_allclose(path.alphas, largest * np.logspace(0, -2, 5), rtol=1e-12)
    assert path.n_edges[0] == 0
    # Columns that are not correlated have no largest penalty above zero.
    np.testing.assert_array_equal(
        SSNConcord().fit_path(np.vstack([np.eye(2), -np.eye(2)])).alphas, 1
    )


def test_the_path_starts_from_the_one_before():
    X = samples(14, n=200, p=60)
    alphas = np.geomspace(0.3, 0.1, 12)
    path = SSNConcord().fit_path(X, alphas)
    steps = sum(each.newton_steps.sum() for each in path.results[1:])
    alone = sum(SSNConcord(alpha).fit(X).newton_steps_.sum() for alpha in alphas[1:])
    assert steps < alone


def test_the_criterion_chooses_its_least_value():
    X = samples(15, n=300)
    model = SSNConcordCV(gamma=0.2).fit(X)
    path = SSNConcord().fit_path(X)
    criterion = path.epbic(0.2)
    np.testing.assert_allclose(model.cv_results_["epbic"], criterion, rtol=1e-10)
    np.testing.assert_array_equal(model.cv_results_["n_edges"], path.n_edges)
    assert model.alpha_ == path.alphas[criterion.argmin()]
    alone = SSNConcord(model.alpha_).fit(X)
    np.testing.assert_allclose(model.precision_, alone.precision_, rtol=1e-6, atol=1e-8)


def test_cross_validation_is_the_scores_of_the_folds():
    X = samples(16, n=60)
    folds = KFold(3, shuffle=True, random_state=0)
    model = SSNConcordCV([0.4, 0.2, 0.1, 0.05], criterion="cv", cv=folds).fit(X)
    scores = np.array(
        [
            [SSNConcord(alpha).fit(X[train]).score(X[test]) for alpha in model.alphas_]
            for train, test in folds.split(X)
        ]
    )
    results = model.cv_results_
    for i in range(3):
        np.testing.assert_allclose(results[f"split{i}_test_score"], scores[i], atol=1e-7)
    np.testing.assert_allclose(results["mean_test_score"], scores.mean(axis=0), atol=1e-7)
    np.testing.assert_allclose(results["std_test_score"], scores.std(axis=0), atol=1e-7)
    assert model.alpha_ == model.alphas_[scores.mean(axis=0).argmax()]
    alone = SSNConcord(model.alpha_).fit(X)
    np.testing.assert_allclose(model.precision_, alone.precision_, rtol=1e-6, atol=1e-8)


# Pictures


def test_the_picture_has_a_line_for_each_edge():
    X = load_breast_cancer(as_frame=True).data
    model = SSNConcord(0.35).fit(X)
    ax = model.plot(n_labels=5)
    (lines,) = (each for each in ax.collections if hasattr(each, "get_segments"))
    i, j = np.nonzero(np.triu(model.graph_))
    assert len(lines.get_segments()) == len(i)
    np.testing.assert_allclose(lines.get_array(), model.partial_correlation_[i, j])
    assert len(ax.texts) == 5
    assert {text.get_text() for text in ax.texts} <= set(X.columns)
    busiest = X.columns[model.graph_.sum(axis=0).argmax()]
    assert busiest in {text.get_text() for text in ax.texts}


def test_a_picture_without_edges_and_one_with_given_labels():
    X = samples(17)
    assert SSNConcord(10.0).fit(X).plot().get_title() == "no edges"
    model = SSNConcord(0.1, sparse_output=True).fit(X)
    labels = [f"variable {k}" for k in range(15)]
    ax = model.plot(labels=labels)
    assert {text.get_text() for text in ax.texts} <= set(labels)
    with pytest.raises(ValueError, match="labels must have length 15, got 2"):
        model.plot(labels=["a", "b"])


def test_the_picture_of_a_path():
    path = SSNConcord().fit_path(samples(18), n_alphas=4)
    ax = path.plot()
    np.testing.assert_array_equal(ax.lines[0].get_ydata(), path.n_edges)


# Bad input


def test_data_that_do_not_vary_or_are_no_data():
    X = samples(19)
    X[:, 4] = 7.1
    with pytest.raises(
        ValueError, match=r"every column of X must vary, got constant columns \[4\]"
    ):
        SSNConcord().fit(X)
    with pytest.raises(ValueError, match="looks like a correlation matrix"):
        SSNConcord().fit(np.eye(4))
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        SSNConcord().fit(X[:1])
    with pytest.raises(ValueError, match="minimum of 2 is required"):
        SSNConcord().fit_path(X[:1])
    with pytest.raises(NotFittedError):
        SSNConcord().plot()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"alpha": 0}, ValueError, "alpha must be a finite number > 0"),
        ({"alpha": [0.1, 0.2]}, ValueError, r"alpha must be a number or of shape \(15,\)"),
        ({"edge_rule": "xor"}, ValueError, "edge_rule must be one of"),
        ({"form_covariance": 2}, ValueError, "form_covariance must be one of"),
        ({"sparse_output": "no"}, ValueError, "sparse_output must be one of"),
        ({"method": "newton"}, ValueError, "method must be one of"),
        ({"tol": None}, TypeError, "tol must be a number"),
    ],
)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        SSNConcord(**settings).fit(samples())


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"alphas": "all"}, ValueError, "alphas must be 'auto' or an array"),
        ({"alphas": []}, ValueError, "alphas must be one or more numbers > 0"),
        ({"alphas": [0.1, 0.0]}, ValueError, "alphas must be one or more numbers > 0"),
        ({"alphas": [[0.1]]}, ValueError, r"alphas must have shape \(k,\)"),
        ({"n_alphas": 0}, ValueError, "n_alphas must be an integer >= 1"),
        ({"alpha_min_ratio": 2.0}, ValueError, "alpha_min_ratio must be a finite number > 0"),
        ({"criterion": "aic"}, ValueError, "criterion must be one of 'epbic', 'cv'"),
        ({"gamma": -1}, ValueError, "gamma must be a finite number >= 0"),
    ],
)
def test_bad_choices(settings, error, message):
    with pytest.raises(error, match=message):
        SSNConcordCV(**settings).fit(samples())


def test_too_few_steps_warn():
    with pytest.warns(ConvergenceWarning, match="did not reach tol"):
        SSNConcord(0.05, max_iter=1).fit(samples())


def test_the_rank_of_centered_data_is_one_less():
    Z = standardize_columns(samples(20, n=8, p=30), scale=True, assume_centered=False).Z
    for form in (True, False):
        assert covariance_of(Z, centered=True, form=form).rank == 7
        assert covariance_of(Z, centered=False, form=form).rank == 8
    assert np.linalg.matrix_rank(Z) == 7


def test_gene_data_that_are_not_there(monkeypatch):
    gene_expression.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps scanpy"):
        gene_expression()
    monkeypatch.undo()
    gene_expression.cache_clear()
