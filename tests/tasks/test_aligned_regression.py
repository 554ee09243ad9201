"""The aligned regression problem: its solution, its spectrum, its gradients."""

import pytest
import torch

from thalweg.tasks import interpolated_regression


def problem(seed=0, **settings):
    return interpolated_regression(torch.Generator().manual_seed(seed), **settings)


def test_some_weights_meet_all_targets():
    p = problem()
    solution = torch.linalg.lstsq(p.inputs, p.targets.unsqueeze(1)).solution.squeeze(1)
    assert p.loss(solution) < 1e-25


@pytest.mark.parametrize("alignment", [0.0, 3.0])
def test_one_eigenvalue_stands_out_by_the_alignment(alignment):
    """The rest of the spectrum is Marchenko-Pastur's, up to (1 + √(30/20000))² / 30."""
    inputs = problem(rows=20_000, alignment=alignment).inputs
    values = torch.linalg.eigvalsh(inputs.T @ inputs / len(inputs))
    assert values[-2] * 30 == pytest.approx(1.0, abs=0.1)
    assert values[-1] == pytest.approx(alignment**2 + 1 / 30, rel=0.1)


def test_the_gradient_is_that_of_the_loss_and_its_mean_that_of_the_whole():
    p = problem()
    weights = torch.randn(30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = weights.clone().requires_grad_()
    loss, gradient = p.measure(x, 8, torch.Generator().manual_seed(2))
    loss.backward()
    torch.testing.assert_close(x.grad, gradient.detach(), rtol=1e-10, atol=1e-12)
    generator = torch.Generator().manual_seed(3)
    losses = torch.stack([p.measure(weights, 100, generator)[0] for _ in range(2000)])
    assert float(losses.mean()) == pytest.approx(p.loss(weights), rel=0.02)


def test_the_same_generator_gives_the_same_problem():
    assert torch.equal(problem(5).inputs, problem(5).inputs)
    assert not torch.equal(problem(5).inputs, problem(6).inputs)


@pytest.mark.parametrize("settings", [{"dim": 0}, {"rows": 0}, {"alignment": -1}])
def test_bad_settings_are_refused(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"{name} must be"):
        problem(**settings)
