"""Solvers that count rounds: dual averaging, smoothed acceleration, ball acceleration."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from thalweg.convex.gaussian_smoothing import SmoothedGradients, normal_samples
from thalweg.convex.lp_geometry import LpBall, dual_exponent, dual_map, gaussian_moment, lp_norm
from thalweg.convex.round_progress import RoundProgress

Vector = NDArray[np.float64]

# Multiple of the smoothing width that keeps the worst-case bias below ε/2. The bias of functions
# that people have is far below the worst case, and rounds fall with the width.
SMOOTHING = 30.0
AGD_STEP = 3.0  # 1 is safe, 10 can stall
PATIENCE = 10  # rounds without progress before the width is halved
REACH = 1.5  # the ball oracle's region, in radii
INNER_STEPS = 60
DOUBLINGS = 6
LEAST_SAMPLES = 0.1  # effective share of a batch


class SmoothingWidth:
    """The width ϱ = multiple · ε / (2 G E‖z‖_p), which is halved where it keeps a run from ε.

    With multiple 1 the bias of smoothing is below ε/2, whatever the function.
    """

    def __init__(self, ball: LpBall, eps: float, multiple: float, lipschitz: float) -> None:
        self.unit = eps / (2 * lipschitz * gaussian_moment(len(ball.center), ball.p))
        self.multiple = multiple
        self.since, self.last_gain, self.record = 0, 0, math.inf

    @property
    def value(self) -> float:
        """ϱ, in units of x."""
        return self.multiple * self.unit

    def halve_if_stalled(self, run: RoundProgress) -> bool:
        """Halve the width, and say so, if the best value has not moved by ε/20 for long.

        Long is ``PATIENCE`` rounds and a quarter of the rounds with this width.
        """
        if run.best_fun <= self.record - 0.05 * run.eps:
            self.record, self.last_gain = run.best_fun, run.rounds
        waited = run.rounds - self.last_gain
        if self.multiple <= 1 or waited < PATIENCE + (run.rounds - self.since) / 4:
            return False
        self.multiple = max(1.0, self.multiple / 2)
        self.since = self.last_gain = run.rounds
        return True


def dual_averaging(run: RoundProgress, lipschitz: float) -> None:
    """Mirror descent in ℓp, one gradient a round; the rest of a batch evaluates the average.

    Regularizers: entropy over signed coordinates at p = 1, ‖x‖_p²/2 for p ≤ 2, and for p > 2 the
    power ‖x‖_p^p/p or the Euclidean one, whichever has the smaller bound; Euclidean at ∞.
    """
    ball, dim = run.ball, len(run.ball.center)
    # d^(1-2/p) ε⁻² against ε⁻ᵖ, with ε in units of GR.
    relative = run.eps / (lipschitz * ball.radius)
    euclidean = ball.p > 2 and math.log(dim) <= ball.p * -math.log(relative)
    total, average = np.zeros(dim), ball.center.copy()
    x = ball.center.copy()
    for t in range(1, run.max_rounds + 1):
        candidate = average if run.width > 1 else None
        _, gradients = run.ask(x[None], candidate=candidate)
        total += gradients[0]
        x = (
            _euclidean_step(ball, total, t, gradients[0])
            if euclidean
            else ball.center + _mirror_step(total, t, ball, lipschitz)
        )
        average = average + (x - average) / (t + 1)


def _mirror_step(total: Vector, t: int, ball: LpBall, lipschitz: float) -> Vector:
    """Return argmin ⟨total, x⟩ + ψ(x)/η over the centered ball, in closed form."""
    p, R, dim = ball.p, ball.radius, len(total)
    if p == 1:
        eta = math.sqrt(2 * math.log(2 * dim) / t) / (R * lipschitz)
        logits = np.concatenate([-eta * R * total, eta * R * total])
        shares = np.exp(logits - logsumexp(logits))
        entropic: Vector = R * (shares[:dim] - shares[dim:])
        return entropic
    size = float(lp_norm(total, dual_exponent(p)))
    if size == 0:
        return np.zeros(dim)
    if p <= 2:
        # Strong convexity p - 1; near p = 1 the norm is within e of that of 1 + 1/log d.
        eta = R * math.sqrt(max(p - 1, 1 / math.log(dim)) / t) / lipschitz
        length = eta * size
    else:
        # Uniform convexity: regret R^p/(pη) + Σ (ηG^q)^…, balanced by η ~ R^(p-1)/(G t^(1-1/p)).
        eta = R ** (p - 1) / (lipschitz * t ** (1 - 1 / p))
        length = (eta * size) ** (1 / (p - 1))
    return -min(length, R) * dual_map(total, p)


def _euclidean_step(ball: LpBall, total: Vector, t: int, gradient: Vector) -> Vector:
    size = max(float(np.linalg.norm(gradient)), 1e-300)
    return ball.project(ball.center - ball.euclidean_radius / (size * math.sqrt(t)) * total)


def smoothed_agd(
    run: RoundProgress,
    width: SmoothingWidth,
    antithetic: bool,
    step: float,
    rng: np.random.Generator,
) -> None:
    """Nesterov's method on the Gaussian smoothing of width ϱ; a batch is one gradient of it.

    f_ϱ has a gradient that is Lipschitz with max‖g‖₂/ϱ; steps are ``step`` over that. Where it
    stalls, it starts over from the best point with half the width.
    """
    ball = run.ball
    x = y = ball.center.copy()
    t = 1.0
    while True:
        samples = normal_samples(max(1, run.width - 1), len(x), antithetic, rng)
        _, gradients = run.ask(y + width.value * samples, candidate=x, weight=t)
        largest = float(np.linalg.norm(gradients, axis=1).max())
        if largest == 0:
            return
        if width.halve_if_stalled(run):
            x = y = run.best_x
            t = 1.0
            continue
        moved = ball.project(y - step * width.value / largest * gradients.mean(axis=0))
        t_next = (1 + math.sqrt(1 + 4 * t * t)) / 2
        y = moved + (t - 1) / t_next * (moved - x)
        x, t = moved, t_next


def ball_acceleration(
    run: RoundProgress,
    width: SmoothingWidth,
    antithetic: bool,
    lipschitz: float,
    rng: np.random.Generator,
) -> None:
    """Accelerated proximal points, each found in a small ball from one batch.

    Adaptive Monteiro-Svaiter acceleration: the proximal weight λ is doubled until the proximal
    point of f_ϱ lies within the ball of radius r = ϱ, and halved when it lies well within. In
    that ball the batch's samples give the smoothed gradient by importance weights, so the
    proximal problem is solved without asking again. Where it stalls, it starts
    over from the best point with half the width.
    """
    ball = run.ball
    x = v = ball.center.copy()
    A, lam = 0.0, 1e-3 * lipschitz / width.value
    while True:
        if width.halve_if_stalled(run):
            x = v = run.best_x
            A = 0.0
        radius = width.value
        for _ in range(DOUBLINGS + 1):
            a = _weight(A, lam)
            y = (A * x + a * v) / (A + a)
            samples = normal_samples(max(2, run.width - 1), len(x), antithetic, rng)
            _, gradients = run.ask(y + radius * samples, candidate=x, weight=a)
            size = float(np.linalg.norm(gradients, axis=1).mean())
            if size == 0:
                return
            u = proximal_step(SmoothedGradients(samples, gradients, radius), ball, y, lam, size)
            length = float(np.linalg.norm(u))
            if length <= radius:
                break
            lam *= 2
        x = y + u
        A += a
        v = ball.project(v + a * lam * u)
        if length < radius / 2:
            lam /= 2


def proximal_step(
    smoothed: SmoothedGradients, ball: LpBall, y: Vector, lam: float, size: float
) -> Vector:
    """Return u that minimizes f_ϱ(y + u) + λ‖u‖²/2 over ‖u‖ ≤ 1.5 ϱ and the feasible set.

    Projected gradient steps on the batch's estimate; they end where the weights rest on too few
    samples.
    """
    limit = REACH * smoothed.width
    rate = 1 / (lam + size / smoothed.width)
    least = LEAST_SAMPLES * len(smoothed.samples)
    u = previous = np.zeros_like(y)
    for _ in range(INNER_STEPS):
        gradient, effective = smoothed.at(u)
        if effective < least:
            return previous
        moved = ball.project(y + u - rate * (gradient + lam * u)) - y
        # y is feasible, so a shorter u is too.
        moved *= min(1.0, limit / max(float(np.linalg.norm(moved)), 1e-300))
        previous, u = u, moved
        if np.linalg.norm(u - previous) <= 1e-4 * limit:
            break
    return u


def _weight(A: float, lam: float) -> float:
    """Return a > 0 with λa² = A + a."""
    return (1 + math.sqrt(1 + 4 * A * lam)) / (2 * lam)
