"""
The step size is a temperature
==============================

SGD with step size h and gradient noise σ is a particle at temperature hσ²/2. Hot, it jumps over
barriers; cold, it rests where it is. A constant step has to choose. Decay does one after the other.
"""

# %%
# Many wells, noisy gradients
# ---------------------------
# A rugged function in two dimensions, whose gradient is only known with noise. A hundred particles
# start everywhere, and make 3000 steps each.
import matplotlib.pyplot as plt
import numpy as np

from thalweg.tasks import soft_rastrigin
from thalweg.training import annealing_report, constant_lr_baseline, minimize_annealed_sgd

function = soft_rastrigin()
starts = function.starts(100, 2, np.random.default_rng(0))
common = {
    "jac": function.jac,
    "vectorized": True,
    "sigma": 6.0,
    "L": 1 + 3 * np.pi,
    "maxiter": 3000,
    "polish": False,
    "rng": 0,
}
runs = {
    "hot": constant_lr_baseline(function.fun, starts, lr0=0.03, **common),
    "cold": constant_lr_baseline(function.fun, starts, lr0=0.0005, **common),
    "annealed": minimize_annealed_sgd(function.fun, starts, lr0=0.08, lr_min=1e-4, **common),
}

figure, axes = plt.subplots(1, 3, figsize=(12, 4), sharey=True, layout="constrained")
grid = np.linspace(-5.5, 5.5, 300)
levels = function.fun(np.stack(np.meshgrid(grid, grid), axis=-1))
for ax, (name, run) in zip(axes, runs.items(), strict=True):
    ax.contourf(grid, grid, levels, 20, cmap="Greys", alpha=0.6)
    ax.plot(*run.x_last.T, ".", color="C3")
    share = (run.fun_last < 0.05).mean()
    ax.set(title=f"{name}: {share:.0%} within 0.05 of the minimum", xlabel="x")
axes[0].set_ylabel("y")
plt.show()

# %%
# The hot step has found the right well and cannot rest in it. The cold one rests where it
# started. The annealed one did both.

# %%
# Energy and temperature
# ----------------------
figure, ax = plt.subplots(layout="constrained")
for name, run in runs.items():
    ax.loglog(run.trace["step"][1:], run.trace["fun"][1:], label=name)
ax.set(xlabel="step", ylabel="median f of the particles")
ax.legend()
plt.show()

# %%
# Does annealing suit a function?
# -------------------------------
# Chains at fixed temperatures show where they stop mixing. If they mix down to temperatures at
# which the lowest well already holds most of them, annealing works.
report = annealing_report(
    function.fun,
    function.jac,
    x0=lambda rng, n: function.starts(n, 2, rng),
    temperatures=np.geomspace(0.02, 2.0, 6),
    steps=10_000,
    vectorized=True,
    rng=0,
)
print(report)
report.plot()
plt.show()

# %%
# In a training loop
# ------------------
# The same law as a scheduler:
#
# .. code-block:: python
#
#    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
#    scheduler = AnnealLR(optimizer, total_steps=10_000, lr_min_ratio=1e-3)
