"""How claims run solvers of the interface of `decentralized_bilevel`, and what they measure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult

from thalweg.bilevel import mixing_matrix
from thalweg.common.optional import requires
from thalweg.evidence import Measurement
from thalweg.tasks import AgentQuadratics

Array = NDArray[np.float64]
Solver = Callable[..., Any]

NOISE = 0.03  # of entries of the perceptron's gradients


def ring(n: int) -> Array:
    """Return the mixing matrix of a ring."""
    with requires("bilevel"):
        import networkx

    return mixing_matrix(networkx.cycle_graph(n))


def mean_of_rows(rows: Array) -> Array:
    """Return the mean in every row: the communication of a center."""
    return np.broadcast_to(rows.mean(axis=0), rows.shape)


def hypergradient_norm(
    solver: Solver,
    problem: AgentQuadratics,
    steps: int,
    rng: np.random.Generator,
    settings: dict[str, Any],
) -> Measurement:
    """Run a solver; return the mean norm of the true hypergradient over the last quarter."""
    n, p, q = problem.sizes
    norms: list[tuple[int, float]] = []

    def record(intermediate_result: OptimizeResult) -> None:
        x = intermediate_result.x
        norm = float(np.linalg.norm(problem.hypergradient(x))) if np.isfinite(x).all() else np.inf
        norms.append((intermediate_result.nit, norm))

    lr, fixed = settings["lr"], settings.copy()
    if fixed.get("beta") == "fresh":
        fixed["beta"] = 1.0
    result = solver(
        problem.grad_f,
        problem.grad_g,
        np.zeros(p),
        np.zeros(q),
        W=ring(n),
        sampler=problem.draw,
        maxiter=steps,
        callback=record,
        rng=rng,
        **(fixed | {"lr": (lr / 3, lr, lr)}),
    )
    at, values = np.array(norms).T
    if not result.success:
        return Measurement(float("inf"))
    return Measurement(float(np.mean(values[at > 0.75 * steps])), curve=(at, values))


def clean_digits(
    solver: Solver, rng: np.random.Generator, steps: int, lr: float, settings: dict[str, Any]
) -> Measurement:
    """Run a solver on digits with flipped labels; return the held-out loss of the mean model."""
    from thalweg.tasks import agent_cleaning as task

    for_instance, for_contender = rng.spawn(2)
    sites = task.cleaning_sites(for_instance)
    x0, y0 = task.cleaning_start(for_instance)
    size = sum(part.numel() for part in y0.values())
    result = solver(
        [task.clean_loss] * task.SITES,
        [task.weighted_loss] * task.SITES,
        x0,
        y0,
        W=ring(task.SITES),
        sampler=lambda stream: sites.draw(stream, size, NOISE, 1.5),
        maxiter=steps,
        lr=(lr, lr, lr),
        warm_batch=8,
        rng=for_contender,
        **settings,
    )
    loss, accuracy = task.held_out_loss(result.y)
    if not result.success or not np.isfinite(loss):
        return Measurement(float("inf"))
    return Measurement(loss, extras={"accuracy": accuracy})
