"""
Gradients without a mean
========================

Some noise is so heavy-tailed that averages of it are no better than single samples, and a clipped
average is clipped noise. The median of a few averages, or of the samples themselves, still knows
the direction.
"""

# %%
# How good is an estimate from 105 samples?
# -----------------------------------------
# The number of blocks k goes from the mean (1) to the median (105). Noise without a mean wants many
# small blocks; skewed noise wants few large ones, for the median of a skewed law is not its mean;
# a mixture wants something in between, and :func:`~thalweg.training.choose_blocks` says what.
import matplotlib.pyplot as plt
import numpy as np
import torch

from thalweg.tasks import MixedNoise, noisy_quadratic
from thalweg.training import choose_blocks, median_of_means, minimize_clipped_mom, tail_report

laws = {
    "symmetric, no mean": MixedNoise(beta=0.8),
    "skewed, no variance": MixedNoise(alpha=1.5, weight=1.0),
    "half and half": MixedNoise(beta=0.8, alpha=1.5, weight=0.5),
}
blocks = [1, 3, 5, 7, 15, 35, 105]
rng = np.random.default_rng(0)
figure, ax = plt.subplots(layout="constrained")
for name, law in laws.items():
    samples = torch.from_numpy(law.sample((105, 4000), rng))
    errors = [float(median_of_means(samples, k).abs().quantile(0.99)) for k in blocks]
    ax.loglog(blocks, errors, marker="o", label=name)
plan = choose_blocks(105, beta=0.8, alpha=1.5, skew_weight=0.5, purpose="estimate")
ax.axvline(plan.k, color="0.7", linestyle="dashed", label="the plan for the mixture")
ax.set(xlabel="number of blocks", ylabel="99 % quantile of the error")
ax.legend()
plt.show()

# %%
# Descending a quadratic
# ----------------------
# Fifteen gradients per step, with the symmetric noise. One block is clipped SGD.
problem = noisy_quadratic(laws["symmetric, no mean"])
figure, ax = plt.subplots(layout="constrained")
for k in (1, 3, 5, 15):
    results = [
        minimize_clipped_mom(
            lambda x: float(problem.excess(x)),
            problem.x0,
            jac_samples=lambda x, N, rng: problem.gradients(x[None], N, rng)[0],
            k=k,
            lr=0.1,
            maxiter=300,
            rng=seed,
        )
        for seed in range(20)
    ]
    paths = np.array([result.trace["fun"] for result in results])
    ax.semilogy(results[0].trace["step"], np.median(paths, axis=0), label=f"k = {k}")
    ax.fill_between(results[0].trace["step"], *np.quantile(paths, [0.1, 0.9], axis=0), alpha=0.15)
ax.set(xlabel="step", ylabel="loss, median and 80 % of 20 runs")
ax.legend()
plt.show()

# %%
# What noise is it?
# -----------------
# Samples of the gradient at one point say how many blocks there should be.
gradients = problem.gradients(problem.x0[None], 2000, rng)[0]
report = tail_report(gradients, rng=0)
print(report)
report.plot()
plt.show()

# %%
# In a training loop
# ------------------
# :class:`~thalweg.training.ClippedMoM` needs several micro-batches per step:
#
# .. code-block:: diff
#
#      for step in range(steps):
#          for images, labels in micro_batches(15):
#    +         optimizer.zero_grad()
#              cross_entropy(model(images), labels).backward()
#    +         optimizer.accumulate()
#          optimizer.step()
