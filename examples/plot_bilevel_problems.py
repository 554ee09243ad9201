"""
Bilevel problems of one's own in ten lines
==========================================

Weights for rows with doubtful labels, a penalty for every feature, and weights that treat groups
alike: three upper levels over one lower level, which is to fit a model. Both levels are torch
functions, the data are scikit-learn's.
"""

# %%
# Doubtful labels
# ---------------
# Handwritten digits, of which every third label is wrong, and 100 rows with labels that were
# checked. The upper variables are a weight for each row; the upper loss is that of the checked
# rows.
import matplotlib.pyplot as plt
import numpy as np
import optuna
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV

from thalweg.bilevel import CG, ane_bilevel, hypergradient

rng = np.random.default_rng(0)
X, label = load_digits(return_X_y=True)
order = rng.permutation(len(X))
X, label = torch.tensor(X[order] / 16, dtype=torch.float32), torch.tensor(label[order])
given = label[:1000].clone()
wrong = torch.tensor(rng.random(1000) < 1 / 3)
given[wrong] = torch.tensor(rng.integers(10, size=int(wrong.sum())))
cross_entropy = torch.nn.functional.cross_entropy


def upper(x, y, batch):
    """Return the loss on checked rows."""
    return cross_entropy(batch[0] @ y, batch[1])


def lower(x, y, batch):
    """Return the weighted loss on training rows."""
    losses = cross_entropy(batch[0] @ y, batch[1], reduction="none")
    return (x[batch[2]].sigmoid() * losses).mean() + 1e-3 * y.square().sum()


result = ane_bilevel(
    upper,
    lower,
    torch.zeros(1000),
    torch.zeros(64, 10),
    inner_data=(X[:1000], given, torch.arange(1000)),
    outer_data=(X[1000:1100], label[1000:1100]),
    maxiter=300,
    lr_y=0.5,
    optimizer_x=lambda params: torch.optim.Adam(params, lr=0.1),
    K=5,
    generator=torch.Generator().manual_seed(0),
)
print(f"weights tell right from wrong labels: AUC {roc_auc_score(~wrong, result.x):.2f}")

# %%
# Beside it, logistic regression on all rows, with the strength of its penalty by grid search.
search = GridSearchCV(LogisticRegression(max_iter=300), {"C": [1e-3, 1e-2, 0.1, 1.0]}, cv=3)
search.fit(X[:1000].numpy(), given.numpy())
test_rows, test_label = X[1100:], label[1100:]
weighted = ((test_rows @ result.y).argmax(1) == test_label).float().mean()
print(f"accuracy with weights {weighted:.3f}")
print(f"accuracy by grid search {search.score(test_rows.numpy(), test_label.numpy()):.3f}")

figure, axes = plt.subplots(figsize=(7, 4))
bins = np.linspace(0, 1, 30)
axes.hist(result.x[~wrong].sigmoid(), bins, alpha=0.6, label="right label")
axes.hist(result.x[wrong].sigmoid(), bins, alpha=0.6, label="wrong label")
axes.set(xlabel="weight", ylabel="rows")
axes.legend()
plt.show()

# %%
# A penalty for every feature
# ---------------------------
# Where the lower level has a closed form or is cheap to solve, take exact hypergradients and any
# optimizer of torch. The diabetes data, ten penalties; scikit-learn tunes one for all, and Optuna
# tries as many settings as there are steps.
X, target = load_diabetes(return_X_y=True)
order = rng.permutation(len(X))
A = torch.tensor((X / X.std(0))[order])
b = torch.tensor(((target - target.mean()) / target.std())[order])
train, held_out, test = slice(0, 60), slice(60, 200), slice(200, None)


def f(x, y):
    """Return the held-out error."""
    return ((A[held_out] @ y - b[held_out]) ** 2).mean() / 2


def g(x, y):
    """Return the penalized training error."""
    return ((A[train] @ y - b[train]) ** 2).mean() / 2 + x.exp().dot(y * y) / 2


def fit(x):
    """Return the coefficients for these penalties."""
    H = A[train].T @ A[train] / 60 + torch.diag(x.exp())
    return torch.linalg.solve(H, A[train].T @ b[train] / 60)


