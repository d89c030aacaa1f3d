"""`farpipe import` and `farpipe check`: a script and a log become a job and a verdict."""

import json
import tomllib

import pytest

from farpipe.core.simulate import Timeline, simulate
from farpipe.planning import Plan
from interop.test_job_lists import SACCT
from interop.test_link_tests import IPERF3, PING
from interop.test_logs import megatron
from interop.test_megatron import SCRIPT
from interop.test_printed_arguments import STEP, printed
from interop.test_sites import H100, NODE, SKY
from interop.test_traced_steps import events_of
from interop.test_traces import JOB, trace_of

SMALL = SCRIPT.replace("--train-iters $STEPS", "").replace("--some-new-flag 7", "")


@pytest.fixture
def imported(farpipe, tmp_path):
    """The job of a script, in job.toml."""
    (tmp_path / "train.sh").write_text(SMALL)
    done = farpipe("import", "train.sh", "--site", "h100", "-o", "job.toml")
    assert done.returncode == 0, done.stderr
    return done


def log_of(tmp_path, seconds, count=12, batch=64):
    (tmp_path / "train.log").write_text("\n".join(megatron(step, 1e3 * seconds, batch) for step in range(1, count)))


def test_a_script_becomes_a_job_that_is_planned(imported, farpipe, tmp_path):
    assert "not understood" in imported.stderr
    assert "NUM_MACHINES is not set in the file; its default 2 was taken" in imported.stderr
    shown = farpipe("import", "train.sh", "--site", "h100")
    assert shown.stdout == (tmp_path / "job.toml").read_text()
    data = json.loads(farpipe("import", "train.sh", "--json").stdout)
    assert data["job"]["layout"]["tensor"] == 4
    assert data["origins"]["layout.tensor"] == "--tensor-model-parallel-size, line 16"
    assert farpipe("plan", "job.toml", "--no-strategies").returncode == 0


def test_a_second_site_is_planned_with_open_degrees(farpipe, tmp_path):
    (tmp_path / "train.sh").write_text(SMALL)
    options = ("--second-site", "16", "--link", "5 ms,400 Gbit/s", "-o", "two.toml")
    assert farpipe("import", "train.sh", *options).returncode == 0
    text = (tmp_path / "two.toml").read_text()
    assert "# pipeline = 2" in text
    assert '[schedule]\nmethod = "interleaved"  # orders that Megatron-LM runs' in text
    plan = farpipe("plan", "two.toml", "--no-strategies")
    assert plan.returncode == 0, plan.stderr
    assert "second" in plan.stdout
    options = farpipe("export", "plan.json", "--format", "megatron")
    assert "# Ranks by site: " in options.stdout, options.stderr
    (tmp_path / "two.toml").write_text(text.replace('"interleaved"', '"zbv"'))
    assert farpipe("plan", "two.toml", "--no-strategies").returncode == 0
    refused = farpipe("export", "plan.json", "--format", "megatron")
    assert "--set schedule.method=interleaved" in refused.stderr


