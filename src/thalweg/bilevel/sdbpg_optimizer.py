"""The perturbed dynamic barrier gradient method for networks: an optimizer of two losses."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from thalweg.bilevel.barrier_descent import storm_weight
from thalweg.bilevel.dual_perturbations import DECAY, LEAST_NORM
from thalweg.bilevel.dynamic_barrier import barrier_multiplier
from thalweg.bilevel.paired_losses import (
    check_replay,
    given_gradients,
    inner_products,
    launches,
    loss_and_gradients,
    refuse_batch_norm,
    squared_distance,
    swapped,
    trainable,
)
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.torch_gradients import count_nonfinite

with requires("bilevel"):
    import torch
    from torch import Tensor

Closure = Callable[..., Any]
Grads = list[Tensor]
# What all groups must agree on: the multiplier is one number.
SHARED = (
    *("alpha", "delta", "delta_power", "p", "variant", "rho", "beta", "lam_max", "split"),
    *("eps_g", "first", "seed"),
)


class SDBPGStats(NamedTuple):
    """What a step of `SDBPG` tells.

    Parameters
    ----------
    loss_upper, loss_lower : Tensor or None
        The losses of the batches, detached; None where gradients were given.
    lam : float
        λ.
    delta : float
        δ.
    norm_g : float
        ‖ĝ‖; where its square is below δ, the step is in the region that the perturbation is for.
    """

    loss_upper: Tensor | None
    loss_lower: Tensor | None
    lam: float
    delta: float
    norm_g: float


class SDBPG(torch.optim.Optimizer):
    r"""Descend a loss f while a barrier keeps another loss g falling to stationarity.

    .. math:: \lambda = \rho + \frac{[\alpha \|\hat g\|^{2+p}
              - \langle \hat f + \rho \hat g, \hat g \rangle]_+}{\|\hat g\|^2 + \delta},
              \qquad \theta \leftarrow \theta - \eta (\hat f + \lambda \hat g')

    The multiplier λ is one number for all parameters. The perturbation δ bounds it where ∇g
    vanishes. See `sdbpg` for the mathematics.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have an ``lr`` of its own.
    lr : float or 0-dimensional Tensor ≥ 0
        η.
    alpha : float > 0, default 1
        α, how fast g has to fall.
    delta : float > 0 or "auto", default 1e-3
        δ, in units of ‖∇g‖². "auto" is max(α eps_g^(3+p)/‖m‖, σ²), with running means m of f̂ and
        σ² of the variance of ĝ.
    delta_power : float ≥ 0, default 0
        δ_k = δ(k + 1)^(-delta_power).
    p : float ≥ 0, default 0
        Exponent of the barrier α‖∇g‖²⁺ᵖ.
    variant : {"plain", "pr", "vr-pr"}
        SDBPG; PR-SDBPG, on f + ρg; VR-PR-SDBPG, which also reduces the variance, by STORM.
    rho : float ≥ 0, default 0
        ρ; must be 0 with "plain" and above 0 otherwise.
    beta : float > 0, optional
        STORM's weights, a_k = min(1, βη_k²) with the lr of the first group; default
        (k + 1)^(-2/3).
    lam_max : float > 0, optional
        An upper bound of λ.
    split : bool, default True
        Call ``closure_lower`` twice, for λ and for the step, on independent batches. Not in
        "vr-pr", whose estimates depend on the path in any case.
    eps_g : float > 0, default 1e-2
        ε_g of ``delta="auto"``.
    first : int ≥ 1, default 1
        Batches whose mean starts STORM's estimates.
    seed : int ≥ 0, default 0
        The source of the seeds that closures get in "vr-pr".

    Attributes
    ----------
    n_skipped : int
        Steps skipped because a gradient was not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and for complex parameters.

    Warns
    -----
    UserWarning
        If ``split`` is False, which biases λĝ.

    Notes
    -----
    *Closures* return a loss, without a call of ``backward``. Those of "vr-pr" take a seed, with
    which they must draw the same batch, and the same dropout, each time: they are called at two
    points. Batch normalization must be in eval mode there.

    *Cost.* Three backward passes with ``split``, else two; four in "vr-pr" (six with "auto"), with
    three buffers of the size of the parameters; "auto" keeps one more. Beside them, two passes over
    gradients for inner products and two over parameters, and one wait for the device, which also
    tells whether all is finite. Gradients do not go through ``.grad``: neither the hooks of
    `DistributedDataParallel` nor gradient clipping see them. With those, pass
    ``step(grads=(gf, gg))``. The number of steps stands in the first param group.

    *Ours.* See `sdbpg`; and the first "auto" takes the variance of its own step.

    References
    ----------
    "Stochastic dynamic barrier perturbed gradient", NeurIPS 2026.

    Examples
    --------
    Among the fits of one equation in two unknowns, the one nearest to (3, 0):

    >>> import torch
    >>> from thalweg.bilevel import SDBPG
    >>> x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    >>> target = torch.tensor([3.0, 0.0], dtype=torch.float64)
    >>> optimizer = SDBPG([x], lr=0.05, variant="pr", rho=10.0)
    >>> for _ in range(500):
    ...     stats = optimizer.step(
    ...         lambda: (x - target).square().sum() / 2, lambda: (x.sum() - 1).square() / 2
    ...     )
    >>> [round(entry, 2) for entry in x.tolist()]
    [2.03, -0.97]
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        alpha: float = 1.0,
        delta: float | Literal["auto"] = 1e-3,
        delta_power: float = 0.0,
        p: float = 0.0,
        variant: Literal["plain", "pr", "vr-pr"] = "plain",
        rho: float = 0.0,
        beta: float | None = None,
        lam_max: float | None = None,
        split: bool = True,
        eps_g: float = 1e-2,
        first: int = 1,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": check_number("alpha", alpha, above=0),
            "delta": _check_delta(delta, delta_power),
            "delta_power": check_number("delta_power", delta_power, at_least=0),
            "p": check_number("p", p, at_least=0),
            "variant": check_choice("variant", variant, ("plain", "pr", "vr-pr")),
            "rho": _check_rho(rho, variant),
            "beta": beta if beta is None else check_number("beta", beta, above=0),
            "lam_max": lam_max if lam_max is None else check_number("lam_max", lam_max, above=0),
            "split": check_choice("split", split, (True, False)),
            "eps_g": check_number("eps_g", eps_g, above=0),
            "first": check_integer("first", first, at_least=1),
            "seed": check_integer("seed", seed, at_least=0),
            "k": 0,
            "variance": 0.0,
        }
        if not split and variant != "vr-pr":
            warnings.warn(
                "split=False takes the multiplier and the step from the same batch: their product "
                "is biased",
                stacklevel=2,
            )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have an ``lr`` of its own."""
        for name in SHARED:
            if name in param_group and param_group[name] != self.defaults[name]:
                raise ValueError(
                    f"{name} must be the same in all groups, {self.defaults[name]!r}, got "
                    f"{param_group[name]!r}: there is one multiplier"
                )
        _check_lr({**self.defaults, **param_group}["lr"])
        super().add_param_group(param_group)
        if any(p.is_complex() for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise TypeError("params must be real, got a complex parameter")

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure_upper: Closure | None = None,
        closure_lower: Closure | None = None,
        *,
        grads: Sequence[Sequence[Tensor]] | None = None,
    ) -> SDBPGStats:
        """Make one step.

        Parameters
        ----------
        closure_upper, closure_lower : callable
            Return f and g on batches of their own, new ones at each call; of "vr-pr", on the batch
            that belongs to the seed they are given.
        grads : tuple of sequences of Tensor, optional
            Instead of closures, ``(gf, gg)`` or ``(gf, gg, gg_step)``: for each trainable parameter
            the gradients of f and g, and that of g for the step, from another batch. Not in
            "vr-pr".

        Returns
        -------
        SDBPGStats

        Raises
        ------
        TypeError, ValueError
            For closures or gradients that are not as described.
        NonFiniteGradientError
            After ten steps in a row whose gradients were not finite. Single ones are skipped and
            counted.
        """
        params = trainable(self.param_groups)
        if grads is not None:
            if closure_upper is not None or closure_lower is not None:
                raise ValueError("grads must be None where closures are given")
            return self._move(params, *self._given(params, grads), losses=(None, None))
        upper, lower = _check_closures(closure_upper, closure_lower)
        if self.param_groups[0]["variant"] == "vr-pr":
            return self._step_with_storm(params, upper, lower)
        shared = self.param_groups[0]
        loss_f, f = loss_and_gradients(self, "closure_upper", upper, params)
        loss_g, g = loss_and_gradients(self, "closure_lower", lower, params)
        g_step = g
        if shared["split"] or shared["delta"] == "auto":
            g_step = loss_and_gradients(self, "closure_lower", lower, params)[1]
        variance = _variance(g, g_step, shared)
        if not shared["split"] and g_step is not g:
            g = g_step = _mean(g, g_step)
        return self._move(params, f, g, g_step, variance, losses=(loss_f, loss_g))

    def _given(
        self, params: list[Tensor], grads: Sequence[Sequence[Tensor]]
    ) -> tuple[Grads, Grads, Grads, float]:
        shared = self.param_groups[0]
        if shared["variant"] == "vr-pr":
            raise ValueError("grads must be None for variant='vr-pr', which needs closures")
        if len(grads) not in (2, 3):
            raise ValueError(f"grads must be (gf, gg) or (gf, gg, gg_step), got {len(grads)} parts")
        if shared["delta"] == "auto" and len(grads) == 2:
            raise ValueError("grads must be (gf, gg, gg_step) for delta='auto'")
        f, g, *rest = (given_gradients(self, "grads", part, params) for part in grads)
        g_step = rest[0] if rest else g
        return f, g, g_step, _variance(g, g_step, shared)

    def _step_with_storm(self, params: list[Tensor], upper: Closure, lower: Closure) -> SDBPGStats:
        """Make a step of VR-PR-SDBPG."""
        shared = self.param_groups[0]
        names = ["upper", "lower"] + (["lower_half"] if shared["delta"] == "auto" else [])
        losses, estimates = [], {}
        for i, name in enumerate(names):
            closure = upper if name == "upper" else lower
            loss, estimates[name] = self._storm(params, name, closure, i)
            losses.append(loss)
        f, g, half = estimates["upper"], estimates["lower"], estimates.get("lower_half")
        variance = 0.0 if half is None else squared_distance(g, half) / 4
        used = g if half is None else _mean(g, half)
        skipped = self.n_skipped
        before = [p.clone() for p in params]
        stats = self._move(params, f, used, used, variance, losses=(losses[0], losses[1]))
        if self.n_skipped > skipped:
            return stats
        for i, p in enumerate(params):
            self.state[p]["previous"] = before[i]
            for name in names:
                self.state[p][name] = estimates[name][i]
        return stats

    def _storm(
        self, params: list[Tensor], name: str, closure: Closure, stream: int
    ) -> tuple[Tensor, Grads]:
        """Return the loss and m_k = ∇(x_k) + (1 - a_k)(m_{k-1} - ∇(x_{k-1})), of one batch."""
        shared = self.param_groups[0]
        k, public = shared["k"], f"closure_{'upper' if name == 'upper' else 'lower'}"
        seed = _seed(shared["seed"], k, stream, 0)
        loss, now = loss_and_gradients(self, public, closure, params, seed)
        if any(name not in self.state[p] for p in params):
            check_replay(public, closure, loss, seed)
            for repeat in range(1, shared["first"]):
                seed = _seed(shared["seed"], k, stream, repeat)
                more = loss_and_gradients(self, public, closure, params, seed)[1]
                torch._foreach_lerp_(now, more, 1 / (repeat + 1))
            return loss, now
        weight = storm_weight(k, shared["beta"], float(shared["lr"]))
        with swapped(params, [self.state[p]["previous"] for p in params]), refuse_batch_norm():
            before = loss_and_gradients(self, public, closure, params, seed)[1]
        estimate = torch._foreach_sub([self.state[p][name] for p in params], before)
        torch._foreach_mul_(estimate, 1 - weight)
        torch._foreach_add_(estimate, now)
        return loss, list(estimate)

    def _move(
        self,
        params: list[Tensor],
        f: Grads,
        g: Grads,
        g_step: Grads,
        variance: float,
        *,
        losses: tuple[Tensor | None, Tensor | None],
    ) -> SDBPGStats:
        """Step along -(f + λg'), if everything is finite."""
        shared = self.param_groups[0]
        pairs = [(f, g), (g, g)] if g_step is g else [(f, g), (g, g), (g_step, g_step)]
        fg, gg, *rest = inner_products(*pairs)
        finite = math.isfinite(fg) and math.isfinite(gg) and all(map(math.isfinite, rest))
        if not count_nonfinite(self, finite=finite):
            return SDBPGStats(*losses, math.nan, math.nan, math.nan)
        delta = self._delta(params, f, variance)
        lam = barrier_multiplier(
            fg, gg, alpha=shared["alpha"], delta=delta, p=shared["p"], rho=shared["rho"]
        )
        lam = lam if shared["lam_max"] is None else min(lam, shared["lam_max"])
        self._descend(f, g_step, lam)
        shared["k"] += 1
        return SDBPGStats(*losses, lam, delta, math.sqrt(gg))

    def _descend(self, f: Grads, g_step: Grads, lam: float) -> None:
        start = 0
        for group in self.param_groups:
            params = trainable([group])
            stop = start + len(params)
            lr = float(group["lr"])
            for moved, along_f, along_g in launches(params, f[start:stop], g_step[start:stop]):
                torch._foreach_add_(moved, along_f, alpha=-lr)
                torch._foreach_add_(moved, along_g, alpha=-lr * lam)
            start = stop

    def _delta(self, params: list[Tensor], f: Grads, variance: float) -> float:
        """Return δ_k, and take in f and the variance of this step."""
        shared = self.param_groups[0]
        k, delta = shared["k"], shared["delta"]
        if delta != "auto":
            return float(delta * (k + 1.0) ** -shared["delta_power"])
        for p, gradient in zip(params, f, strict=True):
            if "mean_upper" not in self.state[p]:
                self.state[p]["mean_upper"] = gradient.clone()
        means = [self.state[p]["mean_upper"] for p in params]
        torch._foreach_lerp_(means, f, 1 - DECAY)
        size = max(math.sqrt(inner_products((means, means))[0]), LEAST_NORM)
        earlier = variance if k == 0 else shared["variance"]
        shared["variance"] = DECAY * earlier + (1 - DECAY) * variance
        target: float = shared["alpha"] * shared["eps_g"] ** (3 + shared["p"])
        return max(target / size, earlier)


def _mean(a: Grads, b: Grads) -> Grads:
    return list(torch._foreach_lerp(a, b, 0.5))


def _variance(g: Grads, g_step: Grads, shared: dict[str, Any]) -> float:
    """Return an estimate of the variance of the gradient in λ, which is the mean without split."""
    if shared["delta"] != "auto":
        return 0.0
    return squared_distance(g, g_step) / (2 if shared["split"] else 4)


def _seed(*entropy: int) -> int:
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _check_closures(upper: Any, lower: Any) -> tuple[Closure, Closure]:
    for name, closure in (("closure_upper", upper), ("closure_lower", lower)):
        if not callable(closure):
            raise TypeError(f"{name} must be a function that returns a loss, got {closure!r}")
    if upper is lower:
        raise ValueError("closure_upper and closure_lower must be two functions, got one for both")
    return upper, lower


def _check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr must hold one number, got a tensor of shape {tuple(lr.shape)}")
        lr = float(lr)
    check_number("lr", lr, at_least=0)


def _check_delta(delta: Any, power: Any) -> Any:
    if delta != "auto":
        return check_number("delta", delta, above=0)
    if power != 0:
        raise ValueError("delta_power must be 0 for delta='auto', which sets every step's")
    return delta


def _check_rho(rho: Any, variant: str) -> float:
    if variant == "plain":
        if rho != 0:
            raise ValueError("rho must be 0 for variant='plain'; 'pr' has a penalty")
        return 0.0
    return check_number("rho", rho, above=0)
