"""Normalized decentralized bilevel optimization: steps, limits, networks, tails and bad input."""

from __future__ import annotations

import functools

import matplotlib as mpl
import networkx
import numpy as np
import pytest
import torch
from scipy import sparse

from thalweg.bilevel import decentralized_bilevel, heavy_tail_report, mixing_matrix
from thalweg.bilevel.agent_gradients import ArrayGradients, penalty_directions
from thalweg.bilevel.agent_networks import check_mixing, mixer
from thalweg.bilevel.tracked_steps import AgentSteps, StepSettings, row_norms
from thalweg.tasks import agent_quadratics

mpl.use("Agg")
RING = mixing_matrix(networkx.cycle_graph(8))


def problem(tail="pareto", seed=0, **options):
    return agent_quadratics(np.random.default_rng(seed), tail=tail, **options)


def solve(task, W=RING, **options):
    _, p, q = task.sizes
    settings = {"W": W, "sampler": task.draw, "maxiter": 60, "rng": 0} | options
    return decentralized_bilevel(task.grad_f, task.grad_g, np.zeros(p), np.zeros(q), **settings)


def steps_of(task, **changes):
    n, p, q = task.sizes
    blocks = [slice(0, p), slice(p, p + q), slice(p + q, p + 2 * q)]
    gradients = ArrayGradients(task.grad_f, task.grad_g, None, np.zeros(p), np.zeros(q), n)
    directions = penalty_directions(gradients, blocks, 5.0, np.concatenate)
    settings = {
        "lr": (0.003, 0.01, 0.01), "schedule": lambda t: 1.0, "beta": 0.1, "correct": True,
        "normalize": "agent", "clip": None,
    } | changes  # fmt: skip
    rng = np.random.default_rng(0)
    return AgentSteps(
        directions, lambda: task.draw(rng), mixer(RING, np.zeros((n, 1))),
        np.zeros((n, p + 2 * q)), blocks, StepSettings(**settings),
    )  # fmt: skip


# --- steps


@pytest.mark.parametrize("changes", [{}, {"clip": 2.0}, {"normalize": None}, {"correct": False}])
def test_the_mean_tracker_is_the_mean_estimate(changes):
    steps = steps_of(problem(), **changes)
    steps.start(4)
    for _ in range(50):
        steps.advance()
        np.testing.assert_allclose(steps.u.mean(0), steps.m.mean(0), rtol=0, atol=1e-10)


def test_one_agent_is_centralized_normalized_storm():
    task = problem(n=1)
    result = solve(task, W=np.ones((1, 1)), warm_batch=1, schedule="constant", beta=0.2)
    rng = np.random.default_rng(0)

    def d(theta, batch):
        x, y, z = theta[:, :6], theta[:, 6:16], theta[:, 16:]
        (fx, fy), (gx, gy), (hx, hy) = (
            task.grad_f(x, y, batch), task.grad_g(x, y, batch), task.grad_g(x, z, batch)
        )  # fmt: skip
        return np.concatenate([fx + 5 * (gx - hx), fy / 5 + gy, hy], axis=1)

    theta = np.zeros((1, 26))
    m = d(theta, task.draw(rng))
    for _ in range(60):
        unit = [m[:, a:b] / np.linalg.norm(m[:, a:b]) for a, b in ((0, 6), (6, 16), (16, 26))]
        old = theta
        theta = theta - np.concatenate(
            [lr * part for lr, part in zip((0.003, 0.01, 0.01), unit, strict=True)], axis=1
        )
        batch = task.draw(rng)
        m = d(theta, batch) + 0.8 * (m - d(old, batch))
    np.testing.assert_allclose(result.X, theta[:, :6], rtol=0, atol=1e-12)
    np.testing.assert_allclose(result.Z, theta[:, 16:], rtol=0, atol=1e-12)


