"""How similar two representations of the same inputs are: CKA, RSA and Procrustes.

A representation is a matrix with one row per input. The measures do not see which neuron is which,
so that layers of different networks and widths can be compared, and they have gradients, so that
one representation can be fitted to another.
"""

from __future__ import annotations

from typing import Any, Literal

from thalweg.common.checks import check_choice, check_number
from thalweg.common.optional import requires

with requires("training"):
    import torch
    from torch import Tensor

VANISHED = 1e-12  # of the squared norm: what centering leaves of rows that are all the same


def linear_cka(X: Tensor, Y: Tensor, *, debiased: bool = True) -> Tensor:
    r"""Return the linear centered kernel alignment (CKA) of two representations.

    With the Gram matrices ``K = X Xᵀ`` and ``L = Y Yᵀ`` it is
    ``HSIC(K, L) / √(HSIC(K, K) HSIC(L, L))``: 1 for representations that differ by a rotation, a
    shift and a factor, about 0 for independent ones.

    Parameters
    ----------
    X : Tensor of shape (b, f)
        One row per input, b ≥ 4.
    Y : Tensor of shape (b, g)
        The same inputs in the same order; dtype and device of X.
    debiased : bool, default True
        Whether HSIC is the unbiased U-statistic. The plain estimate tends to 1 when there are
        many more features than inputs, whatever they are.

    Returns
    -------
    Tensor of shape ()
        At most 1; in [0, 1] if not debiased. It has a gradient.

    Raises
    ------
    TypeError, ValueError
        For arguments that are not as described, that are not finite, or whose rows are all the
        same, for which no similarity is defined.

    Notes
    -----
    O(b (f + g)²) time if f and g are below b, from the products ``XᵀY``; else O(b² (f + g)), from
    the Gram matrices. Half-precision features are converted to float32 first.

    References
    ----------
    S. Kornblith, M. Norouzi, H. Lee, G. Hinton, "Similarity of neural network representations
    revisited", ICML 2019. L. Song, A. Smola, A. Gretton, J. Bedo, K. Borgwardt, "Feature selection
    via dependence maximization", JMLR 13 (2012), for the unbiased estimate.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import linear_cka
    >>> X = torch.randn(100, 20, generator=torch.Generator().manual_seed(0))
    >>> rotation, _ = torch.linalg.qr(X[:20])
    >>> round(linear_cka(X, 3 * X @ rotation + 1).item(), 4)
    1.0
    >>> Y = torch.randn(100, 500, generator=torch.Generator().manual_seed(1))
    >>> round(linear_cka(X, Y).abs().item(), 1)
    0.0
    """
    X, Y = check_representations(X, Y)
    return cka(X, Y, debiased=debiased)


def rbf_cka(X: Tensor, Y: Tensor, *, sigma: float = 1.0, debiased: bool = True) -> Tensor:
    """Return the CKA with Gaussian kernels, which looks at neighborhoods.

    Parameters
    ----------
    X : Tensor of shape (b, f)
    Y : Tensor of shape (b, g)
    sigma : float > 0, default 1
        The kernels' bandwidth, as a multiple of the median distance between rows. The larger, the
        closer to `linear_cka`.
    debiased : bool, default True
        As in `linear_cka`.

    Returns
    -------
    Tensor of shape ()
        It has a gradient; the median counts as a constant.

    Raises
    ------
    TypeError, ValueError
        As `linear_cka`.

    Notes
    -----
    O(b² (f + g)) time and O(b²) memory.

    References
    ----------
    S. Kornblith, M. Norouzi, H. Lee, G. Hinton, "Similarity of neural network representations
    revisited", ICML 2019.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import rbf_cka
    >>> X = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
    >>> round(rbf_cka(X, 2 * X).item(), 4)
    1.0
    """
    X, Y = check_representations(X, Y)
    return gaussian_cka(X, Y, debiased=debiased, sigma=check_number("sigma", sigma, above=0))


