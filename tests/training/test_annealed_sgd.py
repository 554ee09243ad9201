"""Annealed SGD: the temperature identity, the cooling laws, wells and barriers, bad input."""

from __future__ import annotations

import copy
import io
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, OptimizeWarning, minimize
from torch import nn

from thalweg.training import (
    AnnealLR,
    annealing_report,
    constant_lr_baseline,
    minimize_annealed_sgd,
)
from thalweg.training.annealed_chains import Noise, Objective, largest_curvature
from thalweg.training.annealing import autocorrelation_time, gelman_rubin
from thalweg.training.annealing_laws import LAWS, step_sizes


def quadratic(x):
    return (x**2).sum(axis=-1) / 2


def identity(x):
    return x


def rastrigin(x):
    return (x**2 / 2 + 1.5 * (1 - np.cos(2 * np.pi * x)) / (2 * np.pi)).sum(axis=-1)


def rastrigin_gradient(x):
    return x + 1.5 * np.sin(2 * np.pi * x)


def double_well(tilt):
    """Return f = (x² - 1)²/4 + tilt · x and its derivative."""
    return (
        lambda x: ((x**2 - 1) ** 2 / 4 + tilt * x).sum(axis=-1),
        lambda x: x * (x**2 - 1) + tilt,
    )


def run(fun=quadratic, jac=identity, x0=(1.0,), **settings):
    options = {"vectorized": True, "rng": 0, "L": 1.0}
    return minimize_annealed_sgd(fun, x0, jac=jac, **options | settings)


# The mathematics


def test_the_stationary_variance_is_that_of_the_scheme():
    """On λx²/2 the scheme's variance is hσ²/(λ(2 - hλ)) = 0.4/1.9 for λ = 1, h = 0.1, σ = 2."""
    squares = []

    def jac(x):
        squares.append(float((x**2).mean()))
        return x

    constant_lr_baseline(
        quadratic,
        np.zeros((100, 1)),
        jac=jac,
        vectorized=True,
        lr0=0.1,
        sigma=2.0,
        L=1.0,
        maxiter=10_200,
        polish=False,
        rng=1,
    )
    # Successive x² correlate: 10⁶ of them are worth about 10⁵, a standard error of 0.5 %.
    assert np.mean(squares[200:]) == pytest.approx(0.4 / 1.9, rel=0.02)


def test_the_minimizer_makes_the_steps_of_the_scheme():
    result = constant_lr_baseline(
        quadratic,
        np.zeros((3, 2)),
        jac=identity,
        vectorized=True,
        lr0=0.1,
        sigma=2.0,
        L=1.0,
        maxiter=7,
        polish=False,
        rng=5,
    )
    # The seed spawns a stream per chain, which no other draw disturbs.
    noise = Noise(3, 2, np.random.default_rng(5))
    x = np.zeros((3, 2))
    for _ in range(7):
        x = x - 0.1 * (x + 2.0 * noise())
    np.testing.assert_array_equal(result.x_last, x)
    np.testing.assert_allclose(result.temperature_path, 0.1 * 4 / 2)


def test_it_is_torch_sgd_with_the_same_noise():
    noise = Noise(1, 3, np.random.default_rng(5))
    x = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD([x], lr=0.3)
    scheduler = AnnealLR(optimizer, total_steps=50, lr_min_ratio=0.01, law="geometric")
    for _ in range(50):
        x.grad = x.detach() + 0.7 * torch.from_numpy(noise()[0])
        optimizer.step()
        scheduler.step()
    result = run(
        x0=np.ones((1, 3)), lr0=0.3, lr_min=0.003, sigma=0.7, maxiter=50, polish=False, rng=5
    )
    np.testing.assert_allclose(result.x_last[0], x.detach().numpy(), rtol=1e-12)


def test_without_noise_it_descends_and_stays_in_its_well():
    fun, jac = double_well(0.3)
    options = {"sigma": 0.0, "lr0": 0.3, "lr_min": 0.1, "polish": False, "maxiter": 2000, "L": 2.0}
    right = run(fun, jac, [1.2], **options)
    left = run(fun, jac, [-1.2], **options)
    assert abs(float(jac(right.x)[0])) < 1e-10
    assert right.x[0] == pytest.approx(0.786, abs=1e-3)
    assert left.x[0] == pytest.approx(-1.125, abs=1e-3)
    assert left.fun < right.fun - 0.5


