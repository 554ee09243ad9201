"""
Newton's method for gradients with kinks
========================================

Support vector machines, contact, and penalties for violated constraints have gradients that are
continuous, but with kinks. Newton's method works for them all the same, with any element of the
generalized Hessian, if its steps are regularized; and an old Hessian serves for several steps.
"""

# %%
# A support vector machine
# ------------------------
# The squared hinge loss of 7188 images on 300 random features. The Hessian, a sum over all samples
# inside the margin, costs many times a factorization. With one Hessian for every m steps there are
# more steps, and fewer Hessians.
import matplotlib.pyplot as plt
import numpy as np
import torch

from thalweg.curvature import LazySSN, minimize_lazy_ssn
from thalweg.tasks import contact_membrane, digits_svm

svm = digits_svm(np.random.default_rng(0), 300, shifts=4)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
for m in (1, 2, 5, 10):
    result = minimize_lazy_ssn(svm, svm.x0, jac=True, hess=svm.hessian, hess_every=m)
    print(
        f"m = {m:2d}: {result.nit:2d} steps, {result.nhev:2d} Hessians, "
        f"{result.n_factor:2d} factorizations, objective {result.fun:.10f}"
    )
    axes[0].semilogy(result.trace["nhev"], result.trace["grad_norm"], ".-", label=f"m = {m}")
    axes[1].semilogy(result.trace["time"], result.trace["grad_norm"], ".-")
axes[0].set(xlabel="Hessians", ylabel="norm of the gradient")
axes[1].set(xlabel="seconds")
axes[0].legend()
plt.show()

# %%
# A membrane on an obstacle
# -------------------------
# A membrane on springs is pressed onto a hill: the energy is minimized over the shapes that stay
# above it. The Hessians are sparse finite element matrices and the obstacle is a bound at each
# node. With the mass matrix as the metric, so that norms are those of functions and not of
# vectors, the number of steps does not grow with the mesh.
for cells in (16, 32, 64):
    membrane = contact_membrane(np.random.default_rng(3), cells, gamma=0.0)
    result = minimize_lazy_ssn(
        membrane,
        membrane.x0,
        jac=True,
        hess=membrane.hessian,
        bounds=[(low, None) for low in membrane.lower],
        metric=membrane.mass,
    )
    contact = np.sum(result.x == membrane.lower)
    print(
        f"{membrane.d:5d} nodes: {result.nit} steps, {result.nhev} Hessians, "
        f"{contact} nodes in contact"
    )

figure, axes = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
x, y = membrane.nodes
axes[0].tricontourf(x, y, result.x, levels=20)
axes[0].set(title="displacement", aspect="equal")
axes[1].scatter(x, y, c=result.x == membrane.lower, s=2, cmap="coolwarm")
axes[1].set(title="contact", aspect="equal")
plt.show()

# %%
# A network with a closure
# ------------------------
# `LazySSN` is the same method as an optimizer of torch, for models of up to some thousand
# parameters and losses without noise. There is no learning rate.
torch.manual_seed(0)
inputs = torch.rand(200, 2, dtype=torch.float64) * 4 - 2
targets = (inputs[:, :1].abs() - inputs[:, 1:].clamp(min=0)).sin()
model = torch.nn.Sequential(
    torch.nn.Linear(2, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)
).double()
optimizer = LazySSN(model.parameters(), hess_every=5)


def closure():
    """Compute a Huber loss, which has kinks in its gradient."""
    optimizer.zero_grad()
    loss = torch.nn.functional.huber_loss(model(inputs), targets, delta=0.1)
    loss.backward()
    return loss


losses = [float(optimizer.step(closure)) for _ in range(60)]

figure, ax = plt.subplots(layout="constrained")
ax.semilogy(losses)
ax.set(xlabel="step", ylabel="loss", title=f"{optimizer.n_hessians} Hessians")
plt.show()
