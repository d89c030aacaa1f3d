"""Cost model: seconds and bytes of a stage, and the Problem of a whole step."""

from farpipe.planning.cost.calibration import calibration_of
from farpipe.planning.cost.flops import causal_share, step_flops
from farpipe.planning.cost.layout import Layout, Placement, place_evenly, place_stages, round_robin, settle, v_shape
from farpipe.planning.cost.measured import MeasuredPart, completed_profile
from farpipe.planning.cost.profile import PartTimes, Profile, busy_notes, model_shape
from farpipe.planning.cost.stage import JobCosts, StageCost
from farpipe.planning.cost.step import StepCost, step_cost

__all__ = [
    "JobCosts",
    "Layout",
    "MeasuredPart",
    "PartTimes",
    "Placement",
    "Profile",
    "StageCost",
    "StepCost",
    "busy_notes",
    "calibration_of",
    "causal_share",
    "completed_profile",
    "model_shape",
    "place_evenly",
    "place_stages",
    "round_robin",
    "settle",
    "step_cost",
    "step_flops",
    "v_shape",
]
