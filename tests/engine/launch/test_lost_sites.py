"""A site is lost in the middle of a run, processes and disk: the run goes on without it, and later with it again."""

import os
import shutil
import signal
import threading
import time

import pytest

import farpipe
from chosen import chosen
from farpipe.core.errors import RunError, UsageError
from farpipe.core.spec import load_job
from farpipe.engine.launch.lost_sites import job_without
from farpipe.planning import Plan
from rank_processes import processes_of
from trainings import losses, metrics
from waiting import wait_until

NUM_STEPS = 40
JOB = """
[model]
name = "small"
num_layers = 4
hidden = 32
num_heads = 4
ffn_hidden = 64
vocab_size = 256
[training]
sequence_length = 16
global_batch = 8
microbatch_size = 2
num_steps = {num_steps}
precision = "fp32"
checkpoint_every_steps = 5
checkpoint_every_minutes = 0
mirror = true
[data]
source = "{text}"
[[cluster.sites]]
name = "zurich"
num_devices = 1
device = "cpu"
[[cluster.sites]]
name = "lugano"
num_devices = 1
device = "cpu"
[[cluster.links]]
between = ["zurich", "lugano"]
latency = "5 ms"
bandwidth = "500 Mbit/s"
[layout]
pipeline = 2
"""


@pytest.fixture(scope="module")
def plan(text_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(JOB.format(num_steps=NUM_STEPS, text=text_file))
    return farpipe.plan(load_job(path))


@pytest.fixture(scope="module")
def undisturbed(plan, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    farpipe.train(plan, run_dir)
    return losses(run_dir)


def num_steps(run_dir):
    path = run_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def lose(run_dir, plan, site):
    """End all of a site's processes with SIGKILL, and remove its disk."""
    found = processes_of(run_dir)
    for rank, name in enumerate(plan.sites):
        if name == site and rank in found:
            os.kill(found[rank], signal.SIGKILL)
    shutil.rmtree(run_dir / "sites" / site)


def in_background(*actions):
    """Do one after the other in a thread, each when its condition holds."""

    def do():
        for condition, action in actions:
            wait_until(condition, "an action of the test was due")
            action()

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def has_mirrored(run_dir, site, step):
    """True if the metrics say that a site has a checkpoint in full."""
    return num_steps(run_dir) > 1 and any(line.get("mirrored", {}).get(site, 0) >= step for line in metrics(run_dir))


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "left"), chosen([("zurich", "lugano"), ("lugano", "zurich")], 0))
def test_a_pipeline_goes_on_without_a_lost_site_to_the_last_bit(lost, left, plan, undisturbed, slowly, tmp_path):
    run_dir, told = tmp_path / "run", []
    in_background((lambda: has_mirrored(run_dir, left, 5), lambda: lose(run_dir, plan, lost)))
    options = {"on_notice": told.append, "rank_program": slowly}
    run = farpipe.train(plan, run_dir, on_lost_site="replan", launching=options)
    assert losses(run_dir) == undisturbed
    assert run.plan.sites == (left,)
    assert any(f"lost: {lost}" in text for text in told), told
    assert any(f"going on at {left} from step-" in text for text in told), told
    assert not (run_dir / "sites" / lost).exists()


@pytest.mark.slow
def test_the_pipeline_spreads_again_when_the_site_is_back(plan, undisturbed, slowly, tmp_path):
    run_dir, told, began = tmp_path / "run", [], {}

    def come_back():
        began["steps"] = num_steps(run_dir)
        (run_dir / "sites" / "zurich").mkdir()

    def is_alone():
        return any("going on at lugano" in text for text in told) and (run_dir / "logs" / "restart-1").exists()

    def has_done_more():
        return is_alone() and [line for line in metrics(run_dir) if line["attempt"] == 1][3:]

    in_background(
        (lambda: has_mirrored(run_dir, "lugano", 5), lambda: lose(run_dir, plan, "zurich")),
        (has_done_more, come_back),
    )
    options = {"on_notice": told.append, "rank_program": slowly}
    run = farpipe.train(plan, run_dir, on_lost_site="replan", launching=options)
    assert losses(run_dir) == undisturbed
    assert run.plan.sites == plan.sites, told
    assert {line["attempt"] for line in metrics(run_dir)} == {0, 1, 2}
    assert any("back: zurich" in text for text in told)
    whole = run_dir / "sites" / "zurich" / "checkpoints" / f"step-{NUM_STEPS}"
    assert len([*whole.glob("*.safetensors")]) == 2


