import functools
import io
import json
import math
import threading
import time
from contextlib import contextmanager
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch

from chosen import chosen
from farpipe.core.errors import DivergedError, InputError, RunError, RunStoppedError
from farpipe.core.units import counted
from farpipe.engine.checkpoint import folders
from farpipe.engine.checkpoint.files import Checkpoint, Piece
from farpipe.engine.checkpoint.folders import folder_of, remove_incomplete, whole_checkpoints
from farpipe.engine.checkpoint.manifest import Manifest, Trained
from farpipe.engine.checkpoint.resume import choose
from farpipe.engine.checkpoint.writing import write_file
from farpipe.engine.executor.optimizer import learning_rate
from farpipe.engine.executor.work import Trainer
from farpipe.engine.figures.metrics import MetricsFile
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.train import train_rank
from in_process import run_ranks
from small_disks import small_disk
from small_models import LLAMA, TIED
from snapshots import write_tensors
from trainings import checkpoints, equal_states, folder, losses, make_run, metrics, state, train
from waiting import wait_until


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """`trained(**options)`: the run and the directory of a training that tests only read."""

    @functools.cache
    def run_of(**options):
        run, run_dir = make_run(text_file, **options), tmp_path_factory.mktemp("trained") / "run"
        train(run, run_dir)
        return run, run_dir

    return run_of


def assert_near(run, run_dir, reference, reference_dir):
    """Final states are equal but for the order of sums."""
    found = state(run_dir, run)
    for name, values in state(reference_dir, reference).items():
        assert torch.allclose(found[name], values, rtol=1e-2, atol=1e-5), name


TRAINED = Trained(model=LLAMA, sequence_length=6, global_batch=8, seed=7)


def write(folder, tensors, step=3):
    """A checkpoint of one file."""
    entry = write_tensors(folder, 0, "here", tensors)
    Manifest(step=step, farpipe="0", trained=TRAINED, batches_sha256="", files=(entry,)).save(folder)


def read(folder, *pieces):
    Checkpoint(folder, Manifest.load(folder)).fill(pieces)


def test_what_was_written_is_read_to_the_last_bit(tmp_path):
    matrix = torch.randn(3, 5)
    write(tmp_path / "step-3", {"weight/a": matrix, "weight/b": torch.arange(4.0)})
    out = torch.zeros(15)
    read(tmp_path / "step-3", Piece("weight/a", (3, 5), 0, out))
    assert torch.equal(out.view(3, 5), matrix)


@pytest.mark.parametrize("cuts", [(0, 15), (0, 4, 15), (0, 1, 2, 14, 15)])
@pytest.mark.parametrize("wanted", [(0, 15), (0, 7), (7, 15), (3, 4)])
def test_a_tensor_in_pieces_is_read_in_other_pieces(cuts, wanted, tmp_path):
    values = torch.randn(15)
    pieces = [Piece("weight/a", (3, 5), a, values[a:b]) for a, b in pairwise(cuts)]
    write(tmp_path / "step-3", {piece.key: piece.stored for piece in pieces})
    out = torch.zeros(wanted[1] - wanted[0])
    read(tmp_path / "step-3", Piece("weight/a", (3, 5), wanted[0], out))
    assert torch.equal(out, values[slice(*wanted)])


def test_only_the_tensors_that_are_asked_for_are_read(tmp_path):
    write(tmp_path, {"weight/a": torch.zeros(1000), "weight/b": torch.zeros(1000)})
    path = tmp_path / "rank-0.safetensors"
    damage(path, -1)  # in b, which stands last
    read(tmp_path, Piece("weight/a", (1000,), 0, torch.ones(1000)))
    with pytest.raises(InputError, match=r"rank-0\.safetensors: damaged: weight/b is not what was written"):
        read(tmp_path, Piece("weight/b", (1000,), 0, torch.ones(1000)))


