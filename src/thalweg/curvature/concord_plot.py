"""The picture of a network of partial correlations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from thalweg.common.optional import requires

NODE_SIZES = (15.0, 120.0)


def draw_network(
    correlations: Any, graph: Any, labels: Sequence[str], n_labels: int, ax: Any
) -> Any:
    """Draw the variables that have edges, with the colors of their partial correlations."""
    with requires("plot"):
        import matplotlib.pyplot as plt
        import networkx as nx
        from matplotlib.collections import LineCollection
    ax = plt.subplots(layout="constrained")[1] if ax is None else ax
    ax.set_axis_off()
    upper = sparse.coo_array(sparse.triu(sparse.coo_array(graph), 1))
    if upper.nnz == 0:
        ax.set_title("no edges")
        return ax
    values = np.asarray(sparse.csr_array(correlations)[upper.row, upper.col]).ravel()
    network = nx.Graph()
    network.add_weighted_edges_from(
        zip(upper.row.tolist(), upper.col.tolist(), np.abs(values).tolist(), strict=True)
    )
    places = nx.spring_layout(network, seed=0, k=1.5 / np.sqrt(len(network)), iterations=100)
    lines = LineCollection(
        [(places[i], places[j]) for i, j in zip(upper.row, upper.col, strict=True)],
        cmap="RdBu_r",
        linewidths=0.5 + 3 * np.abs(values) / np.abs(values).max(),
        zorder=1,
    )
    lines.set_array(values)
    lines.set_clim(-np.abs(values).max(), np.abs(values).max())
    ax.add_collection(lines)
    degrees = dict(network.degree())
    nodes = list(network)
    share = np.array([degrees[i] for i in nodes]) / max(degrees.values())
    at = np.array([places[i] for i in nodes])
    small, large = NODE_SIZES
    ax.scatter(*at.T, s=small + (large - small) * share, c="0.25", zorder=2)
    for i in sorted(nodes, key=lambda node: -degrees[node])[:n_labels]:
        ax.annotate(labels[i], places[i], xytext=(3, 3), textcoords="offset points", fontsize=8)
    ax.figure.colorbar(lines, ax=ax, label="partial correlation", shrink=0.6)
    return ax
