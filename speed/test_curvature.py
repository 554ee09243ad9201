"""Lazy semismooth Newton beside a Newton step's own linear algebra, and beside SciPy's Newton."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from scipy import linalg

from thalweg.curvature import LazySSN, TorchFunction, minimize_lazy_ssn
from thalweg.tasks import contact_membrane, digits_svm, penalized_factorization

pytestmark = pytest.mark.usefixtures("one_thread")

TARGET = 1e-6


def lazy(svm, hess_every):
    return minimize_lazy_ssn(
        svm, svm.x0, jac=True, hess=svm.hessian, hess_every=hess_every, gtol=TARGET
    )


def trust_exact(svm):
    return scipy.optimize.minimize(
        svm, svm.x0, jac=True, hess=svm.hessian, method="trust-exact", options={"gtol": TARGET}
    )


@pytest.mark.parametrize("name", ["m = 1", "m = 5", "automatic m", "trust-exact", "L-BFGS-B"])
def test_svm(benchmark, name):
    svm = digits_svm(np.random.default_rng(0), 200, shifts=4)
    run = {
        "m = 1": lambda: lazy(svm, 1),
        "m = 5": lambda: lazy(svm, 5),
        "automatic m": lambda: lazy(svm, "auto"),
        "trust-exact": lambda: trust_exact(svm),
        "L-BFGS-B": lambda: scipy.optimize.minimize(
            svm,
            svm.x0,
            jac=True,
            method="L-BFGS-B",
            options={"ftol": 0.0, "gtol": TARGET / 10, "maxiter": 10_000},
        ),
    }[name]
    benchmark.group = "squared hinge, 7188 x 200"
    benchmark.pedantic(run, rounds=3, warmup_rounds=1)


def test_a_trial_costs_its_factorization_and_a_gradient(capsys, seconds_in_turn):
    svm = digits_svm(np.random.default_rng(0), 400)
    H = svm.hessian(svm.x0)
    result = minimize_lazy_ssn(
        svm, svm.x0, jac=True, hess=lambda w: H, hess_every=1000, maxiter=30, gtol=0.0
    )

    def bare():
        for _ in range(result.n_factor):
            factor = linalg.cho_factor(H + np.eye(400), lower=True, check_finite=False)
            linalg.cho_solve(factor, svm(svm.x0)[1], check_finite=False)

    best = seconds_in_turn(
        {
            "bare": bare,
            "lazy": lambda: minimize_lazy_ssn(
                svm, svm.x0, jac=True, hess=lambda w: H, hess_every=1000, maxiter=30, gtol=0.0
            ),
        },
        5,
    )
    ratio = best["lazy"] / best["bare"]
    with capsys.disabled():
        print(f"\na trial, of its factorization and gradient: {ratio:.2f}")
    assert ratio <= 1.3


def test_laziness_saves_time_beside_a_hessian_every_step(capsys, seconds_in_turn):
    svm = digits_svm(np.random.default_rng(0), 300, shifts=9)
    best = seconds_in_turn({"lazy": lambda: lazy(svm, 5), "m = 1": lambda: lazy(svm, 1)}, 2)
    ratio = best["lazy"] / best["m = 1"]
    with capsys.disabled():
        print(f"\nm = 5, of m = 1: {ratio:.2f}")
    assert ratio <= 1.1


def test_sparse_factorizations_beat_l_bfgs_on_a_fine_mesh(capsys, seconds_in_turn):
    membrane = contact_membrane(np.random.default_rng(0), 64, gamma=0.0)
    bounds = [(low, None) for low in membrane.lower]
    best = seconds_in_turn(
        {
            "lazy": lambda: minimize_lazy_ssn(
                membrane,
                membrane.x0,
                jac=True,
                hess=membrane.hessian,
                bounds=bounds,
                metric=membrane.mass,
                gtol=1e-6,
            ),
            "L-BFGS-B": lambda: scipy.optimize.minimize(
                membrane,
                membrane.x0,
                jac=True,
                bounds=bounds,
                options={"ftol": 0.0, "gtol": 1e-7, "maxiter": 10_000, "maxfun": 20_000},
            ),
        },
        2,
    )
    ratio = best["lazy"] / best["L-BFGS-B"]
    with capsys.disabled():
        print(f"\nbounds on a mesh, of L-BFGS-B: {ratio:.2f}")
    assert ratio <= 1.0


def test_hessians_in_chunks_beat_columns_one_by_one(capsys, seconds_in_turn):
    problem = penalized_factorization(np.random.default_rng(0))
    chunked, single = TorchFunction(problem.loss), TorchFunction(problem.loss, chunk_size=1)
    best = seconds_in_turn(
        {
            "64 columns": lambda: chunked.hess(problem.x0),
            "1 column": lambda: single.hess(problem.x0),
            "torch.func.hessian": lambda: torch.func.hessian(problem.loss)(
                torch.from_numpy(problem.x0)
            ),
        },
        3,
    )
    ratios = {name: f"{s / best['64 columns']:.2f}" for name, s in best.items()}
    with capsys.disabled():
        print("\na Hessian, of that in chunks of 64: ", ratios)
    assert best["64 columns"] <= 0.5 * best["1 column"]
    assert best["64 columns"] <= 1.2 * best["torch.func.hessian"]


def test_the_optimizer_costs_what_the_minimizer_does(capsys, seconds_in_turn):
    problem = penalized_factorization(np.random.default_rng(0), images=40)

    def by_optimizer():
        x = torch.nn.Parameter(torch.from_numpy(problem.x0.copy()))
        optimizer = LazySSN([x])
        for _ in range(10):
            optimizer.step(lambda: problem.loss(x))

    def by_minimizer():
        minimize_lazy_ssn(problem.loss, problem.x0, jac="torch", maxiter=10, gtol=0.0)

    best = seconds_in_turn({"LazySSN": by_optimizer, "minimize_lazy_ssn": by_minimizer}, 4)
    ratio = best["LazySSN"] / best["minimize_lazy_ssn"]
    with capsys.disabled():
        print(f"\nten steps of LazySSN, of the minimizer: {ratio:.2f}")
    assert ratio <= 1.5
