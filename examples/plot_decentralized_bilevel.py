"""
Bilevel optimization by a network of agents
===========================================

Eight agents on a ring have a bilevel problem in common, and noise of infinite variance. Normalized
steps with variance reduction need neither a center nor a clipping threshold.
"""

# %%
# How heavy are the tails?
# ------------------------
# A look at gradients at one point, before the choice of a method. The noise is Pareto noise of
# index 1.5, centered: there is a mean, and no variance.
import matplotlib.pyplot as plt
import networkx
import numpy as np

from thalweg.bilevel import decentralized_bilevel, heavy_tail_report, mixing_matrix
from thalweg.tasks import agent_quadratics

problem = agent_quadratics(np.random.default_rng(0), tail="pareto", index=1.5)
n, p, q = problem.sizes
rng = np.random.default_rng(1)
X, Y = np.zeros((n, p)), np.zeros((n, q))
samples = np.array([problem.grad_g(X, Y, problem.draw(rng))[1][0] for _ in range(4000)])
report = heavy_tail_report(samples)
print(
    f"tail index {report.hill:.2f}, between {report.interval[0]:.2f} and {report.interval[1]:.2f}"
)
print(
    f"a moment of order {report.p_moment:.2f} exists; the variance does: {report.variance_exists}"
)
figure, axes = plt.subplots(figsize=(7, 4))
report.plot(axes)
plt.show()

# %%
# Beside clipping
# ---------------
# The length of the true hypergradient along the run. Clipped SGD depends on its threshold; the
# method has none.
W = mixing_matrix(networkx.cycle_graph(n))


def hypergradients(**settings):
    """Return steps and lengths of the true hypergradient along a run."""
    steps, lengths = [], []

    def record(intermediate_result):
        steps.append(intermediate_result.nit)
        lengths.append(np.linalg.norm(problem.hypergradient(intermediate_result.x)))

    decentralized_bilevel(
        problem.grad_f,
        problem.grad_g,
        np.zeros(p),
        np.zeros(q),
        W=W,
        sampler=problem.draw,
        maxiter=2000,
        rng=0,
        callback=record,
        **settings,
    )
    return steps, lengths


figure, axes = plt.subplots(figsize=(7, 4))
axes.plot(*hypergradients(), label="NVR-DSBO, as shipped")
for clip in (0.3, 3.0, 30.0):
    plain = {"normalize": None, "beta": 1.0, "schedule": "constant", "lr": (0.01, 0.03, 0.03)}
    axes.plot(*hypergradients(clip=clip, **plain), "--", label=f"clipped at {clip:g}")
axes.set(xlabel="step", ylabel="hypergradient", yscale="log")
axes.legend()
plt.show()

# %%
# What it costs to talk
# ---------------------
# Each step sends two messages to every neighbor. A path is slow to agree, a complete graph agrees
# at once and sends most.
figure, axes = plt.subplots(figsize=(7, 4))
for name, graph in {
    "path": networkx.path_graph(n),
    "ring": networkx.cycle_graph(n),
    "complete": networkx.complete_graph(n),
}.items():
    result = decentralized_bilevel(
        problem.grad_f,
        problem.grad_g,
        np.zeros(p),
        np.zeros(q),
        W=mixing_matrix(graph),
        sampler=problem.draw,
        maxiter=1000,
        rng=0,
    )
    megabits = result.history["bits_sent"] / 1e6
    axes.plot(megabits, result.history["consensus_x"], label=name)
axes.set(xlabel="megabits sent", ylabel="disagreement about x", yscale="log")
axes.legend()
plt.show()