def test_agents_with_the_same_data_and_samples_stay_equal():
    task = problem("none", n=1)
    f = lambda X, Y, b: tuple(np.repeat(g[:1], 5, 0) for g in task.grad_f(X[:1], Y[:1], b))  # noqa: E731
    g = lambda X, Y, b: tuple(np.repeat(g[:1], 5, 0) for g in task.grad_g(X[:1], Y[:1], b))  # noqa: E731
    result = decentralized_bilevel(
        f, g, np.zeros(6), np.zeros(10), W=np.full((5, 5), 0.2), sampler=task.draw, maxiter=50
    )
    assert max(result.consensus_x, result.consensus_y, result.consensus_z) < 1e-12


def test_beta_one_takes_the_fresh_direction():
    task = problem()
    steps = steps_of(task, beta=1.0)
    steps.start(2)
    steps.advance()
    point = steps.previous
    np.testing.assert_array_equal(steps.m, steps._directions([point], steps.batch)[0])


def test_storm_forgets_additive_noise_exactly():
    """On linear gradients m - ∇ = (1 - β)(m₋ - ∇₋) + β ξ."""
    task = problem(multiplicative=0.0)
    quiet = problem("none")
    object.__setattr__(task, "rho", 0.0)
    object.__setattr__(quiet, "rho", 0.0)
    steps = steps_of(task)
    clean = steps_of(quiet)
    zero = quiet.draw(np.random.default_rng(0))
    steps.start(3)
    for _ in range(20):
        error = steps.m - clean._directions([steps.previous], zero)[0]
        steps.advance()
        now = steps.previous
        exact = clean._directions([now], zero)[0]
        noise = steps._directions([now], steps.batch)[0] - exact
        np.testing.assert_allclose(steps.m - exact, 0.9 * error + 0.1 * noise, atol=1e-10)


def test_agents_move_by_the_step_size_before_mixing():
    result = solve(problem(), maxiter=1, schedule="constant", lr=(0.1, 0.2, 0.3))
    for rows, length in ((result.X, 0.1), (result.Y, 0.2), (result.Z, 0.3)):
        np.testing.assert_allclose(np.linalg.norm(rows, axis=1), length, rtol=1e-12)
    joint = solve(problem(), maxiter=1, schedule="constant", lr=(1, 1, 1), normalize="joint")
    every = np.concatenate([joint.X, joint.Y, joint.Z], axis=1)
    np.testing.assert_allclose(np.linalg.norm(every, axis=1), 1, rtol=1e-12)
    block = solve(problem(), maxiter=1, schedule="constant", lr=(1, 1, 1), normalize="block")
    assert np.mean(np.sum(block.X**2, axis=1)) == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("normalize", ["agent", "block", "joint"])
def test_the_path_does_not_depend_on_the_scale_of_the_losses(normalize):
    one, ten = (solve(problem().scaled(s), normalize=normalize) for s in (1.0, 10.0))
    np.testing.assert_allclose(one.X, ten.X, rtol=0, atol=1e-9)
    plain = [solve(problem().scaled(s), normalize=None).X for s in (1.0, 10.0)]
    assert np.abs(plain[0] - plain[1]).max() > 1e-3


def test_the_schedule_of_the_theory():
    result = solve(problem(), maxiter=500, p_moment=2.0)
    factor = (500 / 2000) ** (-2 / 3)
    assert result.lr == pytest.approx((0.003 * factor, 0.01 * factor, 0.01 * factor))
    assert result.beta == pytest.approx(0.1 * factor)
    assert solve(problem(), maxiter=2).beta == 1


# --- limits


@pytest.mark.parametrize("normalize", ["agent", None])
def test_without_noise_it_converges(normalize):
    task = problem("none")
    lr = (0.01, 0.03, 0.03) if normalize else (0.1, 0.5, 0.5)
    result = solve(
        task, penalty=10.0, lr=lr, warm_batch=1, maxiter=6000, normalize=normalize,
        schedule=lambda t: 1 / (1 + t / 200),
    )  # fmt: skip
    assert np.linalg.norm(task.hypergradient(result.x)) < 0.015
    assert result.consensus_x < 1e-3