def damage(path, place):
    """Change one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: damage(path, 20), "its table is not what was written"),
        (lambda path: damage(path, 3), "not the beginning of a safetensors file|its table"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"\d+ bytes, \d+ were written"),
        (lambda path: path.write_bytes(b""), "0 bytes"),
    ],
)
def test_a_damaged_file_is_named(change, words, tmp_path):
    write(tmp_path, {"weight/a": torch.zeros(10)})
    change(tmp_path / "rank-0.safetensors")
    with pytest.raises(InputError, match=rf"rank-0\.safetensors: damaged: ({words})"):
        read(tmp_path, Piece("weight/a", (10,), 0, torch.zeros(10)))


def test_a_file_of_another_site_is_asked_for(tmp_path):
    write(tmp_path, {"weight/a": torch.zeros(10)})
    (tmp_path / "rank-0.safetensors").unlink()
    words = r"weight/a is in a file that is not here; .* rank-0\.safetensors \(written at here"
    with pytest.raises(InputError, match=words):
        read(tmp_path, Piece("weight/a", (10,), 0, torch.zeros(10)))


@pytest.mark.parametrize("name", ["../step-3/rank-0.safetensors", "..", "", "rank-0.safetensors\0", "rank-x", "\0"])
def test_a_manifest_names_files_of_ranks_and_nothing_else(name, tmp_path):
    write(tmp_path / "step-3", {"weight/a": torch.zeros(10)})
    path = tmp_path / "step-3" / "manifest.json"
    path.write_text(path.read_text().replace('"rank-0.safetensors"', json.dumps(name)))
    with pytest.raises(InputError, match=r"manifest\.json: files\[0\]\.name: "):
        read(tmp_path / "step-3", Piece("weight/a", (10,), 0, torch.zeros(10)))


@pytest.mark.parametrize("start", ["x", "-1", "1" * 5000])
def test_what_is_no_piece_of_a_tensor_is_named(start, tmp_path):
    write(tmp_path, {f"weight/a@{start}": torch.zeros(10)})
    with pytest.raises(InputError, match=r"rank-0\.safetensors: weight/a@.*: not the name of a piece of a tensor"):
        read(tmp_path, Piece("weight/a", (10,), 0, torch.zeros(10)))


def test_numbers_that_are_not_finite_are_never_written(tmp_path):
    with pytest.raises(RunError, match="weight/a has numbers that are not finite"):
        write_tensors(tmp_path / "step-3", 0, "here", {"weight/a": torch.tensor([1.0, torch.nan])})
    assert not (tmp_path / "step-3" / "rank-0.safetensors").exists()


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path):
    write(tmp_path / "step-10", {"weight/a": torch.zeros(10)})
    write_tensors(tmp_path / "step-20", 0, "here", {"weight/a": torch.zeros(10)})
    assert whole_checkpoints(tmp_path) == [10]
    remove_incomplete(tmp_path, before=20)
    assert (tmp_path / "step-20").exists()
    remove_incomplete(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-10"]


@pytest.mark.slow
def test_the_newest_checkpoints_are_kept_and_the_last_step_has_one(text_file, tmp_path):
    run = make_run(text_file, num_steps=7, checkpoint_every_steps=2, keep_checkpoints=3)
    train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [7, 6, 4]
    assert {path.name for path in folder(tmp_path / "run", 7).iterdir()} == {
        *("manifest.json", "rank-0.safetensors", "rank-1.safetensors")
    }


def test_the_training_goes_on_while_a_checkpoint_is_written(text_file, tmp_path, monkeypatch):
    third_step = threading.Event()

    def patient(folder, *given):
        assert third_step.wait(60), "the third step did not begin"
        return write_file(folder, *given)

    def begins():
        steps.append(None)
        if len(steps) > 2:
            third_step.set()
        return False

    steps = []
    monkeypatch.setattr("farpipe.engine.checkpoint.checkpointer.write_file", patient)
    train(make_run(text_file, placement=(0,), num_steps=3, checkpoint_every_steps=2), tmp_path / "run", stop=begins)
    assert checkpoints(tmp_path / "run") == [3, 2]


@contextmanager
def in_third_step(monkeypatch, happens):
    """Trainings of two ranks with a checkpoint after two steps, whose files take a while; rank 1 does not begin it."""
    begin_step = Trainer.begin_step

    def slow(*given):
        time.sleep(0.4)
        return write_file(*given)

    def begin(trainer, step):
        if step == 2 and trainer._peers.rank == 1:
            happens()
        begin_step(trainer, step)

    with monkeypatch.context() as patch:
        patch.setattr("farpipe.engine.checkpoint.checkpointer.write_file", slow)
        patch.setattr(Trainer, "begin_step", begin)
        yield


@pytest.mark.parametrize("error", [ValueError("a user's"), SystemExit(0), RunError("broken"), KeyboardInterrupt()])
def test_a_checkpoint_that_was_begun_is_whole_though_a_rank_gives_up(error, text_file, tmp_path, monkeypatch):
    def gives_up():
        raise error

    run = make_run(text_file, checkpoint_every_steps=2)
    with in_third_step(monkeypatch, gives_up), pytest.raises(type(error)):
        train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [2]
    train(run, tmp_path / "run")
    train(run, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_checkpoint_is_whole_while_a_rank_hangs_in_the_next_step(text_file, tmp_path, monkeypatch):
    def waits():
        wait_until(lambda: checkpoints(tmp_path / "run") == [2], "a manifest")

    with in_third_step(monkeypatch, waits):
        train(make_run(text_file, num_steps=3, checkpoint_every_steps=2), tmp_path / "run")


def test_nobody_waits_long_for_a_checkpoint_that_another_rank_can_t_finish(text_file, tmp_path, monkeypatch):
    """Its file takes longer than those who give up may wait."""

    def gives_up():
        raise ValueError("a user's")

    run = make_run(text_file, checkpoint_every_steps=2, run_fields={"transport": TransportSettings(timeout_s=1)})
    monkeypatch.setattr("trainings.run_ranks", lambda count, work: run_ranks(count, work, timeout_s=1))
    never = threading.Event()
    with in_third_step(monkeypatch, gives_up):
        monkeypatch.setattr("farpipe.engine.checkpoint.checkpointer.write_file", lambda *given: never.wait(20))
        with pytest.raises((ValueError, RunError)):
            train(run, tmp_path / "run")
    never.set()
    assert checkpoints(tmp_path / "run") == []


def test_no_checkpoint_is_written_if_none_is_kept(text_file, tmp_path):
    train(make_run(text_file, num_steps=2, checkpoint_every_steps=1, keep_checkpoints=0), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_clock_asks_for_checkpoints_as_well(text_file, tmp_path):
    run = make_run(text_file, num_steps=3, checkpoint_every_minutes=1e-9, keep_checkpoints=9)
    train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [3, 2, 1]


CUTS = [
    ((0, 1), "gpipe", TIED),
    ((0, 1, 0, 1), "interleaved", LLAMA),
    ((0, 1, 2, 3), "zb-h1", TIED),
    ((0, 1, 1, 0), "gpipe", TIED),
    ((1, 0), "1f1b", LLAMA),
    ((0,), "1f1b", TIED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("placement", "method", "model"), CUTS)
def test_a_checkpoint_is_read_under_any_number_of_stages_any_order_and_placement(
    placement, method, model, trained, text_file, tmp_path
):
    original, original_dir = trained(model=model, checkpoint_every_steps=2)
    _, middle_dir = trained(model=model, num_steps=2)
    fields = {"resume": str(middle_dir)}
    other = make_run(text_file, model=model, placement=placement, method=method, run_fields=fields)
    train(other, tmp_path / "other")
    assert [step for step, *_ in losses(tmp_path / "other")] == [2, 3, 4, 5]
    expected, found = losses(original_dir)[2:], losses(tmp_path / "other")
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], rel=1e-5)
    assert_near(other, tmp_path / "other", original, original_dir)


REPLICAS = list(product([(1, False), (2, False), (2, True), (4, True)], repeat=2))


@pytest.mark.slow
@pytest.mark.parametrize(("written", "read"), chosen(REPLICAS, 1, 4, 6, 11, 12))
def test_a_checkpoint_is_read_under_another_number_of_replicas_with_zero1_or_without(
    written, read, trained, text_file, tmp_path
):
    (num_replicas, zero1), (other_num_replicas, other_zero1) = written, read
    options = {"clip_norm": None, "learning_rate": 1e-3}
    original, original_dir = trained(num_steps=4, **options)
    _, half_dir = trained(num_steps=2, num_replicas=num_replicas, zero1=zero1, **options)
    fields = {"resume": str(half_dir)}
    other = make_run(
        text_file, num_steps=4, num_replicas=other_num_replicas, zero1=other_zero1, run_fields=fields, **options
    )
    train(other, tmp_path / "other")
    assert_near(other, tmp_path / "other", original, original_dir)


def interrupted(run, run_dir, after):
    """Run until `after` steps are done and a rank is asked to stop, as by SIGTERM."""
    run_dir.mkdir(exist_ok=True)

    def work(peers):
        asked = iter([False] * (after - 1) + [True] * 1000)
        words = rf"stopped by SIGTERM or SIGHUP after {counted(after, 'step')}; .*step-{after} is written"
        with pytest.raises(RunStoppedError, match=words):
            train_rank(run, peers, run_dir, stop=lambda: peers.rank == 1 and next(asked))

    run_ranks(run.num_processes, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "options"),
    [(1, {}), (3, {}), (3, {"num_replicas": 2}), (3, {"num_replicas": 2, "zero1": True}), (3, {"precision": "bf16"})],
)
def test_a_run_that_was_stopped_goes_on_as_if_nothing_had_been(after, options, text_file, tmp_path):
    options = options | {"warmup_steps": 2, "decay": "cosine", "evaluate_every_steps": 2}
    run = make_run(text_file, **options)
    train(run, tmp_path / "whole")
    interrupted(run, tmp_path / "run", after)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(after))
    summary = train(run, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    evaluations = [[line["evaluation_loss"] for line in metrics(tmp_path / name)] for name in ("run", "whole")]
    assert evaluations[0] == evaluations[1]
    assert equal_states(state(tmp_path / "run", run), state(tmp_path / "whole", run))
    assert [line["attempt"] for line in metrics(tmp_path / "run")] == [0] * after + [1] * (6 - after)
    assert (summary.num_steps, summary.num_attempts) == (6, 2)


@pytest.mark.slow
def test_steps_after_the_checkpoint_are_done_and_recorded_once(text_file, tmp_path):
    run = make_run(text_file, num_steps=6, checkpoint_every_steps=2, keep_checkpoints=9)
    train(run, tmp_path / "run")
    expected, expected_state = losses(tmp_path / "run"), state(tmp_path / "run", run)
    crash(tmp_path / "run", num_steps=5)
    assert checkpoints(tmp_path / "run") == [4, 2]
    train(run, tmp_path / "run")
    assert losses(tmp_path / "run") == expected
    assert [line["attempt"] for line in metrics(tmp_path / "run")] == [0] * 4 + [1] * 2
    assert equal_states(state(tmp_path / "run", run), expected_state)


def test_what_one_rank_has_put_aside_no_other_rank_removes(tmp_path, monkeypatch):
    later, aside = folder(tmp_path, 5), tmp_path / "checkpoints" / "step-5.abandoned"
    aside.mkdir(parents=True)
    (aside / "old").touch()
    later.mkdir()
    (later / "new").touch()
    found = folders._folders(tmp_path / "checkpoints")
    monkeypatch.setattr(folders, "_folders", lambda checkpoints: found)  # all ranks have looked at the same moment
    for _ in range(2):
        folders.abandon_after(tmp_path / "checkpoints", 4)
        assert [path.name for path in aside.iterdir()] == ["new"]
    assert not later.exists()


def answer(manifests=(), damaged=()):
    return {"manifests": {str(step): f"manifest {step}" for step in manifests}, "damaged": dict.fromkeys(damaged, "x")}


def test_ranks_try_the_newest_checkpoints_first_that_any_of_them_has_and_that_are_not_beyond_the_run():
    answers = [answer([10, 20], ["30"]), answer([30, 40])]
    found = choose(answers, Path("run"), 40, is_own=False)
    assert found == [(30, "manifest 30", "x"), (20, "manifest 20", None), (10, "manifest 10", None)]
    assert [step for step, *_ in choose(answers, Path("run"), 40, is_own=True)] == [40, 30, 20, 10]
    assert choose([answer(), answer()], Path("run"), 40, is_own=True) == []
    with pytest.raises(InputError, match="after 40 steps has all 30"):
        choose(answers, Path("run"), 30, is_own=True)
    with pytest.raises(InputError, match="after 40 steps has all 10"):
        choose(answers, Path("run"), 10, is_own=False)


def test_folders_that_another_rank_renames_meanwhile_are_no_fault(tmp_path, monkeypatch):
    folder(tmp_path, 5).mkdir(parents=True)
    found = folders._folders(tmp_path / "checkpoints")
    monkeypatch.setattr(folders, "_folders", lambda checkpoints: found)
    folders.abandon_after(tmp_path / "checkpoints", 4)
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # gone after glob has looked whether it is there
    assert folders.incomplete_after(tmp_path / "checkpoints", 4) == []
    folders.remove_unfinished_files(folder(tmp_path, 5))


def crash(run_dir, num_steps):
    """Make a whole run look as if it had been killed after `num_steps` steps, in the middle of a line and a file."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[:num_steps]) + lines[num_steps][:50])
    for name in ("summary.json", "timeline.json"):
        (run_dir / name).unlink()
    for step in [step for step in checkpoints(run_dir) if step > num_steps]:
        (folder(run_dir, step) / "manifest.json").unlink()


