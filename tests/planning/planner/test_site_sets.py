"""Sets of sites that a batch is tried on: of alike ones one, no order that links forbid."""

import pytest

from farpipe.core.spec import Cluster, Job, Model, Pins, SiteLink, Training, preset_site
from farpipe.planning.planner.site_sets import site_sets_of_batch

MODEL = Model(num_layers=8, hidden=2048, num_heads=16, ffn_hidden=8192, vocab_size=32000)


def job(devices, without=(), gbit=10.0, **pins):
    names = "abcdefgh"[: len(devices)]
    ends = [(a, b) for a in names for b in names if a != b and {a, b} not in map(set, without)]
    links = [SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=gbit * 1.25e8) for a, b in ends]
    sites = [preset_site(name, device, 8) for name, device in zip(names, devices, strict=True)]
    training = Training(sequence_length=4096, global_batch=8)
    return Job(model=MODEL, training=training, cluster=Cluster(sites=sites, links=links), layout=Pins(**pins))


def names_of(request):
    sites = request.cluster.sites
    return {
        ("".join(sites[index].name for index in one.sites), "across" if one.homes else "inside")
        for one in site_sets_of_batch(request)
    }


def test_of_identical_sites_one_set_of_each_size_is_tried():
    assert names_of(job(["h100"] * 3)) == {
        ("a", "inside"),
        *((s, u) for s in ("ab", "abc") for u in ("inside", "across")),
    }


def test_unlike_sites_are_tried_in_every_order_and_have_no_replicas_each():
    expected = {"a", "b", "c", "ab", "ba", "ac", "ca", "bc", "cb", "abc", "acb", "bac", "bca", "cab", "cba"}
    found = names_of(job(["h100", "a100-40gb", "a100-80gb"]))
    assert found == {(names, "inside") for names in expected}


def test_orders_follow_links():
    found = names_of(job(["h100", "a100-40gb", "a100-80gb"], without=["bc"]))
    assert {names for names, _ in found} == {"a", "b", "c", "ab", "ba", "ac", "ca", "bac", "cab"}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"sites": ("b", "a")}, {("ba", "inside"), ("ba", "across")}),
        ({"sites": ("b", "a"), "replicas": "across"}, {("ba", "across")}),
        ({"sites": ("b",)}, {("b", "inside")}),
        ({"replicas": "across"}, {("ab", "across"), ("abc", "across")}),
        ({"replicas": "inside"}, {("a", "inside"), ("ab", "inside"), ("abc", "inside")}),
    ],
)
def test_pins_hold(pins, expected):
    assert names_of(job(["h100"] * 3, **pins)) == expected


def test_many_sites_are_not_tried_in_all_their_sets():
    found = site_sets_of_batch(job(["h100", "a100-40gb"] * 4))
    assert len(found) <= 48
    assert any(len(one.sites) == 8 for one in found)
    assert any(len(one.sites) == 1 for one in found)
