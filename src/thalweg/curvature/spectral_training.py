"""Training of AutoSpec on synthetic spectra."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.progress import progress
from thalweg.curvature.spectral_probe import UNSEEN, probe_features, upper_bound
from thalweg.curvature.spectral_recurrences import evaluate
from thalweg.curvature.spectral_tasks import (
    BEYOND,
    FUNCTIONS,
    ScaledInterval,
    classical_rows,
    condition_loss,
    filter_loss,
    function_loss,
    largest_error,
)
from thalweg.curvature.synthetic_spectra import (
    RitzBatch,
    SpectralMeasures,
    lanczos_on_measures,
    sample_measures,
)

with requires("curvature"):
    import torch
    from torch import Tensor, nn

if TYPE_CHECKING:
    from thalweg.curvature.autospec_network import AutoSpec

Values = NDArray[np.float64]

# Spectra that are probed at once: their Krylov bases take 50 MB.
CHUNK = 2048
# Range of the largest eigenvalue, which matters to exp(-A) alone.
LAM_MAX = (1.0, 100.0)
# Points between the largest eigenvalue and the end of what is checked before use.
GUARDS = 8
# Points between zero and the spectrum at which a preconditioner has to be positive.
BELOW = 16


@dataclass(frozen=True, eq=False)
class TrainingPool:
    """Probed spectra, scaled by the probe's bound on the largest eigenvalue; B rows each."""

    features: Tensor
    points: Tensor
    masses: Tensor
    low: Tensor
    cut: Tensor
    lam_max: Tensor
    rival: Tensor

    def batch(self, index: Tensor) -> TrainingPool:
        """Return some of the rows."""
        return TrainingPool(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def fit_spectra(
    model: AutoSpec,
    *,
    kappa: tuple[float, float],
    families: Sequence[str],
    n: int,
    pool: int,
    batch: int,
    steps: int,
    lr: float,
    generator: torch.Generator | None,
    callback: Callable[[int, float], Any] | None,
    show_progress: bool | None,
) -> list[float]:
    """Train the model in place and return the losses; see `AutoSpec.fit_synthetic`."""
    low, high = (check_number("kappa", end, above=1) for end in kappa)
    if low > high:
        raise ValueError(f"kappa must be an ascending range, got {kappa}")
    check_integer("n", n, at_least=16)
    for name, value in {"pool": pool, "batch": batch, "steps": steps}.items():
        check_integer(name, value, at_least=1)
    check_number("lr", lr, above=0)
    generator = generator or torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    _reset(model, generator)
    seed = int(torch.randint(2**62, (), generator=generator))
    with progress("training AutoSpec", steps, show=show_progress) as advance:
        spectra = draw_pool(
            model, pool, kappa=(low, high), families=families, n=n, rng=np.random.default_rng(seed)
        )
        model.kappa.copy_(torch.tensor([low, high]))
        losses: list[float] = []
        try:
            for loss in _descend(model, spectra, batch, steps, lr, generator):
                losses.append(loss)
                advance()
                if callback is not None:
                    callback(len(losses), loss)
        except KeyboardInterrupt:
            # What was reached is of use: the weights are those of the last step.
            pass
    model.eval()
    return losses


def _reset(model: AutoSpec, generator: torch.Generator) -> None:
    """Draw the hidden layers again, so that the generator alone decides the result."""
    with torch.no_grad():
        for layer in model.network:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight, generator=generator)
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(model.head.weight)
        nn.init.zeros_(model.head.bias)


