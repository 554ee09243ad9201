"""Simple bilevel problems: their optima, and the gradients that claims make of them."""

from __future__ import annotations

import numpy as np
import pytest

from thalweg.bilevel import L1Ball, LeastSquares, ir_cg
from thalweg.claims.bilevel.dictionary_claims import DictionaryRun
from thalweg.tasks import diabetes_selection, synthetic_dictionaries


def test_the_optima_of_the_selection_are_those_that_runs_approach():
    problem = diabetes_selection(np.random.default_rng(0), unit_rows=True)
    np.testing.assert_allclose(np.linalg.norm(problem.A, axis=1), 1)
    inner = LeastSquares(problem.A, problem.b)
    outer = LeastSquares(problem.A_outer, problem.b_outer)
    least, best = problem.optimum()
    result = ir_cg(inner, outer, L1Ball(20.0), np.zeros(285), method="deterministic", maxiter=5000)
    assert problem.inner(result.x) == pytest.approx(result.fun_inner, rel=1e-12)
    assert problem.outer(result.x) == pytest.approx(result.fun_outer, rel=1e-12)
    # The gap bounds the distance from above.
    assert -1e-7 < result.fun_inner - least <= result.fw_gap_inner
    assert result.fun_inner - least < 1e-4
    assert abs(result.fun_outer - best) < 5e-3


def test_the_optimum_of_the_dictionary_satisfies_its_conditions():
    """Old data alone: no projected gradient step lowers the loss by more than rounding."""
    problem = synthetic_dictionaries(np.random.default_rng(0), n=100)
    least = problem.optimum()
    run = DictionaryRun(problem, 0, np.random.default_rng(0))
    x = run.x0
    for _ in range(3000):
        x = run.project(x - 2.0 * run.inner.grad(x))
    assert least <= run.inner.value(x) + 1e-12
    assert run.inner.value(x) - least < 1e-3


def test_gradients_of_the_dictionary_are_those_of_its_losses():
    run = DictionaryRun(
        synthetic_dictionaries(np.random.default_rng(0), n=30), 0, np.random.default_rng(0)
    )
    rng = np.random.default_rng(1)
    x, v = run.project(rng.standard_normal(len(run.x0))), rng.standard_normal(len(run.x0))
    for level in (run.inner, run.outer):
        slope = (level.value(x + 1e-6 * v) - level.value(x - 1e-6 * v)) / 2e-6
        assert level.grad(x) @ v == pytest.approx(slope, rel=1e-6)
        each = np.mean([level.sample_grad(x, np.array([i, i])) for i in range(30)], axis=0)
        np.testing.assert_allclose(each, level.grad(x), rtol=1e-10, atol=1e-14)
    assert run.oracle.contains(x)
