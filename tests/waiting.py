"""Waits of tests, none of them without a limit."""

import time

LIMIT_S = 60
"""Longest wait for anything in a test, unless it says another."""


def wait_until(condition, what, limit_s=LIMIT_S):
    """Wait until `condition()` holds; `what` names it where it does not."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {limit_s} s until {what}"
        time.sleep(0.005)
