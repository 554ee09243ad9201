"""What every optimizer of the family must do in its users' loops, trainers and checkpoints.

The mathematics of each stands in its own test module; this battery runs over all of them. Among
its tests are the known failures of other optimizer packages: state that is keyed by the identity
of tensors, steps that are kept as Python numbers, state that is created on the wrong device or in
the wrong dtype, kernels that stumble over mixed dtypes, and param groups without parameters.
"""

from __future__ import annotations

import copy
import io
import math
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from thalweg import convex, training
from thalweg.tasks import load_digits, sample_batch
from thalweg.training import NonFiniteGradientError

FLOATS = [torch.float32, torch.bfloat16, torch.float64]


def plain(optimizer, loss_of):
    """Use the optimizer as `torch.optim` is used."""
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step()
    return loss.detach()


def with_loss(optimizer, loss_of):
    """Give the step the loss, which the KOALAs filter."""
    optimizer.zero_grad()
    loss = loss_of()
    loss.backward()
    optimizer.step(loss=loss)
    return loss.detach()


def by_micro_batches(optimizer, loss_of):
    """Give the step three gradients."""
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.accumulate()
    optimizer.step()
    return loss.detach()


@dataclass(frozen=True)
class Case:
    """An optimizer, and how it is used.

    ``buffers`` is how many tensors of a parameter's size and dtype its state holds, ``compiles``
    whether its step is traced, and ``sharded`` whether the step of a shard is that of the whole.
    ``setting`` is one of its numbers.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    drive: Callable[[Any, Callable[[], torch.Tensor]], torch.Tensor] = plain
    buffers: int = 1
    setting: str = "weight_decay"
    compiles: bool = True
    sharded: bool = True

    @property
    def calls(self) -> int:
        return 3 if self.drive is by_micro_batches else 1


def setup(name, family=training, **settings):
    """Return a constructor that takes parameters and further settings."""
    return lambda params, **more: getattr(family, name)(params, **settings | more)


CASES = [
    Case(
        "StabSGD",
        setup("StabSGD", lr=1.0, zeta=2, kappa=2.0, pool_replicas=False),
        compiles=False,
    ),
    Case("SignSGD", setup("SignSGD", lr=3e-3)),
    Case("SignSGD, plain", setup("SignSGD", lr=3e-3, momentum=0.0), buffers=0),
    Case("Lion", setup("Lion", lr=3e-3)),
    Case("Muon", setup("Muon", lr=0.01)),
    Case("Muonlight", setup("Muonlight", lr=0.01)),
    Case("NLPrecond", setup("NLPrecond", lr=0.1), buffers=0),
    Case("NLPrecond, momentum", setup("NLPrecond", lr=0.3, momentum=0.9, kernel="clip")),
    Case("KoalaPP", setup("KoalaPP", lr=0.3, q=2.0, sigma=2.0), with_loss, buffers=2),
    Case("Koala, V", setup("Koala", lr=0.3, variant="V", q=0.5, sigma=0.5), with_loss, buffers=0),
    Case("Koala, M", setup("Koala", lr=0.1, variant="M", q=0.1, sigma=0.1), with_loss),
    Case(
        "ClippedMoM", setup("ClippedMoM", lr=0.1, k=3), by_micro_batches, buffers=3, compiles=False
    ),
    Case(
        "ClippedSSTM",
        setup("ClippedSSTM", L=10.0, k=3),
        by_micro_batches,
        buffers=5,
        compiles=False,
    ),
    Case("DPAdam", setup("DPAdam", lr=3e-3, noise_std=1e-3), buffers=2),
    Case("DPMuonOptimizer", setup("DPMuonOptimizer", lr=0.01), setting="momentum"),
    Case("AdaProx", setup("AdaProx", convex, D=0.3, prox=convex.L1(1e-4)), buffers=0, setting="D"),
    Case(
        "AdaProxAccel",
        setup("AdaProxAccel", convex, D=0.3, prox=convex.L1(1e-4)),
        buffers=2,
        setting="D",
    ),
]
every_optimizer = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def network(seed=0, dtype=torch.float64):
    """Return a perceptron for the digits, drawn from a seed."""
    model = nn.Sequential(nn.Linear(64, 24), nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, 10))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty_like(parameter).uniform_(-0.2, 0.2, generator=generator))
    return model.to(dtype)


def batches(model, seed=0, size=32):
    """Return a function whose every call gives the loss of another batch of digits."""
    generator = torch.Generator().manual_seed(seed)
    digits = load_digits()
    dtype = next(model.parameters()).dtype

    def loss_of():
        images, labels = sample_batch(digits.train_images, digits.train_labels, size, generator)
        return cross_entropy(model(images.to(dtype)).float(), labels)

    return loss_of


def run(case, optimizer, model, steps, seed=0):
    loss_of = batches(model, seed)
    return [case.drive(optimizer, loss_of).item() for _ in range(steps)]


def trained(case, steps=4, dtype=torch.float64, **settings):
    model = network(dtype=dtype)
    optimizer = case.make(model.parameters(), **settings)
    run(case, optimizer, model, steps, seed=1)
    return model, optimizer


def flat(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def tensors_of(optimizer):
    """Return all tensors of the optimizer's state."""
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


