"""
Starting with another network's geometry
========================================

What a network finds alike before training decides what it learns first. Guide initialization fits
this geometry to that of a random, untrained network of another architecture, on unlabeled inputs;
then training goes on as usual.
"""

# %%
# A shallow network of coordinates
# --------------------------------
# A photograph is to be stored in a small network that maps a pixel's coordinates to its grey value.
# Fresh shallow networks vary slowly over the plane. A deep random tanh network in its chaotic phase
# tells neighbors apart; :func:`~thalweg.training.random_guide` makes one that suits the target.
import copy

import matplotlib.pyplot as plt
import torch
from torch import nn

from thalweg.tasks import coordinate_image, load_digits, uniform_points
from thalweg.training import fate_report, guide_init, random_guide

torch.manual_seed(0)
image = coordinate_image("china", side=32)
fresh = nn.Sequential(
    nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
)
guide = random_guide(fresh, generator=torch.Generator().manual_seed(1))
guide

# %%
# The alignment sees random coordinates and no pixel. The target is changed in place.
target = copy.deepcopy(fresh)
points = uniform_points(4096, torch.Generator().manual_seed(2))
report = guide_init(target, guide, points, generator=torch.Generator().manual_seed(3))
print(report)
report.plot()
plt.show()

# %%
# What it has become
# ------------------
# The similarity of every point to the one in the middle, in the last hidden layer. The guide is
# more local than the fresh network, and the aligned network is like the guide.
hidden = {"fresh": fresh[:-1], "guide": guide, "aligned": target[:-1]}
middle = 16 * 32 + 16
figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), layout="constrained")
for ax, (name, network) in zip(axes, hidden.items(), strict=True):
    with torch.no_grad():
        features = network(image.coordinates)
    features = features - features.mean(0)
    similarity = nn.functional.cosine_similarity(features, features[middle], dim=1)
    ax.imshow(similarity.reshape(32, 32).numpy(), vmin=-1, vmax=1, cmap="RdBu_r")
    ax.set(title=name, xticks=[], yticks=[])
plt.show()

# %%
# Does it train differently?
# --------------------------
# :func:`~thalweg.training.fate_report` measures the kernels at the start, trains, and follows the
# features. The learning rate should be tuned for each initialization, as the evidence on the
# method's page does; here it is the same.


def train(model, loader, loss_fn, steps=200):
    """Train on the whole image, and yield the loss at every tenth step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        for coordinates, values in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(coordinates), values)
            loss.backward()
            optimizer.step()
        if step % 10 == 9:
            yield loss.item()


order = torch.randperm(1024, generator=torch.Generator().manual_seed(4))
loader = [(image.coordinates[order], image.values[order])]
fates = fate_report(
    {"fresh": fresh, "aligned": target}, loader, nn.functional.mse_loss, train, guide=guide
)
print(fates)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
fates.plot(left)
for name, path in fates.guide_cka.items():
    right.plot(path, label=name)
right.set(xlabel="checkpoint", ylabel="CKA with the guide")
right.legend()
plt.show()

# %%
# In your own project
# -------------------
# One line before training:
#
# .. code-block:: diff
#
#      model = Model()
#    + guide_init(model, random_guide(model), unlabeled_loader)
#      optimizer = torch.optim.AdamW(model.parameters())
#
# Coarse patches take the geometry of finer ones in the same way: ``random_guide`` of a network that
# starts with a convolution with stride has half the stride.
patches = nn.Sequential(
    nn.Conv2d(1, 16, 4, stride=4),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 10),
)
digits = load_digits().train_images.reshape(-1, 1, 8, 8)
finer = random_guide(patches, generator=torch.Generator().manual_seed(1))
report = guide_init(
    patches,
    finer,
    digits,
    pool="grid",
    generator=torch.Generator().manual_seed(2),
)
print(report)

# %%
# Whether it helps depends on the task: the evidence on the method's page shows a gain where a
# shallow network is limited by its initial geometry, as here, and none on digits and a table.
