"""Cost model: seconds and bytes of a stage, and the Problem of a whole step."""

from farpipe.cost.calibration import Calibration, calibration_of
from farpipe.cost.compute import Times
from farpipe.cost.flops import step_flops
from farpipe.cost.layout import Layout, Placement, RankShape, place_evenly, place_stages, round_robin, settle, v_shape
from farpipe.cost.measured import profiles_of, tell_measured
from farpipe.cost.money import Money, Tariff, egress_of, money, money_of_step, tariffs_of
from farpipe.cost.profile import PartTimes, Profile, model_shape
from farpipe.cost.sailor import import_sailor
from farpipe.cost.stage import JobCosts, StageCost, stage_cost
from farpipe.cost.step import StepCost, step_cost

__all__ = [
    "Calibration",
    "JobCosts",
    "Layout",
    "Money",
    "PartTimes",
    "Placement",
    "Profile",
    "RankShape",
    "StageCost",
    "StepCost",
    "Tariff",
    "Times",
    "calibration_of",
    "egress_of",
    "import_sailor",
    "model_shape",
    "money",
    "money_of_step",
    "place_evenly",
    "place_stages",
    "profiles_of",
    "round_robin",
    "settle",
    "stage_cost",
    "step_cost",
    "step_flops",
    "tariffs_of",
    "tell_measured",
    "v_shape",
]