@pytest.mark.slow
def test_a_crash_before_the_first_checkpoint_begins_again(text_file, tmp_path):
    run = make_run(text_file, num_steps=3)
    train(run, tmp_path / "run")
    expected = losses(tmp_path / "run")
    crash(tmp_path / "run", num_steps=2)
    train(run, tmp_path / "run")
    assert losses(tmp_path / "run") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rank-1.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(name, text_file, tmp_path, capsys):
    run = make_run(text_file, checkpoint_every_steps=2, keep_checkpoints=9)
    train(run, tmp_path / "run")
    expected, expected_state = losses(tmp_path / "run"), state(tmp_path / "run", run)
    crash(tmp_path / "run", num_steps=5)
    damage(folder(tmp_path / "run", 4) / name, -20)
    train(run, tmp_path / "run")
    assert losses(tmp_path / "run") == expected
    assert equal_states(state(tmp_path / "run", run), expected_state)
    lines = metrics(tmp_path / "run")
    if name != "manifest.json":
        assert lines[2]["attempt"] == 1
        assert f"step-4/{name}: damaged" in lines[2]["warnings"][0]
        assert f"step-4/{name}: damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_if_every_checkpoint_is_damaged_nothing_is_begun_anew(text_file, tmp_path):
    run = make_run(text_file, checkpoint_every_steps=2, keep_checkpoints=9)
    train(run, tmp_path / "run")
    crash(tmp_path / "run", num_steps=5)
    for step in (2, 4):
        damage(folder(tmp_path / "run", step) / "rank-1.safetensors", -1)
    with pytest.raises(InputError, match=r"no checkpoint can be used:\n.*step-4/rank-1.*\n.*step-2/rank-1"):
        train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [4, 2], "nothing was thrown away"


