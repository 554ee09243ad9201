"""KoalaPP and Koala: the Kalman algebra, the scalars around it, and what they refuse."""

import copy
import io
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.training import Koala, KoalaPP, NonFiniteGradientError
from thalweg.training.tensor_blocks import BLOCK, inner_products

BOTH = [True, False]


def parameter(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def measurements(d, steps, seed=1, smooth=0.0):
    """Return gradients (steps, d), which turn slowly if ``smooth``, and positive losses."""
    generator = torch.Generator().manual_seed(seed)
    grads = torch.randn(steps, d, generator=generator, dtype=torch.float64)
    for i in range(1, steps):
        grads[i] = smooth * grads[i - 1] + (1 - smooth) * grads[i]
    return grads, 0.1 + torch.rand(steps, generator=generator, dtype=torch.float64)


def feed(optimizer, params, grads, loss, **more):
    for p, grad in zip(params, grads, strict=True):
        p.grad = None if grad is None else grad.clone().to(p.dtype)
    return optimizer.step(loss=loss, **more)


def v_of(optimizer, p):
    """Return v = u - qH."""
    state = optimizer.state[p]
    return state["u"] - optimizer.param_groups[0]["q"] * state["H"]


def s_of(optimizer, p):
    return float(optimizer.state[p]["S"])


class Formula:
    """The boxed recursion of the paper, entry by entry, in NumPy."""

    def __init__(self, theta, *, lr, sigma, q, R, symmetric, first="exact", decay=0.0):
        self.theta, self.lr, self.sigma, self.q, self.R = theta.copy(), lr, sigma, q, R
        self.symmetric, self.first, self.decay = symmetric, first, decay
        self.H = None
        self.resets = 0

    def turned(self, H):
        v, old, q = self.v, self.H, self.q
        alpha = H @ old / (old @ old)
        lam = H @ (v + q * old) / self.S
        rho = H @ v / (old @ old) - (H @ old) * (old @ v) / (old @ old) ** 2
        rho = rho if self.symmetric else 0.0
        return (alpha - lam) * v + q * (H - lam * old) + rho * old

    def step(self, gradient, loss):
        H = gradient + self.decay * self.theta
        loss = loss + self.decay / 2 * self.theta @ self.theta
        if self.H is None:
            self.v = self.sigma * H
            if self.first == "reference":
                self.H, self.S = H, self.v @ H + self.q * H @ H + self.R
                self.v = self.turned(H)
        else:
            self.v = self.turned(H)
        self.H, self.S = H, (self.v + self.q * H) @ H + self.R
        if self.S <= self.R / 2:
            self.resets += 1
            self.v = self.sigma * H
            self.S = (self.v + self.q * H) @ H + self.R
        self.theta -= self.lr * loss * (self.v + self.q * H) / self.S


# The recursion


@pytest.mark.parametrize("symmetric", BOTH)
@pytest.mark.parametrize("first", ["exact", "reference"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_it_follows_the_formula(symmetric, first, decay):
    p = parameter(7)
    settings = {"lr": 0.7, "sigma": 0.6, "q": 0.05, "symmetric": symmetric, "first": first}
    formula = Formula(p.detach().numpy(), R=0.4, decay=decay, **settings)
    optimizer = KoalaPP([p], r=0.4, weight_decay=decay, **settings)
    for grad, loss in zip(*measurements(7, 40, smooth=0.8), strict=True):
        feed(optimizer, [p], [grad], loss)
        formula.step(grad.numpy(), float(loss))
        np.testing.assert_allclose(p.detach().numpy(), formula.theta, rtol=1e-9)
        np.testing.assert_allclose(v_of(optimizer, p).numpy(), formula.v, rtol=1e-8, atol=1e-10)
        # S from the cached products against the direct formula.
        assert s_of(optimizer, p) == pytest.approx(formula.S, rel=1e-9)
    assert optimizer.n_resets == formula.resets


@pytest.mark.parametrize("symmetric", BOTH)
def test_a_surrogate_that_is_not_positive_is_restarted(symmetric):
    """Independent gradients turn by about 90°, where it can make S smaller than R / 2."""
    p = parameter(5)
    settings = {"lr": 1.0, "sigma": 10.0, "q": 1e-3, "symmetric": symmetric, "first": "exact"}
    formula = Formula(p.detach().numpy(), R=1.0, **settings)
    optimizer = KoalaPP([p], r=1.0, **settings)
    for grad, loss in zip(*measurements(5, 60), strict=True):
        feed(optimizer, [p], [grad], loss)
        formula.step(grad.numpy(), float(loss))
        assert s_of(optimizer, p) > 1 / 2
    assert optimizer.n_resets == formula.resets > 0
    np.testing.assert_allclose(p.detach().numpy(), formula.theta, rtol=1e-6)


@pytest.mark.parametrize("symmetric", BOTH)
def test_one_dimension_is_the_scalar_kalman_filter(symmetric):
    """There the surrogate is exact, and P_k = P_{k|k-1} R / S_k (published: P - P²H²/S)."""
    p = parameter(1)
    sigma, q, R, P = 0.5, 0.2, 0.3, 0.5
    optimizer = KoalaPP([p], sigma=sigma, q=q, r=R, symmetric=symmetric, first="exact")
    for grad, loss in zip(*measurements(1, 50), strict=True):
        before = p.item()
        feed(optimizer, [p], [grad], loss)
        H = grad.item()
        assert v_of(optimizer, p).item() == pytest.approx(H * P, rel=1e-10)
        S = H * (P + q) * H + R
        assert p.item() == pytest.approx(before - float(loss) * (P + q) * H / S, rel=1e-10)
        P = (P + q) * R / S


@pytest.mark.parametrize("symmetric", BOTH)
def test_a_constant_direction_is_the_dense_filter(symmetric):
    d, sigma, q, R = 6, 0.5, 0.2, 0.3
    p = parameter(d)
    direction, scales = measurements(d, 50)
    P = sigma * torch.eye(d, dtype=torch.float64)
    optimizer = KoalaPP([p], sigma=sigma, q=q, r=R, symmetric=symmetric, first="exact")
    for i, scale in enumerate(scales):
        H = (-1) ** i * scale * direction[0]
        feed(optimizer, [p], [H], 1.0)
        torch.testing.assert_close(v_of(optimizer, p), H @ P, rtol=1e-10, atol=1e-12)
        predicted = P + q * torch.eye(d, dtype=torch.float64)
        gain = predicted @ H
        P = predicted - torch.outer(gain, gain) / (H @ gain + R)
    assert optimizer.n_resets == 0


@pytest.mark.parametrize("symmetric", BOTH)
def test_the_surrogate_is_the_matrix_of_least_norm(symmetric):
    """A dense least-squares oracle for H' P, with q = 0 and R = ∞ so that only it is left."""
    d = 5
    p = parameter(d)
    (H, v, H_next), _ = measurements(d, 3, seed=3)
    optimizer = KoalaPP([p], sigma=1.0, q=0.0, r=1e30, symmetric=symmetric, first="exact")
    feed(optimizer, [p], [H], 1.0)
    state = optimizer.state[p]
    state["u"].copy_(v)
    state["Hu"].copy_(H @ v)
    feed(optimizer, [p], [H_next], 1.0)

    pairs = [(i, j) for i in range(d) for j in range(d) if j >= i or not symmetric]
    constraint = np.zeros((d, len(pairs)))
    weights = np.ones(len(pairs))
    for column, (i, j) in enumerate(pairs):
        constraint[j, column] += float(H[i])
        if symmetric and i != j:
            constraint[i, column] += float(H[j])
            weights[column] = math.sqrt(2)  # both entries count in the Frobenius norm
    entries = np.linalg.lstsq(constraint / weights, v.numpy(), rcond=None)[0] / weights
    P = np.zeros((d, d))
    for (i, j), entry in zip(pairs, entries, strict=True):
        P[i, j] = entry
        if symmetric:
            P[j, i] = entry
    np.testing.assert_allclose(H.numpy() @ P, v.numpy(), rtol=1e-9)
    np.testing.assert_allclose(state["u"].numpy(), H_next.numpy() @ P, rtol=1e-10, atol=1e-12)


def test_two_equal_gradients():
    p = parameter(4)
    grads, _ = measurements(4, 2, smooth=0.5)
    optimizer = KoalaPP([p], sigma=0.3, q=0.2, r=0.5)
    for grad in grads:
        feed(optimizer, [p], [grad], 1.0)
    u, S = optimizer.state[p]["u"].clone(), s_of(optimizer, p)
    feed(optimizer, [p], [grads[1]], 1.0)
    lam = float(grads[1] @ u) / S
    torch.testing.assert_close(v_of(optimizer, p), (1 - lam) * u, rtol=1e-10, atol=1e-14)


def test_the_reference_start_is_one_turn_from_sigma_h():
    p = parameter(3)
    grads, _ = measurements(3, 1)
    optimizer = KoalaPP([p], sigma=0.3, q=0.2, r=0.5)
    feed(optimizer, [p], [grads[0]], 1.0)
    S0 = 0.5 * float(grads[0] @ grads[0]) + 0.5
    lam = 0.5 * float(grads[0] @ grads[0]) / S0
    torch.testing.assert_close(v_of(optimizer, p), (1 - lam) * 0.5 * grads[0])


# The step


def test_certain_weights_do_not_move():
    p = parameter(4)
    start = p.detach().clone()
    optimizer = KoalaPP([p], sigma=1.0, q=0.0, r=1e30)
    for grad, loss in zip(*measurements(4, 5), strict=True):
        feed(optimizer, [p], [grad], loss)
    torch.testing.assert_close(p.detach(), start, rtol=0, atol=1e-25)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_without_noise_the_first_step_is_polyaks(make):
    p = parameter(4)
    start = p.detach().clone()
    grads, _ = measurements(4, 1)
    square = float(grads[0] @ grads[0])
    more = {"first": "exact"} if make is KoalaPP else {}
    optimizer = make([p], sigma=1.0, q=0.1, r=1e-12 * square, target_loss=0.5, **more)
    feed(optimizer, [p], [grads[0]], 2.0)
    torch.testing.assert_close(p.detach(), start - 1.5 / square * grads[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_a_linear_measurement_is_met_in_one_step(make):
    """Also one below the target, of which a warning tells."""
    p = parameter(4)
    a = torch.tensor([1.0, -2.0, 0.5, 1.5], dtype=torch.float64)
    more = {"first": "exact"} if make is KoalaPP else {}
    optimizer = make([p], r=1e-12, **more)
    value = a @ p - 3
    assert value < 0
    value.backward()
    with pytest.warns(UserWarning, match=r"is below target_loss=0: such a step moves uphill"):
        optimizer.step(loss=value)
    assert abs(a @ p - 3) < 1e-8
    with warnings.catch_warnings(action="error"):  # only once
        feed(optimizer, [p], [a], -1e-9)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_the_scale_of_the_loss_does_not_matter_if_r_follows_it(make, scale):
    runs = []
    for factor in (1.0, scale):
        p = parameter(6)
        optimizer = make([p], r=lambda loss, loss_sq: 0.3 * loss_sq)
        for grad, loss in zip(*measurements(6, 30, smooth=0.7), strict=True):
            feed(optimizer, [p], [factor * grad], factor * loss)
        runs.append(p.detach())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_r_is_a_running_average_of_squared_losses(make):
    p, q = parameter(3), parameter(3)
    averaging = make([p], alpha_r=0.8)
    told = make([q], r=lambda loss, loss_sq: R)
    R = 1.0
    grads, losses = measurements(3, 10, smooth=0.5)
    for i, (grad, loss) in enumerate(zip(grads, losses, strict=True)):
        more = {"loss_sq": 2.0 * float(loss) ** 2} if i % 2 else {}
        R = 0.8 * R + 0.2 * float(loss) ** 2 * (2 if i % 2 else 1)
        feed(averaging, [p], [grad], loss, **more)
        feed(told, [q], [grad], loss)
        torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_r_may_return_a_tensor(make):
    p, q = parameter(3), parameter(3)
    optimizers = [make([p], r=lambda loss, loss_sq: loss_sq / 2), make([q], r=0.125)]
    grads, _ = measurements(3, 1)
    for optimizer, x in zip(optimizers, (p, q), strict=True):
        feed(optimizer, [x], grads, 0.5)
    assert torch.equal(p, q)


@pytest.mark.parametrize("settings", [{}, {"variant": "V"}, {"variant": "M"}])
@pytest.mark.parametrize("scope", ["tensor", "group"])
def test_a_vanishing_gradient_changes_nothing_but_r(settings, scope):
    p, q = parameter(3), parameter(2)
    optimizer = (Koala if settings else KoalaPP)([p, q], scope=scope, eps=1e-6, **settings)
    grads, _ = measurements(3, 4, smooth=0.5)
    for grad in grads:
        feed(optimizer, [p, q], [grad, grad[:2]], 1.0)
    before = copy.deepcopy([p.detach(), q.detach(), optimizer.state_dict()])
    feed(optimizer, [p, q], [grads[0] * 1e-8, grads[0][:2] * 1e-8], 3.0)
    assert torch.equal(before[0], p)
    assert torch.equal(before[1], q)
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in before[2]["state"][index].items():
            if name == "R":
                assert float(state[name]) == pytest.approx(0.9 * float(value) + 0.9, rel=1e-12)
            else:
                assert torch.equal(state[name], value)


def test_only_the_tensor_whose_gradient_vanishes_rests():
    p, q = parameter(3), parameter(2)
    start = q.detach().clone()
    optimizer = KoalaPP([p, q])
    feed(optimizer, [p, q], [torch.ones(3), torch.zeros(2)], 1.0)
    assert torch.equal(q, start)
    assert not torch.equal(p, parameter(3))


def test_interpolation_goes_on_far_below_a_gradient_of_1e_9():
    p = parameter(4)
    optimizer = KoalaPP([p], sigma=1.0, q=1.0, r=lambda loss, loss_sq: 1e-3 * loss_sq)
    for _ in range(200):
        optimizer.zero_grad()
        loss = p.square().sum() / 2
        loss.backward()
        optimizer.step(loss=loss)
    assert loss < 1e-22


# Scopes, splitting and precision


@pytest.mark.parametrize("settings", [{}, {"variant": "V"}, {"variant": "M"}])
def test_a_group_is_one_filter_over_the_concatenation(settings):
    make = Koala if settings else KoalaPP
    whole, parts = parameter(10), [parameter(10)[:4], parameter(10)[4:].reshape(2, 3)]
    parts = [nn.Parameter(part.detach().clone()) for part in parts]
    single = make([whole], weight_decay=0.1, **settings)
    grouped = make(parts, scope="group", weight_decay=0.1, **settings)
    for grad, loss in zip(*measurements(10, 30, smooth=0.6), strict=True):
        feed(single, [whole], [grad], loss)
        feed(grouped, parts, [grad[:4], grad[4:].reshape(2, 3)], loss)
        joined = torch.cat([part.detach().reshape(-1) for part in parts])
        torch.testing.assert_close(joined, whole.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("settings", [{}, {"variant": "V"}, {"variant": "M"}])
def test_tensors_of_a_group_have_filters_of_their_own(settings):
    make = Koala if settings else KoalaPP
    together = [parameter(3, seed=5), parameter(2, 2, seed=6)]
    apart = [nn.Parameter(p.detach().clone()) for p in together]
    joint, separate = make(together, **settings), [make([p], **settings) for p in apart]
    for grad, loss in zip(*measurements(4, 20, smooth=0.6), strict=True):
        grads = [grad[:3], grad.reshape(2, 2)]
        feed(joint, together, grads, loss)
        for optimizer, p, part in zip(separate, apart, grads, strict=True):
            feed(optimizer, [p], [part], loss)
    for p, q in zip(together, apart, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-13, atol=0)


@pytest.mark.parametrize("settings", [{}, {"variant": "V"}, {"variant": "M"}])
def test_a_tensor_may_join_a_groups_filter_later_and_pause(settings):
    make = Koala if settings else KoalaPP
    p, q = parameter(3), parameter(2)
    optimizer = make([q, p], scope="group", **settings)
    alone = parameter(3)
    single = make([alone], scope="group", **settings)
    grads, losses = measurements(5, 12, smooth=0.6)
    for grad, loss in zip(grads[:4], losses[:4], strict=True):
        feed(optimizer, [q, p], [None, grad[:3]], loss)
        feed(single, [alone], [grad[:3]], loss)
    torch.testing.assert_close(p, alone, rtol=1e-14, atol=0)
    assert q not in optimizer.state
    assert torch.equal(q, parameter(2))
    for i, (grad, loss) in enumerate(zip(grads[4:], losses[4:], strict=True)):
        before = q.detach().clone()
        feed(optimizer, [q, p], [grad[3:] if i % 2 else None, grad[:3]], loss)
        assert torch.equal(q, before) == (i % 2 == 0)
    assert all(bool(x.isfinite().all()) for x in (p, q))


@pytest.mark.parametrize("settings", [{}, {"variant": "M"}])
def test_long_tensors_go_in_parts(settings, monkeypatch):
    runs = []
    for block in (BLOCK, 16):
        monkeypatch.setattr("thalweg.training.tensor_blocks.BLOCK", block)
        p = parameter(50)
        optimizer = (Koala if settings else KoalaPP)([p], weight_decay=0.1, **settings)
        for grad, loss in zip(*measurements(50, 10, smooth=0.6), strict=True):
            feed(optimizer, [p], [grad], loss)
        runs.append(p.detach())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-12, atol=0)


def test_layouts_that_differ_are_met_entry_by_entry():
    """A channels-last weight, whose gradient is contiguous."""
    plain = parameter(4, 3, 2, 2)
    last = nn.Parameter(plain.detach().clone(memory_format=torch.channels_last))
    optimizers = [KoalaPP([plain]), KoalaPP([last])]
    for grad, loss in zip(*measurements(48, 5, smooth=0.6), strict=True):
        for optimizer, p in zip(optimizers, (plain, last), strict=True):
            feed(optimizer, [p], [grad.reshape(4, 3, 2, 2)], loss)
    torch.testing.assert_close(plain.detach(), last.detach().contiguous(), rtol=1e-12, atol=0)


def test_float32_products_of_long_tensors_are_exact_to_six_digits():
    x = torch.rand(3 * 10**6, generator=torch.Generator().manual_seed(0)) + 0.1
    found = inner_products(lambda a: [torch.dot(a, a)], [x])
    exact = float(x.double().square().sum())
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("settings", [{}, {"variant": "V"}, {"variant": "M"}])
def test_half_precision_follows_float64(settings):
    """bfloat16 has 8 digits: four roundings of 0.4 % each, and those of the factors."""
    runs = []
    for dtype in (torch.float64, torch.bfloat16):
        p = nn.Parameter(torch.zeros(4000, dtype=dtype))
        optimizer = (Koala if settings else KoalaPP)([p], r=0.1, sigma=1.0, q=1.0, **settings)
        grads, losses = measurements(4000, 4, smooth=0.3)
        for grad, loss in zip(grads, 100 * losses, strict=True):
            feed(optimizer, [p], [grad], loss)
        runs.append(p.detach().double())
    assert float((runs[0] - runs[1]).norm() / runs[0].norm()) < 0.03


def test_small_gradients_do_not_underflow():
    """‖H‖⁴ is 1e-60 here, far below what float32 holds."""
    runs = []
    for scale, dtype in ((1.0, torch.float64), (1e-15, torch.float32)):
        p = nn.Parameter(torch.zeros(6, dtype=dtype))
        optimizer = KoalaPP([p], r=lambda loss, loss_sq: loss_sq, eps=1e-30)
        for grad, loss in zip(*measurements(6, 20, smooth=0.7), strict=True):
            feed(optimizer, [p], [scale * grad], scale * loss)
        runs.append(p.detach().double())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-4, atol=1e-6)


def test_an_overflow_of_the_state_restarts_the_filter():
    p = parameter(4, dtype=torch.float32)
    optimizer = KoalaPP([p])
    grads, _ = measurements(4, 3, smooth=0.5)
    feed(optimizer, [p], [grads[0]], 1.0)
    optimizer.state[p]["u"][1] = math.inf
    feed(optimizer, [p], [grads[1]], 1.0)
    assert optimizer.n_resets == 1
    assert optimizer.n_skipped == 0
    torch.testing.assert_close(v_of(optimizer, p), 0.1 * grads[1].float(), rtol=1e-5, atol=1e-6)
    feed(optimizer, [p], [1e25 * grads[2]], 1.0)  # its square overflows in float32
    feed(optimizer, [p], [grads[2]], 1.0)
    assert bool(p.isfinite().all())
    assert all(bool(value.isfinite().all()) for value in optimizer.state[p].values())


# Two processes with half of each tensor and half of each batch, against one with all of it.
SHARDED = """
import sys
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict, set_optimizer_state_dict
)
from thalweg.training import Koala, KoalaPP

torch.set_num_threads(1)
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
generator = torch.Generator().manual_seed(0)
x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
y = torch.randn(8, 3, generator=generator, dtype=torch.float64)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def train(model, optimizer, x, y):
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step(loss=loss, loss_sq=loss.square())
    optimizer.zero_grad()


for make, settings in (
    (KoalaPP, {"weight_decay": 0.1, "r": 0.3}),
    (KoalaPP, {"scope": "group", "r": 0.3}),
    (Koala, {"variant": "M", "r": 0.3}),
):
    whole, sharded = network(), network()
    fully_shard(sharded, mesh=mesh)
    train(whole, make(whole.parameters(), pool_replicas=False, **settings), x, y)
    optimizer = make(sharded.parameters(), **settings)
    train(sharded, optimizer, x[rank::2], y[rank::2])
    for p, q in zip(whole.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach().full_tensor(), rtol=1e-10, atol=1e-12)
    resumed = make(sharded.parameters(), **settings)
    set_optimizer_state_dict(sharded, resumed, get_optimizer_state_dict(sharded, optimizer))
    for p in sharded.parameters():
        for name in ("step", "R"):
            assert torch.equal(resumed.state[p][name], optimizer.state[p][name])
dist.destroy_process_group()
"""


def test_sharded_tensors_have_the_filters_of_whole_ones(tmp_path):
    """Also that replicas share their losses, and that a distributed checkpoint resumes."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


# Koala


def test_koala_v_is_the_dense_filter_projected_to_its_trace():
    d, q, R, p_scalar = 5, 0.2, 0.3, 0.5
    x = parameter(d)
    theta = x.detach().clone()
    optimizer = Koala([x], lr=0.8, sigma=p_scalar, q=q, r=R, weight_decay=0.1)
    for grad, loss in zip(*measurements(d, 20), strict=True):
        H = grad + 0.1 * theta
        P = (p_scalar + q) * torch.eye(d, dtype=torch.float64)
        S = H @ P @ H + R
        theta = theta - 0.8 * (loss + 0.05 * theta @ theta) * (P @ H) / S
        P = P - torch.outer(P @ H, P @ H) / S
        p_scalar = float(P.trace()) / d
        feed(optimizer, [x], [grad], loss)
        torch.testing.assert_close(x.detach(), theta, rtol=1e-10, atol=0)
        assert float(optimizer.state[x]["a"]) == pytest.approx(p_scalar, rel=1e-10)


def test_koala_m_is_the_dense_filter_of_weights_and_momentum():
    """Predict, measure at the prediction, update; the parameters rest at the next prediction."""
    d, q, R, kappa, sigma = 4, 0.2, 0.3, 0.7, 0.5
    x = parameter(d)
    eye = torch.eye(d, dtype=torch.float64)
    F = torch.kron(torch.tensor([[1.0, 1.0], [0.0, kappa]], dtype=torch.float64), eye)
    z = torch.cat([x.detach(), torch.zeros(d, dtype=torch.float64)])
    block = sigma * torch.eye(2, dtype=torch.float64)
    optimizer = Koala([x], lr=0.8, variant="M", sigma=sigma, q=q, kappa=kappa, r=R)
    for grad, loss in zip(*measurements(d, 20), strict=True):
        z = F @ z
        torch.testing.assert_close(x.detach(), z[:d], rtol=1e-10, atol=0)
        P = F @ torch.kron(block, eye) @ F.T + q * torch.eye(2 * d, dtype=torch.float64)
        H = torch.cat([grad, torch.zeros(d, dtype=torch.float64)])
        S = H @ P @ H + R
        z = z - 0.8 * loss * (P @ H) / S
        P = P - torch.outer(P @ H, P @ H) / S
        block = P.reshape(2, d, 2, d).diagonal(dim1=1, dim2=3).mean(-1)
        feed(optimizer, [x], [grad], loss)
        found = torch.stack([optimizer.state[x][name] for name in "abbc"]).reshape(2, 2)
        torch.testing.assert_close(found, block, rtol=1e-10, atol=0)


# Losses and what goes with them


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_a_closure_does_the_same_as_a_loss(make):
    runs = []
    for use_closure in BOTH:
        p = parameter(3)
        optimizer = make([p])

        def closure(p=p, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (p - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(5):
            if use_closure:
                returned = optimizer.step(closure)
            else:
                loss = closure()
                assert optimizer.step(loss=loss.item()) == loss.item()
        runs.append(p.detach())
    assert isinstance(returned, torch.Tensor)
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-14, atol=0)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_grad_scaler_passes_the_loss_on(make):
    p, q = parameter(3, dtype=torch.float32), parameter(3, dtype=torch.float32)
    scaled, plain = make([p]), make([q])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        scaled.zero_grad()
        loss = (p - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(scaled, loss=loss)
        scaler.update()
        feed(plain, [q], [2 / 3 * (q.detach() - 1)], (q - 1).square().mean())
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize("settings", [{}, {"scope": "group", "weight_decay": 0.1, "r": 0.2}])
def test_compiled_steps_are_the_eager_ones(make, settings):
    """One graph, float64: the same to rounding, through a start, restarts and a rest."""
    runs = []
    for compiled in BOTH:
        params = [parameter(3), parameter(2, 2)]
        lr = torch.tensor(0.5, dtype=torch.float64)
        optimizer = make(params, lr=lr, sigma=10.0, q=1e-3, check_finite=False, **settings)
        step = torch.compile(optimizer.step, fullgraph=True) if compiled else optimizer.step
        grads, losses = measurements(7, 12)
        grads[5] *= 1e-15
        for i, (grad, loss) in enumerate(zip(grads, losses, strict=True)):
            for p, part in zip(params, (grad[:3], grad[3:].reshape(2, 2)), strict=True):
                p.grad = part.clone()
            optimizer.param_groups[0]["lr"].fill_(0.5 / (1 + i))
            step(loss=loss)
        runs.append(torch.cat([p.detach().reshape(-1) for p in params]))
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-11, atol=1e-12)


# State


@pytest.mark.parametrize("settings", [{}, {"variant": "V"}, {"variant": "M"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_state_resumes_bit_for_bit_from_a_file(settings, dtype):
    make = Koala if settings else KoalaPP
    p = parameter(5, dtype=dtype)
    optimizer = make([p], sigma=1.0, **settings)
    grads, losses = measurements(5, 20, smooth=0.6)
    for grad, loss in zip(grads[:10], losses[:10], strict=True):
        feed(optimizer, [p], [grad], loss)
    file = io.BytesIO()
    torch.save([p.detach(), optimizer.state_dict()], file)
    file.seek(0)
    start, state = torch.load(file, weights_only=True)
    q = nn.Parameter(start)
    other = make([q])
    other.load_state_dict(state)
    assert other.state[q]["R"].dtype == torch.float64
    for grad, loss in zip(grads[10:], losses[10:], strict=True):
        feed(optimizer, [p], [grad], loss)
        feed(other, [q], [grad], loss)
    assert torch.equal(p, q)
    for name, value in optimizer.state[p].items():
        assert torch.equal(value, other.state[q][name])


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_a_callable_r_stays_with_the_optimizer(make):
    p = parameter(3)
    optimizer = make([p], r=lambda loss, loss_sq: 0.5)
    feed(optimizer, [p], [torch.ones(3)], 1.0)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = make([parameter(3)], r=lambda loss, loss_sq: 0.25)
    other.load_state_dict(state)
    assert other.param_groups[0]["r"](0, 0) == 0.25
    with pytest.raises(ValueError, match="saved with a callable r: construct with one"):
        make([parameter(3)]).load_state_dict(state)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
def test_distributed_checkpoints_may_create_the_state(make):
    """They step along zero gradients, without a loss."""
    p = parameter(3)
    optimizer = make([p])
    p.grad = torch.zeros_like(p)
    assert optimizer.step() is None
    assert [float(optimizer.state[p][name]) for name in ("step", "R")] == [0, 1]
    assert torch.equal(p, parameter(3))


# Bad input


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize("grad", [None, torch.ones(3, dtype=torch.float64)])
def test_a_step_without_a_loss_is_refused(make, grad):
    p = parameter(3)
    optimizer = make([p])
    p.grad = grad
    name = r"KOALA\+\+" if make is KoalaPP else "Koala"
    message = rf"{name} needs the loss value: pass loss= or a closure"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        optimizer.step(lambda: None)
    with pytest.raises(RuntimeError, match="pass loss= or a closure, not both"):
        optimizer.step(lambda: 1.0, loss=1.0)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(2), r"loss must be a real scalar, got a tensor of shape \(2,\), torch.float32"),
        (torch.ones((), dtype=torch.cfloat), r"loss must be a real scalar, got .*complex64"),
        ("low", "loss must be a real scalar, got str"),
        (True, "loss must be a real scalar, got bool"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(make, loss, message):
    p = parameter(3)
    with pytest.raises(RuntimeError, match=message):
        feed(make([p]), [p], [torch.ones(3)], loss)
    with pytest.raises(RuntimeError, match=message.replace("loss", "loss_sq", 1)):
        feed(make([p]), [p], [torch.ones(3)], 1.0, loss_sq=loss)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize(
    ("loss", "entry"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)]
)
def test_what_is_not_finite_is_skipped_and_counted(make, loss, entry):
    p = parameter(3)
    optimizer = make([p])
    feed(optimizer, [p], [torch.ones(3)], 1.0)
    before = copy.deepcopy([p.detach(), optimizer.state_dict()])
    bad = torch.tensor([1.0, entry, 1.0])
    for _ in range(9):
        feed(optimizer, [p], [bad], loss)
    assert optimizer.n_skipped == 9
    assert torch.equal(before[0], p)
    for name, value in before[1]["state"][0].items():
        assert torch.equal(value, optimizer.state[p][name])
    feed(optimizer, [p], [torch.ones(3)], 1.0)
    for _ in range(9):
        feed(optimizer, [p], [bad], loss)
    with pytest.raises(NonFiniteGradientError, match="10 gradients in a row were not finite"):
        feed(optimizer, [p], [bad], loss)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize("r", [lambda *_: 0.0, lambda *_: torch.tensor(-1.0), lambda *_: math.nan])
def test_a_variance_that_is_not_positive_is_refused(make, r):
    p = parameter(3)
    with pytest.raises(ValueError, match="r must "):
        feed(make([p], r=r), [p], [torch.ones(3)], 1.0)


def test_a_negative_mean_of_squares_is_refused():
    p = parameter(3)
    with pytest.raises(ValueError, match="loss_sq must be >= 0"):
        feed(KoalaPP([p]), [p], [torch.ones(3)], 1.0, loss_sq=-20.0)


@pytest.mark.parametrize("make", [KoalaPP, Koala])
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1}, ValueError, "lr must be a finite number >= 0"),
        ({"sigma": -1}, ValueError, "sigma must be a finite number >= 0"),
        ({"q": -0.1}, ValueError, "q must be a finite number >= 0"),
        ({"q": 0, "sigma": 0}, ValueError, "sigma and q must not both be 0"),
        ({"r": 0}, ValueError, "r must be a finite number > 0"),
        ({"r": "high"}, TypeError, "r must be a number"),
        ({"alpha_r": 1}, ValueError, "alpha_r must be a finite number >= 0 and < 1"),
        ({"weight_decay": -1}, ValueError, "weight_decay must be a finite number >= 0"),
        ({"scope": "model"}, ValueError, "scope must be one of 'tensor', 'group'"),
        ({"target_loss": math.nan}, ValueError, "target_loss must be a finite number"),
        ({"eps": 0}, ValueError, "eps must be a finite number > 0"),
        ({"check_finite": 1}, ValueError, "check_finite must be one of False, True"),
        ({"pool_replicas": 1}, ValueError, "pool_replicas must be one of False, True"),
    ],
)
def test_bad_settings_are_refused(make, settings, error, message):
    with pytest.raises(error, match=message):
        make([parameter(3)], **settings)
    if "pool_replicas" not in settings:
        with pytest.raises(error, match=message):
            make([{"params": [parameter(3)], **settings}])


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (KoalaPP, {"symmetric": 1}, "symmetric must be one of False, True"),
        (KoalaPP, {"first": "last"}, "first must be one of 'reference', 'exact'"),
        (Koala, {"variant": "W"}, "variant must be one of 'V', 'M'"),
        (Koala, {"kappa": 1}, "kappa must be a finite number >= 0 and < 1"),
    ],
)
def test_bad_choices_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make([parameter(3)], **settings)
