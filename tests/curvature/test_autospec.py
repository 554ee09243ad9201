"""AutoSpec: recurrences against Chebyshev's, probes, training, and use on operators."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial import chebyshev
from safetensors.torch import save_file
from scipy.sparse.linalg import LinearOperator, aslinearoperator, cg, eigsh, lobpcg
from typer import BadParameter

from thalweg.curvature import (
    AutoSpec,
    OutOfRangeWarning,
    RecurrenceCoefficients,
    autospec_eigsh,
    autospec_report,
    chebyshev_recurrence,
    pretrained,
)
from thalweg.curvature.autospec_network import is_safe
from thalweg.curvature.autospec_weights import SHIPPED, WEIGHTS, train_weights
from thalweg.curvature.spectral_heads import chebyshev_basis, expansion_rows, fitting_points
from thalweg.curvature.spectral_probe import probe_operator
from thalweg.curvature.spectral_recurrences import (
    apply_recurrence,
    basis,
    chebyshev_filter,
    chebyshev_interpolant,
    chebyshev_inverse,
    chebyshev_rows,
    evaluate,
)
from thalweg.curvature.spectral_tasks import (
    FUNCTIONS,
    TASKS,
    ScaledInterval,
    classical_rows,
    condition_loss,
    filter_loss,
    function_loss,
)
from thalweg.curvature.spectral_training import draw_pool, spectral_loss
from thalweg.curvature.synthetic_spectra import FAMILIES, lanczos_on_measures, sample_measures


def spd(n, kappa, seed=0):
    """Return a dense matrix with log-uniform eigenvalues, its eigenvalues and vectors."""
    rng = np.random.default_rng(seed)
    vectors = np.linalg.qr(rng.normal(size=(n, n)))[0]
    values = np.sort(kappa ** -rng.uniform(0, 1, n))
    return (vectors * values) @ vectors.T, values, vectors


def poisson(side):
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(side, side))
    eye = sp.eye_array(side)
    return sp.csr_array(sp.kron(line, eye) + sp.kron(eye, line))


class Counting(LinearOperator):
    """Counts products with vectors."""

    def __init__(self, A):
        super().__init__(A.dtype, A.shape)
        self.A = A
        self.count = 0

    def _matvec(self, x):
        self.count += 1
        return self.A @ x

    def _matmat(self, X):
        self.count += X.shape[1]
        return self.A @ X


# The mathematics of recurrences.


def test_initial_recurrence_is_chebyshevs():
    x = np.linspace(0, 1, 31)
    rows = chebyshev_rows(9)
    assert np.allclose(rows[0], [-2, 1, 0, 1])
    assert np.allclose(rows[1:], [-4, 2, 1, 0])
    for j, values in enumerate(basis(rows, x)):
        assert np.allclose(values, chebyshev.chebval(1 - 2 * x, np.eye(10)[j]), atol=1e-12)
    assert np.allclose(RecurrenceCoefficients(rows)(x), 1.0)


def test_chebyshev_inverse_is_minimax():
    """Its residual is the Chebyshev polynomial whose value at 0 is 1, so it equioscillates."""
    low, degree = 0.01, 11
    x = np.linspace(low, 1, 20_001)
    residual = 1 - x * RecurrenceCoefficients(chebyshev_inverse(degree, low))(x)
    t0 = -(1 + low) / (1 - low)
    bound = 1 / np.cosh((degree + 1) * np.arccosh(-t0))
    assert np.abs(residual).max() == pytest.approx(bound, rel=1e-6)
    extrema = np.flatnonzero(np.abs(residual) > bound * (1 - 1e-6))
    signs = np.sign(residual[extrema])
    assert 1 + np.count_nonzero(np.diff(signs)) == degree + 2


def test_chebyshev_inverse_of_huge_degree_does_not_overflow():
    x = np.linspace(0.5, 1, 100)
    assert np.allclose(x * RecurrenceCoefficients(chebyshev_inverse(600, 0.5))(x), 1.0)


def test_interpolant_interpolates():
    low, degree = 0.05, 8
    nodes = chebyshev.chebpts1(degree + 1) * (1 - low) / 2 + (1 + low) / 2
    P = RecurrenceCoefficients(chebyshev_interpolant(np.sqrt, degree, low))
    assert np.allclose(P(nodes), np.sqrt(nodes), atol=1e-13)


def test_filter_is_bounded_above_the_cut_and_grows_below():
    P = RecurrenceCoefficients(chebyshev_filter(12, 0.1))
    assert np.abs(P(np.linspace(0.1, 1, 1000))).max() <= 1 + 1e-12
    expected = np.cosh(12 * np.arccosh(1.1 / 0.9))
    assert P(np.array([0.0]))[0] == pytest.approx(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_recurrence_on_a_diagonal_matrix_is_scalar_evaluation(seed, degree):
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(degree + 1, 4))
    values = rng.uniform(0, 1, 20)
    block = rng.normal(size=(20, 3))
    result = apply_recurrence(rows, lambda x: values[:, None] * x, block)
    scale = np.abs(basis(rows, values)).max() * np.abs(rows[:, 3]).sum()
    assert np.allclose(result, evaluate(rows, values)[:, None] * block, atol=1e-13 * max(scale, 1))


def test_applying_does_not_overwrite_what_the_product_returns():
    """An operator may return its argument itself, as the identity does."""
    rows = np.random.default_rng(0).normal(size=(5, 4))
    block = np.arange(6.0)
    result = apply_recurrence(rows, lambda x: x, block)
    assert np.allclose(result, evaluate(rows, np.array([1.0]))[0] * np.arange(6.0))
    assert np.array_equal(block, np.arange(6.0))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_precision_and_order_of_blocks(dtype, order):
    A, values, vectors = spd(30, 20.0)
    A = A.astype(dtype)
    block = np.asarray(np.random.default_rng(1).normal(size=(30, 4)), dtype=dtype, order=order)
    model = pretrained("invsqrt", 16)
    result = model.apply_to(A, block, rng=0)
    assert result.dtype == dtype
    exact = (vectors * values**-0.5) @ vectors.T @ block
    tolerance = 5e-3 if dtype is not np.float32 else 6e-3
    assert np.linalg.norm(result - exact) < tolerance * np.linalg.norm(exact)


def test_growth_measures_cancellation():
    cancelling = RecurrenceCoefficients([[1.0, 0, 0, 1e6], [0, 0, 0, -1e6 + 1]])
    assert cancelling.growth(np.array([1.0])) == pytest.approx(1e6)


# Expansions fitted by least squares.


def test_equal_weights_fit_by_least_squares():
    low = torch.tensor([0.05, 0.2], dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    rows = expansion_rows(torch.zeros(2, 96, dtype=torch.float64), 10, "invsqrt", low, one, one)
    x = torch.linspace(0, 1, 300, dtype=torch.float64) * (1 - low[:, None]) + low[:, None]
    error = ((evaluate(rows, x) - x**-0.5) * x**0.5).abs().amax(-1)
    for i in range(2):
        rival = RecurrenceCoefficients(chebyshev_interpolant(lambda t: t**-0.5, 10, float(low[i])))
        points = x[i].numpy()
        bound = np.abs(rival(points) * points**0.5 - 1).max()
        assert error[i] < 6 * bound


def test_weight_at_few_points_makes_interpolation():
    """With all weight on degree + 1 points, the fit passes through these."""
    degree, low = 4, torch.tensor([0.1], dtype=torch.float64)
    output = torch.full((1, 96), -4.0, dtype=torch.float64)
    chosen = torch.tensor([3, 20, 45, 70, 92])
    output[0, chosen] = 0.0
    one = torch.ones(1, dtype=torch.float64)
    rows = expansion_rows(output, degree, "sqrt", low, one, one)
    points = fitting_points(low)[:, chosen]
    assert torch.allclose(evaluate(rows, points), points.sqrt(), atol=1e-6)


def test_chebyshev_basis_is_numpys():
    low = torch.tensor([0.3], dtype=torch.float64)
    x = torch.linspace(0.3, 1, 9, dtype=torch.float64)[None]
    t = (2 * x[0] - 1.3).numpy() / 0.7
    assert np.allclose(chebyshev_basis(x, low, 5)[0], chebyshev.chebvander(t, 5))
    assert chebyshev_basis(x, low, 0).shape == (1, 9, 1)


# Spectra and probes.


@pytest.mark.parametrize("family", FAMILIES)
def test_measures_are_probabilities_over_the_interval(family):
    rng = np.random.default_rng(0)
    measures = sample_measures(50, kappa=(10, 1e4), families=[family], n=96, rng=rng)
    assert np.allclose(measures.masses.sum(1), 1.0)
    assert (np.diff(measures.points) >= 0).all()
    assert (measures.points[:, -1] == 1).all()
    kappa = 1 / measures.points[:, 0]
    assert kappa.min() >= 10
    assert kappa.max() <= 1e4
    # One eigenvalue at least stands at both ends.
    assert (measures.masses[:, [0, -1]] * measures.sizes[:, None] > 0.4).all()


def test_gaps_hold_no_eigenvalue():
    rng = np.random.default_rng(1)
    measures = sample_measures(30, kappa=(1e3, 1e4), families=["gap"], n=192, rng=rng)
    longest = [
        np.max(np.diff(np.log(points[masses > 0])))
        for points, masses in zip(measures.points, measures.masses, strict=True)
    ]
    assert np.median(longest) > 0.5


def test_batched_lanczos_is_lanczos_on_the_matrix():
    """Of an operator with these eigenvalues and a start vector with these components."""
    rng = np.random.default_rng(2)
    measures = sample_measures(3, kappa=(10, 100), families=["power"], n=40, rng=rng)
    ritz = lanczos_on_measures(measures, 6, np.random.default_rng(7))
    energy = np.random.default_rng(7).gamma(
        np.maximum(measures.masses * measures.sizes[:, None], 1e-300) / 2
    ) * (measures.masses > 0)
    for i in range(3):
        start = np.sqrt(energy[i] / energy[i].sum())
        krylov = [start]
        for _ in range(5):
            krylov.append(measures.points[i] * krylov[-1])
        q = np.linalg.qr(np.array(krylov).T)[0]
        projected = q.T @ (measures.points[i][:, None] * q)
        assert np.allclose(np.linalg.eigvalsh(projected), ritz.values[i], atol=1e-6)
        assert np.allclose(ritz.weights[i].sum(), 1.0)


def test_probe_brackets_the_spectrum_and_counts_its_products():
    A, values, _ = spd(300, 100.0)
    counting = Counting(A)
    probe = probe_operator(counting, 12, rng=0)
    assert counting.count == probe.matvecs == 12
    assert values[0] <= probe.ritz_values[0] <= probe.ritz_values[-1] <= values[-1]
    assert probe.lam_max >= values[-1]
    for theta, residual in zip(probe.ritz_values, probe.residuals, strict=True):
        assert np.abs(values - theta).min() <= residual + 1e-12


def test_gauss_quadrature_of_the_probe_integrates_polynomials():
    A, _, _ = spd(200, 50.0)
    probe = probe_operator(A, 8, rng=3)
    start = np.random.default_rng(3).standard_normal(200)
    start /= np.linalg.norm(start)
    for power in range(6):
        moment = start @ np.linalg.matrix_power(A, power) @ start
        assert probe.weights @ probe.ritz_values**power == pytest.approx(moment, rel=1e-9)


def test_probe_of_the_identity_stops_early():
    probe = probe_operator(np.eye(10), 6, rng=0)
    assert probe.matvecs == 1
    assert np.allclose(probe.ritz_values, 1.0)
    M = pretrained("precond", 12).operator(np.eye(40), rng=0)
    b = np.arange(40.0)
    assert np.allclose(M @ b, (M @ b)[1] * b)


def test_features_do_not_depend_on_scale():
    A, _, _ = spd(60, 30.0)
    model = AutoSpec("inv", 4, probe_steps=5)
    features, scaled = (
        model.probe(factor * A, rng=0).features(scale_free=True) for factor in (1.0, 7.0)
    )
    assert np.allclose(features, scaled)
    assert not np.allclose(features, model.probe(7.0 * A, rng=0).features(scale_free=False))


def test_nullspace_is_left_out():
    laplacian = sp.csgraph.laplacian(sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(50, 50)))
    with pytest.raises(ValueError, match="must not be singular: give its nullspace"):
        probe_operator(sp.csr_array(laplacian).astype(float), 50, rng=0)
    probe = probe_operator(sp.csr_array(laplacian).astype(float), 50, rng=0, nullspace=np.ones(50))
    smallest = 2 - 2 * np.cos(np.pi / 50)
    assert probe.ritz_values[0] == pytest.approx(smallest, rel=1e-6)


def test_probe_of_a_tensor_is_that_of_the_array():
    A, _, _ = spd(40, 30.0)
    dense = probe_operator(A, 6, rng=1)
    for tensor in (torch.tensor(A), torch.tensor(A).to_sparse_coo()):
        probe = probe_operator(tensor, 6, rng=1)
        assert np.allclose(probe.ritz_values, dense.ritz_values)


def test_hermitian_operators():
    rng = np.random.default_rng(0)
    q = np.linalg.qr(rng.normal(size=(40, 40)) + 1j * rng.normal(size=(40, 40)))[0]
    values = np.geomspace(0.05, 1, 40)
    A = (q * values) @ q.conj().T
    b = rng.normal(size=40) + 1j * rng.normal(size=40)
    exact = (q * values**-0.5) @ q.conj().T @ b
    result = pretrained("invsqrt", 16).apply_to(A, b, rng=0)
    assert np.linalg.norm(result - exact) < 5e-3 * np.linalg.norm(exact)


# Losses.


def test_condition_loss_is_the_logarithm_of_the_condition_number():
    """Up to the power mean: with two eigenvalues of weight 1/2, to a factor 2^(1/30) each."""
    points = torch.tensor([[0.25, 1.0]], dtype=torch.float64)
    rows = torch.tensor(chebyshev_rows(1))[None]  # P = 1
    masses = torch.full((1, 2), 0.5, dtype=torch.float64)
    loss = condition_loss(rows, points, masses, points[:, :1])
    assert loss.item() == pytest.approx(np.log(4), abs=2 * np.log(2) / 30 + 1e-3)


def test_negative_preconditioners_cost_more():
    points = torch.linspace(0.1, 1, 50, dtype=torch.float64)[None]
    masses = torch.full((1, 50), 0.02, dtype=torch.float64)
    rows = torch.tensor(chebyshev_rows(2))[None]
    sign_change = rows.clone()
    sign_change[0, :, 3] = torch.tensor([0.0, 1.0, 0.0])
    below = points[:, :1] * 0.5
    assert condition_loss(sign_change, points, masses, below) > condition_loss(
        rows, points, masses, below
    )


def test_gaps_do_not_count_in_the_losses():
    rng = np.random.default_rng(0)
    points = torch.tensor(np.sort(rng.uniform(0.1, 1, (1, 20))))
    masses = torch.full((1, 20), 1 / 18, dtype=torch.float64)
    masses[0, 5] = masses[0, 9] = 0.0
    moved = points.clone()
    moved[0, 5] += 1e-3
    rows = torch.tensor(chebyshev_inverse(4, 0.1))[None]
    cut = torch.tensor([0.4], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64) * 1e3
    for loss in (
        lambda x: condition_loss(rows, x, masses, points[:, :1]),
        lambda x: filter_loss(rows, x, masses, cut),
        lambda x: function_loss(rows, x, masses, 1 / x, one),
    ):
        assert loss(points).item() == pytest.approx(loss(moved).item(), rel=1e-12)


def test_function_loss_is_the_mean_square_error_of_gaussian_vectors():
    points = torch.tensor(np.linspace(0.1, 1, 400))[None]
    masses = torch.full((1, 400), 1 / 400, dtype=torch.float64)
    rows = torch.tensor(chebyshev_interpolant(lambda x: x**-0.5, 4, 0.1))
    loss = function_loss(rows[None], points, masses, points**-0.5, torch.tensor([1e9]))
    rng = np.random.default_rng(0)
    b = rng.normal(size=(400, 2000))
    x = points[0].numpy()[:, None]
    P = RecurrenceCoefficients(rows.numpy())(x[:, 0])[:, None]
    measured = ((P - x**-0.5) * b).__pow__(2).sum() / (x**-0.5 * b).__pow__(2).sum()
    # 800,000 squared Gaussians: a relative error of a few per mille.
    assert loss.item() == pytest.approx(np.log(measured), abs=0.02)


def test_filter_loss_is_the_logarithm_of_a_ratio():
    points = torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float64) + 1e-9
    masses = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    rows = torch.tensor(chebyshev_filter(3, 0.5))[None]
    loss = filter_loss(rows, points, masses, torch.tensor([0.4], dtype=torch.float64))
    wanted = np.cosh(3 * np.arccosh(3.0))
    assert loss.item() == pytest.approx(np.log(1 / wanted), abs=0.05)


# The network: training and safety.


@pytest.mark.parametrize("form", ["expansion", "recurrence"])
@pytest.mark.parametrize("task", ["precond", "invsqrt", "filter"])
def test_training_lowers_the_loss(task, form):
    """On spectra that were not trained on."""
    model = AutoSpec(task, 6, form=form, hidden=24, probe_steps=8)
    rng = np.random.default_rng(9)
    held_out = draw_pool(model, 512, kappa=(10, 3000), families=FAMILIES, n=64, rng=rng)

    def loss():
        with torch.no_grad():
            return spectral_loss(model, held_out, torch.Generator().manual_seed(0)).item()

    before = loss()
    generator = torch.Generator().manual_seed(0)
    model.fit_synthetic(steps=150, pool=1024, n=64, generator=generator)
    assert len(model.losses) == 150
    assert loss() < before - 0.01
    assert not model.training


def test_training_is_deterministic_and_resumable_from_a_file(tmp_path):
    def trained():
        model = AutoSpec("inv", 5, hidden=8, probe_steps=4)
        return model.fit_synthetic(
            steps=5, pool=64, n=32, batch=8, generator=torch.Generator().manual_seed(3)
        )

    torch.manual_seed(0)
    first = trained()
    torch.manual_seed(1)
    second = trained()
    assert first.losses == second.losses
    first.save(tmp_path / "weights.safetensors")
    loaded = AutoSpec.load(tmp_path / "weights.safetensors")
    A, _, _ = spd(30, 20.0)
    probe = first.probe(A, rng=0)
    assert np.allclose(loaded.learned_rows(probe), first.learned_rows(probe), rtol=1e-4)
    assert float(loaded.kappa[1]) == 3000


def test_gradients_of_the_fit_are_those_of_finite_differences():
    model = AutoSpec("precond", 4, hidden=4, probe_steps=3)
    rng = np.random.default_rng(0)
    pool = draw_pool(model, 4, kappa=(10, 50), families=["power"], n=24, rng=rng)
    with torch.no_grad():
        model.head.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))

    def loss():
        return spectral_loss(model, pool, torch.Generator().manual_seed(1))

    loss().backward()
    gradient = model.head.bias.grad[2].item()
    values = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            model.head.bias[2] += step
        values.append(loss().item())
        with torch.no_grad():
            model.head.bias[2] -= step
    assert gradient == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-8)


def test_interrupted_training_keeps_what_it_has():
    def interrupt(step, loss):
        if step == 3:
            raise KeyboardInterrupt

    model = AutoSpec("inv", 3, hidden=4, probe_steps=3)
    model.fit_synthetic(steps=50, pool=16, n=24, batch=4, callback=interrupt)
    assert len(model.losses) == 3


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("form", ["expansion", "recurrence"])
def test_untrained_networks_are_safe(task, form):
    """Whatever the network says, what is used is no worse than ten times Chebyshev's."""
    model = AutoSpec(task, 8, form=form)
    with torch.no_grad():
        model.head.bias.normal_(0, 3, generator=torch.Generator().manual_seed(0))
    A, values, _ = spd(80, 40.0)
    cut = float(values[20]) if task == "filter" else None
    probe = model.probe(A, rng=0, cut=cut, lam_min=values[0])
    with pytest.warns(OutOfRangeWarning, match="condition number of at least"):
        rows = model.coefficients(probe).rows
    if not is_safe(task, model.learned_rows(probe), probe.interval):
        classical = classical_rows(task, 8, probe.interval)
        assert np.allclose(rows[:, :3], classical[:, :3])
    assert is_safe(task, rows, probe.interval)