@pytest.mark.slow
def test_a_manifest_that_one_site_has_counts_for_all(text_file, tmp_path):
    """The crash came when rank 0 knew that all files were written, and rank 1, on another disk, did not."""
    run = make_run(text_file, checkpoint_every_steps=2)
    train(run, tmp_path / "whole")
    run_dirs = [tmp_path / name for name in ("west", "east")]
    for run_dir in run_dirs:
        run_dir.mkdir()
    middle = make_run(text_file, num_steps=4, checkpoint_every_steps=2)
    run_ranks(2, lambda peers: train_rank(middle, peers, run_dirs[peers.rank]))
    assert not (folder(run_dirs[0], 4) / "rank-1.safetensors").exists()
    (folder(run_dirs[1], 4) / "manifest.json").unlink()
    for name in ("summary.json", "timeline.json"):
        (run_dirs[0] / name).unlink()
    run_ranks(2, lambda peers: train_rank(run, peers, run_dirs[peers.rank]))
    assert losses(run_dirs[0]) == losses(tmp_path / "whole")


def test_a_training_with_other_batches_is_not_gone_on_with(text_file, tmp_path):
    train(make_run(text_file, num_steps=2), tmp_path / "run")
    fields = {"resume": str(tmp_path / "run")}
    with pytest.raises(InputError, match="is of a training with another seed"):
        train(make_run(text_file, run_fields=fields, seed=8), tmp_path / "other")
    other_text = tmp_path / "text.txt"
    other_text.write_text(text_file.read_text().replace("fox", "cat"))
    with pytest.raises(InputError, match="the training text is no longer the same"):
        train(make_run(other_text, run_fields=fields), tmp_path / "other")


