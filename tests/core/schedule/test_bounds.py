import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpipe.core.schedule import check, peak_memory_bytes
from farpipe.core.schedule.bounds import busiest_rank_bounds_s, critical_path_s, link_work_s, lower_bound_s
from farpipe.core.schedule.library import order
from farpipe.core.simulate import simulate
from farpipe.core.step import Hop, Link, Problem, Rank, Stage, Sync, Transfer
from pipelines import two_sites
from strategies import problems_with_schedules


@given(problems_with_schedules())
@settings(max_examples=150, deadline=None)
def test_no_schedule_is_faster_than_the_bound(pair):
    problem, schedule = pair
    assert simulate(problem, schedule).makespan_s >= lower_bound_s(problem) * (1 - 1e-12)


@given(problems_with_schedules(), st.floats(0.5, 1.2))
@settings(max_examples=100, deadline=None)
def test_a_bound_with_a_limit_is_on_the_same_side_of_it(pair, share):
    bound_s = lower_bound_s(pair[0])
    known_s = lower_bound_s(pair[0], bound_s * share)
    assert known_s <= bound_s
    assert (known_s >= bound_s * share) == (share <= 1.0)


@pytest.mark.slow
@given(problems_with_schedules())
@settings(max_examples=150, deadline=None)
def test_no_schedule_that_just_fits_memory_is_faster_than_the_bound(pair):
    problem, schedule = pair
    peaks = peak_memory_bytes(problem, schedule)
    ranks = tuple(Rank(memory_bytes=peak + 1.0, static_bytes=1.0) for peak in peaks)
    tight = problem.model_copy(update={"ranks": ranks})
    check(tight, schedule)
    assert simulate(tight, schedule).makespan_s >= lower_bound_s(tight) * (1 - 1e-12)


def test_alike_microbatches_have_the_bounds_of_each_with_its_own_figures():
    problem = two_sites(4, 8, latency=1.5, size=0.7)
    assert problem.is_uniform
    each = [stage.model_copy(update={"forward_s": (stage.forward_s,) * 8}) for stage in problem.stages]
    alike = problem.model_copy(update={"stages": tuple(each)})
    assert not alike.is_uniform
    for bound in (busiest_rank_bounds_s, critical_path_s, link_work_s, lower_bound_s):
        assert bound(problem) == bound(alike)


def test_little_memory_costs_a_round_trip_per_window():
    ranks, link = (Rank(memory_bytes=2.0),) * 2, Link(latency_s=10.0, bandwidth_bytes_per_s=1.0)
    stage = {"forward_s": 1.0, "input_grad_s": 1.0, "weight_grad_s": 1.0}
    memory = {"activation_bytes": 1.0, "weight_stash_bytes": 1.0}
    stages = tuple(Stage(rank=rank, **stage, **memory) for rank in range(2))
    hop = Hop(forward=Transfer(link="a>b", bytes=0.0), backward=Transfer(link="b>a", bytes=0.0))
    links = {"a>b": link, "b>a": link}
    problem = Problem(num_microbatches=4, ranks=ranks, stages=stages, links=links, hops=(hop,))
    round_trip_s = 1 + 10 + 2 + 10 + 2
    assert lower_bound_s(problem) >= 2 * round_trip_s


@given(problems_with_schedules(max_ranks=1, max_stages=3))
@settings(max_examples=50, deadline=None)
def test_the_bound_is_met_on_one_rank_without_collectives(pair):
    problem, schedule = pair
    alone = problem.model_copy(update={"sync": None, "exchanges": ()})
    assert simulate(alone, schedule).makespan_s == pytest.approx(lower_bound_s(alone))


def test_one_microbatch_takes_its_critical_path():
    stages = tuple(Stage(rank=r, forward_s=1, input_grad_s=2, weight_grad_s=3) for r in range(3))
    problem = Problem(num_microbatches=1, ranks=(Rank(),) * 3, stages=stages, hops=(None, None))
    assert critical_path_s(problem) == 3 * 1 + 3 * 2 + 3
    assert link_work_s(problem) == 0
    assert simulate(problem, order("gpipe", problem)).makespan_s == 3 * 6


@pytest.mark.parametrize(
    ("seconds", "delay", "bounds_s"),
    [
        ((1, 1, 1), (1, 0), (59, 56)),
        ((1, 1, 1), (2, 2), (71, 59)),
        ((76, 93, 41), (0, 0), (4256, 3928)),
        ((76, 93, 41), (2, 0), (4864, 4232)),
        ((76, 93, 41), (2, 2), (5472, 4536)),
    ],
)
def test_the_bound_is_what_the_best_order_takes(seconds, delay, bounds_s):
    """In the memory of 1F1B and in twice that; benchmarks/orders/delay_aware_orders.py finds orders as short."""
    latency, size = (d * seconds[0] for d in delay)
    for memory, bound_s in zip((8.0, 16.0), bounds_s, strict=True):
        problem = two_sites(8, 16, seconds=seconds, latency=latency, size=size, stash=1.0, memory=memory)
        assert lower_bound_s(problem) == pytest.approx(bound_s)


def test_collectives_on_one_link_follow_the_backward_that_they_wait_for_and_each_other():
    """The last stage has done its W after 4 s, and both reduce for 10 s."""
    stages = tuple(Stage(rank=r, forward_s=1, input_grad_s=1, weight_grad_s=1) for r in range(2))
    sync = (Sync(reduce=Transfer(link="a>b", bytes=10.0)),) * 2
    link = Link(latency_s=0.0, bandwidth_bytes_per_s=1.0)
    problem = Problem(
        num_microbatches=1, ranks=(Rank(),) * 2, stages=stages, links={"a>b": link}, hops=(None,), sync=sync
    )
    assert simulate(problem, order("gpipe", problem)).makespan_s == 4 + 10 + 10
    assert lower_bound_s(problem) == pytest.approx(4 + 10 + 10)
