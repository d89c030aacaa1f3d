import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from farpipe.core.errors import ScheduleError
from farpipe.core.schedule import check
from farpipe.core.schedule.library import order
from farpipe.core.simulate import Timeline, simulate, steps_in_a_row
from farpipe.core.simulate.timeline import MESSAGE_KINDS
from farpipe.core.step import KINDS, Action, Hop, Link, Problem, Rank, Schedule, Stage, Sync, Transfer
from farpipe.core.step.player import period_s
from strategies import problems_with_schedules
from twin import play_slowly

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def chain(num_ranks, num_microbatches, times=(1.0, 1.0, 1.0), cut=None, latency=0.0, transfer=0.0, sync=None):
    """Equal stages, one per rank, with one slow hop after rank `cut`."""
    forward, inputs, weights = times
    links = {n: Link(latency_s=latency, bandwidth_bytes_per_s=1.0) for n in ("a>b", "b>a")}
    slow = Hop(forward=Transfer(link="a>b", bytes=transfer), backward=Transfer(link="b>a", bytes=transfer))
    stages = [Stage(rank=r, forward_s=forward, input_grad_s=inputs, weight_grad_s=weights) for r in range(num_ranks)]
    return Problem(
        num_microbatches=num_microbatches,
        ranks=tuple(Rank() for _ in stages),
        stages=tuple(stages),
        links=links,
        hops=tuple(slow if i == cut else None for i in range(num_ranks - 1)),
        sync=sync,
    )


def as_events(timeline):
    actions = {
        Action(int(a["stage"]), KINDS[a["kind"]], int(a["microbatch"])): (a["start_s"], a["end_s"])
        for a in timeline.actions
    }
    messages = {
        (MESSAGE_KINDS[m["kind"]], int(m["stage"]), max(int(m["microbatch"]), 0)): (
            m["ready_s"],
            m["start_s"],
            m["end_s"],
            m["arrival_s"],
        )
        for m in timeline.messages
    }
    return actions, messages


@MANY
@given(problems_with_schedules())
def test_kernel_equals_the_slow_twin(pair):
    problem, schedule = pair
    check(problem, schedule)
    actions, messages = as_events(simulate(problem, schedule))
    slow_actions, slow_messages = play_slowly(problem, schedule)
    assert actions == slow_actions
    rank_of, shift = [stage.rank for stage in problem.stages], {"forward": 1, "backward": -1}
    between = {
        key: times
        for key, times in slow_messages.items()
        if key[0] not in shift or rank_of[key[1]] != rank_of[key[1] + shift[key[0]]]
    }
    assert messages == between


@pytest.mark.slow
@MANY
@given(problems_with_schedules())
def test_makespan_is_at_least_the_work_of_the_busiest_rank(pair):
    timeline = simulate(*pair)
    assert timeline.makespan_s >= timeline.busy_s.max() - 1e-12
    assert -1e-12 <= timeline.bubble_ratio <= 1
    assert np.all(timeline.exposed_s >= 0)


