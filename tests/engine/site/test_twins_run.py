"""Trainings whose ranks are tensor- or context-parallel processes, twins: those of one process per rank."""

import json
import os
import shutil
import signal
import time
from collections import Counter

import pytest
from safetensors import safe_open

from chosen import chosen
from farpipe.core.errors import RunError
from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from farpipe.engine.stages.self_check import one_thread
from rank_processes import FAULTY_RANK, processes_of, wait_for_end_of_ranks
from trainings import folder, losses, make_run, metrics, train

pytestmark = pytest.mark.slow

SITES, HERE, THERE = (("site0", "site1"),), "site0", "site1"
OUTAGE_S = 5.0


@pytest.fixture
def make(model, text_file):
    """`make(homes, tensor=..., context=...)`: a training of replicas at `homes`, the sites of each, with such twins."""

    def training(homes=SITES, tensor=1, context=1, num_steps=6, **options):
        fields = {"transport": TransportSettings(outage_s=OUTAGE_S, timeout_s=60), "emulate_links": False}
        spec = make_run(
            text_file,
            model=model,
            num_replicas=len(homes),
            num_steps=num_steps,
            placement=tuple(range(len(homes[0]))),
            run_fields=fields,
            **{"method": "zb-h1", "checkpoint_every_steps": 2, "zero": 1} | options,
        )
        degrees = {"tensor": tensor, "context": context}
        return spec.with_plan(model=model, sites=homes[0], replicas=homes, **degrees)

    return training


@pytest.fixture
def alone(make, tmp_path):
    """Lines of metrics of one process per rank."""
    with one_thread():
        train(make(evaluate_every_steps=3), tmp_path / "alone")
    return metrics(tmp_path / "alone")


def figures(lines):
    """(loss, norm, loss of held-out text, or 0) of every step."""
    return [(line["loss"], line["grad_norm"], line["evaluation_loss"] or 0.0) for line in lines]


def assert_close(found, expected):
    assert len(found) == len(expected)
    for row, other in zip(figures(found), figures(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Directory of the run that twins do, where nobody has done it yet."""
    return tmp_path_factory.mktemp("twins") / "undisturbed"


def test_twins_train_as_one_over_two_sites(make, alone, undisturbed):
    run(make(tensor=2, evaluate_every_steps=3), undisturbed)
    assert_close(lines := metrics(undisturbed), alone)
    assert all(0 <= line["twin_skew_s"] < line["makespan_s"] for line in lines)


def test_checkpoints_of_any_degrees_are_read_by_any_others(make, alone, tmp_path):
    """Written by two replicas of two twins, two twins at each of two sites, and replicas that share sequences."""
    places = {
        "both": make(((HERE,),) * 2, tensor=2, num_steps=2),
        "twins": make(SITES, tensor=2, num_steps=3, method="1f1b"),
        "apart": make(((HERE,), (THERE,)), context=2, num_steps=4),
    }
    resumed = None
    for name, spec in places.items():
        run(spec.model_copy(update={"resume": resumed}), tmp_path / name)
        resumed = str(tmp_path / name)
    found = [line for name in places for line in metrics(tmp_path / name)]
    assert [row[:2] for row in figures(found)] == [pytest.approx(row[:2], rel=1e-5) for row in figures(alone[:4])]
    with safe_open(tmp_path / "both" / "checkpoints" / "step-2" / "rank-3.safetensors", "pt") as file:
        keys = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    name = "weight/model.layers.0.self_attn.o_proj.weight"
    assert keys[f"{name}@16,16"] == [16, 16], "a box, which is no run of the flattened matrix"
    assert not any("norm" in key for key in keys), "its twin has the same gains, and writes them"


SHARING = {
    "tensor": {"tensor": 2},
    "context": {"context": 2},
    "zero2": {"homes": SITES * 2, "zero": 2},
    "zero3": {"homes": SITES * 2, "zero": 3, "precision": "bf16"},
    "across": {"homes": ((HERE,), (THERE,)), "tensor": 2, "method": "1f1b"},
}
"""How processes share stages, in runs of four processes."""


@pytest.mark.parametrize("sharing", chosen(SHARING, 0, 3))
def test_without_a_barrier_bits_are_the_same_where_updates_are_taken_back(make, sharing, tmp_path, monkeypatch):
    options = {"num_steps": 5, "checkpoint_every_steps": 0, "weight_decay": 0.5, "clip_norm": 1e-3} | SHARING[sharing]
    specs = {barrier: make(barrier=barrier, **options) for barrier in (True, False)}
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[None, "bold"]]))
    for barrier, spec in specs.items():
        run(spec, tmp_path / str(barrier), rank_program=FAULTY_RANK)
    again = (tmp_path / "False" / "again").read_text().split()
    assert Counter(again) == dict.fromkeys("0123", 3), "all but the first, whose norm nobody knows, and the last"
    assert losses(tmp_path / "False") == losses(tmp_path / "True")
    files = [sorted(folder(tmp_path / str(barrier), 5).glob("*.safetensors")) for barrier in specs]
    assert len(files[0]) == 4
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]], "weights, moments"


def test_a_killed_twin_ends_all_at_once_and_the_restart_is_bit_equal(make, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setenv("FARPIPE_TEST_FAULT", json.dumps([[1, "optimizer"]]))
    spec, lasted_s = make(tensor=2, evaluate_every_steps=3, checkpoint_every_steps=1), []

    def on_restart(reason):
        lasted_s.append(time.monotonic() - float((tmp_path / "run" / "killed_s").read_text()))
        assert "rank 1 was killed by SIGKILL" in reason

    run(spec, tmp_path / "run", max_restarts=1, on_restart=on_restart, rank_program=FAULTY_RANK)
    assert lasted_s[0] < 50
    if not (undisturbed / "summary.json").exists():
        shutil.rmtree(undisturbed, ignore_errors=True)
        run(spec, undisturbed)
    assert losses(tmp_path / "run") == losses(undisturbed)


def test_a_stopped_twin_ends_those_that_wait_for_it_inside_a_collective(make, tmp_path):
    stopped_s = []

    def on_step(line):
        if line["step"] >= 1 and not stopped_s:
            os.kill(processes_of(tmp_path / "run")[3], signal.SIGSTOP)
            stopped_s.append(time.monotonic())

    with pytest.raises(RunError, match=r"rank 3 \(site site1\) is lost: .*the limit is 5 s \(outage_s\)"):
        run(make(tensor=2, num_steps=50), tmp_path / "run", on_step=on_step)
    assert time.monotonic() - stopped_s[0] < 60
    wait_for_end_of_ranks(tmp_path / "run")
