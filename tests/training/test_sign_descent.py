"""SignSGD, Lion, Muon, Muonlight: their updates, matrix signs, and the theory's settings."""

import math
import os

import lion_pytorch
import numpy as np
import pytest
import torch
from torch import nn

from thalweg.tasks import byte_gpt
from thalweg.training import (
    Lion,
    Muon,
    Muonlight,
    SignSGD,
    matrix_sign,
    muon_param_groups,
    theory_schedule,
)
from thalweg.training.orthogonalizers import orthogonalize, step_dtype

QUINTIC = (3.4445, -4.7750, 2.0315)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=seeded(seed), dtype=dtype)


def parameters(*shapes, dtype=torch.float64):
    return [nn.Parameter(normal(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def descend(optimizer, params, steps=20, seed=7):
    """Step along a reproducible series of gradients."""
    generator = seeded(seed)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        optimizer.step()
    return [p.detach().clone() for p in params]


def one_step(make, grad, **settings):
    """Return the change that the first step along ``grad`` makes."""
    p = nn.Parameter(torch.zeros_like(grad))
    p.grad = grad.clone()
    make([p], **settings).step()
    return p.detach()


def orthogonal(n, seed):
    return torch.linalg.qr(normal(n, n, seed=seed))[0]


# Signs of entries


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_lion_is_lion_pytorch_bit_for_bit(weight_decay):
    shapes = [(17, 5), (9,)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": weight_decay}
    mine = descend(Lion(ours, **settings), ours)
    oracle = descend(lion_pytorch.Lion(theirs, **settings), theirs)
    for x, y in zip(mine, oracle, strict=True):
        assert torch.equal(x, y)


def test_lion_with_equal_betas_is_signum_bit_for_bit():
    ours, theirs = parameters((17, 5)), parameters((17, 5))
    signum = descend(SignSGD(ours, lr=0.01, momentum=0.9, weight_decay=0.1), ours)
    lion = descend(Lion(theirs, lr=0.01, betas=(0.9, 0.9), weight_decay=0.1), theirs)
    assert torch.equal(signum[0], lion[0])


def test_nesterov_is_lion_with_the_square_of_beta():
    ours, theirs = parameters((17, 5)), parameters((17, 5))
    signum = descend(SignSGD(ours, lr=0.01, momentum=0.9, nesterov=True), ours)
    lion = descend(Lion(theirs, lr=0.01, betas=(0.81, 0.9)), theirs)
    assert torch.equal(signum[0], lion[0])
    plain = parameters((17, 5))
    assert not torch.equal(descend(SignSGD(plain, lr=0.01, momentum=0.9), plain)[0], lion[0])


def test_sign_sgd_follows_its_formula():
    x = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    optimizer = SignSGD([x], lr=0.1, momentum=0.5, weight_decay=0.2)
    theta, m = np.array([1.0, -2.0, 3.0]), np.zeros(3)
    for g in ([1.0, -1.0, 0.0], [-3.0, -1.0, 0.0], [0.5, 4.0, 1.0]):
        m = 0.5 * m + 0.5 * np.array(g)
        theta = (1 - 0.1 * 0.2) * theta - 0.1 * np.sign(m)
        x.grad = torch.tensor(g, dtype=torch.float64)
        optimizer.step()
    np.testing.assert_allclose(x.detach(), theta, rtol=1e-14)


@pytest.mark.parametrize("make", [SignSGD, Lion])
def test_every_entry_moves_by_the_step_size_exactly(make):
    x = nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = make([x], lr=2.0**-10)
    for t in range(5):
        before = x.detach().clone()
        x.grad = normal(50, seed=t) * 10.0 ** normal(50, seed=50 + t)
        optimizer.step()
        assert torch.equal((x.detach() - before).abs(), torch.full_like(before, 2.0**-10))


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon, Muonlight])
def test_a_zero_gradient_from_zero_state_makes_no_step(make):
    for shape in [(4, 3), (5,)]:
        change = one_step(make, torch.zeros(shape, dtype=torch.float64), lr=0.1)
        assert torch.equal(change, torch.zeros_like(change))


def test_without_momentum_there_is_no_state():
    (x,) = parameters((6,))
    optimizer = SignSGD([x], lr=0.5, momentum=0.0)
    before = x.detach().clone()
    x.grad = torch.tensor([1e-9, -1e9, 0.0, 2.0, -3.0, 0.0], dtype=torch.float64)
    optimizer.step()
    signs = torch.tensor([1.0, -1.0, 0.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(x.detach(), before - 0.5 * signs, rtol=0, atol=1e-15)
    assert not optimizer.state


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon])
def test_maximize_is_descent_along_the_negative(make):
    up, down = parameters((4, 6), (3,)), parameters((4, 6), (3,))
    settings = {"lr": 0.01, "weight_decay": 0.1}
    ascent, descent = make(up, maximize=True, **settings), make(down, **settings)
    for t in range(4):
        for p, q in zip(up, down, strict=True):
            p.grad = normal(*p.shape, seed=t)
            q.grad = -p.grad
        ascent.step()
        descent.step()
    for p, q in zip(up, down, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-14, atol=0)


# Signs of matrices


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_svd_gives_orthonormal_rows_or_columns(shape):
    sign = matrix_sign(normal(3, *shape), "svd")
    gram = sign @ sign.mT if shape[0] <= shape[1] else sign.mT @ sign
    torch.testing.assert_close(gram, torch.eye(min(shape)).expand(3, -1, -1).double())


@pytest.mark.parametrize("method", ["ns5", "polar", "svd"])
def test_signs_ignore_scale_and_follow_rotations(method):
    M, Q, R = normal(5, 8), orthogonal(5, 1), orthogonal(8, 2)
    sign = matrix_sign(M, method)
    for c in (1e-12, 7.0, 1e12):
        torch.testing.assert_close(matrix_sign(c * M, method), sign, rtol=0, atol=1e-10)
    torch.testing.assert_close(matrix_sign(Q @ M @ R, method), Q @ sign @ R, rtol=0, atol=1e-10)
    torch.testing.assert_close(matrix_sign(M.T, method), sign.T, rtol=0, atol=1e-12)


def planted(singular_values, m, n):
    """Return a matrix with the given singular values, divided by their norm."""
    S = torch.as_tensor(singular_values, dtype=torch.float64)
    U = torch.linalg.qr(normal(m, len(S), seed=1))[0]
    V = torch.linalg.qr(normal(n, len(S), seed=2))[0]
    return (U * (S / S.norm())) @ V.T


def test_ns5_brings_singular_values_from_0_002_into_its_interval():
    M = planted(torch.logspace(-2.69, 0, 40).tolist() + [0.3] * 3, 64, 96)
    assert torch.linalg.svdvals(M)[42] >= 0.0008
    S = torch.linalg.svdvals(M)[:43]
    ends = torch.linalg.svdvals(matrix_sign(M))[:43]
    assert ends[S >= 0.002].numel() == (S >= 0.002).sum() > 20
    # The quintic is odd and acts on every singular value by itself.
    expected = S.clone()
    for _ in range(5):
        expected = sum(c * expected ** (2 * i + 1) for i, c in enumerate(QUINTIC))
    torch.testing.assert_close(ends.sort()[0], expected.sort()[0], rtol=1e-9, atol=1e-9)
    inside = expected[S >= 0.002]
    assert 0.68 <= inside.min() <= inside.max() <= 1.21
    assert expected[S < 0.002].min() < inside.min()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ns5_in_low_precision_stays_near_its_interval(dtype):
    M = normal(128, 256, dtype=torch.float32)
    S = torch.linalg.svdvals(orthogonalize(M[None], "ns5", None, dtype)[0])
    # bfloat16 rounds each of 5 · 3 products to 2^-9.
    slack = 0.03 if dtype == torch.bfloat16 else 1e-4
    assert 0.6818 - slack <= S.min() <= S.max() <= 1.2024 + slack


def test_polar_converges_to_the_exact_sign():
    M = planted(np.linspace(0.5, 1, 6), 6, 10)
    exact = matrix_sign(M, "svd")
    errors = [(matrix_sign(M, "polar", steps=k) - exact).abs().max() for k in (4, 8, 16)]
    assert errors[0] > 1e-3
    # ‖M‖_F = 1 leaves the least singular value at 0.26; the cubic converges from there in eight.
    assert errors[1] < 1e-3
    assert errors[2] < 1e-14


def test_svd_leaves_the_null_space_alone():
    M = planted([3.0, 1.0], 5, 7)
    sign = matrix_sign(M, "svd")
    S = torch.linalg.svdvals(sign)
    torch.testing.assert_close(S, torch.tensor([1.0, 1, 0, 0, 0], dtype=torch.float64))
    # U Vᵀ has the same row space: projecting on it changes nothing.
    torch.testing.assert_close(sign @ torch.linalg.pinv(M) @ M, sign)


@pytest.mark.parametrize("m", [512, 600, 1024])
def test_blocks_of_rows_change_nothing(m):
    M = normal(m, m + 100, dtype=torch.float32)
    X = M / torch.linalg.matrix_norm(M)
    for _ in range(5):
        A = X @ X.T
        X = QUINTIC[0] * X + (QUINTIC[1] * A + QUINTIC[2] * A @ A) @ X
    torch.testing.assert_close(matrix_sign(M), X, rtol=0, atol=1e-5)


def test_batches_are_their_matrices():
    batch = normal(2, 3, 4, 6)
    signs = matrix_sign(batch)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(signs[i, j], matrix_sign(batch[i, j]), rtol=1e-12, atol=0)


def test_signs_keep_dtype_and_empty_shapes():
    assert matrix_sign(torch.ones(3, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert matrix_sign(torch.ones(3, 2, dtype=torch.bfloat16), "svd").dtype == torch.bfloat16
    assert matrix_sign(torch.zeros(0, 2, 3)).shape == (0, 2, 3)


def test_float64_and_small_matrices_are_not_rounded():
    assert step_dtype(torch.zeros(600, 600, dtype=torch.float64)) == torch.float64
    assert step_dtype(torch.zeros(600, 64)) == torch.float32
    assert step_dtype(torch.zeros(600, 600)) in (torch.float32, torch.bfloat16)
    assert step_dtype(torch.zeros(2, 2, device="meta")) == torch.bfloat16


def test_matrix_sign_refuses_bad_input():
    with pytest.raises(TypeError, match="matrices must be a real floating-point tensor"):
        matrix_sign(torch.zeros(2, 2, dtype=torch.complex64))
    with pytest.raises(TypeError, match="matrices must be a real floating-point tensor"):
        matrix_sign([[1.0]])
    with pytest.raises(ValueError, match=r"matrices must have shape \(..., m, n\), got \(3,\)"):
        matrix_sign(torch.zeros(3))
    with pytest.raises(ValueError, match="matrices must be finite"):
        matrix_sign(torch.tensor([[math.nan]]))
    with pytest.raises(ValueError, match="method must be one of 'ns5', 'svd', 'polar', got 'qr'"):
        matrix_sign(torch.zeros(2, 2), "qr")
    with pytest.raises(ValueError, match="steps must be an integer >= 1, got 0"):
        matrix_sign(torch.zeros(2, 2), steps=0)


# Muon


def test_muon_on_diagonal_matrices_is_sign_sgd():
    diagonal = torch.tensor([3.0, -0.1, 20.0, -5.0], dtype=torch.float64)
    change = one_step(Muon, torch.diag(diagonal), lr=0.5, orthogonalizer="svd")
    signum = one_step(SignSGD, diagonal, lr=0.5)
    torch.testing.assert_close(change, torch.diag(signum), rtol=0, atol=1e-14)


def test_muon_on_a_column_is_normalized_sgd():
    g = normal(7, 1)
    change = one_step(Muon, g, lr=0.5, orthogonalizer="svd")
    torch.testing.assert_close(change, -0.5 * g / g.norm(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_follows_its_formula(nesterov):
    W = nn.Parameter(normal(4, 6))
    optimizer = Muon(
        [W], lr=0.1, momentum=0.8, nesterov=nesterov, weight_decay=0.3, orthogonalizer="svd"
    )
    expected, M = W.detach().clone(), torch.zeros(4, 6, dtype=torch.float64)
    for t in range(4):
        G = normal(4, 6, seed=10 + t)
        M = 0.8 * M + 0.2 * G
        ahead = 0.8 * M + 0.2 * G if nesterov else M
        U, _, Vt = torch.linalg.svd(ahead, full_matrices=False)
        expected = (1 - 0.1 * 0.3) * expected - 0.1 * U @ Vt
        W.grad = G
        optimizer.step()
    torch.testing.assert_close(W.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(64, 64), (128, 32), (256, 512)])
@pytest.mark.parametrize(("ours", "theirs"), [("fan", "original"), ("rms", "match_rms_adamw")])
def test_muon_agrees_with_torch_to_the_rounding_of_bfloat16(shape, ours, theirs):
    G = normal(*shape, dtype=torch.float32)
    mine = one_step(Muon, G, lr=1.0, scale=ours)
    oracle = one_step(torch.optim.Muon, G, lr=1.0, weight_decay=0.0, adjust_lr_fn=theirs)
    assert torch.cosine_similarity(mine.flatten(), oracle.flatten(), dim=0) > 0.999
    size = oracle.square().mean().sqrt()
    # The specification allows 0.02 at 64 × 64, where the root mean square is 0.11.
    assert (mine - oracle).abs().max() < 0.02 / 0.11 * size


def test_muon_is_torch_muon_over_a_run():
    (ours,), (theirs,) = (parameters((64, 64), dtype=torch.float32) for _ in range(2))
    start = ours.detach().clone()
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}
    mine = descend(Muon([ours], scale="fan", **settings), [ours])[0] - start
    oracle = descend(torch.optim.Muon([theirs], **settings), [theirs])[0] - start
    assert torch.cosine_similarity(mine.flatten(), oracle.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (8, 3, 2, 2)])
def test_muonlight_steps_have_the_root_mean_square_of_0_2_lr(shape):
    change = one_step(Muonlight, normal(*shape), lr=0.5, orthogonalizer="svd")
    assert change.square().mean().sqrt().item() == pytest.approx(0.1, rel=1e-12)
    change = one_step(Muonlight, normal(*shape), lr=0.5, orthogonalizer="svd", rms=0.4)
    assert change.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-12)


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [((64, 64), 0.84, 1.0), ((200, 200), 0.84, 1.0), ((32, 128), 0.68, 1.21)],
)
def test_muonlight_by_ns5_comes_near_that(shape, low, high):
    for G in (normal(*shape), normal(*shape).T):
        ratio = one_step(Muonlight, G, lr=5.0).square().mean().sqrt()
        assert low <= ratio <= high


def test_scales_of_muon():
    G = normal(12, 3)
    sign = matrix_sign(G, "svd")
    for scale, factor in {"none": 1.0, "fan": 2.0, "rms": 0.2 * 12**0.5}.items():
        change = one_step(Muon, G, lr=1.0, orthogonalizer="svd", scale=scale)
        torch.testing.assert_close(change, -factor * sign, rtol=1e-10, atol=1e-12)
    wide = one_step(Muon, G.T.contiguous(), lr=1.0, orthogonalizer="svd", scale="fan")
    torch.testing.assert_close(wide, -sign.T, rtol=1e-10, atol=1e-12)


def test_muonlight_is_muon_with_its_settings():
    ours, theirs = parameters((5, 8), (8, 5), (3,)), parameters((5, 8), (8, 5), (3,))
    light = descend(Muonlight(ours, lr=0.01), ours)
    muon = descend(Muon(theirs, lr=0.01, scale="rms", weight_decay=0.1), theirs)
    for x, y in zip(light, muon, strict=True):
        assert torch.equal(x, y)


def test_convolutions_are_matrices_of_filters():
    G = normal(8, 3, 2, 2)
    change = one_step(Muon, G, lr=1.0)
    torch.testing.assert_close(change.flatten(1), -matrix_sign(G.flatten(1)), rtol=1e-12, atol=0)
    strided = G.to(memory_format=torch.channels_last)
    torch.testing.assert_close(one_step(Muon, strided, lr=1.0), change, rtol=1e-12, atol=1e-15)


def test_batched_matrices_move_as_each_alone():
    shapes = [(6, 4), (4, 6), (6, 4), (3, 3), (4, 6)]
    together = parameters(*shapes)
    apart = parameters(*shapes)
    batched = descend(Muon(together, lr=0.1), together, steps=3)
    optimizers = [Muon([p], lr=0.1) for p in apart]
    generator = seeded(7)
    for _ in range(3):
        for p, optimizer in zip(apart, optimizers, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
    for x, y in zip(batched, apart, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=1e-12, atol=1e-14)


# Muon's fallback


@pytest.mark.parametrize("fallback", ["adamw", "lion"])
def test_the_fallback_is_adamw_or_lion(fallback):
    shapes = [(7,), (), (4, 5)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    optimizer = Muon(
        [{"params": ours, "use_muon": False}],
        lr=0.01,
        weight_decay=0.2,
        fallback=fallback,
        fallback_betas=(0.8, 0.9),
    )
    make = torch.optim.AdamW if fallback == "adamw" else Lion
    oracle = make(theirs, lr=0.01, betas=(0.8, 0.9), weight_decay=0.2)
    for x, y in zip(descend(optimizer, ours), descend(oracle, theirs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_a_mixed_list_becomes_two_groups():
    ours = parameters((4, 3), (4,), (), (2, 2, 2))
    optimizer = Muon(ours, lr=0.1, fallback_lr=0.003)
    matrices, others = optimizer.param_groups
    assert [p.ndim for p in matrices["params"]] == [2, 3]
    assert [p.ndim for p in others["params"]] == [1, 0]
    assert (matrices["lr"], others["lr"]) == (0.1, 0.003)
    assert (matrices["use_muon"], others["use_muon"]) == (True, False)


def test_schedulers_scale_both_groups():
    optimizer = Muon(parameters((4, 3), (4,)), lr=0.1, fallback_lr=0.003)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))
    optimizer.step()
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.0015]


def test_a_fallback_group_keeps_its_own_lr():
    matrix, vector, other = parameters((4, 3), (4,), (2,))
    groups = [
        {"params": [matrix, vector], "lr": 0.5},
        {"params": [other], "use_muon": False, "lr": 0.2},
    ]
    optimizer = Muon(groups, lr=0.1, fallback_lr=0.003)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.003, 0.2]


def test_empty_groups_are_kept():
    optimizer = Muon(
        [
            {"params": [], "use_muon": True},
            {"params": [], "use_muon": False},
            {"params": parameters((2, 2))},
        ]
    )
    assert [g["use_muon"] for g in optimizer.param_groups] == [True, False, True]
    descend(optimizer, optimizer.param_groups[2]["params"], steps=2)


def test_groups_of_a_language_model():
    model = byte_gpt(width=16, depth=1, heads=2, context=8, generator=seeded())
    names = {p: name for name, p in model.named_parameters()}
    hidden, rest = muon_param_groups(model)
    assert {names[p] for p in hidden["params"]} == {
        f"blocks.0.{layer}.weight" for layer in ("qkv", "proj", "up", "down")
    }
    assert len(hidden["params"]) + len(rest["params"]) == len(names)
    assert {"wte.weight", "wpe.weight", "lm_head.weight"} < {names[p] for p in rest["params"]}


def test_whatever_is_tied_to_an_embedding_goes_to_the_fallback():
    model = nn.ModuleDict({"output": nn.Linear(4, 9, bias=False), "tokens": nn.Embedding(9, 4)})
    model["tokens"].weight = model["output"].weight
    hidden, rest = muon_param_groups(model)
    assert hidden["params"] == []
    assert len(rest["params"]) == 1


def test_every_name_of_a_tied_weight_counts():
    model = nn.ModuleDict({"output": nn.Linear(4, 9, bias=False), "lm_head": nn.Linear(4, 9)})
    model["lm_head"].weight = model["output"].weight
    hidden, rest = muon_param_groups(model)
    assert hidden["params"] == []
    assert len(rest["params"]) == 2


def test_muon_refuses_what_is_no_matrix_if_asked_to():
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r'fallback="error" takes matrices only, got bias$'):
        Muon(list(model.named_parameters()), fallback="error")
    with pytest.raises(ValueError, match=r"got a parameter of shape \(2,\)$"):
        Muon(model.parameters(), fallback="error")
    with pytest.raises(ValueError, match=r"got a parameter of shape \(2, 3\)$"):
        Muon([{"params": model.weight, "use_muon": False}], fallback="error")
    Muon([model.weight], fallback="error")


