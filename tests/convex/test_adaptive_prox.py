"""Adaptive proximal gradient: its identities, rates of a kind, interface and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.convex import L1, Box, ElasticNet, NuclearNorm, Simplex, minimize_adaprox
from thalweg.convex.adaprox_iteration import (
    AcceleratedProximalSteps,
    ProximalSteps,
    initial_scale,
)
from thalweg.tasks import (
    active_box_least_squares,
    breast_cancer,
    sparse_regression,
    spectrum_least_squares,
)

BOTH = pytest.mark.parametrize("accelerated", [False, True], ids=["plain", "accelerated"])
ITERATIONS = pytest.mark.parametrize("iteration", [ProximalSteps, AcceleratedProximalSteps])


def least_squares(seed=0, n=30, d=10):
    rng = np.random.default_rng(seed)
    A, b = rng.standard_normal((n, d)), rng.standard_normal(n)

    def f(x):
        residual = A @ x - b
        return float(residual @ residual) / 2, A.T @ residual

    f.L = np.linalg.norm(A, 2) ** 2
    return f


def one_dimension(x):
    return 0.5 * float((x - 3) @ (x - 3)), x - 3


def iterates(fun, x0, **settings):
    seen = []
    minimize_adaprox(fun, x0, gtol=0, callback=lambda x: seen.append(x), **settings)
    return np.array(seen)


def test_without_penalty_it_is_adagrad_norm_with_a_lagged_accumulator():
    f = least_squares()
    x, S, expected = np.ones(10), 7.0, []
    for _ in range(50):
        gradient = f(x)[1]
        x = x - 0.5 / S * gradient
        S = math.sqrt(S**2 + gradient @ gradient)
        expected.append(x)
    seen = iterates(f, np.ones(10), D=0.5, S0=7.0, maxiter=50)
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-12)


@ITERATIONS
def test_the_accumulator_is_that_of_the_mappings_and_obeys_the_identity(iteration):
    f, penalty, D = least_squares(1), L1(3.0), 2.0
    steps = iteration(np.ones(10), penalty.prox, D, 5.0)
    total = 25.0
    for t in range(200):
        before = steps.query if iteration is ProximalSteps else steps._z
        S = steps.S
        mapping = steps.propose(f(steps.query)[1])
        steps.accept()
        after = steps.query if iteration is ProximalSteps else steps._z
        weight = 1.0 if iteration is ProximalSteps else (t + 2) / 2
        total += weight**2 * mapping**2
        assert pytest.approx(total, rel=1e-10) == steps.S**2
        moved = float(np.sum((after - before) ** 2))
        assert pytest.approx(S**2 * (1 + moved / D**2), rel=1e-10) == steps.S**2


def test_the_accelerated_iteration_is_the_formula():
    f, h, D, S = least_squares(2), L1(1.0), 1.5, 4.0
    z = y = np.full(10, 0.5)
    expected = []
    for t in range(40):
        a = (t + 2) / 2
        x = z / a + (1 - 1 / a) * y
        s = a * D / S
        z_next = h.prox(z - s * f(x)[1], s)
        S = math.sqrt(S**2 + a**2 * float(np.sum(((z - z_next) / s) ** 2)))
        y = z_next / a + (1 - 1 / a) * y
        z = z_next
        expected.append(y)
    seen = iterates(f, np.full(10, 0.5), prox=h, D=D, S0=4.0, accelerated=True, maxiter=40)
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("S0", ["auto", 3.0])
@pytest.mark.parametrize("c", [1e-3, 50.0])
def test_scaling_the_objective_changes_nothing(accelerated, S0, c):
    f = least_squares(3)
    scaled = {"S0": S0} if S0 == "auto" else {"S0": c * S0}
    first = iterates(f, np.ones(10), prox=L1(2.0), S0=S0, accelerated=accelerated, maxiter=60)
    second = iterates(
        lambda x: (c * f(x)[0], c * f(x)[1]),
        np.ones(10),
        prox=L1(2.0 * c),
        accelerated=accelerated,
        maxiter=60,
        **scaled,
    )
    np.testing.assert_allclose(second, first, rtol=1e-10, atol=1e-10)


@BOTH
def test_scaling_the_variables_and_d_scales_the_iterates(accelerated):
    f, c = least_squares(4), 20.0
    first = iterates(f, np.ones(10), prox=L1(2.0), accelerated=accelerated, maxiter=60)
    second = iterates(
        lambda x: (f(x / c)[0], f(x / c)[1] / c),
        c * np.ones(10),
        prox=L1(2.0 / c),
        D=c,
        accelerated=accelerated,
        maxiter=60,
    )
    np.testing.assert_allclose(second / c, first, rtol=1e-10, atol=1e-10)


def test_short_steps_decrease_the_objective_as_the_descent_lemma_says():
    f, penalty = least_squares(5), L1(2.0)
    L = f.L
    S0 = L * 1.0  # the first step is 1/L, and steps only shrink
    seen = iterates(f, np.ones(10), prox=penalty, S0=S0, maxiter=100)
    points = [np.ones(10), *seen]
    F = [f(x)[0] + penalty(x) for x in points]
    for k in range(100):
        moved = float(np.sum((points[k + 1] - points[k]) ** 2))
        assert F[k + 1] <= F[k] - L / 2 * moved + 1e-12 * abs(F[k])


def test_the_first_step_of_a_line_is_known():
    """f = (x - 3)²/2, h = |x|, D = 1: S0 is 2 from 0, the step 1/2, and prox(1.5) = 1."""
    result = minimize_adaprox(one_dimension, [0.0], prox=L1(1.0), maxiter=1, output="last")
    assert result.x[0] == pytest.approx(1.0, rel=1e-14)
    assert pytest.approx(math.sqrt(8), rel=1e-14) == result.S
    assert initial_scale(np.zeros(1), np.array([-3.0]), L1(1.0).prox, 1.0) == pytest.approx(2.0)
    assert initial_scale(np.full(1, 10.0), np.array([7.0]), L1(1.0).prox, 1.0) == pytest.approx(8.0)


@BOTH
@pytest.mark.parametrize(("D", "maxiter"), [(1.0, 2000), (8.0, 200)])
def test_a_line_is_solved_from_far_away(accelerated, D, maxiter):
    result = minimize_adaprox(
        one_dimension, [10.0], prox=L1(1.0), D=D, maxiter=maxiter, accelerated=accelerated
    )
    assert result.x[0] == pytest.approx(2.0, abs=1e-6)


@BOTH
@pytest.mark.parametrize("prox", [L1(1.0), None])
def test_a_stationary_start_is_returned_at_once(accelerated, prox):
    x0 = [2.0 if prox else 3.0]
    result = minimize_adaprox(one_dimension, x0, prox=prox, accelerated=accelerated)
    assert result.success
    assert result.nit == 0
    assert result.mapping_norm < 1e-12
    assert result.x.tolist() == x0


def test_with_one_setting_it_minimizes_three_classes():
    """Logistic and hinge to the optimum of an interior-point method, sigmoid to stationarity."""
    for loss, accuracy in (("logistic", 1e-5), ("hinge", 2e-3)):
        problem = breast_cancer(loss)
        result = minimize_adaprox(
            problem, np.zeros(30), prox=L1(problem.weight), accelerated=True, maxiter=2000
        )
        assert -1e-6 < result.fun - problem.l1_optimum() < accuracy
    problem = breast_cancer("sigmoid")
    result = minimize_adaprox(problem, np.zeros(30), prox=L1(problem.weight), maxiter=2000)
    start = minimize_adaprox(problem, np.zeros(30), prox=L1(problem.weight), maxiter=1)
    assert result.mapping_norm < 1e-2 * start.trace["mapping_norm"][0]


def test_acceleration_is_faster_on_ill_conditioned_problems():
    problem = spectrum_least_squares(np.random.default_rng(0))
    plain, accelerated = (
        minimize_adaprox(problem, np.zeros(200), D=3.0, maxiter=3000, accelerated=which).fun
        for which in (False, True)
    )
    assert accelerated < 0.1 * plain


def test_the_step_settles_although_the_gradient_does_not_vanish():
    """At the corner of a box the gradient stays, the mapping vanishes, and S stops growing."""
    result = minimize_adaprox(
        lambda x: (float(np.sum((x - 5) ** 2)) / 2, x - 5), np.zeros(3), prox=Box(-1, 1), gtol=0
    )
    assert result.x.tolist() == [1.0, 1.0, 1.0]
    assert result.nit < 10
    problem = active_box_least_squares(np.random.default_rng(0))
    settled = minimize_adaprox(problem, np.zeros(100), prox=Box(-1, 1), D=10.0, maxiter=300, gtol=0)
    S = settled.trace["S"]
    assert S[-1] < (1 + 1e-6) * S[len(S) // 2]
    assert np.linalg.norm(problem(settled.x)[1]) > 10
    assert settled.fun == pytest.approx(problem.optimum, rel=1e-9)


def test_the_stated_measure_is_what_it_stops_on():
    f, penalty = least_squares(6), L1(2.0)
    result = minimize_adaprox(f, np.ones(10), prox=penalty, gtol=1e-5, maxiter=5000)
    assert result.success
    step = result.step
    moved = result.x - penalty.prox(result.x - step * f(result.x)[1], step)
    assert np.linalg.norm(moved) / step == pytest.approx(result.mapping_norm, rel=1e-6)
    assert result.mapping_norm <= 1e-5
    assert result.nit == len(result.trace["S"])
    accelerated = minimize_adaprox(
        f, np.ones(10), prox=penalty, gtol=1e-3, maxiter=5000, accelerated=True
    )
    assert accelerated.success
    assert accelerated.nit % 10 == 0
    # Ten steps and one gradient at y.
    assert accelerated.njev == pytest.approx(1.1 * accelerated.nit, abs=2)


def test_outputs_are_what_they_are_called():
    f, penalty = least_squares(7), L1(2.0)
    common = {"prox": penalty, "maxiter": 30, "gtol": 0}
    seen, alphas = [np.ones(10)], []

    def note(intermediate_result):
        seen.append(intermediate_result.x)
        alphas.append(intermediate_result.step)
        expected = f(intermediate_result.x)[0] + penalty(intermediate_result.x)
        assert intermediate_result.fun == pytest.approx(expected, rel=1e-14)

    last = minimize_adaprox(f, np.ones(10), output="last", callback=note, **common)
    np.testing.assert_array_equal(last.x, seen[-1])
    average = np.average(seen[1:], axis=0, weights=alphas)
    np.testing.assert_allclose(last.x_avg, average, rtol=1e-12)
    by_average = minimize_adaprox(f, np.ones(10), output="average", **common)
    np.testing.assert_array_equal(by_average.x, last.x_avg)
    best = minimize_adaprox(f, np.ones(10), output="best", **common)
    np.testing.assert_array_equal(best.x, seen[int(np.argmin(best.trace["mapping_norm"]))])
    auto = minimize_adaprox(f, np.ones(10), **common)
    assert auto.fun == min(last.fun, by_average.fun, best.fun)
    unknown = minimize_adaprox(
        f, np.ones(10), prox=lambda v, alpha: penalty.prox(v, alpha), maxiter=30, gtol=0
    )
    np.testing.assert_array_equal(unknown.x, last.x)
    assert unknown.fun == f(last.x)[0]


def test_random_outputs_are_uniform():
    """Counts of 10 outcomes in 1000 draws are within 5 standard deviations (9.5) of 100."""
    counts = dict.fromkeys(range(10), 0)
    f = least_squares(8)
    seen = iterates(f, np.ones(10), maxiter=10)
    for seed in range(1000):
        result = minimize_adaprox(f, np.ones(10), output="random", maxiter=10, gtol=0, rng=seed)
        counts[int(np.argmin(np.abs(seen - result.x).sum(axis=1)))] += 1
    assert all(abs(count - 100) < 48 for count in counts.values())


def test_with_noise_the_average_is_better_and_the_run_repeats():
    def noisy(x, rng):
        return x - 0.2 + rng.standard_normal(20)

    def solve(output, seed):
        return minimize_adaprox(
            lambda x: 0.0,
            np.zeros(20),
            jac=noisy,
            stochastic=True,
            maxiter=4000,
            output=output,
            rng=seed,
        )

    gaps = {
        output: np.mean([np.sum((solve(output, seed).x - 0.2) ** 2) / 2 for seed in range(4)])
        for output in ("auto", "last")
    }
    assert gaps["auto"] < 0.3 * gaps["last"]
    first, second = solve("auto", 5), solve("auto", 5)
    np.testing.assert_array_equal(first.x, second.x)
    assert first.success
    assert "noisy" in first.message
    assert not np.array_equal(first.x, solve("auto", 6).x)


def test_noise_with_values_and_torch():
    def noisy(x, rng):
        return float(x @ x) / 2, x + 0.1 * rng.standard_normal(3)

    result = minimize_adaprox(noisy, np.ones(3), stochastic=True, maxiter=500, rng=0)
    assert np.linalg.norm(result.x) < 0.1

    def of_tensor(x, rng):
        return (x * x).sum() / 2 + 0.1 * x @ torch.from_numpy(rng.standard_normal(3))

    result = minimize_adaprox(
        of_tensor, np.ones(3), jac="torch", stochastic=True, maxiter=500, rng=0
    )
    assert np.linalg.norm(result.x) < 0.1


@BOTH
def test_torch_functions_give_the_same_iterates(accelerated):
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((20, 6)), rng.standard_normal(20)
    At, bt = torch.from_numpy(A), torch.from_numpy(b)
    numpy_run = iterates(
        lambda x: (float(np.sum((A @ x - b) ** 2)) / 2, A.T @ (A @ x - b)),
        np.ones(6),
        prox=L1(1.0),
        accelerated=accelerated,
        maxiter=50,
    )
    torch_run = iterates(
        lambda x: (At @ x - bt).square().sum() / 2,
        torch.ones(6, dtype=torch.float64),
        jac="torch",
        prox=L1(1.0),
        accelerated=accelerated,
        maxiter=50,
    )
    np.testing.assert_allclose(torch_run, numpy_run, rtol=1e-12, atol=1e-12)


def test_a_torch_function_gets_the_dtype_of_x0():
    seen = set()

    def fun(x):
        seen.add(x.dtype)
        return x.square().sum()

    minimize_adaprox(fun, torch.ones(2), jac="torch", maxiter=2)
    minimize_adaprox(fun, [1.0, 1.0], jac="torch", maxiter=2)
    assert seen == {torch.float32, torch.float64}


def test_a_torch_function_may_be_constant():
    constant = minimize_adaprox(lambda x: torch.tensor(1.0), [1.0], jac="torch")
    assert constant.success
    assert constant.x.tolist() == [1.0]
    with pytest.raises(TypeError, match="scalar tensor"):
        minimize_adaprox(lambda x: x, [1.0, 2.0], jac="torch")


def test_per_coordinate_steps_are_adagrad_like_and_solve_badly_scaled_problems():
    scales = np.array([1.0, 1e-4])

    def f(x):
        return float(scales @ (x - 1) ** 2) / 2, scales * (x - 1)

    scalar = minimize_adaprox(f, np.zeros(2), prox=L1(0.0), maxiter=300)
    each = minimize_adaprox(f, np.zeros(2), prox=L1(0.0), maxiter=300, per_coordinate=True)
    assert each.S.shape == (2,)
    assert each.fun < scalar.fun
    with pytest.raises(ValueError, match="separable"):
        minimize_adaprox(f, np.zeros(2), prox=Simplex(), per_coordinate=True)
    with pytest.raises(ValueError, match="separable"):
        minimize_adaprox(
            f, np.zeros(2), prox=lambda v, alpha: v / (1 + float(alpha)), per_coordinate=True
        )


def test_matrices_keep_their_shape():
    target = np.outer(np.arange(1.0, 5.0), np.ones(3))
    result = minimize_adaprox(
        lambda X: (float(np.sum((X - target) ** 2)) / 2, X - target),
        np.zeros((4, 3)),
        prox=NuclearNorm(1.0),
        D=5.0,
    )
    assert result.x.shape == (4, 3)
    values = np.linalg.svd(result.x, compute_uv=False)
    expected = np.linalg.svd(target, compute_uv=False)[0] - 1
    np.testing.assert_allclose(values, [expected, 0, 0], atol=1e-5)


def test_a_sparse_lasso_is_solved_as_scikit_learn_solves_it():
    from sklearn.linear_model import Lasso

    problem = sparse_regression(np.random.default_rng(0), 500, 300)
    assert scipy.sparse.issparse(problem.X)
    result = minimize_adaprox(
        problem, np.zeros(300), prox=L1(problem.weight), D=5.0, gtol=1e-7, maxiter=5000
    )
    model = Lasso(problem.weight, fit_intercept=False, tol=1e-10).fit(problem.X, problem.y)
    assert result.success
    np.testing.assert_allclose(result.x, model.coef_, atol=1e-5)


@BOTH
def test_infeasible_starts_are_projected(accelerated):
    result = minimize_adaprox(
        lambda x: (float(x @ x) / 2, x),
        np.full(3, 1e6),
        prox=Simplex(),
        accelerated=accelerated,
        D=1.0,
    )
    assert result.success
    np.testing.assert_allclose(result.x, 1 / 3, atol=1e-5)
    assert Simplex()(result.x) == 0


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 20), st.booleans())
def test_the_optimality_condition_holds_whatever_the_distance(seed, D, accelerated):
    """At a converged x the subgradient of an elastic net is -∇f, to the tolerance."""
    f = least_squares(seed, d=4)
    penalty = ElasticNet(2.0, 0.5)
    result = minimize_adaprox(
        f, np.zeros(4), prox=penalty, D=D, accelerated=accelerated, maxiter=2000, gtol=1e-3
    )
    if not result.success:  # D is far off
        return
    gradient = f(result.x)[1] + 1.0 * result.x
    active = np.abs(result.x) > 1e-2
    assert np.all(np.abs(gradient + np.sign(result.x))[active] < 0.05)
    assert np.all(np.abs(gradient) < 1.05)


def test_use_through_scipy():
    values = []
    result = scipy.optimize.minimize(
        lambda x, a: (float(np.sum((x - a) ** 2)), 2 * (x - a)),
        [10.0, 5.0],
        args=(3.0,),
        jac=True,
        method=minimize_adaprox,
        bounds=[(0, 1), (None, 4)],
        tol=1e-8,
        callback=lambda intermediate_result: values.append(intermediate_result.fun),
        options={"D": 2.0, "maxiter": 500},
    )
    assert result.success
    np.testing.assert_allclose(result.x, [1, 3], atol=1e-7)
    assert values[-1] == pytest.approx(result.fun)
    by_bounds = scipy.optimize.minimize(
        lambda x: float(x @ x),
        np.ones(2),
        jac=lambda x: 2 * x,
        hess=lambda x: 2 * np.eye(2),
        method=minimize_adaprox,
        bounds=scipy.optimize.Bounds(0.5, 2),
    )
    np.testing.assert_allclose(by_bounds.x, 0.5)
    assert by_bounds.nfev < by_bounds.njev + 3


def test_counts_are_those_of_the_calls():
    calls = {"fun": 0, "jac": 0, "prox": 0}
    f = least_squares(9)

    def fun(x):
        calls["fun"] += 1
        return f(x)[0]

    def jac(x):
        calls["jac"] += 1
        return f(x)[1]

    def prox(v, alpha):
        calls["prox"] += 1
        return L1(1.0).prox(v, alpha)

    result = minimize_adaprox(fun, np.ones(10), jac=jac, prox=prox, h=L1(1.0), maxiter=20, gtol=0)
    assert calls == {"fun": result.nfev, "jac": result.njev, "prox": result.nprox}
    assert result.njev == 20
    assert result.status == 1
    assert "budget" in result.message


def test_the_callback_can_stop_and_ctrl_c_keeps_the_point():
    def stop(x):
        raise StopIteration

    result = minimize_adaprox(one_dimension, [10.0], prox=L1(1.0), callback=stop)
    assert (result.status, result.nit, result.success) == (99, 1, False)

    def interrupt(x):
        raise KeyboardInterrupt

    result = minimize_adaprox(one_dimension, [10.0], prox=L1(1.0), callback=interrupt)
    assert (result.status, result.nit) == (2, 1)
    assert np.isfinite(result.x).all()


@pytest.mark.parametrize("where", ["jac", "prox"])
def test_what_is_not_finite_ends_the_run_at_the_last_point(where):
    def fun(x):
        gradient = x - 3
        return 0.0, gradient * np.nan if where == "jac" and x[0] < 9 else gradient

    def prox(v, alpha):
        return v * np.nan if where == "prox" and 0 < v[0] < 8 else v

    result = minimize_adaprox(fun, [10.0], prox=prox, output="last")
    assert result.status == 3
    assert np.isfinite(result.x).all()
    assert "finite" in result.message


def test_warnings_name_what_is_suspicious():
    f = least_squares()
    with pytest.warns(UserWarning, match="tiny"):
        minimize_adaprox(f, np.ones(10), S0=1e-8, maxiter=1)
    with pytest.warns(UserWarning, match="nonexpansive"):
        minimize_adaprox(f, np.ones(10), prox=lambda v, alpha: 2 * v, maxiter=1)
    with pytest.warns(UserWarning, match="not convex"):
        minimize_adaprox(
            lambda x: (-float(x @ x) / 2, -x), np.ones(2), accelerated=True, maxiter=50
        )
    with pytest.warns(scipy.optimize.OptimizeWarning, match="unknown options: lr"):
        minimize_adaprox(f, np.ones(10), maxiter=1, lr=1.0)


def test_a_tiny_s0_is_fatal_with_a_constraint():
    """What the warning is about: the prox hides the length of the first step from S."""
    slopes = lambda x: (float(np.sum(np.abs(x - 3))), np.sign(x - 3))  # noqa: E731
    with pytest.warns(UserWarning, match="tiny"):
        bad = minimize_adaprox(slopes, np.zeros(2), prox=L1(0.5), S0=1e-8, output="last")
    good = minimize_adaprox(slopes, np.zeros(2), prox=L1(0.5), output="last")
    assert good.fun < 3.1
    assert bad.fun > 1e3


BAD = [
    ({"D": 0.0}, ValueError, "D must be"),
    ({"D": float("nan")}, ValueError, "D must be"),
    ({"S0": -1.0}, ValueError, "S0 must be"),
    ({"S0": "large"}, TypeError, "S0 must be"),
    ({"maxiter": 0}, ValueError, "maxiter must be"),
    ({"gtol": -1.0}, ValueError, "gtol must be"),
    ({"tol": -1.0}, ValueError, "tol must be"),
    ({"output": "median"}, ValueError, "output must be"),
    ({"accelerated": 1}, ValueError, "accelerated must be"),
    ({"x0": [np.inf]}, ValueError, "x0 must be finite"),
    ({"x0": [1j]}, TypeError, "x0 must be real"),
    ({"x0": []}, ValueError, "x0 must have"),
    ({"jac": None}, ValueError, "jac must be"),
    ({"jac": "3-point"}, ValueError, "jac must be"),
    ({"fun": 3}, TypeError, "fun must be callable"),
    ({"fun": lambda x: 1.0}, TypeError, "fun must return"),
    ({"fun": lambda x: (1.0, np.ones(3))}, ValueError, "the gradient must have shape"),
    ({"fun": lambda x: (1.0, x * np.nan)}, ValueError, "finite at x0"),
    ({"prox": lambda v: v}, TypeError, r"prox\(v, alpha\).*got <lambda>\(v\)"),
    ({"prox": lambda v, alpha: v[:0]}, ValueError, "must have shape"),
    ({"prox": lambda v, alpha: v + 1j}, TypeError, "must be real"),
    ({"prox": 3}, TypeError, "prox must be"),
    ({"prox": L1}, TypeError, "prox must be"),
    ({"h": 3}, TypeError, "h must be callable"),
    ({"prox": L1(1.0), "bounds": [(0, 1)]}, ValueError, "either prox or bounds"),
    ({"bounds": [(1, 0)]}, ValueError, "bounds must be"),
    ({"bounds": [(0, 1), (0, 1)]}, ValueError, "bounds must be"),
    ({"constraints": [{"type": "eq"}]}, ValueError, "constraints must be None"),
    ({"callback": 3}, TypeError, "callback must be"),
    ({"rng": -1}, ValueError, "rng must be"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    given_ = {"fun": one_dimension, "x0": [1.0]} | change
    with pytest.raises(error, match=message):
        minimize_adaprox(given_.pop("fun"), given_.pop("x0"), **given_)


def test_a_cached_gradient_is_no_noisy_one():
    with pytest.raises(ValueError, match="function of its own"):
        scipy.optimize.minimize(
            one_dimension, [1.0], jac=True, method=minimize_adaprox, options={"stochastic": True}
        )
