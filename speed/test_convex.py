"""Rounds of EllipsoidOCO beside projections by DAQP, and beside the targets of its rates."""

from __future__ import annotations

import time

import numpy as np
import pytest
import threadpoolctl

from thalweg.claims.convex.ellipsoid_oco import polytope_projection
from thalweg.convex import EllipsoidOCO, ProjectedOGD, SeparationOracle
from thalweg.tasks import drifting_losses, thin_ellipsoid, thin_polytope


@pytest.fixture(autouse=True)
def one_blas_thread():
    """Compare on one core: the products are small, and idle threads make them erratic."""
    with threadpoolctl.threadpool_limits(1):
        yield


def tall_player(dim, rows, rounds):
    polytope = thin_polytope(dim, rows, 100.0, rng=0)
    return polytope, EllipsoidOCO(
        SeparationOracle.polytope(polytope.A, polytope.b),
        dim,
        radius=polytope.radius,
        inner_radius=polytope.inner_radius,
        feasible_point=polytope.start,
        horizon=rounds,
    )


def play(player, losses):
    for gradient in losses:
        player.select()
        player.update(gradient)


def rounds_per_second(player, losses):
    started = time.perf_counter()
    play(player, losses)
    return len(losses) / (time.perf_counter() - started)


def test_small_dimension(benchmark):
    ellipsoid = thin_ellipsoid(5, 100.0, rng=0)
    losses = drifting_losses(5, 1000, rng=1)

    def run():
        play(
            EllipsoidOCO(
                SeparationOracle.ellipsoid(ellipsoid.shape, np.zeros(5)),
                5,
                radius=2.0,
                inner_radius=0.01,
                feasible_point=ellipsoid.start,
                horizon=1000,
            ),
            losses,
        )

    benchmark.pedantic(run, rounds=3)
    assert 1000 / benchmark.stats.stats.min > 2000  # rounds per second, the specification's


def test_many_rows():
    _, player = tall_player(50, 5000, 600)
    assert rounds_per_second(player, drifting_losses(50, 600, rng=1)) > 100


def test_a_round_beside_a_projection():
    losses = drifting_losses(20, 200, rng=1)
    polytope, player = tall_player(20, 5000, 200)
    project = polytope_projection(polytope.A, polytope.b)
    projected = ProjectedOGD(project, polytope.start, radius=polytope.radius, horizon=200)
    ratio = rounds_per_second(player, losses) / rounds_per_second(projected, losses)
    print(f"\nrounds per second over DAQP's: {ratio:.3g}")
    assert ratio > 0.2


def test_five_hundred_dimensions():
    ellipsoid = thin_ellipsoid(500, 10.0, n_long=250, rng=0)
    player = EllipsoidOCO(
        SeparationOracle.ellipsoid(ellipsoid.shape, np.zeros(500)),
        500,
        radius=2.0,
        inner_radius=0.1,
        feasible_point=ellipsoid.start,
        horizon=100,
    )
    rate = rounds_per_second(player, drifting_losses(500, 100, rng=1))
    print(f"\nrounds per second at d = 500: {rate:.3g}")
    assert rate > 5
