"""Messages of an order that may wait at once between two ranks, whatever the times: what their buffers must hold.

A message of the boundary behind stage s waits from the action that makes it to the one that uses it. Either way, its
microbatch is open on stage s all that time: its F there is done and its backward is not. So the largest number of open
microbatches bounds the messages of either direction, and where buffers hold as many, no send ever waits.
"""

from collections import defaultdict
from typing import Final

import numpy as np
from numpy.typing import NDArray

from farpipe.core.step.codes import BACKWARD, FORWARD
from farpipe.core.step.problem import Problem
from farpipe.core.step.schedule import Schedule

Ahead = dict[tuple[int, int, int], list[tuple[int, float]]]
"""(source rank, target rank, FORWARD or BACKWARD) -> (number of messages, bytes of the largest) of every boundary."""

_CHANGE: Final = {"F": 1, "I": -1, "B": -1, "W": 0}
"""Open microbatches that an action adds."""


def open_microbatches(schedule: Schedule, num_stages: int) -> NDArray[np.int64]:
    """The largest number of microbatches of each stage whose F is done and whose backward has not ended: [S]."""
    now, most = np.zeros((2, num_stages), np.int64)
    for order in schedule.ranks:
        for stage, kind, _ in order:
            now[stage] += _CHANGE[kind]
            most[stage] = max(most[stage], now[stage])
    return most


def messages_ahead(problem: Problem, schedule: Schedule | None) -> Ahead:
    """Messages that may wait at once, by their channel; without an order, all of the step."""
    num_stages, count = problem.num_stages, problem.num_microbatches
    most = np.full(num_stages, count) if schedule is None else open_microbatches(schedule, num_stages)
    sizes = problem.traffic.messages.bytes.max(axis=2)
    found: Ahead = defaultdict(list)
    for stage in range(num_stages - 1):
        here, there = problem.stages[stage].rank, problem.stages[stage + 1].rank
        if here != there:
            found[here, there, FORWARD].append((int(most[stage]), float(sizes[FORWARD, stage])))
            found[there, here, BACKWARD].append((int(most[stage]), float(sizes[BACKWARD, stage + 1])))
    return dict(found)
