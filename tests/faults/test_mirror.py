"""Mirrored checkpoints when processes are killed, disks are full, bytes are wrong and clocks differ."""

import os
import signal
import threading

import pytest

from farpipe.core.step import Hop, Link, Problem, Transfer
from farpipe.engine.checkpoint import transfer
from farpipe.engine.checkpoint.folders import folder_of, whole_checkpoints
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.checkpoint.whole_file import check_file, is_here
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from rank_processes import processes_of
from small_disks import small_disk
from small_models import LLAMA, placed_problem
from trainings import losses, make_run, metrics, train
from waiting import wait_until

pytestmark = pytest.mark.slow  # starts processes

NUM_STEPS = 16
WIDE = LLAMA.model_copy(update={"hidden": 64, "ffn_hidden": 192})
"""Files of some megabytes."""
BANDWIDTH = 1.5e6
PAUSE_S = 0.1


def make(text_file, num_steps=NUM_STEPS, **options):
    """Two sites on a slow emulated link, with mirrored checkpoints."""
    link = Link(latency_s=0.01, bandwidth_bytes_per_s=BANDWIDTH)
    ends = ("site0>site1", "site1>site0")
    hop = Hop(forward=Transfer(link=ends[0], bytes=3072), backward=Transfer(link=ends[1], bytes=3072))
    fields = placed_problem((0, 1), 4).model_dump() | {"hops": (hop,), "links": dict.fromkeys(ends, link)}
    fields = fields | {"stages": placed_problem((0, 1), 4).stages, "ranks": placed_problem((0, 1), 4).ranks}
    options = {"checkpoint_every_steps": 4, "model": WIDE, "mirror": True, "num_steps": num_steps} | options
    settings = {"transport": TransportSettings(timeout_s=60, connect_timeout_s=60)}
    return make_run(text_file, run_fields=settings, **options).with_plan(problem=Problem.model_validate(fields))


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(make_run(text_file, model=WIDE, num_steps=NUM_STEPS), run_dir)
    return losses(run_dir)


def parts(run_dir):
    return [*run_dir.glob("sites/*/incoming/*.part")]


def kill_while_mirroring(run_dir, victims):
    """Kill these ranks in the middle of the first file, from a thread."""

    def kill():
        wait_until(lambda: any(p.stat().st_size > 3 * transfer.PIECE_BYTES for p in parts(run_dir)), "a part was there")
        found = processes_of(run_dir)
        for rank in victims:
            os.kill(found[rank], signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def expect_full_everywhere(run_dir, step=NUM_STEPS):
    for name in ("site0", "site1"):
        folder = folder_of(run_dir / "sites" / name / "checkpoints", step)
        for entry in Manifest.load(folder).files:
            assert is_here(folder / entry.name, entry), (name, entry.name)
            check_file(folder / entry.name, entry)


@pytest.mark.parametrize("victims", [(0, 1), (1,)])
def test_a_mirror_that_is_cut_in_the_middle_goes_on_at_the_byte(victims, text_file, undisturbed, program, tmp_path):
    spec, run_dir, left = make(text_file), tmp_path / "run", {}

    def on_restart(reason):
        left.update({path: (path.stat().st_ino, path.read_bytes()) for path in parts(run_dir)})

    kill_while_mirroring(run_dir, victims)
    run(spec, run_dir, max_restarts=1, on_restart=on_restart, rank_program=program(pause_s=PAUSE_S))
    assert losses(run_dir) == undisturbed
    assert left
    step = {int(path.name.split("-")[1]) for path in left}
    assert step == {4}
    expect_full_everywhere(run_dir)
    warnings = [text for line in metrics(run_dir) for text in line.get("warnings", ())]
    assert not [text for text in warnings if "mirror" in text]


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_has_come_is_not_sent_again_unless_it_is_damaged(is_wrong, text_file, tmp_path, monkeypatch):
    run_dir, spec, sent = tmp_path / "run", make(text_file, num_steps=4), []
    train(spec, run_dir)
    (run_dir / "summary.json").unlink()
    whole = run_dir / "sites" / "site1" / "checkpoints" / "step-4" / "rank-0.safetensors"
    data = whole.read_bytes()
    entry = next(e for e in Manifest.load(whole.parent).files if e.name == whole.name)
    whole.unlink()
    begun = bytearray(data[: len(data) // 2])
    begun[-1] ^= 4 * is_wrong
    transfer.part_of(run_dir / "sites" / "site1" / "incoming", 4, entry).write_bytes(begun)
    send = transfer.Sender._send

    def counted(self, one):
        at = one.at
        found = send(self, one)
        if found and (one.step, one.entry.name) == (4, whole.name):
            sent.append(at)
        return found

    monkeypatch.setattr(transfer.Sender, "_send", counted)
    train(spec.model_copy(update={"num_steps": 5}), run_dir)
    assert sent[0] == len(data) // 2
    assert (0 in sent) == is_wrong
    assert whole.read_bytes() == data


@pytest.mark.parametrize("looks", [True, False])
def test_a_full_disk_at_one_site_is_told_and_the_training_goes_on(looks, text_file, undisturbed, tmp_path, monkeypatch):
    """`looks`: whether there is room is found out before, or only when the disk takes no more."""
    spec = make_run(
        text_file, model=WIDE, mirror=True, num_steps=NUM_STEPS, keep_checkpoints=1, checkpoint_every_steps=8
    )
    train(spec.model_copy(update={"num_steps": 1}), tmp_path / "roomy")
    own = (tmp_path / "roomy/sites/site1/checkpoints/step-1/rank-1.safetensors").stat().st_size
    run_dir = tmp_path / "run"
    (run_dir / "sites").mkdir(parents=True)
    if not looks:
        monkeypatch.setattr(transfer, "has_room", lambda *_: True)
    with small_disk(run_dir / "sites" / "site1", int(1.6 * own) >> 10 if not looks else int(2.6 * own) >> 10):
        try:
            train(spec, run_dir)
        except Exception as error:
            assert not looks, error
            assert "No space left" in str(error), "the last checkpoint itself had no room"
        assert losses(run_dir) == undisturbed[: len(losses(run_dir))]
        warnings = [text for line in metrics(run_dir) for text in line.get("warnings", ())]
        why = "no room" if looks else "No space left"
        assert any("not mirrored at site1" in text and why in text for text in warnings), warnings
        if looks:
            assert whole_checkpoints(run_dir / "sites" / "site1" / "checkpoints") == [NUM_STEPS]
        assert not [*run_dir.glob("sites/site1/incoming/*")]
    newest = folder_of(run_dir / "sites" / "site0" / "checkpoints", 8 if not looks else NUM_STEPS)
    assert all(is_here(newest / entry.name, entry) for entry in Manifest.load(newest).files), "the other has all"


def test_clocks_that_differ_change_nothing(text_file, undisturbed, program, tmp_path):
    run(make(text_file), tmp_path / "run", rank_program=program(skews=[0, 3600_000_000_000], pause_s=0.02))
    assert losses(tmp_path / "run") == undisturbed
    expect_full_everywhere(tmp_path / "run")