def test_the_decision_is_one_page(farpipe, tmp_path):
    """What to use, what it costs, strategies with local steps marked, changes, and the derivation of the step."""
    (tmp_path / "train.sh").write_text(SMALL)
    options = ("--second-site", "16", "--link", "5 ms,10 Gbit/s", "-o", "two.toml")
    assert farpipe("import", "train.sh", *options).returncode == 0
    done = farpipe("plan", "two.toml", "--html", "decision.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "decision.html").read_text()
    for words in (
        "Bottleneck:",
        "Cheapest gain:",
        "Strategies",
        "local steps",
        "The cheapest changes that would help",
        "What F, I and W",
    ):
        assert words in page, words
    assert page.index("Bottleneck:") < page.index("Strategies") < page.index("What the step is made of")


def test_measurements_become_the_link(farpipe, tmp_path):
    (tmp_path / "train.sh").write_text(SMALL)
    (tmp_path / "ping.txt").write_text(PING)
    (tmp_path / "iperf.json").write_text(json.dumps(IPERF3))
    alone = farpipe("import", "ping.txt", "iperf.json")
    assert tomllib.loads(alone.stdout)["cluster"]["links"][0]["latency"] == "10.01 ms"
    assert "# ping, ping.txt, one way" in alone.stdout
    assert (
        farpipe("import", "train.sh", "ping.txt", "iperf.json", "--second-site", "16", "-o", "two.toml").returncode == 0
    )
    link = tomllib.loads((tmp_path / "two.toml").read_text())["cluster"]["links"][0]
    assert link == {"between": ["site", "second"], "latency": "10.01 ms", "bandwidth": "9.4 Gbit/s"}


def test_what_schedulers_say_becomes_the_sites(farpipe, tmp_path):
    (tmp_path / "train.sh").write_text(SMALL)
    (tmp_path / "ping.txt").write_text(PING)
    (tmp_path / "zurich.txt").write_text("".join(NODE.format(name=n, gres=H100, state="IDLE") for n in "abc"))
    (tmp_path / "tasks.yaml").write_text(SKY.partition("---")[0])
    alone = farpipe("import", "zurich.txt")
    assert tomllib.loads(alone.stdout)["cluster"]["sites"][0]["num_devices"] == 24
    done = farpipe("import", "train.sh", "zurich.txt", "tasks.yaml", "ping.txt", "-o", "two.toml")
    assert done.returncode == 0, done.stderr
    job = tomllib.loads((tmp_path / "two.toml").read_text())
    assert [(site["name"], site["num_devices"]) for site in job["cluster"]["sites"]] == [("zurich", 24), ("west", 32)]
    assert job["cluster"]["links"] == [
        {"between": ["zurich", "west"], "latency": "10.01 ms", "bandwidth": "100 Gbit/s"}
    ]
    plan = farpipe("plan", "two.toml", "--no-strategies")
    assert plan.returncode == 0, plan.stderr


def test_a_file_that_is_there_is_kept(imported, farpipe, tmp_path):
    before = (tmp_path / "job.toml").read_text()
    again = farpipe("import", "train.sh", "--site", "32xh100", "-o", "job.toml")
    assert again.returncode == 3
    assert "job.toml: exists already" in again.stderr
    assert (tmp_path / "job.toml").read_text() == before


def test_a_log_is_compared_and_calibrated(imported, farpipe, tmp_path):
    log_of(tmp_path, 100.0)
    predicted_s = json.loads(farpipe("check", "job.toml", "--log", "train.log", "--json").stdout)["predicted_step_s"]
    log_of(tmp_path, predicted_s * 1.05)
    good = farpipe("check", "job.toml", "--log", "train.log", "--json")
    assert good.returncode == 0, good.stderr
    data = json.loads(good.stdout)
    assert data["error"] == pytest.approx(1 / 1.05 - 1, abs=2e-3)
    assert data["num_steps"] == 10
    assert sum(data["seconds"].values()) == pytest.approx(data["measured_step_s"])
    log_of(tmp_path, predicted_s * 1.5)
    bad = farpipe("check", "job.toml", "--log", "train.log", "--calibrate", "fitted.toml")
    assert bad.returncode == 5
    assert "off, outside 10%" in bad.stderr
    fitted = farpipe("check", "fitted.toml", "--log", "train.log", "--json")
    assert abs(json.loads(fitted.stdout)["error"]) < 2e-3


def test_the_directory_of_a_run_is_a_log(imported, farpipe, tmp_path):
    (tmp_path / "run").mkdir()
    lines = [json.dumps({"step": step, "step_s": 100.0, "attempt": 0}) for step in range(12)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    data = json.loads(farpipe("check", "job.toml", "--log", "run", "--json").stdout)
    assert data["measured_step_s"] == 100.0
    assert "the log is of farpipe" in data["notes"]


def test_the_page_and_the_table_have_one_measured_step(imported, farpipe, tmp_path):
    """The median of the steady steps, 1.00 s, not that of all but the first three, 1.02 s."""
    seconds = [1.0] * 7 + [1.02] * 4 + [1.6]
    lines = [json.dumps({"step": step, "step_s": step_s, "attempt": 0}) for step, step_s in enumerate(seconds)]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = farpipe("check", "job.toml", "--log", "run", "--json", "--html", "page.html")
    assert json.loads(found.stdout)["measured_step_s"] == 1.0
    page = (tmp_path / "page.html").read_text()
    assert "<dt>measured step</dt><dd>1.00 s</dd>" in page
    assert "1.02 s" not in page
    assert "without the first" not in page


@pytest.mark.slow
def test_a_run_that_would_not_fit_is_compared_and_calibrated(imported, farpipe, tmp_path):
    text = (tmp_path / "job.toml").read_text()
    small = text.replace('device = "h100"', 'device = { preset = "h100", memory = "3 GiB" }')
    assert small != text
    (tmp_path / "small.toml").write_text(small)
    assert farpipe("plan", "small.toml", "--no-strategies").returncode == 4
    log_of(tmp_path, 100.0)
    first = farpipe("check", "small.toml", "--log", "train.log", "--json", "--html", "page.html")
    assert "the memory of this run is overestimated" in first.stdout
    page = (tmp_path / "page.html").read_text()
    assert "48 GiB" not in page, "the limit that was lifted is not shown as the device's"
    assert " GiB of " in page
    with (tmp_path / "train.log").open("a") as log:
        log.write(
            "[Rank 0] (after 5 iterations) memory (MB) | allocated: 1.0 | max allocated: 5120.0 | reserved: 1.0\n"
        )
    told = farpipe("check", "small.toml", "--log", "train.log", "--json").stdout
    assert "the run used 5.0 GiB of a device (log), and h100-sxm has 3" in told
    log_of(tmp_path, 1.3 * json.loads(first.stdout)["predicted_step_s"])
    assert farpipe("check", "small.toml", "--log", "train.log", "--calibrate", "fitted.toml").returncode == 5
    fitted = farpipe("check", "fitted.toml", "--log", "train.log", "--json")
    assert abs(json.loads(fitted.stdout)["error"]) < 2e-3


def test_what_may_explain_the_rest_is_ranked(farpipe, tmp_path):
    """A run without overlap is found out: its log is the prediction of the job without overlap."""
    (tmp_path / "train.sh").write_text(SMALL)
    farpipe("import", "train.sh", "-o", "job.toml")
    text = (tmp_path / "job.toml").read_text()
    (tmp_path / "plain.toml").write_text(text.replace("overlap = true", "overlap = false"))
    log_of(tmp_path, 100.0)
    plain = farpipe("check", "plain.toml", "--log", "train.log", "--json")
    log_of(tmp_path, json.loads(plain.stdout)["predicted_step_s"])
    data = json.loads(farpipe("check", "job.toml", "--log", "train.log", "--json").stdout)
    first = data["suspects"][0]
    assert "overlap = false" in first["what"]
    assert first["effect_s"] == pytest.approx(data["measured_step_s"] - data["predicted_step_s"], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("check", "job.toml", "--log", "missing.log"), 3, "missing.log"),
        (("import", "missing.sh"), 3, "missing.sh"),
        (("import", "train.sh", "--format", "cobol"), 2, "expected one of auto, megatron"),
        (("import", "train.sh", "--set", "A"), 2, "expected NAME=VALUE"),
        (("import", "train.sh", "--site", "h1000"), 3, "h1000"),
    ],
)
def test_wrong_arguments(arguments, code, words, imported, farpipe):
    done = farpipe(*arguments)
    assert done.returncode == code
    assert words in done.stderr