def test_a_long_path_of_agents_converges_more_slowly():
    W = mixing_matrix(networkx.path_graph(16))
    task = problem("none", n=16)
    errors = {}
    for name, matrix in (("path", W), ("complete", np.full((16, 16), 1 / 16))):
        result = solve(
            task,
            W=matrix,
            maxiter=3000,
            warm_batch=1,
            schedule=lambda t: 1 / (1 + t / 200),
            lr=(0.01, 0.03, 0.03),
        )
        errors[name] = result.consensus_x, np.linalg.norm(task.hypergradient(result.x))
    start = np.linalg.norm(task.hypergradient(np.zeros(6)))
    assert errors["path"][1] < 0.2 * start
    assert errors["complete"][0] < errors["path"][0]


def test_the_penalty_gradient_is_off_by_one_over_the_penalty():
    task = problem("none")
    x, batch = np.full(6, 0.3), task.draw(np.random.default_rng(0))
    B, e, a = task.B.mean(0), task.e.mean(0), task.a.mean(0)
    errors = []
    for penalty in (1.0, 10.0, 100.0):
        H = penalty * task.C.T @ task.C
        y = np.linalg.solve(H + np.eye(10), penalty * task.C.T @ (B @ x + e) + a)
        z = task.solution(x)
        rows = [np.repeat(v[None], 8, 0) for v in (x, y, z)]
        gx = task.grad_g(rows[0], rows[1], batch)[0].mean(0)
        hx = task.grad_g(rows[0], rows[2], batch)[0].mean(0)
        direction = task.grad_f(rows[0], rows[1], batch)[0].mean(0) + penalty * (gx - hx)
        errors.append(np.linalg.norm(direction - task.hypergradient(x)))
    slope = np.polyfit(np.log([10, 100]), np.log(errors[1:]), 1)[0]
    assert slope == pytest.approx(-1, abs=0.1)
    assert errors[0] > errors[1] > errors[2]


def test_implicit_differentiation_finds_the_same_solution():
    """Agents of one strongly convex lower level: y*(x) = x, and x* is the mean of a."""
    a = np.array([[1.0], [2.0], [3.0], [6.0]])
    result = decentralized_bilevel(
        lambda X, Y, b: (0 * X, Y - a),
        lambda X, Y, b: (X - Y, Y - X),
        np.zeros(1), np.zeros(1), W=np.full((4, 4), 0.25), sampler=lambda rng: 0, hyper="aid",
        hvp=lambda X, Y, V, b: (-V, V), lr=(0.1, 0.1, 0.1), schedule=lambda t: 1 / (1 + t / 100),
        maxiter=2000,
    )  # fmt: skip
    assert result.x[0] == pytest.approx(3, abs=0.02)
    assert result.z is None
    assert result.Z is None
    assert result.n_hvp > 0


# --- torch


def torch_losses():
    a = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, -1.0]], dtype=torch.float64)

    def f(x, y, batch):
        a_i, noise = batch
        return (y["w"] - a_i).square().sum() / 2 + noise.dot(y["w"]) + torch.cos(x).sum()

    def g(x, y, batch):
        _, noise = batch
        return ((y["w"] - x).square() * (1 + x.square())).sum() / 2 + noise.dot(y["w"] + x)

    def sampler(rng):
        return a, torch.from_numpy(rng.standard_t(1.5, (3, 2)))

    def grad_f(X, Y, batch):
        a_i, noise = (part.numpy() for part in batch)
        return -np.sin(X), Y - a_i + noise

    def grad_g(X, Y, batch):
        noise = batch[1].numpy()
        return (X - Y) * (1 + X**2) + (Y - X) ** 2 * X + noise, (Y - X) * (1 + X**2) + noise

    def hvp(X, Y, V, batch):
        return (-(1 + X**2) + 2 * X * (Y - X)) * V, (1 + X**2) * V

    return f, g, sampler, grad_f, grad_g, hvp


@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": "block"}, {"normalize": "joint"}, {"normalize": None}, {"clip": 0.5},
     {"variance_reduction": False}, {"hyper": "aid", "neumann_terms": 3}],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["one function", "functions", "list of batches"])
