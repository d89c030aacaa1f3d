"""Orders of one step: the named schedules, the rules that a schedule must keep, bounds, file formats of others."""

from farpipe.core.schedule.check import check, memory_curve, peak_memory_bytes

__all__ = ["check", "memory_curve", "peak_memory_bytes"]
