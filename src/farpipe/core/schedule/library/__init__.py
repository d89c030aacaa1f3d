"""The named orders: farpipe's own, those that installed distributions add, and those in files of users."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from farpipe.core.errors import FarpipeError, InputError, UsageError, UsersCodeError, fault_in
from farpipe.core.plugins import Plugins
from farpipe.core.schedule.library.breadth_first import breadth_first
from farpipe.core.schedule.library.controllable_memory import v_half, v_min
from farpipe.core.schedule.library.eager import eager, extra_forwards
from farpipe.core.schedule.library.geopipe import geopipe
from farpipe.core.schedule.library.gpipe import gpipe
from farpipe.core.schedule.library.interleaved import interleaved
from farpipe.core.schedule.library.memory_limited import zb_1p, zb_2p
from farpipe.core.schedule.library.one_f_one_b import one_f_one_b
from farpipe.core.schedule.library.wave import wave
from farpipe.core.schedule.library.zbv import zbv, zbv_late
from farpipe.core.schedule.library.zero_bubble import zb_h1, zb_h2
from farpipe.core.step import Problem, Schedule
from farpipe.core.strict import nearest

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
    "zbv-late": zbv_late,
    "v-half": v_half,
    "v-min": v_min,
    "wave": wave,
}
"""Farpipe's own orders by the names that users write."""
ADDED: Final = Plugins("order", "farpipe.orders", ORDERS, callable)
"""Orders of other distributions, functions from a Problem to a Schedule. The planner tries one only where it is named:
a job's plan does not depend on what else is installed."""

Order = Callable[..., Schedule]


def order(method: str | Order, problem: Problem, **options: Any) -> Schedule:
    """The order `method` for `problem`: a name, ``FILE.py:FUNCTION``, or a function.

    UsageError for an unknown name; InputError when the order is not defined for such a problem, and UsersCodeError
    where a function of the user's gives none or breaks.
    """
    if not isinstance(method, str):
        return _expect_schedule(method(problem, **options), getattr(method, "__name__", repr(method)))
    if method in ORDERS:
        return ORDERS[method](problem, **options)
    expect_order(method)
    function = _from_file(method) if is_in_file(method) else ADDED.load(method)
    try:
        found = function(problem, **options)
    except FarpipeError:
        raise
    except (Exception, SystemExit) as error:
        raise UsersCodeError(f"{method}: {fault_in(error)}") from error
    return _expect_schedule(found, method).renamed(method)


def is_order(method: str) -> bool:
    """True for the name of an order, of ORDERS, a distribution's or in a user's file; False for a search's."""
    return method in ORDERS or is_in_file(method) or method in ADDED


def expect_order(method: str, more: Sequence[str] = ()) -> None:
    """UsageError for a name that is neither an order's nor among `more`; it has the nearest one."""
    if method not in more and not is_order(method):
        names = [*more, *ADDED.known]
        raise UsageError(
            f"there is no schedule {method!r}{nearest(method, names)}; known: {', '.join(names)}, or FILE.py:FUNCTION"
        )


def _expect_schedule(found: object, function: str) -> Schedule:
    if not isinstance(found, Schedule):
        what = "nothing" if found is None else type(found).__name__
        raise UsersCodeError(f"{function}: gives {what}, not a farpipe.Schedule; return one")
    return found


def is_in_file(method: str) -> bool:
    """True for the name of an order in a user's file: ``FILE.py:FUNCTION``."""
    return method.rpartition(":")[0].endswith(".py")


@cache
def _from_file(method: str) -> Order:
    """The function in the file; InputError where there is none, or the file can't be run."""
    path, _, name = method.rpartition(":")
    if not Path(path).is_file():
        raise InputError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FarpipeError:
        raise
    except (Exception, SystemExit) as error:
        raise InputError(f"{path}: can't be imported: {fault_in(error)}") from error
    found: Order | None = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"{path}: has no function {name!r} from a Problem to a Schedule")
    return found


__all__ = ["ADDED", "ORDERS", "Order", "expect_order", "extra_forwards", "is_in_file", "is_order", "order"]
