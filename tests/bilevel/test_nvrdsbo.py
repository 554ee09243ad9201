"""NVRDSBO: one agent as a torch optimizer, alone and as one of several processes."""

from __future__ import annotations

import copy

import networkx
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from thalweg.bilevel import NVRDSBO, decentralized_bilevel, mixing_matrix
from thalweg.common.torch_gradients import NonFiniteGradientError

P, Q, PENALTY, WARM, STEPS = 2, 3, 5.0, 4, 12
LRS = (0.01, 0.02, 0.02)


def problem(n):
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, Q, P)), rng.standard_normal((n, Q))


def noises(n):
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.standard_t(1.5, (n, Q))) for _ in range(WARM + STEPS)]


def upper(x, y, batch):
    return (y - batch["a"]).square().sum() / 2 + batch["noise"].dot(y)


def lower(x, y, batch):
    return (y - batch["B"] @ x).square().sum() / 2 * (1 + x.square().sum()) + batch["noise"].dot(y)


def reference(n, W, **options):
    B, a = (torch.from_numpy(part) for part in problem(n))
    queue = iter(noises(n))
    return decentralized_bilevel(
        [upper] * n,
        [lower] * n,
        torch.zeros(P, dtype=torch.float64),
        torch.zeros(Q, dtype=torch.float64),
        W=W,
        sampler=lambda rng: {"B": B, "a": a, "noise": next(queue)},
        maxiter=STEPS,
        lr=LRS,
        penalty=PENALTY,
        warm_batch=WARM,
        schedule="constant",
        **options,
    )


