"""One step as numbers: the Problem, and the Schedule that says who does what in which order."""

from farpipe.step.action import KINDS, Action, Kind
from farpipe.step.chains import Chains
from farpipe.step.grid import draw_grid
from farpipe.step.memory import Holding, byte_tables, holdings, least_activation_bytes
from farpipe.step.problem import (
    MAX_MICROBATCHES,
    MAX_SECONDS,
    Hop,
    Link,
    Problem,
    Rank,
    Stage,
    Sync,
    Transfer,
    is_inter_site,
    site_of,
)
from farpipe.step.schedule import RankOrder, Schedule

__all__ = [
    "KINDS",
    "MAX_MICROBATCHES",
    "MAX_SECONDS",
    "Action",
    "Chains",
    "Holding",
    "Hop",
    "Kind",
    "Link",
    "Problem",
    "Rank",
    "RankOrder",
    "Schedule",
    "Stage",
    "Sync",
    "Transfer",
    "byte_tables",
    "draw_grid",
    "holdings",
    "is_inter_site",
    "least_activation_bytes",
    "site_of",
]
