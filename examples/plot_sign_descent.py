"""
Steps that no outlier can make large
====================================

Gradients of language models have heavy tails: now and then a batch is far out, and an average does
not get rid of it. Clipping helps, at a threshold that has to be tuned. A *sign* bounds every step
by itself: the sign of each entry in SignSGD, Signum and Lion, that of the singular values in Muon
and Muonlight.
"""

# %%
# One step size for light and heavy tails
# ---------------------------------------
# A quadratic with 100 variables is seen through α-stable noise: Gaussian for α = 2, without a
# variance below. Forty runs at once, the same step size for every α, and a band from the median to
# the 90 % quantile of the final loss.
import matplotlib.pyplot as plt
import torch

from thalweg.tasks import (
    HeavyTailedRuns,
    byte_gpt,
    load_text,
    sample_windows,
    tailed_diagonal,
)
from thalweg.training import Lion, Muonlight, SignSGD, matrix_sign, muon_param_groups

optimizers = {
    "SignSGD": lambda p: SignSGD(p, lr=0.03, momentum=0.0),
    "Signum": lambda p: SignSGD(p, lr=0.01),
    "Lion": lambda p: Lion(p, lr=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.03),
}
alphas = [2.0, 1.8, 1.6, 1.4, 1.2]


def final_losses(make, alpha, steps=500):
    """Return the losses of 40 runs, whose step size falls linearly to zero."""
    runs = HeavyTailedRuns(tailed_diagonal(), alpha=alpha, runs=40, steps=steps, seed=0)
    optimizer = make([runs.parameter])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(steps):
        runs.query()
        optimizer.step()
        schedule.step()
    return runs.losses()


figure, ax = plt.subplots(layout="constrained")
for name, make in optimizers.items():
    losses = [final_losses(make, alpha) for alpha in alphas]
    medians = [loss.median().item() for loss in losses]
    quantiles = [loss.quantile(0.9).item() for loss in losses]
    (line,) = ax.semilogy(alphas, medians, marker="o", label=name)
    ax.fill_between(alphas, medians, quantiles, color=line.get_color(), alpha=0.2)
ax.invert_xaxis()
ax.set(xlabel="tail index α (heavier to the right)", ylabel="loss after 500 steps")
ax.legend()
plt.show()

# %%
# Only the sign that is taken *before* any averaging is indifferent to tails. Momentum reduces the
# noise when tails are light, but an average of outliers is an outlier.

# %%
# The sign of a matrix
# --------------------
# Muon's five quintic steps bring the singular values of a matrix near one, without computing them:
# all that begin above 0.002 of its norm end between 0.68 and 1.21.
singular_values = torch.logspace(-4, 0, 400)
# A 2 × 2 matrix whose norm is almost one, with one small singular value.
large = (1 - singular_values**2).clamp(min=0).sqrt()
matrices = torch.diag_embed(torch.stack([singular_values, large], dim=1))
figure, ax = plt.subplots(layout="constrained")
for method in ("ns5", "polar", "svd"):
    signs = matrix_sign(matrices, method)[:, 0, 0]
    ax.semilogx(singular_values, signs, label=method)
ax.axhspan(0.68, 1.21, alpha=0.1)
ax.set(xlabel="singular value / Frobenius norm", ylabel="singular value of the sign")
ax.legend()
plt.show()

# %%
# In a training loop
# ------------------
# Hidden matrices go to Muonlight; embeddings, the head, norms and biases to AdamW, in one
# optimizer. The learning rates of AdamW can be kept.
#
# .. code-block:: diff
#
#    - optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
#    + optimizer = Muonlight(muon_param_groups(model), lr=0.01)
text = load_text()
figure, ax = plt.subplots(layout="constrained")
for name in ("AdamW", "Muonlight"):
    generator = torch.Generator().manual_seed(0)
    model = byte_gpt(width=32, depth=2, heads=2, context=32, generator=generator)
    if name == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    else:
        optimizer = Muonlight(muon_param_groups(model), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=400)
    losses = []
    for _ in range(400):
        tokens, targets = sample_windows(text.train, 8, 32, generator)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    smooth = torch.tensor(losses).unfold(0, 20, 1).mean(1)
    ax.plot(range(20, 401), smooth, label=name)
    print(f"{name}: {smooth[-1]:.2f} nats per byte")
ax.set(xlabel="steps", ylabel="train loss, mean of 20 batches", ylim=(None, 4))
ax.legend()
plt.show()

# %%
# Gradients are clipped here, for both. The momentum averages outliers before the matrix sign bounds
# them, so clipping helps Muonlight as much as AdamW: its lead comes from the geometry of the
# matrices, not from heavy tails alone.
