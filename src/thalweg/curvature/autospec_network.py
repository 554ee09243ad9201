"""AutoSpec: a network that emits iterative spectral algorithms."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator

from thalweg.common.checks import check_choice, check_integer
from thalweg.common.optional import requires
from thalweg.curvature.spectral_heads import expansion_rows, head_size, recurrence_rows
from thalweg.curvature.spectral_probe import SpectralProbe, probe_operator
from thalweg.curvature.spectral_recurrences import RecurrenceCoefficients
from thalweg.curvature.spectral_tasks import (
    BEYOND,
    FUNCTIONS,
    TASKS,
    ScaledInterval,
    classical_rows,
    largest_error,
    original_recurrence,
)
from thalweg.curvature.spectral_training import fit_spectra

with requires("curvature"):
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from torch import Tensor, nn

Values = NDArray[np.float64]
Task = Literal["precond", "inv", "invsqrt", "sqrt", "log", "exp", "filter"]

# A polynomial whose error is more often Chebyshev's is not used.
WORSE = 10.0
# Terms larger than the sum, by which rounding errors grow.
ROUNDING = 1e8


class OutOfRangeWarning(UserWarning):
    """An operator is worse conditioned than those that the network was trained on."""


class AutoSpec(nn.Module):
    r"""Learned iterative algorithms for symmetric positive definite operators.

    A few Lanczos steps show a little of the spectrum of A; a small network turns what they show
    into the coefficients of a three-term recurrence

    .. math::

        p_{j+1} = (a_j \hat A + b_j) p_j - c_j p_{j-1}, \quad P(A) = \sum_j w_j p_j,
        \quad \hat A = A / \lambda_{\max},

    which is run with ``degree`` products with A and no inner product. Trained on the spectra of
    synthetic operators alone (`fit_synthetic`), it is applied to large real ones. `pretrained`
    loads weights that come with the library.

    Parameters
    ----------
    task : {"precond", "inv", "invsqrt", "sqrt", "log", "exp", "filter"}, default "precond"
        What P is for: a preconditioner of A; an approximation of :math:`A^{-1}`,
        :math:`A^{-1/2}`, :math:`A^{1/2}`, :math:`\log A` or :math:`e^{-A}`; or a filter that keeps
        the eigenvectors below a cut and damps the others.
    degree : int, default 12
        Degree of P: products with A per application.
    probe_steps : int, default 16
        Lanczos steps of the probe.
    form : {"expansion", "recurrence"}, default "expansion"
        Whether the recurrence is that of Chebyshev polynomials and the network decides on w alone,
        or emits a, b, c and w. To w it gives corrections of Chebyshev's preconditioner or filter,
        or the weights of a least-squares fit to a function.
    hidden : int, default 64
        Width of the two hidden layers.

    Attributes
    ----------
    losses : list of float
        Loss of each training step of the last `fit_synthetic`.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of range.

    Notes
    -----
    Applying P costs ``degree`` products and about as many passes over four vectors; the network
    costs nothing beside them. Its own numbers are float64: the fit is ill-conditioned in less.
    Before use, P is checked on a fine grid of the interval: a preconditioner that is not positive,
    or an error ten times as large as Chebyshev's, makes `coefficients` fall back to Chebyshev's
    polynomial, which `autospec_report` says.

    The paper's: probes, recurrences, self-supervised losses on synthetic spectra, transfer. Ours:
    training spectra are densities (`fit_synthetic`), the probe also shows the weights and residuals
    of the Ritz pairs, expansions of functions are fitted by least squares with learned weights, and
    all losses.

    References
    ----------
    "AutoSpec: A Neural Network Framework for Discovering Iterative Spectral Algorithms",
    NeurIPS 2026. The fit of expansions to a spectral density follows "Spectrum-Adapted Polynomial
    Approximation for Matrix Functions", ICASSP 2019.

    Examples
    --------
    Precondition conjugate gradients for a Poisson problem with 10,000 unknowns.

    >>> import numpy as np
    >>> import scipy.sparse as sp
    >>> from scipy.sparse.linalg import cg
    >>> from thalweg.curvature import pretrained
    >>> line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(100, 100))
    >>> A = (sp.kron(line, sp.eye_array(100)) + sp.kron(sp.eye_array(100), line)).tocsr()
    >>> b = np.ones(10_000)
    >>> M = pretrained("precond", degree=12).operator(A, rng=0)
    >>> plain, learned = [], []
    >>> _ = cg(A, b, rtol=1e-8, callback=plain.append)
    >>> x, info = cg(A, b, rtol=1e-8, M=M, callback=learned.append)
    >>> info, bool(np.linalg.norm(b - A @ x) <= 1e-8 * np.linalg.norm(b))
    (0, True)
    >>> len(learned) < len(plain) / 5
    True
    """

    kappa: Tensor
    losses: list[float]

    def __init__(
        self,
        task: Task = "precond",
        degree: int = 12,
        *,
        probe_steps: int = 16,
        form: Literal["expansion", "recurrence"] = "expansion",
        hidden: int = 64,
    ) -> None:
        super().__init__()
        check_choice("task", task, TASKS)
        self.task: Task = task
        self.degree = check_integer("degree", degree, at_least=1)
        self.probe_steps = check_integer("probe_steps", probe_steps, at_least=2)
        self.form = check_choice("form", form, ("expansion", "recurrence"))
        self.hidden = check_integer("hidden", hidden, at_least=1)
        self.network = nn.Sequential(
            nn.Linear(3 * self.probe_steps + 4, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
        ).double()
        self.head = nn.Linear(hidden, head_size(self.form, self.task, self.degree)).double()
        # Training starts at P = 1, at Chebyshev's polynomial, or at a fit with equal weights.
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.register_buffer("kappa", torch.tensor([1.0, 1.0], dtype=torch.float64))
        self.losses = []

    def forward(self, features: Tensor, low: Tensor, cut: Tensor, lam_max: Tensor) -> Tensor:
        """Return recurrences (B, degree + 1, 4) from the features (B, 3 m + 4) of probes.

        ``low``, ``cut`` and ``lam_max`` (B,) are those of `SpectralProbe`, the first two divided by
        the third; only expansions need them.
        """
        output = self.head(self.network(features))
        if self.form == "recurrence":
            return recurrence_rows(output, self.degree)
        return expansion_rows(output, self.degree, self.task, low, cut, lam_max)

    def fit_synthetic(
        self,
        *,
        kappa: tuple[float, float] = (10.0, 3000.0),
        families: Sequence[str] = ("power", "gap", "outliers"),
        n: int = 192,
        pool: int = 16384,
        batch: int = 64,
        steps: int = 3000,
        lr: float = 2e-3,
        generator: torch.Generator | None = None,
        callback: Callable[[int, float], Any] | None = None,
        show_progress: bool | None = None,
    ) -> AutoSpec:
        """Train on the spectra of synthetic operators; no matrix is formed.

        Each spectrum is a density of eigenvalues on n points, of an operator with 10^3 to 10^6
        unknowns, so that a probe sees as little of it as of a real one. For half of them the
        smallest eigenvalue is given. The losses, by task: the logarithm of the condition number of
        A P(A), with a price of negative P; of the mean squared error of P(A) b; of the largest
        unwanted over the mean wanted value of P. Adam with a cosine schedule and clipped gradients.

        Parameters
        ----------
        kappa : (float, float), default (10, 3000)
            Range of condition numbers, drawn evenly in the logarithm.
        families : sequence of {"power", "gap", "outliers"}
            Densities proportional to a power of the eigenvalue; a low cluster, a gap and a bulk; a
            bulk and few large eigenvalues.
        n : int, default 192
            Points of a spectrum.
        pool : int, default 16384
            Spectra that are drawn and probed beforehand.
        batch, steps, lr
            Of Adam.
        generator : torch.Generator, optional
            Draws spectra, probes and batches, and the network's first weights.
        callback : callable, optional
            Called with the number of each step and its loss.
        show_progress : bool, optional
            Whether to show a bar; by default on a terminal.

        Returns
        -------
        AutoSpec
            Itself. Ctrl-C ends training and keeps what was reached.

        Raises
        ------
        TypeError, ValueError
            If an argument is out of range.
        """
        self.losses = fit_spectra(
            self,
            kappa=kappa,
            families=families,
            n=n,
            pool=pool,
            batch=batch,
            steps=steps,
            lr=lr,
            generator=generator,
            callback=callback,
            show_progress=show_progress,
        )
        return self

    def probe(
        self,
        A: Any,
        *,
        rng: int | np.random.Generator | None = None,
        lam_min: float | None = None,
        cut: float | None = None,
        nullspace: Any = None,
    ) -> SpectralProbe:
        """Look at an operator by ``probe_steps`` products; see `SpectralProbe`.

        Parameters
        ----------
        A : sparse matrix, ndarray, LinearOperator or Tensor of shape (n, n)
            Symmetric (Hermitian) positive definite. Tensors may be dense or sparse, on any device.
        rng : int, Generator or None
            Draws the start vector.
        lam_min : float, optional
            The smallest eigenvalue or a lower bound, if one is known. If not, the network guesses.
        cut : float, optional
            For ``task="filter"``: where the unwanted part of the spectrum begins.
        nullspace : array_like of shape (n,) or (n, r), optional
            Vectors that A maps to zero, to be left out.

        Raises
        ------
        TypeError, ValueError
            If A is not square, not of floats, not finite, not symmetric, indefinite, or singular
            apart from ``nullspace``; if a number is out of range.
        """
        return probe_operator(
            A, self.probe_steps, rng=rng, lam_min=lam_min, cut=cut, nullspace=nullspace
        )

    def coefficients(self, probe: SpectralProbe) -> RecurrenceCoefficients:
        """Return the recurrence of ``P(A / lam_max)``, Chebyshev's if the learned one is unsafe.

        Of a function it is that of f(A / lam_max) but for ``"exp"``; `operator` and `apply_to`
        scale it back to A. A preconditioner's scale is such that :math:`x P(x)` is 1 on average.

        Raises
        ------
        ValueError
            If the probe has another number of steps, or no ``cut`` where the task needs it.

        Warns
        -----
        OutOfRangeWarning
            If A seems worse conditioned than what the network was trained on.
        """
        if len(probe.ritz_values) != self.probe_steps:
            raise ValueError(
                f"probe must have {self.probe_steps} steps, got {len(probe.ritz_values)}"
            )
        self._warn_of_range(probe)
        interval = probe.interval
        learned = self.learned_rows(probe)
        usable = is_safe(self.task, learned, interval)
        chosen = RecurrenceCoefficients(
            learned if usable else classical_rows(self.task, self.degree, interval)
        )
        if self.task != "precond":
            return chosen
        grid = safety_grid(interval)
        return chosen.scaled(1 / float(np.mean(grid * chosen(grid))))

    def learned_rows(self, probe: SpectralProbe) -> Values:
        """Return what the network says, safe or not: of shape (degree + 1, 4)."""
        weights = self.head.weight
        interval = probe.interval
        cut = 1.0 if interval.cut is None else interval.cut
        numbers = [
            torch.as_tensor([value], dtype=weights.dtype, device=weights.device)
            for value in (interval.low, cut, probe.lam_max)
        ]
        features = torch.as_tensor(probe.features(scale_free=self.task != "exp")[None]).to(weights)
        with torch.no_grad():
            rows = self(features, *numbers)[0]
        return np.asarray(rows.double().cpu())

    def _warn_of_range(self, probe: SpectralProbe) -> None:
        low = probe.ritz_values[0] if probe.lam_min is None else probe.lam_min
        trained, seen = float(self.kappa[1]), probe.lam_max / low
        if seen > 1.2 * trained:
            warnings.warn(
                f"A has a condition number of at least {seen:.3g}, and the network was trained up "
                f"to {trained:.3g}",
                OutOfRangeWarning,
                stacklevel=3,
            )

    def operator(
        self, A: Any, probe: SpectralProbe | None = None, **options: Any
    ) -> LinearOperator:
        """Return P(A) as a SciPy operator: the ``M`` of `scipy.sparse.linalg.cg`, for example.

        Parameters
        ----------
        A : sparse matrix, ndarray or LinearOperator of shape (n, n)
            Symmetric (Hermitian) positive definite.
        probe : SpectralProbe, optional
            Of A, if it has been made before.
        **options
            Of `probe`: ``rng``, ``lam_min``, ``cut``, ``nullspace``.

        Raises
        ------
        TypeError, ValueError
            As `probe`; also if A is a tensor, for which there is `apply_to`.
        """
        return self._recurrence(A, probe, options).operator(A)

    def apply_to(self, A: Any, B: Any, probe: SpectralProbe | None = None, **options: Any) -> Any:
        """Return P(A) B, which is close to f(A) B for the tasks that are functions.

        Parameters
        ----------
        A : sparse matrix, ndarray, LinearOperator or Tensor of shape (n, n)
            Symmetric (Hermitian) positive definite.
        B : ndarray or Tensor of shape (n,) or (n, r)
            Of the kind of A; columns are treated at once.
        probe : SpectralProbe, optional
            Of A, if it has been made before.
        **options
            Of `probe`: ``rng``, ``lam_min``, ``cut``, ``nullspace``.

        Returns
        -------
        ndarray or Tensor
            Of B's shape and of the precision of A.

        Raises
        ------
        TypeError, ValueError
            As `probe`; also if B is of another kind or shape, or not finite.
        """
        return self._recurrence(A, probe, options).apply_to(A, B)

    def _recurrence(
        self, A: Any, probe: SpectralProbe | None, options: dict[str, Any]
    ) -> RecurrenceCoefficients:
        """Return the recurrence in A itself."""
        if probe is None:
            probe = self.probe(A, **options)
        elif options:
            raise ValueError(f"{', '.join(options)} must not be given beside a probe")
        return original_recurrence(self.task, self.coefficients(probe), probe.lam_max)

    def polynomial(self, x: Any, probe: SpectralProbe) -> Values:
        """Return P at eigenvalues ``x`` of A, of shape (n,)."""
        recurrence = original_recurrence(self.task, self.coefficients(probe), probe.lam_max)
        return recurrence(np.asarray(x, dtype=np.float64))

    def save(self, path: str | Path) -> None:
        """Write weights (float32) and settings to a safetensors file."""
        tensors = {k: v.detach().cpu().float().contiguous() for k, v in self.state_dict().items()}
        settings = {
            name: getattr(self, name)
            for name in ("task", "degree", "probe_steps", "form", "hidden")
        }
        save_file(tensors, str(path), metadata={"autospec": json.dumps(settings)})

    @classmethod
    def load(cls, path: str | Path) -> AutoSpec:
        """Read what `save` has written.

        Raises
        ------
        FileNotFoundError
            If there is no such file.
        ValueError
            If the file holds something else.
        """
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if "autospec" not in metadata:
                raise ValueError(f"{path} must be written by AutoSpec.save")
            model = cls(**json.loads(metadata["autospec"]))
            model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        return model.eval()


def safety_grid(interval: ScaledInterval) -> Values:
    """Return 512 points of the spectrum's interval and a little beyond."""
    logarithmic = np.geomspace(interval.low, BEYOND, 256)
    return np.sort(np.concatenate([logarithmic, np.linspace(interval.low, BEYOND, 256)]))


