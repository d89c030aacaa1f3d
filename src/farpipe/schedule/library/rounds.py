"""Zero bubble in rounds: the heuristic that was published with the paper (Qi et al., arXiv 2401.10241).

Its authors build an order round by round (`auto_schedule.py` of sail-sg/zero-bubble-pipeline-parallelism):

1. Every stage begins with as many forwards as there is time for until its first I can come, counted from the last stage
   backwards, and with fewer than the stage before it. *A bubble first*: only those that end by then; else the one that
   that runs then as well.
2. Then follow rounds of at most one F on every stage and one I on every stage, from last to first. A stage does an F
   only if the next one does. *I's first*: one that is two forwards ahead leaves it out if the next stage's F and I are
   done sooner, or if the stage can wait for them without having waited longest of all.
3. W's make room where memory is full and fill the time until an input is there. One that does not fit there is done
   if waiting would make this the stage that has waited longest, or *always*. The first stage does all the W's that it
   has left as soon as it has done its forwards.

The three choices in italics make eight orders. They take the one whose busiest stage is done soonest, counted from its
own first forward.
"""

from collections.abc import Iterator
from itertools import product
from operator import itemgetter
from typing import Any, Final

import numpy as np

from farpipe.schedule.library.list_scheduling import Arguments, Played
from farpipe.step import Problem

WORTH: Final = 1.005
"""By how much the makespan may grow for a bubble, as the paper counts it, no larger than the published heuristic's."""


def or_in_rounds(problem: Problem, arguments: Arguments, other: Played) -> Played:
    """The better of `other` and the orders in rounds.

    That is the one with the least makespan; of those whose longest time of any stage is not above the published
    choice's, if that costs hardly any makespan. `arguments` are those of list scheduling, of a step without chains and
    with one stage per rank.
    """
    built = list(in_rounds(problem, arguments))
    fastest = min([other, *built], key=itemgetter(0))
    longest_s = min((longest_s for (_, longest_s), _ in built), default=np.inf)
    steady = min((p for p in (other, *built) if p[0][1] <= longest_s), key=itemgetter(0))
    return steady if steady[0][0] <= WORTH * fastest[0][0] else fastest


def in_rounds(problem: Problem, arguments: Arguments) -> Iterator[Played]:
    """Those of the eight orders that fit memory."""
    from farpipe.schedule.library import rounds_kernel  # here, for numba takes a third of a second to import

    build: Any = rounds_kernel.build
    _, rank_of_stage, (duration_s, taken, freed, _, headroom), _, wires = arguments
    tolerance_s = 1e-9 * float(duration_s.max())
    for choices in product((True, False), repeat=3):
        codes = np.empty((problem.num_stages, 3 * problem.num_microbatches), np.int64)
        seconds = build((duration_s, taken, freed, headroom[rank_of_stage]), wires, *choices, tolerance_s, codes)
        if np.isfinite(seconds[0]):
            yield (float(f"{seconds[0]:.9g}"), float(f"{seconds[1]:.9g}")), codes.reshape(-1)
