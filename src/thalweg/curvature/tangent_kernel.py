"""The Gram matrix of log-derivatives, and centering on any subset of its rows."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.common.optional import requires

with requires("curvature"):
    import torch
    from torch import Tensor

CHUNK_NUMBERS = 2**23
BLOCK_ROWS = 256
# How many units of rounding a column may vary and still be constant.
CONSTANT = 8


@dataclass(frozen=True, eq=False)
class CenteredRows:
    """Some rows with their weights; rows of one label are centered on their common mean.

    Centering and weighting are the linear map C = (I - ZZᵀ) diag(√w), with Z the orthonormal
    directions of the means.

    Parameters
    ----------
    rows : Tensor of shape (r,), int64
        Which rows of the kernel.
    root_weight : Tensor of shape (r,)
        √w; the weights of the samples sum to 1.
    means : Tensor of shape (r, n_labels)
        Z.
    """

    rows: Tensor
    root_weight: Tensor
    means: Tensor

    def center(self, x: Tensor) -> Tensor:
        """Return Cx for a vector or the columns of a matrix."""
        x = self._by_root_weight(x)
        means = self.means.to(x.dtype)
        return x - means @ (means.mT @ x)

    def spread(self, x: Tensor) -> Tensor:
        """Return Cᵀx: coefficients of centered rows as coefficients of the rows themselves."""
        means = self.means.to(x.dtype)
        return self._by_root_weight(x - means @ (means.mT @ x))

    def _by_root_weight(self, x: Tensor) -> Tensor:
        return self.root_weight * x if x.ndim == 1 else self.root_weight[:, None] * x


@dataclass(frozen=True, eq=False)
class TangentKernel:
    """Inner products of the rows of O, with what a ridge regression on them needs.

    A row is a sample, or with real parameters and a complex log ψ, the real or imaginary part of
    one: those of the imaginary parts follow after all the others.

    Parameters
    ----------
    gram : Tensor of shape (R, R)
        ``X Xᴴ`` of the rows X of O, float64 or complex128.
    energy : Tensor of shape (R,)
        Local energies.
    weight : Tensor of shape (R,)
        Weights > 0 of the samples.
    label : Tensor of shape (R,), int64
        Rows of one label have a mean of their own.
    parts : int
        Rows per sample, 1 or 2.
    """

    gram: Tensor
    energy: Tensor
    weight: Tensor
    label: Tensor
    parts: int

    @property
    def n_samples(self) -> int:
        """The number of samples."""
        return len(self.energy) // self.parts

    def centered(self, samples: Tensor | None = None) -> CenteredRows:
        """Return the rows of some samples, or of all, with weights that sum to 1."""
        if samples is None:
            samples = torch.arange(self.n_samples, device=self.gram.device)
        rows = torch.cat([samples + part * self.n_samples for part in range(self.parts)])
        weight = self.weight[rows]
        root_weight = (weight * self.parts / weight.sum()).sqrt()
        _, label = torch.unique(self.label[rows], return_inverse=True)
        means = torch.nn.functional.one_hot(label).to(root_weight.dtype) * root_weight[:, None]
        return CenteredRows(rows, root_weight, means / torch.linalg.vector_norm(means, dim=0))

    def between(self, left: CenteredRows, right: CenteredRows) -> Tensor:
        """Return the kernel A_left A_rightᴴ of centered, weighted rows."""
        block = self.gram[left.rows[:, None], right.rows]
        return left.center(right.center(block.mH).mH)

    def energies(self, part: CenteredRows) -> Tensor:
        """Return the centered, weighted local energies y."""
        return part.center(self.energy[part.rows])


def stacked(jac: Tensor, parts: int) -> Tensor:
    """Return O, or with two parts its real parts above its imaginary parts."""
    return jac if parts == 1 else torch.cat([jac.real, jac.imag])


def group_means(x: Tensor, weight: Tensor, label: Tensor) -> Tensor:
    """Return the weighted mean of the rows of each label, shape (n_labels, ...)."""
    share = torch.nn.functional.one_hot(label).to(weight.dtype) * weight[:, None]
    return (share / share.sum(0)).mT.to(x.dtype) @ x


def gram_matrix(jac: Tensor, weight: Tensor, label: Tensor, parts: int, *, center: bool) -> Tensor:
    """Return ``X Xᴴ`` of the rows of O, less the mean of their label, in double precision.

    The columns come in chunks: a chunk's products are computed in the precision of O (at least
    float32) and summed in float64. No centered copy of O is made.
    """
    n, n_columns = jac.shape
    wide = torch.promote_types(jac.dtype, torch.float32)
    gram = jac.new_zeros((parts * n, parts * n), dtype=_double(jac.dtype, parts))
    width = max(1, CHUNK_NUMBERS // n)
    for start in range(0, n_columns, width):
        chunk = jac[:, start : start + width].to(wide)
        if center:
            chunk = _less_means(chunk, weight, label)
        _add_products(gram, stacked(chunk, parts))
    return gram.tril(-1).mH + gram.tril()


def _less_means(chunk: Tensor, weight: Tensor, label: Tensor) -> Tensor:
    """Center columns; those that are constant up to rounding become 0."""
    means = group_means(chunk, weight, label)
    centered = chunk - means[label]
    rounding = CONSTANT * torch.finfo(chunk.dtype).eps * means.abs().amax(0)
    return centered * (centered.abs().amax(0) > rounding)


def _add_products(gram: Tensor, X: Tensor) -> None:
    """Add the lower triangle of ``X Xᴴ``, block of rows by block of rows."""
    for start in range(0, len(X), BLOCK_ROWS):
        stop = start + BLOCK_ROWS
        gram[start:stop, :stop] += X[start:stop] @ X[:stop].mH


def combine_rows(jac: Tensor, coefficients: Tensor, parts: int) -> Tensor:
    """Return ``Xᴴ β`` in the precision of O (at least float32), summed in float64.

    With two parts β holds the coefficients of the real parts above those of the imaginary ones.
    """
    n, n_columns = jac.shape
    dtype = _double(jac.dtype, parts)
    coefficients = coefficients.to(dtype)
    total = jac.new_empty(n_columns, dtype=dtype)
    width = max(1, CHUNK_NUMBERS // n)
    for start in range(0, n_columns, width):
        chunk = stacked(jac[:, start : start + width], parts).to(dtype)
        total[start : start + width] = chunk.mH @ coefficients
    narrow = jac.real.dtype if parts == 2 else jac.dtype
    return total.to(torch.promote_types(narrow, torch.float32))


def _double(dtype: torch.dtype, parts: int) -> torch.dtype:
    return torch.complex128 if dtype.is_complex and parts == 1 else torch.float64
