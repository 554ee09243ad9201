import cvxpy as cp
import numpy as np
import pytest

from thalweg.convex import AffineHull, SeparationOracle, chebyshev_ball, smat, svec

RNG = np.random.default_rng(0)
A = np.vstack([RNG.normal(size=(12, 4)), np.eye(4), -np.eye(4)])
B = np.concatenate([RNG.uniform(0.5, 1.0, size=12), np.full(8, 2.0)])
FACTOR = RNG.normal(size=(4, 4))
H = FACTOR @ FACTOR.T + 0.1 * np.eye(4)
F0 = np.eye(3)
F = np.array([M + M.T for M in RNG.normal(size=(4, 3, 3))])
SETS = {
    "polytope": (SeparationOracle.polytope(A, B), lambda u: np.all(A @ u <= B)),
    "box": (
        SeparationOracle.box([-1, -2, -np.inf, -0.1], [1, 0.5, 1, np.inf]),
        lambda u: np.all(u >= [-1, -2, -np.inf, -0.1]) and np.all(u <= [1, 0.5, 1, np.inf]),
    ),
    "ball": (
        SeparationOracle.ball([0.1, 0, 0, 0.2], 1.5),
        lambda u: np.linalg.norm(u - [0.1, 0, 0, 0.2]) <= 1.5,
    ),
    "ellipsoid": (
        SeparationOracle.ellipsoid(H, np.zeros(4)),
        lambda u: u @ np.linalg.solve(H, u) <= 1,
    ),
    "spectrahedron": (
        SeparationOracle.spectrahedron(F0, F),
        lambda u: np.linalg.eigvalsh(F0 + np.tensordot(u, F, 1))[0] >= 0,
    ),
    "function": (
        SeparationOracle.from_function(lambda u: np.abs(u).sum() - 2, lambda u: np.sign(u), 4),
        lambda u: np.abs(u).sum() <= 2,
    ),
    "intersection": (
        SeparationOracle.intersection(
            SeparationOracle.polytope(A, B),
            SeparationOracle.ball(np.zeros(4), 1.2),
            SeparationOracle.box(np.full(4, -0.8), np.full(4, 0.9)),
        ),
        lambda u: (
            np.all(A @ u <= B) and np.linalg.norm(u) <= 1.2 and np.all(u <= 0.9) and u.min() >= -0.8
        ),
    ),
}


