"""MS-SR's direction beside netket's minSR, and a plain Gram matrix and its Cholesky solve."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from thalweg.curvature import ms_sr_direction

pytestmark = pytest.mark.usefixtures("one_thread")

N, P = 1024, 100_000


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    jac = torch.randn(N, P, generator=generator, dtype=torch.float32)
    return jac, torch.randn(N, generator=generator, dtype=torch.float64)


def min_sr(jac, energy, shift=1e-3):
    """MinSR at a fixed shift, in the precision of the log-derivatives."""
    A = (jac - jac.mean(0)) / N**0.5
    y = ((energy - energy.mean()) / N**0.5).to(A.dtype)
    K = A @ A.T + shift * torch.eye(N, dtype=A.dtype)
    return A.T @ torch.cholesky_solve(y[:, None], torch.linalg.cholesky(K))[:, 0]


def netket_min_sr(jac, energy):
    """Return netket's kernel solve, compiled, in the double precision that it sets."""
    pytest.importorskip("netket")
    import jax
    import jax.numpy as jnp
    from netket._src.ngd.srt import _compute_srt_update
    from netket.optimizer.solver import cholesky

    A = jnp.asarray((jac - jac.mean(0)).double().numpy()) / N**0.5
    y = jnp.asarray((energy - energy.mean()).numpy()) / N**0.5
    update = partial(
        _compute_srt_update,
        diag_shift=1e-3,
        solver_fn=cholesky,
        mode="real",
        params_structure=jax.ShapeDtypeStruct((P,), A.dtype),
    )
    update(A, y)[0].block_until_ready()
    return lambda: update(A, y)[0].block_until_ready()


METHODS = {
    "minSR, torch": min_sr,
    "fixed shift": partial(ms_sr_direction, shifts=[1e-3]),
    "MS-SR, 5 folds": ms_sr_direction,
    "MS-SR, 2 shards": partial(ms_sr_direction, mode="shards", n_solves=2),
}


@pytest.mark.parametrize("name", METHODS)
def test_direction(benchmark, batch, name):
    benchmark.group = f"direction, {N} samples, {P} parameters"
    benchmark.pedantic(METHODS[name], args=batch, rounds=2, warmup_rounds=1)


def test_ratios(batch, capsys, seconds_in_turn):
    """The folds' eigendecompositions must not cost more than half the symmetry saves."""
    run = {name: lambda f=function: f(*batch) for name, function in METHODS.items()}
    run["minSR, netket"] = netket_min_sr(*batch)
    best = seconds_in_turn(run, 3)
    with capsys.disabled():
        print(
            "\nof netket's minSR: ",
            {k: f"{v / best['minSR, netket']:.2f}" for k, v in best.items()},
        )
    assert best["MS-SR, 5 folds"] <= 1.3 * best["minSR, netket"]
    assert best["MS-SR, 5 folds"] <= 2.0 * best["minSR, torch"]
    assert best["MS-SR, 2 shards"] <= 1.3 * best["minSR, torch"]