def share_in_the_left_well(tilt, steps, law, temperature, lr_min=1e-4):
    fun, jac = double_well(tilt)
    settings = {} if law == "constant" else {"lr_min": lr_min}
    result = run(
        fun,
        jac,
        np.full((200, 1), 0.8),
        lr0=0.1,
        sigma=math.sqrt(2 * temperature / 0.1),
        law=law,
        maxiter=steps,
        polish=False,
        rng=3,
        **settings,
    )
    return float((result.x_last < 0).mean())


def test_annealing_crosses_the_barrier_and_a_cold_constant_step_does_not():
    assert share_in_the_left_well(0.3, 5000, "geometric", 0.25) >= 0.95
    assert share_in_the_left_well(0.3, 5000, "constant", 0.002) <= 0.05


def test_slower_cooling_finds_the_better_well_more_often():
    fast = share_in_the_left_well(0.1, 1000, "geometric", 0.25)
    slow = share_in_the_left_well(0.1, 30_000, "geometric", 0.25)
    # 200 chains: a share's standard error is 0.035.
    assert slow > fast + 0.07
    assert slow > 0.7


def test_every_law_of_cooling_solves_rastrigin():
    for law in ("geometric", "linear", "cosine", "polynomial", "inverse"):
        result = run(
            rastrigin, rastrigin_gradient, [4.0, -3.0], L=10.4, law=law, maxiter=4000, n_chains=16
        )
        assert result.fun < 1e-8, law
    assert run(rastrigin, rastrigin_gradient, [4.0, -3.0], L=10.4, sigma=0.0).fun > 0.5


@pytest.mark.parametrize("law", LAWS)
@given(
    n=st.integers(2, 300),
    ratio=st.floats(1e-6, 1.0),
    burn_in=st.floats(0.0, 0.99),
    power=st.floats(0.2, 4.0),
)
def test_step_sizes_fall_from_the_first_to_the_last(law, n, ratio, burn_in, power):
    h = step_sizes(n, 0.5, 0.5 * ratio, law, burn_in, power)
    start = math.floor(burn_in * n)
    assert (h[: start + 1] == 0.5).all()
    assert (np.diff(h) <= 1e-15).all()
    assert (h >= 0.5 * ratio * (1 - 1e-12)).all()
    if law not in ("log", "constant") and start < n - 1:
        assert h[-1] == pytest.approx(0.5 * ratio, rel=1e-12)


def test_the_laws_are_those_of_their_names():
    k = np.arange(11)
    settings = {"n": 11, "lr0": 2.0, "lr_min": 0.5, "burn_in": 0.0}
    np.testing.assert_allclose(step_sizes(law="linear", **settings), 2 - 0.15 * k)
    np.testing.assert_allclose(
        step_sizes(law="cosine", **settings), 0.5 + 1.5 * (1 + np.cos(np.pi * k / 10)) / 2
    )
    np.testing.assert_allclose(step_sizes(law="inverse", **settings), 2 / (1 + 0.3 * k))
    np.testing.assert_allclose(
        step_sizes(law="polynomial", power=2.0, **settings), 0.5 + 1.5 * (1 - k / 10) ** 2
    )
    np.testing.assert_allclose(
        step_sizes(law="log", **settings | {"lr_min": 0.1}), 2 / np.log(math.e + k)
    )


def test_the_energy_scale_sets_the_first_temperature():
    result = run(x0=np.zeros((4, 2)), bounds=[(-2, 2)] * 2, maxiter=100)
    # Energies (x² + y²)/2 on [-2, 2]²: the median is about 1.25, the least about 0; n = 2.
    assert result.temperature_path[0] == pytest.approx(1.25 / 2, rel=0.35)
    assert result.lr_path[0] == 0.5
    assert result.lr_path[-1] == pytest.approx(0.5e-3)


def test_the_target_accuracy_sets_the_last_temperature():
    result = run(x0=[1.0, 1.0], sigma=3.0, target_accuracy=0.01, maxiter=50)
    n, last = 2, result.temperature_path[-1]
    assert n * last == pytest.approx(0.01)


def test_the_curvature_is_that_of_the_steepest_direction():
    eigenvalues = np.array([0.1, 3.0, 7.0])
    objective = Objective(
        lambda x: x @ (eigenvalues * x) / 2, lambda x: eigenvalues * x, (), False, None
    )
    points = np.random.default_rng(0).normal(size=(4, 3))
    found = largest_curvature(objective, points, np.random.default_rng(1), np.zeros(1))
    assert found == pytest.approx(7.0, rel=1e-3)
    result = run(
        lambda x: (x @ (eigenvalues * x)) / 2,
        lambda x: eigenvalues * x,
        [1.0] * 3,
        vectorized=False,
        L=None,
        maxiter=10,
    )
    assert math.isclose(result.L, 7.0, rel_tol=1e-3)


