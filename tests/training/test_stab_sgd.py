"""StabSGD: its update, its two estimators, its phases, and torch's conventions."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.tasks import NoisyChains, NoisyQuadratic, qsc
from thalweg.training import NonFiniteGradientError, StabSGD, stability_ratio

FLOATS = [torch.float32, torch.float64, torch.bfloat16]


def parameter(*values, dtype=torch.float64):
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def feed(optimizer, params, grads):
    """Step once with the given gradients."""
    for p, grad in zip(params, grads, strict=True):
        p.grad = None if grad is None else grad.clone()
    optimizer.step()


def noisy_run(optimizer, params, queries, seed=0, noise=0.5):
    """Descend ½‖x‖² with Gaussian noise."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(queries):
        for p in params:
            p.grad = p.detach() + noise * torch.randn(
                p.shape, generator=generator, dtype=torch.float64
            ).to(p.dtype)
        optimizer.step()


def settings(**changes):
    return {"lr": 0.5, "zeta": 4, "kappa": 0.5, **changes}


# The update


def test_without_noise_it_is_sgd_after_the_first_measurement():
    x0 = torch.linspace(-1, 2, 7, dtype=torch.float64)
    curvature = torch.linspace(0.1, 1, 7, dtype=torch.float64)
    x, y = nn.Parameter(x0.clone()), nn.Parameter(x0.clone())
    stab = StabSGD([x], lr=0.9, weight_decay=0.01, zeta=5)
    sgd = torch.optim.SGD([y], lr=0.9, weight_decay=0.01)
    for _ in range(5):
        feed(stab, [x], [curvature * x.detach()])
    assert torch.equal(x, x0)
    for _ in range(5):
        feed(stab, [x], [curvature * x.detach()])
        feed(sgd, [y], [curvature * y.detach()])
    assert stab.n_updates == 5
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def test_a_scalar_quadratic_is_solved_in_one_step():
    x = parameter(3.0)
    optimizer = StabSGD([x], lr=1 / 4, zeta=2)
    for _ in range(3):
        feed(optimizer, [x], [4 * x.detach()])
    assert x.item() == 0.0
    assert optimizer.n_updates == 1


def test_the_step_is_lr_times_the_ratio_of_the_measured_gradients():
    generator = torch.Generator().manual_seed(1)
    grads = 1 + torch.randn(20, 3, generator=generator, dtype=torch.float64)
    x = parameter(0.0, 0.0, 0.0)
    optimizer = StabSGD([x], lr=0.7, zeta=20)
    for grad in grads:
        feed(optimizer, [x], [grad])
    expected = stability_ratio(grads).value
    assert 0.1 < expected < 0.9
    assert optimizer.stab == pytest.approx(expected, rel=1e-12)
    direction = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    feed(optimizer, [x], [direction])
    torch.testing.assert_close(x.detach(), -0.7 * expected * direction, rtol=1e-12, atol=0)


def test_weight_decay_enters_the_steps_but_not_the_measurement():
    x = parameter(10.0, 0.0)
    optimizer = StabSGD([x], lr=0.5, weight_decay=0.2, zeta=2)
    # Orthogonal gradients: J = 0. With the decay's 2.0 in them they would not be orthogonal.
    for grad in ([1.0, 0.0], [0.0, 1.0]):
        feed(optimizer, [x], [torch.tensor(grad, dtype=torch.float64)])
    assert optimizer.stab == pytest.approx(1e-8)
    optimizer.param_groups[0]["stab"] = 0.5
    feed(optimizer, [x], [torch.tensor([1.0, 1.0], dtype=torch.float64)])
    expected = torch.tensor([10 - 0.25 * (1 + 2), -0.25], dtype=torch.float64)
    torch.testing.assert_close(x.detach(), expected, rtol=1e-14, atol=0)


def test_maximize_ascends_as_torch_does():
    x, y = parameter(1.0, 2.0), parameter(1.0, 2.0)
    stab = StabSGD([x], lr=0.1, zeta=2, weight_decay=0.3, maximize=True)
    sgd = torch.optim.SGD([y], lr=0.1, weight_decay=0.3, maximize=True)
    grad = torch.tensor([1.0, -1.0], dtype=torch.float64)
    for _ in range(3):
        feed(stab, [x], [grad])
    feed(sgd, [y], [grad])
    torch.testing.assert_close(x, y, rtol=1e-14, atol=0)


