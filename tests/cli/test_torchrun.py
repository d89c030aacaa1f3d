"""What ``farpipe train`` does before anything runs: where the run goes, and what to type at each site."""

import json
import shlex
from itertools import pairwise

import pytest

from farpipe.errors import InputError, UsageError
from farpipe.run.directory import choose_run_dir
from farpipe.run.torchrun import torchrun_commands
from farpipe.runtime.replicas.places import Places
from trainings import make_run


def commands(spec, max_restarts=0):
    """The arguments of every torchrun that is shown, by option."""
    text = torchrun_commands(spec, "runs/x", max_restarts).replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("torchrun")]
    return [dict(pairwise(words)) for words in lines]


def placed(*sites, num_replicas=1):
    spec = make_run("text", placement=tuple(range(len(sites))), num_replicas=num_replicas)
    return spec.model_copy(update={"sites": sites, "replicas": (sites,) * num_replicas})


def test_every_site_gets_its_command():
    found = commands(placed("west", "west", "east"), max_restarts=3)
    assert [(c["--nnodes"], c["--node-rank"], c["--nproc-per-node"]) for c in found] == [
        ("2", "0", "2"),
        ("2", "1", "1"),
    ]
    assert [c["--host"] for c in found] == ["ADDRESS_OF_west", "ADDRESS_OF_east"]
    assert {c["--master-addr"] for c in found} == {"ADDRESS_OF_west"}
    assert {c["--max-restarts"] for c in found} == {"3"}


def test_replicas_are_processes_of_their_site():
    spec = placed("west", "east", num_replicas=2)
    assert isinstance(spec.places, Places)
    assert [c["--nproc-per-node"] for c in commands(spec)] == ["2", "2"]


def test_a_site_that_is_visited_twice_has_two_agents():
    assert [c["--host"] for c in commands(placed("a", "b", "a"))] == ["ADDRESS_OF_a", "ADDRESS_OF_b", "ADDRESS_OF_a"]


def make_checkpoint(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({}))


def test_a_run_goes_on_in_its_own_directory_unless_another_is_named(tmp_path):
    make_checkpoint(tmp_path / "run" / "checkpoints" / "step-3")
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    place = choose_run_dir(None, tmp_path / "run")
    assert (place.run_dir, place.resume, place.in_place) == (tmp_path / "run", None, True)
    place = choose_run_dir(tmp_path / "other", tmp_path / "run")
    assert (place.run_dir, place.resume, place.in_place) == (tmp_path / "other", str(tmp_path / "run"), False)
    one = tmp_path / "run" / "checkpoints" / "step-3"
    assert choose_run_dir(tmp_path / "other", one).resume == str(one)


def test_what_can_not_be_gone_on_from_is_refused(tmp_path):
    one = tmp_path / "run" / "checkpoints" / "step-3"
    make_checkpoint(one)
    with pytest.raises(UsageError, match="give --run-dir another directory"):
        choose_run_dir(None, one)
    with pytest.raises(InputError, match=r"no complete checkpoint in .*nowhere.checkpoints"):
        choose_run_dir(None, tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match=r"has the metrics\.jsonl of an earlier run"):
        choose_run_dir(tmp_path / "other", tmp_path / "run")


def test_a_rehearsal_does_not_go_on_from_a_checkpoint(farpipe, tmp_path):
    done = farpipe("train", "job.toml", "--device", "sleep", "--resume", tmp_path)
    assert done.returncode == 2
    assert "a rehearsal trains nothing" in done.stderr
