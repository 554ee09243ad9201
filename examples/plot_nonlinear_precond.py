"""
Far starts and saddle points
============================

Quartics such as phase retrieval and matrix factorization have gradients that grow with the third
power of the distance: a step size that is stable far away crawls near the solution. Passing the
gradient through a fixed nonlinearity, of which clipping is the crudest, removes the conflict, and a
little noise leaves the saddle points that such functions have.
"""

# %%
# Principal components without a decomposition
# --------------------------------------------
# The five leading components of the digits' covariance C minimize ‖UUᵀ - C‖²/4. We start at a large
# random U. Gradient descent needs a tiny step there; the other methods use γ = 1 for all distances.
import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.optimize import minimize

from thalweg.tasks import digits_covariance, octopus, phase_retrieval, symmetric_factorization
from thalweg.training import (
    NLPrecond,
    minimize_nlprecond,
    perturbation_parameters,
    smoothness_report,
)

f = symmetric_factorization(digits_covariance(), rank=5)
x0 = 10 * np.random.default_rng(0).standard_normal(f.n) / 8

figure, ax = plt.subplots(layout="constrained")
runs = {
    "gradient descent, step 1/128": {"kernel": "quadratic", "gamma": 1 / 128},
    "clipped": {"kernel": "clip", "gamma": 1.0},
    "log": {"kernel": "log", "gamma": 1.0},
    "cosh": {"kernel": "cosh", "gamma": 1.0},
    "cosh, no step size given": {"kernel": "cosh"},
}
for name, options in runs.items():
    result = minimize_nlprecond(f.value_and_gradient, x0, maxiter=400, **options)
    ax.loglog(result.trace["njev"], result.trace["fun"] - f.minimum, label=name)
ax.set(xlabel="gradients", ylabel="gap to the minimum", ylim=(1e-10, None))
ax.legend()
plt.show()

# %%
# In SciPy's interface it is one more ``method``:
result = minimize(f.value_and_gradient, x0, jac=True, method=minimize_nlprecond)
print(result.message, f"gap {result.fun - f.minimum:.1e} after {result.njev} gradients")

# %%
# Is the theory's assumption met?
# -------------------------------
# `smoothness_report` measures how gradient and Hessian grow. If the gradient's degree is one above
# the Hessian's in *every* direction, the function is smooth in both generalized senses, and
# ``aniso_L`` bounds the step size: any γ < 1/L descends.
small = symmetric_factorization(np.diag([1.0, 0.7, 0.4, 0.2]), rank=2)
report = smoothness_report(small, small.gradient, small.hvp, x0=np.zeros(small.n), rng=0)
report.plot()
plt.show()
for Lbar, L in report.aniso_L.items():
    print(f"Lbar = {Lbar:<4} L at least {L:.2f}, so gamma up to {1 / L:.3f}")

# %%
# Leaving saddle points
# ---------------------
# The octopus is a chain of saddle points, on which descent takes exponential time. Noise, added
# wherever the gradient is small, makes it a matter of a few hundred steps.
f = octopus(n=10, L=1.5)
x0 = np.random.default_rng(1).uniform(-1, 1, f.n)
step = {"gamma": 1 / 6, "tol": 0.0, "maxiter": 800}
noise = {"perturb": True, "eps": 0.03, "radius": 0.03, "interval": 10, "rng": 0}

figure, ax = plt.subplots(layout="constrained")
for name, options in {"plain": step, "perturbed": step | noise}.items():
    result = minimize_nlprecond(f.value_and_gradient, x0, **options)
    ax.plot(result.trace["fun"] - f.minimum, label=name)
left = [step for step, before, after in result.escaped]
ax.plot(left, result.trace["fun"][left] - f.minimum, "k.", label="perturbations that led down")
ax.set(xlabel="step", ylabel="gap to the minimum")
ax.legend()
plt.show()

# %%
# Started exactly at a saddle point, and with Hessian products for a certificate: the smallest
# eigenvalue of the preconditioned Hessian is positive where the run ends.
f = phase_retrieval(n=40, m=400, rng=np.random.default_rng(2))
result = minimize_nlprecond(f.value_and_gradient, np.zeros(f.n), perturb=True, rng=0, hessp=f.hvp)
print(result.message, f"f = {result.fun:.1e}, smallest eigenvalue {result.min_eigenvalue:.2f}")

# %%
# The theory's own parameters are far more cautious than these defaults:
table = perturbation_parameters(L=8.0, Lbar=1.0, rho=10.0, eps=1e-2, n=f.n, delta_f=1.0, delta=0.1)
print({name: float(f"{value:.3g}") for name, value in table.items()})

# %%
# In a training loop
# ------------------
# The same step for networks replaces SGD and ``clip_grad_norm_``:
#
# .. code-block:: diff
#
#    - optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
#    + optimizer = NLPrecond(model.parameters(), lr=0.1)
#      for inputs, targets in batches:
#          optimizer.zero_grad()
#          loss_function(model(inputs), targets).backward()
#    -     torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
#          optimizer.step()
#
# Here a deep linear network, whose loss is a polynomial of degree eight, starts with weights three
# times too large.
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(256, 8, generator=generator)
targets = inputs @ torch.randn(8, 8, generator=generator) / 8**0.5
figure, ax = plt.subplots(layout="constrained")
for name, make in {
    "SGD, lr = 10⁻⁵": lambda p: torch.optim.SGD(p, lr=1e-5),
    "NLPrecond, lr = 0.1": lambda p: NLPrecond(p, lr=0.1),
}.items():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    with torch.no_grad():
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=3 / 8**0.5)
    optimizer = make(model.parameters())
    losses = []
    for _ in range(1000):
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    ax.loglog(losses, label=name)
ax.set(xlabel="step", ylabel="loss")
ax.legend()
plt.show()
