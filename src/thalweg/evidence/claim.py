"""What a claim is: a card that says what is compared, and a function that runs one trial.

The harness (`thalweg.evidence.runner`) calls the function once per contender, setting and seed;
`thalweg.evidence.statistics` turns what it returned into a verdict.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from thalweg.common.checks import check_choice, check_integer

BEST_PEER = "best peer"
SCALES = ("smoke", "quick", "full")


@dataclass(frozen=True)
class Metric:
    """What a trial measures.

    Parameters
    ----------
    name : str
        As it stands on an axis: "cumulative regret", "cut value".
    better : {"lower", "higher"}
        The direction in which contenders are tuned and ranked.
    average : {"mean", "geometric mean", "median"}, default "mean"
        How values of several seeds become one. Use the geometric mean for positive values that
        spread over orders of magnitude.
    unit : str, optional
    curve : tuple of (str, str), optional
        The axis labels of the measurements' curves.
    """

    name: str
    better: Literal["lower", "higher"]
    average: Literal["mean", "geometric mean", "median"] = "mean"
    unit: str = ""
    curve: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        check_choice("better", self.better, ("lower", "higher"))
        check_choice("average", self.average, ("mean", "geometric mean", "median"))


@dataclass(frozen=True)
class Contender:
    """One of the methods that a claim compares.

    Parameters
    ----------
    name : str
        How tables and plots call it.
    make : callable, optional
        Whatever the claim's function needs to run this contender, usually its constructor; the
        function reaches it as ``contender.make``.
    tune : mapping of str to sequence, optional
        A grid: each combination of values is tried on the tuning seeds, and the best goes into
        the evaluation as keyword arguments of the claim's function. Without a grid the contender
        runs as shipped.
    control : bool, default False
        A causal control or an ablation: shown beside the peers, never "the best peer".

    Examples
    --------
    >>> Contender("OFUL", tune={"scale": [0.1, 0.3, 1.0]}).settings()
    [{'scale': 0.1}, {'scale': 0.3}, {'scale': 1.0}]
    """

    name: str
    make: Callable[..., Any] | None = None
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    control: bool = False

    def settings(self) -> list[dict[str, Any]]:
        """Return every combination of the grid's values."""
        return [
            dict(zip(self.tune, values, strict=True))
            for values in itertools.product(*self.tune.values())
        ]

    def edges(self, setting: Mapping[str, Any]) -> list[str]:
        """Return the parameters whose value in ``setting`` is the end of a numeric grid."""
        return [
            name
            for name, values in self.tune.items()
            if len(values) > 1
            and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
            and setting[name] in (min(values), max(values))
        ]


