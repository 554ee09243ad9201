"""
A network of genes
==================

Which genes go together *given all the others*? Their partial correlations say so, and a penalized
pseudolikelihood makes most of them zero. Each row of the estimate is a small convex problem, which
a few semismooth Newton steps solve to machine precision.
"""

# %%
# Seven hundred blood cells
# -------------------------
# The expression of 765 genes. The penalty comes from an information criterion, along a path of
# penalties, each started from the one before.
import time

import matplotlib.pyplot as plt
import numpy as np

from thalweg.curvature import SSNConcord, SSNConcordCV
from thalweg.tasks import gene_expression

data = gene_expression()
began = time.perf_counter()
model = SSNConcordCV(n_alphas=12, alpha_min_ratio=0.1).fit(data.X)
print(f"{len(model.alphas_)} penalties in {time.perf_counter() - began:.1f} s")
print(f"chosen: {model.alpha_:.3f}, with {model.graph_.sum() // 2} edges")
print(f"largest residual of a row: {model.residual_.max():.0e}")

figure, ax = plt.subplots(layout="constrained")
ax.semilogx(model.alphas_, model.cv_results_["epbic"], ".-")
ax.axvline(model.alpha_, color="0.7")
ax.set(xlabel="penalty", ylabel="extended pseudo-Bayesian criterion")
plt.show()

# %%
# The strongest ties
# ------------------
# With a larger penalty only those are left. Genes of one kind of cell, or of one machinery, form
# groups: the antigen presentation of the HLA genes, the ribosome, the receptors of B and T cells.
strong = SSNConcord(0.33).fit(data.X)
figure, ax = plt.subplots(figsize=(9, 7), layout="constrained")
strong.plot(ax, labels=data.genes, n_labels=60)
plt.show()

upper = np.triu(strong.graph_, 1)
i, j = np.nonzero(upper)
for k in np.argsort(-np.abs(strong.partial_correlation_[i, j]))[:10]:
    first, second = data.genes[i[k]], data.genes[j[k]]
    print(f"{first:>10} – {second:<10} {strong.partial_correlation_[i[k], j[k]]:+.2f}")

# %%
# How a row converges
# -------------------
# Few steps, of which the last squares the error. A proximal gradient method takes a hundred.
steps = {}
for name, method in {"semismooth Newton": "bssn", "FISTA": "fista"}.items():
    began = time.perf_counter()
    fit = SSNConcord(0.15, method=method, tol=1e-8).fit(data.X)
    steps[name] = fit.newton_steps_ if method == "bssn" else fit.prox_steps_
    print(f"{name}: {time.perf_counter() - began:.2f} s, {steps[name].mean():.1f} steps per row")

figure, ax = plt.subplots(layout="constrained")
bins = np.geomspace(1, max(each.max() for each in steps.values()) + 1, 30)
for name, each in steps.items():
    ax.hist(np.maximum(each, 1), bins, label=name, alpha=0.7)
ax.set(xscale="log", xlabel="steps to a residual of $10^{-8}$", ylabel="genes")
ax.legend()
plt.show()
