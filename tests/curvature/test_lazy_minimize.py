"""The interface of minimize_lazy_ssn: SciPy's conventions, tensors, counts and bad input."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.optimize
import torch
from kinked_functions import SquaredHinge, solve
from scipy import sparse
from scipy.sparse.linalg import LinearOperator

from thalweg.curvature import BoxPenalty, L1Penalty, TorchFunction, minimize_lazy_ssn


def test_use_through_scipy():
    f, values = SquaredHinge(), []
    result = scipy.optimize.minimize(
        lambda w, c: c * f(w),
        np.zeros(f.d),
        args=(2.0,),
        jac=lambda w, c: c * f.jac(w),
        hess=lambda w, c: c * f.hess(w),
        method=minimize_lazy_ssn,
        bounds=[(None, 0.2)] * f.d,
        tol=1e-9,
        callback=lambda intermediate_result: values.append(intermediate_result.fun),
        options={"hess_every": 3, "maxiter": 100},
    )
    assert result.success
    assert result.x.max() <= 0.2
    assert values[-1] == result.fun
    expected = scipy.optimize.minimize(f, np.zeros(f.d), jac=f.jac, bounds=[(None, 0.2)] * f.d)
    assert result.fun <= 2 * expected.fun + 1e-9
    by_bounds = scipy.optimize.minimize(
        lambda w: (f(w), f.jac(w)),
        np.zeros(f.d),
        jac=True,
        hessp=f.hessp,
        method=minimize_lazy_ssn,
        bounds=scipy.optimize.Bounds(-np.inf, 0.2),
    )
    np.testing.assert_allclose(by_bounds.x, result.x, atol=1e-6)


def test_functions_of_tensors():
    f = SquaredHinge()
    A = torch.from_numpy(f.A)

    def loss(w):
        return (1 - A @ w).clamp(min=0).square().mean() + f.mu * w.square().sum() / 2

    expected = solve(f)
    for options in ({}, {"hessp": "torch", "cg_tol": 1e-8}):
        result = minimize_lazy_ssn(loss, np.zeros(f.d), jac="torch", **options)
        assert result.success
        assert (result.nit, result.nhev) == (expected.nit, expected.nhev)
        np.testing.assert_allclose(result.x, expected.x, atol=1e-9)
    derived = TorchFunction(loss)
    by_scipy = scipy.optimize.minimize(
        derived, np.zeros(f.d), jac=derived.jac, hess=derived.hess, method=minimize_lazy_ssn
    )
    np.testing.assert_allclose(by_scipy.x, expected.x, atol=1e-9)
    peer = scipy.optimize.minimize(
        derived, np.zeros(f.d), jac=derived.jac, hessp=derived.hessp, method="trust-ncg"
    )
    np.testing.assert_allclose(peer.x, expected.x, atol=1e-3)


def test_the_dtype_of_a_tensor_is_kept():
    seen = set()

    def loss(w):
        seen.add(w.dtype)
        return (w - 1).square().sum() + (w - 2).clamp(min=0).square().sum()

    result = minimize_lazy_ssn(loss, torch.zeros(3), jac="torch", gtol=1e-5)
    assert result.success
    assert seen == {torch.float32}
    np.testing.assert_allclose(result.x, 1, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
def test_hessians_by_automatic_differentiation(chunk_size):
    f = SquaredHinge()
    A = torch.from_numpy(f.A)
    derived = TorchFunction(
        lambda w, c: c * ((1 - A @ w).clamp(min=0).square().mean() + f.mu * w @ w / 2),
        chunk_size=chunk_size,
    )
    w, p = np.linspace(-1, 1, f.d), np.arange(f.d)
    assert derived(w, 2.0) == pytest.approx(2 * f(w))
    np.testing.assert_allclose(derived.jac(w, 2.0), 2 * f.jac(w), atol=1e-12)
    np.testing.assert_allclose(derived.hess(w, 2.0), 2 * f.hess(w), atol=1e-12)
    np.testing.assert_allclose(derived.hessp(w, p, 2.0), 2 * f.hess(w) @ p, atol=1e-11)


def test_counts_are_those_of_the_calls_and_the_trace_tells_all():
    calls = {"fun": 0, "jac": 0, "hess": 0}
    f = SquaredHinge()

    def counted(name, function):
        def call(w):
            calls[name] += 1
            return function(w)

        return call

    result = minimize_lazy_ssn(
        counted("fun", f),
        np.zeros(f.d),
        jac=counted("jac", f.jac),
        hess=counted("hess", f.hess),
    )
    assert calls == {"fun": result.nfev, "jac": result.njev, "hess": result.nhev}
    trace = result.trace
    assert set(trace) == {
        "time", "fun", "grad_norm", "nhev", "n_factor", "njev", "Lambda", "lam",
    }  # fmt: skip
    assert all(len(column) == result.nit + 1 for column in trace.values())
    assert trace["fun"][-1] == result.fun
    assert trace["nhev"][-1] == result.nhev
    assert trace["grad_norm"][-1] == result.grad_norm
    assert np.all(np.diff(trace["time"]) >= 0)
    np.testing.assert_allclose(result.jac, f.jac(result.x))


def test_the_callback_can_stop_and_ctrl_c_keeps_the_point():
    f = SquaredHinge()

    def stop(x):
        raise StopIteration

    result = minimize_lazy_ssn(f, np.zeros(f.d), jac=f.jac, hess=f.hess, callback=stop)
    assert (result.status, result.nit, result.success) == (99, 1, False)
    evaluations = []

    def interrupted(w):
        evaluations.append(f(w))
        if len(evaluations) == 6:
            raise KeyboardInterrupt
        return evaluations[-1]

    result = minimize_lazy_ssn(interrupted, np.zeros(f.d), jac=f.jac, hess=f.hess)
    assert result.status == 4
    assert result.fun == f(result.x) < evaluations[0]
    budget = solve(f, maxiter=2)
    assert (budget.status, budget.nit) == (1, 2)


def test_the_check_of_the_gradient_forgives_kinks_and_borders():
    # At x0 = 0 the kink of the gradient is within the difference.
    f = lambda x: float(1e6 * np.maximum(0, x[0]) ** 2 + x[0])  # noqa: E731
    result = minimize_lazy_ssn(
        f,
        [0.0],
        jac=lambda x: 2e6 * np.maximum(0, x) + 1,
        hess=lambda x: np.diag(2e6 * (x > 0)),
        maxiter=1,
    )
    assert result.nit == 1
    log = lambda x: -np.log(x[0]) + x[0] if x[0] > 0 else np.inf  # noqa: E731
    result = minimize_lazy_ssn(
        log, [1e-7], jac=lambda x: 1 - 1 / x, hess=lambda x: np.diag(1 / x**2), maxiter=1
    )
    assert result.nit == 1


def test_a_huge_rounding_error_is_no_error_of_the_gradient():
    f = SquaredHinge()
    result = minimize_lazy_ssn(
        lambda w: f(w) + 1e9, np.zeros(f.d), jac=f.jac, hess=f.hess, maxiter=1, gtol=1e-3
    )
    assert result.nit <= 1


GOOD = SquaredHinge()
BAD = [
    ({"jac": None}, ValueError, "jac must be a callable"),
    ({"jac": "2-point"}, ValueError, "jac must be one of"),
    ({"fun": 3}, TypeError, "fun must be callable"),
    ({"jac": lambda w: GOOD.jac(w) * 1.01}, ValueError, "jac must be the gradient"),
    ({"jac": lambda w: -GOOD.jac(w)}, ValueError, "jac must be the gradient"),
    ({"jac": lambda w: np.ones(3)}, ValueError, "the gradient must have shape"),
    ({"jac": lambda w: w * np.nan}, ValueError, "gradient at x0 must be finite"),
    ({"fun": lambda w: np.nan}, ValueError, "objective must be finite at x0"),
    ({"fun": lambda w: 1.0, "jac": True}, TypeError, r"fun must return \(value, gradient\)"),
    ({"hess": None}, ValueError, r"hess\(x\) or hessp"),
    ({"hess": "2-point"}, ValueError, r"hess\(x\) or hessp"),
    ({"hess": lambda w: np.eye(3)}, ValueError, r"Hessian must have shape \(12, 12\)"),
    ({"hess": lambda w: np.triu(np.ones((12, 12)))}, ValueError, "Hessian must be symmetric"),
    ({"hess": lambda w: np.full((12, 12), np.nan)}, ValueError, "at iteration 0"),
    (
        {"hess": lambda w: sparse.csr_array(np.triu(np.ones((12, 12))))},
        ValueError,
        "Hessian must be symmetric",
    ),
    (
        {"hess": lambda w: LinearOperator((3, 3), matvec=lambda p: p, dtype=float)},
        ValueError,
        r"Hessian must have shape \(12, 12\)",
    ),
    (
        {
            "hess": lambda w: LinearOperator((12, 12), matvec=lambda p: p, dtype=float),
            "linear_solver": "cholesky",
        },
        ValueError,
        "needs a matrix",
    ),
    (
        {"hess": None, "hessp": lambda w, p: p[:2]},
        ValueError,
        "the product of hessp must have shape",
    ),
    ({"hess_every": 0}, ValueError, "hess_every must be"),
    ({"hess_every": 2.5}, TypeError, "hess_every must be"),
    ({"alpha": 0.0}, ValueError, "alpha must be"),
    ({"alpha": 1.0}, ValueError, "alpha must be"),
    ({"beta": 0.5}, ValueError, "beta must be"),
    ({"power": 1.5}, ValueError, "power must be"),
    ({"Lambda0": 0.0}, ValueError, "Lambda0 must be"),
    ({"Lambda0": math.nan}, ValueError, "Lambda0 must be"),
    ({"gtol": -1.0}, ValueError, "gtol must be"),
    ({"tol": -1.0}, ValueError, "tol must be"),
    ({"maxiter": 0}, ValueError, "maxiter must be"),
    ({"cg_tol": 0.0}, ValueError, "cg_tol must be"),
    ({"reset_lambda": 1}, ValueError, "reset_lambda must be"),
    ({"linear_solver": "lu"}, ValueError, "linear_solver must be"),
    ({"linear_solver": "spectral", "prox": "nonneg"}, ValueError, "spectral"),
    ({"prox": "l1"}, ValueError, "prox must be"),
    ({"prox": "l1:much"}, ValueError, "the weight in prox"),
    ({"prox": "l1:-1"}, ValueError, "the weight in prox"),
    ({"prox": "box"}, ValueError, "needs bounds"),
    ({"prox": "group"}, ValueError, "prox must be"),
    ({"prox": object()}, TypeError, "lacks value, prox, jac_mask"),
    ({"prox": "l1:1", "bounds": [(0, 1)] * 12}, ValueError, "bounds go with"),
    ({"bounds": [(0, 1)] * 3}, ValueError, "bounds must be 12 pairs"),
    ({"bounds": [(1, 0)] * 12}, ValueError, "low <= high"),
    ({"metric": np.ones(3)}, ValueError, "metric must have shape"),
    ({"metric": -np.ones(12)}, ValueError, "metric must be positive definite"),
    ({"metric": np.ones((12, 12))}, ValueError, "metric must be positive definite"),
    ({"metric": np.triu(np.ones((12, 12)))}, ValueError, "metric must be symmetric"),
    ({"metric": np.eye(3)}, ValueError, r"metric must have shape \(12, 12\)"),
    ({"metric": sparse.eye_array(12) * np.nan}, ValueError, "metric must be finite"),
    ({"metric": -sparse.eye_array(12)}, ValueError, "metric must be positive definite"),
    ({"constraints": [{"type": "eq"}]}, ValueError, "constraints must be None"),
    ({"callback": 3}, TypeError, "callback must be"),
    ({"x0": [1j] * 12}, TypeError, "x0 must be real"),
    ({"x0": []}, ValueError, "x0 must have at least"),
    ({"x0": np.zeros((3, 4))}, ValueError, "x0 must have shape"),
    ({"x0": np.full(12, np.inf)}, ValueError, "x0 must be finite"),
    ({"fun": lambda w: w, "jac": "torch"}, TypeError, "scalar tensor"),
    ({"jac": "torch", "hess": None, "hessp": "2-point"}, ValueError, "hessp must be"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input(change, error, message):
    given = {"fun": GOOD, "x0": np.zeros(12), "jac": GOOD.jac, "hess": GOOD.hess} | change
    with pytest.raises(error, match=message):
        minimize_lazy_ssn(given.pop("fun"), given.pop("x0"), **given)


def test_a_hessian_that_becomes_nan_names_its_iteration():
    calls = []

    def hess(w):
        calls.append(w)
        return GOOD.hess(w) * (np.nan if len(calls) == 2 else 1)

    with pytest.raises(ValueError, match="NaN or inf at iteration 3"):
        minimize_lazy_ssn(GOOD, np.zeros(12), jac=GOOD.jac, hess=hess, hess_every=3)


def test_unknown_options_are_named():
    with pytest.warns(scipy.optimize.OptimizeWarning, match="unknown options: lr"):
        solve(GOOD, lr=1.0)


def test_bad_input_of_the_parts():
    with pytest.raises(ValueError, match="low <= high"):
        BoxPenalty(1.0, 0.0)
    with pytest.raises(ValueError, match="weight must be"):
        L1Penalty(-1.0)
    with pytest.raises(TypeError, match="fun must be callable"):
        TorchFunction(3)
    with pytest.raises(ValueError, match="chunk_size must be"):
        TorchFunction(torch.sum, chunk_size=0)
    with pytest.raises(TypeError, match="like must be a tensor of floats"):
        TorchFunction(torch.sum, torch.zeros(2, dtype=torch.int64))
    assert BoxPenalty(0.0, 1.0).value(np.array([2.0])) == np.inf
