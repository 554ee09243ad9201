"""Messages between agents that are processes of their own."""

from __future__ import annotations

from typing import Any, Protocol

from thalweg.bilevel.agent_networks import check_mixing
from thalweg.common.optional import requires

with requires("bilevel"):
    import torch
    import torch.distributed as dist
    from torch import Tensor


class Comm(Protocol):
    """What an agent needs of the network; every agent calls it in the same order."""

    def mix(self, vector: Tensor) -> Tensor:
        """Return the average of the own and the neighbors' vectors with this agent's weights."""

    def mean(self, vector: Tensor) -> Tensor:
        """Return the mean over all agents of a few numbers."""


class Alone:
    """The network of one agent."""

    def mix(self, vector: Tensor) -> Tensor:
        """Return the vector."""
        return vector

    def mean(self, vector: Tensor) -> Tensor:
        """Return the vector."""
        return vector


class ProcessNeighbors:
    """Neighbors among the processes of `torch.distributed`, one agent each.

    Parameters
    ----------
    W : array_like of shape (n, n)
        The mixing matrix of all n processes.
    group : ProcessGroup, optional
        By default all processes.

    Raises
    ------
    TypeError, ValueError
        If W is no mixing matrix, or has another size.
    """

    def __init__(self, W: Any, group: Any = None) -> None:
        matrix = check_mixing(W)
        n, self._rank = dist.get_world_size(group), dist.get_rank(group)
        if matrix.shape != (n, n):
            raise ValueError(
                f"W must have shape ({n}, {n}), one row per process, got {matrix.shape}"
            )
        self._group, self._n = group, n
        self._weights = {j: float(matrix[self._rank, j]) for j in range(n)}
        self._neighbors = [j for j, w in self._weights.items() if w != 0 and j != self._rank]

    def mix(self, vector: Tensor) -> Tensor:
        """Exchange vectors with the neighbors, and return the weighted sum."""
        sent = vector.contiguous()
        received = {j: torch.empty_like(sent) for j in self._neighbors}
        operations = []
        for j in self._neighbors:
            peer = j if self._group is None else dist.get_global_rank(self._group, j)
            operations.append(dist.P2POp(dist.isend, sent, peer, self._group))
            operations.append(dist.P2POp(dist.irecv, received[j], peer, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        mixed = self._weights[self._rank] * sent
        for j, theirs in received.items():
            mixed.add_(theirs, alpha=self._weights[j])
        return mixed

    def mean(self, vector: Tensor) -> Tensor:
        """Return the mean over all processes."""
        total = vector.clone()
        dist.all_reduce(total, group=self._group)
        return total / self._n
