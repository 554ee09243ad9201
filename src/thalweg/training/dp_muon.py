"""DP-Muon: Muon for private gradients, with an optional correction of the noise's bias."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.common.torch_gradients import value_of
from thalweg.training.gradients import accept_rows, check_lr, rows_of
from thalweg.training.muon import Muon
from thalweg.training.muon_steps import adamw_step, matrix_batches, muon_step
from thalweg.training.orthogonalizers import orthogonalize, step_dtype
from thalweg.training.tensor_lists import move


class DPMuonOptimizer(Muon):
    r"""Descend along the matrix sign of the momentum of private gradients; Adam for the rest.

    .. math::
        M_t = \mu M_{t-1} + \tilde G_t, \qquad W_t = W_{t-1} - \eta_l \, \mathrm{msign}(M_t)

    where :math:`\tilde G` is the mean clipped gradient with noise, as `DPGradient` or Opacus'
    ``DPOptimizer`` leave it in ``.grad``. All of this is post-processing and costs no privacy. The
    matrix sign gives signal and noise the same spectral norm, 1, whatever their ratio, so the step
    size that transfers over width is :math:`\eta_l \propto \sqrt{m/n}`: give it the groups of
    ``dp_mup_param_groups(optimizer="muon")``.

    With ``bias_correction`` the step is :math:`2 \, \mathrm{msign}(M) - \tfrac12
    (\mathrm{msign}(M + v\Xi) + \mathrm{msign}(M - v\Xi))`, where Ξ is standard normal and v the
    standard deviation of the noise in M. The sign is not linear, so zero-mean noise biases it, to
    leading order by v²/2 times its Laplacian; the probes estimate that bias and subtract it.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups. A group may have settings of its own; ``use_muon=False`` gives
        all of it to Adam, and so do tensors with less than two dimensions.
    lr : float or 0-dimensional Tensor ≥ 0, default 0.02
        η. A group with ``use_muon=False`` has it for Adam.
    momentum : float in [0, 1), default 0.95
        μ.
    nesterov : bool, default False
        Take msign(μM + G̃).
    ns_steps : int ≥ 1, default 5
        Newton-Schulz steps of the sign, see `matrix_sign`.
    bias_correction : bool, default False
        Subtract the estimated bias, for twice as much again as the step costs.
    noise_std : float ≥ 0, optional
        τ = σC/B, the noise on each coordinate of the gradient; needed for ``bias_correction``.
        `dp_mup_param_groups` puts it into the groups.
    fallback_betas : pair of floats in [0, 1), default (0.9, 0.999)
        Adam's.
    check_finite : bool, default True
        Skip steps whose gradient is not finite. This reads the gradient once more and waits for
        the device.
    generator : torch.Generator, optional
        What the probes are drawn from, on the device of the parameters. It is not in the state:
        save its own with the checkpoint.

    Attributes
    ----------
    n_skipped : int
        Steps skipped because a gradient was not finite.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, and for complex parameters.
    RuntimeError
        From `step`: for sparse gradients, and for sharded ones with ``bias_correction``.
    NonFiniteGradientError
        From `step`: after ten gradients in a row that were not finite.

    Notes
    -----
    *Cost.* That of `Muon`: one buffer of the size of the matrices, 5 (4m²n + 2m³) multiplications
    and additions per m × n matrix. Three times as many with ``bias_correction``.

    *Ours.* M is kept as a moving average, (1 - μ) times the sum above, which has the same sign.
    One antithetic pair of probes per step.

    References
    ----------
    "DP-μP: Width transfer of hyperparameters under differential privacy", NeurIPS 2026.
    J. Kim, C. Fan, "DP-Muon: Differentially Private Optimization via Matrix-Orthogonalized
    Momentum", 2026 (the algorithm, and the bias correction).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import DPGradient, DPMuonOptimizer
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Linear(8, 8, bias=False)
    >>> generator = torch.Generator().manual_seed(0)
    >>> private = DPGradient(
    ...     model, torch.nn.functional.mse_loss, noise_multiplier=1.0, max_grad_norm=1.0,
    ...     generator=generator,
    ... )
    >>> optimizer = DPMuonOptimizer(model.parameters(), lr=0.02)
    >>> x = torch.randn(256, 8, generator=generator)
    >>> for _ in range(100):
    ...     _ = private(x, x.flip(1), expected_batch_size=256)
    ...     optimizer.step()
    >>> bool((model(x) - x.flip(1)).square().mean() < 0.05)
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = False,
        ns_steps: int = 5,
        bias_correction: bool = False,
        *,
        noise_std: float | None = None,
        fallback_betas: tuple[float, float] = (0.9, 0.999),
        check_finite: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        self._dp_defaults = {"bias_correction": bias_correction, "noise_std": noise_std}
        self.generator = generator
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            fallback_betas=fallback_betas,
            check_finite=check_finite,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, or two if it has matrices and others."""
        settings = self._dp_defaults | param_group
        check_choice("bias_correction", settings["bias_correction"], (False, True))
        if settings["noise_std"] is not None:
            check_number("noise_std", settings["noise_std"], at_least=0)
        elif settings["bias_correction"] and settings.get("use_muon", True):
            raise ValueError("noise_std must be given for bias_correction, got None")
        check_lr((self.defaults | settings)["lr"])
        super().add_param_group(settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step along the private gradients in ``.grad``.

        Parameters
        ----------
        closure : callable, optional
            Computes the gradients and returns the loss; called once, with gradients enabled.

        Returns
        -------
        The closure's value, or None.
        """
        loss = value_of(closure)
        rows = rows_of(self, 5)
        if not accept_rows(self, rows):
            return loss
        for group, params, grads, averages, squares, steps in rows:
            if not group["use_muon"]:
                if params:
                    adamw_step(group, params, grads, averages, squares, steps)
            elif group["bias_correction"]:
                for row in zip(params, grads, averages, steps, strict=True):
                    _corrected_step(group, *row, self.generator)
            else:
                for lists in matrix_batches(params, grads, averages):
                    muon_step(group, *lists)
        return loss

    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        super()._init_group(group, params, grads, averages, squares, steps)
        if not (group["use_muon"] and group["bias_correction"]):
            return
        for p in params:
            if hasattr(p, "full_tensor"):
                raise RuntimeError("bias_correction does not support sharded parameters")
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["step"] = state["step"].to(p.device)
            steps.append(state["step"])


