"""KOALA++: a Kalman filter that tracks the product of gradient and weight covariance."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from thalweg.common.checks import check_choice
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
    is_only_an_initialization,
    measure,
    variance,
)
from thalweg.training.kalman_state import restore, start_filter, without_callables
from thalweg.training.koala_filter import (
    Filter,
    Row,
    clear_overflow,
    inner_products_of,
    of_tensors,
    pooled,
    turn,
    update,
)


class KoalaPP(torch.optim.Optimizer):
    r"""KOALA++: Kalman filtering of the weights, with the minibatch loss as the measurement.

    The weights drift, :math:`\theta_k = \theta_{k-1} + w_k` with covariance qI, and the loss is a
    noisy measurement of the value L* that they are looked for to have: with the gradient
    :math:`H_k` (a row), the extended Kalman filter is

    .. math::
        P_{k|k-1} &= P_{k-1} + qI, \qquad S_k = H_k P_{k|k-1} H_k^\top + R_k, \\
        \theta_k &= \theta_{k-1} - \mathrm{lr}\,(L_k - L^\star)\, P_{k|k-1} H_k^\top / S_k, \\
        P_k &= P_{k|k-1} - P_{k|k-1} H_k^\top H_k P_{k|k-1} / S_k.

    The covariance P is never formed. Only the vector :math:`v_k = H_k P_{k-1}` is needed, and its
    recursion asks for the unknown :math:`H_{k+1} P_{k-1}`, in which P is replaced by the matrix of
    least Frobenius norm (among symmetric ones by default) with :math:`H_k P = v_k`:

    .. math:: v_{k+1} = (\alpha - \lambda) v_k + q (H_{k+1} - \lambda H_k) + \rho H_k

    with :math:`\alpha = H_{k+1} \cdot H_k / \|H_k\|^2`,
    :math:`\lambda = H_{k+1} \cdot (v_k + q H_k) / S_k` and, if symmetric,
    :math:`\rho = H_{k+1} \cdot v_k / \|H_k\|^2 - \alpha\, (H_k \cdot v_k) / \|H_k\|^2`.

    The step is proportional to the loss: use it where the loss can approach 0, as when
    classifiers interpolate their data, or where its floor is known (``target_loss``). Elsewhere,
    as with language models or label smoothing, the step never fades by itself: let ``lr`` decay.
    The loss must be a mean over samples, not a sum. The step needs its value::

        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step(loss=loss)          # or optimizer.step(closure)

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups; a group may have its own settings, but for ``pool_replicas``.
    lr : float or 0-dim Tensor, default 1.0
        Factor of the Kalman step. The published settings are lr=1, sigma=q=0.1, weight_decay=5e-4
        (convolutional networks), lr=2, sigma=q=0.2, weight_decay=1e-4 (vision transformers), both
        with cosine annealing over 200 epochs with batches of 256, and lr=2e-3, sigma=q=0.1,
        weight_decay=8e-5 (a language model of four layers).
    sigma : float, default 0.1
        Scale of the first covariance, σI.
    q : float, default 0.1
        Covariance of the drift per step. While R dominates S the step is about ``lr · q · H / L``:
        lr and q are almost one knob, and networks with small gradients need a q that is 10 to 50
        times larger.
    r : float or callable, optional
        Variance of the measurement, in units of loss²: fixed, or a function of (loss, loss_sq),
        0-dim tensors, that returns it. By default a running average of ``loss_sq``, from 1.
    alpha_r : float in [0, 1), default 0.9
        Weight of the past in that average.
    weight_decay : float, default 0
        λ of an L2 penalty: H + λθ is filtered, with the loss L + λ‖θ‖²/2 (of the tensor).
    symmetric : bool, default True
        Whether the surrogate for P is symmetric; otherwise ρ = 0.
    scope : {"tensor", "group"}, default "tensor"
        A filter for every tensor, as published, or one for all tensors of a param group. Filters
        do not know of each other and each explains the whole loss, so that with "tensor" lr has
        to fall as the number of tensors grows.
    target_loss : float, default 0
        L*.
    first : {"reference", "exact"}, default "reference"
        v₁: as the published code starts, with one turn of the recursion from v = σH₁, or σH₁.
    eps : float, default 1e-12
        A filter whose gradient has a smaller norm makes no step and does not change.
    check_finite : bool, default True
        Skip measurements that are not finite, check ``r``, and warn of losses below
        ``target_loss``. It waits for the device once per step; it reads nothing more.
    pool_replicas : bool, default True
        Average the loss over all processes of `torch.distributed`, if it is initialized, as their
        gradients are; False if they train different models.

    Attributes
    ----------
    n_resets : int
        How often a filter was restarted (see Notes). Reading it waits for the device.
    n_skipped : int
        Measurements skipped because they were not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and complex parameters.
    RuntimeError
        From `step`: without a loss, for one that is no real scalar, for sparse gradients, and
        (`NonFiniteGradientError`) for the tenth measurement in a row that is not finite.

    Warns
    -----
    UserWarning
        Once, when the loss is below ``target_loss``: such a step moves uphill.

    Notes
    -----
    *Cost.* Memory as Adam: two buffers of the size of the parameters (u = v + qH, which gives the
    step and spares a pass, and H), and six scalars per tensor. A step reads gradient, H and u for
    three inner products (‖H‖² and H · u follow from the last step's, and S from the three), and
    then reads parameters, gradient, u and H and writes all but the gradient: ten passes, where
    Adam has seven; a weight decay reads the parameters once more. All scalars of a param group
    are computed together, without a wait. ``torch.compile(optimizer.step)`` fuses each of the two
    parts into one kernel; it wants the loss as a tensor, lr too if a schedule changes it, and
    ``check_finite=False`` for a single graph.

    *Mixed precision.* Gradients must be unscaled and the loss too: ``scaler.step(optimizer,
    loss=loss)`` does so if ``loss`` was not multiplied by the scale. Clipping gradients changes H
    but not L, which is inconsistent: a larger ``r`` damps the step instead.

    *Ours.* The filter and both surrogates are the paper's. It leaves open that the surrogate need
    not be positive semidefinite: a filter with S ≤ R/2, or S that is not finite, is restarted with
    v = σH. Ours are also ``scope="group"``, ``first="exact"``, ``target_loss``, the threshold
    ``eps``, which the published code has at 1e-9 (a loss of about 1e-18), and the average over
    replicas. A tensor without a gradient leaves a group's filter as it is and is not moved by it.

    References
    ----------
    "KOALA++: Efficient Kalman-Based Optimization of Neural Networks with Gradient-Covariance
    Products", NeurIPS 2025.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import KoalaPP
    >>> generator = torch.Generator().manual_seed(0)
    >>> inputs = torch.randn(256, 8, generator=generator)
    >>> targets = inputs @ torch.arange(8.0)
    >>> model = torch.nn.Linear(8, 1)
    >>> optimizer = KoalaPP(model.parameters(), lr=1.0, sigma=1.0, q=1.0, scope="group")
    >>> for _ in range(300):
    ...     batch = torch.randint(256, (32,), generator=generator)
    ...     optimizer.zero_grad()
    ...     loss = (model(inputs[batch]).squeeze(1) - targets[batch]).square().mean()
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
        sigma: float = 0.1,
        q: float = 0.1,
        r: Variance = None,
        alpha_r: float = 0.9,
        weight_decay: float = 0.0,
        symmetric: bool = True,
        scope: Literal["tensor", "group"] = "tensor",
        target_loss: float = 0.0,
        first: Literal["reference", "exact"] = "reference",
        eps: float = 1e-12,
        check_finite: bool = True,
        pool_replicas: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "sigma": sigma,
            "q": q,
            "r": r,
            "alpha_r": alpha_r,
            "weight_decay": weight_decay,
            "symmetric": symmetric,
            "scope": scope,
            "target_loss": target_loss,
            "first": first,
            "eps": eps,
            "check_finite": check_finite,
            "pool_replicas": check_choice("pool_replicas", pool_replicas, (False, True)),
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have settings of its own."""
        settings = self.defaults | param_group
        check_kalman_settings(settings)
        check_choice("symmetric", settings["symmetric"], (False, True))
        check_choice("first", settings["first"], ("reference", "exact"))
        super().add_param_group(param_group)
        check_real(self)

    @property
    def n_resets(self) -> int:
        """How often a filter was restarted."""
        total = 0.0
        for group in self.param_groups:
            counts = [float(self.state[p]["resets"]) for p in group["params"] if p in self.state]
            total += sum(counts) if group["scope"] == "tensor" else max(counts, default=0.0)
        return int(total)

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
        rows = [Row(group, [], [], [], [], []) for group in self.param_groups]
        for row in rows:
            self._init_group(*row)
        rows = [row for row in rows if row.params]
        if loss is None and is_only_an_initialization(self):
            return None
        device = rows[0].params[0].device if rows else torch.device("cpu")
        measured = measure("KOALA++", loss, loss_sq, device, self.defaults["pool_replicas"])
        known = [(row, of_tensors(row), inner_products_of(row)) for row in rows]
        variances = [
            variance(row.group, pooled(row.group, each).R, measured) for row, each, _ in known
        ]
        checked = [
            (row.group, row.grads, products, R)
            for (row, _, products), R in zip(known, variances, strict=True)
            if row.group["check_finite"]
        ]
        verdict = accept_measurement(self, measured, checked) if checked else "use"
        if verdict == "skip":
            return loss
        for (row, each, products), R in zip(known, variances, strict=True):
            if verdict == "overflow":
                each = clear_overflow(row, each)
                products = inner_products_of(row)
            update(row, turn(row, each, products, R, measured.loss))
        return loss

    # torch.compile knows a method of this name and signature, and runs it as it is.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        us: list[Tensor],
        Hs: list[Tensor],
        scalars: list[Tensor],
    ) -> None:
        for p in with_gradients(self, group, params, grads):
            us.append(buffer(self, p, "u"))
            Hs.append(buffer(self, p, "H"))
            state = self.state[p]
            if "step" not in state:
                start_filter(state, p, Filter._fields)
            scalars.extend(state[name] for name in Filter._fields)

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
