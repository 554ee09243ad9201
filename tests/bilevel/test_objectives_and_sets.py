"""Stochastic objectives and sets of bilevel problems: gradients, linear minimization, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import sparse

from thalweg.bilevel import (
    Atom,
    Expectation,
    L1Ball,
    L2Ball,
    LeastSquares,
    LinfBall,
    Logistic,
    NuclearBall,
    Polytope,
    ProductSet,
    Simplex,
    TorchLoss,
)


def least_squares(seed=0, n=20, d=6):
    rng = np.random.default_rng(seed)
    return LeastSquares(rng.standard_normal((n, d)), rng.standard_normal(n))


def logistic(seed=0, n=20, d=6):
    rng = np.random.default_rng(seed)
    return Logistic(rng.standard_normal((n, d)), rng.choice([-1.0, 1.0], n))


# --- objectives


@pytest.mark.parametrize("make", [least_squares, logistic])
def test_gradients_are_those_of_the_values(make):
    f, rng = make(), np.random.default_rng(1)
    x, v = rng.standard_normal(6), rng.standard_normal(6)
    difference = (f.value(x + 1e-6 * v) - f.value(x - 1e-6 * v)) / 2e-6
    assert f.grad(x) @ v == pytest.approx(difference, rel=1e-7)
    rows = np.arange(20)
    np.testing.assert_allclose(f.sample_grad(x, rows), f.grad(x), rtol=1e-12)
    each = np.mean([f.sample_grad(x, np.array([i])) for i in rows], axis=0)
    np.testing.assert_allclose(each, f.grad(x), rtol=1e-12, atol=1e-15)
    both = f.sample_grads(x, v, np.array([1, 1, 4]))
    np.testing.assert_array_equal(both[0], f.sample_grad(x, np.array([1, 1, 4])))
    np.testing.assert_array_equal(both[1], f.sample_grad(v, np.array([1, 1, 4])))


@pytest.mark.parametrize("make", [least_squares, logistic])
def test_sparse_rows_give_the_dense_results(make):
    f = make()
    A = np.where(np.abs(f.A) > 0.5, f.A, 0.0)
    dense, thin = type(f)(A, f.targets), type(f)(sparse.csc_array(A), f.targets)
    x, idx = np.linspace(-1, 1, 6), np.array([3, 0, 3])
    assert thin.value(x) == pytest.approx(dense.value(x), rel=1e-14)
    np.testing.assert_allclose(thin.grad(x), dense.grad(x), rtol=1e-13)
    np.testing.assert_allclose(thin.sample_grad(x, idx), dense.sample_grad(x, idx), rtol=1e-13)
    assert thin.smoothness() == pytest.approx(dense.smoothness(), rel=1e-10)
    one = LeastSquares(sparse.csr_array([[3.0, 4.0]]), [0.0])
    assert one.smoothness() == pytest.approx(25.0)


def test_smoothness_bounds_the_curvature():
    f = least_squares()
    assert f.smoothness() == pytest.approx(np.linalg.eigvalsh(f.A.T @ f.A / 20)[-1], rel=1e-12)
    assert logistic().smoothness() == pytest.approx(
        np.linalg.norm(logistic().A, 2) ** 2 / 80, rel=1e-12
    )


def test_several_outputs_are_the_sum_of_each():
    rng = np.random.default_rng(0)
    A, B, X = rng.standard_normal((9, 4)), rng.standard_normal((9, 3)), rng.standard_normal((4, 3))
    whole, parts = LeastSquares(A, B), [LeastSquares(A, b) for b in B.T]
    assert whole.value(X) == pytest.approx(sum(f.value(x) for f, x in zip(parts, X.T, strict=True)))
    columns = [f.grad(x) for f, x in zip(parts, X.T, strict=True)]
    np.testing.assert_allclose(whole.grad(X).T, columns, rtol=1e-12)


def test_torch_losses_are_those_of_numpy():
    f = logistic()
    A, y = torch.from_numpy(f.A), torch.from_numpy(f.targets)
    g = TorchLoss(lambda x, a, b: torch.nn.functional.softplus(-b * (a @ x)), (A, y), chunk_size=7)
    x, idx = np.linspace(-1, 1, 6), np.array([5, 5, 2])
    assert g.n == 20
    assert g.value(x) == pytest.approx(f.value(x), rel=1e-12)
    np.testing.assert_allclose(g.grad(x), f.grad(x), rtol=1e-12)
    np.testing.assert_allclose(g.sample_grad(x, idx), f.sample_grad(x, idx), rtol=1e-12)
    assert g.draw(np.random.default_rng(0), 5).max() < 20
    single = TorchLoss(lambda x, a: (a - x).square().sum(1), torch.zeros(4, 2))
    assert single.grad(np.ones(2)).tolist() == [2.0, 2.0]
    with torch.no_grad():  # as a user may have it around everything
        assert single.grad(np.ones(2)).tolist() == [2.0, 2.0]
    counts = TorchLoss(lambda x, k: x[k], torch.tensor([0, 0, 1]))
    np.testing.assert_allclose(counts.grad(np.zeros(2)), [2 / 3, 1 / 3], rtol=1e-12)


# --- sets


SETS = [
    (L1Ball(2.0), (5,)),
    (L1Ball(2.0, axis=0), (4, 3)),
    (L1Ball(2.0, axis=1), (4, 3)),
    (LinfBall(2.0), (5,)),
    (L2Ball(2.0), (5,)),
    (L2Ball(2.0, axis=0), (4, 3)),
    (Simplex(3.0), (5,)),
    (NuclearBall(2.0), (4, 3)),
    (NuclearBall(2.0), (80, 70)),
    (Polytope([[1.0, 1.0, 1.0]], [2.0], bounds=[(-1, 1)] * 3), (3,)),
    (Polytope(A_eq=sparse.csr_array([[1.0, 1.0, 1.0]]), b_eq=[2.0]), (3,)),
    (ProductSet((L2Ball(1.0), (2,)), (Simplex(), (2, 2))), (6,)),
]
IDS = [f"{type(oracle).__name__}-{len(shape)}d-{k}" for k, (oracle, shape) in enumerate(SETS)]


def norm_bound(oracle, c):
    """Return min ⟨c, v⟩ by the dual norm."""
    match oracle:
        case L1Ball(radius, axis):
            return -radius * np.abs(c).max(axis=axis).sum()
        case LinfBall(radius):
            return -radius * np.abs(c).sum()
        case L2Ball(radius, axis):
            norms = np.linalg.norm(c) if axis is None else np.linalg.norm(c, axis=axis)
            return -radius * np.sum(norms)
        case Simplex(total):
            return total * c.min()
        case NuclearBall(radius):
            return -radius * np.linalg.norm(c, 2)
        case ProductSet():
            parts = zip(oracle.sets, oracle.split(c), strict=True)
            return sum(norm_bound(each, part) for each, part in parts)
        case Polytope(A_eq=None):
            # Vertices of the cube that is cut by x₁ + x₂ + x₃ ≤ 2.
            cube = np.array(np.meshgrid(*[[-1, 1]] * 3)).reshape(3, -1).T
            kept = cube[cube.sum(1) <= 2]
            cut = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1]])
            return min((kept @ c).min(), (cut @ c).min())
    return 2 * c.min()


@pytest.mark.parametrize(("oracle", "shape"), SETS, ids=IDS)
@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9])
def test_linear_minimization_attains_the_minimum(oracle, shape, scale):
    c = np.random.default_rng(3).standard_normal(shape) * scale
    vertex = oracle(c)
    point = vertex.dense(shape) if isinstance(vertex, Atom) else vertex
    assert oracle.contains(point)
    assert np.vdot(c, point) == pytest.approx(norm_bound(oracle, c), rel=1e-9)
    assert not oracle.contains(point * 1.01)


@pytest.mark.parametrize(("oracle", "shape"), SETS, ids=IDS)
def test_a_zero_direction_gives_a_point_of_the_set(oracle, shape):
    vertex = oracle(np.zeros(shape))
    assert oracle.contains(vertex.dense(shape) if isinstance(vertex, Atom) else vertex)


def test_boxes_of_polytopes_bound_what_they_contain():
    box = Polytope(bounds=(0, None), A_ub=np.eye(2), b_ub=[1, 1])
    assert box.contains(np.array([0.0, 1.0]))
    assert not box.contains(np.array([-0.1, 1.0]))
    assert not Polytope(A_eq=[[1.0, 1.0]], b_eq=[1.0]).contains(np.array([0.2, 0.2]))


def test_products_split_what_they_join():
    X = ProductSet((L2Ball(1.0), (2, 2)), (Simplex(), (3,)))
    points = [np.arange(4.0).reshape(2, 2), np.ones(3)]
    for got, expected in zip(X.split(X.join(points)), points, strict=True):
        np.testing.assert_array_equal(got, expected)
    free = ProductSet((lambda c: np.zeros_like(c), (2,)))
    assert free.contains(np.full(2, 9.0))


def test_singular_values_that_agree_are_no_obstacle(monkeypatch):
    import thalweg.bilevel.linear_oracles as module

    assert np.linalg.norm(NuclearBall(1.0)(np.eye(100)), 2) == pytest.approx(1)

    def stuck(*args, **kwargs):
        raise module.ArpackNoConvergence("none", np.zeros(0), np.zeros(0))

    monkeypatch.setattr(module, "svds", stuck)
    c = np.random.default_rng(0).standard_normal((80, 80))
    assert np.vdot(c, NuclearBall(1.0)(c)) == pytest.approx(-np.linalg.norm(c, 2))


# --- bad input


BAD_PARTS = [
    (lambda: LeastSquares([[1.0]], [1.0, 2.0]), ValueError, "one row per target"),
    (lambda: LeastSquares([[np.nan]], [1.0]), ValueError, "A must be finite"),
    (lambda: LeastSquares(sparse.csr_array([[np.inf]]), [1.0]), ValueError, "entries of A"),
    (lambda: LeastSquares([[1j]], [1.0]), TypeError, "A must be real"),
    (lambda: LeastSquares([[1.0]], [1j]), TypeError, "b must be real"),
    (lambda: LeastSquares(np.zeros((0, 2)), []), ValueError, "at least one row"),
    (lambda: Logistic([[1.0]], [0.0]), ValueError, "classes -1 and 1"),
    (lambda: Expectation(3, len), TypeError, "sample_grad must be callable"),
    (lambda: Expectation(len, len, value=3), TypeError, "value must be callable"),
    (lambda: TorchLoss(3, torch.ones(2)), TypeError, "fn must be callable"),
    (lambda: TorchLoss(len, [np.ones(2)]), TypeError, "data must hold tensors, got ndarray"),
    (lambda: TorchLoss(len, []), TypeError, "data must hold tensors, got none"),
    (lambda: TorchLoss(len, (torch.ones(2), torch.ones(3))), ValueError, "one number of rows"),
    (
        lambda: TorchLoss(lambda x, a: a.sum(), torch.ones(2)).value(np.ones(1)),
        TypeError,
        "one loss per sample",
    ),
    (
        lambda: TorchLoss(lambda x, a: 1.0, torch.ones(2)).value(np.ones(1)),
        TypeError,
        "got float",
    ),
    (lambda: L1Ball(0.0), ValueError, "radius must be"),
    (lambda: L2Ball(1.0, axis=0.5), TypeError, "axis must be"),
    (lambda: LinfBall(np.inf), ValueError, "radius must be"),
    (lambda: Simplex(-1.0), ValueError, "total must be"),
    (lambda: NuclearBall(0.0), ValueError, "radius must be"),
    (lambda: NuclearBall(1.0)(np.ones(3)), ValueError, "of matrices"),
    (lambda: Polytope([[1.0]]), ValueError, "A_ub and b_ub must be given together"),
    (lambda: Polytope([[1.0]], [-1.0])(np.ones(1)), ValueError, "bounded and not empty"),
    (lambda: ProductSet(), ValueError, "at least one pair"),
    (lambda: ProductSet(L1Ball(1.0)), TypeError, "pairs of a set and a shape"),
    (lambda: ProductSet((L1Ball(1.0), (2,)))(np.ones(3)), ValueError, "x must have shape"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_PARTS)
def test_bad_parts(make, error, message):
    with pytest.raises(error, match=message):
        make()
