"""The fate report: kernels against closed forms, and what is measured along training."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from thalweg.training import fate_report, linear_cka
from thalweg.training.kernels_at_init import (
    kernel_target_alignment,
    leading_eigenvalues,
    neighbor_overlap,
    tangent_kernel,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def network(outputs=1, activation=nn.Tanh):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), activation(), nn.Linear(16, outputs))


def descend(steps=5, lr=0.1):
    def train(model, loader, loss_fn):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for _ in range(steps):
            for x, y in loader:
                optimizer.zero_grad()
                loss = loss_fn(model(x), y)
                loss.backward()
                optimizer.step()
            yield loss.item()

    return train


LOADER = [(normal(40, 3), normal(40, 1, seed=1)), (normal(40, 3, seed=2), normal(40, 1, seed=3))]


def test_the_tangent_kernel_of_a_linear_model_is_its_inputs():
    model = nn.Linear(3, 2)
    x = normal(10, 3)
    # ∇ of output k by row k of the weight is x, by bias k it is 1; other rows do not matter.
    assert torch.allclose(tangent_kernel(model, x), x @ x.T + 1, atol=1e-5)
    model.bias.requires_grad_(False)
    assert torch.allclose(tangent_kernel(model, x), x @ x.T, atol=1e-5)


def test_the_tangent_kernel_is_that_of_gradients_one_by_one():
    model = network(outputs=2)
    x = normal(6, 3)
    rows = []
    for k in range(2):
        for i in range(6):
            gradients = torch.autograd.grad(model(x)[i, k], list(model.parameters()))
            rows.append(torch.cat([g.flatten() for g in gradients]))
    J = torch.stack(rows).reshape(2, 6, -1)
    expected = (J @ J.mT).mean(0)
    assert torch.allclose(tangent_kernel(model, x), expected, rtol=1e-4, atol=1e-5)


def test_eigenvalues_are_shares_of_the_trace():
    found = leading_eigenvalues(torch.diag(torch.tensor([1.0, 6.0, 3.0])), 2)
    assert found.tolist() == pytest.approx([0.6, 0.3])


def test_alignment_is_one_for_the_targets_own_kernel_and_small_for_another():
    Y = normal(50, 2)
    assert kernel_target_alignment(3 * Y @ Y.T + 1, Y) == pytest.approx(1)
    X = normal(50, 30, seed=1)
    assert abs(kernel_target_alignment(X @ X.T, Y)) < 0.4
    labels = torch.arange(50) % 5
    own = (labels[:, None] == labels).float()
    assert kernel_target_alignment(own, nn.functional.one_hot(labels)) == pytest.approx(1)


def test_neighbors_are_those_of_the_distances():
    X = torch.tensor([[0.0], [1.0], [3.0], [7.0], [15.0]])
    assert neighbor_overlap(X, 2 * X + 1, 2) == 1.0
    # Nearest neighbors are 1, 0, 1, 2, 3, and after the exchange 1, 0, 3, 4, 1.
    Y = X[[0, 1, 4, 3, 2]]
    assert neighbor_overlap(X, Y, 1) == pytest.approx(2 / 5)


def test_the_report_holds_what_it_says():
    model = network()
    guide = network(activation=nn.ReLU)[:2]
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    report = fate_report(
        {"a": model, "b": network(activation=nn.ReLU)},
        LOADER,
        mse_loss,
        descend(),
        guide=guide,
        k_eigs=3,
        neighbors=4,
        probe_size=50,
    )
    probe = torch.cat([x for x, _ in LOADER])[:50]
    hidden = model[:2](probe).detach()
    theirs = guide(probe).detach()
    assert all(torch.equal(fresh[name], value) for name, value in model.state_dict().items())
    assert report.guide_cka["a"].shape == report.own_cka["a"].shape == (6,)
    assert report.guide_cka["a"][0] == pytest.approx(linear_cka(hidden, theirs).item(), abs=1e-6)
    assert report.guide_cka["b"][0] == pytest.approx(1, abs=1e-5)
    assert report.overlap_before == pytest.approx(
        {"a": neighbor_overlap(hidden, theirs, 4), "b": 1.0}
    )
    assert report.overlap_after["b"] < 1
    assert report.own_cka["a"][0] == 1 > report.own_cka["a"][-1] > 0.5
    centered = hidden - hidden.mean(0)
    spectrum = np.linalg.eigvalsh((centered.T @ centered).double().numpy())[::-1]
    assert report.ck_spectrum["a"] == pytest.approx(spectrum[:3] / spectrum.sum(), rel=1e-4)
    assert report.ntk_spectrum["a"].shape == (3,)
    assert report.losses["a"][-1] < report.losses["a"][0]
    targets = torch.cat([y for _, y in LOADER])[:50]
    assert report.initial_loss["a"] == pytest.approx(mse_loss(model(probe), targets).item())
    assert report.ntk_alignment["a"] == pytest.approx(
        kernel_target_alignment(tangent_kernel(model, probe), targets), abs=1e-6
    )
    assert "alignment" in str(report)
    assert len(report.plot().get_lines()) == 2


def test_labels_and_layers_may_be_classes_and_names():
    loader = [(normal(40, 3), torch.arange(40) % 2)]
    report = fate_report(
        {"a": network(outputs=2)},
        loader,
        cross_entropy,
        descend(2),
        layers={"a": "0"},
        probe_size=30,
    )
    assert math.isnan(report.guide_cka["a"][0])
    assert math.isnan(report.overlap_after["a"])
    assert 0 < report.ntk_alignment["a"] < 1


def test_batch_norm_and_dropout_leave_the_model_trainable():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)
    )
    modes = []

    def train(model, loader, loss_fn):
        modes.append([module.training for module in model.modules()])
        yield from descend(2)(model, loader, loss_fn)

    report = fate_report({"a": model}, LOADER, mse_loss, train)
    assert all(modes[0])
    assert np.isfinite(report.own_cka["a"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": {}}, "models must hold at least one"),
        ({"k_eigs": 0}, "k_eigs must be an integer >= 1"),
        ({"neighbors": 0}, "neighbors must be an integer >= 1"),
        ({"probe_size": 3}, "probe_size must be an integer >= 4"),
        ({"probe_size": 10}, "loader must give more than neighbors=10 rows, got 10"),
        ({"loader": []}, "loader must give at least one batch"),
        ({"train_fn": lambda *_: []}, "train_fn must yield at least one loss"),
        ({"layers": {"a": "7"}}, "layers must be names of modules"),
        ({"guide": network(), "guide_layer": "7"}, "guide_layer must be names of modules"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    given = {
        "models": {"a": network()},
        "loader": LOADER,
        "loss_fn": mse_loss,
        "train_fn": descend(1),
    } | arguments
    with pytest.raises(ValueError, match=message):
        fate_report(**given)
