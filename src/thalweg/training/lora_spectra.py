"""Spectral suppression: how much flatter the loss is in LoRA's B than in the full weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import linalg

from thalweg.common.checks import check_integer, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor, nn
    from torch.nn.attention import SDPBackend, sdpa_kernel

from thalweg.common.torch_gradients import whole
from thalweg.training.lora_drift import evaluating
from thalweg.training.lora_layers import LoRAMatrix, lora_matrices
from thalweg.training.tensor_lists import wide_dtype

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Values = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SuppressionReport:
    """The largest eigenvalues of two blocks of the Hessian, over all adapted matrices.

    Attributes
    ----------
    full_eigenvalues, adapter_eigenvalues : ndarray of shape (≤ k,)
        Of the blocks of all W and of all B, decreasing; fewer if a block has no more different
        ones. They are Ritz values: lower bounds of the first, second, ... eigenvalue.
    full_errors, adapter_errors : ndarray of the same shape
        Residuals: an eigenvalue is at most so far away.
    ratio : float
        The largest of B over the largest of W; NaN if the latter is not positive.
    predicted_ratio : float
        The largest ``s² ‖A‖₂²``, which bounds ``ratio`` from above. For A as PEFT draws it about
        s²/3 if r is much smaller than d_in: for s = 1 the curvature falls at least threefold.
    mean_ratio : float
        The mean of ``s² ‖A‖_F² / d_in``, r s² / (3 d_in) for A as PEFT draws it: what an average
        direction loses, and the traces with it.
    """

    full_eigenvalues: Values
    adapter_eigenvalues: Values
    full_errors: Values
    adapter_errors: Values
    ratio: float
    predicted_ratio: float
    mean_ratio: float

    def __str__(self) -> str:
        return (
            f"largest curvature in W {self.full_eigenvalues[0]:.4g}, in B "
            f"{self.adapter_eigenvalues[0]:.4g}: ratio {self.ratio:.4g}, "
            f"at most s²‖A‖² = {self.predicted_ratio:.4g}, on average {self.mean_ratio:.4g}"
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot both spectra."""
        with requires("plot"):
            import matplotlib.pyplot as plt
        ax = plt.subplots()[1] if ax is None else ax
        for label, values, errors in (
            ("W", self.full_eigenvalues, self.full_errors),
            ("B", self.adapter_eigenvalues, self.adapter_errors),
        ):
            ax.errorbar(np.arange(1, len(values) + 1), values, errors, marker="o", label=label)
        ax.set(xlabel="number", ylabel="eigenvalue of the Hessian", yscale="log")
        ax.legend()
        return ax


