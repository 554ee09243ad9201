"""minimize_nlprecond: descent, backtracking, saddle points, SciPy's conventions, bad input."""

import math
import warnings

import numpy as np
import pytest
from scipy.optimize import OptimizeWarning, minimize

from thalweg.tasks import octopus, phase_retrieval, symmetric_factorization
from thalweg.training import (
    NLPRECOND_KERNELS,
    minimize_nlprecond,
    perturbation_parameters,
    preconditioned_curvature,
)
from thalweg.training.precond_perturbation import uniform_in_ball

kernels = pytest.mark.parametrize("kernel", NLPRECOND_KERNELS)


def double_well(x):
    """x⁴/4 - x²/2 and its derivative."""
    return float(np.sum(x**4 / 4 - x**2 / 2)), x**3 - x


def ring(x):
    """(‖x‖² - 1)²/4: a saddle point at 0, minima on the sphere."""
    return float((x @ x - 1) ** 2 / 4), (x @ x - 1) * x


# Descent


def test_the_double_well_converges_to_one():
    result = minimize_nlprecond(double_well, [0.1], gamma=0.5, tol=1e-10)
    assert result.success
    assert result.x[0] == pytest.approx(1, abs=1e-8)
    assert result.gamma_used == 0.5


def test_one_step_is_the_displayed_update():
    x0 = np.array([2.0, -1.0, 0.5])
    g = ring(x0)[1]
    result = minimize_nlprecond(ring, x0, gamma=0.3, Lbar=2.0, maxiter=1)
    s = np.linalg.norm(g)
    np.testing.assert_allclose(result.x, x0 - 0.3 * np.arcsinh(s / 2.0) * g / s, rtol=1e-14)
    assert not result.success
    assert (result.status, result.nit, result.njev) == (1, 1, 2)


@kernels
@pytest.mark.parametrize("structure", ["isotropic", "separable"])
def test_a_quadratic_descends_monotonically_below_its_bound(kernel, structure):
    L = 3.0

    def f(x):
        return float(L / 2 * x @ x), L * x

    x0 = np.full(4, 50.0)
    run = minimize_nlprecond(
        f, x0, kernel=kernel, structure=structure, gamma=0.99 / L, maxiter=1000, tol=0.0
    )
    assert (np.diff(run.trace["fun"]) <= 0).all()
    assert run.fun < run.trace["fun"][0]
    assert run.status in (0, 1)


def test_the_quadratic_kernel_is_gradient_descent_bit_for_bit():
    x = np.array([0.3, -0.4])
    result = minimize_nlprecond(ring, x, kernel="quadratic", gamma=0.3, Lbar=7.0, maxiter=5, tol=0)
    for _ in range(5):
        x = x - (0.3 / 7.0) * ring(x)[1]
    np.testing.assert_array_equal(result.x, x)


@kernels
def test_backtracking_finds_a_step_from_afar(kernel):
    result = minimize_nlprecond(ring, np.array([3e3, -4e3]), kernel=kernel)
    assert result.success
    assert result.fun < 1e-12
    assert (np.diff(result.trace["fun"]) <= 1e-15).all()
    # Rejections cost evaluations; fun and gradient come together.
    assert result.nfev == result.njev > result.nit


def test_backtracking_accepts_the_largest_step_of_a_quadratic():
    L, Lbar = 8.0, 2.0

    def f(x):
        return float(L / 2 * x @ x), L * x

    result = minimize_nlprecond(f, [1.0], kernel="quadratic", Lbar=Lbar, maxiter=1)
    # From γ = 1, halvings end at the largest power of two with γ/L̄ <= 1/L.
    assert result.gamma_used == Lbar / L
    assert result.nfev == 1 + 3
    assert result.success
    assert result.x[0] == 0


def test_backtracking_doubles_after_ten_acceptances():
    def f(x):
        return float(1e-4 / 2 * x @ x), 1e-4 * x

    result = minimize_nlprecond(f, [1.0], maxiter=20, tol=0.0)
    assert result.trace["gamma"].tolist() == [1.0] * 11 + [2.0] * 10
    assert result.nfev == 21


def test_a_separate_gradient_is_only_asked_for_at_accepted_points():
    calls = {"fun": 0, "jac": 0}

    def fun(x):
        calls["fun"] += 1
        return ring(x)[0]

    def jac(x):
        calls["jac"] += 1
        return ring(x)[1]

    result = minimize_nlprecond(fun, [30.0, 40.0], jac=jac)
    assert (result.nfev, result.njev) == (calls["fun"], calls["jac"])
    assert result.njev == result.nit + 1 < result.nfev