# In a training loop


@every_optimizer
def test_it_trains_a_network(case):
    model = network(dtype=torch.float32)
    losses = run(case, case.make(model.parameters()), model, 120)
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert math.isfinite(losses[-1])


@every_optimizer
@pytest.mark.parametrize("dtype", FLOATS)
def test_parameters_and_state_keep_their_dtype(case, dtype):
    model, optimizer = trained(case, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    wide = torch.promote_types(dtype, torch.float32)
    assert {t.dtype for t in tensors_of(optimizer) if t.numel() > 1} <= {dtype, wide}
    assert not torch.equal(flat(model), flat(network(dtype=dtype)))


@every_optimizer
def test_half_precision_follows_single_precision(case):
    single, half = (trained(case, 6, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    start = flat(network())
    moved, moved_half = flat(single) - start, flat(half) - start
    assert torch.nn.functional.cosine_similarity(moved, moved_half, dim=0) > 0.8


@every_optimizer
def test_a_closure_does_what_the_loop_does(case):
    model, twin = network(), network()
    optimizer, other = case.make(model.parameters()), case.make(twin.parameters())
    loss_of, twin_loss_of = batches(model), batches(twin)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        other.zero_grad()
        loss = twin_loss_of()
        loss.backward()
        return loss

    for _ in range(5):
        loss = case.drive(optimizer, loss_of)
        assert torch.equal(torch.as_tensor(other.step(closure)).detach(), loss)
    assert len(calls) == 5 * case.calls
    assert torch.equal(flat(model), flat(twin))


@every_optimizer
def test_gradients_that_are_zeroed_in_place_do_as_well(case):
    model, twin = network(), network()
    run(case, case.make(model.parameters()), model, 5)
    optimizer = case.make(twin.parameters())
    zero_grad = optimizer.zero_grad
    optimizer.zero_grad = lambda: zero_grad(set_to_none=False)
    run(case, optimizer, twin, 5)
    assert torch.equal(flat(model), flat(twin))


@every_optimizer
def test_param_groups_have_their_own_step_size(case):
    """A small step of one group leaves the step of the other as it was."""
    together, apart = network(), network()
    parameters = list(apart.parameters())
    optimizer = case.make([{"params": parameters[:1], "lr": 1e-30}, {"params": parameters[1:]}])
    first = case.make(together.parameters())
    steps = 3  # StabSGD measures twice
    run(case, first, together, steps)
    run(case, optimizer, apart, steps)
    start = network()
    assert torch.allclose(apart[0].weight, start[0].weight, rtol=0, atol=1e-20)
    assert not torch.equal(together[0].weight, start[0].weight)
    assert not torch.equal(apart[0].bias, start[0].bias)


@every_optimizer
@pytest.mark.filterwarnings("ignore:a learning-rate scheduler is attached to StabSGD")
def test_schedulers_set_the_step_size(case):
    if case.name in ("ClippedSSTM", "AdaProxAccel"):
        pytest.skip("without a step of its own the iterate still moves along its triangle")
    model, optimizer = trained(case)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch < 5))
    moved = []
    for epoch in range(8):
        before = flat(model)
        run(case, optimizer, model, 3, seed=epoch)
        scheduler.step()
        moved.append(not torch.equal(before, flat(model)))
    assert any(moved[:5])
    assert not any(moved[5:])


@every_optimizer
def test_frozen_and_unused_parameters_rest(case):
    model = network()
    model[0].requires_grad_(False)
    unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = case.make([*model.parameters(), unused])
    run(case, optimizer, model, 4)
    start = network()
    assert torch.equal(model[0].weight, start[0].weight)
    assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
    assert not torch.equal(model[3].weight, start[3].weight)
    frozen = {id(unused), *map(id, model[0].parameters())}
    assert not any(
        t.numel() > 1
        for p, s in optimizer.state.items()
        if id(p) in frozen
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )


@every_optimizer
@pytest.mark.filterwarnings("ignore:the set of parameters that have gradients changed")
def test_parameters_may_thaw_later(case):
    model = network()
    model[0].requires_grad_(False)
    optimizer = case.make(model.parameters())
    run(case, optimizer, model, 4)
    model[0].requires_grad_(True)
    run(case, optimizer, model, 12)
    assert not torch.equal(model[0].weight, network()[0].weight)


@every_optimizer
def test_tied_parameters_move_once(case):
    """Weights that two layers share move as those of one layer that is called twice."""

    class Shared(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.first = nn.Linear(64, 24, bias=False).double()
            self.second = nn.Linear(24, 64, bias=False).double()
            self.third = self.first if not tied else nn.Linear(64, 24, bias=False).double()
            if tied:
                self.third.weight = self.first.weight

        def forward(self, x):
            return self.third(self.second(self.first(x)))[:, :10]

    torch.manual_seed(0)
    once = Shared(tied=False)
    tied = Shared(tied=True)
    tied.load_state_dict(once.state_dict())
    for model in (once, tied):
        run(case, case.make(model.parameters()), model, 4)
    assert torch.equal(once.first.weight, tied.third.weight)


@every_optimizer
def test_mixed_dtypes_and_empty_tensors_share_a_group(case):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 24)
            self.second = nn.Linear(24, 10).double()
            self.none = nn.Parameter(torch.empty(0, 3))

        def forward(self, x):
            hidden = self.first(x.float()).double()
            return self.second(hidden) + self.none.sum()

    torch.manual_seed(0)
    model = Mixed()
    start = flat(model)
    run(case, case.make(model.parameters()), model, 5)
    assert [p.dtype for p in model.parameters()][1:] == [torch.float32] * 2 + [torch.float64] * 2
    moved = flat(model) != start
    assert moved[: 64 * 24].any()
    assert moved[-10:].any()
    assert flat(model).isfinite().all()


@every_optimizer
def test_empty_param_groups_and_no_gradients_are_fine(case):
    model = network()
    optimizer = case.make([{"params": []}, {"params": model.parameters()}])
    if case.drive is plain:
        optimizer.step()  # no gradients yet
    run(case, optimizer, model, 4)
    assert not torch.equal(flat(model), flat(network()))


@every_optimizer
def test_memory_formats_are_kept_and_do_not_matter(case):
    def convolution():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 10)
        )

    digits = load_digits()
    finals = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = convolution().double().to(memory_format=memory_format)

        def loss_of(model=model):
            images = digits.train_images[:64].double().view(-1, 1, 8, 8)
            return cross_entropy(model(images).float(), digits.train_labels[:64])

        optimizer = case.make(model.parameters())
        for _ in range(4):
            case.drive(optimizer, loss_of)
        assert model[1].weight.is_contiguous(memory_format=memory_format)
        finals.append(flat(model))
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-6, atol=1e-8)


