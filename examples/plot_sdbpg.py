"""
A second objective for a network that has been trained
======================================================

A network with more weights than it needs fits its training data in many ways. A simple bilevel
problem chooses one of them by a second loss, with a multiplier that adapts itself instead of a
penalty weight. `SDBPG` does it for networks, and `sdbpg` for any two stochastic objectives.
"""

# %%
# A multiplier that explodes, and one that does not
# -------------------------------------------------
# A saturating regression (g) leaves half of its variables free; a second loss (f) decides about
# them. Dynamic barrier descent, which is the same without a perturbation δ, divides by the squared
# gradient of a batch of four. Where that is tiny, the multiplier explodes, and the step along
# another batch leaves the basin.
import copy

import matplotlib.pyplot as plt
import numpy as np
import torch

from thalweg.bilevel import SDBPG, sdbpg
from thalweg.tasks import digits_mlp, load_digits, sample_batch, tanh_selection

problem = tanh_selection(np.random.default_rng(2))
runs = {}
for name, delta in (("δ = 0, nearly", 1e-14), ("δ = 1e-3", 1e-3)):
    runs[name] = sdbpg(
        problem.upper,
        problem.lower,
        problem.x0,
        delta=delta,
        lr=0.1,
        batch_upper=4,
        batch_lower=8,
        maxiter=3000,
        eval_every=15,
        rng=2,
    )
    print(f"{name}: largest λ {runs[name].lam_max_seen:.1e}, f = {runs[name].fun_upper:.2f}")

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, result in runs.items():
    axes[0].semilogy(result.history["nit"], np.maximum(result.history["lam"], 1e-2), label=name)
    axes[1].semilogy(result.history["nit"], result.history["fun_upper"], label=name)
axes[0].set(xlabel="steps", ylabel="multiplier λ")
axes[1].set(xlabel="steps", ylabel="f")
axes[0].legend()
plt.show()

# %%
# A penalty, and less variance
# ----------------------------
# PR-SDBPG runs on f + ρg, which lowers ‖∇g‖; VR-PR-SDBPG replaces the gradients of batches by
# recursive estimates, which lowers the residual of f.
figure, ax = plt.subplots(layout="constrained")
for variant in ("plain", "pr", "vr-pr"):
    history = sdbpg(
        problem.upper,
        problem.lower,
        problem.x0,
        variant=variant,
        lr=0.03,
        maxiter=3000,
        eps_f=1e-9,
        eval_every=30,
        rng=0,
    ).history
    ax.loglog(history["eps_g"], history["eps_f"], ".", alpha=0.6, label=variant)
ax.set(xlabel="‖∇g‖", ylabel="min over λ of ‖∇f + λ∇g‖")
ax.legend()
plt.show()

# %%
# Sparse weights for a network of digits
# --------------------------------------
# First train; then go on with two losses: the training loss, and a smoothed l1 norm of the first
# layer. Each closure returns a loss on a batch of its own, without a call of ``backward``.
generator = torch.Generator().manual_seed(0)
data, model = load_digits(), digits_mlp(128, generator)
entropy = torch.nn.functional.cross_entropy


def training_loss():
    """Return the loss of a fresh batch."""
    images, labels = sample_batch(data.train_images, data.train_labels, 64, generator)
    return entropy(model(images), labels)


def sparsity():
    """Return the smoothed mean size of the first layer's weights."""
    return (model[0].weight.square() + 1e-4).sqrt().mean()


adam = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(400):
    adam.zero_grad()
    training_loss().backward()
    adam.step()
trained = copy.deepcopy(model)

optimizer = SDBPG(model.parameters(), lr=1.0, variant="pr", rho=0.05, delta="auto")
losses = []
for _ in range(2000):
    stats = optimizer.step(sparsity, training_loss)
    losses.append((float(stats.loss_upper), float(stats.loss_lower)))
for name, network in (("trained", trained), ("sparse", model)):
    right = network(data.test_images).argmax(dim=1) == data.test_labels
    small = (network[0].weight.abs() < 0.01).float().mean()
    print(f"{name}: {right.float().mean():.1%} of the test images, {small:.0%} of weights near 0")

# %%
# Each row of the pictures holds the 64 weights of a hidden neuron: in the second phase, many of
# them go to zero, while the training loss stays small.
figure, axes = plt.subplots(1, 3, figsize=(11, 4), layout="constrained")
for ax, name, network in ((axes[0], "trained", trained), (axes[1], "sparse", model)):
    ax.imshow(network[0].weight.detach(), cmap="RdBu", vmin=-0.5, vmax=0.5, aspect="auto")
    ax.set(title=name, xlabel="pixel", ylabel="hidden neuron")
upper, lower = np.array(losses).T
axes[2].plot(np.convolve(lower, np.ones(50) / 50, "valid"), label="training loss")
axes[2].plot(upper, label="mean |weight|")
axes[2].set(xlabel="steps", yscale="log")
axes[2].legend()
plt.show()