@pytest.mark.slow
def test_a_run_waits_for_the_lost_site_and_goes_on_as_planned(plan, undisturbed, slowly, tmp_path):
    run_dir, told = tmp_path / "run", []
    in_background(
        (lambda: has_mirrored(run_dir, "lugano", 5), lambda: lose(run_dir, plan, "zurich")),
        (lambda: any("waiting for zurich" in text for text in told), lambda: time.sleep(0.5)),
        (lambda: True, (run_dir / "sites" / "zurich").mkdir),
    )
    run = farpipe.train(
        plan, run_dir, on_lost_site="wait", launching={"on_notice": told.append, "rank_program": slowly}
    )
    assert losses(run_dir) == undisturbed
    assert run.plan.sites == plan.sites


@pytest.mark.slow
def test_by_default_a_lost_site_ends_the_run_and_a_resume_without_it_goes_on(plan, undisturbed, slowly, tmp_path):
    run_dir = tmp_path / "run"
    in_background((lambda: has_mirrored(run_dir, "lugano", 5), lambda: lose(run_dir, plan, "zurich")))
    with pytest.raises(RunError, match="lost: zurich"):
        farpipe.train(plan, run_dir, launching={"rank_program": slowly, "max_restarts": 3})
    rest = farpipe.plan(job_without(plan, ["zurich"], data=1))
    told = []
    farpipe.train(rest, run_dir, resume=run_dir, launching={"on_notice": told.append})
    assert "continued with another plan: lugano" in told[0]
    assert losses(run_dir) == undisturbed


@pytest.mark.slow
def test_the_wait_for_a_site_has_a_limit(plan, slowly, tmp_path):
    run_dir = tmp_path / "run"
    keys = plan.job.run.model_copy(update={"site_wait_s": 1.0})
    short = plan.model_copy(update={"job": plan.job.model_copy(update={"run": keys})})
    in_background((lambda: has_mirrored(run_dir, "lugano", 5), lambda: lose(run_dir, plan, "zurich")))
    with pytest.raises(RunError, match=r"waited 1(\.0+)? s \(run.site_wait_s\) for zurich"):
        farpipe.train(short, run_dir, on_lost_site="wait", launching={"rank_program": slowly})


def test_without_a_mirror_or_a_second_site_the_option_is_refused(plan, tmp_path):
    training = plan.job.training.model_copy(update={"mirror": False})
    bare = plan.model_copy(update={"job": plan.job.model_copy(update={"training": training})})
    with pytest.raises(UsageError, match=r"training.mirror = true"):
        farpipe.train(bare, tmp_path / "run", on_lost_site="replan")
    with pytest.raises(UsageError, match="rehearsal"):
        farpipe.train(plan, tmp_path / "run", on_lost_site="wait", device="sleep")
    alone = farpipe.plan(job_without(plan, ["zurich"], data=1))
    with pytest.raises(UsageError, match="one site, lugano"):
        farpipe.train(alone, tmp_path / "run", on_lost_site="replan")


def test_what_is_left_is_planned_with_the_same_microbatches(plan):
    rest = job_without(plan, ["zurich"], data=1)
    assert [site.name for site in rest.cluster.sites] == ["lugano"]
    assert rest.cluster.links == ()
    assert rest.layout.pipeline is None
    assert rest.training.microbatch_size == plan.layout.microbatch_size
    found = farpipe.plan(rest)
    assert isinstance(found, Plan)
    assert found.layout.num_microbatches == plan.layout.num_microbatches


@pytest.fixture
def slowly(monkeypatch):
    """The program of ranks that pause before every step, so that something can happen to them."""
    from pathlib import Path

    monkeypatch.setenv("FARPIPE_TEST_PAUSE_S", "0.1")
    return (str(Path(__file__).parents[2] / "faults" / "rank.py"),)
