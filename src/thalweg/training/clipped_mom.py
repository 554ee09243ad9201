"""Clipped SGD on median-of-means gradients."""

from __future__ import annotations

import copy
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, cast

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor
    from torch import distributed as dist

from thalweg.common.torch_gradients import check_dense, refuse_a_long_series, value_of
from thalweg.training.gradient_norms import combined_norm, tensor_norms
from thalweg.training.gradients import all_finite, check_lr, check_real
from thalweg.training.robust_means import AGGREGATORS, Aggregator, aggregate, check_block_number
from thalweg.training.state_dtypes import restore_dtypes
from thalweg.training.tensor_blocks import local
from thalweg.training.tensor_lists import launches, move, shrink, wide_dtype

Clip = float | Literal["auto"]

WINDOW = 100
AUTO_FACTOR = 2.0
# One aggregation serves all parameters; a param group cannot have its own.
SHARED = ("k", "clip", "clip_scope", "aggregator", "smooth", "n_micro", "check_finite")


class ClippedMoM(torch.optim.Optimizer):
    r"""SGD along the clipped median of means of micro-batch gradients.

    .. math:: \hat g_t = \mathrm{med}_j \, \bar g_j, \qquad
              \theta \leftarrow (1 - \eta\lambda_w)\theta - \eta \, \hat g_t
              \min(1, \lambda_t / \|\hat g_t\|)

    Each step splits its micro-batch gradients into k blocks, averages within blocks, takes the
    coordinatewise median across them (see `median_of_means`), and clips. It beats clipping alone
    where the noise has no mean to average: then a clipped average carries almost no direction.
    Skewed noise biases medians, which moves the neighborhood where the loss ends; with finite
    variance plain averaging is better.

    It needs several gradients per step::

        for step in range(steps):
            for micro_batch in batches(15):
                optimizer.zero_grad()
                loss(model, micro_batch).backward()
                optimizer.accumulate()
            optimizer.step()

    In a trainer that accumulates gradients by itself, call `capture` once instead. transformers'
    ``Trainer`` then needs ``max_grad_norm=0``, and Lightning an ``optimizer_step`` that calls its
    closure once before ``optimizer.step()``.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have its own ``lr``, ``momentum``,
        ``weight_decay``, ``maximize``.
    lr : float or Tensor
        η.
    k : int, odd, default 5
        Number of blocks; micro-batch i goes to block i mod k. See `choose_blocks`.
    clip : float or "auto", default "auto"
        λ; "auto" is twice the median norm of the last 100 aggregated gradients (the first one is
        not clipped); infinity does not clip.
    clip_scope : {"global", "tensor"}, default "global"
        Norm of all parameters together, or of each tensor.
    aggregator : {"median", "geometric", "medoid", "trimmed", "mean"}, default "median"
        See `median_of_means`.
    momentum : float in [0, 1), default 0
        Of the clipped gradients, as in `torch.optim.SGD`.
    weight_decay : float, default 0
        λ_w, decoupled.
    smooth : float, default 0
        Standard deviation of Gaussian noise added to the block means before the median.
    n_micro : int ≥ k, optional
        How often `step` calls its closure, by default k.
    maximize : bool, default False
    check_finite : bool, default True
        Leave out blocks with gradients that are not finite.
    generator : torch.Generator, optional
        For ``smooth``; its state is not part of ``state_dict``.
    process_group : ProcessGroup, optional
        Each process is one block, and k is their number, which must be odd. Gradients must not
        have been averaged before, so that the model is used without `DistributedDataParallel`.

    Attributes
    ----------
    n_accumulated : int
        Micro-batch gradients since the last step.
    n_skipped : int
        Steps skipped because more than (k - 1)/2 blocks were not finite. A micro-gradient that is
        not finite is left out together with its block.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; from `step`, if fewer than k gradients were
        accumulated.
    RuntimeError
        From `step` without any accumulated gradient; for sparse gradients; at the tenth step in a
        row that had to be skipped (`NonFiniteGradientError`).

    Notes
    -----
    Memory: k sums of the parameters' size (float32 for half-precision ones), and one momentum
    buffer if asked for. `accumulate` costs 3 passes over the gradient and a wait for the check;
    `step` reads the k sums and makes 10 minima or maxima of them for k = 5, in pieces that stay
    in the cache, then clips and updates. The step is not compiled: what it does depends on which
    blocks are finite.

    Estimator, bounds and the clipped methods are the paper's. Ours are "auto", for the theory's
    λ needs unknown constants, and the momentum.

    *Embeddings.* The median of gradients that are zero in most blocks is zero: a row that is hit
    by fewer than half of the blocks does not learn. Give them ``aggregator="trimmed"`` in an
    optimizer of their own, or larger blocks. *Micro-batches* must be drawn alike.

    References
    ----------
    "Clipped optimization with median-of-means gradients", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import ClippedMoM
    >>> x = torch.nn.Parameter(torch.full((4,), 3.0))
    >>> generator = torch.Generator().manual_seed(0)
    >>> optimizer = ClippedMoM([x], lr=0.1, k=15)
    >>> for _ in range(200):
    ...     for _ in range(15):
    ...         noise = torch.empty(4).cauchy_(generator=generator)  # has no mean
    ...         x.grad = x.detach() + noise
    ...         optimizer.accumulate()
    ...     optimizer.step()
    >>> bool(x.norm() < 0.5)
    True
    """

    n_skipped = 0
    nonfinite_in_a_row = 0
    _process_group: Any = None
    _generator: torch.Generator | None = None
    _captures: Capture | None = None
    _norms: list[float]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor,
        *,
        k: int = 5,
        clip: Clip = "auto",
        clip_scope: Literal["global", "tensor"] = "global",
        aggregator: Aggregator = "median",
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        smooth: float = 0.0,
        n_micro: int | None = None,
        maximize: bool = False,
        check_finite: bool = True,
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ) -> None:
        if process_group is not None:
            k = dist.get_world_size(process_group)
        check_block_number(k, k if isinstance(k, int) else 1, "blocks")
        self._process_group = process_group
        self._generator = generator
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "k": k,
            "clip": check_clip(clip),
            "clip_scope": check_choice("clip_scope", clip_scope, ("global", "tensor")),
            "aggregator": check_choice("aggregator", aggregator, AGGREGATORS),
            "smooth": check_number("smooth", smooth, at_least=0),
            "n_micro": check_integer("n_micro", k if n_micro is None else n_micro, at_least=k),
            "check_finite": check_choice("check_finite", check_finite, (False, True)),
        }
        super().__init__(params, defaults)
        # torch carries param groups through state_dict, deepcopy and pickle.
        self.param_groups[0]["clock"] = _new_clock()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have its own lr, momentum, weight_decay and maximize."""
        settings = self.defaults | param_group
        for name in SHARED:
            if settings[name] != self.defaults[name]:
                raise ValueError(
                    f"{name} must be the same for all param groups, {self.defaults[name]!r}, "
                    f"got {settings[name]!r}"
                )
        check_lr(settings["lr"])
        check_number("momentum", settings["momentum"], at_least=0, below=1)
        check_number("weight_decay", settings["weight_decay"], at_least=0)
        check_choice("maximize", settings["maximize"], (False, True))
        super().add_param_group(param_group)
        check_real(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned, also between two micro-batches.

        Raises
        ------
        ValueError
            If the state comes from another optimizer or from other param groups.
        """
        if "clock" not in state_dict["param_groups"][0]:
            raise ValueError(
                f"state_dict must come from {type(self).__name__}, got one without its clock"
            )
        super().load_state_dict(state_dict)
        restore_dtypes(self, state_dict)
        # Sharded checkpoints leave out empty lists.
        clock = _new_clock() | state_dict["param_groups"][0]["clock"]
        self.param_groups[0]["clock"] = copy.deepcopy(clock)

    @property
    def n_accumulated(self) -> int:
        """Micro-batch gradients since the last step."""
        return int(self._clock["n"])

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients in ``.grad`` to their block; call it after each ``backward()``."""
        params = list(self._params())
        grads = {i: check_dense(self, p.grad) for i, p in enumerate(params) if p.grad is not None}
        self._add(params, grads)

    def capture(self) -> Capture:
        """Accumulate at every ``backward()`` by itself, for trainers with gradient accumulation.

        Such trainers divide the loss by the number of micro-batches and let the gradients add up;
        the estimate is therefore multiplied by their number. ``.grad`` stays empty until `step`.

        Returns
        -------
        Capture
            Its ``remove()`` ends it.
        """
        return Capture(self)

    # What the step does depends on which blocks are finite: its clock lives in Python.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Aggregate what was accumulated, clip, and descend.

        Parameters
        ----------
        closure : callable, optional
            Draws a new micro-batch, computes its gradient from zero and returns its loss; called
            ``n_micro`` times, with gradients enabled.

        Returns
        -------
        The closure's last value, or None.
        """
        self._check_ready()
        loss = None
        if closure is not None:
            for _ in range(self.param_groups[0]["n_micro"]):
                loss = value_of(closure)
                self.accumulate()
        clock = self._clock
        if self._captures is not None:
            self._captures.flush()
        if clock["n"] == 0:
            raise RuntimeError(
                f"{type(self).__name__} has no gradients: call accumulate() after each backward"
            )
        if self._process_group is None:
            check_block_number(self.param_groups[0]["k"], clock["n"], "accumulated micro-batches")
        estimates = self._estimates()
        clock.update(n=0, bad=[], seen=[])
        if estimates is not None:
            self._descend(estimates, self._clip_factors(estimates))
        return loss

    def _check_ready(self) -> None:
        """Refuse a step that must not be taken now; any step may."""

    @property
    def _clock(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.param_groups[0]["clock"])

    @property
    def _n_lanes(self) -> int:
        """The number of sums that this process keeps."""
        return 1 if self._process_group is not None else int(self.param_groups[0]["k"])

    def _params(self) -> Iterator[Tensor]:
        return (p for group in self.param_groups for p in group["params"])

    def _lane(self, p: Tensor, j: int) -> Tensor:
        """Return the sum of block j of a parameter; a new one is zero."""
        state = self.state[p]
        if f"block{j}" not in state:
            for i in range(self._n_lanes):
                state[f"block{i}"] = torch.zeros_like(
                    p, dtype=wide_dtype(p), memory_format=torch.preserve_format
                )
        return cast(Tensor, state[f"block{j}"])

    def _add(self, params: list[Tensor], grads: dict[int, Tensor]) -> None:
        """Add gradients, by the number of their parameter, to the block whose turn it is."""
        clock = self._clock
        j, first = clock["n"] % self._n_lanes, clock["n"] < self._n_lanes
        clock["n"] += 1
        clock["seen"] = sorted({*clock["seen"], *grads})
        if self.param_groups[0]["check_finite"] and not all_finite(list(grads.values())):
            clock["bad"] = sorted({*clock["bad"], j})
            return
        lanes = [local(self._lane(params[i], j)) for i in grads]
        for sums, alike in launches(lanes, [local(grad) for grad in grads.values()]):
            # The first gradient of a block replaces what an earlier step left there.
            (torch._foreach_copy_ if first else torch._foreach_add_)(sums, alike)
        if first:
            unseen = [
                p for i, p in enumerate(params) if i not in grads and "block0" in self.state[p]
            ]
            for p in unseen:
                self._lane(p, j).zero_()

    def _estimates(self) -> dict[Tensor, Tensor] | None:
        """Return the aggregate for every parameter that had a gradient, None to skip the step.

        They take the memory of the blocks, which the next gradients overwrite.
        """
        clock, shared = self._clock, self.param_groups[0]
        params = list(self._params())
        seen = [params[i] for i in clock["seen"]]
        good = self._finite_blocks(seen)
        if not self._accept(shared["k"] - len(good) <= (shared["k"] - 1) // 2) or not seen:
            return None
        if self._process_group is not None:
            blocks = self._blocks_of_all(seen, good)
        else:
            counts = [float(len(range(j, clock["n"], shared["k"]))) for j in good]
            blocks = [[local(self._lane(p, j)) for j in good] for p in seen]
            for lanes in blocks:
                torch._foreach_div_(lanes, counts)
        found = aggregate(blocks, shared["aggregator"], shared["smooth"], self._generator)
        if self._captures is not None:
            torch._foreach_mul_(found, float(clock["n"]))
        estimates = {p: like(value, self._lane(p, 0)) for p, value in zip(seen, found, strict=True)}
        return estimates if self._accept_sizes(estimates) else None

    def _finite_blocks(self, seen: list[Tensor]) -> list[int]:
        clock, k = self._clock, int(self.param_groups[0]["k"])
        if self._process_group is None:
            return [j for j in range(k) if j not in clock["bad"]]
        device = seen[0].device if seen else torch.device("cpu")
        flag = torch.tensor([float(not clock["bad"])], device=device)
        flags = [torch.empty_like(flag) for _ in range(k)]
        dist.all_gather(flags, flag, group=self._process_group)
        return [j for j in range(k) if float(flags[j]) > 0]

    def _blocks_of_all(self, seen: list[Tensor], good: list[int]) -> list[list[Tensor]]:
        """Return the means of the processes whose gradients were finite."""
        blocks = []
        for p in seen:
            mean = self._lane(p, 0).div_(self._clock["n"]).contiguous()
            means = [torch.empty_like(mean) for _ in range(self.param_groups[0]["k"])]
            dist.all_gather(means, mean, group=self._process_group)
            blocks.append([means[j] for j in good])
        return blocks

    def _accept(self, fine: bool) -> bool:
        if fine:
            return True
        self.n_skipped += 1
        self.nonfinite_in_a_row += 1
        refuse_a_long_series(self.nonfinite_in_a_row)
        return False

    def _accept_sizes(self, estimates: dict[Tensor, Tensor]) -> bool:
        """Note the norms that clipping needs; sums of finite gradients can still overflow."""
        norms = [norm for p in estimates for norm in tensor_norms([estimates[p]])]
        if self.param_groups[0]["clip_scope"] == "global":
            norms = [combined_norm(norms)]
        self._norms = [float(norm) for norm in norms]
        if not self._accept(all(map(math.isfinite, self._norms))):
            return False
        self.nonfinite_in_a_row = 0
        return True

    def _clip_factors(self, estimates: dict[Tensor, Tensor]) -> list[float]:
        """Return min(1, λ/‖ĝ‖) for every estimate."""
        factors = [
            min(1.0, level / norm) if norm > 0 else 1.0
            for norm, level in zip(self._norms, self._levels(), strict=True)
        ]
        return factors if len(factors) == len(estimates) else factors * len(estimates)

    def _levels(self) -> list[float]:
        """Return the clipping level of each norm."""
        clip = self.param_groups[0]["clip"]
        if clip != "auto":
            return [clip] * len(self._norms)
        history = self._clock["norms"]
        if len(history) != len(self._norms):
            history = [[] for _ in self._norms]
        levels = [
            AUTO_FACTOR * statistics.median(past) if past else norm
            for past, norm in zip(history, self._norms, strict=True)
        ]
        self._clock["norms"] = [
            [*past, norm][-WINDOW:] for past, norm in zip(history, self._norms, strict=True)
        ]
        return levels

    def _descend(self, estimates: dict[Tensor, Tensor], factors: list[float]) -> None:
        """θ ← (1 - ηλ_w)θ - η v, where v is the clipped estimate or its momentum."""
        clipped = dict(zip(estimates, factors, strict=True))
        for group in self.param_groups:
            for p in (p for p in group["params"] if p in estimates):
                direction = estimates[p].mul_(clipped[p])
                if group["momentum"] > 0:
                    direction = self._momentum(p).mul_(group["momentum"]).add_(direction).clone()
                lr = group["lr"]
                shrink([p], lr, group["weight_decay"])
                move([p], [direction.to(p.dtype)], lr if group["maximize"] else -lr)

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(state["block0"])
        return cast(Tensor, state["momentum_buffer"])


class Capture:
    """Hands every gradient to a `ClippedMoM` as soon as ``backward()`` has computed it."""

    def __init__(self, optimizer: ClippedMoM) -> None:
        if optimizer._captures is not None:
            raise RuntimeError("the optimizer captures gradients already; remove() that first")
        self._optimizer = optimizer
        self._params = list(optimizer._params())
        self._grads: dict[int, Tensor] = {}
        optimizer._captures = self
        self._handles = [
            cast(Any, p).register_post_accumulate_grad_hook(functools.partial(self._take, i))
            for i, p in enumerate(self._params)
            if p.requires_grad
        ]

    def remove(self) -> None:
        """Let gradients stay in ``.grad`` again."""
        self.flush()
        for handle in self._handles:
            handle.remove()
        self._optimizer._captures = None

    def flush(self) -> None:
        """Add what the last ``backward()`` left."""
        if self._grads:
            self._optimizer._add(self._params, self._grads)
            self._grads = {}

    @torch.no_grad()
    def _take(self, i: int, p: Tensor) -> None:
        if i in self._grads:  # a new backward has begun
            self.flush()
        assert p.grad is not None
        self._grads[i] = check_dense(self._optimizer, p.grad)
        p.grad = None


def like(value: Tensor, sharded: Tensor) -> Tensor:
    """Return ``value``, a process's part, as a ``DTensor`` if ``sharded`` is one."""
    if not hasattr(sharded, "to_local"):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = cast(Any, sharded).device_mesh, cast(Any, sharded).placements
    return DTensor.from_local(
        value, mesh, placements, shape=sharded.shape, stride=sharded.stride(), run_check=False
    )


def _new_clock() -> dict[str, Any]:
    """Return what a step knows of the gradients before it: how many, of what, and their norms."""
    return {"n": 0, "bad": [], "seen": [], "norms": []}


def check_clip(clip: Any) -> Clip:
    """Return a clipping level > 0, or "auto"."""
    if isinstance(clip, str):
        if clip != "auto":
            raise ValueError(f'clip must be a number > 0 or "auto", got {clip!r}')
        return "auto"
    return check_number("clip", clip, above=0, allow_infinite=True)
