"""Random streams: one way to turn what a user passes as ``rng`` or ``generator`` into a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

RNGLike = int | np.integer | np.random.SeedSequence | np.random.Generator | None


def as_generator(rng: RNGLike) -> np.random.Generator:
    """Return the NumPy generator that ``rng`` stands for (SPEC 7).

    A `numpy.random.Generator` comes back as it is, so that its state advances for the caller;
    an integer or a `numpy.random.SeedSequence` seeds a new one; None draws fresh entropy.

    Raises
    ------
    TypeError, ValueError
        For anything else (a legacy `numpy.random.RandomState` included), or a negative seed.

    Examples
    --------
    >>> int(as_generator(7).integers(100)) == int(as_generator(7).integers(100))
    True
    """
    if isinstance(rng, np.random.Generator):
        return rng
    accepted = rng is None or isinstance(rng, (int, np.integer, np.random.SeedSequence))
    if not accepted or isinstance(rng, bool):
        raise TypeError(
            "rng must be an int, a numpy.random.Generator, a SeedSequence or None, "
            f"got {rng!r} ({type(rng).__name__})"
        )
    if isinstance(rng, (int, np.integer)) and rng < 0:
        raise ValueError(f"rng must be a seed >= 0, got {rng}")
    return np.random.default_rng(rng)


def torch_generator(
    rng: np.random.Generator, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return a torch generator on ``device`` whose seed is drawn from the NumPy stream ``rng``."""
    import torch

    return torch.Generator(device=device).manual_seed(int(rng.integers(2**63 - 1)))
