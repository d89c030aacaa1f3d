"""Sailor's measured plans over unlike machines, and sends that hold up their rank."""

import os
from pathlib import Path

import numpy as np
import pytest

from farpipe.plan.blocking import blocking_sends
from farpipe.plan.sailor_plans import COPIED, NO_MEMORY, load_sailor_plans, predict_plan
from farpipe.plan.validation import validate_unlike
from farpipe.schedule.library import order
from farpipe.simulate import simulate
from pipelines import pipeline

NAMES = ["N2_D1", "N2_D2", "N3_D1", "N4_D1", "N4_D2", "N4_D4", "N6_D2", "N6_D3", "N6_D6"]
DATA = os.environ.get("FARPIPE_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="FARPIPE_DATA is not set: Sailor's plans are not here")


def test_a_rank_that_sends_computes_nothing_meanwhile():
    problem = pipeline(2, 4, cuts=(0,), size=0.5)
    blocked = blocking_sends(problem)
    assert np.all(blocked.table("forward_s")[0] == problem.table("forward_s")[0] + 0.5)
    assert np.all(blocked.table("forward_s")[1] == problem.table("forward_s")[1])
    assert np.all(blocked.table("input_grad_s")[1] == problem.table("input_grad_s")[1] + 0.5)
    assert np.all(blocked.traffic.messages.occupies_s == 0)
    steps = [simulate(one, order("1f1b", one)).makespan_s for one in (problem, blocked)]
    assert steps[1] >= steps[0]


@needs_data
def test_all_nine_plans_can_be_written_down():
    plans = load_sailor_plans(Path(DATA or "") / "sailor")
    assert [plan.name for plan in plans] == NAMES
    unlike = [len({p.site for group in plan.groups for p in group.placements}) for plan in plans]
    assert unlike == [2, 2, 3, 4, 4, 4, 6, 6, 6]  # machines
    assert {plan.name for plan in plans if plan.memory_bytes is None} == set(NO_MEMORY)
    assert set(COPIED) < {plan.name for plan in plans}


@needs_data
def test_the_measured_ones_are_within_the_gate():
    (result,) = validate_unlike(DATA or "")
    assert len(result.results) == 8
    assert result.passed
    assert result.mean_absolute_error < 0.10
    assert result.memory_error < 0.08


@needs_data
def test_replicas_on_one_slow_link_wait_for_it():
    plan = next(plan for plan in load_sailor_plans(Path(DATA or "") / "sailor") if plan.name == "N2_D2")
    gradients_s = plan.model.num_params * 4 / 115.7e6  # two machines on 1 Gbit/s
    assert predict_plan(plan)[0] > 64 * 1.15 + gradients_s  # its slower replica's microbatches alone take 1.15 s each


def test_a_folder_without_them_has_no_group(tmp_path):
    assert validate_unlike(tmp_path) == []
