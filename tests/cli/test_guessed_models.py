"""What follows from a guessed model is marked wherever it is shown."""

import json
import re

import pytest

from job_files import cluster_text

CONFIG = {
    "model_type": "nobodys", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 4, "vocab_size": 1024,
}  # fmt: skip
JOB = """
[model]
hugging_face = "m"
{guess}
[training]
sequence_length = 128
global_batch = 8
[layout]
pipeline = 2
virtual = 1
data = 1
tensor = 1
{cluster}
"""


@pytest.fixture
def job(tmp_path):
    """job.toml of a model that is not known, guessed or not."""

    def write(guess="guess = true"):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
        cluster = cluster_text(device="h100", num_devices=(2, 2), latency="2 ms", bandwidth="100 Gbit/s")
        (tmp_path / "job.toml").write_text(JOB.format(guess=guess, cluster=cluster))
        return "job.toml"

    return write


@pytest.mark.parametrize("command", ["plan", "pareto", "compare", "sequences plan"])
def test_a_model_that_is_not_known_is_refused_by_every_command(command, job, farpipe):
    run = farpipe(*command.split(), job(guess=""))
    assert run.returncode == 3
    assert "model_type: 'nobodys' is not supported" in run.stderr


def test_a_plan_of_a_guess_says_so_in_its_lines(job, farpipe):
    run = farpipe("plan", job())
    assert run.returncode == 0, run.stderr
    use, cost, _, headline, *more = run.stdout.splitlines()
    assert use.startswith("nobodys (guessed): use ")
    assert re.match(r"5\.\d+ M parameters: 100 steps of ~", cost)
    assert any("~+" in line or line.startswith("No change") for line in more)
    assert headline.startswith("nobodys (guessed)")
    assert "step ~" in headline
    assert "~ a guess: 5." in run.stdout
    assert "Mean error" not in run.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "job.toml", "--no-strategies"),
        ("pareto", "job.toml", "--objective", "time,energy"),
        ("compare", "job.toml", "--method", "1f1b"),
        ("simulate", "job.toml"),
        ("sweep", "job.toml", "--over", "training.global_batch=8,16"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_marks_what_follows_from_a_guess(command, job, farpipe):
    job()
    shown = farpipe(*command)
    assert "guess" in shown.stdout, shown.stderr
    assert json.loads(farpipe(*command, "--json").stdout)["model_guessed"] is True


def test_a_plan_and_an_import_have_the_number_of_parameters(job, farpipe, tmp_path):
    found = json.loads(farpipe("plan", job(), "--no-strategies", "--json").stdout)
    assert found["num_parameters"] == found["job"]["model"]["num_layers"] * 655_872 + 2 * 1024 * 256 + 256
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "llama"}))
    (tmp_path / "train.yaml").write_text("per_device_train_batch_size: 1\nmax_seq_length: 128\nnum_processes: 2\n")
    given = ("import", "config.json", "train.yaml")
    assert json.loads(farpipe(*given, "--json").stdout)["num_parameters"] == found["num_parameters"]
    assert re.match(r"# From settings of .*\n# llama: 5\.\d+ M parameters\.\n", farpipe(*given).stdout)
