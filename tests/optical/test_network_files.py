"""Network files of others: the same triangle in every format, and what is refused."""

import itertools
import json

import pytest

from farpipe.core.errors import InputError
from farpipe.optical import find_network
from farpipe.optical.network_files import fibre_km

KM = {("a", "b"): 100.0, ("b", "c"): 200.0, ("a", "c"): 400.0}
PLACES = {"a": (13.4, 52.5), "b": (11.6, 48.1), "c": (8.7, 50.1)}  # Berlin, Munich, Frankfurt
AIR_KM = {("a", "b"): 504, ("b", "c"): 306, ("a", "c"): 422}


def node_link(key, edges="links", factor=1.0):
    nodes = [{"id": i, "name": name} for i, name in enumerate("abc")]
    ends = [{"source": "abc".index(a), "target": "abc".index(b), key: km * factor} for (a, b), km in KM.items()]
    return json.dumps({"directed": False, "multigraph": False, "graph": {}, "nodes": nodes, edges: ends})


def gnpy_json(metres=False):
    """Both directions of every edge, each a fibre, an amplifier and another fibre between two ROADMs."""
    elements = [{"uid": f"roadm {city}", "type": "Roadm", "metadata": {"location": {"city": city}}} for city in "abc"]
    connections, scale = [], 500.0 if metres else 0.5
    for (a, b), km in KM.items():
        for start, end in ((a, b), (b, a)):
            line = [f"{part} {start}{end}" for part in ("fibre", "amplifier", "more fibre")]
            for uid in line:
                params = {"length": km * scale, "length_units": "m" if metres else "km"}
                kind = {"type": "Edfa"} if uid.startswith("amp") else {"type": "Fiber", "params": params}
                elements.append({"uid": uid, **kind})
            chain = [f"roadm {start}", *line, f"roadm {end}"]
            connections += [{"from_node": x, "to_node": y} for x, y in itertools.pairwise(chain)]
    return json.dumps({"elements": elements, "connections": connections})


def gnpy_of_transceivers():
    """As optical-rl-gym's converter writes it: numbers for names, no ROADM, cities without a name, one direction."""
    elements = [{"uid": i, "type": "Transceiver", "metadata": {"location": {"city": ""}}} for i in range(3)]
    connections = []
    for (a, b), km in KM.items():
        elements.append({"uid": f"Fiber ({a} to {b})", "type": "Fiber", "params": {"length": km, "length_units": "km"}})
        chain = ["abc".index(a), elements[-1]["uid"], "abc".index(b)]
        connections += [{"from_node": x, "to_node": y} for x, y in itertools.pairwise(chain)]
    return json.dumps({"gnpy-network-topology:topology": {"elements": elements, "connections": connections}})


def gym_text(links=3):
    lines = "".join(f"{a} {b} {km}\n" for (a, b), km in KM.items())
    return f"# made up\n3\n{links}\n{lines}"


def graphml(km_of=KM, head=""):
    nodes = "".join(f'<node id="{name}"/>' for name in "abc")
    edges = "".join(f'<edge source="{a}" target="{b}"><data key="k">{km}</data></edge>' for (a, b), km in km_of.items())
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>{head}<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
        f'<key id="k" for="edge" attr.name="length" attr.type="double"/><graph edgedefault="undirected">{nodes}{edges}'
        "</graph></graphml>"
    )


def gml():
    nodes = "".join(f'node [ id {i} label "{name}" ]\n' for i, name in enumerate("abc"))
    edges = "".join(f"edge [ source {'abc'.index(a)} target {'abc'.index(b)} km {km} ]\n" for (a, b), km in KM.items())
    return f"graph [\n{nodes}{edges}]\n"


def sndlib_native():
    nodes = "".join(f"  {name} ( {x} {y} )\n" for name, (x, y) in PLACES.items())
    links = "".join(f"  L{a}{b} ( {a} {b} ) 0.00 0.00 0.00 1.00 ( 40.00 5.00 )\n" for a, b in KM)
    demands = "DEMANDS (\n  D1 ( a b ) 1 195.00 UNLIMITED\n)\n"
    head = "?SNDlib native format; type: network; version: 1.0\n# made up\n"
    return f"{head}NODES (\n{nodes})\n\nLINKS (\n{links})\n{demands}"


