import csv
import json
import os
import re
from pathlib import Path

import pytest

from farpipe.cli.plan import number_of_tokens, plan
from farpipe.core.errors import RunInterruptedError, UsageError
from farpipe.core.schedule import check
from farpipe.core.schedule.library import ORDERS
from farpipe.core.simulate import Timeline
from farpipe.core.step import Problem, Schedule
from farpipe.core.step.player import period_s
from farpipe.planning import PlanDocument

GOLDEN = Path(__file__).parent / "golden"
RECIPES = Path(__file__).parents[2] / "recipes"


def expect_golden(name, text):
    """Compare with the golden file; run with GOLDEN=write to write it anew."""
    path = GOLDEN / name
    if os.environ.get("GOLDEN") == "write":
        path.write_text(text)
    assert text == path.read_text()


def test_help_lists_every_command(farpipe_process):
    run = farpipe_process("--help")
    assert run.returncode == 0
    for command in ("plan", "schedule", "compare", "simulate", "profile", "train", "report", "validate"):
        assert f"\n  {command} " in run.stdout


def test_version(farpipe_process):
    assert farpipe_process("--version").stdout.startswith("farpipe 0.")


@pytest.mark.slow
def test_schedule_shows_order_time_and_gap(farpipe_process, problem_file):
    run = farpipe_process("schedule", problem_file, "--method", "1f1b")
    assert (run.returncode, run.stderr) == (0, "")
    expect_golden("schedule_1f1b.txt", run.stdout)


def test_schedule_auto_takes_the_fastest(farpipe, problem_file):
    found = json.loads(farpipe("schedule", problem_file, "--json").stdout)
    every = json.loads(farpipe("compare", problem_file, "--json").stdout)["schedules"]
    assert found["makespan_s"] <= min(row["step_s"] for row in every if not row["obstacle"])


def test_schedule_json_has_what_the_format_promises(farpipe, problem_file):
    data = json.loads(farpipe("schedule", problem_file, "--method", "eager", "--json", "--timeline").stdout)
    assert set(data) == {
        *("schedule", "makespan_s", "lower_bound_s", "gap", "bubble_ratio", "peak_memory_bytes", "elapsed_s"),
        "timeline",
    }
    problem, schedule = Problem.load(problem_file), Schedule.from_data(data["schedule"])
    check(problem, schedule)
    timeline = Timeline.from_data(data["timeline"])
    assert timeline.makespan_s == data["makespan_s"] >= data["lower_bound_s"]
    assert len(timeline.actions) == schedule.num_actions


def test_schedule_without_a_barrier_is_for_the_time_between_steps(farpipe, problem_file, tmp_path):
    free = tmp_path / "free.json"
    free.write_text(json.dumps(json.loads(Path(problem_file).read_text()) | {"barrier": False}))
    data = json.loads(farpipe("schedule", free, "--method", "local", "--json").stdout)
    assert data["period_s"] == period_s(Problem.load(free), Schedule.from_data(data["schedule"]))
    assert data["lower_bound_s"] * (1 + data["gap"]) == pytest.approx(data["period_s"])
    shown = farpipe("schedule", free, "--method", "1f1b").stdout
    assert re.search(r"\d s from step to step, .* the lower bound of .*; makespan \d", shown, re.DOTALL)


def test_schedule_file_is_simulated(farpipe, problem_file, tmp_path):
    assert farpipe("schedule", problem_file, "-o", "s.json").returncode == 0
    run = farpipe(
        "simulate", problem_file, "--schedule", "s.json", "--perfetto", "t.json", "--plot", "g.svg", "--html", "r.html"
    )
    assert run.returncode == 0, run.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "g.svg").read_text().startswith("<svg")
    assert "<!doctype html>" in (tmp_path / "r.html").read_text()


def test_compare_shows_all_orders(farpipe, problem_file):
    run = farpipe("compare", problem_file)
    assert run.returncode == 0
    expect_golden("compare.txt", run.stdout)
    data = json.loads(farpipe("compare", problem_file, "--json").stdout)
    assert {row["method"] for row in data["schedules"]} == {*ORDERS} - {"interleaved"}