def test_cg_converges_with_an_untrained_network():
    A = poisson(20)
    model = AutoSpec("precond", 6, form="recurrence")
    with torch.no_grad():
        model.head.bias.normal_(0, 5, generator=torch.Generator().manual_seed(0))
    b = np.ones(400)
    with pytest.warns(OutOfRangeWarning):
        M = model.operator(A, rng=0)
    x, info = cg(A, b, rtol=1e-10, M=M)
    assert info == 0
    assert np.allclose(x, sp.linalg.spsolve(A.tocsc(), b), rtol=1e-7)


def test_unsafe_polynomials():
    interval = ScaledInterval(0.01, 0.1, 1.0)
    assert not is_safe("precond", np.full((3, 4), np.nan), interval)
    negative = chebyshev_rows(2)
    negative[0, 3] = -1.0
    assert not is_safe("precond", negative, interval)
    assert not is_safe("filter", chebyshev_rows(12), ScaledInterval(0.01, 0.3, 1.0))
    assert not is_safe("sqrt", chebyshev_rows(6), interval)
    cancelling = chebyshev_rows(2)
    cancelling[:, :3] = [0.0, 1.0, 0.0]  # every p_j is 1
    cancelling[:, 3] = 1e9, 1.0, 1 - 1e9
    assert not is_safe("precond", cancelling, interval)
    assert is_safe("sqrt", chebyshev_interpolant(np.sqrt, 6, 0.01), interval)


