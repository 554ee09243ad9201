"""The pseudoinverse of a singular Hessian, as a part of hypergradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator, lsmr

from thalweg.bilevel.inverse_hessians import InverseProduct, LowerHessian
from thalweg.bilevel.neumann_series import Block, NotFiniteProductError
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Array = NDArray[np.float64]
DENSE = 500  # parameters up to which "auto" decomposes the Hessian


@dataclass(frozen=True)
class PInv:
    """The least-norm solution of Hv = b in the least-squares sense, v = H†b.

    Parameters
    ----------
    rtol : float in (0, 1)
        When LSMR stops, relative to b.
    maxiter : int ≥ 1
        Iterations of LSMR, each of two products.
    damping : float ≥ 0
        λ of H + λI; biases the result by a share of λ over the smallest nonzero eigenvalue.
    method : {"auto", "dense", "lsmr"}
        An eigendecomposition of H, formed by d products; or LSMR from 0, which forms nothing and
        has no component in the kernel of H. "auto" decomposes up to 500 parameters.
    cutoff : float in (0, 1)
        Eigenvalues below this share of the largest count as zero in "dense".

    Raises
    ------
    TypeError, ValueError
        For an argument that is not as described.
    NotMinimizerError
        From a call, if H has an eigenvalue below minus a thousandth of the largest ("dense").

    Examples
    --------
    >>> import torch
    >>> from thalweg.bilevel import LowerHessian, PInv
    >>> H = torch.diag(torch.tensor([2.0, 0.0]))
    >>> found = PInv()(LowerHessian(lambda k, V: V @ H, lambda V: V @ H), torch.tensor([4.0, 3.0]))
    >>> found.v.tolist(), round(found.residual, 6), found.rank
    ([2.0, 0.0], 0.6, 1)
    """

    rtol: float = 1e-10
    maxiter: int = 200
    damping: float = 0.0
    method: Literal["auto", "dense", "lsmr"] = "auto"
    cutoff: float = 1e-8
    n_batches = 1
    needs_reference = False

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, above=0, below=1)
        check_integer("maxiter", self.maxiter, at_least=1)
        check_number("damping", self.damping, at_least=0)
        check_choice("method", self.method, ("auto", "dense", "lsmr"))
        check_number("cutoff", self.cutoff, above=0, below=1)

    def __call__(self, hessian: LowerHessian, b: torch.Tensor) -> InverseProduct:
        """Return H†b for the mean Hessian, with the share of b outside of its range."""
        return self.factorize(hessian.mean, b).solve(b)

    def is_dense(self, d: int) -> bool:
        """Return whether Hessians of this order are decomposed."""
        return d <= DENSE if self.method == "auto" else self.method == "dense"

    def factorize(
        self, products: Block, like: torch.Tensor, *, strict: bool = True
    ) -> DenseInverse | KrylovInverse:
        """Return what solves for several right sides with one Hessian.

        Away from minimizers, where ``strict`` is False, negative eigenvalues count as zero.
        """
        if not self.is_dense(len(like)):
            return KrylovInverse(self, products)
        H = products(torch.eye(len(like), dtype=like.dtype, device=like.device))
        return DenseInverse(self, (H + H.T) / 2, strict)


class NotMinimizerError(RuntimeError):
    """The lower level has negative curvature: the point is not a minimizer of it."""


class DenseInverse:
    """The pseudoinverse of a matrix by its eigenvalues."""

    def __init__(self, setting: PInv, H: torch.Tensor, strict: bool) -> None:
        if not bool(torch.isfinite(H).all()):
            raise NotFiniteProductError("a Hessian-vector product is not finite")
        self.eigenvalues, self.vectors = torch.linalg.eigh(H)
        largest = float(self.eigenvalues.abs().max())
        if strict and float(self.eigenvalues[0]) < -1e-3 * largest:
            raise NotMinimizerError(
                f"the Hessian of g has the eigenvalue {float(self.eigenvalues[0]):g} beside "
                f"{largest:g}: y is not a minimizer, and the Polyak-Lojasiewicz condition fails "
                "here; take more inner steps"
            )
        sizes = self.eigenvalues.abs() if strict else self.eigenvalues
        self.kept = sizes > setting.cutoff * largest
        self.rank = int(self.kept.sum())
        self._damping = setting.damping

    def solve(self, b: torch.Tensor) -> InverseProduct:
        """Return H†b."""
        range_ = self.vectors[:, self.kept]
        inside = range_.T @ b
        v = range_ @ (inside / (self.eigenvalues[self.kept] + self._damping))
        return InverseProduct(v, residual=_share(b - range_ @ inside, b), rank=self.rank)

    def tangential(self, b: torch.Tensor) -> torch.Tensor:
        """Return the component of b in the kernel."""
        kernel = self.vectors[:, ~self.kept]
        component: torch.Tensor = kernel @ (kernel.T @ b)
        return component


class KrylovInverse:
    """The pseudoinverse of products alone, by LSMR."""

    rank = None

    def __init__(self, setting: PInv, products: Block) -> None:
        self._setting, self._products = setting, products

    def solve(self, b: torch.Tensor) -> InverseProduct:
        """Return H†b."""
        v = self._least_squares(b, self._setting.damping)
        return InverseProduct(v, residual=_share(b - self._products(v[None])[0], b))

    def tangential(self, b: torch.Tensor) -> torch.Tensor:
        """Return the component of b in the kernel: the residual of least squares."""
        return b - self._products(self._least_squares(b, 0.0)[None])[0]

    def _least_squares(self, b: torch.Tensor, damping: float) -> torch.Tensor:
        d = len(b)

        def product(v: Array) -> Array:
            vector = torch.as_tensor(v, dtype=b.dtype, device=b.device).reshape(1, d)
            H = self._products(vector)[0] + damping * vector[0]
            array: Array = H.double().cpu().numpy()
            return array

        H = LinearOperator((d, d), matvec=product, rmatvec=product, dtype=np.float64)
        s = self._setting
        # The conditioning is not limited: the eigenvalues that are zero are never met from 0.
        found = lsmr(
            H, b.double().cpu().numpy(), atol=s.rtol, btol=s.rtol, conlim=0, maxiter=s.maxiter
        )
        if not np.isfinite(found[0]).all():
            raise NotFiniteProductError("a Hessian-vector product is not finite")
        return torch.as_tensor(found[0], dtype=b.dtype, device=b.device)


def _share(residual: torch.Tensor, b: torch.Tensor) -> float:
    scale = float(b.norm())
    return float(residual.norm()) / scale if scale > 0 else 0.0
