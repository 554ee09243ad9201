"""The optimizer of two losses: its steps are those of the function, state, closures, bad input."""

from __future__ import annotations

import copy
import io
import math

import numpy as np
import pytest
import torch

from thalweg.bilevel import SDBPG, bilevel_stationarity
from thalweg.bilevel.barrier_descent import storm_weight
from thalweg.bilevel.dynamic_barrier import barrier_multiplier
from thalweg.bilevel.paired_losses import inner_products
from thalweg.common.torch_gradients import NonFiniteGradientError

A = torch.tensor([[1.0, 2.0, -1.0], [0.5, -1.0, 1.0]], dtype=torch.float64)
TARGET = torch.tensor([3.0, -1.0, 2.0], dtype=torch.float64)


def make(dtype=torch.float64, **settings):
    """Return two parameters in two groups, closures of f and g on batches of their own."""
    x = torch.nn.Parameter(torch.tensor([0.5, -0.5], dtype=dtype))
    y = torch.nn.Parameter(torch.tensor([0.25], dtype=dtype))
    optimizer = SDBPG([{"params": [x]}, {"params": [y]}], **({"lr": 0.05} | settings))
    generator = torch.Generator().manual_seed(0)

    def joined():
        return torch.cat([x, y])

    def noisy(loss, generator):
        noise = torch.randn(3, generator=generator, dtype=torch.float64).to(dtype)
        return loss + 0.1 * (noise * joined()).sum()

    def upper(seed=None):
        g = generator if seed is None else torch.Generator().manual_seed(seed)
        return noisy((joined() - TARGET.to(dtype)).square().sum() / 2, g)

    def lower(seed=None):
        g = generator if seed is None else torch.Generator().manual_seed(seed)
        return noisy((A.to(dtype) @ joined() - 1).square().sum() / 2, g)

    return optimizer, joined, upper, lower


def gradient(loss, params):
    return torch.cat(torch.autograd.grad(loss, params))


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(("variant", "rho"), [("plain", 0.0), ("pr", 2.0)])
def test_steps_are_those_of_the_formula(variant, rho):
    shared = {"alpha": 0.5, "delta": 0.1, "delta_power": 0.5, "p": 0.5}
    optimizer, joined, upper, lower = make(variant=variant, rho=rho, **shared)
    twin, twin_joined, twin_upper, twin_lower = make(variant=variant, rho=rho, **shared)
    for k in range(5):
        params = params_of(twin)
        f, g, g_step = (gradient(c(), params) for c in (twin_upper, twin_lower, twin_lower))
        delta = 0.1 / math.sqrt(k + 1)
        fg, gg = float(f @ g), float(g @ g)
        lam = barrier_multiplier(fg, gg, alpha=0.5, delta=delta, p=0.5, rho=rho)
        expected = twin_joined().detach() - 0.05 * (f + lam * g_step)
        with torch.no_grad():
            params[0].copy_(expected[:2])
            params[1].copy_(expected[2:])
        stats = optimizer.step(upper, lower)
        assert stats.lam == pytest.approx(lam, rel=1e-12)
        assert stats.delta == pytest.approx(delta)
        assert stats.norm_g == pytest.approx(math.sqrt(gg))
        assert joined().tolist() == pytest.approx(expected.tolist(), rel=1e-12)


@pytest.mark.parametrize("beta", [None, 30.0])
def test_storm_steps_are_those_of_the_formula(beta):
    optimizer, joined, upper, lower = make(variant="vr-pr", rho=2.0, beta=beta, first=3)
    seeds = []

    def recorded(closure):
        def call(seed):
            seeds.append(seed)
            return closure(seed)

        return call

    points, estimates = [], []
    for k in range(4):
        seeds.clear()
        points.append(joined().detach().clone())
        optimizer.step(recorded(upper), recorded(lower))
        state = [optimizer.state[p] for p in params_of(optimizer)]
        estimates.append([torch.cat([s[name] for s in state]) for name in ("upper", "lower")])
        after = joined().detach().clone()
        f, g = estimates[-1]
        lam = barrier_multiplier(float(f @ g), float(g @ g), alpha=1.0, delta=1e-3, rho=2.0)
        assert after.tolist() == pytest.approx((points[-1] - 0.05 * (f + lam * g)).tolist())
        if k == 0:
            # The replay, and two more batches, of each level.
            assert len(seeds) == 8
            assert len(set(seeds)) == 6
            continue
        assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
        weight = storm_weight(k, beta, 0.05)
        for level, (closure, seed) in enumerate(((upper, seeds[0]), (lower, seeds[2]))):
            values = []
            for point in (points[-1], points[-2]):
                with torch.no_grad():
                    params_of(optimizer)[0].copy_(point[:2])
                    params_of(optimizer)[1].copy_(point[2:])
                values.append(gradient(closure(seed), params_of(optimizer)))
            expected = values[0] + (1 - weight) * (estimates[-2][level] - values[1])
            assert estimates[-1][level].tolist() == pytest.approx(expected.tolist(), rel=1e-12)
        with torch.no_grad():
            params_of(optimizer)[0].copy_(after[:2])
            params_of(optimizer)[1].copy_(after[2:])


