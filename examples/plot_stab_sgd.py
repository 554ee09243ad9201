"""
One learning rate for every noise level
=======================================

A learning-rate schedule has to know how noisy the gradients are and how long training takes.
Stab-SGD measures which part of the gradient is signal, the *stability ratio*, and multiplies the
step of SGD by it. What is left to set is one over the curvature of the loss.
"""

# %%
# A problem whose noise is not known
# ----------------------------------
# An instrument is calibrated by descending a quadratic that is steep in some directions and flat in
# others. Its readings are noisy, and nobody knows how noisy: the variance may be 1 or 10⁻¹². The
# curvature is known, and the same settings serve all cases. Measurements, during which the
# parameters rest, are among the 6000 gradients.
import matplotlib.pyplot as plt
import numpy as np
import torch

from thalweg.tasks import (
    NoisyChains,
    best_expected_loss,
    digits_mlp,
    load_digits,
    qsc,
    qwc,
    sample_batch,
)
from thalweg.training import StabSGD, minimize_stab_sgd

problem = qwc()
variances = [1.0, 1e-2, 1e-4, 1e-6, 1e-8, 1e-12]


def losses_after(optimizers, chains, queries=6000):
    """Return the loss at every noise level."""
    for _ in range(queries):
        chains.query()
        for optimizer in optimizers:
            optimizer.step()
    return chains.losses()


best = [best_expected_loss(problem, variance, 6000) for variance in variances]
figure, ax = plt.subplots(layout="constrained")
chains = NoisyChains(problem, variances, np.random.default_rng(0))
stab = [StabSGD([x], lr=1 / problem.smoothness) for x in chains.parameters]
ax.loglog(variances, losses_after(stab, chains) / best, marker="o", label="Stab-SGD, lr = 1")
for lr in (0.003, 0.03, 0.3):
    chains = NoisyChains(problem, variances, np.random.default_rng(0))
    sgd = [torch.optim.SGD(chains.parameters, lr=lr, foreach=True)]
    ax.loglog(variances, losses_after(sgd, chains) / best, marker=".", label=f"SGD, lr = {lr}")
ax.set(xlabel="variance of the noise", ylabel="loss / best tuned loss at this noise")
ax.legend()
plt.show()

# %%
# Every constant step is good at the noise it happens to fit, and poor elsewhere. Stab-SGD is the
# best nowhere, but its worst case is the mildest.

# %%
# It does not rest
# ----------------
# With SciPy's interface, :func:`~thalweg.training.minimize_stab_sgd`. The loss falls as without
# noise at first, and goes on falling below the level at which SGD with the same step rests, which
# is dashed.
problem = qsc()
figure, ax = plt.subplots(layout="constrained")
for variance in (1e-4, 1e-8, 1e-12):
    result = minimize_stab_sgd(
        lambda x: float(problem.loss(x)),
        problem.x0,
        jac=lambda x, rng, variance=variance: problem.gradient(x, variance, rng),
        lr=1 / problem.smoothness,
        maxiter=20_000,
        rng=0,
    )
    (line,) = ax.loglog(
        result.trace["query"][1:], result.trace["fun"][1:], label=f"s² = {variance}"
    )
    rest = problem.expected_loss(np.ones(10_000), variance)
    ax.axhline(float(rest), color=line.get_color(), linestyle="dashed", linewidth=1)
ax.set(xlabel="gradients", ylabel="loss")
ax.legend()
plt.show()

# %%
# In a training loop
# ------------------
# One line changes:
#
# .. code-block:: diff
#
#    - optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
#    + optimizer = StabSGD(model.parameters(), lr=0.5)
#      for images, labels in batches:
#          optimizer.zero_grad()
#          cross_entropy(model(images), labels).backward()
#          optimizer.step()
data = load_digits()
generator = torch.Generator().manual_seed(0)
model = digits_mlp(64, generator)
optimizer = StabSGD(model.parameters(), lr=0.5)
losses = []
for _ in range(3000):
    images, labels = sample_batch(data.train_images, data.train_labels, 32, generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
left.semilogy(losses, linewidth=0.5)
left.set(xlabel="gradients", ylabel="loss of the batch")
history = optimizer.stab_history
queries = [record.query for record in history] + [optimizer.n_queries]
ratios = [record.stab for record in history] + [optimizer.stab]
right.step(queries, ratios, where="post", marker=".")
right.set(xlabel="gradients", ylabel="measured stability ratio", xscale="log", yscale="log")
plt.show()

accuracy = (model(data.test_images).argmax(1) == data.test_labels).float().mean()
print(f"{optimizer.n_queries} gradients, {optimizer.n_updates} steps, test accuracy {accuracy:.1%}")

# %%
# The ratio falls as training proceeds, and the step with it. For a network that can fit all of its
# training data, as this one, that is too cautious: there the noise fades by itself, and a constant
# step reaches a lower train loss. Stab-SGD is for noise that stays.
