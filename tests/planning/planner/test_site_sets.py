"""Sets of sites that documents are planned on: of alike ones few, no order that links forbid, as many as for sequences
of one length."""

import numpy as np
import pytest

from farpipe.core.spec import Cluster, Job, Model, Pins, SiteLink, Training, preset_site
from farpipe.planning.planner.document_layouts import document_layouts
from farpipe.planning.planner.search import LARGE
from farpipe.planning.workload.layout import MAX_SITES

MODEL = Model(num_layers=8, hidden=2048, num_heads=16, ffn_hidden=8192, vocab_size=32000)
DOCUMENTS = np.full(64, 1000)


def job(devices, without=(), gbit=10.0, model=MODEL, **pins):
    names = "abcdefgh"[: len(devices)]
    ends = [(a, b) for a in names for b in names if a != b and {a, b} not in map(set, without)]
    links = [SiteLink(source=a, target=b, latency_s=0.01, bandwidth_bytes_per_s=gbit * 1.25e8) for a, b in ends]
    each = [(device, 8) if isinstance(device, str) else device for device in devices]
    sites = [preset_site(name, *one) for name, one in zip(names, each, strict=True)]
    training = Training(sequence_length=4096, global_batch=8)
    return Job(model=model, training=training, cluster=Cluster(sites=sites, links=links), layout=Pins(**pins))


def names_of(request):
    return {one.where for one in document_layouts(request, DOCUMENTS, DOCUMENTS.size)}


def test_of_identical_sites_one_set_of_each_size_is_tried():
    assert names_of(job(["h100"] * 3)) == {"a", "a > b", "a > b > c", "a + b", "a + b + c"}


def test_unlike_sites_are_tried_in_several_orders_and_have_no_replicas_each():
    """Of the same sites in the two best orders, in one direction: the reverse of the best is planned in the end."""
    found = names_of(job(["h100", "a100-40gb", "a100-80gb"]))
    assert found == {"a", "b", "c", "a > b", "a > c", "b > c", "a > b > c", "b > a > c"}


def test_orders_follow_links():
    found = names_of(job(["h100", "a100-40gb", "a100-80gb"], without=["bc"]))
    assert found == {"a", "b", "c", "a > b", "a > c", "b > a > c"}


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"sites": ("b", "a")}, {"b > a", "b + a"}),
        ({"sites": ("b", "a"), "replicas": "across"}, {"b + a"}),
        ({"sites": ("b",)}, {"b"}),
        ({"sites": ("b",), "replicas": "across"}, {"b"}),
        ({"replicas": "across"}, {"a + b", "a + b + c"}),
        ({"replicas": "inside"}, {"a", "a > b", "a > b > c"}),
    ],
)
def test_pins_hold(pins, expected):
    assert names_of(job(["h100"] * 3, **pins)) == expected


def test_many_sites_are_not_tried_in_all_their_sets():
    found = names_of(job(["h100", "a100-40gb"] * 4))
    assert len(found) <= 3 * LARGE.per_kind
    assert max(where.count(">") for where in found) == MAX_SITES - 1


def test_a_pipeline_has_all_ranks_that_sites_hold_and_of_equal_ones_most_replicas():
    found = document_layouts(job([("h100", 6)], tensor=1, context=1), DOCUMENTS, DOCUMENTS.size)
    assert [(one.layout.data, one.layout.pipeline) for one in found] == [(6, 1), (3, 2), (2, 3), (1, 6)]


def test_tensors_and_chunks_are_divided_over_parts_of_a_machine_of_six():
    six = MODEL.model_copy(update={"num_heads": 24, "num_kv_heads": 24, "hidden": 3072, "ffn_hidden": 12288})
    found = document_layouts(job([("h100", 6)], model=six), DOCUMENTS, DOCUMENTS.size)
    degrees = {(one.layout.tensor, one.layout.context) for one in found}
    assert {(3, 1), (6, 1), (1, 6), (2, 3)} <= degrees


def test_fewer_documents_than_devices_leave_fewer_replicas():
    found = document_layouts(job(["h100"]), DOCUMENTS[:3], 3)
    assert max(one.layout.data for one in found) <= 3
