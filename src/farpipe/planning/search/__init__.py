"""Search for the best order of a step: greedy, local search, exact, and all of them together."""

from farpipe.planning.search.portfolio import METHODS, SEARCHES, FoundOrder, Progress, search

__all__ = ["METHODS", "SEARCHES", "FoundOrder", "Progress", "search"]