@pytest.mark.slow
@MANY
@given(problems_with_schedules())
def test_timeline_survives_a_round_trip(pair):
    timeline = simulate(*pair)
    again = Timeline.from_data(timeline.to_data())
    assert again.makespan_s == timeline.makespan_s
    assert np.array_equal(again.actions, timeline.actions)
    assert np.array_equal(again.messages, timeline.messages)


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 8])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8, 24])
@pytest.mark.parametrize("method", ["1f1b", "gpipe"])
def test_step_time_without_delay_is_the_closed_form(num_ranks, num_microbatches, method):
    """(m + p - 1)(F + I + W), for both orders."""
    problem = chain(num_ranks, num_microbatches, times=(3.0, 4.0, 2.0))
    timeline = simulate(problem, order(method, problem))
    assert timeline.makespan_s == (num_microbatches + num_ranks - 1) * 9.0
    assert timeline.bubble_ratio == pytest.approx((num_ranks - 1) / (num_microbatches + num_ranks - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("times", "latency", "transfer", "expected"),
    [
        ((1.0, 1.0, 1.0), 1.0, 0.0, 1.73),
        ((1.0, 1.0, 1.0), 2.0, 2.0, 2.60),
        ((76.0, 93.0, 41.0), 0.0, 0.0, 1.438),
        ((76.0, 93.0, 41.0), 2 * 76.0, 0.0, 2.071),
        ((76.0, 93.0, 41.0), 2 * 76.0, 2 * 76.0, 2.704),
    ],
)
def test_1f1b_between_two_sites_matches_known_ratios(times, latency, transfer, expected):
    problem = chain(8, 16, times=times, cut=3, latency=latency, transfer=transfer)
    ratio = simulate(problem, order("1f1b", problem)).makespan_s / (16 * sum(times))
    digits = 3 if sum(times) > 3 else 2
    assert round(ratio, digits) == expected


@pytest.mark.parametrize("latency", [0.5, 1.0, 2.5, 6.0])
@pytest.mark.parametrize("transfer", [0.0, 0.5, 2.0])
def test_eager_hides_a_round_trip_but_once(latency, transfer):
    """(m + p - 1)(tf + tb) + 2(x + L): the closed form for GeoPipe's extra warm-up, x <= tf + tb."""
    problem = chain(8, 32, cut=3, latency=latency, transfer=transfer)
    eager, plain = (simulate(problem, order(name, problem)).makespan_s for name in ("eager", "1f1b"))
    assert eager <= (32 + 7) * 3.0 + 2 * (transfer + latency) + 3.0
    assert eager < plain or plain <= (32 + 7) * 3.0 + 2 * (transfer + latency)


def test_messages_of_several_hops_share_a_link_in_the_order_they_become_ready():
    link = {"wan": Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)}
    hop = Hop(forward=Transfer(link="wan", bytes=4.0))
    stages = tuple(Stage(rank=r, forward_s=1.0, input_grad_s=1.0, weight_grad_s=0.0) for r in range(3))
    problem = Problem(num_microbatches=2, ranks=(Rank(),) * 3, stages=stages, links=link, hops=(hop, hop))
    timeline = simulate(problem, order("gpipe", problem))
    forward = np.sort(timeline.messages[timeline.messages["kind"] == 0], order="start_s")
    assert [(int(m["stage"]), int(m["microbatch"]), m["start_s"], m["arrival_s"]) for m in forward] == [
        (0, 0, 1.0, 6.0),
        (0, 1, 5.0, 10.0),
        (1, 0, 9.0, 14.0),
        (1, 1, 13.0, 18.0),
    ]


def test_gather_delays_the_first_forward_and_reduce_ends_the_step():
    sync = (Sync(gather=Transfer(link="a>b", bytes=3.0), reduce=Transfer(link="a>b", bytes=5.0)),)
    problem = chain(1, 2, latency=0.5, sync=sync)
    timeline = simulate(problem, order("1f1b", problem))
    assert timeline.actions["start_s"][0] == 3.5
    assert timeline.makespan_s == 3.5 + 6.0 + 5.5
    assert timeline.exposed_s[0].tolist() == [3.5 + 5.5, 0.0]


def test_exposed_time_is_the_wait_for_the_link_not_for_the_other_rank():
    problem = chain(2, 1, cut=0, latency=2.0, transfer=1.0)
    timeline = simulate(problem, order("1f1b", problem))
    assert timeline.makespan_s == 1 + 3 + 3 + 3 + 2  # F, message, F and B, message, B
    assert timeline.exposed_s[:, 0].tolist() == [3.0, 3.0]
    assert timeline.link_bytes() == {"a>b": 1.0, "b>a": 1.0}
    assert timeline.link_busy_ratio() == {"a>b": 1 / 12, "b>a": 1 / 12}


def test_orders_that_deadlock_are_refused_with_the_circle():
    problem = chain(2, 2)
    schedule = Schedule.from_text(["0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"], 2)
    with pytest.raises(ScheduleError, match=r"deadlock\n  rank 0 can't start 0B0: it waits for the backward 1B0"):
        simulate(problem, schedule)


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "zb-2p"])
def test_steps_in_a_row_follow_each_other_after_a_period(method):
    step = chain(4, 12, cut=1, latency=1.0, transfer=0.3)
    played = simulate(step, order(method, step))
    row = steps_in_a_row(step, played, 5)
    number = row.actions["microbatch"] // 12
    ends = [row.actions["end_s"][number == index].max() for index in range(5)]
    assert ends[0] == pytest.approx(played.makespan_s)
    assert ends[4] - ends[3] == pytest.approx(period_s(step, order(method, step)))


def test_steps_in_a_row_have_the_figures_of_every_microbatch_again():
    varied = chain(2, 2, cut=0)
    stages = [stage.model_copy(update={"forward_s": (1.0, 3.0)}) for stage in varied.stages]
    varied = Problem(num_microbatches=2, ranks=varied.ranks, stages=tuple(stages), links=varied.links, hops=varied.hops)
    row = steps_in_a_row(varied, simulate(varied, order("1f1b", varied)), 3).actions
    forwards = row[(row["rank"] == 0) & (row["kind"] == KINDS.index("F"))]
    assert (forwards["end_s"] - forwards["start_s"]).tolist() == [1.0, 3.0] * 3
