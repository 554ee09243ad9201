"""Ridge regression under rank-one updates: the statistics that every linear agent keeps."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from scipy.linalg import cho_factor, cho_solve

from thalweg.common.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_number,
)

Array = NDArray[Any]

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
# A squared norm below this is no round-off of zero: the maintained inverse has drifted.
DRIFT = {FLOAT32: -1e-6, FLOAT64: -1e-10}


class RidgeRegression:
    r"""The ridge estimate and its confidence ellipsoid, one observation at a time.

    .. math:: \hat\theta = V^{-1} b, \; V = \lambda I + \sum_i x_i x_i^\top, \; b = \sum_i r_i x_i

    ``V_inv`` follows by Sherman-Morrison and ``log_det`` by the matrix determinant lemma; a
    Cholesky factorization of ``V`` replaces both every ``refactor_every`` updates, and whenever
    a squared norm comes out negative. Agents hold one of these; they do not inherit from it.

    Parameters
    ----------
    dim : int
        The dimension d of a context.
    lam : float, default 1.0
        The regularization λ > 0, in squared units of a context.
    n_runs : int, optional
        Keep R independent regressions at once. Every array then has a leading axis of length R.
    refactor_every : int, default 2000
        Updates between two factorizations.
    dtype : {float64, float32}, default float64
        Precision of ``V_inv`` and of contexts. ``V``, ``b`` and ``theta`` stay in float64.

    Attributes
    ----------
    V, V_inv : ndarray of shape (d, d) or (R, d, d)
    b, theta : ndarray of shape (d,) or (R, d)
    log_det : float or ndarray of shape (R,)
        log det(V / λ).
    residual : float or ndarray of shape (R,)
        The minimum of the ridge objective, Σ (rᵢ - xᵢᵀθ)² + λ‖θ‖².
    updates : int
        Observations so far, of each run.

    Notes
    -----
    An update costs O(d²), `norms` of K contexts O(K d²), `refactor` O(d³); memory is O(d²).

    Examples
    --------
    >>> ridge = RidgeRegression(2)
    >>> ridge.update(np.array([1.0, 0.0]), 3.0)
    >>> ridge.theta
    array([1.5, 0. ])
    >>> ridge.norms(np.eye(2)) ** 2
    array([0.5, 1. ])
    """

    def __init__(
        self,
        dim: int,
        *,
        lam: float = 1.0,
        n_runs: int | None = None,
        refactor_every: int = 2000,
        dtype: DTypeLike = np.float64,
    ) -> None:
        self.dim = check_integer("dim", dim, at_least=1)
        self.lam = check_number("lam", lam, above=0)
        self.n_runs = None if n_runs is None else check_integer("n_runs", n_runs, at_least=1)
        self.refactor_every = check_integer("refactor_every", refactor_every, at_least=1)
        self.dtype = check_choice("dtype", np.dtype(dtype), (FLOAT64, FLOAT32))
        self.updates = 0
        self.V = np.tile(self.lam * np.eye(dim), (*self.runs, 1, 1))
        self.V_inv = np.tile((np.eye(dim) / self.lam).astype(self.dtype), (*self.runs, 1, 1))
        self.b = np.zeros((*self.runs, dim))
        self.theta = np.zeros((*self.runs, dim))
        self.log_det: Any = np.zeros(self.runs)[()]
        self.residual: Any = np.zeros(self.runs)[()]
        self._warned = False

    @property
    def runs(self) -> tuple[int, ...]:
        """The leading axes: () or (R,)."""
        return () if self.n_runs is None else (self.n_runs,)

    def replicate(self, n_runs: int) -> RidgeRegression:
        """Return ``n_runs`` fresh regressions with the same parameters."""
        return RidgeRegression(
            self.dim,
            lam=self.lam,
            n_runs=n_runs,
            refactor_every=self.refactor_every,
            dtype=self.dtype,
        )

    def check_contexts(self, contexts: ArrayLike) -> Array:
        """Return ``contexts`` as an array of shape (K, d) or (R, K, d), K ≥ 1, all finite."""
        checked = check_array(
            "contexts", contexts, shape=(*self.runs, "K", self.dim), dtype=self.dtype
        )
        if checked.shape[-2] == 0:
            raise ValueError(f"contexts must hold at least one arm, got shape {checked.shape}")
        return checked

    def predict(self, contexts: Array) -> Array:
        """Return xᵀθ̂ of each of the K contexts; shape (K,) or (R, K)."""
        theta = self.theta.astype(self.dtype, copy=False)
        predicted: Array = (contexts @ theta[..., None])[..., 0]
        return predicted

    def norms(self, contexts: Array) -> Array:
        """Return ‖x‖ in the metric V⁻¹ of each of the K contexts; shape (K,) or (R, K)."""
        squared = self._squared_norms(contexts)
        if squared.min() < DRIFT[self.dtype]:
            self.refactor()
            squared = self._squared_norms(contexts)
        root: Array = np.sqrt(np.maximum(squared, 0))
        return root

    def confidence_radius(self, sigma: float | Array, S: float, delta: float) -> Any:
        r"""Return β with P(‖θ̂ - θ*‖_V ≤ β at every round) ≥ 1 - δ; a float, or shape (R,).

        .. math:: \beta = \sigma\sqrt{2\log(1/\delta) + \log\det(V/\lambda)} + \sqrt\lambda\,S
        """
        width = np.sqrt(2 * math.log(1 / delta) + self.log_det)
        return sigma * width + math.sqrt(self.lam) * S

    def noise_scale(self) -> Any:
        """Return the plug-in standard deviation of the noise; 1 before the first update.

        It is the root of the minimum of the ridge objective over the number of updates, which is
        the maximum-likelihood scale under the prior θ ~ N(0, σ²/λ I).
        """
        if self.updates == 0:
            return np.ones(self.runs)[()]
        return np.sqrt(self.residual / self.updates)

    def perturbation(self, rng: np.random.Generator) -> Array:
        """Draw from N(0, V⁻¹); shape (d,) or (R, d). Costs O(d³)."""
        factor = np.linalg.cholesky(self.V_inv)
        normal = rng.standard_normal((*self.runs, self.dim, 1))
        drawn: Array = (factor @ normal)[..., 0]
        return drawn

    def update(self, x: Array, reward: float | Array) -> None:
        """Learn the reward of one context: ``x`` (d,) and a number, or (R, d) and (R,)."""
        self._warn_of_long(x)
        u = (self.V_inv @ x[..., None])[..., 0].astype(np.float64, copy=False)
        x = x.astype(np.float64, copy=False)
        squared_norm = _dot(x, u)
        gain = 1 / (1 + squared_norm)
        error = reward - _dot(x, self.theta)
        _add_outer(self.V, x, 1.0)
        _add_outer(self.V_inv, _scaled(u, np.sqrt(gain)), -1.0)
        self.b += _scaled(x, reward)
        self.theta += _scaled(u, gain * error)
        self.log_det = self.log_det + np.log1p(squared_norm)
        self.residual = self.residual + gain * error**2
        self.updates += 1
        if self.updates % self.refactor_every == 0:
            self.refactor()

    def observe(self, contexts: ArrayLike, arm: int | None, reward: float) -> None:
        """Check and learn the reward of ``contexts[arm]``, or of one context (d,) without an arm.

        Only the context that was played must be finite.
        """
        reward = check_number("reward", reward)
        if arm is None:
            self.update(
                check_array("context", contexts, shape=(self.dim,), dtype=self.dtype), reward
            )
            return
        offered = check_array(
            "contexts", contexts, shape=("K", self.dim), dtype=self.dtype, finite=False
        )
        arm = check_integer("arm", arm)
        if not 0 <= arm < len(offered):
            raise IndexError(f"arm must be one of the {len(offered)} offered, got {arm}")
        self.update(check_finite(f"contexts[{arm}]", offered[arm]), reward)

    def refactor(self) -> None:
        """Recompute ``V_inv``, ``theta`` and ``log_det`` from ``V`` and ``b`` by Cholesky."""
        log_det = np.empty(self.runs)
        for run in np.ndindex(self.runs):
            factor = cho_factor(self.V[run], lower=True)
            inverse = cho_solve(factor, np.eye(self.dim))
            self.V_inv[run] = (inverse + inverse.T) / 2
            self.theta[run] = cho_solve(factor, self.b[run])
            log_det[run] = 2 * np.log(factor[0].diagonal()).sum() - self.dim * math.log(self.lam)
        self.log_det = log_det[()]

    def get_state(self) -> dict[str, Any]:
        """Return copies of the statistics, as arrays and numbers."""
        return {
            "V": self.V.copy(),
            "V_inv": self.V_inv.copy(),
            "b": self.b.copy(),
            "theta": self.theta.copy(),
            "log_det": np.copy(self.log_det)[()],
            "residual": np.copy(self.residual)[()],
            "updates": self.updates,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over the statistics that `get_state` returned; arrays may have become lists."""
        vector, matrix = (*self.runs, self.dim), (*self.runs, self.dim, self.dim)
        self.V = check_array("V", state["V"], shape=matrix).copy()
        self.V_inv = check_array("V_inv", state["V_inv"], shape=matrix, dtype=self.dtype).copy()
        self.b = check_array("b", state["b"], shape=vector).copy()
        self.theta = check_array("theta", state["theta"], shape=vector).copy()
        self.log_det = check_array("log_det", state["log_det"], shape=self.runs).copy()[()]
        self.residual = check_array("residual", state["residual"], shape=self.runs).copy()[()]
        self.updates = int(state["updates"])

    def _squared_norms(self, contexts: Array) -> Array:
        form: Array = np.einsum("...kd,...kd->...k", contexts @ self.V_inv, contexts)
        return form

    def _warn_of_long(self, x: Array) -> None:
        length = _dot(x, x)
        if self._warned or (length if x.ndim == 1 else length.max()) <= self.lam * (1 + 1e-6):
            return
        self._warned = True
        warnings.warn(
            f"a context has squared norm above lam={self.lam:g}: the regret bound's "
            "elliptical-potential constant degrades; scale contexts or raise lam",
            UserWarning,
            stacklevel=4,
        )


def _dot(x: Array, y: Array) -> Any:
    return x @ y if x.ndim == 1 else np.einsum("rd,rd->r", x, y)


def _scaled(x: Array, factor: Any) -> Array:
    scaled: Array = x * (factor if x.ndim == 1 else factor[:, None])
    return scaled


def _add_outer(matrix: Array, x: Array, sign: float) -> None:
    """Add ``sign`` x xᵀ to ``matrix``, in place."""
    # Not by SciPy's BLAS: its threads and those of NumPy's, which makes the products, wait for
    # each other, and a round then takes many times as long.
    x = x.astype(matrix.dtype, copy=False)
    matrix += (sign * x)[..., :, None] * x[..., None, :]
