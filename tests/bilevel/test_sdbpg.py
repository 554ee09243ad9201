"""Dynamic barrier perturbed gradients: the multiplier, its bounds, the runs, bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from thalweg.bilevel import (
    Expectation,
    LeastSquares,
    TorchLoss,
    bilevel_stationarity,
    sdbpg,
)
from thalweg.bilevel.barrier_descent import LowerEstimates, storm_weight
from thalweg.bilevel.barrier_estimates import batch_variance
from thalweg.bilevel.dual_perturbations import AdaptivePerturbation, GivenPerturbation
from thalweg.bilevel.dynamic_barrier import barrier_multiplier
from thalweg.bilevel.gradient_estimators import MiniBatch, Spider, Storm
from thalweg.bilevel.gradient_lipschitz import MOST_SAMPLES, gradient_lipschitz
from thalweg.bilevel.scaled_objectives import ScaledObjective
from thalweg.tasks import tanh_selection


def least_squares(seed=0, n=30, d=5):
    rng = np.random.default_rng(seed)
    return LeastSquares(rng.standard_normal((n, d)), rng.standard_normal(n))


def smooth(value, grad, noise=0.0):
    """Return a function of x as an expectation, with noise in its gradient."""
    return Expectation(
        sample_grad=lambda x, samples: grad(x) + noise * samples.mean(axis=0),
        draw=lambda rng, size: rng.standard_normal((size, 2)),
        value=value,
        grad=grad,
    )


def valley(noise=0.0):
    """Return f = ‖x - (2, 3)‖², g = ½(x₁² - 1)²: minimized by x₁ = ±1, whatever x₂ is."""
    target = np.array([2.0, 3.0])
    upper = smooth(lambda x: float(np.sum((x - target) ** 2)), lambda x: 2 * (x - target), noise)
    lower = smooth(
        lambda x: float((x[0] ** 2 - 1) ** 2) / 2,
        lambda x: np.array([2 * x[0] * (x[0] ** 2 - 1), 0.0]),
        noise,
    )
    return upper, lower


FULL = {"batch_upper": "full", "batch_lower": "full"}

# --- the multiplier

pairs = st.tuples(st.floats(1e-4, 1e2), st.floats(1e-4, 1e2), st.floats(-1, 1))
positive = st.floats(1e-2, 10)


@settings(max_examples=100, deadline=None)
@given(sizes=pairs, alpha=positive, delta=positive, p=st.sampled_from([0.0, 0.5, 1.0]))
def test_multiplier_minimizes_the_perturbed_dual(sizes, alpha, delta, p):
    f, g, cosine = sizes
    fg, gg = f * g * cosine, g * g
    phi = alpha * g ** (2 + p)
    lam = barrier_multiplier(fg, gg, alpha=alpha, delta=delta, p=p)

    def dual(m):  # without the constant ½‖f‖², which would cost digits
        return m * fg + m * m * (gg + delta) / 2 - m * phi

    found = minimize_scalar(
        dual, bounds=(0, 2 * lam + 1), method="bounded", options={"xatol": 1e-12}
    ).x
    assert dual(lam) <= dual(found) + 1e-12 * (1 + abs(dual(found)))
    assert lam == pytest.approx(found, rel=1e-6, abs=2e-6)
    # The optimality conditions, which hold to rounding.
    slope = fg + lam * (gg + delta) - phi
    assert slope >= -1e-12 * (abs(fg) + phi)
    assert abs(lam * slope) <= 1e-11 * (1 + lam) * (abs(fg) + phi)


def test_bounds_of_the_multiplier_hold():
    rng = np.random.default_rng(0)
    f = rng.standard_normal((10_000, 6)) * np.exp(rng.uniform(-5, 5, (10_000, 1)))
    g = rng.standard_normal((10_000, 6)) * np.exp(rng.uniform(-15, 5, (10_000, 1)))
    f, g = (
        np.concatenate([f, f]),
        np.concatenate([g, -f * np.exp(rng.uniform(-15, 0, (10_000, 1)))]),
    )
    fg, gg = (f * g).sum(1), (g * g).sum(1)
    size_f, size_g = np.linalg.norm(f, axis=1), np.sqrt(gg)
    for alpha, delta, p in ((1.0, 1e-3, 0.0), (0.1, 1e-2, 0.0), (10.0, 1e-6, 1.0)):
        lam = barrier_multiplier(fg, gg, alpha=alpha, delta=delta, p=p)
        rounding = 1 + 1e-12
        assert (lam <= (alpha * size_g**p + size_f / (2 * np.sqrt(delta))) * rounding).all()
        assert (lam * size_g <= (alpha * size_g ** (1 + p) + size_f) * rounding).all()


def test_without_perturbation_it_is_the_dynamic_barrier():
    rng = np.random.default_rng(0)
    f, g = rng.standard_normal((2, 1000, 4))
    fg, gg = (f * g).sum(1), (g * g).sum(1)
    expected = np.maximum(1.5 - fg / gg, 0)
    assert barrier_multiplier(fg, gg, alpha=1.5, delta=0.0) == pytest.approx(expected, rel=1e-12)
    assert barrier_multiplier(fg, gg, alpha=1.5, delta=1e-15) == pytest.approx(expected, rel=1e-11)


def test_limits_of_perturbation_and_penalty():
    assert barrier_multiplier(-1.0, 0.5, alpha=1.0, delta=1e300) == pytest.approx(0, abs=1e-299)
    assert barrier_multiplier(0.0, 0.0, alpha=1.0, delta=0.0, rho=2.0) == 2.0  # g = 0
    assert barrier_multiplier(2.0, 0.5, alpha=1.0, delta=1e-3) == 0.0  # inactive
    f, g = np.array([1.0, 2.0]), np.array([-0.3, 0.1])
    direction = f + barrier_multiplier(f @ g, g @ g, alpha=1.0, delta=1e-3, rho=1e9) * g
    assert direction / np.linalg.norm(direction) == pytest.approx(g / np.linalg.norm(g), abs=1e-6)


def test_fall_of_the_lower_level_is_what_the_perturbation_leaves():
    rng = np.random.default_rng(1)
    for _ in range(200):
        f, g = rng.standard_normal((2, 5))
        delta, gg, fg = 0.1, g @ g, f @ g
        phi = 0.7 * gg
        if fg >= phi:
            continue
        fall = g @ (f + barrier_multiplier(fg, gg, alpha=0.7, delta=delta) * g)
        assert fall == pytest.approx((phi * gg + delta * fg) / (gg + delta), abs=1e-12)
        size = np.linalg.norm(f) * np.linalg.norm(g)
        assert fall >= -delta * size / (gg + delta) - 1e-12


def test_independent_halves_make_the_product_unbiased():
    """Mean of λĝ' is E[λ]∇g to 4 standard errors; with one batch for both it is not."""
    rng = np.random.default_rng(0)
    mean, f = np.array([0.05, 0.0]), np.array([-1.0, 0.5])
    g, other = mean + 0.1 * rng.standard_normal((2, 200_000, 2))
    lam = barrier_multiplier(g @ f, (g * g).sum(1), alpha=1.0, delta=1e-3)
    expected = lam.mean() * mean
    for batch, unbiased in ((other, True), (g, False)):
        product = lam[:, None] * batch - expected
        errors = product.std(axis=0) / np.sqrt(len(g))
        assert (np.abs(product.mean(axis=0)) < 4 * errors + 1e-12).all() == unbiased


