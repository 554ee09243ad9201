"""Koala: Kalman filtering of the weights with a scalar covariance, also with momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.common.torch_gradients import value_of
from thalweg.training.gradients import buffer, check_real, with_gradients
from thalweg.training.kalman_measurement import (
    Variance,
    accept_measurement,
    check_kalman_settings,
    innovation,
    is_only_an_initialization,
    measure,
    variance,
    with_penalty,
)
from thalweg.training.kalman_state import (
    columns,
    leading,
    restore,
    start_filter,
    store,
    without_callables,
)
from thalweg.training.tensor_blocks import dot, inner_products, launches_with_factors


class _Filter(NamedTuple):
    """What a filter remembers: the covariance [[a, b], [b, c]] ⊗ I of weights and momentum."""

    step: Tensor
    R: Tensor
    a: Tensor
    b: Tensor
    c: Tensor


class _Row(NamedTuple):
    """A param group and parallel lists of what its tensors have."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    momenta: list[Tensor]  # empty without momentum
    scalars: list[Tensor]  # the entries of `_Filter`, tensor by tensor


class Koala(torch.optim.Optimizer):
    r"""Koala: the predecessor of `KoalaPP`, with a scalar for the weight covariance.

    The minibatch loss is a noisy measurement of its target L*, and the extended Kalman filter for
    it keeps P = pI. With the gradient H of the d weights of a filter, variant "V" (vanilla) is

    .. math::
        p \leftarrow p + q, \qquad S = p \|H\|^2 + R, \qquad
        \theta \leftarrow \theta - \mathrm{lr}\, \tfrac{p}{S} (L - L^\star) H, \qquad
        p \leftarrow p \Bigl(1 - \frac{p \|H\|^2}{d\, S}\Bigr),

    the last being the projection of the filter's covariance to multiples of the identity that
    keeps its trace. Variant "M" (momentum) filters (θ, m) with the dynamics
    :math:`F = \binom{1\;1}{0\;\kappa}` and the covariance :math:`\binom{a\;b}{b\;c} \otimes I`.

    The step is that of SGD with a size that follows the loss: a damped Polyak step. It stands
    here for comparison with `KoalaPP`, whose interface it shares; see there for what a loss must
    be, for mixed precision and for replicas.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have its own settings, but for ``pool_replicas``.
    lr : float or 0-dim Tensor, default 1.0
        Factor of the Kalman step.
    variant : {"V", "M"}, default "V"
        Without or with momentum.
    sigma : float, default 0.1
        The first covariance: p, or a = c, with b = 0.
    q : float, default 0.1
        Covariance of the drift per step (of weights and momentum).
    kappa : float in [0, 1), default 0.9
        Decay of the momentum, for "M".
    r, alpha_r, weight_decay, scope, target_loss, eps, check_finite, pool_replicas
        As in `KoalaPP`.

    Attributes
    ----------
    n_skipped : int
        Measurements skipped because they were not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and complex parameters.
    RuntimeError
        From `step`, as in `KoalaPP`.

    Warns
    -----
    UserWarning
        Once, when the loss is below ``target_loss``: such a step moves uphill.

    Notes
    -----
    *Cost.* "V" has no buffer but five scalars per tensor, and makes four passes: it reads the
    gradient for its norm, and then as SGD does. "M" has one buffer, the momentum, and six passes.
    A weight decay reads the parameters once more.

    *Ours.* "M" measures where its prediction is: the parameters rest at θ + lr · m after a step,
    so that the next gradient is taken there, which is the published order of steps seen from
    half-way. lr multiplies the momentum when it moves the weights, not when it is updated, so that
    a schedule acts at once. The momentum starts at 0 with covariance σI. ``scope="group"``,
    ``target_loss``, ``eps`` and the average over replicas are ours, too.

    References
    ----------
    "KOALA: A Kalman Optimization Algorithm with Loss Adaptivity", AAAI 2022.
    "KOALA++: Efficient Kalman-Based Optimization of Neural Networks with Gradient-Covariance
    Products", NeurIPS 2025.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import Koala
    >>> x = torch.nn.Parameter(torch.tensor([3.0, -1.0]))
    >>> optimizer = Koala([x], variant="M", r=1e-3)
    >>> for _ in range(100):
    ...     optimizer.zero_grad()
    ...     loss = x.square().sum() / 2
    ...     loss.backward()
    ...     _ = optimizer.step(loss=loss)
    >>> bool(loss < 1e-6)
    True
    """

    n_skipped = 0
    nonfinite_in_a_row = 0
    _warned_of_negative = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        *,
        variant: Literal["V", "M"] = "V",
        sigma: float = 0.1,
        q: float = 0.1,
        kappa: float = 0.9,
        r: Variance = None,
        alpha_r: float = 0.9,
        weight_decay: float = 0.0,
        scope: Literal["tensor", "group"] = "tensor",
        target_loss: float = 0.0,
        eps: float = 1e-12,
        check_finite: bool = True,
        pool_replicas: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "variant": variant,
            "sigma": sigma,
            "q": q,
            "kappa": kappa,
            "r": r,
            "alpha_r": alpha_r,
            "weight_decay": weight_decay,
            "scope": scope,
            "target_loss": target_loss,
            "eps": eps,
            "check_finite": check_finite,
            "pool_replicas": check_choice("pool_replicas", pool_replicas, (False, True)),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        settings = self.defaults | param_group
        check_kalman_settings(settings)
        check_choice("variant", settings["variant"], ("V", "M"))
        check_number("kappa", settings["kappa"], at_least=0, below=1)
        super().add_param_group(param_group)
        check_real(self)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: float | Tensor | None = None,
        loss_sq: float | Tensor | None = None,
    ) -> Any:
        """Make one step from the gradients in ``.grad`` and the value of their loss.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss; called once, with gradients enabled.
        loss : float or scalar Tensor, optional
            The minibatch loss, a mean over samples, if there is no closure.
        loss_sq : float or scalar Tensor, optional
            Mean over the samples of their squared losses, for R; ``loss²`` by default.

        Returns
        -------
        The loss, as it was given.
        """
        if closure is not None:
            if loss is not None:
                raise RuntimeError("pass loss= or a closure, not both")
            loss = value_of(closure)
        rows = [_Row(group, [], [], [], []) for group in self.param_groups]
        for row in rows:
            self._init_group(*row)
        rows = [row for row in rows if row.params]
        if loss is None and is_only_an_initialization(self):
            return None
        device = rows[0].params[0].device if rows else torch.device("cpu")
        measured = measure("Koala", loss, loss_sq, device, self.defaults["pool_replicas"])
        known = [(row, _of_tensors(row), _squares(row)) for row in rows]
        variances = [
            variance(row.group, _pooled(row.group, each).R, measured) for row, each, _ in known
        ]
        checked = [
            (row.group, row.grads, squares, R)
            for (row, _, squares), R in zip(known, variances, strict=True)
            if row.group["check_finite"]
        ]
        if checked and accept_measurement(self, measured, checked) == "skip":
            return loss
        for (row, each, squares), R in zip(known, variances, strict=True):
            _update(row, _turn(row, each, squares, R, measured.loss))
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        momenta: list[Tensor],
        scalars: list[Tensor],
    ) -> None:
        for p in with_gradients(self, group, params, grads):
            state = self.state[p]
            if "step" not in state:
                start_filter(state, p, _Filter._fields, a=group["sigma"], c=group["sigma"])
            scalars.extend(state[name] for name in _Filter._fields)
            if group["variant"] == "M":
                momenta.append(buffer(self, p, "momentum"))

    def state_dict(self) -> dict[str, Any]:
        """Return the state; a callable ``r`` is left out, and kept by the one that loads it."""
        return without_callables(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned.

        Raises
        ------
        ValueError
            If the state comes from other param groups, or from an optimizer with a callable ``r``
            and this one has none.
        """
        own_r = [group["r"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        restore(self, state_dict, own_r)


def _squares(row: _Row) -> Tensor:
    """Return ‖H‖², and with a weight decay ‖θ‖², of shape (tensors, 1 or 2)."""
    decay = row.group["weight_decay"]

    def products(grad: Tensor, *param: Tensor) -> list[Tensor]:
        (grad,) = with_penalty(decay, list(param), [grad])
        return [dot(tensor, tensor) for tensor in (grad, *param)]

    return inner_products(products, row.grads, *([row.params] if decay else []))


def _of_tensors(row: _Row) -> _Filter:
    """Return what the filters remember with each tensor."""
    return _Filter(*columns(row.scalars, len(_Filter._fields)))


def _pooled(group: dict[str, Any], each: _Filter) -> _Filter:
    """Return the filters: one per tensor, or one of the group."""
    return each if group["scope"] == "tensor" else _Filter(*leading(each))


def _turn(row: _Row, each: _Filter, squares: Tensor, R: Tensor, loss: Tensor) -> Tensor:
    """Turn the filters with the new gradient H, and return what moves the tensors.

    Returns
    -------
    Tensor of shape (4, filters)
        -gain_θ, -gain_m, and lr and κ of the following prediction, or zeros and 1 at rest.
    """
    group = row.group
    sizes = squares.new_tensor([p.numel() for p in row.params])
    if group["scope"] == "group":
        squares, sizes = squares.sum(0, True), sizes.sum(0, True)
    step, _, a, b, c = _pooled(group, each)
    square = squares[:, 0]
    q, kappa = group["q"], group["kappa"]

    if group["variant"] == "V":
        a = a + q
    else:
        a, b, c = a + 2 * b + c + q, kappa * (b + c), kappa**2 * c + q
    S = a * square + R
    squared_params = squares[:, 1] if group["weight_decay"] else torch.zeros_like(square)
    gain = innovation(group, loss, squared_params) / S
    zero, one = torch.zeros_like(S), torch.ones_like(S)
    lr = group["lr"] * one
    moves = torch.stack([-lr * gain * a, -gain * b, lr, kappa * one])
    # The trace of the covariance of d weights falls by ‖P H‖² / S.
    share = square / (sizes * S)
    turned = _Filter(step + 1, R, a - share * a * a, b - share * a * b, c - share * b * b)

    moved = square.sqrt() >= group["eps"]
    store(row.scalars, moved, turned, each._replace(R=R))
    return torch.where(moved, moves, torch.stack([zero, zero, zero, one]))


def _update(row: _Row, moves: Tensor) -> None:
    """Update: θ ← θ - gain_θ H;  m ← m - gain_m H;  predict: θ ← θ + lr m, m ← κm."""
    lists = [tensors for tensors in (row.params, row.grads, row.momenta) if tensors]
    for tensors, factors in launches_with_factors(lists, moves):
        params, grads, *momenta = tensors
        minus_gain_theta, minus_gain_m, lr, kappa = factors
        gradients = with_penalty(row.group["weight_decay"], params, grads)
        torch._foreach_addcmul_(params, gradients, minus_gain_theta)
        for ms in momenta:
            torch._foreach_addcmul_(ms, gradients, minus_gain_m)
            torch._foreach_addcmul_(params, ms, lr)
            torch._foreach_mul_(ms, kappa)