def agent(rank, n, W=None, steps=STEPS, start=None, **options):
    """Return x, y and z of one agent after its steps, and the optimizer."""
    B, a = (torch.from_numpy(part[rank]) for part in problem(n))
    x = torch.nn.Parameter(torch.zeros(P, dtype=torch.float64))
    y = torch.nn.Parameter(torch.zeros(Q, dtype=torch.float64))
    z = copy.deepcopy(y)
    groups = [
        {"params": [p], "role": role, "lr": lr}
        for p, role, lr in zip((x, y, z), "xyz", LRS, strict=True)
    ]
    optimizer = NVRDSBO(groups, penalty=PENALTY, warm_batch=WARM, W=W, **options)
    for noise in noises(n)[: WARM - 1 + steps]:
        batch = {"B": B, "a": a, "noise": noise[rank]}

        def closure(batch=batch):
            optimizer.zero_grad()
            loss = upper(x, y, batch) + PENALTY * (lower(x, y, batch) - lower(x, z, batch))
            loss.backward()
            return loss

        optimizer.step(closure)
    return [p.detach() for p in (x, y, z)], optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": "joint"}, {"normalize": "block"}, {"normalize": None}, {"clip": 1.0},
     {"beta": 1.0}],
)  # fmt: skip
def test_alone_it_makes_the_steps_of_the_function(options):
    result = reference(1, np.ones((1, 1)), **options)
    (x, y, z), _ = agent(0, 1, **options)
    for mine, theirs in ((x, result.X[0]), (y, result.Y[0]), (z, result.Z[0])):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def _process(rank, n, store, W, options, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    try:
        variables, _ = agent(rank, n, W=W, **options)
        results[rank] = [v.numpy() for v in variables]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("n", "options"), [(4, {}), (2, {"normalize": "block"}), (3, {"normalize": "joint"})]
)
def test_processes_follow_the_vectorized_function(tmp_path, n, options):
    W = mixing_matrix(networkx.path_graph(n))
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_process, args=(n, tmp_path / "store", W, options, results), nprocs=n)
        found = dict(results)
    result = reference(n, W, **options)
    for i in range(n):
        for mine, theirs in zip(found[i], (result.X[i], result.Y[i], result.Z[i]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_one_process_group_checks_the_matrix(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="W must be given where"):
            agent(0, 1)
        with pytest.raises(ValueError, match=r"W must have shape \(1, 1\)"):
            agent(0, 1, W=np.full((2, 2), 0.5))
        alone, _ = agent(0, 1, W=np.ones((1, 1)), normalize="block")
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(alone[0], reference(1, np.ones((1, 1))).X[0], rtol=0, atol=1e-12)


def test_state_resumes_bit_for_bit(tmp_path):
    whole, _ = agent(0, 1)
    (x, y, z), first = agent(0, 1, steps=6)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    params = [torch.nn.Parameter(p.clone()) for p in (x, y, z)]
    second = NVRDSBO(
        [{"params": [p], "role": r} for p, r in zip(params, "xyz", strict=True)], warm_batch=WARM
    )
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    B, a = (torch.from_numpy(part[0]) for part in problem(1))
    for noise in noises(1)[WARM - 1 + 6 : WARM - 1 + STEPS]:
        batch = {"B": B, "a": a, "noise": noise[0]}

        def closure(batch=batch):
            second.zero_grad()
            u, v, w = params
            loss = upper(u, v, batch) + PENALTY * (lower(u, v, batch) - lower(u, w, batch))
            loss.backward()
            return loss

        second.step(closure)
    for p, q in zip(params, whole, strict=True):
        assert torch.equal(p.detach(), q)


def three(role_of=("x", "y", "z"), value=0.0):
    params = [torch.nn.Parameter(torch.full((2,), value)) for _ in range(3)]
    return params, [{"params": [p], "role": r} for p, r in zip(params, role_of, strict=True)]


def test_a_sample_that_is_not_finite_is_skipped_and_ten_in_a_row_are_refused():
    params, groups = three()
    optimizer = NVRDSBO(groups, lr=0.1, warm_batch=1, beta=1.0)
    scale = [1.0]

    def closure():
        optimizer.zero_grad()
        loss = scale[0] * sum(p.sum() for p in params)
        loss.backward()
        return loss

    optimizer.step(closure)
    scale[0] = float("nan")
    before = params[0].detach().clone()
    optimizer.step(closure)  # goes on along the estimate that it has
    assert optimizer.n_skipped == 1
    assert float((params[0].detach() - before).norm()) == pytest.approx(0.1, rel=1e-5)
    for _ in range(8):
        optimizer.step(closure)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step(closure)


def test_frozen_parameters_stay_and_missing_gradients_are_zero():
    params, groups = three()
    frozen, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    frozen.requires_grad_(False)
    groups[0]["params"] += [frozen, unused]
    optimizer = NVRDSBO(groups, lr=torch.tensor(0.1), warm_batch=1)

    def closure():
        optimizer.zero_grad()
        loss = sum(p.sum() for p in params)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(frozen, torch.ones(2))
    assert torch.equal(unused.detach(), torch.ones(2))
    assert float(params[0].detach().norm()) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"lr": torch.ones(2)}, "lr must hold one number"),
        ({"penalty": 0.0}, "penalty must be"),
        ({"beta": 0.0}, "beta must be"),
        ({"beta": 1.5}, "beta must be"),
        ({"normalize": "no"}, "normalize must be"),
        ({"clip": 0.0}, "clip must be"),
        ({"warm_batch": 0}, "warm_batch must be"),
        ({"check_finite": 1}, "check_finite must be"),
        ({"W": np.ones((1, 1))}, "W must be None"),
    ],
)
def test_bad_settings(options, match):
    with pytest.raises(ValueError, match=match):
        NVRDSBO(three()[1], **options)


def test_bad_groups():
    with pytest.raises(ValueError, match="role must be one of"):
        NVRDSBO(three(("x", "y", "w"))[1])
    with pytest.raises(ValueError, match="role must differ"):
        NVRDSBO(three(("x", "y", "y"))[1])
    groups = three()[1]
    groups[1]["penalty"] = 2.0
    with pytest.raises(ValueError, match="penalty must be the same"):
        NVRDSBO(groups)
    with pytest.raises(TypeError, match="params must be real"):
        NVRDSBO([{"params": [torch.zeros(1, dtype=torch.complex64, requires_grad=True)],
                  "role": "x"}])  # fmt: skip
    with pytest.raises(TypeError, match="comm must have methods"):
        NVRDSBO(three()[1], comm=object())
    with pytest.raises(ValueError, match="closure must be given"):
        NVRDSBO(three()[1]).step()
    with pytest.raises(ValueError, match=r"\['z'\] missing"):
        NVRDSBO(three()[1][:2]).step(lambda: 0.0)
    params, groups = three()
    params[2].data += 1
    with pytest.raises(ValueError, match="y and z must be equal"):
        NVRDSBO(groups).step(lambda: 0.0)
