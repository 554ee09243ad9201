r"""Step sizes that change matrices of any width by the same spectral amount.

A layer W of shape m × n learns features, and stays stable, if :math:`\|W\|_2` and
:math:`\|\Delta W\|_2` are of order :math:`\sqrt{m/n}` at every width. So an optimizer whose raw
update has spectral norm ν needs a step size proportional to :math:`\sqrt{m/n} / \nu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

OptimizerName = Literal["sgd", "adam", "muon"]
Regime = Literal["auto", "noise", "signal"]
Rule = Literal["dp_mup", "mup", "uniform"]
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adam", "muon")
REGIMES: tuple[Regime, ...] = ("auto", "noise", "signal")
RULES: tuple[Rule, ...] = ("dp_mup", "mup", "uniform")


@dataclass(frozen=True)
class PrivateUpdate:
    """What decides the size of a private update.

    Attributes
    ----------
    optimizer : {"sgd", "adam", "muon"}
    clip : float ≥ 0
        C, the largest norm that the layer's mean clipped gradient can have.
    noise_std : float ≥ 0
        τ, the standard deviation of the noise on every coordinate of the mean gradient.
    beta1 : float in [0, 1)
        Adam's momentum.
    floor : float or None
        If the noise is subtracted from Adam's second moment: the share of τ² that is left at least.
    """

    optimizer: OptimizerName
    clip: float
    noise_std: float
    beta1: float = 0.9
    floor: float | None = None

    def limit(self, regime: Regime) -> PrivateUpdate:
        """Return the update without noise, or without signal."""
        if regime == "signal":
            return replace(self, noise_std=0.0)
        return replace(self, clip=0.0) if regime == "noise" else self


def noise_norm(m: int, n: int, is_matrix: bool) -> float:
    """Return the spectral norm of standard normal noise: √m + √n, or √m for a vector."""
    return math.sqrt(m) + math.sqrt(n) if is_matrix else math.sqrt(m)


def update_norm(update: PrivateUpdate, m: int, n: int, is_matrix: bool) -> float:
    r"""Return ν, the spectral norm of the raw update of signal and noise.

    .. math::
        \nu_\text{SGD} = C + \tau (\sqrt m + \sqrt n), \quad
        \nu_\text{Adam} = \frac{C + c_\beta \tau (\sqrt m + \sqrt n)}{\sqrt{\tau^2 + C^2/(mn)}},
        \quad c_\beta = \sqrt{\frac{1 - \beta_1}{1 + \beta_1}}, \quad \nu_\text{Muon} = 1

    The signal does not grow with the width, since it is clipped, the noise does. Adam divides both
    by the root of the second moment, noise plus the signal spread over all coordinates; its
    momentum averages the noise, by which that shrinks to :math:`c_\beta`.
    """
    clip, tau = update.clip, update.noise_std
    noise = tau * noise_norm(m, n, is_matrix)
    if update.optimizer == "sgd":
        return clip + noise
    if update.optimizer == "adam":
        averaged = math.sqrt((1 - update.beta1) / (1 + update.beta1))
        return (clip + averaged * noise) / _root_of_second_moment(update, m, n)
    return 1.0


def _root_of_second_moment(update: PrivateUpdate, m: int, n: int) -> float:
    signal, noise = update.clip**2 / (m * n), update.noise_std**2
    if update.floor is None:
        return math.sqrt(noise + signal)
    return math.sqrt(max(signal, update.floor * noise))


def spectral_rate(update: PrivateUpdate, m: int, n: int, is_matrix: bool) -> float:
    r"""Return :math:`\sqrt{m/n} / \nu`, to which DP-μP's step size is proportional."""
    return math.sqrt(m / n) / update_norm(update, m, n, is_matrix)


def mup_rate(update: PrivateUpdate, m: int, n: int, is_matrix: bool) -> float:
    """Return what plain μP's step size is proportional to, which knows no clipping and no noise.

    m/n for SGD, whose raw gradient has norm √(n/m); 1/n for Adam, whose update is sign-like; and
    √(m/n) for Muon, whose update has norm 1.
    """
    if update.optimizer == "sgd":
        return m / n
    return 1 / n if update.optimizer == "adam" else math.sqrt(m / n)


def uniform_rate(update: PrivateUpdate, m: int, n: int, is_matrix: bool) -> float:
    """Return 1: one step size for all layers, as in the standard parametrization."""
    return 1.0


def inverse_signal_share(update: PrivateUpdate, m: int, n: int, is_matrix: bool) -> float:
    """Return 1 + 1/ρ: of an orthogonalized matrix the signal is about the share ρ/(1 + ρ)."""
    return 1 + update.noise_std * noise_norm(m, n, is_matrix) / update.clip


Rate = Callable[[PrivateUpdate, int, int, bool], float]
RATES: dict[Rule, Rate] = {"dp_mup": spectral_rate, "mup": mup_rate, "uniform": uniform_rate}