def sndlib_xml():
    nodes = "".join(
        f'<node id="{name}"><coordinates><x>{x}</x><y>{y}</y></coordinates></node>' for name, (x, y) in PLACES.items()
    )
    links = "".join(f'<link id="{a}{b}"><source>{a}</source><target>{b}</target></link>' for a, b in KM)
    demands = '<demands><demand id="d"><source>a</source><target>b</target></demand></demands>'
    return (
        '<?xml version="1.0" encoding="ISO-8859-1"?><network xmlns="http://sndlib.zib.de/network" version="1.0">'
        f'<networkStructure><nodes coordinatesType="geographical">{nodes}</nodes><links>{links}</links>'
        f"</networkStructure>{demands}</network>"
    )


def read(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    return find_network(str(path))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("n.json", node_link("weight")),
        ("n.json", node_link("length", "edges")),
        ("n.json", node_link("km")),
        ("n.json", node_link("distance")),
        ("n.json", gnpy_json()),
        ("n.json", gnpy_json(metres=True)),
        ("n.graphml", graphml()),
        ("n.xml", graphml()),
        ("n.gml", gml()),
        ("n.txt", gym_text()),
    ],
)
def test_every_format_gives_the_same_network(tmp_path, name, text):
    network = read(tmp_path, name, text)
    assert {tuple(sorted((edge.a, edge.b))): edge.km for edge in network.edges} == KM


def test_weights_that_are_all_1_are_no_km(tmp_path):
    """Graph libraries write such weights beside the lengths."""
    document = json.loads(node_link("distance"))
    for edge in document["links"]:
        edge["weight"] = 1
    network = read(tmp_path, "n.json", json.dumps(document))
    assert {tuple(sorted((edge.a, edge.b))): edge.km for edge in network.edges} == KM
    for edge in document["links"]:
        del edge["distance"]
    with pytest.raises(
        InputError, match=r"no edge between two nodes has a length.*\(weights that are all 1 are none\)"
    ):
        read(tmp_path, "n.json", json.dumps(document))


@pytest.mark.parametrize(("name", "text"), [("n.txt", sndlib_native()), ("n.xml", sndlib_xml())])
def test_sndlib_s_edges_are_as_long_as_their_ends_are_apart(tmp_path, name, text):
    network = read(tmp_path, name, text)
    for ends, air_km in AIR_KM.items():
        assert network.km[ends] == pytest.approx(fibre_km(air_km), rel=0.01)


def test_dist_is_a_great_circle_and_parallel_edges_are_one(tmp_path):
    network = read(tmp_path, "n.json", node_link("dist"))
    assert network.km["a", "b"] == 150
    data = json.loads(node_link("km"))
    data["links"] += [{"source": 1, "target": 0, "km": 90}, {"source": 2, "target": 2, "km": 5}]
    assert read(tmp_path, "n.json", json.dumps(data)).km["a", "b"] == 90


def test_gml_may_repeat_an_edge_as_the_topology_zoo_does(tmp_path):
    again = "edge [ source 1 target 0 km 90 ]\n]\n"
    assert read(tmp_path, "n.gml", gml()[:-2] + again).km["a", "b"] == 90


def test_transceivers_are_sites_of_a_file_without_roadms(tmp_path):
    network = read(tmp_path, "n.json", gnpy_of_transceivers())
    assert {(edge.a, edge.b): edge.km for edge in network.edges} == {("0", "1"): 100, ("1", "2"): 200, ("0", "2"): 400}


def test_roadms_of_one_city_are_not_one_site(tmp_path):
    network = read(tmp_path, "n.json", gnpy_json().replace('"city": "b"', '"city": "a"'))
    assert {(edge.a, edge.b): edge.km for edge in network.edges} == {
        (f"roadm {a}", f"roadm {b}"): km for (a, b), km in KM.items()
    }


def located_gml(names, edges):
    at = {name: "Longitude {} Latitude {}".format(*place) for name, place in PLACES.items()} | {"e": "lon 9.9 lat 53.5"}
    nodes = "".join(f'node [ id {i} label "{name}" {at.get(name, "")} ]\n' for i, name in enumerate(names))
    links = "".join(f"edge [ source {names.index(a)} target {names.index(b)} ]\n" for a, b in edges)
    return f"graph [\n{nodes}{links}]\n"


def test_nodes_that_lie_nowhere_are_left_out_and_named(tmp_path):
    """The Topology Zoo draws other networks as nodes without a position."""
    network = read(tmp_path, "n.gml", located_gml("abcd", ("ab", "bc", "db")))
    assert (network.nodes, network.left_out) == (("a", "b", "c"), ("d",))
    with pytest.raises(InputError, match=r"not connected without d, which have no position: no path from a to c, e;"):
        read(tmp_path, "n.gml", located_gml("abcde", ("ab", "bd", "dc", "ce")))