def test_a_function_that_reuses_its_array_does_no_harm():
    buffer = np.empty(2)

    def f(x):
        buffer[:] = ring(x)[1]
        x[:] = np.nan  # nor one that overwrites its argument
        return ring_value.pop(), buffer

    values = []

    def plain(x):
        values.append(ring(x)[0])
        return ring(x)

    expected = minimize_nlprecond(plain, [3.0, 4.0], maxiter=30)
    ring_value = values[::-1]
    result = minimize_nlprecond(f, [3.0, 4.0], maxiter=30)
    np.testing.assert_array_equal(result.x, expected.x)


def test_finite_differences_are_counted():
    def fun(x, a):
        return ring(x - a)[0]

    result = minimize_nlprecond(fun, [1.5, 1.0], (0.5,), jac="2-point", tol=1e-5)
    assert result.success
    assert result.nfev >= 3 * result.njev + result.nit


def test_a_matrix_is_factorized_from_afar():
    f = symmetric_factorization(np.diag([3.0, 2.0, 1.0, 0.5]), rank=2)
    x0 = 30 * np.random.default_rng(0).standard_normal(f.n)
    result = minimize_nlprecond(f.value_and_gradient, x0)
    assert result.success
    assert result.fun == pytest.approx(f.minimum, abs=1e-12)


# Saddle points


def test_the_unperturbed_method_stays_at_a_saddle_point_and_the_perturbed_leaves_it():
    f = phase_retrieval(20, 200, np.random.default_rng(0))
    start = np.zeros(f.n)
    plain = minimize_nlprecond(f.value_and_gradient, start)
    assert plain.success
    assert (plain.x == 0).all()
    result = minimize_nlprecond(
        f.value_and_gradient, start, perturb=True, rng=0, tol=1e-8, hessp=f.hvp
    )
    assert result.success
    assert result.fun < 1e-12
    assert result.min_eigenvalue > 0
    assert "no descent" in result.message
    (step, before, after) = result.escaped[0]
    assert (step, before) == (0, plain.fun)
    assert after < before
    assert result.n_perturb > len(result.escaped)


def test_an_unsuccessful_perturbation_is_undone():
    result = minimize_nlprecond(ring, [1.0, 0.0], perturb=True, rng=0)
    assert result.x.tolist() == [1, 0]
    assert (result.n_perturb, result.escaped) == (1, [])
    assert 0 < result.nit <= 50


def test_noise_does_not_hinder_slow_convergence():
    def f(x):  # condition number 1e3: 50 steps do not make up for a perturbation
        curvature = np.array([1.0, 1e-3])
        return float(curvature @ x**2 / 2), curvature * x

    options = {"gamma": 1.0, "maxiter": 200_000}
    plain = minimize_nlprecond(f, [1.0, 1.0], **options)
    result = minimize_nlprecond(f, [1.0, 1.0], perturb=True, rng=0, **options)
    assert result.success
    assert result.nit <= 1.1 * plain.nit
    assert result.fun <= 1e-12 / (2 * 1e-3)


@pytest.mark.parametrize("kernel", ["cosh", "log"])
def test_the_octopus_is_left_through_all_its_saddle_points(kernel):
    f = octopus(5, 2.0)
    x0 = np.random.default_rng(3).uniform(-1, 1, 5)

    def stop(intermediate_result):
        if intermediate_result.fun < f.minimum + 1e-6:
            raise StopIteration

    options = {"gamma": 1 / 8, "tol": 0.0, "maxiter": 2000, "callback": stop, "kernel": kernel}
    noise = {"perturb": True, "eps": math.e / 100, "radius": math.e / 100, "interval": 10}
    assert minimize_nlprecond(f.value_and_gradient, x0, **options).status == 1
    result = minimize_nlprecond(f.value_and_gradient, x0, rng=0, **options, **noise)
    assert result.status == 99
    assert len(result.escaped) >= 3


def test_the_scale_of_the_theory_leaves_a_saddle_point_too():
    result = minimize_nlprecond(
        ring, np.zeros(2), gamma=0.2, perturb=True, rho=1.0, eps=0.1, delta_f=0.25, rng=0, tol=1e-6
    )
    table = perturbation_parameters(L=5.0, Lbar=1.0, rho=1.0, eps=0.1, n=2, delta_f=0.25, delta=0.1)
    assert result.success
    assert result.fun < 1e-12
    assert result.escaped[0][0] == 0
    assert result.nit > table["interval"]


