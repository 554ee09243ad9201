"""Claims about normalized decentralized bilevel optimization.

A contender's ``make`` is a solver with the interface of `thalweg.bilevel.decentralized_bilevel`.
For one of your own: ``Contender("mine", make=my_solver, tune={"lr": [0.01, 0.03]})``, which gets
the gradients, the network, the sampler and a callback, and ``lr`` as a triple of x, y and z.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from thalweg.bilevel import decentralized_bilevel
from thalweg.claims.bilevel.agent_runs import clean_digits, hypergradient_norm, mean_of_rows
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_most, claim
from thalweg.tasks import agent_quadratics

ERROR = Metric(
    "mean hypergradient norm of the last quarter",
    better="lower",
    average="median",
    curve=("step", "hypergradient norm"),
)
LRS = [3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0]
# "fresh" is beta = 1, no memory: an end of the method and not of a grid.
BETAS = [3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, "fresh"]
CLIPS = [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]

_plain = functools.partial(decentralized_bilevel, schedule="constant", normalize=None)

METHOD = Contender("NVR-DSBO", make=decentralized_bilevel, tune={"lr": LRS, "beta": BETAS})
SGD = Contender(
    "decentralized bilevel SGD", make=functools.partial(_plain, beta=1.0), tune={"lr": LRS}
)
CLIPPED = Contender(
    "clipped SGD", make=functools.partial(_plain, beta=1.0), tune={"lr": LRS, "clip": CLIPS}
)
NORMALIZED_SGD = Contender(
    "normalized SGD",
    make=functools.partial(decentralized_bilevel, schedule="constant", beta=1.0),
    tune={"lr": LRS},
)
STORM = Contender("STORM, not normalized", make=_plain, tune={"lr": LRS, "beta": BETAS})
MOMENTUM = Contender(
    "normalized momentum",
    make=functools.partial(decentralized_bilevel, variance_reduction=False),
    tune={"lr": LRS, "beta": BETAS},
    control=True,
)
CENTRALIZED = Contender(
    "F2SA, centralized",
    make=functools.partial(_plain, beta=1.0, comm=mean_of_rows),
    tune={"lr": LRS},
    control=True,
)


def _scales(quick: int, full: int, **more: Any) -> dict[str, Scale]:
    return {
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=20, **more),
        "quick": Scale(seeds=10, tuning_seeds=2, steps=quick, **more),
        "full": Scale(seeds=16, tuning_seeds=1, steps=full, **more),
    }


def _trial(
    contender: Contender,
    rng: np.random.Generator,
    steps: int,
    settings: dict[str, Any],
    scale: float = 1.0,
    **instance: Any,
) -> Measurement:
    for_instance, for_contender = rng.spawn(2)
    problem = agent_quadratics(for_instance, **instance)
    assert contender.make is not None
    return hypergradient_norm(contender.make, problem.scaled(scale), steps, for_contender, settings)


@claim(
    method="decentralized-bilevel",
    statement="Under asymmetric noise of infinite variance NVR-DSBO, without clipping, has at most "
    "1.1 times the hypergradient of the best decentralized method, clipping included",
    metric=ERROR,
    contenders=[METHOD, SGD, CLIPPED, NORMALIZED_SGD, STORM, MOMENTUM, CENTRALIZED],
    expect=at_most(1.1, of="best peer"),
    scales=_scales(500, 2_000),
    headline=True,
)
def pareto_noise(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Solve a problem of eight agents on a ring, with centered Pareto noise of index 1.5.

    The lower level has many minimizers. All take one sample per step (STORM evaluates it at two
    points), and all settings, thresholds included, are tuned on the noise that they meet. The
    clip's threshold is what the method does without; tuned on this very noise, it is ahead in short
    runs.
    Momentum is the method without STORM's correction; the centralized one is what a perfect network
    would give to SGD.
    """
    return _trial(contender, rng, steps, settings, tail="pareto", index=1.5)


