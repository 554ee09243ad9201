"""
Among all best fits, the one that also fits other data
======================================================

With more features than samples, many models fit the training data equally well. A simple bilevel
problem picks one of them by a second loss. `ir_cg` does so with nothing but linear minimization
over the set of models, from single samples or batches.
"""

# %%
# Regression with 285 features and 150 samples
# --------------------------------------------
# Cubic features of the diabetes data. The inner objective G is the loss of 150 training rows over
# an l1 ball, the outer one, F, that of 150 validation rows. One sample of each per step.
import matplotlib.pyplot as plt
import numpy as np

from thalweg.bilevel import BilevelLinearRegression, L1Ball, LeastSquares, TorchLoss, ir_cg
from thalweg.tasks import diabetes_selection

problem = diabetes_selection(np.random.default_rng(0), unit_rows=True)
inner = LeastSquares(problem.A, problem.b)
outer = LeastSquares(problem.A_outer, problem.b_outer)
least, best = problem.optimum()
x0 = np.zeros(problem.A.shape[1])

figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for method, steps in (("irscg", 300_000), ("irfscg", 20_000), ("deterministic", 5_000)):
    result = ir_cg(inner, outer, L1Ball(problem.radius), x0, method=method, maxiter=steps, rng=0)
    history = result.history
    print(
        f"{method:13s}: {result.nit} steps in {history['time'][-1]:.2f} s, "
        f"G - G* = {result.fun_inner - least:.1e}, F - F* = {result.fun_outer - best:+.1e}"
    )
    gradients = history["n_grad_inner"] + history["n_grad_outer"]
    axes[0].loglog(gradients, history["fun_inner"] - least, ".-", label=method)
    axes[1].loglog(gradients, np.abs(history["fun_outer"] - best), ".-")
axes[0].set(xlabel="gradients of samples", ylabel="G - G*")
axes[1].set(xlabel="gradients of samples", ylabel="|F - F*|")
axes[0].legend()
plt.show()

# %%
# The weight decides what comes first
# -----------------------------------
# A large ς stays longer with F and comes later to G. Both gaps vanish in the end: on the way, F is
# below its optimum as long as G is above.
figure, ax = plt.subplots(layout="constrained")
for reg in (0.01, 0.1, 1.0):
    history = ir_cg(
        inner, outer, L1Ball(problem.radius), x0, reg=reg, maxiter=100_000, rng=0
    ).history
    ax.semilogx(history["fun_inner"] - least, history["fun_outer"], ".-", label=f"ς = {reg:g}")
ax.axhline(best, color="gray", linewidth=1)
ax.set(xlabel="G - G*", ylabel="F", ylim=(best - 0.1, best + 0.3))
ax.legend()
plt.show()

# %%
# A robust outer loss, in torch
# -----------------------------
# Any loss will do. This one, of the same validation rows, saturates, so that outliers do not
# count. It is not convex: the output is then the last iterate, not an average.
import torch  # noqa: E402

rows = (torch.from_numpy(problem.A_outer), torch.from_numpy(problem.b_outer))
robust = TorchLoss(lambda x, a, b: torch.log1p((a @ x - b).square()), rows)
result = ir_cg(
    inner,
    robust,
    L1Ball(problem.radius),
    x0,
    method="irfscg",
    outer_convex=False,
    maxiter=3_000,
    rng=0,
)
print(f"training loss {result.fun_inner:.4f} (least {least:.4f}), robust {result.fun_outer:.4f}")

# %%
# In a pipeline
# -------------
# `BilevelLinearRegression` is the same for scikit-learn. Without the outer loss it takes any of the
# best fits.
rng = np.random.default_rng(0)
X, X_outer, X_test = (rng.standard_normal((n, 100)) for n in (40, 120, 1000))
w = np.zeros(100)
w[:5] = [1.0, -1.0, 1.0, -0.5, 0.5]
noise = 0.1
y, y_outer = (A @ w + noise * rng.standard_normal(len(A)) for A in (X, X_outer))
for name, reg in (("training data alone", 0.0), ("bilevel", "auto")):
    model = BilevelLinearRegression(radius=6.0, reg=reg, random_state=0)
    model.fit(X, y, X_outer, y_outer)
    print(f"{name}: R² = {model.score(X_test, X_test @ w):.3f}")