def test_a_zero_gradient_makes_no_step_but_is_a_sample():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=1.0, zeta=2, weight_decay=0.5)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    feed(optimizer, [x], [zero])
    feed(optimizer, [x], [one])
    # J = <0, 1> = 0: half of the gradients being zero is noise.
    assert optimizer.phase == "descend"
    assert optimizer.stab == pytest.approx(1e-8)
    feed(optimizer, [x], [zero])
    assert x.item() == 1.0
    assert optimizer.n_updates == 0


def test_all_gradients_zero_means_no_noise():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=1.0, zeta=2)
    for _ in range(2):
        feed(optimizer, [x], [torch.zeros(1, dtype=torch.float64)])
    assert optimizer.stab == 1.0


def test_gradients_whose_squares_underflow_still_descend():
    x = parameter(1e-30, dtype=torch.float32)
    optimizer = StabSGD([x], lr=1.0, zeta=2)
    for _ in range(3):
        feed(optimizer, [x], [x.detach()])
    assert x.item() == 0.0


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_ratio_ignores_the_scale_of_the_loss(scale):
    runs = []
    for factor in (1.0, scale):
        x = parameter(1.0, 1.0)
        optimizer = StabSGD([x], lr=0.5 / factor, zeta=10)
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            noise = torch.randn(2, generator=generator, dtype=torch.float64)
            feed(optimizer, [x], [factor * (x.detach() + noise)])
        runs.append(x.detach())
    torch.testing.assert_close(runs[0], runs[1], rtol=1e-9, atol=0)


# The phases


def test_phases_change_at_the_queries_of_the_formula():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=1e-3, zeta=10, kappa=1, gamma=1)
    phases = []
    for _ in range(140):
        feed(optimizer, [x], [torch.ones(1, dtype=torch.float64)])  # a ratio of 1
        phases.append(optimizer.phase)
    changes = [t + 1 for t in range(1, 140) if phases[t] != phases[t - 1]]
    assert changes == [10, 20, 30, 60, 70, 140]
    assert [record.query for record in optimizer.stab_history] == [10, 30, 70]
    assert (optimizer.n_queries, optimizer.n_updates) == (140, 110)


@pytest.mark.parametrize(("kappa", "gamma"), [(1.0, 0.0), (0.1, 1.0), (2.0, 0.5), (0.3, 0.7)])
def test_descend_phases_take_kappa_t_to_the_gamma_steps(kappa, gamma):
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=1e-3, zeta=3, zeta_start=7, kappa=kappa, gamma=gamma)
    expected = []
    t = 7
    while t < 300:
        expected.append(t)
        t += math.ceil(kappa * t**gamma) + 3
    for _ in range(300):
        feed(optimizer, [x], [torch.ones(1, dtype=torch.float64)])
    assert [record.query for record in optimizer.stab_history] == expected


def test_a_measurement_takes_zeta_over_stab_gradients():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=1e-9, zeta=5.99, kappa=1, gamma=1, max_overhead=1)
    # Alternating 1 ± 2: J = 1 - 4/(n - 1) and Z = 5 for n = 6 give the ratio 0.2 / 5 = 0.04.
    for t in range(12):
        feed(optimizer, [x], [torch.tensor([3.0 if t % 2 else -1.0], dtype=torch.float64)])
    assert optimizer.stab == pytest.approx(0.04, rel=1e-12)
    assert optimizer.phase == "measure"
    for t in range(150):
        assert optimizer.phase == "measure"
        feed(optimizer, [x], [torch.tensor([3.0 if t % 2 else -1.0], dtype=torch.float64)])
    assert optimizer.phase == "descend"
    record = optimizer.stab_history[-1]
    assert record.query == 12 + 150
    assert record.stab == pytest.approx((1 - 4 / 149) / 5, rel=1e-9)
    # ‖X‖⁴ is 81 and 1 by halves.
    assert record.kurtosis == pytest.approx(41 / 25, rel=1e-9)
    assert not record.truncated


