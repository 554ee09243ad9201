"""Claims about guide initialization: an untrained guide's geometry, before training starts.

A contender's ``make`` is called as ``make(target, data, generator, steps)`` with a network in
torch's default initialization, unlabeled inputs and the number of label-free steps that it may
take, and initializes the network in place. For an initialization of your own: ``Contender("mine",
make=lambda target, data, generator, steps: ..., tune=...)`` with the grid of the other contenders.
At the scales quick and full, ``steps`` is the default of `guide_init`.

All contenders get the same fresh network for a seed and train it in the same way, with a step size
that is tuned for each of them.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from thalweg.common.optional import requires
from thalweg.common.random import torch_generator
from thalweg.evidence import Contender, Measurement, Metric, Scale, at_least, at_most, claim
from thalweg.tasks import coordinate_image, load_digits, uniform_points
from thalweg.training import guide_init, random_guide

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy, interpolate, mse_loss
with requires("peers"):
    from sklearn import datasets

Make = Callable[[nn.Module, Tensor, torch.Generator, int], Any]
Loss = Callable[[Tensor, Tensor], Tensor]
POINTS = 2048
LAST = 0.1  # the share of training over which the final loss is averaged


def default(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Leave the network as torch makes it."""


def orthogonal(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Draw all weight matrices orthogonal, with the gain of ReLU; biases stay as torch's."""
    for layer in _linear(target):
        nn.init.orthogonal_(layer.weight, gain=math.sqrt(2), generator=generator)


@torch.no_grad()
def lsuv(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Layer-sequential unit variance: orthogonal, then pre-activations of variance 1."""
    for layer in _linear(target)[:-1]:
        nn.init.orthogonal_(layer.weight, generator=generator)
        scale = _output(target, layer, data).std()
        layer.weight.div_(scale)
        layer.bias.div_(scale)


@torch.no_grad()
def data_dependent(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Center each unit on the data and give all units of a layer the same variance."""
    for layer in _linear(target)[:-1]:
        before = _output(target, layer, data)
        factor = before.std() / before.std(0)
        layer.weight.mul_(factor[:, None])
        layer.bias.sub_(before.mean(0)).mul_(factor)


def _output(target: nn.Module, layer: nn.Module, data: Tensor) -> Tensor:
    """Return what a layer gives for the first 1024 inputs."""
    seen: list[Tensor] = []
    hook = layer.register_forward_hook(lambda module, inputs, output: seen.append(output))
    target(data[:1024])
    hook.remove()
    return seen[0]


def _guided(
    guide: nn.Module, target: nn.Module, data: Tensor, generator: torch.Generator, steps: int
) -> Any:
    return guide_init(target, guide, data, steps=steps, show_progress=False, generator=generator)


def deep_guide(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Align to a random network of three times the depth, as `random_guide` makes it."""
    _guided(random_guide(target, generator=generator), target, data, generator, steps)


def shallow_guide(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Align to a random network of the same kind with one hidden layer."""
    guide = random_guide(target, depth=1, generator=generator)
    # Its few directions are what the control is about; the warning says so.
    with _quiet():
        _guided(guide, target, data, generator, steps)


def own_guide(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Align to another draw of the target's own architecture and initialization."""
    guide = copy.deepcopy(target)
    with torch.random.fork_rng():
        torch.manual_seed(generator.initial_seed())
        for layer in guide.modules():
            getattr(layer, "reset_parameters", lambda: None)()
    with _quiet():
        _guided(guide, target, data, generator, steps)


@torch.no_grad()
def scale_only(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Keep the fresh geometry, and give each weight the norm that alignment would give it."""
    aligned = copy.deepcopy(target)
    with torch.enable_grad():
        deep_guide(aligned, data, generator, steps)
    for fresh, other in zip(target.parameters(), aligned.parameters(), strict=True):
        fresh.mul_(other.norm() / fresh.norm())


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the guide's features have effective ranks")
        yield


def _linear(target: nn.Module) -> list[nn.Linear]:
    return [module for module in target.modules() if isinstance(module, nn.Linear)]


def perceptron(*widths: int) -> nn.Sequential:
    """Return a ReLU network of these widths in torch's default initialization."""
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def patches(channels: int = 16, patch: int = 4) -> nn.Sequential:
    """Return a network on patches of images (b, 1, 16, 16), whose readout takes maps of any size.

    The first layer sees each patch, the second mixes neighbors, and quadrants are read out. It is
    in Kaiming's initialization, as guides for it are.
    """
    model = nn.Sequential(
        nn.Conv2d(1, channels, patch, stride=patch),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * channels, 10),
    )
    draw_kaiming(model)
    return model


def draw_kaiming(model: nn.Module) -> None:
    """Draw weights with the variance that ReLU networks keep, and no biases."""
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)


@lru_cache(maxsize=64)
def initialized(
    contender_make: Make,
    architecture: Callable[[], nn.Module],
    inputs: Callable[[torch.Generator], Tensor],
    seed: int,
    own_seed: int,
    steps: int,
) -> nn.Module:
    """Return the network that a contender starts from; step sizes of one seed share it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        target = architecture()
    data = inputs(torch.Generator().manual_seed(seed))
    contender_make(target, data, torch.Generator().manual_seed(own_seed), steps)
    return target


def start(
    contender: Contender,
    architecture: Callable[[], nn.Module],
    inputs: Callable[[torch.Generator], Tensor],
    rng: np.random.Generator,
    alignment: int,
) -> nn.Module:
    """Return a copy of `initialized` for the two random streams of a trial."""
    assert contender.make is not None
    seed, own_seed = (int(stream.integers(2**31)) for stream in rng.spawn(2))
    return copy.deepcopy(
        initialized(contender.make, architecture, inputs, seed, own_seed, alignment)
    )


def train(model: nn.Module, x: Tensor, y: Tensor, loss_fn: Loss, lr: float, steps: int) -> Any:
    """Train on the whole set with Adam; return the loss before every step, of shape (steps,)."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return np.nan_to_num(np.array(losses), nan=np.inf)


def final(losses: Any) -> float:
    """Return the mean loss over the last tenth of training; single ones jump at large steps."""
    return float(losses[-max(1, round(LAST * len(losses))) :].mean())


def at_steps(losses: Any, *shares: float) -> dict[str, float]:
    """Return the losses after some shares of training."""
    return {
        f"at {share:.0%}": float(losses[math.ceil(share * len(losses)) - 1]) for share in shares
    }


def points(generator: torch.Generator) -> Tensor:
    """Return what alignment on coordinates sees: points, and no value of the image."""
    return uniform_points(POINTS, generator)


def coordinate_network() -> nn.Module:
    """Return the shallow network that fits the image."""
    return perceptron(2, 128, 128, 1)


LRS = [0.005, 0.01, 0.02, 0.04, 0.08, 0.16]
LARGER_LRS = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64]  # for weights several times as large
IMAGE_LOSS = Metric(
    "mean squared error", better="lower", average="geometric mean", curve=("step", "error")
)


def fit_image(
    contender: Contender, rng: np.random.Generator, steps: int, side: int, alignment: int, lr: float
) -> Measurement:
    """Train the coordinate network on the photograph."""
    image = coordinate_image("china", side)
    model = start(contender, coordinate_network, points, rng, alignment)
    losses = train(model, image.coordinates, image.values, mse_loss, lr, steps)
    return Measurement(
        final(losses), curve=(np.arange(steps), losses), extras=at_steps(losses, 0.1, 0.3, 1.0)
    )


@claim(
    method="guide-init",
    statement="A shallow coordinate network aligned to a deep random guide fits an image better "
    "than from the default, orthogonal, LSUV or data-dependent initialization",
    metric=IMAGE_LOSS,
    contenders=[
        Contender("deep guide", make=deep_guide, tune={"lr": LRS}),
        Contender("default", make=default, tune={"lr": LRS}),
        Contender("orthogonal", make=orthogonal, tune={"lr": LRS}),
        Contender("LSUV", make=lsuv, tune={"lr": LARGER_LRS}),
        Contender("data-dependent", make=data_dependent, tune={"lr": LRS}),
        Contender("scale only", make=scale_only, tune={"lr": LRS}, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=1, tuning_seeds=1, steps=10, side=8, alignment=10),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=150, side=32, alignment=300),
        "full": Scale(seeds=16, tuning_seeds=3, steps=300, side=32, alignment=300),
    },
    headline=True,
)
def depth_into_a_shallow_network(
    contender: Contender,
    rng: np.random.Generator,
    *,
    steps: int,
    side: int,
    alignment: int,
    lr: float,
) -> Measurement:
    """Fit a grey photograph of 32 x 32 pixels by a network of its coordinates, 2-128-128-1.

    The shallow network is limited by its initial geometry: it sees nearby pixels as alike. The
    guide is a random tanh network with 6 hidden layers in the chaotic phase, which tells them
    apart. Alignment sees random coordinates and no value of the image, and features have the scale
    of the fresh network. The peers are initializations that people use; the last two look at the
    inputs as well. The control has the norms of the aligned weights, and the fresh
    geometry. Read whether the ratio to the best peer is below 1, and whether the control shows the
    same gain.
    """
    return fit_image(contender, rng, steps, side, alignment, lr)


@claim(
    method="guide-init",
    statement="The gain comes from the guide's depth: a deep random guide gives a lower error than "
    "a guide with one hidden layer, to which the network is aligned in the same way",
    metric=IMAGE_LOSS,
    contenders=[
        Contender("deep guide", make=deep_guide, tune={"lr": LRS}),
        Contender("depth-1 guide", make=shallow_guide, tune={"lr": LRS}, control=True),
        Contender("own architecture", make=own_guide, tune={"lr": LRS}, control=True),
    ],
    expect=at_most(1.0, of="depth-1 guide"),
    scales={
        "smoke": Scale(seeds=1, tuning_seeds=1, steps=10, side=8, alignment=10),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=150, side=32, alignment=300),
        "full": Scale(seeds=16, tuning_seeds=3, steps=300, side=32, alignment=300),
    },
)
def depth_of_the_guide(
    contender: Contender,
    rng: np.random.Generator,
    *,
    steps: int,
    side: int,
    alignment: int,
    lr: float,
) -> Measurement:
    """Fit the photograph after the same alignment to guides of different depth.

    All contenders go through the same number of alignment steps on the same points, so that what
    differs is the guide: deep and chaotic, with one hidden layer, or another draw of the target's
    own architecture. Read whether the ratio to the depth-1 guide is below 1; if it is not, the
    procedure and not the depth makes the difference.
    """
    return fit_image(contender, rng, steps, side, alignment, lr)


