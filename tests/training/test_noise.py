"""`measure_noise` on losses whose gradient noise and smoothness are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from thalweg.training import NoiseReport, measure_noise
from thalweg.training.gradient_samples import GradientOracle, Sketch
from thalweg.training.moment_fits import fit_line, matrix_moments, tensor_moments

FAST = {"n_samples": 256, "n_steps": 6, "n_path": 16, "stride": 2, "rng": 0}


class Point(nn.Module):
    """Free parameters, of the shapes given."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape, dtype=torch.float64)))


def linear(model, batch):
    """f = ‖x‖²/2 with the gradient x + batch."""
    return model.x.square().sum() / 2 + (model.x * batch).sum()


def endless(draw):
    while True:
        yield draw()


def rows(law, d=40, seed=0):
    """Return endless rows of d numbers, drawn from ``law(rng, size)``."""
    rng = np.random.default_rng(seed)
    return endless(lambda: torch.from_numpy(law(rng, d)))


def gaussian(rng, size):
    return rng.standard_normal(size)


def cauchy(rng, size):
    return rng.standard_cauchy(size)


def centered_exponential(rng, size):
    return rng.exponential(size=size) - 1


def measured(law, model=None, **settings):
    model = model or Point(x=(40,))
    return measure_noise(model, linear, rows(law), **FAST | settings)


def test_gaussian_noise():
    report = measured(gaussian, n_samples=1024)
    assert report.tail_index.value > 1.9
    assert report.hill_index.value > 5
    assert not report.heavy
    assert report.skewness.low == 0
    # ‖∇f‖² = 40 and E‖ξ‖² = 40.
    assert report.stability_ratio.low < 0.5 < report.stability_ratio.high
    assert report.stability_ratio.value == pytest.approx(0.5, abs=0.05)
    assert report.gradient_norm == pytest.approx(40**0.5, rel=0.05)
    assert report.noise_norms.mean() == pytest.approx(40**0.5, rel=0.05)
    assert np.median(report.tail_index_by_coordinate) == pytest.approx(2.0, abs=0.15)


def test_cauchy_noise():
    report = measured(cauchy, n_samples=1024)
    assert report.tail_index.low < 1.0 < report.tail_index.high
    assert report.heavy
    assert report.p == 1.05
    assert report.tail_index_by_tensor["x"] == pytest.approx(1.0, abs=0.15)
    assert "SignSGD" in report.recommended


def test_skewed_noise():
    report = measured(centered_exponential)
    assert report.skewness.low > 0.3
    assert not report.heavy


def test_the_growth_of_the_noise_is_recovered():
    """ξᵢ = aᵢ + mᵢ xᵢ with Var a = 0.3 and Var m = 0.5, while x shrinks from 3 to 0."""

    def loss(model, batch):
        a, m = batch
        return ((1 + m) * model.x.square() / 2 + a * model.x).sum()

    rng = np.random.default_rng(0)

    def draw():
        return (
            torch.from_numpy(0.3**0.5 * rng.standard_normal(400)),
            torch.from_numpy(0.5**0.5 * rng.standard_normal(400)),
        )

    model = Point(x=(400,))
    with torch.no_grad():
        model.x.mul_(3)
    report = measure_noise(
        model,
        loss,
        endless(draw),
        n_samples=64,
        n_steps=20,
        n_path=32,
        stride=4,
        optimizer=lambda params: torch.optim.Adam(params, lr=0.05),
        p=2.0,
        rng=0,
    )
    fit = report.moments
    assert fit.sigma1.value**2 == pytest.approx(0.5, rel=0.1)
    assert fit.sigma0.value**2 == pytest.approx(0.3, rel=0.3)
    assert fit.r2 > 0.9
    assert fit.sigma1.low <= fit.sigma1.value <= fit.sigma1.high
    assert report.moments_by_tensor["x"].sigma1 == pytest.approx(fit.sigma1, rel=0.05)


def test_noise_that_does_not_grow_has_no_slope():
    report = measured(gaussian, p=2.0, n_steps=12, n_path=32)
    assert report.moments.sigma0.value == pytest.approx(1.0, rel=0.1)
    assert report.moments.sigma1.low == 0
    assert report.moments.r2 < 0.3


@pytest.mark.parametrize("curvature", [0.5, 4.0])
def test_a_quadratic_is_smooth_with_its_curvature(curvature):
    def loss(model, batch):
        return curvature * model.x.square().sum() / 2 + (model.x * batch).sum()

    report = measure_noise(Point(x=(40,)), loss, rows(gaussian), **FAST)
    assert report.L0.value == pytest.approx(curvature, rel=1e-6)
    assert report.L1.value == pytest.approx(0.0, abs=1e-6)


