"""Find a good plan: layouts, placement, partition, the best order, and what to tell about them."""

from farpipe.plan.plan import Plan
from farpipe.plan.planner import make_plan, refine

__all__ = ["Plan", "make_plan", "refine"]
