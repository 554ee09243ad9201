"""Semismooth Newton with lazy Hessians: its steps, its tests and where they lead."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
from kinked_functions import SquaredHinge, Wells, least_squares, solve
from numpy.linalg import norm
from scipy import sparse

from thalweg.curvature import (
    L1Penalty,
    minimize_lazy_ssn,
    shifted_systems,
    trial_steps,
)
from thalweg.curvature.lazy_iteration import LazyNewton
from thalweg.curvature.newton_oracles import NewtonOracle
from thalweg.curvature.norm_metric import NormMetric
from thalweg.curvature.regularization import StepRule
from thalweg.curvature.shifted_systems import CholeskySystem


def leap_ssn(f, x, Lambda, steps):
    """LeAP-SSN as its paper has it: fresh Hessians, λ = Λ, two tests, halving and doubling."""
    path = [x]
    for _ in range(steps):
        g, H = f.jac(x), f.hess(x)
        while True:
            y = x + np.linalg.solve(H + Lambda * np.eye(f.d), -g)
            h = f.jac(y)
            enough = f(x) - f(y) >= Lambda / 4 * norm(y - x) ** 2
            if enough and h @ (x - y) >= norm(h) ** 2 / (2 * Lambda):
                break
            Lambda *= 2
        x, Lambda = y, Lambda / 2
        path.append(x)
    return np.array(path)


# The steps


@pytest.mark.parametrize("f", [SquaredHinge(), Wells()])
def test_without_laziness_and_scaling_the_steps_are_those_of_leap_ssn(f):
    start = np.linspace(-2, 3, f.d)
    result = solve(f, start, hess_every=1, power=0.0, Lambda0=0.5, maxiter=6, gtol=0)
    expected = leap_ssn(f, start, 0.5, len(result.path) - 1)
    assert len(expected) == 7
    np.testing.assert_allclose(result.path, expected, rtol=1e-9, atol=1e-11)


def test_a_quadratic_takes_one_step_without_regularization():
    rng = np.random.default_rng(0)
    f = least_squares(rng.standard_normal((30, 8)), rng.standard_normal(30))
    result = solve(f, Lambda0=1e-10, gtol=1e-7)
    assert (result.nit, result.nhev, result.n_factor) == (1, 1, 1)


@pytest.mark.parametrize("m", [2, 3, 7])
def test_on_a_quadratic_laziness_changes_nothing(m):
    rng = np.random.default_rng(1)
    f = least_squares(rng.standard_normal((30, 8)), rng.standard_normal(30))
    fresh, lazy = solve(f, hess_every=1, Lambda0=100.0), solve(f, hess_every=m, Lambda0=100.0)
    assert fresh.nit > 3
    np.testing.assert_array_equal(fresh.path, lazy.path)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("f", [SquaredHinge(3), Wells()])
@pytest.mark.parametrize("metric", [None, "diagonal"])
def test_every_step_passes_both_tests(f, m, metric):
    B = np.ones(f.d) if metric is None else np.linspace(0.5, 4, f.d)
    result = solve(f, np.linspace(-3, 2, f.d), hess_every=m, metric=B, gtol=1e-4)
    assert result.success
    values = [f(x) for x in result.path]
    assert np.all(np.diff(values) <= 0)
    for before, after, step in zip(result.path[:-1], result.path[1:], result.steps, strict=True):
        g, moved = f.jac(after), after - before
        assert g @ -moved >= 0.5 / step.lam * (g / B) @ g * (1 - 1e-12)
        assert f(before) - f(after) >= 0.25 * step.lam * moved @ (B * moved) - 1e-12


def test_heavy_weights_always_pass():
    """With λ ≥ 4L, any symmetric H with norm at most L will do: the inner loop is finite."""
    rng, rule, d = np.random.default_rng(0), StepRule(), 4
    for _ in range(2000):
        # ½Σ sᵢ max(0, ⟨aᵢ, x⟩ - bᵢ)², s of either sign, has a derivative with constant ‖Σ|s|aaᵀ‖.
        A, b, s = rng.standard_normal((6, d)), rng.standard_normal(6), rng.choice([-1, 1], 6)
        L = norm(A.T @ A, 2)
        f = lambda x: float(s @ np.maximum(0, A @ x - b) ** 2) / 2  # noqa: B023, E731
        jac = lambda x: A.T @ (s * np.maximum(0, A @ x - b))  # noqa: B023, E731
        H = rng.standard_normal((d, d))
        H = (H + H.T) / norm(H + H.T, 2) * L
        x = 3 * rng.standard_normal(d)
        y = x + np.linalg.solve(H + 4 * L * np.eye(d), -jac(x))
        g = jac(y)
        assert rule.decreases(f(x) - f(y) + 1e-12, norm(y - x) ** 2, 4 * L)
        assert rule.turns(float(g @ (x - y)) + 1e-12, norm(g) ** 2, 4 * L)


def test_the_two_tests_bind_where_they_should():
    rule = StepRule(alpha=0.5, beta=0.25)
    assert rule.decreases(0.25 * 2.0 * 3.0, 3.0, 2.0)
    assert not rule.decreases(0.2499 * 2.0 * 3.0, 3.0, 2.0)
    assert not rule.decreases(math.nan, 3.0, 2.0)
    assert rule.turns(0.5 / 2.0 * 3.0, 3.0, 2.0)
    assert not rule.turns(0.499 / 2.0 * 3.0, 3.0, 2.0)
    assert not rule.turns(math.nan, 3.0, 2.0)


def test_a_hill_is_not_jumped_over():
    """cos x + x²/50 from beside a crest: an unregularized step would go up, far away."""
    f = lambda x: float(np.cos(x[0]) + x[0] ** 2 / 50)  # noqa: E731
    visited = []
    minimize_lazy_ssn(
        f,
        [1.7],
        jac=lambda x: -np.sin(x) + x / 25,
        hess=lambda x: np.diag(-np.cos(x) + 1 / 25),
        Lambda0=1e-6,
        callback=visited.append,
    )
    values = [f([1.7]), *map(f, visited)]
    assert np.all(np.diff(values) < 0)


@pytest.mark.parametrize("start", [-10.0, 10.0])
@pytest.mark.parametrize("m", [1, 5])
def test_a_minimizer_exactly_at_a_kink(start, m):
    result = minimize_lazy_ssn(
        lambda x: float(np.maximum(0, x[0] - 1) ** 2 / 2 + x[0] ** 2 / 2 - x[0]),
        [start],
        jac=lambda x: np.maximum(0, x - 1) + x - 1,
        hess=lambda x: np.array([[float(x[0] > 1) + 1]]),
        hess_every=m,
        gtol=1e-11,
    )
    assert result.success
    assert abs(result.x[0] - 1) < 1e-10


@pytest.mark.parametrize("m", [1, 2, 3, 5, 50])
def test_hessians_are_counted(m):
    result = solve(SquaredHinge(), hess_every=m)
    assert result.success
    assert result.nhev == math.ceil(result.nit / m)
    assert result.n_factor == result.nfev - 3  # one for x0, two for the check of the gradient


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("c", [1e-3, 100.0])
def test_the_scale_of_the_objective_does_not_matter(power, c):
    """f → cf with Λ → Λ c^(1-p) leaves the path alone."""
    options = {"power": power, "maxiter": 4, "gtol": 0.0, "hess_every": 3}
    one = solve(SquaredHinge(), Lambda0=0.1, **options)
    other = solve(SquaredHinge(c=c), Lambda0=0.1 * c ** (1 - power), **options)
    np.testing.assert_allclose(one.path, other.path, rtol=1e-7, atol=1e-10)


def test_the_last_steps_are_superlinear():
    result = solve(SquaredHinge(5), hess_every=1, gtol=1e-12)
    assert result.success
    norms = result.trace["grad_norm"]
    assert norms[-1] / norms[-2] < 1e-3


def test_lambda_is_forgotten_at_a_refresh():
    f = SquaredHinge(2, n=60, d=50, mu=1e-6)
    kept = solve(f, hess_every=5)
    reset = solve(f, hess_every=5, reset_lambda=True)
    at_refresh = reset.trace["Lambda"][:-1:5]
    # The first entry is Λ before the first refresh; the later ones are before theirs, too.
    assert kept.success
    assert reset.success
    assert reset.fun == pytest.approx(kept.fun, abs=1e-9)
    for k in range(5, reset.nit, 5):
        used = reset.trace["lam"][k + 1] / reset.trace["grad_norm"][k]
        assert used >= min(at_refresh.min(), 1e-10)
    one = solve(f, hess_every=1, reset_lambda=True)
    np.testing.assert_array_equal(one.path, solve(f, hess_every=1).path)
    assert not np.array_equal(reset.path, kept.path)


def test_growth_of_lambda_is_taken_back():
    f = SquaredHinge(2)
    oracle = NewtonOracle(f, f.jac, f.hess, (), f.d)
    metric = NormMetric(None, f.d)
    newton = LazyNewton(
        oracle,
        None,
        lambda H: CholeskySystem(metric),
        metric,
        StepRule(),
        hess_every=2,
        Lambda=1.0,
        reset=True,
        epsilon=2.2e-16,
    )
    newton.start(np.zeros(f.d))
    newton.advance()
    newton.advance()
    newton.Lambda = 64.0
    newton._refresh()
    assert newton.Lambda == 1.0


# Linear solvers and metrics


@pytest.mark.parametrize("f", [SquaredHinge(), Wells()])
def test_all_linear_solvers_make_the_same_path(f):
    start = np.linspace(-1, 2, f.d)
    expected = solve(f, start, maxiter=8, gtol=0.0).path
    variants = {
        "spectral": {"linear_solver": "spectral"},
        "cg": {"linear_solver": "cg", "cg_tol": 1e-9},
        "sparse": {"hess": lambda x: sparse.csr_array(f.hess(x))},
        "sparse, cg": {
            "hess": lambda x: sparse.csr_array(f.hess(x)),
            "linear_solver": "cg",
            "cg_tol": 1e-9,
        },
        "sparse, spectral": {
            "hess": lambda x: sparse.csr_array(f.hess(x)),
            "linear_solver": "spectral",
        },
        "products": {"hessp": lambda x, p: f.hess(x) @ p, "cg_tol": 1e-9},
    }
    for name, options in variants.items():
        path = solve(f, start, maxiter=8, gtol=0.0, **options).path
        np.testing.assert_allclose(path, expected, rtol=1e-7, atol=1e-7, err_msg=name)


def test_inexact_conjugate_gradients_converge():
    f = SquaredHinge(4, d=40)
    exact = solve(f)
    result = solve(f, hessp=f.hessp)
    assert result.success
    assert result.n_factor == 0
    np.testing.assert_allclose(result.x, exact.x, atol=1e-6)


def test_an_old_factorization_preconditions():
    result = solve(SquaredHinge(4, d=40), linear_solver="cg", hess_every=1)
    assert result.success
    assert result.n_factor < result.nit


def test_a_preconditioner_that_has_grown_old_is_replaced(monkeypatch):
    monkeypatch.setattr(shifted_systems, "STALE_AFTER", 0)
    result = solve(SquaredHinge(4, d=40), linear_solver="cg", hess_every=1)
    assert result.success
    assert result.n_factor >= result.nit


METRICS = {
    "diagonal": lambda B: B.diagonal(),
    "dense": lambda B: B.toarray(),
    "sparse": lambda B: B,
}


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("solver", ["cholesky", "spectral", "cg"])
def test_a_metric_is_a_change_of_variables(kind, solver):
    """With B = RRᵀ, steps in x are those in z = Rᵀx with the Euclidean norm."""
    f = SquaredHinge(6)
    B = sparse.diags_array(np.linspace(1, 5, f.d), format="csc")
    if kind != "diagonal":
        B = B + sparse.diags_array([np.full(f.d - 1, 0.4)] * 2, offsets=[-1, 1], format="csc")
    back = np.linalg.inv(np.linalg.cholesky(B.toarray())).T

    class Changed:
        d = f.d

        def __call__(self, z):
            return f(back @ z)

        def jac(self, z):
            return back.T @ f.jac(back @ z)

        def hess(self, z):
            H = back.T @ f.hess(back @ z) @ back
            return (H + H.T) / 2

    options = {"linear_solver": solver, "cg_tol": 1e-9, "maxiter": 8, "gtol": 0.0}
    expected = solve(Changed(), maxiter=8, gtol=0.0).path @ back.T
    path = solve(f, metric=METRICS[kind](B), **options).path
    np.testing.assert_allclose(path, expected, rtol=1e-7, atol=1e-8)
    as_sparse = solve(
        f, metric=METRICS[kind](B), hess=lambda x: sparse.csc_array(f.hess(x)), **options
    ).path
    np.testing.assert_allclose(as_sparse, expected, rtol=1e-7, atol=1e-8)


# Penalties


def test_a_lasso_is_scikit_learns():
    from sklearn.linear_model import Lasso

    rng = np.random.default_rng(0)
    A = rng.standard_normal((60, 100))
    b = A[:, :5].sum(axis=1) + rng.standard_normal(60)
    expected = Lasso(0.1, fit_intercept=False, tol=1e-14, max_iter=100_000).fit(A, b).coef_
    f = least_squares(A / np.sqrt(60), b / np.sqrt(60))
    result = solve(f, prox="l1:0.1", gtol=1e-10)
    assert result.success
    np.testing.assert_allclose(result.x, expected, atol=1e-8)
    np.testing.assert_array_equal(result.x == 0, expected == 0)
    assert result.fun == pytest.approx(f(result.x) + 0.1 * np.abs(result.x).sum())
    by_object = solve(f, prox=L1Penalty(0.1), gtol=1e-10, linear_solver="cg", cg_tol=1e-6)
    np.testing.assert_allclose(by_object.x, expected, atol=1e-8)
    by_products = solve(f, prox="l1:0.1", gtol=1e-9, hessp=lambda x, p: A.T @ (A @ p) / 60)
    np.testing.assert_allclose(by_products.x, expected, atol=1e-7)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_nonnegative_least_squares_are_scipys(kind):
    rng = np.random.default_rng(1)
    A, b = rng.standard_normal((50, 30)), rng.standard_normal(50)
    f = least_squares(A, b)
    hess = f.hess if kind == "dense" else (lambda x: sparse.csc_array(f.hess(x)))
    result = solve(f, prox="nonneg", hess=hess, gtol=1e-10)
    expected, _ = scipy.optimize.nnls(A, b)
    assert result.success
    np.testing.assert_allclose(result.x, expected, atol=1e-8)
    assert result.x.min() == 0.0


class Ridge:
    """μ‖x‖²/2 as a penalty: smooth, so that all is known of its subgradient."""

    mu = 0.3

    def value(self, x):
        return self.mu * float(x @ x) / 2

    def prox(self, v, a):
        return v / (1 + a * self.mu)

    def jac_mask(self, v, a):
        return np.full(len(v), 1 / (1 + a * self.mu))


@pytest.mark.parametrize("m", [1, 3])
def test_the_subgradient_is_that_of_the_formula(m):
    """F'(x⁺) = f'(x⁺) - f'(x) - (H + λB)(x⁺ - x), which for a smooth penalty is the gradient."""
    f, B = SquaredHinge(7), np.linspace(1, 2, 12)
    result = solve(f, np.ones(f.d), prox=Ridge(), hess_every=m, metric=B, maxiter=6, gtol=0.0)
    for k, step in enumerate(result.steps):
        x, y = result.path[k], result.path[k + 1]
        H = f.hess(result.path[m * (k // m)])
        formula = f.jac(y) - f.jac(x) - (H + step.lam * np.diag(B)) @ (y - x)
        np.testing.assert_allclose(step.jac, f.jac(y) + Ridge.mu * y, atol=1e-12)
        assert norm(step.jac - formula) <= 0.1 * max(1e-9, result.trace["grad_norm"][k])
        numeric = scipy.optimize.approx_fprime(y, lambda z: f(z) + Ridge().value(z), 1e-7)
        np.testing.assert_allclose(step.jac, numeric, atol=1e-5)


def test_fista_takes_over_where_active_sets_do_not_settle():
    class Misleading(L1Penalty):
        """Claims that no coordinate is free: a slow proximal gradient method is left."""

        def jac_mask(self, v, a):
            return np.zeros(len(v))

    rng = np.random.default_rng(2)
    A, b = rng.standard_normal((40, 20)), rng.standard_normal(40)
    f = least_squares(A, b)
    expected = solve(f, prox="l1:2", gtol=1e-9)
    result = solve(f, prox=Misleading(2.0), gtol=1e-6)
    assert result.success
    np.testing.assert_allclose(result.x, expected.x, atol=1e-6)


def test_fista_gives_up_on_a_concave_model(monkeypatch):
    monkeypatch.setattr(trial_steps, "NEWTON_STEPS", 0)
    monkeypatch.setattr(trial_steps, "FISTA_STEPS", 20_000)
    result = solve(Wells(), np.full(6, 0.05), prox="l1:0.01", Lambda0=1e-3)
    assert result.success
    assert result.n_factor == 0


def test_a_start_outside_of_the_domain_is_projected():
    f = least_squares(np.eye(3), np.array([-5.0, 0.5, 9.0]))
    result = solve(f, np.full(3, 100.0), bounds=[(0, 1), (None, None), (0, 2)])
    assert result.success
    np.testing.assert_allclose(result.x, [0, 0.5, 2], atol=1e-9)


def test_a_start_at_the_solution_is_recognized():
    f = least_squares(np.eye(3), np.array([0.5, -0.2, 0.1]))
    result = solve(f, prox="l1:1.0")
    assert result.success
    assert result.nit == 1
    np.testing.assert_array_equal(result.x, 0)
    smooth = solve(f, [0.5, -0.2, 0.1])
    assert (smooth.nit, smooth.nhev, smooth.n_factor, smooth.status) == (0, 0, 0, 0)


def test_bounds_of_a_nonconvex_function_agree_with_l_bfgs_b():
    f, bounds = Wells(), [(0.2, 0.9)] * 3 + [(-3.0, -0.5)] * 3
    start = np.r_[np.full(3, 0.5), np.full(3, -1.0)]
    result = solve(f, start, bounds=bounds)
    expected = scipy.optimize.minimize(f, start, jac=f.jac, bounds=bounds, tol=1e-14)
    assert result.success
    np.testing.assert_allclose(result.x, expected.x, atol=1e-6)


# Robustness


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3, 1e6])
@pytest.mark.parametrize("m", [1, 10])
def test_every_start_converges(scale, m):
    start = scale * np.random.default_rng(0).standard_normal(6)
    result = solve(Wells(), start, hess_every=m, gtol=1e-7)
    assert result.success


def test_an_undefined_trial_point_is_rejected():
    """x - log x, whose Newton step from 3 leaves the domain."""
    f = lambda x: x[0] - np.log(x[0]) if x[0] > 0 else np.nan  # noqa: E731
    result = minimize_lazy_ssn(
        f, [3.0], jac=lambda x: 1 - 1 / x, hess=lambda x: np.diag(1 / x**2), Lambda0=1e-8
    )
    assert result.success
    assert result.x[0] == pytest.approx(1, abs=1e-7)


def test_an_infinite_gradient_is_rejected():
    jac = lambda x: np.where(x > 0, 1 - 1 / np.maximum(x, 1e-300), np.inf)  # noqa: E731
    f = lambda x: x[0] - np.log(x[0]) if x[0] > 0 else 0.0  # noqa: E731
    result = minimize_lazy_ssn(f, [3.0], jac=jac, hess=lambda x: np.diag(1 / x**2), Lambda0=1e-8)
    assert result.success


def test_a_flat_objective_ends_the_run():
    f = SquaredHinge()
    result = solve(f, gtol=0.0, hess_every=1)
    assert result.status == 2
    assert not result.success
    assert "rounding" in result.message
    assert result.grad_norm < 1e-13


def test_a_gradient_of_another_function_ends_the_run():
    f = SquaredHinge()
    result = minimize_lazy_ssn(
        f, np.ones(f.d), jac=lambda w: -f.jac(w), hess=f.hess, check_jac=False
    )
    assert result.status == 3
    assert result.nit == 0
    assert "f' is not Lipschitz" in result.message


def test_a_nonsmooth_function_does_not_fool_it():
    """|x| + |y - 3| has no Lipschitz derivative: the run says that it has not converged."""
    f = lambda x: float(np.abs(x - [0, 3]).sum())  # noqa: E731
    result = minimize_lazy_ssn(
        f, [1.0, 1.0], jac=lambda x: np.sign(x - [0, 3]), hess=lambda x: 0.01 * np.eye(2)
    )
    assert result.status in (2, 3)
    assert not result.success


def test_automatic_laziness_follows_the_clock():
    f, metric = SquaredHinge(), NormMetric(None, 12)
    for ratio, period in ((0.1, 1), (7.0, 7), (1000.0, 20)):
        oracle = NewtonOracle(f, f.jac, f.hess, (), f.d)
        newton = LazyNewton(
            oracle,
            None,
            lambda H: CholeskySystem(metric),
            metric,
            StepRule(),
            hess_every="auto",
            Lambda=1.0,
            reset=False,
            epsilon=2.2e-16,
        )
        newton.start(np.zeros(f.d))
        newton.advance()
        assert newton.period == 1  # one Hessian is too few to tell
        oracle.hessian_seconds, oracle.gradient_seconds = ratio, 0.25
        newton._solve_seconds = 0.5
        newton.advance()
        assert newton.period in (period, 1)
        assert newton._balanced_period() == period or newton._solve_seconds < 0.5


def test_automatic_laziness_takes_a_new_hessian_early():
    f = Wells()
    result = solve(f, np.linspace(-4, 5, 6), hess_every="auto", gtol=1e-7)
    assert result.success
    assert 1 <= result.hess_every <= 20
    assert 2 <= result.nhev <= result.nit + 1
    oracle, metric = NewtonOracle(f, f.jac, f.hess, (), f.d), NormMetric(None, f.d)
    newton = LazyNewton(
        oracle,
        None,
        lambda H: CholeskySystem(metric),
        metric,
        StepRule(),
        hess_every="auto",
        Lambda=1.0,
        reset=False,
        epsilon=2.2e-16,
    )
    newton.start(np.linspace(-4, 5, 6))
    newton.advance()
    newton.period = 20
    newton.Lambda = 1e-10  # many rejections follow
    newton.advance()
    assert oracle.nhev == 2
