"""Ranks that differ: devices, tensor and data degree per rank, and what crosses between them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_jobs import gpt, site, training, two_sites
from farpipe.cost import JobCosts, Layout, RankShape, place_evenly, step_cost
from farpipe.cost.resharding import gather_s
from farpipe.cost.transfer import ring_bytes, ring_link
from farpipe.errors import InfeasibleError, InputError

MODEL, SPEC = gpt(), training(sequence_parallel=False, zero=1)
SITES = ("a", "b")


def shaped(*degrees, size=2, count=None):
    """A pipeline with a rank for each (tensor, data); `size` sequences in a microbatch on a rank with most replicas."""
    shapes = tuple(RankShape("a100-80gb", tensor, data) for tensor, data in degrees)
    data = max(shape.data for shape in shapes)
    count = count or 32 // (data * size)
    return Layout(len(shapes), data, max(shape.tensor for shape in shapes), 1, size, count, shapes=shapes)


def step_of(layout, sites=SITES, spec=SPEC, cluster=None):
    names = sites if len(sites) == layout.pipeline else sites * layout.pipeline
    layers = [MODEL.num_layers // layout.pipeline] * layout.pipeline
    return step_cost(JobCosts(MODEL, spec), layout, place_evenly(names, layers), cluster or two_sites())


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([("a",), ("a", "b")]),
    st.sampled_from([0, 1, 2]),
)
def test_equal_shapes_are_the_step_without_shapes(tensor, data, sites, zero):
    spec = training(sequence_parallel=False, zero=zero)
    with_shapes = shaped((tensor, data), (tensor, data))
    found, plain = (step_of(one, sites, spec) for one in (with_shapes, replace(with_shapes, shapes=())))
    assert found.overhead_s == pytest.approx(plain.overhead_s)
    assert found.problem.stages == plain.problem.stages
    assert found.problem.ranks == plain.problem.ranks
    assert found.problem.sync == plain.problem.sync
    assert found.problem.links.keys() == plain.problem.links.keys()
    same = zip(found.problem.traffic.messages.figures, plain.problem.traffic.messages.figures, strict=True)
    assert all(one == pytest.approx(other) for one, other in same)


def test_a_rank_costs_and_holds_what_a_pipeline_of_its_own_degrees_would():
    layout = shaped((1, 4), (4, 2))
    found = step_of(layout)
    for rank in (0, 1):
        plain = step_of(layout.of_rank(rank))
        assert found.problem.stages[rank] == plain.problem.stages[rank]
        assert found.problem.ranks[rank] == plain.problem.ranks[rank]
    assert layout.of_rank(1).microbatch_size == 4  # half the replicas, twice the sequences


def test_between_sites_the_bytes_are_those_of_all_sequences_whatever_the_degrees():
    equal, unequal = step_of(shaped((2, 4), (2, 4))), step_of(shaped((1, 4), (4, 2)))
    sizes = [step.problem.hops[0].forward.bytes for step in (equal, unequal)]
    assert sizes[0] == sizes[1] == 4 * 2 * 256 * 512 * 2


def test_the_side_with_more_tensor_devices_gathers_what_each_of_them_got():
    layout, costs, home = shaped((1, 4), (4, 2)), JobCosts(MODEL, SPEC), site("b")
    whole = 4 * 256 * 512 * 2  # the sequences of one of the two replicas
    ring = ring_link(home, costs.calibration(home), 4)
    expected = costs.calibration(home).collective_start_s + ring.seconds(ring_bytes("all-gather", whole, 4))
    assert gather_s(costs, layout, 0, 1, home) == pytest.approx(expected)
    assert gather_s(costs, layout, 1, 0, home) == 0.0  # one device gets the whole tensor
    hop, link = step_of(layout).problem.hops[0], two_sites().link("a", "b")
    assert hop.forward.arrives_after_s == pytest.approx(
        link.latency_s + hop.forward.bytes / link.bandwidth_bytes_per_s + expected
    )
    assert hop.backward.arrives_after_s is None


def test_with_sequence_parallelism_nothing_is_gathered():
    costs = JobCosts(MODEL, training(sequence_parallel=True, zero=1))
    assert gather_s(costs, shaped((1, 4), (4, 2)), 0, 1, site("b")) == 0.0


def test_inside_a_site_the_side_with_fewer_devices_sets_the_rate():
    few = step_of(shaped((1, 2), (2, 4), size=4), ("a",)).problem
    all_alike = step_of(replace(shaped((2, 4), (2, 4), size=4), shapes=()), ("a",)).problem
    occupies = [problem.traffic.messages.occupies_s[0, 0, 0] for problem in (few, all_alike)]
    assert occupies[0] == pytest.approx(4 * occupies[1])  # 2 pairs of devices instead of 8


def test_replicas_of_each_rank_sum_among_themselves():
    sync = step_of(shaped((1, 4), (4, 1), size=1, count=8)).problem.sync
    assert sync[0] is not None
    assert sync[1] is None


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (shaped((1, 1), (1, 3), size=1, count=8), InputError, "global_batch"),
        (replace(shaped((1, 2), (1, 1)), data=1, num_microbatches=16), InputError, "largest of them: 2 and 1"),
        (replace(shaped((1, 1), (2, 2)), pipeline=1), InputError, "expected one per stage"),
        (shaped((3, 1), (1, 1)), InputError, r"shapes\[0\].tensor: 3 does not divide 8 heads"),
        (shaped((8, 8), (1, 16), size=1), InfeasibleError, "has 64 devices; its ranks need 80"),
        (shaped((1, 2), (1, 4), size=1, count=8), None, ""),
    ],
)
def test_shapes_that_do_not_fit_are_told(layout, error, message):
    layers = [MODEL.num_layers // 2] * 2
    placements = place_evenly(("a", "a"), layers)
    if error is None:
        step_cost(JobCosts(MODEL, SPEC), layout, placements, two_sites())
        return
    with pytest.raises(error, match=message):
        step_cost(JobCosts(MODEL, SPEC), layout, placements, two_sites())


def test_a_shape_names_its_site_s_device():
    layout = shaped((1, 1), (2, 2))
    wrong = replace(layout, shapes=(replace(layout.shapes[0], device="h100-sxm"), layout.shapes[1]))
    with pytest.raises(InputError, match=r"shapes\[0\].device: 'h100-sxm', but site 'a' has a100-80gb"):
        step_of(wrong)
