import tomllib

import pytest

from farpipe.core.errors import InputError
from farpipe.core.spec.write import with_link

SITES = """# our cluster
[[cluster.sites]]
name = "zurich"   # the old one
device = "cpu"
num_devices = 2

[[cluster.sites]]
name = "lugano"
device = "cpu"
num_devices = 1
"""
BOTH = (
    SITES
    + """
[[cluster.links]]
between = ["zurich", "lugano"]  # a guess
latency = "30 ms"
bandwidth = "200 Mbit/s"
loss = 0.01
"""
)
ONE = (
    SITES
    + """
[[cluster.links]]
from = "zurich"
to = "lugano"
latency = "30 ms"
bandwidth = "200 Mbit/s"

[layout]
pipeline = 3
"""
)


def links(text):
    found = {}
    for link in tomllib.loads(text)["cluster"]["links"]:
        pairs = [link["between"], link["between"][::-1]] if "between" in link else [(link["from"], link["to"])]
        found |= {tuple(pair): (link.get("latency"), link.get("bandwidth"), link.get("loss")) for pair in pairs}
    return found


def test_a_remark_about_the_earlier_figure_goes_with_it():
    guessed = BOTH.replace('latency = "30 ms"', 'latency = "30 ms"  # one way; a ping would show 60')
    after = with_link(guessed, "zurich", "lugano", 0.0123, 117.6e6)
    assert 'latency = "12.3 ms" # measured' in after.replace("  #", " #")
    assert after.count("# one way; a ping would show 60") <= 1  # at the direction that nobody measured
    there, back = (text for text in after.split("[[cluster.links]]")[1:])
    assert "a ping would show" not in there
    assert 'latency = "30 ms"' in back


@pytest.mark.parametrize("text", [SITES, BOTH, ONE], ids=["none", "both", "one"])
def test_a_link_is_written_and_the_rest_stays(text):
    after = with_link(text, "zurich", "lugano", 0.0123, 117.6e6)
    assert links(after)["zurich", "lugano"][:2] == ("12.3 ms", "940.8 Mbit/s")
    assert "# our cluster" in after
    assert "# the old one" in after
    assert tomllib.loads(after)["cluster"]["sites"] == tomllib.loads(text)["cluster"]["sites"]
    assert tomllib.loads(after).get("layout") == tomllib.loads(text).get("layout")


def test_only_one_direction_of_a_link_for_both_is_changed():
    after = links(with_link(BOTH, "zurich", "lugano", 0.001, 1e6))
    assert after["lugano", "zurich"] == ("30 ms", "200 Mbit/s", 0.01)
    assert after["zurich", "lugano"] == ("1 ms", "8 Mbit/s", 0.01)


def test_writing_twice_changes_nothing_more():
    once = with_link(with_link(BOTH, "zurich", "lugano", 0.001, 1e6), "lugano", "zurich", 0.001, 2e6)
    twice = with_link(with_link(once, "zurich", "lugano", 0.001, 1e6), "lugano", "zurich", 0.001, 2e6)
    assert once == twice
    assert len(links(once)) == 2


def test_a_site_that_is_not_there_is_named():
    with pytest.raises(InputError, match="there is no site 'bern'"):
        with_link(BOTH, "zurich", "bern", 0.001, 1e6)
