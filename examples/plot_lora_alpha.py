r"""
LoRA-alpha: scale the adapter, not the learning rate
====================================================

LoRA adds :math:`s B A` to a frozen matrix. The habits α = r and α = 2r make s about 1, which leaves
the adapter under-trained at the small learning rates of full fine-tuning, and lets people search
for a larger one. LoRA-alpha keeps the small learning rate and makes :math:`s = c / \sqrt r` with
a large c. In a script for TRL or transformers one line changes:

.. code-block:: diff

   - config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
   + config = lora_alpha_config(r=16, target_modules="all-linear")
     trainer = SFTTrainer(
         model, args=SFTConfig(learning_rate=2e-5), train_dataset=dataset, peft_config=config,
   +     callbacks=[SignalDriftCallback()],
     )

Here it is on a small scale: a perceptron that knows handwritten digits learns rotated ones whose
labels are permuted, through adapters on its two hidden layers, in 150 steps.
"""

# %%
# A scan over the coefficient
# ---------------------------
# The default, c = 256, is for AdamW at 2e-5 and runs of thousands of steps. For other step sizes
# and lengths, :func:`~thalweg.training.find_coef` trains with each of several coefficients, and
# leaves the model as it was.
import matplotlib.pyplot as plt
import numpy as np
import peft
import torch
from torch.nn.functional import cross_entropy

from thalweg.tasks import pretrained_digits_mlp, sample_batch, shifted_digits
from thalweg.training import (
    find_coef,
    lora_alpha_config,
    lora_init_state,
    signal_drift,
    spectral_suppression,
)

torch.set_num_threads(1)
STEPS = 150
generator = torch.Generator().manual_seed(0)
data = shifted_digits(generator)
test = (data.test_images, data.test_labels)
batches = [sample_batch(data.train_images, data.train_labels, 64, generator) for _ in range(STEPS)]


def loss_fn(model, batch):
    """Return the loss of a batch."""
    images, labels = batch
    return cross_entropy(model(images), labels)


def adapted(config):
    """Return the pretrained perceptron with adapters, always the same."""
    torch.manual_seed(0)
    return peft.get_peft_model(pretrained_digits_mlp(), config)


figure, ax = plt.subplots(layout="constrained")
for lr, color in ((2e-4, "C0"), (2e-3, "C1")):
    search = find_coef(
        adapted(lora_alpha_config(r=8, target_modules=["0", "2"])),
        loss_fn,
        batches,
        lr=lr,
        coefs=2.0 ** np.arange(1, 16, 1.5),
        steps=STEPS,
        held_out=[test],
        generator=generator,
    )
    print(f"lr = {lr:g}: {search}")
    finite = np.isfinite(search.losses)
    ax.semilogx(
        search.coefs[finite], search.losses[finite], "o-", base=2, color=color, label=f"lr = {lr:g}"
    )
ax.axvline(8**0.5, color="0.6", linestyle="dashed", label="α = r")
ax.axvline(256, color="0.3", linestyle="dotted", label="LoRA-alpha")
ax.set(xlabel="coefficient c", ylabel=f"test loss after {STEPS} steps", yscale="log")
ax.legend()
plt.show()

# %%
# The best coefficient is far above the habit α = r, and falls as lr grows: at 2e-3, which is the
# small learning rate of this short run, it is near 256.

# %%
# Signal and drift
# ----------------
# A larger learning rate makes up for a small α, but not in the same way: it turns A as well, and so
# the subspace that B has learned to use. :func:`~thalweg.training.signal_drift` splits the update
# into the signal, seen through the initial A, and the drift.
runs = {
    "α = r, lr = 2e-3": (peft.LoraConfig(r=8, lora_alpha=8, target_modules=["0", "2"]), 2e-3),
    "α = r, lr = 3e-2": (peft.LoraConfig(r=8, lora_alpha=8, target_modules=["0", "2"]), 3e-2),
    "LoRA-alpha, lr = 2e-3": (lora_alpha_config(r=8, target_modules=["0", "2"]), 2e-3),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, (config, lr) in runs.items():
    model = adapted(config)
    start = lora_init_state(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)
    losses, ratios = [], []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        ratios.append(signal_drift(model, start).total.drift_ratio)
    left.semilogy(losses, label=name)
    right.semilogy(np.arange(1, STEPS), ratios[1:], label=name)
    with torch.no_grad():
        print(f"{name}: test loss {loss_fn(model, test):.3f}, drift / signal {ratios[-1]:.2f}")
left.set(xlabel="step", ylabel="loss of the batch")
right.set(xlabel="step", ylabel="drift / signal")
left.legend()
plt.show()

# %%
# Both ways reach a low loss; the larger lr with ten times as much drift. LoRA+ with a tuned ratio
# does the same as a larger α, see :func:`~thalweg.training.as_lora_plus_groups`; what the rule
# saves is the search.

# %%
# Spectral suppression
# --------------------
# Why are usual step sizes so cautious? A random A of low rank sees little of the curvature.
model = adapted(peft.LoraConfig(r=8, lora_alpha=8, target_modules=["0", "2"]))
report = spectral_suppression(model, loss_fn, batches[0])
print(report)
report.plot()
plt.show()
