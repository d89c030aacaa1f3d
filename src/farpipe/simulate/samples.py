"""Makespans of one order when messages and actions take other times, one sample after the other."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from farpipe.errors import ScheduleError
from farpipe.step import Schedule
from farpipe.step.lowering import Floats, StepArrays


def makespans_s(samples: Iterable[StepArrays], schedule: Schedule) -> Floats:
    """The makespan of `schedule` in every sample of one step: [num_samples].

    The samples are of one shape; what differs are their seconds. ScheduleError when the orders deadlock.
    """
    from farpipe.step import player  # here, for numba takes a third of a second to import

    codes, begin = schedule.codes, schedule.begin
    play: Any = player.makespan
    found, scratch, out = [], None, None
    for arrays in samples:
        if scratch is None:
            shape = arrays.messages.link.shape
            new_scratch: Any = player.new_scratch
            sizes, num_collectives = (arrays.num_ranks, arrays.shared.size), arrays.collectives.link.size
            scratch = new_scratch(shape[1:], *sizes, bool(arrays.shared.any()), num_collectives)
            out = (np.empty(codes.size), np.zeros(np.prod(shape)), np.empty(np.prod(shape)), np.empty(num_collectives))
            patience_s = np.full(arrays.num_ranks, np.inf)
        found.append(float(play(codes, begin, arrays.tables, out, scratch, patience_s)))
    if not np.isfinite(found).all():
        raise ScheduleError("the orders deadlock: not every action can be played")
    return np.array(found)
