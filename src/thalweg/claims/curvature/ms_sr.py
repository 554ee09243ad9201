"""Claims about multi-shift stochastic reconfiguration.

In the claims about one direction a contender's ``make`` is called as ``make(batches, generator,
**tuned)`` and returns it (see `thalweg.claims.curvature.quantum_experiments`); in the claims about
training as ``make(parameters, **tuned)``, and what it returns is called with log-derivatives, local
energies and the member of the family of each sample. For one of your own:
``Contender("mine", make=lambda batches, generator, shift: my_direction(*batches[-1], shift),
tune={"shift": [1e-3, 1e-2, 0.1]})``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from thalweg.claims.curvature.quantum_experiments import (
    HISTORY,
    MEMBERS,
    SHIFTS,
    SITES,
    FamilySampler,
    draw_batches,
    ensemble_of,
    exact_path,
    family_pool,
    gcv,
    ground_energy,
    hindsight_shift,
    ms_sr,
    new_rbm,
    relative_sr,
    soft_pinv,
    spring,
    sr,
    widened,
)
from thalweg.common.optional import requires
from thalweg.common.random import torch_generator

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature import (
    MultiShiftSR,
    log_derivatives,
    ms_sr_direction,
    shift_risk_report,
)
from thalweg.evidence import (
    Contender,
    Measurement,
    Metric,
    Scale,
    at_least,
    at_most,
    claim,
    trend,
)
from thalweg.tasks import ising_chain_energy

RISK = Metric("risk, relative to no step", better="lower", average="geometric mean")
# Wave function, hidden units, steps of exact SR, samples per batch.
SETTINGS = (
    ("ring10", 10, 30, 64),
    ("ring10", 40, 30, 64),
    ("ring10", 40, 30, 256),
    ("square", 16, 6, 64),
    ("square", 16, 6, 256),
    ("square", 16, 15, 256),
    ("square", 16, 40, 256),
)
CUTOFFS = [1e-4, 1e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0]
DIRECTION_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, settings=1),
    "quick": Scale(seeds=10, tuning_seeds=1, settings=7),
    "full": Scale(seeds=30, tuning_seeds=3, settings=7),
}


def in_hindsight(
    batches: list[tuple[Tensor, Tensor]], generator: torch.Generator, *, setting: Any
) -> Tensor:
    """SR at the shift that was best for this wave function and batch size on other batches."""
    return sr(batches, generator, hindsight_shift(*setting))


def _without_setting(solver: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a solver that does not look at which setting it is in."""

    def solve(*arguments: Any, setting: Any, **tuned: Any) -> Tensor:
        return solver(*arguments, **tuned)

    return solve


ONE_SHIFT_PEERS = [
    Contender("SR, one shift", make=_without_setting(sr), tune={"shift": SHIFTS}),
    Contender(
        "SR, one shift relative to the diagonal",
        make=_without_setting(relative_sr),
        tune={"shift": SHIFTS},
    ),
    Contender("SR, GCV shift", make=_without_setting(gcv)),
    Contender("minSR, soft cutoff", make=_without_setting(soft_pinv), tune={"cutoff": CUTOFFS}),
]


@claim(
    method="ms-sr",
    statement="Over seven wave functions and batch sizes MS-SR's risk is at most 1.1 of that of "
    "the best peer, of which one knows the best fixed shift of each setting",
    metric=RISK,
    contenders=[
        Contender("MS-SR", make=_without_setting(ms_sr)),
        Contender("SR, each setting's best shift in hindsight", make=in_hindsight),
        *ONE_SHIFT_PEERS,
        Contender(
            "MS-SR, two shards",
            make=_without_setting(partial(ms_sr, mode="shards", n_solves=2)),
            control=True,
        ),
        Contender(
            "MS-SR, shared",
            make=_without_setting(partial(ms_sr, mode="shared", n_solves=2)),
            control=True,
        ),
    ],
    expect=at_most(1.1, of="best peer"),
    scales=DIRECTION_SCALES,
    headline=True,
)
def hindsight_risk(
    contender: Contender, rng: np.random.Generator, *, settings: int, **tuned: Any
) -> Measurement:
    """Measure the population risk of one direction in seven settings, without any tuning of MS-SR.

    All configurations are enumerated, and the risk ``E|e - ē - (O - Ō)δ|²`` over that of no step is
    exact; the value is its geometric mean. Wave functions: an Ising ring of ten spins with 120 or
    450 parameters, 30 steps into a run, and the 4×4 J₁-J₂ model (J₂ = 0.5) with 288 after 6, 15 and
    40 steps. The strongest peer knows the best fixed shift of each setting, from ten other batches;
    the next have one shift, or cutoff, for all, tuned on the same measure. What to read: nobody has
    that knowledge during a run, as the best shift moves with the wave function; MS-SR finds it from
    the batch. GCV, which needs no tuning either, fails where few of the samples are distinct.
    """
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_contender)
    assert contender.make is not None
    shares = {}
    for name, n_hidden, steps, n in SETTINGS[:settings]:
        path = exact_path(name, n_hidden, steps)
        batches = draw_batches(path, n, for_instance)
        setting = (name, n_hidden, steps, n)
        delta = contender.make(batches, generator, setting=setting, **tuned)
        label = f"{name}, {len(delta)} parameters, step {steps}, {n} samples"
        shares[label] = path[-1].risk(delta) / path[-1].energy_variance
    return Measurement(float(np.exp(np.mean(np.log(list(shares.values()))))), extras=shares)


