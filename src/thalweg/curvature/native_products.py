"""Products with an operator of any kind: SciPy's, NumPy's or torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse
from scipy.sparse.linalg import LinearOperator, aslinearoperator

from thalweg.common.optional import requires

with requires("curvature"):
    import torch


def as_matmul(A: Any) -> tuple[int, Any, Any]:
    """Return the size of A, the product with it, and what makes vectors of A's kind of arrays.

    Raises
    ------
    TypeError
        If A is none of the accepted kinds, or not of floats.
    ValueError
        If it is not square.
    """
    if isinstance(A, torch.Tensor):
        _check_square(tuple(A.shape))
        if not (A.is_floating_point() or A.is_complex()):
            raise TypeError(f"A must hold floats, got {A.dtype}")
        return A.shape[0], lambda x: A @ x, lambda x: torch.as_tensor(x).to(A.device, A.dtype)
    if not (isinstance(A, (np.ndarray, LinearOperator)) or scipy.sparse.issparse(A)):
        raise TypeError(
            f"A must be a sparse matrix, an array, a LinearOperator or a tensor, got {type(A)}"
        )
    operator: Any = aslinearoperator(A)  # type: ignore[arg-type]
    _check_square(operator.shape)
    dtype = np.dtype(operator.dtype)
    if dtype.kind not in "fc":
        raise TypeError(f"A must hold floats, got {dtype}; convert with A.astype(float)")
    return operator.shape[0], lambda x: A @ x, lambda x: np.asarray(x).astype(dtype, copy=False)


def _check_square(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or shape[0] == 0:
        raise ValueError(f"A must be square, got shape {shape}")


def check_block(A: Any, B: Any) -> None:
    """Refuse what cannot be multiplied by A.

    Raises
    ------
    TypeError
        If one is a tensor and the other is not.
    ValueError
        If B has another number of rows, or is not finite.
    """
    if isinstance(B, torch.Tensor) != isinstance(A, torch.Tensor):
        raise TypeError(f"B must be of A's kind, got {type(B).__name__}, {type(A).__name__}")
    if B.ndim not in (1, 2) or B.shape[0] != A.shape[0]:
        wanted = f"({A.shape[0]},) or ({A.shape[0]}, r)"
        raise ValueError(f"B must have shape {wanted}, got {tuple(B.shape)}")
    finite = torch.isfinite(B) if isinstance(B, torch.Tensor) else np.isfinite(B)
    if not bool(finite.all()):
        raise ValueError("B must be finite")
