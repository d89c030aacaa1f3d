import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.errors import InputError, UsageError
from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.library import ORDERS, extra_forwards, order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Schedule, Stage, Sync, Transfer
from farpipe.testing import check_order
from pipelines import pipeline

ONE_STAGE_PER_RANK = ["gpipe", "1f1b", "eager", "geopipe", "zb-h1", "zb-h2", "zb-1p", "zb-2p"]
V_SHAPE = ["gpipe", "zbv", "zbv-late", "v-half", "v-min", "wave"]
ROUND_ROBIN = ["gpipe", "bfs", "interleaved"]


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_passes_the_public_check_where_it_is_defined(name):
    lists = {
        "one stage per rank": [*ONE_STAGE_PER_RANK, "interleaved"],
        "two stages per rank in a V": V_SHAPE,
        "stages round robin": ROUND_ROBIN,
    }
    assert check_order(name) == tuple(shape for shape, names in lists.items() if name in names)


@pytest.mark.parametrize(("names", "v_shape"), [(ONE_STAGE_PER_RANK, False), (V_SHAPE, True)], ids=["one", "v"])
@given(st.data(), st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_every_order_is_valid_for_any_number_of_ranks_and_microbatches(
    names, v_shape, data, num_ranks, num_microbatches
):
    name, problem = data.draw(st.sampled_from(names)), pipeline(num_ranks, num_microbatches, v_shape=v_shape)
    schedule = order(name, problem)
    check(problem, schedule)
    assert schedule.method == name


@given(st.sampled_from(ROUND_ROBIN), st.integers(1, 6), st.integers(1, 5), st.integers(2, 4))
@settings(max_examples=100, deadline=None)
def test_every_looped_order_is_valid_where_it_is_defined(name, num_ranks, rounds, stages_per_rank):
    problem = pipeline(num_ranks, num_ranks * rounds, stages_per_rank)
    schedule = order(name, problem)
    check(problem, schedule)
    assert schedule.method == name


@given(st.integers(1, 6), st.integers(1, 15))
@settings(max_examples=30, deadline=None)
def test_interleaved_with_one_stage_per_rank_is_1f1b(num_ranks, num_microbatches):
    problem = pipeline(num_ranks, num_microbatches)
    assert order("interleaved", problem).ranks == order("1f1b", problem).ranks


@pytest.mark.parametrize(("num_ranks", "rounds", "loops"), [(2, 2, 2), (4, 2, 2), (4, 4, 3), (8, 2, 4)])
def test_interleaving_divides_the_bubble_of_1f1b_by_the_stages_per_rank(num_ranks, rounds, loops):
    """(p - 1)(F + B) / v (Narayanan et al., arXiv 2104.04473)."""
    problem = pipeline(num_ranks, rounds * num_ranks, loops)
    makespan_s = simulate(problem, order("interleaved", problem)).makespan_s
    assert makespan_s == pytest.approx(3 * rounds * num_ranks + 3 * (num_ranks - 1) / loops)


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "loops"), [(2, 4, 2), (4, 4, 3), (4, 9, 2), (8, 16, 4)])
def test_breadth_first_has_the_bubble_of_interleaved_for_any_number_of_microbatches(num_ranks, num_microbatches, loops):
    problem = pipeline(num_ranks, num_microbatches, loops)
    makespan_s = simulate(problem, order("bfs", problem)).makespan_s
    assert makespan_s == pytest.approx(3 * num_microbatches + 3 * (num_ranks - 1) / loops)


@given(st.integers(1, 6), st.integers(1, 12), st.data())
@settings(max_examples=100, deadline=None)
def test_eager_is_valid_for_any_extra_that_does_not_grow_downstream(num_ranks, num_microbatches, data):
    steps = data.draw(st.lists(st.integers(0, 4), min_size=num_ranks, max_size=num_ranks))
    extra = [sum(steps[i:]) for i in range(num_ranks)]
    problem = pipeline(num_ranks, num_microbatches)
    check(problem, order("eager", problem, extra=extra))


