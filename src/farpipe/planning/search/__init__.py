"""Search for the best order of a step: greedy, local search, exact, and all of them together."""

from farpipe.planning.search.portfolio import METHODS, SEARCHES, FoundOrder, Progress, of_period, search

__all__ = ["METHODS", "SEARCHES", "FoundOrder", "Progress", "of_period", "search"]
