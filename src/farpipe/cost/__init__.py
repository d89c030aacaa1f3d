"""Cost model: seconds and bytes of a stage, and the Problem of a whole step."""

from farpipe.cost.calibration import calibration_of
from farpipe.cost.flops import step_flops
from farpipe.cost.layout import Layout, Placement, RankShape, place_evenly, place_stages, round_robin, settle, v_shape
from farpipe.cost.measured import profiles_of, tell_measured
from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.cost.sailor import import_sailor
from farpipe.cost.stage import JobCosts, StageCost, stage_cost
from farpipe.cost.step import StepCost, step_cost

__all__ = [
    "JobCosts",
    "Layout",
    "PartTimes",
    "Placement",
    "Profile",
    "RankShape",
    "StageCost",
    "StepCost",
    "calibration_of",
    "import_sailor",
    "model_shape",
    "place_evenly",
    "place_stages",
    "profiles_of",
    "round_robin",
    "settle",
    "stage_cost",
    "step_cost",
    "step_flops",
    "tell_measured",
    "v_shape",
]