def test_torch_losses_give_the_steps_of_numpy_gradients(options, kind):
    f, g, sampler, grad_f, grad_g, hvp = torch_losses()
    W = mixing_matrix(networkx.path_graph(3))
    fixed = {"W": W, "maxiter": 20, "rng": 0, "warm_batch": 3, **options}
    zero = torch.zeros(2, dtype=torch.float64)
    losses = [f] * 3, [g] * 3
    if kind == "functions":
        losses = [functools.partial(f) for _ in range(3)], [functools.partial(g) for _ in range(3)]
    as_list = lambda rng: list(zip(*sampler(rng), strict=True))  # noqa: E731
    draw = as_list if kind == "list of batches" else sampler
    by_torch = decentralized_bilevel(*losses, zero, {"w": zero}, sampler=draw, **fixed)
    second = {"hvp": hvp} if "hyper" in options else {}
    by_numpy = decentralized_bilevel(
        grad_f, grad_g, np.zeros(2), np.zeros(2), sampler=sampler, **fixed, **second
    )
    np.testing.assert_allclose(by_torch.X.numpy(), by_numpy.X, rtol=0, atol=1e-9)
    np.testing.assert_allclose(by_torch.Y.numpy(), by_numpy.Y, rtol=0, atol=1e-9)
    np.testing.assert_allclose(by_torch.y["w"].numpy(), by_numpy.y, rtol=0, atol=1e-9)


def test_torch_losses_are_checked():
    f, g, sampler, *_ = torch_losses()
    zero = torch.zeros(2, dtype=torch.float64)
    run = functools.partial(
        decentralized_bilevel, W=mixing_matrix(networkx.path_graph(3)), sampler=sampler, maxiter=2
    )
    with pytest.raises(ValueError, match="f must hold a loss for each of 3 agents, got 2"):
        run([f] * 2, [g] * 3, zero, {"w": zero})
    with pytest.raises(TypeError, match="g must hold callables"):
        run([f] * 3, [1] * 3, zero, {"w": zero})
    with pytest.raises(TypeError, match="both be functions, or both be lists"):
        run([f] * 3, g, zero, {"w": zero})
    with pytest.raises(ValueError, match="hvp must be None"):
        run([f] * 3, [g] * 3, zero, {"w": zero}, hvp=f)
    with pytest.raises(ValueError, match="x0 and y0 must have one dtype"):
        run([f] * 3, [g] * 3, zero, {"w": zero.float()})
    with pytest.raises(TypeError, match="f must return a scalar"):
        run([lambda x, y, b: x] * 3, [g] * 3, zero, {"w": zero})
    with pytest.raises(ValueError, match="sampler must return 3 batches"):
        run([f] * 3, [g] * 3, zero, {"w": zero}, sampler=lambda rng: [1, 2])


# --- the run


def test_counts_of_gradients_messages_and_bits():
    result = solve(problem(), maxiter=11, warm_batch=4, record_every=5, schedule="constant")
    assert result.n_grad_f == 8 * (4 + 2 + 2 * 10)  # two tell whether batches can be replayed
    assert result.n_grad_g == 2 * result.n_grad_f
    links = 16
    assert result.n_messages == links * (2 * 11 - 1)
    assert result.bits_sent == result.n_messages * 26 * 64
    assert result.history["nit"].tolist() == [1, 5, 10, 11]
    assert result.success
    assert result.message == "All steps are made."
    np.testing.assert_allclose(result.x, result.X.mean(0))


def test_the_same_seed_gives_the_same_run_and_comm_replaces_the_product():
    first = solve(problem(), rng=3)
    second = solve(problem(), rng=3, comm=lambda M: RING @ M)
    np.testing.assert_allclose(first.X, second.X, rtol=0, atol=1e-12)


def test_sparse_networks_of_many_agents_mix_like_dense_ones():
    W = mixing_matrix(networkx.cycle_graph(80))
    rows = np.random.default_rng(0).standard_normal((80, 3))
    assert isinstance(check_mixing(sparse.csr_array(W)), sparse.csr_array)
    for like in (rows, torch.from_numpy(rows)):
        mixed = mixer(sparse.csr_array(W), like)(like)
        np.testing.assert_allclose(np.asarray(mixed), W @ rows, rtol=0, atol=1e-14)


