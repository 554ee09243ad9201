"""Normalized decentralized bilevel optimization under heavy-tailed noise (NVR-DSBO)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from scipy.optimize import OptimizeResult

from thalweg.bilevel.agent_gradients import (
    AgentGradients,
    CountedGradients,
    Directions,
    Rows,
    agent_gradients,
    implicit_directions,
    largest_curvature,
    penalty_directions,
)
from thalweg.bilevel.agent_networks import check_mixing
from thalweg.bilevel.decentralized_run import DecentralizedRun, Network
from thalweg.bilevel.tracked_steps import AgentSteps, Normalize, StepSettings, array_module
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.minimizers import intermediate_report
from thalweg.common.random import RNGLike, as_generator

Schedule = Literal["theory", "constant"] | Callable[[int], float]

HORIZON = 2000  # steps of a run for which lr and beta are what they are given as


def decentralized_bilevel(
    f: Any,
    g: Any,
    x0: Any,
    y0: Any,
    *,
    W: Any,
    sampler: Callable[[np.random.Generator], Any],
    maxiter: int = 2000,
    lr: tuple[float, float, float] = (0.003, 0.01, 0.01),
    penalty: float = 5.0,
    beta: float = 0.1,
    p_moment: float = 1.5,
    warm_batch: int = 32,
    schedule: Schedule = "theory",
    normalize: Normalize = "agent",
    clip: float | None = None,
    variance_reduction: bool = True,
    hyper: Literal["penalty", "aid"] = "penalty",
    hvp: Callable[..., Any] | None = None,
    neumann_terms: int = 20,
    neumann_step: float | None = None,
    comm: Callable[[Any], Any] | None = None,
    record_every: int | None = None,
    rng: RNGLike = None,
    callback: Callable[..., Any] | None = None,
    show_progress: bool | None = False,
) -> OptimizeResult:
    r"""Minimize the agents' mean upper loss, where y minimizes their mean lower one, on a network.

    .. math:: \min_x \frac1n \sum_i f_i(x, y^*(x)), \qquad
              y^*(x) \in \arg\min_y \frac1n \sum_i g_i(x, y)

    Each agent has one sample of its own losses per step, exchanges vectors with neighbors only, and
    divides its directions by their lengths: noise of infinite variance cannot throw it far, and
    there is no threshold to tune. The lower level need not be convex.

    Parameters
    ----------
    f, g : callable, or list of callables
        ``f(X, Y, batch)`` and ``g(X, Y, batch)``: the pair of stochastic gradients (∇ₓ, ∇ᵧ), for
        rows X of shape (n, p) and Y of shape (n, q), one for each agent, as arrays of these shapes.
        Or n torch losses ``f[i](x, y, batch)``, scalar tensors, of x and y in the layout of x0 and
        y0; where all are one function, agents are vectorized.
    x0, y0 : array_like of shapes (p,) and (q,), or trees of tensors
        Where all agents start. With torch losses: a tensor, or dicts, lists and tuples of them.
    W : array_like or sparse array of shape (n, n)
        Symmetric, doubly stochastic weights of the network, as of `mixing_matrix`.
    sampler : callable
        ``sampler(rng)``: one batch for all agents, which is used several times. For torch losses
        its tensors have a row for each agent, or it is a ``list`` of n batches.
    maxiter : int ≥ 1
        T, the number of steps.
    lr : tuple of 3 floats > 0
        Step sizes α of x, y, z: the distances that agents move. With ``normalize=None`` they
        multiply directions. For ``hyper="aid"``, which has no z, the last is not used.
    penalty : float > 0
        λ. The error of the hypergradient is O(1/λ); noise in ∇ₓg is multiplied by it.
    beta : float in (0, 1]
        β, the weight of fresh samples. With 1 the estimate is the fresh direction.
    p_moment : float in (1, 2]
        s, the order of the moment of the noise that is finite: for ``schedule="theory"`` only. See
        `heavy_tail_report`.
    warm_batch : int ≥ 1
        Samples in the first estimate, which is remembered for 1/β steps.
    schedule : {"theory", "constant"} or callable
        "theory" multiplies lr and beta by (T / 2000)^(-s/(2s-1)), so that they mean those of a run
        of 2000 steps; "constant" takes them as they are; ``schedule(t)`` is a factor of lr.
    normalize : {"agent", "block", "joint"} or None
        Divide each of x, y, z of each agent by its own length; by the root mean square of all
        agents' lengths, which costs a sum over the network; or all three blocks of an agent by
        their common length. None is tracked STORM without normalization.
    clip : float > 0, optional
        Cut each agent's sampled directions, block by block, down to this length. The method needs
        none; with ``normalize=None, beta=1`` it is clipped decentralized SGD.
    variance_reduction : bool
        Whether the estimate has STORM's correction; without it, it is momentum, for half of the
        gradients.
    hyper : {"penalty", "aid"}
        First-order directions of the penalty; or implicit differentiation, for which g must be
        strongly convex in y, with a Neumann series that agents mix after each term.
    hvp : callable, optional
        For "aid" with NumPy gradients: ``hvp(X, Y, V, batch)`` returns (∇²ₓᵧg V, ∇²ᵧᵧg V).
    neumann_terms : int ≥ 1
        Terms of the series.
    neumann_step : float > 0, optional
        Its step η; by default half the inverse of the largest eigenvalue of ∇²ᵧᵧg at the start.
    comm : callable, optional
        ``comm(M)`` in place of W M, for matrices M with n rows: links that fail, compress or count.
        It must keep the mean of the rows.
    record_every : int ≥ 1, optional
        Steps between records; by default a hundred records.
    rng : int, Generator or None
        What ``sampler`` draws from.
    callback : callable, optional
        Called at each record as ``callback(x)`` with the mean of all agents' x, or as
        ``callback(intermediate_result=...)`` if that is its only parameter's name. It stops the run
        by raising `StopIteration`.
    show_progress : bool or None
        Show a progress bar; None does if stderr is a terminal.

    Returns
    -------
    scipy.optimize.OptimizeResult
        ``x``, ``y``, ``z``: means over the agents, in the layout of x0 and y0 (z is None for
        "aid"); ``x_avg``, ``y_avg``: also over the last quarter of the steps, which is what to take
        with constant steps; ``X``, ``Y``, ``Z``: the agents' own, of shapes (n, p) and (n, q);
        ``grad_norm``: the length of the mean tracker of x, over the last quarter, an estimate of
        the gradient's; ``consensus_x``, ``consensus_y``, ``consensus_z``: root mean square
        distances of agents from the mean; ``lr`` and ``beta`` as used; ``nit``; ``n_grad_f``,
        ``n_grad_g`` and ``n_hvp``: evaluations of samples by all agents; ``n_skipped``: samples
        that were not finite, where an agent kept its estimate; ``n_messages`` (2 per step and
        neighbor) and ``bits_sent``, over all links; ``history``, a dict of arrays with a row for
        each record: ``nit``, ``time`` in seconds without that of recording, ``grad_norm``,
        consensus errors, ``bits_sent``.
        ``success`` is whether ``status`` is 0; it is 2 after Ctrl-C, 3 where more than 5 % of the
        samples were not finite, 99 when the callback stopped the run.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described: among others a W that is not doubly stochastic
        (to 1e-8) or not connected; a sampler whose batch gives other gradients when it is used
        again, except where no batch is; gradients at the start that are never finite.

    Warns
    -----
    UserWarning
        If ∇ᵧf/λ dominates ∇ᵧg to the end: y is not near a minimizer of g; raise the penalty.

    Notes
    -----
    *Steps.* With d the directions of the penalty f + λ(g(x, y) - g(x, z)), where z approaches a
    minimizer of g alone, and one sample ζ for both points:

    .. math:: m_i^t &= d_i(\theta_i^t; \zeta_i^t)
                       + (1 - \beta) (m_i^{t-1} - d_i(\theta_i^{t-1}; \zeta_i^t)) \\
              u_i^t &= \sum_j W_{ij} (u_j^{t-1} + m_j^t - m_j^{t-1}) \\
              \theta_i^{t+1} &= \sum_j W_{ij} \theta_j^t - \alpha\, u_i^t / \|u_i^t\|

    *Cost.* Per step, agent and sample: 2 gradients of f and 4 of g (half without variance
    reduction), and 2 messages of p + 2q numbers to each neighbor. Five matrices of n (p + 2q)
    numbers of memory.

    *Rates.* The mean gradient norm, not its square, falls as T^(-(s-1)/(2s-1)). Normalized steps
    never get small by themselves: take ``x_avg``, or a decreasing schedule.

    *What to expect.* With symmetric noise a clip whose threshold is tuned is unbiased, and hard to
    beat; this method spares the tuning. Per-sample normalization (``beta=1``) is biased where tails
    are not symmetric.

    *Ours.* The abstract names normalization, variance reduction and a nonconvex lower level. Ours
    are the penalty, as second-order hypergradients need an invertible Hessian; STORM; tracking
    before normalizing, since the mean of the trackers is then that of the estimates; the reference
    horizon of "theory"; the meaning of "block" and "joint"; mixing in the Neumann series; and
    warm starts.

    References
    ----------
    "Decentralized bilevel under heavy-tailed noise", NeurIPS 2026.
    A. Cutkosky and F. Orabona, "Momentum-based variance reduction in non-convex SGD", NeurIPS 2019.
    J. Kwon et al., "A fully first-order method for stochastic bilevel optimization", ICML 2023.
    H. Gao, B. Gu and M. T. Thai, "On the convergence of distributed stochastic bilevel optimization
    algorithms over a network", AISTATS 2023.

    Examples
    --------
    Four agents on a ring, with noise that has no variance. The lower level makes y = x, and the
    upper one wants x to be the mean of the a_i:

    >>> import networkx
    >>> import numpy as np
    >>> from thalweg.bilevel import decentralized_bilevel, mixing_matrix
    >>> a = np.array([[1.0], [2.0], [3.0], [6.0]])
    >>> def f(X, Y, noise):
    ...     return 0 * X, Y - a + noise
    >>> def g(X, Y, noise):
    ...     return X - Y + noise, Y - X + noise
    >>> result = decentralized_bilevel(
    ...     f, g, np.zeros(1), np.zeros(1),
    ...     W=mixing_matrix(networkx.cycle_graph(4)),
    ...     sampler=lambda rng: rng.standard_t(1.5, (4, 1)),
    ...     rng=0,
    ... )
    >>> bool(abs(result.x_avg[0] - 3) < 0.5)
    True
    """
    W = check_mixing(W)
    n = W.shape[0]
    gradients = agent_gradients(f, g, hvp, x0, y0, n)
    check_choice("hyper", hyper, ("penalty", "aid"))
    check_integer("maxiter", maxiter, at_least=1)
    check_integer("warm_batch", warm_batch, at_least=1)
    check_number("penalty", penalty, above=0)
    check_integer("neumann_terms", neumann_terms, at_least=1)
    if record_every is not None:
        check_integer("record_every", record_every, at_least=1)
    for name, function in (("sampler", sampler), ("comm", comm)):
        if not callable(function) and not (name == "comm" and function is None):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    settings = _settings(
        lr, beta, p_moment, schedule, maxiter, normalize, clip, variance_reduction, hyper
    )
    report = intermediate_report(callback)
    counted = CountedGradients(gradients, n)
    theta, blocks = _start(gradients, n, hyper)
    network = Network(W, comm, theta)
    draw = functools.partial(sampler, as_generator(rng))
    directions: Directions
    concatenate = array_module(theta).concatenate
    if hyper == "penalty":
        directions = penalty_directions(counted, blocks, penalty, concatenate)
    else:
        eta = _neumann_step(counted, neumann_step, theta, blocks, draw)
        directions = implicit_directions(
            counted, blocks, neumann_terms, eta, network.mix, concatenate
        )
    steps = AgentSteps(directions, draw, network.mix, theta, blocks, settings)
    run = DecentralizedRun(
        steps, counted, network, maxiter, penalty if hyper == "penalty" else None
    )
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is skipped and counted
        status, history = run.run(warm_batch, record_every, report, show_progress)
    return run.result(status, history)


def _settings(
    lr: Any,
    beta: float,
    p_moment: float,
    schedule: Schedule,
    maxiter: int,
    normalize: Normalize,
    clip: float | None,
    variance_reduction: bool,
    hyper: str,
) -> StepSettings:
    if not isinstance(lr, (tuple, list)) or len(lr) != 3:
        raise ValueError(f"lr must hold three step sizes, of x, y and z, got {lr!r}")
    sizes = tuple(check_number(f"lr[{i}]", size, above=0) for i, size in enumerate(lr))
    check_number("beta", beta, above=0, at_most=1)
    s = check_number("p_moment", p_moment, above=1, at_most=2)
    check_choice("normalize", normalize, ("agent", "block", "joint", None))
    check_choice("variance_reduction", variance_reduction, (True, False))
    if clip is not None:
        check_number("clip", clip, above=0)
    if not callable(schedule):
        check_choice("schedule", schedule, ("theory", "constant"))
    factor = 1.0
    if schedule == "theory":
        # The error of the estimate, β^(1-1/s) σ + α L β^(-1/s), and descent, 1/(αT), balance where
        # α and β both fall like this.
        factor = (maxiter / HORIZON) ** (-s / (2 * s - 1))
    return StepSettings(
        lr=tuple(factor * size for size in sizes[: 3 if hyper == "penalty" else 2]),
        schedule=schedule if callable(schedule) else _always_one,
        beta=min(1.0, factor * beta),
        correct=variance_reduction,
        normalize=normalize,
        clip=clip,
    )


def _always_one(t: int) -> float:
    return 1.0


def _start(gradients: AgentGradients, n: int, hyper: str) -> tuple[Rows, list[slice]]:
    """Return the agents' equal rows (x, y, z) or (x, y), and the columns of each block."""
    x, y = gradients.x0, gradients.y0
    parts = [x, y, y] if hyper == "penalty" else [x, y]
    ends = np.cumsum([0, *(len(part) for part in parts)]).tolist()
    xp = array_module(x)
    rows = xp.stack([xp.concatenate(parts)] * n)
    return rows, [slice(start, end) for start, end in itertools.pairwise(ends)]


def _neumann_step(
    gradients: CountedGradients,
    given: float | None,
    theta: Rows,
    blocks: list[slice],
    draw: Callable[[], Any],
) -> float:
    if not gradients.has_hvp:
        raise ValueError("hvp must be given for hyper='aid' with NumPy gradients")
    if given is not None:
        return check_number("neumann_step", given, above=0)
    X, Y = (theta[:, block] for block in blocks)
    largest = largest_curvature(gradients, X, Y, draw())
    if not 0 < largest < math.inf:
        raise ValueError(
            "neumann_step must be given where the curvature of g in y is not positive and finite "
            f"at the start, got {largest:g}"
        )
    return 0.5 / largest
