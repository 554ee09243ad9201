"""Stochastic reconfiguration with several shifts as a torch optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, cast

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.batch_checks import as_tensor, check_shifts
from thalweg.curvature.filtered_solves import MODES, Mode
from thalweg.curvature.log_psi_jacobian import check_alike, jacobian_of_outputs
from thalweg.curvature.multi_shift import MSSRResult, ms_sr_direction
from thalweg.curvature.tangent_kernel import group_means

# One solve serves all parameters: these settings are the same for all param groups.
SHARED = ("n_solves", "mode", "shifts", "max_norm", "momentum", "seed")


class MultiShiftSR(torch.optim.Optimizer):
    r"""Descend the energy of a neural quantum state by multi-shift stochastic reconfiguration.

    .. math:: \delta_t = \mu \delta_{t-1} + \text{MS-SR}(O, e - O \mu \delta_{t-1}), \qquad
              \theta \leftarrow \theta - \mathrm{lr}\, \delta_t

    where MS-SR is the direction of `ms_sr_direction`: an average of ridge solves whose diagonal
    shifts are found from the batch. With μ = 0 it is stochastic reconfiguration; with μ > 0 the
    momentum of SPRING, which keeps of the last direction what the batch does not see.

    Parameters
    ----------
    params : iterable of Tensor, of (name, Tensor), or of dict
        Parameters or param groups, all real or all complex (then ψ is holomorphic in them). A group
        may have an lr of its own.
    lr : float or 0-dimensional Tensor ≥ 0, default 0.02
        Imaginary time per step. The norm of δ varies a lot with the shift, so tune lr anew when you
        come from a fixed one. The energy falls if it is well below the inverse of the largest
        excitation energy in the tangent space.
    n_solves : int ≥ 1, default 5
        M; a step needs at least 8 M samples.
    mode : {"kfold", "shards", "shared"}, default "kfold"
    shifts : "auto", "gcv" or list of float, default "auto"
        As in `ms_sr_direction`; a list of one is SR at a fixed shift, or SPRING with momentum.
    max_norm : float > 0, optional
        Cap on ‖Aδ‖, the root mean square change of log ψ on the batch at lr = 1: longer directions
        are scaled down.
    momentum : float in [0, 1), default 0
        μ.
    seed : int, default 0
        Of the random splits. Their state is part of the state dict.

    Attributes
    ----------
    last : MSSRResult or None
        What the last step has found: shifts, risk curve, effective dimension. Not in the state
        dict; the shifts are.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described; from `step` what `ms_sr_direction` raises, and if
        the log-derivatives do not fit the parameters.

    Notes
    -----
    *Cost.* That of `ms_sr_direction`, which the Gram matrix of the log-derivatives dominates. One
    buffer of the size of the parameters with momentum. ``step(closure)`` makes one backward pass
    over the whole batch per sample; ``step(log_psi_jac=log_derivatives(...), local_energy=...)`` is
    far cheaper.

    *Ours.* Momentum and the norm cap are not in the paper's abstract; they are SPRING's.

    References
    ----------
    "Multi-shift stochastic reconfiguration", NeurIPS 2026.
    G. Goldshlager, N. Abrahamsen, L. Lin, "A Kaczmarz-inspired approach to accelerate the
    optimization of neural network wavefunctions", Journal of Computational Physics 2024 (SPRING).

    Examples
    --------
    The transverse-field Ising ring of six spins, with samples drawn exactly:

    >>> import torch
    >>> from thalweg.curvature import MultiShiftSR, log_derivatives
    >>> from thalweg.tasks import RBM, enumerate_exactly, ising_chain
    >>> ring, generator = ising_chain(6), torch.Generator().manual_seed(0)
    >>> matrix, spins = ring.matrix(), torch.as_tensor(ring.states()).double()
    >>> psi = RBM(6, 6, generator=generator)
    >>> optimizer = MultiShiftSR(psi.parameters(), lr=0.1)
    >>> for _ in range(40):
    ...     exact = enumerate_exactly(matrix, psi(spins).detach(), spins)
    ...     drawn = exact.draw(200, generator)
    ...     energy = optimizer.step(
    ...         log_psi_jac=log_derivatives(psi, spins[drawn]),
    ...         local_energy=exact.local_energy[drawn],
    ...     )
    >>> lowest = ring.ground_state()[0]
    >>> abs(exact.energy - lowest) < 1e-3 * abs(lowest)
    True
    """

    last: MSSRResult | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.02,
        *,
        n_solves: int = 5,
        mode: Mode = "kfold",
        shifts: Literal["auto", "gcv"] | list[float] = "auto",
        max_norm: float | None = None,
        momentum: float = 0.0,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "n_solves": n_solves,
            "mode": mode,
            "shifts": shifts if isinstance(shifts, str) else [float(each) for each in shifts],
            "max_norm": max_norm,
            "momentum": momentum,
            "seed": seed,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, which may have an lr of its own.

        Raises
        ------
        TypeError, ValueError
            If a setting is not as described, or differs from the other groups' where one solve
            serves all, or if real and complex parameters come together.
        """
        settings = self.defaults | param_group
        for name in SHARED:
            if settings[name] != self.defaults[name]:
                raise ValueError(
                    f"{name} must be the same for all param groups, {self.defaults[name]!r}, "
                    f"got {settings[name]!r}"
                )
        _check_settings(settings)
        super().add_param_group(param_group)
        try:
            check_alike([p for group in self.param_groups for p in group["params"]])
        except ValueError:
            self.param_groups.pop()
            raise
        if len(self.param_groups) == 1:
            generator = torch.Generator().manual_seed(settings["seed"])
            self.param_groups[0] |= {"rng_state": generator.get_state(), "last_shifts": []}

    @property
    def last_shifts(self) -> list[float]:
        """The shifts of the last step, in units of OᴴO/N."""
        return cast(list[float], self.param_groups[0]["last_shifts"])

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: Callable[[], tuple[Tensor, Tensor]] | None = None,
        *,
        log_psi_jac: Tensor | None = None,
        local_energy: Tensor | None = None,
        sample_weight: Tensor | None = None,
        chain_id: Tensor | None = None,
        system_id: Tensor | None = None,
    ) -> Tensor:
        """Make one step of imaginary time, from a closure or from log-derivatives.

        Parameters
        ----------
        closure : callable, optional
            Returns log ψ of N samples, with its graph, and their local energies, both of shape
            (N,).
        log_psi_jac : Tensor of shape (N, P), optional
            Log-derivatives, as `log_derivatives` computes them: one column for every entry of the
            parameters that require a gradient, in the order of the param groups.
        local_energy : Tensor of shape (N,), optional
        sample_weight, chain_id, system_id : Tensor of shape (N,), optional
            As in `ms_sr_direction`.

        Returns
        -------
        Tensor
            The mean local energy before the step, over all systems; real.

        Raises
        ------
        TypeError, ValueError
            If not exactly one of closure and the two tensors is given, or they do not fit.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        jac, e_loc = _batch(closure, log_psi_jac, local_energy, params)
        n_columns = sum(p.numel() for p in params)
        if jac.ndim != 2 or jac.shape[1] != n_columns:
            raise ValueError(
                f"log_psi_jac must have shape (N, {n_columns}), one column for every entry of the "
                f"parameters, got {tuple(jac.shape)}"
            )
        delta = self._direction(
            jac, e_loc, params, sample_weight=sample_weight, chain_id=chain_id, system_id=system_id
        )
        pieces = dict(zip(params, torch.split(delta, [p.numel() for p in params]), strict=True))
        for group in self.param_groups:
            for p in group["params"]:
                if p in pieces:
                    piece = pieces[p].reshape(p.shape)
                    self._remember(group, p, piece)
                    p.sub_((group["lr"] * piece).to(p.device, p.dtype))
        if sample_weight is None:
            return e_loc.mean().real
        return (sample_weight.to(e_loc.device) * e_loc).sum().real

    def _direction(self, jac: Tensor, e_loc: Tensor, params: list[Tensor], **ids: Any) -> Tensor:
        """Return μδ + MS-SR(O, e - Oμδ), within the norm cap."""
        shared = self.param_groups[0]
        generator = torch.Generator()
        generator.set_state(shared["rng_state"].cpu())
        before = self._momentum(params, jac)
        if before is not None:
            e_loc = e_loc - _times(jac, before)
        self.last = ms_sr_direction(
            jac,
            e_loc,
            n_solves=shared["n_solves"],
            mode=shared["mode"],
            shifts=shared["shifts"],
            generator=generator,
            holomorphic=params[0].is_complex() if jac.is_complex() else None,
            **ids,
        )
        shared["rng_state"] = generator.get_state()
        shared["last_shifts"] = self.last.shifts.tolist()
        delta = self.last.delta
        norm = self.last.tangent_norm
        if before is not None:
            delta = delta + before.to(delta)
            norm = _tangent_norm(_times(jac, delta), ids["sample_weight"], ids["system_id"])
        cap = shared["max_norm"]
        return delta if cap is None or norm <= cap else delta * (cap / norm)

    def _momentum(self, params: list[Tensor], jac: Tensor) -> Tensor | None:
        """Return μδ of the last step; None if there is none."""
        mu = self.param_groups[0]["momentum"]
        if mu == 0 or not any("direction" in self.state[p] for p in params):
            return None
        parts = [self.state[p].get("direction", torch.zeros_like(p)).flatten() for p in params]
        wide = torch.promote_types(jac.real.dtype, torch.float32)
        before = torch.cat([p.to(jac.device, torch.promote_types(p.dtype, wide)) for p in parts])
        return before.mul_(mu)

    def _remember(self, group: dict[str, Any], p: Tensor, piece: Tensor) -> None:
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32)
        state["step"] += 1
        if group["momentum"] > 0:
            state["direction"] = piece.to(p.device, copy=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned.

        Raises
        ------
        ValueError
            If the state comes from another optimizer or from other param groups.
        """
        groups = state_dict["param_groups"]
        if not groups or "rng_state" not in groups[0]:
            raise ValueError("state_dict must come from MultiShiftSR, got one without rng_state")
        super().load_state_dict(state_dict)
        # torch casts state to the dtype of its parameter; directions are at least float32.
        saved_ids = itertools.chain.from_iterable(group["params"] for group in groups)
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved_ids, params, strict=True):
            saved = state_dict["state"].get(index, {})
            if "direction" in saved:
                self.state[p]["direction"] = saved["direction"].to(p.device, copy=True)


