"""One step as numbers: Problem and Schedule, and the rules of meaning that all their readers share."""

from farpipe.step.action import KINDS, Action, Kind, awaited, handed_to
from farpipe.step.chains import Chains
from farpipe.step.collectives import COLLECTIVE_KINDS, Collective, CollectiveKind, collectives
from farpipe.step.figures import MAX_SECONDS
from farpipe.step.grid import draw_grid
from farpipe.step.light_paths import LightPath, LightPaths, LitHop, LitStep
from farpipe.step.links import Exchange, Hop, Link, Sync, Transfer, is_inter_site, site_of
from farpipe.step.lowering import StepArrays, lower
from farpipe.step.memory import Holding, byte_tables, holdings, least_activation_bytes
from farpipe.step.messages import BACKWARD, FORWARD, FREE, NOTHING, Collectives, Messages, Opening, Traffic
from farpipe.step.problem import MAX_MICROBATCHES, Problem, Rank, Stage
from farpipe.step.replicas import stagger
from farpipe.step.retimed import retimed
from farpipe.step.schedule import RankOrder, Schedule

__all__ = [
    "BACKWARD",
    "COLLECTIVE_KINDS",
    "FORWARD",
    "FREE",
    "KINDS",
    "MAX_MICROBATCHES",
    "MAX_SECONDS",
    "NOTHING",
    "Action",
    "Chains",
    "Collective",
    "CollectiveKind",
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
    "Opening",
    "Problem",
    "Rank",
    "RankOrder",
    "Schedule",
    "Stage",
    "StepArrays",
    "Sync",
    "Traffic",
    "Transfer",
    "awaited",
    "byte_tables",
    "collectives",
    "draw_grid",
    "handed_to",
    "holdings",
    "is_inter_site",
    "least_activation_bytes",
    "lower",
    "retimed",
    "site_of",
    "stagger",
]
