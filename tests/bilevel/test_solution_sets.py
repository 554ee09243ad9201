"""Followers with many solutions, and how smoothly these move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.optimize import Bounds, minimize
from scipy.sparse.linalg import aslinearoperator

from thalweg.bilevel import (
    ConvexFollower,
    HyperObjective,
    LeastSquaresFollower,
    LinearSystemFollower,
    SetValuedFollower,
    TranslatedBoxFollower,
    set_smoothness_report,
)
from thalweg.bilevel import affine_followers as affine
from thalweg.bilevel.central_differences import central_gradient
from thalweg.bilevel.solution_pairs import best_pair
from thalweg.tasks import MovingInterval, group_interpolation, low_rank_fit


def low_rank(seed=0, p=8, n=12, m=5, rank=6):
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((p, rank)) @ rng.standard_normal((rank, n)) / 4
    return A, rng.standard_normal((p, m))


def distance_to(target):
    """½‖y - target‖², with derivatives, as keyword arguments of a hyper-objective."""
    return {
        "F": lambda x, y: float(np.sum((y - target) ** 2)) / 2,
        "grad_y": lambda x, y: y - target,
        "hess_y": lambda x, y: np.eye(len(y)),
    }


def interval_follower():
    return TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))


def interval_upper(x, y):
    return float((y[0] - 0.5) ** 2) / 2 + 0.05 * float(x[0] ** 2)


# --- affine solutions


@pytest.mark.parametrize("derivatives", [0, 1, 2])
def test_least_squares_followers_select_by_projection(derivatives):
    A, B = low_rank()
    x, target = np.linspace(-1, 1, 5), np.linspace(0, 2, 12)
    upper = distance_to(target)
    for name in ("hess_y", "grad_y")[: 2 - derivatives]:
        del upper[name]
    follower = LeastSquaresFollower(A, B, 0.3)
    phi, y, gap = HyperObjective(follower, **upper).value(x, tol=1e-10)
    pinv = np.linalg.pinv(A)
    expected = target - pinv @ (A @ target - (B @ x + 0.3))
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert phi == pytest.approx(np.sum((expected - target) ** 2) / 2, abs=1e-9)
    assert gap <= 1e-10
    np.testing.assert_allclose(follower.project(x, target), expected, atol=1e-10)
    np.testing.assert_allclose(follower.gradient(x, expected), 0, atol=1e-10)


def test_the_worst_case_of_a_concave_function_is_found():
    A, B = low_rank()
    x = np.ones(5)
    follower = LeastSquaresFollower(A, B)
    phi = HyperObjective(follower, lambda x, y: -float(np.sum(np.cosh(y))))
    least = minimize(
        lambda z: np.sum(np.cosh(follower.solutions.least_norm(B @ x) + z @ basis.T)),
        np.zeros((basis := follower.solutions.basis).shape[1]),
    )
    assert phi(x, "pessimistic") == pytest.approx(-least.fun, rel=1e-6)


def test_matrices_of_every_kind_give_one_answer(monkeypatch):
    A, B = low_rank()
    A = np.where(np.abs(A) > 0.3, A, 0.0)
    target, x = np.linspace(0, 2, 12), np.ones(5)
    expected = HyperObjective(LeastSquaresFollower(A, B), **distance_to(target)).value(x)
    for other in (sparse.csr_array(A), aslinearoperator(A)):
        found = HyperObjective(LeastSquaresFollower(other, B), **distance_to(target)).value(x)
        assert found.phi == pytest.approx(expected.phi, abs=1e-8)
        np.testing.assert_allclose(found.y, expected.y, atol=1e-5)
    monkeypatch.setattr(affine, "MOST_EXPLICIT", 5)  # projections in place of a basis
    found = HyperObjective(LeastSquaresFollower(A, B), **distance_to(target)).value(x)
    assert found.phi == pytest.approx(expected.phi, abs=1e-8)


def test_ten_thousand_unknowns_need_no_basis():
    rng = np.random.default_rng(0)
    A = sparse.random_array((50, 10_000), density=1e-3, rng=rng, format="csr")
    target = rng.standard_normal(10_000)
    upper = distance_to(target)
    phi, y, _ = HyperObjective(LeastSquaresFollower(A, np.eye(50)), **upper).value(np.ones(50))
    np.testing.assert_allclose(A @ y, 1, atol=1e-8)
    dense = A.toarray()
    expected = target - np.linalg.pinv(dense) @ (dense @ target - 1)
    assert phi == pytest.approx(np.sum((expected - target) ** 2) / 2, abs=1e-7)


def test_right_hand_sides_may_be_functions():
    A, B = low_rank()
    curved = LeastSquaresFollower(A, lambda x: B @ np.sin(x))
    straight = LeastSquaresFollower(A, B)
    x, v = np.linspace(-1, 1, 5), np.ones(12)
    np.testing.assert_allclose(curved.project(x, v), straight.project(np.sin(x), v))


def test_unique_solutions_leave_nothing_to_choose():
    follower = LeastSquaresFollower(np.eye(2), np.eye(2))
    phi = HyperObjective(follower, lambda x, y: float(y @ y))
    assert phi([1.0, 2.0]) == phi([1.0, 2.0], "pessimistic") == 5
    assert phi.value([1.0, 2.0]).gap == 0


def test_linear_systems_move_with_their_matrix():
    follower = LinearSystemFollower(lambda x: [[x[0], 1.0]], lambda x: [1.0])
    phi = HyperObjective(follower, **distance_to(np.array([1.0, 1.0])))
    # The distance of (1, 1) to the line x y₁ + y₂ = 1.
    assert phi([2.0]) == pytest.approx(2**2 / 5 / 2)
    assert follower.size(np.ones(1)) == 2
    np.testing.assert_allclose(follower.gradient(np.array([2.0]), np.array([1.0, 1.0])), [4, 2])
    upper = HyperObjective(follower, lambda x, y: -float(y @ y))
    assert upper([2.0], "pessimistic") == pytest.approx(-1 / 5)


def test_newton_steps_shorten_where_they_overshoot():
    """From far out a full Newton step on a pseudo-Huber loss goes further out."""
    follower = LeastSquaresFollower([[1.0, 1.0]], [[1.0]])
    phi = HyperObjective(
        follower,
        lambda x, y: float(np.sum(np.sqrt(1 + y**2))),
        lambda x, y: y / np.sqrt(1 + y**2),
        lambda x, y: np.diag((1 + y**2) ** -1.5),
    )
    found = phi.value([1.0], tol=1e-10, start=np.array([30.0, -29.0]))
    np.testing.assert_allclose(found.y, 0.5, atol=1e-4)


def test_curvature_alone_makes_no_minimum():
    phi = HyperObjective(
        LeastSquaresFollower([[1.0, 1.0]], [[1.0]]),
        lambda x, y: float(np.sqrt(1 + y[0] ** 2) - 2 * y[0]),
        lambda x, y: np.array([y[0] / np.sqrt(1 + y[0] ** 2) - 2, 0.0]),
        lambda x, y: np.diag([(1 + y[0] ** 2) ** -1.5, 0.0]),
    )
    with pytest.raises(ValueError, match=r"bounded below on S\(x\)"):
        phi([1.0])


# --- convex solutions


def test_boxes_have_their_ends():
    phi = HyperObjective(interval_follower(), interval_upper)
    for x in np.linspace(-4, 4, 17):
        s = np.sin(x)
        best = 0.05 * x**2 + max(s - 0.5, 0) ** 2 / 2
        worst = 0.05 * x**2 + max((0.5 - s) ** 2, (1.5 + s) ** 2) / 2
        assert phi([x]) == pytest.approx(best, abs=1e-9)
        assert phi([x], "pessimistic") == pytest.approx(worst, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_boxes_of_several_unknowns_are_searched(seed):
    rng = np.random.default_rng(seed)
    H = rng.standard_normal((3, 3))
    H, b = H @ H.T + 0.1 * np.eye(3), rng.standard_normal(3)
    follower = TranslatedBoxFollower(-np.ones(3), np.ones(3), lambda x: x)
    phi = HyperObjective(follower, lambda x, y: float(y @ H @ y / 2 - b @ y))
    x = rng.standard_normal(3)
    points = x + rng.uniform(-1, 1, (2000, 3))
    values = np.einsum("ki,ij,kj->k", points, H, points) / 2 - points @ b
    best = phi.value(x, tol=1e-8)
    assert best.phi <= values.min() + 1e-8
    assert best.gap <= 1e-5  # a bound, by convexity
    assert phi(x, "pessimistic") >= values.max() - 1e-8
    negative = HyperObjective(follower, lambda x, y: -float(y @ H @ y / 2 - b @ y))
    assert negative(x, "pessimistic") == pytest.approx(-best.phi, abs=1e-6)


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
def test_convex_followers_bracket_the_value(tol):
    A, B = low_rank()
    exact = LeastSquaresFollower(A, B)
    follower = ConvexFollower(
        lambda x, y: float(np.sum((A @ y - B @ x) ** 2)) / 2,
        lambda x, y: A.T @ (A @ y - B @ x),
        np.zeros(12),
    )
    x, target = np.linspace(-1, 1, 5), np.linspace(0, 2, 12)
    upper = {
        "F": lambda x, y: float(np.sum(np.sqrt(1 + (y - target) ** 2))),
        "grad_y": lambda x, y: (y - target) / np.sqrt(1 + (y - target) ** 2),
    }
    found = HyperObjective(follower, **upper).value(x, tol=tol)
    true = HyperObjective(exact, **upper)(x, tol=1e-12)
    assert abs(found.phi - true) <= found.gap + 1e-8
    assert found.gap <= 10 * tol
    flipped = {
        "F": lambda x, y: -upper["F"](x, y),
        "grad_y": lambda x, y: -upper["grad_y"](x, y),
    }
    worst = HyperObjective(follower, **flipped).value(x, "pessimistic", tol)
    assert worst.phi == pytest.approx(-found.phi, abs=1e-8)
    np.testing.assert_allclose(follower.project(x, target), exact.project(x, target), atol=1e-6)


def test_convex_followers_know_sets_with_a_boundary():
    """f = ½ max(‖y‖ - 1, 0)², whose minimizers are the unit ball."""

    def f(x, y):
        return max(float(np.linalg.norm(y - x)) - 1, 0.0) ** 2 / 2

    def grad(x, y):
        norm = float(np.linalg.norm(y - x))
        return (y - x) * max(norm - 1, 0.0) / max(norm, 1e-12)

    follower = ConvexFollower(f, grad, np.array([2.0, 0.5]), tau=1.0)
    x = np.array([0.5, 0.0])
    linear = HyperObjective(
        follower, lambda x, y: float(3 * y[0] + 4 * y[1]), lambda x, y: np.array([3.0, 4.0])
    )
    found = linear.value(x, tol=1e-4)
    assert found.phi == pytest.approx(1.5 - 5, abs=2e-3)
    np.testing.assert_allclose(found.y, x - [0.6, 0.8], atol=2e-2)
    assert linear(x, "pessimistic", 1e-4) == pytest.approx(1.5 + 5, abs=2e-3)


def test_bounds_constrain_the_follower():
    follower = ConvexFollower(
        lambda x, y: float(np.sum((y - [x[0], 2.0]) ** 2)) / 2,
        lambda x, y: y - [x[0], 2.0],
        [0.5, 0.5],
        hess=lambda x, y: np.eye(2),
        bounds=[(0, 1)] * 2,
    )
    assert follower.constrained
    phi = HyperObjective(follower, lambda x, y: -float(y.sum()), lambda x, y: -np.ones(2))
    for x, value in ((-0.5, -1.0), (0.3, -1.3), (2.0, -2.0)):
        assert phi([x], "pessimistic") == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("kind", ["newton", "quasi-newton", "convex"])
def test_directions_of_recession_are_named(kind):
    A, B = np.array([[1.0, 1.0]]), np.array([[1.0]])
    follower = LeastSquaresFollower(A, B)
    upper = {"F": lambda x, y: float(np.sum(np.sqrt(1 + y**2)))}
    if kind == "newton":
        upper["grad_y"] = lambda x, y: y / np.sqrt(1 + y**2)
        upper["hess_y"] = lambda x, y: np.diag((1 + y**2) ** -1.5)
    if kind == "convex":
        follower = ConvexFollower(
            lambda x, y: float((y.sum() - x[0]) ** 2) / 2,
            lambda x, y: np.full(2, y.sum() - x[0]),
            [1.0, 0.0],
        )
    with pytest.raises(ValueError, match="in the direction y = ") as error:
        HyperObjective(follower, **upper).value([1.0], "pessimistic", 1e-6)
    direction = np.fromstring(str(error.value).rsplit("[", 1)[1].rstrip("]"), sep=",")
    assert abs(direction.sum()) < 1e-3 * np.linalg.norm(direction)  # the null space of A
    with pytest.raises(ValueError, match=r"bounded below on S\(x\) in optimistic mode"):
        HyperObjective(follower, lambda x, y: float(y[0])).value([1.0])


def test_a_maximum_of_a_convex_function_is_no_worst_case():
    """The start is stationary: only a look around shows that the square has no maximum."""
    phi = HyperObjective(
        LeastSquaresFollower([[1.0, 1.0]], [[0.0]]),
        lambda x, y: float(y @ y),
        lambda x, y: 2 * y,
    )
    with pytest.raises(ValueError, match="bounded above"):
        phi([1.0], "pessimistic")


# --- set smoothness


def test_translated_sets_have_the_constant_of_the_translation():
    report = set_smoothness_report(
        interval_follower(), interval_upper, [(-4.0, 4.0)], n_pairs=100, rng=0
    )
    assert 0.9 <= report.L_S <= 1 + 1e-6
    assert report.L_distance <= 1 + 1e-6
    assert report.M_S <= 1 + 1e-6
    assert report.tau == pytest.approx(1)
    assert report.violations == 0
    assert report.L_pair > 10 * report.L_S  # the naive pair is of first order
    assert -report.rho_bound <= report.curvature_pessimistic <= -1
    assert report.curvature_optimistic <= report.rho_bound


def test_affine_sets_that_move_linearly_have_no_error():
    A, B = low_rank()
    follower = LeastSquaresFollower(A, B)
    report = set_smoothness_report(
        follower, distance_to(np.ones(12))["F"], [(-2, 2)] * 5, n_pairs=50, rng=0
    )
    assert report.L_S == report.L_pair == 0
    # ‖y₁ - y₂‖ = ‖A⁺B(x₁ - x₂)‖.
    lipschitz = np.linalg.norm(np.linalg.pinv(A) @ B, 2)
    assert lipschitz + 1e-9 > report.M_S > 0.1 * lipschitz
    s = np.linalg.svd(A, compute_uv=False)[5]
    assert report.tau <= s**-2 + 1e-9
    assert abs(report.L_F - 1) < 0.5
    assert np.isnan(report.curvature_pessimistic)  # a distance has no maximum
    assert report.violations == 0


def test_the_constant_of_the_error_bound_holds():
    """L_S = max{2H_f τ(1 + 9L_f²τ²), 4L_f²τ²}, for f = ½‖Ay - B sin x‖², on 500 pairs."""
    A, B = low_rank()
    follower = LeastSquaresFollower(A, lambda x: B @ np.sin(x))
    report = set_smoothness_report(
        follower, distance_to(np.ones(12))["F"], [(-2, 2)] * 5, n_pairs=500, thetas=(0.5,), rng=0
    )
    tau = np.linalg.svd(A, compute_uv=False)[5] ** -2
    H_f = np.linalg.norm(A.T @ B, 2)
    L_f = np.linalg.norm(np.block([[A.T @ A], [B.T @ A]]), 2)  # a part of the Hessian, at x = 0
    bound = max(2 * H_f * tau * (1 + 9 * L_f**2 * tau**2), 4 * L_f**2 * tau**2)
    assert 0 < report.L_S <= bound
    assert report.L_distance <= bound


def test_alternating_projections_are_of_second_order_at_a_boundary():
    follower, x, naive, best = interval_follower(), 0.9, [], []
    distances = np.geomspace(1e-3, 0.3, 8)
    for d in distances:
        x1, x2 = np.array([x - d / 2]), np.array([x + d / 2])
        y = -1 - np.sin(np.array([x]))  # the end from which the mean of two sets retreats
        y1, y2 = best_pair(follower, x1, x2, 0.5, y)
        best.append(np.abs((y1 + y2) / 2 - y)[0])
        naive.append(np.abs((follower.project(x1, y) + follower.project(x2, y)) / 2 - y)[0])
        assert best[-1] <= d**2 / 8
        assert np.sum((y1 - y2) ** 2) <= d**2
    slopes = [np.polyfit(np.log(distances), np.log(errors), 1)[0] for errors in (naive, best)]
    assert slopes == pytest.approx([1, 2], abs=0.05)


def test_hyper_objectives_are_weakly_convex_and_concave():
    phi = HyperObjective(interval_follower(), interval_upper)
    # M_F ≤ √(2.5² + 0.4²), L_F = 1, L_S = 1.
    rho, h = np.hypot(2.5, 0.4) + 2, 0.01
    grid = np.arange(-4, 4, h)
    worst = np.array([phi([x], "pessimistic", 1e-12) for x in grid]) + rho / 2 * grid**2
    best = np.array([phi([x], "optimistic", 1e-12) for x in grid]) - rho / 2 * grid**2
    assert np.diff(worst, 2).min() >= -1e-8
    assert np.diff(best, 2).max() <= 1e-8


def test_constraints_break_set_smoothness_and_the_report_says_where():
    follower = TranslatedBoxFollower([0.0, 0.0], [0.0, 0.0], lambda x: np.clip([x[0], 2], 0, 1))
    report = set_smoothness_report(
        follower, lambda x, y: -float(y.sum()), [(-1.0, 0.9)], n_pairs=40, rng=0
    )
    assert report.violations >= 1
    assert report.worst_x[0] == pytest.approx(0, abs=0.02)
    assert report.growth < -0.8
    at = int(np.argmax(report.zoom_ratios[:, -1]))
    # The error at a centered kink is d/4 of d²/8: a ratio of 2/d.
    assert 1 < report.zoom_ratios[at, -1] * report.zoom_distances[at, -1] <= 2 + 1e-9
    # The second difference over h of a kink of slope 1 is -1/h.
    assert report.curvature_pessimistic < -100
    assert "not set-smooth" in str(report)


def test_the_report_prints_plots_and_repeats():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    reports = [
        set_smoothness_report(
            interval_follower(), interval_upper, Bounds([-2.0], [2.0]), n_pairs=10, rng=4
        )
        for _ in range(2)
    ]
    np.testing.assert_array_equal(reports[0].ratios, reports[1].ratios)
    assert "no violation of set smoothness in 10 pairs" in str(reports[0])
    ax = reports[0].plot()
    assert len(ax.lines[0].get_xdata()) == 10
    assert len(ax.lines) == 9
    assert reports[0].plot(ax) is ax


# --- shared problems


def test_closed_forms_of_the_interval_are_the_followers():
    task = MovingInterval()
    phi = HyperObjective(interval_follower(), task.upper)
    for x in np.linspace(-4, 4, 9):
        for mode in ("optimistic", "pessimistic"):
            assert phi([x], mode, 1e-10) == pytest.approx(task.value(np.array([x]), mode), abs=1e-9)


def test_derivatives_of_the_low_rank_fit_are_those_of_its_values():
    task, rng = low_rank_fit(np.random.default_rng(0)), np.random.default_rng(1)
    assert np.linalg.matrix_rank(task.A) == 6
    x, y = rng.standard_normal(5), rng.standard_normal(12)
    np.testing.assert_allclose(
        task.grad_x(x, y), central_gradient(lambda v: task.upper(v, y), x), atol=1e-8
    )
    np.testing.assert_allclose(
        task.grad_y(x, y), central_gradient(lambda v: task.upper(x, v), y), atol=1e-8
    )
    np.testing.assert_allclose(
        task.hess_y(x, y), central_gradient(lambda v: task.grad_y(x, v), y), atol=1e-8
    )


def test_interpolating_followers_have_a_best_and_a_worst_case():
    task, rng = group_interpolation(np.random.default_rng(0)), np.random.default_rng(1)
    x, y = rng.standard_normal(5), rng.standard_normal(136)
    follower = LeastSquaresFollower(task.features, task.targets)
    for mode, sign in (("optimistic", 1), ("pessimistic", -1)):
        F, grad, hess = task.upper(mode)
        np.testing.assert_allclose(
            grad(x, y), central_gradient(lambda v, F=F: F(x, v), y), atol=1e-7
        )
        np.testing.assert_allclose(
            hess(x, y), central_gradient(lambda v, grad=grad: grad(x, v), y), atol=1e-7
        )
        curvatures = sign * np.linalg.eigvalsh(task.free.T @ hess(x, y) @ task.free)
        assert curvatures.min() > 0
        found = HyperObjective(follower, F, grad, hess).value(x, mode)
        np.testing.assert_allclose(task.features @ found.y, task.targets(x), atol=1e-8)
        other = found.y + task.free @ rng.standard_normal(task.free.shape[1])
        assert sign * F(x, other) > sign * found.phi


# --- bad input


def test_users_classes_are_followers():
    assert isinstance(interval_follower(), SetValuedFollower)
    assert not isinstance(np.ones(2), SetValuedFollower)


def box(**changes):
    given = {"lower": [0.0], "upper": [1.0], "shift": lambda x: x, **changes}
    return TranslatedBoxFollower(given["lower"], given["upper"], given["shift"])


def convex(**changes):
    given = {"f": lambda x, y: 0.0, "grad": lambda x, y: np.zeros(1), "y0": [0.0], **changes}
    return ConvexFollower(given.pop("f"), given.pop("grad"), given.pop("y0"), **given)


def value(x=(1.0,), mode="optimistic", tol=1e-6, **changes):
    given = {"follower": box(), "F": lambda x, y: float(y @ y), **changes}
    return HyperObjective(**given).value(x, mode, tol)


def smoothness(**changes):
    given = {"follower": box(), "F": lambda x, y: 0.0, "domain": [(0, 1)], **changes}
    return set_smoothness_report(
        given.pop("follower"), given.pop("F"), given.pop("domain"), **given
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LeastSquaresFollower([1.0], [[1.0]]), ValueError, "A must have shape"),
        (lambda: LeastSquaresFollower([[np.nan]], [[1.0]]), ValueError, "A must be finite"),
        (lambda: LeastSquaresFollower([[1.0]], [[1.0], [1.0]]), ValueError, "B must have shape"),
        (lambda: LeastSquaresFollower([[1.0]], [[1.0]], [1, 2]), ValueError, "c must have shape"),
        (
            lambda: value((1.0, 2.0), follower=LeastSquaresFollower([[1.0]], [[1.0]])),
            ValueError,
            "x must have shape",
        ),
        (
            lambda: value(follower=LeastSquaresFollower([[1.0]], lambda x: [1, 2])),
            ValueError,
            r"B\(x\) must have shape",
        ),
        (lambda: LinearSystemFollower([[1.0]], [1.0]), TypeError, "matrix must be callable"),
        (
            lambda: value(follower=LinearSystemFollower(lambda x: [[1.0]], lambda x: [1, 2])),
            ValueError,
            r"rhs\(x\) must have shape",
        ),
        (lambda: box(lower=[2.0]), ValueError, "lower must be <= upper"),
        (lambda: box(upper=[1.0, 2.0]), ValueError, "upper must have shape"),
        (lambda: box(shift=1.0), TypeError, "shift must be callable"),
        (lambda: value(follower=box(shift=lambda x: [1, 2])), ValueError, r"shift\(x\) must have"),
        (lambda: convex(f=1.0), TypeError, "f must be callable"),
        (lambda: convex(hess=1.0), TypeError, "hess must be callable"),
        (lambda: convex(tau=0.0), ValueError, "tau must be"),
        (lambda: convex(bounds=[(1.0, 0.0)]), ValueError, "bounds must be pairs"),
        (
            lambda: value(follower=convex(grad=lambda x, y: np.array([np.nan]))),
            ValueError,
            r"grad\(x, y\) must be finite",
        ),
        (lambda: value(follower=3), TypeError, "follower must have the methods"),
        (lambda: value(F=3), TypeError, "F must be callable"),
        (lambda: value(grad_y=3), TypeError, "grad_y must be callable"),
        (lambda: value(mode="best"), ValueError, "mode must be one of"),
        (lambda: value(tol=0.0), ValueError, "tol must be"),
        (lambda: value(x=(np.nan,)), ValueError, "x must be finite"),
        (lambda: smoothness(follower=3), TypeError, "follower must have the methods"),
        (lambda: smoothness(domain=[(1, 0)]), ValueError, "domain must be pairs"),
        (lambda: smoothness(domain=[1, 0]), ValueError, "domain must have shape"),
        (lambda: smoothness(n_pairs=1), ValueError, "n_pairs must be"),
        (lambda: smoothness(thetas=(0.0,)), ValueError, "thetas must be"),
        (lambda: smoothness(spread=0.0), ValueError, "spread must be"),
    ],
)
def test_bad_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