def _check_settings(settings: dict[str, Any]) -> None:
    lr = settings["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr must hold one number, got a tensor of shape {tuple(lr.shape)}")
    check_number("lr", float(lr) if isinstance(lr, Tensor) else lr, at_least=0)
    check_integer("n_solves", settings["n_solves"], at_least=1)
    check_choice("mode", settings["mode"], MODES)
    if isinstance(settings["shifts"], str):
        check_choice("shifts", settings["shifts"], ("auto", "gcv"))
    else:
        check_shifts("shifts", settings["shifts"], torch.device("cpu"))
    if settings["max_norm"] is not None:
        check_number("max_norm", settings["max_norm"], above=0)
    check_number("momentum", settings["momentum"], at_least=0, below=1)
    check_integer("seed", settings["seed"], at_least=0)


def _batch(
    closure: Callable[[], tuple[Tensor, Tensor]] | None,
    log_psi_jac: Tensor | None,
    local_energy: Tensor | None,
    params: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """Return log-derivatives and local energies from whichever was given."""
    if (closure is None) == (log_psi_jac is None) or (log_psi_jac is None) != (
        local_energy is None
    ):
        raise TypeError("step takes either a closure, or both log_psi_jac and local_energy")
    if closure is None:
        return as_tensor("log_psi_jac", log_psi_jac), as_tensor("local_energy", local_energy)
    with torch.enable_grad():
        found = closure()
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError("closure must return log ψ of the samples and their local energies")
        log_psi, e_loc = found
        if log_psi.ndim != 1 or not log_psi.requires_grad:
            raise ValueError(
                "closure must return log ψ of shape (N,) with its graph, got "
                f"{tuple(log_psi.shape)}, requires_grad={log_psi.requires_grad}"
            )
        return jacobian_of_outputs(log_psi, params), as_tensor("local_energy", e_loc)


def _times(jac: Tensor, delta: Tensor) -> Tensor:
    """Return Oδ; a real δ may go with a complex O."""
    wide = torch.promote_types(jac.dtype, delta.dtype)
    if jac.is_complex() and not delta.is_complex():
        return torch.complex(jac.real.to(delta) @ delta, jac.imag.to(delta) @ delta)
    return jac.to(wide) @ delta.to(wide)


def _tangent_norm(change: Tensor, sample_weight: Any, system_id: Any) -> float:
    """Return the root mean square of Oδ about its mean in each system."""
    n = len(change)
    change = change.to(torch.promote_types(change.dtype, torch.float64))
    weight = torch.full((n,), 1 / n, dtype=torch.float64, device=change.device)
    if sample_weight is not None:
        weight = as_tensor("sample_weight", sample_weight).to(weight)
    label = torch.zeros(n, dtype=torch.int64, device=change.device)
    if system_id is not None:
        label = torch.unique(torch.as_tensor(system_id).to(label), return_inverse=True)[1]
    centered = change - group_means(change, weight, label)[label]
    return float((weight * centered.abs().square()).sum().sqrt())