def test_the_budget_ends_with_the_lower_of_perturbed_and_unperturbed_point():
    result = minimize_nlprecond(ring, [1.0, 0.0], perturb=True, rng=0, maxiter=5)
    assert (result.status, result.nit) == (1, 5)
    assert result.x.tolist() == [1, 0]


def test_perturbations_are_reproducible_and_use_the_generator():
    def run(rng):
        return minimize_nlprecond(ring, np.zeros(3), perturb=True, rng=rng).x

    np.testing.assert_array_equal(run(5), run(np.random.default_rng(5)))
    assert not np.array_equal(run(5), run(6))


def test_noise_is_uniform_in_the_ball():
    rng = np.random.default_rng(0)
    points = np.array([uniform_in_ball(3, 2.0, rng) for _ in range(20_000)])
    lengths = np.linalg.norm(points, axis=1)
    assert lengths.max() <= 2
    # The share within half of the radius is (1/2)³, within four standard errors.
    error = math.sqrt(0.125 * 0.875 / len(points))
    assert np.mean(lengths <= 1) == pytest.approx(0.125, abs=4 * error)
    np.testing.assert_allclose(points.mean(0), 0, atol=4 * 2 * math.sqrt(0.2 / len(points)))


def test_the_parameters_are_those_of_the_table():
    given = {"L": 2.0, "Lbar": 0.25, "rho": 4.0, "eps": 0.01, "delta_f": 3.0, "delta": 0.1}
    table = perturbation_parameters(n=50, **given)
    chi = math.log2(4 * math.sqrt(50) * 3 / (2 * 0.25 * 0.01**2.5 * 0.1))
    assert table["chi"] == pytest.approx(chi)
    assert table["radius"] * 400 * table["chi"] ** 3 == pytest.approx(0.01, rel=1e-14)
    assert table["gamma"] == 0.5
    assert table["interval"] == pytest.approx(2 * chi / math.sqrt(0.04))
    assert table["threshold"] == pytest.approx(0.5 * table["radius"])
    doubled = perturbation_parameters(n=100, **given)
    assert doubled["chi"] - table["chi"] == pytest.approx(0.5, abs=1e-12)
    easy = perturbation_parameters(n=1, **(given | {"delta_f": 1e-12}))
    assert easy["chi"] == 1


# Curvature


def test_the_preconditioned_curvature_of_the_double_well():
    x = 2.0
    curvature = preconditioned_curvature([x**3 - x], lambda v: (3 * x**2 - 1) * v)
    assert curvature == pytest.approx((3 * x**2 - 1) / math.sqrt(1 + (x**3 - x) ** 2), rel=1e-14)
    assert curvature == pytest.approx(1.808389, abs=1e-6)


def test_lanczos_finds_the_spectrum_of_the_product_that_is_not_symmetric(monkeypatch):
    f = symmetric_factorization(np.diag(np.linspace(1, 3, 20)), rank=2)
    x = np.random.default_rng(0).standard_normal(f.n)
    g = f.gradient(x)
    H = np.column_stack([f.hvp(x, e) for e in np.eye(f.n)])
    s = np.linalg.norm(g)
    unit = np.outer(g, g) / s**2
    M = np.arcsinh(s) / s * (np.eye(f.n) - unit) + unit / math.sqrt(1 + s**2)
    spectrum = np.linalg.eigvals(M @ H).real
    for dense in (300, 10):
        monkeypatch.setattr("thalweg.training.precond_hessian.DENSE", dense)
        for which, exact in (("smallest", spectrum.min()), ("largest", spectrum.max())):
            found = preconditioned_curvature(g, lambda v: f.hvp(x, v), which=which)
            assert found == pytest.approx(exact, rel=1e-6)


def test_the_certificate_takes_a_hessian_and_tells_a_saddle_point():
    def hess(x):
        return (x @ x - 1) * np.eye(2) + 2 * np.outer(x, x)

    found = minimize_nlprecond(ring, [0.0, 0.0], perturb=True, rng=0, hess=hess)
    assert found.min_eigenvalue == pytest.approx(0, abs=1e-6)
    early = minimize_nlprecond(
        ring, [0.0, 0.0], perturb=True, rng=0, maxiter=1, radius=1e-9, hess=hess
    )
    assert early.min_eigenvalue == pytest.approx(-1, abs=1e-6)
    assert "min_eigenvalue" not in minimize_nlprecond(ring, [1.0, 1.0], hess=hess)


