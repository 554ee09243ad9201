"""Bilevel descent with antithetic hypergradients, and what it tells of bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from thalweg.bilevel import CG, HessianReference, Neumann, ReferenceNeumann, ane_bilevel

DOUBLE = {"dtype": torch.float64}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def ridge_rows(n=80, d=4):
    rng = np.random.default_rng(0)
    A = rng.standard_normal((2 * n, d))
    b = A @ rng.standard_normal(d) + 2 * rng.standard_normal(2 * n)
    A, b = torch.tensor(A), torch.tensor(b)
    return (A[:n], b[:n]), (A[n:], b[n:])


INNER, OUTER = ridge_rows()


def f(x, y, batch):
    return ((batch[0] @ y - batch[1]) ** 2).mean() / 2


def g(x, y, batch):
    return f(x, y, batch) + x.exp() * y.dot(y) / 2


def solve_ridge(x):
    n, d = INNER[0].shape
    G = INNER[0].T @ INNER[0] / n + x.exp() * torch.eye(d, **DOUBLE)
    return torch.linalg.solve(G, INNER[0].T @ INNER[1] / n)


def best_penalty():
    grid = torch.linspace(-6, 4, 4001, **DOUBLE)
    values = [float(f(x, solve_ridge(x), OUTER)) for x in grid]
    return float(grid[int(np.argmin(values))]), min(values)


def run(**settings):
    given = {
        "inner_data": INNER,
        "outer_data": OUTER,
        "maxiter": 20,
        "lr_x": 0.1,
        "lr_y": 0.2,
        "batch_size": 8,
        "K": 6,
        "generator": generator(),
    } | settings
    functions = [given.pop("f", f), given.pop("g", g)]
    points = [given.pop("x0", torch.zeros((), **DOUBLE)), given.pop("y0", torch.zeros(4, **DOUBLE))]
    return ane_bilevel(*functions, *points, **given)


class TestDescent:
    @pytest.mark.parametrize("variant", ["sgd", "vr"])
    def test_finds_the_best_ridge_penalty(self, variant):
        result = run(
            variant=variant,
            maxiter=400,
            inner_steps=10,
            batch_size=80,
            K=20,
            lr_x=2.0,
            lr_y=0.3,
            f=lambda x, y, batch: f(x, y, OUTER),
            g=lambda x, y, batch: g(x, y, INNER),
        )
        x, value = best_penalty()
        assert float(result.x) == pytest.approx(x, abs=5e-3)
        assert result.fun == pytest.approx(value, rel=1e-5)
        assert result.success

    def test_weight_one_of_fresh_estimates_is_the_plain_method(self):
        plain, recursive = run(), run(variant="vr", vr=1.0)
        torch.testing.assert_close(plain.x, recursive.x, rtol=0, atol=0)
        torch.testing.assert_close(plain.y, recursive.y, rtol=0, atol=0)

    def test_variance_reduction_calms_hypergradients(self):
        """With x and y held, the recursion averages: 1/vr fresh estimates count."""
        settings = {"maxiter": 400, "lr_x": 1e-6, "lr_y": 1e-12, "record_every": 1}
        settings["y0"] = solve_ridge(torch.zeros((), **DOUBLE))
        plain = run(**settings).history["grad_norm"][100:]
        calm = run(variant="vr", vr=0.05, **settings).history["grad_norm"][100:]
        assert calm.std() < 0.5 * plain.std()

    def test_same_seed_same_run(self):
        one, two = run(), run()
        assert float(one.x) == float(two.x)
        assert float(run(generator=generator(1)).x) != float(one.x)

    def test_counts_in_rows(self):
        result = run(maxiter=10, inner_steps=3, outer_batch_size=5, reference="full", refresh=5)
        assert result.n_grad_outer == 10 * 5
        assert result.n_grad_inner == 10 * 8 * (3 + 1 + 5)
        assert result.n_hvp == 10 * 8 * 2 * 5
        assert result.n_reference_rows == 2 * 80 * 4  # a matrix of order 4, twice
        smaller = run(maxiter=10, hessian_batch_size=2)
        assert smaller.n_hvp == 10 * 2 * 2 * 5
        assert smaller.n_grad_inner == 10 * (6 * 8 + 5 * 2)
        both = run(maxiter=10, inner_steps=3, variant="vr")
        assert both.n_hvp == 8 * 2 * 5 * (2 * 10 - 1)

    @pytest.mark.parametrize(
        "solve",
        [Neumann(K=6), Neumann(K=6, eta=0.1, mode="shared"), ReferenceNeumann(K=6), CG(5)],
        ids=["neumann", "shared", "reference", "cg"],
    )
    def test_other_estimators(self, solve):
        result = run(solve=solve, maxiter=200, lr_y=0.05)
        assert abs(result.fun - best_penalty()[1]) < 0.2
        assert np.isnan(result.history["odd_share"]).all()

    @pytest.mark.parametrize(
        "reference",
        [
            "full",
            HessianReference("full", dense=False, refresh=7),
            HessianReference("batch", 80),
            "ema",
            "recursive",
        ],
        ids=["full", "products", "batch", "ema", "recursive"],
    )
    def test_references(self, reference):
        result = run(reference=reference, maxiter=200, lr_y=0.05)
        assert abs(result.fun - best_penalty()[1]) < 0.2
        assert np.nanmax(result.history["odd_share"]) < 1

    def test_optimizers_and_projection(self):
        result = run(
            optimizer_x=lambda params: torch.optim.Adam(params, lr=0.5),
            optimizer_y=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            project_x=lambda x: x.clamp(max=0.25),
            maxiter=60,
        )
        assert float(result.x) == 0.25

    def test_trees_of_a_network(self):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
        net = net.double()
        start = {"w": torch.zeros(80, **DOUBLE)}
        rows = (*INNER, torch.arange(80))

        def losses(y, batch):
            return (torch.func.functional_call(net, y, (batch[0],))[:, 0] - batch[1]) ** 2

        def lower(x, y, batch):
            ridge = 0.5 * sum(p.square().sum() for p in y.values())
            return (x["w"][batch[2]].sigmoid() * losses(y, batch)).mean() + ridge

        result = run(
            f=lambda x, y, batch: losses(y, batch).mean(),
            g=lower,
            x0=start,
            y0=dict(net.named_parameters()),
            inner_data=rows,
            lr_y=0.05,
            K=4,
            maxiter=30,
        )
        assert set(result.y) == {"0.weight", "0.bias", "2.weight", "2.bias"}
        assert not result.y["0.weight"].requires_grad
        assert result.x["w"].abs().max() > 0
        before = lower(start, dict(net.named_parameters()), rows)
        assert lower(start, result.y, rows) < 0.98 * before

    def test_rows_from_a_function(self):
        def draw(size, generator):
            rows = torch.randint(80, (size,), generator=generator)
            return tuple(t[rows] for t in INNER)

        result = run(inner_data=draw, outer_data=draw, reference=HessianReference("batch"))
        assert np.isfinite(result.fun)
        with pytest.raises(ValueError, match="inner_data must be tensors where all rows"):
            run(inner_data=draw)

    def test_single_tensors_are_rows(self):
        result = run(
            f=lambda x, y, batch: ((y - batch) ** 2).sum(1).mean(),
            g=lambda x, y, batch: ((y - batch * x.exp()) ** 2).sum(1).mean(),
            inner_data=INNER[0],
            outer_data=INNER[0],
            lr_x=0.01,
        )
        assert np.isfinite(result.fun)


class TestRuns:
    def test_history(self):
        result = run(maxiter=7, record_every=3)
        assert result.history["nit"].tolist() == [0, 3, 6, 7]
        assert result.history["fun"][-1] == result.fun == float(f(result.x, result.y, OUTER))
        assert np.isnan(result.history["grad_norm"][0])
        assert np.all(result.history["grad_norm"][1:] > 0)

    def test_callbacks(self):
        seen = []

        def stop(intermediate_result):
            seen.append(intermediate_result.nit)
            if len(seen) == 2:
                raise StopIteration

        result = run(callback=stop, record_every=4)
        assert seen == [4, 8]
        assert (result.nit, result.status, result.success) == (8, 99, False)
        points = []
        run(callback=points.append, maxiter=2, record_every=1)
        assert points[0] != points[1]

    def test_interrupt_returns_what_there_is(self):
        calls = []

        def interrupted(x, y, batch):
            calls.append(1)
            if len(calls) > 300:
                raise KeyboardInterrupt
            return g(x, y, batch)

        result = run(g=interrupted, maxiter=1000)
        assert result.status == 2
        assert 0 < result.nit < 1000
        assert "Interrupted" in result.message

    @pytest.mark.parametrize(
        ("level", "call", "message"),
        [
            ("f", 4, "The hypergradient is not finite"),
            ("g", 102, "The gradient of g is not finite"),
            ("g", 108, "A Hessian-vector product is not finite"),
        ],
        ids=["f", "g", "product"],
    )
    def test_a_gradient_that_is_not_finite_ends_the_run(self, level, call, message):
        """After the first one, a step evaluates g 11 times: 5 for y, 5 for factors, 1 for x."""
        calls = []

        def broken(x, y, batch):
            calls.append(1)
            value = {"f": f, "g": g}[level](x, y, batch)
            return value * torch.nan if len(calls) == call else value

        result = run(maxiter=50, reference=HessianReference(refresh=999), **{level: broken})
        assert result.message.startswith(message)
        assert result.status == 3
        assert torch.isfinite(result.y).all()
        assert torch.isfinite(result.x).all()

    def test_progress(self, capsys):
        run(show_progress=True, maxiter=3)
        assert "ANE" in capsys.readouterr().err


class TestBadInput:
    @pytest.mark.parametrize(
        ("settings", "error", "message"),
        [
            ({"f": 3}, TypeError, "f must be callable"),
            ({"variant": "adam"}, ValueError, "variant must be one of 'sgd', 'vr'"),
            ({"maxiter": 0}, ValueError, "maxiter must be"),
            ({"lr_x": -1.0}, ValueError, "lr_x must be"),
            ({"lr_y": float("nan")}, ValueError, "lr_y must be"),
            ({"vr": 0.0}, ValueError, "vr must be"),
            ({"K": 0}, ValueError, "K must be"),
            ({"batch_size": 0}, ValueError, "batch_size must be"),
            ({"outer_batch_size": 0}, ValueError, "outer_batch_size must be"),
            ({"hessian_batch_size": 0}, ValueError, "hessian_batch_size must be"),
            ({"inner_steps": 0}, ValueError, "inner_steps must be"),
            ({"record_every": 0}, ValueError, "record_every must be"),
            ({"project_x": 1}, TypeError, "project_x must be callable"),
            ({"optimizer_x": "adam"}, TypeError, "optimizer_x must be callable"),
            ({"inner_data": 3}, TypeError, "inner_data must be tensors with rows"),
            ({"inner_data": [1]}, TypeError, "inner_data must hold tensors, got int"),
            ({"outer_data": ()}, TypeError, "outer_data must hold tensors, got none"),
            (
                {"outer_data": (OUTER[0], OUTER[1][1:])},
                ValueError,
                r"outer_data must have one number of rows >= 1, got \[79, 80\]",
            ),
            ({"x0": torch.tensor(torch.nan)}, ValueError, "x must be finite"),
            ({"y0": {"a": 1.0}}, TypeError, "y must hold tensors only, got float"),
            ({"f": lambda x, y, batch: y}, TypeError, r"f must return a scalar tensor, got \(4,\)"),
            ({"g": lambda x, y, batch: 1.0}, TypeError, "g must return a scalar tensor, got float"),
            ({"callback": 1}, TypeError, "callback must be callable"),
            ({"project_x": lambda x: torch.zeros(2, **DOUBLE)}, ValueError, "as x is needed"),
            ({"eta": 5.0, "K": 30}, ValueError, "series diverges"),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_is_refused(self, settings, error, message):
        with pytest.raises(error, match=message):
            run(**settings)
