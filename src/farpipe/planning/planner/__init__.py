"""Find a good plan: layouts, placement, partition, the best order, and what to tell about them."""

from farpipe.planning.planner.find_plans import make_plan, refine
from farpipe.planning.planner.plan import Plan
from farpipe.planning.planner.planner import Planner
from farpipe.planning.planner.quote import Quote

__all__ = ["Plan", "Planner", "Quote", "make_plan", "refine"]
