"""
Fewer rounds from many workers
==============================

A worst-case loss is expensive: each value takes a simulation, and only the worst scenario counts,
so there is no smoothness to use. But a cluster evaluates hundreds of points as fast as one. What
one waits for is the number of *rounds*; this example turns width into fewer of them.
"""

# %%
# A worst-case fit
# ----------------
# The largest deviation of a linear model, over coefficients in [-1, 1]. A batch function maps
# points (Q, d) to values (Q,) and subgradients (Q, d); for a function of one point, wrap it with
# :class:`~thalweg.convex.PointwiseBatch`, and pass an executor (threads, processes or a Ray pool)
# to spread a batch over workers.
import matplotlib.pyplot as plt
import numpy as np

from thalweg.convex import (
    depth_bounds,
    minimize_parallel,
    parallel_speedup_report,
    shielded_instance,
)
from thalweg.tasks import worst_case_regression

problem = worst_case_regression(50, np.inf, rng=0)
first_error = problem.start_value - problem.minimum
eps = 0.02 * first_error

fig, ax = plt.subplots()
for method in ("mirror", "smoothed-agd", "ball"):
    result = minimize_parallel(
        problem.fun_batch,
        np.zeros(50),
        p=np.inf,
        eps=eps,
        method=method,
        max_rounds=150,
        rng=0,
    )
    error = (result.history["fun"] - problem.minimum) / first_error
    ax.semilogy(result.history["rounds"], error, label=method)
    print(f"{method}: {result.nfev} gradients in {result.rounds} rounds, error {error[-1]:.3f}")
ax.axhline(0.02, color="0.7", lw=1)
ax.set(xlabel="round", ylabel="error, in shares of the first")
ax.legend()
plt.show()

# %%
# How much width?
# ---------------
# More queries a round pay until the noise of smoothing is averaged out.
report = parallel_speedup_report(
    problem.fun_batch, 50, np.inf, eps, widths=(1, 8, 32, 128, 512), rng=0, max_rounds=400
)
report.plot()
plt.show()

# %%
# What is possible at all
# -----------------------
# The orders of rounds by algorithm, for d = 10,000. At accuracy d^(-1/4) everything crosses.
fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for ax, p in zip(axes, (2.0, np.inf), strict=True):
    depth_bounds(10_000, p, 0.1).plot(ax)
plt.show()

# %%
# And on shielded functions nothing helps: each round shows one more piece, however many points it
# asks about.
instance = shielded_instance(20_000, 2.0, width=100, query_radius=1.55, rng=0)
shown = []


def watched(X):
    """Answer, and note which pieces the answers show."""
    shown.append(set(instance.piece(X).tolist()))
    return instance.fun_batch(X)


minimize_parallel(
    watched,
    np.zeros(20_000),
    eps=0.1,
    smoothing=10.0,
    method="smoothed-agd",
    width=100,
    max_rounds=20,
    rng=0,
)
seen = [len(set().union(*shown[: i + 1])) for i in range(len(shown))]
print(f"pieces seen after each round, of {instance.k}: {seen}")
