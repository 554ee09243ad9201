"""Medians of means: the estimator, the plan, clipped SGD and SSTM, bad input."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.optimize import OptimizeWarning, minimize
from torch import nn

from thalweg.tasks import load_digits
from thalweg.training import (
    ClippedMoM,
    ClippedSSTM,
    choose_blocks,
    median_of_means,
    minimize_clipped_mom,
    tail_report,
)
from thalweg.training.median_network import median_in_place, median_network
from thalweg.training.mom_minimize import block_median


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def samples(n=21, d=6, seed=0):
    return torch.randn(n, d, generator=seeded(seed), dtype=torch.float64)


# The network


@pytest.mark.parametrize("k", [1, 3, 5, 7, 9, 11, 13, 15])
def test_the_network_finds_the_median_of_all_zeros_and_ones(k):
    """By the 0-1 principle it then finds the median of anything."""
    rows = itertools.product([0.0, 1.0], repeat=k)
    lanes = torch.tensor(list(rows)).T.contiguous()
    expected = lanes.median(0).values
    assert torch.equal(median_in_place([lane.clone() for lane in lanes]), expected)


def test_the_network_is_short():
    assert [len(median_network(k)) for k in (3, 5, 7, 9)] == [3, 7, 13, 19]


@pytest.mark.parametrize("k", [3, 5, 21, 35])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_network_is_torchs_median_bit_for_bit(k, dtype):
    lanes = torch.randint(-9, 9, (k, 70_001), generator=seeded()).to(dtype) / 7
    lanes[:, :500] = torch.randn(k, 500, generator=seeded()).to(dtype)
    found = median_in_place([lane.clone() for lane in lanes])
    assert torch.equal(found, lanes.median(0).values)


# The estimator


def test_one_block_is_the_mean_and_n_blocks_are_the_median():
    g = samples(21)
    torch.testing.assert_close(median_of_means(g, 1), g.mean(0), rtol=1e-12, atol=1e-12)
    assert torch.equal(median_of_means(g, 21), g.median(0).values)


@pytest.mark.parametrize("k", [3, 5, 9])
@pytest.mark.parametrize("n", [9, 10, 45])
def test_blocks_take_turns(n, k):
    g = samples(n)
    means = torch.stack([g[j::k].mean(0) for j in range(k)])
    torch.testing.assert_close(median_of_means(g, k), means.median(0).values, rtol=1e-12, atol=0)
    np.testing.assert_allclose(block_median(g.numpy(), k), means.median(0).values, rtol=1e-12)


def test_any_axis_may_hold_the_samples():
    g = samples(10, 6)
    for dim in (1, -1):
        assert torch.equal(median_of_means(g.T.contiguous(), 5, dim=dim), median_of_means(g, 5))


@given(
    shift=st.floats(-1e3, 1e3),
    exponent=st.integers(-20, 20),
    aggregator=st.sampled_from(["median", "geometric", "medoid", "trimmed", "mean"]),
)
def test_it_moves_and_scales_with_the_samples(shift, exponent, aggregator):
    g = samples(15)
    base = median_of_means(g, 5, aggregator=aggregator)
    moved = median_of_means(g + shift, 5, aggregator=aggregator)
    torch.testing.assert_close(moved, base + shift, rtol=1e-6, atol=1e-6)
    scale = 2.0**exponent
    if aggregator == "geometric":
        return  # its smoothing has a scale
    scaled = median_of_means(g * scale, 5, aggregator=aggregator)
    assert torch.equal(scaled, base * scale)


def test_only_geometric_aggregators_commute_with_rotations():
    g = samples(15)
    rotation = torch.linalg.qr(samples(6, 6, 1)).Q

    def defect(aggregator):
        turned = median_of_means(g @ rotation, 5, aggregator=aggregator)
        return float((turned - median_of_means(g, 5, aggregator=aggregator) @ rotation).norm())

    assert defect("medoid") < 1e-12
    # Eight iterations still know a little of their start, the coordinatewise median.
    assert defect("geometric") < 0.1 * defect("median")


def test_the_geometric_median_minimizes_the_sum_of_distances():
    g = samples(9, 2)
    found = median_of_means(g, 9, aggregator="geometric")

    def total(x):
        return float((g - torch.from_numpy(np.asarray(x))).norm(dim=1).sum())

    best = minimize(total, g.mean(0).numpy(), method="Nelder-Mead", options={"xatol": 1e-9})
    assert total(found.numpy()) <= best.fun * (1 + 1e-4)


def test_the_medoid_and_the_trimmed_mean():
    g = torch.tensor([[0.0], [1.0], [2.0], [10.0], [50.0]])
    assert median_of_means(g, 5, aggregator="medoid").item() == 2.0
    assert median_of_means(g, 5, aggregator="trimmed").item() == pytest.approx(13 / 3)
    assert median_of_means(g, 5, aggregator="mean").item() == pytest.approx(12.6)


@pytest.mark.parametrize("aggregator", ["median", "geometric"])
def test_it_breaks_down_at_a_majority(aggregator):
    g = samples(35, 4)
    clean = g.clone()
    for j in range(2):
        g[j::5] = 1e12
    rest = torch.stack([clean[j::5].mean(0) for j in (2, 3, 4)])
    found = median_of_means(g, 5, aggregator=aggregator)
    if aggregator == "median":
        assert (found >= rest.min(0).values - 1e-12).all()
        assert (found <= rest.max(0).values + 1e-12).all()
    assert found.abs().max() < 100
    g[2::5] = 1e12
    assert median_of_means(g, 5, aggregator=aggregator).min() > 1e11


def test_the_variance_of_the_median_of_gaussians():
    """Over that of the mean, 1.5254 at k = 15 (by quadrature of the middle order statistic)."""

    def density(x):
        F = stats.norm.cdf(x)
        return math.factorial(15) / math.factorial(7) ** 2 * (F * (1 - F)) ** 7 * stats.norm.pdf(x)

    exact = 15 * integrate.quad(lambda x: x * x * density(x), -6, 6)[0]
    assert exact == pytest.approx(1.5254, abs=1e-4)
    g = torch.randn(105, 20_000, generator=seeded())
    ratio = median_of_means(g, 15).var() / g.mean(0).var()
    # Standard error of a ratio of variances with 20 000 values: about 1.2 %.
    assert float(ratio) == pytest.approx(exact, abs=0.06)


def test_variance_is_finite_where_the_rule_says_so():
    """Medians of five Cauchy variables have second moment 1.2213; of three, none."""
    exact = integrate.quad(
        lambda u: 30 * u**2 * (1 - u) ** 2 * math.tan(math.pi * (u - 0.5)) ** 2, 0, 1
    )[0]
    assert exact == pytest.approx(1.2213, abs=1e-4)
    g = torch.from_numpy(np.random.default_rng(0).standard_cauchy((5, 1_000_000)))
    five, three = median_of_means(g, 5).square(), median_of_means(g[:3], 3).square()
    # The fourth moment is infinite: the mean converges, slowly.
    assert float(five.mean()) == pytest.approx(exact, rel=0.1)
    # Without a second moment the mean of a thousand times as many is larger than the typical one.
    typical = {name: x.view(1000, -1).mean(1).median() for name, x in (("5", five), ("3", three))}
    assert float(typical["5"] / five.mean()) > 0.9
    assert float(typical["3"] / three.mean()) < 0.8


def test_smoothing_adds_its_noise_to_every_block():
    g = torch.zeros(9, 50_000)
    smoothed = median_of_means(g, 9, smooth=2.0, generator=seeded())
    direct = 2 * torch.randn(9, 50_000, generator=seeded(1)).median(0).values
    assert float(smoothed.var()) == pytest.approx(float(direct.var()), rel=0.05)
    assert torch.equal(smoothed, median_of_means(g, 9, smooth=2.0, generator=seeded()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_blocks_that_are_not_finite_are_left_out(bad):
    g = samples(15)
    for n_bad in (1, 2):
        g[n_bad - 1, 0] = bad
        rest = torch.stack([g[j::5].mean(0) for j in range(n_bad, 5)])
        expected = np.median(rest.numpy(), axis=0)
        np.testing.assert_allclose(median_of_means(g, 5), expected, rtol=1e-12)
    g[2, 0] = bad
    with pytest.raises(RuntimeError, match="3 of 5 blocks are not finite; at most 2"):
        median_of_means(g, 5)


def test_half_precision_is_summed_in_single():
    g = torch.full((1000, 1), 1.001).bfloat16()
    assert median_of_means(g, 1).dtype == torch.bfloat16
    assert median_of_means(g, 1).item() == g[0].item()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 4}, ValueError, "k must be odd, got 4"),
        ({"k": 0}, ValueError, "k must be an integer >= 1, got 0"),
        ({"k": 23}, ValueError, "k must be at most the number of samples, 21, got 23"),
        ({"k": 5, "strict": True}, ValueError, "k must divide the number of samples, 21"),
        ({"k": 3, "dim": 2}, ValueError, r"dim must be an axis of g, of shape \(21, 6\), got 2"),
        ({"k": 3, "aggregator": "mode"}, ValueError, "aggregator must be one of 'median'"),
        ({"k": 3, "smooth": -1.0}, ValueError, "smooth must be a finite number >= 0"),
        ({"k": 3, "g": torch.ones(5, dtype=torch.int64)}, TypeError, "g must be a real floating"),
        ({"k": 3, "g": [1.0]}, TypeError, "g must be a real floating tensor, got list"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        median_of_means(**{"g": samples()} | arguments)


# The plan


@pytest.mark.parametrize(
    ("arguments", "k"),
    [
        ({"N": 105, "beta": 0.5}, 105),
        ({"N": 105, "beta": 0.8, "alpha": 1.5, "skew_weight": 0.5, "purpose": "estimate"}, 35),
        ({"N": 45, "beta": 0.8, "alpha": 1.9, "skew_weight": 0.3}, 9),
        ({"N": 15, "beta": 0.8, "alpha": 1.5, "skew_weight": 0.5}, 5),
        ({"N": 15, "alpha": 1.5, "skew_weight": 1.0}, 1),
        ({"N": 15}, 5),
        ({"N": 4}, 3),
        ({"N": 1}, 1),
    ],
)
def test_the_plans_of_the_bounds(arguments, k):
    plan = choose_blocks(**arguments)
    assert plan.k == k
    assert (plan.b, plan.m) == (arguments["N"] // k, (k - 1) // 2)


@pytest.mark.parametrize(("beta", "least"), [(1.0, 5), (0.8, 5), (0.5, 9), (0.2, 21)])
def test_the_variance_is_finite_from_the_least_k_on(beta, least):
    plan = choose_blocks(105, beta=beta, alpha=1.2, skew_weight=0.999)
    assert plan.k == least
    assert plan.finite_variance
    small = choose_blocks(least - 2, beta=beta)
    assert not small.finite_variance
    assert f"finite variance needs k >= {least}" in small.note


def test_notes_say_what_n_does_not_allow():
    assert "needs k >= 37, got 15" in choose_blocks(15, beta=0.5).note
    assert choose_blocks(105, beta=0.5).note == ""
    assert "biased" in choose_blocks(45, beta=0.8, alpha=1.9, skew_weight=0.3).note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"N": 0}, "N must be an integer >= 1, got 0"),
        ({"beta": 1.5}, "beta must be a finite number > 0 and <= 1, got 1.5"),
        ({"alpha": 1.0}, "alpha must be a finite number > 1 and <= 2, got 1"),
        ({"skew_weight": 2.0}, "skew_weight must be"),
        ({"delta": 0.0}, "delta must be"),
        ({"purpose": "win"}, "purpose must be one of 'estimate', 'optimize', got 'win'"),
    ],
)
def test_bad_plans_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_blocks(**{"N": 15} | arguments)


# The optimizer


def feed(optimizer, params, rows):
    """Give the optimizer one gradient per row, and step."""
    for row in rows:
        for p, grad in zip(params, row, strict=True):
            p.grad = None if grad is None else grad.to(p.dtype, copy=True)
        optimizer.accumulate()
    optimizer.step()


def parameter(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize("aggregator", ["median", "geometric", "medoid", "trimmed", "mean"])
@pytest.mark.parametrize("n", [5, 12])
def test_streaming_is_the_estimator_bit_for_bit(aggregator, n):
    x = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = ClippedMoM([x], lr=1.0, k=5, clip=math.inf, aggregator=aggregator)
    for seed in range(3):
        g = samples(n, 6, seed)
        before = x.detach().clone()
        feed(optimizer, [x], g[:, None])
        expected = before - median_of_means(g, 5, aggregator=aggregator)
        assert torch.equal(x.detach(), expected)


def test_without_clipping_and_blocks_it_is_sgd():
    ours, torchs = parameter(1.0, 2.0), parameter(1.0, 2.0)
    optimizer = ClippedMoM([ours], lr=0.1, k=1, clip=math.inf, momentum=0.9)
    sgd = torch.optim.SGD([torchs], lr=0.1, momentum=0.9)
    for _ in range(20):
        feed(optimizer, [ours], [[ours.detach() * torch.tensor([1.0, 0.3])]])
        torchs.grad = torchs.detach() * torch.tensor([1.0, 0.3])
        sgd.step()
    torch.testing.assert_close(ours, torchs, rtol=1e-12, atol=0)


def test_a_fixed_level_scales_the_whole_gradient():
    x, y = parameter(0.0), parameter(0.0)
    optimizer = ClippedMoM([x, y], lr=1.0, k=1, clip=1.0)
    feed(optimizer, [x, y], [[torch.tensor([3.0]), torch.tensor([4.0])]])
    assert (x.item(), y.item()) == pytest.approx((-0.6, -0.8))
    by_tensor = ClippedMoM([x, y], lr=1.0, k=1, clip=2.0, clip_scope="tensor")
    feed(by_tensor, [x, y], [[torch.tensor([0.5]), torch.tensor([4.0])]])
    assert (x.item(), y.item()) == pytest.approx((-1.1, -2.8))


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_auto_is_twice_the_running_median(scope):
    x = parameter(0.0)
    optimizer = ClippedMoM([x], lr=1.0, k=1, clip_scope=scope)
    norms = [3.0, 1.0, 100.0, 2.0, 50.0]
    levels = [3.0, 6.0, 4.0, 6.0, 5.0]  # the first passes; then 2 · median of those before
    for norm, level in zip(norms, levels, strict=True):
        before = x.item()
        feed(optimizer, [x], [[torch.tensor([norm])]])
        assert before - x.item() == pytest.approx(min(norm, level))
    assert optimizer.param_groups[0]["clock"]["norms"] == [norms]


def test_the_window_forgets():
    x = parameter(0.0)
    optimizer = ClippedMoM([x], lr=1.0, k=1)
    for norm in [1.0] * 60 + [10.0] * 100:
        feed(optimizer, [x], [[torch.tensor([norm])]])
    before = x.item()
    feed(optimizer, [x], [[torch.tensor([1e6])]])
    assert before - x.item() == pytest.approx(20.0)


def test_weight_decay_is_decoupled_and_maximize_ascends():
    x, y = parameter(2.0), parameter(2.0)
    decay = ClippedMoM([x], lr=0.1, k=1, weight_decay=0.5, clip=math.inf)
    feed(decay, [x], [[torch.tensor([3.0])]])
    assert x.item() == pytest.approx(2 * (1 - 0.05) - 0.3)
    ascend = ClippedMoM([y], lr=0.1, k=1, maximize=True, clip=math.inf)
    feed(ascend, [y], [[torch.tensor([3.0])]])
    assert y.item() == pytest.approx(2.3)


def test_momentum_averages_clipped_gradients():
    x = parameter(0.0)
    optimizer = ClippedMoM([x], lr=1.0, k=1, clip=1.0, momentum=0.5)
    for _ in range(2):
        feed(optimizer, [x], [[torch.tensor([7.0])]])
    assert x.item() == pytest.approx(-1 - 1.5)


def test_a_block_with_a_bad_gradient_is_left_out():
    x = parameter(0.0)
    optimizer = ClippedMoM([x], lr=1.0, k=3, clip=math.inf)
    rows = [[torch.tensor([v])] for v in (1.0, math.nan, 5.0, 2.0, 9.0, 6.0)]
    feed(optimizer, [x], rows)  # blocks (1, 2), bad, (5, 6)
    assert x.item() == pytest.approx(-(1.5 + 5.5) / 2)
    assert optimizer.n_skipped == 0
    rows[2] = [torch.tensor([math.inf])]
    feed(optimizer, [x], rows)
    assert x.item() == pytest.approx(-3.5)
    assert optimizer.n_skipped == 1
    feed(optimizer, [x], [[torch.tensor([1.0])]] * 3)
    assert x.item() == pytest.approx(-4.5)


def test_sums_that_overflow_are_skipped():
    x = nn.Parameter(torch.zeros(1))
    optimizer = ClippedMoM([x], lr=1.0, k=1)
    feed(optimizer, [x], [[torch.tensor([3e38])]] * 2)
    assert (x.item(), optimizer.n_skipped) == (0.0, 1)


def test_missing_gradients_count_as_zero_in_their_block():
    x, y = parameter(0.0), parameter(0.0)
    optimizer = ClippedMoM([x, y], lr=1.0, k=3, clip=math.inf)
    one = torch.tensor([1.0]).double()
    feed(optimizer, [x, y], [[one, one], [one, one], [one, one]])
    feed(optimizer, [x, y], [[one, None], [one, one], [one, None]])
    assert (x.item(), y.item()) == (-2.0, -1.0)
    feed(optimizer, [x, y], [[one, None]] * 3)
    assert (x.item(), y.item()) == (-3.0, -1.0)


def test_it_resumes_between_two_micro_batches():
    x = parameter(1.0, -1.0)
    optimizer = ClippedMoM([x], lr=0.1, k=3)
    rows = [[row] for row in samples(9, 2)]
    feed(optimizer, [x], rows[:6])
    for row in rows[:4]:
        x.grad = row[0].clone()
        optimizer.accumulate()
    twin = nn.Parameter(x.detach().clone())
    resumed = ClippedMoM([twin], lr=99.0, k=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.n_accumulated == 4
    feed(optimizer, [x], rows[4:])
    feed(resumed, [twin], rows[4:])
    assert torch.equal(x, twin)


def test_capturing_replaces_accumulate_in_a_trainers_loop():
    """The trainer divides the loss by the number of micro-batches."""
    finals = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 2).double()
        optimizer = ClippedMoM(model.parameters(), lr=0.1, k=3)
        capture = optimizer.capture() if captured else None
        for step in range(4):
            optimizer.zero_grad()
            for micro in range(6):
                if not captured:
                    optimizer.zero_grad()
                loss = model(samples(8, 4, 10 * step + micro)).square().mean()
                (loss / 6 if captured else loss).backward()
                if not captured:
                    optimizer.accumulate()
                else:
                    assert all(p.grad is None for p in model.parameters())
            optimizer.step()
        finals.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        if capture is not None:
            with pytest.raises(RuntimeError, match="captures gradients already"):
                optimizer.capture()
            capture.remove()
            model(samples(8, 4)).sum().backward()
            assert model.weight.grad is not None
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-10, atol=1e-12)


def test_embeddings_that_few_blocks_hit_rest_unless_trimmed():
    def moved(aggregator):
        x = parameter(0.0)
        optimizer = ClippedMoM([x], lr=1.0, k=5, aggregator=aggregator)
        feed(optimizer, [x], [[torch.tensor([v])] for v in (0.0, 8.0, 0.0, 8.0, 0.0)])
        return x.item() != 0

    assert not moved("median")
    assert moved("trimmed")


def replica(rank, folder):
    """Each of three processes is one block; one of them is wrong, then not finite."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3
    )
    x = nn.Parameter(torch.zeros(2))
    optimizer = ClippedMoM([x], lr=1.0, clip=math.inf, process_group=torch.distributed.group.WORLD)
    assert optimizer.param_groups[0]["k"] == 3
    path = []
    for wrong in (1e9, math.nan, 0.0):
        for micro in range(2):
            value = wrong if rank == 1 and wrong else float(rank + micro)
            x.grad = torch.tensor([value, -value])
            optimizer.accumulate()
        optimizer.step()
        path.append(x.detach().tolist())
    torch.save(path, f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_processes_can_be_the_blocks(tmp_path):
    torch.multiprocessing.spawn(replica, (tmp_path,), nprocs=3)
    first, second, third = (torch.load(tmp_path / f"{rank}.pt") for rank in range(3))
    assert first == second == third
    # Means 0.5, (wrong), 2.5: the median is 2.5 for +1e9 and 0.5 for -1e9; then 1.5; then 1.5.
    assert first == [[-2.5, 2.5], [-4.0, 4.0], [-5.5, 5.5]]


def test_a_closure_is_called_for_every_micro_batch():
    x = parameter(1.0)
    optimizer = ClippedMoM([x], lr=0.1, k=3, n_micro=6)
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert len(calls) == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 4}, ValueError, "k must be odd, got 4"),
        ({"k": 2.5}, TypeError, "k must be an integer"),
        ({"clip": 0.0}, ValueError, "clip must be a number > 0, got 0"),
        ({"clip": "often"}, ValueError, "clip must be a number > 0 or \"auto\", got 'often'"),
        ({"clip_scope": "layer"}, ValueError, "clip_scope must be one of 'global', 'tensor'"),
        ({"aggregator": "mode"}, ValueError, "aggregator must be one of"),
        ({"momentum": 1.0}, ValueError, "momentum must be"),
        ({"smooth": -1.0}, ValueError, "smooth must be"),
        ({"k": 5, "n_micro": 3}, ValueError, "n_micro must be an integer >= 5, got 3"),
    ],
)
def test_bad_settings_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ClippedMoM([parameter(1.0)], **{"lr": 0.1} | arguments)