# Use.


@pytest.mark.parametrize(("task", "degree"), SHIPPED)
def test_shipped_weights_load_and_are_small(task, degree):
    model = pretrained(task, degree)
    assert (model.task, model.degree) == (task, degree)
    assert float(model.kappa[1]) == pytest.approx(1e6)
    assert (WEIGHTS / f"autospec-{task}-{degree}.safetensors").stat().st_size < 100_000
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("task", list(FUNCTIONS))
def test_functions_of_matrices(task):
    """No worse than twice Chebyshev's interpolant that knows the spectrum's ends.

    On a matrix of another scale than the network was trained on.
    """
    A, values, vectors = spd(300, 60.0, seed=4)
    scale = 5.0
    target = FUNCTIONS[task](values * scale, 1.0)
    b = np.random.default_rng(0).normal(size=300)
    exact = (vectors * target) @ vectors.T @ b
    result = pretrained(task, 16).apply_to(scale * A, b, rng=0)
    ends = {"low": scale * values[0], "high": scale * values[-1]}
    rival = chebyshev_recurrence(task, 16, **ends).apply_to(scale * A, b)
    error = np.linalg.norm(result - exact)
    assert error < 0.1 * np.linalg.norm(exact)
    assert error < 2 * np.linalg.norm(rival - exact)