def test_max_overhead_bounds_a_measurement_and_the_ratio_from_below():
    x = parameter(0.0, 0.0)
    optimizer = StabSGD([x], lr=1e-3, zeta=10, max_overhead=0.75)
    generator = torch.Generator().manual_seed(0)

    def pure_noise(queries):
        for _ in range(queries):
            feed(optimizer, [x], [torch.randn(2, generator=generator, dtype=torch.float64)])

    pure_noise(10)
    optimizer.param_groups[0]["stab"] = 1e-6
    pure_noise(10)  # the descend phase
    # 0.75/0.25 times the 10 steps, plus zeta, instead of 10/1e-6.
    pure_noise(39)
    assert optimizer.phase == "measure"
    # Gradients that cancel exactly: J < 0.
    optimizer._clock["remaining"] = 1
    x.grad = None
    optimizer.state[x]["mean"].zero_()
    optimizer.param_groups[0]["moments"]["second"] = 1.0
    feed(optimizer, [x], [torch.zeros(2, dtype=torch.float64)])
    record = optimizer.stab_history[-1]
    assert record.query == 60
    assert record.truncated
    assert record.stab == pytest.approx(1 / (2 * 40), rel=1e-12)


def test_stab_min_bounds_a_full_measurement_from_below():
    x = parameter(0.0)
    optimizer = StabSGD([x], lr=1.0, zeta=2, stab_min=0.01)
    for grad in (1.0, -1.0):
        feed(optimizer, [x], [torch.tensor([grad], dtype=torch.float64)])
    assert optimizer.stab == 0.01


def test_parameters_rest_while_measuring():
    x = parameter(1.0, -2.0)
    optimizer = StabSGD([x], lr=1.0, zeta=30)
    noisy_run(optimizer, [x], 29)
    assert optimizer.phase == "measure"
    assert x.tolist() == [1.0, -2.0]


# "split"


