"""Who does what, when: actions, orders, and the rules that an order must keep."""

from farpipe.schedule.action import KINDS, Action, Kind
from farpipe.schedule.check import check, memory_curve, peak_memory_bytes
from farpipe.schedule.schedule import RankOrder, Schedule

__all__ = ["KINDS", "Action", "Kind", "RankOrder", "Schedule", "check", "memory_curve", "peak_memory_bytes"]