def test_shared_settings_cannot_differ_between_groups():
    optimizer = ClippedMoM([parameter(1.0)], lr=0.1)
    with pytest.raises(ValueError, match="k must be the same for all param groups, 5, got 3"):
        optimizer.add_param_group({"params": [parameter(1.0)], "k": 3})


def test_steps_without_enough_gradients_are_refused():
    x = parameter(1.0)
    optimizer = ClippedMoM([x], lr=0.1, k=3)
    with pytest.raises(RuntimeError, match=r"call accumulate\(\) after each backward"):
        optimizer.step()
    x.grad = torch.ones(1, dtype=torch.float64)
    optimizer.accumulate()
    with pytest.raises(
        ValueError, match="k must be at most the number of accumulated micro-batches, 1, got 3"
    ):
        optimizer.step()
    with pytest.raises(ValueError, match="must come from ClippedMoM"):
        optimizer.load_state_dict(torch.optim.SGD([x], lr=0.1).state_dict())


# SSTM


def quadratic_path(steps, a=1.0, weight_decay=0.0, B=math.inf):
    curvature = torch.tensor([1.0, 0.3, 0.01, 0.001], dtype=torch.float64)
    x = parameter(1.0, 1.0, 1.0, 1.0)
    optimizer = ClippedSSTM([x], L=1.0, a=a, B=B, k=1, weight_decay=weight_decay)
    values = []
    for _ in range(steps):
        feed(optimizer, [x], [[curvature * x.detach()]])
        optimizer.eval()
        values.append(float(curvature @ x.detach() ** 2) / 2)
        optimizer.train()
    return values, x, optimizer, curvature


