"""Find a good plan: layouts, placement, partition, the best order, and what to tell about them."""

from farpipe.plan.plan import Plan
from farpipe.plan.planner import make_plan, refine
from farpipe.plan.quote import Quote
from farpipe.plan.service import Planner

__all__ = ["Plan", "Planner", "Quote", "make_plan", "refine"]