x = torch.zeros(10, dtype=torch.float64)
adam, losses = torch.optim.Adam([x], lr=0.2), []
for _ in range(100):
    y = fit(x)
    losses.append(float(f(x, y)))
    x.grad = hypergradient(f, g, x, y, solve=CG()).grad
    adam.step()

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))


def objective(trial):
    """Return the held-out error for penalties that Optuna suggests."""
    values = [trial.suggest_float(f"x{i}", -10, 5) for i in range(10)]
    z = torch.tensor(values, dtype=torch.float64)
    return float(f(z, fit(z)))


study.optimize(objective, n_trials=100)
one = RidgeCV(alphas=60 * np.logspace(-4, 2, 100), fit_intercept=False).fit(A[train], b[train])
found = {
    "hypergradients": fit(x),
    "Optuna": fit(torch.tensor(list(study.best_params.values()), dtype=torch.float64)),
    "RidgeCV, one penalty": torch.tensor(one.coef_),
}
for name, y in found.items():
    error = ((A[test] @ y - b[test]) ** 2).mean() / 2
    print(f"{name}: held-out {f(x, y):.4f}, test {error:.4f}")

figure, axes = plt.subplots(figsize=(7, 4))
axes.plot(losses, label="hypergradients")
axes.plot(np.minimum.accumulate([trial.value for trial in study.trials]), label="Optuna")
axes.set(xlabel="steps or trials", ylabel="held-out error")
axes.legend()
plt.show()

# %%
# Weights that treat groups alike
# -------------------------------
# A classifier of tumors that is to serve small and large ones equally well: the groups are the
# halves by mean radius. The upper loss is a soft maximum of the groups' losses on held-out rows,
# the upper variables are weights of the training rows. With so few rows of each group, what is fair
# on held-out rows need not be so on others: print both.
X, label = load_breast_cancer(return_X_y=True)
group = torch.tensor((X[:, 0] > np.median(X[:, 0])).astype(int))
A = torch.tensor(np.column_stack([(X - X.mean(0)) / X.std(0), np.ones(len(X))]))
b = torch.tensor(label, dtype=torch.float64)
order = torch.tensor(rng.permutation(len(X)))
train, held_out, test = order[:200], order[200:380], order[380:]
log_loss = torch.nn.functional.binary_cross_entropy_with_logits


def by_group(y, rows):
    """Return the losses of both groups."""
    losses = log_loss(A[rows] @ y, b[rows], reduction="none")
    return torch.stack([losses[group[rows] == k].mean() for k in (0, 1)])


def fair(x, y, batch):
    """Return a soft maximum of the groups' losses on held-out rows."""
    return torch.logsumexp(20 * by_group(y, held_out), 0) / 20


def weighted_loss(x, y, batch):
    """Return the weighted loss on training rows."""
    a, labels, row = batch
    losses = log_loss(a @ y, labels, reduction="none")
    return (2 * x[row].sigmoid() * losses).mean() + 0.005 * y.dot(y)


start = torch.zeros(31, dtype=torch.float64)
settings = {
    "inner_data": (A[train], b[train], torch.arange(200)),
    "outer_data": A[held_out],
    "lr_y": 0.1,
    "inner_steps": 10,
    "K": 10,
    "generator": torch.Generator().manual_seed(0),
}
weights = torch.zeros(200, dtype=torch.float64)
equal = ane_bilevel(fair, weighted_loss, weights, start, maxiter=150, lr_x=1e-9, **settings)
fairer = ane_bilevel(
    fair,
    weighted_loss,
    weights,
    start,
    maxiter=150,
    optimizer_x=lambda params: torch.optim.Adam(params, lr=0.1),
    **settings,
)
for name, y in (("equal weights", equal.y), ("fair weights", fairer.y)):
    for where, rows in (("held-out", held_out), ("test", test)):
        small, large = by_group(y, rows).tolist()
        print(f"{name}, {where}: loss of small tumors {small:.3f}, of large ones {large:.3f}")