def located(km, places=PLACES):
    nodes = [{"id": name, "name": name, "lon": x, "lat": y} for name, (x, y) in places.items()]
    return json.dumps({"nodes": nodes, "links": [{"source": a, "target": b, "km": km[a, b]} for a, b in KM]})


def located_gnpy(places):
    data = json.loads(gnpy_json())
    for element in data["elements"]:
        if element["type"] == "Roadm":
            place = element["metadata"]["location"]
            place["longitude"], place["latitude"] = places[place["city"]]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (located(KM), "ends: 2 of 3, the worst a-b with 100 km of fibre for 505.6 km"),
        (located(AIR_KM), ""),
        (located({ends: 0.95 * km for ends, km in AIR_KM.items()}), ""),
        (located({ends: 4 * km for ends, km in AIR_KM.items()}), ""),
        (located({ends: 30 * km for ends, km in AIR_KM.items()}), "more than 5 times as long as the great circle"),
        (located(KM, {"a": (0, 2), "b": (5, 0), "c": (3, 9)}), ""),  # whole degrees: a drawing
        (located(KM, {"a": (13.4, 520.5), "b": (11.6, 480.1), "c": (8.7, 500.1)}), ""),
        (node_link("km"), ""),
        (located_gnpy(PLACES), "2 of 3, the worst a-b with 100 km of fibre for 505.6 km"),
    ],
)
def test_lengths_that_positions_contradict_are_doubted(tmp_path, text, says):
    doubt = read(tmp_path, "n.json", text).doubt
    assert says in doubt
    assert bool(says) == bool(doubt)


BOMB = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'
ROUND = {"uid": "x", "type": "Edfa"}
ROADM = {"uid": "r", "type": "Roadm"}
START = {"from_node": "r", "to_node": "x"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("n.json", gnpy_json().replace('"to_node": "fibre ab"', '"to_node": "fibre aa"'), "no element 'fibre aa'; did"),
        ("n.graphml", graphml(head=BOMB), r"document type \(DTD\) is not read"),
        ("n.graphml", "<graphml", "not a network in the format of its name: ParseError"),
        ("n.xml", "<html/>", "at least one edge"),
        ("n.graphml", graphml({("a", "b"): "far"}), "not a network in the format of its name: ValueError"),
        ("n.graphml", graphml({("a", "b"): -1}), "edge 0, a-b: length: must be more than 0, found -1"),
        ("n.gml", "graph [ node [ id 0 ]", "not a network in the format of its name: NetworkXError"),
        (
            "n.gml",
            gml().replace("km", "color"),
            "no edge between two nodes has a length: give km of fibre as one of km, length, weight, distance",
        ),
        ("n.txt", gym_text(4), "the second line says 4 links, found 3 lines"),
        ("n.txt", gym_text().replace("100.0", ""), "or optical-rl-gym's: the number of nodes"),
        ("n.txt", gym_text().replace("100.0", "nan"), "edge 0, a-b: km: expected a number, found 'nan'"),
        ("n.txt", "NODES (\n)", "first line is '.SNDlib native format"),
        (
            "n.txt",
            sndlib_native().replace("13.4", "1340"),
            "node 'a': expected longitude and latitude in degrees, found 1340, 52.5; from pixels no",
        ),
        ("n.txt", sndlib_native().replace("( a c )", "( a d )"), "edge 2: there is no node 'd'"),
        ("n.json", json.dumps({"nodes": [{"id": 1}], "links": [{"source": 1}]}), "an entry lacks 'target'"),
        ("n.json", json.dumps({"nodes": [{"id": 1}, {"id": 1}], "links": []}), "entry 1: id 1 is there already"),
        ("n.json", json.dumps({"nodes": 7, "links": []}), "TypeError"),
        ("n.json", json.dumps({"elements": [ROADM, ROUND], "connections": [START]}), "nothing follows 'x'"),
        (
            "n.json",
            json.dumps({"elements": [ROADM, ROUND], "connections": [START, {"from_node": "x", "to_node": "x"}]}),
            "a network needs at least one edge",
        ),
        ("n.json", node_link("km").replace("100.0", "null"), "edge 0, a-b: km: missing, expected a number"),
        ("n.xls", "x", r"a network is a file \.csv"),
    ],
)
def test_a_bad_file_is_refused_with_what_is_wrong(tmp_path, name, text, says):
    with pytest.raises(InputError, match=says):
        read(tmp_path, name, text)