@pytest.mark.parametrize(("task", "power"), [("inv", -1.0), ("invsqrt", -0.5), ("sqrt", 0.5)])
def test_scale_equivariance(task, power):
    A, _, _ = spd(60, 100.0)
    b = np.random.default_rng(0).normal(size=60)
    model = pretrained(task, 16)
    # Every power of two is exact, and the probe's bound scales along.
    once, scaled = (model.apply_to(c * A, b, rng=0) for c in (1.0, 1024.0))
    assert np.allclose(scaled, 1024.0**power * once, rtol=1e-10)


def test_polynomials_are_symmetric_linear_and_commute():
    A, _, _ = spd(50, 200.0)
    P = pretrained("precond", 12).operator(A, rng=0)
    dense = P @ np.eye(50)
    scale = np.abs(dense).max()
    assert np.allclose(dense, dense.T, atol=1e-10 * scale)
    assert np.allclose(dense @ A, A @ dense, atol=1e-10 * scale)
    x, y = np.random.default_rng(0).normal(size=(2, 50))
    assert np.allclose(P @ (2 * x - y), 2 * (P @ x) - P @ y, atol=1e-10 * scale)
    assert np.allclose(P.rmatvec(x), P @ x)
    assert np.allclose(P.T @ np.eye(50), dense)


