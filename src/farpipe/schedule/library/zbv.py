"""ZBV: zero bubble in the memory of 1F1B, two stages per rank in a V (Qi et al., arXiv 2401.10241).

With F = I = W, no delay and 2p - 1 microbatches or more, no rank waits between its first and its last action, and none
holds more than p microbatches.
"""

from farpipe.schedule.library.list_scheduling import fill_weights, memory_headroom
from farpipe.schedule.library.placement import microbatch_bytes, require_v_shape
from farpipe.step import Action, Kind, Problem, Schedule


def zbv(problem: Problem) -> Schedule:
    """F and I by the handcrafted pattern, W where there is time."""
    ranks = require_v_shape(problem, "zbv")
    passes: list[list[Action]] = [[] for _ in ranks]
    for position, rank in enumerate(ranks):
        passes[rank] = _passes(position, len(ranks), problem.num_microbatches)
    headroom = memory_headroom(problem, len(ranks) * microbatch_bytes(problem))
    return fill_weights(problem, passes, headroom, "zbv")


def _passes(position: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Of the rank with stage `position` (down) and its mirror (up); what has run out is left out of the pattern."""
    down, up = position, 2 * num_ranks - 1 - position
    to_go = num_ranks - position
    pattern: list[tuple[int, Kind]] = [(down, "F")] * (2 * to_go - 1)
    pattern += [(up, "F"), (down, "F")] * position
    pattern += [(up, "F"), (up, "I")] * to_go
    pattern += [(down, "F"), (down, "I"), (up, "F"), (up, "I")] * num_microbatches
    done = dict.fromkeys(pattern, 0)
    order = []
    for stage, kind in pattern:
        microbatch = done[stage, kind]
        if microbatch < num_microbatches and (kind == "F" or microbatch < done[stage, "F"]):
            order.append(Action(stage, kind, microbatch))
            done[stage, kind] += 1
    return order
