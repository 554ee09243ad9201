"""
Bilevel problems whose lower level has many solutions
=====================================================

A leader sets x, a follower answers with any minimizer of its own loss. Where there are many, the
leader's value is that of the best or of the worst of them, which need not be smooth, and no
implicit gradient exists. `izom` needs values alone, and `clarke_report` says how nearly its answer
is stationary.
"""

# %%
# A kink that attracts
# --------------------
# The follower may take any y within 1 of -sin x. The worst of them, at one end or the other, gives
# the leader a value with downward kinks; the best of them a smooth one.
import matplotlib.pyplot as plt
import numpy as np

from thalweg.bilevel import (
    HyperObjective,
    LeastSquaresFollower,
    TranslatedBoxFollower,
    clarke_report,
    izom,
    set_smoothness_report,
)
from thalweg.tasks import MovingInterval, group_interpolation

task = MovingInterval()
follower = TranslatedBoxFollower([-1.0], [1.0], lambda x: -np.sin(x))
phi = HyperObjective(follower, task.upper)

grid = np.linspace(-5, 5, 400)
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for mode, color in (("optimistic", "C0"), ("pessimistic", "C1")):
    axes[0].plot(grid, [task.value(np.array([x]), mode) for x in grid], color, label=mode)
    iterates = []
    result = izom(
        phi, [4.0], mode=mode, maxiter=600, output="best", rng=0, callback=iterates.append
    )
    axes[0].plot(result.x, result.fun, "o", color=color)
    axes[1].plot(np.ravel(iterates), color=color)
    print(f"{mode}: x = {result.x[0]:.4f}, value {result.fun:.4f}, {result.nfev} lower solves")
    measure = {"delta": 600**-0.25} if mode == "optimistic" else {"rho": task.rho}
    print(clarke_report(phi, result.x, mode=mode, **measure))
axes[0].set(xlabel="x", ylabel="value of the leader")
axes[0].legend()
axes[1].set(xlabel="step", ylabel="x")
plt.show()

# %%
# Is the lower level set-smooth?
# ------------------------------
# The guarantees need solutions that move smoothly as a set. A follower that projects (x, 2) on the
# unit square does not: it stops at the bounds. The ratio of the error of the best pair of solutions
# to the squared distance is bounded in one case and grows as the pair shrinks in the other.
square = TranslatedBoxFollower([0, 0], [0, 0], lambda x: np.clip([x[0], 2.0], 0, 1))
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
for ax, name, lower, upper, domain in (
    (axes[0], "moving interval", follower, task.upper, [(-4, 4)]),
    (axes[1], "projection on a square", square, lambda x, y: -float(y.sum()), [(-1, 0.9)]),
):
    report = set_smoothness_report(lower, upper, domain, n_pairs=100, rng=0)
    print(f"{name}: {report}")
    report.plot(ax).set_title(name)
plt.show()

# %%
# Wrong labels and a follower that interpolates
# ---------------------------------------------
# Five groups of eight labels, the last almost all wrong, are scaled by weights that the leader
# sets. The follower fits them exactly, with more features than rows, and may be kind or not.
problem = group_interpolation(np.random.default_rng(0))
interpolation = LeastSquaresFollower(problem.features, problem.targets)
figure, ax = plt.subplots(layout="constrained")
for k, mode in enumerate(("optimistic", "pessimistic")):
    phi = HyperObjective(interpolation, *problem.upper(mode))
    result = izom(phi, np.ones(5), mode=mode, maxiter=400, output="best", rng=0)
    print(f"{mode} loss {phi(np.ones(5), mode):.3f} with weights 1, {result.fun:.3f} after")
    ax.bar(np.arange(5) + 0.4 * k, result.x, 0.4, label=mode)
ax.axhline(0, color="black", linewidth=0.8)
ax.set(xlabel="group, from right to wrong labels", ylabel="weight")
ax.legend()
plt.show()
