"""Steps of which actions and messages are reported: all of them, or every k-th where their records are large.

Whole steps are left out, not parts of one, so that what is there is a Timeline like any other.
"""

import math
from typing import Final

from farpipe.runtime.run_spec import RunSpec

RECORD_BYTES: Final = 1 << 20
"""Bytes of all processes' records that are allowed per step on average: they go through the control plane to rank 0."""
ACTION_BYTES: Final = 16
MESSAGE_BYTES: Final = 40


def record_bytes(run: RunSpec) -> int:
    """Bytes of one step's actions and messages, of all replicas."""
    num_actions = sum(map(len, run.schedule.ranks))
    num_messages = int((run.problem.traffic.messages.link >= 0).sum())
    return run.num_replicas * (ACTION_BYTES * num_actions + MESSAGE_BYTES * num_messages)


def record_every(run: RunSpec) -> int:
    """The k of which every k-th step is recorded; 1 for records up to RECORD_BYTES, and where every step has other
    chunks."""
    return 1 if run.chunk_costs is not None else math.ceil(record_bytes(run) / RECORD_BYTES)


def is_recorded(step: int, every: int, num_steps: int) -> bool:
    """True if actions and messages of `step` are reported; those of the last step always are."""
    return (step + 1) % every == 0 or step + 1 == num_steps