@claim(
    method="ms-sr",
    statement="With 7 parameters per sample MS-SR's risk is at most 0.4 of that of SR at the "
    "customary shifts 1e-4 and 1e-3",
    metric=RISK,
    contenders=[
        Contender("MS-SR", make=ms_sr),
        Contender("SR, 1e-3", make=partial(sr, shift=1e-3)),
        Contender("SR, 1e-4", make=partial(sr, shift=1e-4)),
        Contender("SR, tuned shift", make=sr, tune={"shift": SHIFTS}, control=True),
    ],
    expect=at_most(0.4, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=5),
        "quick": Scale(seeds=60, tuning_seeds=2, steps=30),
        "full": Scale(seeds=200, tuning_seeds=5, steps=30),
    },
)
def customary_shifts(
    contender: Contender, rng: np.random.Generator, *, steps: int, **tuned: Any
) -> Measurement:
    """Compare with shifts as people set them, not tuned: 64 samples, 450 parameters, an Ising ring.

    This is what is gained over a default. The control, whose shift is tuned for this very setting,
    shows what is left once somebody has done that work.
    """
    for_instance, for_contender = rng.spawn(2)
    path = exact_path("ring10", 40, steps)
    batches = draw_batches(path, 64, for_instance)
    assert contender.make is not None
    delta = contender.make(batches, torch_generator(for_contender), **tuned)
    return Measurement(path[-1].risk(delta) / path[-1].energy_variance)


@claim(
    method="ms-sr",
    statement="SR's risk is U-shaped in the shift: at both ends it is at least 1.5 times the "
    "minimum",
    metric=Metric(
        "lower end's risk over the least",
        better="higher",
        average="geometric mean",
        curve=("shift", "risk"),
    ),
    contenders=[Contender("SR")],
    expect=at_least(1.5),
    scales={
        "smoke": Scale(seeds=2, batches=3),
        "quick": Scale(seeds=8, batches=10),
        "full": Scale(seeds=16, batches=40),
    },
)
def risk_is_u_shaped(
    contender: Contender, rng: np.random.Generator, *, batches: int
) -> Measurement:
    """Sweep the shift from 1e-7 to 100 at an Ising ring with 450 parameters and 64 samples.

    The value is the smaller of the two risks at the ends, over the least in between; risks are
    means over the batches, and exact.
    """
    report = _ring_report(rng, batches)
    risk = report.mean_risk
    ends = min(float(risk[0]), float(risk[-1]))
    extras = {"best shift": report.best_shift, "gap": report.gap, "Var(e)": report.energy_variance}
    return Measurement(ends / float(risk.min()), curve=(report.grid, risk), extras=extras)


def _ring_report(rng: np.random.Generator, batches: int, grid: Any = None) -> Any:
    (tangent,) = exact_path("ring10", 40, 30)
    return shift_risk_report(
        tangent.jacobian(),
        tangent.ensemble.local_energy,
        tangent.ensemble.probability,
        np.logspace(-7, 2, 28) if grid is None else grid,
        batches,
        batch_size=64,
        generator=torch_generator(rng),
    )


