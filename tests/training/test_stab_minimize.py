"""minimize_stab_sgd: the theory with the exact ratio, SciPy's conventions, bad input."""

import warnings

import numpy as np
import pytest
from scipy.optimize import OptimizeWarning, minimize

from thalweg.tasks import NoisyQuadratic, qsc, qwc
from thalweg.training import minimize_stab_sgd

SPHERE = NoisyQuadratic(np.ones(3), np.ones(3))


def run(problem, variance, maxiter, seed, **options):
    return minimize_stab_sgd(
        lambda x: float(problem.loss(x)),
        problem.x0,
        jac=lambda x, rng: problem.gradient(x, variance, rng),
        lr=1 / problem.smoothness,
        maxiter=maxiter,
        rng=seed,
        **options,
    )


def oracle_run(problem, variance, maxiter, seed, **options):
    def oracle(x):
        return float(problem.stability(x, variance))

    return run(problem, variance, maxiter, seed, oracle=oracle, **options)


# The theory


def test_one_step_of_the_oracle_is_the_displayed_update():
    problem, variance = qwc(), 1e-2
    result = oracle_run(problem, variance, 1, 7)
    gradient = problem.gradient(problem.x0, variance, np.random.default_rng(7))
    signal = np.sum((problem.eigenvalues * problem.x0) ** 2)
    expected = problem.x0 - signal / (signal + 25 * variance) * gradient
    np.testing.assert_allclose(result.x, expected, rtol=1e-12)


@pytest.mark.slow
def test_the_mean_loss_never_increases():
    problem, variance = qsc(), 1e-2
    losses = np.empty((1000, 201))
    losses[:, 0] = problem.loss(problem.x0)
    for seed, row in enumerate(losses):
        path = []
        oracle_run(problem, variance, 200, seed, callback=path.append)
        row[1:] = problem.loss(np.array(path))
    steps = np.diff(losses, axis=1)
    error = steps.std(0) / np.sqrt(len(losses))
    assert (steps.mean(0) <= 3 * error).all()
    assert losses[:, -1].mean() < 0.2 * losses[0, 0]


def test_the_rate_is_one_over_t_on_a_strongly_convex_problem():
    problem, variance = NoisyQuadratic(np.ones(100), np.full(100, 0.2)), 1e-2
    horizons = [1000, 3000, 10_000]
    scaled = np.empty((8, 3))
    for seed, row in enumerate(scaled):
        trace = oracle_run(problem, variance, 10_000, seed).trace
        row[:] = [2 * t * trace["fun"][trace["query"] == t].item() for t in horizons]
    np.testing.assert_allclose(scaled.mean(0) / (100 * variance), 1, atol=0.15)


@pytest.mark.slow
def test_the_rate_is_at_least_t_to_the_minus_one_third_on_a_convex_problem():
    slopes = []
    for seed in range(2):
        trace = oracle_run(qwc(), 1.0, 100_000, seed).trace
        late = trace["query"] >= 10_000
        fit = np.polyfit(np.log(trace["query"][late]), np.log(trace["fun"][late]), 1)
        slopes.append(fit[0])
    assert -0.45 <= np.mean(slopes) <= -0.30


@pytest.mark.parametrize("estimator", ["inline", "split"])
def test_estimated_ratios_descend_far_below_where_the_constant_step_rests(estimator):
    variance = 1e-2
    losses = [run(SPHERE, variance, 4000, seed, estimator=estimator).fun for seed in range(8)]
    rest = 3 * variance / 2  # ½ d s², of SGD with the same lr
    assert np.median(losses) < rest / 20


# SciPy's conventions


