"""The Gset's graphs against published facts, and the random instances' structure."""

import numpy as np
import pytest

from thalweg.combinatorial import batched_local_search
from thalweg.tasks import (
    GSET_NAMES,
    GSET_TYPES,
    gset_instance,
    gset_like,
    hub_heavy,
    planted_geometric,
    regular_glass,
    rudy_graph,
    toroidal_glass,
)
from thalweg.tasks.gset import _FlipNumbers

# Vertices and edges as every paper on the Gset lists them. The planar unions' edge counts depend on
# every random number drawn.
PUBLISHED = {
    "G1": (800, 19176), "G6": (800, 19176), "G11": (800, 1600), "G12": (800, 1600),
    "G14": (800, 4694), "G15": (800, 4661), "G16": (800, 4672), "G17": (800, 4667),
    "G18": (800, 4694), "G22": (2000, 19990), "G27": (2000, 19990), "G35": (2000, 11778),
    "G36": (2000, 11766), "G37": (2000, 11785), "G38": (2000, 11779), "G42": (2000, 11779),
    "G43": (1000, 9990), "G48": (3000, 6000), "G50": (3000, 6000), "G51": (1000, 5909),
    "G52": (1000, 5916), "G53": (1000, 5914), "G54": (1000, 5916),
    "G55": (5000, 12498), "G56": (5000, 12498), "G58": (5000, 29570), "G59": (5000, 29570),
    "G60": (7000, 17148), "G61": (7000, 17148), "G63": (7000, 41459), "G64": (7000, 41459),
}  # fmt: skip


def cuts(W, S):
    S = S.astype(float)
    return 0.25 * (W.sum() - np.einsum("ir,ir->r", S, W @ S))


def test_random_numbers_are_those_of_the_stanford_graphbase():
    """The check values that D. E. Knuth prints with the generator."""
    draw = _FlipNumbers(-314159)
    assert draw.next() == 119318998
    for _ in range(133):
        draw.next()
    assert draw.below(0x55555555) == 748103812


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name):
    W = gset_instance(name).weights
    assert (W.shape[0], W.nnz // 2) == PUBLISHED[name]
    assert (W != W.T).nnz == 0
    assert not W.diagonal().any()
    assert set(np.unique(W.data)) <= {-1.0, 1.0}


def test_all_graphs_can_be_made():
    assert len(GSET_NAMES) == 59
    for name in GSET_NAMES:
        assert gset_instance(name).best_known > 0


@pytest.mark.parametrize("name", ["G1", "G6", "G7", "G11", "G12", "G43"])
def test_the_best_known_cut_is_reached_and_not_exceeded(name):
    """It is a fact about these very graphs, weights included."""
    graph = gset_instance(name)
    starts = np.random.default_rng(0).choice([-1, 1], size=(graph.weights.shape[0], 32))
    found = batched_local_search(-graph.weights, starts, method="anneal", sweeps=4000, rng=1)
    assert cuts(graph.weights, found.spins).max() == graph.best_known


def test_the_bipartite_tori_are_cut_completely():
    for name, best in (("G48", 6000), ("G49", 6000)):
        graph = gset_instance(name)
        assert graph.best_known == best == graph.weights.nnz // 2


def test_every_type_up_to_g67_can_be_made():
    assert [f"G{i}" for i in range(1, 68)] == list(GSET_TYPES)
    sizes = {"G32": (2000, 4000), "G57": (5000, 10000), "G62": (7000, 14000), "G67": (10000, 20000)}
    for name, size in sizes.items():
        W = gset_like(name, seed=1)
        assert (W.shape[0], W.nnz // 2) == size
        assert set(np.unique(W.data)) == {-1.0, 1.0}
    with pytest.raises(ValueError, match="name must be one of"):
        gset_instance("G57")


def test_graphs_like_another_differ_only_by_chance():
    one, two = gset_like("G14", seed=1), gset_like("G14", seed=2)
    assert one.shape == two.shape == (800, 800)
    assert abs(one.nnz - two.nnz) < 200
    assert (one != two).nnz > 0
    assert (gset_like("G11", seed=1) != gset_like("G11", seed=1)).nnz == 0


def test_hubs_geometry_tori_and_regular_graphs_are_what_they_say():
    hubs = np.diff(hub_heavy(2000, 12_000, rng=0).indptr)
    assert hubs.max() > 15 * np.median(hubs)
    geometric = planted_geometric(5000, 10.0, flip=0.0, rng=0)
    assert 9 < geometric.nnz / 5000 < 10.2  # fewer at the border
    # Without flips every cycle is balanced: the planted state satisfies everything.
    found = batched_local_search(geometric, np.ones((5000, 1)), method="anneal", rng=0)
    assert -found.energies[0] <= geometric.nnz / 2
    values = np.linalg.eigvalsh(planted_geometric(300, flip=0.0, rng=1).toarray())
    ferromagnet = abs(planted_geometric(300, flip=0.0, rng=1)).toarray()
    np.testing.assert_allclose(values, np.linalg.eigvalsh(ferromagnet), atol=1e-10)
    torus = toroidal_glass(6, 7, negative=0.25, rng=0)
    assert np.all(np.diff(torus.indptr) == 4)
    assert 0.05 < (torus.data < 0).mean() < 0.5
    glass = regular_glass(3000, 3, rng=0)
    assert (np.diff(glass.indptr) == 3).mean() > 0.99
    assert abs(glass.data.mean()) < 5 / np.sqrt(glass.nnz / 2)


def test_flips_reverse_the_stated_share():
    straight = planted_geometric(5000, flip=0.0, rng=3)
    bent = planted_geometric(5000, flip=0.2, rng=3)
    share = (straight.data != bent.data).mean()
    assert abs(share - 0.2) < 5 * np.sqrt(0.16 / (straight.nnz / 2))


def test_bad_input():
    with pytest.raises(ValueError, match="name must be one of"):
        gset_instance("G32")
    with pytest.raises(ValueError, match="name must be one of"):
        gset_like("H1", 0)
    with pytest.raises(ValueError, match="seed must be an integer >= 0"):
        gset_like("G1", -1)
    with pytest.raises(ValueError, match="kind must be one of"):
        rudy_graph("cubic", 10, 5, 0)
    with pytest.raises(ValueError, match="rows must be an integer >= 3"):
        rudy_graph("torus", 2, 5, 0)
    with pytest.raises(ValueError, match="second must be a finite number > 0"):
        rudy_graph("random", 10, 0, 0)
    with pytest.raises(ValueError, match="flip must be"):
        planted_geometric(10, flip=0.7)
    with pytest.raises(ValueError, match="n must be an integer >= 2"):
        hub_heavy(1, 3)
    with pytest.raises(ValueError, match="rows must be an integer >= 3"):
        toroidal_glass(2, 5)
    with pytest.raises(ValueError, match="n must be an integer >= 4"):
        regular_glass(3, 3)