def test_compare_searches_when_asked(farpipe, problem_file, tmp_path):
    data = json.loads(farpipe("compare", problem_file, "--time-limit", "1", "--json", "--plot", "c.svg").stdout)
    rows = {row["method"]: row for row in data["schedules"]}
    assert set(rows) == {*ORDERS, "greedy", "auto"} - {"interleaved"}
    played = [row for row in data["schedules"] if not row["obstacle"]]
    assert [row["makespan_s"] for row in played] == sorted(row["makespan_s"] for row in played)
    assert rows["auto"]["makespan_s"] == played[0]["makespan_s"]
    assert rows["auto"]["gap"] == pytest.approx(rows["auto"]["makespan_s"] / data["lower_bound_s"] - 1)
    assert rows["1f1b"]["link_busy_ratio"] == pytest.approx({"a>b": 4 / 27, "b>a": 4 / 27})
    picture = (tmp_path / "c.svg").read_text()
    assert all(f">{row['method']}<" in picture for row in played)
    assert ">bfs<" not in picture


def test_compare_of_named_methods_takes_orders_and_searches(farpipe, problem_file):
    run = farpipe("compare", problem_file, "--method", "greedy", "--method", "1f1b", "--method", "1f1b", "--json")
    assert [row["method"] for row in json.loads(run.stdout)["schedules"]] == ["greedy", "1f1b"]


@pytest.mark.slow
def test_compare_puts_an_order_beside_all_of_the_librarys_and_writes_csv(farpipe, problem_file, tmp_path):
    mine = "from farpipe.core.schedule.library.one_f_one_b import one_f_one_b as mine\n"
    (tmp_path / "mine.py").write_text(mine)
    for _ in range(2):  # the second time in the place of its own file
        run = farpipe(
            "compare", problem_file, "--method", "all", "--method", "mine.py:mine", "--csv", "rows.csv", "--json"
        )
    found = json.loads(run.stdout)["schedules"]
    rows = list(csv.DictReader((tmp_path / "rows.csv").read_text().splitlines()))
    assert {*ORDERS} - {"interleaved"} < {row["method"] for row in rows}
    assert [row["method"] for row in rows] == [row["method"] for row in found]
    steps = {row["method"]: row["step_s"] for row in rows}
    assert steps["mine.py:mine"] == steps["1f1b"] == str(next(r["step_s"] for r in found if r["method"] == "1f1b"))
    assert "link_busy_ratio" not in rows[0]


def test_compare_of_a_job_counts_what_is_outside_the_pipeline_as_plan_does(farpipe, tmp_path):
    plan = json.loads(farpipe("plan", RECIPES / "two_sites.toml", "--json").stdout)
    data = json.loads(farpipe("compare", "plan.json", "--json").stdout)
    assert data["overhead_s"] == plan["prediction"]["overhead_s"] > 0
    chosen = next(row for row in data["schedules"] if row["method"] == plan["schedule"]["method"])
    assert chosen["step_s"] == plan["prediction"]["step_s"]
    assert chosen["makespan_s"] == plan["prediction"]["makespan_s"]
    best = next(row for row in data["schedules"] if row["method"] in ORDERS)
    schedule = json.loads(farpipe("schedule", "plan.json", "--method", best["method"], "--json").stdout)
    assert schedule["makespan_s"] == best["makespan_s"] >= chosen["makespan_s"]


@pytest.mark.slow
def test_plan_finds_a_plan_and_simulate_agrees(farpipe, tmp_path):
    run = farpipe("plan", RECIPES / "two_sites.toml", "--json")
    assert run.returncode == 0, run.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    printed = json.loads(run.stdout)
    assert {key: printed[key] for key in plan} == plan
    assert printed["step_s"] == plan["prediction"]["step_s"]
    assert printed["tokens_per_s"] == plan["prediction"]["tokens_per_s"]
    assert printed["search_s"] > 0
    assert set(printed["money"]) == {"per_step", "per_million_tokens"}
    assert printed["money"]["per_step"]["energy_kwh"] > 0
    assert printed["engine"] == {"runnable": True, "obstacle": "", "change": ""}
    timeline = json.loads(farpipe("simulate", "plan.json", "--json").stdout)
    assert timeline["makespan_s"] == plan["prediction"]["makespan_s"]


