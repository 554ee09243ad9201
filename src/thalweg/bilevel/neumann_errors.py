"""Bias, variance and skewness of estimators of an inverse-Hessian-vector product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[np.float64]
ESTIMATORS = ("plain", "two chains", "antithetic")


@dataclass(frozen=True, eq=False)
class ErrorReport:
    """Errors of estimators of the truncated series v_K, relative to ‖v_K‖.

    Each field maps "plain", "two chains" and "antithetic" to a figure.

    Parameters
    ----------
    bias : dict of str to float
        ``‖E v̂ - v_K‖``, of which a share of ``std / sqrt(n_rep)`` is noise.
    std : dict of str to float
        ``(E ‖v̂ - E v̂‖²)^(1/2)``.
    third : dict of str to float
        The norm of the componentwise ``|E (v̂ - E v̂)³|^(1/3)``.
    skewness : dict of str to float
        The mean over components of the absolute standardized third moment.
    rmse : dict of str to float
        ``(E ‖v̂ - v_K‖²)^(1/2)``.
    estimates : dict of str to ndarray of shape (n_rep, d)
    n_rep : int
    """

    bias: dict[str, float]
    std: dict[str, float]
    third: dict[str, float]
    skewness: dict[str, float]
    rmse: dict[str, float]
    estimates: dict[str, Array]
    n_rep: int

    def __str__(self) -> str:
        """Return a table."""
        names = ("bias", "std", "third", "skewness", "rmse")
        lines = [f"{'':12}" + "".join(f"{name:>10}" for name in names)]
        lines += [
            f"{estimator:12}" + "".join(f"{getattr(self, name)[estimator]:10.4f}" for name in names)
            for estimator in self.bias
        ]
        return "\n".join(lines)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the distributions of the errors' norms; return the axes."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        for name, estimates in self.estimates.items():
            centered = np.linalg.norm(estimates - estimates.mean(axis=0), axis=1)
            ax.hist(centered, bins=40, histtype="step", label=name)
        ax.set(xlabel="distance to the mean estimate", ylabel="estimates", yscale="log")
        ax.legend()
        return ax


def neumann_error_report(
    hvp_samples: ArrayLike | Callable[[np.random.Generator, int], ArrayLike],
    H: ArrayLike,
    b: ArrayLike,
    K: int = 20,
    eta: float | None = None,
    n_rep: int = 1000,
    *,
    reference: ArrayLike | None = None,
    rng: RNGLike = None,
) -> ErrorReport:
    """Measure bias, spread and third moment of plain and antithetic Neumann series.

    Parameters
    ----------
    hvp_samples : array_like of shape (n, d, d), or callable
        The sampled Hessians, of which one is drawn for every factor; or ``hvp_samples(rng, n)``,
        which returns n of them, of shape (n, d, d).
    H : array_like of shape (d, d)
        The mean Hessian.
    b : array_like of shape (d,)
    K : int ≥ 1
        Terms of the series.
    eta : float > 0, optional
        Its step; by default half the inverse of H's largest eigenvalue.
    n_rep : int ≥ 2
        Estimates of each kind.
    reference : array_like of shape (d, d), optional
        The reference Hessian; by default H.
    rng : int, Generator, SeedSequence or None

    Returns
    -------
    ErrorReport
        Of one plain chain, two independent ones that are averaged, and the antithetic pair.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    O(n_rep K d²); the estimates are made at once, one factor after the other.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import neumann_error_report
    >>> rows = np.random.default_rng(0).standard_normal((100, 3)) + [2.0, 0, 0]
    >>> samples = rows[:, :, None] * rows[:, None, :]
    >>> report = neumann_error_report(samples, samples.mean(0), np.ones(3), eta=0.02, rng=0)
    >>> report.rmse["antithetic"] < report.rmse["two chains"] < report.rmse["plain"]
    True
    """
    vector = check_array("b", b, shape=("d",))
    d = len(vector)
    mean = check_array("H", H, shape=(d, d))
    mirror = mean if reference is None else check_array("reference", reference, shape=(d, d))
    check_integer("K", K, at_least=1)
    check_integer("n_rep", n_rep, at_least=2)
    step = 0.5 / np.linalg.eigvalsh(mean)[-1] if eta is None else check_number("eta", eta, above=0)
    draw = _sampler(hvp_samples, d, n_rep)
    stream = as_generator(rng)
    first, mirrored = _series(lambda: draw(stream), vector, K, step, n_rep, mirror)
    second, _ = _series(lambda: draw(stream), vector, K, step, n_rep, mirror)
    exact = truncated_series(mean, vector, K, step)
    estimates = {
        "plain": first,
        "two chains": (first + second) / 2,
        "antithetic": (first + mirrored) / 2,
    }
    moments = {name: _moments(values, exact) for name, values in estimates.items()}
    return ErrorReport(
        **{
            field: {name: moments[name][field] for name in ESTIMATORS}
            for field in ("bias", "std", "third", "skewness", "rmse")
        },
        estimates=estimates,
        n_rep=n_rep,
    )


def _sampler(samples: Any, d: int, n_rep: int) -> Callable[[np.random.Generator], Array]:
    """Return a function that draws one Hessian per replication, of shape (n_rep, d, d)."""
    if callable(samples):
        return lambda rng: check_array(
            "hvp_samples(rng, n)", samples(rng, n_rep), shape=(n_rep, d, d)
        )
    matrices = check_array("hvp_samples", samples, shape=("n", d, d))
    if len(matrices) == 0:
        raise ValueError("hvp_samples must hold at least one Hessian, got none")
    return lambda rng: matrices[rng.integers(len(matrices), size=n_rep)]


def _series(
    draw: Callable[[], Array], b: Array, K: int, eta: float, n_rep: int, mirror: Array
) -> tuple[Array, Array]:
    """Return the sums of the chain and of its mirror image, of shape (n_rep, d)."""
    p = np.tile(b, (n_rep, 1))
    q = p.copy()
    sum_p, sum_q = p.copy(), q.copy()
    for _ in range(1, K):
        H = draw()
        p = p - eta * np.einsum("nij,nj->ni", H, p)
        q = q - eta * (2 * q @ mirror.T - np.einsum("nij,nj->ni", H, q))
        sum_p += p
        sum_q += q
    return eta * sum_p, eta * sum_q


def truncated_series(H: Array, b: Array, K: int, eta: float) -> Array:
    """Return ``η Σ_{k<K} (I - ηH)^k b``, v_K."""
    p, total = b, b.copy()
    for _ in range(1, K):
        p = p - eta * H @ p
        total = total + p
    result: Array = eta * total
    return result


def _moments(estimates: Array, exact: Array) -> dict[str, float]:
    scale = float(np.linalg.norm(exact))
    centered = estimates - estimates.mean(axis=0)
    third = np.mean(centered**3, axis=0)
    spread = centered.std(axis=0)
    standardized = np.abs(third[spread > 0]) / spread[spread > 0] ** 3
    return {
        "bias": float(np.linalg.norm(estimates.mean(axis=0) - exact)) / scale,
        "std": float(np.sqrt(np.mean(np.sum(centered**2, axis=1)))) / scale,
        "third": float(np.linalg.norm(np.cbrt(third))) / scale,
        "skewness": float(standardized.mean()) if len(standardized) > 0 else 0.0,
        "rmse": float(np.sqrt(np.mean(np.sum((estimates - exact) ** 2, axis=1)))) / scale,
    }
