"""The sign of a matrix: the same singular vectors, and every singular value one."""

from __future__ import annotations

from typing import Any, Literal

from thalweg.common.checks import check_choice, check_integer
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

from thalweg.training.gradients import all_finite
from thalweg.training.tensor_lists import wide_dtype

Method = Literal["ns5", "svd", "polar"]
METHODS: tuple[Method, ...] = ("ns5", "svd", "polar")
# X ← aX + (bA + cA²)X with A = XXᵀ, and how often it is applied by default.
COEFFICIENTS = {"ns5": (3.4445, -4.7750, 2.0315), "polar": (1.5, -0.5, 0.0)}
STEPS = {"ns5": 5, "polar": 8, "svd": 1}
# Half of the entries of a symmetric product are known from the others. In blocks of this many
# rows, leaving them out pays on a CPU; smaller blocks keep fewer cores busy.
BLOCK_ROWS = 256
# A CPU multiplies smaller matrices faster in float32, whatever it can do in bfloat16.
SMALL_ROWS = 128
CPU_CAPABILITIES: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
CPU_MULTIPLIES_BFLOAT16 = any(
    CPU_CAPABILITIES.get(name, False) for name in ("avx512_bf16", "amx_bf16", "sve_bf16")
)


def matrix_sign(matrices: Tensor, method: Method = "ns5", *, steps: int | None = None) -> Tensor:
    r"""Compute :math:`\mathrm{msign}(M) = UV^\top` for :math:`M = U \Sigma V^\top`.

    It is the direction of Muon: the matrix of spectral norm at most one with the largest inner
    product with M, as the coordinate-wise sign is for the largest-entry norm.

    Parameters
    ----------
    matrices : Tensor of shape (..., m, n)
        Real floating-point matrices of any rank; all of a batch are worked on together.
    method : {"ns5", "svd", "polar"}, default "ns5"
        - "ns5": ``steps`` quintic steps X ← aX + (bA + cA²)X with A = XXᵀ, from M / ‖M‖_F. Only
          products of matrices, and fast, but inexact: singular values above 0.002 ‖M‖_F end in
          [0.68, 1.21], smaller ones below.
        - "polar": ``steps`` cubic steps X ← 3/2 X - 1/2 XXᵀX, which converge to the sign, but
          only double a small singular value in about two steps.
        - "svd": exact. Singular values below the rounding error of the largest count as zero and
          stay zero.
    steps : int ≥ 1, optional
        By default 5 for "ns5" and 8 for "polar"; "svd" ignores it.

    Returns
    -------
    Tensor of shape (..., m, n)
        In the dtype and on the device of ``matrices``. The sign of a zero matrix is zero.

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described, or entries that are not finite.

    Notes
    -----
    *Cost.* With m ≤ n, a step takes 4m²n + 2m³ multiplications and additions for "ns5" (up to a
    fifth less on a CPU, which leaves half of the symmetric products out) and 4m²n for "polar".
    Working memory: mn + 2m² numbers for every matrix of the batch.

    *Ours.* M is divided by its Frobenius norm without the customary 10⁻⁷ beside it, so the result
    does not depend on the scale of M.

    References
    ----------
    "Sign-Based Optimizers Are Effective Under Heavy-Tailed Noise", NeurIPS 2026.
    K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (the quintic
    coefficients).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import matrix_sign
    >>> matrix_sign(torch.diag(torch.tensor([3.0, -0.5, 0.0])), "svd").diagonal()
    tensor([ 1., -1.,  0.])
    """
    if not isinstance(matrices, Tensor) or not matrices.is_floating_point():
        raise TypeError(f"matrices must be a real floating-point tensor, got {matrices!r:.60}")
    if matrices.ndim < 2:
        raise ValueError(f"matrices must have shape (..., m, n), got {tuple(matrices.shape)}")
    check_choice("method", method, METHODS)
    if steps is not None:
        check_integer("steps", steps, at_least=1)
    if matrices.numel() == 0:
        return matrices.clone()
    if not all_finite([matrices.detach()]):
        raise ValueError("matrices must be finite, got NaN or infinity")
    batch = matrices.reshape(-1, *matrices.shape[-2:])
    return orthogonalize(batch, method, steps, batch.dtype).reshape(matrices.shape)