def rsa(
    X: Tensor,
    Y: Tensor,
    *,
    dissimilarity: Literal["correlation", "euclidean"] = "correlation",
    rank: bool = False,
) -> Tensor:
    """Return the representational similarity: how far dissimilarities of pairs of inputs agree.

    Parameters
    ----------
    X : Tensor of shape (b, f)
    Y : Tensor of shape (b, g)
    dissimilarity : {"correlation", "euclidean"}, default "correlation"
        Of two rows: one minus the correlation of their entries, or their squared distance.
    rank : bool, default False
        Compare the dissimilarities by Spearman's rank correlation instead of Pearson's; it has no
        gradient.

    Returns
    -------
    Tensor of shape ()
        The correlation over all b (b - 1) / 2 pairs, in [-1, 1].

    Raises
    ------
    TypeError, ValueError
        As `linear_cka`, and for ``"correlation"`` with fewer than two features.

    Notes
    -----
    O(b² (f + g)) time and O(b²) memory.

    References
    ----------
    N. Kriegeskorte, M. Mur, P. Bandettini, "Representational similarity analysis: connecting the
    branches of systems neuroscience", Frontiers in Systems Neuroscience 2 (2008).

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import rsa
    >>> X = torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
    >>> round(rsa(X, -X, rank=True).item(), 4)
    1.0
    """
    X, Y = check_representations(X, Y)
    check_choice("dissimilarity", dissimilarity, ("correlation", "euclidean"))
    if dissimilarity == "correlation" and min(X.shape[1], Y.shape[1]) < 2:
        raise ValueError("dissimilarity must be 'euclidean' for representations of one feature")
    x, y = (_dissimilarities(rows, dissimilarity) for rows in (X, Y))
    return _correlation(_ranks(x), _ranks(y)) if rank else _correlation(x, y)


def procrustes_distance(X: Tensor, Y: Tensor) -> Tensor:
    """Return the orthogonal Procrustes distance of two centered, normalized representations.

    It is ``‖X‖² + ‖Y‖² - 2 ‖XᵀY‖_*``, the squared distance that is left after the best rotation of
    Y, where both have been centered and divided by their Frobenius norms.

    Parameters
    ----------
    X : Tensor of shape (b, f)
    Y : Tensor of shape (b, g)
        If f ≠ g, the smaller one counts as padded with zeros.

    Returns
    -------
    Tensor of shape ()
        In [0, 2]: 0 for representations that differ by a rotation, a shift and a factor.

    Raises
    ------
    TypeError, ValueError
        As `linear_cka`.

    Notes
    -----
    O(b f g + f g min(f, g)) time.

    References
    ----------
    F. Ding, J.-S. Denain, J. Steinhardt, "Grounding representation similarity through statistical
    testing", NeurIPS 2021.

    Examples
    --------
    >>> import torch
    >>> from thalweg.training import procrustes_distance
    >>> X = torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
    >>> abs(round(procrustes_distance(X, 5 * X + 1).item(), 4))
    0.0
    """
    X, Y = check_representations(X, Y)
    return 2 - 2 * overlap(X, Y)


def check_representations(X: Any, Y: Any) -> tuple[Tensor, Tensor]:
    """Return both in at least float32, or raise as `linear_cka` says."""
    for name, rows in (("X", X), ("Y", Y)):
        if not isinstance(rows, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(rows).__name__}")
        if not rows.is_floating_point():
            raise TypeError(f"{name} must be a tensor of real numbers, got {rows.dtype}")
        if rows.ndim != 2 or len(rows) < 4:
            raise ValueError(
                f"{name} must have shape (b, features) with b >= 4, got {tuple(rows.shape)}"
            )
    if len(X) != len(Y) or X.device != Y.device:
        raise ValueError(
            "X and Y must have as many rows and be on one device, got "
            f"{len(X)} on {X.device} and {len(Y)} on {Y.device}"
        )
    X, Y = single(X), single(Y)
    for name, rows in (("X", X), ("Y", Y)):
        if not bool(rows.isfinite().all()):
            raise ValueError(f"{name} must be finite")
        if is_constant(rows):
            raise ValueError(f"{name} must have rows that differ: it is constant")
    common = torch.promote_types(X.dtype, Y.dtype)
    return X.to(common), Y.to(common)


def single(rows: Tensor) -> Tensor:
    """Return the tensor, in float32 if it has half precision."""
    return rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows


def frobenius(X: Tensor) -> Tensor:
    """Return the root of the sum of squares."""
    return X.square().sum().sqrt()


def is_constant(rows: Tensor) -> bool:
    """Return whether all rows are the same, up to rounding."""
    left = (rows - rows.mean(0)).square().sum()
    return bool(left <= VANISHED * rows.square().sum())


def effective_rank(X: Tensor) -> float:
    """Return ``(Σλ)²/Σλ²`` of the eigenvalues λ of the covariance of the rows of X (b, f)."""
    X = X - X.mean(0)
    gram = X.T @ X if X.shape[1] < len(X) else X @ X.T
    return float(gram.trace() ** 2 / gram.square().sum())


