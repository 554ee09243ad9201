"""Stochastic Neumann series for products with an inverse Hessian: plain and antithetic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.bilevel.parameter_trees import TreeLayout
from thalweg.common.checks import check_choice, check_integer, check_number
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch

Block = Callable[[torch.Tensor], torch.Tensor]
Factors = Callable[[int, torch.Tensor], torch.Tensor]
Mode = Literal["independent", "shared"]

GROWTH = 10.0  # a chain that is longer than this many times ``b`` is cut off
EXPLODED = 1e6
POWER_ITERATIONS = 10


class NotFiniteProductError(RuntimeError):
    """A product with a sampled or reference Hessian is not finite."""


@dataclass(frozen=True, eq=False)
class NeumannResult:
    """An estimate of H⁻¹b.

    Parameters
    ----------
    v : Tensor or tree
        The estimate, in the layout of b.
    odd_part : Tensor or tree
        Half the difference of the two chains: what the antithetic average took out. Zero for series
        of one chain. Its mean is minus the bias that the error of the reference leaves.
    diverged : int
        The number of pairs of chains that were cut off because they grew.
    n_hvp, n_ref_hvp : int
        Products with sampled Hessians and with the reference.
    """

    v: Any
    odd_part: Any
    diverged: int
    n_hvp: int
    n_ref_hvp: int


def antithetic_neumann(
    hvp: Callable[[Any, Any], Any],
    ref_hvp: Callable[[Any], Any],
    b: Any,
    *,
    K: int = 20,
    eta: float | None = None,
    sampler: Callable[[torch.Generator | None], Any],
    mode: Mode = "independent",
    pairs: int = 1,
    stabilize: bool = True,
    batched: bool = False,
    generator: torch.Generator | None = None,
) -> NeumannResult:
    r"""Estimate H⁻¹b from sampled Hessians, each paired with its mirror around a reference.

    Every factor of the truncated series is used twice, with the sampled Hessian and with its mirror
    image, and the two chains are averaged:

    .. math:: p_k = (I - \eta H_k) p_{k-1}, \qquad p'_k = (I - \eta (2\bar H - H_k)) p'_{k-1},
              \qquad \hat v = \frac\eta2 \sum_{k<K} (p_k + p'_k), \qquad p_0 = p'_0 = b

    With :math:`H_k = \bar H + E_k` the average holds exactly the terms of even order in the E. If
    the reference is the mean Hessian, the noise is of second order and the estimate is unbiased for
    the truncated series; with a reference that is off by Δ, bias and odd remainder are of first
    order in Δ.

    Parameters
    ----------
    hvp : callable
        ``hvp(v, sample)``: the product of the sampled Hessian with a v of the layout of b.
    ref_hvp : callable
        ``ref_hvp(v)``: the product with the reference Hessian.
    b : Tensor of any shape, or dicts, lists and tuples of them
    K : int ≥ 1
        The number of terms, the truncation depth.
    eta : float > 0, optional
        The step, below 2 / (largest eigenvalue of the reference). By default half the inverse of
        that eigenvalue, by ten power iterations.
    sampler : callable
        ``sampler(generator)``: a sample for ``hvp``, which is used twice.
    mode : {"independent", "shared"}
        A fresh sample for every factor, or one for a whole series, as many codes do. A shared
        sample leaves a bias of every even order, and with plain chains of every order; the
        antithetic one is smaller where rare samples have *low* curvature. Rows of real data are
        mostly the other way round: outliers have high curvature, and a shared mirror explodes.
    pairs : int ≥ 1
        Independent pairs of chains that are averaged.
    stabilize : bool
        Whether to cut off both chains of a pair where one is longer than ten times b. A sampled
        Hessian with an eigenvalue above twice the reference's has a mirror with negative curvature,
        which makes its chain grow.
    batched : bool
        Whether ``hvp`` and ``ref_hvp`` take blocks of shape (m, d), for a b of shape (d,).
    generator : torch.Generator, optional
        Handed to ``sampler``.

    Returns
    -------
    NeumannResult

    Raises
    ------
    TypeError
        For an argument of the wrong type; a sampler that returns an iterator, which cannot be used
        twice; products of another layout.
    ValueError
        For K < 1, eta ≤ 0, pairs < 1, a b that is not finite, or a series that diverges since the
        reference has an eigenvalue of at least 2 / eta.
    RuntimeError
        If the chains grow without bound and ``stabilize`` is False, or a product is not finite.

    Warns
    -----
    UserWarning
        If eta times an eigenvalue of the reference is between 1 and 2: the series converges with
        alternating signs. If the reference has negative curvature: the series has no limit then.

    Notes
    -----
    *Cost.* (K - 1) · pairs factors, each of two sampled products (one of a block of two, if
    ``batched``) and one product with the reference. Memory: six vectors.

    *When not.* If the reference is affordable at every step, the deterministic series with it alone
    has the same bias to first order, no variance and a third of the products; see
    `ReferenceNeumann`.

    *Ours.* The paper's is the pairing. The joint cut-off, the default of eta and the checks by
    Rayleigh quotients of the chain are our resolution.

    References
    ----------
    "Antithetic Neumann estimator", NeurIPS 2026.

    Examples
    --------
    >>> import torch
    >>> from thalweg.bilevel import antithetic_neumann
    >>> mean = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    >>> def sampler(generator):  # a symmetric matrix around the mean
    ...     noise = torch.randn(2, 2, generator=generator, dtype=torch.float64)
    ...     return mean + 0.1 * (noise + noise.T)
    >>> result = antithetic_neumann(
    ...     lambda v, H: H @ v, lambda v: mean @ v, torch.ones(2, dtype=torch.float64), K=60,
    ...     sampler=sampler, generator=torch.Generator().manual_seed(0),
    ... )
    >>> exact = torch.linalg.solve(mean, torch.ones(2, dtype=torch.float64))
    >>> bool((result.v - exact).abs().max() < 0.05)
    True
    """
    for name, function in (("hvp", hvp), ("ref_hvp", ref_hvp), ("sampler", sampler)):
        if not callable(function):
            raise TypeError(f"{name} must be callable, got {type(function).__name__}")
    check_terms(K, eta, mode)
    check_integer("pairs", pairs, at_least=1)
    layout = TreeLayout("b", b)
    vector = layout.vector(b).detach()

    def block_of(product: Callable[[Any], Any]) -> Block:
        if batched:
            return product
        return lambda V: torch.stack([layout.vector(product(layout.tree(v))) for v in V])

    reference = CountedProducts(block_of(ref_hvp))
    step = safe_step(reference, vector) if eta is None else eta
    chains = []
    for _ in range(pairs):
        shared = _replayable(sampler(generator)) if mode == "shared" else None

        def sampled(k: int, V: torch.Tensor, shared: Any = shared) -> torch.Tensor:
            sample = _replayable(sampler(generator)) if mode == "independent" else shared
            return block_of(lambda v: hvp(v, sample))(V)

        chains.append(antithetic_chains(sampled, reference, vector, K, step))
    v, odd, diverged = average_pairs(chains, step, stabilize)
    return NeumannResult(
        v=layout.tree(v),
        odd_part=layout.tree(odd),
        diverged=diverged,
        n_hvp=2 * (K - 1) * pairs,
        n_ref_hvp=reference.n,
    )


def neumann_series(factors: Factors, b: torch.Tensor, K: int, eta: float) -> torch.Tensor:
    """Return ``η Σ_{k<K} p_k`` with ``p_k = (I - η H_k) p_{k-1}`` from ``p_0 = b``."""
    p = b
    total = b.clone()
    for k in range(1, K):
        p = p - eta * factors(k, p[None])[0]
        total += p
    return eta * total


@dataclass(frozen=True, eq=False)
class PairOfChains:
    """The sums of both chains over k, as rows, and what was seen on the way."""

    sums: torch.Tensor
    cut: torch.Tensor  # whether the pair was cut off, were it to be stabilized
    growth: torch.Tensor  # the longest p relative to b
    broken: torch.Tensor  # whether a product was not finite where its vector was
    curvature: tuple[torch.Tensor, torch.Tensor]  # range of the reference's Rayleigh quotients
    stable_sums: torch.Tensor


def antithetic_chains(
    sampled: Factors, reference: Block, b: torch.Tensor, K: int, eta: float
) -> PairOfChains:
    """Run one chain and its mirror; both are also summed up to where either grows.

    Nothing is read back from the device on the way.
    """
    scale = b.norm().clamp_min(torch.finfo(b.dtype).tiny)
    p = torch.stack([b, b])
    sums, stable_sums = p.clone(), p.clone()
    alive = torch.ones((), dtype=torch.bool, device=b.device)
    broken = ~alive
    growth = torch.ones((), dtype=b.dtype, device=b.device)
    least = torch.full_like(growth, torch.inf)
    most = -least
    for k in range(1, K):
        H = sampled(k, p)
        mean = reference(p[1:])[0]
        finite = torch.isfinite(H).all() & torch.isfinite(mean).all()
        broken = broken | (torch.isfinite(p).all() & ~finite)
        squared = p[1].dot(p[1]).clamp_min(torch.finfo(b.dtype).tiny)
        quotient = p[1].dot(mean) / squared
        least, most = torch.minimum(least, quotient), torch.maximum(most, quotient)
        p = p - eta * torch.stack([H[0], 2 * mean - H[1]])
        sums += p
        # Both chains at once, or the average would no longer be even in the noise.
        longest = torch.linalg.vector_norm(p, dim=1).max() / scale
        growth = torch.maximum(growth, longest)
        alive = alive & (longest <= GROWTH)
        stable_sums += torch.where(alive, p, 0)
    return PairOfChains(sums, ~alive, growth, broken, (least, most), stable_sums)


def average_pairs(
    chains: list[PairOfChains], eta: float, stabilize: bool
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the mean of all chains, half the mean difference, and how many pairs were cut off."""
    if any(bool(c.broken) for c in chains):
        raise NotFiniteProductError("a Hessian-vector product is not finite")
    check_curvature(
        eta, min(float(c.curvature[0]) for c in chains), max(float(c.curvature[1]) for c in chains)
    )
    if not stabilize and max(float(c.growth) for c in chains) > EXPLODED:
        raise RuntimeError(
            "the chains grew more than a millionfold: the noise of the sampled Hessians exceeds "
            "what the reference can mirror; lower eta, take larger batches or set stabilize=True"
        )
    sums = [c.stable_sums if stabilize else c.sums for c in chains]
    mean = eta * torch.stack(sums).mean(dim=0)
    cut = sum(bool(c.cut) for c in chains) if stabilize else 0
    return (mean[0] + mean[1]) / 2, (mean[0] - mean[1]) / 2, cut


def check_curvature(eta: float, least: float, most: float) -> None:
    """Refuse a series that diverges, by Rayleigh quotients of the reference that were seen.

    Warnings hold no figures of a step, so that a run shows each of them once.
    """
    if eta * most >= 2:
        raise ValueError(
            f"series diverges: eta*lambda_max={eta * most:.3g} is not below 2; lower eta={eta:g}"
        )
    if eta * most >= 1:
        warnings.warn(
            f"eta*lambda_max is above 1 for eta={eta:g}: the terms of the series alternate",
            stacklevel=4,
        )
    if least < 0:
        warnings.warn(
            "the reference Hessian is indefinite, negative curvature was seen: the series has no "
            "limit; add a ridge to g, or lower K",
            stacklevel=4,
        )


class CountedProducts:
    """Products with a Hessian, counted."""

    def __init__(self, products: Block) -> None:
        self._products = products
        self.n = 0

    def __call__(self, V: torch.Tensor) -> torch.Tensor:
        """Return the products with the rows of V, of shape (m, d)."""
        self.n += len(V)
        return self._products(V)


def largest_eigenvalue(products: Block, like: torch.Tensor) -> float:
    """Return the largest Rayleigh quotient of ten power iterations from a fixed start."""
    start = torch.randn(like.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u = start.to(like)
    largest = torch.full((), -torch.inf, dtype=like.dtype, device=like.device)
    for _ in range(POWER_ITERATIONS):
        u = u / u.norm()
        Hu = products(u[None])[0]
        largest = torch.maximum(largest, u.dot(Hu))
        # A shift would be needed to tell -λ from λ; Hessians of losses lean to the positive side.
        u = torch.where(Hu.norm() > 0, Hu, u)
    return float(largest)


def safe_step(products: Block, like: torch.Tensor) -> float:
    """Return 0.5 / λ_max.

    Raises
    ------
    ValueError
        If no positive eigenvalue is found, so that there is no such step.
    """
    largest = largest_eigenvalue(products, like)
    if not largest > 0:
        raise ValueError(
            f"eta must be given where the Hessian has no positive curvature, got {largest:g} as "
            "its largest"
        )
    return 0.5 / largest


def check_terms(K: int, eta: float | None, mode: str) -> None:
    """Check what every series takes."""
    check_integer("K", K, at_least=1)
    if eta is not None:
        check_number("eta", eta, above=0)
    check_choice("mode", mode, ("independent", "shared"))


def _replayable(sample: Any) -> Any:
    if hasattr(sample, "__next__"):
        raise TypeError(
            "sampler must return a sample that can be used twice, got an iterator "
            f"({type(sample).__name__})"
        )
    return sample
