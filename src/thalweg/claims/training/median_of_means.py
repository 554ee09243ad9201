"""Claims about clipped optimization with median-of-means gradients.

For the claims about optimization a contender's ``make`` is called as ``make(problem, runs, n,
steps, rng, **tuned)``, where ``problem`` is a `NoisyLeastSquares`, and returns the last points of
``runs`` independent runs, (runs, d), each with ``n`` gradients per step. To add a method of your
own, wrap a function of the gradients of one step, (runs, n, d) -> (runs, d):
``Contender("mine", make=descend(my_direction), tune={"lr": […], …})``.

Everybody sees the same number of gradients, and the value is a high quantile over the runs: the
bounds of the paper hold with high probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from thalweg.common.optional import requires
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim, trend
from thalweg.tasks import MixedNoise, NoisyLeastSquares, noisy_diabetes, noisy_quadratic
from thalweg.training import choose_blocks, median_of_means, minimize_clipped_mom

with requires("training"):
    import torch
with requires("peers"):
    from sklearn.linear_model import HuberRegressor

Array = NDArray[np.float64]
Direction = Callable[..., Array]

SYMMETRIC = MixedNoise(beta=0.8)
MILDLY_SKEWED = MixedNoise(beta=0.8, alpha=1.9, weight=0.3)
STRONGLY_SKEWED = MixedNoise(beta=0.8, alpha=1.5, weight=0.5)
PARETO = MixedNoise(alpha=1.5, weight=1.0)

LRS = [0.02, 0.05, 0.1, 0.2, 0.4]


def _planned(noise: MixedNoise, n: int) -> int:
    """Return the number of blocks that the plan chooses when the law is known."""
    return choose_blocks(
        n,
        beta=noise.beta if noise.weight < 1 else None,
        alpha=min(noise.alpha, 2.0) if noise.weight > 0 else None,
        skew_weight=noise.weight,
    ).k


def mom(
    problem: NoisyLeastSquares,
    runs: int,
    n: int,
    steps: int,
    rng: np.random.Generator,
    *,
    lr: float,
    k: int | None = None,
    method: Any = "sgd",
) -> Array:
    """`minimize_clipped_mom` as shipped, with the planned number of blocks."""
    last = []
    for stream in rng.spawn(runs):
        result = minimize_clipped_mom(
            lambda x: float(problem.excess(x)),
            problem.x0,
            jac_samples=lambda x, N, rng: problem.gradients(x[None], N, rng)[0],
            N=n,
            k=_planned(problem.noise, n) if k is None else k,
            lr=lr,
            L=1.0,
            method=method,
            maxiter=steps,
            rng=stream,
        )
        last.append(result.x)
    return np.stack(last)


def sstm(*arguments: Any) -> Array:
    """Run the accelerated method as shipped, with the true smoothness."""
    return mom(*arguments, lr=1.0, method="sstm")


def descend(direction: Direction) -> Callable[..., Array]:
    """Return a contender's ``make`` that steps along a function of the gradients."""
    return partial(_descend, direction)


def _descend(
    direction: Direction,
    problem: NoisyLeastSquares,
    runs: int,
    n: int,
    steps: int,
    rng: np.random.Generator,
    *,
    lr: float,
    momentum: float = 0.0,
    **tuned: Any,
) -> Array:
    x = np.tile(problem.x0, (runs, 1))
    average = np.zeros_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(steps):
            average = momentum * average + direction(problem.gradients(x, n, rng), **tuned)
            x = x - lr * average
    return x


def clip(g: Array, level: float | None) -> Array:
    """Scale vectors (…, d) to length 1 if they are longer than the level, to less if not.

    It is clipping divided by its level, so that the step size is the length of a clipped step;
    None is the limit of a level of 0, normalization.
    """
    norm = np.linalg.norm(g, axis=-1, keepdims=True)
    return np.asarray(g / np.maximum(norm, level or 1e-300))


def clipped_mean(g: Array, level: float | None) -> Array:
    """Return the mean, clipped: clipped SGD, or normalized SGD."""
    return clip(g.mean(axis=1), level)


def mean_of_clipped(g: Array, level: float | None) -> Array:
    """Return the mean of clipped gradients, as in differentially private SGD."""
    return np.asarray(clip(g, level).mean(axis=1))


