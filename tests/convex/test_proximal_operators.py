"""Operators and adapters: a prox minimizes what it says, wherever it comes from."""

from __future__ import annotations

import numpy as np
import pyproximal
import pytest
import skglm.penalties
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skglm.penalties import L2_1, WeightedGroupL2

from thalweg.convex import (
    L1,
    AdaProx,
    Box,
    ElasticNet,
    GroupLasso,
    NuclearNorm,
    Simplex,
    as_proximal,
    minimize_adaprox,
)

GROUPS = [0, 0, 1, 2, 2, 2]
OPERATORS = {
    "l1": L1(0.7),
    "positive l1": L1(0.7, positive=True),
    "elastic net": ElasticNet(0.9, 0.3),
    "groups": GroupLasso(0.5, GROUPS),
    "unscaled groups": GroupLasso(0.5, GROUPS, scaled=False),
    "rows": GroupLasso(0.5, axis=1),
    "box": Box(-0.5, 1.0),
    "box of arrays": Box(np.linspace(-1, 0, 6), np.linspace(0, 2, 6)),
    "simplex": Simplex(2.0),
    "nuclear": NuclearNorm(0.6, shape=(2, 3)),
}
EACH = pytest.mark.parametrize("name", OPERATORS)


def shaped(name, v):
    return v.reshape(2, 3) if name == "rows" else v


@EACH
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.floats(0.05, 5))
def test_prox_minimizes_the_penalty_plus_the_squared_distance(name, seed, alpha):
    """No feasible point near or far is better, and the prox is nonexpansive."""
    rng, operator = np.random.default_rng(seed), OPERATORS[name]
    v, other = (shaped(name, 2 * rng.standard_normal(6)) for _ in range(2))

    def objective(u):
        return operator(u) + float(np.sum((u - v) ** 2)) / (2 * alpha)

    u = operator.prox(v.copy(), alpha)
    assert np.isfinite(objective(u))
    for size in (1e-3, 0.1, 1.0):
        for _ in range(20):
            trial = operator.prox(u + size * rng.standard_normal(v.shape), 1e-12)
            assert objective(trial) >= objective(u) - 1e-9
    moved = operator.prox(other.copy(), alpha)
    assert np.linalg.norm(moved - u) <= np.linalg.norm(other - v) * (1 + 1e-12)


@EACH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tensors_are_treated_as_arrays(name, dtype):
    rng, operator = np.random.default_rng(1), OPERATORS[name]
    v = shaped(name, 2 * rng.standard_normal(6))
    tensor = torch.from_numpy(v).to(dtype)
    moved = operator.prox(tensor, torch.tensor(0.8, dtype=dtype))
    assert moved.dtype == dtype
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(moved.numpy(), operator.prox(v, 0.8), atol=tolerance)
    assert operator(moved) == pytest.approx(operator(operator.prox(v, 0.8)), rel=1e-5)


def test_indicators_are_infinite_outside():
    assert Box(0.0, 1.0)(np.array([0.5, 1.1])) == np.inf
    assert Simplex()(np.array([0.5, 0.6])) == np.inf
    assert Simplex()(np.array([1.5, -0.5])) == np.inf
    assert L1(1.0, positive=True)(np.array([-1.0])) == np.inf


def test_operators_of_pyproximal_take_their_place():
    v = np.array([3.0, -0.2, 0.7, 9.0])
    for theirs, ours in (
        (pyproximal.L1(0.5), L1(0.5)),
        (pyproximal.Box(-1.0, 1.0), Box(-1.0, 1.0)),
        (pyproximal.Nuclear((2, 2), 0.5), NuclearNorm(0.5, shape=(2, 2))),
    ):
        adapted = as_proximal(theirs)
        np.testing.assert_allclose(adapted.prox(v, 2.0), ours.prox(v, 2.0), atol=1e-12)
        assert adapted.value(v) == pytest.approx(ours(v))
        assert adapted.value(np.zeros(4)) == 0


def test_our_operators_take_the_place_of_pyproximals():
    rng = np.random.default_rng(0)
    A, b = rng.standard_normal((20, 5)), rng.standard_normal(20)
    found = pyproximal.optimization.primal.ProximalGradient(
        _Squares(A, b),
        L1(2.0),
        np.zeros(5),
        tau=1 / np.linalg.norm(A, 2) ** 2,
        niter=500,
    )
    ours = minimize_adaprox(_Squares(A, b).both, np.zeros(5), prox=L1(2.0), maxiter=5000)
    np.testing.assert_allclose(ours.x, found, atol=1e-5)


