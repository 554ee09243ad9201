"""The antithetic Neumann estimator: even in the noise, exact where the mathematics is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.bilevel import (
    CG,
    AntitheticNeumann,
    HessianReference,
    LowerHessian,
    Neumann,
    ReferenceNeumann,
    StochasticHypergradient,
    antithetic_neumann,
    hypergradient,
    neumann_error_report,
)

DOUBLE = {"dtype": torch.float64}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def symmetric(d, seed, scale=1.0):
    noise = torch.randn(d, d, generator=generator(seed), **DOUBLE)
    return scale * (noise + noise.T) / 2


def definite(d, seed=0, least=0.5):
    A = torch.randn(d, 2 * d, generator=generator(seed), **DOUBLE)
    return A @ A.T / (2 * d) + least * torch.eye(d, **DOUBLE)


def truncated(H, b, K, eta):
    """Return η Σ (I - ηH)^k b by powers of the matrix."""
    M = torch.eye(len(b), **DOUBLE) - eta * H
    return eta * sum(torch.linalg.matrix_power(M, k) @ b for k in range(K))


def estimate(samples, reference, b, K, eta, **settings):
    """Return the antithetic estimate along given samples."""
    left = list(samples)
    return antithetic_neumann(
        lambda v, H: H @ v,
        lambda v: reference @ v,
        b,
        K=K,
        eta=eta,
        sampler=lambda generator: left.pop(0),
        **settings,
    )


H = definite(6)
B = torch.linspace(1, 2, 6, **DOUBLE)
ETA = 0.2


class TestSeries:
    def test_is_even_in_the_noise(self):
        noise = [symmetric(6, k, 0.3) for k in range(1, 10)]
        plus = estimate([H + E for E in noise], H, B, 10, ETA)
        minus = estimate([H - E for E in noise], H, B, 10, ETA)
        torch.testing.assert_close(plus.v, minus.v, rtol=1e-12, atol=0)
        torch.testing.assert_close(plus.odd_part, -minus.odd_part, rtol=1e-12, atol=1e-15)
        assert plus.odd_part.norm() > 0.01

    def test_without_noise_it_is_the_truncated_series(self):
        result = estimate([H] * 40, H, B, 30, ETA)
        torch.testing.assert_close(result.v, truncated(H, B, 30, ETA), rtol=1e-12, atol=0)
        assert result.odd_part.norm() == 0

    @pytest.mark.parametrize("K", [1, 5, 50, 200])
    def test_error_of_truncation(self, K):
        least = float(torch.linalg.eigvalsh(H)[0])
        exact = torch.linalg.solve(H, B)
        v = estimate([H] * K, H, B, K, ETA).v
        in_norm = torch.linalg.eigvalsh(H).max() / least  # of the eigenbasis, orthonormal: 1
        assert in_norm > 1
        assert (v - exact).norm() <= (1 - ETA * least) ** K * exact.norm() * (1 + 1e-9)

    def test_two_terms_do_not_depend_on_the_sample(self):
        result = estimate([symmetric(6, 3, 5.0)], H, B, 2, ETA)
        torch.testing.assert_close(result.v, ETA * (2 * B - ETA * H @ B), rtol=1e-12, atol=1e-14)

    def test_remainder_of_three_terms(self):
        E1, E2 = symmetric(6, 1, 0.3), symmetric(6, 2, 0.3)
        result = estimate([H + E1, H + E2], H, B, 3, ETA)
        remainder = result.v - truncated(H, B, 3, ETA)
        torch.testing.assert_close(remainder, ETA**3 * E2 @ E1 @ B, rtol=1e-10, atol=1e-14)

    def test_noise_is_of_second_order(self):
        noise = [symmetric(6, k) for k in range(1, 20)]
        scales = np.array([1e-3, 1e-2, 1e-1])
        exact = truncated(H, B, 20, ETA)
        errors, plain = [], []
        for t in scales:
            result = estimate([H + t * E for E in noise], H, B, 20, ETA)
            errors.append(float((result.v - exact).norm()))
            plain.append(float((result.v + result.odd_part - exact).norm()))
        assert np.polyfit(np.log(scales), np.log(errors), 1)[0] == pytest.approx(2, abs=0.1)
        assert np.polyfit(np.log(scales), np.log(plain), 1)[0] == pytest.approx(1, abs=0.1)

    def test_unbiased_with_an_exact_reference(self):
        rows = np.random.default_rng(1).lognormal(size=(50, 4)) * [1, 1.5, 0.5, 1]
        samples = rows[:, :, None] * rows[:, None, :] + 0.5 * np.eye(4)
        mean = samples.mean(0)
        eta = 0.1 / np.linalg.eigvalsh(mean)[-1]
        report = neumann_error_report(samples, mean, np.ones(4), 10, eta, 20_000, rng=0)
        exact = truncated(torch.tensor(mean), torch.ones(4, **DOUBLE), 10, eta).numpy()
        for estimates in report.estimates.values():
            error = estimates.std(axis=0) / np.sqrt(20_000)
            assert np.all(np.abs(estimates.mean(axis=0) - exact) < 4 * error)

    def test_bias_of_a_reference_that_is_off(self):
        delta = symmetric(6, 7, 0.05)
        v = estimate([H] * 30, H + delta, B, 30, ETA).v
        expected = (truncated(H, B, 30, ETA) + truncated(H + 2 * delta, B, 30, ETA)) / 2
        torch.testing.assert_close(v, expected, rtol=1e-10, atol=0)

    def test_bias_is_that_of_the_reference_alone_to_first_order(self):
        H, b = definite(10, least=0.5), torch.ones(10, **DOUBLE)
        direction, scales = symmetric(10, 3), np.array([1e-3, 3e-3, 1e-2])
        differences = []
        for t in scales:
            off = H + t * direction
            ours = estimate([H] * 400, off, b, 400, ETA).v
            alone = ReferenceNeumann(K=400, eta=ETA)(hessian_of(H, off), b).v
            differences.append(float((ours - alone).norm()))
            first = -torch.linalg.solve(H, t * direction @ torch.linalg.solve(H, b))
            assert (ours - torch.linalg.solve(H, b) - first).norm() < 400 * t**2
        assert np.polyfit(np.log(scales), np.log(differences), 1)[0] == pytest.approx(2, abs=0.1)

    @pytest.mark.parametrize(
        ("skewness", "plain", "antithetic"),
        [(0.0, 0.0745, 0.0745), (3.75, 0.0387, 0.1346), (-3.75, 0.2305, 0.1346)],
    )
    def test_a_shared_sample_leaves_the_bias_of_its_moments(self, skewness, plain, antithetic):
        """Two-point noise of standard deviation 0.3 around h = 1: the bias is a finite sum."""
        sigma, eta, K = 0.3, 0.2, 20
        root = np.sqrt(skewness**2 + 4)
        points = sigma * np.array([(skewness + root) / 2, (skewness - root) / 2])
        p = -points[1] / (points[0] - points[1])
        one = torch.ones((), **DOUBLE)
        found = {"plain": 0.0, "antithetic": 0.0}
        for weight, point in zip((p, 1 - p), points, strict=True):
            result = antithetic_neumann(
                lambda v, h: h * v,
                lambda v: v,
                one,
                K=K,
                eta=eta,
                sampler=lambda _, point=point: 1 + point,
                mode="shared",
                stabilize=False,
            )
            found["antithetic"] += weight * float(result.v)
            found["plain"] += weight * float(result.v + result.odd_part)
        exact = 1 - (1 - eta) ** K
        assert found["plain"] - exact == pytest.approx(plain, abs=2e-4)
        assert found["antithetic"] - exact == pytest.approx(antithetic, abs=2e-4)

    def test_pairs_are_averaged(self):
        samples = [H + symmetric(6, k, 0.3) for k in range(1, 9)]
        both = estimate(samples, H, B, 5, ETA, pairs=2)
        first = estimate(samples[:4], H, B, 5, ETA)
        second = estimate(samples[4:], H, B, 5, ETA)
        torch.testing.assert_close(both.v, (first.v + second.v) / 2)
        assert (both.n_hvp, both.n_ref_hvp) == (16, 8)

    def test_default_step_is_half_the_inverse_of_the_largest_eigenvalue(self):
        reference = torch.diag(torch.tensor([4.0, 0.1, 0.2], **DOUBLE))
        b = torch.ones(3, **DOUBLE)
        v = estimate([reference] * 30, reference, b, 30, None).v
        torch.testing.assert_close(v, truncated(reference, b, 30, 0.125), rtol=1e-6, atol=0)

    def test_trees_and_blocks(self):
        samples = [H + symmetric(6, k, 0.3) for k in range(1, 5)]
        flat = estimate(samples, H, B, 5, ETA)

        def split(v):
            return {"a": v[:2].reshape(1, 2), "b": [v[2:]]}

        def join(tree):
            return torch.cat([tree["a"].reshape(-1), tree["b"][0]])

        left = list(samples)
        tree = antithetic_neumann(
            lambda v, S: split(S @ join(v)),
            lambda v: split(H @ join(v)),
            split(B),
            K=5,
            eta=ETA,
            sampler=lambda generator: left.pop(0),
        )
        torch.testing.assert_close(join(tree.v), flat.v)
        left = list(samples)
        blocks = antithetic_neumann(
            lambda V, S: V @ S,
            lambda V: V @ H,
            B,
            K=5,
            eta=ETA,
            sampler=lambda generator: left.pop(0),
            batched=True,
        )
        torch.testing.assert_close(blocks.v, flat.v)


class TestStabilization:
    SPIKE = torch.diag(torch.tensor([40.0, 0, 0, 0, 0, 0], **DOUBLE))

    def test_both_chains_are_cut_off_together(self):
        samples = [H + self.SPIKE] * 20
        cut = estimate(samples, H, B, 20, ETA)
        mirrored = estimate([H - self.SPIKE] * 20, H, B, 20, ETA)
        assert cut.diverged == 1
        assert cut.v.norm() < 50 * ETA * B.norm()
        torch.testing.assert_close(cut.v, mirrored.v)

    def test_growth_is_an_error_without_it(self):
        with pytest.raises(RuntimeError, match=r"grew more than a millionfold.*stabilize=True"):
            estimate([H + self.SPIKE] * 40, H, B, 40, ETA, stabilize=False)

    def test_moderate_growth_is_kept_without_it(self):
        result = estimate([H + self.SPIKE] * 3, H, B, 4, ETA, stabilize=False)
        assert result.diverged == 0
        assert result.v.norm() > 9 * B.norm()


def hessian_of(H, reference=None):
    return LowerHessian(
        lambda k, V: V @ H, lambda V: V @ H, None if reference is None else lambda V: V @ reference
    )


class TestParts:
    @pytest.mark.parametrize(
        "solve",
        [
            AntitheticNeumann(K=300, eta=ETA),
            AntitheticNeumann(K=300),
            Neumann(K=300),
            Neumann(K=300, eta=ETA, chains=2, mode="shared"),
            ReferenceNeumann(K=300),
            CG(maxiter=6, rtol=1e-14),
        ],
        ids=["antithetic", "antithetic-auto", "neumann-auto", "shared", "reference", "cg"],
    )
    def test_solves_without_noise(self, solve):
        v = solve(hessian_of(H, H), B).v
        torch.testing.assert_close(v, torch.linalg.solve(H, B), rtol=1e-9, atol=0)

    def test_cg_is_damped(self):
        v = CG(maxiter=6, damping=0.5, rtol=1e-14)(hessian_of(H), B).v
        damped = H + 0.5 * torch.eye(6, **DOUBLE)
        torch.testing.assert_close(v, torch.linalg.solve(damped, B), rtol=1e-9, atol=0)

    def test_cg_reports_its_residual(self):
        found = CG(maxiter=2)(hessian_of(H), B)
        assert found.residual == pytest.approx(float((H @ found.v - B).norm() / B.norm()))
        assert CG()(hessian_of(H), torch.zeros(6, **DOUBLE)).residual == 0

    def test_cg_refuses_an_indefinite_hessian(self):
        with pytest.raises(RuntimeError, match=r"has curvature -.*raise damping"):
            CG()(hessian_of(-H), B)

    def test_batches_that_each_takes(self):
        assert AntitheticNeumann(K=20, pairs=2).n_batches == 38
        assert AntitheticNeumann(K=20, mode="shared").n_batches == 1
        assert Neumann(K=1).n_batches == 0
        assert Neumann(K=20, chains=3).n_batches == 57
        assert CG(n_batches=4).n_batches == 4

    def test_each_factor_has_its_own_batch(self):
        seen = []

        def sampled(k, V):
            seen.append(k)
            return V @ H

        Neumann(K=4, eta=ETA, chains=2)(LowerHessian(sampled, lambda V: V @ H), B)
        assert seen == [0, 1, 2, 3, 4, 5]
        seen.clear()
        Neumann(K=4, eta=ETA, chains=2, mode="shared")(LowerHessian(sampled, lambda V: V), B)
        assert seen == [0, 0, 0, 1, 1, 1]

    @pytest.mark.parametrize("solve", [AntitheticNeumann(), ReferenceNeumann()], ids=["a", "r"])
    def test_a_reference_is_needed(self, solve):
        with pytest.raises(ValueError, match="Neumann needs a reference Hessian"):
            solve(hessian_of(H), B)


def ridge(n=60, d=5, seed=0):
    """Return f, g, rows and the solution: y minimizes a ridge regression with penalty exp(x)."""
    A = torch.randn(2 * n, d, generator=generator(seed), **DOUBLE)
    b = torch.randn(2 * n, generator=generator(seed + 1), **DOUBLE)

    def f(x, y, batch):
        return ((batch[0] @ y["w"] - batch[1]) ** 2).mean() / 2

    def g(x, y, batch):
        return f(x, y, batch) + x.exp() * y["w"].dot(y["w"]) / 2

    def solution(x):
        G = A[:n].T @ A[:n] / n + torch.eye(d, **DOUBLE) * x.exp()
        return {"w": torch.linalg.solve(G, A[:n].T @ b[:n] / n)}

    return f, g, (A[:n], b[:n]), (A[n:], b[n:]), solution


class TestHypergradient:
    @pytest.mark.parametrize(
        "solve",
        [CG(rtol=1e-12), Neumann(K=300), AntitheticNeumann(K=300), ReferenceNeumann(K=300)],
        ids=["cg", "neumann", "antithetic", "reference"],
    )
    def test_closed_form_of_ridge_regression(self, solve):
        f, g, inner, outer, solution = ridge()
        x = torch.tensor(-1.0, **DOUBLE)
        engine = StochasticHypergradient(f, g, x, solution(x), solve=solve, inner_data=inner)
        found = engine(x, solution(x), outer, [inner] * (1 + solve.n_batches))
        step = 1e-5
        value = [f(x, solution(x + s), outer) for s in (step, -step)]
        assert float(found.grad) == pytest.approx(float(value[0] - value[1]) / 2 / step, rel=1e-6)
        assert set(found.v) == {"w"}

    def test_without_batches(self):
        f, g, inner, outer, solution = ridge()
        x = torch.tensor(0.5, **DOUBLE)
        found = hypergradient(
            lambda x, y: f(x, y, outer), lambda x, y: g(x, y, inner), x, solution(x), solve=CG()
        )
        y = solution(x)["w"]
        G = inner[0].T @ inner[0] / 60 + torch.eye(5, **DOUBLE) * x.exp()
        slope = outer[0].T @ (outer[0] @ y - outer[1]) / 60
        assert float(found.grad) == pytest.approx(
            float(-x.exp() * y @ torch.linalg.solve(G, slope)), rel=1e-6
        )

    def test_f_of_x_alone_and_g_linear_in_y(self):
        x, y = torch.tensor([2.0], **DOUBLE), torch.ones(2, **DOUBLE)
        found = hypergradient(lambda x, y: x.sum() ** 2, lambda x, y: y.sum(), x, y, solve=CG())
        assert found.grad.tolist() == [4.0]
        assert found.v.tolist() == [0.0, 0.0]
        constant = torch.ones((), **DOUBLE)
        found = hypergradient(lambda x, y: constant, lambda x, y: y.dot(y), x, y, solve=CG())
        assert found.grad.tolist() == [0.0]

    @pytest.mark.parametrize("n_chains", [1, 2])
    def test_hessian_products(self, n_chains):
        def g(x, y):
            return (x.dot(y) ** 3).sin() + y.pow(4).sum()

        x, y = torch.rand(2, 4, generator=generator(), **DOUBLE)
        engine = StochasticHypergradient(lambda x, y: y.sum(), g, x, y, solve=CG())
        V = torch.randn(n_chains, 4, generator=generator(1), **DOUBLE)
        H = torch.autograd.functional.hessian(lambda y: g(x, y), y)
        torch.testing.assert_close(engine.objectives.hessian(x, y)(V), V @ H)
        cross = torch.autograd.functional.jacobian(
            lambda x: torch.func.grad(lambda y: g(x, y))(y), x
        )
        torch.testing.assert_close(engine.objectives.cross_product(x, y, V[0]), V[0] @ cross)


class TestReferences:
    def engine(self, reference, solve=None, batch_size=10, n=60):
        f, g, inner, outer, solution = ridge(n)
        x = torch.tensor(0.0, **DOUBLE)
        solve = solve or AntitheticNeumann(K=5)
        engine = StochasticHypergradient(
            f,
            g,
            x,
            solution(x),
            solve=solve,
            reference=reference,
            inner_data=inner,
            batch_size=batch_size,
            generator=generator(),
        )
        return engine, x, solution(x), outer, [inner] * (1 + solve.n_batches), inner

    def matrix(self, engine):
        return engine._reference.products(torch.eye(5, **DOUBLE))

    def full(self, inner, x):
        return inner[0].T @ inner[0] / len(inner[0]) + torch.eye(5, **DOUBLE) * x.exp()

    @pytest.mark.parametrize("dense", [True, False])
    def test_full_is_renewed_every_few_steps(self, dense):
        engine, x, y, outer, batches, inner = self.engine(
            HessianReference("full", refresh=3, dense=dense)
        )
        for step in range(4):
            engine(x + step, y, outer, batches)
            at = x + (0 if step < 3 else 3)
            torch.testing.assert_close(self.matrix(engine), self.full(inner, at))

    def test_cost_in_rows(self):
        engine, x, y, outer, batches, _ = self.engine(HessianReference("full", dense=False))
        engine(x, y, outer, batches)
        assert engine.n_reference_rows == 60 * (10 + 4)
        assert engine.n_hvp == 2 * 4
        engine, x, y, outer, batches, _ = self.engine("full")  # 50 products would be needed
        engine(x, y, outer, batches)
        assert engine.n_reference_rows == 60 * 5

    def test_moving_average(self):
        engine, x, y, outer, batches, inner = self.engine(HessianReference("ema", 60, rho=0.25))
        for _ in range(2):
            engine(x, y, outer, batches)
        rows = [torch.randint(60, (60,), generator=g) for g in [generator()] for _ in range(2)]
        one, two = (self.full((inner[0][r],), x) for r in rows)
        torch.testing.assert_close(self.matrix(engine), 0.75 * one + 0.25 * two)

    def test_recursion_with_all_rows_is_exact(self):
        n = 60
        f, g, inner, outer, solution = ridge(n)
        everything = [torch.arange(n)]
        x = torch.tensor(0.0, **DOUBLE)
        engine = StochasticHypergradient(
            f,
            g,
            x,
            solution(x),
            solve=AntitheticNeumann(K=2),
            reference=HessianReference("recursive", n, rho=0.3),
            inner_data=lambda size, generator: tuple(t[everything[0]] for t in inner),
            batch_size=2,
        )
        for step in range(3):
            engine(x + step, solution(x), outer, [inner] * 2)
        torch.testing.assert_close(self.matrix(engine), self.full(inner, x + 2))

    def test_callable(self):
        def kind(x, y):
            return lambda v: {"w": 2 * v["w"]}

        engine, x, y, outer, batches, _ = self.engine(kind, AntitheticNeumann(K=5, eta=0.2))
        engine(x, y, outer, batches)
        torch.testing.assert_close(self.matrix(engine), 2 * torch.eye(5, **DOUBLE))

    def test_a_small_batch_is_warned_of(self):
        with pytest.warns(UserWarning, match="size=20 rows carry too little.*takes 50"):
            self.engine(HessianReference("batch", 20))

    def test_bad_settings(self):
        with pytest.raises(ValueError, match="kind must be one of 'full'"):
            HessianReference("half")
        with pytest.raises(ValueError, match="size must be None for kind='full', got 3"):
            HessianReference("full", 3)
        with pytest.raises(ValueError, match="rho must be"):
            HessianReference("ema", rho=0)
        with pytest.raises(ValueError, match="refresh must be"):
            HessianReference(refresh=0)
        with pytest.raises(ValueError, match="dense must be one of"):
            HessianReference(dense="no")
        with pytest.raises(TypeError, match="reference must be a kind"):
            self.engine(3)

    def test_matrices_are_limited(self):
        y = torch.zeros(2001)
        with pytest.raises(ValueError, match="at most 2,000 parameters, got 2,001"):
            StochasticHypergradient(
                lambda x, y: y.sum(),
                lambda x, y: y.dot(y),
                torch.zeros(1),
                y,
                reference="ema",
                inner_data=torch.zeros(9, 1),
            )

    def test_rows_are_needed(self):
        y = torch.zeros(3)
        engine = StochasticHypergradient(
            lambda x, y: y.sum(), lambda x, y: y.dot(y), torch.zeros(1), y, solve=ReferenceNeumann()
        )
        with pytest.raises(ValueError, match="inner_data must be given"):
            engine(torch.zeros(1), y)


class TestReport:
    def test_moments_of_known_estimates(self):
        """One factor of scalar noise: the plain estimate is linear in it, the antithetic exact."""
        values = np.array([0.0, 0.0, 0.0, 4.0])
        report = neumann_error_report(
            values.reshape(4, 1, 1) / 4, [[0.25]], [1.0], K=2, eta=1.0, n_rep=40_000, rng=0
        )
        third = np.cbrt(np.mean((values / 4 - 0.25) ** 3))
        assert report.std["plain"] == pytest.approx(np.std(values / 4) / 1.75, rel=0.02)
        assert report.third["plain"] == pytest.approx(third / 1.75, rel=0.05)
        assert report.skewness["plain"] == pytest.approx(2 / np.sqrt(3), rel=0.05)
        assert report.rmse["antithetic"] == pytest.approx(0, abs=1e-15)
        assert report.bias["plain"] < 0.01

    def test_reads_well(self):
        report = neumann_error_report(np.ones((1, 1, 1)), [[1.0]], [1.0], K=3, n_rep=5, rng=0)
        assert "rmse" in str(report)
        assert "antithetic" in str(report)
        axes = report.plot()
        assert axes.get_xlabel() == "distance to the mean estimate"

    def test_a_function_draws(self):
        def draw(rng, n):
            return rng.lognormal(size=(n, 2))[:, :, None] * np.eye(2)

        one, two = (
            neumann_error_report(draw, np.eye(2), np.ones(2), K=4, n_rep=9, rng=0) for _ in range(2)
        )
        np.testing.assert_array_equal(one.estimates["plain"], two.estimates["plain"])
        assert len(np.unique(one.estimates["plain"][:, 0])) == 9

    def test_bad_input(self):
        with pytest.raises(ValueError, match="H must have shape"):
            neumann_error_report(np.ones((1, 2, 2)), np.eye(3), np.ones(2))
        with pytest.raises(ValueError, match="hvp_samples must hold at least one"):
            neumann_error_report(np.ones((0, 2, 2)), np.eye(2), np.ones(2))
        with pytest.raises(ValueError, match="n_rep must be"):
            neumann_error_report(np.ones((1, 2, 2)), np.eye(2), np.ones(2), n_rep=1)
        with pytest.raises(ValueError, match=r"hvp_samples\(rng, n\) must have shape \(3, 2, 2\)"):
            neumann_error_report(lambda rng, n: np.eye(2), np.eye(2), np.ones(2), n_rep=3)


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"K": 0}, ValueError, "K must be an integer >= 1"),
            ({"eta": 0.0}, ValueError, "eta must be"),
            ({"pairs": 0}, ValueError, "pairs must be"),
            ({"mode": "both"}, ValueError, "mode must be one of"),
            ({"sampler": 3}, TypeError, "sampler must be callable"),
            ({"sampler": lambda g: iter([H])}, TypeError, "used twice, got an iterator"),
            ({"b": torch.tensor([1.0, torch.nan])}, ValueError, "b must be finite"),
            ({"b": torch.ones(2, dtype=torch.int64)}, TypeError, "b must hold floating-point"),
            ({"b": [1.0]}, TypeError, "b must hold tensors only, got float"),
            ({"b": torch.empty(0)}, ValueError, "b must have at least one entry"),
            (
                {"b": [torch.ones(1), torch.ones(1, **DOUBLE)]},
                ValueError,
                "b must have one dtype and device",
            ),
            ({"hvp": lambda v, s: v[:1]}, ValueError, "as b is needed, got"),
            ({"hvp": lambda v, s: v * torch.nan}, RuntimeError, "is not finite"),
            ({"ref_hvp": lambda v: 3 * v}, ValueError, r"series diverges: eta\*lambda_max=2.7"),
            ({"ref_hvp": lambda v: 0 * v, "eta": None}, ValueError, "eta must be given where"),
        ],
        ids=[
            "K",
            "eta",
            "pairs",
            "mode",
            "sampler",
            "iterator",
            "nan",
            "integers",
            "floats",
            "empty",
            "dtypes",
            "shape",
            "nan-product",
            "diverges",
            "flat",
        ],
    )
    def test_is_refused(self, settings, error, message):
        given = {
            "hvp": lambda v, s: v,
            "ref_hvp": lambda v: v,
            "b": torch.ones(3, **DOUBLE),
            "sampler": lambda generator: None,
            "K": 4,
            "eta": 0.9,
        } | settings
        hvp, ref_hvp, b = (given.pop(name) for name in ("hvp", "ref_hvp", "b"))
        with pytest.raises(error, match=message):
            antithetic_neumann(hvp, ref_hvp, b, **given)

    def test_alternating_and_indefinite_references_are_warned_of(self):
        with pytest.warns(UserWarning, match=r"eta\*lambda_max is above 1 for eta=1"):
            estimate([1.5 * torch.eye(6)] * 4, 1.5 * torch.eye(6), torch.ones(6), 5, 1.0)
        with pytest.warns(UserWarning, match="indefinite, negative curvature was seen"):
            estimate([-0.1 * torch.eye(6)] * 4, -0.1 * torch.eye(6), torch.ones(6), 5, 1.0)
