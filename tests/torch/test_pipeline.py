"""`farpipe.torch.Pipeline` in place of torch's schedules: what two and four processes see of it."""

import json
import re
from pathlib import Path

import pytest

from farpipe import planning
from farpipe.cli.runs import load_run
from farpipe.core.spec import parse_job
from farpipe.engine.launch.learned import learn
from job_files import OF_A_LOOP, cluster_text
from torch_processes import LIMIT_S, run_ranks, run_well

HERE = Path(__file__).parent
RANK = HERE / "pipeline_rank.py"
CHECKS = re.findall(r"^    (\w+),$", RANK.read_text().partition("\nCHECKS = (")[2], re.MULTILINE)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[2, 4])
def ran(request, tmp_path_factory):
    """(folder, failed checks of each rank) of a run of all checks."""
    folder = tmp_path_factory.mktemp("pipelines")
    planning.plan(parse_job(OF_A_LOOP)).save(folder / "plan.json")
    (folder / "long.toml").write_text(cluster_text("west", "east", latency="30 ms", bandwidth="400 Mbit/s"))
    print(run_well(request.param, RANK, folder))
    return folder, [json.loads((folder / f"errors-{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("check", CHECKS)
def test_pipeline(ran, check):
    """See the function of this name in pipeline_rank.py; the first that fails keeps the others from being tried."""
    _, failed = ran
    done = CHECKS[: min((CHECKS.index(name) for errors in failed for name in errors), default=len(CHECKS)) + 1]
    if check not in done:
        pytest.skip("an earlier one has failed")
    for rank, errors in enumerate(failed):
        assert check not in errors, f"rank {rank}: {errors[check]}"


def test_the_figures_of_a_run_are_shown_and_learned_from(ran):
    folder, failed = ran
    if len(failed) == 2:
        run = load_run(folder / "run")
        assert run.view.measured is not None
        assert [line["step"] for line in run.view.metrics] == [*range(6)]
        assert all(line["loss"] > 0 for line in run.view.metrics)
        assert run.broken_off == ""
        learned = learn(folder / "run")
        assert set(learned.links) == {"west>east", "east>west"}


def test_an_order_changed_while_the_steps_went_on_and_made_them_shorter(ran):
    folder, _ = ran
    events = [json.loads(line) for line in (folder / "replanned" / "replan.jsonl").read_text().splitlines()]
    swap = next(event for event in events if event["event"] == "swap")
    run = load_run(folder / "replanned")
    steps = [line["makespan_s"] for line in run.view.metrics]
    assert [line["step"] for line in run.view.metrics] == [*range(swap["step"] + 5)]
    assert swap["expected_s"] < 0.95 * swap["before_s"]
    assert min(steps[swap["step"] + 1 :]) < 0.8 * min(steps[: swap["step"] + 1])


def test_when_a_process_is_killed_in_a_step_every_other_one_raises(tmp_path):
    ended = run_ranks(4, RANK, tmp_path, "killed")
    assert ended[3][0] == -9, ended[3]
    for rank in range(3):
        found = json.loads((tmp_path / f"heard-{rank}.json").read_text())
        assert "rank 3 is lost" in found["text"]
        assert found["seconds"] < LIMIT_S