def mean_of_coordinates_clipped(g: Array, level: float | None) -> Array:
    """Return the mean of gradients whose coordinates are clipped, or their signs."""
    if level is None:
        return np.asarray(np.sign(g).mean(axis=1))
    return np.asarray(np.clip(g / level, -1, 1).mean(axis=1))


def sign_of_mean(g: Array) -> Array:
    """Return the sign of the mean."""
    return np.asarray(np.sign(g.mean(axis=1)))


def geometric(g: Array, level: float | None) -> Array:
    """Return the clipped geometric median of five blocks, by Weiszfeld's iteration."""
    means = g.reshape(len(g), 5, -1, g.shape[-1]).mean(axis=2)
    center = np.median(means, axis=1)
    for _ in range(8):
        distance = np.linalg.norm(means - center[:, None], axis=-1, keepdims=True)
        weight = 1 / np.maximum(distance, 1e-8)
        center = (weight * means).sum(axis=1) / weight.sum(axis=1)
    return clip(center, level)


LEVELS = [None, 1.0, 3.0, 10.0, 30.0]
Grid = dict[str, Sequence[Any]]
CLIPPING: Grid = {"lr": [0.03, 0.1, 0.3, 1.0, 3.0], "level": LEVELS}
# Single gradients point in many directions, and their mean is far shorter than they are.
CLIPPING_SAMPLES: Grid = {"lr": [0.1, 0.3, 1.0, 3.0, 10.0], "level": LEVELS}

MOM = Contender("clipped MoM", make=mom, tune={"lr": LRS})
CLIPPED_MEAN = Contender("clipped mean", make=descend(clipped_mean), tune=CLIPPING)
CLIPPED_SAMPLES = Contender("mean of clipped", make=descend(mean_of_clipped), tune=CLIPPING_SAMPLES)
CLIPPED_COORDINATES = Contender(
    "mean of clipped coordinates",
    make=descend(mean_of_coordinates_clipped),
    tune={"lr": [0.01, 0.03, 0.1, 0.3, 1.0], "level": [None, 0.1, 0.3, 1.0, 3.0]},
)
SIGN = Contender(
    "sign of mean", make=descend(sign_of_mean), tune={"lr": [0.003, 0.01, 0.03, 0.1, 0.3]}
)
NORMALIZED = Contender(
    "normalized, momentum",
    make=partial(descend(partial(clipped_mean, level=None)), momentum=0.9),
    tune={"lr": [0.001, 0.003, 0.01, 0.03, 0.1]},
)
GEOMETRIC = Contender("geometric median", make=descend(geometric), tune=CLIPPING)

QUANTILE = Metric(
    "95 % quantile of the loss",
    better="lower",
    average="geometric mean",
    curve=("failure probability", "loss"),
)


def _last_losses(
    contender: Contender,
    problem: NoisyLeastSquares,
    rng: np.random.Generator,
    runs: int,
    n: int,
    steps: int,
    **tuned: Any,
) -> Measurement:
    """Return the 95 % quantile of the last losses, and all quantiles as the curve."""
    assert contender.make is not None
    last = contender.make(problem, runs, n, steps, rng.spawn(2)[1], **tuned)
    losses = np.sort(problem.excess(last))
    if not np.isfinite(losses).all():
        return Measurement(float("inf"))
    failure = 1 - (np.arange(runs) + 0.5) / runs
    return Measurement(
        float(np.quantile(losses, 0.95)),
        curve=(failure[::-1], losses[::-1]),
        extras={"median": float(np.median(losses))},
    )


@claim(
    method="median-of-means",
    statement="Under symmetric noise without a mean (β = 0.8), clipped SGD on median-of-means "
    "gradients ends at no more than a fifth of the loss of clipped SGD, with 95 % probability",
    metric=QUANTILE,
    contenders=[
        MOM,
        CLIPPED_MEAN,
        CLIPPED_SAMPLES,
        CLIPPED_COORDINATES,
        SIGN,
        NORMALIZED,
        GEOMETRIC,
    ],
    expect=at_most(0.2, of="clipped mean"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=4, steps=10, d=10),
        "quick": Scale(seeds=8, tuning_seeds=1, runs=20, steps=300, d=10),
        "full": Scale(seeds=10, tuning_seeds=1, runs=30, steps=300, d=100),
    },
    headline=True,
)
def symmetric_noise(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, d: int, **tuned: Any
) -> Measurement:
    """Minimize a quadratic with 15 gradients per step.

    An average of such noise is *wider* than one sample, so that a clipped average carries almost
    no direction; the median of the 15 gradients has a finite variance. The method runs with its
    automatic clipping level, the peers with a tuned one. The peers that bound single gradients
    before they average, all coordinates together or each, are the strong ones: the next claim
    is against the first of them.
    """
    return _last_losses(contender, noisy_quadratic(SYMMETRIC, d), rng, runs, 15, steps, **tuned)


