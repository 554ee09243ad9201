"""
Hessians and their mirror images
================================

A hypergradient needs the inverse of the inner Hessian, which stochastic methods take from a Neumann
series of sampled Hessians. Outliers and wrong labels make these samples noisy and skewed. The
antithetic estimator pairs each one with its mirror image around a reference.
"""

# %%
# One estimator beside the other
# ------------------------------
# The Hessian of a logistic loss on the breast-cancer data, whose rows are of uneven size. Each
# factor of the series has the Hessian of a batch of eight rows. The report compares one chain, two
# independent chains and the antithetic pair: bias, spread and third moment, relative to the result.
import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_breast_cancer

from thalweg.bilevel import (
    HessianReference,
    Neumann,
    ReferenceNeumann,
    ane_bilevel,
    neumann_error_report,
)

rng = np.random.default_rng(0)
X, label = load_breast_cancer(return_X_y=True)
X = (X - X.mean(0)) / X.std(0)
rows = X * rng.lognormal(0, 0.5, (len(X), 1)) / 2
H = rows.T @ rows / len(rows) + 0.03 * np.eye(30)


def batch_hessians(rng, n):
    """Return n Hessians of eight rows each."""
    batches = rows[rng.integers(len(rows), size=(n, 8))]
    return np.einsum("nbi,nbj->nij", batches, batches) / 8 + 0.03 * np.eye(30)


b = rng.standard_normal(30)
eta = 0.3 / np.linalg.eigvalsh(H)[-1]
report = neumann_error_report(batch_hessians, H, b, K=20, eta=eta, n_rep=500, rng=0)
print(report)

# %%
# The error of the antithetic pair is of second order in the noise, that of the others of first.
figure, axes = plt.subplots(figsize=(7, 4))
report.plot(axes)
plt.show()

# %%
# What a reference must know
# --------------------------
# With an approximate reference the estimate is biased, in proportion to its error: here references
# of ever more rows. The dashed line is one plain chain.
sizes = [32, 64, 128, 256, 512]
errors = []
for size in sizes:
    chosen = rows[rng.choice(len(rows), size, replace=False)]
    reference = chosen.T @ chosen / size + 0.03 * np.eye(30)
    found = neumann_error_report(batch_hessians, H, b, 20, eta, 200, reference=reference, rng=0)
    errors.append(found.rmse["antithetic"])
figure, axes = plt.subplots(figsize=(7, 4))
axes.loglog(sizes, errors, "o-", label="antithetic")
axes.axhline(report.rmse["plain"], linestyle="--", color="gray", label="plain")
axes.set(xlabel="rows of the reference", ylabel="relative error")
axes.legend()
plt.show()

# %%
# Within bilevel descent
# ----------------------
# Weights of training rows with wrong labels, by the loss on 80 clean ones. The estimator is a part
# that can be swapped; ``odd_share`` in the history tells how much noise the pairing took out.
A = torch.tensor(np.column_stack([X, np.ones(len(X))]))
wrong = torch.tensor(label, dtype=torch.float64)
flipped = (wrong == 1) & torch.tensor(rng.random(len(X)) < 0.6)
clean = torch.tensor(label, dtype=torch.float64)
wrong[flipped] = 0
loss = torch.nn.functional.binary_cross_entropy_with_logits


def f(x, y, batch):
    """Return the loss on clean rows."""
    return loss(batch[0] @ y, batch[1])


def g(x, y, batch):
    """Return the weighted loss on training rows."""
    losses = loss(batch[0] @ y, batch[1], reduction="none")
    return (x[batch[2]].sigmoid() * losses).mean() + 0.005 * y.dot(y)


figure, axes = plt.subplots(figsize=(7, 4))
for name, solve in {
    "antithetic": None,
    "plain (stocBiO)": Neumann(K=10),
    "reference alone": ReferenceNeumann(K=10),
}.items():
    result = ane_bilevel(
        f,
        g,
        torch.zeros(300, dtype=torch.float64),
        torch.zeros(31, dtype=torch.float64),
        inner_data=(A[:300], wrong[:300], torch.arange(300)),
        outer_data=(A[300:380], clean[300:380]),
        maxiter=150,
        lr_x=30.0,
        lr_y=0.1,
        K=10,
        solve=solve,
        reference=HessianReference("full", refresh=10),
        generator=torch.Generator().manual_seed(0),
    )
    axes.plot(result.history["nit"], result.history["fun"], label=name)
axes.set(xlabel="steps", ylabel="loss on clean rows")
axes.legend()
plt.show()