# The interface of the minimizer


def test_scipy_calls_it():
    result = minimize(
        rastrigin,
        [3.0, 3.0],
        jac=rastrigin_gradient,
        method=minimize_annealed_sgd,
        options={"maxiter": 3000, "rng": 1},
    )
    assert result.success
    assert result.fun < 1e-8
    assert result.x.shape == (2,)
    assert result.nit == 3000


def test_counts_and_shapes():
    calls = {"fun": 0, "jac": 0}

    def fun(x):
        calls["fun"] += len(x)
        return rastrigin(x)

    def jac(x):
        calls["jac"] += len(x)
        return rastrigin_gradient(x)

    result = run(fun, jac, [2.0, 1.0], L=None, n_chains=5, maxiter=300)
    assert (result.nfev, result.njev) == (calls["fun"], calls["jac"])
    assert result.njev > 5 * 300
    assert result.x_last.shape == (5, 2)
    np.testing.assert_array_equal(result.fun_last, rastrigin(result.x_last))
    assert result.fun <= result.fun_last.min()
    assert len(result.lr_path) == len(result.temperature_path) == 300
    assert set(map(len, result.trace.values())) == {100}


def test_scalar_functions_and_batches_agree():
    batch = run(rastrigin, rastrigin_gradient, [2.0, 1.0], L=10.4, maxiter=200)
    single = run(
        lambda x: float(rastrigin(x)),
        rastrigin_gradient,
        [2.0, 1.0],
        L=10.4,
        maxiter=200,
        vectorized=False,
    )
    np.testing.assert_allclose(batch.x_last, single.x_last, rtol=1e-12)
    np.testing.assert_allclose(batch.x, single.x, atol=1e-8)


def test_a_chain_does_not_depend_on_the_others():
    starts = np.random.default_rng(0).normal(size=(6, 2))
    options = {"sigma": 2.0, "lr0": 0.05, "maxiter": 300, "polish": False, "L": 10.4}
    six = run(rastrigin, rastrigin_gradient, starts, **options)
    three = run(rastrigin, rastrigin_gradient, starts[:3], **options)
    np.testing.assert_allclose(six.x_last[:3], three.x_last, rtol=1e-12)


