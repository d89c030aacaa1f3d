"""Networks, modulation tables and topologies: what is read, and what is refused."""

import json

import pytest

from farpipe.core.catalog import mode_names, mode_row
from farpipe.core.errors import InputError, UsageError
from farpipe.optical import find_modulation, find_network
from farpipe.optical.modulation import of_modes
from farpipe.optical.network import load_network, network_from_data
from farpipe.optical.network_files import fibre_km

RATES = {100: 4560, 200: 2400, 300: 1280, 400: 640}
"""Reach in km by Gbit/s."""
TRIANGLE = "a,b,km\n1,2,100\n2,3,200\n1,3,400\n"


def written(tmp_path, text, name="links.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_every_edge_is_a_fibre_each_way(tmp_path):
    network = load_network(written(tmp_path, TRIANGLE))
    assert network.num_fibres == 6
    assert network.fibres["1", "2"] != network.fibres["2", "1"]
    assert network.path_km(["1", "2", "3"]) == 300
    assert network.fibre_names()[:2] == ("1>2", "2>1")


def test_shared_spectrum_is_one_fibre_for_both_directions(tmp_path):
    network = load_network(written(tmp_path, TRIANGLE), shared=True)
    assert network.num_fibres == 3
    assert network.fibres["1", "2"] == network.fibres["2", "1"]


def test_parallel_fibres_have_spectra_of_their_own(tmp_path):
    network = load_network(written(tmp_path, "a,b,km,fibres\n1,2,100,3\n"))
    assert network.num_fibres == 6
    assert len(set(network.fibres["1", "2"]) | set(network.fibres["2", "1"])) == 6


def test_json_says_the_same_as_csv(tmp_path):
    network = load_network(written(tmp_path, TRIANGLE))
    edges = [{"a": e.a, "b": e.b, "km": e.km, "fibres": e.num_fibres} for e in network.edges]
    data = {"format": "farpipe/network/1", "name": network.name, "shared": False, "edges": edges}
    assert load_network(written(tmp_path, json.dumps(data), "links.json")) == network


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b,km\n1,2,100\n3,4,100\n", "not connected: no path from 1 to 3, 4"),
        ("a,b,km\n1,2,0\n", "line 2: km: must be more than 0"),
        ("a,b,km\n1,2,-5\n", "line 2: km: must be more than 0, found -5"),
        ("a,b,km\n1,2,1e308\n", "half of the Earth's circumference .20,038 km.; are the lengths metres"),
        ("a,b,km\n1,2,64300\n2,3,20\n", "line 2: km: 64,300 km of fibre are more than half of the Earth's"),
        ("a,b,km\n1,2,nan\n", "km: expected a number"),
        ("a,b,km\n1,2,100\n2,1,100\n", "line 3: the edge 2-1 is there already"),
        ("a,b,km\n1,1,100\n", "from 1 to itself"),
        ("a,b,km\n1,2\n", "line 2: expected 3 columns, found 2"),
        ("a,b\n1,2\n", "the column 'km' is missing"),
        ("a,b,km,fibers\n1,2,100,2\n", "unknown column 'fibers'; did you mean 'fibres'"),
        ("a,b,km,fibres\n1,2,100,1.5\n", "fibres: expected a whole number"),
        ("a,b,km\n", "at least one edge"),
        ("a,b,km\n1>2,3,100\n", "without '>'"),
    ],
)
def test_a_bad_network_is_refused_with_its_place(tmp_path, text, says):
    with pytest.raises(InputError, match=says):
        load_network(written(tmp_path, text))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"edges": []}, "at least one edge"),
        ({"edges": [{"a": 1, "b": 2}]}, r"edges\[0\]: km: missing"),
        ({"edges": [{"a": 1, "b": 2, "km": True}]}, r"edges\[0\], 1-2: km: expected a number"),
        ({"edges": [{"a": 1, "b": 2, "km": None}]}, r"edges\[0\], 1-2: km: missing, expected a number"),
        ({"edge": []}, "edge: unknown key; did you mean 'edges'"),
        ({"edges": [{"a": 1, "b": 2, "km": 1, "fiber": 2}]}, "fiber: unknown key"),
        ({"shared": 1, "edges": []}, "shared: expected true or false"),
    ],
)
def test_bad_json_is_refused_with_its_place(data, says):
    with pytest.raises(InputError, match=says):
        network_from_data({"format": "farpipe/network/1", **data}, "links.json")