def spectral_suppression(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    *,
    adapter: str = "default",
    k: int = 5,
    iters: int = 20,
    generator: torch.Generator | None = None,
) -> SuppressionReport:
    r"""Compare the curvature of the loss in the adapted weights W with that in LoRA's B.

    .. math:: \nabla^2_B = s^2 (I \otimes A) \, \nabla^2_W \, (I \otimes A^\top)

    since W is linear in B. A random A of rank r sees a fraction of the curvature, so that step
    sizes which are safe for full fine-tuning are overly cautious for B, unless s makes up for it.

    Parameters
    ----------
    model : nn.Module
        With adapters of PEFT (linear layers without DoRA) or `LoRALinear`; it is evaluated without
        dropout, and left as it was.
    loss_fn : callable
        ``loss_fn(model, batch)``, a differentiable scalar.
    batch : object
        Passed to ``loss_fn``.
    adapter : str, default "default"
        The name of PEFT's adapter.
    k : int ≥ 1, default 5
        Number of eigenvalues.
    iters : int ≥ k, default 20
        Lanczos steps, one Hessian-vector product each, for either block.
    generator : torch.Generator, optional
        Draws the first vectors, on the CPU.

    Returns
    -------
    SuppressionReport

    Raises
    ------
    TypeError
        If weights are quantized.
    ValueError
        If adapters are merged or missing, or the loss is not a finite scalar.

    Notes
    -----
    *Cost.* ``2 iters`` Hessian-vector products, two backward passes each, and ``iters`` vectors of
    the size of W. An eigenvalue that is repeated is seen once. Attention runs in PyTorch's plain
    implementation, as the fused ones have no second derivative.

    References
    ----------
    "LoRA-alpha", the paper on LoRA's scaling factor and its Signal-Drift framework, NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import LoRALinear, spectral_suppression
    >>> generator = torch.Generator().manual_seed(0)
    >>> layer = LoRALinear(torch.nn.Linear(64, 4), r=4, alpha=4, generator=generator)
    >>> x = torch.randn(256, 64, generator=generator)
    >>> report = spectral_suppression(
    ...     layer, lambda model, x: model(x).square().mean(), x, generator=generator
    ... )
    >>> report.ratio < report.predicted_ratio < 1
    True
    """
    check_integer("k", k, at_least=1)
    check_integer("iters", iters, at_least=k)
    matrices = lora_matrices(model, adapter)
    weights = [_weight(matrix) for matrix in matrices]
    factors = [matrix.B for matrix in matrices]
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    with (
        evaluating(model),
        _differentiable([*weights, *factors]),
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        loss = loss_fn(model, batch)
        if loss.ndim != 0:
            raise ValueError(f"loss_fn must return a scalar, got shape {tuple(loss.shape)}")
        check_number("loss_fn(model, batch)", loss.item())
        full, full_errors = _top_eigenvalues(loss, weights, k, iters, generator)
        adapted, adapted_errors = _top_eigenvalues(loss, factors, k, iters, generator)
    return SuppressionReport(
        full,
        adapted,
        full_errors,
        adapted_errors,
        ratio=float(adapted[0] / full[0]) if full[0] > 0 else math.nan,
        predicted_ratio=max(m.scale**2 * float(_norm(m, 2)) ** 2 for m in matrices),
        mean_ratio=float(
            np.mean([m.scale**2 * float(_norm(m, "fro")) ** 2 / m.A.shape[1] for m in matrices])
        ),
    )


def _weight(matrix: LoRAMatrix) -> Tensor:
    if matrix.merged:
        raise ValueError(f"model must not have merged adapters, {matrix.name!r} is merged")
    if matrix.weight is None or not matrix.weight.is_floating_point():
        raise TypeError(f"model must have weights of floating point, not so {matrix.name!r}")
    return matrix.weight


def _norm(matrix: LoRAMatrix, order: Any) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(whole(matrix.A.detach()).flatten(1).double(), order)
    return norm


@contextmanager
def _differentiable(tensors: Sequence[Tensor]) -> Iterator[None]:
    flags = [(tensor, tensor.requires_grad) for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor, flag in flags:
            tensor.requires_grad_(flag)


def _top_eigenvalues(
    loss: Tensor, parameters: Sequence[Tensor], k: int, iters: int, generator: torch.Generator
) -> tuple[Values, Values]:
    """Return the k largest Ritz values of the Hessian and their residuals."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
    device, dtype = parameters[0].device, wide_dtype(parameters[0])

    def product(vector: Tensor) -> Tensor:
        parts = torch.split(vector, [p.numel() for p in parameters])
        slope = sum(
            torch.sum(g * part.view_as(g)) for g, part in zip(gradients, parts, strict=True)
        )
        assert isinstance(slope, Tensor)
        if not slope.requires_grad:  # the gradient is constant
            return torch.zeros_like(vector)
        columns = torch.autograd.grad(slope, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([column.reshape(-1).to(device, dtype) for column in columns])

    n = sum(p.numel() for p in parameters)
    start = torch.randn(n, generator=generator, dtype=dtype).to(device)
    diagonal, off_diagonal = lanczos(product, start, min(iters, n))
    values, vectors = linalg.eigh_tridiagonal(diagonal, off_diagonal[:-1])
    errors = np.abs(off_diagonal[-1] * vectors[-1])
    return values[::-1][:k].astype(np.float64), errors[::-1][:k]


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, iters: int
) -> tuple[Values, Values]:
    """Return diagonal and off-diagonal of the tridiagonal matrix after m ≤ ``iters`` steps.

    All vectors are kept, and every new one is made orthogonal to them twice. Both results have
    length m; the last off-diagonal entry belongs to the residuals, and is 0 if the Krylov space is
    exhausted.
    """
    basis = [start / torch.linalg.vector_norm(start)]
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    largest = 0.0
    for _ in range(iters):
        image = product(basis[-1])
        diagonal.append(float(basis[-1] @ image))
        for _ in range(2):
            for vector in basis:
                image = image - (vector @ image) * vector
        norm = float(torch.linalg.vector_norm(image))
        largest = max(largest, abs(diagonal[-1]), norm)
        exhausted = norm <= 100 * torch.finfo(image.dtype).eps * largest
        off_diagonal.append(0.0 if exhausted else norm)
        if exhausted:
            break
        basis.append(image / norm)
    return np.array(diagonal), np.array(off_diagonal)