def test_the_smoothness_of_an_exponential_grows_with_its_gradient():
    """f = eˣ has f″ = f′: L0 = 0 and L1 = 1."""

    def loss(model, batch):
        return model.x.exp().sum() + 1e-6 * (model.x * batch).sum()

    model = Point(x=(1,))
    with torch.no_grad():
        model.x.fill_(4.0)
    report = measure_noise(
        model,
        loss,
        rows(gaussian, d=1),
        **FAST | {"n_steps": 40, "stride": 5},
        optimizer=lambda params: torch.optim.Adam(params, lr=0.02),
    )
    assert report.L1.value == pytest.approx(1.0, abs=0.06)  # the step is about 0.1 long
    assert report.L0.value < 0.01 * report.gradient_norm
    assert report.smoothness.r2 > 0.99
    assert "hardly any noise" in report.recommended


def test_the_recommendation_follows_the_rules():
    base = measured(gaussian)
    changes = {
        "light tails": {},
        "clip the gradient": {
            "tail_index": base.tail_index._replace(value=1.2),
            "hill_index": base.hill_index._replace(value=1.5),
            "skewness": base.skewness._replace(low=0.2),
        },
        "NLPrecond": {
            "smoothness": fit_line(
                [1.0, 2, 3, 4], [1.0, 2, 3, 4], 1.0, 0.9, np.random.default_rng(0)
            )
        },
    }
    for words, change in changes.items():
        report = NoiseReport(
            **{**vars(base), "stability_ratio": base.stability_ratio._replace(low=0.1), **change}
        )
        assert words.lower() in report.recommended.lower()


def test_the_model_is_left_as_it_is():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    report = measure_noise(
        model,
        lambda model, batch: model(batch).square().mean(),
        endless(lambda: torch.randn(16, 6, generator=generator)),
        **FAST,
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model[0].weight.grad.eq(1).all()
    assert model[3].weight.grad is None
    assert set(report.tail_index_by_tensor) == {name for name, _ in model.named_parameters()}
    assert set(report.matrix_moments) == {"0.weight"}


def test_it_is_reproducible():
    first, second = (str(measured(cauchy, n_samples=100)) for _ in range(2))
    assert first == second
    assert "tail index" in first
    assert "heavy tails" in first


def test_a_list_of_batches_is_run_through_again():
    generator = torch.Generator().manual_seed(0)
    batches = list(torch.randn(200, 40, generator=generator, dtype=torch.float64))
    report = measure_noise(Point(x=(40,)), linear, batches, **FAST)
    assert report.n_samples == 256


def test_chosen_parameters_only():
    def loss(model, batch):
        return (model.x * batch).sum() + (model.y * batch).sum()

    report = measure_noise(Point(x=(40,), y=(40,)), loss, rows(gaussian), params=["y"], **FAST)
    assert set(report.tail_index_by_tensor) == {"y"}


def test_parameters_without_gradients_have_no_index():
    report = measured(gaussian, Point(x=(40,), unused=(3, 3)))
    assert math.isnan(report.tail_index_by_tensor["unused"])
    assert report.tail_index_by_tensor["x"] > 1.8


def test_the_plot_has_three_panels():
    import matplotlib as mpl

    mpl.use("Agg")
    axes = measured(cauchy, n_samples=100).plot()
    assert [bool(ax.lines) for ax in axes] == [True] * 3
    assert "tail index" in axes[0].get_title()
    with pytest.raises(ValueError, match="axes must hold three Axes, got 1"):
        measured(gaussian, n_samples=100).plot(axes[:1])


# The parts


def test_a_sketch_is_linear_and_keeps_norms():
    rng = np.random.default_rng(0)
    params = {"long": torch.zeros(300, 1000), "short": torch.zeros(7)}
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(p.shape, generator=generator) for p in params.values()]
    other = [torch.randn(p.shape, generator=generator) for p in params.values()]
    sketch = Sketch(params, rng)
    (a, entries), (b, _), (c, _) = (
        sketch(g) for g in (grads, other, [x + 2 * y for x, y in zip(grads, other, strict=True)])
    )
    np.testing.assert_allclose(a + 2 * b, c, rtol=1e-4, atol=1e-3)
    exact = sum(float(g.double().square().sum()) for g in grads)
    # √(2/8192) is 1.6 %; four of those.
    assert a @ a == pytest.approx(exact, rel=0.064)
    np.testing.assert_array_equal(a[-7:], grads[1].numpy().astype(float))
    assert len(entries) == sum(sketch.n_entries.values()) <= 4096 + 16
    assert np.isin(entries, torch.cat([g.reshape(-1) for g in grads]).double().numpy()).all()


