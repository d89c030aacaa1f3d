"""Derivations: parts add up to the figures of the plan."""

from dataclasses import astuple

import numpy as np
import pytest

from farpipe.core.simulate import simulate
from farpipe.core.spec import parse_job
from farpipe.planning import find
from farpipe.planning.cost import compute
from farpipe.planning.explain.derivation import costs_of, parts_of_step, stage_lines, step_lines
from farpipe.planning.explain.limits import breakdown_s
from farpipe.report.plan_tables import derivation_tables

JOB = """
[model]
num_layers = 6
hidden = 1024
num_heads = 16
ffn_hidden = 4096
vocab_size = 32000
[training]
sequence_length = 1024
global_batch = 32
num_steps = 10
microbatch_size = 2
recompute = "{recompute}"
[layout]
pipeline = 2
tensor = {tensor}
data = 2
[[cluster.sites]]
name = "a"
device = "h100"
num_devices = 8
[[cluster.sites]]
name = "b"
device = "a100-80gb"
num_devices = 8
[[cluster.links]]
between = ["a", "b"]
latency = "5 ms"
bandwidth = "10 Gbit/s"
"""


@pytest.fixture(scope="module", params=["plain", "tensor", "full"])
def planned(request):
    recompute = "full" if request.param == "full" else "none"
    (found,) = find(parse_job(JOB.format(recompute=recompute, tensor=2 if request.param == "tensor" else 1)))
    return found.plan, found.costs


def test_parts_of_a_step_add_up_to_it(planned):
    plan, costs = planned
    assert sum(parts_of_step(plan, costs).values()) == pytest.approx(plan.prediction.step_s)
    assert (parts_of_step(plan, costs)["collectives_in_layers"] > 0) == (plan.layout.tensor > 1)


def test_every_line_is_the_sum_of_the_lines_under_it(planned):
    for lines in (list(step_lines(*planned)), list(stage_lines(*planned))):
        for index, line in enumerate(lines):
            rest = lines[index + 1 :]
            end = next((n for n, other in enumerate(rest) if other.depth <= line.depth), len(rest))
            below = [other.seconds for other in rest[:end] if other.depth == line.depth + 1]
            if below:
                assert tuple(map(sum, zip(*below, strict=True))) == pytest.approx(line.seconds, rel=1e-9, abs=1e-15)


def test_stages_have_the_problem_s_seconds(planned):
    plan, costs = planned
    found = {
        n: line.seconds for line in stage_lines(plan, costs) if line.what.startswith("stage") for n in stages(line)
    }
    for index, stage in enumerate(plan.problem.stages):
        assert found[index] == pytest.approx((stage.forward_s, stage.input_grad_s, stage.weight_grad_s))


def test_stages_are_their_layers_and_ends(planned):
    """Every second of F, I and W is followed: no part of a stage is without a line of its own."""
    plan, costs = planned
    wholes = [(line, np.array(line.seconds)) for line in stage_lines(plan, costs) if not line.depth]
    found = {n: seconds for line, seconds in wholes if line.what.startswith("stage") for n in stages(line)}
    lines = {line.what.partition(",")[0]: seconds for line, seconds in wholes}
    for index, placement in enumerate(plan.placements):
        site = plan.job.cluster.site(placement.site)
        fixed_s = costs.calibration(site).action_overhead_s
        own = placement.num_layers * lines[f"layer on {site.device.name}"] + [fixed_s, fixed_s, 0.0]
        own += lines[f"embedding on {site.device.name}"] if index == 0 else 0.0
        own += lines[f"head on {site.device.name}"] if index == len(plan.placements) - 1 else 0.0
        assert found[index] == pytest.approx(own)


@pytest.mark.parametrize("overhead_s", [0.1, 0.009, 1e-5])
def test_rounding_is_no_exposed_time(planned, overhead_s):
    """What a difference of sums leaves is 0, not -0.00 ns."""
    plan, costs = planned
    makespan_s = plan.prediction.step_s - plan.prediction.overhead_s
    rounded = plan.prediction.model_copy(update={"step_s": makespan_s + overhead_s, "overhead_s": overhead_s})
    parts = parts_of_step(plan.model_copy(update={"prediction": rounded}), costs)
    played = plan.problem, plan.schedule, simulate(plan.problem, plan.schedule)
    assert (
        parts["exposed_between_sites"]
        == breakdown_s(*played, plan.prediction.overhead_s)["for the links between sites"]
    )


def stages(line):
    return map(int, line.what.removeprefix("stage ").split(", "))


def test_layers_are_what_the_cost_model_says(planned):
    plan, costs = planned
    site = plan.job.cluster.site(plan.placements[0].site)
    training = costs.settled(plan.layout).model_copy(update={"recompute": plan.placements[0].recompute})
    times = compute.layer_times(plan.job.model, training, plan.layout, site, costs.calibration(site))
    layer = next(line for line in stage_lines(plan, costs) if line.what.startswith("layer"))
    assert layer.seconds == pytest.approx(astuple(times))


def test_tables_nest_their_lines(planned):
    step, inside = derivation_tables(*planned)
    assert step.rows[0][0] == "step"
    assert any(row[0].startswith("      [") for row in inside.rows), "products stand two levels below a layer"


def test_costs_of_a_plan_are_known_unless_a_profile_gave_its_times(planned):
    plan, costs = planned
    found = costs_of(plan)
    assert parts_of_step(plan, found) == parts_of_step(plan, costs)
    slower = plan.problem.stages[0].model_copy(update={"forward_s": 1.0})
    problem = plan.problem.model_copy(update={"stages": (slower, *plan.problem.stages[1:])})
    assert costs_of(plan.model_copy(update={"problem": problem})) is None
