"""
Online decisions on a set that is hard to project on
====================================================

A fund chooses weights of 20 stocks every day. It holds none short and none above a fifth, no
sector above two fifths, and its exposure to five style factors stays near that of equal weights:
a polytope with an equation, long in some directions and thin in others. Online gradient descent
would solve a quadratic program a day to stay inside. `EllipsoidOCO` asks only whether a point is
inside, and if not, which limit cuts it off.
"""

# %%
# The set
# -------
# Weights sum to 1, so they live on a hyperplane; :class:`~thalweg.convex.AffineHull` gives it
# coordinates of its own, in which the set has an interior. The largest ball inside comes from one
# linear program.
import matplotlib.pyplot as plt
import numpy as np

from thalweg.convex import AffineHull, EllipsoidOCO, GaugeOGD, SeparationOracle, chebyshev_ball
from thalweg.tasks import drifting_losses, portfolio_days, thin_ellipsoid

days = portfolio_days()
hull = AffineHull.of_equations(np.ones((1, 20)), [1.0])
rows, limits = hull.reduce_inequalities(days.A, days.b)
center, inner_radius = chebyshev_ball(rows, limits)
limits_of_the_fund = SeparationOracle.polytope(rows, limits)
print(f"a ball of radius {inner_radius:.4f} fits inside; weights differ by up to 0.2")

# %%
# The player
# ----------
# One point a day, one gradient a day. The loss is minus the log of the day's growth.
horizon = 750
player = EllipsoidOCO(
    limits_of_the_fund,
    hull.dim,
    radius=0.6,
    inner_radius=inner_radius,
    feasible_point=center,
    lipschitz=0.2,
    horizon=horizon,
    on_large_grad="rescale",  # the wildest days
)
wealth = [1.0]
for growth in days.growth[:horizon]:
    weights = hull.lift(player.select())
    gain = growth @ weights
    wealth.append(wealth[-1] * gain)
    player.update(hull.reduce_gradient(-growth / gain))
print(f"limits kept: {np.max(days.A @ weights - days.b):.1e} is the worst excess")
print(f"{player.n_oracle_calls_ / horizon:.1f} oracle calls a day, {player.n_updates_} cuts")

fig, ax = plt.subplots()
ax.plot(wealth, label="EllipsoidOCO")
ax.plot(np.cumprod(np.append(1.0, days.growth[:horizon].mean(axis=1))), label="equal weights")
ax.set(xlabel="day", ylabel="wealth")
ax.legend()
plt.show()

# %%
# What elongation costs
# ---------------------
# On synthetic losses the difference is plain. The set is an ellipsoid, two half-axes of 1 and
# three of 1/κ; gradient descent that is played through the gauge of the set, which needs no
# projection either, gives up as the set gets thin.
kappas = [1.0, 10.0, 100.0, 1000.0]
regrets = {"EllipsoidOCO": [], "gauge OGD": []}
for kappa in kappas:
    ellipsoid = thin_ellipsoid(5, kappa, rng=0)
    losses = drifting_losses(5, 1000, rng=1)
    oracle = SeparationOracle.ellipsoid(ellipsoid.shape, np.zeros(5))
    players = {
        "EllipsoidOCO": EllipsoidOCO(
            oracle,
            5,
            radius=2.0,
            inner_radius=1 / kappa,
            feasible_point=ellipsoid.start,
            horizon=len(losses),
        ),
        "gauge OGD": GaugeOGD(oracle, ellipsoid.start, radius=2.0, horizon=len(losses), scale=0.5),
    }
    total = losses.sum(axis=0)
    for name, one in players.items():
        paid = 0.0
        for gradient in losses:
            paid += gradient @ one.select()
            one.update(gradient)
        regrets[name].append(paid - total @ ellipsoid.argmin(total))

fig, ax = plt.subplots()
for name, values in regrets.items():
    ax.semilogx(kappas, values, "o-", label=name)
ax.set(xlabel="elongation κ of the set", ylabel="regret after 1000 rounds", ylim=(0, None))
ax.legend()
plt.show()