def test_callbacks_can_stop_the_run():
    seen = []

    def stop(intermediate_result):
        seen.append(intermediate_result.nit)
        if len(seen) == 3:
            raise StopIteration

    assert solve(problem(), callback=stop).status == 99
    assert seen == [1, 2, 3]

    def interrupt(x):
        raise KeyboardInterrupt

    result = solve(problem(), callback=interrupt)
    assert (result.status, result.success, result.nit) == (2, False, 1)


def spoiled(task, share):
    """Return ∇f that is NaN at the first agent in a share of the samples."""

    def f(X, Y, batch):
        G = task.grad_f(X, Y, batch)
        if (
            batch[0][0, 0, 0]
            < np.quantile(np.random.default_rng(9).pareto(1.5, 9999) - 2, share) * 0.3
        ):
            G[1][0] = np.nan
        return G

    return f  # fmt: skip


def test_samples_that_are_not_finite_are_skipped_or_end_the_run():
    task = problem()
    run = functools.partial(
        decentralized_bilevel, g=task.grad_g, x0=np.zeros(6), y0=np.zeros(10), W=RING,
        sampler=task.draw, rng=0, maxiter=100,
    )  # fmt: skip
    few = run(spoiled(task, 0.1))
    assert few.success
    assert few.n_skipped > 0
    assert np.isfinite(few.X).all()
    many = run(spoiled(task, 0.7))
    assert many.status == 3
    assert 20 <= many.nit < 100
    assert np.isfinite(many.X).all()
    with pytest.raises(ValueError, match="are not finite in any sample"):
        run(lambda X, Y, b: (X, np.full_like(Y, np.nan)))


def test_norms_whose_squares_overflow():
    for xp, rows in (
        (np, np.full((2, 4), 1e200)),
        (torch, torch.full((2, 4), 1e200, dtype=torch.float64)),
    ):
        rows = np.full((2, 4), 1e200) if xp is np else torch.tensor(np.full((2, 4), 1e200))
        with np.errstate(over="ignore"):
            assert float(row_norms(rows, xp)[0, 0]) == pytest.approx(2e200)


def test_a_small_penalty_is_warned_of():
    task = problem("none")
    object.__setattr__(task, "a", task.a + 100)
    with pytest.warns(UserWarning, match="raise penalty"):
        solve(task, penalty=0.01, maxiter=100)


# --- bad input


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"maxiter": 0}, "maxiter must be"),
        ({"lr": 0.1}, "lr must hold three"),
        ({"lr": (0.1, 0.0, 0.1)}, r"lr\[1\] must be"),
        ({"penalty": 0.0}, "penalty must be"),
        ({"beta": 0.0}, "beta must be"),
        ({"beta": 1.1}, "beta must be"),
        ({"p_moment": 1.0}, "p_moment must be"),
        ({"p_moment": 2.1}, "p_moment must be"),
        ({"warm_batch": 0}, "warm_batch must be"),
        ({"schedule": "none"}, "schedule must be"),
        ({"normalize": "agents"}, "normalize must be"),
        ({"clip": -1.0}, "clip must be"),
        ({"variance_reduction": 1}, "variance_reduction must be"),
        ({"hyper": "cg"}, "hyper must be"),
        ({"hyper": "aid"}, "hvp must be given"),
        ({"neumann_terms": 0}, "neumann_terms must be"),
        ({"record_every": 0}, "record_every must be"),
        ({"W": np.ones((8, 7))}, "W must be square"),
        ({"W": np.eye(8)}, "the network is disconnected"),
        ({"W": np.roll(np.eye(8), 1, axis=1)}, "W must be symmetric"),
        ({"W": 2 * RING}, "W must be doubly stochastic"),
        ({"W": RING - 0.4 * np.eye(8) + 0.05}, "W must be doubly stochastic"),
        ({"W": np.array([[0.0, 1.0], [1.0, 0.0]])}, "eigenvalue -1"),
        ({"sampler": lambda rng: iter([1])}, "same mini-batch at two points"),
    ],
)
def test_bad_values(options, match):
    with pytest.raises(ValueError, match=match):
        solve(problem(), **options)


