"""Phases of a run: links that follow the network, and a run of the engine over them."""

import json
from dataclasses import replace

import pytest

from farpipe.errors import InputError, UsageError
from farpipe.optical import Grid, PoissonTraffic, find_network, k_shortest
from farpipe.optical.joint import nominal_problem
from farpipe.optical.modulation import Modulation
from farpipe.optical.phases import light_phases, link_changes
from farpipe.optical.strategies import find_strategy
from farpipe.optical.study import Scenario
from farpipe.optical.training import Training, pipeline_problem
from farpipe.run.run import run
from farpipe.runtime.run_spec import LinkChange, RunSpec
from farpipe.schedule.library import order
from farpipe.simulate import simulate

NODES = ("1", "4", "10")
KM8 = k_shortest(find_network("nsfnet", shared=True), k=8)
SCALED = Modulation("64qam / 1000", ((float("inf"), 0.006),))
"""75 Mbit/s per slot, so that messages of 512 KB take what those of 512 MB take of 75 Gbit/s."""
SCENARIO = Scenario(KM8, KM8, Grid(80), PoissonTraffic(90.0, 0.2, 4, 20), SCALED)


def training_of(nodes=NODES, num_microbatches=4):
    count = len(nodes)
    problem = pipeline_problem([0.02] * count, [0.04] * count, num_microbatches, nodes, 512e3)
    nominal = nominal_problem(problem, nodes, KM8, 0.45)
    return Training(nominal, order("1f1b", nominal), nodes)


def phases_of(training, num_phases):
    strategy = find_strategy("earliest", keep_s=1.0, unit_gbit=0.075)
    return light_phases(SCENARIO.shared(1, 2000.0), training, strategy, num_phases=num_phases, begin_s=2.0)


def test_a_phase_is_predicted_as_its_links_are_simulated():
    training = training_of()
    phases = phases_of(training, 6)
    for phase in phases:
        assert simulate(phase.problem(training), training.schedule).makespan_s == pytest.approx(phase.step_s, rel=1e-9)
    assert len({tuple(link.bandwidth_bytes_per_s for link in phase.links.values()) for phase in phases}) > 1
    assert len({tuple(link.latency_s for link in phase.links.values()) for phase in phases}) > 1


def test_changes_come_at_the_first_step_of_every_phase_but_the_first():
    phases = phases_of(training_of(), 3)
    changes = link_changes(phases, 5)
    assert [change["step"] for change in changes] == [5] * 4 + [10] * 4
    assert {change["link"] for change in changes} == {"1>4", "4>1", "4>10", "10>4"}


def test_hops_that_would_share_a_link_are_refused():
    with pytest.raises(InputError, match="two hops go from one node to the same other"):
        phases_of(training_of(("1", "4", "1", "4")), 1)
    with pytest.raises(UsageError, match="at least 1"):
        phases_of(training_of(), 0)


@pytest.mark.slow
def test_the_engine_runs_over_links_that_follow_the_light_paths(tmp_path):
    training = training_of()
    first, *others = phases_of(training, 12)
    second = max(others, key=lambda phase: abs(phase.step_s - first.step_s))
    slower = {name: replace_rate(link, 0.02) for name, link in second.links.items()}  # a change that none can miss
    phases = [first, replace(second, links=slower)]
    spec = RunSpec(
        problem=first.problem(training),
        schedule=training.schedule,
        sites=NODES,
        num_steps=6,
        device="sleep",
        link_changes=tuple(LinkChange(**change) for change in link_changes(phases, 3)),
    )
    run(spec, tmp_path / "run")
    steps = [json.loads(line)["makespan_s"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    predicted = [simulate(phase.problem(training), training.schedule).makespan_s for phase in phases]
    assert len(steps) == 6
    assert min(steps[:3]) >= predicted[0] - 1e-3
    assert min(steps[3:]) >= predicted[1] - 1e-3 > predicted[0] * 1.5


def replace_rate(link, share):
    return link.model_copy(update={"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s * share})
