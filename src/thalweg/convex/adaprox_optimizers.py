"""Adaptive proximal gradient and its accelerated variant as torch optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from thalweg.common.checks import check_choice
from thalweg.common.optional import requires

with requires("convex"):
    import torch
    from torch import Tensor

from thalweg.convex.adaprox_groups import (
    add_group,
    corner,
    descend,
    gather,
    hold,
    restore_prox,
    without_prox,
)


class AdaProx(torch.optim.Optimizer):
    r"""Proximal gradient descent whose step shrinks with the accumulated gradient mappings.

    .. math:: \theta_{k+1} = \mathrm{prox}_{\alpha_k h}(\theta_k - \alpha_k g_k), \quad
              \alpha_k = \eta D/S_k, \quad
              S_{k+1}^2 = S_k^2 + \|\theta_k - \theta_{k+1}\|^2 / \alpha_k^2

    For losses with a penalty or a constraint on the parameters: sparse layers, boxes, low rank.
    No step size to find: D is a distance. See `minimize_adaprox` for the method without noise.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have settings of its own. S and the norms are those
        of a whole group.
    prox : object or callable, optional
        ``prox(v, alpha)`` of each tensor of the group, where ``alpha`` is a number, or a
        0-dimensional tensor of v's dtype on an accelerator and when compiled; or an object with a
        value and a prox (`L1`, `Box`, …). Not in the state dict. None: h = 0.
    lr : float or 0-dimensional Tensor ≥ 0, default 1
        η, for schedulers.
    D : float > 0, default 1
        About the distance from the start to a solution.
    S0 : float > 0 or "auto", default "auto"
        In units of a gradient. "auto" makes the first step D long.
    weight_avg : bool, default False
        Keep the average of the iterates, weighted by the steps, to which the rates for convex
        losses with noise belong; see `averaged`.
    maximize : bool, default False
        Ascend instead.
    check_finite : bool, default True
        Skip steps whose gradient is not finite. This reads the gradient once more and waits for
        the device.

    Attributes
    ----------
    n_skipped : int
        Steps skipped because a gradient was not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, a prox with a result of another shape, and for
        complex parameters.
    RuntimeError
        From `step`: for sparse gradients, after ten gradients in a row that were not finite, and
        while the parameters hold the average.

    Notes
    -----
    *Cost.* Without prox one pass over the gradient more than SGD, and no state but one number per
    group (one buffer with ``weight_avg``). Compiled use is ``torch.compile(optimizer.step)`` with
    ``lr=torch.tensor(1.0)`` and ``check_finite=False``.

    *Ours.* ``lr`` and S0 = "auto", for which see `minimize_adaprox`. S² is kept in float64.

    References
    ----------
    "Adaptive proximal gradient methods for three problem classes", NeurIPS 2026.

    Examples
    --------
    A layer of which most weights become exactly zero:

    >>> import torch
    >>> from thalweg.convex import AdaProx, L1
    >>> generator = torch.Generator().manual_seed(0)
    >>> X = torch.randn(100, 20, generator=generator)
    >>> y = X[:, 0] - X[:, 1]
    >>> w = torch.nn.Parameter(torch.zeros(20))
    >>> optimizer = AdaProx([w], prox=L1(0.1))
    >>> for _ in range(200):
    ...     optimizer.zero_grad()
    ...     ((X @ w - y).square().mean() / 2).backward()
    ...     optimizer.step()
    >>> int((w != 0).sum())
    2
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        prox: Any = None,
        *,
        lr: float | Tensor = 1.0,
        D: float = 1.0,
        S0: float | Literal["auto"] = "auto",
        weight_avg: bool = False,
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "prox": prox,
            "lr": lr,
            "D": D,
            "S0": S0,
            "weight_avg": weight_avg,
            "maximize": maximize,
            "check_finite": check_finite,
            "averaged": False,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        check_choice("weight_avg", (self.defaults | param_group)["weight_avg"], (False, True))
        add_group(self, param_group, super().add_param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step along the gradients in ``.grad``.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss; called once, with gradients enabled.

        Returns
        -------
        The closure's value, or None.
        """
        loss, rows = gather(self, closure, 4)
        for group, params, grads, (S2, weight), averages in rows:
            alpha = group["lr"] * group["D"] / S2[0].sqrt()
            descend(group, S2, alpha, params, grads)
            if averages:
                weight.add_(alpha)
                share = alpha / weight[0]
                torch._foreach_add_(
                    averages, [d.mul_(share) for d in torch._foreach_sub(params, averages)]
                )
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        scalars: list[Tensor],
        averages: list[Tensor],
    ) -> None:
        held = hold(self, group, params, grads, scalars, "weight")
        if group["weight_avg"]:
            averages.extend(corner(self, p, "average") for p in held)

    def swap_to_average(self) -> None:
        """Put the average into the parameters, and the iterate aside."""
        self._swap(to_average=True)

    def swap_to_query(self) -> None:
        """Put the iterate, where gradients are wanted, back into the parameters."""
        self._swap(to_average=False)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the average in the parameters while a block runs, for evaluation."""
        self.swap_to_average()
        try:
            yield
        finally:
            self.swap_to_query()

    @torch.no_grad()
    def _swap(self, *, to_average: bool) -> None:
        for group in self.param_groups:
            if not group["weight_avg"]:
                raise RuntimeError("there is no average: give weight_avg=True")
            if group["averaged"] == to_average:
                continue
            group["averaged"] = to_average
            for p in group["params"]:
                if "average" in self.state[p]:
                    other = self.state[p]["average"]
                    held = p.clone()
                    p.copy_(other)
                    other.copy_(held)

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the prox, which the optimizer that loads it keeps."""
        return without_prox(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        own = [group["prox"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        restore_prox(self, own)


class AdaProxAccel(torch.optim.Optimizer):
    r"""Accelerated proximal gradient descent for convex losses, smooth or not, without a step size.

    With weights a = 1, 3/2, 2, …, and three points that start as one,

    .. math:: x = z/a + (1 - 1/a) y, \quad z^+ = \mathrm{prox}_{s h}(z - s \nabla f(x)), \quad
              s = \eta a D/S, \quad y^+ = z^+/a + (1 - 1/a) y, \quad
              S^{+2} = S^2 (1 + \|z - z^+\|^2/(\eta D)^2)

    The parameters hold x, where gradients are wanted; the output is y, which `averaged` shows. Of
    noisy gradients it makes no more than `AdaProx` does.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
    prox, lr, D, S0, maximize, check_finite
        As in `AdaProx`.

    Attributes
    ----------
    n_skipped : int
        Steps skipped because a gradient was not finite.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `AdaProx`.

    Notes
    -----
    *Cost.* Two buffers, and about four times the memory traffic of SGD.

    *Ours.* See `minimize_adaprox`.

    References
    ----------
    "Adaptive proximal gradient methods for three problem classes", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.convex import AdaProxAccel, Box
    >>> w = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = AdaProxAccel([w], prox=Box(-1.0, 1.0), D=2.0)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     (w - torch.tensor([0.5, 3.0])).abs().sum().backward()
    ...     optimizer.step()
    >>> with optimizer.averaged():
    ...     print([round(entry, 1) for entry in w.tolist()])
    [0.5, 1.0]
    """

    n_skipped = 0
    nonfinite_in_a_row = 0

    def __init__(
        self,
        params: Iterable[Any],
        prox: Any = None,
        *,
        lr: float | Tensor = 1.0,
        D: float = 1.0,
        S0: float | Literal["auto"] = "auto",
        maximize: bool = False,
        check_finite: bool = True,
    ) -> None:
        defaults = {
            "prox": prox,
            "lr": lr,
            "D": D,
            "S0": S0,
            "maximize": maximize,
            "check_finite": check_finite,
            "averaged": False,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        add_group(self, param_group, super().add_param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step along the gradients in ``.grad``.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss; called once, with gradients enabled.

        Returns
        -------
        The closure's value, or None.
        """
        loss, rows = gather(self, closure, 5)
        for group, params, grads, (S2, t), zs, ys in rows:
            a = t[0] / 2 + 1
            descend(group, S2, a * group["lr"] * group["D"] / S2[0].sqrt(), zs, grads, a)
            t.add_(1)
            share = 2 / (t[0] + 2)
            for x, z, y in zip(params, zs, ys, strict=True):
                y.lerp_(z, (1 / a).to(y.dtype))
                x.copy_(torch.lerp(y, z, share.to(y.dtype)))
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        scalars: list[Tensor],
        zs: list[Tensor],
        ys: list[Tensor],
    ) -> None:
        held = hold(self, group, params, grads, scalars, "t")
        zs.extend(corner(self, p, "z") for p in held)
        ys.extend(corner(self, p, "y") for p in held)

    def swap_to_average(self) -> None:
        """Put y, the output, into the parameters."""
        self._show(average=True)

    def swap_to_query(self) -> None:
        """Put x, where gradients are wanted, into the parameters."""
        self._show(average=False)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the output in the parameters while a block runs, for evaluation."""
        self.swap_to_average()
        try:
            yield
        finally:
            self.swap_to_query()

    @torch.no_grad()
    def _show(self, *, average: bool) -> None:
        for group in self.param_groups:
            group["averaged"] = average
            for p in group["params"]:
                state = self.state.get(p, {})
                if not state:
                    continue
                p.copy_(state["y"])
                if not average:
                    p.lerp_(state["z"], (2 / (group["t"][0] + 2)).to(p.dtype))

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the prox, which the optimizer that loads it keeps."""
        return without_prox(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        own = [group["prox"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        restore_prox(self, own)
