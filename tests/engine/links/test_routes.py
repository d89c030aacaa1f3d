from farpipe.engine.links.state import next_links
from wans import both_ways, link


def ways(sites, links):
    return {pair: found.name for pair, found in next_links(sites, links).items()}


def test_sites_in_a_row_reach_each_other_over_those_between():
    found = ways("abc", both_ways("a", "b") + both_ways("b", "c"))
    assert found["a", "c"] == "a>b"
    assert found["b", "c"] == "b>c"
    assert found["c", "a"] == "c>b"


def test_a_link_of_ones_own_is_taken_even_if_it_is_slower():
    found = ways("abc", [*both_ways("a", "b"), *both_ways("b", "c"), link("a", "c", latency_s=9.0)])
    assert found["a", "c"] == "a>c"


def test_of_ways_over_equally_many_links_the_fastest_is_taken():
    slow, fast = both_ways("a", "s", latency_s=0.1), both_ways("a", "f", latency_s=0.01)
    found = ways("asfb", [*slow, *fast, *both_ways("s", "b"), *both_ways("f", "b")])
    assert found["a", "b"] == "a>f"


def test_what_can_not_be_reached_is_missing():
    found = ways("abc", [link("a", "b")])
    assert found == {("a", "b"): "a>b"}
