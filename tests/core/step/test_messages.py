import numpy as np
import pytest
from hypothesis import given, settings

from farpipe.core.errors import InputError
from farpipe.core.simulate import simulate
from farpipe.core.simulate.timeline import MESSAGE_KINDS
from farpipe.core.step import BACKWARD, FORWARD, NOTHING, Problem, retimed, stagger
from farpipe.core.step.messages import FREE
from strategies import problems, problems_with_schedules
from two_sites import two_sites


def old_form(problem):
    """{(direction, stage, microbatch): (link, seconds on it, latency)} and when the first action begins.

    As staggered replicas were told before there was one form of a message: the others' messages are added to the time
    on the link and taken from the latency.
    """
    crossing, link_of = {}, {}
    for index, hop in enumerate(problem.hops):
        between = problem.stages[index].rank != problem.stages[index + 1].rank
        for kind, stage, transfer in ((0, index, hop.forward), (1, index + 1, hop.backward)) if between else ():
            for j in range(problem.num_microbatches) if transfer else ():
                name = transfer.link if isinstance(transfer.link, str) else transfer.link[j]
                link_of[kind, stage, j] = name
                crossing[kind, stage, j] = problem.row(transfer.bytes)[j] / problem.links[name].bandwidth_bytes_per_s
    stagger_s = max(
        (crossing[at] for at, name in link_of.items() if problem.links[name].num_staggered > 1), default=0.0
    )
    pause_s = {name: (link.num_staggered - 1) * stagger_s for name, link in problem.links.items()}
    found = {
        at: (name, crossing[at] + pause_s[name], problem.links[name].latency_s - pause_s[name])
        for at, name in link_of.items()
    }
    return found, max(pause_s.values(), default=0.0)


@pytest.mark.slow
@given(problems(with_times=False))
@settings(max_examples=300, deadline=None)
def test_replicas_in_turns_take_what_the_old_closed_form_says(problem):
    expected, lag_s = old_form(problem)
    messages, names = problem.traffic.messages, list(problem.links)
    for at in np.ndindex(messages.link.shape):
        if messages.link[at] < 0:
            assert at not in expected
            assert messages.occupies_s[at] == messages.arrives_after_s[at] == 0
            continue
        name, seconds, latency_s = expected[at]
        assert names[messages.link[at]] == name
        assert messages.occupies_s[at] == pytest.approx(seconds, rel=1e-12)
        assert messages.arrives_after_s[at] == pytest.approx(seconds + latency_s, rel=1e-12)
    assert (problem.traffic.opens_s == lag_s).all()
    assert problem.traffic.copies == tuple(link.num_staggered for link in problem.links.values())
    assert (problem.traffic.num_staggered == 1) == all(link.num_staggered == 1 for link in problem.links.values())


@pytest.mark.slow
@given(problems())
@settings(max_examples=200, deadline=None)
def test_a_step_retimed_with_its_own_times_is_the_same_and_nothing_takes_less_than_no_time(problem):
    messages = problem.traffic.messages
    assert min(messages.occupies_s.min(), messages.arrives_after_s.min(), problem.traffic.opens_s.min()) >= 0
    if any(link.num_staggered > 1 for link in problem.links.values()):
        return
    again = retimed(problem, messages.occupies_s, messages.arrives_after_s)
    assert Problem.from_json(again.to_json()) == again
    for name in ("link", "bytes", "occupies_s", "arrives_after_s"):
        assert np.array_equal(getattr(again.traffic.messages, name), getattr(messages, name))


def test_what_is_sent_where():
    messages = two_sites((1, 1, 0), (5, 6), num_ranks=4, num_microbatches=2).traffic.messages
    assert messages.link[FORWARD, :, 0].tolist() == [FREE, 0, FREE, NOTHING]
    assert messages.link[BACKWARD, :, 1].tolist() == [NOTHING, FREE, 1, FREE]
    assert (messages.occupies_s[FORWARD, 1, 0], messages.arrives_after_s[FORWARD, 1, 0]) == (6, 11)


def test_given_times_replace_bandwidth_and_latency():
    problem = two_sites((1, 1, 0), (5, 6), num_ranks=2, num_microbatches=2)
    shape = problem.traffic.messages.link.shape
    messages = retimed(problem, np.full(shape, 0.5), np.full(shape, 7.0)).traffic.messages
    there = messages.link >= 0
    assert (messages.occupies_s[there] == 0.5).all()
    assert (messages.arrives_after_s[there] == 7.0).all()


def test_replicas_in_turns_each_send_their_share_of_given_times():
    problem = two_sites((1, 1, 0), (5, 6), num_ranks=2, num_microbatches=2)
    shape = problem.traffic.messages.link.shape
    staggered = stagger(retimed(problem, np.full(shape, 6.0), np.full(shape, 7.0)), 3)
    there = staggered.traffic.messages.link >= 0
    assert staggered.traffic.stagger_s == 2.0
    assert (staggered.traffic.messages.occupies_s[there] == 3 * 2.0).all()
    assert (staggered.traffic.messages.arrives_after_s[there] == 1.0 + 2.0).all()
    assert (staggered.traffic.opens_s == 2 * 2.0).all()


@pytest.mark.parametrize("figure", ["occupies_s", "arrives_after_s"])
def test_wrong_times_are_named(figure):
    data = two_sites((1, 1, 0), (5, 6), num_ranks=2, num_microbatches=2).to_data()
    data["hops"][0]["forward"][figure] = [1.0]
    with pytest.raises(InputError, match=rf"hops\[0\].forward.{figure}: expected one entry per microbatch, 2, found 1"):
        Problem.from_data(data)
    data["hops"][0]["forward"][figure] = -1.0
    with pytest.raises(InputError, match=figure):
        Problem.from_data(data)


@pytest.mark.slow
@given(problems_with_schedules())
@settings(max_examples=150, deadline=None)
def test_stages_open_and_links_are_free_after_the_gathers_as_the_simulator_has_them(case):
    problem, schedule = case
    opens_s, link_free_s = problem.traffic.opens_s.copy(), np.zeros(len(problem.links))
    messages = simulate(problem, schedule).messages
    times = zip(problem.collectives, problem.traffic.collectives.occupies_s, strict=True)
    occupies_s = {one.stage: seconds for one, seconds in times if one.kind == "gather"}
    for gather in messages[messages["kind"] == MESSAGE_KINDS.index("gather")]:
        opens_s[gather["stage"]] += gather["arrival_s"]
        left_s = gather["start_s"] + occupies_s[gather["stage"]]
        link_free_s[gather["link"]] = max(link_free_s[gather["link"]], left_s)
    found = problem.traffic.opening
    assert found.stage_s == pytest.approx(opens_s, rel=1e-12)
    assert found.link_s == pytest.approx(link_free_s, rel=1e-12)