def digit_rows(generator: torch.Generator) -> Tensor:
    """Return the digits of the training split, without labels."""
    return load_digits().train_images


def digit_network() -> nn.Module:
    """Return a perceptron for digits."""
    return perceptron(64, 128, 128, 10)


def convolutional_guide(
    target: nn.Module, data: Tensor, generator: torch.Generator, steps: int
) -> None:
    """Align to a random convolutional network."""
    guide = random_guide("images", in_shape=(1, 8, 8), generator=generator)
    _guided(guide, target, data, generator, steps)


OTHER_LRS = [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1]


@claim(
    method="guide-init",
    statement="Aligning a perceptron to a random convolutional network does no harm: its test "
    "accuracy on digits is not lower by more than one point",
    metric=Metric("test accuracy", better="higher", curve=("step", "train loss")),
    contenders=[
        Contender("convolutional guide", make=convolutional_guide, tune={"lr": OTHER_LRS}),
        Contender("default", make=default, tune={"lr": OTHER_LRS}),
        Contender("own architecture", make=own_guide, tune={"lr": OTHER_LRS}, control=True),
    ],
    expect=at_least(-0.01, of="default", effect="difference"),
    scales={
        "smoke": Scale(seeds=1, tuning_seeds=1, steps=5, labels=50, alignment=10),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=100, labels=200, alignment=300),
        "full": Scale(seeds=16, tuning_seeds=3, steps=200, labels=200, alignment=300),
    },
)
def no_harm_on_images(
    contender: Contender,
    rng: np.random.Generator,
    *,
    steps: int,
    labels: int,
    alignment: int,
    lr: float,
) -> Measurement:
    """Train a perceptron on 200 labeled digits, of which all seeds draw their own.

    Where a network is not limited by its initial geometry, alignment is expected to change
    little. Nothing but "no harm" is claimed; read the interval of the difference, and the control,
    which is aligned to its own kind. What is seen: the difference is a fraction of a point, to the
    disadvantage of the guide if anything, and a few seeds do not exclude a whole one.
    """
    data = load_digits()
    chosen = torch_generator(rng.spawn(1)[0])
    model = start(contender, digit_network, digit_rows, rng, alignment)
    index = torch.randperm(len(data.train_labels), generator=chosen)[:labels]
    x, y = data.train_images[index], data.train_labels[index]
    losses = train(model, x, y, cross_entropy, lr, steps)
    with torch.no_grad():
        right = model(data.test_images).argmax(1) == data.test_labels
    return Measurement(
        float(right.double().mean()), curve=(np.arange(steps), losses), extras=at_steps(losses, 1.0)
    )