# Generators are none of torch.compile's business.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _corrected_step(
    group: dict[str, Any],
    p: Tensor,
    grad: Tensor,
    average: Tensor,
    step: Tensor,
    generator: torch.Generator | None,
) -> None:
    """Update M ← μM + (1-μ)G and step along msign(M) minus its estimated bias."""
    mu, ns_steps = group["momentum"], group["ns_steps"]
    std = momentum_noise(group["noise_std"], mu, step, group["nesterov"])
    step.add_(1)
    average.lerp_(grad, 1 - mu)
    ahead = average.lerp(grad, 1 - mu) if group["nesterov"] else average
    probe = torch.empty_like(ahead).normal_(generator=generator) * std.to(ahead.dtype)
    signs, up, down = (_sign(matrix, ns_steps) for matrix in (ahead, ahead + probe, ahead - probe))
    move([p], [2 * signs - (up + down) / 2], -group["lr"])


def momentum_noise(tau: float, mu: float, step: Tensor, nesterov: bool) -> Tensor:
    """Return v, the noise in M (or in μM + (1-μ)G) once ``step`` + 1 gradients are in.

    Without Nesterov v² = τ² (1-μ)/(1+μ) (1 - μ²ᵗ).
    """
    share = (1 - mu) / (1 + mu)
    before = share * (1 - mu ** (2 * step))  # of M before the new gradient
    old, new = (mu**2, 1 - mu**2) if nesterov else (mu, 1 - mu)
    return tau * (old**2 * before + new**2).sqrt()


def _sign(matrix: Tensor, ns_steps: int) -> Tensor:
    flat = matrix.flatten(1)[None]
    return orthogonalize(flat, "ns5", ns_steps, step_dtype(flat))[0].view_as(matrix)
