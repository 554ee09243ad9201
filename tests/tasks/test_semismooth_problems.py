"""Semismooth problems: derivatives by differences, away from kinks, and what they model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime

from thalweg.curvature import TorchFunction
from thalweg.tasks import (
    ContactMembrane,
    contact_membrane,
    digits_svm,
    lipschitz_network,
    penalized_factorization,
    singular_values,
)


@pytest.mark.parametrize("gamma", [0.0, 1e3])
def test_a_membrane_is_the_derivative_of_its_energy(gamma):
    membrane = ContactMembrane(7, gamma=gamma)
    u = 0.1 * np.random.default_rng(0).standard_normal(membrane.d)
    numeric = approx_fprime(u, lambda v: membrane(v)[0], 1e-7)
    np.testing.assert_allclose(membrane(u)[1], numeric, atol=1e-5)
    p = np.random.default_rng(1).standard_normal(membrane.d)
    np.testing.assert_allclose(membrane.hessian(u) @ p, membrane.product(u, p), atol=1e-11)
    h = 1e-7  # no quadrature point crosses the obstacle
    change = (membrane(u + h * p)[1] - membrane(u - h * p)[1]) / (2 * h)
    np.testing.assert_allclose(membrane.product(u, p), change, atol=1e-5)


def test_matrices_are_those_of_finite_elements():
    membrane = ContactMembrane(10)
    assert membrane.stiffness.shape == membrane.mass.shape == (81, 81)
    np.testing.assert_allclose(membrane.stiffness.diagonal(), 4)
    bubble = np.prod(np.sin(np.pi * membrane.nodes), axis=0)
    assert bubble @ membrane.mass @ bubble == pytest.approx(0.25, rel=0.05)
    energy = bubble @ membrane.stiffness @ bubble
    assert energy == pytest.approx(np.pi**2 / 2, rel=0.03)
    seeds = [contact_membrane(np.random.default_rng(s), 10) for s in (0, 0, 1)]
    assert seeds[0] is seeds[1]
    assert not np.array_equal(seeds[0].lower, seeds[2].lower)


def test_a_support_vector_machine_agrees_with_automatic_differentiation():
    svm = digits_svm(np.random.default_rng(0), 20, shifts=2)
    derived = TorchFunction(svm.loss)
    w, p = np.random.default_rng(1).standard_normal((2, svm.d))
    value, gradient = svm(w)
    assert value == pytest.approx(derived(w))
    np.testing.assert_allclose(gradient, derived.jac(w), atol=1e-12)
    np.testing.assert_allclose(svm.hessian(w), derived.hess(w), atol=1e-12)
    np.testing.assert_allclose(svm.product(w, p), svm.hessian(w) @ p, atol=1e-12)


def test_a_factorization_penalizes_negative_entries():
    problem = penalized_factorization(np.random.default_rng(0), images=10, rho=3.0, ridge=0.0)
    free = penalized_factorization(np.random.default_rng(0), images=10, rho=0.0, ridge=0.0)
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(problem.d))
    penalty = 1.5 * x.clamp(max=0).square().sum()
    assert float(problem.loss(x) - free.loss(x)) == pytest.approx(float(penalty))


def test_a_network_pays_for_singular_values_beyond_the_bound():
    def loss(bound, x):
        return float(lipschitz_network(np.random.default_rng(0), images=20, bound=bound).loss(x))

    problem = lipschitz_network(np.random.default_rng(0), images=20)
    x = torch.from_numpy(problem.x0)
    W1, W2 = x[: 16 * 64].reshape(16, 64), x[16 * 65 : 16 * 65 + 160].reshape(10, 16)
    excess = sum((torch.linalg.svdvals(W) - 1.0).clamp(min=0).square().sum() for W in (W1, W2))
    assert loss(1.0, x) - loss(100.0, x) == pytest.approx(float(5 * excess))
    np.testing.assert_allclose(singular_values(W1).flip(0), torch.linalg.svdvals(W1))
