"""Multi-shift stochastic reconfiguration as a preconditioner of NetKet's VMC driver."""

from __future__ import annotations

from typing import Any, Literal

from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

from thalweg.curvature.filtered_solves import MODES, Mode
from thalweg.curvature.multi_shift import MSSRResult, ms_sr_direction

# The gradient of the energy is twice the force Aᴴy, and what SR makes of it twice δ.
GRADIENT_OVER_FORCE = 2.0


class MSSRPreconditioner:
    """Precondition NetKet's energy gradient by multi-shift stochastic reconfiguration.

    An instance goes wherever NetKet takes ``nk.optimizer.SR``:
    ``nk.driver.VMC(hamiltonian, optimizer, variational_state=vs, preconditioner=...)``. With one
    given shift it returns what SR returns at this ``diag_shift``.

    Parameters
    ----------
    hamiltonian : netket operator
        The driver's: the gradient that NetKet passes does not tell the local energies, without
        which no sample can judge a shift.
    n_solves, mode, shifts
        As in `ms_sr_direction`.
    holomorphic : bool, default False
        Say that ψ is holomorphic in its complex parameters, as for ``SR(holomorphic=True)``.
    max_norm : float > 0, optional
        Cap on ‖Aδ‖, as in `MultiShiftSR`.
    chunk_size : int, optional
        Samples whose log-derivatives NetKet computes at once.
    seed : int, default 0
        Of the random splits.

    Attributes
    ----------
    last : MSSRResult or None
        What the last call has found.

    Raises
    ------
    MissingExtraError
        If NetKet is not installed.
    TypeError, ValueError
        For an argument that is not as described; when called, for a variational state that is not
        sampled (`FullSumState` knows the population: there is nothing to filter), and what
        `ms_sr_direction` raises.

    Notes
    -----
    *Cost.* That of `ms_sr_direction`, and local energies once more, as the driver does not pass
    its own. Markov chains are not split between folds; where there are fewer of them than folds
    they are cut into consecutive pieces. Arrays are shared between JAX and torch, not copied.

    The gradient of the energy is twice the force Aᴴy, and the result, like SR's, is twice δ: halve
    the step size of `MultiShiftSR`.

    References
    ----------
    "Multi-shift stochastic reconfiguration", NeurIPS 2026.
    F. Vicentini et al., "NetKet 3: machine learning toolbox for many-body quantum systems", SciPost
    Physics Codebases 2022.

    Examples
    --------
    >>> import netket as nk  # doctest: +SKIP
    >>> hilbert = nk.hilbert.Spin(0.5, 10)  # doctest: +SKIP
    >>> H = nk.operator.Ising(hilbert, nk.graph.Chain(10), h=1.0)  # doctest: +SKIP
    >>> vs = nk.vqs.MCState(
    ...     nk.sampler.MetropolisLocal(hilbert), nk.models.RBM(), n_samples=512
    ... )  # doctest: +SKIP
    >>> driver = nk.driver.VMC(
    ...     H,
    ...     nk.optimizer.Sgd(0.05),
    ...     variational_state=vs,
    ...     preconditioner=MSSRPreconditioner(H),
    ... )  # doctest: +SKIP
    >>> driver.run(100)  # doctest: +SKIP
    """

    last: MSSRResult | None = None

    def __init__(
        self,
        hamiltonian: Any,
        *,
        n_solves: int = 5,
        mode: Mode = "kfold",
        shifts: Literal["auto", "gcv"] | list[float] = "auto",
        holomorphic: bool = False,
        max_norm: float | None = None,
        chunk_size: int | None = None,
        seed: int = 0,
    ) -> None:
        with requires("netket"):
            import netket as nk
        if not isinstance(hamiltonian, nk.operator.AbstractOperator):
            raise TypeError(
                f"hamiltonian must be a NetKet operator, got {type(hamiltonian).__name__}"
            )
        self.hamiltonian = hamiltonian
        self.n_solves = check_integer("n_solves", n_solves, at_least=1)
        self.mode = check_choice("mode", mode, MODES)
        self.shifts = shifts
        self.holomorphic = check_choice("holomorphic", holomorphic, (False, True))
        self.max_norm = None if max_norm is None else check_number("max_norm", max_norm, above=0)
        self.chunk_size = (
            None if chunk_size is None else check_integer("chunk_size", chunk_size, at_least=1)
        )
        self._generator = torch.Generator().manual_seed(check_integer("seed", seed, at_least=0))

    def __call__(
        self, vstate: Any, gradient: Any, step: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Return the preconditioned gradient, a PyTree like the parameters.

        Parameters
        ----------
        vstate : netket.vqs.MCState
        gradient : PyTree
            Read for its structure only.
        step : int, optional
            Not used: shifts follow the batch and not a schedule.
        """
        import jax.numpy as jnp
        import netket as nk
        from jax.flatten_util import ravel_pytree

        if not isinstance(vstate, nk.vqs.MCState):
            raise TypeError(
                f"vstate must be a netket.vqs.MCState, got {type(vstate).__name__}: without "
                "sampling there is no noise to filter, use netket.optimizer.SR"
            )
        jac, holomorphic = self._log_derivatives(vstate)
        # NetKet wraps the array since 3.20.
        e_loc = _to_torch(jnp.asarray(vstate.local_estimators(self.hamiltonian))).flatten()
        self.last = ms_sr_direction(
            jac,
            e_loc,
            n_solves=self.n_solves,
            mode=self.mode,
            shifts=self.shifts,
            generator=self._generator,
            holomorphic=holomorphic,
            chain_id=None if vstate.sampler.is_exact else self._chains(vstate.samples.shape),
        )
        delta = self.last.delta
        if self.max_norm is not None and self.last.tangent_norm > self.max_norm:
            delta = delta * (self.max_norm / self.last.tangent_norm)
        tree, reassemble = vstate.parameters, _unchanged
        if not holomorphic:
            tree, reassemble = nk.jax.tree_to_real(vstate.parameters)
        vector, unravel = ravel_pytree(tree)
        return reassemble(unravel(_to_jax(GRADIENT_OVER_FORCE * delta).astype(vector.dtype)))

    def _log_derivatives(self, vstate: Any) -> tuple[Tensor, bool | None]:
        """Return O of the samples, and whether to solve for complex parameters."""
        import netket as nk

        samples = vstate.samples.reshape(-1, vstate.samples.shape[-1])
        arguments = (vstate._apply_fun, vstate.parameters)
        # Left open, NetKet would warn for complex parameters, and must be for real ones.
        holomorphic = self.holomorphic if nk.jax.tree_leaf_iscomplex(vstate.parameters) else None
        mode = nk.jax.jacobian_default_mode(
            *arguments, vstate.model_state, samples, holomorphic=holomorphic
        )
        jac = _to_torch(
            nk.jax.jacobian(
                *arguments,
                samples,
                vstate.model_state,
                mode=mode,
                dense=True,
                chunk_size=self.chunk_size,
            )
        )
        if mode == "complex":
            return torch.complex(jac[:, 0], jac[:, 1]), False
        return jac, True if mode == "holomorphic" else None

    def _chains(self, shape: tuple[int, ...]) -> Tensor:
        """Return the chain, or the consecutive piece of one, of each sample."""
        n_chains, length = shape[0], shape[1]
        pieces = 1 if n_chains >= self.n_solves else -(-self.n_solves // n_chains)
        piece = torch.arange(length) * min(pieces, length) // length
        return (torch.arange(n_chains)[:, None] * pieces + piece).flatten()


def _unchanged(tree: Any) -> Any:
    return tree


def _to_torch(array: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(array)


def _to_jax(tensor: Tensor) -> Any:
    import jax

    return jax.dlpack.from_dlpack(tensor.contiguous())