@every_optimizer
def test_names_of_parameters_are_kept(case):
    model = network()
    optimizer = case.make(model.named_parameters())
    run(case, optimizer, model, 3)
    names = [n for group in optimizer.state_dict()["param_groups"] for n in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@every_optimizer
def test_step_hooks_are_called(case):
    model, optimizer = trained(case)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    run(case, optimizer, model, 2)
    assert seen == ["before", "after"] * 2


@every_optimizer
def test_state_is_created_where_its_parameter_lives(case):
    """The defaults of the surrounding code must not leak into the state."""
    model = network(dtype=torch.float32)
    optimizer = case.make(model.parameters())
    images, labels = load_digits().train_images[:8], load_digits().train_labels[:8]
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(3):
            case.drive(optimizer, lambda: cross_entropy(model(images), labels))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {t.dtype for t in tensors_of(optimizer) if t.numel() > 1} <= {torch.float32}
    assert {t.device.type for t in tensors_of(optimizer)} <= {"cpu"}


@every_optimizer
def test_the_state_holds_no_python_numbers_and_no_more_than_it_says(case):
    """Counters in the state must be tensors, which sharded checkpoints can save."""
    model = network(dtype=torch.float32)
    optimizer = case.make(model.parameters())
    largest = 0.0
    n = sum(p.numel() for p in model.parameters())
    for _ in range(4):
        run(case, optimizer, model, 1)
        entries = sum(t.numel() for t in tensors_of(optimizer))
        largest = max(largest, entries / n)
        values = [v for state in optimizer.state.values() for v in state.values()]
        assert all(isinstance(v, torch.Tensor) for v in values)
    scalars = 12 * len(list(model.parameters())) / n
    assert case.buffers <= math.ceil(largest - scalars) <= case.buffers + (case.buffers > 0)


# Saving, copying


@every_optimizer
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_checkpoint_resumes_bit_for_bit(case, dtype, steps):
    model, optimizer = trained(case, steps, dtype)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    twin = network(seed=1, dtype=dtype)
    twin.load_state_dict(saved["model"])
    resumed = case.make(twin.parameters())
    resumed.load_state_dict(saved["optimizer"])
    run(case, optimizer, model, 7, seed=2)
    run(case, resumed, twin, 7, seed=2)
    assert torch.equal(flat(model), flat(twin))


@every_optimizer
def test_a_checkpoint_resumes_after_a_group_was_added(case):
    model = network()
    parameters = list(model.parameters())
    optimizer = case.make(parameters[:2])
    run(case, optimizer, model, 3)
    optimizer.add_param_group({"params": parameters[2:]})
    run(case, optimizer, model, 4)
    twin = copy.deepcopy(model)
    copies = list(twin.parameters())
    resumed = case.make(copies[:2])
    resumed.add_param_group({"params": copies[2:]})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(case, optimizer, model, 7, seed=2)
    run(case, resumed, twin, 7, seed=2)
    assert torch.equal(flat(model), flat(twin))
    assert not torch.equal(model[3].weight, network()[3].weight)


@every_optimizer
def test_deep_copies_are_independent_and_go_on_alike(case):
    model, optimizer = trained(case)
    twin, other = copy.deepcopy((model, optimizer))
    before = flat(model)
    run(case, other, twin, 7, seed=3)
    assert torch.equal(flat(model), before)
    run(case, optimizer, model, 7, seed=3)
    assert torch.equal(flat(model), flat(twin))


@every_optimizer
def test_state_belongs_to_positions_and_not_to_tensors(case):
    """After `Module.to_empty` or a reload, other tensors stand where the old ones did."""
    model, optimizer = trained(case)
    twin = network(seed=5)
    twin.load_state_dict(model.state_dict())
    resumed = case.make(list(twin.parameters()))
    resumed.load_state_dict(optimizer.state_dict())
    del optimizer
    saved, loaded = tensors_of(trained(case)[1]), tensors_of(resumed)
    assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    mine = set(map(id, twin.parameters()))
    assert {id(p) for p in resumed.state} <= mine


RESUME = """
import importlib.util, sys, torch
specification = importlib.util.spec_from_file_location("battery", sys.argv[1])
battery = importlib.util.module_from_spec(specification)
sys.modules["battery"] = battery
specification.loader.exec_module(battery)
saved = torch.load(sys.argv[2], weights_only=True)
finals = {}
for case in battery.CASES:
    model = battery.network()
    model.load_state_dict(saved[case.name]["model"])
    optimizer = case.make(model.parameters())
    optimizer.load_state_dict(saved[case.name]["optimizer"])
    battery.run(case, optimizer, model, 7, seed=2)
    finals[case.name] = battery.flat(model)
torch.save(finals, sys.argv[3])
"""


def test_checkpoints_resume_in_another_process(tmp_path):
    saved, finals = {}, {}
    for case in CASES:
        model, optimizer = trained(case)
        saved[case.name] = copy.deepcopy(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        )
        run(case, optimizer, model, 7, seed=2)
        finals[case.name] = flat(model)
    torch.save(saved, tmp_path / "saved.pt")
    arguments = [__file__, tmp_path / "saved.pt", tmp_path / "finals.pt"]
    subprocess.run([sys.executable, "-c", RESUME, *map(str, arguments)], check=True)
    resumed = torch.load(tmp_path / "finals.pt", weights_only=True)
    assert len(resumed) == len(CASES)
    for name, final in finals.items():
        assert torch.equal(final, resumed[name]), name


# Compilation


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@every_optimizer
def test_a_compiled_step_takes_the_same_path_and_is_compiled_once(case):
    """Also while a schedule changes the step size, which must be a tensor for that.

    StabSGD and ClippedMoM keep their clocks in Python: a compiled step calls theirs as it is.
    """
    torch._dynamo.reset()
    finals = []
    for compiled in (False, True):
        model = network()
        lr = {"lr": torch.tensor(1e-3, dtype=torch.float64)} if case.compiles else {}
        optimizer = case.make(model.parameters(), check_finite=False, **lr)
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        loss_of = batches(model)
        for t in range(6):
            for _ in range(case.calls):
                optimizer.zero_grad()
                loss = loss_of()
                loss.backward()
                if case.drive is by_micro_batches:
                    optimizer.accumulate()
            extra = {"loss": loss.detach()} if case.drive is with_loss else {}
            # The first step creates the state, for which the second may be compiled anew.
            with torch._dynamo.config.patch(error_on_recompile=t > 1):
                step(**extra)
            if lr:
                optimizer.param_groups[0]["lr"].mul_(0.9)
        finals.append(flat(model))
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-10, atol=1e-12)