def test_first_estimate_of_storm_is_the_mean_of_its_batches():
    optimizer, _, upper, lower = make(variant="vr-pr", rho=1.0, first=3)
    twin, _, twin_upper, _ = make()
    seeds = []
    optimizer.step(lambda seed: seeds.append(seed) or upper(seed), lower)
    each = [gradient(twin_upper(seed), params_of(twin)) for seed in sorted(set(seeds))]
    state = torch.cat([optimizer.state[p]["upper"] for p in params_of(optimizer)])
    assert state.tolist() == pytest.approx((sum(each) / 3).tolist(), rel=1e-12)


def test_adaptive_perturbation_is_the_larger_of_target_and_variance():
    optimizer, _, _, _ = make(delta="auto", eps_g=0.1, alpha=2.0)
    f, g, other = (
        [torch.tensor([a, b], dtype=torch.float64), torch.tensor([c], dtype=torch.float64)]
        for a, b, c in ((0.0, 3.0, 4.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))
    )
    assert optimizer.step(grads=(f, g, other)).delta == pytest.approx(2 * 0.1**3 / 5)
    far = [other[0] + 2, other[1]]
    optimizer.step(grads=(f, g, far))  # ‖g - g'‖²/2 = 4, of which a tenth counts
    assert optimizer.step(grads=(f, g, other)).delta == pytest.approx(0.4)


def test_limits():
    """δ → ∞ is SGD on f; an inactive barrier too; ρ → ∞ goes along g."""
    for settings in ({"delta": 1e30}, {"alpha": 1e-12}):
        optimizer, joined, _, _ = make(**settings)
        start = joined().detach().clone()
        f, g = (
            [torch.ones(2).double(), torch.ones(1).double()],
            [torch.ones(2).double(), -torch.ones(1).double()],
        )
        stats = optimizer.step(grads=(f, g))
        assert stats.lam == pytest.approx(0, abs=1e-12)
        assert (start - joined()).tolist() == pytest.approx([0.05] * 3)
    optimizer, joined, _, _ = make(variant="pr", rho=1e9, lr=1e-9)
    start = joined().detach().clone()
    optimizer.step(grads=(f, g))
    assert (start - joined()).tolist() == pytest.approx([1.0, 1.0, -1.0], rel=1e-6)
    optimizer, _, _, _ = make(lam_max=0.25)
    assert optimizer.step(grads=([-h for h in g], g)).lam == 0.25


@pytest.mark.parametrize("variant", ["plain", "pr", "vr-pr"])
@pytest.mark.parametrize("delta", [1e-3, "auto"])
def test_every_variant_reaches_stationarity(variant, delta):
    rho = 0.0 if variant == "plain" else 3.0
    optimizer, joined, upper, lower = make(lr=0.01, variant=variant, rho=rho, delta=delta)
    points = []
    for _ in range(1500):
        optimizer.step(upper, lower)
        points.append(joined().detach().clone())
    x = torch.stack(points[750:]).mean(dim=0)
    eps_f, eps_g, _ = bilevel_stationarity(x - TARGET, A.T @ (A @ x - 1))
    assert eps_f < 0.1
    # Half batches with a variance of 0.03 cannot tell smaller gradients from noise.
    assert eps_g < (0.2 if variant == "vr-pr" else 0.6)