def test_golden_orders():
    problem = pipeline(3, 4)
    assert repr(order("1f1b", problem)).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert repr(order("gpipe", problem)).splitlines()[1] == "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"
    assert repr(order("eager", problem, extra=[2, 1, 0])).splitlines()[1:] == [
        "rank 0: 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_two_ranks_two_stages_each():
    problem = pipeline(2, 2, 2)
    assert order("interleaved", problem) == Schedule.from_text(
        ["0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"], 2, "interleaved"
    )


def test_peak_memory_is_the_warm_up_plus_one():
    problem = pipeline(4, 16)
    assert peak_memory_bytes(problem, order("1f1b", problem)) == [4, 3, 2, 1]
    assert peak_memory_bytes(problem, order("gpipe", problem)) == [16] * 4
    assert peak_memory_bytes(problem, order("eager", problem, extra=[3, 2, 2, 0])) == [7, 5, 4, 1]


def test_eager_warms_up_by_the_round_trip_of_every_cut_at_or_downstream():
    problem = pipeline(4, 64, cuts=(0, 2), latency=2.0, size=1.0)
    assert extra_forwards(problem) == [4, 2, 2, 0]  # ceil(2 (1 + 2) / 3) for each cut
    assert order("eager", problem).ranks[0][7].kind == "F"


@given(st.integers(2, 6), st.integers(1, 24), st.floats(0, 10), st.integers(2, 12))
@settings(max_examples=100, deadline=None)
def test_eager_is_never_over_memory_where_1f1b_is_not(num_ranks, num_microbatches, latency, memory):
    problem = pipeline(num_ranks, num_microbatches, cuts=(0,), latency=latency, memory=max(memory, num_ranks))
    check(problem, order("1f1b", problem))
    check(problem, order("eager", problem))


@st.composite
def steps_over_any_links(draw):
    """Stages that may differ, in any memory that 1F1B fits; hops on links of their own or shared ones, full or not.

    Also staggered replicas and collectives.
    """
    num_ranks, num_microbatches = draw(st.integers(2, 8)), draw(st.integers(1, 24))
    seconds = st.sampled_from([0.5, 1.0, 1.5, 2.0, 4.0])
    alike = draw(st.booleans())
    times = [[draw(seconds) for _ in range(3)] for _ in range(1 if alike else num_ranks)] * (num_ranks if alike else 1)
    stages = [
        Stage(rank=rank, forward_s=f, input_grad_s=i, weight_grad_s=w, activation_bytes=1.0)
        for rank, (f, i, w) in enumerate(times)
    ]
    links, hops = {}, []
    latency, size = st.sampled_from([0.0, 0.25, 1.0, 2.0, 5.0, 10.0]), st.sampled_from([0.0, 0.25, 1.0, 3.0, 6.0])
    shared = draw(st.sampled_from([(), ("a>b", "b>a"), ("a>b", "a>b")]))
    num_staggered = draw(st.sampled_from([1, 1, 2]))
    for hop in range(num_ranks - 1):
        names = shared if shared and draw(st.booleans()) else (f"{hop}>{hop + 1}", f"{hop + 1}>{hop}")
        for name in names:
            links.setdefault(name, Link(latency_s=draw(latency), bandwidth_bytes_per_s=1, num_staggered=num_staggered))
        there, back = (Transfer(link=name, bytes=draw(size)) for name in names)
        hops.append(Hop(forward=there, backward=back) if draw(st.booleans()) else None)
    sync = [draw(st.none() | st.sampled_from(sorted(links))) for _ in stages]
    memory = draw(st.none() | st.integers(num_ranks, 3 * num_ranks))
    return Problem(
        num_microbatches=num_microbatches,
        ranks=(Rank(memory_bytes=memory),) * num_ranks,
        stages=tuple(stages),
        links=links,
        hops=tuple(hops),
        sync=tuple(n and Sync(gather=Transfer(link=n, bytes=1.0), reduce=Transfer(link=n, bytes=1.0)) for n in sync),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager", "geopipe"])
@given(steps_over_any_links())
@settings(max_examples=150, deadline=None)
def test_extra_forwards_are_never_slower_than_1f1b_in_the_same_memory(name, problem):
    plain, extra = order("1f1b", problem), order(name, problem)
    check(problem, plain)
    check(problem, extra)
    assert simulate(problem, extra).makespan_s <= simulate(problem, plain).makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["eager", "geopipe"])
def test_where_hops_saturate_a_shared_link_as_many_extra_forwards_are_done_as_help(name):
    problem = pipeline(4, 16, cuts=(0, 1, 2), latency=5.0, size=6.0)
    plain_s = simulate(problem, order("1f1b", problem)).makespan_s
    by_formula = order("eager", problem, extra=extra_forwards(problem))
    assert simulate(problem, by_formula).makespan_s > 1.15 * plain_s
    assert simulate(problem, order(name, problem)).makespan_s < 0.95 * plain_s


def test_a_warm_up_that_memory_cuts_still_falls_from_stage_to_stage():
    problem = pipeline(4, 64, cuts=(0, 2), latency=9.0, memory=5.0)
    assert peak_memory_bytes(problem, order("eager", problem)) == [5, 4, 3, 1]
    assert peak_memory_bytes(problem, order("geopipe", problem)) == [5, 4, 3, 1]


def test_geopipe_counts_the_cuts_between_sites_that_are_given_upstream_of_each():
    problem = pipeline(4, 16, cuts=(0, 2), latency=2.0)
    assert order("geopipe", problem, extra=[1, 2]).ranks == order("eager", problem, extra=[3, 2, 2, 0]).ranks
    with pytest.raises(UsageError, match="each of 2 cuts, found \\[1\\]"):
        order("geopipe", problem, extra=[1])


def test_geopipe_counts_no_hop_inside_a_site():
    problem = pipeline(3, 9, cuts=(0, 1), latency=2.0)
    inside = problem.links | {"a:1>a:2": problem.links["a>b"]}
    hop = problem.hops[0].model_copy(
        update={way: problem.hops[0].forward.model_copy(update={"link": "a:1>a:2"}) for way in ("forward", "backward")}
    )
    problem = problem.model_copy(update={"links": inside, "hops": (hop, problem.hops[1])})
    assert extra_forwards(problem) == [4, 2, 0]
    assert order("geopipe", problem).ranks == order("eager", problem, extra=[2, 2, 0]).ranks


def test_geopipe_hides_the_round_trips_as_its_closed_form_says():
    """(m + p - 1)(tf + tb) + sum of 2(x + L) over the cuts (arXiv 2510.12064), for x no more than tf + tb."""
    problem = pipeline(4, 64, cuts=(0, 2), latency=2.0, size=1.0)
    makespan_s = simulate(problem, order("geopipe", problem)).makespan_s
    assert makespan_s == pytest.approx(3 * (64 + 3) + 2 * 2 * (1 + 2), rel=0.01)


@pytest.mark.parametrize("name", sorted({*ONE_STAGE_PER_RANK} - {"gpipe"}))
def test_orders_for_one_stage_per_rank_say_so(name):
    with pytest.raises(InputError, match=f"'{name}' needs one stage on every rank; rank 0 has 2"):
        order(name, pipeline(2, 4, 2))


@pytest.mark.parametrize("name", sorted({*V_SHAPE} - {"gpipe"}))
@pytest.mark.parametrize("loops", [1, 2, 3])
def test_orders_for_a_v_say_so(name, loops):
    with pytest.raises(InputError, match=f"'{name}' needs two stages per rank in a V"):
        order(name, pipeline(2, 4, loops))


@pytest.mark.parametrize("name", sorted({*ROUND_ROBIN} - {"gpipe"}))
def test_looped_orders_say_so(name):
    with pytest.raises(InputError, match=f"'{name}' needs the same number of stages on every rank, placed round robin"):
        order(name, pipeline(2, 4, v_shape=True))


def test_what_else_orders_are_not_defined_for():
    with pytest.raises(InputError, match="2 ranks divide, found 3"):
        order("interleaved", pipeline(2, 3, 2))
    with pytest.raises(InputError, match="'bfs' needs several stages on every rank"):
        order("bfs", pipeline(2, 4))
    with pytest.raises(UsageError, match="did you mean 'eager'"):
        order("egar", pipeline(2, 3))
    with pytest.raises(UsageError, match="expected 2 counts"):
        order("eager", pipeline(2, 3), extra=[1])