@pytest.mark.parametrize("a", [1.0, 3.0])
def test_without_noise_sstm_keeps_its_rate(a):
    values, *_ = quadratic_path(200, a)
    for T, value in enumerate(values, start=1):
        assert value <= 2 * a * 4 / (T * (T + 3)) * (1 + 1e-12)


def test_sstm_follows_its_formulas():
    x = parameter(1.0)
    optimizer = ClippedSSTM([x], L=2.0, a=3.0, B=0.25, k=1)
    A, y, z = 0.0, 1.0, 1.0
    for t in range(12):
        alpha = (t + 2) / (2 * 3 * 2)
        point = (A * y + alpha * z) / (A + alpha)
        assert x.item() == pytest.approx(point, rel=1e-12)
        gradient = 2 * point
        z -= alpha * gradient * min(1.0, 0.25 / alpha / abs(gradient))
        y = (A * y + alpha * z) / (A + alpha)
        A += alpha
        feed(optimizer, [x], [[2 * x.detach()]])
    optimizer.eval()
    assert x.item() == pytest.approx(y, rel=1e-12)


def test_sstm_is_faster_than_sgd_where_it_should_be():
    values, *_ = quadratic_path(300)
    curvature = torch.tensor([1.0, 0.3, 0.01, 0.001], dtype=torch.float64)
    sgd = float(curvature @ (1 - curvature) ** 600) / 2
    assert values[-1] < 0.1 * sgd