def test_an_option_that_may_say_a_shape_stops_the_import_until_it_is_accepted(farpipe, tmp_path):
    script = SCRIPT.replace("--some-new-flag 7", "--moe-widths 7 --optimizer-cpu-offload")
    (tmp_path / "x.sh").write_text(script)
    stopped = farpipe("import", "x.sh", "-o", "job.toml")
    assert (stopped.returncode, (tmp_path / "job.toml").exists()) == (3, False)
    assert "--moe-widths, line 23: 7" in stopped.stderr
    assert "--accept moe_widths" in stopped.stderr
    assert farpipe("import", "x.sh", "--accept", "no-such").returncode == 2
    done = farpipe("import", "x.sh", "--accept", "--moe-widths", "-o", "job.toml")
    assert done.returncode == 0
    assert done.stderr.splitlines()[0].startswith(
        "Accepted, though not understood, and it may say a shape: --moe-widths"
    )
    assert "Not planned, though it changes a step: --optimizer-cpu-offload" in done.stderr.splitlines()[1]
    assert "1 without effect on a step: --save, line 23" in done.stderr
    first = (tmp_path / "job.toml").read_text().splitlines()[2:4]
    assert [line.split(":")[0] for line in first] == [
        "# Accepted, though not understood, and it may say a shape",
        "# Not planned, though it changes a step",
    ]
    data = json.loads(farpipe("import", "x.sh", "--accept", "moe_widths", "--json").stdout)
    assert (len(data["accepted"]), len(data["not_planned"])) == (1, 1)


