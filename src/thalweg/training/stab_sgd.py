"""Stab-SGD: SGD whose step is multiplied by the stability ratio of its gradient estimate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
    from torch import distributed as dist

from thalweg.common.torch_gradients import check_dense, refuse_a_long_series, value_of
from thalweg.training.gradients import check_real, magnitude, with_gradients
from thalweg.training.stability import (
    StabEstimate,
    average,
    average_over_replicas,
    estimate_ratio,
    kurtosis,
    ratio_of_average,
)
from thalweg.training.state_dtypes import restore_dtypes
from thalweg.training.tensor_lists import (
    by_device_and_dtype,
    lerp,
    move,
    shrink,
    squared_norm,
    wide_dtype,
)

SPLIT_CALLS_WITHOUT_STEP = 5
# Settings that steer the one clock of the optimizer; a param group cannot have its own.
SHARED = (
    "estimator",
    "zeta",
    "zeta_start",
    "kappa",
    "gamma",
    "max_overhead",
    "stab_min",
    "scope",
    "check_finite",
    "pool_replicas",
)


class StabRecord(NamedTuple):
    """One measurement of the stability ratio.

    Attributes
    ----------
    query : int
        The number of gradients seen when it ended.
    stab : float
        The ratio in use from then on.
    kurtosis : float
        As in `StabEstimate`.
    truncated : bool
        Whether ``max_overhead`` cut it short.
    """

    query: int
    stab: float
    kurtosis: float
    truncated: bool


class StabSGD(torch.optim.Optimizer):
    r"""SGD without a schedule: every step is multiplied by the gradient's stability ratio.

    .. math:: \theta_{t+1} = \theta_t - \mathrm{lr} \cdot \mathrm{Stab}_t \, G_{t+1}, \qquad
              \mathrm{Stab}(G) = \|\mathbb E G\|^2 / \mathbb E \|G\|^2 \in [0, 1]

    For a β-smooth loss and ``lr = 1/β`` this minimizes the bound on the expected loss after one
    step, whatever the noise: the same ``lr`` serves every noise level and every horizon. Use it
    when those are unknown or change; a schedule tuned for exactly the right horizon is faster,
    and so is a constant step near interpolation, where the noise fades with the gradient.

    ``estimator="inline"`` replaces SGD in a loop of minibatches without other changes. It
    alternates two phases, and t counts the gradients seen (*queries*):

    1. *measure*: the parameters rest while n gradients go into the ratio (see `stability_ratio`);
       n is ``zeta_start`` at first and ⌈zeta / stab⌉ later;
    2. *descend*: ⌈kappa · t^gamma⌉ steps of size lr · stab.

    ``estimator="split"`` is for gradient accumulation and data-parallel replicas. `step_split`
    takes the k ≥ 2 micro-batch gradients of a step, estimates the two moments from them, smooths
    both, and steps with their mean, whose ratio is J / (J + (Z - J)/k). Every query descends.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have its own ``lr``, ``weight_decay``, ``maximize``.
    lr : float
        1/β, or smaller. A larger value is not rescued by the ratio when there is little noise.
        The paper uses 10 for deep networks, with kappa=0.1 and zeta=100.
    estimator : {"inline", "split"}, default "inline"
    weight_decay : float, default 0
        λ of the penalty λ‖θ‖²/2. Its gradient enters the steps, scaled by lr · stab like the rest,
        and not the measurements, where it would pass for signal.
    zeta : float, default 50
        Precision of a measurement: the number of gradients times the ratio. For "split" the
        shortest window (in calls) over which moments are smoothed.
    zeta_start : float, optional
        Number of gradients of the first measurement, by default ``zeta``.
    kappa, gamma : float, default 1
        A descend phase takes ⌈kappa · t^gamma⌉ queries. gamma=1 measures logarithmically often.
    max_overhead : float in (0, 1], default 0.5
        A measurement takes at most max_overhead / (1 - max_overhead) times the steps taken so far,
        plus ``zeta``, gradients. 1 lifts the limit.
    stab_min : float in (0, 1], default 1e-8
        Lower bound of a measured ratio.
    scope : {"global", "group"}, default "global"
        One ratio for all parameters (the theory), or one per param group.
    maximize : bool, default False
        Ascend instead.
    check_finite : bool, default True
        Skip descend steps whose gradient is not finite. This reads the gradient once more (a
        third of the memory traffic of SGD) and waits for the device; False makes the descend
        phase exactly SGD's. Measurements are always checked.
    pool_replicas : bool, default True
        Share measurements between all processes of `torch.distributed`, if it is initialized;
        False if they train different models.

    Attributes
    ----------
    stab : float
        The ratio in use; 0 before the first is known, the smallest one with scope="group".
    phase : {"measure", "descend"}
    n_queries, n_updates, n_skipped : int
        Gradients seen, steps taken, and gradients skipped because they were not finite.
    stab_history : list of StabRecord
        One (query, stab, kurtosis, truncated) per measurement (and param group, with
        scope="group"); for "split", at every call whose number is a power of two.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    RuntimeError
        From `step`: for sparse gradients, after 10 gradients in a row that were not finite, and
        with estimator="split".

    Warns
    -----
    UserWarning
        Once, when a learning-rate scheduler is attached, which defeats the purpose; and once,
        when the set of parameters that have gradients changes during a measurement (a missing
        gradient then counts as zero).

    Notes
    -----
    *Cost.* Measuring: one pass over gradient and mean and one over the gradient, and one buffer
    of the size of the parameters (float32 for half-precision ones) that exists only then.
    Descending: SGD, plus one pass over the gradient for ``check_finite``. "split": for each of k
    micro-batches one pass over the mean and two over its gradient, and one buffer of that size.

    *Networks.* Batch norm's running statistics still move during a measurement. Draw minibatches
    with replacement (`torch.utils.data.RandomSampler`) when the loss comes near interpolation;
    within an epoch without replacement gradients are negatively correlated.

    *Replicas.* At the end of a measurement the mean gradient and the moments are all-reduced.
    Replicas with identical gradients (`DistributedDataParallel`) thereby agree to the last bit.
    Replicas with gradients of their own (``no_sync``) pool them: W replicas have n·W samples, and
    the ratio in use is that of the average gradient of W replicas, with which they then descend.
    `step_split` averages the gradients of all replicas.

    *Resumption.* All progress stands in the param groups and the state: ``state_dict`` resumes
    bit for bit, also inside a measurement. Adding a param group starts a new measurement.

    *Ours.* The update, the estimator of the ratio and the two phases are the paper's. Ours are
    ``max_overhead`` (at a ratio of 1e-4 the paper's rule asks for 5·10⁵ gradients; a measurement
    that was cut short is bounded below by 1/(2n)), "split", the treatment of replicas, and that
    a gradient that is zero in all entries makes no step (unless unchecked) but counts in a
    measurement. The window of "split" cannot tell ratios below about (0.1 t)^-½ from 0. With
    scope="group" the phases are common, for all parameters must rest, and the smallest ratio
    sets the length.

    References
    ----------
    "Stab-SGD: Noise-adaptivity in smooth optimization with stability ratios", NeurIPS 2025.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import StabSGD
    >>> x = torch.nn.Parameter(torch.full((4,), 3.0))
    >>> generator = torch.Generator().manual_seed(0)
    >>> optimizer = StabSGD([x], lr=1.0)
    >>> for _ in range(3000):
    ...     noise = torch.randn(4, generator=generator)
    ...     optimizer.zero_grad()
    ...     loss = x.square().sum() / 2 + noise @ x
    ...     loss.backward()
    ...     _ = optimizer.step()
    >>> bool(x.norm() < 0.5), optimizer.phase, optimizer.n_queries
    (True, 'descend', 3000)

    With gradient accumulation:

    >>> optimizer = StabSGD([x], lr=1.0, estimator="split")
    >>> for _ in range(100):
    ...     noises = torch.randn(2, 4, generator=generator)
    ...     optimizer.step_split([[x.detach() + noise] for noise in noises])
    >>> optimizer.n_queries, optimizer.n_updates
    (200, 95)
    """

    _warned_of_scheduler = False
    _warned_of_change = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        *,
        estimator: Literal["inline", "split"] = "inline",
        weight_decay: float = 0.0,
        zeta: float = 50,
        zeta_start: float | None = None,
        kappa: float = 1.0,
        gamma: float = 1.0,
        max_overhead: float = 0.5,
        stab_min: float = 1e-8,
        scope: Literal["global", "group"] = "global",
        maximize: bool = False,
        check_finite: bool = True,
        pool_replicas: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": check_number("lr", lr, above=0),
            "weight_decay": check_number("weight_decay", weight_decay, at_least=0),
            "maximize": check_choice("maximize", maximize, (False, True)),
            "stab": 0.0,
            "estimator": check_choice("estimator", estimator, ("inline", "split")),
            "zeta": check_number("zeta", zeta, at_least=2),
            "zeta_start": check_number(
                "zeta_start", zeta if zeta_start is None else zeta_start, at_least=2
            ),
            "kappa": check_number("kappa", kappa, above=0),
            "gamma": check_number("gamma", gamma, at_least=0, at_most=1),
            "max_overhead": check_number("max_overhead", max_overhead, above=0, at_most=1),
            "stab_min": check_number("stab_min", stab_min, above=0, at_most=1),
            "scope": check_choice("scope", scope, ("global", "group")),
            "check_finite": check_choice("check_finite", check_finite, (False, True)),
            "pool_replicas": check_choice("pool_replicas", pool_replicas, (False, True)),
        }
        super().__init__(params, defaults)
        # Param groups are what torch carries through state_dict, deepcopy, pickle and sharded
        # checkpoints; what belongs to no single group therefore stands in the first one.
        self.param_groups[0]["clock"] = {
            "n_queries": 0,
            "n_updates": 0,
            "n_skipped": 0,
            "nonfinite_in_a_row": 0,
            "history": [],
        }
        self._begin_measurement()

    @property
    def stab(self) -> float:
        """The ratio in use."""
        return min(float(group["stab"]) for group in self.param_groups)

    @property
    def phase(self) -> Literal["measure", "descend"]:
        """Whether the parameters rest or move."""
        return cast(Literal["measure", "descend"], self._clock["phase"])

    @property
    def n_queries(self) -> int:
        """Gradients seen."""
        return int(self._clock["n_queries"])

    @property
    def n_updates(self) -> int:
        """Steps taken."""
        return int(self._clock["n_updates"])

    @property
    def n_skipped(self) -> int:
        """Gradients skipped because they were not finite."""
        return int(self._clock["n_skipped"])

    @property
    def stab_history(self) -> list[StabRecord]:
        """The measurements so far."""
        return [StabRecord(*record) for record in self._clock["history"]]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Use the gradients in ``.grad``, one query, to measure or to descend.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss; called once, with gradients enabled.

        Returns
        -------
        The closure's value, or None.
        """
        if self._shared["estimator"] == "split":
            raise RuntimeError('StabSGD(estimator="split") must be stepped by step_split, not step')
        loss = value_of(closure)
        self._warn_of_scheduler()
        groups = [self._with_gradients(group) for group in self.param_groups]
        if any(params for _, params, _ in groups):
            clock = self._clock
            clock["n_queries"] += 1
            clock["remaining"] -= 1
            if clock["phase"] == "measure":
                self._measure()
            else:
                self._descend(groups)
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step_split(self, grads: Sequence[Sequence[Tensor | None]]) -> None:
        """Descend along the mean of k ≥ 2 micro-batch gradients, k queries.

        The first five calls only measure.

        Parameters
        ----------
        grads : sequence of k sequences of Tensor or None
            ``grads[j][i]`` is the gradient of micro-batch j for the i-th parameter that requires
            a gradient, in the order of the param groups, as `torch.autograd.grad` returns them;
            None stands for zero. With several replicas each gives its own k ≥ 1.

        Raises
        ------
        RuntimeError
            With estimator="inline", with fewer than two gradients, for sparse gradients, and
            after 10 calls in a row with gradients that were not finite.
        ValueError
            If a gradient does not fit its parameter.
        """
        if self._shared["estimator"] != "split":
            raise RuntimeError(
                'step_split needs StabSGD(estimator="split"); estimator="inline" uses step'
            )
        replicas = self._replicas()
        if len(grads) * replicas < 2:
            raise RuntimeError(
                f"step_split needs at least 2 micro-batch gradients, got {len(grads)}"
            )
        self._warn_of_scheduler()
        micro_batches = self._micro_batches(grads)
        clock = self._clock
        clock["n_queries"] += len(grads) * replicas
        estimates: list[StabEstimate] = []
        directions: dict[Tensor, Tensor] = {}
        for _, params in self._units():
            held = [p for p in params if p in micro_batches[0]]
            means = [self._buffer(p) for p in held]
            n, second, fourth = average(
                [[batch[p] for p in held] for batch in micro_batches], means
            )
            if replicas > 1:
                n, second, fourth, _ = average_over_replicas(means, n, second, fourth)
            estimates.append(estimate_ratio(n, squared_norm(means), second, fourth))
            directions.update(zip(held, means, strict=True))
        if not self._accept(estimate.second_moment for estimate in estimates):
            return
        for (lead, _), estimate in zip(self._units(), estimates, strict=True):
            self._smooth(lead, estimate)
        clock["n_calls"] += 1
        if clock["n_calls"] <= SPLIT_CALLS_WITHOUT_STEP:
            return
        clock["phase"] = "descend"
        if all(estimate.second_moment == 0 for estimate in estimates):
            return
        for group in self.param_groups:
            held = [p for p in group["params"] if p in directions]
            _update(group, held, [directions[p].to(p.dtype) for p in held])
        clock["n_updates"] += 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, and start a new measurement, now with its parameters.

        Raises
        ------
        TypeError, ValueError
            If a parameter is complex, or the group has a value of its own for a setting that
            steers the common clock.
        """
        for name in SHARED:
            if param_group.get(name, self.defaults[name]) != self.defaults[name]:
                raise ValueError(
                    f"{name} must be the same for all param groups, {self.defaults[name]!r}, "
                    f"got {param_group[name]!r}"
                )
        check_number("lr", param_group.get("lr", self.defaults["lr"]), above=0)
        check_number("weight_decay", param_group.get("weight_decay", 0.0), at_least=0)
        check_choice("maximize", param_group.get("maximize", False), (False, True))
        stab = self.stab if self.param_groups else 0.0
        super().add_param_group(param_group)
        check_real(self)
        self.param_groups[-1]["stab"] = stab
        if "clock" in self._shared:
            self._begin_measurement()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned.

        Raises
        ------
        ValueError
            If the state comes from another optimizer or from other param groups.
        """
        groups = state_dict["param_groups"]
        if not groups or "clock" not in groups[0]:
            raise ValueError("state_dict must come from StabSGD, got one without its clock")
        super().load_state_dict(state_dict)
        self._clock.setdefault("history", [])  # sharded checkpoints leave out empty lists
        # The mean of half-precision gradients is float32.
        restore_dtypes(self, state_dict)

    @property
    def _shared(self) -> dict[str, Any]:
        return self.param_groups[0]

    @property
    def _clock(self) -> dict[str, Any]:
        return cast(dict[str, Any], self._shared["clock"])

    def _units(self) -> list[tuple[dict[str, Any], list[Tensor]]]:
        """Return, for every ratio, the param group that holds its moments, and its parameters."""
        groups = self.param_groups
        if self._shared["scope"] == "group":
            return [(group, group["params"]) for group in groups]
        return [(groups[0], [p for group in groups for p in group["params"]])]

    def _begin_measurement(self) -> None:
        clock, shared = self._clock, self._shared
        stab = self.stab
        wanted = math.ceil(shared["zeta"] / stab if stab > 0 else shared["zeta_start"])
        allowed = wanted
        if stab > 0 and shared["max_overhead"] < 1:
            overhead = shared["max_overhead"] / (1 - shared["max_overhead"])
            allowed = min(wanted, math.floor(overhead * clock["n_updates"] + shared["zeta"]))
        clock.update(phase="measure", remaining=allowed, truncated=allowed < wanted, n_calls=0)
        self.state.clear()
        for lead, _ in self._units():
            lead["moments"] = {"count": 0, "numerator": 0.0, "second": 0.0, "fourth": 0.0}

    def _with_gradients(
        self, group: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Tensor], list[Tensor]]:
        params: list[Tensor] = []
        grads: list[Tensor] = []
        with_gradients(self, group, params, grads)
        return group, params, grads

    def _measure(self) -> None:
        units = self._units()
        samples = [
            [p.grad.to(wide_dtype(p)) for p in params if p.grad is not None] for _, params in units
        ]
        squares = [squared_norm(grads) for grads in samples]
        if self._accept(squares):
            for (lead, params), grads, square in zip(units, samples, squares, strict=True):
                self._add_sample(lead["moments"], params, grads, square)
        # The clock counts skipped queries too, so that replicas stay in step.
        if self._clock["remaining"] <= 0 and self._shared["moments"]["count"] >= 2:
            self._end_measurement()

    def _add_sample(
        self, moments: dict[str, Any], params: list[Tensor], grads: list[Tensor], square: float
    ) -> None:
        moments["count"] += 1
        weight = 1 / moments["count"]
        moments["second"] += weight * (square - moments["second"])
        moments["fourth"] += weight * (square * square - moments["fourth"])
        if moments["count"] > 1 and any((p in self.state) != (p.grad is not None) for p in params):
            self._warn_of_change()
        means = []
        for p in params:
            if p.grad is not None:
                if p not in self.state:
                    self.state[p]["mean"] = torch.zeros_like(p, dtype=wide_dtype(p))
                means.append(self.state[p]["mean"])
            elif p in self.state:
                self.state[p]["mean"].mul_(1 - weight)
        lerp(means, grads, weight)

    def _end_measurement(self) -> None:
        clock, shared = self._clock, self._shared
        for lead, params in self._units():
            estimate, averaged = self._pooled_estimate(lead["moments"], params)
            ratio = ratio_of_average(estimate.numerator, estimate.second_moment, averaged)
            floor = 0.5 / estimate.n if clock["truncated"] else 0.0
            self._set_ratio(lead, max(ratio, floor, shared["stab_min"]), estimate.kurtosis)
        self.state.clear()
        steps = math.ceil(shared["kappa"] * clock["n_queries"] ** shared["gamma"])
        clock.update(phase="descend", remaining=steps)

    def _pooled_estimate(
        self, moments: dict[str, Any], params: list[Tensor]
    ) -> tuple[StabEstimate, int]:
        """Return the estimate, and the number of samples whose average descends."""
        n, second, fourth = moments["count"], moments["second"], moments["fourth"]
        replicas = self._replicas()
        if replicas == 1:
            means = [self.state[p]["mean"] for p in params if p in self.state]
            return estimate_ratio(n, squared_norm(means), second, fourth), 1
        # Every process must offer the same tensors.
        means = [
            self.state[p]["mean"] if p in self.state else torch.zeros_like(p, dtype=wide_dtype(p))
            for p in params
            if p.requires_grad
        ]
        total, second, fourth, spread = average_over_replicas(means, n, second, fourth)
        square = squared_norm(means)
        # Equal means come from gradients that were averaged before: n samples, not n times W.
        # Where rounding hides which it is, both estimates are the same.
        if spread <= 1e-6 * square:
            return estimate_ratio(total // replicas, square, second, fourth), 1
        return estimate_ratio(total, square, second, fourth), replicas

    def _descend(self, groups: list[tuple[dict[str, Any], list[Tensor], list[Tensor]]]) -> None:
        clock = self._clock
        size = 1.0
        if self._shared["check_finite"]:
            size = magnitude([grad for _, _, grads in groups for grad in grads])
        if self._accept([size]) and size != 0:
            for group, params, grads in groups:
                _update(group, params, grads)
            clock["n_updates"] += 1
        if clock["remaining"] <= 0:
            self._begin_measurement()

    def _micro_batches(
        self, grads: Sequence[Sequence[Tensor | None]]
    ) -> list[dict[Tensor, Tensor]]:
        """Return, for every micro-batch, the gradient of each parameter that has one in any."""
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for j, batch in enumerate(grads):
            if len(batch) != len(params):
                raise ValueError(
                    f"grads[{j}] must hold one gradient for each of the {len(params)} parameters "
                    f"that require one, got {len(batch)}"
                )
        columns = {
            p: [self._check_fits(f"grads[{j}][{i}]", batch[i], p) for j, batch in enumerate(grads)]
            for i, p in enumerate(params)
            if any(batch[i] is not None for batch in grads)
        }
        return [{p: column[j] for p, column in columns.items()} for j in range(len(grads))]

    def _check_fits(self, name: str, grad: Tensor | None, p: Tensor) -> Tensor:
        if grad is None:
            return torch.zeros_like(p, dtype=wide_dtype(p))
        if grad.shape != p.shape:
            raise ValueError(f"{name} must have shape {tuple(p.shape)}, got {tuple(grad.shape)}")
        return check_dense(self, grad.detach()).to(p.device, wide_dtype(p))

    def _buffer(self, p: Tensor) -> Tensor:
        """Return memory for the mean gradient of ``p``; to allocate it anew would cost a step."""
        # Not in the state, which is saved, nor in a field that copies would share.
        buffers: dict[Tensor, Tensor] = self.__dict__.setdefault("_buffers", {})
        if p not in buffers or buffers[p].device != p.device:
            buffers[p] = torch.empty_like(p, dtype=wide_dtype(p))
        return buffers[p]

    def _smooth(self, lead: dict[str, Any], estimate: StabEstimate) -> None:
        t, moments = self._clock["n_calls"], lead["moments"]
        weight = max(1 / (t + 1), 1 / max(self._shared["zeta"], 0.1 * t))
        fourth = estimate.kurtosis * estimate.second_moment**2
        moments["numerator"] += weight * (estimate.numerator - moments["numerator"])
        moments["second"] += weight * (estimate.second_moment - moments["second"])
        moments["fourth"] += weight * (fourth - moments["fourth"])
        # The ratio of smoothed moments is consistent; a smoothed ratio is not.
        ratio = ratio_of_average(moments["numerator"], moments["second"], estimate.n)
        due = (t + 1) & t == 0
        self._set_ratio(
            lead, ratio, kurtosis(moments["second"], moments["fourth"]) if due else None
        )

    def _set_ratio(self, lead: dict[str, Any], ratio: float, tail: float | None) -> None:
        for group in [lead] if self._shared["scope"] == "group" else self.param_groups:
            group["stab"] = ratio
        if tail is not None:
            # A plain tuple, which torch.load(weights_only=True) accepts.
            self._clock["history"].append((self.n_queries, ratio, tail, self._clock["truncated"]))

    def _accept(self, sizes: Iterable[float]) -> bool:
        """Return whether all sizes are finite; count what is skipped, and end a long series."""
        clock = self._clock
        if all(math.isfinite(size) for size in sizes):
            clock["nonfinite_in_a_row"] = 0
            return True
        clock["n_skipped"] += 1
        clock["nonfinite_in_a_row"] += 1
        refuse_a_long_series(clock["nonfinite_in_a_row"])
        return False

    def _replicas(self) -> int:
        pooled = self._shared["pool_replicas"] and dist.is_available() and dist.is_initialized()
        return dist.get_world_size() if pooled else 1

    def _warn_of_scheduler(self) -> None:
        if self._warned_of_scheduler or not any("initial_lr" in g for g in self.param_groups):
            return
        self._warned_of_scheduler = True
        warnings.warn(
            "a learning-rate scheduler is attached to StabSGD, whose stability ratio already does "
            "what a schedule is for: the two multiply",
            UserWarning,
            stacklevel=2,
        )

    def _warn_of_change(self) -> None:
        if self._warned_of_change:
            return
        self._warned_of_change = True
        warnings.warn(
            "the set of parameters that have gradients changed during a measurement of StabSGD; "
            "a missing gradient counts as zero",
            UserWarning,
            stacklevel=2,
        )


def _update(group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
    """θ ← θ - lr · stab · (G + λθ), with +G to maximize."""
    step_size = group["lr"] * group["stab"]
    for alike, alike_grads in by_device_and_dtype(params, grads):
        shrink(alike, step_size, group["weight_decay"])
        move(alike, alike_grads, step_size if group["maximize"] else -step_size)
