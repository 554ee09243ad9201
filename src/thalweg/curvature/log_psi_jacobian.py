"""Log-derivatives of a wave function, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thalweg.common.checks import check_integer
from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor, nn
    from torch.func import functional_call, grad, vmap

ROWS_AT_ONCE = 64


def log_derivatives(model: nn.Module, *inputs: Tensor, chunk_size: int | None = None) -> Tensor:
    """Return the log-derivatives O of a network that computes log ψ, by ``vmap(grad)``.

    Parameters
    ----------
    model : Module
        Maps inputs, batch first, to log ψ of shape (N,), real or complex. Its trainable parameters
        are all real, or all complex with ψ holomorphic in them.
    *inputs : Tensor of shape (N, ...)
        What the module is called with: configurations, and whatever it is conditioned on.
    chunk_size : int, optional
        Samples at once, to bound the memory; all without it.

    Returns
    -------
    Tensor of shape (N, P)
        ``∂ log ψ(σᵢ)/∂θ``, with the columns in the order of ``model.parameters()``, as
        `MultiShiftSR` takes them; parameters with ``requires_grad=False`` have none. Complex if
        log ψ is.

    Raises
    ------
    ValueError
        If the module has no trainable parameter, or real and complex ones, or its output has
        another shape.

    Notes
    -----
    *Cost.* One backward pass per sample, all of a chunk at once (two where a complex log ψ has real
    parameters), and N P numbers.

    Examples
    --------
    >>> import torch
    >>> from thalweg.curvature import log_derivatives
    >>> class Product(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.a = torch.nn.Parameter(torch.zeros(3))
    ...     def forward(self, spins):
    ...         return spins @ self.a
    >>> log_derivatives(Product(), torch.tensor([[1.0, -1.0, 1.0]]))
    tensor([[ 1., -1.,  1.]])
    """
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    rest = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    if not params:
        raise ValueError("model must have a parameter that requires a gradient")
    holomorphic = check_alike(list(params.values()))
    if chunk_size is not None:
        check_integer("chunk_size", chunk_size, at_least=1)
    with torch.no_grad():
        first = model(*(x[:1] for x in inputs))
    if first.shape != (1,):
        raise ValueError(f"model must return log ψ of shape (N,), got {tuple(first.shape)} for N=1")

    def part(name: str) -> Any:
        def of_sample(params: dict[str, Tensor], *sample: Tensor) -> Tensor:
            state = (params, rest, dict(model.named_buffers()))
            out: Tensor = functional_call(model, state, tuple(x[None] for x in sample))[0]
            return out if not out.is_complex() else out.real if name == "real" else out.imag

        return vmap(grad(of_sample), (None, *(0,) * len(inputs)), chunk_size=chunk_size)

    def rows(name: str) -> Tensor:
        return _flat([x.detach() for x in part(name)(params, *inputs).values()])

    if holomorphic:
        # torch's gradient of Re f is the conjugate of f' where f is holomorphic.
        return rows("real").conj().resolve_conj()
    return torch.complex(rows("real"), rows("imag")) if first.is_complex() else rows("real")


def jacobian_of_outputs(log_psi: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Return O from outputs log ψ(σᵢ) that carry their graph, shape (N, P)."""
    holomorphic = check_alike(params)
    if holomorphic:
        return _rows_of(log_psi.real, params).conj().resolve_conj()
    if log_psi.is_complex():
        return torch.complex(_rows_of(log_psi.real, params), _rows_of(log_psi.imag, params))
    return _rows_of(log_psi, params)


def _rows_of(outputs: Tensor, params: Sequence[Tensor]) -> Tensor:
    blocks = []
    units = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
    for some in torch.split(units, ROWS_AT_ONCE):
        grads = torch.autograd.grad(
            outputs,
            params,
            some,
            retain_graph=True,
            is_grads_batched=True,
            materialize_grads=True,
            allow_unused=True,
        )
        blocks.append(_flat(grads))
    return torch.cat(blocks)


def _flat(grads: Sequence[Tensor]) -> Tensor:
    dtype = grads[0].dtype
    for each in grads[1:]:
        dtype = torch.promote_types(dtype, each.dtype)
    return torch.cat([g.reshape(len(g), -1).to(dtype) for g in grads], dim=1)


def check_alike(params: Sequence[Tensor]) -> bool:
    """Return whether the parameters are complex; a mixture is refused."""
    kinds = {p.is_complex() for p in params}
    if len(kinds) > 1:
        raise ValueError("params must be all real or all complex, got both")
    return kinds == {True}