def test_split_with_equal_micro_batches_has_ratio_one_and_is_sgd():
    x = parameter(1.0, 2.0)
    optimizer = StabSGD([x], lr=0.1, estimator="split")
    grad = torch.tensor([0.1, 0.3], dtype=torch.float64)
    for call in range(1, 8):
        optimizer.step_split([[grad]] * 3)
        assert optimizer.stab == 1.0
        assert optimizer.phase == ("measure" if call <= 5 else "descend")
        assert optimizer.n_queries == 3 * call
    assert optimizer.n_updates == 2
    expected = torch.tensor([1.0, 2.0], dtype=torch.float64) - 2 * 0.1 * grad
    torch.testing.assert_close(x.detach(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("k", [2, 5])
def test_split_follows_the_displayed_formulas(k):
    zeta, calls = 3, 60
    generator = torch.Generator().manual_seed(k)
    grads = torch.randn(calls, k, 4, generator=generator, dtype=torch.float64) + 0.5
    x = parameter(0.0, 0.0, 0.0, 0.0)
    optimizer = StabSGD([x], lr=0.3, estimator="split", zeta=zeta)
    numerator = second = 0.0
    expected = torch.zeros(4, dtype=torch.float64)
    for t in range(calls):
        optimizer.step_split([[grad] for grad in grads[t]])
        gram = grads[t] @ grads[t].T
        j = (gram.sum() - gram.trace()).item() / (k * (k - 1))
        z = gram.trace().item() / k
        weight = max(1 / (t + 1), 1 / max(zeta, 0.1 * t))
        numerator += weight * (j - numerator)
        second += weight * (z - second)
        stab = min(max(numerator / (numerator + (second - numerator) / k), 0), 1)
        assert optimizer.stab == pytest.approx(stab, rel=1e-10)
        if t >= 5:
            expected -= 0.3 * stab * grads[t].mean(0)
    torch.testing.assert_close(x.detach(), expected, rtol=1e-10, atol=1e-12)
    # Recorded at calls 1, 2, 4, 8, 16, 32.
    assert [record.query for record in optimizer.stab_history] == [k * 2**i for i in range(6)]


def test_split_is_consistent():
    # ‖μ‖² = 4 and tr Σ = 4: the mean of 2 has ratio 4 / (4 + 2).
    x = parameter(0.0, 0.0, 0.0, 0.0)
    optimizer = StabSGD([x], lr=1e-6, estimator="split")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3000):
        grads = 1 + torch.randn(2, 4, generator=generator, dtype=torch.float64)
        optimizer.step_split([[grad] for grad in grads])
    # The window is 300 calls: the standard error is about 0.02.
    assert optimizer.stab == pytest.approx(2 / 3, abs=0.06)


def test_split_takes_gradients_of_several_parameters_and_none():
    x, y, unused = parameter(1.0), parameter(1.0, 1.0), parameter(7.0)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = StabSGD(
        [{"params": [x, frozen]}, {"params": [y, unused], "lr": 0.5}], lr=0.1, estimator="split"
    )
    for _ in range(6):
        losses = [(x.sum() * a + (y * a).sum()) for a in (1.0, 1.0)]
        grads = [torch.autograd.grad(loss, [x, y, unused], allow_unused=True) for loss in losses]
        optimizer.step_split(grads)
    assert x.item() == pytest.approx(0.9)
    assert y.tolist() == pytest.approx([0.5, 0.5])
    assert unused.item() == 7.0
    # A gradient that one micro-batch lacks counts as zero.
    optimizer.step_split([[torch.ones(1), None, None], [None, None, None]])
    assert x.item() == pytest.approx(0.9 - 0.1 * optimizer.stab * 0.5)


# Noise


def test_inline_reaches_far_below_where_the_constant_step_rests():
    problem, variance = NoisyQuadratic(np.ones(10), np.ones(10)), 1e-2
    chains = NoisyChains(problem, [variance], np.random.default_rng(0))
    optimizer = StabSGD(chains.parameters, lr=1.0)
    for _ in range(20_000):
        chains.query()
        optimizer.step()
    # With lr = 1 SGD rests at ½ d s² = 0.05.
    assert chains.losses()[0] < 0.05 / 100


def test_the_inline_ratio_tracks_the_exact_one():
    problem, variance = qsc(), 1e-4
    chains = NoisyChains(problem, [variance], np.random.default_rng(1))
    (x,) = chains.parameters
    optimizer = StabSGD([x], lr=1.0, kappa=0.3)
    errors = []
    for _ in range(5000):
        chains.query()
        seen = len(optimizer.stab_history)
        exact = float(problem.stability(x.detach().numpy(), variance))
        optimizer.step()
        if len(optimizer.stab_history) > seen:
            errors.append(math.log(optimizer.stab / exact))
    # 50/stab gradients determine the ratio to a relative standard error of at most (4/50)^½.
    assert len(errors) >= 6
    assert optimizer.stab < 0.1
    assert max(map(abs, errors)) < 0.6


# Scope, param groups, dtypes, devices


def test_scope_group_measures_every_group_by_itself():
    calm, wild = parameter(1.0, 1.0), parameter(1.0, 1.0)
    groups = [{"params": [calm]}, {"params": [wild], "lr": 0.25}]
    optimizer = StabSGD(groups, lr=0.5, zeta=10, scope="group")
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(10):
        samples.append(1 + 2 * torch.randn(2, generator=generator, dtype=torch.float64))
        feed(optimizer, [calm, wild], [torch.ones(2, dtype=torch.float64), samples[-1]])
    expected = max(stability_ratio(samples).value, 1e-8)
    ratios = [group["stab"] for group in optimizer.param_groups]
    assert ratios == [1.0, pytest.approx(expected, rel=1e-12)]
    assert optimizer.stab == min(ratios)
    assert [record.stab for record in optimizer.stab_history] == ratios
    feed(optimizer, [calm, wild], [torch.ones(2, dtype=torch.float64)] * 2)
    assert calm.tolist() == pytest.approx([0.5, 0.5])
    assert wild.tolist() == pytest.approx([1 - 0.25 * expected] * 2)


def test_scope_global_pools_the_groups():
    x, y = parameter(1.0), parameter(1.0, 2.0)
    optimizer = StabSGD([{"params": [x], "lr": 0.1}, {"params": [y]}], lr=0.2, zeta=12)
    generator = torch.Generator().manual_seed(0)
    samples = 0.5 + torch.randn(12, 3, generator=generator, dtype=torch.float64)
    for sample in samples:
        feed(optimizer, [x, y], [sample[:1], sample[1:]])
    expected = stability_ratio(samples).value
    assert [group["stab"] for group in optimizer.param_groups] == pytest.approx([expected] * 2)
    feed(optimizer, [x, y], [torch.ones_like(x), torch.ones_like(y)])
    assert x.item() == pytest.approx(1 - 0.1 * expected)
    assert y.tolist() == pytest.approx([1 - 0.2 * expected, 2 - 0.2 * expected])


def test_split_with_scope_group():
    x, y = parameter(0.0), parameter(0.0)
    optimizer = StabSGD(
        [{"params": [x]}, {"params": [y]}], lr=1.0, estimator="split", scope="group"
    )
    one = torch.ones(1, dtype=torch.float64)
    optimizer.step_split([[one, one], [one, 3 * one]])
    # y: J = 3, Z = 5.
    assert [group["stab"] for group in optimizer.param_groups] == [1.0, pytest.approx(3 / 4)]


def test_half_precision_measures_in_float32():
    # In bfloat16 a running mean would stop moving after some 256 samples.
    p = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = StabSGD([p], lr=1e-3, zeta=2000)
    generator = torch.Generator().manual_seed(0)
    samples = (1 + torch.randn(2000, 4, generator=generator)).to(torch.bfloat16)
    for sample in samples:
        p.grad = sample
        optimizer.step()
    assert optimizer.stab == pytest.approx(stability_ratio(samples).value, rel=1e-4)


def test_long_float32_tensors_are_measured_accurately():
    p = nn.Parameter(torch.zeros(300_000))
    optimizer = StabSGD([p], lr=1e-3, zeta=3)
    generator = torch.Generator().manual_seed(0)
    samples = [0.1 + torch.randn(300_000, generator=generator) for _ in range(3)]
    for sample in samples:
        p.grad = sample
        optimizer.step()
    assert optimizer.stab == pytest.approx(stability_ratio(samples).value, abs=1e-6)


def test_float32_gradients_whose_squares_overflow_are_finite():
    p = nn.Parameter(torch.ones(2))
    optimizer = StabSGD([p], lr=1e-25, zeta=2)
    for _ in range(3):
        feed(optimizer, [p], [torch.full((2,), 1e25)])
    assert (optimizer.n_skipped, optimizer.stab) == (0, 1.0)
    assert p.tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    feed(optimizer, [p], [torch.full((2,), 3e38)])  # their sum overflows too
    assert optimizer.n_skipped == 0


def test_frozen_and_unused_parameters_stay_and_do_not_count():
    x, unused = parameter(1.0), parameter(5.0)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = StabSGD([x, frozen, unused], lr=0.5, zeta=2)
    for _ in range(3):
        feed(optimizer, [x, frozen, unused], [torch.ones(1, dtype=torch.float64), None, None])
    assert (x.item(), unused.item(), frozen.tolist()) == (0.5, 5.0, [1.0, 1.0])
    assert optimizer.stab == 1.0


def test_no_gradients_at_all_is_no_query():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=0.5, zeta=2)
    optimizer.step()
    assert optimizer.n_queries == 0