def test_restarts_converge_linearly():
    curvature = torch.tensor([1.0, 0.01], dtype=torch.float64)
    x = parameter(1.0, 1.0)
    optimizer = ClippedSSTM([x], L=1.0, B=math.inf, k=1)
    for step in range(1, 1001):
        feed(optimizer, [x], [[curvature * x.detach()]])
        if step % 29 == 0:  # sqrt(8 / 0.01) is 28.3
            optimizer.restart()
    optimizer.eval()
    assert float(curvature @ x.detach() ** 2) / 2 < 1e-10


def test_the_modes_show_x_and_y_and_steps_need_x():
    _, x, optimizer, _ = quadratic_path(5)
    at_x = x.detach().clone()
    optimizer.eval()
    optimizer.eval()
    at_y = x.detach().clone()
    assert not torch.equal(at_x, at_y)
    x.grad = torch.zeros_like(x)
    optimizer.accumulate()
    with pytest.raises(RuntimeError, match=r"the parameters hold the output y: call train\(\)"):
        optimizer.step()
    optimizer.train()
    assert torch.equal(x, at_x)


def test_weight_decay_is_a_penalty():
    """x²/2 - x + λx²/2 has its minimum at 1/(1 + λ); L counts the penalty."""
    x = parameter(5.0)
    optimizer = ClippedSSTM([x], L=2.0, B=math.inf, k=1, weight_decay=1.0)
    for _ in range(200):
        feed(optimizer, [x], [[x.detach() - 1]])
    optimizer.eval()
    assert x.item() == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"L": 0.0}, "L must be a finite number > 0, got 0"),
        ({"a": 0.5}, "a must be a finite number >= 1, got 0.5"),
        ({"B": 0.0}, "B must be a number > 0, got 0"),
    ],
)
def test_bad_triangles_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ClippedSSTM([parameter(1.0)], **{"L": 1.0} | arguments)


