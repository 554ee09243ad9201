"""Annealed SGD beside the bare NumPy loop, and its scheduler beside torch's."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch

from thalweg.tasks import soft_rastrigin
from thalweg.training import AnnealLR, minimize_annealed_sgd

FUNCTION = soft_rastrigin()


def anneal(starts, steps):
    return minimize_annealed_sgd(
        FUNCTION.fun,
        starts,
        jac=FUNCTION.jac,
        vectorized=True,
        sigma=6.0,
        L=10.4,
        maxiter=steps,
        polish=False,
        rng=0,
    )


def bare_loop(starts, steps):
    """Do the same arithmetic, and nothing else."""
    rng = np.random.default_rng(0)
    x = starts.copy()
    noise = None
    for k in range(steps):
        if k % 256 == 0:
            noise = rng.standard_normal((256, *x.shape))
        x = x - 0.01 * (FUNCTION.jac(x) + 6.0 * noise[k % 256])
    return x


def test_chain_steps(benchmark):
    starts = FUNCTION.starts(100, 10, np.random.default_rng(0))
    benchmark.group = "1000 steps of 100 chains in 10 dimensions"
    benchmark.pedantic(lambda: anneal(starts, 1000), rounds=5, warmup_rounds=1)


def test_the_machinery_costs_little_beside_the_gradients(capsys, seconds_in_turn):
    for chains, n in ((100, 2), (100, 10), (8, 10_000)):
        starts = FUNCTION.starts(chains, n, np.random.default_rng(0))
        steps = 100 if n > 100 else 2000
        best = seconds_in_turn(
            {
                "ours": partial(anneal, starts, steps),
                "bare": partial(bare_loop, starts, steps),
            },
            rounds=5,
        )
        ratio = best["ours"] / best["bare"]
        rate = chains * steps / best["ours"]
        with capsys.disabled():
            print(f"\n{chains} chains, n = {n}: {ratio:.2f} of a bare loop, {rate:.2g} steps/s")
        assert ratio <= 2.0
        if n == 10:
            assert rate >= 5e5


def test_the_scheduler_costs_as_much_as_torchs(capsys, seconds_in_turn):
    def stepping(make):
        params = [torch.nn.Parameter(torch.zeros(1))]
        optimizer = torch.optim.SGD([{"params": p} for p in params], lr=0.1)
        scheduler = make(optimizer)
        optimizer.step()
        return lambda: [scheduler.step() for _ in range(500)]

    best = {"ours": math.inf, "cosine": math.inf}
    for _ in range(7):
        timed = seconds_in_turn(
            {
                "ours": stepping(lambda o: AnnealLR(o, 10_000)),
                "cosine": stepping(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10_000)),
            },
            rounds=1,
        )
        best = {name: min(best[name], timed[name]) for name in best}
    with capsys.disabled():
        print(f"\nAnnealLR takes {best['ours'] / best['cosine']:.2f} of CosineAnnealingLR")
    assert best["ours"] <= 1.5 * best["cosine"]
