"""Find a good plan: layouts, placement, partition, the best order, and what to tell about them."""

from farpipe.planning.plan.find_plans import make_plan, refine
from farpipe.planning.plan.plan import Plan
from farpipe.planning.plan.planner import Planner
from farpipe.planning.plan.quote import Quote

__all__ = ["Plan", "Planner", "Quote", "make_plan", "refine"]
