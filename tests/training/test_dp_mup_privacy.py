"""Private gradients: sensitivity, noise, and the same result as Opacus from the same seed."""

from __future__ import annotations

import io
import math

import numpy as np
import opacus
import pytest
import torch
from opacus.accountants import PRVAccountant, RDPAccountant
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from thalweg.tasks import (
    load_digits,
    load_text,
    next_byte_loss,
    sample_windows,
    width_gpt,
    width_mlp,
    width_vit,
)
from thalweg.training import (
    DPAdam,
    DPGradient,
    DPMuonOptimizer,
    NonFiniteGradientError,
    dp_mup_init_,
    dp_mup_param_groups,
    dp_snr_report,
    make_private,
)
from thalweg.training.private_optimizers import private_optimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
]
SCOPES = ["per_layer", "flat"]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def digits(n=32):
    data = load_digits()
    return data.train_images[:n], data.train_labels[:n]


def windows(n=8, context=12):
    return sample_windows(load_text().train, n, context, seeded())


def with_readout(model):
    """Initialize with a readout that is not zero, so that all layers have gradients."""
    dp_mup_init_(model, readout="mup", generator=seeded(5))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=seeded(6)))
    return model


MODELS = {
    "mlp": (lambda: with_readout(width_mlp(24)), cross_entropy, digits),
    "vit": (lambda: with_readout(width_vit(16, head_dim=8)), cross_entropy, digits),
    "gpt": (
        lambda: with_readout(width_gpt(16, head_dim=8, depth=1, context=12)),
        next_byte_loss,
        windows,
    ),
}


def private(model, loss_fn, **settings):
    return DPGradient(
        model, loss_fn, **({"noise_multiplier": 0.0, "max_grad_norm": math.inf} | settings)
    )


# The clipped gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", ["ghost", "per_sample"])
def test_without_clipping_and_noise_it_is_the_gradient(name, strategy):
    make, loss_fn, data = MODELS[name]
    model, (x, y) = make(), data()
    loss_fn(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    result = private(model, loss_fn, strategy=strategy)(x, y, len(x))
    for p, expected in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)
    assert result["clipped_fraction"] == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("automatic", [False, True])