def test_what_is_missing_is_named_with_its_remedy(farpipe, tmp_path):
    (tmp_path / "x.sh").write_text("python pretrain.py --num-layers $N --hidden-size 64 --seq-length 8\n")
    done = farpipe("import", "x.sh")
    assert done.returncode == 3
    assert "model.num_layers, model.num_heads, training.global_batch, model.max_sequence_length missing" in done.stderr
    assert "$N is not set in the file (give it with --set NAME=VALUE)" in done.stderr
    assert farpipe("import", "x.sh", "--set", "N=2").returncode == 3


def test_a_trace_becomes_a_profile_and_takes_the_model_s_place(farpipe, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    found = json.loads(trace_of(tmp_path).read_text())
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "tid": 7, "ts": 0, "dur": 2000}
    (tmp_path / "trace.json").write_text(json.dumps(found | {"traceEvents": [*found["traceEvents"], step]}))
    assert "name its job with --job" in farpipe("import", "trace.json").stderr
    done = farpipe("import", "trace.json", "--job", "job.toml", "-o", "profile.json")
    assert done.returncode == 0, done.stderr
    assert farpipe("plan", "job.toml", "--no-strategies", "--profile", "profile.json").returncode == 0
    log_of(tmp_path, 1e-3, batch=4)
    twice = ("--trace", "trace.json") * 2
    checked = farpipe("check", "job.toml", "--log", "train.log", *twice, "--json")
    assert json.loads(checked.stdout)["predicted_step_s"] > 2 * 3 * (4000 + 6200) * 1e-6
    assert "the traced steps took 2.00 ms (median of 2), +100.0% of the log's" in checked.stdout
    assert checked.returncode == 5


def test_traces_of_all_ranks_become_a_timeline_and_a_page(farpipe, tmp_path):
    """The step that the plan predicts, traced: the page has both, and the log's steps."""
    text = JOB.replace("pipeline = 1", "pipeline = 2").replace("num_devices = 1", "num_devices = 2")
    (tmp_path / "job.toml").write_text(text)
    assert farpipe("plan", "job.toml", "--no-strategies").returncode == 0
    plan = Plan.load(tmp_path / "plan.json")
    predicted = simulate(plan.problem, plan.schedule)
    names = [f"rank{rank}.json" for rank in range(2)]
    for rank, name in enumerate(names):
        (tmp_path / name).write_text(json.dumps({"traceEvents": events_of(predicted, rank)}))
    done = farpipe("import", *names, "--job", "job.toml", "-o", "timeline.json")
    assert done.returncode == 0, done.stderr
    seen = Timeline.load(tmp_path / "timeline.json")
    assert seen.makespan_s == pytest.approx(predicted.makespan_s, rel=1e-3)
    log_of(tmp_path, plan.prediction.step_s, batch=4)
    traces = [word for name in names for word in ("--trace", name)]
    checked = farpipe("check", "job.toml", "--log", "train.log", *traces, "--html", "page.html")
    assert checked.returncode == 0, checked.stderr
    assert "traced pipeline: bubble" in checked.stdout
    assert "times of layers are modelled: " in checked.stdout
    page = (tmp_path / "page.html").read_text()
    for words in ("Measured and predicted", ">measured<", "Step time", "What the step is made of"):
        assert words in page, words