def test_bad_functions():
    task = problem()
    with pytest.raises(TypeError, match="sampler must be callable"):
        solve(task, sampler=None)
    with pytest.raises(TypeError, match="comm must be callable"):
        solve(task, comm=1)
    run = functools.partial(decentralized_bilevel, W=RING, sampler=task.draw)
    with pytest.raises(TypeError, match="f must be a function"):
        run(None, task.grad_g, np.zeros(6), np.zeros(10))
    with pytest.raises(ValueError, match="f must return arrays of shapes"):
        run(lambda X, Y, b: (X[:1], Y), task.grad_g, np.zeros(6), np.zeros(10))
    with pytest.raises(ValueError, match="x0 must have at least one"):
        run(task.grad_f, task.grad_g, np.zeros(0), np.zeros(10))
    fresh = np.random.default_rng(0)
    with pytest.raises(ValueError, match="gives the same gradients again"):
        run(lambda X, Y, b: (X, Y + fresh.standard_normal(Y.shape)), task.grad_g,
            np.zeros(6), np.zeros(10))  # fmt: skip
    with pytest.raises(ValueError, match="neumann_step must be given"):
        solve(task, hyper="aid", hvp=lambda X, Y, V, b: (0 * X, 0 * V))


# --- networks and tails


@pytest.mark.parametrize("kind", ["metropolis", "lazy", "max_degree"])
def test_mixing_matrices_average(kind):
    graph = networkx.star_graph(5)
    graph.add_edge(1, 1)
    W = check_mixing(mixing_matrix(graph, kind))
    np.testing.assert_allclose(np.linalg.matrix_power(W, 400), np.full((6, 6), 1 / 6), atol=1e-6)
    assert W[1, 2] == 0
    np.testing.assert_allclose(mixing_matrix(networkx.complete_graph(4)), 0.25)
    assert np.linalg.eigvalsh(mixing_matrix(graph, "lazy"))[0] > 0


def test_bad_graphs():
    with pytest.raises(TypeError, match="graph must be an undirected"):
        mixing_matrix(networkx.DiGraph([(0, 1)]))
    with pytest.raises(ValueError, match="graph must be connected"):
        mixing_matrix(networkx.empty_graph(2))
    with pytest.raises(ValueError, match="kind must be"):
        mixing_matrix(networkx.path_graph(2), "best")


@pytest.mark.parametrize("index", [1.2, 1.5, 3.0])
def test_tail_indices_are_found(index):
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((100_000, 3))
    directions /= np.linalg.norm(directions, axis=1)[:, None]
    report = heavy_tail_report((1 + rng.pareto(index, (100_000, 1))) * directions, k=1000)
    assert report.interval[0] < index < report.interval[1]
    assert report.hill == pytest.approx(index, rel=0.13)  # four standard errors, 1/√k each
    assert report.pickands == pytest.approx(index, rel=0.6)
    assert report.variance_exists == (index > 2)
    assert 1 < report.p_moment <= 2
    if index < 2:
        assert report.variance_growth == pytest.approx(2 / index - 1, abs=0.2)


def test_light_and_very_heavy_tails():
    rng = np.random.default_rng(0)
    light = heavy_tail_report(rng.uniform(-1, 1, (20_000, 3)))
    assert light.pickands == np.inf
    assert abs(light.variance_growth) < 0.05
    assert light.plot().get_xlabel() == "norm of the noise"
    with pytest.warns(UserWarning, match="the mean does not exist"):
        report = heavy_tail_report(rng.pareto(0.5, 5000))
    assert not report.mean_exists
    assert heavy_tail_report(np.repeat([0.0, 1.0], [600, 400]), k=20).hill == np.inf


def test_bad_samples():
    with pytest.raises(ValueError, match="at least 64 samples, got 10"):
        heavy_tail_report(np.zeros(10))
    with pytest.raises(ValueError, match="grad_samples must vary"):
        heavy_tail_report(np.zeros(100))
    with pytest.raises(ValueError, match="grad_samples must be finite"):
        heavy_tail_report(np.full(100, np.nan))
    with pytest.raises(ValueError, match="k must be"):
        heavy_tail_report(np.arange(100.0), k=60)