def test_polynomial_is_what_the_operator_applies():
    A, values, vectors = spd(50, 200.0)
    model = pretrained("inv", 16)
    probe = model.probe(A, rng=0)
    applied = model.operator(A, probe) @ np.eye(50)
    expected = (vectors * model.polynomial(values, probe)) @ vectors.T
    assert np.allclose(applied, expected, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("degree", [6, 12, 24])
def test_products_per_application(degree):
    A = poisson(15)
    model = pretrained("precond", degree)
    counting = Counting(A)
    M = model.operator(counting, model.probe(A, rng=0))
    M @ np.ones(225)
    assert counting.count == degree
    M @ np.ones((225, 3))
    assert counting.count == degree * 4


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1.0, 6.0))
def test_preconditioners_are_positive_definite(seed, exponent):
    """P(x) > 0 at every eigenvalue of operators in the trained range."""
    rng = np.random.default_rng(seed)
    values = np.sort(10 ** -rng.uniform(0, exponent, 120))
    model = pretrained("precond", 12)
    A = sp.diags_array(values).tocsr()
    assert model.polynomial(values, model.probe(A, rng=seed)).min() > 0


def test_fewer_iterations_on_a_large_operator():
    """An operator far larger than any that the network was trained on."""
    A = poisson(150)
    b = np.ones(A.shape[0])
    iterations = []
    for M in (None, pretrained("precond", 12).operator(A, rng=0)):
        steps = []
        x, info = cg(A, b, rtol=1e-8, M=M, callback=steps.append)
        assert info == 0
        assert np.linalg.norm(b - A @ x) <= 1e-8 * np.linalg.norm(b)
        iterations.append(len(steps))
    assert iterations[1] < iterations[0] / 6


