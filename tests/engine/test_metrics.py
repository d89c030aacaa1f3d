import json
import socket
import subprocess
import sys
import urllib.request
import weakref

import pytest

from farpipe.core.errors import InputError, RunError
from farpipe.core.spec import MetricsSettings
from farpipe.engine.figures import metrics as metrics_module
from farpipe.engine.figures import sinks as sinks_module
from farpipe.engine.figures.metrics import MetricsFile, is_logged, last_line, log_line, read_metrics, summarise
from farpipe.engine.figures.sinks import Prometheus, figures, open_sinks
from farpipe.planning.cost.flops import causal_share, step_flops
from trainings import make_run, metrics, train

FIGURES = ("makespan_s", "step_s", "tokens_per_s", "bubble")
FIGURES += tuple(f"exposed_{where}_site{which}_s" for where in ("inter", "intra") for which in ("", "_max"))


def line(step, attempt=0, value=1.0, **further):
    further = {"loss": 5.0 - step, "evaluation_loss": None, "model_flops_utilisation": None} | further
    return {"step": step, "attempt": attempt, **dict.fromkeys(FIGURES, value), **further}


def test_a_line_has_what_people_watch(text_file, tmp_path):
    run = make_run(text_file, num_steps=4, evaluate_every_steps=2, run_fields={"peak_flops_per_s": 1e9})
    summary = train(run, tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert [entry["evaluation_loss"] is None for entry in lines] == [True, False, True, False]
    assert 2 < lines[-1]["evaluation_loss"] < lines[1]["evaluation_loss"] < 6
    assert summary.last_evaluation_loss == lines[-1]["evaluation_loss"]
    for entry in lines:
        assert entry["rss_max_bytes"] > 50 << 20, "torch alone takes more"
        assert entry["cuda_peak_max_bytes"] is None
        assert entry["pause_s"] > 0
        assert entry["learning_rate"] == run.plan.training.learning_rate
        expected = step_flops(run.plan.model, 6, 8) / entry["step_s"] / 1e9
        assert entry["model_flops_utilisation"] == pytest.approx(expected)
        assert entry["causal_utilisation"] == pytest.approx(expected * causal_share(run.plan.model, 6))
    assert summary.model_flops_utilisation > 0


def test_without_a_known_peak_there_is_no_utilisation(text_file, tmp_path):
    summary = train(make_run(text_file, num_steps=2), tmp_path / "run")
    assert [entry["model_flops_utilisation"] for entry in metrics(tmp_path / "run")] == [None, None]
    assert summary.model_flops_utilisation is None


@pytest.mark.slow
def test_evaluation_changes_nothing_in_the_training(text_file, tmp_path):
    train(make_run(text_file, num_steps=4), tmp_path / "plain")
    train(make_run(text_file, num_steps=4, evaluate_every_steps=1, evaluation_batches=3), tmp_path / "evaluated")
    plain, evaluated = ([entry["loss"] for entry in metrics(tmp_path / n)] for n in ("plain", "evaluated"))
    assert plain == evaluated


@pytest.mark.slow
@pytest.mark.parametrize(("num_replicas", "zero1"), [(2, False), (2, True), (4, True)])
def test_replicas_evaluate_to_the_same_loss(num_replicas, zero1, text_file, tmp_path):
    options = {"num_steps": 2, "evaluate_every_steps": 1, "evaluation_batches": 4}
    train(make_run(text_file, **options), tmp_path / "one")
    train(make_run(text_file, num_replicas=num_replicas, zero1=zero1, **options), tmp_path / "several")
    one, several = ([entry["evaluation_loss"] for entry in metrics(tmp_path / n)] for n in ("one", "several"))
    assert several == pytest.approx(one, rel=1e-4)
    assert one[0] > one[1]


def test_evaluation_without_held_out_text_is_refused(text_file, tmp_path):
    run = make_run(text_file, evaluate_every_steps=1)
    run = run.with_plan(data=run.plan.data.model_copy(update={"held_out": 0.0}))
    with pytest.raises(InputError, match=r"evaluate_every_steps: no text is held out for it; set data\.held_out"):
        train(run, tmp_path / "run")


def test_lines_of_steps_that_are_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    for step in range(4):
        first.write(line(step))
    first.close()
    with path.open("a") as file:
        file.write('{"step": 4, "att')
    second = MetricsFile(path, first_step=2)
    assert (second.attempt, [entry["step"] for entry in read_metrics(path)]) == (1, [0, 1])
    second.write(line(2, second.attempt))
    second.close()
    assert [(entry["step"], entry["attempt"]) for entry in read_metrics(path)] == [(0, 0), (1, 0), (2, 1)]
    third = MetricsFile(path, first_step=0)
    assert third.attempt == 2
    third.close()
    assert path.read_text() == ""


def test_the_last_line_of_a_long_file_is_found_from_its_end(tmp_path, monkeypatch):
    path, parsed = tmp_path / "metrics.jsonl", []
    path.write_text("".join(json.dumps(line(step, 3)) + "\n" for step in range(10_000)))
    monkeypatch.setattr(metrics_module, "parse_json", lambda text, source: parsed.append(text) or json.loads(text))
    assert last_line(path)["step"] == 9_999
    assert len(parsed) == 1


def written(path, steps, attempt=0):
    path.write_text("".join(json.dumps(line(step, attempt)) + "\n" for step in steps))


@pytest.mark.parametrize("place", ["first", "middle", "last", "zeros"])
def test_damaged_lines_are_put_aside_and_said(place, tmp_path):
    path = tmp_path / "metrics.jsonl"
    written(path, range(5))
    lines = path.read_bytes().splitlines(keepends=True)
    number = {"first": 0, "middle": 2, "last": 4, "zeros": 4}[place]
    lines[number] = bytes(len(lines[number]) - 1) + b"\n" if place == "zeros" else lines[number].replace(b'"', b"#", 1)
    path.write_bytes(before := b"".join(lines))
    file = MetricsFile(path, first_step=5)
    file.write(line(5, file.attempt))
    file.close()
    assert [entry["step"] for entry in read_metrics(path)] == [step for step in range(6) if step != number]
    assert (tmp_path / "metrics-damaged-1.jsonl").read_bytes() == before
    assert len(file.problems) == 2
    assert "the file is kept as metrics-damaged-1.jsonl, its 4 good lines are used" in file.problems[0]
    assert f"has no lines of 1 earlier steps, the first of which is {number}" in file.problems[1]
    assert summarise(read_metrics(path), None).num_steps == 6


@pytest.mark.parametrize(("steps", "missing"), [((), range(4)), ((0, 1, 3), [2]), ((1, 2, 3), [0]), (range(4), [])])
def test_missing_lines_are_said(steps, missing, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if steps:
        written(path, steps)
    file = MetricsFile(path, first_step=4)
    file.close()
    told = [f"{path}: has no lines of {len(missing)} earlier steps, the first of which is {min(missing, default=0)}"]
    assert file.problems == (told if missing else [])


def test_a_run_that_goes_on_from_another_one_has_no_earlier_lines(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", first_step=4, is_whole=False)
    file.close()
    assert file.problems == []


def test_a_directory_that_is_renamed_is_missed_at_once(tmp_path):
    (tmp_path / "run").mkdir()
    file = MetricsFile(tmp_path / "run" / "metrics.jsonl")
    (tmp_path / "run").rename(tmp_path / "other")
    with pytest.raises(RunError, match="it or its directory was removed or renamed while the run went on"):
        file.write(line(0))
    file.close()


@pytest.mark.parametrize("text", [None, "", '{"step": 0, "att'])
def test_a_file_without_a_line_is_begun_anew(text, tmp_path):
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    assert last_line(path) is None
    file = MetricsFile(path, first_step=5)
    file.close()
    assert (file.attempt, path.read_text()) == (0, "")


def test_a_file_that_somebody_removes_is_missed_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write(line(0))
    path.unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl: can't be written: it or its directory was removed or renamed"):
        file.write(line(1))
    file.close()


def test_a_file_that_is_no_metrics_is_left_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, byte 0: not a line of metrics"):
        MetricsFile(path)
    assert path.read_text() == "{}\n"


def test_a_summary_leaves_out_the_warm_up_of_every_attempt():
    lines = [line(step, 0, 9.0 if step < 3 else 1.0) for step in range(8)]
    lines += [line(step, 1, 9.0 if step < 11 else 1.0, evaluation_loss=2.0) for step in range(8, 14)]
    lines += [line(14, 2, 1.0)]
    summary = summarise(lines, 5)
    assert (summary.num_steps, summary.num_skipped_steps, summary.num_attempts) == (15, 6, 3)
    assert summary.step_s == summary.makespan_s == 1.0
    assert (summary.first_loss, summary.last_loss) == (5.0, -9.0)
    assert summary.last_evaluation_loss == 2.0


def test_the_figures_of_a_line():
    given = {"step": 3, "loss": 2.5, "grad_norm": None, "link_bytes": {"a>b": 7}, "warnings": ["x"], "ok": True}
    assert [*figures(given)] == [("step", {}, 3.0), ("loss", {}, 2.5), ("link_bytes", {"link": "a>b"}, 7.0)]


def test_prometheus_is_told_the_newest_figures():
    pytest.importorskip("prometheus_client")
    sink = Prometheus("127.0.0.1", 0, "tiny")
    try:
        sink.write(line(0) | {"link_bytes": {"a>b": 7}})
        sink.write(line(1) | {"link_bytes": {"a>b": 8}})
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        assert 'farpipe_loss{run="tiny"} 4.0\n' in text
        assert 'farpipe_step{run="tiny"} 1.0\n' in text
        assert 'farpipe_step_seconds{run="tiny"} 1.0\n' in text
        assert 'farpipe_tokens_per_second{run="tiny"} 1.0\n' in text
        assert 'farpipe_link_bytes{link="a>b",run="tiny"} 8.0\n' in text
        assert "# HELP farpipe_loss Training loss, mean per token\n" in text
        with pytest.raises(InputError, match=rf"127\.0\.0\.1:{sink.port} can't be listened on"):
            Prometheus("127.0.0.1", sink.port)
    finally:
        sink.close()


TENSORBOARD = """
import json, sys
from pathlib import Path
from farpipe.engine.figures.sinks import TensorBoard
sink = TensorBoard(Path(sys.argv[1]), 0)
for step in range(3):
    sink.write({"step": step, "attempt": 0, "loss": 5.0 - step, "link_bytes": {"a>b": 7}})
sink.close()
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


@pytest.mark.slow
def test_tensorboard_gets_every_step(tmp_path):
    """In a process of its own: TensorBoard's imports warn of things that are not ours."""
    pytest.importorskip("tensorboard")
    command = [sys.executable, "-c", TENSORBOARD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"loss": [[0, 5.0], [1, 4.0], [2, 3.0]], "link_bytes/a>b": [[0, 7.0], [1, 7.0], [2, 7.0]]}


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({"tensorboard": True}, "tensorboard"), ({"prometheus_port": 0}, "prometheus_client")],
)
def test_a_missing_package_is_named_with_its_remedy(settings, missing, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == missing or "utils.tensorboard" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with (
        pytest.raises(InputError, match=r"pip install 'farpipe\[metrics\]'"),
        open_sinks(MetricsSettings(**settings), tmp_path, 0),
    ):
        pass


def test_nothing_is_served_or_written_unless_asked_for(tmp_path):
    with open_sinks(MetricsSettings(), tmp_path, 0) as sinks:
        assert sinks == []
    assert [*tmp_path.iterdir()] == []
    assert MetricsSettings(prometheus_port=9000).prometheus_host == "127.0.0.1"


def test_what_is_open_is_closed_when_a_later_one_fails(tmp_path, monkeypatch):
    opened = []

    class SinkOfTheTest:
        def __init__(self, *_):
            self.is_closed = False
            opened.append(self)

        def close(self):
            self.is_closed = True

    monkeypatch.setattr(sinks_module, "TensorBoard", SinkOfTheTest)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = MetricsSettings(tensorboard=True, prometheus_port=taken.getsockname()[1])
        with pytest.raises(InputError, match="can't be listened on"), open_sinks(settings, tmp_path, 0):
            pass
    assert [sink.is_closed for sink in opened] == [True]


def test_a_line_of_the_log_has_what_torchtitans_has():
    figures = line(9, loss=4.25, grad_norm=1.5, rss_max_bytes=1 << 30, tokens_per_s=7225.4, step_s=0.5671)
    figures |= {"model_flops_utilisation": 0.1234, "causal_utilisation": 0.12}
    expected = "step: 10/40  loss: 4.2500  grad_norm: 1.5000  memory: 1 GiB  step_s: 0.567  tps: 7,225  mfu: 12.34%"
    expected += "  causal_mfu: 12.00%"
    assert log_line(figures, 40) == expected
    rehearsed = figures | {
        "loss": None,
        "grad_norm": None,
        "model_flops_utilisation": None,
        "causal_utilisation": None,
        "tokens_per_s": 0.0,
    }
    assert log_line(rehearsed, 40) == "step: 10/40  memory: 1 GiB  step_s: 0.567"


def test_the_first_the_last_and_every_nth_step_are_logged():
    assert [step for step in range(25) if is_logged(step, 25, every=10)] == [0, 9, 19, 24]
    assert [step for step in range(25) if is_logged(step, 25, every=0)] == []


def test_rank_0_logs_while_it_trains(text_file, tmp_path, capfd):
    train(make_run(text_file, num_steps=4, run_fields={"metrics": {"log_every_steps": 2}}), tmp_path / "run")
    told = [text.split()[1] for text in capfd.readouterr().out.splitlines() if text.startswith("step:")]
    assert told == ["1/4", "2/4", "4/4"]


def test_a_long_run_is_summed_up_without_keeping_its_lines():
    def lines():
        for step in range(20_000):
            living.append(weakref.ref(found := _Line(line(step))))
            assert sum(ref() is not None for ref in living[-50:]) <= 3
            yield found

    living = []
    assert summarise(lines(), 0).num_steps == 20_000


class _Line(dict):
    """A line that can be watched going."""
