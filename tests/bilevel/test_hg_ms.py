"""Select, then differentiate: closed forms, finite differences, kinks, and bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.bilevel import (
    CG,
    GD,
    ArrayLower,
    ArrayUpper,
    Langevin,
    LowerHessian,
    NotMinimizerError,
    PInv,
    Select,
    hg_ms,
    hypergradient,
    pseudoinverse_hypergradient,
    regularity_report,
)

DOUBLE = {"dtype": torch.float64}
EXACT = {"inner": GD(steps=300, tol=1e-13), "select": Select(steps=300, tol=1e-12)}


def vector(*values):
    return torch.tensor(values, **DOUBLE)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **DOUBLE)


def circle_f(x, y):
    return ((y - x) ** 2).sum() / 2


def circle_g(x, y):
    return (y.dot(y) - 1) ** 2 / 4


# A map c of R^5 to R^2, whose level sets are curved manifolds of dimension 3.
W, Q, B, TARGET = randn(2, 5), 0.3 * randn(2, 5, 5, seed=1), randn(2, 3, seed=2), randn(5, seed=3)


def curved(y):
    return W @ y + torch.einsum("kij,i,j->k", Q, y, y)


def curved_f(x, y):
    return ((y - TARGET) ** 2).sum() / 2 + 0.05 * x.dot(x)


def curved_g(x, y):
    return ((curved(y) - B @ x) ** 2).sum() / 2


def selection(f, g, x, y, **settings):
    return hg_ms(f, g, x, y, maxiter=1, outer_lr=1e-12, **(EXACT | settings))


def central_differences(value, x, step=1e-5):
    slopes = []
    for i in range(len(x)):
        e = torch.zeros_like(x)
        e[i] = step
        slopes.append((value(x + e) - value(x - e)) / (2 * step))
    return torch.tensor(slopes, **DOUBLE)


class TestFormula:
    def test_of_the_circle(self):
        for x in (vector(2, 0), vector(0.3, -0.4), vector(-1, 1)):
            result = selection(circle_f, circle_g, x, vector(0.6, 0.8))
            radius = x.norm()
            torch.testing.assert_close(result.grad, (radius - 1) * x / radius, atol=1e-8, rtol=0)
            torch.testing.assert_close(result.y, x / radius, atol=1e-8, rtol=0)
            assert result.fun == pytest.approx(float((radius - 1) ** 2 / 2))

    def test_of_a_linear_lower_level(self):
        """With g = ½‖Ay - Bx‖² and f = ½‖y - a‖²: Bᵀ(AAᵀ)⁻¹(Bx - Aa)."""
        A, B, a, x = randn(3, 7), randn(3, 2, seed=1), randn(7, seed=2), randn(2, seed=3)
        result = selection(
            lambda x, y: ((y - a) ** 2).sum() / 2,
            lambda x, y: ((A @ y - B @ x) ** 2).sum() / 2,
            x,
            torch.zeros(7, **DOUBLE),
        )
        expected = B.T @ torch.linalg.solve(A @ A.T, B @ x - A @ a)
        torch.testing.assert_close(result.grad, expected, rtol=1e-9, atol=1e-9)

    def test_is_the_slope_of_phi(self):
        x = torch.ones(3, **DOUBLE)
        here = selection(curved_f, curved_g, x, torch.zeros(5, **DOUBLE))
        slopes = central_differences(
            lambda x: selection(curved_f, curved_g, x, here.y, select=Select(300, n_starts=0)).fun,
            x,
        )
        assert (here.grad - slopes).norm() < 1e-6 * slopes.norm()

    def test_needs_both_halves(self):
        x = torch.ones(3, **DOUBLE)
        here = selection(curved_f, curved_g, x, torch.zeros(5, **DOUBLE))
        elsewhere = selection(
            curved_f, curved_g, x, torch.zeros(5, **DOUBLE), select=Select(steps=0, n_starts=0)
        )
        unselected = pseudoinverse_hypergradient(curved_f, curved_g, x, elsewhere.y)
        damped = pseudoinverse_hypergradient(curved_f, curved_g, x, here.y, solve=PInv(damping=0.1))
        assert unselected.residual > 0.1
        for wrong in (unselected.grad, damped.grad):
            assert (wrong - here.grad).norm() > 1e-2 * here.grad.norm()
        right = pseudoinverse_hypergradient(curved_f, curved_g, x, here.y)
        assert right.residual < 1e-6
        torch.testing.assert_close(right.grad, here.grad)

    @pytest.mark.parametrize("method", ["dense", "lsmr"])
    def test_without_a_kernel_it_is_implicit_differentiation(self, method):
        A, x, y = randn(6, 4), randn(4, seed=1), randn(4, seed=2)

        def f(x, y):
            return (y**3).sum() + x.dot(y)

        def g(x, y):
            return ((A @ y) ** 2).sum() + x.dot(y) + 0.1 * (x**2).dot(y**2)

        ours = pseudoinverse_hypergradient(f, g, x, y, solve=PInv(method=method, rtol=1e-14))
        implicit = hypergradient(f, g, x, y, solve=CG(rtol=1e-14))
        torch.testing.assert_close(ours.grad, implicit.grad, rtol=1e-8, atol=1e-10)
        assert ours.residual < 1e-8

    def test_noise_along_the_manifold_changes_it_in_proportion(self):
        x = vector(2.0, 0.0)
        errors = []
        for angle in (1e-3, 1e-2):
            y = vector(np.cos(angle), np.sin(angle))
            found = pseudoinverse_hypergradient(circle_f, circle_g, x, y)
            errors.append(float((found.grad - vector(1, 0)).norm()))
        assert errors[1] / errors[0] == pytest.approx(10, rel=0.05)

    def test_does_not_depend_on_coordinates(self):
        rotation = torch.linalg.qr(randn(5, 5, seed=9)).Q
        x, y0 = torch.ones(3, **DOUBLE), torch.zeros(5, **DOUBLE)
        plain = selection(curved_f, curved_g, x, y0)
        turned = selection(
            lambda x, z: curved_f(x, rotation @ z), lambda x, z: curved_g(x, rotation @ z), x, y0
        )
        torch.testing.assert_close(turned.grad, plain.grad, atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(rotation @ turned.y, plain.y, atol=1e-7, rtol=1e-7)


class TestPseudoinverse:
    def singular(self, d=30, rank=12, seed=0):
        A = randn(rank, d, seed=seed)
        return A.T @ A

    @pytest.mark.parametrize("method", ["dense", "lsmr"])
    def test_is_that_of_linear_algebra(self, method):
        H, b = self.singular(), randn(30, seed=1)
        found = PInv(method=method, rtol=1e-13)(
            LowerHessian(lambda k, V: V @ H, lambda V: V @ H), b
        )
        expected = torch.linalg.pinv(H, hermitian=True, rtol=1e-10)
        torch.testing.assert_close(found.v, expected @ b, rtol=1e-6, atol=1e-10)
        outside = (b - H @ (expected @ b)).norm() / b.norm()
        assert found.residual == pytest.approx(float(outside), rel=1e-6)
        kernel = torch.eye(30, **DOUBLE) - expected @ H
        assert (kernel @ found.v).norm() < 1e-8 * found.v.norm()
        assert found.rank == (12 if method == "dense" else None)

    @pytest.mark.parametrize("method", ["dense", "lsmr"])
    def test_projects_onto_the_kernel(self, method):
        H, b = self.singular(), randn(30, seed=1)
        inverse = PInv(method=method, rtol=1e-13).factorize(lambda V: V @ H, b)
        t = inverse.tangential(b)
        assert (H @ t).norm() < 1e-6 * b.norm()
        torch.testing.assert_close(inverse.tangential(t), t, rtol=1e-6, atol=1e-8)

    def test_large_problems_are_not_decomposed(self):
        assert PInv().is_dense(500)
        assert not PInv().is_dense(501)

    def test_damping_is_open(self):
        H, b = torch.eye(2, **DOUBLE), vector(1, 2)
        hessian = LowerHessian(lambda k, V: V @ H, lambda V: V @ H)
        for method in ("dense", "lsmr"):
            found = PInv(damping=1.0, method=method)(hessian, b)
            torch.testing.assert_close(found.v, b / 2)

    def test_negative_curvature_is_named(self):
        with pytest.raises(NotMinimizerError, match=r"eigenvalue -1 beside 2.*Polyak"):
            pseudoinverse_hypergradient(
                circle_f, lambda x, y: y[0] ** 2 - y[1] ** 2 / 2, vector(0, 0), vector(0, 0)
            )

    @pytest.mark.parametrize("method", ["dense", "lsmr"])
    def test_products_that_are_not_finite(self, method):
        hessian = LowerHessian(lambda k, V: V, lambda V: V * torch.nan)
        with pytest.raises(RuntimeError, match="Hessian-vector product is not finite"):
            PInv(method=method)(hessian, vector(1, 2))


class TestDescent:
    def test_of_the_curved_problem(self):
        result = hg_ms(
            curved_f,
            curved_g,
            torch.ones(3, **DOUBLE),
            torch.zeros(5, **DOUBLE),
            outer_lr=1.0,
            maxiter=100,
            gtol=1e-3,
            generator=torch.Generator().manual_seed(0),
        )
        assert result.status == 1
        assert result.grad_norm <= 1e-3
        assert np.all(np.diff(result.history["fun"]) < 1e-9)
        assert result.history["residual"].max() < 1e-8
        assert result.history["tangential"].max() < 1e-3

    def test_matrix_free(self):
        """With LSMR and gradient steps only."""
        target = vector(3.0, 0.0)
        result = hg_ms(
            lambda x, y: circle_f(x, y) + ((x - target) ** 2).sum(),
            circle_g,
            vector(0.6, 0.8),
            vector(0.6, 0.8),
            outer_lr=0.2,
            maxiter=40,
            inner=GD(steps=200, tol=1e-9),
            solve=PInv(method="lsmr"),
        )
        assert result.status == 0
        torch.testing.assert_close(result.x, vector(7 / 3, 0), atol=1e-4, rtol=0)

    @pytest.mark.parametrize(
        "select",
        [
            Select(n_starts=8, restart_every=1, spread=3.0),
            Select(n_starts=7, restart_every=1, intrinsic_dim=1, spread=3.0),
            Langevin(beta=2.0, steps=60, lr=0.3, restart_every=1),
        ],
        ids=["random", "net", "langevin"],
    )
    def test_leaves_local_selections(self, select):
        """On the circle, f has its least value at an angle of 0 and another minimum at 180°."""

        def f(x, y):
            return (1 - y[0] ** 2) - 0.1 * y[0] + 0 * x.sum()

        result = hg_ms(
            f,
            circle_g,
            vector(0.0),
            vector(-0.99, 0.1),
            select=select,
            maxiter=3,
            generator=torch.Generator().manual_seed(1),
        )
        torch.testing.assert_close(result.y, vector(1, 0), atol=1e-4, rtol=0)
        stuck = hg_ms(f, circle_g, vector(0.0), vector(-0.99, 0.1), select=Select(n_starts=0))
        torch.testing.assert_close(stuck.y, vector(-1, 0), atol=1e-4, rtol=0)

    def test_ties_are_reported(self):
        result = hg_ms(
            lambda x, y: -(y[0] ** 2) + x.dot(x),
            circle_g,
            vector(0.0),
            vector(0.6, 0.8),
            select=Select(n_starts=16, restart_every=1, spread=5.0),
            maxiter=1,
            generator=torch.Generator().manual_seed(0),
        )
        assert result.n_selections == 2

    def test_optimizers_projection_and_trees(self):
        result = hg_ms(
            lambda x, y: circle_f(x["a"], y["b"]) - x["a"].sum(),
            lambda x, y: circle_g(x, y["b"]),
            {"a": vector(0.5, 0.5)},
            {"b": vector(0.6, 0.8)},
            optimizer_x=lambda params: torch.optim.Adam(params, lr=0.2),
            project_x=lambda x: {"a": x["a"].clamp(max=1.0)},
            maxiter=20,
        )
        assert result.x["a"].tolist() == [1.0, 1.0]
        torch.testing.assert_close(result.y["b"], vector(0.5**0.5, 0.5**0.5), atol=1e-4, rtol=0)

    def test_numpy_functions(self):
        f = ArrayUpper(lambda x, y: float(((y - x) ** 2).sum() / 2), lambda x, y: (x - y, y - x))
        g = ArrayLower(
            lambda x, y: float((y @ y - 1) ** 2 / 4),
            lambda x, y: (y @ y - 1) * y,
            lambda x, y, v: (y @ y - 1) * v + 2 * y * (y @ v),
            lambda x, y, v: np.zeros(2),
        )
        arrays = hg_ms(f, g, [2.0, 1.0], [0.6, 0.8], maxiter=5, select=Select(n_starts=0))
        tensors = hg_ms(
            circle_f, circle_g, vector(2, 1), vector(0.6, 0.8), maxiter=5, select=Select(n_starts=0)
        )
        np.testing.assert_allclose(arrays.x, tensors.x, rtol=1e-10)
        np.testing.assert_allclose(arrays.y, tensors.y, rtol=1e-10)
        found = pseudoinverse_hypergradient(f, g, np.array([2.0, 0.0]), np.array([1.0, 0.0]))
        assert found.grad.tolist() == pytest.approx([1.0, 0.0])
        clamped = hg_ms(
            f, g, [2.0, 1.0], [0.6, 0.8], maxiter=2, project_x=lambda x: np.minimum(x, 0.5)
        )
        assert clamped.x.max() == 0.5


class TestRuns:
    def run(self, **settings):
        given = {"f": circle_f, "g": circle_g, "maxiter": 5, "select": Select(n_starts=0)}
        given |= settings
        return hg_ms(given.pop("f"), given.pop("g"), vector(2, 1), vector(0.6, 0.8), **given)

    def test_history_and_callbacks(self):
        seen = []

        def stop(intermediate_result):
            seen.append(intermediate_result.fun)
            if len(seen) == 3:
                raise StopIteration

        result = self.run(callback=stop)
        assert (result.status, result.nit, result.success) == (99, 2, False)
        assert result.history["fun"].tolist() == seen
        points = []
        self.run(callback=points.append)
        assert len(points) == 6
        assert np.all(np.diff(result.history["n_grad"]) > 0)

    def test_interrupt(self):
        calls = []

        def interrupted(x, y):
            calls.append(1)
            if len(calls) > 100:
                raise KeyboardInterrupt
            return circle_g(x, y)

        result = self.run(g=interrupted, maxiter=500)
        assert result.status == 2
        assert torch.isfinite(result.x).all()

    def test_values_that_are_not_finite(self):
        result = self.run(f=lambda x, y: circle_f(x, y) * torch.nan)
        assert result.status == 3
        assert len(result.history["nit"]) == 0
        torch.testing.assert_close(result.x, vector(2, 1))

    def test_a_lower_level_that_is_not_solved(self):
        result = self.run(
            inner=GD(steps=1),
            solve=PInv(method="lsmr"),
            f=circle_f,
            g=lambda x, y: ((y - 3) ** 4).sum(),
        )
        assert result.status == 4
        assert "not solved: its gradient is" in result.message

    def test_a_saddle_of_the_lower_level(self):
        result = self.run(g=lambda x, y: y[0] ** 2 - y[1] ** 2, inner=GD(steps=1, tol=10.0))
        assert result.status == 5
        assert "y is not a minimizer" in result.message

    def test_f_that_does_not_depend_on_y(self):
        with pytest.warns(UserWarning, match="f does not depend on y"):
            result = self.run(f=lambda x, y: x.dot(x), outer_lr=0.5, maxiter=1)
        torch.testing.assert_close(result.x, vector(0, 0))

    def test_progress(self, capsys):
        self.run(show_progress=True)
        assert "HG-MS" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"outer_lr": 0.0}, ValueError, "outer_lr must be"),
            ({"maxiter": 0}, ValueError, "maxiter must be"),
            ({"gtol": -1.0}, ValueError, "gtol must be"),
            ({"inner": 3}, TypeError, "inner must be GD, got int"),
            ({"select": GD()}, TypeError, "select must be Select or Langevin, got GD"),
            ({"solve": CG()}, TypeError, "solve must be PInv, got CG"),
            ({"project_x": 3}, TypeError, "project_x must be callable"),
            ({"optimizer_x": 3}, TypeError, "optimizer_x must be callable"),
            ({"f": 3}, TypeError, "f must be callable"),
            (
                {"f": ArrayUpper(lambda x, y: 0.0, lambda x, y: (x, y))},
                TypeError,
                "f and g must both be",
            ),
            ({"callback": 3}, TypeError, "callback must be callable"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_bad_input(self, settings, error, message):
        with pytest.raises(error, match=message):
            self.run(**settings)

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: GD(lr=0.0), "lr must be"),
            (lambda: GD(steps=0), "steps must be"),
            (lambda: GD(tol=-1.0), "tol must be"),
            (lambda: Select(steps=-1), "steps must be"),
            (lambda: Select(lr=0.0), "lr must be"),
            (lambda: Select(n_starts=-1), "n_starts must be"),
            (lambda: Select(restart_every=0), "restart_every must be"),
            (lambda: Select(spread=0.0), "spread must be"),
            (lambda: Select(intrinsic_dim=0), "intrinsic_dim must be"),
            (lambda: Langevin(beta=0.0), "beta must be"),
            (lambda: Langevin(lr=0.0), "lr must be"),
            (lambda: PInv(rtol=0.0), "rtol must be"),
            (lambda: PInv(method="svd"), "method must be one of"),
            (lambda: PInv(cutoff=1.0), "cutoff must be"),
            (lambda: PInv(damping=-1.0), "damping must be"),
        ],
        ids=[f"setting{i}" for i in range(15)],
    )
    def test_bad_settings(self, make, message):
        with pytest.raises(ValueError, match=message):
            make()

    def test_bad_arrays(self):
        with pytest.raises(TypeError, match="grad must be callable, got int"):
            ArrayUpper(lambda x, y: 0.0, 3)
        upper = ArrayUpper(lambda x, y: 0.0, lambda x, y: (x, y[:1]))
        lower = ArrayLower(lambda x, y: 0.0, lambda x, y: y, lambda x, y, v: v, lambda x, y, v: v)
        with pytest.raises(ValueError, match=r"f.grad must have 2 entries, got 1"):
            pseudoinverse_hypergradient(upper, lower, np.ones(2), np.ones(2))


class TestRegularity:
    def test_the_circle_has_one_kink(self):
        report = regularity_report(circle_f, circle_g, vector(2, 0), vector(0.6, 0.8))
        assert report.smooth
        assert (report.intrinsic_dim, report.n_selections) == (1, 1)
        assert report.pl_constant == pytest.approx(2)
        # f along the circle: ½|y - x|² = const - 2 cos φ.
        assert report.tangential_min_eig == pytest.approx(2, rel=1e-4)
        center = regularity_report(circle_f, circle_g, vector(0, 0), vector(0.6, 0.8))
        assert not center.smooth
        assert center.n_selections > 1
        assert "kink" in center.advice

    def test_degenerate_selection(self):
        report = regularity_report(
            lambda x, y: y[1] ** 4 + 0 * x.sum(), lambda x, y: y[0] ** 2, vector(0), vector(1, 0)
        )
        assert not report.smooth
        assert "degenerate" in report.advice

    def test_no_clear_gap(self):
        scales = 10.0 ** -torch.arange(10, **DOUBLE)
        report = regularity_report(
            lambda x, y: ((y - 1) ** 2).sum() + 0 * x.sum(),
            lambda x, y: (scales * y**2).sum(),
            vector(0),
            torch.zeros(10, **DOUBLE),
            n_starts=0,
        )
        assert report.spectral_gap == pytest.approx(10, rel=1e-3)
        assert "no clear gap" in report.advice

    def test_curvature_is_the_second_difference_along_the_manifold(self):
        x = torch.ones(3, **DOUBLE)
        here = selection(curved_f, curved_g, x, torch.zeros(5, **DOUBLE))
        report = regularity_report(curved_f, curved_g, x, here.y, n_starts=0)
        assert report.intrinsic_dim == 3
        H = torch.autograd.functional.hessian(lambda y: curved_g(x, y), here.y)
        kernel = torch.linalg.eigh(H)[1][:, :3]
        curvatures = []
        for w in (*kernel.T, *randn(40, 3, seed=5) @ kernel.T):
            direction, step = w / w.norm(), 1e-3
            values = []
            for sign in (1, 0, -1):
                y = here.y + sign * step * direction
                for _ in range(6):  # Gauss-Newton steps back to the manifold
                    J = torch.autograd.functional.jacobian(curved, y)
                    y = y - torch.linalg.pinv(J) @ (curved(y) - B @ x)
                values.append(float(curved_f(x, y)))
            curvatures.append((values[0] - 2 * values[1] + values[2]) / step**2)
        assert min(curvatures) >= report.tangential_min_eig - 1e-4
        assert min(curvatures) < report.tangential_min_eig * 1.3

    def test_known_dimension_and_no_kernel(self):
        report = regularity_report(
            circle_f, lambda x, y: ((y - x) ** 2).sum(), vector(1, 2), vector(0, 0), k=0
        )
        assert report.smooth
        assert report.tangential_min_eig == np.inf

    def test_reads_and_plots(self):
        report = regularity_report(circle_f, circle_g, vector(2, 0), vector(0.6, 0.8))
        assert str(report).startswith("dimension 1, PL constant 2")
        assert report.plot().get_ylabel() == "eigenvalue of the lower Hessian"

    def test_bad_input(self):
        with pytest.raises(ValueError, match="k must be an integer >= 0 and <= 2"):
            regularity_report(circle_f, circle_g, vector(2, 0), vector(1, 0), k=3)
        with pytest.raises(ValueError, match="at most 2,000 entries"):
            regularity_report(circle_f, circle_g, vector(0), torch.zeros(2001))