def _descend(
    model: AutoSpec,
    spectra: TrainingPool,
    batch: int,
    steps: int,
    lr: float,
    generator: torch.Generator,
) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, lr / 20)
    model.train()
    for _ in range(steps):
        index = torch.randint(len(spectra.low), (batch,), generator=generator)
        loss = spectral_loss(model, spectra.batch(index), generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        yield loss.item()


def spectral_loss(
    model: AutoSpec, spectra: TrainingPool, generator: torch.Generator | None = None
) -> Tensor:
    """Return the task's loss of the model on some spectra."""
    rows = model(spectra.features, spectra.low, spectra.cut, spectra.lam_max)
    if model.task == "precond":
        shares = torch.rand(len(rows), BELOW, dtype=rows.dtype, generator=generator)
        below = spectra.points[:, :1] * shares
        return condition_loss(rows, spectra.points, spectra.masses, below)
    if model.task == "filter":
        return filter_loss(rows, spectra.points, spectra.masses, spectra.cut)
    target = FUNCTIONS[model.task](spectra.points, spectra.lam_max[:, None])
    return function_loss(rows, spectra.points, spectra.masses, target, spectra.rival)


def draw_pool(
    model: AutoSpec,
    count: int,
    *,
    kappa: tuple[float, float],
    families: Sequence[str],
    n: int,
    rng: np.random.Generator,
) -> TrainingPool:
    """Draw spectra and probe each, as `AutoSpec.probe` would."""
    chunks = []
    for start in range(0, count, CHUNK):
        size = min(CHUNK, count - start)
        measures = sample_measures(size, kappa=kappa, families=families, n=n, rng=rng)
        chunks.append(_probe_measures(model, measures, rng))
    names = TrainingPool.__dataclass_fields__
    arrays = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in names}
    weight = model.head.weight
    return TrainingPool(**{name: torch.as_tensor(a).to(weight) for name, a in arrays.items()})


def _probe_measures(
    model: AutoSpec, measures: SpectralMeasures, rng: np.random.Generator
) -> dict[str, Values]:
    count = len(measures.sizes)
    ritz = lanczos_on_measures(measures, model.probe_steps, rng)
    bound = upper_bound(ritz)
    given = rng.random(count) < 0.5
    low = np.where(given, measures.points[:, 0], ritz.values[:, 0])
    cut = _draw_cuts(measures, rng) if model.task == "filter" else bound
    size = _largest_eigenvalues(model.task, count, rng)
    ritz = RitzBatch(ritz.values * size[:, None], ritz.residuals * size[:, None], ritz.weights)
    lam_max = bound * size
    features = probe_features(
        ritz,
        lam_max,
        low=low * size,
        given=given,
        cut=cut * size,
        scale_free=model.task != "exp",
    )
    points, masses = _guarded(measures.points / bound[:, None], measures.masses)
    low = np.where(given, low, low / UNSEEN) / bound
    return {
        "features": features,
        "points": points,
        "masses": masses,
        "low": low,
        "cut": cut / bound,
        "lam_max": lam_max,
        "rival": _chebyshev_errors(model, points, lam_max),
    }


def _guarded(points: Values, masses: Values) -> tuple[Values, Values]:
    """Append points without eigenvalues up to where a polynomial is checked before its use."""
    shares = np.arange(1, GUARDS + 1) / GUARDS
    beyond = points[:, -1:] + (BEYOND - points[:, -1:]) * shares
    return np.hstack([points, beyond]), np.hstack([masses, np.zeros_like(beyond)])


def _largest_eigenvalues(task: str, count: int, rng: np.random.Generator) -> Values:
    """Return what to scale spectra by, which end at 1: that of exp(-A) matters, others are free."""
    if task != "exp":
        return np.ones(count)
    return np.exp(rng.uniform(np.log(LAM_MAX[0]), np.log(LAM_MAX[1]), count))


def _draw_cuts(measures: SpectralMeasures, rng: np.random.Generator) -> Values:
    """Return a cut between two eigenvalues of each, which leaves some on both sides."""
    cuts = np.empty(len(measures.sizes))
    for i, (points, masses) in enumerate(zip(measures.points, measures.masses, strict=True)):
        there = points[masses > 0]
        below = int(len(there) * rng.uniform(0, 0.4))
        cuts[i] = np.sqrt(there[below] * there[below + 1])
    return cuts


def _chebyshev_errors(model: AutoSpec, points: Values, lam_max: Values) -> Values:
    """Return the largest error of Chebyshev's polynomial that knows the interval."""
    if model.task not in FUNCTIONS:
        return np.ones(len(points))
    intervals = [ScaledInterval(x[0], None, s) for x, s in zip(points, lam_max, strict=True)]
    rows = np.array([classical_rows(model.task, model.degree, i) for i in intervals])
    target = FUNCTIONS[model.task](points, lam_max[:, None])
    errors = largest_error(evaluate(rows, points) - target, target)
    return np.asarray(np.maximum(errors, 1e-12))