def test_scipy_minimize_takes_it_as_a_method():
    options = {"maxiter": 500, "rng": 3, "lr": 0.5}

    def noisy(x, scale, rng):
        return scale * x + 0.01 * rng.standard_normal(2)

    result = minimize(
        lambda x, scale: 0.5 * scale * x @ x,
        [1.0, -1.0],
        args=(2.0,),
        jac=noisy,
        method=minimize_stab_sgd,
        options=options,
    )
    direct = minimize_stab_sgd(
        lambda x, scale: 0.5 * scale * x @ x, [1.0, -1.0], (2.0,), jac=noisy, **options
    )
    np.testing.assert_array_equal(result.x, direct.x)
    assert (result.success, result.status) == (True, 0)
    assert result.message == "The budget of 500 gradient queries is spent."
    assert result.fun == pytest.approx(result.x @ result.x)
    assert result.fun < 1e-3


def test_counts_and_trace():
    result = run(SPHERE, 1e-2, 1000, 0, zeta=20)
    assert result.njev == 1000
    measured = 1000 - result.nit
    assert measured >= 20
    assert result.nfev == len(result.trace["fun"]) + 1 == 102
    np.testing.assert_array_equal(result.trace["query"], np.arange(0, 1001, 10))
    assert result.trace["fun"][0] == pytest.approx(1.5)
    assert result.trace["fun"][-1] == result.fun
    assert result.trace["stab"][-1] == result.stab == result.stab_history[-1].stab


def test_split_counts_every_query():
    result = run(SPHERE, 1e-2, 1001, 0, estimator="split", micro_batches=4)
    assert result.njev == 1000
    assert result.nit == 250 - 5


def test_the_same_seed_gives_the_same_result():
    first, second, other = (run(SPHERE, 1e-2, 300, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.x, second.x)
    assert (first.x != other.x).all()


def test_x0_is_left_alone():
    x0 = np.ones(2)
    minimize_stab_sgd(lambda x: x @ x, x0, jac=lambda x: 2 * x, lr=0.5, maxiter=60)
    np.testing.assert_array_equal(x0, 1)


@pytest.mark.parametrize("noise", [0.0, 10.0])
def test_lr_is_estimated_with_common_random_numbers(noise):
    curvatures = np.array([4.0, 1.0, 0.5])
    result = minimize_stab_sgd(
        lambda x: 0.5 * curvatures @ x**2,
        np.ones(3),
        jac=lambda x, rng: curvatures * x + noise * rng.standard_normal(3),
        maxiter=51,
        zeta=50,
        rng=0,
        stab_min=1.0,  # one plain step, from which lr can be read off
        callback=lambda x: None,
    )
    assert result.nit == 1
    stream = np.random.default_rng(0)
    stream.integers(2**63)
    stream.standard_normal(3)
    last = [curvatures * np.ones(3) + noise * stream.standard_normal(3) for _ in range(51)][-1]
    # Power iteration approaches the largest curvature from below, to about 1e-4.
    np.testing.assert_allclose((1 - result.x) / last, 1 / 4, rtol=1e-3)


def test_a_deterministic_jac_needs_no_rng_for_lr():
    result = minimize_stab_sgd(
        lambda x: 2 * x @ x, np.ones(3), jac=lambda x: 4 * x, maxiter=51, rng=0
    )
    np.testing.assert_allclose(result.x, 0, atol=1e-3)


def test_callback_by_position_and_by_keyword():
    points, states = [], []

    def keyword(intermediate_result):
        states.append(intermediate_result)

    options = {"jac": lambda x: x, "lr": 0.5, "zeta": 4, "maxiter": 6}
    result = minimize_stab_sgd(lambda x: x @ x / 2, [1.0], callback=points.append, **options)
    minimize_stab_sgd(lambda x: x @ x / 2, [1.0], callback=keyword, **options)
    assert result.nit == 2
    assert np.ravel(points).tolist() == [0.5, 0.25]
    assert [(s.x.item(), s.nit, s.njev) for s in states] == [(0.5, 1, 5), (0.25, 2, 6)]


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [(StopIteration, 99, "StopIteration"), (KeyboardInterrupt, 2, "Interrupted")],
)
def test_stopping_returns_the_last_iterate(raised, status, message):
    def callback(intermediate_result):
        if intermediate_result.nit == 3:
            raise raised

    result = minimize_stab_sgd(
        lambda x: x @ x / 2, [8.0], jac=lambda x: x, lr=0.5, callback=callback, maxiter=1000
    )
    assert (result.x.item(), result.fun, result.nit) == (1.0, 0.5, 3)
    assert (result.success, result.status) == (False, status)
    assert message in result.message