def orthogonalize(
    matrices: Tensor, method: Method, steps: int | None, dtype: torch.dtype
) -> Tensor:
    """Return the signs of matrices of shape (k, m, n), by steps in ``dtype``."""
    if method == "svd":
        return _by_svd(matrices)
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    X = _divide_by_norm(wide, dtype)
    if len(X) == 1:  # one product of matrices is faster than a batch of one
        X = X[0]
    signs: Tensor = _newton_schulz(
        X, COEFFICIENTS[method], STEPS[method] if steps is None else steps
    )
    signs = signs.view(wide.shape).to(matrices.dtype)
    return signs.mT if tall else signs


def step_dtype(matrix: Tensor) -> torch.dtype:
    """Return the dtype in which an optimizer iterates: the one that the device multiplies fastest.

    Half the width serves, since the result is inexact anyway; float64 is not rounded.
    """
    if matrix.dtype == torch.float64:
        return matrix.dtype
    if matrix.device.type != "cpu":
        return torch.bfloat16
    small = min(matrix.shape[-2:]) < SMALL_ROWS
    return torch.float32 if small or not CPU_MULTIPLIES_BFLOAT16 else torch.bfloat16


def _by_svd(matrices: Tensor) -> Tensor:
    """Return UVᵀ over the singular values that are not rounding errors."""
    exact = matrices.to(wide_dtype(matrices))
    U, S, Vt = torch.linalg.svd(exact, full_matrices=False)
    rounding = max(matrices.shape[1:]) * torch.finfo(S.dtype).eps * S[:, :1]
    signs: Tensor = (U * (rounding < S)[:, None, :]) @ Vt
    return signs.to(matrices.dtype)


def _divide_by_norm(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return M / ‖M‖_F, whose singular values are at most one; zero for zero."""
    wide = matrices.to(wide_dtype(matrices))
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    # Contiguous rows, also of a transposed matrix: products of bfloat16 matrices want them.
    unit = torch.empty(wide.shape, dtype=dtype, device=wide.device)
    return torch.div(wide, norms.clamp_(min=torch.finfo(norms.dtype).tiny), out=unit)


# There is nothing to fuse in products of matrices.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _newton_schulz(X: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Apply X ← aX + (bA + cA²)X with A = XXᵀ; X of shape (..., m, n), m ≤ n, is overwritten."""
    a, b, c = coefficients
    A = X.new_empty(*X.shape[:-1], X.shape[-2])
    polynomial = torch.empty_like(A)
    other = torch.empty_like(X)
    for _ in range(steps):
        _symmetric(A, X, X.mT, out=A, beta=0, alpha=1)
        if c != 0:
            _symmetric(A, A, A, out=polynomial, beta=b, alpha=c)
            _add_product(X, polynomial, X, beta=a, out=other)
        else:
            _add_product(X, A, X, beta=a, alpha=b, out=other)
        X, other = other, X
    return X


def _symmetric(
    added: Tensor, left: Tensor, right: Tensor, *, out: Tensor, beta: float, alpha: float
) -> None:
    """Out ← beta · added + alpha · left · right, knowing that the result is symmetric."""
    rows = out.shape[-1]
    blocks = out.ndim == 2 and out.device.type == "cpu" and rows >= 2 * BLOCK_ROWS
    step = BLOCK_ROWS if blocks else rows
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        _add_product(
            added[..., start:stop, :stop],
            left[..., start:stop, :],
            right[..., :stop],
            beta=beta,
            alpha=alpha,
            out=out[..., start:stop, :stop],
        )
        if start > 0:
            out[..., :start, start:stop] = out[..., start:stop, :start].mT


def _add_product(
    added: Tensor, left: Tensor, right: Tensor, *, out: Tensor, beta: float, alpha: float = 1
) -> None:
    """Out ← beta · added + alpha · left · right, for matrices or batches of them."""
    add_product = torch.addmm if out.ndim == 2 else torch.baddbmm
    add_product(added, left, right, beta=beta, alpha=alpha, out=out)
