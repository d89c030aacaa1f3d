"""Planning: from a job and a cluster to costs, orders, layouts and a plan, without PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from farpipe.planning.planner.find import Planned, find, plan, refine, reorder
    from farpipe.planning.planner.plan import Explanation, Plan, PlanDocument
    from farpipe.planning.planner.quote import Quote
    from farpipe.planning.planner.quotes import Planner, quote

_HOMES: Final = {
    "find": "Planned find plan refine reorder",
    "plan": "Explanation Plan PlanDocument",
    "quote": "Quote",
    "quotes": "Planner quote",
}
__all__ = ["Explanation", "Plan", "PlanDocument", "Planned", "Planner", "Quote"]
__all__ += ["find", "plan", "quote", "refine", "reorder"]


def __getattr__(name: str) -> Any:
    """What `planner` hands out, imported when it is asked for: costs and orders are often wanted without it."""
    for home, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"farpipe.planning.planner.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
