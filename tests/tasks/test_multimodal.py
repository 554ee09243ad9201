"""The functions have the minima and gradients that they say."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from thalweg.tasks import multimodal, soft_rastrigin

FUNCTIONS = [multimodal(name) for name in ("rastrigin", "ackley", "griewank", "levy")]
FUNCTIONS.append(soft_rastrigin())
every_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.name)


@every_function
@pytest.mark.parametrize("n", [1, 2, 10])
def test_gradients_are_those_of_central_differences(function, n):
    points = function.starts(20, n, np.random.default_rng(0))
    h = 1e-5
    for i in range(n):
        step = h * np.eye(n)[i]
        difference = (function.fun(points + step) - function.fun(points - step)) / (2 * h)
        np.testing.assert_allclose(function.jac(points)[:, i], difference, rtol=1e-5, atol=1e-6)


@every_function
@pytest.mark.parametrize("n", [2, 10])
def test_the_minimum_is_zero_at_the_minimizer(function, n):
    x = np.full(n, function.minimizer)
    assert function.fun(x) == pytest.approx(0.0, abs=1e-12)
    np.testing.assert_allclose(function.jac(x), 0.0, atol=1e-12)
    assert (function.fun(function.starts(10_000, n, np.random.default_rng(0))) > 0).all()


@every_function
def test_batches_are_rows(function):
    points = function.starts(6, 3, np.random.default_rng(0))
    rows = np.array([function.fun(row) for row in points])
    np.testing.assert_allclose(function.fun(points), rows, rtol=1e-12)
    np.testing.assert_allclose(function.fun(points.reshape(2, 3, 3)).ravel(), rows, rtol=1e-12)


def test_the_barrier_of_the_soft_rastrigin_function():
    function = soft_rastrigin(1.5)

    def value(x):
        return float(function.fun(np.array([x])))

    well = minimize_scalar(value, bounds=(0.7, 1.2), method="bounded").x
    top = minimize_scalar(lambda x: -value(x), bounds=(0.3, 0.8), method="bounded").x
    assert well == pytest.approx(0.898, abs=1e-3)
    assert top == pytest.approx(0.561, abs=1e-3)
    assert value(top) - value(well) == pytest.approx(0.16693, abs=1e-5)


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"name must be one of 'rastrigin', .*, got 'sphere'"):
        multimodal("sphere")
