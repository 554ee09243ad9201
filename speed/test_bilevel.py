"""Conditional gradient steps beside what they are made of, and beside steps over a cut set."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import sparse

from thalweg.bilevel import L1Ball, LeastSquares, NuclearBall, ir_cg
from thalweg.claims.bilevel.selection_solvers import SelectionRun as Run
from thalweg.claims.bilevel.selection_solvers import cut_by_program, half_space_steps, sdbgd
from thalweg.tasks import SelectionProblem

pytestmark = pytest.mark.usefixtures("one_thread")

RADIUS = 10.0


def dense(n=1068, d=730):
    """Return two levels of the size of the published experiment."""
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((2, n, d)) / np.sqrt(d)
    return LeastSquares(A, rng.standard_normal(n)), LeastSquares(B, rng.standard_normal(n))


def run(sums, steps, method="irscg", lmo=None):
    shape = sums[0].A.shape[1:] + sums[0].targets.shape[1:]
    return ir_cg(
        *sums, lmo or L1Ball(RADIUS), np.zeros(shape), method=method, reg=1.0, maxiter=steps, rng=0
    )


def as_task(sums):
    return SelectionProblem(sums[0].A, sums[0].targets, sums[1].A, sums[1].targets, RADIUS)


def general(lmo):
    """Return a function, for which there is no compiled loop."""
    return lambda c: lmo(c)


@pytest.mark.parametrize("name", ["IR-SCG", "IR-SCG, general", "SDBGD", "cut, HiGHS"])
def test_ten_steps(benchmark, name):
    sums = dense()
    call = {
        "IR-SCG": lambda: run(sums, 10_000),
        "IR-SCG, general": lambda: run(sums, 1_000, lmo=general(L1Ball(RADIUS))),
        "SDBGD": lambda: sdbgd(Run(as_task(sums), 2_000, 1, np.random.default_rng(0)), 1e-2, 1.0),
        "cut, HiGHS": lambda: half_space_steps(
            sums,
            RADIUS,
            np.zeros(730),
            sums[0].value(np.zeros(730)),
            10,
            Run(as_task(sums), 0, 1, np.random.default_rng(0)),
            cut_by_program,
        ),
    }[name]
    benchmark.group = "10 000 steps, 1 000, 1 000, 10"
    benchmark.pedantic(call, rounds=3, warmup_rounds=1)


def test_one_sample_steps_are_compiled(capsys, seconds_in_turn):
    """Beside NumPy's steps, and a loop over the same rows with nothing but a search for each."""
    sums, rng = dense(), np.random.default_rng(0)
    rows = rng.integers(1068, size=2_000)

    def search():
        for i in rows:
            for f in sums:
                np.abs(f.A[i]).argmax()

    best = seconds_in_turn(
        {
            "search": search,
            "compiled": lambda: run(sums, 20_000),
            "general": lambda: run(sums, 2_000, lmo=general(L1Ball(RADIUS))),
        },
        4,
    )
    each = {
        name: seconds / (20_000 if name == "compiled" else 2_000) for name, seconds in best.items()
    }
    gain, ratio = each["general"] / each["compiled"], each["compiled"] / each["search"]
    with capsys.disabled():
        print(
            f"\ncompiled one-sample steps: {1 / each['compiled']:.0f} a second, {gain:.0f} times "
            f"as fast as in NumPy; of two searches by NumPy: {ratio:.2f}"
        )
    assert gain >= 8
    assert ratio <= 2


def test_steps_over_the_set_are_much_cheaper_than_over_a_cut(capsys, seconds_in_turn):
    sums = dense(200, 285)
    task = as_task(sums)
    best = seconds_in_turn(
        {
            "set": lambda: run(sums, 10_000),
            "cut": lambda: half_space_steps(
                sums,
                RADIUS,
                np.zeros(285),
                sums[0].value(np.zeros(285)),
                20,
                Run(task, 0, 1, np.random.default_rng(0)),
                cut_by_program,
            ),
        },
        3,
    )
    ratio = (best["cut"] / 20) / (best["set"] / 10_000)
    with capsys.disabled():
        print(f"\na step over a cut by HiGHS, of one over the set: {ratio:.0f}")
    assert ratio >= 50


def test_finite_sum_steps_cost_their_gradients(capsys, seconds_in_turn):
    sums, rng = dense(), np.random.default_rng(0)
    x, y = rng.standard_normal((2, 730))
    root = 32

    def bare():
        for _ in range(10):
            for f in sums:
                f.grad(x)
                for _ in range(root - 1):
                    idx = rng.integers(1068, size=root)
                    rows = f.A[idx]
                    for point in (x, y):
                        rows.T @ (rows @ point - f.targets[idx])

    best = seconds_in_turn(
        {"gradients": bare, "steps": lambda: run(sums, 10 * root, method="irfscg")}, 5
    )
    ratio = best["steps"] / best["gradients"]
    with capsys.disabled():
        print(f"\nIR-FSCG, of its gradients: {ratio:.2f}")
    assert ratio <= 2.5


def test_sparse_steps_search_only_where_something_has_changed(capsys, seconds_in_turn):
    rng = np.random.default_rng(0)
    A = sparse.random_array((2000, 100_000), density=2e-4, rng=rng, format="csr")
    sums = (LeastSquares(A, rng.standard_normal(2000)),) * 2
    c, u = rng.standard_normal((2, 100_000))

    def search():
        for _ in range(200):
            np.abs(0.5 * c + u).argmax()

    best = seconds_in_turn({"search": search, "steps": lambda: run(sums, 20_000)}, 3)
    ratio = best["steps"] / 100 / best["search"]
    with capsys.disabled():
        print(f"\nsparse steps, of a full search: {ratio:.2f}; {2e4 / best['steps']:.0f} a second")
    assert ratio <= 0.3


def test_one_singular_pair_beats_a_decomposition(capsys, seconds_in_turn):
    c = np.random.default_rng(0).standard_normal((500, 500))
    ball = NuclearBall(1.0)
    best = seconds_in_turn(
        {"pair": lambda: ball(c), "svd": lambda: np.linalg.svd(c, full_matrices=False)}, 3
    )
    ratio = best["pair"] / best["svd"]
    with capsys.disabled():
        print(f"\none singular pair, of a decomposition: {ratio:.2f}")
    assert ratio <= 0.7