def test_variance_reduction_lowers_the_error():
    errors = {}
    for variant in ("pr", "vr-pr"):
        optimizer, joined, upper, lower = make(lr=0.05, variant=variant, rho=3.0, delta=1.0)
        tail = []
        for k in range(1200):
            optimizer.step(upper, lower)
            if k >= 600:
                tail.append(joined().detach().clone())
        x = torch.stack(tail)
        errors[variant] = float(x.var(dim=0).sum())
    assert errors["vr-pr"] < 0.3 * errors["pr"]


@pytest.mark.parametrize("settings", [{}, {"delta": "auto"}, {"variant": "vr-pr", "rho": 2.0}])
def test_state_dict_resumes_bit_for_bit(settings):
    optimizer, joined, upper, lower = make(**settings)
    for _ in range(3):
        optimizer.step(upper, lower)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other, other_joined, other_upper, other_lower = make(**settings)
    with torch.no_grad():
        for p, q in zip(params_of(other), params_of(optimizer), strict=True):
            p.copy_(q)
    other.load_state_dict(torch.load(file, weights_only=True))
    if settings.get("variant") != "vr-pr":  # bring the stream of batches to the same place
        for _ in range(3):
            other_upper(), other_lower(), other_lower()
    for _ in range(3):
        optimizer.step(upper, lower)
        other.step(other_upper, other_lower)
    assert joined().tolist() == other_joined().tolist()
    assert copy.deepcopy(optimizer).state_dict()["param_groups"][0]["k"] == 6


def test_frozen_and_unused_parameters_stay():
    used, unused, frozen = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = SDBPG([used, unused, frozen], lr=0.1)
    optimizer.step(lambda: used.sum() + frozen.sum(), lambda: used.square().sum())
    assert (used != 1).all()
    assert (unused == 1).all()
    assert (frozen == 1).all()


def test_group_has_a_step_size_of_its_own_and_a_tensor_may_be_one():
    x, y = (torch.nn.Parameter(torch.ones(1)) for _ in range(2))
    optimizer = SDBPG([{"params": [x]}, {"params": [y], "lr": 0.1}], lr=torch.tensor(0.2))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)
    ones, zeros = [torch.ones(1)] * 2, [torch.zeros(1)] * 2
    optimizer.step(grads=(ones, zeros))
    assert (x.item(), y.item()) == pytest.approx((0.8, 0.9))
    schedule.step()
    optimizer.step(grads=(ones, zeros))
    assert (x.item(), y.item()) == pytest.approx((0.7, 0.85))


def test_mixed_dtypes_and_low_precision():
    x = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    y = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
    optimizer = SDBPG([x, y], lr=0.1)
    stats = optimizer.step(
        lambda: x.sum().float() + y.sum(), lambda: -(x.float().sum() + y.sum()).square() / 2
    )
    assert (x.dtype, y.dtype) == (torch.bfloat16, torch.float32)
    assert stats.norm_g == pytest.approx(6 * math.sqrt(6))
    assert inner_products(([], []), ([], [])) == [0.0, 0.0]


def test_inner_products_do_not_lose_digits():
    rng = np.random.default_rng(0)
    a, b = (torch.tensor(rng.standard_normal(10**6) + 1, dtype=torch.float32) for _ in range(2))
    exact = float(a.double() @ b.double())
    assert inner_products(([a], [b]))[0] == pytest.approx(exact, rel=1e-5)


def test_gradients_that_are_not_finite_are_skipped():
    optimizer, joined, upper, lower = make(variant="vr-pr", rho=1.0)
    optimizer.step(upper, lower)
    start = joined().detach().clone()
    held = [optimizer.state[p]["upper"].clone() for p in params_of(optimizer)]
    stats = optimizer.step(lambda seed: upper(seed) * math.inf, lower)
    assert math.isnan(stats.lam)
    assert optimizer.n_skipped == 1
    assert (joined() == start).all()
    for before, p in zip(held, params_of(optimizer), strict=True):
        assert (optimizer.state[p]["upper"] == before).all()
    for _ in range(8):
        optimizer.step(upper, lambda seed: lower(seed) * math.nan)
    with pytest.raises(NonFiniteGradientError):
        optimizer.step(upper, lambda seed: lower(seed) * math.nan)