@pytest.mark.slow
def test_plan_tells_why_the_others_lost(farpipe):
    run = farpipe("plan", RECIPES / "two_sites.toml", "--full")
    assert not [line for line in run.stdout.splitlines() if line.endswith(" ")]
    use, cost, likely, *_, gain, then, headline = (
        run.stdout.partition("\n\n")[0].splitlines() + run.stdout.split("\n\n")[1:2]
    )
    assert use.startswith("llama-3-8b: use both sites, ")
    assert re.search(r"1\.9\d times as fast as zurich alone, with 2\.00 times its devices\.$", use)
    assert re.fullmatch(
        r"8\.03 B parameters: 1,000 steps of .* take .*, .* device-hours, no prices given\. Bottleneck: compute\.", cost
    )
    assert gain.startswith('Cheapest gain: training.matmul = "fp8": +')
    assert then.startswith("Then: ")
    assert headline.partition(":")[0] == "llama-3-8b, pipeline over lugano > zurich"
    assert re.match(
        r"8 of 10 such jobs took .* s a step \(several stages per rank; \d+ steps of \d+ sources\)\.$", likely
    )
    assert "Why the others lost" in run.stdout


@pytest.mark.parametrize(("text", "number"), [("15T", 15e12), ("300 B", 3e11), ("1.5e12", 1.5e12), ("4_096", 4096)])
def test_tokens_are_counted_as_people_write_them(text, number):
    assert number_of_tokens(text) == number


@pytest.mark.parametrize("text", ["15X", "nan", "0", "-3T", "1e30", ""])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(UsageError, match="--tokens"):
        number_of_tokens(text)


def test_the_verdict_is_printed_before_strategies_and_changes_are_looked_for(monkeypatch, capsys, tmp_path):
    def never(explanation, planned, progress, **options):
        progress(1, 2)
        assert "use both sites" in capsys.readouterr().out
        raise KeyboardInterrupt

    monkeypatch.setattr("farpipe.planning.explain.with_alternatives", never)
    with pytest.raises(RunInterruptedError, match=r"the plan without strategies and changes is in .*plan\.json"):
        plan(job=RECIPES / "two_sites.toml", output=tmp_path / "plan.json")
    assert PlanDocument.load(tmp_path / "plan.json").explanation.strategies == ()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["schedule", "absent.json"], 3, "absent.json: can't be read: No such file or directory"),
        (["schedule", "{problem}", "--method", "1f1"], 2, "there is no schedule '1f1'; did you mean '1f1b'?"),
        (["simulate", "{problem}"], 2, "give one with --schedule"),
        (["plan", "{problem}"], 3, "it is a problem of farpipe"),
        (["export", "{problem}", "--format", "tochtitan"], 2, "hugging-face; did you mean 'torchtitan'?"),
        (["plan"], 2, "there is no job: name its file"),
        (["compare", "empty.json"], 3, "empty.json: the file is empty"),
        (["simulate", "binary.json"], 3, "binary.json: not UTF-8"),
        (["schedul"], 2, "No such command 'schedul'"),
        (["schedule"], 2, "Missing argument"),
    ],
)
def test_mistakes_end_in_a_message_and_an_exit_code(farpipe, problem_file, tmp_path, arguments, code, message):
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    run = farpipe(*(a.format(problem=problem_file) for a in arguments))
    assert run.returncode == code
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_problem_without_memory_is_infeasible(farpipe, problem_file):
    data = json.loads(problem_file.read_text())
    data["ranks"] = [{"memory_bytes": 1, "static_bytes": 0.5}] * 2
    problem_file.write_text(json.dumps(data))
    run = farpipe("schedule", problem_file, "--method", "1f1b")
    assert run.returncode == 4
    assert "rank 0 needs 1.50 B of 1 B at 0F0" in run.stderr
    assert "^^^" in run.stderr
    run = farpipe("schedule", problem_file)
    assert run.returncode == 4
    assert "no schedule fits memory: rank" in run.stderr
    run = farpipe("compare", problem_file, "--time-limit", "1", "--plot", "c.svg")
    assert (run.returncode, run.stdout) == (4, "")
    assert "1f1b, eager, geopipe" in run.stderr
    assert "greedy, auto: no schedule fits memory" in run.stderr


def test_an_output_that_can_not_be_written_is_told(farpipe, problem_file):
    run = farpipe("schedule", problem_file, "-o", "/proc/none/s.json")
    assert run.returncode == 6
    assert "/proc/none/s.json: can't be written" in run.stderr