def cka(X: Tensor, Y: Tensor, *, debiased: bool) -> Tensor:
    """Return `linear_cka` without checks."""
    # The U-statistic does not see a shift of the rows either; without it, less is rounded off.
    X, Y = X - X.mean(0), Y - Y.mean(0)
    if max(X.shape[1], Y.shape[1]) < len(X):
        products = [(A.T @ B).square().sum() for A, B in ((X, Y), (X, X), (Y, Y))]
    else:
        K, L = X @ X.T, Y @ Y.T
        products = [(A * B).sum() for A, B in ((K, L), (K, K), (L, L))]
    if debiased:
        # Without their diagonals x, the rows of a centered Gram matrix add up to -x instead of 0.
        x, y = X.square().sum(1), Y.square().sum(1)
        diagonals = ((x, y), (x, x), (y, y))
        products = [
            _u_statistic(product - p @ q, -p, -q)
            for product, (p, q) in zip(products, diagonals, strict=True)
        ]
    return _ratio(*products)


def gaussian_cka(X: Tensor, Y: Tensor, *, debiased: bool, sigma: float = 1.0) -> Tensor:
    """Return `rbf_cka` without checks."""
    return _aligned(_gaussian(X, sigma), _gaussian(Y, sigma), debiased=debiased)


def correlation_rsa(X: Tensor, Y: Tensor) -> Tensor:
    """Return `rsa` without checks, from correlations."""
    return _correlation(_dissimilarities(X, "correlation"), _dissimilarities(Y, "correlation"))


def overlap(X: Tensor, Y: Tensor) -> Tensor:
    """Return the nuclear norm of ``XᵀY`` after centering and normalization, in [0, 1]."""
    X, Y = X - X.mean(0), Y - Y.mean(0)
    nuclear: Tensor = torch.linalg.svdvals(X.T @ Y).sum()
    return nuclear / (frobenius(X) * frobenius(Y))


def _aligned(K: Tensor, L: Tensor, *, debiased: bool) -> Tensor:
    """Return the CKA of Gram matrices."""
    if debiased:
        K, L = K - K.diag().diag(), L - L.diag().diag()
        return _ratio(
            *(_u_statistic((A * B).sum(), A.sum(0), B.sum(0)) for A, B in ((K, L), (K, K), (L, L)))
        )
    K, L = _centered(K), _centered(L)
    return _ratio((K * L).sum(), (K * K).sum(), (L * L).sum())


def _ratio(both: Tensor, one: Tensor, other: Tensor) -> Tensor:
    # Two roots: the product of two small numbers could underflow.
    return both / (one.sqrt() * other.sqrt())


def _u_statistic(trace: Tensor, k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """Return the unbiased HSIC from tr(K L) and the row sums of K and L without diagonals."""
    b = len(k)
    sums = k.sum() * l.sum() / ((b - 1) * (b - 2)) - 2 / (b - 2) * (k @ l)
    return (trace + sums) / (b * (b - 3))


def _centered(K: Tensor) -> Tensor:
    K = K - K.mean(0)
    return K - K.mean(1, keepdim=True)


def _gaussian(X: Tensor, sigma: float) -> Tensor:
    squared = _squared_distances(X)
    i, j = torch.triu_indices(len(X), len(X), 1, device=X.device)
    median = squared.detach()[i, j].median()
    if median <= 0:  # most rows coincide
        median = squared.detach().mean()
    return torch.exp(-squared / (2 * sigma**2 * median))


def _squared_distances(X: Tensor) -> Tensor:
    X = X - X.mean(0)
    norms = X.square().sum(1)
    return (norms[:, None] + norms - 2 * X @ X.T).clamp_min(0)


def _dissimilarities(X: Tensor, kind: str) -> Tensor:
    """Return those of all pairs of rows, of shape (b (b - 1) / 2,)."""
    i, j = torch.triu_indices(len(X), len(X), 1, device=X.device)
    if kind == "euclidean":
        return _squared_distances(X)[i, j]
    X = X - X.mean(1, keepdim=True)
    # A dead row correlates with nothing; the floor keeps its gradient finite.
    norms = X.square().sum(1, keepdim=True).clamp_min(torch.finfo(X.dtype).tiny).sqrt()
    X = X / norms
    return 1 - (X @ X.T)[i, j]


def _correlation(x: Tensor, y: Tensor) -> Tensor:
    x, y = x - x.mean(), y - y.mean()
    return (x @ y) / (frobenius(x) * frobenius(y))


def _ranks(x: Tensor) -> Tensor:
    """Return mean ranks, ties included."""
    _, inverse, counts = torch.unique(x.detach(), return_inverse=True, return_counts=True)
    means: Tensor = counts.cumsum(0) - (counts - 1) / 2
    return means.to(x.dtype)[inverse]
