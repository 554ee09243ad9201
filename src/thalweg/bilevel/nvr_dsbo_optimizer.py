"""One agent of normalized decentralized bilevel optimization, as a torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from thalweg.bilevel.agent_messages import Alone, Comm, ProcessNeighbors
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires
from thalweg.common.torch_gradients import check_dense, count_nonfinite

with requires("bilevel"):
    import torch
    import torch.distributed as dist
    from torch import Tensor

EPS = 1e-12  # the least length that a direction is divided by
ROLES = ("x", "y", "z")
SHARED = ("penalty", "beta", "normalize", "clip", "warm_batch", "check_finite")


class NVRDSBO(torch.optim.Optimizer):
    r"""Make the steps of one agent of `decentralized_bilevel`, which may be a process of its own.

    The closure computes one loss of one mini-batch,

    .. math:: f(x, y) + \lambda (g(x, y) - g(x, z)),

    whose gradients in x, y and z give the three directions. `step` calls it at the present and at
    the previous point, estimates the directions by STORM, tracks their mean over the network, and
    moves every block by its step size.

    Parameters
    ----------
    params : iterable of dict
        Three param groups, with ``role`` "x", "y" or "z"; y and z are two copies of the lower
        level's parameters, equal at the start, as by `copy.deepcopy`. A group may have its own
        ``lr``.
    lr : float or 0-dimensional Tensor ≥ 0
        α, the distance that a block of this agent moves.
    penalty : float > 0
        λ, as in the closure.
    beta : float in (0, 1]
        The weight of fresh samples. With 1 the closure is called once.
    normalize : {"agent", "block", "joint"} or None
        As in `decentralized_bilevel`; "block" sums three numbers over the network.
    clip : float > 0, optional
        Cut sampled directions, block by block, down to this length.
    warm_batch : int ≥ 1
        The first so many calls of `step` only average directions, where the agent starts; the last
        of them makes the first step.
    check_finite : bool
        Keep the estimate of a sample whose gradient is not finite.
    W : array_like of shape (n, n), optional
        The mixing matrix of the processes of `torch.distributed`, with a row for each.
    group : ProcessGroup, optional
        The processes; by default all.
    comm : object, optional
        Other means of communication, with methods ``mix(vector)`` and ``mean(vector)``. Without it
        and without an initialized `torch.distributed`, the agent is alone.

    Attributes
    ----------
    n_skipped : int
        Samples that were not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; from `step`, without a closure, or if y and z
        differ at the start.
    RuntimeError
        From `step`: for sparse gradients.
    NonFiniteGradientError
        From `step`: after ten samples in a row that were not finite.

    Notes
    -----
    *Cost.* Two calls of the closure per step, one message of 2(p + 2q) numbers to each neighbor,
    and three buffers of the size of the parameters. Buffers of batch normalization are the
    closure's own affair; dropout must draw the same masks in both calls.

    *Ours.* Sending trackers and variables in one message, and warm starts.

    References
    ----------
    "Decentralized bilevel under heavy-tailed noise", NeurIPS 2026.

    Examples
    --------
    The weight x that makes y, the minimizer of (y - x)²/2, equal to 1:

    >>> import torch
    >>> from thalweg.bilevel import NVRDSBO
    >>> x, y, z = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    >>> groups = [{"params": [p], "role": role} for p, role in zip((x, y, z), "xyz")]
    >>> optimizer = NVRDSBO(groups, lr=0.01, penalty=5.0, warm_batch=4)
    >>> def closure():
    ...     optimizer.zero_grad()
    ...     f, g_y, g_z = (y - 1).square().sum() / 2, (y - x).square() / 2, (z - x).square() / 2
    ...     loss = f + 5.0 * (g_y - g_z).sum()
    ...     loss.backward()
    ...     return loss
    >>> for _ in range(300):
    ...     loss = optimizer.step(closure)
    >>> bool(abs(x - 1) < 0.1)
    True
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float | Tensor = 0.01,
        *,
        penalty: float = 5.0,
        beta: float = 0.1,
        normalize: Literal["agent", "block", "joint"] | None = "agent",
        clip: float | None = None,
        warm_batch: int = 32,
        check_finite: bool = True,
        W: Any = None,
        group: Any = None,
        comm: Comm | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "role": None,
            "penalty": penalty,
            "beta": beta,
            "normalize": normalize,
            "clip": clip,
            "warm_batch": warm_batch,
            "check_finite": check_finite,
        }
        self._comm = _comm(W, group, comm)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the param group of a role that there is none of yet."""
        settings = self.defaults | param_group
        _check_lr(settings["lr"])
        check_choice("role", settings["role"], ROLES)
        check_number("penalty", settings["penalty"], above=0)
        check_number("beta", settings["beta"], above=0, at_most=1)
        check_choice("normalize", settings["normalize"], ("agent", "block", "joint", None))
        if settings["clip"] is not None:
            check_number("clip", settings["clip"], above=0)
        check_integer("warm_batch", settings["warm_batch"], at_least=1)
        check_choice("check_finite", settings["check_finite"], (False, True))
        if any(settings["role"] == group["role"] for group in self.param_groups):
            raise ValueError(f"role must differ between groups, got {settings['role']!r} twice")
        for name in SHARED:
            if self.param_groups and settings[name] != self.param_groups[0][name]:
                raise ValueError(f"{name} must be the same in all groups")
        super().add_param_group(param_group)
        if any(p.is_complex() for p in self.param_groups[-1]["params"]):
            self.param_groups.pop()
            raise TypeError("params must be real, got a complex parameter")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step, or take one more sample for the start.

        Parameters
        ----------
        closure : callable
            Zeroes the gradients, computes them from one mini-batch, and returns the loss. It must
            use the same mini-batch in both calls.

        Returns
        -------
        The closure's value at the present point.
        """
        if closure is None:
            raise ValueError("closure must be given: the gradient is needed at two points")
        groups = self._by_role()
        params = [p for group in groups for p in group["params"] if p.requires_grad]
        if not self.state:
            _check_copies(groups)
        states = [self._state(p) for p in params]
        count = int(states[0]["step"])
        loss, now = self._directions(closure, groups)
        if count < groups[0]["warm_batch"]:
            return self._warm(loss, now, groups, params, states, count)
        theta = [p.clone() for p in params]
        estimate = self._estimate(closure, groups, params, states, now)
        self._move(groups, params, states, theta, estimate)
        return loss

    def _warm(
        self, loss: Any, now: list[Tensor], groups: Any, params: Any, states: Any, count: int
    ) -> Any:
        """Add a direction to the average at the start; move when it is complete."""
        finite = not groups[0]["check_finite"] or _all_finite(now)
        if count_nonfinite(self, finite=finite):
            for state, direction in zip(states, now, strict=True):
                state["step"] += 1
                state["m"].add_((direction - state["m"]) / (count + 1))
            count += 1
        if count == groups[0]["warm_batch"] and finite:
            for p, state in zip(params, states, strict=True):
                state["previous"].copy_(p)
                state["u"].copy_(state["m"])
            mixed = self._mixed(params)
            self._descend(groups, params, states, mixed)
        return loss

    def _estimate(
        self, closure: Any, groups: Any, params: Any, states: Any, now: list[Tensor]
    ) -> list[Tensor]:
        """Return d(θₜ) + (1 - β)(m - d(θₜ₋₁)) for one mini-batch."""
        beta = groups[0]["beta"]
        estimate = now
        if beta < 1:
            theta = [p.clone() for p in params]
            for p, state in zip(params, states, strict=True):
                p.copy_(state["previous"])
            try:
                _, before = self._directions(closure, groups)
            finally:
                for p, here in zip(params, theta, strict=True):
                    p.copy_(here)
            estimate = [
                d + (1 - beta) * (state["m"] - b)
                for d, b, state in zip(now, before, states, strict=True)
            ]
        finite = not groups[0]["check_finite"] or _all_finite(estimate)
        if count_nonfinite(self, finite=finite):
            return estimate
        return [state["m"].clone() for state in states]

    def _move(
        self, groups: Any, params: Any, states: Any, theta: list[Tensor], estimate: list[Tensor]
    ) -> None:
        """Track the mean direction, and step along it from the mixed variables."""
        sums = [state["u"] + m - state["m"] for state, m in zip(states, estimate, strict=True)]
        mixed = self._mixed([*sums, *theta])
        for state, m, u, here in zip(states, estimate, mixed[: len(params)], theta, strict=True):
            state["m"].copy_(m)
            state["u"].copy_(u)
            state["previous"].copy_(here)
            state["step"] += 1
        self._descend(groups, params, states, mixed[len(params) :])

    def _descend(self, groups: Any, params: Any, states: Any, mixed: list[Tensor]) -> None:
        """θ ← Wθ - α u/‖u‖."""
        lengths = self._lengths(groups)
        index = 0
        for group, length in zip(groups, lengths, strict=True):
            for _ in range(sum(p.requires_grad for p in group["params"])):
                unit = states[index]["u"] / length.to(states[index]["u"])
                params[index].copy_(mixed[index] - group["lr"] * unit)
                index += 1

    def _lengths(self, groups: Any) -> list[Tensor]:
        """Return what the trackers of each block are divided by."""
        normalize = groups[0]["normalize"]
        trackers = [
            [self.state[p]["u"] for p in group["params"] if p.requires_grad] for group in groups
        ]
        norms = torch.stack([_norm(block) for block in trackers])
        if normalize is None:
            norms = torch.ones_like(norms)
        elif normalize == "block":
            norms = self._comm.mean(norms.square()).sqrt()
        elif normalize == "joint":
            norms = norms.norm().expand(len(norms))
        return list(norms.clamp(min=EPS))

    def _directions(self, closure: Any, groups: Any) -> tuple[Any, list[Tensor]]:
        """Return the loss, and the gradients scaled to the directions dˣ, dʸ, dᶻ."""
        with torch.enable_grad():
            loss = closure()
        penalty, clip = groups[0]["penalty"], groups[0]["clip"]
        scales = {"x": 1.0, "y": 1 / penalty, "z": -1 / penalty}
        directions = []
        for group in groups:
            block = [
                torch.zeros_like(p)
                if p.grad is None
                else check_dense(self, p.grad) * scales[group["role"]]
                for p in group["params"]
                if p.requires_grad
            ]
            if clip is not None:
                share = clip / _norm(block).clamp(min=clip)
                block = [direction * share.to(direction) for direction in block]
            directions += block
        return loss, directions

    def _mixed(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the averages with the neighbors, by one message per dtype and device."""
        mixed: list[Tensor] = [torch.empty(0)] * len(tensors)
        kinds = dict.fromkeys((t.dtype, t.device) for t in tensors)
        for kind in kinds:
            among = [i for i, t in enumerate(tensors) if (t.dtype, t.device) == kind]
            vector = self._comm.mix(torch.cat([tensors[i].reshape(-1) for i in among]))
            parts = torch.split(vector, [tensors[i].numel() for i in among])
            for i, part in zip(among, parts, strict=True):
                mixed[i] = part.view(tensors[i].shape)
        return mixed

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for name in ("m", "u", "previous"):
                state[name] = torch.zeros_like(p)
        return state

    def _by_role(self) -> list[dict[str, Any]]:
        roles = {group["role"]: group for group in self.param_groups}
        missing = [role for role in ROLES if role not in roles]
        if missing:
            raise ValueError(f"params must hold groups of the roles x, y and z, {missing} missing")
        return [roles[role] for role in ROLES]


def _comm(W: Any, group: Any, comm: Comm | None) -> Comm:
    if comm is not None:
        if not callable(getattr(comm, "mix", None)) or not callable(getattr(comm, "mean", None)):
            raise TypeError(f"comm must have methods mix and mean, got {type(comm).__name__}")
        return comm
    if not (dist.is_available() and dist.is_initialized()):
        if W is not None:
            raise ValueError("W must be None where torch.distributed is not initialized")
        return Alone()
    if W is None:
        raise ValueError("W must be given where torch.distributed is initialized")
    return ProcessNeighbors(W, group)


def _check_lr(lr: Any) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must hold one number, got a tensor of shape {tuple(lr.shape)}")
    check_number("lr", float(lr) if isinstance(lr, Tensor) else lr, at_least=0)


def _check_copies(groups: list[dict[str, Any]]) -> None:
    ys, zs = groups[1]["params"], groups[2]["params"]
    alike = len(ys) == len(zs) and all(
        y.shape == z.shape and torch.equal(y, z) for y, z in zip(ys, zs, strict=True)
    )
    if not alike:
        raise ValueError("y and z must be equal at the start: use copy.deepcopy of one of them")


def _norm(tensors: list[Tensor]) -> Tensor:
    """Return the length of all tensors together, in float64."""
    squares = [tensor.double().square().sum() for tensor in tensors]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)


def _all_finite(tensors: list[Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
