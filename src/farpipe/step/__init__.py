"""One step as numbers: Problem and Schedule, and the rules of meaning that all their readers share."""

from farpipe.step.action import KINDS, Action, Kind, awaited, draw_grid, handed_to
from farpipe.step.arrays import step_arrays
from farpipe.step.codes import BACKWARD, FORWARD
from farpipe.step.light_paths import LightPath, LightPaths, LitHop, LitStep
from farpipe.step.links import (
    COLLECTIVE_KINDS,
    Collective,
    Exchange,
    Hop,
    Link,
    Sync,
    Transfer,
    collectives,
    is_inter_site,
    occupied_s,
    site_of,
)
from farpipe.step.memory import (
    Holding,
    byte_tables,
    exceeds,
    forgiving,
    headroom_bytes,
    held_over_time,
    holdings,
    least_activation_bytes,
    levels,
    need_tables,
    num_fitting,
    peaks,
)
from farpipe.step.message_times import retimed, stagger
from farpipe.step.messages import NOTHING, Collectives, Messages
from farpipe.step.problem import MAX_MICROBATCHES, Problem, Rank, Stage
from farpipe.step.round_trips import hiding_forwards, round_trip_s, upstream_sums
from farpipe.step.schedule import RankOrder, Schedule

__all__ = [
    "BACKWARD",
    "COLLECTIVE_KINDS",
    "FORWARD",
    "KINDS",
    "MAX_MICROBATCHES",
    "NOTHING",
    "Action",
    "Collective",
    "Collectives",
    "Exchange",
    "Holding",
    "Hop",
    "Kind",
    "LightPath",
    "LightPaths",
    "Link",
    "LitHop",
    "LitStep",
    "Messages",
    "Problem",
    "Rank",
    "RankOrder",
    "Schedule",
    "Stage",
    "Sync",
    "Transfer",
    "awaited",
    "byte_tables",
    "collectives",
    "draw_grid",
    "exceeds",
    "forgiving",
    "handed_to",
    "headroom_bytes",
    "held_over_time",
    "hiding_forwards",
    "holdings",
    "is_inter_site",
    "least_activation_bytes",
    "levels",
    "need_tables",
    "num_fitting",
    "occupied_s",
    "peaks",
    "retimed",
    "round_trip_s",
    "site_of",
    "stagger",
    "step_arrays",
    "upstream_sums",
]
