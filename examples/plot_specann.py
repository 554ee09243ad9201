"""
Spectral Annealing: a path of relaxations against one
=====================================================

A spin glass on a random geometric graph: couplings between near points mostly agree with hidden
spins, one in seven is reversed. The one-shot spectral method rounds the eigenvectors of a single
matrix, and has to be told which normalization to use. Spectral Annealing walks from the raw
matrix to the normalized Laplacian, and follows the eigenvectors on its way.
"""

import matplotlib.pyplot as plt
import numpy as np

from thalweg.combinatorial import specann
from thalweg.tasks import planted_geometric

J = planted_geometric(10_000, degree=10, flip=0.15, rng=0)
path = specann(J, rng=0)
print(path)

# %%
# The same number of candidates, all at one point of the path:

taus = np.linspace(0, 1, 9)
points = [
    specann(J, taus=[tau], n_candidates=144, start_iter=136, bound="trivial", rng=0).energy
    for tau in taus
]
print(f"best single relaxation {min(points):g}, path {path.energy:g}")

# %%
# A short anneal of the best states removes the defects that greedy search leaves:

annealed = specann(J, local_search="anneal", bound="trivial", rng=0)
print(f"with a final anneal {annealed.energy:g}")

fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
path.plot(ax)
ax.plot(taus, points, "s:", color="tab:red", label="one relaxation, all candidates")
ax.axhline(annealed.energy, color="tab:green", linewidth=0.8, label="path and final anneal")
ax.legend(fontsize="small")
ax.set_title("10 000 spins on a geometric graph")
plt.show()

# %%
# Max-Cut takes edge weights; the bound says how far from the optimum a cut can be at most. G14 is
# a planar graph of the Gset, whose best known cut is 3064.

from thalweg.combinatorial import specann_maxcut  # noqa: E402
from thalweg.tasks import gset_instance  # noqa: E402

graph = gset_instance("G14")
cut = specann_maxcut(graph.weights, local_search="anneal", ls_sweeps=1000, rng=0)
print(cut)
print(f"best known: {graph.best_known}")
