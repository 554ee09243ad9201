"""What AutoSpec's polynomial does to a spectrum, beside Chebyshev's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.optional import requires
from thalweg.curvature.autospec_network import AutoSpec, is_safe, safety_grid
from thalweg.curvature.spectral_probe import SpectralProbe
from thalweg.curvature.spectral_recurrences import RecurrenceCoefficients
from thalweg.curvature.spectral_tasks import FUNCTIONS, classical_rows, largest_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]

# Extrema this close to the largest count as equal to it.
EQUAL = 0.1


@dataclass(frozen=True, eq=False)
class AutoSpecReport:
    """A learned polynomial on the interval that a probe has found, and Chebyshev's beside it.

    Attributes
    ----------
    task : str
        What the polynomial is for.
    fallback : bool
        Whether the learned polynomial was found unsafe and Chebyshev's is used.
    eigenvalues : ndarray of shape (m,)
        A grid of the interval.
    learned, chebyshev : ndarray of shape (m,)
        On the grid: x P(x) for a preconditioner, the relative error for a function, P relative to
        its value at the low end for a filter.
    size, chebyshev_size : float
        The condition number of A P(A) over the interval; the largest relative error; the largest
        unwanted value of the filter.
    alternations, chebyshev_alternations : int
        Extrema of alternating sign that are within a tenth of the largest one: of 1 - x P(x), of
        the error, or of the filter where it damps. A minimax polynomial has its degree plus 2.
    matvecs : int
        Products with A that the probe took.
    """

    task: str
    fallback: bool
    eigenvalues: Values
    learned: Values
    chebyshev: Values
    size: float
    chebyshev_size: float
    alternations: int
    chebyshev_alternations: int
    matvecs: int

    def __str__(self) -> str:
        name = {"precond": "condition number", "filter": "leak"}.get(self.task, "relative error")
        used = " (fallback: Chebyshev is used)" if self.fallback else ""
        return (
            f"AutoSpec, {self.task}{used}\n"
            f"{name} on the interval: {self.size:.4g}, Chebyshev {self.chebyshev_size:.4g}\n"
            f"alternations: {self.alternations}, Chebyshev {self.chebyshev_alternations}"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot both polynomials over the interval and return the axes."""
        with requires("plot"):
            from matplotlib import pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        ax.semilogx(self.eigenvalues, self.learned, label="AutoSpec")
        ax.semilogx(self.eigenvalues, self.chebyshev, "--", label="Chebyshev on the same interval")
        labels = {"precond": r"$\lambda P(\lambda)$", "filter": r"$P(\lambda) / P(0)$"}
        ax.set(xlabel="eigenvalue", ylabel=labels.get(self.task, "relative error"))
        ax.legend()
        return ax


def autospec_report(
    model: AutoSpec, A: Any, probe: SpectralProbe | None = None, **options: Any
) -> AutoSpecReport:
    """Compare the polynomial for A with Chebyshev's on the same interval.

    Parameters
    ----------
    model : AutoSpec
    A : sparse matrix, ndarray, LinearOperator or Tensor of shape (n, n)
        Symmetric (Hermitian) positive definite.
    probe : SpectralProbe, optional
        Of A, if it has been made before.
    **options
        Of `AutoSpec.probe`.

    Returns
    -------
    AutoSpecReport

    Raises
    ------
    TypeError, ValueError
        As `AutoSpec.probe`.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.curvature import autospec_report, pretrained
    >>> A = np.diag(np.geomspace(0.001, 1.0, 200))
    >>> report = autospec_report(pretrained("precond", 12), A, rng=0)
    >>> report.fallback, report.size < 100
    (False, True)
    """
    probe = model.probe(A, **options) if probe is None else probe
    interval = probe.interval
    grid = safety_grid(interval)
    grid = grid[grid <= 1]
    chosen = model.coefficients(probe)
    rival = RecurrenceCoefficients(classical_rows(model.task, model.degree, interval))
    if model.task == "precond":
        rival = rival.scaled(1 / float(np.mean(grid * rival(grid))))
    sides = [_side(model.task, polynomial, grid, probe) for polynomial in (chosen, rival)]
    (learned, size, alternations), (chebyshev, chebyshev_size, chebyshev_alternations) = sides
    return AutoSpecReport(
        task=model.task,
        fallback=not is_safe(model.task, model.learned_rows(probe), interval),
        eigenvalues=grid * probe.lam_max,
        learned=learned,
        chebyshev=chebyshev,
        size=size,
        chebyshev_size=chebyshev_size,
        alternations=alternations,
        chebyshev_alternations=chebyshev_alternations,
        matvecs=probe.matvecs,
    )


def _side(
    task: str, polynomial: RecurrenceCoefficients, grid: Values, probe: SpectralProbe
) -> tuple[Values, float, int]:
    """Return the curve of a polynomial, its size, and its alternations."""
    interval = probe.interval
    values = polynomial(grid)
    if task == "precond":
        y = grid * values
        # In the scale in which 1 is the middle, as a minimax residual has it.
        middle = (y.max() + y.min()) / 2
        return y, float(y.max() / y.min()), alternations(1 - y / middle)
    if task == "filter":
        relative = values / polynomial(np.array([interval.low]))[0]
        unwanted = relative[grid >= (interval.cut or 0.0)]
        return relative, float(np.abs(unwanted).max()), alternations(unwanted)
    target = FUNCTIONS[task](grid, interval.lam_max)
    error = values - target
    return error / target, float(largest_error(error, target)), alternations(error)


def alternations(residual: Values) -> int:
    """Return how many extrema of alternating sign are within a tenth of the largest.

    Examples
    --------
    >>> import numpy as np
    >>> int(alternations(np.cos(np.linspace(0, 3 * np.pi, 1000))))
    4
    """
    large = np.abs(residual) >= (1 - EQUAL) * np.abs(residual).max()
    signs = np.sign(residual[large])
    return int(1 + np.count_nonzero(np.diff(signs)))