def test_seeds_make_it_reproducible():
    first, second, other = (
        run(rastrigin, rastrigin_gradient, [2.0], L=10.4, maxiter=200, rng=seed).x_last
        for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


def test_args_reach_both_functions():
    result = run(lambda x, a: a * quadratic(x), lambda x, a: a * x, args=(3.0,), L=3.0, maxiter=50)
    assert result.fun < 1e-8


def test_iterates_are_reflected_at_bounds():
    seen = []

    def jac(x):
        seen.append(x)
        return rastrigin_gradient(x)

    for bounds in ([(0.5, 3.0), (None, 1.0)], Bounds([0.5, -np.inf], [3.0, 1.0])):
        result = run(
            rastrigin,
            jac,
            [2.0, 0.0],
            L=10.4,
            sigma=6.0,
            bounds=bounds,
            maxiter=500,
            domain=[(0.5, 3.0), (-3.0, 1.0)],
        )
        points = np.concatenate(seen)
        assert points[:, 0].min() >= 0.5
        assert points[:, 0].max() <= 3.0
        assert points[:, 1].max() <= 1.0
        assert result.x[0] >= 0.5
        np.testing.assert_allclose(result.x[1], 0.0, atol=1e-6)


def test_a_noisy_gradient_gets_the_stream_and_no_polish():
    def noisy(x, rng):
        return rastrigin_gradient(x) + 4.0 * rng.standard_normal(x.shape)

    result = run(rastrigin, noisy, [3.0, 3.0], L=10.4, noise="given", maxiter=10_000, n_chains=16)
    assert result.sigma == pytest.approx(4.0, rel=0.3)
    assert result.lr_path[0] <= 1 / 10.4
    assert result.fun < 0.05
    assert result.fun == pytest.approx(float(rastrigin(result.x)))
    assert result.fun in result.fun_last


def test_without_a_curvature_a_noisy_gradient_still_works():
    def noisy(x, rng):
        return 2 * x + 0.1 * rng.standard_normal(x.shape)

    result = run(lambda x: (x**2).sum(axis=-1), noisy, [3.0, 3.0], L=None, noise="given")
    assert 2.0 <= result.L < 8.0
    assert result.fun < 0.01


def test_the_callback_sees_the_best_chain_and_can_stop():
    seen = []

    def callback(intermediate_result):
        seen.append(intermediate_result)
        if len(seen) == 5:
            raise StopIteration

    result = run(rastrigin, rastrigin_gradient, [3.0], L=10.4, callback=callback, maxiter=1000)
    assert (result.status, result.success) == (99, False)
    assert result.nit == 40
    assert seen[1].temperature == pytest.approx(result.temperature_path[10])
    assert seen[1].fun == pytest.approx(float(rastrigin(seen[1].x)))
    assert np.isfinite(result.fun)


def test_an_interruption_returns_the_best_so_far():
    def callback(x):
        raise KeyboardInterrupt

    result = run(rastrigin, rastrigin_gradient, [3.0], L=10.4, callback=callback)
    assert (result.status, result.success) == (2, False)
    assert "Interrupted" in result.message
    assert np.isfinite(result.x).all()


def test_divergence_halves_the_step_once_and_then_says_so():
    options = {"sigma": 0.0, "maxiter": 3000, "polish": False, "n_chains": 2, "law": "constant"}
    halved = run(lr0=3.0, **options)
    assert halved.success
    assert halved.lr_path[0] == 1.5
    assert halved.fun < 1e-12
    lost = run(lr0=9.0, **options)
    assert (lost.status, lost.success) == (3, False)
    assert "diverged" in lost.message


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"jac": None}, ValueError, "jac must be given: SGD needs gradients, got None"),
        ({"jac": 1.0}, TypeError, "jac must be a callable that returns a gradient, got 1.0"),
        ({"fun": 1.0}, TypeError, "fun must be callable, got float"),
        ({"sigma": -1.0}, ValueError, "sigma must be a finite number >= 0, got -1"),
        ({"sigma": "hot"}, ValueError, "sigma must be a number >= 0 or \"auto\", got 'hot'"),
        ({"lr0": 0.1, "lr_min": 0.2}, ValueError, "lr_min must be at most lr0=0.1, got 0.2"),
        ({"lr0": 0.0}, ValueError, "lr0 must be a finite number > 0, got 0"),
        ({"L": -1.0}, ValueError, "L must be a finite number > 0, got -1"),
        ({"maxiter": 1}, ValueError, "total_steps must be an integer >= 2, got 1"),
        ({"burn_in": 1.0}, ValueError, "burn_in must be a finite number >= 0 and < 1, got 1"),
        ({"law": "fast"}, ValueError, "law must be one of 'geometric', .*, got 'fast'"),
        ({"noise": "some"}, ValueError, "noise must be one of 'inject', 'given', got 'some'"),
        ({"noise": "given"}, ValueError, 'noise must be "inject" for a deterministic jac'),
        ({"x0": [[[1.0]]]}, ValueError, r"x0 must have shape \(chains, n\), got \(1, 1, 1\)"),
        ({"x0": [math.nan]}, ValueError, r"x0 must be finite, got nan at x0\[0\]"),
        ({"x0": [1j]}, TypeError, "x0 must be real"),
        ({"n_chains": 0}, ValueError, "n_chains must be an integer >= 1, got 0"),
        ({"bounds": [(1.0, 0.0)]}, ValueError, "bounds must have every lower bound below"),
        (
            {"bounds": [(0.0, 1.0)] * 2},
            ValueError,
            r"bounds must have shape \(1, 2\), got \(2, 2\)",
        ),
        ({"constraints": [{"type": "eq"}]}, ValueError, "constraints must be None"),
        ({"callback": 3}, TypeError, "callback must be callable, got int"),
        ({"target_accuracy": 0.0, "sigma": 1.0}, ValueError, "target_accuracy must be a finite"),
        ({"L": None, "jac": np.zeros_like}, ValueError, "L must be given, because jac is constant"),
        ({"jac": lambda x: x[:, :0]}, ValueError, r"jac\(x\) must have shape"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        run(**{"maxiter": 20} | changes)


def test_jac_true_is_refused():
    with pytest.raises(ValueError, match="jac must be a function of its own, not True"):
        minimize(lambda x: (x @ x, 2 * x), [1.0], jac=True, method=minimize_annealed_sgd)


def test_unknown_options_warn():
    with pytest.warns(OptimizeWarning, match="unknown options: colour"):
        run(maxiter=10, colour="red")
    with pytest.raises(TypeError, match="lr_min must not be given: the step size is constant"):
        constant_lr_baseline(quadratic, [1.0], jac=identity, lr_min=0.1)


# The scheduler


def optimizer_with(*lrs, kind=torch.optim.SGD):
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return kind(groups)


def path(optimizer, scheduler, steps):
    rows = []
    for _ in range(steps):
        rows.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return np.array(rows)


@pytest.mark.parametrize("law", LAWS)
def test_the_scheduler_follows_the_law_for_every_group(law):
    optimizer = optimizer_with(0.5, 0.1)
    rows = path(optimizer, AnnealLR(optimizer, 40, 0.01, law, burn_in=0.2, power=2.0), 40)
    np.testing.assert_allclose(rows[:, 0], step_sizes(40, 0.5, 0.005, law, 0.2, 2.0), rtol=1e-12)
    np.testing.assert_allclose(rows[:, 1], 0.2 * rows[:, 0], rtol=1e-12)


def test_the_geometric_law_is_torch_exponential_lr():
    ours, torchs = optimizer_with(0.5), optimizer_with(0.5)
    rows = path(ours, AnnealLR(ours, 30, 1e-3, burn_in=0.0), 30)
    exponential = torch.optim.lr_scheduler.ExponentialLR(torchs, gamma=1e-3 ** (1 / 29))
    np.testing.assert_allclose(rows, path(torchs, exponential, 30), rtol=1e-12)
    assert rows[-1, 0] == pytest.approx(0.5e-3, rel=1e-12)


def test_the_scheduler_resumes_from_a_file():
    optimizer = optimizer_with(0.5)
    scheduler = AnnealLR(optimizer, 50)
    path(optimizer, scheduler, 20)
    file = io.BytesIO()
    torch.save({"s": scheduler.state_dict(), "o": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = optimizer_with(0.5)
    resumed = AnnealLR(twin, 50)
    twin.load_state_dict(saved["o"])
    resumed.load_state_dict(saved["s"])
    np.testing.assert_array_equal(path(optimizer, scheduler, 30), path(twin, resumed, 30))


def test_the_scheduler_can_be_copied_and_composed():
    optimizer = optimizer_with(0.5)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    cool = AnnealLR(optimizer, 20, 0.1, burn_in=0.0)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cool], milestones=[10])
    rows = path(optimizer, both, 30)[:, 0]
    assert rows[0] == pytest.approx(0.05)
    np.testing.assert_allclose(rows[10:30], step_sizes(20, 0.5, 0.05, "geometric", 0.0))
    copy.deepcopy(both)


def test_stepping_past_the_end_keeps_the_last_size_and_warns_once():
    optimizer = optimizer_with(0.5)
    scheduler = AnnealLR(optimizer, 5)
    path(optimizer, scheduler, 5)
    with pytest.warns(UserWarning, match="stepped past total_steps=5") as caught:
        rows = path(optimizer, scheduler, 3)
    assert len(caught) == 1
    np.testing.assert_allclose(rows, 0.5e-3)


def test_tensor_step_sizes_are_kept():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5))
    scheduler = AnnealLR(optimizer, 5, 0.1, burn_in=0.0)
    optimizer.step()
    scheduler.step()
    lr = optimizer.param_groups[0]["lr"]
    assert isinstance(lr, torch.Tensor)
    assert lr.item() == pytest.approx(0.5 * 0.1**0.25)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_adaptive_optimizers_have_no_temperature(kind):
    with pytest.warns(UserWarning, match="its temperature is not defined"):
        AnnealLR(optimizer_with(0.1, kind=kind), 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_steps": 1}, "total_steps must be an integer >= 2, got 1"),
        ({"lr_min_ratio": 0.0}, "lr_min_ratio must be a finite number > 0 and <= 1, got 0"),
        ({"lr_min_ratio": 2.0}, "lr_min_ratio must be a finite number > 0 and <= 1, got 2"),
        ({"law": "stepwise"}, "law must be one of"),
        ({"burn_in": -0.1}, "burn_in must be"),
        ({"power": 0.0}, "power must be a finite number > 0, got 0"),
    ],
)
def test_bad_schedules_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AnnealLR(optimizer_with(0.1), **{"total_steps": 10} | changes)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got int"):
        AnnealLR(3, 10)


