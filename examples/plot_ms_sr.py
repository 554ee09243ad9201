"""
Shifts that follow the wave function
====================================

Stochastic reconfiguration (SR) trains neural quantum states by a natural gradient, whose diagonal
shift is usually set to 1e-3 and forgotten. With more parameters than samples the shift is a
statistical filter: too small, and the step fits the noise of the batch; too large, and it forgets
where to go. MS-SR finds its shifts from the batch.
"""

# %%
# A frustrated magnet
# -------------------
# The J₁-J₂ model on a 4×4 square has 12,870 configurations without magnetization: few enough to
# enumerate, so that we know the risk of every update exactly.
import matplotlib.pyplot as plt
import torch

from thalweg.curvature import MultiShiftSR, log_derivatives, shift_risk_report
from thalweg.tasks import RBM, enumerate_exactly, j1_j2_square

torch.set_num_threads(1)
square = j1_j2_square(4, j2=0.5)
matrix, spins = square.matrix(), torch.as_tensor(square.states()).double()
lowest = square.ground_state()[0]


def ensemble_of(psi):
    """Enumerate the wave function."""
    with torch.no_grad():
        return enumerate_exactly(matrix, psi(spins), spins)


def train(psi, optimizer, steps, n=256, seed=0):
    """Train on n samples per step; return the energies."""
    generator, energies = torch.Generator().manual_seed(seed), []
    for _ in range(steps):
        exact = ensemble_of(psi)
        energies.append(exact.energy)
        rows = exact.draw(n, generator)
        optimizer.step(
            log_psi_jac=log_derivatives(psi, spins[rows]),
            local_energy=exact.local_energy[rows],
        )
    return energies


# %%
# The risk of one update
# ----------------------
# Early in a run the tangent space explains most of the local energy, later hardly any: what is left
# is noise in a batch. The best shift moves by orders of magnitude, and nobody sees it during a run.
psi = RBM(16, 16, generator=torch.Generator().manual_seed(0))
optimizer = MultiShiftSR(psi.parameters(), lr=0.05)
figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
for ax, steps in zip(axes, (6, 24), strict=True):
    train(psi, optimizer, steps)
    exact = ensemble_of(psi)
    report = shift_risk_report(
        log_derivatives(psi, spins),
        exact.local_energy,
        exact.probability,
        n_batches=6,
        batch_size=256,
        generator=torch.Generator().manual_seed(1),
    )
    report.plot(ax)
    ax.set(title=f"energy {exact.energy:.2f}, ground state {lowest:.2f}")
plt.show()

# %%
# Training
# --------
# With a schedule or without, `MultiShiftSR` is a torch optimizer. A list of one shift is SR.
figure, ax = plt.subplots(layout="constrained")
for label, settings in {
    "MS-SR": {},
    "SR, shift 0.001": {"shifts": [1e-3]},
    "SR, shift 0.1": {"shifts": [0.1]},
}.items():
    psi = RBM(16, 16, generator=torch.Generator().manual_seed(0))
    optimizer = MultiShiftSR(psi.parameters(), lr=0.1, **settings)
    energies = train(psi, optimizer, 30, n=128)
    ax.semilogy([(e - lowest) / abs(lowest) for e in energies], label=label)
ax.set(xlabel="step", ylabel="relative energy error")
ax.legend()
plt.show()
print(f"shifts of the last step of the last run: {optimizer.last_shifts}")