@claim(
    method="median-of-means",
    statement="Under the same noise it ends at no more than a third of the loss of SGD on "
    "gradients that are clipped one by one",
    metric=QUANTILE,
    contenders=[
        MOM,
        CLIPPED_SAMPLES,
        Contender(
            CLIPPED_COORDINATES.name,
            make=CLIPPED_COORDINATES.make,
            tune=CLIPPED_COORDINATES.tune,
            control=True,
        ),
    ],
    expect=at_most(1 / 3, of="mean of clipped"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=4, steps=10),
        "quick": Scale(seeds=8, tuning_seeds=1, runs=20, steps=300),
        "full": Scale(seeds=10, tuning_seeds=2, runs=60, steps=300),
    },
)
def clipped_samples(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, **tuned: Any
) -> Measurement:
    """Compare with clipping before averaging, as differentially private training does.

    It has a threshold to tune, and the median none. Clipping every coordinate by itself is the
    control: it sees what the median sees, and is the strongest known way under independent noise.
    """
    return _last_losses(contender, noisy_quadratic(SYMMETRIC), rng, runs, 15, steps, **tuned)


@claim(
    method="median-of-means",
    statement="With 30 % of mildly skewed noise (α = 1.9) among it, clipped MoM with the planned "
    "number of blocks ends at no more than a fifth of the loss of clipped SGD",
    metric=QUANTILE,
    contenders=[
        MOM,
        CLIPPED_MEAN,
        CLIPPED_SAMPLES,
        Contender("MoM, k = 5", make=partial(mom, k=5), tune={"lr": LRS}, control=True),
    ],
    expect=at_most(0.2, of="clipped mean"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=4, steps=10),
        "quick": Scale(seeds=8, tuning_seeds=1, runs=10, steps=200),
        "full": Scale(seeds=10, tuning_seeds=1, runs=60, steps=200),
    },
)
def mildly_skewed_noise(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, **tuned: Any
) -> Measurement:
    """Minimize the quadratic with 45 gradients per step under a mixture of the two laws.

    The plan takes blocks of five: larger blocks lose to the symmetric part, smaller ones to the
    bias. The control has five large ones.
    """
    return _last_losses(contender, noisy_quadratic(MILDLY_SKEWED), rng, runs, 45, steps, **tuned)


@claim(
    method="median-of-means",
    statement="With half of strongly skewed noise (α = 1.5) among it, clipped MoM with the planned "
    "number of blocks ends at no higher a loss than clipped SGD",
    metric=QUANTILE,
    contenders=[MOM, CLIPPED_MEAN, CLIPPED_SAMPLES],
    expect=at_most(1.0, of="clipped mean"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=4, steps=10),
        "quick": Scale(seeds=8, tuning_seeds=1, runs=20, steps=300),
        "full": Scale(seeds=10, tuning_seeds=2, runs=60, steps=300),
    },
)
def strongly_skewed_noise(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, **tuned: Any
) -> Measurement:
    """Minimize the quadratic with 15 gradients per step, where medians are biased.

    The median of a skewed law is not its mean: the loss ends in a neighborhood that more steps do
    not shrink, which is the bias term of the paper's bounds. This claim is where it would hurt.
    """
    return _last_losses(contender, noisy_quadratic(STRONGLY_SKEWED), rng, runs, 15, steps, **tuned)