# torch's conventions, where they are special here


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon, Muonlight])
def test_compiled_steps_are_the_eager_ones(make):
    shapes = [(4, 3), (3,), (3, 4)]
    eager, compiled = parameters(*shapes), parameters(*shapes)
    lr = torch.tensor(0.01, dtype=torch.float64)
    optimizer = make(compiled, lr, check_finite=False, weight_decay=0.1)
    expected = descend(make(eager, 0.01, weight_decay=0.1), eager, steps=4)
    step = torch.compile(optimizer.step)
    optimizer.step = step
    for x, y in zip(descend(optimizer, compiled, steps=4), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.fixture
def mesh():
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon])
def test_sharded_parameters_move_as_whole_ones(make, mesh):
    from torch.distributed.tensor import Shard, distribute_tensor

    shapes = [(6, 4), (4, 6), (5,), (3, 2, 2)]
    plain = parameters(*shapes)
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in plain]
    optimizers = make(plain, lr=0.1), make(sharded, lr=0.1)
    for t in range(3):
        for p, q in zip(plain, sharded, strict=True):
            p.grad = normal(*p.shape, seed=t)
            q.grad = distribute_tensor(p.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(plain, sharded, strict=True):
        assert q.placements == (Shard(0),)
        torch.testing.assert_close(q.full_tensor(), p.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon])
