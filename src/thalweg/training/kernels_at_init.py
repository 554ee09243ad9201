"""What a network's kernels say about how it will train: its tangent kernel and its features'."""

from __future__ import annotations

from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.func import functional_call, grad, vmap


def tangent_kernel(model: nn.Module, inputs: Tensor) -> Tensor:
    r"""Return the empirical neural tangent kernel, averaged over outputs, of shape (n, n).

    ``Θ(x, x') = (1/c) Σ_k ∇f_k(x) · ∇f_k(x')`` over the c outputs, with gradients by the trainable
    parameters. O(n c P) time and O(n P) memory for P parameters.
    """
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        outputs: int = model(inputs[:1]).flatten(1).shape[1]

    def output(values: dict[str, Tensor], x: Tensor, k: Tensor) -> Tensor:
        result: Tensor = functional_call(model, (values, fixed, buffers), (x[None],))
        chosen: Tensor = result.flatten().index_select(0, k).sum()
        return chosen

    gradients = vmap(grad(output), in_dims=(None, 0, None))
    kernel: Tensor = inputs.new_zeros((len(inputs), len(inputs)))
    for k in range(outputs):
        of_output = gradients(parameters, inputs, torch.tensor([k], device=inputs.device))
        for part in of_output.values():
            rows: Tensor = part.flatten(1)
            kernel += rows @ rows.T
    return kernel / outputs


def leading_eigenvalues(kernel: Tensor, k: int) -> Tensor:
    """Return the k largest eigenvalues as shares of the trace, of shape (min(k, n),), descending.

    In float64: small ones would drown in the rounding of large ones.
    """
    eigenvalues = torch.linalg.eigvalsh(kernel.double()).flip(0).clamp_min(0)
    shares: Tensor = eigenvalues / eigenvalues.sum()
    return shares[:k]


def kernel_target_alignment(kernel: Tensor, targets: Tensor) -> float:
    """Return the centered alignment ``⟨K, Y Yᵀ⟩ / (‖K‖ ‖Y Yᵀ‖)`` of a kernel (n, n) with targets.

    Parameters
    ----------
    kernel : Tensor of shape (n, n)
    targets : Tensor of shape (n, c)
    """
    Y = targets.double() - targets.double().mean(0)
    K = kernel.double()
    K = K - K.mean(0)
    K = K - K.mean(1, keepdim=True)
    L = Y @ Y.T
    return float((K * L).sum() / (K.norm() * L.norm()))


def neighbor_overlap(X: Tensor, Y: Tensor, k: int) -> float:
    """Return the mean share of the k nearest rows that a row has in both representations."""
    same = torch.zeros(len(X), len(X), dtype=torch.int64, device=X.device)
    for rows in (X, Y):
        distances = torch.cdist(rows.double(), rows.double())
        distances.fill_diagonal_(torch.inf)
        same.scatter_add_(1, distances.topk(k, largest=False).indices, torch.ones_like(same)[:, :k])
    return float((same == 2).sum(1).double().mean() / k)