@claim(
    method="decentralized-bilevel",
    statement="Under symmetric noise of infinite variance normalization keeps at most 0.7 of the "
    "hypergradient of the same method without it",
    metric=ERROR,
    contenders=[METHOD, STORM, SGD, CLIPPED],
    expect=at_most(0.7, of="STORM, not normalized"),
    scales=_scales(500, 2_000),
)
def student_noise(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Take Student's t with 1.5 degrees of freedom: the causal control has no normalization.

    A tuned clip is unbiased where noise is symmetric, and stands beside it to show that.
    """
    return _trial(contender, rng, steps, settings, tail="student", index=1.5)


@claim(
    method="decentralized-bilevel",
    statement="Where the variance is finite NVR-DSBO has at most 1.1 times the hypergradient of "
    "the best method that is not normalized",
    metric=ERROR,
    contenders=[METHOD, SGD, STORM],
    expect=at_most(1.1, of="best peer"),
    scales=_scales(500, 2_000),
)
def light_tails(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Take Student's t with three degrees of freedom: what normalization costs when not needed."""
    return _trial(contender, rng, steps, settings, tail="student", index=3.0)


@claim(
    method="decentralized-bilevel",
    statement="Under multiplicative heavy-tailed noise STORM's correction gives at most 0.9 of the "
    "hypergradient of momentum, both normalized",
    metric=ERROR,
    contenders=[
        METHOD,
        Contender("normalized momentum", make=MOMENTUM.make, tune=MOMENTUM.tune),
        NORMALIZED_SGD,
    ],
    expect=at_most(0.9, of="normalized momentum"),
    scales=_scales(500, 2_000),
)
def variance_reduction(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Have the samples of B vary, by which noise depends on the point.

    With additive noise the correction cancels no noise that momentum would not average. Here it
    does harm in short runs, with their long steps: the difference of two gradients of one sample is
    as heavy-tailed as the sample, and is remembered for 1/β steps. Later both are level.
    Momentum also takes half of the gradients per step, which this comparison of equal steps gives
    it no credit for.
    """
    return _trial(contender, rng, steps, settings, tail="pareto", index=1.5, multiplicative=0.2)


@claim(
    method="decentralized-bilevel",
    statement="The worst hypergradient over a hundredfold range of NVR-DSBO's one memory setting "
    "is at most 0.9 of clipped SGD's over as wide a range of its threshold",
    metric=ERROR,
    contenders=[
        Contender(
            "NVR-DSBO",
            make=lambda setting, **fixed: decentralized_bilevel(beta=setting / 100, **fixed),
            tune={"lr": LRS},
        ),
        Contender(
            "clipped SGD",
            make=lambda setting, **fixed: _plain(beta=1.0, clip=setting, **fixed),
            tune={"lr": LRS},
        ),
    ],
    expect=at_most(0.9, of="clipped SGD"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=20),
        "quick": Scale(seeds=10, tuning_seeds=1, steps=500),
        "full": Scale(seeds=12, tuning_seeds=2, steps=2_000),
    },
)
def mistaken_settings(
    contender: Contender, rng: np.random.Generator, *, steps: int, **settings: Any
) -> Measurement:
    """Give both their best step size, and the worst of β = 0.003 … 0.3 or thresholds 0.3 … 30.

    The thresholds surround typical lengths of gradients.
    """
    for_instance, for_contender = rng.spawn(2)
    problem = agent_quadratics(for_instance, tail="pareto", index=1.5)
    assert contender.make is not None
    seed = int(for_contender.integers(2**31))
    values = []
    for setting in (0.3, 3.0, 30.0):
        solver = _with_keywords(functools.partial(contender.make, setting))
        stream = np.random.default_rng(seed)
        values.append(hypergradient_norm(solver, problem, steps, stream, settings).value)
    return Measurement(max(values), extras={"best": min(values)})


def _with_keywords(solver: Any) -> Any:
    return lambda f, g, x0, y0, **fixed: solver(f=f, g=g, x0=x0, y0=y0, **fixed)


@claim(
    method="decentralized-bilevel",
    statement="When all losses grow a hundredfold after tuning, NVR-DSBO's hypergradient is at "
    "most 0.8 of that of the best method that is not normalized",
    metric=ERROR,
    contenders=[METHOD, CLIPPED, SGD],
    expect=at_most(0.8, of="best peer"),
    scales=_scales(500, 2_000, scale=100.0, tuning={"scale": 1.0}),
)
def rescaled_losses(
    contender: Contender, rng: np.random.Generator, *, steps: int, scale: float, **settings: Any
) -> Measurement:
    """Multiply f and g, noise included, by 100, with the settings that were best before.

    The hypergradient is that of the losses as they were. Normalized steps do not change at all; the
    clip's threshold is then too low, and SGD's steps too long.
    """
    return _trial(contender, rng, steps, settings, scale=scale, tail="pareto", index=1.5)


@claim(
    method="decentralized-bilevel",
    statement="Cleaning digits with 30 % flipped labels at eight sites under Pareto gradient "
    "noise, NVR-DSBO has at most 1.1 times the held-out loss of the best decentralized method",
    metric=Metric("held-out cross entropy", better="lower", average="median"),
    contenders=[
        Contender(
            "NVR-DSBO", make=decentralized_bilevel, tune={"lr": [0.01, 0.03, 0.1, 0.3, 1.0, 3.0]}
        ),
        Contender("decentralized bilevel SGD", make=SGD.make, tune={"lr": LRS}),
        Contender(
            "clipped SGD",
            make=CLIPPED.make,
            tune={"lr": [0.1, 0.3, 1.0, 3.0, 10.0, 30.0], "clip": [0.3, 1.0, 3.0, 10.0, None]},
        ),
    ],
    expect=at_most(1.1, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=3),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=100),
        "full": Scale(seeds=10, tuning_seeds=1, steps=1_000),
    },
)
def data_cleaning(
    contender: Contender, rng: np.random.Generator, *, steps: int, lr: float, **settings: Any
) -> Measurement:
    """Learn weights of samples from clean ones, with a perceptron as the lower level.

    Each site has images of two classes. The loss is that of images that no site has seen, at the
    mean of the sites' perceptrons.
    """
    assert contender.make is not None
    return clean_digits(contender.make, rng, steps, lr, settings)