@claim(
    method="ms-sr",
    statement="The variance of SR's update falls with the shift",
    metric=Metric("variance of the update", better="lower", average="geometric mean"),
    contenders=[Contender("SR")],
    expect=trend(-3.0, -0.1, over="shift"),
    scales={
        name: Scale(seeds=seeds, batches=batches, sweep={"shift": [1e-3, 1e-2, 0.1, 1.0, 10.0]})
        for name, seeds, batches in (("smoke", 2, 3), ("quick", 8, 10), ("full", 16, 40))
    },
)
def variance_falls(
    contender: Contender, rng: np.random.Generator, *, batches: int, shift: float
) -> Measurement:
    """Measure E‖A(δ_λ - Eδ_λ)‖² over batches, at five shifts, in the setting of the risk's U.

    With the U-shaped risk this is the noisy-ridge picture: what the shift gains in variance it
    loses in bias.
    """
    report = _ring_report(rng, batches, [shift])
    return Measurement(float(report.variance[0]), extras={"bias": float(report.bias[0])})


DISTANCE_SETTINGS = ((6, 64), (6, 256), (15, 256), (40, 256))


@claim(
    method="ms-sr",
    statement="On the 4×4 J₁-J₂ model MS-SR is closer to the ideal tangent-space update than the "
    "best tuned peer, SPRING included",
    metric=Metric("distance to the ideal update", better="lower", average="geometric mean"),
    contenders=[
        Contender("MS-SR", make=ms_sr),
        Contender("SR, one shift", make=sr, tune={"shift": SHIFTS}),
        Contender(
            "SR, one shift relative to the diagonal", make=relative_sr, tune={"shift": SHIFTS}
        ),
        Contender("SR, GCV shift", make=gcv),
        Contender("minSR, soft cutoff", make=soft_pinv, tune={"cutoff": CUTOFFS}),
        Contender("SPRING, one shift", make=spring, tune={"shift": SHIFTS}),
        Contender("SR, 1e-3", make=sr, control=True),
        Contender("SPRING, 1e-3", make=spring, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales=DIRECTION_SCALES,
)
def ideal_update_distance(
    contender: Contender, rng: np.random.Generator, *, settings: int, **tuned: Any
) -> Measurement:
    """Measure ‖δ - S⁺F‖ in the metric S, over that of no step, at four points of a run.

    After 6, 15 and 40 steps, with 64 or 256 samples; the value is the geometric mean. Every peer
    has one setting for all four, tuned on this measure. SPRING has seen four more batches, of the
    steps before, and is the strongest peer at each single point.
    """
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_contender)
    assert contender.make is not None
    distances = {}
    for steps, n in DISTANCE_SETTINGS[:settings]:
        path = exact_path("square", 16, steps, HISTORY)
        batches = draw_batches(path, n, for_instance)
        delta = contender.make(batches, generator, **tuned)
        distances[f"step {steps}, {n} samples"] = path[-1].distance(delta)
    value = float(np.exp(np.mean(np.log(list(distances.values())))))
    return Measurement(value, extras=distances)


# Training


def shifted(parameters: Iterable[Tensor], lr: float, **settings: Any) -> Callable[..., None]:
    """Return a step of `MultiShiftSR`."""
    optimizer = MultiShiftSR(parameters, lr=lr, **settings)

    def step(jac: Tensor, energy: Tensor, member: Tensor | None = None) -> None:
        optimizer.step(log_psi_jac=jac, local_energy=energy, system_id=member)

    return step


def one_shift(
    parameters: Iterable[Tensor], lr: float, shift: float, **settings: Any
) -> Callable[..., None]:
    """Return a step of SR with a fixed shift."""
    return shifted(parameters, lr, shifts=[shift], **settings)


def one_cutoff(parameters: Iterable[Tensor], lr: float) -> Callable[..., None]:
    """Return a step of minSR with netket's soft cutoff of the pseudo-inverse."""
    held = list(parameters)
    descent = torch.optim.SGD(held, lr=lr)
    unused = torch.Generator()

    def step(jac: Tensor, energy: Tensor) -> None:
        _set_gradients(held, soft_pinv([(jac, energy)], unused, cutoff=1e-2))
        descent.step()

    return step


def adam(parameters: Iterable[Tensor], lr: float) -> Callable[..., None]:
    """Return a step of Adam along the gradient of the energy."""
    held = list(parameters)
    optimizer = torch.optim.Adam(held, lr=lr)

    def step(jac: Tensor, energy: Tensor) -> None:
        force = (jac - jac.mean(0)).T @ (energy - energy.mean()) / len(energy)
        _set_gradients(held, 2 * force)
        optimizer.step()

    return step


def _set_gradients(parameters: list[Tensor], gradient: Tensor) -> None:
    pieces = torch.split(gradient, [p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.reshape(p.shape)


LRS = [0.02, 0.05, 0.1, 0.2, 0.4]


@claim(
    method="ms-sr",
    statement="After training the 4×4 J₁-J₂ model with tuned step sizes MS-SR's energy error is at "
    "most 1.2 times the best peer's",
    metric=Metric(
        "relative energy error",
        better="lower",
        average="geometric mean",
        curve=("step", "relative energy error"),
    ),
    contenders=[
        Contender("MS-SR", make=shifted, tune={"lr": LRS}),
        Contender("SR", make=one_shift, tune={"lr": LRS, "shift": [1e-4, 1e-3, 1e-2, 0.1, 1.0]}),
        Contender("SR, GCV shift", make=partial(shifted, shifts="gcv"), tune={"lr": LRS}),
        Contender("SPRING", make=partial(shifted, shifts=[1e-2], momentum=0.9), tune={"lr": LRS}),
        Contender("minSR, soft cutoff", make=one_cutoff, tune={"lr": LRS}),
        Contender("Adam", make=adam, tune={"lr": [0.003, 0.01, 0.03, 0.1, 0.3]}),
        Contender(
            "MS-SR with momentum",
            make=partial(shifted, momentum=0.9),
            tune={"lr": LRS},
            control=True,
        ),
    ],
    expect=at_most(1.2, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, steps=1, n=64),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=20, n=128),
        "full": Scale(seeds=8, tuning_seeds=1, steps=150, n=256),
    },
)
def energy_after_training(
    contender: Contender, rng: np.random.Generator, *, steps: int, n: int, **tuned: Any
) -> Measurement:
    """Train an RBM of 288 parameters on samples drawn exactly; the error is over |E₀|, and exact.

    Every contender has its own step size, as the norm of the update varies with the shift. A lower
    risk of one step is not a lower energy after a fixed number of steps: in a short run from a
    random start MS-SR ends above SR with a tuned shift and SPRING. A large shift also shortens the
    step along directions of small curvature, and what one step overfits the next corrects. The
    control, MS-SR with SPRING's momentum, shows what the momentum does.
    """
    for_instance, for_contender = rng.spawn(2)
    psi = new_rbm("square", 16, int(for_instance.integers(2**31)))
    generator = torch_generator(for_contender)
    assert contender.make is not None
    step = contender.make(psi.parameters(), **tuned)
    lowest = ground_energy("square")
    errors = []
    for _ in range(steps):
        ensemble = ensemble_of("square", psi)
        errors.append((ensemble.energy - lowest) / abs(lowest))
        if not math.isfinite(errors[-1]):
            return Measurement(math.inf)
        rows = ensemble.draw(n, generator)
        jac = log_derivatives(psi, ensemble.spins[rows])
        if not bool(torch.isfinite(jac).all()):
            return Measurement(math.inf)
        with warnings.catch_warnings():
            # A run that diverges ends in a few configurations.
            warnings.filterwarnings("ignore", message=".* distinct samples")
            step(jac, ensemble.local_energy[rows])
    errors.append((ensemble_of("square", psi).energy - lowest) / abs(lowest))
    value = errors[-1] if math.isfinite(errors[-1]) else math.inf
    return Measurement(value, curve=(range(len(errors)), errors))


# Overparameterization


@claim(
    method="ms-sr",
    statement="A larger tangent space that reduces the gap reduces the risk: four times the hidden "
    "units leave at most 0.7 of it",
    metric=Metric("risk of 450 over 120 parameters", better="lower", average="geometric mean"),
    contenders=[
        Contender("MS-SR", make=ms_sr),
        Contender("SR, 1e-3", make=partial(sr, shift=1e-3), control=True),
    ],
    expect=at_most(0.7),
    scales={
        "smoke": Scale(seeds=2, steps=5),
        "quick": Scale(seeds=16, steps=30),
        "full": Scale(seeds=50, steps=30),
    },
)
def larger_tangent_space_helps(
    contender: Contender, rng: np.random.Generator, *, steps: int
) -> Measurement:
    """Compare the risks of one update of an Ising ring's RBM with 40 and with 10 hidden units.

    Both 30 steps into the same run, with 256 samples.
    """
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_contender)
    assert contender.make is not None
    risks: list[float] = []
    extras: dict[str, float] = {}
    for n_hidden in (40, 10):
        path = exact_path("ring10", n_hidden, steps)
        delta = contender.make(draw_batches(path, 256, for_instance), generator)
        risks.append(path[-1].risk(delta))
        extras |= {f"risk, {n_hidden} hidden": risks[-1], f"gap, {n_hidden} hidden": path[-1].gap}
    return Measurement(risks[0] / risks[1], extras=extras)