# The report


def report(fun, jac, temperatures, **settings):
    options = {
        "x0": lambda rng, n: rng.uniform(-1.5, 1.5, (n, 1)),
        "vectorized": True,
        "rng": 0,
        "n_chains": 32,
        "steps": 1500,
    }
    return annealing_report(fun, jac, temperatures=temperatures, **options | settings)


def test_chains_freeze_below_the_barrier():
    fun, jac = double_well(0.1)  # barriers 0.16 and 0.36
    found = report(fun, jac, [0.01, 0.03, 0.3, 1.0], steps=8000)
    np.testing.assert_array_equal(found.temperatures, [1.0, 0.3, 0.03, 0.01])
    assert found.freeze_temperature == 0.03
    assert (found.r_hat[:2] < 1.2).all()
    assert (found.r_hat[2:] > 1.2).all()
    assert found.energy[0] > found.energy[1] > found.energy[2]
    assert 0.2 < found.share_in_best[-1] < 0.8
    assert "freezes at 0.03" in str(found)


def test_a_single_well_never_freezes_and_has_gibbs_energy():
    found = report(quadratic, identity, [0.5, 0.05], steps=4000)
    assert found.freeze_temperature == 0
    # E f = τ/2, times 1/(1 - hL/2) for the scheme.
    np.testing.assert_allclose(found.energy, np.array([0.25, 0.025]) / (1 - found.lr / 2), rtol=0.1)
    # x² forgets at rate 2(1 - hL/2), so that the time of f is 2/2.
    np.testing.assert_allclose(found.relaxation_time, 1.0, rtol=0.25)
    # The Poincaré constant of a Gaussian: Var u <= τ E|∇u|², reached by u = x.
    np.testing.assert_allclose(found.profile[:, 2], 1.0, rtol=0.2)
    assert (np.diff(found.profile, axis=1) >= 0).all()


