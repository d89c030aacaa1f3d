import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from farpipe.core.simulate import simulate
from farpipe.core.simulate.slack import data_with_slack, slack
from farpipe.core.simulate.timeline import Timeline
from farpipe.core.step import KINDS, Hop, Link, Problem, Rank, Schedule, Stage, Transfer
from farpipe.core.step.arrays import step_arrays
from strategies import POSITIVE_SECONDS, problems_with_schedules

FIGURES = {"F": "forward_s", "I": "input_grad_s", "W": "weight_grad_s", "B": "weight_grad_s"}


def longer(problem, action, seconds):
    """The Problem with one action that takes so much longer."""
    stages = list(problem.stages)
    stage, figure = stages[action["stage"]], FIGURES[KINDS[action["kind"]]]
    row = problem.row(getattr(stage, figure)).copy()
    row[action["microbatch"]] += seconds
    stages[action["stage"]] = stage.model_copy(update={figure: tuple(row.tolist())})
    return problem.model_copy(update={"stages": tuple(stages)})


@pytest.mark.slow
@given(problems_with_schedules(seconds=POSITIVE_SECONDS, max_ranks=3, max_stages=4, max_microbatches=4), st.data())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_an_action_may_be_late_by_its_slack_and_by_no_more(pair, data):
    problem, schedule = pair
    assume(not step_arrays(problem).shared.any())  # there the sequence on the link may change
    assume(not problem.traffic.opens_s.any())
    timeline = simulate(problem, schedule)
    found = slack(timeline)
    at = data.draw(st.integers(0, len(timeline.actions) - 1))
    late_s = float(found.actions_s[at])
    as_late = simulate(longer(problem, timeline.actions[at], late_s), schedule)
    assert as_late.makespan_s == pytest.approx(timeline.makespan_s)
    later = simulate(longer(problem, timeline.actions[at], late_s + 1.0), schedule)
    assert later.makespan_s == pytest.approx(timeline.makespan_s + 1.0)


@pytest.mark.slow
@given(problems_with_schedules())
@settings(max_examples=60, deadline=None)
def test_what_ends_last_has_no_slack_and_nothing_has_less_than_none(pair):
    timeline = simulate(*pair)
    found = slack(timeline)
    assert found.actions_s.min() >= 0
    assert found.messages_s.min(initial=0.0) >= 0
    ends = np.concatenate([timeline.actions["end_s"], timeline.messages["arrival_s"]])
    late = np.concatenate([found.actions_s, found.messages_s])
    assert late[ends == ends.max()].max(initial=0.0) == pytest.approx(0.0)
    if timeline.makespan_s > 0:
        assert min(found.actions_s.min(), found.messages_s.min(initial=np.inf)) <= 1e-9 * timeline.makespan_s


def test_two_messages_one_of_which_nobody_waits_for():
    """Rank 1 is busy when the second activation arrives: it could have been 2 s later; the first could not."""
    stages = [Stage(rank=r, forward_s=f, input_grad_s=1, weight_grad_s=0) for r, f in enumerate((1, 4))]
    link = Link(latency_s=1.0, bandwidth_bytes_per_s=1.0)
    hop = Hop(forward=Transfer(link="a>b", bytes=0.0))
    problem = Problem(num_microbatches=2, ranks=(Rank(),) * 2, stages=tuple(stages), links={"a>b": link}, hops=(hop,))
    timeline = simulate(problem, Schedule.from_text(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], 2))
    found = slack(timeline)
    assert found.messages_s[timeline.messages["link"] >= 0].tolist() == [0.0, 3.0]
    assert found.actions_s[timeline.actions["rank"] == 1].tolist() == [0.0] * 4
    assert found.critical_messages[timeline.messages["link"] >= 0].tolist() == [True, False]
    events = data_with_slack(timeline)["events"]
    assert [e["slack_s"] for e in events if e["event"] == "forward"] == [0.0, 3.0]
    assert np.array_equal(Timeline.from_data(data_with_slack(timeline)).messages, timeline.messages)