class _Squares:
    def __init__(self, A, b):
        self.A, self.b = A, b

    def __call__(self, x):
        return float(np.sum((self.A @ x - self.b) ** 2)) / 2

    def grad(self, x):
        return self.A.T @ (self.A @ x - self.b)

    def both(self, x):
        return self(x), self.grad(x)


def test_a_penalty_of_skglm_takes_its_place():
    v = np.array([3.0, -0.2, 0.7, 9.0, -1.0, 0.1])
    adapted = as_proximal(skglm.penalties.L1(0.5))
    np.testing.assert_allclose(adapted.prox(v, 2.0), L1(0.5).prox(v, 2.0), atol=1e-12)
    assert adapted.value(v) == pytest.approx(L1(0.5)(v))

    class WithProxVec:
        def value(self, w):
            return 0.0

        def prox_vec(self, w, stepsize):
            return w.clip(0)

    assert as_proximal(WithProxVec()).prox(v, 1.0).min() == 0


@pytest.mark.slow
def test_other_penalties_of_skglm_take_their_place():
    v = np.array([3.0, -0.2, 0.7, 9.0, -1.0, 0.1])
    for theirs, ours in (
        (skglm.penalties.L1_plus_L2(0.5, 0.4), ElasticNet(0.5, 0.4)),
        (skglm.penalties.PositiveConstraint(), Box(0.0)),
    ):
        adapted = as_proximal(theirs)
        np.testing.assert_allclose(adapted.prox(v, 2.0), ours.prox(v, 2.0), atol=1e-12)
        assert adapted.value(np.abs(v)) == pytest.approx(ours(np.abs(v)))
    groups = WeightedGroupL2(
        0.5,
        np.sqrt([2.0, 1.0, 3.0]),
        np.array([0, 2, 3, 6], np.int32),
        np.arange(6, dtype=np.int32),
    )
    np.testing.assert_allclose(
        as_proximal(groups).prox(v, 2.0), GroupLasso(0.5, GROUPS).prox(v, 2.0), atol=1e-12
    )
    rows = as_proximal(L2_1(0.5)).prox(v.reshape(2, 3), 2.0)
    expected = GroupLasso(0.5, axis=1, scaled=False).prox(v.reshape(2, 3), 2.0)
    np.testing.assert_allclose(rows, expected, atol=1e-12)


def test_objects_with_value_and_prox_and_functions():
    class Ridge:
        def value(self, x):
            return float(x @ x) / 2

        def prox(self, v, alpha):
            return v / (1 + alpha)

    result = minimize_adaprox(lambda x: (float(-x.sum()), -np.ones(2)), [0.0, 0.0], prox=Ridge())
    np.testing.assert_allclose(result.x, 1, atol=1e-5)
    assert result.fun == pytest.approx(-1, abs=1e-9)
    # Without a signature it is called as it is.
    clip = as_proximal(np.maximum)
    assert clip.value is None
    assert as_proximal(None).value(np.ones(2)) == 0

    class OnlyProx:
        def prox(self, v, alpha):
            return v

    assert as_proximal(OnlyProx()).value is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: L1(-1.0), ValueError, "weight must be"),
        (lambda: L1(1.0, positive=1), ValueError, "positive must be"),
        (lambda: ElasticNet(1.0, 1.5), ValueError, "l1_ratio must be"),
        (lambda: GroupLasso(1.0), ValueError, "either groups or axis"),
        (lambda: GroupLasso(1.0, [0], axis=1), ValueError, "either groups or axis"),
        (lambda: GroupLasso(1.0, [0.5]), TypeError, "groups must be integers"),
        (lambda: GroupLasso(1.0, [-1, 0]), ValueError, "group numbers >= 0"),
        (lambda: GroupLasso(1.0, [0, 1])(np.ones(3)), ValueError, "shape of groups"),
        (lambda: GroupLasso(1.0, axis=0.5), TypeError, "axis must be"),
        (lambda: Box(1.0, 0.0), ValueError, "lower must be <= upper"),
        (lambda: Box(float("nan"), 0.0), ValueError, "lower must be <= upper"),
        (lambda: Simplex(0.0), ValueError, "total must be"),
        (lambda: NuclearNorm(1.0, shape=(2,)), ValueError, "that of a matrix"),
        (lambda: NuclearNorm(1.0, shape=(2, 0)), ValueError, "shape must be"),
        (lambda: NuclearNorm(1.0)(np.ones(3)), ValueError, "x must be a matrix"),
        (lambda: as_proximal(3), TypeError, "prox must be"),
        (lambda: AdaProx([torch.zeros(1)], prox=lambda v: v), TypeError, r"prox\(v, alpha\)"),
    ],
)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()