# Mixed precision and other people's trainers


@every_optimizer
def test_grad_scaler_and_autocast(case):
    """A scaled loss gives the steps of an unscaled one, and an overflow is skipped."""
    if case.drive is by_micro_batches:
        pytest.skip("micro-gradients are unscaled by the user: GradScaler knows .grad only")
    finals = []
    for enabled in (False, True):
        model = network(dtype=torch.float32)
        optimizer = case.make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=enabled)
        loss_of = batches(model)
        for step in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if step == 4 and enabled:
                before = flat(model)
                model[0].weight.grad[0, 0] = math.inf
            extra = {"loss": loss.detach()} if case.drive is with_loss else {}
            if step != 4 or enabled:
                scaler.step(optimizer, **extra)
            scaler.update()
            if step == 4 and enabled:
                assert torch.equal(before, flat(model))
        finals.append(flat(model))
    # Scaling by powers of two changes underflows only.
    torch.testing.assert_close(finals[0], finals[1], rtol=1e-3, atol=1e-4)


@every_optimizer
@pytest.mark.filterwarnings("ignore")
def test_accelerate(case, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = network(dtype=torch.float32)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, case.make(model.parameters()))
    inner = optimizer.optimizer
    loss_of = batches(model)
    for _ in range(6):
        for _ in range(case.calls):
            optimizer.zero_grad()
            loss = loss_of()
            accelerator.backward(loss)
            if case.drive is by_micro_batches:
                inner.accumulate()
        # Its wrapper hands the step a closure and nothing else.
        optimizer.step() if case.drive is not with_loss else inner.step(loss=loss)
    accelerator.save_state(tmp_path, safe_serialization=True)
    twin = network(dtype=torch.float32)
    run(case, case.make(twin.parameters()), twin, 6)
    assert torch.equal(flat(prepared), flat(twin))


