"""Planning: from a job and a cluster to costs, orders, layouts and a plan, without PyTorch."""

from typing import TYPE_CHECKING

from farpipe.core.lazy import lazy

if TYPE_CHECKING:
    from farpipe.planning.planner.find import Planned, find, plan, refine, reorder
    from farpipe.planning.planner.plan import Explanation, Plan, PlanDocument
    from farpipe.planning.planner.quote import Quote
    from farpipe.planning.planner.quotes import Planner, quote

__all__ = ["Explanation", "Plan", "PlanDocument", "Planned", "Planner", "Quote"]
__all__ += ["find", "plan", "quote", "refine", "reorder"]

# Imported when they are asked for: costs and orders are often wanted without the planner.
__getattr__ = lazy(
    __name__,
    {
        "Explanation": "planner.plan:Explanation",
        "Plan": "planner.plan:Plan",
        "PlanDocument": "planner.plan:PlanDocument",
        "Planned": "planner.find:Planned",
        "Planner": "planner.quotes:Planner",
        "Quote": "planner.quote:Quote",
        "find": "planner.find:find",
        "plan": "planner.find:plan",
        "quote": "planner.quotes:quote",
        "refine": "planner.find:refine",
        "reorder": "planner.find:reorder",
    },
)
