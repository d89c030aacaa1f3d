"""Settings of a group: where they come from, and what is said of those that make no sense."""

import json

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.spec import parse_job
from farpipe.torch import Options

CLUSTER = """
[cluster]
sites = [{ name = "zurich", device = "cpu", num_devices = 1 }, { name = "lugano", device = "cpu", num_devices = 1 },
         { name = "basel", device = "cpu", num_devices = 1 }]

[[cluster.links]]
between = ["zurich", "lugano"]
latency = "20 ms"
bandwidth = "200 Mbit/s"
"""

TRAINING = """
[model]
preset = "tiny"

[training]
sequence_length = 64
global_batch = 8
microbatch_size = 1
num_steps = 1
precision = "fp32"
"""


@pytest.fixture
def links(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def config(*options, rank=0, timeout_s=60.0):
    return options[rank].config(rank, [o.introduction() for o in options], timeout_s, 3)


def test_the_environment_gives_every_setting_and_a_call_changes_some():
    env = {
        "FARPIPE_SITE": "zurich",
        "FARPIPE_PORT": "29600",
        "FARPIPE_EMULATE": "1",
        "FARPIPE_STREAMS": "4",
        "HOME": "/",
    }
    assert Options.from_environment(env) == Options(site="zurich", port=29600, emulate=True, streams=4)
    assert Options.from_environment(env, site="lugano", streams=None).site == "lugano"
    assert Options.from_environment({"FARPIPE_OUTAGE_S": "2.5", "FARPIPE_ALLOW_PLAINTEXT": "no"}).outage_s == 2.5


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("FARPIPE_PORT", "many", "FARPIPE_PORT: expected a whole number, found 'many'"),
        ("FARPIPE_OUTAGE_S", "1 min", "FARPIPE_OUTAGE_S: expected a number, found '1 min'"),
        ("FARPIPE_EMULATE", "maybe", "FARPIPE_EMULATE: expected 0 or 1, found 'maybe'"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named(name, text, words):
    with pytest.raises(InputError, match=words):
        Options.from_environment({name: text})


def test_without_any_setting_ranks_listen_on_loopback_in_plaintext():
    found = config(Options(), Options())
    assert (found.host, found.port, found.tls, found.sites) == ("127.0.0.1", 0, None, ("", ""))
    assert found.timeout_s == 60.0


def test_links_give_rates_and_emulated_ones_shapes(links):
    options = Options(site="zurich", links=links, port=29600), Options(site="lugano", links=links)
    found = config(*options)
    assert found.bandwidths == {(0, 1): 25e6, (1, 0): 25e6}
    assert (found.latency_s, found.port, found.link_shapes()) == (0.02, 29603, {})
    emulated = [Options(site=o.site, links=links, emulate=True) for o in options]
    assert set(config(*emulated).link_shapes()) == {"zurich>lugano", "lugano>zurich"}


def test_a_plan_gives_the_links_of_its_job(links, tmp_path):
    plan = tmp_path / "plan.json"
    planning.plan(parse_job(TRAINING + CLUSTER)).save(plan)
    of_plan = config(Options(site="zurich", links=str(plan)), Options(site="lugano", links=links))
    assert of_plan == config(Options(site="zurich", links=links), Options(site="lugano", links=links))
    with pytest.raises(InputError, match=r"missing\.json"):
        config(Options(site="zurich", links=str(tmp_path / "missing.json")), Options(site="lugano", links=links))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((Options(), Options(streams=2)), "streams is None on rank 0 and 2 on rank 1"),
        ((Options(site="zurich"), Options()), "rank 1 names no site, and rank 0 is at 'zurich'; set FARPIPE_SITE"),
        ((Options(certs="certs"), Options(certs="certs")), "FARPIPE_CERTS: whose are they"),
        ((Options(site="a", certs="certs"), Options(site="a")), "encrypted is True on rank 0 and False on rank 1"),
        ((Options(site="a", certs="c", allow_plaintext=True),) * 2, "contradict each other"),
        ((Options(emulate=True),) * 2, "there are no links to emulate; name a file in FARPIPE_LINKS"),
        ((Options(host="10.1.2.3"),) * 2, "can be reached from other machines, and without certificates"),
        ((Options(outage_s=0.0),) * 2, "outage_s must be more than 0"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, words):
    with pytest.raises(InputError, match=words):
        config(*options)


def test_links_that_differ_between_ranks_are_refused(links, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(CLUSTER.replace("200 Mbit/s", "300 Mbit/s"))
    with pytest.raises(InputError, match=r"links is .*25000000.* on rank 0 and .*37500000.* on rank 1"):
        config(Options(site="zurich", links=links), Options(site="lugano", links=str(other)))


@pytest.mark.parametrize(
    ("site", "words"),
    [
        ("basel", "ranks 0 and 1 of the group have no path: no link has an end at 'basel'"),
        ("lugarno", "no link has an end at 'lugarno'; did you mean 'lugano'"),
    ],
)
def test_ranks_at_sites_without_a_path_are_refused(links, site, words):
    with pytest.raises(InputError, match=words):
        config(Options(site="zurich", links=links), Options(site=site, links=links))


def test_what_is_told_to_others_names_no_files(links):
    assert links not in Options(site="zurich", links=links, certs="/secret").introduction()
    assert json.loads(Options(site="zurich").introduction())["site"] == "zurich"