@every_optimizer
@pytest.mark.filterwarnings("ignore")
def test_lightning(case, tmp_path):
    """Lightning's automatic optimization calls the step with a closure."""
    lightning = pytest.importorskip("lightning.pytorch")
    digits = load_digits()
    data = torch.utils.data.TensorDataset(digits.train_images, digits.train_labels)
    optimizers = []

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network(dtype=torch.float32)

        def training_step(self, batch, index):
            images, labels = batch
            return cross_entropy(self.network(images), labels)

        def configure_optimizers(self):
            optimizers.append(case.make(self.parameters()))
            return optimizers[-1]

    if case.drive is by_micro_batches:
        pytest.skip("every call of Lightning's closure is of the same batch; see its own tests")
    model = Classifier()
    trainer = lightning.Trainer(
        max_steps=12,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64))
    twin = network(dtype=torch.float32)
    optimizer = case.make(twin.parameters())
    for images, labels in list(torch.utils.data.DataLoader(data, batch_size=64))[:12]:
        case.drive(optimizer, lambda x=images, y=labels: cross_entropy(twin(x), y))
    torch.testing.assert_close(flat(model), flat(twin), rtol=0, atol=0)


@every_optimizer
@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer(case, tmp_path):
    """`Trainer(optimizers=…)` gives the step nothing at all."""
    transformers = pytest.importorskip("transformers")
    if case.drive is not plain:
        pytest.skip("the trainer gives neither loss nor micro-gradients; see its own tests")
    digits = load_digits()

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network(dtype=torch.float32)

        def forward(self, images, labels):
            logits = self.network(images)
            return {"loss": cross_entropy(logits, labels), "logits": logits}

    rows = [
        {"images": image, "labels": label}
        for image, label in zip(digits.train_images, digits.train_labels, strict=True)
    ]
    model = Classifier()
    optimizer = case.make(model.parameters())
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=tmp_path,
            max_steps=8,
            per_device_train_batch_size=32,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            max_grad_norm=0.0,
        ),
        train_dataset=rows,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    assert math.isfinite(trainer.train().training_loss)
    assert not torch.equal(flat(model), flat(network()))