@lru_cache
def diabetes() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's diabetes data, standardized: (442, 10) and (442, 1)."""
    data = datasets.load_diabetes()
    x, y = data.data, data.target[:, None]
    return tuple(torch.from_numpy((v - v.mean(0)) / v.std(0)).float() for v in (x, y))  # type: ignore[return-value]


def diabetes_rows(generator: torch.Generator) -> Tensor:
    """Return the inputs of the diabetes data."""
    return diabetes()[0]


def diabetes_network() -> nn.Module:
    """Return a perceptron with one hidden layer."""
    return perceptron(10, 64, 1)


@claim(
    method="guide-init",
    statement="Aligning a network with one hidden layer to a deeper random one does no harm on a "
    "table: its test error is at most 1.02 of that from the default initialization",
    metric=Metric(
        "test error", better="lower", average="geometric mean", curve=("step", "train error")
    ),
    contenders=[
        Contender("deep guide", make=deep_guide, tune={"lr": OTHER_LRS}),
        Contender("default", make=default, tune={"lr": OTHER_LRS}),
        Contender("own architecture", make=own_guide, tune={"lr": OTHER_LRS}, control=True),
    ],
    expect=at_most(1.02, of="default"),
    scales={
        "smoke": Scale(seeds=1, tuning_seeds=1, steps=5, alignment=10),
        "quick": Scale(seeds=8, tuning_seeds=1, steps=100, alignment=300),
        "full": Scale(seeds=20, tuning_seeds=3, steps=100, alignment=300),
    },
)
def no_harm_on_a_table(
    contender: Contender, rng: np.random.Generator, *, steps: int, alignment: int, lr: float
) -> Measurement:
    """Predict the progression of diabetes from ten numbers, on a split of each seed's own.

    The guide is a random ReLU network with three hidden layers. Its deep features are nearly those
    of its first layer, so that little is transferred; nothing but "no harm" is claimed. Read the
    interval of the ratio. What is seen: a deep ReLU guide costs a little here, so on small tables
    there is no reason to use one.
    """
    x, y = diabetes()
    chosen = torch_generator(rng.spawn(1)[0])
    model = start(contender, diabetes_network, diabetes_rows, rng, alignment)
    train_rows, test_rows = torch.randperm(len(x), generator=chosen).tensor_split([300])
    losses = train(model, x[train_rows], y[train_rows], mse_loss, lr, steps)
    with torch.no_grad():
        error = float(mse_loss(model(x[test_rows]), y[test_rows]))
    value = error if math.isfinite(error) else math.inf
    return Measurement(value, curve=(np.arange(steps), losses), extras=at_steps(losses, 1.0))


