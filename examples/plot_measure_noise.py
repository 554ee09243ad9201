"""
What kind of noise is this?
===========================

Before an optimizer is chosen, :func:`~thalweg.training.measure_noise` looks at the gradient noise
of a model on its own batches: how heavy its tails are, how skewed and how large it is, whether it
grows with the gradient, and how smooth the loss is. The guide :doc:`/guide/which-optimizer` says
what to do with the answers.
"""

# %%
# A classifier
# ------------
# A small perceptron reads handwritten digits in batches of 16.
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from thalweg.tasks import digits_mlp, load_digits, sample_batch
from thalweg.training import measure_noise

data = load_digits()
generator = torch.Generator().manual_seed(0)
model = digits_mlp(32, generator)


def batches():
    """Yield batches of images and labels for ever."""
    while True:
        yield sample_batch(data.train_images, data.train_labels, 16, generator)


def loss(model, batch):
    """Return the cross-entropy of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


clean = measure_noise(model, loss, batches(), n_samples=384, rng=0)
print(clean)

# %%
# The same classifier with broken inputs
# --------------------------------------
# Now a sensor fails from time to time, and scales an image by a number without a mean. The loss of
# such an image is huge, and so is its gradient.


def broken_batches():
    """Yield batches in which every image has been scaled by the size of a Cauchy number."""
    for images, labels in batches():
        scale = torch.empty(len(images), 1).cauchy_(generator=generator).abs()
        yield images * scale, labels


heavy = measure_noise(model, loss, broken_batches(), n_samples=384, rng=0)
print(heavy)

# %%
# Side by side
# ------------
# The largest norms of ordinary noise fall off a cliff; those of heavy noise lie on a line. In the
# middle, the moments of the noise against those of the gradient; on the right, the smoothness.
figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
for row, (name, report) in zip(axes, {"clean": clean, "broken": heavy}.items(), strict=True):
    report.plot(row)
    row[0].set_title(f"{name}: tail index {report.tail_index.value:.2f}")
plt.show()

# %%
# What it means for training
# --------------------------
# Outliers throw plain SGD off again and again. Clipping bounds every step, with a threshold to
# tune, and so does a sign, without one.
from thalweg.training import SignSGD  # noqa: E402


def accuracy_after(make, clip=None, steps=300):
    """Train on broken batches, and return the accuracy on clean test images."""
    model = digits_mlp(32, torch.Generator().manual_seed(1))
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _, batch in zip(range(steps), broken_batches(), strict=False):
        optimizer.zero_grad()
        loss(model, batch).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
    return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


rates = np.geomspace(0.003, 1.0, 5)
scores = {
    "SGD": [accuracy_after(lambda p, r=r: torch.optim.SGD(p, r)) for r in rates],
    "SGD, clipped at 1": [accuracy_after(lambda p, r=r: torch.optim.SGD(p, r), 1) for r in rates],
    "SignSGD": [accuracy_after(lambda p, r=r: SignSGD(p, r / 20, momentum=0.0)) for r in rates],
}
figure, ax = plt.subplots(layout="constrained")
for name, accuracy in scores.items():
    ax.semilogx(rates, accuracy, marker="o", label=name)
ax.set(xlabel="step size (of SignSGD: a twentieth)", ylabel="accuracy on clean images")
ax.legend()
plt.show()
