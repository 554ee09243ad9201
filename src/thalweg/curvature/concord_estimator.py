"""Sparse partial correlations as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from thalweg.common.checks import check_choice, check_integer
from thalweg.common.optional import requires
from thalweg.curvature.concord_blocks import solve_concord
from thalweg.curvature.concord_covariance import Covariance, largest_penalty
from thalweg.curvature.concord_data import (
    Standardized,
    covariance_of,
    pseudolikelihood,
    standardize_columns,
)
from thalweg.curvature.concord_path import ConcordPath, falling_alphas, solve_path
from thalweg.curvature.concord_plot import draw_network
from thalweg.curvature.concord_result import SSNConcordResult, scaled
from thalweg.curvature.concord_rows import RowSettings
from thalweg.curvature.concord_solver import check_penalty, row_settings

with requires("curvature"):
    from sklearn.base import BaseEstimator
    from sklearn.utils.validation import check_array, check_is_fitted, validate_data

Array = NDArray[np.float64]

DENSE_UP_TO = 5_000  # features; a matrix of them takes 200 MB


class SSNConcord(BaseEstimator):  # type: ignore[misc]
    r"""Sparse network of partial correlations, by semismooth Newton.

    Minimizes the L1-penalized pseudolikelihood

    .. math:: -\sum_i \log Ω_{ii} + ½ \operatorname{tr}(Ω'Ω S) + α \sum_{i ≠ j} |Ω_{ij}|

    with Ω = Θ_D^{-½} Θ for a precision matrix Θ. It falls into a problem for each row, which a few
    Newton steps with its active variables solve; see `ssn_concord`.

    Parameters
    ----------
    alpha : float > 0, or array_like of shape (p,) or (p, p)
        The penalty; one for each row, or for each entry (the diagonal does not matter).
    standardize : bool, default True
        Whether columns are scaled to variance 1. Otherwise ``alpha`` means another penalty for
        every unit of measurement.
    assume_centered : bool, default False
        Whether the columns have mean zero already.
    method : {"bssn", "ssn", "fbs", "fista"}
        See `ssn_concord`.
    tol : float ≥ 0, default 1e-10
        Largest residual ‖F‖ of a row.
    max_iter, max_prox_iter : int
        Largest number of Newton steps and of proximal gradient steps of a row.
    sigma, rho : float in (0, ½), (0, 1)
        The line search, see `ssn_concord`.
    on_rank_deficient : {"prox", "raise"}
        What a row does whose active columns are dependent, or more than the samples.
    form_covariance : bool or "auto", default "auto"
        Whether S, of 8p² bytes, is formed; "auto" up to 10,000 features. The result is the same.
    edge_rule : {"and", "or"}
        Whether there is an edge if both of ω_ij and ω_ji are not zero, or one.
    sparse_output : bool or "auto", default "auto"
        Whether the fitted matrices are CSR arrays; "auto" above 5,000 features.
    warm_start : bool, default False
        Start from the last fit.
    n_jobs : int, optional
        Number of threads, as in joblib. It does not change a bit of the result.
    verbose : bool, default False
        Whether to show a progress bar.

    Attributes
    ----------
    precision_ : ndarray or csr_array of shape (p, p)
        ½(Θ + Θ') with Θ = Ω_D Ω, in the units of the data. It need not be positive definite.
    partial_correlation_ : ndarray or csr_array of shape (p, p)
        -Θ_ij / √(Θ_ii Θ_jj) of ``precision_``, with ones on the diagonal.
    graph_ : ndarray or csr_array of bool, of shape (p, p)
        The edges by ``edge_rule``. An entry of ``precision_`` is not zero where one of ω_ij and
        ω_ji is not, as in the rule "or".
    omega_ : csr_array of shape (p, p)
        Ω of the standardized columns; not symmetric.
    location_, scale_ : ndarray of shape (p,)
        The means, and standard deviations (or ones), of the columns.
    alpha_max_ : float
        The least number ``alpha`` without edges.
    newton_steps_, prox_steps_ : ndarray of int, of shape (p,)
    residual_ : ndarray of shape (p,)
    objective_ : float
    n_iter_ : int
        The largest number of steps of a row.
    n_features_in_, feature_names_in_
        As in scikit-learn.

    Warns
    -----
    ConvergenceWarning
        If rows miss ``tol``.
    LinAlgWarning
        If columns depend linearly on others, as duplicates do.

    Notes
    -----
    A step of a row with k active variables takes k³/3 + k p operations with S, and k² n + n (p + k)
    without. Forming S takes n p². With S, most steps are compiled, see `ssn_concord`.

    Compare networks, not values, with methods that penalize another matrix: CONCORD penalizes
    Θ_D^{-1} Θ symmetrically, the graphical lasso Θ.

    *Ours.* All but the row solver, the criterion and the form of the estimate: see `ssn_concord`.

    References
    ----------
    "Semismooth Newton for l1 pseudolikelihood partial correlation", NeurIPS 2025.

    Examples
    --------
    >>> from sklearn.datasets import load_breast_cancer
    >>> from thalweg.curvature import SSNConcord
    >>> X = load_breast_cancer(as_frame=True).data
    >>> model = SSNConcord(alpha=0.3).fit(X)
    >>> i, j = map(X.columns.get_loc, ("mean texture", "worst texture"))
    >>> bool(model.graph_[i, j]), bool(model.partial_correlation_[i, j] > 0.3)
    (True, True)
    """

    def __init__(
        self,
        alpha: float | ArrayLike = 0.1,
        *,
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
        warm_start: bool = False,
        n_jobs: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.alpha = alpha
        self.standardize = standardize
        self.assume_centered = assume_centered
        self.method = method
        self.tol = tol
        self.max_iter = max_iter
        self.max_prox_iter = max_prox_iter
        self.sigma = sigma
        self.rho = rho
        self.on_rank_deficient = on_rank_deficient
        self.form_covariance = form_covariance
        self.edge_rule = edge_rule
        self.sparse_output = sparse_output
        self.warm_start = warm_start
        self.n_jobs = n_jobs
        self.verbose = verbose

    def fit(self, X: Any, y: Any = None) -> SSNConcord:
        """Estimate the network.

        Parameters
        ----------
        X : array_like of shape (n, p)
            At least two samples.
        y : ignored

        Returns
        -------
        The estimator.
        """
        settings = self._settings()
        data = self._standardized(validate_data(self, X, dtype=np.float64, ensure_min_samples=2))
        p = data.Z.shape[1]
        lam = check_penalty("alpha", self.alpha, p)
        S = self._covariance(data)
        before = getattr(self, "omega_", None) if self.warm_start else None
        start = before if before is not None and before.shape == (p, p) else None
        result = solve_concord(
            S, lam, settings, omega0=start, n_jobs=self.n_jobs, verbose=self.verbose
        )
        self._set(result, data, S)
        return self

    def fit_path(
        self,
        X: Any,
        alphas: ArrayLike | Literal["auto"] = "auto",
        *,
        n_alphas: int = 20,
        alpha_min_ratio: float = 0.05,
    ) -> ConcordPath:
        """Return estimates for several penalties, each from the one before.

        Neither ``alpha`` nor the fitted attributes have a part in it.

        Parameters
        ----------
        X : array_like of shape (n, p)
        alphas : array_like of shape (k,), or "auto"
            The penalties; by default log-spaced from the least one without edges.
        n_alphas : int, default 20
            Their number.
        alpha_min_ratio : float in (0, 1], default 0.05
            The smallest over the largest.

        Returns
        -------
        ConcordPath
        """
        settings = self._settings()
        data = self._standardized(check_array(X, dtype=np.float64, ensure_min_samples=2))
        S = self._covariance(data)
        grid = falling_alphas(alphas, S, n_alphas, alpha_min_ratio)
        return self._path(S, grid, settings, len(data.Z))

    def score(self, X: Any, y: Any = None) -> float:
        """Return the pseudolikelihood of new data; higher is better.

        It is Σ_i log ω_ii - ½ tr(Ω S Ω'), with S of X in the units of the standardized columns.

        Parameters
        ----------
        X : array_like of shape (m, p)
        y : ignored
        """
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        return pseudolikelihood(self.omega_, (X - self.location_) / self.scale_)

    def plot(
        self, ax: Any = None, *, labels: Sequence[str] | None = None, n_labels: int = 20
    ) -> Any:
        """Draw the network; red edges are positive partial correlations, blue ones negative.

        Parameters
        ----------
        ax : matplotlib Axes, optional
        labels : sequence of str, of length p, optional
            By default the names of the features.
        n_labels : int, default 20
            How many variables, those with the most edges, are labeled.

        Returns
        -------
        The Axes.
        """
        check_is_fitted(self)
        p = self.n_features_in_
        if labels is None:
            labels = list(getattr(self, "feature_names_in_", map(str, range(p))))
        if len(labels) != p:
            raise ValueError(f"labels must have length {p}, got {len(labels)}")
        check_integer("n_labels", n_labels, at_least=0)
        return draw_network(self.partial_correlation_, self.graph_, labels, n_labels, ax)

    def _settings(self) -> RowSettings:
        check_choice("edge_rule", self.edge_rule, ("and", "or"))
        check_choice("form_covariance", self.form_covariance, (True, False, "auto"))
        check_choice("sparse_output", self.sparse_output, (True, False, "auto"))
        return row_settings(
            self.method,
            self.tol,
            self.max_iter,
            self.max_prox_iter,
            self.sigma,
            self.rho,
            self.on_rank_deficient,
        )

    def _standardized(self, X: Array) -> Standardized:
        return standardize_columns(X, scale=self.standardize, assume_centered=self.assume_centered)

    def _covariance(self, data: Standardized) -> Covariance:
        return covariance_of(data.Z, centered=not self.assume_centered, form=self.form_covariance)

    def _path(
        self, S: Covariance, alphas: Array, settings: RowSettings, n_samples: int
    ) -> ConcordPath:
        return solve_path(
            S,
            alphas,
            settings,
            n_samples,
            edge_rule=self.edge_rule,
            n_jobs=self.n_jobs,
            verbose=self.verbose,
        )

    def _set(self, result: SSNConcordResult, data: Standardized, S: Covariance) -> None:
        self.location_, self.scale_ = data.location, data.scale
        self.omega_ = result.omega
        precision = result.precision()
        root = 1 / np.sqrt(precision.diagonal())
        correlation = scaled(precision, -root, root)
        correlation.setdiag(1.0)
        self.precision_ = self._output(scaled(precision, 1 / data.scale, 1 / data.scale))
        self.partial_correlation_ = self._output(correlation)
        self.graph_ = self._output(result.edges(self.edge_rule))
        self.newton_steps_, self.prox_steps_ = result.newton_steps, result.prox_steps
        self.residual_ = result.residual
        self.objective_ = float(result.objective.sum())
        self.alpha_max_ = largest_penalty(S)
        self.n_iter_ = int((result.newton_steps + result.prox_steps).max())

    def _output(self, matrix: sparse.csr_array) -> NDArray[Any] | sparse.csr_array:
        auto = matrix.shape[0] > DENSE_UP_TO
        return (
            matrix
            if (auto if self.sparse_output == "auto" else self.sparse_output)
            else (matrix.toarray())
        )
