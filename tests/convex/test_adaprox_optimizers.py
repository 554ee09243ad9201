"""The torch optimizers: they are the minimizer, resume, and leave alone what is not theirs."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch

from thalweg.convex import L1, AdaProx, AdaProxAccel, Box, NuclearNorm, Simplex, minimize_adaprox
from thalweg.convex.dense_gradients import ROW, squared_norm

KINDS = pytest.mark.parametrize("kind", [AdaProx, AdaProxAccel])
rng = np.random.default_rng(0)
A = torch.from_numpy(rng.standard_normal((30, 12)))
B = torch.from_numpy(rng.standard_normal(30))


def loss_of(*parts):
    w = torch.cat([part.reshape(-1) for part in parts])
    return (A.to(w.dtype) @ w - B.to(w.dtype)).square().sum() / 2


def parameters(dtype=torch.float64):
    return [
        torch.nn.Parameter(torch.full((2, 3), 0.5, dtype=dtype)),
        torch.nn.Parameter(torch.full((6,), -0.5, dtype=dtype)),
    ]


def train(optimizer, params, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(*params).backward()
        optimizer.step()


def flat(params):
    return torch.cat([p.detach().reshape(-1) for p in params]).numpy().copy()


@KINDS
@pytest.mark.parametrize("prox", [None, L1(2.0), Box(-0.1, 0.1)])
@pytest.mark.parametrize("S0", ["auto", 20.0])
def test_a_group_is_the_minimizer(kind, prox, S0):
    """One accumulator for all tensors of a group: the iterates are those of the whole vector."""
    params = parameters()
    optimizer = kind(params, prox, D=2.0, S0=S0)
    x0 = flat(params)
    if isinstance(prox, Box):  # the minimizer projects its start
        with torch.no_grad():
            for p in params:
                p.clamp_(-0.1, 0.1)
    train(optimizer, params, 30)

    def numpy_loss(x):
        residual = A.numpy() @ x - B.numpy()
        return float(residual @ residual) / 2, A.numpy().T @ residual

    result = minimize_adaprox(
        numpy_loss,
        x0,
        prox=prox,
        D=2.0,
        S0=S0,
        accelerated=kind is AdaProxAccel,
        maxiter=30,
        gtol=0,
        output="last",
    )
    if kind is AdaProxAccel:
        with optimizer.averaged():
            np.testing.assert_allclose(flat(params), result.x, rtol=1e-10, atol=1e-10)
    else:
        np.testing.assert_allclose(flat(params), result.x, rtol=1e-10, atol=1e-10)
    S2 = float(optimizer.param_groups[0]["S2"])
    assert pytest.approx(result.S**2, rel=1e-10) == S2


def test_the_average_is_the_minimizers():
    params = parameters()
    optimizer = AdaProx(params, L1(2.0), D=2.0, weight_avg=True)
    train(optimizer, params, 40)
    last = flat(params)
    with optimizer.averaged():
        average = flat(params)
        with pytest.raises(RuntimeError, match="hold the average"):
            optimizer.step()
    np.testing.assert_array_equal(flat(params), last)
    result = minimize_adaprox(
        lambda x: (
            float(np.sum((A.numpy() @ x - B.numpy()) ** 2)) / 2,
            A.numpy().T @ (A.numpy() @ x - B.numpy()),
        ),
        np.r_[np.full(6, 0.5), np.full(6, -0.5)],
        prox=L1(2.0),
        D=2.0,
        maxiter=40,
        gtol=0,
        output="average",
    )
    # The average starts at the first parameters with weight zero.
    np.testing.assert_allclose(average, result.x, rtol=1e-10)
    optimizer.swap_to_average()
    optimizer.swap_to_average()
    np.testing.assert_array_equal(flat(params), average)
    optimizer.swap_to_query()
    with pytest.raises(RuntimeError, match="weight_avg=True"):
        AdaProx(parameters()).swap_to_average()


@KINDS
@pytest.mark.parametrize("prox", [None, L1(2.0)])
def test_state_resumes_bit_for_bit_from_a_file(kind, prox):
    settings = {"weight_avg": True} if kind is AdaProx else {}
    params = parameters()
    optimizer = kind(params, prox, **settings)
    train(optimizer, params, 10)
    saved = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": params}, saved)
    train(optimizer, params, 10)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    others = [torch.nn.Parameter(p.detach().clone()) for p in loaded["params"]]
    other = kind(others, prox, **settings)
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["prox"] is prox
    train(other, others, 10)
    np.testing.assert_array_equal(flat(others), flat(params))
    with optimizer.averaged(), other.averaged():
        np.testing.assert_array_equal(flat(others), flat(params))
    copied = copy.deepcopy(other)
    assert torch.equal(copied.param_groups[0]["S2"], other.param_groups[0]["S2"])


@KINDS
@pytest.mark.parametrize("prox", [None, L1(2.0)])
def test_the_compiled_step_is_the_eager_step(kind, prox):
    eager, compiled = parameters(), parameters()
    settings = {"check_finite": False}
    first = kind(eager, prox, lr=torch.tensor(1.0), **settings)
    second = kind(compiled, prox, lr=torch.tensor(1.0), **settings)
    step = torch.compile(second.step)
    for t in range(6):
        for group in (*first.param_groups, *second.param_groups):
            group["lr"].fill_(1.0 / (1 + t // 3))
        for params, advance in ((eager, first.step), (compiled, step)):
            for p in params:
                p.grad = None
            loss_of(*params).backward()
            advance()
    np.testing.assert_allclose(flat(compiled), flat(eager), rtol=1e-12, atol=1e-12)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_accumulator_is_in_double_precision(kind, dtype):
    params = parameters(dtype)
    optimizer = kind(params, L1(0.1))
    train(optimizer, params, 5)
    assert optimizer.param_groups[0]["S2"].dtype == torch.float64
    assert all(t.dtype == dtype for state in optimizer.state.values() for t in state.values())
    assert all(p.isfinite().all() for p in params)


def test_long_tensors_are_split_for_elementwise_penalties_only():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(200_000, generator=generator)
    grad = torch.randn(200_000, generator=generator)
    results = []
    for prox in (L1(0.5), lambda v, alpha: L1(0.5).prox(v, alpha)):
        p = torch.nn.Parameter(start.clone())
        optimizer = AdaProx([p], prox, D=10.0)
        for _ in range(3):
            p.grad = grad
            optimizer.step()
        results.append((p.detach().clone(), float(optimizer.param_groups[0]["S2"])))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    assert results[0][0].eq(0).any()


def test_norms_of_long_tensors_are_accurate():
    tensor = torch.rand(10**6 + ROW // 2, generator=torch.Generator().manual_seed(0))
    exact = float(tensor.double().square().sum())
    assert float(squared_norm([tensor])) == pytest.approx(exact, rel=1e-6)


@KINDS
def test_lr_scales_the_step_and_zero_rests(kind):
    params = parameters()
    optimizer = kind(params, L1(2.0), lr=0.0)
    before = flat(params)
    train(optimizer, params, 2)
    np.testing.assert_array_equal(flat(params), before)
    assert "S2" not in optimizer.param_groups[0]
    optimizer.param_groups[0]["lr"] = 1.0
    train(optimizer, params, 5)
    S2 = float(optimizer.param_groups[0]["S2"])
    optimizer.param_groups[0]["lr"] = 0.0
    held = flat(params) if kind is AdaProx else None
    train(optimizer, params, 1)
    assert float(optimizer.param_groups[0]["S2"]) == S2
    if held is not None:
        np.testing.assert_array_equal(flat(params), held)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    train(optimizer, params, 1)
    assert float(optimizer.param_groups[0]["S2"]) == S2


def test_half_the_rate_is_half_the_distance():
    first, second = parameters(), parameters()
    train(AdaProx(first, L1(2.0), D=1.0, lr=0.5, S0=30.0), first, 20)
    train(AdaProx(second, L1(2.0), D=0.5, S0=30.0), second, 20)
    np.testing.assert_allclose(flat(first), flat(second), rtol=1e-12)


@KINDS
def test_maximizing_is_minimizing_the_negative(kind):
    first, second = parameters(), parameters()
    up = kind(first, Box(-1.0, 1.0), maximize=True)
    down = kind(second, Box(-1.0, 1.0))
    for _ in range(5):
        up.zero_grad()
        down.zero_grad()
        (-loss_of(*first)).backward()
        loss_of(*second).backward()
        up.step()
        down.step()
    np.testing.assert_allclose(flat(first), flat(second), rtol=1e-12)


@KINDS
def test_groups_have_their_own_settings_and_accumulators(kind):
    params = parameters()
    optimizer = kind([{"params": [params[0]], "prox": NuclearNorm(5.0)}], D=1.0)
    optimizer.add_param_group({"params": [params[1]], "prox": Simplex(), "D": 0.5})
    train(optimizer, params, 200)
    first, second = (float(group["S2"]) for group in optimizer.param_groups)
    assert first != second
    with optimizer.averaged() if kind is AdaProxAccel else torch.no_grad():
        assert float(params[1].detach().sum()) == pytest.approx(1.0, abs=1e-9)
        assert float(params[1].detach().min()) >= -1e-12


@KINDS
def test_a_closure_is_called_once_and_frozen_parameters_stay(kind):
    params = parameters()
    frozen = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = kind([*params, frozen])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = loss_of(*params)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert calls == [True]
    assert frozen.tolist() == [1.0, 1.0]
    assert frozen not in optimizer.state
    assert kind(parameters()).step() is None


@KINDS
def test_gradients_that_are_not_finite_are_skipped_ten_times(kind):
    params = parameters()
    optimizer = kind(params, L1(1.0))
    train(optimizer, params, 3)
    before = flat(params)
    params[0].grad = torch.full_like(params[0], float("nan"))
    for _ in range(9):
        optimizer.step()
    assert optimizer.n_skipped == 9
    np.testing.assert_array_equal(flat(params), before)
    with pytest.raises(RuntimeError, match="10 gradients in a row"):
        optimizer.step()
    # A sum that overflows is finite all the same.
    huge = torch.nn.Parameter(torch.zeros(2))
    huge.grad = torch.full((2,), 3e38)
    optimizer = kind([huge], S0=1e39)
    optimizer.step()
    assert optimizer.n_skipped == 0


@KINDS
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"D": 0.0}, ValueError, "D must be"),
        ({"S0": 0.0}, ValueError, "S0 must be"),
        ({"lr": -1.0}, ValueError, "lr must be"),
        ({"lr": torch.ones(2)}, ValueError, "lr must hold one number"),
        ({"maximize": 1}, ValueError, "maximize must be"),
        ({"check_finite": 1}, ValueError, "check_finite must be"),
        ({"prox": lambda v: v}, TypeError, r"prox\(v, alpha\)"),
    ],
)
def test_bad_settings(kind, settings, error, message):
    with pytest.raises(error, match=message):
        kind(parameters(), **settings)
    optimizer = kind(parameters())
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": parameters(), **settings})


@KINDS
def test_bad_parameters_and_gradients(kind):
    with pytest.raises(TypeError, match="complex"):
        kind([torch.zeros(2, dtype=torch.complex64)])
    p = torch.nn.Parameter(torch.zeros(4))
    p.grad = torch.eye(4)[0].to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        kind([p]).step()
    for prox in (lambda v, alpha: v[:2], lambda v, alpha: v.double(), lambda v, alpha: 1.0):
        p = torch.nn.Parameter(torch.ones(4))
        p.grad = torch.ones(4)
        with pytest.raises(ValueError, match="must be a tensor like v"):
            kind([p], prox).step()
    with pytest.raises(ValueError, match="weight_avg"):
        AdaProx(parameters(), weight_avg=1)