def test_the_recommendation_works():
    found = report(rastrigin, rastrigin_gradient, [1.0, 0.3, 0.1, 0.03], L=10.4)
    result = run(
        rastrigin,
        rastrigin_gradient,
        [3.0],
        L=10.4,
        lr0=found.recommended_lr0,
        sigma=found.recommended_sigma,
        maxiter=min(found.recommended_steps, 20_000),
    )
    assert result.fun < 1e-8


def test_the_report_sees_noise_that_depends_on_the_point():
    rng = np.random.default_rng(0)
    found = report(quadratic, lambda x: x + np.abs(x) * rng.standard_normal(x.shape), [0.5], L=1.0)
    assert found.sigma.max() > 2 * found.sigma.min()
    np.testing.assert_array_equal(report(quadratic, identity, [0.5]).sigma, 0.0)


def test_the_report_takes_an_array_of_starts_and_plots():
    import matplotlib as mpl

    mpl.use("Agg")
    fun, jac = double_well(0.1)
    found = report(fun, jac, [0.3, 0.01], x0=np.linspace(-1.5, 1.5, 8)[:, None])
    axes = found.plot()
    assert len(axes.lines) == 2
    assert axes.get_xlabel() == "temperature τ"


def test_r_hat_and_the_autocorrelation_time_of_known_chains():
    rng = np.random.default_rng(0)
    white = rng.normal(size=(4000, 8))
    assert gelman_rubin(white) == pytest.approx(1.0, abs=0.01)
    assert gelman_rubin(white + np.arange(8)) > 2
    assert gelman_rubin(np.ones((10, 3))) == 1.0
    assert gelman_rubin(np.ones((10, 3)) * np.arange(3)) == math.inf
    assert autocorrelation_time(white) == pytest.approx(1.0, abs=0.15)
    ar = np.array(list(itertools.accumulate(white, lambda x, e: 0.8 * x + e)))
    assert autocorrelation_time(ar) == pytest.approx(1.8 / 0.2, rel=0.1)
    assert math.isnan(autocorrelation_time(np.ones((10, 3))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperatures": [0.1, 0.0]}, "temperatures must be > 0 and at least one"),
        ({"temperatures": []}, "temperatures must be > 0 and at least one"),
        ({"n_chains": 3}, "n_chains must be an integer >= 4, got 3"),
        ({"steps": 99}, "steps must be an integer >= 100, got 99"),
        ({"L": 0.01, "temperatures": [1.0]}, "chains diverged at temperature 1; give a larger L"),
    ],
)
def test_bad_reports_are_refused(changes, message):
    settings = {"temperatures": [0.1]} | changes
    with pytest.raises(ValueError, match=message):
        report(lambda x: (x**4).sum(axis=-1), lambda x: 4 * x**3, **settings)