def test_going_on_from_nothing_is_refused(text_file, tmp_path):
    with pytest.raises(InputError, match="there is no checkpoint to go on from"):
        train(make_run(text_file, run_fields={"resume": str(tmp_path)}), tmp_path / "run")


def test_a_run_that_is_whole_is_not_run_again(text_file, tmp_path):
    run = make_run(text_file, num_steps=2)
    train(run, tmp_path / "run")
    with pytest.raises(InputError, match="has come to its end"):
        train(run, tmp_path / "run")


@pytest.fixture
def diverging(monkeypatch):
    """Trainings do in step 3, on rank 1."""
    finish = Trainer.finish_step

    def spoilt(self, step):
        if step == 3 and self._peers.rank == 1:
            next(iter(self.torch_stages.values())).module.norm.gain.grad[0] = math.nan
        return finish(self, step)

    monkeypatch.setattr(Trainer, "finish_step", spoilt)


def test_divergence_names_the_last_good_checkpoint_and_none_follows(diverging, text_file, tmp_path):
    run = make_run(text_file, checkpoint_every_steps=1, keep_checkpoints=9)
    with pytest.raises(DivergedError, match=r"step 3: .* on rank 1 .*the last good checkpoint is .*step-3$"):
        train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [3, 2, 1]


def test_on_a_full_disk_divergence_is_still_what_all_ranks_tell(diverging, text_file, tmp_path, monkeypatch):
    """It is not worth another start, and a full disk is."""
    write = MetricsFile.write

    def full(self, line):
        if line["step"] == 2:
            raise RunError("the disk is full")
        write(self, line)

    monkeypatch.setattr(MetricsFile, "write", full)
    run = make_run(text_file, keep_checkpoints=0)
    told = []

    def work(peers):
        with pytest.raises(DivergedError, match=r"step 3: .* on rank 1 .*; the disk is full; there is no checkpoint"):
            train_rank(run, peers, tmp_path)
        told.append(peers.rank)

    run_ranks(2, work)
    assert sorted(told) == [0, 1]