def check_cuts(oracle, contains, dim, seed=1):
    """Every point is judged rightly, and a cut keeps all members strictly on its side."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(400, dim)) * rng.choice([0.3, 1.0, 2.0], size=(400, 1))
    members = np.array([u for u in points if contains(u)])
    outside = [u for u in points if not contains(u)]
    assert len(members) > 20
    assert len(outside) > 20
    for u in members:
        assert oracle(u) == (True, None)
    for u in outside:
        inside, v = oracle(u)
        assert not inside
        assert v.shape == (dim,)
        assert np.all(members @ v < u @ v)


@pytest.mark.parametrize("name", SETS)
def test_cuts_separate(name):
    oracle, contains = SETS[name]
    assert oracle.dim == 4
    check_cuts(oracle, contains, 4)


def test_semidefinite_matrices_as_vectors():
    check_cuts(SeparationOracle.psd(2), lambda u: np.linalg.eigvalsh(smat(u))[0] >= 0, 3)
    assert SeparationOracle.psd(3).dim == 6
    rng = np.random.default_rng(0)
    M, N = (X + X.T for X in rng.normal(size=(2, 3, 3)))
    np.testing.assert_allclose(smat(svec(M)), M)
    assert svec(M) @ svec(N) == pytest.approx(np.sum(M * N))
    with pytest.raises(ValueError, match="vector must have length"):
        smat(np.zeros(5))


@pytest.mark.parametrize(
    "constraints",
    [
        lambda x: [A @ x <= B],
        lambda x: [A @ x <= B, cp.norm(x) <= 1.3],
        lambda x: [cp.sum_squares(x) <= 1.5, cp.abs(x) <= 1.0],
        lambda x: [cp.SOC(1.5 + x[0], x[1:])],
        lambda x: [F0 + sum(x[i] * F[i] for i in range(4)) >> 0],
        lambda x: [cp.log_sum_exp(x) <= 2.5, cp.NonNeg(x + 1), cp.NonPos(x - 2)],
    ],
)
@pytest.mark.filterwarnings("ignore:.*NonPos.*")
def test_cvxpy_sets(constraints):
    x = cp.Variable(4)
    parts = constraints(x)

    def contains(u):
        x.value = u
        return all(part.value(tolerance=0) for part in parts)

    check_cuts(SeparationOracle.from_cvxpy(parts, x), contains, 4)


def test_cvxpy_sets_that_have_no_oracle():
    x, y = cp.Variable(3, name="x"), cp.Variable(3, name="y")
    with pytest.raises(ValueError, match=r"got Equality|got Zero.*AffineHull"):
        SeparationOracle.from_cvxpy([cp.sum(x) == 1], x)
    with pytest.raises(ValueError, match="constraints must be convex"):
        SeparationOracle.from_cvxpy([cp.norm(x) >= 1], x)
    with pytest.raises(ValueError, match="constraints must be of x only"):
        SeparationOracle.from_cvxpy([x + y <= 1], x)
    matrix = cp.Variable((2, 2), name="M")
    with pytest.raises(ValueError, match=r"variable must have shape \(d,\)"):
        SeparationOracle.from_cvxpy([matrix <= 1], matrix)


def test_points_that_are_not_numbers_are_outside():
    for oracle, _ in (SETS["polytope"], SETS["box"], SETS["ball"], SETS["ellipsoid"]):
        assert not oracle([np.nan, 0, 0, 0])[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SeparationOracle.polytope([[0.0, 0.0]], [1.0]), "A must have rows"),
        (lambda: SeparationOracle.polytope(np.ones((2, 2)), [1.0]), r"b must have shape \(2,\)"),
        (lambda: SeparationOracle.box([1.0], [0.0]), "lower must be below upper"),
        (lambda: SeparationOracle.box([np.nan], [0.0]), "lower must be below upper"),
        (lambda: SeparationOracle.ball([0.0], 0.0), "radius must be"),
        (lambda: SeparationOracle.ellipsoid(-np.eye(2), [0, 0]), "H must be positive definite"),
        (
            lambda: SeparationOracle.spectrahedron(np.eye(2), [[[0.0, 1.0], [0.0, 0.0]]]),
            "F0 and F must be symmetric",
        ),
        (lambda: SeparationOracle.intersection(), "oracles must be sets of one dimension"),
        (
            lambda: SeparationOracle.ball([0.0], 1.0) & SeparationOracle.ball([0.0, 0.0], 1.0),
            r"got dimensions \[1, 2\]",
        ),
    ],
)
def test_bad_sets(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_affine_hull_keeps_geometry():
    rng = np.random.default_rng(0)
    equations, right = rng.normal(size=(2, 5)), rng.normal(size=2)
    hull = AffineHull.of_equations(equations, right)
    assert hull.dim == 3
    z = rng.normal(size=(7, 3))
    x = hull.lift(z)
    np.testing.assert_allclose(x @ equations.T, np.tile(right, (7, 1)), atol=1e-12)
    np.testing.assert_allclose(hull.reduce(x), z, atol=1e-12)
    g = rng.normal(size=5)
    np.testing.assert_allclose(
        (x[1] - x[0]) @ g, (z[1] - z[0]) @ hull.reduce_gradient(g), atol=1e-12
    )
    rows, offsets = rng.normal(size=(6, 5)), rng.uniform(1, 2, size=6)
    oracle = hull.polytope(rows, offsets)
    for point in z:
        assert oracle(point)[0] == bool(np.all(rows @ hull.lift(point) <= offsets))


def test_affine_hull_of_contradictions():
    with pytest.raises(ValueError, match="A x = b must have a solution"):
        AffineHull.of_equations([[1.0, 1.0], [1.0, 1.0]], [0.0, 1.0])
    hull = AffineHull.of_equations([[1.0, 0.0]], [1.0])
    with pytest.raises(ValueError, match="must hold somewhere on the affine hull"):
        hull.polytope([[1.0, 0.0]], [0.0])
    rows, right = hull.reduce_inequalities([[1.0, 0.0], [0.0, 1.0]], [1.0, 3.0])
    assert rows.shape == (1, 1)
    assert right.tolist() == [3.0]


def test_chebyshev_ball_touches_and_fits():
    center, radius = chebyshev_ball(A, B)
    slack = (B - A @ center) / np.linalg.norm(A, axis=1)
    assert radius == pytest.approx(slack.min())
    assert np.sum(slack <= radius + 1e-9) >= 2
    with pytest.raises(ValueError, match="must be bounded"):
        chebyshev_ball([[1.0, 0.0]], [1.0])
    with pytest.raises(ValueError, match="must have an interior point"):
        chebyshev_ball([[1.0], [-1.0]], [0.0, -1.0])
    with pytest.raises(ValueError, match="must have an interior point"):
        chebyshev_ball([[1.0], [-1.0]], [0.0, 0.0])
