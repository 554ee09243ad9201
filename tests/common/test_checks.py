"""Input checks accept what they say, and name argument, value and what is accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from thalweg.common.checks import (
    check_array,
    check_choice,
    check_finite,
    check_integer,
    check_number,
)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_number_accepts_exactly_its_interval(value, low, high):
    for lower, upper in (("above", "below"), ("at_least", "at_most")):
        inside = low < value < high if lower == "above" else low <= value <= high
        if inside:
            assert check_number("x", value, **{lower: low, upper: high}) == value
        else:
            with pytest.raises(ValueError, match="x must be"):
                check_number("x", value, **{lower: low, upper: high})


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: check_number("lr", -1, above=0),
            ValueError,
            r"^lr must be a finite number > 0, got -1$",
        ),
        (
            lambda: check_number("gamma", 2.5, at_least=0, at_most=1),
            ValueError,
            r"^gamma must be a finite number >= 0 and <= 1, got 2.5$",
        ),
        (lambda: check_number("lr", math.nan), ValueError, "lr must be a finite number, got nan"),
        (lambda: check_number("lr", math.inf), ValueError, "lr must be a finite number, got inf"),
        (lambda: check_number("lr", "1"), TypeError, r"lr must be a number, got '1' \(str\)"),
        (lambda: check_number("lr", True), TypeError, "lr must be a number, got True"),
        (lambda: check_number("lr", None), TypeError, r"got None \(NoneType\)"),
        (lambda: check_integer("n", 1.0), TypeError, "n must be an integer, got 1.0"),
        (lambda: check_integer("n", 0, at_least=1), ValueError, "n must be an integer >= 1, got 0"),
        (lambda: check_integer("n", False), TypeError, "n must be an integer"),
        (
            lambda: check_choice("scope", "all", ("global", "group")),
            ValueError,
            r"scope must be one of 'global', 'group', got 'all' \(str\)",
        ),
        (lambda: check_choice("flag", 1, (True, False)), ValueError, "flag must be one of"),
        (
            lambda: check_array("contexts", np.zeros(3), shape=("K", 3)),
            ValueError,
            r"contexts must have shape \(K, 3\), got \(3,\)",
        ),
        (
            lambda: check_array("x", [[1.0, np.nan], [np.inf, 0]], shape=(2, 2)),
            ValueError,
            r"x must be finite, got nan at x\[0, 1\] and 1 more",
        ),
        (
            lambda: check_array("x", ["a"], shape=(1,)),
            TypeError,
            r"x must be an array of float64, got \['a'\] \(list\)",
        ),
        (
            lambda: check_array("x", np.zeros(2), shape=(3,)),
            ValueError,
            r"shape \(3,\), got \(2,\)",
        ),
    ],
)
def test_refusals_say_what_is_wrong(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_infinite_numbers_pass_where_they_are_allowed():
    assert check_number("c1", math.inf, above=0, allow_infinite=True) == math.inf
    with pytest.raises(ValueError, match="c1 must be a number > 0, got nan"):
        check_number("c1", math.nan, above=0, allow_infinite=True)


def test_long_values_are_cut():
    with pytest.raises(TypeError) as caught:
        check_number("x", "a" * 500)
    assert len(str(caught.value)) < 120


def test_array_of_the_right_dtype_is_not_copied():
    given_array = np.ones((2, 3))
    assert check_array("x", given_array, shape=("n", 3)) is given_array


@given(hnp.arrays(np.float64, hnp.array_shapes(max_dims=3), elements=st.floats(width=64)))
def test_finite_agrees_with_numpy(array):
    if np.isfinite(array).all():
        assert check_finite("x", array) is array
    else:
        with pytest.raises(ValueError, match="x must be finite"):
            check_finite("x", array)


def test_finite_accepts_values_whose_squares_overflow():
    check_finite("x", np.array([1e300, -1e300]))
