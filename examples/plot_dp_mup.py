"""
Tune a private learning rate once
=================================

A hospital wants to train a model with differential privacy. Every tuning run of the model costs
privacy and time, so it tunes a narrow model and hopes that the learning rate is right for the wide
one, too. With DP-SGD, DP-Adam and DP-Muon that hope is vain: the noise has full rank, and what it
does to a matrix grows with the width, while the clipped gradient stays as it is. DP-μP sets a rate
for every layer, so that the hope comes true.
"""

# %%
# The best rate moves
# -------------------
# A narrow and a wide perceptron learn scikit-learn's digits with DP-Adam. The horizontal axis is
# the learning rate at the narrow width. On the left all layers share one rate, and the wide model's
# curve moves to the left: the rate that was best for the narrow one is too large. In the middle are
# the rates of μP, which is made for gradients without noise, and it moves to the right: the wide
# model hardly learns. On the right are DP-μP's rates.
import warnings

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import cross_entropy

from thalweg.tasks import load_digits, width_mlp
from thalweg.training import (
    dp_mup_init_,
    dp_mup_param_groups,
    dp_snr_report,
    make_private,
    width_transfer_report,
)

# Opacus warns that its random numbers are not cryptographic ones, which an example can do without,
# and torch that inputs need no gradients.
warnings.filterwarnings("ignore", module="opacus")
warnings.filterwarnings("ignore", message="Full backward hook is firing")

digits = load_digits()
images, labels = digits.train_images, digits.train_labels
report = width_transfer_report(
    width_mlp,
    [32, 512],
    (images, labels),
    lrs=[2.0**k for k in range(-8, -1)],
    noise_multiplier=2.0,
    batch_size=128,
    steps=40,
    optimizer="adam",
    rules=["sp", "mup", "dp_mup"],
)
figure, axes = plt.subplots(1, 3, figsize=(10, 3.5), sharey=True, layout="constrained")
titles = {"sp": "one rate", "mup": "μP", "dp_mup": "DP-μP"}
for ax, (rule, title) in zip(axes, titles.items(), strict=True):
    report.plot(ax, rule=rule).set(title=title, ylim=(0.2, 10))
for ax in axes[1:]:
    ax.set_ylabel("")
    ax.get_legend().remove()
plt.show()
print(report)

# %%
# Train with Opacus
# -----------------
# The wide model gets the narrow model's rate. Opacus clips, adds noise and counts ε; the rates do
# not enter the privacy.
model = width_mlp(512)
dp_mup_init_(model, base_shapes=width_mlp(32))
data = torch.utils.data.TensorDataset(images, labels)
torch.manual_seed(0)
module, optimizer, loader, engine = make_private(
    model,
    "adam",
    torch.utils.data.DataLoader(data, batch_size=128),
    base_lr=report.best_lrs("dp_mup")[0],
    base_shapes=width_mlp(32),
    target_epsilon=8.0,
    delta=1e-4,
    epochs=3,
    accountant="rdp",
    noise_generator=torch.Generator().manual_seed(0),
)
for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(module(inputs), targets).backward()
        optimizer.step()

accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean()
print(f"ε = {engine.get_epsilon(1e-4):.2f}, test accuracy {accuracy:.1%}")

# %%
# Every parameter tensor has its rate, and says why: its role, and the most that the ratio of signal
# to noise can be, which is known without looking at the data.
for group in optimizer.param_groups:
    print(
        f"{group['name']:9} {group['role']:7} lr {group['lr']:.4f}, "
        f"signal over noise at most {group['snr_public']:.1f}"
    )

# %%
# Why
# ---
# Signal and noise of the hidden layer, as matrices, at several widths. Measuring the signal looks
# at the data without noise, so this picture is not private.
widths = [32, 64, 128, 256, 512]
signal, noise = [], []
for width in widths:
    model = width_mlp(width)
    dp_mup_init_(model, base_shapes=width_mlp(32), generator=torch.Generator().manual_seed(0))
    groups = dp_mup_param_groups(
        model,
        2.0**-5,
        optimizer="adam",
        noise_multiplier=0.0,
        batch_size=128,
        base_shapes=width_mlp(32),
    )
    adam = torch.optim.Adam(groups)
    for _ in range(10):
        adam.zero_grad()
        cross_entropy(model(images), labels).backward()
        adam.step()
    spectra = dp_snr_report(
        model, cross_entropy, images, labels, noise_multiplier=2.0, batch_size=128
    )
    hidden = spectra.names.index("2.weight")
    signal.append(spectra.signal_norm[hidden])
    noise.append(spectra.noise_norm[hidden])
figure, ax = plt.subplots(layout="constrained")
ax.loglog(widths, noise, "o-", label="noise")
ax.loglog(widths, signal, "o-", label="mean clipped gradient")
ax.set(xlabel="width", ylabel="spectral norm")
ax.legend()
plt.show()
