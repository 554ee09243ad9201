"""NLPrecond and its kernels: identities of h*, closed forms of the step, settings, bad input."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thalweg.training import (
    NLPRECOND_KERNELS,
    NLPrecond,
    NonFiniteGradientError,
    NonlinearPreconditioner,
    minimize_nlprecond,
)
from thalweg.training.gradient_norms import norm_of_large, tensor_norms
from thalweg.training.precond_kernels import damping_factor, kernel_named

SMOOTH = ("cosh", "exp", "log", "quadratic")
H_SLOPES = {
    "cosh": np.sinh,
    "exp": np.expm1,
    "log": lambda t: t / (1 - t),
    "quadratic": lambda t: t,
}
STRUCTURES = ("isotropic", "separable")
kernels = pytest.mark.parametrize("kernel", NLPRECOND_KERNELS)
structures = pytest.mark.parametrize("structure", STRUCTURES)


def gradient_vector(n=6, scale=3.0, seed=0):
    return scale * np.random.default_rng(seed).standard_normal(n)


def stepped(gradients, params=None, **settings):
    """Return the parameters, 0 by default, after one step along the gradients."""
    params = [torch.zeros_like(g) for g in gradients] if params is None else params
    leaves = [torch.nn.Parameter(p.clone()) for p in params]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient.clone()
    NLPrecond(leaves, **settings).step()
    return [leaf.detach() for leaf in leaves]


# The kernels


@pytest.mark.parametrize("name", SMOOTH)
def test_the_dual_slope_is_the_inverse_of_the_slope(name):
    t = np.linspace(-0.99, 0.99, 199)
    y = np.sign(t) * H_SLOPES[name](np.abs(t))
    np.testing.assert_allclose(kernel_named(name).dual_slope(y, np), t, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SMOOTH)
def test_h_has_the_slope_it_should(name):
    t, step = np.linspace(0.01, 0.95, 20), 1e-6
    h = kernel_named(name).h
    np.testing.assert_allclose((h(t + step) - h(t - step)) / (2 * step), H_SLOPES[name](t), 1e-7)


@kernels
def test_every_kernel_lies_above_the_parabola_and_touches_it(kernel):
    h = kernel_named(kernel).h
    t = np.linspace(0, 2, 101)
    assert (h(t) >= t**2 / 2 - 1e-15).all()
    small = 10.0 ** -np.arange(2, 5)
    np.testing.assert_allclose(h(small) / (small**2 / 2), 1, atol=1e-2)
    assert h(np.array([0.0])) == 0
    bounded = kernel in ("log", "clip")
    assert np.isinf(h(np.array([1.5]))).all() == bounded


@given(st.sampled_from(NLPRECOND_KERNELS), st.floats(0, 1e200))
def test_damping_and_curvature_stay_between_0_and_1(name, s):
    kernel = kernel_named(name)
    factor = float(damping_factor(kernel, np.array(s), np))
    assert 0 <= factor <= 1
    assert 0 <= kernel.dual_curvature(np.array(s)) <= factor * (1 + 1e-12)
    assert math.isclose(factor * s, kernel.dual_slope(np.array(s), np), rel_tol=1e-12)


@kernels
def test_h_of_the_dual_slope_is_the_composition(kernel):
    s = np.array([0.0, 1e-3, 0.5, 0.9, 3.0])
    record = kernel_named(kernel)
    composed = record.h(record.dual_slope(s, np))
    np.testing.assert_allclose(record.h_of_dual_slope(s), composed, rtol=1e-9, atol=1e-18)


@kernels
def test_torch_and_numpy_share_the_formulas(kernel):
    y = np.concatenate([np.linspace(-30, 30, 61), [1e-12, -1e12, 1e150]])
    record = kernel_named(kernel)
    in_torch = record.dual_slope(torch.from_numpy(y), torch).numpy()
    np.testing.assert_allclose(in_torch, record.dual_slope(y, np), rtol=1e-14)
    factors = damping_factor(record, torch.from_numpy(np.abs(y)), torch).numpy()
    np.testing.assert_allclose(factors, damping_factor(record, np.abs(y), np), rtol=1e-14)


@kernels
def test_tiny_and_huge_arguments_stay_finite(kernel):
    extremes = torch.tensor([0.0, 1e-40, 1e-9, 1e30, 1e38])
    record = kernel_named(kernel)
    assert damping_factor(record, extremes, torch).isfinite().all()
    assert damping_factor(record, extremes, torch)[:2].tolist() == [1, 1]
    assert record.dual_slope(extremes, torch).isfinite().all()


# The vector maps


@kernels
@structures
def test_the_derivative_of_the_map_is_what_apply_hessian_says(kernel, structure):
    g, step = gradient_vector(), 1e-5
    precondition = NonlinearPreconditioner(kernel, structure, Lbar=2.0)
    differences = np.column_stack(
        [(precondition(g + step * e) - precondition(g - step * e)) / (2 * step) for e in np.eye(6)]
    )
    # d/dg of ∇φ*(g/L̄) is ∇²φ*(g/L̄)/L̄.
    exact = precondition.apply_hessian(g, np.eye(6)) / 2.0
    np.testing.assert_allclose(differences, exact, rtol=1e-6, atol=1e-9)


@kernels
@structures
def test_half_powers_compose(kernel, structure):
    g, v = gradient_vector(), gradient_vector(seed=1)
    precondition = NonlinearPreconditioner(kernel, structure)
    root = precondition.apply_hessian(g, precondition.apply_hessian(g, v, 0.5), 0.5)
    np.testing.assert_allclose(root, precondition.apply_hessian(g, v), rtol=1e-12, atol=1e-15)
    np.testing.assert_array_equal(precondition.apply_hessian(0 * g, v), v)


@kernels
def test_the_isotropic_map_is_rotation_equivariant(kernel):
    Q, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((6, 6)))
    precondition = NonlinearPreconditioner(kernel)
    g = gradient_vector()
    np.testing.assert_allclose(precondition(Q @ g), Q @ precondition(g), rtol=0, atol=1e-12)


@kernels
def test_the_separable_map_is_permutation_equivariant(kernel):
    order = np.random.default_rng(2).permutation(6)
    precondition = NonlinearPreconditioner(kernel, "separable")
    g = gradient_vector()
    np.testing.assert_array_equal(precondition(g[order]), precondition(g)[order])
    assert not np.allclose(precondition(g), precondition(np.array([1.0]))) or kernel == "clip"


@kernels
@structures
def test_stationarity_is_about_half_the_squared_gradient(kernel, structure):
    precondition = NonlinearPreconditioner(kernel, structure, Lbar=4.0)
    g = gradient_vector(scale=1e-4)
    measure = precondition.stationarity(g, float(np.linalg.norm(g)))
    assert measure == pytest.approx(g @ g / (2 * 4.0), rel=1e-3)


def test_the_norm_of_a_huge_gradient_does_not_overflow():
    g = np.array([3e200, 4e200])
    step = NonlinearPreconditioner("log")(g)
    np.testing.assert_allclose(step, [0.6, 0.8], rtol=1e-14)


# The optimizer's step


@kernels
@structures
def test_the_optimizer_agrees_with_numpy(kernel, structure):
    g = gradient_vector(12, 5.0)
    (x,) = stepped([torch.from_numpy(g)], lr=0.3, Lbar=0.7, kernel=kernel, structure=structure)
    expected = -0.3 * NonlinearPreconditioner(kernel, structure, 0.7)(g)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-12)


@kernels
@structures
def test_a_trajectory_agrees_with_the_minimizer(kernel, structure):
    def f(x):
        return float((x @ x - 1) ** 2 / 4), (x @ x - 1) * x

    x0 = np.array([1.5, -0.5, 0.25])
    settings = {"kernel": kernel, "structure": structure, "Lbar": 2.0}
    result = minimize_nlprecond(f, x0, gamma=0.2, maxiter=20, tol=0.0, **settings)
    x = torch.nn.Parameter(torch.from_numpy(x0.copy()))
    optimizer = NLPrecond([x], lr=0.2, **settings)
    for _ in range(20):
        optimizer.zero_grad()
        ((x @ x - 1) ** 2 / 4).backward()
        optimizer.step()
    np.testing.assert_allclose(x.detach().numpy(), result.x, rtol=0, atol=1e-12)


def test_the_quadratic_kernel_is_sgd_bit_for_bit():
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(50, generator=generator), torch.randn(3, 4, generator=generator)]
    ours = stepped(gradients, lr=0.3, Lbar=7.0, kernel="quadratic")
    leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient
    torch.optim.SGD(leaves, lr=0.3 / 7.0).step()
    for mine, sgd in zip(ours, leaves, strict=True):
        assert torch.equal(mine, sgd)


def test_the_log_kernel_is_the_soft_clip():
    g = torch.from_numpy(gradient_vector(9, 4.0))
    (x,) = stepped([g], lr=0.5, Lbar=2.0, kernel="log")
    torch.testing.assert_close(x, -0.5 * g / (2.0 + g.norm()), rtol=1e-14, atol=0)


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_the_clip_kernel_is_gradient_clipping(scale):
    g = torch.from_numpy(gradient_vector(9, scale))
    (x,) = stepped([g], lr=0.5, Lbar=2.0, kernel="clip")
    torch.testing.assert_close(x, -0.5 * min(1 / g.norm(), 1 / 2.0) * g, rtol=1e-14, atol=0)
    leaf = torch.nn.Parameter(torch.zeros_like(g))
    leaf.grad = g.clone()
    torch.nn.utils.clip_grad_norm_([leaf], max_norm=2.0)
    torch.optim.SGD([leaf], lr=0.25).step()
    torch.testing.assert_close(x, leaf.detach(), rtol=1e-5, atol=0)  # torch adds 1e-6 to the norm


def test_the_global_norm_runs_over_tensors_groups_and_dtypes():
    a, b = torch.full((4,), 3.0), torch.full((9,), 4.0, dtype=torch.float64)
    leaves = [torch.nn.Parameter(torch.zeros_like(t)) for t in (a, b)]
    leaves[0].grad, leaves[1].grad = a, b
    groups = [{"params": leaves[:1]}, {"params": leaves[1:], "lr": 2.0}]
    NLPrecond(groups, lr=1.0, kernel="log").step()
    factor = 1 / (1 + math.sqrt(4 * 9 + 9 * 16))
    torch.testing.assert_close(leaves[0].detach(), -factor * a)
    torch.testing.assert_close(leaves[1].detach(), -2 * factor * b, rtol=1e-7, atol=0)


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_norm_per_tensor_makes_the_step_block_separable(check_finite):
    gradients = [torch.full((4,), 3.0), torch.full((9,), 4.0)]
    settings = {"lr": 1.0, "kernel": "log", "scope": "tensor", "check_finite": check_finite}
    steps = stepped(gradients, **settings)
    for step, gradient in zip(steps, gradients, strict=True):
        torch.testing.assert_close(step, -gradient / (1 + gradient.norm()))


@structures
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_unchecked_maximized_and_tensor_lr_steps_are_the_same_step(structure, scope):
    g = torch.from_numpy(gradient_vector(7))
    settings = {"Lbar": 0.5, "structure": structure, "scope": scope}
    (expected,) = stepped([g], lr=0.1, **settings)
    (unchecked,) = stepped([g], lr=0.1, check_finite=False, **settings)
    (upwards,) = stepped([g], lr=0.1, maximize=True, **settings)
    lr = torch.tensor(0.1, dtype=torch.float64)
    (by_tensor,) = stepped([g], lr=lr, check_finite=False, **settings)
    for other in (unchecked, -upwards, by_tensor):
        torch.testing.assert_close(other, expected, rtol=1e-12, atol=0)


def test_weight_decay_is_decoupled_and_not_damped():
    g, x = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -2.0])
    (moved,) = stepped([g], [x], lr=0.1, kernel="log", weight_decay=0.5)
    torch.testing.assert_close(moved, 0.95 * x - 0.1 * g / 6)


@structures
def test_momentum_averages_inside_of_the_nonlinearity(structure):
    x = torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))
    optimizer = NLPrecond([x], lr=0.1, momentum=0.75, structure=structure)
    precondition = NonlinearPreconditioner("cosh", structure)
    average, expected = np.zeros(5), np.zeros(5)
    for seed in range(4):
        g = gradient_vector(5, 10.0, seed)
        x.grad = torch.from_numpy(g)
        optimizer.step()
        average = 0.75 * average + 0.25 * g
        expected = expected - 0.1 * precondition(average)
    np.testing.assert_allclose(x.detach().numpy(), expected, rtol=1e-12)


def test_state_dict_with_momentum_resumes():
    def make():
        return torch.nn.Parameter(torch.linspace(-2, 2, 8))

    def run(x, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            ((x @ x - 1) ** 2 / 4).backward()
            optimizer.step()

    x = make()
    optimizer = NLPrecond([x], lr=0.1, momentum=0.9, kernel="exp")
    run(x, optimizer, 5)
    y = torch.nn.Parameter(x.detach().clone())
    resumed = NLPrecond([y], lr=9.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(x, optimizer, 5)
    run(y, resumed, 5)
    assert torch.equal(x, y)


def test_transposed_parameters_are_moved_like_others():
    g = torch.from_numpy(gradient_vector(12)).reshape(3, 4)
    for structure in STRUCTURES:
        leaf = torch.nn.Parameter(torch.zeros(4, 3, dtype=torch.float64).T)
        leaf.grad = g.clone()
        NLPrecond([leaf], lr=0.1, structure=structure).step()
        (expected,) = stepped([g], lr=0.1, structure=structure)
        torch.testing.assert_close(leaf.detach(), expected)


def test_long_tensors_are_measured_and_moved_piece_by_piece():
    g = torch.randn(300_001, generator=torch.Generator().manual_seed(0))
    exact = g.double().norm()
    for gradient, tolerance in ((g, 1e-6), (g.bfloat16(), 2e-3), (g.double(), 1e-12)):
        (norm,) = tensor_norms([gradient])
        assert norm.dtype == (torch.float64 if gradient.dtype == torch.float64 else torch.float32)
        assert float(norm) == pytest.approx(float(exact), rel=tolerance)
    (x,) = stepped([g], lr=0.1, structure="separable", kernel="exp")
    torch.testing.assert_close(x, -0.1 * g.sign() * g.abs().log1p())


# Gradients that are not finite, or nearly so


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@structures
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_a_gradient_that_is_not_finite_changes_nothing(structure, scope, momentum):
    x = torch.nn.Parameter(torch.ones(3))
    y = torch.nn.Parameter(torch.ones(2))
    optimizer = NLPrecond([x, y], 0.1, structure=structure, scope=scope, momentum=momentum)
    x.grad, y.grad = torch.ones(3), torch.tensor([1.0, math.nan])
    for n_skipped in range(1, 10):
        optimizer.step()
        assert optimizer.n_skipped == n_skipped
    assert x.tolist() == [1, 1, 1]
    with pytest.raises(NonFiniteGradientError, match="10 gradients in a row"):
        optimizer.step()
    y.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.nonfinite_in_a_row == 0
    assert x.isfinite().all()
    assert (x < 1).all()


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_squares_that_overflow_do_not_stop_the_step(scope, momentum):
    g = torch.tensor([3e30, -4e30])
    (x,) = stepped([g], lr=0.5, kernel="log", scope=scope, momentum=momentum)
    torch.testing.assert_close(x, torch.tensor([-0.3, 0.4]))


def test_the_norm_of_large_entries():
    assert float(norm_of_large(torch.tensor([3e38, 3e38]))) == pytest.approx(3e38 * 2**0.5)
    assert float(norm_of_large(torch.zeros(2))) == 0
    assert math.isnan(float(norm_of_large(torch.tensor([1.0, math.nan]))))
    assert math.isinf(float(norm_of_large(torch.tensor([1.0, -math.inf]))))


def test_a_zero_gradient_makes_no_step():
    (x,) = stepped([torch.zeros(4)], lr=0.5)
    assert x.tolist() == [0] * 4


@pytest.mark.parametrize(
    "settings", [{"momentum": 0.5}, {"structure": "separable"}, {"scope": "tensor"}]
)
def test_compiled_steps_are_the_eager_ones(settings):
    def run(compiled):
        params = [
            torch.nn.Parameter(torch.full(s, 2.0, dtype=torch.float64)) for s in ((3,), (2, 2))
        ]
        lr = torch.tensor(0.1, dtype=torch.float64)
        optimizer = NLPrecond(params, lr, check_finite=False, **settings)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for k in range(3):
            for p in params:
                p.grad = (p.detach() ** 3) * (k + 1)
            step()
            lr.mul_(0.5)
        return torch.cat([p.detach().flatten() for p in params])

    torch._dynamo.reset()
    torch.testing.assert_close(run(True), run(False), rtol=1e-12, atol=0)


# Bad input


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"lr": -1.0}, ValueError, "lr must be a finite number >= 0"),
        ({"Lbar": 0.0}, ValueError, "Lbar must be a finite number > 0"),
        ({"Lbar": math.nan}, ValueError, "Lbar must be a finite number > 0"),
        (
            {"kernel": "tanh"},
            ValueError,
            "kernel must be one of 'cosh', 'exp', 'log', 'clip', 'qua",
        ),
        (
            {"structure": "diagonal"},
            ValueError,
            "structure must be one of 'isotropic', 'separable'",
        ),
        ({"scope": "group"}, ValueError, "scope must be one of 'global', 'tensor'"),
        ({"momentum": 1.0}, ValueError, "momentum must be a finite number >= 0 and < 1"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay must be a finite number >= 0"),
        ({"maximize": 1}, ValueError, "maximize must be one of False, True"),
        ({"check_finite": None}, ValueError, "check_finite must be one of False, True"),
    ],
)
def test_bad_settings_are_refused_also_in_a_group(settings, error, message):
    with pytest.raises(error, match=message):
        NLPrecond([torch.zeros(2)], **settings)
    with pytest.raises(error, match=message):
        NLPrecond([{"params": [torch.zeros(2)], **settings}])


def test_complex_parameters_and_sparse_gradients_are_refused():
    with pytest.raises(TypeError, match="params must be real"):
        NLPrecond([torch.zeros(2, dtype=torch.complex64)])
    x = torch.nn.Parameter(torch.zeros(2))
    x.grad = torch.zeros(2).to_sparse()
    with pytest.raises(RuntimeError, match="NLPrecond does not support sparse gradients"):
        NLPrecond([x]).step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kernel": "tanh"}, "kernel must be one of"),
        ({"structure": "block"}, "structure must be one of"),
        ({"Lbar": -1.0}, "Lbar must be a finite number > 0"),
    ],
)
def test_bad_preconditioners_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        NonlinearPreconditioner(**arguments)