def test_ghost_norms_are_norms_of_per_sample_gradients(name, scope, automatic):
    make, loss_fn, data = MODELS[name]
    model, (x, y) = make().double(), data()
    x = x.double() if x.is_floating_point() else x
    settings = {"max_grad_norm": 0.5, "clip_scope": scope, "automatic": automatic}
    results = {}
    for strategy in ("ghost", "per_sample"):
        result = private(model, loss_fn, strategy=strategy, **settings)(x, y, 7)
        results[strategy] = [p.grad.clone() for p in model.parameters()], result["norms"]
    (ghost, ghost_norms), (direct, norms) = results["ghost"], results["per_sample"]
    # Squares of products of rows cancel to about the root of the machine's precision.
    torch.testing.assert_close(ghost_norms, norms, rtol=1e-6, atol=1e-8)
    for a, b in zip(ghost, direct, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_long_sequences_take_the_other_formula():
    """2T² > mn: norms from per-sample products instead of products of rows."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = (torch.randn(5, 9, n, generator=seeded(), dtype=torch.float64) for n in (3, 2))
    settings = {"max_grad_norm": 0.1, "clip_scope": "flat"}
    grads = []
    for strategy in ("ghost", "per_sample"):
        private(model, mse_loss, strategy=strategy, **settings)(x, y, 5)
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)


def test_embeddings_with_padding_and_layer_norm_without_bias():
    model = nn.Sequential(
        nn.Embedding(6, 4, padding_idx=0), nn.LayerNorm(4, bias=False), nn.Linear(4, 3)
    ).double()
    model[2].weight.requires_grad_(False)
    x = torch.tensor([[0, 1, 1], [2, 0, 3], [5, 5, 5]])
    y = torch.randn(3, 3, 3, generator=seeded(), dtype=torch.float64)
    grads = []
    for strategy in ("ghost", "per_sample"):
        private(model, mse_loss, strategy=strategy, max_grad_norm=0.2)(x, y, 3)
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-12)
    assert not grads[0][0][0].any()
    assert model[2].weight.grad is None


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("automatic", [False, True])
def test_sensitivity(scope, automatic):
    """Adding one example moves the sum by at most Δ = C, whatever the batch: 100 trials."""
    generator = seeded()
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    gradient = private(
        model, cross_entropy, max_grad_norm=0.7, clip_scope=scope, automatic=automatic
    )
    assert gradient.sensitivity == pytest.approx(0.7, rel=1e-6)
    largest = 0.0
    for trial in range(100):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 2 ** (trial % 5))
        x = 10 * torch.randn(9, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (9,), generator=generator)
        with_it, without = (gradient.clipped_sums(x[:n], y[:n])[0] for n in (9, 8))
        squares = [(a - b).square().sum() for a, b in zip(with_it, without, strict=True)]
        largest = max(largest, float(torch.stack(squares).sum().sqrt()))
    assert 0.6 < largest <= 0.7


def test_microbatches_add_noise_once():
    make, loss_fn, data = MODELS["mlp"]
    model, (x, y) = make(), data()
    settings = {"noise_multiplier": 3.0, "max_grad_norm": 0.5}
    grads = []
    for size in (None, 5):
        private(model, loss_fn, microbatch=size, generator=seeded(), **settings)(x, y, 32)
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-6)


def test_an_empty_lot_is_noise():
    model = width_mlp(8)
    gradient = private(
        model, cross_entropy, noise_multiplier=1.0, max_grad_norm=2.0, generator=seeded()
    )
    x, y = digits()
    result = gradient(x[:0], y[:0], 16)
    gradient.generator = seeded()
    for p, noise in zip(model.parameters(), gradient.noise(), strict=True):
        torch.testing.assert_close(p.grad, noise / 16, rtol=0, atol=0)
    assert result["norms"].shape == (0, 6)
    assert result["clipped_fraction"] == 0


def test_layers_called_twice_or_without_rows_per_sample():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(torch.tanh(self.layer(x)))

    class Positions(nn.Module):
        """Positions of shape (T,) are no rows per sample, even if there are T samples."""

        def __init__(self):
            super().__init__()
            self.positions = nn.Embedding(4, 3)

        def forward(self, x):
            return x + self.positions(torch.arange(4))

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(input=x)

    x = torch.randn(4, 4, 3, generator=seeded())
    for kind in (Twice, Positions, Unused):
        model = kind()
        grads = []
        for strategy in ("auto", "per_sample"):
            private(model, mse_loss, strategy=strategy, max_grad_norm=0.1)(x, x, 4)
            grads.append([p.grad.clone() for p in model.parameters()])
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)
        if kind is not Unused:
            with pytest.raises(ValueError, match="takes layers that are called once"):
                private(model, mse_loss, strategy="ghost", max_grad_norm=0.1)(x, x, 4)


def test_ghost_sees_activations_changed_in_place():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    x, y = (torch.randn(6, n, generator=seeded()) for n in (3, 2))
    grads = []
    for strategy in ("ghost", "per_sample"):
        private(model, mse_loss, strategy=strategy, max_grad_norm=0.1)(x, y, 6)
        grads.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-7)

    class Spoiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            features = x * 1
            out = self.layer(features)
            features.mul_(2)
            return out

    with pytest.raises(RuntimeError, match="input of Linear was modified in place"):
        private(Spoiled(), mse_loss)(x, x, 6)


def test_gradients_without_grad_mode_and_of_other_models():
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(9, 2))
    x, y = torch.randn(5, 2, 4, generator=seeded()), torch.randn(5, 2, generator=seeded())
    mse_loss(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    with torch.no_grad():
        private(model, mse_loss)(x, y, 5)
    torch.testing.assert_close([p.grad for p in model.parameters()], plain, rtol=1e-5, atol=1e-7)


# Noise ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_noise_has_the_standard_deviation_of_the_mechanism(scope):
    model = nn.Linear(1000, 1000)
    gradient = private(
        model, mse_loss, noise_multiplier=1.5, max_grad_norm=0.8, clip_scope=scope,
        generator=seeded(),
    )  # fmt: skip
    gradient(torch.zeros(0, 1000), torch.zeros(0, 1000), 64)
    assert float(model.weight.grad.std()) == pytest.approx(1.5 * 0.8 / 64, rel=0.01)
    assert abs(float(model.weight.grad.mean())) < 4 * 1.5 * 0.8 / 64 / 1000


def test_spectral_norm_of_noise():
    Z = torch.randn(512, 512, generator=seeded())
    assert 0.95 < float(torch.linalg.matrix_norm(Z, 2)) / (2 * math.sqrt(512)) < 1.02


# Opacus -----------------------------------------------------------------------------------------


def opacus_gradient(model, loss_fn, x, y, scope, noise_multiplier, max_grad_norm, seed=0):
    """Return the gradients that Opacus leaves in .grad, without a step."""
    params = list(model.parameters())
    engine = opacus.PrivacyEngine()
    norm = max_grad_norm
    if scope == "per_layer":
        norm = [max_grad_norm / math.sqrt(len(params))] * len(params)
    wrapped, optimizer, _ = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(params, lr=0.0),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=noise_multiplier,
        max_grad_norm=norm,
        clipping=scope,
        poisson_sampling=False,
        noise_generator=seeded(seed),
    )
    loss_fn(wrapped(x), y).backward()
    optimizer.step()
    grads = [p.grad.clone() for p in params]
    wrapped.remove_hooks()
    return grads


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("sigma", [0.0, 1.3])
@pytest.mark.parametrize("strategy", ["ghost", "per_sample"])
def test_same_gradient_as_opacus(name, scope, sigma, strategy):
    make, loss_fn, data = MODELS[name]
    model, (x, y) = make(), data()
    theirs = opacus_gradient(model, loss_fn, x, y, scope, sigma, 0.5)
    model.zero_grad()
    gradient = private(
        model, loss_fn, noise_multiplier=sigma, max_grad_norm=0.5, clip_scope=scope,
        strategy=strategy, generator=seeded(),
    )  # fmt: skip
    result = gradient(x, y, len(x))
    assert float(result["clipped_fraction"]) > 0.3
    for p, expected in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scope", SCOPES)
def test_same_noise_as_opacus_to_the_last_bit(scope):
    """Targets without a gradient leave nothing but the noise."""
    model = width_mlp(24)
    x, y = digits()

    def nothing(outputs, targets):
        return 0 * cross_entropy(outputs, targets)

    theirs = opacus_gradient(model, nothing, x, y, scope, 1.3, 0.5)
    private(
        model, nothing, noise_multiplier=1.3, max_grad_norm=0.5, clip_scope=scope,
        generator=seeded(),
    )(x, y, len(x))  # fmt: skip
    for p, expected in zip(model.parameters(), theirs, strict=True):
        assert torch.equal(p.grad, expected)


@pytest.mark.parametrize("scope", SCOPES)
def test_same_perceptron_gradient_as_opacus_to_the_last_bit(scope):
    make, loss_fn, data = MODELS["mlp"]
    model, (x, y) = make(), data()
    theirs = opacus_gradient(model, loss_fn, x, y, scope, 1.3, 0.5)
    gradient = private(
        model, loss_fn, noise_multiplier=1.3, max_grad_norm=0.5, clip_scope=scope,
        strategy="per_sample", generator=seeded(),
    )  # fmt: skip
    gradient(x, y, len(x))
    for p, expected in zip(model.parameters(), theirs, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=0, atol=1e-8)


def loader(n=64, batch_size=32):
    return DataLoader(TensorDataset(*digits(n)), batch_size=batch_size)


def made_private(model, name, data_loader=None, **settings):
    defaults = {"base_lr": 0.02, "base_shapes": width_mlp(16), "noise_multiplier": 1.1}
    data_loader = loader() if data_loader is None else data_loader
    return make_private(model, name, data_loader, **(defaults | settings))


@pytest.mark.parametrize("name", ["sgd", "adam", "muon"])
@pytest.mark.parametrize("scope", SCOPES)
def test_same_training_as_opacus(name, scope):
    """Three steps through Opacus and through DPGradient end at the same parameters."""
    models = [with_readout(width_mlp(32)) for _ in range(2)]
    x, y = digits()
    settings = {"max_grad_norm": 0.5, "clip_scope": scope}
    wrapped, optimizer, _, _ = made_private(
        models[0], name, poisson_sampling=False, noise_generator=seeded(), **settings
    )
    groups = dp_mup_param_groups(
        models[1], 0.02, optimizer=name, noise_multiplier=1.1, batch_size=32,
        base_shapes=width_mlp(16), **settings,
    )  # fmt: skip
    ours = private_optimizer(name, groups)
    gradient = DPGradient(
        models[1], cross_entropy, noise_multiplier=1.1, generator=seeded(), **settings
    )
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        optimizer.step()
        gradient(x, y, 32)
        ours.step()
    start = with_readout(width_mlp(32))
    for a, b, c in zip(*(m.parameters() for m in (*models, start)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)
        assert (a - c).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["sgd", "adam", "muon"])
def test_groups_survive_the_wrapping(name):
    model = width_mlp(64)
    module, optimizer, _, engine = made_private(model, name)
    groups = dp_mup_param_groups(
        model, 0.02, optimizer=name, noise_multiplier=1.1, batch_size=32, base_shapes=width_mlp(16)
    )
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in groups]
    assert [g["name"] for g in optimizer.param_groups] == [g["name"] for g in groups]
    assert optimizer.max_grad_norms == [groups[0]["clip"]] * 6
    assert optimizer.max_grad_norm == pytest.approx(1.0, rel=1e-6)
    assert optimizer.expected_batch_size == 32
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    x, y = digits()
    cross_entropy(module(x), y).backward()
    optimizer.step()
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([g["lr"] / 2 for g in groups])
    assert len(engine.accountant) == 1


@pytest.mark.parametrize("name", ["sgd", "adam", "muon"])
def test_state_dict_resumes(name):
    x, y = digits()
    model = with_readout(width_mlp(32))
    module, optimizer, _, _ = made_private(
        model, name, poisson_sampling=False, noise_generator=seeded()
    )

    def step(module, optimizer):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()

    step(module, optimizer)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    resumed = width_mlp(32)
    resumed.load_state_dict(states[0])
    again, other, _, _ = made_private(
        resumed, name, poisson_sampling=False, noise_generator=seeded(9)
    )
    other.load_state_dict(states[1])
    optimizer.generator.manual_seed(9)
    step(module, optimizer)
    step(again, other)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_epsilon_is_opacus_and_does_not_see_the_groups(accountant):
    """ε of the wrapped optimizer is that of a plain one with the same σ, q and steps."""
    spent = []
    for rule in ("dp_mup", "uniform"):
        module, optimizer, _, engine = made_private(
            width_mlp(64), "adam", rule=rule, accountant=accountant
        )
        x, y = digits()
        for _ in range(5):
            optimizer.zero_grad()
            cross_entropy(module(x), y).backward()
            optimizer.step()
        spent.append(engine.get_epsilon(1e-3))
    model = width_mlp(64)
    engine = opacus.PrivacyEngine(accountant=accountant)
    module, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()), data_loader=loader(),
        noise_multiplier=1.1, max_grad_norm=1.0,
    )  # fmt: skip
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(module(x), y).backward()
        optimizer.step()
    assert spent[0] == spent[1] == engine.get_epsilon(1e-3)


def subsampled_gaussian_rdp(q, sigma, order):
    """Return log E[((1-q) + q e^{(2z-1)/2σ²})^α] / (α-1) for z ~ N(0, σ²), by quadrature."""
    z = np.linspace(-40 * sigma, 40 * sigma + order, 400_001)
    log_density = -0.5 * (z / sigma) ** 2 - math.log(sigma * math.sqrt(2 * math.pi))
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * z - 1) / (2 * sigma**2))
    exponents = log_density + order * log_ratio
    peak = exponents.max()
    return (peak + math.log(np.trapezoid(np.exp(exponents - peak), z))) / (order - 1)


def test_accountants_agree_with_the_integral():
    """At q = 0.01, σ = 1, T = 1000, δ = 10⁻⁵: Opacus' RDP is the integral's, PRV is below it."""
    q, sigma, steps, delta = 0.01, 1.0, 1000, 1e-5
    rdp, prv = RDPAccountant(), PRVAccountant()
    rdp.history = prv.history = [(sigma, q, steps)]
    orders = [1 + k / 10 for k in range(20, 100)]
    ours = min(
        steps * subsampled_gaussian_rdp(q, sigma, a)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in orders
    )
    epsilon = rdp.get_epsilon(delta)
    assert epsilon == pytest.approx(ours, rel=1e-3)
    assert 0.8 * epsilon < prv.get_epsilon(delta) < epsilon


def test_target_epsilon_is_met():
    data_loader = loader(n=320, batch_size=32)
    module, optimizer, lots, engine = made_private(
        width_mlp(32), "muon", data_loader, noise_multiplier=None, target_epsilon=2.0, delta=1e-3,
        epochs=2, accountant="rdp",
    )  # fmt: skip
    sizes = []
    for _ in range(2):
        for inputs, labels in lots:
            sizes.append(len(inputs))
            optimizer.zero_grad()
            cross_entropy(module(inputs), labels).backward()
            optimizer.step()
    assert 1.98 <= engine.get_epsilon(1e-3) <= 2.0
    assert len(set(sizes)) > 3  # Poisson sampling
    # The rates are those of the noise that the accountant has found.
    groups = dp_mup_param_groups(
        width_mlp(32), 0.02, optimizer="muon", noise_multiplier=optimizer.noise_multiplier,
        batch_size=32, base_shapes=width_mlp(16),
    )  # fmt: skip
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in groups]
    assert isinstance(optimizer.original_optimizer, DPMuonOptimizer)


def test_opacus_ghost_clipping_takes_the_groups():
    model = with_readout(width_mlp(32))
    settings = {"noise_multiplier": 0.7, "max_grad_norm": 0.5}
    groups = dp_mup_param_groups(
        model, 0.02, optimizer="sgd", batch_size=32, clip_scope="flat",
        base_shapes=width_mlp(16), **settings,
    )  # fmt: skip
    engine = opacus.PrivacyEngine()
    x, y = digits()
    module, optimizer, criterion, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(groups), criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=32), poisson_sampling=False,
        grad_sample_mode="ghost", noise_generator=seeded(), **settings,
    )  # fmt: skip
    criterion(module(x), y).backward()
    optimizer.step()
    theirs = [p.grad.clone() for p in model.parameters()]
    fresh = with_readout(width_mlp(32))
    DPGradient(fresh, cross_entropy, clip_scope="flat", generator=seeded(), **settings)(x, y, 32)
    for p, expected in zip(fresh.parameters(), theirs, strict=True):
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("debias", "kind"), [(False, torch.optim.Adam), (True, DPAdam)])
def test_adam_of_make_private(debias, kind):
    optimizer = made_private(width_mlp(32), "adam", debias_v=debias, eps=1e-6).optimizer
    assert type(optimizer.original_optimizer) is kind
    assert {g["eps"] for g in optimizer.param_groups} == {1e-6}
    if debias:
        assert {g["noise_std"] for g in optimizer.param_groups} == {1.1 / 32}


# The signal-to-noise report ---------------------------------------------------------------------


@pytest.mark.parametrize("scope", SCOPES)
def test_snr_report(scope):
    model = with_readout(width_mlp(64))
    x, y = digits(200)
    settings = {"noise_multiplier": 2.0, "max_grad_norm": 0.6, "clip_scope": scope}
    report = dp_snr_report(
        model, cross_entropy, x, y, batch_size=50, generator=seeded(), **settings
    )
    DPGradient(model, cross_entropy, **(settings | {"noise_multiplier": 0.0}))(x, y, 200)
    values = torch.linalg.svdvals(model[2].weight.grad)
    assert report.names[2] == "2.weight"
    assert report.signal_norm[2] == pytest.approx(float(values[0]), rel=1e-5)
    assert report.signal_rank[2] == pytest.approx(
        float(values.square().sum() / values[0] ** 2), rel=1e-5
    )
    assert report.noise_norm[2] == pytest.approx(2 * 0.6 / 50 * 16, rel=0.1)
    np.testing.assert_allclose(report.snr, report.signal_norm / report.noise_norm)
    tau = 2 * 0.6 / 50
    assert report.snr_public[3] == pytest.approx(0.6 / math.sqrt(6) / (tau * 8), rel=1e-12)
    if scope == "per_layer":
        assert (report.signal_norm <= 0.6 / math.sqrt(6)).all()
    assert not report.is_private
    assert "Not private" in str(report)
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    assert len(report.plot().lines) == 2
    matplotlib.pyplot.close("all")


def test_snr_report_without_noise_and_with_tied_weights():
    model = width_gpt(16, head_dim=8, depth=1, context=12)
    model.head.weight = model.embed.weight
    x, y = windows()
    report = dp_snr_report(model, next_byte_loss, x, y, noise_multiplier=0.0, batch_size=8)
    assert np.isinf(report.snr_public).all()
    assert (report.noise_norm == 0).all()
    with pytest.raises(ValueError, match="x must hold samples"):
        dp_snr_report(model, next_byte_loss, x[:0], y[:0], noise_multiplier=0.0, batch_size=8)


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier must be"),
        ({"noise_multiplier": 1.0}, ValueError, "max_grad_norm must be a finite number"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm must be"),
        ({"clip_scope": "both"}, ValueError, "clip_scope must be one of"),
        ({"strategy": "fast"}, ValueError, "strategy must be one of"),
        ({"microbatch": 0}, ValueError, "microbatch must be"),
        ({"automatic": 1}, ValueError, "automatic must be one of"),
    ],
)
def test_bad_gradient_settings(changes, error, message):
    with pytest.raises(error, match=message):
        private(width_mlp(8), cross_entropy, **changes)


def test_bad_gradient_models_and_data():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module"):
        private(None, cross_entropy)
    with pytest.raises(TypeError, match="loss_fn must be callable"):
        private(width_mlp(8), "cross_entropy")
    with pytest.raises(ValueError, match="BatchNorm in 0"):
        private(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)), cross_entropy)
    with pytest.raises(ValueError, match="trainable parameters"):
        private(nn.ReLU(), cross_entropy)
    with pytest.raises(ValueError, match='strategy="ghost" takes untied parameters of Linear'):
        private(nn.Conv1d(2, 2, 2), cross_entropy, strategy="ghost")
    gradient = private(width_mlp(8), cross_entropy)
    x, y = digits()
    with pytest.raises(ValueError, match="x and y must have the same length"):
        gradient(x, y[:-1], 32)
    with pytest.raises(ValueError, match="expected_batch_size must be"):
        gradient(x, y, 0)
    x = x.clone()
    x[3, 5] = math.nan
    with pytest.raises(NonFiniteGradientError, match="gradient of sample 3 is not finite"):
        gradient(x, y, 32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"noise_multiplier": None}, ValueError, "exactly one of target_epsilon and"),
        ({"target_epsilon": 1.0}, ValueError, "exactly one of target_epsilon and"),
        (
            {"noise_multiplier": None, "target_epsilon": 1.0, "delta": 1e-3},
            ValueError,
            "target_epsilon needs delta and epochs",
        ),
        ({"expected_batch_size": 30}, ValueError, "expected_batch_size must be 32"),
        ({"accountant": "moments"}, ValueError, "accountant must be one of"),
        ({"max_grad_norm": math.inf}, ValueError, "max_grad_norm must be a finite"),
        ({"noise_multiplier": 0.0, "regime": "noise"}, ValueError, "must be > 0 for regime"),
    ],
)
def test_bad_make_private(changes, error, message):
    with pytest.raises(error, match=message):
        made_private(width_mlp(16), "sgd", **changes)


def test_bad_loaders_and_models_of_make_private():
    x, y = digits()
    with pytest.raises(TypeError, match="data_loader must be a DataLoader, got list"):
        made_private(width_mlp(16), "sgd", [x, y])
    with pytest.raises(ValueError, match="data_loader must have a batch_size"):
        made_private(width_mlp(16), "sgd", DataLoader(TensorDataset(x, y), batch_size=None))
    with pytest.raises(ValueError, match="optimizer_name must be one of"):
        made_private(width_mlp(16), "lion")
    mixing = nn.Sequential(nn.Linear(64, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match=r"use torch.nn.GroupNorm"):
        made_private(mixing, "sgd", base_shapes=None)
