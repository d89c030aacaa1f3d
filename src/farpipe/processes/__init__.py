"""Processes that never outlive who has started them, whatever happens to either."""

from farpipe.processes.guarded import KILL_S, Guarded, ParentPipe, wait_for_any
from farpipe.processes.parent import die_with_agent, die_with_parent

__all__ = ["KILL_S", "Guarded", "ParentPipe", "die_with_agent", "die_with_parent", "wait_for_any"]