def test_moments_do_not_take_noise_for_gradient():
    """Without a gradient the plain |mean|ᵖ would be E|ξ|ᵖ/n; the halves' product is zero."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((8, 200_000))
    gradient, moment = tensor_moments(noise, {"x": 200_000}, 2.0)["x"]
    assert gradient < 0.003
    assert moment == pytest.approx(1.0, abs=0.01)
    gradient, moment = tensor_moments(noise + 1.5, {"x": 200_000}, 2.0)["x"]
    assert gradient == pytest.approx(2.25, rel=0.01)
    assert moment == pytest.approx(1.0, abs=0.01)


def test_the_matrix_norm_bounds_the_nuclear_norm():
    """E‖N‖_*ᵖ ≤ ‖V‖_*^{p/2} E tr(NᵀV⁻¹N)^{p/2} for every V."""
    generator = torch.Generator().manual_seed(0)
    for p in (1.2, 2.0):
        noise = torch.randn(64, 6, 9, generator=generator, dtype=torch.float64)
        noise = torch.cat([noise, -noise])  # mean zero
        _, moment = matrix_moments(noise, p)
        nuclear = torch.linalg.matrix_norm(noise, "nuc") * (128 / 127) ** 0.5
        assert moment >= (nuclear**p).mean()
    # Rows uᵢ v: V = diag(|uᵢ|) ‖v‖, and both sides are (Σ|uᵢ| ‖v‖)²; n/(n-1) is 2 for two samples.
    u, v = torch.tensor([1.0, 2.0, 0.5]).double(), torch.tensor([1.0, 1.0]).double()
    one = torch.outer(u, v)[None]
    _, moment = matrix_moments(torch.cat([one, -one]), 2.0)
    assert moment == pytest.approx(2 * float(u.sum() * v.norm()) ** 2, rel=1e-9)


def test_the_nuclear_norm_of_a_gradient_without_noise():
    matrix = torch.diag(torch.tensor([3.0, 2.0, 1.0])).double()
    gradient, moment = matrix_moments(matrix.expand(6, 3, 3), 1.5)
    assert gradient == pytest.approx(6**1.5)
    assert moment == 0


def test_a_line_is_fitted_with_nonnegative_coefficients():
    x = np.linspace(0, 1e-12, 8)
    fit = fit_line(x, 3e-13 + 0.5 * x, 1.0, 0.9, np.random.default_rng(0))
    assert fit.sigma0.value == pytest.approx(3e-13)
    assert fit.sigma1 == pytest.approx((0.5, 0.5, 0.5))
    assert fit.r2 == pytest.approx(1.0)
    falling = fit_line(x, 1e-12 - x, 1.0, 0.9, np.random.default_rng(0))
    assert falling.sigma1.value == 0
    assert falling.r2 <= 1e-9


# Bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_samples": 63}, "n_samples must be an integer >= 64, got 63"),
        ({"n_steps": 2}, "n_steps must be an integer >= 3, got 2"),
        ({"n_path": 3}, "n_path must be an integer >= 4, got 3"),
        ({"stride": 0}, "stride must be an integer >= 1, got 0"),
        ({"p": 1.0}, "p must be a finite number > 1 and <= 2, got 1"),
        ({"confidence": 1.0}, "confidence must be a finite number > 0 and < 1"),
        (
            {"params": ["z"]},
            r"params must name parameters that require gradients \(x, …\), got 'z'",
        ),
        ({"params": []}, "params must hold at least one entry"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        measured(gaussian, **changes)


def test_a_full_batch_has_no_noise():
    with pytest.raises(ValueError, match="deterministic gradients"):
        measure_noise(Point(x=(4,)), linear, [torch.ones(4).double()], **FAST)


def test_batches_that_end_are_an_error():
    few = (torch.randn(40).double() for _ in range(100))
    with pytest.raises(ValueError, match="batches ended after 100; give more, or a list"):
        measure_noise(Point(x=(40,)), linear, few, **FAST)


def test_a_loss_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="the gradient of batch 0 is not finite"):
        measured(lambda rng, size: np.full(size, np.nan))


def test_a_loss_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match=r"loss_fn must return one number, got .* shape \(40,\)"):
        measure_noise(Point(x=(40,)), lambda m, b: m.x * b, rows(gaussian), **FAST)
    with pytest.raises(TypeError, match="loss_fn must return a tensor, got float"):
        measure_noise(Point(x=(40,)), lambda m, b: 1.0, rows(gaussian), **FAST)


def test_sparse_gradients_are_refused():
    model = nn.Embedding(5, 3, sparse=True)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        measure_noise(model, lambda m, b: m(b).sum(), endless(lambda: torch.tensor([1])), **FAST)


def test_the_oracle_starts_where_the_model_is():
    model = Point(x=(3,))
    oracle = GradientOracle(model, linear, None)
    torch.testing.assert_close(
        oracle.gradient(torch.tensor([1.0, 2.0, 3.0]).double())[0],
        torch.tensor([2.0, 3.0, 4.0]).double(),
    )
