"""Messages that may wait at once: what the bound says, beside what orders do when they are played."""

import numpy as np
import pytest

from farpipe.core.schedule.library import order
from farpipe.core.step import BACKWARD, FORWARD
from farpipe.core.step.ahead import messages_ahead, open_microbatches
from small_models import placed_problem


def most_waiting(schedule, problem, random):
    """The largest number of messages between each two stages that wait, over one random play of the order."""
    ends, waiting, most = [0] * schedule.num_ranks, {}, {}
    done = set()
    orders = [list(one) for one in schedule.ranks]
    while any(at < len(orders[rank]) for rank, at in enumerate(ends)):
        ready = [r for r, at in enumerate(ends) if at < len(orders[r]) and needs(orders[r][at], problem) <= done]
        rank = random.choice(ready)
        stage, kind, microbatch = action = orders[rank][ends[rank]]
        ends[rank] += 1
        done.add(("F" if kind == "F" else "gx" if kind in "IB" else "W", stage, microbatch))
        if kind == "F":
            move(waiting, most, (stage, FORWARD), (stage - 1, FORWARD))
        elif kind in "IB":
            move(waiting, most, (stage, BACKWARD), (stage + 1, BACKWARD))
        assert action
    return most


def needs(action, problem):
    stage, kind, microbatch = action
    if kind == "F":
        return {("F", stage - 1, microbatch)} if stage else set()
    if kind == "W":
        return set()
    return {("gx", stage + 1, microbatch)} if stage + 1 < problem.num_stages else set()


def move(waiting, most, made, used):
    waiting[used] = waiting.get(used, 0) - 1
    waiting[made] = waiting.get(made, 0) + 1
    most[made] = max(most.get(made, 0), waiting[made])


@pytest.mark.parametrize("method", ["1f1b", "gpipe", "eager", "zb-h1"])
@pytest.mark.parametrize("placement", [(0, 1), (0, 1, 2, 3), (0, 1, 0, 1)])
def test_no_play_of_an_order_has_more_messages_waiting(method, placement):
    if method in ("1f1b", "eager", "zb-h1") and placement == (0, 1, 0, 1):
        method = "interleaved"
    problem = placed_problem(placement, 8)
    schedule = order(method, problem)
    most = open_microbatches(schedule, problem.num_stages)
    for seed in range(20):
        found = most_waiting(schedule, problem, np.random.default_rng(seed))
        for stage in range(problem.num_stages - 1):
            assert found[stage, FORWARD] <= most[stage]
            assert found[stage + 1, BACKWARD] <= most[stage]


def test_1f1b_has_as_many_ahead_as_there_are_stages_behind():
    problem = placed_problem((0, 1, 2, 3), 8)
    assert open_microbatches(order("1f1b", problem), 4).tolist() == [4, 3, 2, 1]
    assert open_microbatches(order("gpipe", problem), 4).tolist() == [8] * 4


def test_boundaries_that_share_a_channel_are_all_counted_and_an_unknown_order_may_have_all():
    problem = placed_problem((0, 1, 0, 1), 8)
    found = messages_ahead(problem, order("interleaved", problem))
    assert {channel: len(sizes) for channel, sizes in found.items()} == {
        (0, 1, FORWARD): 2, (1, 0, BACKWARD): 2, (1, 0, FORWARD): 1, (0, 1, BACKWARD): 1,
    }  # fmt: skip
    assert all(count == 8 for sizes in messages_ahead(problem, None).values() for count, _ in sizes)
