"""IZOM: estimates, convergence, the measures of stationarity, interface, bad input."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import Bounds, OptimizeWarning, minimize, minimize_scalar

from thalweg.bilevel import (
    ConvexFollower,
    HyperObjective,
    LeastSquaresFollower,
    LinearSystemFollower,
    TranslatedBoxFollower,
    clarke_report,
    izom,
)
from thalweg.bilevel import inexact_zeroth_order as module
from thalweg.bilevel.inexact_oracle import InexactOracle
from thalweg.bilevel.kinked_functions import least_norm_point

SLOPE = np.array([1.0, -2.0, 0.5, 3.0, 0.0])


def linear(x):
    return float(SLOPE @ x)


def bowl(x):
    return float(np.sum((x - 1) ** 2)) / 2


def both_ends(x):
    """The worst of [-1, 1] - sin x under ½(y - ½)² + 0.05x²: a downward kink where sin x = -½."""
    s = np.sin(x[0])
    return max((0.5 - s) ** 2, (1.5 + s) ** 2) / 2 + 0.05 * x[0] ** 2


def interval_follower():
    return TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))


def oracle(phi):
    return InexactOracle(
        phi, (), "optimistic", True, np.random.default_rng(0), module.Parallel(n_jobs=1)
    )


# --- the estimate


def test_the_mean_estimate_is_the_implicit_gradient_up_to_eps_squared():
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((5, 3)), rng.standard_normal((5, 2))
    phi = HyperObjective(
        LeastSquaresFollower(A, B), lambda x, y: float(np.sum(np.sin(y)) + np.sum(x**3))
    )
    x = np.array([0.3, -0.8])
    best, worst = phi.value(x, "optimistic"), phi.value(x, "pessimistic")
    assert best.phi == worst.phi  # one solution
    implicit = 3 * x**2 + B.T @ np.linalg.pinv(A).T @ np.cos(best.y)
    angles = 2 * np.pi * np.arange(64) / 64
    circle = np.column_stack((np.cos(angles), np.sin(angles)))
    errors = [
        np.linalg.norm(oracle(phi).estimate(x, circle, eps, 1e-8)[0] - implicit)
        for eps in (0.1, 0.05)
    ]
    assert errors[0] < 0.1
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)


def test_linear_functions_are_estimated_without_bias_and_with_bounded_moments():
    asked = oracle(linear)
    x, U = np.ones(5), module._sphere(np.random.default_rng(1), 100_000, 5)
    # The mean over N directions errs by ‖g‖√((m - 1)/N) = 0.6 % of ‖g‖.
    mean, _ = asked.estimate(x, U, 0.1, 1e-8)
    norm = np.linalg.norm(SLOPE)
    assert np.linalg.norm(mean - SLOPE) <= 0.01 * norm
    squares = [np.sum(asked.estimate(x, u[None], 0.1, 1e-8)[0] ** 2) for u in U[:2000]]
    # E‖G‖² = m‖g‖², with a relative standard error of about √(4/(m + 2)·m/2/2000) < 4 %.
    assert np.mean(squares) == pytest.approx(5 * norm**2, rel=0.12)
    assert np.mean(squares) <= 2 * 5 * norm**2


@pytest.mark.parametrize("m", [2, 5])
def test_an_orthonormal_batch_of_all_directions_is_the_whole_gradient(m):
    g = SLOPE[:m]
    U = module._orthonormal(np.random.default_rng(0), m, m)
    np.testing.assert_allclose(U @ U.T, np.eye(m), atol=1e-14)
    G, value = oracle(lambda x: float(g @ x)).estimate(np.ones(m), U, 0.3, 1e-8)
    np.testing.assert_allclose(G, g, atol=1e-13)
    assert value == pytest.approx(g.sum())


def test_directions_are_uniform():
    rng = np.random.default_rng(0)
    first = np.array([module._orthonormal(rng, 2, 3) for _ in range(4000)])
    for k in range(2):
        # Entries have mean 0 and second moments 1/3: standard errors 0.009 and 0.005.
        np.testing.assert_allclose(first[:, k].mean(axis=0), 0, atol=0.04)
        np.testing.assert_allclose(first[:, k].T @ first[:, k] / 4000, np.eye(3) / 3, atol=0.025)


def test_with_all_directions_izom_is_gradient_descent():
    result = izom(bowl, [3.0, -1.0], eta=0.1, eps=0.01, maxiter=20, n_dirs=2, output="last", rng=0)
    np.testing.assert_allclose(result.x, 1 + 0.9**20 * np.array([2.0, -2.0]), rtol=1e-9)
    assert result.stationarity == pytest.approx(np.linalg.norm(result.x - 1), rel=1e-9)


def test_steps_follow_the_formula():
    xs = []
    result = izom(linear, np.ones(5), eta=0.2, eps=0.1, maxiter=6, rng=3, callback=xs.append)
    directions = np.random.default_rng(3).spawn(3)[0]
    x = np.ones(5)
    for t in range(6):
        u = directions.standard_normal(5)
        u /= np.linalg.norm(u)
        x = x - 0.2 * 5 / 0.2 * (linear(x + 0.1 * u) - linear(x - 0.1 * u)) * u
        np.testing.assert_allclose(xs[t], x, rtol=1e-10)
    assert result.nit == 6
    # 20 values for the scale, 12 for the steps, 1 + 10 at the output
    assert result.nfev == result.lower_solves == 20 + 12 + 11


def test_defaults_are_powers_of_t_and_follow_scales():
    runs = {
        (T, c): izom(lambda x, c=c: c * bowl(x), [3.0, 4.0], maxiter=T, rng=0, output="last")
        for T in (100, 400)
        for c in (1.0, 1024.0)
    }
    short, long, scaled = runs[100, 1.0], runs[400, 1.0], runs[100, 1024.0]
    assert short.eps == pytest.approx(0.7 * 5 / 10)
    assert long.eps == pytest.approx(short.eps / 2)
    # bowl is quadratic, so that the slopes at x0 do not depend on ε.
    assert long.eta == pytest.approx(short.eta / 2)
    assert long.w == pytest.approx(short.w * 4**-0.75)
    np.testing.assert_allclose(scaled.x, short.x, rtol=1e-12)
    assert scaled.eta == pytest.approx(short.eta / 1024)
    assert scaled.w == pytest.approx(1024 * short.w)


def test_small_scales_get_an_accuracy_of_their_own():
    tolerances = []

    def phi(x, tol):
        tolerances.append(tol)
        return 1e-6 * bowl(x)

    result = izom(phi, [3.0, 4.0], maxiter=10, rng=0)
    assert result.w < 1e-6
    assert tolerances[-1] == result.w < tolerances[0]


# --- the method


def test_pessimistic_values_are_minimized_at_the_kink():
    phi = HyperObjective(interval_follower(), lambda x, y: (y[0] - 0.5) ** 2 / 2 + 0.05 * x[0] ** 2)
    result = izom(phi, [1.0], mode="pessimistic", maxiter=1000, output="best", rng=0)
    assert result.success
    assert result.fun == pytest.approx(both_ends(result.x), rel=1e-12)
    assert result.x[0] == pytest.approx(-np.pi / 6, abs=0.03)
    assert result.mode == "pessimistic"


def test_optimistic_values_choose_among_solutions():
    """S(x) = {y₁ + y₂ = x}: φ_o(x) = ½(x - 3)²/2, by projection of (1, 2)."""
    target = np.array([1.0, 2.0])
    phi = HyperObjective(
        LeastSquaresFollower([[1.0, 1.0]], [[1.0]]),
        lambda x, y: float(np.sum((y - target) ** 2)) / 2,
    )
    result = izom(phi, [0], maxiter=400, output="best", rng=0)
    assert result.x[0] == pytest.approx(3, abs=0.05)
    assert result.fun == pytest.approx((result.x[0] - 3) ** 2 / 4, abs=1e-4)
    assert result.gap <= result.w


def test_random_output_is_uniform_over_the_iterates():
    counts = np.zeros(4)
    for seed in range(600):
        xs = [np.ones(2)]
        result = izom(
            lambda x: x[0], xs[0], eta=0.1, eps=0.1, maxiter=4, rng=seed, callback=xs.append
        )
        counts[[np.array_equal(result.x, x) for x in xs[:4]].index(True)] += 1
    # Counts of 150 with a standard deviation of 10.6.
    assert np.all(np.abs(counts - 150) < 45)


def test_best_output_has_the_least_mean_of_values():
    xs = [np.array([2.0, 2.0])]
    result = izom(bowl, xs[0], eta=0.5, maxiter=50, rng=0, output="best", callback=xs.append)
    at = int(np.argmin(result.history["fun"]))
    np.testing.assert_array_equal(result.x, xs[at])


def test_the_same_seed_gives_the_same_run_on_any_number_of_threads():
    phi = HyperObjective(
        LeastSquaresFollower([[1.0, 1.0, 0.0]], np.ones((1, 3))),
        lambda x, y: float(np.sum(np.sqrt(1 + (y - x) ** 2))),
    )
    runs = [izom(phi, np.zeros(3), maxiter=20, n_dirs=2, rng=5, n_jobs=n) for n in (1, 1, 2)]
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0].x, other.x)
        np.testing.assert_array_equal(runs[0].history["fun"], other.history["fun"])


def test_common_random_numbers_cancel_noise():
    def phi(x, rng):
        return bowl(x) + 100 * rng.standard_normal()

    exact = izom(bowl, [2.0, 0.0], eta=0.1, eps=0.1, maxiter=30, output="last", rng=0)
    common = izom(phi, [2.0, 0.0], eta=0.1, eps=0.1, maxiter=30, output="last", rng=0)
    np.testing.assert_allclose(common.x, exact.x, atol=1e-9)
    apart = izom(
        phi,
        [2.0, 0.0],
        eta=0.1,
        eps=0.1,
        maxiter=30,
        output="last",
        rng=0,
        common_random_numbers=False,
    )
    assert np.linalg.norm(apart.x - exact.x) > 1


def test_pairs_start_alike_unless_told_otherwise():
    starts = []

    class Watched(LeastSquaresFollower):
        def minimize(self, section, x, tol, start):
            starts.append(start)
            return super().minimize(section, x, tol, start)

    phi = HyperObjective(
        Watched([[1.0, 1.0]], [[1.0]]), lambda x, y: float(y @ y), lambda x, y: 2 * y
    )
    izom(phi, [1.0], maxiter=3, rng=0)
    assert starts[0] is starts[1] is None
    assert all(a is b for a, b in zip(starts[0:46:2], starts[1:46:2], strict=True))
    starts.clear()
    izom(phi, [1.0], maxiter=3, rng=0, common_random_numbers=False)
    assert not any(a is b for a, b in zip(starts[2:26:2], starts[3:26:2], strict=True))


# --- measures of stationarity


def test_goldstein_is_zero_where_no_clarke_subgradient_is():
    report = clarke_report(
        lambda x: -max(abs(x[0]), 2 * x[1]),
        [0.0, 1.0],
        mode="optimistic",
        delta=0.95,
        n_samples=1024,
    )
    assert report.smallest_gradient == pytest.approx(1, abs=1e-8)
    assert report.clarke == pytest.approx(2 / np.sqrt(5), abs=1e-6)
    assert report.goldstein == pytest.approx(0, abs=1e-8)
    assert report.stationarity == report.clarke
    # 0.9 is above 2/√5, the distance of the kinks; 0.85 is below.
    near = clarke_report(
        lambda x: -max(abs(x[0]), 2 * x[1]), [0.0, 1.0], mode="optimistic", delta=0.85
    )
    assert near.clarke == near.goldstein == pytest.approx(2, abs=1e-8)


def test_differences_across_a_kink_do_not_count():
    """At (0, 0) central differences of -max(|x₁|, 2x₂) give (0, -1), no subgradient of a side."""
    report = clarke_report(
        lambda x: -max(abs(x[0]), 2 * x[1]), [0.0, 0.0], mode="optimistic", delta=1e-3
    )
    norms = np.linalg.norm(report.gradients, axis=1)
    assert np.all((np.abs(norms - 1) < 1e-6) | (np.abs(norms - 2) < 1e-6))
    assert report.clarke == pytest.approx(0, abs=1e-6) or report.clarke >= 0.89


@pytest.mark.parametrize("x", [-2.0, -0.5, 0.7, 4.0])
def test_the_prox_is_that_of_a_scalar_solver(x):
    report = clarke_report(both_ends, [x], mode="pessimistic", rho=2.4, gamma=0.2)
    found = minimize_scalar(
        lambda z: both_ends([z]) + (z - x) ** 2 / 0.4,
        bounds=(x - 3, x + 3),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert report.prox[0] == pytest.approx(found.x, abs=1e-4)
    assert abs(report.prox[0] - found.x) <= report.prox_error + 1e-6
    assert report.moreau == pytest.approx(abs(x - found.x) / 0.2, abs=1e-3)
    assert report.stationarity == report.moreau


def test_a_minimum_at_a_kink_is_stationary_for_the_envelope_alone():
    report = clarke_report(both_ends, [-np.pi / 6], mode="pessimistic", rho=2.4, delta=1e-3)
    assert report.moreau <= 1e-3
    assert report.smallest_gradient > 0.7
    assert report.clarke <= 1e-2


def test_the_prox_of_a_maximum_of_planes():
    """Of max(|x₁|, |x₂|): the projection onto the l1 ball of radius γ, by Moreau."""
    x = np.array([1.0, 0.9, -0.2])
    report = clarke_report(
        lambda z: float(np.max(np.abs(z))), x, mode="pessimistic", rho=0.0, gamma=0.5
    )
    # x minus the projection of x on the l1 ball of radius 0.5: (0.3, 0.2, 0).
    np.testing.assert_allclose(report.prox, [0.7, 0.7, -0.2], atol=1e-4)
    assert report.prox_error < 1e-2


def test_least_norm_points_of_hulls():
    assert np.linalg.norm(least_norm_point(np.array([[1.0, 1.0], [1.0, -1.0]]))) == pytest.approx(1)
    square = 1e-9 * np.array([[1.0, 1], [1, -1], [-1, 1], [-1, -1]])
    assert np.linalg.norm(least_norm_point(square)) < 1e-20
    assert least_norm_point(np.zeros((2, 3))).tolist() == [0, 0, 0]
    rows = np.random.default_rng(0).standard_normal((6, 3)) + np.array([2, 0, 0])
    p = least_norm_point(rows)
    assert np.all(rows @ p >= p @ p - 1e-12)  # the variational inequality of a projection


def test_reports_read_hyper_objectives_and_accuracies():
    phi = HyperObjective(interval_follower(), lambda x, y: (y[0] - 0.5) ** 2 / 2)
    report = clarke_report(phi, [2.0], mode="optimistic", delta=0.1)
    # φ_o = ½ max(sin x - ½, 0)², least slope where |(sin x - ½) cos x| is.
    grid = np.linspace(1.9, 2.1, 1001)
    expected = np.min(np.abs((np.sin(grid) - 0.5) * np.cos(grid)))
    assert report.clarke == pytest.approx(expected, rel=0.02)
    seen = []

    def with_tol(x, tol):
        seen.append(tol)
        return float(x @ x)

    clarke_report(with_tol, [1.0], mode="optimistic", delta=0.1, tol=1e-6)
    assert set(seen) == {1e-6}


def test_the_clarke_report_prints_and_plots():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    report = clarke_report(both_ends, [4.0], mode="pessimistic", rho=2.4, delta=0.1)
    text = str(report)
    assert "pessimistic Clarke stationarity" in text
    assert "Moreau" in text
    assert "Goldstein" in text
    ax = report.plot()
    assert len(ax.lines[0].get_xdata()) == 64
    np.testing.assert_allclose(ax.lines[1].get_ydata(), report.moreau)
    assert clarke_report(both_ends, [4.0], mode="pessimistic", rho=2.4).plot(ax) is ax


# --- interface


def test_scipy_calls_it():
    result = minimize(
        bowl,
        np.array([2.0, 0.0]),
        method=izom,
        bounds=[(1.5, 3.0), (None, 0.5)],
        options={"maxiter": 200, "output": "best", "rng": 0},
    )
    np.testing.assert_allclose(result.x, [1.5, 0.5], atol=0.05)
    with pytest.warns(OptimizeWarning, match="unknown options: gtol"):
        izom(bowl, [0.0], maxiter=2, gtol=1e-3)
    with pytest.raises(ValueError, match="constraints must be None"):
        izom(bowl, [0.0], constraints=[{"type": "eq"}])


def test_args_reach_phi():
    result = izom(lambda x, a: a * bowl(x), [1.0, 1.0], (3.0,), maxiter=5, rng=0, output="last")
    assert result.fun == pytest.approx(3 * bowl(result.x))


def test_boxes_hold_every_iterate():
    xs = []
    result = izom(
        bowl, [5.0], bounds=Bounds([-1.0], [0.5]), maxiter=50, rng=0, output="last",
        callback=xs.append,
    )  # fmt: skip
    assert np.all(np.array(xs) <= 0.5)
    assert result.x[0] == pytest.approx(0.5)


def test_callbacks_see_and_stop_the_run():
    seen = []

    def stop(intermediate_result):
        seen.append(intermediate_result)
        if intermediate_result.nit == 3:
            raise StopIteration

    result = izom(bowl, [2.0], maxiter=10, rng=0, callback=stop)
    assert [each.nit for each in seen] == [1, 2, 3]
    assert (result.status, result.success, result.nit) == (99, False, 3)
    assert seen[-1].nfev == 20 + 6


def test_ctrl_c_returns_what_there_is():
    calls = []

    def phi(x):
        calls.append(x)
        if len(calls) > 50:
            raise KeyboardInterrupt
        return bowl(x)

    result = izom(phi, [2.0, 2.0], maxiter=100, rng=0, output="best")
    assert (result.status, result.success) == (2, False)
    assert np.isfinite(result.fun)
    assert np.isnan(result.stationarity)
    assert "Interrupted" in result.message


def test_values_that_are_not_finite_end_the_run():
    result = izom(
        lambda x: -x[0] if x[0] < 4 else np.nan, [2.0], eta=0.5, eps=0.3, maxiter=50, rng=0,
        output="last",
    )  # fmt: skip
    assert result.status == 3
    assert "phi is not finite at x = [4." in result.message
    assert 3 < result.x[0] < 4.5
    assert np.isfinite(result.fun)


def test_progress_is_shown_on_request(capsys):
    izom(bowl, [2.0], maxiter=3, rng=0, show_progress=True)
    assert "IZOM" in capsys.readouterr().err


# --- bad input


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"phi": 3}, TypeError, "phi must be a HyperObjective or callable"),
        ({"x0": [[1.0]]}, ValueError, "x0 must have shape"),
        ({"x0": [np.nan]}, ValueError, "x0 must be finite"),
        ({"mode": "worst"}, ValueError, "mode must be one of"),
        ({"output": "mean"}, ValueError, "output must be one of"),
        ({"eta": 0.0}, ValueError, "eta must be"),
        ({"eps": 0.0}, ValueError, "eps must be"),
        ({"eps": -1.0}, ValueError, "eps must be"),
        ({"w": 0.0}, ValueError, "w must be"),
        ({"maxiter": 0}, ValueError, "maxiter must be"),
        ({"n_dirs": 2}, ValueError, "n_dirs must be"),
        ({"common_random_numbers": 1}, ValueError, "common_random_numbers must be"),
        ({"bounds": [(1.0, 0.0)]}, ValueError, "bounds must be pairs with low <= high"),
        ({"bounds": [(1.0, 2.0), (0.0, 1.0)]}, ValueError, "bounds must have shape"),
        ({"callback": 3}, TypeError, "callback must be callable"),
        ({"rng": "seed"}, TypeError, "rng must be"),
        ({"phi": lambda x: np.nan}, ValueError, "phi must be finite around x0"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        izom(**{"phi": bowl, "x0": [2.0], "maxiter": 2, **changes})


def test_noise_that_drowns_the_differences_is_refused_with_a_better_radius():
    with pytest.raises(ValueError, match="use a larger eps, about") as error:
        izom(bowl, [2.0], eps=0.01, w=0.1, rng=0)
    suggested = float(str(error.value).rsplit(" ", 1)[1])
    assert suggested == pytest.approx(1.0, rel=0.01)  # 10 m w over a slope of 1
    assert izom(bowl, [2.0], eps=suggested, w=0.1, rng=0, maxiter=5).success


def test_a_flat_start_is_no_error():
    result = izom(lambda x: 1.0, [2.0], maxiter=5, rng=0)
    assert result.success
    assert result.x[0] == 2


def test_integers_are_cast():
    assert izom(bowl, [2, 3], maxiter=2, rng=0).x.dtype == np.float64


def test_an_empty_lower_level_is_refused_with_the_point():
    phi = HyperObjective(
        LinearSystemFollower(lambda x: [[1.0, 1.0], [1.0, 1.0]], lambda x: [1.0, x[0]]),
        lambda x, y: float(y @ y),
    )
    assert phi([1.0]) == pytest.approx(0.5)
    assert phi([2.0]) == np.inf
    with pytest.raises(ValueError, match=r"phi must be finite around x0, but is not at x = \["):
        izom(phi, [2.0])


def test_an_unbounded_worst_case_is_refused_with_a_direction():
    phi = HyperObjective(LeastSquaresFollower([[1.0, 1.0]], [[1.0]]), lambda x, y: float(y @ y))
    with pytest.raises(ValueError, match=r"bounded above on S\(x\) in pessimistic mode.*direction"):
        izom(phi, [1.0], mode="pessimistic")


def test_constrained_followers_bring_a_warning():
    follower = ConvexFollower(
        lambda x, y: float((y[0] - x[0]) ** 2) / 2, lambda x, y: y - x, [0.5], bounds=[(0, 1)]
    )
    phi = HyperObjective(follower, lambda x, y: float((y[0] - 0.4) ** 2))
    with pytest.warns(UserWarning, match="the lower level is constrained"):
        izom(phi, [0.8], maxiter=2, rng=0)


def test_followers_that_miss_the_accuracy_bring_a_warning():
    class Rough(LeastSquaresFollower):
        def minimize(self, section, x, tol, start):
            return super().minimize(section, x, tol, start)._replace(gap=1.0)

    phi = HyperObjective(Rough([[1.0, 1.0]], [[1.0]]), lambda x, y: float(y @ y))
    with pytest.warns(UserWarning, match="the follower reported a gap of 1, above w"):
        izom(phi, [1.0], maxiter=2, rng=0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"phi": 3}, TypeError, "phi must be a HyperObjective or callable"),
        ({"mode": "best"}, ValueError, "mode must be one of"),
        ({"delta": None}, ValueError, "delta must be a radius"),
        ({"delta": 0.0}, ValueError, "delta must be"),
        ({"n_samples": 1}, ValueError, "n_samples must be"),
        ({"tol": 0.0}, ValueError, "tol must be"),
        ({"x": [[1.0]]}, ValueError, "x must have shape"),
        ({"mode": "pessimistic"}, ValueError, "rho must be a modulus"),
        ({"mode": "pessimistic", "rho": -1.0}, ValueError, "rho must be"),
        ({"mode": "pessimistic", "rho": 2.0, "gamma": 0.5}, ValueError, "gamma must be"),
        ({"phi": lambda x: np.inf}, ValueError, "phi must be finite, got inf at x"),
    ],
)
def test_bad_arguments_of_the_report_are_named(changes, error, message):
    given = {"phi": bowl, "x": [2.0], "mode": "optimistic", "delta": 0.1, **changes}
    with pytest.raises(error, match=message):
        clarke_report(given.pop("phi"), given.pop("x"), **given)