def test_a_gradient_that_is_sometimes_missing_counts_as_zero_and_warns_once():
    x, y = parameter(0.0), parameter(0.0)
    optimizer = StabSGD([x, y], lr=1.0, zeta=4)
    one = torch.ones(1, dtype=torch.float64)
    rows = [(one, None), (one, 2 * one), (one, None), (one, one)]
    feed(optimizer, [x, y], rows[0])
    with pytest.warns(UserWarning, match="changed during a measurement"):
        feed(optimizer, [x, y], rows[1])
    for row in rows[2:]:
        feed(optimizer, [x, y], row)
    samples = torch.tensor([[1.0, 0], [1, 2], [1, 0], [1, 1]], dtype=torch.float64)
    assert optimizer.stab == pytest.approx(stability_ratio(samples).value, rel=1e-12)


def test_a_scheduler_works_and_warns_once():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=0.5, zeta=2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with pytest.warns(UserWarning, match="scheduler is attached"):
        feed(optimizer, [x], [torch.ones(1, dtype=torch.float64)])
    scheduler.step()
    feed(optimizer, [x], [torch.ones(1, dtype=torch.float64)])
    feed(optimizer, [x], [torch.ones(1, dtype=torch.float64)])
    assert x.item() == 0.75


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_training_step_gives_the_same_trajectory():
    finals = []
    for compiled in (False, True):
        x = parameter(1.0, 2.0)
        optimizer = StabSGD([x], lr=0.5, zeta=3)

        def train(x=x, optimizer=optimizer):
            optimizer.zero_grad()
            loss = (x**2 * torch.tensor([0.5, 1.0], dtype=torch.float64)).sum() / 2
            loss.backward()
            optimizer.step()

        step = torch.compile(train, backend="aot_eager") if compiled else train
        for _ in range(8):
            step()
        assert (optimizer.n_queries, optimizer.n_updates) == (8, 3)
        finals.append(x.detach().clone())
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-12, atol=0)


