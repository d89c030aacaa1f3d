from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from farpipe.core.simulate import simulate
from farpipe.core.simulate.events import inputs, makers, users, waits
from farpipe.core.simulate.timeline import MESSAGE_KINDS
from farpipe.core.step import KINDS, is_inter_site
from report.steps import play, two_sites
from strategies import problems_with_schedules

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def plainly(timeline):
    """Exposed seconds [rank, inside a site], told action by action: the slow twin of `waits`."""
    used, gathers, reduces = {}, {}, []
    for message in timeline.messages:
        kind, stage, microbatch = MESSAGE_KINDS[message["kind"]], int(message["stage"]), int(message["microbatch"])
        if kind == "gather":
            gathers[stage] = message
        elif kind in ("reduce", "exchange"):
            reduces.append(message)
        else:
            used[(stage + 1, "F", microbatch) if kind == "forward" else (stage - 1, "back", microbatch)] = message
    free, exposed = np.zeros(timeline.num_ranks), np.zeros((timeline.num_ranks, 2))

    def wait(rank, message, until):
        seconds = until - max(free[rank], message["ready_s"])
        if seconds > 0:
            inside = message["link"] < 0 or not is_inter_site(timeline.links[message["link"]])
            exposed[rank, int(inside)] += seconds
            free[rank] = until

    for action in timeline.actions:
        rank, stage, kind = int(action["rank"]), int(action["stage"]), KINDS[action["kind"]]
        place = (stage, "back" if kind in "IB" else kind, int(action["microbatch"]))
        for message in (used.get(place), gathers.pop(stage, None)):
            if message is not None:
                wait(rank, message, min(action["start_s"], message["arrival_s"]))
        free[rank] = action["end_s"]
    for message in sorted(reduces, key=lambda message: message["arrival_s"]):
        wait(int(message["target"]), message, message["arrival_s"])
    return exposed


@pytest.mark.slow
@MANY
@given(problems_with_schedules())
def test_the_waits_add_up_to_what_is_told_action_by_action(step):
    timeline = simulate(*step)
    assert timeline.exposed_s == pytest.approx(plainly(timeline))


@pytest.mark.slow
@MANY
@given(problems_with_schedules())
def test_a_rank_never_waits_while_it_computes_or_waits_already(step):
    timeline = simulate(*step)
    for rank in range(timeline.num_ranks):
        rows = [timeline.actions[timeline.actions["rank"] == rank], *[w for w in [waits(timeline)] if len(w)]]
        spans = [(r["start_s"], r["end_s"]) for part in rows for r in part[part["rank"] == rank]]
        spans = sorted(span for span in spans if span[1] > span[0])
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(spans))


@pytest.mark.slow
@MANY
@given(problems_with_schedules())
def test_messages_are_tied_to_the_actions_that_made_and_used_them(step):
    timeline = simulate(*step)
    messages, actions = timeline.messages, timeline.actions
    own = messages["microbatch"] >= 0
    made, used = makers(timeline), users(timeline)
    assert (made[own] >= 0).all()
    assert (used[own] >= 0).all()
    gathers = messages["kind"] == MESSAGE_KINDS.index("gather")
    assert (made[gathers] == -1).all()
    assert actions["end_s"][made[~gathers & ~own]] == pytest.approx(messages["ready_s"][~gathers & ~own])
    assert (actions["stage"][used[gathers]] == messages["stage"][gathers]).all()
    assert (used[~gathers & ~own] == -1).all()
    assert actions["end_s"][made[own]] == pytest.approx(messages["ready_s"][own])
    assert (actions["start_s"][used[own]] >= messages["arrival_s"][own] - 1e-9).all()
    assert (inputs(timeline)[used[own]] == np.flatnonzero(own)).all()


def test_the_wait_for_the_far_site_begins_when_the_message_is_ready():
    timeline = play(two_sites(2, 1))
    (first, *_) = waits(timeline)[waits(timeline)["rank"] == 1]
    assert (first["start_s"], first["end_s"]) == (1.0, 1.75)  # F ends at 1, 0.25 s on the link, 0.5 s on the way
    assert timeline.links[first["link"]] == "east>west"


def test_a_timeline_without_messages_has_no_waits():
    assert len(waits(play(two_sites(1, 3)))) == 0
