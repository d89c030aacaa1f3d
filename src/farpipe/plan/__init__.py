"""Find a good plan: layouts, placement, partition, the best order, and what to tell about them."""

from farpipe.plan.find_plans import make_plan, refine
from farpipe.plan.plan import Plan
from farpipe.plan.planner import Planner
from farpipe.plan.quote import Quote

__all__ = ["Plan", "Planner", "Quote", "make_plan", "refine"]