@claim(
    method="ms-sr",
    statement="At a fixed gap a larger tangent space raises the risk, and that of MS-SR by at most "
    "0.8 of the factor of SR at the shift 1e-3",
    metric=Metric(
        "risk with added features over without", better="lower", average="geometric mean"
    ),
    contenders=[
        Contender("MS-SR", make=ms_sr),
        Contender("SR, 1e-3", make=partial(sr, shift=1e-3)),
    ],
    expect=at_most(0.8, of="SR, 1e-3"),
    scales={
        "smoke": Scale(seeds=2, steps=5),
        "quick": Scale(seeds=40, steps=30),
        "full": Scale(seeds=100, steps=30),
    },
)
def larger_tangent_space_hurts(
    contender: Contender, rng: np.random.Generator, *, steps: int
) -> Measurement:
    """Add 136 random features to the 120 of an Ising ring, orthogonal to what the 120 leave.

    In population they explain nothing, so that the gap stays as it is; the 256 samples can now be
    interpolated. What to read: whether the value of SR is above 1 says that overparameterization
    hurts, and that of MS-SR whether its shifts undo it.
    """
    for_instance, for_contender = rng.spawn(2)
    generator = torch_generator(for_contender)
    assert contender.make is not None
    own = exact_path("ring10", 10, steps)[-1]
    wide = widened(own, 136, torch_generator(for_instance))
    rows = own.ensemble.draw(256, torch_generator(for_instance))
    risks = []
    for tangent in (wide, own):
        batch = (tangent.rows(rows), tangent.ensemble.local_energy[rows])
        risks.append(tangent.risk(contender.make([batch], generator)))
    extras = {"gap before": own.gap, "gap after": wide.gap}
    return Measurement(risks[0] / risks[1], extras=extras)


