"""The accelerated form of clipped SGD on median-of-means gradients: similar triangles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast

from thalweg.common.checks import check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.clipped_mom import ClippedMoM
from thalweg.training.robust_means import Aggregator


class ClippedSSTM(ClippedMoM):
    r"""The clipped method of similar triangles on median-of-means gradients, for convex losses.

    With :math:`A_0 = 0`, :math:`y_0 = z_0 = x_0`, :math:`\alpha_{t+1} = (t + 2)/(2aL)` and
    :math:`A_{t+1} = A_t + \alpha_{t+1}`:

    .. math:: x_{t+1} &= (A_t y_t + \alpha_{t+1} z_t) / A_{t+1} \\
              z_{t+1} &= z_t - \alpha_{t+1} \,
                         \mathrm{clip}(\hat g(x_{t+1}), B / \alpha_{t+1}) \\
              y_{t+1} &= (A_t y_t + \alpha_{t+1} z_{t+1}) / A_{t+1}

    Without noise y descends at Nesterov's rate 2aL‖x₀ - x*‖²/(T(T + 3)). Steps grow with t, and
    with them the noise that they let in: a larger ``a`` trades speed for accuracy.

    While training the parameters hold x, where gradients are wanted; `eval` puts y into them, the
    output, and `train` puts x back. Gradients are collected as for `ClippedMoM`.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
    L : float
        Smoothness of the loss, > 0.
    a : float ≥ 1, default 1
        Divides all steps.
    B : float, optional
        The gradient is clipped at B/α_{t+1}; by default "auto" of `ClippedMoM`. Of the order of
        the distance ‖x₀ - x*‖ over the logarithm of the failure probability.
    lr : float or Tensor, default 1
        A factor of the steps of z, for schedulers; 1 is the theory's.
    weight_decay : float, default 0
        λ of the penalty λ‖x‖²/2, whose gradient is added to the estimate.
    k, clip_scope, aggregator, smooth, n_micro, maximize, check_finite, generator, process_group
        As in `ClippedMoM`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `ClippedMoM`; RuntimeError also from `step` in evaluation mode.

    Notes
    -----
    Memory: k + 2 tensors of the parameters' size. For strongly convex losses call `restart` after
    every √(8aL/μ) steps: it starts over from y, and each stage halves the distance.

    References
    ----------
    "Clipped optimization with median-of-means gradients", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import ClippedSSTM
    >>> curvature = torch.tensor([1.0, 0.1, 0.01])
    >>> x = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = ClippedSSTM([x], L=1.0, k=1, B=float("inf"))
    >>> for _ in range(100):
    ...     x.grad = curvature * x.detach()
    ...     optimizer.accumulate()
    ...     optimizer.step()
    >>> optimizer.eval()
    >>> bool(curvature @ x.detach() ** 2 / 2 < 2 * 3 / (100 * 103))
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        L: float,
        *,
        a: float = 1.0,
        B: float | None = None,
        k: int = 5,
        lr: float | Tensor = 1.0,
        clip_scope: Literal["global", "tensor"] = "global",
        aggregator: Aggregator = "median",
        weight_decay: float = 0.0,
        smooth: float = 0.0,
        n_micro: int | None = None,
        maximize: bool = False,
        check_finite: bool = True,
        generator: torch.Generator | None = None,
        process_group: Any = None,
    ) -> None:
        # Of the optimizer and not of a param group: all parameters move along one triangle.
        triangle = {
            "L": check_number("L", L, above=0),
            "a": check_number("a", a, at_least=1),
            "B": None if B is None else check_number("B", B, above=0, allow_infinite=True),
            "t": 0,
            "evaluating": False,
        }
        super().__init__(
            params,
            lr,
            k=k,
            clip_scope=clip_scope,
            aggregator=aggregator,
            weight_decay=weight_decay,
            smooth=smooth,
            n_micro=n_micro,
            maximize=maximize,
            check_finite=check_finite,
            generator=generator,
            process_group=process_group,
        )
        self.param_groups[0]["triangle"] = triangle

    def _check_ready(self) -> None:
        if self._triangle["evaluating"]:
            raise RuntimeError("the parameters hold the output y: call train() before step()")

    @torch.no_grad()
    def eval(self) -> None:
        """Put y, the output, into the parameters."""
        self._show(evaluating=True)

    @torch.no_grad()
    def train(self) -> None:
        """Put x, where gradients are wanted, into the parameters."""
        self._show(evaluating=False)

    @torch.no_grad()
    def restart(self) -> None:
        """Start over from y, for strongly convex losses."""
        for p in self._params():
            if "z" in self.state[p]:
                self.state[p]["z"].copy_(self.state[p]["y"])
        self._triangle["t"] = 0
        self._show(self._triangle["evaluating"])

    @property
    def _triangle(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.param_groups[0]["triangle"])

    def _alpha(self, t: int) -> float:
        """Return α_{t+1} = (t + 2)/(2aL)."""
        return float((t + 2) / (2 * self._triangle["a"] * self._triangle["L"]))

    def _total(self, t: int) -> float:
        """Return A_t = α_1 + … + α_t = t(t + 3)/(4aL)."""
        return float(t * (t + 3) / (4 * self._triangle["a"] * self._triangle["L"]))

    def _levels(self) -> list[float]:
        B = self._triangle["B"]
        if B is None:
            return super()._levels()
        return [B / self._alpha(self._triangle["t"])] * len(self._norms)

    def _descend(self, estimates: dict[Tensor, Tensor], factors: list[float]) -> None:
        t = self._triangle["t"]
        alpha, share = self._alpha(t), self._alpha(t) / self._total(t + 1)
        clipped = dict(zip(estimates, factors, strict=True))
        for group in self.param_groups:
            sign = 1.0 if group["maximize"] else -1.0
            for p in (p for p in group["params"] if p in estimates):
                gradient = estimates[p].mul_(clipped[p])
                if group["weight_decay"] > 0:
                    gradient.add_(p, alpha=-sign * group["weight_decay"])
                y, z = self._corners(p)
                z.add_(gradient * (sign * alpha * group["lr"]))
                y.lerp_(z, share)
        self._triangle["t"] = t + 1
        self._show(evaluating=False)

    def _corners(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and z, which begin where the parameter is."""
        state = self.state[p]
        if "z" not in state:
            for name in ("y", "z"):
                state[name] = p.detach().to(state["block0"].dtype, copy=True)
        return state["y"], state["z"]

    def _show(self, evaluating: bool) -> None:
        """Write y, or x_{t+1} = y + (α_{t+1}/A_{t+1})(z - y), into the parameters."""
        self._triangle["evaluating"] = evaluating
        t = self._triangle["t"]
        share = 0.0 if evaluating else self._alpha(t) / self._total(t + 1)
        for p in self._params():
            if "z" in self.state[p]:
                p.copy_(torch.lerp(self.state[p]["y"], self.state[p]["z"], share))