@claim(
    method="median-of-means",
    statement="Under skewed noise (Pareto, α = 1.5) the neighborhood of convergence shrinks as the "
    "blocks grow",
    metric=Metric("median loss", better="lower", average="geometric mean"),
    contenders=[
        Contender(
            "clipped MoM, k = 3", make=partial(mom, k=3), tune={"lr": [0.01, 0.02, 0.05, 0.1, 0.2]}
        )
    ],
    expect=trend(-1.5, -0.2, over="b"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, sweep={"b": (3, 15)}, runs=2, steps=10),
        "quick": Scale(seeds=8, tuning_seeds=1, sweep={"b": (3, 15, 75)}, runs=5, steps=200),
        "full": Scale(seeds=10, tuning_seeds=1, sweep={"b": (3, 15, 75)}, runs=20, steps=500),
    },
)
def bias_floor(
    contender: Contender, rng: np.random.Generator, *, b: int, runs: int, steps: int, **tuned: Any
) -> Measurement:
    """Fit how the last loss falls with the block size at a fixed number of blocks.

    The bounds give a bias of b to the power -(α - 1)/α, so that the loss falls like b^(-2/3).
    """
    problem = noisy_quadratic(PARETO)
    assert contender.make is not None
    last = contender.make(problem, runs, 3 * b, steps, rng.spawn(2)[1], **tuned)
    return Measurement(float(np.median(problem.excess(last))))


@claim(
    method="median-of-means",
    statement="On a convex problem with condition number 10⁴ and little symmetric noise (β = 0.8), "
    "the accelerated method ends at no more than half the loss of clipped MoM SGD",
    metric=QUANTILE,
    contenders=[
        Contender("clipped MoM SSTM", make=sstm),
        Contender("clipped MoM SGD", make=mom, tune={"lr": [0.3, 1.0, 1.7, 1.9, 1.99, 2.05]}),
    ],
    expect=at_most(0.5, of="clipped MoM SGD"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=2, steps=10, d=10),
        "quick": Scale(seeds=8, tuning_seeds=1, runs=8, steps=300, d=20),
        "full": Scale(seeds=10, tuning_seeds=2, runs=20, steps=2_000, d=100),
    },
)
def acceleration(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, d: int, **tuned: Any
) -> Measurement:
    """Minimize a badly conditioned quadratic from far away.

    Acceleration pays while the way is long and the noise small against it; both methods use the
    same estimator and clipping.
    """
    problem = noisy_quadratic(SYMMETRIC, d, condition=1e4, scale=1e3)
    return _last_losses(contender, problem, rng, runs, 15, steps, **tuned)


@claim(
    method="median-of-means",
    statement="The loss of clipped MoM that is exceeded by one run in a hundred is at most five "
    "times the median one",
    metric=Metric(
        "99 % quantile over median",
        better="lower",
        average="geometric mean",
        curve=("failure probability", "loss"),
    ),
    contenders=[
        Contender("clipped MoM", make=partial(mom, lr=0.1)),
        Contender(
            "clipped mean", make=partial(descend(clipped_mean), lr=0.03, level=3.0), control=True
        ),
    ],
    expect=at_most(5.0),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=4, steps=10),
        "quick": Scale(seeds=8, tuning_seeds=1, runs=100, steps=100),
        "full": Scale(seeds=10, tuning_seeds=1, runs=1_000, steps=300),
    },
)
def high_probability(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, **tuned: Any
) -> Measurement:
    """Look at rare runs under symmetric noise without a mean; the curve shows all of them.

    High-probability bounds grow with the logarithm of the failure probability only: no run is
    ruined by one gradient. At full scale the curve reaches one run in a thousand.
    """
    problem = noisy_quadratic(SYMMETRIC)
    found = _last_losses(contender, problem, rng, runs, 15, steps, **tuned)
    if found.curve is None:
        return found
    losses = np.asarray(found.curve[1])
    ratio = np.quantile(losses, 0.99) / np.median(losses)
    return Measurement(float(ratio), curve=found.curve, extras=found.extras)


SHORT_CLIPPING: Grid = {"lr": [0.001, 0.003, 0.01, 0.03, 0.1], "level": LEVELS}


def huber(
    problem: NoisyLeastSquares,
    runs: int,
    n: int,
    steps: int,
    rng: np.random.Generator,
) -> Array:
    """`sklearn.linear_model.HuberRegressor` on the first 2000 rows of the same stream."""
    assert problem.features is not None
    found = []
    for stream in rng.spawn(runs):
        rows = problem.features[stream.integers(0, len(problem.features), 2_000)]
        labels = rows @ problem.minimizer + problem.noise.sample((2_000,), stream)
        # Its solver fails on labels of 10^10, which any user would see and cut off.
        labels = np.clip(labels, -1e3, 1e3)
        found.append(HuberRegressor(fit_intercept=False, max_iter=1_000).fit(rows, labels).coef_)
    return np.stack(found)


