"""Trainings to break, and what they come to when nothing happens."""

import functools
import json
from pathlib import Path

import pytest

from farpipe.engine.launch.run import run
from farpipe.engine.run_settings import TransportSettings
from proxies import Proxy
from trainings import losses, make_run, state

RANK = Path(__file__).with_name("rank.py")
NUM_STEPS = 40


@pytest.fixture(scope="session")
def make(text_file):
    """`make(num_replicas, num_steps=..., **transport)`: a training on two stages with a checkpoint every fifth step."""

    def training(num_replicas=1, num_steps=NUM_STEPS, **transport):
        fields = {
            "transport": TransportSettings(**{"timeout_s": 60, "connect_timeout_s": 60, "outage_s": 60} | transport),
            "emulate_links": False,
        }
        options = {"checkpoint_every_steps": 5, "warmup_steps": 3, "decay": "cosine", "zero1": num_replicas > 1}
        return make_run(
            text_file,
            num_replicas=num_replicas,
            num_steps=num_steps,
            run_fields=fields,
            decay_steps=NUM_STEPS,
            **options,
        )

    return training


@pytest.fixture(scope="session")
def undisturbed(make, tmp_path_factory):
    """`undisturbed(num_replicas)`: losses and final state of a training that nothing happens to."""

    @functools.cache
    def reference(num_replicas):
        spec, run_dir = make(num_replicas), tmp_path_factory.mktemp("undisturbed") / "run"
        run(spec, run_dir)
        return losses(run_dir), state(run_dir, spec)

    return reference


@pytest.fixture
def program(monkeypatch):
    """The program of ranks in bad surroundings: `program(*arguments, proxy=..., skews=..., slow=..., pause_s=...)`."""

    def of(*arguments, **surroundings):
        for name, value in surroundings.items():
            monkeypatch.setenv(f"FARPIPE_TEST_{name.upper()}", json.dumps(value))
        return (str(RANK), *map(str, arguments))

    return of


@pytest.fixture
def proxy():
    between = Proxy(seed=4)
    yield between
    between.close()