def test_a_known_smallest_eigenvalue_is_used():
    A = sp.diags_array(np.geomspace(1e-5, 1, 3000)).tocsr()
    model = pretrained("precond", 12)
    given = model.probe(A, rng=0, lam_min=1e-5)
    guessed = model.probe(A, rng=0)
    assert given.interval.low == pytest.approx(1e-5 / given.lam_max)
    assert not np.allclose(model.coefficients(given).rows, model.coefficients(guessed).rows)


def test_tensors():
    A, _, _ = spd(40, 30.0)
    b = np.random.default_rng(0).normal(size=(40, 2))
    model = pretrained("invsqrt", 16)
    expected = model.apply_to(A, b, rng=0)
    tensor = model.apply_to(torch.tensor(A), torch.tensor(b), rng=0)
    assert torch.allclose(tensor, torch.tensor(expected), rtol=1e-10)
    single = model.apply_to(torch.tensor(A).float(), torch.tensor(b).float(), rng=0)
    assert single.dtype == torch.float32
    assert torch.allclose(single, tensor.float(), rtol=1e-2, atol=1e-3)


def test_preconditions_lobpcg():
    A = poisson(30)
    X = np.random.default_rng(0).normal(size=(900, 6))
    M = pretrained("precond", 12).operator(A, rng=0)
    values = lobpcg(A, X, M=M, largest=False, tol=1e-5, maxiter=60)[0]
    exact = eigsh(A.tocsc(), 4, sigma=0.0, which="LM")[0]
    assert np.allclose(np.sort(values)[:4], np.sort(exact), rtol=1e-6)