# A family of 100 sites

FAMILY_SCALES = {
    "smoke": Scale(seeds=2, tuning_seeds=1, chains=10, steps=1, draws=4, n=50),
    "quick": Scale(seeds=10, tuning_seeds=1, chains=60, steps=24, draws=5, n=300),
    "full": Scale(seeds=20, tuning_seeds=3, chains=60, steps=48, draws=15, n=300),
}


@claim(
    method="ms-sr",
    statement="In a family of 100 sites SR's validation risk is U-shaped in the shift: at both "
    "ends it is at least 1.1 times the minimum",
    metric=Metric(
        "lower end's risk over the least",
        better="higher",
        average="geometric mean",
        curve=("shift", "validation risk"),
    ),
    contenders=[Contender("SR")],
    expect=at_least(1.1),
    scales=FAMILY_SCALES,
)
def family_u_shape(
    contender: Contender,
    rng: np.random.Generator,
    *,
    chains: int,
    steps: int,
    draws: int,
    n: int,
) -> Measurement:
    """Sweep the shift at a foundation network for the Ising chain at five fields about h = 1.

    A translation-invariant RBM of 1200 parameters conditioned on the field, trained briefly; the
    members are centered separately. The direction comes from a batch of Markov chain samples, and
    its risk is that on the other samples of the pool.
    """
    batch, rest = family_pool(chains, steps, draws).split(n, torch_generator(rng))
    grid = np.logspace(-3, 5, 17)
    risks = []
    for shift in grid:
        found = ms_sr_direction(
            batch.jac, batch.local_energy, shifts=[shift], system_id=batch.member
        )
        risks.append(rest.risk(found.delta))
    best = grid[int(np.argmin(risks))]
    value = min(risks[0], risks[-1]) / min(risks)
    return Measurement(value, curve=(grid, risks), extras={"best shift": float(best)})


