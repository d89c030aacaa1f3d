"""Run directories: what `farpipe report` makes of whole runs, broken-off ones and rehearsals."""

import dataclasses
import json
from pathlib import Path

import pytest

from farpipe import planning
from farpipe.cli.runs import load_run, summary_json
from farpipe.core.simulate import simulate
from farpipe.core.spec import load_job
from farpipe.engine.figures.metrics import METRICS_NAME, RUN_NAME, SUMMARY_NAME, TIMELINE_NAME, summarise
from farpipe.engine.launch.directory import open_run_dir
from farpipe.engine.launch.runs import run_spec_of

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_STEPS = 8


@pytest.fixture(scope="module")
def plan():
    """A plan that the engine can run."""
    job = load_job(RECIPES / "two_sites.toml")
    pins = job.layout.model_copy(update={"data": 1, "tensor": 1, "pipeline": 4})
    return planning.plan(job.model_copy(update={"layout": pins}))


def lines_of(timeline, num_steps):
    """Lines of metrics: the first three steps take nine times as long."""
    inter, intra = timeline.exposed_s.mean(axis=0)
    figures = {"bubble": timeline.bubble_ratio, "exposed_inter_site_s": inter, "exposed_intra_site_s": intra}
    figures |= {"model_flops_utilisation": None, "evaluation_loss": None}
    figures |= {"exposed_inter_site_max_s": inter, "exposed_intra_site_max_s": intra, "tokens_per_s": 1.0}
    makespans_s = [timeline.makespan_s * (9 if step < 3 else 1) for step in range(num_steps)]
    return [
        {"step": step, "attempt": 0, "loss": None, "makespan_s": seconds, "step_s": seconds, **figures}
        for step, seconds in enumerate(makespans_s)
    ]


@pytest.fixture
def run_dir(plan, tmp_path):
    """The directory of a whole rehearsal."""
    open_run_dir(run_spec_of(plan, num_steps=NUM_STEPS, device="sleep"), tmp_path, resume=False)
    timeline = dataclasses.replace(simulate(plan.problem, plan.schedule), source="measured")
    lines = lines_of(timeline, NUM_STEPS)
    (tmp_path / METRICS_NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    timeline.save(tmp_path / TIMELINE_NAME)
    summarise(lines, 5).save(tmp_path / SUMMARY_NAME)
    return tmp_path


@pytest.mark.slow
def test_a_run_without_a_trace_gets_one_beside_the_page(farpipe, run_dir):
    run = farpipe("report", run_dir)
    assert (run.returncode, run.stderr) == (0, "")
    events = json.loads((run_dir / "trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted", "measured"}
    assert (run_dir / "report.html").exists()


@pytest.mark.slow
def test_the_table_and_the_summary_leave_out_the_same_steps(run_dir, farpipe):
    """And a rehearsal, which has no optimizer, has none in its prediction either."""
    summary = summary_json(load_run(run_dir))
    view = load_run(run_dir).view
    assert summary["step_s"] == summary["predicted_step_s"] == view.predicted.makespan_s
    assert view.step_overhead_s == 0.0
    assert " 0.0 %" in farpipe("report", run_dir).stdout


def test_the_optimizer_counts_where_there_is_one(plan, run_dir):
    spec = run_spec_of(plan, num_steps=NUM_STEPS, device="cpu")
    spec.save(run_dir / RUN_NAME)
    assert load_run(run_dir).view.step_overhead_s == plan.prediction.overhead_s > 0
    assert summary_json(load_run(run_dir))["predicted_step_s"] == pytest.approx(plan.prediction.step_s)


def break_off(run_dir, num_lines):
    """The rest of a run that died: no summary and no timeline."""
    (run_dir / SUMMARY_NAME).unlink()
    (run_dir / TIMELINE_NAME).unlink()
    lines = (run_dir / METRICS_NAME).read_text().splitlines(keepends=True)[:num_lines]
    (run_dir / METRICS_NAME).write_text("".join(lines))
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rank-1.log").write_text("warm-up\nrank 1: <killed> for its memory\n\n")
    (run_dir / "logs" / "rank-0.log").write_text("")


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [0, 1, 5])
def test_of_a_run_that_broke_off_there_is_a_page_that_says_so(farpipe, run_dir, num_lines):
    break_off(run_dir, num_lines)
    run = farpipe("report", run_dir)
    assert run.returncode == 0, run.stderr
    assert f"not a whole run: {num_lines} steps are recorded" in run.stderr
    assert "rank-1.log: rank 1: <killed> for its memory" in run.stderr
    assert "rank-0.log" not in run.stderr
    page = (run_dir / "report.html").read_text()
    assert "not a whole run" in page
    assert "rank 1: &lt;killed&gt; for its memory" in page
    assert ("measured step" in run.stdout) == (num_lines > 0)


def test_a_run_that_died_before_its_first_step_has_no_metrics(farpipe, run_dir):
    break_off(run_dir, 0)
    (run_dir / METRICS_NAME).unlink()
    (run_dir / RUN_NAME).unlink()
    assert farpipe("report", run_dir).returncode == 0


def test_a_damaged_file_is_still_an_error(farpipe, run_dir):
    (run_dir / METRICS_NAME).write_text("[1]\n")
    run = farpipe("report", run_dir)
    assert (run.returncode, run.stdout) == (3, "")
    assert METRICS_NAME in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--output", "--perfetto"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "plan.json"])
def test_a_page_never_takes_the_place_of_what_the_run_has_written(farpipe, run_dir, option, name):
    before = (run_dir / name).read_bytes()
    answer = farpipe("report", run_dir, option, run_dir / name)
    assert answer.returncode == 3
    assert f"{name}: this command reads it; write to another file" in answer.stderr
    assert (run_dir / name).read_bytes() == before


@pytest.mark.slow
def test_runs_side_by_side_share_a_page(farpipe, run_dir, tmp_path):
    (tmp_path / "both").mkdir()
    run = farpipe("report", run_dir, run_dir, "-o", "both/page.html", "--perfetto", "t.json")
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "both" / "page.html").exists()
    assert (tmp_path / "t.json").exists()
    (tmp_path / "both" / "trace.json").write_text("another's")
    assert farpipe("report", run_dir, "-o", "both/page.html").returncode == 0
    assert (tmp_path / "both" / "trace.json").read_text() == "another's"
    assert (tmp_path / "both" / "page.trace.json").exists()
    assert farpipe("report", run_dir, run_dir, "-o", "both/page.html").returncode == 0
    assert f", {run_dir}" in (tmp_path / "both" / "page.html").read_text(), "runs of one order are told apart"
