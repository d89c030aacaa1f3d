"""The named orders. Adding one is one short file and one line in ORDERS."""

from collections.abc import Callable
from typing import Any, Final

from farpipe.errors import UsageError
from farpipe.problem import Problem
from farpipe.schedule.library.eager import eager, extra_forwards
from farpipe.schedule.library.gpipe import gpipe
from farpipe.schedule.library.interleaved import interleaved
from farpipe.schedule.library.one_f_one_b import one_f_one_b
from farpipe.schedule.schedule import Schedule
from farpipe.strict import nearest

ORDERS: Final[dict[str, Callable[..., Schedule]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager": eager,
    "interleaved": interleaved,
}
"""Every named order by the name that users write."""


def order(name: str, problem: Problem, **options: Any) -> Schedule:
    """The order called `name` for `problem`.

    UsageError for an unknown name; InputError when the order is not defined for such a problem.
    """
    if name not in ORDERS:
        raise UsageError(f"there is no schedule {name!r}{nearest(name, ORDERS)}; known: {', '.join(ORDERS)}")
    return ORDERS[name](problem, **options)


__all__ = ["ORDERS", "eager", "extra_forwards", "gpipe", "interleaved", "one_f_one_b", "order"]