# --- stationarity


def test_stationarity_of_simple_gradients():
    assert bilevel_stationarity([1.0, 0.0], [0.0, 2.0]) == (1.0, 2.0, 0.0)  # orthogonal
    assert bilevel_stationarity([3.0, 0.0], [-0.5, 0.0]) == (0.0, 0.5, 6.0)  # opposite
    assert bilevel_stationarity([3.0, 4.0], [0.5, 0.0]) == (5.0, 0.5, 0.0)  # aligned
    assert bilevel_stationarity([3.0, 4.0], [0.0, 0.0]) == (5.0, 0.0, 0.0)
    assert bilevel_stationarity([0.0], [0.0]) == (0.0, 0.0, 0.0)
    # Squares of these underflow.
    assert bilevel_stationarity([3.0, 4.0], [-1e-200, 0.0]) == pytest.approx((4.0, 1e-200, 3e200))


def test_stationarity_minimizes_over_the_multiplier():
    rng = np.random.default_rng(0)
    for _ in range(20):
        f, g = rng.standard_normal((2, 4))
        best = minimize_scalar(
            lambda m, f=f, g=g: np.sum((f + m * g) ** 2),
            bounds=(0, 100),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert bilevel_stationarity(f, g).eps_f ** 2 == pytest.approx(best.fun, rel=1e-6)


def test_stationarity_of_a_network_is_that_of_all_its_gradients():
    rng = np.random.default_rng(0)
    f, g = rng.standard_normal((2, 7))
    as_parts = [[torch.tensor(v[:6].reshape(2, 3)), torch.tensor(v[6:])] for v in (f, g)]
    assert bilevel_stationarity(*as_parts) == pytest.approx(bilevel_stationarity(f, g), rel=1e-14)


@pytest.mark.parametrize(
    ("gf", "gg", "message"),
    [
        ([1.0, np.nan], [1.0, 1.0], "gf must be finite"),
        ([1.0], [1.0, 1.0], "as many entries, got 1 and 2"),
    ],
)
def test_stationarity_refuses(gf, gg, message):
    with pytest.raises(ValueError, match=message):
        bilevel_stationarity(gf, gg)


# --- deterministic runs


@pytest.mark.parametrize(("delta", "x1", "tolerance"), [(1e-3, 1.030, 1e-3), (1e-6, 1.003, 1e-3)])
def test_run_settles_where_the_perturbation_says(delta, x1, tolerance):
    """At the end α g'(x₁)³ = -δ f'(x₁)."""
    upper, lower = valley()
    result = sdbpg(
        upper, lower, [0.5, 0.0], delta=delta, lr=0.02, maxiter=4000, output="last",
        eps_f=1e-9, eps_g=1e-9, **FULL,
    )  # fmt: skip
    x = result.x
    assert x == pytest.approx([x1, 3.0], abs=tolerance)
    slope_f, slope_g = upper.grad(x)[0], lower.grad(x)[0]
    assert slope_g**3 == pytest.approx(-delta * slope_f, rel=1e-3)
    assert result.status == 1
    assert not result.success


def by_hand(upper, lower, x, *, lr, alpha, delta, rho, steps):
    for _ in range(steps):
        f, g = upper.grad(x), lower.grad(x)
        bracket = max(alpha * g @ g - (f + rho * g) @ g, 0.0)
        x = x - lr * (f + (rho + bracket / (g @ g + delta)) * g)
    return x


@pytest.mark.parametrize(("variant", "rho"), [("plain", None), ("pr", 2.0), ("vr-pr", 2.0)])
def test_run_makes_the_steps_of_the_formula(variant, rho):
    upper, lower = least_squares(0), least_squares(1)
    keywords = {"lr": 0.01, "alpha": 0.5, "delta": 0.1}
    result = sdbpg(
        upper, lower, np.ones(5), variant=variant, rho=rho, maxiter=30, output="last",
        **keywords, **FULL,
    )  # fmt: skip
    expected = by_hand(upper, lower, np.ones(5), rho=rho or 0.0, steps=30, **keywords)
    assert result.x == pytest.approx(expected, rel=1e-12)
    assert result.n_grad_upper == result.n_grad_lower == 30 * 30


@pytest.mark.parametrize("variant", ["plain", "pr"])
def test_split_run_takes_the_step_along_the_other_half(variant):
    """All steps of a run, from the gradients that its objectives returned."""
    rho = {"plain": 0.0, "pr": 0.3}[variant]
    seen = {"upper": [], "lower": []}

    def recorded(objective, name):
        def sample_grad(x, samples):
            seen[name].append(objective.sample_grad(x, samples))
            return seen[name][-1]

        return Expectation(sample_grad, objective.draw, objective.value, objective.grad)

    upper, lower = valley(noise=0.5)
    result = sdbpg(
        recorded(upper, "upper"), recorded(lower, "lower"), [0.5, 0.0], variant=variant,
        rho=rho or None, alpha=5.0, delta=0.01, lr=0.01, maxiter=40, output="last", rng=0,
    )  # fmt: skip
    x, actives = np.array([0.5, 0.0]), 0
    for k in range(40):
        f, (g, other) = seen["upper"][k], seen["lower"][2 * k : 2 * k + 2]
        bracket = max(5 * g @ g - (f + rho * g) @ g, 0.0)
        actives += bracket > 0
        x = x - 0.01 * (f + (rho + bracket / (g @ g + 0.01)) * other)
    assert result.x == pytest.approx(x, rel=1e-12)
    assert result.active == actives / 40 > 0.5


def test_zero_perturbation_is_accepted_without_samples():
    upper, lower = least_squares(0), least_squares(1)
    run = {"lr": 0.01, "maxiter": 20, "output": "last", **FULL}
    exact = by_hand(upper, lower, np.ones(5), lr=0.01, alpha=1.0, delta=0.0, rho=0.0, steps=20)
    assert sdbpg(upper, lower, np.ones(5), delta=0.0, **run).x == pytest.approx(exact, rel=1e-12)
    tiny = sdbpg(upper, lower, np.ones(5), delta=1e-14, **run).x
    assert tiny == pytest.approx(exact, rel=1e-11)


def test_large_perturbation_is_gradient_descent_on_the_upper_level():
    upper, lower = least_squares(0), least_squares(1)
    x = np.ones(5)
    for _ in range(20):
        x = x - 0.01 * upper.grad(x)
    found = sdbpg(
        upper, lower, np.ones(5), delta=1e20, lr=0.01, maxiter=20, output="last", **FULL
    ).x
    assert found == pytest.approx(x, rel=1e-12)


def test_schedules():
    assert GivenPerturbation(0.5, 0.5).at(3, np.zeros(1)) == 0.25
    assert storm_weight(0, None, 0.1) == 1.0
    assert storm_weight(7, None, 0.1) == pytest.approx(0.25)
    assert storm_weight(7, 30.0, 0.1) == pytest.approx(0.3)
    assert storm_weight(7, 30.0, 1.0) == 1.0
    upper, lower = valley()
    run = {"lr": 0.01, "maxiter": 8, "output": "last", **FULL}
    result = sdbpg(
        upper, lower, [0.5, 0.0], variant="pr", rho=4.0, rho_power=1.0, lr_power=0.5,
        delta_power=1.0, delta=0.8, **run,
    )  # fmt: skip
    assert result.delta == pytest.approx(0.1)
    x = np.array([0.5, 0.0])
    for k in range(8):
        f, g = upper.grad(x), lower.grad(x)
        rho, delta = 4 * (k + 1) / 8, 0.8 / (k + 1)
        lam = barrier_multiplier(f @ g, g @ g, alpha=1.0, delta=delta, rho=rho)
        x = x - 0.01 / math.sqrt(k + 1) * (f + lam * g)
    assert result.x == pytest.approx(x, rel=1e-12)


def test_multiplier_can_be_clipped():
    upper, lower = valley()
    run = {"lr": 0.01, "maxiter": 200, "delta": 1e-9, **FULL}
    assert sdbpg(upper, lower, [0.5, 0.0], **run).lam_max_seen > 10
    assert sdbpg(upper, lower, [0.5, 0.0], lam_max=3.0, **run).lam_max_seen == 3.0


def test_adaptive_perturbation_reaches_the_target_without_noise():
    upper, lower = valley()
    result = sdbpg(
        upper, lower, [0.5, 0.0], delta="auto", lr=0.02, maxiter=6000, eps_f=1e-9, eps_g=0.05,
        output="last", **FULL,
    )  # fmt: skip
    assert result.eps_g == pytest.approx(0.05, rel=0.02)


# --- estimates


def test_adaptive_perturbation_follows_its_formula():
    delta = AdaptivePerturbation(2.0, 0.1, 1.0, variance=0.0)
    f = np.array([3.0, 4.0])
    assert delta.at(0, f) == pytest.approx(2 * 0.1**4 / 5)
    assert delta.at(1, 11 * f) == pytest.approx(2 * 0.1**4 / 10)  # 0.9 · 5 + 0.1 · 55
    delta.observe(1.0)
    assert delta.at(2, f) == pytest.approx(0.1)


@pytest.mark.parametrize("split", [True, False])
def test_variance_of_halves_is_that_of_the_gradient_in_the_multiplier(split):
    f = least_squares(n=50)
    x, rng = np.ones(5), np.random.default_rng(0)
    each = np.stack([f.sample_grad(x, np.array([i])) for i in range(50)])
    per_sample = float(((each - each.mean(0)) ** 2).sum(1).mean())
    lower = LowerEstimates([MiniBatch(f, stream, 2) for stream in rng.spawn(2)], split)
    seen = []
    for k in range(4000):
        first, second = lower.update(k, x, x, 1.0)
        assert (first is second) != split
        seen.append(lower.variance)
    samples = 2 if split else 4
    error = 4 * np.std(seen) / np.sqrt(len(seen))
    assert np.mean(seen) == pytest.approx(per_sample / samples, abs=error)
    extra = np.mean([batch_variance(f, x, 2, rng) for _ in range(4000)])
    assert extra == pytest.approx(per_sample / 2, abs=2 * error)


def test_storm_with_full_weight_is_the_batch_gradient():
    f = least_squares()
    storm = Storm(f, np.random.default_rng(3), 4)
    batch = MiniBatch(f, np.random.default_rng(3), 4)
    x, previous = np.ones(5), np.zeros(5)
    for k in range(5):
        expected = batch.update(k, x, previous, 1.0)
        assert storm.update(k, x, previous, 1.0) == pytest.approx(expected, rel=1e-12)
        assert storm.evaluations == (4 if k == 0 else 4 + 8 * k)


def test_first_estimate_of_storm_has_its_own_batch():
    f = least_squares()
    drawn = f.draw(np.random.default_rng(3), 100)
    storm = Storm(f, np.random.default_rng(3), 4, first=100)
    first = storm.update(0, np.ones(5), np.ones(5), 1.0)
    assert first == pytest.approx(f.sample_grad(np.ones(5), drawn), rel=1e-12)
    assert storm.evaluations == 100


def test_spider_of_epochs_of_one_step_is_exact_and_halves_share_it():
    f = least_squares()
    spiders = [Spider(f, stream, 2, 3) for stream in np.random.default_rng(0).spawn(2)]
    lower = LowerEstimates(spiders, split=False)
    x = np.ones(5)
    for k in range(7):
        mean, _ = lower.update(k, x, x, 0.0)
        assert mean == pytest.approx(f.grad(x), rel=1e-12)  # x stays
    assert spiders[0].evaluations == 3 * 30 + 4 * 4
    assert spiders[1].evaluations == 4 * 4


@pytest.mark.parametrize("vr", ["storm", "spider"])
def test_variance_reduction_lowers_the_error_of_a_run(vr):
    """The residual of the upper level after equally many steps, over six seeds."""
    upper, lower = least_squares(0, n=100), least_squares(1, n=100)
    run = {"rho": 2.0, "lr": 0.02, "maxiter": 600, "output": "last", "eps_f": 1e-9}

    def residual(variant, seed, **more):
        found = sdbpg(
            upper, lower, np.zeros(5), variant=variant, rng=seed, batch_upper=4,
            batch_lower=4, **run, **more,
        )  # fmt: skip
        return np.linalg.norm(upper.grad(found.x) + 2 * lower.grad(found.x))

    plain = np.mean([residual("pr", seed) for seed in range(6)])
    reduced = np.mean([residual("vr-pr", seed, vr=vr) for seed in range(6)])
    assert reduced < 0.6 * plain


def test_scaled_objective_is_the_product():
    f = least_squares()
    scaled, x = ScaledObjective(f, 3.0), np.ones(5)
    idx = scaled.draw(np.random.default_rng(0), 4)
    assert scaled.value(x) == 3 * f.value(x)
    assert scaled.grad(x) == pytest.approx(3 * f.grad(x))
    assert scaled.sample_grad(x, idx) == pytest.approx(3 * f.sample_grad(x, idx))
    now, before = scaled.sample_grads(x, 2 * x, idx)
    assert now == pytest.approx(3 * f.sample_grad(x, idx))
    assert before == pytest.approx(3 * f.sample_grad(2 * x, idx))


def test_curvature_by_power_iterations():
    H = np.diag([5.0, 1.0, 0.1])
    rng = np.random.default_rng(0)

    class Quadratic:
        n = 7

        def grad(self, x):
            return H @ x

    assert gradient_lipschitz(Quadratic(), np.ones(3), rng) == (pytest.approx(5, rel=1e-6), 140)
    streamed = Expectation(lambda x, s: H @ x + s, lambda rng, size: rng.standard_normal(3))
    size, taken = gradient_lipschitz(streamed, np.ones(3), rng)
    assert size == pytest.approx(5, rel=1e-6)
    assert taken == 20 * MOST_SAMPLES
    f = least_squares()
    assert gradient_lipschitz(f, np.ones(5), rng) == (f.smoothness(), 0)


def test_automatic_step_is_half_of_the_safe_one():
    upper, lower = least_squares(0), least_squares(1)
    result = sdbpg(upper, lower, np.zeros(5), variant="pr", rho=2.0, alpha=3.0, maxiter=1)
    assert result.lr == pytest.approx(0.5 / (upper.smoothness() + 5 * lower.smoothness()))


# --- the interface


@pytest.mark.parametrize("variant", ["plain", "pr", "vr-pr"])
@pytest.mark.parametrize("delta", [1e-3, "auto"])
def test_every_variant_reaches_stationarity_of_a_noisy_valley(variant, delta):
    upper, lower = valley(noise=0.1)
    result = sdbpg(
        upper, lower, [0.5, 0.0], variant=variant, delta=delta, lr=0.01, maxiter=4000, eps_f=0.15,
        eps_g=0.15, rng=0,
    )  # fmt: skip
    assert result.success, result.message
    assert result.status == 0
    assert result.x == pytest.approx([1.0, 3.0], abs=0.1)
    assert (result.eps_f, result.eps_g, result.lam_star) == bilevel_stationarity(
        upper.grad(result.x), lower.grad(result.x)
    )
    assert result.fun == result.fun_upper == upper.value(result.x)
    assert result.fun_lower == lower.value(result.x)
    assert 0 <= result.visits <= 1
    assert 0 < result.active <= 1
    assert result.lam_max_seen >= result.lam


def test_gradients_of_samples_are_counted():
    upper, lower = valley(noise=0.1)
    run = {"lr": 1e-3, "maxiter": 10, "batch_upper": 6, "rng": 0}
    plain = sdbpg(upper, lower, [0.5, 0.0], **run)
    assert (plain.n_grad_upper, plain.n_grad_lower) == (60, 10 * 10)  # ⌈36/4⌉ in halves: 2 · 5
    storm = sdbpg(upper, lower, [0.5, 0.0], variant="vr-pr", batch_lower=3, **run)
    assert (storm.n_grad_upper, storm.n_grad_lower) == (10 + 9 * 12, 10 + 9 * 6)  # at most maxiter
    longer = sdbpg(upper, lower, [0.5, 0.0], variant="vr-pr", **(run | {"maxiter": 200}))
    assert longer.n_grad_upper == 100 + 199 * 12  # ⌈1/ε⌉
    auto = sdbpg(upper, lower, [0.5, 0.0], delta="auto", batch_lower=4, **run)
    assert auto.n_grad_lower == 40 + 4


def test_same_seed_same_result_and_different_streams_of_the_levels():
    upper, lower = valley(noise=0.1)
    run = {"lr": 1e-2, "maxiter": 50, "eps_f": 1e-9}
    first, again = (sdbpg(upper, lower, [0.5, 0.0], rng=1, **run) for _ in range(2))
    other = sdbpg(upper, lower, [0.5, 0.0], rng=2, **run)
    assert (first.x_last == again.x_last).all()
    assert (first.x_last != other.x_last).any()


def test_outputs():
    upper, lower = valley(noise=0.3)
    run = {"lr": 1e-2, "maxiter": 60, "eps_f": 1e-9, "rng": 0, "eval_every": 1}
    points = []
    best = sdbpg(upper, lower, [0.5, 0.0], callback=lambda x: points.append(x), **run)
    merits = np.maximum(best.history["eps_f"] / 1e-9, best.history["eps_g"] / 1e-2)
    assert (best.x == points[int(merits.argmin())]).all()
    last = sdbpg(upper, lower, [0.5, 0.0], output="last", **run)
    assert (last.x == points[-1]).all()
    drawn = {
        tuple(sdbpg(upper, lower, [0.5, 0.0], output="random", **(run | {"rng": seed})).x)
        for seed in range(3)
    }
    assert len(drawn) == 3
    late = [tuple(x) for x in points[30:]]
    assert tuple(sdbpg(upper, lower, [0.5, 0.0], output="random", **run).x) in late


def test_expectations_without_known_gradients_have_a_random_output():
    upper, lower = (
        Expectation(h.sample_grad, h.draw) for h in valley(noise=0.1)
    )  # fmt: skip
    result = sdbpg(upper, lower, [0.5, 0.0], lr=0.01, maxiter=1000, rng=0)
    assert result.status == 1
    assert math.isnan(result.eps_f)
    assert (result.x != result.x_last).any()
    assert result.x == pytest.approx([1.0, 3.0], abs=0.2)


def test_normalized_run_does_not_depend_on_the_scales():
    upper, lower = valley(noise=0.1)
    run = {"lr": 0.05, "maxiter": 50, "eps_f": 1e-9, "normalize": True, "rng": 0}
    one = sdbpg(upper, lower, [0.5, 0.0], **run)
    scaled = (ScaledObjective(upper, 1e6), ScaledObjective(lower, 1e-3))
    other = sdbpg(*scaled, [0.5, 0.0], **run)
    assert other.x_last == pytest.approx(one.x_last, rel=1e-9)
    with pytest.warns(UserWarning, match="set normalize=True"):
        sdbpg(*scaled, [0.5, 0.0], lr=1e-9, maxiter=1)
    streamed = Expectation(lower.sample_grad, lower.draw)
    assert np.isfinite(sdbpg(upper, streamed, [0.5, 0.0], **run).x_last).all()


def test_target_of_the_adaptive_perturbation_is_not_scaled():
    upper, lower = valley()
    result = sdbpg(
        upper, lower, [0.5, 0.0], delta="auto", normalize=True, lr=0.1, maxiter=6000, eps_f=1e-9,
        eps_g=0.05, output="last", **FULL,
    )  # fmt: skip
    assert result.eps_g == pytest.approx(0.05, rel=0.02)


def test_torch_losses_and_matrices_as_variables():
    rows = torch.linspace(-1, 1, 20, dtype=torch.float64)
    lower = TorchLoss(lambda x, a: (a * (x.sum() - 1)).square(), rows)
    upper = TorchLoss(lambda x, a: x.square().sum() + 0 * a, rows.clone())
    result = sdbpg(upper, lower, np.zeros((2, 2)), lr=0.02, maxiter=3000, rng=0, delta=1e-5)
    assert result.x == pytest.approx(np.full((2, 2), 0.25), abs=0.02)


def test_callback_sees_records_and_stops_the_run():
    upper, lower = valley(noise=0.1)
    seen = []

    def stop(intermediate_result):
        seen.append(intermediate_result)
        if len(seen) == 3:
            raise StopIteration

    result = sdbpg(upper, lower, [0.5, 0.0], lr=1e-3, eval_every=7, callback=stop, rng=0)
    assert [record.nit for record in seen] == [7, 14, 21]
    assert result.status == 99
    assert result.nit == 21
    assert result.history["nit"].tolist() == [7, 14, 21]
    assert seen[-1].fun == upper.value(seen[-1].x)


def interrupted_after(objective, calls, error):
    left = [calls]

    def sample_grad(x, samples):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return objective.sample_grad(x, samples)

    return Expectation(sample_grad, objective.draw, objective.value, objective.grad)


def test_interrupted_run_returns_what_it_has():
    upper, lower = valley(noise=0.1)
    broken = interrupted_after(upper, 11, KeyboardInterrupt)
    result = sdbpg(broken, lower, [0.5, 0.0], lr=1e-3, rng=0)
    assert (result.status, result.nit) == (2, 11)
    assert result.success is False
    assert np.isfinite(result.x).all()


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_gradients_that_are_not_finite_end_the_run(level):
    upper, lower = valley(noise=0.1)
    bad = {"upper": upper, "lower": lower}[level]
    left = [8]

    def sample_grad(x, samples):
        left[0] -= 1
        return bad.sample_grad(x, samples) * (np.nan if left[0] < 0 else 1)

    broken = Expectation(sample_grad, bad.draw, bad.value, bad.grad)
    levels = (broken, lower) if level == "upper" else (upper, broken)
    result = sdbpg(*levels, [0.5, 0.0], lr=1e-3, rng=0)
    assert result.status == 3
    assert f"A gradient of the {level} level is not finite" in result.message
    assert np.isfinite(result.x_last).all()


def test_diverging_run_ends():
    upper, lower = valley()
    result = sdbpg(upper, lower, [0.5, 0.0], lr=10.0, maxiter=1000, **FULL)
    assert result.status == 3
    assert np.isfinite(result.x).all()


def test_evaluations_cost_no_more_than_the_steps():
    upper, lower = least_squares(0, n=3000), least_squares(1, n=3000)
    run = {"lr": 1e-3, "maxiter": 1000, "eps_f": 1e-9, "eps_g": 1e-9, "rng": 0}
    few = sdbpg(upper, lower, np.zeros(5), batch_upper=10, batch_lower=20, **run)
    assert few.history["nit"].tolist() == [200, 400, 600, 800, 1000]
    exact = sdbpg(upper, lower, np.zeros(5), **FULL, **run)
    assert len(exact.history["nit"]) == 100


@pytest.mark.parametrize("noise_lower", [None, 0.1])
def test_shared_problem_has_the_gradients_of_its_values(noise_lower):
    rng = np.random.default_rng(0)
    problem = tanh_selection(rng, noise_lower=noise_lower)
    x, v = rng.standard_normal((2, 20))
    for f in (problem.upper, problem.lower):
        difference = (f.value(x + 1e-6 * v) - f.value(x - 1e-6 * v)) / 2e-6
        assert f.grad(x) @ v == pytest.approx(difference, rel=1e-6)
        sampled = np.mean([f.sample_grad(x, f.draw(rng, 50)) for _ in range(400)], axis=0)
        assert sampled == pytest.approx(f.grad(x), abs=0.01)
    assert not problem.lower.grad(x)[10:].any()


# --- bad input


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"lr": 0.0}, ValueError, "lr must be a finite number > 0"),
        ({"lr_power": 1.0}, ValueError, "lr_power must be"),
        ({"alpha": 0.0}, ValueError, "alpha must be a finite number > 0"),
        ({"delta": 0.0}, ValueError, "delta must be a finite number > 0"),
        ({"delta": -1.0, **FULL}, ValueError, "delta must be a finite number >= 0"),
        ({"delta": "auto", "delta_power": 1.0}, ValueError, "delta_power must be 0"),
        ({"delta_power": -1.0}, ValueError, "delta_power must be"),
        ({"p": -1.0}, ValueError, "p must be"),
        ({"rho": 1.0}, ValueError, "rho must be None for variant='plain'"),
        ({"variant": "pr", "rho": 0.0}, ValueError, "rho must be a finite number > 0"),
        ({"rho_power": -1.0}, ValueError, "rho_power must be"),
        ({"lam_max": 0.0}, ValueError, "lam_max must be"),
        ({"beta": -1.0}, ValueError, "beta must be"),
        ({"variant": "vr"}, ValueError, "variant must be one of"),
        ({"vr": "svrg"}, ValueError, "vr must be one of"),
        ({"variant": "vr-pr", "vr": "spider"}, ValueError, "upper.n must be an integer"),
        ({"split": 1}, ValueError, "split must be one of"),
        ({"normalize": None}, ValueError, "normalize must be one of"),
        ({"output": "first"}, ValueError, "output must be one of"),
        ({"batch_upper": 0}, ValueError, "batch_upper must be an integer >= 1"),
        ({"batch_upper": "auto"}, ValueError, "batch_upper must be one of 'full'"),
        ({"batch_lower": 1}, ValueError, "batch_lower must be an integer >= 2"),
        ({"batch_lower": 2.5}, TypeError, "batch_lower must be an integer"),
        ({"maxiter": 0}, ValueError, "maxiter must be"),
        ({"eps_f": 0.0}, ValueError, "eps_f must be"),
        ({"eps_g": math.nan}, ValueError, "eps_g must be"),
        ({"eval_every": 0}, ValueError, "eval_every must be"),
        ({"rng": "seed"}, TypeError, "rng must be"),
        ({"callback": 3}, TypeError, "callback must be callable"),
        ({"x0": [1.0 + 1j, 0]}, TypeError, "x0 must be real"),
        ({"x0": []}, ValueError, "x0 must have at least one entry"),
        ({"x0": [np.inf, 0.0]}, ValueError, "x0 must be finite"),
        ({"x0": [1.0, 3.0], "normalize": True}, ValueError, "normalize must be False"),
    ],
)
def test_arguments_that_are_refused(changed, error, message):
    upper, lower = valley(noise=0.1)
    x0 = changed.pop("x0", [0.5, 0.0]) if "x0" in changed else [0.5, 0.0]
    with pytest.raises(error, match=message):
        sdbpg(upper, lower, x0, **({"lr": 0.01, "maxiter": 2} | changed))


def test_objectives_that_are_refused():
    lower = valley()[1]
    with pytest.raises(TypeError, match="upper must have n, value"):
        sdbpg(object(), lower, [0.5, 0.0])
    with pytest.raises(ValueError, match="must be two objectives"):
        sdbpg(lower, lower, [0.5, 0.0])
    flat = smooth(lambda x: float(x.sum()), np.ones_like)
    other = smooth(lambda x: float(x.sum()), np.ones_like)
    with pytest.raises(ValueError, match="lr must be a number: the curvature"):
        sdbpg(flat, other, [0.5, 0.0])
    broken = smooth(lambda x: 0.0, lambda x: np.full_like(x, np.inf))
    with pytest.raises(ValueError, match="the gradient of upper at x0 must be finite"):
        sdbpg(broken, lower, [0.5, 0.0], lr=0.1)


def test_one_batch_for_both_is_warned_of():
    upper, lower = valley(noise=0.1)
    with pytest.warns(UserWarning, match="from the same batch"):
        result = sdbpg(upper, lower, [0.5, 0.0], split=False, lr=0.01, maxiter=20, batch_lower=1)
    assert result.n_grad_lower == 20
