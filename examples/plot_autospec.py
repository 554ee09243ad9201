r"""
Learned polynomials for large sparse operators
==============================================

A network that was trained on synthetic spectra looks at 16 Lanczos steps of an operator that it has
never seen, and emits the recurrence of a polynomial. Here the operator is the graph of a photograph
with 68,000 pixels, as it is used for segmentation and smoothing.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.sparse.linalg import cg
from sklearn.datasets import load_sample_image

from thalweg.curvature import autospec_report, pretrained
from thalweg.tasks import spd_operator

A = spd_operator("image graph", 68_000).matrix
print(f"{A.shape[0]:,} unknowns, {A.nnz:,} entries")

# %%
# Conjugate gradients need far fewer iterations with the polynomial as a preconditioner. Each takes
# 13 products with A in place of one, so it is inner products that are saved: what costs on many
# machines or on a GPU.

rng = np.random.default_rng(0)
b = rng.normal(size=A.shape[0])
model = pretrained("precond", degree=12)
probe = model.probe(A, rng=rng)
M = model.operator(A, probe)


def residuals(M):
    """Return the relative residual after every iteration."""
    history = []
    cg(A, b, rtol=1e-8, M=M, callback=lambda x: history.append(np.linalg.norm(b - A @ x)))
    return np.array(history) / np.linalg.norm(b)


plain, learned = residuals(None), residuals(M)
print(f"iterations: {len(plain)} without, {len(learned)} with the polynomial")

figure, axes = plt.subplots(1, 2, figsize=(10, 4))
axes[0].semilogy(plain, label="conjugate gradients")
axes[0].semilogy(learned, label="with AutoSpec, degree 12")
axes[0].set(xlabel="iteration", ylabel="relative residual")
axes[0].legend()

# %%
# What the polynomial does: it lifts the spectrum of :math:`A P(A)` to nearly 1, except for the
# lowest end, of which the probe has seen nothing and which holds few eigenvalues.

report = autospec_report(model, A, probe)
print(report)
report.plot(axes[1])
figure.tight_layout()

# %%
# The same recurrence computes functions of matrices. The exponential of the graph Laplacian is
# diffusion along the edges of the picture: it smooths noise and leaves contours sharp.

gray = load_sample_image("china.jpg").mean(axis=2)[::2, ::2] / 255
noisy = gray + 0.15 * rng.normal(size=gray.shape)
smooth = pretrained("exp", 16).apply_to(3 * A, noisy.ravel(), rng=rng).reshape(gray.shape)

figure, axes = plt.subplots(1, 2, figsize=(10, 3.5))
for ax, image, title in zip(axes, (noisy, smooth), ("noisy", "diffused"), strict=True):
    ax.imshow(image, cmap="gray", vmin=0, vmax=1)
    ax.set(title=title, xticks=[], yticks=[])
figure.tight_layout()
