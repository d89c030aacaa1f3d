"""An event that the core of a fleet refuses, alone and beside others."""

from farpipe.fleet.events import Tick


def refusal(state, event):
    """Reason for which `event` is refused; nothing else comes of it, and what happens beside it counts."""
    after, commands = state.handle(event)
    assert (after.jobs, after.now_s, commands, after.done) == (state.jobs, state.now_s, [], ())
    (why,) = after.verdicts
    later_s = state.now_s + 1.0
    beside, _ = state.handle(event, Tick(later_s))
    assert (beside.verdicts, beside.now_s) == ((why, ""), later_s)
    return why