# Saving, copying


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("queries", [0, 3, 6, 17, 40])
def test_state_dict_resumes_bit_for_bit_from_a_file(queries, dtype):
    """6 queries end in a descend phase and 17 inside a measurement."""
    x = nn.Parameter(torch.linspace(-1, 1, 6).to(dtype))
    optimizer = StabSGD([x], **settings())
    noisy_run(optimizer, [x], queries, seed=1)
    file = io.BytesIO()
    torch.save({"x": x.detach(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    y = nn.Parameter(saved["x"].clone())
    resumed = StabSGD([y], **settings(lr=99.0))
    resumed.load_state_dict(saved["optimizer"])
    noisy_run(optimizer, [x], 60, seed=2)
    noisy_run(resumed, [y], 60, seed=2)
    assert torch.equal(x, y)
    assert resumed.stab_history == optimizer.stab_history
    assert resumed.n_updates == optimizer.n_updates


def test_the_saved_run_was_inside_both_phases():
    x = nn.Parameter(torch.linspace(-1, 1, 6))
    optimizer = StabSGD([x], **settings())
    phases = {}
    for queries in range(1, 41):
        noisy_run(optimizer, [x], 1, seed=queries)
        phases[queries] = optimizer.phase
    assert {phases[3], phases[6], phases[17], phases[40]} == {"measure", "descend"}


def test_loading_copies():
    x, y = parameter(1.0, 1.0), parameter(1.0, 1.0)
    first, second = StabSGD([x], **settings()), StabSGD([y], **settings())
    noisy_run(first, [x], 2)
    second.load_state_dict(first.state_dict())
    noisy_run(second, [y], 1)
    assert first.param_groups[0]["moments"]["count"] == 2
    assert first.n_queries == 2


def test_split_resumes_bit_for_bit():
    def run(optimizer, calls, seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(calls):
            grads = torch.randn(2, 3, generator=generator, dtype=torch.float64) + 1
            optimizer.step_split([[grad] for grad in grads])

    x = parameter(1.0, 2.0, 3.0)
    optimizer = StabSGD([x], lr=0.5, estimator="split", zeta=4)
    run(optimizer, 13, 0)
    y = nn.Parameter(x.detach().clone())
    resumed = StabSGD([y], lr=0.5, estimator="split", zeta=4)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, 30, 1)
    run(resumed, 30, 1)
    assert torch.equal(x, y)


def test_add_param_group_starts_a_new_measurement_and_resumes():
    x, y = parameter(1.0, -1.0), parameter(2.0)
    optimizer = StabSGD([x], **settings())
    noisy_run(optimizer, [x], 5)
    before = optimizer.stab
    assert optimizer.phase == "descend"
    optimizer.add_param_group({"params": [y], "lr": 0.1})
    assert optimizer.phase == "measure"
    assert optimizer.stab == before
    noisy_run(optimizer, [x, y], 2, seed=3)
    copies = [nn.Parameter(p.detach().clone()) for p in (x, y)]
    resumed = StabSGD(copies[:1], **settings())
    resumed.add_param_group({"params": copies[1:]})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[1]["lr"] == 0.1
    noisy_run(optimizer, [x, y], 40, seed=4)
    noisy_run(resumed, copies, 40, seed=4)
    assert torch.equal(x, copies[0])
    assert torch.equal(y, copies[1])


def test_add_param_group_before_the_first_query():
    x, y = parameter(1.0), parameter(2.0)
    optimizer = StabSGD([x], lr=0.5, zeta=2)
    optimizer.add_param_group({"params": y})
    for _ in range(3):
        feed(optimizer, [x, y], [torch.ones(1, dtype=torch.float64)] * 2)
    assert (x.item(), y.item()) == (0.5, 1.5)


@pytest.mark.parametrize("queries", [3, 7])
def test_deep_copies_are_independent_and_go_on_alike(queries):
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = StabSGD(model.parameters(), **settings())
    noisy_run(optimizer, list(model.parameters()), queries)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    noisy_run(optimizer, list(model.parameters()), 30, seed=9)
    assert twin_optimizer.n_queries == queries
    noisy_run(twin_optimizer, list(twin.parameters()), 30, seed=9)
    assert torch.equal(model.weight, twin.weight)


def test_loading_another_optimizers_state_is_refused():
    x = parameter(1.0)
    with pytest.raises(ValueError, match="must come from StabSGD"):
        StabSGD([x], lr=1.0).load_state_dict(torch.optim.SGD([x], lr=1.0).state_dict())


# Replicas


def replica(rank, file, queue, shared):
    """Measure in a group of two processes, each with its own gradients or both with the same."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2
    )
    inline, split = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    generator = torch.Generator().manual_seed(0 if shared else rank)
    samples = 1 + torch.randn(12, 3, generator=generator)
    optimizer = StabSGD([inline], lr=0.1, zeta=12)
    accumulate = StabSGD([split], lr=0.1, estimator="split")
    for t, sample in enumerate(samples):
        inline.grad = sample.clone()
        if t == 7 and rank == 1 and not shared:
            inline.grad[0] = math.nan
        optimizer.step()
        if t < 6:
            accumulate.step_split([[sample]])
    queue.put(
        (rank, samples.tolist(), optimizer.stab, optimizer.phase, accumulate.stab, split.tolist())
    )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shared", [True, False])
def test_replicas_agree_on_the_pooled_ratio(tmp_path, shared):
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    workers = torch.multiprocessing.spawn(
        replica, (tmp_path / "store", queue, shared), nprocs=2, join=False
    )
    results = sorted(queue.get(timeout=60) for _ in range(2))
    while not workers.join():
        pass
    (_, own, stab, phase, split_stab, split), (_, others, *same) = results
    assert same == [stab, phase, split_stab, split]
    assert phase == "descend"
    if shared:
        # The gradients had been averaged before: 12 samples, not 24.
        assert stab == pytest.approx(stability_ratio(torch.tensor(own)).value, rel=1e-5)
    else:
        # One replica skipped a gradient: 23 samples, and steps with the average of two.
        del others[7]
        pooled = stability_ratio(torch.tensor(own + others))
        j, z = pooled.numerator, pooled.second_moment
        assert stab == pytest.approx(j / (j + (z - j) / 2), rel=1e-5)
        pairs = torch.tensor([own[:6], others[:6]]).double()
        j = (pairs[0] * pairs[1]).sum(1).mean().item()
        z = pairs.square().sum(2).mean().item()
        assert split_stab == pytest.approx(j / (j + (z - j) / 2), rel=1e-5)
        direction = pairs[:, 5].mean(0)
        torch.testing.assert_close(
            torch.tensor(split).double(), -0.1 * split_stab * direction, rtol=1e-5, atol=0
        )


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.0}, "lr must be a finite number > 0"),
        ({"lr": -1.0}, "lr must be a finite number > 0"),
        ({"lr": math.nan}, "lr must be a finite number > 0"),
        ({"zeta": 1}, "zeta must be a finite number >= 2"),
        ({"zeta_start": 1}, "zeta_start must be a finite number >= 2"),
        ({"kappa": 0}, "kappa must be a finite number > 0"),
        ({"gamma": -0.1}, "gamma must be a finite number >= 0 and <= 1"),
        ({"gamma": 1.1}, "gamma must be a finite number >= 0 and <= 1"),
        ({"max_overhead": 0}, "max_overhead must be a finite number > 0 and <= 1"),
        ({"max_overhead": 1.5}, "max_overhead must be a finite number > 0 and <= 1"),
        ({"stab_min": 0}, "stab_min must be a finite number > 0 and <= 1"),
        ({"weight_decay": -1}, "weight_decay must be a finite number >= 0"),
        ({"estimator": "jackknife"}, "estimator must be one of 'inline', 'split'"),
        ({"scope": "layer"}, "scope must be one of 'global', 'group'"),
        ({"maximize": 1}, "maximize must be one of False, True"),
        ({"check_finite": 1}, "check_finite must be one of False, True"),
        ({"pool_replicas": 1}, "pool_replicas must be one of False, True"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        StabSGD([parameter(1.0)], **{"lr": 1.0, **changes})


def test_settings_of_the_wrong_type_are_refused():
    with pytest.raises(TypeError, match="lr must be a number"):
        StabSGD([parameter(1.0)], lr="1e-3")
    with pytest.raises(TypeError, match="params must be real"):
        StabSGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))], lr=1.0)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1.0}, "lr must be"),
        ({"weight_decay": -1.0}, "weight_decay must be"),
        ({"maximize": "yes"}, "maximize must be"),
        ({"zeta": 7}, "zeta must be the same for all param groups, 50.0, got 7"),
        ({"estimator": "split"}, "estimator must be the same for all param groups"),
    ],
)
def test_bad_param_groups_are_refused(group, message):
    optimizer = StabSGD([parameter(1.0)], lr=1.0)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(2.0)], **group})
    assert len(optimizer.param_groups) == 1


def test_split_refuses_step_and_inline_refuses_step_split():
    x = parameter(1.0)
    grad = torch.ones(1, dtype=torch.float64)
    split = StabSGD([x], lr=1.0, estimator="split")
    x.grad = grad
    with pytest.raises(RuntimeError, match="step_split"):
        split.step()
    with pytest.raises(RuntimeError, match="step_split needs at least 2 micro-batch gradients"):
        split.step_split([[grad]])
    with pytest.raises(RuntimeError, match="step_split needs"):
        StabSGD([x], lr=1.0).step_split([[grad], [grad]])


def test_gradients_that_do_not_fit_are_refused():
    split = StabSGD([parameter(1.0)], lr=1.0, estimator="split")
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"grads\[1\] must hold one gradient for each of the 1"):
        split.step_split([[one], [one, one]])
    with pytest.raises(ValueError, match=r"grads\[0\]\[0\] must have shape \(1,\), got \(2,\)"):
        split.step_split([[torch.ones(2)], [one]])


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = StabSGD(embedding.parameters(), lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()
    split = StabSGD(embedding.parameters(), lr=1.0, estimator="split")
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        split.step_split([[embedding.weight.grad]] * 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_gradients_are_skipped_and_counted(bad):
    x, y = parameter(1.0, 1.0), parameter(1.0)
    optimizer = StabSGD([x, y], lr=0.5, zeta=4)
    good = [torch.ones(2, dtype=torch.float64), torch.ones(1, dtype=torch.float64)]
    spoiled = [torch.tensor([1.0, bad], dtype=torch.float64), good[1]]
    for grads in (good, spoiled, good, good):
        feed(optimizer, [x, y], grads)
    assert optimizer.phase == "descend"
    assert (optimizer.stab, optimizer.n_skipped, optimizer.n_queries) == (1.0, 1, 4)
    feed(optimizer, [x, y], spoiled)
    assert (x.tolist(), y.item()) == ([1.0, 1.0], 1.0)
    assert (optimizer.n_skipped, optimizer.n_updates) == (2, 0)
    feed(optimizer, [x, y], good)
    assert (x.tolist(), y.item()) == ([0.5, 0.5], 0.5)


def test_a_measurement_waits_for_two_finite_gradients():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=0.5, zeta=2)
    one = torch.ones(1, dtype=torch.float64)
    for grad in (one, one * math.nan):
        feed(optimizer, [x], [grad])
    assert optimizer.phase == "measure"
    feed(optimizer, [x], [one])
    assert optimizer.phase == "descend"


@pytest.mark.parametrize("descend", [False, True])
def test_ten_nonfinite_gradients_in_a_row_are_an_error(descend):
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=0.1, zeta=20)
    one = torch.ones(1, dtype=torch.float64)
    for _ in range(20 if descend else 3):
        feed(optimizer, [x], [one])
    for _ in range(9):
        feed(optimizer, [x], [math.nan * one])
    feed(optimizer, [x], [one])
    for _ in range(9):
        feed(optimizer, [x], [math.inf * one])
    with pytest.raises(NonFiniteGradientError, match="10 gradients in a row were not finite"):
        feed(optimizer, [x], [math.nan * one])
    assert math.isfinite(x.item())


def test_split_skips_nonfinite_calls():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=0.1, estimator="split")
    one = torch.ones(1, dtype=torch.float64)
    optimizer.step_split([[one], [math.nan * one]])
    assert (optimizer.n_skipped, optimizer.stab, optimizer.n_queries) == (1, 0.0, 2)
    for _ in range(5):
        optimizer.step_split([[one], [one]])
    optimizer.step_split([[one * 0], [one * 0]])
    assert (optimizer.stab, x.item()) == (1.0, 1.0)
    optimizer.step_split([[one], [one]])
    assert x.item() == pytest.approx(0.9)


def test_without_check_finite_the_descend_phase_is_sgds():
    x = parameter(1.0)
    optimizer = StabSGD([x], lr=0.1, zeta=2, check_finite=False)
    one = torch.ones(1, dtype=torch.float64)
    for grad in (one, one, math.nan * one):
        feed(optimizer, [x], [grad])
    assert math.isnan(x.item())
