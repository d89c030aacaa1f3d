"""Durations that the next plan learns from a run's directory."""

import json
import shutil
from dataclasses import replace

import pytest

from farpipe import planning
from farpipe.core.errors import InputError
from farpipe.core.simulate import simulate
from farpipe.core.spec import parse_job
from farpipe.engine.launch.directory import write_inputs
from farpipe.engine.launch.learned import learn
from farpipe.planning import PlanDocument
from farpipe.planning.cost import JobCosts, MeasuredPart, completed_profile, step_cost
from job_files import cluster_text

JOB = f"""
[model]
name = "small"
num_layers = 6
hidden = 256
num_heads = 8
num_kv_heads = 8
ffn_hidden = 1024
vocab_size = 2048
[training]
sequence_length = 256
global_batch = 8
microbatch_size = 1
precision = "fp32"
{cluster_text("west", "east", latency="{latency}", bandwidth="400 Mbit/s")}
[layout]
sites = ["west", "east"]
replicas = "inside"
virtual = 1
"""


def costs_of(plan):
    """Costs of a plan's job whose layers take 20 ms, 30 ms and 15 ms for F, I and W."""
    job = plan.job
    profile = completed_profile(job, job.cluster.sites[0], {"layer": MeasuredPart(0.02, 0.045, 0.015)})
    return JobCosts(job.model, job.training, {profile.device: profile})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run planned with modelled times and a link of 5 ms; in truth a layer is slower and the link has 40 ms."""
    folder = tmp_path_factory.mktemp("run")
    plan = planning.plan(parse_job(JOB.format(latency="5 ms")))
    real = parse_job(JOB.format(latency="40 ms"))
    step = step_cost(costs_of(plan), plan.layout, plan.placements, real.cluster)
    timeline = replace(simulate(step.problem, plan.schedule), source="measured")
    write_inputs(PlanDocument(plan=plan), folder)
    timeline.save(folder / "timeline.json")
    line = {"step_s": timeline.makespan_s + step.overhead_s, "makespan_s": timeline.makespan_s}
    lines = [json.dumps({"step": number, "attempt": 0} | line) for number in range(5)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_the_next_plan_of_the_same_machines_is_told_within_three_percent(run_dir):
    learned = learn(run_dir)
    job = learned.corrected(parse_job(JOB.format(latency="5 ms").replace("global_batch = 8", "global_batch = 16")))
    plan = planning.plan(job, learned.profiles)
    real = parse_job(JOB.format(latency="40 ms"))
    step = step_cost(costs_of(plan), plan.layout, plan.placements, real.cluster)
    measured_s = simulate(step.problem, plan.schedule).makespan_s + step.overhead_s
    assert plan.prediction.step_s == pytest.approx(measured_s, rel=0.03)
    assert "Learned from" in learned.told[0]


def test_steps_that_were_not_recorded_teach_as_much(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:-1]:
        line |= {"makespan_s": None, "is_recorded": False}
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert learn(tmp_path / "run") == learn(run_dir)


def test_links_of_other_names_stay_and_the_file_no_longer_stands_for_the_job(run_dir):
    learned = learn(run_dir)
    renamed = parse_job(JOB.format(latency="5 ms").replace("east", "north"))
    assert learned.corrected(renamed).cluster == renamed.cluster
    same = learned.corrected(parse_job(JOB.format(latency="5 ms")))
    assert same.cluster.link("west", "east").latency_s == pytest.approx(0.04, rel=0.1)
    assert 'latency = "0.04' in same.to_toml() or 'latency = "0.039' in same.to_toml()


@pytest.mark.parametrize("name", ["plan.json", "timeline.json", "metrics.jsonl"])
def test_a_directory_that_is_no_run_is_named(run_dir, tmp_path, name):
    for file in run_dir.iterdir():
        if file.name != name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InputError, match=name):
        learn(tmp_path)


def test_a_predicted_timeline_teaches_nothing(run_dir, tmp_path):
    for file in run_dir.iterdir():
        text = file.read_text().replace('"source": "measured"', '"source": "predicted"')
        (tmp_path / file.name).write_text(text)
    with pytest.raises(InputError, match="not measured"):
        learn(tmp_path)


def test_a_profile_of_another_model_is_refused_at_once(run_dir):
    learned = learn(run_dir)
    other = parse_job(JOB.format(latency="5 ms").replace("hidden = 256", "hidden = 512"))
    with pytest.raises(InputError, match="shape: measured with 'hidden 256"):
        planning.plan(other, learned.profiles)
