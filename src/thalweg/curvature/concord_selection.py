"""Sparse partial correlations with a penalty that is chosen from the data."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires
from thalweg.curvature.concord_data import pseudolikelihood
from thalweg.curvature.concord_estimator import SSNConcord
from thalweg.curvature.concord_path import falling_alphas
from thalweg.curvature.concord_rows import RowSettings

with requires("curvature"):
    from sklearn.model_selection import check_cv
    from sklearn.utils.validation import validate_data

Array = NDArray[np.float64]


class SSNConcordCV(SSNConcord):
    """`SSNConcord` with a penalty chosen by cross-validation or an information criterion.

    Parameters
    ----------
    alphas : array_like of shape (k,), or "auto"
        The penalties to choose from; by default log-spaced from the least one without edges.
    n_alphas : int, default 20
    alpha_min_ratio : float in (0, 1], default 0.05
        The number of those, and the smallest over the largest.
    criterion : {"epbic", "cv"}
        The extended pseudo-Bayesian criterion, which aims at the edges, or the pseudolikelihood of
        held-out samples, which aims at prediction and keeps more edges.
    gamma : float ≥ 0, default 0.5
        How much "epbic" charges for the number of possible edges.
    cv : int, splitter or iterable, default 5
        The folds of "cv", as in scikit-learn.
    standardize, assume_centered, method, tol, max_iter, max_prox_iter, sigma, rho, \
on_rank_deficient, form_covariance, edge_rule, sparse_output, n_jobs, verbose
        See `SSNConcord`.

    Attributes
    ----------
    alpha_ : float
        The penalty that was chosen.
    alphas_ : ndarray of shape (k,)
        The penalties, falling.
    cv_results_ : dict of str to ndarray
        For "epbic" ``n_edges`` and ``epbic``; for "cv" ``split<i>_test_score``,
        ``mean_test_score`` and ``std_test_score``, the pseudolikelihoods of held-out samples; all
        of shape (k,), beside ``alphas``.
    omega_, precision_, partial_correlation_, graph_, …
        See `SSNConcord`, for the chosen penalty and all samples.

    Notes
    -----
    The path costs less than its penalties one by one, as each starts from the one before. A fold is
    standardized with the means and deviations of its own training samples.

    References
    ----------
    "Semismooth Newton for l1 pseudolikelihood partial correlation", NeurIPS 2025.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from thalweg.curvature import SSNConcordCV
    >>> X = load_breast_cancer().data
    >>> model = SSNConcordCV(n_alphas=8).fit(X)
    >>> bool(model.alphas_[-1] <= model.alpha_ < model.alpha_max_)
    True
    """

    def __init__(
        self,
        alphas: ArrayLike | Literal["auto"] = "auto",
        *,
        n_alphas: int = 20,
        alpha_min_ratio: float = 0.05,
        criterion: Literal["epbic", "cv"] = "epbic",
        gamma: float = 0.5,
        cv: Any = 5,
        standardize: bool = True,
        assume_centered: bool = False,
        method: Literal["bssn", "ssn", "fbs", "fista"] = "bssn",
        tol: float = 1e-10,
        max_iter: int = 100,
        max_prox_iter: int = 10_000,
        sigma: float = 1e-3,
        rho: float = 0.5,
        on_rank_deficient: Literal["prox", "raise"] = "prox",
        form_covariance: bool | Literal["auto"] = "auto",
        edge_rule: Literal["and", "or"] = "and",
        sparse_output: bool | Literal["auto"] = "auto",
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(
            standardize=standardize,
            assume_centered=assume_centered,
            method=method,
            tol=tol,
            max_iter=max_iter,
            max_prox_iter=max_prox_iter,
            sigma=sigma,
            rho=rho,
            on_rank_deficient=on_rank_deficient,
            form_covariance=form_covariance,
            edge_rule=edge_rule,
            sparse_output=sparse_output,
            n_jobs=n_jobs,
            verbose=verbose,
        )
        self.alphas = alphas
        self.n_alphas = n_alphas
        self.alpha_min_ratio = alpha_min_ratio
        self.criterion = criterion
        self.gamma = gamma
        self.cv = cv

    def fit(self, X: Any, y: Any = None) -> SSNConcordCV:
        """Choose the penalty and estimate the network.

        Parameters
        ----------
        X : array_like of shape (n, p)
        y : ignored

        Returns
        -------
        The estimator.
        """
        settings = self._settings()
        check_choice("criterion", self.criterion, ("epbic", "cv"))
        check_number("gamma", self.gamma, at_least=0)
        X = validate_data(self, X, dtype=np.float64, ensure_min_samples=2)
        data = self._standardized(X)
        S = self._covariance(data)
        self.alphas_ = falling_alphas(self.alphas, S, self.n_alphas, self.alpha_min_ratio)
        if self.criterion == "cv":
            scores = self._held_out_scores(X, settings)
            best = int(np.argmax(scores.mean(axis=0)))
            self.cv_results_ = {
                "alphas": self.alphas_,
                "mean_test_score": scores.mean(axis=0),
                "std_test_score": scores.std(axis=0),
                **{f"split{i}_test_score": each for i, each in enumerate(scores)},
            }
            result = self._path(S, self.alphas_[: best + 1], settings, len(X)).results[-1]
        else:
            path = self._path(S, self.alphas_, settings, len(X))
            criterion = path.epbic(self.gamma)
            best = int(np.argmin(criterion))
            self.cv_results_ = {
                "alphas": self.alphas_,
                "n_edges": path.n_edges,
                "epbic": criterion,
            }
            result = path.results[best]
        self.alpha_ = float(self.alphas_[best])
        self._set(result, data, S)
        return self

    def _held_out_scores(self, X: Array, settings: RowSettings) -> Array:
        """Return the pseudolikelihoods, of shape (folds, k)."""
        scores = []
        for train, test in check_cv(self.cv).split(X):
            fold = self._standardized(X[train])
            path = self._path(self._covariance(fold), self.alphas_, settings, len(train))
            Z = (X[test] - fold.location) / fold.scale
            scores.append([pseudolikelihood(each.omega, Z) for each in path.results])
        return np.array(scores)