# The minimizer


def cauchy(x, N, rng):
    return x + rng.standard_cauchy((N, len(x)))


def loss(x):
    return float(x @ x) / 2


def run(**settings):
    options = {"jac_samples": cauchy, "k": 15, "lr": 0.1, "rng": 0, "maxiter": 300}
    return minimize_clipped_mom(loss, np.full(4, 3.0), **options | settings)


def test_the_minimizer_makes_the_optimizers_steps():
    curvature = np.array([1.0, 0.3, 0.1])

    def samples_of(x, N, rng):
        return curvature * x + rng.standard_t(1.5, (N, 3))

    for method in ("sgd", "sstm"):
        result = minimize_clipped_mom(
            lambda x: float(curvature @ x**2) / 2,
            np.ones(3),
            jac_samples=samples_of,
            N=12,
            k=3,
            lr=0.2,
            L=5.0,
            method=method,
            maxiter=30,
            rng=4,
        )
        x = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = (
            ClippedMoM([x], lr=0.2, k=3) if method == "sgd" else ClippedSSTM([x], L=5.0, k=3)
        )
        rng = np.random.default_rng(4)
        for _ in range(30):
            rows = torch.from_numpy(samples_of(x.detach().numpy(), 12, rng))
            feed(optimizer, [x], rows[:, None])
        if method == "sstm":
            optimizer.eval()
        np.testing.assert_allclose(result.x, x.detach().numpy(), rtol=1e-9)


