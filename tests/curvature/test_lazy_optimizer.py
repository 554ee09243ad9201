"""LazySSN, the torch optimizer: the steps of the minimizer, in the loops that torch users write."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.curvature import LazySSN, TorchFunction, minimize_lazy_ssn
from thalweg.curvature.closure_derivatives import evaluate, hessian, hessian_products

torch.manual_seed(0)
X = torch.randn(60, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = X[:, :1].sin() + X[:, 1:2].abs()


def network(dtype=torch.float64):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return model.to(dtype)


def loss_of(model):
    """A Huber loss and a squared hinge on the weights: kinks, and no convexity."""
    dtype = next(model.parameters()).dtype
    fit = nn.functional.huber_loss(model(X.to(dtype)), Y.to(dtype), delta=0.3)
    excess = sum((p.abs() - 1).clamp(min=0).square().sum() for p in model.parameters())
    return fit + 0.1 * excess


def with_backward(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


def path(model, optimizer, closure, steps):
    points = []
    for _ in range(steps):
        optimizer.step(closure)
        points.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return torch.stack(points).double().numpy()


def as_function(model):
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def fun(x):
        parts = torch.split(x, [s.numel() for s in shapes.values()])
        values = {n: v.reshape(s) for (n, s), v in zip(shapes.items(), parts, strict=True)}
        fit = nn.functional.huber_loss(torch.func.functional_call(model, values, X), Y, delta=0.3)
        return fit + 0.1 * (x.abs() - 1).clamp(min=0).square().sum()

    return fun


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("m", [1, 3])
def test_steps_are_those_of_the_minimizer(m, reset):
    model, points = network(), []
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()
    minimize_lazy_ssn(
        as_function(model),
        start,
        jac="torch",
        hess_every=m,
        reset_lambda=reset,
        maxiter=10,
        gtol=0.0,
        callback=points.append,
    )
    optimizer = LazySSN(model.parameters(), hess_every=m, reset_lambda=reset)
    steps = path(model, optimizer, with_backward(model, optimizer), 10)
    np.testing.assert_allclose(steps, points, rtol=1e-7, atol=1e-9)
    assert optimizer.n_hessians == -(-10 // m)


def test_conjugate_gradients_make_the_same_steps():
    direct, by_cg = network(), network()
    optimizer = LazySSN(direct.parameters(), Lambda0=10.0)
    expected = path(direct, optimizer, with_backward(direct, optimizer), 8)
    optimizer = LazySSN(by_cg.parameters(), Lambda0=10.0, linear_solver="cg", cg_tol=1e-9)
    steps = path(by_cg, optimizer, with_backward(by_cg, optimizer), 8)
    np.testing.assert_allclose(steps, expected, rtol=1e-6, atol=1e-7)


def test_the_loss_falls_with_loose_conjugate_gradients():
    model = network()
    optimizer = LazySSN(model.parameters(), linear_solver="cg")
    losses = [float(optimizer.step(with_backward(model, optimizer))) for _ in range(15)]
    assert np.all(np.diff(losses) <= 0)
    assert losses[-1] < 0.3 * losses[0]


def test_closures_with_and_without_backward_are_the_same():
    one, other, split = network(), network(), network()
    optimizer = LazySSN(one.parameters())
    expected = path(one, optimizer, with_backward(one, optimizer), 5)
    optimizer = LazySSN(other.parameters())
    np.testing.assert_allclose(path(other, optimizer, lambda: loss_of(other), 5), expected)
    optimizer = LazySSN(split.parameters())

    def in_two_parts():
        """Accumulate gradients, and return a number, as trainers do."""
        optimizer.zero_grad()
        whole = loss_of(split)
        (whole * 0.25).backward(retain_graph=True)
        (whole * 0.75).backward()
        return whole.detach()

    steps = path(split, optimizer, in_two_parts, 5)
    np.testing.assert_allclose(steps, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_hessians_are_those_of_torch_func(chunk_size):
    model = network()
    params = list(model.parameters())
    x = torch.cat([p.detach().reshape(-1) for p in params])
    expected = TorchFunction(as_function(model)).hess(x.numpy())
    evaluation = evaluate(lambda: loss_of(model), params, torch.float64)
    H = hessian(evaluation.loss, params, torch.float64, chunk_size)
    np.testing.assert_allclose(H, expected, atol=1e-12)
    V = torch.randn(3, len(x), dtype=torch.float64)
    products = hessian_products(evaluation.loss, params, torch.float64)(V)
    np.testing.assert_allclose(products, V.numpy() @ expected, atol=1e-12)


def test_a_linear_loss_has_no_curvature():
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    evaluation = evaluate(lambda: p.sum(), [p], torch.float64)
    assert not hessian(evaluation.loss, [p], torch.float64, 64).any()
    optimizer = LazySSN([p])
    before = float(p.detach().sum())
    optimizer.step(lambda: p.sum())
    assert float(p.detach().sum()) < before


@pytest.mark.parametrize("solver", ["cholesky", "cg"])
def test_resumption_is_bit_for_bit(solver):
    model = network()
    optimizer = LazySSN(model.parameters(), Lambda0=0.3, linear_solver=solver)
    path(model, optimizer, with_backward(model, optimizer), 3)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    expected = path(model, optimizer, with_backward(model, optimizer), 4)
    file.seek(0)
    parameters, state = torch.load(file, weights_only=True)
    resumed = network()
    resumed.load_state_dict(parameters)
    fresh = LazySSN(resumed.parameters(), Lambda0=7.0, linear_solver=solver)
    fresh.load_state_dict(state)
    np.testing.assert_array_equal(path(resumed, fresh, with_backward(resumed, fresh), 4), expected)
    assert fresh.n_hessians == 1


def test_a_copy_goes_its_own_way():
    model = network()
    optimizer = LazySSN(model.parameters())
    path(model, optimizer, with_backward(model, optimizer), 2)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    one = path(model, optimizer, with_backward(model, optimizer), 3)
    other = path(twin, twin_optimizer, with_backward(twin, twin_optimizer), 3)
    np.testing.assert_array_equal(one, other)


def test_frozen_and_unused_parameters_stay():
    model = network()
    model[0].bias.requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    before = model[0].bias.clone()
    optimizer = LazySSN([*model.parameters(), unused])
    closure = with_backward(model, optimizer)
    first = float(optimizer.step(closure))
    for _ in range(3):
        last = float(optimizer.step(closure))
    assert last < first
    assert torch.equal(model[0].bias, before)
    assert torch.equal(unused.detach(), torch.ones(2, dtype=torch.float64))


def test_nothing_to_train_is_no_error():
    p = nn.Parameter(torch.ones(2), requires_grad=False)
    assert LazySSN([p]).step(lambda: p.sum()) == 2.0


def test_single_precision_trains_until_rounding():
    model = network(torch.float32)
    optimizer = LazySSN(model.parameters())
    closure = with_backward(model, optimizer)
    losses = [float(optimizer.step(closure)) for _ in range(40)]
    assert losses[-1] < 0.3 * losses[0]
    # An increase below the rounding floor may pass if the gradient gets shorter.
    assert np.max(np.diff(losses)) <= 450 * 1.2e-7


def test_precisions_mix():
    model = network()
    model[2].float()

    def closure():
        hidden = model[1](model[0](X)).float()
        return (model[2](hidden) - Y.float()).square().mean()

    optimizer = LazySSN(model.parameters())
    losses = [float(optimizer.step(closure)) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert model[2].weight.dtype == torch.float32


def test_a_stationary_point_is_kept():
    p = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = LazySSN([p])
    optimizer.step(lambda: p.square().sum())
    assert optimizer.n_trials == 0
    assert not p.detach().any()


def test_where_the_loss_is_flat_the_point_is_kept():
    """1 + x⁴ at 1e-5: no trial changes the loss, and the last Λ allowed ends the step."""
    model = network(torch.float32)
    optimizer = LazySSN(model.parameters(), hess_every=1)
    closure = with_backward(model, optimizer)
    for _ in range(60):
        optimizer.step(closure)
    trials = optimizer.n_trials
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for _ in range(3):
        optimizer.step(closure)
    after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert float((after - before).norm()) < 1e-2
    assert optimizer.n_trials > trials


def test_a_random_closure_is_refused_and_the_point_kept():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer, calls = LazySSN([p]), []

    def closure():
        calls.append(None)
        return p.square().sum() + 10 * len(calls)

    with pytest.raises(RuntimeError, match="not Lipschitz, or the closure"):
        optimizer.step(closure)
    assert torch.equal(p.detach(), torch.ones(2, dtype=torch.float64))


def test_an_interruption_keeps_the_point():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer, calls = LazySSN([p]), []

    def closure():
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return p.square().sum()

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert torch.equal(p.detach(), torch.ones(2, dtype=torch.float64))


def test_losses_that_are_not_finite_are_skipped_and_then_refused():
    p = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = LazySSN([p])
    for _ in range(9):
        optimizer.step(lambda: p.square().sum() * torch.nan)
    assert optimizer.n_skipped == 9
    with pytest.raises(RuntimeError, match="not finite"):
        optimizer.step(lambda: p.square().sum() * torch.nan)
    optimizer.step(lambda: p.square().sum())
    assert float(p.detach().norm()) < 1


def test_negative_curvature_is_left():
    """From beside a maximum, both solvers refuse the matrix until λ makes it positive definite."""
    for solver in ("cholesky", "cg"):
        p = nn.Parameter(torch.full((2,), 0.1, dtype=torch.float64))
        optimizer = LazySSN([p], Lambda0=1e-3, linear_solver=solver)
        for _ in range(30):
            optimizer.step(lambda p=p: ((p**2 - 1) ** 2).sum())
        np.testing.assert_allclose(p.detach().numpy(), 1, atol=1e-6)


BAD = [
    ({"hess_every": 0}, ValueError, "hess_every must be"),
    ({"Lambda0": 0.0}, ValueError, "Lambda0 must be"),
    ({"power": -1.0}, ValueError, "power must be"),
    ({"alpha": 1.0}, ValueError, "alpha must be"),
    ({"beta": 0.7}, ValueError, "beta must be"),
    ({"reset_lambda": 1}, ValueError, "reset_lambda must be"),
    ({"linear_solver": "spectral"}, ValueError, "linear_solver must be"),
    ({"cg_tol": 0.0}, ValueError, "cg_tol must be"),
    ({"chunk_size": 0}, ValueError, "chunk_size must be"),
]


@pytest.mark.parametrize(("settings", "error", "message"), BAD)
def test_bad_settings(settings, error, message):
    with pytest.raises(error, match=message):
        LazySSN([nn.Parameter(torch.ones(2))], **settings)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_bad_dtypes(dtype):
    with pytest.raises(TypeError, match="params must be float32 or float64"):
        LazySSN([nn.Parameter(torch.ones(2, dtype=dtype))])


def test_bad_use():
    p = nn.Parameter(torch.ones(2))
    optimizer = LazySSN([p])
    with pytest.raises(ValueError, match="one param group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(RuntimeError, match="needs a closure"):
        optimizer.step()
    with pytest.raises(TypeError, match="closure must return the loss"):
        optimizer.step(lambda: 1.0)
    with pytest.raises(TypeError, match="closure must return the loss"):
        optimizer.step(lambda: p)
