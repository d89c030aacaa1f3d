"""Manifests that are damaged: the run says so and begins nothing anew; what was there stays as it was."""

import json
import shutil

import pytest

from farpipe.core.errors import InputError
from farpipe.engine.checkpoint.manifest import Manifest, find_manifests
from farpipe.engine.launch.directory import choose_run_dir, next_log_dir, open_run_dir, what_is_left
from farpipe.engine.train import train_rank
from in_process import run_ranks
from trainings import checkpoints, folder, losses, make_run, metrics, train


@pytest.fixture(scope="module")
def broken_off(text_file, tmp_path_factory):
    """A run directory whose run ended after step 4 of 6 with checkpoints at 2 and 4, and the run that goes on."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    train(make_run(text_file, num_steps=4, checkpoint_every_steps=2), run_dir)
    (run_dir / "summary.json").unlink()
    return run_dir, make_run(text_file, num_steps=6, checkpoint_every_steps=2)


@pytest.fixture
def copied(broken_off, tmp_path):
    original, spec = broken_off
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run", spec


def content(run_dir):
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}


def damage(run_dir, step, change=lambda text: text.replace("sequence_length", "sequence_lenght")):
    path = folder(run_dir, step) / "manifest.json"
    text = path.read_text()
    path.write_text(change(text))
    assert path.read_text() != text


@pytest.mark.slow
def test_every_changed_byte_of_a_manifest_is_found_or_changes_nothing(broken_off, tmp_path):
    """A byte of white space between two values means nothing; no other may be taken as it stands."""
    run_dir, _ = broken_off
    written, path = Manifest.load(folder(run_dir, 4)), tmp_path / "manifest.json"
    data = (folder(run_dir, 4) / "manifest.json").read_bytes()
    num_found = 0
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        try:
            assert Manifest.load(tmp_path) == written, place
        except InputError as error:
            assert "manifest.json" in str(error)
            num_found += 1
    assert num_found > len(data) * 0.8


def test_another_step_in_a_manifest_is_found(broken_off, tmp_path):
    run_dir, _ = broken_off
    text = (folder(run_dir, 4) / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace('"step": 4', '"step": 0'))
    with pytest.raises(InputError, match=r"manifest\.json: damaged: its content does not match its sha256"):
        Manifest.load(tmp_path)


def test_a_manifest_in_the_folder_of_another_step_is_found(copied):
    run_dir, _ = copied
    shutil.copy(folder(run_dir, 2) / "manifest.json", folder(run_dir, 4) / "manifest.json")
    found, damaged = find_manifests(run_dir / "checkpoints")
    assert [*found] == [2]
    assert "is of step 2, not 4" in damaged[4]


def test_a_manifest_without_its_digest_is_damaged(broken_off, tmp_path):
    run_dir, _ = broken_off
    body = json.loads((folder(run_dir, 4) / "manifest.json").read_text())
    del body["sha256"]
    (tmp_path / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(InputError, match=r"manifest\.json: damaged: its content does not match its sha256"):
        Manifest.load(tmp_path)


def test_when_all_manifests_are_damaged_nothing_begins_anew_and_nothing_is_changed(copied):
    run_dir, spec = copied
    for step in (2, 4):
        damage(run_dir, step)
    before, words = (
        content(run_dir),
        r"no checkpoint can be used:(.|\n)*step-4.manifest\.json(.|\n)*step-2.manifest\.json",
    )
    assert choose_run_dir(None, run_dir).in_place
    with pytest.raises(InputError, match=words):
        open_run_dir(spec, run_dir, resume=True)
    with pytest.raises(InputError, match=words):  # under torchrun nobody else looks before the ranks do
        run_ranks(2, lambda peers: train_rank(spec, peers, run_dir))
    assert content(run_dir) == before


@pytest.mark.slow
def test_a_damaged_newest_manifest_is_told_and_the_checkpoint_before_is_taken(copied, text_file, tmp_path):
    run_dir, spec = copied
    damage(run_dir, 4)
    open_run_dir(spec, run_dir, resume=True)
    train(spec, run_dir)
    assert [line["step"] for line in metrics(run_dir)] == [*range(6)]
    warnings = [warning for line in metrics(run_dir) for warning in line.get("warnings", ())]
    assert len(warnings) == 1
    assert "skipped a checkpoint" in warnings[0]
    assert "step-4/manifest.json: trained.model.max_sequence_lenght: unknown key" in warnings[0]
    assert (run_dir / "checkpoints" / "step-4.abandoned" / "rank-0.safetensors").exists()
    train(make_run(text_file, num_steps=6), tmp_path / "undisturbed")
    assert losses(run_dir) == losses(tmp_path / "undisturbed")


def test_a_manifest_that_vanished_is_said_and_the_checkpoint_before_is_taken(copied):
    run_dir, spec = copied
    (folder(run_dir, 4) / "manifest.json").unlink()
    open_run_dir(spec, run_dir, resume=True)
    train(spec, run_dir)
    warnings = [warning for line in metrics(run_dir) for warning in line.get("warnings", ())]
    assert warnings == [f"skipped a checkpoint: {folder(run_dir, 4)}: has files, but no manifest.json"]


def test_a_start_that_finds_no_checkpoint_keeps_what_earlier_ones_have_left(copied):
    run_dir, spec = copied
    for step in (2, 4):
        (folder(run_dir, step) / "manifest.json").unlink()
    before = (run_dir / "metrics.jsonl").read_text()
    train(spec, run_dir)
    assert (run_dir / "metrics-0.jsonl").read_text() == before
    assert [(line["step"], line["attempt"]) for line in metrics(run_dir)] == [(step, 1) for step in range(6)]
    for step in (2, 4):
        assert (run_dir / "checkpoints" / f"step-{step}.abandoned" / "rank-1.safetensors").exists()
    assert checkpoints(run_dir)[0] == 6


def test_a_directory_with_checkpoints_is_not_taken_for_a_new_run(copied):
    run_dir, spec = copied
    for name in ("metrics.jsonl", "timeline.json"):
        (run_dir / name).unlink()
    with pytest.raises(InputError, match=r"has the checkpoints of an earlier run; .* continue with --resume"):
        open_run_dir(spec, run_dir, resume=False)


def test_logs_of_earlier_starts_stay(tmp_path):
    for expected in ("logs", "logs/restart-1", "logs/restart-2"):
        assert next_log_dir(tmp_path) == tmp_path / expected
        (tmp_path / expected).mkdir()
        (tmp_path / expected / "rank-0.log").write_text("words")


def test_an_interrupted_run_says_how_far_it_came(copied, tmp_path):
    run_dir, _ = copied
    newest = run_dir / "checkpoints" / "step-4"
    (run_dir / "run.json").touch()
    assert what_is_left(run_dir) == f"at step 4. Newest checkpoint: {newest}; continue with --resume {run_dir}"
    (tmp_path / "empty").mkdir()
    assert what_is_left(tmp_path / "empty") == "before the first step. No checkpoint was written"
    moved = tmp_path / "moved"
    assert what_is_left(moved) == f"while {moved} was removed or renamed; what it had is where it was moved to"
    (run_dir / "run.json").unlink()
    assert what_is_left(run_dir) == f"while {run_dir} was removed or renamed; what it had is where it was moved to"