def test_it_descends_where_the_mean_does_not_exist():
    assert run(maxiter=1000).fun < 0.1
    assert run(method="sstm", L=1.0, a=50.0, maxiter=1000).fun < 0.5
    # One block is a clipped mean, which carries hardly any direction.
    assert run(k=1, maxiter=1000).fun > 3 * run(maxiter=1000).fun


def test_step_sizes_follow_from_the_curvature():
    result = run(lr=None, maxiter=5, jac_samples=lambda x, N, rng: np.tile(4 * x, (N, 1)))
    np.testing.assert_allclose(result.x, 3.0 * 0.5**5)


def test_strong_convexity_restarts():
    def exact(x, N, rng):
        return np.tile(np.array([1.0, 0.01]) * x, (N, 1))

    def value(x):
        return float(np.array([1.0, 0.01]) @ x**2) / 2

    options = {"jac_samples": exact, "N": 1, "k": 1, "clip": math.inf, "maxiter": 400, "L": 1.0}
    plain, restarted = (
        minimize_clipped_mom(value, np.ones(2), method="sstm", mu=mu, rng=0, **options).fun
        for mu in (0.0, 0.01)
    )
    assert restarted < 1e-3 * plain


def test_averaging_is_over_the_second_half():
    last, mean = run(maxiter=2000), run(maxiter=2000, average=True)
    assert mean.fun < last.fun


