"""The multiplier of a dynamic barrier, its perturbation, and stationarity of bilevel problems."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import norm

from thalweg.common.checks import check_array

Array = NDArray[np.float64]


def barrier_multiplier(
    fg: Any, gg: Any, *, alpha: float, delta: Any, p: float = 0.0, rho: float = 0.0
) -> Any:
    r"""Return the perturbed multiplier of the dynamic barrier.

    .. math:: \lambda = \rho + \frac{[\alpha \|g\|^{2+p} - \langle f + \rho g, g \rangle]_+}
              {\|g\|^2 + \delta}

    Without ρ it is the minimizer over λ ≥ 0 of the dual, ``½‖f + λg‖² - λφ + ½δλ²`` with
    φ = α‖g‖²⁺ᵖ. It is at most α‖g‖ᵖ + ‖f‖/(2√δ), and λ‖g‖ at most α‖g‖¹⁺ᵖ + ‖f‖.

    Parameters
    ----------
    fg, gg : float, ndarray or Tensor
        ⟨f, g⟩ and ‖g‖².
    alpha, delta, p, rho : float
        α, δ, p, ρ; δ may be of the type of ``gg``. With δ = 0 and g = 0 the result is ρ.
    """
    excess = alpha * gg ** (1 + p / 2) - fg - rho * gg
    # (z + |z|)/2 is the positive part, exactly, of floats, arrays and tensors alike.
    positive = (excess + abs(excess)) / 2
    divisor = gg + delta
    return rho + positive / (divisor + (divisor == 0))


class BilevelStationarity(NamedTuple):
    """How far a point is from stationarity of a simple bilevel problem.

    Parameters
    ----------
    eps_f : float
        The least ‖∇f + λ∇g‖ over λ ≥ 0.
    eps_g : float
        ‖∇g‖.
    lam_star : float
        The λ of the former, [-⟨∇f, ∇g⟩/‖∇g‖²]₊; 0 where ∇g is 0.
    """

    eps_f: float
    eps_g: float
    lam_star: float


def bilevel_stationarity(gf: Any, gg: Any) -> BilevelStationarity:
    r"""Return the residuals of stationarity of min f over the stationary points of g.

    .. math:: \epsilon_f = \min_{\lambda \ge 0} \|\nabla f + \lambda \nabla g\|, \qquad
              \epsilon_g = \|\nabla g\|

    Parameters
    ----------
    gf, gg : array_like, or list or tuple of arrays or tensors
        ∇f and ∇g, of one shape, or one array for each parameter. They must be full gradients:
        those of batches make λ large where ∇g is small, and ε_f too small.

    Returns
    -------
    BilevelStationarity
        ``(eps_f, eps_g, lam_star)``.

    Raises
    ------
    TypeError, ValueError
        If they are not finite or differ in size.

    Notes
    -----
    *Cost.* O(d). The residual is a difference along the unit vector of ∇g, so that a small ∇g does
    not lose it to rounding.

    References
    ----------
    "Stochastic dynamic barrier perturbed gradient", NeurIPS 2026.

    Examples
    --------
    >>> from thalweg.bilevel import bilevel_stationarity
    >>> bilevel_stationarity([3.0, 4.0], [-0.5, 0.0])
    BilevelStationarity(eps_f=4.0, eps_g=0.5, lam_star=6.0)
    """
    f, g = _flat("gf", gf), _flat("gg", gg)
    if f.shape != g.shape:
        raise ValueError(f"gf and gg must have as many entries, got {f.size} and {g.size}")
    eps_g = float(norm(g)) if g.size else 0.0
    if eps_g == 0:
        return BilevelStationarity(float(norm(f)) if f.size else 0.0, 0.0, 0.0)
    unit = g / eps_g
    against = max(0.0, -float(f @ unit))
    return BilevelStationarity(float(norm(f + against * unit)), eps_g, against / eps_g)


def _flat(name: str, gradient: Any) -> Array:
    """Return all entries in one dimension."""
    parts = gradient if _is_list_of_arrays(gradient) else [gradient]
    entries = [_entries(part) for part in parts]
    return check_array(name, np.concatenate(entries), shape=("d",))


def _is_list_of_arrays(gradient: Any) -> bool:
    return (
        isinstance(gradient, (list, tuple))
        and len(gradient) > 0
        and all(hasattr(part, "shape") and np.ndim(part) > 0 for part in gradient)
    )


def _entries(part: ArrayLike | Any) -> Array:
    if hasattr(part, "detach"):
        part = part.detach().cpu().double().numpy()
    return np.asarray(part, dtype=np.float64).reshape(-1)
