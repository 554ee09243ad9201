"""The median of blocks beside torch.median, and ClippedMoM beside gradient accumulation."""

from __future__ import annotations

import timeit

import pytest
import torch

from thalweg.tasks import transformer_shapes
from thalweg.training import ClippedMoM
from thalweg.training.median_network import median_in_place

N = 10**7


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("k", [3, 5, 15])
def test_aggregate(benchmark, k):
    lanes = list(torch.randn(k, N, generator=torch.Generator().manual_seed(0)))
    benchmark.group = f"median of {k} blocks of 10⁷"
    benchmark.pedantic(lambda: median_in_place(lanes), rounds=7, warmup_rounds=1)


def test_five_blocks_are_far_faster_than_torch_median(threads, capsys, seconds_in_turn):
    """The network keeps its lanes in the cache; a copy of the lanes is the yardstick."""
    g = torch.randn(5, N, generator=torch.Generator().manual_seed(0))
    lanes = list(g.clone())
    best = seconds_in_turn(
        {
            "network": lambda: median_in_place(lanes),
            "copy of the blocks": g.clone,
        },
        rounds=7,
    )
    best["torch.median"] = timeit.timeit(lambda: torch.median(g, 0), number=1)
    with capsys.disabled():
        print(f"\n{threads} threads:", {k: f"{v * 1e3:.0f} ms" for k, v in best.items()})
    assert best["network"] <= 0.2 * best["torch.median"]
    assert best["network"] <= 3.0 * best["copy of the blocks"]


def test_the_step_on_a_transformer(threads, capsys, seconds_in_turn):
    """What five micro-batches cost: ClippedMoM against adding gradients up and AdamW's step.

    Adding up makes 3 passes over 50 M numbers per micro-batch, and so does `accumulate`, with one
    more for the check of finiteness. The step reads five blocks, and clips.
    """
    generator = torch.Generator().manual_seed(0)
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02)
        for shape in transformer_shapes()
    ]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    sums = [p.grad.clone() for p in params]
    adamw = torch.optim.AdamW(params, lr=1e-9, foreach=True)
    mom = ClippedMoM(params, lr=1e-9, k=5)

    def accumulating():
        for _ in range(5):
            torch._foreach_add_(sums, [p.grad for p in params], alpha=1e-9)
        adamw.step()

    def with_medians():
        for _ in range(5):
            mom.accumulate()
        mom.step()

    accumulating()
    with_medians()
    best = seconds_in_turn({"AdamW": accumulating, "ClippedMoM": with_medians}, rounds=5)
    ratio = best["ClippedMoM"] / best["AdamW"]
    with capsys.disabled():
        print(f"\n{threads} threads: ClippedMoM takes {ratio:.2f} of accumulation with AdamW")
    assert ratio <= 2.5
