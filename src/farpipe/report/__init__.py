"""Reports: tables, Gantt charts, traces and the report page. Names are imported when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from farpipe.report.gantt import draw_gantt, draw_small_multiples
    from farpipe.report.gantt_frame import Panel
    from farpipe.report.page import write_report
    from farpipe.report.trace import write_trace
    from farpipe.report.views import RunReport, RunView

_HOME: Final = {
    "Panel": "gantt_frame",
    "draw_gantt": "gantt",
    "draw_small_multiples": "gantt",
    "write_report": "page",
    "write_trace": "trace",
    "RunReport": "views",
    "RunView": "views",
}

__all__ = ["Panel", "RunReport", "RunView", "draw_gantt", "draw_small_multiples", "write_report", "write_trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
