"""Makespan of an order, to choose between orders that a formula makes; `farpipe.simulate` reports all about one."""

from farpipe.step import Problem, Schedule, lower
from farpipe.step.player import Player


def makespan_s(problem: Problem, schedule: Schedule) -> float:
    """The end of the last action or collective, as `simulate` has it; infinite where ranks wait for each other."""
    return Player(lower(problem)).makespan_s((schedule.codes, schedule.begin))