def test_nsfnet_is_known_by_name():
    network = find_network("nsfnet")
    assert (len(network.nodes), len(network.edges), network.num_fibres) == (14, 22, 44)


def test_an_unknown_network_is_refused_with_what_there_is():
    with pytest.raises(InputError, match="give nsfnet"):
        find_network("arpanet")


def test_topohub_has_sndlib_and_topology_zoo():
    pytest.importorskip("topohub")
    network = find_network("topohub:sndlib/germany50")
    assert (len(network.nodes), len(network.edges)) == (50, 88)
    with pytest.raises(InputError, match="no topology"):
        find_network("topohub:sndlib/germany51")


def test_coronet_comes_with_gnpy():
    pytest.importorskip("gnpy")
    network = find_network("gnpy:coronet-conus")
    assert len(network.nodes) == 75
    assert len(network.edges) == 99


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'farpipe\[optical\]'"):
        find_network("topohub:sndlib/polska")


@pytest.mark.parametrize(("air", "fibre"), [(0.1, 1), (100, 150), (1000, 1500), (1100, 1500), (2000, 2500)])
def test_fibre_is_longer_than_the_great_circle(air, fibre):
    assert fibre_km(air) == fibre


@pytest.mark.parametrize(("km", "bits"), [(1, 4), (625, 4), (626, 3), (1250, 3), (2500, 2), (2501, 1), (9000, 1)])
def test_deeprmsa_reach(km, bits):
    assert find_modulation("deeprmsa").efficiency(km) == bits


def test_gnpys_table_has_the_reach_of_the_modes_that_it_keeps():
    table, modes = find_modulation("gnpy"), [mode_row(name) for name in mode_names()]
    kept = {(row.reach_km, row.rate_gbit_s / row.width_ghz) for row in modes}
    assert set(table.rows) <= kept
    assert len(table.rows) >= 4
    assert [bits for _, bits in table.rows] == sorted((bits for _, bits in table.rows), reverse=True)
    assert [reach for reach, _ in table.rows] == sorted(reach for reach, _ in table.rows)
    for mode in modes:  # at a mode's reach the table carries as much per Hz, or more
        assert table.efficiency(mode.reach_km) >= mode.rate_gbit_s / mode.width_ghz
    assert table.efficiency(max(mode.reach_km for mode in modes) + 1) == 0


def test_modes_that_another_beats_in_both_are_left_out():
    table = of_modes("x", [(100.0, 4.0), (80.0, 4.0), (300.0, 2.0), (300.0, 3.0), (50.0, 1.0)])
    assert table.rows == ((100.0, 4.0), (300.0, 3.0))


def test_faster_modes_reach_less_far_about_as_far_as_others_have_measured():
    """80 km spans, 2 dB margin, another program on gnpy: 100G 4560 km, 200G 2400, 300G 1280, 400G 640."""
    reach = {
        rate: max(row.reach_km for row in map(mode_row, mode_names()) if row.rate_gbit_s == rate) for rate in RATES
    }
    assert reach[100] > reach[200] > reach[300] > reach[400]
    for rate, measured_km in RATES.items():
        assert reach[rate] == pytest.approx(measured_km, rel=0.25)


def test_a_table_from_a_file_ends_at_its_reach(tmp_path):
    table = find_modulation(str(written(tmp_path, "reach_km,bit_s_hz\n500,4\n2000,2\n", "table.csv")))
    assert [table.efficiency(km) for km in (500, 501, 2000, 2001)] == [4, 2, 2, 0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reach_km,bit_s_hz\n500,4\n,3\n2000,2\n", "line 3: reach_km: the table has a gap"),
        ("reach_km,bit_s_hz\n500,4\n2000,\n", "line 3: bit_s_hz: the table has a gap"),
        ("reach_km,bit_s_hz\n500,4\n400,3\n", "must rise from row to row"),
        ("reach_km,bit_s_hz\n500,4\n800,4\n", "must fall as the reach rises"),
        ("reach_km,bit_s_hz\n0,4\n", "must be more than 0"),
        ("reach_km,bit_s_hz\n", "at least one row"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(tmp_path, text, says):
    with pytest.raises(InputError, match=says):
        find_modulation(str(written(tmp_path, text, "table.csv")))


def test_an_unknown_table_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'deeprmsa'"):
        find_modulation("deeprma")