def family_ms_sr(*batch: Tensor, generator: torch.Generator, **settings: Any) -> Tensor:
    """MS-SR of a family."""
    jac, energy, member = batch
    return ms_sr_direction(jac, energy, system_id=member, generator=generator, **settings).delta


def family_sr(*batch: Tensor, generator: torch.Generator, shift: float) -> Tensor:
    """SR of a family."""
    return family_ms_sr(*batch, generator=generator, shifts=[shift])


@claim(
    method="ms-sr",
    statement="In a family of 100 sites MS-SR's validation risk is at most 1.05 of that of SR with "
    "a tuned shift",
    metric=RISK,
    contenders=[
        Contender("MS-SR", make=family_ms_sr),
        Contender(
            "SR, tuned shift",
            make=family_sr,
            tune={"shift": [1e-2, 0.1, 1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 1e4]},
        ),
        Contender("SR, GCV shift", make=partial(family_ms_sr, shifts="gcv")),
        Contender("SR, 1e-3", make=partial(family_sr, shift=1e-3)),
        Contender(
            "MS-SR, two shards", make=partial(family_ms_sr, mode="shards", n_solves=2), control=True
        ),
    ],
    expect=at_most(1.05, of="best peer"),
    scales=FAMILY_SCALES,
)
def family_risk(
    contender: Contender,
    rng: np.random.Generator,
    *,
    chains: int,
    steps: int,
    draws: int,
    n: int,
    **tuned: Any,
) -> Measurement:
    """Measure the validation risk of one direction, in the setting of the family's U.

    The peer's shift is tuned for this network and batch size, which MS-SR has to find out.
    """
    for_instance, for_contender = rng.spawn(2)
    batch, rest = family_pool(chains, steps, draws).split(n, torch_generator(for_instance))
    assert contender.make is not None
    delta = contender.make(
        batch.jac,
        batch.local_energy,
        batch.member,
        generator=torch_generator(for_contender),
        **tuned,
    )
    return Measurement(rest.risk(delta) / rest.risk(torch.zeros_like(delta)))


@claim(
    method="ms-sr",
    statement="After training a family of 100 sites MS-SR's energy error is at most 1.2 times that "
    "of SR with a tuned shift",
    metric=Metric("relative energy error", better="lower", average="geometric mean"),
    contenders=[
        Contender("MS-SR", make=shifted),
        Contender(
            "SR, tuned shift", make=one_shift, tune={"shift": [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0]}
        ),
        Contender("SR, 1e-3", make=partial(one_shift, shift=1e-3)),
    ],
    expect=at_most(1.2, of="best peer"),
    scales={
        "smoke": Scale(seeds=2, tuning_seeds=1, chains=10, steps=1),
        "quick": Scale(seeds=8, tuning_seeds=1, chains=20, steps=8),
        "full": Scale(seeds=8, tuning_seeds=1, chains=60, steps=60),
    },
)
def family_energy(
    contender: Contender, rng: np.random.Generator, *, chains: int, steps: int, **tuned: Any
) -> Measurement:
    """Train the family from its start, with Markov chains that go along.

    The value is the mean over the fields of (E - E₀)/|E₀| at the end, with E₀ the exact energy of
    free fermions and E of the samples. Both have the same step size and cap on the norm of a step,
    without which small shifts diverge at once.
    """
    sampler = FamilySampler(chains, int(rng.integers(2**31)))
    sampler.chains.sample(lambda s: sampler.psi(s, sampler.field), sweeps=3)
    assert contender.make is not None
    step = contender.make(sampler.psi.parameters(), lr=0.04, max_norm=6.0, **tuned)
    for _ in range(steps):
        pool = sampler.draw()
        if not bool(torch.isfinite(pool.local_energy).all()):
            return Measurement(math.inf)
        step(pool.jac, pool.local_energy, pool.member)
    pool = sampler.draw(sweeps=2)
    errors = {}
    for k, field in enumerate(MEMBERS):
        lowest = ising_chain_energy(SITES, field)
        energy = float(pool.local_energy[pool.member == k].mean())
        errors[f"h = {field}"] = (energy - lowest) / abs(lowest)
    mean = float(np.mean(list(errors.values())))
    # A sampled energy may lie below the exact one by chance.
    return Measurement(abs(mean) if math.isfinite(mean) else math.inf, extras=errors)
