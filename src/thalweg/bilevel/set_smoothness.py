"""How smoothly the solutions of a lower level move, and what it means for hyper-objectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds

from thalweg.bilevel.central_differences import central_gradient
from thalweg.bilevel.solution_pairs import (
    PairProbe,
    nearest_to_zero,
    projection_noise,
    sampled_solutions,
)
from thalweg.bilevel.solution_sets import HyperObjective, Mode, SetValuedFollower, UnboundedError
from thalweg.common.checks import check_array, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.random import RNGLike, as_generator

Array = NDArray[np.float64]

MOST_ZOOMED = 8  # pairs with the largest ratios that are looked at more closely
ZOOMS = 6  # halvings of a pair
OFFSETS = (0.0, 0.125, 0.25, 0.375, 0.5)  # where the half of a pair may begin
SETTLING = 2  # halvings that center a pair on a kink, which raises the ratio more than shrinking
SMALLEST_H = 1e-3  # of second differences, whose noise is that of values over h²
GROWTH = -0.5  # slopes of log ratio over log distance below this are violations
FLOOR = 1e-6  # ratios below this are rounding
VALUE_TOL = 1e-10


@dataclass(frozen=True, eq=False)
class SetSmoothnessReport:
    """The constants of set smoothness on sampled pairs: lower estimates of the true ones.

    Parameters
    ----------
    L_S : float
        The largest ratio of ‖θy₁ + (1 - θ)y₂ - y‖ to θ(1 - θ)‖x₁ - x₂‖²/2, with the best pair.
    L_pair : float
        The same with the naive pair, the projections of y, whose ratio is unbounded where S(x) has
        a boundary.
    L_distance : float
        The largest ratio of ‖y₁ - y₂‖² to ‖x₁ - x₂‖² of the best pairs.
    M_S : float
        The largest ratio of dist(y, S(x₂)) to ‖x₁ - x₂‖ for y in S(x₁).
    tau : float
        The largest ratio of dist(y, S(x)) to ‖∇_y f(x, y)‖.
    M_F, L_F : float
        The largest gradient of F in (x, y), and how fast it changes.
    rho_bound : float
        ρ = M_F L_S + L_F(1 + L_distance): -φ_o and φ_p are ρ-weakly convex if these constants hold
        everywhere.
    curvature_optimistic, curvature_pessimistic : float
        The largest second difference of φ_o and the least one of φ_p, in directions of norm 1, at
        sampled and at zoomed pairs: to be below ρ and above -ρ. NaN if F is unbounded in that mode.
    violations : int
        Of the 8 pairs with the largest ratios, those whose ratio grows without bound as the pair
        is halved.
    growth : float
        The least slope of the logarithm of the ratio over that of ‖x₁ - x₂‖ among these: about 0 if
        S is set-smooth, -1 where it has a kink.
    worst_x : ndarray of shape (m,)
        The middle of the pair with the largest ratio, after zooming.
    distances, ratios : ndarray of shape (n_pairs,)
        ‖x₁ - x₂‖ and the ratio of `L_S` of each pair.
    zoom_distances, zoom_ratios : ndarray of shape (n_zoomed, 7)
        The same of the zoomed pairs, from the given distance on.
    n_pairs : int
    """

    L_S: float
    L_pair: float
    L_distance: float
    M_S: float
    tau: float
    M_F: float
    L_F: float
    rho_bound: float
    curvature_optimistic: float
    curvature_pessimistic: float
    violations: int
    growth: float
    worst_x: Array
    distances: Array
    ratios: Array
    zoom_distances: Array
    zoom_ratios: Array
    n_pairs: int

    def __str__(self) -> str:
        if self.violations:
            where = np.array2string(self.worst_x, precision=4)
            verdict = (
                f"not set-smooth: {self.violations} pairs violate every constant, the ratio grows "
                f"as distance^{self.growth:.2f} near x = {where}"
            )
        else:
            verdict = f"no violation of set smoothness in {self.n_pairs} pairs"
        return "\n".join(
            [
                verdict,
                f"  L_S {self.L_S:.3g} (naive pair {self.L_pair:.3g}), distance "
                f"{self.L_distance:.3g}, M_S {self.M_S:.3g}, tau {self.tau:.3g}",
                f"  M_F {self.M_F:.3g}, L_F {self.L_F:.3g}, rho {self.rho_bound:.3g}",
                f"  second differences: optimistic at most {self.curvature_optimistic:.3g}, "
                f"pessimistic at least {self.curvature_pessimistic:.3g}",
            ]
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw the ratio of each pair over its distance, and what zooming does to the largest.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional

        Returns
        -------
        matplotlib.axes.Axes
        """
        with requires("plot"):
            import matplotlib.pyplot as plt

        ax = plt.subplots()[1] if ax is None else ax
        # Ratios of sets that move linearly are zero up to rounding, which no logarithm shows.
        ax.loglog(self.distances, np.maximum(self.ratios, FLOOR), ".", label="pairs")
        for k, (distance, ratio) in enumerate(
            zip(self.zoom_distances, self.zoom_ratios, strict=True)
        ):
            ax.loglog(
                distance,
                np.maximum(ratio, FLOOR),
                color="C1",
                linewidth=0.8,
                label="the largest, zoomed" if k == 0 else None,
            )
        ax.set(xlabel="‖x₁ - x₂‖", ylabel="error over θ(1 - θ)‖x₁ - x₂‖²/2")
        ax.legend()
        return ax


