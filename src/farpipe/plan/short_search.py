"""A short search for a better order of the plan that won: greedy and local, a fixed number of evaluations each."""

from dataclasses import replace
from typing import Final

from farpipe.plan.evaluate import Evaluated
from farpipe.schedule import check
from farpipe.schedule.bounds import lower_bound_s
from farpipe.search.greedy import greedy_orders
from farpipe.search.local import improve
from farpipe.search.step import fits_memory, search_step, split_backwards, to_orders, to_schedule
from farpipe.simulate import simulate

MAX_ACTIONS: Final = 40_000
"""In a step; larger ones are left to ``--search-s``: one greedy order of them takes too long."""
GREEDY_ACTIONS: Final = 200_000
"""Over all greedy orders together: about a tenth of a second."""
LOCAL_ACTIONS: Final = 6e6
"""Played by the local search: about a tenth of a second."""
MOST_EVALUATIONS: Final = 10_000
CLOSE: Final = 1e-4
"""Relative distance to the bound from which on nothing is searched."""


def improve_order(best: Evaluated) -> Evaluated:
    """`best`, or the same with a faster order; the same `best` always gives the same answer."""
    bound_s = lower_bound_s(best.problem)
    step = search_step(best.problem)
    if step.num_actions > MAX_ACTIONS or best.timeline.makespan_s <= bound_s * (1 + CLOSE):
        return best
    seeds = greedy_orders(step, max_actions=GREEDY_ACTIONS)[:1]
    named = split_backwards(to_orders(best.schedule))
    if fits_memory(step, named):
        seeds.append((best.timeline.makespan_s, named))
    seeds.sort(key=lambda pair: pair[0])
    if not seeds:
        return best
    most = min(MOST_EVALUATIONS, int(LOCAL_ACTIONS / step.num_actions))
    found_s, orders = improve(step, seeds, num_evaluations=most, target_s=bound_s * (1 + CLOSE))
    if found_s >= best.timeline.makespan_s * (1 - 1e-9):
        return best
    schedule = to_schedule(orders, best.problem.num_microbatches, "auto (short search)")
    check(best.problem, schedule)
    return replace(best, schedule=schedule, timeline=simulate(best.problem, schedule, checked=True))
