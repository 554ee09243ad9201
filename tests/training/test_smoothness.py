"""smoothness_report: degrees of polynomials, orbits, smoothness constants, bad input."""

import math

import matplotlib as mpl
import numpy as np
import pytest

from thalweg.tasks import (
    asymmetric_factorization,
    flat_quartic,
    maxcut_lagrangian,
    phase_retrieval,
    symmetric_factorization,
)
from thalweg.training import NLPRECOND_KERNELS, minimize_nlprecond, smoothness_report

MATRIX = np.random.default_rng(0).standard_normal((3, 4))


def report_of(f, **options):
    settings = {"x0": np.zeros(f.n), "n_dirs": 8, "rng": 0} | options
    return smoothness_report(f, f.gradient, f.hvp, **settings)


@pytest.mark.parametrize(
    "f",
    [
        symmetric_factorization(np.diag([1.0, 0.5, 0.25, 0.1]), 2),
        asymmetric_factorization(MATRIX, 2, kappa=0.5),
        phase_retrieval(6, 60, np.random.default_rng(1)),
        maxcut_lagrangian(1 - np.eye(4), 2, penalty=1.0),
    ],
    ids=["symmetric", "asymmetric, κ > 0", "phase retrieval", "max-cut Lagrangian"],
)
def test_the_sufficient_condition_holds_in_the_applications(f):
    report = report_of(f, radii=(4, 8, 16, 32))
    assert report.growth_degree_hessian == pytest.approx(2, abs=0.1)
    assert report.growth_degree_gradient == pytest.approx(3, abs=0.1)
    assert report.sufficient_condition
    assert report.witness is None


def test_the_default_radii_suffice_for_a_normalized_factorization():
    report = report_of(symmetric_factorization(np.diag([1.0, 0.5, 0.25, 0.1]), 2))
    assert report.growth_degree_hessian == pytest.approx(2, abs=0.1)
    assert report.growth_degree_gradient == pytest.approx(3, abs=0.1)


def test_the_flat_quartic_fails_with_a_diagonal_as_witness():
    report = report_of(flat_quartic())
    assert not report.sufficient_condition
    assert report.growth_degree_gradient == -math.inf
    np.testing.assert_allclose(np.abs(report.witness), 0.5**0.5, atol=1e-6)
    x = 100 * report.witness
    assert np.linalg.norm(flat_quartic().gradient(x)) < 1e-3
    assert np.linalg.norm(flat_quartic().hvp(x, np.array([1.0, 0.0]))) > 1e3


def test_the_rescaling_orbit_of_an_asymmetric_factorization_is_found():
    f = asymmetric_factorization(MATRIX, 2)
    report = report_of(f)
    assert not report.sufficient_condition
    assert np.linalg.norm(f.gradient(16 * report.witness)) < 1e-3
    assert report.growth_degree_hessian == pytest.approx(2, abs=0.1)


def test_unidentified_phases_fail():
    # Three measurements do not span five dimensions.
    assert not report_of(phase_retrieval(5, 3, np.random.default_rng(0))).sufficient_condition


def test_a_given_degree_is_checked():
    f = symmetric_factorization(np.diag([1.0, 0.5]), 1)
    assert report_of(f, R=2).sufficient_condition
    assert not report_of(f, R=1).sufficient_condition
    assert not report_of(f, R=3).sufficient_condition


def test_hessians_and_products_give_the_same_report():
    f = flat_quartic()

    def hess(x):
        return np.column_stack([f.hvp(x, e) for e in np.eye(2)])

    by_matrix = smoothness_report(f, f.gradient, hess, x0=[1.0, 2.0], n_dirs=4, rng=0)
    by_product = report_of(f, x0=[1.0, 2.0], n_dirs=4)
    np.testing.assert_allclose(by_matrix.hessian_norm, by_product.hessian_norm, rtol=1e-12)
    assert by_matrix.aniso_L.keys() == {0.1, 1.0, 10.0}
    for Lbar, L in by_matrix.aniso_L.items():
        assert by_product.aniso_L[Lbar] == pytest.approx(L, rel=1e-10)