# Eigenpairs.


def test_lowest_eigenpairs():
    A = poisson(25)
    counting = Counting(A)
    seen = []
    result = autospec_eigsh(
        counting, 5, rng=0, tol=1e-9, callback=lambda values, residuals: seen.append(residuals)
    )
    exact = np.sort(np.linalg.eigvalsh(A.toarray()))[:5]
    assert result.converged
    assert np.allclose(result.values, exact, rtol=1e-10)
    assert np.allclose(result.vectors.T @ result.vectors, np.eye(5), atol=1e-10)
    assert np.allclose(
        np.linalg.norm(A @ result.vectors - result.vectors * result.values, axis=0),
        result.residuals,
        atol=1e-10,
    )
    assert counting.count == result.matvecs
    assert len(seen) == len(result.trace)


def test_lowest_eigenpairs_of_a_graph():
    graph = sp.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(200, 200))
    laplacian = sp.csr_array(sp.csgraph.laplacian(graph)).astype(float)
    result = autospec_eigsh(laplacian, 4, nullspace=np.ones(200), rng=0)
    exact = 2 - 2 * np.cos(np.pi * np.arange(4) / 200)
    assert np.allclose(result.values, exact, atol=1e-8)


def test_unconverged_eigenpairs_warn():
    with pytest.warns(UserWarning, match="1 iterations reached a residual of"):
        result = autospec_eigsh(poisson(20), 4, maxiter=1, rng=0)
    assert not result.converged


def test_interrupted_eigenpairs_are_returned():
    def interrupt(values, residuals):
        raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="raise maxiter"):
        result = autospec_eigsh(poisson(10), 2, rng=0, callback=interrupt)
    assert len(result.trace) == 1


# Report.


@pytest.mark.parametrize("task", ["precond", "invsqrt", "filter"])
def test_report(task):
    from matplotlib import pyplot as plt

    A, values, _ = spd(200, 1000.0)
    cut = float(values[40]) if task == "filter" else None
    model = pretrained(task, 16 if task == "invsqrt" else 12)
    report = autospec_report(model, A, rng=0, cut=cut, lam_min=values[0])
    assert not report.fallback
    if task != "invsqrt":  # an interpolant's error is not the best one's
        assert report.chebyshev_alternations >= model.degree
    assert report.size > 0
    assert "Chebyshev" in str(report)
    ax = report.plot()
    assert len(ax.lines) == 2
    plt.close("all")


# Bad input.


@pytest.mark.parametrize(
    ("A", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, "A must be square"),
        (np.eye(3, dtype=int), TypeError, "A must hold floats, got int64"),
        (torch.eye(3, dtype=torch.int64), TypeError, "A must hold floats, got torch.int64"),
        ([[1.0]], TypeError, "A must be a sparse matrix"),
        (np.diag([1.0, -1.0, 2.0]), ValueError, "must be positive definite"),
        (np.zeros((3, 3)), ValueError, "must be positive definite"),
        (np.diag([1.0, np.nan, 2.0]), ValueError, "A must be finite"),
        (np.triu(np.ones((30, 30))), ValueError, "A must be symmetric"),
        (np.diag([0.0, 1.0, 2.0]), ValueError, "must not be singular"),
    ],
    ids=[
        "not square",
        "integers",
        "integer tensor",
        "list",
        "indefinite",
        "zero",
        "not a number",
        "not symmetric",
        "singular",
    ],
)
def test_bad_operators(A, error, message):
    with pytest.raises(error, match=message):
        pretrained("precond", 12).probe(A, rng=0)


