"""What kind of gradient noise, and what kind of smoothness, a training run meets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.progress import Advance, progress
from thalweg.common.random import RNGLike, as_generator

with requires("training"):
    import torch
    from torch import Tensor, nn

from thalweg.training.gradient_samples import (
    Batches,
    GradientOracle,
    LossFunction,
    Sketch,
    sample_gradients,
)
from thalweg.training.moment_fits import MomentFit, fit_line, matrix_moments, tensor_moments
from thalweg.training.stability import estimate_ratio
from thalweg.training.tails import (
    MIN_SAMPLES,
    Interval,
    hill_index,
    quantile_skewness,
    tail_index,
    tail_index_by_column,
)
from thalweg.training.tensor_lists import lerp, squared_norm

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEAVY_INDEX = 1.8
HEAVY_HILL = 3.0
QUIET_RATIO = 0.5
SKEWED = 0.1
MAX_MATRIX = 2**18
MAX_MATRICES = 6
DEFAULT_LR = 1e-3


@dataclass(frozen=True)
class NoiseReport:
    """What `measure_noise` found; print it for a summary.

    Attributes
    ----------
    tail_index, hill_index : Interval
        Of the noise of the whole gradient; see `thalweg.training.tail_index` (2: sums behave as
        Gaussian ones) and `thalweg.training.hill_index` (below 2: no variance was to be seen).
    tail_index_by_tensor : dict of str to float
    tail_index_by_coordinate : ndarray
        Of some thousand sampled coordinates, in no particular order.
    skewness : Interval
        Root mean square of the coordinates' quantile skewness; see `quantile_skewness`.
    stability_ratio : Interval
        ‖E G‖² / E‖G‖² of the gradient of one batch; 1 without noise.
    p : float
        The moment that the fits below use, in (1, 2].
    moments : MomentFit
        ``E|ξ|ᵖ ≤ σ₀ᵖ + σ₁ᵖ |∇f|ᵖ``, the paper's condition, over all coordinates along the path.
    moments_by_tensor, matrix_moments : dict of str to MomentFit
        The same for each tensor, and the paper's matrix condition for some matrices.
    smoothness : MomentFit
        ‖∇f(x) - ∇f(y)‖ / ‖x - y‖ ≈ L₀ + L₁ ‖∇f(x)‖ along the path; its ``sigma0`` and
        ``sigma1`` are `L0` and `L1`.
    gradient_norm : float
        ‖∇f‖ where the path starts, without the noise's share.
    noise_norms : ndarray of shape (n_samples,)
        ‖ξ‖, from the sketch.
    n_samples : int
    """

    tail_index: Interval
    hill_index: Interval
    tail_index_by_tensor: dict[str, float]
    tail_index_by_coordinate: NDArray[np.float64] = field(repr=False)
    skewness: Interval
    stability_ratio: Interval
    p: float
    moments: MomentFit
    moments_by_tensor: dict[str, MomentFit]
    matrix_moments: dict[str, MomentFit]
    smoothness: MomentFit
    gradient_norm: float
    noise_norms: NDArray[np.float64] = field(repr=False)
    n_samples: int

    @property
    def L0(self) -> Interval:  # noqa: N802
        """The part of the smoothness that does not depend on the gradient."""
        return self.smoothness.sigma0

    @property
    def L1(self) -> Interval:  # noqa: N802
        """The part of the smoothness that grows with the norm of the gradient."""
        return self.smoothness.sigma1

    @property
    def heavy(self) -> bool:
        """Whether both estimators say that the tails are heavy."""
        return self.tail_index.value < HEAVY_INDEX and self.hill_index.value < HEAVY_HILL

    @property
    def recommended(self) -> str:
        """Where to start, by the rules of the guide "Which optimizer for which noise"."""
        if self.stability_ratio.low > QUIET_RATIO:
            return (
                "There is hardly any noise at this batch size: SGD with momentum and a constant "
                "step, or a smaller batch."
            )
        if self.heavy and self.skewness.low > SKEWED:
            return (
                "Heavy and skewed tails: clip the gradient with a tuned threshold before the "
                "momentum (AdamW or Muonlight); medians and plain signs are biased."
            )
        if self.heavy:
            return (
                "Heavy and nearly symmetric tails: SignSGD without momentum, or ClippedMoM with "
                "micro-batches; clip before any other optimizer's momentum."
            )
        if self.L1.low * self.gradient_norm > self.L0.value:
            return (
                "Smoothness that grows with the gradient: NLPrecond, or gradient clipping, whose "
                "threshold is near L0/L1."
            )
        return (
            "Light tails and ordinary smoothness: AdamW or Muon with a schedule, StabSGD where "
            "none can be tuned."
        )

    def __str__(self) -> str:
        tails = "heavy" if self.heavy else "light"
        return "\n".join(
            [
                f"tail index          {self.tail_index}, {tails} tails",
                f"Hill index          {self.hill_index}",
                f"quantile skewness   {self.skewness}",
                f"stability ratio     {self.stability_ratio} of one batch",
                f"moments, p = {self.p:.2f}   sigma0 {self.moments.sigma0}, "
                f"sigma1 {self.moments.sigma1}, R² {self.moments.r2:.2f}",
                f"smoothness          L0 {self.L0}, L1 {self.L1}, R² {self.smoothness.r2:.2f}",
                self.recommended,
            ]
        )

    def plot(self, axes: Any = None) -> NDArray[Any]:
        """Plot the tail of the noise, the moments and the smoothness beside their fits.

        Parameters
        ----------
        axes : array of three matplotlib Axes, optional

        Returns
        -------
        ndarray of Axes
        """
        with requires("plot"):
            import matplotlib.pyplot as plt
        if axes is None:
            axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")[1]
        flat = np.asarray(axes).reshape(-1)
        if len(flat) != 3:
            raise ValueError(f"axes must hold three Axes, got {len(flat)}")
        self._plot_tail(flat[0])
        self.moments.plot(flat[1], xlabel="|∇f|ᵖ, mean over coordinates", ylabel="E|ξ|ᵖ")
        self.smoothness.plot(flat[2], xlabel="‖∇f‖", ylabel="‖Δ∇f‖ / ‖Δx‖")
        return flat

    def _plot_tail(self, ax: Axes) -> None:
        norms = np.sort(self.noise_norms[self.noise_norms > 0])[::-1]
        share = np.arange(1, len(norms) + 1) / len(norms)
        ax.loglog(norms, share, ".", label="noise")
        top = norms[: max(2, len(norms) // 20)]
        if math.isfinite(self.hill_index.value):
            line = share[len(top) - 1] * (top / top[-1]) ** -self.hill_index.value
            ax.loglog(top, line, label=f"Hill index {self.hill_index.value:.2g}")
        ax.axvline(norms.mean(), color="0.7", label="mean")
        ax.set(
            xlabel="‖ξ‖",
            ylabel="share of larger ones",
            title=f"tail index {self.tail_index.value:.2f}",
        )
        ax.legend()


def measure_noise(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    *,
    params: Iterable[str] | None = None,
    n_samples: int = 1024,
    n_steps: int = 20,
    n_path: int = 16,
    stride: int = 10,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
    p: float | None = None,
    confidence: float = 0.95,
    rng: RNGLike = None,
    show_progress: bool | None = None,
) -> NoiseReport:
    r"""Measure the tails, skewness, size and growth of a run's gradient noise, and its smoothness.

    At the model's parameters, ``n_samples`` gradients give the noise ξ = g - ∇f, its tail index,
    its skewness and the stability ratio. Then a copy of the model trains for ``n_steps`` times
    ``stride`` steps; at every ``stride``-th, ``n_path`` gradients give the p-th moment of the
    noise and of the gradient, and the same batches, a stride later, how much the gradient changes.

    Parameters
    ----------
    model : nn.Module
        It is copied, and stays as it is.
    loss_fn : callable
        ``loss_fn(model, batch)`` returns the loss of a batch, one number.
    batches : iterable
        Independent batches, of the size in which they will be trained on; noise shrinks with the
        batch. A list or a `DataLoader` is run through again when it ends. In all,
        n_samples + n_steps · (n_path + stride) are used.
    params : iterable of str, optional
        Names of the parameters to look at; by default all that require gradients.
    n_samples : int ≥ 64, default 1024
    n_steps, n_path, stride : int, default 20, 16, 10
        Points of the path (at least 3), batches at each (at least 4), and steps between them.
    optimizer : callable, optional
        Given the parameters, returns the optimizer that makes the path; default AdamW, lr 1e-3.
    p : float in (1, 2], optional
        By default just below the tail index, at least 1.05.
    confidence : float in (0, 1), default 0.95
        Of all intervals.
    rng : int, Generator or None
        For the sketch and the blocks; the batches are random by themselves.
    show_progress : bool, optional
        By default only on a terminal.

    Returns
    -------
    NoiseReport

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, if the batches end, if a loss is not one number
        or a gradient not finite, and if all gradients are equal (deterministic gradients).

    Notes
    -----
    *Cost.* n_samples + n_steps · (2 n_path + stride) gradients, and memory for two copies of the
    model and five of its gradient; samples are kept as sketches of some ten thousand numbers,
    whatever the size of the model, with the norms right to a few percent.

    *Ours.* The paper defines the noise condition and its matrix form. Ours are how they are
    estimated: ∇f enters the fits through the product of two independent halves, for the plain
    norm of a mean gradient contains noise and would correlate with it by itself; intervals of
    fits are bootstrapped over the points of the path, which are dependent, so read them as
    optimistic. Matrices are compared in the diagonal metric V of their rows' p-th moments.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026 (the noise).
    "Nonlinear preconditioning under generalized smoothness", NeurIPS 2025, and J. Zhang et al.,
    "Why gradient clipping accelerates training", ICLR 2020 (the smoothness). "Stab-SGD:
    Noise-adaptivity in smooth optimization with stability ratios", NeurIPS 2025 (the ratio).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import measure_noise
    >>> generator = torch.Generator().manual_seed(0)
    >>> model = torch.nn.Linear(20, 1)
    >>> def batch():
    ...     x = torch.randn(8, 20, generator=generator)
    ...     return x, x.sum(1, keepdim=True) + torch.randn(8, 1, generator=generator)
    >>> report = measure_noise(
    ...     model,
    ...     lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    ...     (batch() for _ in range(2000)),
    ...     rng=0,
    ... )
    >>> report.heavy, 0.1 < report.stability_ratio.value < 0.9
    (False, True)
    """
    check_integer("n_samples", n_samples, at_least=MIN_SAMPLES)
    check_integer("n_steps", n_steps, at_least=3)
    check_integer("n_path", n_path, at_least=4)
    check_integer("stride", stride, at_least=1)
    check_number("confidence", confidence, above=0, below=1)
    if p is not None:
        check_number("p", p, above=1, at_most=2)
    stream = as_generator(rng)
    source = Batches(batches)
    here = GradientOracle(model, loss_fn, params)
    sketch = Sketch(here.params, stream)
    n_gradients = n_samples + n_steps * (2 * n_path + stride)
    with progress("measuring noise", n_gradients, show=show_progress) as advance:
        samples = sample_gradients(
            here,
            (source.take() for _ in range(n_samples)),
            sketch,
            each=lambda _: advance(),
        )
        noise = samples.sketches - samples.sketches.mean(axis=0)
        norms = np.linalg.norm(noise, axis=1)
        rounding = 16 * max(torch.finfo(mean.dtype).eps for mean in samples.means)
        if norms.max() <= rounding * np.linalg.norm(samples.sketches, axis=1).max():
            raise ValueError(
                "batches must give different gradients, got deterministic gradients: there is no "
                "noise to measure"
            )
        index = tail_index(noise, confidence=confidence, rng=stream)
        if p is None:
            p = min(max(1.05, index.value - 0.05), 2.0)
        make = optimizer or (lambda chosen: torch.optim.AdamW(chosen, lr=DEFAULT_LR))
        path = _follow(here, make, source, sketch, p, (n_steps, n_path, stride), advance)
    entry_noise = samples.entries - samples.entries.mean(axis=0)
    stability = samples.stability
    width = stability.std_error * float(norm.ppf(0.5 + confidence / 2))
    return NoiseReport(
        tail_index=index,
        hill_index=hill_index(norms, confidence=confidence),
        tail_index_by_tensor=_tail_index_by_tensor(noise, sketch, stream),
        tail_index_by_coordinate=tail_index_by_column(entry_noise, stream),
        skewness=quantile_skewness(entry_noise, confidence=confidence),
        stability_ratio=Interval(
            stability.value, max(stability.value - width, 0.0), min(stability.value + width, 1.0)
        ),
        p=p,
        moments=path.moments(confidence, stream),
        moments_by_tensor=path.moments_by_tensor(confidence, stream),
        matrix_moments=path.matrix_moments(confidence, stream),
        smoothness=fit_line(path.gradient_norms, path.smoothness, 1.0, confidence, stream),
        gradient_norm=math.sqrt(max(stability.numerator, 0.0)),
        noise_norms=norms,
        n_samples=n_samples,
    )


@dataclass
class _Path:
    """The moments at every point of a path, (gradient, noise), and the smoothness between them."""

    p: float
    sizes: dict[str, int]
    tensors: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    matrices: list[dict[str, tuple[float, float]]] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    smoothness: list[float] = field(default_factory=list)

    def moments(self, confidence: float, rng: np.random.Generator) -> MomentFit:
        total = sum(self.sizes.values())
        pairs = [
            [sum(self.sizes[n] * point[n][side] for n in point) / total for point in self.tensors]
            for side in (0, 1)
        ]
        return fit_line(pairs[0], pairs[1], self.p, confidence, rng)

    def moments_by_tensor(
        self, confidence: float, rng: np.random.Generator
    ) -> dict[str, MomentFit]:
        return self._fit_each(self.tensors, confidence, rng)

    def matrix_moments(self, confidence: float, rng: np.random.Generator) -> dict[str, MomentFit]:
        return self._fit_each(self.matrices, confidence, rng)

    def _fit_each(
        self,
        points: list[dict[str, tuple[float, float]]],
        confidence: float,
        rng: np.random.Generator,
    ) -> dict[str, MomentFit]:
        return {
            name: fit_line(
                [point[name][0] for point in points],
                [point[name][1] for point in points],
                self.p,
                confidence,
                rng,
            )
            for name in points[0]
        }


def _follow(
    here: GradientOracle,
    make: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    source: Batches,
    sketch: Sketch,
    p: float,
    shape: tuple[int, int, int],
    advance: Advance,
) -> _Path:
    """Train a copy, and look at the gradients on the way."""
    n_steps, n_path, stride = shape
    names = list(here.params)
    ahead = here.copy()
    optimizer = make(list(ahead.params.values()))
    path = _Path(p, {name: tensor.numel() for name, tensor in here.params.items()})
    matrices = _choose_matrices(here.params)
    for _ in range(n_steps):
        for _ in range(stride):
            ahead.put_gradient(source.take())
            optimizer.step()
            advance()
        distance = math.sqrt(
            squared_norm([a - b for a, b in zip(ahead.values(), here.values(), strict=True)])
        )
        kept: dict[str, list[Tensor]] = {name: [] for name in matrices}
        change = _Change()
        drawn = [source.take() for _ in range(n_path)]
        later = iter(drawn)

        def look(
            grads: list[Tensor],
            kept: dict[str, list[Tensor]] = kept,
            change: _Change = change,
            later: Any = later,
        ) -> None:
            for name in matrices:
                grad = grads[names.index(name)]
                kept[name].append(grad.reshape(grad.shape[0], -1).double().cpu())
            change.add(grads, ahead.gradient(next(later)))
            advance(2)

        samples = sample_gradients(here, drawn, sketch, look)
        path.tensors.append(tensor_moments(samples.entries, sketch.n_entries, p))
        path.matrices.append({n: matrix_moments(torch.stack(g), p) for n, g in kept.items()})
        path.gradient_norms.append(math.sqrt(max(samples.stability.numerator, 0.0)))
        path.smoothness.append(change.size() / distance if distance > 0 else 0.0)
        here.move_to(ahead)
    return path


class _Change:
    """The norm of the mean change of gradients, without the noise's share."""

    def __init__(self) -> None:
        self._mean: list[Tensor] = []
        self._squares: list[float] = []

    def add(self, before: list[Tensor], after: list[Tensor]) -> None:
        differences = [b - a for a, b in zip(before, after, strict=True)]
        self._squares.append(squared_norm(differences))
        if not self._mean:
            self._mean = differences
            return
        lerp(self._mean, differences, 1 / len(self._squares))

    def size(self) -> float:
        second = float(np.mean(self._squares))
        estimate = estimate_ratio(len(self._squares), squared_norm(self._mean), second, 0.0)
        return math.sqrt(max(estimate.numerator, 0.0))


def _choose_matrices(params: dict[str, Tensor]) -> list[str]:
    """Return the largest matrices whose singular values are cheap."""
    fitting = {
        name: p.numel()
        for name, p in params.items()
        if p.ndim >= 2 and min(p.shape[0], p.numel() // p.shape[0]) > 1 and p.numel() <= MAX_MATRIX
    }
    return sorted(fitting, key=lambda name: -fitting[name])[:MAX_MATRICES]


def _tail_index_by_tensor(
    noise: NDArray[np.float64], sketch: Sketch, rng: np.random.Generator
) -> dict[str, float]:
    ends = list(itertools.accumulate(sketch.buckets.values()))
    parts = zip(sketch.buckets, np.split(noise, ends[:-1], axis=1), strict=True)
    return {name: _index_or_nan(part, rng) for name, part in parts}


def _index_or_nan(noise: NDArray[np.float64], rng: np.random.Generator) -> float:
    """Return the tail index, NaN where hardly any gradient is nonzero, as in unused embeddings."""
    rows = noise.reshape(len(noise), -1).any(axis=1)
    return tail_index(noise, rng=rng).value if rows.sum() >= MIN_SAMPLES else math.nan