def test_gradients_that_are_not_finite_end_the_run():
    result = minimize_stab_sgd(
        lambda x: x @ x, [1.0], jac=lambda x: np.full(1, np.nan), lr=0.5, maxiter=100
    )
    assert (result.success, result.status, result.njev) == (False, 3, 10)
    assert "10 gradients in a row" in result.message


def test_a_final_loss_that_is_not_finite_is_no_success():
    result = minimize_stab_sgd(lambda x: np.nan, [1.0], jac=lambda x: x, lr=0.5, maxiter=10)
    assert (result.success, result.status) == (False, 4)


# Bad input


def test_unknown_options_warn():
    with pytest.warns(OptimizeWarning, match="unknown options: hess, tolerance"):
        minimize_stab_sgd(
            lambda x: x @ x,
            [1.0],
            jac=lambda x: x,
            lr=1.0,
            maxiter=2,
            tolerance=1,
            hess=1,
            disp=None,
        )


def test_scipys_empty_defaults_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        minimize_stab_sgd(
            lambda x: x @ x,
            [1.0],
            jac=lambda x: x,
            lr=1.0,
            maxiter=2,
            hess=None,
            bounds=None,
            constraints=(),
        )


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"jac": None}, TypeError, "jac must be a callable that returns a gradient"),
        ({"x0": [[1.0]]}, ValueError, r"x0 must have shape \(d,\)"),
        ({"x0": [np.nan]}, ValueError, "x0 must be finite"),
        ({"lr": 0.0}, ValueError, "lr must be"),
        ({"maxiter": 0}, ValueError, "maxiter must be an integer >= 1"),
        ({"maxiter": 2.5}, TypeError, "maxiter must be an integer"),
        ({"estimator": "split", "micro_batches": 1}, ValueError, "micro_batches must be"),
        ({"estimator": "split", "oracle": lambda x: 1.0}, ValueError, "oracle must be None"),
        ({"oracle": lambda x: 1.5}, ValueError, r"oracle\(x\) must be"),
        ({"jac": lambda x: np.ones(2)}, ValueError, r"jac\(x\) must have shape \(1,\)"),
        ({"bounds": [(0, 1)]}, ValueError, "bounds must be None"),
        ({"constraints": {"type": "eq"}}, ValueError, "constraints must be None"),
        ({"callback": 3}, TypeError, "callback must be callable"),
        ({"rng": "seed"}, TypeError, "rng must be"),
        ({"zeta": 1}, ValueError, "zeta must be"),
        ({"lr": None, "jac": lambda x: np.ones(1)}, ValueError, "jac is constant around x0"),
    ],
)
def test_bad_arguments_are_refused(changes, error, message):
    arguments = {"x0": [1.0], "jac": lambda x: x, "lr": 1.0, "maxiter": 5, **changes}
    with pytest.raises(error, match=message):
        minimize_stab_sgd(lambda x: float(x @ x), arguments.pop("x0"), **arguments)


def test_random_jac_without_rng_needs_an_lr():
    stream = np.random.default_rng(0)
    with pytest.raises(ValueError, match="lr must be given"):
        minimize_stab_sgd(
            lambda x: x @ x, [1.0], jac=lambda x: x + stream.standard_normal(1), maxiter=5
        )


def test_scipys_cached_gradient_is_refused():
    with pytest.raises(ValueError, match="jac must be a function of its own, not True"):
        minimize(lambda x: (x @ x, 2 * x), [1.0], jac=True, method=minimize_stab_sgd)