def test_bad_arguments():
    with pytest.raises(ValueError, match="task must be one of"):
        AutoSpec("cube")
    with pytest.raises(ValueError, match="form must be one of"):
        AutoSpec("inv", form="power")
    with pytest.raises(ValueError, match="degree must be an integer >= 1"):
        AutoSpec("inv", 0)
    with pytest.raises(ValueError, match="task and degree must be one of precond 6"):
        pretrained("precond", 13)
    model = pretrained("filter", 12)
    A, _, _ = spd(30, 10.0)
    with pytest.raises(ValueError, match="cut must be given for task='filter'"):
        model.operator(A, rng=0)
    with pytest.raises(ValueError, match="cut must be a finite number > 0 and <"):
        model.probe(A, rng=0, cut=1e9)
    with pytest.raises(ValueError, match="lam_min must be"):
        model.probe(A, rng=0, lam_min=-1.0)
    with pytest.raises(ValueError, match=r"nullspace must have shape \(30,\)"):
        model.probe(A, rng=0, nullspace=np.ones((4, 1)))
    probe = model.probe(A, rng=0, cut=0.5)
    with pytest.raises(ValueError, match="lam_min must not be given beside a probe"):
        model.apply_to(A, np.ones(30), probe, lam_min=0.1)
    with pytest.raises(ValueError, match=r"B must have shape \(30,\) or \(30, r\)"):
        model.apply_to(A, np.ones(31), probe)
    with pytest.raises(ValueError, match="B must be finite"):
        model.apply_to(A, np.full(30, np.nan), probe)
    with pytest.raises(TypeError, match="B must be of A's kind"):
        model.apply_to(A, torch.ones(30), probe)
    with pytest.raises(TypeError, match="use apply_to"):
        model.operator(torch.tensor(A), probe)
    with pytest.raises(ValueError, match="probe must have 5 steps, got 16"):
        AutoSpec("filter", probe_steps=5).coefficients(probe)
    with pytest.raises(ValueError, match=r"rows must have shape \(degree \+ 1, 4\)"):
        RecurrenceCoefficients(np.ones((3, 3)))
    with pytest.raises(ValueError, match="rows must be finite"):
        RecurrenceCoefficients(np.full((3, 4), np.inf))


def test_bad_training_arguments():
    model = AutoSpec("inv", 3, hidden=4, probe_steps=3)
    with pytest.raises(ValueError, match="kappa must be an ascending range"):
        model.fit_synthetic(kappa=(100.0, 10.0))
    with pytest.raises(ValueError, match="families must be one of"):
        model.fit_synthetic(families=["round"], steps=1, pool=4)
    with pytest.raises(ValueError, match="steps must be an integer >= 1"):
        model.fit_synthetic(steps=0)


def test_bad_eigenproblems():
    A = poisson(5)
    with pytest.raises(ValueError, match="k \\+ guard must be at most the size 25"):
        autospec_eigsh(A, 24)
    with pytest.raises(ValueError, match=r"model.task must be one of 'filter'"):
        autospec_eigsh(A, 2, model=pretrained("inv", 16))


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        AutoSpec.load(tmp_path / "nothing.safetensors")
    save_file({"x": torch.ones(1)}, str(tmp_path / "other.safetensors"))
    with pytest.raises(ValueError, match=r"must be written by AutoSpec\.save"):
        AutoSpec.load(tmp_path / "other.safetensors")


def test_the_training_command(tmp_path):
    train_weights(task="inv", degree=3, steps=2, seed=0, out=tmp_path)
    assert AutoSpec.load(tmp_path / "autospec-inv-3.safetensors").degree == 3
    with pytest.raises(BadParameter, match="nothing to train"):
        train_weights(task="cube", degree=3, steps=2, seed=0, out=tmp_path)


def test_scipy_sees_an_operator():
    A = poisson(6)
    M = aslinearoperator(pretrained("precond", 6).operator(A, rng=0))
    assert M.shape == (36, 36)
    assert M.dtype == np.float64
