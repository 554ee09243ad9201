"""The stability ratio: unbiased numerator, invariances, standard error, bad input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thalweg.training import stability_ratio


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=1, max_size=5),
    st.integers(2, 20),
)
@settings(deadline=None)
def test_equal_gradients_have_ratio_one_exactly(values, n):
    grad = torch.tensor(values, dtype=torch.float64)
    assert stability_ratio([grad] * n).value == 1.0
    assert stability_ratio(grad.repeat(n, 1)).value == 1.0


def test_two_orthogonal_gradients_have_ratio_zero():
    estimate = stability_ratio(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    assert estimate.numerator == pytest.approx(0.0, abs=1e-14)
    assert estimate.value == pytest.approx(0.0, abs=1e-15)
    assert estimate.second_moment == pytest.approx(12.5)


def test_numerator_is_the_mean_inner_product_of_different_gradients():
    grads = 0.3 + normal(7, 4)
    gram = grads @ grads.T
    expected = (gram.sum() - gram.trace()) / (7 * 6)
    for estimate in (stability_ratio(grads), stability_ratio(iter(grads))):
        assert estimate.numerator == pytest.approx(expected.item(), rel=1e-12)
        assert estimate.second_moment == pytest.approx(gram.trace().item() / 7, rel=1e-12)
        squares = gram.diagonal()
        kurtosis = (squares**2).mean() / squares.mean() ** 2
        assert estimate.kurtosis == pytest.approx(kurtosis.item(), rel=1e-12)
        assert estimate.n == 7


def test_numerator_is_unbiased_and_the_naive_one_is_not():
    mean = torch.full((50,), 50**-0.5, dtype=torch.float64)
    grads = mean + normal(10_000, 10, 50)
    estimates = [stability_ratio(sample, clip=False) for sample in grads]
    average = sum(e.numerator for e in estimates) / len(estimates)
    # Var J = 2·50/90 + 4/10: the standard error of the average is 0.012.
    assert average == pytest.approx(1.0, abs=0.04)
    naive = grads.mean(1).square().sum(1).mean().item()
    assert naive == pytest.approx(1 + 50 / 10, abs=0.06)
    assert min(e.value for e in estimates) < 0


def test_the_ratio_of_many_gradients_is_the_exact_one():
    mean = torch.full((50,), 50**-0.5, dtype=torch.float64)
    assert stability_ratio(mean + normal(10_000, 50)).value == pytest.approx(1 / 51, rel=0.06)


@pytest.mark.parametrize("scale", [1e-50, 1e-3, 7.0, 1e50])
def test_scaling_and_rotation_leave_the_ratio(scale):
    grads = 0.5 + normal(30, 8)
    rotation, _ = torch.linalg.qr(normal(8, 8, seed=1))
    before = stability_ratio(grads)
    after = stability_ratio(scale * grads @ rotation.T)
    assert after.value == pytest.approx(before.value, abs=1e-12)
    assert after.kurtosis == pytest.approx(before.kurtosis, rel=1e-9)


def test_standard_error_matches_the_spread_in_one_dimension():
    # The figures of μ = 0.3, n = 200: true spread 0.037.
    grads = 0.3 + normal(4000, 200, 1)
    estimates = [stability_ratio(sample, clip=False) for sample in grads]
    values = torch.tensor([e.value for e in estimates])
    predicted = sum(e.std_error for e in estimates) / len(estimates)
    assert predicted == pytest.approx(values.std().item(), rel=0.1)


def test_standard_error_is_conservative_in_many_dimensions():
    grads = 0.1 + normal(1000, 100, 50)
    estimates = [stability_ratio(sample, clip=False) for sample in grads]
    spread = torch.tensor([e.value for e in estimates]).std().item()
    predicted = sum(e.std_error for e in estimates) / len(estimates)
    assert spread < predicted < 50**0.5 * spread


def test_clipping_happens_after_the_division():
    grads = torch.tensor([[1.0], [-1.0]])
    assert stability_ratio(grads).value == 0.0
    raw = stability_ratio(grads, clip=False)
    assert (raw.value, raw.numerator) == (-1.0, -1.0)


def test_zero_gradients_show_no_noise():
    estimate = stability_ratio(torch.zeros(3, 2))
    assert (estimate.value, estimate.kurtosis, estimate.std_error) == (1.0, 1.0, 0.0)


def test_gradients_of_any_shape_and_dtype_are_flattened():
    grads = 1 + normal(5, 2, 3)
    expected = stability_ratio(grads.flatten(1)).value
    assert stability_ratio(grads).value == pytest.approx(expected)
    half = grads.to(torch.bfloat16)
    assert stability_ratio(half).value == stability_ratio(half.double()).value
    assert stability_ratio(list(half)).value == pytest.approx(stability_ratio(half).value)


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        (torch.ones(1, 3), ValueError, r"at least 2 gradients, shape \(n, ...\), got \(1, 3\)"),
        (torch.ones(3), ValueError, "at least 2 gradients"),
        ([torch.ones(2)], ValueError, "grads must hold at least 2 gradients, got 1"),
        ([], ValueError, "at least 2 gradients, got 0"),
        ([torch.ones(2), torch.ones(3)], ValueError, r"grads\[1\] must have shape \(2,\)"),
        (torch.tensor([[1.0], [math.nan]]), ValueError, "grads must be finite"),
        ([torch.ones(1), torch.full((1,), math.inf)], ValueError, r"grads\[1\] must be finite"),
        (torch.ones(2, 2, dtype=torch.int64), TypeError, "real floating-point numbers"),
        (torch.ones(2, 2, dtype=torch.complex64), TypeError, "real floating-point numbers"),
        ([1.0, 2.0], TypeError, r"grads\[0\] must be a tensor"),
        (torch.ones(2, 2).to_sparse(), TypeError, "must be dense"),
    ],
)
def test_bad_gradients_are_refused(grads, error, message):
    with pytest.raises(error, match=message):
        stability_ratio(grads)
