"""Custom minimizers are called as SciPy calls its own."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import OptimizeResult, OptimizeWarning, minimize

from thalweg.common.minimizers import (
    intermediate_report,
    optimize_result,
    refuse_constraints,
    warn_of_unknown,
)


def test_what_scipy_passes_to_a_method_without_constraints_is_accepted():
    def method(fun, x0, args=(), *, callback=None, **options):
        refuse_constraints("method", options)
        warn_of_unknown(options, ignored=("jac",))
        return optimize_result(x=x0, fun=fun(x0))

    result = minimize(lambda x: float(x @ x), [1.0, 2.0], jac=lambda x: 2 * x, method=method)
    assert isinstance(result, OptimizeResult)
    assert result.fun == 5.0
    with pytest.raises(ValueError, match="bounds must be None: method does not support it"):
        minimize(lambda x: float(x @ x), [1.0], method=method, bounds=[(0, 1)])
    with pytest.warns(OptimizeWarning, match="unknown options: colour, shape"):
        minimize(lambda x: 0.0, [1.0], method=method, options={"shape": 1, "colour": 2})


def test_a_callback_gets_a_copy_of_x_or_the_result():
    seen = []
    x = np.zeros(2)
    report = intermediate_report(seen.append)
    report(x=x, fun=1.0)
    x += 1
    np.testing.assert_array_equal(seen[0], [0, 0])

    def keyword(intermediate_result):
        seen.append(intermediate_result)

    intermediate_report(keyword)(x=x, fun=2.0)
    assert seen[1].fun == 2.0
    assert intermediate_report(None) is None
    with pytest.raises(TypeError, match="callback must be callable, got int"):
        intermediate_report(3)