def test_a_gradient_that_is_not_finite_is_skipped(make):
    (W,) = parameters((3, 3))
    optimizer = make([W], lr=0.1)
    before = W.detach().clone()
    W.grad = torch.full((3, 3), math.nan, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(W, before)
    assert optimizer.n_skipped == 1


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon])
def test_closures_give_their_loss(make):
    (W,) = parameters((3, 3))
    optimizer = make([W], lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = W.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first


# Settings


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon, Muonlight])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1"),
        ({"lr": torch.zeros(2)}, "lr must hold one number"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number >= 0"),
        ({"check_finite": 1}, "check_finite must be one of False, True"),
        ({"maximize": "yes"}, "maximize must be one of False, True"),
    ],
)
def test_bad_settings_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(parameters((2, 2)), **settings)


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (SignSGD, {"momentum": 1.0}, "momentum must be a finite number >= 0 and < 1"),
        (SignSGD, {"nesterov": None}, "nesterov must be one of False, True"),
        (Lion, {"betas": (0.9, 1.0)}, r"betas\[1\] must be a finite number >= 0 and < 1"),
        (Lion, {"betas": (-0.1, 0.9)}, r"betas\[0\] must be a finite number >= 0 and < 1"),
        (Muon, {"momentum": -0.1}, "momentum must be a finite number >= 0 and < 1"),
        (Muon, {"ns_steps": 0}, "ns_steps must be an integer >= 1, got 0"),
        (Muon, {"scale": "max"}, "scale must be one of 'none', 'fan', 'rms', got 'max'"),
        (Muon, {"fallback": "sgd"}, "fallback must be one of 'adamw', 'lion', 'error'"),
        (Muon, {"fallback_lr": -1.0}, "lr must be a finite number >= 0"),
        (Muon, {"fallback_betas": (2.0, 0.9)}, r"fallback_betas\[0\] must be a finite number"),
        (Muon, {"orthogonalizer": "qr"}, "orthogonalizer must be one of 'ns5', 'svd', 'polar'"),
        (Muonlight, {"rms": 0.0}, "rms must be a finite number > 0, got 0"),
    ],
)
def test_bad_settings_of_each_are_refused(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(parameters((2, 2)), **settings)
    with pytest.raises(ValueError, match=message):
        make([{"params": parameters((2, 2)), **settings}])


def test_wrong_types_are_refused():
    with pytest.raises(TypeError, match="betas must be a pair of numbers, got"):
        Lion(parameters((2, 2)), betas=0.9)
    with pytest.raises(TypeError, match="momentum must be a number"):
        SignSGD(parameters((2, 2)), momentum="0.9")
    for make in (SignSGD, Lion, Muon):
        with pytest.raises(TypeError, match="params must be real, got a complex parameter"):
            make([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    with pytest.raises(TypeError, match="params must be in order, got a set"):
        Muon([{"params": {nn.Parameter(torch.zeros(2, 2))}}])
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        muon_param_groups([])
    with pytest.raises(TypeError, match="exclude must be a sequence of strings, got 'head'"):
        muon_param_groups(nn.Linear(2, 2), exclude="head")


@pytest.mark.parametrize("make", [SignSGD, Lion, Muon])
def test_sparse_gradients_are_refused(make):
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=f"{make.__name__} does not support sparse gradients"):
        make(layer.parameters()).step()


# The theory's settings


def schedule(method="signsgd", **changes):
    problem = {"T": 10_000, "p": 2.0, "sigma0": 10.0, "L0": 2.0, "delta0": 3.0, **changes}
    return theory_schedule(method, **problem)


@pytest.mark.parametrize("p", [1.2, 1.5, 2.0])
def test_schedules_scale_with_the_horizon_as_the_rates_say(p):
    short, long = schedule(p=p), schedule(p=p, T=160_000)
    exponent = p / (3 * p - 2)
    assert (1 - long["beta1"]) / (1 - short["beta1"]) == pytest.approx(16**-exponent)
    assert long["lr"] / short["lr"] == pytest.approx(16 ** (-(1 + exponent) / 2))
    # Noise (1-β)^((p-1)/p) σ and lag L η / (1-β) are balanced, at the rate of T.
    noise = 10.0 * (1 - short["beta1"]) ** ((p - 1) / p)
    lag = 2.0 * short["lr"] / (1 - short["beta1"])
    assert noise == pytest.approx(lag)
    rate = (3.0 * 2.0 * 10.0 ** (p / (p - 1)) / 10_000) ** ((p - 1) / (3 * p - 2))
    assert noise == pytest.approx(rate)


def test_at_finite_variance_16_times_the_steps_want_an_eighth_of_the_step():
    short, long = schedule(), schedule(T=160_000)
    assert long["lr"] / short["lr"] == pytest.approx(1 / 8)
    assert (1 - long["beta2"]) / (1 - short["beta2"]) == pytest.approx(1 / 4)


def test_the_growth_of_curvature_bounds_the_step_and_that_of_noise_asks_for_batches():
    assert schedule(L1=1e6)["lr"] == pytest.approx((1 - schedule()["beta1"]) / 8e6)
    assert schedule()["batch"] == 1
    assert schedule(sigma1=1.0)["batch"] == 16
    assert schedule(sigma1=[0.1, 1.0], p=1.5)["batch"] == 64


def test_without_noise_there_is_no_momentum():
    plain = schedule(sigma0=0.0)
    assert plain["beta1"] == 0.0
    assert plain["lr"] == pytest.approx(math.sqrt(3.0 / (2.0 * 10_000)))


def test_constants_of_coordinates_add_up():
    assert schedule(sigma0=0.1, L0=0.02, d=100) == schedule()
    assert schedule(sigma0=[4.0, 6.0], L0=[0.5, 1.5]) == schedule()
    assert schedule("lion") == schedule()


def test_constants_of_matrices_go_over_to_nuclear_norms():
    square = schedule("muon", m=4, n=9, L1=1.0)
    direct = schedule("muon", sigma0=20.0, L0=8.0, L1=4.0)
    assert square == direct
    light = schedule("muonlight", m=4, n=9, L1=1.0)
    assert light["lr"] * 0.2 * 3 == pytest.approx(square["lr"])


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("adam", {}, "method must be one of 'signsgd', 'lion', 'muon', 'muonlight', got 'adam'"),
        ("lion", {"T": 0}, "T must be an integer >= 1, got 0"),
        ("lion", {"p": 1.0}, "p must be a finite number > 1 and <= 2"),
        ("lion", {"delta0": 0.0}, "delta0 must be a finite number > 0"),
        ("lion", {"sigma0": -1.0}, "sigma0 must be >= 0 and not empty"),
        ("lion", {"sigma1": []}, "sigma1 must be >= 0 and not empty"),
        ("lion", {"L0": 0.0}, "L0 must be > 0 somewhere, got 0"),
        ("lion", {"L1": math.nan}, "L1 must be finite"),
        ("lion", {"sigma0": [1.0, 2.0], "d": 2}, "sigma0 must be one number here, got 2"),
        ("lion", {"m": 2, "n": 2}, "m, n must not be given for 'lion'"),
        ("muon", {"d": 2}, "d must not be given for 'muon'"),
        ("muon", {"m": 2}, "m and n must both be given for 'muon', got m=2, n=None"),
        ("muonlight", {}, "m and n must both be given for 'muonlight'"),
        ("lion", {"sigma1": 5.0, "p": 1.0001}, "sigma1=5 needs an infinite batch at p=1.0001"),
    ],
)
def test_theory_schedule_refuses_bad_input(method, changes, message):
    with pytest.raises(ValueError, match=message):
        schedule(method, **changes)