def test_large_hessians_are_not_assembled(monkeypatch):
    f = symmetric_factorization(np.diag([1.0, 0.5, 0.25, 0.1]), 2)
    dense = report_of(f, n_dirs=3)
    monkeypatch.setattr("thalweg.training.smoothness.DENSE", 4)
    monkeypatch.setattr("thalweg.training.smoothness.PROBES", 2000)
    monkeypatch.setattr("thalweg.training.precond_hessian.DENSE", 4)
    monkeypatch.setattr("thalweg.training.precond_hessian.LANCZOS_VECTORS", 7)
    sparse = report_of(f, n_dirs=3)
    # E‖Hz‖² = ‖H‖_F²; its standard deviation is at most √2 ‖H‖_F².
    np.testing.assert_allclose(sparse.hessian_norm, dense.hessian_norm, rtol=4 * 0.71 / 2000**0.5)
    assert sparse.sufficient_condition
    for Lbar, L in dense.aniso_L.items():
        assert sparse.aniso_L[Lbar] == pytest.approx(L, rel=5e-3)
    for L1, L0 in dense.L0L1_fit.items():
        assert sparse.L0L1_fit[L1] == pytest.approx(L0, rel=5e-3, abs=1e-9)


def test_the_constants_of_a_quartic_in_one_variable():
    # f = x⁴/4: |f''| = 3x² and |f'| = |x|³, on radii 1, 2 and 4.
    report = smoothness_report(
        lambda x: float(x[0] ** 4 / 4),
        lambda x: x**3,
        lambda x: np.array([[3 * x[0] ** 2]]),
        x0=[0.0],
        radii=(1, 2, 4),
        n_dirs=1,
        Lbars=(1.0, 3.0),
        rng=0,
    )
    for L1, L0 in report.L0L1_fit.items():
        least = max(0.0, *(3 * r**2 - L1 * r**3 for r in (1, 2, 4)))
        assert least == pytest.approx(L0)
    for Lbar, L in report.aniso_L.items():
        values = [3 * r**2 / math.hypot(1, r**3 / Lbar) / Lbar for r in (1, 2, 4)]
        assert max(values) == pytest.approx(L)
    assert report.growth_degree_hessian == pytest.approx(2)
    assert report.growth_degree_gradient == pytest.approx(3)


@pytest.mark.parametrize("kernel", [k for k in NLPRECOND_KERNELS if k != "quadratic"])
def test_the_measured_constant_is_a_step_size_that_descends(kernel):
    f = symmetric_factorization(np.diag([1.0, 0.5, 0.25, 0.1]), 2)
    # Between the spheres L could be larger than on them: hence many of them, and a margin.
    radii = np.geomspace(0.1, 32, 8)
    report = report_of(f, radii=radii, kernel=kernel, Lbars=(1.0,), n_dirs=4)
    x0 = 10 * np.random.default_rng(1).standard_normal(f.n)
    result = minimize_nlprecond(
        f.value_and_gradient, x0, kernel=kernel, gamma=0.9 / report.aniso_L[1.0], maxiter=500
    )
    assert (np.diff(result.trace["fun"]) <= 1e-14).all()


def test_the_plot_shows_both_norms():
    mpl.use("Agg")
    ax = report_of(flat_quartic()).plot()
    assert len(ax.lines) == 2
    assert ax.get_title() == "sufficient condition: no"
    assert report_of(flat_quartic(), n_dirs=1).plot(ax) is ax


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x0": [math.nan, 0.0]}, ValueError, "x0 must be finite"),
        ({"radii": (1,)}, ValueError, "radii must be at least two increasing numbers > 0"),
        ({"radii": (2, 1)}, ValueError, "radii must be at least two increasing numbers > 0"),
        ({"radii": (0, 1)}, ValueError, "radii must be at least two increasing numbers > 0"),
        ({"n_dirs": 0}, ValueError, "n_dirs must be an integer >= 1"),
        ({"R": -1}, ValueError, "R must be a finite number >= 0"),
        ({"Lbars": (0.0,)}, ValueError, "Lbar must be a finite number > 0"),
        ({"kernel": "tanh"}, ValueError, "kernel must be one of"),
        ({"rng": "a"}, TypeError, "rng must be"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        report_of(flat_quartic(), **options)


def test_bad_functions_are_refused():
    f = flat_quartic()
    with pytest.raises(ValueError, match="fun must be finite on the spheres"):
        smoothness_report(lambda x: math.inf, f.gradient, f.hvp, x0=[0.0, 0.0])
    with pytest.raises(ValueError, match=r"jac\(x\) must have shape"):
        smoothness_report(f, lambda x: x[:1], f.hvp, x0=[0.0, 0.0])
    with pytest.raises(ValueError, match=r"hess\(x\) must have shape"):
        smoothness_report(f, f.gradient, lambda x: x, x0=[0.0, 0.0])
    with pytest.raises(ValueError, match=r"hvp\(x, v\) must be finite"):
        smoothness_report(f, f.gradient, lambda x, v: math.nan * v, x0=[0.0, 0.0])