def is_safe(task: str, rows: Values, interval: ScaledInterval) -> bool:
    """Return whether a learned polynomial may be used in place of Chebyshev's."""
    if not np.isfinite(rows).all():
        return False
    grid = safety_grid(interval)
    learned = RecurrenceCoefficients(rows)
    if learned.growth(grid) > ROUNDING:
        return False
    if task == "precond":
        # Positive down to zero: the smallest eigenvalue may be smaller than it seems.
        y = learned(np.concatenate([np.linspace(0, interval.low, 64), grid]))
        return bool(y.min() > 0)
    classical = RecurrenceCoefficients(classical_rows(task, learned.degree, interval))
    if task == "filter":
        return _leak(learned, grid, interval) <= WORSE * _leak(classical, grid, interval)
    target = FUNCTIONS[task](grid, interval.lam_max)
    errors = [largest_error(p(grid) - target, target) for p in (learned, classical)]
    return bool(errors[0] <= WORSE * errors[1])


def _leak(polynomial: RecurrenceCoefficients, grid: Values, interval: ScaledInterval) -> float:
    """Return the largest unwanted value of a filter, relative to that at the low end."""
    unwanted = np.abs(polynomial(grid[grid >= (interval.cut or 0.0)])).max()
    return float(unwanted / np.abs(polynomial(np.array([interval.low]))[0]))
