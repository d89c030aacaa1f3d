"""What things cost: seconds and bytes of a stage, and the Problem of a whole step."""

from farpipe.cost.calibration import Calibration, calibration_of
from farpipe.cost.compute import Times
from farpipe.cost.flops import step_flops
from farpipe.cost.layout import Layout, Placement, place_evenly
from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.cost.stage import StageCost, stage_cost
from farpipe.cost.step import step_overhead_s, step_problem

__all__ = [
    "Calibration",
    "Layout",
    "PartTimes",
    "Placement",
    "Profile",
    "StageCost",
    "Times",
    "calibration_of",
    "model_shape",
    "place_evenly",
    "stage_cost",
    "step_flops",
    "step_overhead_s",
    "step_problem",
]