def test_a_lanczos_iteration_that_does_not_converge_says_so(monkeypatch):
    from scipy.sparse.linalg import ArpackNoConvergence

    def fail(*args, **kwargs):
        raise ArpackNoConvergence("no", [], [])

    monkeypatch.setattr("thalweg.training.nlprecond_minimize.preconditioned_curvature", fail)
    result = minimize_nlprecond(ring, [1.0, 0.0], perturb=True, rng=0, hessp=lambda x, v: v)
    assert math.isnan(result.min_eigenvalue)
    assert result.success


# SciPy's conventions


@pytest.mark.parametrize("jac", [True, "separate"])
def test_scipy_can_call_it(jac):
    fun = ring if jac is True else (lambda x: ring(x)[0])
    gradient = True if jac is True else (lambda x: ring(x)[1])
    direct = minimize_nlprecond(fun, [3.0, 4.0], jac=gradient, kernel="exp", tol=1e-9)
    result = minimize(
        fun,
        [3.0, 4.0],
        jac=gradient,
        method=minimize_nlprecond,
        tol=1e-9,
        options={"kernel": "exp"},
    )
    np.testing.assert_array_equal(result.x, direct.x)
    assert (result.nfev, result.njev, result.nit) == (direct.nfev, direct.njev, direct.nit)
    assert np.linalg.norm(result.jac) <= 1e-9


def test_callbacks_get_the_iterate_or_the_intermediate_result():
    path, results = [], []
    full = minimize_nlprecond(ring, [3.0, 4.0], callback=path.append, maxiter=4)

    def keep(intermediate_result):
        results.append(intermediate_result)
        if intermediate_result.nit == 3:
            raise StopIteration

    stopped = minimize_nlprecond(ring, [3.0, 4.0], callback=keep)
    assert (stopped.status, stopped.success, stopped.nit) == (99, False, 3)
    np.testing.assert_array_equal(path[2], stopped.x)
    np.testing.assert_array_equal(path[3], full.x)
    assert [r.fun for r in results] == full.trace["fun"][1:4].tolist()


def test_ctrl_c_returns_the_best_so_far():
    calls = []

    def f(x):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return ring(x)

    result = minimize_nlprecond(f, [3.0, 4.0])
    assert (result.status, result.success) == (2, False)
    assert result.fun == ring(result.x)[0]
    assert result.fun < ring(np.array([3.0, 4.0]))[0]