def set_smoothness_report(
    follower: SetValuedFollower,
    F: Callable[[Array, Array], float],
    domain: Any,
    *,
    n_pairs: int = 200,
    thetas: Sequence[float] = (0.25, 0.5, 0.75),
    spread: float = 1.0,
    rng: RNGLike = None,
) -> SetSmoothnessReport:
    r"""Estimate the constants of set smoothness, and look for pairs that no constant fits.

    S is set-smooth with L if for all x₁, x₂, θ and y in S(θx₁ + (1 - θ)x₂) there are y₁ in S(x₁)
    and y₂ in S(x₂) with

    .. math:: \| \theta y_1 + (1 - \theta) y_2 - y \| \le
              \tfrac{L}{2} \theta (1 - \theta) \| x_1 - x_2 \|^2, \qquad
              \| y_1 - y_2 \|^2 \le L \| x_1 - x_2 \|^2 .

    The pair that is best for the first is found by alternating projections, from y on.

    Parameters
    ----------
    follower : SetValuedFollower
        For example `LeastSquaresFollower`, `ConvexFollower`.
    F : callable
        ``F(x, y) -> float``, for the constants of the hyper-objectives.
    domain : sequence of (low, high) of length m, or scipy.optimize.Bounds
        The box that x₁ and x₂ are drawn from; their distances are spread over two decades.
    n_pairs : int, default 200
    thetas : sequence of float in (0, 1)
    spread : float > 0, default 1
        y is the projection of a normal point whose standard deviation is this, times 1 + the norm
        of the solution nearest to zero; with a large one it is on the boundary of S(x).
    rng : int, Generator or None

    Returns
    -------
    SetSmoothnessReport

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described.

    Notes
    -----
    *Cost.* A few projections on S(x) for each pair and θ, and up to 100 where S(x) has a boundary;
    a few hundred values of φ_o and φ_p.

    *Ours.* All of it: the paper proves constants for a class of f, whose S(x) are affine, and has
    no diagnostic. The zoom: a pair is halved six times, around the part with the largest ratio. A
    ratio that doubles each time is that of a kink.

    References
    ----------
    H. Chen, J. Li and A. M.-C. So, "Set smoothness unlocks Clarke hyper-stationarity in bilevel
    optimization", NeurIPS 2025.

    Examples
    --------
    >>> import numpy as np
    >>> from thalweg.bilevel import TranslatedBoxFollower, set_smoothness_report
    >>> follower = TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))
    >>> report = set_smoothness_report(
    ...     follower, lambda x, y: (y[0] - 0.5) ** 2 / 2, [(-4, 4)], n_pairs=50, rng=0
    ... )
    >>> report.violations, report.L_S <= 1 + 1e-6
    (0, True)
    """
    if not isinstance(follower, SetValuedFollower):
        raise TypeError(
            "follower must have the methods minimize, project, gradient and size and the "
            f"attribute constrained, got {type(follower).__name__}"
        )
    phi = HyperObjective(follower, F)
    check_integer("n_pairs", n_pairs, at_least=2)
    check_number("spread", spread, above=0)
    for theta in thetas:
        check_number("thetas", theta, above=0, below=1)
    low, high = _domain(domain)
    generator = as_generator(rng)
    pairs = list(_pairs(generator, low, high, n_pairs))
    seeds = generator.integers(2**63, size=n_pairs)
    noise = projection_noise(follower, pairs[:8], seeds, spread)
    probe = PairProbe(follower, tuple(float(theta) for theta in thetas), spread, noise)
    found = [probe.measure(x1, x2, seed) for (x1, x2), seed in zip(pairs, seeds, strict=True)]
    ratios = np.array([each.ratio for each in found])
    worst = np.argsort(-ratios, kind="stable")[: min(n_pairs, MOST_ZOOMED)]
    middle = replace(probe, thetas=(0.5,))
    zooms = [_zoom(middle, pairs[i], seeds[i]) for i in worst]
    zoom_distances = np.array([[np.linalg.norm(b - a) for a, b, _ in zoom] for zoom in zooms])
    zoom_ratios = np.array([[ratio for _, _, ratio in zoom] for zoom in zooms])
    growths = _growths(zoom_distances, zoom_ratios)
    at = int(np.argmax(zoom_ratios[:, -1]))
    ends = [zoom[-1][:2] for zoom in zooms]
    M_F, L_F = _upper_constants(F, follower, pairs, seeds, spread)
    L_S = float(max(ratios.max(), zoom_ratios.max()))
    L_distance = max(each.ratio_of_distance for each in found)
    segments = pairs[:: max(1, n_pairs // 64)] + ends
    return SetSmoothnessReport(
        L_S=L_S,
        L_pair=max(each.naive_ratio for each in found),
        L_distance=L_distance,
        M_S=max(each.lipschitz for each in found),
        tau=_error_bound(follower, pairs, seeds, spread),
        M_F=M_F,
        L_F=L_F,
        rho_bound=M_F * L_S + L_F * (1 + L_distance),
        curvature_optimistic=_curvature(phi, segments, "optimistic"),
        curvature_pessimistic=-_curvature(phi, segments, "pessimistic"),
        violations=int(np.sum(growths < GROWTH)),
        growth=float(growths.min()),
        worst_x=(ends[at][0] + ends[at][1]) / 2,
        distances=np.array([np.linalg.norm(b - a) for a, b in pairs]),
        ratios=ratios,
        zoom_distances=zoom_distances,
        zoom_ratios=zoom_ratios,
        n_pairs=n_pairs,
    )


def _zoom(
    probe: PairProbe, pair: tuple[Array, Array], seed: np.int64
) -> list[tuple[Array, Array, float]]:
    """Halve a pair around the part with the largest ratio; return all pairs and ratios."""
    steps = [(*pair, probe.measure(*pair, seed).ratio)]
    for _ in range(ZOOMS):
        a, b, _ = steps[-1]
        parts = [(a + s * (b - a), a + (s + 0.5) * (b - a)) for s in OFFSETS]
        steps.append(
            max(
                ((p, q, probe.measure(p, q, seed).ratio) for p, q in parts),
                key=lambda part: part[2],
            )
        )
    return steps


def _growths(distances: Array, ratios: Array) -> Array:
    """Return the slopes of log ratio over log distance; zero where all ratios are rounding."""
    slopes = [
        np.polyfit(np.log(d), np.log(np.maximum(r, FLOOR)), 1)[0]
        for d, r in zip(distances[:, SETTLING:], ratios[:, SETTLING:], strict=True)
    ]
    return np.array(slopes)


def _domain(domain: Any) -> tuple[Array, Array]:
    if isinstance(domain, Bounds):
        domain = np.column_stack((domain.lb, domain.ub))
    low, high = check_array("domain", domain, shape=("m", 2)).T
    if not np.all(low < high):
        raise ValueError(f"domain must be pairs with low < high, got {domain}")
    return low, high


def _pairs(
    rng: np.random.Generator, low: Array, high: Array, n: int
) -> Iterator[tuple[Array, Array]]:
    """Yield pairs in the box whose distances are log-uniform over two decades."""
    for _ in range(n):
        x1, x2 = rng.uniform(low, high, (2, len(low)))
        yield x1, x1 + 10 ** rng.uniform(-2, 0) * (x2 - x1)


def _error_bound(
    follower: SetValuedFollower,
    pairs: list[tuple[Array, Array]],
    seeds: NDArray[np.int64],
    spread: float,
) -> float:
    ratios = []
    for (x, _), seed in zip(pairs, seeds, strict=True):
        nearest = nearest_to_zero(follower, x)
        scale = spread * (1 + float(np.linalg.norm(nearest)))
        v = nearest + scale * np.random.default_rng(seed).standard_normal(len(nearest))
        gradient = float(np.linalg.norm(follower.gradient(x, v)))
        if gradient > 1e-9:
            ratios.append(float(np.linalg.norm(v - follower.project(x, v))) / gradient)
    return max(ratios, default=math.nan)


def _upper_constants(
    F: Callable[[Array, Array], float],
    follower: SetValuedFollower,
    pairs: list[tuple[Array, Array]],
    seeds: NDArray[np.int64],
    spread: float,
) -> tuple[float, float]:
    """Return the largest gradient of F at solutions, and its largest change over a small step."""
    sizes, changes = [], []
    for (x, _), seed in zip(pairs, seeds, strict=True):
        m = len(x)
        (y,) = sampled_solutions(follower, x, seed, (spread,))
        point = np.concatenate((x, y))
        move = np.random.default_rng(seed).standard_normal(len(point))
        move *= 1e-2 / np.linalg.norm(move)
        joint = lambda v, m=m: float(F(v[:m], v[m:]))  # noqa: E731
        here, there = central_gradient(joint, point), central_gradient(joint, point + move)
        sizes.append(float(np.linalg.norm(here)))
        changes.append(float(np.linalg.norm(there - here)) / 1e-2)
    return max(sizes), max(changes)


def _curvature(phi: HyperObjective, segments: list[tuple[Array, Array]], mode: Mode) -> float:
    """Return the largest second difference of φ_o, or of -φ_p, between the ends of segments."""
    sign, largest = (1.0 if mode == "optimistic" else -1.0), -math.inf
    for a, b in segments:
        middle, half = (a + b) / 2, (b - a) / 2
        h = max(float(np.linalg.norm(half)), SMALLEST_H)
        move = h / float(np.linalg.norm(half)) * half
        try:
            left, center, right = (
                phi(x, mode, VALUE_TOL) for x in (middle - move, middle, middle + move)
            )
        except UnboundedError:
            return math.nan
        largest = max(largest, sign * (left - 2 * center + right) / h**2)
    return largest