def test_a_log_is_its_steps_and_as_a_toml_the_job_of_its_arguments(farpipe, tmp_path):
    steps = "".join(map(STEP.format, range(1, 20)))
    (tmp_path / "train.log").write_text(printed() + steps)
    assert "import train.log -o JOB.toml" in farpipe("import", "train.log").stderr
    assert farpipe("import", "train.log", "-o", "job.toml").returncode == 0
    agreed = farpipe("check", "job.toml", "--log", "train.log", "--tolerance", "1000")
    assert agreed.returncode == 0
    assert agreed.stdout.splitlines()[-1].startswith("The prediction agrees with the log: ")
    (tmp_path / "empty").mkdir()
    other = farpipe("check", "job.toml", "--log", "empty")
    assert "empty: has neither a run's metrics.jsonl nor TensorBoard's files" in other.stderr
    (tmp_path / "bare.log").write_text(steps)
    failed = farpipe("import", "bare.log", "-o", "bare.toml")
    assert failed.returncode == 3
    assert "prints no arguments of Megatron-LM" in failed.stderr


def test_lists_of_jobs_become_what_a_fleet_reads(farpipe, tmp_path):
    (tmp_path / "sacct.txt").write_text(SACCT)
    done = farpipe("import", "sacct.txt", "--set", "zone=Europe/Zurich", "-o", "jobs.csv")
    assert done.returncode == 0, done.stderr
    assert "[clock] start" in done.stderr
    assert "times without a zone are taken as Europe/Zurich" in done.stderr
    assert (tmp_path / "jobs.csv").read_text().splitlines()[1] == "101,0.0,10800.0,16,vision"
    for files, message in (
        (["sacct.txt", "sacct.txt"], "a list of jobs is one file"),
        (["sacct.txt", "--set", "zone=Mars"], "zone=Mars: no time zone"),
        (["sacct.txt", "--set", "zoon=UTC"], "--set zoon=UTC: expected zone="),
    ):
        failed = farpipe("import", *files)
        assert failed.returncode in (2, 3)
        assert message in failed.stderr.replace("\n", " ")


@pytest.mark.parametrize("head", ["submit_s,duration_s,num_gpus", ",0", "when;price"])
def test_a_table_that_is_not_known_is_told_what_a_fleet_reads(farpipe, tmp_path, head):
    """Not that its cells are no actions of a schedule."""
    (tmp_path / "own.csv").write_text(f"{head}\n2024-01-01 00:00:00+01:00,0.1,8\n")
    failed = farpipe("import", "own.csv")
    assert failed.returncode == 3
    assert "own.csv: line 1: " in failed.stderr
    assert "expected an action" not in failed.stderr
    assert "fleet reads" in failed.stderr if head == ",0" else "JOBS.csv" in failed.stderr


def test_a_log_becomes_its_steps(imported, farpipe, tmp_path):
    """A table, JSON and a CSV that `check` reads; with the job the log of another training is refused."""
    lines = [megatron(step, 9000.0 if step in (1, 8) else 2250.0) for step in range(1, 12)]
    (tmp_path / "train.log").write_text("\n".join([*lines, *map(megatron, range(9, 12))]))
    shown = farpipe("import", "train.log", "-o", "steps.csv")
    assert "median of 12 steps" in shown.stdout, shown.stderr
    assert "1 restarts: step numbers fall back" in shown.stdout
    data = json.loads(farpipe("import", "train.log", "--json", "--job", "job.toml").stdout)
    assert [row["kind"] for row in data["steps"][:8]] == ["warm-up", *["steady"] * 6, "outlier"]
    assert (data["step_s"], data["num_steps"], data["steps"][-1]["attempt"]) == (2.25, 12, 1)
    assert (tmp_path / "steps.csv").read_text().splitlines()[:2] == ["attempt,step,step_s,kind", "0,1,9.0,warm-up"]
    assert json.loads(farpipe("import", "steps.csv", "--json").stdout)["steps"] == data["steps"]
    assert "import it alone" in farpipe("import", "train.sh", "train.log").stderr
    (tmp_path / "other.log").write_text("\n".join(megatron(step, batch=32) for step in range(1, 9)))
    refused = farpipe("import", "other.log", "--job", "job.toml")
    assert (refused.returncode, "the log is of another training" in refused.stderr) == (3, True)