@claim(
    method="median-of-means",
    statement="For linear regression on real features with heavy-tailed label noise, clipped MoM "
    "ends at no higher an excess risk than the best clipped or sign method",
    metric=Metric("excess risk", better="lower", average="geometric mean"),
    contenders=[
        Contender(MOM.name, make=mom, tune={"lr": [0.002, 0.005, 0.01, 0.02, 0.05]}),
        Contender(CLIPPED_MEAN.name, make=CLIPPED_MEAN.make, tune=SHORT_CLIPPING),
        Contender(CLIPPED_SAMPLES.name, make=CLIPPED_SAMPLES.make, tune=SHORT_CLIPPING),
        Contender(SIGN.name, make=SIGN.make, tune={"lr": [0.001, 0.003, 0.01, 0.03, 0.1]}),
        Contender("Huber regression", make=huber, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, runs=2, steps=10),
        "quick": Scale(seeds=10, tuning_seeds=1, runs=5, steps=400),
        "full": Scale(seeds=20, tuning_seeds=2, runs=10, steps=2_000),
    },
)
def diabetes_regression(
    contender: Contender, rng: np.random.Generator, *, runs: int, steps: int, **tuned: Any
) -> Measurement:
    """Fit scikit-learn's diabetes data from a stream of batches of 15 with noisy labels.

    The noise is the mildly skewed mixture, and the excess is over the clean least-squares
    solution. Huber's regression on a part of the stream is a reference from batch statistics.
    """
    problem = noisy_diabetes(MILDLY_SKEWED)
    found = _last_losses(contender, problem, rng, runs, 15, steps, **tuned)
    return Measurement(found.extras.get("median", float("inf")))


def planned_estimate(g: Array) -> Array:
    """Return the median of means with the planned number of blocks, (repeats, N) -> (repeats,)."""
    plan = choose_blocks(g.shape[1], beta=0.8, alpha=1.5, skew_weight=0.5, purpose="estimate")
    return estimate_with(g, k=plan.k)


def estimate_with(g: Array, k: int) -> Array:
    """Return the median of k block means."""
    return median_of_means(torch.from_numpy(g), k, dim=1).numpy()


def trimmed(g: Array, share: float) -> Array:
    """Return `scipy.stats.trim_mean`."""
    return np.asarray(stats.trim_mean(g, share, axis=1))


@claim(
    method="median-of-means",
    statement="Under a mixture of symmetric (β = 0.8) and skewed (α = 1.5) noise, the 99 % "
    "quantile of the error with the planned number of blocks is within 10 % of the best one",
    metric=Metric("99 % quantile of the error", better="lower", average="geometric mean"),
    contenders=[
        Contender("MoM, planned k", make=planned_estimate),
        Contender("MoM, best k", make=estimate_with, tune={"k": [1, 3, 5, 7, 15, 21, 35, 105]}),
        Contender(
            "trimmed mean", make=trimmed, tune={"share": [0.02, 0.05, 0.1, 0.2, 0.4]}, control=True
        ),
    ],
    expect=at_most(1.1, of="MoM, best k"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, repeats=100),
        "quick": Scale(seeds=10, tuning_seeds=2, repeats=2_000),
        "full": Scale(seeds=10, tuning_seeds=4, repeats=20_000),
    },
)
def planned_blocks(
    contender: Contender, rng: np.random.Generator, *, repeats: int, **tuned: Any
) -> Measurement:
    """Estimate a mean from 105 samples, again and again.

    Few large blocks suffer from the part without a mean, many small ones from the bias of the
    skewed part: there is a best number in between, and the plan knows it from the moments alone.
    """
    assert contender.make is not None
    g = STRONGLY_SKEWED.sample((repeats, 105), rng.spawn(2)[0])
    errors = np.abs(contender.make(g, **tuned))
    return Measurement(
        float(np.quantile(errors, 0.99)), extras={"median": float(np.median(errors))}
    )