def test_batch_normalization_must_not_see_the_point_before():
    layer, norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)
    optimizer = SDBPG(layer.parameters(), lr=0.1, variant="vr-pr", rho=1.0)
    data = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))

    def upper(seed):
        return norm(layer(data)).square().sum()

    def lower(seed):
        return layer(data).sum()

    with pytest.raises(ValueError, match="batch normalization: set it to eval"):
        optimizer.step(upper, lower)
    norm.eval()
    optimizer.step(upper, lower)
    optimizer.step(upper, lower)


# --- bad input


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be a finite number >= 0"),
        ({"lr": torch.ones(2)}, ValueError, "lr must hold one number"),
        ({"alpha": 0.0}, ValueError, "alpha must be a finite number > 0"),
        ({"delta": 0.0}, ValueError, "delta must be a finite number > 0"),
        ({"delta": "auto", "delta_power": 1.0}, ValueError, "delta_power must be 0"),
        ({"delta_power": -1.0}, ValueError, "delta_power must be"),
        ({"p": -0.5}, ValueError, "p must be"),
        ({"variant": "vr"}, ValueError, "variant must be one of"),
        ({"rho": 1.0}, ValueError, "rho must be 0 for variant='plain'"),
        ({"variant": "pr"}, ValueError, "rho must be a finite number > 0"),
        ({"beta": 0.0}, ValueError, "beta must be"),
        ({"lam_max": 0.0}, ValueError, "lam_max must be"),
        ({"split": 1}, ValueError, "split must be one of"),
        ({"eps_g": 0.0}, ValueError, "eps_g must be"),
        ({"first": 0}, ValueError, "first must be"),
        ({"seed": -1}, ValueError, "seed must be"),
    ],
)
def test_settings_that_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_groups_that_are_refused():
    optimizer = make()[0]
    with pytest.raises(ValueError, match="delta must be the same in all groups"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "delta": 1.0})
    with pytest.raises(TypeError, match="complex"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1) + 1j)]})
    assert len(optimizer.param_groups) == 2


def test_steps_that_are_refused():
    optimizer, joined, upper, lower = make()
    f = [torch.ones(2).double(), torch.ones(1).double()]
    with pytest.raises(TypeError, match="closure_lower must be a function"):
        optimizer.step(upper)
    with pytest.raises(ValueError, match="must be two functions"):
        optimizer.step(upper, upper)
    with pytest.raises(TypeError, match="closure_upper must return a loss that depends"):
        optimizer.step(lambda: 1.0, lower)
    with pytest.raises(TypeError, match="got shape \\(3,\\)"):
        optimizer.step(joined, lower)
    with pytest.raises(ValueError, match="grads must be None where closures"):
        optimizer.step(upper, lower, grads=(f, f))
    with pytest.raises(ValueError, match="got 1 parts"):
        optimizer.step(grads=(f,))
    with pytest.raises(ValueError, match="a gradient for each trainable parameter"):
        optimizer.step(grads=(f, f[:1]))
    with pytest.raises(ValueError, match="for delta='auto'"):
        make(delta="auto")[0].step(grads=(f, f))
    storm, _, upper, lower = make(variant="vr-pr", rho=1.0)
    with pytest.raises(ValueError, match="needs closures"):
        storm.step(grads=(f, f))
    with pytest.raises(ValueError, match="closure_upper must return the same loss"):
        storm.step(lambda seed: upper(), lower)


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = SDBPG(table.parameters(), lr=0.1)
    index = torch.tensor([1])
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step(lambda: table(index).sum(), lambda: table(index).square().sum())


def test_one_batch_for_both_is_warned_of():
    with pytest.warns(UserWarning, match="from the same batch"):
        optimizer, _, _, lower = make(split=False)
    calls = []
    optimizer.step(lambda: params_of(optimizer)[0].sum(), lambda: calls.append(1) or lower())
    assert len(calls) == 1
    with pytest.warns(UserWarning, match="from the same batch"):
        optimizer, joined, upper, lower = make(split=False, delta="auto", eps_g=1e-9)
    start = joined().detach().clone()
    twin, _, twin_upper, twin_lower = make()
    f, first, second = (
        gradient(c(), params_of(twin)) for c in (twin_upper, twin_lower, twin_lower)
    )
    stats = optimizer.step(upper, lower)
    assert stats.delta == pytest.approx(float((first - second).square().sum()) / 4)
    g = (first + second) / 2
    assert joined().tolist() == pytest.approx((start - 0.05 * (f + stats.lam * g)).tolist())