def test_scipy_calls_it():
    result = minimize(
        loss,
        [3.0, 3.0],
        method=minimize_clipped_mom,
        options={"jac_samples": cauchy, "k": 15, "lr": 0.1, "maxiter": 500, "rng": 1},
    )
    assert result.success
    assert result.fun < 0.2
    assert (result.nit, result.njev) == (500, 500 * 15)
    assert len(result.trace["fun"]) == 100
    assert result.nfev == 101


def test_the_callback_and_interruptions():
    seen = []

    def callback(intermediate_result):
        seen.append(intermediate_result)
        if len(seen) == 3:
            raise StopIteration

    assert run(callback=callback).status == 99
    assert [r.nit for r in seen] == [1, 2, 3]

    def interrupt(x):
        raise KeyboardInterrupt

    result = run(callback=interrupt)
    assert (result.status, result.success) == (2, False)
    assert np.isfinite(result.fun)


def test_estimates_that_are_not_finite_are_skipped():
    def sometimes(x, N, rng):
        rows = cauchy(x, N, rng)
        rows[: rng.choice([0, 9])] = np.nan
        return rows

    result = run(jac_samples=sometimes)
    assert 100 < result.n_skipped < 200
    assert result.success
    lost = run(jac_samples=lambda x, N, rng: np.full((N, 4), np.nan))
    assert (lost.status, lost.success, lost.n_skipped) == (3, False, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        far = run(jac_samples=lambda x, N, rng: np.tile(1e200 * x, (N, 1)), clip=1e308, lr=1e100)
    assert far.status in (3, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"k": 4}, ValueError, "k must be odd, got 4"),
        ({"k": 17}, ValueError, "k must be at most the number of gradients per step, N, 15"),
        ({"N": 0}, ValueError, "N must be an integer >= 1, got 0"),
        ({"lr": 0.0}, ValueError, "lr must be a finite number > 0"),
        ({"clip": -1.0}, ValueError, "clip must be a number > 0, got -1"),
        ({"method": "adam"}, ValueError, "method must be one of 'sgd', 'sstm', got 'adam'"),
        ({"jac_samples": 3}, TypeError, "jac_samples must be callable as"),
        (
            {"jac_samples": lambda x, N, rng: x},
            ValueError,
            r"must have shape \(15, 4\), got \(4,\)",
        ),
        ({"bounds": [(0, 1)] * 4}, ValueError, "bounds must be None"),
        ({"mu": -1.0}, ValueError, "mu must be"),
        ({"callback": 1}, TypeError, "callback must be callable"),
    ],
)
def test_bad_runs_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        run(**arguments)