@dataclass(frozen=True, init=False)
class Scale:
    """How large a run is: the number of seeds, and parameters of the claim's function.

    Parameters
    ----------
    seeds : int
        Paired evaluation seeds.
    tuning_seeds : int, default 3
        Seeds on which the contender with the largest grid tries each of its settings. Contenders
        with smaller grids get more seeds per setting, so that all have the same number of trials.
    sweep : mapping of one str to a sequence, optional
        A parameter that every trial is repeated over, for claims about a trend.
    tuning : mapping, optional
        Parameters that differ while tuning, as ``{"steps": 500}`` for a claim about settings that
        were tuned at a shorter horizon.
    **parameters
        Keyword arguments of the claim's function.

    Examples
    --------
    >>> Scale(seeds=20, rounds=5_000).parameters
    {'rounds': 5000}
    """

    seeds: int
    tuning_seeds: int
    sweep: Mapping[str, Sequence[Any]]
    tuning: Mapping[str, Any]
    parameters: Mapping[str, Any]

    def __init__(
        self,
        *,
        seeds: int,
        tuning_seeds: int = 3,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        tuning: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        unknown = sorted(set(tuning or {}) - set(parameters))
        if unknown:
            raise ValueError(f"tuning must name parameters of the scale, got {unknown}")
        if sweep is not None and len(sweep) != 1:
            raise ValueError(f"sweep must name one parameter, got {sorted(sweep)}")
        # A frozen dataclass with its own __init__ has no other way to set its fields.
        object.__setattr__(self, "seeds", check_integer("seeds", seeds, at_least=1))
        object.__setattr__(
            self, "tuning_seeds", check_integer("tuning_seeds", tuning_seeds, at_least=1)
        )
        object.__setattr__(self, "sweep", dict(sweep or {}))
        object.__setattr__(self, "tuning", dict(tuning or {}))
        object.__setattr__(self, "parameters", parameters)


@dataclass(frozen=True)
class Expectation:
    """What the claim says of the metric. Made by `at_most`, `at_least`, `between` and `trend`.

    Parameters
    ----------
    low, high : float
        The accepted range of the effect.
    of : str or None
        The contender to compare with, ``"best peer"``, or None for the metric itself.
    effect : {"ratio", "difference", "value", "slope"}
        What must lie in the range: the method's value over the peer's, their difference, the
        method's value, or the slope of the logarithm of its value over that of ``over``.
    over : str or None
        The swept parameter, for a slope.
    """

    low: float
    high: float
    of: str | None = None
    effect: Literal["ratio", "difference", "value", "slope"] = "value"
    over: str | None = None

    def __post_init__(self) -> None:
        if math.isnan(self.low) or math.isnan(self.high) or self.low > self.high:
            raise ValueError(f"low must be <= high, got low={self.low}, high={self.high}")

    def __str__(self) -> str:
        what = {
            "ratio": f"ratio to {self.of}",
            "difference": f"difference to {self.of}",
            "value": "value",
            "slope": f"log-log slope over {self.over}",
        }[self.effect]
        if self.low == -math.inf:
            return f"{what} at most {self.high:g}"
        if self.high == math.inf:
            return f"{what} at least {self.low:g}"
        return f"{what} between {self.low:g} and {self.high:g}"


def at_most(
    bound: float, *, of: str | None = None, effect: Literal["ratio", "difference"] = "ratio"
) -> Expectation:
    """Expect the metric, or its ratio (or difference) to ``of``, to be at most ``bound``."""
    return Expectation(-math.inf, bound, of, effect if of else "value")


def at_least(
    bound: float, *, of: str | None = None, effect: Literal["ratio", "difference"] = "ratio"
) -> Expectation:
    """Expect the metric, or its ratio (or difference) to ``of``, to be at least ``bound``."""
    return Expectation(bound, math.inf, of, effect if of else "value")


def between(
    low: float,
    high: float,
    *,
    of: str | None = None,
    effect: Literal["ratio", "difference"] = "ratio",
) -> Expectation:
    """Expect the metric, or its ratio (or difference) to the peer ``of``, to lie in [low, high]."""
    return Expectation(low, high, of, effect if of else "value")


def trend(low: float, high: float, *, over: str) -> Expectation:
    """Expect the slope of log(metric) over log(``over``) to lie in [low, high]."""
    return Expectation(low, high, None, "slope", over)


@dataclass(frozen=True)
class Measurement:
    """What one trial returns.

    Parameters
    ----------
    value : float
        The metric. NaN and infinity count as a diverged trial.
    curve : tuple of (array_like, array_like), optional
        x and y of what the report plots; thinned to 200 points.
    extras : mapping of str to float, optional
        Further figures that the report lists.
    """

    value: float
    curve: tuple[ArrayLike, ArrayLike] | None = None
    extras: Mapping[str, float] = field(default_factory=dict)

    def thinned_curve(self, points: int = 200) -> tuple[list[float], list[float]] | None:
        """Return the curve as two lists of at most ``points`` entries, ends included."""
        if self.curve is None:
            return None
        x, y = (np.asarray(axis, dtype=np.float64) for axis in self.curve)
        if x.ndim != 1 or x.shape != y.shape or len(x) == 0:
            raise ValueError(
                f"curve must be two 1-D arrays of one length >= 1, got {x.shape} and {y.shape}"
            )
        kept = np.unique(np.linspace(0, len(x) - 1, min(points, len(x))).round().astype(int))
        return x[kept].tolist(), y[kept].tolist()


@dataclass(frozen=True)
class Claim:
    """A statement about a method, with all that is needed to check it. Made by `claim`.

    Calling it runs one trial.
    """

    function: Callable[..., Measurement]
    method: str
    statement: str
    metric: Metric
    contenders: tuple[Contender, ...]
    expect: Expectation
    scales: Mapping[str, Scale]
    headline: bool = False

    def __post_init__(self) -> None:
        names = [contender.name for contender in self.contenders]
        if not names:
            raise ValueError(f"{self.id}: contenders must hold at least the method itself")
        if len(set(names)) < len(names):
            raise ValueError(f"{self.id}: contenders must have different names, got {names}")
        if sorted(self.scales) != sorted(SCALES):
            raise ValueError(f"{self.id}: scales must be {SCALES}, got {tuple(self.scales)}")
        of = self.expect.of
        if of == BEST_PEER and not self.peers:
            raise ValueError(f"{self.id}: there is no peer to compare with")
        if of is not None and of != BEST_PEER and of not in names[1:]:
            raise ValueError(f"{self.id}: of must be one of {names[1:]}, got {of!r}")
        for name, scale in self.scales.items():
            if self.expect.over is not None and self.expect.over not in scale.sweep:
                raise ValueError(
                    f"{self.id}: scale {name!r} must sweep over {self.expect.over!r}, "
                    f"got {tuple(scale.sweep)}"
                )

    @property
    def name(self) -> str:
        """The name of the function that runs its trials."""
        return self.function.__name__

    @property
    def id(self) -> str:
        """``"<method>/<function>"``, unique in the library."""
        return f"{self.method}/{self.name}"

    @property
    def description(self) -> str:
        """The docstring of the function, for the report."""
        return inspect.getdoc(self.function) or ""

    @property
    def subject(self) -> Contender:
        """The method that the claim is about: the first contender."""
        return self.contenders[0]

    @property
    def peers(self) -> tuple[Contender, ...]:
        """The other contenders that are no controls."""
        return tuple(c for c in self.contenders[1:] if not c.control)

    def __call__(
        self, contender: Contender, rng: np.random.Generator, /, **parameters: Any
    ) -> Measurement:
        """Run one trial."""
        return self.function(contender, rng, **parameters)

    def with_contender(self, contender: Contender) -> Claim:
        """Return the claim with one more contender, tuned and judged like the others."""
        return replace(self, contenders=(*self.contenders, contender))


def claim(
    *,
    method: str,
    statement: str,
    metric: Metric,
    contenders: Sequence[Contender],
    expect: Expectation,
    scales: Mapping[str, Scale],
    headline: bool = False,
) -> Callable[[Callable[..., Measurement]], Claim]:
    """Make a claim of the function that runs its trials.

    The function is called as ``function(contender, rng, **parameters)``, where ``parameters`` are
    the scale's parameters, the swept value and the contender's tuned setting. For one seed every
    contender gets a generator in the same state: with ``for_instance, for_contender =
    rng.spawn(2)`` the instance is shared, whatever the contender draws.

    Parameters
    ----------
    method : str
        The slug of the method in the catalog.
    statement : str
        One sentence, as the paper would say it.
    metric : Metric
    contenders : sequence of Contender
        The first is the method.
    expect : Expectation
    scales : mapping
        ``"smoke"`` (seconds), ``"quick"`` (under a minute on two cores) and ``"full"`` (under a
        quarter of an hour).
    headline : bool, default False
        Whether it is the method's main claim, whose ``full`` result is published.
    """

    def decorate(function: Callable[..., Measurement]) -> Claim:
        return Claim(
            function=function,
            method=method,
            statement=statement,
            metric=metric,
            contenders=tuple(contenders),
            expect=expect,
            scales=dict(scales),
            headline=headline,
        )

    return decorate
