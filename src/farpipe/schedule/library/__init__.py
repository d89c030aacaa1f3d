"""The named orders. Adding one is one short file and one line in ORDERS."""

from collections.abc import Callable
from typing import Any, Final

from farpipe.errors import UsageError
from farpipe.schedule.library.breadth_first import breadth_first
from farpipe.schedule.library.controllable_memory import v_half, v_min
from farpipe.schedule.library.eager import eager, extra_forwards
from farpipe.schedule.library.geopipe import geopipe
from farpipe.schedule.library.gpipe import gpipe
from farpipe.schedule.library.interleaved import interleaved
from farpipe.schedule.library.memory_limited import zb_1p, zb_2p
from farpipe.schedule.library.one_f_one_b import one_f_one_b
from farpipe.schedule.library.wave import wave
from farpipe.schedule.library.zbv import zbv
from farpipe.schedule.library.zero_bubble import zb_h1, zb_h2
from farpipe.step import Problem, Schedule
from farpipe.strict import nearest

ORDERS: Final[dict[str, Callable[..., Schedule]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager": eager,
    "geopipe": geopipe,
    "interleaved": interleaved,
    "bfs": breadth_first,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-1p": zb_1p,
    "zb-2p": zb_2p,
    "zbv": zbv,
    "v-half": v_half,
    "v-min": v_min,
    "wave": wave,
}
"""Every named order by the name that users write."""


def order(name: str, problem: Problem, **options: Any) -> Schedule:
    """The order called `name` for `problem`.

    UsageError for an unknown name; InputError when the order is not defined for such a problem.
    """
    if name not in ORDERS:
        raise UsageError(f"there is no schedule {name!r}{nearest(name, ORDERS)}; known: {', '.join(ORDERS)}")
    return ORDERS[name](problem, **options)


__all__ = ["ORDERS", "extra_forwards", "order"]
