"""Checkpoints that follow: every site has the newest one in full, and goes on from it without the others."""

import shutil

import pytest

from farpipe.core.spec.training import Training
from farpipe.core.step import Hop, Link, Problem, Transfer
from farpipe.engine.checkpoint.copies import NOTHING_TRAVELS
from farpipe.engine.checkpoint.folders import folder_of, newest_of_run, whole_checkpoints
from farpipe.engine.checkpoint.manifest import Manifest
from farpipe.engine.checkpoint.mirror import MIRROR_SHARE, MirrorRates
from farpipe.engine.checkpoint.transfer import MAX_PIECE_BYTES, PIECE_BYTES, piece_bytes
from farpipe.engine.checkpoint.whole_file import is_here
from farpipe.engine.replicas.places import Places
from farpipe.engine.transport.free_rate import LEAST_SHARE
from small_models import LLAMA, placed_problem
from trainings import losses, make_run, metrics, train

NUM_STEPS = 8
OPTIONS = {"model": LLAMA, "checkpoint_every_steps": 2, "num_steps": NUM_STEPS, "warmup_steps": 3, "decay": "cosine"}


@pytest.fixture(scope="module")
def undisturbed(text_file, tmp_path_factory):
    """Losses of a run without a mirror."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    train(make_run(text_file, **OPTIONS), run_dir)
    return losses(run_dir)


@pytest.fixture(scope="module")
def mirrored(text_file, tmp_path_factory):
    """A mirrored run on two sites, broken off after its checkpoint of step 4."""
    run_dir = tmp_path_factory.mktemp("mirrored") / "run"
    train(make_run(text_file, mirror=True, **OPTIONS | {"num_steps": 4, "decay_steps": NUM_STEPS}), run_dir)
    for name in ("summary.json", "timeline.json"):
        (run_dir / name).unlink()
    return run_dir


@pytest.fixture
def run_dir(mirrored, tmp_path):
    return shutil.copytree(mirrored, tmp_path / "run")


def site(run_dir, name):
    return run_dir / "sites" / name / "checkpoints"


def is_full(checkpoints, step):
    folder = folder_of(checkpoints, step)
    return all(is_here(folder / entry.name, entry) for entry in Manifest.load(folder).files)


def test_every_site_has_the_newest_checkpoint_in_full_and_the_steps_are_the_same(text_file, undisturbed, tmp_path):
    train(make_run(text_file, mirror=True, **OPTIONS), tmp_path / "run")
    assert losses(tmp_path / "run") == undisturbed
    for name in ("site0", "site1"):
        assert whole_checkpoints(site(tmp_path / "run", name))[0] == NUM_STEPS
        assert is_full(site(tmp_path / "run", name), NUM_STEPS)
        assert not [*site(tmp_path / "run", name).with_name("incoming").iterdir()]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert newest_of_run(tmp_path / "run").name == f"step-{NUM_STEPS}"


def test_the_metrics_and_the_log_name_the_newest_checkpoint_of_each_site(text_file, tmp_path, capsys):
    train(make_run(text_file, mirror=True, **OPTIONS | {"num_steps": 30}), tmp_path / "run")
    found = [line["mirrored"] for line in metrics(tmp_path / "run") if "mirrored" in line]
    assert found
    assert set(found[-1]) <= {"site0", "site1"}
    assert all(step % 2 == 0 for newest in found for step in newest.values())
    written = capsys.readouterr()
    assert "mirrored: step 30 (site" in written.err


@pytest.mark.parametrize("lost", ["site0", "site1"])
def test_one_site_goes_on_alone_from_its_own_disk_to_the_last_bit(lost, text_file, undisturbed, run_dir):
    shutil.rmtree(run_dir / "sites" / lost)
    left = "site1" if lost == "site0" else "site0"
    run = make_run(text_file, placement=(0,), mirror=True, **OPTIONS)
    alone = run.with_plan(sites=(left,), replicas=((left,),))
    train(alone, run_dir)
    assert losses(run_dir) == undisturbed
    assert whole_checkpoints(site(run_dir, left)) == [8, 6]
    assert not site(run_dir, lost).exists()


def test_a_site_that_returns_with_an_empty_disk_gets_the_checkpoint_from_the_other(text_file, undisturbed, run_dir):
    shutil.rmtree(run_dir / "sites" / "site0")
    train(make_run(text_file, mirror=True, **OPTIONS), run_dir)
    assert losses(run_dir) == undisturbed
    assert is_full(site(run_dir, "site0"), NUM_STEPS)


def test_a_run_without_a_mirror_goes_on_from_the_disks_of_sites_and_one_with_it_from_the_shared_one(
    text_file, undisturbed, run_dir, tmp_path
):
    train(make_run(text_file, **OPTIONS | {"num_steps": 6, "decay_steps": NUM_STEPS}), run_dir)
    (run_dir / "summary.json").unlink()
    assert whole_checkpoints(run_dir / "checkpoints") == [6]
    train(make_run(text_file, mirror=True, **OPTIONS), run_dir)
    assert losses(run_dir) == undisturbed


def test_damage_at_one_site_is_mended_from_the_other(text_file, undisturbed, run_dir):
    folder = folder_of(site(run_dir, "site1"), 4)
    data = bytearray((folder / "rank-1.safetensors").read_bytes())
    data[9] ^= 4  # in its table; a wrong bit of a tensor shows only when it is read
    (folder / "rank-1.safetensors").write_bytes(data)
    train(make_run(text_file, mirror=True, **OPTIONS), run_dir)
    assert losses(run_dir) == undisturbed
    steps = [line["step"] for line in metrics(run_dir)]
    assert steps == [*range(NUM_STEPS)]


def test_with_replicas_nothing_travels_and_it_says_so(text_file, tmp_path, capsys):
    run = make_run(text_file, placement=(0,), num_replicas=2, mirror=True, zero=0, **OPTIONS)
    across = run.with_plan(replicas=(("site0",), ("site1",)))
    assert all(across.mirrored_to(name) == () for name in ("site0", "site1"))
    train(across, tmp_path / "run")
    assert NOTHING_TRAVELS in capsys.readouterr().err
    files = {p.parent.parent.parent.name: p.name for p in (tmp_path / "run").rglob("step-8/*.safetensors")}
    assert files == {"site0": "rank-0.safetensors", "site1": "rank-1.safetensors"}
    shutil.rmtree(tmp_path / "run" / "sites" / "site0")
    (tmp_path / "run" / "summary.json").unlink()
    longer = across.model_copy(update={"num_steps": 9})
    train(longer, tmp_path / "run")
    assert len(losses(tmp_path / "run")) == 9


def test_with_zero_1_over_sites_all_shares_travel(text_file):
    run = make_run(text_file, placement=(0,), num_replicas=2, mirror=True, zero=1, **OPTIONS)
    across = run.with_plan(replicas=(("site0",), ("site1",)))
    assert across.mirrored_to("site0") == (1,)
    assert across.mirrored_to("site1") == (0,)


def test_a_site_needs_the_ranks_that_it_has_not_from_one_other_site():
    places = Places((("a", "b"), ("a", "c")))
    assert places.sites == ("a", "b", "c")
    assert [places.missing_at(name) for name in places.sites] == [(1,), (0, 2), (0, 2)]
    assert Places((("a",), ("b",))).missing_at("a") == ()


def on_a_link(text_file, message_bytes, bandwidth):
    """A run of two sites whose hop has a link."""
    link = Link(latency_s=0.01, bandwidth_bytes_per_s=bandwidth)
    hop = Hop(
        forward=Transfer(link="site0>site1", bytes=message_bytes),
        backward=Transfer(link="site1>site0", bytes=message_bytes),
    )
    fields = placed_problem((0, 1), 4).model_dump() | {
        "hops": (hop,),
        "links": {"site0>site1": link, "site1>site0": link},
    }
    return make_run(text_file, mirror=True, **OPTIONS).with_plan(problem=Problem.model_validate(fields))


def test_mirroring_takes_four_fifths_of_what_the_step_leaves_free(text_file):
    run = on_a_link(text_file, 1000.0, 8000.0)
    rates = MirrorRates(run, 0, {"site1": 1})
    assert rates(1) == LEAST_SHARE * 8000, "before a step is measured"
    rates.step_took(1.0)
    assert rates(1) == pytest.approx(MIRROR_SHARE * (8000 - 4 * 1000))
    rates.step_took(0.1)
    assert rates(1) == pytest.approx(MIRROR_SHARE * (8000 - 4000 / 0.73))
    for _ in range(50):
        rates.step_took(0.1)
    assert rates(1) == LEAST_SHARE * 8000, "nothing is free"
    rates.no_steps()
    assert rates(1) == 8000


def test_pieces_are_16_kib_on_slow_links_and_a_hundredth_of_a_second_on_fast_ones():
    assert piece_bytes(1e3) == piece_bytes(2.5e6) == PIECE_BYTES == 16 << 10
    assert piece_bytes(1e8) == 61 * PIECE_BYTES
    assert piece_bytes(1e12) == MAX_PIECE_BYTES


def test_a_mirror_without_checkpoints_is_refused():
    with pytest.raises(ValueError, match="keep_checkpoints is 0"):
        Training(sequence_length=8, global_batch=8, mirror=True, keep_checkpoints=0)


def test_both_sites_have_the_same_bytes(run_dir):
    one, other = (folder_of(site(run_dir, name), 4) for name in ("site0", "site1"))
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()
