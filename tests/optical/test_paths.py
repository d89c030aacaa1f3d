"""Candidate paths: the k best in a stated order, and tables of them."""

from itertools import pairwise

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpipe.core.errors import InputError, UsageError
from farpipe.optical import find_modulation, find_network, k_shortest, load_paths
from farpipe.optical.network import build_network
from farpipe.optical.paths import SimplePaths
from optical_data import BY_HOPS, BY_KM, LINKS


def network_of(edges, **options):
    return build_network(
        "test", [(f"edge {i}", dict(zip("ab", e[:2], strict=True), km=e[2])) for i, e in enumerate(edges)], **options
    )


SQUARE = network_of([("a", "b", 100), ("b", "c", 100), ("c", "d", 100), ("d", "a", 100), ("a", "c", 500)])


def test_shortest_by_km_and_by_hops():
    by_km, by_hops = (k_shortest(SQUARE, [("a", "c")], k=3, by=by).of_pair["a", "c"] for by in ("km", "hops"))
    assert by_km == (("a", "b", "c"), ("a", "d", "c"), ("a", "c"))
    assert by_hops == (("a", "c"), ("a", "b", "c"), ("a", "d", "c"))


def test_by_efficiency_is_the_least_spectrum():
    line = network_of([("a", "b", 300), ("b", "c", 300), ("a", "c", 3000)])
    by = k_shortest(line, [("a", "c")], k=2, by="efficiency", modulation=find_modulation("deeprmsa"))
    assert by.of_pair["a", "c"] == (("a", "b", "c"), ("a", "c"))  # 2 hops / 4 bit/s/Hz beats 1 hop / 1


def test_a_reverse_path_has_the_same_place():
    table = k_shortest(find_network("nsfnet"), k=5)
    for (a, b), paths in table.of_pair.items():
        assert paths == tuple(nodes[::-1] for nodes in table.of_pair[b, a])


@given(
    edges=st.dictionaries(st.tuples(st.integers(0, 6), st.integers(0, 6)), st.integers(1, 9), max_size=14),
    target=st.integers(1, 6),
)
def test_simple_paths_are_all_of_them_in_ascending_length(edges, target):
    graph = networkx.Graph()
    graph.add_nodes_from(range(7))
    graph.add_edges_from((a, b, {"km": float(km)}) for (a, b), km in edges.items() if a != b)
    near = {node: {other: edge["km"] for other, edge in graph[node].items()} for node in graph}
    found = list(SimplePaths(near).between(0, target))
    assert sorted(found) == sorted(map(tuple, networkx.all_simple_paths(graph, 0, target)))
    lengths = [sum(near[a][b] for a, b in pairwise(path)) for path in found]
    assert lengths == sorted(lengths)


def test_of_many_paths_with_equal_hops_the_shortest_come_first():
    graph = networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(6, 6))
    network = network_of([(f"n{a}", f"n{b}", 1.0 + (7 * a + 13 * b) % 101) for a, b in graph.edges])
    found = k_shortest(network, [("n0", "n35")], k=3, by="hops").of_pair["n0", "n35"]
    ways = networkx.all_shortest_paths(graph, 0, 35)  # 252 of 10 hops each
    lengths = sorted(network.path_km([f"n{node}" for node in way]) for way in ways)
    assert [network.path_km(nodes) for nodes in found] == lengths[:3]


@pytest.mark.parametrize(("path", "by"), [(BY_KM, "km"), (BY_HOPS, "hops")])
def test_frozen_tables_hold_paths_as_short_as_ours(path, by):
    network = find_network(str(LINKS))
    frozen, ours = load_paths(path, network), k_shortest(network, by=by)
    assert frozen.of_pair.keys() == ours.of_pair.keys()
    for pair, paths in frozen.of_pair.items():
        for theirs, own in zip(paths, ours.of_pair[pair], strict=True):  # ties may be settled in another way
            if by == "km":
                assert network.path_km(theirs) == network.path_km(own)
            else:
                assert len(theirs) == len(own)


def test_parallel_fibres_are_more_candidates():
    network = build_network("two", [("edge", {"a": "1", "b": "2", "km": 100, "fibres": 2})])
    table = k_shortest(network, k=1)
    assert len(table.paths) == 4  # two ordered pairs, two fibres
    assert sorted(table.fibres) == [0, 1, 2, 3]


def test_a_grid_of_a_thousand_nodes_is_no_trouble_for_a_few_pairs():
    graph = networkx.convert_node_labels_to_integers(networkx.grid_2d_graph(25, 40))
    network = network_of([(f"n{a}", f"n{b}", 80.0 + (7 * a + 13 * b) % 101) for a, b in graph.edges])
    table = k_shortest(network, [("n0", "n500")], k=3)
    lengths = [network.path_km(nodes) for nodes in table.of_pair["n0", "n500"]]
    shortest = networkx.Graph((edge.a, edge.b, {"km": edge.km}) for edge in network.edges)
    assert lengths[0] == networkx.shortest_path_length(shortest, "n0", "n500", weight="km")
    assert lengths == sorted(lengths)
    with pytest.raises(InputError, match="all pairs of 1000 nodes would take too long to find"):
        k_shortest(network)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"by": "hop"}, "did you mean 'hops'"), ({"k": 0}, "from 1 to"), ({"by": "efficiency"}, "modulation")],
)
def test_wrong_options_are_refused(options, says):
    with pytest.raises(UsageError, match=says):
        k_shortest(SQUARE, **options)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("a,c,0,a-b-c,300", "edges of this path add up to 200 km, found 300"),
        ("a,c,0,a-b,100", "expected a path from a to c"),
        ("a,c,0,a-x-c,100", "there is no node 'x'"),
        ("a,c,0,b-d,100", "expected a path"),
        ("b,d,0,b-d,100", "no edge between b and d"),
        ("a,c,0,a-b-a-c,700", "visits a node twice"),
        ("a,c,x,a-b-c,200", "order: expected a number"),
        ("a,c,0,a-b-c,200\na,c,0,a-d-c,200", "has a path 0 already"),
    ],
)
def test_a_bad_table_of_paths_is_refused_with_its_place(tmp_path, row, says):
    path = tmp_path / "paths.csv"
    path.write_text("src,dst,order,nodes,km\n" + row + "\n")
    with pytest.raises(InputError, match=says):
        load_paths(path, SQUARE)