@pytest.mark.slow
def test_on_a_full_disk_the_training_goes_on_to_its_end_and_earlier_checkpoints_stay(text_file, tmp_path):
    run = make_run(text_file, num_steps=6, checkpoint_every_steps=2, keep_checkpoints=9)
    train(run, tmp_path / "roomy")
    one_kib = sum(path.stat().st_size for path in folder(tmp_path / "roomy", 2).iterdir()) >> 10
    with small_disk(tmp_path / "disk", int(1.5 * one_kib) + 50) as run_dir:
        with pytest.raises(RunError, match=r"all 6 steps are done, but .*No space left.* is .*step-2; make room"):
            train(run, run_dir)
        assert checkpoints(run_dir) == [2]
        assert not folder(run_dir, 6).exists(), "nothing half-written is left"
        steps = losses(run_dir)
        assert steps == losses(tmp_path / "roomy")[: len(steps)]
        assert len(steps) >= 5
        assert not (run_dir / "summary.json").exists(), "nobody takes it for a whole run"


@pytest.mark.slow
def test_a_checkpoint_that_can_not_be_written_is_told_and_tried_again(text_file, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "farpipe.engine.checkpoint.checkpointer.write_file", failing_at(folder(tmp_path / "run", 2), rank=1)
    )
    run = make_run(text_file, num_steps=8, checkpoint_every_steps=2, keep_checkpoints=9)
    train(run, tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [8, 6, 4]
    assert not folder(tmp_path / "run", 2).exists()
    words = "no checkpoint after 2 steps: rank 1: the disk is full"
    assert [words] in [line.get("warnings") for line in metrics(tmp_path / "run")]
    assert words in capsys.readouterr().err


class FullDisk(io.StringIO):
    def write(self, text):
        raise OSError("No space left on device")


def test_a_warning_that_can_not_be_printed_does_not_end_the_training(text_file, tmp_path, monkeypatch):
    """The log is often on the disk that has no room for the checkpoint."""
    failing = failing_at(folder(tmp_path / "run", 2), rank=1)
    monkeypatch.setattr("farpipe.engine.checkpoint.checkpointer.write_file", failing)
    monkeypatch.setattr("sys.stderr", FullDisk())
    train(make_run(text_file, num_steps=4, checkpoint_every_steps=2), tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [4]


@pytest.mark.slow
def test_a_run_that_can_write_no_checkpoint_ends_at_the_second(text_file, tmp_path, monkeypatch):
    def full(folder, rank, site, tensors):
        if rank == 1:
            raise RunError("the disk is full")
        return write_file(folder, rank, site, tensors)

    monkeypatch.setattr("farpipe.engine.checkpoint.checkpointer.write_file", full)
    words = r"no checkpoint after [24] steps: rank 1: the disk is full; it is not the first .* there is no checkpoint"
    with pytest.raises(RunError, match=words):
        train(make_run(text_file, num_steps=40, checkpoint_every_steps=2), tmp_path / "run")
    assert len(metrics(tmp_path / "run")) < 40


def test_parts_of_files_go_with_the_next_whole_checkpoint_and_a_manifest_that_is_being_written_stays(
    text_file, tmp_path, monkeypatch
):
    def killed_before(folder, rank, site, tensors):
        folder.mkdir(parents=True, exist_ok=True)
        for name in (".tmp5xAb9Q", ".rank-7.safetensors.part", ".manifest.json.abcd1234"):
            (folder / name).write_text("half")
        return write_file(folder, rank, site, tensors)

    monkeypatch.setattr("farpipe.engine.checkpoint.checkpointer.write_file", killed_before)
    train(make_run(text_file, num_steps=2), tmp_path / "run")
    hidden = [path.name for path in folder(tmp_path / "run", 2).iterdir() if path.name.startswith(".")]
    assert hidden == [".manifest.json.abcd1234"], "another rank's, as far as anybody knows"


def test_a_checkpoint_that_another_process_has_completed_is_no_failure(text_file, tmp_path, monkeypatch):
    """Rank 1's disk takes no manifest, rank 0's does, and both are one."""
    save = Manifest.save

    def full_at_first(manifest, path):
        save(manifest, path)
        if threading.current_thread() is not threading.main_thread() and not full_at_first.failed:
            full_at_first.failed = True
            raise RunError("the disk is full")

    full_at_first.failed = False
    monkeypatch.setattr(Manifest, "save", full_at_first)
    train(make_run(text_file, num_steps=4), tmp_path / "run")
    assert checkpoints(tmp_path / "run") == [4]
    assert (tmp_path / "run" / "summary.json").exists()


def failing_at(place, rank):
    """`write_file`, but the disk is full for one rank's part of one checkpoint."""

    def write(folder, own_rank, site, tensors):
        if folder == place and own_rank == rank:
            raise RunError("the disk is full")
        return write_file(folder, own_rank, site, tensors)

    return write


def test_sigterm_without_room_for_its_checkpoint_names_the_one_before(text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "farpipe.engine.checkpoint.checkpointer.write_file", failing_at(folder(tmp_path / "run", 3), rank=1)
    )
    run = make_run(text_file, checkpoint_every_steps=2)
    (tmp_path / "run").mkdir()

    def work(peers):
        asked = iter([False, False, True])
        words = r"SIGTERM or SIGHUP after 3 steps, but rank 1: the disk is full; the last good checkpoint is .*step-2$"
        with pytest.raises(RunError, match=words):
            train_rank(run, peers, tmp_path / "run", stop=lambda: next(asked))

    run_ranks(2, work)


@pytest.mark.slow
def test_the_learning_rate_is_the_one_that_is_recorded_and_used(text_file, tmp_path):
    run = make_run(text_file, num_steps=4, warmup_steps=1, decay="cosine")
    train(run, tmp_path / "run")
    expected = [learning_rate(run.plan.training, step, 4) for step in range(4)]
    assert [line["learning_rate"] for line in metrics(tmp_path / "run")] == expected
    constant = make_run(text_file, num_steps=4)
    train(constant, tmp_path / "constant")
    assert not equal_states(state(tmp_path / "run", run), state(tmp_path / "constant", constant))


def test_a_manifest_reads_back(tmp_path):
    write(tmp_path, {"weight/a": torch.zeros(10)})
    manifest = Manifest.load(tmp_path)
    assert Manifest.from_json(manifest.to_json(), "x") == manifest
    body = json.loads(manifest.to_json())
    with pytest.raises(InputError, match="x: stepp: unknown key; did you mean 'step'"):
        Manifest.from_json(json.dumps(body | {"stepp": 3}), "x")
    assert folder_of(tmp_path, 3).name == "step-3"
