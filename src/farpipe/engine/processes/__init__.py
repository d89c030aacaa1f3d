"""Processes that never outlive who has started them, whatever happens to either."""

from farpipe.engine.processes.guarded import KILL_S, Guarded, ParentPipe, die_with_agent, die_with_parent, wait_for_any
from farpipe.engine.processes.leaving import (
    END_S,
    LeaveRequest,
    end_at_once,
    end_fork_of,
    end_soon,
    ending_on_request,
    ignore_requests,
    interrupt,
    interrupting,
    leave_request,
)

__all__ = [
    "END_S",
    "KILL_S",
    "Guarded",
    "LeaveRequest",
    "ParentPipe",
    "die_with_agent",
    "die_with_parent",
    "end_at_once",
    "end_fork_of",
    "end_soon",
    "ending_on_request",
    "ignore_requests",
    "interrupt",
    "interrupting",
    "leave_request",
    "wait_for_any",
]