@lru_cache
def large_digits() -> Tensor:
    """Return the digits of the training split, enlarged to 16 x 16: (1438, 1, 16, 16)."""
    images = load_digits().train_images.view(-1, 1, 8, 8)
    return interpolate(images, size=(16, 16), mode="bilinear", align_corners=False)


def large_digit_images(generator: torch.Generator) -> Tensor:
    """Return the enlarged digits."""
    return large_digits()


def fine_guide(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Align to a random network with half the patch size, averaged over the target's patches."""
    guide = random_guide(target, generator=generator)
    guide_init(
        target, guide, data, steps=steps, pool="grid", show_progress=False, generator=generator
    )


def own_patches(target: nn.Module, data: Tensor, generator: torch.Generator, steps: int) -> None:
    """Align to another draw of the network on coarse patches."""
    with torch.random.fork_rng():
        torch.manual_seed(generator.initial_seed())
        guide = patches()
    with _quiet():
        _guided(guide, target, data, generator, steps)


PATCH_LRS = [0.003, 0.01, 0.03, 0.1]


@claim(
    method="guide-init",
    statement="A network on coarse patches that is aligned to a random network on finer ones has "
    "a lower train loss after a tenth of training than the network that is not",
    metric=Metric(
        "train loss at 10 %", better="lower", average="geometric mean", curve=("step", "train loss")
    ),
    contenders=[
        Contender("fine guide", make=fine_guide, tune={"lr": PATCH_LRS}),
        Contender("Kaiming", make=default, tune={"lr": PATCH_LRS}),
        Contender("own architecture", make=own_patches, tune={"lr": PATCH_LRS}, control=True),
    ],
    expect=at_most(1.0, of="best peer"),
    scales={
        "smoke": Scale(seeds=1, tuning_seeds=1, steps=10, images=50, alignment=10),
        "quick": Scale(seeds=8, tuning_seeds=2, steps=200, images=200, alignment=300),
        "full": Scale(seeds=16, tuning_seeds=3, steps=300, images=1000, alignment=300),
    },
)
def granularity_of_patches(
    contender: Contender,
    rng: np.random.Generator,
    *,
    steps: int,
    images: int,
    alignment: int,
    lr: float,
) -> Measurement:
    """Train a network on 4 x 4 patches of digits, enlarged to 16 x 16.

    The guide is the same network on 2 x 2 patches, random, its maps averaged over the target's
    patches. All networks start from Kaiming's initialization. Read whether the aligned one starts
    faster, and whether the control, aligned to another draw of the coarse network, does so, too.
    What is seen: on digits the finer guide slows the start down.
    """
    chosen = torch_generator(rng.spawn(1)[0])
    model = start(contender, patches, large_digit_images, rng, alignment)
    data = load_digits()
    index = torch.randperm(len(data.train_labels), generator=chosen)[:images]
    x, y = large_digits()[index], data.train_labels[index]
    losses = train(model, x, y, cross_entropy, lr, steps)
    extras = at_steps(losses, 0.1, 0.5, 1.0)
    return Measurement(extras["at 10%"], curve=(np.arange(steps), losses), extras=extras)