def test_unknown_options_are_named():
    with pytest.warns(OptimizeWarning, match="unknown options: momentum"):
        minimize_nlprecond(ring, [1.0, 1.0], momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        minimize_nlprecond(ring, [1.0, 1.0], bounds=None, constraints=(), hess=None, hessp=None)


# Runs that go wrong


def test_divergence_ends_with_the_last_finite_point():
    def f(x):
        with np.errstate(all="ignore"):
            return ring(x)

    result = minimize_nlprecond(f, [3.0, 4.0], kernel="quadratic", gamma=10.0)
    assert (result.status, result.success) == (3, False)
    assert np.isfinite(result.x).all()
    assert math.isfinite(result.fun)
    assert "gamma too large" in result.message


def test_backtracking_stays_inside_of_the_domain():
    def f(x):  # a barrier at 1: infinite or NaN outside
        with np.errstate(all="ignore"):
            return float(-np.log(1 - x[0]) - 2 * x[0]), 1 / (1 - x) - 2

    result = minimize_nlprecond(f, [-5.0])
    assert result.success
    assert result.x[0] == pytest.approx(0.5, abs=1e-6)


def test_a_gradient_that_is_never_finite_beyond_x0_ends_the_run():
    gradients = iter([np.array([2.0])])

    def f(x):
        return float(x @ x), next(gradients, np.array([math.nan]))

    result = minimize_nlprecond(f, [1.0])
    assert (result.status, result.nit) == (3, 0)


def test_a_wrong_gradient_is_noticed():
    result = minimize_nlprecond(lambda x: (ring(x)[0], -ring(x)[1]), [3.0, 4.0])
    assert result.status == 4
    assert "its gradient wrong" in result.message


def test_the_last_digits_of_a_large_value_do_not_end_the_run():
    def f(x):
        value, gradient = ring(x)
        return value + 1e9, gradient

    assert minimize_nlprecond(f, [3.0, 4.0], tol=1e-7).success


# Bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"kernel": "tanh"},
            ValueError,
            "kernel must be one of 'cosh', 'exp', 'log', 'clip', 'qua",
        ),
        ({"structure": "block"}, ValueError, "structure must be one of"),
        ({"gamma": 0.0}, ValueError, "gamma must be a finite number > 0"),
        ({"Lbar": 0.0}, ValueError, "Lbar must be a finite number > 0"),
        ({"maxiter": 0}, ValueError, "maxiter must be an integer >= 1"),
        ({"tol": -1.0}, ValueError, "tol must be a finite number >= 0"),
        ({"jac": None}, ValueError, "needs a gradient"),
        ({"jac": False}, ValueError, "needs a gradient"),
        ({"jac": "3-point"}, ValueError, "jac must be a callable, True or"),
        ({"bounds": [(0, 1), (0, 1)]}, ValueError, "bounds must be None"),
        ({"constraints": {"type": "eq"}}, ValueError, "constraints must be None"),
        ({"callback": 3}, TypeError, "callback must be callable"),
        ({"perturb": 1}, ValueError, "perturb must be one of False, True"),
        ({"perturb": True, "eps": 0.0}, ValueError, "eps must be a finite number > 0"),
        ({"perturb": True, "radius": 0.0}, ValueError, "radius must be a finite number > 0"),
        ({"perturb": True, "interval": 0}, ValueError, "interval must be an integer >= 1"),
        ({"perturb": True, "rho": 1.0}, ValueError, "gamma and delta_f must be given with rho"),
        ({"rng": "seed", "perturb": True}, TypeError, "rng must be"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        minimize_nlprecond(ring, [1.0, 2.0], **options)


@pytest.mark.parametrize(
    ("x0", "error", "message"),
    [
        ([1j, 0.0], TypeError, "x0 must be real"),
        ([[1.0]], ValueError, "x0 must have shape"),
        ([math.nan, 0.0], ValueError, "x0 must be finite"),
        (["a"], TypeError, "x0 must be an array of float64"),
    ],
)
def test_bad_starts_are_refused(x0, error, message):
    with pytest.raises(error, match=message):
        minimize_nlprecond(ring, x0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_function_that_is_not_finite_at_the_start_is_refused(bad):
    with pytest.raises(ValueError, match="must be finite at x0"):
        minimize_nlprecond(lambda x: (bad, x), [1.0])
    with pytest.raises(ValueError, match="must be finite at x0"):
        minimize_nlprecond(lambda x: (1.0, bad * x), [1.0])


def test_a_gradient_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match="the gradient must have shape"):
        minimize_nlprecond(lambda x: (1.0, x[:1]), [1.0, 2.0])


def test_a_perturbed_hard_clip_warns():
    with pytest.warns(UserWarning, match="not twice differentiable"):
        minimize_nlprecond(ring, [1.0, 0.0], kernel="clip", perturb=True, rng=0)


@pytest.mark.parametrize("name", ["L", "Lbar", "rho", "eps", "delta_f", "c"])
def test_bad_parameters_of_the_theory_are_refused(name):
    given = dict.fromkeys(("L", "Lbar", "rho", "eps", "delta_f", "c"), 1.0) | {name: 0.0}
    with pytest.raises(ValueError, match=f"{name} must be a finite number > 0"):
        perturbation_parameters(n=2, delta=0.1, **given)


def test_bad_probabilities_and_dimensions_are_refused():
    given = dict.fromkeys(("L", "Lbar", "rho", "eps", "delta_f"), 1.0)
    with pytest.raises(ValueError, match="delta must be a finite number > 0 and < 1"):
        perturbation_parameters(n=2, delta=1.0, **given)
    with pytest.raises(ValueError, match="n must be an integer >= 1"):
        perturbation_parameters(n=0, delta=0.1, **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient": [math.nan]}, "gradient must be finite"),
        ({"hvp": lambda v: math.nan * v}, "hvp.* must be finite"),
        ({"which": "middle"}, "which must be one of"),
    ],
)
def test_bad_curvature_arguments_are_refused(arguments, message):
    given = {"gradient": [1.0], "hvp": lambda v: v, "which": "largest"} | arguments
    with pytest.raises(ValueError, match=message):
        preconditioned_curvature(given.pop("gradient"), given.pop("hvp"), **given)
