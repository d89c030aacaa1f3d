"""Sites that leave and return with FSDP2 inside, in real processes; the phases of a step are in tests/engine/outer."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from farpipe.engine.checkpoint.folders import checkpoint_folders, folder_of
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.stages.self_check import one_thread
from rank_processes import processes_of
from trainings import losses, make_run, metrics, train

pytestmark = pytest.mark.slow

HOMES = (("site0",), ("site0",), ("site1",), ("site1",))


@pytest.fixture
def make(model, text_file):
    """`make(homes, num_steps, **training)`: a training of four microbatches a step, with FSDP2 at each site."""

    def training(homes=HOMES, num_steps=4, **options):
        fields = {"transport": TransportSettings(timeout_s=60), "emulate_links": False}
        spec = make_run(
            text_file,
            model=model,
            placement=(0,),
            num_replicas=len(homes),
            num_steps=num_steps,
            run_fields=fields,
            **options,
        )
        elastic = {"elastic": len(homes) > 1, "zero": 3 if len(homes) > 1 else 0}
        changed = spec.plan.training.model_copy(update=elastic)
        return spec.with_plan(model=model, replicas=homes, sites=homes[0], training=changed)

    return training


def bodies(run_dir, num_steps):
    """What each site's last checkpoint has of tensors, by file."""
    found = []
    for place in checkpoint_folders(run_dir)[1:]:
        files = sorted(folder_of(place, num_steps).glob("*.safetensors"))
        data = [path.read_bytes() for path in files]
        found.append([one[8 + int.from_bytes(one[:8], "little") :] for one in data])
    return found


def test_sites_with_fsdp_inside_train_as_one_replica(make, tmp_path):
    with one_thread():
        train(make(homes=(("site0",),)), tmp_path / "alone")
    run(make(), tmp_path / "sites")
    found, expected = losses(tmp_path / "sites"), losses(tmp_path / "alone")
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.nightly
def test_a_site_of_several_processes_is_killed_and_all_bits_are_those_of_the_undisturbed_run(make, tmp_path):
    num_steps = 40
    run(make(num_steps=num_steps), tmp_path / "calm")
    killed = []

    def kill(line):
        if line["step"] == 10:
            killed.extend(ranks_of_site(tmp_path / "run", "site1"))
            assert len(killed) == 2
            for process in killed:
                os.kill(process, signal.SIGKILL)

    run(make(num_steps=num_steps), tmp_path / "run", on_step=kill)
    assert losses(tmp_path / "run") == losses(tmp_path / "calm")
    events = [event for line in metrics(tmp_path / "run") for event in line.get("site_events", ())]
    assert [event["site"] for event in events if event["kind"] == "lost"] == ["site0"]
    disturbed, calm = bodies(tmp_path / "run", num_steps), bodies(tmp_path / "calm", num_steps)
    assert disturbed[0] == calm[0] == calm[1]
    assert not processes_of(tmp_path / "run")


def ranks_of_site(run_dir, site):
    """Process ids of the ranks of one site."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            is_rank = b"farpipe.engine.launch.rank_main" in words and str(run_dir).encode() in words
            is_guard = any(word.endswith(b"guard.py") for word in words)
            variables = (process / "environ").read_bytes().split(b"\0")
            if is_rank and not is_guard and f"FARPIPE_SITE={site}".encode() in variables:
                found.append(int(process.name))
    return found
