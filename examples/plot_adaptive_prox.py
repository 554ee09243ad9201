"""
Sparse models without a step size
=================================

Proximal gradient methods fit models with penalties and constraints, if their step is right: 1/L
where the loss is smooth, a schedule where it is not. AdaProx finds the step from the gradient
mappings it has seen, and takes one setting to smooth, nonsmooth and nonconvex losses.
"""

# %%
# Three losses, one setting
# -------------------------
# Which of thirty measurements tell malignant tumors from benign ones? The logistic loss is smooth,
# the hinge loss of a support vector machine is not, and the sigmoid loss, which ignores
# outliers, is not even convex. An L1 penalty makes the models sparse.
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from thalweg.convex import (
    L1,
    AdaProxClassifier,
    Box,
    minimize_adaprox,
)
from thalweg.tasks import active_box_least_squares, breast_cancer


def note(problem, penalty, curve, x):
    """Append the objective at x."""
    curve.append(problem.value(x) + penalty(x))


figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
for ax, loss in zip(axes, ("logistic", "hinge", "sigmoid"), strict=True):
    problem = breast_cancer(loss)
    penalty = L1(problem.weight)
    curves = {"plain": [], "accelerated": []}
    for name, curve in curves.items():
        if loss == "sigmoid" and name == "accelerated":
            continue  # it is for convex losses
        result = minimize_adaprox(
            problem,
            np.zeros(problem.d),
            prox=penalty,
            accelerated=name == "accelerated",
            maxiter=2000,
            gtol=0,
            callback=partial(note, problem, penalty, curve),
        )
    best = min(min(curve) for curve in curves.values() if curve)
    for name, curve in curves.items():
        if curve:
            ax.loglog(np.arange(1, 2001), np.array(curve) - best + 1e-7, label=name)
    ax.set(title=loss, xlabel="gradients", ylabel="objective above the best")
axes[0].legend()
plt.show()

# %%
# Why mappings and not gradients
# ------------------------------
# AdaGrad divides its step by the root of the sum of the squared *gradients*. At an active bound the
# gradient never vanishes, and the step falls for ever. The *gradient mapping* vanishes at a
# solution, and the step settles.
problem = active_box_least_squares(np.random.default_rng(0))
box = Box(-1.0, 1.0)
result = minimize_adaprox(problem, np.zeros(100), prox=box, D=3.0, maxiter=500, gtol=0)

x, total, steps = np.zeros(100), 0.0, []
for _ in range(500):
    gradient = problem(x)[1]
    total += gradient @ gradient
    steps.append(3.0 / np.sqrt(total))
    x = box.prox(x - steps[-1] * gradient, steps[-1])

figure, ax = plt.subplots(layout="constrained")
ax.loglog(result.trace["step"], label="AdaProx")
ax.loglog(steps, label="AdaGrad-norm")
ax.set(xlabel="gradients", ylabel="step size")
ax.legend()
plt.show()
print(f"gaps after 500 gradients: AdaProx {result.fun - problem.optimum:.1e}, ", end="")
print(f"AdaGrad-norm {problem(x)[0] - problem.optimum:.1e}")

# %%
# In scikit-learn
# ---------------
# A sparse support vector machine, of data that may be sparse, too.
data = load_breast_cancer()
model = make_pipeline(StandardScaler(), AdaProxClassifier("hinge", alpha=0.02))
accuracy = cross_val_score(model, data.data, data.target).mean()
model.fit(data.data, data.target)
coefficients = model[-1].coef_[0]
print(f"cross-validated accuracy {accuracy:.1%}, {np.sum(coefficients != 0)} features:")
for j in np.argsort(-np.abs(coefficients))[: np.sum(coefficients != 0)]:
    print(f"  {data.feature_names[j]:<25} {coefficients[j]:+.2f}")
