"""Before a run goes on in its directory: what can be compared is, and nothing is touched if it can't go on."""

import random

import pytest

from farpipe.core.errors import InputError
from farpipe.engine.figures.follower import Follower
from farpipe.engine.figures.metrics import MetricsFile, log_line, read_metrics, summarise
from farpipe.engine.launch.run import run
from trainings import make_run, train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": "cat"}, "the training text is no longer the same"),
        ({"seed": 8}, "is of a training with another seed"),
        ({"num_steps": 2}, "the checkpoint after 3 steps has all 2 steps of this run; ask for more with --steps"),
    ],
)
def test_a_run_that_can_not_go_on_is_left_as_it_is(change, words, tmp_path):
    run_dir, text_file, change = tmp_path / "run", tmp_path / "text.txt", dict(change)
    text_file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    first = make_run(text_file, num_steps=3)
    train(first, run_dir)
    first.save(run_dir / "run.json")
    (run_dir / "summary.json").unlink()
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    text_file.write_text(text_file.read_text().replace("fox", change.pop("text", "fox")))
    with pytest.raises(InputError, match=words):
        run(make_run(text_file, **({"num_steps": 6} | change)), run_dir, resume=True)
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "words"), [(3, "its 3 steps are done; ask"), (1, "are done, and 1 were asked for; ask")]
)
def test_a_whole_run_says_how_many_steps_it_has(num_steps, words, text_file, tmp_path):
    train(make_run(text_file, num_steps=3), tmp_path)
    assert (tmp_path / "summary.json").exists()
    with pytest.raises(InputError, match=words):
        run(make_run(text_file, num_steps=num_steps), tmp_path, resume=True)


@pytest.mark.slow  # starts processes
def test_a_whole_last_checkpoint_without_a_summary_is_not_done_again(text_file, tmp_path):
    spec = make_run(text_file, num_steps=3, checkpoint_every_steps=1)
    train(spec, tmp_path)
    (tmp_path / "summary.json").unlink()
    lines = (tmp_path / "metrics.jsonl").read_text()
    summary = run(spec, tmp_path, resume=True)
    assert (summary.num_steps, summary.timeline_step) == (3, None)
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert not (tmp_path / "checkpoints" / "step-3.abandoned").exists()


@pytest.mark.slow  # starts processes
def test_what_a_killed_run_was_writing_is_removed_and_files_that_are_not_the_runs_own_stay(text_file, tmp_path):
    """A run directory may be a folder with a project in it."""
    halves = {".summary.json.abcd1234", ".metrics.jsonl.a_c_1234"}
    others = {".gitlab-ci.yml", ".pre-commit-config.yaml", ".env.template", ".tmpfiles", ".summary.json.old"}
    for name in halves | others:
        (tmp_path / name).write_text("mine")
    run(make_run(text_file, num_steps=2), tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.name.startswith(".")} == others | {".lock"}
    assert {name for name in others if (tmp_path / name).read_text() == "mine"} == others


@pytest.mark.slow
def test_a_flipped_bit_in_the_metrics_stops_neither_the_launcher_nor_the_run(text_file, tmp_path):
    train(make_run(text_file, num_steps=3), tmp_path)
    path, draw = tmp_path / "metrics.jsonl", random.Random(0)
    whole = path.read_bytes()
    not_utf_8 = [(position, 7) for position in range(0, len(whole), 50)]
    for position, bit in not_utf_8 + [(draw.randrange(len(whole)), draw.randrange(8)) for _ in range(400)]:
        damaged = bytearray(whole)
        damaged[position] ^= 1 << bit
        path.write_bytes(damaged)
        Follower(path, lambda line: log_line(line, 3)).read()  # the launcher may look before the file is mended
        MetricsFile(path, first_step=3).close()
        assert summarise(read_metrics(path), None).num_steps >= 1