# Several processes


def train_in_parallel(rank, folder):
    """Train every case under DDP and FSDP2, each process on its half of the batch."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    finals = {}
    for case in CASES:
        model = nn.parallel.DistributedDataParallel(network())
        run_on_half(case, case.make(model.parameters()), model, rank)
        finals[f"{case.name}, ddp"] = flat(model)
        if not case.sharded:
            continue
        model = network()
        fully_shard(model, mesh=mesh)
        optimizer = case.make(model.parameters())
        run_on_half(case, optimizer, model, rank, steps=3)
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        # torch cannot load a state without a tensor of some dimension, SGD's neither.
        if any(t.ndim for t in tensors_of(optimizer)):
            set_optimizer_state_dict(model, optimizer, state, options=options)
        run_on_half(case, optimizer, model, rank, steps=4, skip=3)
        whole = [p.full_tensor().detach().reshape(-1) for p in model.parameters()]
        finals[f"{case.name}, fsdp"] = torch.cat(whole)
    torch.save(finals, f"{folder}/finals{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_on_half(case, optimizer, model, rank=None, steps=7, skip=0):
    """Train on one half of 32 images, or on all of them where the rank is None."""
    generator = torch.Generator().manual_seed(0)
    digits = load_digits()
    rows = slice(None) if rank is None else slice(16 * rank, 16 * (rank + 1))

    def loss_of():
        images, labels = sample_batch(digits.train_images, digits.train_labels, 32, generator)
        return cross_entropy(model(images[rows].double()), labels[rows])

    for _ in range(skip * case.calls):
        sample_batch(digits.train_images, digits.train_labels, 32, generator)
    for _ in range(steps):
        case.drive(optimizer, loss_of)


@pytest.fixture(scope="module")
def parallel_finals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    torch.multiprocessing.spawn(train_in_parallel, (folder,), nprocs=2)
    return [torch.load(folder / f"finals{rank}.pt", weights_only=True) for rank in range(2)]


@every_optimizer
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one(case, kind, parallel_finals):
    """Replicas agree to the last bit, and with one process that sees the whole batch."""
    if kind == "fsdp" and not case.sharded:
        pytest.skip("its update needs whole tensors")
    first, second = (finals[f"{case.name}, {kind}"] for finals in parallel_finals)
    assert torch.equal(first, second)
    if case.drive is with_loss:
        return  # each replica filters the loss of its own half
    model = network()
    run_on_half(case, case.make(model.parameters()), model)
    torch.testing.assert_close(first, flat(model), rtol=1e-6, atol=1e-9)


# Bad input


@every_optimizer
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_gradients_that_are_not_finite_are_skipped_and_counted(case, bad):
    model, optimizer = trained(case)
    before = flat(model)
    skipped = optimizer.n_skipped

    def poisoned():
        loss = batches(model)()
        return loss + bad * model[0].weight[0, 0]

    def with_bad_gradient():
        loss = batches(model)()
        model[0].weight.register_hook(lambda grad: torch.full_like(grad, bad))
        return loss

    case.drive(optimizer, with_bad_gradient if case.drive is with_loss else poisoned)
    assert torch.equal(before, flat(model))
    assert optimizer.n_skipped == skipped + 1


@every_optimizer
def test_ten_in_a_row_are_an_error(case):
    model, optimizer = trained(case)

    def poisoned():
        return batches(model)() + math.nan * model[0].weight[0, 0]

    for _ in range(9):
        case.drive(optimizer, poisoned)
    with pytest.raises(NonFiniteGradientError, match="10 gradients in a row were not finite"):
        case.drive(optimizer, poisoned)


@every_optimizer
def test_a_good_gradient_ends_the_row(case):
    model, optimizer = trained(case)

    def poisoned():
        return batches(model)() + math.nan * model[0].weight[0, 0]

    for _ in range(2):
        for _ in range(9):
            case.drive(optimizer, poisoned)
        run(case, optimizer, model, 1)
    assert flat(model).isfinite().all()


@every_optimizer
def test_sparse_gradients_are_refused(case):
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = case.make(embedding.parameters())
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        case.drive(optimizer, lambda: embedding(torch.tensor([1, 2])).sum())


@every_optimizer
def test_complex_parameters_are_refused(case):
    x = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="params must be real"):
        case.make([x])
    optimizer = case.make([nn.Parameter(torch.ones(3, 2))])
    with pytest.raises(TypeError, match="params must be real"):
        optimizer.add_param_group({"params": [x]})
    assert len(optimizer.param_groups) == 1


@every_optimizer
@pytest.mark.parametrize("lr", [-1.0, math.nan, math.inf])
def test_bad_step_sizes_are_refused_in_every_group(case, lr):
    with pytest.raises(ValueError, match="lr must be"):
        case.make([nn.Parameter(torch.ones(3, 2))], lr=lr)
    with pytest.raises(ValueError, match="lr must be"):
        case.make([{"params": nn.Parameter(torch.ones(3, 2)), "lr": lr}])


@every_optimizer
def test_settings_of_the_wrong_type_are_refused(case):
    with pytest.raises(TypeError, match=f"{case.setting} must be a number"):
        case.make([nn.Parameter(torch.ones(3, 2))], **{case.setting: "0.1"})


@every_optimizer
def test_no_parameters_is_an_error(case):
    with pytest.raises(ValueError, match="empty parameter list"):
        case.make([])


@every_optimizer
def test_nothing_warns_in_ordinary_use(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(case, 12, torch.float32)
