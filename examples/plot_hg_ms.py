"""
Select, then differentiate
==========================

When a model has more parameters than data, the lower level of a bilevel problem has a whole
manifold of minimizers. Implicit differentiation at whichever of them training ends in gives the
gradient of nothing. `hg_ms` first selects the minimizer that is best for the upper level.
"""

# %%
# The circle
# ----------
# The minimizers of g are the unit circle, and f is half the squared distance to x. The hyper-
# objective is half the squared distance of x from the circle: smooth but for its center, where all
# points of the circle tie.
import matplotlib.pyplot as plt
import numpy as np
import torch

from thalweg.bilevel import (
    GD,
    Select,
    hg_ms,
    pseudoinverse_hypergradient,
    regularity_report,
)
from thalweg.tasks import random_features


def f(x, y):
    """Return half the squared distance."""
    return (y - x).square().sum() / 2


def g(x, y):
    """Return a loss that vanishes on the unit circle."""
    return (y.dot(y) - 1).square() / 4


start = torch.tensor([0.6, 0.8], dtype=torch.float64)
for point in ([2.0, 0.0], [0.0, 0.0]):
    print(point, regularity_report(f, g, torch.tensor(point, dtype=torch.float64), start))

# %%
# Hypergradients at the point where training ends, and at the selection. Only the latter point away
# from the circle.
grid = np.stack(np.meshgrid(np.linspace(-2, 2, 7), np.linspace(-2, 2, 7)), axis=-1).reshape(-1, 2)
grid = grid[np.linalg.norm(grid, axis=1) > 0.1]
figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), sharey=True)
for ax, name, select in (
    (axes[0], "where training ends", Select(steps=0, n_starts=0)),
    (axes[1], "at the selection", Select(n_starts=0)),
):
    slopes = []
    for point in grid:
        x = torch.tensor(point)
        y = hg_ms(f, g, x, start, maxiter=1, outer_lr=1e-12, select=select, inner=GD()).y
        slopes.append(pseudoinverse_hypergradient(f, g, x, y).grad.numpy())
    slopes = np.array(slopes)
    angle = np.linspace(0, 2 * np.pi, 200)
    ax.plot(np.cos(angle), np.sin(angle), color="gray")
    ax.quiver(*grid.T, *-slopes.T)
    ax.set(title=name, aspect="equal")
plt.show()

# %%
# Regression with more features than rows
# ---------------------------------------
# 120 random features of the diabetes data and 40 training rows, which many models fit exactly. The
# upper level scales the ten inputs, by the error on 120 validation rows.
problem = random_features(0)
figure, axes = plt.subplots(figsize=(7, 4))
for name, select in {
    "select, then differentiate": Select(steps=10),
    "differentiate where training ends": Select(steps=0, n_starts=0),
}.items():
    result = hg_ms(
        problem.f,
        problem.g,
        torch.zeros(10, dtype=torch.float64),
        torch.zeros(120, dtype=torch.float64),
        optimizer_x=lambda params: torch.optim.Adam(params, lr=0.3),
        maxiter=15,
        select=select,
        inner=GD(tol=1e-7),
        generator=torch.Generator().manual_seed(0),
    )
    axes.semilogy(result.history["nit"], result.history["fun"], "o-", label=name)
    train = float(problem.g(result.x, result.y))
    test = float(problem.error(result.x, result.y, problem.test))
    print(f"{name}: training error {train:.1e}, test error {test:.3f}")
axes.set(xlabel="steps", ylabel="upper loss")
axes.legend()
plt.show()