def test_bad_functions_and_options():
    with pytest.raises(TypeError, match="fun must be callable, got float"):
        minimize_clipped_mom(1.0, [1.0], jac_samples=cauchy, k=3)
    with pytest.raises(ValueError, match=r"x0 must be finite, got nan at x0\[0\]"):
        minimize_clipped_mom(loss, [math.nan], jac_samples=cauchy, k=3)
    with pytest.warns(OptimizeWarning, match="unknown options: colour"):
        run(colour="red", maxiter=2)


# The report


def test_the_report_finds_noise_without_a_mean():
    report = tail_report(stats.levy_stable.rvs(0.8, 0, size=(2000, 30), random_state=0), rng=0)
    assert report.beta[0.02] == pytest.approx(0.8, abs=0.12)
    assert report.alpha.low < 0.8 < report.alpha.high
    assert report.skewness.low == 0
    assert report.plan.k == 15
    assert "k = 15" in str(report)


def test_the_report_finds_light_and_skewed_noise():
    rng = np.random.default_rng(0)
    light = tail_report(rng.standard_normal((1000, 20)), rng=0)
    assert light.beta[0.05] > 2
    assert light.plan.k == 5
    skewed = tail_report(rng.pareto(1.5, (2000, 20)), rng=0)
    assert skewed.skewness.low > 0.3
    assert skewed.plan.k < 15
    assert "biased" in str(skewed) or skewed.plan.k == 1


def test_the_recommended_level_lets_most_estimates_pass():
    rng = np.random.default_rng(0)
    g = rng.standard_cauchy((2000, 10)) + 3
    report = tail_report(torch.from_numpy(g), N=9, rng=1)
    norms = [np.linalg.norm(block_median(rng.standard_cauchy((9, 10)) + 3, 9)) for _ in range(500)]
    assert 0.9 < np.mean(np.array(norms) < report.clip) <= 1.0


def test_the_report_plots():
    import matplotlib as mpl

    mpl.use("Agg")
    axes = tail_report(np.random.default_rng(0).standard_cauchy((500, 5)), rng=0).plot()
    assert len(axes.lines) == 2


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (np.ones((10, 2)), "g must hold at least 64 nonzero samples, got 10"),
        (np.ones((100, 2)), "g must hold samples that differ"),
        (np.full((100, 2), np.nan), "g must be finite"),
        (np.ones(100), r"g must have shape \(K, n\), got \(100,\)"),
    ],
)
def test_bad_reports_are_refused(g, message):
    with pytest.raises(ValueError, match=message):
        tail_report(g)


# Other people's trainers, which accumulate gradients by themselves


class Classifier(nn.Module):
    """A linear classifier of the digits with the interface of transformers' models."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 10)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images, labels):
        logits = self.linear(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits_in_batches(n, size=16):
    data = load_digits()
    images, labels = data.train_images[: n * size], data.train_labels[: n * size]
    return list(zip(images.split(size), labels.split(size), strict=True))


def trained_by_hand(steps, k=3):
    """Return the weights after steps of k micro-batches in order."""
    model = Classifier()
    optimizer = ClippedMoM(model.parameters(), lr=0.5, k=k)
    batches = iter(digits_in_batches(steps * k))
    for _ in range(steps):
        for _ in range(k):
            optimizer.zero_grad()
            images, labels = next(batches)
            model(images, labels)["loss"].backward()
            optimizer.accumulate()
        optimizer.step()
    return model.linear.weight.detach()


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer_accumulates_for_it(tmp_path):
    transformers = pytest.importorskip("transformers")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args, **kwargs):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rows = [
        {"images": image, "labels": label}
        for images, labels in digits_in_batches(12)
        for image, label in zip(images, labels, strict=True)
    ]
    model = Classifier()
    optimizer = ClippedMoM(model.parameters(), lr=0.5, k=3)
    optimizer.capture()
    InOrder(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=tmp_path,
            max_steps=4,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=3,
            max_grad_norm=0.0,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    ).train()
    torch.testing.assert_close(model.linear.weight.detach(), trained_by_hand(4))


@pytest.mark.filterwarnings("ignore")
def test_lightning_accumulates_for_it(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.classifier = Classifier()

        def training_step(self, batch, index):
            return self.classifier(*batch)["loss"]

        def configure_optimizers(self):
            optimizer = ClippedMoM(self.parameters(), lr=0.5, k=3)
            optimizer.capture()
            return optimizer

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            closure()  # the last micro-batch; the earlier ones have been captured
            optimizer.step()

    module = Module()
    data = load_digits()
    rows = torch.utils.data.TensorDataset(data.train_images[:192], data.train_labels[:192])
    lightning.Trainer(
        max_steps=4,
        accumulate_grad_batches=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module, torch.utils.data.DataLoader(rows, batch_size=16))
    torch.testing.assert_close(module.classifier.linear.weight.detach(), trained_by_hand(4))
